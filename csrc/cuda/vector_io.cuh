// Loads and stores: by 16 bytes where the layout allows, else element by element. The only reinterpret_casts of the
// kernels.
//
// A row is cut into vectors of kVec elements, interleaved over the threads of the row: thread t of T holds vectors t, t
// + T, t + 2T, ... The assignment depends on kVec, T and the length of the row, never on the row's address, so the
// address does not change the bits of a result.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernel_params.h"

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

// kVec elements as they lie in memory, as the words they are loaded by: of 16 bytes, or one shorter word.
template <int kBytes>
struct WordOf {
  using type = uint4;
};
template <>
struct WordOf<2> {
  using type = unsigned short;
};
template <>
struct WordOf<4> {
  using type = unsigned;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <typename T, int kVec>
struct RawVec {
  static constexpr int kBytes = kVec * static_cast<int>(sizeof(T));
  using Word = typename WordOf<(kBytes < 16 ? kBytes : 16)>::type;
  static constexpr int kWords = kBytes / static_cast<int>(sizeof(Word));
  static_assert(kWords * static_cast<int>(sizeof(Word)) == kBytes, "a vector is whole words");
  Word words[kWords];
};

template <typename T, int kVec>
__device__ __forceinline__ RawVec<T, kVec> zero_vec() {
  RawVec<T, kVec> raw;
  memset(&raw, 0, sizeof(raw));
  return raw;
}

// A vector of the same value.
template <typename T, int kVec>
__device__ __forceinline__ RawVec<T, kVec> filled_vec(acc_type<T> value) {
  RawVec<T, kVec> raw;
  T elements[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) elements[i] = narrow<T>(value);
  memcpy(&raw, elements, sizeof(raw));
  return raw;
}
template <typename T, int kVec>
__device__ __forceinline__ RawVec<T, kVec> one_vec() {
  return filled_vec<T, kVec>(1);
}

// From memory that nobody writes while the kernel runs; kOrdered: that the kernel before may still have written when
// this one began (OverlappedLaunch).
template <bool kOrdered, typename T>
__device__ __forceinline__ T load(const T* source) {
  if constexpr (kOrdered) return *source;
  return __ldg(source);
}

// The same of a vector, aligned to its words.
template <typename T, int kVec, bool kOrdered = false>
__device__ __forceinline__ RawVec<T, kVec> load_vec(const T* source) {
  RawVec<T, kVec> raw;
#pragma unroll
  for (int word = 0; word < raw.kWords; ++word)
    raw.words[word] = load<kOrdered>(reinterpret_cast<const typename RawVec<T, kVec>::Word*>(source) + word);
  return raw;
}

// Whether element i is one of the first `count` of a vector. Vectors of one or two elements belong to ragged rows,
// which may end in a vector; others are whole, or not there at all.
template <int kVec>
__device__ __forceinline__ bool is_element(int i, int count) {
  return kVec > 2 ? count > 0 : i < count;
}

// The first `count` elements of a vector; the others are 0.
template <typename T, int kVec, bool kOrdered = false>
__device__ __forceinline__ RawVec<T, kVec> load_some(const T* source, int count) {
  if constexpr (kVec > 2) return count > 0 ? load_vec<T, kVec, kOrdered>(source) : zero_vec<T, kVec>();
  T elements[kVec] = {};
#pragma unroll
  for (int i = 0; i < kVec; ++i)
    if (i < count) elements[i] = load<kOrdered>(source + i);
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
    unsigned pairs[kVec / 2];
    memcpy(pairs, &raw, sizeof(raw));
#pragma unroll
    for (int pair = 0; pair < kVec / 2; ++pair) widen_pair<T>(pairs[pair], values[2 * pair], values[2 * pair + 1]);
  } else {
    T elements[kVec];
    memcpy(elements, &raw, sizeof(raw));
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = static_cast<acc_t>(widen(elements[i]));
  }
}

