// Attention backward of up to 128 tokens with heads of 33 to 64, on tensor cores: dq, dk and dv in one pass.
//
// Blocks, warps and loads as in the forward. A warp makes the scores of its 32 queries and 32 keys, the gradients of
// their probabilities and from both the gradient of the scores in registers. That is a left factor of dq as it stands;
// dk and dv take it and the probabilities transposed, one instruction for 8 x 8 elements. Where a block has four warps,
// the transposed factors of a chunk of keys pass through shared memory and each warp makes dk or dv of 16 keys over all
// queries; values are loaded two chunks ahead. Every sum is made by one thread in a fixed order.
// Bytes: q, k, v, dout read, dq, dk, dv written once, out read where a sequence has more than 32 keys (otherwise its
// row sums follow from the rest): (4 Nq + 4 Nk) * H * D * 2 and 4 * Nq * H of lse.
#include "attention_short.cuh"

namespace ls_train {
namespace {

// In: scores (unscaled) and gradients of the probabilities after dropout. Out, rounded: probabilities as dropout let
// them through, without its scale, and gradient of the scaled scores. With sum_delta the chunk is the whole row, and
// the row's sum of dout * out is taken as that of probability times gradient: out need not be read.
template <class T>
__device__ __forceinline__ void softmax_gradient(Factors& probs, Factors& dscores, Scores& s, Scores& d,
                                                 const Keep8 (&keep)[2], float keep_scale, float scale2,
                                                 const float (&lse2)[2], const float (&delta)[2], bool sum_delta, T) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kChunkTiles * 2; ++i) {
      float& p = s[i / 2][h * 2 + i % 2];
      float& dp = d[i / 2][h * 2 + i % 2];
      p = fast_exp2(p * scale2 - lse2[h]);
      dp = keep[h][i] ? dp * keep_scale : 0.f;
      sum += p * dp;
    }
    const float row_delta = sum_delta ? row_reduce<Sum>(sum) : delta[h];
#pragma unroll
    for (int t = 0; t < kChunkTiles; ++t) {
      const float p0 = s[t][h * 2], p1 = s[t][h * 2 + 1];
      probs[t][h] = pack_pair(p0, p1, T()) & keep[h].mask(t);
      dscores[t][h] = pack_pair(p0 * (d[t][h * 2] - row_delta), p1 * (d[t][h * 2 + 1] - row_delta), T());
    }
  }
}

// dout * out of rows `row` and 8 further down, both in tiles.
template <class T>
__device__ __forceinline__ void sum_rows(float (&delta)[2], const T* dout, const T* out, int row) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = place(row + h * 8 + lane / 4, lane % 4 + i * 4);
      float y[8], dy[8];
      load_floats<8>(out + at, y);
      load_floats<8>(dout + at, dy);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum += y[e] * dy[e];
    }
    delta[h] = row_reduce<Sum>(sum);
  }
}

