// Adam through shared memory, for cards that copy whole runs of memory without their threads (9.0 and later).
//
// adam_bulk_kernel
//   Grid n / 16384, block 256, 4 blocks a multiprocessor: every block goes over its range in tiles of 1024 elements.
//   While the threads update one tile in shared memory, bulk copies bring the next two and take the last one back.
//   Bytes and results are those of adam_kernel (adam.cu). All slots must be active, as tiles are written as a whole,
//   and the buffers aligned to 16 bytes; the up to 7 elements after the last whole 16 bytes take the ordinary path.
#pragma once

#include "adam.cuh"

namespace ls_train {

constexpr int kBulkThreads = 256;
constexpr int kBulkBlocksPerMultiprocessor = 4;
constexpr int64_t kBulkBlockElements = 16 * 1024;
constexpr int kTile = 1024;
constexpr int kStages = 3;
constexpr int kBulkElements = 8;  // bulk copies move multiples of 16 bytes: as many 16-bit numbers

template <class T, Master kMaster>
struct AdamStage {
  static constexpr int kReadBytes = static_cast<int>(sizeof(T)) + 8 +
                                    (kMaster == Master::kParam   ? static_cast<int>(sizeof(T))
                                     : kMaster == Master::kFloat ? 4
                                                                 : static_cast<int>(sizeof(T)) + 2);
  static constexpr int kAbsent = 8;  // keeps the alignment

  alignas(16) float exp_avg[kTile], exp_avg_sq[kTile];
  alignas(16) float master[kMaster == Master::kFloat ? kTile : kAbsent];
  alignas(16) T param[kTile], grad[kTile];
  alignas(16) int16_t remainder[kMaster == Master::kRemainder ? kTile : kAbsent];

  __device__ __forceinline__ AdamStreams<T> streams() { return {param, master, remainder, exp_avg, exp_avg_sq, grad}; }
};

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

// To shared memory; `arrival` counts the bytes.
template <class U>
__device__ __forceinline__ void bulk_read(U* to, const U* from, int count, uint64_t* arrival) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(count * static_cast<int>(sizeof(U))), "r"(shared_address(arrival))
               : "memory");
}

// From shared memory, as a part of the thread's open group.
template <class U>
__device__ __forceinline__ void bulk_write(U* to, const U* from, int count) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(count * static_cast<int>(sizeof(U)))
               : "memory");
}

__device__ __forceinline__ void wait_for(uint64_t* arrival, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(arrival)), "r"(parity)
        : "memory");
  } while (done == 0);
}

template <class T, Master kMaster>
__device__ __forceinline__ void read_tile(AdamStage<T, kMaster>& stage, const AdamStreams<T>& from, int64_t at,
                                          int count, uint64_t* arrival) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrival)),
               "r"(count * AdamStage<T, kMaster>::kReadBytes)
               : "memory");
  bulk_read(stage.grad, from.grad + at, count, arrival);
  if constexpr (kMaster == Master::kFloat) {
    bulk_read(stage.master, from.master + at, count, arrival);
  } else {
    bulk_read(stage.param, from.param + at, count, arrival);
    if constexpr (kMaster == Master::kRemainder) bulk_read(stage.remainder, from.remainder + at, count, arrival);
  }
  bulk_read(stage.exp_avg, from.exp_avg + at, count, arrival);
  bulk_read(stage.exp_avg_sq, from.exp_avg_sq + at, count, arrival);
}

