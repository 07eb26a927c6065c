#include "forward_kernel.cuh"

template cudaError_t fused_layernorm::launch_epilogue<__half>(const KernelForwardParams&, const Epilogue&,
                                                              cudaStream_t);
