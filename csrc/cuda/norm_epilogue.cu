// Forward with an epilogue after what most models run, of rows of common sizes. norm_forward.cu has the formulas.
//
// Instruction issue decides here, and where the number of columns is a constant, so is every address: 22 instructions
// an element with tanh's gelu, as a run-time value 25 (16 bits, 1024 columns).
#include <utility>

#include "any_rows.cuh"
#include "launchers.h"

namespace fused_layernorm {
namespace {

// Sizes that models have. By a run-time plan they took 2 to 43% more time.
using Sizes = std::integer_sequence<int, 64, 128, 256, 384, 512, 768, 1024, 1152, 1280, 1536, 2048, 4096, 8192>;
using Float32Sizes = std::integer_sequence<int, 512, 768, 1024, 2048, 4096, 8192>;

// The vectors of a thread. A third of the instructions are per row, so up to eight; four at most leave fp32 enough
// threads.
constexpr int held_of(int columns, int element_bytes) {
  const int vectors = columns * element_bytes / 16;
  for (int held : {8, 6, 5, 9})
    if (element_bytes == 2 && vectors % held == 0 && is_power(vectors / held) && vectors / held >= 4) return held;
  return vectors % 3 == 0 ? 6 : vectors > 1024 ? 8 : 4;
}

template <typename scalar_t, int kHeld, int kColumns>
__global__ void __launch_bounds__(kEpilogueThreads<kHeld>)
    epilogue_norm_kernel(const __grid_constant__ AnyParams params) {
  __shared__ SumScratch<kHeld, 2, 2> scratch;
  const AnyRow<scalar_t, kHeld, Stages::kLoadAndEpilogue, kColumns> row(params);
  if (row.row < params.rows) row.run(scratch);  // rows that share a warp: as in norm_forward_kernel
}

template <typename scalar_t, int... kColumns>
cudaError_t launch(const KernelForwardParams& params, const Epilogue& epilogue, cudaStream_t stream,
                   std::integer_sequence<int, kColumns...>) {
  LoadStage none{};
  none.residual_out_dtype = params.x_dtype;
  return with_constant<kColumns...>(params.hidden_size, [&](auto constant) {
    constexpr int kSize = decltype(constant)::value, kHeld = held_of(kSize, sizeof(scalar_t));
    RunTimePlan plan{};
    const int threads = kSize * static_cast<int>(sizeof(scalar_t)) / (16 * kHeld);
    plan.block = std::max(threads, kRunTimeBlock);
    plan.rows = plan.block / threads;
    const ClusterLaunch launch((params.rows + plan.rows - 1) / plan.rows, plan.block, 0, 1, stream);
    return cudaLaunchKernelEx(&launch.config, epilogue_norm_kernel<scalar_t, kHeld, kSize>,
                              AnyParams(params, none, epilogue, plan));
  });
}

}  // namespace

cudaError_t launch_epilogue_norm(const KernelForwardParams& params, const LoadStage& stage, const Epilogue& epilogue,
                                 cudaStream_t stream) {
  if (!params.weight || params.weight_offset != 0 || stage.any() || stage.rounds_x_hat ||
      stage.residual_out_dtype != params.x_dtype || params.y_dtype != params.x_dtype)
    return cudaErrorNotSupported;
  switch (params.x_dtype) {
    case DType::kFloat16: return launch<__half>(params, epilogue, stream, Sizes{});
    case DType::kBFloat16: return launch<__nv_bfloat16>(params, epilogue, stream, Sizes{});
    case DType::kFloat32: return launch<float>(params, epilogue, stream, Float32Sizes{});
    default: return cudaErrorNotSupported;
  }
}

}  // namespace fused_layernorm
