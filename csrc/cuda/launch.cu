// The entry points of norm_params.h: the launches of each call.
//
// A call that a kernel takes whole becomes one launch (and the final sum of partial weight gradients). Any other call
// is composed here: conversions of dtypes and layouts that no kernel reads, the load stage and the epilogue as
// elementwise kernels around the plain norm, and their adjoints. The choice depends on dtypes, hidden_size, options and
// the card, never on the number of rows. Temporaries are in the workspace.
#include <mutex>

#include "activation.cuh"
#include "dispatch.cuh"
#include "elementwise.cuh"
#include "forward_rows.cuh"
#include "kernel_params.h"
#include "launch_plan.h"
#include "launchers.h"
#include "stages.cuh"
#include "vector_io.cuh"

namespace fused_layernorm {
namespace {

__global__ void probe_kernel() {}  // whose attributes tell which architecture this code was compiled for

cudaError_t ask_device(int device, DeviceFacts& facts) {
  int major = 0;
  cudaFuncAttributes code{};
  facts.device = device;
  cudaError_t error = cudaDeviceGetAttribute(&facts.multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&facts.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&facts.sm_shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&facts.reserved_shared_bytes, cudaDevAttrReservedSharedMemoryPerBlock, device);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&code, probe_kernel);
  if (error == cudaSuccess && code.ptxVersion >= 90) facts.max_cluster = major == 9 || major == 10 ? 16 : 8;
  return error;
}

// Rows in memory; data is nullptr if there are none.
struct Rows {
  const void* data;
  RowStrides strides;
  DType dtype;
};

RowStrides contiguous(int64_t rows, int64_t hidden_size) { return {rows, hidden_size, 0}; }

// ---- elementwise kernels, of any type ------------------------------------------------------------------------------
// acc_t: double if an input or the accumulation type is fp64.

template <typename acc_t>
__global__ void __launch_bounds__(kEightsThreads)
    convert_kernel(const __grid_constant__ Extent extent, const __grid_constant__ Rows source, void* target,
                   DType dtype, int64_t target_stride) {
  for_each_eight(extent.rows, extent.hidden_size, [&](int64_t row, int64_t col, int count) {
    acc_t values[8];
    load_columns<8>(values, source.data, source.dtype, source.strides.offset(row) + col, count);
    store_columns(target, dtype, row * target_stride + col, values, count);
  });
}

__global__ void __launch_bounds__(kEightsThreads)
    fill_kernel(const __grid_constant__ Extent extent, void* target, DType dtype, double value) {
  for_each_eight(extent.rows, extent.hidden_size, [&](int64_t, int64_t col, int count) {
    const double values[8] = {value, value, value, value, value, value, value, value};
    store_columns(target, dtype, col, values, count);
  });
}

// The load stage: computes z from x.
template <typename acc_t>
__global__ void __launch_bounds__(kEightsThreads)
    load_stage_kernel(const __grid_constant__ Extent extent, const __grid_constant__ KernelForwardParams params,
                      const __grid_constant__ LoadStage stage) {
  for_each_eight(extent.rows, extent.hidden_size, [&](int64_t row, int64_t col, int count) {
    acc_t z[8];
    load_columns<8>(z, params.x, params.x_dtype, params.x_strides.offset(row) + col, count);
    if (stage.dropout.philox) RowDropout<acc_t>(stage.dropout, row).apply(z, col);
    if (stage.gate) {
      acc_t gate[8];
      load_columns<8>(gate, stage.gate, params.x_dtype, segment_of(params, row) * stage.gate_stride + col, count);
#pragma unroll
      for (int i = 0; i < 8; ++i) z[i] = mul(z[i], gate[i]);
    }
    if (stage.residual) {
      acc_t residual[8];
      load_columns<8>(residual, stage.residual, stage.residual_dtype, stage.residual_strides.offset(row) + col, count);
#pragma unroll
      for (int i = 0; i < 8; ++i) z[i] = add(residual[i], z[i]);
    }
    store_columns(stage.residual_out, stage.residual_out_dtype, row * extent.hidden_size + col, z, count);
  });
}

// The adjoint of the load stage without gate. `grad_norm`: the gradient of the norm of z, contiguous; it may alias a
// result.
template <typename acc_t>
__global__ void __launch_bounds__(kEightsThreads)
    load_stage_grad_kernel(const __grid_constant__ Extent extent, const __grid_constant__ Rows grad_norm,
                           const __grid_constant__ Rows grad_residual_out, const __grid_constant__ GradStages stages,
                           void* grad_input) {
  for_each_eight(extent.rows, extent.hidden_size, [&](int64_t row, int64_t col, int count) {
    const int64_t at = row * extent.hidden_size + col;
    acc_t grad[8];
    load_columns<8>(grad, grad_norm.data, grad_norm.dtype, at, count);
    if (grad_residual_out.data) {
      acc_t residual_grad[8];
      load_columns<8>(residual_grad, grad_residual_out.data, grad_residual_out.dtype,
                      grad_residual_out.strides.offset(row) + col, count);
#pragma unroll
      for (int i = 0; i < 8; ++i) grad[i] = add(grad[i], residual_grad[i]);
    }
    if (stages.grad_residual) store_columns(stages.grad_residual, stages.grad_residual_dtype, at, grad, count);
    if (stages.dropout.philox) RowDropout<acc_t>(stages.dropout, row).apply(grad, col);
    if (grad_input) store_columns(grad_input, stages.grad_input_dtype, at, grad, count);
  });
}

// What recomputes u: z, the saved statistics, weight and bias. rounds_x_hat: as in norm_params.h.
struct SavedNorm {
  Rows z;
  const void *rstd, *mean, *mean_tail, *weight, *bias;
  DType weight_dtype;
  double weight_offset;
  int64_t weight_stride, rows, hidden_size;
  int segments;
  bool interleaves, rounds_x_hat;
};

// Rounds to `dtype`.
template <typename acc_t, int kCount>
__device__ __forceinline__ void round_as(acc_t (&values)[kCount], DType dtype) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float value = static_cast<float>(values[i]);
    if (dtype == DType::kFloat16) values[i] = __half2float(__float2half_rn(value));
    if (dtype == DType::kBFloat16) values[i] = __bfloat162float(__float2bfloat16_rn(value));
  }
}

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
    for (int i = 0; i < 8; ++i) weight[i] = 1, bias[i] = acc_t(-0.0);  // which changes no sum
    if (norm.bias) load_columns<8>(bias, norm.bias, norm.weight_dtype, at, count);
    if (!norm.weight) return;
    load_columns<8>(weight, norm.weight, norm.weight_dtype, at, count);
    if (norm.weight_offset == 0) return;  // adding 0 would lose the sign of -0
