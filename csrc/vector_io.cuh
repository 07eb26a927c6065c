// Between memory and registers: 16-byte accesses where the layout allows, element by element where it does not.
// The only reinterpret_casts of the kernels.
//
// A row is cut into vectors of kVec elements, dealt to the threads of the row in turn: thread t of T holds vectors
// t, t + T, t + 2T, ... Which element sits where depends on kVec, T and nothing else, so a misaligned row, read
// element by element, gives the same bits as an aligned one.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "norm_params.h"

namespace fused_layernorm {

template <typename T>
struct Accumulation {
  using type = float;
};
template <>
struct Accumulation<double> {
  using type = double;
};
template <typename T>
using acc_type = typename Accumulation<T>::type;

__device__ __forceinline__ float widen(__half value) { return __half2float(value); }
__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ double widen(double value) { return value; }

template <typename T, typename acc_t>
__device__ __forceinline__ T narrow(acc_t value) {
  if constexpr (sizeof(T) == 2) {
    if constexpr (std::is_same<T, __half>::value)
      return __float2half_rn(static_cast<float>(value));
    else
      return __float2bfloat16_rn(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

template <typename T>
constexpr DType dtype_of = DType::kFloat32;
template <>
constexpr DType dtype_of<__half> = DType::kFloat16;
template <>
constexpr DType dtype_of<__nv_bfloat16> = DType::kBFloat16;
template <>
constexpr DType dtype_of<double> = DType::kFloat64;

// kVec elements as they lie in memory: whole 16-byte words, or one element.
template <typename T, int kVec>
struct RawVec {
  static constexpr int kWords = kVec * static_cast<int>(sizeof(T)) / 16;
  static_assert(kWords * 16 == kVec * static_cast<int>(sizeof(T)), "a vector is a multiple of 16 bytes");
  uint4 words[kWords];
};
template <typename T>
struct RawVec<T, 1> {
  T element;
};

template <typename T, int kVec>
__device__ __forceinline__ RawVec<T, kVec> zero_vec() {
  RawVec<T, kVec> raw;
  memset(&raw, 0, sizeof(raw));
  return raw;
}

// From 16-byte aligned memory (element-aligned for kVec = 1) that nobody writes while the kernel runs.
template <typename T, int kVec>
__device__ __forceinline__ RawVec<T, kVec> load_vec(const T* source) {
  RawVec<T, kVec> raw;
  if constexpr (kVec == 1) {
    raw.element = __ldg(source);
  } else {
#pragma unroll
    for (int word = 0; word < raw.kWords; ++word)
      raw.words[word] = __ldg(reinterpret_cast<const uint4*>(source) + word);
  }
  return raw;
}

template <typename T, int kVec>
__device__ __forceinline__ RawVec<T, kVec> load_vec_unaligned(const T* source) {
  T elements[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) elements[i] = __ldg(source + i);
  RawVec<T, kVec> raw;
  memcpy(&raw, elements, sizeof(raw));
  return raw;
}

// Two 16-bit elements from one word.
template <typename T>
__device__ __forceinline__ void widen_pair(unsigned word, float& low, float& high) {
  if constexpr (std::is_same<T, __nv_bfloat16>::value) {
    // A bf16 is the upper half of a float. Said this way it is one instruction an element; through the conversion
    // intrinsics every second element took two.
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000u);
  } else {
    asm("{\n.reg .f16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
        : "=f"(low), "=f"(high)
        : "r"(word));
  }
}

template <typename T, int kVec, typename acc_t>
__device__ __forceinline__ void unpack(const RawVec<T, kVec>& raw, acc_t (&values)[kVec]) {
  if constexpr (kVec > 1 && sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < kVec; i += 8) {
      const uint4 word = raw.words[i / 8];
      const unsigned pairs[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) widen_pair<T>(pairs[pair], values[i + 2 * pair], values[i + 2 * pair + 1]);
    }
  } else {
    T elements[kVec];
    memcpy(elements, &raw, sizeof(raw));
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = static_cast<acc_t>(widen(elements[i]));
  }
}

// Makes the compiler forget what it knows of these vectors, so that it widens them anew for the next pass instead of
// keeping the widened values of a whole row in registers, twice as many as the raw ones.
template <typename T, int kVecs, int kVec>
__device__ __forceinline__ void forget(RawVec<T, kVec> (&raw)[kVecs]) {
  if constexpr (kVec > 1 && sizeof(T) == 2) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v)
#pragma unroll
      for (uint4& word : raw[v].words) asm volatile("" : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w));
  }
}

