// y = dropout(x), also its own backward: bias_dropout_add without bias and residual, and a kernel of its own for rows
// that are no multiple of a pack. Reads x once, writes y once: 2 * N * C * sizeof(T) bytes.
//
// dropout_run_kernel
//   The tensor as one run of 16-byte packs, wherever its rows end: kRunPacks packs a thread, blockDim.x apart. The
//   block calls the generator once for each group of eight columns that its packs touch, about one a pack, and keeps
//   the decisions in shared memory, where each pack finds those of the groups that it has a part of.
#include "row_kernels.cuh"

namespace ls_train {
namespace {

constexpr int kRunThreads = 256;
constexpr int kRunPacks = 4;
constexpr int kRunBlocks = 4;  // a multiprocessor
constexpr int kMaxRunColumns = 1 << 18;

// x / divisor for x < 2^31, in three instructions.
class Divisor {
 public:
  explicit Divisor(uint32_t divisor) : divisor_(divisor) {
    while ((uint64_t{1} << shift_) < divisor) ++shift_;
    factor_ = static_cast<uint32_t>((((uint64_t{1} << shift_) - divisor) << 32) / divisor + 1);
  }
  __device__ __forceinline__ uint32_t divide(uint32_t x) const { return (__umulhi(x, factor_) + x) >> shift_; }
  __device__ __forceinline__ uint32_t value() const { return divisor_; }

 private:
  uint32_t divisor_, factor_, shift_ = 0;
};

struct RunRows {
  explicit RunRows(int columns) : columns(columns), groups(ceil_div(columns, 8)) {}
  Divisor columns, groups;  // of a row; groups of eight columns
};

// Decisions of a run of elements that begins in column `column` of a row: eight bits a group of eight columns.
class RunDecisions {
 public:
  // bytes: one for each group that the `length` elements touch, and eight more. All threads of the block must call it,
  // and meet at a barrier before get.
  __device__ __forceinline__ RunDecisions(uint8_t* bytes, const DropoutKey& key, int64_t row, uint32_t column,
                                          uint32_t length, const RunRows& rows)
      : columns_(rows.columns.value()), groups_(rows.groups.value()), bytes_(bytes - column / 8) {
    if (!key.active()) return;
    const uint32_t end = column + length - 1, end_row = rows.columns.divide(end);
    const uint32_t last = end_row * groups_ + (end - end_row * columns_) / 8;
    const uint32_t rows_a_step = rows.groups.divide(kRunThreads), groups_a_step = kRunThreads - rows_a_step * groups_;
    uint32_t at = column / 8 + threadIdx.x;
    uint32_t group = at - rows.groups.divide(at) * groups_;
    row += rows.groups.divide(at);
    for (; at <= last; at += kRunThreads) {
      const uint32_t plane = static_cast<uint32_t>(static_cast<uint64_t>(row) >> 32);
      bytes_[at] = static_cast<uint8_t>(masks8(key, plane, static_cast<uint32_t>(row), group).bits());
      row += rows_a_step;
      group += groups_a_step;
      if (group >= groups_) {
        group -= groups_;
        ++row;
      }
    }
  }

  // Bit i: whether element i from (row, column) on is kept, for i < kWidth. Rows count from the run's first.
  template <int kWidth>
  __device__ __forceinline__ uint32_t get(uint32_t row, uint32_t column) const {
    const uint8_t* bytes = bytes_ + row * groups_;
    uint32_t kept = (bytes[column / 8] | bytes[column / 8 + 1] << 8) >> column % 8;
    uint32_t left = columns_ - column;
    if (left < kWidth) {
      const uint32_t row_bits = columns_ < kWidth ? (1u << columns_) - 1 : 0xffu;
      kept &= (1u << left) - 1;
      for (; left < kWidth; left += columns_) {
        bytes += groups_;
        kept |= (*bytes & row_bits) << left;
      }
    }
    return kept;
  }

 private:
  uint32_t columns_, groups_;
  uint8_t* bytes_;
};

// x * scale where bit i of `kept` is set, else zero.
template <class T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> kept_elements(const Pack<T, kWidth>& x, float scale, uint32_t kept) {
  float v[kWidth];
  unpack(x, v);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) v[i] *= scale;
  if constexpr (kWidth == 8) {
    Pack<T, kWidth> pack = pack_floats<T>(v);
    uint32_t* words = reinterpret_cast<uint32_t*>(&pack);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint32_t signs = byte_signs(kept >> 2 * i & 0xfu);
      words[i] &= permute(signs, 0x9988);
      words[i + 1] &= permute(signs, 0xbbaa);
    }
    return pack;
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) v[i] = kept >> i & 1u ? v[i] : 0.f;
    return pack_floats<T>(v);
  }
}

