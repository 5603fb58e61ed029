// softmax_dropout of short rows whose length is no multiple of a pack, or whose tensors are not aligned. A block's rows
// are one run of memory, which begins at a whole pack where there are a multiple of eight of them: it goes through
// shared memory in packs. Block (lanes, rows): a row's lanes take its groups of eight columns in turn, at most
// kRunGroups each, so that each generator call serves one thread.
//
// softmax_dropout_fwd_run_kernel
//   The results leave through shared memory in pairs (probs, y). Bytes as softmax_dropout_fwd_kernel.
// softmax_dropout_bwd_run_kernel
//   Gradients are replaced by the results in shared memory. Bytes as softmax_dropout_bwd_kernel.
#include <cuda_pipeline.h>

#include "softmax_dropout.cuh"

namespace ls_train {
namespace {

constexpr int kRunThreads = 128;
constexpr int kRunBlocks = 5;  // a multiprocessor
static_assert(kRunThreads / kMaxRunLanes % 8 == 0);

// The block's part of the tensors.
template <class T>
struct Run {
  int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y;
  int64_t row = first + threadIdx.y;
  int lanes = static_cast<int>(blockDim.x), lane = static_cast<int>(threadIdx.x), keys;
  int count;  // elements
  int whole;  // packs
  bool live;  // whether the thread has a row

  __device__ __forceinline__ Run(int64_t rows, int keys, bool aligned) : keys(keys) {
    count = static_cast<int>(min(rows - first, static_cast<int64_t>(blockDim.y))) * keys;
    whole = aligned ? count / kPackWidth<T> : 0;
    live = row < rows;
  }
  // First column of the thread's group k; group k of any lane is beyond the row where none(k).
  __device__ __forceinline__ int column(int k) const { return (k * lanes + lane) * 8; }
  __device__ __forceinline__ bool none(int k) const { return k * lanes * 8 >= keys; }

  __device__ __forceinline__ void fetch(T* to, const T* tensor) const {
    constexpr int kWidth = kPackWidth<T>;
    const T* from = tensor + first * keys;
    for (int i = linear_thread(); i < whole; i += kRunThreads) {
      __pipeline_memcpy_async(to + i * kWidth, from + i * kWidth, 16);
    }
    for (int i = whole * kWidth + linear_thread(); i < count; i += kRunThreads) to[i] = from[i];
  }
};

// Decisions about the groups of one lane, made while the rows are on their way.
template <class T>
class RunDropout {
 public:
  __device__ __forceinline__ RunDropout(const DropoutKey& key, const Run<T>& run) {
#pragma unroll
    for (int k = 0; k < kRunGroups<T>; ++k) {
      if (k % 4 == 0) words_[k / 4] = key.active() ? 0 : 0xffffffffu;
      if (!key.active() || run.none(k)) continue;
      const Keep8 keep = keep8(key, run.row, static_cast<uint32_t>(run.column(k)) / 8);
      words_[k / 4] |= keep.bits() << (k % 4 * 8);
    }
  }
  // Bit i: whether column i of group k is kept.
  __device__ __forceinline__ uint32_t group(int k) const { return words_[k / 4] >> (k % 4 * 8) & 0xffu; }

 private:
  uint32_t words_[kRunGroups<T> / 4];
};

// Copies the run's part of each tensor to shared memory, one behind another, decides about its elements while they are
// on their way and waits for them.
template <class T, class... Tensors>
__device__ __forceinline__ RunDropout<T> fetch_and_decide(const Run<T>& run, const Dropout& dropout, T* to,
                                                          const Tensors*... tensors) {
  const int length = static_cast<int>(blockDim.y) * run.keys;  // a whole number of packs
  ((run.fetch(to, tensors), to += length), ...);
  __pipeline_commit();
  const RunDropout<T> decisions(dropout_key(dropout), run);
  __pipeline_wait_prior(0);
  __syncthreads();
  return decisions;
}

template <class T>
struct alignas(2 * sizeof(T)) Result {
  T prob, y;
};

// prob and, where bit i of `kept` is set, prob * scale, for i < 8.
template <class T>
__device__ __forceinline__ void results(Result<T> (&to)[8], const float (&probs)[8], float scale, uint32_t kept) {
  const uint32_t signs[2] = {byte_signs(kept & 0xfu), byte_signs(kept >> 4)};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (sizeof(T) == 2) {
      Pack<T, 2> pair = pack_floats<T>({probs[i], probs[i] * scale});
      reinterpret_cast<uint32_t&>(pair) &= permute(signs[i / 4], 0x8844 + i % 4 * 0x1100) | 0xffffu;
      reinterpret_cast<uint32_t&>(to[i]) = reinterpret_cast<uint32_t&>(pair);
    } else {
      to[i] = {probs[i], kept >> i & 1u ? probs[i] * scale : 0.f};
    }
  }
}

// Stores the first `left` of eight elements.
template <class E>
__device__ __forceinline__ void store_group(E* to, const E (&values)[8], int left) {
  if (left >= 8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = values[i];
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < left) to[i] = values[i];
    }
  }
}

