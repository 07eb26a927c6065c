// Backward of LayerNorm and RMSNorm.
//
//   wdy = (weight+weight_offset)*grad_output     c1 = sum(x_hat*wdy)/N     c2 = is_rms_norm ? 0 : sum(wdy)/N
//   grad_input = (wdy - x_hat*c1 - c2)*rstd      grad_weight = sum over rows(grad_output*x_hat)
//                                                grad_bias   = sum over rows(grad_output)
//
// Two strategies (launch_plan.h says when). Fused: persistent blocks walk over rows, read x and grad_output once, keep
// the weight gradients of their rows in registers and leave one partial sum a block. Split: blocks of rows and blocks
// of columns side by side in one launch. Both take the same steps per row in the same order with pinned rounding, so
// grad_input has the same bits either way. Partial sums are added in a fixed order: no atomics, no dependence on
// timing.
#include "dispatch.cuh"
#include "launch_plan.h"
#include "norm_params.h"
#include "reduce.cuh"
#include "vector_io.cuh"

namespace fused_layernorm {
namespace {

// Rounding pinned: left to itself the compiler may fuse a product into either of two sums, kernel by kernel.
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double mul(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ double sub(double a, double b) { return __dsub_rn(a, b); }

__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }

// What forward saved of a row.
template <typename T>
struct SavedStats {
  T rstd, mean, mean_tail;
};

template <typename T>
__device__ __forceinline__ SavedStats<T> load_stats(const NormBackwardParams& params, int64_t row) {
  const T rstd = __ldg(static_cast<const T*>(params.rstd) + row);
  if (!params.mean) return {rstd, 0, 0};
  return {rstd, __ldg(static_cast<const T*>(params.mean) + row), __ldg(static_cast<const T*>(params.mean_tail) + row)};
}

// The same as it is used: x_hat = (x - mean)*rstd + shift. Not done on loading: the first use of a loaded value waits
// for it, and a row's statistics are loaded one row ahead (H200, bf16, N = 1024: 0.81 of the pass became 0.89).
template <typename T>
struct RowStats {
  T rstd, mean, shift;

  __device__ explicit RowStats(SavedStats<T> saved)
      : rstd(saved.rstd), mean(saved.mean), shift(mul(-saved.mean_tail, saved.rstd)) {}
  __device__ T x_hat(T x) const { return fma(sub(x, mean), rstd, shift); }
};

template <typename weight_t, int kVec, typename T>
__device__ __forceinline__ void load_weight(T (&values)[kVec], const NormBackwardParams& params, int vec) {
  if (params.weight) {
    const weight_t* weight = static_cast<const weight_t*>(params.weight) + static_cast<int64_t>(vec) * kVec;
    unpack(load_vec<weight_t, kVec>(weight), values);
    if (params.weight_offset != 0) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[i] += static_cast<T>(params.weight_offset);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = 1;
  }
}

// Adds one vector's part to (sum(x_hat*wdy), sum(wdy)). Elements beyond the row are 0 in grad_output and add nothing.
template <int kVec, typename T>
__device__ __forceinline__ void add_to_sums(Pair<T>& sums, const RowStats<T>& stats, const T (&x)[kVec],
                                            const T (&grad)[kVec], const T (&weight)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const T wdy = mul(grad[i], weight[i]);
    sums.first = fma(stats.x_hat(x[i]), wdy, sums.first);
    sums.second += wdy;
  }
}

// grad_input = (wdy + (x-mean)*slope + level)*rstd: the formula above with what is one number a row taken together.
// wdy is rounded as in the sums, so that it cancels against c2 to exactly 0 where it must (hidden_size 1).
template <typename scalar_t, int kVec, typename T>
__device__ __forceinline__ void store_grad_input(scalar_t* target, const RowStats<T>& stats, Pair<T> means,
                                                 const T (&x)[kVec], const T (&grad)[kVec], const T (&weight)[kVec]) {
  const T slope = mul(-stats.rstd, means.first);
  const T level = fma(-stats.shift, means.first, -means.second);
  T values[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i)
    values[i] = mul(add(mul(grad[i], weight[i]), fma(sub(x[i], stats.mean), slope, level)), stats.rstd);
  store_vec(target, values);
}

// (c1, c2) from the sums.
template <typename Row, typename T>
__device__ __forceinline__ Pair<T> row_means(Pair<T> sums, const NormBackwardParams& params, T inverse_n,
                                             Pair<T>* scratch, int cluster = 1) {
  sums = cluster > 1 ? cluster_row_sum<Row>(sums, scratch, cluster) : row_sum<Row>(sums, scratch);
  return {mul(sums.first, inverse_n), params.is_rms_norm ? T(0) : mul(sums.second, inverse_n)};
}

// The launch of one call, decided once: workspace size, grid and kernel arguments all follow from it.
struct BackwardLaunch {
  bool fused;
  int cluster;         // fused: blocks that share a row
  int blocks;          // fused: persistent blocks; split: blocks of columns in all
  int64_t row_blocks;  // split: blocks of rows
  int column_lanes;    // split: threads side by side along a row, in a block of columns
  int column_tiles;    // split: blocks of columns along a row
  int partials;        // partial sums of the weight gradients to be finalized; 0: written directly
};

// Rows of x and grad_output on their way from memory to the threads of a persistent block, kDepth turns ahead of their
// use: a ring of stages in shared memory for each row of the block. From sm_90 on the copy engine fills a stage at one
// thread's request; else, and where rows are misaligned, each thread brings just the vectors that it will read itself.
template <typename scalar_t, typename Plan>
struct RowQueue {
  static constexpr int kVec = Plan::kVec, kVecs = Plan::kVecs, kThreads = Plan::kThreads;
  static constexpr bool kInRegisters = false;
  static constexpr int kDepth = kFusedDepth<Plan>;
  static constexpr int kRows = kBackwardThreads<Plan> / kThreads;
  static constexpr int kStage = 2 * kThreads * kVecs;
  static constexpr int kBytes = kRows * kDepth * kStage * 16;  // of dynamic shared memory
  using Vecs = RawVec<scalar_t, kVec>[kVecs];
  struct Shared {
    uint64_t arrived[kRows][kDepth];
  };

