// What moves data and synchronizes without the threads of a warp: shared memory by 32-bit address, asynchronous copies,
// mbarriers, the copy engine, clusters.
//
// By cuda::ptx of the toolkit, but where inline PTX makes less code. Before sm_90, what needs sm_90 does nothing, and a
// cluster is one block.
#pragma once

#include <cstdint>
#include <cstring>
#include <cuda/ptx>

#include "launch_plan.h"

namespace fused_layernorm {

__device__ __forceinline__ unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}
template <typename T>
__device__ __forceinline__ T* shared_pointer(unsigned address) {
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

// Takes a shared address: for a pointer read from a struct, the compiler no longer knew that it points to shared
// memory.
template <typename T>
__device__ __forceinline__ T load_shared(unsigned address) {
  return *shared_pointer<const T>(address);
}
template <typename T>
__device__ __forceinline__ void store_shared(unsigned address, T value) {
  *shared_pointer<T>(address) = value;
}
__device__ __forceinline__ void store_shared(unsigned address, uint4 word) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(word.x), "r"(word.y), "r"(word.z),
               "r"(word.w)
               : "memory");
}

// ---- copies by threads: cp.async ------------------------------------------------------------------------------------

// Copies 16 bytes from global to shared memory asynchronously. Copies belong to the group that the thread commits next;
// wait_for_copies<n> waits for all but the thread's last n groups.
__device__ __forceinline__ void copy_async(unsigned shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
// Copies the first `bytes` of 16 bytes, and zeros the rest.
__device__ __forceinline__ void copy_async(unsigned shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
// A vector of 8 or 16 bytes.
template <int kBytes>
__device__ __forceinline__ void copy_vec_async(unsigned shared, const void* global) {
  static_assert(kBytes == 8 || kBytes == 16, "what cp.async moves");
  if constexpr (kBytes == 16) {
    copy_async(shared, global);
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared), "l"(global) : "memory");
  }
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int groups>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

// ---- mbarriers ------------------------------------------------------------------------------------------------------

// By 32-bit shared address. A phase of a barrier ends after its number of arrivals (and expected bytes, if any were
// announced); the wait names the parity of its phase.
__device__ __forceinline__ void init_barrier(unsigned barrier, unsigned arrivals) {
  cuda::ptx::mbarrier_init(shared_pointer<uint64_t>(barrier), arrivals);
}
__device__ __forceinline__ void arrive_barrier(unsigned barrier) {
  cuda::ptx::mbarrier_arrive(shared_pointer<uint64_t>(barrier));
}
// One lane arrives for all `lanes` of its warp; in the build for racecheck every lane arrives.
constexpr int kWarpArrivals = kForRacecheck ? 32 : 1;
__device__ __forceinline__ void arrive_of_warp(unsigned barrier, unsigned lanes = 0xffffffffu) {
  __syncwarp(lanes);
  if (kWarpArrivals > 1 || threadIdx.x % 32 == 0) arrive_barrier(barrier);
}
__device__ __forceinline__ void wait_barrier(unsigned barrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
#define FLN_BARRIER_WAIT "mbarrier.try_wait.parity.shared.b64"
#else
#define FLN_BARRIER_WAIT "mbarrier.test_wait.parity.shared.b64"
#endif
  asm volatile(
      "{\n"
      ".reg .pred arrived;\n"
      "again%=:\n" FLN_BARRIER_WAIT
      " arrived, [%0], %1;\n"
      "@!arrived bra again%=;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
#undef FLN_BARRIER_WAIT
}

// ---- the copy engine (sm_90 and later) ------------------------------------------------------------------------------

__device__ __forceinline__ void expect_bytes(unsigned barrier, unsigned bytes) {  // and arrives
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}
// Addresses and sizes are multiples of 16 bytes, here and below. `global` stays a generic address, which cuda::ptx
// would convert.
__device__ __forceinline__ void copy_bulk(unsigned shared, const void* global, unsigned bytes, unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
#endif
}

// The number of bytes that the copy engine reads to cover `bytes` bytes from `source` on: whole 16-byte words from
// `past` bytes before `source`, less the last word if it would cross `end`, the end of the tensor. copy_rest() then
// copies the remaining elements.
__device__ __forceinline__ unsigned covering_bytes(const char* source, unsigned past, unsigned bytes, const char* end) {
  const unsigned covered = (past + bytes + 15) / 16 * 16;
  return source - past + covered > end ? covered - 16 : covered;
}
template <typename T>
__device__ __forceinline__ void copy_rest(unsigned shared, const char* source, unsigned past, unsigned bytes,
                                          unsigned covered) {
#pragma unroll 1
  for (unsigned at = max(past, covered); at < past + bytes; at += static_cast<unsigned>(sizeof(T)))
    store_shared(shared + at, *reinterpret_cast<const T*>(source - past + at));
}

// Bulk copy from shared to global memory. Threads that wrote the data first call fence_bulk_store() and synchronize.
// wait_for_bulk_stores() waits until the shared memory of this thread's copies has been read.
__device__ __forceinline__ void fence_bulk_store() {
#if __CUDA_ARCH__ >= 900
  cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
#endif
}
__device__ __forceinline__ void store_bulk(void* global, unsigned shared, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
  cuda::ptx::cp_async_bulk_commit_group();
#endif
}
__device__ __forceinline__ void wait_for_bulk_stores() {
#if __CUDA_ARCH__ >= 900
  cuda::ptx::cp_async_bulk_wait_group_read(cuda::ptx::n32_t<0>{});
#endif
}
// Makes init_barrier() visible to the copy engine and to other blocks of the cluster.
__device__ __forceinline__ void fence_barrier_init() {
#if __CUDA_ARCH__ >= 900
  cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
  fence_bulk_store();
#endif
}

// ---- several blocks on one row: a cluster (sm_90 and later; elsewhere a cluster is one block) -----------------------

constexpr int kMaxCluster = 16;

__device__ __forceinline__ int cluster_size() {
#if __CUDA_ARCH__ >= 900
  return cuda::ptx::get_sreg_cluster_nctarank();
#else
  return 1;
#endif
}
__device__ __forceinline__ int cluster_index() {  // in the grid
#if __CUDA_ARCH__ >= 900
  return cuda::ptx::get_sreg_clusterid_x();
#else
  return blockIdx.x;
#endif
}
__device__ __forceinline__ int cluster_rank() {
#if __CUDA_ARCH__ >= 900
  return cuda::ptx::get_sreg_cluster_ctarank();
#else
  return 0;
#endif
}

// Waits for all threads of the cluster and makes the values that they pushed visible. Split into arrive and wait, so
// that independent work can go between. A cluster must synchronize once before the first push: until then a block may
// not have started. All threads of a warp call them together (.aligned, which cuda::ptx does not offer).
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// The address in block `peer` that corresponds to a shared address of this block.
__device__ __forceinline__ unsigned address_in_peer(unsigned address, int peer) {
  unsigned remote = address;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(peer));
#endif
  return remote;
}

// Writes a value to the shared memory of block `peer`, at the address that `slot` has in this block.
template <typename T>
__device__ __forceinline__ void push_to_peer(T* slot, int peer, const T& value) {
#if __CUDA_ARCH__ >= 900
  unsigned words[sizeof(T) / 4];
  memcpy(words, &value, sizeof(T));
  const unsigned remote = address_in_peer(shared_address(slot), peer);
#pragma unroll
  for (unsigned i = 0; i < sizeof(T) / 4; ++i)
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote + 4 * i), "r"(words[i]) : "memory");
#endif
}

