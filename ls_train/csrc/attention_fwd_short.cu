// Attention forward of up to 128 tokens with heads of 33 to 64, on tensor cores.
//
// A block owns the queries of one sequence and head, a warp 32 of them: one warp where no sequence has more than 32
// tokens, else four. Single warps wait for nobody, and 16 of them a multiprocessor read, compute and write at the same
// time. All rows are under way to shared memory before anything else; the generator of dropout runs meanwhile.
// Bytes: q, k, v read and out written once, (2 Nq + 2 Nk) * H * D * 2, and 4 * Nq * H of lse.
#include "attention_short.cuh"

namespace ls_train {
namespace {

// Scores (unscaled) become what dropout lets through of the probabilities, rounded, without its scale; out, their
// product with the values so far, maximum and sum go along. With kFirst nothing went before.
template <bool kFirst, class T>
__device__ __forceinline__ void softmax(Factors& probs, Scores& s, float (&maximum)[2], float (&sum)[2],
                                        float (&out)[kHeadTiles][4], const Keep8 (&keep)[2], float scale2,
                                        bool rescaled, T) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float largest = kFirst ? -INFINITY : maximum[h];
#pragma unroll
    for (int i = 0; i < kChunkTiles * 2; ++i) {
      float& score = s[i / 2][h * 2 + i % 2];
      score *= scale2;
      largest = fmaxf(largest, score);
    }
    largest = row_reduce<Max>(largest);
    const float shift = largest == -INFINITY ? 0.f : largest;  // no key seen yet: exp2(-inf - 0) = 0
    if constexpr (kFirst) {
      sum[h] = 0.f;
    } else {
      const float rescale = fast_exp2(maximum[h] - shift);
      sum[h] *= rescale;
      if (rescaled) {
#pragma unroll
        for (int t = 0; t < kHeadTiles; ++t) {
          out[t][h * 2] *= rescale;
          out[t][h * 2 + 1] *= rescale;
        }
      }
    }
    maximum[h] = largest;
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

template <class T, int kWarps>
__global__ void __launch_bounds__(kWarps* kWarp, kWarps == 1 ? kForwardBlocks : 3)
    attention_fwd_short_kernel(Attention a) {
#ifdef LS_TRAIN_TENSOR_CORES
  extern __shared__ uint4 shared[];  // q, k, v: (kWarps * 32, 64)
  const Task task = short_task<kWarps>(a);
  const Sequence& seq = task.sequence;
  T* const q = reinterpret_cast<T*>(shared);
  T* const k = q + kWarps * kShortTile;
  T* const v = k + kWarps * kShortTile;
  const auto load = [&](T* tile, const HeadRows& x, int64_t row, int count) {
    load_tiles<kWarps>(tile, x, row, task.head, count, a.dim);
  };
  if (seq.q_len > 0) {
    load(q, a.q, seq.q_start, seq.q_len);
    load(k, a.k, seq.k_start, seq.k_len);
    commit_copies();
    load(v, a.v, seq.k_start, seq.k_len);
    commit_copies();
  }
  const DropoutKey dropout = dropout_key(a.dropout);
  zero_unused<T, 8>(a, a.out, task.used_q, a.n_q);
  zero_unused_lse(a, task.used_q);
  if (seq.q_len == 0) return;

  const int first = static_cast<int>(threadIdx.x) / kWarp * kQueryRows;  // this warp's first query
  const int rows = seq.q_len - first;
  const int chunks = kWarps == 1 ? 1 : round_up(seq.key_limit(seq.q_len - 1), kChunk) / kChunk;
  const int warp_keys = rows > 0 ? seq.key_limit(min(first + kQueryRows, seq.q_len) - 1) : 0;
  HeadColumns out = {};
  float maximum[kRowTiles][2], sum[kRowTiles][2];  // of the scores over ln 2; sums of this thread's columns
#pragma unroll
  for (int i = 0; i < kRowTiles * 2; ++i) {
    maximum[i / 2][i % 2] = -INFINITY;
    sum[i / 2][i % 2] = 0.f;
  }
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const bool seen = kWarps == 1 || chunk * kChunk < warp_keys;
    Keep8 keep[kRowTiles][2];
    if (seen) draw(keep, dropout, seq.q_start + first, task.head, chunk);
    if (chunk == 0) wait_rows<kWarps, 1>();
    Factors probs[kRowTiles];
    if (seen) {
      Scores s[kRowTiles];
      start_scores(s, seq, first, chunk);
      add_tile_dots(s, q + first * kShortDim, k + chunk * kShortTile);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        softmax<kWarps == 1>(probs[r], s[r], maximum[r], sum[r], out[r], keep[r], a.scale * kLog2E, chunk > 0, T());
      }
    }
    if (chunk == 0) wait_rows<kWarps, 0>();
    if (seen) {
#pragma unroll
      for (int i = 0; i < kChunk / kWarpRows; ++i) {
        uint32_t left[kRowTiles][4];
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) as_left_factor(left[r], probs[r], i);
        add_tile_product(out, left, v + chunk * kShortTile, i * kWarpRows);
      }
    }
  }

#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float total = row_reduce<Sum>(sum[r][h]);
      factor[h] = total == 0.f ? 0.f : dropout.scale / total;
      const int row = first + r * kWarpRows + h * 8 + static_cast<int>(threadIdx.x) % kWarp / 4;
      if (threadIdx.x % 4 == 0 && row < seq.q_len) {
        const float lse = total == 0.f ? -INFINITY : (maximum[r][h] + log2f(total)) * kLn2;
        a.lse[(seq.q_start + row) * a.heads + task.head] = lse;
      }
    }
    store_columns(a.out.at<T>(seq.q_start + first + r * kWarpRows, task.head), a.out.row_stride, rows - r * kWarpRows,
                  a.dim, out[r], factor);
  }
#endif
}

}  // namespace

cudaError_t attention_fwd_short(const Attention& a, DType dtype, int64_t max_q, int64_t max_k, cudaStream_t stream) {
  return dispatch_half_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return dispatch_warps(max_q, max_k, [&](auto warps) {
      constexpr int kWarps = decltype(warps)::value;
      constexpr int kMemory = 3 * kWarps * kShortTile * static_cast<int>(sizeof(T));
      return launch_attention(attention_fwd_short_kernel<T, kWarps>, a, 1, kWarps * kWarp, kMemory, stream);
    });
  });
}

}  // namespace ls_train
