// Gradient of the tables of y = dropout(scale * weight[token] + position_weight[position]), one table a call.
//
// embedding_bwd_kernel
//   One launch of three kinds of blocks of 256 threads, each of which writes other rows, every row once, without
//   atomics and in a fixed order of additions. Blocks for long runs of equal ids look at up to three groups of 256
//   sorted positions and share the rows of a run among 32 workers of 8 lanes. Blocks for short runs: a worker has 8
//   sorted positions and sums the runs that start there, in order, four rows under way whatever run they belong to.
//   Without accumulate, blocks for 16 table rows each write zeros where no token has the id. Reads dy once; writes
//   (with accumulate also reads) the rows of the ids in the batch, without accumulate the whole table: (N + V) * C *
//   sizeof(T) bytes.
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
constexpr int kLongGroups = 3;                      // most groups of kBackwardThreads positions of a block
constexpr int kLongBlocks = 384;                    // blocks for long runs if as many groups suffice: they fit at once
constexpr int kListed = 512;                        // rows of a long run whose numbers are in shared memory
constexpr int kFillRows = 16;

// Runs of more than kShortRun rows that start in this block's groups, one position a thread, one run after another. The
// groups are long_blocks / long_slices apart, as neighbours often have runs both.
template <class T, int kWidth>
__device__ __forceinline__ void sum_long_runs(const EmbeddingBackward<T>& a, unsigned block) {
  constexpr int kLanes = kLongLanes<kWidth>, kWorkers = kBackwardThreads / kLanes, kWarps = kBackwardThreads / kWarp;
  constexpr int64_t kBeyond = -2;  // the end of the run
  __shared__ unsigned starts[kLongGroups * kWarps];
  __shared__ int64_t listed[kListed];  // rows of dy, negative where they are not used
  __shared__ float scratch[kWarps * kWidth * kLanes];
  const unsigned thread = linear_thread(), warp = thread / kWarp, lane = thread % kLanes;
  const int column = static_cast<int>(block % a.long_slices * kLanes + lane) * kWidth;
  const auto first_of = [&](int group) {
    return static_cast<int64_t>(block / a.long_slices + group * a.long_step) * kBackwardThreads;
  };
  bool is_start[kLongGroups], any = false;
#pragma unroll
  for (int group = 0; group < kLongGroups; ++group) {
    const int64_t at = first_of(group) + thread;
    is_start[group] = false;
    if (at + kShortRun < a.n) {
      const int64_t id = a.sorted_ids[at], before = at > 0 ? a.sorted_ids[at - 1] : -1;
      is_start[group] = (id == a.sorted_ids[at + kShortRun]) & (id != before) & a.has_gradient(id);
    }
  }
#pragma unroll
  for (int group = 0; group < kLongGroups; ++group) {
    const unsigned mask = __ballot_sync(kAllLanes, is_start[group]);
    if (thread % kWarp == 0) starts[group * kWarps + warp] = mask;
    any |= is_start[group];
  }
  if (!__syncthreads_or(any)) return;
  const DropoutKey key = dropout_key(a.dropout);
  for (int w = 0; w < kLongGroups * kWarps; ++w) {
    for (unsigned left = starts[w]; left != 0; left &= left - 1) {
      int64_t at = first_of(w / kWarps) + w % kWarps * kWarp + __ffs(left) - 1;
      const int64_t id = a.sorted_ids[at];
      float sum[kWidth] = {};
      for (bool more = true; more; at += kListed) {
        const int64_t used = used_rows(a.rows, a.n);
        __syncthreads();  // the rows before have been read
#pragma unroll
        for (int i = 0; i < kListed; i += kBackwardThreads) {
          const int64_t position = at + i + thread;
          const bool is_inside = position < a.n;
          const int64_t other = is_inside ? a.sorted_ids[position] : -1, row = is_inside ? a.order[position] : -1;
          more = more && other == id;
          listed[i + thread] = other != id ? kBeyond : row < used ? row : -1;
        }
        more = __syncthreads_and(more);
        if (column >= a.columns) continue;
#pragma unroll 1
        for (unsigned i = thread / kLanes; i < kListed && listed[i] != kBeyond; i += kWorkers * kRunLoads) {
          RowLoads<T, kWidth, kRunLoads> loads(a, key, column, [&](int j) { return listed[i + j * kWorkers]; });
#pragma unroll
          for (int j = 0; j < kRunLoads; ++j) loads.add(j, sum);
        }
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
#pragma unroll
        for (int step = kLanes; step < kWarp; step *= 2) sum[i] += __shfl_xor_sync(kAllLanes, sum[i], step);
      }
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
  constexpr int kAhead = kShortRun + kRunLoads;   // positions that the last run may reach into
  // places: rows of dy, negative where they are not used
  __shared__ int64_t ids[kMaxWorkers * kRunPositions + kAhead], places[kMaxWorkers * kRunPositions + kAhead];
  __shared__ Kind kinds[kMaxWorkers * kRunPositions + kAhead];
  const int positions = static_cast<int>(blockDim.y) * kRunPositions;
  const int64_t block_first = static_cast<int64_t>(block / a.column_blocks) * positions;
  const int column = static_cast<int>((block % a.column_blocks * blockDim.x + threadIdx.x) * kWidth);
  for (int i = linear_thread(); i < positions + kAhead; i += kBackwardThreads) {
    const int64_t at = block_first + i;
    int64_t id = -1, before = -1, far = -1, place = -1;
    if (at < a.n) {
      id = a.sorted_ids[at];
      place = a.order[at];
      if (at > 0) before = a.sorted_ids[at - 1];
      if (at + kShortRun < a.n) far = a.sorted_ids[at + kShortRun];
    }
    ids[i] = id;
    places[i] = place < used_rows(a.rows, a.n) ? place : -1;
    kinds[i] = a.has_gradient(id) && id == before ? kGoesOn : a.has_gradient(id) && id != far ? kStarts : kOther;
  }
  const DropoutKey key = dropout_key(a.dropout);
  __syncthreads();
  if (column >= a.columns) return;
  int chunk = static_cast<int>(threadIdx.y) * kRunPositions;
  const int end = chunk + kRunPositions;
  float sum[kWidth] = {};
  int open = -1;  // where the run starts that is being summed
#pragma unroll 1
  do {
    bool going = open >= 0, is_mine[kRunLoads];
#pragma unroll
    for (int j = 0; j < kRunLoads; ++j) {
      const int p = chunk + j;
      going = (kinds[p] == kStarts && p < end) || (kinds[p] == kGoesOn && going);
      is_mine[j] = going;
    }
    RowLoads<T, kWidth, kRunLoads> loads(a, key, column,
                                         [&](int j) { return is_mine[j] ? places[chunk + j] : int64_t{-1}; });
#pragma unroll
    for (int j = 0; j < kRunLoads; ++j) {
      const int p = chunk + j;
      if (kinds[p] != kGoesOn) {
        if (open >= 0) write_row(a, ids[open], column, sum);
        open = is_mine[j] ? p : -1;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sum[i] = 0.f;
      }
      loads.add(j, sum);
    }
    chunk += kRunLoads;
  } while (chunk < end || (open >= 0 && kinds[chunk] == kGoesOn));
  if (open >= 0) write_row(a, ids[open], column, sum);
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
      const int64_t groups = ceil_div<int64_t>(a.n, kBackwardThreads);
      const int64_t fewest = ceil_div<int64_t>(groups, kLongGroups);
      const int64_t several = std::min<int64_t>(groups, kLongBlocks / a.long_slices);
      a.long_step = static_cast<unsigned>(std::max(fewest, several)) | 1u;
      a.long_blocks = a.n > 0 ? a.long_step * a.long_slices : 0;
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
