#include "attention.cuh"
#include "ops.h"

namespace ls_train {

cudaError_t attention_fwd(const TensorRef& out, const TensorRef& lse, const TensorRef& q, const TensorRef& k,
                          const TensorRef& v, const TensorRef& cu_q, const TensorRef& cu_k, const TensorRef& seed,
                          int64_t max_q, int64_t max_k, bool causal, double scale, double p, int64_t offset,
                          cudaStream_t stream) {
  const Attention a = attention_arguments(q, k, v, out, lse, cu_q, cu_k, seed, causal, scale, p, offset);
  return attention_fwd_plain(a, q.dtype, max_q, stream);
}

}  // namespace ls_train
