#include "norm_after.cuh"

template cudaError_t fused_layernorm::launch_after<__half>(const NormForwardParams&, cudaStream_t);
