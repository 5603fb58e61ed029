// Attention of long sequences with heads of up to 64 on tensor cores, what its three kernels share.
//
// A warp keeps its own 16 rows as fragments in registers for the whole kernel. The other side passes by in stages of 64
// rows; the next stage arrives while one is in use, and there is one barrier a stage. Only chunks that a mask cuts are
// masked. Blocks have as many threads whatever the length, so that the copies of a stage are unrolled.
#pragma once

#include "attention_tiles.cuh"

namespace ls_train {

constexpr int kStageRows = 64;

template <int kDim>
using RowFragments = uint32_t[kDim / 16][4];

// 16 rows of a tile as left factors.
template <int kDim, class T>
__device__ __forceinline__ void load_fragments(RowFragments<kDim>& a, const T* rows) {
  const int lane = threadIdx.x % kWarp;
  const T* row = rows + lane % 16 * kTileStride<kDim> + lane / 16 * 8;
#pragma unroll
  for (int k = 0; k < kDim; k += 16) load_matrices(a[k / 16], row + k);
}

// c (16 own rows x 32 other rows) = start(t) + own * other^T over the padded head size, where start gives what the t-th
// eight columns begin with, as an accumulator.
template <int kDim, class T, class Start>
__device__ __forceinline__ void dots(float (&c)[kChunkTiles][4], const RowFragments<kDim>& own, const T* other,
                                     Start&& start) {
  constexpr int kStride = kTileStride<kDim>;
  const int lane = threadIdx.x % kWarp;
  const T* row = other + (lane % 8 + lane / 16 * 8) * kStride + lane / 8 % 2 * 8;
#pragma unroll
  for (int k = 0; k < kDim; k += 16) {
#pragma unroll
    for (int t = 0; t < kChunkTiles; t += 2) {
      uint32_t b[4];
      load_matrices(b, row + t * 8 * kStride + k);
      if (k == 0) {
        multiply_add(c[t], own[0], b[0], b[1], start(t), T());
        multiply_add(c[t + 1], own[0], b[2], b[3], start(t + 1), T());
      } else {
        multiply_add(c[t], own[k / 16], b[0], b[1], T());
        multiply_add(c[t + 1], own[k / 16], b[2], b[3], T());
      }
    }
  }
}

// Nothing, as dots' start.
struct FromZero {
  float zero[4] = {};

  __device__ __forceinline__ const float (&operator()(int) const)[4] { return zero; }
};

// c (16 x kDim) += x (16 x 32, as left factors) * 32 rows of a tile.
template <int kDim, class T>
__device__ __forceinline__ void add_products(float (&c)[kDim / 8][4], const uint32_t (&x)[kChunkTiles / 2][4],
                                             const T* rows) {
#pragma unroll
  for (int k = 0; k < kChunkTiles / 2; ++k) {
    add_product(c, x[k], rows + k * 16 * kTileStride<kDim>, kTileStride<kDim>);
  }
}

// Starts the copy of kPadded rows of one head into a tile by a block of kThreads: `count` valid ones from `row` on,
// zeros beyond them.
template <int kDim, int kThreads, int kPadded, class T>
__device__ __forceinline__ void load_block_rows(T* tile, const HeadRows& x, int64_t row, int head, int count, int dim) {
  constexpr int kLanes = kDim / 8;  // threads of a row
  constexpr int kStep = kThreads / kLanes;
  static_assert(kPadded % kStep == 0);
  const int column = static_cast<int>(threadIdx.x) % kLanes * 8;
  const int start = static_cast<int>(threadIdx.x) / kLanes;
  const int end = (column < dim ? count : 0) - start;
  const T* source = x.at<const T>(row + start, head) + column;  // not followed where there is nothing to read
  T* const target = tile + start * kTileStride<kDim> + column;
#pragma unroll
  for (int r = 0; r < kPadded; r += kStep) {
    copy_async<16>(target + r * kTileStride<kDim>, source, r < end);
    source += kStep * x.row_stride;
  }
}

// Two tensors (keys and values, or queries and the output's gradient) whose rows pass by in stages, in two places.
template <class T, int kDim, int kThreads>
struct Stages {
  static constexpr int kTile = kStageRows * kTileStride<kDim>;  // elements
  static constexpr int kBytes = 4 * kTile * static_cast<int>(sizeof(T));

