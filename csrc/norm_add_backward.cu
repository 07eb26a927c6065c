// Backward with what is fused: of the norm of z = residual + dropout(x), as one kernel and the sum of its partial
// weight gradients, or, for types and sizes that has_add_stage_cuda() says no to, as the plain norm's backward, rounded
// to z's type, and an operation on that. And of dropout(activation(norm)), as one kernel where has_after_stage_cuda().
#include "backward_fused.cuh"
#include "backward_rows.cuh"
#include "dispatch.cuh"
#include "launch_plan.h"
#include "norm_add.cuh"
#include "norm_params.h"

namespace fused_layernorm {
namespace {

struct FusedLaunch {
  int cluster, depth, running;  // blocks that share a row, stages of the ring, clusters at once
};

// Calls f(Types<x, z>{}, plan, launch) where a kernel has the stage: by types, hidden_size and card, not by the number
// of rows, so that a row's gradients are the same bits whatever the batch, nor by which gradients are wanted, but for a
// grad_residual that is not of z's type: what type residual has is not known where its gradient is not wanted.
template <template <typename> class Stage, typename F>
cudaError_t dispatch_stage(const NormBackwardParams& params, DType x, F&& f) {
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
      using LadderOf = std::conditional_t<
          kHasAfter<Stage<x_t>>, AfterGradLadder<scalar_t>,
          std::conditional_t<kHasGate<Stage<x_t>>, GateGradLadder<scalar_t>,
                             std::conditional_t<kIsFromY<Stage<x_t>>, FromYLadder<scalar_t>, AddGradLadder<scalar_t>>>>;
      const auto launch_plan = [&](auto plan) {
        using Plan = decltype(plan);
        const int64_t vec_count = params.hidden_size / Plan::kVec;
        const int cluster = cluster_for<Plan>(vec_count, facts.max_cluster);
        if (vec_count > static_cast<int64_t>(cluster) * Plan::kThreads * Plan::kVecs) return cudaErrorNotSupported;
        Residence residence;
        const cudaError_t error = residence_of<scalar_t, x_t, Plan, Stage<x_t>>(device, facts, cluster, residence);
        if (error != cudaSuccess) return error;
        if (residence.clusters == 0) return cudaErrorNotSupported;
        return f(types, plan, FusedLaunch{cluster, residence.depth, running_clusters<Plan>(params, residence)});
      };
      if constexpr (kHasAfter<Stage<x_t>>) {
        if (params.after && params.after->dropout.philox)
          return dispatch_plan<DropGradLadder<scalar_t>>(params.hidden_size, facts.max_cluster, launch_plan);
      }
      return dispatch_plan<LadderOf>(params.hidden_size, facts.max_cluster, launch_plan);
    }
  });
}

template <typename F>
cudaError_t dispatch_add_grad(const NormBackwardParams& params, F&& f) {
  const AddGradStage& stage = *params.add;
  const DType x = stage.grad_input_dtype;
  if (stage.grad_output_dtype != x || (stage.grad_residual && stage.grad_residual_dtype != params.x_dtype))
    return cudaErrorNotSupported;
  return dispatch_stage<AddGrad>(params, x, f);
}

template <typename F>
cudaError_t dispatch_gate(const NormBackwardParams& params, F&& f) {
  const GateGradStage& stage = *params.gate;
  const DType x = stage.grad_input_dtype;
  if (stage.grad_output_dtype != x || stage.grad_residual_dtype != params.x_dtype) return cudaErrorNotSupported;
  return dispatch_stage<GateGrad>(params, x, f);
}

// `stage`: what the kernel is told, but for its type.
template <template <typename> class Stage, typename Types, typename Plan, typename Told>
cudaError_t launch_stage(Types, Plan, const NormBackwardParams& params, const Told& stage, const FusedLaunch& launch,
                         cudaStream_t stream) {
  using x_t = typename Types::scalar_t;
  using scalar_t = typename Types::weight_t;
  const ClusterLaunch persistent(
      launch.running * launch.cluster, kFusedThreads<Plan>,
      launch.depth * RowRing<scalar_t, Plan, Stage<x_t>>::kStageBytes + kKeptBytes<scalar_t, Plan, Stage<x_t>>,
      launch.cluster, stream);
  const cudaError_t error =
      cudaLaunchKernelEx(&persistent.config, norm_backward_fused_kernel<scalar_t, x_t, Plan, Stage<x_t>>, params,
                         inverse_of<float>(params.hidden_size), launch.depth, Stage<x_t>{stage});
  if (error != cudaSuccess || !(params.grad_weight || params.grad_bias || params.grad_gate)) return error;
  return launch_backward_finalize(params, launch.running, stream);
}

int64_t partials_bytes(const NormBackwardParams& params, const FusedLaunch& launch) {
  if (!params.grad_weight && !params.grad_bias && !params.grad_gate) return 0;
  return static_cast<int64_t>(launch.running) * (params.grad_gate ? 3 : 2) * params.hidden_size *
         static_cast<int64_t>(sizeof(float));
}

// ---- as the plain norm's -------------------------------------------------------------------------------------------

