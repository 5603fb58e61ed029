// Layer normalisation with and without bias + dropout + residual before it: the forward kernel behind layer_norm.cu and
// bias_dropout_add_layer_norm.cu (kAdd); layer_norm_bwd.cuh has the backward. Statistics are float, the variance
// is two-pass over values in registers.
//
// layer_norm_fwd_kernel
//   Grid ceil(N / groups), block (lanes, groups): `lanes` threads hold one row in registers, four packs each.
//   Reads x (and residual) once, writes y (and sum) once: 2 (kAdd: 4) * N * C * sizeof(T) bytes. The instantiation for
//   kWidth 1 goes over rows that do not fit into registers in chunks and reads them from memory in its later passes.
#pragma once

#include "row_kernels.cuh"

namespace ls_train {

template <class T, int kWidth>
constexpr int kForwardElements = kWidth == 1 ? 8 : 4 * kWidth;
constexpr int kMaxLanes = 512;

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
  float eps;
  Dropout dropout;
};

template <class T, int kWidth, bool kAdd>
__global__ void __launch_bounds__(kMaxLanes, kWidth > 1 ? 2 : 1) layer_norm_fwd_kernel(const NormForward<T> a) {
  constexpr int kPacks = kForwardElements<T, kWidth> / kWidth;
  constexpr bool kOneChunk = kWidth > 1;
  __shared__ float scratch[kWarp];
  const int lanes = static_cast<int>(blockDim.x);
  const int lane = static_cast<int>(threadIdx.x);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool used = row < used_rows(a.rows, a.n);
  const int64_t base = row * a.columns;
  const int chunk = kPacks * lanes * kWidth;
  const DropoutKey key = kAdd ? dropout_key(a.dropout) : DropoutKey{};
  float v[kPacks][kWidth];

  const auto column = [&](int first, int k) { return first + (k * lanes + lane) * kWidth; };
  const auto next_chunk = [&](int first) { return kOneChunk ? a.columns : first + chunk; };
  // Later passes over a row that is not in registers.
  const auto reload = [&](int first) {
    if (!kOneChunk && a.columns > chunk) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        const int c = column(first, k);
        if (used && c < a.columns) load_floats(kAdd ? a.sum + base + c : a.x + base + c, v[k]);
      }
    }
  };

  float total[1] = {0.f};
  for (int first = 0; first < a.columns; first = next_chunk(first)) {
    Pack<T, kWidth> x[kPacks], residual[kPacks];
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {  // all loads before the first use
      const int c = column(first, k);
      x[k] = zero_pack<T, kWidth>();
      if (kAdd) residual[k] = zero_pack<T, kWidth>();
      if (used && c < a.columns) {
        x[k] = kAdd ? load_streaming<kWidth>(a.x + base + c) : load<kWidth>(a.x + base + c);
        if (kAdd) residual[k] = load<kWidth>(a.residual + base + c);
      }
    }
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int c = column(first, k);
      unpack(x[k], v[k]);
      if constexpr (kAdd) {
        if (row < a.n && c < a.columns) {
          float add[kWidth];
          if (a.bias != nullptr) {
            load_floats(a.bias + c, add);
#pragma unroll
            for (int i = 0; i < kWidth; ++i) v[k][i] += add[i];
          }
          drop(v[k], key, row, c);
          unpack(residual[k], add);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) v[k][i] = used ? v[k][i] + add[i] : 0.f;
          const Pack<T, kWidth> rounded = pack_floats<T>(v[k]);
          store(a.sum + base + c, rounded);
          unpack(rounded, v[k]);  // the statistics are those of the stored sum, which the backward reads
        }
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) total[0] += v[k][i];
    }
  }
  group_reduce<Sum>(total, linear_thread(), lanes, scratch);
  const float mean = total[0] / static_cast<float>(a.columns);

  float squares[1] = {0.f};
  for (int first = 0; first < a.columns; first = next_chunk(first)) {
    reload(first);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      if (column(first, k) < a.columns) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) squares[0] += (v[k][i] - mean) * (v[k][i] - mean);
      }
    }
  }
  group_reduce<Sum>(squares, linear_thread(), lanes, scratch);
  const float rstd = rsqrtf(squares[0] / static_cast<float>(a.columns) + a.eps);

  if (row >= a.n) return;
  if (lane == 0) {
    a.mean[row] = used ? mean : 0.f;
    a.rstd[row] = used ? rstd : 0.f;
  }
  for (int first = 0; first < a.columns; first = next_chunk(first)) {
    reload(first);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int c = column(first, k);
      if (c < a.columns) {
        float weight[kWidth], norm_bias[kWidth], y[kWidth];
        load_floats(a.weight + c, weight);
        load_floats(a.norm_bias + c, norm_bias);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) y[i] = used ? (v[k][i] - mean) * rstd * weight[i] + norm_bias[i] : 0.f;
        store(a.y + base + c, pack_floats<T>(y));
      }
    }
  }
}

template <class T, bool kAdd>
cudaError_t launch_layer_norm_fwd(const NormForward<T>& a, cudaStream_t stream) {
  if (a.n == 0 || a.columns == 0) return cudaSuccess;
  constexpr int kWide = kPackWidth<T>;
  if (a.columns <= kMaxLanes * kForwardElements<T, kWide> &&
      packs_fit<T>(a.columns, a.y, a.sum, a.x, a.bias, a.residual, a.weight, a.norm_bias)) {
    const RowGroups g = row_groups(a.n, a.columns, kWide, kForwardElements<T, kWide>, kMaxLanes);
    layer_norm_fwd_kernel<T, kWide, kAdd><<<g.blocks, g.block, 0, stream>>>(a);
  } else {
    const RowGroups g = row_groups(a.n, a.columns, 1, kForwardElements<T, 1>, kMaxLanes);
    layer_norm_fwd_kernel<T, 1, kAdd><<<g.blocks, g.block, 0, stream>>>(a);
  }
  return cudaGetLastError();
}

}  // namespace ls_train