  // The two threads of a row that ask the copy engine, of different warps where there are two: the other warps wait for
  // them at the next exchange of sums, so what they do between has to be short.
  static constexpr int kAsksForGrad = kThreads > 32 ? kThreads / 2 : 0;

  uint4* ring;
  unsigned arrived;                    // shared address of the first stage's barrier
  const scalar_t *x_next, *grad_next;  // for the copy engine: the row to be fetched next
  int64_t slice_col, row_step;
  int rank, vec_count, stage = 0;
  unsigned parity = 1;  // the first kDepth fetches go once round the ring and turn it to 0
  bool x_aligned, grad_aligned, bulk = false;

  // To be constructed by all threads of the block together. Rows come in steps of row_step from first_row on.
  __device__ RowQueue(uint4* memory, Shared& shared, const NormBackwardParams& params, int group, int rank,
                      int64_t slice_col, int vec_count, int64_t first_row, int64_t row_step, bool x_aligned,
                      bool grad_aligned)
      : ring(memory + group * kDepth * kStage),
        arrived(shared_address(shared.arrived[group])),
        slice_col(slice_col),
        row_step(row_step),
        rank(rank),
        vec_count(vec_count),
        x_aligned(x_aligned),
        grad_aligned(grad_aligned) {
#if __CUDA_ARCH__ >= 900
    bulk = x_aligned && grad_aligned && params.x_strides.is_even(params.rows) &&
           params.grad_output_strides.is_even(params.rows);
    x_next = static_cast<const scalar_t*>(params.x) + first_row * params.x_strides.row_stride + slice_col;
    grad_next = static_cast<const scalar_t*>(params.grad_output) + first_row * params.grad_output_strides.row_stride +
                slice_col;
    if (rank == 0) {
      for (int i = 0; i < kDepth; ++i) init_barrier(arrived + 8 * i, 2);
      fence_barrier_init();
    }
    __syncthreads();
#endif
  }

  __device__ uint4* slot(int tensor, int vec) { return ring + stage * kStage + tensor * kThreads * kVecs + vec; }

  __device__ void send(int tensor, const scalar_t* row, bool aligned) {
#pragma unroll 1
    for (int vec = rank; vec < vec_count; vec += kThreads) {
      const scalar_t* source = row + static_cast<int64_t>(vec) * kVec;
      if (aligned) {
        copy_async(slot(tensor, vec), source);
      } else {
        *slot(tensor, vec) = load_vec_unaligned<scalar_t, kVec>(source).words[0];
      }
    }
  }

