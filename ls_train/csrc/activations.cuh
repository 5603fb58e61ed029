// relu, gelu, gelu_tanh and swish with their derivatives, in float.
#pragma once

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

// gelu(x) = x * Phi(x), Phi the normal distribution. Float: the error function. 16-bit types: polynomials of |x| within
// an exponential, because the error function alone would take longer than the memory traffic. Minimax on [0, 6]; beyond
// it gelu(x) and its derivative round to zero or, for positive x, to x and one.
// - Phi(-|x|) as 2^p(|x|): relative error 8.4e-5 where gelu(x) is a normal float16, a sixth of half its last place.
// - The derivative at -|x| as exp(-x^2 / 2) * q(|x|): absolute error 1.6e-5, a thirtieth of float16's last place
// below 1. A test takes all values of both types. The coefficients are arguments, from the constant term on, so that
// the factor of dropout is in them and costs nothing; what it makes infinite counts as infinite, so that below
// -3.0e38 (0.9 of bfloat16's range at a rate of 0.1) the result is NaN, where torch has -0.
struct Gelu {
  float p[6], q[7];
  float middle;

  // For factor * gelu(x) of factor * x, and for factor times the derivative.
  explicit Gelu(float factor) {
    constexpr float kTail[6] = {-1.00012064f,    -1.14917672f,   -4.64119762e-1f,
                                -4.82378379e-2f, 5.82741760e-3f, -3.20521474e-4f};
    constexpr float kSlope[7] = {4.99984294e-1f, -9.38574195e-1f, 3.38841438e-1f, -1.90872833e-1f,
                                 7.62403160e-2f, -1.81959923e-2f, 1.87608320e-3f};
    double power = 1;
    for (int i = 0; i < 6; ++i) {
      p[i] = static_cast<float>(kTail[i] * power);
      power /= factor > 0 ? factor : 1;  // zero: everything is dropped
    }
    for (int i = 0; i < 7; ++i) q[i] = kSlope[i] * factor;
    middle = 0.5f * factor;
  }
};

template <int kTerms>
__device__ __forceinline__ float polynomial(const float (&coefficients)[kTerms], float x) {
  float y = coefficients[kTerms - 1];
#pragma unroll
  for (int i = kTerms - 2; i >= 0; --i) y = fmaf(y, x, coefficients[i]);
  return y;
}

template <class T>
__device__ __forceinline__ float activate(float x, Activation activation, const Gelu& gelu) {
  switch (activation) {
    case Activation::kGelu: {
      const float size = fabsf(x);
      float tail;
      if constexpr (sizeof(T) == 4) {
        tail = 0.5f * erfcf(size * 0.70710678118654752f);
      } else {
        tail = fast_exp2(polynomial(gelu.p, size));
      }
      return x * fabsf(static_cast<float>(x > 0.f) - tail);  // Phi(x) = 1 - Phi(-x)
    }
    case Activation::kGeluTanh:
      return x * sigmoid_log2(x * fmaf(kLog2E * kTwiceRootTwoOverPi * kCubic, x * x, kLog2E * kTwiceRootTwoOverPi));
    case Activation::kSwish:
      return x * sigmoid(x);
    default:
      return positive_part(x);
  }
}

// activation_gradient takes the argument times this, which costs nothing where a bias is added: the exponential of the
// gelu of 16-bit types is then 2^(-x^2).
template <class T>
__host__ __device__ constexpr float gradient_scale(Activation activation) {
  return sizeof(T) == 2 && activation == Activation::kGelu ? 0.84932180028801904f : 1.f;
}

template <class T>
__device__ __forceinline__ float gelu_gradient(float x, const Gelu& gelu) {
  if constexpr (sizeof(T) == 4) {
    const float gauss = fast_exp2(-0.5f * kLog2E * x * x), tail = 0.5f * erfcf(fabsf(x) * 0.70710678118654752f);
    return fmaf(x * 0.39894228040143268f, gauss, 0.5f + copysignf(0.5f - tail, x));
  } else {
    // The powers of a large bfloat16 overflow.
    const float size = std::is_same_v<T, bfloat16> ? fminf(fabsf(x), 16.f) : fabsf(x);
    return gelu.middle + copysignf(fmaf(-fast_exp2(-x * x), polynomial(gelu.q, size), gelu.middle), x);
  }
}

// Derivative at x / gradient_scale<T>(activation); relu does not come here, its backward works from the output.
template <class T>
__device__ __forceinline__ float activation_gradient(float x, Activation activation, const Gelu& gelu) {
  if (activation == Activation::kGelu) return gelu_gradient<T>(x, gelu);
  const bool tanh = activation == Activation::kGeluTanh;
  const float s = sigmoid(tanh ? kTwiceRootTwoOverPi * x * fmaf(kCubic, x * x, 1.f) : x);
  const float slope = tanh ? kTwiceRootTwoOverPi * fmaf(3.f * kCubic, x * x, 1.f) : 1.f;
  return fmaf(x * slope, s * (1.f - s), s);
}

}  // namespace ls_train
