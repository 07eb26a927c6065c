// Rows whose plan is a run-time value: forward of rows that a block holds, without an epilogue (norm_usual.cu,
// norm_any.cu, norm_gated.cu), and norms with a quantized result. A kernel for each number of vectors a thread, not for
// each plan.
//
// A row has 2^log_threads threads with up to eight slots each; slot s of thread t is vector s * threads + t of the row.
// With kHeld 2 to 8 a thread holds all of its slots, and a block has one row, or several of at most 32 threads. With
// kHeld 1, for few rows, a block has one row and a thread for each slot. Both add in the same order, so the result of a
// row does not depend on the number of rows.
#pragma once

#include <algorithm>
#include <climits>
#include <type_traits>

#include "dispatch.cuh"
#include "forward_rows.cuh"
#include "kernel_params.h"
#include "launch_plan.h"
#include "vector_io.cuh"

namespace fused_layernorm {

struct RunTimePlan {
  int held, log_threads, slots, block, rows;  // rows of a block
  int64_t blocks;

  // most_threads(held): the most threads of a row with so many vectors a thread; 0: none. plan.held is 0 for rows that
  // need more threads.
  template <typename F>
  static RunTimePlan of(int64_t hidden_size, int element_bytes, int64_t rows, int least_threads, const FewRows& few,
                        F&& most_threads) {
    const int vectors = static_cast<int>(hidden_size * element_bytes / 16);
    RunTimePlan plan{};
    int fewest_slots = INT_MAX;
    for (int held : {2, 4, 3, 5, 6, 8}) {  // the first of those with as few empty slots
      int log_threads = log_of(least_threads);
      while (held << log_threads < vectors) ++log_threads;
      if (1 << log_threads > most_threads(held) || held << log_threads >= fewest_slots) continue;
      fewest_slots = held << log_threads;
      plan.held = held;
      plan.log_threads = log_threads;
    }
    if (plan.held == 0) return plan;
    const int threads = 1 << plan.log_threads;
    plan.slots = (vectors - 1) / threads + 1;
    plan.block = std::max(threads, kRunTimeBlock);
    if (plan.slots * threads <= few.block && rows * std::max(vectors, kRunTimeFewRowsLeast) <= few.vectors) {
      plan.held = 1;
      plan.block = (plan.slots * threads + 31) / 32 * 32;
    }
    plan.rows = plan.held == 1 ? 1 : plan.block / threads;
    plan.blocks = (rows + plan.rows - 1) / plan.rows;
    return plan;
  }
};

// The arguments of norm_usual.cu, and the first ones of norm_any.cu and norm_gated.cu.
struct UsualParams {
  const void *x, *residual, *weight, *bias;
  void *y, *residual_out, *rstd, *mean, *mean_tail;
  RowStrides x_strides, residual_strides;
  int64_t rows;
  int hidden_size, log_threads, slots;
  float inverse_n, eps, weight_offset;
  static constexpr bool is_rms_norm = false;  // for finish_row()

