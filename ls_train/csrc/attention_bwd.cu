// Attention backward on tensor cores: dk, dv and, where one block holds all keys of a sequence, dq; and the launcher of
// every backward. Heads of up to 64 have their own kernels for most lengths, in attention_bwd_short.cu and
// attention_bwd_long.cu (attention_plan.cuh).
//
// A block owns the keys and values of one sequence and head (up to 128 at head size 64; a part of 64 or 32 when there
// are more, then attention_bwd_dq.cu makes dq) and goes through the queries in tiles of up to 64. For each tile:
//   1. 16 queries x 32 keys a warp: scores and dout * v^T in registers, softmax gradient there, the probabilities that
//      dropout kept and the gradient of the scores to shared memory as 16-bit numbers;
//   2. 16 queries x 32 or 64 columns a warp: dq = dscores k;
//   3. 16 keys x 32 or 64 columns a warp: dv += probs^T dout and dk += dscores^T q, in registers until the last tile.
// Every sum is made by one thread in a fixed order. Bytes, where one block holds the keys: q, k, v, dout read, dq, dk,
// dv written once, out read where there are more than 32 keys (otherwise its row sums follow from the rest):
// (4 Nq + 4 Nk) * H * D * 2 and 4 * Nq * H of lse.
#include "attention_tiles.cuh"
#include "ops.h"

namespace ls_train {
namespace {

constexpr int kMaxKeys = 128;             // of a block
constexpr int kWholeMemory = 160 * 1024;  // beyond, two kernels keep a multiprocessor busier than one block does

// Columns of dk and dv that a warp accumulates. Where the accumulators live through a loop over tiles of queries, 64
// would spill.
template <int kDim, bool kWhole>
constexpr int kColumns = kWhole && kDim % 64 == 0 ? 64 : 32;

template <int kDim, bool kWhole>
constexpr int kParts = kDim / kColumns<kDim, kWhole>;

// Keys of a block that owns a part of the sequence, and queries of one of its tiles.
template <int kDim>
constexpr int kPartRows = kDim <= 128 ? 64 : 32;

template <int kDim, bool kWhole>
constexpr int kMaxThreads = (kWhole ? (kDim <= 64 ? 8 : 16) : kPartRows<kDim> / kWarpRows * kParts<kDim, kWhole>)*kWarp;

// Elements between rows of probabilities: 16 bytes apart modulo 64, which keeps the banks of eight rows different.
__host__ __device__ constexpr int score_stride(int keys) { return keys + 8; }

// ---------------------------------------------------------------------------------------------------------------
// Kernel

template <class T, int kDim>
struct Buffers {       // in shared memory
  T *k, *v;            // (k_rows, kTileStride)
  T *q, *dout;         // (q_rows, kTileStride)
  T *probs, *dscores;  // (q_rows, score_stride(k_rows)); before them, out: (q_rows, kTileStride)
  float *lse, *delta;  // (q_rows,)

