// Attention backward of long sequences with heads of up to 64, on tensor cores: two kernels, which keep probabilities
// and their gradients in registers.
//
// The first makes dq and the rows' sums of dout * out: as in the forward, a block owns up to 128 queries of one
// sequence and head, a warp 32 of them, and keys and values pass by. The second makes dk and dv: a block owns 64 keys,
// a warp 16 of them, queries and dout pass by, and scores are computed transposed, 16 keys x 32 queries, so that they
// are left factors of dv += probs^T dout and dk += dscores^T q as they stand. A generator call decides eight keys of
// one query, which no thread of the second kernel holds; its block draws a stage's decisions ahead, into shared memory.
// Every sum is made by one thread in a fixed order.
// Bytes: q, k, v, dout read twice, out once, dq, dk, dv written once, (6 Nq + 6 Nk) * H * D * 2, and 16 * Nq * H of lse
// and sums; more from L2 for every further 128 queries or 64 keys.
#include "attention_long.cuh"

namespace ls_train {
namespace {

// ---------------------------------------------------------------------------------------------------------------
// Gradient of the queries

template <class T, int kDim>
__global__ void __launch_bounds__(kLongWarps* kWarp, 2) attention_bwd_long_dq_kernel(Attention a) {
#ifdef LS_TRAIN_TENSOR_CORES
  extern __shared__ uint4 shared[];  // two stages, then q, dout: (q_rows, kTileStride)
  const QueryBlock<T, kDim> block(a, shared);
  const OwnQueries& own = block.own;
  const Sequence& seq = block.task.sequence;
  block.load_own(0, a.q);
  block.load_own(1, a.dout);
  block.load_stage(0);
  const DropoutKey dropout = dropout_key(a.dropout);
  zero_unused<T, 8>(a, a.dq, block.task.used_q, a.n_q);
  if (own.rows <= 0) return;

  float lse2[kRowTiles][2], delta[kRowTiles][2];
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = own.row(r, h);
      const int64_t packed = seq.q_start + min(row, seq.q_len - 1);
      const int64_t at = packed * a.heads + block.task.head;
      lse2[r][h] = fmaxf(a.lse[at] * kLog2E, kLowestLse);
      delta[r][h] = row_sum<kDim, T>(a, packed, block.task.head);
      if (threadIdx.x % 4 == 0 && row < seq.q_len) a.delta[at] = delta[r][h];
    }
  }

  const float scale2 = a.scale * kLog2E;
  float dq[kRowTiles][kDim / 8][4] = {};
  wait_stage();
  RowFragments<kDim> queries[kRowTiles], gradients[kRowTiles];
  block.load_own_fragments(queries, 0);
  block.load_own_fragments(gradients, 1);

  block.for_chunks(dropout, [&](int key, const T* keys, const T* values, const KeepRows(&keep)[kRowTiles]) {
    float s[kRowTiles][kChunkTiles][4] = {}, d[kRowTiles][kChunkTiles][4] = {};
    add_dots<kDim>(s, queries, keys);
    add_dots<kDim>(d, gradients, values);
    own.mask(s, seq, key);
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int t = 0; t < kChunkTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int h = i / 2;
          score_gradient(s[r][t][i], d[r][t][i], keep[r](h, t * 2 + i % 2), dropout.scale, scale2, lse2[r][h],
                         delta[r][h]);
        }
      }
    }
    add_products<kDim>(dq, d, keys);
  });

#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) block.store_own(a.dq, r, dq[r], {a.scale, a.scale});
#endif
}

// ---------------------------------------------------------------------------------------------------------------
// Gradients of keys and values

// Per stage of queries, in two places.
struct QueryStage {
  static constexpr int kBlocks = kStageRows / kChunk;  // of keys that a generator call belongs to

  float lse[kStageRows], delta[kStageRows];
  uint32_t keep[kBlocks][kStageRows];  // bits, one for each of the 32 keys of a block
};