  T* memory;

  __device__ __forceinline__ T* first(int stage) const { return memory + stage % 2 * 2 * kTile; }
  __device__ __forceinline__ T* second(int stage) const { return first(stage) + kTile; }

  // Starts the copy of `count` rows from `row` on, zeros beyond them.
  __device__ __forceinline__ void load(int stage, const HeadRows& x, const HeadRows& y, int64_t row, int head,
                                       int count, int dim) const {
    load_block_rows<kDim, kThreads, kStageRows>(first(stage), x, row, head, count, dim);
    load_block_rows<kDim, kThreads, kStageRows>(second(stage), y, row, head, count, dim);
  }
};

// Makes the copies that this block started visible to it, and says that it is done with the stage before.
__device__ __forceinline__ void wait_stage() {
  commit_copies();
  wait_copies<0>();
  __syncthreads();
}

// What a block that owns queries knows of them and of its warp's.
struct OwnQueries {
  int first, rows;      // of the block
  int warp_row;         // in the block
  int keys, warp_keys;  // seen by any of the block's, of the warp's queries
  int common_keys;      // seen by all of the warp's

  __device__ __forceinline__ OwnQueries(const Attention& a, const Task& task) {
    const Sequence& seq = task.sequence;
    first = task.tile * a.q_rows;
    rows = min(a.q_rows, seq.q_len - first);
    warp_row = static_cast<int>(threadIdx.x) / kWarp * kWarpRows;
    keys = rows > 0 ? seq.key_limit(first + rows - 1) : 0;
    warp_keys = warp_row < rows ? seq.key_limit(min(first + warp_row + kWarpRows, seq.q_len) - 1) : 0;
    common_keys = seq.key_limit(first + warp_row);
  }

  // Position in the sequence of row g + 8 h.
  __device__ __forceinline__ int row(int h) const {
    return first + warp_row + h * 8 + static_cast<int>(threadIdx.x) % kWarp / 4;
  }

  // Scores of the chunk from `key` on that are not seen become -inf.
  __device__ __forceinline__ void mask(float (&s)[kChunkTiles][4], const Sequence& seq, int key) const {
    if (key + kChunk <= common_keys) return;
    const int column = key + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int limit = seq.key_limit(row(h)) - column;
#pragma unroll
      for (int i = 0; i < kChunkTiles * 2; ++i) {
        if (i / 2 * 8 + i % 2 >= limit) s[i / 2][h * 2 + i % 2] = -INFINITY;
      }
    }
  }
};

// A block that owns queries: its work, and the keys and values that pass by.
template <class T, int kDim, int kWarps>
struct QueryBlock {
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kQueries = kWarps * kWarpRows;

  const Attention& a;
  const Task task;
  const OwnQueries own;
  const Stages<T, kDim, kThreads> stages;

  __device__ __forceinline__ QueryBlock(const Attention& arguments, void* shared)
      : a(arguments), task(heaviest_first(arguments)), own(arguments, task), stages{static_cast<T*>(shared)} {}

  // Later queries see more keys where the mask is causal: their blocks start first, so that short ones are the last.
  __device__ __forceinline__ static Task heaviest_first(const Attention& a) {
    Task task = block_task(a, a.q_tiles);
    if (a.causal) task.tile = a.q_tiles - 1 - task.tile;
    return task;
  }

  // Shared memory in bytes of a kernel with so many tensors of own rows.
  static constexpr int memory(int tensors) {
    return Stages<T, kDim, kThreads>::kBytes + tensors * kQueries * kTileStride<kDim> * static_cast<int>(sizeof(T));
  }

  // Memory of the i-th tensor of own rows, behind the stages.
  __device__ __forceinline__ T* own_tile(int i) const {
    return stages.memory + 4 * stages.kTile + i * kQueries * kTileStride<kDim>;
  }

