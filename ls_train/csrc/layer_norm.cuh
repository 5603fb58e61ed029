// Layer normalisation with and without bias + dropout + residual before it: the kernels behind layer_norm.cu and
// bias_dropout_add_layer_norm.cu (kAdd). Statistics are float, the variance is two-pass over values in registers.
//
// layer_norm_fwd_kernel
//   Grid ceil(N / groups), block (lanes, groups): `lanes` threads hold one row in registers, four packs each.
//   Reads x (and residual) once, writes y (and sum) once: 2 (kAdd: 4) * N * C * sizeof(T) bytes. The instantiation for
//   kWidth 1 goes over rows that do not fit into registers in chunks and reads them from memory in its later passes.
// layer_norm_bwd_kernel
//   Grid min(264, ceil(N / groups)) and a loop over rows, block (lanes, groups): a thread keeps kBackwardElements
//   columns, their weight and their column sums in registers and takes kRows rows at a time. Reads dy and the
//   normalised rows (and dsum) once, writes dx (kAdd: dresidual, and dx with dropout) once: 3 to 5 * N * C * sizeof(T)
//   bytes. Rows of more than 512 * kBackwardElements columns go to layer_norm_bwd_wide.
#pragma once

#include "row_kernels.cuh"

namespace ls_train {

template <class T, int kWidth>
constexpr int kForwardElements = kWidth == 1 ? 8 : 4 * kWidth;
constexpr int kBackwardElements = 8;
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

template <class T, int kWidth, bool kAdd>
__global__ void __launch_bounds__(kMaxLanes) layer_norm_bwd_kernel(const NormBackward<T> a) {
  constexpr int kPacks = kBackwardElements / kWidth;
  // About as many bytes in flight whatever the number of input tensors, and no more registers than there are.
  constexpr int kRows = kWidth == 1 ? 1 : kPacks == 1 ? (kAdd ? 2 : 3) : (kAdd ? 1 : 2);
  __shared__ float scratch[kMaxLanes * kBackwardElements];
  const int lanes = static_cast<int>(blockDim.x);
  const int groups = static_cast<int>(blockDim.y);
  const int64_t used = used_rows(a.rows, a.n);
  const DropoutKey key = kAdd ? dropout_key(a.dropout) : DropoutKey{};
  const float per_column = 1.f / static_cast<float>(a.columns);

  float dweight[kPacks][kWidth] = {}, dnorm_bias[kPacks][kWidth] = {}, dbias[kPacks][kWidth] = {};
  Pack<T, kWidth> weight[kPacks];
  const auto column = [&](int k) { return (k * lanes + static_cast<int>(threadIdx.x)) * kWidth; };
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    weight[k] = zero_pack<T, kWidth>();
    if (column(k) < a.columns) weight[k] = load<kWidth>(a.weight + column(k));
  }

  const int64_t step = static_cast<int64_t>(gridDim.x) * groups;
  // All groups of a block go round equally often: the reductions are barriers.
  for (int64_t block_row = static_cast<int64_t>(blockIdx.x) * groups; block_row < a.n; block_row += step * kRows) {
    Pack<T, kWidth> dy[kRows][kPacks], normalised[kRows][kPacks], dsum[kRows][kPacks];
    float mean[kRows], rstd[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = block_row + r * step + threadIdx.y;
      mean[r] = row < used ? a.mean[row] : 0.f;
      rstd[r] = row < used ? a.rstd[row] : 0.f;
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        const int64_t at = row * a.columns + column(k);
        dy[r][k] = normalised[r][k] = dsum[r][k] = zero_pack<T, kWidth>();
        if (row < used && column(k) < a.columns) {
          dy[r][k] = load_streaming<kWidth>(a.dy + at);
          normalised[r][k] = load_streaming<kWidth>(a.sum + at);
          if (a.dsum != nullptr) dsum[r][k] = load_streaming<kWidth>(a.dsum + at);
        }
      }
    }
    float sums[2 * kRows] = {};  // of g and g * xhat, g = dy * weight
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        float d[kWidth], x[kWidth], w[kWidth];  // columns and rows beyond the end have d = 0
        unpack(dy[r][k], d);
        unpack(normalised[r][k], x);
        unpack(weight[k], w);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const float xhat = (x[i] - mean[r]) * rstd[r];
          const float g = d[i] * w[i];
          sums[2 * r] += g;
          sums[2 * r + 1] += g * xhat;
          dweight[k][i] += d[i] * xhat;
          dnorm_bias[k][i] += d[i];
        }
      }
    }
    group_reduce<Sum>(sums, linear_thread(), lanes, scratch);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) keep_packed(weight[k]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        keep_packed(dy[r][k]);
        keep_packed(normalised[r][k]);
      }
      const int64_t row = block_row + r * step + threadIdx.y;
      const float mean_g = sums[2 * r] * per_column, mean_gx = sums[2 * r + 1] * per_column;
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        if (row >= a.n || column(k) >= a.columns) continue;
        const int64_t at = row * a.columns + column(k);
        float d[kWidth], x[kWidth], w[kWidth], other[kWidth];
        unpack(dy[r][k], d);
        unpack(normalised[r][k], x);
        unpack(weight[k], w);
        unpack(dsum[r][k], other);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const float xhat = (x[i] - mean[r]) * rstd[r];
          d[i] = rstd[r] * (d[i] * w[i] - mean_g - xhat * mean_gx) + other[i];  // zero in unused rows
        }
        store(a.dresidual + at, pack_floats<T>(d));
        if constexpr (kAdd) {
          drop(d, key, row, column(k));
          if (a.dx != nullptr) store(a.dx + at, pack_floats<T>(d));
#pragma unroll
          for (int i = 0; i < kWidth; ++i) dbias[k][i] += d[i];
        }
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

template <class T, bool kAdd>
cudaError_t launch_layer_norm_bwd(const NormBackward<T>& a, const ColumnSums& sums, DType dtype, bool accumulate,
                                  cudaStream_t stream) {
  int row_blocks = 0;
  if (a.n > 0 && a.columns > 0) {
    const bool packs = packs_fit<T>(a.columns, a.dx, a.dresidual, a.dy, a.dsum, a.sum, a.weight);
    const int width = packs ? kPackWidth<T> : 1;
    const RowGroups g = row_groups(a.n, a.columns, width, kBackwardElements, kMaxLanes);
    row_blocks = static_cast<int>(std::min<unsigned>(kMaxRowBlocks, g.blocks));
    if (a.columns > kMaxLanes * kBackwardElements) {
      const cudaError_t error = layer_norm_bwd_wide(a, row_blocks, stream);
      if (error != cudaSuccess) return error;
    } else if (packs) {
      layer_norm_bwd_kernel<T, kPackWidth<T>, kAdd><<<row_blocks, g.block, 0, stream>>>(a);
    } else {
      layer_norm_bwd_kernel<T, 1, kAdd><<<row_blocks, g.block, 0, stream>>>(a);
    }
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  return finish_column_sums(sums, dtype, a.workspace, row_blocks, a.columns, accumulate, stream);
}

}  // namespace ls_train
