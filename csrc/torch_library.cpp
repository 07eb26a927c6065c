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

// The rows with x's leading dimensions, so that who splits x along one of them (DTensor) can split stats likewise.
Tensor stats_like_rows(const Tensor& stats, const Tensor& x, int64_t leading) {
  at::DimVector shape(x.sizes().begin(), x.sizes().begin() + leading);
  shape.insert(shape.begin(), stats.size(0));
  return stats.view(shape);
}

Tensor or_empty(Tensor& gradient, const Tensor& like) {
  return gradient.defined() ? std::move(gradient) : at::empty({0}, like.options());
}
NormOperatorGradients or_empty(NormGradients found, const Tensor& x) {
  return {or_empty(found.x, x), or_empty(found.weight, x), or_empty(found.bias, x)};
}

NormOperatorResult op_norm_forward(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                                   int64_t normalized_ndim, double eps, double weight_offset, bool is_rms_norm,
                                   std::optional<at::ScalarType> out_dtype, bool stats_grad) {
  check_normalized_ndim(normalized_ndim, x);
  const int64_t leading = x.dim() - normalized_ndim;
  const NormOptions options{x.sizes().slice(leading), eps, weight_offset, is_rms_norm, out_dtype, stats_grad,
                            /*takes_segments=*/true};
  auto [y, stats, unused] =
      norm_forward(x, weight.value_or(Tensor()), bias.value_or(Tensor()), options, /*save_stats=*/true);
  return {std::move(y), stats_like_rows(stats, x, leading)};
}

NormOperatorGradients op_norm_backward(const Tensor& grad_output, const Tensor& x, const OptionalTensor& weight,
                                       const Tensor& stats, int64_t normalized_ndim, double weight_offset,
                                       bool is_rms_norm, bool wants_x, bool wants_weight,
                                       std::optional<at::ScalarType> bias_dtype, bool stats_grad) {
  return or_empty(norm_backward(grad_output, x, weight.value_or(Tensor()), stats.contiguous(), normalized_ndim,
                                weight_offset, is_rms_norm, wants_x, wants_weight, bias_dtype, stats_grad),
                  x);
}

AddNormResult op_add_norm_forward(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                                  const OptionalTensor& bias, const OptionalTensor& philox, int64_t normalized_ndim,
                                  double eps, double weight_offset, bool is_rms_norm,
                                  std::optional<at::ScalarType> out_dtype, bool stats_grad, double dropout_p,
                                  std::optional<at::ScalarType> residual_dtype) {
  check_normalized_ndim(normalized_ndim, x);
  const int64_t leading = x.dim() - normalized_ndim;
  const NormOptions options{x.sizes().slice(leading), eps, weight_offset, is_rms_norm, out_dtype, stats_grad,
                            /*takes_segments=*/true};
  const AddOptions add{residual.value_or(Tensor()), residual_dtype, philox.value_or(Tensor()), dropout_p};
  auto [y, stats, residual_out] =
      norm_forward(x, weight.value_or(Tensor()), bias.value_or(Tensor()), options, /*save_stats=*/true, &add);
  return {std::move(y), std::move(residual_out), stats_like_rows(stats, x, leading)};
}

AddNormGradients op_add_norm_backward(const Tensor& grad_output, const OptionalTensor& grad_residual_out,
                                      const Tensor& z, const OptionalTensor& weight, const Tensor& stats,
                                      const OptionalTensor& philox, int64_t normalized_ndim, double weight_offset,
                                      bool is_rms_norm, bool wants_x, bool wants_weight,
                                      std::optional<at::ScalarType> bias_dtype, bool stats_grad, double dropout_p,
                                      at::ScalarType x_dtype, std::optional<at::ScalarType> residual_dtype) {
  const AddGradOptions add{grad_residual_out.value_or(Tensor()), philox.value_or(Tensor()), dropout_p, x_dtype,
                           residual_dtype};
  NormGradients found = norm_backward(grad_output, z, weight.value_or(Tensor()), stats.contiguous(), normalized_ndim,
                                      weight_offset, is_rms_norm, wants_x, wants_weight, bias_dtype, stats_grad, &add);
  if (found.residual.is_same(found.x)) found.residual.reset();  // results of an operator are not one tensor twice
  return {or_empty(found.x, z), or_empty(found.residual, z), or_empty(found.weight, z), or_empty(found.bias, z)};
}

