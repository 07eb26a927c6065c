#include "forward_kernel.cuh"

template cudaError_t fused_layernorm::launch_gate<__half>(const KernelForwardParams&, const RowGate&, cudaStream_t);
