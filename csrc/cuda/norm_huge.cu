// Forward and backward of rows that a cluster cannot hold, nor the whole card (norm_forward_long.cu,
// backward_fused.cuh), or that are ragged, or of fp64.
//
// A row is cut into slices; their number depends on its length. The first kernel of each direction stores the sums of
// every slice; the second merges the slices of a row, always in the same order, and finishes the row. So x (and
// grad_output) are read twice; the second kernel runs from the last block to the first, to hit what the L2 cache still
// holds. Maths: forward_rows.cuh, norm_backward.cu.
#include <algorithm>

#include "backward_rows.cuh"
#include "dispatch.cuh"
#include "forward_rows.cuh"
#include "kernel_params.h"
#include "launch_plan.h"
#include "launchers.h"
#include "reduce.cuh"
#include "vector_io.cuh"

namespace fused_layernorm {
namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The slices of a row. They depend on hidden_size and dtype only, because the order of a row's sums follows from them.
struct Slices {
  int count, elements;  // elements of a slice: whole tiles; the last slice may be shorter

  Slices(int64_t hidden_size, int64_t tile) {
    const int64_t tiles = ceil_div(hidden_size, tile);
    const int64_t tiles_each =
        std::max(ceil_div(tiles, kHugeMaxSlices), std::min<int64_t>(ceil_div(tiles, kHugeSlices), kHugeTilesEach));
    count = static_cast<int>(ceil_div(tiles, tiles_each));
    elements = static_cast<int>(tiles_each * tile);
  }

  // Slices for elementwise work, where no order of sums matters: `most` longer ones, if that is fewer and not too few.
  Slices recut(int64_t most, int64_t hidden_size, int64_t tile) const {
    Slices cuts = *this;
    if (most < kHugeLeastCuts || most >= count) return cuts;
    cuts.elements = static_cast<int>(ceil_div(ceil_div(hidden_size, tile), most) * tile);
    cuts.count = static_cast<int>(ceil_div(hidden_size, cuts.elements));
    return cuts;
  }
};

// The slice of a row that a block works on, and this thread's columns in it.
template <typename Plan>
struct SliceOfBlock {
  static constexpr int kTile = Plan::kThreads * Plan::kVecs * Plan::kVec;

  int64_t first_col;
  int row, slice, elements, own;  // own: offset of this thread's first vector in a tile

  __device__ SliceOfBlock(const Slices& slices, int64_t hidden_size, int row, int slice)
      : row(row), slice(slice), own(static_cast<int>(threadIdx.x) * Plan::kVec) {
    first_col = static_cast<int64_t>(slice) * slices.elements;
    elements = static_cast<int>(min(static_cast<int64_t>(slices.elements), hidden_size - first_col));
  }

  // This thread's vectors of the tile that begins at element `tile` of the slice; 0 beyond its end.
  template <typename T>
  __device__ void load(RawVec<T, Plan::kVec> (&raw)[Plan::kVecs], const T* slice_begin, int tile) const {
    const T* first = slice_begin + tile + own;
#pragma unroll
    for (int v = 0; v < Plan::kVecs; ++v)
      raw[v] =
          has(tile, v) ? load_vec<T, Plan::kVec>(first + v * Plan::kThreads * Plan::kVec) : zero_vec<T, Plan::kVec>();
  }
  __device__ bool has(int tile, int v) const { return tile + own + v * Plan::kThreads * Plan::kVec < elements; }
};

// In lane l, calls add(part, first) for parts l, l + 32, ... of `count`, in this order; kAtOnce loads are in flight at
// once.
template <int kAtOnce, typename T, typename F>
__device__ __forceinline__ void for_each_part(const T* parts, int count, F&& add) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int first = lane; first < count; first += 32 * kAtOnce) {
    T found[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + 32 * i < count) found[i] = parts[first + 32 * i];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (first + 32 * i < count) add(found[i], i == 0 && first == lane);
  }
}

// Reverses the order of blocks.
__device__ __forceinline__ unsigned from_the_end(unsigned block) { return gridDim.x - 1 - block; }

// ---- forward -------------------------------------------------------------------------------------------------------

