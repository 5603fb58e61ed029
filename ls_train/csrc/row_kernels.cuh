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
constexpr int kTileRows = 4;  // rows a thread loads before it uses the first: bytes in flight
// Blocks a multiprocessor must hold: bounds the registers. Code for targets before sm_90 would spill with four.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kTileBlocks = 3;
#else
constexpr int kTileBlocks = 4;
#endif

constexpr int kAnyRowBlocks = 65535;  // what a grid can have

// How many blocks share the tiles. A constant and not what the card has, so that a sum has the same order of additions
// on every card.
constexpr int64_t kCardfulBlocks = 1056;           // eight on each of 132 multiprocessors, each walks over its tiles
constexpr int64_t kBlockATile = int64_t{1} << 40;  // one a tile, as far as a grid can have them

struct Tiles {
  dim3 block;  // (pack columns, rows)
  dim3 grid;   // (column blocks, row blocks)
};

// At most about `blocks` blocks and max_row_blocks of them one below another, for tiles of rows_a_thread rows a thread;
// of fewer rows where there would not be a block for every second multiprocessor.
inline Tiles tiles(int64_t rows, int64_t columns, int width, int rows_a_thread, int max_row_blocks,
                   int64_t blocks = kCardfulBlocks) {
  const int64_t packs = ceil_div(columns, static_cast<int64_t>(width));
  int lanes = 1;
  while (lanes < kWarp && lanes < packs) lanes *= 2;
  const int64_t column_blocks = std::max<int64_t>(1, ceil_div(packs, static_cast<int64_t>(lanes)));
  const int64_t groups = kTileThreads / lanes;
  while (rows_a_thread > 1 && column_blocks * ceil_div(rows, groups * rows_a_thread) <= kCardfulBlocks / 16) {
    rows_a_thread /= 2;
  }
  const int64_t row_blocks = std::min({std::max<int64_t>(1, ceil_div(blocks, column_blocks)),
                                       static_cast<int64_t>(max_row_blocks), ceil_div(rows, groups * rows_a_thread)});
  return {dim3(lanes, static_cast<unsigned>(groups)),
          dim3(static_cast<unsigned>(column_blocks), static_cast<unsigned>(row_blocks))};
}

template <int kWidth>
__device__ __forceinline__ int tile_column() {
  return static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) * kWidth);
}

// The rows of one thread in a tile of kRows * blockDim.y rows: row(r) for 0 <= r < kRows.
template <int kRows>
struct Tile {
  int64_t first;   // row(0)
  uint32_t plane;  // upper half of all row numbers
  int left;        // used rows from row(0) on

  __device__ __forceinline__ int64_t row(int r) const { return first + r * static_cast<int>(blockDim.y); }
  __device__ __forceinline__ uint32_t low_row(int r) const { return static_cast<uint32_t>(first) + r * blockDim.y; }
  __device__ __forceinline__ bool is_used(int r) const { return r * static_cast<int>(blockDim.y) < left; }
};

// Rows [first, end) of one of `blocks` blocks: shares as equal as they can be.
struct RowShare {
  int64_t first, end;
};

__device__ __forceinline__ RowShare row_share(int64_t rows, unsigned blocks, unsigned block) {
  // The short division costs a tenth of the long one.
  const int64_t share = rows >> 32 ? rows / blocks : static_cast<uint32_t>(rows) / blocks;
  const int64_t rest = rows - share * blocks;
  const int64_t first = block * share + min(static_cast<int64_t>(block), rest);
  return {first, first + share + (block < rest)};
}

// Calls body(Tile) for the tiles of this block's share of the used rows, one share as large as another, in an inner
// loop where the plane does not change: what the generator computes of plane and column alone leaves that loop.
template <int kRows, class Body>
__device__ __forceinline__ void for_tiles(int64_t used, Body&& body) {
  const int rows = kRows * static_cast<int>(blockDim.y);
  const auto [start, last] = row_share(used, gridDim.y, blockIdx.y);
  int64_t first = start;
  while (first < last) {
    const uint32_t plane = static_cast<uint32_t>(static_cast<uint64_t>(first) >> 32);
    const int64_t end = min(last, (static_cast<int64_t>(plane) + 1) << 32);
    for (; first < end; first += rows) {
      const int left = static_cast<int>(min(end - first, static_cast<int64_t>(rows)));
      body(Tile<kRows>{first + threadIdx.y, plane, left - static_cast<int>(threadIdx.y)});
    }
    first = end;
  }
}

