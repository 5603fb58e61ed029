// y = dropout(activation(x + bias)) and its backward. Rows in packs have a kernel an activation.
//
// bias_activation_dropout_fwd_kernel
//   Rows in packs, in tiles that blocks take in turn, for relu a block each. Reads x once, writes y once: 2 * N * C *
//   sizeof(T) bytes.
// bias_activation_dropout_bwd_kernel
//   Rows in packs, at most 264 row blocks that take them in turn, the column sums in registers. Later rows are on their
//   way into shared memory, kStages of each tensor a thread. Reads dy and saved once, writes dx once: 3 * N * C *
//   sizeof(T) bytes.
// bias_activation_dropout_fwd_plain_kernel, bias_activation_dropout_bwd_plain_kernel
//   The same for other rows. The same bytes.
#include "bias_activation_dropout_plain.cuh"

namespace ls_train {
namespace {

// Kind of a kernel.
template <Activation kActivation>
struct Fixed {
  __host__ __device__ constexpr operator Activation() const { return kActivation; }
};
template <class Kind>
constexpr bool kIsRelu = std::is_same_v<Kind, Fixed<Activation::kRelu>>;
// Whether dropout's factor is in the coefficients of Gelu.
template <class T, class Kind>
constexpr bool kIsFolded = sizeof(T) == 2 && std::is_same_v<Kind, Fixed<Activation::kGelu>>;

// Rows of a thread's tile in the forward, and blocks that a multiprocessor holds: as registers allow.
template <class Kind>
constexpr int kForwardRows = kIsRelu<Kind> ? 4 : 2;
template <class T, class Kind>
constexpr int kForwardBlocks = kIsRelu<Kind> ? 4 : (sizeof(T) == 4 ? 3 : 4);
template <class Kind>
constexpr int kBackwardBlocks = kIsRelu<Kind> ? 4 : 3;
// Threads of a block of the forward.
template <class Kind>
constexpr int kForwardThreads = kIsRelu<Kind> ? kTileThreads : 128;
// Blocks of the forward. relu's is held up by memory alone and faster without the walk over tiles.
template <class Kind>
constexpr int64_t kForwardGrid = kIsRelu<Kind> ? kBlockATile : 1056;
// Blocks of the backward: about as many as fit at a time.
template <class Kind>
constexpr int64_t kBackwardGrid = kIsRelu<Kind> ? 512 : 256;

template <class T, class Kind>
__global__ void __launch_bounds__(kForwardThreads<Kind>,
                                  tile_blocks(kForwardBlocks<T, Kind>) * (kTileThreads / kForwardThreads<Kind>))
    bias_activation_dropout_fwd_kernel(T* __restrict__ y, const T* __restrict__ x, const T* __restrict__ bias,
                                       const int32_t* __restrict__ rows, int64_t n, int columns, const Dropout dropout,
                                       const Gelu gelu, const Turns turns, Kind) {
  constexpr int kWidth = kPackWidth<T>, kRows = kForwardRows<Kind>;
  constexpr bool kScaled = kIsFolded<T, Kind>;
  const int column = tile_column<kWidth>();
  if (column >= columns) return;
  const int64_t used = used_rows(rows, n);
  clear_unused<kWidth>(y, used, n, columns, column);
  const DropoutKey key = dropout_key(dropout);
  float add[kWidth] = {};
  if (bias != nullptr) load_floats(bias + column, add);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) add[i] *= kScaled ? key.scale : 1.f;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * (kRows * turns.groups) + threadIdx.y;
  const T* from = x + first * columns + column;
  T* to = y + first * columns + column;
  for_turns(first, used, turns.step, [&](uint32_t plane, uint32_t row, uint32_t left) {
    Pack<T, kWidth> values[kRows];
    Masks8 masks[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r == 0 || r * turns.groups <= left) values[r] = load_global<kWidth>(from);
      advance(from, r + 1 < kRows ? turns.near : turns.far);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      masks[r] = masks8(key, plane, row + r * turns.groups, static_cast<uint32_t>(column) / 8);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      keep_packed(values[r]);
      float v[kWidth];
      unpack(values[r], v);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        v[i] = fmaf(v[i], kScaled ? key.scale : 1.f, add[i]);
        if (!kIsRelu<Kind>) v[i] = activate<T>(v[i], Kind(), gelu);
      }
      const auto pack = drop_and_pack<T, kIsRelu<Kind>>(v, masks[r], kScaled ? 1.f : key.scale, column);
      if (r == 0 || r * turns.groups <= left) store_global(to, pack);
      advance(to, r + 1 < kRows ? turns.near : turns.far);
    }
  });
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
                                                const DropoutKey& key, const Masks8& masks, int column,
                                                const Gelu& gelu) {
  constexpr int kWidth = kPackWidth<T>;
  if constexpr (kIsRelu<Kind>) {
    clear_where_not_positive(grads, values);
    unpack(grads, d);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) d[i] *= key.scale;
  } else {
    unpack_kept(grads, d, masks, kIsFolded<T, Kind> ? 1.f : key.scale, column);
    float v[kWidth];
    unpack(values, v);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      d[i] *= activation_gradient<T>(fmaf(v[i], gradient_scale<T>(Kind()), add[i]), Kind(), gelu);
    }
  }
}

