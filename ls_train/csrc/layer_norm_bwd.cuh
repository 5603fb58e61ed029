// The backward of layer normalisation, with kAdd through the bias + dropout + residual before it as well.
//
// layer_norm_bwd_kernel
//   Grid min(264 (kAdd: 132), ceil(N / groups)), block (lanes, groups) of 256: a block walks over its share of the
//   rows, a thread keeps up to four packs of columns and their column sums in registers, later rows are on their way
//   into shared memory. Reads dy and the normalised rows (and dsum) once, writes dresidual (kAdd: and dx with dropout)
//   once: 3 to 5 * N * C * sizeof(T) bytes. For aligned rows of up to 1024 packs.
// layer_norm_bwd_plain_kernel
//   Grid min(264, ceil(N / groups)) and a loop over rows, block (lanes, groups) of 256 or 512: the same traffic element
//   by element, for rows of up to 4096 columns that cannot be moved in packs. Wider ones go to layer_norm_bwd_wide.
#pragma once

#include <cuda_pipeline.h>

#include "layer_norm.cuh"

namespace ls_train {

template <class T>
struct NormBackward {
  T* dx;         // kAdd: may be null, gets mask * scale * dresidual
  T* dresidual;  // gradient of the normalised rows
  const T* dy;
  const T* dsum;  // gradient that reaches the normalised rows by another path; may be null
  const T* sum;   // the normalised rows
  const float* mean;
  const float* rstd;
  const T* weight;
  float* workspace;  // dweight, dnorm_bias and, with has_dbias, dbias
  const int32_t* rows;
  int64_t n;
  int columns;
  bool has_dbias;
  Dropout dropout;
};

// Rows too wide for registers; dtype is T's.
template <class T>
cudaError_t layer_norm_bwd_wide(const NormBackward<T>& a, int row_blocks, cudaStream_t stream);

constexpr int kRingThreads = 256;
constexpr int kRingStages = 2;       // rows of a thread in shared memory; one where two do not fit
constexpr int kRingBlocks = 264;     // two on each of 132 multiprocessors
constexpr int kAddRingBlocks = 132;  // its sums of dx leave registers for one
constexpr int kMaxRingPacks = 4;
constexpr int kPlainElements = 8;

// Row buffers in shared memory, [stage][tensor][pack][thread], that every thread fills and reads by itself, so without
// barriers: the packs of later rows are on their way while a row is worked on.
template <int kPacks>
struct Ring {
  uint4* slots;  // of this thread
  int tensors, threads;

