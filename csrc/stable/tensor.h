// The part of at::Tensor that csrc/torch/tensor.h promises, on torch's stable C interface (torch 2.11). Included there.
//
// A Tensor owns one handle and reads its properties once. The dispatcher resolves the negative bit and tensors of zeros
// before it calls an operator of the library, so that neither is seen here.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "norm_params.h"

#define TORCH_CHECK(condition, message)                  \
  do {                                                   \
    if (!(condition)) throw std::runtime_error(message); \
  } while (0)
#define TORCH_CHECK_TYPE TORCH_CHECK  // the C interface hands every exception on as a RuntimeError
#define TORCH_CHECK_VALUE TORCH_CHECK

extern "C" {
// Of libtorch_cuda, and so null in a torch without CUDA.
__attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
// Null before torch 2.13, which prints the message.
__attribute__((weak)) const char* torch_exception_get_what_without_backtrace();
}

namespace at {

using ScalarType = torch::headeronly::ScalarType;
constexpr ScalarType kHalf = ScalarType::Half, kBFloat16 = ScalarType::BFloat16, kFloat = ScalarType::Float,
                     kDouble = ScalarType::Double, kLong = ScalarType::Long, kByte = ScalarType::Byte,
                     kBool = ScalarType::Bool, kChar = ScalarType::Char, kFloat8_e4m3fn = ScalarType::Float8_e4m3fn,
                     kFloat8_e5m2 = ScalarType::Float8_e5m2;

namespace stable {

inline void check(AOTITorchError error, const char* what) {
  if (error == 0) return;
  const char* why = torch_exception_get_what_without_backtrace ? torch_exception_get_what_without_backtrace() : nullptr;
  throw std::runtime_error(why ? why : std::string("torch could not do this: ") + what);
}

// torch's number of a dtype, and back; other dtypes than these are Undefined.
struct DtypeNumber {
  ScalarType type;
  int32_t number;
  const char* name;
};
inline const std::vector<DtypeNumber>& dtype_numbers() {
  static const std::vector<DtypeNumber> numbers{
      {kHalf, aoti_torch_dtype_float16(), "torch.float16"},
      {kBFloat16, aoti_torch_dtype_bfloat16(), "torch.bfloat16"},
      {kFloat, aoti_torch_dtype_float32(), "torch.float32"},
      {kDouble, aoti_torch_dtype_float64(), "torch.float64"},
      {kLong, aoti_torch_dtype_int64(), "torch.int64"},
      {kByte, aoti_torch_dtype_uint8(), "torch.uint8"},
      {kBool, aoti_torch_dtype_bool(), "torch.bool"},
      {kChar, aoti_torch_dtype_int8(), "torch.int8"},
      {kFloat8_e4m3fn, aoti_torch_dtype_float8_e4m3fn(), "torch.float8_e4m3fn"},
      {kFloat8_e5m2, aoti_torch_dtype_float8_e5m2(), "torch.float8_e5m2"}};
  return numbers;
}
inline int32_t number_of(ScalarType type) {
  for (const DtypeNumber& known : dtype_numbers())
    if (known.type == type) return known.number;
  throw std::runtime_error("a dtype that norms do not use");
}
inline ScalarType type_of(int32_t number) {
  for (const DtypeNumber& known : dtype_numbers())
    if (known.number == number) return known.type;
  return ScalarType::Undefined;
}

// A value on the dispatcher's stack: 64 bits, of which a smaller value takes the first bytes.
template <class T>
StableIValue to_stack(T value) {
  static_assert(sizeof(T) <= sizeof(StableIValue));
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<uintptr_t>(value);
  } else {
    StableIValue slot = 0;
    std::memcpy(&slot, &value, sizeof(value));
    return slot;
  }
}
template <class T>
T from_stack(StableIValue slot) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(static_cast<uintptr_t>(slot));  // NOLINT(performance-no-int-to-ptr)
  } else {
    T value;
    std::memcpy(&value, &slot, sizeof(value));
    return value;
  }
}

}  // namespace stable

struct Device {
  int32_t type = 0, index = -1;

  bool operator==(const Device& other) const { return type == other.type && index == other.index; }
  bool is_cpu() const { return type == aoti_torch_device_type_cpu(); }
  bool is_cuda() const { return type == aoti_torch_device_type_cuda(); }
  std::string str() const {
    if (is_cpu()) return "cpu";
    return is_cuda() ? "cuda:" + std::to_string(index) : "another device";
  }
};

