// Second step of column sums: partial rows -> parameter gradients.
//
// column_sum_kernel
//   Grid (column blocks of all sums), block (8, 32): threadIdx.x owns kWidth columns, threadIdx.y every 32nd row,
//   several of them on their way at a time. Behind the kernel that writes the partial rows it is launched while that
//   one runs, where code for it is of compute capability 9.0 or later, and waits for its end. Reads the partial rows
//   [row block][C] of each sum once, writes (C,) T a sum (and reads it with accumulate): at most 264 rows a sum, which
//   benchmarks of the operators that write them do not count.
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
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // For every thread: what follows this kernel must not begin before the kernel in front of it has ended.
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
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

// Whether kernels of this file wait for the one in front of them by themselves, which code for targets before 9.0 does
// not, on newer cards either. Asked for once a device, because the call costs microseconds.
bool waits_by_itself() {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> versions[kMaxDevices];  // of the instruction set; 0: not asked yet
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) return false;
  int version = versions[device].load(std::memory_order_relaxed);
  if (version == 0) {
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, column_sum_kernel<float, 1>) != cudaSuccess) return false;
    version = attributes.ptxVersion;
    versions[device].store(version, std::memory_order_relaxed);
  }
  return version >= 90;
}

// early: the launch in front of this one wrote the partial rows, and this one may begin before its end.
cudaError_t launch_sums(const ColumnSum* sums, int count, DType dtype, bool accumulate, bool early,
                        cudaStream_t stream) {
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
      cudaLaunchAttribute attribute = {};
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
      cudaLaunchConfig_t config = {};
      config.gridDim = dim3(blocks);
      config.blockDim = dim3(kLanes, kSlices);
      config.stream = stream;
      config.attrs = &attribute;
      config.numAttrs = early ? 1 : 0;
      const cudaError_t error = cudaLaunchKernelEx(&config, kernel, launched, accumulate);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  });
}

}  // namespace

cudaError_t column_sum(const ColumnSum* sums, int count, DType dtype, bool accumulate, cudaStream_t stream) {
  return launch_sums(sums, count, dtype, accumulate, false, stream);
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
  // Without rows there was no launch.
  return launch_sums(items, sums.count, dtype, accumulate, row_blocks > 0 && waits_by_itself(), stream);
}

}  // namespace ls_train
