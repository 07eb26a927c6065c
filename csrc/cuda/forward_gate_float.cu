#include "forward_kernel.cuh"

template cudaError_t fused_layernorm::launch_gate<float>(const KernelForwardParams&, const RowGate&, cudaStream_t);
