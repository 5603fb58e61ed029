// Dropout: Philox 4x32-10 as in ls_train/rng.py, which explains counters and lanes. Keep masks are equal bit for bit.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "tensor_ref.h"

namespace ls_train {

struct Dropout {  // what the host knows, passed to kernels by value
  const int64_t* seed;
  uint32_t offset;
  uint32_t threshold;  // lanes below it are dropped; 0: no dropout, seed is not read; 32768: everything is dropped
  float scale;         // factor of kept elements
};

inline Dropout make_dropout(const TensorRef& seed, double p, int64_t offset) {
  constexpr double kLevels = 32768.0;
  const double dropped = std::nearbyint(p * kLevels);  // to even at ties, as Python's round
  const double scale = dropped < kLevels ? kLevels / (kLevels - dropped) : 0.0;
  return {seed.as<const int64_t>(), static_cast<uint32_t>(offset), static_cast<uint32_t>(dropped),
          static_cast<float>(scale)};
}

// Whether masks8 can decide: rates up to 0.96875.
inline bool masks_fit(const Dropout& dropout) { return dropout.threshold <= 0x7c00u; }

struct DropoutKey {  // what a thread keeps in registers
  static constexpr uint32_t kKeepAll = 0x80008000u;

  uint32_t key0, key1, offset;
  uint32_t lift;  // 2^15 - threshold in both halves: added to a lane it reaches bit 15 where the element is kept
  float scale;

  __device__ __forceinline__ bool active() const { return lift != kKeepAll; }
  __device__ __forceinline__ uint32_t threshold() const { return kKeepAll - lift; }  // in both halves
};

// x, which is equal in all running lanes; the compiler then computes what depends on it alone, such as round keys, in
// uniform registers beside the busy integer pipe.
__device__ __forceinline__ uint32_t uniform(uint32_t x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_or_sync(__activemask(), x);
#else
  return x;
#endif
}

__device__ __forceinline__ DropoutKey dropout_key(const Dropout& dropout) {
  const uint64_t seed = dropout.threshold != 0 ? static_cast<uint64_t>(*dropout.seed) : 0;
  return {uniform(static_cast<uint32_t>(seed)), uniform(static_cast<uint32_t>(seed >> 32)), dropout.offset,
          (0x8000u - dropout.threshold) * 0x10001u, dropout.scale};
}

// Bytes of x by the digits of `selector`, from the lowest: i for byte i, 8 + i for eight times its sign, 4 for zeros.
__device__ __forceinline__ uint32_t permute(uint32_t x, uint32_t selector) {
  uint32_t y;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(y) : "r"(x), "r"(selector));
  return y;
}

// Bit i of four in the sign of byte i.
__device__ __forceinline__ uint32_t byte_signs(uint32_t bits) { return bits * 0x10204080u; }

// Decisions for eight elements from one generator call; index with compile-time constants only.
struct Keep8 {
  uint32_t word[4];  // bit 15 of half i % 2 of word i / 2 says whether lane i is kept: one test, no extraction

  __device__ __forceinline__ bool operator[](int lane) const {
    return lane % 2 ? static_cast<int32_t>(word[lane / 2]) < 0 : (word[lane / 2] & 0x8000u) != 0;
  }

  // Bit i says whether lane i is kept.
  __device__ __forceinline__ uint32_t bits() const {
    const uint32_t pairs = (word[0] >> 15 & 0x10001u) | (word[1] >> 13 & 0x40004u) | (word[2] >> 11 & 0x100010u) |
                           (word[3] >> 9 & 0x400040u);
    return (pairs | pairs >> 15) & 0xffu;
  }

  // 0xffff in the halves of lanes 2 * pair and 2 * pair + 1 that are kept: to be ANDed with two 16-bit elements.
  __device__ __forceinline__ uint32_t mask(int pair) const { return permute(word[pair], 0xbb99); }
};

// Decisions as masks: half i % 2 of word i / 2 is 0xffff where lane i is kept, else 0.
struct Masks8 : Keep8 {
  __device__ __forceinline__ uint32_t bits() const {
    const uint32_t halves = (word[0] & 0x20001u) | (word[1] & 0x80004u) | (word[2] & 0x200010u) | (word[3] & 0x800040u);
    return (halves | halves >> 16) & 0xffu;
  }
};

__device__ __forceinline__ Keep8 keep_all() {
  return {{DropoutKey::kKeepAll, DropoutKey::kKeepAll, DropoutKey::kKeepAll, DropoutKey::kKeepAll}};
}

struct Lanes8 {  // what the generator gives: a lane in 15 bits of each half of a word, bit 15 is left over
  uint32_t word[4];
};

__device__ __forceinline__ Lanes8 lanes8(const DropoutKey& key, uint32_t plane, uint32_t row, uint32_t group) {
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
  return {{c0, c1, c2, c3}};
}

__device__ __forceinline__ Keep8 keep8_plane(const DropoutKey& key, uint32_t plane, uint32_t row, uint32_t group) {
  const Lanes8 lanes = lanes8(key, plane, row, group);
  Keep8 keep;
#pragma unroll
  for (int i = 0; i < 4; ++i) keep.word[i] = (lanes.word[i] & 0x7fff7fffu) + key.lift;
  return keep;
}

// The same decisions, for dropout that masks_fit, with a third of the instructions after the generator's: lanes are
// compared with the threshold as float16, which are ordered as their bits are. Lanes beyond infinity's are NaN, for
// which "not less" is true as well. The absolute value, which bit 15 is no part of, is free.
__device__ __forceinline__ Masks8 masks8(const DropoutKey& key, uint32_t plane, uint32_t row, uint32_t group) {
  const Lanes8 lanes = lanes8(key, plane, row, group);
  const uint32_t threshold = key.threshold();
  Masks8 masks;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    masks.word[i] = __hgeu2_mask(__habs2(reinterpret_cast<const __half2&>(lanes.word[i])),
                                 reinterpret_cast<const __half2&>(threshold));
  }
  return masks;
}

