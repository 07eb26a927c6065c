#include "forward_kernel.cuh"

template cudaError_t fused_layernorm::launch_after<float>(const KernelForwardParams&, const AfterNorm&, cudaStream_t);
