// Dropout's random numbers: one pure function of (seed, offset, row, col), the same in forward, in backward and in
// fused_layernorm/reference.py, on every device and for every way to spread rows over threads. No mask is stored.
#pragma once

#include <cstdint>

#include "norm_params.h"

namespace fused_layernorm {

// All inlined: norm_cpu.cpp compiles it for several instruction sets, of which the linker must not pick one for all.
#define FLN_ROUNDS_INLINE FLN_PHILOX_INLINE
#include "philox_rounds.inl"
#undef FLN_ROUNDS_INLINE

struct WordProduct {
  FLN_PHILOX_INLINE void operator()(uint32_t a, uint32_t b, uint32_t& high, uint32_t& low) const {
    uint64_t product;
#if defined(__CUDA_ARCH__)
    // The 32-bit instruction: for 64-bit operands nvcc also adds the product of the upper halves, which is 0
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
#else
    product = uint64_t{a} * b;
#endif
    high = static_cast<uint32_t>(product >> 32);
    low = static_cast<uint32_t>(product);
  }
};

FLN_PHILOX_INLINE uint64_t dropout_where(int64_t offset, int64_t row) {
  return static_cast<uint64_t>(offset) ^ (static_cast<uint64_t>(row) >> 32);
}

// The random numbers of columns 8 * octet to 8 * octet + 7 of a row: word k belongs to column k, and with exchanged
// halves to column k + 4. The two columns are decided by different bits, unless the upper half of a number equals that
// of the threshold: each has exactly its probability, and for p from 2^-16 on their correlation is below 2^-14.
struct DropoutOctet {
  PhiloxWords<uint32_t> words;

  // `where`: dropout_where(offset, row)
  FLN_PHILOX_INLINE DropoutOctet(int64_t seed, uint64_t where, uint32_t row, uint32_t octet)
      : words(philox_words(static_cast<uint64_t>(seed), octet, row, static_cast<uint32_t>(where),
                           static_cast<uint32_t>(where >> 32), WordProduct())) {}
  FLN_PHILOX_INLINE DropoutOctet(const Dropout& dropout, int64_t row, int64_t col)
      : DropoutOctet(dropout.philox[0], dropout_where(dropout.philox[1], row), static_cast<uint32_t>(row),
                     static_cast<uint32_t>(col / 8)) {}

  // The number of column k, 0 <= k < 4, or of column k + 4 (`behind`).
  FLN_PHILOX_INLINE uint32_t number(int k, bool behind) const {
    const uint32_t word = words.word[k];
    return behind ? word << 16 | word >> 16 : word;
  }
};

// An element is dropped where its number is at most this: p, above 0, in units of 2^-32, rounded down, but at least
// one.
FLN_PHILOX_INLINE uint32_t most_dropped(double p) {
  const uint64_t units = static_cast<uint64_t>(p * 4294967296.0);
  return static_cast<uint32_t>(units > 0 ? units - 1 : 0);
}

// The factor of kept elements. For p = 1 there are none.
FLN_PHILOX_INLINE double dropout_scale(double p) { return p < 1 ? 1 / (1 - p) : 0; }

}  // namespace fused_layernorm