  // Sends for row `row`, the next in turn, into the current stage, which all threads of the row have read.
  __device__ void fetch(const NormBackwardParams& params, int64_t row) {
#if __CUDA_ARCH__ >= 900
    if (bulk) {
      if (row < params.rows) {
        if (rank == 0) ask(x_next, 0);
        if (rank == kAsksForGrad) ask(grad_next, 1);
      }
      x_next += row_step * params.x_strides.row_stride;
      grad_next += row_step * params.grad_output_strides.row_stride;
      return;
    }
#endif
    if (row < params.rows) {
      send(0, static_cast<const scalar_t*>(params.x) + params.x_strides.offset(row) + slice_col, x_aligned);
      send(1, static_cast<const scalar_t*>(params.grad_output) + params.grad_output_strides.offset(row) + slice_col,
           grad_aligned);
    }
    commit_copies();  // an empty group where there is no row, as take() counts groups
  }
#if __CUDA_ARCH__ >= 900
  __device__ void ask(const scalar_t* row, int tensor) {
    const unsigned bytes = static_cast<unsigned>(vec_count) * 16;
    expect_bytes(arrived + 8 * stage, bytes);
    if (bytes > 0) copy_bulk(shared_address(slot(tensor, 0)), row, bytes, arrived + 8 * stage);
  }
#endif
  __device__ void next_stage() {
    if (++stage == kDepth) {
      stage = 0;
      parity ^= 1;
    }
  }
  // The row of the current stage.
  __device__ void take(Vecs& x, Vecs& grad) {
#if __CUDA_ARCH__ >= 900
    if (bulk) wait_barrier(arrived + 8 * stage, parity);
#endif
    if (!bulk) wait_for_copies<kDepth - 1>();
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      x[v] = grad[v] = zero_vec<scalar_t, kVec>();
      if (v * kThreads + rank >= vec_count) continue;
      x[v].words[0] = *slot(0, v * kThreads + rank);
      grad[v].words[0] = *slot(1, v * kThreads + rank);
    }
  }
};

// The same for single elements, which neither way can copy: one row ahead, in registers. (The copy engine can bring the
// aligned window around such a row; tried, and slower: 501 us against 407 at N = 769, as picking single elements out of
// shared memory costs more instructions than it saves waiting.)
template <typename scalar_t, int threads, int vecs, bool clusters>
struct RowQueue<scalar_t, RowPlan<threads, vecs, 1, clusters>> {
  static constexpr bool kInRegisters = true;
  static constexpr int kDepth = 1;
  static constexpr int kBytes = 0;
  using Vecs = RawVec<scalar_t, 1>[vecs];
  struct Shared {};

  int64_t slice_col;
  int rank, vec_count;
  Vecs x_next, grad_next;

  __device__ RowQueue(uint4*, Shared&, const NormBackwardParams&, int, int rank, int64_t slice_col, int vec_count,
                      int64_t, int64_t, bool, bool)
      : slice_col(slice_col), rank(rank), vec_count(vec_count) {}

  __device__ void fetch(const NormBackwardParams& params, int64_t row) {
    if (row >= params.rows) return;
    const scalar_t* x = static_cast<const scalar_t*>(params.x) + params.x_strides.offset(row) + slice_col;
    const scalar_t* grad =
        static_cast<const scalar_t*>(params.grad_output) + params.grad_output_strides.offset(row) + slice_col;
    load_tile<scalar_t, threads>(x_next, x, 0, vec_count, rank, true);
    load_tile<scalar_t, threads>(grad_next, grad, 0, vec_count, rank, true);
  }
  __device__ void next_stage() {}
  __device__ void take(Vecs& x, Vecs& grad) {
#pragma unroll
    for (int v = 0; v < vecs; ++v) {
      x[v] = x_next[v];
      grad[v] = grad_next[v];
    }
  }
};

// ---- fused ---------------------------------------------------------------------------------------------------------

