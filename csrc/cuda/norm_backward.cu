// Backward of LayerNorm and RMSNorm.
//
//   wdy = (weight+weight_offset)*grad_output     c1 = sum(x_hat*wdy)/N     c2 = is_rms_norm ? 0 : sum(wdy)/N
//   grad_input = (wdy - x_hat*c1 - c2)*rstd      grad_weight = sum over rows(grad_output*x_hat)
//                                                grad_bias   = sum over rows(grad_output)
//
// Two strategies (launch_plan.h says when; a third, for rows that the whole card cannot hold, is in norm_huge.cu).
// Fused (backward_fused.cuh): persistent blocks iterate over rows, read x and grad_output once, keep the weight
// gradients of their rows in registers and write one partial sum a block. Split, without stages but a residual: one
// launch with blocks of rows, for grad_input, and blocks of columns, for the weight gradients. Both strategies take the
// same steps per row in the same order with pinned rounding, so grad_input has the same bits. Partial sums are added in
// a fixed order: no atomics, no dependence on timing.
#include <climits>

#include "backward_rows.cuh"
#include "dispatch.cuh"
#include "kernel_params.h"
#include "launch_plan.h"
#include "launchers.h"
#include "reduce.cuh"
#include "vector_io.cuh"

namespace fused_layernorm {
namespace {

// A launch of the split strategy: workspace size, grid and kernel arguments are derived from it. The number of threads
// is a run-time value, so that plans with the same number of vectors a thread share a kernel. What the host can compute
// is here: few rows wait for every instruction (benchmarks/tuning.md, "Backward of small problems").
struct SplitLaunch {
  int threads;           // for a slice of a row: the plan's
  int row_threads;       // for a row
  int inverse_of_row;    // for split_quotient()
  int inverse_of_slice;  // likewise
  int rows;              // per block
  int lanes;             // of a warp, that share a row
  int warp_columns;      // of a warp, adjacent; of a row's threads where they are less
  int last_warp;         // its first thread in a slice, from which on threads take what is left of the slice
  int slice;             // columns of a slice. All slices of a row, one for each block of the fused strategy's cluster,
                         // are in one block
  int last_tile;         // the first column of a row's last tile, where the registers of its threads do not hold it
  int64_t row_blocks;    // blocks of rows
  int blocks;            // all blocks of columns
  int column_lane_bits;  // log2 of the number of adjacent threads along a row, in a block of columns
  int column_part_bits;  // log2 of the number of threads that add up one sum at the end
  int column_tiles;      // blocks of columns along a row
  int column_splits;     // blocks of columns along the rows, each for split_rows rows
  int64_t split_rows;
  bool has_even_rows;             // of all tensors, so that a thread steps from row to row in 32 bits
  int partials;                   // partial sums of the weight gradients; 0: the gradients are written directly
  void* grad_input;               // or the gradient of the residual, which is the same
  const void* grad_residual_out;  // as in GradStages
  RowStrides grad_residual_out_strides;
};

// Scalars of a launch in the precision of the sums.
template <typename acc_t>
struct SplitScalars {
  acc_t inverse_n, weight_offset;  // weight_offset: 1 without weight
};

// ---- split ---------------------------------------------------------------------------------------------------------

// thread / threads, both up to 512, by a multiplication: a division is 20 instructions.
constexpr int split_inverse(int threads) { return ((1 << 20) + threads - 1) / threads; }
__device__ __forceinline__ int split_quotient(int thread, int inverse) {
  return static_cast<int>(static_cast<unsigned>(thread) * static_cast<unsigned>(inverse) >> 20);
}

// Both sums over a row, in the order of the fused kernel. Called by all threads of the `group`-th row of a block.
template <typename T>
__device__ __forceinline__ Pair<T> split_row_sum(Pair<T> value, Pair<T>* scratch, const SplitLaunch& launch, int rank,
                                                 int group) {
  if (launch.row_threads > 32) {
    const int warps = launch.row_threads / 32;
    scratch += group * warps;
    share_in_row(value, scratch, group, rank / 32, launch.row_threads);
    return sum_of_warps(scratch, warps);
  }
  if (launch.row_threads == 32) return row_sum<RowThreads<32>>(value, scratch);
  if (launch.row_threads == 16) return row_sum<RowThreads<16>>(value, scratch);
  return row_sum<RowThreads<8>>(value, scratch);
}

// grad_input of one row, tile by tile if the registers do not hold it. Where the fused kernel shares the row in a
// cluster, this block has the threads of the whole cluster. `rank`: of the thread in its row, which is the `group`-th
// of the block.
template <typename scalar_t, int kVecs, int kVec, bool kAdds>
__device__ __forceinline__ void backward_of_row(const KernelBackwardParams& params, int64_t row,
                                                const SplitLaunch& launch, SplitScalars<acc_type<scalar_t>> scalars,
                                                Pair<acc_type<scalar_t>>* scratch, int rank, int group) {
  using acc_t = acc_type<scalar_t>;
  // The columns of this thread: `first`, and one for each `step`, less than `end`
  const int step = launch.lanes * kVec, tile_columns = launch.threads * kVec * kVecs;
  const int of_slice = split_quotient(rank, launch.inverse_of_slice);
  const int of_lanes = rank - of_slice * launch.threads;
  const int hidden_size = static_cast<int>(params.hidden_size);
  const int slice_end = min((of_slice + 1) * launch.slice, hidden_size);
  const int warp_first = of_slice * launch.slice + of_lanes / 32 * launch.warp_columns;
  const int first = warp_first + (of_lanes & (launch.lanes - 1)) * kVec;
  const int end = of_lanes >= launch.last_warp ? slice_end : min(warp_first + launch.warp_columns, slice_end);

  const auto offset = [&](const RowStrides& strides) {
    return launch.has_even_rows ? row * strides.row_stride : strides.offset(row);
  };
  const scalar_t* x_row = static_cast<const scalar_t*>(params.x) + offset(params.x_strides) + first;
  const scalar_t* grad_row =
      static_cast<const scalar_t*>(params.grad_output) + offset(params.grad_output_strides) + first;
  const RowStats<scalar_t> stats(load_stats<scalar_t, true>(params, row), params);

  // weight is loaded together with x if registers allow it: widened, or as it is
  constexpr bool kIsHalf = sizeof(scalar_t) == 2;
  constexpr bool kKeepsValues = kVec * sizeof(scalar_t) >= 16 && kVecs * kVec <= (kIsHalf && kAdds ? 8 : 16);
  constexpr bool kKeepsRaw = kVec * sizeof(scalar_t) >= 16 && kVecs * kVec * sizeof(scalar_t) <= 64 && !kKeepsValues;
  const bool is_wide = kIsHalf && params.weight_dtype == DType::kFloat32;
  const int weight_end = params.weight ? end : 0;
  RawVec<scalar_t, kVec> x_raw[kVecs], grad_raw[kVecs], weight_raw[kKeepsRaw ? kVecs : 1];
  acc_t kept_weight[kKeepsValues ? kVecs : 1][kVec];
  const auto load_weight_as = [&](auto* weight, int col) {
    using weight_t = std::remove_const_t<std::remove_pointer_t<decltype(weight)>>;
    return load_some<weight_t, kVec, true>(weight + col, weight_end - col);
  };
  const auto load_narrow = [&](int col) { return load_weight_as(static_cast<const scalar_t*>(params.weight), col); };
  const auto load_wide = [&](int col) { return load_weight_as(static_cast<const float*>(params.weight), col); };
  const auto load = [&](int tile) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int at = tile + v * step;
      x_raw[v] = load_some<scalar_t, kVec, true>(x_row + at, end - first - at);
      grad_raw[v] = load_some<scalar_t, kVec, true>(grad_row + at, end - first - at);
      if constexpr (kKeepsRaw)
        if (!is_wide) weight_raw[v] = load_narrow(first + at);
    }
    if constexpr (kKeepsValues) {
      const auto keep = [&](auto&& load_raw) {
#pragma unroll
        for (int v = 0; v < kVecs; ++v) unpack(load_raw(first + tile + v * step), kept_weight[v]);
      };
      if (is_wide)
        keep(load_wide);
      else
        keep(load_narrow);
#pragma unroll
      for (int v = 0; v < kVecs; ++v)
#pragma unroll
        for (int i = 0; i < kVec; ++i) kept_weight[v][i] += scalars.weight_offset;
    }
  };
  const auto weight_of = [&](acc_t(&weight)[kVec], int v, int col) {
    if constexpr (kKeepsValues) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) weight[i] = kept_weight[v][i];
      return;
    }
    if (is_wide) {
      unpack(load_wide(col), weight);
    } else if constexpr (kKeepsRaw) {
      unpack(weight_raw[v], weight);
    } else {
      unpack(load_narrow(col), weight);
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) weight[i] += scalars.weight_offset;
  };
  Pair<acc_t> sums{0, 0};
  acc_t x[kVec], grad[kVec], weight[kVec];
