#include "forward_stages.cuh"

template cudaError_t fused_layernorm::launch_staged<__nv_bfloat16>(const KernelForwardParams&, const ForwardStages&,
                                                                cudaStream_t);