#pragma unroll
    for (int i = 0; i < 8; ++i) weight[i] += static_cast<acc_t>(norm.weight_offset);
  }
  __device__ acc_t saved(const void* statistic, int64_t row) const {
    return statistic ? static_cast<const acc_t*>(statistic)[row] : acc_t(0);
  }
  __device__ void load(acc_t (&values)[8], int64_t row) const {
    load_columns<8>(values, norm.z.data, norm.z.dtype, norm.z.strides.offset(row) + col, count);
  }
  // Computes u of a row.
  __device__ void operator()(acc_t (&values)[8], int64_t row) const {
    const acc_t rstd = saved(norm.rstd, row), mean = saved(norm.mean, row), mean_tail = saved(norm.mean_tail, row);
    load(values, row);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = ((values[i] - mean) - mean_tail) * rstd;
    if (norm.rounds_x_hat) round_as(values, norm.z.dtype);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = fma(values[i], weight[i], bias[i]);
    if (norm.rounds_x_hat && norm.weight_dtype == norm.z.dtype) round_as(values, norm.z.dtype);
  }
};

// The rows of a segment: first, first + step, ...
struct SegmentRows {
  int64_t first, step, count;
};

// Calls f(segment, its rows) for each segment of this block.
template <typename F>
__device__ __forceinline__ void for_each_segment(const SavedNorm& norm, F&& f) {
  const int64_t segments = norm.segments > 1 ? norm.segments : 1, count = norm.rows / segments;
  for (int64_t segment = blockIdx.z; segment < segments; segment += gridDim.z)
    f(segment, norm.interleaves ? SegmentRows{segment, segments, count} : SegmentRows{segment * count, 1, count});
}

// The epilogue: y = dropout(activation(u)), contiguous, from z and its statistics. Launched with the segments.
template <typename acc_t>
__global__ void __launch_bounds__(kEightsThreads)
    epilogue_kernel(const __grid_constant__ SavedNorm norm, const __grid_constant__ Epilogue epilogue, void* y,
                    DType y_dtype) {
  for_each_segment(norm, [&](int64_t segment, const SegmentRows& rows) {
    for_each_of_columns(rows.count, norm.hidden_size, [&](int64_t col, int count) {
      return [&, col, count, rows, u = NormOfColumns<acc_t>(norm, segment, col, count)](int64_t row) {
        row = rows.first + row * rows.step;
        acc_t values[8];
        u(values, row);
        with_activation(epilogue.activation, [&](auto which) { activate<false>(values, which); });
        if (epilogue.dropout.philox) RowDropout<acc_t>(epilogue.dropout, row).apply(values, col);
        store_columns(y, y_dtype, row * norm.hidden_size + col, values, count);
      };
    });
  });
}

