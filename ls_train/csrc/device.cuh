// Building blocks of every kernel: 16-byte packs (float4 IO), number conversion, warp and block reductions, and the
// dispatch from run-time types to template arguments. The dropout generator is in philox.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "philox.cuh"
#include "tensor_ref.h"

namespace ls_train {

using half = __half;
using bfloat16 = __nv_bfloat16;

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// ---------------------------------------------------------------------------------------------------------------
// Number conversion

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ half from_float<half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ bfloat16 from_float<bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// ---------------------------------------------------------------------------------------------------------------
// Packs: kWidth consecutive elements of one thread, moved by one access of kWidth * sizeof(T) bytes (16 where kWidth is
// kPackWidth<T>), to which the pointer must be aligned. kWidth 1 is the path for any size and alignment.

template <class T>
constexpr int kPackWidth = 16 / static_cast<int>(sizeof(T));

template <class T, int kWidth = kPackWidth<T>>
struct alignas(kWidth * sizeof(T)) Pack {
  T v[kWidth];
};

template <int kBytes>
struct WordOf;
template <>
struct WordOf<16> {
  using type = uint4;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<4> {
  using type = unsigned int;
};
template <>
struct WordOf<2> {
  using type = unsigned short;
};
template <>
struct WordOf<1> {
  using type = unsigned char;
};

template <class T, int kWidth>
using Word = typename WordOf<kWidth* static_cast<int>(sizeof(T))>::type;

template <int kWidth, class T>
__device__ __forceinline__ Pack<T, kWidth> load(const T* p) {
  Pack<T, kWidth> pack;
  reinterpret_cast<Word<T, kWidth>&>(pack) = *reinterpret_cast<const Word<T, kWidth>*>(p);
  return pack;
}

// The same for an address of which the compiler does not know that it is in global memory.
template <int kWidth, class T>
__device__ __forceinline__ Pack<T, kWidth> load_global(const T* p) {
  Pack<T, kWidth> pack;
  reinterpret_cast<Word<T, kWidth>&>(pack) = __ldca(reinterpret_cast<const Word<T, kWidth>*>(p));
  return pack;
}

// Evicted first, from L1 too: a little faster where nothing is written beside it or rows lie all over memory, but
// slower by up to 8 % for rows in order of which others are made.
template <int kWidth, class T>
__device__ __forceinline__ Pack<T, kWidth> load_streaming(const T* p) {
  Pack<T, kWidth> pack;
  reinterpret_cast<Word<T, kWidth>&>(pack) = __ldcs(reinterpret_cast<const Word<T, kWidth>*>(p));
  return pack;
}

// A 16-byte pack, zeros where not valid, as one predicated instruction: the compiler would put an ordinary load off to
// where its value is used, or wait for it where branches meet.
template <class T>
__device__ __forceinline__ Pack<T, kPackWidth<T>> load_if(bool valid, const T* p) {
  Pack<T, kPackWidth<T>> pack;
  uint4& word = reinterpret_cast<uint4&>(pack);
  word = {0u, 0u, 0u, 0u};
  asm volatile(
      "{\n.reg .pred valid;\nsetp.ne.u32 valid, %4, 0;\n"
      "@valid ld.global.v4.u32 {%0, %1, %2, %3}, [%5];\n}"
      : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w)
      : "r"(static_cast<uint32_t>(valid)), "l"(p)
      : "memory");
  return pack;
}

template <class T, int kWidth>
__device__ __forceinline__ void store(T* p, const Pack<T, kWidth>& pack) {
  *reinterpret_cast<Word<T, kWidth>*>(p) = reinterpret_cast<const Word<T, kWidth>&>(pack);
}

// The same for an address of which the compiler does not know that it is in global memory.
template <class T, int kWidth>
__device__ __forceinline__ void store_global(T* p, const Pack<T, kWidth>& pack) {
  __stwb(reinterpret_cast<Word<T, kWidth>*>(p), reinterpret_cast<const Word<T, kWidth>&>(pack));
}

template <class T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> zero_pack() {
  Pack<T, kWidth> pack;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) pack.v[i] = from_float<T>(0.f);
  return pack;
}

template <class T, int kWidth>
__device__ __forceinline__ void unpack(const Pack<T, kWidth>& pack, float (&x)[kWidth]) {
  if constexpr (std::is_same_v<T, bfloat16> && kWidth % 2 == 0) {
    // A bfloat16 is the upper half of a float: one instruction an element, where the conversion takes two.
    const uint32_t* words = reinterpret_cast<const uint32_t*>(&pack);
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] = to_float(pack.v[i]);
  }
}

// Hides where the pack's value came from, so that it stays packed in registers: the compiler would otherwise keep its
// float form alive from one use to the next, at twice the registers.
template <class T, int kWidth>
__device__ __forceinline__ void keep_packed(Pack<T, kWidth>& pack) {
  if constexpr (kWidth * sizeof(T) == 16) {
    uint4& word = reinterpret_cast<uint4&>(pack);
    asm volatile("" : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w));
  }
}

template <class T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> pack_floats(const float (&x)[kWidth]) {
  Pack<T, kWidth> pack;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) pack.v[i] = from_float<T>(x[i]);
  return pack;
}

