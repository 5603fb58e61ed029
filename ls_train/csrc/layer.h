// A Transformer layer's forward and backward as one sequence of launches and GEMMs, so that the host leaves Python once
// a layer and pass. The same sequence in Python (layers/encoder_layer.py, layers/decoder_layer.py) is the definition:
// order, operands and places in the scratch memory are equal, a test compares the launches. No torch, no CUDA code.
//
// Shapes: x, y (N, C); kv (Ns, L * 2C); see ops.h for the letters. GEMMs belong to the caller (Product).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <utility>

#include "arguments.h"
#include "ops.h"

namespace ls_train {

// Part of a tensor, or nothing.
struct View {
  TensorRef ref;
  void* owner = nullptr;  // whatever Product needs to know the tensor by
  int64_t offset = 0;     // elements from the owner's first one

  explicit operator bool() const { return static_cast<bool>(ref); }
  operator const TensorRef&() const { return ref; }
};

// out = a b + bias, or out += a b; bias may be empty.
using Product = std::function<void(const View& out, const View& a, const View& b, const View& bias, bool accumulate)>;

// Bytes of an element of a floating-point type.
inline int64_t item_size(DType type) { return type == DType::kFloat64 ? 8 : type == DType::kFloat32 ? 4 : 2; }

inline View reshaped(const View& view, int64_t first, std::initializer_list<int64_t> sizes,
                     std::initializer_list<int64_t> strides) {
  View part = view;
  part.offset += first;
  part.ref.data = static_cast<char*>(view.ref.data) + first * item_size(view.ref.dtype);
  part.ref.dims = static_cast<int>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), part.ref.sizes);
  std::copy(strides.begin(), strides.end(), part.ref.strides);
  return part;
}

inline View transpose(const View& matrix) {
  View turned = matrix;
  std::swap(turned.ref.sizes[0], turned.ref.sizes[1]);
  std::swap(turned.ref.strides[0], turned.ref.strides[1]);
  return turned;
}

// Memory that tensors are cut from, each 256-byte aligned, never beyond its end.
class Block {
 public:
  Block(const char* op, const char* name, const View& memory) : op_(op), name_(name), memory_(memory) {}

  // The (rows, columns) tensor (columns 0: (rows,)) at byte `start`.
  View at(int64_t start, int64_t rows, int64_t columns, DType type) const {
    const int64_t width = std::max<int64_t>(1, columns), own = item_size(memory_.ref.dtype);
    if (start < 0 || start % 16 != 0 || start + rows * width * item_size(type) > memory_.ref.sizes[0] * own) {
      fail_argument(op_, name_,
                    "of " + std::to_string(memory_.ref.sizes[0] * own) + " bytes has no " + std::to_string(rows) +
                        " x " + std::to_string(width) + " tensor at byte " + std::to_string(start));
    }
    View part = memory_;
    part.offset += start / own;
    part.ref.data = static_cast<char*>(memory_.ref.data) + start;
    part.ref.dtype = type;
    part.ref.dims = columns == 0 ? 1 : 2;
    part.ref.sizes[0] = rows;
    part.ref.sizes[1] = columns;
    part.ref.strides[0] = width;
    part.ref.strides[1] = 1;
    return part;
  }

  View take(int64_t rows, int64_t columns, DType type) {
    const View part = at(used_, rows, columns, type);
    used_ += aligned(rows * std::max<int64_t>(1, columns) * item_size(type));
    return part;
  }

  // Bytes that a tensor of `size` bytes takes.
  static int64_t aligned(int64_t size) {
    constexpr int64_t kAlignment = 256;
    return (size + kAlignment - 1) / kAlignment * kAlignment;
  }

  int64_t used() const { return used_; }
  void release(int64_t used) { used_ = used; }

 private:
  const char* op_;
  const char* name_;
  View memory_;
  int64_t used_ = 0;
};

struct LinearLayer {
  View weight, bias, dweight, dbias;
};

struct NormLayer {
  View weight, bias, dweight, dbias;
  View sum, mean, rstd;  // saved; sum is what it is applied to
};

