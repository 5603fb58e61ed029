// Label-smoothed cross entropy of rows of logits, forward and backward apart; cross_entropy.cuh has the formulas.
//
// cross_entropy_fwd_kernel
//   Grid N, block up to 512, one row a block. Reads the logits once: N * V * sizeof(T) bytes.
// cross_entropy_bwd_kernel
//   Grid N, block up to 512, one row a block. Reads logits once, writes dlogits once: 2 * N * V * sizeof(T) bytes.
#include "cross_entropy.cuh"

namespace ls_train {
namespace {

template <class T, int kWidth>
__global__ void __launch_bounds__(kLossThreads) cross_entropy_fwd_kernel(const Losses a, const T* logits) {
  __shared__ float scratch[2 * kLossThreads / kWarp];
  const int64_t row = blockIdx.x;
  if (row >= used_rows(a.rows, a.n)) {
    write_ignored(a, row);
    if (threadIdx.x == 0) a.lse[row] = 0.f;
    return;
  }
  const T* x = logits + row * a.classes;
  const bool counted = counts(a, row);
  const int64_t target = counted ? a.target[row] : 0;
  const float at_target = target_logit(x, target, a.classes);
  RowPart part;
  for_packs<kWidth>(x, a.classes, [&](const Pack<T, kWidth>& pack, int column) {
    float v[kWidth];
    unpack(pack, v);
    part.add(v, column, target, at_target);
  });
  finish_row(a, part, row, at_target, scratch);
  if (!counted) write_ignored(a, row);  // by the thread that wrote the row's outputs; lse is kept
}

template <class T, int kWidth>
__global__ void __launch_bounds__(kLossThreads)
    cross_entropy_bwd_kernel(const Losses a, T* dlogits, const float* __restrict__ dloss, const T* logits,
                             const float* __restrict__ lse) {
  const int64_t row = blockIdx.x;
  T* out = dlogits + row * a.classes;
  if (!counts(a, row)) {
    write_zeros<T, kWidth>(out, a.classes);
    return;
  }
  const float scale = dloss[row], row_lse = lse[row], share = a.share();
  const int64_t target = a.target[row];
  for_packs<kWidth>(logits + row * a.classes, a.classes, [&](const Pack<T, kWidth>& pack, int column) {
    float v[kWidth];
    unpack(pack, v);
    gradient(v, column, target, row_lse, share, a.label_smoothing, scale);
    store(out + column, pack_floats<T>(v));
  });
}

}  // namespace

cudaError_t cross_entropy_fwd(const TensorRef& loss, const TensorRef& nll, const TensorRef& lse,
                              const TensorRef& correct, const TensorRef& logits, const TensorRef& target,
                              const TensorRef& rows, double label_smoothing, int64_t ignore_index,
                              cudaStream_t stream) {
  const Losses a = losses(loss, nll, lse, correct, logits, target, rows, label_smoothing, ignore_index);
  if (a.n == 0 || a.classes == 0) return cudaSuccess;
  return dispatch_type(logits.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto launch = [&](auto kernel, int width) {
      kernel<<<static_cast<unsigned>(a.n), threads_for(a.classes, width), 0, stream>>>(a, logits.as<T>());
      return cudaGetLastError();
    };
    return packs_fit<T>(a.classes, logits.data) ? launch(cross_entropy_fwd_kernel<T, kPackWidth<T>>, kPackWidth<T>)
                                                : launch(cross_entropy_fwd_kernel<T, 1>, 1);
  });
}

cudaError_t cross_entropy_bwd(const TensorRef& dlogits, const TensorRef& dloss, const TensorRef& logits,
                              const TensorRef& lse, const TensorRef& target, const TensorRef& rows,
                              double label_smoothing, int64_t ignore_index, cudaStream_t stream) {
  const TensorRef none;
  const Losses a = losses(none, none, none, none, logits, target, rows, label_smoothing, ignore_index);
  if (a.n == 0 || a.classes == 0) return cudaSuccess;
  return dispatch_type(logits.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto launch = [&](auto kernel, int width) {
      kernel<<<static_cast<unsigned>(a.n), threads_for(a.classes, width), 0, stream>>>(
          a, dlogits.as<T>(), dloss.as<float>(), logits.as<T>(), lse.as<float>());
      return cudaGetLastError();
    };
    return packs_fit<T>(a.classes, logits.data, dlogits.data)
               ? launch(cross_entropy_bwd_kernel<T, kPackWidth<T>>, kPackWidth<T>)
               : launch(cross_entropy_bwd_kernel<T, 1>, 1);
  });
}

}  // namespace ls_train
