// The arguments of the kernels. launch.cu translates norm_params.h to these structs, and splits a call that no single
// kernel takes: here every tensor has a dtype that some kernel reads. A field without a comment is described in
// norm_params.h.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "norm_params.h"

namespace fused_layernorm {

// Forward's epilogue. It goes with one weight for all rows.
struct Epilogue {
  Activation activation;
  Dropout dropout;

  bool any() const { return activation != Activation::kNone || dropout.philox; }
};

// Forward's load stage: z = residual + gate * dropout(x). A dropped element counts as 0, also where x is not finite.
struct LoadStage {
  const void* residual;  // nullptr: 0
  void* residual_out;    // nullptr: z is not stored
  RowStrides residual_strides;
  DType residual_dtype;      // x_dtype or fp32
  DType residual_out_dtype;  // x_dtype or fp32; that of statistics, and of backward's x
  Dropout dropout;
  const void* gate;  // [segments, hidden_size], of x's dtype; not with dropout; nullptr: 1
  int64_t gate_stride;
  bool rounds_x_hat;  // to the 16-bit type of z, before the product with weight (Llama). There is no bias

  bool any() const { return residual || residual_out || gate || dropout.philox; }
};

// The RMSNorm of y behind the addition of a residual: NormForwardParams::next_y, of x's dtype; nullptr: none.
struct NextNorm {
  const void* weight;
  void* y;
  void* rstd;
  DType weight_dtype;  // x_dtype or fp32
  float eps, weight_offset;
  static constexpr bool is_rms_norm = true;
  static constexpr void *mean = nullptr, *mean_tail = nullptr;
};

// A gated norm's gate, of x's dtype; nullptr: none.
struct RowGate {
  const void* gate;
  RowStrides strides;
  Activation activation;
  bool gates_y;
  bool adds;      // the gate is a residual that is added to y; with gates_y, and in forward only
  NextNorm next;  // with adds, and y of x's dtype
};

// The adjoints of the stages around the norm of z. A null pointer is an absent input or an unwanted result.
struct GradStages {
  const void* grad_residual_out;  // of z's dtype, which is KernelBackwardParams::x_dtype
  void* grad_residual;
  const void* x;     // with a gate: forward's, of grad_input_dtype
  const void* gate;  // of grad_input_dtype
  RowStrides grad_residual_out_strides;
  RowStrides x_strides;
  int64_t gate_stride;
  Dropout dropout;  // of x
  Epilogue epilogue;
  RowGate row_gate;           // goes with no other stage
  void* grad_row_gate;        // of x's dtype
  DType grad_output_dtype;    // z's, or 16-bit beside fp32 z
  DType grad_input_dtype;     // likewise
  DType grad_residual_dtype;  // grad_input_dtype or fp32
  bool has_load_stage;
  bool from_y;  // x is forward's y, and x_hat = (y - bias) / (weight + weight_offset). mean is not read

  bool any() const { return has_load_stage || from_y || epilogue.any() || row_gate.gate; }
};

struct KernelForwardParams {
  const void* x;
  const void* weight;
  const void* bias;
  void* y;

  // All of them or none; mean and mean_tail are nullptr for RMSNorm
  void* rstd;
  void* mean;
  void* mean_tail;

  void* workspace;

  RowStrides x_strides;
  int64_t rows;
  int64_t hidden_size;
  double eps;
  double weight_offset;
  int segments;
  bool interleaves;
  int64_t weight_stride;
  DType x_dtype;
  DType weight_dtype;  // of weight and bias: x_dtype or fp32
  DType y_dtype;
  bool is_rms_norm;
};

// Here x is the tensor that forward normalized: z where it had a load stage.
struct KernelBackwardParams {
  const void* grad_output;  // of x's dtype; or of GradStages::grad_output_dtype
  const void* x;
  const void* weight;
  const void* rstd;
  const void* mean;       // nullptr: 0 (RMSNorm)
  const void* mean_tail;  // nullptr where mean is

  void* grad_input;  // of x's dtype; or of GradStages::grad_input_dtype
  void* grad_weight;
  void* grad_bias;
  void* grad_gate;  // nullptr without a gate
  void* workspace;

  RowStrides grad_output_strides;
  RowStrides x_strides;
  int64_t rows;
  int64_t hidden_size;
  double weight_offset;
  int segments;
  bool interleaves;  // for the fused strategy only
  int64_t weight_stride;
  DType x_dtype;
  DType weight_dtype;  // x_dtype or fp32; with a stage that of grad_input or fp32
  DType grad_weight_dtype;
  DType grad_bias_dtype;
  DType grad_gate_dtype;
  bool is_rms_norm;
  bool stats_grad;
  bool accumulate;

  const void* bias;  // read with an epilogue, and where x is forward's y
};

inline const void* advanced(const void* data, int64_t elements, DType dtype) {
  return data ? static_cast<const char*>(data) + elements * dtype_bytes(dtype) : nullptr;
}
inline void* advanced(void* data, int64_t elements, DType dtype) {
  return const_cast<void*>(advanced(static_cast<const void*>(data), elements, dtype));
}

// Narrows a problem to `rows` rows from `first` on, with the weight and bias of segment 0. Where rows come in groups
// (RowStrides), `first` must begin a group, or all of these rows must lie in one group.
template <class Params>
void take_rows(Params& params, int64_t first, int64_t rows) {
  params.rows = rows;
  params.segments = 0;
  params.x = advanced(params.x, params.x_strides.offset(first), params.x_dtype);
  for (auto saved : {&params.rstd, &params.mean, &params.mean_tail})
    *saved = advanced(*saved, first, accumulation_dtype(params.x_dtype));
}
inline KernelForwardParams part_of(KernelForwardParams params, int64_t first, int64_t rows) {
  take_rows(params, first, rows);
  params.y = advanced(params.y, first * params.hidden_size, params.y_dtype);
  return params;
}
inline KernelBackwardParams part_of(KernelBackwardParams params, int64_t first, int64_t rows) {
  take_rows(params, first, rows);
  params.grad_output = advanced(params.grad_output, params.grad_output_strides.offset(first), params.x_dtype);
  params.grad_input = advanced(params.grad_input, first * params.hidden_size, params.x_dtype);
  return params;
}

// One segment of the rows as a separate problem.
inline KernelForwardParams segment_of_rows(const KernelForwardParams& all, int segment) {
  const int64_t rows = all.rows / all.segments;
  KernelForwardParams params = part_of(all, segment * rows, rows);
  params.weight = advanced(params.weight, segment * params.weight_stride, params.weight_dtype);
  params.bias = advanced(params.bias, segment * params.weight_stride, params.weight_dtype);
  return params;
}

inline KernelBackwardParams segment_of_rows(const KernelBackwardParams& all, int segment) {
  const int64_t rows = all.rows / all.segments;
  KernelBackwardParams params = part_of(all, segment * rows, rows);
  params.weight = advanced(params.weight, segment * params.weight_stride, params.weight_dtype);
  params.grad_weight = advanced(params.grad_weight, segment * params.hidden_size, params.grad_weight_dtype);
  params.grad_bias = advanced(params.grad_bias, segment * params.hidden_size, params.grad_bias_dtype);
  return params;
}

}  // namespace fused_layernorm