class TransformerLayer {
 public:
  // Dropout sites, as in layers/call.py.
  enum Site { kSelfAttention, kSelfOutput, kCrossAttention, kCrossOutput, kActivation, kFfnOutput };
  // Places of the saved tensors in the list of their first bytes; those of one norm follow each other.
  enum Saved {
    kQkv,
    kAttended,
    kLse,
    kSelfNorm,
    kQuery = kSelfNorm + 3,
    kCrossAttended,
    kCrossLse,
    kCrossNorm,
    kFinalNorm = kCrossNorm + 3,
    kHidden = kFinalNorm + 3,
    kSavedCount
  };

  DType type;
  int64_t rows, columns, inner, heads, keys = 0;
  bool cross = false, normalize_before = false, causal = false, accumulate = false;
  double eps = 0, dropout = 0, attention_dropout = 0, activation_dropout = 0;
  int64_t offset = 0, max_length = 0, memory_max_length = 0, layer = 0;
  Activation activation = Activation::kRelu;
  TensorRef cu, used, seed, memory_cu;
  cudaStream_t stream = nullptr;
  Product product;
  LinearLayer qkv, out, cross_query, cross_out, fc1, fc2;
  NormLayer self_norm, cross_norm, final_norm;
  View x, kv;

  // Cuts the saved tensors out of `block`; `first` holds the byte where each begins.
  void place(const Block& block, const int64_t* first) {
    const auto matrix = [&](int field, int64_t width) { return block.at(first[field], rows, width, type); };
    const auto norm = [&](NormLayer& target, int field, bool has_sum) {
      target.sum = has_sum ? matrix(field, columns) : x;
      target.mean = block.at(first[field + 1], rows, 0, DType::kFloat32);
      target.rstd = block.at(first[field + 2], rows, 0, DType::kFloat32);
    };
    qkv_ = matrix(kQkv, 3 * columns);
    attended_ = matrix(kAttended, columns);
    lse_ = block.at(first[kLse], rows, heads, DType::kFloat32);
    norm(self_norm, kSelfNorm, !normalize_before);
    if (cross) {
      query_ = matrix(kQuery, columns);
      cross_attended_ = matrix(kCrossAttended, columns);
      cross_lse_ = block.at(first[kCrossLse], rows, heads, DType::kFloat32);
      norm(cross_norm, kCrossNorm, true);
    }
    norm(final_norm, kFinalNorm, true);
    hidden_ = matrix(kHidden, inner);
  }

  // Bytes of scratch that a forward takes, see forward_scratch in layers/call.py.
  int64_t forward_scratch() const { return 2 * matrix_size(columns) + matrix_size(inner); }

  cudaError_t forward(const View& y, Block& scratch) {
    const View projected = scratch.take(rows, columns, type), normed = scratch.take(rows, columns, type);
    NormLayer& second = cross ? cross_norm : final_norm;
    if (normalize_before) {
      run(layer_norm_fwd(normed, self_norm.mean, self_norm.rstd, x, self_norm.weight, self_norm.bias, used, eps,
                         stream));
      self_attention(projected, normed);
      add_norm(normed, projected, out.bias, x, second, kSelfOutput);
      if (cross) {
        cross_attention(projected, normed);
        add_norm(normed, projected, cross_out.bias, cross_norm.sum, final_norm, kCrossOutput);
      }
      feed_forward(projected, normed, scratch);
      run(bias_dropout_add_fwd(y, projected, fc2.bias, final_norm.sum, seed, used, dropout, offset + kFfnOutput,
                               stream));
    } else {
      // y is free for the first layer norm's output until its own turn comes.
      const View first = cross ? y : normed;
      self_attention(projected, x);
      add_norm(first, projected, out.bias, x, self_norm, kSelfOutput);
      if (cross) {
        cross_attention(projected, first);
        add_norm(normed, projected, cross_out.bias, first, cross_norm, kCrossOutput);
      }
      feed_forward(projected, normed, scratch);
      add_norm(y, projected, fc2.bias, normed, final_norm, kFfnOutput);
    }
    return error_;
  }

  // Floats that the partial rows of all column sums of a backward take, see backward_sums in layers/call.py.
  int64_t sums_size() const {
    const auto part = [](int64_t width) { return Block::aligned(kMaxRowBlocks * width * 4) / 4; };
    const int64_t size = 2 * part(3 * columns) + part(inner) + (cross ? part(columns) + part(3 * columns) : 0);
    return size + (normalize_before ? part(columns) + part(2 * columns) : part(3 * columns));
  }

