// What the kernels of my_op are told, and the formula, once for the CPU and for CUDA. No torch here: a .cu file that
// includes torch's headers takes many times as long to compile.
#pragma once

#include "norm_params.h"  // DType, FLN_HOST_DEVICE, CUstream_st

namespace my_op {

using fused_layernorm::DType;

// 1. The formula, for one element, and its derivative times what arrives from above.
template <typename acc_t>
FLN_HOST_DEVICE inline acc_t value(acc_t x) {
  return x * x;
}
template <typename acc_t>
FLN_HOST_DEVICE inline acc_t gradient(acc_t grad_output, acc_t x) {
  return grad_output * 2 * x;
}

// 2. One struct for both directions; a pointer that is nullptr: forward.
struct Params {
  const void* grad_output;  // [count], or nullptr: forward
  const void* x;            // [count]
  void* out;                // [count]: y, or grad_x
  int64_t count;            // >= 1
  DType dtype;              // of all three
};

int launch_cuda(const Params& params, CUstream_st* stream);  // a cudaError_t; 0: launched

}  // namespace my_op
