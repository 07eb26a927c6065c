// The autograd of plain eager mode and of the operator. NormFunction in fused_layernorm/functional.py is the same in
// Python, for calls that do not come this way; both stand on norm_ops.h and share the formula of double backward. A
// node in C++, as one in Python is most of the host time of a norm: on the CPU, 1x8, a step takes 0.76 of torch's time,
// by NormFunction 1.25.
#include "autograd.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/utils/pybind.h>

#include <mutex>

namespace fused_layernorm {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

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

bool takes_kernel(std::initializer_list<std::reference_wrapper<const Tensor>> tensors) {
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

bool is_in_transform(std::initializer_list<std::reference_wrapper<const Tensor>> tensors) {
  if (c10::impl::tls_local_dispatch_key_set().included_.has_any(kTransforms)) return true;
  for (const Tensor& tensor : tensors)
    if (tensor.defined() && tensor.key_set().has_any(kTransforms)) return true;
  return torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
}

namespace {

NormOperatorResult call_norm_forward(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                                     int64_t normalized_ndim, double eps, double weight_offset, bool is_rms_norm,
                                     std::optional<at::ScalarType> out_dtype, bool stats_grad) {
  static const auto handle = find_operator<decltype(call_norm_forward)>("fused_layernorm::norm_forward");
  return handle.call(x, weight, bias, normalized_ndim, eps, weight_offset, is_rms_norm, out_dtype, stats_grad);
}

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

variable_list gradients_of(const Tensor& grad_output, const Tensor& x, const Tensor& weight, const Tensor& stats,
                           const BackwardOptions& options) {
  variable_list gradients(3);
  if (!grad_output.defined()) return gradients;
  NormGradients found;
  const auto bias_dtype = options.wants_bias ? options.bias_dtype : std::nullopt;
  if (c10::GradMode::is_enabled()) {
    found = by_operations(grad_output, x, weight, options);
  } else if (takes_kernel({grad_output, x, weight})) {
    found = norm_backward(grad_output, x, weight, stats, options.normalized_ndim, options.weight_offset,
                          options.is_rms_norm, options.wants_x, options.wants_weight, bias_dtype, options.stats_grad);
  } else if (options.is_operator && !is_in_transform({grad_output, x, weight})) {
    const OptionalTensor given_weight = weight.defined() ? OptionalTensor(weight) : std::nullopt;
    std::tie(found.x, found.weight, found.bias) =
        call_norm_backward(grad_output, x, given_weight, stats, options.normalized_ndim, options.weight_offset,
                           options.is_rms_norm, options.wants_x, options.wants_weight, bias_dtype, options.stats_grad);
    if (!options.wants_x) found.x.reset();
    if (!options.wants_weight) found.weight.reset();
    if (!options.wants_bias) found.bias.reset();
  } else {
    found = by_operations(grad_output, x, weight, options);
  }
  gradients[0] = std::move(found.x);
  gradients[1] = std::move(found.weight);
  gradients[2] = std::move(found.bias);
  return gradients;
}

// ---- the node ------------------------------------------------------------------------------------------------------

struct FusedNormBackward final : torch::autograd::Node {
  SavedVariable x, weight, stats;
  BackwardOptions options{};  // without what is wanted

  std::string name() const override { return "FusedNormBackward"; }

  variable_list apply(variable_list&& grad_outputs) override {
    const std::lock_guard<std::mutex> lock(mutex_);  // another thread may run backward through this node
    return gradients_of(grad_outputs[0], x.unpack(), weight.unpack(), stats.unpack(), options_of_this_task());
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* saved : {&x, &weight, &stats}) saved->reset_data();
  }

  // Compiled autograd puts a call of gradients_of() into its graph. The options are part of the key by which it finds
  // a graph again; the tensors are arguments.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    const BackwardOptions now = options_of_this_task();
    args.collect(now.normalized_ndim);
    args.collect(now.eps);
    args.collect(now.weight_offset);
    args.collect(now.is_rms_norm);
    args.collect(now.bias_dtype);
    args.collect(now.stats_grad);
    for (const bool is_wanted : {now.wants_x, now.wants_weight, now.wants_bias}) args.collect(is_wanted);
    for (const SavedVariable* saved : {&x, &weight, &stats}) args.collect(*saved, /*is_output=*/false);
  }

  variable_list apply_with_saved(const variable_list& grad_outputs,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    namespace compiled = torch::dynamo::autograd;
    for (SavedVariable* saved : {&x, &weight, &stats}) swap.before(*saved);
    const auto& python = compiled::getPyCompilerInterface();
    BackwardOptions now = options_of_this_task();
    now.is_operator = true;  // the tensors of a compiler are no memory
    const std::string function = python->bind_function(
        swap.get_py_compiler(), name(),
        [now](const variable_list& inputs, const std::vector<c10::IValue>& saved) {
          return gradients_of(inputs[0], saved[0].toTensor(), saved[1].toTensor(), saved[2].toTensor(), now);
        },
        std::vector<at::TypePtr>(3, at::TensorType::get()), /*is_custom_function=*/true, /*is_traceable=*/true);
    const c10::IValue metadata =
        compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            compiled::get_input_metadata(next_edges()));
    variable_list gradients = python->call_function(swap.get_py_compiler(), "apply_functional", function, grad_outputs,
                                                    {x.unpack(), weight.unpack(), stats.unpack()}, metadata);
    for (SavedVariable* saved : {&x, &weight, &stats}) swap.after(*saved);
    return gradients;
  }

