// The autograd node of plain eager mode and of the operator. NormFunction in fused_layernorm/functional.py is the same
// in Python, for the exact roundings of transformers. A node in Python would be most of the host time of a small norm:
// on the CPU, 1x8, a step takes 0.76 of torch's time with this node, 1.25 with NormFunction.
#include "autograd.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fused_layernorm {

using at::Tensor;
using torch::autograd::variable_list;

// ---- what the kernels may take -------------------------------------------------------------------------------------

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

// The keys that a plain tensor may have. Subclasses, wrappers of transforms and tensors without memory have further
// keys.
constexpr DispatchKeySet kPlainCpu({DispatchKey::CPU, DispatchKey::AutogradCPU, DispatchKey::AutocastCPU,
                                    DispatchKey::ADInplaceOrView, DispatchKey::Negative, DispatchKey::ZeroTensor});
constexpr DispatchKeySet kPlainCuda({DispatchKey::CUDA, DispatchKey::AutogradCUDA, DispatchKey::AutocastCUDA});
// The keys that may be on around a plain call. Transforms, modes, tracers and functionalization have further keys.
constexpr DispatchKeySet kPlainCall = c10::default_included_set | c10::autocast_dispatch_keyset;

DispatchKeySet plain_tensor = kWithCuda ? kPlainCpu | kPlainCuda : kPlainCpu;

// The keys of torch.func's transforms, and of the tensors inside them. The operators have no rules for these.
constexpr DispatchKeySet kTransforms({DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper,
                                      DispatchKey::FuncTorchVmapMode, DispatchKey::FuncTorchDynamicLayerFrontMode,
                                      DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::BatchedNestedTensor});

bool is_within(DispatchKeySet keys, DispatchKeySet allowed) { return (keys.raw_repr() & ~allowed.raw_repr()) == 0; }

bool is_forward_ad_on() { return torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr; }

bool is_in_transform(TensorRefs tensors) {
  if (c10::impl::tls_local_dispatch_key_set().included_.has_any(kTransforms)) return true;
  for (const Tensor& tensor : tensors)
    if (tensor.defined() && tensor.key_set().has_any(kTransforms)) return true;
  return is_forward_ad_on();
}

}  // namespace

bool takes_kernel(TensorRefs tensors) {
  if (!is_within(c10::impl::tls_local_dispatch_key_set().included_, kPlainCall)) return false;
  for (const Tensor& tensor : tensors)
    if (tensor.defined() && !is_within(tensor.key_set(), plain_tensor)) return false;
  return !is_forward_ad_on();
}

void refuse_cuda_tensors() { plain_tensor = kPlainCpu; }

bool wants_gradients(const NormCall& call) {
  if (!c10::GradMode::is_enabled()) return false;
  for (const Tensor* input : {&call.x, &call.residual, &call.gate, &call.weight, &call.bias})
    if (input->defined() && input->requires_grad()) return true;
  return false;
}

// ---- gradients -------------------------------------------------------------------------------------------------------