  // Bytes of scratch that a backward takes, `sums` of its floats for partial rows, see backward_scratch there.
  int64_t backward_scratch(int64_t sums) const {
    const int64_t row = Block::aligned(rows * 4), feed_forward = 2 * matrix_size(inner);
    const int64_t attention = matrix_size(columns) + matrix_size(3 * columns);
    return (2 + cross + normalize_before) * matrix_size(columns) + Block::aligned(rows * heads * 4) +
           Block::aligned(sums * 4) + std::max({feed_forward, attention, 2 * row});
  }

  // dkv: (Ns, 2C), this layer's part, its rows may lie apart; sums: number of floats for partial rows.
  cudaError_t backward(const View& dx, const View& dkv, const View& dy, int64_t sums, Block& scratch) {
    row_sums_ = scratch.take(rows, heads, DType::kFloat32);
    Block partials("layer_bwd", "sums", scratch.take(sums, 0, DType::kFloat32));
    partials_ = &partials;
    const View dropped = scratch.take(rows, columns, type), dsum = scratch.take(rows, columns, type);
    const View dresidual = cross ? scratch.take(rows, columns, type) : dsum;
    // dx is free for layer norm outputs until its own turn comes.
    if (normalize_before) {
      NormLayer& second = cross ? cross_norm : final_norm;
      norm_again(dx, final_norm, scratch);
      const View dnormed = scratch.take(rows, columns, type);
      View dprojected = add_bwd(dropped, dy, fc2.dbias, kFfnOutput);
      feed_forward_bwd(dnormed, dprojected, dx, false, scratch);
      View residual = dy;
      if (cross) {
        dprojected = add_norm_bwd(dropped, dsum, dnormed, residual, cross_out.dbias, final_norm, kCrossOutput);
        norm_again(dx, cross_norm, scratch);
        cross_attention_bwd(dnormed, dkv, dprojected, dx, false, scratch);
        residual = dsum;
      }
      dprojected = add_norm_bwd(dropped, dresidual, dnormed, residual, out.dbias, second, kSelfOutput);
      norm_again(dx, self_norm, scratch);
      self_attention_bwd(dnormed, dprojected, dx, false, scratch);
      const Part part = take_part({self_norm.dweight, self_norm.dbias});
      run(layer_norm_bwd(dx, self_norm.dweight, self_norm.dbias, part.workspace, part.rows, dnormed, dresidual, x,
                         self_norm.mean, self_norm.rstd, self_norm.weight, used, accumulate, stream));
    } else {
      NormLayer& second = cross ? cross_norm : self_norm;
      View dprojected = add_norm_bwd(dropped, dsum, dy, View(), fc2.dbias, final_norm, kFfnOutput);
      norm_again(dx, second, scratch);
      feed_forward_bwd(dsum, dprojected, dx, true, scratch);
      if (cross) {
        dprojected = add_norm_bwd(dropped, dresidual, dsum, View(), cross_out.dbias, cross_norm, kCrossOutput);
        norm_again(dx, self_norm, scratch);
        cross_attention_bwd(dresidual, dkv, dprojected, dx, true, scratch);
      }
      dprojected = add_norm_bwd(dropped, dx, dresidual, View(), out.dbias, self_norm, kSelfOutput);
      self_attention_bwd(dx, dprojected, x, true, scratch);
    }
    add_column_sums();
    return error_;
  }

 private:
  // Where an operator leaves its partial rows, and their number.
  struct Part {
    TensorRef workspace, rows;
  };

  void run(cudaError_t error) {
    if (error_ == cudaSuccess) error_ = error;
  }

  int64_t matrix_size(int64_t width) const { return Block::aligned(rows * width * item_size(type)); }

  double scale() const { return std::pow(static_cast<double>(columns / heads), -0.5); }

  View split_heads(const View& matrix, int64_t first = 0) const {
    const int64_t size = columns / heads;
    return reshaped(matrix, first, {matrix.ref.sizes[0], heads, size}, {matrix.ref.strides[0], size, 1});
  }

  void self_attention(const View& y, const View& input) {
    product(qkv_, input, transpose(qkv.weight), qkv.bias, false);
    run(attention_fwd(split_heads(attended_), lse_, split_heads(qkv_), split_heads(qkv_, columns),
                      split_heads(qkv_, 2 * columns), cu, cu, seed, max_length, max_length, causal, scale(),
                      attention_dropout, offset + kSelfAttention, stream));
    product(y, attended_, transpose(out.weight), View(), false);
  }