#pragma unroll 1
  for (int tile = 0; tile <= launch.last_tile; tile += tile_columns) {
    load(tile);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int col = first + tile + v * step;
      if (col >= end) continue;
      unpack(x_raw[v], x);
      unpack(grad_raw[v], grad);
      weight_of(weight, v, col);
      add_to_row(sums, stats, x, grad, weight);
    }
  }
  // The gradient of the residual is loaded before the sums are exchanged where registers allow it
  constexpr bool kAddsEarly = kAdds && (sizeof(scalar_t) == 4 || kVecs == 1);
  RawVec<scalar_t, kVec> residual_grad[kAddsEarly ? kVecs : 1];
  const int residual_end = kAdds && launch.grad_residual_out ? end : 0;
  const scalar_t* residual_grad_row = static_cast<const scalar_t*>(launch.grad_residual_out) +
                                      (residual_end ? offset(launch.grad_residual_out_strides) : 0);
  const auto load_residual_grad = [&](int col) {
    return load_some<scalar_t, kVec, true>(residual_grad_row + col, residual_end - col);
  };
  if constexpr (kAddsEarly) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) residual_grad[v] = load_residual_grad(first + launch.last_tile + v * step);
  }
  sums = split_row_sum(sums, scratch, launch, rank, group);
  const Pair<acc_t> row_terms = slope_and_level(sums, stats, params, scalars.inverse_n);

  optimization_barrier(x_raw);
  optimization_barrier(grad_raw);
  scalar_t* const result_row = static_cast<scalar_t*>(launch.grad_input) + row * params.hidden_size;