// Stores 4, 8 or 16 bytes asynchronously; `barrier` in the peer counts the bytes as they arrive. Both addresses are the
// peer's.
template <typename T>
__device__ __forceinline__ void send_to(unsigned slot, unsigned barrier, const T& value) {
#if __CUDA_ARCH__ >= 900
  unsigned words[sizeof(T) / 4];
  memcpy(words, &value, sizeof(T));
  if constexpr (sizeof(T) == 4) {
    cuda::ptx::st_async(shared_pointer<unsigned>(slot), words[0], shared_pointer<uint64_t>(barrier));
  } else {
    cuda::ptx::st_async(shared_pointer<unsigned>(slot), words, shared_pointer<uint64_t>(barrier));
  }
#endif
}
template <typename T>
__device__ __forceinline__ void send_to_peer(T* slot, unsigned barrier, int peer, const T& value) {
  send_to(address_in_peer(shared_address(slot), peer), address_in_peer(barrier, peer), value);
}

// ---- blocks that are not in one cluster, of a cooperative launch ----------------------------------------------------

// Writes, and reads, 16 bytes of global memory as a whole. The value itself tells a reader whether it is there.
template <typename T>
__device__ __forceinline__ void publish(T* global, const T& value) {
  static_assert(sizeof(T) == 16 && alignof(T) >= 4, "one access");
#if __CUDA_ARCH__ >= 900
  uint64_t words[2];
  memcpy(words, &value, sizeof(T));
  asm volatile("{ .reg .b128 word; mov.b128 word, {%1, %2}; st.relaxed.gpu.global.b128 [%0], word; }" ::"l"(
                   __cvta_generic_to_global(global)),
               "l"(words[0]), "l"(words[1])
               : "memory");
#endif
}
template <typename T>
__device__ __forceinline__ T observe(const T* global) {
  T value{};
#if __CUDA_ARCH__ >= 900
  uint64_t words[2];
  asm volatile("{ .reg .b128 word; ld.relaxed.gpu.global.b128 word, [%2]; mov.b128 {%0, %1}, word; }"
               : "=l"(words[0]), "=l"(words[1])
               : "l"(__cvta_generic_to_global(global))
               : "memory");
  memcpy(&value, words, sizeof(T));
#endif
  return value;
}

// Waits for the values of all `blocks` blocks, at most kWholeCard. In lane l of a warp calls add(value, i) for those of
// blocks l + 32 i. is_there(value, block): whether the block has published it. All loads of a lane are in flight at
// once.
template <typename T, typename IsThere, typename Add>
__device__ __forceinline__ void for_each_of_blocks(const T* values, int blocks, IsThere is_there, Add add) {
  constexpr int kValues = kWholeCard / 32;
  const int lane = threadIdx.x % 32;
  T found[kValues];
  bool all;
  do {
    all = true;
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      if (lane + 32 * i < blocks) found[i] = observe(values + lane + 32 * i);
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      if (lane + 32 * i < blocks) all &= static_cast<bool>(is_there(found[i], lane + 32 * i));
  } while (!all);
#pragma unroll
  for (int i = 0; i < kValues; ++i)
    if (lane + 32 * i < blocks) add(found[i], i);
  __syncwarp();
}

}  // namespace fused_layernorm
