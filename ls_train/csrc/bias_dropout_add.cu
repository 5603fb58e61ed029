// y = residual + dropout(x + bias); dx = mask * scale * dy, dbias = column sum of dx.
//
// bias_dropout_add_fwd_kernel
//   Tiles of row_kernels.cuh, a block each, the bias pack in registers; bias and residual may be absent, which makes it
//   dropout alone. Reads x and residual once, writes y once: 3 (without residual: 2) * N * C * sizeof(T) bytes.
// bias_dropout_add_bwd_kernel
//   Rows in packs, at most 264 row blocks that take them in turn, the column sums in registers. Three more rows of a
//   thread are on their way into shared memory. Reads dy once, writes dx once: 2 * N * C * sizeof(T) bytes. kSumOnly:
//   without dropout, where dx is dy itself and not written: N * C * sizeof(T) bytes.
// bias_dropout_add_bwd_plain_kernel
//   The same for rows that are no whole packs, in tiles. The same bytes.
#include "row_kernels.cuh"

namespace ls_train {
namespace {

// Blocks of the backward, with and without dx: about half of those that fit, and as many as fit.
constexpr int64_t kBackwardGrid = 256, kSumGrid = 512;
constexpr int kStages = 4;  // rows of a thread on their way, the one it works on among them

// kAdd: with bias or residual; without them, dropout alone.
template <class T, int kWidth, bool kAdd>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    bias_dropout_add_fwd_kernel(T* __restrict__ y, const T* __restrict__ x, const T* __restrict__ bias,
                                const T* __restrict__ residual, const int32_t* __restrict__ rows, int64_t n,
                                int columns, const Dropout dropout) {
  constexpr int kRows = kAdd ? kTileRows / 2 : kTileRows;
  const int column = tile_column<kWidth>();
  const bool inside = column < columns;
  if (kWidth > 1 && !inside) return;
  const int64_t used = used_rows(rows, n);
  const DropoutKey key = dropout_key(dropout);
  float add[kWidth] = {};
  if (kAdd && bias != nullptr && inside) load_floats(bias + column, add);
  for_tiles<kRows>(used, [&](const Tile<kRows>& tile) {
    Pack<T, kWidth> values[kRows], residuals[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      residuals[r] = zero_pack<T, kWidth>();
      if (inside && tile.is_used(r)) {
        const int64_t at = tile.row(r) * columns + column;
        values[r] = load_global<kWidth>(x + at);
        if (kAdd && residual != nullptr) residuals[r] = load_global<kWidth>(residual + at);
      }
    }
    const TileDropout<kWidth, kRows> dropped(key, tile, column);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!inside || !tile.is_used(r)) break;
      keep_packed(values[r]);
      float v[kWidth];
      unpack(values[r], v);
      if (kAdd) {
        keep_packed(residuals[r]);
        float other[kWidth];
#pragma unroll
        for (int i = 0; i < kWidth; ++i) v[i] += add[i];
        dropped.apply(v, r);
        unpack(residuals[r], other);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) v[i] += other[i];
        values[r] = pack_floats<T>(v);
      } else {
        values[r] = dropped.template apply_and_pack<T>(v, r);
      }
      store(y + tile.row(r) * columns + column, values[r]);
    }
  });
  if (inside) clear_unused<kWidth>(y, used, n, columns, column);
}

template <class T, bool kSumOnly>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    bias_dropout_add_bwd_kernel(T* __restrict__ dx, float* __restrict__ workspace, const T* __restrict__ dy,
                                const int32_t* __restrict__ rows, int64_t n, int columns, const Dropout dropout,
                                const Turns turns) {
  constexpr int kWidth = kPackWidth<T>;
  // Every thread fills and reads its own slots, so there are no barriers.
  __shared__ Pack<T, kWidth> ring[kStages][kTileThreads];
  const int column = tile_column<kWidth>(), thread = linear_thread();
  const bool inside = column < columns;
  const int64_t used = used_rows(rows, n);
  const DropoutKey key = dropout_key(dropout);
  const int64_t first = static_cast<int64_t>(blockIdx.y) * turns.groups + threadIdx.y;
  int64_t at = first * columns + column;
  float dbias[1][kWidth] = {};
  if (!kSumOnly && inside) clear_unused<kWidth>(dx, used, n, columns, column);
  for_ring_turns<kStages>(
      inside ? first : used, used, turns.step,
      [&](int k, int stage) { __pipeline_memcpy_async(&ring[stage][thread], dy + at + k * turns.far, 16); },
      [&](uint32_t plane, uint32_t row, int stage) {
        Masks8 masks = {};
        if (!kSumOnly) masks = masks8(key, plane, row, static_cast<uint32_t>(column) / 8);
        __pipeline_wait_prior(kStages - 1);
        Pack<T, kWidth> pack = ring[stage][thread];
        keep_packed(pack);
        float d[kWidth];
        if constexpr (kSumOnly) {
          unpack(pack, d);
        } else {
          unpack_kept(pack, d, masks, key.scale, column);
          store(dx + at, pack_floats<T>(d));
        }
#pragma unroll
        for (int i = 0; i < kWidth; ++i) dbias[0][i] += d[i];
        at += turns.far;
      });
  write_partial(workspace + static_cast<int64_t>(blockIdx.y) * columns, dbias,
                static_cast<int64_t>(blockIdx.x) * blockDim.x, columns, reinterpret_cast<float*>(ring));
}

