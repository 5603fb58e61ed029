// y = dropout(activation(x + bias)) and its backward.
//
// bias_activation_dropout_fwd_kernel
//   Tiles of row_kernels.cuh. Reads x once, writes y once: 2 * N * C * sizeof(T) bytes.
// bias_activation_dropout_bwd_kernel
//   Tiles with at most 264 row blocks, the column sums in registers. Reads dy and saved once, writes dx once: 3 * N * C
//   * sizeof(T) bytes.
#include "activations.cuh"
#include "row_kernels.cuh"

namespace ls_train {
namespace {

// kRelu: without the code of the other activations, which costs relu a sixth of its time.
template <class T, int kWidth, bool kRelu>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    bias_activation_dropout_fwd_kernel(T* __restrict__ y, const T* __restrict__ x, const T* __restrict__ bias,
                                       const int32_t* __restrict__ rows, int64_t n, int columns, const Dropout dropout,
                                       Activation activation) {
  const TileWalk walk = tile_walk<kWidth>();
  const bool inside = walk.column < columns;
  const int64_t used = inside ? used_rows(rows, n) : 0;
  const DropoutKey key = dropout_key(dropout);
  float add[kWidth] = {};
  if (bias != nullptr && inside) load_floats(bias + walk.column, add);
  for (int64_t first = walk.first; first < n; first += walk.step * kTileRows) {
    Pack<T, kWidth> values[kTileRows];
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      const int64_t row = first + r * walk.step;
      if (row < used) values[r] = load_streaming<kWidth>(x + row * columns + walk.column);
    }
    const TileDropout<kWidth, kTileRows> dropped(key, walk, first);
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      const int64_t row = first + r * walk.step;
      if (row >= n || !inside) break;
      keep_packed(values[r]);
      float v[kWidth] = {};
      if (row < used) {
        unpack(values[r], v);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) v[i] = activate<T>(v[i] + add[i], kRelu ? Activation::kRelu : activation);
        dropped.apply(v, r, row, walk.column);
      }
      store(y + row * columns + walk.column, pack_floats<T>(v));
    }
  }
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    bias_activation_dropout_bwd_kernel(T* __restrict__ dx, float* __restrict__ workspace, const T* __restrict__ dy,
                                       const T* __restrict__ saved, const T* __restrict__ bias,
                                       const int32_t* __restrict__ rows, int64_t n, int columns, const Dropout dropout,
                                       Activation activation, bool has_dbias) {
  __shared__ float scratch[kTileThreads * kWidth];
  constexpr int kRows = kTileRows / 2;  // two input tensors
  const TileWalk walk = tile_walk<kWidth>();
  const bool inside = walk.column < columns;
  const int64_t used = inside ? used_rows(rows, n) : 0;
  const bool relu = activation == Activation::kRelu;
  const DropoutKey key = relu ? DropoutKey{} : dropout_key(dropout);
  float add[kWidth] = {}, dbias[1][kWidth] = {};
  if (bias != nullptr && inside) load_floats(bias + walk.column, add);
  for (int64_t first = walk.first; first < n; first += walk.step * kRows) {
    Pack<T, kWidth> grads[kRows], values[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = first + r * walk.step;
      grads[r] = values[r] = zero_pack<T, kWidth>();
      if (row < used) {
        grads[r] = load_streaming<kWidth>(dy + row * columns + walk.column);
        values[r] = load_streaming<kWidth>(saved + row * columns + walk.column);
      }
    }
    const TileDropout<kWidth, kRows> dropped(key, walk, first);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = first + r * walk.step;
      if (row >= n || !inside) break;
      keep_packed(grads[r]);
      keep_packed(values[r]);
      float d[kWidth], v[kWidth];
      unpack(grads[r], d);
      unpack(values[r], v);
      if (relu) {
        // A dropped or negative element is zero in the output: neither mask nor bias is needed again.
#pragma unroll
        for (int i = 0; i < kWidth; ++i) d[i] = v[i] > 0.f ? d[i] * dropout.scale : 0.f;
      } else {
        dropped.apply(d, r, row, walk.column);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) d[i] *= activation_gradient<T>(v[i] + add[i], activation);
      }
      store(dx + row * columns + walk.column, pack_floats<T>(d));
#pragma unroll
      for (int i = 0; i < kWidth; ++i) dbias[0][i] += d[i];
    }
  }
  if (has_dbias) {
    write_partial(workspace + static_cast<int64_t>(blockIdx.y) * columns, dbias,
                  static_cast<int64_t>(blockIdx.x) * blockDim.x, columns, scratch);
  }
}

}  // namespace

cudaError_t bias_activation_dropout_fwd(const TensorRef& y, const TensorRef& x, const TensorRef& bias,
                                        const TensorRef& seed, const TensorRef& rows, double p, int64_t offset,
                                        Activation activation, cudaStream_t stream) {
  const int64_t n = x.sizes[0];
  const int columns = static_cast<int>(x.sizes[1]);
  if (n == 0 || columns == 0) return cudaSuccess;
  return dispatch_type(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto launch = [&](auto kernel, int width) {
      const Tiles t = tiles(n, columns, width, kAnyRowBlocks);
      kernel<<<t.grid, t.block, 0, stream>>>(y.as<T>(), x.as<T>(), bias.as<T>(), rows.as<int32_t>(), n, columns,
                                             make_dropout(seed, p, offset), activation);
      return cudaGetLastError();
    };
    constexpr int kWide = kPackWidth<T>;
    if (!packs_fit<T>(columns, y.data, x.data, bias.data)) {
      return launch(bias_activation_dropout_fwd_kernel<T, 1, false>, 1);
    }
    return activation == Activation::kRelu ? launch(bias_activation_dropout_fwd_kernel<T, kWide, true>, kWide)
                                           : launch(bias_activation_dropout_fwd_kernel<T, kWide, false>, kWide);
  });
}

cudaError_t bias_activation_dropout_bwd(const TensorRef& dx, const TensorRef& dbias, const TensorRef& workspace,
                                        const TensorRef& dy, const TensorRef& saved, const TensorRef& bias,
                                        const TensorRef& seed, const TensorRef& rows, double p, int64_t offset,
                                        Activation activation, bool accumulate, cudaStream_t stream) {
  const int64_t n = dy.sizes[0];
  const int columns = static_cast<int>(dy.sizes[1]);
  int row_blocks = 0;
  if (n > 0 && columns > 0) {
    const cudaError_t error = dispatch_type(dy.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      const auto launch = [&](auto kernel, int width) {
        const Tiles t = tiles(n, columns, width, kMaxRowBlocks);
        row_blocks = static_cast<int>(t.grid.y);
        kernel<<<t.grid, t.block, 0, stream>>>(dx.as<T>(), workspace.as<float>(), dy.as<T>(), saved.as<T>(),
                                               bias.as<T>(), rows.as<int32_t>(), n, columns,
                                               make_dropout(seed, p, offset), activation, static_cast<bool>(dbias));
        return cudaGetLastError();
      };
      return packs_fit<T>(columns, dx.data, dy.data, saved.data, bias.data)
                 ? launch(bias_activation_dropout_bwd_kernel<T, kPackWidth<T>>, kPackWidth<T>)
                 : launch(bias_activation_dropout_bwd_kernel<T, 1>, 1);
    });
    if (error != cudaSuccess) return error;
  }
  if (!dbias) return cudaSuccess;
  return finish_column_sums({{dbias.data}, 1}, dbias.dtype, workspace.as<float>(), row_blocks, columns, accumulate,
                            stream);
}

}  // namespace ls_train
