// What the cross entropy kernels share: the part of a row that a thread sums up, the row's outputs, the gradient.
//
// loss = (1 - eps - share) * nll + share * sum_v(lse - x_v), share = eps / (V - 1), so d loss / d x_v =
// softmax_v - share - [v == target] * (1 - eps - share). Rows that are unused or whose target is ignored give zeros
// without being read. A target outside [0, V) that is not ignored makes its loss NaN.
//
// All kernels: grid N, one block of up to 512 threads a row.
#pragma once

#include <algorithm>

#include "device.cuh"
#include "ops.h"

namespace ls_train {

constexpr int kLossThreads = 512;
constexpr int kLoads = 4;  // packs a thread loads before it uses the first
constexpr float kLog2E = 1.4426950408889634f;

struct Losses {
  float* loss;
  float* nll;
  float* lse;  // may be null, as correct
  int32_t* correct;
  const int64_t* target;
  const int32_t* rows;
  int64_t n;
  int classes;
  float label_smoothing;
  int64_t ignore_index;

  __device__ float share() const {
    return label_smoothing > 0.f ? label_smoothing / static_cast<float>(classes - 1) : 0.f;
  }
};

__device__ __forceinline__ float exp_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * kLog2E));
  return y;
}

// One thread's part of a row: largest logit, sum of exp(x - max), sum of x, and whether a logit before the target's
// equals the target's (then the target is not the first of the largest).
struct RowPart {
  float max = -1e30f;  // finite, so that no difference is inf - inf
  float sum = 0.f;
  float total = 0.f;
  float tied = 0.f;

  template <int kWidth>
  __device__ __forceinline__ void add(const float (&x)[kWidth], int column, int64_t target, float at_target) {
    float largest = x[0];
#pragma unroll
    for (int i = 1; i < kWidth; ++i) largest = fmaxf(largest, x[i]);
    if (largest > max) {
      sum *= exp_approx(max - largest);
      max = largest;
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      sum += exp_approx(x[i] - max);
      total += x[i];
    }
    if (largest == at_target) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) tied = x[i] == at_target && column + i < target ? 1.f : tied;
    }
  }
};

// Reduces over the block, writes the row's outputs and returns its lse. scratch: 2 floats a warp.
__device__ __forceinline__ float finish_row(const Losses& a, RowPart part, int64_t row, float at_target,
                                            float* scratch) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  float maxima[2] = {part.max, part.tied};
  group_reduce<Max>(maxima, thread, threads, scratch);
  float sums[2] = {part.sum * exp_approx(part.max - maxima[0]), part.total};
  group_reduce<Sum>(sums, thread, threads, scratch);
  const float lse = maxima[0] + logf(sums[0]);
  if (thread == 0) {
    const float nll = lse - at_target;
    const float share = a.share(), classes = static_cast<float>(a.classes);
    a.loss[row] = a.label_smoothing > 0.f
                      ? (1.f - a.label_smoothing - share) * nll + share * classes * (lse - sums[1] / classes)
                      : nll;
    a.nll[row] = nll;
    if (a.lse != nullptr) a.lse[row] = lse;
    if (a.correct != nullptr) a.correct[row] = maxima[0] == at_target && maxima[1] == 0.f;
  }
  return lse;
}

__device__ __forceinline__ bool counts(const Losses& a, int64_t row) {
  return row < used_rows(a.rows, a.n) && a.target[row] != a.ignore_index;
}

__device__ __forceinline__ void write_ignored(const Losses& a, int64_t row) {
  if (threadIdx.x == 0) {
    a.loss[row] = 0.f;
    a.nll[row] = 0.f;
    if (a.correct != nullptr) a.correct[row] = 0;
  }
}

template <class T>
__device__ __forceinline__ float target_logit(const T* row, int64_t target, int classes) {
  return target >= 0 && target < classes ? to_float(row[target]) : __int_as_float(0x7fc00000);
}

// x becomes the gradient of the loss times scale.
template <int kWidth>
__device__ __forceinline__ void gradient(float (&x)[kWidth], int column, int64_t target, float lse, float share,
                                         float label_smoothing, float scale) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] = exp_approx(x[i] - lse) - share;
  if (target / kWidth * kWidth == column) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] -= column + i == target ? 1.f - label_smoothing - share : 0.f;
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) x[i] *= scale;
}

template <class T, int kWidth>
__device__ __forceinline__ void write_zeros(T* row, int classes) {
  for (int c = threadIdx.x * kWidth; c < classes; c += blockDim.x * kWidth) store(row + c, zero_pack<T, kWidth>());
}

// Calls use(pack, column) for this thread's packs of a row in device memory.
template <int kWidth, class T, class Use>
__device__ __forceinline__ void for_packs(const T* row, int classes, Use&& use) {
  const int step = static_cast<int>(blockDim.x) * kWidth;
  for (int first = static_cast<int>(threadIdx.x) * kWidth; first < classes; first += step * kLoads) {
    Pack<T, kWidth> packs[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      if (first + j * step < classes) packs[j] = load<kWidth>(row + first + j * step);
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      if (first + j * step < classes) use(packs[j], first + j * step);
    }
  }
}

inline unsigned threads_for(int classes, int width) {
  const int packs = ceil_div(classes, width);
  return static_cast<unsigned>(std::clamp(ceil_div(ceil_div(packs, kLoads), kWarp) * kWarp, kWarp, kLossThreads));
}

inline Losses losses(const TensorRef& loss, const TensorRef& nll, const TensorRef& lse, const TensorRef& correct,
                     const TensorRef& logits, const TensorRef& target, const TensorRef& rows, double label_smoothing,
                     int64_t ignore_index) {
  return {loss.as<float>(),
          nll.as<float>(),
          lse.as<float>(),
          correct.as<int32_t>(),
          target.as<int64_t>(),
          rows.as<int32_t>(),
          logits.sizes[0],
          static_cast<int>(logits.sizes[1]),
          static_cast<float>(label_smoothing),
          ignore_index};
}

}  // namespace ls_train
