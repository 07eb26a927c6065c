// The operators torch.ops.fused_layernorm.* on torch's stable interface: one library for every torch from 2.11 on and
// every Python. It has no autograd node: fused_layernorm/functional.py registers autograd, and NormFunction is the
// node.
#include <exception>
#include <string>
#include <vector>

#include "torch/operators.h"

// Newer than torch 2.11: null in a torch that lacks them.
extern "C" {
__attribute__((weak)) int32_t torch_tag_pt2_compliant_tag();
__attribute__((weak)) AOTITorchError torch_library_def_with_tags(TorchLibraryHandle library, const char* schema,
                                                                 const int32_t* tags, int32_t count);
}

namespace fused_layernorm {
namespace {

using at::Tensor;
using at::stable::from_stack;

// ---- arguments and results on the stack ------------------------------------------------------------------------------

// An argument of an optional type is a pointer to its value, allocated for this call; null: none.
std::optional<StableIValue> take_optional(StableIValue slot) {
  const auto* value = from_stack<StableIValue*>(slot);
  if (!value) return std::nullopt;
  const StableIValue found = *value;
  delete value;
  return found;
}

Tensor take_tensor(StableIValue slot, bool is_required) {
  if (is_required) return Tensor(from_stack<AtenTensorHandle>(slot));
  const auto found = take_optional(slot);
  return found ? Tensor(from_stack<AtenTensorHandle>(*found)) : Tensor();
}

void take(StableIValue slot, at::ScalarType& dtype) { dtype = at::stable::type_of(from_stack<int32_t>(slot)); }
void take(StableIValue slot, OptionalDtype& dtype) {
  if (const auto found = take_optional(slot)) dtype = at::stable::type_of(from_stack<int32_t>(*found));
}
template <class T>
void take(StableIValue slot, T& value) {
  value = from_stack<T>(slot);
}

// Takes all arguments before anything may throw: what is taken is freed.
template <class Call>
void call_operator(StableIValue* stack, uint64_t, uint64_t) {
  Call call;
  const StableIValue* argument = stack;
  Call::for_each(call, [&](const char* name, auto& field) {
    if constexpr (std::is_same_v<std::decay_t<decltype(field)>, Tensor>) {
      field = take_tensor(*argument++, Operator<Call>::is_required(name));
    } else {
      take(*argument++, field);
    }
  });
  auto results = results_of(call);
  for (Tensor& result : results)
    if (!result.defined()) result = empty({0}, like_results(call).scalar_type(), like_results(call));
  for (const Tensor& result : results) *stack++ = result.share();
}

void call_dropout_mask(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor philox = take_tensor(stack[0], true);
  stack[0] =
      dropout_mask(philox, from_stack<int64_t>(stack[1]), from_stack<int64_t>(stack[2]), from_stack<double>(stack[3]))
          .share();
}

// ---- registration ----------------------------------------------------------------------------------------------------
// Not by the macros of torch/csrc/stable/library.h: these pass no tags to torch 2.11, and go on where the namespace is
// taken (by an extension of this package) with a handle that is not one.

struct Registration {
  std::vector<TorchLibraryHandle> libraries;

  Registration() {
    TorchLibraryHandle library = nullptr;
    if (aoti_torch_library_init_def("fused_layernorm", __FILE__, __LINE__, &library) != 0) return;
    libraries.push_back(library);
    define(schema_of<NormCall>());
    define(schema_of<NormBackwardCall>());
    define(kDropoutMaskSchema);
    define(schema_of<SandwichCall>());
    define(schema_of<NormQuantCall>());
    implement("CPU");
#ifdef FUSED_LAYERNORM_WITH_CUDA
    implement("CUDA");
    check(torch_library_impl(libraries.back(), "norm_quant", &call_operator<NormQuantCall>, TORCH_TARGET_VERSION));
#endif
  }
  ~Registration() {
    for (const TorchLibraryHandle library : libraries) aoti_torch_delete_library_object(library);
  }
  Registration(const Registration&) = delete;

 private:
  // In a static initializer, where an exception would end the process as well
  static void check(AOTITorchError error) {
    if (error != 0) std::terminate();
  }
  void define(const std::string& schema) const {
    if (torch_library_def_with_tags && torch_tag_pt2_compliant_tag) {
      const int32_t tag = torch_tag_pt2_compliant_tag();
      return check(torch_library_def_with_tags(libraries[0], schema.c_str(), &tag, 1));
    }
    check(aoti_torch_library_def(libraries[0], schema.c_str()));
  }
  void implement(const char* key) {
    TorchLibraryHandle library = nullptr;
    check(aoti_torch_library_init_impl("fused_layernorm", key, __FILE__, __LINE__, &library));
    libraries.push_back(library);
    check(torch_library_impl(library, "norm_forward", &call_operator<NormCall>, TORCH_TARGET_VERSION));
    check(torch_library_impl(library, "norm_backward", &call_operator<NormBackwardCall>, TORCH_TARGET_VERSION));
    check(torch_library_impl(library, "sandwich_norm", &call_operator<SandwichCall>, TORCH_TARGET_VERSION));
    check(torch_library_impl(library, "dropout_mask", &call_dropout_mask, TORCH_TARGET_VERSION));
  }
};

const Registration registration;

}  // namespace
}  // namespace fused_layernorm
