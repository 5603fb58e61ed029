// What the attention kernels share: arguments, sequences of a packed batch, unused rows, launches.
//
// Queries are packed rows: sequence b owns query rows cu_q[b] to cu_q[b + 1] - 1 and key rows cu_k[b] to
// cu_k[b + 1] - 1. Grids are linear with the head varying fastest, then the tile, then the sequence: blocks that run
// together read neighbouring memory, and blocks of empty sequences end after reading two counts.
#pragma once

#include "device.cuh"

namespace ls_train {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

struct HeadRows {  // (N, H, D), last dimension contiguous
  void* data = nullptr;
  int64_t row_stride = 0, head_stride = 0;

  template <class T>
  __device__ __forceinline__ T* at(int64_t row, int head) const {
    return static_cast<T*>(data) + row * row_stride + head * head_stride;
  }
};

struct Attention {
  HeadRows q, k, v, out, dout, dq, dk, dv;
  float* lse;    // (n_q, H)
  float* delta;  // (n_q, H): row sums of dout * out, scratch of the backward
  const int32_t *cu_q, *cu_k;
  int64_t n_q, n_k;  // rows of the buffers, used or not
  int batch, heads, dim;
  int q_rows, k_rows;    // rows a block owns
  int q_tiles, k_tiles;  // blocks a sequence and head needs at its longest
  int slots;             // chunks of keys and values in shared memory at a time
  bool causal;
  float scale;
  Dropout dropout;
};

// ---------------------------------------------------------------------------------------------------------------
// Device side

struct Sequence {
  int64_t q_start, k_start;
  int q_len, k_len;
  bool causal;

  // Query i sees the keys before this position of its sequence; causal masks are aligned to the last query and key.
  __device__ __forceinline__ int key_limit(int i) const {
    if (i >= q_len) return 0;
    return causal ? max(0, min(k_len, i + 1 + k_len - q_len)) : k_len;
  }

  // The first query that sees key j.
  __device__ __forceinline__ int first_query(int j) const { return causal ? max(0, j + q_len - k_len) : 0; }
};

struct Task {
  int head, tile;
  Sequence sequence;
  int64_t used_q, used_k;  // rows of the buffers that belong to sequences
};

// The work of this block among `tiles` tiles a sequence and head; a grid without sequences has one block (no work).
__device__ __forceinline__ Task block_task(const Attention& a, int tiles) {
  const unsigned index = blockIdx.x / static_cast<unsigned>(a.heads);
  const int b = static_cast<int>(index / static_cast<unsigned>(tiles));
  Task task = {static_cast<int>(blockIdx.x - index * a.heads),
               static_cast<int>(index) - b * tiles,
               {0, 0, 0, 0, a.causal},
               a.cu_q[a.batch],
               a.cu_k[a.batch]};
  if (b < a.batch) {
    task.sequence.q_start = a.cu_q[b];
    task.sequence.k_start = a.cu_k[b];
    task.sequence.q_len = a.cu_q[b + 1] - a.cu_q[b];
    task.sequence.k_len = a.cu_k[b + 1] - a.cu_k[b];
  }
  return task;
}

// Zeros in the rows of `x` from `first` on, which belong to no sequence. All blocks of the grid share the rows.
template <class T, int kWidth>
__device__ __forceinline__ void zero_unused(const Attention& a, const HeadRows& x, int64_t first, int64_t rows) {
  const int packs = a.dim / kWidth;
  for (int64_t row = first + blockIdx.x; row < rows; row += gridDim.x) {
    for (int i = threadIdx.x; i < a.heads * packs; i += blockDim.x) {
      store(x.at<T>(row, i / packs) + i % packs * kWidth, zero_pack<T, kWidth>());
    }
  }
}

__device__ __forceinline__ void zero_unused_lse(const Attention& a, int64_t first) {
  for (int64_t row = first + blockIdx.x; row < a.n_q; row += gridDim.x) {
    for (int head = threadIdx.x; head < a.heads; head += blockDim.x) a.lse[row * a.heads + head] = 0.f;
  }
}

// ---------------------------------------------------------------------------------------------------------------
// Host side

inline HeadRows head_rows(const TensorRef& x) { return {x.data, x.strides[0], x.strides[1]}; }

inline Attention attention_arguments(const TensorRef& q, const TensorRef& k, const TensorRef& v, const TensorRef& out,
                                     const TensorRef& lse, const TensorRef& cu_q, const TensorRef& cu_k,
                                     const TensorRef& seed, bool causal, double scale, double p, int64_t offset) {
  Attention a = {};
  a.q = head_rows(q);
  a.k = head_rows(k);
  a.v = head_rows(v);
  a.out = head_rows(out);
  a.lse = lse.as<float>();
  a.cu_q = cu_q.as<const int32_t>();
  a.cu_k = cu_k.as<const int32_t>();
  a.n_q = q.sizes[0];
  a.n_k = k.sizes[0];
  a.batch = static_cast<int>(cu_q.sizes[0]) - 1;
  a.heads = static_cast<int>(q.sizes[1]);
  a.dim = static_cast<int>(q.sizes[2]);
  a.causal = causal;
  a.scale = static_cast<float>(scale);
  a.dropout = make_dropout(seed, p, offset);
  return a;
}

// One block a sequence, head and tile, and at least one, which writes the zeros of a batch without sequences.
inline cudaError_t launch_attention(void (*kernel)(Attention), const Attention& a, int tiles, int threads, int memory,
                                    cudaStream_t stream) {
  constexpr int kMemoryWithoutOptIn = 48 * 1024;
  if (memory > kMemoryWithoutOptIn) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory);
    if (error != cudaSuccess) return error;
  }
  const int64_t blocks = static_cast<int64_t>(a.batch > 0 ? a.batch : 1) * a.heads * tiles;
  if (blocks == 0) return cudaSuccess;
  kernel<<<static_cast<unsigned>(blocks), threads, memory, stream>>>(a);
  return cudaGetLastError();
}

// The path for every type, head size, stride and architecture.
cudaError_t attention_fwd_plain(Attention a, DType dtype, int64_t max_q, cudaStream_t stream);
cudaError_t attention_bwd_plain(Attention a, DType dtype, int64_t max_q, int64_t max_k, cudaStream_t stream);

}  // namespace ls_train
