// L2 norm of a flat gradient buffer over its active slots, and whether one of their elements is not finite.
//
// grad_norm_kernel
//   Grid up to 1024, block 256: every block an equal range of elements, its sum of squares and its flag into the
//   workspace. Reads grad once: n * sizeof(T) bytes. Squares are summed in float: gradients whose norm is beyond 1e19
//   give inf without the flag.
// grad_norm_finish_kernel
//   One block adds the partial results in a fixed order.
#include "ops.h"
#include "segments.cuh"

namespace ls_train {
namespace {

constexpr int kThreads = 256;

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    grad_norm_kernel(float* __restrict__ workspace, const T* __restrict__ grad, int64_t n,
                     const int64_t* __restrict__ segments, const uint8_t* __restrict__ active, int slots) {
  __shared__ float scratch[kThreads / kWarp];
  const BlockRange range = block_range(n);
  float squares = 0.f, poison = 0.f;  // x * 0 is 0 for finite x and NaN otherwise
  const auto add = [&](float x) {
    squares = fmaf(x, x, squares);
    poison = fmaf(x, 0.f, poison);
  };
  const auto add_range = [&](int64_t first, int64_t end) {
    for_range<kWidth, 4>(
        first, end,
        [&](int64_t at, int64_t step, auto count) {
#pragma unroll
          for (int j = 0; j < decltype(count)::value; ++j) {
            const Pack<T, kWidth> pack = load_streaming<kWidth>(grad + at + j * step);
#pragma unroll
            for (int i = 0; i < kWidth; ++i) add(to_float(pack.v[i]));
          }
        },
        [&](int64_t at) { add(to_float(grad[at])); });
  };
  if (active == nullptr) {
    add_range(range.first, range.end);
  } else if (range.first < range.end) {
    int slot = find_slot(segments, slots, range.first);
    for (int64_t at = range.first; at < range.end; ++slot) {
      const int64_t end = min(range.end, segments[slot + 1]);
      if (active[slot] != 0) add_range(at, end);
      at = end;
    }
  }
  squares = block_reduce<Sum, kThreads>(squares, scratch);
  poison = block_reduce<Max, kThreads>(poison == 0.f ? 0.f : 1.f, scratch);
  if (threadIdx.x == 0) {
    workspace[blockIdx.x] = squares;
    workspace[gridDim.x + blockIdx.x] = poison;
  }
}

__global__ void __launch_bounds__(kMaxNormBlocks)
    grad_norm_finish_kernel(float* __restrict__ norm, float* __restrict__ found_inf,
                            const float* __restrict__ workspace, int blocks) {
  __shared__ float scratch[kMaxNormBlocks / kWarp];
  const int thread = static_cast<int>(threadIdx.x);
  const float squares = block_reduce<Sum, kMaxNormBlocks>(thread < blocks ? workspace[thread] : 0.f, scratch);
  const float poison = block_reduce<Max, kMaxNormBlocks>(thread < blocks ? workspace[blocks + thread] : 0.f, scratch);
  if (thread == 0) {
    *norm = sqrtf(squares);
    *found_inf = poison;
  }
}

}  // namespace

cudaError_t grad_norm(const TensorRef& norm, const TensorRef& found_inf, const TensorRef& workspace,
                      const TensorRef& grad, const TensorRef& segments, const TensorRef& active, cudaStream_t stream) {
  const int64_t n = grad.numel();
  int blocks = 0;
  if (n > 0) {
    const cudaError_t error = dispatch_type(grad.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      // The block count depends on n alone: the order of additions is the same on every card.
      blocks = static_cast<int>(std::min<int64_t>(kMaxNormBlocks, ceil_div<int64_t>(n, kThreads * kPackWidth<T>)));
      const auto launch = [&](auto kernel) {
        kernel<<<blocks, kThreads, 0, stream>>>(workspace.as<float>(), grad.as<T>(), n, segments.as<int64_t>(),
                                                active.as<uint8_t>(), static_cast<int>(segments.sizes[0] - 1));
        return cudaGetLastError();
      };
      return aligned16(grad.data) ? launch(grad_norm_kernel<T, kPackWidth<T>>) : launch(grad_norm_kernel<T, 1>);
    });
    if (error != cudaSuccess) return error;
  }
  grad_norm_finish_kernel<<<1, kMaxNormBlocks, 0, stream>>>(norm.as<float>(), found_inf.as<float>(),
                                                            workspace.as<float>(), blocks);
  return cudaGetLastError();
}

}  // namespace ls_train
