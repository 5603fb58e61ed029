#include "attention.cuh"
#include "ops.h"

namespace ls_train {

cudaError_t attention_bwd(const TensorRef& dq, const TensorRef& dk, const TensorRef& dv, const TensorRef& workspace,
                          const TensorRef& dout, const TensorRef& q, const TensorRef& k, const TensorRef& v,
                          const TensorRef& out, const TensorRef& lse, const TensorRef& cu_q, const TensorRef& cu_k,
                          const TensorRef& seed, int64_t max_q, int64_t max_k, bool causal, double scale, double p,
                          int64_t offset, cudaStream_t stream) {
  Attention a = attention_arguments(q, k, v, out, lse, cu_q, cu_k, seed, causal, scale, p, offset);
  a.dout = head_rows(dout);
  a.dq = head_rows(dq);
  a.dk = head_rows(dk);
  a.dv = head_rows(dv);
  a.delta = workspace.as<float>();
  return attention_bwd_plain(a, q.dtype, max_q, max_k, stream);
}

}  // namespace ls_train
