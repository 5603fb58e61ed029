// Attention backward of 33 to 128 tokens with heads of 33 to 64, on tensor cores: dq, dk and dv in one pass.
//
// A block owns a sequence and head, a warp 16 of its keys. It makes scores and their gradients transposed (keys x
// queries), which are then left factors of dv and dk as they stand; only gradients of scores pass through shared
// memory, once, for dq, of which a warp makes 16 queries. Dropout's decisions about the whole sequence and head are
// drawn while the rows are under way and wait as bits in shared memory: a generator call goes along the keys of a
// query, a ballot turns 32 queries of it into a word a key. Every sum is made by one thread in a fixed order.
// Bytes: q, k, v, out, dout read, dq, dk, dv written once, (4 Nq + 4 Nk) * H * D * 2, and 4 * Nq * H of lse.
#include "attention_block.cuh"

namespace ls_train {
namespace {

// Blocks that a multiprocessor is to hold: older ones have less shared memory.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
template <int kRows>
constexpr int kBlocks = kRows == 64 ? 3 : 1;
#else
template <int kRows>
constexpr int kBlocks = kRows == 64 ? 4 : 2;
#endif

// Parts of shared memory; 99 KiB of 128 rows, which is what devices of compute capability 8.6 have.
template <class T, int kRows>
struct Buffers {
  T q[kRows * kShortDim], dout[kRows * kShortDim], k[kRows * kShortDim], v[kRows * kShortDim];
  T dscores[kRows * kRows];              // (keys, queries), pieces of eight queries in places of their own
  uint32_t kept[kRows / kChunk][kRows];  // (32 queries, key): bit i decides query i
  float lse2[kRows], delta[kRows];       // of queries; the latter: dout * out without the keep scale
};

// Place of eight queries in the row of a key.
template <int kRows>
__device__ __forceinline__ int score_place(int key, int piece) {
  return key * kRows + (piece ^ (key & 7)) * 8;
}

// Draws what the queries decide about the keys that they see; `dropout` is active.
template <int kWarps, int kRows>
__device__ __forceinline__ void draw_all(uint32_t (&kept)[kRows / kChunk][kRows], const DropoutKey& dropout,
                                         const Sequence& seq, int head) {
  constexpr int kChunks = kRows / kChunk;
  const int lane = threadIdx.x % kWarp;
#pragma unroll 2
  for (int unit = static_cast<int>(uniform(threadIdx.x / kWarp)); unit < kChunks * kChunks * 4; unit += kWarps) {
    const int part = unit % kChunks, chunk = unit / kChunks % kChunks, quad = unit / (kChunks * kChunks);
    const int first = part * kChunk;
    if (first >= seq.q_len || chunk * kChunk >= seq.key_limit(min(first + kChunk, seq.q_len) - 1)) continue;
    const Keep8 keep = keep8_attention(dropout, seq.q_start + first + lane, head, chunk, quad);
#pragma unroll
    for (int t = 0; t < kChunkTiles; ++t) {
      const uint32_t even = __ballot_sync(kAllLanes, keep[2 * t]), odd = __ballot_sync(kAllLanes, keep[2 * t + 1]);
      uint2* const keys = reinterpret_cast<uint2*>(&kept[part][chunk * kChunk + t * 8 + quad * 2]);
      if (lane == 0) *keys = make_uint2(even, odd);
    }
  }
}

// In: scores (unscaled) and dout * values, both transposed. Out, rounded: probabilities as dropout let them through and
// gradients of the scaled scores, both without the keep scale.
template <class T, int kRows>
__device__ __forceinline__ void differentiate(Factors& probs, Factors& dscores, const Scores& s, const Scores& d,
                                              const Buffers<T, kRows>& shared, const uint32_t (&kept)[2], int query,
                                              float scale2) {
  const int quad = threadIdx.x % 4;
#pragma unroll
  for (int t = 0; t < kChunkTiles; ++t) {
    const float2 lse2 = *reinterpret_cast<const float2*>(&shared.lse2[query + t * 8 + quad * 2]);
    const float2 delta = *reinterpret_cast<const float2*>(&shared.delta[query + t * 8 + quad * 2]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float p0 = fast_exp2(s[t][h * 2] * scale2 - lse2.x), p1 = fast_exp2(s[t][h * 2 + 1] * scale2 - lse2.y);
      const float kept0 = kept[h] & 1u << (t * 8) ? p0 : 0.f, kept1 = kept[h] & 2u << (t * 8) ? p1 : 0.f;
      probs[t][h] = pack_pair(kept0, kept1, T());
      dscores[t][h] = pack_pair(kept0 * d[t][h * 2] - p0 * delta.x, kept1 * d[t][h * 2 + 1] - p1 * delta.y, T());
    }
  }
}

// kRows: the longest sequence.
template <class T, int kRows>
__global__ void __launch_bounds__(kRows * 2, kBlocks<kRows>) attention_bwd_block_kernel(Attention a) {
#ifdef LS_TRAIN_TENSOR_CORES
  constexpr int kWarps = kRows / kWarpRows, kStep = kWarps * kWarp / 8, kParts = kRows / kStep;
  constexpr uint32_t kSide = kRows * kRowBytes;
  extern __shared__ __align__(128) uint4 memory[];
  Buffers<T, kRows>& shared = *reinterpret_cast<Buffers<T, kRows>*>(memory);
  const Task task = short_task(a, 1, kRows);
  const Sequence& seq = task.sequence;
  const int read_keys = seq.q_len > 0 ? seq.k_len : 0;
  // The probability of a single key is one, whatever q and k are: taken as zeros they get no gradient, not even the
  // rounding of out.
  const bool is_single = seq.k_len == 1;
  load_side<kWarps, kRows>(shared.dout, a.dout, seq.q_start, task.head, seq.q_len, a.dim);
  commit_copies();
  load_side<kWarps, kRows>(shared.q, a.q, seq.q_start, task.head, is_single ? 0 : seq.q_len, a.dim);
  load_side<kWarps, kRows>(shared.k, a.k, seq.k_start, task.head, is_single ? 0 : read_keys, a.dim);
  load_side<kWarps, kRows>(shared.v, a.v, seq.k_start, task.head, read_keys, a.dim);
  commit_copies();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  // Pieces of out, of the rows of dout that this thread has copied: it need not wait for others to multiply them.
  Pack<T, 8> out[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const int row = thread / 8 + i * kStep, column = thread % 8 * 8;
    out[i] = zero_pack<T, 8>();
    if (row < seq.q_len && column < a.dim) out[i] = load<8>(a.out.at<const T>(seq.q_start + row, task.head) + column);
  }
  const DropoutKey dropout = dropout_key(a.dropout);
  if (thread < kRows) {  // rows that are no queries have no probabilities
    float lse = INFINITY;
    if (thread < seq.q_len) lse = is_single ? 0.f : a.lse[(seq.q_start + thread) * a.heads + task.head];
    shared.lse2[thread] = fmaxf(lse * kLog2E, kLowestLse);
  }
  if (dropout.active()) {
    draw_all<kWarps, kRows>(shared.kept, dropout, seq, task.head);
  } else {
    for (int i = thread; i < kRows / kChunk * kRows; i += kWarps * kWarp) shared.kept[i / kRows][i % kRows] = kAllLanes;
  }
  zero_unused<T, 8>(a, a.dq, task.used_q, a.n_q);
  zero_unused<T, 8>(a, a.dk, task.used_k, a.n_k);
  zero_unused<T, 8>(a, a.dv, task.used_k, a.n_k);
  wait_copies<1>();
  const float unscale = dropout.scale > 0.f ? 1.f / dropout.scale : 0.f;  // nothing is kept: out and its sums are zero
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const int row = thread / 8 + i * kStep;
    float y[8], dy[8], sum = 0.f;
    unpack(out[i], y);
    load_floats<8>(shared.dout + place(row, thread % 8), dy);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum += y[e] * dy[e];
    sum = warp_reduce<Sum, 8>(sum);
    if (thread % 8 == 0) shared.delta[row] = sum * unscale;
  }
  wait_copies<0>();
  __syncthreads();

