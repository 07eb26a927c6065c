// Backward of LayerNorm and RMSNorm.
//
//   wdy = (weight+weight_offset)*grad_output     c1 = sum(x_hat*wdy)/N     c2 = is_rms_norm ? 0 : sum(wdy)/N
//   grad_input = (wdy - x_hat*c1 - c2)*rstd      grad_weight = sum over rows(grad_output*x_hat)
//                                                grad_bias   = sum over rows(grad_output)
//
// Two strategies here (launch_plan.h says when; a third, for huge rows, is in norm_huge.cu). Fused: persistent blocks
// walk over rows, read x and grad_output once, keep the weight gradients of their rows in registers and leave one
// partial sum a block. Split: blocks of rows and blocks of columns side by side in one launch. Both take the same steps
// per row in the same order with pinned rounding, so grad_input has the same bits either way. Partial sums are added in
// a fixed order: no atomics, no dependence on timing.
#include "backward_rows.cuh"
#include "dispatch.cuh"
#include "launch_plan.h"
#include "norm_params.h"
#include "reduce.cuh"
#include "vector_io.cuh"

namespace fused_layernorm {
namespace {

// The launch of one call, decided once: workspace size, grid and kernel arguments all follow from it.
struct BackwardLaunch {
  bool fused;
  int cluster;         // fused: blocks that share a row
  int depth;           // fused: stages of the ring of rows in flight
  int blocks;          // fused: persistent blocks; split: blocks of columns in all
  int64_t row_blocks;  // split: blocks of rows
  int column_lanes;    // split: threads side by side along a row, in a block of columns
  int column_tiles;    // split: blocks of columns along a row
  int partials;        // partial sums of the weight gradients to be finalized; 0: written directly
};

// ---- fused ---------------------------------------------------------------------------------------------------------

// The part of each row that a persistent block works on: all of it, or a slice where a cluster shares the row.
struct Slice {
  int blocks, rank;         // of the cluster
  int64_t first_col;        // a multiple of the vector
  int elements;             // may be 0 in the last blocks
  int first_row, row_step;  // of the block's first row; its other rows follow it. 32 bits: kFusedMaxRows

  template <typename Plan>
  __device__ static Slice of(const NormBackwardParams& params) {
    Slice slice;
    slice.blocks = Plan::kClusters ? cluster_size() : 1;
    slice.rank = Plan::kClusters ? cluster_rank() : 0;
    const int64_t vecs = vecs_of<Plan::kVec>(params.hidden_size);
    const int64_t most = (vecs + slice.blocks - 1) / slice.blocks * Plan::kVec;
    slice.first_col = slice.rank * most;
    slice.elements = static_cast<int>(max(min(most, params.hidden_size - slice.first_col), int64_t{0}));
    slice.first_row = static_cast<int>(blockIdx.x) / slice.blocks * Plan::kRows;
    slice.row_step = static_cast<int>(gridDim.x) / slice.blocks * Plan::kRows;
    return slice;
  }
};

// Rows of x and grad_output on their way from memory to the threads of a persistent block, some turns ahead of their
// use: a ring of stages in shared memory, each with one turn's rows of both. From sm_90 on a warp of its own asks the
// copy engine for them, as the aligned 16 bytes that cover a row wherever it lies; else each thread brings just the
// vectors that it will read.
//
// A row keeps its address's place within 128 bytes: where the two differ the copy engine fetches 5 sectors for 4 (ncu:
// 673 MB for 539), which cost a fifth of the bandwidth and looked like an effect of the ring's depth.
//
template <typename scalar_t, typename Plan>
struct RowRing {
#if __CUDA_ARCH__ >= 900
  static constexpr bool kBulk = true;
#else
  static constexpr bool kBulk = false;
#endif
  static constexpr int kVec = Plan::kVec, kVecs = Plan::kVecs, kThreads = Plan::kThreads, kRows = Plan::kRows;
  static constexpr int kVecBytes = kVec * static_cast<int>(sizeof(scalar_t));
  static constexpr bool kAligned = kVecBytes % 16 == 0;  // rows begin at multiples of 16 bytes
  static constexpr int kPitch =
      kThreads * kVecs * kVecBytes + 128;  // bytes of a row, its place and an overhang included
  static constexpr int kTensor = kRows * kPitch;
  static constexpr int kStageBytes = 2 * kTensor;
  static constexpr int kMaxDepth = 4;
  // Of a row in the ring: the shared addresses of its x and grad_output, and its statistics.
  struct Entry {
    unsigned x, grad;
    float rstd, mean;
  };
  struct Barriers {
    uint64_t full[kMaxDepth], empty[kMaxDepth];
    uint4 entries[kMaxDepth][kRows];
    float mean_tails[sizeof(scalar_t) == 4 ? kMaxDepth : 1][kRows];
  };

  unsigned memory, full, entries, mean_tails;        // shared addresses: of the first stage and what belongs to it
  static constexpr unsigned kEmpty = 8 * kMaxDepth;  // from a stage's full barrier to its empty one
  int depth, elements, stage = 0;
  unsigned parity = 0;

  // To be constructed by all threads of the block together.
  __device__ RowRing(void* memory, Barriers& barriers, const Slice& slice, int depth)
      : memory(shared_address(memory)),
        full(shared_address(barriers.full)),
        entries(shared_address(barriers.entries)),
        mean_tails(shared_address(barriers.mean_tails)),
        depth(depth),
        elements(slice.elements) {
    if (kBulk && threadIdx.x == 0) {
      for (int i = 0; i < kMaxDepth; ++i) {
        init_barrier(full + 8 * i, 1);
        init_barrier(full + kEmpty + 8 * i, kThreads * kRows / 32);
      }
      fence_barrier_init();
    }
  }

