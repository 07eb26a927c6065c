// How a Python call of norm() is read, by hand: through pybind11 a call without gradients takes half as long again. In
// Python's limited API, as the wheel's library (csrc/stable/python.cpp) reads it as well.
#pragma once

#include <Python.h>

#include <iterator>
#include <limits>
#include <vector>

#include "norm_call.h"

namespace fused_layernorm {
namespace {

using at::Tensor;

// ---- reading ---------------------------------------------------------------------------------------------------------
// Each read() returns false for an object of another type than expected, and may leave a Python error set.

// Of torch's objects: defined by the file that includes this one. A tensor (not of a subclass), or None; a dtype, or
// None.
bool read(PyObject* object, Tensor& tensor);
bool read(PyObject* object, OptionalDtype& dtype);

bool read(PyObject* object, double& number) {
  if (!PyFloat_Check(object) && (!PyLong_Check(object) || PyBool_Check(object))) return false;
  number = PyFloat_AsDouble(object);
  return !(number == -1.0 && PyErr_Occurred());
}

bool read(PyObject* object, int64_t& number) {
  if (!PyLong_Check(object) || PyBool_Check(object)) return false;
  number = PyLong_AsLongLong(object);
  return !(number == -1 && PyErr_Occurred());
}

bool read(PyObject* object, bool& flag) {
  flag = object == Py_True;
  return flag || object == Py_False;
}

bool read(PyObject* object, at::ScalarType& dtype) {
  OptionalDtype found;
  if (!read(object, found) || !found) return false;
  dtype = *found;
  return true;
}

struct Shape {
  at::DimVector sizes;
  bool is_given = false;
};

bool read(PyObject* object, Shape& shape) {
  if (object == Py_None) return true;
  shape.is_given = true;
  const auto append = [&](PyObject* size) {
    if (!PyLong_Check(size) || PyBool_Check(size)) return false;
    shape.sizes.push_back(PyLong_AsLongLong(size));
    return shape.sizes.back() != -1;  // -1 is no size, and marks an error
  };
  if (PyTuple_Check(object)) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(object); ++i)
      if (!append(PyTuple_GetItem(object, i))) return false;
    return true;
  }
  if (!PyList_Check(object)) return append(object);
  for (Py_ssize_t i = 0; i < PyList_Size(object); ++i)
    if (!append(PyList_GetItem(object, i))) return false;
  return true;
}

struct Name {  // an index of kActivationNames
  int64_t number = 0;
};

bool read(PyObject* object, Name& activation) {
  if (object == Py_None) return true;
  if (!PyUnicode_Check(object)) return false;
  for (size_t i = 0; i < std::size(kActivationNames); ++i) {
    activation.number = static_cast<int64_t>(i);
    if (PyUnicode_CompareWithASCIIString(object, kActivationNames[i]) == 0) return true;
  }
  return false;
}

struct Epsilon {
  double value = 0;
  bool is_given = false;
};

bool read(PyObject* object, Epsilon& eps) {
  if (object == Py_None) return true;
  eps.is_given = true;
  return read(object, eps.value);
}

struct Rounding {
  bool of_x_hat = false;
};

bool read(PyObject* object, Rounding& rounding) {
  if (!PyUnicode_Check(object)) return false;
  const auto is = [&](const char* name) { return PyUnicode_CompareWithASCIIString(object, name) == 0; };
  rounding.of_x_hat = is("llama");
  return rounding.of_x_hat || is("torch") || is("gemma");  // the fallback takes the others
}

// The arguments of norm(): five tensors by position, the options by keyword.
struct PythonCall {
  NormCall norm;
  Epsilon eps;
  Shape normalized_shape;
  Name activation;
  Rounding rounding;
  bool adds = false;          // returns (y, residual_out); dropout is of x
  bool is_modulated = false;  // weight and bias may have leading dimensions of x
  bool is_gated = false;      // gate and activation are those of a gated norm
  bool training = true, memory_efficient = false, accumulate_grad = false, return_dropout_mask = false;

  template <class Function>
  void for_each_option(Function&& function) {
    function("eps", eps);
    function("is_rms_norm", norm.is_rms_norm);
    function("normalized_shape", normalized_shape);
    function("weight_offset", norm.weight_offset);
    function("out_dtype", norm.out_dtype);
    function("stats_grad", norm.stats_grad);
    function("activation", activation);
    function("dropout_p", norm.dropout_p);
    function("training", training);
    function("memory_efficient", memory_efficient);
    function("accumulate_grad", accumulate_grad);
    function("rounding", rounding);
    function("adds", adds);
    function("residual_dtype", norm.residual_dtype);
    function("return_dropout_mask", return_dropout_mask);
    function("is_modulated", is_modulated);
    function("is_gated", is_gated);
    function("gates_y", norm.gates_y);
    function("adds_y", norm.adds_y);
  }

