#include "forward_stages.cuh"

template cudaError_t fused_layernorm::launch_staged<__half>(const KernelForwardParams&, const ForwardStages&,
                                                                cudaStream_t);