  __device__ unsigned half(int of_stage, int tensor) { return memory + (2 * of_stage + tensor) * kTensor; }
  __device__ void next_stage() {
    if (++stage == depth) {
      stage = 0;
      parity ^= 1;
    }
  }

  // The whole task of the warp that asks: stage after stage, as the readers are done with what was there. Each lane has
  // its copies to ask for: one lane alone would take longer to work out the addresses of short rows than they to come.
  __device__ void ask_for_all(const NormBackwardParams& params, const Slice& slice) {
    if constexpr (kBulk) {
      const int lane = threadIdx.x % 32;
      const unsigned row_bytes = static_cast<unsigned>(elements) * static_cast<unsigned>(sizeof(scalar_t));
      // Lanes of even number for x, of odd number for grad_output
      const bool for_x = lane % 2 == 0;
      const RowStrides strides = for_x ? params.x_strides : params.grad_output_strides;
      const char* data = static_cast<const char*>(for_x ? params.x : params.grad_output) +
                         slice.first_col * static_cast<int64_t>(sizeof(scalar_t));
      const auto source_of = [&](int row) {
        return data + strides.offset(row) * static_cast<int64_t>(sizeof(scalar_t));
      };
      const auto past_of = [&](const char* source) {
        return kAligned ? 0u : static_cast<unsigned>(reinterpret_cast<uintptr_t>(source) % 16);
      };
      // Whether a turn's rows are one run of memory, and so one copy
      const bool dense = !Plan::kClusters && strides.is_even(params.rows) && strides.row_stride == params.hidden_size;
      const int row_count = static_cast<int>(params.rows);
      // A turn's statistics are on their way while the turn before is asked for: rstd and mean_tail in lanes of even
      // number, mean in the others. A turn ahead, and waited for: the block that is furthest ahead waits for memory
      // here while the others find the same line in the cache, which keeps the blocks together (H200: with statistics
      // that arrive unwaited for, some SMs were done 30 to 70 us before the last, of 200).
      constexpr int kShares = (kRows + 15) / 16;
      float statistics[kShares], mean_tail[kShares];
      const float* statistic = static_cast<const float*>(for_x ? params.rstd : params.mean);
      const auto load_statistics = [&](int row) {
#pragma unroll
        for (int share = 0; share < kShares; ++share) {
          const int of_row = row + lane / 2 + 16 * share;
          statistics[share] = mean_tail[share] = 0;
          if (of_row >= row_count || !statistic) continue;
          statistics[share] = __ldg(statistic + of_row);
          if (sizeof(scalar_t) == 4 && for_x && params.mean_tail)
            mean_tail[share] = __ldg(static_cast<const float*>(params.mean_tail) + of_row);
        }
      };
      load_statistics(slice.first_row);
      for (int row = slice.first_row; row < row_count; row += slice.row_step) {
        const int count = min(kRows, row_count - row);
        const int copies = row_bytes == 0 ? 0 : dense ? 1 : count;
        const unsigned bytes = dense ? count * row_bytes : row_bytes;
        unsigned total = 2 * count * row_bytes;
        if constexpr (!kAligned) {
          total = 0;
          for (int group = lane / 2; group < copies; group += 16)
            total += (past_of(source_of(row + group)) + bytes + 15) / 16 * 16;
          total = __reduce_add_sync(0xffffffffu, total);
        }
        wait_barrier(full + kEmpty + 8 * stage, parity ^ 1);
        const unsigned start = half(stage, lane % 2);
#pragma unroll
        for (int share = 0; share < kShares; ++share) {
          const int group = lane / 2 + 16 * share;
          if (group >= count) continue;
          const unsigned place =
              dense ? static_cast<unsigned>(reinterpret_cast<uintptr_t>(source_of(row)) % 128) + group * row_bytes
                    : static_cast<unsigned>(reinterpret_cast<uintptr_t>(source_of(row + group)) % 128) + group * kPitch;
          const unsigned entry = entries + 16 * (stage * kRows + group) + 4 * (lane % 2);
          store_shared_element(entry, start + place);
          store_shared_element(entry + 8, statistics[share]);
          if (sizeof(scalar_t) == 4 && for_x)
            store_shared_element(mean_tails + 4 * (stage * kRows + group), mean_tail[share]);
        }
        load_statistics(row + slice.row_step);
        __syncwarp();
        if (lane == 0) expect_bytes(full + 8 * stage, total);
        __syncwarp();
#pragma unroll 1
        for (int group = lane / 2; group < copies; group += 16) {
          const char* source = source_of(row + group);
          const unsigned past = past_of(source);
          const unsigned place = static_cast<unsigned>(reinterpret_cast<uintptr_t>(source) % 128) + group * kPitch;
          copy_bulk(start + place - past, source - past, (past + bytes + 15) / 16 * 16, full + 8 * stage);
        }
        next_stage();
      }
      __syncwarp();
    }
  }

  // Each thread brings its own vectors of row `row` into stage `into`; a group of copies even where there is no such
  // row, as wait_full() counts groups. Nothing to do where the copy engine works.
  __device__ void bring(const NormBackwardParams& params, int64_t first_col, int64_t row, int group, int rank,
                        int into) {
    if constexpr (kBulk) return;
    if (row < params.rows) {
#pragma unroll
      for (int tensor = 0; tensor < 2; ++tensor) {
        const scalar_t* source = static_cast<const scalar_t*>(tensor == 0 ? params.x : params.grad_output) +
                                 (tensor == 0 ? params.x_strides : params.grad_output_strides).offset(row) + first_col;
        const unsigned target = half(into, tensor) + group * kPitch;
#pragma unroll 1
        for (int vec = rank; vec * kVec < elements; vec += kThreads) {
          if constexpr (kAligned) {
            copy_async(target + 16 * vec, source + vec * kVec);
          } else {
            for (int i = vec * kVec; i < min(vec * kVec + kVec, elements); ++i)
              store_shared_element(target + i * static_cast<int>(sizeof(scalar_t)), __ldg(source + i));
          }
        }
      }
    }
    commit_copies();
  }
  __device__ void bring_first(const NormBackwardParams& params, const Slice& slice, int group, int rank) {
    for (int ahead = 0; ahead < depth && !kBulk; ++ahead)
      bring(params, slice.first_col, slice.first_row + group + ahead * slice.row_step, group, rank, ahead);
  }

