// Forward with what comes after the norm: as one kernel, or as the plain norm and an operation over its y. And
// operations on their own, from what forward was told and saved: the gradient of the norm from that of y, where
// backward's kernel has no such stage (has_after_stage_cuda), and x - mean from y
// (has_y_stage_cuda).
#include "activation.cuh"
#include "add_rows.cuh"
#include "dispatch.cuh"
#include "elementwise.cuh"
#include "launch_plan.h"
#include "norm_add.cuh"
#include "norm_params.h"
#include "vector_io.cuh"

namespace fused_layernorm {
namespace {

// The norm again, from x and the statistics that forward saved, for some columns of any row.
template <typename acc_t>
struct NormAgain {
  const NormForwardParams& params;
  int64_t col;
  int count;
  acc_t weight[8], bias[8];

  __device__ NormAgain(const NormForwardParams& params, int64_t col, int count)
      : params(params), col(col), count(count) {
#pragma unroll
    for (int i = 0; i < 8; ++i) weight[i] = 1, bias[i] = 0;
    if (params.bias) load_vec_as<8>(bias, params.bias, params.weight_dtype, col, count);
    if (!params.weight) return;
    load_vec_as<8>(weight, params.weight, params.weight_dtype, col, count);
#pragma unroll
    for (int i = 0; i < 8; ++i) weight[i] += static_cast<acc_t>(params.weight_offset);
  }
  __device__ acc_t saved(const void* statistic, int64_t row) const {
    return statistic ? __ldg(static_cast<const acc_t*>(statistic) + row) : acc_t(0);
  }
  __device__ void load(acc_t (&values)[8], int64_t row) const {
    load_vec_as<8>(values, params.x, params.x_dtype, params.x_strides.offset(row) + col, count);
  }
  __device__ void operator()(acc_t (&values)[8], int64_t row) const {
    const acc_t rstd = saved(params.rstd, row), mean = saved(params.mean, row);
    const acc_t mean_tail = saved(params.mean_tail, row);
    load(values, row);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = fma(((values[i] - mean) - mean_tail) * rstd, weight[i], bias[i]);
  }
};

// Over the y that the norm has written.
template <typename acc_t>
__global__ void __launch_bounds__(kQuadThreads)
    after_norm_kernel(const __grid_constant__ NormForwardParams params, const __grid_constant__ AfterNorm after) {
  for_each_eight(params.rows, params.hidden_size, [&](int64_t col, int count) {
    return [&, col, count, norm = NormAgain<acc_t>(params, col, count)](int64_t row) {
      acc_t values[8];
      norm(values, row);
      with_activation(after.activation, [&](auto which) { activate<false>(values, which); });
      if (after.dropout.philox) RowDropout<acc_t>(after.dropout, row).apply(values, col);
      store_columns(params.y, params.y_dtype, row * params.hidden_size + col, values, count);
    };
  });
}

template <typename acc_t>
__global__ void __launch_bounds__(kQuadThreads)
    after_norm_grad_kernel(const __grid_constant__ NormForwardParams params,
                           const __grid_constant__ AfterNormGradParams after) {
  for_each_eight(params.rows, params.hidden_size, [&](int64_t col, int count) {
    return [&, col, count, norm = NormAgain<acc_t>(params, col, count)](int64_t row) {
      acc_t grad[8], values[8];
      load_vec_as<8>(grad, after.grad_output, params.y_dtype, after.grad_output_strides.offset(row) + col, count);
      if (after.after.activation != Activation::kNone) norm(values, row);
      if (after.after.dropout.philox) RowDropout<acc_t>(after.after.dropout, row).apply(grad, col);
      with_activation(after.after.activation, [&](auto which) { activate_backward<false>(grad, values, which); });
      store_columns(after.grad, params.y_dtype, row * params.hidden_size + col, grad, count);
    };
  });
}

template <typename acc_t>
__global__ void __launch_bounds__(kQuadThreads) recover_kernel(const __grid_constant__ NormForwardParams params) {
  for_each_eight(params.rows, params.hidden_size, [&](int64_t col, int count) {
    NormAgain<acc_t> norm(params, col, count);
#pragma unroll
    for (int i = 0; i < 8; ++i) norm.weight[i] = 1 / norm.weight[i];
    return [&, col, count, norm](int64_t row) {
      const acc_t sigma = 1 / norm.saved(params.rstd, row);
      acc_t values[8];
      norm.load(values, row);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = (values[i] - norm.bias[i]) * norm.weight[i] * sigma;
      store_columns(params.y, params.y_dtype, row * params.hidden_size + col, values, count);
    };
  });
}

// Calls f(x's type) where the norm's kernel has the stage.
template <typename F>
cudaError_t dispatch_after(const NormForwardParams& params, F&& f) {
  const DType x = params.x_dtype;
  if (!has_fused_plan(params, x)) return cudaErrorNotSupported;
  return dispatch_add_types(x, x, [&](auto types) {
    using Of = decltype(types);
    if constexpr (std::is_same<typename Of::scalar_t, typename Of::weight_t>::value)
      return f(typename Of::scalar_t{});
    else
      return cudaErrorNotSupported;
  });
}

NormForwardParams only_norm(NormForwardParams params) {
  params.after = nullptr;
  return params;
}

}  // namespace

int64_t after_forward_workspace(const NormForwardParams& params) {
  if (dispatch_after(params, [](auto) { return cudaSuccess; }) == cudaSuccess) return 0;
  return norm_forward_workspace_cuda(only_norm(params));
}

cudaError_t launch_after_forward(const NormForwardParams& params, cudaStream_t stream) {
  if (params.segments > 1) return cudaErrorInvalidValue;
  const cudaError_t launched =
      dispatch_after(params, [&](auto type) { return launch_after<decltype(type)>(params, stream); });
  if (launched != cudaErrorNotSupported) return launched;
  const NormForwardParams norm = only_norm(params);
  const cudaError_t error = static_cast<cudaError_t>(launch_norm_forward_cuda(norm, stream));
  if (error != cudaSuccess) return error;
  const auto kernel = norm.x_dtype == DType::kFloat64 ? after_norm_kernel<double> : after_norm_kernel<float>;
  return launch_eights(kernel, norm, stream, *params.after);
}

int launch_after_norm_grad_cuda(const NormForwardParams& params, const AfterNormGradParams& after,
                                CUstream_st* stream) {
  const bool is_double = params.x_dtype == DType::kFloat64;
  return launch_eights(is_double ? after_norm_grad_kernel<double> : after_norm_grad_kernel<float>, params, stream,
                       after);
}

int launch_recover_cuda(const NormForwardParams& params, CUstream_st* stream) {
  const auto kernel = params.x_dtype == DType::kFloat64 ? recover_kernel<double> : recover_kernel<float>;
  return launch_eights(kernel, params, stream);
}

}  // namespace fused_layernorm
