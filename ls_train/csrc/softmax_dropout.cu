// probs = softmax of masked scores, y = dropout(probs), and the backward. Rows of (B, H, T, S) are (b, h, t).
//
// softmax_dropout_fwd_kernel
//   Grid ceil(rows / groups), block (lanes, groups): `lanes` threads hold one row in registers, kPacks packs each: one
//   for rows of up to 32 packs, so that many warps are in flight, else four. Reads x once, writes probs once and with
//   dropout y once: 2 or 3 * B * H * T * S * sizeof(T) bytes.
// softmax_dropout_bwd_kernel
//   The same layout. Reads dy and probs once, writes dx once: 3 * B * H * T * S * sizeof(T) bytes.
//
// Short rows that are no whole packs go in runs, softmax_dropout_runs.cu. The instantiations for kWidth 1 go over long
// ones in chunks and read them from memory again in later passes.
#include "softmax_dropout.cuh"

namespace ls_train {
namespace {

constexpr int kMaxLanes = 512;

template <class T, int kWidth, int kPacks>
__global__ void __launch_bounds__(kMaxLanes) softmax_dropout_fwd_kernel(const SoftmaxForward<T> a) {
  __shared__ float scratch[kWarp];
  const RowWalk<kWidth, kPacks> walk;
  const bool live = walk.row < a.rows;
  const int64_t base = walk.row * a.keys;
  const int visible = live ? a.visible(walk.row) : 0;
  const bool* padding = live ? a.padding_of(walk.row) : nullptr;
  const bool one_chunk = walk.one_chunk(a.keys);
  float v[kPacks][kWidth];

  Pack<T, kWidth> packs[kPacks];
  const auto fetch = [&](int first) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {  // masked keys are not read
      const int c = walk.column(first, k);
      if (c < visible) packs[k] = load<kWidth>(a.x + base + c);
    }
  };
  const auto fill = [&](int first) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int c = walk.column(first, k);
      if (c < visible) unpack(packs[k], v[k]);
      if (c >= visible || a.causal) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) v[k][i] = c + i < visible ? v[k][i] : -INFINITY;
      }
      if (padding != nullptr && c < visible) {
        const auto padded = load<kWidth>(padding + c);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) v[k][i] = padded.v[i] ? -INFINITY : v[k][i];
      }
    }
  };

  fetch(0);
  const DropoutKey key = dropout_key(a.dropout);
  RowDropout<kWidth, kPacks> dropout(key, walk, 0);
  float largest = -INFINITY, total = 0.f;
  walk.for_chunks(a.keys, [&](int first) {
    if (first > 0) fetch(first);
    fill(first);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) largest = fmaxf(largest, v[k][i]);
    }
  });
  const Exponential<T> exponential(walk.template reduce<Max>(largest, scratch));
  walk.for_chunks(a.keys, [&](int first) {
    if (!one_chunk) {
      fetch(first);
      fill(first);
    }
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        v[k][i] = exponential(v[k][i]);
        total += v[k][i];
      }
    }
  });
  const float scale = softmax_scale(walk.template reduce<Sum>(total, scratch));
  walk.for_chunks(a.keys, [&](int first) {
    if (!one_chunk) {
      fetch(first);
      fill(first);
    }
    if (!one_chunk) dropout = RowDropout<kWidth, kPacks>(key, walk, first);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int c = walk.column(first, k);
      if (!live || c >= a.keys) continue;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) v[k][i] = (one_chunk ? v[k][i] : exponential(v[k][i])) * scale;
      store(a.probs + base + c, pack_floats<T>(v[k]));
      if (a.y != nullptr) store(a.y + base + c, dropout.template apply_and_pack<T>(v[k], key.scale, k, c));
    }
  });
}

template <class T, int kWidth, int kPacks>
__global__ void __launch_bounds__(kMaxLanes) softmax_dropout_bwd_kernel(const SoftmaxBackward<T> a) {
  __shared__ float scratch[kWarp];
  const RowWalk<kWidth, kPacks> walk;
  const bool live = walk.row < a.rows;
  const int64_t base = walk.row * a.keys;
  const bool one_chunk = walk.one_chunk(a.keys);
  Pack<T, kWidth> grads[kPacks], packs[kPacks];
  float d[kPacks][kWidth], p[kPacks][kWidth];  // gradients of the probabilities without the scale, probabilities

  const auto fetch = [&](int first) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int c = walk.column(first, k);
      grads[k] = packs[k] = zero_pack<T, kWidth>();
      if (live && c < a.keys) {
        grads[k] = load_global<kWidth>(a.dy + base + c);
        packs[k] = load_global<kWidth>(a.probs + base + c);
      }
    }
  };

  fetch(0);
  const DropoutKey key = dropout_key(a.dropout);
  RowDropout<kWidth, kPacks> dropout(key, walk, 0);
  const auto fill = [&](int first) {
    if (!one_chunk) dropout = RowDropout<kWidth, kPacks>(key, walk, first);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      dropout.clear_and_unpack(grads[k], d[k], k, walk.column(first, k));
      unpack(packs[k], p[k]);
    }
  };
  float total = 0.f;
  walk.for_chunks(a.keys, [&](int first) {
    if (first > 0) fetch(first);
    fill(first);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) total = fmaf(d[k][i], p[k][i], total);
    }
  });
  total = walk.template reduce<Sum>(total, scratch);
  walk.for_chunks(a.keys, [&](int first) {
    if (!one_chunk) {
      fetch(first);
      fill(first);
    }
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const int c = walk.column(first, k);
      if (!live || c >= a.keys) continue;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) d[k][i] = p[k][i] * ((d[k][i] - total) * key.scale);
      store(a.dx + base + c, pack_floats<T>(d[k]));
    }
  });
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
    const bool aligned = aligned16(y.data) && aligned16(probs.data) && aligned16(x.data);
    const bool packs = aligned && a.keys % kPackWidth<T> == 0 &&
                       reinterpret_cast<uintptr_t>(key_padding_mask.data) % kPackWidth<T> == 0;
    if (!packs && runs_fit<T>(a.keys)) return softmax_forward_runs(a, aligned, stream);
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
    const bool aligned = aligned16(dx.data) && aligned16(dy.data) && aligned16(probs.data);
    const bool packs = aligned && a.keys % kPackWidth<T> == 0;
    if (!packs && runs_fit<T>(a.keys)) return softmax_backward_runs(a, aligned, stream);
    return launch_rows<T>(
        a, packs,
        [](auto width, auto count) {
          return softmax_dropout_bwd_kernel<T, decltype(width)::value, decltype(count)::value>;
        },
        stream);
  });
}

}  // namespace ls_train
