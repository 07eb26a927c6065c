// What the kernels of custom_op are told, and the formula, once for the CPU and for CUDA. No torch here.
#pragma once

#include "norm_params.h"  // DType, FLN_HOST_DEVICE, CUstream_st

namespace custom_op {

using fused_layernorm::DType;

// y = relu(x * scale + bias). A NaN stays one, as in torch, hence "not at most 0" in place of "greater than 0".
template <typename acc_t>
FLN_HOST_DEVICE inline acc_t scale_bias_relu(acc_t x, acc_t scale, acc_t bias) {
  const acc_t z = x * scale + bias;
  return z <= 0 ? acc_t(0) : z;
}
// The gradient of z. y is all it needs: x need not be saved.
template <typename acc_t>
FLN_HOST_DEVICE inline acc_t relu_gradient(acc_t grad_output, acc_t y) {
  return y <= 0 ? acc_t(0) : grad_output;
}

// Rows are contiguous. A pointer that is nullptr: absent (bias 0), or not wanted.
struct ForwardParams {
  const void* x;     // [rows, hidden_size]
  const void* bias;  // [hidden_size] or nullptr
  void* y;           // [rows, hidden_size]
  int64_t rows;      // >= 1
  int64_t hidden_size;
  double scale;
  DType dtype;  // of all tensors
};

// grad_z = grad_output where y > 0, else 0     grad_x = grad_z * scale     grad_bias = sum over rows(grad_z)
struct BackwardParams {
  const void* grad_output;  // [rows, hidden_size]
  const void* y;            // [rows, hidden_size], forward's
  void* grad_x;             // [rows, hidden_size]
  void* grad_bias_partial;  // [partial_rows(), hidden_size] in the accumulation type, each written once; or nullptr
  int64_t rows;             // >= 1
  int64_t hidden_size;
  double scale;
  DType dtype;
};

// Into how many partial sums the rows are added up for grad_bias: asked by who allocates them and by who fills them.
// A function of the shape alone, so that the result is the same bits on every run.
inline int64_t partial_rows(int64_t rows) { return rows < 64 ? 1 : rows < 64 * 128 ? rows / 64 : 128; }

// y[row] = sum of the row
struct SumParams {
  const void* x;  // [rows, hidden_size]
  void* y;        // [rows]
  int64_t rows;   // >= 1
  int64_t hidden_size;
  DType dtype;
};

// Each returns a cudaError_t; 0: launched.
int launch_cuda(const ForwardParams& params, CUstream_st* stream);
int launch_cuda(const BackwardParams& params, CUstream_st* stream);
int launch_cuda(const SumParams& params, CUstream_st* stream);

}  // namespace custom_op