template <typename scalar_t, typename weight_t, typename Plan>
__global__ void __launch_bounds__(kBackwardThreads<Plan>, kFusedBlocksPerSm<Plan>)
    norm_backward_fused_kernel(const __grid_constant__ NormBackwardParams params, acc_type<scalar_t> inverse_n,
                               bool x_aligned, bool grad_aligned) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kThreads = Plan::kThreads, kVecs = Plan::kVecs, kVec = Plan::kVec;
  constexpr int kRows = kBackwardThreads<Plan> / kThreads;
  using Row = RowThreads<kThreads, kRows>;
  constexpr int kColumns = kThreads * kVecs * kVec;
  __shared__ Pair<acc_t> scratch[2][(Plan::kClusters ? kMaxCluster : kRows) * Row::kWarps];
  __shared__ acc_t merged[kRows > 1 ? 2 * kColumns : 1];

  // Which rows, and which slice of them: the blocks of a cluster share a row
  const int blocks = Plan::kClusters ? cluster_size() : 1;
  const int64_t row_step = static_cast<int64_t>(gridDim.x / blocks) * kRows;
  const int rank = Row::rank();
  const int row_vecs = static_cast<int>(params.hidden_size / kVec);
  const int slice_vecs = (row_vecs + blocks - 1) / blocks;
  const int slice_first = blocks > 1 ? cluster_rank() * slice_vecs : 0;
  const int vec_count = max(min(slice_vecs, row_vecs - slice_first), 0);
  const int64_t slice_col = static_cast<int64_t>(slice_first) * kVec;

  acc_t weight[kVecs][kVec], grad_weight[kVecs][kVec], grad_bias[kVecs][kVec];
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int vec = v * kThreads + rank;
    if (vec < vec_count) load_weight<weight_t>(weight[v], params, slice_first + vec);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (vec >= vec_count) weight[v][i] = 0;
      grad_weight[v][i] = grad_bias[v][i] = 0;
    }
  }

  extern __shared__ uint4 queue_memory[];
  using Queue = RowQueue<scalar_t, Plan>;
  __shared__ typename Queue::Shared queue_shared;
  int64_t row = static_cast<int64_t>(blockIdx.x / blocks) * kRows + Row::group();
  Queue queue(queue_memory, queue_shared, params, Row::group(), rank, slice_col, vec_count, row, row_step, x_aligned,
              grad_aligned);
  if (blocks > 1) cluster_sync();
  for (int ahead = 0; ahead < Queue::kDepth; ++ahead) {
    queue.fetch(params, row + ahead * row_step);
    queue.next_stage();
  }
  SavedStats<acc_t> stats_next{};
  if (row < params.rows) stats_next = load_stats<acc_t>(params, row);
  scalar_t* grad_input = static_cast<scalar_t*>(params.grad_input) + row * params.hidden_size + slice_col + rank * kVec;

#pragma unroll 1
  for (int turn = 0; row < params.rows; row += row_step, turn ^= 1) {
    // Load
    RawVec<scalar_t, kVec> x_raw[kVecs], grad_raw[kVecs];
    queue.take(x_raw, grad_raw);
    if constexpr (Queue::kInRegisters) queue.fetch(params, row + row_step);
    const RowStats<acc_t> stats(stats_next);
    if (row + row_step < params.rows) stats_next = load_stats<acc_t>(params, row + row_step);

    // Sums along the row, and this row's part of the sums along the columns
    Pair<acc_t> sums{0, 0};
    acc_t x[kVec], grad[kVec];
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      unpack(x_raw[v], x);
      unpack(grad_raw[v], grad);
      add_to_sums(sums, stats, x, grad, weight[v]);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        grad_weight[v][i] = fma(grad[i], stats.x_hat(x[i]), grad_weight[v][i]);
        grad_bias[v][i] += grad[i];
      }
    }
    const Pair<acc_t> means = row_means<Row>(sums, params, inverse_n, scratch[turn], blocks);

    // All threads of the row have read this stage: each has come through the exchange of the sums
    if constexpr (!Queue::kInRegisters) queue.fetch(params, row + Queue::kDepth * row_step);
    queue.next_stage();

    // Store
    forget(x_raw);
    forget(grad_raw);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      if (v * kThreads + rank >= vec_count) continue;
      unpack(x_raw[v], x);
      unpack(grad_raw[v], grad);
      store_grad_input(grad_input + v * kThreads * kVec, stats, means, x, grad, weight[v]);
    }
    grad_input += row_step * params.hidden_size;
  }

  if (!params.workspace) return;  // no weight gradients wanted
  // The rows of this block, or cluster, become one partial sum: [grad_weight, grad_bias] of hidden_size each
  acc_t* partial = static_cast<acc_t*>(params.workspace) +
                   static_cast<int64_t>(blockIdx.x / blocks) * 2 * params.hidden_size + slice_col;
  const bool last_adder = Row::group() == kRows - 1;
  for (int group = 0; group < kRows; ++group) {
    if (group == Row::group()) {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        const int vec = v * kThreads + rank;
        if (vec >= vec_count) continue;
        acc_t* sums_here = merged + vec * kVec;
        if constexpr (kRows > 1) {
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            if (group > 0) {
              grad_weight[v][i] += sums_here[i];
              grad_bias[v][i] += sums_here[kColumns + i];
            }
            if (!last_adder) {
              sums_here[i] = grad_weight[v][i];
              sums_here[kColumns + i] = grad_bias[v][i];
            }
          }
        }
        if (last_adder) {
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            partial[vec * kVec + i] = grad_weight[v][i];
            partial[params.hidden_size + vec * kVec + i] = grad_bias[v][i];
          }
        }
      }
    }
    if constexpr (kRows > 1) __syncthreads();
  }
}

