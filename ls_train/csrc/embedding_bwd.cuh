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
  unsigned long_step;                // blocks for long runs one below another
  unsigned long_blocks, run_blocks;  // numbers of blocks of these kinds, the first ones

  __device__ __forceinline__ bool has_gradient(int64_t id) const {
    return id >= 0 && id < vocabulary && id != padding_idx;
  }
};

// Packs of kLoads rows of dy that are on their way together. What dropout keeps of them is decided meanwhile.
template <class T, int kWidth, int kLoads>
class RowLoads {
 public:
  // rows: a function of 0 to kLoads - 1; negative: none.
  template <class Rows>
  __device__ __forceinline__ RowLoads(const EmbeddingBackward<T>& a, const DropoutKey& key, int column, Rows&& rows)
      : scale_(key.scale), column_(column) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int64_t row = rows(j);
      asked_[j] = row >= 0;
      if (asked_[j]) grads_[j] = load_streaming<kWidth>(a.dy + row * a.columns + column);
    }
    if (!key.active()) return;
    kept_ = 0;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int64_t row = rows(j);
      const uint32_t group = static_cast<uint32_t>(column) / 8;
      if constexpr (kWidth > 1) {
        const uint32_t plane = static_cast<uint32_t>(static_cast<uint64_t>(row) >> 32);
        join(kept_, j, masks8(key, plane, static_cast<uint32_t>(row), group));
      } else {
        join(kept_, j, keep8(key, row, group));
      }
    }
  }

  // j: a compile-time constant.
  __device__ __forceinline__ void add(int j, float (&sum)[kWidth]) {
    if (!asked_[j]) return;
    keep_packed(grads_[j]);
    float d[kWidth];
    unpack_kept(grads_[j], d, split(kept_, j), scale_, column_);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum[i] += d[i];
  }

 private:
  float scale_;
  int column_;
  Pack<T, kWidth> grads_[kLoads];
  bool asked_[kLoads];
  uint32_t kept_ = ~0u;
};

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