namespace {

PyObject* reference_backward = nullptr;

NormGradients by_reference(const NormBackwardCall& call) {
  const py::gil_scoped_acquire gil;
  TORCH_INTERNAL_ASSERT(reference_backward);
  py::list arguments;
  NormBackwardCall::for_each(call, [&](const char*, const auto& field) {
    if constexpr (std::is_same_v<std::decay_t<decltype(field)>, Tensor>) {
      arguments.append(field.defined() ? py::cast(field) : py::none());
    } else {
      arguments.append(py::cast(field));
    }
  });
  const py::tuple found = py::handle(reference_backward)(*arguments);
  const auto tensor = [&](size_t i) { return found[i].is_none() ? Tensor() : found[i].cast<Tensor>(); };
  return {tensor(0), tensor(1), tensor(2), tensor(3), tensor(4)};
}

NormGradients by_operator(const NormBackwardCall& call) {
  static const c10::OperatorHandle op =
      c10::Dispatcher::singleton().findSchemaOrThrow("fused_layernorm::norm_backward", "");
  torch::jit::Stack stack = stack_of(call);
  op.callBoxed(stack);
  const auto tensor = [&](size_t i, bool is_wanted) { return is_wanted ? stack[i].toTensor() : Tensor(); };
  NormGradients found{tensor(0, call.wants_x), tensor(1, call.grad_residual_dtype.has_value()),
                      tensor(2, call.wants_gate), tensor(3, call.grad_weight_dtype.has_value()),
                      tensor(4, call.grad_bias_dtype.has_value())};
  if (shares_gradient(call)) found.residual = found.x;
  return found;
}

void only_first_derivatives(const char* option) {
  TORCH_CHECK(!c10::GradMode::is_enabled(), option,
              "=True has first derivatives only: call the norm without it under create_graph");
}

// Adds the gradients of weight and bias to their main_grad.
class Accumulation {
 public:
  // With the GIL. A parameter is undefined if its gradient is not wanted.
  Accumulation(NormBackwardCall& call, const Tensor& weight, const Tensor& bias) {
    is_one_parameter_ = weight.defined() && weight.is_same(bias);
    call.weight_sum = sum_of("weight", weight, sums_[0]);
    call.bias_sum = sum_of("bias", bias, sums_[1]);
  }
  void finish(NormGradients& gradients) {
    gradients.weight = finish(sums_[0]);
    gradients.bias = finish(sums_[1]);
  }

 private:
  struct Sum {
    // beside: what finish() adds to a main_grad that is not contiguous, or is that of both parameters
    Tensor parameter, main_grad, beside;
  };

  Tensor sum_of(const char* name, const Tensor& parameter, Sum& sum) {
    if (!parameter.defined()) return Tensor();
    sum.parameter = parameter;
    sum.main_grad = main_grad_of(parameter);
    TORCH_CHECK_VALUE(sum.main_grad.defined(), "accumulate_grad needs ", name, ".main_grad, a float32 tensor of ", name,
                      "'s shape");
    if (sum.main_grad.is_contiguous() && !is_one_parameter_) return sum.main_grad;
    sum.beside = at::zeros_like(sum.main_grad, at::MemoryFormat::Contiguous);
    return sum.beside;
  }
  static Tensor finish(Sum& sum) {
    if (!sum.parameter.defined()) return Tensor();
    if (sum.beside.defined()) sum.main_grad.add_(sum.beside);
    const py::gil_scoped_acquire gil;
    py::cast(sum.parameter).attr("grad_added_to_main_grad") = true;
    return at::zeros_like(sum.parameter);
  }

  std::array<Sum, 2> sums_;
  bool is_one_parameter_ = false;
};

}  // namespace

Tensor main_grad_of(const Tensor& parameter) {
  const py::object object = py::cast(parameter);
  if (!py::hasattr(object, "main_grad")) return Tensor();
  const py::object found = object.attr("main_grad");
  if (!THPVariable_Check(found.ptr())) return Tensor();
  Tensor main_grad = THPVariable_Unpack(found.ptr());
  return main_grad.scalar_type() == at::kFloat && main_grad.sizes() == parameter.sizes() ? main_grad : Tensor();
}

void set_reference_backward(PyObject* function) {
  Py_INCREF(function);
  Py_XSETREF(reference_backward, function);
}

// ---- the node --------------------------------------------------------------------------------------------------------

namespace {

// Nodes are held by std::shared_ptr in torch 2.11, by c10::intrusive_ptr in 2.13 and later. Templates, so that only the
// branch that compiles is compiled.
template <class Node>
auto own(Node* node) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
    return c10::intrusive_ptr<Node>::unsafe_steal_from_new(node);
  } else {
    return std::shared_ptr<Node>(node, [](Node* owned) { deleteNode(owned); });
  }
}

