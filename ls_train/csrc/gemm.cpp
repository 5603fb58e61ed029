#include "gemm.h"

#include <dlfcn.h>
#include <library_types.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <optional>
#include <string>
#include <unordered_map>

#include "arguments.h"

namespace ls_train {
namespace {

// What is used of cuBLASLt's C interface. It is declared here because a toolkit may come without the header (it is in
// libcublas-dev); names and values are those of cublasLt.h and cublas_api.h, the same from CUDA 12.6 to 13.
using Handle = void*;
using Descriptor = void*;
enum Status { CUBLAS_STATUS_SUCCESS = 0 };
enum ComputeType { CUBLAS_COMPUTE_32F = 68 };
enum Operation : int32_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };
enum Epilogue : uint32_t { CUBLASLT_EPILOGUE_BIAS = 4 };
enum ReductionScheme : uint32_t { CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2 };
enum DescriptorAttribute {
  CUBLASLT_MATMUL_DESC_TRANSA = 3,
  CUBLASLT_MATMUL_DESC_TRANSB = 4,
  CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
  CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8
};
enum PreferenceAttribute {
  CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
  CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8
};
struct Algorithm {
  uint64_t data[8];
};
struct HeuristicResult {
  Algorithm algorithm;
  size_t workspace;
  Status state;
  float waves;
  int reserved[4];
};

struct CublasLt {
  Status (*desc_create)(Descriptor*, ComputeType, cudaDataType);
  Status (*desc_set)(Descriptor, DescriptorAttribute, const void*, size_t);
  Status (*desc_destroy)(Descriptor);
  Status (*layout_create)(Descriptor*, cudaDataType, uint64_t, uint64_t, int64_t);
  Status (*layout_destroy)(Descriptor);
  Status (*preference_create)(Descriptor*);
  Status (*preference_set)(Descriptor, PreferenceAttribute, const void*, size_t);
  Status (*preference_destroy)(Descriptor);
  Status (*heuristic)(Handle, Descriptor, Descriptor, Descriptor, Descriptor, Descriptor, Descriptor, int,
                      HeuristicResult*, int*);
  Status (*matmul)(Handle, Descriptor, const void*, const void*, Descriptor, const void*, Descriptor, const void*,
                   const void*, Descriptor, void*, Descriptor, const Algorithm*, void*, size_t, cudaStream_t);
  bool complete = true;

  explicit CublasLt(void* library) {
    find(library, "cublasLtMatmulDescCreate", desc_create);
    find(library, "cublasLtMatmulDescSetAttribute", desc_set);
    find(library, "cublasLtMatmulDescDestroy", desc_destroy);
    find(library, "cublasLtMatrixLayoutCreate", layout_create);
    find(library, "cublasLtMatrixLayoutDestroy", layout_destroy);
    find(library, "cublasLtMatmulPreferenceCreate", preference_create);
    find(library, "cublasLtMatmulPreferenceSetAttribute", preference_set);
    find(library, "cublasLtMatmulPreferenceDestroy", preference_destroy);
    find(library, "cublasLtMatmulAlgoGetHeuristic", heuristic);
    find(library, "cublasLtMatmul", matmul);
  }

  template <class Function>
  void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    complete = complete && function != nullptr;
  }
};

void check(Status status, const char* function) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    fail("layer", std::string(function) + " failed with cuBLAS status " + std::to_string(status));
  }
}

// A factor as cuBLASLt sees it, which counts down columns: rows of ours are its columns, so out^T = b^T a^T.
struct Factor {
  bool transposed;
  int64_t rows, columns, stride;  // as stored, `stride` elements from column to column
};

std::optional<Factor> factor(const TensorRef& matrix) {
  const auto stored = [&](int outer, int inner) -> std::optional<Factor> {
    const int64_t count = matrix.sizes[outer], length = matrix.sizes[inner];
    const bool contiguous = length == 1 || matrix.strides[inner] == 1;
    if (!contiguous || (count > 1 && matrix.strides[outer] < length)) return std::nullopt;
    return Factor{outer == 1, length, count, count > 1 ? matrix.strides[outer] : length};
  };
  const std::optional<Factor> by_rows = stored(0, 1);
  return by_rows.has_value() ? by_rows : stored(1, 0);
}

// Logarithm of the power of two that divides the address, up to cuBLASLt's 256 bytes.
int alignment(const void* data) { return __builtin_ctzll(reinterpret_cast<uintptr_t>(data) | 256); }

struct Problem {
  DType type;  // of the factors
  Factor left, right, out;
  bool is_wide;  // float32 result
  bool accumulate;
  int left_alignment, right_alignment, out_alignment;
  int bias_alignment;  // -1: no bias
  int device;
  int64_t workspace_size;

