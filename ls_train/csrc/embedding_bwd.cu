// Gradient of the tables of y = dropout(scale * weight[token] + position_weight[position]), one table a call.
//
// embedding_bwd_kernel
//   One launch of three kinds of blocks of 256 threads, each of which writes other rows, every row once, without
//   atomics and in a fixed order of additions. Blocks for long runs of equal ids look at 256 sorted positions and share
//   the rows of a run among 32 workers of 8 lanes. Blocks for short runs: a worker has 8 sorted positions and sums the
//   runs that start there, in order, four rows under way whatever run they belong to. Without accumulate, blocks for 16
//   table rows each write zeros where no token has the id. Reads dy once; writes (with accumulate also reads) the rows
//   of the ids in the batch, without accumulate the whole table: (N + V) * C * sizeof(T) bytes.
#include "embedding_bwd.cuh"

namespace ls_train {
namespace {

constexpr int kBackwardThreads = 256;
constexpr int kShortRun = 32;  // most rows that one worker sums by itself
constexpr int kRunPositions = 8;
constexpr int kRunLoads = 4;  // rows of a worker that are under way at once
constexpr int kMaxWorkers = 32;
template <int kWidth>
constexpr int kLongLanes = kWidth > 1 ? 8 : kWarp;  // threads of a worker of a long run
constexpr int kFillRows = 16;

// Runs of more than kShortRun rows that start in this block's positions, one a thread, one run after another.
template <class T, int kWidth>
__device__ __forceinline__ void sum_long_runs(const EmbeddingBackward<T>& a, unsigned block) {
  constexpr int kLanes = kLongLanes<kWidth>, kWorkers = kBackwardThreads / kLanes, kWarps = kBackwardThreads / kWarp;
  __shared__ unsigned starts[kWarps];
  __shared__ float scratch[kWarps * kWidth * kLanes];
  const int thread = linear_thread(), warp = thread / kWarp, lane = thread % kLanes;
  const int64_t block_first = static_cast<int64_t>(block / a.long_slices) * kBackwardThreads;
  const int column = (static_cast<int>(block % a.long_slices) * kLanes + lane) * kWidth;
  const int64_t at = block_first + thread;
  bool is_start = false;
  if (at + kShortRun < a.n) {
    const int64_t id = a.sorted_ids[at], before = at > 0 ? a.sorted_ids[at - 1] : -1;
    is_start = id == a.sorted_ids[at + kShortRun] && id != before && a.has_gradient(id);
  }
  const unsigned mask = __ballot_sync(kAllLanes, is_start);
  if (thread % kWarp == 0) starts[warp] = mask;
  if (!__syncthreads_or(is_start)) return;
  const int64_t used = used_rows(a.rows, a.n);
  const DropoutKey key = dropout_key(a.dropout);
  for (int w = 0; w < kWarps; ++w) {
    for (unsigned left = starts[w]; left != 0; left &= left - 1) {
      const int64_t first = block_first + w * kWarp + __ffs(left) - 1;
      const int64_t id = a.sorted_ids[first];
      float sum[kWidth] = {};
      if (column < a.columns) {
        add_run<kRunLoads>(a, key, used, id, first + thread / kLanes, kWorkers, column, sum);
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
#pragma unroll
        for (int step = kLanes; step < kWarp; step *= 2) sum[i] += __shfl_xor_sync(kAllLanes, sum[i], step);
      }
      __syncthreads();  // the run before has been read
      if (thread % kWarp < kLanes) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) scratch[(warp * kWidth + i) * kLanes + lane] = sum[i];
      }
      __syncthreads();
      if (thread >= kLanes || column >= a.columns) continue;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        sum[i] = 0.f;
#pragma unroll
        for (int other = 0; other < kWarps; ++other) sum[i] += scratch[(other * kWidth + i) * kLanes + lane];
      }
      write_row(a, id, column, sum);
    }
  }
}

