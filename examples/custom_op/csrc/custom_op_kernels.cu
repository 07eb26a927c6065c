// The kernels and their launchers.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/dispatch.cuh"
#include "cuda/reduce.cuh"
#include "cuda/vector_io.cuh"
#include "custom_op.h"

namespace custom_op {
namespace {

using namespace fused_layernorm;

// A block is kRows rows of kLanes threads. A thread stays with its vector of columns, so that it reads the bias once,
// and walks over rows.
constexpr int kLanes = 32;
constexpr int kRows = 8;

template <typename T, int kVec>
__global__ void __launch_bounds__(kLanes* kRows) forward_kernel(ForwardParams params) {
  using acc_t = acc_type<T>;
  // Which columns
  const int64_t col = (static_cast<int64_t>(blockIdx.x) * kLanes + threadIdx.x) * kVec;
  if (col >= params.hidden_size) return;
  const acc_t scale = static_cast<acc_t>(params.scale);
  acc_t bias[kVec] = {};
  if (params.bias) unpack(load_vec<T, kVec>(static_cast<const T*>(params.bias) + col), bias);

  const int64_t step = static_cast<int64_t>(gridDim.y) * kRows;
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * kRows + threadIdx.y; row < params.rows; row += step) {
    const int64_t offset = row * params.hidden_size + col;
    acc_t values[kVec];
    unpack(load_vec<T, kVec>(static_cast<const T*>(params.x) + offset), values);
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = scale_bias_relu(values[i], scale, bias[i]);
    store_vec(static_cast<T*>(params.y) + offset, values);
  }
}

// gridDim.y is partial_rows(): each block leaves one partial sum of grad_bias for its columns, without atomics.
template <typename T, int kVec>
__global__ void __launch_bounds__(kLanes* kRows) backward_kernel(BackwardParams params) {
  using acc_t = acc_type<T>;
  __shared__ acc_t partial[kRows][kLanes * kVec];
  // Which columns. No early return: all threads meet at the barrier below.
  const int64_t col = (static_cast<int64_t>(blockIdx.x) * kLanes + threadIdx.x) * kVec;
  const acc_t scale = static_cast<acc_t>(params.scale);

  acc_t sums[kVec] = {};
  const int64_t step = static_cast<int64_t>(gridDim.y) * kRows;
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * kRows + threadIdx.y;
       row < params.rows && col < params.hidden_size; row += step) {
    const int64_t offset = row * params.hidden_size + col;
    acc_t gradients[kVec], y[kVec];
    unpack(load_vec<T, kVec>(static_cast<const T*>(params.grad_output) + offset), gradients);
    unpack(load_vec<T, kVec>(static_cast<const T*>(params.y) + offset), y);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const acc_t grad_z = relu_gradient(gradients[i], y[i]);
      sums[i] += grad_z;
      gradients[i] = grad_z * scale;
    }
    store_vec(static_cast<T*>(params.grad_x) + offset, gradients);
  }

  if (params.grad_bias_partial == nullptr) return;  // the same for the whole grid
#pragma unroll
  for (int i = 0; i < kVec; ++i) partial[threadIdx.y][threadIdx.x * kVec + i] = sums[i];
  __syncthreads();
  if (threadIdx.y != 0 || col >= params.hidden_size) return;
  acc_t* target = static_cast<acc_t*>(params.grad_bias_partial) + blockIdx.y * params.hidden_size + col;
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    acc_t sum = 0;
    for (int row = 0; row < kRows; ++row) sum += partial[row][threadIdx.x * kVec + i];
    target[i] = sum;
  }
}

