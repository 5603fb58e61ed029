// What a launcher knows of a tensor: pointer, type, shape and strides. No torch, no CUDA.
#pragma once

#include <cstdint>

namespace ls_train {

enum class DType : int8_t { kFloat32, kFloat16, kBFloat16, kFloat64, kInt64, kInt32, kInt16, kUInt8, kBool };

enum class Activation : int8_t { kRelu, kGelu, kGeluTanh, kSwish };

struct TensorRef {
  static constexpr int kMaxDims = 4;

  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int dims = -1;  // -1: the optional argument was None
  int64_t sizes[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};  // in elements

  explicit operator bool() const { return dims >= 0; }

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }

  int64_t numel() const {
    int64_t count = 1;
    for (int i = 0; i < dims; ++i) count *= sizes[i];
    return count;
  }
};

}  // namespace ls_train
