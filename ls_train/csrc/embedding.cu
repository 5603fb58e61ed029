// y = dropout(scale * weight[token] + position_weight[position]) and the gradient of either table.
//
// embedding_fwd_kernel
//   Tiles of row_kernels.cuh. Reads one table row (and a position row, mostly from L2) a token, writes y once: 2 * N *
//   C * sizeof(T) bytes. An id outside its table makes the row NaN.
// embedding_bwd_kernel
//   Grid (ceil(N / 32), ceil(C / block columns)), block (lanes, workers) of 256. A block owns the runs of equal ids
//   that start in its 32 sorted positions; a worker sums a run of up to kShortRun rows by itself in order, the whole
//   block a longer one (every worker its fixed share, the shares added in fixed order). Every table row is written
//   once, without atomics. Reads dy once; writes (with accumulate also reads) the rows of the ids in the batch. Without
//   accumulate the whole table is set to zero before: (N + V) * C * sizeof(T) bytes.
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

template <class T, int kWidth>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks) embedding_fwd_kernel(const EmbeddingForward<T> a) {
  const int column = tile_column<kWidth>();
  if (column >= a.columns) return;
  const int64_t used = used_rows(a.rows, a.n);
  const DropoutKey key = dropout_key(a.dropout);
  // Unused rows are zeroed by the same loop.
  for_tiles<kTileRows>(a.n, [&](const Tile<kTileRows>& tile) {
    int64_t token[kTileRows], position[kTileRows];
    Pack<T, kWidth> values[kTileRows], places[kTileRows];
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      const int64_t row = tile.row(r);
      token[r] = tile.is_used(r) && row < used ? a.tokens[row] : -1;
      position[r] = tile.is_used(r) && row < used && a.position_weight != nullptr ? a.positions[row] : 0;
    }
    bool valid[kTileRows];
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      valid[r] = token[r] >= 0 && token[r] < a.vocabulary && position[r] >= 0 &&
                 (a.position_weight == nullptr || position[r] < a.position_count);
      values[r] = places[r] = zero_pack<T, kWidth>();
      if (valid[r]) {
        values[r] = load<kWidth>(a.weight + token[r] * a.columns + column);
        if (a.position_weight != nullptr) {
          places[r] = load<kWidth>(a.position_weight + position[r] * a.columns + column);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      const int64_t row = tile.row(r);
      if (!tile.is_used(r)) break;
      keep_packed(values[r]);
      keep_packed(places[r]);
      float v[kWidth];
      unpack(values[r], v);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) v[i] = fmaf(a.scale, v[i], to_float(places[r].v[i]));
      drop(v, key, row, column);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) v[i] = valid[r] ? v[i] : row < used ? __int_as_float(0x7fc00000) : 0.f;
      store(a.y + row * a.columns + column, pack_floats<T>(v));
    }
  });
}

constexpr int kBackwardThreads = 256;
constexpr int kBlockPositions = 32;
constexpr int kShortRun = 32;  // at least kBlockPositions: then at most one longer run starts in a block
constexpr int kRunLoads = 4;

template <class T>
struct EmbeddingBackward {
  T* dweight;
  const T* dy;
  const int64_t* order;
  const int64_t* sorted_ids;
  const int32_t* rows;
  int64_t n, vocabulary, padding_idx;
  int columns;
  float scale;
  bool accumulate;
  Dropout dropout;
};

// Sum of mask * scale_keep * dy over the sorted positions first, first + step, ... as long as they hold `id`.
template <int kWidth, class T>
__device__ __forceinline__ void sum_run(const EmbeddingBackward<T>& a, const DropoutKey& key, int64_t used, int64_t id,
                                        int64_t first, int step, int column, float (&sum)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum[i] = 0.f;
  for (int64_t at = first; at < a.n && a.sorted_ids[at] == id; at += static_cast<int64_t>(step) * kRunLoads) {
    int64_t row[kRunLoads];
    Pack<T, kWidth> grads[kRunLoads];
#pragma unroll
    for (int j = 0; j < kRunLoads; ++j) {
      const int64_t next = at + j * step;
      row[j] = next < a.n && a.sorted_ids[next] == id ? a.order[next] : used;
    }
#pragma unroll
    for (int j = 0; j < kRunLoads; ++j) {
      if (row[j] < used) grads[j] = load_streaming<kWidth>(a.dy + row[j] * a.columns + column);
    }
#pragma unroll
    for (int j = 0; j < kRunLoads; ++j) {
      if (row[j] >= used) continue;
      keep_packed(grads[j]);
      float d[kWidth];
      unpack(grads[j], d);
      drop(d, key, row[j], column);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] += d[i];
    }
  }
}

