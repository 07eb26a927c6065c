// Every launch number of the CUDA kernels, each with what it was measured to do.
#pragma once

#include <algorithm>
#include <cstdint>

#include "norm_params.h"

namespace fused_layernorm {

// How one row is spread: kThreads threads, each holding kVecs vectors of kVec elements at once. Rows longer than
// kThreads * kVecs * kVec take several turns. The plan follows from hidden_size and dtype alone, never from the number
// of rows: that, and a fixed order of every sum, makes a row's result independent of the batch around it.
//
// clusters: a row too long for one block is shared by a cluster of up to 16 blocks, where the card has clusters (sm_90
// and later). A template parameter, as the few instructions it takes cost registers: with it in every plan, forward at
// N = 4096 bf16 fell from 0.91 to 0.80 of the copy (H200).
template <int threads, int vecs, int vec, bool clusters = false>
struct RowPlan {
  static constexpr int kThreads = threads;
  static constexpr int kVecs = vecs;
  static constexpr int kVec = vec;
  static constexpr bool kClusters = clusters;
};

template <typename... Plans>
struct Ladder {};

constexpr int round_up_to(int value, int least) { return value > least ? value : least; }

// ---- forward: one block a row, or several short rows a block; few threads with many vectors ------------------------

// Measured on an H200, x of 256 MiB, fraction of the copy, bf16: N = 8192 128 x 8 vectors 0.94, 256 x 4 0.87; N = 16384
// 256 x 8 0.92, 512 x 4 0.78; N = 65536 in clusters 256 x 4 0.53, 256 x 8 0.42, and fp32 256 x 8 0.70, 256 x 4 0.50.
// N = 512: 32 x 2 0.79 and 2.4 us at 32 rows, 16 x 4 0.91 and 3.5 us, where torch takes 2.6 us: the small launch
// decided.
template <typename scalar_t, int vec>
struct ForwardLadder {
  using type = Ladder<RowPlan<4, 2, vec>, RowPlan<4, 4, vec>, RowPlan<8, 4, vec>, RowPlan<32, 2, vec>,
                      RowPlan<32, 4, vec>, RowPlan<64, 4, vec>, RowPlan<128, 4, vec>, RowPlan<128, 8, vec>,
                      RowPlan<256, 8, vec>, RowPlan<256, 4, vec, true>>;
};
template <>
struct ForwardLadder<float, 4> {
  using type =
      Ladder<RowPlan<4, 2, 4>, RowPlan<4, 4, 4>, RowPlan<8, 4, 4>, RowPlan<16, 4, 4>, RowPlan<64, 2, 4>,
             RowPlan<64, 4, 4>, RowPlan<128, 4, 4>, RowPlan<256, 4, 4>, RowPlan<256, 8, 4>, RowPlan<256, 8, 4, true>>;
};
template <typename scalar_t>
struct ForwardLadder<scalar_t, 1> {
  using type =
      Ladder<RowPlan<4, 4, 1>, RowPlan<32, 8, 1>, RowPlan<128, 8, 1>, RowPlan<256, 12, 1>, RowPlan<512, 12, 1>>;
};
template <>
struct ForwardLadder<double, 1> {
  using type = Ladder<RowPlan<32, 8, 1>, RowPlan<512, 8, 1>>;
};

// Rows of one warp or less share a block of 128 threads; longer rows have a block each.
template <typename Plan>
constexpr int kForwardThreads = Plan::kThreads > 32 ? Plan::kThreads : 128;

// Asked of the compiler, so that it takes the registers the plan needs and no fewer (left to itself it aimed at 48 and
// spilled): 64 a thread, 128 for 8 vectors a thread. At 71 to 80 registers, three quarters of the threads an SM,
// forward lost 0.08 of the copy (H200, bf16, N = 1024 to 8192); fp16 has to make do with that, as at 64 it spills (the
// assembler computes a widened bf16 again, one shift, but keeps a widened fp16).
template <typename Plan>
constexpr int forward_blocks_per_sm(DType x_dtype) {
  const bool long_row = Plan::kVec > 1 && Plan::kVecs > 4 && !Plan::kClusters;
  const int threads = long_row ? 512 : x_dtype == DType::kBFloat16 ? 1024 : 768;
  return threads / kForwardThreads<Plan>;
}

// Whether 16-bit elements are widened anew for each pass over the registers, rather than kept widened: two operations
// an element more, half the registers.
template <typename Plan>
constexpr bool kWidenAnew = Plan::kVecs * Plan::kVec > 32;

// ---- backward ------------------------------------------------------------------------------------------------------

// One ladder for both strategies below, so that grad_input is the same bits whichever runs. bf16 at N = 256: 16 x 2
// vectors 0.77 of the pass, 32 x 1 0.59 (H200). Single elements: 512 x 9 at N = 4097 0.46, a cluster of two with 512 x
// 8 each 0.21.
template <typename scalar_t, int vec>
struct BackwardLadder {
  using type =
      Ladder<RowPlan<4, 2, vec>, RowPlan<8, 2, vec>, RowPlan<16, 2, vec>, RowPlan<32, 2, vec>, RowPlan<64, 2, vec>,
             RowPlan<128, 2, vec>, RowPlan<256, 2, vec>, RowPlan<512, 2, vec>, RowPlan<512, 2, vec, true>>;
};
template <>
struct BackwardLadder<float, 4> {
  using type =
      Ladder<RowPlan<4, 2, 4>, RowPlan<8, 2, 4>, RowPlan<16, 2, 4>, RowPlan<32, 2, 4>, RowPlan<64, 2, 4>,
             RowPlan<128, 2, 4>, RowPlan<256, 2, 4>, RowPlan<512, 2, 4>, RowPlan<512, 4, 4>, RowPlan<512, 4, 4, true>>;
};
template <typename scalar_t>
struct BackwardLadder<scalar_t, 1> {
  using type = Ladder<RowPlan<8, 2, 1>, RowPlan<32, 2, 1>, RowPlan<32, 8, 1>, RowPlan<128, 8, 1>, RowPlan<512, 8, 1>,
                      RowPlan<512, 9, 1>, RowPlan<512, 9, 1, true>>;
};
template <>
struct BackwardLadder<double, 1> {
  using type = Ladder<RowPlan<32, 4, 1>, RowPlan<512, 4, 1>>;
};

constexpr int kBackwardBlock = 256;  // threads of a block of short rows

template <typename Plan>
constexpr int kBackwardThreads = round_up_to(Plan::kThreads, kBackwardBlock);

// Strategy "fused": persistent blocks read x and grad_output once and keep the weight gradients in registers. Needs
// room for 2 accumulators an element beside the row: up to 16 elements a thread.
template <typename scalar_t, typename Plan>
constexpr bool fused_backward_fits() {
  return sizeof(scalar_t) < 8 && Plan::kVecs * Plan::kVec <= (Plan::kVec == 1 ? 9 : 16);
}

// 512 threads an SM: up to 128 registers each. Fewer threads with more in flight each beat more threads.
template <typename Plan>
constexpr int kFusedBlocksPerSm = round_up_to(512 / kBackwardThreads<Plan>, 1);

// Rows in flight a row group. More is not better: with 5 (160 KB an SM) rows of 4 KB and more fell to 0.71-0.74 of the
// two-read-one-write pass (bf16, N = 2048 to 8192) from 0.84-0.88 with 4; with 3, N = 2048 fell to 0.75; with 2, N =
// 4096 and 8192 to 0.80. It is the memory system, not the waiting: without the exchange between warps nothing changed.
template <typename Plan>
constexpr int kFusedDepth = Plan::kVecs > 2 ? 3 : 4;

// Strategy "split": blocks of rows write grad_input while blocks of columns sum the weight gradients, in one launch.
// Reads x and grad_output twice, so it is for what the fused strategy cannot hold, and for problems that live in the
// L2 cache, where it saves the second launch.
constexpr int64_t kSplitMaxElements = 1 << 20;
constexpr int64_t kSplitMaxRows = 1024;

// As for forward: 80 registers a thread, 64 for blocks of 512.
template <typename Plan>
constexpr int kSplitBlocksPerSm =
    Plan::kThreads >= 512 ? (Plan::kVecs > 8 ? 512 : 1024) / Plan::kThreads : 768 / kBackwardThreads<Plan>;

// Columns of a block in the split strategy: 8 lanes of 16 bytes are one 128-byte line; more lanes where rows are few.
template <int vec>
constexpr int kColumnLanes = vec > 1 ? 8 : 32;
constexpr int kColumnBlocks = 1024;       // rows are split over this many column blocks
constexpr int kColumnRowsPerThread = 16;  // unless a thread would get fewer rows than this

// ---- sum of the per-block partial weight gradients -----------------------------------------------------------------

constexpr int kFinalizeColumns = 32;
constexpr int kFinalizeRows = 32;  // partial rows summed side by side

}  // namespace fused_layernorm
