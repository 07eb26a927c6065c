// Backward's strategy "fused": persistent blocks walk over rows. norm_backward.cu has the formulas.
#pragma once

#include <climits>
#include <cstddef>

#include "activation.cuh"
#include "add_rows.cuh"
#include "backward_rows.cuh"
#include "dispatch.cuh"
#include "kernel_params.h"
#include "launch_plan.h"
#include "pace.cuh"
#include "reduce.cuh"
#include "vector_io.cuh"

namespace fused_layernorm {
namespace {

// Whether threads have registers for shared addresses, which are worked out anew for each row otherwise: about 20
// instructions a row, of 600 with 16 elements a thread.
template <typename Plan>
constexpr bool kHasRoom = Plan::kOneBehind && Plan::kVecs * Plan::kVec <= 16;

// The part of each row that a persistent block works on: all of it, or a slice where a cluster shares the row; and
// which rows: all, or those of a segment.
struct Slice {
  int blocks, rank;         // of the cluster
  int64_t first_col;        // a multiple of the vector
  int elements;             // may be 0 in the last blocks
  int first_row, row_step;  // of the block's first row; its other rows follow it. 32 bits: kFusedMaxRows
  int end_row;
  int segment;              // of the rows, where they have several
  int64_t first_parameter;  // where weight and bias of these columns begin

  // In whole sets of kSet vectors, so that tensors of a narrower type are made of 16 bytes too.
  template <typename Plan, int kSet, bool kMaySegment>
  __device__ static Slice of(const KernelBackwardParams& params) {
    Slice slice;
    slice.blocks = Plan::kClusters ? cluster_size() : 1;
    slice.rank = Plan::kClusters ? cluster_rank() : 0;
    const int64_t vecs = vecs_of<Plan::kVec>(params.hidden_size);
    const int64_t most = (vecs + slice.blocks * kSet - 1) / (slice.blocks * kSet) * (kSet * Plan::kVec);
    slice.first_col = slice.rank * most;
    slice.elements = static_cast<int>(max(min(most, params.hidden_size - slice.first_col), int64_t{0}));
    const int cluster = static_cast<int>(blockIdx.x) / slice.blocks;
    const int clusters = static_cast<int>(gridDim.x) / slice.blocks;
    slice.first_row = cluster * Plan::kRows;
    slice.row_step = clusters * Plan::kRows;
    slice.end_row = static_cast<int>(params.rows);
    slice.segment = 0;
    slice.first_parameter = slice.first_col;
    if (kMaySegment && params.segments > 1) {
      const int clusters_each = clusters / params.segments;
      const int rows_each = static_cast<int>(params.rows) / params.segments;
      slice.segment = cluster / clusters_each;
      slice.first_row = slice.segment * rows_each + (cluster - slice.segment * clusters_each) * Plan::kRows;
      slice.row_step = clusters_each * Plan::kRows;
      slice.end_row = (slice.segment + 1) * rows_each;
      slice.first_parameter += slice.segment * params.weight_stride;
    }
    return slice;
  }
};

// Rows of x and grad_output, and with an add stage of grad_residual_out, on their way from memory to the threads of a
// persistent block, some turns ahead of their use: a ring of stages in shared memory, each with one turn's rows of all.
// From sm_90 on a warp of its own asks the copy engine for them, as the aligned 16 bytes that cover a row wherever it
// lies; else each thread brings just the vectors that it will read.
//
// A row keeps its address's place within 128 bytes: where the two differ the copy engine fetches 5 sectors for 4 (ncu:
// 673 MB for 539), which cost a fifth of the bandwidth and looked like an effect of the ring's depth.
//
template <typename scalar_t, typename Plan, typename Fused>
struct RowRing {
#if __CUDA_ARCH__ >= 900
  static constexpr bool kBulk = true;
#else
  static constexpr bool kBulk = false;
#endif
  using grad_t = x_type<Fused, scalar_t>;
  static constexpr int kVec = Plan::kVec, kVecs = Plan::kVecs, kThreads = Plan::kThreads, kRows = Plan::kRows;
  // x, grad_output, grad_residual_out, and what the gate multiplies
  static constexpr int kTensors = kHasGate<Fused> ? 4 : kAdds<Fused> ? 3 : 2;
  static constexpr int kVecBytes = kVec * static_cast<int>(sizeof(scalar_t));
  static constexpr bool kAligned = kVecBytes % 8 == 0;  // rows are made of whole 16 bytes
  static_assert(kAligned || !kAdds<Fused>, "whole rows");
  // Bytes of a row, its place and an overhang included
  static constexpr int pitch_of(int tensor) {
    return kThreads * kVecs * kVec * static_cast<int>(tensor % 2 == 1 ? sizeof(grad_t) : sizeof(scalar_t)) + 128;
  }
  static constexpr int start_of(int tensor) {  // within a stage
    return kRows * ((tensor + 1) / 2 * pitch_of(0) + tensor / 2 * pitch_of(1));
  }
  static constexpr int kStageBytes = start_of(kTensors - 1) + kRows * pitch_of(kTensors - 1);
  static constexpr int kMaxDepth = 4;
  // Lanes of the asking warp that share the work of a row, one a tensor, and rows that it asks for at once
  static constexpr int kRowLanes = kAdds<Fused> ? 4 : 2;
  static constexpr int kRowsAtOnce = 32 / kRowLanes;
  // Of a row in the ring: the shared addresses of its tensors, and its statistics.
  struct Entry {
    unsigned x, grad;
    float rstd, mean;
    unsigned residual, gated;
  };
  struct Barriers {
    uint64_t full[kMaxDepth], empty[kMaxDepth];
    uint4 entries[kMaxDepth][kRows];
    float mean_tails[sizeof(scalar_t) == 4 ? kMaxDepth : 1][kRows];
    unsigned residuals[kAdds<Fused> ? kMaxDepth : 1][kRows];  // and gateds, where there are
    unsigned gateds[kHasGate<Fused> ? kMaxDepth : 1][kRows];
    uint4 zeros;
  };

  // Shared addresses: of the first stage, and of what belongs to the stages.
  unsigned memory, barriers;
  static constexpr unsigned kEmpty = 8 * kMaxDepth;  // from a stage's full barrier to its empty one
  int depth, elements, end_row, stage = 0;
  unsigned parity = 0;

  __device__ unsigned full() const { return barriers + static_cast<unsigned>(offsetof(Barriers, full)); }
  __device__ unsigned entries() const { return barriers + static_cast<unsigned>(offsetof(Barriers, entries)); }
  __device__ unsigned mean_tails() const { return barriers + static_cast<unsigned>(offsetof(Barriers, mean_tails)); }
  __device__ unsigned residuals() const { return barriers + static_cast<unsigned>(offsetof(Barriers, residuals)); }
  __device__ unsigned zeros() const { return barriers + static_cast<unsigned>(offsetof(Barriers, zeros)); }

