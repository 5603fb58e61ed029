// Attention forward of long sequences with heads of up to 64, on tensor cores.
//
// A block owns up to 128 queries of one sequence and head, a warp 32 of them; keys and values pass by in stages of 64,
// and softmax goes along in chunks of 32 with running maximum and sum.
// Bytes: q, k, v read and out written once, (2 Nq + 2 Nk) * H * D * 2, and 4 * Nq * H of lse; k and v once more from
// L2 for every further 128 queries.
#include "attention_long.cuh"

namespace ls_train {
namespace {

template <class T, int kDim>
__global__ void __launch_bounds__(kLongWarps* kWarp, 2) attention_fwd_long_kernel(Attention a) {
#ifdef LS_TRAIN_TENSOR_CORES
  constexpr int kTiles = kDim / 8;
  extern __shared__ uint4 shared[];  // two stages, then q: (q_rows, kTileStride)
  const QueryBlock<T, kDim> block(a, shared);
  const OwnQueries& own = block.own;
  const Sequence& seq = block.task.sequence;
  block.load_own(0, a.q);
  block.load_stage(0);
  const DropoutKey dropout = dropout_key(a.dropout);
  zero_unused<T, 8>(a, a.out, block.task.used_q, a.n_q);
  zero_unused_lse(a, block.task.used_q);
  if (own.rows <= 0) return;

  const float scale2 = a.scale * kLog2E;
  float out[kRowTiles][kTiles][4] = {};
  float maximum[kRowTiles][2], sum[kRowTiles][2] = {};  // of the unscaled scores; sums of this thread's columns
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) maximum[r][0] = maximum[r][1] = -INFINITY;
  wait_stage();
  RowFragments<kDim> queries[kRowTiles];
  block.load_own_fragments(queries, 0);

  block.for_chunks(dropout, [&](int key, const T* keys, const T* values, const KeepRows(&keep)[kRowTiles]) {
    float s[kRowTiles][kChunkTiles][4] = {};
    add_dots<kDim>(s, queries, keys);
    own.mask(s, seq, key);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float largest = s[r][0][h * 2];
#pragma unroll
        for (int i = 1; i < kChunkTiles * 2; ++i) largest = fmaxf(largest, s[r][i / 2][h * 2 + i % 2]);
        largest = fmaxf(maximum[r][h], row_reduce<Max>(largest));
        const float shift = largest == -INFINITY ? 0.f : largest;  // no key seen yet: exp2(-inf - 0) = 0
        const float rescale = fast_exp2((maximum[r][h] - shift) * scale2);
        maximum[r][h] = largest;
        sum[r][h] *= rescale;
#pragma unroll
        for (int i = 0; i < kChunkTiles * 2; ++i) {
          float& score = s[r][i / 2][h * 2 + i % 2];
          // Scaled after the difference: the largest score's exponent is exactly 0 however large the scores are.
          const float p = fast_exp2((score - shift) * scale2);
          sum[r][h] += p;
          score = keep[r](h, i) ? p : 0.f;
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          out[r][t][h * 2] *= rescale;
          out[r][t][h * 2 + 1] *= rescale;
        }
      }
    }
    add_products<kDim>(out, s, values);
  });

#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
    if (own.warp_row + r * kWarpRows >= own.rows) return;
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float total = row_reduce<Sum>(sum[r][h]);
      factor[h] = total == 0.f ? 0.f : dropout.scale / total;
      if (threadIdx.x % 4 == 0 && own.row(r, h) < seq.q_len) {
        const float lse = total == 0.f ? -INFINITY : maximum[r][h] * a.scale + logf(total);
        a.lse[(seq.q_start + own.row(r, h)) * a.heads + block.task.head] = lse;
      }
    }
    block.store_own(a.out, r, out[r], factor);
  }
#endif
}

template <class T, int kDim>
cudaError_t launch(Attention a, int64_t max_q, cudaStream_t stream) {
  const int warps = plan_queries(a, max_q);
  const int memory = Stages<T, kDim>::kBytes + a.q_rows * kTileStride<kDim> * static_cast<int>(sizeof(T));
  return launch_attention(attention_fwd_long_kernel<T, kDim>, a, a.q_tiles, warps * kWarp, memory, stream);
}

}  // namespace

cudaError_t attention_fwd_long(const Attention& a, DType dtype, int64_t max_q, cudaStream_t stream) {
  return dispatch_half_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return a.dim <= 32 ? launch<T, 32>(a, max_q, stream) : launch<T, 64>(a, max_q, stream);
  });
}

}  // namespace ls_train
