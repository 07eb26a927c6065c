// Forward of the calls that norm_usual.cu does not take, of rows that a block holds: with segments, without weight,
// with weight or y of another type than x, and with every load stage. Options are run-time values. norm_forward.cu has
// the formulas.
#include "forward_rows.cuh"
#include "launchers.h"
#include "run_time_rows.cuh"
#include "stages.cuh"

namespace fused_layernorm {
namespace {

struct AnyParams : UsualParams {
  const void* gate;
  Dropout dropout;
  int64_t weight_stride, gate_stride;
  int segments, iterations;
  DType x_dtype, weight_dtype, y_dtype;
  bool interleaves, is_rms_norm, rounds_x_hat;

  AnyParams(const KernelForwardParams& params, const LoadStage& stage, const RunTimePlan& plan)
      : UsualParams(params, stage, plan),
        gate(stage.gate),
        dropout(stage.dropout),
        weight_stride(params.weight_stride),
        gate_stride(stage.gate_stride),
        segments(params.segments),
        iterations(1),
        x_dtype(params.x_dtype),
        weight_dtype(params.weight_dtype),
        y_dtype(params.y_dtype),
        interleaves(params.interleaves),
        is_rms_norm(params.is_rms_norm),
        rounds_x_hat(stage.rounds_x_hat) {}
};

// ---- few rows: a vector a thread, and all loads before the first use -------------------------------------------------

struct FewParams {
  const void *x, *residual, *weight, *bias, *gate;
  void *y, *residual_out, *rstd, *mean, *mean_tail;
  int64_t x_stride, residual_stride, weight_stride, gate_stride;
  int hidden_size, log_threads, slots;
  float inverse_n, eps, weight_offset;
  float segments_of_row;  // segments / rows
  DType weight_dtype;
  bool is_rms_norm;

  FewParams(const AnyParams& all)
      : x(all.x),
        residual(all.residual),
        weight(all.weight),
        bias(all.bias),
        gate(all.gate),
        y(all.y),
        residual_out(all.residual_out),
        rstd(all.rstd),
        mean(all.mean),
        mean_tail(all.mean_tail),
        x_stride(all.x_strides.row_stride),
        residual_stride(all.residual_strides.row_stride),
        weight_stride(all.weight_stride),
        gate_stride(all.gate_stride),
        hidden_size(all.hidden_size),
        log_threads(all.log_threads),
        slots(all.slots),
        inverse_n(all.inverse_n),
        eps(all.eps),
        weight_offset(all.weight_offset),
        segments_of_row(all.segments > 1 ? static_cast<float>(all.segments) / static_cast<float>(all.rows) : 0),
        weight_dtype(all.weight_dtype),
        is_rms_norm(all.is_rms_norm) {}
};

// Without dropout, with x and y of z's type, and evenly spaced rows: behind another kernel no instruction is in a
// cache, so that less code takes less time (8 x 768: 2.31 us by all options, 1.85).
template <typename scalar_t>
__global__ void __launch_bounds__(kAnyFewRows.block) few_any_norm_kernel(const __grid_constant__ FewParams params) {
  using Row = RunTimeRow<scalar_t, 1>;
  constexpr int kVec = Row::kVec;
  __shared__ SumScratch<1, 2, 2, kAnyFewRows.block> scratch;
  const Row row(params.hidden_size, params.log_threads, params.slots);
  const int64_t y_row = row.row * row.hidden_size;
  const int col = row.first_col;
  const bool is_there = col < row.hidden_size;
  const auto* residual = static_cast<const scalar_t*>(params.residual) + row.row * params.residual_stride;
  const auto* x = static_cast<const scalar_t*>(params.x) + row.row * params.x_stride;
  // Exact for at most 1024 rows, of which each segment has the same number
  const int segment = static_cast<int>((static_cast<float>(blockIdx.x) + 0.5f) * params.segments_of_row);
  wait_for_previous_kernel();

  typename Row::Vec z[1] = {zero_vec<scalar_t, kVec>()}, others = filled_vec<scalar_t, kVec>(-0.f);
  ParameterWords<kVec> weight, bias;
  if (is_there) {
    z[0] = load_vec<scalar_t, kVec, true>(x + col);
    if (params.residual) others = load_vec<scalar_t, kVec, true>(residual + col);
  }
  const auto first = load_vec<scalar_t, 4, true>(x);
  weight.template load<scalar_t>(params.weight, params.weight_dtype, segment * params.weight_stride + row.clamped(0),
                                 1);
  bias.template load<scalar_t>(params.bias, params.weight_dtype, segment * params.weight_stride + row.clamped(0), -0.f);
  float values[kVec], factors[kVec];
  const bool is_x = !params.residual && !params.gate;
  if (is_there && !is_x) {
    unpack(z[0], values);
    if (params.gate) {
      const auto* gate = static_cast<const scalar_t*>(params.gate) + segment * params.gate_stride;
      unpack(load_vec<scalar_t, kVec, true>(gate + col), factors);
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[i] = mul(values[i], factors[i]);
    }
    unpack(others, factors);
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = add(factors[i], values[i]);
    z[0] = pack<scalar_t>(values);
    if (params.residual_out) store_raw(static_cast<scalar_t*>(params.residual_out) + y_row + col, z[0]);
  }
  const float near_mean = params.is_rms_norm ? 0 : is_x ? mean_of(first) : row.near_mean_of(z, scratch);
  const Moments<float> moments = row.moments(z, near_mean, params.is_rms_norm, params.inverse_n, scratch, [] {});
  const RowNorm<float> norm = finish_row(moments, params.inverse_n, params, row.row, col == 0);
  if (!is_there) return;
  float offsets[kVec];
  weight.template widen<scalar_t>(factors, params.weight_dtype);
  bias.template widen<scalar_t>(offsets, params.weight_dtype);
  unpack(z[0], values);
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] = fma(norm.x_hat(values[i]), factors[i] + params.weight_offset, offsets[i]);
  store_vec(static_cast<scalar_t*>(params.y) + y_row + col, values);
}

// ---- any number of rows ------------------------------------------------------------------------------------------------

// kLoads: with a load stage; else z is x.
template <typename scalar_t, int kHeld, bool kLoads>
struct AnyRow : RunTimeRow<scalar_t, kHeld> {
  using Base = RunTimeRow<scalar_t, kHeld>;
  using Base::clamped, Base::first_col, Base::for_each, Base::hidden_size, Base::kVec, Base::row;
  using typename Base::Vec;

