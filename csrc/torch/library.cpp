// The operators torch.ops.fused_layernorm.*: torch.compile, export, dispatch modes and DTensor see a norm as one of
// these calls. They are functional: they change no input, and results share no memory with an input. Their fake
// implementations and sharding rules are in fused_layernorm/_ops.py.
//
// The schemas are made from the lists of fields in norm_call.h:
//   norm_forward(Tensor x, Tensor? residual, ...) -> (Tensor y, Tensor z, Tensor stats)
//   norm_backward(Tensor grad_output, ...) -> (Tensor grad_x, grad_residual, grad_gate, grad_weight, grad_bias)
// All arguments are positional: DTensor caches sharding decisions by positional arguments, and not by every keyword. A
// result that is absent is an empty tensor; grad_residual is also empty if it equals grad_x (shares_gradient()). stats
// is [1 or 3, *x's leading dimensions], so that DTensor can shard it along the dimensions along which it shards x.
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <string>

#include "autograd.h"

namespace fused_layernorm {
namespace {

using at::Tensor;
using torch::jit::Stack;

template <class T>
constexpr const char* kTypeName = "";
template <>
constexpr const char* kTypeName<int64_t> = "int";
template <>
constexpr const char* kTypeName<double> = "float";
template <>
constexpr const char* kTypeName<bool> = "bool";
template <>
constexpr const char* kTypeName<at::ScalarType> = "ScalarType";
template <>
constexpr const char* kTypeName<OptionalDtype> = "ScalarType?";

// `required`: the tensors that are always given.
template <class Call>
std::string schema(const char* name, std::initializer_list<std::string_view> required, const char* results) {
  std::string arguments;
  const Call call;
  Call::for_each(call, [&](const char* field, const auto& value) {
    using Field = std::decay_t<decltype(value)>;
    arguments += arguments.empty() ? "" : ", ";
    if constexpr (std::is_same_v<Field, Tensor>) {
      const bool is_required = std::find(required.begin(), required.end(), field) != required.end();
      arguments += is_required ? "Tensor" : "Tensor?";
    } else {
      arguments += kTypeName<Field>;
    }
    arguments += std::string(" ") + field;
  });
  return std::string(name) + "(" + arguments + ") -> (" + results + ")";
}

template <size_t count>
void push(Stack& stack, std::array<Tensor, count> results, const Tensor& like) {
  for (Tensor& result : results)
    stack.emplace_back(result.defined() ? std::move(result) : at::empty({0}, like.options()));
}

void norm_forward_kernel(const c10::OperatorHandle&, Stack* stack) {
  const NormCall call = call_from<NormCall>(*stack);
  push(*stack, results_of(call), call.x);
}

void norm_backward_kernel(const c10::OperatorHandle&, Stack* stack) {
  NormBackwardCall call = call_from<NormBackwardCall>(*stack);
  push(*stack, results_of(call), call.z);
}

void implement(torch::Library& library) {
  library.impl("norm_forward", torch::CppFunction::makeFromBoxedFunction<&norm_forward_kernel>());
  library.impl("norm_backward", torch::CppFunction::makeFromBoxedFunction<&norm_backward_kernel>());
  library.impl("dropout_mask", &dropout_mask);
}

}  // namespace
}  // namespace fused_layernorm

TORCH_LIBRARY(fused_layernorm, library) {
  namespace fln = fused_layernorm;
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  library.def(fln::schema<fln::NormCall>("norm_forward", {"x"}, "Tensor y, Tensor z, Tensor stats").c_str(), tags);
  library.def(
      fln::schema<fln::NormBackwardCall>("norm_backward", {"grad_output", "z", "stats"},
                                         "Tensor grad_x, Tensor grad_residual, Tensor grad_gate, Tensor grad_weight, "
                                         "Tensor grad_bias")
          .c_str(),
      tags);
  library.def("dropout_mask(Tensor philox, SymInt rows, SymInt hidden_size, float dropout_p) -> Tensor", tags);
}

TORCH_LIBRARY_IMPL(fused_layernorm, CPU, library) { fused_layernorm::implement(library); }
#ifdef FUSED_LAYERNORM_WITH_CUDA
TORCH_LIBRARY_IMPL(fused_layernorm, CUDA, library) { fused_layernorm::implement(library); }
#endif

TORCH_LIBRARY_IMPL(fused_layernorm, Autograd, library) {
  library.impl("norm_forward", torch::CppFunction::makeFromBoxedFunction<&fused_layernorm::norm_forward_autograd>());
  // Double backward is PyTorch operations (autograd.cpp). Differentiating this operator is an error, never a silent 0.
  library.impl("norm_backward", torch::autograd::autogradNotImplementedFallback());
}