  const int own = warp_row<kWarps>();  // this warp's first key, later its first query
  if (own < seq.k_len) {
    const uint32_t k_at = shared_address(shared.k + own * kShortDim) + left_offset(), v_at = k_at + kSide;
    HeadTile dk = {}, dv = {};
#pragma unroll 1
    for (int part = seq.first_query(own) / kChunk; part * kChunk < seq.q_len; ++part) {
      const int query = part * kChunk;
      const uint32_t q_rows = shared_address(shared.q + query * kShortDim), dout_rows = q_rows + kSide;
      Scores s, d = {};
      start_transposed_scores(s, seq, own, query);
      add_dots_at(s, k_at, q_rows + right_offset(), T());
      add_dots_at(d, v_at, dout_rows + right_offset(), T());
      uint32_t kept[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        kept[h] = shared.kept[part][own + lane / 4 + h * 8] >> (lane % 4 * 2);
      }
      Factors probs, dscores;
      differentiate(probs, dscores, s, d, shared, kept, query, a.scale * kLog2E);
#pragma unroll
      for (int i = 0; i < kChunkTiles * 2; ++i) {
        const int at = score_place<kRows>(own + lane / 4 + i % 2 * 8, part * kChunkTiles + i / 2) + lane % 4 * 2;
        *reinterpret_cast<uint32_t*>(shared.dscores + at) = dscores[i / 2][i % 2];
      }
#pragma unroll
      for (int i = 0; i < kChunk / kWarpRows; ++i) {
        uint32_t left[4];
        as_left_factor(left, probs, i);
        add_rows_at(dv, left, dout_rows + left_offset() + i * kWarpRows * kRowBytes, T());
        as_left_factor(left, dscores, i);
        add_rows_at(dk, left, q_rows + left_offset() + i * kWarpRows * kRowBytes, T());
      }
    }
    const int rows = seq.k_len - own;
    const float factor = a.scale * dropout.scale;
    T* const tile = shared.v + own * kShortDim;  // values that only this warp reads
    store_staged(tile, a.dv.at<T>(seq.k_start + own, task.head), a.dv.row_stride, rows, a.dim, dv,
                 {dropout.scale, dropout.scale});
    store_staged(tile, a.dk.at<T>(seq.k_start + own, task.head), a.dk.row_stride, rows, a.dim, dk, {factor, factor});
  }
  __syncthreads();
  if (own >= seq.q_len) return;
  const int keys = seq.key_limit(min(own + kWarpRows, seq.q_len) - 1);
  HeadTile dq = {};
  const float factor = a.scale * dropout.scale;
#pragma unroll 2
  for (int key = 0; key < keys; key += kWarpRows) {
    uint32_t left[4];
    const int from = key + lane % 8 + lane / 16 * 8;
    load_matrices_transposed(left, shared_address(shared.dscores + score_place<kRows>(from, own / 8 + lane / 8 % 2)));
    add_rows_at(dq, left, shared_address(shared.k + key * kShortDim) + left_offset(), T());
  }
  store_staged(shared.q + own * kShortDim, a.dq.at<T>(seq.q_start + own, task.head), a.dq.row_stride, seq.q_len - own,
               a.dim, dq, {factor, factor});
#endif
}

}  // namespace

cudaError_t attention_bwd_block(const Attention& a, DType dtype, int64_t max_q, int64_t max_k, cudaStream_t stream) {
  return dispatch_half_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return dispatch_rows(max_q, max_k, [&](auto rows) {
      constexpr int kRows = decltype(rows)::value;
      return launch_attention(attention_bwd_block_kernel<T, kRows>, a, 1, kRows * 2, sizeof(Buffers<T, kRows>), stream);
    });
  });
}

}  // namespace ls_train