template <int kWidth, class T>
__device__ __forceinline__ void write_row(const EmbeddingBackward<T>& a, int64_t id, int column, float (&sum)[kWidth]) {
  T* out = a.dweight + id * a.columns + column;
  float old[kWidth] = {};
  if (a.accumulate) load_floats(out, old);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum[i] = fmaf(a.scale, sum[i], old[i]);
  store(out, pack_floats<T>(sum));
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kBackwardThreads) embedding_bwd_kernel(const EmbeddingBackward<T> a) {
  __shared__ float scratch[kBackwardThreads * kWidth];
  __shared__ int64_t ids[kBlockPositions + 1];  // of the position before the block's first and of its own
  __shared__ int long_run;                      // position in the block where a long run starts, or -1
  const int lanes = static_cast<int>(blockDim.x), workers = static_cast<int>(blockDim.y);
  const int lane = static_cast<int>(threadIdx.x), worker = static_cast<int>(threadIdx.y);
  const int thread = linear_thread();
  const int64_t block_first = static_cast<int64_t>(blockIdx.x) * kBlockPositions;
  const int64_t used = used_rows(a.rows, a.n);
  const DropoutKey key = dropout_key(a.dropout);
  const int column = static_cast<int>(blockIdx.y * lanes + lane) * kWidth;
  float sum[kWidth];

  if (thread <= kBlockPositions) {
    const int64_t at = block_first - 1 + thread;
    ids[thread] = at >= 0 && at < a.n ? a.sorted_ids[at] : -1;
  }
  if (thread == 0) long_run = -1;
  __syncthreads();
  for (int p = worker; p < kBlockPositions; p += workers) {
    const int64_t id = ids[p + 1], at = block_first + p;
    // Not the start of a run, or a run that gets no gradient; positions beyond the last hold -1.
    if (id == ids[p] || id < 0 || id >= a.vocabulary || id == a.padding_idx) continue;
    if (at + kShortRun < a.n && a.sorted_ids[at + kShortRun] == id) {
      if (lane == 0) long_run = p;
    } else if (column < a.columns) {
      sum_run(a, key, used, id, at, 1, column, sum);
      write_row(a, id, column, sum);
    }
  }
  __syncthreads();
  if (long_run < 0) return;

  const int64_t id = ids[long_run + 1];
  if (column < a.columns) {
    sum_run(a, key, used, id, block_first + long_run + worker, workers, column, sum);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) scratch[(worker * kWidth + i) * lanes + lane] = sum[i];
  }
  __syncthreads();
  if (worker > 0 || column >= a.columns) return;
  for (int other = 1; other < workers; ++other) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum[i] += scratch[(other * kWidth + i) * lanes + lane];
  }
  write_row(a, id, column, sum);
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
      const Tiles t = tiles(a.n, a.columns, width, kTileRows, kAnyRowBlocks);
      kernel<<<t.grid, t.block, 0, stream>>>(a);
      return cudaGetLastError();
    };
    return packs_fit<T>(a.columns, y.data, weight.data, position_weight.data)
               ? launch(embedding_fwd_kernel<T, kPackWidth<T>>, kPackWidth<T>)
               : launch(embedding_fwd_kernel<T, 1>, 1);
  });
}

cudaError_t embedding_bwd(const TensorRef& dweight, const TensorRef& dy, const TensorRef& order,
                          const TensorRef& sorted_ids, const TensorRef& seed, const TensorRef& rows, double scale,
                          double p, int64_t offset, int64_t padding_idx, bool accumulate, cudaStream_t stream) {
  return dispatch_type(dy.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    EmbeddingBackward<T> a;
    a.dweight = dweight.as<T>();
    a.dy = dy.as<T>();
    a.order = order.as<int64_t>();
    a.sorted_ids = sorted_ids.as<int64_t>();
    a.rows = rows.as<int32_t>();
    a.n = dy.sizes[0];
    a.vocabulary = dweight.sizes[0];
    a.padding_idx = padding_idx;
    a.columns = static_cast<int>(dy.sizes[1]);
    a.scale = static_cast<float>(scale);
    a.accumulate = accumulate;
    a.dropout = make_dropout(seed, p, offset);
    if (!accumulate && dweight.numel() > 0) {
      const cudaError_t error = cudaMemsetAsync(a.dweight, 0, dweight.numel() * sizeof(T), stream);
      if (error != cudaSuccess) return error;
    }
    if (a.n == 0 || a.columns == 0) return cudaSuccess;
    const auto launch = [&](auto kernel, int width) {
      const int packs = ceil_div(a.columns, width);
      int lanes = 1;
      while (lanes < kWarp / 2 && lanes < packs) lanes *= 2;
      const dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(a.n, kBlockPositions)), ceil_div(packs, lanes));
      kernel<<<grid, dim3(lanes, kBackwardThreads / lanes), 0, stream>>>(a);
      return cudaGetLastError();
    };
    return packs_fit<T>(a.columns, dweight.data, dy.data)
               ? launch(embedding_bwd_kernel<T, kPackWidth<T>>, kPackWidth<T>)
               : launch(embedding_bwd_kernel<T, 1>, 1);
  });
}

}  // namespace ls_train
