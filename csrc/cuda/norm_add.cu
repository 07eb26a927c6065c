// Forward with a load stage as one kernel: the norm of z = residual + dropout(x), or of residual + gate * x.
#include "dispatch.cuh"
#include "forward_kernel.cuh"
#include "forward_rows.cuh"
#include "kernel_params.h"
#include "launch_plan.h"
#include "launchers.h"

namespace fused_layernorm {

bool has_add_stage(const KernelForwardParams& params, const AddStage& stage) {
  const DType x = params.x_dtype, z = stage.residual_out_dtype;
  return has_fused_plan(params, z) && x != DType::kFloat64 && (z == x || z == DType::kFloat32) &&
         (!stage.residual || stage.residual_dtype == z) && !(stage.gate && stage.dropout.philox);
}

// x may be of 16 bits beside fp32 z; a weight is of x's type or fp32.
cudaError_t launch_forward(const KernelForwardParams& params, const AddStage& stage, cudaStream_t stream) {
  if (!has_add_stage(params, stage)) return cudaErrorNotSupported;
  switch (stage.residual_out_dtype) {
    case DType::kFloat16: return launch_fused_forward<__half>(params, Add<__half>{stage}, stream);
    case DType::kBFloat16: return launch_fused_forward<__nv_bfloat16>(params, Add<__nv_bfloat16>{stage}, stream);
    default: return launch_fused_forward<float>(params, Add<float>{stage}, stream);
  }
}

}  // namespace fused_layernorm