 private:
  BackwardOptions options_of_this_task() const {
    BackwardOptions now = options;
    now.wants_x = task_should_compute_output(0);
    now.wants_weight = task_should_compute_output(1);
    now.wants_bias = task_should_compute_output(2);
    return now;
  }
};

// Nodes are held by std::shared_ptr in torch 2.11, by c10::intrusive_ptr in 2.13 and later. A template, so that only
// the branch that compiles is compiled.
template <class Node>
auto own(Node* node) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
    return c10::intrusive_ptr<Node>::unsafe_steal_from_new(node);
  } else {
    return std::shared_ptr<Node>(node, [](Node* owned) { deleteNode(owned); });
  }
}

bool wants_gradients(std::initializer_list<std::reference_wrapper<const Tensor>> inputs) {
  if (!c10::GradMode::is_enabled()) return false;
  for (const Tensor& input : inputs)
    if (input.defined() && input.requires_grad()) return true;
  return false;
}

// Makes y the result of a FusedNormBackward.
void record(Tensor& y, const Tensor& stats, const Tensor& x, const Tensor& weight, const Tensor& bias,
            int64_t normalized_ndim, const NormOptions& options, bool is_operator) {
  auto* node = new FusedNormBackward;
  const auto owner = own<torch::autograd::Node>(node);
  torch::autograd::edge_list edges;
  edges.reserve(3);
  for (const Tensor& input : {std::cref(x), std::cref(weight), std::cref(bias)})
    edges.push_back(input.defined() ? torch::autograd::impl::gradient_edge(input) : torch::autograd::Edge());
  node->set_next_edges(std::move(edges));
  node->x = SavedVariable(x, /*is_output=*/false);
  node->weight = SavedVariable(weight, /*is_output=*/false);
  node->stats = SavedVariable(stats, /*is_output=*/false);
  node->options.normalized_ndim = normalized_ndim;
  node->options.eps = options.eps;
  node->options.weight_offset = options.weight_offset;
  node->options.is_rms_norm = options.is_rms_norm;
  node->options.stats_grad = options.stats_grad;
  if (bias.defined()) node->options.bias_dtype = bias.scalar_type();
  node->options.is_operator = is_operator;
  torch::autograd::create_gradient_edge(y, owner);
}

}  // namespace

Tensor norm(const Tensor& x, const Tensor& weight, const Tensor& bias, const NormOptions& options) {
  std::optional<at::RecordFunction> profiled;
  if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION)) {
    profiled.emplace(std::move(*callbacks));
    profiled->before(options.is_rms_norm ? "fused_rms_norm" : "fused_layer_norm",
                     static_cast<int64_t>(at::sequence_number::peek()));  // of the node: profilers relate the two
  }

  const bool is_recorded = wants_gradients({x, weight, bias});
  auto [y, stats, unused] = norm_forward(x, weight, bias, options, /*save_stats=*/is_recorded);
  if (is_recorded) {
    const int64_t parameter_ndim = weight.defined() ? weight.dim() : (bias.defined() ? bias.dim() : 0);
    record(y, stats, x, weight, bias,
           options.normalized_shape ? static_cast<int64_t>(options.normalized_shape->size()) : parameter_ndim, options,
           /*is_operator=*/false);
  }
  return std::move(y);
}

NormOperatorResult norm_by_operator(const Tensor& x, const OptionalTensor& given_weight,
                                    const OptionalTensor& given_bias, int64_t normalized_ndim, double eps,
                                    double weight_offset, bool is_rms_norm, std::optional<at::ScalarType> out_dtype,
                                    bool stats_grad) {
  const Tensor weight = given_weight.value_or(Tensor()), bias = given_bias.value_or(Tensor());
  for (const Tensor& input : {std::cref(x), std::cref(weight), std::cref(bias)})
    TORCH_CHECK_NOT_IMPLEMENTED(!input.defined() || !input._fw_grad(/*level=*/0).defined(),
                                "torch.ops.fused_layernorm.norm_forward has no forward-mode derivative; call "
                                "fused_layernorm.fused_layer_norm or fused_rms_norm, which have one");
  auto [y, stats] = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_norm_forward(x, given_weight, given_bias, normalized_ndim, eps, weight_offset, is_rms_norm, out_dtype,
                             stats_grad);
  }();
  if (wants_gradients({x, weight, bias}))
    record(y, stats, x, weight, bias, normalized_ndim, {{}, eps, weight_offset, is_rms_norm, out_dtype, stats_grad},
           /*is_operator=*/true);
  return {std::move(y), std::move(stats)};
}

void name_node_in_python() {
  static PyTypeObject type;
  torch::autograd::_initFunctionPyTypeObject(type, "FusedNormBackward", nullptr, nullptr);
  torch::autograd::registerCppFunction(typeid(FusedNormBackward), &type);
}

void set_differentiable_backward(PyObject* function) {
  Py_INCREF(function);
  Py_XSETREF(differentiable_backward, function);
}

}  // namespace fused_layernorm
