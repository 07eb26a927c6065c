// The Python module: the call of plain eager mode, and the callbacks that fused_layernorm/_ops.py sets.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <iterator>
#include <limits>

#include "autograd.h"
#include "memory_efficient.h"
#include "norm_params.h"
#include "operators.h"
#include "python_call.h"

namespace fused_layernorm {
namespace {

PyObject* fallback = nullptr;  // functional._norm, for calls that norm() does not take

// A copy: others may change the object without the GIL.
bool read(PyObject* object, Tensor& tensor) {
  if (object == Py_None) return true;
  if (!THPVariable_CheckExact(object)) return false;
  tensor = THPVariable_Unpack(object);
  return true;
}

bool read(PyObject* object, OptionalDtype& dtype) {
  if (object == Py_None) return true;
  if (!THPDtype_Check(object)) return false;
  dtype = reinterpret_cast<THPDtype*>(object)->scalar_type;
  return true;
}

// ---- calling ---------------------------------------------------------------------------------------------------------

Tensor draw_philox(const Tensor& x) {
  return at::randint(std::numeric_limits<int64_t>::max(), {2}, at::TensorOptions().dtype(at::kLong).device(x.device()));
}

Tensor mask_of(const NormCall& call) {
  if (!call.philox.defined()) return at::ones(call.x.sizes(), call.x.options().dtype(at::kBool));
  int64_t hidden_size = 1;
  for (const int64_t size : call.x.sizes().slice(call.x.dim() - call.normalized_ndim)) hidden_size *= size;
  const int64_t rows = hidden_size > 0 ? call.x.numel() / hidden_size : 0;
  return dropout_mask(call.philox, rows, hidden_size, call.dropout_p).view(call.x.sizes());
}

// norm(x, residual, gate, weight, bias, **options), or NotImplemented if the kernels cannot take the tensors, or an
// argument has another type or value than expected.
PyObject* try_norm(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  HANDLE_TH_ERRORS
  PythonCall call;
  NormCall& norm_call = call.norm;
  if (!call.read_from(arguments, count, names) ||
      !takes_kernel({norm_call.x, norm_call.residual, norm_call.gate, norm_call.weight, norm_call.bias}) ||
      !call.resolve()) {
    PyErr_Clear();
    Py_RETURN_NOTIMPLEMENTED;
  }
  const bool is_recorded = wants_gradients(norm_call);
  if (call.accumulate_grad && is_recorded)
    for (const Tensor* parameter : {&norm_call.weight, &norm_call.bias})
      if (parameter->defined() && parameter->requires_grad() && !main_grad_of(*parameter).defined())
        Py_RETURN_NOTIMPLEMENTED;
  NormResults results;
  Tensor mask;
  {
    const py::gil_scoped_release without_gil;
    if (norm_call.dropout_p > 0) {
      check(norm_call);
      norm_call.philox = draw_philox(norm_call.x);
    }
    const bool saves_y = call.memory_efficient && is_recorded && y_tells_x(norm_call);
    results = norm(norm_call, saves_y, call.accumulate_grad && is_recorded);
    if (call.return_dropout_mask) mask = mask_of(norm_call);
  }
  PyObject* y = THPVariable_Wrap(std::move(results.y));
  if (!call.adds) return y;
  PyObject* z = THPVariable_Wrap(std::move(results.z));
  return call.return_dropout_mask ? Py_BuildValue("(NNN)", y, z, THPVariable_Wrap(std::move(mask)))
                                  : Py_BuildValue("(NN)", y, z);
  END_HANDLE_TH_ERRORS
}

// The same, with the fallback's result instead of NotImplemented.
PyObject* norm_or_fallback(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  PyObject* found = try_norm(self, arguments, count, names);
  if (found != Py_NotImplemented || !fallback) return found;
  Py_DECREF(found);
  return PyObject_Vectorcall(fallback, arguments, count, names);
}

// takes_kernel(*tensors) -> bool. None is ignored; subclasses and other objects are False.
PyObject* py_takes_kernel(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  for (Py_ssize_t i = 0; i < count; ++i) {
    Tensor tensor;
    if (!read(arguments[i], tensor) || !takes_kernel({tensor})) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// call_norm_forward(*arguments, used) -> tuple, and so for other operators: the operator with these arguments, past the
// dispatcher and autograd, for the code that Inductor generates. Bit i of `used`: result i is read. The others may be
// None, statistics that are not read are not computed, and on CUDA an unread z is not stored.
template <class Call>
PyObject* call_operator(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Call call;
  Py_ssize_t at = 0;
  int64_t used = 0;
  bool is_read = true, is_plain = true;
  Call::for_each(call, [&](const char*, auto& field) {
    is_read = is_read && at < count;
    if (!is_read) return;
    PyObject* object = arguments[at++];
    if constexpr (std::is_same_v<std::decay_t<decltype(field)>, Tensor>) {
      if (object == Py_None) return;
      is_read = THPVariable_Check(object);  // a subclass, too: takes_kernel() asks what it overrides
      if (is_read) field = THPVariable_Unpack(object);
      is_plain = is_plain && takes_kernel({field});
    } else {
      is_read = read(object, field);
    }
  });
  TORCH_CHECK_TYPE(is_read && at + 1 == count && read(arguments[at], used),
                   "expected the operator's arguments and a number whose bits say which results are read");
  decltype(results_of(call)) results;
  {
    const py::gil_scoped_release without_gil;
    if (is_plain) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      if constexpr (std::is_same_v<Call, NormCall>) {
        results = results_of(call, (used & 4) != 0, (used & 2) != 0);
      } else {
        results = results_of(call);
      }
    } else {
      static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(
          (std::string("fused_layernorm::") + Operator<Call>::kName).c_str(), "");
      torch::jit::Stack stack = stack_of(call);
      op.callBoxed(stack);
      for (size_t i = 0; i < results.size(); ++i) results[i] = stack[i].toTensor();
    }
  }
  py::tuple found(results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i].defined() && (used >> i & 1) != 0) results[i] = at::empty({0}, like_results(call).options());
    found[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(results[i])));
  }
  return found.release().ptr();
  END_HANDLE_TH_ERRORS
}