template <typename scalar_t, typename Plan>
__global__ void __launch_bounds__(Plan::kThreads, kHugeSumBlocksPerSm)
    norm_huge_moments_kernel(const __grid_constant__ KernelForwardParams params,
                             const __grid_constant__ Slices slices) {
  using acc_t = acc_type<scalar_t>;
  using Row = RowThreads<Plan::kThreads>;
  __shared__ Moments<acc_t> scratch[Row::kWarps];
  const SliceOfBlock<Plan> at(slices, params.hidden_size, blockIdx.x / slices.count, blockIdx.x % slices.count);
  const scalar_t* x = static_cast<const scalar_t*>(params.x) + params.x_strides.offset(at.row) + at.first_col;

  // The reference point of a warp is its mean over the first tile
  RawVec<scalar_t, Plan::kVec> raw[Plan::kVecs];
  acc_t values[Plan::kVec];
  Moments<acc_t> part{};
#pragma unroll 1
  for (int tile = 0; tile < at.elements; tile += at.kTile) {
    at.load(raw, x, tile);
    int held = 0;
#pragma unroll
    for (int v = 0; v < Plan::kVecs; ++v) held += at.has(tile, v) ? Plan::kVec : 0;
    if (tile == 0 && !params.is_rms_norm) {
      acc_t sum = 0;
#pragma unroll
      for (int v = 0; v < Plan::kVecs; ++v) {  // absent elements are 0
        unpack(raw[v], values);
        sum += vec_sum(values);
      }
      sum = Row::warp_sum(sum);
      const int warp_held = Row::warp_sum(held);
      unpack(raw[0], values);
      const acc_t first = __shfl_sync(0xffffffffu, values[0], 0);
      if (warp_held > 0) part.m = snapped(quick_ratio(sum, warp_held), first);
    }
#pragma unroll
    for (int v = 0; v < Plan::kVecs; ++v) {
      if (!at.has(tile, v)) continue;
      unpack(raw[v], values);
#pragma unroll
      for (int i = 0; i < Plan::kVec; ++i) values[i] -= part.m;
      part.add(values);
    }
    part.n += static_cast<acc_t>(held);
  }
  part.n = Row::warp_sum(part.n);
  part = row_moments<Row>(part, quick_ratio(acc_t(1), at.elements), scratch, Row::rank());
  part.n = static_cast<acc_t>(at.elements);
  if (threadIdx.x == 0) static_cast<Moments<acc_t>*>(params.workspace)[at.row * slices.count + at.slice] = part;
}

// One warp merges the moments of the slices of a row.
template <typename T>
__device__ __forceinline__ Moments<T> merge_slices(const Moments<T>* parts, int count, T inverse_n) {
  Moments<T> sum{};
  for_each_part<8>(parts, count, [&](Moments<T> part, bool first) {
    if (first) {
      sum = part;
    } else {
      part = part.about(sum.m);
      sum = {sum.n + part.n, sum.m, sum.c + part.c, sum.q + part.q};
    }
  });
  return merge_moments<32>(sum, inverse_n);
}

template <typename scalar_t, typename weight_t, typename Plan>
__global__ void __launch_bounds__(Plan::kThreads, kHugeNormalizeBlocksPerSm)
    norm_huge_normalize_kernel(const __grid_constant__ KernelForwardParams params, const __grid_constant__ Slices cuts,
                               int slices, acc_type<scalar_t> inverse_n) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kVec = Plan::kVec;
  __shared__ RowNorm<acc_t> norm_of_row;
  wait_for_previous_kernel();
  const unsigned block = from_the_end(blockIdx.x);
  const SliceOfBlock<Plan> at(cuts, params.hidden_size, block / cuts.count, block % cuts.count);
  const scalar_t* x = static_cast<const scalar_t*>(params.x) + params.x_strides.offset(at.row) + at.first_col;
  const weight_t* weight = static_cast<const weight_t*>(params.weight) + at.first_col + at.own;
  const weight_t* bias = static_cast<const weight_t*>(params.bias) + at.first_col + at.own;
  const acc_t weight_offset = params.weight ? static_cast<acc_t>(params.weight_offset) : 0;
  const int64_t y = at.row * params.hidden_size + at.first_col + at.own;

  RawVec<scalar_t, kVec> raw[Plan::kVecs];
  RawVec<weight_t, kVec> weight_raw[Plan::kVecs], bias_raw[Plan::kVecs];
  const auto load = [&](int tile) {
    at.load(raw, x, tile);
#pragma unroll
    for (int v = 0; v < Plan::kVecs; ++v) {
      const int skip = tile + v * Plan::kThreads * kVec, count = at.has(tile, v) ? kVec : 0;
      weight_raw[v] = load_parameter<kVec>(weight + skip, count, params.weight, one_vec<weight_t, kVec>());
      bias_raw[v] = load_parameter<kVec>(bias + skip, count, params.bias, zero_vec<weight_t, kVec>());
    }
  };
  int tile = (at.elements - 1) / at.kTile * at.kTile;
  load(tile);
  if (threadIdx.x < 32) {
    const auto* parts = static_cast<const Moments<acc_t>*>(params.workspace) + at.row * slices;
    const RowNorm<acc_t> merged = finish_row(merge_slices(parts, slices, inverse_n), inverse_n, params, at.row,
                                             at.slice == 0 && threadIdx.x == 0);
    if (threadIdx.x == 0) norm_of_row = merged;
  }
  __syncthreads();
  const RowNorm<acc_t> norm = norm_of_row;

