// A flat buffer that is divided into slots, gone over in pieces that lie in one slot each.
#pragma once

#include <algorithm>

#include "device.cuh"

namespace ls_train {

// Slot that holds element `at`: the last s with segments[s] <= at, so never an empty one. at < segments[slots].
__device__ __forceinline__ int find_slot(const int64_t* __restrict__ segments, int slots, int64_t at) {
  int low = 0, high = slots - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (segments[middle] <= at) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Elements [first, end) of this block: equal ranges, multiples of 8 so that packs have one owner.
struct BlockRange {
  int64_t first, end;
};

__device__ __forceinline__ BlockRange block_range(int64_t n) {
  const int64_t share = ceil_div(ceil_div<int64_t>(n, gridDim.x), int64_t{8}) * 8;
  const int64_t first = min(n, static_cast<int64_t>(blockIdx.x) * share);
  return {first, min(n, first + share)};
}

// Calls use_packs(element, step, count) for the packs of kWidth elements at multiples of kWidth that lie in
// [first, end): those at element, element + step and so on, count of them, a constant that is kUnroll or 1. Calls
// use_element(element) for the elements before and after them. Neighbouring threads get neighbouring packs.
template <int kWidth, int kUnroll, class UsePacks, class UseElement>
__device__ __forceinline__ void for_range(int64_t first, int64_t end, UsePacks&& use_packs, UseElement&& use_element) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int64_t packs_first = min(end, ceil_div<int64_t>(first, kWidth) * kWidth);
  const int64_t packs_end = max(packs_first, end / kWidth * kWidth);
  const int64_t step = static_cast<int64_t>(threads) * kWidth;
  int64_t at = packs_first + static_cast<int64_t>(thread) * kWidth;
  for (; at + (kUnroll - 1) * step < packs_end; at += kUnroll * step) {
    use_packs(at, step, std::integral_constant<int, kUnroll>());
  }
  if constexpr (kUnroll > 1) {
    for (; at < packs_end; at += step) use_packs(at, step, std::integral_constant<int, 1>());
  }
  if constexpr (kWidth > 1) {
    for (at = first + thread; at < packs_first; at += threads) use_element(at);
    for (at = packs_end + thread; at < end; at += threads) use_element(at);
  }
}

}  // namespace ls_train
