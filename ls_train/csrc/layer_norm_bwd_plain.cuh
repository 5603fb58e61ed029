// The backward of layer normalisation element by element, for rows that layer_norm_bwd.cuh cannot move in packs, and
// what both get.
//
// layer_norm_bwd_plain_kernel
//   Grid min(264, ceil(N / groups)) and a loop over rows, block (lanes, groups) of 256 or 512: the same traffic element
//   by element, for rows of up to 4096 columns. Wider ones go to layer_norm_bwd_wide.
#pragma once

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
  float per_column;  // 1 / columns, set by the launcher
  bool has_dbias;
  Dropout dropout;
};

// Rows too wide for registers; dtype is T's.
template <class T>
cudaError_t layer_norm_bwd_wide(const NormBackward<T>& a, int row_blocks, cudaStream_t stream);

template <class T, bool kAdd>
__global__ void __launch_bounds__(kMaxLanes) layer_norm_bwd_plain_kernel(const NormBackward<T> a) {
  __shared__ float scratch[kMaxLanes * kPlainElements];
  const int lanes = static_cast<int>(blockDim.x);
  const int64_t used = used_rows(a.rows, a.n);
  const DropoutKey key = kAdd ? dropout_key(a.dropout) : DropoutKey{};
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
      float d[1] = {rstd * (dy[k] * weight[k] - sums[0] * a.per_column - xhat[k] * (sums[1] * a.per_column))};
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

}  // namespace ls_train