  UsualParams(const KernelForwardParams& params, const LoadStage& stage, const RunTimePlan& plan)
      : x(params.x),
        residual(stage.residual),
        weight(params.weight),
        bias(params.bias),
        y(params.y),
        residual_out(stage.residual_out),
        rstd(params.rstd),
        mean(params.mean),
        mean_tail(params.mean_tail),
        x_strides(params.x_strides),
        residual_strides(stage.residual_strides),
        rows(params.rows),
        hidden_size(static_cast<int>(params.hidden_size)),
        log_threads(plan.log_threads),
        slots(plan.slots),
        inverse_n(inverse_of<float>(params.hidden_size)),
        eps(static_cast<float>(params.eps)),
        weight_offset(params.weight && params.weight_offset != 0 ? static_cast<float>(params.weight_offset) : -0.f) {}
};

// Calls f(std::integral_constant<int, value>()) if `value` is one of kValues.
template <int... kValues, typename F>
cudaError_t with_constant(int64_t value, F&& f) {
  cudaError_t launched = cudaErrorNotSupported;
  ((value == kValues ? static_cast<void>(launched = f(std::integral_constant<int, kValues>())) : void()), ...);
  return launched;
}

// For kSums sums along a row at a time, `kTimes` times.
template <int kHeld, int kSums, int kTimes = 1, int kFewBlock = kUsualFewRows.block>
struct SumScratch {
  struct Sums {
    float of[kSums];
  };
  Sums slots[kTimes][kHeld == 1 ? kFewBlock : 1], warps[kTimes][32];
  float near_mean;
};

// The median of four numbers: near the mean of a row that begins with them, also where one of them is an outlier, as in
// activations with a few large channels. (About their mean, which is then up to two standard deviations from the row's,
// fp32 rows lost two bits of the mean.) Of equal numbers it is that number.
__device__ __forceinline__ float median_of(const float (&values)[4]) {
  const float low = fmaxf(fminf(values[0], values[1]), fminf(values[2], values[3]));
  const float high = fminf(fmaxf(values[0], values[1]), fmaxf(values[2], values[3]));
  return fmaf(high - low, 0.5f, low);
}

// For RunTimeRow::moments_by(): how far from m, in standard deviations, the mean of a row may be, as the share that the
// square of their difference has of the mean square of x - m. RMSNorm: 0, no limit. Two deviations cost var two bits;
// eight cost it six of 24, which is enough where x, weight and y have 16 bits.
__host__ __device__ constexpr float most_offset_of(bool is_rms_norm, DType x, DType weight, DType y) {
  return is_rms_norm ? 0 : x != DType::kFloat32 && weight == x && y == x ? 64 / 65.0f : 4 / 5.0f;
}

// A thread's part of a row.
template <typename scalar_t, int kHeld>
struct RunTimeRow {
  static constexpr bool kFew = kHeld == 1;
  static constexpr bool kSumsAboutZero = sizeof(scalar_t) == 2;  // moments_by()
  static constexpr int kVec = 16 / sizeof(scalar_t);
  using Vec = RawVec<scalar_t, kVec>;

  int threads, log_threads, slots;
  int rank, part;  // thread t; with kHeld 1 its slot, else its row of the block
  int lane, warp, hidden_size, step, first_col;
  int64_t row;

  __device__ __forceinline__ RunTimeRow(int64_t hidden_size, int log_threads, int slots)
      : threads(1 << log_threads),
        log_threads(log_threads),
        slots(slots),
        rank(threadIdx.x & (threads - 1)),
        part(threadIdx.x >> log_threads),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        hidden_size(static_cast<int>(hidden_size)),
        step(threads * kVec),
        first_col(rank * kVec + (kFew ? part * step : 0)),
        row(kFew ? blockIdx.x : static_cast<int64_t>(blockIdx.x) * (blockDim.x >> log_threads) + part) {}

  __device__ __forceinline__ bool spans_warps() const { return kFew || threads > 32; }

  // The column of a vector; where this thread has none, that of the last one. Loads that are always executed leave
  // their registers free before: predicated loads in a loop over rows keep them.
  __device__ __forceinline__ int clamped(int held) const { return min(first_col + held * step, hidden_size - kVec); }

  // Calls f(held, column) for each vector that this thread has.
  template <typename F>
  __device__ __forceinline__ void for_each(F&& f) const {
#pragma unroll
    for (int held = 0; held < kHeld; ++held)
      if (first_col + held * step < hidden_size) f(held, first_col + held * step);
  }

  // The first elements of a row's x and residual, where its sums are about their median.
  template <typename x_t>
  struct First {
    RawVec<x_t, 4> x;
    RawVec<float, 4> residual;

    __device__ __forceinline__ void load(const x_t* x_row, const scalar_t* residual_row) {
      if constexpr (!kSumsAboutZero) {
        x = load_vec<x_t, 4, true>(x_row);
        residual = residual_row ? load_vec<float, 4, true>(residual_row) : filled_vec<float, 4>(-0.f);
      }
    }
    // The median of the first elements of z.
    __device__ __forceinline__ float median() const {
      if constexpr (kSumsAboutZero) return 0;
      float values[4], others[4];
      unpack(x, values);
      unpack(residual, others);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] += others[i];
      return median_of(values);
    }
  };

