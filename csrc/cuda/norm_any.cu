// Forward of the calls that norm_usual.cu and norm_epilogue.cu do not take, of rows that a block holds: with segments,
// without weight, with weight or y of another type than x, with every load stage and epilogue. norm_forward.cu has the
// formulas.
#include "any_rows.cuh"
#include "launchers.h"

namespace fused_layernorm {
namespace {

// ---- few rows: a vector a thread, and all loads before the first use -------------------------------------------------

struct FewParams {
  const void *x, *residual, *weight, *bias, *gate;
  void *y, *residual_out, *rstd, *mean, *mean_tail;
  int64_t x_stride, residual_stride, weight_stride, gate_stride;
  int hidden_size, log_threads, slots;
  float inverse_n, eps, weight_offset;
  float most_offset;
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
        most_offset(all.most_offset),
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
  typename Row::template First<scalar_t> first;
  first.load(x, nullptr);
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
  const float near_mean = params.is_rms_norm ? 0 : is_x ? first.median() : row.near_mean_of(z, scratch);
  const Moments<float> moments = row.moments(z, near_mean, params.most_offset, params.inverse_n, scratch, [] {});
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

// Threads of an SM, for the compiler, which then has 65536 registers for them. With a load stage 128 registers load all
// of eight vectors at once (bf16 beside fp32, 16384 columns: 394 us, by 80 registers and in batches of two 587).
template <typename scalar_t, int kHeld, Stages stages>
constexpr int any_threads_per_sm() {
  if (kHeld == 8) return 512;
  if (stages == Stages::kNone) return kHeld == 6 ? 768 : kHeld == 5 ? 896 : 1024;
  return kHeld == 6 ? 640 : kHeld == 5 || kHeld == 4 || (kHeld == 3 && sizeof(scalar_t) == 4) ? 768 : 1024;
}
template <typename scalar_t, int kHeld, Stages stages>
constexpr int kAnyBlocks = any_threads_per_sm<scalar_t, kHeld, stages>() < 1024 ? 1 : 2;

template <typename scalar_t, int kHeld, Stages stages>
__global__ void __launch_bounds__(any_threads_per_sm<scalar_t, kHeld, stages>() / kAnyBlocks<scalar_t, kHeld, stages>,
                                  kAnyBlocks<scalar_t, kHeld, stages>)
    any_norm_kernel(const __grid_constant__ AnyParams params) {
  using Row = AnyRow<scalar_t, kHeld, stages>;
  __shared__ SumScratch<kHeld, 2, 2> scratch;
  if constexpr (stages != Stages::kNone) {
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
cudaError_t launch(const KernelForwardParams& params, const LoadStage& stage, const Epilogue& epilogue,
                   cudaStream_t stream) {
  const bool is_of_z = params.x_dtype == dtype_of<scalar_t>, has_epilogue = epilogue.any();
  const bool may_be_few = !has_epilogue && is_of_z && params.y_dtype == params.x_dtype && !stage.dropout.philox &&
                          !stage.rounds_x_hat && !params.interleaves && params.x_strides.is_even(params.rows) &&
                          (!stage.residual || stage.residual_strides.is_even(params.rows)) &&
                          (stage.residual || stage.gate || !stage.residual_out);
  const RunTimePlan plan =
      RunTimePlan::of(params.hidden_size, sizeof(scalar_t), params.rows,
                      least_usual_threads(params.hidden_size * sizeof(scalar_t)), may_be_few ? kAnyFewRows : FewRows{},
                      has_epilogue ? most_epilogue_threads<scalar_t> : most_any_threads<scalar_t>);
  AnyParams arguments(params, stage, epilogue, plan);
  if (plan.held == 1) {
    const OverlappedLaunch launch(dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.block), stream);
    return cudaLaunchKernelEx(&launch.config, few_any_norm_kernel<scalar_t>, FewParams(arguments));
  }
  int64_t blocks = plan.blocks;
  if (!arguments.loads && !has_epilogue && params.segments > 1 && params.segments < params.rows &&
      !params.interleaves && params.rows << plan.log_threads >= kSegmentIterations * kSegmentIterationThreads) {
    arguments.iterations = kSegmentIterations;
    blocks = (blocks + kSegmentIterations - 1) / kSegmentIterations;
  }
  const ClusterLaunch launch(blocks, plan.block, 0, 1, stream);
  if (has_epilogue) {
    return with_constant<2, 4, 6, 8>(plan.held, [&](auto held) {
      return cudaLaunchKernelEx(&launch.config, any_norm_kernel<scalar_t, held, Stages::kLoadAndEpilogue>, arguments);
    });
  }
  return with_constant<2, 3, 4, 5, 6, 8>(plan.held, [&](auto held) {
    return cudaLaunchKernelEx(&launch.config,
                              arguments.loads ? any_norm_kernel<scalar_t, held, Stages::kLoad>
                                              : any_norm_kernel<scalar_t, held, Stages::kNone>,
                              arguments);
  });
}

}  // namespace

cudaError_t launch_any_norm(const KernelForwardParams& params, const LoadStage& stage, const Epilogue& epilogue,
                            cudaStream_t stream) {
  switch (stage.residual_out_dtype) {
    case DType::kFloat16: return launch<__half>(params, stage, epilogue, stream);
    case DType::kBFloat16: return launch<__nv_bfloat16>(params, stage, epilogue, stream);
    case DType::kFloat32: return launch<float>(params, stage, epilogue, stream);
    default: return cudaErrorNotSupported;
  }
}

}  // namespace fused_layernorm
