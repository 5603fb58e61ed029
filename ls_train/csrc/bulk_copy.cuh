// Copies of whole rows from global into shared memory that one thread asks for (cp.async.bulk, sm_90): a barrier in
// shared memory counts the bytes that have arrived.
#pragma once

#include <cstdint>

namespace ls_train {

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// For phases of one bulk_expect each; then all threads need a barrier, the one that called it may start to copy.
__device__ __forceinline__ void bulk_init(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The barrier's present phase ends when `bytes` have been copied.
__device__ __forceinline__ void bulk_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// bytes and both addresses: multiples of 16.
__device__ __forceinline__ void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// Waits for the end of a phase; parity: 0 for the first, 1 for the second, 0 for the third and so on.
__device__ __forceinline__ void bulk_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

#endif

}  // namespace ls_train
