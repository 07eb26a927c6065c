// From run-time dtype and row length to compile-time types and row plan.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <atomic>

#include "kernel_params.h"
#include "launch_plan.h"

namespace fused_layernorm {

// What the launchers know of the current device; asked of the driver once a device.
struct DeviceFacts {
  int multiprocessors = 0;
  int max_cluster = 1;   // blocks of a cluster; 1 where the device, or the code compiled for it, has no clusters
  int shared_bytes = 0;  // of shared memory that a block may have
};
cudaError_t device_facts(int& device, DeviceFacts& facts);  // launch.cu

// How many blocks share a row of vec_count vectors: as many as hold it at once. Above 8 a cluster is 16.
template <typename Plan>
int cluster_for(int64_t vec_count, int max_cluster) {
  if (!Plan::kClusters) return 1;
  const int64_t tile = Plan::kThreads * Plan::kVecs;
  const int64_t blocks = (vec_count + tile - 1) / tile;
  return static_cast<int>(std::min<int64_t>(blocks > 8 ? 16 : blocks, std::min(max_cluster, Plan::kMaxCluster)));
}

// A launch in clusters of `cluster` blocks, or as usual for 1.
struct ClusterLaunch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute{};

  ClusterLaunch(int64_t blocks, int threads, int shared_bytes, int cluster, cudaStream_t stream = nullptr) {
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = cluster > 1 ? 1 : 0;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;  // config points to attribute
};

// A launch that may begin while the kernel before it in the stream still runs (sm_90 and later; elsewhere as usual).
// The kernel calls wait_for_previous_kernel() before it touches memory: what overlaps is the launch itself, 0.25 us.
// What the kernel before may have written is not read by __ldg(): that is for memory that nobody writes while the
// kernel runs, and the assembler moves it ahead of the wait (CUDA 13.0 did, in 40 kernels of activations and dropout of
// y: now and then they could have read x as it was before). .ci/run looks at the machine code of all.
struct OverlappedLaunch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute{};

  OverlappedLaunch(dim3 blocks, dim3 threads, cudaStream_t stream) {
    config.gridDim = blocks;
    config.blockDim = threads;
    config.stream = stream;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  OverlappedLaunch(const OverlappedLaunch&) = delete;  // config points to attribute
};

__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether something was done already on a device: one bit each.
class OncePerDevice {
 public:
  template <typename F>
  cudaError_t run(int device, F&& f) {
    const uint64_t bit = uint64_t{1} << (device % 64);
    if (device < 64 && (done_.load(std::memory_order_acquire) & bit)) return cudaSuccess;
    const cudaError_t error = f();
    if (error == cudaSuccess && device < 64) done_.fetch_or(bit, std::memory_order_release);
    return error;
  }

 private:
  std::atomic<uint64_t> done_{0};
};

// Lets a kernel use clusters of 16 and that much dynamic shared memory, beyond what every device grants.
template <typename Kernel>
cudaError_t allow_more(Kernel kernel, int shared_bytes, int max_cluster) {
  cudaError_t error = cudaSuccess;
  if (shared_bytes > 0) {
    // Without the second wish the driver may leave the SM less shared memory than the blocks it could hold need
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error == cudaSuccess)
      error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  }
  if (error == cudaSuccess && max_cluster > 8)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  return error;
}

template <typename scalar, typename weight>
struct Types {
  using scalar_t = scalar;
  using weight_t = weight;
};

// The only list of supported (x, weight) types. Calls f(Types<scalar_t, weight_t>{}).
template <typename F>
cudaError_t dispatch_types(DType x, DType weight, F&& f) {
  if (x == DType::kFloat16 && weight == DType::kFloat16) return f(Types<__half, __half>{});
  if (x == DType::kFloat16 && weight == DType::kFloat32) return f(Types<__half, float>{});
  if (x == DType::kBFloat16 && weight == DType::kBFloat16) return f(Types<__nv_bfloat16, __nv_bfloat16>{});
  if (x == DType::kBFloat16 && weight == DType::kFloat32) return f(Types<__nv_bfloat16, float>{});
  if (x == DType::kFloat32 && weight == DType::kFloat32) return f(Types<float, float>{});
  if (x == DType::kFloat64 && weight == DType::kFloat64) return f(Types<double, double>{});
  return cudaErrorInvalidValue;
}

// For kernels that ask for weight's dtype at run time. Calls f(Types<scalar_t, scalar_t>{}).
template <typename F>
cudaError_t dispatch_type(DType x, F&& f) {
  switch (x) {
    case DType::kFloat16: return f(Types<__half, __half>{});
    case DType::kBFloat16: return f(Types<__nv_bfloat16, __nv_bfloat16>{});
    case DType::kFloat32: return f(Types<float, float>{});
    case DType::kFloat64: return f(Types<double, double>{});
  }
  return cudaErrorInvalidValue;
}

// Calls f(Plan{}) for the first plan of the ladder that holds the row at once, in clusters of up to max_cluster where
// the plan has them, or for the last, which takes several turns. A function of hidden_size, dtype and card alone, so
// that a row's result never depends on where it lies or on the rows beside it.
template <typename F, typename First, typename... Rest>
cudaError_t pick_plan(Ladder<First, Rest...>, int64_t hidden_size, int max_cluster, F&& f) {
  if constexpr (sizeof...(Rest) > 0) {
    const int64_t holds = First::kThreads * First::kVecs * First::kVec * std::min(First::kMaxCluster, max_cluster);
    if (hidden_size > holds) return pick_plan(Ladder<Rest...>{}, hidden_size, max_cluster, f);
  }
  return f(First{});
}

template <typename LadderOf, typename F>
cudaError_t dispatch_plan(int64_t hidden_size, int max_cluster, F&& f) {
  return pick_plan(typename LadderOf::type{}, hidden_size, max_cluster, f);
}

// The same, from `Ragged` where rows are not made of whole 16 bytes.
template <typename LadderOf, typename RaggedLadderOf, typename scalar_t, typename F>
cudaError_t dispatch_rows(int64_t hidden_size, int max_cluster, F&& f) {
  if (hidden_size * static_cast<int64_t>(sizeof(scalar_t)) % 16 != 0)
    return dispatch_plan<RaggedLadderOf>(hidden_size, max_cluster, f);
  return dispatch_plan<LadderOf>(hidden_size, max_cluster, f);
}

}  // namespace fused_layernorm