  using Key = std::array<int64_t, 8>;

  // Products that are added up for an element of the result.
  int64_t terms() const { return right.transposed ? right.columns : right.rows; }

  Key key() const {
    int64_t rest = device;
    for (const int value :
         {static_cast<int>(type), left_alignment, right_alignment, out_alignment, bias_alignment + 1,
          (is_wide ? 8 : 0) | (accumulate ? 4 : 0) | (left.transposed ? 2 : 0) | (right.transposed ? 1 : 0)}) {
      rest = rest * 16 + value;
    }
    return {out.rows, out.columns, terms(), left.stride, right.stride, out.stride, workspace_size, rest};
  }
};

struct KeyHash {
  size_t operator()(const Problem::Key& key) const {
    uint64_t hash = 0;
    for (const int64_t word : key) hash = (hash ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15u ^ (hash >> 29);
    return hash;
  }
};

constexpr int kCandidates = 8;
constexpr int64_t kVocabulary = 16384;  // rows or columns of a result that is taken for one over a vocabulary
constexpr int64_t kShortSum = 1024;     // terms of an element of the result

// Which of the heuristic's candidates, best first by its own estimate, leaves the fewest multiprocessors idle in its
// last wave. With several waves that estimate is coarser than the loss: over a vocabulary the fullest waves were
// faster than the first choice by a tenth. The earliest of nearly equal ones; only tiles that are not much smaller than
// the first choice's, as they read their factors more often. A few waves, or sums that are split, stay as they are.
int fullest(const std::array<HeuristicResult, kCandidates>& results, int found) {
  constexpr float kFewWaves = 4.f, kSmallerTiles = 2.1f, kNearlyEqual = 1.015f;
  const float most = kSmallerTiles * results[0].waves;
  const auto fits = [&](const HeuristicResult& result) {
    return result.state == CUBLAS_STATUS_SUCCESS && result.waves >= kFewWaves && result.waves <= most;
  };
  const auto time_by_use = [](const HeuristicResult& result) { return std::ceil(result.waves) / result.waves; };
  if (!fits(results[0])) return 0;
  float least = time_by_use(results[0]);
  for (int i = 1; i < found; ++i) {
    if (fits(results[i])) least = std::min(least, time_by_use(results[i]));
  }
  int chosen = 0;
  while (!fits(results[chosen]) || time_by_use(results[chosen]) > kNearlyEqual * least) ++chosen;
  return chosen;
}

// The earliest that has about half of the first choice's tiles' size, which the first choice has if there is none.
// Writing the result of short sums takes as long as a good part of computing it, and of small tiles several share a
// multiprocessor: one is written while another is computed.
int smaller(const std::array<HeuristicResult, kCandidates>& results, int found) {
  constexpr float kLeast = 1.8f, kMost = 2.6f;
  for (int i = 1; i < found; ++i) {
    const float tiles = results[i].waves / results[0].waves;
    if (results[i].state == CUBLAS_STATUS_SUCCESS && tiles >= kLeast && tiles <= kMost) return i;
  }
  return 0;
}

// Only for results over a vocabulary: products of layers gained nothing in a training step, either way.
int best(const Problem& problem, const std::array<HeuristicResult, kCandidates>& results, int found) {
  if (std::max(problem.out.rows, problem.out.columns) < kVocabulary) return 0;
  const int chosen = problem.terms() <= kShortSum ? smaller(results, found) : 0;
  return chosen > 0 ? chosen : fullest(results, found);
}

class Plan {
 public:
  Plan(const CublasLt& lt, const Problem& problem, Handle handle) : lt_(lt) {
    const cudaDataType type = problem.type == DType::kFloat16 ? CUDA_R_16F : CUDA_R_16BF;
    check(lt.desc_create(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    set(CUBLASLT_MATMUL_DESC_TRANSA, problem.left.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, problem.right.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (problem.bias_alignment >= 0) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      // The heuristic looks at the pointer's alignment only.
      set_bias(reinterpret_cast<const void*>(uintptr_t{1} << problem.bias_alignment));
    }
    lay_out(left_, type, problem.left);
    lay_out(right_, type, problem.right);
    lay_out(out_, problem.is_wide ? CUDA_R_32F : type, problem.out);
    choose(problem, handle);
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  ~Plan() {
    for (const Descriptor layout : {left_, right_, out_}) {
      if (layout != nullptr) lt_.layout_destroy(layout);
    }
    if (operation_ != nullptr) lt_.desc_destroy(operation_);
  }

  bool exists() const { return exists_; }

  void run(const GemmContext& context, const void* left, const void* right, const void* bias, void* out,
           bool accumulate) {
    const float alpha = 1.f, beta = accumulate ? 1.f : 0.f;
    if (bias != nullptr) set_bias(bias);
    check(lt_.matmul(context.handle, operation_, &alpha, left, left_, right, right_, &beta, out, out_, out, out_,
                     &algorithm_, context.workspace, context.workspace_size, context.stream),
          "cublasLtMatmul");
  }

 private:
  template <class Value>
  void set(DescriptorAttribute attribute, Value value) {
    check(lt_.desc_set(operation_, attribute, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
  }

  void set_bias(const void* bias) { set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias); }

  void lay_out(Descriptor& layout, cudaDataType type, const Factor& factor) {
    check(lt_.layout_create(&layout, type, factor.rows, factor.columns, factor.stride), "cublasLtMatrixLayoutCreate");
  }

  // A choice of the heuristic's: nothing is timed, so that a run can be repeated.
  void choose(const Problem& problem, Handle handle) {
    Descriptor preference = nullptr;
    check(lt_.preference_create(&preference), "cublasLtMatmulPreferenceCreate");
    const auto prefer = [&](PreferenceAttribute attribute, auto value) {
      return lt_.preference_set(preference, attribute, &value, sizeof value);
    };
    const auto bytes = [](int logarithm) { return uint32_t{1} << logarithm; };
    Status status = prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(problem.workspace_size));
    for (const auto& [attribute, value] :
         {std::pair{CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE}},
          std::pair{CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, bytes(problem.left_alignment)},
          std::pair{CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, bytes(problem.right_alignment)},
          std::pair{CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, bytes(problem.out_alignment)},
          std::pair{CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, bytes(problem.out_alignment)}}) {
      if (status == CUBLAS_STATUS_SUCCESS) status = prefer(attribute, value);
    }
    std::array<HeuristicResult, kCandidates> results = {};
    int found = 0;
    if (status == CUBLAS_STATUS_SUCCESS) {
      // A failure here means that there is no algorithm.
      const Status answer =
          lt_.heuristic(handle, operation_, left_, right_, out_, out_, preference, kCandidates, results.data(), &found);
      exists_ = answer == CUBLAS_STATUS_SUCCESS && found > 0 && results[0].state == CUBLAS_STATUS_SUCCESS;
      if (exists_) algorithm_ = results[best(problem, results, found)].algorithm;
    }
    lt_.preference_destroy(preference);
    check(status, "cublasLtMatmulPreferenceSetAttribute");
  }

  const CublasLt& lt_;
  Descriptor operation_ = nullptr, left_ = nullptr, right_ = nullptr, out_ = nullptr;
  Algorithm algorithm_ = {};
  bool exists_ = false;
};

// Plans belong to a thread: forward and backward, which have different threads, hardly share any, and the bias is
// written into a plan.
Plan& plan(const CublasLt& lt, const Problem& problem, Handle handle) {
  constexpr size_t kMost = 4096;  // of about 1 KiB each; an epoch of batches of any size makes more
  static thread_local std::unordered_map<Problem::Key, Plan, KeyHash> plans;
  const Problem::Key key = problem.key();
  const auto known = plans.find(key);
  if (known != plans.end()) return known->second;
  if (plans.size() == kMost) plans.clear();
  return plans.try_emplace(key, lt, problem, handle).first->second;
}

}  // namespace

bool gemm(const GemmContext& context, const TensorRef& out, const TensorRef& a, const TensorRef& b,
          const TensorRef& bias, bool accumulate) {
  const bool is_wide = out.dtype == DType::kFloat32;
  const bool fits = a.dtype == b.dtype && (is_wide ? !bias : out.dtype == a.dtype);
  const bool has_type = fits && (a.dtype == DType::kFloat16 || a.dtype == DType::kBFloat16);
  if (!has_type || context.library == nullptr || context.handle == nullptr) return false;
  if (out.numel() == 0 || a.numel() == 0) return false;
  static const CublasLt lt(context.library);
  const std::optional<Factor> left = factor(b), right = factor(a), result = factor(out);
  if (!lt.complete || !left || !right || !result || result->transposed) return false;
  const Problem problem = {a.dtype,
                           *left,
                           *right,
                           *result,
                           is_wide,
                           accumulate,
                           alignment(b.data),
                           alignment(a.data),
                           alignment(out.data),
                           bias ? alignment(bias.data) : -1,
                           context.device,
                           context.workspace_size};
  Plan& chosen = plan(lt, problem, context.handle);
  if (!chosen.exists()) return false;
  chosen.run(context, b.data, a.data, bias ? bias.data : nullptr, out.data, accumulate);
  return true;
}

}  // namespace ls_train
