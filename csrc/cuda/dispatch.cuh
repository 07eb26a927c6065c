// From run-time dtype and row length to compile-time types and row plan.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <atomic>

#include "async.cuh"
#include "kernel_params.h"
#include "launch_plan.h"

namespace fused_layernorm {

// Properties of the current device; queried once a device.
struct DeviceFacts {
  int device = 0;
  int multiprocessors = 0;
  int max_cluster = 1;   // blocks; 1 if the device, or the code compiled for it, has no clusters
  int shared_bytes = 0;  // shared memory that a block may have
  int sm_shared_bytes = 0, reserved_shared_bytes = 0;  // that an SM has, and that each block takes besides
};
cudaError_t device_facts(DeviceFacts& facts);  // launch.cu

// A launch in clusters of `cluster` blocks; 1: without clusters. More than a cluster has: cooperative, so that all
// blocks of the grid run at the same time.
struct ClusterLaunch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attribute{};

  ClusterLaunch(int64_t blocks, int threads, int shared_bytes, int cluster, cudaStream_t stream = nullptr) {
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    if (cluster > kMaxCluster) {
      attribute.id = cudaLaunchAttributeCooperative;
      attribute.val.cooperative = 1;
    } else {
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = cluster;
      attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    }
    config.attrs = &attribute;
    config.numAttrs = cluster > 1 ? 1 : 0;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;  // config points to attribute
};

// Programmatic dependent launch: the kernel may start while the previous one in the stream still runs (sm_90 and
// later). It calls wait_for_previous_kernel() before it touches memory, so only the launch latency overlaps, 0.25 us.
// Such a kernel must not read memory that the previous one wrote by __ldg(): read-only loads may move ahead of the wait
// (CUDA 13.0 moved them in 40 kernels with an epilogue). .ci/run checks the machine code of all kernels for that.
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

// Runs a function once a device, and again only after an error.
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

// Opts a kernel in to clusters of 16 and to this much dynamic shared memory.
template <typename Kernel>
cudaError_t allow_more(Kernel kernel, int shared_bytes, int max_cluster) {
  cudaError_t error = cudaSuccess;
  if (shared_bytes > 0) {
    // Without the carveout the driver may configure less shared memory than all resident blocks need
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

// For kernels to which weight's dtype is a run-time value. Calls f(Types<scalar_t, scalar_t>{}).
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

// Calls f(Plan{}) for the first plan of the ladder that holds the row at once, in clusters of up to max_cluster if the
// plan has clusters, or for the last plan, which takes several tiles. The choice depends on hidden_size, dtype and card
// only, so that the result of a row never depends on its position or on the other rows.
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

// The same, with the ladder for ragged rows if rows are not whole 16-byte vectors.
template <typename LadderOf, typename RaggedLadderOf, typename scalar_t, typename F>
cudaError_t dispatch_rows(int64_t hidden_size, int max_cluster, F&& f) {
  if (hidden_size * static_cast<int64_t>(sizeof(scalar_t)) % 16 != 0)
    return dispatch_plan<RaggedLadderOf>(hidden_size, max_cluster, f);
  return dispatch_plan<LadderOf>(hidden_size, max_cluster, f);
}

}  // namespace fused_layernorm