#pragma unroll 1
  while (true) {
#pragma unroll
    for (int v = 0; v < Plan::kVecs; ++v) {
      if (!at.has(tile, v)) continue;
      const int skip = tile + v * Plan::kThreads * kVec;
      acc_t values[kVec], scale[kVec], offset[kVec];
      unpack(weight_raw[v], scale);
      unpack(bias_raw[v], offset);
      unpack(raw[v], values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[i] = fma(norm.x_hat(values[i]), scale[i] + weight_offset, offset[i]);
      if (params.y_dtype == dtype_of<scalar_t>) {
        store_vec(static_cast<scalar_t*>(params.y) + y + skip, values);
      } else {
        store_vec_as(params.y, params.y_dtype, y + skip, values, kVec, kVec > 1);
      }
    }
    if (tile == 0) break;
    tile -= at.kTile;
    load(tile);
  }
}

// ---- backward ------------------------------------------------------------------------------------------------------

template <typename scalar_t, typename Plan>
__global__ void __launch_bounds__(Plan::kThreads, kHugeSumBlocksPerSm)
    norm_huge_sums_kernel(const __grid_constant__ KernelBackwardParams params, const __grid_constant__ Slices slices,
                          bool rows_first) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kVec = Plan::kVec;
  using Row = RowThreads<Plan::kThreads>;
  __shared__ Pair<acc_t> scratch[Row::kWarps];
  const unsigned outer = blockIdx.x / (rows_first ? params.rows : slices.count);
  const unsigned inner = blockIdx.x % (rows_first ? params.rows : slices.count);
  const SliceOfBlock<Plan> at(slices, params.hidden_size, rows_first ? inner : outer, rows_first ? outer : inner);
  const scalar_t* x = static_cast<const scalar_t*>(params.x) + params.x_strides.offset(at.row) + at.first_col;
  const scalar_t* grad_output =
      static_cast<const scalar_t*>(params.grad_output) + params.grad_output_strides.offset(at.row) + at.first_col;
  const RowStats<scalar_t> stats(load_stats<scalar_t>(params, at.row), params);

  RawVec<scalar_t, kVec> x_raw[Plan::kVecs], grad_raw[Plan::kVecs];
  Pair<acc_t> sums{};
#pragma unroll 1
  for (int tile = 0; tile < at.elements; tile += at.kTile) {
    at.load(x_raw, x, tile);
    at.load(grad_raw, grad_output, tile);
    acc_t weight[Plan::kVecs][kVec];
#pragma unroll
    for (int v = 0; v < Plan::kVecs; ++v) {
      const int col = tile + at.own + v * Plan::kThreads * kVec;
      load_weight_of<scalar_t>(weight[v], params, at.first_col + col, col < at.elements ? kVec : 0);
    }
#pragma unroll
    for (int v = 0; v < Plan::kVecs; ++v) {
      acc_t x_values[kVec], grad[kVec];
      unpack(x_raw[v], x_values);
      unpack(grad_raw[v], grad);
      add_to_row(sums, stats, x_values, grad, weight[v]);
    }
  }
  sums = row_sum<Row>(sums, scratch);
  if (threadIdx.x == 0) static_cast<Pair<acc_t>*>(params.workspace)[at.row * slices.count + at.slice] = sums;
}

// The merged sums of a row, as grad_input needs them.
template <typename scalar_t>
struct MergedRow {
  SavedStats<acc_type<scalar_t>> saved;
  Pair<acc_type<scalar_t>> slope_level;
};

