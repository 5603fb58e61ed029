// Every launcher, one declaration each: the operator's schema (ls_train/ops/<op>.py), then the stream.
//
// Launchers allocate nothing, keep no state, launch on `stream` with a configuration that depends on shapes, alignment
// and host scalars alone (so a captured graph replays correctly) and return the first CUDA error. bindings.cpp has
// checked types, shapes and contiguity; an optional tensor that is absent converts to false.
//
// T: float, half or bfloat16, one type for all activations and parameters of a call. N packed tokens, C model width,
// B batch, T query length, S key length, H heads, D head dim, V vocabulary. rows: int32 (1,), number of used rows;
// rows from there on are written as zeros and enter no reduction. seed: int64 (1,). Row tensors are contiguous (N, C).
// workspace: float scratch for partial column sums, at least sums * min(N, kMaxRowBlocks) * C floats. partial_rows:
// int64 (1,) in host memory. With it the partial rows [sum][row][C] stay in the workspace, their number is written
// there and the gradients are left to column_sum.
#pragma once

#include <cuda_runtime_api.h>

#include "tensor_ref.h"

namespace ls_train {

// Most partial rows that a column reduction keeps in its workspace; ops/*.py size the workspaces by the same number.
constexpr int kMaxRowBlocks = 264;

// partial: (rows, columns) float; gradient: (columns,) T
struct ColumnSum {
  void* gradient;
  const float* partial;
  int rows, columns;
};
// Adds up the partial rows of each sum, into what the gradients hold with accumulate. No two gradients may overlap.
cudaError_t column_sum(const ColumnSum* sums, int count, DType dtype, bool accumulate, cudaStream_t stream);

// x, y: (N, C) T; mean, rstd: (N,) float; weight, bias: (C,) T
cudaError_t layer_norm_fwd(const TensorRef& y, const TensorRef& mean, const TensorRef& rstd, const TensorRef& x,
                           const TensorRef& weight, const TensorRef& bias, const TensorRef& rows, double eps,
                           cudaStream_t stream);
cudaError_t layer_norm_bwd(const TensorRef& dx, const TensorRef& dweight, const TensorRef& dbias,
                           const TensorRef& workspace, const TensorRef& partial_rows, const TensorRef& dy,
                           const TensorRef& dresidual, const TensorRef& x, const TensorRef& mean, const TensorRef& rstd,
                           const TensorRef& weight, const TensorRef& rows, bool accumulate, cudaStream_t stream);

// x, residual, y: (N, C) T; bias, dbias: (C,) T
cudaError_t bias_dropout_add_fwd(const TensorRef& y, const TensorRef& x, const TensorRef& bias,
                                 const TensorRef& residual, const TensorRef& seed, const TensorRef& rows, double p,
                                 int64_t offset, cudaStream_t stream);
cudaError_t bias_dropout_add_bwd(const TensorRef& dx, const TensorRef& dbias, const TensorRef& workspace,
                                 const TensorRef& partial_rows, const TensorRef& dy, const TensorRef& seed,
                                 const TensorRef& rows, double p, int64_t offset, bool accumulate, cudaStream_t stream);

// sum = residual + dropout(x + bias), y = LN(sum): (N, C) T; mean, rstd: (N,) float; weight, norm_bias, bias: (C,) T
cudaError_t bias_dropout_add_layer_norm_fwd(const TensorRef& y, const TensorRef& sum, const TensorRef& mean,
                                            const TensorRef& rstd, const TensorRef& x, const TensorRef& bias,
                                            const TensorRef& residual, const TensorRef& weight,
                                            const TensorRef& norm_bias, const TensorRef& seed, const TensorRef& rows,
                                            double eps, double p, int64_t offset, cudaStream_t stream);
cudaError_t bias_dropout_add_layer_norm_bwd(const TensorRef& dx, const TensorRef& dresidual, const TensorRef& dbias,
                                            const TensorRef& dweight, const TensorRef& dnorm_bias,
                                            const TensorRef& workspace, const TensorRef& partial_rows,
                                            const TensorRef& dy, const TensorRef& dsum, const TensorRef& sum,
                                            const TensorRef& mean, const TensorRef& rstd, const TensorRef& weight,
                                            const TensorRef& seed, const TensorRef& rows, double p, int64_t offset,
                                            bool accumulate, cudaStream_t stream);

// x, y, saved: (N, C) T; bias, dbias: (C,) T. saved is y for relu and x otherwise.
cudaError_t bias_activation_dropout_fwd(const TensorRef& y, const TensorRef& x, const TensorRef& bias,
                                        const TensorRef& seed, const TensorRef& rows, double p, int64_t offset,
                                        Activation activation, cudaStream_t stream);
cudaError_t bias_activation_dropout_bwd(const TensorRef& dx, const TensorRef& dbias, const TensorRef& workspace,
                                        const TensorRef& partial_rows, const TensorRef& dy, const TensorRef& saved,
                                        const TensorRef& bias, const TensorRef& seed, const TensorRef& rows, double p,
                                        int64_t offset, Activation activation, bool accumulate, cudaStream_t stream);

// q, dq: (Nq, H, D) T, k, v, dk, dv: (Nk, H, D) T, last dimension contiguous, row and head strides free;
// out, dout: (Nq, H, D) T contiguous; lse: (Nq, H) float; cu_q, cu_k: (B + 1,) int32
cudaError_t attention_fwd(const TensorRef& out, const TensorRef& lse, const TensorRef& q, const TensorRef& k,
                          const TensorRef& v, const TensorRef& cu_q, const TensorRef& cu_k, const TensorRef& seed,
                          int64_t max_q, int64_t max_k, bool causal, double scale, double p, int64_t offset,
                          cudaStream_t stream);
cudaError_t attention_bwd(const TensorRef& dq, const TensorRef& dk, const TensorRef& dv, const TensorRef& workspace,
                          const TensorRef& dout, const TensorRef& q, const TensorRef& k, const TensorRef& v,
                          const TensorRef& out, const TensorRef& lse, const TensorRef& cu_q, const TensorRef& cu_k,
                          const TensorRef& seed, int64_t max_q, int64_t max_k, bool causal, double scale, double p,
                          int64_t offset, cudaStream_t stream);

// x, y, probs: (B, H, T, S) T; key_padding_mask: (B, S) bool, true where padded
cudaError_t softmax_dropout_fwd(const TensorRef& y, const TensorRef& probs, const TensorRef& x,
                                const TensorRef& key_padding_mask, const TensorRef& seed, bool causal, double p,
                                int64_t offset, cudaStream_t stream);
cudaError_t softmax_dropout_bwd(const TensorRef& dx, const TensorRef& dy, const TensorRef& probs, const TensorRef& seed,
                                double p, int64_t offset, cudaStream_t stream);

// x, y: (N, C) T
cudaError_t dropout_fwd(const TensorRef& y, const TensorRef& x, const TensorRef& seed, const TensorRef& rows, double p,
                        int64_t offset, cudaStream_t stream);

// y: (N, C) T; tokens, positions: (N,) int64; weight: (V, C) T; position_weight: (P, C) T
cudaError_t embedding_fwd(const TensorRef& y, const TensorRef& tokens, const TensorRef& positions,
                          const TensorRef& weight, const TensorRef& position_weight, const TensorRef& seed,
                          const TensorRef& rows, double scale, double p, int64_t offset, cudaStream_t stream);
// dweight: (V, C) T; dy: (N, C) T; order, sorted_ids: (N,) int64
cudaError_t embedding_bwd(const TensorRef& dweight, const TensorRef& dy, const TensorRef& order,
                          const TensorRef& sorted_ids, const TensorRef& seed, const TensorRef& rows, double scale,
                          double p, int64_t offset, int64_t padding_idx, bool accumulate, cudaStream_t stream);

// logits, dlogits: (N, V) T; target: (N,) int64; loss, nll, lse, dloss: (N,) float; correct: (N,) int32
cudaError_t cross_entropy_fwd(const TensorRef& loss, const TensorRef& nll, const TensorRef& lse,
                              const TensorRef& correct, const TensorRef& logits, const TensorRef& target,
                              const TensorRef& rows, double label_smoothing, int64_t ignore_index, cudaStream_t stream);
cudaError_t cross_entropy_bwd(const TensorRef& dlogits, const TensorRef& dloss, const TensorRef& logits,
                              const TensorRef& lse, const TensorRef& target, const TensorRef& rows,
                              double label_smoothing, int64_t ignore_index, cudaStream_t stream);
// grad_scale: (1,) float; logits are overwritten by their gradient
cudaError_t cross_entropy_inplace(const TensorRef& logits, const TensorRef& loss, const TensorRef& nll,
                                  const TensorRef& correct, const TensorRef& target, const TensorRef& rows,
                                  const TensorRef& grad_scale, double label_smoothing, int64_t ignore_index,
                                  cudaStream_t stream);

// norm, found_inf: (1,) float; grad: (n,) T; segments: (S + 1,) int64; active: (S,) uint8; workspace: at least
// 2 * kMaxNormBlocks floats
constexpr int kMaxNormBlocks = 1024;
cudaError_t grad_norm(const TensorRef& norm, const TensorRef& found_inf, const TensorRef& workspace,
                      const TensorRef& grad, const TensorRef& segments, const TensorRef& active, cudaStream_t stream);
// segment_step: (S,) int64; update: (2,) int64; grad_scale, norm, found_inf, multiplier: (1,) float
cudaError_t adam_prepare(const TensorRef& segment_step, const TensorRef& update, const TensorRef& grad_scale,
                         const TensorRef& active, const TensorRef& norm, const TensorRef& found_inf,
                         const TensorRef& multiplier, double max_norm, cudaStream_t stream);
// param, grad: (n,) T; master, exp_avg, exp_avg_sq: (n,) float; remainder: (n,) int16 instead of master;
// segment_group: (S,) int32; hyper: (G, 6) double
cudaError_t adam(const TensorRef& param, const TensorRef& master, const TensorRef& remainder, const TensorRef& exp_avg,
                 const TensorRef& exp_avg_sq, const TensorRef& grad, const TensorRef& segments,
                 const TensorRef& segment_group, const TensorRef& segment_step, const TensorRef& active,
                 const TensorRef& hyper, const TensorRef& update, const TensorRef& grad_scale,
                 const TensorRef& found_inf, bool decoupled_decay, bool bias_correction, bool eps_after_correction,
                 cudaStream_t stream);
// scale, exhausted, found_inf: (1,) float; counters: (4,) int64
cudaError_t loss_scale_update(const TensorRef& scale, const TensorRef& counters, const TensorRef& exhausted,
                              const TensorRef& found_inf, double factor, int64_t window, double tolerance,
                              double threshold, double min_scale, cudaStream_t stream);

// out: (N, C) T; x: (N, C) float, half or bfloat16; factor: (1,) float
cudaError_t scale_cast(const TensorRef& out, const TensorRef& x, const TensorRef& factor, bool accumulate,
                       cudaStream_t stream);

}  // namespace ls_train
