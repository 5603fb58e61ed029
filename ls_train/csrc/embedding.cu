// y = dropout(scale * weight[token] + position_weight[position]); the gradient of the tables is in embedding_bwd.cu.
//
// embedding_fwd_kernel
//   A warp a row, for narrow rows several. Reads one table row (and a position row, mostly from L2) a token, writes y
//   once: 2 * N * C * sizeof(T) bytes. An id outside its table makes the row NaN.
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

constexpr int kForwardThreads = 256;
constexpr int kForwardPacks = 4;  // of each table that a thread has under way

template <class T, int kWidth>
__global__ void __launch_bounds__(kForwardThreads, kTileBlocks) embedding_fwd_kernel(const EmbeddingForward<T> a) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= a.n) return;
  // Asked for before it is known whether the row is used.
  const int64_t token = a.tokens[row], position = a.position_weight != nullptr ? a.positions[row] : 0;
  const bool is_used = row < used_rows(a.rows, a.n);
  const DropoutKey key = dropout_key(a.dropout);
  const bool valid = token >= 0 && token < a.vocabulary && position >= 0 &&
                     (a.position_weight == nullptr || position < a.position_count);
  const T* word = a.weight + token * a.columns;
  const T* place = a.position_weight + position * a.columns;
  const int step = static_cast<int>(blockDim.x) * kWidth;
  for (int first = static_cast<int>(threadIdx.x) * kWidth; first < a.columns; first += kForwardPacks * step) {
    Pack<T, kWidth> values[kForwardPacks], places[kForwardPacks];
#pragma unroll
    for (int k = 0; k < kForwardPacks; ++k) {
      const int column = first + k * step;
      values[k] = places[k] = zero_pack<T, kWidth>();
      if (valid && column < a.columns) {
        values[k] = load<kWidth>(word + column);
        if (a.position_weight != nullptr) places[k] = load<kWidth>(place + column);
      }
    }
#pragma unroll
    for (int k = 0; k < kForwardPacks; ++k) {
      const int column = first + k * step;
      if (column >= a.columns) break;
      keep_packed(values[k]);
      keep_packed(places[k]);
      float v[kWidth], p[kWidth];
      unpack(values[k], v);
      unpack(places[k], p);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) v[i] = fmaf(a.scale, v[i], p[i]);
      drop(v, key, row, column);
      if (!valid || !is_used) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) v[i] = is_used ? __int_as_float(0x7fc00000) : 0.f;
      }
      store(a.y + row * a.columns + column, pack_floats<T>(v));
    }
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
    return packs_fit<T>(a.columns, y.data, weight.data, position_weight.data)
               ? launch(embedding_fwd_kernel<T, kPackWidth<T>>, kPackWidth<T>)
               : launch(embedding_fwd_kernel<T, 1>, 1);
  });
}

}  // namespace ls_train