template <class Node>
auto pointer_to(Node* node) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
    return c10::intrusive_ptr<Node>::unsafe_reclaim_from_nonowning(node);
  } else {
    return node->getptr();
  }
}

constexpr const char* kNodeName = "FusedNormBackward";

// What a node saves besides tensors. In `call` the tensors are undefined, and every gradient has the dtype that it has
// if it is wanted.
struct NodeOptions {
  NormBackwardCall call;
  OptionalDtype added_dtype;          // of a residual that is added to y: its gradient is y's
  bool is_operator = false;           // forward was the operator: without takes_kernel(), so is backward
  std::array<Tensor, 2> accumulates;  // weight and bias, where backward adds their gradients to main_grad
};

struct NormNode final : torch::autograd::Node {
  static constexpr size_t kSaved = 7;
  using Tensors = std::array<Tensor, kSaved>;  // z, stats, x, gate, weight, bias, philox
  enum Edge { kX, kResidual, kGate, kWeight, kBias };

  std::array<torch::autograd::SavedVariable, kSaved> saved;
  NodeOptions options;

  std::string name() const override { return kNodeName; }

  variable_list apply(variable_list&& grad_outputs) override {
    const std::lock_guard<std::mutex> lock(mutex_);  // another thread may run backward through this node
    return gradients(wanted(), grad_outputs, unpacked());
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& variable : saved) variable.reset_data();
  }

  // Compiled autograd puts a call of gradients() into its graph. The options are part of its cache key; the tensors are
  // arguments of the graph.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    const NodeOptions now = wanted();
    NormBackwardCall::for_each(now.call, [&](const char*, const auto& field) {
      if constexpr (!std::is_same_v<std::decay_t<decltype(field)>, Tensor>) args.collect(field);
    });
    args.collect(now.added_dtype);
    for (const auto& variable : saved) args.collect(variable, /*is_output=*/true);  // makes no difference for an input
  }

  variable_list apply_with_saved(const variable_list& grad_outputs,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    namespace compiled = torch::dynamo::autograd;
    for (const Tensor& parameter : options.accumulates)
      TORCH_CHECK(!parameter.defined(), "accumulate_grad=True does not go with compiled autograd");
    for (auto& variable : saved) swap.before(variable);
    const auto& python = compiled::getPyCompilerInterface();
    NodeOptions now = wanted();
    now.is_operator = true;  // a compiler's tensors have no memory
    const std::string function = python->bind_function(
        swap.get_py_compiler(), name(),
        [now](const variable_list& inputs, const std::vector<c10::IValue>& values) {
          Tensors tensors;
          for (size_t i = 0; i < tensors.size(); ++i) tensors[i] = values[i].toTensor();
          return gradients(now, inputs, tensors);
        },
        std::vector<at::TypePtr>(kSaved, at::TensorType::get()), /*is_custom_function=*/true, /*is_traceable=*/true);
    const c10::IValue metadata =
        compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            compiled::get_input_metadata(next_edges()));
    const Tensors tensors = unpacked();
    variable_list found = python->call_function(swap.get_py_compiler(), "apply_functional", function, grad_outputs,
                                                std::vector<c10::IValue>(tensors.begin(), tensors.end()), metadata);
    for (auto& variable : saved) swap.after(variable);
    return found;
  }

 private:
  // One gradient per edge. grad_outputs: the gradient of y, and that of z if z is an output of the node.
  static variable_list gradients(NodeOptions now, const variable_list& grad_outputs, const Tensors& tensors) {
    NormBackwardCall& call = now.call;
    call.grad_output = grad_outputs[0];
    if (grad_outputs.size() > 1) call.grad_residual_out = grad_outputs[1];
    if (!call.grad_output.defined() && !call.grad_residual_out.defined()) return variable_list(5);
    std::tie(call.z, call.stats, call.x, call.gate, call.weight, call.bias, call.philox) = std::tuple_cat(tensors);
    NormGradients found = gradients(call, now);
    if (now.added_dtype) found.residual = call.grad_output.to(*now.added_dtype);  // perhaps no copy, as of x + y
    return {std::move(found.x), std::move(found.residual), std::move(found.gate), std::move(found.weight),
            std::move(found.bias)};
  }

  static NormGradients gradients(NormBackwardCall& call, const NodeOptions& now) {
    const TensorRefs tensors{call.grad_output, call.grad_residual_out, call.z, call.x, call.gate, call.weight,
                             call.bias};
    const bool accumulates = now.accumulates[0].defined() || now.accumulates[1].defined();
    if (call.z_is_y) only_first_derivatives("memory_efficient");
    if (accumulates) only_first_derivatives("accumulate_grad");
    // Also the reference if y was unused: a zero gradient times an infinite rstd is NaN
    const bool is_plain = call.grad_output.defined() && !c10::GradMode::is_enabled();
    if (is_plain && takes_kernel(tensors)) {
      if (!accumulates) return norm_backward(call);
      std::optional<Accumulation> accumulation;
      {
        const py::gil_scoped_acquire gil;
        accumulation.emplace(call, call.grad_weight_dtype ? now.accumulates[0] : Tensor(),
                             call.grad_bias_dtype ? now.accumulates[1] : Tensor());
      }
      NormGradients found = norm_backward(call);
      accumulation->finish(found);
      return found;
    }
    TORCH_CHECK(!accumulates || !call.grad_output.defined(),
                "accumulate_grad=True adds one gradient of weight and bias to main_grad: call the norm without it for "
                "a batch of gradients, or for tangents");
    if (is_plain && now.is_operator && !is_in_transform(tensors)) return by_operator(call);
    return by_reference(call);
  }

  Tensors unpacked() {
    Tensors tensors;
    for (size_t i = 0; i < tensors.size(); ++i) tensors[i] = saved[i].unpack(pointer_to<Node>(this));
    return tensors;
  }

  // The options, with the gradients that the current graph task needs.
  NodeOptions wanted() const {
    NodeOptions now = options;
    now.call.wants_x = task_should_compute_output(kX);
    now.call.wants_gate = task_should_compute_output(kGate);
    if (!task_should_compute_output(kResidual)) {
      now.call.grad_residual_dtype.reset();
      now.added_dtype.reset();
    }
    if (!task_should_compute_output(kWeight)) now.call.grad_weight_dtype.reset();
    if (!task_should_compute_output(kBias)) now.call.grad_bias_dtype.reset();
    return now;
  }
};

