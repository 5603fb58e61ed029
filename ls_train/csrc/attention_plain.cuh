// Attention without tensor cores: float32, any head size, any stride, any architecture.
//
// A block of four warps owns 16 rows of one sequence and head (queries; in the dK, dV kernel keys), four a warp, and
// goes through the other side in chunks of 32 with one of them a lane. Both sides pass through shared memory as float
// in pieces of 64 columns, so the head size has no limit; scores are computed again for every 64 columns of output.
#pragma once

#include "attention.cuh"

namespace ls_train {
namespace plain {

constexpr int kThreads = 128;
constexpr int kBlocks = 3;  // a multiprocessor
constexpr int kRows = 4;    // of a warp
constexpr int kBlockRows = kThreads / kWarp * kRows;
constexpr int kColumns = 64;
constexpr int kColumnsPerLane = kColumns / kWarp;

struct Tiles {
  float own[kBlockRows][kColumns];
  float other[kWarp][kColumns + 1];  // read by column with one row a lane: the odd stride avoids bank conflicts
};

template <class T>
struct Rows {  // of one head, from the block's or the chunk's first row to the end of the sequence
  T* x;
  int64_t stride;
  int count;

  __device__ __forceinline__ Rows from(int row) const { return {x + row * stride, stride, count - row}; }
};

template <class T>
__device__ __forceinline__ Rows<T> rows_of(const HeadRows& x, int64_t row, int head, int count) {
  return {x.at<T>(row, head), x.row_stride, count};
}

template <int kTileRows, int kStride, class T>
__device__ __forceinline__ void stage(float (&tile)[kTileRows][kStride], const Rows<T>& rows, int column, int dim) {
#pragma unroll 2
  for (int i = threadIdx.x; i < kTileRows * kColumns; i += kThreads) {
    const int row = i / kColumns;
    const int c = column + i % kColumns;
    tile[row][i % kColumns] = row < rows.count && c < dim ? to_float(rows.x[row * rows.stride + c]) : 0.f;
  }
}

// dot[r] = the warp's own row r times the lane's other row.
template <class T>
__device__ __forceinline__ void dots(float (&dot)[kRows], Tiles& tiles, const Rows<T>& own, const Rows<T>& other,
                                     int dim) {
  const int warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int r = 0; r < kRows; ++r) dot[r] = 0.f;
  for (int column = 0; column < dim; column += kColumns) {
    __syncthreads();
    stage(tiles.own, own, column, dim);
    stage(tiles.other, other, column, dim);
    __syncthreads();
    const int columns = min(kColumns, dim - column);
    for (int c = 0; c < columns; ++c) {
      const float y = tiles.other[lane][c];
#pragma unroll
      for (int r = 0; r < kRows; ++r) dot[r] += tiles.own[warp * kRows + r][c] * y;
    }
  }
}

// sum[r][i] += sum over the chunk's rows of the weight that row's lane holds for own row r, times the row's elements.
template <class T>
__device__ __forceinline__ void add_weighted(float (&sum)[kRows][kColumnsPerLane], const float (&weight)[kRows],
                                             Tiles& tiles, const Rows<T>& other, int column, int dim) {
  const int lane = threadIdx.x % kWarp;
  __syncthreads();
  stage(tiles.other, other, column, dim);
  __syncthreads();
  const int count = min(kWarp, other.count);
  for (int j = 0; j < count; ++j) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float w = __shfl_sync(kAllLanes, weight[r], j);
#pragma unroll
      for (int i = 0; i < kColumnsPerLane; ++i) sum[r][i] += w * tiles.other[j][lane + i * kWarp];
    }
  }
}

// Bit r: dropout keeps key first_key + r * key_step for query row first_row + r * row_step. Rolled up: the generator
// is long, and four copies of it in flight spill registers.
__device__ __forceinline__ unsigned keep_bits(const DropoutKey& dropout, int head, int64_t first_row, int row_step,
                                              int first_key, int key_step) {
  unsigned bits = 0;
#pragma unroll 1
  for (int r = 0; r < kRows; ++r) {
    const bool kept =
        !dropout.active() || keep_attention(dropout, first_row + r * row_step, head, first_key + r * key_step);
    bits |= static_cast<unsigned>(kept) << r;
  }
  return bits;
}

template <class T>
__device__ __forceinline__ void store_columns(const Rows<T>& rows, const float (&sum)[kRows][kColumnsPerLane],
                                              float factor, int column, int dim) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < kColumnsPerLane; ++i) {
      const int c = column + lane + i * kWarp;
      if (r < rows.count && c < dim) rows.x[r * rows.stride + c] = from_float<T>(sum[r][i] * factor);
    }
  }
}

inline int tiles_for(int64_t longest) {
  return static_cast<int>(ceil_div<int64_t>(longest > 0 ? longest : 1, kBlockRows));
}

}  // namespace plain
}  // namespace ls_train
