// The autograd of plain eager mode and of the operator. NormFunction in fused_layernorm/functional.py is the same in
// Python, for calls that do not come this way; both stand on norm_ops.h and share the formula of double backward. A
// node in C++, as one in Python is most of the host time of a norm: on the CPU, 1x8, a step takes 0.76 of torch's time,
// by NormFunction 1.25.
#include "autograd.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/utils/pybind.h>

#include "autograd_node.h"

namespace fused_layernorm {

using at::Tensor;

// ---- what the kernels may take -------------------------------------------------------------------------------------

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// All that a tensor may be. Subclasses, wrappers of transforms and tensors without memory have further keys.
constexpr DispatchKeySet kPlainCpu({DispatchKey::CPU, DispatchKey::AutogradCPU, DispatchKey::AutocastCPU,
                                    DispatchKey::ADInplaceOrView, DispatchKey::Negative, DispatchKey::ZeroTensor});
constexpr DispatchKeySet kPlainCuda({DispatchKey::CUDA, DispatchKey::AutogradCUDA, DispatchKey::AutocastCUDA});
// All that may be switched on around the call. Transforms, modes, tracers and functionalization have further keys.
constexpr DispatchKeySet kPlainCall = c10::default_included_set | c10::autocast_dispatch_keyset;

DispatchKeySet plain_tensor = kWithCuda ? kPlainCpu | kPlainCuda : kPlainCpu;

bool is_within(DispatchKeySet keys, DispatchKeySet allowed) { return (keys.raw_repr() & ~allowed.raw_repr()) == 0; }

}  // namespace

bool takes_kernel(TensorRefs tensors) {
  if (!is_within(c10::impl::tls_local_dispatch_key_set().included_, kPlainCall)) return false;
  for (const Tensor& tensor : tensors)
    if (tensor.defined() && !is_within(tensor.key_set(), plain_tensor)) return false;
  return !torch::autograd::ForwardADLevel::try_get_by_idx(0);
}

void take_no_cuda_tensors() { plain_tensor = kPlainCpu; }

// ---- the operators ---------------------------------------------------------------------------------------------------

namespace {

// Of torch.func: its transforms around the call, and the tensors inside them. The operators have no rules for these.
constexpr DispatchKeySet kTransforms({DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper,
                                      DispatchKey::FuncTorchVmapMode, DispatchKey::FuncTorchDynamicLayerFrontMode,
                                      DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::BatchedNestedTensor});

}  // namespace

