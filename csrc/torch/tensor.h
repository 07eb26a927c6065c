// What norm_call.h and norm_ops.cpp use of torch: at::Tensor, and below what torch's two interfaces offer in different
// ways. FUSED_LAYERNORM_STABLE_ABI takes torch's stable C interface (csrc/stable/tensor.h), with which one library runs
// in every torch from 2.11 on; otherwise this is ATen, past the dispatcher where that saves host time.
#pragma once

#include "norm_params.h"

#ifdef FUSED_LAYERNORM_STABLE_ABI
#include "stable/tensor.h"
#else

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <string>

#ifdef FUSED_LAYERNORM_WITH_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace fused_layernorm {

inline std::string name_of(at::ScalarType type) { return "torch." + std::string(c10::getDtypeNames(type).first); }

// A tensor on `like`'s device, which must be current.
inline at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& like) {
  if (at::globalContext().deterministicAlgorithms()) {  // in which mode at::empty may fill what it returns
    return at::empty(sizes, like.options().dtype(dtype));
  }
#ifdef FUSED_LAYERNORM_WITH_CUDA
  if (like.is_cuda()) {
    constexpr c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
    return at::detail::empty_generic(sizes, c10::cuda::CUDACachingAllocator::get(), keys, dtype, std::nullopt);
  }
#endif
  return at::detail::empty_cpu(sizes, dtype);
}

inline at::Tensor zeros(at::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& like) {
  return at::zeros(sizes, like.options().dtype(dtype));
}

inline at::Tensor ones(at::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& like) {
  return at::ones(sizes, like.options().dtype(dtype));
}

inline bool is_dense(const at::Tensor& tensor) { return tensor.layout() == at::kStrided; }

// False where the storage was freed (as FSDP does between uses) or never filled.
inline bool has_memory(const at::Tensor& tensor) {
  return tensor.numel() == 0 || tensor.storage().data() != nullptr || tensor._is_zerotensor();
}

// A tensor whose memory holds its values: the negative bit is resolved, and tensors of zeros without memory get some.
inline at::Tensor materialized(const at::Tensor& tensor) {
  if (tensor._is_zerotensor()) return at::zeros(tensor.sizes(), tensor.options());
  return tensor.is_neg() ? tensor.resolve_neg() : tensor;
}

inline at::Tensor contiguous_copy(const at::Tensor& tensor) { return tensor.clone(at::MemoryFormat::Contiguous); }

// Makes x's device current while in scope; costs nothing on the CPU, and next to nothing where it is current.
struct DeviceScope {
#ifdef FUSED_LAYERNORM_WITH_CUDA
  c10::cuda::OptionalCUDAGuard guard;
  explicit DeviceScope(const at::Tensor& x) {
    if (x.is_cuda() && x.get_device() != c10::cuda::current_device()) guard.set_device(x.device());
  }
#else
  explicit DeviceScope(const at::Tensor&) {}
#endif
};

#ifdef FUSED_LAYERNORM_WITH_CUDA
inline CUstream_st* current_stream(const at::Tensor& x) { return c10::cuda::getCurrentCUDAStream(x.get_device()); }
inline void check_cuda(int error) { C10_CUDA_CHECK(static_cast<cudaError_t>(error)); }
#endif

}  // namespace fused_layernorm

#endif
