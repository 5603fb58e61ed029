// relu, gelu, gelu_tanh and swish with their derivatives, in float.
#pragma once

#include "device.cuh"

namespace ls_train {

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

// Argument of the logistic function in gelu_tanh(x) = x * sigmoid(2u), u = sqrt(2 / pi) * (x + 0.044715 x^3).
constexpr float kTwiceRootTwoOverPi = 1.5957691216057308f;
constexpr float kCubic = 0.044715f;

// The normal distribution's Phi(x), and exp(-x^2 / 2) on the way. Float: the error function. 16-bit types: Abramowitz
// and Stegun 7.1.26, absolute error 1.5e-7, because the error function alone would take longer than the memory traffic.
template <class T>
__device__ __forceinline__ float normal_cdf(float x, float& gauss) {
  gauss = __expf(-0.5f * x * x);
  if constexpr (sizeof(T) == 4) {
    return 0.5f * (1.f + erff(x * 0.70710678118654752f));
  } else {
    const float t = __fdividef(1.f, fmaf(0.3275911f * 0.70710678118654752f, fabsf(x), 1.f));
    float poly = fmaf(1.061405429f, t, -1.453152027f);
    poly = fmaf(poly, t, 1.421413741f);
    poly = fmaf(poly, t, -0.284496736f);
    poly = fmaf(poly, t, 0.254829592f);
    const float tail = 0.5f * poly * t * gauss;  // Phi(-|x|)
    return x < 0.f ? tail : 1.f - tail;
  }
}

template <class T>
__device__ __forceinline__ float activate(float x, Activation activation) {
  switch (activation) {
    case Activation::kGelu: {
      float gauss;
      return x * normal_cdf<T>(x, gauss);
    }
    case Activation::kGeluTanh:
      return x * sigmoid(kTwiceRootTwoOverPi * x * fmaf(kCubic, x * x, 1.f));
    case Activation::kSwish:
      return x * sigmoid(x);
    default:
      // NaN stays NaN, so that overflows are noticed.
#if __CUDA_ARCH__ >= 800
      asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(x) : "f"(x));
      return x;
#else
      return x < 0.f ? 0.f : x;
#endif
  }
}

// Derivative at x; relu does not come here, its backward works from the output.
template <class T>
__device__ __forceinline__ float activation_gradient(float x, Activation activation) {
  if (activation == Activation::kGelu) {
    float gauss;
    const float cdf = normal_cdf<T>(x, gauss);
    return fmaf(x * 0.39894228040143268f, gauss, cdf);
  }
  const bool tanh = activation == Activation::kGeluTanh;
  const float s = sigmoid(tanh ? kTwiceRootTwoOverPi * x * fmaf(kCubic, x * x, 1.f) : x);
  const float slope = tanh ? kTwiceRootTwoOverPi * fmaf(3.f * kCubic, x * x, 1.f) : 1.f;
  return fmaf(x * slope, s * (1.f - s), s);
}

}  // namespace ls_train