  // Returns when the current stage has arrived.
  __device__ void wait_full() {
    if constexpr (kBulk) return wait_barrier(full + 8 * stage, parity);
    switch (depth - Plan::kOneBehind) {
      case 1: return wait_for_copies<0>();
      case 2: return wait_for_copies<1>();
      case 3: return wait_for_copies<2>();
      default: return wait_for_copies<3>();
    }
  }

  // The `group`-th row of stage `of_stage`, row `row` of all.
  __device__ Entry entry(const NormBackwardParams& params, int of_stage, int row, int group) const {
    if constexpr (kBulk) {
      const uint4 found = load_shared(entries + 16 * (of_stage * kRows + group));
      return {found.x, found.y, __uint_as_float(found.z), __uint_as_float(found.w)};
    }
    const unsigned at = memory + 2 * of_stage * kTensor + group * kPitch;
    const auto stats = load_stats<scalar_t>(params, row);
    return {at, at + kTensor, static_cast<float>(stats.rstd), static_cast<float>(stats.mean)};
  }
  __device__ RowStats<scalar_t> stats(const NormBackwardParams& params, const Entry& entry, int of_stage, int row,
                                      int group) const {
    float mean_tail = 0;
    if constexpr (sizeof(scalar_t) == 4)
      mean_tail = kBulk ? load_shared_element<float>(mean_tails + 4 * (of_stage * kRows + group))
                        : static_cast<float>(load_stats<scalar_t>(params, row).mean_tail);
    return RowStats<scalar_t>({entry.rstd, entry.mean, mean_tail}, params);
  }
  // Vector `index` of a row that lies at `at`; of a last one the first `count` elements, and zeros.
  __device__ RawVec<scalar_t, kVec> vec(unsigned at, int index, int count) const {
    RawVec<scalar_t, kVec> raw;
    if constexpr (kAligned) {
      raw.words[0] = load_shared(at + 16 * index);
    } else {
      scalar_t found[kVec] = {};
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        if (i < count)
          found[i] = load_shared_element<scalar_t>(at + (index * kVec + i) * static_cast<int>(sizeof(scalar_t)));
      memcpy(&raw, found, sizeof(raw));
    }
    return raw;
  }
  // Gives stage `read` free: this warp has read all it needs of it. `next` is the row that comes there.
  __device__ void release(const NormBackwardParams& params, int64_t first_col, int read, int64_t next, int group,
                          int rank) {
    if constexpr (kBulk) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive_barrier(full + kEmpty + 8 * read);
    } else {
      bring(params, first_col, next, group, rank, read);
    }
  }
};

// The sums of a row, exchanged between the warps of its block or cluster while these go on: each warp leaves its sums
// for all with share(), and collect() waits for them, as late as the work allows. Four rows may be under way: a warp
// can share row j only when all have shared row j - 2, and so have collected row j - 4.
template <typename Plan, typename T>
struct SumExchange {
  static constexpr int kWarps = Plan::kThreads / 32, kRows = Plan::kRows, kSlots = 4;
  static constexpr int kCluster = Plan::kMaxCluster;
  struct Needed {
    Pair<T> sums[kRows][kSlots][kCluster * kWarps];
    uint64_t ready[kRows][kSlots];
  };
  struct Nothing {};
  using Shared = std::conditional_t<Plan::kOneBehind, Needed, Nothing>;

  Pair<T>* sums;
  unsigned ready;
  int blocks, rank;

  // To be constructed by all threads of the block together; ready to use after the next barrier of block or cluster.
  __device__ SumExchange(Shared& shared, const Slice& slice, int group) : blocks(slice.blocks), rank(slice.rank) {
    if constexpr (Plan::kOneBehind) {
      sums = shared.sums[group][0];
      ready = shared_address(shared.ready[group]);
      if (threadIdx.x == 0) {
        for (int i = 0; i < kRows * kSlots; ++i)
          init_barrier(shared_address(shared.ready[0]) + 8 * i, Plan::kClusters ? 1 : kWarps);
        fence_barrier_init();
      }
      for (int i = threadIdx.x; Plan::kClusters && i < kRows * kSlots * kCluster * kWarps; i += blockDim.x)
        shared.sums[0][0][i] = Pair<T>{0, 0};
    }
  }

  using Row = RowThreads<Plan::kThreads, kRows>;

