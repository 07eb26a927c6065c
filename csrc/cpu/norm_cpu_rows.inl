// The arithmetic of norm_cpu.cpp, which includes this file once per instruction set, each time with another FLN_ISA
// (a namespace) and FLN_VECTOR_BYTES (0: no vector types, one lane). Only functions of this namespace may be
// instantiated here: of a std:: or c10 template compiled for AVX, the linker could keep that copy for everybody.
// Vector types rather than loops over arrays: what is a vector then hangs on no optimizer's choice.
namespace FLN_ISA {

#if FLN_VECTOR_BYTES > 0
typedef float FloatVec __attribute__((vector_size(FLN_VECTOR_BYTES)));
typedef double DoubleVec __attribute__((vector_size(FLN_VECTOR_BYTES)));
typedef uint32_t Bits32 __attribute__((vector_size(FLN_VECTOR_BYTES)));
typedef uint16_t Bits16 __attribute__((vector_size(FLN_VECTOR_BYTES / 2)));
#define FLN_CONVERT(value, type) __builtin_convertvector(value, type)
#else
typedef float FloatVec;
typedef double DoubleVec;
typedef uint32_t Bits32;
typedef uint16_t Bits16;
#define FLN_CONVERT(value, type) static_cast<type>(value)
#endif

template <class acc_t>
using Vec = typename std::conditional<sizeof(acc_t) == sizeof(double), DoubleVec, FloatVec>::type;

template <class acc_t>
constexpr int kLanes = sizeof(Vec<acc_t>) / sizeof(acc_t);

// ---- load and store: storage types <-> vectors of the accumulation type ---------------------------------------------

template <class to_t, class from_t>
FLN_INLINE to_t bits_as(const from_t& from) {
  static_assert(sizeof(to_t) == sizeof(from_t), "same size");
  to_t to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

#if FLN_VECTOR_BYTES == 64
// The maskz forms with every lane set: the plain ones give warnings inside gcc's own header.
FLN_INLINE Bits32 widen_bits(Bits16 bits) { return (Bits32)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)bits); }
FLN_INLINE Bits16 narrow_bits(Bits32 bits) { return (Bits16)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)bits); }
FLN_INLINE FloatVec widen(Float16, Bits16 bits) { return (FloatVec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)bits); }
FLN_INLINE Bits16 narrow(Float16, FloatVec value) { return (Bits16)_mm512_maskz_cvtps_ph(0xffff, (__m512)value, 0); }
#elif FLN_VECTOR_BYTES == 32
FLN_INLINE Bits32 widen_bits(Bits16 bits) { return (Bits32)_mm256_cvtepu16_epi32((__m128i)bits); }
FLN_INLINE Bits16 narrow_bits(Bits32 bits) {
  return (Bits16)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)bits), _mm256_extracti128_si256((__m256i)bits, 1));
}
FLN_INLINE FloatVec widen(Float16, Bits16 bits) { return (FloatVec)_mm256_cvtph_ps((__m128i)bits); }
FLN_INLINE Bits16 narrow(Float16, FloatVec value) { return (Bits16)_mm256_cvtps_ph((__m256)value, 0); }
#else
FLN_INLINE Bits32 widen_bits(Bits16 bits) { return FLN_CONVERT(bits, Bits32); }
FLN_INLINE Bits16 narrow_bits(Bits32 bits) { return FLN_CONVERT(bits, Bits16); }

FLN_INLINE FloatVec widen(Float16, Bits16 half) {
  const Bits32 bits = widen_bits(half);
  const Bits32 magnitude = (bits & 0x7fffu) << 13;
  // The multiplication moves the exponent to fp32's bias and turns fp16's subnormals into normal numbers, exactly.
  const Bits32 finite = bits_as<Bits32>(bits_as<FloatVec>(magnitude) * 0x1p112f);
  return bits_as<FloatVec>((magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite) | ((bits & 0x8000u) << 16));
}

FLN_INLINE Bits16 narrow(Float16, FloatVec value) {
  const Bits32 sign = (bits_as<Bits32>(value) >> 16) & 0x8000u;
  const Bits32 magnitude = bits_as<Bits32>(value) & 0x7fffffffu;
  const Bits32 normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;  // ties to even
  // Below 2^-14 the addition rounds to a multiple of 2^-24, fp16's spacing there, and leaves the count in the low bits.
  const Bits32 subnormal = bits_as<Bits32>(bits_as<FloatVec>(magnitude) + 0.5f) - 0x3f000000u;
  const Bits32 finite = magnitude < 0x38800000u ? subnormal : normal;
  const Bits32 overflow = magnitude > 0x7f800000u ? magnitude * 0u + 0x7e00u : magnitude * 0u + 0x7c00u;
  return narrow_bits((magnitude >= 0x477ff000u ? overflow : finite) | sign);
}
#endif

FLN_INLINE FloatVec widen(BFloat16, Bits16 bits) { return bits_as<FloatVec>(widen_bits(bits) << 16); }

FLN_INLINE Bits16 narrow(BFloat16, FloatVec value) {
  const Bits32 bits = bits_as<Bits32>(value);
  const Bits32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  return narrow_bits(value != value ? (bits >> 16) | 0x40u : rounded);  // a NaN stays one
}

template <class acc_t, class from_t>
FLN_INLINE Vec<acc_t> load_vec(const from_t* from) {
  Vec<acc_t> value;
  if constexpr (sizeof(from_t) == sizeof(acc_t)) {
    memcpy(&value, from, sizeof(value));
  } else if constexpr (sizeof(from_t) == 2 && sizeof(acc_t) == 4) {
    Bits16 bits;
    memcpy(&bits, from, sizeof(bits));
    value = widen(from_t(), bits);
  } else {
    // fp64 beside another dtype: rare
    acc_t lanes[kLanes<acc_t>];
    if constexpr (sizeof(from_t) == 2) {
      from_t padded[kLanes<float>] = {};
      float widened[kLanes<float>];
      memcpy(padded, from, sizeof(from_t) * kLanes<acc_t>);
      const FloatVec all = load_vec<float>(padded);
      memcpy(widened, &all, sizeof(all));
      for (int k = 0; k < kLanes<acc_t>; ++k) lanes[k] = widened[k];
    } else {
      for (int k = 0; k < kLanes<acc_t>; ++k) lanes[k] = static_cast<acc_t>(from[k]);
    }
    memcpy(&value, lanes, sizeof(value));
  }
  return value;
}

