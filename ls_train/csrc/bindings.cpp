// The only file that knows torch, and only its stable ABI: checks the arguments of every operator, finds the current
// stream, calls the launcher of ops.h and turns its cudaError_t into an exception.
//
// Arguments come as references: the boxing code owns them, and copies would count references and fill lists again.
//
// An operator is a struct with its name, launcher and tensor arguments (they come first in every schema), and what its
// scalars demand; Binding<> does the rest.
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cmath>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arguments.h"
#include "gemm.h"
#include "layer.h"
#include "ops.h"

namespace ls_train {
namespace {

using torch::stable::Tensor;

DType data_type(const char* op, const char* name, const Tensor& tensor) {
  static const std::array<std::pair<int32_t, DType>, 9> kTypes = {{{aoti_torch_dtype_float16(), DType::kFloat16},
                                                                   {aoti_torch_dtype_bfloat16(), DType::kBFloat16},
                                                                   {aoti_torch_dtype_float32(), DType::kFloat32},
                                                                   {aoti_torch_dtype_int64(), DType::kInt64},
                                                                   {aoti_torch_dtype_int32(), DType::kInt32},
                                                                   {aoti_torch_dtype_int16(), DType::kInt16},
                                                                   {aoti_torch_dtype_uint8(), DType::kUInt8},
                                                                   {aoti_torch_dtype_bool(), DType::kBool},
                                                                   {aoti_torch_dtype_float64(), DType::kFloat64}}};
  int32_t code = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  for (const auto& [known, type] : kTypes) {
    if (known == code) return type;
  }
  fail_argument(op, name, "has a dtype that no operator takes; use float32, float16 or bfloat16");
}

TensorRef describe(const char* op, const Argument& argument, const Tensor& tensor) {
  TensorRef t;
  int64_t dims = 0, *sizes = nullptr, *strides = nullptr;
  t.dtype = data_type(op, argument.name, tensor);
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), &t.data));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor.get(), &dims));
  if (dims > TensorRef::kMaxDims) {
    fail_argument(op, argument.name, "has " + std::to_string(dims) + " dimensions");
  }
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &sizes));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &strides));
  t.dims = static_cast<int>(dims);
  std::copy_n(sizes, dims, t.sizes);
  std::copy_n(strides, dims, t.strides);
  return t;
}

// What the checks of one call have in common.
struct Call {
  const char* op = "";
  int device = -1;
  std::optional<DType> floating;  // type of the activations and parameters
  Sizes sizes;
  double p = 0.0;  // dropout probability

  TensorRef check(const Argument& argument, const Tensor& tensor) {
    int32_t kind = 0, index = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &kind));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &index));
    static const int32_t kCuda = aoti_torch_device_type_cuda(), kHost = aoti_torch_device_type_cpu();
    if (argument.host) {
      if (kind != kHost) fail_argument(op, argument.name, "is not on the CPU; the host writes or reads it");
    } else if (kind != kCuda) {
      fail_argument(op, argument.name, "is not on a CUDA device; move all arguments to one");
    } else if (device < 0) {
      device = index;
    }
    if (!argument.host && index != device) {
      fail_argument(op, argument.name,
                    "is on cuda:" + std::to_string(index) + " but an earlier one is on cuda:" + std::to_string(device) +
                        "; move all arguments to one device");
    }
    const TensorRef t = describe(op, argument, tensor);
    check_type(argument, t.dtype);
    if (!fits_shape(argument, t, sizes)) {
      fail_argument(op, argument.name, "has shape " + shape_text(t) + "; it needs " + needed_shape(argument, sizes));
    }
    if (!fits_layout(argument, t)) {
      fail_argument(op, argument.name,
                    argument.strided ? "must be contiguous in its last dimension; call .contiguous() on it first"
                                     : "is not contiguous; call .contiguous() on it first");
    }
    return t;
  }

  TensorRef check(const Argument& argument, const std::optional<Tensor>& tensor) {
    return tensor.has_value() ? check(argument, *tensor) : TensorRef();
  }

  void check_type(const Argument& argument, DType type) {
    constexpr DType kPlain[] = {DType::kFloat32, DType::kFloat32, DType::kFloat32, DType::kFloat64, DType::kInt64,
                                DType::kInt32,   DType::kInt16,   DType::kUInt8,   DType::kBool};
    DType expected = kPlain[static_cast<int>(argument.type)];
    if (argument.type == Type::kFloating || argument.type == Type::kAnyFloating) {
      const bool any = argument.type == Type::kAnyFloating || !floating.has_value();
      if (any && type != DType::kFloat32 && type != DType::kFloat16 && type != DType::kBFloat16) {
        fail_argument(op, argument.name,
                      std::string("has dtype ") + type_name(type) + "; use float32, float16 or bfloat16");
      }
      expected = any ? type : *floating;
      if (argument.type == Type::kFloating) floating = expected;
    }
    if (type != expected) {
      fail_argument(op, argument.name,
                    std::string("has dtype ") + type_name(type) + "; convert it to " + type_name(expected));
    }
  }

  // Kernels count columns in 32 bits; rows (N) in 64.
  void check_columns() const {
    for (const char letter : {'C', 'V', 'S', 'T', 'D', 'H'}) {
      if (sizes[letter] > INT_MAX) fail(op, std::string("dimension ") + letter + " is larger than 2**31 - 1");
    }
  }

  void require(bool present, const char* name, const char* when) const {
    if (!present) fail_argument(op, name, std::string("is missing; it is needed ") + when);
  }

  void check_dropout(int64_t offset, const TensorRef& seed) const {
    if (!(p >= 0.0 && p <= 1.0)) fail_argument(op, "p", "= " + std::to_string(p) + " must be between 0 and 1");
    if (offset < 0 || offset > UINT32_MAX) {
      fail_argument(op, "offset", "= " + std::to_string(offset) + " must be between 0 and 2**32 - 1");
    }
    if (!seed && drops()) {
      fail_argument(op, "seed", "is missing with p = " + std::to_string(p) + "; pass ls_train.rng.draw_seed(device)");
    }
  }

  void check_smoothing(double label_smoothing) const {
    if (!(label_smoothing >= 0.0 && label_smoothing < 1.0)) {
      fail_argument(op, "label_smoothing", "= " + std::to_string(label_smoothing) + " must be at least 0, less than 1");
    }
    if (label_smoothing > 0.0 && sizes['V'] < 2) fail_argument(op, "label_smoothing", "needs two classes");
  }

  void check_workspace(const TensorRef& workspace, int64_t floats) const {
    if (!workspace || workspace.sizes[0] < floats) {
      fail_argument(op, "workspace",
                    "has " + std::to_string(workspace ? workspace.sizes[0] : 0) + " elements; it needs " +
                        std::to_string(floats));
    }
  }

  void check_column_sums(const TensorRef& workspace, int sums) const {
    check_workspace(workspace, sums * std::min<int64_t>(kMaxRowBlocks, sizes['N']) * sizes['C']);
  }

  // Whether the dropout drops anything: rng.threshold(p) > 0, make_dropout(...).threshold > 0.
  bool drops() const { return std::nearbyint(p * 32768.0) > 0.0; }
};

