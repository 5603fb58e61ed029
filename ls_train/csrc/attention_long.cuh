// Attention of long sequences with heads of up to 64 on tensor cores, what its three kernels share.
//
// A warp keeps its own rows as fragments in registers for the whole kernel, and one that owns queries has two tiles of
// 16 rows, so that each fragment of keys and values that is read from shared memory, which is the narrowest resource
// here, is used twice. The other side passes by in stages of 64 rows; the next stage arrives while one is in use, and
// there is one barrier a stage. Only chunks that a mask cuts are masked.
#pragma once

#include "attention_tiles.cuh"

namespace ls_train {

constexpr int kLongWarps = 4;
constexpr int kStageRows = 64;

template <int kDim>
using RowFragments = uint32_t[kDim / 16][4];

// 16 rows of a tile as left factors.
template <int kDim, class T>
__device__ __forceinline__ void load_fragments(RowFragments<kDim>& a, const T* rows) {
  const int lane = threadIdx.x % kWarp;
  const T* row = rows + lane % 16 * kTileStride<kDim> + lane / 16 * 8;
#pragma unroll
  for (int k = 0; k < kDim; k += 16) load_matrices(a[k / 16], row + k);
}

// c[r] (16 own rows x 32 other rows) += own[r] * other^T over the padded head size.
template <int kDim, int kRows, class T>
__device__ __forceinline__ void add_dots(float (&c)[kRows][kChunkTiles][4], const RowFragments<kDim> (&own)[kRows],
                                         const T* other) {
  constexpr int kStride = kTileStride<kDim>;
  const int lane = threadIdx.x % kWarp;
  const T* row = other + (lane % 8 + lane / 16 * 8) * kStride + lane / 8 % 2 * 8;
#pragma unroll
  for (int k = 0; k < kDim; k += 16) {
#pragma unroll
    for (int t = 0; t < kChunkTiles; t += 2) {
      uint32_t b[4];
      load_matrices(b, row + t * 8 * kStride + k);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        multiply_add(c[r][t], own[r][k / 16], b[0], b[1], T());
        multiply_add(c[r][t + 1], own[r][k / 16], b[2], b[3], T());
      }
    }
  }
}

// c[r] (16 x kDim) += x[r] (16 x 32, rounded) * 32 rows of a tile.
template <int kDim, int kRows, class T>
__device__ __forceinline__ void add_products(float (&c)[kRows][kDim / 8][4], const float (&x)[kRows][kChunkTiles][4],
                                             const T* rows) {
  constexpr int kStride = kTileStride<kDim>;
  const int lane = threadIdx.x % kWarp;
  const T* row = rows + lane % 16 * kStride + lane / 16 * 8;
#pragma unroll
  for (int k = 0; k < kChunkTiles; k += 2) {
    uint32_t a[kRows][4];
#pragma unroll
    for (int r = 0; r < kRows; ++r) as_factor<T>(a[r], x[r][k], x[r][k + 1]);
#pragma unroll
    for (int t = 0; t < kDim / 8; t += 2) {
      uint32_t b[4];
      load_matrices_transposed(b, row + k * 8 * kStride + t * 8);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        multiply_add(c[r][t], a[r], b[0], b[1], T());
        multiply_add(c[r][t + 1], a[r], b[2], b[3], T());
      }
    }
  }
}

// Two tensors (keys and values, or queries and the output's gradient) whose rows pass by in stages, in two places.
template <class T, int kDim>
struct Stages {
  static constexpr int kTile = kStageRows * kTileStride<kDim>;  // elements
  static constexpr int kBytes = 4 * kTile * static_cast<int>(sizeof(T));

  T* memory;

  __device__ __forceinline__ T* first(int stage) const { return memory + stage % 2 * 2 * kTile; }
  __device__ __forceinline__ T* second(int stage) const { return first(stage) + kTile; }

  // Starts the copy of `count` rows from `row` on, zeros beyond them.
  __device__ __forceinline__ void load(int stage, const HeadRows& x, const HeadRows& y, int64_t row, int head,
                                       int count, int dim) const {
    load_rows<kDim>(first(stage), x, row, head, count, kStageRows, dim);
    load_rows<kDim>(second(stage), y, row, head, count, kStageRows, dim);
  }
};

// Makes the copies that this block started visible to it, and says that it is done with the stage before.
__device__ __forceinline__ void wait_stage() {
  commit_copies();
  wait_copies<0>();
  __syncthreads();
}

// What a block that owns queries knows of them and of its warp's.
struct OwnQueries {
  int first, rows;      // of the block
  int warp_row;         // in the block
  int keys, warp_keys;  // seen by any of the block's, of the warp's queries
  int common_keys;      // seen by all of the warp's

