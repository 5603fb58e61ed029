// Adam over a flat parameter buffer (ls_train/ops/adam.py has the formulas), and the counters before it.
//
// adam_kernel
//   Grid n / 16384, block 256: every block an equal range of elements, gone over slot by slot; short ranges keep the
//   pages of the seven streams that are open at a time together. Reads
//   grad once, reads and writes param or its float master, exp_avg and exp_avg_sq once, writes the 16-bit param once:
//   28 bytes a parameter, with 16-bit param and grad as with float ones. With 16-bit remainders instead of the masters
//   24 bytes: param and remainder are read and written.
// adam_prepare_kernel
//   One block; 16 * S bytes.
#include "compact_master.cuh"
#include "ops.h"
#include "segments.cuh"

namespace ls_train {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 4;
constexpr int64_t kBlockElements = 16 * 1024;

template <class T>
struct Adam {
  T* param;
  float* master;       // null when T is float, and with remainders
  int16_t* remainder;  // null with masters
  float* exp_avg;
  float* exp_avg_sq;
  const T* grad;
  const int64_t* segments;
  const int32_t* segment_group;
  const int64_t* segment_step;
  const uint8_t* active;  // may be null, as grad_scale and found_inf
  const double* hyper;    // (G, 6): beta1, beta2, eps, weight_decay, lr, lr of later updates
  const int64_t* update;
  const float* grad_scale;
  const float* found_inf;
  int64_t n;
  int slots;
  bool decoupled_decay, bias_correction, eps_after_correction;
};

// One slot's constants, from double as the reference has them.
struct SlotStep {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
  float l2_decay;     // added to the gradient: weight_decay, or 0 when decoupled
  float decay;        // subtracted from the parameter: lr * weight_decay, or 0 when not decoupled
  float root_factor;  // of sqrt(v)
  float step_size;
};

template <class T>
__device__ SlotStep slot_step(const Adam<T>& a, int slot) {
  const double* h = a.hyper + 6 * static_cast<int64_t>(a.segment_group[slot]);
  const double beta1 = h[0], beta2 = h[1], lr = a.update[0] <= a.update[1] ? h[4] : h[5];
  const double step = static_cast<double>(a.segment_step[slot]);
  const double correction1 = a.bias_correction ? 1.0 - pow(beta1, step) : 1.0;
  const double root = a.bias_correction ? sqrt(1.0 - pow(beta2, step)) : 1.0;
  SlotStep s;
  s.beta1 = static_cast<float>(beta1);
  s.one_minus_beta1 = static_cast<float>(1.0 - beta1);
  s.beta2 = static_cast<float>(beta2);
  s.one_minus_beta2 = static_cast<float>(1.0 - beta2);
  s.eps = static_cast<float>(h[2]);
  s.l2_decay = a.decoupled_decay ? 0.f : static_cast<float>(h[3]);
  s.decay = a.decoupled_decay ? static_cast<float>(lr * h[3]) : 0.f;
  s.root_factor = a.eps_after_correction ? static_cast<float>(1.0 / root) : 1.f;
  s.step_size = static_cast<float>(a.eps_after_correction ? lr / correction1 : lr * root / correction1);
  return s;
}

__device__ __forceinline__ void update_element(const SlotStep& s, float g, float& p, float& m, float& v) {
  g = fmaf(s.l2_decay, p, g);
  p = fmaf(-s.decay, p, p);
  m = fmaf(s.one_minus_beta1, g, s.beta1 * m);
  v = fmaf(s.one_minus_beta2 * g, g, s.beta2 * v);
  p -= s.step_size * (m / fmaf(sqrtf(v), s.root_factor, s.eps));
}

template <int kWidth>
__device__ __forceinline__ void load_state(const float* p, float (&x)[kWidth]) {
  constexpr int kPart = kWidth < 4 ? kWidth : 4;
#pragma unroll
  for (int j = 0; j < kWidth; j += kPart) {
    const Pack<float, kPart> pack = load_streaming<kPart>(p + j);
#pragma unroll
    for (int i = 0; i < kPart; ++i) x[j + i] = pack.v[i];
  }
}

template <int kWidth>
__device__ __forceinline__ void store_state(float* p, const float (&x)[kWidth]) {
  constexpr int kPart = kWidth < 4 ? kWidth : 4;
#pragma unroll
  for (int j = 0; j < kWidth; j += kPart) {
    Pack<float, kPart> pack;
#pragma unroll
    for (int i = 0; i < kPart; ++i) pack.v[i] = x[j + i];
    store_streaming(p + j, pack);
  }
}

// Where the float32 form of the parameters is.
enum class Master { kParam, kFloat, kRemainder };

template <int kWidth, Master kMaster, class T>
__device__ __forceinline__ void update_pack(const Adam<T>& a, const SlotStep& s, float scale, int64_t at) {
  const Pack<T, kWidth> grads = load_streaming<kWidth>(a.grad + at);
  float p[kWidth], m[kWidth], v[kWidth];
  if constexpr (kMaster == Master::kParam) {
    load_state(a.param + at, p);
  } else if constexpr (kMaster == Master::kFloat) {
    load_state(a.master + at, p);
  } else {
    const Pack<T, kWidth> params = load_streaming<kWidth>(a.param + at);
    const Pack<int16_t, kWidth> remainders = load_streaming<kWidth>(a.remainder + at);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) p[i] = join_master(params.v[i], remainders.v[i]);
  }
  load_state(a.exp_avg + at, m);
  load_state(a.exp_avg_sq + at, v);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) update_element(s, to_float(grads.v[i]) * scale, p[i], m[i], v[i]);
  store_state(a.exp_avg + at, m);
  store_state(a.exp_avg_sq + at, v);
  if constexpr (kMaster == Master::kRemainder) {
    Pack<T, kWidth> params;
    Pack<int16_t, kWidth> remainders;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) split_master(p[i], params.v[i], remainders.v[i]);
    store_streaming(a.remainder + at, remainders);
    store(a.param + at, params);
  } else {
    if constexpr (kMaster == Master::kFloat) store_state(a.master + at, p);
    store(a.param + at, pack_floats<T>(p));
  }
}

