// Tensor-core attention, what its three kernels share: tiles of rows in shared memory, their products, the softmax
// gradient in registers.
//
// Head sizes are padded with zeros to kDim = 32, 64, 96, 128, 192 or 256 in shared memory. A row of a tile takes
// kDim + 8 elements: rows are then 16 bytes apart modulo 128, so the eight rows of a fragment load hit different banks.
// Keys go in chunks of 32, the reach of one dropout generator call (ls_train/rng.py); a warp owns 16 rows.
#pragma once

#include "attention_plan.cuh"
#include "tensor_core.cuh"

namespace ls_train {

constexpr float kLowestLse = -1e30f;  // for queries without keys: masked scores less this are still -inf

// Starts the copy of rows of one head into a tile: `count` valid ones from `row` on, zeros up to `padded`.
template <int kDim, class T>
__device__ __forceinline__ void load_rows(T* tile, const HeadRows& x, int64_t row, int head, int count, int padded,
                                          int dim) {
  constexpr int kLanes = kDim / 8 <= 4 ? 4 : kDim / 8 <= 8 ? 8 : kDim / 8 <= 16 ? 16 : 32;  // threads of a row
  const int column = static_cast<int>(threadIdx.x) % kLanes * 8;
  const int step = static_cast<int>(blockDim.x) / kLanes;
  if (column >= kDim) return;
  const int start = static_cast<int>(threadIdx.x) / kLanes;
  const int end = column < dim ? count : 0;
  const T* source = x.at<const T>(row + start, head) + column;  // not followed where there is nothing to read
  T* target = tile + start * kTileStride<kDim> + column;
  for (int r = start; r < padded; r += step) {
    copy_async<16>(target, source, r < end);
    source += step * x.row_stride;
    target += step * kTileStride<kDim>;
  }
}

// Chunks of keys and values pass through `slots` places (1, 2 or 4) in shared memory, each loaded while earlier ones
// are in use. Every load is one group of copies, and so is a step without a load, so that the oldest can be waited for
// by count.
template <class T, int kDim>
struct KeyRing {
  static constexpr int kSlotSize = 2 * kChunk * kTileStride<kDim>;

  T* slots;
  const Attention& a;
  const Task& task;
  int chunks;  // that this block reads

  __device__ __forceinline__ T* keys(int chunk) const { return slots + (chunk & (a.slots - 1)) * kSlotSize; }
  __device__ __forceinline__ T* values(int chunk) const { return keys(chunk) + kSlotSize / 2; }

  __device__ __forceinline__ void load(int chunk) const {
    if (chunk < chunks) {
      const int count = task.sequence.k_len - chunk * kChunk;
      const int64_t row = task.sequence.k_start + chunk * kChunk;
      load_rows<kDim>(keys(chunk), a.k, row, task.head, count, kChunk, a.dim);
      load_rows<kDim>(values(chunk), a.v, row, task.head, count, kChunk, a.dim);
    }
    commit_copies();
  }

  __device__ __forceinline__ void start() const {
    for (int chunk = 0; chunk < a.slots; ++chunk) load(chunk);
  }

  // Makes a chunk, the next in order, visible to the block.
  __device__ __forceinline__ void wait() const {
    switch (a.slots) {
      case 1:
        wait_copies<0>();
        break;
      case 2:
        wait_copies<1>();
        break;
      default:
        wait_copies<kMaxSlots - 1>();
    }
    __syncthreads();
  }

  // Gives a used chunk's place to a later one.
  __device__ __forceinline__ void advance(int chunk) const {
    if (chunks > a.slots) __syncthreads();
    load(chunk + a.slots);
  }
};

// A warp's share of a tile of scores: 16 rows and a chunk of the keys.
struct Unit {
  int row, chunk;

