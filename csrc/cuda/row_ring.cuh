// Data movement of the fused backward kernels: the pipeline that brings rows of x and of the gradients into shared
// memory, and the all-reduce of a row's sums between the warps and blocks that share it.
#pragma once

#include <algorithm>
#include <climits>
#include <cstddef>

#include "async.cuh"
#include "backward_rows.cuh"
#include "kernel_params.h"
#include "launch_plan.h"
#include "pace.cuh"
#include "reduce.cuh"
#include "stages.cuh"
#include "vector_io.cuh"

namespace fused_layernorm {
namespace {

// Whether threads have registers to keep shared addresses. Otherwise they are recomputed for each row, about 20
// instructions of 600 with 16 elements a thread.
template <typename Shape>
constexpr bool kHasRoom = Shape::kOneBehind && Shape::kVecs * Shape::kVec <= 16;

// The straight-line code of a fused kernel for one kind of call; chosen by one uniform branch a block.
enum class Path { kPlain, kLoad, kFromY, kGate, kEpilogue, kRowGateOfX, kRowGateOfY };

// Compile-time properties of a path. grad: the type of grad_output, grad_input, gate and forward's x: scalar_t, or a
// 16-bit type beside fp32 z. by_words: ragged rows are whole words of two elements.
template <typename grad, Path path, bool by_words = false>
struct Work {
  using grad_t = grad;
  static constexpr bool kByWords = by_words;
  static constexpr bool kIsPlain = path == Path::kPlain;
  static constexpr bool kFromY = path == Path::kFromY;
  static constexpr bool kHasGate = path == Path::kGate;
  static constexpr bool kHasEpilogue = path == Path::kEpilogue;
  static constexpr bool kGatesY = path == Path::kRowGateOfY;
  static constexpr bool kHasRowGate = path == Path::kRowGateOfX || kGatesY;
  // A third tensor of rows and a second result: grad_residual_out and grad_residual, or a row gate and its gradient,
  // which fused_arguments() puts in their place
  static constexpr bool kAlwaysAdds = path == Path::kLoad || path == Path::kGate || kHasRowGate;
  static constexpr bool kMayAdd = kAlwaysAdds || kHasEpilogue;  // a load stage; with an epilogue a run-time value
  static constexpr int kTensors = kHasGate  ? 4
                                  : kMayAdd ? 3
                                            : 2;  // at most: x, grad_output, grad_residual_out, gate's x
};

// A block's sums along its slice of a row, in global memory.
struct alignas(16) BlockSums {
  float first, second;
  unsigned is_there;
};

// Arguments of a fused kernel beside KernelBackwardParams.
struct FusedArguments {
  GradStages stages;
  int cluster, threads, rows, slice, warp_slice;  // of FusedRowsPlan; slice in elements. cluster: blocks of a row
  int inverse_of_warps;   // 1024 / warps of a row, rounded up, so that `warp * inverse_of_warps >> 10` is a row
  int row_step;           // from a row of a block to its next one
  unsigned element_step;  // the same in elements of a result: at most what all blocks hold, so that it fits
  int depth, slot_bytes;  // of the ring: its slots, and RowRing::slot_bytes_of()
  int sums, exchange;     // of SumExchange: sums in a slot, and its place in shared memory
  float inverse_n;
  // With an epilogue: norm_scale multiplies weight and bias so that u is scaled for slope(); the other factors correct
  // the sums along the row, wdy, and the sums along the columns.
  float norm_scale, sum_factor, wdy_factor, column_factor;
  // With a global exchange
  BlockSums* block_sums;  // [rows, cluster], initially 0
  int behind;             // iterations from a row's sums to its end
};

// The threads of a row and the rows of a block: run-time values, but where a row has one warp or less.
template <typename Shape>
__device__ __forceinline__ int threads_of_row(const FusedArguments& arguments) {
  return Shape::kOneWarp ? Shape::kLanes : arguments.threads;
}
// Warps of a block that have rows.
template <typename Shape>
__device__ __forceinline__ int consumer_warps() {
  return blockDim.x / 32 - Shape::kHasProducer - Shape::kExchangers;
}

// In the grid, the index of this block or of the blocks that share rows with it.
template <typename Shape>
__device__ __forceinline__ int index_of_blocks(const FusedArguments& arguments) {
  const int block = static_cast<int>(blockIdx.x);
  return Shape::kClusters ? cluster_index() : Shape::kGlobalExchange ? block / arguments.cluster : block;
}

// The columns of a block: all, or a slice if several blocks share the row; and its rows: of all, or of one segment.
struct Slice {
  int rank;                 // of the block, in its cluster or among all blocks of the row
  int64_t first_col;        // a multiple of the vector
  int elements;             // may be 0 in the last blocks
  int first_row, end_row;   // the block's first row; its other rows follow it. 32 bits: kFusedMaxRows
  int segment;              // of the rows, where they have several
  int64_t first_parameter;  // where weight and bias of these columns begin

