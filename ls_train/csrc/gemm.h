// Products of 16-bit matrices through cuBLASLt, each by a plan that is made once for a shape. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tensor_ref.h"

namespace ls_train {

// Where products run. The workspace is of this stream alone; a plan uses no more of it than there is.
struct GemmContext {
  void* library = nullptr;  // from dlopen: a library that depends on cuBLASLt
  void* handle = nullptr;   // of cuBLAS or cuBLASLt, for the device
  int device = -1;          // the current one
  void* workspace = nullptr;
  int64_t workspace_size = 0;  // bytes
  cudaStream_t stream = nullptr;
};

// out = a b + bias, or out += a b; bias may be empty. out has the factors' type or, without bias, is float32. Sums and
// partial sums are float32. Returns false, with nothing done, for what cuBLASLt is not asked for: other types, empty
// matrices, rows or columns that are not contiguous, and shapes that it has no algorithm for. Equal shapes, alignments
// and workspaces take the same algorithm, whose bits do not depend on the call.
bool gemm(const GemmContext& context, const TensorRef& out, const TensorRef& a, const TensorRef& b,
          const TensorRef& bias, bool accumulate);

}  // namespace ls_train
