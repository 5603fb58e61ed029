// y = dropout(activation(x + bias)) and its backward.
//
// bias_activation_dropout_fwd_kernel
//   Tiles of row_kernels.cuh, for relu a block each. Reads x once, writes y once: 2 * N * C * sizeof(T) bytes.
// bias_activation_dropout_bwd_kernel
//   Tiles with at most 264 row blocks, the column sums in registers. Reads dy and saved once, writes dx once: 3 * N * C
//   * sizeof(T) bytes.
// bias_activation_dropout_bwd_relu_kernel
//   The same sums in the same order for relu in packs, where memory alone sets the pace: later rows are on their way
//   into shared memory, four of each tensor a thread. The same bytes.
#include <cuda_pipeline.h>

#include "activations.cuh"
#include "row_kernels.cuh"

namespace ls_train {
namespace {

template <class T, int kWidth, Activation kActivation>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    bias_activation_dropout_fwd_kernel(T* __restrict__ y, const T* __restrict__ x, const T* __restrict__ bias,
                                       const int32_t* __restrict__ rows, int64_t n, int columns,
                                       const Dropout dropout) {
  constexpr bool kRelu = kActivation == Activation::kRelu;
  const int column = tile_column<kWidth>();
  const bool inside = column < columns;
  if (kWidth > 1 && !inside) return;
  const int64_t used = used_rows(rows, n);
  const DropoutKey key = dropout_key(dropout);
  float add[kWidth] = {};
  if (bias != nullptr && inside) load_floats(bias + column, add);
  for_tiles<kTileRows>(used, [&](const Tile<kTileRows>& tile) {
    Pack<T, kWidth> values[kTileRows];
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      if (inside && tile.is_used(r)) values[r] = load_streaming<kWidth>(x + tile.row(r) * columns + column);
    }
    const TileDropout<kWidth, kTileRows> dropped(key, tile, column);
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      if (!inside || !tile.is_used(r)) break;
      keep_packed(values[r]);
      float v[kWidth];
      unpack(values[r], v);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) v[i] = kRelu ? v[i] + add[i] : activate<T>(v[i] + add[i], kActivation);
      store(y + tile.row(r) * columns + column, dropped.template apply_and_pack<T, kRelu>(v, r));
    }
  });
  if (inside) clear_unused<kWidth>(y, used, n, columns, column);
}

// Sets the gradients whose element of `values` is not above zero to zero.
template <class T, int kWidth>
__device__ __forceinline__ void clear_where_not_positive(Pack<T, kWidth>& grads, const Pack<T, kWidth>& values) {
  if constexpr (kWidth == 8) {
    using Pair = std::conditional_t<std::is_same_v<T, half>, __half2, __nv_bfloat162>;
    uint32_t* words = reinterpret_cast<uint32_t*>(&grads);
    const Pair* pairs = reinterpret_cast<const Pair*>(&values);
    const Pair zero = {from_float<T>(0.f), from_float<T>(0.f)};
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] &= __hgt2_mask(pairs[i], zero);
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (!(to_float(values.v[i]) > 0.f)) grads.v[i] = from_float<T>(0.f);
    }
  }
}

