// Forward of LayerNorm and RMSNorm.
//
//   mean = is_rms_norm ? 0 : sum(x)/N      rstd = rsqrt(sum((x-mean)^2)/N + eps)
//   x_hat = (x-mean)*rstd                  y = x_hat*(weight+weight_offset) + bias
//
// A group of threads, or a cluster, holds each row in registers (forward_kernel.cuh, forward_*.cu). forward_rows.cuh
// explains the statistics. Longer rows are streamed (norm_forward_long.cu) or shared by the whole card (norm_huge.cu).
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
  if (is_long) {
    const cudaError_t launched = launch_forward_long(params, stream);
    if (launched != cudaErrorNotSupported) return launched;
  }
  return dispatch_type(params.x_dtype,
                       [&](auto types) { return launch_rows<typename decltype(types)::scalar_t>(params, stream); });
}

namespace {

// Of z, which selects the kernel. A gated norm whose gate comes first never rounds z.
DType z_dtype_of(const KernelForwardParams& params, const ForwardStages& stages) {
  if (stages.row_gate.gate && !stages.row_gate.gates_y) return accumulation_dtype(params.x_dtype);
  return stages.load.residual_out ? stages.load.residual_out_dtype : params.x_dtype;
}

}  // namespace

bool takes_stages(const KernelForwardParams& params, const ForwardStages& stages) {
  DeviceFacts facts;
  if (device_facts(facts) != cudaSuccess) return false;
  const bool is_double = params.x_dtype == DType::kFloat64;
  return (is_double || params.hidden_size * dtype_bytes(params.x_dtype) % 16 == 0) &&
         params.hidden_size <= staged_columns(z_dtype_of(params, stages), facts.max_cluster);
}

cudaError_t launch_forward(const KernelForwardParams& params, const ForwardStages& stages, cudaStream_t stream) {
  const bool has_epilogue_alone = stages.epilogue.any() && !stages.load.residual_out && !stages.row_gate.gate;
  return dispatch_type(z_dtype_of(params, stages), [&](auto types) {
    using scalar_t = typename decltype(types)::scalar_t;
    if constexpr (sizeof(scalar_t) < 8) {
      if (has_epilogue_alone && params.segments <= 1 && params.y_dtype == params.x_dtype &&
          !is_long_row(params.x_dtype, params.hidden_size))
        return stages.epilogue.dropout.philox ? launch_epilogue<scalar_t, true>(params, stages.epilogue, stream)
                                              : launch_epilogue<scalar_t, false>(params, stages.epilogue, stream);
    }
    return launch_staged<scalar_t>(params, stages, stream);
  });
}

}  // namespace fused_layernorm
