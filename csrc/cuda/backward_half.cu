#include "backward_fused.cuh"
template cudaError_t fused_layernorm::backward_fused<__half>(const KernelBackwardParams&, const GradStages&,
                                                             FusedCall&);