// ---- split ---------------------------------------------------------------------------------------------------------

// grad_input of one row, tile by tile where it is longer than the registers hold.
template <typename scalar_t, typename weight_t, typename Plan>
__device__ __forceinline__ void backward_of_row(const NormBackwardParams& params, int64_t row,
                                                acc_type<scalar_t> inverse_n, bool x_aligned, bool grad_aligned,
                                                Pair<acc_type<scalar_t>>* scratch) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kThreads = Plan::kThreads, kVecs = Plan::kVecs, kVec = Plan::kVec, kTile = kThreads * kVecs;
  using Row = RowThreads<kThreads, kBackwardThreads<Plan> / kThreads>;
  const scalar_t* x_row = static_cast<const scalar_t*>(params.x) + params.x_strides.offset(row);
  const scalar_t* grad_row = static_cast<const scalar_t*>(params.grad_output) + params.grad_output_strides.offset(row);
  const int rank = Row::rank();
  const int vec_count = static_cast<int>(params.hidden_size / kVec);
  const int last_tile = (vec_count - 1) / kTile * kTile;
  const RowStats<acc_t> stats(load_stats<acc_t>(params, row));

  RawVec<scalar_t, kVec> x_raw[kVecs], grad_raw[kVecs];
  const auto load = [&](int tile) {
    load_tile<scalar_t, kThreads>(x_raw, x_row, tile, vec_count, rank, x_aligned);
    load_tile<scalar_t, kThreads>(grad_raw, grad_row, tile, vec_count, rank, grad_aligned);
  };
  Pair<acc_t> sums{0, 0};
  acc_t x[kVec], grad[kVec], weight[kVec];
#pragma unroll 1
  for (int tile = 0; tile <= last_tile; tile += kTile) {
    load(tile);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int vec = tile + v * kThreads + rank;
      if (vec >= vec_count) continue;
      unpack(x_raw[v], x);
      unpack(grad_raw[v], grad);
      load_weight<weight_t>(weight, params, vec);
      add_to_sums(sums, stats, x, grad, weight);
    }
  }
  const Pair<acc_t> means = row_means<Row>(sums, params, inverse_n, scratch);

  forget(x_raw);
  forget(grad_raw);
  scalar_t* grad_input = static_cast<scalar_t*>(params.grad_input) + row * params.hidden_size;
#pragma unroll 1
  for (int tile = last_tile; tile >= 0; tile -= kTile) {  // backwards: the last tile is still in registers
    if (tile != last_tile) load(tile);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int vec = tile + v * kThreads + rank;
      if (vec >= vec_count) continue;
      unpack(x_raw[v], x);
      unpack(grad_raw[v], grad);
      load_weight<weight_t>(weight, params, vec);
      store_grad_input(grad_input + static_cast<int64_t>(vec) * kVec, stats, means, x, grad, weight);
    }
  }
}

// A scalar to a tensor whose dtype is known at run time only.
template <typename T>
__device__ __forceinline__ void store_as(void* target, DType dtype, int64_t index, T value) {
  const T values[1] = {value};
  store_vec_as<1>(target, dtype, index, values);
}

