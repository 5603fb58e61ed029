// y = residual + dropout(x + bias) with any of residual and bias absent: bias_dropout_add_fwd, its dx, and dropout.
//
// bias_dropout_add_fwd_kernel: tiles of row_kernels.cuh, the bias pack in registers. Reads x and residual once, writes
// y
//   once: 3 (without residual: 2) * N * C * sizeof(T) bytes.
#pragma once

#include "row_kernels.cuh"

namespace ls_train {

template <class T, int kWidth>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    bias_dropout_add_fwd_kernel(T* __restrict__ y, const T* __restrict__ x, const T* __restrict__ bias,
                                const T* __restrict__ residual, const int32_t* __restrict__ rows, int64_t n,
                                int columns, const Dropout dropout) {
  const TileWalk walk = tile_walk<kWidth>();
  if (walk.column >= columns) return;
  const int64_t used = used_rows(rows, n);
  const DropoutKey key = dropout_key(dropout);
  float add[kWidth] = {};
  if (bias != nullptr) load_floats(bias + walk.column, add);
  for (int64_t first = walk.first; first < n; first += walk.step * kTileRows) {
    Pack<T, kWidth> values[kTileRows], residuals[kTileRows];
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      const int64_t row = first + r * walk.step;
      residuals[r] = zero_pack<T, kWidth>();
      if (row < used) {
        values[r] = load_streaming<kWidth>(x + row * columns + walk.column);
        if (residual != nullptr) residuals[r] = load_streaming<kWidth>(residual + row * columns + walk.column);
      }
    }
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      const int64_t row = first + r * walk.step;
      if (row >= n) break;
      keep_packed(values[r]);
      keep_packed(residuals[r]);
      float v[kWidth] = {};
      if (row < used) {
        unpack(values[r], v);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) v[i] += add[i];
        drop(v, key, row, walk.column);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) v[i] += to_float(residuals[r].v[i]);
      }
      store(y + row * columns + walk.column, pack_floats<T>(v));
    }
  }
}

inline cudaError_t launch_bias_dropout_add_fwd(const TensorRef& y, const TensorRef& x, const TensorRef& bias,
                                               const TensorRef& residual, const TensorRef& rows, const Dropout& dropout,
                                               cudaStream_t stream) {
  const int64_t n = x.sizes[0];
  const int columns = static_cast<int>(x.sizes[1]);
  if (n == 0 || columns == 0) return cudaSuccess;
  return dispatch_type(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto launch = [&](auto kernel, int width) {
      const Tiles t = tiles(n, columns, width, kAnyRowBlocks);
      kernel<<<t.grid, t.block, 0, stream>>>(y.as<T>(), x.as<T>(), bias.as<T>(), residual.as<T>(), rows.as<int32_t>(),
                                             n, columns, dropout);
      return cudaGetLastError();
    };
    return packs_fit<T>(columns, y.data, x.data, bias.data, residual.data)
               ? launch(bias_dropout_add_fwd_kernel<T, kPackWidth<T>>, kPackWidth<T>)
               : launch(bias_dropout_add_fwd_kernel<T, 1>, 1);
  });
}

}  // namespace ls_train
