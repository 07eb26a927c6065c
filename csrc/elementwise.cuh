// For operations of their own beside the norms' kernels, on any type and size: which columns and rows a thread has, and
// the launch that fits.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "launch_plan.h"
#include "norm_params.h"
#include "vector_io.cuh"

namespace fused_layernorm {

// Four columns a thread, by launch_quads(). Calls f(row, col, count) for each of its rows.
template <typename F>
__device__ __forceinline__ void for_each_quad(int64_t rows, int64_t hidden_size, F&& f) {
  const int64_t first_col = 4 * (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < rows;
       row += static_cast<int64_t>(gridDim.x) * blockDim.y)
    for (int64_t col = first_col; col < hidden_size; col += int64_t{4} * gridDim.y * blockDim.x)
      f(row, col, static_cast<int>(min(hidden_size - col, int64_t{4})));
}

// Eight columns a thread, by launch_eights(): it keeps their weight and bias from row to row. Calls prepare(col, count)
// for its columns, and what that returns with each of its rows.
template <typename F>
__device__ __forceinline__ void for_each_eight(int64_t rows, int64_t hidden_size, F&& prepare) {
  for (int64_t col = 8 * (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x); col < hidden_size;
       col += int64_t{8} * gridDim.y * blockDim.x) {
    const auto of_row = prepare(col, static_cast<int>(min(hidden_size - col, int64_t{8})));
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < rows;
         row += static_cast<int64_t>(gridDim.x) * blockDim.y)
      of_row(row);
  }
}

template <typename acc_t, int kVec>
__device__ __forceinline__ void store_columns(void* target, DType dtype, int64_t offset, const acc_t (&values)[kVec],
                                              int count) {
  store_vec_as<kVec>(target, dtype, offset, values, count, is_aligned<kVec>(target, dtype_bytes(dtype), offset));
}

// Threads for `vec` columns each, and so many blocks of rows that no more than `most_blocks` run.
template <typename Kernel, typename... Arguments>
cudaError_t launch_vecs(int vec, int64_t most_blocks, Kernel kernel, int64_t rows, int64_t hidden_size,
                        cudaStream_t stream, const Arguments&... arguments) {
  const int64_t vecs = (hidden_size + vec - 1) / vec;
  int side_by_side = 1;
  while (side_by_side < kQuadThreads && side_by_side < vecs) side_by_side *= 2;
  const int rows_of_block = kQuadThreads / side_by_side;
  const int64_t blocks_of_row = std::min<int64_t>((vecs + side_by_side - 1) / side_by_side, 65535);
  const int64_t blocks_of_rows =
      std::min((rows + rows_of_block - 1) / rows_of_block, std::max<int64_t>(most_blocks / blocks_of_row, 1));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks_of_rows), static_cast<unsigned>(blocks_of_row));
  config.blockDim = dim3(side_by_side, rows_of_block);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <typename Kernel, typename... Arguments>
cudaError_t launch_quads(Kernel kernel, int64_t rows, int64_t hidden_size, cudaStream_t stream,
                         const Arguments&... arguments) {
  return launch_vecs(4, int64_t{1} << 30, kernel, rows, hidden_size, stream, arguments...);
}

template <typename Kernel, typename... Arguments>
cudaError_t launch_eights(Kernel kernel, const NormForwardParams& params, cudaStream_t stream,
                          const Arguments&... arguments) {
  return launch_vecs(8, kEightsBlocks, kernel, params.rows, params.hidden_size, stream, params, arguments...);
}

}  // namespace fused_layernorm