#pragma unroll 1
  for (int tile = launch.last_tile; tile >= 0; tile -= tile_columns) {  // last tile first: it is still in registers
    if (tile != launch.last_tile) load(tile);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int col = first + tile + v * step;
      if (col >= end) continue;
      unpack(x_raw[v], x);
      unpack(grad_raw[v], grad);
      weight_of(weight, v, col);
      acc_t values[kVec];
      grad_input_of(values, stats, row_terms, x, grad, weight);
      if constexpr (kAdds) {
        unpack(kAddsEarly && tile == launch.last_tile ? residual_grad[kAddsEarly ? v : 0] : load_residual_grad(col), x);
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[i] = add(values[i], x[i]);
      }
      store_some(result_row + col, values, end - col);
    }
  }
}

// Sums in shared memory, of a block of columns: [row_lanes][kColumnPadding + 2 * columns]. Threads that read
// neighbouring rows of it, and those that write vectors, use different banks.
constexpr int kColumnPadding = 4;

// The weight gradients of 2^column_lane_bits vectors of columns over some of the rows. As many threads are adjacent
// along a row; the others of the block are adjacent along the rows. Their sums are added in a fixed order.
template <typename scalar_t, int kVec, int kBlock>
__device__ __forceinline__ void backward_of_columns(const KernelBackwardParams& params, const SplitLaunch& launch,
                                                    acc_type<scalar_t>* scratch) {
  using acc_t = acc_type<scalar_t>;
  const int lane_bits = launch.column_lane_bits, lanes = 1 << lane_bits, thread = static_cast<int>(threadIdx.x);
  const int split = launch.column_splits > 1 ? static_cast<int>(blockIdx.x) / launch.column_tiles : 0;
  const int tile = static_cast<int>(blockIdx.x) - split * launch.column_tiles;
  const int lane = thread & (lanes - 1), row_lane = thread >> lane_bits, row_lanes = kBlock >> lane_bits;
  const int columns = lanes * kVec;
  const unsigned hidden_size = static_cast<unsigned>(params.hidden_size);  // less than 2^31
  const unsigned first_column = static_cast<unsigned>(tile) * columns, col = first_column + lane * kVec;
  const int count = static_cast<int>(hidden_size - col);
  const int64_t first_row = split * launch.split_rows;
  const int rows = static_cast<int>(min(launch.split_rows, params.rows - first_row));

  acc_t grad_weight[kVec] = {}, grad_bias[kVec] = {};
  const scalar_t* x_column = static_cast<const scalar_t*>(params.x) + col;
  const scalar_t* grad_column = static_cast<const scalar_t*>(params.grad_output) + col;
  // Adds up to kAtOnce rows of this thread, from the row-th of the block on, which is at x_at and grad_at
  const auto add_rows = [&](auto at_once, int row, const scalar_t* x_at, int x_step, const scalar_t* grad_at,
                            int grad_step) {
    constexpr int kAtOnce = decltype(at_once)::value;
    RawVec<scalar_t, kVec> x_raw[kAtOnce], grad_raw[kAtOnce];
    SavedStats<acc_t> saved[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i > 0 && row + i * row_lanes >= rows) break;
      x_raw[i] = load_some<scalar_t, kVec, true>(x_at + i * x_step, kVec > 2 ? kVec : count);
      grad_raw[i] = load_some<scalar_t, kVec, true>(grad_at + i * grad_step, kVec > 2 ? kVec : count);
      saved[i] = load_stats<scalar_t, true>(params, first_row + row + i * row_lanes);
    }
    asm volatile("" ::: "memory");  // all loads first
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (i > 0 && row + i * row_lanes >= rows) break;
      acc_t x[kVec], grad[kVec];
      unpack(x_raw[i], x);
      unpack(grad_raw[i], grad);
      add_to_columns(grad_weight, grad_bias, RowStats<scalar_t>(saved[i], params), x, grad);
    }
  };
  const int end = count > 0 ? rows : 0;
  if (launch.has_even_rows) {
    constexpr int kAtOnce = kColumnRowsAtOnce;
    const scalar_t* x_at = x_column + (first_row + row_lane) * params.x_strides.row_stride;
    const scalar_t* grad_at = grad_column + (first_row + row_lane) * params.grad_output_strides.row_stride;
    const int x_step = row_lanes * static_cast<int>(params.x_strides.row_stride);
    const int grad_step = row_lanes * static_cast<int>(params.grad_output_strides.row_stride);
#pragma unroll 1
    for (int row = row_lane; row < end; row += kAtOnce * row_lanes) {
      add_rows(std::integral_constant<int, kAtOnce>(), row, x_at, x_step, grad_at, grad_step);
      x_at += kAtOnce * x_step;
      grad_at += kAtOnce * grad_step;
    }
  } else {
#pragma unroll 1
    for (int row = row_lane; row < end; row += row_lanes)
      add_rows(std::integral_constant<int, 1>(), row, x_column + params.x_strides.offset(first_row + row), 0,
               grad_column + params.grad_output_strides.offset(first_row + row), 0);
  }

  // Reduce along the rows: `parts` adjacent threads take turns with the sums of a column, then add theirs
  const int sums = 2 * columns, pitch = sums + kColumnPadding;
  const int groups = min(rows, row_lanes);
  if (row_lane < groups) {
    store_vec(scratch + row_lane * pitch + lane * kVec, grad_weight);
    store_vec(scratch + row_lane * pitch + columns + lane * kVec, grad_bias);
  }
  __syncthreads();
  const int part_bits = launch.column_part_bits, parts = 1 << part_bits;
  const int part = thread & (parts - 1);
