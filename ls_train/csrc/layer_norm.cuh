// Layer normalisation with and without bias + dropout + residual before it: the forward kernel behind layer_norm.cu and
// bias_dropout_add_layer_norm.cu (kAdd); layer_norm_bwd.cuh has the backward. Statistics are float, the variance
// is two-pass over values in registers.
//
// layer_norm_fwd_kernel
//   Grid ceil(N / (groups * kRows)), block (lanes, groups) of 128 or more: `lanes` threads hold a row in registers.
//   Few rows, and with dropout all, are spread over as many threads as they have packs, which shortens the chain from
//   load to store; of many a warp holds one, which takes the fewest instructions, and the weights come into the block's
//   shared memory beside it. Rows are asked for before the number of used ones is known, so that a small batch waits
//   for memory once. Reads x (and residual) once, writes y (and sum) once: 2 (kAdd: 4) * N * C * sizeof(T) bytes. For
//   aligned rows of up to 2048 packs.
// layer_norm_fwd_plain_kernel
//   The same element by element, eight a thread, for rows that cannot be moved in packs. Rows that do not fit into
//   registers are gone over in chunks and read from memory in the later passes.
#pragma once

#include "row_kernels.cuh"

namespace ls_train {

constexpr int kMaxLanes = 512;
constexpr int kForwardThreads = 128;  // a block's, where a row does not take more
constexpr int kForwardPacks = 4;      // most that a thread holds of a row
constexpr int kPlainElements = 8;

template <class T>
struct NormForward {
  T* y;
  T* sum;  // kAdd only, as bias, residual and dropout
  float* mean;
  float* rstd;
  const T* x;
  const T* bias;  // may be null
  const T* residual;
  const T* weight;
  const T* norm_bias;
  const int32_t* rows;
  int64_t n;
  int columns;
  float per_column;  // 1 / columns, set by the launcher
  float eps;
  Dropout dropout;
};

// Sums of kRows rows over the threads that share them: kLanes, or where that is a warp any power of two up to it. With
// one pack a thread the order of additions is that of a warp whose lanes hold every 32nd pack: results do not depend on
// how many rows there are. All threads of the block must call it. scratch: kRows floats a thread, used by no other
// call.
template <int kLanes, int kPacks, int kRows>
__device__ __forceinline__ void row_sums(float (&x)[kRows], float* scratch) {
  constexpr int kWarps = kLanes / kWarp;
  const int first = static_cast<int>(threadIdx.y) * kLanes, lane = static_cast<int>(threadIdx.x) % kWarp;
  if constexpr (kWarps > 1 && kPacks == 1) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) scratch[(first + threadIdx.x) * kRows + r] = x[r];
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      x[r] = scratch[(first + lane) * kRows + r];
#pragma unroll
      for (int i = 1; i < kWarps; ++i) x[r] += scratch[(first + i * kWarp + lane) * kRows + r];
    }
  }
  const int step = kWarps > 1 || kPacks > 1 ? kWarp : static_cast<int>(blockDim.x);
  if (step == kWarp) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r] = warp_reduce<Sum>(x[r]);
  } else {
    for (int distance = step / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) x[r] += __shfl_xor_sync(kAllLanes, x[r], distance);
    }
  }
  if constexpr (kWarps > 1 && kPacks > 1) {
    static_assert(kRows == 1);
    const int warp = linear_thread() / kWarp;
    if (lane == 0) scratch[warp] = x[0];
    __syncthreads();
    x[0] = 0.f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) x[0] += scratch[warp / kWarps * kWarps + i];
  }
}

template <class T>
__device__ __forceinline__ void clear_if(bool clear, Pack<T, kPackWidth<T>>& pack) {
  uint4& word = reinterpret_cast<uint4&>(pack);
  word = {clear ? 0u : word.x, clear ? 0u : word.y, clear ? 0u : word.z, clear ? 0u : word.w};
}

template <int kLanes>
constexpr int kBlockThreads = kLanes < kForwardThreads ? kForwardThreads : kLanes;
// Whether the rows of a block, of which a warp holds each, share the weights in shared memory: registers do not suffice
// for them before the statistics are known.
template <int kLanes, int kPacks, bool kAdd>
constexpr bool kSharedWeights = kPacks > 1 && !kAdd && kLanes == kWarp;
template <int kLanes, int kPacks, int kRows, bool kAdd>  // as many as 64 or 80 registers a thread allow, for many rows
constexpr int kForwardBlocks = kPacks > 1 ? (kAdd || kRows > 1 ? 768 : 1024) / kBlockThreads<kLanes> : 1;

