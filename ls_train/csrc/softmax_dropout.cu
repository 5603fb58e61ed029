// probs = softmax of masked scores, y = dropout(probs), and the backward. Rows of (B, H, T, S) are (b, h, t).
//
// softmax_dropout_fwd_kernel
//   Grid ceil(rows / groups), block (lanes, groups): `lanes` threads hold one row in registers, kPacks packs each: one
//   for rows of up to 32 packs, so that many warps are in flight, else four. Reads x once, writes probs once and with
//   dropout y once: 2 or 3 * B * H * T * S * sizeof(T) bytes.
// softmax_dropout_bwd_kernel
//   The same layout. Reads dy and probs once, writes dx once: 3 * B * H * T * S * sizeof(T) bytes.
//
// The instantiations for kWidth 1 go over rows that do not fit into registers in chunks and read them from memory again
// in later passes.
#include <type_traits>

#include "row_kernels.cuh"

namespace ls_train {
namespace {

constexpr int kMaxLanes = 512;

template <class T>
struct SoftmaxForward {
  T* y;  // may be null
  T* probs;
  const T* x;
  const bool* padding;  // (B, S), may be null
  int64_t rows;
  int heads, queries, keys;
  bool causal;
  Dropout dropout;
};

template <class T>
struct SoftmaxBackward {
  T* dx;
  const T* dy;
  const T* probs;
  int64_t rows;
  int keys;
  Dropout dropout;
};

// Where a thread's packs of its row are. A row longer than one chunk is gone over chunk by chunk.
template <int kWidth, int kPacks>
struct RowWalk {
  int lanes = static_cast<int>(blockDim.x), lane = static_cast<int>(threadIdx.x);
  int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;

  __device__ __forceinline__ int chunk() const { return kPacks * lanes * kWidth; }
  __device__ __forceinline__ int column(int first, int k) const { return first + (k * lanes + lane) * kWidth; }

  // Decisions about one element a pack for whole warps of one row; see keep_across.
  __device__ __forceinline__ uint32_t kept(const DropoutKey& key, int first) const {
    if (kWidth > 1 || !key.active() || lanes < kWarp) return 0;
    return keep_across<kPacks>(
        key, lane % kWarp, [&](int) { return row; }, [&](int k) { return column(first, k) - lane % kWarp; });
  }

  __device__ __forceinline__ void drop_pack(float (&x)[kWidth], const DropoutKey& key, uint32_t kept, int k,
                                            int column) const {
    if (kWidth > 1 || lanes < kWarp) {
      drop(x, key, row, column);
    } else if (key.active()) {
      x[0] = kept >> k & 1u ? x[0] * key.scale : 0.f;
    }
  }
};

template <class T, int kWidth, int kPacks>
__global__ void __launch_bounds__(kMaxLanes) softmax_dropout_fwd_kernel(const SoftmaxForward<T> a) {
  __shared__ float scratch[kWarp];
  const RowWalk<kWidth, kPacks> walk;
  const bool live = walk.row < a.rows;
  const int64_t base = walk.row * a.keys;
  const int query = static_cast<int>(walk.row % a.queries);
  const bool* padding = a.padding;
  if (live && padding != nullptr) padding += walk.row / a.queries / a.heads * a.keys;
  const int visible = !live ? 0 : a.causal ? min(a.keys, max(0, query + 1 + a.keys - a.queries)) : a.keys;
  const DropoutKey key = dropout_key(a.dropout);
  const bool one_chunk = kWidth > 1 || a.keys <= walk.chunk();
  float v[kPacks][kWidth];

  const auto fill = [&](int first) {
    Pack<T, kWidth> packs[kPacks];
    Pack<bool, kWidth> padded[kPacks];
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {  // masked keys are not read
      const int c = walk.column(first, k);
      if (c < visible) {
        packs[k] = load<kWidth>(a.x + base + c);
        if (padding != nullptr) padded[k] = load<kWidth>(padding + c);
      }
    }
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int c = walk.column(first, k);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const bool masked = c + i >= visible || (padding != nullptr && padded[k].v[i]);
        v[k][i] = masked ? -INFINITY : to_float(packs[k].v[i]);
      }
    }
  };

  float largest[1] = {-INFINITY};
  for (int first = 0; first < a.keys; first += walk.chunk()) {
    fill(first);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) largest[0] = fmaxf(largest[0], v[k][i]);
    }
  }
  group_reduce<Max>(largest, linear_thread(), walk.lanes, scratch);
  const float shift = largest[0] == -INFINITY ? 0.f : largest[0];  // no visible key: all exponentials are zero
  float total[1] = {0.f};
  for (int first = 0; first < a.keys; first += walk.chunk()) {
    if (!one_chunk) fill(first);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        v[k][i] = __expf(v[k][i] - shift);
        total[0] += v[k][i];
      }
    }
  }
  group_reduce<Sum>(total, linear_thread(), walk.lanes, scratch);
  const float scale = total[0] > 0.f ? 1.f / total[0] : total[0];  // NaN stays NaN
  for (int first = 0; first < a.keys; first += walk.chunk()) {
    if (!one_chunk) fill(first);
    const uint32_t kept = walk.kept(key, first);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int c = walk.column(first, k);
      if (!live || c >= a.keys) continue;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) v[k][i] = (one_chunk ? v[k][i] : __expf(v[k][i] - shift)) * scale;
      store(a.probs + base + c, pack_floats<T>(v[k]));
      if (a.y != nullptr) {
        walk.drop_pack(v[k], key, kept, k, c);
        store(a.y + base + c, pack_floats<T>(v[k]));
      }
    }
  }
}