// Row-wise operators: elements 8 * group to 8 * group + 7 of a row.
__device__ __forceinline__ Keep8 keep8(const DropoutKey& key, int64_t row, uint32_t group) {
  return keep8_plane(key, static_cast<uint32_t>(static_cast<uint64_t>(row) >> 32), static_cast<uint32_t>(row), group);
}

// Sets what is dropped of eight 16-bit elements to zero.
template <class Pack>
__device__ __forceinline__ void clear_dropped(Pack& pack, const Keep8& keep) {
  static_assert(sizeof(Pack) == 16 && sizeof(pack.v[0]) == 2);
  uint32_t* words = reinterpret_cast<uint32_t*>(&pack);
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] &= keep.mask(i);
}

template <class Pack>
__device__ __forceinline__ void clear_dropped(Pack& pack, const Masks8& masks) {
  static_assert(sizeof(Pack) == 16 && sizeof(pack.v[0]) == 2);
  uint32_t* words = reinterpret_cast<uint32_t*>(&pack);
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] &= masks.word[i];
}

// Decisions of four generator calls in one word, which starts as 0: pair i of call k has bits 4 * k + i from the top of
// each half.
__device__ __forceinline__ void join(uint32_t& joined, int k, const Masks8& masks) {
#pragma unroll
  for (int i = 0; i < 4; ++i) joined |= masks.word[i] & (0x80008000u >> (4 * k + i));
}
__device__ __forceinline__ void join(uint32_t& joined, int k, const Keep8& keep) {
#pragma unroll
  for (int i = 0; i < 4; ++i) joined |= keep.word[i] >> (4 * k + i) & (0x80008000u >> (4 * k + i));
}
__device__ __forceinline__ Keep8 split(uint32_t joined, int k) {
  Keep8 keep;
#pragma unroll
  for (int i = 0; i < 4; ++i) keep.word[i] = joined << (4 * k + i);
  return keep;
}

// Applies dropout to kWidth elements of a row; kWidth divides 8 and column is a multiple of it.
template <int kWidth>
__device__ __forceinline__ void drop(float (&x)[kWidth], Keep8 keep, float scale, int column) {
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
  for (int i = 0; i < kWidth; ++i) x[i] = keep[i] ? x[i] * scale : 0.f;
}

template <int kWidth>
__device__ __forceinline__ void drop(float (&x)[kWidth], const DropoutKey& key, int64_t row, int column) {
  if (key.active()) drop(x, keep8(key, row, static_cast<uint32_t>(column) / 8), key.scale, column);
}

// Decisions for rows that cannot be moved in packs, where element k of lane l is column first(k) + l of row(k) and
// first(k) is a multiple of 8: bit k of the result. Lane 4k + o calls the generator for the o-th eight lanes of element
// k, so a warp needs one call for eight elements as packs do. All lanes of the warp must call it.
template <int kCount, class Row, class First>
__device__ __forceinline__ uint32_t keep_across(const DropoutKey& key, int lane, Row&& row, First&& first) {
  static_assert(kCount <= 8, "a warp decides eight elements a lane");
  uint32_t decisions = 0;
  if (lane < 4 * kCount) {
    const Keep8 keep = keep8(key, row(lane / 4), static_cast<uint32_t>(first(lane / 4) / 8 + lane % 4));
#pragma unroll
    for (int i = 0; i < 8; ++i) decisions |= static_cast<uint32_t>(keep[i]) << i;
  }
  uint32_t kept = 0;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    kept |= (__shfl_sync(0xffffffffu, decisions, 4 * k + lane / 8) >> (lane % 8) & 1u) << k;
  }
  return kept;
}

// Attention: lane 2t + i of the result decides key position 32 * block + 8 * t + 2 * quad + i, with 0 <= quad, t < 4
// and i < 2. These are the accumulator columns of lane `quad` of a tensor-core row in four neighbouring 8-wide tiles.
__device__ __forceinline__ Keep8 keep8_attention(const DropoutKey& key, int64_t row, int head, int block, int quad) {
  return keep8_plane(key, static_cast<uint32_t>(head), static_cast<uint32_t>(row),
                     static_cast<uint32_t>(block * 4 + quad));
}

// The same decisions, for dropout that masks_fit: as masks, and the lanes that a threshold decides.
__device__ __forceinline__ Masks8 masks8_attention(const DropoutKey& key, int64_t row, int head, int block, int quad) {
  return masks8(key, static_cast<uint32_t>(head), static_cast<uint32_t>(row), static_cast<uint32_t>(block * 4 + quad));
}
__device__ __forceinline__ Lanes8 lanes8_attention(const DropoutKey& key, int64_t row, int head, int block, int quad) {
  return lanes8(key, static_cast<uint32_t>(head), static_cast<uint32_t>(row), static_cast<uint32_t>(block * 4 + quad));
}

// Lane of the Keep8 of (block, quad) = (j / 32, j % 8 / 2) that decides key position j, for paths that go key by key.
__device__ __forceinline__ bool keep_attention(const DropoutKey& key, int64_t row, int head, int j) {
  const Keep8 keep = keep8_attention(key, row, head, j / 32, j % 8 / 2);
  bool kept = false;
#pragma unroll
  for (int lane = 0; lane < 8; ++lane) kept = lane == j % 32 / 8 * 2 + j % 2 ? keep[lane] : kept;
  return kept;
}

}  // namespace ls_train
