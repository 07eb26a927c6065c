// Between the launchers of the plain norms and those of what is fused with them.
#pragma once

#include <cuda_runtime.h>

#include "dispatch.cuh"
#include "launch_plan.h"
#include "norm_params.h"

namespace fused_layernorm {

// The types of x, and of residual and z, that kernels have the add stage for.
template <typename F>
cudaError_t dispatch_add_types(DType x, DType z, F&& f) {
  if (x == DType::kFloat16 && z == DType::kFloat16) return f(Types<__half, __half>{});
  if (x == DType::kFloat16 && z == DType::kFloat32) return f(Types<__half, float>{});
  if (x == DType::kBFloat16 && z == DType::kBFloat16) return f(Types<__nv_bfloat16, __nv_bfloat16>{});
  if (x == DType::kBFloat16 && z == DType::kFloat32) return f(Types<__nv_bfloat16, float>{});
  if (x == DType::kFloat32 && z == DType::kFloat32) return f(Types<float, float>{});
  return cudaErrorNotSupported;
}

// Whether plans of forward for what is fused hold such rows, z of this type: rows of x, the shorter ones, of whole 16
// bytes, that are not long.
inline bool has_fused_plan(const NormForwardParams& params, DType z) {
  return params.hidden_size % (16 / dtype_bytes(params.x_dtype)) == 0 && !is_long_row(z, params.hidden_size) &&
         params.y_dtype == params.x_dtype;
}

// norm_add.cu
int64_t add_forward_workspace(const NormForwardParams& params);
cudaError_t launch_add_forward(const NormForwardParams& params, cudaStream_t stream);
// From the gradient of the norm alone, contiguous and of params.x_dtype.
cudaError_t launch_add_grad(const NormBackwardParams& params, const void* grad_norm, cudaStream_t stream);

// norm_after.cu
int64_t after_forward_workspace(const NormForwardParams& params);
cudaError_t launch_after_forward(const NormForwardParams& params, cudaStream_t stream);

// norm_after_*.cu: by the norm's kernel, for x of one type that it has the stage for. A file each, as these take longer
// to compile than any other.
template <typename scalar_t>
cudaError_t launch_after(const NormForwardParams& params, cudaStream_t stream);

// norm_add_backward.cu; of params.add or params.after
int64_t fused_backward_workspace(const NormBackwardParams& params);
cudaError_t launch_fused_backward(const NormBackwardParams& params, cudaStream_t stream);

// norm_backward_each.cu: rows that have a weight each, and are not huge; with or without params.add and params.gate.
inline bool each_has_a_weight(const NormBackwardParams& params) {
  return params.segments > 1 && params.segments == params.rows && params.hidden_size <= kHugeBackwardColumns &&
         !params.accumulate;
}
cudaError_t launch_backward_each(const NormBackwardParams& params, cudaStream_t stream);

}  // namespace fused_layernorm