bool is_in_transform(TensorRefs tensors) {
  if (c10::impl::tls_local_dispatch_key_set().included_.has_any(kTransforms)) return true;
  for (const Tensor& tensor : tensors)
    if (tensor.defined() && tensor.key_set().has_any(kTransforms)) return true;
  return torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

void check_no_tangents(const char* name, TensorRefs tensors) {
  for (const Tensor& tensor : tensors)
    TORCH_CHECK_NOT_IMPLEMENTED(!tensor.defined() || !tensor._fw_grad(/*level=*/0).defined(), name,
                                " has no forward-mode derivative; the functions of fused_layernorm have one");
}

namespace {

NormOperatorGradients call_norm_backward(const Tensor& grad_output, const Tensor& x, const OptionalTensor& weight,
                                         const Tensor& stats, int64_t normalized_ndim, double weight_offset,
                                         bool is_rms_norm, bool wants_x, bool wants_weight,
                                         std::optional<at::ScalarType> bias_dtype, bool stats_grad) {
  static const auto handle = find_operator<decltype(call_norm_backward)>("fused_layernorm::norm_backward");
  return handle.call(grad_output, x, weight, stats, normalized_ndim, weight_offset, is_rms_norm, wants_x, wants_weight,
                     bias_dtype, stats_grad);
}

}  // namespace

// ---- backward ------------------------------------------------------------------------------------------------------

namespace {

PyObject* differentiable_backward = nullptr;

}  // namespace

NormGradients by_operations(const Tensor& grad_output, const Tensor& x, const Tensor& weight,
                            const BackwardOptions& options) {
  const py::gil_scoped_acquire gil;
  TORCH_INTERNAL_ASSERT(differentiable_backward);
  const py::tuple found = py::handle(differentiable_backward)(
      grad_output, x, weight, options.normalized_ndim, options.eps, options.weight_offset, options.is_rms_norm,
      options.wants_bias ? options.bias_dtype : std::nullopt, options.stats_grad);
  const auto tensor = [&](size_t i, bool is_wanted) {
    return is_wanted && !found[i].is_none() ? found[i].cast<Tensor>() : Tensor();
  };
  return {tensor(0, options.wants_x), tensor(1, options.wants_weight), tensor(2, options.wants_bias), {}};
}

namespace {

struct NormBackward {
  static constexpr const char* kName = "FusedNormBackward";
  static constexpr size_t kSaved = 3;
  using Tensors = std::array<Tensor, kSaved>;  // x, weight, stats

  BackwardOptions norm;
  bool is_operator;

  std::array<bool*, 3> wanted() { return {&norm.wants_x, &norm.wants_weight, &norm.wants_bias}; }

  template <class Function>
  void for_each(Function&& function) const {
    for_each_option(norm, function);
  }

  variable_list gradients(const variable_list& grad_outputs, const Tensors& saved) const {
    variable_list gradients(3);
    const Tensor& grad_output = grad_outputs[0];
    if (!grad_output.defined()) return gradients;
    const auto& [x, weight, stats] = saved;
    const auto bias_dtype = norm.wants_bias ? norm.bias_dtype : std::nullopt;
    NormGradients found;
    if (!c10::GradMode::is_enabled() && takes_kernel({grad_output, x, weight})) {
      const bool is_there = each_has_a_bias(weight, x, norm.normalized_ndim);
      found = norm_backward(grad_output, x, weight, stats, norm.normalized_ndim, norm.weight_offset, norm.is_rms_norm,
                            norm.wants_x, norm.wants_weight, is_there ? std::nullopt : bias_dtype, norm.stats_grad);
      if (is_there && bias_dtype) found.bias = gradient_of_each_bias(grad_output, weight, *bias_dtype);
    } else if (!c10::GradMode::is_enabled() && is_operator && !is_in_transform({grad_output, x, weight})) {
      std::tie(found.x, found.weight, found.bias) = call_norm_backward(
          grad_output, x, weight.defined() ? OptionalTensor(weight) : std::nullopt, stats, norm.normalized_ndim,
          norm.weight_offset, norm.is_rms_norm, norm.wants_x, norm.wants_weight, bias_dtype, norm.stats_grad);
    } else {
      found = by_operations(grad_output, x, weight, norm);
    }
    if (norm.wants_x) gradients[0] = std::move(found.x);
    if (norm.wants_weight) gradients[1] = std::move(found.weight);
    if (norm.wants_bias) gradients[2] = std::move(found.bias);
    return gradients;
  }
};

void record_norm(Tensor& y, const Tensor& stats, const Tensor& x, const Tensor& weight, const Tensor& bias,
                 int64_t normalized_ndim, const NormOptions& options, bool is_operator) {
  record<NormBackward>({y}, {x, weight, bias}, {x, weight, stats},
                       {backward_options(normalized_ndim, bias, options), is_operator});
}

}  // namespace

Tensor norm(const Tensor& x, const Tensor& weight, const Tensor& bias, const NormOptions& options) {
  const Profiled profiled(options.is_rms_norm ? "fused_rms_norm" : "fused_layer_norm");
  const bool is_recorded = wants_gradients({x, weight, bias});
  auto [y, stats, unused] = norm_forward(x, weight, bias, options, /*save_stats=*/is_recorded);
  if (is_recorded)
    record_norm(y, stats, x, weight, bias, normalized_ndim_of(weight, bias, options), options, /*is_operator=*/false);
  return std::move(y);
}

NormOperatorResult norm_by_operator(const Tensor& x, const OptionalTensor& given_weight,
                                    const OptionalTensor& given_bias, int64_t normalized_ndim, double eps,
                                    double weight_offset, bool is_rms_norm, std::optional<at::ScalarType> out_dtype,
                                    bool stats_grad) {
  const Tensor weight = given_weight.value_or(Tensor()), bias = given_bias.value_or(Tensor());
  check_no_tangents("torch.ops.fused_layernorm.norm_forward", {x, weight, bias});
  static const auto forward = find_operator<decltype(norm_by_operator)>("fused_layernorm::norm_forward");
  auto [y, stats] = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return forward.call(x, given_weight, given_bias, normalized_ndim, eps, weight_offset, is_rms_norm, out_dtype,
                        stats_grad);
  }();
  if (wants_gradients({x, weight, bias}))
    record_norm(y, stats, x, weight, bias, normalized_ndim,
                {{}, eps, weight_offset, is_rms_norm, out_dtype, stats_grad}, /*is_operator=*/true);
  return {std::move(y), std::move(stats)};
}

void name_norm_node() { name_in_python<NormBackward>(); }

void set_differentiable_backward(PyObject* function) {
  Py_INCREF(function);
  Py_XSETREF(differentiable_backward, function);
}

}  // namespace fused_layernorm
