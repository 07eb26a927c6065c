// A norm with its node in the autograd graph, in plain eager mode and as an operator.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <Python.h>

#include <array>
#include <functional>
#include <initializer_list>
#include <type_traits>

#include "norm_call.h"

namespace fused_layernorm {

using TensorRefs = std::initializer_list<std::reference_wrapper<const at::Tensor>>;

// Whether the kernels can take these tensors; undefined ones are ignored. False in a torch.func transform, under a
// dispatch mode or a tracer, while forward-mode AD is on, and for a tensor that is anything but plain memory on a
// device with kernels.
bool takes_kernel(TensorRefs tensors);

// Makes takes_kernel() refuse CUDA tensors (FUSED_LAYERNORM_BACKEND=cpu).
void refuse_cuda_tensors();

// y and z, with a FusedNormBackward node if an input requires grad. saves_y: y is saved for backward instead of x; only
// if y_tells_x() (memory_efficient.h). accumulates: backward adds the gradients of weight and bias to their main_grad.
// Only for tensors that takes_kernel() accepts; with or without the GIL.
NormResults norm(const NormCall& call, bool saves_y, bool accumulates);

// The operator norm_forward's kernel for autograd: calls the operator below autograd, and gives its results the node
// that norm() gives them.
void norm_forward_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

bool wants_gradients(const NormCall& call);

// The parameter's main_grad, if that is a float32 tensor of its shape; else undefined. With the GIL.
at::Tensor main_grad_of(const at::Tensor& parameter);

// Gives the node a Python type, so that type(y.grad_fn).__name__ is FusedNormBackward. Once, with the GIL.
void name_node();

// A Python function (reference.norm_backward) from norm_backward's arguments, in the operator's order, to the five
// gradients. The node calls it if the gradients must be differentiable (create_graph) or the kernels cannot take the
// tensors. With the GIL; never released.
void set_reference_backward(PyObject* function);

// ---- calls of operators ----------------------------------------------------------------------------------------------

// Pops an operator's arguments, in the order of for_each(), from the dispatcher's stack.
template <class Call>
Call call_from(torch::jit::Stack& stack) {
  size_t count = 0;
  const Call none;
  Call::for_each(none, [&](const char*, const auto&) { ++count; });
  auto argument = stack.end() - static_cast<std::ptrdiff_t>(count);
  const auto first = argument;
  Call call;
  Call::for_each(call, [&](const char*, auto& field) {
    using Field = std::decay_t<decltype(field)>;
    c10::IValue& value = *argument++;
    if constexpr (std::is_same_v<Field, at::Tensor>) {
      if (!value.isNone()) field = std::move(value).toTensor();
    } else {
      field = value.to<Field>();
    }
  });
  stack.erase(first, stack.end());
  return call;
}

template <class Call>
torch::jit::Stack stack_of(const Call& call) {
  torch::jit::Stack stack;
  Call::for_each(call, [&](const char*, const auto& field) {
    if constexpr (std::is_same_v<std::decay_t<decltype(field)>, at::Tensor>) {
      stack.push_back(field.defined() ? c10::IValue(field) : c10::IValue());
    } else {
      stack.emplace_back(field);
    }
  });
  return stack;
}

}  // namespace fused_layernorm