template <class T, int kWidth, Master kMaster>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) adam_kernel(const Adam<T> a) {
  __shared__ SlotStep shared_step;
  if (a.found_inf != nullptr && *a.found_inf > 0.f) return;
  const BlockRange range = block_range(a.n);
  if (range.first >= range.end) return;
  const float scale = a.grad_scale != nullptr ? *a.grad_scale : 1.f;
  int slot = find_slot(a.segments, a.slots, range.first);
  for (int64_t first = range.first; first < range.end; ++slot) {
    const int64_t end = min(range.end, a.segments[slot + 1]);
    if (first < end && (a.active == nullptr || a.active[slot] != 0)) {
      __syncthreads();
      if (threadIdx.x == 0) shared_step = slot_step(a, slot);
      __syncthreads();
      const SlotStep s = shared_step;
      for_range<kWidth, 1>(
          first, end, [&](int64_t at) { update_pack<kWidth, kMaster>(a, s, scale, at); },
          [&](int64_t at) { update_pack<1, kMaster>(a, s, scale, at); });
    }
    first = end;
  }
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
    a.param = param.as<T>();
    a.master = master.as<float>();
    a.remainder = remainder.as<int16_t>();
    a.exp_avg = exp_avg.as<float>();
    a.exp_avg_sq = exp_avg_sq.as<float>();
    a.grad = grad.as<T>();
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
    const auto launch = [&](auto kernel) {
      const int64_t blocks = ceil_div<int64_t>(a.n, kBlockElements);
      kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(a);
      return cudaGetLastError();
    };
    const bool aligned = aligned16(a.param) && aligned16(a.master) && aligned16(a.remainder) && aligned16(a.exp_avg) &&
                         aligned16(a.exp_avg_sq) && aligned16(a.grad);
    const auto launch_form = [&](auto form) {
      constexpr Master kMaster = decltype(form)::value;
      // Half a pack of 16-bit numbers, a whole one of floats: joining and splitting masters takes registers.
      constexpr int kWidth = kMaster == Master::kRemainder ? kPackWidth<float> : kPackWidth<T>;
      return aligned ? launch(adam_kernel<T, kWidth, kMaster>) : launch(adam_kernel<T, 1, kMaster>);
    };
    if constexpr (sizeof(T) == 4) {
      return launch_form(std::integral_constant<Master, Master::kParam>());
    } else if (a.remainder == nullptr) {
      return launch_form(std::integral_constant<Master, Master::kFloat>());
    } else {
      return launch_form(std::integral_constant<Master, Master::kRemainder>());
    }
  });
}

}  // namespace ls_train