#pragma unroll 1
  for (int index = thread >> part_bits; index < sums; index += kBlock >> part_bits) {
    acc_t sum = 0;
#pragma unroll 4
    for (int group = part; group < groups; group += parts) sum += scratch[group * pitch + index];
    for (int offset = 1; offset < parts; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    const bool of_weight = index < columns;
    const unsigned at = first_column + (of_weight ? index : index - columns);
    void* gradient = of_weight ? params.grad_weight : params.grad_bias;
    if (part > 0 || !gradient || at >= hidden_size) continue;
    if (launch.column_splits > 1) {
      static_cast<acc_t*>(params.workspace)[(2 * split + !of_weight) * params.hidden_size + at] = sum;
    } else {
      store_gradient(params, gradient, of_weight ? params.grad_weight_dtype : params.grad_bias_dtype, at, sum);
    }
  }
}

template <typename scalar_t, int kVecs, int kVec, int kBlock, bool kAdds>
__global__ void __launch_bounds__(kBlock, kSplitBlocksPerSm<kVecs, kBlock>)
    norm_backward_split_kernel(const __grid_constant__ KernelBackwardParams params,
                               const __grid_constant__ SplitLaunch launch, SplitScalars<acc_type<scalar_t>> scalars) {
  using acc_t = acc_type<scalar_t>;
  __shared__ union {
    Pair<acc_t> rows[kBlock / 32];
    alignas(16) acc_t columns[2 * kBlock * kVec + kColumnPadding * kBlock / kLeastColumnLanes<kVec, kBlock>];
  } scratch;
  wait_for_previous_kernel();

  // Columns first: they take longest, and blocks of rows fill the gaps
  const int block = static_cast<int>(blockIdx.x) - launch.blocks;
  if (block < 0) {
    backward_of_columns<scalar_t, kVec, kBlock>(params, launch, scratch.columns);
  } else {
    const int group = split_quotient(static_cast<int>(threadIdx.x), launch.inverse_of_row);
    const int rank = static_cast<int>(threadIdx.x) - group * launch.row_threads;
    const int64_t row = int64_t{block} * launch.rows + group;
    if (group >= launch.rows || row >= params.rows) return;  // with 96 threads a row some threads have none
    backward_of_row<scalar_t, kVecs, kVec, kAdds>(params, row, launch, scalars, scratch.rows, rank, group);
  }
}

