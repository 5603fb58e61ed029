// y = LN(x) and its backward; the kernels are in layer_norm.cuh and layer_norm_bwd.cuh.
#include "layer_norm_bwd.cuh"

namespace ls_train {

cudaError_t layer_norm_fwd(const TensorRef& y, const TensorRef& mean, const TensorRef& rstd, const TensorRef& x,
                           const TensorRef& weight, const TensorRef& bias, const TensorRef& rows, double eps,
                           cudaStream_t stream) {
  return dispatch_type(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    NormForward<T> a = {};
    a.y = y.as<T>();
    a.mean = mean.as<float>();
    a.rstd = rstd.as<float>();
    a.x = x.as<T>();
    a.weight = weight.as<T>();
    a.norm_bias = bias.as<T>();
    a.rows = rows.as<int32_t>();
    a.n = x.sizes[0];
    a.columns = static_cast<int>(x.sizes[1]);
    a.eps = static_cast<float>(eps);
    return launch_layer_norm_fwd<T, false>(a, stream);
  });
}

cudaError_t layer_norm_bwd(const TensorRef& dx, const TensorRef& dweight, const TensorRef& dbias,
                           const TensorRef& workspace, const TensorRef& partial_rows, const TensorRef& dy,
                           const TensorRef& dresidual, const TensorRef& x, const TensorRef& mean, const TensorRef& rstd,
                           const TensorRef& weight, const TensorRef& rows, bool accumulate, cudaStream_t stream) {
  return dispatch_type(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    NormBackward<T> a = {};
    a.dresidual = dx.as<T>();
    a.dy = dy.as<T>();
    a.dsum = dresidual.as<T>();
    a.sum = x.as<T>();
    a.mean = mean.as<float>();
    a.rstd = rstd.as<float>();
    a.weight = weight.as<T>();
    a.workspace = workspace.as<float>();
    a.rows = rows.as<int32_t>();
    a.n = x.sizes[0];
    a.columns = static_cast<int>(x.sizes[1]);
    const ColumnSums sums = {{dweight.data, dbias.data}, 2};
    return launch_layer_norm_bwd<T, false>(a, sums, x.dtype, accumulate, partial_rows, stream);
  });
}

}  // namespace ls_train