  // To be constructed by all threads of the block together.
  __device__ RowRing(void* memory, Barriers& barriers, const Slice& slice, int depth)
      : memory(shared_address(memory)),
        barriers(shared_address(&barriers)),
        depth(depth),
        elements(slice.elements),
        end_row(slice.end_row) {
    if (kHasRoom<Plan>) asm volatile("" : "+r"(this->barriers));
    if (kBulk && threadIdx.x == 0) {
      barriers.zeros = {0, 0, 0, 0};
      for (int i = 0; i < kMaxDepth; ++i) {
        init_barrier(full() + 8 * i, kWarpArrivals);
        init_barrier(full() + kEmpty + 8 * i, kThreads * kRows / 32 * kWarpArrivals);
      }
      fence_barrier_init();
    }
  }

  __device__ unsigned start(int of_stage, int tensor) const {
    return memory + of_stage * kStageBytes + start_of(tensor);
  }
  __device__ void next_stage() {
    if (++stage == depth) {
      stage = 0;
      parity ^= 1;
    }
  }

  // The task of a warp that asks: stage after stage, as the readers are done with what was there, for the block's rows
  // from `first_row` on, of `turns` turns. Each lane has its copies to ask for: one lane alone would take longer to
  // work out the addresses of short rows than they to come.
  __device__ void ask_for(const KernelBackwardParams& params, const Fused& fused, const Slice& slice, int first_row,
                          int turns) {
    if constexpr (kBulk) {
      const int lane = threadIdx.x % 32;
      // Which tensor: x, grad_output, grad_residual_out, what the gate multiplies, or none
      const int tensor = lane % kRowLanes;
      const bool for_x = tensor == 0;
      RowStrides strides = for_x ? params.x_strides : params.grad_output_strides;
      const char* data = static_cast<const char*>(for_x ? params.x : params.grad_output);
      int element_bytes = static_cast<int>(sizeof(scalar_t));
      bool asks = true;
      if constexpr (kAdds<Fused>) {
        if (tensor % 2 == 1) element_bytes = static_cast<int>(sizeof(grad_t));
        if (tensor == 2) {
          strides = fused.grad_residual_out_strides;
          data = static_cast<const char*>(fused.grad_residual_out);
        }
        asks = tensor < 2 || (tensor == 2 && data);
        if constexpr (kHasGate<Fused>) {
          if (tensor == 3) {
            strides = fused.x_strides;
            data = static_cast<const char*>(fused.x);
            asks = true;
          }
        }
      }
      const unsigned row_bytes = static_cast<unsigned>(elements) * static_cast<unsigned>(element_bytes);
      data += slice.first_col * static_cast<int64_t>(element_bytes);
      const auto source_of = [&](int row) { return data + strides.offset(row) * static_cast<int64_t>(element_bytes); };
      const auto past_of = [&](const char* source) {
        return kAligned ? 0u : static_cast<unsigned>(reinterpret_cast<uintptr_t>(source) % 16);
      };
      [[maybe_unused]] const char* end = source_of(static_cast<int>(params.rows) - 1) + row_bytes;  // of the tensor
      // Whether a turn's rows are one run of memory, and so one copy
      const bool dense = !Plan::kClusters && strides.is_even(params.rows) && strides.row_stride == params.hidden_size;
      const int row_count = slice.end_row;
      // A turn's statistics are on their way while the turn before is asked for: rstd and mean_tail in the lanes for x,
      // mean in those for grad_output. A turn ahead, and waited for: the block that is furthest ahead waits for memory
      // here while the others find the same line in the cache, which keeps the blocks together (H200: with statistics
      // that arrive unwaited for, some SMs were done 30 to 70 us before the last, of 200).
      constexpr int kShares = (kRows + kRowsAtOnce - 1) / kRowsAtOnce;
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
      constexpr bool kPaced = kIsPaced<scalar_t, Plan>;
      Pace<kPaced ? round_up_to(kPaceBytes / kStageBytes, 1) : 0> pace(depth);
#pragma unroll 1
      for (int row = first_row; row < row_count && turns > 0; row += slice.row_step, --turns) {
        const int count = min(kRows, row_count - row);
        const int copies = row_bytes == 0 || !asks ? 0 : dense ? 1 : count;
        const unsigned bytes = dense ? count * row_bytes : row_bytes;
        unsigned total = 2 * count * row_bytes;
        if constexpr (kAdds<Fused>)
          total = count * elements *
                  static_cast<unsigned>((fused.grad_residual_out ? 2 : 1) * sizeof(scalar_t) +
                                        (kHasGate<Fused> ? 2 : 1) * sizeof(grad_t));
        [[maybe_unused]] bool has_rest = false;
        if constexpr (!kAligned) {
          total = 0;
          for (int group = lane / kRowLanes; group < copies; group += kRowsAtOnce) {
            const char* source = source_of(row + group);
            const unsigned covered = covering_bytes(source, past_of(source), bytes, end);
            has_rest |= covered < past_of(source) + bytes;
            total += covered;
          }
          total = __reduce_add_sync(0xffffffffu, total);
        }
        if constexpr (kPaced) {
          if (lane == 0) pace.next_turn();
          __syncwarp();
        }
        wait_barrier(full() + kEmpty + 8 * stage, parity ^ 1);
        const int pitch = pitch_of(kAdds<Fused> ? tensor : 0);
        const unsigned first = start(stage, tensor);
#pragma unroll
        for (int share = 0; share < kShares; ++share) {
          const int group = lane / kRowLanes + kRowsAtOnce * share;
          if (group >= count || !asks) continue;
          const unsigned place =
              dense ? static_cast<unsigned>(reinterpret_cast<uintptr_t>(source_of(row)) % 128) + group * row_bytes
                    : static_cast<unsigned>(reinterpret_cast<uintptr_t>(source_of(row + group)) % 128) + group * pitch;
          if constexpr (kAdds<Fused>) {
            if (tensor >= 2) {
              store_shared_element(residuals() + 4 * ((tensor - 2) * kMaxDepth * kRows + stage * kRows + group),
                                   first + place);
              continue;
            }
          }
          const unsigned entry = entries() + 16 * (stage * kRows + group) + 4 * tensor;
          store_shared_element(entry, first + place);
          store_shared_element(entry + 8, statistics[share]);
          if (sizeof(scalar_t) == 4 && for_x)
            store_shared_element(mean_tails() + 4 * (stage * kRows + group), mean_tail[share]);
        }
        if (turns > 1) load_statistics(row + slice.row_step);
        // f(where the copy goes, the row or rows in memory, bytes before these that are copied as well, bytes in all)
        const auto for_each_copy = [&](auto&& f) {
#pragma unroll 1
          for (int group = lane / kRowLanes; group < copies; group += kRowsAtOnce) {
            const char* source = source_of(row + group);
            const unsigned past = past_of(source);
            const unsigned place = static_cast<unsigned>(reinterpret_cast<uintptr_t>(source) % 128) + group * pitch;
            f(first + place - past, source, past, kAligned ? bytes : covering_bytes(source, past, bytes, end));
          }
        };
        if (!kAligned && has_rest) {
          for_each_copy([&](unsigned target, const char* source, unsigned past, unsigned covered) {
            copy_rest<scalar_t>(target, source, past, bytes, covered);
          });
          fence_bulk_store();  // the copy engine may write there in a later turn
        }
        __syncwarp();
        if (lane == 0) {
          expect_bytes(full() + 8 * stage, total);
        } else if (kWarpArrivals > 1) {
          arrive_barrier(full() + 8 * stage);
        }
        __syncwarp();
        for_each_copy([&](unsigned target, const char* source, unsigned past, unsigned covered) {
          if (kAligned || covered > 0) copy_bulk(target, source - past, covered, full() + 8 * stage);
        });
        next_stage();
      }
      __syncwarp();
    }
  }