  __device__ __forceinline__ Buffers(const Attention& a, void* memory) {
    k = static_cast<T*>(memory);
    v = k + a.k_rows * kTileStride<kDim>;
    q = v + a.k_rows * kTileStride<kDim>;
    dout = q + a.q_rows * kTileStride<kDim>;
    lse = reinterpret_cast<float*>(dout + a.q_rows * kTileStride<kDim>);
    delta = lse + a.q_rows;
    probs = reinterpret_cast<T*>(delta + a.q_rows);
    dscores = probs + a.q_rows * score_stride(a.k_rows);
  }
};

// delta[i] = dout * out of row i; four lanes a row.
template <class T, int kDim>
__device__ __forceinline__ void sum_rows(const Buffers<T, kDim>& buffers, int padded_rows) {
  const int quad = threadIdx.x % 4;
  for (int row = static_cast<int>(threadIdx.x) / 4; row < padded_rows; row += static_cast<int>(blockDim.x) / 4) {
    float sum = 0.f;
#pragma unroll
    for (int column = 0; column < kDim; column += 32) {
      float y[8], dy[8];
      load_floats<8>(buffers.probs + row * kTileStride<kDim> + column + quad * 8, y);
      load_floats<8>(buffers.dout + row * kTileStride<kDim> + column + quad * 8, dy);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += y[i] * dy[i];
    }
    sum = row_reduce<Sum>(sum);
    if (quad == 0) buffers.delta[row] = sum;
  }
}

// Step 1 for 16 queries from tile row `tile_row` on, query `first` of the sequence, and the 32 keys of block key `key`.
template <class T, int kDim>
__device__ __forceinline__ void score_gradients(const Attention& a, const Buffers<T, kDim>& buffers, const Task& task,
                                                KeepRows keep, float keep_scale, int tile_row, int first, int key,
                                                int block_key, bool sum_delta) {
  constexpr int kStride = kTileStride<kDim>;
  const Sequence& seq = task.sequence;
  const int lane = threadIdx.x % kWarp;
  float s[kChunkTiles][4] = {}, d[kChunkTiles][4] = {};
  if (seq.key_limit(min(first + kWarpRows, seq.q_len) - 1) > block_key + key) {  // otherwise nothing is seen: zeros
    add_dots<kDim>(s, buffers.q + tile_row * kStride, buffers.k + key * kStride);
    add_dots<kDim>(d, buffers.dout + tile_row * kStride, buffers.v + key * kStride);
  }
  RowPair pair;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + h * 8;
    pair.lse2[h] = buffers.lse[tile_row + row] * kLog2E;
    pair.delta[h] = sum_delta ? 0.f : buffers.delta[tile_row + row];
    pair.limit[h] = seq.key_limit(first + row) - block_key - key;
  }
  softmax_gradient(s, d, keep, keep_scale, a.scale * kLog2E, pair, sum_delta);
#pragma unroll
  for (int t = 0; t < kChunkTiles; ++t) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = (tile_row + lane / 4 + h * 8) * score_stride(a.k_rows) + key + t * 8 + lane % 4 * 2;
      *reinterpret_cast<uint32_t*>(buffers.probs + at) = pack_pair(s[t][h * 2], s[t][h * 2 + 1], T());
      *reinterpret_cast<uint32_t*>(buffers.dscores + at) = pack_pair(d[t][h * 2], d[t][h * 2 + 1], T());
    }
  }
}

