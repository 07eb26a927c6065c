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

// 16 of the 32 bytes of (low, high), from byte `from` on; `from`, 0 to 15, is the same for all lanes of a row.
__device__ __forceinline__ uint4 window(uint4 low, uint4 high, unsigned from) {
  const unsigned bits = from % 4 * 8;
  const auto shifted = [bits](unsigned a, unsigned b, unsigned c, unsigned d, unsigned e) {
    return make_uint4(__funnelshift_r(a, b, bits), __funnelshift_r(b, c, bits), __funnelshift_r(c, d, bits),
                      __funnelshift_r(d, e, bits));
  };
  switch (from / 4) {
    case 0: return shifted(low.x, low.y, low.z, low.w, high.x);
    case 1: return shifted(low.y, low.z, low.w, high.x, high.y);
    case 2: return shifted(low.z, low.w, high.x, high.y, high.z);
    default: return shifted(low.w, high.x, high.y, high.z, high.w);
  }
}

template <typename T, int kVec>
__device__ __forceinline__ void zero_from(RawVec<T, kVec>& raw, int count) {
  T elements[kVec];
  memcpy(elements, &raw, sizeof(raw));
#pragma unroll
  for (int i = 0; i < kVec; ++i)
    if (i >= count) memset(elements + i, 0, sizeof(T));
  memcpy(&raw, elements, sizeof(raw));
}

// The first `count` elements (1 to kVec) of a vector from memory aligned to its elements; the others are 0. Reads the
// aligned 16 bytes around them, of which some may not belong to the tensor: an aligned 16 bytes that holds one byte of
// an allocation holds no byte that would be forbidden to read.
template <typename T, int kVec>
__device__ __forceinline__ RawVec<T, kVec> load_vec_anywhere(const T* source, int count) {
  RawVec<T, kVec> raw;
  if constexpr (kVec == 1) {
    raw.element = __ldg(source);
  } else {
    const unsigned from = static_cast<unsigned>(reinterpret_cast<uintptr_t>(source) % 16);
    const uint4* aligned = reinterpret_cast<const uint4*>(reinterpret_cast<uintptr_t>(source) - from);
    const int end = static_cast<int>(from) + count * static_cast<int>(sizeof(T));
    uint4 high = __ldg(aligned);
#pragma unroll
    for (int word = 0; word < raw.kWords; ++word) {
      const uint4 low = high;
      if (16 * word + 16 < end) high = __ldg(aligned + word + 1);
      raw.words[word] = window(low, high, from);
    }
    if (count < kVec) zero_from(raw, count);
  }
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

// The same to 16-byte aligned memory if `wanted`, as one predicated store: the branch that the compiler made of an if
// held up the warp for each vector (H200, backward in clusters, bf16: N = 8192 0.84 instead of 0.91 of the pass).
template <typename T, int kVec, typename acc_t>
__device__ __forceinline__ void store_vec_if(bool wanted, T* target, const acc_t (&values)[kVec]) {
  static_assert(kVec * sizeof(T) == 16, "one word a vector");
  T elements[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) elements[i] = narrow<T>(values[i]);
  uint4 word;
  memcpy(&word, elements, 16);
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.s32 wanted, %0, 0;\n@wanted st.global.v4.u32 [%1], {%2, %3, %4, %5};\n}\n" ::"r"(
          static_cast<int>(wanted)),
      "l"(target), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w));
}

// A vector's first `count` elements to a tensor whose dtype is known at run time only; `offset` in elements. Aligned:
// as for store_vec; else element by element.
template <int kVec, typename acc_t>
__device__ __forceinline__ void store_vec_as(void* target, DType dtype, int64_t offset, const acc_t (&values)[kVec],
                                             int count, bool aligned) {
  const auto store = [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    if (aligned && count >= kVec) return store_vec(typed + offset, values);
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      if (i < count) typed[offset + i] = narrow<T>(values[i]);
  };
  switch (dtype) {
    case DType::kFloat16: return store(static_cast<__half*>(target));
    case DType::kBFloat16: return store(static_cast<__nv_bfloat16*>(target));
    case DType::kFloat32: return store(static_cast<float*>(target));
    case DType::kFloat64: return store(static_cast<double*>(target));
  }
}

// How many vectors hold `elements` elements, the last of them perhaps in part.
template <int kVec>
__host__ __device__ constexpr int64_t vecs_of(int64_t elements) {
  return (elements + kVec - 1) / kVec;
}