  // Where every warp reads they ask in turns, each for one turn's rows at the start of its turn: for those that come
  // into the stage whose rows were finished in the turn before, and which the other warps have left by now, or will
  // soon.
  static constexpr int kLag = 2;
  __device__ void ask_ahead(const KernelBackwardParams& params, const Fused& fused, const Slice& slice, int first_row) {
    RowRing ring = *this;
    if (stage >= kLag) {
      ring.stage -= kLag;
      ring.parity ^= 1;
    } else {
      ring.stage += depth - kLag;
    }
    ring.ask_for(params, fused, slice, first_row + (depth - kLag) * slice.row_step, 1);
  }

  // Each thread brings its own vectors of row `row` into stage `into`; a group of copies even where there is no such
  // row, as wait_full() counts groups. Nothing to do where the copy engine works.
  __device__ void bring(const KernelBackwardParams& params, const Fused& fused, int64_t first_col, int64_t row,
                        int group, int rank, int into) {
    if constexpr (kBulk) return;
    const auto bring_row = [&](const auto* data, const RowStrides& strides, int tensor) {
      using T = std::decay_t<decltype(*data)>;
      const T* source = data + strides.offset(row) + first_col;
      const unsigned target = start(into, tensor) + group * pitch_of(tensor);
#pragma unroll 1
      for (int vec = rank; vec * kVec < elements; vec += kThreads) {
        if constexpr (kAligned) {
          copy_vec_async<kVec* static_cast<int>(sizeof(T))>(target + vec * kVec * static_cast<int>(sizeof(T)),
                                                            source + vec * kVec);
        } else {
          for (int i = vec * kVec; i < min(vec * kVec + kVec, elements); ++i)
            store_shared_element(target + i * static_cast<int>(sizeof(T)), __ldg(source + i));
        }
      }
    };
    if (row < end_row) {
      bring_row(static_cast<const scalar_t*>(params.x), params.x_strides, 0);
      bring_row(static_cast<const grad_t*>(params.grad_output), params.grad_output_strides, 1);
      if constexpr (kAdds<Fused>) {
        if (fused.grad_residual_out)
          bring_row(static_cast<const scalar_t*>(fused.grad_residual_out), fused.grad_residual_out_strides, 2);
      }
      if constexpr (kHasGate<Fused>) bring_row(static_cast<const grad_t*>(fused.x), fused.x_strides, 3);
    }
    commit_copies();
  }
  __device__ void bring_first(const KernelBackwardParams& params, const Fused& fused, const Slice& slice, int group,
                              int rank) {
    for (int ahead = 0; ahead < depth && !kBulk; ++ahead)
      bring(params, fused, slice.first_col, slice.first_row + group + ahead * slice.row_step, group, rank, ahead);
  }

  // Returns when the current stage has arrived.
  __device__ void wait_full() {
    if constexpr (kBulk) return wait_barrier(full() + 8 * stage, parity);
    switch (depth - Plan::kOneBehind) {
      case 1: return wait_for_copies<0>();
      case 2: return wait_for_copies<1>();
      case 3: return wait_for_copies<2>();
      default: return wait_for_copies<3>();
    }
  }