template <class T>
constexpr int kRun = kRunThreads * kRunPacks * kPackWidth<T>;  // elements of a block

template <class T>
__global__ void __launch_bounds__(kRunThreads, kRunBlocks)
    dropout_run_kernel(T* __restrict__ y, const T* __restrict__ x, const int32_t* __restrict__ rows, int64_t n,
                       const RunRows run_rows, const Dropout dropout) {
  constexpr int kWidth = kPackWidth<T>, kStep = kRunThreads * kWidth;
  __shared__ uint8_t bytes[kRun<T> + 8];
  const uint32_t columns = run_rows.columns.value();
  const int64_t start = static_cast<int64_t>(blockIdx.x) * kRun<T>;
  const int length = static_cast<int>(min(static_cast<int64_t>(kRun<T>), n * columns - start));
  const int64_t used = used_rows(rows, n) * columns - start;  // elements in use from the run's first on
  const int in_use = static_cast<int>(max(int64_t{0}, min(static_cast<int64_t>(length), used)));
  const int first = static_cast<int>(threadIdx.x) * kWidth;
  x += start;
  y += start;
  uint4 packs[kRunPacks] = {};  // not Pack: zeros of half-precision elements would be merged with what arrives
#pragma unroll
  for (int k = 0; k < kRunPacks; ++k) {
    const int at = first + k * kStep;
    if (at < in_use && at + kWidth <= length) packs[k] = __ldca(reinterpret_cast<const uint4*>(x + at));
  }
  const DropoutKey key = dropout_key(dropout);
  // start = (blockIdx.x / columns * columns + blockIdx.x % columns) * kRun, where the second product has 31 bits.
  const uint32_t whole = run_rows.columns.divide(blockIdx.x), rest = (blockIdx.x - whole * columns) * kRun<T>;
  const int64_t first_row = static_cast<int64_t>(whole) * kRun<T> + run_rows.columns.divide(rest);
  const uint32_t first_column = rest - run_rows.columns.divide(rest) * columns;
  const RunDecisions decisions(bytes, key, first_row, first_column, length, run_rows);
  __syncthreads();
  uint32_t row = run_rows.columns.divide(first_column + first), column = first_column + first - row * columns;
  const uint32_t rows_a_step = run_rows.columns.divide(kStep), columns_a_step = kStep - rows_a_step * columns;
#pragma unroll
  for (int k = 0; k < kRunPacks; ++k) {
    const int at = first + k * kStep;
    if (at + kWidth > length) break;
    uint32_t kept = key.active() ? decisions.template get<kWidth>(row, column) : 0xffu;
    if (in_use - at < kWidth) kept &= (1u << max(0, in_use - at)) - 1;
    Pack<T, kWidth> pack;
    reinterpret_cast<uint4&>(pack) = packs[k];
    keep_packed(pack);
    store(y + at, kept_elements(pack, key.scale, kept));
    row += rows_a_step;
    column += columns_a_step;
    if (column >= columns) {
      column -= columns;
      ++row;
    }
  }
  for (int at = length / kWidth * kWidth + static_cast<int>(threadIdx.x); at < length; at += kRunThreads) {
    row = run_rows.columns.divide(first_column + at);
    column = first_column + at - row * columns;
    const bool kept = at < in_use && (!key.active() || (decisions.template get<1>(row, column) & 1u) != 0);
    y[at] = from_float<T>(kept ? to_float(x[at]) * key.scale : 0.f);
  }
}

}  // namespace

cudaError_t dropout_fwd(const TensorRef& y, const TensorRef& x, const TensorRef& seed, const TensorRef& rows, double p,
                        int64_t offset, cudaStream_t stream) {
  const int64_t n = x.sizes[0];
  const int columns = static_cast<int>(x.sizes[1]);
  const int64_t width = x.dtype == DType::kFloat32 ? kPackWidth<float> : kPackWidth<half>;
  const int64_t blocks = ceil_div(n * columns, width * kRunThreads * kRunPacks);
  const Dropout dropout = make_dropout(seed, p, offset);
  const bool as_run = columns % width != 0 && columns <= kMaxRunColumns && aligned16(x.data) && aligned16(y.data) &&
                      blocks <= INT32_MAX && masks_fit(dropout);
  if (!as_run || blocks == 0) {
    const TensorRef none;
    return bias_dropout_add_fwd(y, x, none, none, seed, rows, p, offset, stream);
  }
  return dispatch_type(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    dropout_run_kernel<T><<<static_cast<unsigned>(blocks), kRunThreads, 0, stream>>>(
        y.as<T>(), x.as<T>(), rows.as<int32_t>(), n, RunRows(columns), dropout);
    return cudaGetLastError();
  });
}

}  // namespace ls_train