// Sizes that somebody else owns.
class IntArrayRef {
 public:
  IntArrayRef(const int64_t* data, size_t count) : data_(data), count_(count) {}
  IntArrayRef(const std::vector<int64_t>& sizes) : data_(sizes.data()), count_(sizes.size()) {}
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winit-list-lifetime"  // for arguments, whose list lives as long as the call
  IntArrayRef(const std::initializer_list<int64_t>& sizes) : data_(sizes.begin()), count_(sizes.size()) {}
#pragma GCC diagnostic pop

  const int64_t* begin() const { return data_; }
  const int64_t* end() const { return data_ + count_; }
  size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }
  IntArrayRef slice(int64_t first) const { return {data_ + first, count_ - static_cast<size_t>(first)}; }
  bool operator==(const IntArrayRef& other) const { return std::equal(begin(), end(), other.begin(), other.end()); }
  bool operator!=(const IntArrayRef& other) const { return !(*this == other); }

 private:
  const int64_t* data_;
  size_t count_;
};

using DimVector = std::vector<int64_t>;

class Tensor {
 public:
  Tensor() = default;
  // Owns the handle from now on.
  explicit Tensor(AtenTensorHandle handle) : impl_(std::make_shared<Impl>(handle)) {}

  bool defined() const { return impl_ != nullptr; }
  void reset() { impl_.reset(); }
  int64_t dim() const { return impl_->dim; }
  int64_t numel() const { return impl_->numel; }
  IntArrayRef sizes() const { return {impl_->sizes, static_cast<size_t>(impl_->dim)}; }
  int64_t size(int64_t dim) const { return impl_->sizes[dim]; }
  int64_t stride(int64_t dim) const { return impl_->strides[dim]; }
  ScalarType scalar_type() const { return impl_->dtype; }
  size_t element_size() const { return aoti_torch_dtype_element_size(impl_->dtype_number); }
  Device device() const { return impl_->device; }
  int32_t get_device() const { return impl_->device.index; }
  bool is_cpu() const { return impl_->device.is_cpu(); }
  bool is_cuda() const { return impl_->device.is_cuda(); }
  bool is_dense() const { return impl_->strides != nullptr; }
  bool is_contiguous() const {
    bool found = false;
    stable::check(aoti_torch_is_contiguous(impl_->handle, &found), "is_contiguous");
    return found;
  }

  const void* const_data_ptr() const {
    const void* data = nullptr;
    stable::check(torch_get_const_data_ptr(impl_->handle, &data), "const_data_ptr");
    return data;
  }
  void* mutable_data_ptr() const {
    void* data = nullptr;
    stable::check(torch_get_mutable_data_ptr(impl_->handle, &data), "mutable_data_ptr");
    return data;
  }
  template <class T>
  const T* const_data_ptr() const {
    return static_cast<const T*>(const_data_ptr());
  }

  // Operations of aten, by the dispatcher.
  Tensor to(ScalarType dtype) const {
    return call("aten::to", "dtype", {share(), stable::to_stack(stable::number_of(dtype)), 0, 0, 0});
  }
  Tensor contiguous() const {
    if (is_contiguous()) return *this;
    return call("aten::contiguous", "", {share(), stable::to_stack(aoti_torch_memory_format_contiguous_format())});
  }
  Tensor clone() const { return call("aten::clone", "", {share(), 0}); }
  Tensor narrow(int64_t dim, int64_t first, int64_t length) const {
    return call("aten::narrow", "",
                {share(), stable::to_stack(dim), stable::to_stack(first), stable::to_stack(length)});
  }
  Tensor reshape(IntArrayRef sizes) const { return call("aten::reshape", "", {share(), list_of(sizes)}); }
  Tensor view(IntArrayRef sizes) const { return call("aten::view", "", {share(), list_of(sizes)}); }
  Tensor copy_(const Tensor& source) const { return call("aten::copy_", "", {share(), source.share(), 0}); }

  AtenTensorHandle handle() const { return impl_->handle; }
  // Another handle on the tensor, which the receiver owns.
  StableIValue share() const {
    AtenTensorHandle handle = nullptr;
    stable::check(aoti_torch_new_tensor_handle(impl_->handle, &handle), "a second handle");
    return stable::to_stack(handle);
  }
  Tensor ones_like() const { return call("aten::ones_like", "", {share(), 0, 0, 0, 0, 0}); }
  void zero_() const { stable::check(aoti_torch_zero_(impl_->handle), "zero_"); }

