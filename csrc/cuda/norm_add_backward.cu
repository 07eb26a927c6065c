// Backward with a stage as one kernel and the sum of its partial weight gradients: of the norm of z = residual +
// dropout(x) or residual + gate * x, of dropout(activation(norm)), and from forward's y.
#include "backward_fused.cuh"
#include "backward_rows.cuh"
#include "dispatch.cuh"
#include "kernel_params.h"
#include "launch_plan.h"
#include "launchers.h"

namespace fused_layernorm {
namespace {

struct FusedLaunch {
  int cluster, depth, running;  // blocks that share a row, stages of the ring, clusters at once
};

template <typename scalar_t, typename Stage>
struct StageLadder {
  using type = std::conditional_t<
      kHasAfter<Stage>, AfterGradLadder<scalar_t>,
      std::conditional_t<kHasGate<Stage>, GateGradLadder<scalar_t>,
                         std::conditional_t<kIsFromY<Stage>, FromYLadder<scalar_t>, AddGradLadder<scalar_t>>>>;
};

// Calls f(Types<x, z>{}, plan, launch) where a kernel has the stage.
template <template <typename> class Stage, typename F>
cudaError_t dispatch_stage(const KernelBackwardParams& params, DType x, bool drops_y, F&& f) {
  if (params.rows > kFusedMaxRows || params.segments > kMaxFusedSegments ||
      params.hidden_size % (16 / dtype_bytes(x)) != 0)
    return cudaErrorNotSupported;
  int device = 0;
  DeviceFacts facts;
  const cudaError_t error = device_facts(device, facts);
  if (error != cudaSuccess) return error;
  return dispatch_add_types(x, params.x_dtype, [&](auto types) {
    using x_t = typename decltype(types)::scalar_t;
    using scalar_t = typename decltype(types)::weight_t;
    if constexpr (kNeedsBias<Stage<x_t>> && !std::is_same<x_t, scalar_t>::value) {
      return cudaErrorNotSupported;
    } else {
      if (kNeedsBias<Stage<x_t>> && params.segments > 1) return cudaErrorNotSupported;
      const auto launch_plan = [&](auto plan) {
        using Plan = decltype(plan);
        const int64_t vec_count = params.hidden_size / Plan::kVec;
        const int cluster = cluster_for<Plan>(vec_count, facts.max_cluster);
        if (vec_count > static_cast<int64_t>(cluster) * Plan::kThreads * Plan::kVecs) return cudaErrorNotSupported;
        Residence residence;
        const cudaError_t error = residence_of<scalar_t, Plan, Stage<x_t>>(device, facts, cluster, residence);
        if (error != cudaSuccess) return error;
        if (residence.clusters == 0) return cudaErrorNotSupported;
        return f(types, plan, FusedLaunch{cluster, residence.depth, running_clusters<Plan>(params, residence)});
      };
      if constexpr (kHasAfter<Stage<x_t>>) {
        if (drops_y) return dispatch_plan<DropGradLadder<scalar_t>>(params.hidden_size, facts.max_cluster, launch_plan);
      }
      using LadderOf = typename StageLadder<scalar_t, Stage<x_t>>::type;
      return dispatch_plan<LadderOf>(params.hidden_size, facts.max_cluster, launch_plan);
    }
  });
}

template <typename F>
cudaError_t dispatch(const KernelBackwardParams& params, const AddGradStage& stage, F&& f) {
  const DType x = stage.grad_input_dtype;
  if (stage.grad_output_dtype != x || (stage.grad_residual && stage.grad_residual_dtype != params.x_dtype))
    return cudaErrorNotSupported;
  return dispatch_stage<AddGrad>(params, x, false, f);
}
template <typename F>
cudaError_t dispatch(const KernelBackwardParams& params, const GateGradStage& stage, F&& f) {
  const DType x = stage.grad_input_dtype;
  if (stage.grad_output_dtype != x || (stage.grad_residual && stage.grad_residual_dtype != params.x_dtype))
    return cudaErrorNotSupported;
  return dispatch_stage<GateGrad>(params, x, false, f);
}
template <typename F>
cudaError_t dispatch(const KernelBackwardParams& params, const AfterNorm& after, F&& f) {
  return dispatch_stage<AfterGrad>(params, params.x_dtype, after.dropout.philox, f);
}
template <typename F>
cudaError_t dispatch(const KernelBackwardParams& params, const FromYStage&, F&& f) {
  return dispatch_stage<FromY>(params, params.x_dtype, false, f);
}

// The stage as the kernel reads it.
template <typename Types>
AddGrad<typename Types::scalar_t> kernel_stage(Types, const KernelBackwardParams& params, AddGradStage stage) {
  if (!params.grad_input && !stage.grad_residual) stage.grad_residual_out = nullptr;  // nobody reads it
  return {stage};
}
template <typename Types>
GateGrad<typename Types::scalar_t> kernel_stage(Types, const KernelBackwardParams&, const GateGradStage& stage) {
  return {stage};
}
template <typename Types>
AfterGrad<typename Types::scalar_t> kernel_stage(Types, const KernelBackwardParams& params, const AfterNorm& after) {
  constexpr bool kQuick = sizeof(typename Types::scalar_t) == 2;
  return {AfterGradStage::of<kQuick>(after, params.hidden_size)};
}
template <typename Types>
FromY<typename Types::scalar_t> kernel_stage(Types, const KernelBackwardParams&, const FromYStage& stage) {
  return {stage};
}

}  // namespace

template <typename Stage>
int64_t backward_workspace(const KernelBackwardParams& params, const Stage& stage) {
  int64_t bytes = kNoKernel;
  dispatch(params, stage, [&](auto, auto, const FusedLaunch& launch) {
    bytes = 0;
    if (params.grad_weight || params.grad_bias || params.grad_gate)
      bytes = static_cast<int64_t>(launch.running) * (params.grad_gate ? 3 : 2) * params.hidden_size *
              static_cast<int64_t>(sizeof(float));
    return cudaSuccess;
  });
  return bytes;
}

template <typename Stage>
cudaError_t launch_backward(const KernelBackwardParams& params, const Stage& stage, cudaStream_t stream) {
  return dispatch(params, stage, [&](auto types, auto plan, const FusedLaunch& launch) {
    using scalar_t = typename decltype(types)::weight_t;
    using Plan = decltype(plan);
    const auto told = kernel_stage(types, params, stage);
    using Told = std::remove_const_t<decltype(told)>;
    const ClusterLaunch persistent(
        launch.running * launch.cluster, kFusedThreads<Plan>,
        launch.depth * RowRing<scalar_t, Plan, Told>::kStageBytes + kKeptBytes<scalar_t, Plan, Told>, launch.cluster,
        stream);
    const cudaError_t error = cudaLaunchKernelEx(&persistent.config, norm_backward_fused_kernel<scalar_t, Plan, Told>,
                                                 params, inverse_of<float>(params.hidden_size), launch.depth, told);
    if (error != cudaSuccess || !(params.grad_weight || params.grad_bias || params.grad_gate)) return error;
    return launch_backward_finalize(params, launch.running, stream);
  });
}

template int64_t backward_workspace(const KernelBackwardParams&, const AddGradStage&);
template int64_t backward_workspace(const KernelBackwardParams&, const GateGradStage&);
template int64_t backward_workspace(const KernelBackwardParams&, const AfterNorm&);
template int64_t backward_workspace(const KernelBackwardParams&, const FromYStage&);
template cudaError_t launch_backward(const KernelBackwardParams&, const AddGradStage&, cudaStream_t);
template cudaError_t launch_backward(const KernelBackwardParams&, const GateGradStage&, cudaStream_t);
template cudaError_t launch_backward(const KernelBackwardParams&, const AfterNorm&, cudaStream_t);
template cudaError_t launch_backward(const KernelBackwardParams&, const FromYStage&, cudaStream_t);

}  // namespace fused_layernorm