  __device__ __forceinline__ void load_own(int i, const HeadRows& x) const {
    if (own.keys == 0) return;
    load_block_rows<kDim, kThreads, kQueries>(own_tile(i), x, task.sequence.q_start + own.first, task.head, own.rows,
                                              a.dim);
  }

  __device__ __forceinline__ void load_stage(int stage) const {
    const Sequence& seq = task.sequence;
    const int key = stage * kStageRows;
    if (key < own.keys) stages.load(stage, a.k, a.v, seq.k_start + key, task.head, seq.k_len - key, a.dim);
  }

  // The warp's rows of the i-th tensor as left factors.
  __device__ __forceinline__ void load_own_fragments(RowFragments<kDim>& x, int i) const {
    load_fragments<kDim>(x, own_tile(i) + own.warp_row * kTileStride<kDim>);
  }

  // Decisions for row g + 8 h in a chunk of keys.
  __device__ __forceinline__ Masks8 masks(const DropoutKey& dropout, int h, int key) const {
    return masks8_attention(dropout, task.sequence.q_start + own.row(h), task.head, key / kChunk, threadIdx.x % 4);
  }

  // The generator's lanes behind them.
  __device__ __forceinline__ Lanes8 lanes(const DropoutKey& dropout, int h, int key) const {
    return lanes8_attention(dropout, task.sequence.q_start + own.row(h), task.head, key / kChunk, threadIdx.x % 4);
  }

  // Goes through the chunks of keys that any of the warp's queries sees: body(first key, keys, values).
  template <class Body>
  __device__ __forceinline__ void for_chunks(Body&& body) const {
    for (int start = 0; start < own.keys; start += kStageRows) {
      const int stage = start / kStageRows;
      if (stage > 0) wait_stage();
      load_stage(stage + 1);
#pragma unroll 1
      for (int key = start; key < min(start + kStageRows, own.warp_keys); key += kChunk) {
        const int at = (key - start) * kTileStride<kDim>;
        body(key, stages.first(stage) + at, stages.second(stage) + at);
      }
    }
  }

  __device__ __forceinline__ void store_own(const HeadRows& x, const float (&c)[kDim / 8][4],
                                            const float (&factor)[2]) const {
    const int row = own.warp_row;
    if (row >= own.rows) return;
    store_rows(x.at<T>(task.sequence.q_start + own.first + row, task.head), x.row_stride, own.rows - row, a.dim, c,
               factor);
  }
};

// What the backward keeps of a query. With log2 of dropout's scale in the exponent a probability comes out multiplied
// by that scale, and the gradient of a score is that times (gradient of the probability, zero if dropped, less delta
// over the scale): one multiplication, as the accumulators of dout * v start from what is taken off.
struct QueryTerms {
  float lift, inverse;  // log2 of dropout's scale, and one over it

  __device__ __forceinline__ explicit QueryTerms(float scale) : lift(log2f(scale)), inverse(1.f / scale) {}

  // The row's logarithm of the softmax sum to base 2, less lift; minus its sum of dout * out, over the scale.
  __device__ __forceinline__ float2 operator()(float lse, float row_sum) const {
    return make_float2(fmaxf(lse * kLog2E, kLowestLse) - lift, -row_sum * inverse);
  }
};

// Calls body(padded head size, whether there is dropout), both as std::integral_constant.
template <class Body>
cudaError_t dispatch_long(const Attention& a, Body&& body) {
  const auto by_dropout = [&](auto dim) {
    return a.dropout.threshold != 0 ? body(dim, std::true_type()) : body(dim, std::false_type());
  };
  return a.dim <= 32 ? by_dropout(std::integral_constant<int, 32>()) : by_dropout(std::integral_constant<int, 64>());
}

// Tells a kernel how its blocks cover the queries.
inline void plan_queries(Attention& a, int64_t max_q, int block_rows) {
  a.q_rows = block_rows;
  a.q_tiles = static_cast<int>(ceil_div<int64_t>(std::max<int64_t>(max_q, 1), block_rows));
}

}  // namespace ls_train
