// What an operator expects of its tensor arguments, and the messages when they do not fit. No torch, no CUDA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "tensor_ref.h"

namespace ls_train {

// kFloating: float32, float16 or bfloat16, the same throughout a call; kAnyFloating: any of these
enum class Type : char { kFloating, kAnyFloating, kFloat32, kFloat64, kInt64, kInt32, kInt16, kUInt8, kBool };

// shape has one character a dimension: a capital letter stands for one size throughout a call, "+" after it for one
// more, a digit for itself, "*" for anything.
struct Argument {
  const char* name;
  Type type;
  const char* shape;
  bool optional = false;
  bool strided = false;     // only the last dimension must be contiguous
  bool host = false;        // in host memory
  bool any_layout = false;  // not even that
};

constexpr Argument optional(Argument argument) {
  argument.optional = true;
  return argument;
}

constexpr Argument strided(Argument argument) {
  argument.strided = true;
  return argument;
}

constexpr Argument host(Argument argument) {
  argument.host = true;
  return argument;
}

constexpr Argument any_layout(Argument argument) {
  argument.any_layout = true;
  return argument;
}

// Sizes that the letters of a call stand for.
struct Sizes {
  int64_t values[26];
  Sizes() { std::fill_n(values, 26, int64_t{-1}); }
  int64_t& operator[](char letter) { return values[letter - 'A']; }
  int64_t operator[](char letter) const { return values[letter - 'A']; }
};

[[noreturn]] inline void fail(const char* op, const std::string& what) {
  throw std::runtime_error("ls_train." + std::string(op) + ": " + what);
}

[[noreturn]] inline void fail_argument(const char* op, const char* name, const std::string& what) {
  fail(op, "argument " + std::string(name) + " " + what);
}

inline const char* type_name(DType type) {
  constexpr const char* kNames[] = {"float32", "float16", "bfloat16", "float64", "int64",
                                    "int32",   "int16",   "uint8",    "bool"};
  return kNames[static_cast<int>(type)];
}

inline std::string shape_text(const TensorRef& t) {
  std::string text = "(";
  for (int i = 0; i < t.dims; ++i) text += (i > 0 ? ", " : "") + std::to_string(t.sizes[i]);
  if (t.dims == 1) text += ",";
  return text + ")";
}

inline std::string needed_shape(const Argument& argument, const Sizes& sizes) {
  std::string text = "(";
  for (const char* c = argument.shape; *c != 0; ++c) {
    if (text.size() > 1 && *c != '+') text += ", ";
    if (*c == '+') {
      text += " + 1";
    } else {
      text += *c;
      if (*c >= 'A' && *c <= 'Z' && sizes[*c] >= 0) text += " = " + std::to_string(sizes[*c]);
    }
  }
  return text + ")";
}

inline bool fits_shape(const Argument& argument, const TensorRef& t, Sizes& sizes) {
  int dim = 0;
  for (const char* c = argument.shape; *c != 0; ++c, ++dim) {
    if (dim == t.dims) return false;
    int64_t size = t.sizes[dim];
    if (*c == '*') continue;
    if (*c >= '0' && *c <= '9') {
      if (size != *c - '0') return false;
      continue;
    }
    const char letter = *c;
    if (c[1] == '+') {
      ++c;
      --size;
      if (size < 0) return false;
    }
    if (sizes[letter] < 0) sizes[letter] = size;
    if (sizes[letter] != size) return false;
  }
  return dim == t.dims;
}

inline bool fits_layout(const Argument& argument, const TensorRef& t) {
  if (argument.any_layout) return true;
  int64_t expected = 1;
  for (int i = t.dims - 1; i >= 0; --i) {
    if (t.sizes[i] == 0) return true;
    if (t.sizes[i] != 1 && t.strides[i] != expected) return false;
    if (argument.strided) return true;
    expected *= t.sizes[i];
  }
  return true;
}

}  // namespace ls_train