  // The `group`-th row of stage `of_stage`, row `row` of all.
  __device__ Entry entry(const KernelBackwardParams& params, int of_stage, int row, int group) const {
    if constexpr (kBulk) {
      const uint4 found = load_shared(entries() + 16 * (of_stage * kRows + group));
      unsigned residual = 0, gated = 0;
      const unsigned at = residuals() + 4 * (of_stage * kRows + group);
      if constexpr (kAdds<Fused>) residual = load_shared_element<unsigned>(at);
      if constexpr (kHasGate<Fused>) gated = load_shared_element<unsigned>(at + 4 * kMaxDepth * kRows);
      return {found.x, found.y, __uint_as_float(found.z), __uint_as_float(found.w), residual, gated};
    }
    const auto at = [&](int tensor) { return start(of_stage, tensor) + group * pitch_of(tensor); };
    const auto stats = load_stats<scalar_t>(params, row);
    return {at(0), at(1), static_cast<float>(stats.rstd), static_cast<float>(stats.mean), at(2), at(3)};
  }
  __device__ RowStats<scalar_t> stats(const KernelBackwardParams& params, const Entry& entry, int of_stage, int row,
                                      int group) const {
    float mean_tail = 0;
    if constexpr (sizeof(scalar_t) == 4)
      mean_tail = kBulk ? load_shared_element<float>(mean_tails() + 4 * (of_stage * kRows + group))
                        : static_cast<float>(load_stats<scalar_t>(params, row).mean_tail);
    const SavedStats<acc_type<scalar_t>> saved{entry.rstd, entry.mean, mean_tail};
    if constexpr (kAligned) return RowStats<scalar_t>(saved);  // rows of several elements
    return RowStats<scalar_t>(saved, params);
  }
  // Vector `index` of a row that lies at `at`; of a last one the first `count` elements, and zeros.
  template <typename T = scalar_t>
  __device__ RawVec<T, kVec> vec(unsigned at, int index, int count) const {
    RawVec<T, kVec> raw;
    if constexpr (kAligned) {
      using Word = typename RawVec<T, kVec>::Word;
      raw.words[0] = load_shared_element<Word>(at + static_cast<int>(sizeof(Word)) * index);
    } else {
      T found[kVec] = {};
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        if (i < count) found[i] = load_shared_element<T>(at + (index * kVec + i) * static_cast<int>(sizeof(T)));
      memcpy(&raw, found, sizeof(raw));
    }
    return raw;
  }
  // Gives stage `read` free: this warp, whose lanes at work are `lanes`, has read all it needs of it. `next` is the row
  // that comes there.
  __device__ void release(const KernelBackwardParams& params, const Fused& fused, int64_t first_col, int read,
                          int64_t next, int group, int rank, unsigned lanes) {
    if constexpr (kBulk) {
      arrive_of_warp(full() + kEmpty + 8 * read, lanes);
    } else {
      bring(params, fused, first_col, next, group, rank, read);
    }
  }
};

// Behind the ring, where something came after the norm: wdy of two rows.
template <typename scalar_t, typename Plan, typename Fused>
constexpr int kKeptBytes =
    kHasAfter<Fused> && Plan::kOneBehind
        ? 2 * Plan::kThreads * Plan::kRows * Plan::kVecs * Plan::kVec * static_cast<int>(sizeof(acc_type<scalar_t>))
        : 0;

// Vectors of four-byte elements of `kCount` neighbouring threads, so that these read and write neighbouring 16 bytes;
// `at` is where this thread's first lie.
template <int kCount, int kVec>
__device__ __forceinline__ void store_words(unsigned at, const float (&values)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; i += 4) {
    uint4 word;
    memcpy(&word, values + i, sizeof(word));
    store_shared(at + i / 4 * kCount * 16, word);
  }
}
template <typename T, int kVec, int kCount>
__device__ __forceinline__ RawVec<T, kVec> load_words(unsigned at) {
  RawVec<T, kVec> raw;
#pragma unroll
  for (int i = 0; i < kVec / 4; ++i) {
    const uint4 word = load_shared(at + i * kCount * 16);
    memcpy(reinterpret_cast<char*>(&raw) + i * sizeof(word), &word, sizeof(word));
  }
  return raw;
}

// The sum of what the warps of a cluster's blocks left, by full warps; 0 from blocks that are not there.
template <int kSums, typename T>
__device__ __forceinline__ Pair<T> sum_of_cluster(const Pair<T>* shared) {
  using Lanes = RowThreads<32, 1>;
  constexpr int kLanes = kSums < 32 ? kSums : 32;
  Pair<T> sum = shared[threadIdx.x % kLanes];
#pragma unroll
  for (int index = kLanes; index < kSums; index += kLanes) {
    const Pair<T> here = shared[index + threadIdx.x % kLanes];
    sum.first += here.first;
    sum.second += here.second;
  }
  return {Lanes::lanes_sum<kLanes>(sum.first), Lanes::lanes_sum<kLanes>(sum.second)};
}

// The sums of a row, exchanged between the warps of its block or cluster while these go on: each warp leaves its sums
// for all with share(), and collect() waits for them, as late as the work allows. Four rows may be under way: a warp
// can share row j only when all have shared row j - 2, and so have collected row j - 4.
template <typename Plan, typename T>
struct SumExchange {
  using Row = RowThreads<Plan::kThreads, Plan::kRows>;
  static constexpr int kWarps = Plan::kThreads / 32, kRows = Plan::kRows, kSlots = 4;
  static constexpr int kMostSums = round_up_to_power(Plan::kMaxCluster * kWarps);
  struct Slot {
    Pair<T> sums[kMostSums];
    uint64_t ready;
  };
  struct Needed {
    Slot slots[kRows][kSlots];
  };
  struct Nothing {};
  using Shared = std::conditional_t<Plan::kOneBehind, Needed, Nothing>;

  // Shared addresses: of the row's first slot; where this lane writes, of a cluster's block `lane % 16` by its first
  // half of the lanes a first sum, by its second a second; and of the slot there.
  unsigned slots, target, peer;
  int blocks;

  // To be constructed by all threads of the block together; ready to use after the next barrier of block or cluster.
  __device__ SumExchange(Shared& shared, const Slice& slice, int group) : blocks(slice.blocks) {
    if constexpr (Plan::kOneBehind) {
      const int lane = threadIdx.x % 32;
      Slot& first = shared.slots[group][0];
      slots = shared_address(&first);
      target =
          shared_address(&first.sums[slice.rank * kWarps + Row::warp()]) + lane / 16 * static_cast<unsigned>(sizeof(T));
      peer = slots;
      if (Plan::kClusters && lane % 16 < blocks) {
        target = address_in_peer(target, lane % 16);
        peer = address_in_peer(slots, lane % 16);
      }
      if (kHasRoom<Plan>) asm volatile("" : "+r"(slots), "+r"(target), "+r"(peer));
      for (int i = threadIdx.x; i < kRows * kSlots; i += blockDim.x) {
        Slot& slot = shared.slots[i / kSlots][i % kSlots];
        for (Pair<T>& sum : slot.sums) sum = {0, 0};
        init_barrier(shared_address(&slot.ready), Plan::kClusters ? 1 : kWarps * kWarpArrivals);
        fence_barrier_init();
      }
    }
  }

  // Of the block's `turn`-th row.
  __device__ void share(unsigned turn, Pair<T> value) {
    const unsigned slot = turn % kSlots * static_cast<unsigned>(sizeof(Slot));
    const T half = lanes_half_sum<Row, 32>(value);
    const int lane = threadIdx.x % 32;
    if constexpr (Plan::kClusters) {
      if (Row::rank() == 0)
        expect_bytes(slots + slot + ready_at(), blocks * kWarps * static_cast<unsigned>(sizeof(Pair<T>)));
      if (lane % 16 < blocks) send_to(target + slot, peer + slot + ready_at(), half);
    } else {
      if (lane % 16 == 0) store_shared_element(target + slot, half);
      arrive_of_warp(slots + slot + ready_at());
    }
  }
  __device__ Pair<T> collect(unsigned turn) {
    const unsigned slot = slots + turn % kSlots * static_cast<unsigned>(sizeof(Slot));
    wait_barrier(slot + ready_at(), turn / kSlots % 2);
    const Pair<T>* sums = static_cast<const Pair<T>*>(__cvta_shared_to_generic(slot));
    if constexpr (!Plan::kClusters) return sum_of_warps<kWarps>(sums);
    // The same sum in fewer steps where the others have nothing
    if (kMostSums > 8 && blocks * kWarps <= 8) return sum_of_cluster<8>(sums);
    if (kMostSums > 16 && blocks * kWarps <= 16) return sum_of_cluster<16>(sums);
    return sum_of_cluster<kMostSums>(sums);
  }