  template <typename Shape>
  __device__ static Slice of(const KernelBackwardParams& params, const FusedArguments& arguments) {
    Slice slice;
    slice.rank = Shape::kClusters         ? cluster_rank()
                 : Shape::kGlobalExchange ? static_cast<int>(blockIdx.x) % arguments.cluster
                                          : 0;
    slice.first_col = static_cast<int64_t>(slice.rank) * arguments.slice;
    slice.elements =
        static_cast<int>(max(min(int64_t{arguments.slice}, params.hidden_size - slice.first_col), int64_t{0}));
    const int cluster = index_of_blocks<Shape>(arguments);
    slice.first_row = cluster * arguments.rows;
    slice.end_row = static_cast<int>(params.rows);
    slice.segment = 0;
    slice.first_parameter = slice.first_col;
    if (params.segments > 1 && !params.interleaves) {
      const int clusters_each = arguments.row_step / arguments.rows;
      const int rows_each = static_cast<int>(params.rows) / params.segments;
      slice.segment = cluster / clusters_each;
      slice.first_row = slice.segment * rows_each + (cluster - slice.segment * clusters_each) * arguments.rows;
      slice.end_row = (slice.segment + 1) * rows_each;
      slice.first_parameter += slice.segment * params.weight_stride;
    }
    return slice;
  }

  // Where weight and bias begin for the `group`-th row of the block, and for all rows that follow it: row_step is a
  // multiple of interleaved segments.
  template <typename Shape>
  __device__ int64_t parameters_of(const KernelBackwardParams& params, int group) const {
    if (!kMayInterleave<Shape> || !params.interleaves) return first_parameter;
    return first_parameter +
           static_cast<unsigned>(first_row + group) % static_cast<unsigned>(params.segments) * params.weight_stride;
  }
};

// Shared memory of a ring beside its slots; the same for every path.
template <typename scalar_t, typename Shape>
struct RingBarriers {
  static constexpr int kMostRows = Shape::kMostRows, kMaxDepth = Shape::kMaxDepth;
  uint64_t full[kMaxDepth], empty[kMaxDepth];
  uint4 entries[kMaxDepth][kMostRows];  // RowRing::Entry
  float mean_tails[sizeof(scalar_t) == 4 ? kMaxDepth : 1][kMostRows];
  unsigned more_entries[2][kMaxDepth][kMostRows];  // of grad_residual_out, and of the gated x
  uint4 zeros;

  static constexpr unsigned kEmpty = 8 * kMaxDepth;  // from a slot's full barrier to its empty one