  void cross_attention(const View& y, const View& input) {
    product(query_, input, transpose(cross_query.weight), cross_query.bias, false);
    const int64_t first = layer * 2 * columns;
    run(attention_fwd(split_heads(cross_attended_), cross_lse_, split_heads(query_), split_heads(kv, first),
                      split_heads(kv, first + columns), cu, memory_cu, seed, max_length, memory_max_length, false,
                      scale(), attention_dropout, offset + kCrossAttention, stream));
    product(y, cross_attended_, transpose(cross_out.weight), View(), false);
  }

  void activate(const View& y, const View& before) {
    run(bias_activation_dropout_fwd(y, before, fc1.bias, seed, used, activation_dropout, offset + kActivation,
                                    activation, stream));
  }

  void feed_forward(const View& y, const View& input, Block& scratch) {
    const int64_t mark = scratch.used();
    const View temporary = scratch.take(rows, inner, type);
    const bool saves_output = activation == Activation::kRelu;
    const View before = saves_output ? temporary : hidden_, after = saves_output ? hidden_ : temporary;
    product(before, input, transpose(fc1.weight), View(), false);
    activate(after, before);
    product(y, after, transpose(fc2.weight), View(), false);
    scratch.release(mark);
  }

  void add_norm(const View& y, const View& projected, const View& bias, const View& residual, const NormLayer& norm,
                Site site) {
    run(bias_dropout_add_layer_norm_fwd(y, norm.sum, norm.mean, norm.rstd, projected, bias, residual, norm.weight,
                                        norm.bias, seed, used, eps, dropout, offset + site, stream));
  }

  void norm_again(const View& y, const NormLayer& norm, Block& scratch) {
    const int64_t mark = scratch.used();
    const View mean = scratch.take(rows, 0, DType::kFloat32), rstd = scratch.take(rows, 0, DType::kFloat32);
    run(layer_norm_fwd(y, mean, rstd, norm.sum, norm.weight, norm.bias, used, eps, stream));
    scratch.release(mark);
  }

  Part take_part(std::initializer_list<View> gradients) {
    const int count = static_cast<int>(gradients.size());
    const View workspace = partials_->take(kMaxRowBlocks * count * gradients.begin()->ref.sizes[0], 0, DType::kFloat32);
    TensorRef rows_ref;
    rows_ref.data = &partial_rows_[parts_];
    rows_ref.dtype = DType::kInt64;
    rows_ref.dims = 1;
    rows_ref.sizes[0] = 1;
    for (const View& gradient : gradients) sums_[sums_count_++] = {parts_, gradient.ref, workspace.ref};
    ++parts_;
    return {workspace, rows_ref};
  }

  // Adds up the partial rows that all operators have left, in one launch.
  void add_column_sums() {
    ColumnSum items[kMaxSums];
    for (int i = 0, place = 0; i < sums_count_; ++i, ++place) {
      if (i == 0 || sums_[i].part != sums_[i - 1].part) place = 0;
      const int64_t width = sums_[i].gradient.sizes[0], count = partial_rows_[sums_[i].part];
      items[i] = {sums_[i].gradient.data, sums_[i].partials.as<float>() + place * count * width,
                  static_cast<int>(count), static_cast<int>(width)};
    }
    run(column_sum(items, sums_count_, type, accumulate, stream));
  }

  View add_bwd(const View& dropped, const View& dy, const View& dbias, Site site) {
    const bool drops = dropout > 0;
    const Part part = take_part({dbias});
    run(bias_dropout_add_bwd(drops ? dropped : View(), dbias, part.workspace, part.rows, dy, seed, used, dropout,
                             offset + site, accumulate, stream));
    return drops ? dropped : dy;
  }

  View add_norm_bwd(const View& dropped, const View& dresidual, const View& dy, const View& dsum, const View& dbias,
                    const NormLayer& norm, Site site) {
    const bool drops = dropout > 0;
    const Part part = take_part({norm.dweight, norm.dbias, dbias});
    run(bias_dropout_add_layer_norm_bwd(drops ? dropped : View(), dresidual, dbias, norm.dweight, norm.dbias,
                                        part.workspace, part.rows, dy, dsum, norm.sum, norm.mean, norm.rstd,
                                        norm.weight, seed, used, dropout, offset + site, accumulate, stream));
    return drops ? dropped : dresidual;
  }

