// y = dropout(scale * weight[token] + position_weight[position]); the gradient of the tables is in embedding_bwd.cu.
//
// Both kernels take a warp a row, for narrow rows several. They read one table row (and a position row, mostly from L2)
// a token and write y once: 2 * N * C * sizeof(T) bytes. An id outside its table makes the row NaN.
//
// embedding_fwd_kernel
//   For aligned rows and dropout that masks8 can decide. What is dropped is decided while rows are on their way and
//   waits for them in one register.
// embedding_fwd_plain_kernel
//   Element by element.
#include "row_kernels.cuh"

namespace ls_train {
namespace {

template <class T>
struct EmbeddingForward {
  T* y;
  const int64_t* tokens;
  const int64_t* positions;
  const T* weight;
  const T* position_weight;  // may be null
  const int32_t* rows;
  int64_t n, vocabulary, position_count;
  int columns;
  float scale;
  Dropout dropout;
};

constexpr int kForwardThreads = 64;  // small blocks, as what a row waits for differs
constexpr int kForwardPacks = 4;     // of a row that a thread has under way
constexpr int kEarlyPlaces = 2;      // of the position's row, which is near, that are asked for before they can be used

struct Ids {                // of a row
  int64_t token, position;  // negative where one of them is not in its table
};

template <class T>
__device__ __forceinline__ Ids ids_of(const EmbeddingForward<T>& a, int64_t row) {
  const Ids ids = {a.tokens[row], a.position_weight != nullptr ? a.positions[row] : 0};
  const bool valid = ids.token >= 0 && ids.token < a.vocabulary && ids.position >= 0 &&
                     (a.position_weight == nullptr || ids.position < a.position_count);
  return valid ? ids : Ids{-1, -1};
}

// What an unused row is (zeros) or one with an id outside its table (NaN).
template <class T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> no_row(bool is_used) {
  Pack<T, kWidth> fill;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) fill.v[i] = from_float<T>(is_used ? __int_as_float(0x7fc00000) : 0.f);
  return fill;
}

template <class T>
__global__ void __launch_bounds__(kForwardThreads, tile_blocks(kTileBlocks) * (kTileThreads / kForwardThreads))
    embedding_fwd_kernel(const EmbeddingForward<T> a) {
  constexpr int kWidth = kPackWidth<T>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= a.n) return;
  const Ids ids = ids_of(a, row);  // asked for before it is known whether the row is used
  const bool is_used = row < used_rows(a.rows, a.n);
  const DropoutKey key = dropout_key(a.dropout);
  const int start = static_cast<int>(threadIdx.x) * kWidth, step = static_cast<int>(blockDim.x) * kWidth;
  T* const y = a.y + row * a.columns;
  if (!is_used || ids.token < 0) {
    for (int column = start; column < a.columns; column += step) store(y + column, no_row<T, kWidth>(is_used));
    return;
  }
  const T* const word = a.weight + ids.token * a.columns;
  const T* const place = a.position_weight + ids.position * a.columns;
#pragma unroll 1
  for (int first = start; first < a.columns; first += kForwardPacks * step) {
    Pack<T, kWidth> values[kForwardPacks], places[kForwardPacks];
    const auto load_place = [&](int k) {
      places[k] = load_if(a.position_weight != nullptr && first + k * step < a.columns, place + first + k * step);
    };
#pragma unroll
    for (int k = 0; k < kForwardPacks; ++k) {
      values[k] = load_if(first + k * step < a.columns, word + first + k * step);
      if (k < kEarlyPlaces) load_place(k);
    }
    uint32_t kept = ~0u;
    if (key.active()) {  // while the rows are on their way
      kept = 0;
#pragma unroll
      for (int k = 0; k < kForwardPacks; ++k) {
        join(kept, k,
             masks8(key, static_cast<uint32_t>(static_cast<uint64_t>(row) >> 32), static_cast<uint32_t>(row),
                    static_cast<uint32_t>(first + k * step) / 8));
      }
    }
#pragma unroll
    for (int k = 0; k < kForwardPacks; ++k) {
      const int column = first + k * step;
      float v[kWidth], p[kWidth];
      unpack(places[k], p);
      if (k + kEarlyPlaces < kForwardPacks) load_place(k + kEarlyPlaces);
      unpack(values[k], v);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) v[i] = fmaf(a.scale, v[i], p[i]);
      if (column < a.columns) store_global(y + column, drop_and_pack<T>(v, split(kept, k), key.scale, column));
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kForwardThreads) embedding_fwd_plain_kernel(const EmbeddingForward<T> a) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= a.n) return;
  const Ids ids = ids_of(a, row);
  const bool is_used = row < used_rows(a.rows, a.n);
  const DropoutKey key = dropout_key(a.dropout);
  T* const y = a.y + row * a.columns;
#pragma unroll 4
  for (int column = static_cast<int>(threadIdx.x); column < a.columns; column += static_cast<int>(blockDim.x)) {
    if (!is_used || ids.token < 0) {
      store(y + column, no_row<T, 1>(is_used));
      continue;
    }
    const float place =
        a.position_weight != nullptr ? to_float(a.position_weight[ids.position * a.columns + column]) : 0.f;
    float v[1] = {fmaf(a.scale, to_float(a.weight[ids.token * a.columns + column]), place)};
    drop(v, key, row, column);
    y[column] = from_float<T>(v[0]);
  }
}

}  // namespace

cudaError_t embedding_fwd(const TensorRef& y, const TensorRef& tokens, const TensorRef& positions,
                          const TensorRef& weight, const TensorRef& position_weight, const TensorRef& seed,
                          const TensorRef& rows, double scale, double p, int64_t offset, cudaStream_t stream) {
  return dispatch_type(weight.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    EmbeddingForward<T> a;
    a.y = y.as<T>();
    a.tokens = tokens.as<int64_t>();
    a.positions = positions.as<int64_t>();
    a.weight = weight.as<T>();
    a.position_weight = position_weight.as<T>();
    a.rows = rows.as<int32_t>();
    a.n = y.sizes[0];
    a.vocabulary = weight.sizes[0];
    a.position_count = position_weight.sizes[0];
    a.columns = static_cast<int>(y.sizes[1]);
    a.scale = static_cast<float>(scale);
    a.dropout = make_dropout(seed, p, offset);
    if (a.n == 0 || a.columns == 0) return cudaSuccess;
    const auto launch = [&](auto kernel, int width) {
      int lanes = 1;
      while (lanes < kWarp && lanes * width < a.columns) lanes *= 2;
      const int groups = kForwardThreads / lanes;
      kernel<<<static_cast<unsigned>(ceil_div<int64_t>(a.n, groups)), dim3(lanes, groups), 0, stream>>>(a);
      return cudaGetLastError();
    };
    return packs_fit<T>(a.columns, y.data, weight.data, position_weight.data) && masks_fit(a.dropout)
               ? launch(embedding_fwd_kernel<T>, kPackWidth<T>)
               : launch(embedding_fwd_plain_kernel<T>, 1);
  });
}

}  // namespace ls_train
