// Attention backward of up to 32 tokens with heads of 33 to 64, on tensor cores: dq, dk and dv in one pass.
//
// Warps and loads as in the forward. A warp makes the scores, the gradients of their probabilities and from both the
// gradient of the scores in registers. That is a left factor of dq as it stands; dk and dv take it and the
// probabilities transposed, one instruction for 8 x 8 elements. Every sum is made by one thread in a fixed order.
// Bytes: q, k, v, dout read, dq, dk, dv written once (the row sums of dout * out follow from the rest):
// (3 Nq + 4 Nk) * H * D * 2 and 4 * Nq * H of lse.
#include "attention_short.cuh"

namespace ls_train {
namespace {

// In: scores (unscaled) and gradients of the probabilities after dropout. Out, rounded: probabilities as dropout let
// them through, without its scale, and gradient of the scaled scores. The row's sum of dout * out is taken as that of
// probability times gradient: out need not be read.
template <class T>
__device__ __forceinline__ void softmax_gradient(Factors& probs, Factors& dscores, Scores& s, Scores& d,
                                                 const Keep8 (&keep)[2], float keep_scale, float scale2,
                                                 const float (&lse2)[2], T) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float delta = 0.f;
#pragma unroll
    for (int i = 0; i < kChunkTiles * 2; ++i) {
      float& p = s[i / 2][h * 2 + i % 2];
      float& dp = d[i / 2][h * 2 + i % 2];
      p = fast_exp2(p * scale2 - lse2[h]);
      dp = keep[h][i] ? dp * keep_scale : 0.f;
      delta += p * dp;
    }
    delta = row_reduce<Sum>(delta);
#pragma unroll
    for (int t = 0; t < kChunkTiles; ++t) {
      const float p0 = s[t][h * 2], p1 = s[t][h * 2 + 1];
      probs[t][h] = pack_pair(p0, p1, T()) & keep[h].mask(t);
      dscores[t][h] = pack_pair(p0 * (d[t][h * 2] - delta), p1 * (d[t][h * 2 + 1] - delta), T());
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kWarp, kBackwardBlocks) attention_bwd_short_kernel(Attention a) {
#ifdef LS_TRAIN_TENSOR_CORES
  extern __shared__ uint4 shared[];  // q, dout, v, k: (32, 64)
  const Task task = short_task(a, 1, kWarpLength);
  const Sequence& seq = task.sequence;
  T* const q = reinterpret_cast<T*>(shared);
  T* const dout = q + kShortTile;
  T* const v = dout + kShortTile;
  T* const k = v + kShortTile;
  const int read_keys = seq.q_len > 0 ? seq.k_len : 0;
  load_tile(dout, a.dout, seq.q_start, task.head, seq.q_len, a.dim);
  load_tile(v, a.v, seq.k_start, task.head, read_keys, a.dim);
  commit_copies();
  load_tile(q, a.q, seq.q_start, task.head, seq.q_len, a.dim);
  load_tile(k, a.k, seq.k_start, task.head, read_keys, a.dim);
  commit_copies();

  const DropoutKey dropout = dropout_key(a.dropout);
  float lse2[kRowTiles][2];
#pragma unroll
  for (int i = 0; i < kRowTiles * 2; ++i) {
    const int row = i * 8 + static_cast<int>(threadIdx.x) % kWarp / 4;
    // Rows that are no queries have no probabilities.
    const float lse = row < seq.q_len ? a.lse[(seq.q_start + row) * a.heads + task.head] : INFINITY;
    lse2[i / 2][i % 2] = fmaxf(lse * kLog2E, kLowestLse);
  }
  Keep8 keep[kRowTiles][2];
  draw(keep, dropout, seq.q_start, task.head, 0);
  const auto store = [&](const HeadRows& x, int64_t start, int row, int rows, const float (&c)[kHeadTiles][4],
                         float factor) {
    store_columns(x.at<T>(start + row, task.head), x.row_stride, rows - row, a.dim, c, {factor, factor});
  };

  wait_tiles<1>();
  Scores s[kRowTiles], d[kRowTiles] = {};
  add_tile_dots(d, dout, v);
  start_scores(s, seq);
  wait_tiles<0>();  // for queries and keys
  add_tile_dots(s, q, k);
  Factors probs[kRowTiles], dscores[kRowTiles];
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    softmax_gradient(probs[r], dscores[r], s[r], d[r], keep[r], dropout.scale, a.scale * kLog2E, lse2[r], T());
  }
  HeadColumns dq = {};
#pragma unroll
  for (int i = 0; i < kChunk / kWarpRows; ++i) {
    uint32_t left[kRowTiles][4];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) as_left_factor(left[r], dscores[r], i);
    add_tile_product(dq, left, k, i * kWarpRows);
  }
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) store(a.dq, seq.q_start, r * kWarpRows, seq.q_len, dq[r], a.scale);
  const auto differentiate_keys = [&](const HeadRows& x, const Factors(&factors)[kRowTiles], const T* tile,
                                      float factor) {
    HeadColumns dx = {};
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      uint32_t left[kChunk / kWarpRows][4];
#pragma unroll
      for (int m = 0; m < kChunk / kWarpRows; ++m) as_transposed_factor(left[m], factors[r], m);
      add_tile_product(dx, left, tile, r * kWarpRows);
    }
#pragma unroll
    for (int m = 0; m < kChunk / kWarpRows; ++m) store(x, seq.k_start, m * kWarpRows, seq.k_len, dx[m], factor);
  };
  differentiate_keys(a.dv, probs, dout, dropout.scale);
  differentiate_keys(a.dk, dscores, q, a.scale);
  zero_unused<T, 8>(a, a.dq, task.used_q, a.n_q);
  zero_unused<T, 8>(a, a.dk, task.used_k, a.n_k);
  zero_unused<T, 8>(a, a.dv, task.used_k, a.n_k);
#endif
}

}  // namespace

cudaError_t attention_bwd_short(const Attention& a, DType dtype, int64_t max_q, int64_t max_k, cudaStream_t stream) {
  if (std::max(max_q, max_k) > kWarpLength) return attention_bwd_block(a, dtype, max_q, max_k, stream);
  return dispatch_half_type(dtype, [&](auto type) {
    return launch_warps(attention_bwd_short_kernel<typename decltype(type)::type>, a, 4, stream);
  });
}

}  // namespace ls_train
