// Instructions that C++ has no words for: tensor-core products of 16-bit tiles, their fragment loads from shared
// memory, asynchronous copies into it. All need sm_80; kernels that use them put their body inside
// LS_TRAIN_TENSOR_CORES.
//
// Fragments of mma.m16n8k16, for lane = 4 * g + q of a warp: an accumulator c holds (row g, columns 2q, 2q + 1) in
// c[0], c[1] and row g + 8 in c[2], c[3]; the left factor holds (g, 2q..), (g + 8, 2q..), (g, 2q + 8..), (g + 8,
// 2q + 8..) as pairs in a[0] to a[3], so two neighbouring accumulators, packed, are a left factor.
#pragma once

#include "device.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define LS_TRAIN_TENSOR_CORES
#endif

namespace ls_train {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Four 8x8 matrices; lane l gives the address of row l % 8 (16 bytes, aligned) of matrix l / 8 and gets in m[i] the
// elements (g, 2q), (g, 2q + 1) of matrix i.
__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], const void* row) {
  load_matrices(m, shared_address(row));
}

// The same of the transposed matrices.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&m)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&m)[4], const void* row) {
  load_matrices_transposed(m, shared_address(row));
}

// An 8x8 matrix, of which each lane has the elements (g, 2q), (g, 2q + 1), transposed.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// 16 aligned bytes of shared memory, not before accesses that the program makes earlier.
__device__ __forceinline__ void load_shared(uint32_t (&x)[4], const void* p) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address(p))
               : "memory");
}

// One store of 16 bytes; the compiler would split an assignment of the four words at times.
__device__ __forceinline__ void store_words(void* p, const uint32_t (&x)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(p), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// c = start + a * b: 16 x 8, 16 x 16 and 16 x 8; b0, b1 hold (rows 2q, 2q + 1; column g) and eight rows further down.
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                             const float (&start)[4], half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(start[0]), "f"(start[1]), "f"(start[2]),
        "f"(start[3]));
}

__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                             const float (&start)[4], bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(start[0]), "f"(start[1]), "f"(start[2]),
        "f"(start[3]));
}

// c += a * b
template <class T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T type) {
  multiply_add(c, a, b0, b1, c, type);
}

// Two neighbouring elements as one register, the first in the low half.
__device__ __forceinline__ uint32_t pack_pair(float x, float y, half) {
  const __half2 pair = __floats2half2_rn(x, y);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ uint32_t pack_pair(float x, float y, bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const uint32_t&>(pair);
}

// 2^x to two units in the last place; one instruction.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x and y become `otherwise` where the halves of `lanes`, without signs and as float16, are below those of `threshold`.
// A half that is NaN is not.
__device__ __forceinline__ void select_kept(float& x, float& y, uint32_t lanes, uint32_t threshold, float otherwise) {
  asm("{\n .reg .pred p, q;\n .reg .b32 w;\n abs.f16x2 w, %2;\n setp.geu.f16x2 p|q, w, %3;\n"
      " selp.f32 %0, %0, %4, p;\n selp.f32 %1, %1, %4, q;\n}"
      : "+f"(x), "+f"(y)
      : "r"(lanes), "r"(threshold), "f"(otherwise));
}

// Asynchronous copies of kBytes (16 or 4) aligned bytes, zeros where not valid. They complete in groups, in order.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid) {
  const int bytes = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :
                 : "r"(shared_address(shared)), "l"(global), "r"(bytes)
                 : "memory");
  }
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all but the newest kPending groups of this thread; others' copies need a barrier after it.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace ls_train
