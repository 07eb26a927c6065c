// Checks, allocation, the CPU twins of the kernels, and the operators torch.ops.custom_op.*.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <string>

#ifdef CUSTOM_OP_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#endif

#include "custom_op.h"

namespace custom_op {
namespace {

using at::Tensor;

// ---- the CPU twins --------------------------------------------------------------------------------------------------

template <typename T>
using acc_type = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Calls f(T{}).
template <typename F>
void dispatch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16: return f(at::Half{});
    case DType::kBFloat16: return f(at::BFloat16{});
    case DType::kFloat32: return f(float{});
    case DType::kFloat64: return f(double{});
  }
}

// Rows that are worth handing to another thread.
int64_t grain(int64_t hidden_size) { return std::max<int64_t>(1, (1 << 15) / hidden_size); }

void launch_cpu(const ForwardParams& params) {
  dispatch(params.dtype, [&](auto type) {
    using T = decltype(type);
    using acc_t = acc_type<T>;
    const T* bias = static_cast<const T*>(params.bias);
    at::parallel_for(0, params.rows, grain(params.hidden_size), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(params.x) + row * params.hidden_size;
        T* y = static_cast<T*>(params.y) + row * params.hidden_size;
        for (int64_t i = 0; i < params.hidden_size; ++i)
          y[i] = static_cast<T>(scale_bias_relu<acc_t>(x[i], static_cast<acc_t>(params.scale), bias ? bias[i] : T(0)));
      }
    });
  });
}

void launch_cpu(const BackwardParams& params) {
  const int64_t partials = partial_rows(params.rows);
  dispatch(params.dtype, [&](auto type) {
    using T = decltype(type);
    using acc_t = acc_type<T>;
    at::parallel_for(0, partials, 1, [&](int64_t begin, int64_t end) {
      for (int64_t partial = begin; partial < end; ++partial) {
        acc_t* sums = static_cast<acc_t*>(params.grad_bias_partial);
        if (sums) std::fill_n(sums += partial * params.hidden_size, params.hidden_size, acc_t(0));
        for (int64_t row = partial; row < params.rows; row += partials) {
          const int64_t offset = row * params.hidden_size;
          const T* grad_output = static_cast<const T*>(params.grad_output) + offset;
          const T* y = static_cast<const T*>(params.y) + offset;
          T* grad_x = static_cast<T*>(params.grad_x) + offset;
          for (int64_t i = 0; i < params.hidden_size; ++i) {
            const acc_t grad_z = relu_gradient<acc_t>(grad_output[i], y[i]);
            if (sums) sums[i] += grad_z;
            grad_x[i] = static_cast<T>(grad_z * static_cast<acc_t>(params.scale));
          }
        }
      }
    });
  });
}

void launch_cpu(const SumParams& params) {
  dispatch(params.dtype, [&](auto type) {
    using T = decltype(type);
    using acc_t = acc_type<T>;
    at::parallel_for(0, params.rows, grain(params.hidden_size), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(params.x) + row * params.hidden_size;
        acc_t strands[16] = {};  // independent sums, for the compiler to add side by side
        int64_t i = 0;
        for (; i + 16 <= params.hidden_size; i += 16)
          for (int k = 0; k < 16; ++k) strands[k] += static_cast<acc_t>(x[i + k]);
        for (; i < params.hidden_size; ++i) strands[0] += static_cast<acc_t>(x[i]);
        acc_t sum = 0;
        for (const acc_t strand : strands) sum += strand;
        static_cast<T*>(params.y)[row] = static_cast<T>(sum);
      }
    });
  });
}

// ---- checks, allocation, launch -------------------------------------------------------------------------------------

// Messages are strings: with several arguments TORCH_CHECK writes to a stream, which crashes where the compiler links a
// libstdc++ of its own beside torch's.
std::string text(at::ScalarType type) { return c10::toString(type); }
std::string text(at::IntArrayRef shape) {
  std::string joined;
  for (const int64_t size : shape) joined += (joined.empty() ? "[" : ", ") + std::to_string(size);
  return joined.empty() ? "[]" : joined + "]";
}

DType check_x(const Tensor& x) {
  TORCH_CHECK(x.dim() >= 1, "x must have at least one dimension");
  switch (x.scalar_type()) {
    case at::kHalf: return DType::kFloat16;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kFloat: return DType::kFloat32;
    case at::kDouble: return DType::kFloat64;
    default: TORCH_CHECK_TYPE(false, "x must be float16, bfloat16, float32 or float64, got " + text(x.scalar_type()));
  }
}

