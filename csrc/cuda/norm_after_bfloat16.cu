#include "forward_kernel.cuh"

template cudaError_t fused_layernorm::launch_after<__nv_bfloat16>(const KernelForwardParams&, const AfterNorm&,
                                                                  cudaStream_t);
