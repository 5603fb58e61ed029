// Attention backward without tensor cores; attention_plain.cuh says how. A kernel for dq (blocks of 16 queries), which
// leaves the row sums of dout * out behind, then one for dk and dv (blocks of 16 keys); no atomics. Each reads the
// other side's two tensors once, and one (two) of them again as factors of the result, for every 64 columns.
#include "attention_plain.cuh"

namespace ls_train {

using namespace plain;

namespace {

// Softmax gradient of one element. `kept` is the probability as dropout let it through, without its scale, and
// `gradient` that of the score; both are 0 where the query does not see the key.
struct ScoreGradient {
  float kept, gradient;
};

__device__ __forceinline__ ScoreGradient score_gradient(bool seen, bool keep, float scale, float score, float lse,
                                                        float dprob, float delta) {
  if (!seen) return {0.f, 0.f};
  const float prob = expf(score - lse);
  return {keep ? prob : 0.f, prob * ((keep ? dprob * scale : 0.f) - delta)};
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks) attention_dq_plain_kernel(Attention a) {
  __shared__ Tiles tiles;
  const Task task = block_task(a, a.q_tiles);
  zero_unused<T, 1>(a, a.dq, task.used_q, a.n_q);
  const Sequence& seq = task.sequence;
  const int block_row = task.tile * kBlockRows;
  if (block_row >= seq.q_len) return;

  const int lane = threadIdx.x % kWarp;
  const int first = block_row + threadIdx.x / kWarp * kRows;
  const int keys = seq.key_limit(min(block_row + kBlockRows, seq.q_len) - 1);
  const DropoutKey dropout = dropout_key(a.dropout);
  const auto q = rows_of<const T>(a.q, seq.q_start + block_row, task.head, seq.q_len - block_row);
  const auto dout = rows_of<const T>(a.dout, seq.q_start + block_row, task.head, seq.q_len - block_row);
  const auto k = rows_of<const T>(a.k, seq.k_start, task.head, seq.k_len);
  const auto v = rows_of<const T>(a.v, seq.k_start, task.head, seq.k_len);

  float lse[kRows], delta[kRows], score[kRows], dprob[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = seq.q_start + min(first + r, seq.q_len - 1);
    const T* y = a.out.at<const T>(row, task.head);
    const T* dy = a.dout.at<const T>(row, task.head);
    float partial = 0.f;
    for (int c = lane; c < a.dim; c += kWarp) partial += to_float(y[c]) * to_float(dy[c]);
    delta[r] = warp_reduce<Sum>(partial);
    lse[r] = a.lse[row * a.heads + task.head];
    if (lane == 0 && first + r < seq.q_len) a.delta[row * a.heads + task.head] = delta[r];
  }

  for (int column = 0; column < a.dim; column += kColumns) {
    float dq[kRows][kColumnsPerLane] = {};
    for (int j = 0; j < keys; j += kWarp) {
      dots(score, tiles, q, k.from(j), a.dim);
      dots(dprob, tiles, dout, v.from(j), a.dim);
      const unsigned kept = keep_bits(dropout, task.head, seq.q_start + first, 1, j + lane, 0);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const bool seen = j + lane < seq.key_limit(first + r);
        score[r] =
            score_gradient(seen, kept >> r & 1, dropout.scale, score[r] * a.scale, lse[r], dprob[r], delta[r]).gradient;
      }
      add_weighted(dq, score, tiles, k.from(j), column, a.dim);
    }
    store_columns(rows_of<T>(a.dq, seq.q_start + first, task.head, seq.q_len - first), dq, a.scale, column, a.dim);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks) attention_dkv_plain_kernel(Attention a) {
  __shared__ Tiles tiles;
  const Task task = block_task(a, a.k_tiles);
  zero_unused<T, 1>(a, a.dk, task.used_k, a.n_k);
  zero_unused<T, 1>(a, a.dv, task.used_k, a.n_k);
  const Sequence& seq = task.sequence;
  const int block_row = task.tile * kBlockRows;
  if (block_row >= seq.k_len) return;

  const int lane = threadIdx.x % kWarp;
  const int first = block_row + threadIdx.x / kWarp * kRows;
  const DropoutKey dropout = dropout_key(a.dropout);
  const auto q = rows_of<const T>(a.q, seq.q_start, task.head, seq.q_len);
  const auto dout = rows_of<const T>(a.dout, seq.q_start, task.head, seq.q_len);
  const auto k = rows_of<const T>(a.k, seq.k_start + block_row, task.head, seq.k_len - block_row);
  const auto v = rows_of<const T>(a.v, seq.k_start + block_row, task.head, seq.k_len - block_row);

  for (int column = 0; column < a.dim; column += kColumns) {
    float dk[kRows][kColumnsPerLane] = {}, dv[kRows][kColumnsPerLane] = {};
    for (int i = seq.first_query(block_row) / kWarp * kWarp; i < seq.q_len; i += kWarp) {
      float score[kRows], dprob[kRows];
      dots(score, tiles, k, q.from(i), a.dim);
      dots(dprob, tiles, v, dout.from(i), a.dim);
      const int64_t row = seq.q_start + min(i + lane, seq.q_len - 1);
      const float lse = a.lse[row * a.heads + task.head];
      const float delta = a.delta[row * a.heads + task.head];
      const int limit = seq.key_limit(i + lane);
      const unsigned kept = keep_bits(dropout, task.head, row, 0, first, 1);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const ScoreGradient g =
            score_gradient(first + r < limit, kept >> r & 1, dropout.scale, score[r] * a.scale, lse, dprob[r], delta);
        score[r] = g.gradient;
        dprob[r] = g.kept;
      }
      add_weighted(dk, score, tiles, q.from(i), column, a.dim);
      add_weighted(dv, dprob, tiles, dout.from(i), column, a.dim);
    }
    const int count = seq.k_len - first;
    store_columns(rows_of<T>(a.dk, seq.k_start + first, task.head, count), dk, a.scale, column, a.dim);
    store_columns(rows_of<T>(a.dv, seq.k_start + first, task.head, count), dv, dropout.scale, column, a.dim);
  }
}

}  // namespace

cudaError_t attention_bwd_plain(Attention a, DType dtype, int64_t max_q, int64_t max_k, cudaStream_t stream) {
  a.q_tiles = tiles_for(max_q);
  a.k_tiles = tiles_for(max_k);
  return dispatch_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const cudaError_t error = launch_attention(attention_dq_plain_kernel<T>, a, a.q_tiles, kThreads, 0, stream);
    if (error != cudaSuccess) return error;
    return launch_attention(attention_dkv_plain_kernel<T>, a, a.k_tiles, kThreads, 0, stream);
  });
}

}  // namespace ls_train
