// Attention backward of long sequences with heads of up to 64, on tensor cores: two kernels, which keep probabilities
// and their gradients in registers.
//
// The first makes dq and the rows' sums of dout * out: a block owns 128 queries of one sequence and head, a warp 16 of
// them, and keys and values pass by as in the forward. The second makes dk and dv: a block owns 64 keys, a warp 16 of
// them, queries and dout pass by, and scores are computed transposed, 16 keys x 32 queries, so that they are left
// factors of dv += probs^T dout and dk += dscores^T q as they stand. A generator call decides eight keys of one query,
// which no thread of the second kernel holds; its block draws a stage's decisions ahead, into shared memory. Every sum
// is made by one thread in a fixed order.
// Bytes: q, k, v, dout read twice, out once, dq, dk, dv written once, (6 Nq + 6 Nk) * H * D * 2, and 16 * Nq * H of lse
// and sums; more from L2 for every further 128 queries or 64 keys.
#include "attention_long.cuh"

namespace ls_train {
namespace {

// ---------------------------------------------------------------------------------------------------------------
// Gradient of the queries

constexpr int kQueryWarps = 8;   // of a block
constexpr int kQueryBlocks = 2;  // of a multiprocessor

template <class T, int kDim, bool kDropout>
__global__ void __launch_bounds__(kQueryWarps* kWarp, kQueryBlocks) attention_bwd_long_dq_kernel(Attention a) {
#ifdef LS_TRAIN_TENSOR_CORES
  extern __shared__ uint4 shared[];  // two stages, then q, dout: (q_rows, kTileStride)
  const QueryBlock<T, kDim, kQueryWarps> block(a, shared);
  const OwnQueries& own = block.own;
  const Sequence& seq = block.task.sequence;
  block.load_own(0, a.q);
  block.load_own(1, a.dout);
  block.load_stage(0);
  const DropoutKey dropout = dropout_key(a.dropout);
  zero_unused<T, 8>(a, a.dq, block.task.used_q, a.n_q);
  if (own.rows <= 0) return;

  const QueryTerms terms(dropout.scale);
  float lse2[2], delta[4];  // terms, delta as an accumulator
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = own.row(h);
    const int64_t packed = seq.q_start + min(row, seq.q_len - 1);
    const int64_t at = packed * a.heads + block.task.head;
    const float sum = row_sum<kDim, T>(a, packed, block.task.head);
    const float2 term = terms(a.lse[at], sum);
    lse2[h] = term.x;
    delta[h * 2] = delta[h * 2 + 1] = term.y;
    if (threadIdx.x % 4 == 0 && row < seq.q_len) a.delta[at] = sum;
  }

  const float scale2 = a.scale * kLog2E;
  const uint32_t threshold = dropout.threshold();
  float dq[kDim / 8][4] = {};
  wait_stage();
  RowFragments<kDim> queries, gradients;
  block.load_own_fragments(queries, 0);
  block.load_own_fragments(gradients, 1);

  block.for_chunks([&](int key, const T* keys, const T* values) {
    float s[kChunkTiles][4], d[kChunkTiles][4];
    dots<kDim>(s, queries, keys, FromZero());
    dots<kDim>(d, gradients, values, [&](int) -> const float (&)[4] { return delta; });
    own.mask(s, seq, key);
    uint32_t dscores[kChunkTiles / 2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Lanes8 lanes = {};
      if constexpr (kDropout) lanes = block.lanes(dropout, h, key);
#pragma unroll
      for (int t = 0; t < kChunkTiles; ++t) {
        float x = d[t][h * 2], y = d[t][h * 2 + 1];
        if constexpr (kDropout) select_kept(x, y, lanes.word[t], threshold, delta[h * 2]);
        x *= fast_exp2(s[t][h * 2] * scale2 - lse2[h]);
        y *= fast_exp2(s[t][h * 2 + 1] * scale2 - lse2[h]);
        dscores[t / 2][t % 2 * 2 + h] = pack_pair(x, y, T());
      }
    }
    add_products<kDim>(dq, dscores, keys);
  });