  void feed_forward_bwd(const View& dx, const View& dy, const View& input, bool add, Block& scratch) {
    const int64_t mark = scratch.used();
    const View dhidden = scratch.take(rows, inner, type), dinner = scratch.take(rows, inner, type);
    const bool saves_output = activation == Activation::kRelu;
    // dinner is free until the activation's backward.
    if (!saves_output) activate(dinner, hidden_);
    weight_gradient(fc2, dy, saves_output ? hidden_ : dinner);
    product(dhidden, dy, fc2.weight, View(), false);
    const Part part = take_part({fc1.dbias});
    run(bias_activation_dropout_bwd(dinner, fc1.dbias, part.workspace, part.rows, dhidden, hidden_,
                                    saves_output ? View() : fc1.bias, seed, used, activation_dropout,
                                    offset + kActivation, activation, accumulate, stream));
    weight_gradient(fc1, dinner, input);
    product(dx, dinner, fc1.weight, View(), add);
    scratch.release(mark);
  }

  void self_attention_bwd(const View& dx, const View& dy, const View& input, bool add, Block& scratch) {
    const int64_t mark = scratch.used();
    const View dattended = output_projection_bwd(out, dy, attended_, scratch);
    const View dqkv = scratch.take(rows, 3 * columns, type);
    run(attention_bwd(split_heads(dqkv), split_heads(dqkv, columns), split_heads(dqkv, 2 * columns), row_sums_,
                      split_heads(dattended), split_heads(qkv_), split_heads(qkv_, columns),
                      split_heads(qkv_, 2 * columns), split_heads(attended_), lse_, cu, cu, seed, max_length,
                      max_length, causal, scale(), attention_dropout, offset + kSelfAttention, stream));
    projection_bwd(dx, dqkv, qkv, input, add);
    scratch.release(mark);
  }

  void cross_attention_bwd(const View& dx, const View& dkv, const View& dy, const View& input, bool add,
                           Block& scratch) {
    const int64_t mark = scratch.used();
    const View dattended = output_projection_bwd(cross_out, dy, cross_attended_, scratch);
    const View dquery = scratch.take(rows, columns, type);
    const int64_t first = layer * 2 * columns;
    run(attention_bwd(split_heads(dquery), split_heads(dkv), split_heads(dkv, columns), row_sums_,
                      split_heads(dattended), split_heads(query_), split_heads(kv, first),
                      split_heads(kv, first + columns), split_heads(cross_attended_), cross_lse_, cu, memory_cu, seed,
                      max_length, memory_max_length, false, scale(), attention_dropout, offset + kCrossAttention,
                      stream));
    projection_bwd(dx, dquery, cross_query, input, add);
    scratch.release(mark);
  }

  View output_projection_bwd(const LinearLayer& projection, const View& dy, const View& attended, Block& scratch) {
    weight_gradient(projection, dy, attended);
    const View dattended = scratch.take(rows, columns, type);
    product(dattended, dy, projection.weight, View(), false);
    return dattended;
  }

  void projection_bwd(const View& dx, const View& dy, const LinearLayer& projection, const View& input, bool add) {
    const Part part = take_part({projection.dbias});
    run(bias_dropout_add_bwd(View(), projection.dbias, part.workspace, part.rows, dy, TensorRef(), used, 0.0, 0,
                             accumulate, stream));
    weight_gradient(projection, dy, input);
    product(dx, dy, projection.weight, View(), add);
  }

  void weight_gradient(const LinearLayer& projection, const View& dy, const View& input) {
    product(projection.dweight, transpose(dy), input, View(), accumulate);
  }

  cudaError_t error_ = cudaSuccess;
  View row_sums_, qkv_, attended_, lse_, query_, cross_attended_, cross_lse_, hidden_;

  // The column sums that a backward has begun, those of a part one after another.
  static constexpr int kMaxParts = 7, kMaxSums = 12;
  struct Begun {
    int part;
    TensorRef gradient, partials;
  };
  Block* partials_ = nullptr;  // where parts are taken from
  Begun sums_[kMaxSums];
  int64_t partial_rows_[kMaxParts] = {};
  int parts_ = 0, sums_count_ = 0;
};

}  // namespace ls_train
