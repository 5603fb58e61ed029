// Attention forward of long sequences with heads of up to 64, on tensor cores.
//
// A block owns 64 queries of one sequence and head, a warp 16 of them; keys and values pass by in stages of 64, and
// softmax goes along in chunks of 32. A row's probabilities are relative to a reference score, first the largest of its
// first chunk: products of queries and keys start from minus the reference. Only where the sum of a chunk's
// probabilities says that a score is far above the reference does the warp take the chunk again and move the references
// up.
// Bytes: q, k, v read and out written once, (2 Nq + 2 Nk) * H * D * 2, and 4 * Nq * H of lse; k and v once more from
// L2 for every further 64 queries.
#include "attention_long.cuh"

namespace ls_train {
namespace {

constexpr int kWarps = 4;   // of a block
constexpr int kBlocks = 4;  // of a multiprocessor

template <int kDim>
struct Softmax {
  static constexpr int kTiles = kDim / 8;
  // References move where eight probabilities, a thread's of a row and chunk, sum up to more. float16 holds 65504.
  static constexpr float kLargestSum = 256.f;

  float out[kTiles][4] = {};
  float start[4] = {};  // minus the reference scores (unscaled), as an accumulator
  float sum[2] = {};    // of this thread's columns

  // Accumulators of a chunk's scores, less the reference, become probabilities; their sums by row.
  __device__ __forceinline__ void exponentials(float (&s)[kChunkTiles][4], float (&part)[2], float scale2) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      part[h] = 0.f;
#pragma unroll
      for (int i = 0; i < kChunkTiles * 2; ++i) {
        float& score = s[i / 2][h * 2 + i % 2];
        score = fast_exp2(score * scale2);
        part[h] += score;
      }
    }
  }

  // Moves the references up to the largest of a chunk's scores where that is larger, or, in the first chunk, there, and
  // makes the scores relative to them. The scores come as they are: relative to a reference far away they would have
  // lost their last bits.
  __device__ __forceinline__ void move(float (&s)[kChunkTiles][4], bool first, float scale2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = s[0][h * 2];
#pragma unroll
      for (int i = 1; i < kChunkTiles * 2; ++i) largest = fmaxf(largest, s[i / 2][h * 2 + i % 2]);
      largest = row_reduce<Max>(largest);
      const float before = -start[h * 2];
      const float to = first ? (largest == -INFINITY ? 0.f : largest) : fmaxf(largest, before);
      const float rescale = first ? 1.f : fast_exp2((before - to) * scale2);
      start[h * 2] = start[h * 2 + 1] = -to;
      sum[h] *= rescale;
#pragma unroll
      for (int i = 0; i < kChunkTiles * 2; ++i) s[i / 2][h * 2 + i % 2] -= to;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        out[t][h * 2] *= rescale;
        out[t][h * 2 + 1] *= rescale;
      }
    }
  }
};

template <class T, int kDim, bool kDropout>
__global__ void __launch_bounds__(kWarps* kWarp, kBlocks) attention_fwd_long_kernel(Attention a) {
#ifdef LS_TRAIN_TENSOR_CORES
  extern __shared__ uint4 shared[];  // two stages, then q: (q_rows, kTileStride)
  const QueryBlock<T, kDim, kWarps> block(a, shared);
  const OwnQueries& own = block.own;
  const Sequence& seq = block.task.sequence;
  block.load_own(0, a.q);
  block.load_stage(0);
  const DropoutKey dropout = dropout_key(a.dropout);
  zero_unused<T, 8>(a, a.out, block.task.used_q, a.n_q);
  zero_unused_lse(a, block.task.used_q);
  if (own.rows <= 0) return;

  const float scale2 = a.scale * kLog2E;
  Softmax<kDim> softmax;
  wait_stage();
  RowFragments<kDim> queries;
  block.load_own_fragments(queries, 0);

  block.for_chunks([&](int key, const T* keys, const T* values) {
    float s[kChunkTiles][4], part[2];
    const auto score = [&](auto&& start) {
      dots<kDim>(s, queries, keys, start);
      own.mask(s, seq, key);
    };
    Masks8 masks[2];
    if constexpr (kDropout) {
#pragma unroll
      for (int h = 0; h < 2; ++h) masks[h] = block.masks(dropout, h, key);
    }
    bool move = key == 0;
    if (!move) {
      score([&](int) -> const float (&)[4] { return softmax.start; });
      softmax.exponentials(s, part, scale2);
      move = __any_sync(kAllLanes, fmaxf(part[0], part[1]) > softmax.kLargestSum);
    }
    if (move) {
      score(FromZero());
      softmax.move(s, key == 0, scale2);
      softmax.exponentials(s, part, scale2);
    }
    uint32_t probs[kChunkTiles / 2][4];
#pragma unroll
    for (int t = 0; t < kChunkTiles; t += 2) as_factor<T>(probs[t / 2], s[t], s[t + 1]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      softmax.sum[h] += part[h];
      if constexpr (kDropout) {
#pragma unroll
        for (int t = 0; t < kChunkTiles; ++t) probs[t / 2][t % 2 * 2 + h] &= masks[h].word[t];
      }
    }
    add_products<kDim>(softmax.out, probs, values);
  });

  if (own.warp_row >= own.rows) return;
  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float total = row_reduce<Sum>(softmax.sum[h]);
    factor[h] = total == 0.f ? 0.f : dropout.scale / total;
    if (threadIdx.x % 4 == 0 && own.row(h) < seq.q_len) {
      const float lse = total == 0.f ? -INFINITY : logf(total) - softmax.start[h * 2] * a.scale;
      a.lse[(seq.q_start + own.row(h)) * a.heads + block.task.head] = lse;
    }
  }
  block.store_own(a.out, softmax.out, factor);
#endif
}

template <class T, int kDim, bool kDropout>
cudaError_t launch(Attention a, int64_t max_q, cudaStream_t stream) {
  using Block = QueryBlock<T, kDim, kWarps>;
  plan_queries(a, max_q, Block::kQueries);
  return launch_attention(attention_fwd_long_kernel<T, kDim, kDropout>, a, a.q_tiles, Block::kThreads, Block::memory(1),
                          stream);
}

}  // namespace

cudaError_t attention_fwd_long(const Attention& a, DType dtype, int64_t max_q, cudaStream_t stream) {
  return dispatch_half_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return dispatch_long(a, [&](auto dim, auto dropout) {
      return launch<T, decltype(dim)::value, decltype(dropout)::value>(a, max_q, stream);
    });
  });
}

}  // namespace ls_train
