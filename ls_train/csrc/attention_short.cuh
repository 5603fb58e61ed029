// Attention of up to 128 tokens with heads of 33 to 64 on tensor cores: what its kernels share, and what those of up to
// 32 tokens do, for which one warp is enough. The others' is in attention_block.cuh.
//
// A tile in shared memory has no padding, the 16-byte pieces of a row change places with the row instead. A warp alone
// owns 32 queries, two tiles of 16 rows, so that each fragment of keys and values is used twice. A right factor whose
// rows are summed over (values, and whatever makes a gradient) is not loaded transposed: a lane takes one piece of each
// of four rows and pairs their elements. It then accumulates columns 8q to 8q + 7 and 32 + 8q to 32 + 8q + 7 of its
// rows: 16 bytes to store, without a trade of registers between lanes.
#pragma once

#include "attention_tiles.cuh"

namespace ls_train {

constexpr int kShortDim = 64;
constexpr int kShortTile = kChunk * kShortDim;  // elements
constexpr int kHeadTiles = kShortDim / 8;
constexpr int kRowTiles = 2;  // of 16 queries, of a warp alone

// Blocks of one warp that a multiprocessor is to hold: older ones have less shared memory.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kForwardBlocks = 12, kBackwardBlocks = 8;
#else
constexpr int kForwardBlocks = 16, kBackwardBlocks = 12;
#endif

using Scores = float[kChunkTiles][4];                 // 16 queries x 32 keys
using HeadColumns = float[kRowTiles][kHeadTiles][4];  // 32 rows x the head
using Factors = uint32_t[kChunkTiles][2];             // scores rounded, pairs of keys: of rows g and g + 8

struct Piece {  // eight elements of a row
  uint32_t word[4];
};

// The work of this block: what a sequence has beyond the longest length is not touched.
__device__ __forceinline__ Task short_task(const Attention& a, int tiles, int longest) {
  Task task = block_task(a, tiles);
  task.sequence.q_len = max(0, min(task.sequence.q_len, longest));
  task.sequence.k_len = max(0, min(task.sequence.k_len, longest));
  return task;
}

// Place of a piece in a tile. Neither eight rows' pieces of one column share banks, nor two columns' of rows 0, 2,
// 4, 6.
__device__ __forceinline__ int place(int row, int piece) {
  return row * kShortDim + (piece ^ ((row >> 1 & 3) | (row & 1) << 2)) * 8;
}

// Starts the copy of `count` rows of one head from `row` on into a tile, by one warp, and of zeros up to its end.
template <class T>
__device__ __forceinline__ void load_tile(T* tile, const HeadRows& x, int64_t row, int head, int count, int dim) {
  constexpr int kStep = kWarp / 8;
  const int piece = static_cast<int>(threadIdx.x) % 8, start = static_cast<int>(threadIdx.x) / 8;
  const int end = piece * 8 < dim ? count : 0;
  const T* source = x.at<const T>(row + start, head) + piece * 8;  // not followed where there is nothing to read
#pragma unroll
  for (int first = 0; first < kChunk; first += kStep) {
    copy_async<16>(tile + place(first + start, piece), source, first + start < end);
    source += kStep * x.row_stride;
  }
}

// c[r] (16 x 32) += own rows * 32 other rows^T.
template <int kRows, class T>
__device__ __forceinline__ void add_tile_dots(float (&c)[kRows][kChunkTiles][4], const T* own, const T* other) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll 2  // fragments of more steps at once would spill in the backward
  for (int k = 0; k < kShortDim / 16; ++k) {
    uint32_t a[kRows][4];
#pragma unroll
    for (int r = 0; r < kRows; ++r) load_matrices(a[r], own + place(r * kWarpRows + lane % 16, k * 2 + lane / 16));
#pragma unroll
    for (int t = 0; t < kChunkTiles; t += 2) {
      uint32_t b[4];
      load_matrices(b, other + place(t * 8 + lane % 8 + lane / 16 * 8, k * 2 + lane / 8 % 2));
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        multiply_add(c[r][t], a[r], b[0], b[1], T());
        multiply_add(c[r][t + 1], a[r], b[2], b[3], T());
      }
    }
  }
}

