#include "backward_fused.cuh"
template cudaError_t fused_layernorm::backward_fused<__nv_bfloat16>(const KernelBackwardParams&, const GradStages&,
                                                                    FusedCall&);
