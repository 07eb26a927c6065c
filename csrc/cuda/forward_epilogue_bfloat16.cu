#include "forward_kernel.cuh"

template cudaError_t fused_layernorm::launch_epilogue<__nv_bfloat16>(const KernelForwardParams&, const Epilogue&,
                                                                     cudaStream_t);