template <class T, Master kMaster>
__device__ __forceinline__ void write_tile(const AdamStreams<T>& to, const AdamStage<T, kMaster>& stage, int64_t at,
                                           int count) {
  bulk_write(to.exp_avg + at, stage.exp_avg, count);
  bulk_write(to.exp_avg_sq + at, stage.exp_avg_sq, count);
  if constexpr (kMaster == Master::kFloat) bulk_write(to.master + at, stage.master, count);
  if constexpr (kMaster == Master::kRemainder) bulk_write(to.remainder + at, stage.remainder, count);
  bulk_write(to.param + at, stage.param, count);
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Elements [begin, end) of the block, multiples of kBulkElements apart.
template <class T, Master kMaster>
__device__ __forceinline__ void update_tiles(const Adam<T>& a, float scale, int64_t begin, int64_t end,
                                             SlotStep& shared_step) {
  extern __shared__ __align__(128) unsigned char dynamic_memory[];
  __shared__ uint64_t arrivals[kStages];
  auto* stages = reinterpret_cast<AdamStage<T, kMaster>*>(dynamic_memory);
  const bool leads = threadIdx.x == 0;
  const int tiles = static_cast<int>(ceil_div<int64_t>(end - begin, kTile));
  const auto tile_at = [&](int tile) { return begin + static_cast<int64_t>(tile) * kTile; };
  const auto tile_size = [&](int tile) { return static_cast<int>(min(int64_t{kTile}, end - tile_at(tile))); };
  const auto request = [&](int tile) {
    read_tile(stages[tile % kStages], a.streams, tile_at(tile), tile_size(tile), &arrivals[tile % kStages]);
  };
  if (leads) {
    for (uint64_t& arrival : arrivals) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&arrival)) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (leads) {
    for (int tile = 0; tile < min(tiles, kStages - 1); ++tile) request(tile);
  }
  int known_group = -1;
  int64_t known_step = -1;
  SlotStep s;
  int slot = find_slot(a.segments, a.slots, begin);
  for (int tile = 0; tile < tiles; ++tile) {
    AdamStage<T, kMaster>& stage = stages[tile % kStages];
    const int64_t at = tile_at(tile);
    const int64_t stop = at + tile_size(tile);
    wait_for(&arrivals[tile % kStages], static_cast<uint32_t>(tile / kStages) & 1u);
    for (int64_t first = at; first < stop;) {
      while (a.segments[slot + 1] <= first) ++slot;
      const int64_t piece_end = min(stop, a.segments[slot + 1]);
      // Neighbouring slots mostly have the same constants, which take long to work out.
      if (a.segment_group[slot] != known_group || a.segment_step[slot] != known_step) {
        known_group = a.segment_group[slot];
        known_step = a.segment_step[slot];
        __syncthreads();
        if (leads) shared_step = slot_step(a, slot);
        __syncthreads();
        s = shared_step;
      }
      update_piece<4, 1, kMaster>(stage.streams(), s, scale, first - at, piece_end - at);
      first = piece_end;
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copies see what the threads wrote
    __syncthreads();
    if (leads) {
      write_tile(a.streams, stage, at, tile_size(tile));
      if (tile + kStages - 1 < tiles) {
        // The writes of the tile before, whose stage comes next, have left shared memory.
        asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        request(tile + kStages - 1);
      }
    }
  }
  if (leads) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#endif

template <class T, Master kMaster>
__global__ void __launch_bounds__(kBulkThreads, kBulkBlocksPerMultiprocessor) adam_bulk_kernel(const Adam<T> a) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  __shared__ SlotStep shared_step;
  if (a.found_inf != nullptr && *a.found_inf > 0.f) return;
  const float scale = a.grad_scale != nullptr ? *a.grad_scale : 1.f;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kBulkBlockElements;
  const int64_t end = min(a.n, begin + kBulkBlockElements);
  const int64_t tiles_end = end / kBulkElements * kBulkElements;
  if (begin < tiles_end) update_tiles<T, kMaster>(a, scale, begin, tiles_end, shared_step);
  if (tiles_end < end) update_range<1, 1, kMaster>(a, scale, tiles_end, end, shared_step);
#endif
}

// Whether the code that the current device runs has bulk copies: its own or PTX for 9.0 and later.
template <auto kKernel>
bool compiled_for_bulk_copies() {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> versions[kMaxDevices];  // 0: not asked yet; asking costs microseconds
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) return false;
  int version = versions[device].load(std::memory_order_relaxed);
  if (version == 0) {
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, kKernel) != cudaSuccess) return false;
    version = attributes.ptxVersion;
    versions[device].store(version, std::memory_order_relaxed);
  }
  return version >= 90;
}

// Whether adam_bulk can do this step; the buffers are aligned to 16 bytes.
template <class T, Master kMaster>
bool adam_bulk_fits(const Adam<T>& a) {
  constexpr auto kKernel = adam_bulk_kernel<T, kMaster>;
  return a.active == nullptr && compiled_for_bulk_copies<kKernel>() &&
         allow_shared_memory<kKernel>(kStages * sizeof(AdamStage<T, kMaster>));
}

template <class T, Master kMaster>
cudaError_t adam_bulk(const Adam<T>& a, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(a.n, kBulkBlockElements));
  adam_bulk_kernel<T, kMaster><<<blocks, kBulkThreads, kStages * sizeof(AdamStage<T, kMaster>), stream>>>(a);
  return cudaGetLastError();
}

}  // namespace ls_train