template <class acc_t, class to_t>
FLN_INLINE void store_vec(to_t* to, Vec<acc_t> value) {
  if constexpr (sizeof(to_t) == sizeof(acc_t)) {
    memcpy(to, &value, sizeof(value));
  } else if constexpr (sizeof(to_t) == 2 && sizeof(acc_t) == 4) {
    const Bits16 bits = narrow(to_t(), value);
    memcpy(to, &bits, sizeof(bits));
  } else {  // fp64 to a narrower type, fp32 to fp64: rare
    acc_t lanes[kLanes<acc_t>];
    memcpy(lanes, &value, sizeof(value));
    if constexpr (sizeof(to_t) == 2) {
      float narrowed[kLanes<float>] = {};
      to_t stored[kLanes<float>];
      for (int k = 0; k < kLanes<acc_t>; ++k) narrowed[k] = static_cast<float>(lanes[k]);
      store_vec<float>(stored, load_vec<float>(narrowed));
      for (int k = 0; k < kLanes<acc_t>; ++k) to[k] = stored[k];
    } else {
      for (int k = 0; k < kLanes<acc_t>; ++k) to[k] = static_cast<to_t>(lanes[k]);
    }
  }
}

// The first `count` lanes by masked instructions, the others `fill` (769 columns fp32, AVX-512: 1.6 times as fast as by
// single elements). AVX2 has none for elements of 16 bits.
#if FLN_VECTOR_BYTES == 64
template <class from_t>
FLN_INLINE FloatVec load_first(const from_t* from, int count, float fill) {
  const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1);
  if constexpr (sizeof(from_t) == 4) {
    return (FloatVec)_mm512_mask_loadu_ps((__m512)(FloatVec{} + fill), mask, from);
  } else {
    const FloatVec value = widen(from_t(), (Bits16)_mm256_maskz_loadu_epi16(mask, from));
    return (FloatVec)_mm512_mask_mov_ps((__m512)(FloatVec{} + fill), mask, (__m512)value);
  }
}
template <class to_t>
FLN_INLINE void store_first(to_t* to, int count, FloatVec value) {
  const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1);
  if constexpr (sizeof(to_t) == 4) {
    _mm512_mask_storeu_ps(to, mask, (__m512)value);
  } else {
    _mm256_mask_storeu_epi16(to, mask, (__m256i)narrow(to_t(), value));
  }
}
#elif FLN_VECTOR_BYTES == 32
FLN_INLINE __m256i first_lanes(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
FLN_INLINE FloatVec load_first(const float* from, int count, float fill) {
  const __m256i mask = first_lanes(count);
  return (FloatVec)_mm256_blendv_ps(_mm256_set1_ps(fill), _mm256_maskload_ps(from, mask), (__m256)mask);
}
FLN_INLINE void store_first(float* to, int count, FloatVec value) {
  _mm256_maskstore_ps(to, first_lanes(count), (__m256)value);
}
#endif
template <class acc_t, class row_t>
constexpr bool kMasks = sizeof(acc_t) == 4 && (FLN_VECTOR_BYTES == 64   ? sizeof(row_t) <= 4
                                               : FLN_VECTOR_BYTES == 32 ? sizeof(row_t) == 4
                                                                        : false);

// The first `count` lanes of a vector: all of them but at a row's end, where the others read as `fill`, a value that
// adds nothing to the sum at hand.
template <class acc_t, class from_t>
FLN_INLINE Vec<acc_t> load(const from_t* from, int count, acc_t fill = 0) {
  if (count == kLanes<acc_t>) return load_vec<acc_t>(from);
#if FLN_VECTOR_BYTES >= 32
  if constexpr (kMasks<acc_t, from_t>) return load_first(from, count, fill);
#endif
  from_t padded[kLanes<acc_t>] = {};
  acc_t lanes[kLanes<acc_t>];
  for (int k = 0; k < count; ++k) padded[k] = from[k];
  Vec<acc_t> value = load_vec<acc_t>(padded);
  memcpy(lanes, &value, sizeof(value));
  for (int k = count; k < kLanes<acc_t>; ++k) lanes[k] = fill;
  memcpy(&value, lanes, sizeof(value));
  return value;
}

template <class acc_t, class to_t>
FLN_INLINE void store(to_t* to, int count, Vec<acc_t> value) {
  if (count == kLanes<acc_t>) return store_vec<acc_t>(to, value);
#if FLN_VECTOR_BYTES >= 32
  if constexpr (kMasks<acc_t, to_t>) return store_first(to, count, value);
#endif
  to_t stored[kLanes<acc_t>];
  store_vec<acc_t>(stored, value);
  for (int k = 0; k < count; ++k) to[k] = stored[k];
}

#include "activation_cpu.inl"

// ---- sweeps: every loop over columns --------------------------------------------------------------------------------

#if FLN_VECTOR_BYTES >= 32
// Lane k and lane k + half, until one is left: the order of LaneSum::total(), in registers.
FLN_INLINE float sum_of_lanes(FloatVec value) {
#if FLN_VECTOR_BYTES == 64
  const __m256 eight =
      _mm512_maskz_extractf32x8_ps(0xff, (__m512)value, 0) + _mm512_maskz_extractf32x8_ps(0xff, (__m512)value, 1);
#else
  const __m256 eight = (__m256)value;
#endif
  const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return _mm_cvtss_f32(two + _mm_shuffle_ps(two, two, 1));
}
#endif

// A sum over columns: independent accumulators hide the latency of additions, and keep the terms of each few.
template <class acc_t>
struct LaneSum {
  Vec<acc_t> slot[4] = {};

  FLN_INLINE double total() const {
    const Vec<acc_t> sum = (slot[0] + slot[1]) + (slot[2] + slot[3]);
#if FLN_VECTOR_BYTES >= 32
    if constexpr (sizeof(acc_t) == 4) return sum_of_lanes(sum);
#endif
    acc_t lanes[kLanes<acc_t>];
    memcpy(lanes, &sum, sizeof(sum));
    for (int half = kLanes<acc_t> / 2; half > 0; half /= 2)
      for (int k = 0; k < half; ++k) lanes[k] += lanes[k + half];
    return lanes[0];
  }
};

// Calls sweep.step(count, col, slot) for the `count` columns from `col` on, until [begin, end) is done.
template <class acc_t, class Sweep>
FLN_INLINE void sweep_columns(Sweep& sweep, int64_t begin, int64_t end) {
  constexpr int lanes = kLanes<acc_t>;
  int64_t col = begin;
  for (; col + 4 * lanes <= end; col += 4 * lanes) {
    sweep.step(lanes, col, 0);
    sweep.step(lanes, col + lanes, 1);
    sweep.step(lanes, col + 2 * lanes, 2);
    sweep.step(lanes, col + 3 * lanes, 3);
  }
  for (; col + lanes <= end; col += lanes) sweep.step(lanes, col, 0);
  if (col < end) sweep.step(static_cast<int>(end - col), col, 0);
}

// The same for a sweep that sums: totals in fp64 over blocks of columns, so that long rows lose no precision, nor small
// terms beside a few large ones: with 128 terms an accumulator, not 32, a row of 8191 with two outliers was off by 15
// units of fp32 (found by fuzzing).
struct Totals {
  double first = 0, second = 0;
};

template <class acc_t, class Sweep>
FLN_INLINE Totals sum_columns(const Sweep& start, int64_t hidden_size) {
  constexpr int64_t kBlock = 128 * kLanes<acc_t>;  // 32 terms an accumulator
  Totals totals;
  for (int64_t begin = 0; begin < hidden_size; begin += kBlock) {
    Sweep sweep = start;
    sweep_columns<acc_t>(sweep, begin, hidden_size - begin < kBlock ? hidden_size : begin + kBlock);
    sweep.fused(totals);
  }
  return totals;
}

// What x_hat needs of a row; the tail of the mean enters scaled, so that x_hat costs a subtraction and one fma.
template <class acc_t>
struct RowStats {
  acc_t mean, rstd, tail_rstd;

  FLN_INLINE Vec<acc_t> x_hat(Vec<acc_t> x) const { return (x - mean) * rstd - tail_rstd; }
};

// row_t: the storage type where all tensors of rows have the same, read as they lie; else the accumulation type, into
// which each row is widened first.
template <class row_t>
struct SumSweep {
  using acc_t = AccOf<row_t>;
  const row_t* x;
  LaneSum<acc_t> sum;

  FLN_INLINE void step(int count, int64_t col, int slot) { sum.slot[slot] += load<acc_t>(x + col, count); }
  FLN_INLINE void fused(Totals& totals) const { totals.first += sum.total(); }
};

template <class row_t>
struct MomentSweep {
  using acc_t = AccOf<row_t>;
  const row_t* x;
  const row_t* next;  // fetched meanwhile (4096 x 1024 fp32: 1.2 times as fast): this row lies in the cache already
  acc_t mean;
  LaneSum<acc_t> moment1, moment2;  // sum(x - mean), sum((x - mean)^2)

  FLN_INLINE void step(int count, int64_t col, int slot) {
    FLN_PREFETCH(next + col);
    const Vec<acc_t> centred = load<acc_t>(x + col, count, mean) - mean;
    moment1.slot[slot] += centred;
    moment2.slot[slot] += centred * centred;
  }
  FLN_INLINE void fused(Totals& totals) const {
    totals.first += moment1.total();
    totals.second += moment2.total();
  }
};

template <class row_t, class to_t>
struct NormalizeSweep {
  using acc_t = AccOf<row_t>;
  const row_t* x;
  const acc_t* weight;
  const acc_t* bias;
  RowStats<acc_t> stats;
  to_t* to;

  FLN_INLINE void step(int count, int64_t col, int) {
    const Vec<acc_t> x_hat = stats.x_hat(load<acc_t>(x + col, count));
    store<acc_t>(to + col, count, x_hat * load<acc_t>(weight + col, count) + load<acc_t>(bias + col, count));
  }
};

template <class row_t, class to_t>
struct XHatSweep {
  using acc_t = AccOf<row_t>;
  const row_t* x;
  RowStats<acc_t> stats;
  to_t* to;

  FLN_INLINE void step(int count, int64_t col, int) {
    store<acc_t>(to + col, count, stats.x_hat(load<acc_t>(x + col, count)));
  }
};

template <class from_t>
struct ScaleSweep {
  using acc_t = AccOf<from_t>;
  const from_t* from;
  const acc_t* scale;
  acc_t* to;

  FLN_INLINE void step(int count, int64_t col, int) {
    store<acc_t>(to + col, count, load<acc_t>(from + col, count) * load<acc_t>(scale + col, count));
  }
};

template <class row_t>
struct DotSweep {
  using acc_t = AccOf<row_t>;
  const row_t* grad;
  const row_t* z;
  const acc_t* weight;
  RowStats<acc_t> stats;
  LaneSum<acc_t> x_hat_wdy, wdy_only;

  FLN_INLINE void step(int count, int64_t col, int slot) {
    const Vec<acc_t> wdy = load<acc_t>(grad + col, count) * load<acc_t>(weight + col, count);
    x_hat_wdy.slot[slot] += stats.x_hat(load<acc_t>(z + col, count, stats.mean)) * wdy;
    wdy_only.slot[slot] += wdy;
  }
  FLN_INLINE void fused(Totals& totals) const {
    totals.first += x_hat_wdy.total();
    totals.second += wdy_only.total();
  }
};

template <class row_t, class to_t>
struct GradZSweep {
  using acc_t = AccOf<row_t>;
  const row_t* grad;
  const row_t* z;
  const acc_t* weight;
  const row_t* grad_residual_out;  // or null: 0
  RowStats<acc_t> stats;
  acc_t c1, c2, rstd;
  const row_t *next_grad, *next_z;
  to_t* to;

  FLN_INLINE void step(int count, int64_t col, int) {
    FLN_PREFETCH(next_grad + col);
    FLN_PREFETCH(next_z + col);
    const Vec<acc_t> wdy = load<acc_t>(grad + col, count) * load<acc_t>(weight + col, count);
    const Vec<acc_t> x_hat = stats.x_hat(load<acc_t>(z + col, count));
    Vec<acc_t> value = (wdy - x_hat * c1 - c2) * rstd;
    if (grad_residual_out) value += load<acc_t>(grad_residual_out + col, count);
    store<acc_t>(to + col, count, value);
  }
};

template <class row_t>
struct GradWeightSweep {
  using acc_t = AccOf<row_t>;
  const row_t* grad;
  const row_t* z;
  acc_t* partial;
  RowStats<acc_t> stats;

  FLN_INLINE void step(int count, int64_t col, int) {
    const Vec<acc_t> x_hat = stats.x_hat(load<acc_t>(z + col, count));
    store<acc_t>(partial + col, count, load<acc_t>(partial + col, count) + load<acc_t>(grad + col, count) * x_hat);
  }
};

template <class row_t>
struct AddSweep {
  using acc_t = AccOf<row_t>;
  const row_t* from;
  acc_t* to;

  FLN_INLINE void step(int count, int64_t col, int) {
    store<acc_t>(to + col, count, load<acc_t>(to + col, count) + load<acc_t>(from + col, count));
  }
};

// value * scale where the element is kept: there, scales holds dropout_scale, elsewhere 0. Chosen, not multiplied: what
// is dropped is 0 even where it was not finite.
template <class acc_t>
FLN_INLINE Vec<acc_t> dropped_out(Vec<acc_t> value, Vec<acc_t> scales) {
  return scales == acc_t(0) ? scales : value * scales;
}

template <class x_t, class row_t>
struct LoadStageSweep {
  using acc_t = AccOf<row_t>;
  const x_t* x;
  const row_t* residual;  // or null
  const acc_t* gate;      // or null: 1
  const acc_t* scales;    // or null: no dropout
  row_t* z;

  FLN_INLINE void step(int count, int64_t col, int) {
    Vec<acc_t> value = load<acc_t>(x + col, count);
    if (gate) value *= load<acc_t>(gate + col, count);
    if (scales) value = dropped_out<acc_t>(value, load<acc_t>(scales + col, count));
    if (residual) value += load<acc_t>(residual + col, count);
    store<acc_t>(z + col, count, value);
  }
};

template <class row_t>
struct LoadStageGradSweep {
  using acc_t = AccOf<row_t>;
  const row_t* x;       // with gate: forward's
  const acc_t* gate;    // or null: 1
  const acc_t* scales;  // or null: no dropout
  acc_t* gate_partial;  // or null
  acc_t* grad;          // of z; becomes that of x

  FLN_INLINE void step(int count, int64_t col, int) {
    Vec<acc_t> value = load<acc_t>(grad + col, count);
    if (scales) value = dropped_out<acc_t>(value, load<acc_t>(scales + col, count));
    if (gate_partial)
      store<acc_t>(gate_partial + col, count,
                   load<acc_t>(gate_partial + col, count) + value * load<acc_t>(x + col, count));
    if (gate) value *= load<acc_t>(gate + col, count);
    store<acc_t>(grad + col, count, value);
  }
};

template <Activation activation, class acc_t>
struct EpilogueSweep {
  const acc_t* scales;  // or null: no dropout
  acc_t* u;             // becomes y

  FLN_INLINE void step(int count, int64_t col, int) {
    Vec<acc_t> value = activated<activation, acc_t>(load<acc_t>(u + col, count));
    if (scales) value = dropped_out<acc_t>(value, load<acc_t>(scales + col, count));
    store<acc_t>(u + col, count, value);
  }
};

template <Activation activation, class acc_t>
struct EpilogueGradSweep {
  const acc_t* grad_output;
  const acc_t* z;
  const acc_t* weight;
  const acc_t* bias;
  const acc_t* scales;  // or null: no dropout
  RowStats<acc_t> stats;
  acc_t* grad;  // grad_u; may be grad_output

  FLN_INLINE void step(int count, int64_t col, int) {
    Vec<acc_t> value = load<acc_t>(grad_output + col, count);
    if constexpr (activation != Activation::kNone) {
      const Vec<acc_t> x_hat = stats.x_hat(load<acc_t>(z + col, count));
      value *= slope<activation, acc_t>(x_hat * load<acc_t>(weight + col, count) + load<acc_t>(bias + col, count));
    }
    if (scales) value = dropped_out<acc_t>(value, load<acc_t>(scales + col, count));
    store<acc_t>(grad + col, count, value);
  }
};

template <Activation activation, class acc_t>
struct GateSweep {
  const acc_t* from;
  const acc_t* gate;
  acc_t* to;  // may be from

  FLN_INLINE void step(int count, int64_t col, int) {
    const Vec<acc_t> factor = activated<activation, acc_t>(load<acc_t>(gate + col, count));
    store<acc_t>(to + col, count, load<acc_t>(from + col, count) * factor);
  }
};

template <Activation activation, class acc_t>
struct GateGradSweep {
  const acc_t* grad;  // of GateSweep's result
  const acc_t* from;
  const acc_t* gate;
  acc_t* grad_from;  // may be grad
  acc_t* grad_gate;  // or null; may be from

  FLN_INLINE void step(int count, int64_t col, int) {
    const Vec<acc_t> value = load<acc_t>(grad + col, count), t = load<acc_t>(gate + col, count);
    if (grad_gate)
      store<acc_t>(grad_gate + col, count, value * load<acc_t>(from + col, count) * slope<activation, acc_t>(t));
    store<acc_t>(grad_from + col, count, value * activated<activation, acc_t>(t));
  }
};

template <class acc_t>
struct RecoverSweep {
  const acc_t* y;
  const acc_t* weight;
  const acc_t* bias;
  acc_t* x_hat;  // may be y

  FLN_INLINE void step(int count, int64_t col, int) {
    store<acc_t>(x_hat + col, count,
                 (load<acc_t>(y + col, count) - load<acc_t>(bias + col, count)) / load<acc_t>(weight + col, count, 1));
  }
};

template <class acc_t, class to_t>
struct ChunkSumSweep {
  const acc_t* partial;  // [chunks, hidden_size]
  int64_t chunks, hidden_size;
  to_t* grad;
  bool accumulate;

  FLN_INLINE void step(int count, int64_t col, int) {
    Vec<acc_t> sum = load<acc_t>(partial + col, count);
    for (int64_t chunk = 1; chunk < chunks; ++chunk) sum += load<acc_t>(partial + chunk * hidden_size + col, count);
    if (accumulate) sum += load<acc_t>(grad + col, count);
    store<acc_t>(grad + col, count, sum);
  }
};

template <class acc_t, class from_t, class to_t>
struct ConvertSweep {
  const from_t* from;
  to_t* to;

  FLN_INLINE void step(int count, int64_t col, int) { store<acc_t>(to + col, count, load<acc_t>(from + col, count)); }
};

// ---- storage types at run time --------------------------------------------------------------------------------------

// Calls f with a value of the type.
template <class F>
FLN_INLINE void for_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16: return f(Float16());
    case DType::kBFloat16: return f(BFloat16());
    case DType::kFloat32: return f(float());
    default: return f(double());
  }
}

