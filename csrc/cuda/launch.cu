// The entry points of norm_params.h: what each call launches.
//
// A call that a kernel takes as it is becomes one launch (and the final sum of its partial weight gradients). Any other
// call is composed here: conversions of what no kernel reads, the load stage and the epilogue as elementwise kernels
// before and after the plain norm, and their adjoints. The choice follows from dtypes, hidden_size, options and the
// card, never from the number of rows. Temporaries lie in the workspace.
#include "activation.cuh"
#include "add_rows.cuh"
#include "elementwise.cuh"
#include "forward_rows.cuh"
#include "kernel_params.h"
#include "launch_plan.h"
#include "launchers.h"
#include "vector_io.cuh"

namespace fused_layernorm {
namespace {

// Rows as they lie in memory; data is nullptr where there are none.
struct Rows {
  const void* data;
  RowStrides strides;
  DType dtype;
};

RowStrides contiguous(int64_t rows, int64_t hidden_size) { return {rows, hidden_size, 0}; }

// ---- elementwise kernels, of any type ------------------------------------------------------------------------------
// acc_t: double where anything that they read or compute with is fp64.

template <typename acc_t>
__global__ void __launch_bounds__(kQuadThreads)
    convert_kernel(const __grid_constant__ Rows source, int64_t rows, int64_t hidden_size, void* target, DType dtype,
                   int64_t target_stride) {
  for_each_quad(rows, hidden_size, [&](int64_t row, int64_t col, int count) {
    acc_t values[4];
    load_columns<4>(values, source.data, source.dtype, source.strides.offset(row) + col, count);
    store_columns(target, dtype, row * target_stride + col, values, count);
  });
}

__global__ void __launch_bounds__(kQuadThreads) fill_kernel(void* target, DType dtype, int64_t count, double value) {
  for_each_quad(1, count, [&](int64_t, int64_t col, int count) {
    const double values[4] = {value, value, value, value};
    store_columns(target, dtype, col, values, count);
  });
}

// z, from KernelForwardParams of x.
template <typename acc_t>
__global__ void __launch_bounds__(kQuadThreads)
    load_stage_kernel(const __grid_constant__ KernelForwardParams params, const __grid_constant__ AddStage stage) {
  for_each_quad(params.rows, params.hidden_size, [&](int64_t row, int64_t col, int count) {
    acc_t z[4];
    load_columns<4>(z, params.x, params.x_dtype, params.x_strides.offset(row) + col, count);
    if (stage.dropout.philox) RowDropout<acc_t>(stage.dropout, row).apply(z, col);
    if (stage.gate) {
      acc_t gate[4];
      load_columns<4>(gate, stage.gate, params.x_dtype, segment_of(params, row) * stage.gate_stride + col, count);
#pragma unroll
      for (int i = 0; i < 4; ++i) z[i] = mul(z[i], gate[i]);
    }
    if (stage.residual) {
      acc_t residual[4];
      load_columns<4>(residual, stage.residual, stage.residual_dtype, stage.residual_strides.offset(row) + col, count);
#pragma unroll
      for (int i = 0; i < 4; ++i) z[i] = add(residual[i], z[i]);
    }
    store_columns(stage.residual_out, stage.residual_out_dtype, row * params.hidden_size + col, z, count);
  });
}

// Its adjoint without gate. `grad_norm`: the gradient of the norm of z, contiguous; perhaps the memory of a result.
template <typename acc_t>
__global__ void __launch_bounds__(kQuadThreads)
    load_stage_grad_kernel(const __grid_constant__ Rows grad_norm, const __grid_constant__ Rows grad_residual_out,
                           const __grid_constant__ AddGradStage stage, void* grad_input, int64_t rows,
                           int64_t hidden_size) {
  for_each_quad(rows, hidden_size, [&](int64_t row, int64_t col, int count) {
    const int64_t at = row * hidden_size + col;
    acc_t grad[4];
    load_columns<4>(grad, grad_norm.data, grad_norm.dtype, at, count);
    if (grad_residual_out.data) {
      acc_t skip[4];
      load_columns<4>(skip, grad_residual_out.data, grad_residual_out.dtype,
                      grad_residual_out.strides.offset(row) + col, count);
#pragma unroll
      for (int i = 0; i < 4; ++i) grad[i] = add(grad[i], skip[i]);
    }
    if (stage.grad_residual) store_columns(stage.grad_residual, stage.grad_residual_dtype, at, grad, count);
    if (stage.dropout.philox) RowDropout<acc_t>(stage.dropout, row).apply(grad, col);
    if (grad_input) store_columns(grad_input, stage.grad_input_dtype, at, grad, count);
  });
}

// What a norm is computed with again, for some columns: z, what forward saved, and a segment's weight and bias.
struct SavedNorm {
  Rows z;
  const void *rstd, *mean, *mean_tail, *weight, *bias;
  DType weight_dtype;
  double weight_offset;
  int64_t weight_stride, rows, hidden_size;
  int segments;
};

template <typename acc_t>
struct NormOfColumns {
  const SavedNorm& norm;
  int64_t col;
  int count;
  acc_t weight[8], bias[8];