// The backward of the plain norm of z, into a result that is of z's type if there is one.
NormBackwardParams norm_of_z(const NormBackwardParams& params) {
  const AddGradStage& stage = *params.add;
  NormBackwardParams norm = params;
  norm.add = nullptr;
  if (stage.grad_residual && (stage.grad_residual_dtype == params.x_dtype || !params.grad_input))
    norm.grad_input = stage.grad_residual;
  return norm;
}

// Of the workspace, for the gradient of the norm where no result is of its type; the norm's own comes after.
int64_t gradient_bytes(const NormBackwardParams& params) {
  const AddGradStage& stage = *params.add;
  if (!(params.grad_input || stage.grad_residual) || (params.grad_input && stage.grad_input_dtype == params.x_dtype) ||
      (stage.grad_residual && stage.grad_residual_dtype == params.x_dtype))
    return 0;
  return (params.rows * params.hidden_size * dtype_bytes(params.x_dtype) + 15) / 16 * 16;
}

}  // namespace

bool has_add_stage_cuda(const NormBackwardParams& params) {
  if (each_has_a_weight(params)) return true;
  return dispatch_add_grad(params, [](auto, auto, const FusedLaunch&) { return cudaSuccess; }) == cudaSuccess;
}

bool has_after_stage_cuda(const NormBackwardParams& params) {
  return dispatch_stage<AfterGrad>(params, params.x_dtype,
                                   [](auto, auto, const FusedLaunch&) { return cudaSuccess; }) == cudaSuccess;
}

bool has_y_stage_cuda(const NormBackwardParams& params) {
  return dispatch_stage<FromY>(params, params.x_dtype, [](auto, auto, const FusedLaunch&) { return cudaSuccess; }) ==
         cudaSuccess;
}

bool has_gate_stage_cuda(const NormBackwardParams& params) {
  if (each_has_a_weight(params)) return true;
  return dispatch_gate(params, [](auto, auto, const FusedLaunch&) { return cudaSuccess; }) == cudaSuccess;
}

int64_t fused_backward_workspace(const NormBackwardParams& params) {
  int64_t bytes = 0;
  const auto ask = [&](auto, auto, const FusedLaunch& launch) {
    bytes = partials_bytes(params, launch);
    return cudaSuccess;
  };
  if (params.after) {
    dispatch_stage<AfterGrad>(params, params.x_dtype, ask);
    return bytes;
  }
  if (params.x_is_y) {
    dispatch_stage<FromY>(params, params.x_dtype, ask);
    return bytes;
  }
  if (params.gate) {
    dispatch_gate(params, ask);
    return bytes;
  }
  if (dispatch_add_grad(params, ask) == cudaSuccess) return bytes;
  return gradient_bytes(params) + norm_backward_workspace_cuda(norm_of_z(params));
}

cudaError_t launch_fused_backward(const NormBackwardParams& params, cudaStream_t stream) {
  if (params.after) {
    return dispatch_stage<AfterGrad>(params, params.x_dtype, [&](auto types, auto plan, const FusedLaunch& launch) {
      constexpr bool kQuick = sizeof(typename decltype(types)::scalar_t) == 2;
      return launch_stage<AfterGrad>(types, plan, params, AfterGradStage::of<kQuick>(*params.after, params.hidden_size),
                                     launch, stream);
    });
  }
  if (params.x_is_y) {
    return dispatch_stage<FromY>(params, params.x_dtype, [&](auto types, auto plan, const FusedLaunch& launch) {
      return launch_stage<FromY>(types, plan, params, FromYStage{}, launch, stream);
    });
  }
  if (params.gate) {
    return dispatch_gate(params, [&](auto types, auto plan, const FusedLaunch& launch) {
      return launch_stage<GateGrad>(types, plan, params, *params.gate, launch, stream);
    });
  }
  const cudaError_t launched = dispatch_add_grad(params, [&](auto types, auto plan, const FusedLaunch& launch) {
    AddGradStage told = *params.add;
    if (!params.grad_input && !told.grad_residual) told.grad_residual_out = nullptr;  // nobody reads it
    return launch_stage<AddGrad>(types, plan, params, told, launch, stream);
  });
  if (launched != cudaErrorNotSupported) return launched;

  NormBackwardParams norm = norm_of_z(params);
  if (const int64_t bytes = gradient_bytes(params)) {
    norm.grad_input = params.workspace;
    norm.workspace = static_cast<char*>(params.workspace) + bytes;
  }
  const cudaError_t error = static_cast<cudaError_t>(launch_norm_backward_cuda(norm, stream));
  const AddGradStage& stage = *params.add;
  // Nothing but the parameters' gradients is wanted, or what is wanted is there
  const bool is_done = !norm.grad_input || (!stage.grad_residual_out && !stage.dropout.philox &&
                                            (!params.grad_input || params.grad_input == norm.grad_input) &&
                                            (!stage.grad_residual || stage.grad_residual == norm.grad_input));
  if (error != cudaSuccess || is_done) return error;
  return launch_add_grad(params, norm.grad_input, stream);
}

}  // namespace fused_layernorm
