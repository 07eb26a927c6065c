// A norm with its node in the autograd graph where gradients are wanted: in plain eager mode, and as an operator.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <Python.h>

#include <functional>
#include <initializer_list>
#include <tuple>

#include "norm_ops.h"

namespace fused_layernorm {

using TensorRefs = std::initializer_list<std::reference_wrapper<const at::Tensor>>;

// Whether the kernels may run on these tensors, or the call must be made of PyTorch operations: in a torch.func
// transform, under a dispatch mode or a tracer, while forward-mode AD is on, or where a tensor is anything but memory
// on a device with kernels. Undefined tensors do not matter.
bool takes_kernel(TensorRefs tensors);

// From now on, CUDA tensors do not (FUSED_LAYERNORM_BACKEND=cpu).
void take_no_cuda_tensors();

// y, with a FusedNormBackward in y.grad_fn if an input requires grad. For tensors that takes_kernel(); with or without
// the GIL.
at::Tensor norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const NormOptions& options);

// y and z, likewise with a FusedAddNormBackward (add_autograd.cpp). z has no gradient where neither x nor residual
// does.
std::tuple<at::Tensor, at::Tensor> add_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                                            const NormOptions& options, const AddOptions& add);

// The operators norm_forward and norm_backward (torch_library.cpp): what they take and return.
using OptionalTensor = std::optional<at::Tensor>;
using NormOperatorResult = std::tuple<at::Tensor, at::Tensor>;
using NormOperatorGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// norm_forward's kernel for autograd: calls norm_forward below autograd, and gives y the node that norm() gives it.
NormOperatorResult norm_by_operator(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                                    int64_t normalized_ndim, double eps, double weight_offset, bool is_rms_norm,
                                    std::optional<at::ScalarType> out_dtype, bool stats_grad);

// The operators add_norm_forward and add_norm_backward, and the former's kernel for autograd (add_autograd.cpp).
using AddNormResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using AddNormGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

AddNormResult add_norm_by_operator(const at::Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                                   const OptionalTensor& bias, const OptionalTensor& philox, int64_t normalized_ndim,
                                   double eps, double weight_offset, bool is_rms_norm,
                                   std::optional<at::ScalarType> out_dtype, bool stats_grad, double dropout_p,
                                   std::optional<at::ScalarType> residual_dtype);

// Whether torch.func or forward-mode AD is at work, for which the operators have no rules.
bool is_in_transform(TensorRefs tensors);

// An error where a tensor has a tangent, which the operators would lose.
void check_no_tangents(const char* name, TensorRefs tensors);

template <class Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// What backward must know, beside tensors.
struct BackwardOptions {
  int64_t normalized_ndim;
  double eps, weight_offset;
  bool is_rms_norm;
  std::optional<at::ScalarType> bias_dtype;  // none: no bias
  bool stats_grad;
  bool wants_x = false, wants_weight = false, wants_bias = false;
};

// The gradients of a norm by PyTorch operations, differentiable.
NormGradients by_operations(const at::Tensor& grad_output, const at::Tensor& x, const at::Tensor& weight,
                            const BackwardOptions& options);

// Make type(y.grad_fn) say what it is. Once, with the GIL.
void name_norm_node();
void name_add_norm_node();

// A Python function of (grad_output, x, weight, normalized_ndim, eps, weight_offset, is_rms_norm, bias_dtype,
// stats_grad) that returns the gradients of x, weight and bias. It is called where those must be differentiable
// (create_graph), or the kernels cannot take the tensors. With the GIL; kept for good.
void set_differentiable_backward(PyObject* function);

}  // namespace fused_layernorm