template <class T, int kLanes, int kPacks, int kRows, bool kAdd>
__global__ void __launch_bounds__(kBlockThreads<kLanes>, kForwardBlocks<kLanes, kPacks, kRows, kAdd>)
    layer_norm_fwd_kernel(const NormForward<T> a) {
  constexpr int kWidth = kPackWidth<T>;
  constexpr bool kSpread = kPacks == 1, kEarly = kSpread && kAdd;
  __shared__ float scratch[2][kRows * (kSpread ? kBlockThreads<kLanes> : kMaxLanes / kWarp)];
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y) * kRows;
  const int rows = static_cast<int>(min(a.n - first, static_cast<int64_t>(kRows)));  // may be negative
  const int lanes = kLanes > kWarp || kPacks > 1 ? kLanes : static_cast<int>(blockDim.x);
  const auto column = [&](int k) { return (k * lanes + static_cast<int>(threadIdx.x)) * kWidth; };
  const int64_t base = first * a.columns + static_cast<int>(threadIdx.x) * kWidth;
  const auto at = [&](int r, int k) { return base + (r * a.columns + k * lanes * kWidth); };
  const int64_t count = used_rows(a.rows, a.n);
  Pack<T, kWidth> x[kRows][kPacks], residual[kRows][kPacks], bias[kPacks], weight[kPacks], norm_bias[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const int c = column(k);
    const bool valid = c < a.columns;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      x[r][k] = load_if(valid && r < rows, a.x + at(r, k));
      if constexpr (kAdd) residual[r][k] = load_if(valid && r < rows, a.residual + at(r, k));
    }
    if constexpr (kSpread) {
      if constexpr (kAdd) bias[k] = load_if(valid && a.bias != nullptr, a.bias + c);
      weight[k] = load_if(valid, a.weight + c);
      norm_bias[k] = load_if(valid, a.norm_bias + c);
    }
  }
  constexpr bool kShared = kSharedWeights<kLanes, kPacks, kAdd>;
  __shared__ Pack<T, kWidth> shared_weight[kShared ? 2 : 1][kShared ? kPacks * kWarp : 1];
  if constexpr (kShared) {
    for (int k = linear_thread(); k * kWidth < a.columns; k += kForwardThreads) {
      __pipeline_memcpy_async(&shared_weight[0][k], a.weight + k * kWidth, 16);
      __pipeline_memcpy_async(&shared_weight[1][k], a.norm_bias + k * kWidth, 16);
    }
    __pipeline_commit();
  }
  // Waits for the seed, so it comes after the loads.
  const DropoutKey key = kAdd ? dropout_key(a.dropout) : DropoutKey{};
  Keep8 keep[kRows][kPacks];
  if constexpr (kEarly) {  // while the rows are on their way; for more packs registers do not suffice
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        keep[r][k] = key.active() ? keep8(key, first + r, static_cast<uint32_t>(column(k)) / 8) : keep_all();
      }
    }
  }
  // A branch, so that no load sinks below it.
  if (static_cast<int64_t>(blockIdx.x) * blockDim.y * kRows >= count) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) return;
      if (threadIdx.x == 0) a.mean[first + r] = a.rstd[first + r] = 0.f;
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (column(k) >= a.columns) continue;
        store(a.y + at(r, k), zero_pack<T, kWidth>());
        if (kAdd) store(a.sum + at(r, k), zero_pack<T, kWidth>());
      }
    }
    return;
  }
  const int used = static_cast<int>(min(count - first, static_cast<int64_t>(kRows)));  // may be negative
  float v[kRows][kPacks][kWidth], sums[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    sums[r] = 0.f;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if constexpr (kAdd) {
        float add[kWidth];
        unpack(x[r][k], v[r][k]);
        if constexpr (!kSpread) bias[k] = load_if(column(k) < a.columns && a.bias != nullptr, a.bias + column(k));
        unpack(bias[k], add);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) v[r][k][i] += add[i];
        if constexpr (kEarly) {
          drop(v[r][k], keep[r][k], key.scale, column(k));
        } else {
          drop(v[r][k], key, first + r, column(k));
        }
        unpack(residual[r][k], add);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) v[r][k][i] += add[i];
        x[r][k] = pack_floats<T>(v[r][k]);
        clear_if(r >= used, x[r][k]);
        if (r < rows && column(k) < a.columns) store(a.sum + at(r, k), x[r][k]);
      }
      unpack(x[r][k], v[r][k]);  // kAdd: the statistics are those of the stored sum, which the backward reads
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum += v[r][k][i];
      sums[r] += sum;
    }
  }
  row_sums<kLanes, kPacks>(sums, scratch[0]);
  float mean[kRows], squares[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    mean[r] = __fmul_rn(sums[r], a.per_column);  // never part of another operation: the same bits in every geometry
    squares[r] = 0.f;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        v[r][k][i] -= mean[r];
        sum = fmaf(v[r][k][i], v[r][k][i], sum);
      }
      squares[r] += column(k) < a.columns ? sum : 0.f;
    }
  }
  row_sums<kLanes, kPacks>(squares, scratch[1]);
  if constexpr (kShared) {
    __pipeline_wait_prior(0);
    __syncthreads();
  }
  float rstd[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    rstd[r] = rsqrtf(fmaf(squares[r], a.per_column, a.eps));
    if (threadIdx.x == 0 && r < rows) {
      a.mean[first + r] = r < used ? mean[r] : 0.f;
      a.rstd[first + r] = r < used ? rstd[r] : 0.f;
    }
  }
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const bool valid = column(k) < a.columns;
    if constexpr (kShared) {
      weight[k] = shared_weight[0][k * kWarp + threadIdx.x];
      norm_bias[k] = shared_weight[1][k * kWarp + threadIdx.x];
    } else if constexpr (!kSpread) {
      weight[k] = load_if(valid, a.weight + column(k));
      norm_bias[k] = load_if(valid, a.norm_bias + column(k));
    }
    float w[kWidth], b[kWidth];
    unpack(weight[k], w);
    unpack(norm_bias[k], b);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float y[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) y[i] = fmaf(v[r][k][i] * rstd[r], w[i], b[i]);
      Pack<T, kWidth> rounded = pack_floats<T>(y);
      clear_if(r >= used, rounded);
      if (valid && r < rows) store(a.y + at(r, k), rounded);
    }
  }
}