  // Called by one thread; ready after the next barrier of the block.
  __device__ void init() {
    const unsigned first = shared_address(full);
    zeros = {0, 0, 0, 0};
    for (int i = 0; i < kMaxDepth; ++i) {
      init_barrier(first + 8 * i, kWarpArrivals);
      init_barrier(first + kEmpty + 8 * i, consumer_warps<Shape>() * kWarpArrivals);
    }
    fence_barrier_init();
  }
};

#if __CUDA_ARCH__ >= 900
constexpr bool kBulk = true;  // the copy engine fills the ring
#else
constexpr bool kBulk = false;
#endif

// A software pipeline for the tensors that a path reads: a ring of slots in shared memory, each with the rows of one
// iteration, filled some iterations ahead of their use. From sm_90 on a producer warp has the copy engine fetch the
// aligned 16-byte words that cover each row; before, each thread copies the vectors that it will read by cp.async.
//
// A row keeps its address modulo 128 bytes: otherwise the copy engine fetches 5 sectors for 4 (ncu: 673 MB for 539),
// which cost a fifth of the bandwidth.
template <typename scalar_t, typename Shape, typename Work>
struct RowRing {
  using grad_t = typename Work::grad_t;
  using Barriers = RingBarriers<scalar_t, Shape>;
  static constexpr int kVec = Shape::kVec, kVecs = Shape::kVecs;
  static constexpr int kMostRows = Shape::kMostRows, kMaxDepth = Shape::kMaxDepth;
  static constexpr int kVecBytes = kVec * static_cast<int>(sizeof(scalar_t));
  static constexpr bool kAligned = kVecBytes % 8 == 0;  // rows are made of whole 16 bytes
  // Bytes of a row in a slot, with room for its alignment modulo 128
  __host__ __device__ static int pitch_of(int tensor, int slice) {
    return (slice * static_cast<int>(tensor % 2 == 1 ? sizeof(grad_t) : sizeof(scalar_t)) + 127) / 128 * 128 + 128;
  }
  __host__ __device__ static int start_of(int tensor, int slice, int rows) {  // within a slot
    return rows * ((tensor + 1) / 2 * pitch_of(0, slice) + tensor / 2 * pitch_of(1, slice));
  }
  static int slot_bytes_of(int tensors, int slice, int rows) { return start_of(tensors, slice, rows); }
  // Lanes of the producer warp for a row, one a tensor, and rows that the warp requests at once
  static constexpr int kRowLanes = Work::kMayAdd ? 4 : 2;
  static constexpr int kRowsAtOnce = 32 / kRowLanes;
  // A row in the ring: the shared addresses of its tensors, and its statistics.
  struct Entry {
    unsigned x, grad;
    float rstd, mean;
    unsigned residual, gated;
  };

  unsigned memory, barriers;  // shared addresses
  static constexpr unsigned kEmpty = Barriers::kEmpty;
  const FusedArguments& arguments;
  int elements, end_row, slot = 0;
  unsigned parity = 0;

  __device__ unsigned full() const { return barriers + static_cast<unsigned>(offsetof(Barriers, full)); }
  __device__ unsigned entries() const { return barriers + static_cast<unsigned>(offsetof(Barriers, entries)); }
  __device__ unsigned mean_tails() const { return barriers + static_cast<unsigned>(offsetof(Barriers, mean_tails)); }
  __device__ unsigned more_entries() const {
    return barriers + static_cast<unsigned>(offsetof(Barriers, more_entries));
  }
  __device__ unsigned zeros() const { return barriers + static_cast<unsigned>(offsetof(Barriers, zeros)); }

  __device__ RowRing(void* memory, Barriers& barriers, const Slice& slice, const FusedArguments& arguments)
      : memory(shared_address(memory)),
        barriers(shared_address(&barriers)),
        arguments(arguments),
        elements(slice.elements),
        end_row(slice.end_row) {
    if (kHasRoom<Shape>) asm volatile("" : "+r"(this->barriers));
  }

  __device__ int pitch(int tensor) const { return pitch_of(tensor, arguments.slice); }
  __device__ unsigned start(int of_slot, int tensor) const {
    return memory + of_slot * arguments.slot_bytes + start_of(tensor, arguments.slice, arguments.rows);
  }
  __device__ int slot_before(int count = 1) const {
    return slot < count ? slot + arguments.depth - count : slot - count;
  }
  __device__ void next_slot() {
    if (++slot == arguments.depth) {
      slot = 0;
      parity ^= 1;
    }
  }