 private:
  __device__ static constexpr unsigned ready_at() { return static_cast<unsigned>(offsetof(Slot, ready)); }
};

// Fused: NotFused, or an AddGrad, GateGrad, AfterGrad or FromY. Weight is of x's type or fp32, a run-time value: it is
// read once a block.
template <typename scalar_t, typename Plan, typename Fused>
__global__ void __launch_bounds__(kFusedThreads<Plan>, Plan::kBlocksPerSm)
    norm_backward_fused_kernel(const __grid_constant__ KernelBackwardParams params, acc_type<scalar_t> inverse_n,
                               int depth, const __grid_constant__ Fused fused) {
  using acc_t = acc_type<scalar_t>;
  using x_t = x_type<Fused, scalar_t>;
  constexpr int kThreads = Plan::kThreads, kVecs = Plan::kVecs, kVec = Plan::kVec, kRows = Plan::kRows;
  using Row = RowThreads<kThreads, kRows>;
  using Ring = RowRing<scalar_t, Plan, Fused>;
  constexpr bool kAligned = Ring::kAligned;
  using Exchange = SumExchange<Plan, acc_t>;
  extern __shared__ __align__(128) uint4 ring_memory[];
  __shared__ typename Ring::Barriers ring_barriers;
  // Sums of a row: within a warp, at once between the warps of a block, or one row behind
  __shared__ Pair<acc_t> scratch[Plan::kOneBehind ? 1 : Ring::kMaxDepth][kRows * Row::kWarps];
  __shared__ typename Exchange::Shared exchange_shared;

  // Which rows, and which slice of them
  const Slice slice = Slice::of<Plan, static_cast<int>(sizeof(scalar_t) / sizeof(x_t)), !kIsFromY<Fused>>(params);
  // By what is seen to be the same for a whole warp: so exchanges between lanes need not make sure that all arrive, 15
  // instructions a row. The others would spill
  constexpr bool kByWarp = kThreads >= 32 && kRows > 1 && !kIsFromY<Fused>;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int rank = Row::rank(), group = kByWarp ? warp / Row::kWarps : Row::group();
  Ring ring(ring_memory, ring_barriers, slice, depth);
  Exchange exchange(exchange_shared, slice, min(group, kRows - 1));
  if (kForRacecheck) __syncthreads();
  if constexpr (Plan::kClusters) {
    cluster_sync();
  } else {
    __syncthreads();
  }

  const Places<Plan, !kAligned> held(slice.elements, rank * kVec);
  const auto elements_of = [&](int v) { return held.count(v); };
  const auto column_of = [&](int v) { return (held.index(v) * kThreads + rank) * kVec; };
  // Sums along the columns, the last where there is a gate
  constexpr int kSums = kHasGate<Fused> ? 3 : 2;
  acc_t column_sums[kSums][kVecs][kVec];
  auto &grad_weight = column_sums[0], &grad_bias = column_sums[1];
  constexpr int kReaders = kThreads * kRows;
  if (Plan::kHasAsker && (kByWarp ? warp >= kReaders / 32 : threadIdx.x >= kReaders)) {
    ring.ask_for(params, fused, slice, slice.first_row, INT_MAX);
  } else {
    acc_t weight[kVecs][kVec];
    [[maybe_unused]] acc_t bias[kNeedsBias<Fused> ? kVecs : 1][kVec], gate[kHasGate<Fused> ? kVecs : 1][kVec];
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int64_t at = slice.first_parameter + column_of(v);
      const auto load = [&](auto type) {
        using T = decltype(type);
        load_weight<T>(weight[v], params, at, elements_of(v));
        if constexpr (kNeedsBias<Fused>) {
          RawVec<T, kVec> raw = zero_vec<T, kVec>();
          if (params.bias && elements_of(v) > 0) raw = load_vec<T, kVec>(static_cast<const T*>(params.bias) + at);
          unpack(raw, bias[v]);
        }
      };
      if (sizeof(x_t) == 2 && params.weight_dtype == DType::kFloat32) {
        load(float{});
      } else {
        load(x_t{});
      }
      if constexpr (kHasAfter<Fused>) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) weight[v][i] *= fused.norm_scale, bias[v][i] *= fused.norm_scale;
      }
#pragma unroll
      for (int sum = 0; sum < kSums; ++sum)
#pragma unroll
        for (int i = 0; i < kVec; ++i) column_sums[sum][v][i] = 0;
      if constexpr (kHasGate<Fused>) {
        RawVec<x_t, kVec> raw = zero_vec<x_t, kVec>();
        if (elements_of(v) > 0)
          raw = load_vec<x_t, kVec>(static_cast<const x_t*>(fused.gate) + slice.segment * fused.gate_stride +
                                    slice.first_col + column_of(v));
        unpack(raw, gate[v]);
      }
    }
    ring.bring_first(params, fused, slice, group, rank);
    const int rows = slice.end_row;
    int row = slice.first_row + group;
    const int64_t own = static_cast<int64_t>(row) * params.hidden_size + slice.first_col + rank * kVec;
    x_t* grad_input = static_cast<x_t*>(params.grad_input) + own;
    [[maybe_unused]] scalar_t* grad_residual = nullptr;
    [[maybe_unused]] bool has_skip = false;  // a gradient of residual_out
    if constexpr (kAdds<Fused>) {
      grad_residual = static_cast<scalar_t*>(fused.grad_residual) + own;
      has_skip = fused.grad_residual_out;
    }

    // Of whole vectors, where the slice has no v-th for this thread, the row's first takes the place of x's, zeros
    // those of grad_output and weight: no branch is needed, and nothing reaches the sums. (An infinite x, times 0, is
    // nan, but so is all of its row; an infinite grad_output leaves the sums infinite.) Without the copy engine the
    // row's first vector is another thread's to wait for.
    const auto read_as = [&](auto type, unsigned at, int v, auto whole) {
      using T = decltype(type);
      if constexpr (kAligned) {
        bool is_there = elements_of(v) > 0;
        if constexpr (!Plan::kOneBehind && kHasAfter<Fused>) {  // asked anew: kept, what follows from it would spill
          int at_rank = rank;
          asm volatile("" : "+r"(at_rank));
          is_there = (v * kThreads + at_rank) * kVec < slice.elements;
        }
        if (!Ring::kBulk && !is_there) return zero_vec<T, kVec>();
        return ring.template vec<T>(at, is_there ? v * kThreads + rank : 0, kVec);
      } else {
        return ring.template vec<T>(at, held.index(v) * kThreads + rank, whole ? kVec : elements_of(v));
      }
    };
    const auto read = [&](unsigned at, int v, auto whole) { return read_as(scalar_t{}, at, v, whole); };
    const auto read_grad = [&](unsigned at, int v, auto whole) {
      return read_as(x_t{}, !kAligned || elements_of(v) > 0 ? at : ring.zeros(), v, whole);
    };
    const auto read_gated = [&](unsigned at, int v, auto whole) { return read_as(x_t{}, at, v, whole); };
    const auto read_skip = [&](unsigned at, int v, auto whole) {
      return kAdds<Fused> && has_skip ? read(at, v, whole) : zero_vec<scalar_t, kVec>();
    };
    // The lanes of this warp that have a row: where several rows share a warp, some may have none in the last turn, and
    // have left the loop. Rows go to lanes in order.
    const auto lanes_at_work = [&](int row) {
      constexpr int kRowsOfWarp = 32 / Row::kLanes;
      if constexpr (kRowsOfWarp == 1) return 0xffffffffu;
      const int count = min(rows - (row - group % kRowsOfWarp), kRowsOfWarp);
      return count == kRowsOfWarp ? 0xffffffffu : (1u << count * Row::kLanes) - 1;
    };
    // A warp without a vector in the last place leaves it out, in plans whose rows often end before it
    constexpr bool kMayEnd = kAligned && kThreads >= 64 && (kHasAfter<Fused> ? kVecs > 1 : kVecs == 3);
    const auto has_last = [&] {
      int first = rank - rank % 32;
      asm volatile("" : "+r"(first));  // asked anew: kept, the answer would spill
      return ((kVecs - 1) * kThreads + first) * kVec < slice.elements;
    };
    const auto for_all = [&](auto&& f) {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) f(v, std::true_type{});
    };
    const auto for_each = [&](auto&& f) {
      if constexpr (kMayEnd) {
#pragma unroll
        for (int v = 0; v < kVecs; ++v)
          if (v + 1 < kVecs || has_last()) f(v, std::true_type{});
      } else if constexpr (kAligned) {
        for_all(f);
      } else {
        held.for_each(f);
      }
    };
    // Sums along the row, and this row's part of the sums along the columns.
    const auto add_up = [&](const RowStats<scalar_t>& stats, [[maybe_unused]] int row, auto x_vec, auto grad_vec,
                            [[maybe_unused]] auto keep) {
      Pair<acc_t> sums{0, 0};
      if constexpr (kHasAfter<Fused>) {
        // Where something came after the norm the sums are x_hat's; `keep` is given wdy, as far as it is worked out
        with_after(fused, [&](auto which, auto drops) {
          constexpr bool kDrops = decltype(drops)::value;
          [[maybe_unused]] const auto dropout = [&] {
            if constexpr (kDrops)
              return RowDropout<acc_t>(fused.dropout, row);
            else
              return NotFused{};
          }();
          constexpr int kStrands =
              kVecs == 2 && !kDrops && (Plan::kOneBehind || !std::is_same<scalar_t, __half>::value) ? 2 : 1;
          Pair<acc_t> strands[kStrands] = {};
          constexpr bool kActivates = !std::is_same<decltype(which), Which<Activation::kNone>>::value;
          const auto add_vec = [&](int v, auto whole) {
            acc_t x[kVec], grad[kVec];
            RawVec<scalar_t, kVec> x_of[1] = {x_vec(v, whole)};
            unpack(grad_vec(v, whole), grad);
            if constexpr (kDrops) {
              int col = column_of(v);
              asm volatile("" : "+r"(col));  // what follows from it is made anew: kept for each vector, it would spill
              dropout.drop(grad, slice.first_col + col);
            }
            const auto normalize = [&] {
              unpack(x_of[0], x);
#pragma unroll
              for (int i = 0; i < kVec; ++i) x[i] = mul(stats.centered(x[i]), stats.rstd);
            };
            normalize();
            if constexpr (kActivates) {
              acc_t norm[kVec];
#pragma unroll
              for (int i = 0; i < kVec; ++i) norm[i] = fma(x[i], weight[v][i], bias[v][i]);
              activate_backward<sizeof(x_t) == 2>(grad, norm, which);
              if constexpr (kDrops) {  // kept meanwhile, it would spill
                forget(x_of);
                normalize();
              }
            }
            add_from_x_hat(strands[v % kStrands], grad_weight[v], grad_bias[v], x, grad, weight[v]);
            keep(v, grad);
          };
          // Random numbers of several vectors at once are worth more than what is left out
          if constexpr (kDrops)
            for_all(add_vec);
          else
            for_each(add_vec);
          sums = strands[0];
          if constexpr (kStrands > 1) sums = {add(sums.first, strands[1].first), add(sums.second, strands[1].second)};
        });
      } else {
        for_each([&](int v, auto whole) {
          acc_t x[kVec], grad[kVec];
          unpack(grad_vec(v, whole), grad);
          unpack(x_vec(v, whole), x);
          if constexpr (kIsFromY<Fused>) {
#pragma unroll
            for (int i = 0; i < kVec; ++i) x[i] = sub(x[i], bias[v][i]);
            add_from_y(sums, grad_weight[v], grad_bias[v], x, grad, weight[v]);
          } else {
            add_to_row(sums, stats, x, grad, weight[v]);
            add_to_columns(grad_weight[v], grad_bias[v], stats, x, grad);
          }
        });
      }
      return sums;
    };
    const auto store = [&](const RowStats<scalar_t>& stats, [[maybe_unused]] int row, Pair<acc_t> sums, auto x_vec,
                           auto grad_vec, [[maybe_unused]] auto skip_vec, [[maybe_unused]] auto gated_vec) {
      // What x, or x - mean, is multiplied by, and what is added; with rstd where something came after the norm
      const Pair<acc_t> row_terms = [&]() -> Pair<acc_t> {
        if constexpr (kHasAfter<Fused>) {
          if (!params.stats_grad) sums = {0, 0};
          const acc_t slope = mul(mul(sums.first, fused.sum_factor), stats.rstd);
          acc_t level = params.is_rms_norm ? acc_t(0) : mul(sums.second, fused.sum_factor);
          if constexpr (RowStats<scalar_t>::kFoldsMean) level = fma(-stats.mean, slope, level);
          return {mul(slope, stats.rstd), mul(level, stats.rstd)};
        } else if constexpr (kIsFromY<Fused>) {
          return slope_and_level(sums, UnitStats<acc_t>{1}, params, inverse_n);
        } else {
          return slope_and_level(sums, stats, params, inverse_n);
        }
      }();
      [[maybe_unused]] const acc_t wdy_factor = [&] {
        if constexpr (kHasAfter<Fused>)
          return mul(stats.rstd, fused.wdy_factor);
        else
          return acc_t(1);
      }();
      [[maybe_unused]] const auto dropout = [&] {
        if constexpr (kAdds<Fused> && !kHasGate<Fused>)
          return RowDropout<acc_t>(fused.dropout, row);
        else
          return NotFused{};
      }();
      for_each([&](int v, auto whole) {
        acc_t x[kVec], grad[kVec], values[kVec];
        unpack(x_vec(v, whole), x);
        unpack(grad_vec(v, whole), grad);
        if constexpr (kHasAfter<Fused>) {
#pragma unroll
          for (int i = 0; i < kVec; ++i)
            values[i] = fma(grad[i], wdy_factor, fma(stats.uncentered(x[i]), row_terms.first, row_terms.second));
        } else if constexpr (kIsFromY<Fused>) {
#pragma unroll
          for (int i = 0; i < kVec; ++i) x[i] = mul(sub(x[i], bias[v][i]), quick_inverse(weight[v][i]));
          grad_input_of(values, UnitStats<acc_t>{stats.rstd}, row_terms, x, grad, weight[v]);
        } else {
          grad_input_of(values, stats, row_terms, x, grad, weight[v]);
        }
        if constexpr (kAdds<Fused>) {
          acc_t skip[kVec];
          unpack(skip_vec(v, whole), skip);
#pragma unroll
          for (int i = 0; i < kVec; ++i) values[i] = add(values[i], skip[i]);
          const bool is_there = elements_of(v) > 0;
          store_vec_if(is_there && fused.grad_residual, grad_residual + v * kThreads * kVec, values);
          if constexpr (kHasGate<Fused>) {
            acc_t gated[kVec];
            unpack(gated_vec(v, whole), gated);
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
              column_sums[kSums - 1][v][i] = fma(gated[i], values[i], column_sums[kSums - 1][v][i]);
              values[i] = mul(values[i], gate[v][i]);
            }
          } else {
            if (fused.dropout.philox) dropout.apply(values, slice.first_col + column_of(v));
          }
          store_vec_if(is_there && params.grad_input, grad_input + v * kThreads * kVec, values);
        } else if constexpr (kAligned) {
          // Without a stage it is for who wants grad_input
          store_vec_if(elements_of(v) > 0 && (!kIsFused<Fused> || params.grad_input), grad_input + v * kThreads * kVec,
                       values);
        } else {
#pragma unroll
          for (int i = 0; i < kVec; ++i)
            if (whole || i < elements_of(v))
              grad_input[held.index(v) * kThreads * kVec + i] = narrow<scalar_t>(values[i]);
        }
      });
      // At most what all blocks hold: 32 bits
      const unsigned step = static_cast<unsigned>(slice.row_step) * static_cast<unsigned>(params.hidden_size);
      grad_input += step;
      if constexpr (kAdds<Fused>) grad_residual += step;
    };

    if constexpr (!Plan::kOneBehind) {
      // Load, sums, store: the row stays in registers
#pragma unroll 1
      for (; row < rows; row += slice.row_step) {
        ring.wait_full();
        RawVec<scalar_t, kVec> x_raw[kVecs], skip_raw[kAdds<Fused> ? kVecs : 1] = {};
        RawVec<x_t, kVec> grad_raw[kVecs], gated_raw[kHasGate<Fused> ? kVecs : 1] = {};
        [[maybe_unused]] RawVec<acc_t, kVec> kept[kHasAfter<Fused> ? kVecs : 1];
        const auto entry = ring.entry(params, ring.stage, row, group);
        const RowStats<scalar_t> stats = ring.stats(params, entry, ring.stage, row, group);
        const auto read_vec = [&](int v, auto whole) {
          x_raw[v] = read(entry.x, v, whole);
          grad_raw[v] = read_grad(entry.grad, v, whole);
          if constexpr (kAdds<Fused>) skip_raw[v] = read_skip(entry.residual, v, whole);
          if constexpr (kHasGate<Fused>) gated_raw[v] = read_gated(entry.gated, v, whole);
        };
        if constexpr (kMayEnd) {  // read or not, it may be used
          x_raw[kVecs - 1] = zero_vec<scalar_t, kVec>();
          grad_raw[kVecs - 1] = zero_vec<x_t, kVec>();
        }
        for_each(read_vec);
        ring.release(params, fused, slice.first_col, ring.stage, row + depth * slice.row_step, group, rank,
                     lanes_at_work(row));
        ring.next_stage();
        const Pair<acc_t> sums = row_sum<Row>(
            add_up(
                stats, row, [&](int v, auto) { return x_raw[v]; }, [&](int v, auto) { return grad_raw[v]; },
                [&](int v, const acc_t(&wdy)[kVec]) { kept[kHasAfter<Fused> ? v : 0] = pack<acc_t>(wdy); }),
            scratch[ring.stage]);  // alternates, as calls that follow each other must
        forget(x_raw);
        if constexpr (!kHasAfter<Fused>) forget(grad_raw);
        store(
            stats, row, sums, [&](int v, auto) { return x_raw[v]; },
            [&](int v, auto) {
              if constexpr (kHasAfter<Fused>)
                return kept[v];
              else
                return grad_raw[v];
            },
            [&](int v, auto) { return skip_raw[kAdds<Fused> ? v : 0]; },
            [&](int v, auto) { return gated_raw[kHasGate<Fused> ? v : 0]; });
      }
    } else {
      // The sums of one row travel between warps and blocks while the next row is added up; then the row is read from
      // its stage again. Nothing of it stays in registers, so that a thread can hold more columns. Where something came
      // after, wdy has a place of its own behind the ring, of two rows, each thread's: put back into the stage, it
      // would have to be fenced from the copy engine in every turn (H200, bf16, N = 4096, nothing applied: 246 us, for
      // 209).
      unsigned turn = 0;
      [[maybe_unused]] int asks_in = warp;  // turns until this warp asks
      if (!Plan::kHasAsker && warp == 0) Ring(ring).ask_for(params, fused, slice, slice.first_row, depth - Ring::kLag);
      [[maybe_unused]] const auto kept_at = [&](unsigned of_turn, int v) {
        return shared_address(ring_memory) + depth * Ring::kStageBytes + threadIdx.x * 16 +
               (of_turn % 2 * kVecs + v) * (kThreads * kRows * kVec * static_cast<int>(sizeof(acc_t)));
      };
      const auto finish = [&] {
        const int behind = ring.stage == 0 ? depth - 1 : ring.stage - 1;
        const auto entry = ring.entry(params, behind, row - slice.row_step, group);
        store(
            ring.stats(params, entry, behind, row - slice.row_step, group), row - slice.row_step,
            exchange.collect(turn - 1), [&](int v, auto whole) { return read(entry.x, v, whole); },
            [&](int v, auto whole) {
              if constexpr (kHasAfter<Fused>)
                return load_words<acc_t, kVec, kThreads * kRows>(kept_at(turn - 1, v));
              else
                return read_grad(entry.grad, v, whole);
            },
            [&](int v, auto whole) { return read_skip(entry.residual, v, whole); },
            [&](int v, auto whole) { return read_gated(entry.gated, v, whole); });
        ring.release(params, fused, slice.first_col, behind, row + (depth - 1) * slice.row_step, group, rank,
                     0xffffffffu);
      };
#pragma unroll 1
      for (; row < rows; row += slice.row_step, ++turn) {
        if constexpr (!Plan::kHasAsker) {
          if (asks_in == 0) {
            ring.ask_ahead(params, fused, slice, row - group);
            asks_in = kReaders / 32;
          }
          --asks_in;
        }
        ring.wait_full();
        const auto entry = ring.entry(params, ring.stage, row, group);
        exchange.share(turn, add_up(
                                 ring.stats(params, entry, ring.stage, row, group), row,
                                 [&](int v, auto whole) { return read(entry.x, v, whole); },
                                 [&](int v, auto whole) { return read_grad(entry.grad, v, whole); },
                                 [&](int v, const acc_t(&wdy)[kVec]) {
                                   if constexpr (kHasAfter<Fused>) store_words<kThreads * kRows>(kept_at(turn, v), wdy);
                                 }));
        if (turn > 0) finish();
        ring.next_stage();
      }
      if (turn > 0) finish();
    }
    if constexpr (kIsFromY<Fused>) {
#pragma unroll
      for (int v = 0; v < kVecs; ++v)
#pragma unroll
        for (int i = 0; i < kVec; ++i) grad_weight[v][i] *= quick_inverse(weight[v][i]);
    }
  }
  if constexpr (Plan::kClusters) {
    cluster_sync();  // no block leaves while others may write to it
  } else {
    __syncthreads();
  }
  if (!params.grad_weight && !params.grad_bias && !params.grad_gate) return;

  // The rows of this block, or cluster, become one partial sum, [kSums] of hidden_size each: those of a warp by
  // exchange, then by what each leaves in the ring's memory, which all threads add up at once. Row after row, and by
  // elements that neighbouring threads have 32 bytes apart, it took 4 to 12 us (H200, bf16: 2048 x 1024 18.6 us
  // became 11.6, 4096 x 8192 69 61, 32768 x 4096 208 202).
  constexpr int kElements = kSums * kVecs * kVec, kUnit = kVec < 4 ? kVec : 4;  // of a thread; written at once
  constexpr int kAdders = kRows * Row::kLanes / 32 > 0 ? kRows * Row::kLanes / 32 : 1;
  static_assert(kAdders * kElements * kThreads * sizeof(acc_t) <= 2 * Ring::kStageBytes, "the shallowest ring");
  if (kThreads < 32 && threadIdx.x < kThreads * kRows) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v)
