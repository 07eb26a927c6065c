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

FLN_PHILOX_INLINE PhiloxWords philox_words(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * c0, product1 = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c1 = static_cast<uint32_t>(product1);
    c3 = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}

// The words of columns 4 * quad to 4 * quad + 3 of a row. An element is kept where its word >= dropout_threshold(p).
FLN_PHILOX_INLINE PhiloxWords dropout_words(int64_t seed, int64_t offset, int64_t row, uint32_t quad) {
  const uint64_t where = static_cast<uint64_t>(offset) ^ (static_cast<uint64_t>(row) >> 32);
  return philox_words(static_cast<uint64_t>(seed), quad, static_cast<uint32_t>(row), static_cast<uint32_t>(where),
                      static_cast<uint32_t>(where >> 32));
}

// p in units of 2^-32, rounded down; 2^32 for p = 1, which no word reaches.
FLN_PHILOX_INLINE uint64_t dropout_threshold(double p) { return static_cast<uint64_t>(p * 4294967296.0); }

// What kept elements are multiplied by. For p = 1 there are none.
FLN_PHILOX_INLINE double dropout_scale(double p) { return p < 1 ? 1 / (1 - p) : 0; }

}  // namespace fused_layernorm