template <class T, int kWidth, int kPacks>
__global__ void __launch_bounds__(kMaxLanes) softmax_dropout_bwd_kernel(const SoftmaxBackward<T> a) {
  __shared__ float scratch[kWarp];
  const RowWalk<kWidth, kPacks> walk;
  const bool live = walk.row < a.rows;
  const int64_t base = walk.row * a.keys;
  const DropoutKey key = dropout_key(a.dropout);
  const bool one_chunk = kWidth > 1 || a.keys <= walk.chunk();
  float d[kPacks][kWidth];  // gradient of the probabilities
  Pack<T, kWidth> probs[kPacks];

  const auto fill = [&](int first) {
    Pack<T, kWidth> grads[kPacks];
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int c = walk.column(first, k);
      grads[k] = probs[k] = zero_pack<T, kWidth>();
      if (live && c < a.keys) {
        grads[k] = load_streaming<kWidth>(a.dy + base + c);
        probs[k] = load_streaming<kWidth>(a.probs + base + c);
      }
    }
    const uint32_t kept = walk.kept(key, first);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int c = walk.column(first, k);
      unpack(grads[k], d[k]);
      if (c < a.keys) walk.drop_pack(d[k], key, kept, k, c);
    }
  };

  float total[1] = {0.f};
  for (int first = 0; first < a.keys; first += walk.chunk()) {
    fill(first);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) total[0] += d[k][i] * to_float(probs[k].v[i]);
    }
  }
  group_reduce<Sum>(total, linear_thread(), walk.lanes, scratch);
  for (int first = 0; first < a.keys; first += walk.chunk()) {
    if (!one_chunk) fill(first);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int c = walk.column(first, k);
      if (!live || c >= a.keys) continue;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) d[k][i] = to_float(probs[k].v[i]) * (d[k][i] - total[0]);
      store(a.dx + base + c, pack_floats<T>(d[k]));
    }
  }
}

// Launches the instantiation for these rows; kernels(width, packs) gives the kernel for two integral constants.
template <class T, class Arguments, class Kernels>
cudaError_t launch_rows(const Arguments& a, bool packs, Kernels&& kernels, cudaStream_t stream) {
  const auto launch = [&](auto width, auto packs_per_thread) {
    const RowGroups g = row_groups(a.rows, a.keys, width, width * packs_per_thread, kMaxLanes);
    kernels(width, packs_per_thread)<<<g.blocks, g.block, 0, stream>>>(a);
    return cudaGetLastError();
  };
  constexpr std::integral_constant<int, kPackWidth<T>> kWide;
  constexpr std::integral_constant<int, 1> kOne;
  constexpr std::integral_constant<int, 4> kFour;
  if (!packs || a.keys > kMaxLanes * kFour * kWide) return launch(kOne, kFour);
  return a.keys <= kWarp * kWide ? launch(kWide, kOne) : launch(kWide, kFour);
}

}  // namespace

cudaError_t softmax_dropout_fwd(const TensorRef& y, const TensorRef& probs, const TensorRef& x,
                                const TensorRef& key_padding_mask, const TensorRef& seed, bool causal, double p,
                                int64_t offset, cudaStream_t stream) {
  if (x.numel() == 0) return cudaSuccess;
  return dispatch_type(x.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    SoftmaxForward<T> a;
    a.y = y.as<T>();
    a.probs = probs.as<T>();
    a.x = x.as<T>();
    a.padding = key_padding_mask.as<bool>();
    a.rows = x.sizes[0] * x.sizes[1] * x.sizes[2];
    a.heads = static_cast<int>(x.sizes[1]);
    a.queries = static_cast<int>(x.sizes[2]);
    a.keys = static_cast<int>(x.sizes[3]);
    a.causal = causal;
    a.dropout = make_dropout(seed, p, offset);
    const bool packs = packs_fit<T>(a.keys, y.data, probs.data, x.data) &&
                       reinterpret_cast<uintptr_t>(key_padding_mask.data) % kPackWidth<T> == 0;
    return launch_rows<T>(
        a, packs,
        [](auto width, auto count) {
          return softmax_dropout_fwd_kernel<T, decltype(width)::value, decltype(count)::value>;
        },
        stream);
  });
}

cudaError_t softmax_dropout_bwd(const TensorRef& dx, const TensorRef& dy, const TensorRef& probs, const TensorRef& seed,
                                double p, int64_t offset, cudaStream_t stream) {
  if (probs.numel() == 0) return cudaSuccess;
  return dispatch_type(probs.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    SoftmaxBackward<T> a;
    a.dx = dx.as<T>();
    a.dy = dy.as<T>();
    a.probs = probs.as<T>();
    a.rows = probs.sizes[0] * probs.sizes[1] * probs.sizes[2];
    a.keys = static_cast<int>(probs.sizes[3]);
    a.dropout = make_dropout(seed, p, offset);
    return launch_rows<T>(
        a, packs_fit<T>(a.keys, dx.data, dy.data, probs.data),
        [](auto width, auto count) {
          return softmax_dropout_bwd_kernel<T, decltype(width)::value, decltype(count)::value>;
        },
        stream);
  });
}

}  // namespace ls_train
