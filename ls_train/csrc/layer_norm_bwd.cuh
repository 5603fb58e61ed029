// The backward of layer normalisation, with kAdd through the bias + dropout + residual before it as well.
//
// layer_norm_bwd_kernel
//   Grid min(264 (more than 256 packs: 132), ceil(N / rows a round)), block (lanes, groups) of 256: a block walks over
//   its share of the rows, a group takes two rows of one pack a thread or one of more at a time, a thread keeps its
//   columns' sums in registers. Rows of the next rounds are on their way into shared memory, the first ones before the
//   number of used ones is known. Reads dy and the normalised rows (and dsum) once, writes dresidual (kAdd: and dx with
//   dropout) once: 3 to 5 * N * C * sizeof(T) bytes. For aligned rows of up to 1024 packs.
#pragma once

#include <cuda_pipeline.h>

#include "layer_norm_bwd_plain.cuh"

namespace ls_train {

constexpr int kRingThreads = 256;     // a block's
constexpr int kRingPacks = 4;         // most that a thread holds of a row
constexpr int kRingBlocks = 264;      // two on each of 132 multiprocessors
constexpr int kWideRingBlocks = 132;  // where the sums leave registers for one
constexpr int64_t kFewRows = 16384;   // beyond, rows of 65 to 128 packs are faster spread over 128 threads
template <int kPacks>
constexpr int kRingRows = kPacks > 1 ? 1 : 2;  // of a group at a time
template <int kPacks>
constexpr int kRingStages = kPacks > 1 ? 3 : 2;  // rounds in shared memory; one where they do not fit

template <class T>
__device__ __forceinline__ Pack<T, kPackWidth<T>> read_slot(const uint4* slot) {
  Pack<T, kPackWidth<T>> pack;
  reinterpret_cast<uint4&>(pack) = *slot;
  return pack;
}

// kValues (a power of two) sums over the threads of a group: kLanes, or where that is a warp any power of two up to it.
// Values are spread over the lanes while they are added, which takes less than half of the shuffles. scratch: kValues
// floats a warp, used by neither the call before nor the one after.
template <int kLanes, int kValues>
__device__ __forceinline__ void group_sums(float (&x)[kValues], float* scratch) {
  if constexpr (kLanes == kWarp) {
    for (int step = static_cast<int>(blockDim.x) / 2; step > 0; step >>= 1) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) x[i] += __shfl_xor_sync(kAllLanes, x[i], step);
    }
  } else {
    constexpr int kWarps = kLanes / kWarp, kSpread = kWarp / kValues;
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    int step = kWarp / 2;
#pragma unroll
    for (int count = kValues / 2; count > 0; count /= 2, step /= 2) {
      const bool upper = lane & step;  // keeps the upper half of the values
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const float other = __shfl_xor_sync(kAllLanes, upper ? x[i] : x[i + count], step);
        x[i] = (upper ? x[i + count] : x[i]) + other;
      }
    }
    const float sum = warp_reduce<Sum, kSpread>(x[0]);  // of value lane / kSpread
    scratch += threadIdx.y * kWarps * kValues;
    if (lane % kSpread == 0) scratch[lane / kSpread * kWarps + warp] = sum;
    // A barrier of its own for each group: they need not go in step.
    asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "n"(kLanes) : "memory");
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      x[i] = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) x[i] += scratch[i * kWarps + w];
    }
  }
}

// stages: 1 or kRingStages<kPacks>, what the dynamic shared memory has been counted for. Rows are counted from the
// block's first.
template <class T, int kLanes, int kPacks, bool kAdd>
__global__ void __launch_bounds__(kRingThreads, kPacks > 2 ? 1 : 2)
    layer_norm_bwd_kernel(const NormBackward<T> a, int stages) {
  constexpr int kWidth = kPackWidth<T>, kRows = kRingRows<kPacks>;
  extern __shared__ uint4 shared[];
  __shared__ float scratch[2][2 * kRows * kRingThreads / kWarp];
  const int lanes = kLanes > kWarp ? kLanes : static_cast<int>(blockDim.x);
  const int round = kRingThreads / lanes * kRows;
  const bool has_dsum = a.dsum != nullptr;
  const int tensors = has_dsum ? 3 : 2;
  const RowShare share = row_share(a.n, gridDim.x, blockIdx.x);
  const int64_t used = used_rows(a.rows, a.n);
  const int end = static_cast<int>(share.end - share.first);
  const auto column = [&](int k) { return (k * lanes + static_cast<int>(threadIdx.x)) * kWidth; };
  const int64_t base = share.first * a.columns;

  // Row buffers in shared memory, [stage][tensor][row][pack][thread], that every thread fills and reads by itself, so
  // without barriers: later rows are on their way while some are worked on.
  constexpr int kTensorSlots = kRows * kPacks * kRingThreads;
  const auto stage_slots = [&](int stage) { return shared + stage * tensors * kTensorSlots + linear_thread(); };
  const auto slot = [](int tensor, int r, int k) { return tensor * kTensorSlots + (r * kPacks + k) * kRingThreads; };
  const auto clear = [&](uint4* slots, int r, int k) {
    slots[slot(0, r, k)] = slots[slot(1, r, k)] = uint4{};
    if (has_dsum) slots[slot(2, r, k)] = uint4{};
  };
  // Leaves slots of rows and columns beyond the end as they are. Below sm_80 an ordinary copy.
  const auto fetch = [&](int first, int last, uint4* slots) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (first + r >= last || column(k) >= a.columns) continue;
        const int64_t at = base + ((first + r) * a.columns + column(k));
        __pipeline_memcpy_async(slots + slot(0, r, k), a.dy + at, sizeof(uint4));
        __pipeline_memcpy_async(slots + slot(1, r, k), a.sum + at, sizeof(uint4));
        if (has_dsum) __pipeline_memcpy_async(slots + slot(2, r, k), a.dsum + at, sizeof(uint4));
      }
    }
    __pipeline_commit();
  };
  const auto statistic = [&](const float* of, int row, int last) { return row < last ? of[share.first + row] : 0.f; };

  // The first rows are asked for before the number of used ones is known.
  const int start = static_cast<int>(threadIdx.y) * kRows;