// Loads eight elements; those from `left` on, which are of the next row or beyond the run, become `rest`.
template <class T>
__device__ __forceinline__ void load_group(float (&values)[8], const T* from, int left, float rest) {
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = to_float(from[i]);
  if (left < 8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = i < left ? values[i] : rest;
  }
}

template <class T>
__global__ void __launch_bounds__(kRunThreads, kRunBlocks)
    softmax_dropout_fwd_run_kernel(const SoftmaxForward<T> a, bool aligned) {
  extern __shared__ uint4 memory[];
  constexpr int kWidth = kPackWidth<T>;
  const Run<T> run(a.rows, a.keys, aligned);
  const int start = static_cast<int>(threadIdx.y) * a.keys;
  const RunDropout<T> dropout = fetch_and_decide(run, a.dropout, reinterpret_cast<T*>(memory), a.x);
  T* const scores = reinterpret_cast<T*>(memory) + start;
  if (a.causal || a.padding != nullptr) {
    const int visible = run.live ? a.visible(run.row) : 0;
    const bool* padding = run.live ? a.padding_of(run.row) : nullptr;
    for (int c = run.lane; run.live && c < a.keys; c += run.lanes) {
      if (c >= visible || (padding != nullptr && padding[c])) scores[c] = from_float<T>(-INFINITY);
    }
    __syncthreads();  // groups at the end of a row reach into the next one
  }
  float v[kRunGroups<T>][8];
  float largest = -INFINITY, total = 0.f;
#pragma unroll
  for (int k = 0; k < kRunGroups<T>; ++k) {
    if (run.none(k)) break;
    load_group(v[k], scores + run.column(k), a.keys - run.column(k), -INFINITY);
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = fmaxf(largest, v[k][i]);
  }
  const Exponential<T> exponential(lanes_reduce<Max>(largest, run.lanes));
#pragma unroll
  for (int k = 0; k < kRunGroups<T>; ++k) {
    if (run.none(k)) break;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      v[k][i] = exponential(v[k][i]);
      total += v[k][i];
    }
  }
  const float scale = softmax_scale(lanes_reduce<Sum>(total, run.lanes));
  __syncthreads();  // all rows are in registers
  Result<T>* const out = reinterpret_cast<Result<T>*>(memory);
#pragma unroll
  for (int k = 0; k < kRunGroups<T>; ++k) {
    if (run.none(k)) break;
#pragma unroll
    for (int i = 0; i < 8; ++i) v[k][i] *= scale;
    Result<T> group[8];
    results(group, v[k], a.dropout.scale, dropout.group(k));
    store_group(out + start + run.column(k), group, run.live ? a.keys - run.column(k) : 0);
  }
  __syncthreads();
  T* const probs = a.probs + run.first * a.keys;
  T* const y = a.y != nullptr ? a.y + run.first * a.keys : nullptr;
  for (int i = linear_thread(); i < run.whole; i += kRunThreads) {
    Pack<Result<T>, kWidth / 2> halves[2];
    Pack<T, kWidth> p, dropped;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      reinterpret_cast<uint4&>(halves[h]) = memory[2 * i + h];
#pragma unroll
      for (int j = 0; j < kWidth / 2; ++j) {
        p.v[h * kWidth / 2 + j] = halves[h].v[j].prob;
        dropped.v[h * kWidth / 2 + j] = halves[h].v[j].y;
      }
    }
    store(probs + i * kWidth, p);
    if (y != nullptr) store(y + i * kWidth, dropped);
  }
  for (int i = run.whole * kWidth + linear_thread(); i < run.count; i += kRunThreads) {
    probs[i] = out[i].prob;
    if (y != nullptr) y[i] = out[i].y;
  }
}