template <class T>
constexpr DType kDTypeOf = std::is_same<T, Float16>::value    ? DType::kFloat16
                           : std::is_same<T, BFloat16>::value ? DType::kBFloat16
                           : std::is_same<T, float>::value    ? DType::kFloat32
                                                              : DType::kFloat64;

// The elements that begin `elements` behind base; null stays null.
template <class T>
FLN_INLINE T* row_at(T* base, DType dtype, int64_t elements) {
  using Byte = typename std::conditional<std::is_const<T>::value, const char, char>::type;
  return base ? static_cast<Byte*>(base) + elements * dtype_bytes(dtype) : nullptr;
}

template <class acc_t>
FLN_INLINE acc_t* own_row(const ThreadMemory& memory, ThreadRow which) {
  return static_cast<acc_t*>(memory.row[which]);
}

// The row as row_t: itself if it is of that type, else widened into `memory` (row_t is then the accumulation type).
template <class row_t>
FLN_INLINE const row_t* widened(const void* row, DType dtype, int64_t n, row_t* memory) {
  if (dtype == kDTypeOf<row_t>) return static_cast<const row_t*>(row);
  if constexpr (sizeof(row_t) >= sizeof(float)) {
    for_dtype(dtype, [&](auto zero) FLN_INLINE_LAMBDA {
      using from_t = decltype(zero);
      ConvertSweep<row_t, from_t, row_t> sweep{static_cast<const from_t*>(row), memory};
      sweep_columns<row_t>(sweep, 0, n);
    });
  }
  return memory;
}

