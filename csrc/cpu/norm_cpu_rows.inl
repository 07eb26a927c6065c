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

// The first `count` lanes of a vector: all of them but at a row's end, where the others read as `fill`, a value that
// adds nothing to the sum at hand.
template <class acc_t, class from_t>
FLN_INLINE Vec<acc_t> load(const from_t* from, int count, acc_t fill = 0) {
  if (count == kLanes<acc_t>) return load_vec<acc_t>(from);
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
  to_t stored[kLanes<acc_t>];
  store_vec<acc_t>(stored, value);
  for (int k = 0; k < count; ++k) to[k] = stored[k];
}

#include "activation_cpu.inl"

// ---- sweeps: every loop over columns --------------------------------------------------------------------------------

// A sum over columns: independent accumulators hide the latency of additions, and keep the terms of each few.
template <class acc_t>
struct LaneSum {
  Vec<acc_t> slot[4] = {};

  FLN_INLINE double total() const {
    const Vec<acc_t> sum = (slot[0] + slot[1]) + (slot[2] + slot[3]);
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

template <class acc_t, class x_t>
struct SumSweep {
  const x_t* x;
  LaneSum<acc_t> sum;

  FLN_INLINE void step(int count, int64_t col, int slot) { sum.slot[slot] += load<acc_t>(x + col, count); }
  FLN_INLINE void fused(Totals& totals) const { totals.first += sum.total(); }
};

template <class acc_t, class x_t>
struct MomentSweep {
  const x_t* x;
  const x_t* next_x;  // fetched meanwhile (4096 x 1024 fp32: 1.2 times as fast): this row lies in the cache already
  acc_t mean;
  LaneSum<acc_t> moment1, moment2;  // sum(x - mean), sum((x - mean)^2)

  FLN_INLINE void fused(Totals& totals) const {
    totals.first += moment1.total();
    totals.second += moment2.total();
  }

  FLN_INLINE void step(int count, int64_t col, int slot) {
    FLN_PREFETCH(next_x + col);
    const Vec<acc_t> centred = load<acc_t>(x + col, count, mean) - mean;
    moment1.slot[slot] += centred;
    moment2.slot[slot] += centred * centred;
  }
};

template <class acc_t, class x_t, class y_t>
struct NormalizeSweep {
  const x_t* x;
  const acc_t* weight;
  const acc_t* bias;
  y_t* y;
  RowStats<acc_t> stats;

  FLN_INLINE void step(int count, int64_t col, int) {
    const Vec<acc_t> x_hat = stats.x_hat(load<acc_t>(x + col, count));
    store<acc_t>(y + col, count, x_hat * load<acc_t>(weight + col, count) + load<acc_t>(bias + col, count));
  }
};

template <class acc_t, class x_t, class grad_t>
struct DotSweep {
  const grad_t* grad_output;
  const x_t* x;
  const acc_t* weight;
  RowStats<acc_t> stats;
  LaneSum<acc_t> x_hat_wdy, wdy_only;

  FLN_INLINE void fused(Totals& totals) const {
    totals.first += x_hat_wdy.total();
    totals.second += wdy_only.total();
  }

  FLN_INLINE void step(int count, int64_t col, int slot) {
    const Vec<acc_t> wdy = load<acc_t>(grad_output + col, count) * load<acc_t>(weight + col, count);
    x_hat_wdy.slot[slot] += stats.x_hat(load<acc_t>(x + col, count, stats.mean)) * wdy;
    wdy_only.slot[slot] += wdy;
  }
};

template <class acc_t, class x_t, class grad_t, class to_t>
struct GradInputSweep {
  const grad_t* grad_output;
  const x_t* x;
  const acc_t* weight;
  to_t* grad_input;
  RowStats<acc_t> stats;
  const grad_t* next_grad_output;
  const x_t* next_x;
  acc_t c1, c2, rstd;

  FLN_INLINE void step(int count, int64_t col, int) {
    FLN_PREFETCH(next_grad_output + col);
    FLN_PREFETCH(next_x + col);
    const Vec<acc_t> wdy = load<acc_t>(grad_output + col, count) * load<acc_t>(weight + col, count);
    const Vec<acc_t> x_hat = stats.x_hat(load<acc_t>(x + col, count));
    store<acc_t>(grad_input + col, count, (wdy - x_hat * c1 - c2) * rstd);
  }
};

template <class acc_t, class x_t, class grad_t>
struct GradWeightSweep {
  const grad_t* grad_output;
  const x_t* x;
  acc_t* partial;
  RowStats<acc_t> stats;

  FLN_INLINE void step(int count, int64_t col, int) {
    const Vec<acc_t> x_hat = stats.x_hat(load<acc_t>(x + col, count));
    store<acc_t>(partial + col, count,
                 load<acc_t>(partial + col, count) + load<acc_t>(grad_output + col, count) * x_hat);
  }
};

template <class acc_t, class grad_t>
struct GradBiasSweep {
  const grad_t* grad_output;
  acc_t* partial;

  FLN_INLINE void step(int count, int64_t col, int) {
    store<acc_t>(partial + col, count, load<acc_t>(partial + col, count) + load<acc_t>(grad_output + col, count));
  }
};

// value * scale where the element is kept: there, scales holds dropout_scale, elsewhere 0. Chosen, not multiplied: what
// is dropped is 0 even where it was not finite.
template <class acc_t>
FLN_INLINE Vec<acc_t> dropped_out(Vec<acc_t> value, Vec<acc_t> scales) {
  return scales == acc_t(0) ? scales : value * scales;
}

template <class acc_t, class x_t, class residual_t, class z_t>
struct LoadStageSweep {
  const x_t* x;
  const residual_t* residual;  // or null
  const acc_t* gate;           // or null: 1
  const acc_t* scales;         // or null: no dropout
  z_t* z;

  FLN_INLINE void step(int count, int64_t col, int) {
    Vec<acc_t> value = load<acc_t>(x + col, count);
    if (gate) value *= load<acc_t>(gate + col, count);
    if (scales) value = dropped_out<acc_t>(value, load<acc_t>(scales + col, count));
    if (residual) value += load<acc_t>(residual + col, count);
    store<acc_t>(z + col, count, value);
  }
};

template <class acc_t, class x_t, class residual_t, class z_t>
struct LoadStageGradSweep {
  const acc_t* grad_norm;        // the gradient of z without that of residual_out
  const z_t* grad_residual_out;  // or null
  const acc_t* gate;             // or null: 1
  const x_t* x;                  // with gate: forward's
  const acc_t* scales;           // or null: no dropout
  acc_t* gate_partial;           // or null
  residual_t* grad_residual;     // or null
  x_t* grad_input;               // or null

  FLN_INLINE void step(int count, int64_t col, int) {
    Vec<acc_t> value = load<acc_t>(grad_norm + col, count);
    if (grad_residual_out) value += load<acc_t>(grad_residual_out + col, count);
    if (grad_residual) store<acc_t>(grad_residual + col, count, value);
    if (scales) value = dropped_out<acc_t>(value, load<acc_t>(scales + col, count));
    if (gate_partial)
      store<acc_t>(gate_partial + col, count,
                   load<acc_t>(gate_partial + col, count) + value * load<acc_t>(x + col, count));
    if (gate) value *= load<acc_t>(gate + col, count);
    if (grad_input) store<acc_t>(grad_input + col, count, value);
  }
};

template <Activation activation, class acc_t, class y_t>
struct EpilogueSweep {
  const acc_t* norm;
  const acc_t* scales;  // or null: no dropout
  y_t* y;

  FLN_INLINE void step(int count, int64_t col, int) {
    Vec<acc_t> value = activated<activation, acc_t>(load<acc_t>(norm + col, count));
    if (scales) value = dropped_out<acc_t>(value, load<acc_t>(scales + col, count));
    store<acc_t>(y + col, count, value);
  }
};

template <Activation activation, class acc_t, class z_t>
struct EpilogueGradSweep {
  const acc_t* grad_output;
  const z_t* z;
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

template <class acc_t, class y_t>
struct RecoverSweep {
  const y_t* y;
  const acc_t* weight;
  const acc_t* bias;
  acc_t* x_hat;

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
    if constexpr (std::is_same<to_t, float>::value) {  // else it is not asked for
      if (accumulate) sum += load<acc_t>(grad + col, count);
    }
    store<acc_t>(grad + col, count, sum);
  }
};

template <class acc_t, class from_t>
struct WidenSweep {
  const from_t* from;
  acc_t offset;
  acc_t* to;

  FLN_INLINE void step(int count, int64_t col, int) {
    store<acc_t>(to + col, count, load<acc_t>(from + col, count) + offset);
  }
};

// ---- rows -----------------------------------------------------------------------------------------------------------

template <class x_t>
FLN_INLINE const x_t* row_at(const void* base, const RowStrides& strides, int64_t row) {
  return static_cast<const x_t*>(base) + strides.offset(row);
}

// The norm goes to rows of params.y, or, where `y_row` is given, there, row after row.
template <class x_t, class y_t>
void forward_rows(const NormForwardParams& params, const void* weight, const void* bias, int64_t begin, int64_t end,
                  void* y_row) {
  using acc_t = AccOf<x_t>;
  const int64_t n = params.hidden_size;
  for (int64_t row = begin; row < end; ++row) {
    const x_t* x = row_at<x_t>(params.x, params.x_strides, row);

    const x_t* next_x = row + 1 < end ? row_at<x_t>(params.x, params.x_strides, row + 1) : x;

    // The mean, rounded to acc_t, then the moments about it: the first one corrects that rounding.
    const double sum = params.is_rms_norm ? 0 : sum_columns<acc_t>(SumSweep<acc_t, x_t>{x, {}}, n).first;
    const acc_t mean = static_cast<acc_t>(sum / n);
    const Totals moments = sum_columns<acc_t>(MomentSweep<acc_t, x_t>{x, next_x, mean, {}, {}}, n);
    const double tail = params.is_rms_norm ? 0 : moments.first / n;
    const double var = moments.second / n - tail * tail;
    const double rstd = 1 / sqrt((var < 0 ? 0 : var) + params.eps);  // a NaN variance stays NaN

    const RowStats<acc_t> stats{mean, static_cast<acc_t>(rstd), static_cast<acc_t>(tail * rstd)};
    if (params.rstd) static_cast<acc_t*>(params.rstd)[row] = stats.rstd;
    if (params.mean) static_cast<acc_t*>(params.mean)[row] = mean;
    if (params.mean_tail) static_cast<acc_t*>(params.mean_tail)[row] = static_cast<acc_t>(tail);

    NormalizeSweep<acc_t, x_t, y_t> normalize{x, static_cast<const acc_t*>(weight), static_cast<const acc_t*>(bias),
                                              static_cast<y_t*>(y_row ? y_row : params.y) + (y_row ? 0 : row * n),
                                              stats};
    sweep_columns<acc_t>(normalize, 0, n);
  }
}

// The gradients of z go to rows of params.grad_input, or, where `grad_row` is given, there, row after row.
template <class z_t, class grad_t, class to_t>
void backward_rows(const NormBackwardParams& params, const void* weight, void* grad_weight_partial,
                   void* grad_bias_partial, int64_t begin, int64_t end, void* grad_row) {
  using acc_t = AccOf<z_t>;
  const int64_t n = params.hidden_size;
  const acc_t* weight_row = static_cast<const acc_t*>(weight);
  for (int64_t row = begin; row < end; ++row) {
    const grad_t* grad_output = row_at<grad_t>(params.grad_output, params.grad_output_strides, row);
    if (grad_bias_partial) {
      GradBiasSweep<acc_t, grad_t> sweep{grad_output, static_cast<acc_t*>(grad_bias_partial)};
      sweep_columns<acc_t>(sweep, 0, n);
    }
    to_t* grad_input = grad_row            ? static_cast<to_t*>(grad_row)
                       : params.grad_input ? static_cast<to_t*>(params.grad_input) + row * n
                                           : nullptr;
    if (!grad_input && !grad_weight_partial) continue;  // grad_bias alone reads neither x nor its statistics

    const z_t* x = row_at<z_t>(params.z, params.z_strides, row);
    const acc_t mean = params.mean ? static_cast<const acc_t*>(params.mean)[row] : 0;
    const acc_t tail = params.mean_tail ? static_cast<const acc_t*>(params.mean_tail)[row] : 0;
    const acc_t rstd = static_cast<const acc_t*>(params.rstd)[row];
    const RowStats<acc_t> stats{mean, params.z_is_y ? 1 : rstd, tail * rstd};  // of x_hat recovered from y: its own
    if (grad_weight_partial) {
      GradWeightSweep<acc_t, z_t, grad_t> sweep{grad_output, x, static_cast<acc_t*>(grad_weight_partial), stats};
      sweep_columns<acc_t>(sweep, 0, n);
    }
    if (grad_input) {
      Totals dots;
      if (params.stats_grad)
        dots = sum_columns<acc_t>(DotSweep<acc_t, z_t, grad_t>{grad_output, x, weight_row, stats, {}, {}}, n);
      const acc_t c1 = static_cast<acc_t>(dots.first / n);
      const acc_t c2 = static_cast<acc_t>(params.is_rms_norm ? 0 : dots.second / n);
      const int64_t next = row + 1 < end ? row + 1 : row;
      GradInputSweep<acc_t, z_t, grad_t, to_t> sweep{
          grad_output,
          x,
          weight_row,
          grad_input,
          stats,
          row_at<grad_t>(params.grad_output, params.grad_output_strides, next),
          row_at<z_t>(params.z, params.z_strides, next),
          c1,
          c2,
          rstd};
      sweep_columns<acc_t>(sweep, 0, n);
    }
  }
}

template <class acc_t>
FLN_INLINE RowStats<acc_t> stats_of(const NormBackwardParams& params, int64_t row) {
  const acc_t mean = params.mean ? static_cast<const acc_t*>(params.mean)[row] : 0;
  const acc_t tail = params.mean_tail ? static_cast<const acc_t*>(params.mean_tail)[row] : 0;
  const acc_t rstd = static_cast<const acc_t*>(params.rstd)[row];
  return {mean, rstd, tail * rstd};
}

// ---- the load stage -------------------------------------------------------------------------------------------------

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

// Makes one row of z.
template <class x_t, class residual_t, class z_t>
void load_stage_row(const NormForwardParams& params, const void* gate, int64_t row, void* scales_memory) {
  using acc_t = AccOf<x_t>;
  const int64_t n = params.hidden_size;
  LoadStageSweep<acc_t, x_t, residual_t, z_t> sweep{
      row_at<x_t>(params.x, params.x_strides, row),
      params.residual ? row_at<residual_t>(params.residual, params.residual_strides, row) : nullptr,
      params.gate ? static_cast<const acc_t*>(gate) : nullptr,
      params.drops_x() ? dropout_scales<acc_t>(params.dropout, row, n, scales_memory) : nullptr,
      static_cast<z_t*>(params.residual_out) + row * n};
  sweep_columns<acc_t>(sweep, 0, n);
}

// `grad_norm`: the gradient of z without that of residual_out; `grad_residual_out`: of z_t, or null.
template <class x_t, class residual_t, class z_t>
void load_stage_grad_row(const NormBackwardParams& params, const void* gate, void* grad_gate_partial, int64_t row,
                         const void* grad_norm, const void* grad_residual_out, void* scales_memory) {
  using acc_t = AccOf<x_t>;
  const int64_t n = params.hidden_size;
  LoadStageGradSweep<acc_t, x_t, residual_t, z_t> sweep{
      static_cast<const acc_t*>(grad_norm),
      static_cast<const z_t*>(grad_residual_out),
      params.gate ? static_cast<const acc_t*>(gate) : nullptr,
      params.gate ? row_at<x_t>(params.x, params.x_strides, row) : nullptr,
      params.drops_x() ? dropout_scales<acc_t>(params.dropout, row, n, scales_memory) : nullptr,
      static_cast<acc_t*>(grad_gate_partial),
      params.grad_residual ? static_cast<residual_t*>(params.grad_residual) + row * n : nullptr,
      params.grad_input ? static_cast<x_t*>(params.grad_input) + row * n : nullptr};
  sweep_columns<acc_t>(sweep, 0, n);
}

// ---- the epilogue ---------------------------------------------------------------------------------------------------

// Makes one row of y from one of u.
template <Activation activation, class acc_t, class y_t>
void epilogue_row(const NormForwardParams& params, int64_t row, const void* u, void* scales_memory) {
  const int64_t n = params.hidden_size;
  EpilogueSweep<activation, acc_t, y_t> sweep{
      static_cast<const acc_t*>(u),
      params.drops_y ? dropout_scales<acc_t>(params.dropout, row, n, scales_memory) : nullptr,
      static_cast<y_t*>(params.y) + row * n};
  sweep_columns<acc_t>(sweep, 0, n);
}

// Makes one row of grad_u. `grad_output`: the row in the accumulation type; may be `grad`.
template <Activation activation, class z_t>
void epilogue_grad_row(const NormBackwardParams& params, const void* weight, const void* bias, int64_t row,
                       const void* grad_output, void* grad, void* scales_memory) {
  using acc_t = AccOf<z_t>;
  const int64_t n = params.hidden_size;
  EpilogueGradSweep<activation, acc_t, z_t> sweep{
      static_cast<const acc_t*>(grad_output),
      row_at<z_t>(params.z, params.z_strides, row),
      static_cast<const acc_t*>(weight),
      static_cast<const acc_t*>(bias),
      params.drops_y ? dropout_scales<acc_t>(params.dropout, row, n, scales_memory) : nullptr,
      stats_of<acc_t>(params, row),
      static_cast<acc_t*>(grad)};
  sweep_columns<acc_t>(sweep, 0, n);
}

// Makes one row of x_hat from y.
template <class y_t>
void recover_row(const NormBackwardParams& params, const void* weight, const void* bias, int64_t row, void* x_hat) {
  using acc_t = AccOf<y_t>;
  RecoverSweep<acc_t, y_t> sweep{row_at<y_t>(params.z, params.z_strides, row), static_cast<const acc_t*>(weight),
                                 static_cast<const acc_t*>(bias), static_cast<acc_t*>(x_hat)};
  sweep_columns<acc_t>(sweep, 0, params.hidden_size);
}

void keep_row(const Dropout& dropout, int64_t row, int64_t n, uint8_t* keep) {
  write_kept(dropout, row, n, uint8_t{1}, keep);
}

template <class acc_t, class to_t>
void sum_chunks(const void* partial, int64_t chunks, int64_t hidden_size, void* grad, bool accumulate, int64_t begin,
                int64_t end) {
  ChunkSumSweep<acc_t, to_t> sweep{static_cast<const acc_t*>(partial), chunks, hidden_size, static_cast<to_t*>(grad),
                                   accumulate};
  sweep_columns<acc_t>(sweep, begin, end);
}

template <class acc_t, class from_t>
void widen_columns(const void* from, double offset, int64_t hidden_size, void* to) {
  if (!from) {
    for (int64_t col = 0; col < hidden_size; ++col) static_cast<acc_t*>(to)[col] = static_cast<acc_t>(offset);
    return;
  }
  WidenSweep<acc_t, from_t> sweep{static_cast<const from_t*>(from), static_cast<acc_t>(offset),
                                  static_cast<acc_t*>(to)};
  sweep_columns<acc_t>(sweep, 0, hidden_size);
}

// ---- run-time dtypes to the functions above -------------------------------------------------------------------------

#define FLN_FOR_DTYPE(dtype, function)                \
  switch (dtype) {                                    \
    case DType::kFloat16: return function(Float16);   \
    case DType::kBFloat16: return function(BFloat16); \
    case DType::kFloat32: return function(float);     \
    default: return function(double);                 \
  }

template <class x_t>
ForwardRows forward_rows_of(DType y_dtype) {
#define FLN_FUNCTION(y_t) forward_rows<x_t, y_t>
  FLN_FOR_DTYPE(y_dtype, FLN_FUNCTION);
#undef FLN_FUNCTION
}

ForwardRows forward_rows_of(DType x_dtype, DType y_dtype) {
#define FLN_FUNCTION(x_t) forward_rows_of<x_t>(y_dtype)
  FLN_FOR_DTYPE(x_dtype, FLN_FUNCTION);
#undef FLN_FUNCTION
}

// fp64 goes with nothing else.
#define FLN_FOR_LOAD_DTYPE(dtype, rows, function)           \
  switch (dtype) {                                          \
    case DType::kFloat16: return function(Float16);         \
    case DType::kBFloat16: return function(BFloat16);       \
    case DType::kFloat32: return rows<float, float, float>; \
    default: return rows<double, double, double>;           \
  }

// z, grad_output and grad_input are each of one 16-bit type or fp32; fp64 goes with nothing else.
template <class z_t, class grad_t, class half_t>
BackwardRows backward_rows_of(bool is_grad_input_fp32) {
  return is_grad_input_fp32 ? backward_rows<z_t, grad_t, float> : backward_rows<z_t, grad_t, half_t>;
}

template <class half_t>
BackwardRows backward_rows_of(bool is_z_fp32, bool is_grad_output_fp32, bool is_grad_input_fp32) {
  if (is_z_fp32)
    return is_grad_output_fp32 ? backward_rows_of<float, float, half_t>(is_grad_input_fp32)
                               : backward_rows_of<float, half_t, half_t>(is_grad_input_fp32);
  return is_grad_output_fp32 ? backward_rows_of<half_t, float, half_t>(is_grad_input_fp32)
                             : backward_rows_of<half_t, half_t, half_t>(is_grad_input_fp32);
}

BackwardRows backward_rows_of(DType z_dtype, DType grad_output_dtype, DType grad_input_dtype) {
  if (z_dtype == DType::kFloat64) return backward_rows<double, double, double>;
  const auto is_any = [&](DType dtype) {
    return z_dtype == dtype || grad_output_dtype == dtype || grad_input_dtype == dtype;
  };
  const bool is_z_fp32 = z_dtype == DType::kFloat32, is_grad_output_fp32 = grad_output_dtype == DType::kFloat32;
  const bool is_grad_input_fp32 = grad_input_dtype == DType::kFloat32;
  if (is_any(DType::kFloat16)) return backward_rows_of<Float16>(is_z_fp32, is_grad_output_fp32, is_grad_input_fp32);
  if (is_any(DType::kBFloat16)) return backward_rows_of<BFloat16>(is_z_fp32, is_grad_output_fp32, is_grad_input_fp32);
  return backward_rows<float, float, float>;
}

#define FLN_FOR_ACTIVATION(activation, function)                        \
  switch (activation) {                                                 \
    case Activation::kRelu: return function(Activation::kRelu);         \
    case Activation::kGelu: return function(Activation::kGelu);         \
    case Activation::kGeluTanh: return function(Activation::kGeluTanh); \
    case Activation::kSilu: return function(Activation::kSilu);         \
    default: return function(Activation::kNone);                        \
  }

template <class acc_t, class y_t>
EpilogueRow epilogue_row_of(Activation activation) {
#define FLN_FUNCTION(which) epilogue_row<which, acc_t, y_t>
  FLN_FOR_ACTIVATION(activation, FLN_FUNCTION);
#undef FLN_FUNCTION
}

EpilogueRow epilogue_row_of(bool is_double, DType y_dtype, Activation activation) {
#define FLN_FUNCTION(y_t) is_double ? epilogue_row_of<double, y_t>(activation) : epilogue_row_of<float, y_t>(activation)
  FLN_FOR_DTYPE(y_dtype, FLN_FUNCTION);
#undef FLN_FUNCTION
}

template <class z_t>
EpilogueGradRow epilogue_grad_row_of(Activation activation) {
#define FLN_FUNCTION(which) epilogue_grad_row<which, z_t>
  FLN_FOR_ACTIVATION(activation, FLN_FUNCTION);
#undef FLN_FUNCTION
}

EpilogueGradRow epilogue_grad_row_of(DType z_dtype, Activation activation) {
#define FLN_FUNCTION(z_t) epilogue_grad_row_of<z_t>(activation)
  FLN_FOR_DTYPE(z_dtype, FLN_FUNCTION);
#undef FLN_FUNCTION
}

RecoverRow recover_row_of(DType y_dtype) {
#define FLN_FUNCTION(y_t) recover_row<y_t>
  FLN_FOR_DTYPE(y_dtype, FLN_FUNCTION);
#undef FLN_FUNCTION
}
#undef FLN_FOR_ACTIVATION

// The residual and z are each of x's type or fp32.
#define FLN_OF_LOAD_TYPES(function)                                                                   \
  template <class x_t>                                                                                \
  auto function##_of(bool is_residual_fp32, bool is_z_fp32) {                                         \
    if (is_residual_fp32) return is_z_fp32 ? function<x_t, float, float> : function<x_t, float, x_t>; \
    return is_z_fp32 ? function<x_t, x_t, float> : function<x_t, x_t, x_t>;                           \
  }
FLN_OF_LOAD_TYPES(load_stage_row)
FLN_OF_LOAD_TYPES(load_stage_grad_row)
#undef FLN_OF_LOAD_TYPES

LoadStageRow load_stage_row_of(DType x_dtype, DType residual_dtype, DType z_dtype) {
  const bool is_residual_fp32 = residual_dtype == DType::kFloat32, is_z_fp32 = z_dtype == DType::kFloat32;
#define FLN_FUNCTION(x_t) load_stage_row_of<x_t>(is_residual_fp32, is_z_fp32)
  FLN_FOR_LOAD_DTYPE(x_dtype, load_stage_row, FLN_FUNCTION);
#undef FLN_FUNCTION
}

LoadStageGradRow load_stage_grad_row_of(DType x_dtype, DType residual_dtype, DType z_dtype) {
  const bool is_residual_fp32 = residual_dtype == DType::kFloat32, is_z_fp32 = z_dtype == DType::kFloat32;
#define FLN_FUNCTION(x_t) load_stage_grad_row_of<x_t>(is_residual_fp32, is_z_fp32)
  FLN_FOR_LOAD_DTYPE(x_dtype, load_stage_grad_row, FLN_FUNCTION);
#undef FLN_FUNCTION
}

SumChunks sum_chunks_of(bool is_double, DType grad_dtype) {
#define FLN_FUNCTION(to_t) is_double ? sum_chunks<double, to_t> : sum_chunks<float, to_t>
  FLN_FOR_DTYPE(grad_dtype, FLN_FUNCTION);
#undef FLN_FUNCTION
}

WidenColumns widen_columns_of(bool is_double, DType from_dtype) {
#define FLN_FUNCTION(from_t) is_double ? widen_columns<double, from_t> : widen_columns<float, from_t>
  FLN_FOR_DTYPE(from_dtype, FLN_FUNCTION);
#undef FLN_FUNCTION
}

const Kernels kernels = {forward_rows_of, backward_rows_of,     load_stage_row_of, load_stage_grad_row_of,
                         epilogue_row_of, epilogue_grad_row_of, recover_row_of,    keep_row,
                         sum_chunks_of,   widen_columns_of};

#undef FLN_FOR_LOAD_DTYPE
#undef FLN_FOR_DTYPE
#undef FLN_CONVERT

}  // namespace FLN_ISA
#undef FLN_ISA
#undef FLN_VECTOR_BYTES
