// y = dropout(activation(x + bias)) and its backward. Rows in packs have a kernel an activation; other rows, where the
// loads of single elements set the pace, ask for it at run time.
//
// bias_activation_dropout_fwd_kernel
//   Tiles of row_kernels.cuh, for relu a block each. Reads x once, writes y once: 2 * N * C * sizeof(T) bytes.
// bias_activation_dropout_bwd_kernel
//   Rows in packs, at most 264 row blocks, the column sums in registers. Later rows are on their way into shared
//   memory, kStages of each tensor a thread. Reads dy and saved once, writes dx once: 3 * N * C * sizeof(T) bytes.
// bias_activation_dropout_bwd_plain_kernel
//   The same for rows that are no whole packs, in tiles. The same bytes.
#include <cuda_pipeline.h>

#include "activations.cuh"
#include "row_kernels.cuh"

namespace ls_train {
namespace {

// Kind of a kernel: Fixed or, at run time, an Activation.
template <Activation kActivation>
struct Fixed {
  __host__ __device__ constexpr operator Activation() const { return kActivation; }
};
template <class Kind>
constexpr bool kIsRelu = std::is_same_v<Kind, Fixed<Activation::kRelu>>;
// Whether dropout's factor is in the coefficients of Gelu.
template <class T, class Kind>
constexpr bool kIsFolded = sizeof(T) == 2 && std::is_same_v<Kind, Fixed<Activation::kGelu>>;

template <class T, int kWidth, class Kind>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    bias_activation_dropout_fwd_kernel(T* __restrict__ y, const T* __restrict__ x, const T* __restrict__ bias,
                                       const int32_t* __restrict__ rows, int64_t n, int columns, const Dropout dropout,
                                       const Gelu gelu, Kind activation) {
  constexpr bool kRelu = kIsRelu<Kind>, kFolded = kIsFolded<T, Kind>;
  const int column = tile_column<kWidth>();
  const bool inside = column < columns;
  if (kWidth > 1 && !inside) return;
  const int64_t used = used_rows(rows, n);
  DropoutKey key = dropout_key(dropout);
  const float factor = kFolded ? key.scale : 1.f;
  if (kFolded) key.scale = 1.f;
  float add[kWidth] = {};
  if (bias != nullptr && inside) load_floats(bias + column, add);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) add[i] *= factor;
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
      for (int i = 0; i < kWidth; ++i) {
        v[i] = fmaf(v[i], factor, add[i]);
        if (!kRelu) v[i] = activate<T>(v[i], activation, gelu);
      }
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

// Gradients of one pack of x from those of y. For relu `values` are the output, in which dropped and negative elements
// are zero: neither mask nor bias is needed again.
template <class T, class Kind>
__device__ __forceinline__ void input_gradients(float (&d)[kPackWidth<T>], Pack<T, kPackWidth<T>> grads,
                                                const Pack<T, kPackWidth<T>>& values, const float (&add)[kPackWidth<T>],
                                                const DropoutKey& key, const Keep8& keep, int column,
                                                const Gelu& gelu) {
  constexpr int kWidth = kPackWidth<T>;
  if constexpr (kIsRelu<Kind>) {
    clear_where_not_positive(grads, values);
    unpack(grads, d);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) d[i] *= key.scale;
  } else {
    if constexpr (kWidth == 8) {
      clear_dropped(grads, keep);
      unpack(grads, d);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) d[i] *= kIsFolded<T, Kind> ? 1.f : key.scale;
    } else {
      unpack(grads, d);
      drop(d, keep, key.scale, column);
    }
    float v[kWidth];
    unpack(values, v);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      d[i] *= activation_gradient<T>(fmaf(v[i], gradient_scale<T>(Kind()), add[i]), Kind(), gelu);
    }
  }
}

