// Attention forward of 33 to 128 tokens with heads of 33 to 64, on tensor cores.
//
// A block owns up to 64 queries of one sequence and head, a warp 16 of them, and all scores of a warp stay in
// registers: one maximum and one sum a row, nothing to rescale. All rows are under way to shared memory before anything
// else; the generator of dropout runs meanwhile, and what it decided about 16 x 128 probabilities waits in two
// registers a lane. Of a causal triangle, chunks of keys that no query of the warp sees are left out. Bytes: q, k, v
// read and out written once, (2 Nq + 2 Nk) * H * D * 2, and 4 * Nq * H of lse; k and v of more than 64 queries once
// more from L2.
#include "attention_block.cuh"

namespace ls_train {
namespace {

constexpr int kWarps = 4, kQueries = kWarps * kWarpRows;

// Decisions about the keys of kChunks chunks for rows g and g + 8: those about tile t of chunk c are bits 15 and 31,
// less 4 c + t, of kept[0] and kept[1]. Keys from `keys` on are not decided.
template <int kChunks>
__device__ __forceinline__ void draw_rows(uint32_t (&kept)[2], const DropoutKey& dropout, int64_t row, int head,
                                          int keys) {
  kept[0] = kept[1] = kAllLanes;
  if (!dropout.active()) return;
  kept[0] = kept[1] = 0;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk * kChunk >= keys) continue;
    Keep8 keep[1][2];
    draw(keep, dropout, row, head, chunk);
#pragma unroll
    for (int i = 0; i < kChunkTiles * 2; ++i) {
      const int less = kChunkTiles * chunk + i / 2;
      kept[i % 2] |= keep[0][i % 2].word[i / 2] >> less & DropoutKey::kKeepAll >> less;
    }
  }
}

// kRows: the longest sequence.
template <class T, int kRows>
__global__ void __launch_bounds__(kWarps* kWarp, kRows == 64 ? 6 : 4) attention_fwd_block_kernel(Attention a) {
#ifdef LS_TRAIN_TENSOR_CORES
  constexpr int kChunks = kRows / kChunk;
  extern __shared__ __align__(128) uint4 shared[];
  const Task task = short_task(a, a.q_tiles, kRows);
  const Sequence& seq = task.sequence;
  T* const q = reinterpret_cast<T*>(shared);  // (kQueries, 64)
  T* const k = q + kQueries * kShortDim;      // (kRows, 64)
  T* const v = k + kRows * kShortDim;         // (kRows, 64)
  const int block_first = task.tile * kQueries, block_rows = seq.q_len - block_first;
  if (block_rows > 0) {
    const int read_keys = seq.key_limit(min(block_first + kQueries, seq.q_len) - 1);
    load_side<kWarps, kQueries>(q, a.q, seq.q_start + block_first, task.head, block_rows, a.dim);
    load_side<kWarps, kRows>(k, a.k, seq.k_start, task.head, read_keys, a.dim);
    commit_copies();
    load_side<kWarps, kRows>(v, a.v, seq.k_start, task.head, read_keys, a.dim);
    commit_copies();
  }
  const DropoutKey dropout = dropout_key(a.dropout);
  zero_unused<T, 8>(a, a.out, task.used_q, a.n_q);
  zero_unused_lse(a, task.used_q);
  if (block_rows <= 0) return;

  const int lane = threadIdx.x % kWarp;
  const int own = warp_row<kWarps>(), first = block_first + own;  // this warp's first query, in the block and sequence
  const int rows = seq.q_len - first;
  const int keys = rows > 0 ? seq.key_limit(min(first + kWarpRows, seq.q_len) - 1) : 0;  // that any of its queries sees
  uint32_t kept[2];
  draw_rows<kChunks>(kept, dropout, seq.q_start + first, task.head, keys);
  wait_copies<1>();
  __syncthreads();

  const uint32_t q_at = shared_address(q + own * kShortDim) + left_offset();
  const uint32_t k_at = shared_address(k) + right_offset(), v_at = shared_address(v) + left_offset();
  const float scale2 = a.scale * kLog2E;
  Scores s[kChunks];
  float maximum[2] = {-INFINITY, -INFINITY}, shift[2],
        sum[2] = {};  // of scores over ln 2; sums of this thread's columns
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk * kChunk >= keys) continue;
    start_scores(s[chunk], seq, first, chunk);
    add_dots_at(s[chunk], q_at, k_at + chunk * kChunk * kRowBytes, T());
#pragma unroll
    for (int i = 0; i < kChunkTiles * 4; ++i) {
      float& score = s[chunk][i / 4][i % 4];
      score *= scale2;
      maximum[i % 4 / 2] = fmaxf(maximum[i % 4 / 2], score);
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    maximum[h] = row_reduce<Max>(maximum[h]);
    shift[h] = maximum[h] == -INFINITY ? 0.f : maximum[h];  // no key seen: exp2(-inf - 0) = 0
  }
  Factors probs[kChunks];  // what dropout lets through of the probabilities, without their scale
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk * kChunk >= keys) continue;
#pragma unroll
    for (int i = 0; i < kChunkTiles * 2; ++i) {
      const int t = i / 2, h = i % 2;
      const float p0 = fast_exp2(s[chunk][t][h * 2] - shift[h]), p1 = fast_exp2(s[chunk][t][h * 2 + 1] - shift[h]);
      sum[h] += p0;
      sum[h] += p1;
      const Keep8 decisions = {{kept[h] << (kChunkTiles * chunk + t)}};
      probs[chunk][t][h] = pack_pair(p0, p1, T()) & decisions.mask(0);
    }
  }
  wait_copies<0>();
  __syncthreads();
  if (rows <= 0) return;
  HeadTile out = {};
#pragma unroll
  for (int i = 0; i < kRows / kWarpRows; ++i) {
    if (i * kWarpRows >= keys) continue;
    uint32_t left[4];
    as_left_factor(left, probs[i / 2], i % 2);
    add_rows_at(out, left, v_at + i * kWarpRows * kRowBytes, T());
  }

  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float total = row_reduce<Sum>(sum[h]);
    factor[h] = total == 0.f ? 0.f : dropout.scale / total;
    const int row = lane / 4 + h * 8;
    if (lane % 4 == 0 && row < rows) {
      const float lse = total == 0.f ? -INFINITY : (maximum[h] + log2f(total)) * kLn2;
      a.lse[(seq.q_start + first + row) * a.heads + task.head] = lse;
    }
  }
  store_staged(q + own * kShortDim, a.out.at<T>(seq.q_start + first, task.head), a.out.row_stride, rows, a.dim, out,
               factor);
#endif
}

}  // namespace

cudaError_t attention_fwd_block(Attention a, DType dtype, int64_t max_q, int64_t max_k, cudaStream_t stream) {
  a.q_tiles = static_cast<int>(ceil_div<int64_t>(std::max<int64_t>(max_q, 1), kQueries));
  return dispatch_half_type(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return dispatch_rows(max_q, max_k, [&](auto rows) {
      constexpr int kRows = decltype(rows)::value;
      constexpr int kMemory = (kQueries + 2 * kRows) * kRowBytes;
      return launch_attention(attention_fwd_block_kernel<T, kRows>, a, a.q_tiles, kWarps * kWarp, kMemory, stream);
    });
  });
}

}  // namespace ls_train