// A row of a result where it is of acc_t, else a thread's `own`, which round_to() then stores.
template <class acc_t>
FLN_INLINE acc_t* made_row(void* result, DType dtype, acc_t* own) {
  return result && dtype == kDTypeOf<acc_t> ? static_cast<acc_t*>(result) : own;
}

template <class acc_t>
FLN_INLINE void round_to(const acc_t* row, int64_t n, void* to, DType dtype) {
  if (to == row) return;
  for_dtype(dtype, [&](auto zero) FLN_INLINE_LAMBDA {
    using to_t = decltype(zero);
    ConvertSweep<acc_t, acc_t, to_t> sweep{row, static_cast<to_t*>(to)};
    sweep_columns<acc_t>(sweep, 0, n);
  });
}

template <class F>
FLN_INLINE void for_activation(Activation activation, F&& f) {
  using A = Activation;
  switch (activation) {
    case A::kRelu: return f(std::integral_constant<A, A::kRelu>());
    case A::kGelu: return f(std::integral_constant<A, A::kGelu>());
    case A::kGeluTanh: return f(std::integral_constant<A, A::kGeluTanh>());
    case A::kSilu: return f(std::integral_constant<A, A::kSilu>());
    default: return f(std::integral_constant<A, A::kNone>());
  }
}

