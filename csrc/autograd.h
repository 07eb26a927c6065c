// A norm in plain eager mode, with its node in the autograd graph where gradients are wanted.
#pragma once

#include <Python.h>

#include <functional>
#include <initializer_list>

#include "norm_ops.h"

namespace fused_layernorm {

// Whether the kernels may run on these tensors, or the call must be made of PyTorch operations: in a torch.func
// transform, under a dispatch mode or a tracer, while forward-mode AD is on, or where a tensor is anything but memory
// on a device with kernels. Undefined tensors do not matter.
bool takes_kernel(std::initializer_list<std::reference_wrapper<const at::Tensor>> tensors);

// From now on, CUDA tensors do not (FUSED_LAYERNORM_BACKEND=cpu).
void take_no_cuda_tensors();

// y, with a FusedNormBackward in y.grad_fn if an input requires grad. For tensors that takes_kernel(); with or without
// the GIL.
at::Tensor norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const NormOptions& options);

// Makes type(y.grad_fn) say what it is. Once, with the GIL.
void name_node_in_python();

// A Python function of (grad_output, x, weight, normalized_ndim, eps, weight_offset, is_rms_norm, bias_dtype) that
// returns the gradients of x, weight and bias. It is called where those must be differentiable (create_graph), or the
// kernels cannot take the tensors. With the GIL; kept for good.
void set_differentiable_backward(PyObject* function);

}  // namespace fused_layernorm
