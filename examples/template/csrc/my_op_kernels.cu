// The kernel and its launcher.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/dispatch.cuh"
#include "cuda/vector_io.cuh"
#include "my_op.h"

namespace my_op {
namespace {

using namespace fused_layernorm;

constexpr int kThreads = 256;

// Each thread takes every (threads of the grid)-th vector of kVec elements; the last vector may be short.
template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads) my_op_kernel(Params params) {
  using acc_t = acc_type<T>;
  const T* x = static_cast<const T*>(params.x);
  const T* grad_output = static_cast<const T*>(params.grad_output);
  T* out = static_cast<T*>(params.out);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kVec;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVec; i < params.count; i += step) {
    // Load
    const int here = static_cast<int>(min(static_cast<int64_t>(kVec), params.count - i));
    acc_t values[kVec], gradients[kVec];
    unpack(load_some<T, kVec>(x + i, here), values);
    if (grad_output) unpack(load_some<T, kVec>(grad_output + i, here), gradients);
    // Compute
#pragma unroll
    for (int k = 0; k < kVec; ++k) values[k] = grad_output ? gradient(gradients[k], values[k]) : value(values[k]);
    // Store
    store_some(out + i, values, here);
  }
}

template <typename T, int kVec>
int launch(const Params& params, cudaStream_t stream) {
  const int64_t blocks = (vecs_of<kVec>(params.count) + kThreads - 1) / kThreads;
  my_op_kernel<T, kVec><<<static_cast<unsigned>(std::min<int64_t>(blocks, 1 << 20)), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

int launch_cuda(const Params& params, CUstream_st* stream) {
  return dispatch_types(params.dtype, params.dtype, [&](auto types) {
    using T = typename decltype(types)::scalar_t;
    constexpr int kVec = 16 / static_cast<int>(sizeof(T));
    // 16-byte accesses need whole vectors at multiples of 16 bytes: a view such as x[1:] has none.
    const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
    const bool vectors =
        params.count % kVec == 0 && aligned(params.x) && aligned(params.grad_output) && aligned(params.out);
    return static_cast<cudaError_t>(vectors ? launch<T, kVec>(params, stream) : launch<T, 1>(params, stream));
  });
}

}  // namespace my_op
