// The norm of z = residual + dropout(x), forward: as one kernel, or, for types and sizes that has_add_stage_cuda() says
// no to, as one that makes z and the plain norm of it. And the two operations beside the norm on their own.
#include "activation.cuh"
#include "dispatch.cuh"
#include "forward_kernel.cuh"
#include "forward_rows.cuh"
#include "launch_plan.h"
#include "norm_add.cuh"
#include "norm_params.h"
#include "vector_io.cuh"

namespace fused_layernorm {
namespace {

// ---- operations of their own: four columns a thread, of any type ----------------------------------------------------

template <typename F>
__device__ __forceinline__ void for_each_quad(int64_t rows, int64_t hidden_size, F&& f) {
  const int64_t first_col = 4 * (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < rows;
       row += static_cast<int64_t>(gridDim.x) * blockDim.y)
    for (int64_t col = first_col; col < hidden_size; col += int64_t{4} * gridDim.y * blockDim.x)
      f(row, col, static_cast<int>(min(hidden_size - col, int64_t{4})));
}

template <typename acc_t>
__device__ __forceinline__ void store_quad(void* target, DType dtype, int64_t offset, const acc_t (&values)[4],
                                           int count) {
  store_vec_as<4>(target, dtype, offset, values, count, is_aligned<4>(target, dtype_bytes(dtype), offset));
}

template <typename acc_t>
__global__ void __launch_bounds__(kQuadThreads)
    add_kernel(const __grid_constant__ NormForwardParams params, const __grid_constant__ AddStage stage) {
  for_each_quad(params.rows, params.hidden_size, [&](int64_t row, int64_t col, int count) {
    acc_t z[4];
    load_vec_as<4>(z, params.x, params.x_dtype, params.x_strides.offset(row) + col, count);
    if (stage.dropout.philox) RowDropout(stage.dropout, row).apply(z, col);
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
    store_quad(stage.residual_out, stage.residual_out_dtype, row * params.hidden_size + col, z, count);
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
    if (stage.grad_residual) store_quad(stage.grad_residual, stage.grad_residual_dtype, at, grad, count);
    if (stage.dropout.philox) RowDropout(stage.dropout, row).apply(grad, col);
    if (params.grad_input) store_quad(params.grad_input, stage.grad_input_dtype, at, grad, count);
  });
}

// ---- what comes after the norm, eight columns a thread, whose weight and bias it keeps from row to row ---------------

// Calls prepare(col, count) for this thread's columns, and what that returns with each of its rows.
template <typename F>
__device__ __forceinline__ void for_each_eight(int64_t rows, int64_t hidden_size, F&& prepare) {
  for (int64_t col = 8 * (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x); col < hidden_size;
       col += int64_t{8} * gridDim.y * blockDim.x) {
    const auto of_row = prepare(col, static_cast<int>(min(hidden_size - col, int64_t{8})));
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < rows;
         row += static_cast<int64_t>(gridDim.x) * blockDim.y)
      of_row(row);
  }
}

template <typename acc_t>
__device__ __forceinline__ void store_eight(void* target, DType dtype, int64_t offset, const acc_t (&values)[8],
                                            int count) {
  store_vec_as<8>(target, dtype, offset, values, count, is_aligned<8>(target, dtype_bytes(dtype), offset));
}

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

// Where the norm's kernel has no store stage: over the y that it has written.
template <typename acc_t>
__global__ void __launch_bounds__(kQuadThreads)
    after_norm_kernel(const __grid_constant__ NormForwardParams params, const __grid_constant__ AfterNorm after) {
  for_each_eight(params.rows, params.hidden_size, [&](int64_t col, int count) {
    return [&, col, count, norm = NormAgain<acc_t>(params, col, count)](int64_t row) {
      acc_t values[8];
      norm(values, row);
      activate(values, after.activation);
      if (after.dropout.philox) RowDropout(after.dropout, row).apply(values, col);
      store_eight(params.y, params.y_dtype, row * params.hidden_size + col, values, count);
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
      if (after.after.dropout.philox) RowDropout(after.after.dropout, row).apply(grad, col);
      if (after.after.activation != Activation::kNone) activate_backward(grad, values, after.after.activation);
      store_eight(after.grad, params.y_dtype, row * params.hidden_size + col, grad, count);
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
      store_eight(params.y, params.x_dtype, row * params.hidden_size + col, values, count);
    };
  });
}

__global__ void __launch_bounds__(kQuadThreads) dropout_mask_kernel(const __grid_constant__ DropoutMaskParams params) {
  const Dropout& dropout = params.dropout;
  for_each_quad(params.rows, params.hidden_size, [&](int64_t row, int64_t col, int count) {
    const PhiloxWords words = dropout_words(dropout.philox[0], dropout.philox[1], row, static_cast<uint32_t>(col / 4));
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (k < count) params.mask[row * params.hidden_size + col + k] = words.word[k] >= dropout.threshold;
  });
}

// Threads for `vec` columns each, and so many blocks of rows that no more than `most_blocks` run.
template <typename Kernel, typename... Arguments>
cudaError_t launch_vecs(int vec, int64_t most_blocks, Kernel kernel, int64_t rows, int64_t hidden_size,
                        cudaStream_t stream, const Arguments&... arguments) {
  const int64_t vecs = (hidden_size + vec - 1) / vec;
  int side_by_side = 1;
  while (side_by_side < kQuadThreads && side_by_side < vecs) side_by_side *= 2;
  const int rows_of_block = kQuadThreads / side_by_side;
  const int64_t blocks_of_row = std::min<int64_t>((vecs + side_by_side - 1) / side_by_side, 65535);
  const int64_t blocks_of_rows =
      std::min((rows + rows_of_block - 1) / rows_of_block, std::max<int64_t>(most_blocks / blocks_of_row, 1));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks_of_rows), static_cast<unsigned>(blocks_of_row));
  config.blockDim = dim3(side_by_side, rows_of_block);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <typename Kernel, typename... Arguments>
