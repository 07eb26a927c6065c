// What a kernel is told: one plain struct per direction, the same for CUDA and CPU. No torch, no CUDA headers.
// A pointer that is nullptr means "absent" (an input that was not given) or "not wanted" (an output).
#pragma once

#include <cstdint>
#include <initializer_list>

struct CUstream_st;  // cudaStream_t is a pointer to this; spelled so that C++ files need no CUDA header

#if defined(__CUDACC__)
#define FLN_HOST_DEVICE __host__ __device__
#define FLN_PHILOX_INLINE __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define FLN_HOST_DEVICE
#define FLN_PHILOX_INLINE __attribute__((always_inline)) inline
#else
#define FLN_HOST_DEVICE
#define FLN_PHILOX_INLINE inline
#endif

namespace fused_layernorm {

enum class DType : int { kFloat16, kBFloat16, kFloat32, kFloat64 };
constexpr int dtype_bytes(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }
constexpr DType accumulation_dtype(DType dtype) { return dtype == DType::kFloat64 ? dtype : DType::kFloat32; }

// What makes a mean of a row's sum.
template <typename T>
T inverse_of(int64_t hidden_size) {
  return static_cast<T>(1.0 / static_cast<double>(hidden_size));
}

// Where each row of a tensor starts, in elements. Rows come in groups of `rows_per_group` that lie `row_stride`
// apart; groups lie `group_stride` apart. That covers a matrix with padded rows (one group) and a slice of a fused
// QKV projection, whose heads are adjacent while its tokens are far apart (one group a token). Strides may be 0.
// With several groups there are fewer than 2^31 rows: a 64-bit division would be a call in the middle of a kernel.
struct RowStrides {
  int64_t rows_per_group;
  int64_t row_stride;
  int64_t group_stride;

  FLN_HOST_DEVICE bool is_even(int64_t rows) const { return rows <= rows_per_group; }  // all rows equally far apart

  FLN_HOST_DEVICE int64_t offset(int64_t row) const {
    if (row < rows_per_group) return row * row_stride;
    const uint32_t group = static_cast<uint32_t>(row) / static_cast<uint32_t>(rows_per_group);
    return group * group_stride + (row - group * rows_per_group) * row_stride;
  }
};

// keep(seed, offset, row, col) of philox.h decides which elements remain.
struct Dropout {
  const int64_t* philox;  // [2], (seed, offset), in the device's memory: CUDA graphs replay with others; nullptr: none
  uint32_t most_dropped;  // most_dropped(p)
  double scale;           // dropout_scale(p): what the elements that remain are multiplied by
};

// What y passes through before it is stored: y = keep * dropout_scale * activation(norm). Where all rows have one
// weight.
enum class Activation : int { kNone, kRelu, kGelu, kGeluTanh, kSilu };
constexpr const char* kActivationNames[] = {"", "relu", "gelu", "gelu_tanh", "silu"};  // Python's
struct AfterNorm {
  Activation activation;
  Dropout dropout;
};

// Forward's load stage: z = residual + keep * dropout_scale * gate * x in the accumulation type, rounded once to
// residual_out's type; the rounded z is what is normalized. A dropped element counts as 0, also where x is not finite.
struct AddStage {
  const void* residual;  // [rows, hidden_size], elements of one row adjacent, or nullptr: 0
  void* residual_out;    // z, [rows, hidden_size], contiguous, 16-byte aligned; nullptr: not wanted, as z is x
  RowStrides residual_strides;
  DType residual_dtype;      // x_dtype or fp32
  DType residual_out_dtype;  // x_dtype or fp32; statistics, and what backward calls x, are of this type
  Dropout dropout;
  const void* gate;  // [segments, hidden_size], of x's dtype, rows gate_stride apart; nullptr: 1
  int64_t gate_stride;
};

// Backward's store stage: grad_z = (wdy - x_hat * c1 - c2) * rstd + grad_residual_out, in the accumulation type, then
// grad_residual = grad_z and grad_input = keep * dropout_scale * grad_z, each rounded once.
struct AddGradStage {
  const void* grad_residual_out;  // [rows, hidden_size], of x's (that is z's) dtype, or nullptr: 0
  void* grad_residual;            // [rows, hidden_size], contiguous, 16-byte aligned, or nullptr: not wanted
  RowStrides grad_residual_out_strides;
  DType grad_output_dtype;    // x_dtype, or 16-bit beside fp32 x
  DType grad_input_dtype;     // x_dtype, or 16-bit beside fp32 x
  DType grad_residual_dtype;  // grad_input_dtype or fp32
  Dropout dropout;
};

// The same of z = residual + gate * x, without dropout: grad_input = gate * grad_z, and grad_gate = sum over rows(x *
// grad_z), of grad_z unrounded.
struct GateGradStage : AddGradStage {
  const void* x;     // forward's, [rows, hidden_size], of grad_input_dtype, elements of one row adjacent
  const void* gate;  // as in forward, of grad_input_dtype
  RowStrides x_strides;
  int64_t gate_stride;
};

// y = x_hat * (weight + weight_offset) + bias,  x_hat = (x - mean) * rstd  (mean = 0 for RMSNorm)
struct NormForwardParams {
  const void* x;       // [rows, hidden_size], elements of one row adjacent
  const void* weight;  // [hidden_size] or nullptr: 1
  const void* bias;    // [hidden_size] or nullptr: 0; of the weight's dtype
  void* y;             // [rows, hidden_size], contiguous, 16-byte aligned
  const void* x_end;   // behind the last element of x; for staged rows on CUDA, whose launch sets it