  const AnyParams& params;

  __device__ __forceinline__ AnyRow(const AnyParams& params)
      : Base(params.hidden_size, params.log_threads, params.slots), params(params) {}

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

  __device__ __forceinline__ void store(int col, const float (&y)[kVec]) const {
    if (params.y_dtype == dtype_of<scalar_t>) {
      store_vec(static_cast<scalar_t*>(params.y) + row * hidden_size + col, y);
    } else {
      store_vec_as(params.y, params.y_dtype, row * hidden_size + col, y, kVec, true);
    }
  }

  __device__ __forceinline__ void run(SumScratch<kHeld, 2, 2>& scratch) const {
    const unsigned segment = segment_of(params, row);
    const int64_t at = segment * params.weight_stride;
    Vec z[kHeld];
    float near_mean = 0;
    if constexpr (kLoads) {
      with_type_beside<scalar_t>(params.x_dtype, [&](auto type) {
        using x_t = decltype(type);
        if constexpr (sizeof(x_t) <= sizeof(scalar_t)) load_sum<x_t>(z, segment);
      });
      if (!params.is_rms_norm) near_mean = Base::near_mean_of(z, scratch);
    } else {
      const scalar_t* x = static_cast<const scalar_t*>(params.x) + params.x_strides.offset(row);
#pragma unroll
      for (int held = 0; held < kHeld; ++held) z[held] = load_vec<scalar_t, kVec>(x + clamped(held));
      if (!params.is_rms_norm) near_mean = mean_of(load_vec<scalar_t, 4>(x));
    }
    const Moments<float> moments = Base::moments(z, near_mean, params.is_rms_norm, params.inverse_n, scratch, [] {});
    const RowNorm<float> norm = finish_row(moments, params.inverse_n, params, row, first_col == 0);
    if (kHeld > 3) optimization_barrier(z);

    const auto store_each = [&](auto type, auto rounds) {
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
          store(col, y);
        });
      }
    };
    if (!params.weight && !params.bias) {
      for_each([&](int held, int col) {
        float y[kVec];
        unpack(z[held], y);
#pragma unroll
        for (int i = 0; i < kVec; ++i) y[i] = norm.x_hat(y[i]);
        store(col, y);
      });
      return;
    }
    with_type_beside<scalar_t>(params.weight_dtype, [&](auto type) {
      if constexpr (sizeof(scalar_t) == 2) {
        if (params.rounds_x_hat) return store_each(type, std::true_type());
      }
      store_each(type, std::false_type());
    });
  }
};

