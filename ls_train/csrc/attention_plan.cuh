// Tensor-core attention, host side: where it applies, how many warps and how much shared memory a block gets.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "attention.cuh"

namespace ls_train {

constexpr int kChunk = 32;
constexpr int kWarpRows = 16;
constexpr int kChunkTiles = kChunk / 8;
constexpr int kMaxSlots = 4;

template <int kDim>
constexpr int kTileStride = kDim + 8;

template <class I>
__host__ __device__ constexpr I round_up(I x, I multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

// Shared memory that a block of the tensor-core kernels may use, 0 where they do not apply: another type, head size or
// alignment, or an older device.
inline cudaError_t tensor_core_memory(int& limit, int dim, std::initializer_list<const TensorRef*> tensors) {
  constexpr int kMaxDim = 256, kAlignment = 8;
  limit = 0;
  if (dim % kAlignment != 0 || dim > kMaxDim) return cudaSuccess;
  for (const TensorRef* x : tensors) {
    const bool half_type = x->dtype == DType::kFloat16 || x->dtype == DType::kBFloat16;
    const bool aligned = aligned16(x->data) && x->strides[0] % kAlignment == 0 && x->strides[1] % kAlignment == 0;
    if (!half_type || !aligned) return cudaSuccess;
  }
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess && major >= 8) {
    error = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  return error;
}

template <class Body>
cudaError_t dispatch_half_type(DType dtype, Body&& body) {
  return dtype == DType::kFloat16 ? body(Type<half>()) : body(Type<bfloat16>());
}

// How a kernel that owns queries and lets keys pass by covers them. Two blocks should fit a multiprocessor.
struct RingPlan {
  int warps, tiles, slots, memory;
};

inline RingPlan plan_ring(int row_bytes, int slot_bytes, int max_warps, int64_t max_q, int64_t max_k,
                          int memory_limit) {
  constexpr int kHalfMultiprocessor = 113 * 1024;
  memory_limit = std::min(memory_limit, kHalfMultiprocessor);
  RingPlan plan = {};
  const int64_t queries = std::max<int64_t>(max_q, 1);
  plan.warps = static_cast<int>(std::min<int64_t>(max_warps, ceil_div<int64_t>(queries, kWarpRows)));
  while (plan.warps > 1 && plan.warps * kWarpRows * row_bytes + slot_bytes > memory_limit) --plan.warps;
  plan.tiles = static_cast<int>(ceil_div<int64_t>(queries, plan.warps * kWarpRows));
  const int fitting = (memory_limit - plan.warps * kWarpRows * row_bytes) / slot_bytes;
  const int64_t chunks = ceil_div<int64_t>(std::max<int64_t>(max_k, 1), kChunk);
  plan.slots = 1;
  while (plan.slots < chunks && plan.slots * 2 <= std::min(kMaxSlots, fitting)) plan.slots *= 2;
  plan.memory = plan.warps * kWarpRows * row_bytes + plan.slots * slot_bytes;
  return plan;
}

// Calls body(std::integral_constant<int, padded head size>()).
template <class Body>
cudaError_t dispatch_dim(int dim, Body&& body) {
  if (dim <= 32) return body(std::integral_constant<int, 32>());
  if (dim <= 64) return body(std::integral_constant<int, 64>());
  if (dim <= 96) return body(std::integral_constant<int, 96>());
  if (dim <= 128) return body(std::integral_constant<int, 128>());
  if (dim <= 192) return body(std::integral_constant<int, 192>());
  return body(std::integral_constant<int, 256>());
}

// Kernels by the longest sequence, in queries or keys. Heads of kNarrowDim to kLongDim have kernels of their own up to
// kShortLength (attention_short.cuh): one warp does a sequence and head of up to kWarpLength, a block of them a longer
// one (attention_block.cuh). Heads of up to kLongDim have others for all longer ones (attention_long.cuh).
constexpr int kWarpLength = 32, kShortLength = 128;
constexpr int kNarrowDim = 32, kLongDim = 64;

// Both mask scores before they are scaled, hence the sign. Those of long sequences decide dropout as masks8 does.
inline bool is_long(const Attention& a, int64_t max_q, int64_t max_k) {
  return a.dim <= kLongDim && std::max(max_q, max_k) > kShortLength && a.scale > 0.f && masks_fit(a.dropout);
}

inline bool is_short(const Attention& a, int64_t max_q, int64_t max_k) {
  return a.dim > kNarrowDim && a.dim <= kLongDim && std::max(max_q, max_k) <= kShortLength && a.scale > 0.f;
}

cudaError_t attention_fwd_short(const Attention& a, DType dtype, int64_t max_q, int64_t max_k, cudaStream_t stream);
cudaError_t attention_bwd_short(const Attention& a, DType dtype, int64_t max_q, int64_t max_k, cudaStream_t stream);

// The same beyond kWarpLength.
cudaError_t attention_fwd_block(Attention a, DType dtype, int64_t max_q, int64_t max_k, cudaStream_t stream);
cudaError_t attention_bwd_block(const Attention& a, DType dtype, int64_t max_q, int64_t max_k, cudaStream_t stream);

cudaError_t attention_fwd_long(const Attention& a, DType dtype, int64_t max_q, cudaStream_t stream);
cudaError_t attention_bwd_long(const Attention& a, DType dtype, int64_t max_q, int64_t max_k, cudaStream_t stream);

// dq and the row sums of dout * out, in attention_bwd_dq.cu.
cudaError_t attention_bwd_dq(const Attention& a, DType dtype, int64_t max_q, int64_t max_k, int memory_limit,
                             cudaStream_t stream);

}  // namespace ls_train