void check_like(const char* name, const Tensor& tensor, const Tensor& x, at::IntArrayRef shape) {
  const std::string must = std::string(name) + " must ";
  TORCH_CHECK(tensor.sizes() == shape, must + "have shape " + text(shape) + ", got " + text(tensor.sizes()));
  TORCH_CHECK_TYPE(tensor.scalar_type() == x.scalar_type(),
                   must + "be of x's dtype, " + text(x.scalar_type()) + ", got " + text(tensor.scalar_type()));
  TORCH_CHECK(tensor.device() == x.device(),
              must + "be on x's device, " + x.device().str() + ", got " + tensor.device().str());
}

int64_t rows_of(const Tensor& x) { return x.numel() == 0 ? 0 : x.numel() / x.size(-1); }

template <typename Params>
void launch(const Params& params, const Tensor& x) {
#ifdef CUSTOM_OP_WITH_CUDA
  if (x.is_cuda()) {
    const c10::cuda::CUDAGuard guard(x.device());
    C10_CUDA_CHECK(static_cast<cudaError_t>(launch_cuda(params, c10::cuda::getCurrentCUDAStream())));
    return;
  }
#endif
  launch_cpu(params);
}

Tensor forward(const Tensor& x, double scale, const std::optional<Tensor>& bias) {
  const DType dtype = check_x(x);
  if (bias) check_like("bias", *bias, x, {x.size(-1)});
  const Tensor dense = x.contiguous(), dense_bias = bias ? bias->contiguous() : Tensor();
  Tensor y = at::empty_like(dense);
  if (x.numel() == 0) return y;
  launch(ForwardParams{dense.const_data_ptr(), bias ? dense_bias.const_data_ptr() : nullptr, y.mutable_data_ptr(),
                       rows_of(x), x.size(-1), scale, dtype},
         x);
  return y;
}

// grad_bias is empty where it is not wanted.
std::tuple<Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& y, double scale, bool wants_bias) {
  const DType dtype = check_x(y);
  check_like("grad_output", grad_output, y, y.sizes());
  const Tensor dense_grad = grad_output.contiguous(), dense_y = y.contiguous();
  Tensor grad_x = at::empty_like(dense_y);
  if (y.numel() == 0) return {grad_x, at::zeros({wants_bias ? y.size(-1) : 0}, y.options())};
  Tensor partial;
  if (wants_bias)
    partial = at::empty({partial_rows(rows_of(y)), y.size(-1)},
                        y.options().dtype(dtype == DType::kFloat64 ? at::kDouble : at::kFloat));
  launch(BackwardParams{dense_grad.const_data_ptr(), dense_y.const_data_ptr(), grad_x.mutable_data_ptr(),
                        wants_bias ? partial.mutable_data_ptr() : nullptr, rows_of(y), y.size(-1), scale, dtype},
         y);
  return {grad_x, wants_bias ? partial.sum(0).to(y.scalar_type()) : at::empty({0}, y.options())};
}

Tensor reduce_sum(const Tensor& x) {
  const DType dtype = check_x(x);
  const at::IntArrayRef shape = x.sizes().slice(0, x.dim() - 1);
  if (x.numel() == 0) return at::zeros(shape, x.options());
  TORCH_CHECK(rows_of(x) < int64_t{1} << 31, "x must have fewer than 2^31 rows, got " + std::to_string(rows_of(x)));
  const Tensor dense = x.contiguous();
  Tensor y = at::empty(shape, x.options());
  launch(SumParams{dense.const_data_ptr(), y.mutable_data_ptr(), rows_of(x), x.size(-1), dtype}, x);
  return y;
}

}  // namespace
}  // namespace custom_op

TORCH_LIBRARY(custom_op, library) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  library.def("scale_bias_relu(Tensor x, float scale, Tensor? bias) -> Tensor", tags);
  library.def(
      "scale_bias_relu_backward(Tensor grad_output, Tensor y, float scale, bool wants_bias) -> (Tensor, Tensor)", tags);
  library.def("reduce_sum(Tensor x) -> Tensor", tags);
}

TORCH_LIBRARY_IMPL(custom_op, CPU, library) {
  library.impl("scale_bias_relu", &custom_op::forward);
  library.impl("scale_bias_relu_backward", &custom_op::backward);
  library.impl("reduce_sum", &custom_op::reduce_sum);
}

#ifdef CUSTOM_OP_WITH_CUDA
TORCH_LIBRARY_IMPL(custom_op, CUDA, library) {
  library.impl("scale_bias_relu", &custom_op::forward);
  library.impl("scale_bias_relu_backward", &custom_op::backward);
  library.impl("reduce_sum", &custom_op::reduce_sum);
}
#endif