template <class T, int kDim, bool kWhole>
__global__ void __launch_bounds__(kMaxThreads<kDim, kWhole>, 512 / kMaxThreads<kDim, kWhole>)
    attention_bwd_kernel(Attention a) {
#ifdef LS_TRAIN_TENSOR_CORES
  constexpr int kStride = kTileStride<kDim>;
  constexpr int kPartTiles = kColumns<kDim, kWhole> / 8;
  extern __shared__ uint4 shared[];
  const Buffers<T, kDim> buffers(a, shared);
  const Task task = block_task(a, a.k_tiles);
  const Sequence& seq = task.sequence;
  const int block_key = task.tile * a.k_rows;
  const int keys = max(0, min(a.k_rows, seq.k_len - block_key));
  const int chunks = round_up(keys, kChunk) / kChunk;
  const bool sum_delta = kWhole && chunks <= 1;
  if (seq.q_len > 0) {
    load_rows<kDim>(buffers.k, a.k, seq.k_start + block_key, task.head, keys, chunks * kChunk, a.dim);
    load_rows<kDim>(buffers.v, a.v, seq.k_start + block_key, task.head, keys, chunks * kChunk, a.dim);
  }
  const DropoutKey dropout = dropout_key(a.dropout);
  const int score_width = score_stride(a.k_rows);
  const int lane = threadIdx.x % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const int warp_key = warp / kParts<kDim, kWhole> * kWarpRows;
  const int warp_column = warp % kParts<kDim, kWhole> * kColumns<kDim, kWhole>;
  float dk[kPartTiles][4] = {}, dv[kPartTiles][4] = {};

  // A part of the keys leaves out the queries before the first that sees any of it. The whole has one tile of queries;
  // without keys it still writes the zeros of dq.
  const int start = kWhole ? 0 : keys > 0 ? seq.first_query(block_key) : seq.q_len;
  for (int first = start; first < seq.q_len; first += a.q_rows) {
    const int rows = min(a.q_rows, seq.q_len - first);
    const int padded = round_up(rows, kWarpRows);
    const int64_t row = seq.q_start + first;
    if (!kWhole && first > start) __syncthreads();
    load_rows<kDim>(buffers.q, a.q, row, task.head, rows, padded, a.dim);
    load_rows<kDim>(buffers.dout, a.dout, row, task.head, rows, padded, a.dim);
    if (kWhole && !sum_delta) load_rows<kDim>(buffers.probs, a.out, row, task.head, rows, padded, a.dim);
    for (int i = threadIdx.x; i < padded; i += blockDim.x) {
      const int64_t at = (row + min(i, rows - 1)) * a.heads + task.head;
      copy_async<4>(buffers.lse + i, a.lse + at, true);
      if (!kWhole) copy_async<4>(buffers.delta + i, a.delta + at, true);
    }
    commit_copies();
    Unit unit = {0, 0};
    const int end_row = chunks > 0 ? padded : 0;
    unit.advance(warp, chunks, end_row);
    const auto keep_unit = [&] {
      return keep_rows(dropout, row + unit.row + lane / 4, task.head, block_key / kChunk + unit.chunk);
    };
    KeepRows keep = {};
    if (unit.row < end_row) keep = keep_unit();
    wait_copies<0>();
    __syncthreads();
    if (kWhole && !sum_delta) {
      sum_rows(buffers, padded);
      __syncthreads();
    }

    while (unit.row < end_row) {
      score_gradients(a, buffers, task, keep, dropout.scale, unit.row, first + unit.row, unit.chunk * kChunk, block_key,
                      sum_delta);
      unit.advance(warps, chunks, end_row);
      if (unit.row < end_row) keep = keep_unit();
    }
    __syncthreads();

    if constexpr (kWhole) {
      for (int unit = warp; unit < padded / kWarpRows * kParts<kDim, kWhole>; unit += warps) {
        const int tile_row = unit / kParts<kDim, kWhole> * kWarpRows;
        const int column = unit % kParts<kDim, kWhole> * kColumns<kDim, kWhole>;
        const T* scores_row = buffers.dscores + (tile_row + lane % 16) * score_width + lane / 16 * 8;
        float dq[kPartTiles][4] = {};
#pragma unroll 2
        for (int key = 0; key < keys; key += kWarpRows) {
          uint32_t dscores[4];
          load_matrices(dscores, scores_row + key);
          add_product(dq, dscores, buffers.k + key * kStride + column, kStride);
        }
        store_rows(a.dq.at<T>(row + tile_row, task.head) + column, a.dq.row_stride, rows - tile_row, a.dim - column, dq,
                   {a.scale, a.scale});
      }
    }
    if (warp_key < keys) {
      // Left factors transposed: lanes name the queries' rows so that the four matrices come in the order of the keys.
      const int at = (lane % 8 + lane / 16 * 8) * score_width + warp_key + lane / 8 % 2 * 8;
#pragma unroll 1  // two steps at once spill
      for (int i = 0; i < padded; i += kWarpRows) {
        uint32_t probs[4], dscores[4];
        load_matrices_transposed(probs, buffers.probs + at + i * score_width);
        add_product(dv, probs, buffers.dout + i * kStride + warp_column, kStride);
        load_matrices_transposed(dscores, buffers.dscores + at + i * score_width);
        add_product(dk, dscores, buffers.q + i * kStride + warp_column, kStride);
      }
    }
    if constexpr (kWhole) break;
  }

  if (warp_key < keys) {
    const int64_t row = seq.k_start + block_key + warp_key;
    const int count = keys - warp_key;
    const int columns = a.dim - warp_column;
    store_rows(a.dk.at<T>(row, task.head) + warp_column, a.dk.row_stride, count, columns, dk, {a.scale, a.scale});
    store_rows(a.dv.at<T>(row, task.head) + warp_column, a.dv.row_stride, count, columns, dv,
               {dropout.scale, dropout.scale});
  }
  if (kWhole) zero_unused<T, 8>(a, a.dq, task.used_q, a.n_q);
  zero_unused<T, 8>(a, a.dk, task.used_k, a.n_k);
  zero_unused<T, 8>(a, a.dv, task.used_k, a.n_k);
#endif
}

