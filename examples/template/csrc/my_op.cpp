// Checks, allocation, the CPU twin of the kernel, and the operators torch.ops.my_op.*.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <string>

#ifdef MY_OP_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#endif

#include "my_op.h"

namespace my_op {
namespace {

using at::Tensor;

// ---- the CPU twin ---------------------------------------------------------------------------------------------------

template <typename T, typename acc_t>
void run_cpu(const Params& params) {
  const T* x = static_cast<const T*>(params.x);
  const T* grad_output = static_cast<const T*>(params.grad_output);
  T* out = static_cast<T*>(params.out);
  at::parallel_for(0, params.count, 1 << 15, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const acc_t here = static_cast<acc_t>(x[i]);
      out[i] = static_cast<T>(grad_output ? gradient(static_cast<acc_t>(grad_output[i]), here) : value(here));
    }
  });
}

void launch_cpu(const Params& params) {
  switch (params.dtype) {
    case DType::kFloat16: return run_cpu<at::Half, float>(params);
    case DType::kBFloat16: return run_cpu<at::BFloat16, float>(params);
    case DType::kFloat32: return run_cpu<float, float>(params);
    case DType::kFloat64: return run_cpu<double, double>(params);
  }
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

DType dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kHalf: return DType::kFloat16;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kFloat: return DType::kFloat32;
    case at::kDouble: return DType::kFloat64;
    default: TORCH_CHECK_TYPE(false, "x must be float16, bfloat16, float32 or float64, got " + text(x.scalar_type()));
  }
}

void launch(const Params& params, const Tensor& x) {
  if (params.count == 0) return;
#ifdef MY_OP_WITH_CUDA
  if (x.is_cuda()) {
    const c10::cuda::CUDAGuard guard(x.device());
    C10_CUDA_CHECK(static_cast<cudaError_t>(launch_cuda(params, c10::cuda::getCurrentCUDAStream())));
    return;
  }
#endif
  launch_cpu(params);
}

Tensor forward(const Tensor& x) {
  const DType dtype = dtype_of(x);
  const Tensor dense = x.contiguous();
  Tensor y = at::empty_like(dense);
  launch({nullptr, dense.const_data_ptr(), y.mutable_data_ptr(), dense.numel(), dtype}, dense);
  return y;
}

Tensor backward(const Tensor& grad_output, const Tensor& x) {
  TORCH_CHECK(grad_output.sizes() == x.sizes(),
              "grad_output must have x's shape, " + text(x.sizes()) + ", got " + text(grad_output.sizes()));
  TORCH_CHECK_TYPE(
      grad_output.scalar_type() == x.scalar_type(),
      "grad_output must be of x's dtype, " + text(x.scalar_type()) + ", got " + text(grad_output.scalar_type()));
  TORCH_CHECK(grad_output.device() == x.device(),
              "grad_output must be on x's device, " + x.device().str() + ", got " + grad_output.device().str());
  const DType dtype = dtype_of(x);
  const Tensor dense = x.contiguous(), dense_grad = grad_output.contiguous();
  Tensor grad_x = at::empty_like(dense);
  launch({dense_grad.const_data_ptr(), dense.const_data_ptr(), grad_x.mutable_data_ptr(), dense.numel(), dtype}, dense);
  return grad_x;
}

}  // namespace
}  // namespace my_op

TORCH_LIBRARY(my_op, library) {
  library.def("forward(Tensor x) -> Tensor", {at::Tag::pt2_compliant_tag});
  library.def("backward(Tensor grad_output, Tensor x) -> Tensor", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(my_op, CPU, library) {
  library.impl("forward", &my_op::forward);
  library.impl("backward", &my_op::backward);
}

#ifdef MY_OP_WITH_CUDA
TORCH_LIBRARY_IMPL(my_op, CUDA, library) {
  library.impl("forward", &my_op::forward);
  library.impl("backward", &my_op::backward);
}
#endif
