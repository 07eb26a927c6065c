// Every launch number of the CUDA kernels, each with what it was measured to do.
#pragma once

#include <algorithm>
#include <cstdint>

#include "norm_params.h"

namespace fused_layernorm {

// A build for compute-sanitizer's racecheck, with what that tool does not follow said so that it does: of a warp that
// arrives at a barrier every lane arrives, not one after __syncwarp(); barriers that several lanes begin in one
// instruction, of which it takes the last lane to have begun them all, are followed by one more; and where rows are
// merged there are two barriers for one, as it seems to take the first access behind a barrier of 13 warps for one
// before it, in some runs (it reported one word of 16 that one statement reads, and nothing with two barriers). Few
// blocks are persistent, and few rows are many, so that small problems use every kernel and its ring many times: the
// tool takes seconds for millions of elements.
#if defined(FLN_FOR_RACECHECK)
constexpr bool kForRacecheck = true;
#else
constexpr bool kForRacecheck = false;
#endif
constexpr int kMostClusters = kForRacecheck ? 2 : 1 << 30;  // that are persistent

// Rows of one launch that has a block, or part of one, for each row. A grid has fewer than 2^31 blocks; the launchers
// of the plain norm split more rows into several launches. Launches that need no split: those with segments, which have
// fewer than 2^31 rows; those with stages, clusters or several blocks a row, where 2^31 blocks have a result of 128 GiB
// or more; and those of grid-stride loops.
constexpr int64_t kMaxRowsOfLaunch = int64_t{1} << 30;

// How one row is spread: kThreads threads, each holding kVecs vectors of kVec elements at once. Rows longer than
// kThreads * kVecs * kVec take several turns. The plan follows from hidden_size, dtype and the card alone, never from
// the number of rows: that, and a fixed order of every sum, makes a row's result independent of the batch around it.
//
// max_cluster: a row too long for one block is shared by a cluster of up to so many, where the card has clusters (sm_90
// and later). A template parameter, as the few instructions it takes cost registers: with it in every plan, forward at
// N = 4096 bf16 fell from 0.91 to 0.80 of the copy (H200).
template <int threads, int vecs, int vec, int max_cluster = 1>
struct RowPlan {
  static constexpr int kThreads = threads;
  static constexpr int kVecs = vecs;
  static constexpr int kVec = vec;
  static constexpr int kMaxCluster = max_cluster;
  static constexpr bool kClusters = max_cluster > 1;
};

// Whether a row may need several turns: only in the last plan of a ladder, as the others are taken where they hold it.
template <typename Plan>
constexpr bool kManyTiles = Plan::kClusters;

template <typename... Plans>
struct Ladder {};

constexpr int round_up_to(int value, int least) { return value > least ? value : least; }
constexpr int round_up_to_power(int value) { return value <= 1 ? 1 : 2 * round_up_to_power((value + 1) / 2); }

// ---- forward: one block a row, or several short rows a block; few threads with many vectors ------------------------

// Four vectors a thread, as few threads as that allows. Rows that leave places of their threads empty lose, so 16-bit
// rows of some usual sizes have plans of their own, by seven or nine vectors (1152, 1792, 2304, 3584, 7168: 3 to 7%).
template <typename scalar_t>
struct ForwardLadder {
  using type = Ladder<RowPlan<2, 4, 8>, RowPlan<4, 4, 8>, RowPlan<8, 4, 8>, RowPlan<8, 6, 8>, RowPlan<16, 4, 8>,
                      RowPlan<16, 6, 8>, RowPlan<32, 4, 8>, RowPlan<16, 9, 8>, RowPlan<32, 6, 8>, RowPlan<32, 7, 8>,
                      RowPlan<64, 4, 8>, RowPlan<32, 9, 8>, RowPlan<64, 6, 8>, RowPlan<64, 7, 8>, RowPlan<128, 4, 8>,
                      RowPlan<128, 5, 8>, RowPlan<128, 6, 8>, RowPlan<128, 7, 8>, RowPlan<256, 4, 8>,
                      RowPlan<256, 6, 8>, RowPlan<256, 8, 8>, RowPlan<256, 4, 8, 16>>;
};
template <>
struct ForwardLadder<float> {
  using type =
      Ladder<RowPlan<4, 4, 4>, RowPlan<8, 4, 4>, RowPlan<16, 4, 4>, RowPlan<32, 4, 4>, RowPlan<32, 6, 4>,
             RowPlan<64, 4, 4>, RowPlan<64, 6, 4>, RowPlan<128, 4, 4>, RowPlan<128, 6, 4>, RowPlan<256, 4, 4>,
             RowPlan<256, 5, 4>, RowPlan<256, 6, 4>, RowPlan<256, 8, 4>, RowPlan<512, 8, 4>, RowPlan<256, 8, 4, 16>>;
};
template <>
struct ForwardLadder<double> {
  using type = Ladder<RowPlan<32, 8, 1>, RowPlan<512, 4, 1, 16>>;
};

// With a load stage: the plans above for rows of 256 elements or more, one block a row. Two or eight vectors a thread,
// hints for loads and stores: within 2%, or slower.
template <typename scalar_t>
struct AddLadder {
  using type = Ladder<RowPlan<8, 4, 8>, RowPlan<8, 6, 8>, RowPlan<16, 4, 8>, RowPlan<16, 6, 8>, RowPlan<32, 4, 8>,
                      RowPlan<32, 6, 8>, RowPlan<64, 4, 8>, RowPlan<64, 6, 8>, RowPlan<128, 4, 8>, RowPlan<128, 5, 8>,
                      RowPlan<128, 6, 8>, RowPlan<256, 4, 8>, RowPlan<256, 6, 8>, RowPlan<256, 8, 8>>;
};
template <>
struct AddLadder<float> {
  using type = Ladder<RowPlan<16, 4, 4>, RowPlan<32, 4, 4>, RowPlan<32, 6, 4>, RowPlan<64, 4, 4>, RowPlan<64, 6, 4>,
                      RowPlan<128, 4, 4>, RowPlan<128, 6, 4>, RowPlan<256, 4, 4>, RowPlan<256, 5, 4>,
                      RowPlan<256, 6, 4>, RowPlan<256, 8, 4>, RowPlan<512, 8, 4>>;
};

// With an epilogue, where instructions decide, a third of them a row's own: eight vectors a thread, and no empty places
// (10% at 1024, up to 25% at 1152 and 2560). Each activation has straight code (AfterRow): by a branch a vector warps
// waited for instructions, 3 to 10%.
template <typename scalar_t>
struct AfterLadder {
  using type =
      Ladder<RowPlan<4, 8, 8>, RowPlan<8, 6, 8>, RowPlan<8, 8, 8>, RowPlan<16, 6, 8>, RowPlan<16, 8, 8>,
             RowPlan<16, 9, 8>, RowPlan<32, 5, 8>, RowPlan<32, 6, 8>, RowPlan<32, 7, 8>, RowPlan<32, 8, 8>,
             RowPlan<64, 5, 8>, RowPlan<64, 6, 8>, RowPlan<64, 7, 8>, RowPlan<64, 8, 8>, RowPlan<128, 5, 8>,
             RowPlan<128, 6, 8>, RowPlan<128, 7, 8>, RowPlan<128, 8, 8>, RowPlan<256, 6, 8>, RowPlan<256, 8, 8>>;
};
template <>
struct AfterLadder<float> : AddLadder<float> {};

// Rows that are not made of whole 16 bytes, by pairs of 16-bit elements, or single ones. Few threads with many elements
// each, as what a row costs beside its elements is a third; 20 places, so that one element more than a power of two
// does not need twice the threads.
template <typename scalar_t>
struct RaggedForwardLadder {
  using type = Ladder<RowPlan<2, 20, 2>, RowPlan<4, 20, 2>, RowPlan<8, 20, 2>, RowPlan<16, 20, 2>, RowPlan<32, 20, 2>,
                      RowPlan<64, 20, 2>, RowPlan<128, 20, 2>, RowPlan<256, 20, 2>, RowPlan<256, 28, 2>,
                      RowPlan<512, 16, 2>, RowPlan<512, 16, 2, 16>>;
};
template <>
struct RaggedForwardLadder<float> {
  using type = Ladder<RowPlan<4, 20, 1>, RowPlan<8, 20, 1>, RowPlan<16, 20, 1>, RowPlan<32, 20, 1>, RowPlan<64, 20, 1>,
                      RowPlan<128, 20, 1>, RowPlan<256, 20, 1>, RowPlan<512, 20, 1>, RowPlan<512, 32, 1>,
                      RowPlan<512, 32, 1, 16>>;
};
template <>
struct RaggedForwardLadder<double> : ForwardLadder<double> {};

// Whether rows are made of vectors that begin at multiples of their size. Those of 16-bit elements that are not pass
// through shared memory, so much of it at most, with what shares their first and last 16 bytes.
template <typename scalar_t, typename Plan>
constexpr bool kIsWhole = Plan::kVec == 1 || Plan::kVec * sizeof(scalar_t) >= 16;
template <typename scalar_t, typename Plan>
constexpr bool kIsStaged = !kIsWhole<scalar_t, Plan>;
template <typename scalar_t, typename Plan>
constexpr int kStageBytes = Plan::kThreads * Plan::kVecs * Plan::kVec * static_cast<int>(sizeof(scalar_t)) + 32;

// Rows of one warp or less share a block of 64 threads; longer rows have a block each. By blocks of 128 or 32 threads
// N = 64 to 1024 within 1.5%.
template <typename Plan>
constexpr int kForwardThreads = Plan::kThreads > 32 ? Plan::kThreads : 64;

// Blocked instead of interleaved: each warp of a longer row reads one contiguous slice of it (1 to 1.5%; by 512 threads
// it lost 1%).
template <typename Plan>
constexpr bool kByWarps = Plan::kVec >= 4 && !Plan::kClusters && Plan::kThreads > 32 && Plan::kThreads <= 256;

// Asked of the compiler, so that it takes the registers the plan needs and no fewer: 64 a thread, 80 or 128 for 8
// vectors a thread, 96 for 7 or 9. At 71 to 80 registers four vectors lost 8%; fp16 makes do with that, as at 64 it
// spills.
template <typename Plan>
constexpr int forward_blocks_per_sm(DType x_dtype, DType weight_dtype, bool adds, bool drops_y) {
  const bool whole = Plan::kVec * dtype_bytes(x_dtype) >= 16, is_fp16 = x_dtype == DType::kFloat16;
  const bool needs_few = x_dtype == DType::kBFloat16 && weight_dtype == x_dtype && !adds;
  int threads = 1024;
  if (kManyTiles<Plan> || (is_fp16 && Plan::kVecs > 20)) {
    threads = 512;
  } else if (whole && Plan::kVecs > 6) {
    const bool is_fp32 = dtype_bytes(x_dtype) == 4 && !adds;
    threads = Plan::kVecs % 2 == 1 ? 640 : is_fp32 && Plan::kThreads > 256 ? 1024 : is_fp32 || needs_few ? 768 : 512;
  } else if (whole ? Plan::kVecs > 4 || !needs_few : is_fp16 && Plan::kVecs >= 16) {
    threads = 768;
  }
  // A row's six gates side by side (bf16, gate and 8 segments, least us): 768 276 became 265, 1152 280 273, 1536 281
  // 266, 2304 286 270, 3072 287 268; without gate within 1%, but 2304 with dropout 267 became 271. By plans of four
  // vectors 1152 took 324; each gate asked for one ahead 279.
  if (adds && whole && Plan::kVecs == 6) threads = 640;
  // 768 would spill; by as little as it did they took as long, within 3%
  if (drops_y && whole && dtype_bytes(x_dtype) == 2 && Plan::kVecs == 8) threads = 640;
  return threads / kForwardThreads<Plan>;
}

// Up to so many blocks forward of a plain call loads weight and bias before it needs them: all of them run at once, and
// how many fit an SM does not matter. As many rows in blocks of 64 threads as of 128.
template <typename Plan>
constexpr int64_t kEagerBlocks = kForRacecheck                 ? 8
                                 : kForwardThreads<Plan> < 128 ? 1024
                                                               : 512;
template <typename scalar_t, typename Plan>
constexpr bool kMayBeEager =
    kIsWhole<scalar_t, Plan> && !Plan::kClusters && sizeof(scalar_t) < 8 && (Plan::kVecs <= 7 || Plan::kVecs == 9);

// Where segments of rows have weights of their own, threads take so many rows one after the other if all of an SM's
// threads have work then: rows next to each other, which find their weight in L1. A block a row, rows next to each
// other are on different SMs, and each SM reads every segment's weight (128 segments, 1024: 157 us, by four rows 140).
// Plans of 256 threads by four vectors take one row, as they would spill.
template <typename Plan>
constexpr int kSegmentTurns = Plan::kVecs == 4 ? 4 : 2;
template <typename Plan>
constexpr int kFewSegments = Plan::kVecs == 4 && !kForRacecheck ? 8 : 1;  // up to so many one row at a time
constexpr int64_t kSegmentTurnsThreads = kForRacecheck ? 64 : 132 * 1024;
template <typename scalar_t, typename Plan>
constexpr bool kTakesTurns = kIsWhole<scalar_t, Plan> && !Plan::kClusters && sizeof(scalar_t) < 8 &&
                             (Plan::kThreads <= 32 || Plan::kVecs == 6 || Plan::kVecs == 7);

// Whether 16-bit elements are widened anew for each pass over the registers, rather than kept widened: two operations
// an element more, half the registers.
template <typename Plan>
constexpr bool kWidenAnew = Plan::kVecs * Plan::kVec >= 32;

// ---- forward of long rows: streamed through the shared memory of persistent clusters (sm_90 and later) --------------

// Longer rows are long. At 16384 columns the register kernel runs bf16 at 0.955 of the copy and fp32 at 0.955, the
// streamed one at 0.91 and 0.89 (H200).
constexpr bool is_long_row(DType x_dtype, int64_t hidden_size) {
  return x_dtype != DType::kFloat64 && hidden_size > 16384;
}

// A block of `threads`, and two warps beside them, holds slices of `vecs` vectors a thread of `depth` rows at once, and
// writes a row when it has summed `delay` more. Depth and delay are not seen in the bits of a result; the others are.
// Registers are given to warps in fours: 8 + 2 warps leave 168 a thread, 16 + 2 warps 96.
template <int threads, int vecs, int vec, int depth, int delay, int max_cluster, int blocks_per_sm = 1>
struct StreamPlan : RowPlan<threads, vecs, vec, max_cluster> {
  static constexpr int kDepth = depth;
  static constexpr int kDelay = delay;
  static constexpr int kBlocksPerSm = blocks_per_sm;
};

// Shallower rings, other delays and rows dealt out in turn lost 2 to 9%. fp32 weights of 16-bit x take twice the
// registers: half the threads (not measured).
template <typename scalar_t, typename weight_t>
struct StreamLadder {
  using type = Ladder<StreamPlan<512, 4, 8, 6, 3, 16>>;
};
template <typename scalar_t>
struct StreamLadder<scalar_t, float> {
  using type = Ladder<StreamPlan<256, 4, 8, 8, 2, 16>>;
};
template <>
struct StreamLadder<float, float> {
  using type = Ladder<StreamPlan<256, 4, 4, 8, 2, 8>, StreamPlan<512, 4, 4, 6, 2, 16>, StreamPlan<512, 8, 4, 3, 1, 16>>;
};

template <typename Plan>
constexpr int kStreamThreads = Plan::kThreads + 64;
constexpr int kClaimedRows = 4;  // rows a cluster from which on they are claimed: the counter costs a launch of 1.2 us

// ---- backward ------------------------------------------------------------------------------------------------------

// Strategy "fused": persistent blocks read x and grad_output once and keep the weight gradients in registers.
//
// rows: rows of a block at once; blocks_per_sm: asked of the compiler, and of the launch. Beside the warps of the rows
// each block has one that fetches (RowRing). Registers are given to warps in fours: 7 + 1 warps leave each thread 128
// registers at two blocks an SM, 8 + 1 only 168 of 224 at one block.
template <int threads, int vecs, int vec, int rows, int blocks_per_sm, int max_cluster = 1>
struct BackwardPlan : RowPlan<threads, vecs, vec, max_cluster> {
  static constexpr int kRows = rows;
  static constexpr int kBlocksPerSm = blocks_per_sm;
  // No producer warp beside 16 that have rows, which leave each thread 128 registers: these take turns as producer.
  static constexpr bool kHasProducer = !(threads * rows == 512 && vec == 8);
  // Finish a row only when the next one is added up: where the sums come from other blocks, where one row is all the
  // block has to do, where a thread holds so many columns that the row does not fit beside their sums, and where the
  // warp that asks has rows to wait for.
  static constexpr bool kOneBehind = max_cluster > 1 || vecs* vec > 16 || (rows == 1 && threads > 32) || !kHasProducer;
};

// Whether blocks of backward wait for the mean of all (pace.cuh): fp32 RMSNorm of 4096 and more gained 2 to 6%; blocks
// that have several short rows at once, and ragged rows, lost up to 18%; bf16 within 1%.
template <typename scalar_t, typename Plan>
constexpr bool kIsPaced = sizeof(scalar_t) == 4 && Plan::kOneBehind && Plan::kVec * sizeof(scalar_t) == 16;
// Bytes between the turns in which a block looks how far it is ahead of the others, about; how many half turns it may
// be, and how often and after how long it looks again before it goes on unpaced. Unpaced and a slack of 0.5, 1, 1.5, 2,
// 4 turns, RMSNorm fp32: N = 4096 0.916, 0.922, 0.971, 0.968, 0.959, 0.931; 16384 0.945, 0.934, 0.962, 0.961, 0.957,
// 0.955. LayerNorm, which waits for two statistics a row, is kept together by that.
constexpr int kPaceBytes = 32768;
constexpr int kPaceSlackHalves = 3;
constexpr int kPaceLooks = 32;
constexpr unsigned kPaceNanoseconds = 100;
constexpr unsigned kPaceNever = 1u << 30;  // turns that a block gives itself when it goes on unpaced

// One ladder for both strategies, so that grad_input is the same bits whichever runs. Rows and blocks as measured at
// the size of each plan; neighbours lost 2 to 10%.
template <typename scalar_t>
struct BackwardLadder {
  using type = Ladder<BackwardPlan<8, 1, 8, 28, 3>, BackwardPlan<16, 1, 8, 14, 3>, BackwardPlan<32, 1, 8, 7, 3>,
                      BackwardPlan<32, 2, 8, 7, 2>, BackwardPlan<64, 2, 8, 6, 1>, BackwardPlan<96, 2, 8, 5, 1>,
                      BackwardPlan<64, 4, 8, 3, 1>, BackwardPlan<64, 3, 8, 5, 1, 2>, BackwardPlan<64, 4, 8, 3, 1, 2>,
                      BackwardPlan<128, 4, 8, 2, 1>, BackwardPlan<64, 4, 8, 4, 1, 4>, BackwardPlan<256, 4, 8, 1, 1>,
                      BackwardPlan<128, 4, 8, 2, 1, 16>, BackwardPlan<256, 4, 8, 1, 1, 16>>;
};
template <>
struct BackwardLadder<float> {
  using type =
      Ladder<BackwardPlan<8, 1, 4, 28, 3>, BackwardPlan<16, 1, 4, 14, 3>, BackwardPlan<32, 1, 4, 7, 3>,
             BackwardPlan<32, 2, 4, 7, 3>, BackwardPlan<64, 2, 4, 6, 1>, BackwardPlan<64, 4, 4, 4, 1>,
             BackwardPlan<128, 4, 4, 2, 1>, BackwardPlan<256, 4, 4, 1, 1>, BackwardPlan<128, 4, 4, 2, 1, 4>,
             BackwardPlan<256, 8, 4, 1, 1>, BackwardPlan<256, 4, 4, 1, 1, 16>, BackwardPlan<256, 8, 4, 1, 1, 16>>;
};
template <>
struct BackwardLadder<double> {
  using type = Ladder<RowPlan<32, 4, 1>, RowPlan<512, 4, 1>>;
};

// With a load stage: a fourth and a fifth tensor are work, so more warps, with fewer columns a thread, from 2048
// columns on (8192: 274 us by the plans above, 264 by these).
template <typename scalar_t>
struct AddGradLadder {
  using type =
      Ladder<BackwardPlan<8, 1, 8, 28, 3>, BackwardPlan<16, 1, 8, 14, 3>, BackwardPlan<32, 1, 8, 7, 3>,
             BackwardPlan<32, 2, 8, 7, 2>, BackwardPlan<64, 2, 8, 6, 1>, BackwardPlan<64, 3, 8, 4, 1>,
             BackwardPlan<128, 2, 8, 2, 1>, BackwardPlan<128, 2, 8, 3, 1, 16>, BackwardPlan<128, 4, 8, 2, 1, 16>>;
};
template <>
struct AddGradLadder<float> {
  using type = Ladder<BackwardPlan<8, 1, 4, 28, 3>, BackwardPlan<16, 1, 4, 14, 3>, BackwardPlan<32, 1, 4, 7, 3>,
                      BackwardPlan<32, 2, 4, 7, 3>, BackwardPlan<64, 2, 4, 6, 1>, BackwardPlan<64, 4, 4, 4, 1>,
                      BackwardPlan<128, 4, 4, 2, 1>, BackwardPlan<256, 4, 4, 1, 1>, BackwardPlan<128, 4, 4, 2, 1, 4>,
                      BackwardPlan<256, 4, 4, 1, 1, 16>>;
};

// With an epilogue, whose gradient is work: 16 elements a thread, and as many warps as that leaves registers for and
// rows fill, 12 to 15 of them beside the producer; above 3072 columns 16 warps that take turns as producer, in clusters
// half as large (4096 to 16384: 2 to 9%).
template <typename scalar_t>
struct AfterGradLadder {
  using type =
      Ladder<BackwardPlan<32, 1, 8, 7, 3>, BackwardPlan<32, 2, 8, 7, 2>, BackwardPlan<96, 1, 8, 6, 1>,
             BackwardPlan<64, 2, 8, 7, 1>, BackwardPlan<96, 3, 4, 5, 1>, BackwardPlan<96, 2, 8, 5, 1>,
             BackwardPlan<128, 2, 8, 3, 1>, BackwardPlan<160, 2, 8, 3, 1>, BackwardPlan<96, 2, 8, 5, 1, 2>,
             BackwardPlan<256, 2, 8, 2, 1>, BackwardPlan<96, 2, 8, 5, 1, 4>, BackwardPlan<256, 2, 8, 2, 1, 16>>;
};
// With dropout, whose random numbers come by eights: 1152 columns 279 us by four elements, 252 by eight.
template <typename scalar_t>
struct DropGradLadder {
  using type = Ladder<BackwardPlan<32, 1, 8, 7, 3>, BackwardPlan<32, 2, 8, 7, 2>, BackwardPlan<96, 1, 8, 6, 1>,
                      BackwardPlan<64, 2, 8, 7, 1>, BackwardPlan<96, 2, 8, 5, 1>, BackwardPlan<128, 2, 8, 3, 1>,
                      BackwardPlan<160, 2, 8, 3, 1>, BackwardPlan<96, 2, 8, 5, 1, 2>, BackwardPlan<256, 2, 8, 2, 1>,
                      BackwardPlan<96, 2, 8, 5, 1, 4>, BackwardPlan<256, 2, 8, 2, 1, 16>>;
};
template <>
struct AfterGradLadder<float> {
  using type = Ladder<BackwardPlan<32, 2, 4, 14, 1>, BackwardPlan<64, 2, 4, 6, 1>, BackwardPlan<128, 2, 4, 4, 1>,
                      BackwardPlan<128, 3, 4, 3, 1>, BackwardPlan<256, 2, 4, 2, 1>, BackwardPlan<128, 4, 4, 2, 1, 16>>;
};

template <>
struct DropGradLadder<float> : AfterGradLadder<float> {};

// With a gate, whose gradient is a third sum along the columns: fewer columns a thread, fewer rows (3 to 7%).
template <typename scalar_t>
struct GateGradLadder {
  using type = Ladder<BackwardPlan<32, 1, 8, 7, 2>, BackwardPlan<32, 2, 8, 7, 1>, BackwardPlan<64, 2, 8, 3, 1>,
                      BackwardPlan<64, 3, 8, 3, 1>, BackwardPlan<128, 2, 8, 2, 1>, BackwardPlan<128, 2, 8, 2, 1, 16>>;
};
template <>
struct GateGradLadder<float> {
  using type = Ladder<BackwardPlan<32, 2, 4, 7, 2>, BackwardPlan<64, 2, 4, 6, 1>, BackwardPlan<64, 4, 4, 3, 1>,
                      BackwardPlan<256, 2, 4, 1, 2>, BackwardPlan<128, 4, 4, 2, 1, 16>>;
};

// Where each row has a weight of its own (norm_backward_each.cu): two vectors a thread and 1024 threads an SM; three or
// four vectors lost 3 to 20%.
template <typename scalar_t>
struct EachLadder {
  using type = Ladder<RowPlan<16, 2, 8>, RowPlan<32, 2, 8>, RowPlan<64, 2, 8>, RowPlan<96, 2, 8>, RowPlan<128, 2, 8>,
                      RowPlan<256, 2, 8>, RowPlan<512, 2, 8>, RowPlan<512, 3, 8, 16>>;
};
template <>
struct EachLadder<float> {
  using type = Ladder<RowPlan<32, 2, 4>, RowPlan<64, 2, 4>, RowPlan<96, 2, 4>, RowPlan<128, 2, 4>, RowPlan<256, 2, 4>,
                      RowPlan<512, 2, 4>, RowPlan<512, 4, 4, 16>>;
};
// Rows that are not of whole 16 bytes, and fp64.
template <typename scalar_t>
struct RaggedEachLadder {
  using type = Ladder<RowPlan<32, 4, 1>, RowPlan<256, 4, 1, 16>>;
};
template <>
struct EachLadder<double> : RaggedEachLadder<double> {};

// As many threads as have their registers. same: there is one type, and nothing is asked about types.
template <typename Plan>
constexpr int each_blocks_per_sm(bool same, int bytes) {
  const int threads = kManyTiles<Plan> || bytes == 8 ? 512 : bytes == 2 && !same ? 768 : 1024;
  return round_up_to(threads / round_up_to(Plan::kThreads, 64), 1);
}

// Ragged rows, by pairs of 16-bit elements, or single ones, chosen as for forward.
template <typename scalar_t>
struct RaggedBackwardLadder {
  using type = Ladder<BackwardPlan<8, 4, 2, 28, 3>, BackwardPlan<32, 4, 2, 7, 3>, BackwardPlan<32, 8, 2, 7, 2>,
                      BackwardPlan<64, 8, 2, 6, 1>, BackwardPlan<64, 20, 2, 2, 2>, BackwardPlan<128, 20, 2, 1, 2>,
                      BackwardPlan<128, 20, 2, 1, 2, 16>, BackwardPlan<256, 16, 2, 1, 1, 16>>;
};
template <>
struct RaggedBackwardLadder<float> {
  using type = Ladder<BackwardPlan<8, 4, 1, 28, 3>, BackwardPlan<32, 4, 1, 7, 3>, BackwardPlan<32, 8, 1, 7, 3>,
                      BackwardPlan<64, 8, 1, 6, 1>, BackwardPlan<64, 20, 1, 4, 1>, BackwardPlan<128, 20, 1, 2, 1>,
                      BackwardPlan<256, 20, 1, 1, 1>, BackwardPlan<128, 20, 1, 2, 1, 4>,
                      BackwardPlan<256, 16, 1, 1, 1, 16>, BackwardPlan<256, 32, 1, 1, 1, 16>>;
};
template <>
struct RaggedBackwardLadder<double> : BackwardLadder<double> {};

// A plan of backward with clusters must never be picked for rows that one of its blocks holds: in every ladder the plan
// before it holds as much. Such a launch has no cluster attribute (ClusterLaunch), and so an implicit cluster of one
// block, in which SumExchange still uses mapa, st.async to itself and barrier.cluster. On an H200, by a ladder with
// clusters of up to 16, it ended with an illegal instruction (with clusters of up to 2 it ran). Counts and addresses
// are right for one block: one arrival, kWarps pairs of bytes announced and sent, rank 0. Which instruction faults was
// not found. Forward's kernels use no instruction of clusters in a cluster of one block.
template <typename Only>
constexpr bool clusters_are_shared(Ladder<Only>) {
  return true;
}
template <typename First, typename Second, typename... Rest>
constexpr bool clusters_are_shared(Ladder<First, Second, Rest...>) {
  return (!Second::kClusters || Second::kThreads * Second::kVecs * Second::kVec <=
                                    First::kThreads * First::kVecs * First::kVec * First::kMaxCluster) &&
         clusters_are_shared(Ladder<Second, Rest...>{});
}
template <template <typename> class LadderOf>
constexpr bool kClustersAreShared =
    clusters_are_shared(typename LadderOf<uint16_t>::type{}) && clusters_are_shared(typename LadderOf<float>::type{});
static_assert(kClustersAreShared<BackwardLadder> && kClustersAreShared<RaggedBackwardLadder> &&
              kClustersAreShared<AddGradLadder> && kClustersAreShared<AfterGradLadder> &&
              kClustersAreShared<DropGradLadder> && kClustersAreShared<GateGradLadder>);

template <typename Plan>
constexpr int kFusedThreads = Plan::kThreads * Plan::kRows + (Plan::kHasProducer ? 32 : 0);

// The fused kernels count rows in 32 bits, with room to look some turns ahead: registers are short. More rows, which
// have few columns, are for the split strategy.
constexpr int64_t kFusedMaxRows = 1 << 30;
constexpr int kMaxFusedSegments = 65535;  // of rows with a weight of their own: a grid dimension

// Turns of rows in flight or in use. More gained nothing once the ring lay right in shared memory.
template <typename Plan>
constexpr int kFusedDepth = Plan::kOneBehind          ? 4
                            : Plan::kBlocksPerSm == 2 ? 2
                                                      : 3;

// Strategy "split": blocks of rows write grad_input while blocks of columns sum the weight gradients, in one launch.
// Reads x and grad_output twice, so it is for what the fused strategy cannot hold, and for problems that live in the
// L2 cache, where it saves the second launch.
constexpr int64_t kSplitMaxElements = 1 << 20;
constexpr int64_t kSplitMaxRows = kForRacecheck ? 8 : 1024;

// Whether one block of this strategy can stand in for a cluster, so that few rows need none.
template <typename Plan>
constexpr bool kSplitClusters = Plan::kClusters && Plan::kThreads * Plan::kMaxCluster <= 512;
template <typename Plan>
constexpr int kSplitRowThreads = Plan::kThreads * (kSplitClusters<Plan> ? Plan::kMaxCluster : 1);
template <typename Plan>
constexpr int kSplitThreads = round_up_to(kSplitRowThreads<Plan>, 256);

// As for forward: 80 registers a thread, 128 where a thread holds more than two vectors of x and grad_output.
template <int vecs, int block>
constexpr int kSplitBlocksPerSm = round_up_to((vecs > 8   ? 256
                                               : vecs > 2 ? 512
                                                          : 768) /
                                                  block,
                                              1);

// Columns of a block in the split strategy: 8 lanes of 16 bytes are one 128-byte line; more lanes where rows are few.
template <int vec>
constexpr int kColumnLanes = vec > 1 ? 8 : 32;
constexpr int kColumnBlocks = 1024;       // rows are split over this many column blocks
constexpr int kColumnRowsPerThread = 16;  // unless a thread would get fewer rows than this

// ---- huge rows: shared by the whole card, in two launches (norm_huge.cu) ---------------------------------------------

// Longer rows than a cluster of 16 holds at once.
constexpr int64_t huge_forward_columns(DType x_dtype, DType weight_dtype) {
  return weight_dtype == x_dtype && x_dtype != DType::kFloat64 ? 262144 : 131072;
}
constexpr int64_t kHugeBackwardColumns = 131072;

// What the threads of a block hold at once: vectors of 16 bytes, or elements where rows are not made of those. With 512
// threads, two blocks an SM, the second forward kernel spills.
template <typename scalar_t, bool whole>
struct HugePlan {
  static constexpr int kVec = whole ? 16 / static_cast<int>(sizeof(scalar_t)) : 1;
  static constexpr int kFew = sizeof(scalar_t) == 8 ? 2 : 1;  // doubles take twice the registers
  using Forward = RowPlan<256, (whole ? 4 : 8) / kFew, kVec>;
  using Sums = RowPlan<256, (whole ? 2 : 4) / kFew, kVec>;
  using Gradients = RowPlan<256, whole ? 1 : 2 / kFew, kVec>;
};
constexpr int kHugeBlocksPerSm = 3;
constexpr int kHugeSumBlocksPerSm = 4;  // of the first kernels, which hold less. H200, 8 x 4M, bf16, in all: forward
                                        // 67 us, backward 97; with 3, and loads after the merging, 72 and 110
constexpr int kHugeNormalizeBlocksPerSm = 2;  // holds a tile of x, weight and bias
constexpr int kHugeLeastCuts = 8;             // of a row, so that as many blocks as run at once leave few SMs without.
                                              // 8 x 4M, bf16 / fp32: by slices of 2 / 4 tiles 69 / 157 us, 8 67 / 138,
                                              // 16, which is that many blocks, 63 / 127
constexpr int kHugeGradientWaves = kForRacecheck ? 1 : 4;  // of blocks of gradients, where rows are many enough
constexpr int kHugeGradientBlocks = 6;  // an SM, at most: each merges sums before it begins. 1 x 16M fp32: a
                                        // block a tile of columns 184 us, 12 171, 6 170, 3 169
constexpr int kHugeRowsAhead = 2;       // rows whose x and grad_output a thread loads at once; 4 was slower, and
                                        // 1 for a single row (1 x 16M bf16: 97 us, 91)
constexpr int kHugeTable = 64;          // rows whose sums a block of gradients merges at once

// Slices of a row: 256, and up to 512 where they would be longer than four tiles. Every block of a second kernel merges
// all slices of its rows, so what is read for that grows with their square; an H200 has room for 528 blocks of sums.
constexpr int64_t kHugeSlices = 256;
constexpr int64_t kHugeMaxSlices = 512;
constexpr int64_t kHugeTilesEach = 4;

// ---- add stages as operations of their own: elements in fours -------------------------------------------------------

constexpr int kQuadThreads = 256;
constexpr int64_t kEightsBlocks = 2112;  // 16 an SM of an H200, of operations whose threads keep weights between rows

// ---- sum of the per-block partial weight gradients -----------------------------------------------------------------

constexpr int kFinalizeColumns = 32;
constexpr int kFinalizeRows = 32;  // partial rows summed side by side, or 4 where there are few
constexpr int kFewPartials =
    kForRacecheck ? 2 : 40;  // with 32 rows side by side, 7 partials at N = 131072 took 30 us (H200)
// Its blocks waiting beside those of backward from the start (launch_dependents) gained 0.2 us of 200.

}  // namespace fused_layernorm
