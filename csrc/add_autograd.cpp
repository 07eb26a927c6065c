// The autograd of add_norm_forward, eager and compiled: the norm of z = residual + dropout(x) and z itself. What is
// saved is z (the result residual_out), weight, the rows' statistics and the 16 bytes of philox: neither x nor a mask.
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "autograd_node.h"

namespace fused_layernorm {
namespace {

using at::Tensor;

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

Tensor call_dropout_mask(const Tensor& philox, c10::SymInt rows, c10::SymInt hidden_size, double dropout_p) {
  static const auto handle = find_operator<decltype(call_dropout_mask)>("fused_layernorm::dropout_mask");
  return handle.call(philox, std::move(rows), std::move(hidden_size), dropout_p);
}

OptionalTensor if_defined(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }

struct AddNormBackward {
  static constexpr const char* kName = "FusedAddNormBackward";
  static constexpr size_t kSaved = 4;
  using Tensors = std::array<Tensor, kSaved>;  // z, weight, stats, philox

  BackwardOptions norm;  // of z: wants_x is for the node's x
  bool is_operator;
  double dropout_p;
  at::ScalarType x_dtype;
  std::optional<at::ScalarType> residual_dtype;  // none: no residual
  bool wants_residual = false;

  std::array<bool*, 4> wanted() { return {&norm.wants_x, &wants_residual, &norm.wants_weight, &norm.wants_bias}; }

  template <class Function>
  void for_each(Function&& function) const {
    for_each_option(norm, function);
    function(dropout_p);
    function(x_dtype);
    function(residual_dtype);
    function(wants_residual);
  }

  variable_list gradients(const variable_list& grad_outputs, const Tensors& saved) const {
    variable_list gradients(4);
    const Tensor& grad_y = grad_outputs[0];
    const Tensor grad_z = grad_outputs.size() > 1 ? grad_outputs[1] : Tensor();
    if (!grad_y.defined() && !grad_z.defined()) return gradients;
    // Of y, where it was not used, no gradient of 0: times an infinite rstd, or a NaN, that is no 0
    const NormGradients found = grad_y.defined() ? from(grad_y, grad_z, saved) : of_sum(grad_z, saved);
    if (norm.wants_x) gradients[0] = found.x;
    if (wants_residual) gradients[1] = found.residual;
    if (norm.wants_weight) gradients[2] = found.weight;
    if (norm.wants_bias) gradients[3] = found.bias;
    return gradients;
  }

 private:
  NormGradients from(const Tensor& grad_y, const Tensor& grad_z, const Tensors& saved) const {
    const auto& [z, weight, stats, philox] = saved;
    if (c10::GradMode::is_enabled()) return from_operations(grad_y, grad_z, saved);
    const auto bias_dtype = norm.wants_bias ? norm.bias_dtype : std::nullopt;
    const auto wanted_residual = wants_residual ? residual_dtype : std::nullopt;
    if (takes_kernel({grad_y, grad_z, z, weight})) {
      const AddGradOptions add{grad_z, philox, dropout_p, x_dtype, wanted_residual};
      const bool is_there = each_has_a_bias(weight, z, norm.normalized_ndim);
      NormGradients found =
          norm_backward(grad_y, z, weight, stats, norm.normalized_ndim, norm.weight_offset, norm.is_rms_norm,
                        norm.wants_x, norm.wants_weight, is_there ? std::nullopt : bias_dtype, norm.stats_grad, &add);
      if (is_there && bias_dtype) found.bias = gradient_of_each_bias(grad_y, weight, *bias_dtype);
      return found;
    }
    if (!is_operator || is_in_transform({grad_y, grad_z, z, weight})) return from_operations(grad_y, grad_z, saved);
    NormGradients found;
    std::tie(found.x, found.residual, found.weight, found.bias) =
        call_add_norm_backward(grad_y, if_defined(grad_z), z, if_defined(weight), stats, if_defined(philox),
                               norm.normalized_ndim, norm.weight_offset, norm.is_rms_norm, norm.wants_x,
                               norm.wants_weight, bias_dtype, norm.stats_grad, dropout_p, x_dtype, wanted_residual);
    if (norm.wants_x && wants_residual && !drops(philox) && residual_dtype == x_dtype) found.residual = found.x;
    return found;
  }