// A vector's first `count` elements (0 or less: none) to memory that is aligned to elements only, by all lanes of a
// row's warp together: lane l has the vector before lane l+1's. Each lane completes the aligned 16 bytes that its
// vector begins in with the end of its neighbour's; what no lane completes goes element by element.
template <typename T, int kVec, int kLanes, typename acc_t>
__device__ __forceinline__ void store_vec_anywhere(T* target, const acc_t (&values)[kVec], int count, unsigned lanes) {
  if constexpr (kVec == 1) {
    if (count > 0) *target = narrow<T>(values[0]);
  } else {
    static_assert(kVec * sizeof(T) == 16, "one word a vector");
    T elements[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) elements[i] = narrow<T>(values[i]);
    uint4 own, before;
    memcpy(&own, elements, 16);
    before.x = __shfl_up_sync(lanes, own.x, 1, kLanes);
    before.y = __shfl_up_sync(lanes, own.y, 1, kLanes);
    before.z = __shfl_up_sync(lanes, own.z, 1, kLanes);
    before.w = __shfl_up_sync(lanes, own.w, 1, kLanes);
    const unsigned past = static_cast<unsigned>(reinterpret_cast<uintptr_t>(target) % 16);
    const int head = kVec - static_cast<int>(past / sizeof(T));  // elements before the next 16 bytes
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const bool whole = count >= head && (past == 0 || lane > 0);
    const bool next_whole = __shfl_down_sync(lanes, whole, 1, kLanes) && lane < kLanes - 1;
    if (whole)
      *reinterpret_cast<uint4*>(reinterpret_cast<uintptr_t>(target) - past) =
          past == 0 ? own : window(before, own, 16 - past);
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      if (i < count && !(i < head ? whole : next_whole)) target[i] = elements[i];
  }
}

// A tile of a row: vectors v * kThreads + rank for v < kVecs of the `elements` elements from `tile` on; what lies
// beyond becomes 0. `aligned`: every vector begins at a multiple of 16 bytes and is whole.
template <typename T, int kThreads, int kVecs, int kVec>
__device__ __forceinline__ void load_tile(RawVec<T, kVec> (&raw)[kVecs], const T* tile, int elements, int rank,
                                          bool aligned) {
  const T* first = tile + rank * kVec;
  const int left = elements - rank * kVec;
  if (aligned) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v)
      raw[v] = v * kThreads * kVec < left ? load_vec<T, kVec>(first + v * kThreads * kVec) : zero_vec<T, kVec>();
  } else {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int here = left - v * kThreads * kVec;
      raw[v] =
          here > 0 ? load_vec_anywhere<T, kVec>(first + v * kThreads * kVec, min(here, kVec)) : zero_vec<T, kVec>();
    }
  }
}

__device__ __forceinline__ unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// By the shared address: of a pointer that went through a struct the compiler no longer knew that it is one to shared
// memory.
__device__ __forceinline__ uint4 load_shared(unsigned address) {
  return *static_cast<const uint4*>(__cvta_shared_to_generic(address));
}
__device__ __forceinline__ void store_shared(unsigned address, uint4 word) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(word.x), "r"(word.y), "r"(word.z),
               "r"(word.w)
               : "memory");
}

// Copies 16 bytes from global to shared memory while the thread goes on. Copies belong to the group that the thread
// commits next; wait_for_copies<n> returns when all but the thread's last n groups have landed.
__device__ __forceinline__ void copy_async(unsigned shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int groups>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

// Barriers in shared memory, by its 32-bit address. A barrier counts its uses in phases, each over after so many
// arrivals (and bytes, where some were announced); the wait names the parity of the phase it waits for.
__device__ __forceinline__ void init_barrier(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive_barrier(unsigned barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}\n" ::"r"(barrier) : "memory");
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

// The copy engine, and stores to other blocks of the cluster that count on a barrier there (sm_90 and later).
__device__ __forceinline__ void fence_barrier_init() {  // makes the init visible to both
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ __forceinline__ void expect_bytes(unsigned barrier, unsigned bytes) {  // and arrives
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}
// Addresses and sizes are multiples of 16 bytes.
__device__ __forceinline__ void copy_bulk(unsigned shared, const void* global, unsigned bytes, unsigned barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
#endif
}

// Whether rows of a tensor can be read by 16-byte accesses, or are elements to be read one by one (host side).
template <typename T, int kVec>
bool rows_are_aligned(const void* data, const RowStrides& strides) {
  return kVec == 1 || (reinterpret_cast<uintptr_t>(data) % 16 == 0 && strides.row_stride % kVec == 0 &&
                       strides.group_stride % kVec == 0);
}

}  // namespace fused_layernorm