// Row: the threads that share a row, RowThreads of reduce.cuh.
template <typename T, int kVec, typename Row, int kRowsOfBlock>
__global__ void __launch_bounds__(Row::kThreadsOfRow* kRowsOfBlock) sum_kernel(SumParams params) {
  using acc_t = acc_type<T>;
  __shared__ Pair<acc_t> scratch[kRowsOfBlock * Row::kWarps];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsOfBlock + Row::group();
  if (row >= params.rows) return;  // all threads of the row, which is who row_sum() asks for
  const T* x = static_cast<const T*>(params.x) + row * params.hidden_size;

  // Two strands, as row_sum() adds up two numbers at the price of one, and additions then wait less for each other.
  Pair<acc_t> sum{0, 0};
  constexpr int kStep = Row::kThreadsOfRow * kVec;
  for (int64_t col = Row::rank() * kVec; col < params.hidden_size; col += kStep) {
    acc_t values[kVec];
    unpack(load_vec<T, kVec>(x + col), values);
#pragma unroll
    for (int i = 0; i < kVec; ++i) (i % 2 == 0 ? sum.first : sum.second) += values[i];
  }
  sum = row_sum<Row>(sum, scratch);
  if (Row::rank() == 0) static_cast<T*>(params.y)[row] = narrow<T>(sum.first + sum.second);
}

// ---- launchers ------------------------------------------------------------------------------------------------------

template <typename T, int vec>
struct Vectors {
  using scalar_t = T;
  static constexpr int kVec = vec;
};

// Calls f(Vectors<T, kVec>{}) with 16-byte vectors where rows are made of them and pointers lie at multiples of 16
// bytes (a view such as x[1:] does not), else element by element.
template <typename F>
int dispatch(DType dtype, int64_t hidden_size, std::initializer_list<const void*> pointers, F&& f) {
  return dispatch_types(dtype, dtype, [&](auto types) {
    using T = typename decltype(types)::scalar_t;
    constexpr int kVec = 16 / static_cast<int>(sizeof(T));
    bool whole = hidden_size % kVec == 0;
    for (const void* pointer : pointers) whole &= reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
    if (whole)
      f(Vectors<T, kVec>{});
    else
      f(Vectors<T, 1>{});
    return cudaGetLastError();
  });
}

dim3 grid_of(int64_t hidden_size, int vec, int64_t row_blocks) {
  const int64_t cols = static_cast<int64_t>(kLanes) * vec;
  return dim3(static_cast<unsigned>((hidden_size + cols - 1) / cols), static_cast<unsigned>(row_blocks));
}

}  // namespace

int launch_cuda(const ForwardParams& params, CUstream_st* stream) {
  return dispatch(params.dtype, params.hidden_size, {params.x, params.bias, params.y}, [&](auto vectors) {
    using V = decltype(vectors);
    const int64_t row_blocks = std::min<int64_t>((params.rows + kRows - 1) / kRows, 65535);  // what gridDim.y can be
    forward_kernel<typename V::scalar_t, V::kVec>
        <<<grid_of(params.hidden_size, V::kVec, row_blocks), dim3(kLanes, kRows), 0, stream>>>(params);
  });
}

int launch_cuda(const BackwardParams& params, CUstream_st* stream) {
  return dispatch(params.dtype, params.hidden_size, {params.grad_output, params.y, params.grad_x}, [&](auto vectors) {
    using V = decltype(vectors);
    const dim3 blocks = grid_of(params.hidden_size, V::kVec, partial_rows(params.rows));
    backward_kernel<typename V::scalar_t, V::kVec><<<blocks, dim3(kLanes, kRows), 0, stream>>>(params);
  });
}

int launch_cuda(const SumParams& params, CUstream_st* stream) {
  return dispatch(params.dtype, params.hidden_size, {params.x}, [&](auto vectors) {
    using V = decltype(vectors);
    using T = typename V::scalar_t;
    const unsigned rows = static_cast<unsigned>(params.rows);
    if (params.hidden_size <= 1024)  // a warp a row
      sum_kernel<T, V::kVec, RowThreads<32>, 8><<<(rows + 7) / 8, 256, 0, stream>>>(params);
    else
      sum_kernel<T, V::kVec, RowThreads<256>, 1><<<rows, 256, 0, stream>>>(params);
  });
}

}  // namespace custom_op