// Apart, so that epilogues have no code for an activation of gates only.
template <class F>
FLN_INLINE void for_gate_activation(Activation activation, F&& f) {
  using A = Activation;
  if (activation == A::kSigmoid) return f(std::integral_constant<A, A::kSigmoid>());
  for_activation(activation, f);
}

// ---- dropout --------------------------------------------------------------------------------------------------------

// Dropout's numbers of kLanes<float> octets of columns at once, a lane each.
constexpr int kOctets = kLanes<float>;

#if FLN_VECTOR_BYTES > 0
typedef uint64_t Bits64 __attribute__((vector_size(FLN_VECTOR_BYTES)));

// Of the lower halves of each 64 bits.
FLN_INLINE Bits64 product_of_lower(Bits64 a, Bits64 b) {
#if FLN_VECTOR_BYTES == 64
  return (Bits64)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)b);
#elif FLN_VECTOR_BYTES == 32
  return (Bits64)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif FLN_X86_DISPATCH  // SSE2, which x86-64 always has
  return (Bits64)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// Lanes with even and odd numbers by turns (little-endian, as all that this is compiled for).
struct LaneProduct {
  FLN_INLINE void operator()(uint32_t a, Bits32 b, Bits32& high, Bits32& low) const {
    const Bits64 lower = Bits64{} + 0xffffffffu, factor = Bits64{} + a, lanes = bits_as<Bits64>(b);
    const Bits64 even = product_of_lower(lanes, factor), odd = product_of_lower(lanes >> 32, factor);
    low = bits_as<Bits32>((even & lower) | odd << 32);
    high = bits_as<Bits32>(even >> 32 | (odd & ~lower));
  }
};
#else
typedef WordProduct LaneProduct;
#endif

#define FLN_ROUNDS_INLINE FLN_INLINE
#include "philox_rounds.inl"
#undef FLN_ROUNDS_INLINE

// `value` where one of eight flags is set, else 0; as many as there is room for.
template <class T>
FLN_INLINE void write_flagged(uint32_t flags, T value, T* to, int64_t room) {
#if FLN_VECTOR_BYTES > 0
  if constexpr (sizeof(T) == 4) {
    if (room >= 8) {
      typedef uint32_t Eight __attribute__((vector_size(32)));
      const Eight set = (Eight{} + flags) & Eight{1, 2, 4, 8, 16, 32, 64, 128};
      const Eight chosen = set != 0 ? Eight{} + bits_as<uint32_t>(value) : Eight{};
      memcpy(to, &chosen, sizeof(chosen));
      return;
    }
  }
#endif
  for (int k = 0; k < 8 && k < room; ++k) to[k] = flags >> k & 1 ? value : T(0);
}

// For each column of a row, `value` where its element is kept, else 0.
template <class T>
FLN_INLINE void write_kept(const Dropout& dropout, int64_t row, int64_t n, T value, T* to) {
  const uint64_t where = dropout_where(dropout.philox[1], row);
  uint32_t first[kOctets];
  for (int lane = 0; lane < kOctets; ++lane) first[lane] = static_cast<uint32_t>(lane);
  Bits32 octet;
  memcpy(&octet, first, sizeof(octet));
  for (int64_t col = 0; col < n; col += 8 * kOctets, octet += kOctets) {
    const auto words = FLN_ISA::philox_words(
        static_cast<uint64_t>(dropout.philox[0]), octet, Bits32{} + static_cast<uint32_t>(row),
        Bits32{} + static_cast<uint32_t>(where), Bits32{} + static_cast<uint32_t>(where >> 32), LaneProduct());
    Bits32 flags = Bits32{};  // of a lane's columns, a bit each
    for (int k = 0; k < 8; ++k) {
      const Bits32 word = words.word[k % 4], number = k < 4 ? word : word << 16 | word >> 16;
      flags |= number > dropout.most_dropped ? Bits32{} + (1u << k) : Bits32{};
    }
    uint32_t flags_of[kOctets];
    memcpy(flags_of, &flags, sizeof(flags));
    for (int lane = 0; lane < kOctets && col + 8 * lane < n; ++lane)
      write_flagged(flags_of[lane], value, to + col + 8 * lane, n - col - 8 * lane);
  }
}

// dropout_scale where an element of the row is kept, else 0. Null without dropout.
template <class acc_t>
FLN_INLINE const acc_t* dropout_scales(const Dropout& dropout, int64_t row, int64_t n, void* memory) {
  if (!dropout.philox) return nullptr;
  write_kept(dropout, row, n, static_cast<acc_t>(dropout.scale), static_cast<acc_t*>(memory));
  return static_cast<const acc_t*>(memory);
}

// ---- rows -----------------------------------------------------------------------------------------------------------