  // Saved for backward, [rows] each, in the accumulation type (fp64 for fp64 x, else fp32); nullptr: not wanted.
  // mean + mean_tail is the mean to about twice the precision of the type; both are nullptr for RMSNorm.
  void* rstd;
  void* mean;
  void* mean_tail;

  void* workspace;  // norm_forward_workspace_cuda() bytes, 16-byte aligned; contents undefined before and after

  RowStrides x_strides;
  int64_t rows;         // >= 1: the caller returns early when there is nothing to do
  int64_t hidden_size;  // >= 1
  double eps;
  double weight_offset;  // added to weight in the accumulation type (1.0: Gemma); 0 without weight
  // Modulation: the rows are so many equal parts, each with weight and bias of its own, which lie weight_stride
  // elements behind those of the part before. 0 or 1: one weight and bias for all rows. With more, fewer than 2^31
  // rows.
  int segments;
  int turns;  // rows that threads take one after the other, a power of 2; on CUDA, whose launch sets it
  int64_t weight_stride;
  DType x_dtype;
  DType weight_dtype;  // of weight and bias: x_dtype or fp32
  DType y_dtype;
  bool is_rms_norm;

  // In the host's memory, at most one of them; nullptr: x is normalized as it is, and y is the norm
  const AddStage* add;
  const AfterNorm* after;
};

// wdy = (weight + weight_offset) * grad_output     c1 = mean(x_hat * wdy)     c2 = mean(wdy), 0 for RMSNorm
// (c1 = c2 = 0 without stats_grad)
// grad_input = (wdy - x_hat * c1 - c2) * rstd      grad_weight = sum over rows(grad_output * x_hat)
// grad_bias = sum over rows(grad_output)
struct NormBackwardParams {
  const void* grad_output;  // [rows, hidden_size], of x's dtype, elements of one row adjacent
  const void* x;            // as in forward; z where forward had an AddStage
  const void* weight;       // as in forward
  const void* rstd;         // as saved by forward
  const void* mean;         // nullptr for RMSNorm
  const void* mean_tail;    // nullptr for RMSNorm

  void* grad_input;   // [rows, hidden_size], of x's dtype, contiguous, 16-byte aligned, or nullptr
  void* grad_weight;  // [segments, hidden_size] or nullptr
  void* grad_bias;    // [segments, hidden_size] or nullptr
  void* grad_gate;    // [segments, hidden_size] with `gate`, else nullptr
  void* workspace;    // norm_backward_workspace_*() bytes, 16-byte aligned; contents undefined before and after

  RowStrides grad_output_strides;
  RowStrides x_strides;
  int64_t rows;         // >= 1
  int64_t hidden_size;  // >= 1
  double weight_offset;
  int segments;  // as in forward
  int64_t weight_stride;
  DType x_dtype;
  DType weight_dtype;       // x_dtype or fp32
  DType grad_weight_dtype;  // any of the four
  DType grad_bias_dtype;    // any of the four
  DType grad_gate_dtype;    // any of the four
  bool is_rms_norm;
  bool stats_grad;  // false: mean and rstd are constants
  bool accumulate;  // add grad_weight and grad_bias, both fp32, to what is there

  // In the host's memory; nullptr: forward had none. after: on CUDA only where has_after_stage_cuda() says yes;
  // grad_output is y's then, and bias forward's.
  const AddGradStage* add;
  const GateGradStage* gate;  // the same as `add`, of a gate; on CUDA only where has_gate_stage_cuda() says yes
  const AfterNorm* after;
  const void* bias;
  // memory_efficient: x is forward's y, and x_hat = (y - bias) / (weight + weight_offset), which must not be 0; mean is
  // nullptr. On CUDA only where has_y_stage_cuda() says yes.
  bool x_is_y;
};

// The gradient of the norm from that of y as an operation of its own, on CUDA only, from what forward was told and
// saved. Elements of one row of all tensors are adjacent.
struct AfterNormGradParams {
  const void* grad_output;  // [rows, hidden_size], of y_dtype
  void* grad;               // [rows, hidden_size], of y_dtype: of the norm itself
  RowStrides grad_output_strides;
  AfterNorm after;
};

// keep(...) of every element as bytes of 0 and 1.
struct DropoutMaskParams {
  uint8_t* mask;  // [rows, hidden_size], contiguous
  int64_t rows;   // >= 1
  int64_t hidden_size;
  Dropout dropout;
};

// One part of the rows of modulated norms as a problem of its own, without dropout, whose random words go by row.
inline const void* advanced(const void* data, int64_t elements, DType dtype) {
  return data ? static_cast<const char*>(data) + elements * dtype_bytes(dtype) : nullptr;
}
inline void* advanced(void* data, int64_t elements, DType dtype) {
  return const_cast<void*>(advanced(static_cast<const void*>(data), elements, dtype));
}

// What both directions are told; returns the part's first row.
template <class Params>
int64_t take_segment(Params& params, int segment) {
  params.rows /= params.segments;
  params.segments = 0;
  const int64_t first = segment * params.rows;
  params.x = advanced(params.x, params.x_strides.offset(first), params.x_dtype);
  params.weight = advanced(params.weight, segment * params.weight_stride, params.weight_dtype);
  for (auto saved : {&params.rstd, &params.mean, &params.mean_tail})
    *saved = advanced(*saved, first, accumulation_dtype(params.x_dtype));
  return first;
}

struct ForwardSegment : NormForwardParams {
  AddStage stage;