template <class T, class Kind>
__global__ void __launch_bounds__(kTileThreads, kBackwardBlocks<Kind>)
    bias_activation_dropout_bwd_kernel(T* __restrict__ dx, float* __restrict__ workspace, const T* __restrict__ dy,
                                       const T* __restrict__ saved, const T* __restrict__ bias,
                                       const int32_t* __restrict__ rows, int64_t n, int columns, const Dropout dropout,
                                       bool has_dbias, const Gelu gelu, const Turns turns, Kind) {
  constexpr int kWidth = kPackWidth<T>;
  constexpr int kStages = kIsRelu<Kind> ? 4 : 3;  // rows of a thread on their way, the one it works on among them
  // Every thread fills and reads its own slots, so there are no barriers.
  __shared__ Pack<T, kWidth> ring[kStages][2][kTileThreads];
  const int column = tile_column<kWidth>(), thread = linear_thread();
  const bool inside = column < columns;
  const int64_t used = used_rows(rows, n);
  if (inside) clear_unused<kWidth>(dx, used, n, columns, column);
  const DropoutKey key = dropout_key(dropout);
  float add[kWidth] = {}, dbias[1][kWidth] = {};
  if (!kIsRelu<Kind> && bias != nullptr && inside) {
    load_floats(bias + column, add);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) add[i] *= gradient_scale<T>(Kind());
  }
  const int64_t first = static_cast<int64_t>(blockIdx.y) * turns.groups + threadIdx.y;
  int64_t at = first * columns + column;
  for_ring_turns<kStages>(
      inside ? first : used, used, turns.step,
      [&](int k, int stage) {
        __pipeline_memcpy_async(&ring[stage][0][thread], dy + at + k * turns.far, 16);
        __pipeline_memcpy_async(&ring[stage][1][thread], saved + at + k * turns.far, 16);
      },
      [&](uint32_t plane, uint32_t row, int stage) {
        Masks8 masks = {};
        if (!kIsRelu<Kind>) masks = masks8(key, plane, row, static_cast<uint32_t>(column) / 8);
        __pipeline_wait_prior(kStages - 1);
        Pack<T, kWidth> grads = ring[stage][0][thread], values = ring[stage][1][thread];
        keep_packed(grads);  // or each word would be loaded where it is needed
        keep_packed(values);
        float d[kWidth];
        input_gradients<T, Kind>(d, grads, values, add, key, masks, column, gelu);
        store(dx + at, pack_floats<T>(d));
#pragma unroll
        for (int i = 0; i < kWidth; ++i) dbias[0][i] += d[i];
        at += turns.far;
      });
  if (has_dbias) {
    write_partial(workspace + static_cast<int64_t>(blockIdx.y) * columns, dbias,
                  static_cast<int64_t>(blockIdx.x) * blockDim.x, columns, reinterpret_cast<float*>(ring));
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
    if (!masks_fit(dropout) || !packs_fit<T>(columns, y.data, x.data, bias.data)) {
      const Tiles t = tiles(n, columns, 1, kTileRows, kAnyRowBlocks);
      bias_activation_dropout_fwd_plain_kernel<T><<<t.grid, t.block, 0, stream>>>(
          y.as<T>(), x.as<T>(), bias.as<T>(), rows.as<int32_t>(), n, columns, dropout, Gelu(1.f), activation);
      return cudaGetLastError();
    }
    return dispatch_activation(activation, [&](auto kind) {
      using Kind = decltype(kind);
      constexpr int kRows = kForwardRows<Kind>;
      const Tiles t = tiles(n, columns, kPackWidth<T>, kRows, kAnyRowBlocks, kForwardGrid<Kind>, kForwardThreads<Kind>);
      bias_activation_dropout_fwd_kernel<T><<<t.grid, t.block, 0, stream>>>(
          y.as<T>(), x.as<T>(), bias.as<T>(), rows.as<int32_t>(), n, columns, dropout,
          Gelu(kIsFolded<T, Kind> ? dropout.scale : 1.f), turns(t, kRows, columns), kind);
      return cudaGetLastError();
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
      if (!masks_fit(dropout) || !packs_fit<T>(columns, dx.data, dy.data, saved.data, bias.data, workspace.data)) {
        const Tiles t = tiles(n, columns, 1, kTileRows / 2, kMaxRowBlocks);
        row_blocks = static_cast<int>(t.grid.y);
        bias_activation_dropout_bwd_plain_kernel<T><<<t.grid, t.block, 0, stream>>>(
            dx.as<T>(), workspace.as<float>(), dy.as<T>(), saved.as<T>(), bias.as<T>(), rows.as<int32_t>(), n, columns,
            dropout, static_cast<bool>(dbias), Gelu(1.f), activation);
        return cudaGetLastError();
      }
      return dispatch_activation(activation, [&](auto kind) {
        using Kind = decltype(kind);
        const Tiles t = tiles(n, columns, kPackWidth<T>, 1, kMaxRowBlocks, kBackwardGrid<Kind>);
        row_blocks = static_cast<int>(t.grid.y);
        bias_activation_dropout_bwd_kernel<T><<<t.grid, t.block, 0, stream>>>(
            dx.as<T>(), workspace.as<float>(), dy.as<T>(), saved.as<T>(), bias.as<T>(), rows.as<int32_t>(), n, columns,
            dropout, static_cast<bool>(dbias), Gelu(kIsFolded<T, Kind> ? dropout.scale : 1.f), turns(t, 1, columns),
            kind);
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