template <class T, int kDim>
__global__ void __launch_bounds__(kLongWarps* kWarp, 2) attention_bwd_long_keys_kernel(Attention a) {
#ifdef LS_TRAIN_TENSOR_CORES
  constexpr int kStride = kTileStride<kDim>;
  extern __shared__ uint4 shared[];  // two stages, then k, v: (kStageRows, kStride), two of QueryStage
  const Task task = block_task(a, a.k_tiles);
  const Sequence& seq = task.sequence;
  const Stages<T, kDim> stages = {reinterpret_cast<T*>(shared)};
  T* k = stages.memory + 4 * stages.kTile;
  T* v = k + stages.kTile;
  QueryStage* const rows_of = reinterpret_cast<QueryStage*>(v + stages.kTile);
  const int block_key = task.tile * kStageRows;
  const int keys = max(0, min(kStageRows, seq.k_len - block_key));
  // Queries before the first that sees any of the keys are left out.
  const int start = keys > 0 ? seq.first_query(block_key) : seq.q_len;
  const int lane = threadIdx.x % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const DropoutKey dropout = dropout_key(a.dropout);

  const auto load = [&](int stage) {
    const int first = start + stage * kStageRows;
    if (first >= seq.q_len) return;
    QueryStage& rows = rows_of[stage % 2];
    const int count = min(kStageRows, seq.q_len - first);
    stages.load(stage, a.q, a.dout, seq.q_start + first, task.head, count, a.dim);
    for (int i = threadIdx.x; i < kStageRows; i += blockDim.x) {
      const int64_t at = (seq.q_start + first + min(i, count - 1)) * a.heads + task.head;
      copy_async<4>(rows.lse + i, a.lse + at, true);
      copy_async<4>(rows.delta + i, a.delta + at, true);
    }
    if (!dropout.active()) return;
    for (int i = threadIdx.x; i < round_up(keys, kChunk) / kChunk * kStageRows * 4; i += blockDim.x) {
      const int quad = i % 4, row = i / 4 % kStageRows, block = i / (4 * kStageRows);
      const Keep8 lanes =
          keep8_attention(dropout, seq.q_start + first + row, task.head, block_key / kChunk + block, quad);
      reinterpret_cast<uint8_t*>(&rows.keep[block][row])[quad] = static_cast<uint8_t>(keep_byte(lanes));
    }
  };

  if (start < seq.q_len) {
    load_rows<kDim>(k, a.k, seq.k_start + block_key, task.head, keys, kStageRows, a.dim);
    load_rows<kDim>(v, a.v, seq.k_start + block_key, task.head, keys, kStageRows, a.dim);
  }
  load(0);
  zero_unused<T, 8>(a, a.dk, task.used_k, a.n_k);
  zero_unused<T, 8>(a, a.dv, task.used_k, a.n_k);
  wait_stage();
  const int warp_key = warp * kWarpRows;  // in the block
  const int key = block_key + warp_key;   // in the sequence
  // Where a query's word has the decision for row g of the warp's keys, two tiles a block: byte g / 2 comes from the
  // generator call that the accumulator columns 2 * (g / 2) and one more share. Eight rows on: two bits on.
  const int bit = lane / 4 / 2 * 8 + warp % 2 * 4 + lane / 4 % 2;
  const float scale2 = a.scale * kLog2E;
  RowFragments<kDim> own_keys[1], own_values[1];
  load_fragments<kDim>(own_keys[0], k + warp_key * kStride);
  load_fragments<kDim>(own_values[0], v + warp_key * kStride);
  float dk[1][kDim / 8][4] = {}, dv[1][kDim / 8][4] = {};

  for (int stage_first = start; stage_first < seq.q_len; stage_first += kStageRows) {
    const int stage = (stage_first - start) / kStageRows;
    if (stage > 0) wait_stage();
    load(stage + 1);
    const QueryStage& rows = rows_of[stage % 2];
#pragma unroll 1
    for (int first = stage_first; first < min(stage_first + kStageRows, seq.q_len); first += kChunk) {
      if (seq.key_limit(min(first + kChunk, seq.q_len) - 1) <= key) continue;  // sees none of the warp's keys
      const int at = first - stage_first;
      const T* q = stages.first(stage) + at * kStride;
      const T* dout = stages.second(stage) + at * kStride;
      float s[1][kChunkTiles][4] = {}, d[1][kChunkTiles][4] = {};
      add_dots<kDim>(s, own_keys, q);
      add_dots<kDim>(d, own_values, dout);
      if (first + kChunk > seq.q_len || seq.key_limit(first) < key + kWarpRows) {
#pragma unroll
        for (int i = 0; i < kChunkTiles * 4; ++i) {
          const int limit = seq.key_limit(first + i / 4 * 8 + lane % 4 * 2 + i % 2);
          if (key + lane / 4 + i % 4 / 2 * 8 >= limit) s[0][i / 4][i % 4] = -INFINITY;
        }
      }
#pragma unroll
      for (int t = 0; t < kChunkTiles; ++t) {
        const int row = at + t * 8 + lane % 4 * 2;
        const float2 lse = *reinterpret_cast<const float2*>(rows.lse + row);
        const float2 delta = *reinterpret_cast<const float2*>(rows.delta + row);
        uint2 keep = {~0u, ~0u};
        if (dropout.active()) keep = *reinterpret_cast<const uint2*>(rows.keep[warp / 2] + row);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t word = (i % 2 ? keep.y : keep.x) >> bit;
          score_gradient(s[0][t][i], d[0][t][i], word >> (i / 2 * 2) & 1, dropout.scale, scale2,
                         fmaxf((i % 2 ? lse.y : lse.x) * kLog2E, kLowestLse), i % 2 ? delta.y : delta.x);
        }
      }
      add_products<kDim>(dv, s, dout);
      add_products<kDim>(dk, d, q);
    }
  }

  if (warp_key < keys) {
    const int64_t row = seq.k_start + key;
    store_rows(a.dk.at<T>(row, task.head), a.dk.row_stride, keys - warp_key, a.dim, dk[0], {a.scale, a.scale});
    store_rows(a.dv.at<T>(row, task.head), a.dv.row_stride, keys - warp_key, a.dim, dv[0],
               {dropout.scale, dropout.scale});
  }