// Runs of up to kShortRun rows that start in the kRunPositions positions of a worker.
template <class T, int kWidth>
__device__ __forceinline__ void sum_short_runs(const EmbeddingBackward<T>& a, unsigned block) {
  enum Kind : char { kGoesOn, kStarts, kOther };  // kOther: the start of a run that is not summed here
  // places: rows of dy, negative where they are not used
  __shared__ int64_t ids[kMaxWorkers * kRunPositions], places[kMaxWorkers * kRunPositions];
  __shared__ Kind kinds[kMaxWorkers * kRunPositions + 1];  // the last: whether the last run goes on in the next block
  const int thread = linear_thread(), positions = static_cast<int>(blockDim.y) * kRunPositions;
  const int64_t block_first = static_cast<int64_t>(block / a.column_blocks) * positions;
  const int column = static_cast<int>((block % a.column_blocks * blockDim.x + threadIdx.x) * kWidth);
  if (thread < positions) {
    const int64_t at = block_first + thread;
    int64_t id = -1, before = -1, far = -1, place = 0;
    if (at < a.n) {
      id = a.sorted_ids[at];
      place = a.order[at];
      if (at > 0) before = a.sorted_ids[at - 1];
      if (at + kShortRun < a.n) far = a.sorted_ids[at + kShortRun];
    }
    if (thread == positions - 1) kinds[positions] = at + 1 < a.n && a.sorted_ids[at + 1] == id ? kGoesOn : kOther;
    ids[thread] = id;
    places[thread] = place < used_rows(a.rows, a.n) ? place : -1;
    kinds[thread] = a.has_gradient(id) && id == before ? kGoesOn : a.has_gradient(id) && id != far ? kStarts : kOther;
  }
  const DropoutKey key = dropout_key(a.dropout);
  __syncthreads();
  if (column >= a.columns) return;
  int chunk = static_cast<int>(threadIdx.y) * kRunPositions;
  float sum[kWidth] = {};
  int open = -1;  // where the run starts that is being summed
#pragma unroll 1
  do {
    Pack<T, kWidth> grads[kRunLoads];
    bool asked[kRunLoads], going = open >= 0;
#pragma unroll
    for (int j = 0; j < kRunLoads; ++j) {
      const int p = chunk + j;
      going = kinds[p] == kStarts || (kinds[p] == kGoesOn && going);
      asked[j] = going && places[p] >= 0;
      if (asked[j]) grads[j] = load_streaming<kWidth>(a.dy + places[p] * a.columns + column);
    }
    uint32_t kept = ~0u;
    if (key.active()) {  // decided while the rows are on their way
      kept = 0;
#pragma unroll
      for (int j = 0; j < kRunLoads; ++j) {
        const int64_t row = places[chunk + j];
        const uint32_t group = static_cast<uint32_t>(column) / 8;
        if constexpr (kWidth > 1) {
          const uint32_t plane = static_cast<uint32_t>(static_cast<uint64_t>(row) >> 32);
          join(kept, j, masks8(key, plane, static_cast<uint32_t>(row), group));
        } else {
          join(kept, j, keep8(key, row, group));
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kRunLoads; ++j) {
      const int p = chunk + j;
      if (kinds[p] != kGoesOn) {
        if (open >= 0) write_row(a, ids[open], column, sum);
        open = kinds[p] == kStarts ? p : -1;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum[i] = 0.f;
      }
      if (asked[j]) add_row(grads[j], split(kept, j), key.scale, column, sum);
    }
    chunk += kRunLoads;
  } while (chunk % kRunPositions != 0);
  if (open < 0) return;
  const int end = static_cast<int>(threadIdx.y + 1) * kRunPositions;
  if (kinds[end] == kGoesOn) add_run<2>(a, key, used_rows(a.rows, a.n), ids[open], block_first + end, 1, column, sum);
  write_row(a, ids[open], column, sum);
}

// Zeros for the ids among kFillRows that get no gradient.
template <class T, int kWidth>
__device__ __forceinline__ void clear_absent(const EmbeddingBackward<T>& a, unsigned block) {
  __shared__ bool present[kFillRows];
  const int thread = linear_thread();
  const int64_t block_first = static_cast<int64_t>(block) * kFillRows;
  if (thread < kFillRows) present[thread] = false;
  const int64_t low = shortly_before<kBackwardThreads>(a.sorted_ids, a.n, block_first, thread);
  __syncthreads();
  const int64_t row = low + thread < a.n ? a.sorted_ids[low + thread] - block_first : kFillRows;
  if (row >= 0 && row < kFillRows) present[row] = true;
  if (__syncthreads_or(thread == kBackwardThreads - 1 && row < kFillRows)) {  // there may be more of these ids
    if (thread < kFillRows) {
      int64_t from = low, to = a.n;  // the first position whose id is not smaller is in [from, to]
      while (from < to) {
        const int64_t middle = (from + to) / 2;
        if (a.sorted_ids[middle] < block_first + thread) {
          from = middle + 1;
        } else {
          to = middle;
        }
      }
      present[thread] = from < a.n && a.sorted_ids[from] == block_first + thread;
    }
    __syncthreads();
  }
  const int rows = static_cast<int>(min(static_cast<int64_t>(kFillRows), a.vocabulary - block_first));
  for (int r = static_cast<int>(threadIdx.y); r < rows; r += static_cast<int>(blockDim.y)) {
    const int64_t id = block_first + r;
    if (present[r] && id != a.padding_idx) continue;
    T* const out = a.dweight + id * a.columns;
    for (int column = static_cast<int>(threadIdx.x) * kWidth; column < a.columns;
         column += static_cast<int>(blockDim.x) * kWidth) {
      store(out + column, zero_pack<T, kWidth>());
    }
  }
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kBackwardThreads, kTileBlocks) embedding_bwd_kernel(const EmbeddingBackward<T> a) {
  if (blockIdx.x < a.long_blocks) return sum_long_runs<T, kWidth>(a, blockIdx.x);
  const unsigned block = blockIdx.x - a.long_blocks;
  if (block < a.run_blocks) return sum_short_runs<T, kWidth>(a, block);
  clear_absent<T, kWidth>(a, block - a.run_blocks);
}

}  // namespace

cudaError_t embedding_bwd(const TensorRef& dweight, const TensorRef& dy, const TensorRef& order,
                          const TensorRef& sorted_ids, const TensorRef& seed, const TensorRef& rows, double scale,
                          double p, int64_t offset, int64_t padding_idx, bool accumulate, cudaStream_t stream) {
  return dispatch_type(dy.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    EmbeddingBackward<T> a;
    a.dweight = dweight.as<T>();
    a.dy = dy.as<T>();
    a.order = order.as<int64_t>();
    a.sorted_ids = sorted_ids.as<int64_t>();
    a.rows = rows.as<int32_t>();
    a.n = dy.sizes[0];
    a.vocabulary = dweight.sizes[0];
    a.padding_idx = padding_idx;
    a.columns = static_cast<int>(dy.sizes[1]);
    a.scale = static_cast<float>(scale);
    a.accumulate = accumulate;
    a.dropout = make_dropout(seed, p, offset);
    const auto launch = [&](auto kernel, int width, int long_lanes) {
      const int packs = ceil_div(a.columns, width);
      int lanes = kBackwardThreads / kMaxWorkers;
      while (lanes < kBackwardThreads / 2 && lanes < packs) lanes *= 2;
      const int workers = kBackwardThreads / lanes;
      a.long_slices = ceil_div(packs, long_lanes);
      a.column_blocks = ceil_div(packs, lanes);
      a.long_blocks = static_cast<unsigned>(ceil_div<int64_t>(a.n, kBackwardThreads) * a.long_slices);
      a.run_blocks = static_cast<unsigned>(ceil_div<int64_t>(a.n, workers * kRunPositions) * a.column_blocks);
      const unsigned fill_blocks = accumulate ? 0 : static_cast<unsigned>(ceil_div<int64_t>(a.vocabulary, kFillRows));
      const unsigned blocks = a.long_blocks + a.run_blocks + fill_blocks;
      if (blocks == 0) return cudaSuccess;
      kernel<<<blocks, dim3(lanes, workers), 0, stream>>>(a);
      return cudaGetLastError();
    };
    if (a.columns == 0) return cudaSuccess;
    return packs_fit<T>(a.columns, dweight.data, dy.data) && masks_fit(a.dropout)
               ? launch(embedding_bwd_kernel<T, kPackWidth<T>>, kPackWidth<T>, kLongLanes<kPackWidth<T>>)
               : launch(embedding_bwd_kernel<T, 1>, 1, kLongLanes<1>);
  });
}

}  // namespace ls_train