  // z = x, or residual + x, which is stored if residual_out is wanted. Where this thread has no vector, z is zero, or
  // undefined if kWantsFirst. load_more() starts further loads.
  template <typename x_t, bool kWantsFirst, typename Params, typename F>
  __device__ __forceinline__ void load(Vec (&z)[kHeld], First<x_t>& first, const Params& params, F&& load_more) const {
    if constexpr (!kWantsFirst) {
#pragma unroll
      for (int held = 0; held < kHeld; ++held) z[held] = zero_vec<scalar_t, kVec>();
    }
    const x_t* x = static_cast<const x_t*>(params.x) + params.x_strides.offset(row);
    if (!params.residual) {
      if constexpr (std::is_same<x_t, scalar_t>::value)
        for_each([&](int held, int col) { z[held] = load_vec<scalar_t, kVec, true>(x + col); });
      if (kWantsFirst) first.load(x, nullptr);
      return load_more();
    }
    const scalar_t* residual = static_cast<const scalar_t*>(params.residual) + params.residual_strides.offset(row);
    scalar_t* out = static_cast<scalar_t*>(params.residual_out) + row * hidden_size;
    constexpr int kBatch = kHeld > 6 ? 2 : kHeld > 5 ? 3 : kHeld;  // vectors at a time, for lack of registers
#pragma unroll
    for (int from = 0; from < kHeld; from += kBatch) {
      RawVec<x_t, kVec> x_raw[kBatch];
      const auto for_batch = [&](auto&& f) {
        for_each([&](int held, int col) {
          if (held >= from && held < from + kBatch) f(held, col);
        });
      };
      for_batch([&](int held, int col) { x_raw[held - from] = load_vec<x_t, kVec, true>(x + col); });
      for_batch([&](int held, int col) { z[held] = load_vec<scalar_t, kVec, true>(residual + col); });
      if (kWantsFirst && from == 0) first.load(x, residual);
      if (kFew) load_more();
      for_batch([&](int held, int col) {
        float sum[kVec], values[kVec];
        unpack(z[held], sum);
        unpack(x_raw[held - from], values);
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum[i] += values[i];
        z[held] = pack<scalar_t>(sum);
        if (params.residual_out) store_raw(out + col, z[held]);
      });
    }
    if (!kFew) load_more();  // for lack of registers
  }

  // The median of the first four elements of x, or of z, for all threads of the row.
  __device__ __forceinline__ static float near_mean_of(const scalar_t* x) {
    First<scalar_t> first;
    first.load(x, nullptr);
    return first.median();
  }
  template <typename Scratch>
  __device__ __forceinline__ float near_mean_of(const Vec (&z)[kHeld], Scratch& scratch) const {
    if constexpr (kSumsAboutZero) return 0;
    float first[kVec];
    unpack(z[0], first);
    const float median = median_of({first[0], first[1], first[2], first[3]});
    if (!spans_warps()) return __shfl_sync(0xffffffffu, median, lane & -threads);
    if (first_col == 0) scratch.near_mean = median;
    __syncthreads();
    return scratch.near_mean;
  }

  // Replaces sums over a thread's slots by sums over the row. `time`: which of the scratch's.
  template <int kSums, typename Scratch>
  __device__ __forceinline__ void add_up(float (&sums)[kSums], Scratch& scratch, int time) const {
    using Sums = typename Scratch::Sums;
    const auto share = [&](Sums& target) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) target.of[i] = sums[i];
    };
    const auto add_lanes = [&](int lanes) {
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2)
        if (offset < lanes)
