// Forward of LayerNorm and RMSNorm.
//
//   mean = is_rms_norm ? 0 : sum(x)/N      rstd = rsqrt(sum((x-mean)^2)/N + eps)
//   x_hat = (x-mean)*rstd                  y = x_hat*(weight+weight_offset) + bias
//
// A group of threads holds each row in registers: norm_usual.cu for what most models run, norm_any.cu for what else a
// row of whole vectors may need, norm_gated.cu and forward_epilogue_*.cu for a gate or an epilogue. Ragged rows lie in
// shared memory (norm_ragged.cu); longer rows are streamed (norm_forward_long.cu), shared by the whole card
// (norm_huge.cu), or, if neither takes them, held by a cluster (forward_kernel.cuh). forward_rows.cuh explains the
// statistics.
#include "forward_kernel.cuh"
#include "launchers.h"

namespace fused_layernorm {
namespace {

// Rows in the registers of a cluster, which takes several tiles of rows that do not fit.
template <typename scalar_t>
cudaError_t launch_rows(const KernelForwardParams& params, cudaStream_t stream) {
  DeviceFacts facts;
  const cudaError_t error = device_facts(facts);
  if (error != cudaSuccess) return error;
  const auto launch_plan = [&](auto plan) {
    using Plan = decltype(plan);
    const auto kernel = norm_forward_kernel<scalar_t, Plan, false>;
    int cluster = 1;
    if constexpr (Plan::kClusters) {
      static OncePerDevice allowed;
      const cudaError_t error = allowed.run(facts.device, [&] { return allow_more(kernel, 0, facts.max_cluster); });
      if (error != cudaSuccess) return error;
      cluster = cluster_for<Plan>(vecs_of<Plan::kVec>(params.hidden_size), facts.max_cluster);
    }
    const ClusterLaunch launch(forward_blocks<Plan>(params.rows) * cluster, kForwardThreads<Plan>, 0, cluster, stream);
    return cudaLaunchKernelEx(&launch.config, kernel, params, inverse_of<acc_type<scalar_t>>(params.hidden_size),
                              Epilogue{});
  };
  return dispatch_plan<ForwardLadder<scalar_t>>(params.hidden_size, facts.max_cluster, launch_plan);
}

}  // namespace

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
  LoadStage none{};
  none.residual_out_dtype = params.x_dtype;
  const cudaError_t launched = launch_usual_norm(params, none, stream);
  if (launched != cudaErrorNotSupported) return launched;
  if (!is_long_row(params.x_dtype, params.hidden_size) && params.x_dtype != DType::kFloat64)
    return launch_any_norm(params, none, stream);
  if (is_long) {
    const cudaError_t launched = launch_forward_long(params, stream);
    if (launched != cudaErrorNotSupported) return launched;
  }
  return dispatch_type(params.x_dtype,
                       [&](auto types) { return launch_rows<typename decltype(types)::scalar_t>(params, stream); });
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
  return launch_any_norm(params, stage, stream);
}

}  // namespace fused_layernorm