template <class T, int kWidth, Activation kActivation>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    bias_activation_dropout_bwd_kernel(T* __restrict__ dx, float* __restrict__ workspace, const T* __restrict__ dy,
                                       const T* __restrict__ saved, const T* __restrict__ bias,
                                       const int32_t* __restrict__ rows, int64_t n, int columns, const Dropout dropout,
                                       bool has_dbias) {
  __shared__ float scratch[kTileThreads * kWidth];
  constexpr bool kRelu = kActivation == Activation::kRelu;
  constexpr int kRows = kTileRows / 2;  // two input tensors
  const int column = tile_column<kWidth>();
  const bool inside = column < columns;
  const int64_t used = used_rows(rows, n);
  const DropoutKey key = kRelu ? DropoutKey{} : dropout_key(dropout);
  float add[kWidth] = {}, dbias[1][kWidth] = {};
  if (!kRelu && bias != nullptr && inside) load_floats(bias + column, add);
  for_tiles<kRows>(used, [&](const Tile<kRows>& tile) {
    Pack<T, kWidth> grads[kRows], values[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (inside && tile.is_used(r)) {
        const int64_t at = tile.row(r) * columns + column;
        grads[r] = load_streaming<kWidth>(dy + at);
        values[r] = load_streaming<kWidth>(saved + at);
      }
    }
    const auto write = [&](float (&d)[kWidth], int r) {
      store(dx + tile.row(r) * columns + column, pack_floats<T>(d));
#pragma unroll
      for (int i = 0; i < kWidth; ++i) dbias[0][i] += d[i];
    };
    if constexpr (kRelu) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (!inside || !tile.is_used(r)) break;
        keep_packed(grads[r]);
        keep_packed(values[r]);
        // A dropped or negative element is zero in the output: neither mask nor bias is needed again.
        clear_where_not_positive(grads[r], values[r]);
        float d[kWidth];
        unpack(grads[r], d);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) d[i] *= dropout.scale;
        write(d, r);
      }
    } else {
      const TileDropout<kWidth, kRows> dropped(key, tile, column);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (!inside || !tile.is_used(r)) break;
        keep_packed(grads[r]);
        keep_packed(values[r]);
        float d[kWidth], v[kWidth];
        unpack(grads[r], d);
        dropped.apply(d, r);
        unpack(values[r], v);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) d[i] *= activation_gradient<T>(v[i] + add[i], kActivation);
        write(d, r);
      }
    }
  });
  if (inside) clear_unused<kWidth>(dx, used, n, columns, column);
  if (has_dbias) {
    write_partial(workspace + static_cast<int64_t>(blockIdx.y) * columns, dbias,
                  static_cast<int64_t>(blockIdx.x) * blockDim.x, columns, scratch);
  }
}

constexpr int kStages = 4;  // rows of a thread on their way

template <class T>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    bias_activation_dropout_bwd_relu_kernel(T* __restrict__ dx, float* __restrict__ workspace, const T* __restrict__ dy,
                                            const T* __restrict__ saved, const int32_t* __restrict__ rows, int64_t n,
                                            int columns, float scale, bool has_dbias) {
  constexpr int kWidth = kPackWidth<T>;
  // Every thread fills and reads its own slots, so there are no barriers.
  __shared__ Pack<T, kWidth> ring[kStages][2][kTileThreads];
  const int column = tile_column<kWidth>(), thread = linear_thread();
  const bool inside = column < columns;
  const int64_t used = used_rows(rows, n);
  const RowShare share = row_share(used, gridDim.y, blockIdx.y);
  const int step = static_cast<int>(blockDim.y);
  float dbias[1][kWidth] = {};
  const auto fetch = [&](int64_t row, int stage) {
    if (inside && row < share.end) {
      __pipeline_memcpy_async(&ring[stage][0][thread], dy + row * columns + column, 16);
      __pipeline_memcpy_async(&ring[stage][1][thread], saved + row * columns + column, 16);
    }
    __pipeline_commit();
  };
  int64_t row = share.first + threadIdx.y;
#pragma unroll
  for (int k = 0; k < kStages - 1; ++k) fetch(row + k * step, k);
  for (int stage = 0; row < share.end; row += step, stage = (stage + 1) % kStages) {
    fetch(row + (kStages - 1) * step, (stage + kStages - 1) % kStages);
    __pipeline_wait_prior(kStages - 1);
    if (!inside) continue;
    Pack<T, kWidth> grads = ring[stage][0][thread];
    clear_where_not_positive(grads, ring[stage][1][thread]);
    float d[kWidth];
    unpack(grads, d);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) d[i] *= scale;
    store(dx + row * columns + column, pack_floats<T>(d));
#pragma unroll
    for (int i = 0; i < kWidth; ++i) dbias[0][i] += d[i];
  }
  if (inside) clear_unused<kWidth>(dx, used, n, columns, column);
  if (has_dbias) {
    write_partial(workspace + static_cast<int64_t>(blockIdx.y) * columns, dbias,
                  static_cast<int64_t>(blockIdx.x) * blockDim.x, columns, reinterpret_cast<float*>(ring));
  }
}