// Makes y, and z if it has a gradient, outputs of a new node.
void record(const NormCall& call, NormResults& results, bool z_is_y, bool accumulates, bool is_operator) {
  auto* node = new NormNode;
  const auto owner = own<torch::autograd::Node>(node);
  torch::autograd::edge_list edges;
  edges.reserve(5);
  for (const Tensor* input : {&call.x, &call.residual, &call.gate, &call.weight, &call.bias})
    edges.push_back(input->defined() ? torch::autograd::impl::gradient_edge(*input) : torch::autograd::Edge());
  node->set_next_edges(std::move(edges));
  torch::autograd::create_gradient_edge(results.y, owner);
  const auto requires_grad = [](const Tensor& input) { return input.defined() && input.requires_grad(); };
  const bool has_load_stage = call.has_load_stage();
  if (has_load_stage && (requires_grad(call.x) || requires_grad(call.residual) || requires_grad(call.gate)))
    torch::autograd::create_gradient_edge(results.z, owner);

  const Tensor& z = z_is_y ? results.y : has_load_stage ? results.z : call.x;
  const bool is_gated = call.is_gated();
  // per_head: without a weight, its gradient's shape is told by the bias alone
  const bool reads_bias = z_is_y || call.per_head || (is_gated ? call.gates_y : call.activation != 0);
  const Tensor none;
  const std::array<const Tensor*, NormNode::kSaved> tensors{
      &z,          &results.stats, call.gate.defined() && !is_gated ? &call.x : &none,
      &call.gate,  &call.weight,   reads_bias ? &call.bias : &none,
      &call.philox};
  for (size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i]->defined())
      node->saved[i] =
          torch::autograd::SavedVariable(*tensors[i], tensors[i]->is_same(results.y) || tensors[i]->is_same(results.z));

  NormBackwardCall& backward = node->options.call;
  static_cast<NormOptions&>(backward) = call;
  backward.z_is_y = z_is_y;
  backward.x_dtype = call.x.scalar_type();
  if (has_load_stage) backward.residual_dtype = call.z_dtype();
  const auto dtype_of = [](const Tensor& input) {
    return input.defined() ? OptionalDtype(input.scalar_type()) : std::nullopt;
  };
  (call.adds_y ? node->options.added_dtype : backward.grad_residual_dtype) = dtype_of(call.residual);
  backward.grad_weight_dtype = dtype_of(call.weight);
  backward.grad_bias_dtype = dtype_of(call.bias);
  node->options.is_operator = is_operator;
  if (accumulates) {
    if (requires_grad(call.weight)) node->options.accumulates[0] = call.weight;
    if (requires_grad(call.bias)) node->options.accumulates[1] = call.bias;
  }
}