// ---- finalize ------------------------------------------------------------------------------------------------------

// Reduces the `partials` partial sums [grad_weight, grad_bias, with a gate grad_gate] of a segment, which are adjacent
// or interleaved as the segments: each of kRows threads takes every kRows-th partial sum, in the order of blocks.
template <typename acc_t, int kRows, int kVec>
__global__ void __launch_bounds__(kFinalizeColumns* kRows)
    norm_backward_finalize_kernel(const __grid_constant__ KernelBackwardParams params, int partials) {
  __shared__ acc_t scratch[kRows][kVec][kFinalizeColumns];
  wait_for_previous_kernel();
  const int which = static_cast<int>(blockIdx.y), sums = static_cast<int>(gridDim.y);
  void* gradient = which == 0 ? params.grad_weight : which == 1 ? params.grad_bias : params.grad_gate;
  const DType dtype = which == 0   ? params.grad_weight_dtype
                      : which == 1 ? params.grad_bias_dtype
                                   : params.grad_gate_dtype;
  if (!gradient) return;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kFinalizeColumns + threadIdx.x) * kVec;
  acc_t sum[kVec] = {};
  if (column < params.hidden_size) {
    const int64_t before = static_cast<int64_t>(blockIdx.z) * (params.interleaves ? 1 : partials) * sums + which;
    const int64_t distance = (params.interleaves ? gridDim.z : 1) * sums * params.hidden_size;
    const acc_t* partial = static_cast<const acc_t*>(params.workspace) + before * params.hidden_size + column;
#pragma unroll 4
    for (int index = threadIdx.y; index < partials; index += kRows) {
      acc_t found[kVec];
      unpack(load_vec<acc_t, kVec, true>(partial + index * distance), found);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum[i] += found[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) scratch[threadIdx.y][i][threadIdx.x] = sum[i];
  __syncthreads();
  if (threadIdx.y > 0 || column >= params.hidden_size) return;
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
#pragma unroll
    for (int row = 1; row < kRows; ++row) sum[i] += scratch[row][i][threadIdx.x];
    const int64_t at = blockIdx.z * params.hidden_size + column + i;
    if (which == 2)
      store_as(gradient, dtype, at, sum[i]);  // `accumulate` does not apply to grad_gate
    else
      store_gradient(params, gradient, dtype, at, sum[i]);
  }
}

