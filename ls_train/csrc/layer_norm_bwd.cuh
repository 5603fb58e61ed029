// The backward of layer normalisation, with kAdd through the bias + dropout + residual before it as well.
//
// layer_norm_bwd_kernel
//   Grid min(132, ceil(N / groups)), block (lanes, groups) of up to 512: the groups of all blocks take rows in turn, so
//   that memory is gone over from one end to the other, a thread keeps its columns' sums in registers. Later rows are
//   on their way into shared memory, the first ones before the number of used ones is known. Reads dy and the
//   normalised rows (and dsum) once, writes dresidual (kAdd: and dx with dropout) once: 3 to 5 * N * C * sizeof(T)
//   bytes. For aligned rows of up to 1024 packs.
#pragma once

#include <cuda_pipeline.h>

#include "bulk_copy.cuh"
#include "layer_norm_bwd_plain.cuh"

namespace ls_train {

constexpr int kRingBlocks = 132;      // one on each multiprocessor
constexpr int kRingBytes = 48 << 10;  // of rows under way to a block: with more, memory is slower
constexpr int kRingStages = 16;       // at most
constexpr int kRingPacks = 4;         // most that a thread holds of a row
template <int kPacks>
constexpr int kRingThreads = kPacks > 1 ? 256 : 512;

template <class T>
__device__ __forceinline__ Pack<T, kPackWidth<T>> pack_of(const uint4& word) {
  Pack<T, kPackWidth<T>> pack;
  reinterpret_cast<uint4&>(pack) = word;
  return pack;
}

// Values (a power of two) summed over the threads of a group. They are spread over the lanes while they are added,
// which takes less than half of the shuffles. scratch: kValues floats a warp, used by neither the call before nor the
// one after.
template <int kLanes, int kValues>
__device__ __forceinline__ void group_sums(float (&x)[kValues], float* scratch) {
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
  if constexpr (kWarps == 1) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) x[i] = __shfl_sync(kAllLanes, sum, i * kSpread);
  } else {
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

// stages: 1 to kRingStages, what the dynamic shared memory has been counted for.
template <class T, int kLanes, int kPacks, bool kAdd>
__global__ void __launch_bounds__(kRingThreads<kPacks>, 1) layer_norm_bwd_kernel(const NormBackward<T> a, int stages) {
  constexpr int kWidth = kPackWidth<T>, kMostGroups = kRingThreads<kPacks> / kLanes, kSums = kAdd ? 3 : 2;
  extern __shared__ uint4 shared[];
  __shared__ float scratch[2][2 * kRingThreads<kPacks> / kWarp];
  const int groups = static_cast<int>(blockDim.y), group = static_cast<int>(threadIdx.y);
  const int lane = static_cast<int>(threadIdx.x);
  const bool has_dsum = a.dsum != nullptr;
  const int packs = a.columns / kWidth, stage_slots = (has_dsum ? 3 : 2) * packs;
  // The group's rows.
  const int64_t first = static_cast<int64_t>(blockIdx.x) * groups + group;
  const int64_t step = static_cast<int64_t>(gridDim.x) * groups;

  // The group's rows in shared memory, [stage][tensor][pack]. From sm_90 on its first thread asks for whole rows and
  // all wait for them; before, every thread copies the packs that it reads, of two rows at most.
  uint4* const ring = shared + group * stages * stage_slots;
#if __CUDA_ARCH__ >= 900
  __shared__ uint64_t arrived[kMostGroups][kRingStages];
  const auto fetch = [&](int64_t row, int64_t last, int stage) {
    if (lane != 0 || row >= last) return;
    const uint32_t bytes = packs * sizeof(uint4);
    const int64_t at = row * a.columns;
    uint64_t* const barrier = &arrived[group][stage];
    uint4* const slots = ring + stage * stage_slots;
    bulk_expect(barrier, stage_slots * sizeof(uint4));
    bulk_copy(slots, a.dy + at, bytes, barrier);
    bulk_copy(slots + packs, a.sum + at, bytes, barrier);
    if (has_dsum) bulk_copy(slots + 2 * packs, a.dsum + at, bytes, barrier);
  };
  const auto wait = [&](int stage, uint32_t parity) { bulk_wait(&arrived[group][stage], parity); };
#pragma unroll 1
  for (int i = 0; lane == 0 && i < stages; ++i) bulk_init(&arrived[group][i]);
#else
  stages = min(stages, 2);
  const auto fetch = [&](int64_t row, int64_t last, int stage) {
    const int64_t at = row * a.columns;
    uint4* const slots = ring + stage * stage_slots;
    for (int i = lane; row < last && i < packs; i += kLanes) {
      __pipeline_memcpy_async(slots + i, a.dy + at + i * kWidth, sizeof(uint4));
      __pipeline_memcpy_async(slots + packs + i, a.sum + at + i * kWidth, sizeof(uint4));
      if (has_dsum) __pipeline_memcpy_async(slots + 2 * packs + i, a.dsum + at + i * kWidth, sizeof(uint4));
    }
    __pipeline_commit();
  };
  const auto wait = [&](int, uint32_t) {
    if (stages == 1) {
      __pipeline_wait_prior(0);
    } else {
      __pipeline_wait_prior(1);
    }
  };
#endif

  // The first rows are asked for before the number of used ones is known.
#pragma unroll 1
  for (int i = 0; i < stages; ++i) fetch(first + i * step, a.n, i);
  // Lane l of a warp has the statistics of the group's row 32 * batch + l.
  const auto statistic = [&](const float* of, int batch, int64_t last) {
    const int64_t row = first + (batch * kWarp + lane % kWarp) * step;
    return row < last ? of[row] : 0.f;
  };
  float means = statistic(a.mean, 0, a.n), rstds = statistic(a.rstd, 0, a.n);
  const auto column = [&](int k) { return (k * kLanes + lane) * kWidth; };
  Pack<T, kWidth> weight[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    weight[k] = column(k) < a.columns ? load<kWidth>(a.weight + column(k)) : zero_pack<T, kWidth>();
  }
  const DropoutKey key = kAdd ? dropout_key(a.dropout) : DropoutKey{};
  const int64_t used = used_rows(a.rows, a.n);
  float next_means = statistic(a.mean, 1, used), next_rstds = statistic(a.rstd, 1, used);
  float sums[kSums][kPacks][kWidth] = {};  // dweight, dnorm_bias, dbias
  __syncthreads();

  int stage = 0, count = 0;  // count: of the group's rows that are done
  uint32_t parity = 0;
  const auto advance = [&] {
    ++count;
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  };
  const int64_t start = first * a.columns + lane * kWidth, stride = step * a.columns;
  T* dresidual = a.dresidual + start;
  T* dx = kAdd && a.dx != nullptr ? a.dx + start : nullptr;
#pragma unroll 1
  for (int64_t row = first; row < used; row += step) {
    if (count != 0 && count % kWarp == 0) {
      means = next_means;
      rstds = next_rstds;
      next_means = statistic(a.mean, count / kWarp + 1, used);
      next_rstds = statistic(a.rstd, count / kWarp + 1, used);
    }
    const float mean = __shfl_sync(kAllLanes, means, count % kWarp);
    const float rstd = __shfl_sync(kAllLanes, rstds, count % kWarp), shift = -mean * rstd;
    Keep8 keep[kPacks];
    const auto decide = [&](int k) {
      keep[k] = key.active() ? keep8(key, row, static_cast<uint32_t>(column(k)) / 8) : keep_all();
    };
    if (kAdd && kPacks == 1) decide(0);  // while the rows are on their way; for more packs registers do not suffice
    wait(stage, parity);
    const uint4* const slots = ring + stage * stage_slots + lane;
    uint4 words[3][kPacks] = {};
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (column(k) >= a.columns) continue;
      words[0][k] = slots[k * kLanes];
      words[1][k] = slots[packs + k * kLanes];
      if (has_dsum) words[2][k] = slots[2 * packs + k * kLanes];
    }
    float g[kPacks][kWidth], x[kPacks][kWidth];  // g = dy * weight
    float row_sums[2] = {};                      // of g and g * xhat
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      float d[kWidth], w[kWidth];
      unpack(pack_of<T>(words[0][k]), d);
      unpack(pack_of<T>(words[1][k]), x[k]);
      if (kPacks > 1) keep_packed(weight[k]);
      unpack(weight[k], w);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float xhat = fmaf(x[k][i], rstd, shift);
        g[k][i] = d[i] * w[i];
        row_sums[0] += g[k][i];
        row_sums[1] += g[k][i] * xhat;
        sums[0][k][i] += d[i] * xhat;
        sums[1][k][i] += d[i];
      }
    }
    group_sums<kLanes>(row_sums, scratch[count % 2]);
    if (kLanes == kWarp) __syncwarp();
    fetch(row + stages * step, used, stage);  // all threads of the group have read this one
    // dx = rstd * (g - mean of g - xhat * mean of g * xhat) = rstd * g + slope * x + rest
    const float slope = -rstd * rstd * (row_sums[1] * a.per_column);
    const float rest = -fmaf(rstd, row_sums[0] * a.per_column, slope * mean);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (column(k) >= a.columns) continue;
      float d[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) d[i] = fmaf(g[k][i], rstd, fmaf(x[k][i], slope, rest));
      if (has_dsum) {
        float other[kWidth];
        unpack(pack_of<T>(words[2][k]), other);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) d[i] += other[i];
      }
      store(dresidual + k * kLanes * kWidth, pack_floats<T>(d));
      if constexpr (kAdd) {
        if (kPacks > 1) decide(k);
        const Pack<T, kWidth> dropped = drop_and_pack<T>(d, keep[k], key.scale, column(k));
        if (dx != nullptr) store(dx + k * kLanes * kWidth, dropped);
        unpack(dropped, d);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sums[kSums - 1][k][i] += d[i];
      }
    }
    dresidual += stride;
    if (dx != nullptr) dx += stride;
    advance();
  }
  // Rows that have been asked for in vain.
  while (count < stages && first + count * step < a.n) {
    wait(stage, parity);
    advance();
  }