  __device__ NormOfColumns(const SavedNorm& norm, int64_t segment, int64_t col, int count)
      : norm(norm), col(col), count(count) {
    const int64_t at = segment * norm.weight_stride + col;
#pragma unroll
    for (int i = 0; i < 8; ++i) weight[i] = 1, bias[i] = 0;
    if (norm.bias) load_columns<8>(bias, norm.bias, norm.weight_dtype, at, count);
    if (!norm.weight) return;
    load_columns<8>(weight, norm.weight, norm.weight_dtype, at, count);
#pragma unroll
    for (int i = 0; i < 8; ++i) weight[i] += static_cast<acc_t>(norm.weight_offset);
  }
  __device__ acc_t saved(const void* statistic, int64_t row) const {
    return statistic ? static_cast<const acc_t*>(statistic)[row] : acc_t(0);
  }
  __device__ void load(acc_t (&values)[8], int64_t row) const {
    load_columns<8>(values, norm.z.data, norm.z.dtype, norm.z.strides.offset(row) + col, count);
  }
  // u of a row
  __device__ void operator()(acc_t (&values)[8], int64_t row) const {
    const acc_t rstd = saved(norm.rstd, row), mean = saved(norm.mean, row), mean_tail = saved(norm.mean_tail, row);
    load(values, row);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = fma(((values[i] - mean) - mean_tail) * rstd, weight[i], bias[i]);
  }
};

// y = dropout(activation(u)), contiguous. One weight for all rows.
template <typename acc_t>
__global__ void __launch_bounds__(kQuadThreads)
    epilogue_kernel(const __grid_constant__ SavedNorm norm, const __grid_constant__ AfterNorm epilogue, void* y,
                    DType y_dtype) {
  for_each_eight(norm.rows, norm.hidden_size, [&](int64_t col, int count) {
    return [&, col, count, u = NormOfColumns<acc_t>(norm, 0, col, count)](int64_t row) {
      acc_t values[8];
      u(values, row);
      with_activation(epilogue.activation, [&](auto which) { activate<false>(values, which); });
      if (epilogue.dropout.philox) RowDropout<acc_t>(epilogue.dropout, row).apply(values, col);
      store_columns(y, y_dtype, row * norm.hidden_size + col, values, count);
    };
  });
}

// grad_u, contiguous, from grad_output.
template <typename acc_t>
__global__ void __launch_bounds__(kQuadThreads)
    epilogue_grad_kernel(const __grid_constant__ SavedNorm norm, const __grid_constant__ AfterNorm epilogue,
                         const __grid_constant__ Rows grad_output, void* grad_u, DType grad_u_dtype) {
  for_each_eight(norm.rows, norm.hidden_size, [&](int64_t col, int count) {
    return [&, col, count, u = NormOfColumns<acc_t>(norm, 0, col, count)](int64_t row) {
      acc_t grad[8], values[8];
      load_columns<8>(grad, grad_output.data, grad_output.dtype, grad_output.strides.offset(row) + col, count);
      if (epilogue.activation != Activation::kNone) u(values, row);
      if (epilogue.dropout.philox) RowDropout<acc_t>(epilogue.dropout, row).apply(grad, col);
      with_activation(epilogue.activation, [&](auto which) { activate_backward<false>(grad, values, which); });
      store_columns(grad_u, grad_u_dtype, row * norm.hidden_size + col, grad, count);
    };
  });
}

// z - mean, contiguous, where norm.z is y.
template <typename acc_t>
__global__ void __launch_bounds__(kQuadThreads)
    centered_from_y_kernel(const __grid_constant__ SavedNorm norm, void* target, DType dtype) {
  const int64_t rows = norm.segments > 1 ? norm.rows / norm.segments : norm.rows;
  for (int64_t segment = blockIdx.z; segment * rows < norm.rows; segment += gridDim.z) {
    for_each_eight(rows, norm.hidden_size, [&](int64_t col, int count) {
      NormOfColumns<acc_t> columns(norm, segment, col, count);
#pragma unroll
      for (int i = 0; i < 8; ++i) columns.weight[i] = 1 / columns.weight[i];
      return [&, col, count, columns](int64_t row) {
        row += segment * rows;
        const acc_t sigma = 1 / columns.saved(norm.rstd, row);
        acc_t values[8];
        columns.load(values, row);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = (values[i] - columns.bias[i]) * columns.weight[i] * sigma;
        store_columns(target, dtype, row * norm.hidden_size + col, values, count);
      };
    });
  }
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

// ---- a call's launches, and its workspace ---------------------------------------------------------------------------

// Weight and bias (or a gate) of all segments as the kernels read them.
struct Parameters {
  const void *weight, *bias;
  int64_t stride;
  DType dtype;
};

// The launches of one call in order. The same code plans the workspace: constructed without a stream, nothing is
// launched, and bytes() is what the launches will take.
class Sequence {
 public:
  template <typename Params>
  explicit Sequence(const Params& params)
      : rows_(params.rows), hidden_size_(params.hidden_size), segments_(std::max(params.segments, 1)) {}
  template <typename Params>
  Sequence(const Params& params, cudaStream_t stream) : Sequence(params) {
    launches_ = true;
    stream_ = stream;
    base_ = static_cast<char*>(params.workspace);
  }

  int64_t bytes() const { return bytes_; }
  cudaError_t error() const { return error_; }

  // Part of the workspace, aligned to 16 bytes. Without a launch: not nullptr, and not to be read.
  void* take(int64_t bytes) {
    void* found = base_ + bytes_;
    bytes_ += (bytes + 15) / 16 * 16;
    return found;
  }
  void* take_rows(DType dtype) { return take(rows_ * hidden_size_ * dtype_bytes(dtype)); }

  // Calls f(stream), unless there was an error before.
  template <typename F>
  void launch(F&& f) {
    if (launches_ && error_ == cudaSuccess) error_ = f(stream_);
  }

  // `rows` as kernels of `dtype` read them: as they lie, or a contiguous copy. Kernels load rows that are made of whole
  // 16 bytes as such, so these must begin at multiples of 16 bytes. A segment that is launched on its own must begin
  // with a group of rows, or lie within one.
  Rows readable(const Rows& rows, DType dtype) {
    if (!rows.data || (rows.dtype == dtype && is_aligned16(rows) && may_be_cut(rows.strides))) return rows;
    void* copy = take_rows(dtype);
    convert(rows, rows_, copy, dtype, hidden_size_);
    return {copy, contiguous(rows_, hidden_size_), dtype};
  }

  // Each segment's parameters begin at multiples of 16 bytes then.
  Parameters readable(const Parameters& parameters, DType dtype) {
    Parameters found = parameters;
    found.dtype = dtype;
    if (!parameters.weight && !parameters.bias) return found;
    const bool is_aligned = segments_ == 1 || parameters.stride * dtype_bytes(dtype) % 16 == 0;
    if (parameters.dtype == dtype && is_aligned) return found;
    const int64_t vec = 16 / dtype_bytes(dtype);
    found.stride = (hidden_size_ + vec - 1) / vec * vec;
    for (const void** data : {&found.weight, &found.bias}) {
      if (!*data) continue;
      void* copy = take(segments_ * found.stride * dtype_bytes(dtype));
      convert({*data, {segments_, parameters.stride, 0}, parameters.dtype}, segments_, copy, dtype, found.stride);
      *data = copy;
    }
    return found;
  }

  void* filled(int64_t count, DType dtype, double value) {
    void* target = take(count * dtype_bytes(dtype));
    launch(
        [=](cudaStream_t stream) { return launch_quads(fill_kernel, 1, count, stream, target, dtype, count, value); });
    return target;
  }

 private:
  bool is_aligned16(const Rows& rows) const {
    const int bytes = dtype_bytes(rows.dtype);
    if (hidden_size_ * bytes % 16 != 0) return true;
    return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.strides.row_stride * bytes % 16 == 0 &&
           rows.strides.group_stride * bytes % 16 == 0;
  }

  bool may_be_cut(const RowStrides& strides) const {
    const int64_t rows = rows_ / segments_;
    return segments_ == 1 || strides.is_even(rows_) || rows % strides.rows_per_group == 0 ||
           strides.rows_per_group % rows == 0;
  }

  void convert(const Rows& source, int64_t rows, void* target, DType dtype, int64_t target_stride) {
    const auto kernel =
        source.dtype == DType::kFloat64 && dtype == source.dtype ? convert_kernel<double> : convert_kernel<float>;
    launch([&](cudaStream_t stream) {
      return launch_quads(kernel, rows, hidden_size_, stream, source, rows, hidden_size_, target, dtype, target_stride);
    });
  }

  int64_t rows_, hidden_size_, segments_;
  bool launches_ = false;
  cudaStream_t stream_ = nullptr;
  char* base_ = reinterpret_cast<char*>(uintptr_t{1} << 12);
  int64_t bytes_ = 0;
  cudaError_t error_ = cudaSuccess;
};

// The dtype that kernels of `dtype` read parameters of `given` in.
DType parameter_dtype(DType given, DType dtype) { return given == dtype ? dtype : accumulation_dtype(dtype); }

// ---- forward -------------------------------------------------------------------------------------------------------

// All statistics or none: `needs` them even where the caller does not want them.
void complete_statistics(KernelForwardParams& norm, bool needs, Sequence& run) {
  if (!needs && !norm.rstd && !norm.mean && !norm.mean_tail) return;
  const int64_t bytes = norm.rows * dtype_bytes(accumulation_dtype(norm.x_dtype));
  if (!norm.rstd) norm.rstd = run.take(bytes);
  if (norm.is_rms_norm) return;
  if (!norm.mean) norm.mean = run.take(bytes);
  if (!norm.mean_tail) norm.mean_tail = run.take(bytes);
}

cudaError_t launch_after_of(const KernelForwardParams& norm, const AfterNorm& epilogue, cudaStream_t stream) {
  switch (norm.x_dtype) {
    case DType::kFloat16: return launch_after<__half>(norm, epilogue, stream);
    case DType::kBFloat16: return launch_after<__nv_bfloat16>(norm, epilogue, stream);
    default: return launch_after<float>(norm, epilogue, stream);
  }
}

void forward(const NormForwardParams& params, Sequence& run) {
  const bool is_double = params.x_dtype == DType::kFloat64;
  const Rows x = run.readable({params.x, params.x_strides, params.x_dtype}, params.x_dtype);
  KernelForwardParams norm{};
  norm.x = x.data;
  norm.y = params.y;
  norm.rstd = params.rstd;
  norm.mean = params.is_rms_norm ? nullptr : params.mean;
  norm.mean_tail = params.is_rms_norm ? nullptr : params.mean_tail;
  norm.x_strides = x.strides;
  norm.rows = params.rows;
  norm.hidden_size = params.hidden_size;
  norm.eps = params.eps;
  norm.weight_offset = params.weight_offset;
  norm.segments = params.segments;
  norm.x_dtype = params.x_dtype;
  norm.y_dtype = params.y_dtype;
  norm.is_rms_norm = params.is_rms_norm;

  const AfterNorm epilogue{params.activation, params.drops_y ? params.dropout : Dropout{}};
  const bool has_epilogue = params.has_epilogue();
  KernelForwardParams of_z = norm;
  AddStage stage{};
  bool adds = false;
  if (params.residual_out) {
    of_z.x = params.residual_out;
    of_z.x_dtype = params.z_dtype;
    of_z.x_strides = contiguous(params.rows, params.hidden_size);
    stage.residual = params.residual;
    stage.residual_out = params.residual_out;
    stage.residual_strides = params.residual_strides;
    stage.residual_dtype = params.residual ? params.residual_dtype : params.z_dtype;
    stage.residual_out_dtype = params.z_dtype;
    if (params.drops_x()) stage.dropout = params.dropout;
    const Parameters gate = run.readable({params.gate, nullptr, params.gate_stride, params.x_dtype}, params.x_dtype);
    stage.gate = gate.weight;
    stage.gate_stride = gate.stride;
    // A kernel with an epilogue is worth more than one with a load stage: the epilogue alone reads z again
    adds = has_add_stage(norm, stage) && !(has_epilogue && has_after_stage(of_z));
    if (adds) {
      const Rows residual =
          run.readable({stage.residual, stage.residual_strides, stage.residual_dtype}, stage.residual_dtype);
      stage.residual = residual.data;
      stage.residual_strides = residual.data ? residual.strides : RowStrides{params.rows, 0, 0};
    } else {
      run.launch([&](cudaStream_t stream) {
        return launch_quads(is_double ? load_stage_kernel<double> : load_stage_kernel<float>, params.rows,
                            params.hidden_size, stream, norm, stage);
      });
      const Rows z = run.readable({of_z.x, of_z.x_strides, of_z.x_dtype}, is_double ? params.x_dtype : params.z_dtype);
      of_z.x = z.data;
      of_z.x_dtype = z.dtype;
      norm = of_z;
    }
  }

  const bool is_fused = has_epilogue && !adds && has_after_stage(norm);
  complete_statistics(norm, has_epilogue && !is_fused, run);
  const Parameters parameters =
      run.readable({params.weight, params.bias, params.weight_stride, params.weight_dtype},
                   adds && (params.weight || params.bias) ? params.weight_dtype
                                                          : parameter_dtype(params.weight_dtype, norm.x_dtype));
  norm.weight = parameters.weight;
  norm.bias = parameters.bias;
  norm.weight_stride = parameters.stride;
  norm.weight_dtype = parameters.dtype;
  if (adds) {
    run.launch([&](cudaStream_t stream) { return launch_forward(norm, stage, stream); });
  } else if (is_fused) {
    run.launch([&](cudaStream_t stream) { return launch_after_of(norm, epilogue, stream); });
  } else {
    norm.workspace = run.take(forward_workspace(norm));
    run.launch([&](cudaStream_t stream) { return launch_forward(norm, stream); });
  }
  if (!has_epilogue || is_fused) return;
  const SavedNorm saved{{of_z.x, of_z.x_strides, of_z.x_dtype},
                        norm.rstd,
                        norm.mean,
                        norm.mean_tail,
                        norm.weight,
                        norm.bias,
                        norm.weight_dtype,
                        norm.weight_offset,
                        norm.weight_stride,
                        norm.rows,
                        norm.hidden_size,
                        1};
  run.launch([&](cudaStream_t stream) {
    return launch_eights(is_double ? epilogue_kernel<double> : epilogue_kernel<float>, norm.rows, norm.hidden_size, 1,
                         stream, saved, epilogue, norm.y, norm.y_dtype);
  });
}

// ---- backward ------------------------------------------------------------------------------------------------------

// What becomes of the gradient of the norm of z: grad_z with grad_residual_out added, grad_residual = grad_z and
// grad_input = keep * dropout_scale * grad_z. With has_load_stage by a kernel with that stage even where no gradient
// needs it, so that the bits do not depend on which gradients are wanted.
struct GradOfZ {
  bool has_load_stage;
  Rows grad_residual_out;
  void* grad_residual;
  DType grad_residual_dtype;
  void* grad_input;
  DType grad_input_dtype;
  Dropout dropout;
};

// `norm`: all but grad_output, grad_input, weight and workspace. grad_output is of norm.x_dtype, or norm.x_dtype is the
// accumulation type.
void backward_of_z(KernelBackwardParams norm, const Rows& grad_output, const Parameters& parameters,
                   const GradOfZ& of_z, Sequence& run) {
  const DType dtype = norm.x_dtype;
  const auto set_inputs = [&](const Rows& grad, DType weight_dtype) {
    norm.grad_output = grad.data;
    norm.grad_output_strides = grad.strides;
    const Parameters read = run.readable(parameters, weight_dtype);
    norm.weight = read.weight;
    norm.weight_stride = read.stride;
    norm.weight_dtype = read.dtype;
  };
  const bool has_stage = of_z.has_load_stage || of_z.grad_residual || of_z.grad_residual_out.data ||
                         of_z.dropout.philox || (of_z.grad_input && of_z.grad_input_dtype != dtype);
  AddGradStage stage{};
  if (has_stage) {
    stage.grad_residual = of_z.grad_residual;
    stage.grad_output_dtype = grad_output.dtype;
    stage.grad_input_dtype = of_z.grad_input_dtype;
    stage.grad_residual_dtype = of_z.grad_residual ? of_z.grad_residual_dtype : dtype;
    stage.dropout = of_z.dropout;
    norm.grad_input = of_z.grad_input;
    if (backward_workspace(norm, stage) != kNoKernel) {
      set_inputs(run.readable(grad_output, grad_output.dtype),
                 parameter_dtype(parameters.dtype, of_z.grad_input_dtype));
      const Rows skip = run.readable(of_z.grad_residual_out, dtype);
      stage.grad_residual_out = skip.data;
      stage.grad_residual_out_strides = skip.data ? skip.strides : RowStrides{norm.rows, 0, 0};
      norm.workspace = run.take(backward_workspace(norm, stage));
      return run.launch([&](cudaStream_t stream) { return launch_backward(norm, stage, stream); });
    }
  }
  set_inputs(run.readable(grad_output, dtype), parameter_dtype(parameters.dtype, dtype));
  // The gradient of the norm goes to a result of its type, else to the workspace
  norm.grad_input = of_z.grad_input;
  if (of_z.grad_residual && of_z.grad_residual_dtype == dtype) {
    norm.grad_input = of_z.grad_residual;
  } else if (of_z.grad_residual || (of_z.grad_input && of_z.grad_input_dtype != dtype)) {
    if (!of_z.grad_input || of_z.grad_input_dtype != dtype) norm.grad_input = run.take_rows(dtype);
  }
  norm.workspace = run.take(backward_workspace(norm));
  run.launch([&](cudaStream_t stream) { return launch_backward(norm, stream); });
  const auto is_done = [&](const void* result) { return !result || result == norm.grad_input; };
  if (!norm.grad_input ||
      (!of_z.grad_residual_out.data && !of_z.dropout.philox && is_done(of_z.grad_input) && is_done(of_z.grad_residual)))
    return;
  const Rows grad_norm{norm.grad_input, contiguous(norm.rows, norm.hidden_size), dtype};
  run.launch([&](cudaStream_t stream) {
    return launch_quads(dtype == DType::kFloat64 ? load_stage_grad_kernel<double> : load_stage_grad_kernel<float>,
                        norm.rows, norm.hidden_size, stream, grad_norm, of_z.grad_residual_out, stage, of_z.grad_input,
                        norm.rows, norm.hidden_size);
  });
}

// Of z = residual + keep * dropout_scale * gate * x where no kernel does it at once. gate * x is an RMSNorm of x with
// rstd = 1 that is a constant, weight = gate and grad_weight = grad_gate.
void backward_of_gate(const NormBackwardParams& params, const KernelBackwardParams& norm, const Rows& grad_output,
                      const Parameters& parameters, GradOfZ of_z, Sequence& run) {
  const DType dtype = norm.x_dtype;
  const bool wants_product = params.grad_input || params.grad_gate;
  Rows grad_product{of_z.grad_residual, contiguous(norm.rows, norm.hidden_size), dtype};
  of_z.grad_input = nullptr;
  of_z.grad_input_dtype = dtype;
  if (wants_product && (of_z.dropout.philox || !of_z.grad_residual || of_z.grad_residual_dtype != dtype))
    grad_product.data = of_z.grad_input = run.take_rows(dtype);
  if (!of_z.grad_input) of_z.dropout = {};
  backward_of_z(norm, grad_output, parameters, of_z, run);
  if (!wants_product) return;

  const Rows x = run.readable({params.x, params.x_strides, params.x_dtype}, dtype);
  KernelBackwardParams product{};
  product.x = x.data;
  product.x_strides = x.strides;
  product.x_dtype = dtype;
  product.rstd = run.filled(norm.rows, accumulation_dtype(dtype), 1);
  product.rows = norm.rows;
  product.hidden_size = norm.hidden_size;
  product.segments = norm.segments;
  product.is_rms_norm = true;
  product.grad_weight = params.grad_gate;
  product.grad_weight_dtype = params.grad_gate_dtype;
  backward_of_z(product, grad_product, {params.gate, nullptr, params.gate_stride, params.x_dtype},
                {false, {}, nullptr, dtype, params.grad_input, params.x_dtype, {}}, run);
}

// Where each row has a weight of its own.
void backward_each(const NormBackwardParams& params, KernelBackwardParams norm, Rows grad_output,
                   const Parameters& parameters, const GradOfZ& of_z, Sequence& run) {
  const DType dtype = norm.x_dtype;
  const bool takes_narrow = dtype == DType::kFloat32 && dtype_bytes(grad_output.dtype) == 2;
  grad_output = run.readable(grad_output, takes_narrow ? grad_output.dtype : dtype);
  norm.grad_output = grad_output.data;
  norm.grad_output_strides = grad_output.strides;
  norm.grad_input = params.grad_input;
  const bool is_double = dtype == DType::kFloat64;
  const Parameters read = run.readable(parameters, is_double || !parameters.weight ? dtype : parameters.dtype);
  norm.weight = read.weight ? read.weight : run.filled(norm.hidden_size, dtype, 1);
  norm.weight_stride = read.weight ? read.stride : 0;
  norm.weight_dtype = read.dtype;

  GateGradStage stage{};
  const Rows skip = run.readable(of_z.grad_residual_out, dtype);
  stage.grad_residual_out = skip.data;
  stage.grad_residual_out_strides = skip.strides;
  stage.grad_residual = of_z.grad_residual;
  stage.grad_output_dtype = grad_output.dtype;
  stage.grad_input_dtype = params.x_dtype;
  stage.grad_residual_dtype = of_z.grad_residual ? of_z.grad_residual_dtype : dtype;
  if (params.gate) {
    const Parameters gate = run.readable({params.gate, nullptr, params.gate_stride, params.x_dtype}, params.x_dtype);
    const Rows x = run.readable({params.x, params.x_strides, params.x_dtype}, params.x_dtype);
    stage.gate = gate.weight;
    stage.gate_stride = gate.stride;
    stage.x = x.data;
    stage.x_strides = x.strides;
    norm.grad_gate = params.grad_gate;
    norm.grad_gate_dtype = params.grad_gate_dtype;
  }
  run.launch([&](cudaStream_t stream) { return launch_backward_each(norm, stage, stream); });
}

// By one kernel with gate; false where there is none. grad_gate is not among what `accumulate` adds to.
bool backward_of_gate_fused(const NormBackwardParams& params, KernelBackwardParams norm, const Rows& grad_output,
                            const Parameters& parameters, const GradOfZ& of_z, Sequence& run) {
  if (of_z.dropout.philox || params.accumulate) return false;
  const DType dtype = norm.x_dtype;
  GateGradStage stage{};
  stage.grad_residual = of_z.grad_residual;
  stage.grad_output_dtype = grad_output.dtype;
  stage.grad_input_dtype = params.x_dtype;
  stage.grad_residual_dtype = of_z.grad_residual ? of_z.grad_residual_dtype : dtype;
  norm.grad_input = params.grad_input;
  norm.grad_gate = params.grad_gate;
  norm.grad_gate_dtype = params.grad_gate_dtype;
  if (backward_workspace(norm, stage) == kNoKernel) return false;
  if (!norm.grad_gate) {  // the kernel sums it up anyway
    norm.grad_gate_dtype = DType::kFloat32;
    norm.grad_gate = run.take(std::max(norm.segments, 1) * norm.hidden_size * dtype_bytes(norm.grad_gate_dtype));
  }
  const Rows grad = run.readable(grad_output, grad_output.dtype), skip = run.readable(of_z.grad_residual_out, dtype);
  norm.grad_output = grad.data;
  norm.grad_output_strides = grad.strides;
  stage.grad_residual_out = skip.data;
  stage.grad_residual_out_strides = skip.data ? skip.strides : RowStrides{norm.rows, 0, 0};
  const Parameters read = run.readable(parameters, parameter_dtype(parameters.dtype, params.x_dtype));
  norm.weight = read.weight;
  norm.weight_stride = read.stride;
  norm.weight_dtype = read.dtype;
  const Parameters gate = run.readable({params.gate, nullptr, params.gate_stride, params.x_dtype}, params.x_dtype);
  const Rows x = run.readable({params.x, params.x_strides, params.x_dtype}, params.x_dtype);
  stage.gate = gate.weight;
  stage.gate_stride = gate.stride;
  stage.x = x.data;
  stage.x_strides = x.strides;
  norm.workspace = run.take(backward_workspace(norm, stage));
  run.launch([&](cudaStream_t stream) { return launch_backward(norm, stage, stream); });
  return true;
}

// By one kernel with `stage`, an epilogue or forward's y in the place of z; false where there is none.
template <typename Stage>
bool backward_fused(const NormBackwardParams& params, KernelBackwardParams norm, const Rows& grad_output,
                    const Stage& stage, Sequence& run) {
  norm.grad_input = params.grad_input;
  if (grad_output.dtype != norm.x_dtype || params.x_dtype != norm.x_dtype || params.has_load_stage ||
      params.grad_residual || params.grad_residual_out || params.gate || params.drops_x() ||
      backward_workspace(norm, stage) == kNoKernel)
    return false;
  const Rows grad = run.readable(grad_output, grad_output.dtype);
  const Rows z = run.readable({norm.x, norm.x_strides, norm.x_dtype}, norm.x_dtype);
  norm.grad_output = grad.data;
  norm.grad_output_strides = grad.strides;
  norm.x = z.data;
  norm.x_strides = z.strides;
  const Parameters read = run.readable({params.weight, params.bias, params.weight_stride, params.weight_dtype},
                                       parameter_dtype(params.weight_dtype, norm.x_dtype));
  norm.weight = read.weight;
  norm.bias = read.bias;
  norm.weight_stride = read.stride;
  norm.weight_dtype = read.dtype;
  norm.workspace = run.take(backward_workspace(norm, stage));
  run.launch([&](cudaStream_t stream) { return launch_backward(norm, stage, stream); });
  return true;
}

void backward(const NormBackwardParams& params, Sequence& run) {
  if (!params.wants_rows() && !params.wants_columns()) return;
  const DType acc_dtype = accumulation_dtype(params.x_dtype);
  const bool is_double = acc_dtype == DType::kFloat64;
  const bool has_mean = !params.is_rms_norm && !params.z_is_y;
  Rows z{params.z, params.z_strides, params.z_dtype};
  Rows grad_output{params.grad_output, params.grad_output_strides, params.grad_output_dtype};
  KernelBackwardParams norm{};
  norm.x = z.data;
  norm.x_strides = z.strides;
  norm.x_dtype = z.dtype;
  norm.rstd = params.rstd;
  norm.mean = has_mean ? params.mean : nullptr;
  norm.mean_tail = has_mean ? params.mean_tail : nullptr;
  norm.grad_weight = params.grad_weight;
  norm.grad_bias = params.grad_bias;
  norm.rows = params.rows;
  norm.hidden_size = params.hidden_size;
  norm.weight_offset = params.weight_offset;
  norm.segments = params.segments;
  norm.grad_weight_dtype = params.grad_weight_dtype;
  norm.grad_bias_dtype = params.grad_bias_dtype;
  norm.is_rms_norm = params.is_rms_norm;
  norm.stats_grad = params.stats_grad;
  norm.accumulate = params.accumulate;
  const SavedNorm saved{z,
                        params.rstd,
                        norm.mean,
                        norm.mean_tail,
                        params.weight,
                        params.bias,
                        params.weight_dtype,
                        params.weight_offset,
                        params.weight_stride,
                        params.rows,
                        params.hidden_size,
                        params.segments};

  if (params.z_is_y) {
    if (backward_fused(params, norm, grad_output, FromYStage{}, run)) return;
    // Of fp16, z - mean may overflow
    const DType dtype = grad_output.dtype != z.dtype || z.dtype == DType::kFloat16 ? acc_dtype : z.dtype;
    void* centered = run.take_rows(dtype);
    run.launch([&](cudaStream_t stream) {
      const int64_t rows = params.segments > 1 ? params.rows / params.segments : params.rows;
      return launch_eights(is_double ? centered_from_y_kernel<double> : centered_from_y_kernel<float>, rows,
                           params.hidden_size, params.segments, stream, saved, centered, dtype);
    });
    z = {centered, contiguous(params.rows, params.hidden_size), dtype};
    if (!params.is_rms_norm && params.hidden_size == 1)  // which the kernels tell from RMSNorm by the mean
      norm.mean = norm.mean_tail = run.filled(params.rows, acc_dtype, 0);
  } else if (params.has_epilogue()) {
    const AfterNorm epilogue{params.activation, params.drops_y ? params.dropout : Dropout{}};
    if (backward_fused(params, norm, grad_output, epilogue, run)) return;
    const DType dtype = grad_output.dtype == z.dtype ? z.dtype : acc_dtype;
    void* grad_u = run.take_rows(dtype);
    run.launch([&](cudaStream_t stream) {
      return launch_eights(is_double ? epilogue_grad_kernel<double> : epilogue_grad_kernel<float>, params.rows,
                           params.hidden_size, 1, stream, saved, epilogue, grad_output, grad_u, dtype);
    });
    grad_output = {grad_u, contiguous(params.rows, params.hidden_size), dtype};
  }

  z = run.readable(z, grad_output.dtype == z.dtype && !is_double ? z.dtype : acc_dtype);
  norm.x = z.data;
  norm.x_strides = z.strides;
  norm.x_dtype = z.dtype;
  const Parameters parameters{params.weight, nullptr, params.weight_stride,
                              params.weight ? params.weight_dtype : z.dtype};
  const GradOfZ of_z{params.has_load_stage,
                     {params.grad_residual_out, params.grad_residual_out_strides, params.grad_residual_out_dtype},
                     params.grad_residual,
                     params.residual_dtype,
                     params.grad_input,
                     params.x_dtype,
                     params.drops_x() ? params.dropout : Dropout{}};
  if (has_each_kernel(norm) && !of_z.dropout.philox)
    return backward_each(params, norm, grad_output, parameters, of_z, run);
  if (!params.gate) return backward_of_z(norm, grad_output, parameters, of_z, run);
  if (backward_of_gate_fused(params, norm, grad_output, parameters, of_z, run)) return;
  backward_of_gate(params, norm, grad_output, parameters, of_z, run);
}

}  // namespace

int64_t norm_forward_workspace_cuda(const NormForwardParams& params) {
  Sequence plan(params);
  forward(params, plan);
  return plan.bytes();
}

int launch_norm_forward_cuda(const NormForwardParams& params, CUstream_st* stream) {
  Sequence run(params, stream);
  forward(params, run);
  return run.error();
}

int64_t norm_backward_workspace_cuda(const NormBackwardParams& params) {
  Sequence plan(params);
  backward(params, plan);
  return plan.bytes();
}

int launch_norm_backward_cuda(const NormBackwardParams& params, CUstream_st* stream) {
  Sequence run(params, stream);
  backward(params, run);
  return run.error();
}

int launch_dropout_mask_cuda(const DropoutMaskParams& params, CUstream_st* stream) {
  return launch_quads(dropout_mask_kernel, params.rows, params.hidden_size, stream, params);
}

}  // namespace fused_layernorm