template <class T, bool kAdd>
__global__ void __launch_bounds__(kMaxLanes) layer_norm_fwd_plain_kernel(const NormForward<T> a) {
  __shared__ float scratch[kWarp];
  const int lanes = static_cast<int>(blockDim.x), lane = static_cast<int>(threadIdx.x);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool used = row < used_rows(a.rows, a.n);
  const int64_t base = row * a.columns;
  const int chunk = kPlainElements * lanes;
  const DropoutKey key = kAdd ? dropout_key(a.dropout) : DropoutKey{};
  float v[kPlainElements];

  const auto column = [&](int first, int k) { return first + k * lanes + lane; };
  const auto load_row = [&](const T* from, int first, float (&to)[kPlainElements]) {
#pragma unroll
    for (int k = 0; k < kPlainElements; ++k) {
      const int c = column(first, k);
      if (used && c < a.columns) to[k] = to_float(from[base + c]);
    }
  };
  // Later passes over a row that is not in registers.
  const auto reload = [&](int first) {
    if (a.columns > chunk) load_row(kAdd ? a.sum : a.x, first, v);
  };

  float total[1] = {0.f};
  for (int first = 0; first < a.columns; first += chunk) {
    float residual[kPlainElements] = {};
#pragma unroll
    for (int k = 0; k < kPlainElements; ++k) v[k] = 0.f;
    load_row(a.x, first, v);  // all loads before the first use
    if (kAdd) load_row(a.residual, first, residual);
#pragma unroll
    for (int k = 0; k < kPlainElements; ++k) {
      const int c = column(first, k);
      if (kAdd && row < a.n && c < a.columns) {
        float x[1] = {v[k] + (a.bias != nullptr ? to_float(a.bias[c]) : 0.f)};
        drop(x, key, row, c);
        const T rounded = from_float<T>(used ? x[0] + residual[k] : 0.f);
        a.sum[base + c] = rounded;
        v[k] = to_float(rounded);  // the statistics are those of the stored sum, which the backward reads
      }
      total[0] += v[k];
    }
  }
  group_reduce<Sum>(total, linear_thread(), lanes, scratch);
  const float mean = total[0] * a.per_column;

  float squares[1] = {0.f};
  for (int first = 0; first < a.columns; first += chunk) {
    reload(first);
#pragma unroll
    for (int k = 0; k < kPlainElements; ++k) {
      if (column(first, k) < a.columns) squares[0] += (v[k] - mean) * (v[k] - mean);
    }
  }
  group_reduce<Sum>(squares, linear_thread(), lanes, scratch);
  const float rstd = rsqrtf(squares[0] * a.per_column + a.eps);

  if (row >= a.n) return;
  if (lane == 0) {
    a.mean[row] = used ? mean : 0.f;
    a.rstd[row] = used ? rstd : 0.f;
  }
  for (int first = 0; first < a.columns; first += chunk) {
    reload(first);
#pragma unroll
    for (int k = 0; k < kPlainElements; ++k) {
      const int c = column(first, k);
      if (c >= a.columns) continue;
      const float y = (v[k] - mean) * rstd * to_float(a.weight[c]) + to_float(a.norm_bias[c]);
      a.y[base + c] = from_float<T>(used ? y : 0.f);
    }
  }
}