// Shows a call of plain eager mode to profilers: it does not pass through the dispatcher.
class Profiled {
 public:
  explicit Profiled(const NormCall& call) {
    if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION)) {
      const char* name = call.adds_y             ? call.is_rms_norm ? "fused_rms_norm_add" : "fused_layer_norm_add"
                         : call.is_gated()       ? call.is_rms_norm ? "fused_gated_rms_norm" : "fused_gated_layer_norm"
                         : call.has_load_stage() ? call.is_rms_norm ? "fused_add_rms_norm" : "fused_add_layer_norm"
                         : call.is_rms_norm      ? "fused_rms_norm"
                                                 : "fused_layer_norm";
      range_.emplace(std::move(*callbacks));
      range_->before(name, static_cast<int64_t>(at::sequence_number::peek()));  // the node's: profilers match the two
    }
  }

 private:
  std::optional<at::RecordFunction> range_;
};

}  // namespace

NormResults norm(const NormCall& call, bool saves_y, bool accumulates) {
  const Profiled profiled(call);
  const bool is_recorded = wants_gradients(call);
  NormResults results = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;  // copies of inputs, where needed, have no node
    return norm_forward(call, /*save_stats=*/is_recorded);
  }();
  if (is_recorded) record(call, results, saves_y, accumulates, /*is_operator=*/false);
  return results;
}

void norm_forward_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const torch::jit::Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size()),
                                    stack->end());
  torch::jit::Stack copy = arguments;
  const NormCall call = call_from<NormCall>(copy);
  for (const Tensor* input : {&call.x, &call.residual, &call.gate, &call.weight, &call.bias})
    TORCH_CHECK_NOT_IMPLEMENTED(!input->defined() || !input->_fw_grad(/*level=*/0).defined(),
                                "torch.ops.fused_layernorm.norm_forward has no forward-mode derivative; the functions "
                                "of fused_layernorm have one");
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    op.callBoxed(stack);
  }
  if (!wants_gradients(call)) return;
  NormResults results;
  const size_t first = stack->size() - 3;
  results.y = (*stack)[first].toTensor();
  results.z = (*stack)[first + 1].toTensor();
  results.stats = (*stack)[first + 2].toTensor();
  record(call, results, /*z_is_y=*/false, /*accumulates=*/false, /*is_operator=*/true);
  (*stack)[first] = results.y;
  (*stack)[first + 1] = results.z;
}

void name_node() {
  static PyTypeObject type;
  torch::autograd::_initFunctionPyTypeObject(type, kNodeName, nullptr, nullptr);
  torch::autograd::registerCppFunction(typeid(NormNode), &type);
}

}  // namespace fused_layernorm
