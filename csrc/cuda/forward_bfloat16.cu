#include "forward_kernel.cuh"

namespace fused_layernorm {
template cudaError_t launch_rows<__nv_bfloat16>(const KernelForwardParams&, cudaStream_t);
}  // namespace fused_layernorm