 private:
  struct Impl {
    AtenTensorHandle handle;
    int64_t dim = 0, numel = 0;
    int64_t *sizes = nullptr, *strides = nullptr;  // strides: nullptr for a sparse tensor
    int32_t dtype_number = 0, layout = 0;
    Device device;
    ScalarType dtype = ScalarType::Undefined;

    explicit Impl(AtenTensorHandle owned) : handle(owned) {
      const bool failed = aoti_torch_get_dim(handle, &dim) || aoti_torch_get_numel(handle, &numel) ||
                          aoti_torch_get_sizes(handle, &sizes) || aoti_torch_get_dtype(handle, &dtype_number) ||
                          aoti_torch_get_device_type(handle, &device.type) ||
                          aoti_torch_get_device_index(handle, &device.index) ||
                          aoti_torch_get_layout(handle, &layout) ||
                          (layout == aoti_torch_layout_strided() && aoti_torch_get_strides(handle, &strides));
      if (failed) {
        aoti_torch_delete_tensor_object(handle);
        throw std::runtime_error("torch could not do this: describe a tensor");
      }
      dtype = stable::type_of(dtype_number);
    }
    ~Impl() { aoti_torch_delete_tensor_object(handle); }
    Impl(const Impl&) = delete;
  };

  static Tensor call(const char* name, const char* overload, std::vector<StableIValue> stack) {
    stable::check(torch_call_dispatcher(name, overload, stack.data(), TORCH_TARGET_VERSION), name);
    return Tensor(stable::from_stack<AtenTensorHandle>(stack[0]));
  }
  static StableIValue list_of(IntArrayRef values) {
    StableListHandle list = nullptr;
    stable::check(torch_new_list_reserve_size(values.size(), &list), "a list");
    for (const int64_t value : values)
      stable::check(torch_list_push_back(list, stable::to_stack(value)), "a list's element");
    return stable::to_stack(list);
  }

  std::shared_ptr<Impl> impl_;
};

}  // namespace at

namespace fused_layernorm {

inline std::string name_of(at::ScalarType type) {
  for (const auto& known : at::stable::dtype_numbers())
    if (known.type == type) return known.name;
  return "another dtype";
}

inline at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& like) {
  at::DimVector strides(sizes.size());
  int64_t step = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    strides[dim] = step;
    step *= std::max<int64_t>(sizes.begin()[dim], 1);
  }
  const at::Device device = like.device();
  AtenTensorHandle handle = nullptr;
  at::stable::check(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides.data(),
                                             at::stable::number_of(dtype), device.type, device.index, &handle),
                    "empty_strided");
  return at::Tensor(handle);
}

inline at::Tensor zeros(at::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& like) {
  const at::Tensor found = empty(sizes, dtype, like);
  found.zero_();
  return found;
}

inline at::Tensor ones(at::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& like) {
  return empty(sizes, dtype, like).ones_like();
}

inline bool is_dense(const at::Tensor& tensor) { return tensor.is_dense(); }

inline bool has_memory(const at::Tensor& tensor) { return tensor.numel() == 0 || tensor.const_data_ptr() != nullptr; }

inline at::Tensor materialized(const at::Tensor& tensor) { return tensor; }

inline at::Tensor contiguous_copy(const at::Tensor& tensor) {
  const at::Tensor copy = empty(tensor.sizes(), tensor.scalar_type(), tensor);
  copy.copy_(tensor);
  return copy;
}

class DeviceScope {
 public:
  explicit DeviceScope(const at::Tensor& x) {
    if (!x.is_cuda()) return;
    int32_t current = -1;
    at::stable::check(aoti_torch_get_current_device_index(&current), "the current device");
    if (current != x.get_device())
      at::stable::check(aoti_torch_create_device_guard(x.get_device(), &guard_), "a device guard");
  }
  ~DeviceScope() {
    if (guard_) aoti_torch_delete_device_guard(guard_);
  }
  DeviceScope(const DeviceScope&) = delete;

 private:
  DeviceGuardHandle guard_ = nullptr;
};

#ifdef FUSED_LAYERNORM_WITH_CUDA
inline CUstream_st* current_stream(const at::Tensor& x) {
  void* stream = nullptr;
  TORCH_CHECK(aoti_torch_get_current_cuda_stream, "this torch is a build without CUDA");
  at::stable::check(aoti_torch_get_current_cuda_stream(x.get_device(), &stream), "the current stream");
  return static_cast<CUstream_st*>(stream);
}
inline void check_cuda(int error) { TORCH_CHECK(error == 0, std::string("CUDA error: ") + cuda_error_text(error)); }
#endif

}  // namespace fused_layernorm
