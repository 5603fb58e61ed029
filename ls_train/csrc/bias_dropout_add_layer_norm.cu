// sum = residual + dropout(x + bias), y = LN(sum) and the backward; the kernels are in layer_norm.cuh and
// layer_norm_bwd.cuh.
#include "layer_norm_bwd.cuh"

namespace ls_train {

cudaError_t bias_dropout_add_layer_norm_fwd(const TensorRef& y, const TensorRef& sum, const TensorRef& mean,
                                            const TensorRef& rstd, const TensorRef& x, const TensorRef& bias,
                                            const TensorRef& residual, const TensorRef& weight,
                                            const TensorRef& norm_bias, const TensorRef& seed, const TensorRef& rows,
                                            double eps, double p, int64_t offset, cudaStream_t stream) {
  return dispatch_type(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    NormForward<T> a = {};
    a.y = y.as<T>();
    a.sum = sum.as<T>();
    a.mean = mean.as<float>();
    a.rstd = rstd.as<float>();
    a.x = x.as<T>();
    a.bias = bias.as<T>();
    a.residual = residual.as<T>();
    a.weight = weight.as<T>();
    a.norm_bias = norm_bias.as<T>();
    a.rows = rows.as<int32_t>();
    a.n = x.sizes[0];
    a.columns = static_cast<int>(x.sizes[1]);
    a.eps = static_cast<float>(eps);
    a.dropout = make_dropout(seed, p, offset);
    return launch_layer_norm_fwd<T, true>(a, stream);
  });
}

cudaError_t bias_dropout_add_layer_norm_bwd(const TensorRef& dx, const TensorRef& dresidual, const TensorRef& dbias,
                                            const TensorRef& dweight, const TensorRef& dnorm_bias,
                                            const TensorRef& workspace, const TensorRef& partial_rows,
                                            const TensorRef& dy, const TensorRef& dsum, const TensorRef& sum,
                                            const TensorRef& mean, const TensorRef& rstd, const TensorRef& weight,
                                            const TensorRef& seed, const TensorRef& rows, double p, int64_t offset,
                                            bool accumulate, cudaStream_t stream) {
  return dispatch_type(sum.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    NormBackward<T> a = {};
    a.dx = dx.as<T>();
    a.dresidual = dresidual.as<T>();
    a.dy = dy.as<T>();
    a.dsum = dsum.as<T>();
    a.sum = sum.as<T>();
    a.mean = mean.as<float>();
    a.rstd = rstd.as<float>();
    a.weight = weight.as<T>();
    a.workspace = workspace.as<float>();
    a.rows = rows.as<int32_t>();
    a.n = sum.sizes[0];
    a.columns = static_cast<int>(sum.sizes[1]);
    a.has_dbias = static_cast<bool>(dbias);
    a.dropout = make_dropout(seed, p, offset);
    const ColumnSums sums = {{dweight.data, dnorm_bias.data, dbias.data}, dbias ? 3 : 2};
    return launch_layer_norm_bwd<T, true>(a, sums, sum.dtype, accumulate, partial_rows, stream);
  });
}

}  // namespace ls_train
