// Elementwise kernels of any dtype and size: the columns and rows of a thread, and the matching launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "kernel_params.h"
#include "launch_plan.h"
#include "vector_io.cuh"

namespace fused_layernorm {

// Four columns a thread, launched by launch_quads(). Calls f(row, col, count) for each row of the thread.
template <typename F>
__device__ __forceinline__ void for_each_quad(int64_t rows, int64_t hidden_size, F&& f) {
  const int64_t first_col = 4 * (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < rows;
       row += static_cast<int64_t>(gridDim.x) * blockDim.y)
    for (int64_t col = first_col; col < hidden_size; col += int64_t{4} * gridDim.y * blockDim.x)
      f(row, col, static_cast<int>(min(hidden_size - col, int64_t{4})));
}

// Eight columns a thread, launched by launch_eights(); the thread keeps their weight and bias from row to row. Calls
// prepare(col, count) once for the columns, and the function that it returns once a row.
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

// Loads the first `count` elements of a vector of any dtype; the others are 0.
template <int kVec, typename acc_t>
__device__ __forceinline__ void load_columns(acc_t (&values)[kVec], const void* source, DType dtype, int64_t offset,
                                             int count) {
  constexpr bool kIsDouble = std::is_same<acc_t, double>::value;
  if (kIsDouble != (dtype == DType::kFloat64)) {
    using Other = std::conditional_t<kIsDouble, float, double>;
    Other others[kVec];
    load_vec_as<kVec>(others, source, dtype, offset, count);
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = static_cast<acc_t>(others[i]);
  } else {
    load_vec_as<kVec>(values, source, dtype, offset, count);
  }
}

template <typename acc_t, int kVec>
__device__ __forceinline__ void store_columns(void* target, DType dtype, int64_t offset, const acc_t (&values)[kVec],
                                              int count) {
  store_vec_as<kVec>(target, dtype, offset, values, count, is_aligned<kVec>(target, dtype_bytes(dtype), offset));
}

// `vec` columns a thread, and at most `most_blocks` blocks.
template <typename Kernel, typename... Arguments>
cudaError_t launch_vecs(int vec, int64_t most_blocks, int segments, Kernel kernel, int64_t rows, int64_t hidden_size,
                        cudaStream_t stream, const Arguments&... arguments) {
  const int64_t vecs = (hidden_size + vec - 1) / vec;
  int side_by_side = 1;
  while (side_by_side < kQuadThreads && side_by_side < vecs) side_by_side *= 2;
  const int rows_of_block = kQuadThreads / side_by_side;
  const int64_t blocks_of_row = std::min<int64_t>((vecs + side_by_side - 1) / side_by_side, 65535);
  const int64_t blocks_of_rows =
      std::min((rows + rows_of_block - 1) / rows_of_block, std::max<int64_t>(most_blocks / blocks_of_row, 1));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks_of_rows), static_cast<unsigned>(blocks_of_row),
                        static_cast<unsigned>(std::clamp(segments, 1, 65535)));
  config.blockDim = dim3(side_by_side, rows_of_block);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <typename Kernel, typename... Arguments>
cudaError_t launch_quads(Kernel kernel, int64_t rows, int64_t hidden_size, cudaStream_t stream,
                         const Arguments&... arguments) {
  return launch_vecs(4, int64_t{1} << 30, 1, kernel, rows, hidden_size, stream, arguments...);
}

// For kernels that keep parameters between rows. `segments` becomes the third dimension of the grid.
template <typename Kernel, typename... Arguments>
cudaError_t launch_eights(Kernel kernel, int64_t rows, int64_t hidden_size, int segments, cudaStream_t stream,
                          const Arguments&... arguments) {
  return launch_vecs(8, kEightsBlocks, segments, kernel, rows, hidden_size, stream, arguments...);
}

}  // namespace fused_layernorm