// To memory aligned to the vector's size or 16 bytes, whichever is smaller. Streaming stores (.cs) gained nothing in
// backward and lost 0.02 of the copy in forward (H200, 256 MiB).
template <typename T, int kVec, typename acc_t>
__device__ __forceinline__ void store_vec(T* target, const acc_t (&values)[kVec]) {
  if constexpr (kVec == 1) {
    *target = narrow<T>(values[0]);
  } else {
    constexpr int kBytes = kVec * static_cast<int>(sizeof(T));
    T elements[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) elements[i] = narrow<T>(values[i]);
    if constexpr (kBytes == 8) {
      uint2 word;
      memcpy(&word, elements, 8);
      *reinterpret_cast<uint2*>(target) = word;
    } else {
#pragma unroll
      for (int word = 0; word < kBytes / 16; ++word) {
        uint4 bits;
        memcpy(&bits, elements + word * (16 / sizeof(T)), 16);
        reinterpret_cast<uint4*>(target)[word] = bits;
      }
    }
  }
}

// The same to a tensor whose dtype is known at run time only; `offset` in elements.
template <int kVec, typename acc_t>
__device__ __forceinline__ void store_vec_as(void* target, DType dtype, int64_t offset, const acc_t (&values)[kVec]) {
  switch (dtype) {
    case DType::kFloat16: return store_vec(static_cast<__half*>(target) + offset, values);
    case DType::kBFloat16: return store_vec(static_cast<__nv_bfloat16*>(target) + offset, values);
    case DType::kFloat32: return store_vec(static_cast<float*>(target) + offset, values);
    case DType::kFloat64: return store_vec(static_cast<double*>(target) + offset, values);
  }
}

// One tile of a row: vectors first_vec + v * kThreads + rank for v < kVecs; those from vec_count on become 0.
template <typename T, int kThreads, int kVecs, int kVec>
__device__ __forceinline__ void load_tile(RawVec<T, kVec> (&raw)[kVecs], const T* row, int first_vec, int vec_count,
                                          int rank, bool aligned) {
  const T* first = row + static_cast<int64_t>(first_vec + rank) * kVec;
  const int left = vec_count - first_vec - rank;
  if (aligned || kVec == 1) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v)
      raw[v] = v * kThreads < left ? load_vec<T, kVec>(first + v * kThreads * kVec) : zero_vec<T, kVec>();
  } else {
#pragma unroll 1
    for (int v = 0; v < kVecs; ++v) {
      // A rolled loop over a register array would send it to local memory, so each turn moves the array along.
#pragma unroll
      for (int later = 0; later + 1 < kVecs; ++later) raw[later] = raw[later + 1];
      raw[kVecs - 1] =
          v * kThreads < left ? load_vec_unaligned<T, kVec>(first + v * kThreads * kVec) : zero_vec<T, kVec>();
    }
  }
}

__device__ __forceinline__ unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// Copies 16 bytes from global to shared memory while the thread goes on. Copies belong to the group that the thread
// commits next; wait_for_copies<n> returns when all but the thread's last n groups have landed.
__device__ __forceinline__ void copy_async(uint4* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int groups>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

#if __CUDA_ARCH__ >= 900
// The same for a whole row at once, by the copy engine (sm_90 and later): one thread asks, and whoever waits on the
// barrier sees the bytes. Shared memory goes by its 32-bit address. Addresses and sizes are multiples of 16 bytes. A
// barrier counts its uses in phases: the wait names the parity of the one it waits for.
__device__ __forceinline__ void init_barrier(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void fence_barrier_init() {  // makes the init visible to the copy engine
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void expect_bytes(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_bulk(unsigned shared, const void* global, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void wait_barrier(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred arrived;\n"
      "again%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 arrived, [%0], %1;\n"
      "@!arrived bra again%=;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
#endif

// Whether rows of a tensor can be read by 16-byte accesses (host side).
template <typename T, int kVec>
bool rows_are_aligned(const void* data, const RowStrides& strides) {
  return kVec > 1 && reinterpret_cast<uintptr_t>(data) % 16 == 0 && strides.row_stride % kVec == 0 &&
         strides.group_stride % kVec == 0;
}

}  // namespace fused_layernorm