  // Tensor `tensor` (0 to 3) of the call as the producer reads it; data is nullptr if it is absent.
  struct Source {
    const char* data;
    RowStrides strides;
    int element_bytes;
  };
  __device__ static Source source_of(const KernelBackwardParams& params, const GradStages& stages, int tensor) {
    const bool is_x = tensor == 0;
    Source source{static_cast<const char*>(is_x ? params.x : params.grad_output),
                  is_x ? params.x_strides : params.grad_output_strides, static_cast<int>(sizeof(scalar_t))};
    if constexpr (Work::kMayAdd) {
      if (tensor % 2 == 1) source.element_bytes = static_cast<int>(sizeof(grad_t));
      if (tensor >= 2) source.data = nullptr;
      if (tensor == 2) {
        source.strides = stages.grad_residual_out_strides;
        source.data = static_cast<const char*>(stages.grad_residual_out);
      }
      if constexpr (Work::kHasGate) {
        if (tensor == 3) {
          source.strides = stages.x_strides;
          source.data = static_cast<const char*>(stages.x);
        }
      }
    }
    return source;
  }

  // The loop of the producer warp: fills slot after slot, as consumers release them, with the block's rows from
  // `first_row` on, for `iterations` iterations. Each lane issues copies of its own: for short rows, one lane would
  // compute addresses more slowly than data arrive.
  __device__ void produce(const KernelBackwardParams& params, const GradStages& stages, const Slice& slice,
                          int first_row, int iterations) {
    if constexpr (kBulk) {
      const int lane = threadIdx.x % 32;
      const int tensor = lane % kRowLanes;
      const bool for_x = tensor == 0;
      const Source source = source_of(params, stages, tensor);
      const bool requests = !Work::kMayAdd || source.data;
      const unsigned row_bytes = static_cast<unsigned>(elements) * static_cast<unsigned>(source.element_bytes);
      const char* data = source.data + slice.first_col * static_cast<int64_t>(source.element_bytes);
      const auto row_at = [&](int row) {
        return data + source.strides.offset(row) * static_cast<int64_t>(source.element_bytes);
      };
      const auto past_of = [&](const char* from) {
        return kAligned ? 0u : static_cast<unsigned>(reinterpret_cast<uintptr_t>(from) % 16);
      };
      [[maybe_unused]] const char* end = row_at(static_cast<int>(params.rows) - 1) + row_bytes;  // of the tensor
      // Whether the rows of an iteration are contiguous, and so one copy
      const bool dense = !Shape::kClusters && !Shape::kGlobalExchange && source.strides.is_even(params.rows) &&
                         source.strides.row_stride == params.hidden_size;
      const int row_count = slice.end_row;
      // Statistics are loaded one iteration ahead: rstd and mean_tail in the lanes for x, mean in those for
      // grad_output. The loads are synchronous on purpose: the block that is furthest ahead waits for memory here,
      // while the others hit the same line in the cache, which keeps the blocks together (H200: with asynchronous
      // loads, some SMs finished 30 to 70 us before the last, of 200).
      constexpr int kShares = (kMostRows + kRowsAtOnce - 1) / kRowsAtOnce;
      float statistics[kShares], mean_tail[kShares];
      const float* statistic = static_cast<const float*>(for_x ? params.rstd : params.mean);
      const auto load_statistics = [&](int row) {
#pragma unroll
        for (int share = 0; share < kShares; ++share) {
          const int of_row = row + lane / kRowLanes + kRowsAtOnce * share;
          statistics[share] = mean_tail[share] = 0;
          if (of_row >= row_count || !statistic || tensor > 1) continue;
          statistics[share] = __ldg(statistic + of_row);
          if (sizeof(scalar_t) == 4 && for_x && params.mean_tail)
            mean_tail[share] = __ldg(static_cast<const float*>(params.mean_tail) + of_row);
        }
      };
      load_statistics(first_row);
      constexpr bool kPaced = kIsPaced<scalar_t, Shape>;
      [[maybe_unused]] Pace<kPaced> pace(arguments.depth, max(kPaceBytes / arguments.slot_bytes, 1));
#pragma unroll 1
      for (int row = first_row; row < row_count && iterations > 0; row += arguments.row_step, --iterations) {
        const int count = min(arguments.rows, row_count - row);
        const int copies = row_bytes == 0 || !requests ? 0 : dense ? 1 : count;
        const unsigned bytes = dense ? count * row_bytes : row_bytes;
        // f(address of the row or rows, index of the row in the iteration)
        const auto for_each_copy = [&](auto&& f) {
#pragma unroll 1
          for (int group = lane / kRowLanes; group < copies; group += kRowsAtOnce) f(row_at(row + group), group);
        };
        unsigned total = 2 * count * row_bytes;
        if constexpr (Work::kMayAdd)
          total = count * elements *
                  static_cast<unsigned>((stages.grad_residual_out ? 2 : 1) * sizeof(scalar_t) +
                                        (Work::kHasGate ? 2 : 1) * sizeof(grad_t));
        [[maybe_unused]] bool has_rest = false;
        if constexpr (!kAligned) {
          total = 0;
          for_each_copy([&](const char* from, int) {
            const unsigned covered = covering_bytes(from, past_of(from), bytes, end);
            has_rest |= covered < past_of(from) + bytes;
            total += covered;
          });
          total = __reduce_add_sync(0xffffffffu, total);
        }
        if constexpr (kPaced) {
          if (lane == 0) pace.next_iteration();
          __syncwarp();
        }
        wait_barrier(full() + kEmpty + 8 * slot, parity ^ 1);
        const int pitch = this->pitch(Work::kMayAdd ? tensor : 0);
        const unsigned first = start(slot, tensor);
#pragma unroll
        for (int share = 0; share < kShares; ++share) {
          const int group = lane / kRowLanes + kRowsAtOnce * share;
          if (group >= count || !requests) continue;
          const unsigned at =
              first +
              (dense ? static_cast<unsigned>(reinterpret_cast<uintptr_t>(row_at(row)) % 128) + group * row_bytes
                     : static_cast<unsigned>(reinterpret_cast<uintptr_t>(row_at(row + group)) % 128) + group * pitch);
          if constexpr (Work::kMayAdd) {
            if (tensor >= 2) {
              store_shared(more_entries() + 4 * ((tensor - 2) * kMaxDepth * kMostRows + slot * kMostRows + group), at);
              continue;
            }
          }
          const unsigned entry = entries() + 16 * (slot * kMostRows + group) + 4 * tensor;
          store_shared(entry, at);
          store_shared(entry + 8, statistics[share]);
          if (sizeof(scalar_t) == 4 && for_x)
            store_shared(mean_tails() + 4 * (slot * kMostRows + group), mean_tail[share]);
        }
        if (iterations > 1) load_statistics(row + arguments.row_step);
        const auto target_of = [&](const char* from, int group) {
          return first + static_cast<unsigned>(reinterpret_cast<uintptr_t>(from) % 128) + group * pitch - past_of(from);
        };
        if (!kAligned && has_rest) {
          for_each_copy([&](const char* from, int group) {
            copy_rest<scalar_t>(target_of(from, group), from, past_of(from), bytes,
                                covering_bytes(from, past_of(from), bytes, end));
          });
          fence_bulk_store();  // the copy engine may write there in a later iteration
        }
        __syncwarp();
        if (lane == 0) {
          expect_bytes(full() + 8 * slot, total);
        } else if (kWarpArrivals > 1) {
          arrive_barrier(full() + 8 * slot);
        }
        __syncwarp();
        for_each_copy([&](const char* from, int group) {
          const unsigned covered = kAligned ? bytes : covering_bytes(from, past_of(from), bytes, end);
          if (kAligned || covered > 0)
            copy_bulk(target_of(from, group), from - past_of(from), covered, full() + 8 * slot);
        });
        next_slot();
      }
      __syncwarp();
    }
  }