  __device__ __forceinline__ uint4* slot(int stage, int tensor, int k) const {
    return slots + ((stage * tensors + tensor) * kPacks + k) * threads;
  }
};

// Zeros where not valid; below sm_80 an ordinary copy.
__device__ __forceinline__ void copy_async(uint4* to, const void* from, bool valid) {
  __pipeline_memcpy_async(to, from, 16, valid ? 0 : 16);
}

template <class T>
__device__ __forceinline__ Pack<T, kPackWidth<T>> read_slot(const uint4* slot) {
  Pack<T, kPackWidth<T>> pack;
  reinterpret_cast<uint4&>(pack) = *slot;
  return pack;
}

// stages: 1 or kRingStages, what the dynamic shared memory (ring_bytes) has been counted for.
template <class T, int kPacks, bool kAdd>
__global__ void __launch_bounds__(kRingThreads, kAdd ? 1 : 2)
    layer_norm_bwd_kernel(const NormBackward<T> a, int stages) {
  constexpr int kWidth = kPackWidth<T>;
  extern __shared__ uint4 shared[];
  __shared__ float scratch[kWarp];
  const int lanes = static_cast<int>(blockDim.x), lane = static_cast<int>(threadIdx.x);
  const int groups = static_cast<int>(blockDim.y), thread = linear_thread();
  const int64_t used = used_rows(a.rows, a.n);
  const DropoutKey key = kAdd ? dropout_key(a.dropout) : DropoutKey{};
  const RowShare share = row_share(a.n, gridDim.x, blockIdx.x);
  const float per_column = 1.f / static_cast<float>(a.columns);
  const bool has_dsum = a.dsum != nullptr;
  const int tensors = has_dsum ? 3 : 2;
  const Ring<kPacks> ring = {shared + thread, tensors, lanes * groups};
  uint4* const weights = shared + stages * tensors * kPacks * lanes * groups + lane;
  const auto column = [&](int k) { return (k * lanes + lane) * kWidth; };
  const auto fetch = [&](int64_t row, int stage) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const bool valid = row < share.end && row < used && column(k) < a.columns;
      const int64_t at = valid ? row * a.columns + column(k) : 0;
      copy_async(ring.slot(stage, 0, k), a.dy + at, valid);
      copy_async(ring.slot(stage, 1, k), a.sum + at, valid);
      if (has_dsum) copy_async(ring.slot(stage, 2, k), a.dsum + at, valid);
    }
    __pipeline_commit();
  };
  if (stages == kRingStages) fetch(share.first + threadIdx.y, 0);
  if (threadIdx.y == 0) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      weights[k * lanes] = column(k) < a.columns ? *reinterpret_cast<const uint4*>(a.weight + column(k)) : uint4{};
    }
  }
  __syncthreads();
  float dweight[kPacks][kWidth] = {}, dnorm_bias[kPacks][kWidth] = {}, dbias[kPacks][kWidth] = {};
  int stage = 0;
  const auto statistic = [&](const float* of, int64_t row) { return row < share.end && row < used ? of[row] : 0.f; };
  float mean = statistic(a.mean, share.first + threadIdx.y), rstd = statistic(a.rstd, share.first + threadIdx.y);
  // All groups of a block go round equally often: wide rows reduce over barriers.
  for (int64_t block_row = share.first; block_row < share.end; block_row += groups) {
    const int64_t row = block_row + threadIdx.y;
    const int next_stage = stages - 1 - stage;
    fetch(stages == kRingStages ? row + groups : row, next_stage);
    const float next_mean = statistic(a.mean, row + groups), next_rstd = statistic(a.rstd, row + groups);
    if (stages == kRingStages) {
      __pipeline_wait_prior(1);
    } else {
      __pipeline_wait_prior(0);
    }
    const float shift = -mean * rstd;
    float sums[2] = {};  // of g and g * xhat, g = dy * weight
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      float d[kWidth], x[kWidth], w[kWidth];  // columns and rows beyond the end have d = 0
      unpack(read_slot<T>(ring.slot(stage, 0, k)), d);
      unpack(read_slot<T>(ring.slot(stage, 1, k)), x);
      unpack(read_slot<T>(weights + k * lanes), w);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float xhat = fmaf(x[i], rstd, shift);
        const float g = d[i] * w[i];
        sums[0] += g;
        sums[1] += g * xhat;
        dweight[k][i] += d[i] * xhat;
        dnorm_bias[k][i] += d[i];
      }
    }
    group_reduce<Sum>(sums, thread, lanes, scratch);
    // dx = rstd * (g - mean of g - xhat * mean of g * xhat) = rstd * g + slope * x + rest
    const float slope = -rstd * rstd * (sums[1] * per_column);
    const float rest = -fmaf(rstd, sums[0] * per_column, slope * mean);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (row >= share.end || column(k) >= a.columns) continue;
      const int64_t at = row * a.columns + column(k);
      float d[kWidth], x[kWidth], w[kWidth];
      unpack(read_slot<T>(ring.slot(stage, 0, k)), d);
      unpack(read_slot<T>(ring.slot(stage, 1, k)), x);
      unpack(read_slot<T>(weights + k * lanes), w);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) d[i] = fmaf(d[i] * w[i], rstd, fmaf(x[i], slope, rest));  // unused rows: zero
      if (has_dsum) {
        unpack(read_slot<T>(ring.slot(stage, 2, k)), x);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) d[i] += x[i];
      }
      store(a.dresidual + at, pack_floats<T>(d));
      if constexpr (kAdd) {
        drop(d, key, row, column(k));
        if (a.dx != nullptr) store(a.dx + at, pack_floats<T>(d));
#pragma unroll
        for (int i = 0; i < kWidth; ++i) dbias[k][i] += d[i];
      }
    }
    mean = next_mean;
    rstd = next_rstd;
    stage = next_stage;
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