// One warp merges the sums of the slices of a row.
template <typename scalar_t, typename T>
__device__ __forceinline__ MergedRow<scalar_t> merge_row(const KernelBackwardParams& params, const Slices& slices,
                                                         int64_t row, T inverse_n) {
  const auto* parts = static_cast<const Pair<T>*>(params.workspace) + row * slices.count;
  Pair<T> sums{};
  for_each_part<32 / sizeof(T)>(
      parts, slices.count, [&](Pair<T> part, bool) { sums = {sums.first + part.first, sums.second + part.second}; });
  sums = row_sum<RowThreads<32>>(sums, static_cast<Pair<T>*>(nullptr));
  const auto saved = load_stats<scalar_t>(params, row);
  return {saved, slope_and_level(sums, RowStats<scalar_t>(saved, params), params, inverse_n)};
}

// The blocks of the second kernel: `columns` for each group of rows.
struct GradientGrid {
  int columns, rows_per_group;
};

// Stores the weight gradients of a vector of columns, or the group's partial sums of them.
template <int kVec, typename T>
__device__ __forceinline__ void store_column_sums(const KernelBackwardParams& params, T* partials, int group,
                                                  int64_t col, T (&grad_weight)[kVec], T (&grad_bias)[kVec]) {
  if (partials) {
    T* partial = partials + group * 2 * params.hidden_size + col;
    store_vec(partial, grad_weight);
    store_vec(partial + params.hidden_size, grad_bias);
    return;
  }
  const auto store = [&](void* gradient, DType dtype, T(&values)[kVec]) {
    if (!gradient) return;
#pragma unroll
    for (int i = 0; params.accumulate && i < kVec; ++i) values[i] += static_cast<const float*>(gradient)[col + i];
    store_vec_as(gradient, dtype, col, values, kVec, kVec > 1);
  };
  store(params.grad_weight, params.grad_weight_dtype, grad_weight);
  store(params.grad_bias, params.grad_bias_dtype, grad_bias);
}

// Each block has a group of rows and a tile of columns.
template <typename scalar_t, typename Plan>
__global__ void __launch_bounds__(Plan::kThreads, kHugeBlocksPerSm)
    norm_huge_gradients_kernel(const __grid_constant__ KernelBackwardParams params,
                               const __grid_constant__ Slices slices, const __grid_constant__ GradientGrid grid,
                               acc_type<scalar_t>* partials, acc_type<scalar_t> inverse_n) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kVec = Plan::kVec, kVecs = Plan::kVecs, kAhead = kHugeRowsAhead;
  __shared__ MergedRow<scalar_t> table[kHugeTable];
  wait_for_previous_kernel();
  const int block = static_cast<int>(from_the_end(blockIdx.x)), group = block / grid.columns;
  const int first_row = group * grid.rows_per_group;
  const int end_row = min(first_row + grid.rows_per_group, static_cast<int>(params.rows));
  const int64_t first_col =
      static_cast<int64_t>(block % grid.columns) * Plan::kThreads * kVecs * kVec + threadIdx.x * kVec;
  const auto col = [&](int v) { return first_col + v * Plan::kThreads * kVec; };

  RawVec<scalar_t, kVec> x_raw[kAhead][kVecs], grad_raw[kAhead][kVecs];
  const auto load = [&](int first) {
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      const int row = min(first + ahead, end_row - 1);
      const scalar_t* x = static_cast<const scalar_t*>(params.x) + params.x_strides.offset(row);
      const scalar_t* grad = static_cast<const scalar_t*>(params.grad_output) + params.grad_output_strides.offset(row);
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        const bool inside = first + ahead < end_row && col(v) < params.hidden_size;
        x_raw[ahead][v] = inside ? load_vec<scalar_t, kVec>(x + col(v)) : zero_vec<scalar_t, kVec>();
        grad_raw[ahead][v] = inside ? load_vec<scalar_t, kVec>(grad + col(v)) : zero_vec<scalar_t, kVec>();
      }
    }
  };

  acc_t weight[kVecs][kVec], grad_weight[kVecs][kVec] = {}, grad_bias[kVecs][kVec] = {};
#pragma unroll
  for (int v = 0; v < kVecs; ++v)
    load_weight_of<scalar_t>(weight[v], params, col(v), col(v) < params.hidden_size ? kVec : 0);