#endif
}

// ---------------------------------------------------------------------------------------------------------------
// Launcher

template <class T, int kDim>
cudaError_t launch(Attention a, int64_t max_q, int64_t max_k, cudaStream_t stream) {
  constexpr int kRowBytes = kTileStride<kDim> * static_cast<int>(sizeof(T));
  constexpr int kKeysBytes = 2 * kStageRows * kRowBytes + 2 * static_cast<int>(sizeof(QueryStage));
  const int warps = plan_queries(a, max_q);
  const cudaError_t error = launch_attention(attention_bwd_long_dq_kernel<T, kDim>, a, a.q_tiles, warps * kWarp,
                                             Stages<T, kDim>::kBytes + 2 * a.q_rows * kRowBytes, stream);
  if (error != cudaSuccess) return error;
  const int64_t keys = std::max<int64_t>(max_k, 1);
  a.k_tiles = static_cast<int>(ceil_div<int64_t>(keys, kStageRows));
  return launch_attention(attention_bwd_long_keys_kernel<T, kDim>, a, a.k_tiles, kLongWarps * kWarp,
                          Stages<T, kDim>::kBytes + kKeysBytes, stream);
}

}  // namespace

cudaError_t attention_bwd_long(const Attention& a, DType dtype, int64_t max_q, int64_t max_k, cudaStream_t stream) {
  return dispatch_half_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return a.dim <= 32 ? launch<T, 32>(a, max_q, max_k, stream) : launch<T, 64>(a, max_q, max_k, stream);
  });
}

}  // namespace ls_train
