// The wheel's library as a Python module, in Python's limited API: the calls of plain eager mode and of Inductor's code
// from torch 2.14 on, which has the conversions between its Python tensors and its C interface. Before, and in a Python
// that does not load it, the operators of the same file are called.
//
// With gradients, norm() calls NormFunction.apply, which calls back here. A call that this file does not take goes to
// the fallback, as in csrc/torch/python.cpp.
#define Py_LIMITED_API 0x030a0000
#include "torch/operators.h"
#include "torch/python_call.h"

// Newer than torch 2.11: null in a torch that lacks them.
extern "C" {
__attribute__((weak)) AOTITorchError torch_tensor_from_pyobject(void* object, AtenTensorHandle* tensor);
__attribute__((weak)) AOTITorchError torch_tensor_to_pyobject(AtenTensorHandle tensor, void* type, void** object);
}

namespace fused_layernorm {
namespace {

// What Python hands over once, in setup(); never released.
struct Callbacks {
  PyObject *tensor, *parameter;  // torch.Tensor, torch.nn.Parameter
  PyObject* is_neg;              // torch.Tensor.is_neg
  PyObject* is_plain_eager;      // whether nothing is on that must see a call: a mode, a transform, a tracer
  PyObject* record;              // NormFunction's call: (x, residual, gate, weight, bias, options) -> (y, z)
  PyObject* fallback;            // functional._norm
  PyObject* operators;           // by name
  PyObject* dtypes;              // torch's, in the order of kDtypes
  PyObject* takes_cuda;          // False: CUDA tensors are the fallback's
};
Callbacks python{};
constexpr at::ScalarType kDtypes[] = {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};

PyObject* none() {
  Py_INCREF(Py_None);
  return Py_None;
}

// A reference that is given back.
struct Owned {
  PyObject* object;