template <typename T>
cudaError_t finalize_weight_gradients(const KernelBackwardParams& params, int partials, int sums, cudaStream_t stream) {
  const int segments = std::max(params.segments, 1);
  partials /= segments;
  const auto launch = [&](auto rows, auto vec) {
    constexpr int kRows = decltype(rows)::value, kVec = decltype(vec)::value;
    const int64_t vecs = vecs_of<kVec>(params.hidden_size);
    const OverlappedLaunch sum(
        dim3(static_cast<unsigned>((vecs + kFinalizeColumns - 1) / kFinalizeColumns), sums, segments),
        dim3(kFinalizeColumns, kRows), stream);
    return cudaLaunchKernelEx(&sum.config, norm_backward_finalize_kernel<T, kRows, kVec>, params, partials);
  };
  using std::integral_constant;
  if (partials > kFewPartials) return launch(integral_constant<int, kFinalizeRows>{}, integral_constant<int, 1>{});
  if constexpr (sizeof(T) == 4)
    if (params.hidden_size >= kFinalizeWideColumns && params.hidden_size % 4 == 0)
      return launch(integral_constant<int, 4>{}, integral_constant<int, 4>{});
  return launch(integral_constant<int, 4>{}, integral_constant<int, 1>{});
}

// ---- host ----------------------------------------------------------------------------------------------------------

// Halved while a thread has more than one row, and until a block has kMostColumnLanes, as long as blocks of columns
// leave SMs for those of rows.
template <typename Plan>
int column_lanes(int64_t vec_count, int64_t rows, int multiprocessors) {
  constexpr int kThreads = kSplitThreads<Plan>;
  const auto may_halve = [&](int lanes) {
    if (lanes == kLeastColumnLanes<Plan::kVec, kThreads>) return false;
    const int row_lanes = kThreads / lanes;
    const int64_t tiles = (vec_count + lanes / 2 - 1) / (lanes / 2);
    const int64_t most_tiles = multiprocessors / (kReadsElements<Plan> || lanes == 2 ? 2 : 1);
    if (lanes > kMostColumnLanes<Plan::kVec, kThreads>) return row_lanes < rows || tiles <= most_tiles;
    return row_lanes < rows && tiles <= most_tiles && rows * multiprocessors > kRowsOfFullCard * row_lanes * tiles;
  };
  int lanes = kThreads;
  while (may_halve(lanes)) lanes /= 2;
  return lanes;
}

template <typename scalar_t, typename Plan>
SplitLaunch split_launch(const KernelBackwardParams& params, const GradStages& stages, const DeviceFacts& device) {
  SplitLaunch launch{};
  const int64_t vec_count = vecs_of<Plan::kVec>(params.hidden_size);
  // As the fused strategy plans it, so that the sums of a row have the same order
  const FusedRowsPlan plan(Plan{}, vec_count, 1, device.max_cluster, limiting_bytes<Plan>(params, stages));
  const int slices = plan.cluster * plan.threads <= kSplitThreads<Plan> ? plan.cluster : 1;
  const int tile_columns = plan.threads * Plan::kVec * Plan::kVecs, hidden_size = static_cast<int>(params.hidden_size);
  launch.threads = plan.threads;
  launch.lanes = std::min(plan.threads, 32);
  launch.warp_columns = plan.warp_slice * Plan::kVec;
  launch.slice = slices > 1 ? plan.slice * Plan::kVec : hidden_size;
  if (slices == 1) launch.last_tile = (hidden_size - 1) / tile_columns * tile_columns;
  // In rows of several tiles a warp's part of a tile is all that its registers hold
  launch.last_warp = launch.last_tile > 0 ? 0 : (plan.threads - 1) / 32 * 32;
  launch.row_threads = plan.threads * slices;
  launch.inverse_of_row = split_inverse(launch.row_threads);
  launch.inverse_of_slice = split_inverse(launch.threads);
  launch.rows = kSplitThreads<Plan> / launch.row_threads;
  if (Plan::kVecs > 2) {  // few of such rows gain from an SM each
    const int64_t rows_of_sm = (params.rows + device.multiprocessors - 1) / device.multiprocessors;
    launch.rows = static_cast<int>(std::min<int64_t>(launch.rows, rows_of_sm));
  }
  launch.grad_residual_out = stages.grad_residual_out;
  launch.grad_residual_out_strides = stages.grad_residual_out_strides;
  const auto has_even_rows = [&](const RowStrides& strides) {
    return strides.is_even(params.rows) && strides.row_stride < INT_MAX / (kColumnRowsAtOnce * kSplitThreads<Plan>);
  };
  launch.has_even_rows = has_even_rows(params.x_strides) && has_even_rows(params.grad_output_strides) &&
                         (!stages.grad_residual_out || has_even_rows(stages.grad_residual_out_strides));
  launch.grad_input = params.grad_input ? params.grad_input : stages.grad_residual;
  if (launch.grad_input) launch.row_blocks = (params.rows + launch.rows - 1) / launch.rows;
  if (params.grad_weight || params.grad_bias) {
    const int lanes = column_lanes<Plan>(vec_count, params.rows, device.multiprocessors);
    while (1 << launch.column_lane_bits < lanes) ++launch.column_lane_bits;
    while (2 * Plan::kVec * lanes << launch.column_part_bits < kSplitThreads<Plan>) ++launch.column_part_bits;
    launch.column_tiles = static_cast<int>((vec_count + lanes - 1) / lanes);
    const int64_t rows_at_least = static_cast<int64_t>(kSplitThreads<Plan> / lanes) * kColumnRowsPerThread;
    const int64_t splits =
        std::clamp<int64_t>(kColumnBlocks / launch.column_tiles, 1, (params.rows + rows_at_least - 1) / rows_at_least);
    launch.column_splits = static_cast<int>(splits);
    launch.split_rows = (params.rows + splits - 1) / splits;
    launch.blocks = static_cast<int>(launch.column_tiles * splits);
    launch.partials = splits > 1 ? static_cast<int>(splits) : 0;
  }
  return launch;
}