// Blocks (lanes, groups) of `threads`, where a row does not take more: kLanes, or for fewer packs than a warp has lanes
// the next power of two.
template <int kLanes>
RowGroups pack_groups(int64_t rows, int64_t packs, int threads) {
  int lanes = kLanes;
  while (kLanes == kWarp && lanes / 2 >= packs) lanes /= 2;
  const int groups = std::max(1, threads / lanes);
  return {dim3(lanes, groups), static_cast<unsigned>(ceil_div(rows, static_cast<int64_t>(groups)))};
}

// Calls body(lanes, packs a thread, rows a thread), all constants, for n rows of `packs`. 32 lanes stand for any power
// of two up to them. The limits are where one geometry overtakes the other on an H200.
template <bool kAdd, class Body>
cudaError_t dispatch_forward(int64_t n, int64_t packs, Body&& body) {
  constexpr int64_t kSpreadPacks = (kAdd ? 768 : 3072) * 128;
  const auto call = [&](auto lanes, auto packs_a_thread, auto rows) { return body(lanes, packs_a_thread, rows); };
  constexpr std::integral_constant<int, 1> k1;
  constexpr std::integral_constant<int, 2> k2;
  constexpr std::integral_constant<int, 4> k4;
  constexpr std::integral_constant<int, 32> k32;
  constexpr std::integral_constant<int, 64> k64;
  constexpr std::integral_constant<int, 128> k128;
  constexpr std::integral_constant<int, kMaxLanes> kMost;
  if (packs > 512) return call(kMost, k4, k1);
  if (packs > 256) return call(k128, k4, k1);
  if (packs > 128) return call(k64, k4, k1);
  if (n * packs <= kSpreadPacks) {
    return packs > 64 ? call(k128, k1, k1) : packs > 32 ? call(k64, k1, k1) : call(k32, k1, k1);
  }
  if constexpr (kAdd) {
    // The generator takes most of the instructions, which a thread does for two packs while they are on their way.
    return packs > 64 ? call(k128, k1, k2) : packs > 32 ? call(k64, k1, k2) : call(k32, k1, k2);
  } else {
    return packs > 64 ? call(k32, k4, k1) : packs > 32 ? call(k32, k2, k2) : call(k32, k1, k4);
  }
}

template <class T, bool kAdd>
cudaError_t launch_layer_norm_fwd(NormForward<T> a, cudaStream_t stream) {
  if (a.n == 0 || a.columns == 0) return cudaSuccess;
  a.per_column = 1.f / static_cast<float>(a.columns);
  constexpr int kWidth = kPackWidth<T>;
  if (a.columns > kMaxLanes * kForwardPacks * kWidth ||
      !packs_fit<T>(a.columns, a.y, a.sum, a.x, a.bias, a.residual, a.weight, a.norm_bias)) {
    const RowGroups g = row_groups(a.n, a.columns, 1, kPlainElements, kMaxLanes);
    layer_norm_fwd_plain_kernel<T, kAdd><<<g.blocks, g.block, 0, stream>>>(a);
    return cudaGetLastError();
  }
  return dispatch_forward<kAdd>(a.n, a.columns / kWidth, [&](auto lanes, auto packs, auto rows) {
    constexpr int kLanes = decltype(lanes)::value, kPacks = decltype(packs)::value, kRows = decltype(rows)::value;
    const RowGroups g = pack_groups<kLanes>(ceil_div(a.n, int64_t{kRows}), a.columns / kWidth, kForwardThreads);
    layer_norm_fwd_kernel<T, kLanes, kPacks, kRows, kAdd><<<g.blocks, g.block, 0, stream>>>(a);
    return cudaGetLastError();
  });
}

}  // namespace ls_train
