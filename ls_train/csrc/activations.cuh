// relu, gelu, gelu_tanh and swish with their derivatives, in float.
#pragma once

#include <limits>

#include "device.cuh"

namespace ls_train {

// 2^x and 1 / x, one instruction each: relative error 2^-22, subnormal results are zero.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float kLog2E = 1.4426950408889634f;

// 1 / (1 + exp(-x)), for x * log2(e).
__device__ __forceinline__ float sigmoid_log2(float x) { return fast_reciprocal(1.f + fast_exp2(-x)); }
__device__ __forceinline__ float sigmoid(float x) { return sigmoid_log2(x * kLog2E); }

// max(x, 0), but NaN stays NaN, so that overflows are noticed.
__device__ __forceinline__ float positive_part(float x) {
#if __CUDA_ARCH__ >= 800
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(x) : "f"(x));
  return x;
#else
  return x < 0.f ? 0.f : x;
#endif
}

// Argument of the logistic function in gelu_tanh(x) = x * sigmoid(2u), u = sqrt(2 / pi) * (x + 0.044715 x^3).
constexpr float kTwiceRootTwoOverPi = 1.5957691216057308f;
constexpr float kCubic = 0.044715f;

constexpr float kLargest = std::numeric_limits<float>::max();

// The normal distribution's Phi(-|x|), and exp(-x^2 / 2) on the way. Float: the error function. 16-bit types:
// Abramowitz and Stegun 7.1.26, absolute error 1.5e-7, because the error function alone would take longer than the
// memory traffic.
template <class T>
__device__ __forceinline__ float normal_tail(float x, float& gauss) {
  gauss = fast_exp2(-0.5f * kLog2E * x * x);
  if constexpr (sizeof(T) == 4) {
    return 0.5f * erfcf(fabsf(x) * 0.70710678118654752f);
  } else {
    const float t = fast_reciprocal(fmaf(0.3275911f * 0.70710678118654752f, fabsf(x), 1.f));
    float poly = fmaf(0.5f * 1.061405429f, t, 0.5f * -1.453152027f);
    poly = fmaf(poly, t, 0.5f * 1.421413741f);
    poly = fmaf(poly, t, 0.5f * -0.284496736f);
    poly = fmaf(poly, t, 0.5f * 0.254829592f);
    return poly * t * gauss;
  }
}

template <class T>
__device__ __forceinline__ float activate(float x, Activation activation) {
  switch (activation) {
    case Activation::kGelu: {
      float gauss;
      const float tail = normal_tail<T>(x, gauss);
      return fmaf(-fminf(fabsf(x), kLargest), tail, positive_part(x));  // infinity times a tail of zero would be NaN
    }
    case Activation::kGeluTanh:
      return x * sigmoid_log2(x * fmaf(kLog2E * kTwiceRootTwoOverPi * kCubic, x * x, kLog2E * kTwiceRootTwoOverPi));
    case Activation::kSwish:
      return x * sigmoid(x);
    default:
      return positive_part(x);
  }
}

// Derivative at x; relu does not come here, its backward works from the output.
template <class T>
__device__ __forceinline__ float activation_gradient(float x, Activation activation) {
  if (activation == Activation::kGelu) {
    float gauss;
    const float tail = normal_tail<T>(x, gauss);
    const float cdf = 0.5f + copysignf(0.5f - tail, x);
    return fmaf(x * 0.39894228040143268f, gauss, cdf);
  }
  const bool tanh = activation == Activation::kGeluTanh;
  const float s = sigmoid(tanh ? kTwiceRootTwoOverPi * x * fmaf(kCubic, x * x, 1.f) : x);
  const float slope = tanh ? kTwiceRootTwoOverPi * fmaf(3.f * kCubic, x * x, 1.f) : 1.f;
  return fmaf(x * slope, s * (1.f - s), s);
}

}  // namespace ls_train