template <class T, bool kAdd>
__global__ void __launch_bounds__(kMaxLanes) layer_norm_bwd_plain_kernel(const NormBackward<T> a) {
  __shared__ float scratch[kMaxLanes * kPlainElements];
  const int lanes = static_cast<int>(blockDim.x);
  const int64_t used = used_rows(a.rows, a.n);
  const DropoutKey key = kAdd ? dropout_key(a.dropout) : DropoutKey{};
  const float per_column = 1.f / static_cast<float>(a.columns);
  const auto column = [&](int k) { return k * lanes + static_cast<int>(threadIdx.x); };
  float weight[kPlainElements];
#pragma unroll
  for (int k = 0; k < kPlainElements; ++k) weight[k] = column(k) < a.columns ? to_float(a.weight[column(k)]) : 0.f;

  float dweight[kPlainElements][1] = {}, dnorm_bias[kPlainElements][1] = {}, dbias[kPlainElements][1] = {};
  // All groups of a block go round equally often: the reductions are barriers.
  for (int64_t block_row = static_cast<int64_t>(blockIdx.x) * blockDim.y; block_row < a.n;
       block_row += static_cast<int64_t>(gridDim.x) * blockDim.y) {
    const int64_t row = block_row + threadIdx.y;
    const float mean = row < used ? a.mean[row] : 0.f, rstd = row < used ? a.rstd[row] : 0.f;
    float dy[kPlainElements], xhat[kPlainElements];
#pragma unroll
    for (int k = 0; k < kPlainElements; ++k) {
      const bool valid = row < used && column(k) < a.columns;
      const int64_t at = row * a.columns + column(k);
      dy[k] = valid ? to_float(a.dy[at]) : 0.f;
      xhat[k] = valid ? (to_float(a.sum[at]) - mean) * rstd : 0.f;
    }
    float sums[2] = {};  // of g and g * xhat, g = dy * weight
#pragma unroll
    for (int k = 0; k < kPlainElements; ++k) {
      const float g = dy[k] * weight[k];
      sums[0] += g;
      sums[1] += g * xhat[k];
      dweight[k][0] += dy[k] * xhat[k];
      dnorm_bias[k][0] += dy[k];
    }
    group_reduce<Sum>(sums, linear_thread(), lanes, scratch);
#pragma unroll
    for (int k = 0; k < kPlainElements; ++k) {
      if (row >= a.n || column(k) >= a.columns) continue;
      const int64_t at = row * a.columns + column(k);
      float d[1] = {rstd * (dy[k] * weight[k] - sums[0] * per_column - xhat[k] * (sums[1] * per_column))};
      if (a.dsum != nullptr && row < used) d[0] += to_float(a.dsum[at]);
      a.dresidual[at] = from_float<T>(d[0]);  // zero in unused rows
      if constexpr (kAdd) {
        drop(d, key, row, column(k));
        if (a.dx != nullptr) a.dx[at] = from_float<T>(d[0]);
        dbias[k][0] += d[0];
      }
    }
  }

  const auto partial = [&](int sum) {
    return a.workspace + static_cast<int64_t>(sum * gridDim.x + blockIdx.x) * a.columns;
  };
  write_partial(partial(0), dweight, 0, a.columns, scratch);
  write_partial(partial(1), dnorm_bias, 0, a.columns, scratch);
  if (kAdd && a.has_dbias) write_partial(partial(2), dbias, 0, a.columns, scratch);
}

// Calls body(constant) with the number of packs a thread has to hold: 256 threads cover up to 1024 of them.
template <class Body>
cudaError_t dispatch_packs(int64_t packs, Body&& body) {
  if (packs <= kWarp) return body(std::integral_constant<int, 1>());
  if (packs <= 2 * kWarp) return body(std::integral_constant<int, 2>());
  return body(std::integral_constant<int, kMaxRingPacks>());
}

// Launches layer_norm_bwd_kernel and sets row_blocks, which stays zero where the device's shared memory is too small.
template <class T, bool kAdd>
cudaError_t launch_ring(const NormBackward<T>& a, int& row_blocks, cudaStream_t stream) {
  constexpr int kWidth = kPackWidth<T>;
  return dispatch_packs(a.columns / kWidth, [&](auto packs) {
    constexpr int kPacks = decltype(packs)::value;
    constexpr auto kKernel = layer_norm_bwd_kernel<T, kPacks, kAdd>;
    const RowGroups g = row_groups(a.n, a.columns, kWidth, kPacks * kWidth, kRingThreads);
    const size_t threads = g.block.x * g.block.y;
    const auto ring_bytes = [&](int stages) {
      const size_t rows = sizeof(uint4) * kPacks * ((a.dsum != nullptr ? 3 : 2) * stages * threads + g.block.x);
      return std::max(rows, sizeof(float) * kPacks * kWidth * threads);  // the latter for write_partial
    };
    for (int stages = kRingStages; stages > 0; --stages) {
      if (!allow_shared_memory<kKernel>(ring_bytes(stages))) continue;
      row_blocks = static_cast<int>(std::min<unsigned>(g.blocks, kAdd ? kAddRingBlocks : kRingBlocks));
      kKernel<<<row_blocks, g.block, ring_bytes(stages), stream>>>(a, stages);
      return cudaGetLastError();
    }
    return cudaSuccess;
  });
}

template <class T, bool kAdd>
cudaError_t launch_layer_norm_bwd(const NormBackward<T>& a, const ColumnSums& sums, DType dtype, bool accumulate,
                                  const TensorRef& partial_rows, cudaStream_t stream) {
  int row_blocks = 0;
  if (a.n > 0 && a.columns > 0) {
    cudaError_t error = cudaSuccess;
    if (a.columns <= kRingThreads * kMaxRingPacks * kPackWidth<T> &&
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
