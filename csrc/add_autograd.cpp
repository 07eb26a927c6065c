// The autograd of add_norm_forward, eager and compiled: the norm of z = residual + dropout(x) and z itself. What is
// saved is z (the result residual_out), weight, the rows' statistics and the 16 bytes of philox: neither x nor a mask.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include "autograd.h"

namespace fused_layernorm {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

AddNormResult call_add_norm_forward(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                                    const OptionalTensor& bias, const OptionalTensor& philox, int64_t normalized_ndim,
                                    double eps, double weight_offset, bool is_rms_norm,
                                    std::optional<at::ScalarType> out_dtype, bool stats_grad, double dropout_p,
                                    std::optional<at::ScalarType> residual_dtype) {
  static const auto handle = find_operator<decltype(call_add_norm_forward)>("fused_layernorm::add_norm_forward");
  return handle.call(x, residual, weight, bias, philox, normalized_ndim, eps, weight_offset, is_rms_norm, out_dtype,
                     stats_grad, dropout_p, residual_dtype);
}

AddNormGradients call_add_norm_backward(const Tensor& grad_output, const OptionalTensor& grad_residual_out,
                                        const Tensor& z, const OptionalTensor& weight, const Tensor& stats,
                                        const OptionalTensor& philox, int64_t normalized_ndim, double weight_offset,
                                        bool is_rms_norm, bool wants_x, bool wants_weight,
                                        std::optional<at::ScalarType> bias_dtype, bool stats_grad, double dropout_p,
                                        at::ScalarType x_dtype, std::optional<at::ScalarType> residual_dtype) {
  static const auto handle = find_operator<decltype(call_add_norm_backward)>("fused_layernorm::add_norm_backward");
  return handle.call(grad_output, grad_residual_out, z, weight, stats, philox, normalized_ndim, weight_offset,
                     is_rms_norm, wants_x, wants_weight, bias_dtype, stats_grad, dropout_p, x_dtype, residual_dtype);
}

Tensor call_dropout_mask(const Tensor& philox, int64_t rows, int64_t hidden_size, double dropout_p) {
  static const auto handle = find_operator<decltype(call_dropout_mask)>("fused_layernorm::dropout_mask");
  return handle.call(philox, rows, hidden_size, dropout_p);
}

OptionalTensor if_defined(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }

// The dtype of an input in saved_data, where one was given.
std::optional<at::ScalarType> dtype_in(AutogradContext* context, const char* name) {
  const auto found = context->saved_data.find(name);
  if (found == context->saved_data.end()) return std::nullopt;
  return static_cast<at::ScalarType>(found->second.toInt());
}

struct AddNorm : torch::autograd::Function<AddNorm> {
  static constexpr bool is_traceable = true;  // compiled autograd may put backward's operators into its graph