  // Of the block's `turn`-th row.
  __device__ void share(int turn, Pair<T> value) {
    const int lane = threadIdx.x % 32, warp = Row::warp(), slot = turn % kSlots;
    Pair<T>* target = sums + slot * kCluster * kWarps + rank * kWarps + warp;
    const T half = lanes_half_sum<Row, 32>(value);
    if constexpr (Plan::kClusters) {
      const T other = __shfl_xor_sync(0xffffffffu, half, 16);
      if (Row::rank() == 0) expect_bytes(ready + 8 * slot, blocks * kWarps * static_cast<unsigned>(sizeof(Pair<T>)));
      const Pair<T> both{lane < 16 ? half : other, lane < 16 ? other : half};
      if (lane < blocks) send_to_peer(target, ready + 8 * slot, lane, both);
    } else {
      if (lane % 16 == 0) reinterpret_cast<T*>(target)[lane / 16] = half;
      __syncwarp();
      if (lane == 0) arrive_barrier(ready + 8 * slot);
    }
  }
  __device__ Pair<T> collect(int turn) {
    const int slot = turn % kSlots;
    wait_barrier(ready + 8 * slot, turn / kSlots % 2);
    const Pair<T>* shared = sums + slot * kCluster * kWarps;
    if constexpr (!Plan::kClusters) {
      return sum_of_warps<kWarps>(shared);
    } else {
      constexpr int kSums = kCluster * kWarps;  // those of blocks that are not there are 0
      constexpr int kLanes = kSums < 32 ? kSums : 32;
      Pair<T> sum{0, 0};
#pragma unroll
      for (int index = 0; index < kSums; index += kLanes) {
        const Pair<T> here = shared[index + threadIdx.x % kLanes];
        sum.first += here.first;
        sum.second += here.second;
      }
      return {Row::template lanes_sum<kLanes>(sum.first), Row::template lanes_sum<kLanes>(sum.second)};
    }
  }
};

template <typename scalar_t, typename weight_t, typename Plan>
__global__ void __launch_bounds__(kFusedThreads<Plan>, Plan::kBlocksPerSm)
    norm_backward_fused_kernel(const __grid_constant__ NormBackwardParams params, acc_type<scalar_t> inverse_n,
                               int depth) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kThreads = Plan::kThreads, kVecs = Plan::kVecs, kVec = Plan::kVec, kRows = Plan::kRows;
  using Row = RowThreads<kThreads, kRows>;
  using Ring = RowRing<scalar_t, Plan>;
  constexpr bool kAligned = Ring::kAligned;
  using Exchange = SumExchange<Plan, acc_t>;
  extern __shared__ __align__(128) uint4 ring_memory[];
  __shared__ typename Ring::Barriers ring_barriers;
  // Sums of a row: within a warp, at once between the warps of a block, or one row behind
  __shared__ Pair<acc_t> scratch[2][kRows * Row::kWarps];
  __shared__ typename Exchange::Shared exchange_shared;

  // Which rows, and which slice of them
  const Slice slice = Slice::of<Plan>(params);
  const int rank = Row::rank(), group = Row::group();
  Ring ring(ring_memory, ring_barriers, slice, depth);
  Exchange exchange(exchange_shared, slice, min(group, kRows - 1));
  if constexpr (Plan::kClusters) {
    cluster_sync();
  } else {
    __syncthreads();
  }

  // Elements of the slice from this thread's first vector on; its others are kThreads vectors apart
  const int elements_left = slice.elements - rank * kVec;
  const auto elements_of = [&](int v) { return elements_left - v * kThreads * kVec; };
  acc_t grad_weight[kVecs][kVec], grad_bias[kVecs][kVec];
  if (threadIdx.x >= kThreads * kRows) {
    ring.ask_for_all(params, slice);
  } else {
    acc_t weight[kVecs][kVec];
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      load_weight<weight_t>(weight[v], params, slice.first_col + (v * kThreads + rank) * kVec, elements_of(v));
#pragma unroll
      for (int i = 0; i < kVec; ++i) grad_weight[v][i] = grad_bias[v][i] = 0;
    }
    ring.bring_first(params, slice, group, rank);
    const int rows = static_cast<int>(params.rows);
    int row = slice.first_row + group;
    scalar_t* grad_input = static_cast<scalar_t*>(params.grad_input) + static_cast<int64_t>(row) * params.hidden_size +
                           slice.first_col + rank * kVec;