// ---------------------------------------------------------------------------------------------------------------
// Launcher

template <class T, int kDim>
int shared_bytes(int q_rows, int k_rows) {
  const int scores = q_rows * std::max(2 * score_stride(k_rows), kTileStride<kDim>);
  const int elements = 2 * (q_rows + k_rows) * kTileStride<kDim> + scores;
  return elements * static_cast<int>(sizeof(T)) + 2 * q_rows * static_cast<int>(sizeof(float));
}

template <class T, int kDim, bool kWhole>
cudaError_t launch(Attention a, int64_t max_k, cudaStream_t stream) {
  const int64_t keys = std::max<int64_t>(max_k, 1);
  a.k_tiles = static_cast<int>(ceil_div<int64_t>(keys, a.k_rows));
  const int warp_keys = round_up(static_cast<int>(std::min<int64_t>(keys, a.k_rows)), kWarpRows) / kWarpRows;
  return launch_attention(attention_bwd_kernel<T, kDim, kWhole>, a, a.k_tiles, warp_keys * kParts<kDim, kWhole> * kWarp,
                          shared_bytes<T, kDim>(a.q_rows, a.k_rows), stream);
}

template <class T, int kDim>
cudaError_t launch(Attention a, DType dtype, int64_t max_q, int64_t max_k, int memory_limit, cudaStream_t stream) {
  constexpr int kWarpKeys = kMaxThreads<kDim, true> / kWarp / kParts<kDim, true> * kWarpRows;
  const int64_t queries = round_up<int64_t>(std::max<int64_t>(max_q, 1), kWarpRows);
  const int64_t keys = round_up<int64_t>(std::max<int64_t>(max_k, 1), kChunk);
  if (queries <= kMaxKeys && keys <= kMaxKeys && round_up<int64_t>(max_k, kWarpRows) <= kWarpKeys) {
    a.q_rows = static_cast<int>(queries);
    a.k_rows = static_cast<int>(keys);
    const bool fits = shared_bytes<T, kDim>(a.q_rows, a.k_rows) <= std::min(memory_limit, kWholeMemory);
    if (fits) return launch<T, kDim, true>(a, max_k, stream);
  }
  const cudaError_t error = attention_bwd_dq(a, dtype, max_q, max_k, memory_limit, stream);
  if (error != cudaSuccess) return error;
  a.q_rows = kPartRows<kDim>;
  a.k_rows = kPartRows<kDim>;
  return launch<T, kDim, false>(a, max_k, stream);
}

}  // namespace

cudaError_t attention_bwd(const TensorRef& dq, const TensorRef& dk, const TensorRef& dv, const TensorRef& workspace,
                          const TensorRef& dout, const TensorRef& q, const TensorRef& k, const TensorRef& v,
                          const TensorRef& out, const TensorRef& lse, const TensorRef& cu_q, const TensorRef& cu_k,
                          const TensorRef& seed, int64_t max_q, int64_t max_k, bool causal, double scale, double p,
                          int64_t offset, cudaStream_t stream) {
  Attention a = attention_arguments(q, k, v, out, lse, cu_q, cu_k, seed, causal, scale, p, offset);
  a.dout = head_rows(dout);
  a.dq = head_rows(dq);
  a.dk = head_rows(dk);
  a.dv = head_rows(dv);
  a.delta = workspace.as<float>();
  int memory_limit = 0;
  const cudaError_t error = tensor_core_memory(memory_limit, a.dim, {&q, &k, &v, &out, &dout, &dq, &dk, &dv});
  if (error != cudaSuccess) return error;
  if (memory_limit == 0) return attention_bwd_plain(a, q.dtype, max_q, max_k, stream);
  if (is_long(a, max_q, max_k)) return attention_bwd_long(a, q.dtype, max_q, max_k, stream);
  if (is_short(a, max_q, max_k)) return attention_bwd_short(a, q.dtype, max_q, max_k, stream);
  return dispatch_half_type(q.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return dispatch_dim(a.dim, [&](auto dim) {
      return launch<T, decltype(dim)::value>(a, q.dtype, max_q, max_k, memory_limit, stream);
    });
  });
}

}  // namespace ls_train
