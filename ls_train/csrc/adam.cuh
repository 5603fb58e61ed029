// One element's step of Adam, and what the kernels around it share (ls_train/ops/adam.py has the formulas).
#pragma once

#include "compact_master.cuh"
#include "segments.cuh"

namespace ls_train {

// Where the float32 form of the parameters is.
enum class Master { kParam, kFloat, kRemainder };

// What goes through the kernels, n elements each, in global memory or a piece of it in shared memory.
template <class T>
struct AdamStreams {
  T* param;
  float* master;       // null but for Master::kFloat
  int16_t* remainder;  // null but for Master::kRemainder
  float* exp_avg;
  float* exp_avg_sq;
  const T* grad;
};

template <class T>
struct Adam {
  AdamStreams<T> streams;
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

// Every sum of a product is an explicit fmaf: left to the compiler, kernels would round differently.
__device__ __forceinline__ void update_element(const SlotStep& s, float g, float& p, float& m, float& v) {
  g = fmaf(s.l2_decay, p, g);
  p = fmaf(-s.decay, p, p);
  m = fmaf(s.one_minus_beta1, g, s.beta1 * m);
  v = fmaf(s.one_minus_beta2 * g, g, s.beta2 * v);
  p = fmaf(-s.step_size, m / fmaf(sqrtf(v), s.root_factor, s.eps), p);
}

// kWidth neighbouring elements of one thread.
template <int kWidth, Master kMaster, class T>
struct AdamElements {
  Pack<T, kWidth> grads, params;
  Pack<float, kWidth> masters, exp_avg, exp_avg_sq;
  Pack<int16_t, kWidth> remainders;

  __device__ __forceinline__ void read(const AdamStreams<T>& streams, int64_t at) {
    grads = load<kWidth>(streams.grad + at);
    if constexpr (kMaster == Master::kFloat) {
      masters = load<kWidth>(streams.master + at);
    } else {
      params = load<kWidth>(streams.param + at);
      if constexpr (kMaster == Master::kRemainder) remainders = load<kWidth>(streams.remainder + at);
    }
    exp_avg = load<kWidth>(streams.exp_avg + at);
    exp_avg_sq = load<kWidth>(streams.exp_avg_sq + at);
  }

  __device__ __forceinline__ void update(const SlotStep& s, float scale) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      float p;
      if constexpr (kMaster == Master::kRemainder) {
        p = join_master(params.v[i], remainders.v[i]);
      } else if constexpr (kMaster == Master::kFloat) {
        p = masters.v[i];
      } else {
        p = params.v[i];
      }
      update_element(s, to_float(grads.v[i]) * scale, p, exp_avg.v[i], exp_avg_sq.v[i]);
      if constexpr (kMaster == Master::kRemainder) {
        split_master(p, params.v[i], remainders.v[i]);
      } else {
        if constexpr (kMaster == Master::kFloat) masters.v[i] = p;
        params.v[i] = from_float<T>(p);
      }
    }
  }

  __device__ __forceinline__ void write(const AdamStreams<T>& streams, int64_t at) const {
    store(streams.exp_avg + at, exp_avg);
    store(streams.exp_avg_sq + at, exp_avg_sq);
    if constexpr (kMaster == Master::kFloat) store(streams.master + at, masters);
    if constexpr (kMaster == Master::kRemainder) store(streams.remainder + at, remainders);
    store(streams.param + at, params);
  }
};

// Elements [first, end) of one slot, by the whole block: packs of kWidth, kUnroll of them read before the first is
// written.
template <int kWidth, int kUnroll, Master kMaster, class T>
__device__ __forceinline__ void update_piece(const AdamStreams<T>& streams, const SlotStep& s, float scale,
                                             int64_t first, int64_t end) {
  for_range<kWidth, kUnroll>(
      first, end,
      [&](int64_t at, int64_t step, auto count) {
        constexpr int kCount = decltype(count)::value;
        AdamElements<kWidth, kMaster, T> packs[kCount];
#pragma unroll
        for (int j = 0; j < kCount; ++j) packs[j].read(streams, at + j * step);
#pragma unroll
        for (int j = 0; j < kCount; ++j) packs[j].update(s, scale);
#pragma unroll
        for (int j = 0; j < kCount; ++j) packs[j].write(streams, at + j * step);
      },
      [&](int64_t at) {
        AdamElements<1, kMaster, T> element;
        element.read(streams, at);
        element.update(s, scale);
        element.write(streams, at);
      });
}

// Active elements of [first, end) in global memory, by the whole block, slot by slot.
template <int kWidth, int kUnroll, Master kMaster, class T>
__device__ __forceinline__ void update_range(const Adam<T>& a, float scale, int64_t first, int64_t end,
                                             SlotStep& shared_step) {
  int slot = find_slot(a.segments, a.slots, first);
  for (; first < end; ++slot) {
    const int64_t stop = min(end, a.segments[slot + 1]);
    if (first < stop && (a.active == nullptr || a.active[slot] != 0)) {
      __syncthreads();
      if (threadIdx.x == 0) shared_step = slot_step(a, slot);
      __syncthreads();
      const SlotStep s = shared_step;
      update_piece<kWidth, kUnroll, kMaster>(a.streams, s, scale, first, stop);
    }
    first = stop;
  }
}

}  // namespace ls_train