// Writes zeros into the rows that are not used.
template <int kWidth, class T>
__device__ __forceinline__ void clear_unused(T* y, int64_t used, int64_t n, int columns, int column) {
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  for (int64_t row = used + static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y; row < n; row += step) {
    store(y + row * columns + column, zero_pack<T, kWidth>());
  }
}

// Dropout of the rows of a tile, decided for all of them at once, while their elements are on the way. With kWidth 1
// all threads of the block must construct it.
template <int kWidth, int kRows>
class TileDropout {
 public:
  __device__ __forceinline__ TileDropout(const DropoutKey& key, const Tile<kRows>& tile, int column)
      : key_(key), column_(column) {
    if (!key.active()) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) keep_[r] = keep_all();
    } else if (kWidth == 1 && blockDim.x == kWarp) {
      kept_ = keep_across<kRows>(
          key, static_cast<int>(threadIdx.x), [&](int r) { return tile.row(r); },
          [&](int) { return column - static_cast<int>(threadIdx.x); });
    } else {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        keep_[r] = keep8_plane(key, tile.plane, tile.low_row(r), static_cast<uint32_t>(column) / 8);
      }
    }
  }

  // r: which of the rows; a compile-time constant.
  __device__ __forceinline__ void apply(float (&x)[kWidth], int r) const {
    if (kWidth == 1 && blockDim.x == kWarp && key_.active()) {
      x[0] = kept_ >> r & 1u ? x[0] * key_.scale : 0.f;
    } else {
      drop(x, keep_[r], key_.scale, column_);
    }
  }

  // The same for the pack that x (kPositive: max(x, 0)) becomes, with fewer instructions for 16-bit types.
  template <class T, bool kPositive = false>
  __device__ __forceinline__ Pack<T, kWidth> apply_and_pack(float (&x)[kWidth], int r) const {
    if constexpr (kWidth == 8) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] *= key_.scale;
      Pack<T, kWidth> pack = kPositive ? pack_positive_parts<T>(x) : pack_floats<T>(x);
      clear_dropped(pack, keep_[r]);
      return pack;
    } else {
      apply(x, r);
      return kPositive ? pack_positive_parts<T>(x) : pack_floats<T>(x);
    }
  }

 private:
  const DropoutKey& key_;
  int column_;
  Keep8 keep_[kRows];
  uint32_t kept_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------
// Column sums

// Adds `sums`, kPacks packs a thread at columns (first + k * blockDim.x) * kWidth, over threadIdx.y and writes them
// into one workspace row, which is aligned to 16 bytes where kWidth > 1. first: pack column of threadIdx.x == 0.
// scratch: kPacks * kWidth floats a thread of the block. Every thread of the block must call it, those beyond the last
// column too.
template <int kWidth, int kPacks>
__device__ __forceinline__ void write_partial(float* partial, const float (&sums)[kPacks][kWidth], int64_t first,
                                              int columns, float* scratch) {
  constexpr int kElements = kPacks * kWidth;
  constexpr int kChunk = kWidth > 1 ? 4 : 1;
  const int lanes = static_cast<int>(blockDim.x), lane = static_cast<int>(threadIdx.x);
  const int groups = static_cast<int>(blockDim.y);
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      scratch[(static_cast<int>(threadIdx.y) * kElements + k * kWidth + i) * lanes + lane] = sums[k][i];
    }
  }
  __syncthreads();
  for (int chunk = static_cast<int>(threadIdx.y); chunk < kElements / kChunk; chunk += groups) {
    const int k = chunk * kChunk / kWidth;
    const int64_t column = (first + static_cast<int64_t>(k) * lanes + lane) * kWidth + chunk * kChunk % kWidth;
    if (column >= columns) continue;
    float total[kChunk] = {};
    for (int group = 0; group < groups; ++group) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) total[i] += scratch[(group * kElements + chunk * kChunk + i) * lanes + lane];
    }
    store(partial + column, pack_floats<float>(total));
  }
}

// What becomes of the partial rows of up to three sums. Without partial_rows they are added up into the gradients,
// (columns,) T each; otherwise they stay, and their number goes to partial_rows, for a later column_sum.
constexpr int kMaxColumnSums = 3;
struct ColumnSums {
  void* outputs[kMaxColumnSums];
  int count;
};
cudaError_t finish_column_sums(const ColumnSums& sums, DType dtype, const float* workspace, int row_blocks, int columns,
                               bool accumulate, const TensorRef& partial_rows, cudaStream_t stream);

}  // namespace ls_train