    // Of whole vectors, where the slice has no v-th for this thread, the row's first with weight 0 takes its place: no
    // branch is needed and nothing but the row's own values can reach its sums.
    const auto read = [&](unsigned at, int v) {
      return ring.vec(at, kAligned && elements_of(v) <= 0 ? 0 : v * kThreads + rank, elements_of(v));
    };
    // Sums along the row, and this row's part of the sums along the columns
    const auto add_up = [&](const RowStats<scalar_t>& stats, auto x_vec, auto grad_vec) {
      Pair<acc_t> sums{0, 0};
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        acc_t x[kVec], grad[kVec];
        unpack(x_vec(v), x);
        unpack(grad_vec(v), grad);
        add_to_row(sums, stats, x, grad, weight[v]);
        add_to_columns(grad_weight[v], grad_bias[v], stats, x, grad);
      }
      return sums;
    };
    const auto store = [&](const RowStats<scalar_t>& stats, Pair<acc_t> sums, auto x_vec, auto grad_vec) {
      const Pair<acc_t> row_terms = slope_and_level(sums, stats, params, inverse_n);
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        acc_t x[kVec], grad[kVec], values[kVec];
        unpack(x_vec(v), x);
        unpack(grad_vec(v), grad);
        grad_input_of(values, stats, row_terms, x, grad, weight[v]);
        if constexpr (kAligned) {
          store_vec_if(elements_of(v) > 0, grad_input + v * kThreads * kVec, values);
        } else {
#pragma unroll
          for (int i = 0; i < kVec; ++i)
            if (i < elements_of(v)) grad_input[v * kThreads * kVec + i] = narrow<scalar_t>(values[i]);
        }
      }
      grad_input += slice.row_step * params.hidden_size;
    };

    if constexpr (!Plan::kOneBehind) {
      // Load, sums, store: the row stays in registers
#pragma unroll 1
      for (int turn = 0; row < rows; row += slice.row_step, turn ^= 1) {
        ring.wait_full();
        RawVec<scalar_t, kVec> x_raw[kVecs], grad_raw[kVecs];
        const auto entry = ring.entry(params, ring.stage, row, group);
        const RowStats<scalar_t> stats = ring.stats(params, entry, ring.stage, row, group);
#pragma unroll
        for (int v = 0; v < kVecs; ++v) {
          x_raw[v] = read(entry.x, v);
          grad_raw[v] = read(entry.grad, v);
        }
        ring.release(params, slice.first_col, ring.stage, row + depth * slice.row_step, group, rank);
        ring.next_stage();
        const Pair<acc_t> sums = row_sum<Row>(
            add_up(stats, [&](int v) { return x_raw[v]; }, [&](int v) { return grad_raw[v]; }), scratch[turn]);
        forget(x_raw);
        forget(grad_raw);
        store(stats, sums, [&](int v) { return x_raw[v]; }, [&](int v) { return grad_raw[v]; });
      }
    } else {
      // The sums of one row travel between warps and blocks while the next row is added up; then the row is read from
      // its stage again. Nothing of it stays in registers, so that a thread can hold more columns.
      int turn = 0;
      const auto finish = [&] {
        const int behind = ring.stage == 0 ? depth - 1 : ring.stage - 1;
        const auto entry = ring.entry(params, behind, row - slice.row_step, group);
        store(
            ring.stats(params, entry, behind, row - slice.row_step, group), exchange.collect(turn - 1),
            [&](int v) { return read(entry.x, v); }, [&](int v) { return read(entry.grad, v); });
        ring.release(params, slice.first_col, behind, row + (depth - 1) * slice.row_step, group, rank);
      };
#pragma unroll 1
      for (; row < rows; row += slice.row_step, ++turn) {
        ring.wait_full();
        const auto entry = ring.entry(params, ring.stage, row, group);
        exchange.share(turn, add_up(
                                 ring.stats(params, entry, ring.stage, row, group),
                                 [&](int v) { return read(entry.x, v); }, [&](int v) { return read(entry.grad, v); }));
        if (turn > 0) finish();
        ring.next_stage();
      }
      if (turn > 0) finish();
    }
  }
  if constexpr (Plan::kClusters) {
    cluster_sync();  // no block leaves while others may write to it
  } else {
    __syncthreads();
  }
  if (!params.workspace) return;  // no weight gradients wanted

  // The rows of this block, or cluster, become one partial sum, [grad_weight, grad_bias] of hidden_size each: over the
  // rows of a warp by exchange, then row after row through the ring's memory
  constexpr int kColumns = kThreads * kVecs * kVec;
  constexpr int kAdders = kRows * Row::kLanes / 32 > 0 ? kRows * Row::kLanes / 32 : 1;
  acc_t* merged = reinterpret_cast<acc_t*>(ring_memory);
  acc_t* partial = static_cast<acc_t*>(params.workspace) +
                   static_cast<int64_t>(blockIdx.x / slice.blocks) * 2 * params.hidden_size + slice.first_col;
  const int adder = kThreads < 32 ? threadIdx.x / 32 : group;
  if (kThreads < 32 && threadIdx.x < kThreads * kRows) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v)
#pragma unroll
      for (int i = 0; i < kVec; ++i)
#pragma unroll
        for (int offset = kThreads; offset < 32; offset *= 2) {
          grad_weight[v][i] += __shfl_xor_sync(0xffffffffu, grad_weight[v][i], offset);
          grad_bias[v][i] += __shfl_xor_sync(0xffffffffu, grad_bias[v][i], offset);
        }
  }
  const bool adds = threadIdx.x < kThreads * kRows && (kThreads >= 32 || threadIdx.x % 32 < kThreads);
  for (int turn = 0; turn < kAdders; ++turn) {
    if (adds && turn == adder) {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        const int col = (v * kThreads + rank) * kVec;
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          if (i >= elements_of(v)) continue;
          if (turn > 0) {
            grad_weight[v][i] += merged[col + i];
            grad_bias[v][i] += merged[kColumns + col + i];
          }
          if (turn < kAdders - 1) {
            merged[col + i] = grad_weight[v][i];
            merged[kColumns + col + i] = grad_bias[v][i];
          } else {
            partial[col + i] = grad_weight[v][i];
            partial[params.hidden_size + col + i] = grad_bias[v][i];
          }
        }
      }
    }
    if (turn < kAdders - 1) __syncthreads();
  }
}

// ---- split ---------------------------------------------------------------------------------------------------------

// grad_input of one row, tile by tile where it is longer than the registers hold.
template <typename scalar_t, typename weight_t, typename Plan>
__device__ __forceinline__ void backward_of_row(const NormBackwardParams& params, int64_t row,
                                                acc_type<scalar_t> inverse_n, Pair<acc_type<scalar_t>>* scratch) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kThreads = Plan::kThreads, kVecs = Plan::kVecs, kVec = Plan::kVec, kTile = kThreads * kVecs * kVec;
  using Row = RowThreads<kThreads, kSplitThreads<Plan> / kThreads>;
  const scalar_t* x_row = static_cast<const scalar_t*>(params.x) + params.x_strides.offset(row);
  const scalar_t* grad_row = static_cast<const scalar_t*>(params.grad_output) + params.grad_output_strides.offset(row);
  const int own = Row::rank() * kVec;
  const int hidden_size = static_cast<int>(params.hidden_size);
  const int last_tile = (hidden_size - 1) / kTile * kTile;
  const RowStats<scalar_t> stats(load_stats<scalar_t>(params, row), params);

  RawVec<scalar_t, kVec> x_raw[kVecs], grad_raw[kVecs];
  const auto load = [&](int tile) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int col = tile + v * kThreads * kVec + own;
      x_raw[v] = load_some<scalar_t, kVec>(x_row + col, hidden_size - col);
      grad_raw[v] = load_some<scalar_t, kVec>(grad_row + col, hidden_size - col);
    }
  };
  Pair<acc_t> sums{0, 0};
  acc_t x[kVec], grad[kVec], weight[kVec];