#pragma unroll 1
  for (int stage = 0; stage < stages - 1; ++stage) fetch(start + stage * round, end, stage_slots(stage));
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      for (int r = 0; column(k) >= a.columns && r < kRows; ++r) clear(stage_slots(stage), r, k);
    }
  }
  float mean[kRows], rstd[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    mean[r] = statistic(a.mean, start + r, end);
    rstd[r] = statistic(a.rstd, start + r, end);
  }
  Pack<T, kWidth> weight[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    weight[k] = column(k) < a.columns ? load<kWidth>(a.weight + column(k)) : zero_pack<T, kWidth>();
  }
  const DropoutKey key = kAdd ? dropout_key(a.dropout) : DropoutKey{};
  const int used_end = static_cast<int>(min(max(used - share.first, int64_t{0}), static_cast<int64_t>(end)));
  float dweight[kPacks][kWidth] = {}, dnorm_bias[kPacks][kWidth] = {}, dbias[kPacks][kWidth] = {};
  int stage = 0, buffer = 0;
  // All groups of a block go round equally often: those that share a warp add their sums together.
  for (int round_first = 0; round_first < end; round_first += round) {
    const int first = round_first + static_cast<int>(threadIdx.y) * kRows;
    uint4* const slots = stage_slots(stage);
    fetch(first + (stages - 1) * round, used_end, stage_slots(stage == 0 ? stages - 1 : stage - 1));
    float next_mean[kRows], next_rstd[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      next_mean[r] = statistic(a.mean, first + round + r, used_end);
      next_rstd[r] = statistic(a.rstd, first + round + r, used_end);
    }
    if (stages == kRingStages<kPacks>) {
      __pipeline_wait_prior(kRingStages<kPacks> - 1);
    } else {
      __pipeline_wait_prior(0);
    }
    float sums[2 * kRows] = {};  // of g and g * xhat, g = dy * weight
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first + r >= used_end) {  // zeros, also where the first rows have been fetched in vain
        mean[r] = rstd[r] = 0.f;
#pragma unroll
        for (int k = 0; k < kPacks; ++k) clear(slots, r, k);
      }
      const float shift = -mean[r] * rstd[r];
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        float d[kWidth], x[kWidth], w[kWidth];
        unpack(read_slot<T>(slots + slot(0, r, k)), d);
        unpack(read_slot<T>(slots + slot(1, r, k)), x);
        keep_packed(weight[k]);
        unpack(weight[k], w);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const float xhat = fmaf(x[i], rstd[r], shift);
          const float g = d[i] * w[i];
          sums[2 * r] += g;
          sums[2 * r + 1] += g * xhat;
          dweight[k][i] += d[i] * xhat;
          dnorm_bias[k][i] += d[i];
        }
      }
    }
    group_sums<kLanes>(sums, scratch[buffer]);
    buffer ^= 1;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // dx = rstd * (g - mean of g - xhat * mean of g * xhat) = rstd * g + slope * x + rest
      const float slope = -rstd[r] * rstd[r] * (sums[2 * r + 1] * a.per_column);
      const float rest = -fmaf(rstd[r], sums[2 * r] * a.per_column, slope * mean[r]);
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (first + r >= end || column(k) >= a.columns) continue;
        const int64_t at = base + ((first + r) * a.columns + column(k));
        float d[kWidth], x[kWidth], w[kWidth];
        unpack(read_slot<T>(slots + slot(0, r, k)), d);
        unpack(read_slot<T>(slots + slot(1, r, k)), x);
        keep_packed(weight[k]);
        unpack(weight[k], w);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) d[i] = fmaf(d[i] * w[i], rstd[r], fmaf(x[i], slope, rest));  // unused: zero
        if (has_dsum) {
          unpack(read_slot<T>(slots + slot(2, r, k)), x);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) d[i] += x[i];
        }
        store(a.dresidual + at, pack_floats<T>(d));
        if constexpr (kAdd) {
          drop(d, key, share.first + (first + r), column(k));
          if (a.dx != nullptr) store(a.dx + at, pack_floats<T>(d));
#pragma unroll
          for (int i = 0; i < kWidth; ++i) dbias[k][i] += d[i];
        }
      }
      mean[r] = next_mean[r];
      rstd[r] = next_rstd[r];
    }
    stage = stage == stages - 1 ? 0 : stage + 1;
  }
  __pipeline_wait_prior(0);
  float* const sums_scratch = reinterpret_cast<float*>(shared);  // the rows are no longer needed
  const auto partial = [&](int sum) {
    return a.workspace + static_cast<int64_t>(sum * gridDim.x + blockIdx.x) * a.columns;
  };
  write_partial(partial(0), dweight, 0, a.columns, sums_scratch);
  write_partial(partial(1), dnorm_bias, 0, a.columns, sums_scratch);
  if (kAdd && a.has_dbias) write_partial(partial(2), dbias, 0, a.columns, sums_scratch);
}

