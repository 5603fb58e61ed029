// A float32 master as a 16-bit parameter and a 16-bit remainder (ls_train/compact_master.py has the rules).
#pragma once

#include "device.cuh"

namespace ls_train {

__device__ __forceinline__ void split_master(float master, bfloat16& param, int16_t& remainder) {
  const uint32_t bits = __float_as_uint(master);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  // To nearest, ties away from zero. The largest magnitudes carry into the exponent, never into the sign.
  const uint32_t rounded = nan ? 0x7fffffffu : bits + 0x8000u;
  param = __ushort_as_bfloat16(static_cast<unsigned short>(rounded >> 16));
  remainder = static_cast<int16_t>(nan ? 0u : bits & 0xffffu);
}

__device__ __forceinline__ float join_master(bfloat16 param, int16_t remainder) {
  const uint32_t bits = static_cast<uint32_t>(__bfloat16_as_ushort(param)) << 16;
  // A parameter that became zero since must not turn negative remainders into NaN.
  const int magnitude = max(static_cast<int>(bits & 0x7fffffffu) + remainder, 0);
  return __uint_as_float((bits & 0x80000000u) | static_cast<uint32_t>(magnitude));
}

// Biased exponent of a half, that of the smallest normal number for smaller ones.
__device__ __forceinline__ unsigned exponent_of(half x) { return max((__half_as_ushort(x) >> 10) & 0x1fu, 1u); }

__device__ __forceinline__ void split_master(float master, half& param, int16_t& remainder) {
  // What can be stored is rounded to the parameter, so that whoever reads the pair finds the same parameter again.
  if (fabsf(master) < 0x1p-16f) master = rintf(master * 0x1p39f) * 0x1p-39f;
  param = __float2half_rn(master);  // of every NaN, 0x7fff
  const unsigned exponent = exponent_of(param);
  const float per_unit = __uint_as_float((2 * 127u - 87u - exponent) << 23);
  const int steps = __float2int_rn((master - __half2float(param)) * per_unit);
  remainder = static_cast<int16_t>(exponent == 0x1fu ? 0 : steps);
}

__device__ __forceinline__ float join_master(half param, int16_t remainder) {
  const float unit = __uint_as_float((exponent_of(param) + 87u) << 23);  // 2^-15 of the spacing at param
  return fmaf(static_cast<float>(remainder), unit, __half2float(param));
}

}  // namespace ls_train
