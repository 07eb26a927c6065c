// Rows with options that are run-time values: segments, no weight, weight or y of another type than x, load stages,
// epilogues. norm_forward.cu has the formulas.
#pragma once

#include "activation.cuh"
#include "forward_rows.cuh"
#include "run_time_rows.cuh"
#include "stages.cuh"

namespace fused_layernorm {

struct AnyParams : UsualParams {
  const void* gate;
  Dropout dropout;  // of x
  Epilogue epilogue;
  int64_t weight_stride, gate_stride;
  int segments, iterations;
  float most_offset;
  DType x_dtype, weight_dtype, y_dtype;
  bool interleaves, is_rms_norm, rounds_x_hat, loads;

  AnyParams(const KernelForwardParams& params, const LoadStage& stage, const Epilogue& epilogue,
            const RunTimePlan& plan)
      : UsualParams(params, stage, plan),
        gate(stage.gate),
        dropout(stage.dropout),
        epilogue(epilogue),
        weight_stride(params.weight_stride),
        gate_stride(stage.gate_stride),
        segments(params.segments),
        iterations(1),
        most_offset(most_offset_of(params.is_rms_norm, stage.residual_out_dtype, params.weight_dtype, params.y_dtype)),
        x_dtype(params.x_dtype),
        weight_dtype(params.weight_dtype),
        y_dtype(params.y_dtype),
        interleaves(params.interleaves),
        is_rms_norm(params.is_rms_norm),
        rounds_x_hat(stage.rounds_x_hat),
        loads(stage.any() || params.x_dtype != stage.residual_out_dtype) {}
};

// The stages that a kernel has code for. Code that a call jumps over costs it 5 to 20% where rows are few enough for
// the L2 cache (H200, dropout of x, 2048 x 2048: 10.4 us, with the code of epilogues 11.8).
enum class Stages { kNone, kLoad, kLoadAndEpilogue };

// A thread's part of a row. kColumns > 0: rows of so many columns that a thread's kHeld vectors fill, with an epilogue,
// a weight, y of x's type, and no load stage.
template <typename scalar_t, int kHeld, Stages stages, int kColumns = 0>
struct AnyRow : RunTimeRow<scalar_t, kHeld> {
  using Base = RunTimeRow<scalar_t, kHeld>;
  using Base::clamped, Base::first_col, Base::for_each, Base::hidden_size, Base::kVec, Base::row;
  using typename Base::Vec;

  const AnyParams& params;

  // Tests against hidden_size stay, also where columns are constant: they keep the compiler from widening z once and
  // keeping that, which would spill.
  __device__ __forceinline__ AnyRow(const AnyParams& params)
      : Base(params.hidden_size, kColumns > 0 ? log_of(std::max(kColumns / (kHeld * kVec), 1)) : params.log_threads,
             params.slots),
        params(params) {}