  // Without a producer warp the consumer warps take turns as producer: at the start of an iteration one warp refills
  // the slot that was finished in the iteration before, which the other warps have released, or are about to.
  static constexpr int kLag = 2;
  __device__ void produce_ahead(const KernelBackwardParams& params, const GradStages& stages, const Slice& slice,
                                int first_row) {
    RowRing ring = *this;
    if (slot >= kLag) {
      ring.slot -= kLag;
      ring.parity ^= 1;
    } else {
      ring.slot += arguments.depth - kLag;
    }
    ring.produce(params, stages, slice, first_row + (arguments.depth - kLag) * arguments.row_step, 1);
  }

  // Before sm_90: each thread copies its vectors of row `row` into slot `into`: of `left` elements from vector `own` on
  // each kLanes-th. It commits a group even if the row does not exist, because wait_full() counts groups.
  __device__ void prefetch(const KernelBackwardParams& params, const GradStages& stages, int64_t first_col, int64_t row,
                           int group, int own, int left, int into) {
    if constexpr (kBulk) return;
    const auto prefetch_row = [&](const auto* data, const RowStrides& strides, int tensor) {
      using T = std::decay_t<decltype(*data)>;
      const T* source = data + strides.offset(row) + first_col;
      const unsigned target = start(into, tensor) + group * pitch(tensor);
#pragma unroll 1
      for (int from = 0; from < left; from += Shape::kLanes * kVec) {
        const int vec = own + from / kVec;
        if constexpr (kAligned) {
          copy_vec_async<kVec* static_cast<int>(sizeof(T))>(target + vec * kVec * static_cast<int>(sizeof(T)),
                                                            source + vec * kVec);
        } else {
          for (int i = vec * kVec; i < vec * kVec + min(kVec, left - from); ++i)
            store_shared(target + i * static_cast<int>(sizeof(T)), __ldg(source + i));
        }
      }
    };
    if (row < end_row) {
      prefetch_row(static_cast<const scalar_t*>(params.x), params.x_strides, 0);
      prefetch_row(static_cast<const grad_t*>(params.grad_output), params.grad_output_strides, 1);
      if constexpr (Work::kMayAdd) {
        if (stages.grad_residual_out)
          prefetch_row(static_cast<const scalar_t*>(stages.grad_residual_out), stages.grad_residual_out_strides, 2);
      }
      if constexpr (Work::kHasGate) prefetch_row(static_cast<const grad_t*>(stages.x), stages.x_strides, 3);
    }
    commit_copies();
  }
  __device__ void prefetch_first(const KernelBackwardParams& params, const GradStages& stages, const Slice& slice,
                                 int group, int own, int left) {
    for (int ahead = 0; ahead < arguments.depth && !kBulk; ++ahead)
      prefetch(params, stages, slice.first_col, slice.first_row + group + ahead * arguments.row_step, group, own, left,
               ahead);
  }

