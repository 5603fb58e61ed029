// Attention forward of up to 32 tokens with heads of 33 to 64, on tensor cores.
//
// One warp does a sequence and head: single warps wait for nobody, and 16 of them a multiprocessor read, compute and
// write at the same time. All rows are under way to shared memory before anything else; the generator of dropout runs
// meanwhile.
// Bytes: q, k, v read and out written once, (2 Nq + 2 Nk) * H * D * 2, and 4 * Nq * H of lse.
#include "attention_short.cuh"

namespace ls_train {
namespace {

// Scores (unscaled) become what dropout lets through of the probabilities, rounded, without its scale. Out too: maxima
// of the scores over ln 2, sums of this thread's columns.
template <class T>
__device__ __forceinline__ void softmax(Factors& probs, Scores& s, float (&maximum)[2], float (&sum)[2],
                                        const Keep8 (&keep)[2], float scale2, T) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < kChunkTiles * 2; ++i) {
      float& score = s[i / 2][h * 2 + i % 2];
      score *= scale2;
      largest = fmaxf(largest, score);
    }
    largest = row_reduce<Max>(largest);
    const float shift = largest == -INFINITY ? 0.f : largest;  // no key seen: exp2(-inf - 0) = 0
    maximum[h] = largest;
    sum[h] = 0.f;
#pragma unroll
    for (int i = 0; i < kChunkTiles * 2; ++i) {
      float& score = s[i / 2][h * 2 + i % 2];
      score = fast_exp2(score - shift);
      sum[h] += score;
    }
#pragma unroll
    for (int t = 0; t < kChunkTiles; ++t) probs[t][h] = pack_pair(s[t][h * 2], s[t][h * 2 + 1], T()) & keep[h].mask(t);
  }
}

template <class T>
__global__ void __launch_bounds__(kWarp, kForwardBlocks) attention_fwd_short_kernel(Attention a) {
#ifdef LS_TRAIN_TENSOR_CORES
  extern __shared__ uint4 shared[];  // q, k, v: (32, 64)
  const Task task = short_task(a, 1, kWarpLength);
  const Sequence& seq = task.sequence;
  T* const q = reinterpret_cast<T*>(shared);
  T* const k = q + kShortTile;
  T* const v = k + kShortTile;
  if (seq.q_len > 0) {
    load_tile(q, a.q, seq.q_start, task.head, seq.q_len, a.dim);
    load_tile(k, a.k, seq.k_start, task.head, seq.k_len, a.dim);
    commit_copies();
    load_tile(v, a.v, seq.k_start, task.head, seq.k_len, a.dim);
    commit_copies();
  }
  const DropoutKey dropout = dropout_key(a.dropout);
  zero_unused<T, 8>(a, a.out, task.used_q, a.n_q);
  zero_unused_lse(a, task.used_q);
  if (seq.q_len == 0) return;

  Keep8 keep[kRowTiles][2];
  draw(keep, dropout, seq.q_start, task.head, 0);
  wait_tiles<1>();
  Scores s[kRowTiles];
  start_scores(s, seq);
  add_tile_dots(s, q, k);
  Factors probs[kRowTiles];
  float maximum[kRowTiles][2], sum[kRowTiles][2];
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) softmax(probs[r], s[r], maximum[r], sum[r], keep[r], a.scale * kLog2E, T());
  wait_tiles<0>();
  HeadColumns out = {};
#pragma unroll
  for (int i = 0; i < kChunk / kWarpRows; ++i) {
    uint32_t left[kRowTiles][4];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) as_left_factor(left[r], probs[r], i);
    add_tile_product(out, left, v, i * kWarpRows);
  }

#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float total = row_reduce<Sum>(sum[r][h]);
      factor[h] = total == 0.f ? 0.f : dropout.scale / total;
      const int row = r * kWarpRows + h * 8 + static_cast<int>(threadIdx.x) % kWarp / 4;
      if (threadIdx.x % 4 == 0 && row < seq.q_len) {
        const float lse = total == 0.f ? -INFINITY : (maximum[r][h] + log2f(total)) * kLn2;
        a.lse[(seq.q_start + row) * a.heads + task.head] = lse;
      }
    }
    store_columns(a.out.at<T>(seq.q_start + r * kWarpRows, task.head), a.out.row_stride, seq.q_len - r * kWarpRows,
                  a.dim, out[r], factor);
  }
#endif
}

}  // namespace

cudaError_t attention_fwd_short(const Attention& a, DType dtype, int64_t max_q, int64_t max_k, cudaStream_t stream) {
  if (std::max(max_q, max_k) > kWarpLength) return attention_fwd_block(a, dtype, max_q, max_k, stream);
  return dispatch_half_type(dtype, [&](auto type) {
    return launch_warps(attention_fwd_short_kernel<typename decltype(type)::type>, a, 3, stream);
  });
}

}  // namespace ls_train
