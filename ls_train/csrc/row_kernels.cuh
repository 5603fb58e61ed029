// How rows (N, C) are laid over threads, and the partial column sums of parameter gradients.
//
// Three layouts:
// - Row groups: `lanes` neighbouring threads (a power of two) share one row and reduce over it.
// - Tiles: a thread owns one pack column and walks down rows, which blocks take in turn or in shares; nothing is
//   reduced over a row.
// - Column sums: every row block adds its rows in a fixed order into one row of the workspace, [sum][row block][C], and
//   finish_column_sums adds these in a fixed order into the gradients. No atomics: two runs give the same bits.
#pragma once

#include <cuda_pipeline.h>

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

// `blocks`, or as many as a multiprocessor of the target has threads and registers for.
constexpr int tile_blocks(int blocks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  return blocks < 2 ? blocks : 2;
#else
  return blocks;
#endif
}

constexpr int kAnyRowBlocks = 65535;  // what a grid can have

// How many blocks share the tiles. A constant and not what the card has, so that a sum has the same order of additions
// on every card.
constexpr int64_t kCardfulBlocks = 1056;           // eight on each of 132 multiprocessors, each walks over its tiles
constexpr int64_t kBlockATile = int64_t{1} << 40;  // one a tile, as far as a grid can have them

struct Tiles {
  dim3 block;  // (pack columns, rows)
  dim3 grid;   // (column blocks, row blocks)
};

// At most `blocks` blocks, unless the columns alone need more (one more than fit at a time would run alone at the end),
// and max_row_blocks of them one below another, for tiles of rows_a_thread rows a thread; of fewer rows where there
// would not be a block for every second multiprocessor.
inline Tiles tiles(int64_t rows, int64_t columns, int width, int rows_a_thread, int max_row_blocks,
                   int64_t blocks = kCardfulBlocks, int threads = kTileThreads) {
  const int64_t packs = ceil_div(columns, static_cast<int64_t>(width));
  int lanes = 1;
  while (lanes < kWarp && lanes < packs) lanes *= 2;
  const int64_t column_blocks = std::max<int64_t>(1, ceil_div(packs, static_cast<int64_t>(lanes)));
  const int64_t groups = threads / lanes;
  while (rows_a_thread > 1 && column_blocks * ceil_div(rows, groups * rows_a_thread) <= kCardfulBlocks / 16) {
    rows_a_thread /= 2;
  }
  const int64_t row_blocks = std::min({std::max<int64_t>(1, blocks / column_blocks),
                                       static_cast<int64_t>(max_row_blocks), ceil_div(rows, groups * rows_a_thread)});
  return {dim3(lanes, static_cast<unsigned>(groups)),
          dim3(static_cast<unsigned>(column_blocks), static_cast<unsigned>(row_blocks))};
}

// Rows that blocks take in turn, so that memory is gone over from one end to the other. The host computes the
// distances, which are constants of instructions then.
struct Turns {
  uint32_t groups, step;  // rows between two of a thread's tile, and between the first ones of two tiles
  int64_t near, far;      // elements between two rows of a tile, and from a tile's last row to the next one's first
};

inline Turns turns(const Tiles& t, int rows_a_thread, int columns) {
  const uint32_t groups = t.block.y, step = groups * t.grid.y * static_cast<uint32_t>(rows_a_thread);
  const int64_t near = static_cast<int64_t>(groups) * columns;
  return {groups, step, near, static_cast<int64_t>(step) * columns - near * (rows_a_thread - 1)};
}

// Calls walk(plane, row, left) for every plane in which a thread has turns; row: the lower half of its first row there,
// which walk moves on to the last one, left: how many used rows of the plane follow it. first: the thread's first row.
template <class Walk>
__device__ __forceinline__ void for_planes(int64_t first, int64_t used, uint32_t step, Walk&& walk) {
  while (first < used) {
    const uint32_t plane = static_cast<uint32_t>(static_cast<uint64_t>(first) >> 32);
    uint32_t row = static_cast<uint32_t>(first);
    walk(plane, row, static_cast<uint32_t>(min(used, (static_cast<int64_t>(plane) + 1) << 32) - 1 - first));
    first = (static_cast<int64_t>(plane) << 32 | row) + step;
  }
}

// Calls body(plane, row, left) for the first row of each of a thread's tiles, as for_planes has them.
template <class Body>
__device__ __forceinline__ void for_turns(int64_t first, int64_t used, uint32_t step, Body&& body) {
  for_planes(first, used, step, [&](uint32_t plane, uint32_t& row, uint32_t left) {
#pragma unroll 1
    for (;;) {
      body(plane, row, left);
      if (left < step) break;
      left -= step;
      row += step;
    }
  });
}

// The same for single rows that go through shared memory, kStages at a time: fetch(k, stage) asks for the row that is k
// turns ahead with __pipeline_memcpy_async, body(plane, row, stage) waits for its row with
// __pipeline_wait_prior(kStages - 1).
template <int kStages, class Fetch, class Body>
__device__ __forceinline__ void for_ring_turns(int64_t first, int64_t used, uint32_t step, Fetch&& fetch, Body&& body) {
  const auto ask = [&](uint32_t left, int k, int stage) {
    if (left >= k * step) fetch(k, stage);
    __pipeline_commit();
  };
  for_planes(first, used, step, [&](uint32_t plane, uint32_t& row, uint32_t left) {
#pragma unroll
    for (int k = 0; k < kStages - 1; ++k) ask(left, k, k);
#pragma unroll 1
    for (bool more = true; more;) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        ask(left, kStages - 1, (stage + kStages - 1) % kStages);
        body(plane, row, stage);
        more = left >= step;
        if (!more) break;
        left -= step;
        row += step;
      }
    }
  });
}

