// What Python sees: the two directions through pybind11, for NormFunction, and the call of plain eager mode, whose
// arguments are read by hand: through pybind11 a call without gradients takes half as long again.
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <iterator>
#include <limits>

#include "autograd.h"
#include "launch_plan.h"
#include "norm_params.h"

namespace fused_layernorm {
namespace {

using at::Tensor;
using OptionalShape = std::optional<std::vector<int64_t>>;

std::tuple<Tensor, Tensor> py_norm_forward(const Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias,
                                           const OptionalShape& normalized_shape, double eps, double weight_offset,
                                           bool is_rms_norm, std::optional<at::ScalarType> out_dtype, bool save_stats,
                                           bool stats_grad) {
  NormOptions options{{}, eps, weight_offset, is_rms_norm, out_dtype, stats_grad};
  if (normalized_shape) options.normalized_shape = at::IntArrayRef(*normalized_shape);
  NormResults found = norm_forward(x, weight.value_or(Tensor()), bias.value_or(Tensor()), options, save_stats);
  return {std::move(found.y), std::move(found.stats)};
}

std::tuple<Tensor, Tensor, Tensor> py_norm_backward(const Tensor& grad_output, const Tensor& x,
                                                    const OptionalTensor& weight, const Tensor& stats,
                                                    int64_t normalized_ndim, double weight_offset, bool is_rms_norm,
                                                    bool wants_x, bool wants_weight,
                                                    std::optional<at::ScalarType> bias_dtype, bool stats_grad,
                                                    const OptionalTensor& weight_sum, const OptionalTensor& bias_sum) {
  const NormGradients into{{}, weight_sum.value_or(Tensor()), bias_sum.value_or(Tensor()), {}};
  NormGradients found =
      norm_backward(grad_output, x, weight.value_or(Tensor()), stats, normalized_ndim, weight_offset, is_rms_norm,
                    wants_x, wants_weight, bias_dtype, stats_grad, nullptr, weight_sum || bias_sum ? &into : nullptr);
  return {std::move(found.x), std::move(found.weight), std::move(found.bias)};
}

// ---- plain eager mode ----------------------------------------------------------------------------------------------

struct WithoutGil {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

// A tensor (not of a subclass), or None where that is allowed. A copy: others may change the object without the GIL.
bool read(PyObject* object, Tensor& tensor, bool may_be_none) {
  if (object == Py_None) return may_be_none;
  if (!THPVariable_CheckExact(object)) return false;
  tensor = THPVariable_Unpack(object);
  return true;
}

bool read(PyObject* object, double& number) {
  if (!PyFloat_Check(object) && !PyLong_Check(object)) return false;
  number = PyFloat_AsDouble(object);
  return !(number == -1.0 && PyErr_Occurred());
}

bool read(PyObject* object, c10::SmallVector<int64_t, 4>& shape) {
  const auto append = [&](PyObject* size) {
    if (!PyLong_Check(size)) return false;
    shape.push_back(PyLong_AsLongLong(size));
    return shape.back() != -1;  // no size, and what an error returns
  };
  if (!PyTuple_Check(object) && !PyList_Check(object)) return append(object);
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i)
    if (!append(PySequence_Fast_GET_ITEM(object, i))) return false;
  return true;
}

bool read(PyObject* object, std::optional<at::ScalarType>& dtype) {
  if (object == Py_None) return true;
  if (!THPDtype_Check(object)) return false;
  dtype = reinterpret_cast<THPDtype*>(object)->scalar_type;
  return true;
}

// The arguments of py_norm, in their order, which py_add_norm's begin with.
struct Call {
  Tensor x, weight, bias;
  c10::SmallVector<int64_t, 4> shape;
  NormOptions options{};

