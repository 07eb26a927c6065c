// Backward with per-row weights (modulation by token). Nothing is summed over rows, so one kernel with all stages
// (GradStages) reads each row once. Stages and the dtypes beside x's are run-time values: the kernel waits for memory.
//
// grad_weight = grad_output * x_hat     grad_bias = grad_output     the gradient of x or z as in norm_backward.cu
#include "backward_rows.cuh"
#include "dispatch.cuh"
#include "kernel_params.h"
#include "launch_plan.h"
#include "launchers.h"
#include "reduce.cuh"
#include "vector_io.cuh"

namespace fused_layernorm {
namespace {

// A raw vector of x's type, or of a 16-bit type beside fp32 x, which fills the first half of the words: conversion
// waits until use, so that loads overlap.
template <typename scalar_t, int kVec>
struct LoadedVec {
  RawVec<scalar_t, kVec> raw;

  LoadedVec() = default;
  __device__ LoadedVec(const void* source, DType dtype, int64_t offset, int count) {
    if constexpr (sizeof(scalar_t) == 4) {
      if (dtype != DType::kFloat32) {
        raw = zero_vec<scalar_t, kVec>();
        const RawVec<uint16_t, kVec> narrow = load_vec<uint16_t, kVec>(static_cast<const uint16_t*>(source) + offset);
        memcpy(&raw, &narrow, sizeof(narrow));
        return;
      }
    }
    raw = load_some<scalar_t, kVec>(static_cast<const scalar_t*>(source) + offset, count);
  }

  template <typename T>
  __device__ void unpack_to(T (&values)[kVec], DType dtype) const {
    if constexpr (sizeof(scalar_t) == 4) {
      const auto narrow = [&](auto zero) {
        RawVec<decltype(zero), kVec> half;
        memcpy(&half, &raw, sizeof(half));
        unpack(half, values);
      };
      if (dtype == DType::kFloat16) return narrow(__half{});
      if (dtype == DType::kBFloat16) return narrow(__nv_bfloat16{});
    }
    unpack(raw, values);
  }
};

// Both sums over the threads of a row: a power of two up to 32, or the warps of a block.
template <typename T>
__device__ __forceinline__ Pair<T> sum_over_row(Pair<T> sums, int threads, Pair<T>* scratch) {
  const auto add_lanes = [&](int lanes) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      if (offset >= lanes) continue;
      sums.first += __shfl_xor_sync(0xffffffffu, sums.first, offset);
      sums.second += __shfl_xor_sync(0xffffffffu, sums.second, offset);
    }
  };
  add_lanes(threads);
  if (threads <= 32) return sums;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) scratch[threadIdx.x / 32] = sums;
  __syncthreads();
  sums = lane < threads / 32 ? scratch[lane] : Pair<T>{0, 0};
  add_lanes(32);
  return sums;
}