#pragma unroll
          for (int i = 0; i < kSums; ++i) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], offset);
    };
    if constexpr (kFew) {
      share(scratch.slots[time][threadIdx.x]);
      __syncthreads();
      Sums of_slot[kMostFewRowsSlots];
#pragma unroll
      for (int slot = 0; slot < kMostFewRowsSlots; ++slot) {
        of_slot[slot] = Sums{};
        if (slot < slots) of_slot[slot] = scratch.slots[time][(slot << log_threads) + rank];
      }
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        sums[i] = 0;
#pragma unroll
        for (const Sums& of : of_slot) sums[i] += of.of[i];
      }
    }
    add_lanes(threads);
    if (threads <= 32) return;
    if (lane == 0 && (!kFew || part == 0)) share(scratch.warps[time][warp]);
    __syncthreads();
    const int warps = threads / 32;
    const Sums of_warp = scratch.warps[time][lane & (warps - 1)];
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = of_warp.of[i];
    add_lanes(warps);
  }

  // The moments of a row, by one exchange between its threads: about m, the median of its first four elements, or 0 in
  // 16 bits, so that no x - m is computed. Where m is too far from the mean, once more, about the mean, which is
  // rounded to z_t, so that equal numbers have variance 0. Rows that share a warp do that together; the others get the
  // same bits again. RMSNorm: about m = 0. add_differences(m, sums) adds this thread's x - m to sums[0], and their
  // squares to sums[1].
  template <typename z_t, typename Scratch, typename F>
  __device__ __forceinline__ Moments<float> moments_by(float m, float most_offset, float inverse_n, Scratch& scratch,
                                                       F&& add_differences) const {
    float sums[2];
    const auto pass = [&](int time) {
      sums[0] = sums[1] = 0;
      add_differences(m, sums);
      add_up(sums, scratch, time);
    };
    pass(0);
    const float delta = sums[0] * inverse_n;
    const bool is_far = most_offset > 0 && (!(delta * delta <= most_offset * (sums[1] * inverse_n)) || isinf(sums[1]));
    if (__any_sync(0xffffffffu, is_far)) {
      if (is_far) m = widen(narrow<z_t>(m + delta));
      pass(1);
    }
    return {0, m, sums[0], sums[1]};  // n is not used
  }
  // The same of the vectors z. load_more() starts further loads behind each pass.
  template <typename z_t, typename Scratch, typename F>
  __device__ __forceinline__ Moments<float> moments(RawVec<z_t, kVec> (&z)[kHeld], float m, float most_offset,
                                                    float inverse_n, Scratch& scratch, F&& load_more) const {
    return moments_by<z_t>(m, most_offset, inverse_n, scratch, [&](float m, float (&sums)[2]) {
      if (!kFew) optimization_barrier(z);
      for_each([&](int held, int) {
        float d[kVec], squares = 0;
        unpack(z[held], d);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          d[i] -= m;
          squares = fma(d[i], d[i], squares);
        }
        sums[0] += vec_sum(d);
        sums[1] += squares;
      });
      load_more();
    });
  }
};

// Calls f(T()) for x, weight or bias: beside 16-bit z of z's type, or fp32; beside fp32 z of any.
template <typename scalar_t, typename F>
__device__ __forceinline__ void with_type_beside(DType dtype, F&& f) {
  if (sizeof(scalar_t) == 4 && dtype == DType::kFloat16) {
    f(__half());
  } else if (sizeof(scalar_t) == 4 && dtype == DType::kBFloat16) {
    f(__nv_bfloat16());
  } else if (sizeof(scalar_t) == 4 || dtype == DType::kFloat32) {
    f(float());
  } else {
    f(scalar_t());
  }
}

// A vector of weight or bias; where there is none, of the neutral value.
template <typename T, int kVec>
__device__ __forceinline__ RawVec<T, kVec> parameter_vec(const void* source, int64_t at, float neutral) {
  return source ? load_vec<T, kVec, true>(static_cast<const T*>(source) + at) : filled_vec<T, kVec>(neutral);
}

// The same of a type beside scalar_t that is a run-time value: loaded early, and widened when it is used.
template <int kVec>
struct ParameterWords {
  RawVec<float, kVec> raw;

  template <typename scalar_t>
  __device__ __forceinline__ void load(const void* source, DType dtype, int64_t at, float neutral) {
    with_type_beside<scalar_t>(dtype, [&](auto type) {
      using T = decltype(type);
      const RawVec<T, kVec> vec = parameter_vec<T, kVec>(source, at, neutral);
      memcpy(&raw, &vec, sizeof(vec));
    });
  }
  template <typename scalar_t>
  __device__ __forceinline__ void widen(float (&values)[kVec], DType dtype) const {
    with_type_beside<scalar_t>(dtype, [&](auto type) {
      RawVec<decltype(type), kVec> vec;
      memcpy(&vec, &raw, sizeof(vec));
      unpack(vec, values);
    });
  }
};