  block.store_own(a.dq, dq, {a.scale, a.scale});
#endif
}

// ---------------------------------------------------------------------------------------------------------------
// Gradients of keys and values

// Blocks of a multiprocessor: older ones have the shared memory for two.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kKeyBlocks = 2;
#else
constexpr int kKeyBlocks = 3;
#endif
constexpr int kKeyWarps = 4;  // of a block
constexpr int kKeyThreads = kKeyWarps * kWarp;
constexpr int kBlockKeys = kKeyWarps * kWarpRows;

// Per stage of queries, in two places.
struct QueryStage {
  float2 terms[kStageRows];                        // QueryTerms
  uint32_t keep[kBlockKeys / kChunk][kStageRows];  // bits, one for each of the 32 keys that four generator calls decide
};

template <class T, int kDim, bool kDropout>
__global__ void __launch_bounds__(kKeyThreads, kKeyBlocks) attention_bwd_long_keys_kernel(Attention a) {
#ifdef LS_TRAIN_TENSOR_CORES
  constexpr int kStride = kTileStride<kDim>;
  extern __shared__ uint4 shared[];  // two stages, then k, v: (kBlockKeys, kStride), two of QueryStage
  const Task task = block_task(a, a.k_tiles);
  const Sequence& seq = task.sequence;
  const Stages<T, kDim, kKeyThreads> stages = {reinterpret_cast<T*>(shared)};
  T* k = stages.memory + 4 * stages.kTile;
  T* v = k + kBlockKeys * kStride;
  QueryStage* const rows_of = reinterpret_cast<QueryStage*>(v + kBlockKeys * kStride);
  const int block_key = task.tile * kBlockKeys;
  const int keys = max(0, min(kBlockKeys, seq.k_len - block_key));
  // Queries before the first that sees any of the keys are left out.
  const int start = keys > 0 ? seq.first_query(block_key) : seq.q_len;
  const int lane = threadIdx.x % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const DropoutKey dropout = dropout_key(a.dropout);
  const QueryTerms terms(dropout.scale);

  const auto load = [&](int stage) {
    const int first = start + stage * kStageRows;
    if (first >= seq.q_len) return;
    QueryStage& rows = rows_of[stage % 2];
    const int count = min(kStageRows, seq.q_len - first);
    stages.load(stage, a.q, a.dout, seq.q_start + first, task.head, count, a.dim);
    float lse = 0.f, sum = 0.f;  // on their way while the generator runs
    if (threadIdx.x < kStageRows) {
      const int64_t at = (seq.q_start + first + min(static_cast<int>(threadIdx.x), count - 1)) * a.heads + task.head;
      lse = a.lse[at];
      sum = a.delta[at];
    }
    if constexpr (kDropout) {
      const int quad = threadIdx.x % 4;
#pragma unroll 1
      for (int block = 0; block * kChunk < keys; ++block) {
#pragma unroll
        for (int i = 0; i < kStageRows; i += kKeyThreads / 4) {
          const int row = i + static_cast<int>(threadIdx.x) / 4;
          const Masks8 masks =
              masks8_attention(dropout, seq.q_start + first + row, task.head, block_key / kChunk + block, quad);
          reinterpret_cast<uint8_t*>(&rows.keep[block][row])[quad] = static_cast<uint8_t>(masks.bits());
        }
      }
    }
    if (threadIdx.x < kStageRows) rows.terms[threadIdx.x] = terms(lse, sum);
  };

  if (start < seq.q_len) {
    load_block_rows<kDim, kKeyThreads, kBlockKeys>(k, a.k, seq.k_start + block_key, task.head, keys, a.dim);
    load_block_rows<kDim, kKeyThreads, kBlockKeys>(v, a.v, seq.k_start + block_key, task.head, keys, a.dim);
  }
  load(0);
  zero_unused<T, 8>(a, a.dk, task.used_k, a.n_k);
  zero_unused<T, 8>(a, a.dv, task.used_k, a.n_k);
  wait_stage();
  const int warp_key = warp * kWarpRows;  // in the block
  const int key = block_key + warp_key;   // in the sequence
  // Where a query's word has the decision for row g of the warp's keys, two warps a block of 32: byte g / 2 comes from
  // the generator call that the accumulator columns 2 * (g / 2) and one more share. Eight rows on: two bits on.
  const uint32_t bit = 1u << (lane / 4 / 2 * 8 + warp_key % kChunk / 4 + lane / 4 % 2);
  const float scale2 = a.scale * kLog2E;
  RowFragments<kDim> own_keys, own_values;
  load_fragments<kDim>(own_keys, k + warp_key * kStride);
  load_fragments<kDim>(own_values, v + warp_key * kStride);
  float dk[kDim / 8][4] = {}, dv[kDim / 8][4] = {};

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
      float4 pairs[kChunkTiles];  // QueryTerms of two queries
      float deltas[kChunkTiles][4];
#pragma unroll
      for (int t = 0; t < kChunkTiles; ++t) {
        pairs[t] = *reinterpret_cast<const float4*>(rows.terms + at + t * 8 + lane % 4 * 2);
        deltas[t][0] = deltas[t][2] = pairs[t].y;
        deltas[t][1] = deltas[t][3] = pairs[t].w;
      }
      float s[kChunkTiles][4], d[kChunkTiles][4];
      dots<kDim>(s, own_keys, q, FromZero());
      dots<kDim>(d, own_values, dout, [&](int t) -> const float (&)[4] { return deltas[t]; });
      if (first + kChunk > seq.q_len || seq.key_limit(first) < key + kWarpRows) {
#pragma unroll
        for (int i = 0; i < kChunkTiles * 4; ++i) {
          const int limit = seq.key_limit(first + i / 4 * 8 + lane % 4 * 2 + i % 2);
          if (key + lane / 4 + i % 4 / 2 * 8 >= limit) s[i / 4][i % 4] = -INFINITY;
        }
      }
      uint32_t probs[kChunkTiles / 2][4], dscores[kChunkTiles / 2][4];
#pragma unroll
      for (int t = 0; t < kChunkTiles; ++t) {
        uint2 keep = {};
        if constexpr (kDropout) {
          keep = *reinterpret_cast<const uint2*>(rows.keep[warp_key / kChunk] + at + t * 8 + lane % 4 * 2);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float x = fast_exp2(s[t][h * 2] * scale2 - pairs[t].x);
          const float y = fast_exp2(s[t][h * 2 + 1] * scale2 - pairs[t].z);
          const bool keep_x = !kDropout || (keep.x & bit << (h * 2)) != 0;
          const bool keep_y = !kDropout || (keep.y & bit << (h * 2)) != 0;
          const float dx = keep_x ? d[t][h * 2] : pairs[t].y, dy = keep_y ? d[t][h * 2 + 1] : pairs[t].w;
          dscores[t / 2][t % 2 * 2 + h] = pack_pair(x * dx, y * dy, T());
          probs[t / 2][t % 2 * 2 + h] = pack_pair(keep_x ? x : 0.f, keep_y ? y : 0.f, T());
        }
      }
      add_products<kDim>(dv, probs, dout);
      add_products<kDim>(dk, dscores, q);
    }
  }

  const int left = keys - warp_key;
  if (left <= 0) return;
  const int64_t row = seq.k_start + key;
  store_rows(a.dk.at<T>(row, task.head), a.dk.row_stride, left, a.dim, dk, {a.scale, a.scale});
  store_rows(a.dv.at<T>(row, task.head), a.dv.row_stride, left, a.dim, dv, {1.f, 1.f});