// Hides these vectors from the optimizer, so that it widens them again in the next pass instead of keeping the widened
// values of a whole row, which take twice the registers.
template <typename T, int kVecs, int kVec>
__device__ __forceinline__ void optimization_barrier(RawVec<T, kVec> (&raw)[kVecs]) {
  if constexpr (kVec > 1 && sizeof(T) == 2) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      unsigned pairs[kVec / 2];
      memcpy(pairs, &raw[v], sizeof(pairs));
#pragma unroll
      for (unsigned& pair : pairs) asm volatile("" : "+r"(pair));
      memcpy(&raw[v], pairs, sizeof(pairs));
    }
  }
}

template <typename T, int kVec, typename acc_t>
__device__ __forceinline__ RawVec<T, kVec> pack(const acc_t (&values)[kVec]) {
  T elements[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) elements[i] = narrow<T>(values[i]);
  RawVec<T, kVec> raw;
  memcpy(&raw, elements, sizeof(raw));
  return raw;
}
// To memory aligned to the vector's words. Streaming stores (.cs) gained nothing in backward and lost 0.02 of the copy
// in forward (H200, 256 MiB).
template <typename T, int kVec>
__device__ __forceinline__ void store_raw(T* target, const RawVec<T, kVec>& raw) {
#pragma unroll
  for (int word = 0; word < raw.kWords; ++word)
    reinterpret_cast<typename RawVec<T, kVec>::Word*>(target)[word] = raw.words[word];
}
template <typename T, int kVec, typename acc_t>
__device__ __forceinline__ void store_vec(T* target, const acc_t (&values)[kVec]) {
  store_raw(target, pack<T>(values));
}

// Its first `count` elements, as load_some() reads them.
template <typename T, int kVec, typename acc_t>
__device__ __forceinline__ void store_some(T* target, const acc_t (&values)[kVec], int count) {
  if constexpr (kVec > 2) {
    if (count > 0) store_vec(target, values);
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      if (i < count) target[i] = narrow<T>(values[i]);
  }
}

// All of them, to aligned memory, if `wanted`, as one predicated store: the branch that the compiler made of an if
// held up the warp for each vector (H200, backward in clusters, bf16: N = 8192 0.84 instead of 0.91 of the pass).
template <typename T, int kVec, typename acc_t>
__device__ __forceinline__ void store_vec_if(bool wanted, T* target, const acc_t (&values)[kVec]) {
  T elements[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) elements[i] = narrow<T>(values[i]);
  typename RawVec<T, kVec>::Word word;
  static_assert(sizeof(word) == sizeof(elements) && sizeof(word) >= 8, "one word a vector");
  memcpy(&word, elements, sizeof(word));
  if constexpr (sizeof(word) == 16) {
    asm volatile(
        "{\n.reg .pred wanted;\nsetp.ne.s32 wanted, %0, 0;\n"
        "@wanted st.global.v4.u32 [%1], {%2, %3, %4, %5};\n}\n" ::"r"(static_cast<int>(wanted)),
        "l"(target), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w));
  } else {
    asm volatile(
        "{\n.reg .pred wanted;\nsetp.ne.s32 wanted, %0, 0;\n@wanted st.global.v2.u32 [%1], {%2, %3};\n}\n" ::"r"(
            static_cast<int>(wanted)),
        "l"(target), "r"(word.x), "r"(word.y));
  }
}

// Whether the vector that begins `offset` elements of `bytes` bytes into a tensor is aligned for vector access.
template <int kVec>
__device__ __forceinline__ bool is_aligned(const void* tensor, int bytes, int64_t offset) {
  const unsigned at =
      static_cast<unsigned>(reinterpret_cast<uintptr_t>(tensor)) + static_cast<unsigned>(offset) * bytes;
  return at % min(kVec * bytes, 16) == 0;
}

