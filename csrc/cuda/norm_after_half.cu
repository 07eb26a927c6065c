#include "forward_kernel.cuh"

template cudaError_t fused_layernorm::launch_after<__half>(const KernelForwardParams&, const AfterNorm&, cudaStream_t);
