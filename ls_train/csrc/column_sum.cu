// Second step of column sums: partial rows -> parameter gradients.
//
// column_sum_kernel
//   Grid (column blocks of all sums), block (8, 32): threadIdx.x owns kWidth columns, threadIdx.y every 32nd row,
//   several of them on their way at a time. Reads the partial rows [row block][C] of each sum once, writes (C,) T a sum
//   (and reads it with accumulate): at most 264 rows a sum, which benchmarks of the operators that write them do not
//   count.
#include "row_kernels.cuh"

namespace ls_train {
namespace {

constexpr int kSlices = 32;
constexpr int kLanes = 8;
constexpr int kInFlight = ceil_div(kMaxRowBlocks, kSlices);
constexpr int kMaxSums = 16;  // of a launch: a decoder layer's backward has twelve

struct Sums {
  struct {
    void* gradient;
    const float* partial;
    int rows, columns;
    int end;  // first block of the next sum
  } items[kMaxSums];
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kLanes* kSlices)
    column_sum_kernel(const __grid_constant__ Sums sums, bool accumulate) {
  constexpr int kColumns = kLanes * kWidth;
  __shared__ float slices[kSlices][kColumns + 1];
  const int block = static_cast<int>(blockIdx.x);
  int index = 0;
  while (block >= sums.items[index].end) ++index;
  const auto& item = sums.items[index];
  const int first = (block - (index == 0 ? 0 : sums.items[index - 1].end)) * kColumns;
  const int lane = static_cast<int>(threadIdx.x), slice = static_cast<int>(threadIdx.y);
  const int column = first + lane * kWidth;
  float sum[kWidth] = {};
  if (column < item.columns) {
    for (int row = slice; row < item.rows; row += kSlices * kInFlight) {
      Pack<float, kWidth> values[kInFlight];
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
        const int64_t at = static_cast<int64_t>(row + k * kSlices) * item.columns + column;
        values[k] = row + k * kSlices < item.rows ? load<kWidth>(item.partial + at) : zero_pack<float, kWidth>();
      }
#pragma unroll
      for (int k = 0; k < kInFlight; ++k) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum[i] += values[k].v[i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) slices[slice][lane * kWidth + i] = sum[i];
  __syncthreads();
  // Transposed, so that a warp adds the slices of a column; kWidth columns a warp.
  const int warp = linear_thread() / kWarp, part = linear_thread() % kWarp;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const int own = warp * kWidth + i, out_column = first + own;
    const float total = warp_reduce<Sum>(slices[part][own]);
    if (part == i && out_column < item.columns) {
      T* out = static_cast<T*>(item.gradient) + out_column;
      *out = from_float<T>(accumulate ? to_float(*out) + total : total);
    }
  }
}

}  // namespace

cudaError_t column_sum(const ColumnSum* sums, int count, DType dtype, bool accumulate, cudaStream_t stream) {
  return dispatch_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    for (int done = 0; done < count; done += kMaxSums) {
      const int items = std::min(kMaxSums, count - done);
      int64_t columns = 0;
      bool packs = true;
      for (int i = done; i < done + items; ++i) {
        columns += sums[i].columns;
        packs = packs && packs_fit<float>(sums[i].columns, sums[i].partial);
      }
      // Packs where single columns would need more blocks than the card holds at a time; fewer are faster with them.
      const int width = packs && columns > kCardfulBlocks * kLanes ? kPackWidth<float> : 1;
      Sums launched = {};
      int blocks = 0;
      for (int i = 0; i < items; ++i) {
        const ColumnSum& sum = sums[done + i];
        blocks += sum.rows == 0 && accumulate ? 0 : ceil_div(sum.columns, kLanes * width);
        launched.items[i] = {sum.gradient, sum.partial, sum.rows, sum.columns, blocks};
      }
      if (blocks == 0) continue;
      const auto kernel = width == 1 ? column_sum_kernel<T, 1> : column_sum_kernel<T, kPackWidth<float>>;
      kernel<<<blocks, dim3(kLanes, kSlices), 0, stream>>>(launched, accumulate);
      const cudaError_t error = cudaGetLastError();
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  });
}

cudaError_t finish_column_sums(const ColumnSums& sums, DType dtype, const float* workspace, int row_blocks, int columns,
                               bool accumulate, const TensorRef& partial_rows, cudaStream_t stream) {
  if (partial_rows) {
    *partial_rows.as<int64_t>() = row_blocks;
    return cudaSuccess;
  }
  ColumnSum items[kMaxColumnSums];
  for (int i = 0; i < sums.count; ++i) {
    items[i] = {sums.outputs[i], workspace + static_cast<int64_t>(i) * row_blocks * columns, row_blocks, columns};
  }
  return column_sum(items, sums.count, dtype, accumulate, stream);
}

}  // namespace ls_train