NormOperatorResult op_after_norm_forward(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                                         const OptionalTensor& philox, int64_t normalized_ndim, double eps,
                                         double weight_offset, bool is_rms_norm,
                                         std::optional<at::ScalarType> out_dtype, int64_t activation,
                                         double dropout_p) {
  check_normalized_ndim(normalized_ndim, x);
  const int64_t leading = x.dim() - normalized_ndim;
  const NormOptions options{x.sizes().slice(leading), eps, weight_offset, is_rms_norm, out_dtype};
  const AfterOptions after{activation, philox.value_or(Tensor()), dropout_p};
  auto [y, stats, unused] = norm_forward(x, weight.value_or(Tensor()), bias.value_or(Tensor()), options,
                                         /*save_stats=*/true, nullptr, &after);
  return {std::move(y), stats_like_rows(stats, x, leading)};
}

NormOperatorGradients op_after_norm_backward(const Tensor& grad_output, const Tensor& x, const OptionalTensor& weight,
                                             const OptionalTensor& bias, const Tensor& stats,
                                             const OptionalTensor& philox, int64_t normalized_ndim,
                                             double weight_offset, bool is_rms_norm, bool wants_x, bool wants_weight,
                                             bool wants_bias, int64_t activation, double dropout_p) {
  return or_empty(after_norm_backward(grad_output, x, weight.value_or(Tensor()), bias.value_or(Tensor()),
                                      stats.contiguous(), normalized_ndim, weight_offset, is_rms_norm, wants_x,
                                      wants_weight, wants_bias, {activation, philox.value_or(Tensor()), dropout_p}),
                  x);
}

AddNormResult op_gated_norm_forward(const Tensor& x, const Tensor& residual, const Tensor& gate, const Tensor& weight,
                                    const OptionalTensor& bias, int64_t normalized_ndim, double eps,
                                    double weight_offset, bool is_rms_norm, at::ScalarType out_dtype,
                                    at::ScalarType residual_dtype) {
  check_normalized_ndim(normalized_ndim, x);
  const int64_t leading = x.dim() - normalized_ndim;
  const NormOptions options{x.sizes().slice(leading), eps, weight_offset, is_rms_norm, out_dtype,
                            /*stats_grad=*/true,
                            /*takes_segments=*/true};
  const AddOptions add{residual, residual_dtype, {}, 0.0, gate};
  auto [y, stats, residual_out] = norm_forward(x, weight, bias.value_or(Tensor()), options, /*save_stats=*/true, &add);
  return {std::move(y), std::move(residual_out), stats_like_rows(stats, x, leading)};
}

using GatedNormGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
GatedNormGradients op_gated_norm_backward(const Tensor& grad_output, const OptionalTensor& grad_residual_out,
                                          const Tensor& z, const Tensor& x, const Tensor& gate, const Tensor& weight,
                                          const Tensor& stats, int64_t normalized_ndim, double weight_offset,
                                          bool is_rms_norm, bool wants_x, bool wants_residual, bool wants_weight,
                                          std::optional<at::ScalarType> bias_dtype) {
  NormGradients found = gated_norm_backward(grad_output, grad_residual_out.value_or(Tensor()), z, x, gate, weight,
                                            stats.contiguous(), normalized_ndim, weight_offset, is_rms_norm, wants_x,
                                            wants_residual, wants_weight, bias_dtype);
  return {or_empty(found.x, x), or_empty(found.residual, z), std::move(found.gate), or_empty(found.weight, z),
          or_empty(found.bias, z)};
}

}  // namespace
}  // namespace fused_layernorm