// torch's CUDA library, or nullptr with a CPU build of torch.
void* torch_cuda_library() {
  static void* const library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
  return library;
}

// A function of that library or of one that it depends on, or nullptr. They are missing from CPU builds of torch, so
// not linked: the same library loads there too.
template <class Function>
Function torch_cuda_function(const char* name) {
  void* const library = torch_cuda_library();
  return library == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library, name));
}

cudaStream_t current_stream(const char* op, int device) {
  using Function = AOTITorchError (*)(int32_t, void**);
  static const Function function = torch_cuda_function<Function>("aoti_torch_get_current_cuda_stream");
  if (function == nullptr) fail(op, "this torch has no CUDA; install a CUDA build of it");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(function(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

// This thread's cuBLAS handle for the current device, or nullptr. torch never destroys one.
void* blas_handle(int device) {
  using Function = AOTITorchError (*)(void**);
  static const Function function = torch_cuda_function<Function>("torch_get_current_cuda_blas_handle");
  static thread_local std::unordered_map<int, void*> handles;
  void*& handle = handles[device];
  if (handle == nullptr && function != nullptr) TORCH_ERROR_CODE_CHECK(function(&handle));
  return handle;
}

Activation parse_activation(const char* op, const std::string& name) {
  if (name == "relu") return Activation::kRelu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "swish") return Activation::kSwish;
  fail_argument(op, "activation", "= '" + name + "' is unknown; use one of relu, gelu, gelu_tanh, swish");
}

void check_launch(const char* op, cudaError_t error) {
  if (error != cudaSuccess) {
    fail(op, std::string("the launch failed: ") + cudaGetErrorName(error) + ", " + cudaGetErrorString(error));
  }
}

// The type that TORCH_BOX unpacks for a launcher's parameter.
template <class Parameter, bool kOptional>
struct Boxed {
  using type = Parameter;
};
template <bool kOptional>
struct Boxed<TensorRef, kOptional> {
  using type = std::conditional_t<kOptional, std::optional<Tensor>, Tensor>;
};
template <bool kOptional>
struct Boxed<Activation, kOptional> {
  using type = std::string;
};

// The tensor arguments of a call by name.
template <class Op>
struct Tensors {
  std::array<const TensorRef*, std::size(Op::arguments)> refs;

  const TensorRef& operator[](std::string_view name) const {
    size_t i = 0;
    while (Op::arguments[i].name != name) ++i;
    return *refs[i];
  }
};

template <class Op>
constexpr bool has_argument(std::string_view name) {
  for (const Argument& argument : Op::arguments) {
    if (argument.name == name) return true;
  }
  return false;
}

template <class Op, class Launcher>
struct Binding;

template <class Op, class... Parameters>
struct Binding<Op, cudaError_t (*const)(Parameters...)> {
  using All = std::tuple<std::decay_t<Parameters>...>;
  static constexpr size_t kTensors = std::size(Op::arguments);
  static constexpr size_t kCount = sizeof...(Parameters) - 1;  // without the stream

  template <size_t I>
  using At = std::tuple_element_t<I, All>;
  template <size_t I>
  static constexpr bool kIsOptional = Op::arguments[I < kTensors ? I : 0].optional;
  template <size_t I>
  using BoxedAt = typename Boxed<At<I>, kIsOptional<I>>::type;

  template <class TensorIndices, class Indices>
  struct Caller;

  template <size_t... J, size_t... I>
  struct Caller<std::index_sequence<J...>, std::index_sequence<I...>> {
    static void call(const BoxedAt<I>&... boxed) {
      Call call;
      call.op = Op::name;
      // In braces: evaluated from left to right, so that messages name the first wrong argument.
      const std::tuple<At<I>...> arguments{unbox<I>(call, boxed)...};
      const Tensors<Op> tensors{{&std::get<J>(arguments)...}};
      call.check_columns();
      if constexpr (has_argument<Op>("seed")) {
        constexpr size_t kP = last_double<I...>();
        call.p = std::get<kP>(arguments);
        call.check_dropout(std::get<kP + 1>(arguments), tensors["seed"]);
      }
      Op::check(call, tensors, std::get<I>(arguments)...);
      const torch::stable::accelerator::DeviceGuard guard(call.device);
      const cudaError_t error = Op::launch(std::get<I>(arguments)..., current_stream(Op::name, call.device));
      check_launch(Op::name, error);
    }
  };

  // The dropout probability: the last float of every schema with a seed, followed by the offset.
  template <size_t... I>
  static constexpr size_t last_double() {
    size_t last = 0;
    ((last = std::is_same_v<At<I>, double> ? I : last), ...);
    return last;
  }

  template <size_t I, class B>
  static At<I> unbox(Call& call, const B& boxed) {
    if constexpr (I < kTensors) {
      return call.check(Op::arguments[I], boxed);
    } else if constexpr (std::is_same_v<B, std::string>) {
      return parse_activation(call.op, boxed);
    } else {
      return boxed;
    }
  }

  static constexpr auto kFunction = &Caller<std::make_index_sequence<kTensors>, std::make_index_sequence<kCount>>::call;
};

// ---------------------------------------------------------------------------------------------------------------
// The operators

constexpr Argument kSeed = optional({"seed", Type::kInt64, "1"});
constexpr Argument kRows = optional({"rows", Type::kInt32, "1"});
constexpr Argument kWorkspace = {"workspace", Type::kFloat32, "*"};
constexpr Argument kPartialRows = optional(host({"partial_rows", Type::kInt64, "1"}));

constexpr Argument floating(const char* name, const char* shape) { return {name, Type::kFloating, shape}; }
constexpr Argument float32(const char* name, const char* shape) { return {name, Type::kFloat32, shape}; }
constexpr Argument int64(const char* name, const char* shape) { return {name, Type::kInt64, shape}; }
constexpr Argument int32(const char* name, const char* shape) { return {name, Type::kInt32, shape}; }

struct Unchecked {  // nothing beyond the tensors and the dropout arguments
  template <class... Arguments>
  static void check(const Arguments&...) {}
};

struct LayerNormFwd : Unchecked {
  static constexpr const char* name = "layer_norm_fwd";
  static constexpr auto launch = &ls_train::layer_norm_fwd;
  static constexpr Argument arguments[] = {floating("y", "NC"),
                                           float32("mean", "N"),
                                           float32("rstd", "N"),
                                           floating("x", "NC"),
                                           floating("weight", "C"),
                                           floating("bias", "C"),
                                           kRows};
};

struct LayerNormBwd {
  static constexpr const char* name = "layer_norm_bwd";
  static constexpr auto launch = &ls_train::layer_norm_bwd;
  static constexpr Argument arguments[] = {floating("dx", "NC"),
                                           floating("dweight", "C"),
                                           floating("dbias", "C"),
                                           kWorkspace,
                                           kPartialRows,
                                           floating("dy", "NC"),
                                           optional(floating("dresidual", "NC")),
                                           floating("x", "NC"),
                                           float32("mean", "N"),
                                           float32("rstd", "N"),
                                           floating("weight", "C"),
                                           kRows};

  template <class Named, class... Arguments>
  static void check(const Call& call, const Named& t, const Arguments&...) {
    call.check_column_sums(t["workspace"], 2);
  }
};

struct BiasDropoutAddFwd : Unchecked {
  static constexpr const char* name = "bias_dropout_add_fwd";
  static constexpr auto launch = &ls_train::bias_dropout_add_fwd;
  static constexpr Argument arguments[] = {floating("y", "NC"),
                                           floating("x", "NC"),
                                           optional(floating("bias", "C")),
                                           floating("residual", "NC"),
                                           kSeed,
                                           kRows};
};

struct BiasDropoutAddBwd {
  static constexpr const char* name = "bias_dropout_add_bwd";
  static constexpr auto launch = &ls_train::bias_dropout_add_bwd;
  static constexpr Argument arguments[] = {optional(floating("dx", "NC")),
                                           optional(floating("dbias", "C")),
                                           optional(kWorkspace),
                                           kPartialRows,
                                           floating("dy", "NC"),
                                           kSeed,
                                           kRows};

  template <class Named, class... Arguments>
  static void check(const Call& call, const Named& t, const Arguments&...) {
    call.require(t["dx"] || !call.drops(), "dx", "with dropout");
    if (t["dbias"]) call.check_column_sums(t["workspace"], 1);
  }
};

struct BiasDropoutAddLayerNormFwd : Unchecked {
  static constexpr const char* name = "bias_dropout_add_layer_norm_fwd";
  static constexpr auto launch = &ls_train::bias_dropout_add_layer_norm_fwd;
  static constexpr Argument arguments[] = {floating("y", "NC"),
                                           floating("sum", "NC"),
                                           float32("mean", "N"),
                                           float32("rstd", "N"),
                                           floating("x", "NC"),
                                           optional(floating("bias", "C")),
                                           floating("residual", "NC"),
                                           floating("weight", "C"),
                                           floating("norm_bias", "C"),
                                           kSeed,
                                           kRows};
};

struct BiasDropoutAddLayerNormBwd {
  static constexpr const char* name = "bias_dropout_add_layer_norm_bwd";
  static constexpr auto launch = &ls_train::bias_dropout_add_layer_norm_bwd;
  static constexpr Argument arguments[] = {optional(floating("dx", "NC")),
                                           floating("dresidual", "NC"),
                                           optional(floating("dbias", "C")),
                                           floating("dweight", "C"),
                                           floating("dnorm_bias", "C"),
                                           kWorkspace,
                                           kPartialRows,
                                           floating("dy", "NC"),
                                           optional(floating("dsum", "NC")),
                                           floating("sum", "NC"),
                                           float32("mean", "N"),
                                           float32("rstd", "N"),
                                           floating("weight", "C"),
                                           kSeed,
                                           kRows};

  template <class Named, class... Arguments>
  static void check(const Call& call, const Named& t, const Arguments&...) {
    call.require(t["dx"] || !call.drops(), "dx", "with dropout");
    call.check_column_sums(t["workspace"], t["dbias"] ? 3 : 2);
  }
};

struct BiasActivationDropoutFwd : Unchecked {
  static constexpr const char* name = "bias_activation_dropout_fwd";
  static constexpr auto launch = &ls_train::bias_activation_dropout_fwd;
  static constexpr Argument arguments[] = {floating("y", "NC"), floating("x", "NC"), optional(floating("bias", "C")),
                                           kSeed, kRows};
};

struct BiasActivationDropoutBwd {
  static constexpr const char* name = "bias_activation_dropout_bwd";
  static constexpr auto launch = &ls_train::bias_activation_dropout_bwd;
  static constexpr Argument arguments[] = {floating("dx", "NC"),
                                           optional(floating("dbias", "C")),
                                           optional(kWorkspace),
                                           kPartialRows,
                                           floating("dy", "NC"),
                                           floating("saved", "NC"),
                                           optional(floating("bias", "C")),
                                           kSeed,
                                           kRows};

  template <class Named, class... Arguments>
  static void check(const Call& call, const Named& t, const Arguments&...) {
    if (t["dbias"]) call.check_column_sums(t["workspace"], 1);
  }
};

struct AttentionFwd : Unchecked {
  static constexpr const char* name = "attention_fwd";
  static constexpr auto launch = &ls_train::attention_fwd;
  static constexpr Argument arguments[] = {
      floating("out", "QHD"),        float32("lse", "QH"), strided(floating("q", "QHD")), strided(floating("k", "KHD")),
      strided(floating("v", "KHD")), int32("cu_q", "B+"),  int32("cu_k", "B+"),           kSeed};
};

struct AttentionBwd {
  static constexpr const char* name = "attention_bwd";
  static constexpr auto launch = &ls_train::attention_bwd;
  static constexpr Argument arguments[] = {strided(floating("dq", "QHD")),
                                           strided(floating("dk", "KHD")),
                                           strided(floating("dv", "KHD")),
                                           kWorkspace,
                                           floating("dout", "QHD"),
                                           strided(floating("q", "QHD")),
                                           strided(floating("k", "KHD")),
                                           strided(floating("v", "KHD")),
                                           floating("out", "QHD"),
                                           float32("lse", "QH"),
                                           int32("cu_q", "B+"),
                                           int32("cu_k", "B+"),
                                           kSeed};

  template <class Named, class... Arguments>
  static void check(const Call& call, const Named& t, const Arguments&...) {
    call.check_workspace(t["workspace"], call.sizes['Q'] * call.sizes['H']);
  }
};

struct SoftmaxDropoutFwd {
  static constexpr const char* name = "softmax_dropout_fwd";
  static constexpr auto launch = &ls_train::softmax_dropout_fwd;
  static constexpr Argument arguments[] = {optional(floating("y", "BHTS")), floating("probs", "BHTS"),
                                           floating("x", "BHTS"), optional({"key_padding_mask", Type::kBool, "BS"}),
                                           kSeed};

  template <class Named, class... Arguments>
  static void check(const Call& call, const Named& t, const Arguments&...) {
    call.require(t["y"] || !call.drops(), "y", "with dropout");
  }
};

struct SoftmaxDropoutBwd : Unchecked {
  static constexpr const char* name = "softmax_dropout_bwd";
  static constexpr auto launch = &ls_train::softmax_dropout_bwd;
  static constexpr Argument arguments[] = {floating("dx", "BHTS"), floating("dy", "BHTS"), floating("probs", "BHTS"),
                                           kSeed};
};

struct DropoutFwd : Unchecked {
  static constexpr const char* name = "dropout_fwd";
  static constexpr auto launch = &ls_train::dropout_fwd;
  static constexpr Argument arguments[] = {floating("y", "NC"), floating("x", "NC"), int64("seed", "1"), kRows};
};

struct EmbeddingFwd : Unchecked {
  static constexpr const char* name = "embedding_fwd";
  static constexpr auto launch = &ls_train::embedding_fwd;
  static constexpr Argument arguments[] = {floating("y", "NC"),
                                           int64("tokens", "N"),
                                           int64("positions", "N"),
                                           floating("weight", "VC"),
                                           optional(floating("position_weight", "PC")),
                                           kSeed,
                                           kRows};
};

struct EmbeddingBwd : Unchecked {
  static constexpr const char* name = "embedding_bwd";
  static constexpr auto launch = &ls_train::embedding_bwd;
  static constexpr Argument arguments[] = {
      floating("dweight", "VC"), floating("dy", "NC"), int64("order", "N"), int64("sorted_ids", "N"), kSeed, kRows};
};

struct CrossEntropyFwd {
  static constexpr const char* name = "cross_entropy_fwd";
  static constexpr auto launch = &ls_train::cross_entropy_fwd;
  static constexpr Argument arguments[] = {float32("loss", "N"),
                                           float32("nll", "N"),
                                           float32("lse", "N"),
                                           optional(int32("correct", "N")),
                                           floating("logits", "NV"),
                                           int64("target", "N"),
                                           kRows};

  template <class Named, class... Arguments>
  static void check(const Call& call, const Named&, const Arguments&... arguments) {
    call.check_smoothing(std::get<sizeof...(Arguments) - 2>(std::tie(arguments...)));
  }
};

struct CrossEntropyBwd {
  static constexpr const char* name = "cross_entropy_bwd";
  static constexpr auto launch = &ls_train::cross_entropy_bwd;
  static constexpr Argument arguments[] = {floating("dlogits", "NV"), float32("dloss", "N"), floating("logits", "NV"),
                                           float32("lse", "N"),       int64("target", "N"),  kRows};

  template <class Named, class... Arguments>
  static void check(const Call& call, const Named&, const Arguments&... arguments) {
    call.check_smoothing(std::get<sizeof...(Arguments) - 2>(std::tie(arguments...)));
  }
};

struct CrossEntropyInplace {
  static constexpr const char* name = "cross_entropy_inplace";
  static constexpr auto launch = &ls_train::cross_entropy_inplace;
  static constexpr Argument arguments[] = {floating("logits", "NV"),
                                           float32("loss", "N"),
                                           float32("nll", "N"),
                                           optional(int32("correct", "N")),
                                           int64("target", "N"),
                                           kRows,
                                           optional(float32("grad_scale", "1"))};

  template <class Named, class... Arguments>
  static void check(const Call& call, const Named&, const Arguments&... arguments) {
    call.check_smoothing(std::get<sizeof...(Arguments) - 2>(std::tie(arguments...)));
  }
};

struct GradNorm {
  static constexpr const char* name = "grad_norm";
  static constexpr auto launch = &ls_train::grad_norm;
  static constexpr Argument arguments[] = {
      float32("norm", "1"),  float32("found_inf", "1"), kWorkspace,
      floating("grad", "E"), int64("segments", "S+"),   optional({"active", Type::kUInt8, "S"})};

  template <class Named, class... Arguments>
  static void check(const Call& call, const Named& t, const Arguments&...) {
    call.check_workspace(t["workspace"], 2 * kMaxNormBlocks);
  }
};

struct AdamPrepare {
  static constexpr const char* name = "adam_prepare";
  static constexpr auto launch = &ls_train::adam_prepare;
  static constexpr Argument arguments[] = {int64("segment_step", "S"),          int64("update", "2"),
                                           float32("grad_scale", "1"),          optional({"active", Type::kUInt8, "S"}),
                                           optional(float32("norm", "1")),      optional(float32("found_inf", "1")),
                                           optional(float32("multiplier", "1"))};

  template <class Named, class... Arguments>
  static void check(const Call& call, const Named& t, const Arguments&... arguments) {
    const double max_norm = std::get<sizeof...(Arguments) - 1>(std::tie(arguments...));
    call.require(t["norm"] || !(max_norm > 0.0), "norm", "with max_norm > 0");
  }
};

struct Adam {
  static constexpr const char* name = "adam";
  static constexpr auto launch = &ls_train::adam;
  static constexpr Argument arguments[] = {floating("param", "E"),
                                           optional(float32("master", "E")),
                                           optional({"remainder", Type::kInt16, "E"}),
                                           float32("exp_avg", "E"),
                                           float32("exp_avg_sq", "E"),
                                           floating("grad", "E"),
                                           int64("segments", "S+"),
                                           int32("segment_group", "S"),
                                           int64("segment_step", "S"),
                                           optional({"active", Type::kUInt8, "S"}),
                                           {"hyper", Type::kFloat64, "G6"},
                                           int64("update", "2"),
                                           optional(float32("grad_scale", "1")),
                                           optional(float32("found_inf", "1"))};

  template <class Named, class... Arguments>
  static void check(const Call& call, const Named& t, const Arguments&...) {
    const bool wide = call.floating == DType::kFloat32;
    call.require(wide || t["master"] || t["remainder"], "master", "with 16-bit parameters");
    if (t["remainder"] && (wide || t["master"])) {
      fail_argument(call.op, "remainder", "must be None with float32 parameters and with a master");
    }
  }
};

struct LossScaleUpdate {
  static constexpr const char* name = "loss_scale_update";
  static constexpr auto launch = &ls_train::loss_scale_update;
  static constexpr Argument arguments[] = {float32("scale", "1"), int64("counters", "4"), float32("exhausted", "1"),
                                           float32("found_inf", "1")};

  template <class Named, class... Arguments>
  static void check(const Call& call, const Named&, const Arguments&... arguments) {
    constexpr size_t kScalars = 5;  // factor, window, tolerance, threshold, min_scale
    const auto all = std::tie(arguments...);
    if (!(std::get<sizeof...(Arguments) - kScalars>(all) > 1.0)) fail_argument(call.op, "factor", "must be above 1");
    if (std::get<sizeof...(Arguments) - kScalars + 1>(all) < 1) fail_argument(call.op, "window", "must be at least 1");
  }
};

struct ScaleCast : Unchecked {
  static constexpr const char* name = "scale_cast";
  static constexpr auto launch = &ls_train::scale_cast;
  static constexpr Argument arguments[] = {
      floating("out", "NC"), {"x", Type::kAnyFloating, "NC"}, float32("factor", "1")};
};

// Lists of tensors do not fit into Binding<>.
void add_column_sums(const std::vector<Tensor>& gradients, const std::vector<Tensor>& partials,
                     const Tensor& partial_rows, const std::vector<int64_t>& sums, bool accumulate) {
  Call call;
  call.op = "column_sum";
  const auto counted = [&](const char* name, size_t size) {
    if (size != partials.size()) {
      fail_argument(call.op, name,
                    "has length " + std::to_string(size) + "; it needs one for each of " +
                        std::to_string(partials.size()) + " partials");
    }
  };
  const TensorRef rows = call.check(host({"partial_rows", Type::kInt64, "P"}), partial_rows);
  counted("partial_rows", rows.sizes[0]);
  counted("sums", sums.size());
  std::vector<ColumnSum> items;
  for (size_t i = 0; i < partials.size(); ++i) {
    const TensorRef partial = call.check({"partials", Type::kFloat32, "*"}, partials[i]);
    const int64_t count = rows.as<int64_t>()[i];
    if (count < 0 || count > kMaxRowBlocks) {
      fail_argument(call.op, "partial_rows",
                    "holds " + std::to_string(count) + "; it must be between 0 and " + std::to_string(kMaxRowBlocks));
    }
    int64_t used = 0;
    for (int64_t k = 0; k < sums[i]; ++k) {
      if (items.size() == gradients.size()) fail_argument(call.op, "gradients", "are fewer than sums says");
      call.sizes['C'] = -1;
      const TensorRef gradient = call.check(floating("gradients", "C"), gradients[items.size()]);
      call.check_columns();
      items.push_back(
          {gradient.data, partial.as<float>() + used, static_cast<int>(count), static_cast<int>(gradient.sizes[0])});
      used += count * gradient.sizes[0];
    }
    if (used > partial.sizes[0]) {
      fail_argument(call.op, "partials",
                    "has " + std::to_string(partial.sizes[0]) + " elements; it needs " + std::to_string(used));
    }
  }
  if (items.size() < gradients.size()) fail_argument(call.op, "gradients", "are more than sums says");
  if (items.empty()) return;
  const int64_t size = item_size(*call.floating);
  for (size_t i = 0; i < items.size(); ++i) {
    for (size_t k = 0; k < i; ++k) {
      const char *one = static_cast<char*>(items[i].gradient), *other = static_cast<char*>(items[k].gradient);
      if (one < other + items[k].columns * size && other < one + items[i].columns * size) {
        fail_argument(call.op, "gradients", "overlap; add up those of one parameter in calls one after another");
      }
    }
  }
  const torch::stable::accelerator::DeviceGuard guard(call.device);
  check_launch(call.op, ls_train::column_sum(items.data(), static_cast<int>(items.size()), *call.floating, accumulate,
                                             current_stream(call.op, call.device)));
}

// ---------------------------------------------------------------------------------------------------------------
// Whole layers

// A tensor for torch's own operators that shares the memory of `view`.
Tensor torch_tensor(const View& view) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(static_cast<AtenTensorHandle>(view.owner), view.ref.dims,
                                                        view.ref.sizes, view.ref.strides, view.offset, &handle));
  return Tensor(handle);
}

