#include "forward_kernel.cuh"

namespace fused_layernorm {
template cudaError_t launch_rows<float>(const KernelForwardParams&, cudaStream_t);
template cudaError_t launch_rows<double>(const KernelForwardParams&, cudaStream_t);
}  // namespace fused_layernorm
