// Forward of LayerNorm and RMSNorm.
//
//   mean = is_rms_norm ? 0 : sum(x)/N      rstd = rsqrt(sum((x-mean)^2)/N + eps)
//   x_hat = (x-mean)*rstd                  y = x_hat*(weight+weight_offset) + bias
//
// Each row is in the registers of a group of threads, or of a cluster (forward_kernel.cuh). How the statistics are put
// together is said in forward_rows.cuh; rows too long for this are streamed (norm_forward_long.cu), or shared by the
// whole card (norm_huge.cu).
#include "dispatch.cuh"
#include "forward_kernel.cuh"
#include "forward_rows.cuh"
#include "kernel_params.h"
#include "launch_plan.h"
#include "launchers.h"
#include "vector_io.cuh"

namespace fused_layernorm {

int64_t forward_workspace(const KernelForwardParams& params) {
  if (is_huge_forward(params)) return forward_huge_workspace(params);
  return is_long_row(params.x_dtype, params.hidden_size) ? kRowCounterBytes : 0;
}

cudaError_t launch_forward(const KernelForwardParams& params, cudaStream_t stream) {
  int device = 0;
  DeviceFacts facts;
  const cudaError_t error = device_facts(device, facts);
  if (error != cudaSuccess) return error;
  if (params.rows >= 2 * kMaxRowsOfLaunch) {
    for (int64_t first = 0; first < params.rows; first += kMaxRowsOfLaunch) {
      const int64_t rows = std::min(kMaxRowsOfLaunch, params.rows - first);
      const cudaError_t launched = launch_forward(part_of(params, first, rows), stream);
      if (launched != cudaSuccess) return launched;
    }
    return cudaSuccess;
  }
  // Streams keep weights for all of their rows. Where each has its own, clusters hold a row in registers
  const bool is_each = params.segments > 1 && params.segments == params.rows;
  const bool is_long = is_long_row(params.x_dtype, params.hidden_size) && !is_each;
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
  return dispatch_type(params.x_dtype, [&](auto types) {
    using scalar_t = typename decltype(types)::scalar_t;
    using weight_t = typename decltype(types)::weight_t;
    const auto launch_plan = [&](auto plan) {
      using Plan = decltype(plan);
      [[maybe_unused]] constexpr int kRows = kForwardThreads<Plan> / Plan::kThreads;
      const auto inverse_n = inverse_of<acc_type<scalar_t>>(params.hidden_size);
      if constexpr (kMayBeEager<scalar_t, Plan>) {
        using Plain = PlainForwardParams<scalar_t, int>;
        const int64_t blocks = (params.rows + kRows - 1) / kRows;
        if (blocks <= kEagerBlocks<Plan> && Plain::holds(params)) {
          const OverlappedLaunch launch(dim3(static_cast<unsigned>(blocks)), dim3(kForwardThreads<Plan>), stream);
          return cudaLaunchKernelEx(&launch.config, norm_forward_kernel<scalar_t, weight_t, Plan, true, NotFused>,
                                    Plain(params), inverse_n, NotFused{});
        }
      }
      const auto kernel = norm_forward_kernel<scalar_t, weight_t, Plan, false, NotFused>;
      int cluster = 1;
      if constexpr (Plan::kClusters) {
        static OncePerDevice allowed;
        const cudaError_t error = allowed.run(device, [&] { return allow_more(kernel, 0, facts.max_cluster); });
        if (error != cudaSuccess) return error;
        cluster = cluster_for<Plan>(vecs_of<Plan::kVec>(params.hidden_size), facts.max_cluster);
      }
      KernelForwardParams told = params;
      const ClusterLaunch launch(forward_blocks<scalar_t, weight_t, Plan, NotFused>(told) * cluster,
                                 kForwardThreads<Plan>, 0, cluster, stream);
      if (kIsStaged<scalar_t, Plan>)
        told.x_end =
            static_cast<const scalar_t*>(params.x) + params.x_strides.offset(params.rows - 1) + params.hidden_size;
      return cudaLaunchKernelEx(&launch.config, kernel, told, inverse_n, NotFused{});
    };
    return dispatch_rows<ForwardLadder<scalar_t>, RaggedForwardLadder<scalar_t>, scalar_t>(
        params.hidden_size, facts.max_cluster, launch_plan);
  });
}

}  // namespace fused_layernorm
