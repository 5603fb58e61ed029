// How rows (N, C) are laid over threads, and the partial column sums of parameter gradients.
//
// Three layouts:
// - Row groups: `lanes` neighbouring threads (a power of two) share one row and reduce over it.
// - Tiles: a thread owns one pack column and walks down rows; nothing is reduced over a row.
// - Column sums: every row block adds its rows in a fixed order into one row of the workspace, [sum][row block][C], and
//   finish_column_sums adds these in a fixed order into the gradients. No atomics: two runs give the same bits.
#pragma once

#include <algorithm>

#include "device.cuh"
#include "ops.h"

namespace ls_train {

// ---------------------------------------------------------------------------------------------------------------
// Row groups

struct RowGroups {
  dim3 block;       // (lanes, groups)
  unsigned blocks;  // enough for one row a group
};

// Lanes for rows of `columns` elements: one pack a thread up to a warp, so that short rows stay coalesced, then up to
// `per_thread` elements a thread, then more warps up to max_lanes.
inline RowGroups row_groups(int64_t rows, int64_t columns, int width, int per_thread, int max_lanes) {
  const int64_t packs = ceil_div(columns, static_cast<int64_t>(width));
  int lanes = 1;
  while (lanes < kWarp && lanes < packs) lanes *= 2;
  while (lanes < max_lanes && static_cast<int64_t>(lanes) * per_thread < columns) lanes *= 2;
  const int groups = std::max(1, 256 / lanes);
  return {dim3(lanes, groups), static_cast<unsigned>(ceil_div(rows, static_cast<int64_t>(groups)))};
}

__device__ __forceinline__ int linear_thread() { return static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x); }

// ---------------------------------------------------------------------------------------------------------------
// Tiles

constexpr int kTileThreads = 256;
constexpr int kTileRows = 4;    // rows a thread loads before it uses the first: bytes in flight
constexpr int kTileBlocks = 3;  // blocks a multiprocessor must hold: bounds the registers

constexpr int kAnyRowBlocks = 65535;  // what a grid can have

struct Tiles {
  dim3 block;  // (pack columns, rows)
  dim3 grid;   // (column blocks, row blocks)
};

// About 1056 blocks (eight on each of 132 multiprocessors) and at most max_row_blocks of them one below another. The
// numbers are constants, not the card's, so that a sum has the same order of additions on every card.
inline Tiles tiles(int64_t rows, int64_t columns, int width, int max_row_blocks) {
  constexpr int64_t kBlocks = 1056;
  const int64_t packs = ceil_div(columns, static_cast<int64_t>(width));
  int lanes = 1;
  while (lanes < kWarp && lanes < packs) lanes *= 2;
  const int64_t column_blocks = std::max<int64_t>(1, ceil_div(packs, static_cast<int64_t>(lanes)));
  const int64_t tile_rows = kTileThreads / lanes;
  const int64_t row_blocks = std::min({std::max<int64_t>(1, ceil_div(kBlocks, column_blocks)),
                                       static_cast<int64_t>(max_row_blocks), ceil_div(rows, tile_rows)});
  return {dim3(lanes, static_cast<unsigned>(tile_rows)),
          dim3(static_cast<unsigned>(column_blocks), static_cast<unsigned>(row_blocks))};
}

// The rows of one thread: first, first + step, ...
struct TileWalk {
  int64_t first, step;
  int column;
};

template <int kWidth>
__device__ __forceinline__ TileWalk tile_walk() {
  return {static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y, static_cast<int64_t>(gridDim.y) * blockDim.y,
          static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) * kWidth)};
}

// Dropout of kRows rows first, first + step, ... of a tile. All threads of the block must construct it.
template <int kWidth, int kRows>
class TileDropout {
 public:
  __device__ __forceinline__ TileDropout(const DropoutKey& key, const TileWalk& walk, int64_t first) : key_(key) {
    if (kWidth > 1 || !key.active() || blockDim.x != kWarp) return;
    kept_ = keep_across<kRows>(
        key, static_cast<int>(threadIdx.x), [&](int r) { return first + r * walk.step; },
        [&](int) { return walk.column - static_cast<int>(threadIdx.x); });
  }

  // r: which of the rows; a compile-time constant.
  __device__ __forceinline__ void apply(float (&x)[kWidth], int r, int64_t row, int column) const {
    if (kWidth > 1 || blockDim.x != kWarp) {
      drop(x, key_, row, column);
    } else if (key_.active()) {
      x[0] = kept_ >> r & 1u ? x[0] * key_.scale : 0.f;
    }
  }

 private:
  const DropoutKey& key_;
  uint32_t kept_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------
// Column sums

// Adds `sums`, kPacks packs a thread at columns (first + k * blockDim.x) * kWidth, over threadIdx.y and writes them
// into one workspace row. first: pack column of threadIdx.x == 0. scratch: kPacks * kWidth floats a thread of the
// block. Every thread of the block must call it, those beyond the last column too.
template <int kWidth, int kPacks>
__device__ __forceinline__ void write_partial(float* partial, const float (&sums)[kPacks][kWidth], int64_t first,
                                              int columns, float* scratch) {
  constexpr int kElements = kPacks * kWidth;
  const int lanes = static_cast<int>(blockDim.x);
  const int groups = static_cast<int>(blockDim.y);
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      scratch[(threadIdx.y * kElements + k * kWidth + i) * lanes + threadIdx.x] = sums[k][i];
    }
  }
  __syncthreads();
  for (int slot = linear_thread(); slot < lanes * kElements; slot += lanes * groups) {
    const int element = slot / lanes;
    const int lane = slot % lanes;
    const int64_t column = (first + static_cast<int64_t>(element / kWidth) * lanes + lane) * kWidth + element % kWidth;
    if (column < columns) {
      float sum = 0.f;
      for (int group = 0; group < groups; ++group) sum += scratch[group * lanes * kElements + slot];
      partial[column] = sum;
    }
  }
}

// Adds the partial rows of up to three sums and writes (or adds, with accumulate) the gradients, (columns,) T each.
constexpr int kMaxColumnSums = 3;
struct ColumnSums {
  void* outputs[kMaxColumnSums];
  int count;
};
cudaError_t finish_column_sums(const ColumnSums& sums, DType dtype, const float* workspace, int row_blocks, int columns,
                               bool accumulate, cudaStream_t stream);

}  // namespace ls_train
