#include "norm_after.cuh"

template cudaError_t fused_layernorm::launch_after<float>(const NormForwardParams&, cudaStream_t);
