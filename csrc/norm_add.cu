// The norm of z = residual + dropout(gate * x), forward: as one kernel, or, for types and sizes that
// has_add_stage_cuda() says no to, as one that makes z and the plain norm of it. And two operations on their own: from
// the gradient of z to those of x and residual, for backward, and dropout's mask.
#include "dispatch.cuh"
#include "elementwise.cuh"
#include "forward_kernel.cuh"
#include "forward_rows.cuh"
#include "launch_plan.h"
#include "norm_add.cuh"
#include "norm_params.h"
#include "vector_io.cuh"

namespace fused_layernorm {
namespace {

// ---- operations of their own, of any type ----------------------------------------------------------------------------

template <typename acc_t>
__global__ void __launch_bounds__(kQuadThreads)
    add_kernel(const __grid_constant__ NormForwardParams params, const __grid_constant__ AddStage stage) {
  for_each_quad(params.rows, params.hidden_size, [&](int64_t row, int64_t col, int count) {
    acc_t z[4];
    load_vec_as<4>(z, params.x, params.x_dtype, params.x_strides.offset(row) + col, count);
    if (stage.dropout.philox) RowDropout<acc_t>(stage.dropout, row).apply(z, col);
    if (stage.gate) {
      acc_t gate[4];
      load_vec_as<4>(gate, stage.gate, params.x_dtype, segment_of(params, row) * stage.gate_stride + col, count);
#pragma unroll
      for (int i = 0; i < 4; ++i) z[i] = mul(z[i], gate[i]);
    }
    if (stage.residual) {
      acc_t residual[4];
      load_vec_as<4>(residual, stage.residual, stage.residual_dtype, stage.residual_strides.offset(row) + col, count);
#pragma unroll
      for (int i = 0; i < 4; ++i) z[i] = add(residual[i], z[i]);
    }
    store_columns(stage.residual_out, stage.residual_out_dtype, row * params.hidden_size + col, z, count);
  });
}

// `grad_norm`: the gradient of the norm, contiguous and of x's type; perhaps the same memory as a result.
template <typename acc_t>
__global__ void __launch_bounds__(kQuadThreads)
    add_grad_kernel(const __grid_constant__ NormBackwardParams params, const __grid_constant__ AddGradStage stage,
                    const void* grad_norm) {
  for_each_quad(params.rows, params.hidden_size, [&](int64_t row, int64_t col, int count) {
    const int64_t at = row * params.hidden_size + col;
    acc_t grad[4];
    load_vec_as<4>(grad, grad_norm, params.x_dtype, at, count);
    if (stage.grad_residual_out) {
      acc_t skip[4];
      load_vec_as<4>(skip, stage.grad_residual_out, params.x_dtype, stage.grad_residual_out_strides.offset(row) + col,
                     count);
#pragma unroll
      for (int i = 0; i < 4; ++i) grad[i] = add(grad[i], skip[i]);
    }
    if (stage.grad_residual) store_columns(stage.grad_residual, stage.grad_residual_dtype, at, grad, count);
    if (stage.dropout.philox) RowDropout<acc_t>(stage.dropout, row).apply(grad, col);
    if (params.grad_input) store_columns(params.grad_input, stage.grad_input_dtype, at, grad, count);
  });
}

__global__ void __launch_bounds__(kQuadThreads) dropout_mask_kernel(const __grid_constant__ DropoutMaskParams params) {
  const Dropout& dropout = params.dropout;
  for_each_quad(params.rows, params.hidden_size, [&](int64_t row, int64_t col, int count) {
    const DropoutOctet numbers(dropout, row, col);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (k < count)
        params.mask[row * params.hidden_size + col + k] = numbers.number(k, col % 8 >= 4) > dropout.most_dropped;
  });
}

// ---- one kernel -----------------------------------------------------------------------------------------------------

// Calls f(Types<x, z>{}) for the types that a kernel has the stage for; x is also that of a weight that is not fp32.
template <typename F>
cudaError_t dispatch_add(const NormForwardParams& params, F&& f) {
  const AddStage& stage = *params.add;
  const DType x = params.x_dtype, z = stage.residual_out_dtype;
  if (!has_fused_plan(params, z) || (stage.residual && stage.residual_dtype != z)) return cudaErrorNotSupported;
  return dispatch_add_types(x, z, f);
}

NormForwardParams norm_of_z(const NormForwardParams& params) {
  NormForwardParams of_z = params;
  of_z.add = nullptr;
  if (!params.add->residual_out) return of_z;
  of_z.x = params.add->residual_out;
  of_z.x_dtype = params.add->residual_out_dtype;
  of_z.x_strides = RowStrides{params.rows, params.hidden_size, 0};
  return of_z;
}

}  // namespace

bool has_add_stage_cuda(const NormForwardParams& params) {
  return dispatch_add(params, [](auto) { return cudaSuccess; }) == cudaSuccess;
}

int64_t add_forward_workspace(const NormForwardParams& params) {
  return has_add_stage_cuda(params) ? 0 : norm_forward_workspace_cuda(norm_of_z(params));
}

cudaError_t launch_add_forward(const NormForwardParams& params, cudaStream_t stream) {
  const cudaError_t launched = dispatch_add(params, [&](auto types) {
    using x_t = typename decltype(types)::scalar_t;
    using scalar_t = typename decltype(types)::weight_t;
    return launch_fused_forward<scalar_t, x_t>(params, Add<x_t>{*params.add}, stream);
  });
  if (launched != cudaErrorNotSupported) return launched;
  const bool is_double = params.x_dtype == DType::kFloat64;
  cudaError_t error = cudaSuccess;
  if (params.add->residual_out)
    error = launch_quads(is_double ? add_kernel<double> : add_kernel<float>, params.rows, params.hidden_size, stream,
                         params, *params.add);
  if (error != cudaSuccess) return error;
  return static_cast<cudaError_t>(launch_norm_forward_cuda(norm_of_z(params), stream));
}

cudaError_t launch_add_grad(const NormBackwardParams& params, const void* grad_norm, cudaStream_t stream) {
  const auto kernel = params.x_dtype == DType::kFloat64 ? add_grad_kernel<double> : add_grad_kernel<float>;
  return launch_quads(kernel, params.rows, params.hidden_size, stream, params, *params.add, grad_norm);
}

int launch_dropout_mask_cuda(const DropoutMaskParams& params, CUstream_st* stream) {
  return launch_quads(dropout_mask_kernel, params.rows, params.hidden_size, stream, params);
}

}  // namespace fused_layernorm
