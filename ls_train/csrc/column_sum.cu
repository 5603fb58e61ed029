// Second step of a column sum: partial rows -> parameter gradients.
//
// column_sum_kernel
//   Grid (ceil(C / 32), sums), block (32, 32): one column a threadIdx.x. Reads the workspace [sum][row block][C] once,
//   writes (C,) T a sum (and reads it with accumulate): at most 264 rows a sum, which benchmarks do not count.
#include "row_kernels.cuh"

namespace ls_train {
namespace {

constexpr int kSlices = 32;

template <class T>
__global__ void __launch_bounds__(kWarp* kSlices)
    column_sum_kernel(const __grid_constant__ ColumnSums sums, const float* __restrict__ workspace, int row_blocks,
                      int columns, bool accumulate) {
  __shared__ float slices[kSlices][kWarp + 1];
  const int column = static_cast<int>(blockIdx.x * kWarp + threadIdx.x);
  const float* partial = workspace + static_cast<int64_t>(blockIdx.y) * row_blocks * columns + column;
  float sum = 0.f;
  if (column < columns) {
#pragma unroll 4
    for (int row = static_cast<int>(threadIdx.y); row < row_blocks; row += kSlices) {
      sum += partial[static_cast<int64_t>(row) * columns];
    }
  }
  slices[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  // Transposed, so that one warp adds the slices of one column.
  sum = warp_reduce<Sum>(slices[threadIdx.x][threadIdx.y]);
  const int out_column = static_cast<int>(blockIdx.x * kWarp + threadIdx.y);
  if (threadIdx.x == 0 && out_column < columns) {
    T* out = static_cast<T*>(sums.outputs[blockIdx.y]) + out_column;
    *out = from_float<T>(accumulate ? to_float(*out) + sum : sum);
  }
}

}  // namespace

cudaError_t finish_column_sums(const ColumnSums& sums, DType dtype, const float* workspace, int row_blocks, int columns,
                               bool accumulate, cudaStream_t stream) {
  if (columns == 0 || sums.count == 0 || (row_blocks == 0 && accumulate)) return cudaSuccess;
  return dispatch_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const dim3 grid(ceil_div(columns, kWarp), sums.count);
    column_sum_kernel<T><<<grid, dim3(kWarp, kSlices), 0, stream>>>(sums, workspace, row_blocks, columns, accumulate);
    return cudaGetLastError();
  });
}

}  // namespace ls_train
