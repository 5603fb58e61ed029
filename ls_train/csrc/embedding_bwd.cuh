// What the kinds of blocks of embedding_bwd.cu share: rows of dy are added up in the order of the sorted ids, several
// under way, and written to the table.
#pragma once

#include "row_kernels.cuh"

namespace ls_train {

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
  int long_slices, column_blocks;    // blocks beside each other, for long and for short runs
  unsigned long_blocks, run_blocks;  // numbers of blocks of these kinds, the first ones

  __device__ __forceinline__ bool has_gradient(int64_t id) const {
    return id >= 0 && id < vocabulary && id != padding_idx;
  }
};

// sum += dropout(grad), where what is dropped of it (keep) has been decided before the row arrived.
template <class T, int kWidth>
__device__ __forceinline__ void add_row(Pack<T, kWidth>& grad, const Keep8& keep, float scale, int column,
                                        float (&sum)[kWidth]) {
  keep_packed(grad);
  float d[kWidth];
  unpack_kept(grad, d, keep, scale, column);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum[i] += d[i];
}

__device__ __forceinline__ Keep8 decide(const DropoutKey& key, int64_t row, int column) {
  return key.active() ? keep8(key, row, static_cast<uint32_t>(column) / 8) : keep_all();
}

// Adds the rows at the sorted positions first, first + step, ... as long as these hold `id`.
template <int kLoads, class T, int kWidth>
__device__ __forceinline__ void add_run(const EmbeddingBackward<T>& a, const DropoutKey& key, int64_t used, int64_t id,
                                        int64_t first, int step, int column, float (&sum)[kWidth]) {
  for (int64_t at = first; at < a.n && a.sorted_ids[at] == id; at += static_cast<int64_t>(step) * kLoads) {
    int64_t row[kLoads];
    Pack<T, kWidth> grads[kLoads];
    bool asked[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int64_t next = min(at + j * step, a.n - 1);
      const int64_t other = a.sorted_ids[next];
      row[j] = a.order[next];  // asked for before the id is known
      asked[j] = at + j * step < a.n && other == id && row[j] < used;
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      if (asked[j]) grads[j] = load_streaming<kWidth>(a.dy + row[j] * a.columns + column);
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      if (asked[j]) add_row(grads[j], decide(key, row[j], column), key.scale, column, sum);
    }
  }
}

template <class T, int kWidth>
__device__ __forceinline__ void write_row(const EmbeddingBackward<T>& a, int64_t id, int column, float (&sum)[kWidth]) {
  T* out = a.dweight + id * a.columns + column;
  float old[kWidth] = {};
  if (a.accumulate) load_floats(out, old);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum[i] = fmaf(a.scale, sum[i], old[i]);
  store(out, pack_floats<T>(sum));
}

// At most kThreads / 2 positions before the first of n sorted ids that is not below `id`, or itself, searched for by a
// block of kThreads: as many probes for each wait.
template <int kThreads>
__device__ __forceinline__ int64_t shortly_before(const int64_t* sorted_ids, int64_t n, int64_t id, int thread) {
  int64_t low = 0;
  while (n > kThreads / 2) {  // it is in [low, low + n]
    const int64_t piece = ceil_div<int64_t>(n, kThreads), last = (thread + 1) * piece - 1;
    const int below = __syncthreads_count(last < n && sorted_ids[low + last] < id);
    low += below * piece;
    n = min(piece - 1, n - below * piece);
  }
  return low;
}

}  // namespace ls_train
