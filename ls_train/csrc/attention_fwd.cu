// Attention forward on tensor cores, and the launcher of every forward. Heads of up to 64 have their own kernels for
// most lengths, in attention_fwd_short.cu and attention_fwd_long.cu (attention_plan.cuh).
//
// A block owns up to 128 queries of one sequence and head, a warp 16 of them; translation lengths are one block of
// one to eight warps, and several blocks a multiprocessor keep the copies of some in flight while others compute. Keys
// and values arrive in chunks of 32, up to four chunks (128 keys) at once; softmax goes along with running maximum and
// sum, so any length works. Scores and sums stay in float32 registers.
// Bytes: q, k, v read and out written once, (2 Nq + 2 Nk) * H * D * 2, and 4 * Nq * H of lse; k and v once more from
// L2 for every further 128 queries.
#include "attention_tiles.cuh"
#include "ops.h"

namespace ls_train {
namespace {

constexpr int kMaxWarps = 8;

// ---------------------------------------------------------------------------------------------------------------
// Kernel

template <class T, int kDim>
__global__ void __launch_bounds__(kMaxWarps* kWarp) attention_fwd_kernel(Attention a) {
#ifdef LS_TRAIN_TENSOR_CORES
  constexpr int kStride = kTileStride<kDim>;
  constexpr int kTiles = kDim / 8;
  extern __shared__ uint4 shared[];  // q: (q_rows, kStride), then the ring of chunks
  const Task task = block_task(a, a.q_tiles);
  const Sequence& seq = task.sequence;
  const int first = task.tile * a.q_rows;
  const int rows = min(a.q_rows, seq.q_len - first);
  T* q = reinterpret_cast<T*>(shared);
  const int chunks = rows > 0 ? round_up(seq.key_limit(first + rows - 1), kChunk) / kChunk : 0;
  const KeyRing<T, kDim> ring = {q + a.q_rows * kStride, a, task, chunks};
  if (chunks > 0) load_rows<kDim>(q, a.q, seq.q_start + first, task.head, rows, round_up(rows, kWarpRows), a.dim);
  ring.start();
  const DropoutKey dropout = dropout_key(a.dropout);
  zero_unused<T, 8>(a, a.out, task.used_q, a.n_q);
  zero_unused_lse(a, task.used_q);
  if (rows <= 0) return;

  const int lane = threadIdx.x % kWarp;
  const int warp_row = static_cast<int>(threadIdx.x) / kWarp * kWarpRows;
  const int row = first + warp_row + lane / 4;  // this thread's rows in the sequence: row, row + 8
  const int limit[2] = {seq.key_limit(row), seq.key_limit(row + 8)};
  const float scale2 = a.scale * kLog2E;
  float out[kTiles][4] = {};
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {};  // of the scores over ln 2; sums of this thread's columns

  for (int chunk = 0; chunk < chunks; ++chunk) {
    const KeepRows keep = keep_rows(dropout, seq.q_start + row, task.head, chunk);
    ring.wait();
    if (warp_row < rows) {
      float s[kChunkTiles][4] = {};
      add_dots<kDim>(s, q + warp_row * kStride, ring.keys(chunk));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float largest = maximum[h];
#pragma unroll
        for (int i = 0; i < kChunkTiles * 2; ++i) {
          const int key = chunk * kChunk + i / 2 * 8 + lane % 4 * 2 + i % 2;
          float& score = s[i / 2][h * 2 + i % 2];
          score = key < limit[h] ? score * scale2 : -INFINITY;
          largest = fmaxf(largest, score);
        }
        largest = row_reduce<Max>(largest);
        const float shift = largest == -INFINITY ? 0.f : largest;  // no key seen yet: exp2(-inf - 0) = 0
        const float rescale = fast_exp2(maximum[h] - shift);
        maximum[h] = largest;
        sum[h] *= rescale;
#pragma unroll
        for (int i = 0; i < kChunkTiles * 2; ++i) {
          float& score = s[i / 2][h * 2 + i % 2];
          const float p = fast_exp2(score - shift);
          sum[h] += p;
          score = keep(h, i) ? p : 0.f;
        }
        if (chunk > 0) {
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            out[t][h * 2] *= rescale;
            out[t][h * 2 + 1] *= rescale;
          }
        }
      }
#pragma unroll
      for (int t = 0; t < kChunkTiles; t += 2) {
        uint32_t probs[4];
        as_factor<T>(probs, s[t], s[t + 1]);
        add_product(out, probs, ring.values(chunk) + t * 8 * kStride, kStride);
      }
    }
    ring.advance(chunk);
  }
  if (warp_row >= rows) return;

  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float total = row_reduce<Sum>(sum[h]);
    factor[h] = total == 0.f ? 0.f : dropout.scale / total;
    if (lane % 4 == 0 && row + h * 8 < seq.q_len) {
      const float lse = total == 0.f ? -INFINITY : (maximum[h] + log2f(total)) * kLn2;
      a.lse[(seq.q_start + row + h * 8) * a.heads + task.head] = lse;
    }
  }
  store_rows(a.out.at<T>(seq.q_start + first + warp_row, task.head), a.out.row_stride, rows - warp_row, a.dim, out,
             factor);
#endif
}

// ---------------------------------------------------------------------------------------------------------------
// Launcher

template <class T, int kDim>
cudaError_t launch(Attention a, int64_t max_q, int64_t max_k, int memory_limit, cudaStream_t stream) {
  constexpr int kRowBytes = kTileStride<kDim> * static_cast<int>(sizeof(T));
  const RingPlan plan = plan_ring(kRowBytes, 2 * kChunk * kRowBytes, kMaxWarps, max_q, max_k, memory_limit);
  a.q_rows = plan.warps * kWarpRows;
  a.q_tiles = plan.tiles;
  a.slots = plan.slots;
  return launch_attention(attention_fwd_kernel<T, kDim>, a, a.q_tiles, plan.warps * kWarp, plan.memory, stream);
}

}  // namespace

cudaError_t attention_fwd(const TensorRef& out, const TensorRef& lse, const TensorRef& q, const TensorRef& k,
                          const TensorRef& v, const TensorRef& cu_q, const TensorRef& cu_k, const TensorRef& seed,
                          int64_t max_q, int64_t max_k, bool causal, double scale, double p, int64_t offset,
                          cudaStream_t stream) {
  const Attention a = attention_arguments(q, k, v, out, lse, cu_q, cu_k, seed, causal, scale, p, offset);
  int memory_limit = 0;
  const cudaError_t error = tensor_core_memory(memory_limit, a.dim, {&q, &k, &v, &out});
  if (error != cudaSuccess) return error;
  if (memory_limit == 0) return attention_fwd_plain(a, q.dtype, max_q, stream);
  if (is_long(a, max_q, max_k)) return attention_fwd_long(a, q.dtype, max_q, stream);
  if (is_short(a, max_q, max_k)) return attention_fwd_short(a, q.dtype, max_q, max_k, stream);
  return dispatch_half_type(q.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return dispatch_dim(
        a.dim, [&](auto dim) { return launch<T, decltype(dim)::value>(a, max_q, max_k, memory_limit, stream); });
  });
}

}  // namespace ls_train
