// bias + activation + dropout for rows that are no whole packs, where the loads of single elements set the pace: the
// activation is asked for at run time, rows are laid out in tiles.
#pragma once

#include "activations.cuh"
#include "row_kernels.cuh"

namespace ls_train {

template <class T>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    bias_activation_dropout_fwd_plain_kernel(T* __restrict__ y, const T* __restrict__ x, const T* __restrict__ bias,
                                             const int32_t* __restrict__ rows, int64_t n, int columns,
                                             const Dropout dropout, const Gelu gelu, Activation activation) {
  const int column = tile_column<1>();
  const bool inside = column < columns;
  const int64_t used = used_rows(rows, n);
  const DropoutKey key = dropout_key(dropout);
  const float add = bias != nullptr && inside ? to_float(bias[column]) : 0.f;
  for_tiles<kTileRows>(used, [&](const Tile<kTileRows>& tile) {
    T values[kTileRows];
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      if (inside && tile.is_used(r)) values[r] = x[tile.row(r) * columns + column];
    }
    const TileDropout<1, kTileRows> dropped(key, tile, column);
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      if (!inside || !tile.is_used(r)) break;
      float v[1] = {activate<T>(to_float(values[r]) + add, activation, gelu)};
      dropped.apply(v, r);
      y[tile.row(r) * columns + column] = from_float<T>(v[0]);
    }
  });
  if (inside) clear_unused<1>(y, used, n, columns, column);
}

template <class T>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    bias_activation_dropout_bwd_plain_kernel(T* __restrict__ dx, float* __restrict__ workspace,
                                             const T* __restrict__ dy, const T* __restrict__ saved,
                                             const T* __restrict__ bias, const int32_t* __restrict__ rows, int64_t n,
                                             int columns, const Dropout dropout, bool has_dbias, const Gelu gelu,
                                             Activation activation) {
  __shared__ float scratch[kTileThreads];
  constexpr int kRows = kTileRows / 2;  // two input tensors
  const int column = tile_column<1>();
  const bool inside = column < columns;
  const int64_t used = used_rows(rows, n);
  const DropoutKey key = dropout_key(dropout);
  const float scale = gradient_scale<T>(activation);
  const float add = bias != nullptr && inside ? to_float(bias[column]) * scale : 0.f;
  float dbias[1][1] = {};
  for_tiles<kRows>(used, [&](const Tile<kRows>& tile) {
    T grads[kRows], values[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (inside && tile.is_used(r)) {
        grads[r] = dy[tile.row(r) * columns + column];
        values[r] = saved[tile.row(r) * columns + column];
      }
    }
    const TileDropout<1, kRows> dropped(key, tile, column);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!inside || !tile.is_used(r)) break;
      float d[1] = {to_float(grads[r])};
      dropped.apply(d, r);
      const float v = to_float(values[r]);
      if (activation == Activation::kRelu) {
        d[0] = v > 0.f ? d[0] : 0.f;
      } else {
        d[0] *= activation_gradient<T>(fmaf(v, scale, add), activation, gelu);
      }
      dx[tile.row(r) * columns + column] = from_float<T>(d[0]);
      dbias[0][0] += d[0];
    }
  });
  if (inside) clear_unused<1>(dx, used, n, columns, column);
  if (has_dbias) {
    write_partial(workspace + static_cast<int64_t>(blockIdx.y) * columns, dbias,
                  static_cast<int64_t>(blockIdx.x) * blockDim.x, columns, scratch);
  }
}

}  // namespace ls_train