// Calls body(lanes, packs a thread), both constants, for n rows of `packs`. 32 lanes stand for any power of two up
// to them.
template <class Body>
cudaError_t dispatch_ring(int64_t n, int64_t packs, Body&& body) {
  constexpr std::integral_constant<int, 1> k1;
  constexpr std::integral_constant<int, 2> k2;
  constexpr std::integral_constant<int, kRingPacks> kMost;
  constexpr std::integral_constant<int, 64> k64;
  constexpr std::integral_constant<int, 128> k128;
  if (packs <= 32) return body(std::integral_constant<int, 32>(), k1);
  if (packs <= 64) return body(k64, k1);
  if (packs <= 128) return n <= kFewRows ? body(k64, k2) : body(k128, k1);
  if (packs <= 256) return body(k128, k2);
  if (packs <= 512) return body(k128, kMost);
  return body(std::integral_constant<int, kRingThreads>(), kMost);
}

// Launches layer_norm_bwd_kernel and sets row_blocks, which stays zero where the device's shared memory is too small.
template <class T, bool kAdd>
cudaError_t launch_ring(const NormBackward<T>& a, int& row_blocks, cudaStream_t stream) {
  constexpr int kWidth = kPackWidth<T>;
  return dispatch_ring(a.n, a.columns / kWidth, [&](auto lanes, auto packs) {
    constexpr int kLanes = decltype(lanes)::value, kPacks = decltype(packs)::value, kRows = kRingRows<kPacks>;
    constexpr auto kKernel = layer_norm_bwd_kernel<T, kLanes, kPacks, kAdd>;
    const RowGroups g = pack_groups<kLanes>(ceil_div(a.n, int64_t{kRows}), a.columns / kWidth, kRingThreads);
    const auto ring_bytes = [&](int stages) {
      // The latter for write_partial.
      return kRingThreads * kPacks *
             std::max((a.dsum != nullptr ? 3 : 2) * stages * kRows * sizeof(uint4), sizeof(float) * kWidth);
    };
    for (int stages : {kRingStages<kPacks>, 1}) {
      if (!allow_shared_memory<kKernel>(ring_bytes(stages))) continue;
      row_blocks = static_cast<int>(std::min<unsigned>(g.blocks, kPacks > 2 ? kWideRingBlocks : kRingBlocks));
      kKernel<<<row_blocks, g.block, ring_bytes(stages), stream>>>(a, stages);
      return cudaGetLastError();
    }
    return cudaSuccess;
  });
}

template <class T, bool kAdd>
cudaError_t launch_layer_norm_bwd(NormBackward<T> a, const ColumnSums& sums, DType dtype, bool accumulate,
                                  const TensorRef& partial_rows, cudaStream_t stream) {
  int row_blocks = 0;
  if (a.n > 0 && a.columns > 0) {
    a.per_column = 1.f / static_cast<float>(a.columns);
    cudaError_t error = cudaSuccess;
    if (a.columns <= kRingThreads * kRingPacks * kPackWidth<T> &&
        packs_fit<T>(a.columns, a.dx, a.dresidual, a.dy, a.dsum, a.sum, a.weight) && aligned16(a.workspace)) {
      error = launch_ring<T, kAdd>(a, row_blocks, stream);
    }
    if (error == cudaSuccess && row_blocks == 0) {
      const RowGroups g = row_groups(a.n, a.columns, 1, kPlainElements, kMaxLanes);
      row_blocks = static_cast<int>(std::min<unsigned>(kMaxRowBlocks, g.blocks));
      if (a.columns > kMaxLanes * kPlainElements) {
        error = layer_norm_bwd_wide(a, row_blocks, stream);
      } else {
        layer_norm_bwd_plain_kernel<T, kAdd><<<row_blocks, g.block, 0, stream>>>(a);
        error = cudaGetLastError();
      }
    }
    if (error != cudaSuccess) return error;
  }
  return finish_column_sums(sums, dtype, a.workspace, row_blocks, a.columns, accumulate, partial_rows, stream);
}

}  // namespace ls_train
