// Second step of column sums: partial rows -> parameter gradients.
//
// column_sum_kernel
//   Grid (column blocks of all sums), block (32, 32): one column a threadIdx.x. Reads the partial rows [row block][C]
//   of each sum once, writes (C,) T a sum (and reads it with accumulate): at most 264 rows a sum, which benchmarks of
//   the operators that write them do not count.
#include "row_kernels.cuh"

namespace ls_train {
namespace {

constexpr int kSlices = 32;
constexpr int kMaxSums = 16;  // of a launch: a decoder layer's backward has twelve

struct Sums {
  struct {
    void* gradient;
    const float* partial;
    int rows, columns;
    int end;  // first block of the next sum
  } items[kMaxSums];
};

template <class T>
__global__ void __launch_bounds__(kWarp* kSlices)
    column_sum_kernel(const __grid_constant__ Sums sums, bool accumulate) {
  __shared__ float slices[kSlices][kWarp + 1];
  const int block = static_cast<int>(blockIdx.x);
  int index = 0;
  while (block >= sums.items[index].end) ++index;
  const auto& item = sums.items[index];
  const int first = (block - (index == 0 ? 0 : sums.items[index - 1].end)) * kWarp;
  const int column = first + static_cast<int>(threadIdx.x);
  const float* partial = item.partial + column;
  float sum = 0.f;
  if (column < item.columns) {
#pragma unroll 4
    for (int row = static_cast<int>(threadIdx.y); row < item.rows; row += kSlices) {
      sum += partial[static_cast<int64_t>(row) * item.columns];
    }
  }
  slices[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  // Transposed, so that one warp adds the slices of one column.
  sum = warp_reduce<Sum>(slices[threadIdx.x][threadIdx.y]);
  const int out_column = first + static_cast<int>(threadIdx.y);
  if (threadIdx.x == 0 && out_column < item.columns) {
    T* out = static_cast<T*>(item.gradient) + out_column;
    *out = from_float<T>(accumulate ? to_float(*out) + sum : sum);
  }
}

}  // namespace

cudaError_t column_sum(const ColumnSum* sums, int count, DType dtype, bool accumulate, cudaStream_t stream) {
  return dispatch_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    for (int done = 0; done < count; done += kMaxSums) {
      Sums launched = {};
      int blocks = 0;
      for (int i = 0; i < std::min(kMaxSums, count - done); ++i) {
        const ColumnSum& sum = sums[done + i];
        blocks += sum.rows == 0 && accumulate ? 0 : ceil_div(sum.columns, kWarp);
        launched.items[i] = {sum.gradient, sum.partial, sum.rows, sum.columns, blocks};
      }
      if (blocks == 0) continue;
      column_sum_kernel<T><<<blocks, dim3(kWarp, kSlices), 0, stream>>>(launched, accumulate);
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