#pragma unroll 1
  for (int tile = 0; tile <= last_tile; tile += kTile) {
    load(tile);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int col = tile + v * kThreads * kVec + own;
      if (col >= hidden_size) continue;
      unpack(x_raw[v], x);
      unpack(grad_raw[v], grad);
      load_weight<weight_t>(weight, params, col, hidden_size - col);
      add_to_row(sums, stats, x, grad, weight);
    }
  }
  const Pair<acc_t> row_terms = slope_and_level(row_sum<Row>(sums, scratch), stats, params, inverse_n);

  forget(x_raw);
  forget(grad_raw);
  scalar_t* grad_input = static_cast<scalar_t*>(params.grad_input) + row * params.hidden_size;
#pragma unroll 1
  for (int tile = last_tile; tile >= 0; tile -= kTile) {  // backwards: the last tile is still in registers
    if (tile != last_tile) load(tile);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int col = tile + v * kThreads * kVec + own;
      if (col >= hidden_size) continue;
      unpack(x_raw[v], x);
      unpack(grad_raw[v], grad);
      load_weight<weight_t>(weight, params, col, hidden_size - col);
      acc_t values[kVec];
      grad_input_of(values, stats, row_terms, x, grad, weight);
      store_some(grad_input + col, values, hidden_size - col);
    }
  }
}

// The weight gradients of `lanes` vectors of columns, over rows first_row, first_row + row_step, ... Threads lie
// `lanes` along a row and kBlock/lanes along the rows; the latter are added up through `scratch`, 2*kBlock*kVec sums.
template <typename scalar_t, int kVec, int kBlock>
__device__ __forceinline__ void backward_of_columns(const NormBackwardParams& params, int tile, int split, int splits,
                                                    int lanes, acc_type<scalar_t>* scratch) {
  using acc_t = acc_type<scalar_t>;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int row_lane = static_cast<int>(threadIdx.x) / lanes;
  const int row_lanes = kBlock / lanes;
  const int64_t col = (static_cast<int64_t>(tile) * lanes + lane) * kVec;
  const int count = static_cast<int>(max(min(params.hidden_size - col, int64_t{kVec}), int64_t{0}));
  const int64_t rows_per_split = (params.rows + splits - 1) / splits;
  const int64_t first_row = split * rows_per_split;
  const int64_t end_row = min(first_row + rows_per_split, params.rows);

  acc_t grad_weight[kVec] = {}, grad_bias[kVec] = {};
  if (count > 0) {
    const scalar_t* x_column = static_cast<const scalar_t*>(params.x) + col;
    const scalar_t* grad_column = static_cast<const scalar_t*>(params.grad_output) + col;
#pragma unroll 4
    for (int64_t row = first_row + row_lane; row < end_row; row += row_lanes) {
      const scalar_t* x_at = x_column + params.x_strides.offset(row);
      const scalar_t* grad_at = grad_column + params.grad_output_strides.offset(row);
      const RowStats<scalar_t> stats(load_stats<scalar_t>(params, row), params);
      acc_t x[kVec], grad[kVec];
      unpack(load_some<scalar_t, kVec>(x_at, count), x);
      unpack(load_some<scalar_t, kVec>(grad_at, count), grad);
      add_to_columns(grad_weight, grad_bias, stats, x, grad);
    }
  }

  // Along the rows: first within a warp, then each column of each gradient by one thread, in order
#pragma unroll
  for (int i = 0; i < kVec; ++i)
    for (int offset = lanes; offset < 32; offset *= 2) {
      grad_weight[i] += __shfl_xor_sync(0xffffffffu, grad_weight[i], offset);
      grad_bias[i] += __shfl_xor_sync(0xffffffffu, grad_bias[i], offset);
    }
  const int columns = lanes * kVec;
  const int group_threads = max(lanes, 32);
  const int groups = kBlock / group_threads;
  if (static_cast<int>(threadIdx.x) % group_threads < lanes) {
    acc_t* sums = scratch + static_cast<int>(threadIdx.x) / group_threads * 2 * columns + lane * kVec;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      sums[i] = grad_weight[i];
      sums[columns + i] = grad_bias[i];
    }
  }
  __syncthreads();
  for (int index = threadIdx.x; index < 2 * columns; index += kBlock) {
    const bool of_weight = index < columns;
    const int64_t at = static_cast<int64_t>(tile) * columns + (of_weight ? index : index - columns);
    void* gradient = of_weight ? params.grad_weight : params.grad_bias;
    if (!gradient || at >= params.hidden_size) continue;
    acc_t sum = 0;
    for (int group = 0; group < groups; ++group) sum += scratch[group * 2 * columns + index];
    if (splits > 1) {
      static_cast<acc_t*>(params.workspace)[(2 * split + !of_weight) * params.hidden_size + at] = sum;
    } else {
      store_as(gradient, of_weight ? params.grad_weight_dtype : params.grad_bias_dtype, at, sum);
    }
  }
}