template <class T, class Kind>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    bias_activation_dropout_bwd_kernel(T* __restrict__ dx, float* __restrict__ workspace, const T* __restrict__ dy,
                                       const T* __restrict__ saved, const T* __restrict__ bias,
                                       const int32_t* __restrict__ rows, int64_t n, int columns, const Dropout dropout,
                                       bool has_dbias, const Gelu gelu, Kind) {
  constexpr int kWidth = kPackWidth<T>;
  constexpr int kStages = kIsRelu<Kind> ? 4 : 3;  // rows of a thread on their way, the one it works on among them
  // Every thread fills and reads its own slots, so there are no barriers.
  __shared__ Pack<T, kWidth> ring[kStages][2][kTileThreads];
  const int column = tile_column<kWidth>(), thread = linear_thread();
  const bool inside = column < columns;
  const int64_t used = used_rows(rows, n);
  const RowShare share = row_share(used, gridDim.y, blockIdx.y);
  const DropoutKey key = dropout_key(dropout);
  const int step = static_cast<int>(blockDim.y);
  float add[kWidth] = {}, dbias[1][kWidth] = {};
  if (!kIsRelu<Kind> && bias != nullptr && inside) {
    load_floats(bias + column, add);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) add[i] *= gradient_scale<T>(Kind());
  }
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
  for (int stage = 0; row < share.end; row += step, stage = stage + 1 == kStages ? 0 : stage + 1) {
    fetch(row + (kStages - 1) * step, stage == 0 ? kStages - 1 : stage - 1);
    const Keep8 keep = key.active() ? keep8(key, row, static_cast<uint32_t>(column) / 8) : keep_all();
    __pipeline_wait_prior(kStages - 1);
    if (!inside) continue;
    float d[kWidth];
    input_gradients<T, Kind>(d, ring[stage][0][thread], ring[stage][1][thread], add, key, keep, column, gelu);
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

// Calls body(Fixed<activation>()).
template <class Body>
cudaError_t dispatch_activation(Activation activation, Body&& body) {
  switch (activation) {
    case Activation::kRelu:
      return body(Fixed<Activation::kRelu>());
    case Activation::kGelu:
      return body(Fixed<Activation::kGelu>());
    case Activation::kGeluTanh:
      return body(Fixed<Activation::kGeluTanh>());
    case Activation::kSwish:
      return body(Fixed<Activation::kSwish>());
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
    const Dropout dropout = make_dropout(seed, p, offset);
    const auto launch = [&](auto kernel, int width, auto kind) {
      // relu is held up by memory alone and is faster without the walk over tiles, the others with it.
      const Tiles t = tiles(n, columns, width, kTileRows, kAnyRowBlocks,
                            activation == Activation::kRelu ? kBlockATile : kCardfulBlocks);
      kernel<<<t.grid, t.block, 0, stream>>>(y.as<T>(), x.as<T>(), bias.as<T>(), rows.as<int32_t>(), n, columns,
                                             dropout, Gelu(kIsFolded<T, decltype(kind)> ? dropout.scale : 1.f), kind);
      return cudaGetLastError();
    };
    if (!packs_fit<T>(columns, y.data, x.data, bias.data)) {
      return launch(bias_activation_dropout_fwd_kernel<T, 1, Activation>, 1, activation);
    }
    return dispatch_activation(activation, [&](auto kind) {
      return launch(bias_activation_dropout_fwd_kernel<T, kPackWidth<T>, decltype(kind)>, kPackWidth<T>, kind);
    });
  });
}

cudaError_t bias_activation_dropout_bwd(const TensorRef& dx, const TensorRef& dbias, const TensorRef& workspace,
                                        const TensorRef& partial_rows, const TensorRef& dy, const TensorRef& saved,
                                        const TensorRef& bias, const TensorRef& seed, const TensorRef& rows, double p,
                                        int64_t offset, Activation activation, bool accumulate, cudaStream_t stream) {
  const int64_t n = dy.sizes[0];
  const int columns = static_cast<int>(dy.sizes[1]);
  Dropout dropout = make_dropout(seed, p, offset);
  if (activation == Activation::kRelu) dropout.threshold = 0;  // the output holds the mask; only the scale is needed
  int row_blocks = 0;
  if (n > 0 && columns > 0) {
    const cudaError_t error = dispatch_type(dy.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      const auto launch = [&](auto kernel, int width, auto kind) {
        const Tiles t = tiles(n, columns, width, kTileRows / 2, kMaxRowBlocks);
        row_blocks = static_cast<int>(t.grid.y);
        kernel<<<t.grid, t.block, 0, stream>>>(
            dx.as<T>(), workspace.as<float>(), dy.as<T>(), saved.as<T>(), bias.as<T>(), rows.as<int32_t>(), n, columns,
            dropout, static_cast<bool>(dbias), Gelu(kIsFolded<T, decltype(kind)> ? dropout.scale : 1.f), kind);
        return cudaGetLastError();
      };
      if (!packs_fit<T>(columns, dx.data, dy.data, saved.data, bias.data, workspace.data)) {
        return launch(bias_activation_dropout_bwd_plain_kernel<T>, 1, activation);
      }
      return dispatch_activation(activation, [&](auto kind) {
        return launch(bias_activation_dropout_bwd_kernel<T, decltype(kind)>, kPackWidth<T>, kind);
      });
    });
    if (error != cudaSuccess) return error;
  }
  if (!dbias) return cudaSuccess;
  return finish_column_sums({{dbias.data}, 1}, dbias.dtype, workspace.as<float>(), row_blocks, columns, accumulate,
                            partial_rows, stream);
}

}  // namespace ls_train