  // Waits until the current slot is full.
  __device__ void wait_full() {
    if constexpr (kBulk) return wait_barrier(full() + 8 * slot, parity);
    switch (arguments.depth - Shape::kOneBehind) {
      case 1: return wait_for_copies<0>();
      case 2: return wait_for_copies<1>();
      case 3: return wait_for_copies<2>();
      default: return wait_for_copies<3>();
    }
  }

  // The shared address of the row of grad_residual_out (which: 0) or of the gated x (1).
  __device__ unsigned more_entry(int of_slot, int group, int which) const {
    if constexpr (!kBulk) return start(of_slot, 2 + which) + group * pitch(2 + which);
    return load_shared<unsigned>(more_entries() + 4 * ((which * kMaxDepth + of_slot) * kMostRows + group));
  }
  // The `group`-th row of slot `of_slot`, which is row `row` of the tensor.
  __device__ Entry entry(const KernelBackwardParams& params, int of_slot, int row, int group) const {
    unsigned residual = 0, gated = 0;
    if constexpr (Work::kAlwaysAdds) residual = more_entry(of_slot, group, 0);
    if constexpr (Work::kHasGate) gated = more_entry(of_slot, group, 1);
    if constexpr (kBulk) {
      const uint4 found = load_shared<uint4>(entries() + 16 * (of_slot * kMostRows + group));
      return {found.x, found.y, __uint_as_float(found.z), __uint_as_float(found.w), residual, gated};
    }
    const auto at = [&](int tensor) { return start(of_slot, tensor) + group * pitch(tensor); };
    const auto stats = load_stats<scalar_t>(params, row);
    return {at(0), at(1), static_cast<float>(stats.rstd), static_cast<float>(stats.mean), residual, gated};
  }
  __device__ RowStats<scalar_t> stats(const KernelBackwardParams& params, const Entry& entry, int of_slot, int row,
                                      int group) const {
    float mean_tail = 0;
    if constexpr (sizeof(scalar_t) == 4)
      mean_tail = kBulk ? load_shared<float>(mean_tails() + 4 * (of_slot * kMostRows + group))
                        : static_cast<float>(load_stats<scalar_t>(params, row).mean_tail);
    const SavedStats<acc_type<scalar_t>> saved{entry.rstd, entry.mean, mean_tail};
    if constexpr (kAligned) return RowStats<scalar_t>(saved);  // rows of several elements
    return RowStats<scalar_t>(saved, params);
  }
  // Vector `index` of the row at `at`: its first `count` elements, and zeros.
  template <typename T = scalar_t>
  __device__ RawVec<T, kVec> vec(unsigned at, int index, int count) const {
    RawVec<T, kVec> raw;
    if constexpr (kAligned) {
      using Word = typename RawVec<T, kVec>::Word;
      raw.words[0] = load_shared<Word>(at + static_cast<int>(sizeof(Word)) * index);
    } else if constexpr (Work::kByWords) {
      raw = zero_vec<T, kVec>();
      if (count > 0) raw.words[0] = load_shared<unsigned>(at + 4 * index);
    } else {
      T found[kVec] = {};
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        if (i < count) found[i] = load_shared<T>(at + (index * kVec + i) * static_cast<int>(sizeof(T)));
      memcpy(&raw, found, sizeof(raw));
    }
    return raw;
  }
  // Releases slot `read` for this warp, whose active lanes are `lanes`. `next` is the row that will refill the slot.
  __device__ void release(const KernelBackwardParams& params, const GradStages& stages, int64_t first_col, int read,
                          int64_t next, int group, int own, int left, unsigned lanes) {
    if constexpr (kBulk) {
      arrive_of_warp(full() + kEmpty + 8 * read, lanes);
    } else {
      prefetch(params, stages, first_col, next, group, own, left, read);
    }
  }
};

// An asynchronous all-reduce of a row's sums between the warps of its blocks: each warp publishes its sums with
// share(), and collect() waits for those of all, as late as possible. Four exchanges may be in flight: a warp can share
// row j only after all have shared row j - 2, and so have collected row j - 4. With a global exchange 16 may be: a warp
// shares row j only after it has collected row j - behind - 1.
//
// The blocks of a cluster write to each other's shared memory. With a global exchange kExchangeWarps more warps of each
// block take rows in turn: one adds up the sums of the block's warps, publishes the result in global memory, and
// collects those of the other blocks.
template <typename Shape, typename T>
struct SumExchange {
  static constexpr bool kGlobal = Shape::kGlobalExchange;
  static constexpr int kSlots = kGlobal ? 16 : 4;
  using Lanes = RowThreads<32>;

