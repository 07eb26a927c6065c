// Elementwise kernels of any dtype and size: the columns and rows of a thread, and the matching launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <initializer_list>

#include "kernel_params.h"
#include "launch_plan.h"
#include "vector_io.cuh"

namespace fused_layernorm {

// Eight columns a thread. Calls prepare(col, count) once for the columns, and the function that it returns once a row:
// a thread keeps their weight and bias from row to row.
template <typename F>
__device__ __forceinline__ void for_each_of_columns(int64_t rows, int64_t hidden_size, F&& prepare) {
  for (int64_t col = 8 * (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x); col < hidden_size;
       col += int64_t{8} * gridDim.y * blockDim.x) {
    const auto of_row = prepare(col, static_cast<int>(min(hidden_size - col, int64_t{8})));
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < rows;
         row += static_cast<int64_t>(gridDim.x) * blockDim.y)
      of_row(row);
  }
}

// The same with nothing to keep. Calls f(row, col, count).
template <typename F>
__device__ __forceinline__ void for_each_eight(int64_t rows, int64_t hidden_size, F&& f) {
  for_each_of_columns(rows, hidden_size,
                      [&](int64_t col, int count) { return [&f, col, count](int64_t row) { f(row, col, count); }; });
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

// Rows and columns of an elementwise launch.
struct Extent {
  int64_t rows, hidden_size;
};
// All elements as one row if every tensor is contiguous: then also the vectors of odd rows are aligned.
inline Extent extent_of(int64_t rows, int64_t hidden_size, std::initializer_list<RowStrides> all_strides) {
  for (const RowStrides& strides : all_strides)
    if (!strides.is_even(rows) || strides.row_stride != hidden_size) return {rows, hidden_size};
  return {1, rows * hidden_size};
}

// Launches a kernel of eight columns a thread, of at most `most_blocks` blocks; `segments` becomes the third dimension
// of the grid.
template <typename Kernel, typename... Arguments>
cudaError_t launch_eights(const Extent& extent, int64_t most_blocks, int segments, Kernel kernel, cudaStream_t stream,
                          const Arguments&... arguments) {
  const int64_t vecs = vecs_of<8>(extent.hidden_size);
  int side_by_side = 1;
  while (side_by_side < kEightsThreads && side_by_side < vecs) side_by_side *= 2;
  const int rows_of_block = kEightsThreads / side_by_side;
  const int64_t blocks_of_row = std::min<int64_t>((vecs + side_by_side - 1) / side_by_side, 65535);
  const int64_t blocks_of_rows =
      std::min((extent.rows + rows_of_block - 1) / rows_of_block, std::max<int64_t>(most_blocks / blocks_of_row, 1));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks_of_rows), static_cast<unsigned>(blocks_of_row),
                        static_cast<unsigned>(std::clamp(segments, 1, 65535)));
  config.blockDim = dim3(side_by_side, rows_of_block);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// For kernels that keep parameters from row to row.
template <typename Kernel, typename... Arguments>
cudaError_t launch_by_columns(const Extent& extent, int segments, Kernel kernel, cudaStream_t stream,
                              const Arguments&... arguments) {
  return launch_eights(extent, kKeepingBlocks, segments, kernel, stream, arguments...);
}

// For kernels that take the extent as their first argument.
template <typename Kernel, typename... Arguments>
cudaError_t launch_eights(const Extent& extent, Kernel kernel, cudaStream_t stream, const Arguments&... arguments) {
  return launch_eights(extent, int64_t{1} << 30, 1, kernel, stream, extent, arguments...);
}

}  // namespace fused_layernorm
