// The two directions as operators, torch.ops.fused_layernorm.*: for what must see a norm as one call that it can name,
// such as torch.compile, export, dispatch modes and DTensor. Both are functional: they change no input, and results
// share no memory with one. Their fake implementations and sharding rules are in fused_layernorm/_ops.py.
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "autograd.h"

namespace fused_layernorm {
namespace {

using at::Tensor;

NormOperatorResult op_norm_forward(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                                   int64_t normalized_ndim, double eps, double weight_offset, bool is_rms_norm,
                                   std::optional<at::ScalarType> out_dtype) {
  check_normalized_ndim(normalized_ndim, x);
  const int64_t leading = x.dim() - normalized_ndim;
  const NormOptions options{x.sizes().slice(leading), eps, weight_offset, is_rms_norm, out_dtype};
  auto [y, stats] = norm_forward(x, weight.value_or(Tensor()), bias.value_or(Tensor()), options, /*save_stats=*/true);
  // The rows with x's leading dimensions, so that who splits x along one of them (DTensor) can split stats likewise.
  at::DimVector shape(x.sizes().begin(), x.sizes().begin() + leading);
  shape.insert(shape.begin(), stats.size(0));
  return {std::move(y), stats.view(shape)};
}

NormOperatorGradients op_norm_backward(const Tensor& grad_output, const Tensor& x, const OptionalTensor& weight,
                                       const Tensor& stats, int64_t normalized_ndim, double weight_offset,
                                       bool is_rms_norm, bool wants_x, bool wants_weight,
                                       std::optional<at::ScalarType> bias_dtype) {
  NormGradients found = norm_backward(grad_output, x, weight.value_or(Tensor()), stats.contiguous(), normalized_ndim,
                                      weight_offset, is_rms_norm, wants_x, wants_weight, bias_dtype);
  const auto or_empty = [&](Tensor& gradient) {
    return gradient.defined() ? std::move(gradient) : at::empty({0}, x.options());
  };
  return {or_empty(found.x), or_empty(found.weight), or_empty(found.bias)};
}

}  // namespace
}  // namespace fused_layernorm

// All arguments are positional: DTensor keeps what it found for a call by these, and not by every keyword. stats holds
// what norm_forward() says in norm_ops.h. A gradient that is not wanted is an empty tensor; bias_dtype None: not
// wanted.
TORCH_LIBRARY(fused_layernorm, library) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  library.def(
      "norm_forward(Tensor x, Tensor? weight, Tensor? bias, int normalized_ndim, float eps, float weight_offset=0.0, "
      "bool is_rms_norm=False, ScalarType? out_dtype=None) -> (Tensor y, Tensor stats)",
      tags);
  library.def(
      "norm_backward(Tensor grad_output, Tensor x, Tensor? weight, Tensor stats, int normalized_ndim, "
      "float weight_offset, bool is_rms_norm, bool wants_x, bool wants_weight, ScalarType? bias_dtype) "
      "-> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
      tags);
}

TORCH_LIBRARY_IMPL(fused_layernorm, CPU, library) {
  library.impl("norm_forward", &fused_layernorm::op_norm_forward);
  library.impl("norm_backward", &fused_layernorm::op_norm_backward);
}

#ifdef FUSED_LAYERNORM_WITH_CUDA
TORCH_LIBRARY_IMPL(fused_layernorm, CUDA, library) {
  library.impl("norm_forward", &fused_layernorm::op_norm_forward);
  library.impl("norm_backward", &fused_layernorm::op_norm_backward);
}
#endif

TORCH_LIBRARY_IMPL(fused_layernorm, Autograd, library) {
  library.impl("norm_forward", &fused_layernorm::norm_by_operator);
  // Double backward is PyTorch operations (autograd.cpp): who differentiates this one gets an error, never a zero.
  library.impl("norm_backward", torch::autograd::autogradNotImplementedFallback());
}