// The weight gradients of `lanes` vectors of columns, over rows first_row, first_row + row_step, ... Threads lie
// `lanes` along a row and kBlock/lanes along the rows; the latter are added up through `scratch`, kBlock*kVec sums.
template <typename scalar_t, int kVec, int kBlock>
__device__ __forceinline__ void backward_of_columns(const NormBackwardParams& params, int tile, int split, int splits,
                                                    int lanes, bool x_aligned, bool grad_aligned,
                                                    acc_type<scalar_t>* scratch) {
  using acc_t = acc_type<scalar_t>;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int row_lane = static_cast<int>(threadIdx.x) / lanes;
  const int row_lanes = kBlock / lanes;
  const int64_t vec_count = params.hidden_size / kVec;
  const int64_t vec = static_cast<int64_t>(tile) * lanes + lane;
  const int64_t rows_per_split = (params.rows + splits - 1) / splits;
  const int64_t first_row = split * rows_per_split;
  const int64_t end_row = min(first_row + rows_per_split, params.rows);

  acc_t grad_weight[kVec] = {}, grad_bias[kVec] = {};
  if (vec < vec_count) {
    const scalar_t* x_column = static_cast<const scalar_t*>(params.x) + vec * kVec;
    const scalar_t* grad_column = static_cast<const scalar_t*>(params.grad_output) + vec * kVec;
#pragma unroll 4
    for (int64_t row = first_row + row_lane; row < end_row; row += row_lanes) {
      const scalar_t* x_at = x_column + params.x_strides.offset(row);
      const scalar_t* grad_at = grad_column + params.grad_output_strides.offset(row);
      const RowStats<acc_t> stats(load_stats<acc_t>(params, row));
      acc_t x[kVec], grad[kVec];
      unpack(x_aligned ? load_vec<scalar_t, kVec>(x_at) : load_vec_unaligned<scalar_t, kVec>(x_at), x);
      unpack(grad_aligned ? load_vec<scalar_t, kVec>(grad_at) : load_vec_unaligned<scalar_t, kVec>(grad_at), grad);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        grad_weight[i] = fma(grad[i], stats.x_hat(x[i]), grad_weight[i]);
        grad_bias[i] += grad[i];
      }
    }
  }

  // Along the rows: each of the block's columns is summed by one thread, in order
  const int columns = lanes * kVec;
  for (int which = 0; which < 2; ++which) {
    void* gradient = which == 0 ? params.grad_weight : params.grad_bias;
    if (!gradient) continue;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      scratch[row_lane * columns + lane * kVec + i] = which == 0 ? grad_weight[i] : grad_bias[i];
    __syncthreads();
    for (int column = threadIdx.x; column < columns; column += kBlock) {
      const int64_t at = static_cast<int64_t>(tile) * columns + column;
      if (at >= params.hidden_size) continue;
      acc_t sum = 0;
      for (int lane_of_rows = 0; lane_of_rows < row_lanes; ++lane_of_rows)
        sum += scratch[lane_of_rows * columns + column];
      if (splits > 1) {
        acc_t* partial = static_cast<acc_t*>(params.workspace) + (2 * split + which) * params.hidden_size;
        partial[at] = sum;
      } else {
        store_as(gradient, which == 0 ? params.grad_weight_dtype : params.grad_bias_dtype, at, sum);
      }
    }
  }
}

template <typename scalar_t, typename weight_t, typename Plan>
__global__ void __launch_bounds__(kBackwardThreads<Plan>, kSplitBlocksPerSm<Plan>)
    norm_backward_split_kernel(const __grid_constant__ NormBackwardParams params, const BackwardLaunch launch,
                               acc_type<scalar_t> inverse_n, bool x_aligned, bool grad_aligned) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kBlock = kBackwardThreads<Plan>;
  constexpr int kRows = kBlock / Plan::kThreads;
  using Row = RowThreads<Plan::kThreads, kRows>;
  __shared__ union {
    Pair<acc_t> rows[kRows * Row::kWarps];
    acc_t columns[kBlock * Plan::kVec];
  } scratch;

  // Columns first: they take longest, and rows fill the gaps they leave
  const int64_t block = static_cast<int64_t>(blockIdx.x) - launch.blocks;
  if (block < 0) {
    const int splits = launch.blocks / launch.column_tiles;
    backward_of_columns<scalar_t, Plan::kVec, kBlock>(params, blockIdx.x % launch.column_tiles,
                                                      blockIdx.x / launch.column_tiles, splits, launch.column_lanes,
                                                      x_aligned, grad_aligned, scratch.columns);
  } else {
    const int64_t row = block * kRows + Row::group();
    if (row >= params.rows) return;
    backward_of_row<scalar_t, weight_t, Plan>(params, row, inverse_n, x_aligned, grad_aligned, scratch.rows);
  }
}

