// Layer norm backward for rows of more columns than the kernels of layer_norm_bwd.cuh can hold. Any alignment, element
// by element: correctness for sizes that no recipe uses.
//
// layer_norm_bwd_wide_rows_kernel
//   Grid N, block 512, one row a block. Reads dy and the normalised rows twice (the second time mostly from L2), dsum
//   once, writes dresidual (and dx) once.
// layer_norm_bwd_wide_columns_kernel
//   Tiles of row_kernels.cuh. Reads dy and the normalised rows (and dresidual) once more for the partial column sums.
#include "layer_norm_bwd.cuh"

namespace ls_train {
namespace {

constexpr int kThreads = 512;

template <class T>
__global__ void __launch_bounds__(kThreads) layer_norm_bwd_wide_rows_kernel(const NormBackward<T> a) {
  __shared__ float scratch[2 * kThreads / kWarp];
  const int64_t row = blockIdx.x;
  const bool used = row < used_rows(a.rows, a.n);
  const DropoutKey key = dropout_key(a.dropout);
  const int64_t base = row * a.columns;
  const int thread = static_cast<int>(threadIdx.x);
  const float mean = used ? a.mean[row] : 0.f, rstd = used ? a.rstd[row] : 0.f;
  const auto g = [&](int c) { return to_float(a.dy[base + c]) * to_float(a.weight[c]); };
  const auto xhat = [&](int c) { return (to_float(a.sum[base + c]) - mean) * rstd; };
  float sums[2] = {0.f, 0.f};  // of g and g * xhat
  for (int c = thread; used && c < a.columns; c += kThreads) {
    sums[0] += g(c);
    sums[1] += g(c) * xhat(c);
  }
  group_reduce<Sum>(sums, thread, kThreads, scratch);
  const float mean_g = sums[0] / static_cast<float>(a.columns), mean_gx = sums[1] / static_cast<float>(a.columns);
  for (int c = thread; c < a.columns; c += kThreads) {
    float d[1] = {0.f};
    if (used) {
      d[0] = rstd * (g(c) - mean_g - xhat(c) * mean_gx);
      if (a.dsum != nullptr) d[0] += to_float(a.dsum[base + c]);
    }
    a.dresidual[base + c] = from_float<T>(d[0]);
    if (a.dx != nullptr) {
      drop(d, key, row, c);
      a.dx[base + c] = from_float<T>(d[0]);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kTileThreads) layer_norm_bwd_wide_columns_kernel(const NormBackward<T> a) {
  __shared__ float scratch[kTileThreads];
  const int column = tile_column<1>();
  const int64_t used = used_rows(a.rows, a.n);
  const DropoutKey key = dropout_key(a.dropout);
  float dweight[1][1] = {}, dnorm_bias[1][1] = {}, dbias[1][1] = {};
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.y;
  int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  for (; column < a.columns && row < used; row += step) {
    const int64_t at = row * a.columns + column;
    const float dy = to_float(a.dy[at]);
    dweight[0][0] += dy * (to_float(a.sum[at]) - a.mean[row]) * a.rstd[row];
    dnorm_bias[0][0] += dy;
    if (a.has_dbias) {
      float dx[1] = {to_float(a.dresidual[at])};
      drop(dx, key, row, column);
      dbias[0][0] += dx[0];
    }
  }
  const auto partial = [&](int sum) {
    return a.workspace + static_cast<int64_t>(sum * gridDim.y + blockIdx.y) * a.columns;
  };
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x;
  write_partial(partial(0), dweight, first, a.columns, scratch);
  write_partial(partial(1), dnorm_bias, first, a.columns, scratch);
  if (a.has_dbias) write_partial(partial(2), dbias, first, a.columns, scratch);
}

}  // namespace

template <class T>
cudaError_t layer_norm_bwd_wide(const NormBackward<T>& a, int row_blocks, cudaStream_t stream) {
  layer_norm_bwd_wide_rows_kernel<<<static_cast<unsigned>(a.n), kThreads, 0, stream>>>(a);
  Tiles t = tiles(a.n, a.columns, 1, 1, kMaxRowBlocks);
  t.grid.y = static_cast<unsigned>(row_blocks);
  layer_norm_bwd_wide_columns_kernel<<<t.grid, t.block, 0, stream>>>(a);
  return cudaGetLastError();
}

template cudaError_t layer_norm_bwd_wide(const NormBackward<float>&, int, cudaStream_t);
template cudaError_t layer_norm_bwd_wide(const NormBackward<half>&, int, cudaStream_t);
template cudaError_t layer_norm_bwd_wide(const NormBackward<bfloat16>&, int, cudaStream_t);

}  // namespace ls_train