#pragma unroll 1
  for (int chunk = first_row; chunk < end_row; chunk += kHugeTable) {
    const int rows = min(end_row - chunk, kHugeTable);
    load(chunk);  // the loads overlap the merging of sums
    __syncthreads();
    for (int index = threadIdx.x / 32; index < rows; index += Plan::kThreads / 32) {
      const MergedRow<scalar_t> merged = merge_row<scalar_t>(params, slices, chunk + index, inverse_n);
      if (threadIdx.x % 32 == 0) table[index] = merged;
    }
    __syncthreads();

#pragma unroll 1
    for (int index = 0; index < rows; index += kAhead) {
      if (index > 0) load(chunk + index);
#pragma unroll
      for (int ahead = 0; ahead < kAhead; ++ahead) {
        if (index + ahead >= rows) break;
        const MergedRow<scalar_t> row = table[index + ahead];
        const RowStats<scalar_t> stats(row.saved, params);
        scalar_t* target = static_cast<scalar_t*>(params.grad_input) + (chunk + index + ahead) * params.hidden_size;
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
          acc_t x[kVec], grad[kVec], values[kVec];
          unpack(x_raw[ahead][v], x);
          unpack(grad_raw[ahead][v], grad);
          add_to_columns(grad_weight[v], grad_bias[v], stats, x, grad);
          grad_input_of(values, stats, row.slope_level, x, grad, weight[v]);
          if (col(v) < params.hidden_size) store_vec(target + col(v), values);
        }
      }
    }
  }
#pragma unroll
  for (int v = 0; v < kVecs; ++v)
    if (col(v) < params.hidden_size) store_column_sums(params, partials, group, col(v), grad_weight[v], grad_bias[v]);
}

// The same for groups of one row. A block has several tiles of columns, because it must merge the row's sums first, and
// loads one while it computes another.
template <typename scalar_t, typename Plan>
__global__ void __launch_bounds__(Plan::kThreads, kHugeRowBlocksPerSm)
    norm_huge_row_gradients_kernel(const __grid_constant__ KernelBackwardParams params,
                                   const __grid_constant__ Slices slices, const __grid_constant__ GradientGrid grid,
                                   acc_type<scalar_t>* partials, acc_type<scalar_t> inverse_n) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kVec = Plan::kVec, kVecs = Plan::kVecs, kTile = Plan::kThreads * kVecs * kVec;
  __shared__ MergedRow<scalar_t> merged;
  wait_for_previous_kernel();
  const int block = static_cast<int>(from_the_end(blockIdx.x)), row = block / grid.columns;
  const scalar_t* x = static_cast<const scalar_t*>(params.x) + params.x_strides.offset(row);
  const scalar_t* grad_output =
      static_cast<const scalar_t*>(params.grad_output) + params.grad_output_strides.offset(row);
  scalar_t* grad_input = static_cast<scalar_t*>(params.grad_input) + row * params.hidden_size;

  struct Tile {
    RawVec<scalar_t, kVec> x[kVecs], grad[kVecs];
  };
  const auto for_each = [&](int64_t first, auto&& f) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int64_t col = first + v * Plan::kThreads * kVec;
      if (first >= 0 && col < params.hidden_size) f(v, col);
    }
  };
  const auto load = [&](Tile& tile, int64_t first) {
    for_each(first, [&](int v, int64_t col) {
      tile.x[v] = load_vec<scalar_t, kVec>(x + col);
      tile.grad[v] = load_vec<scalar_t, kVec>(grad_output + col);
    });
  };
  const int64_t tiles = (params.hidden_size + kTile - 1) / kTile;
  const int64_t step = static_cast<int64_t>(grid.columns) * kTile;
  int64_t first = (tiles - 1 - block % grid.columns) * kTile + threadIdx.x * kVec;  // the last tiles first
  Tile tile, next;
  load(tile, first);
  if (threadIdx.x < 32) {
    const MergedRow<scalar_t> found = merge_row<scalar_t>(params, slices, row, inverse_n);
    if (threadIdx.x == 0) merged = found;
  }
  __syncthreads();
  const MergedRow<scalar_t> sums = merged;
  const RowStats<scalar_t> stats(sums.saved, params);