  __device__ __forceinline__ void advance(int by, int chunks, int end_row) {
    chunk += by;
    while (chunk >= chunks && row < end_row) {
      chunk -= chunks;
      row += kWarpRows;
    }
  }
};

// c (16 own rows x 32 other rows) += own * other^T over the padded head size.
template <int kDim, class T>
__device__ __forceinline__ void add_dots(float (&c)[kChunkTiles][4], const T* own, const T* other) {
  constexpr int kStride = kTileStride<kDim>;
  const int lane = threadIdx.x % kWarp;
  const T* own_row = own + lane % 16 * kStride + lane / 16 * 8;
  const T* other_row = other + (lane % 8 + lane / 16 * 8) * kStride + lane / 8 % 2 * 8;
#pragma unroll 2  // fragments of more steps at once would spill in the backward
  for (int k = 0; k < kDim; k += 16) {
    uint32_t a[4];
    load_matrices(a, own_row + k);
#pragma unroll
    for (int t = 0; t < kChunkTiles; t += 2) {
      uint32_t b[4];
      load_matrices(b, other_row + t * 8 * kStride + k);
      multiply_add(c[t], a, b[0], b[1], T());
      multiply_add(c[t + 1], a, b[2], b[3], T());
    }
  }
}

// c (16 x 8 * kTiles) += a (16 x 16) * 16 rows of a tile, from a column on.
template <int kTiles, class T>
__device__ __forceinline__ void add_product(float (&c)[kTiles][4], const uint32_t (&a)[4], const T* rows, int stride) {
  const int lane = threadIdx.x % kWarp;
  const T* row = rows + lane % 16 * stride + lane / 16 * 8;
#pragma unroll
  for (int t = 0; t < kTiles; t += 2) {
    uint32_t b[4];
    load_matrices_transposed(b, row + t * 8);
    multiply_add(c[t], a, b[0], b[1], T());
    multiply_add(c[t + 1], a, b[2], b[3], T());
  }
}

// Two neighbouring accumulators, rounded, as the left factor of a product over their 16 columns.
template <class T>
__device__ __forceinline__ void as_factor(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = pack_pair(left[0], left[1], T());
  a[1] = pack_pair(left[2], left[3], T());
  a[2] = pack_pair(right[0], right[1], T());
  a[3] = pack_pair(right[2], right[3], T());
}

// Writes 16 accumulated rows, row g times factor[0] and g + 8 times factor[1], of which `rows` and `columns` are real.
// The four lanes of a row trade registers, a 4 x 4 transposition, so that each has 16 bytes to store.
template <class T, int kTiles>
__device__ __forceinline__ void store_rows(T* x, int64_t stride, int rows, int columns, const float (&c)[kTiles][4],
                                           const float (&factor)[2]) {
  const int lane = threadIdx.x % kWarp;
  const int quad = lane % 4;
#pragma unroll
  for (int t = 0; t < kTiles; t += 4) {
#pragma unroll
    for (int half_tile = 0; half_tile < 2; ++half_tile) {
      uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = c[t + i] + half_tile * 2;
        r[i] = pack_pair(pair[0] * factor[half_tile], pair[1] * factor[half_tile], T());
      }
#pragma unroll
      for (int bit = 1; bit <= 2; bit *= 2) {
        const bool upper = quad & bit;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i & bit) continue;
          const uint32_t got = __shfl_xor_sync(kAllLanes, upper ? r[i] : r[i + bit], bit);
          (upper ? r[i] : r[i + bit]) = got;
        }
      }
      const int row = lane / 4 + half_tile * 8;
      const int column = (t + quad) * 8;
      if (row < rows && column < columns) store_words(x + row * stride + column, r);
    }
  }
}

// Over the four lanes that share a row.
template <class Op>
__device__ __forceinline__ float row_reduce(float x) {
  return warp_reduce<Op, 4>(x);
}

// dout * out of a packed row, computed by the four lanes that share it.
template <int kDim, class T>
__device__ __forceinline__ float row_sum(const Attention& a, int64_t row, int head) {
  const int quad = threadIdx.x % 4;
  const T* out = a.out.at<const T>(row, head);
  const T* dout = a.dout.at<const T>(row, head);
  float sum = 0.f;
#pragma unroll
  for (int column = 0; column < kDim; column += 32) {
    const int c = column + quad * 8;
    if (c < a.dim) {
      float y[8], dy[8];
      load_floats<8>(out + c, y);
      load_floats<8>(dout + c, dy);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += y[i] * dy[i];
    }
  }
  return row_reduce<Sum>(sum);
}

// Dropout of a chunk of keys for rows g and g + 8 of a warp: bit 8 * h + i for the i-th element of row g + 8 * h that
// this thread has in its accumulators. Drawn before the wait for a chunk, the generator's long chain costs no time.
struct KeepRows {
  unsigned bits;

  __device__ __forceinline__ bool operator()(int h, int i) const { return bits >> (h * 8 + i) & 1; }
};

__device__ __forceinline__ KeepRows keep_rows(const DropoutKey& dropout, int64_t row, int head, int chunk) {
  if (!dropout.active()) return {0xffffu};
  KeepRows keep = {0};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    keep.bits |= keep8_attention(dropout, row + h * 8, head, chunk, threadIdx.x % 4).bits() << (h * 8);
  }
  return keep;
}

// What the softmax gradient needs of rows g and g + 8 of a warp.
struct RowPair {
  float lse2[2];  // logarithm of the softmax sum to base 2
  float delta[2];
  int limit[2];  // keys seen, from the chunk's first key on
};

// In: scores (unscaled) and gradients of the probabilities after dropout. Out: s = probabilities as dropout let them
// through, without its scale; d = gradient of the scaled scores. scale2 is the scale of scores over ln 2. With
// sum_delta the chunk is the whole row, and the row's sum of dout * out is taken as that of probability times gradient:
// out need not be read.
__device__ __forceinline__ void softmax_gradient(float (&s)[kChunkTiles][4], float (&d)[kChunkTiles][4], KeepRows keep,
                                                 float keep_scale, float scale2, const RowPair& rows, bool sum_delta) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float p[kChunkTiles * 2], dp[kChunkTiles * 2];
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kChunkTiles * 2; ++i) {
      const int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
      p[i] = column < rows.limit[h] ? fast_exp2(s[i / 2][h * 2 + i % 2] * scale2 - rows.lse2[h]) : 0.f;
      dp[i] = keep(h, i) ? d[i / 2][h * 2 + i % 2] * keep_scale : 0.f;
      sum += p[i] * dp[i];
    }
    const float delta = sum_delta ? row_reduce<Sum>(sum) : rows.delta[h];
#pragma unroll
    for (int i = 0; i < kChunkTiles * 2; ++i) {
      s[i / 2][h * 2 + i % 2] = keep(h, i) ? p[i] : 0.f;
      d[i / 2][h * 2 + i % 2] = p[i] * (dp[i] - delta);
    }
  }
}

}  // namespace ls_train