// ---- finalize ------------------------------------------------------------------------------------------------------

// Adds up `partials` partial sums [grad_weight, grad_bias], in order of the block that left them.
template <typename acc_t>
__global__ void __launch_bounds__(kFinalizeColumns* kFinalizeRows)
    norm_backward_finalize_kernel(const __grid_constant__ NormBackwardParams params, int partials) {
  __shared__ acc_t scratch[kFinalizeRows][kFinalizeColumns + 1];
  void* gradient = blockIdx.y == 0 ? params.grad_weight : params.grad_bias;
  if (!gradient) return;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kFinalizeColumns + threadIdx.x;
  acc_t sum = 0;
  if (column < params.hidden_size) {
    const acc_t* partial = static_cast<const acc_t*>(params.workspace) + blockIdx.y * params.hidden_size + column;
#pragma unroll 4
    for (int index = threadIdx.y; index < partials; index += kFinalizeRows)
      sum += partial[static_cast<int64_t>(index) * 2 * params.hidden_size];
  }
  scratch[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  // Transposed, so that a warp adds up one column
  sum = RowThreads<kFinalizeRows, kFinalizeColumns>::warp_sum(scratch[threadIdx.x][threadIdx.y]);
  const int64_t target = static_cast<int64_t>(blockIdx.x) * kFinalizeColumns + threadIdx.y;
  if (threadIdx.x == 0 && target < params.hidden_size)
    store_as(gradient, blockIdx.y == 0 ? params.grad_weight_dtype : params.grad_bias_dtype, target, sum);
}

// ---- host ----------------------------------------------------------------------------------------------------------

// How many clusters of a fused kernel the current device runs at once; asked of the driver once a device and size.
template <typename scalar_t, typename weight_t, typename Plan>
cudaError_t resident_clusters(int cluster, int& clusters) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices][kMaxCluster + 1];
  static OncePerDevice allowed;
  constexpr int kBytes = RowQueue<scalar_t, Plan>::kBytes;
  const auto kernel = norm_backward_fused_kernel<scalar_t, weight_t, Plan>;
  int device = 0;
  DeviceFacts facts;
  cudaError_t error = device_facts(device, facts);
  if (error == cudaSuccess) error = allowed.run(device, [&] { return allow_more(kernel, kBytes, facts.max_cluster); });
  if (error != cudaSuccess) return error;
  clusters = device < kDevices ? known[device][cluster].load(std::memory_order_relaxed) : 0;
  if (clusters > 0) return cudaSuccess;
  if (cluster > 1) {
    const ClusterLaunch one(cluster, kBackwardThreads<Plan>, kBytes, cluster);
    error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &one.config);
  } else {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&clusters, kernel, kBackwardThreads<Plan>, kBytes);
    clusters *= facts.multiprocessors;
  }
  if (error == cudaSuccess && device < kDevices) known[device][cluster].store(clusters, std::memory_order_relaxed);
  return error;
}

template <typename scalar_t, typename weight_t, typename Plan>
cudaError_t plan_launch(const NormBackwardParams& params, BackwardLaunch& launch) {
  constexpr int64_t kRows = kBackwardThreads<Plan> / Plan::kThreads;
  const int64_t row_blocks = (params.rows + kRows - 1) / kRows;
  const int64_t vec_count = params.hidden_size / Plan::kVec;
  const bool wants_columns = params.grad_weight || params.grad_bias;
  if constexpr (fused_backward_fits<scalar_t, Plan>()) {
    // Rows longer than a block holds go to a cluster, whatever the number of rows: the sums of a row have one order
    int device = 0;
    DeviceFacts facts;
    cudaError_t error = device_facts(device, facts);
    if (error != cudaSuccess) return error;
    const int cluster = cluster_for<Plan>(vec_count, facts.max_cluster);
    const bool fits = vec_count <= static_cast<int64_t>(cluster) * Plan::kThreads * Plan::kVecs;
    const bool small = params.rows <= kSplitMaxRows && params.rows * params.hidden_size <= kSplitMaxElements;
    if (fits && params.grad_input && (cluster > 1 || (wants_columns && !small))) {
      int clusters = 0;
      error = resident_clusters<scalar_t, weight_t, Plan>(cluster, clusters);
      if (error != cudaSuccess) return error;
      if (clusters > 0) {
        launch.fused = true;
        launch.cluster = cluster;
        const int running = static_cast<int>(std::min<int64_t>(row_blocks, clusters));
        launch.blocks = running * cluster;
        launch.partials = wants_columns ? running : 0;
        return cudaSuccess;
      }
    }
  }
  if (params.grad_input) launch.row_blocks = row_blocks;
  if (wants_columns) {
    launch.column_lanes = kBackwardThreads<Plan>;
    while (launch.column_lanes > kColumnLanes<Plan::kVec> && kBackwardThreads<Plan> / launch.column_lanes < params.rows)
      launch.column_lanes /= 2;
    launch.column_tiles = static_cast<int>((vec_count + launch.column_lanes - 1) / launch.column_lanes);
    const int64_t rows_at_least =
        static_cast<int64_t>(kBackwardThreads<Plan> / launch.column_lanes) * kColumnRowsPerThread;
    const int64_t splits =
        std::clamp<int64_t>(kColumnBlocks / launch.column_tiles, 1, (params.rows + rows_at_least - 1) / rows_at_least);
    launch.blocks = static_cast<int>(launch.column_tiles * splits);
    launch.partials = splits > 1 ? static_cast<int>(splits) : 0;
  }
  return cudaSuccess;
}