// A row has `threads` threads, a run-time value; a warp, or with kLanes 16 half a warp, has a contiguous slice of it,
// so that addresses of a thread's vectors differ by constants. kSame: all tensors except the statistics are of
// scalar_t. kManyTiles: rows of several tiles.
template <typename scalar_t, int kVec, int kLanes, bool kSame, bool kManyTiles>
__global__ void __launch_bounds__(per_row_bound(sizeof(scalar_t), kSame, kManyTiles))
    norm_backward_per_row_kernel(const __grid_constant__ KernelBackwardParams params,
                                 const __grid_constant__ GradStages stage, acc_type<scalar_t> inverse_n, int threads,
                                 int held) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kVecs = per_row_vecs(sizeof(scalar_t), kVec, kManyTiles);
  if (!kManyTiles) held = kVecs;
  using Vec = LoadedVec<scalar_t, kVec>;
  __shared__ Pair<acc_t> scratch[kMostPerRowThreads / 32];

  const int thread = static_cast<int>(threadIdx.x);
  const bool shares_block = threads <= 32;  // then threads is kLanes
  const int rank = shares_block ? thread % kLanes : thread;
  const int64_t row =
      shares_block ? static_cast<int64_t>(blockIdx.x) * (blockDim.x / kLanes) + thread / kLanes : blockIdx.x;
  if (row >= params.rows) return;  // rows that share a warp: as in norm_forward_kernel
  const int elements = static_cast<int>(params.hidden_size),
            own = (rank / kLanes * held * kLanes + rank % kLanes) * kVec;
  const int tile_elements = kManyTiles ? threads * held * kVec : 1;
  const int last_tile = kManyTiles ? (elements - 1) / tile_elements * tile_elements : 0;
  const int64_t x_row = params.x_strides.offset(row), grad_row = params.grad_output_strides.offset(row);
  const int64_t weight_row = row * params.weight_stride, result_row = row * params.hidden_size;
  const RowStats<scalar_t> stats(load_stats<scalar_t>(params, row), params);
  // fp32 weights beside 16-bit x are loaded at use, all others with x
  const bool is_wide = !kSame && sizeof(scalar_t) == 2 && params.weight_dtype == DType::kFloat32;
  const acc_t weight_offset = static_cast<acc_t>(params.weight_offset);

  Vec x_raw[kVecs], grad_raw[kVecs], weight_raw[kVecs];
  acc_t wdy[kVecs][kVec];
  const auto column = [&](int tile, int v) { return v < held ? tile + v * kLanes * kVec + own : elements; };
  const auto load = [&](int tile) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int col = column(tile, v), count = elements - col;
      if (count <= 0) continue;
      x_raw[v] = Vec(params.x, dtype_of<scalar_t>, x_row + col, count);
      grad_raw[v] = Vec(params.grad_output, stage.grad_output_dtype, grad_row + col, count);
      if (!is_wide) weight_raw[v] = Vec(params.weight, params.weight_dtype, weight_row + col, count);
    }
  };
  // Computes wdy of a vector; leaves x, grad and weight unpacked
  const auto multiply = [&](int tile, int v, acc_t(&x)[kVec], acc_t(&grad)[kVec], acc_t(&weight)[kVec]) {
    const int col = column(tile, v), count = elements - col;
    unpack(x_raw[v].raw, x);
    grad_raw[v].unpack_to(grad, stage.grad_output_dtype);
    if (is_wide) {
      load_vec_as<kVec>(weight, params.weight, DType::kFloat32, weight_row + col, count);
    } else {
      weight_raw[v].unpack_to(weight, params.weight_dtype);
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) wdy[v][i] = mul(grad[i], weight[i] + weight_offset);
  };
  const auto store = [&](void* target, DType dtype, int col, const acc_t(&values)[kVec]) {
    if constexpr (kSame) {
      store_vec(static_cast<scalar_t*>(target) + result_row + col, values);
    } else {
      store_vec_as<kVec>(target, dtype, result_row + col, values, elements - col, true);
    }
  };

  Pair<acc_t> sums{0, 0};
#pragma unroll 1
  for (int tile = 0; tile <= last_tile; tile += tile_elements) {
    load(tile);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int col = column(tile, v);
      if (col >= elements) continue;
      acc_t x[kVec], grad[kVec], weight[kVec];
      multiply(tile, v, x, grad, weight);
      if (params.grad_bias) store(params.grad_bias, params.grad_bias_dtype, col, grad);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const acc_t centered = stats.centered(x[i]);
        sums.first = fma(wdy[v][i], centered, sums.first);
        sums.second = add(sums.second, wdy[v][i]);
        grad[i] = mul(mul(grad[i], centered), stats.rstd);
      }
      if (params.grad_weight) store(params.grad_weight, params.grad_weight_dtype, col, grad);
    }
  }
  if (!params.grad_input && !stage.grad_residual && !params.grad_gate) return;
  const Pair<acc_t> terms = slope_and_level(sum_over_row(sums, threads, scratch), stats, params, inverse_n);

