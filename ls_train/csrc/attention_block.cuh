// Attention of 33 to 128 tokens with heads of 33 to 64 on tensor cores, what its kernels share.
//
// Warps of a block own 16 rows each: queries in the forward, keys in the backward. Tiles in shared memory are those of
// attention_short.cuh, as long as the longest sequence (64 or 128 rows). Their addresses are multiples of 128, so that
// a lane keeps one address for all fragments of a row: pieces 2 i and 2 i + 1 are at (address ^ 32 i).
#pragma once

#include "attention_short.cuh"

namespace ls_train {

constexpr int kRowBytes = kShortDim * 2;
using HeadTile = float[kHeadTiles][4];  // 16 rows x the head

// The 16 rows of a warp. Work on a triangle is to be shared out evenly among the four schedulers of a multiprocessor,
// each of which has every fourth warp: of eight warps the last four take their tiles in reverse, four do in every other
// block.
template <int kWarps>
__device__ __forceinline__ int warp_row() {
  const int warp = static_cast<int>(uniform(threadIdx.x / kWarp));
  const bool reverse = kWarps == 8 ? warp >= 4 : __popc(blockIdx.x) % 2 != 0;
  const int tile = !reverse ? warp : kWarps == 8 ? 11 - warp : kWarps - 1 - warp;
  return tile * kWarpRows;
}

// Starts the copy of `count` rows of one head from `row` on into a tile of kRows rows, and of zeros up to its end.
template <int kWarps, int kRows, class T>
__device__ __forceinline__ void load_side(T* tile, const HeadRows& x, int64_t row, int head, int count, int dim) {
  constexpr unsigned kStep = kWarps * kWarp / 8;  // a multiple of 8: places of one thread are whole rows apart
  const unsigned piece = threadIdx.x % 8, start = threadIdx.x / 8;
  const int end = static_cast<int>(piece) * 8 < dim ? count : 0;
  T* const target = tile + place(start, piece);
  const T* source = x.at<const T>(row + start, head) + piece * 8;  // not followed where there is nothing to read
#pragma unroll
  for (int first = 0; first < kRows; first += kStep) {
    copy_async<16>(target + first * kShortDim, source, first + static_cast<int>(start) < end);
    source += kStep * x.row_stride;
  }
}

// What a lane adds to the address of 16 rows to load four matrices: rows 0 to 15 of piece 0, then of piece 1. They are
// a left factor or, transposed, a right one.
__device__ __forceinline__ uint32_t left_offset() {
  const int lane = threadIdx.x % kWarp;
  return place(lane % 16, lane / 16) * 2;
}

// The same for rows 0 to 7 of both pieces, then rows 8 to 15: right factors of eight columns each.
__device__ __forceinline__ uint32_t right_offset() {
  const int lane = threadIdx.x % kWarp;
  return place(lane % 8 + lane / 16 * 8, lane / 8 % 2) * 2;
}

// Scores of 16 queries from `first` on before the product: -inf where the query does not see the key.
__device__ __forceinline__ void start_scores(Scores& s, const Sequence& seq, int first, int chunk) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < kChunkTiles * 4; ++i) s[i / 4][i % 4] = 0.f;
  const bool seen = first + kWarpRows <= seq.q_len && (chunk + 1) * kChunk <= seq.key_limit(first);  // by all of them
  if (seen) return;
  const int limit[2] = {seq.key_limit(first + lane / 4), seq.key_limit(first + lane / 4 + 8)};
#pragma unroll
  for (int i = 0; i < kChunkTiles * 4; ++i) {
    const int key = chunk * kChunk + i / 4 * 8 + lane % 4 * 2 + i % 2;
    s[i / 4][i % 4] = key < limit[i % 4 / 2] ? 0.f : -INFINITY;
  }
}

// The same of 16 keys from `first` on, transposed: 32 queries from `query` on.
__device__ __forceinline__ void start_transposed_scores(Scores& s, const Sequence& seq, int first, int query) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < kChunkTiles * 4; ++i) s[i / 4][i % 4] = 0.f;
  if (first + kWarpRows <= seq.key_limit(query)) return;  // seen by the first of them and so by all
#pragma unroll
  for (int i = 0; i < kChunkTiles * 2; ++i) {
    const int limit = seq.key_limit(query + i / 2 * 8 + lane % 4 * 2 + i % 2);
#pragma unroll
    for (int h = 0; h < 2; ++h) s[i / 2][h * 2 + i % 2] = first + lane / 4 + h * 8 < limit ? 0.f : -INFINITY;
  }
}

// c += 16 rows * 32 other rows^T, at addresses with the lane's left and right offset.
template <class T>
__device__ __forceinline__ void add_dots_at(Scores& c, uint32_t own, uint32_t other, T) {
#pragma unroll
  for (int i = 0; i < kShortDim / 16; ++i) {
    uint32_t a[4];
    load_matrices(a, own ^ (i * 32));
#pragma unroll
    for (int t = 0; t < kChunkTiles; t += 2) {
      uint32_t b[4];
      load_matrices(b, (other ^ (i * 32)) + t * 8 * kRowBytes);
      multiply_add(c[t], a, b[0], b[1], T());
      multiply_add(c[t + 1], a, b[2], b[3], T());
    }
  }
}

// c += a (16 x 16) * 16 rows, at an address with the lane's left offset.
template <class T>
__device__ __forceinline__ void add_rows_at(HeadTile& c, const uint32_t (&a)[4], uint32_t rows, T) {
#pragma unroll
  for (int t = 0; t < kHeadTiles; t += 2) {
    uint32_t b[4];
    load_matrices_transposed(b, rows ^ (t * 16));
    multiply_add(c[t], a, b[0], b[1], T());
    multiply_add(c[t + 1], a, b[2], b[3], T());
  }
}

// Writes 16 accumulated rows, row g times factor[0] and g + 8 times factor[1], of which `rows` are real, by way of 16
// rows in shared memory that only this warp uses.
template <class T>
__device__ __forceinline__ void store_staged(T* tile, T* x, int64_t stride, int rows, int dim, const HeadTile& c,
                                             const float (&factor)[2]) {
  const int lane = threadIdx.x % kWarp;
  __syncwarp();
#pragma unroll
  for (int t = 0; t < kHeadTiles; ++t) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      *reinterpret_cast<uint32_t*>(tile + place(lane / 4 + h * 8, t) + lane % 4 * 2) =
          pack_pair(c[t][h * 2] * factor[h], c[t][h * 2 + 1] * factor[h], T());
    }
  }
  __syncwarp();
  const int piece = lane % 8;
#pragma unroll
  for (int i = 0; i < kWarpRows; i += 4) {
    const int row = lane / 8 + i;
    uint32_t w[4];
    load_shared(w, tile + place(row, piece));
    if (row < rows && piece * 8 < dim) store_words(x + row * stride + piece * 8, w);
  }
}

// Calls body(std::integral_constant<int, rows that a tile needs>()).
template <class Body>
cudaError_t dispatch_rows(int64_t max_q, int64_t max_k, Body&& body) {
  if (std::max(max_q, max_k) <= kShortLength / 2) return body(std::integral_constant<int, kShortLength / 2>());
  return body(std::integral_constant<int, kShortLength>());
}

}  // namespace ls_train
