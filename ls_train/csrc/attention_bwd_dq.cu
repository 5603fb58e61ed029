// Attention backward on tensor cores for keys that do not fit one block, heads of more than 64: gradient of the
// queries.
//
// As the forward: a block owns up to 64 queries of one sequence and head, a warp 16 of them, and chunks of 32 keys and
// values pass by. Also leaves the rows' sums of dout * out for the kernel that makes dk and dv (attention_bwd.cu).
// Bytes: q, k, v, out, dout read and dq written once, (4 Nq + 2 Nk) * H * D * 2, and 8 * Nq * H of lse and sums; k and
// v once more from L2 for every further 64 queries.
#include "attention_tiles.cuh"

namespace ls_train {
namespace {

constexpr int kMaxWarps = 4;

// ---------------------------------------------------------------------------------------------------------------
// Kernel

template <class T, int kDim>
__global__ void __launch_bounds__(kMaxWarps* kWarp) attention_bwd_dq_kernel(Attention a) {
#ifdef LS_TRAIN_TENSOR_CORES
  constexpr int kStride = kTileStride<kDim>;
  constexpr int kTiles = kDim / 8;
  extern __shared__ uint4 shared[];  // q, dout: (q_rows, kStride), then the ring of chunks
  const Task task = block_task(a, a.q_tiles);
  const Sequence& seq = task.sequence;
  const int first = task.tile * a.q_rows;
  const int rows = min(a.q_rows, seq.q_len - first);
  T* q = reinterpret_cast<T*>(shared);
  T* dout = q + a.q_rows * kStride;
  const int chunks = rows > 0 ? round_up(seq.key_limit(first + rows - 1), kChunk) / kChunk : 0;
  const KeyRing<T, kDim> ring = {dout + a.q_rows * kStride, a, task, chunks};
  if (chunks > 0) {
    const int padded = round_up(rows, kWarpRows);
    load_rows<kDim>(q, a.q, seq.q_start + first, task.head, rows, padded, a.dim);
    load_rows<kDim>(dout, a.dout, seq.q_start + first, task.head, rows, padded, a.dim);
  }
  ring.start();
  const DropoutKey dropout = dropout_key(a.dropout);
  zero_unused<T, 8>(a, a.dq, task.used_q, a.n_q);
  if (rows <= 0) return;

  const int lane = threadIdx.x % kWarp;
  const int warp_row = static_cast<int>(threadIdx.x) / kWarp * kWarpRows;
  const int row = first + warp_row + lane / 4;
  int limit[2];
  RowPair pair;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t packed = seq.q_start + min(row + h * 8, seq.q_len - 1);
    limit[h] = seq.key_limit(row + h * 8);
    pair.lse2[h] = a.lse[packed * a.heads + task.head] * kLog2E;
    pair.delta[h] = row_sum<kDim, T>(a, packed, task.head);
    if (lane % 4 == 0 && row + h * 8 < seq.q_len) a.delta[packed * a.heads + task.head] = pair.delta[h];
  }

  float dq[kTiles][4] = {};
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const KeepRows keep = keep_rows(dropout, seq.q_start + row, task.head, chunk);
    ring.wait();
    if (warp_row < rows) {
      float s[kChunkTiles][4] = {}, d[kChunkTiles][4] = {};
      add_dots<kDim>(s, q + warp_row * kStride, ring.keys(chunk));
      add_dots<kDim>(d, dout + warp_row * kStride, ring.values(chunk));
      pair.limit[0] = limit[0] - chunk * kChunk;
      pair.limit[1] = limit[1] - chunk * kChunk;
      softmax_gradient(s, d, keep, dropout.scale, a.scale * kLog2E, pair, false);
#pragma unroll
      for (int t = 0; t < kChunkTiles; t += 2) {
        uint32_t dscores[4];
        as_factor<T>(dscores, d[t], d[t + 1]);
        add_product(dq, dscores, ring.keys(chunk) + t * 8 * kStride, kStride);
      }
    }
    ring.advance(chunk);
  }
  if (warp_row >= rows) return;
  store_rows(a.dq.at<T>(seq.q_start + first + warp_row, task.head), a.dq.row_stride, rows - warp_row, a.dim, dq,
             {a.scale, a.scale});
#endif
}

template <class T, int kDim>
cudaError_t launch(Attention a, int64_t max_q, int64_t max_k, int memory_limit, cudaStream_t stream) {
  constexpr int kRowBytes = 2 * kTileStride<kDim> * static_cast<int>(sizeof(T));
  const RingPlan plan = plan_ring(kRowBytes, kChunk * kRowBytes, kMaxWarps, max_q, max_k, memory_limit);
  a.q_rows = plan.warps * kWarpRows;
  a.q_tiles = plan.tiles;
  a.slots = plan.slots;
  return launch_attention(attention_bwd_dq_kernel<T, kDim>, a, a.q_tiles, plan.warps * kWarp, plan.memory, stream);
}

}  // namespace

cudaError_t attention_bwd_dq(const Attention& a, DType dtype, int64_t max_q, int64_t max_k, int memory_limit,
                             cudaStream_t stream) {
  return dispatch_half_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return dispatch_dim(
        a.dim, [&](auto dim) { return launch<T, decltype(dim)::value>(a, max_q, max_k, memory_limit, stream); });
  });
}

}  // namespace ls_train