template <class T>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    bias_dropout_add_bwd_plain_kernel(T* __restrict__ dx, float* __restrict__ workspace, const T* __restrict__ dy,
                                      const int32_t* __restrict__ rows, int64_t n, int columns, const Dropout dropout) {
  __shared__ float scratch[kTileThreads];
  const int column = tile_column<1>();
  const bool inside = column < columns;
  const int64_t used = used_rows(rows, n);
  const DropoutKey key = dropout_key(dropout);
  float dbias[1][1] = {};
  for_tiles<kTileRows>(used, [&](const Tile<kTileRows>& tile) {
    T values[kTileRows];
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      if (inside && tile.is_used(r)) values[r] = dy[tile.row(r) * columns + column];
    }
    const TileDropout<1, kTileRows> dropped(key, tile, column);
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      if (!inside || !tile.is_used(r)) break;
      float d[1] = {to_float(values[r])};
      dropped.apply(d, r);
      if (dx != nullptr) dx[tile.row(r) * columns + column] = from_float<T>(d[0]);
      dbias[0][0] += d[0];
    }
  });
  if (dx != nullptr && inside) clear_unused<1>(dx, used, n, columns, column);
  write_partial(workspace + static_cast<int64_t>(blockIdx.y) * columns, dbias,
                static_cast<int64_t>(blockIdx.x) * blockDim.x, columns, scratch);
}

cudaError_t launch_fwd(const TensorRef& y, const TensorRef& x, const TensorRef& bias, const TensorRef& residual,
                       const TensorRef& rows, const Dropout& dropout, cudaStream_t stream) {
  const int64_t n = x.sizes[0];
  const int columns = static_cast<int>(x.sizes[1]);
  if (n == 0 || columns == 0) return cudaSuccess;
  return dispatch_type(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto launch = [&](auto kernel, int width) {
      const Tiles t = tiles(n, columns, width, kTileRows, kAnyRowBlocks, kBlockATile);
      kernel<<<t.grid, t.block, 0, stream>>>(y.as<T>(), x.as<T>(), bias.as<T>(), residual.as<T>(), rows.as<int32_t>(),
                                             n, columns, dropout);
      return cudaGetLastError();
    };
    constexpr int kWide = kPackWidth<T>;
    const bool packs = packs_fit<T>(columns, y.data, x.data, bias.data, residual.data);
    if (bias || residual) {
      return packs ? launch(bias_dropout_add_fwd_kernel<T, kWide, true>, kWide)
                   : launch(bias_dropout_add_fwd_kernel<T, 1, true>, 1);
    }
    return packs ? launch(bias_dropout_add_fwd_kernel<T, kWide, false>, kWide)
                 : launch(bias_dropout_add_fwd_kernel<T, 1, false>, 1);
  });
}

}  // namespace

cudaError_t bias_dropout_add_fwd(const TensorRef& y, const TensorRef& x, const TensorRef& bias,
                                 const TensorRef& residual, const TensorRef& seed, const TensorRef& rows, double p,
                                 int64_t offset, cudaStream_t stream) {
  return launch_fwd(y, x, bias, residual, rows, make_dropout(seed, p, offset), stream);
}

cudaError_t bias_dropout_add_bwd(const TensorRef& dx, const TensorRef& dbias, const TensorRef& workspace,
                                 const TensorRef& partial_rows, const TensorRef& dy, const TensorRef& seed,
                                 const TensorRef& rows, double p, int64_t offset, bool accumulate,
                                 cudaStream_t stream) {
  const Dropout dropout = make_dropout(seed, p, offset);
  if (!dbias) {
    const TensorRef none;
    return dx ? launch_fwd(dx, dy, none, none, rows, dropout, stream) : cudaSuccess;
  }
  const int64_t n = dy.sizes[0];
  const int columns = static_cast<int>(dy.sizes[1]);
  int row_blocks = 0;
  if (n > 0 && columns > 0) {
    const cudaError_t error = dispatch_type(dy.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      if (masks_fit(dropout) && packs_fit<T>(columns, dx.data, dy.data, workspace.data)) {
        const Tiles t = tiles(n, columns, kPackWidth<T>, 1, kMaxRowBlocks, dx ? kBackwardGrid : kSumGrid);
        row_blocks = static_cast<int>(t.grid.y);
        const auto kernel = dx ? bias_dropout_add_bwd_kernel<T, false> : bias_dropout_add_bwd_kernel<T, true>;
        kernel<<<t.grid, t.block, 0, stream>>>(dx.as<T>(), workspace.as<float>(), dy.as<T>(), rows.as<int32_t>(), n,
                                               columns, dropout, turns(t, 1, columns));
      } else {
        const Tiles t = tiles(n, columns, 1, kTileRows, kMaxRowBlocks);
        row_blocks = static_cast<int>(t.grid.y);
        bias_dropout_add_bwd_plain_kernel<T><<<t.grid, t.block, 0, stream>>>(
            dx.as<T>(), workspace.as<float>(), dy.as<T>(), rows.as<int32_t>(), n, columns, dropout);
      }
      return cudaGetLastError();
    });
    if (error != cudaSuccess) return error;
  }
  return finish_column_sums({{dbias.data}, 1}, dbias.dtype, workspace.as<float>(), row_blocks, columns, accumulate,
                            partial_rows, stream);
}

}  // namespace ls_train