// c[r] (16 x the head) += a[r] (16 x 16) * 16 rows of a tile from `row` on.
template <int kRows, class T>
__device__ __forceinline__ void add_tile_product(float (&c)[kRows][kHeadTiles][4], const uint32_t (&a)[kRows][4],
                                                 const T* tile, int row) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, q = lane % 4;
  const int piece = g % 2 * 4 + g / 2;
  Piece x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) load_shared(x[i].word, tile + place(row + q * 2 + i / 2 * 8 + i % 2, piece));
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) {
    const unsigned halves = t % 2 ? 0x7632 : 0x5410;
    const uint32_t b0 = __byte_perm(x[0].word[t / 2], x[1].word[t / 2], halves);
    const uint32_t b1 = __byte_perm(x[2].word[t / 2], x[3].word[t / 2], halves);
#pragma unroll
    for (int r = 0; r < kRows; ++r) multiply_add(c[r][t], a[r], b0, b1, T());
  }
}

// Writes 16 rows of add_tile_product, row g times factor[0] and g + 8 times factor[1], of which `rows` are real.
template <class T>
__device__ __forceinline__ void store_columns(T* x, int64_t stride, int rows, int dim, const float (&c)[kHeadTiles][4],
                                              const float (&factor)[2]) {
  const int lane = threadIdx.x % kWarp, q = lane % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + h * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = q * 8 + i * 32;
      uint32_t w[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        w[k] = pack_pair(c[2 * k][2 * h + i] * factor[h], c[2 * k + 1][2 * h + i] * factor[h], T());
      }
      if (row < rows && column < dim) store_words(x + row * stride + column, w);
    }
  }
}

// Scores of a sequence before the product: -inf where the query does not see the key, so that it stays so.
__device__ __forceinline__ void start_scores(Scores (&s)[kRowTiles], const Sequence& seq) {
  const int lane = threadIdx.x % kWarp;
  const int column = lane % 4 * 2;
  const auto start_row = [&](int row, int limit) {
#pragma unroll
    for (int i = 0; i < kChunkTiles * 2; ++i) {
      s[row / 2][i / 2][row % 2 * 2 + i % 2] = column + i / 2 * 8 + i % 2 < limit ? 0.f : -INFINITY;
    }
  };
  if (seq.causal) {
#pragma unroll
    for (int row = 0; row < kRowTiles * 2; ++row) start_row(row, seq.key_limit(row * 8 + lane / 4));
  } else {
#pragma unroll
    for (int row = 0; row < kRowTiles * 2; ++row) start_row(row, seq.k_len);
  }
}

// Columns 16 i to 16 i + 15 of rounded scores as left factor.
__device__ __forceinline__ void as_left_factor(uint32_t (&a)[4], const Factors& x, int i) {
#pragma unroll
  for (int j = 0; j < 4; ++j) a[j] = x[2 * i + j / 2][j % 2];
}

// Keys 16 m to 16 m + 15 of the scores' factors as rows of a left factor.
__device__ __forceinline__ void as_transposed_factor(uint32_t (&a)[4], const Factors& x, int m) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = transpose_matrix(x[2 * m + i % 2][i / 2]);
}

// Decisions about the keys of a chunk for kRows tiles of 16 queries from packed row `row` on.
template <int kRows>
__device__ __forceinline__ void draw(Keep8 (&keep)[kRows][2], const DropoutKey& dropout, int64_t row, int head,
                                     int chunk) {
  const int lane = threadIdx.x % kWarp;
  if (dropout.active()) {  // one branch, so that calls share their keys
#pragma unroll
    for (int i = 0; i < kRows * 2; ++i) {
      keep[i / 2][i % 2] = keep8_attention(dropout, row + i * 8 + lane / 4, head, chunk, lane % 4);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRows * 2; ++i) keep[i / 2][i % 2] = keep_all();
  }
}

// Makes all but the newest kPending groups of copies visible to the warp.
template <int kPending>
__device__ __forceinline__ void wait_tiles() {
  wait_copies<kPending>();
  __syncwarp();
}

// Launches a kernel of one warp a sequence and head, with `tiles` tiles in shared memory.
inline cudaError_t launch_warps(void (*kernel)(Attention), const Attention& a, int tiles, cudaStream_t stream) {
  return launch_attention(kernel, a, 1, kWarp, tiles * kShortTile * 2, stream);
}

}  // namespace ls_train
