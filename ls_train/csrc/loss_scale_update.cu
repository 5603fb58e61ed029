// Dynamic loss scale (ls_train/ops/loss_scale_update.py has the rule).
//
// loss_scale_update_kernel
//   One thread; 44 bytes.
#include "ops.h"

namespace ls_train {
namespace {

__global__ void loss_scale_update_kernel(float* __restrict__ scale, int64_t* __restrict__ counters,
                                         float* __restrict__ exhausted, const float* __restrict__ found_inf,
                                         float factor, int64_t window, double tolerance, float threshold,
                                         double min_scale) {
  const int64_t iteration = counters[0];
  if (*found_inf > 0.f) {
    const int64_t overflows = counters[3] + 1;
    float smaller = *scale;
    counters[1] = iteration;
    counters[3] = overflows;
    if (static_cast<double>(overflows) / static_cast<double>(iteration - counters[2]) >= tolerance) {
      smaller = fmaxf(smaller / factor, threshold);
      counters[2] = iteration;
      counters[3] = 0;
    }
    if (smaller <= min_scale) {
      *exhausted = 1.f;
    } else {
      *scale = smaller;
    }
  } else if ((iteration - counters[1]) % window == 0) {
    *scale *= factor;
    counters[2] = iteration;
  }
  counters[0] = iteration + 1;
}

}  // namespace

cudaError_t loss_scale_update(const TensorRef& scale, const TensorRef& counters, const TensorRef& exhausted,
                              const TensorRef& found_inf, double factor, int64_t window, double tolerance,
                              double threshold, double min_scale, cudaStream_t stream) {
  loss_scale_update_kernel<<<1, 1, 0, stream>>>(scale.as<float>(), counters.as<int64_t>(), exhausted.as<float>(),
                                                found_inf.as<float>(), static_cast<float>(factor), window, tolerance,
                                                static_cast<float>(threshold), min_scale);
  return cudaGetLastError();
}

}  // namespace ls_train
