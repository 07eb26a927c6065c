// Forward of RMSNorm for what most models run: y = z * rstd * (weight + weight_offset), z = x or residual + x, all of
// one type.
#include "forward_rows.cuh"
#include "launchers.h"
#include "run_time_rows.cuh"

namespace fused_layernorm {
namespace {

struct RmsParams {
  const void *x, *residual, *weight;
  void *y, *residual_out, *rstd;
  RowStrides x_strides, residual_strides;
  int64_t rows;
  int hidden_size, log_threads, slots;
  float inverse_n, eps, weight_offset;
};

template <typename scalar_t, int kHeld>
__global__ void __launch_bounds__(kRunTimeBlock<kHeld>) rms_norm_kernel(const __grid_constant__ RmsParams params) {
  using Row = RunTimeRow<scalar_t, kHeld>;
  constexpr int kVec = Row::kVec;
  __shared__ SumScratch<kHeld, 1> scratch;
  const Row row(params.hidden_size, params.log_threads, params.slots);
  if (row.row >= params.rows) return;  // rows that share a warp: as in norm_forward_kernel
  wait_for_previous_kernel();
  typename Row::Vec z[kHeld], weights[kHeld];
  row.template load<scalar_t>(z, params, [&] {
    row.for_each([&](int held, int col) {
      weights[held] = load_vec<scalar_t, kVec, true>(static_cast<const scalar_t*>(params.weight) + col);
    });
  });
  float sum[1] = {};
#pragma unroll
  for (int held = 0; held < kHeld; ++held) {
    float values[kVec], squares = 0;
    unpack(z[held], values);
#pragma unroll
    for (int i = 0; i < kVec; ++i) squares = fma(values[i], values[i], squares);
    sum[0] += squares;
  }
  row.add_up(sum, scratch, 0);
  const float rstd = inverse_sqrt(fma(sum[0], params.inverse_n, params.eps));
  if (params.rstd && row.first_col == 0) static_cast<float*>(params.rstd)[row.row] = rstd;
  scalar_t* y = static_cast<scalar_t*>(params.y) + row.row * row.hidden_size;
  row.for_each([&](int held, int col) {
    float values[kVec], scale[kVec];
    unpack(z[held], values);
    unpack(weights[held], scale);
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = values[i] * rstd * (scale[i] + params.weight_offset);
    store_vec(y + col, values);
  });
}

}  // namespace

cudaError_t launch_rms_norm(const KernelForwardParams& params, const LoadStage& stage, cudaStream_t stream) {
  if (!params.is_rms_norm || !params.weight || params.bias || params.segments > 1 || stage.rounds_x_hat || stage.gate ||
      stage.dropout.philox || params.x_dtype == DType::kFloat64 || params.weight_dtype != params.x_dtype ||
      params.y_dtype != params.x_dtype || params.hidden_size < kLeastRmsColumns ||
      params.hidden_size % (16 / dtype_bytes(params.x_dtype)) != 0 ||
      (stage.residual && (stage.residual_dtype != params.x_dtype || stage.residual_out_dtype != params.x_dtype)))
    return cudaErrorNotSupported;
  return dispatch_type(params.x_dtype, [&](auto types) -> cudaError_t {
    using scalar_t = typename decltype(types)::scalar_t;
    if constexpr (sizeof(scalar_t) == 8) {
      return cudaErrorNotSupported;
    } else {
      const RunTimePlan plan = RunTimePlan::of(params.hidden_size, sizeof(scalar_t), params.rows);
      if (plan.held == 0) return cudaErrorNotSupported;
      const RmsParams arguments{params.x,
                                stage.residual,
                                params.weight,
                                params.y,
                                stage.residual_out,
                                params.rstd,
                                params.x_strides,
                                stage.residual_strides,
                                params.rows,
                                static_cast<int>(params.hidden_size),
                                plan.log_threads,
                                plan.slots,
                                inverse_of<float>(params.hidden_size),
                                static_cast<float>(params.eps),
                                params.weight_offset != 0 ? static_cast<float>(params.weight_offset) : -0.f};  // none
      return with_held<scalar_t>(plan, [&](auto held) {
        const OverlappedLaunch launch(dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.block), stream);
        return cudaLaunchKernelEx(&launch.config, rms_norm_kernel<scalar_t, decltype(held)::value>, arguments);
      });
    }
  });
}

}  // namespace fused_layernorm