// Makes a row of z, as it is stored; returns it as row_t.
template <class row_t>
const row_t* load_stage(const NormForwardParams& params, const ParameterRows& parameters, const ThreadMemory& memory,
                        int64_t row) {
  using acc_t = AccOf<row_t>;
  const int64_t n = params.hidden_size;
  void* const stored = row_at(params.residual_out, params.z_dtype, row * n);
  const bool is_stored_as_it_is = params.z_dtype == kDTypeOf<row_t>;
  row_t* const z = is_stored_as_it_is ? static_cast<row_t*>(stored) : own_row<row_t>(memory, kZ);
  const row_t* residual =
      params.residual ? widened(row_at(params.residual, params.residual_dtype, params.residual_strides.offset(row)),
                                params.residual_dtype, n, own_row<row_t>(memory, kResidual))
                      : nullptr;
  const acc_t* gate = params.gate ? static_cast<const acc_t*>(parameters.gate) : nullptr;
  const acc_t* scales =
      params.drops_x() ? dropout_scales<acc_t>(params.dropout, row, n, own_row<acc_t>(memory, kScales)) : nullptr;
  const void* x = row_at(params.x, params.x_dtype, params.x_strides.offset(row));
  const auto make_z = [&](auto zero) FLN_INLINE_LAMBDA {
    using x_t = decltype(zero);
    LoadStageSweep<x_t, row_t> sweep{static_cast<const x_t*>(x), residual, gate, scales, z};
    sweep_columns<acc_t>(sweep, 0, n);
  };
  if constexpr (std::is_same<row_t, float>::value) {  // x may be narrower
    for_dtype(params.x_dtype, make_z);
  } else {
    make_z(row_t());
  }
  if constexpr (std::is_same<row_t, acc_t>::value) {
    if (!is_stored_as_it_is) {
      round_to(z, n, stored, params.z_dtype);
      return widened(stored, params.z_dtype, n, z);
    }
  }
  return z;
}

// Of the row gate, not inlined: callers are several, dtypes and activations many.
template <class acc_t, class Params>
const acc_t* row_gate_of(const Params& params, const ThreadMemory& memory, int64_t row) {
  return widened(row_at(params.row_gate, params.row_gate_dtype, params.row_gate_strides.offset(row)),
                 params.row_gate_dtype, params.hidden_size, own_row<acc_t>(memory, kScales));
}

template <class acc_t>
void multiply_by_gate(Activation activation, const acc_t* from, const acc_t* gate, int64_t n, acc_t* to) {
  for_gate_activation(activation, [&](auto which) FLN_INLINE_LAMBDA {
    GateSweep<decltype(which)::value, acc_t> sweep{from, gate, to};
    sweep_columns<acc_t>(sweep, 0, n);
  });
}

// `own`: for the gate's gradient, before it is rounded.
template <class acc_t>
void gate_grads(const NormBackwardParams& params, int64_t row, const acc_t* grad, const acc_t* from, const acc_t* gate,
                acc_t* grad_from, acc_t* own) {
  const int64_t n = params.hidden_size;
  void* const result = row_at(params.grad_row_gate, params.row_gate_dtype, row * n);
  acc_t* const grad_gate = result ? made_row(result, params.row_gate_dtype, own) : nullptr;
  for_gate_activation(params.gate_activation, [&](auto which) FLN_INLINE_LAMBDA {
    GateGradSweep<decltype(which)::value, acc_t> sweep{grad, from, gate, grad_from, grad_gate};
    sweep_columns<acc_t>(sweep, 0, n);
  });
  if (grad_gate) round_to(grad_gate, n, result, params.row_gate_dtype);
}

// Where the weight of a row begins among those of interleaved segments, which lie side by side, as do their gradients.
FLN_INLINE int64_t interleaved_at(const NormStages& stages, int64_t row, int64_t n) {
  if (!stages.interleaves || stages.segments <= 1) return 0;
  return static_cast<uint32_t>(row) % static_cast<uint32_t>(stages.segments) * n;
}

// u with rounds_x_hat. `rounded`: memory for a row of z_dtype.
template <class row_t>
void normalize_rounded(const NormForwardParams& params, const row_t* z, const AccOf<row_t>* weight,
                       const RowStats<AccOf<row_t>>& stats, AccOf<row_t>* u, void* rounded) {
  using acc_t = AccOf<row_t>;
  const int64_t n = params.hidden_size;
  for_dtype(params.z_dtype, [&](auto zero) FLN_INLINE_LAMBDA {
    using z_t = decltype(zero);
    if constexpr (std::is_same<AccOf<z_t>, acc_t>::value) {
      z_t* const x_hat = static_cast<z_t*>(rounded);
      XHatSweep<row_t, z_t> normalize{z, stats, x_hat};
      sweep_columns<acc_t>(normalize, 0, n);
      ScaleSweep<z_t> scale{x_hat, weight, u};
      sweep_columns<acc_t>(scale, 0, n);
      if (params.weight_dtype != params.z_dtype) return;  // the product is wider
      round_to(u, n, rounded, params.z_dtype);
      widened(rounded, params.z_dtype, n, u);
    }
  });
}