// Loads the first `count` elements of a vector from a tensor whose dtype is a run-time value; the others are 0. Not by
// the read-only cache: the kernel may write the same elements later.
template <int kVec, typename acc_t>
__device__ __forceinline__ void load_vec_as(acc_t (&values)[kVec], const void* source, DType dtype, int64_t offset,
                                            int count) {
  const auto load = [&](const auto* typed) {
    using T = std::decay_t<decltype(*typed)>;
    RawVec<T, kVec> raw = zero_vec<T, kVec>();
    if (count >= kVec && is_aligned<kVec>(source, sizeof(T), offset)) {
#pragma unroll
      for (int word = 0; word < raw.kWords; ++word)
        raw.words[word] = reinterpret_cast<const typename RawVec<T, kVec>::Word*>(typed + offset)[word];
      return unpack(raw, values);
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = i < count ? static_cast<acc_t>(widen(typed[offset + i])) : acc_t(0);
  };
  if constexpr (std::is_same<acc_t, double>::value) {  // fp64 goes with nothing else
    load(static_cast<const double*>(source));
  } else if (dtype == DType::kFloat16) {
    load(static_cast<const __half*>(source));
  } else if (dtype == DType::kBFloat16) {
    load(static_cast<const __nv_bfloat16*>(source));
  } else {
    load(static_cast<const float*>(source));
  }
}

// Stores the first `count` elements of a vector to a tensor whose dtype is a run-time value; `offset` in elements.
// aligned: as store_vec requires; else element by element.
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

// The columns of the vectors that a thread keeps in its kVecs register slots: slot v has the v-th vector of its share.
//
// Ragged rows, whose last vector may be partial, fill their slots by groups: whole groups go to the first slots, and
// the group in which the row ends goes to the last slots, wherever it lies in the row. So the code for single elements
// exists once, not for each vector: otherwise the code of a row did not fit into the instruction cache (H200, a forward
// kernel of such rows, bf16, N = 4097: a quarter of the time in instruction fetch stalls).
// `lanes` threads share them: of a row, or of a warp and its slice of a row.
template <int vecs, int vec, int lanes, bool ragged>
struct RegisterSlots {
  static constexpr int kVecs = vecs;
  static constexpr int kGroup = kVecs % 4 == 0 ? 4 : kVecs % 3 == 0 ? 3 : kVecs != 5 ? kVecs : 1;
  static constexpr int kStep = lanes * vec;  // elements from one slot to the next
  static constexpr int kMain = ragged ? kVecs - kGroup : kVecs;
  static_assert(kVecs % kGroup == 0);

  int elements, left;  // of these threads' vectors; and from this thread's first vector on
  int last = 0;        // the first vector of the group that a ragged row ends in

  // For the first kVecs * kStep of `elements` elements, and a thread whose vectors begin `own` elements into each step.
  __device__ RegisterSlots(int elements, int own) : elements(elements), left(elements - own) {
    if (ragged) last = min(elements / (kGroup * kStep), kMain / kGroup) * kGroup;
  }

  __device__ int index(int v) const { return v < kMain ? v : last + v - kMain; }
  // Whether all threads have all vectors of the group that begins at slot `first`.
  __device__ bool whole(int first) const { return (first + kGroup) * kStep <= elements; }
  // The number of elements that this thread has from slot v on.
  __device__ int count(int v) const {
    if (ragged && v < kMain) return whole(v / kGroup * kGroup) ? vec : 0;
    return left - index(v) * kStep;
  }

  // The number of elements in the first `held` vectors of `count` threads, the first of which is thread `first`.
  __device__ int count_of(int held, int first, int count) const {
    const int full = min(max(elements, 0) / kStep, held);
    const int rest = full == held ? 0 : min(max(elements - full * kStep - first * vec, 0), count * vec);
    return full * count * vec + rest;
  }

  // Calls f(v, whole) for every slot that is filled in some thread; `whole` is true if all threads have whole vectors.
  // Decided once a group, by values that are uniform over these threads.
  template <typename F>
  __device__ __forceinline__ void for_each(F&& f) const {
#pragma unroll
    for (int first = 0; first < kMain; first += kGroup) {
      if (whole(first)) {
#pragma unroll
        for (int v = first; v < first + kGroup; ++v) f(v, std::true_type{});
      } else if (!ragged && first * kStep < elements) {
#pragma unroll
        for (int v = first; v < first + kGroup; ++v)
          if (v * kStep < elements) f(v, std::false_type{});
      }
    }
#pragma unroll
    for (int v = kMain; v < kVecs; ++v)
      if (index(v) * kStep < elements) f(v, std::false_type{});
  }
};

// The number of vectors that cover `elements` elements; the last may be partial.
template <int kVec>
__host__ __device__ constexpr int64_t vecs_of(int64_t elements) {
  return (elements + kVec - 1) / kVec;
}

}  // namespace fused_layernorm
