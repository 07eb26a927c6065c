// Forward of LayerNorm and RMSNorm.
//
//   mean = is_rms_norm ? 0 : sum(x)/N      rstd = rsqrt(sum((x-mean)^2)/N + eps)
//   x_hat = (x-mean)*rstd                  y = x_hat*(weight+weight_offset) + bias
//
// A group of threads, or a cluster, holds each row in registers: norm_usual.cu for what most models run, else
// forward_kernel.cuh and forward_*.cu. forward_rows.cuh explains the statistics. Ragged rows lie in shared memory
// (norm_ragged.cu); longer rows are streamed (norm_forward_long.cu) or shared by the whole card (norm_huge.cu).
#include "dispatch.cuh"
#include "launch_plan.h"
#include "launchers.h"

namespace fused_layernorm {

int64_t forward_workspace(const KernelForwardParams& params) {
  if (is_huge_forward(params)) return forward_huge_workspace(params);
  return is_long_row(params.x_dtype, params.hidden_size) ? kRowCounterBytes : 0;
}

cudaError_t launch_forward(const KernelForwardParams& params, cudaStream_t stream) {
  if (params.rows >= 2 * kMaxRowsOfLaunch) {
    for (int64_t first = 0; first < params.rows; first += kMaxRowsOfLaunch) {
      const int64_t rows = std::min(kMaxRowsOfLaunch, params.rows - first);
      const cudaError_t launched = launch_forward(part_of(params, first, rows), stream);
      if (launched != cudaSuccess) return launched;
    }
    return cudaSuccess;
  }
  if (!is_huge_forward(params)) {
    const cudaError_t launched = launch_forward_ragged(params, stream);
    if (launched != cudaErrorNotSupported) return launched;
  }
  // The streaming kernel keeps one weight for all rows. Where the next row has another, clusters hold a row in
  // registers; their last plan takes rows of any length
  const bool is_per_row = params.segments > 1 && (params.segments == params.rows || params.interleaves);
  const bool is_long = is_long_row(params.x_dtype, params.hidden_size) && !is_per_row;
  if (params.segments > 1 && (is_huge_forward(params) || is_long)) {
    for (int segment = 0; segment < params.segments; ++segment) {
      const cudaError_t launched = launch_forward(segment_of_rows(params, segment), stream);
      if (launched != cudaSuccess) return launched;
    }
    return cudaSuccess;
  }
  if (is_huge_forward(params)) return launch_forward_huge(params, stream);
  const cudaError_t launched = launch_usual_norm(params, {}, stream);
  if (launched != cudaErrorNotSupported) return launched;
  if (is_long) {
    const cudaError_t launched = launch_forward_long(params, stream);
    if (launched != cudaErrorNotSupported) return launched;
  }
  return dispatch_type(params.x_dtype,
                       [&](auto types) { return launch_rows<typename decltype(types)::scalar_t>(params, stream); });
}

bool takes_gate(const KernelForwardParams& params) {
  return has_fused_plan(params, params.x_dtype) && params.x_dtype != DType::kFloat64;
}

cudaError_t launch_forward(const KernelForwardParams& params, const RowGate& gate, cudaStream_t stream) {
  switch (params.x_dtype) {
    case DType::kFloat16: return launch_gate<__half>(params, gate, stream);
    case DType::kBFloat16: return launch_gate<__nv_bfloat16>(params, gate, stream);
    default: return launch_gate<float>(params, gate, stream);
  }
}

bool takes_load_stage(const KernelForwardParams& params, const LoadStage& stage) {
  const DType x = params.x_dtype, z = stage.residual_out_dtype;
  return has_fused_plan(params, z) && x != DType::kFloat64 && (z == x || z == DType::kFloat32) &&
         (!stage.residual || stage.residual_dtype == z) && !(stage.gate && stage.dropout.philox);
}

cudaError_t launch_forward(const KernelForwardParams& params, const LoadStage& stage, cudaStream_t stream) {
  if (!takes_load_stage(params, stage)) return cudaErrorNotSupported;
  if (stage.residual) {
    const cudaError_t launched = launch_usual_norm(params, stage, stream);
    if (launched != cudaErrorNotSupported) return launched;
  }
  switch (stage.residual_out_dtype) {
    case DType::kFloat16: return launch_load<__half>(params, stage, stream);
    case DType::kBFloat16: return launch_load<__nv_bfloat16>(params, stage, stream);
    default: return launch_load<float>(params, stage, stream);
  }
}

}  // namespace fused_layernorm