template <class row_t>
void forward_rows(const NormForwardParams& params, const ParameterRows& parameters, const ThreadMemory& memory,
                  int64_t begin, int64_t end) {
  using acc_t = AccOf<row_t>;
  const int64_t n = params.hidden_size;
  const bool reads_x = !params.residual_out && params.x_dtype == kDTypeOf<row_t>;  // as it lies
  const bool gates_y = params.row_gate && params.gates_y;
  // Short rows take the epilogue together: its chain of instructions is as long as that of such a row
  const bool may_share = params.activation != Activation::kNone && !params.dropout.philox && !params.rounds_x_hat;
  const int64_t together = may_share && n < kBlockColumns ? kBlockColumns / n : 1;
  int64_t waiting = 0;  // rows whose u lie at first_u
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = interleaved_at(params, row, n);
    const acc_t* weight = static_cast<const acc_t*>(parameters.weight) + at;
    const acc_t* bias = static_cast<const acc_t*>(parameters.bias) + at;
    const row_t* z = params.residual_out ? load_stage<row_t>(params, parameters, memory, row)
                                         : widened(row_at(params.x, params.x_dtype, params.x_strides.offset(row)),
                                                   params.x_dtype, n, own_row<row_t>(memory, kZ));
    const row_t* next =
        reads_x && row + 1 < end ? static_cast<const row_t*>(params.x) + params.x_strides.offset(row + 1) : z;
    const acc_t* row_gate = params.row_gate ? row_gate_of<acc_t>(params, memory, row) : nullptr;
    if constexpr (std::is_same<row_t, acc_t>::value) {
      if (row_gate && !gates_y) {
        multiply_by_gate(params.gate_activation, z, row_gate, n, own_row<acc_t>(memory, kZ));
        z = own_row<acc_t>(memory, kZ);
      }
    }

    // The mean, rounded to acc_t, then the moments about it: the first one corrects that rounding.
    const double sum = params.is_rms_norm ? 0 : sum_columns<acc_t>(SumSweep<row_t>{z, {}}, n).first;
    const acc_t mean = static_cast<acc_t>(sum / n);
    const Totals moments = sum_columns<acc_t>(MomentSweep<row_t>{z, next, mean, {}, {}}, n);
    const double tail = params.is_rms_norm ? 0 : moments.first / n;
    const double var = moments.second / n - tail * tail;
    const double rstd = 1 / sqrt((var < 0 ? 0 : var) + params.eps);  // a NaN variance stays NaN
    const RowStats<acc_t> stats{mean, static_cast<acc_t>(rstd), static_cast<acc_t>(tail * rstd)};
    if (params.rstd) static_cast<acc_t*>(params.rstd)[row] = stats.rstd;
    if (params.mean) static_cast<acc_t*>(params.mean)[row] = mean;
    if (params.mean_tail) static_cast<acc_t*>(params.mean_tail)[row] = static_cast<acc_t>(tail);

    const auto normalize = [&](auto* to, int64_t begin, int64_t end) FLN_INLINE_LAMBDA {
      NormalizeSweep<row_t, typename std::remove_pointer<decltype(to)>::type> sweep{z, weight, bias, stats, to};
      sweep_columns<acc_t>(sweep, begin, end);
    };
    void* const y = row_at(params.y, params.y_dtype, row * n);
    if (!params.has_epilogue() && !gates_y && !params.adds_y && !params.rounds_x_hat) {
      for_dtype(params.y_dtype, [&](auto zero) FLN_INLINE_LAMBDA { normalize(static_cast<decltype(zero)*>(y), 0, n); });
      continue;
    }
    void* const first_y = row_at(params.y, params.y_dtype, (row - waiting) * n);
    acc_t* const first_u = made_row(first_y, params.y_dtype, own_row<acc_t>(memory, kU));
    acc_t* const u = first_u + waiting * n;
    ++waiting;
    if (gates_y) {
      normalize(u, 0, n);
      multiply_by_gate(params.gate_activation, u, row_gate, n, u);
    } else if (params.adds_y) {
      normalize(u, 0, n);
      AddSweep<acc_t> sweep{widened(row_at(params.residual, params.residual_dtype, params.residual_strides.offset(row)),
                                    params.residual_dtype, n, own_row<acc_t>(memory, kScales)),
                            u};
      sweep_columns<acc_t>(sweep, 0, n);
    } else {
      if (params.rounds_x_hat) normalize_rounded(params, z, weight, stats, u, memory.row[kGrad]);
      const acc_t* scales =
          params.drops_y ? dropout_scales<acc_t>(params.dropout, row, n, own_row<acc_t>(memory, kScales)) : nullptr;
      const auto finish = [&](int64_t begin, int64_t end) FLN_INLINE_LAMBDA {
        for_activation(params.activation, [&](auto activation) FLN_INLINE_LAMBDA {
          EpilogueSweep<decltype(activation)::value, acc_t> sweep{scales, first_u};
          sweep_columns<acc_t>(sweep, begin, end);
        });
      };
      if (together > 1) {
        normalize(u, 0, n);
        if (waiting < together && row + 1 < end) continue;
        finish(0, waiting * n);
      } else {
        for (int64_t begin = 0; begin < n; begin += kBlockColumns) {
          const int64_t end = n - begin < kBlockColumns ? n : begin + kBlockColumns;
          if (!params.rounds_x_hat) normalize(u, begin, end);
          finish(begin, end);
        }
      }
    }
    round_to(first_u, waiting * n, first_y, params.y_dtype);
    waiting = 0;
  }
}