#endif
}

// ---------------------------------------------------------------------------------------------------------------
// Launcher

template <class T, int kDim, bool kDropout>
cudaError_t launch(Attention a, int64_t max_q, int64_t max_k, cudaStream_t stream) {
  using Block = QueryBlock<T, kDim, kQueryWarps>;
  constexpr int kRowBytes = kTileStride<kDim> * static_cast<int>(sizeof(T));
  constexpr int kKeysBytes = 2 * kBlockKeys * kRowBytes + 2 * static_cast<int>(sizeof(QueryStage));
  plan_queries(a, max_q, Block::kQueries);
  const cudaError_t error = launch_attention(attention_bwd_long_dq_kernel<T, kDim, kDropout>, a, a.q_tiles,
                                             Block::kThreads, Block::memory(2), stream);
  if (error != cudaSuccess) return error;
  const int64_t keys = std::max<int64_t>(max_k, 1);
  a.k_tiles = static_cast<int>(ceil_div<int64_t>(keys, kBlockKeys));
  return launch_attention(attention_bwd_long_keys_kernel<T, kDim, kDropout>, a, a.k_tiles, kKeyThreads,
                          Stages<T, kDim, kKeyThreads>::kBytes + kKeysBytes, stream);
}

}  // namespace

cudaError_t attention_bwd_long(const Attention& a, DType dtype, int64_t max_q, int64_t max_k, cudaStream_t stream) {
  return dispatch_half_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return dispatch_long(a, [&](auto dim, auto dropout) {
      return launch<T, decltype(dim)::value, decltype(dropout)::value>(a, max_q, max_k, stream);
    });
  });
}

}  // namespace ls_train