// Calls body(constant) with the activation as an integral constant.
template <class Body>
cudaError_t dispatch_activation(Activation activation, Body&& body) {
  switch (activation) {
    case Activation::kRelu:
      return body(std::integral_constant<Activation, Activation::kRelu>());
    case Activation::kGelu:
      return body(std::integral_constant<Activation, Activation::kGelu>());
    case Activation::kGeluTanh:
      return body(std::integral_constant<Activation, Activation::kGeluTanh>());
    case Activation::kSwish:
      return body(std::integral_constant<Activation, Activation::kSwish>());
  }
  return cudaErrorInvalidValue;
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
    return dispatch_activation(activation, [&](auto kind) {
      constexpr Activation kKind = decltype(kind)::value;
      const auto launch = [&](auto kernel, int width) {
        // relu is held up by memory alone and is faster without the walk over tiles, the others with it.
        const Tiles t = tiles(n, columns, width, kTileRows, kAnyRowBlocks,
                              kKind == Activation::kRelu ? kBlockATile : kCardfulBlocks);
        kernel<<<t.grid, t.block, 0, stream>>>(y.as<T>(), x.as<T>(), bias.as<T>(), rows.as<int32_t>(), n, columns,
                                               make_dropout(seed, p, offset));
        return cudaGetLastError();
      };
      return packs_fit<T>(columns, y.data, x.data, bias.data)
                 ? launch(bias_activation_dropout_fwd_kernel<T, kPackWidth<T>, kKind>, kPackWidth<T>)
                 : launch(bias_activation_dropout_fwd_kernel<T, 1, kKind>, 1);
    });
  });
}

cudaError_t bias_activation_dropout_bwd(const TensorRef& dx, const TensorRef& dbias, const TensorRef& workspace,
                                        const TensorRef& partial_rows, const TensorRef& dy, const TensorRef& saved,
                                        const TensorRef& bias, const TensorRef& seed, const TensorRef& rows, double p,
                                        int64_t offset, Activation activation, bool accumulate, cudaStream_t stream) {
  const int64_t n = dy.sizes[0];
  const int columns = static_cast<int>(dy.sizes[1]);
  int row_blocks = 0;
  if (n > 0 && columns > 0) {
    const cudaError_t error = dispatch_type(dy.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      return dispatch_activation(activation, [&](auto kind) {
        constexpr Activation kKind = decltype(kind)::value;
        const bool packs = packs_fit<T>(columns, dx.data, dy.data, saved.data, bias.data, workspace.data);
        const Tiles t = tiles(n, columns, packs ? kPackWidth<T> : 1, kTileRows / 2, kMaxRowBlocks);
        const Dropout dropout = make_dropout(seed, p, offset);
        row_blocks = static_cast<int>(t.grid.y);
        const auto launch = [&](auto kernel) {
          kernel<<<t.grid, t.block, 0, stream>>>(dx.as<T>(), workspace.as<float>(), dy.as<T>(), saved.as<T>(),
                                                 bias.as<T>(), rows.as<int32_t>(), n, columns, dropout,
                                                 static_cast<bool>(dbias));
        };
        if (!packs) {
          launch(bias_activation_dropout_bwd_kernel<T, 1, kKind>);
        } else if constexpr (kKind == Activation::kRelu) {
          bias_activation_dropout_bwd_relu_kernel<<<t.grid, t.block, 0, stream>>>(
              dx.as<T>(), workspace.as<float>(), dy.as<const T>(), saved.as<const T>(), rows.as<const int32_t>(), n,
              columns, dropout.scale, static_cast<bool>(dbias));
        } else {
          launch(bias_activation_dropout_bwd_kernel<T, kPackWidth<T>, kKind>);
        }
        return cudaGetLastError();
      });
    });
    if (error != cudaSuccess) return error;
  }
  if (!dbias) return cudaSuccess;
  return finish_column_sums({{dbias.data}, 1}, dbias.dtype, workspace.as<float>(), row_blocks, columns, accumulate,
                            partial_rows, stream);
}

}  // namespace ls_train