// The adjoint of the epilogue: grad_u, contiguous, from grad_output.
template <typename acc_t>
__global__ void __launch_bounds__(kEightsThreads)
    epilogue_grad_kernel(const __grid_constant__ SavedNorm norm, const __grid_constant__ Epilogue epilogue,
                         const __grid_constant__ Rows grad_output, void* grad_u, DType grad_u_dtype) {
  for_each_of_columns(norm.rows, norm.hidden_size, [&](int64_t col, int count) {
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

// z - mean, contiguous, from y in norm.z.
template <typename acc_t>
__global__ void __launch_bounds__(kEightsThreads)
    centered_from_y_kernel(const __grid_constant__ SavedNorm norm, void* target, DType dtype) {
  for_each_segment(norm, [&](int64_t segment, const SegmentRows& rows) {
    for_each_of_columns(rows.count, norm.hidden_size, [&](int64_t col, int count) {
      NormOfColumns<acc_t> columns(norm, segment, col, count);
#pragma unroll
      for (int i = 0; i < 8; ++i) columns.weight[i] = 1 / columns.weight[i];
      return [&, col, count, rows, columns](int64_t row) {
        row = rows.first + row * rows.step;
        const acc_t sigma = 1 / columns.saved(norm.rstd, row);
        acc_t values[8];
        columns.load(values, row);
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = (values[i] - columns.bias[i]) * columns.weight[i] * sigma;
        store_columns(target, dtype, row * norm.hidden_size + col, values, count);
      };
    });
  });
}

// A gated norm around the plain one: target = source * activation(gate), contiguous; with `adds` source + gate.
template <typename acc_t>
__global__ void __launch_bounds__(kEightsThreads)
    gate_kernel(const __grid_constant__ Extent extent, const __grid_constant__ Rows source,
                const __grid_constant__ Rows gate, Activation activation, bool adds, void* target, DType dtype) {
  for_each_eight(extent.rows, extent.hidden_size, [&](int64_t row, int64_t col, int count) {
    acc_t values[8], factor[8];
    load_columns<8>(values, source.data, source.dtype, source.strides.offset(row) + col, count);
    load_columns<8>(factor, gate.data, gate.dtype, gate.strides.offset(row) + col, count);
    if (!adds) with_gate_activation(activation, [&](auto which) { activate<false>(factor, which); });
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = adds ? add(values[i], factor[i]) : mul(values[i], factor[i]);
    store_columns(target, dtype, row * extent.hidden_size + col, values, count);
  });
}

// The gradient of the gate, contiguous: that of the product, times what the gate's activation was multiplied by, times
// the derivative. At least one block an SM: without that bound nvcc 13.0 spills at 128 registers (fp64).
template <typename acc_t>
__global__ void __launch_bounds__(kEightsThreads, 1)
    gate_grad_kernel(const __grid_constant__ Extent extent, const __grid_constant__ Rows grad_product,
                     const __grid_constant__ Rows other, const __grid_constant__ Rows gate, Activation activation,
                     void* target, DType dtype) {
  for_each_eight(extent.rows, extent.hidden_size, [&](int64_t row, int64_t col, int count) {
    acc_t values[8], others[8], factor[8];
    load_columns<8>(values, gate.data, gate.dtype, gate.strides.offset(row) + col, count);
    with_gate_activation(activation, [&](auto which) { gate_of<false>(values, others, factor, which); });
    load_columns<8>(values, grad_product.data, grad_product.dtype, grad_product.strides.offset(row) + col, count);
    load_columns<8>(others, other.data, other.dtype, other.strides.offset(row) + col, count);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = mul(mul(values[i], others[i]), factor[i]);
    store_columns(target, dtype, row * extent.hidden_size + col, values, count);
  });
}

__global__ void __launch_bounds__(kEightsThreads)
    dropout_mask_kernel(const __grid_constant__ Extent extent, const __grid_constant__ DropoutMaskParams params) {
  const Dropout& dropout = params.dropout;
  for_each_eight(extent.rows, extent.hidden_size, [&](int64_t row, int64_t col, int count) {
    const DropoutOctet numbers(dropout, row, col);
#pragma unroll
    for (int k = 0; k < 8; ++k)
      if (k < count)
        params.mask[row * extent.hidden_size + col + k] = numbers.number(k % 4, k >= 4) > dropout.most_dropped;
  });
}

// ---- a call's launches, and its workspace ---------------------------------------------------------------------------

// Weight and bias (or a gate) of all segments, in the layout that kernels read.
struct Parameters {
  const void *weight, *bias;
  int64_t stride;
  DType dtype;
};

// The launches of one call in order. Constructed without a stream, a Sequence launches nothing: the same code then
// computes the size of the workspace, bytes().
class Sequence {
 public:
  template <typename Params>
  explicit Sequence(const Params& params)
      : rows_(params.rows),
        hidden_size_(params.hidden_size),
        segments_(std::max(params.segments, 1)),
        cuts_(segments_ > 1 && !params.interleaves) {}
  template <typename Params>
  Sequence(const Params& params, cudaStream_t stream) : Sequence(params) {
    launches_ = true;
    stream_ = stream;
    base_ = static_cast<char*>(params.workspace);
  }

  int64_t bytes() const { return bytes_; }
  cudaError_t error() const { return error_; }

  // Allocates from the workspace, aligned to 16 bytes. Without a stream the pointer is not null, and not valid.
  void* take(int64_t bytes) {
    void* found = base_ + bytes_;
    bytes_ += (bytes + 15) / 16 * 16;
    return found;
  }
  void* take_rows(DType dtype) { return take(rows_ * hidden_size_ * dtype_bytes(dtype)); }

  // Calls f(stream), unless an earlier launch failed.
  template <typename F>
  void launch(F&& f) {
    if (launches_ && error_ == cudaSuccess) error_ = f(stream_);
  }

  // `rows` in a layout that kernels of `dtype` read: in place, or a contiguous copy. Rows of whole 16-byte vectors are
  // loaded by such, so they must begin at multiples of 16 bytes. A segment that is launched separately must begin a
  // group of rows, or lie within one.
  Rows readable(const Rows& rows, DType dtype) {
    if (!rows.data || (rows.dtype == dtype && is_aligned16(rows) && may_be_cut(rows.strides))) return rows;
    void* copy = take_rows(dtype);
    convert(rows, rows_, hidden_size_, copy, dtype, hidden_size_);
    return {copy, contiguous(rows_, hidden_size_), dtype};
  }

  // The same for parameters: each segment's begin at multiples of 16 bytes.
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
      convert({*data, {segments_, parameters.stride, 0}, parameters.dtype}, segments_, hidden_size_, copy, dtype,
              found.stride);
      *data = copy;
    }
    return found;
  }

  void* filled(int64_t count, DType dtype, double value) {
    void* target = take(count * dtype_bytes(dtype));
    launch([=](cudaStream_t stream) {
      return launch_eights(Extent{1, count}, fill_kernel, stream, target, dtype, value);
    });
    return target;
  }

  void convert(const Rows& source, int64_t rows, int64_t hidden_size, void* target, DType dtype,
               int64_t target_stride) {
    const auto kernel =
        source.dtype == DType::kFloat64 && dtype == source.dtype ? convert_kernel<double> : convert_kernel<float>;
    const Extent extent = extent_of(rows, hidden_size, {source.strides, {rows, target_stride, 0}});
    launch([=](cudaStream_t stream) {
      return launch_eights(extent, kernel, stream, source, target, dtype, target_stride);
    });
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
    return !cuts_ || strides.is_even(rows_) || rows % strides.rows_per_group == 0 || strides.rows_per_group % rows == 0;
  }

  int64_t rows_, hidden_size_, segments_;
  bool cuts_;  // whether segments may be launched separately
  bool launches_ = false;
  cudaStream_t stream_ = nullptr;
  char* base_ = reinterpret_cast<char*>(uintptr_t{1} << 12);
  int64_t bytes_ = 0;
  cudaError_t error_ = cudaSuccess;
};

// The dtype to which parameters of `given` are converted for kernels of `dtype`.
DType parameter_dtype(DType given, DType dtype) { return given == dtype ? dtype : accumulation_dtype(dtype); }

// ---- forward -------------------------------------------------------------------------------------------------------

// Kernels write all statistics or none. `needs`: a later launch reads them even if the caller does not want them.
void complete_statistics(KernelForwardParams& norm, bool needs, Sequence& run) {
  if (!needs && !norm.rstd && !norm.mean && !norm.mean_tail) return;
  const int64_t bytes = norm.rows * dtype_bytes(accumulation_dtype(norm.x_dtype));
  if (!norm.rstd) norm.rstd = run.take(bytes);
  if (norm.is_rms_norm) return;
  if (!norm.mean) norm.mean = run.take(bytes);
  if (!norm.mean_tail) norm.mean_tail = run.take(bytes);
}

void read_parameters(const NormForwardParams& params, DType dtype, KernelForwardParams& norm, Sequence& run) {
  const Parameters read = run.readable({params.weight, params.bias, params.weight_stride, params.weight_dtype}, dtype);
  norm.weight = read.weight;
  norm.bias = read.bias;
  norm.weight_stride = read.stride;
  norm.weight_dtype = read.dtype;
}

// Launches the plain norm.
void forward_plain(KernelForwardParams& norm, Sequence& run) {
  norm.workspace = run.take(forward_workspace(norm));
  run.launch([&](cudaStream_t stream) { return launch_forward(norm, stream); });
}

// target = source * activation(gate) in the accumulation type of x, or source + gate.
template <typename Params>
void apply_row_gate(const Params& params, const Rows& source, const Rows& gate, bool adds, void* target, DType dtype,
                    Sequence& run) {
  const bool is_double = accumulation_dtype(params.x_dtype) == DType::kFloat64;
  run.launch([&](cudaStream_t stream) {
    return launch_eights(extent_of(params.rows, params.hidden_size, {source.strides, gate.strides}),
                         is_double ? gate_kernel<double> : gate_kernel<float>, stream, source, gate,
                         params.gate_activation, adds, target, dtype);
  });
}

void forward(const NormForwardParams& params, Sequence& run);

// A gated norm, or one to which a residual is added: one kernel, or the plain norm, the product or sum, and the next
// norm. `norm` lacks weight and bias.
void forward_gated(const NormForwardParams& params, KernelForwardParams norm, Sequence& run) {
  const DType acc_dtype = accumulation_dtype(params.x_dtype);
  const RowStrides dense = contiguous(params.rows, params.hidden_size);
  const bool adds = params.adds_y, is_after = params.gates_y || adds;
  const Rows gate = adds ? Rows{params.residual, params.residual_strides, params.residual_dtype}
                         : Rows{params.row_gate, params.row_gate_strides, params.row_gate_dtype};
  if (gate.dtype == params.x_dtype && takes_gate(norm) && (!params.next_y || params.y_dtype == params.x_dtype)) {
    const Rows read = run.readable(gate, gate.dtype);
    const NextNorm next{params.next_weight,
                        params.next_y,
                        params.next_rstd,
                        params.next_weight_dtype,
                        static_cast<float>(params.next_eps),
                        static_cast<float>(params.next_weight_offset)};
    const RowGate row_gate{read.data, read.strides, params.gate_activation, is_after, adds, next};
    complete_statistics(norm, false, run);
    read_parameters(params, parameter_dtype(params.weight_dtype, norm.x_dtype), norm, run);
    return run.launch([&](cudaStream_t stream) { return launch_forward(norm, row_gate, stream); });
  }
  void* const product = run.take_rows(acc_dtype);
  const auto apply = [&](const Rows& source, void* target, DType dtype) {
    apply_row_gate(params, source, gate, adds, target, dtype, run);
  };
  if (is_after) {
    norm.y = product;
    norm.y_dtype = acc_dtype;
  } else {
    apply({norm.x, norm.x_strides, norm.x_dtype}, product, acc_dtype);
    norm.x = product;
    norm.x_strides = dense;
    norm.x_dtype = acc_dtype;
  }
  complete_statistics(norm, false, run);
  read_parameters(params, parameter_dtype(params.weight_dtype, norm.x_dtype), norm, run);
  forward_plain(norm, run);
  if (is_after) apply({product, dense, acc_dtype}, params.y, params.y_dtype);
  if (!params.next_y) return;
  NormForwardParams next{};
  next.x = params.y;
  next.x_strides = dense;
  next.x_dtype = params.y_dtype;
  next.y = params.next_y;
  next.y_dtype = params.x_dtype;
  next.weight = params.next_weight;
  next.weight_dtype = params.next_weight_dtype;
  next.weight_offset = params.next_weight_offset;
  next.eps = params.next_eps;
  next.rstd = params.next_rstd;
  next.rows = params.rows;
  next.hidden_size = params.hidden_size;
  next.is_rms_norm = true;
  forward(next, run);
}

void apply_epilogue(const SavedNorm& saved, const Epilogue& epilogue, void* y, DType y_dtype, bool is_double,
                    Sequence& run) {
  const int segments = std::max(saved.segments, 1);
  run.launch([&](cudaStream_t stream) {
    return launch_by_columns({saved.rows / segments, saved.hidden_size}, segments,
                             is_double ? epilogue_kernel<double> : epilogue_kernel<float>, stream, saved, epilogue, y,
                             y_dtype);
  });
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
  norm.interleaves = params.interleaves;
  norm.x_dtype = params.x_dtype;
  norm.y_dtype = params.y_dtype;
  norm.is_rms_norm = params.is_rms_norm;
  if (params.row_gate || params.adds_y) return forward_gated(params, norm, run);

  const Epilogue epilogue{params.activation, params.drops_y ? params.dropout : Dropout{}};
  LoadStage none{};
  none.residual_strides = {params.rows, 0, 0};
  none.residual_out_dtype = params.x_dtype;
  none.rounds_x_hat = params.rounds_x_hat;
  LoadStage stage = none;
  bool has_stages = params.has_load_stage || params.has_epilogue() || params.rounds_x_hat;
  if (params.has_load_stage) {
    stage.residual = params.residual;
    stage.residual_out = params.residual_out;
    if (params.residual) stage.residual_strides = params.residual_strides;
    stage.residual_dtype = params.residual ? params.residual_dtype : params.z_dtype;
    stage.residual_out_dtype = params.z_dtype;
    if (params.drops_x()) stage.dropout = params.dropout;
    const Parameters gate = run.readable({params.gate, nullptr, params.gate_stride, params.x_dtype}, params.x_dtype);
    stage.gate = gate.weight;
    stage.gate_stride = gate.stride;
    if (takes_stages(norm, stage, epilogue)) {
      const Rows residual =
          run.readable({stage.residual, stage.residual_strides, stage.residual_dtype}, stage.residual_dtype);
      stage.residual = residual.data;
      if (residual.data) stage.residual_strides = residual.strides;
    } else {  // a launch before
      if (!stage.residual_out) stage.residual_out = run.take_rows(params.z_dtype);
      const bool is_by_row = stage.gate || stage.dropout.philox;
      const Extent extent = is_by_row ? Extent{params.rows, params.hidden_size}
                                      : extent_of(params.rows, params.hidden_size,
                                                  {x.strides, stage.residual ? stage.residual_strides : x.strides});
      run.launch([&](cudaStream_t stream) {
        return launch_eights(extent, is_double ? load_stage_kernel<double> : load_stage_kernel<float>, stream, norm,
                             stage);
      });
      const Rows z = run.readable({stage.residual_out, contiguous(params.rows, params.hidden_size), params.z_dtype},
                                  is_double ? params.x_dtype : params.z_dtype);
      norm.x = z.data;
      norm.x_strides = z.strides;
      norm.x_dtype = z.dtype;
      stage = none;
      stage.residual_out_dtype = z.dtype;
      has_stages = params.has_epilogue() || params.rounds_x_hat;
    }
  }

  const bool is_apart = has_stages && !takes_stages(norm, stage, epilogue);  // a last launch makes y
  const bool is_fused = has_stages && !is_apart;
  // Kernels of float32 z read weights of any type but float64
  const bool reads_any =
      is_fused && stage.residual_out_dtype == DType::kFloat32 && dtype_bytes(params.weight_dtype) <= 4;
  complete_statistics(norm, is_apart, run);
  read_parameters(params, reads_any ? params.weight_dtype : parameter_dtype(params.weight_dtype, norm.x_dtype), norm,
                  run);
  if (is_fused)
    run.launch([&](cudaStream_t stream) { return launch_forward(norm, stage, epilogue, stream); });
  else
    forward_plain(norm, run);
  if (!is_apart) return;
  const SavedNorm saved{{norm.x, norm.x_strides, norm.x_dtype},
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
                        norm.segments,
                        norm.interleaves,
                        stage.rounds_x_hat};
  apply_epilogue(saved, epilogue, norm.y, norm.y_dtype, is_double, run);
}

// ---- backward ------------------------------------------------------------------------------------------------------

// The remaining work of a backward call.
struct BackwardCall {
  KernelBackwardParams norm;  // x_dtype, but not the tensors below
  GradStages stages;          // likewise
  Rows z, grad_output, grad_residual_out, x, row_gate;
  Parameters parameters, gate;

  // Converts tensors for kernels of norm.x_dtype: grad_output to `grad_dtype`, parameters to `parameter_dtype`.
  void make_readable(DType grad_dtype, DType parameter_dtype, Sequence& run) {
    const auto rows_of = [&](const Rows& rows, DType dtype, const void*& data, RowStrides& strides) {
      const Rows read = run.readable(rows, dtype);
      data = read.data;
      strides = read.data ? read.strides : RowStrides{norm.rows, 0, 0};
    };
    rows_of(z, norm.x_dtype, norm.x, norm.x_strides);
    rows_of(grad_output, grad_dtype, norm.grad_output, norm.grad_output_strides);
    rows_of(grad_residual_out, norm.x_dtype, stages.grad_residual_out, stages.grad_residual_out_strides);
    rows_of(row_gate, norm.x_dtype, stages.row_gate.gate, stages.row_gate.strides);
    const Parameters read = run.readable(parameters, parameter_dtype);
    norm.weight = read.weight;
    norm.bias = read.bias;
    norm.weight_stride = read.stride;
    norm.weight_dtype = read.dtype;
    if (!gate.weight) return;
    rows_of(x, stages.grad_input_dtype, stages.x, stages.x_strides);
    const Parameters read_gate = run.readable(gate, stages.grad_input_dtype);
    stages.gate = read_gate.weight;
    stages.gate_stride = read_gate.stride;
  }
};

// Launches one kernel with all stages, or with interleaved segments; returns false if there is none. A load stage
// counts even if no wanted gradient needs it, so that the bits do not depend on which gradients are wanted.
bool backward_at_once(BackwardCall call, Sequence& run) {
  call.norm.x_dtype = call.z.dtype;
  call.stages.grad_output_dtype = call.grad_output.dtype;
  if (!call.stages.from_y && !call.stages.epilogue.any() && !call.stages.row_gate.gates_y)
    call.parameters.bias = nullptr;  // it would not be read
  call.norm.weight_dtype = parameter_dtype(call.parameters.dtype, call.stages.grad_input_dtype);
  if ((!call.stages.any() && !call.norm.interleaves) || !takes_stages(call.norm, call.stages)) return false;
  if (call.row_gate.data && call.row_gate.dtype != call.z.dtype) return false;
  call.make_readable(call.grad_output.dtype, call.norm.weight_dtype, run);
  call.norm.workspace = run.take(backward_workspace(call.norm, call.stages));
  run.launch([&](cudaStream_t stream) { return launch_backward(call.norm, call.stages, stream); });
  return true;
}

// With per-row weights.
void backward_per_row(BackwardCall call, Sequence& run) {
  const DType dtype = call.norm.x_dtype;
  const bool takes_narrow = dtype == DType::kFloat32 && dtype_bytes(call.grad_output.dtype) == 2;
  call.stages.grad_output_dtype = takes_narrow ? call.grad_output.dtype : dtype;
  const bool has_weight = call.parameters.weight, is_double = dtype == DType::kFloat64;
  call.make_readable(call.stages.grad_output_dtype, is_double || !has_weight ? dtype : call.parameters.dtype, run);
  if (!has_weight) {
    call.norm.weight = run.filled(call.norm.hidden_size, dtype, 1);
    call.norm.weight_stride = 0;
  }
  run.launch([&](cudaStream_t stream) { return launch_backward_per_row(call.norm, call.stages, stream); });
}

// Without gate, from_y and epilogue: one kernel, or the plain norm and then the adjoint of the load stage.
void backward_of_z(BackwardCall call, Sequence& run) {
  const DType dtype = call.norm.x_dtype;
  void *grad_input = call.norm.grad_input, *grad_residual = call.stages.grad_residual;
  const bool converts_input = grad_input && call.stages.grad_input_dtype != dtype;
  call.stages.has_load_stage |=
      grad_residual || call.grad_residual_out.data || call.stages.dropout.philox || converts_input;
  if (backward_at_once(call, run)) return;
  GradStages load = call.stages, none{};
  none.grad_output_dtype = none.grad_input_dtype = dtype;
  // The gradient of the norm is written to a result of its dtype, else to the workspace
  if (grad_residual && call.stages.grad_residual_dtype == dtype) {
    call.norm.grad_input = grad_residual;
  } else if ((grad_residual || converts_input) && (!grad_input || converts_input)) {
    call.norm.grad_input = run.take_rows(dtype);
  }
  const Rows residual_grad = call.grad_residual_out;
  call.grad_residual_out.data = nullptr;
  call.make_readable(dtype, parameter_dtype(call.parameters.dtype, dtype), run);
  call.norm.workspace = run.take(backward_workspace(call.norm, none));
  run.launch([&](cudaStream_t stream) { return launch_backward(call.norm, none, stream); });
  const auto is_done = [&](const void* result) { return !result || result == call.norm.grad_input; };
  if (!call.norm.grad_input ||
      (!residual_grad.data && !load.dropout.philox && is_done(grad_input) && is_done(grad_residual)))
    return;
  const Rows grad_norm{call.norm.grad_input, contiguous(call.norm.rows, call.norm.hidden_size), dtype};
  const RowStrides& strides = residual_grad.data ? residual_grad.strides : grad_norm.strides;
  const Extent extent = load.dropout.philox ? Extent{call.norm.rows, call.norm.hidden_size}
                                            : extent_of(call.norm.rows, call.norm.hidden_size, {strides});
  run.launch([&](cudaStream_t stream) {
    return launch_eights(extent,
                         dtype == DType::kFloat64 ? load_stage_grad_kernel<double> : load_stage_grad_kernel<float>,
                         stream, grad_norm, residual_grad, load, grad_input);
  });
}

// z = residual + keep * dropout_scale * gate * x where no kernel takes the gate. gate * x is an RMSNorm of x with the
// constant rstd = 1, weight = gate and grad_weight = grad_gate.
void backward_of_gate(const NormBackwardParams& params, BackwardCall call, Sequence& run) {
  if (backward_at_once(call, run)) return;
  const DType dtype = call.norm.x_dtype;
  const bool wants_product = params.grad_input || params.grad_gate;
  const Parameters gate = call.gate;
  void* grad_residual = call.stages.grad_residual;
  Rows grad_product{grad_residual, contiguous(params.rows, params.hidden_size), dtype};
  call.gate = {};
  call.stages.gate = nullptr;
  call.norm.grad_input = call.norm.grad_gate = nullptr;
  call.stages.grad_input_dtype = dtype;
  if (wants_product && (call.stages.dropout.philox || !grad_residual || call.stages.grad_residual_dtype != dtype))
    grad_product.data = call.norm.grad_input = run.take_rows(dtype);
  if (!call.norm.grad_input) call.stages.dropout = {};
  backward_of_z(call, run);
  if (!wants_product) return;

  BackwardCall product{};
  product.z = call.x;
  product.grad_output = grad_product;
  product.parameters = gate;
  product.norm.x_dtype = dtype;
  product.norm.rstd = run.filled(params.rows, accumulation_dtype(dtype), 1);
  product.norm.rows = params.rows;
  product.norm.hidden_size = params.hidden_size;
  product.norm.segments = params.segments;
  product.norm.is_rms_norm = true;
  product.norm.grad_input = params.grad_input;
  product.norm.grad_weight = params.grad_gate;
  product.norm.grad_weight_dtype = params.grad_gate_dtype;
  product.stages.grad_input_dtype = params.x_dtype;
  product.z = run.readable(product.z, dtype);
  backward_of_z(product, run);
}

BackwardCall backward_call(const NormBackwardParams& params) {
  const bool has_mean = !params.is_rms_norm && !params.z_is_y;
  BackwardCall call{};
  KernelBackwardParams& norm = call.norm;
  norm.x_dtype = params.z_dtype;
  norm.rstd = params.rstd;
  norm.mean = has_mean ? params.mean : nullptr;
  norm.mean_tail = has_mean ? params.mean_tail : nullptr;
  norm.grad_input = params.grad_input;
  norm.grad_weight = params.grad_weight;
  norm.grad_bias = params.grad_bias;
  norm.grad_gate = params.gate ? params.grad_gate : nullptr;
  norm.rows = params.rows;
  norm.hidden_size = params.hidden_size;
  norm.weight_offset = params.weight_offset;
  norm.segments = params.segments;
  norm.interleaves = params.interleaves;
  norm.grad_weight_dtype = params.grad_weight_dtype;
  norm.grad_bias_dtype = params.grad_bias_dtype;
  norm.grad_gate_dtype = params.grad_gate_dtype;
  norm.is_rms_norm = params.is_rms_norm;
  norm.stats_grad = params.stats_grad;
  norm.accumulate = params.accumulate;
  GradStages& stages = call.stages;
  stages.grad_residual = params.grad_residual;
  stages.gate = params.gate;
  stages.grad_input_dtype = params.x_dtype;
  stages.grad_residual_dtype = params.grad_residual ? params.residual_dtype : params.z_dtype;
  if (params.drops_x()) stages.dropout = params.dropout;
  stages.row_gate = {params.row_gate, params.row_gate_strides, params.gate_activation, params.gates_y, false, {}};
  stages.grad_row_gate = params.grad_row_gate;
  stages.epilogue = {params.activation, params.drops_y ? params.dropout : Dropout{}};
  stages.has_load_stage = params.has_load_stage || params.gate;
  stages.from_y = params.z_is_y;
  call.z = {params.z, params.z_strides, params.z_dtype};
  call.grad_output = {params.grad_output, params.grad_output_strides, params.grad_output_dtype};
  call.grad_residual_out = {params.grad_residual_out, params.grad_residual_out_strides, params.grad_residual_out_dtype};
  call.x = {params.x, params.x_strides, params.x_dtype};
  call.row_gate = {params.row_gate, params.row_gate_strides, params.row_gate_dtype};
  call.parameters = {params.weight, params.bias, params.weight_stride,
                     params.weight || params.bias ? params.weight_dtype : params.z_dtype};
  call.gate = {params.gate, nullptr, params.gate_stride, params.x_dtype};
  return call;
}

void backward(const NormBackwardParams& params, Sequence& run);

// Interleaved segments: one kernel, or all rows in order of the segments, by strides or copies.
void backward_interleaved(const NormBackwardParams& params, Sequence& run) {
  if (backward_at_once(backward_call(params), run)) return;
  const int64_t segments = params.segments, rows_each = params.rows / segments, n = params.hidden_size;
  NormBackwardParams ordered = params;
  ordered.interleaves = false;
  const auto order = [&](const void*& data, DType dtype, RowStrides& strides) {
    if (!data) return;
    if (strides.is_even(params.rows)) {
      strides = {segments, strides.row_stride, strides.row_stride * segments};
    } else if (strides.rows_per_group != segments) {
      void* copy = run.take_rows(dtype);
      run.convert({data, strides, dtype}, params.rows, n, copy, dtype, n);
      data = copy;
      strides = {segments, n, n * segments};
    }
    strides = {rows_each, strides.group_stride, strides.row_stride};
  };
  order(ordered.z, params.z_dtype, ordered.z_strides);
  order(ordered.grad_output, params.grad_output_dtype, ordered.grad_output_strides);
  order(ordered.grad_residual_out, params.grad_residual_out_dtype, ordered.grad_residual_out_strides);
  order(ordered.row_gate, params.row_gate_dtype, ordered.row_gate_strides);
  const DType acc_dtype = accumulation_dtype(params.x_dtype);
  for (const void** statistic : {&ordered.rstd, &ordered.mean, &ordered.mean_tail}) {
    if (!*statistic) continue;
    void* copy = run.take(params.rows * dtype_bytes(acc_dtype));
    run.convert({*statistic, {rows_each, segments, 1}, acc_dtype}, params.rows, 1, copy, acc_dtype, 1);
    *statistic = copy;
  }
  struct Result {
    void** data;
    DType dtype;
  };
  const Result results[] = {{&ordered.grad_input, params.x_dtype},
                            {&ordered.grad_residual, params.residual_dtype},
                            {&ordered.grad_row_gate, params.row_gate_dtype}};
  void* targets[3];
  for (int i = 0; i < 3; ++i) {
    targets[i] = *results[i].data;
    if (targets[i]) *results[i].data = run.take_rows(results[i].dtype);
  }
  backward(ordered, run);
  for (int i = 0; i < 3; ++i)
    if (targets[i])
      run.convert({*results[i].data, {segments, rows_each * n, n}, results[i].dtype}, params.rows, n, targets[i],
                  results[i].dtype, n);
}

void backward(const NormBackwardParams& params, Sequence& run) {
  if (!params.wants_rows() && !params.wants_columns()) return;
  if (params.interleaves) return backward_interleaved(params, run);
  const DType acc_dtype = accumulation_dtype(params.x_dtype);
  const bool is_double = acc_dtype == DType::kFloat64;
  BackwardCall call = backward_call(params);
  const bool is_per_row = has_per_row_kernel(call.norm) && !call.stages.dropout.philox;
  if (!is_per_row && backward_at_once(call, run)) return;

  Rows &z = call.z, &grad_output = call.grad_output;
  const SavedNorm saved{z,
                        params.rstd,
                        call.norm.mean,
                        call.norm.mean_tail,
                        params.weight,
                        params.bias,
                        params.weight_dtype,
                        params.weight_offset,
                        params.weight_stride,
                        params.rows,
                        params.hidden_size,
                        params.segments,
                        params.interleaves,
                        false};
  if (params.z_is_y) {
    // z - mean may overflow in fp16
    const DType dtype = grad_output.dtype != z.dtype || z.dtype == DType::kFloat16 ? acc_dtype : z.dtype;
    void* centered = run.take_rows(dtype);
    run.launch([&](cudaStream_t stream) {
      const int64_t rows = params.segments > 1 ? params.rows / params.segments : params.rows;
      return launch_by_columns({rows, params.hidden_size}, params.segments,
                               is_double ? centered_from_y_kernel<double> : centered_from_y_kernel<float>, stream,
                               saved, centered, dtype);
    });
    z = {centered, contiguous(params.rows, params.hidden_size), dtype};
    if (!params.is_rms_norm && params.hidden_size == 1)  // the mean tells the kernels that this is no RMSNorm
      call.norm.mean = call.norm.mean_tail = run.filled(params.rows, acc_dtype, 0);
    call.stages.from_y = false;
  } else if (params.has_epilogue()) {
    const DType dtype = grad_output.dtype == z.dtype ? z.dtype : acc_dtype;
    void* grad_u = run.take_rows(dtype);
    run.launch([&](cudaStream_t stream) {
      return launch_by_columns({params.rows, params.hidden_size}, 1,
                               is_double ? epilogue_grad_kernel<double> : epilogue_grad_kernel<float>, stream, saved,
                               call.stages.epilogue, grad_output, grad_u, dtype);
    });
    grad_output = {grad_u, contiguous(params.rows, params.hidden_size), dtype};
    call.stages.epilogue = {};
  }

  // A gated norm around the plain one
  const RowStrides dense = contiguous(params.rows, params.hidden_size);
  const Rows row_gate = call.row_gate, x = z;
  Rows grad_product = grad_output, other = x;
  const auto multiply = [&](const Rows& source, void* target, DType dtype) {
    apply_row_gate(params, source, row_gate, /*adds=*/false, target, dtype, run);
  };
  call.row_gate = {};
  call.stages.row_gate = {};
  if (row_gate.data) {
    Rows product{run.take_rows(acc_dtype), dense, acc_dtype};
    if (params.gates_y) {
      if (params.grad_row_gate) {
        other = {run.take_rows(acc_dtype), dense, acc_dtype};
        apply_epilogue(saved, Epilogue{}, const_cast<void*>(other.data), acc_dtype, is_double, run);
      }
      multiply(grad_output, const_cast<void*>(product.data), acc_dtype);
      grad_output = product;
    } else {
      multiply(x, const_cast<void*>(product.data), acc_dtype);
      z = product;
      grad_product = {params.wants_rows() ? run.take_rows(acc_dtype) : nullptr, dense, acc_dtype};
      call.norm.grad_input = const_cast<void*>(grad_product.data);
      call.stages.grad_input_dtype = acc_dtype;
    }
  }

  call.parameters.bias = nullptr;
  if (!params.weight) call.parameters.dtype = z.dtype;
  z = run.readable(z, grad_output.dtype == z.dtype && !is_double ? z.dtype : acc_dtype);
  call.norm.x_dtype = z.dtype;
  if (!params.grad_residual) call.stages.grad_residual_dtype = z.dtype;
  const bool wants_gate_alone =
      row_gate.data && params.gates_y && !params.grad_input && !params.grad_weight && !params.grad_bias;
  if (is_per_row) {
    backward_per_row(call, run);
  } else if (params.gate) {
    backward_of_gate(params, call, run);
  } else if (!wants_gate_alone) {
    backward_of_z(call, run);
  }
  if (!row_gate.data) return;
  if (params.grad_row_gate)
    run.launch([&](cudaStream_t stream) {
      return launch_eights(
          extent_of(params.rows, params.hidden_size, {grad_product.strides, other.strides, row_gate.strides}),
          is_double ? gate_grad_kernel<double> : gate_grad_kernel<float>, stream, grad_product, other, row_gate,
          params.gate_activation, params.grad_row_gate, params.row_gate_dtype);
    });
  if (params.grad_input && !params.gates_y) multiply(grad_product, params.grad_input, params.x_dtype);
}

}  // namespace

cudaError_t device_facts(DeviceFacts& facts) {
  constexpr int kDevices = 64;
  static DeviceFacts known[kDevices];
  static std::once_flag once[kDevices];
  static cudaError_t errors[kDevices];
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device >= kDevices) return ask_device(device, facts);
  std::call_once(once[device], [&] { errors[device] = ask_device(device, known[device]); });
  facts = known[device];
  return errors[device];
}

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
  return launch_eights(Extent{params.rows, params.hidden_size}, dropout_mask_kernel, stream, params);
}

const char* cuda_error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // namespace fused_layernorm
