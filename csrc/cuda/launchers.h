// The launchers of the kernels, each for the calls that its kernels take as they are; launch.cu picks among them.
#pragma once

#include <cuda_runtime.h>

#include "kernel_params.h"
#include "launch_plan.h"

namespace fused_layernorm {

constexpr int64_t kNoKernel = -1;  // a workspace size: no kernel takes this call

// ---- forward -------------------------------------------------------------------------------------------------------

// norm_forward.cu: the plain norm, by every strategy. With segments, weight of all types that dispatch_types() lists.
int64_t forward_workspace(const KernelForwardParams& params);
cudaError_t launch_forward(const KernelForwardParams& params, cudaStream_t stream);

// The same with a load stage, without workspace. x may be of 16 bits beside fp32 z; weight is of x's type or fp32.
bool has_add_stage(const KernelForwardParams& params, const AddStage& stage);
cudaError_t launch_forward(const KernelForwardParams& params, const AddStage& stage, cudaStream_t stream);

// forward_*.cu and norm_after_*.cu: rows that a group of threads or a cluster holds, of scalar_t; with a load stage, of
// z's type; with an epilogue, without workspace: has_after_stage() says for what.
template <typename scalar_t>
cudaError_t launch_rows(const KernelForwardParams& params, cudaStream_t stream);
template <typename scalar_t>
cudaError_t launch_add(const KernelForwardParams& params, const AddStage& stage, cudaStream_t stream);
template <typename scalar_t>
cudaError_t launch_after(const KernelForwardParams& params, const AfterNorm& after, cudaStream_t stream);

// Whether the plans of forward with a stage hold such rows, where the norm is of z's type: rows of x, the shorter ones,
// of whole 16 bytes, that are not long.
inline bool has_fused_plan(const KernelForwardParams& params, DType z) {
  return params.hidden_size % (16 / dtype_bytes(params.x_dtype)) == 0 && !is_long_row(z, params.hidden_size) &&
         params.y_dtype == params.x_dtype;
}
inline bool has_after_stage(const KernelForwardParams& params) {
  return has_fused_plan(params, params.x_dtype) && params.x_dtype != DType::kFloat64 && params.segments <= 1;
}

// ---- backward ------------------------------------------------------------------------------------------------------

// backward_*.cu: the fused strategy. Sets `running` to how many partial sums it leaves at params.workspace, each
// [grad_weight, grad_bias, with a gate grad_gate], and launches if asked to; 0: it is not for this call. By types,
// stages, hidden_size and card, and for the plain norm by the number of rows and which gradients are wanted.
struct FusedCall {
  bool launches = false;
  cudaStream_t stream = nullptr;
  int running = 0;
};
template <typename scalar_t>
cudaError_t backward_fused(const KernelBackwardParams& params, const GradStages& stages, FusedCall& call);

// norm_backward.cu: every strategy. With segments, weight of all types that dispatch_types() lists. With stages by one
// kernel, or not at all.
int64_t backward_workspace(const KernelBackwardParams& params, const GradStages& stages);  // or kNoKernel
cudaError_t launch_backward(const KernelBackwardParams& params, const GradStages& stages, cudaStream_t stream);

// norm_backward_each.cu: each row has a weight of its own, which is given; without workspace. `stages`: without
// dropout, epilogue and from_y. Beside fp32 x, grad_output, weight, gate and the gate's x may be 16-bit.
inline bool has_each_kernel(const KernelBackwardParams& params) {
  return params.segments > 1 && params.segments == params.rows && params.hidden_size <= kHugeBackwardColumns &&
         !params.accumulate;
}
cudaError_t launch_backward_each(const KernelBackwardParams& params, const GradStages& stages, cudaStream_t stream);

}  // namespace fused_layernorm