#if __CUDA_ARCH__ < 900
  __pipeline_wait_prior(0);
#endif
  for (int64_t row = used + first; row < a.n; row += step) {
    for (int i = lane; i < packs; i += kLanes) {
      const int64_t at = row * a.columns + i * kWidth;
      store(a.dresidual + at, zero_pack<T, kWidth>());
      if (kAdd && a.dx != nullptr) store(a.dx + at, zero_pack<T, kWidth>());
    }
  }
  write_partials(a.workspace + static_cast<int64_t>(blockIdx.x) * a.columns,
                 static_cast<int64_t>(gridDim.x) * a.columns, sums, kAdd && a.has_dbias ? 3 : 2, 0, a.columns,
                 reinterpret_cast<float*>(shared));
}

// Calls body(lanes, packs a thread), both constants, for rows of `packs`.
template <class Body>
cudaError_t dispatch_ring(int64_t packs, Body&& body) {
  constexpr std::integral_constant<int, 1> k1;
  constexpr std::integral_constant<int, kRingPacks> kMost;
  if (packs <= 32) return body(std::integral_constant<int, 32>(), k1);
  if (packs <= 64) return body(std::integral_constant<int, 64>(), k1);
  if (packs <= 128) return body(std::integral_constant<int, 128>(), k1);
  if (packs <= 256) return body(std::integral_constant<int, 256>(), k1);
  if (packs <= 512) return body(std::integral_constant<int, 512>(), k1);
  return body(std::integral_constant<int, 256>(), kMost);
}

