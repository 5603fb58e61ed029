// y = dropout(x), also its own backward: bias_dropout_add without bias and residual, and a kernel of its own for rows
// that are no multiple of a pack. Reads x once, writes y once: 2 * N * C * sizeof(T) bytes.
//
// dropout_run_kernel
//   The tensor as one run of 16-byte packs, wherever its rows end: kRunPacks packs a thread, blockDim.x apart. A pack
//   calls the generator once for each group of eight columns that it touches, mostly two.
#include "row_kernels.cuh"

namespace ls_train {
namespace {

constexpr int kRunThreads = 256;
constexpr int kRunPacks = 4;

// Bit i: whether element i of the run is kept, for kWidth elements from (row, column) on.
template <int kWidth>
__device__ __forceinline__ uint32_t keep_run(const DropoutKey& key, int64_t row, int column, int columns) {
  uint32_t kept = 0;
  for (int i = 0; i < kWidth;) {
    const Keep8 keep = keep8(key, row, static_cast<uint32_t>(column) / 8);
    uint32_t group = 0;
#pragma unroll
    for (int lane = 0; lane < 8; ++lane) group |= static_cast<uint32_t>(keep[lane]) << lane;
    const int count = min(8 - column % 8, columns - column);  // elements of the group from here on
    kept |= (group >> column % 8 & ((1u << count) - 1)) << i;
    i += count;
    column += count;
    if (column == columns) {
      column = 0;
      ++row;
    }
  }
  return kept;
}

template <class T>
__global__ void __launch_bounds__(kRunThreads)
    dropout_run_kernel(T* __restrict__ y, const T* __restrict__ x, const int32_t* __restrict__ rows, int64_t n,
                       int columns, const Dropout dropout) {
  constexpr int kWidth = kPackWidth<T>, kStep = kRunThreads * kWidth;
  const int64_t total = n * columns;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kRunPacks * kStep + static_cast<int>(threadIdx.x) * kWidth;
  Pack<T, kWidth> packs[kRunPacks];
#pragma unroll
  for (int k = 0; k < kRunPacks; ++k) {
    const int64_t at = first + k * kStep;
    packs[k] = zero_pack<T, kWidth>();
    if (at + kWidth <= total) {
      packs[k] = load_streaming<kWidth>(x + at);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (at + i < total) packs[k].v[i] = x[at + i];
      }
    }
  }
  const DropoutKey key = dropout_key(dropout);
  const int64_t used = used_rows(rows, n) * columns;
  int64_t row = first / columns;
  uint32_t column = static_cast<uint32_t>(first - row * columns);
#pragma unroll
  for (int k = 0; k < kRunPacks; ++k) {
    const int64_t at = first + k * kStep;
    if (at >= total) break;
    const int in_use = static_cast<int>(max(int64_t{0}, min(int64_t{kWidth}, used - at)));
    uint32_t kept = (1u << in_use) - 1;
    if (key.active() && in_use > 0) kept &= keep_run<kWidth>(key, row, static_cast<int>(column), columns);
    float v[kWidth];
    unpack(packs[k], v);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) v[i] = kept >> i & 1u ? v[i] * key.scale : 0.f;
    const Pack<T, kWidth> out = pack_floats<T>(v);
    if (at + kWidth <= total) {
      store(y + at, out);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (at + i < total) y[at + i] = out.v[i];
      }
    }
    const uint32_t next = column + kStep;
    row += next / static_cast<uint32_t>(columns);
    column = next % static_cast<uint32_t>(columns);
  }
}

}  // namespace

cudaError_t dropout_fwd(const TensorRef& y, const TensorRef& x, const TensorRef& seed, const TensorRef& rows, double p,
                        int64_t offset, cudaStream_t stream) {
  const int64_t n = x.sizes[0];
  const int columns = static_cast<int>(x.sizes[1]);
  const int64_t width = x.dtype == DType::kFloat32 ? kPackWidth<float> : kPackWidth<half>;
  const int64_t blocks = ceil_div(n * columns, width * kRunThreads * kRunPacks);
  const bool as_run = columns % width != 0 && aligned16(x.data) && aligned16(y.data) && blocks <= INT32_MAX;
  if (!as_run || blocks == 0) {
    const TensorRef none;
    return bias_dropout_add_fwd(y, x, none, none, seed, rows, p, offset, stream);
  }
  return dispatch_type(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    dropout_run_kernel<T><<<static_cast<unsigned>(blocks), kRunThreads, 0, stream>>>(
        y.as<T>(), x.as<T>(), rows.as<int32_t>(), n, columns, make_dropout(seed, p, offset));
    return cudaGetLastError();
  });
}

}  // namespace ls_train