  bool read_from(PyObject* const* arguments, Py_ssize_t positional, PyObject* names) {
    Tensor* const tensors[] = {&norm.x, &norm.residual, &norm.gate, &norm.weight, &norm.bias};
    if (positional != static_cast<Py_ssize_t>(std::size(tensors))) return false;
    for (Py_ssize_t i = 0; i < positional; ++i)
      if (!read(arguments[i], *tensors[i])) return false;
    return norm.x.defined() && read_options(arguments + positional, names);
  }

  // Sets what follows from several arguments; false if the fallback must take the call. Only after takes_kernel().
  bool resolve() {
    const Tensor &x = norm.x, &weight = norm.weight, &bias = norm.bias;
    const at::ScalarType dtype = x.scalar_type();
    if (eps.is_given) {
      norm.eps = eps.value;
    } else if (norm.is_rms_norm) {
      norm.eps = accumulation_type(dtype) == at::kDouble ? std::numeric_limits<double>::epsilon()
                                                         : std::numeric_limits<float>::epsilon();
    } else {
      return false;
    }
    if (!adds && (norm.residual.defined() != norm.adds_y || norm.residual_dtype)) return false;
    if (norm.adds_y && (adds || activation.number != 0 || norm.dropout_p > 0)) return false;
    if (!adds && norm.gate.defined() != is_gated) return false;
    const Tensor& given = weight.defined() ? weight : bias;
    if (x.dim() == 0 || (!normalized_shape.is_given && !given.defined())) return false;
    const at::IntArrayRef shape = normalized_shape.is_given ? at::IntArrayRef(normalized_shape.sizes)
                                  : is_modulated            ? x.sizes().slice(x.dim() - 1)
                                                            : given.sizes();
    norm.normalized_ndim = static_cast<int64_t>(shape.size());
    if (shape.empty() || x.dim() < norm.normalized_ndim || x.sizes().slice(x.dim() - norm.normalized_ndim) != shape)
      return false;
    norm.per_head = !is_modulated && given.defined() && given.dim() > norm.normalized_ndim;
    for (const Tensor* parameter : std::initializer_list<const Tensor*>{&weight, &bias, &norm.gate}) {
      if (!parameter->defined() || (is_gated && parameter == &norm.gate)) continue;
      if (is_modulated || norm.per_head
              ? parameter->sizes() != given.sizes() || !segments_of(*parameter, x, norm.normalized_ndim, norm.per_head)
              : parameter->sizes() != shape)
        return false;
    }
    if (is_gated && norm.gate.sizes() != x.sizes()) return false;
    if (norm.per_head && (accumulate_grad || norm.dropout_p > 0 || (activation.number != 0 && !is_gated))) return false;
    if (!is_gated && activation.number == static_cast<int64_t>(Activation::kSigmoid)) return false;
    if (is_modulated && (!weight.defined() || !has_modulation_dtypes(dtype))) return false;
    norm.activation = activation.number;
    norm.drops_y = !adds;
    if (!training) norm.dropout_p = 0;
    if (adds && !norm.residual.defined() && !norm.residual_dtype) norm.residual_dtype = dtype;
    if (rounding.of_x_hat) {
      const at::ScalarType z_dtype = norm.z_dtype();
      const bool is_narrow = z_dtype == at::kHalf || z_dtype == at::kBFloat16;
      if (memory_efficient || is_gated || is_modulated || norm.adds_y || bias.defined()) return false;
      norm.rounds_x_hat = is_narrow;  // else it has no effect
    }
    if (memory_efficient) {
      if (adds || norm.adds_y || is_gated || norm.per_head || norm.activation != 0 || norm.dropout_p != 0 ||
          !norm.stats_grad || norm.out_dtype.value_or(dtype) != dtype)
        return false;
    }
    return !(norm.dropout_p < 0 || norm.dropout_p > 1);
  }

 private:
  // Callers pass the options in the order of for_each_option(), perhaps not all: one pass over both lists reads them.
  bool read_options(PyObject* const* values, PyObject* names) {
    static const std::vector<PyObject*> known = [] {
      std::vector<PyObject*> strings;
      PythonCall().for_each_option(
          [&](const char* name, auto&) { strings.push_back(PyUnicode_InternFromString(name)); });
      return strings;
    }();
    const Py_ssize_t count = names ? PyTuple_Size(names) : 0;
    Py_ssize_t at = 0;
    size_t option = 0;
    bool is_read = true;
    for_each_option([&](const char*, auto& value) {
      if (at < count && PyTuple_GetItem(names, at) == known[option]) is_read = is_read && read(values[at++], value);
      ++option;
    });
    return is_read && at == count;
  }

  // A modulation narrower than x is widened by the fallback.
  bool has_modulation_dtypes(at::ScalarType dtype) const {
    const auto is_taken = [&](const Tensor& parameter) {
      return !parameter.defined() || parameter.scalar_type() == dtype ||
             (parameter.scalar_type() == at::kFloat && dtype != at::kDouble);
    };
    return is_taken(norm.weight) && is_taken(norm.bias) && (!norm.gate.defined() || norm.gate.scalar_type() == dtype);
  }
};

}  // namespace
}  // namespace fused_layernorm
