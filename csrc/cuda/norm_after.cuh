// launch_after() of launchers.h, for the files that make it for one type each.
#pragma once

#include "forward_kernel.cuh"
#include "launchers.h"

namespace fused_layernorm {

template <typename scalar_t>
cudaError_t launch_after(const KernelForwardParams& params, const AfterNorm& after, cudaStream_t stream) {
  if (after.dropout.philox)
    return launch_fused_forward<scalar_t>(params, After<scalar_t, true>{after}, stream);
  return launch_fused_forward<scalar_t>(params, After<scalar_t, false>{after}, stream);
}

}  // namespace fused_layernorm