#pragma unroll
      for (int i = 0; i < kVec; ++i)
#pragma unroll
        for (int offset = kThreads; offset < 32; offset *= 2)
#pragma unroll
          for (int sum = 0; sum < kSums; ++sum)
            column_sums[sum][v][i] += __shfl_xor_sync(0xffffffffu, column_sums[sum][v][i], offset);
  }
  const int adder = kThreads < 32 ? threadIdx.x / 32 : group;
  const bool adds = threadIdx.x < kThreads * kRows && (kThreads >= 32 || threadIdx.x % 32 < kThreads);
  acc_t* partial = static_cast<acc_t*>(params.workspace) +
                   static_cast<int64_t>(blockIdx.x / slice.blocks) * kSums * params.hidden_size + slice.first_col;
  const auto write = [&](int element, const acc_t(&values)[kUnit]) {
    const int v = element / kVec % kVecs, first = element % kVec, count = elements_of(v) - first;
    acc_t* target = partial + element / (kVecs * kVec) * params.hidden_size + column_of(v) + first;
    if constexpr (kAligned) {
      if (count <= 0) return;
      if constexpr (kHasAfter<Fused>) {
        acc_t scaled[kUnit];
#pragma unroll
        for (int i = 0; i < kUnit; ++i) scaled[i] = values[i] * fused.column_factor;
        store_vec(target, scaled);
      } else {
        store_vec(target, values);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kUnit; ++i)
        if (i < count) target[i] = values[i];
    }
  };
  const auto sum_of = [&](int element) -> acc_t& {
    return column_sums[element / (kVecs * kVec)][element / kVec % kVecs][element % kVec];
  };
  if constexpr (kAdders == 1) {
    if (!adds) return;
#pragma unroll
    for (int element = 0; element < kElements; element += kUnit) {
      acc_t values[kUnit];
#pragma unroll
      for (int i = 0; i < kUnit; ++i) values[i] = sum_of(element + i);
      write(element, values);
    }
  } else {
    acc_t* left = reinterpret_cast<acc_t*>(ring_memory) + rank;  // neighbouring threads' elements lie side by side
    if (adds) {
#pragma unroll
      for (int element = 0; element < kElements; ++element)
        left[(adder * kElements + element) * kThreads] = sum_of(element);
    }
    __syncthreads();
    if (kForRacecheck) __syncthreads();
    if (!adds) return;
#pragma unroll 1
    for (int element = adder * kUnit; element < kElements; element += kAdders * kUnit) {
      acc_t total[kUnit] = {};
#pragma unroll
      for (int row = 0; row < kAdders; ++row)
#pragma unroll
        for (int i = 0; i < kUnit; ++i) total[i] += left[(row * kElements + element + i) * kThreads];
      write(element, total);
    }
  }
}