// y + -0 is y, also where that is -0.
__device__ const float4 kNoBias = {-0.f, -0.f, -0.f, -0.f};

// A thread's part of z, weight and bias where they have one type, and one weight goes for all rows.
template <typename scalar_t, int kHeld, bool kPrefetchesBias = true>
struct UsualVectors {
  using Row = RunTimeRow<scalar_t, kHeld>;
  static constexpr int kVec = Row::kVec;
  // Weight and bias are loaded as early as there are registers: with x; with kPrefetchesBias some biases behind the
  // first pass over z, or behind the exchange (the fourth: H200, 256 x 4096, bf16 2.77 us, 2.59); else each with its
  // vector of y.
  static constexpr bool kEarlyWeights = kHeld < 6;
  static constexpr float kMostOffset =
      most_offset_of(false, dtype_of<scalar_t>, dtype_of<scalar_t>, dtype_of<scalar_t>);
  static constexpr int kEarlyBiases = Row::kFew ? kHeld : 0,
                       kMidBiases = kPrefetchesBias && kHeld > 2 && kHeld < 5 ? 3 : 0,
                       kLateBiases = kPrefetchesBias && (kHeld == 4 || kHeld == 5) ? kHeld : 0;
  typename Row::Vec z[kHeld], weights[kHeld], biases[kHeld];

  template <typename Params>
  __device__ __forceinline__ void load_weight(const Params& params, int held, int col) {
    weights[held] = load_vec<scalar_t, kVec, true>(static_cast<const scalar_t*>(params.weight) + col);
  }
  template <typename Params>
  __device__ __forceinline__ void load_bias(const Params& params, int held, int col) {
    const scalar_t* bias = static_cast<const scalar_t*>(params.bias);
    if constexpr (sizeof(scalar_t) == 4 && kHeld == 4) {  // by a branch, four biases would spill
      biases[held] = load_vec<scalar_t, kVec, true>(bias ? bias + col : reinterpret_cast<const float*>(&kNoBias));
    } else {
      biases[held] = bias ? load_vec<scalar_t, kVec, true>(bias + col) : filled_vec<scalar_t, kVec>(-0.f);
    }
  }

  // Loads z for LayerNorm and finds its moments. load_more() starts further loads.
  template <typename Params, typename F>
  __device__ __forceinline__ Moments<float> load_for_layer_norm(const Row& row, const Params& params, float inverse_n,
                                                                SumScratch<kHeld, 2, 2>& scratch, F&& load_more) {
    typename Row::template First<scalar_t> first;
    row.template load<scalar_t, true>(z, first, params, [&] {
      row.for_each([&](int held, int col) {
        if (kEarlyWeights) load_weight(params, held, col);
        if (held < kEarlyBiases) load_bias(params, held, col);
      });
      load_more();
    });
    const Moments<float> moments = row.moments(z, first.median(), kMostOffset, inverse_n, scratch, [&] {
      row.for_each([&](int held, int col) {
        if (held >= kEarlyBiases && held < kMidBiases) load_bias(params, held, col);
      });
    });
    row.for_each([&](int held, int col) {
      if (held >= kMidBiases && held < kLateBiases) load_bias(params, held, col);
    });
    return moments;
  }

  // y of LayerNorm.
  template <typename Params>
  __device__ __forceinline__ void layer_norm(float (&y)[kVec], const RowNorm<float>& norm, const Params& params,
                                             int held, int col) {
    float scale[kVec], offset[kVec];
    if (!kEarlyWeights) load_weight(params, held, col);
    unpack(z[held], y);
    unpack(weights[held], scale);
    if (held >= std::max({kEarlyBiases, kMidBiases, kLateBiases})) load_bias(params, held, col);
    unpack(biases[held], offset);
#pragma unroll
    for (int i = 0; i < kVec; ++i) y[i] = fma(norm.x_hat(y[i]), scale[i], offset[i]);
  }
};

}  // namespace fused_layernorm
