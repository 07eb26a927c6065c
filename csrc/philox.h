// Dropout's random numbers: one pure function of (seed, offset, row, col), the same in forward, in backward and in
// fused_layernorm/reference.py, on every device and for every way to spread rows over threads. No mask is stored.
#pragma once

#include <cstdint>

#include "norm_params.h"

namespace fused_layernorm {

// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, 2011). Always inlined: norm_cpu.cpp compiles it for several
// instruction sets, of which the linker must not pick one for all.
struct PhiloxWords {
  uint32_t word[4];
};

// By its own instruction: of 64-bit operands nvcc adds the product of the upper halves, 0, by one more.
FLN_PHILOX_INLINE uint64_t wide_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return uint64_t{a} * b;
#endif
}

FLN_PHILOX_INLINE PhiloxWords philox_words(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = wide_product(0xD2511F53, c0), product1 = wide_product(0xCD9E8D57, c2);
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c1 = static_cast<uint32_t>(product1);
    c3 = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}

FLN_PHILOX_INLINE uint64_t dropout_where(int64_t offset, int64_t row) {
  return static_cast<uint64_t>(offset) ^ (static_cast<uint64_t>(row) >> 32);
}

// The random numbers of columns 8 * octet to 8 * octet + 7 of a row: word k is that of the k-th, and with its halves
// exchanged that of the one 4 behind it. Which of two such elements is kept is decided by different bits, unless the
// upper half of a number is that of the threshold: each has exactly its probability, and for p from 2^-16 on their
// correlation is below 2^-14.
struct DropoutOctet {
  PhiloxWords words;

  // `where`: dropout_where(offset, row)
  FLN_PHILOX_INLINE DropoutOctet(int64_t seed, uint64_t where, uint32_t row, uint32_t octet)
      : words(philox_words(static_cast<uint64_t>(seed), octet, row, static_cast<uint32_t>(where),
                           static_cast<uint32_t>(where >> 32))) {}
  FLN_PHILOX_INLINE DropoutOctet(const Dropout& dropout, int64_t row, int64_t col)
      : DropoutOctet(dropout.philox[0], dropout_where(dropout.philox[1], row), static_cast<uint32_t>(row),
                     static_cast<uint32_t>(col / 8)) {}

  // Of the k-th column, 0 <= k < 4, or of the one 4 behind it.
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

// What kept elements are multiplied by. For p = 1 there are none.
FLN_PHILOX_INLINE double dropout_scale(double p) { return p < 1 ? 1 / (1 - p) : 0; }

}  // namespace fused_layernorm
