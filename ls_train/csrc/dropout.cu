// y = dropout(x), also its own backward: the kernel of bias_dropout_add.cuh without bias and residual.
// Reads x once, writes y once: 2 * N * C * sizeof(T) bytes.
#include "bias_dropout_add.cuh"

namespace ls_train {

cudaError_t dropout_fwd(const TensorRef& y, const TensorRef& x, const TensorRef& seed, const TensorRef& rows, double p,
                        int64_t offset, cudaStream_t stream) {
  const TensorRef none;
  return launch_bias_dropout_add_fwd(y, x, none, none, rows, make_dropout(seed, p, offset), stream);
}

}  // namespace ls_train