// Calls f(types, plan, adds, launch); adds: a constant, whether there is a residual.
template <typename F>
cudaError_t dispatch_split(const KernelBackwardParams& params, const GradStages& stages, F&& f) {
  DeviceFacts facts;
  const cudaError_t error = device_facts(facts);
  if (error != cudaSuccess) return error;
  return dispatch_type(params.x_dtype, [&](auto types) {
    using scalar_t = typename decltype(types)::scalar_t;
    const auto launch = [&](auto adds) {
      return [&, adds](auto plan) {
        return f(types, plan, adds, split_launch<scalar_t, decltype(plan)>(params, stages, facts));
      };
    };
    if constexpr (sizeof(scalar_t) <= 4)
      if (stages.any())
        return dispatch_plan<LoadGradLadder<scalar_t>>(params.hidden_size, facts.max_cluster, launch(std::true_type()));
    return dispatch_rows<BackwardLadder<scalar_t>, RaggedBackwardLadder<scalar_t>, scalar_t>(
        params.hidden_size, facts.max_cluster, launch(std::false_type()));
  });
}

cudaError_t call_fused(const KernelBackwardParams& params, const GradStages& stages, FusedCall& call) {
  switch (params.x_dtype) {
    case DType::kFloat16: return backward_fused<__half>(params, stages, call);
    case DType::kBFloat16: return backward_fused<__nv_bfloat16>(params, stages, call);
    case DType::kFloat32: return backward_fused<float>(params, stages, call);
    default: return cudaSuccess;
  }
}

// What the fused strategy would launch: `running` is 0 if it does not take the call.
FusedCall fused_call(const KernelBackwardParams& params, const GradStages& stages) {
  FusedCall call;
  if (call_fused(params, stages, call) != cudaSuccess) call.running = 0;
  return call;
}

// Only the fused strategy takes segments of rows; for the others each segment is a separate problem.
bool goes_by_segments(const KernelBackwardParams& params, const GradStages& stages) {
  return params.segments > 1 && fused_call(params, stages).running == 0;
}

bool wants_columns(const KernelBackwardParams& params) {
  return params.grad_weight || params.grad_bias || params.grad_gate;
}