  // A slot has the sums of all warps of the row, or of the block, and a barrier; with a global exchange then the total
  // and its barrier. slots: the shared address of the row's first one. own: what this lane writes in a slot (in a
  // cluster to block `lane % 16`), the lower half-warp the first sum, the upper half the second.
  unsigned slots, own;
  const FusedArguments& arguments;

  static int bytes_of(int sums, int rows) { return Shape::kOneBehind ? rows * kSlots * slot_bytes_of(sums) : 0; }

  // Constructed by all threads of the block; ready after the next barrier of the block or cluster. `warp`: of the
  // `group`-th row.
  __device__ SumExchange(const void* memory, const FusedArguments& arguments, const Slice& slice, int group, int warp)
      : arguments(arguments) {
    if constexpr (Shape::kOneBehind) {
      const int lane = threadIdx.x % 32, warps = threads_of_row<Shape>(arguments) / 32;
      const unsigned first = shared_address(memory) + arguments.exchange;
      slots = first + group * kSlots * slot_bytes();
      own = ((Shape::kClusters ? slice.rank * warps : 0) + warp) * static_cast<unsigned>(sizeof(Pair<T>)) +
            lane / 16 * static_cast<unsigned>(sizeof(T));
      if (kHasRoom<Shape>) asm volatile("" : "+r"(slots), "+r"(own));
      for (int i = threadIdx.x; i < arguments.rows * kSlots; i += blockDim.x) {
        init_barrier(first + i * slot_bytes() + ready_at(), Shape::kClusters ? 1 : warps * kWarpArrivals);
        if constexpr (kGlobal) init_barrier(first + i * slot_bytes() + done_at(), kWarpArrivals);
        fence_barrier_init();
      }
    }
  }

