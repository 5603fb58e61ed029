// Softmax of masked scores with dropout: arguments of the kernels, and how a row is laid over threads.
#pragma once

#include "activations.cuh"
#include "row_kernels.cuh"

namespace ls_train {

template <class T>
struct SoftmaxForward {
  T* y;  // may be null
  T* probs;
  const T* x;
  const bool* padding;  // (B, S), may be null
  int64_t rows;
  int heads, queries, keys;
  bool causal;
  Dropout dropout;

  // Keys that a row sees, from the first on, and its padding.
  __device__ __forceinline__ int visible(int64_t row) const {
    return causal ? min(keys, max(0, static_cast<int>(row % queries) + 1 + keys - queries)) : keys;
  }
  __device__ __forceinline__ const bool* padding_of(int64_t row) const {
    return padding == nullptr ? nullptr : padding + row / queries / heads * keys;
  }
};

template <class T>
struct SoftmaxBackward {
  T* dx;
  const T* dy;
  const T* probs;
  int64_t rows;
  int keys;
  Dropout dropout;
};

// exp(x - largest). Numbers of float16 are small enough for one instruction less: the rounded product with the largest
// is off by less than 2^-8, equally for a whole row. Of larger ones the difference must be taken first.
template <class T>
class Exponential {
 public:
  __device__ __forceinline__ explicit Exponential(float largest) : shift_(kSmall ? largest * kLog2E : largest) {
    if (largest == -INFINITY) shift_ = 0.f;  // no visible key: all exponentials are zero
  }

  __device__ __forceinline__ float operator()(float x) const {
    return fast_exp2(kSmall ? fmaf(x, kLog2E, -shift_) : (x - shift_) * kLog2E);
  }

 private:
  static constexpr bool kSmall = std::is_same_v<T, half>;
  float shift_;
};

// Factor of the exponentials. NaN stays NaN.
__device__ __forceinline__ float softmax_scale(float total) { return total == 0.f ? 0.f : fast_reciprocal(total); }

// Over the `lanes` neighbouring lanes that share a row, a power of two up to a warp. All lanes must call it.
template <class Op>
__device__ __forceinline__ float lanes_reduce(float x, int lanes) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    if (step < lanes) x = Op()(x, __shfl_xor_sync(kAllLanes, x, step));
  }
  return x;
}

// Where a thread's packs of its row are. A row longer than one chunk, kWidth 1 only, is gone over chunk by chunk.
template <int kWidth, int kPacks>
struct RowWalk {
  int lanes = static_cast<int>(blockDim.x), lane = static_cast<int>(threadIdx.x);
  int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;

  __device__ __forceinline__ int chunk() const { return kPacks * lanes * kWidth; }
  __device__ __forceinline__ bool one_chunk(int keys) const { return kWidth > 1 || keys <= chunk(); }
  __device__ __forceinline__ int column(int first, int k) const { return first + (k * lanes + lane) * kWidth; }

  // Calls body(first column of the chunk).
  template <class Body>
  __device__ __forceinline__ void for_chunks(int keys, Body&& body) const {
    if constexpr (kWidth > 1) {
      body(0);
    } else {
      for (int first = 0; first < keys; first += chunk()) body(first);
    }
  }

  template <class Op>
  __device__ __forceinline__ float reduce(float x, float* scratch) const {
    if (lanes <= kWarp) return lanes_reduce<Op>(x, lanes);
    float values[1] = {x};
    group_reduce<Op>(values, linear_thread(), lanes, scratch);
    return values[0];
  }
};

// Decisions about the packs of one chunk; for kWidth 1 across the lanes of a warp, which all have the same row. All
// threads must construct it. The compiler finds the generator's keys equal for all of them only outside of branches.
template <int kWidth, int kPacks>
class RowDropout {
 public:
  __device__ __forceinline__ RowDropout(const DropoutKey& key, const RowWalk<kWidth, kPacks>& walk, int first) {
    if (kWidth == 1) {
      if (!key.active()) return;
      kept_ = keep_across<kPacks>(
          key, walk.lane % kWarp, [&](int) { return walk.row; },
          [&](int k) { return walk.column(first, k) - walk.lane % kWarp; });
    } else {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
        keep_[k] = key.active() ? keep8(key, walk.row, static_cast<uint32_t>(walk.column(first, k)) / 8) : keep_all();
      }
    }
  }

  // Pack k, which begins at `column`, times scale.
  __device__ __forceinline__ void apply(float (&x)[kWidth], float scale, int k, int column) const {
    if constexpr (kWidth == 1) {
      x[0] = kept_ >> k & 1u ? x[0] * scale : 0.f;
    } else {
      drop(x, keep_[k], scale, column);
    }
  }
  // The same with fewer instructions for 16-bit types: of floats that become a pack, and of a pack without the scale.
  template <class T>
  __device__ __forceinline__ Pack<T, kWidth> apply_and_pack(float (&x)[kWidth], float scale, int k, int column) const {
    if constexpr (kWidth == 8) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] *= scale;
      Pack<T, kWidth> pack = pack_floats<T>(x);
      clear_dropped(pack, keep_[k]);
      return pack;
    } else {
      apply(x, scale, k, column);
      return pack_floats<T>(x);
    }
  }
  template <class T>
  __device__ __forceinline__ void clear_and_unpack(Pack<T, kWidth> pack, float (&x)[kWidth], int k, int column) const {
    if constexpr (kWidth == 8) clear_dropped(pack, keep_[k]);
    unpack(pack, x);
    if constexpr (kWidth != 8) apply(x, 1.f, k, column);
  }

 private:
  uint32_t kept_ = 0xffffffffu;
  Keep8 keep_[kPacks];
};

// Short rows that cannot be moved in packs, as runs of whole rows: softmax_dropout_runs.cu. A row has up to
// kMaxRunLanes lanes with kRunGroups groups of eight columns each, which bounds registers and shared memory.
constexpr int kMaxRunLanes = 16;
template <class T>
constexpr int kRunGroups = kPackWidth<T>;
template <class T>
bool runs_fit(int keys) {
  return keys <= kMaxRunLanes * kRunGroups<T> * 8;
}
// aligned: whether runs, all of which begin at a multiple of eight rows, can be moved in packs.
template <class T>
cudaError_t softmax_forward_runs(const SoftmaxForward<T>& a, bool aligned, cudaStream_t stream);
template <class T>
cudaError_t softmax_backward_runs(const SoftmaxBackward<T>& a, bool aligned, cudaStream_t stream);

}  // namespace ls_train