  explicit Owned(PyObject* object) : object(object) {}
  ~Owned() { Py_XDECREF(object); }
  Owned(const Owned&) = delete;
  explicit operator bool() const { return object != nullptr; }
};

bool is_true(PyObject* result) {  // takes the reference
  const Owned owned(result);
  return owned.object == Py_True;
}

// False for tensors that the kernels do not read as they are: of another device, with the negative bit, zeros without
// memory, nested.
bool read(PyObject* object, Tensor& tensor) {
  static PyObject* const is_nested = PyUnicode_InternFromString("is_nested");
  if (object == Py_None) return true;
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (type != python.tensor && type != python.parameter) return false;
  if (is_true(PyObject_GetAttr(object, is_nested)) ||
      is_true(PyObject_CallFunctionObjArgs(python.is_neg, object, nullptr)))
    return false;
  AtenTensorHandle handle = nullptr;
  if (torch_tensor_from_pyobject(object, &handle) != 0) return false;
  tensor = Tensor(handle);
  const bool is_here = tensor.is_cpu() || (tensor.is_cuda() && python.takes_cuda == Py_True);
  return is_here && tensor.is_dense() && has_memory(tensor);
}

bool read(PyObject* object, OptionalDtype& dtype) {
  if (object == Py_None) return true;
  for (size_t i = 0; i < std::size(kDtypes); ++i)
    if (object == PyTuple_GetItem(python.dtypes, static_cast<Py_ssize_t>(i))) dtype = kDtypes[i];
  return dtype.has_value();
}

PyObject* to_python(const Tensor& tensor) {
  if (!tensor.defined()) return none();
  void* object = nullptr;
  if (torch_tensor_to_pyobject(tensor.handle(), nullptr, &object) == 0) return static_cast<PyObject*>(object);
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "torch made no Python tensor");
  return nullptr;
}
PyObject* to_python(int64_t value) { return PyLong_FromLongLong(value); }
PyObject* to_python(double value) { return PyFloat_FromDouble(value); }
PyObject* to_python(bool value) { return PyBool_FromLong(value); }
PyObject* to_python(const OptionalDtype& dtype) {
  for (size_t i = 0; i < std::size(kDtypes); ++i) {
    if (dtype != kDtypes[i]) continue;
    PyObject* found = PyTuple_GetItem(python.dtypes, static_cast<Py_ssize_t>(i));
    Py_INCREF(found);
    return found;
  }
  return none();
}

// Calls f() without the GIL; false with a Python error where it throws.
template <class Function>
bool without_gil(Function&& f) {
  std::string mistake;
  PyThreadState* const state = PyEval_SaveThread();
  try {
    f();
  } catch (const std::exception& error) {
    mistake = error.what();
    if (mistake.empty()) mistake = "an error without a message";
  }
  PyEval_RestoreThread(state);
  if (mistake.empty()) return true;
  PyErr_SetString(PyExc_RuntimeError, mistake.c_str());
  return false;
}

bool is_plain_eager() { return is_true(PyObject_CallFunctionObjArgs(python.is_plain_eager, nullptr)); }

bool wants_gradients(PyObject* const* arguments) {
  static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
  if (!aoti_torch_grad_mode_is_enabled()) return false;
  for (int i = 0; i < 5; ++i)
    if (arguments[i] != Py_None && is_true(PyObject_GetAttr(arguments[i], requires_grad))) return true;
  return false;
}

// NormFunction's call, with the options as a tuple.
PyObject* record(PyObject* const* arguments, NormCall& call) {
  if (call.has_load_stage()) call.residual_dtype = call.z_dtype();
  Py_ssize_t count = 0;
  NormOptions::for_each_option(call, [&](const char*, const auto&) { ++count; });
  const Owned options(PyTuple_New(count));
  Py_ssize_t at = 0;
  bool is_made = static_cast<bool>(options);
  NormOptions::for_each_option(call, [&](const char*, const auto& value) {
    PyObject* object = is_made ? to_python(value) : nullptr;
    is_made = object != nullptr && PyTuple_SetItem(options.object, at++, object) == 0;
  });
  if (!is_made) return nullptr;
  return PyObject_CallFunctionObjArgs(python.record, arguments[0], arguments[1], arguments[2], arguments[3],
                                      arguments[4], options.object, nullptr);
}

// norm(x, residual, gate, weight, bias, **options), or NotImplemented. Mistakes are NotImplemented too: the fallback
// names them.
PyObject* try_norm(PyObject*, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  const auto not_taken = [] {
    PyErr_Clear();
    Py_INCREF(Py_NotImplemented);
    return Py_NotImplemented;
  };
  PythonCall call;
  try {
    if (!call.read_from(arguments, count, names) || !is_plain_eager() || !call.resolve()) return not_taken();
  } catch (const std::exception&) {  // a tensor without memory
    return not_taken();
  }
  NormCall& norm_call = call.norm;
  if (call.memory_efficient || call.accumulate_grad || norm_call.dropout_p > 0 || call.return_dropout_mask)
    return not_taken();
  if (wants_gradients(arguments)) {
    PyObject* const found = record(arguments, norm_call);
    if (!found || call.adds) return found;
    const Owned results(found);
    PyObject* y = PyTuple_GetItem(found, 0);
    Py_XINCREF(y);
    return y;
  }
  NormResults results;
  if (!without_gil([&] { results = norm_forward(norm_call, /*save_stats=*/false); })) return not_taken();
  PyObject* y = to_python(results.y);
  if (!y || !call.adds) return y;
  const Owned owned(y), z(to_python(results.z));
  return z ? PyTuple_Pack(2, owned.object, z.object) : nullptr;
}

// The arguments as a tuple.
PyObject* tuple_of(PyObject* const* arguments, Py_ssize_t count) {
  PyObject* const found = PyTuple_New(count);
  for (Py_ssize_t i = 0; found && i < count; ++i) {
    Py_INCREF(arguments[i]);
    PyTuple_SetItem(found, i, arguments[i]);
  }
  return found;
}

PyObject* norm(PyObject* self, PyObject* const* arguments, Py_ssize_t count, PyObject* names) {
  PyObject* found = try_norm(self, arguments, count, names);
  if (found != Py_NotImplemented) return found;
  Py_DECREF(found);
  const Owned positional(tuple_of(arguments, count)), keywords(PyDict_New());
  if (!positional || !keywords) return nullptr;
  for (Py_ssize_t i = 0; names && i < PyTuple_Size(names); ++i)
    if (PyDict_SetItem(keywords.object, PyTuple_GetItem(names, i), arguments[count + i]) != 0) return nullptr;
  return PyObject_Call(python.fallback, positional.object, keywords.object);
}

// takes_kernel(*tensors) -> bool. None is ignored; subclasses and other objects are False.
PyObject* takes_kernel(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  bool takes = is_plain_eager();
  try {
    for (Py_ssize_t i = 0; i < count && takes; ++i) {
      Tensor tensor;
      takes = read(arguments[i], tensor);
    }
  } catch (const std::exception&) {
    takes = false;
  }
  PyErr_Clear();
  return PyBool_FromLong(takes);
}

// call_operator() of csrc/torch/python.cpp: the operator with these arguments, past the dispatcher where nothing must
// see it, and a number whose bits say which results are read.
template <class Call>
PyObject* call_operator(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  Call call;
  Py_ssize_t at = 0;
  int64_t used = 0;
  bool is_read = is_plain_eager();
  try {
    Call::for_each(call, [&](const char*, auto& field) {
      is_read = is_read && at < count && read(arguments[at], field);
      ++at;
    });
  } catch (const std::exception&) {
    is_read = false;
  }
  if (!is_read || at + 1 != count || !read(arguments[at], used)) {
    PyErr_Clear();
    const Owned given(tuple_of(arguments, count - 1));
    PyObject* const op = PyDict_GetItemString(python.operators, Operator<Call>::kName);
    return given ? PyObject_Call(op, given.object, nullptr) : nullptr;
  }
  decltype(results_of(call)) results;
  const bool is_done = without_gil([&] {
    if constexpr (std::is_same_v<Call, NormCall>) {
      results = results_of(call, (used & 4) != 0, (used & 2) != 0);
    } else {
      results = results_of(call);
    }
    for (size_t i = 0; i < results.size(); ++i)
      if (!results[i].defined() && (used >> i & 1) != 0)
        results[i] = empty({0}, like_results(call).scalar_type(), like_results(call));
  });
  if (!is_done) return nullptr;
  const Owned found(PyTuple_New(static_cast<Py_ssize_t>(results.size())));
  for (size_t i = 0; found && i < results.size(); ++i) {
    PyObject* const result = to_python(results[i]);
    if (!result || PyTuple_SetItem(found.object, static_cast<Py_ssize_t>(i), result) != 0) return nullptr;
  }
  Py_XINCREF(found.object);
  return found.object;
}

// setup(): the fields of Callbacks, in their order.
PyObject* setup(PyObject*, PyObject* arguments) {
  Callbacks given{};
  if (!PyArg_ParseTuple(arguments, "OOOOOOOOO", &given.tensor, &given.parameter, &given.is_neg, &given.is_plain_eager,
                        &given.record, &given.fallback, &given.operators, &given.dtypes, &given.takes_cuda))
    return nullptr;
  if (!torch_tensor_from_pyobject || !torch_tensor_to_pyobject) {
    PyErr_SetString(PyExc_ImportError, "this torch has no conversions for tensors of Python");
    return nullptr;
  }
  Py_INCREF(arguments);  // holds them all
  python = given;
  return none();
}

template <class Function>
PyCFunction as_method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef methods[] = {
    {"norm", as_method(norm), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"try_norm", as_method(try_norm), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"takes_kernel", as_method(takes_kernel), METH_FASTCALL, nullptr},
    {"call_norm_forward", as_method(call_operator<NormCall>), METH_FASTCALL, nullptr},
    {"call_norm_backward", as_method(call_operator<NormBackwardCall>), METH_FASTCALL, nullptr},
    {"call_sandwich_norm", as_method(call_operator<SandwichCall>), METH_FASTCALL, nullptr},
    {"setup", setup, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "libfused_layernorm", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace fused_layernorm

extern "C" __attribute__((visibility("default"))) PyObject* PyInit_libfused_layernorm() {
  return PyModule_Create(&fused_layernorm::module);
}