template <class T>
__global__ void __launch_bounds__(kRunThreads, kRunBlocks)
    softmax_dropout_bwd_run_kernel(const SoftmaxBackward<T> a, bool aligned) {
  extern __shared__ uint4 memory[];
  constexpr int kWidth = kPackWidth<T>;
  const Run<T> run(a.rows, a.keys, aligned);
  T* const grads = reinterpret_cast<T*>(memory);
  T* const probs = grads + static_cast<int>(blockDim.y) * a.keys;
  const int start = static_cast<int>(threadIdx.y) * a.keys;
  const RunDropout<T> dropout = fetch_and_decide(run, a.dropout, grads, a.dy, a.probs);
  float d[kRunGroups<T>][8], p[8];
  float total = 0.f;
#pragma unroll
  for (int k = 0; k < kRunGroups<T>; ++k) {
    if (run.none(k)) break;
    const int at = start + run.column(k), left = a.keys - run.column(k);
    load_group(d[k], grads + at, left, 0.f);
    load_group(p, probs + at, left, 0.f);
    const uint32_t kept = dropout.group(k);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      d[k][i] = kept >> i & 1u ? d[k][i] : 0.f;
      total = fmaf(d[k][i], p[i], total);
    }
  }
  total = lanes_reduce<Sum>(total, run.lanes);
  __syncthreads();  // groups at the end of a row reach into the next one
#pragma unroll
  for (int k = 0; k < kRunGroups<T>; ++k) {
    if (run.none(k)) break;
    const int at = start + run.column(k), left = a.keys - run.column(k);
    T dx[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) dx[i] = from_float<T>(to_float(probs[at + i]) * ((d[k][i] - total) * a.dropout.scale));
    store_group(grads + at, dx, run.live ? left : 0);
  }
  __syncthreads();
  T* const dx = a.dx + run.first * a.keys;
  for (int i = linear_thread(); i < run.whole; i += kRunThreads) {
    store(dx + i * kWidth, load<kWidth>(grads + i * kWidth));
  }
  for (int i = run.whole * kWidth + linear_thread(); i < run.count; i += kRunThreads) dx[i] = grads[i];
}

// Launches kernel(arguments, aligned).
template <class T, class Arguments>
cudaError_t launch_runs(void (*kernel)(Arguments, bool), const Arguments& a, bool aligned, cudaStream_t stream) {
  int lanes = 1;
  while (lanes * 8 * kRunGroups<T> < a.keys) lanes *= 2;
  const int64_t rows = kRunThreads / lanes;
  // Two elements a score; the last groups of a run are read whole.
  const size_t elements = static_cast<size_t>(rows * a.keys) * 2 + 8 * kMaxRunLanes;
  kernel<<<static_cast<unsigned>(ceil_div(a.rows, rows)), dim3(lanes, static_cast<unsigned>(rows)),
           ceil_div(elements * sizeof(T), sizeof(uint4)) * sizeof(uint4), stream>>>(a, aligned);
  return cudaGetLastError();
}

}  // namespace

template <class T>
cudaError_t softmax_forward_runs(const SoftmaxForward<T>& a, bool aligned, cudaStream_t stream) {
  return launch_runs<T>(softmax_dropout_fwd_run_kernel<T>, a, aligned, stream);
}
template <class T>
cudaError_t softmax_backward_runs(const SoftmaxBackward<T>& a, bool aligned, cudaStream_t stream) {
  return launch_runs<T>(softmax_dropout_bwd_run_kernel<T>, a, aligned, stream);
}
template cudaError_t softmax_forward_runs(const SoftmaxForward<float>&, bool, cudaStream_t);
template cudaError_t softmax_forward_runs(const SoftmaxForward<half>&, bool, cudaStream_t);
template cudaError_t softmax_forward_runs(const SoftmaxForward<bfloat16>&, bool, cudaStream_t);
template cudaError_t softmax_backward_runs(const SoftmaxBackward<float>&, bool, cudaStream_t);
template cudaError_t softmax_backward_runs(const SoftmaxBackward<half>&, bool, cudaStream_t);
template cudaError_t softmax_backward_runs(const SoftmaxBackward<bfloat16>&, bool, cudaStream_t);

}  // namespace ls_train