template <typename scalar_t, typename weight_t, typename Plan>
__global__ void __launch_bounds__(kSplitThreads<Plan>, kSplitBlocksPerSm<Plan>)
    norm_backward_split_kernel(const __grid_constant__ NormBackwardParams params, const BackwardLaunch launch,
                               acc_type<scalar_t> inverse_n) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kBlock = kSplitThreads<Plan>;
  constexpr int kRows = kBlock / Plan::kThreads;
  using Row = RowThreads<Plan::kThreads, kRows>;
  __shared__ union {
    Pair<acc_t> rows[kRows * Row::kWarps];
    acc_t columns[2 * kBlock * Plan::kVec];
  } scratch;
  wait_for_previous_kernel();

  // Columns first: they take longest, and rows fill the gaps they leave
  const int64_t block = static_cast<int64_t>(blockIdx.x) - launch.blocks;
  if (block < 0) {
    const int splits = launch.blocks / launch.column_tiles;
    backward_of_columns<scalar_t, Plan::kVec, kBlock>(params, blockIdx.x % launch.column_tiles,
                                                      blockIdx.x / launch.column_tiles, splits, launch.column_lanes,
                                                      scratch.columns);
  } else {
    const int64_t row = block * kRows + Row::group();
    if (row >= params.rows) return;
    backward_of_row<scalar_t, weight_t, Plan>(params, row, inverse_n, scratch.rows);
  }
}

// ---- finalize ------------------------------------------------------------------------------------------------------

// Adds up `partials` partial sums [grad_weight, grad_bias]: kRows threads side by side each take every kRows-th, in
// order of the block that left them.
template <typename acc_t, int kRows>
__global__ void __launch_bounds__(kFinalizeColumns* kRows)
    norm_backward_finalize_kernel(const __grid_constant__ NormBackwardParams params, int partials) {
  __shared__ acc_t scratch[kRows][kFinalizeColumns];
  wait_for_previous_kernel();
  void* gradient = blockIdx.y == 0 ? params.grad_weight : params.grad_bias;
  if (!gradient) return;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kFinalizeColumns + threadIdx.x;
  acc_t sum = 0;
  if (column < params.hidden_size) {
    const acc_t* partial = static_cast<const acc_t*>(params.workspace) + blockIdx.y * params.hidden_size + column;
#pragma unroll 4
    for (int index = threadIdx.y; index < partials; index += kRows)
      sum += partial[static_cast<int64_t>(index) * 2 * params.hidden_size];
  }
  scratch[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= params.hidden_size) return;
#pragma unroll
  for (int row = 1; row < kRows; ++row) sum += scratch[row][threadIdx.x];
  store_as(gradient, blockIdx.y == 0 ? params.grad_weight_dtype : params.grad_bias_dtype, column, sum);
}

template <typename T>
cudaError_t finalize_weight_gradients(const NormBackwardParams& params, int partials, cudaStream_t stream) {
  const auto launch = [&](auto rows) {
    constexpr int kRows = decltype(rows)::value;
    const OverlappedLaunch sum(
        dim3(static_cast<unsigned>((params.hidden_size + kFinalizeColumns - 1) / kFinalizeColumns), 2),
        dim3(kFinalizeColumns, kRows), stream);
    return cudaLaunchKernelEx(&sum.config, norm_backward_finalize_kernel<T, kRows>, params, partials);
  };
  if (partials <= kFewPartials) return launch(std::integral_constant<int, 4>{});
  return launch(std::integral_constant<int, kFinalizeRows>{});
}

// ---- host ----------------------------------------------------------------------------------------------------------

// How a fused kernel runs on the current device in clusters of `cluster`: as deep a ring as fits, up to the plan's, and
// how many clusters at once. Asked of the driver once a device and size.
struct Residence {
  int depth = 0, clusters = 0;
};

template <typename scalar_t, typename weight_t, typename Plan>
cudaError_t residence_of(int device, const DeviceFacts& facts, int cluster, Residence& residence) {
  constexpr int kDevices = 64;
  static std::atomic<uint64_t> known[kDevices][kMaxCluster + 1];
  static OncePerDevice allowed;
  using Ring = RowRing<scalar_t, Plan>;
  const auto kernel = norm_backward_fused_kernel<scalar_t, weight_t, Plan>;
  const uint64_t before = device < kDevices ? known[device][cluster].load(std::memory_order_relaxed) : 0;
  if (before > 0) {
    residence = {static_cast<int>(before >> 32), static_cast<int>(before & 0xffffffffu)};
    return cudaSuccess;
  }
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) return error;
  const int room = facts.shared_bytes - static_cast<int>(attributes.sharedSizeBytes);
  const int depth = std::min(kFusedDepth<Plan>, room / Ring::kStageBytes);
  if (depth < 2 + Plan::kOneBehind) return cudaSuccess;
  const int bytes = depth * Ring::kStageBytes;
  error = allowed.run(device, [&] { return allow_more(kernel, bytes, Plan::kClusters ? facts.max_cluster : 1); });
  if (error != cudaSuccess) return error;
  int clusters = 0;
  if (cluster > 1) {
    const ClusterLaunch one(cluster, kFusedThreads<Plan>, bytes, cluster);
    error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &one.config);
  } else {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&clusters, kernel, kFusedThreads<Plan>, bytes);
    clusters = std::min(clusters, Plan::kBlocksPerSm) * facts.multiprocessors;
  }
  if (error != cudaSuccess) return error;
  residence = {depth, clusters};
  if (device < kDevices)
    known[device][cluster].store(static_cast<uint64_t>(depth) << 32 | static_cast<uint32_t>(clusters),
                                 std::memory_order_relaxed);
  return cudaSuccess;
}