#pragma unroll 1
  for (; first >= 0; first -= step) {
    load(next, first - step);
    for_each(first, [&](int v, int64_t col) {
      acc_t x[kVec], grad[kVec], weight[kVec], values[kVec], grad_weight[kVec] = {}, grad_bias[kVec] = {};
      unpack(tile.x[v], x);
      unpack(tile.grad[v], grad);
      load_weight_of<scalar_t>(weight, params, col, kVec);
      grad_input_of(values, stats, sums.slope_level, x, grad, weight);
      store_vec(grad_input + col, values);
      add_to_columns(grad_weight, grad_bias, stats, x, grad);
      store_column_sums(params, partials, row, col, grad_weight, grad_bias);
    });
    tile = next;
  }
}

// ---- host ----------------------------------------------------------------------------------------------------------

// Calls f(types, HugePlan) for rows of whole 16-byte vectors, or of single elements, which are wide enough in fp64.
template <typename Types, typename F>
cudaError_t dispatch_huge(Types types, int64_t hidden_size, F&& f) {
  using scalar_t = typename Types::scalar_t;
  if constexpr (sizeof(scalar_t) < 8)
    if (hidden_size * sizeof(scalar_t) % 16 == 0) return f(types, HugePlan<scalar_t, true>{});
  return f(types, HugePlan<scalar_t, false>{});
}
template <typename F>
cudaError_t dispatch_huge_forward(const KernelForwardParams& params, F&& f) {
  return dispatch_types(params.x_dtype, params.weight_dtype,
                        [&](auto types) { return dispatch_huge(types, params.hidden_size, f); });
}

template <typename Plan>
Slices slices_of(int64_t hidden_size) {
  return Slices(hidden_size, Plan::kThreads * Plan::kVecs * Plan::kVec);
}

// The grid of norm_huge_gradients_kernel, and the layout of the workspace: sums of slices, then partial sums of weight
// gradients.
struct GradientLaunch {
  GradientGrid grid;
  int partials;  // 0: one group has all rows and writes the weight gradients itself
  int64_t groups, sums_bytes, bytes;

  template <typename acc_t, typename Plan>
  static GradientLaunch of(const KernelBackwardParams& params, const Slices& slices, int multiprocessors) {
    GradientLaunch launch;
    const int64_t tiles = ceil_div(params.hidden_size, Plan::kThreads * Plan::kVecs * Plan::kVec);
    const int64_t wanted = ceil_div(kHugeGradientWaves * kHugeBlocksPerSm * multiprocessors, tiles);
    const int64_t rows = ceil_div(params.rows, std::min(wanted, params.rows));
    launch.groups = ceil_div(params.rows, rows);
    const int64_t columns =
        rows > 1 ? tiles : std::min(tiles, ceil_div(kHugeRowBlocksPerSm * multiprocessors, launch.groups));
    launch.grid = {static_cast<int>(columns), static_cast<int>(rows)};
    const bool wants_columns = params.grad_weight || params.grad_bias;
    launch.partials = wants_columns && launch.groups > 1 ? static_cast<int>(launch.groups) : 0;
    launch.sums_bytes = ceil_div(params.rows * slices.count * static_cast<int64_t>(sizeof(Pair<acc_t>)), 16) * 16;
    launch.bytes = launch.sums_bytes + launch.partials * 2 * params.hidden_size * static_cast<int64_t>(sizeof(acc_t));
    return launch;
  }
};

template <typename F>
cudaError_t plan_backward(const KernelBackwardParams& params, F&& f) {
  DeviceFacts facts;
  const cudaError_t error = device_facts(facts);
  if (error != cudaSuccess) return error;
  const auto plan_slices = [&](auto types, auto plan) {
    using Plan = decltype(plan);
    using acc_t = acc_type<typename decltype(types)::scalar_t>;
    const Slices slices = slices_of<typename Plan::Sums>(params.hidden_size);
    return f(types, plan, slices,
             GradientLaunch::of<acc_t, typename Plan::Gradients>(params, slices, facts.multiprocessors));
  };
  return dispatch_type(params.x_dtype,
                       [&](auto types) { return dispatch_huge(types, params.hidden_size, plan_slices); });
}

}  // namespace

bool is_huge_forward(const KernelForwardParams& params) {
  return params.hidden_size > huge_forward_columns(params.x_dtype, params.weight_dtype) && !params.interleaves;
}