Tensor float32_copy(const Tensor& tensor) {
  using torch::stable::detail::from;
  StableIValue stack[] = {from(tensor), from(torch::headeronly::ScalarType::Float), from(false), from(true),
                          from(std::nullopt)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::to", "dtype", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// ATen's products, without the dispatcher: autograd, autocast and modes have no say inside a layer's pass. Those of
// 16-bit factors with a float32 result, which no layer has, take float32 copies of the factors.
void aten_product(const View& out, const View& a, const View& b, const View& bias, bool accumulate) {
  using Mm = AOTITorchError (*)(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle);
  using Addmm =
      AOTITorchError (*)(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, double, double);
  static const Mm mm = torch_cuda_function<Mm>("aoti_torch_cuda_mm_out");
  static const Addmm addmm = torch_cuda_function<Addmm>("aoti_torch_cuda_addmm_out");
  if (mm == nullptr || addmm == nullptr) fail("layer", "this torch has no CUDA products; install a CUDA build of it");
  const Tensor result = torch_tensor(out);
  Tensor left = torch_tensor(a), right = torch_tensor(b);
  if (out.ref.dtype != a.ref.dtype) {
    left = float32_copy(left);
    right = float32_copy(right);
  }
  if (accumulate) {
    TORCH_ERROR_CODE_CHECK(addmm(result.get(), result.get(), left.get(), right.get(), 1.0, 1.0));
  } else if (bias) {
    TORCH_ERROR_CODE_CHECK(addmm(result.get(), torch_tensor(bias).get(), left.get(), right.get(), 1.0, 1.0));
  } else {
    TORCH_ERROR_CODE_CHECK(mm(result.get(), left.get(), right.get()));
  }
}

// Makes a product by a plan of cuBLASLt where there is a workspace and a plan for it, else by ATen.
void make_product(const GemmContext& context, const View& out, const View& a, const View& b, const View& bias,
                  bool accumulate) {
  const bool done = context.workspace_size > 0 && gemm(context, out, a, b, bias, accumulate);
  if (!done) aten_product(out, a, b, bias, accumulate);
}

// Products of a call run on its device, which is the current one, and stream.
void enter(GemmContext& context, const Call& call) {
  context.library = torch_cuda_library();
  context.handle = blas_handle(call.device);
  context.device = call.device;
  context.stream = current_stream(call.op, call.device);
}

void product(const Tensor& out, const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
             const Tensor& workspace, bool accumulate) {
  Call call;
  call.op = "product";
  const View left = {call.check(any_layout(floating("a", "MK")), a), a.get(), 0};
  const bool is_float32 = data_type(call.op, "out", out) == DType::kFloat32;
  const Argument kind = is_float32 ? float32("out", "MN") : floating("out", "MN");
  const View result = {call.check(any_layout(kind), out), out.get(), 0};
  const View right = {call.check(any_layout(floating("b", "KN")), b), b.get(), 0};
  View added;
  if (bias.has_value()) added = {call.check(floating("bias", "N"), *bias), bias->get(), 0};
  if (added && accumulate) fail_argument(call.op, "bias", "must be None with accumulate");
  if (added && result.ref.dtype != left.ref.dtype) {
    fail_argument(call.op, "bias", "must be None with a float32 result of 16-bit factors");
  }
  const TensorRef memory = call.check({"workspace", Type::kUInt8, "*"}, workspace);
  if (reinterpret_cast<uintptr_t>(memory.data) % 256 != 0) {
    fail_argument(call.op, "workspace", "does not begin at a multiple of 256 bytes");
  }
  GemmContext context;
  context.workspace = memory.data;
  context.workspace_size = memory.sizes[0];
  const torch::stable::accelerator::DeviceGuard guard(call.device);
  enter(context, call);
  make_product(context, result, left, right, added, accumulate);
}

// The parameters of a layer in the order of their list; q, k and v lie together. Cross attention may be missing.
constexpr Argument kSelfParameters[] = {floating("qkv_weight", "AC"),      floating("qkv_bias", "A"),
                                        floating("out_weight", "CC"),      floating("out_bias", "C"),
                                        floating("self_norm_weight", "C"), floating("self_norm_bias", "C")};
constexpr Argument kCrossParameters[] = {floating("cross_q_weight", "CC"),   floating("cross_q_bias", "C"),
                                         floating("cross_out_weight", "CC"), floating("cross_out_bias", "C"),
                                         floating("cross_norm_weight", "C"), floating("cross_norm_bias", "C")};
constexpr Argument kFfnParameters[] = {floating("fc1_weight", "FC"),       floating("fc1_bias", "F"),
                                       floating("fc2_weight", "CF"),       floating("fc2_bias", "C"),
                                       floating("final_norm_weight", "C"), floating("final_norm_bias", "C")};
constexpr size_t kPart = std::size(kSelfParameters);

// Checks the arguments that both passes of a layer share and puts the layer together.
struct LayerCall {
  Call call;
  TransformerLayer layer;
  GemmContext context;

  LayerCall(const LayerCall&) = delete;  // its layer refers to it

  View view(const Argument& argument, const Tensor& tensor) { return {call.check(argument, tensor), tensor.get(), 0}; }

  LayerCall(const char* op, const Tensor& x, const std::optional<Tensor>& kv, const std::vector<Tensor>& parameters,
            const Tensor& cu, const Tensor& rows, const std::optional<Tensor>& seed,
            const std::optional<Tensor>& memory_cu, int64_t heads, int64_t max_length, int64_t memory_max_length,
            int64_t index, int64_t offset, bool normalize_before, bool causal, double eps, double dropout,
            double attention_dropout, double activation_dropout, const std::string& activation) {
    call.op = op;
    layer.x = view(floating("x", "NC"), x);
    call.sizes['A'] = 3 * call.sizes['C'];
    layer.cross = kv.has_value();
    if (parameters.size() != (layer.cross ? 3 : 2) * kPart) {
      fail_argument(op, "parameters",
                    "has " + std::to_string(parameters.size()) + " tensors; it needs " +
                        std::to_string((layer.cross ? 3 : 2) * kPart));
    }
    assign(parameters, &LinearLayer::weight, &LinearLayer::bias, &NormLayer::weight, &NormLayer::bias);
    layer.type = *call.floating;
    layer.rows = call.sizes['N'];
    layer.columns = call.sizes['C'];
    layer.inner = call.sizes['F'];
    layer.heads = heads;
    if (heads < 1 || layer.columns % heads != 0) {
      fail_argument(op, "heads", "= " + std::to_string(heads) + " must divide C = " + std::to_string(layer.columns));
    }
    layer.cu = call.check(int32("cu", "B+"), cu);
    layer.used = call.check(kRows, rows);
    layer.seed = call.check(kSeed, seed);
    layer.memory_cu = call.check(optional(int32("memory_cu", "B+")), memory_cu);
    if (layer.cross) {
      layer.kv = view(floating("kv", "KW"), *kv);
      layer.keys = call.sizes['K'];
      call.require(static_cast<bool>(layer.memory_cu), "memory_cu", "with kv");
      if (index < 0 || index >= call.sizes['W'] / (2 * layer.columns)) {
        fail_argument(op, "layer", "= " + std::to_string(index) + " has no columns in kv");
      }
    }
    call.check_columns();
    for (const double p : {dropout, attention_dropout, activation_dropout}) {
      call.p = p;
      call.check_dropout(offset, layer.seed);
    }
    layer.normalize_before = normalize_before;
    layer.causal = causal;
    layer.eps = eps;
    layer.dropout = dropout;
    layer.attention_dropout = attention_dropout;
    layer.activation_dropout = activation_dropout;
    layer.offset = offset;
    layer.max_length = max_length;
    layer.memory_max_length = memory_max_length;
    layer.layer = index;
    layer.activation = parse_activation(op, activation);
    layer.product = [this](const View& out, const View& a, const View& b, const View& bias, bool accumulate) {
      make_product(context, out, a, b, bias, accumulate);
    };
  }

  // Gives each tensor of a list in the parameters' order its place.
  void assign(const std::vector<Tensor>& tensors, View LinearLayer::* weight, View LinearLayer::* bias,
              View NormLayer::* norm_weight, View NormLayer::* norm_bias) {
    const auto part = [&](size_t first, const Argument(&arguments)[kPart], LinearLayer& one, LinearLayer& two,
                          NormLayer& norm) {
      one.*weight = view(arguments[0], tensors[first]);
      one.*bias = view(arguments[1], tensors[first + 1]);
      two.*weight = view(arguments[2], tensors[first + 2]);
      two.*bias = view(arguments[3], tensors[first + 3]);
      norm.*norm_weight = view(arguments[4], tensors[first + 4]);
      norm.*norm_bias = view(arguments[5], tensors[first + 5]);
    };
    part(0, kSelfParameters, layer.qkv, layer.out, layer.self_norm);
    if (layer.cross) part(kPart, kCrossParameters, layer.cross_query, layer.cross_out, layer.cross_norm);
    part(tensors.size() - kPart, kFfnParameters, layer.fc1, layer.fc2, layer.final_norm);
  }

  void place(const Tensor& block, const std::vector<int64_t>& fields) {
    if (fields.size() != TransformerLayer::kSavedCount) {
      fail_argument(call.op, "fields",
                    "has " + std::to_string(fields.size()) + " numbers; it needs " +
                        std::to_string(int{TransformerLayer::kSavedCount}));
    }
    layer.place(Block(call.op, "block", view(floating("block", "*"), block)), fields.data());
  }

  // The `size` bytes of scratch that a pass takes. What is left is the workspace of its products; without any, ATen
  // makes them.
  Block scratch(const Tensor& tensor, int64_t size) {
    View memory = view(floating("scratch", "*"), tensor);
    const int64_t item = item_size(memory.ref.dtype), all = memory.ref.sizes[0] * item;
    if (all < size) {
      fail_argument(call.op, "scratch",
                    "of " + std::to_string(all) + " bytes is too small; it needs " + std::to_string(size));
    }
    context.workspace = static_cast<char*>(memory.ref.data) + size;
    context.workspace_size = all - size;
    memory.ref.sizes[0] = size / item;
    return Block(call.op, "scratch", memory);
  }

  // Where the pass runs; the call's device is the current one.
  void enter() {
    ls_train::enter(context, call);
    layer.stream = context.stream;
  }
};

void layer_fwd(const Tensor& y, const Tensor& block, const Tensor& scratch, const Tensor& x,
               const std::optional<Tensor>& kv, const std::vector<Tensor>& parameters, const Tensor& cu,
               const Tensor& rows, const std::optional<Tensor>& seed, const std::optional<Tensor>& memory_cu,
               int64_t heads, int64_t max_length, int64_t memory_max_length, int64_t index, int64_t offset,
               bool normalize_before, bool causal, double eps, double dropout, double attention_dropout,
               double activation_dropout, const std::string& activation, const std::vector<int64_t>& fields) {
  constexpr const char* kName = "layer_fwd";
  LayerCall run(kName, x, kv, parameters, cu, rows, seed, memory_cu, heads, max_length, memory_max_length, index,
                offset, normalize_before, causal, eps, dropout, attention_dropout, activation_dropout, activation);
  const View output = run.view(floating("y", "NC"), y);
  run.place(block, fields);
  Block memory = run.scratch(scratch, run.layer.forward_scratch());
  const torch::stable::accelerator::DeviceGuard guard(run.call.device);
  run.enter();
  check_launch(kName, run.layer.forward(output, memory));
}

void layer_bwd(const Tensor& dx, const std::optional<Tensor>& dkv, const Tensor& scratch,
               const std::vector<Tensor>& gradients, const Tensor& dy, const Tensor& block, const Tensor& x,
               const std::optional<Tensor>& kv, const std::vector<Tensor>& parameters, const Tensor& cu,
               const Tensor& rows, const std::optional<Tensor>& seed, const std::optional<Tensor>& memory_cu,
               int64_t heads, int64_t max_length, int64_t memory_max_length, int64_t index, int64_t offset,
               bool normalize_before, bool causal, double eps, double dropout, double attention_dropout,
               double activation_dropout, const std::string& activation, const std::vector<int64_t>& fields,
               int64_t sums, bool accumulate) {
  constexpr const char* kName = "layer_bwd";
  LayerCall run(kName, x, kv, parameters, cu, rows, seed, memory_cu, heads, max_length, memory_max_length, index,
                offset, normalize_before, causal, eps, dropout, attention_dropout, activation_dropout, activation);
  TransformerLayer& layer = run.layer;
  if (gradients.size() != parameters.size()) {
    fail_argument(
        kName, "gradients",
        "has " + std::to_string(gradients.size()) + " tensors; it needs " + std::to_string(parameters.size()));
  }
  run.assign(gradients, &LinearLayer::dweight, &LinearLayer::dbias, &NormLayer::dweight, &NormLayer::dbias);
  layer.accumulate = accumulate;
  const View input_gradient = run.view(floating("dx", "NC"), dx), output_gradient = run.view(floating("dy", "NC"), dy);
  View slice;
  if (layer.cross) {
    run.call.require(dkv.has_value(), "dkv", "with kv");
    slice = run.view(strided(floating("dkv", "KG")), *dkv);
    if (run.call.sizes['G'] != 2 * layer.columns) fail_argument(kName, "dkv", "must have 2 C columns");
  }
  if (sums < layer.sums_size()) {
    fail_argument(kName, "sums", "= " + std::to_string(sums) + " is less than " + std::to_string(layer.sums_size()));
  }
  run.place(block, fields);
  Block memory = run.scratch(scratch, layer.backward_scratch(sums));
  const torch::stable::accelerator::DeviceGuard guard(run.call.device);
  run.enter();
  check_launch(kName, layer.backward(input_gradient, slice, output_gradient, sums, memory));
}

}  // namespace
}  // namespace ls_train