// ---- host ----------------------------------------------------------------------------------------------------------

// How a fused kernel runs on the current device in clusters of `cluster`: as deep a ring as fits, up to the plan's, and
// how many clusters at once. Asked of the driver once a device and size.
struct Residence {
  int depth = 0, clusters = 0;
};

// How many clusters at once: each segment of the rows has as many, and at least one.
template <typename Plan>
int running_clusters(const KernelBackwardParams& params, const Residence& residence) {
  const int segments = std::max(params.segments, 1);
  const int64_t turns = (params.rows / segments + Plan::kRows - 1) / Plan::kRows;
  return static_cast<int>(std::clamp<int64_t>(residence.clusters / segments, 1, turns)) * segments;
}

template <typename scalar_t, typename Plan, typename Fused>
cudaError_t residence_of(int device, const DeviceFacts& facts, int cluster, Residence& residence) {
  constexpr int kDevices = 64;
  static std::atomic<uint64_t> known[kDevices][kMaxCluster + 1];
  static OncePerDevice allowed;
  using Ring = RowRing<scalar_t, Plan, Fused>;
  const auto kernel = norm_backward_fused_kernel<scalar_t, Plan, Fused>;
  const uint64_t before = device < kDevices ? known[device][cluster].load(std::memory_order_relaxed) : 0;
  if (before > 0) {
    residence = {static_cast<int>(before >> 32), static_cast<int>(before & 0xffffffffu)};
    return cudaSuccess;
  }
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) return error;
  const int room = facts.shared_bytes - static_cast<int>(attributes.sharedSizeBytes);
  constexpr int kKept = kKeptBytes<scalar_t, Plan, Fused>;
  const int depth = std::min(kFusedDepth<Plan>, (room - kKept) / Ring::kStageBytes);
  // Who asks in turns fills a stage that lies so far behind
  static_assert(Plan::kHasAsker || 2 + Plan::kOneBehind > Ring::kLag, "a stage would wait for itself");
  if (depth < 2 + Plan::kOneBehind) return cudaSuccess;
  const int bytes = depth * Ring::kStageBytes + kKept;
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
  clusters = std::min(clusters, kMostClusters);
  residence = {depth, clusters};
  if (device < kDevices)
    known[device][cluster].store(static_cast<uint64_t>(depth) << 32 | static_cast<uint32_t>(clusters),
                                 std::memory_order_relaxed);
  return cudaSuccess;
}

}  // namespace
}  // namespace fused_layernorm
