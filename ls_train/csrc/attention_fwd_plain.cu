// Attention forward without tensor cores; attention_plain.cuh says how. Per block of 16 queries: k read twice and v
// once for up to 64 columns (once more each for every further 64), q once a chunk of 32 keys, out and lse written once.
#include "attention_plain.cuh"

namespace ls_train {

using namespace plain;

namespace {

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks) attention_fwd_plain_kernel(Attention a) {
  __shared__ Tiles tiles;
  const Task task = block_task(a, a.q_tiles);
  zero_unused<T, 1>(a, a.out, task.used_q, a.n_q);
  zero_unused_lse(a, task.used_q);
  const Sequence& seq = task.sequence;
  const int block_row = task.tile * kBlockRows;
  if (block_row >= seq.q_len) return;

  const int lane = threadIdx.x % kWarp;
  const int first = block_row + threadIdx.x / kWarp * kRows;
  const int keys = seq.key_limit(min(block_row + kBlockRows, seq.q_len) - 1);
  const DropoutKey dropout = dropout_key(a.dropout);
  const auto q = rows_of<const T>(a.q, seq.q_start + block_row, task.head, seq.q_len - block_row);
  const auto k = rows_of<const T>(a.k, seq.k_start, task.head, seq.k_len);
  const auto v = rows_of<const T>(a.v, seq.k_start, task.head, seq.k_len);

  float maximum[kRows], sum[kRows], log_sum[kRows], score[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    maximum[r] = -INFINITY;
    sum[r] = 0.f;
  }
  for (int j = 0; j < keys; j += kWarp) {
    dots(score, tiles, q, k.from(j), a.dim);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (j + lane < seq.key_limit(first + r)) {
        const float s = __fmul_rn(score[r], a.scale);  // rounded, so that the second pass sees the same scores
        const float larger = fmaxf(maximum[r], s);
        sum[r] = sum[r] * expf(maximum[r] - larger) + expf(s - larger);
        maximum[r] = larger;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float all = warp_reduce<Max>(maximum[r]);
    const float total = warp_reduce<Sum>(maximum[r] == -INFINITY ? 0.f : sum[r] * expf(maximum[r] - all));
    maximum[r] = all;
    log_sum[r] = logf(total);
    if (lane == 0 && first + r < seq.q_len) {
      a.lse[(seq.q_start + first + r) * a.heads + task.head] = all + log_sum[r];  // -inf + -inf without keys
    }
  }

  for (int column = 0; column < a.dim; column += kColumns) {
    float out[kRows][kColumnsPerLane] = {};
    for (int j = 0; j < keys; j += kWarp) {
      dots(score, tiles, q, k.from(j), a.dim);
      const unsigned kept = keep_bits(dropout, task.head, seq.q_start + first, 1, j + lane, 0);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const bool counts = (kept >> r & 1) && j + lane < seq.key_limit(first + r);
        // The largest score goes first: their sum would round away the logarithm of the sum where scores are large.
        score[r] = counts ? expf(__fmul_rn(score[r], a.scale) - maximum[r] - log_sum[r]) : 0.f;
      }
      add_weighted(out, score, tiles, v.from(j), column, a.dim);
    }
    store_columns(rows_of<T>(a.out, seq.q_start + first, task.head, seq.q_len - first), out, dropout.scale, column,
                  a.dim);
  }
}

}  // namespace

cudaError_t attention_fwd_plain(Attention a, DType dtype, int64_t max_q, cudaStream_t stream) {
  a.q_tiles = tiles_for(max_q);
  return dispatch_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return launch_attention(attention_fwd_plain_kernel<T>, a, a.q_tiles, kThreads, 0, stream);
  });
}

}  // namespace ls_train
