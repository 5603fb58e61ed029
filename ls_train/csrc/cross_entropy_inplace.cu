// Label-smoothed cross entropy of rows of logits that become their own gradient; cross_entropy.cuh has the formulas.
//
// cross_entropy_inplace_kernel
//   Grid N, block up to 512, one row a block, the row staged in shared memory (80 KB for 40k halves: two blocks a
//   multiprocessor). Reads and writes the logits once: 2 * N * V * sizeof(T) bytes. Rows that do not fit or are not
//   aligned (kStaged false) are read a second time, mostly from L2.
#include <cuda_pipeline_primitives.h>

#include "cross_entropy.cuh"

namespace ls_train {
namespace {

template <class T, int kWidth, bool kStaged>
__global__ void __launch_bounds__(kLossThreads)
    cross_entropy_inplace_kernel(const Losses a, T* logits, const float* __restrict__ grad_scale) {
  extern __shared__ uint4 staged_words[];
  __shared__ float scratch[2 * kLossThreads / kWarp];
  const int64_t row = blockIdx.x;
  T* x = logits + row * a.classes;
  if (!counts(a, row)) {
    write_ignored(a, row);
    write_zeros<T, kWidth>(x, a.classes);
    return;
  }
  const int64_t target = a.target[row];
  const float scale = grad_scale != nullptr ? *grad_scale : 1.f, share = a.share();
  const int step = static_cast<int>(blockDim.x) * kWidth, start = static_cast<int>(threadIdx.x) * kWidth;
  RowPart part;
  float at_target, lse;
  T* staged = reinterpret_cast<T*>(staged_words);  // each thread reads only what it copied itself
  const auto add = [&](const Pack<T, kWidth>& pack, int column) {
    float v[kWidth];
    unpack(pack, v);
    part.add(v, column, target, at_target);
  };
  const auto write = [&](const Pack<T, kWidth>& pack, int column) {
    float v[kWidth];
    unpack(pack, v);
    gradient(v, column, target, lse, share, a.label_smoothing, scale);
    store(x + column, pack_floats<T>(v));
  };
  if constexpr (kStaged) {
    // In two groups, so that the first is summed while the second arrives.
    const int half_way = start + ceil_div(a.classes, 2 * step) * step;
    int c = start;
    for (; c < min(half_way, a.classes); c += step) __pipeline_memcpy_async(staged + c, x + c, 16);
    __pipeline_commit();
    for (; c < a.classes; c += step) __pipeline_memcpy_async(staged + c, x + c, 16);
    __pipeline_commit();
    at_target = target_logit(x, target, a.classes);
    __pipeline_wait_prior(1);
    for (c = start; c < min(half_way, a.classes); c += step) add(load<kWidth>(staged + c), c);
    __pipeline_wait_prior(0);
    for (; c < a.classes; c += step) add(load<kWidth>(staged + c), c);
  } else {
    at_target = target_logit(x, target, a.classes);
    for_packs<kWidth>(x, a.classes, add);
  }
  // The barriers inside come after every thread's read of the target's logit and before the first write.
  lse = finish_row(a, part, row, at_target, scratch);
  if constexpr (kStaged) {
    for (int c = start; c < a.classes; c += step) write(load<kWidth>(staged + c), c);
  } else {
    for_packs<kWidth>(x, a.classes, write);
  }
}

}  // namespace

cudaError_t cross_entropy_inplace(const TensorRef& logits, const TensorRef& loss, const TensorRef& nll,
                                  const TensorRef& correct, const TensorRef& target, const TensorRef& rows,
                                  const TensorRef& grad_scale, double label_smoothing, int64_t ignore_index,
                                  cudaStream_t stream) {
  const Losses a = losses(loss, nll, TensorRef(), correct, logits, target, rows, label_smoothing, ignore_index);
  if (a.n == 0 || a.classes == 0) return cudaSuccess;
  return dispatch_type(logits.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kWide = kPackWidth<T>;
    const auto launch = [&](auto kernel, int width, size_t shared) {
      kernel<<<static_cast<unsigned>(a.n), threads_for(a.classes, width), shared, stream>>>(a, logits.as<T>(),
                                                                                            grad_scale.as<float>());
      return cudaGetLastError();
    };
    if (!packs_fit<T>(a.classes, logits.data)) return launch(cross_entropy_inplace_kernel<T, 1, false>, 1, 0);
    const size_t row_bytes = a.classes * sizeof(T);
    if (!allow_shared_memory<cross_entropy_inplace_kernel<T, kWide, true>>(row_bytes)) {
      return launch(cross_entropy_inplace_kernel<T, kWide, false>, kWide, 0);
    }
    return launch(cross_entropy_inplace_kernel<T, kWide, true>, kWide, row_bytes);
  });
}

}  // namespace ls_train