cudaError_t launch_quads(Kernel kernel, int64_t rows, int64_t hidden_size, cudaStream_t stream,
                         const Arguments&... arguments) {
  return launch_vecs(4, int64_t{1} << 30, kernel, rows, hidden_size, stream, arguments...);
}

template <typename Kernel, typename... Arguments>
cudaError_t launch_eights(Kernel kernel, const NormForwardParams& params, cudaStream_t stream,
                          const Arguments&... arguments) {
  return launch_vecs(8, kEightsBlocks, kernel, params.rows, params.hidden_size, stream, params, arguments...);
}

// ---- one kernel -----------------------------------------------------------------------------------------------------

// Calls f(Types<x, z>{}) for the types that a kernel has the stage for; x is also that of a weight that is not fp32.
template <typename F>
cudaError_t dispatch_add(const NormForwardParams& params, F&& f) {
  const AddStage& stage = *params.add;
  const DType x = params.x_dtype, z = stage.residual_out_dtype;
  const bool whole = params.hidden_size % (16 / dtype_bytes(x)) == 0;  // rows of x, which are the shorter
  if (!whole || is_long_row(z, params.hidden_size) || params.y_dtype != x ||
      (stage.residual && stage.residual_dtype != z))
    return cudaErrorNotSupported;
  return dispatch_add_types(x, z, f);
}

template <typename x_t, typename scalar_t>
cudaError_t launch_add(const NormForwardParams& params, cudaStream_t stream) {
  Add<x_t> add_to;
  static_cast<AddStage&>(add_to) = *params.add;
  return dispatch_plan<AddLadder<scalar_t>>(params.hidden_size, 1, [&](auto plan) {
    using Plan = decltype(plan);
    constexpr int kRows = kForwardThreads<Plan> / Plan::kThreads;
    const auto blocks = static_cast<unsigned>((params.rows + kRows - 1) / kRows);
    // Only a launch of few blocks gains by overlap
    OverlappedLaunch launch(dim3(blocks), dim3(kForwardThreads<Plan>), stream);
    if (blocks > kEagerBlocks) launch.config.numAttrs = 0;
    return cudaLaunchKernelEx(&launch.config, norm_forward_kernel<scalar_t, x_t, Plan, false, Add<x_t>>, params,
                              static_cast<float>(1.0 / static_cast<double>(params.hidden_size)), add_to);
  });
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
    return launch_add<typename decltype(types)::scalar_t, typename decltype(types)::weight_t>(params, stream);
  });
  if (launched != cudaErrorNotSupported) return launched;
  const bool is_double = params.x_dtype == DType::kFloat64;
  cudaError_t error = cudaSuccess;
  if (params.add->residual_out)
    error = launch_quads(is_double ? add_kernel<double> : add_kernel<float>, params.rows, params.hidden_size, stream,
                         params, *params.add);
  const NormForwardParams norm = norm_of_z(params);
  if (error == cudaSuccess) error = static_cast<cudaError_t>(launch_norm_forward_cuda(norm, stream));
  if (error != cudaSuccess || !params.add->after.is_there()) return error;
  return launch_eights(is_double ? after_norm_kernel<double> : after_norm_kernel<float>, norm, stream,
                       params.add->after);
}

cudaError_t launch_add_grad(const NormBackwardParams& params, const void* grad_norm, cudaStream_t stream) {
  const auto kernel = params.x_dtype == DType::kFloat64 ? add_grad_kernel<double> : add_grad_kernel<float>;
  return launch_quads(kernel, params.rows, params.hidden_size, stream, params, *params.add, grad_norm);
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

int launch_dropout_mask_cuda(const DropoutMaskParams& params, CUstream_st* stream) {
  return launch_quads(dropout_mask_kernel, params.rows, params.hidden_size, stream, params);
}

}  // namespace fused_layernorm