// Threads of an SM, for the compiler, which then has 65536 registers for them. With a load stage 128 registers load all
// of eight vectors at once (bf16 beside fp32, 16384 columns: 394 us, by 80 registers and in batches of two 587).
template <typename scalar_t, int kHeld, bool kLoads>
constexpr int kAnyThreadsPerSm = kHeld == 8                                      ? 512
                                 : kLoads && kHeld == 6                          ? 640
                                 : !kLoads && kHeld == 5                         ? 896
                                 : kHeld > 4 || (kLoads && kHeld == 4)           ? 768
                                 : kLoads && kHeld == 3 && sizeof(scalar_t) == 4 ? 768
                                                                                 : 1024;
template <typename scalar_t, int kHeld, bool kLoads>
constexpr int kAnyBlocks = kAnyThreadsPerSm<scalar_t, kHeld, kLoads> < 1024 ? 1 : 2;

template <typename scalar_t, int kHeld, bool kLoads>
__global__ void __launch_bounds__(kAnyThreadsPerSm<scalar_t, kHeld, kLoads> / kAnyBlocks<scalar_t, kHeld, kLoads>,
                                  kAnyBlocks<scalar_t, kHeld, kLoads>)
    any_norm_kernel(const __grid_constant__ AnyParams params) {
  using Row = AnyRow<scalar_t, kHeld, kLoads>;
  __shared__ SumScratch<kHeld, 2, 2> scratch;
  if constexpr (kLoads) {
    const Row row(params);
    if (row.row < params.rows) row.run(scratch);  // rows that share a warp: as in norm_forward_kernel
  } else {
    const int rows = static_cast<int>(blockDim.x) >> params.log_threads;
    int64_t first = static_cast<int64_t>(blockIdx.x) * rows * params.iterations;
#pragma unroll 1
    for (int i = 0; i < params.iterations; ++i, first += rows) {
      Row row(params);
      row.row = first + row.part;
      if (row.row >= params.rows) return;
      if (i > 0 && row.spans_warps()) __syncthreads();  // scratch is used again
      row.run(scratch);
    }
  }
}

template <typename scalar_t>
cudaError_t launch(const KernelForwardParams& params, const LoadStage& stage, cudaStream_t stream) {
  const bool is_of_z = params.x_dtype == dtype_of<scalar_t>;
  const bool may_be_few = is_of_z && params.y_dtype == params.x_dtype && !stage.dropout.philox && !stage.rounds_x_hat &&
                          !params.interleaves && params.x_strides.is_even(params.rows) &&
                          (!stage.residual || stage.residual_strides.is_even(params.rows)) &&
                          (stage.residual || stage.gate || !stage.residual_out);
  const RunTimePlan plan = RunTimePlan::of(params.hidden_size, sizeof(scalar_t), params.rows,
                                           least_usual_threads(params.hidden_size * sizeof(scalar_t)),
                                           may_be_few ? kAnyFewRows : FewRows{}, most_any_threads<scalar_t>);
  AnyParams arguments(params, stage, plan);
  if (plan.held == 1) {
    const OverlappedLaunch launch(dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.block), stream);
    return cudaLaunchKernelEx(&launch.config, few_any_norm_kernel<scalar_t>, FewParams(arguments));
  }
  const bool loads = !is_of_z || stage.residual || stage.residual_out || stage.gate || stage.dropout.philox;
  int64_t blocks = plan.blocks;
  if (!loads && params.segments > 1 && params.segments < params.rows && !params.interleaves &&
      params.rows << plan.log_threads >= kSegmentIterations * kSegmentIterationThreads) {
    arguments.iterations = kSegmentIterations;
    blocks = (blocks + kSegmentIterations - 1) / kSegmentIterations;
  }
  const ClusterLaunch launch(blocks, plan.block, 0, 1, stream);
  return with_held<2, 3, 4, 5, 6, 8>(plan.held, [&](auto held) {
    constexpr int kHeld = decltype(held)::value;
    return cudaLaunchKernelEx(&launch.config,
                              loads ? any_norm_kernel<scalar_t, kHeld, true> : any_norm_kernel<scalar_t, kHeld, false>,
                              arguments);
  });
}

}  // namespace

cudaError_t launch_any_norm(const KernelForwardParams& params, const LoadStage& stage, cudaStream_t stream) {
  switch (stage.residual_out_dtype) {
    case DType::kFloat16: return launch<__half>(params, stage, stream);
    case DType::kBFloat16: return launch<__nv_bfloat16>(params, stage, stream);
    case DType::kFloat32: return launch<float>(params, stage, stream);
    default: return cudaErrorNotSupported;
  }
}

}  // namespace fused_layernorm