template <class T, int kWarps>
__global__ void __launch_bounds__(kWarps* kWarp, kWarps == 1 ? kBackwardBlocks : 2)
    attention_bwd_short_kernel(Attention a) {
#ifdef LS_TRAIN_TENSOR_CORES
  extern __shared__ uint4 shared[];
  constexpr bool kAlone = kWarps == 1;
  const Task task = short_task<kWarps>(a);
  const Sequence& seq = task.sequence;
  // q, dout: (kWarps * 32, 64); v: one chunk if the warp is alone, else two, and out: (kWarps * 32, 64), where
  // afterwards each warp leaves its left factors: (16 queries, tensor, 16 keys, lane); then k: (kWarps * 32, 64).
  T* const q = reinterpret_cast<T*>(shared);
  T* const dout = q + kWarps * kShortTile;
  T* const v = dout + kWarps * kShortTile;
  T* const out = v + 2 * kShortTile;
  T* const k = kAlone ? v + kShortTile : out + kWarps * kShortTile;
  const int chunks = round_up(seq.k_len, kChunk) / kChunk;
  const int read_keys = seq.q_len > 0 ? seq.k_len : 0;
  const auto load = [&](T* tile, const HeadRows& x, int64_t row, int count) {
    load_tiles<kWarps>(tile, x, row, task.head, count, a.dim);
  };
  const auto load_values = [&](int chunk) {  // a group of copies
    const int count = max(0, min(kChunk, read_keys - chunk * kChunk));
    load(v + chunk % 2 * kShortTile, a.v, seq.k_start + chunk * kChunk, count);
    commit_copies();
  };
  load(dout, a.dout, seq.q_start, seq.q_len);
  load_values(0);
  load(q, a.q, seq.q_start, seq.q_len);
  load(k, a.k, seq.k_start, read_keys);
  if (!kAlone && chunks > 1) load(out, a.out, seq.q_start, seq.q_len);
  commit_copies();
  if constexpr (!kAlone) load_values(1);

  const DropoutKey dropout = dropout_key(a.dropout);
  const int lane = threadIdx.x % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int first = warp * kQueryRows;  // this warp's first query
  const bool own = first < seq.q_len;
  float lse2[kRowTiles][2], delta[kRowTiles][2] = {};
#pragma unroll
  for (int i = 0; i < kRowTiles * 2; ++i) {
    const int row = first + i * 8 + lane / 4;
    // Rows that are no queries have no probabilities.
    const float lse = row < seq.q_len ? a.lse[(seq.q_start + row) * a.heads + task.head] : INFINITY;
    lse2[i / 2][i % 2] = fmaxf(lse * kLog2E, kLowestLse);
  }

  HeadColumns dq = {};
  Factors probs[kRowTiles], dscores[kRowTiles];
  Keep8 keep[kRowTiles][2];
  if constexpr (kAlone) draw(keep, dropout, seq.q_start, task.head, 0);
  const auto differentiate = [&](int chunk) {  // both factors
    Scores s[kRowTiles], d[kRowTiles] = {};
    add_tile_dots(d, dout + first * kShortDim, v + chunk % 2 * kShortTile);
    start_scores(s, seq, first, chunk);
    if constexpr (kAlone) wait_rows<kWarps, 0>();  // for queries and keys
    add_tile_dots(s, q + first * kShortDim, k + chunk * kShortTile);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      Keep8 drawn[1][2];  // where chunks follow each other there is no time to fill, but there are registers to save
      if constexpr (!kAlone) draw(drawn, dropout, seq.q_start + first + r * kWarpRows, task.head, chunk);
      softmax_gradient(probs[r], dscores[r], s[r], d[r], kAlone ? keep[r] : drawn[0], dropout.scale, a.scale * kLog2E,
                       lse2[r], delta[r], kAlone || chunks == 1, T());
    }
  };
  const auto add_to_dq = [&](int chunk) {
#pragma unroll
    for (int i = 0; i < kChunk / kWarpRows; ++i) {
      uint32_t left[kRowTiles][4];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) as_left_factor(left[r], dscores[r], i);
      add_tile_product(dq, left, k + chunk * kShortTile, i * kWarpRows);
    }
  };
  const auto store = [&](const HeadRows& x, int64_t start, int row, int rows, const float (&c)[kHeadTiles][4],
                         float factor) {
    store_columns(x.at<T>(start + row, task.head), x.row_stride, rows - row, a.dim, c, {factor, factor});
  };

  if constexpr (kAlone) {
    wait_rows<kWarps, 1>();
    differentiate(0);
    add_to_dq(0);
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
  } else {
    uint4* const factors = reinterpret_cast<uint4*>(out);
    const auto place_of = [&](int tile, int tensor, int m) {  // tile: 16 queries; within the warp's own rows of out
      return (((tile / kRowTiles * 2 + tensor) * kRowTiles + tile % kRowTiles) * 2 + m) * kWarp + lane;
    };
    wait_rows<kWarps, 1>();
    if (own && chunks > 1) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) sum_rows(delta[r], dout, out, first + r * kWarpRows);
      __syncwarp();
    }
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int seeing = seq.first_query(chunk * kChunk) / kQueryRows;  // the first warp that sees any of the keys
      if (own && warp >= seeing) {
        differentiate(chunk);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
          for (int m = 0; m < kChunk / kWarpRows; ++m) {
            uint32_t x[4];
            as_transposed_factor(x, probs[r], m);
            factors[place_of(warp * kRowTiles + r, 0, m)] = make_uint4(x[0], x[1], x[2], x[3]);
            as_transposed_factor(x, dscores[r], m);
            factors[place_of(warp * kRowTiles + r, 1, m)] = make_uint4(x[0], x[1], x[2], x[3]);
          }
        }
        add_to_dq(chunk);
      }
      __syncthreads();
      load_values(chunk + 2);
#pragma unroll 1
      for (int unit = warp; unit < 4; unit += kWarps) {
        const int tensor = unit / 2, m = unit % 2;
        const T* const tile = tensor == 0 ? dout : q;
        float dx[1][kHeadTiles][4] = {};
#pragma unroll 1
        for (int i = seeing * kRowTiles; i * kWarpRows < seq.q_len; ++i) {
          uint32_t left[1][4];
          load_shared(left[0], factors + place_of(i, tensor, m));
          add_tile_product(dx, left, tile, i * kWarpRows);
        }
        store(tensor == 0 ? a.dv : a.dk, seq.k_start, chunk * kChunk + m * kWarpRows, seq.k_len, dx[0],
              tensor == 0 ? dropout.scale : a.scale);
      }
      wait_rows<kWarps, 1>();
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) store(a.dq, seq.q_start, first + r * kWarpRows, seq.q_len, dq[r], a.scale);
  }
  zero_unused<T, 8>(a, a.dq, task.used_q, a.n_q);
  zero_unused<T, 8>(a, a.dk, task.used_k, a.n_k);
  zero_unused<T, 8>(a, a.dv, task.used_k, a.n_k);
#endif
}

}  // namespace

cudaError_t attention_bwd_short(const Attention& a, DType dtype, int64_t max_q, int64_t max_k, cudaStream_t stream) {
  return dispatch_half_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return dispatch_warps(max_q, max_k, [&](auto warps) {
      constexpr int kWarps = decltype(warps)::value;
      constexpr int kTiles = kWarps == 1 ? 4 : 4 * kWarps + 2;
      constexpr int kMemory = kTiles * kShortTile * static_cast<int>(sizeof(T));
      return launch_attention(attention_bwd_short_kernel<T, kWarps>, a, 1, kWarps * kWarp, kMemory, stream);
    });
  });
}

}  // namespace ls_train