  // The stages around the norm are linear, so they are their own derivatives.
  NormGradients from_operations(const Tensor& grad_y, const Tensor& grad_z, const Tensors& saved) const {
    const auto& [z, weight, stats, philox] = saved;
    BackwardOptions of_z = norm;
    of_z.wants_x = norm.wants_x || wants_residual;
    NormGradients found = by_operations(grad_y, z, weight, of_z);
    if (!found.x.defined()) return found;
    const NormGradients of_stages = of_sum(grad_z.defined() ? found.x.add(grad_z) : found.x, saved);
    found.x = of_stages.x;
    found.residual = of_stages.residual;
    return found;
  }

  // Of x and residual, from that of z.
  NormGradients of_sum(const Tensor& grad_z, const Tensors& saved) const {
    const Tensor &z = saved[0], &philox = saved[3];
    NormGradients found;
    if (wants_residual) found.residual = grad_z.to(*residual_dtype);
    if (!norm.wants_x) return found;
    Tensor dropped = grad_z;
    if (drops(philox)) {
      c10::SymInt rows = 1, columns = 1;
      const int64_t leading = z.dim() - norm.normalized_ndim;
      for (int64_t dim = 0; dim < z.dim(); ++dim) (dim < leading ? rows : columns) *= z.sym_size(dim);
      const Tensor mask = call_dropout_mask(philox, rows, columns, dropout_p);
      const double scale = dropout_p < 1 ? 1 / (1 - dropout_p) : 0;
      dropped = at::where(mask.view_as(z), dropped.mul(scale), at::zeros({}, dropped.options()));
    }
    found.x = dropped.to(x_dtype);
    return found;
  }

  bool drops(const Tensor& philox) const { return philox.defined() && dropout_p > 0; }
};

void record_add_norm(Tensor& y, Tensor& z, const Tensor& stats, const Tensor& x, const Tensor& weight,
                     const Tensor& bias, int64_t normalized_ndim, const NormOptions& options, const AddOptions& add,
                     bool is_operator) {
  const TensorRefs inputs{x, add.residual, weight, bias};
  const AddNormBackward::Tensors saved{z, weight, stats, add.philox};
  const AddNormBackward backward{
      backward_options(normalized_ndim, bias, options),
      is_operator,
      add.dropout_p,
      x.scalar_type(),
      add.residual.defined() ? std::optional(add.residual.scalar_type()) : std::nullopt,
  };
  if (wants_gradients({x, add.residual})) {
    record<AddNormBackward>({y, z}, inputs, saved, backward);
  } else {
    record<AddNormBackward>({y}, inputs, saved, backward);
  }
}

}  // namespace

std::tuple<Tensor, Tensor> add_norm(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                    const NormOptions& options, const AddOptions& add) {
  const Profiled profiled(options.is_rms_norm ? "fused_add_rms_norm" : "fused_add_layer_norm");
  const bool is_recorded = wants_gradients({x, add.residual, weight, bias});
  auto [y, stats, z] = norm_forward(x, weight, bias, options, /*save_stats=*/is_recorded, &add);
  if (is_recorded)
    record_add_norm(y, z, stats, x, weight, bias, normalized_ndim_of(weight, bias, options), options, add,
                    /*is_operator=*/false);
  return {std::move(y), std::move(z)};
}

AddNormResult add_norm_by_operator(const Tensor& x, const OptionalTensor& given_residual,
                                   const OptionalTensor& given_weight, const OptionalTensor& given_bias,
                                   const OptionalTensor& philox, int64_t normalized_ndim, double eps,
                                   double weight_offset, bool is_rms_norm, std::optional<at::ScalarType> out_dtype,
                                   bool stats_grad, double dropout_p, std::optional<at::ScalarType> residual_dtype) {
  const Tensor weight = given_weight.value_or(Tensor()), bias = given_bias.value_or(Tensor());
  const AddOptions add{given_residual.value_or(Tensor()), residual_dtype, philox.value_or(Tensor()), dropout_p};
  check_no_tangents("torch.ops.fused_layernorm.add_norm_forward", {x, add.residual, weight, bias});
  static const auto forward = find_operator<decltype(add_norm_by_operator)>("fused_layernorm::add_norm_forward");
  auto [y, z, stats] = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return forward.call(x, given_residual, given_weight, given_bias, philox, normalized_ndim, eps, weight_offset,
                        is_rms_norm, out_dtype, stats_grad, dropout_p, residual_dtype);
  }();
  if (wants_gradients({x, add.residual, weight, bias}))
    record_add_norm(y, z, stats, x, weight, bias, normalized_ndim,
                    {{}, eps, weight_offset, is_rms_norm, out_dtype, stats_grad}, add, /*is_operator=*/true);
  return {std::move(y), std::move(z), std::move(stats)};
}

void name_add_norm_node() { name_in_python<AddNormBackward>(); }

}  // namespace fused_layernorm
