// out = factor * x, or out += factor * x, in float and rounded once; out and x may have different types, and must not
// overlap then. Reads x, and out with accumulate, and writes out once: N * C * (sizeof(In) + sizeof(Out)) bytes without
// accumulate.
//
// scale_cast_kernel
//   The tensors as one run, a tile a block: kPacks packs a thread, blockDim.x apart, all of them loaded before the
//   first one is stored. A pack has as many elements as fit 16 bytes of the smaller type, so that those of the larger
//   one are two loads or stores; one element where a tensor is not aligned to 16 bytes. The elements after the last
//   whole pack go one by one.
#include "device.cuh"
#include "ops.h"

namespace ls_train {
namespace {

constexpr int kThreads = 256;
template <bool kAccumulate>
constexpr int kPacks = kAccumulate ? 2 : 4;  // with accumulate two tensors are read
constexpr int kBlocks = 4;                   // a multiprocessor

// kWidth consecutive elements, moved in words of at most 16 bytes.
template <class T, int kWidth>
struct Words {
  static constexpr int kElements = kWidth < kPackWidth<T> ? kWidth : kPackWidth<T>;  // of a word
  Pack<T, kElements> words[kWidth / kElements];

  __device__ __forceinline__ void load_from(const T* p) {
#pragma unroll
    for (int i = 0; i < kWidth / kElements; ++i) words[i] = load_global<kElements>(p + i * kElements);
  }
  __device__ __forceinline__ void store_to(T* p) const {
#pragma unroll
    for (int i = 0; i < kWidth / kElements; ++i) store(p + i * kElements, words[i]);
  }
  __device__ __forceinline__ float get(int i) const { return to_float(words[i / kElements].v[i % kElements]); }
  __device__ __forceinline__ void set(int i, float value) {
    words[i / kElements].v[i % kElements] = from_float<T>(value);
  }
};

template <bool kAccumulate>
__device__ __forceinline__ float scaled(float x, float factor, float held) {
  return kAccumulate ? fmaf(factor, x, held) : factor * x;
}

template <class Out, class In, bool kAccumulate, int kWidth>
__global__ void __launch_bounds__(kThreads, kBlocks)
    scale_cast_kernel(Out* __restrict__ out, const In* __restrict__ x, const float* __restrict__ factor_at, int64_t n) {
  constexpr int kTile = kThreads * kPacks<kAccumulate> * kWidth;
  const int64_t start = static_cast<int64_t>(blockIdx.x) * kTile;
  const int length = static_cast<int>(min(static_cast<int64_t>(kTile), n - start));
  const int first = static_cast<int>(threadIdx.x) * kWidth;
  out += start;
  x += start;
  Words<In, kWidth> arrived[kPacks<kAccumulate>];
  Words<Out, kWidth> held[kPacks<kAccumulate>];
#pragma unroll
  for (int k = 0; k < kPacks<kAccumulate>; ++k) {
    const int at = first + k * kThreads * kWidth;
    if (at + kWidth > length) break;
    arrived[k].load_from(x + at);
    if (kAccumulate) held[k].load_from(out + at);
  }
  const float factor = *factor_at;
#pragma unroll
  for (int k = 0; k < kPacks<kAccumulate>; ++k) {
    const int at = first + k * kThreads * kWidth;
    if (at + kWidth > length) break;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      held[k].set(i, scaled<kAccumulate>(arrived[k].get(i), factor, kAccumulate ? held[k].get(i) : 0.f));
    }
    held[k].store_to(out + at);
  }
  const int rest = length / kWidth * kWidth + static_cast<int>(threadIdx.x);
  if (rest < length) {
    out[rest] =
        from_float<Out>(scaled<kAccumulate>(to_float(x[rest]), factor, kAccumulate ? to_float(out[rest]) : 0.f));
  }
}

}  // namespace

cudaError_t scale_cast(const TensorRef& out, const TensorRef& x, const TensorRef& factor, bool accumulate,
                       cudaStream_t stream) {
  const int64_t n = x.numel();
  if (n == 0) return cudaSuccess;
  return dispatch_type(out.dtype, [&](auto out_type) {
    return dispatch_type(x.dtype, [&](auto in_type) {
      using Out = typename decltype(out_type)::type;
      using In = typename decltype(in_type)::type;
      constexpr int kWidth = kPackWidth<Out> > kPackWidth<In> ? kPackWidth<Out> : kPackWidth<In>;
      const auto launch = [&](auto accumulates, auto width) {
        constexpr bool kAdds = decltype(accumulates)::value;
        constexpr int64_t kTile = kThreads * kPacks<kAdds> * decltype(width)::value;
        scale_cast_kernel<Out, In, kAdds, decltype(width)::value>
            <<<static_cast<unsigned>(ceil_div(n, kTile)), kThreads, 0, stream>>>(out.as<Out>(), x.as<In>(),
                                                                                 factor.as<float>(), n);
        return cudaGetLastError();
      };
      const auto launch_width = [&](auto width) {
        return accumulate ? launch(std::true_type(), width) : launch(std::false_type(), width);
      };
      const bool packs = aligned16(out.data) && aligned16(x.data);
      return packs ? launch_width(std::integral_constant<int, kWidth>())
                   : launch_width(std::integral_constant<int, 1>());
    });
  });
}

}  // namespace ls_train