  ForwardSegment(const ForwardSegment&) = delete;
  ForwardSegment(const NormForwardParams& all, int segment) : NormForwardParams(all) {
    const int64_t first = take_segment(*this, segment);
    y = advanced(y, first * hidden_size, y_dtype);
    bias = advanced(bias, segment * weight_stride, weight_dtype);
    if (!add) return;
    stage = *add;
    stage.residual = advanced(stage.residual, stage.residual_strides.offset(first), stage.residual_dtype);
    stage.residual_out = advanced(stage.residual_out, first * hidden_size, stage.residual_out_dtype);
    stage.gate = advanced(stage.gate, segment * stage.gate_stride, x_dtype);
    add = &stage;
  }
};

struct BackwardSegment : NormBackwardParams {
  GateGradStage stage;

  BackwardSegment(const BackwardSegment&) = delete;
  BackwardSegment(const NormBackwardParams& all, int segment) : NormBackwardParams(all) {
    const int64_t first = take_segment(*this, segment);
    grad_output = advanced(grad_output, grad_output_strides.offset(first), add ? add->grad_output_dtype : x_dtype);
    grad_input = advanced(grad_input, first * hidden_size, add ? add->grad_input_dtype : x_dtype);
    grad_weight = advanced(grad_weight, segment * hidden_size, grad_weight_dtype);
    grad_bias = advanced(grad_bias, segment * hidden_size, grad_bias_dtype);
    if (!add) return;
    static_cast<AddGradStage&>(stage) = *add;
    stage.grad_residual_out = advanced(stage.grad_residual_out, stage.grad_residual_out_strides.offset(first), x_dtype);
    stage.grad_residual = advanced(stage.grad_residual, first * hidden_size, stage.grad_residual_dtype);
    add = &stage;
    if (!gate) return;
    grad_gate = advanced(grad_gate, segment * hidden_size, grad_gate_dtype);
    stage.x_strides = gate->x_strides;
    stage.gate_stride = gate->gate_stride;
    stage.x = advanced(gate->x, stage.x_strides.offset(first), stage.grad_input_dtype);
    stage.gate = advanced(gate->gate, segment * stage.gate_stride, stage.grad_input_dtype);
    gate = &stage;
  }
};

// What the bindings call. The CUDA launchers return a cudaError_t as int (0: launched). The workspace sizes are
// asked of the same plan that the launcher follows.
//
// Add stages are part of the CUDA kernels for most types and sizes (has_add_stage_cuda; by those and the card alone),
// and kernels of their own beside the plain norm of z for the others, which then needs a weight, in backward also a
// grad_output, of z's type or fp32.
int launch_norm_forward_cuda(const NormForwardParams& params, CUstream_st* stream);
int launch_norm_backward_cuda(const NormBackwardParams& params, CUstream_st* stream);
int64_t norm_forward_workspace_cuda(const NormForwardParams& params);
int64_t norm_backward_workspace_cuda(const NormBackwardParams& params);
bool has_add_stage_cuda(const NormForwardParams& params);
bool has_add_stage_cuda(const NormBackwardParams& params);
bool has_after_stage_cuda(const NormBackwardParams& params);  // by x_dtype, rows, hidden_size and the card
bool has_y_stage_cuda(const NormBackwardParams& params);      // by the same
bool has_gate_stage_cuda(const NormBackwardParams& params);   // by the same and the dtypes that `gate` says
int launch_dropout_mask_cuda(const DropoutMaskParams& params, CUstream_st* stream);
int launch_after_norm_grad_cuda(const NormForwardParams& params, const AfterNormGradParams& after, CUstream_st* stream);
// x - mean from y, for backward with a mean of 0: into params.y, of y_dtype, from params.x, which is forward's y.
int launch_recover_cuda(const NormForwardParams& params, CUstream_st* stream);

void launch_norm_forward_cpu(const NormForwardParams& params);
void launch_norm_backward_cpu(const NormBackwardParams& params);
int64_t norm_backward_workspace_cpu(const NormBackwardParams& params);
void launch_dropout_mask_cpu(const DropoutMaskParams& params);

}  // namespace fused_layernorm