// All arguments are positional: DTensor keeps what it found for a call by these, and not by every keyword. stats holds
// what norm_forward() says in norm_ops.h. A gradient that is not wanted is an empty tensor; bias_dtype None: not
// wanted. A weight [n, *normalized], and a bias likewise, means n equal parts of the rows, each with its own.
TORCH_LIBRARY(fused_layernorm, library) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  library.def(
      "norm_forward(Tensor x, Tensor? weight, Tensor? bias, int normalized_ndim, float eps, float weight_offset=0.0, "
      "bool is_rms_norm=False, ScalarType? out_dtype=None, bool stats_grad=True) -> (Tensor y, Tensor stats)",
      tags);
  library.def(
      "norm_backward(Tensor grad_output, Tensor x, Tensor? weight, Tensor stats, int normalized_ndim, "
      "float weight_offset, bool is_rms_norm, bool wants_x, bool wants_weight, ScalarType? bias_dtype, "
      "bool stats_grad=True) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
      tags);
  // The norm of z = residual + dropout(x), which is residual_out. philox holds the random bits, so that no operator
  // here draws any. grad_residual is empty where it is grad_x.
  library.def(
      "add_norm_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? philox, int normalized_ndim, "
      "float eps, float weight_offset=0.0, bool is_rms_norm=False, ScalarType? out_dtype=None, bool stats_grad=True, "
      "float dropout_p=0.0, ScalarType? residual_dtype=None) -> (Tensor y, Tensor residual_out, Tensor stats)",
      tags);
  library.def(
      "add_norm_backward(Tensor grad_output, Tensor? grad_residual_out, Tensor z, Tensor? weight, Tensor stats, "
      "Tensor? philox, int normalized_ndim, float weight_offset, bool is_rms_norm, bool wants_x, bool wants_weight, "
      "ScalarType? bias_dtype, bool stats_grad, float dropout_p, ScalarType x_dtype, ScalarType? residual_dtype) "
      "-> (Tensor grad_x, Tensor grad_residual, Tensor grad_weight, Tensor grad_bias)",
      tags);
  // The same of z = residual + gate * x; gate [n, *normalized] as weight.
  library.def(
      "gated_norm_forward(Tensor x, Tensor residual, Tensor gate, Tensor weight, Tensor? bias, int normalized_ndim, "
      "float eps, float weight_offset, bool is_rms_norm, ScalarType out_dtype, ScalarType residual_dtype) "
      "-> (Tensor y, Tensor residual_out, Tensor stats)",
      tags);
  library.def(
      "gated_norm_backward(Tensor grad_output, Tensor? grad_residual_out, Tensor z, Tensor x, Tensor gate, "
      "Tensor weight, Tensor stats, int normalized_ndim, float weight_offset, bool is_rms_norm, bool wants_x, "
      "bool wants_residual, bool wants_weight, ScalarType? bias_dtype) "
      "-> (Tensor grad_x, Tensor grad_residual, Tensor grad_gate, Tensor grad_weight, Tensor grad_bias)",
      tags);
  // y = dropout(activation(norm(x))).
  library.def(
      "after_norm_forward(Tensor x, Tensor? weight, Tensor? bias, Tensor? philox, int normalized_ndim, float eps, "
      "float weight_offset, bool is_rms_norm, ScalarType? out_dtype, int activation, float dropout_p) "
      "-> (Tensor y, Tensor stats)",
      tags);
  library.def(
      "after_norm_backward(Tensor grad_output, Tensor x, Tensor? weight, Tensor? bias, Tensor stats, Tensor? philox, "
      "int normalized_ndim, float weight_offset, bool is_rms_norm, bool wants_x, bool wants_weight, bool wants_bias, "
      "int activation, float dropout_p) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
      tags);
  library.def("dropout_mask(Tensor philox, SymInt rows, SymInt hidden_size, float dropout_p) -> Tensor", tags);
}

namespace {
void implement(torch::Library& library) {
  library.impl("norm_forward", &fused_layernorm::op_norm_forward);
  library.impl("norm_backward", &fused_layernorm::op_norm_backward);
  library.impl("add_norm_forward", &fused_layernorm::op_add_norm_forward);
  library.impl("add_norm_backward", &fused_layernorm::op_add_norm_backward);
  library.impl("after_norm_forward", &fused_layernorm::op_after_norm_forward);
  library.impl("after_norm_backward", &fused_layernorm::op_after_norm_backward);
  library.impl("gated_norm_forward", &fused_layernorm::op_gated_norm_forward);
  library.impl("gated_norm_backward", &fused_layernorm::op_gated_norm_backward);
  library.impl("dropout_mask", &fused_layernorm::dropout_mask);
}
}  // namespace

TORCH_LIBRARY_IMPL(fused_layernorm, CPU, library) { implement(library); }
#ifdef FUSED_LAYERNORM_WITH_CUDA
TORCH_LIBRARY_IMPL(fused_layernorm, CUDA, library) { implement(library); }
#endif

TORCH_LIBRARY_IMPL(fused_layernorm, Autograd, library) {
  library.impl("norm_forward", &fused_layernorm::norm_by_operator);
  // Double backward is PyTorch operations (autograd.cpp): who differentiates this one gets an error, never a zero.
  library.impl("norm_backward", torch::autograd::autogradNotImplementedFallback());
  library.impl("add_norm_forward", &fused_layernorm::add_norm_by_operator);
  library.impl("add_norm_backward", torch::autograd::autogradNotImplementedFallback());
}