  static variable_list forward(AutogradContext* context, const Tensor& x, const OptionalTensor& residual,
                               const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& philox,
                               int64_t normalized_ndim, double eps, double weight_offset, bool is_rms_norm,
                               std::optional<at::ScalarType> out_dtype, bool stats_grad, double dropout_p,
                               std::optional<at::ScalarType> residual_dtype) {
    auto [y, residual_out, stats] = [&] {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      return call_add_norm_forward(x, residual, weight, bias, philox, normalized_ndim, eps, weight_offset, is_rms_norm,
                                   out_dtype, stats_grad, dropout_p, residual_dtype);
    }();
    context->save_for_backward({residual_out, weight.value_or(Tensor()), stats, philox.value_or(Tensor())});
    context->mark_non_differentiable({stats});
    context->set_materialize_grads(false);
    auto& data = context->saved_data;
    data["normalized_ndim"] = normalized_ndim;
    data["eps"] = eps;
    data["weight_offset"] = weight_offset;
    data["is_rms_norm"] = is_rms_norm;
    data["stats_grad"] = stats_grad;
    data["dropout_p"] = dropout_p;
    data["x_dtype"] = static_cast<int64_t>(x.scalar_type());
    data["y_dtype"] = static_cast<int64_t>(y.scalar_type());
    if (residual) data["residual_dtype"] = static_cast<int64_t>(residual->scalar_type());
    if (bias) data["bias_dtype"] = static_cast<int64_t>(bias->scalar_type());
    return {y, residual_out, stats};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    variable_list gradients(13);
    Tensor grad_output = grad_outputs[0];
    const Tensor& grad_residual_out = grad_outputs[1];
    if (!grad_output.defined() && !grad_residual_out.defined()) return gradients;
    const variable_list saved = context->get_saved_variables();
    const Tensor &z = saved[0], &weight = saved[1], &stats = saved[2], &philox = saved[3];
    const auto& data = context->saved_data;
    const at::ScalarType x_dtype = *dtype_in(context, "x_dtype");
    const double dropout_p = data.at("dropout_p").toDouble();
    const bool drops = philox.defined() && dropout_p > 0;
    // y was not used: rare, so that a path of its own is not worth it
    if (!grad_output.defined()) grad_output = at::zeros_like(z, z.options().dtype(*dtype_in(context, "y_dtype")));
    size_t input = 0;  // those that are tensors, numbered without the ones that were not given
    const auto is_wanted = [&](bool is_given) { return is_given && context->needs_input_grad(input++); };
    const auto residual_dtype = dtype_in(context, "residual_dtype"), bias_dtype = dtype_in(context, "bias_dtype");
    BackwardOptions options{};
    options.wants_x = is_wanted(true);
    const bool wants_residual = is_wanted(residual_dtype.has_value());
    options.wants_weight = is_wanted(weight.defined());
    options.wants_bias = is_wanted(bias_dtype.has_value());
    options.bias_dtype = bias_dtype;
    options.normalized_ndim = data.at("normalized_ndim").toInt();
    options.eps = data.at("eps").toDouble();
    options.weight_offset = data.at("weight_offset").toDouble();
    options.is_rms_norm = data.at("is_rms_norm").toBool();
    options.stats_grad = data.at("stats_grad").toBool();

    Tensor grad_x, grad_residual, grad_weight, grad_bias;
    if (!c10::GradMode::is_enabled() && !is_in_transform({grad_output, grad_residual_out, z, weight})) {
      std::tie(grad_x, grad_residual, grad_weight, grad_bias) = call_add_norm_backward(
          grad_output, if_defined(grad_residual_out), z, if_defined(weight), stats, if_defined(philox),
          options.normalized_ndim, options.weight_offset, options.is_rms_norm, options.wants_x, options.wants_weight,
          options.wants_bias ? bias_dtype : std::nullopt, options.stats_grad, dropout_p, x_dtype,
          wants_residual ? residual_dtype : std::nullopt);
      const bool is_shared = options.wants_x && wants_residual && !drops && residual_dtype == x_dtype;
      if (is_shared) grad_residual = grad_x;
    } else {  // the stages around the norm are linear, so they are their own derivatives
      const bool wants_x = options.wants_x;
      options.wants_x = wants_x || wants_residual;
      const NormGradients found = by_operations(grad_output, z, weight, options);
      options.wants_x = wants_x;
      grad_weight = found.weight;
      grad_bias = found.bias;
      if (found.x.defined()) {
        Tensor grad_z = grad_residual_out.defined() ? found.x.add(grad_residual_out) : found.x;
        if (wants_residual) grad_residual = grad_z.to(*residual_dtype);
        if (drops) {
          int64_t rows = 1;
          for (int64_t dim = 0; dim < z.dim() - options.normalized_ndim; ++dim) rows *= z.size(dim);
          const Tensor mask = call_dropout_mask(philox, rows, rows ? z.numel() / rows : 0, dropout_p);
          const double scale = dropout_p < 1 ? 1 / (1 - dropout_p) : 0;
          grad_z = at::where(mask.view_as(z), grad_z.mul(scale), at::zeros({}, grad_z.options()));
        }
        grad_x = grad_z.to(x_dtype);
      }
    }
    if (options.wants_x) gradients[0] = grad_x;
    if (wants_residual) gradients[1] = grad_residual;
    if (options.wants_weight) gradients[2] = grad_weight;
    if (options.wants_bias) gradients[3] = grad_bias;
    return gradients;
  }
};

}  // namespace

AddNormResult add_norm_by_operator(const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
                                   const OptionalTensor& bias, const OptionalTensor& philox, int64_t normalized_ndim,
                                   double eps, double weight_offset, bool is_rms_norm,
                                   std::optional<at::ScalarType> out_dtype, bool stats_grad, double dropout_p,
                                   std::optional<at::ScalarType> residual_dtype) {
  const variable_list found = AddNorm::apply(x, residual, weight, bias, philox, normalized_ndim, eps, weight_offset,
                                             is_rms_norm, out_dtype, stats_grad, dropout_p, residual_dtype);
  return {found[0], found[1], found[2]};
}

}  // namespace fused_layernorm