  // For the block's `iteration`-th row. `is_first`: whether this is the first thread of the row.
  __device__ void share(unsigned iteration, Pair<T> value, bool is_first) {
    const unsigned slot = slot_of(iteration);
    const T half = lanes_half_sum<Lanes, 32>(value);
    const int lane = threadIdx.x % 32;
    if constexpr (Shape::kClusters) {
      if (is_first) expect_bytes(slot + ready_at(), ready_at());
      const unsigned peer = address_in_peer(slot, lane % 16);
      if (lane % 16 < arguments.cluster) send_to(peer + own, peer + ready_at(), half);
    } else {
      if (lane % 16 == 0) store_shared(slot + own, half);
      arrive_of_warp(slot + ready_at());
    }
  }
  __device__ Pair<T> collect(unsigned iteration) {
    const unsigned slot = slot_of(iteration);
    wait_barrier(slot + (kGlobal ? done_at() : ready_at()), parity_of(iteration));
    if constexpr (kGlobal) return load_shared<Pair<T>>(slot + total_at());
    const Pair<T>* found = shared_pointer<const Pair<T>>(slot);
    return Shape::kClusters ? sum_of_warps(found, arguments.sums) : sum_of_few_warps(found, arguments.sums);
  }

  // The loop of the `which`-th of the warps for a global exchange.
  __device__ void exchange_rows(const Slice& slice, int which) const {
    if constexpr (kGlobal) {
      const int lane = threadIdx.x % 32, blocks = arguments.cluster;
#pragma unroll 1
      for (unsigned iteration = which;; iteration += kExchangeWarps) {
        const int64_t row = slice.first_row + static_cast<int64_t>(iteration) * arguments.row_step;
        if (row >= slice.end_row) break;
        const unsigned slot = slot_of(iteration);
        wait_barrier(slot + ready_at(), parity_of(iteration));
        const Pair<T> sums = sum_of_few_warps(shared_pointer<const Pair<T>>(slot), arguments.sums);
        BlockSums* const of_row = arguments.block_sums + row * blocks;
        if (lane == 0) publish(of_row + slice.rank, BlockSums{sums.first, sums.second, 1});
        Pair<T> total{0, 0};
        for_each_of_blocks<BlockSums>(
            of_row, blocks, [](const BlockSums& found, int) { return found.is_there; },
            [&](const BlockSums& found, int) { total = {total.first + found.first, total.second + found.second}; });
        const T half = lanes_half_sum<Lanes, 32>(total);
        if (lane % 16 == 0) store_shared(slot + total_at() + lane / 16 * static_cast<unsigned>(sizeof(T)), half);
        arrive_of_warp(slot + done_at());
      }
    }
  }

 private:
  __host__ __device__ static int slot_bytes_of(int sums) {
    const int bytes = sums * static_cast<int>(sizeof(Pair<T>)) + static_cast<int>(sizeof(uint64_t));
    return kGlobal ? bytes + static_cast<int>(sizeof(Pair<T>) + sizeof(uint64_t)) : bytes;
  }
  __device__ int slot_bytes() const { return slot_bytes_of(arguments.sums); }
  __device__ unsigned slot_of(unsigned iteration) const { return slots + iteration % kSlots * slot_bytes(); }
  __device__ static unsigned parity_of(unsigned iteration) { return iteration / kSlots % 2; }
  // Of a slot's barrier, behind the sums; of the total, and of its barrier.
  __device__ unsigned ready_at() const { return arguments.sums * static_cast<unsigned>(sizeof(Pair<T>)); }
  __device__ unsigned total_at() const { return ready_at() + static_cast<unsigned>(sizeof(uint64_t)); }
  __device__ unsigned done_at() const { return total_at() + static_cast<unsigned>(sizeof(Pair<T>)); }
};

}  // namespace
}  // namespace fused_layernorm