  __device__ __forceinline__ OwnQueries(const Attention& a, const Task& task) {
    const Sequence& seq = task.sequence;
    first = task.tile * a.q_rows;
    rows = min(a.q_rows, seq.q_len - first);
    warp_row = static_cast<int>(threadIdx.x) / kWarp * kQueryRows;
    keys = rows > 0 ? seq.key_limit(first + rows - 1) : 0;
    warp_keys = warp_row < rows ? seq.key_limit(min(first + warp_row + kQueryRows, seq.q_len) - 1) : 0;
    common_keys = seq.key_limit(first + warp_row);
  }

  // Position in the sequence of row g + 8 h of tile r.
  __device__ __forceinline__ int row(int r, int h) const {
    return first + warp_row + r * kWarpRows + h * 8 + static_cast<int>(threadIdx.x) % kWarp / 4;
  }

  // Scores of the chunk from `key` on that are not seen become -inf.
  __device__ __forceinline__ void mask(float (&s)[kRowTiles][kChunkTiles][4], const Sequence& seq, int key) const {
    if (key + kChunk <= common_keys) return;
    const int column = key + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int limit = seq.key_limit(row(r, h)) - column;
#pragma unroll
        for (int i = 0; i < kChunkTiles * 2; ++i) {
          if (i / 2 * 8 + i % 2 >= limit) s[r][i / 2][h * 2 + i % 2] = -INFINITY;
        }
      }
    }
  }
};

// A block that owns queries: its work, and the keys and values that pass by.
template <class T, int kDim>
struct QueryBlock {
  const Attention& a;
  const Task task;
  const OwnQueries own;
  const Stages<T, kDim> stages;

  __device__ __forceinline__ QueryBlock(const Attention& arguments, void* shared)
      : a(arguments),
        task(block_task(arguments, arguments.q_tiles)),
        own(arguments, task),
        stages{static_cast<T*>(shared)} {}

  // Memory of the i-th tensor of own rows, behind the stages.
  __device__ __forceinline__ T* own_tile(int i) const {
    return stages.memory + 4 * stages.kTile + i * a.q_rows * kTileStride<kDim>;
  }

  __device__ __forceinline__ void load_own(int i, const HeadRows& x) const {
    if (own.keys == 0) return;
    load_rows<kDim>(own_tile(i), x, task.sequence.q_start + own.first, task.head, own.rows, a.q_rows, a.dim);
  }

  __device__ __forceinline__ void load_stage(int stage) const {
    const Sequence& seq = task.sequence;
    const int key = stage * kStageRows;
    if (key < own.keys) stages.load(stage, a.k, a.v, seq.k_start + key, task.head, seq.k_len - key, a.dim);
  }

  // The warp's rows of the i-th tensor as left factors.
  __device__ __forceinline__ void load_own_fragments(RowFragments<kDim> (&x)[kRowTiles], int i) const {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      load_fragments<kDim>(x[r], own_tile(i) + (own.warp_row + r * kWarpRows) * kTileStride<kDim>);
    }
  }

  // Goes through the chunks of keys that any of the warp's queries sees: body(first key, keys, values, decisions).
  template <class Body>
  __device__ __forceinline__ void for_chunks(const DropoutKey& dropout, Body&& body) const {
    for (int start = 0; start < own.keys; start += kStageRows) {
      const int stage = start / kStageRows;
      if (stage > 0) wait_stage();
      load_stage(stage + 1);
#pragma unroll 1
      for (int key = start; key < min(start + kStageRows, own.warp_keys); key += kChunk) {
        KeepRows keep[kRowTiles];
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          keep[r] = keep_rows(dropout, task.sequence.q_start + own.row(r, 0), task.head, key / kChunk);
        }
        const int at = (key - start) * kTileStride<kDim>;
        body(key, stages.first(stage) + at, stages.second(stage) + at, keep);
      }
    }
  }

  __device__ __forceinline__ void store_own(const HeadRows& x, int r, const float (&c)[kDim / 8][4],
                                            const float (&factor)[2]) const {
    const int row = own.warp_row + r * kWarpRows;
    if (row >= own.rows) return;
    store_rows(x.at<T>(task.sequence.q_start + own.first + row, task.head), x.row_stride, own.rows - row, a.dim, c,
               factor);
  }
};

// In: a score (unscaled) and the gradient of its probability after dropout. Out: the probability if dropout let it
// through, and the gradient of the scaled score.
__device__ __forceinline__ void score_gradient(float& s, float& d, bool keep, float keep_scale, float scale2,
                                               float lse2, float delta) {
  const float p = fast_exp2(s * scale2 - lse2);
  d = p * ((keep ? d : 0.f) * keep_scale - delta);
  s = keep ? p : 0.f;
}

// Blocks of warps that own queries.
inline int plan_queries(Attention& a, int64_t max_q) {
  const int64_t queries = std::max<int64_t>(max_q, 1);
  const int warps = static_cast<int>(std::min<int64_t>(kLongWarps, ceil_div<int64_t>(queries, kQueryRows)));
  a.q_rows = warps * kQueryRows;
  a.q_tiles = static_cast<int>(ceil_div<int64_t>(queries, a.q_rows));
  return warps;
}

}  // namespace ls_train