#pragma unroll 1
  for (int tile = last_tile; kManyTiles ? tile >= 0 : tile == 0;
       tile -= tile_elements) {  // last tile first: it is still in registers
    if (kManyTiles && tile != last_tile) load(tile);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int col = column(tile, v), count = elements - col;
      if (count <= 0) continue;
      acc_t values[kVec], x[kVec];
      if (kManyTiles && tile != last_tile) {
        acc_t grad[kVec], weight[kVec];
        multiply(tile, v, x, grad, weight);
      } else {
        unpack(x_raw[v].raw, x);
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        values[i] = mul(add(wdy[v][i], fma(stats.uncentered(x[i]), terms.first, terms.second)), stats.rstd);
      if (stage.grad_residual_out) {
        Vec(stage.grad_residual_out, dtype_of<scalar_t>, stage.grad_residual_out_strides.offset(row) + col, count)
            .unpack_to(x, dtype_of<scalar_t>);
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[i] = add(values[i], x[i]);
      }
      if (stage.grad_residual) store(stage.grad_residual, stage.grad_residual_dtype, col, values);
      if (stage.gate) {
        if (params.grad_gate) {
          Vec(stage.x, stage.grad_input_dtype, stage.x_strides.offset(row) + col, count)
              .unpack_to(x, stage.grad_input_dtype);
#pragma unroll
          for (int i = 0; i < kVec; ++i) x[i] = mul(x[i], values[i]);
          store(params.grad_gate, params.grad_gate_dtype, col, x);
        }
        Vec(stage.gate, stage.grad_input_dtype, row * stage.gate_stride + col, count)
            .unpack_to(x, stage.grad_input_dtype);
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[i] = mul(values[i], x[i]);
      }
      if (params.grad_input) store(params.grad_input, stage.grad_input_dtype, col, values);
    }
  }
}

}  // namespace

cudaError_t launch_backward_per_row(const KernelBackwardParams& params, const GradStages& stage, cudaStream_t stream) {
  bool is_same = true;
  const auto compare = [&](const void* tensor, DType dtype) { is_same &= !tensor || dtype == params.x_dtype; };
  compare(params.weight, params.weight_dtype);
  compare(params.grad_weight, params.grad_weight_dtype);
  compare(params.grad_bias, params.grad_bias_dtype);
  compare(params.grad_gate, params.grad_gate_dtype);
  compare(params.grad_output, stage.grad_output_dtype);
  compare(params.grad_input, stage.grad_input_dtype);
  compare(stage.gate, stage.grad_input_dtype);
  compare(stage.grad_residual, stage.grad_residual_dtype);
  return dispatch_type(params.x_dtype, [&](auto types) {
    using scalar_t = typename decltype(types)::scalar_t;
    const auto launch_vec = [&](auto vec) {
      constexpr int kVec = decltype(vec)::value;
      constexpr bool kMaySame = sizeof(scalar_t) == 2 && kVec > 1;
      constexpr int kShortLanes = sizeof(scalar_t) == 2 && kVec > 1 ? 16 : 32;
      const PerRowPlan plan(vecs_of<kVec>(params.hidden_size), sizeof(scalar_t), kVec, kShortLanes);
      const int block = std::max(plan.threads, kRunTimeBlock), rows = block / plan.threads;
      const ClusterLaunch launch((params.rows + rows - 1) / rows, block, 0, 1, stream);
      const auto pick = [&](auto same) {
        constexpr bool kSame = decltype(same)::value;
        return plan.has_tiles      ? norm_backward_per_row_kernel<scalar_t, kVec, 32, kSame, true>
               : plan.threads < 32 ? norm_backward_per_row_kernel<scalar_t, kVec, kShortLanes, kSame, false>
                                   : norm_backward_per_row_kernel<scalar_t, kVec, 32, kSame, false>;
      };
      const auto kernel = kMaySame && is_same ? pick(std::bool_constant<kMaySame>()) : pick(std::false_type());
      return cudaLaunchKernelEx(&launch.config, kernel, params, stage,
                                inverse_of<acc_type<scalar_t>>(params.hidden_size), plan.threads, plan.held);
    };
    // Rows of x and of all narrower tensors must be whole 16-byte vectors
    const int least = std::min({dtype_bytes(params.x_dtype), dtype_bytes(stage.grad_output_dtype),
                                dtype_bytes(params.weight_dtype), dtype_bytes(stage.grad_input_dtype)});
    constexpr int kWhole = sizeof(scalar_t) == 8 ? 1 : 16 / static_cast<int>(sizeof(scalar_t));
    if (params.hidden_size % (16 / least) != 0) return launch_vec(std::integral_constant<int, 1>());
    return launch_vec(std::integral_constant<int, kWhole>());
  });
}

}  // namespace fused_layernorm
