// Adam over a flat parameter buffer (ls_train/ops/adam.py has the formulas), and the counters before it.
//
// adam_kernel
//   Grid n / 16384, block 256: every block a range of elements, gone over slot by slot; short ranges keep the pages of
//   the seven streams that are open at a time together, and packs of 4 elements make a warp's access one run of memory.
//   Reads grad once, reads and writes param or its float master, exp_avg and exp_avg_sq once, writes the 16-bit param
//   once: 28 bytes a parameter, with 16-bit param and grad as with float ones. With 16-bit remainders instead of the
//   masters 24 bytes: param and remainder are read and written.
// adam_prepare_kernel
//   One block; 16 * S bytes.
#include "adam.cuh"
#include "ops.h"

namespace ls_train {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 4;
constexpr int64_t kBlockElements = 16 * 1024;

template <class T, int kWidth, Master kMaster>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) adam_kernel(const Adam<T> a) {
  // Packs whose reads a thread has in flight; joining and splitting masters takes registers.
  constexpr int kUnroll = kMaster == Master::kRemainder ? 1 : 2;
  __shared__ SlotStep shared_step;
  if (a.found_inf != nullptr && *a.found_inf > 0.f) return;
  const float scale = a.grad_scale != nullptr ? *a.grad_scale : 1.f;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kBlockElements;
  update_range<kWidth, kUnroll, kMaster>(a, scale, first, min(a.n, first + kBlockElements), shared_step);
}

template <class T, Master kMaster>
cudaError_t launch_adam(const Adam<T>& a, bool aligned, cudaStream_t stream) {
  const auto kernel = aligned ? adam_kernel<T, kPackWidth<float>, kMaster> : adam_kernel<T, 1, kMaster>;
  kernel<<<static_cast<unsigned>(ceil_div<int64_t>(a.n, kBlockElements)), kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

__global__ void __launch_bounds__(kThreads)
    adam_prepare_kernel(int64_t* __restrict__ segment_step, int64_t* __restrict__ update,
                        float* __restrict__ grad_scale, const uint8_t* __restrict__ active,
                        const float* __restrict__ norm, const float* __restrict__ found_inf,
                        const float* __restrict__ multiplier, float max_norm, int slots) {
  if (found_inf == nullptr || !(*found_inf > 0.f)) {
    for (int slot = static_cast<int>(threadIdx.x); slot < slots; slot += kThreads) {
      segment_step[slot] += active == nullptr || active[slot] != 0;
    }
    if (threadIdx.x == 0) update[0] += 1;
  }
  if (threadIdx.x == 0) {
    float factor = multiplier != nullptr ? *multiplier : 1.f;
    if (max_norm > 0.f) {
      const float clip = max_norm / (*norm * factor + 1e-6f);
      factor *= clip >= 1.f ? 1.f : clip;  // NaN stays NaN
    }
    *grad_scale = factor;
  }
}

}  // namespace

cudaError_t adam_prepare(const TensorRef& segment_step, const TensorRef& update, const TensorRef& grad_scale,
                         const TensorRef& active, const TensorRef& norm, const TensorRef& found_inf,
                         const TensorRef& multiplier, double max_norm, cudaStream_t stream) {
  adam_prepare_kernel<<<1, kThreads, 0, stream>>>(
      segment_step.as<int64_t>(), update.as<int64_t>(), grad_scale.as<float>(), active.as<uint8_t>(), norm.as<float>(),
      found_inf.as<float>(), multiplier.as<float>(), static_cast<float>(max_norm),
      static_cast<int>(segment_step.sizes[0]));
  return cudaGetLastError();
}

cudaError_t adam(const TensorRef& param, const TensorRef& master, const TensorRef& remainder, const TensorRef& exp_avg,
                 const TensorRef& exp_avg_sq, const TensorRef& grad, const TensorRef& segments,
                 const TensorRef& segment_group, const TensorRef& segment_step, const TensorRef& active,
                 const TensorRef& hyper, const TensorRef& update, const TensorRef& grad_scale,
                 const TensorRef& found_inf, bool decoupled_decay, bool bias_correction, bool eps_after_correction,
                 cudaStream_t stream) {
  return dispatch_type(param.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    Adam<T> a;
    a.streams.param = param.as<T>();
    a.streams.master = master.as<float>();
    a.streams.remainder = remainder.as<int16_t>();
    a.streams.exp_avg = exp_avg.as<float>();
    a.streams.exp_avg_sq = exp_avg_sq.as<float>();
    a.streams.grad = grad.as<T>();
    a.segments = segments.as<int64_t>();
    a.segment_group = segment_group.as<int32_t>();
    a.segment_step = segment_step.as<int64_t>();
    a.active = active.as<uint8_t>();
    a.hyper = hyper.as<double>();
    a.update = update.as<int64_t>();
    a.grad_scale = grad_scale.as<float>();
    a.found_inf = found_inf.as<float>();
    a.n = param.numel();
    a.slots = static_cast<int>(segment_group.sizes[0]);
    a.decoupled_decay = decoupled_decay;
    a.bias_correction = bias_correction;
    a.eps_after_correction = eps_after_correction;
    if (a.n == 0) return cudaSuccess;
    const AdamStreams<T>& x = a.streams;
    const bool aligned = aligned16(x.param) && aligned16(x.master) && aligned16(x.remainder) && aligned16(x.exp_avg) &&
                         aligned16(x.exp_avg_sq) && aligned16(x.grad);
    if constexpr (sizeof(T) == 4) {
      return launch_adam<T, Master::kParam>(a, aligned, stream);
    } else if (x.remainder == nullptr) {
      return launch_adam<T, Master::kFloat>(a, aligned, stream);
    } else {
      return launch_adam<T, Master::kRemainder>(a, aligned, stream);
    }
  });
}

}  // namespace ls_train