  // False where an argument is of a type that is not expected; a Python error may then be set.
  bool read_from(PyObject* const* arguments) {
    if (!read(arguments[0], x, false) || !read(arguments[1], weight, true) || !read(arguments[2], bias, true))
      return false;
    if (arguments[3] != Py_None) {
      if (!read(arguments[3], shape)) return false;
      options.normalized_shape = shape;
    }
    options.is_rms_norm = arguments[6] == Py_True;
    if (arguments[4] == Py_None && options.is_rms_norm) {
      options.eps = accumulation_type(x.scalar_type()) == at::kDouble ? std::numeric_limits<double>::epsilon()
                                                                      : std::numeric_limits<float>::epsilon();
    } else if (!read(arguments[4], options.eps)) {
      return false;
    }
    if (!read(arguments[5], options.weight_offset)) return false;
    options.stats_grad = arguments[8] == Py_True;
    options.takes_segments = arguments[9] == Py_True;
    return (options.stats_grad || arguments[8] == Py_False) && read(arguments[7], options.out_dtype);
  }
};

// norm(x, weight, bias, normalized_shape, eps, weight_offset, is_rms_norm, out_dtype, stats_grad, takes_segments) -> y;
// NotImplemented where the kernels cannot take the tensors, or an argument is of a type that is not expected.
PyObject* py_norm(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 10, "norm takes 10 arguments");
  Call call;
  if (!call.read_from(arguments) || !takes_kernel({call.x, call.weight, call.bias})) {
    PyErr_Clear();
    Py_RETURN_NOTIMPLEMENTED;
  }
  Tensor y;
  {
    const WithoutGil without_gil;
    y = norm(call.x, call.weight, call.bias, call.options);
  }
  return THPVariable_Wrap(std::move(y));
  END_HANDLE_TH_ERRORS
}

// add_norm(<as norm>, residual, residual_dtype, philox, dropout_p) -> (y, residual_out), or NotImplemented, likewise.
PyObject* py_add_norm(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 14, "add_norm takes 14 arguments");
  Call call;
  AddOptions add{};
  if (!call.read_from(arguments) || !read(arguments[10], add.residual, true) ||
      !read(arguments[11], add.residual_dtype) || !read(arguments[12], add.philox, true) ||
      !read(arguments[13], add.dropout_p) || !takes_kernel({call.x, call.weight, call.bias, add.residual})) {
    PyErr_Clear();
    Py_RETURN_NOTIMPLEMENTED;
  }
  Tensor y, z;
  {
    const WithoutGil without_gil;
    std::tie(y, z) = add_norm(call.x, call.weight, call.bias, call.options, add);
  }
  return Py_BuildValue("(NN)", THPVariable_Wrap(std::move(y)), THPVariable_Wrap(std::move(z)));
  END_HANDLE_TH_ERRORS
}

// takes_kernel(x, weight, bias) -> bool; False for what is not a tensor, or of a subclass.
PyObject* py_takes_kernel(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 3, "takes_kernel takes 3 arguments");
  Tensor x, weight, bias;
  return PyBool_FromLong(read(arguments[0], x, false) && read(arguments[1], weight, true) &&
                         read(arguments[2], bias, true) && takes_kernel({x, weight, bias}));
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"norm", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(py_norm)), METH_FASTCALL, nullptr},
    {"add_norm", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(py_add_norm)), METH_FASTCALL, nullptr},
    {"takes_kernel", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(py_takes_kernel)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
}  // namespace fused_layernorm

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace fln = fused_layernorm;
  module.def("norm_forward", &fln::py_norm_forward, py::call_guard<py::gil_scoped_release>());
  module.def("norm_backward", &fln::py_norm_backward, py::call_guard<py::gil_scoped_release>(), py::arg("grad_output"),
             py::arg("x"), py::arg("weight"), py::arg("stats"), py::arg("normalized_ndim"), py::arg("weight_offset"),
             py::arg("is_rms_norm"), py::arg("wants_x"), py::arg("wants_weight"), py::arg("bias_dtype"),
             py::arg("stats_grad"), py::arg("weight_sum") = std::nullopt, py::arg("bias_sum") = std::nullopt);
  module.def(
      "backward_from_y",
      [](const at::Tensor& grad_output, const at::Tensor& y, const fln::OptionalTensor& weight,
         const fln::OptionalTensor& bias, const at::Tensor& stats, int64_t normalized_ndim, double weight_offset,
         bool is_rms_norm, bool wants_x, bool wants_weight, bool wants_bias) {
        auto found =
            fln::backward_from_y(grad_output, y, weight.value_or(at::Tensor()), bias.value_or(at::Tensor()), stats,
                                 normalized_ndim, weight_offset, is_rms_norm, wants_x, wants_weight, wants_bias);
        return std::make_tuple(std::move(found.x), std::move(found.weight), std::move(found.bias));
      },
      py::call_guard<py::gil_scoped_release>());
  module.def("set_differentiable_backward",
             [](py::function function) { fln::set_differentiable_backward(function.ptr()); });
  module.def("take_no_cuda_tensors", &fln::take_no_cuda_tensors);
  module.attr("max_segments") = fln::kMaxFusedSegments;
  module.attr("activations") =
      std::vector<std::string>(std::begin(fln::kActivationNames), std::end(fln::kActivationNames));
  if (PyModule_AddFunctions(module.ptr(), fln::methods) != 0) throw py::error_already_set();
  fln::name_norm_node();
  fln::name_add_norm_node();
}