// pack_floats(max(x, 0)) where NaN stays NaN.
template <class T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> pack_positive_parts(const float (&x)[kWidth]) {
  Pack<T, kWidth> pack;
#if __CUDA_ARCH__ >= 800
  if constexpr (sizeof(T) == 2 && kWidth % 2 == 0) {
    uint32_t* words = reinterpret_cast<uint32_t*>(&pack);
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      if constexpr (std::is_same_v<T, half>) {
        asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
      } else {
        asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
      }
    }
  } else
#endif
  {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) pack.v[i] = from_float<T>(x[i] < 0.f ? 0.f : x[i]);
  }
  return pack;
}

// Loads kWidth floats or Ts as floats; weights and biases, which every row reads again, so without a streaming hint.
template <int kWidth, class T>
__device__ __forceinline__ void load_floats(const T* p, float (&x)[kWidth]) {
  unpack(load<kWidth>(p), x);
}

// ---------------------------------------------------------------------------------------------------------------
// Reductions. The order of additions depends on the shape alone, so two runs give the same bits.

struct Sum {
  static constexpr float kIdentity = 0.f;
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

struct Max {
  static constexpr float kIdentity = -INFINITY;
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Over aligned groups of kLanes lanes of a warp; every lane gets the result.
template <class Op, int kLanes = kWarp>
__device__ __forceinline__ float warp_reduce(float x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step >>= 1) x = Op()(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

// kValues sums or maxima over the `lanes` threads that share one row: an aligned power of two, a part of a warp or
// several whole warps. Every thread of the block must call it. Threads are numbered so that `lanes` consecutive ones
// share a row; scratch holds kValues floats per warp of the block and is free again at the next barrier.
template <class Op, int kValues>
__device__ __forceinline__ void group_reduce(float (&x)[kValues], int thread, int lanes, float* scratch) {
  for (int step = min(lanes, kWarp) / 2; step > 0; step >>= 1) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) x[i] = Op()(x[i], __shfl_xor_sync(kAllLanes, x[i], step));
  }
  if (lanes <= kWarp) return;
  const int warp = thread / kWarp;
  const int warps = lanes / kWarp;
  const int first = warp / warps * warps;
  __syncthreads();
  if (thread % kWarp == 0) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) scratch[warp * kValues + i] = x[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    // Each warp repeats the last step with one lane a partial; all get the same result.
    const int lane = thread % kWarp;
    float partial = lane < warps ? scratch[(first + lane) * kValues + i] : Op::kIdentity;
    x[i] = warp_reduce<Op>(partial);
  }
}

// Over a block of kThreads threads; every thread gets the result. scratch: kThreads / 32 floats.
template <class Op, int kThreads>
__device__ __forceinline__ float block_reduce(float x, float* scratch) {
  float values[1] = {x};
  group_reduce<Op>(values, static_cast<int>(threadIdx.x), kThreads, scratch);
  return values[0];
}

// ---------------------------------------------------------------------------------------------------------------
// Rows in use: min(*rows, n), or all n without a device count.

__device__ __forceinline__ int64_t used_rows(const int32_t* rows, int64_t n) {
  return rows != nullptr ? min(static_cast<int64_t>(max(*rows, 0)), n) : n;
}

// ---------------------------------------------------------------------------------------------------------------
// Host side: dispatch and launch geometry

template <class T>
struct Type {
  using type = T;
};

// Calls body(Type<T>()) for the element type; bindings have refused every other type before.
template <class Body>
cudaError_t dispatch_type(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(Type<float>());
    case DType::kFloat16:
      return body(Type<half>());
    case DType::kBFloat16:
      return body(Type<bfloat16>());
    default:
      return cudaErrorInvalidValue;
  }
}

inline bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Whether contiguous rows of `columns` elements at all these addresses (null: absent) can be moved in 16-byte packs.
template <class T, class... Pointers>
bool packs_fit(int64_t columns, const Pointers*... pointers) {
  return columns % kPackWidth<T> == 0 && (aligned16(pointers) && ...);
}

// Multiprocessors of the current device, for grids that only have to fill it.
inline int multiprocessors() {
  int device = 0, count = 1;
  if (cudaGetDevice(&device) == cudaSuccess) cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

// Whether the current device can give kKernel `bytes` of dynamic shared memory; raises the kernel's limit to all that
// the device has the first time it is asked on a device, because that call costs microseconds.
template <auto kKernel>
bool allow_shared_memory(size_t bytes) {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> limits[kMaxDevices];  // 0: not asked yet
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) return false;
  int limit = limits[device].load(std::memory_order_relaxed);
  if (limit == 0) {
    cudaFuncAttributes attributes;
    if (cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess ||
        cudaFuncGetAttributes(&attributes, kKernel) != cudaSuccess) {
      return false;
    }
    limit -= static_cast<int>(attributes.sharedSizeBytes);
    if (cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limit) != cudaSuccess) return false;
    limits[device].store(limit, std::memory_order_relaxed);
  }
  return bytes <= static_cast<size_t>(limit);
}

template <class I>
__host__ __device__ constexpr I ceil_div(I a, I b) {
  return (a + b - 1) / b;
}

}  // namespace ls_train