// Launches layer_norm_bwd_kernel and sets row_blocks, which stays zero where the device's shared memory is too small.
template <class T, bool kAdd>
cudaError_t launch_ring(const NormBackward<T>& a, int& row_blocks, cudaStream_t stream) {
  constexpr int kWidth = kPackWidth<T>;
  return dispatch_ring(a.columns / kWidth, [&](auto lanes, auto packs) {
    constexpr int kLanes = decltype(lanes)::value, kPacks = decltype(packs)::value;
    constexpr auto kKernel = layer_norm_bwd_kernel<T, kLanes, kPacks, kAdd>;
    int groups = kRingThreads<kPacks> / kLanes;
    while (groups > 1 && a.n <= kRingBlocks * groups / 2) groups /= 2;
    const size_t row = (a.dsum != nullptr ? 3 : 2) * a.columns * sizeof(T);  // bytes
    const size_t partials = sizeof(float) * (kAdd ? 3 : 2) * groups * kLanes * kPacks * kWidth;
    int stages = static_cast<int>(std::clamp<int64_t>(kRingBytes / (groups * row), 1, kRingStages));
    const auto bytes = [&] { return std::max(stages * groups * row, partials); };
    while (stages > 1 && !allow_shared_memory<kKernel>(bytes())) --stages;
    if (!allow_shared_memory<kKernel>(bytes())) return cudaSuccess;
    row_blocks = static_cast<int>(std::min<int64_t>(kRingBlocks, ceil_div(a.n, static_cast<int64_t>(groups))));
    kKernel<<<row_blocks, dim3(kLanes, groups), bytes(), stream>>>(a, stages);
    return cudaGetLastError();
  });
}

template <class T, bool kAdd>
cudaError_t launch_layer_norm_bwd(NormBackward<T> a, const ColumnSums& sums, DType dtype, bool accumulate,
                                  const TensorRef& partial_rows, cudaStream_t stream) {
  int row_blocks = 0;
  if (a.n > 0 && a.columns > 0) {
    a.per_column = 1.f / static_cast<float>(a.columns);
    cudaError_t error = cudaSuccess;
    if (a.columns <= kRingThreads<kRingPacks> * kRingPacks * kPackWidth<T> &&
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
