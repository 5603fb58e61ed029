// Building blocks of every kernel: 16-byte packs (float4 IO), number conversion, warp and block reductions, the
// dropout generator of ls_train/rng.py, and the dispatch from run-time types to template arguments.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

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

// For data that nobody reads again soon: evicted first, so that it does not push useful lines out of L2.
template <int kWidth, class T>
__device__ __forceinline__ Pack<T, kWidth> load_streaming(const T* p) {
  Pack<T, kWidth> pack;
  reinterpret_cast<Word<T, kWidth>&>(pack) = __ldcs(reinterpret_cast<const Word<T, kWidth>*>(p));
  return pack;
}

template <class T, int kWidth>
__device__ __forceinline__ void store(T* p, const Pack<T, kWidth>& pack) {
  *reinterpret_cast<Word<T, kWidth>*>(p) = reinterpret_cast<const Word<T, kWidth>&>(pack);
}

template <class T, int kWidth>
__device__ __forceinline__ void store_streaming(T* p, const Pack<T, kWidth>& pack) {
  __stcs(reinterpret_cast<Word<T, kWidth>*>(p), reinterpret_cast<const Word<T, kWidth>&>(pack));
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
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = to_float(pack.v[i]);
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

// Values as they read back after a store as T.
template <class T, int kWidth>
__device__ __forceinline__ void round_to(float (&x)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = to_float(from_float<T>(x[i]));
}

template <class T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> pack_floats(const float (&x)[kWidth]) {
  Pack<T, kWidth> pack;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) pack.v[i] = from_float<T>(x[i]);
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
// Dropout: Philox 4x32-10 as in ls_train/rng.py, which explains counters and lanes.

struct Dropout {  // what the host knows, passed to kernels by value
  const int64_t* seed;
  uint32_t offset;
  uint32_t threshold;  // lanes below it are dropped; 0: no dropout, seed is not read; 65536: everything is dropped
  float scale;         // factor of kept elements
};

inline Dropout make_dropout(const TensorRef& seed, double p, int64_t offset) {
  constexpr double kLevels = 65536.0;
  const double dropped = std::nearbyint(p * kLevels);  // to even at ties, as Python's round
  const double scale = dropped < kLevels ? kLevels / (kLevels - dropped) : 0.0;
  return {seed.as<const int64_t>(), static_cast<uint32_t>(offset), static_cast<uint32_t>(dropped),
          static_cast<float>(scale)};
}

struct DropoutKey {  // what a thread keeps in registers
  uint32_t key0, key1, offset, threshold;
  float scale;

  __device__ __forceinline__ bool active() const { return threshold != 0; }
};

__device__ __forceinline__ DropoutKey dropout_key(const Dropout& dropout) {
  const uint64_t seed = dropout.threshold != 0 ? static_cast<uint64_t>(*dropout.seed) : 0;
  return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), dropout.offset, dropout.threshold,
          dropout.scale};
}

// Decisions for eight elements from one generator call; index with compile-time constants only.
struct Keep8 {
  uint32_t word[4];
  uint32_t threshold;

  __device__ __forceinline__ bool operator[](int lane) const {
    const uint32_t w = word[lane / 2];
    return (lane % 2 ? w >> 16 : w & 0xffffu) >= threshold;
  }
};

__device__ __forceinline__ Keep8 keep8_plane(const DropoutKey& key, uint32_t plane, uint32_t row, uint32_t group) {
  uint32_t c0 = group, c1 = row, c2 = plane, c3 = key.offset, k0 = key.key0, k1 = key.key1;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(0xD2511F53u) * c0;
    const uint64_t product1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(product0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}, key.threshold};
}

// Row-wise operators: elements 8 * group to 8 * group + 7 of a row.
__device__ __forceinline__ Keep8 keep8(const DropoutKey& key, int64_t row, uint32_t group) {
  return keep8_plane(key, static_cast<uint32_t>(static_cast<uint64_t>(row) >> 32), static_cast<uint32_t>(row), group);
}

// Applies dropout to kWidth elements of a row; kWidth divides 8 and column is a multiple of it.
template <int kWidth>
__device__ __forceinline__ void drop(float (&x)[kWidth], const DropoutKey& key, int64_t row, int column) {
  if (!key.active()) return;
  Keep8 keep = keep8(key, row, static_cast<uint32_t>(column) / 8);
  const int lane = column % 8;
  if constexpr (kWidth == 4) {
    keep.word[0] = lane == 0 ? keep.word[0] : keep.word[2];
    keep.word[1] = lane == 0 ? keep.word[1] : keep.word[3];
  } else if constexpr (kWidth == 1) {
    const uint32_t low = lane < 4 ? keep.word[0] : keep.word[2];
    const uint32_t high = lane < 4 ? keep.word[1] : keep.word[3];
    const uint32_t word = lane % 4 < 2 ? low : high;
    keep.word[0] = lane % 2 ? word >> 16 : word;
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = keep[i] ? x[i] * key.scale : 0.f;
}

// Attention: lane 2t + i of the result decides key position 32 * block + 8 * t + 2 * quad + i, with 0 <= quad, t < 4
// and i < 2. These are the accumulator columns of lane `quad` of a tensor-core row in four neighbouring 8-wide tiles.
__device__ __forceinline__ Keep8 keep8_attention(const DropoutKey& key, int64_t row, int head, int block, int quad) {
  return keep8_plane(key, static_cast<uint32_t>(head), static_cast<uint32_t>(row),
                     static_cast<uint32_t>(block * 4 + quad));
}

// Lane of the Keep8 of (block, quad) = (j / 32, j % 8 / 2) that decides key position j, for paths that go key by key.
__device__ __forceinline__ bool keep_attention(const DropoutKey& key, int64_t row, int head, int j) {
  const Keep8 keep = keep8_attention(key, row, head, j / 32, j % 8 / 2);
  bool kept = false;
#pragma unroll
  for (int lane = 0; lane < 8; ++lane) kept = lane == j % 32 / 8 * 2 + j % 2 ? keep[lane] : kept;
  return kept;
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

template <class I>
constexpr I ceil_div(I a, I b) {
  return (a + b - 1) / b;
}

}  // namespace ls_train
