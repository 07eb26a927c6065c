// The node that a norm leaves in the autograd graph, for plain eager mode and for the operators, and what of it is the
// same whatever the norm is fused with.
#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "autograd.h"

namespace fused_layernorm {

using torch::autograd::variable_list;

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

inline int64_t normalized_ndim_of(const at::Tensor& weight, const at::Tensor& bias, const NormOptions& options) {
  if (options.normalized_shape) return static_cast<int64_t>(options.normalized_shape->size());
  return weight.defined() ? weight.dim() : (bias.defined() ? bias.dim() : 0);
}

// Without what is wanted, which each backward asks anew.
inline BackwardOptions backward_options(int64_t normalized_ndim, const at::Tensor& bias, const NormOptions& options) {
  return {normalized_ndim,
          options.eps,
          options.weight_offset,
          options.is_rms_norm,
          bias.defined() ? std::optional(bias.scalar_type()) : std::nullopt,
          options.stats_grad};
}

// Whether each row has a weight, and so a bias, of its own, whose gradient is then that of y: no kernel writes it.
inline bool each_has_a_bias(const at::Tensor& weight, const at::Tensor& x, int64_t normalized_ndim) {
  return weight.defined() && weight.dim() > normalized_ndim && weight.numel() == x.numel();
}
inline at::Tensor gradient_of_each_bias(const at::Tensor& grad_output, const at::Tensor& weight, at::ScalarType dtype) {
  return grad_output.to(dtype).reshape(weight.sizes());
}

template <class Function>
void for_each_option(const BackwardOptions& options, Function&& function) {
  function(options.normalized_ndim);
  function(options.eps);
  function(options.weight_offset);
  function(options.is_rms_norm);
  function(options.bias_dtype);
  function(options.stats_grad);
  for (const bool is_wanted : {options.wants_x, options.wants_weight, options.wants_bias}) function(is_wanted);
}

// Backward is what a norm's backward is a function of, beside tensors:
//   kName               the node's name in Python and in profiles
//   kSaved              so many tensors are saved; Tensors is an array of these
//   wanted()            pointers to its flags that say which inputs want gradients, in the order of the node's edges
//   for_each(f)         calls f with each of its values, flags included
//   is_operator         tensors that the kernels cannot take go through an operator, as they did forward
//   gradients(g, saved) a gradient for each edge; g may have fewer tensors than the norm has results
template <class Backward>
struct FusedBackward final : torch::autograd::Node {
  std::array<torch::autograd::SavedVariable, Backward::kSaved> saved;
  Backward backward{};  // without what is wanted

  std::string name() const override { return Backward::kName; }

  variable_list apply(variable_list&& grad_outputs) override {
    const std::lock_guard<std::mutex> lock(mutex_);  // another thread may run backward through this node
    return backward_of_this_task().gradients(grad_outputs, unpacked());
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& variable : saved) variable.reset_data();
  }

  // Compiled autograd puts a call of gradients() into its graph. The values are part of the key by which it finds a
  // graph again; the tensors are arguments.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    backward_of_this_task().for_each([&](const auto& value) { args.collect(value); });
    for (const auto& variable : saved) args.collect(variable, /*is_output=*/true);  // of an input: the same
  }

  variable_list apply_with_saved(const variable_list& grad_outputs,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    namespace compiled = torch::dynamo::autograd;
    for (auto& variable : saved) swap.before(variable);
    const auto& python = compiled::getPyCompilerInterface();
    Backward now = backward_of_this_task();
    now.is_operator = true;  // the tensors of a compiler are no memory
    const std::string function = python->bind_function(
        swap.get_py_compiler(), name(),
        [now](const variable_list& inputs, const std::vector<c10::IValue>& values) {
          typename Backward::Tensors tensors;
          for (size_t i = 0; i < tensors.size(); ++i) tensors[i] = values[i].toTensor();
          return now.gradients(inputs, tensors);
        },
        std::vector<at::TypePtr>(Backward::kSaved, at::TensorType::get()), /*is_custom_function=*/true,
        /*is_traceable=*/true);
    const c10::IValue metadata =
        compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            compiled::get_input_metadata(next_edges()));
    const typename Backward::Tensors tensors = unpacked();
    variable_list gradients = python->call_function(swap.get_py_compiler(), "apply_functional", function, grad_outputs,
                                                    std::vector<c10::IValue>(tensors.begin(), tensors.end()), metadata);
    for (auto& variable : saved) swap.after(variable);
    return gradients;
  }

 private:
  typename Backward::Tensors unpacked() {
    typename Backward::Tensors tensors;
    for (size_t i = 0; i < tensors.size(); ++i) tensors[i] = saved[i].unpack(pointer_to<Node>(this));
    return tensors;
  }

  Backward backward_of_this_task() const {
    Backward now = backward;
    size_t edge = 0;
    for (bool* is_wanted : now.wanted()) *is_wanted = task_should_compute_output(edge++);
    return now;
  }
};

inline bool wants_gradients(TensorRefs inputs) {
  if (!c10::GradMode::is_enabled()) return false;
  for (const at::Tensor& input : inputs)
    if (input.defined() && input.requires_grad()) return true;
  return false;
}

// Makes `results` those of a node with an edge to each of `inputs`. What is saved may be one of them.
template <class Backward>
void record(std::initializer_list<std::reference_wrapper<at::Tensor>> results, TensorRefs inputs,
            const typename Backward::Tensors& saved, const Backward& backward) {
  auto* node = new FusedBackward<Backward>;
  const auto owner = own<torch::autograd::Node>(node);
  torch::autograd::edge_list edges;
  edges.reserve(inputs.size());
  for (const at::Tensor& input : inputs)
    edges.push_back(input.defined() ? torch::autograd::impl::gradient_edge(input) : torch::autograd::Edge());
  node->set_next_edges(std::move(edges));
  for (at::Tensor& result : results) torch::autograd::create_gradient_edge(result, owner);
  for (size_t i = 0; i < saved.size(); ++i) {
    bool is_result = false;
    for (const at::Tensor& result : results) is_result |= result.is_same(saved[i]);
    node->saved[i] = torch::autograd::SavedVariable(saved[i], is_result);
  }
  node->backward = backward;
}

// Once, with the GIL: makes type(y.grad_fn) say what it is.
template <class Backward>
void name_in_python() {
  static PyTypeObject type;
  torch::autograd::_initFunctionPyTypeObject(type, Backward::kName, nullptr, nullptr);
  torch::autograd::registerCppFunction(typeid(FusedBackward<Backward>), &type);
}

// A call of plain eager mode, which no dispatcher shows to profilers.
class Profiled {
 public:
  explicit Profiled(const char* name) {
    if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION)) {
      range_.emplace(std::move(*callbacks));
      range_->before(name, static_cast<int64_t>(at::sequence_number::peek()));  // of the node: profilers relate the two
    }
  }

 private:
  std::optional<at::RecordFunction> range_;
};

}  // namespace fused_layernorm