template <class Function>
PyCFunction as_method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef methods[] = {
    {"norm", as_method(norm_or_fallback), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"try_norm", as_method(try_norm), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"call_norm_forward", as_method(call_operator<NormCall>), METH_FASTCALL, nullptr},
    {"call_norm_backward", as_method(call_operator<NormBackwardCall>), METH_FASTCALL, nullptr},
    {"call_sandwich_norm", as_method(call_operator<SandwichCall>), METH_FASTCALL, nullptr},
    {"takes_kernel", as_method(py_takes_kernel), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

std::vector<std::string> field_names(const NormOptions& options) {
  std::vector<std::string> names;
  NormOptions::for_each_option(options, [&](const char* name, const auto&) { names.emplace_back(name); });
  return names;
}

}  // namespace
}  // namespace fused_layernorm

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace fln = fused_layernorm;
  if (PyModule_AddFunctions(module.ptr(), fln::methods) != 0) throw py::error_already_set();
  // fallback: called as norm(); reference_backward: as the operator norm_backward; watch_optimizers: without arguments
  module.def("set_callbacks",
             [](py::function fallback, py::function reference_backward, py::function watch_optimizers) {
               Py_XSETREF(fln::fallback, fallback.release().ptr());
               fln::set_reference_backward(reference_backward.ptr());
               fln::set_watch_optimizers(watch_optimizers.ptr());
             });
  // Whether a memory_efficient call saves y, for tests
  module.def("y_tells_x", [](const at::Tensor& x, const std::optional<at::Tensor>& weight,
                             const std::optional<at::Tensor>& bias, double weight_offset) {
    fln::NormCall call;
    call.x = x;
    call.weight = weight.value_or(at::Tensor());
    call.bias = bias.value_or(at::Tensor());
    call.weight_offset = weight_offset;
    return fln::y_tells_x(call);
  });
  module.def("count_optimizer_step", &fln::count_optimizer_step);
  module.def("refuse_cuda_tensors", &fln::refuse_cuda_tensors);
  module.attr("option_names") = fln::field_names({});
  module.attr("activations") =
      std::vector<std::string>(std::begin(fln::kActivationNames), std::end(fln::kActivationNames));
  fln::name_node();
}
