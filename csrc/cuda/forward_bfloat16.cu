#include "forward_kernel.cuh"

namespace fused_layernorm {
template cudaError_t launch_rows<__nv_bfloat16>(const KernelForwardParams&, cudaStream_t);
template cudaError_t launch_load<__nv_bfloat16>(const KernelForwardParams&, const LoadStage&, cudaStream_t);
}  // namespace fused_layernorm