template <typename F>
cudaError_t dispatch_backward(const NormBackwardParams& params, F&& f) {
  return dispatch_types(params.x_dtype, params.weight_dtype, [&](auto types) {
    using scalar_t = typename decltype(types)::scalar_t;
    using weight_t = typename decltype(types)::weight_t;
    return dispatch_plan<scalar_t, BackwardLadder>(params.hidden_size, [&](auto plan) {
      BackwardLaunch launch{};
      const cudaError_t error = plan_launch<scalar_t, weight_t, decltype(plan)>(params, launch);
      return error == cudaSuccess ? f(types, plan, launch) : error;
    });
  });
}

}  // namespace

int64_t norm_backward_workspace_cuda(const NormBackwardParams& params) {
  int64_t bytes = 0;
  dispatch_backward(params, [&](auto types, auto, const BackwardLaunch& launch) {
    using acc_t = acc_type<typename decltype(types)::scalar_t>;
    bytes = static_cast<int64_t>(launch.partials) * 2 * params.hidden_size * static_cast<int64_t>(sizeof(acc_t));
    return cudaSuccess;
  });
  return bytes;
}

int launch_norm_backward_cuda(const NormBackwardParams& params, CUstream_st* stream) {
  return dispatch_backward(params, [&](auto types, auto plan, const BackwardLaunch& launch) {
    using scalar_t = typename decltype(types)::scalar_t;
    using weight_t = typename decltype(types)::weight_t;
    using acc_t = acc_type<scalar_t>;
    using Plan = decltype(plan);
    const acc_t inverse_n = static_cast<acc_t>(1.0 / static_cast<double>(params.hidden_size));
    const bool x_aligned = rows_are_aligned<scalar_t, Plan::kVec>(params.x, params.x_strides);
    const bool grad_aligned = rows_are_aligned<scalar_t, Plan::kVec>(params.grad_output, params.grad_output_strides);
    if constexpr (fused_backward_fits<scalar_t, Plan>()) {
      if (launch.fused) {
        const ClusterLaunch persistent(launch.blocks, kBackwardThreads<Plan>, RowQueue<scalar_t, Plan>::kBytes,
                                       launch.cluster, stream);
        const cudaError_t error =
            cudaLaunchKernelEx(&persistent.config, norm_backward_fused_kernel<scalar_t, weight_t, Plan>, params,
                               inverse_n, x_aligned, grad_aligned);
        if (error != cudaSuccess) return error;
      }
    }
    if (!launch.fused)
      norm_backward_split_kernel<scalar_t, weight_t, Plan>
          <<<static_cast<unsigned>(launch.blocks + launch.row_blocks), kBackwardThreads<Plan>, 0, stream>>>(
              params, launch, inverse_n, x_aligned, grad_aligned);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess || launch.partials == 0) return error;
    const dim3 grid(static_cast<unsigned>((params.hidden_size + kFinalizeColumns - 1) / kFinalizeColumns), 2);
    norm_backward_finalize_kernel<acc_t>
        <<<grid, dim3(kFinalizeColumns, kFinalizeRows), 0, stream>>>(params, launch.partials);
    return cudaGetLastError();
  });
}

}  // namespace fused_layernorm