template <typename scalar_t, typename weight_t, typename Plan>
cudaError_t plan_launch(const NormBackwardParams& params, int device, const DeviceFacts& facts,
                        BackwardLaunch& launch) {
  const int64_t vec_count = vecs_of<Plan::kVec>(params.hidden_size);
  const bool wants_columns = params.grad_weight || params.grad_bias;
  if constexpr (sizeof(scalar_t) < 8) {
    // Rows longer than a block holds go to a cluster, whatever the number of rows: the sums of a row have one order
    const int cluster = cluster_for<Plan>(vec_count, facts.max_cluster);
    const bool fits = vec_count <= static_cast<int64_t>(cluster) * Plan::kThreads * Plan::kVecs;
    const bool small = params.rows <= kSplitMaxRows && params.rows * params.hidden_size <= kSplitMaxElements;
    if (fits && params.grad_input && params.rows <= kFusedMaxRows &&
        (Plan::kClusters ? cluster > 1 : wants_columns && !small)) {
      Residence residence;
      const cudaError_t error = residence_of<scalar_t, weight_t, Plan>(device, facts, cluster, residence);
      if (error != cudaSuccess) return error;
      if (residence.clusters > 0) {
        const int64_t turns = (params.rows + Plan::kRows - 1) / Plan::kRows;
        const int running = static_cast<int>(std::min<int64_t>(turns, residence.clusters));
        launch.fused = true;
        launch.cluster = cluster;
        launch.depth = residence.depth;
        launch.blocks = running * cluster;
        launch.partials = wants_columns ? running : 0;
        return cudaSuccess;
      }
    }
  }
  constexpr int kRows = kSplitThreads<Plan> / Plan::kThreads;
  if (params.grad_input) launch.row_blocks = (params.rows + kRows - 1) / kRows;
  if (wants_columns) {
    launch.column_lanes = kSplitThreads<Plan>;
    while (launch.column_lanes > kColumnLanes<Plan::kVec> && kSplitThreads<Plan> / launch.column_lanes < params.rows)
      launch.column_lanes /= 2;
    launch.column_tiles = static_cast<int>((vec_count + launch.column_lanes - 1) / launch.column_lanes);
    const int64_t rows_at_least =
        static_cast<int64_t>(kSplitThreads<Plan> / launch.column_lanes) * kColumnRowsPerThread;
    const int64_t splits =
        std::clamp<int64_t>(kColumnBlocks / launch.column_tiles, 1, (params.rows + rows_at_least - 1) / rows_at_least);
    launch.blocks = static_cast<int>(launch.column_tiles * splits);
    launch.partials = splits > 1 ? static_cast<int>(splits) : 0;
  }
  return cudaSuccess;
}

template <typename F>
cudaError_t dispatch_backward(const NormBackwardParams& params, F&& f) {
  int device = 0;
  DeviceFacts facts;
  const cudaError_t error = device_facts(device, facts);
  if (error != cudaSuccess) return error;
  return dispatch_types(params.x_dtype, params.weight_dtype, [&](auto types) {
    using scalar_t = typename decltype(types)::scalar_t;
    using weight_t = typename decltype(types)::weight_t;
    return dispatch_rows<BackwardLadder<scalar_t>, RaggedBackwardLadder<scalar_t>, scalar_t>(
        params.hidden_size, facts.max_cluster, [&](auto plan) {
          BackwardLaunch launch{};
          const cudaError_t error = plan_launch<scalar_t, weight_t, decltype(plan)>(params, device, facts, launch);
          return error == cudaSuccess ? f(types, plan, launch) : error;
        });
  });
}

}  // namespace

cudaError_t launch_backward_finalize(const NormBackwardParams& params, int partials, cudaStream_t stream) {
  return params.x_dtype == DType::kFloat64 ? finalize_weight_gradients<double>(params, partials, stream)
                                           : finalize_weight_gradients<float>(params, partials, stream);
}

int64_t norm_backward_workspace_cuda(const NormBackwardParams& params) {
  if (is_huge_backward(params)) return backward_huge_workspace(params);
  int64_t bytes = 0;
  dispatch_backward(params, [&](auto types, auto, const BackwardLaunch& launch) {
    using acc_t = acc_type<typename decltype(types)::scalar_t>;
    bytes = static_cast<int64_t>(launch.partials) * 2 * params.hidden_size * static_cast<int64_t>(sizeof(acc_t));
    return cudaSuccess;
  });
  return bytes;
}

int launch_norm_backward_cuda(const NormBackwardParams& params, CUstream_st* stream) {
  if (is_huge_backward(params)) return launch_backward_huge(params, stream);
  return dispatch_backward(params, [&](auto types, auto plan, const BackwardLaunch& launch) {
    using scalar_t = typename decltype(types)::scalar_t;
    using weight_t = typename decltype(types)::weight_t;
    using acc_t = acc_type<scalar_t>;
    using Plan = decltype(plan);
    const acc_t inverse_n = static_cast<acc_t>(1.0 / static_cast<double>(params.hidden_size));
    if constexpr (sizeof(scalar_t) < 8) {
      if (launch.fused) {
        const ClusterLaunch persistent(launch.blocks, kFusedThreads<Plan>,
                                       launch.depth * RowRing<scalar_t, Plan>::kStageBytes, launch.cluster, stream);
        const cudaError_t error = cudaLaunchKernelEx(
            &persistent.config, norm_backward_fused_kernel<scalar_t, weight_t, Plan>, params, inverse_n, launch.depth);
        if (error != cudaSuccess) return error;
      }
    }
    if (!launch.fused) {
      const OverlappedLaunch split(dim3(static_cast<unsigned>(launch.blocks + launch.row_blocks)),
                                   dim3(kSplitThreads<Plan>), stream);
      const cudaError_t error = cudaLaunchKernelEx(&split.config, norm_backward_split_kernel<scalar_t, weight_t, Plan>,
                                                   params, launch, inverse_n);
      if (error != cudaSuccess) return error;
    }
    if (launch.partials == 0) return cudaSuccess;
    return finalize_weight_gradients<acc_t>(params, launch.partials, stream);
  });
}

}  // namespace fused_layernorm