// p + distance. Hides what it comes from: the compiler would compute every row's address anew. Nor does it know that p
// is of global memory then: store_global.
template <class T>
__device__ __forceinline__ void advance(T*& p, int64_t distance) {
  p += distance;
  asm volatile("" : "+l"(p));
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

// The pack that dropout makes of x (kPositive: of max(x, 0)), with fewer instructions for 16-bit types.
template <class T, bool kPositive = false, int kWidth, class Keep>
__device__ __forceinline__ Pack<T, kWidth> drop_and_pack(float (&x)[kWidth], const Keep& keep, float scale,
                                                         int column) {
  if constexpr (kWidth == 8) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] *= scale;
  } else {
    drop(x, keep, scale, column);
  }
  Pack<T, kWidth> pack = kPositive ? pack_positive_parts<T>(x) : pack_floats<T>(x);
  if constexpr (kWidth == 8) clear_dropped(pack, keep);
  return pack;
}

// The elements x of a pack after dropout.
template <class T, int kWidth, class Keep>
__device__ __forceinline__ void unpack_kept(Pack<T, kWidth> pack, float (&x)[kWidth], const Keep& keep, float scale,
                                            int column) {
  if constexpr (kWidth == 8) {
    clear_dropped(pack, keep);
    unpack(pack, x);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] *= scale;
  } else {
    unpack(pack, x);
    drop(x, keep, scale, column);
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

  // The same for the pack that x (kPositive: max(x, 0)) becomes.
  template <class T, bool kPositive = false>
  __device__ __forceinline__ Pack<T, kWidth> apply_and_pack(float (&x)[kWidth], int r) const {
    if constexpr (kWidth > 1) {
      return drop_and_pack<T, kPositive>(x, keep_[r], key_.scale, column_);
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

// Says that the launch of finish_column_sums may begin: its blocks come to the multiprocessors as room is left there
// and wait for the end of this kernel. To be called by all threads of a block.
__device__ __forceinline__ void let_sums_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Adds kSums sums, kPacks packs a thread at columns (first + k * blockDim.x) * kWidth, over threadIdx.y and writes the
// first `count` into a workspace row each, `stride` floats from the last one's and aligned to 16 bytes where kWidth
// > 1. first: pack column of threadIdx.x == 0. scratch: kSums * kPacks * kWidth floats a thread of the block, aligned
// as the rows. Every thread of the block must call it, those beyond the last column too.
template <int kWidth, int kPacks, int kSums>
__device__ __forceinline__ void write_partials(float* partial, int64_t stride,
                                               const float (&sums)[kSums][kPacks][kWidth], int count, int64_t first,
                                               int columns, float* scratch) {
  constexpr int kChunk = kWidth > 1 ? 4 : 1, kChunks = kWidth / kChunk;
  const int lanes = static_cast<int>(blockDim.x), groups = static_cast<int>(blockDim.y);
  // The second half of a pack lies four lanes further, so in other banks than the first.
  const auto slot = [&](int sum, int group, int k, int lane, int c) {
    const int row = ((sum * groups + group) * kPacks + k) * kChunks + c;
    return scratch + (row * lanes + (lane ^ (4 * c & (lanes - 1)))) * kChunk;
  };
  let_sums_launch();  // its blocks would take room from the rows before
  __syncthreads();
#pragma unroll
  for (int sum = 0; sum < kSums; ++sum) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        float values[kChunk];
#pragma unroll
        for (int i = 0; i < kChunk; ++i) values[i] = sums[sum][k][c * kChunk + i];
        store(slot(sum, static_cast<int>(threadIdx.y), k, static_cast<int>(threadIdx.x), c),
              pack_floats<float>(values));
      }
    }
  }
  __syncthreads();
  for (int sum = 0; sum < count; ++sum) {
    for (int k = 0; k < kPacks; ++k) {
      for (int j = linear_thread(); j < lanes * kChunks; j += lanes * groups) {
        const int64_t column = (first + static_cast<int64_t>(k) * lanes) * kWidth + j * kChunk;
        if (column >= columns) break;
        float total[kChunk] = {};
#pragma unroll 4
        for (int group = 0; group < groups; ++group) {
          const auto chunk = load<kChunk>(static_cast<const float*>(slot(sum, group, k, j / kChunks, j % kChunks)));
#pragma unroll
          for (int i = 0; i < kChunk; ++i) total[i] += chunk.v[i];
        }
        float* const out = partial + sum * stride + column;
        if constexpr (kChunk == 4) {
          // The compiler would make four stores of an ordinary one.
          __stcg(reinterpret_cast<float4*>(out), make_float4(total[0], total[1], total[2], total[3]));
        } else {
          *out = total[0];
        }
      }
    }
  }
}

// The same for one sum.
template <int kWidth, int kPacks>
__device__ __forceinline__ void write_partial(float* partial, const float (&sums)[kPacks][kWidth], int64_t first,
                                              int columns, float* scratch) {
  write_partials(partial, 0, reinterpret_cast<const float (&)[1][kPacks][kWidth]>(sums), 1, first, columns, scratch);
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