int64_t forward_huge_workspace(const KernelForwardParams& params) {
  int64_t bytes = 0;
  dispatch_huge_forward(params, [&](auto types, auto plan) {
    using acc_t = acc_type<typename decltype(types)::scalar_t>;
    bytes = params.rows * slices_of<typename decltype(plan)::Forward>(params.hidden_size).count *
            static_cast<int64_t>(sizeof(Moments<acc_t>));
    return cudaSuccess;
  });
  return bytes;
}

cudaError_t launch_forward_huge(const KernelForwardParams& params, cudaStream_t stream) {
  return dispatch_huge_forward(params, [&](auto types, auto plan) {
    using scalar_t = typename decltype(types)::scalar_t;
    using weight_t = typename decltype(types)::weight_t;
    using Plan = typename decltype(plan)::Forward;
    const Slices slices = slices_of<Plan>(params.hidden_size);
    const auto inverse_n = inverse_of<acc_type<scalar_t>>(params.hidden_size);
    const ClusterLaunch launch(params.rows * slices.count, Plan::kThreads, 0, 1, stream);
    cudaError_t error = cudaLaunchKernelEx(&launch.config, norm_huge_moments_kernel<scalar_t, Plan>, params, slices);
    if (error != cudaSuccess) return error;
    DeviceFacts facts;
    error = device_facts(facts);
    if (error != cudaSuccess) return error;
    // fp32 weights beside 16-bit x take twice the registers
    using Normalize =
        RowPlan<Plan::kThreads, Plan::kVecs* static_cast<int>(sizeof(scalar_t)) / static_cast<int>(sizeof(weight_t)),
                Plan::kVec>;
    const Slices cuts = slices.recut(kHugeNormalizeBlocksPerSm * facts.multiprocessors / params.rows,
                                     params.hidden_size, Plan::kThreads * Plan::kVecs * Plan::kVec);
    const OverlappedLaunch normalize(dim3(static_cast<unsigned>(params.rows * cuts.count)), dim3(Plan::kThreads),
                                     stream);
    return cudaLaunchKernelEx(&normalize.config, norm_huge_normalize_kernel<scalar_t, weight_t, Normalize>, params,
                              cuts, slices.count, inverse_n);
  });
}

// Weight gradients alone need no sums along a row: the split strategy takes them (norm_backward.cu).
bool is_huge_backward(const KernelBackwardParams& params) {
  return params.hidden_size > kClusterColumns && params.grad_input;
}

int64_t backward_huge_workspace(const KernelBackwardParams& params) {
  int64_t bytes = 0;
  plan_backward(params, [&](auto, auto, const Slices&, const GradientLaunch& launch) {
    bytes = launch.bytes;
    return cudaSuccess;
  });
  return bytes;
}

cudaError_t launch_backward_huge(const KernelBackwardParams& params, cudaStream_t stream) {
  return plan_backward(params, [&](auto types, auto plan, const Slices& slices, const GradientLaunch& launch) {
    using scalar_t = typename decltype(types)::scalar_t;
    using acc_t = acc_type<scalar_t>;
    using Sums = typename decltype(plan)::Sums;
    using Gradients = typename decltype(plan)::Gradients;
    const auto inverse_n = inverse_of<acc_t>(params.hidden_size);
    KernelBackwardParams rest = params;  // its workspace holds the partial sums
    rest.workspace = static_cast<char*>(params.workspace) + launch.sums_bytes;
    acc_t* partials = launch.partials > 0 ? static_cast<acc_t*>(rest.workspace) : nullptr;

    const ClusterLaunch sums(params.rows * slices.count, Sums::kThreads, 0, 1, stream);
    cudaError_t error =
        cudaLaunchKernelEx(&sums.config, norm_huge_sums_kernel<scalar_t, Sums>, params, slices, launch.groups == 1);
    if (error != cudaSuccess) return error;
    const OverlappedLaunch gradients(dim3(static_cast<unsigned>(launch.grid.columns * launch.groups)),
                                     dim3(Gradients::kThreads), stream);
    const auto kernel = launch.grid.rows_per_group == 1 ? norm_huge_row_gradients_kernel<scalar_t, Gradients>
                                                        : norm_huge_gradients_kernel<scalar_t, Gradients>;
    error = cudaLaunchKernelEx(&gradients.config, kernel, params, slices, launch.grid, partials, inverse_n);
    if (error != cudaSuccess || launch.partials == 0) return error;
    return launch_backward_finalize(rest, launch.partials, 2, stream);
  });
}

}  // namespace fused_layernorm
