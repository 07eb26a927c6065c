// The operators torch.ops.fused_layernorm.*: torch.compile, export, dispatch modes and DTensor see a norm as one of
// these calls. They are functional: they change no input, and results share no memory with an input. Their fake
// implementations and sharding rules are in fused_layernorm/_ops.py.
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <string>

#include "autograd.h"
#include "operators.h"

namespace fused_layernorm {
namespace {

using at::Tensor;
using torch::jit::Stack;

template <size_t count>
void push(Stack& stack, std::array<Tensor, count> results, const Tensor& like) {
  for (Tensor& result : results)
    stack.emplace_back(result.defined() ? std::move(result) : at::empty({0}, like.options()));
}

template <class Call>
void operator_kernel(const c10::OperatorHandle&, Stack* stack) {
  Call call = call_from<Call>(*stack);
  push(*stack, results_of(call), like_results(call));
}

void implement(torch::Library& library) {
  library.impl("norm_forward", torch::CppFunction::makeFromBoxedFunction<&operator_kernel<NormCall>>());
  library.impl("norm_backward", torch::CppFunction::makeFromBoxedFunction<&operator_kernel<NormBackwardCall>>());
  library.impl("sandwich_norm", torch::CppFunction::makeFromBoxedFunction<&operator_kernel<SandwichCall>>());
  library.impl("dropout_mask", &dropout_mask);
}

}  // namespace
}  // namespace fused_layernorm

TORCH_LIBRARY(fused_layernorm, library) {
  namespace fln = fused_layernorm;
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  library.def(fln::schema_of<fln::NormCall>().c_str(), tags);
  library.def(fln::schema_of<fln::NormBackwardCall>().c_str(), tags);
  library.def(fln::kDropoutMaskSchema, tags);
  library.def(fln::schema_of<fln::SandwichCall>().c_str(), tags);
  library.def(fln::schema_of<fln::NormQuantCall>().c_str(), tags);
}

TORCH_LIBRARY_IMPL(fused_layernorm, CPU, library) { fused_layernorm::implement(library); }
#ifdef FUSED_LAYERNORM_WITH_CUDA
TORCH_LIBRARY_IMPL(fused_layernorm, CUDA, library) {
  namespace fln = fused_layernorm;
  fln::implement(library);
  library.impl("norm_quant", torch::CppFunction::makeFromBoxedFunction<&fln::operator_kernel<fln::NormQuantCall>>());
}
#endif

TORCH_LIBRARY_IMPL(fused_layernorm, Autograd, library) {
  library.impl("norm_forward", torch::CppFunction::makeFromBoxedFunction<&fused_layernorm::norm_forward_autograd>());
  // Double backward is PyTorch operations (autograd.cpp). Differentiating this operator is an error, never a silent 0.
  library.impl("norm_backward", torch::autograd::autogradNotImplementedFallback());
  library.impl("sandwich_norm", torch::autograd::autogradNotImplementedFallback());
  library.impl("norm_quant", torch::autograd::autogradNotImplementedFallback());
}
