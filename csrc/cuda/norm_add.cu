// Forward with a load stage as one kernel: the norm of z = residual + dropout(x), or of residual + gate * x.
#include "dispatch.cuh"
#include "forward_kernel.cuh"
#include "forward_rows.cuh"
#include "kernel_params.h"
#include "launch_plan.h"
#include "launchers.h"

namespace fused_layernorm {
namespace {

// Calls f(Types<x, z>{}) for the types that a kernel has the stage for; x is also that of a weight that is not fp32.
template <typename F>
cudaError_t dispatch_add(const KernelForwardParams& params, const AddStage& stage, F&& f) {
  const DType x = params.x_dtype, z = stage.residual_out_dtype;
  if (!has_fused_plan(params, z) || (stage.residual && stage.residual_dtype != z) ||
      (stage.gate && stage.dropout.philox))
    return cudaErrorNotSupported;
  return dispatch_add_types(x, z, f);
}

}  // namespace

bool has_add_stage(const KernelForwardParams& params, const AddStage& stage) {
  return dispatch_add(params, stage, [](auto) { return cudaSuccess; }) == cudaSuccess;
}

cudaError_t launch_forward(const KernelForwardParams& params, const AddStage& stage, cudaStream_t stream) {
  return dispatch_add(params, stage, [&](auto types) {
    using x_t = typename decltype(types)::scalar_t;
    using scalar_t = typename decltype(types)::weight_t;
    return launch_fused_forward<scalar_t, x_t>(params, Add<x_t>{stage}, stream);
  });
}

}  // namespace fused_layernorm