cudaError_t launch_split(const KernelBackwardParams& params, const GradStages& stages, cudaStream_t stream) {
  return dispatch_split(params, stages, [&](auto types, auto plan, auto adds, const SplitLaunch& launch) {
    using scalar_t = typename decltype(types)::scalar_t;
    using acc_t = acc_type<scalar_t>;
    using Plan = decltype(plan);
    const OverlappedLaunch split(dim3(static_cast<unsigned>(launch.blocks + launch.row_blocks)),
                                 dim3(kSplitThreads<Plan>), stream);
    const auto kernel =
        norm_backward_split_kernel<scalar_t, Plan::kVecs, Plan::kVec, kSplitThreads<Plan>, decltype(adds)::value>;
    const SplitScalars<acc_t> scalars{inverse_of<acc_t>(params.hidden_size),
                                      params.weight ? static_cast<acc_t>(params.weight_offset) : acc_t(1)};
    const cudaError_t error = cudaLaunchKernelEx(&split.config, kernel, params, launch, scalars);
    if (error != cudaSuccess || launch.partials == 0) return error;
    return finalize_weight_gradients<acc_t>(params, launch.partials, 2, stream);
  });
}

// More rows than a grid has blocks: the split strategy in several launches, columns first.
cudaError_t launch_many_rows(const KernelBackwardParams& params, const GradStages& none, cudaStream_t stream) {
  KernelBackwardParams columns = params;
  columns.grad_input = nullptr;
  cudaError_t error = cudaSuccess;
  if (wants_columns(params)) error = launch_split(columns, none, stream);
  for (int64_t first = 0; first < params.rows && error == cudaSuccess; first += kMaxRowsOfLaunch) {
    KernelBackwardParams rows = part_of(params, first, std::min(kMaxRowsOfLaunch, params.rows - first));
    rows.grad_weight = rows.grad_bias = nullptr;
    error = launch_split(rows, none, stream);
  }
  return error;
}

}  // namespace

cudaError_t launch_backward_finalize(const KernelBackwardParams& params, int partials, int sums, cudaStream_t stream) {
  return params.x_dtype == DType::kFloat64 ? finalize_weight_gradients<double>(params, partials, sums, stream)
                                           : finalize_weight_gradients<float>(params, partials, sums, stream);
}

bool takes_stages(const KernelBackwardParams& params, const GradStages& stages) {
  return fused_call(params, stages).running > 0 || (stages.any() && takes_split(params, stages));
}

int64_t backward_workspace(const KernelBackwardParams& params, const GradStages& stages) {
  const int sums = stages.gate ? 3 : 2;
  const auto bytes_of = [&](int partials) {
    return partials * sums * params.hidden_size * dtype_bytes(accumulation_dtype(params.x_dtype));
  };
  if (!stages.any() && goes_by_segments(params, stages)) return backward_workspace(segment_of_rows(params, 0), stages);
  const FusedCall fused = fused_call(params, stages);
  if (fused.running > 0) return (wants_columns(params) ? bytes_of(fused.running) : 0) + fused.exchange_bytes;
  if (stages.any() && !takes_split(params, stages)) return kNoKernel;
  if (is_huge_backward(params)) return backward_huge_workspace(params);
  int partials = 0;
  dispatch_split(params, stages, [&](auto, auto, auto, const SplitLaunch& launch) {
    partials = launch.partials;
    return cudaSuccess;
  });
  return bytes_of(partials);
}

cudaError_t launch_backward(const KernelBackwardParams& params, const GradStages& stages, cudaStream_t stream) {
  if (!stages.any()) {
    if (goes_by_segments(params, stages)) {
      for (int segment = 0; segment < params.segments; ++segment) {
        const cudaError_t launched = launch_backward(segment_of_rows(params, segment), stages, stream);
        if (launched != cudaSuccess) return launched;
      }
      return cudaSuccess;
    }
    if (params.rows >= 2 * kMaxRowsOfLaunch && params.grad_input) return launch_many_rows(params, stages, stream);
  }
  FusedCall call{true, stream};
  const cudaError_t error = call_fused(params, stages, call);
  if (error != cudaSuccess) return error;
  if (call.running == 0) {
    if (stages.any() && !takes_split(params, stages)) return cudaErrorNotSupported;
    return is_huge_backward(params) ? launch_backward_huge(params, stream) : launch_split(params, stages, stream);
  }
  if (!wants_columns(params)) return cudaSuccess;
  return launch_backward_finalize(params, call.running, stages.gate ? 3 : 2, stream);
}

}  // namespace fused_layernorm
