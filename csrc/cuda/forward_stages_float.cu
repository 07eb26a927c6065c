#include "forward_stages.cuh"

namespace fused_layernorm {
template cudaError_t launch_staged<float>(const KernelForwardParams&, const ForwardStages&, cudaStream_t);
template cudaError_t launch_staged<double>(const KernelForwardParams&, const ForwardStages&, cudaStream_t);
}  // namespace fused_layernorm
