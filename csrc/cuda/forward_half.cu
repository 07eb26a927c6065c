#include "forward_kernel.cuh"

namespace fused_layernorm {
template cudaError_t launch_rows<__half>(const KernelForwardParams&, cudaStream_t);
}  // namespace fused_layernorm
