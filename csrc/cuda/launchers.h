// The launchers of the kernels. launch.cu selects one for each call.
#pragma once

#include <cuda_runtime.h>

#include "kernel_params.h"
#include "launch_plan.h"

namespace fused_layernorm {

constexpr int64_t kNoKernel = -1;  // as a workspace size: no kernel takes this call

// ---- forward -------------------------------------------------------------------------------------------------------

// norm_forward.cu: the plain norm, all strategies. With segments, weight may have every type of dispatch_types().
int64_t forward_workspace(const KernelForwardParams& params);
cudaError_t launch_forward(const KernelForwardParams& params, cudaStream_t stream);

// norm_usual.cu: what most models run, also with a residual. Returns cudaErrorNotSupported for other calls; the choice
// does not depend on the number of rows.
cudaError_t launch_usual_norm(const KernelForwardParams& params, const LoadStage& stage, cudaStream_t stream);

// norm_epilogue.cu: what most models run, of common sizes, with an epilogue; else cudaErrorNotSupported.
cudaError_t launch_epilogue_norm(const KernelForwardParams& params, const LoadStage& stage, const Epilogue& epilogue,
                                 cudaStream_t stream);

// norm_any.cu: all calls with rows of whole vectors that are not long, but for fp64.
cudaError_t launch_any_norm(const KernelForwardParams& params, const LoadStage& stage, const Epilogue& epilogue,
                            cudaStream_t stream);

// norm_ragged.cu: rows of any length that are not whole 16-byte vectors. Returns cudaErrorNotSupported for others, and
// for fp64.
cudaError_t launch_forward_ragged(const KernelForwardParams& params, cudaStream_t stream);

// norm_forward_long.cu: streams long rows through persistent blocks. Returns cudaErrorNotSupported for rows, cards or
// contexts without such a kernel; the choice does not depend on the number of rows, because the kernels round
// differently.
int64_t forward_long_workspace(const KernelForwardParams& params);
cudaError_t launch_forward_long(const KernelForwardParams& params, cudaStream_t stream);

// norm_huge.cu: rows that no other kernel takes.
bool is_huge_forward(const KernelForwardParams& params);
int64_t forward_huge_workspace(const KernelForwardParams& params);
cudaError_t launch_forward_huge(const KernelForwardParams& params, cudaStream_t stream);

// The same with stages, by one kernel without workspace; takes_stages() lists the calls. x may be 16-bit beside fp32 z;
// beside 16-bit z weight is of its type or fp32, beside fp32 z of any but fp64. With an epilogue y is of x's type.
bool takes_stages(const KernelForwardParams& params, const LoadStage& stage, const Epilogue& epilogue);
cudaError_t launch_forward(const KernelForwardParams& params, const LoadStage& stage, const Epilogue& epilogue,
                           cudaStream_t stream);

// norm_gated.cu: a gated norm; the gate is of x's dtype, and takes_gate() lists the calls. Without workspace.
bool takes_gate(const KernelForwardParams& params);
cudaError_t launch_forward(const KernelForwardParams& params, const RowGate& gate, cudaStream_t stream);

// Whether forward with a stage or a gate has a plan for such rows: x consists of whole 16-byte vectors, and z is not a
// long row.
inline bool has_fused_plan(const KernelForwardParams& params, DType z) {
  return params.hidden_size % (16 / dtype_bytes(params.x_dtype)) == 0 && !is_long_row(z, params.hidden_size);
}

// ---- backward ------------------------------------------------------------------------------------------------------

// backward_*.cu: the fused strategy. Sets `running` to the number of partial sums at params.workspace, each
// [grad_weight, grad_bias, with a gate grad_gate], and launches if `launches`; 0: this strategy does not take the call.
// That depends on types, stages, hidden_size and card, and for the plain norm on the number of rows and the wanted
// gradients.
struct FusedCall {
  bool launches = false;
  cudaStream_t stream = nullptr;
  int running = 0;
  int64_t exchange_bytes = 0;  // of params.workspace, behind the partial sums
};
template <typename scalar_t>
cudaError_t backward_fused(const KernelBackwardParams& params, const GradStages& stages, FusedCall& call);

// norm_backward.cu: all strategies. With segments, weight may have every type of dispatch_types(). With stages one
// kernel, or kNoKernel.
int64_t backward_workspace(const KernelBackwardParams& params, const GradStages& stages);  // or kNoKernel
cudaError_t launch_backward(const KernelBackwardParams& params, const GradStages& stages, cudaStream_t stream);

// Whether one of them takes all stages, or the interleaved segments, which only the fused strategy has.
bool takes_stages(const KernelBackwardParams& params, const GradStages& stages);
// Whether the split strategy has the stages: only a residual, whose gradient is that of x, of rows of whole vectors.
inline bool takes_split(const KernelBackwardParams& params, const GradStages& stages) {
  const bool has_more = stages.from_y || stages.epilogue.any() || stages.row_gate.gate || stages.gate ||
                        stages.dropout.philox || params.segments > 1;
  const DType dtype = params.x_dtype;
  return !has_more && dtype != DType::kFloat64 && stages.grad_output_dtype == dtype &&
         stages.grad_input_dtype == dtype &&
         (!stages.grad_residual || (!params.grad_input && stages.grad_residual_dtype == dtype)) &&
         params.hidden_size % (16 / dtype_bytes(dtype)) == 0 && params.hidden_size <= kClusterColumns &&
         params.rows <= kFusedMaxRows;
}

// norm_backward.cu: reduces the `partials` partial sums at params.workspace, each of `sums` rows: grad_weight,
// grad_bias and, with a gate, grad_gate.
cudaError_t launch_backward_finalize(const KernelBackwardParams& params, int partials, int sums, cudaStream_t stream);

// norm_huge.cu: rows that no other kernel takes.
bool is_huge_backward(const KernelBackwardParams& params);
int64_t backward_huge_workspace(const KernelBackwardParams& params);
cudaError_t launch_backward_huge(const KernelBackwardParams& params, cudaStream_t stream);

// norm_backward_per_row.cu: per-row weights, which must be given; without workspace. `stages`: without dropout,
// epilogue and from_y. Beside fp32 x, grad_output, weight, gate and the gated x may be 16-bit.
inline bool has_per_row_kernel(const KernelBackwardParams& params) {
  return params.segments > 1 && params.segments == params.rows && params.hidden_size <= kClusterColumns &&
         !params.accumulate;
}
cudaError_t launch_backward_per_row(const KernelBackwardParams& params, const GradStages& stages, cudaStream_t stream);

}  // namespace fused_layernorm