  // z = residual + gate * dropout(x) of x's type, rounded, and stored if residual_out is wanted.
  template <typename x_t>
  __device__ __forceinline__ void load_sum(Vec (&z)[kHeld], unsigned segment) const {
    const x_t* x = static_cast<const x_t*>(params.x) + params.x_strides.offset(row);
    const x_t* gate = static_cast<const x_t*>(params.gate) + segment * params.gate_stride;
    const scalar_t* residual = static_cast<const scalar_t*>(params.residual) + params.residual_strides.offset(row);
    scalar_t* out = static_cast<scalar_t*>(params.residual_out) + row * hidden_size;
    RawVec<x_t, kVec> x_raw[kHeld];
#pragma unroll
    for (int held = 0; held < kHeld; ++held) {
      x_raw[held] = load_vec<x_t, kVec>(x + clamped(held));
      z[held] = filled_vec<scalar_t, kVec>(-0.f);  // x + -0 is x, also where that is -0
      if (params.residual) z[held] = load_vec<scalar_t, kVec>(residual + clamped(held));
    }
    const auto sum = [&](int held, int col, auto&& change) {
      float from_x[kVec], values[kVec];
      unpack(x_raw[held], from_x);
      change(from_x);
      unpack(z[held], values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[i] = add(values[i], from_x[i]);
      z[held] = pack<scalar_t>(values);
      if (params.residual_out) store_raw(out + col, z[held]);
    };
    if (params.dropout.philox) {
      const RowDropout<float> dropout(params.dropout, row);
      for_each([&](int held, int col) {
        sum(held, col, [&](float (&x)[kVec]) { dropout.apply(x, col); });
        asm volatile("" ::: "memory");  // random numbers of several vectors at once would spill
      });
    } else if (params.gate) {
      constexpr int kBatch = kHeld < 5 ? kHeld : 3;
#pragma unroll
      for (int from = 0; from < kHeld; from += kBatch) {
        RawVec<x_t, kVec> gates[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          if (from + i < kHeld) gates[i] = load_vec<x_t, kVec>(gate + clamped(from + i));
        for_some(from, kBatch, [&](int held, int col) {
          sum(held, col, [&](float (&x)[kVec]) {
            float factor[kVec];
            unpack(gates[held - from], factor);
#pragma unroll
            for (int i = 0; i < kVec; ++i) x[i] = mul(x[i], factor[i]);
          });
        });
      }
    } else {
      for_each([&](int held, int col) { sum(held, col, [](float (&)[kVec]) {}); });
    }
  }

  // for_each() of `count` vectors from `from` on.
  template <typename F>
  __device__ __forceinline__ void for_some(int from, int count, F&& f) const {
    for_each([&](int held, int col) {
      if (held >= from && held < from + count) f(held, col);
    });
  }
  // The same, without tests if every thread has kHeld vectors.
  template <typename F>
  __device__ __forceinline__ void for_straight(int from, int count, F&& f) const {
    if constexpr (kColumns > 0) {
#pragma unroll
      for (int held = from; held < from + count; ++held) f(held, first_col + held * Base::step);
    } else {
      for_some(from, count, f);
    }
  }

  // y = change(x_hat * weight + bias), of usual calls. Straight-line code for dropout and for each activation, which
  // warps fetch without stalls.
  template <typename F>
  __device__ __forceinline__ void store_straight(const Vec (&z)[kHeld], const RowNorm<float>& norm, int64_t at,
                                                 F&& change) const {
    const scalar_t* weight = static_cast<const scalar_t*>(params.weight) + at + first_col;
    const scalar_t* bias = static_cast<const scalar_t*>(params.bias) + at + first_col;
    scalar_t* y_row = static_cast<scalar_t*>(params.y) + row * hidden_size + first_col;
    asm volatile("" : "+l"(weight), "+l"(bias), "+l"(y_row));  // worked out once
    const unsigned step = Base::step;
    constexpr int kBatch = kHeld % 3 == 0 ? 3 : kHeld % 2 == 0 ? 2 : kHeld;  // vectors at a time, for lack of registers
#pragma unroll
    for (int from = 0; from < kHeld; from += kBatch) {
      int base = first_col;  // hidden from the optimizer: random numbers of later vectors would be hoisted and spill
      asm volatile("" : "+r"(base)::"memory");
      Vec weights[kBatch], biases[kBatch];
      for_straight(from, kBatch, [&](int held, int) {
        weights[held - from] = load_vec<scalar_t, kVec, true>(weight + held * step);
        biases[held - from] =
            params.bias ? load_vec<scalar_t, kVec, true>(bias + held * step) : filled_vec<scalar_t, kVec>(-0.f);
      });
      for_straight(from, kBatch, [&](int held, int) {
        float y[kVec], scale[kVec], offset[kVec];
        unpack(z[held], y);
        unpack(weights[held - from], scale);
        unpack(biases[held - from], offset);
#pragma unroll
        for (int i = 0; i < kVec; ++i) y[i] = fma(norm.x_hat(y[i]), scale[i], offset[i]);
        change(y, base + held * Base::step);
        store_vec(y_row + held * step, y);
      });
    }
  }

  __device__ __forceinline__ void run(SumScratch<kHeld, 2, 2>& scratch) const {
    const unsigned segment = kColumns > 0 ? 0 : segment_of(params, row);
    const int64_t at = segment * params.weight_stride;
    Vec z[kHeld];
    float near_mean = 0;
    if (stages != Stages::kNone && kColumns == 0 && (stages == Stages::kLoad || params.loads)) {
      with_type_beside<scalar_t>(params.x_dtype, [&](auto type) {
        using x_t = decltype(type);
        if constexpr (sizeof(x_t) <= sizeof(scalar_t)) load_sum<x_t>(z, segment);
      });
      if (!params.is_rms_norm) near_mean = Base::near_mean_of(z, scratch);
    } else {
      const scalar_t* x = static_cast<const scalar_t*>(params.x) + params.x_strides.offset(row);
#pragma unroll
      for (int held = 0; held < kHeld; ++held)
        z[held] = load_vec<scalar_t, kVec>(x + (kColumns > 0 ? first_col + held * Base::step : clamped(held)));
      if (!params.is_rms_norm) near_mean = Base::near_mean_of(x);
    }
    const Moments<float> moments = Base::moments(z, near_mean, params.most_offset, params.inverse_n, scratch, [] {});
    const RowNorm<float> norm = finish_row(moments, params.inverse_n, params, row, first_col == 0);
    if (kHeld > 3) optimization_barrier(z);

    // Calls store(y, column) for each vector of y = x_hat * (weight + offset) + bias, of weights of one type
    const auto store_by = [&](auto type, auto rounds, auto&& store) {
      using T = decltype(type);
      // Weights that are loaded at once (128 segments, 4096 columns: 156 us, vector by vector 187)
      constexpr int kBatch = (kHeld == 8 ? 4 : kHeld % 3 == 0 ? 3 : 2) / (sizeof(T) > sizeof(scalar_t) ? 2 : 1);
#pragma unroll
      for (int from = 0; from < kHeld; from += kBatch) {
        asm volatile("" ::: "memory");  // else loads of several batches at once would spill
        RawVec<T, kVec> weights[kBatch], biases[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (from + i >= kHeld) continue;
          weights[i] = parameter_vec<T, kVec>(params.weight, at + clamped(from + i), 1);
          biases[i] = parameter_vec<T, kVec>(params.bias, at + clamped(from + i), -0.f);
        }
        for_some(from, kBatch, [&](int held, int col) {
          float y[kVec], scale[kVec], offset[kVec];
          unpack(z[held], y);
#pragma unroll
          for (int i = 0; i < kVec; ++i) y[i] = norm.x_hat(y[i]);
          if (rounds) unpack(pack<scalar_t>(y), y);
          unpack(weights[held - from], scale);
          unpack(biases[held - from], offset);
#pragma unroll
          for (int i = 0; i < kVec; ++i) y[i] = fma(y[i], scale[i] + params.weight_offset, offset[i]);
          store(y, col);
        });
      }
    };
    const auto store_all = [&](auto&& store) {
      if (!params.weight && !params.bias) {
        for_each([&](int held, int col) {
          float y[kVec];
          unpack(z[held], y);
#pragma unroll
          for (int i = 0; i < kVec; ++i) y[i] = norm.x_hat(y[i]);
          store(y, col);
        });
        return;
      }
      with_type_beside<scalar_t>(params.weight_dtype, [&](auto type) {
        if constexpr (sizeof(scalar_t) == 2) {
          if (params.rounds_x_hat) return store_by(type, std::true_type(), store);
        }
        store_by(type, std::false_type(), store);
      });
    };
    const bool is_same = kColumns > 0 || params.y_dtype == dtype_of<scalar_t>;
    const auto store_vector = [&](const float (&y)[kVec], int col) {
      if (is_same) {
        store_vec(static_cast<scalar_t*>(params.y) + row * hidden_size + col, y);
      } else {
        store_vec_as(params.y, params.y_dtype, row * hidden_size + col, y, kVec, true);
      }
    };
    if constexpr (stages != Stages::kLoadAndEpilogue) {
      store_all(store_vector);
    } else {
      constexpr bool kQuick = sizeof(scalar_t) == 2;
      const Activation activation = params.epilogue.activation;
      const bool drops = params.epilogue.dropout.philox;
      if (is_same && params.weight && params.weight_dtype == dtype_of<scalar_t> && params.weight_offset == 0 &&
          !params.rounds_x_hat) {
        if (!drops) {
          return with_activation(activation, [&](auto which) {
            if constexpr (!std::is_same<decltype(which), Which<Activation::kNone>>::value)
              store_straight(z, norm, at, [&](float (&y)[kVec], int) { activate<kQuick>(y, which); });
          });
        }
        if (activation == Activation::kNone) {
          const RowDropout<float> dropout(params.epilogue.dropout, row);
          return store_straight(z, norm, at, [&](float (&y)[kVec], int col) { dropout.apply(y, col); });
        }
      }
      const RowDropout<float> dropout(params.epilogue.dropout, row);
      // A vector at a time, and the types of its weights run-time values: code for each type and activation would be
      // five times as much
      for_each([&](int held, int col) {
        asm volatile("" ::: "memory");
        ParameterWords<kVec> weight, bias;
        weight.template load<scalar_t>(params.weight, params.weight_dtype, at + col, 1);
        bias.template load<scalar_t>(params.bias, params.weight_dtype, at + col, -0.f);
        float y[kVec], scale[kVec], offset[kVec];
        unpack(z[held], y);
#pragma unroll
        for (int i = 0; i < kVec; ++i) y[i] = norm.x_hat(y[i]);
        if (sizeof(scalar_t) == 2 && kColumns == 0 && params.rounds_x_hat) unpack(pack<scalar_t>(y), y);
        weight.template widen<scalar_t>(scale, params.weight_dtype);
        bias.template widen<scalar_t>(offset, params.weight_dtype);
#pragma unroll
        for (int i = 0; i < kVec; ++i) y[i] = fma(y[i], scale[i] + params.weight_offset, offset[i]);
        with_activation(activation, [&](auto which) { activate<kQuick>(y, which); });
        if (drops) dropout.apply(y, col);
        store_vector(y, col);
      });
    }
  }
};

}  // namespace fused_layernorm