#define LS_TRAIN_BIND(Op) m.impl(Op::name, TORCH_BOX((Binding<Op, decltype(Op::launch)>::kFunction)))

STABLE_TORCH_LIBRARY_IMPL(ls_train, CUDA, m) {
  using namespace ls_train;
  LS_TRAIN_BIND(LayerNormFwd);
  LS_TRAIN_BIND(LayerNormBwd);
  LS_TRAIN_BIND(BiasDropoutAddFwd);
  LS_TRAIN_BIND(BiasDropoutAddBwd);
  LS_TRAIN_BIND(BiasDropoutAddLayerNormFwd);
  LS_TRAIN_BIND(BiasDropoutAddLayerNormBwd);
  LS_TRAIN_BIND(BiasActivationDropoutFwd);
  LS_TRAIN_BIND(BiasActivationDropoutBwd);
  LS_TRAIN_BIND(AttentionFwd);
  LS_TRAIN_BIND(AttentionBwd);
  LS_TRAIN_BIND(SoftmaxDropoutFwd);
  LS_TRAIN_BIND(SoftmaxDropoutBwd);
  LS_TRAIN_BIND(DropoutFwd);
  LS_TRAIN_BIND(EmbeddingFwd);
  LS_TRAIN_BIND(EmbeddingBwd);
  LS_TRAIN_BIND(CrossEntropyFwd);
  LS_TRAIN_BIND(CrossEntropyBwd);
  LS_TRAIN_BIND(CrossEntropyInplace);
  LS_TRAIN_BIND(GradNorm);
  LS_TRAIN_BIND(AdamPrepare);
  LS_TRAIN_BIND(Adam);
  LS_TRAIN_BIND(LossScaleUpdate);
  LS_TRAIN_BIND(ScaleCast);
  m.impl("column_sum", TORCH_BOX(&add_column_sums));
  m.impl("product", TORCH_BOX(&product));
  m.impl("layer_fwd", TORCH_BOX(&layer_fwd));
  m.impl("layer_bwd", TORCH_BOX(&layer_bwd));
}