// Partial sums (or null) are added to.
template <class row_t>
void backward_rows(const NormBackwardParams& params, const ParameterRows& parameters, const ThreadMemory& memory,
                   const PartialRows& partial, int64_t begin, int64_t end) {
  using acc_t = AccOf<row_t>;
  const int64_t n = params.hidden_size;
  const bool gates_y = params.row_gate && params.gates_y, gates_x = params.row_gate && !params.gates_y;
  const bool transforms = params.gate || params.drops_x() || gates_x;  // between the gradients of z and x
  const bool reads_z = params.wants_rows() || params.grad_weight || params.activation != Activation::kNone;
  const bool makes_grad_z =
      params.grad_input || params.grad_residual || params.grad_gate || (params.grad_row_gate && gates_x);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = interleaved_at(params, row, n);
    const acc_t* weight = static_cast<const acc_t*>(parameters.weight) + at;
    const acc_t* bias = static_cast<const acc_t*>(parameters.bias) + at;
    const auto rows_of = [&](const void* base, const RowStrides& strides, DType dtype,
                             ThreadRow which) FLN_INLINE_LAMBDA {
      return widened(row_at(base, dtype, strides.offset(row)), dtype, n, own_row<row_t>(memory, which));
    };
    const row_t* grad = rows_of(params.grad_output, params.grad_output_strides, params.grad_output_dtype, kGrad);
    const row_t* z = reads_z ? rows_of(params.z, params.z_strides, params.z_dtype, gates_x ? kResidual : kZ) : nullptr;
    const acc_t mean = params.mean ? static_cast<const acc_t*>(params.mean)[row] : 0;
    const acc_t tail = params.mean_tail ? static_cast<const acc_t*>(params.mean_tail)[row] : 0;
    const acc_t rstd = static_cast<const acc_t*>(params.rstd)[row];
    const RowStats<acc_t> stats{mean, params.z_is_y ? 1 : rstd, tail * rstd};  // of x_hat recovered from y: its own
    const row_t *x = nullptr, *row_gate = nullptr;
    if constexpr (std::is_same<row_t, acc_t>::value) {  // what is made on the way is of that type
      if (params.z_is_y && reads_z) {
        RecoverSweep<acc_t> sweep{z, weight, bias, own_row<acc_t>(memory, kZ)};
        sweep_columns<acc_t>(sweep, 0, n);
        z = own_row<acc_t>(memory, kZ);
      }
      if (params.has_epilogue()) {
        const acc_t* scales =
            params.drops_y ? dropout_scales<acc_t>(params.dropout, row, n, own_row<acc_t>(memory, kScales)) : nullptr;
        acc_t* const grad_u = own_row<acc_t>(memory, kGrad);
        for_activation(params.activation, [&](auto activation) FLN_INLINE_LAMBDA {
          EpilogueGradSweep<decltype(activation)::value, acc_t> sweep{grad, z, weight, bias, scales, stats, grad_u};
          sweep_columns<acc_t>(sweep, 0, n);
        });
        grad = grad_u;
      }
      if (params.row_gate) row_gate = row_gate_of<acc_t>(params, memory, row);
      if (gates_y) {
        acc_t *const u = own_row<acc_t>(memory, kU), *const grad_u = own_row<acc_t>(memory, kGrad);
        if (params.grad_row_gate) {
          NormalizeSweep<acc_t, acc_t> sweep{z, weight, bias, stats, u};
          sweep_columns<acc_t>(sweep, 0, n);
        }
        gate_grads(params, row, grad, u, row_gate, grad_u, u);
        grad = grad_u;
      } else if (gates_x && reads_z) {
        x = z;
        multiply_by_gate(params.gate_activation, x, row_gate, n, own_row<acc_t>(memory, kZ));
        z = own_row<acc_t>(memory, kZ);
      }
    }
    if (partial.bias) {
      AddSweep<row_t> sweep{grad, static_cast<acc_t*>(partial.bias) + at};
      sweep_columns<acc_t>(sweep, 0, n);
    }
    if (partial.weight) {
      GradWeightSweep<row_t> sweep{grad, z, static_cast<acc_t*>(partial.weight) + at, stats};
      sweep_columns<acc_t>(sweep, 0, n);
    }
    if (!makes_grad_z) continue;

    Totals dots;
    if (params.stats_grad) dots = sum_columns<acc_t>(DotSweep<row_t>{grad, z, weight, stats, {}, {}}, n);
    const acc_t c1 = static_cast<acc_t>(dots.first / n);
    const acc_t c2 = static_cast<acc_t>(params.is_rms_norm ? 0 : dots.second / n);
    const row_t* grad_residual_out = params.grad_residual_out
                                         ? rows_of(params.grad_residual_out, params.grad_residual_out_strides,
                                                   params.grad_residual_out_dtype, kResidual)
                                         : nullptr;
    const bool has_next = row + 1 < end;
    const row_t* next_grad =
        has_next && params.grad_output_dtype == kDTypeOf<row_t>
            ? static_cast<const row_t*>(params.grad_output) + params.grad_output_strides.offset(row + 1)
            : grad;
    const row_t* next_z = has_next && params.z_dtype == kDTypeOf<row_t>
                              ? static_cast<const row_t*>(params.z) + params.z_strides.offset(row + 1)
                              : z;
    const auto make_grad_z = [&](auto* to) FLN_INLINE_LAMBDA {
      GradZSweep<row_t, typename std::remove_pointer<decltype(to)>::type> sweep{
          grad, z, weight, grad_residual_out, stats, c1, c2, rstd, next_grad, next_z, to};
      sweep_columns<acc_t>(sweep, 0, n);
    };
    void* const grad_input = row_at(params.grad_input, params.x_dtype, row * n);
    if (!transforms && !params.grad_residual) {
      for_dtype(params.x_dtype,
                [&](auto zero) FLN_INLINE_LAMBDA { make_grad_z(static_cast<decltype(zero)*>(grad_input)); });
      continue;
    }
    void* const grad_residual = row_at(params.grad_residual, params.residual_dtype, row * n);
    const bool is_grad_residual = grad_residual && !transforms && params.residual_dtype == kDTypeOf<acc_t>;
    acc_t* const grad_z = is_grad_residual ? static_cast<acc_t*>(grad_residual)
                                           : made_row(grad_input, params.x_dtype, own_row<acc_t>(memory, kU));
    make_grad_z(grad_z);
    if (grad_residual && !is_grad_residual) round_to(grad_z, n, grad_residual, params.residual_dtype);
    if (gates_x) {
      if constexpr (std::is_same<row_t, acc_t>::value)
        gate_grads(params, row, grad_z, x, row_gate, grad_z, own_row<acc_t>(memory, kZ));
    } else if (transforms) {
      x = partial.gate ? rows_of(params.x, params.x_strides, params.x_dtype, kResidual) : nullptr;
      LoadStageGradSweep<row_t> sweep{
          x, params.gate ? static_cast<const acc_t*>(parameters.gate) : nullptr,
          params.drops_x() ? dropout_scales<acc_t>(params.dropout, row, n, own_row<acc_t>(memory, kScales)) : nullptr,
          static_cast<acc_t*>(partial.gate), grad_z};
      sweep_columns<acc_t>(sweep, 0, n);
    }
    if (grad_input) round_to(grad_z, n, grad_input, params.x_dtype);
  }
}

void keep_row(const Dropout& dropout, int64_t row, int64_t n, uint8_t* keep) {
  write_kept(dropout, row, n, uint8_t{1}, keep);
}

// The sum of chunks, or of them and what is in grad, for columns [begin, end).
template <class acc_t>
void sum_chunks(const void* partial, int64_t chunks, int64_t hidden_size, void* grad, DType dtype, bool accumulate,
                int64_t begin, int64_t end) {
  for_dtype(dtype, [&](auto zero) FLN_INLINE_LAMBDA {
    using to_t = decltype(zero);
    ChunkSumSweep<acc_t, to_t> sweep{static_cast<const acc_t*>(partial), chunks, hidden_size, static_cast<to_t*>(grad),
                                     accumulate};
    sweep_columns<acc_t>(sweep, begin, end);
  });
}

// to = from + offset, or offset alone where `from` is null.
template <class acc_t>
void make_parameter(const void* from, DType dtype, double offset, int64_t n, void* to) {
  acc_t* const row = static_cast<acc_t*>(to);
  if (from && dtype == kDTypeOf<acc_t>) memcpy(row, from, n * sizeof(acc_t));
  if (from) widened(from, dtype, n, row);
  if (from && offset == 0) return;  // adding 0 would lose the sign of -0
  for (int64_t col = 0; col < n; ++col) row[col] = (from ? row[col] : 0) + static_cast<acc_t>(offset);
}

const Kernels kernels = {{forward_rows<Float16>, forward_rows<BFloat16>, forward_rows<float>, forward_rows<double>},
                         {backward_rows<Float16>, backward_rows<BFloat16>, backward_rows<float>, backward_rows<double>},
                         keep_row,
                         {sum_chunks<float>, sum_chunks<double>},
                         {make_parameter<float>, make_parameter<double>}};

#undef FLN_CONVERT

}  // namespace FLN_ISA
#undef FLN_ISA
#undef FLN_VECTOR_BYTES
