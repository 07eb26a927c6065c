// All launch parameters of the CUDA kernels, each with the measurement behind it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "norm_params.h"

namespace fused_layernorm {

// A build for compute-sanitizer's racecheck, which does not follow some kinds of synchronization. In this build every
// lane of a warp arrives at an mbarrier, not one lane after __syncwarp(); an extra barrier follows mbarriers that
// several lanes initialize in one instruction, of which the tool credits all to the last lane; and rows and blocks are
// merged behind two barriers, because in some runs the tool took the first access behind a barrier of 13 warps for one
// before it (it reported one word of the 16 that one statement reads, and nothing with two barriers). Limits are low,
// so that small problems use every kernel and fill its ring many times: the tool takes seconds for millions of
// elements.
#if defined(FLN_FOR_RACECHECK)
constexpr bool kForRacecheck = true;
#else
constexpr bool kForRacecheck = false;
#endif
constexpr int kMostClusters = kForRacecheck ? 2 : 1 << 30;  // that are persistent

// The most rows of a launch with a block, or part of a block, for each row. A grid has fewer than 2^31 blocks; the
// launchers of the plain norm split more rows into several launches. Other launches need no split: those with segments
// have fewer than 2^31 rows; those with stages, clusters or several blocks a row have a result of 128 GiB or more at
// 2^31 blocks; the rest are grid-stride loops.
constexpr int64_t kMaxRowsOfLaunch = int64_t{1} << 30;

// How one row is spread over threads: kThreads threads, each holding kVecs vectors of kVec elements. Rows longer than
// kThreads * kVecs * kVec take several tiles. The plan depends on hidden_size, dtype and the card only, never on the
// number of rows: with the fixed order of every sum, that makes a row's result independent of its batch.
//
// max_cluster: a cluster of up to so many blocks shares a row that is too long for one block (sm_90 and later). A
// template parameter, because its few instructions cost registers: with clusters in every plan, forward at N = 4096
// bf16 fell from 0.91 to 0.80 of the copy (H200).
//
// kWholeCard: blocks of up to that many SMs share a row and exchange their sums through global memory. They must run at
// the same time: a cooperative launch.
constexpr int kWholeCard = 160;
template <int threads, int vecs, int vec, int max_cluster = 1>
struct RowPlan {
  static constexpr int kThreads = threads;
  static constexpr int kVecs = vecs;
  static constexpr int kVec = vec;
  static constexpr int kMaxCluster = max_cluster;
  static constexpr bool kClusters = max_cluster > 1;
  static constexpr bool kGlobalExchange = max_cluster == kWholeCard;
};

// The number of blocks that share a row of vec_count vectors: as many as hold it at once, and 16 if more than 8.
template <typename Plan>
int cluster_for(int64_t vec_count, int max_cluster) {
  if (!Plan::kClusters) return 1;
  const int64_t tile = Plan::kThreads * Plan::kVecs;
  const int64_t blocks = (vec_count + tile - 1) / tile;
  return static_cast<int>(std::min<int64_t>(blocks > 8 ? 16 : blocks, std::min(max_cluster, Plan::kMaxCluster)));
}

// The number of blocks, one an SM, that share a row of a plan for the whole card: as few as hold it, and then as many
// more as the rows that run at once leave SMs for. 1: the card does not hold the row.
template <typename Plan>
int peers_for(int64_t vec_count, int multiprocessors) {
  const int64_t tile = Plan::kThreads * Plan::kVecs;
  const int64_t least = (vec_count + tile - 1) / tile;
  if (least > std::min(multiprocessors, kWholeCard)) return 1;
  const int rows = multiprocessors / static_cast<int>(least);
  return std::min(multiprocessors / rows, kWholeCard);
}

// Warps of a block that exchange sums through global memory, each for every third row: a warp waits for the other
// blocks while the next rows are summed. H200, us by one warp and three, backward of bf16: 150528 columns 215 and 239,
// 262144 240 and 243, 393216 336 and 268, 786432 477 and 290; fp32 262144 262 and 245, 393216 464 and 283.
constexpr int kExchangeWarps = 3;

// Whether a row may need several tiles: only with the last plan of a ladder.
template <typename Plan>
constexpr bool kManyTiles = Plan::kClusters;

// What a cluster of 16 holds: 8192 columns a block, backward and where forward keeps float32 weight and bias, else
// twice as many.
constexpr int64_t kClusterColumns = 16 * 8192;

template <typename... Plans>
struct Ladder {};

constexpr bool is_power(int value) { return value > 0 && (value & (value - 1)) == 0; }
constexpr int log_of(int power) { return power == 1 ? 0 : 1 + log_of(power / 2); }
constexpr int round_up_to_power(int value) { return value <= 1 ? 1 : 2 * round_up_to_power((value + 1) / 2); }

// ---- forward: one block a row, or several short rows a block; few threads with many vectors ------------------------

// Rows that no other kernel takes: of fp64, or with per-row weights, or where the streaming kernel does not run.
template <typename scalar_t>
struct ForwardLadder {
  using type = Ladder<RowPlan<256, 4, 8, 16>>;
};
template <>
struct ForwardLadder<float> {
  using type = Ladder<RowPlan<256, 8, 4, 16>>;
};
template <>
struct ForwardLadder<double> {
  using type = Ladder<RowPlan<32, 8, 1>, RowPlan<512, 4, 1, 16>>;
};

// A run-time value (run_time_rows.cuh): two to eight vectors a thread, with as few empty slots as possible. Few rows
// have one vector a thread and a block each (H100, quantized 8 x 4096, a scale a row, behind other kernels: 2.36 us,
// with four 2.69). From 64 Ki vectors on, or with blocks of 1024 threads, four are as fast for usual calls; for the
// others a kernel for few rows has less code to fetch (H200, bf16, modulated with a residual: 256 x 4096 4.6 us, 6.1; 8
// x 8192 3.9, 5.6). Short rows count as 128 vectors (H200, RMSNorm of 1024 x 64: 1.35 us, a block each 1.94).
constexpr int kRunTimeBlock = 64;          // threads, at least
constexpr int kMostFewRowsSlots = 5;       // of a plan for few rows
constexpr int kRunTimeFewRowsLeast = 128;  // vectors that a row counts as, at least
struct FewRows {
  int block;        // threads, at most; 0: no kernel for few rows
  int64_t vectors;  // at most
};
constexpr FewRows kUsualFewRows{512, (kForRacecheck ? 2 : 64) * 1024}, kAnyFewRows{1024, 2 * kUsualFewRows.vectors};

// The fewest threads of a row, one or two vectors each (bf16: 8 columns by one thread 197 us, by two 522, by four 680).
constexpr int least_usual_threads(int64_t row_bytes) { return row_bytes > 64 ? 4 : row_bytes > 32 ? 2 : 1; }
// The most threads of a row by the vectors that a thread holds. Usual calls on an H200, bf16, x of 256 MiB, copy 127.5
// us: RMSNorm 64 by four vectors and 2 threads 142, by two and 4 127; 12288 by three vectors and 512 threads 139, by
// six and 256 134; 16384 by four and 512 130.5, by eight and 256 134; 32768 by four and 1024 145, by eight and 512 135;
// fp32 5120 by four and 512 148, by five and 256 129. Two vectors and 256 threads: 4096 130.4 and 128.0, but 2048 x
// 4096 6.3 and 7.0.
constexpr int most_usual_threads(int held) { return held == 2 ? 4 : held == 3 || held == 5 ? 256 : 512; }
// 16-bit LayerNorm of 16384 columns: 140 us by four vectors, 134 by eight (but 8 rows 3.2 and 4.3).
constexpr int most_usual_threads(int held, int element_bytes, bool is_rms_norm) {
  return held == 4 && element_bytes == 2 && !is_rms_norm ? 256 : most_usual_threads(held);
}
// norm_any.cu and norm_gated.cu. Eight vectors of 16 bits and 128 threads: a row gate, 256 x 8192 6.2 us, then 8.8.
template <typename scalar_t>
constexpr int most_any_threads(int held) {
  return held == 2 ? 4 : held > 5 && sizeof(scalar_t) == 4 ? 512 : 256;
}
// With an epilogue, instruction issue decides, and a third of the instructions are per row: up to eight vectors.
template <typename scalar_t>
constexpr int most_epilogue_threads(int held) {
  return held == 3 || held == 5 ? 0 : held == 4 && sizeof(scalar_t) == 2 ? 4 : most_any_threads<scalar_t>(held);
}
// Threads of an SM, for the compiler: 96 registers for eight vectors and more.
template <int kHeld>
constexpr int kEpilogueThreads = kHeld > 6 ? 640 : 768;
// Five: 72 registers, for seven blocks of 128 threads (RMSNorm of 5120 columns 97 us, by 74 registers 101).
constexpr int most_quant_threads(int held) { return held == 2 || held > 5 ? 0 : held == 5 ? 896 : 1024; }

// With segments, a group of threads iterates over so many adjacent rows if every SM still has enough work: the weight
// of the segment then stays in L1. With one row a block, adjacent rows are on different SMs, and each SM reads every
// segment's weight (bf16, 4096 columns, 8 segments 146 us, with one row 160; 128 segments 156, 187).
constexpr int kSegmentIterations = 4;
constexpr int64_t kSegmentIterationThreads = kForRacecheck ? 64 : 132 * 1024;

constexpr int kQuantGroup = 128;  // columns, of the largest group with a scale: the vectors of adjacent lanes of a row

// Ragged rows (not whole 16-byte vectors, norm_ragged.cu): the fewest threads, a power of two, that take at most so
// many bytes each. An element costs 16 to 18 instructions, a row a few hundred for each thread. H200, bf16, LayerNorm,
// us by at most 200, 136 and 104 bytes: 2049 columns 144, 143, 159; 6001 146, 142, 143; 769 141, 143, 143; 64 x
// 769 7.0, 5.4, 5.3; 64 x 2049 5.8, 5.9, 4.4. By at most 192 bytes fp32 12345 198, 183 (256 threads and the larger L1
// cache).
constexpr int ragged_bytes(int threads) { return threads == 256 ? 200 : 136; }
// Threads of a block of rows of a warp or less. H200, us by 64, 128 and 256: bf16 33 columns 157, 156, 162; 769 144,
// 141, 146; 2049 143, 143, 145; fp32 257 all 137; 769 143, 141, 137; 64 x 257 4.9, 5.3, 5.8.
constexpr int kRaggedWarpsBlock = 128;
constexpr int ragged_block(int element_bytes, int threads) {
  return threads > 32 ? threads : threads == 32 && element_bytes == 4 ? 256 : kRaggedWarpsBlock;
}
constexpr int kRaggedBlock = 512;          // threads, at most
constexpr int kRaggedThreadsPerSm = 1280;  // for the compiler: 48 registers; 40 gave few rows 2 to 5% more time
constexpr int kRaggedStrides = 8;          // vectors of a thread that are tried, beyond the fewest
constexpr int kRaggedScratch = 1024;       // bytes of shared memory beside the rows, at least what the kernel has
// The percentage of the L1 cache that is shared memory; 100 for rows of more than 48 KiB. H200, bf16, by 58 and 100:
// 4097 columns 162 us, 169; 8193 151, 178; 12345 158, 189; 50001 265, 203. The driver's choice was as 100 (H100).
constexpr int kRaggedCarveout = 58;

// Rows of one warp or less share a block of 64 threads; longer rows have a block each. By blocks of 128 or 32 threads
// N = 64 to 1024 within 1.5%.
template <typename Plan>
constexpr int kForwardThreads = Plan::kThreads > 32 ? Plan::kThreads : 64;

// ---- forward of long rows: streamed through the shared memory of persistent clusters (sm_90 and later) --------------

// Rows that are streamed. At 16384 columns the register kernel runs at 0.955 of the copy in bf16 and fp32, the
// streaming kernel at 0.91 and 0.89 (H200).
constexpr bool is_long_row(DType x_dtype, int64_t hidden_size) {
  return x_dtype != DType::kFloat64 && hidden_size > 16384;
}

// A block of `threads` threads and two more warps holds slices, of `vecs` vectors a thread, of `depth` rows at once,
// and writes a row after it has summed `delay` more. Depth and delay do not change the bits of a result; the others do.
// Registers are allocated to warps in fours: 8 + 2 warps leave 168 a thread, 16 + 2 warps 96.
template <int threads, int vecs, int vec, int depth, int delay, int max_cluster, bool has_bias = true>
struct StreamPlan : RowPlan<threads, vecs, vec, max_cluster> {
  static constexpr int kDepth = depth;
  static constexpr int kDelay = delay;
  static constexpr bool kHasBias = has_bias;
};

// Shallower rings, other delays and round-robin rows lost 2 to 9%. fp32 weights of 16-bit x take twice the registers:
// half the threads (not measured).
//
// By the whole card, H200, us: bf16 393216 columns by slices of 16384 columns 166, of 8192 226 (two launches of
// norm_huge.cu: 295); 1048576 170, 211 (290); fp32 262144 by slices of 8192 172, of 4096 205 (a cluster of 16 with bias
// in the cache 189), 524288 180, 235 (273). A cluster of 16 is faster where its registers hold weight and bias: bf16
// 262144 139, by the whole card 226.
template <typename scalar_t, typename weight_t>
struct StreamLadder {
  using type = Ladder<StreamPlan<512, 4, 8, 6, 3, 16>, StreamPlan<512, 4, 8, 6, 3, kWholeCard>>;
};
template <typename scalar_t>
struct StreamLadder<scalar_t, float> {
  using type = Ladder<StreamPlan<256, 4, 8, 8, 2, 16>, StreamPlan<256, 4, 8, 12, 6, kWholeCard>>;
};
template <>
struct StreamLadder<float, float> {
  using type =
      Ladder<StreamPlan<256, 4, 4, 8, 2, 8>, StreamPlan<512, 4, 4, 6, 2, 16>, StreamPlan<512, 4, 4, 6, 3, kWholeCard>>;
};

// fp32 rows without bias: RMSNorm of 262144 columns 142 us, by the whole card 170 (H200).
using NoBiasPlan = StreamPlan<512, 8, 4, 3, 1, 16, false>;
constexpr bool has_no_bias_plan(bool has_bias, int64_t hidden_size) {
  return !has_bias && hidden_size > kClusterColumns && hidden_size <= 2 * kClusterColumns;
}

template <typename Plan>
constexpr int kStreamThreads = Plan::kThreads + 32 + 32 * (Plan::kGlobalExchange ? kExchangeWarps : 1);
constexpr int kClaimedRows = 4;  // least rows a cluster for claiming rows: the counter costs a launch of 1.2 us

// ---- backward ------------------------------------------------------------------------------------------------------

// Strategy "fused": persistent blocks read x and grad_output once and keep the weight gradients in registers.
//
// A kernel of this strategy: what decides its registers and its code. lanes: of one warp, that share a row; or
// kWholeWarps: a row has several warps, and their number is a run-time value. block_warps: of the largest block, with
// the producer warp that a block has beside the warps of its rows (RowRing).
constexpr int kWholeWarps = 64;
// global_exchange: the blocks of a row exchange sums through global memory, by kExchangeWarps warps (SumExchange).
template <int lanes, int vecs, int vec, int block_warps, int blocks_per_sm, bool one_behind, bool clusters,
          bool has_producer, bool global_exchange>
struct BackwardShape {
  static constexpr bool kOneWarp = lanes < kWholeWarps;
  static constexpr int kLanes = std::min(lanes, 32);
  static constexpr int kVecs = vecs;
  static constexpr int kVec = vec;
  static constexpr int kBlockThreads = 32 * block_warps;
  static constexpr int kBlocksPerSm = blocks_per_sm;
  static constexpr bool kOneBehind = one_behind;
  static constexpr bool kClusters = clusters;
  static constexpr bool kGlobalExchange = global_exchange;
  static constexpr int kExchangers = global_exchange ? kExchangeWarps : 0;  // warps
  static constexpr bool kHasProducer = has_producer;
  static constexpr int kConsumers = kBlockThreads - 32 * (has_producer + kExchangers);  // that have rows, at most
  static constexpr int kMaxDepth = global_exchange ? 12 : 4;                            // of the ring
  static constexpr int kMostRows = kOneWarp ? kConsumers / kLanes : std::max(kConsumers / 64, 1);
};

// Registers are allocated to warps in fours: at one block an SM, 9 to 12 warps leave each thread 168, 13 to 16 leave
// 128. So plans whose blocks have about as many warps share a kernel.
constexpr int backward_block_warps(int warps, int blocks_per_sm) {
  return blocks_per_sm > 1 ? warps : warps <= 12 ? 12 : (warps + 3) / 4 * 4;
}

// threads: of a row, at most (FusedRowsPlan); warps: of a block, for its rows; blocks_per_sm: for the compiler and the
// launch.
template <int threads, int vecs, int vec, int warps, int blocks_per_sm, int max_cluster = 1>
struct BackwardPlan : RowPlan<threads, vecs, vec, max_cluster> {
  static constexpr int kWarps = warps;
  // 16 consumer warps have no producer warp beside them, so that each thread keeps 128 registers: they take turns as
  // producer.
  static constexpr bool kHasProducer = !(warps == 16 && vec == 8);
  // Finish a row one iteration behind, after the next row is summed: if sums come from other blocks, if the block has
  // one row at a time, if a row does not fit into registers beside the column sums, and without a producer warp.
  static constexpr bool kOneBehind =
      max_cluster > 1 || vecs* vec > 16 || (threads > 32 && threads == 32 * warps) || !kHasProducer;
  using Shape = BackwardShape<(threads > 32 ? kWholeWarps : threads), vecs, vec,
                              backward_block_warps(warps + kHasProducer, blocks_per_sm), blocks_per_sm, kOneBehind,
                              (max_cluster > 1 && max_cluster < kWholeCard), kHasProducer, max_cluster == kWholeCard>;
};

// Plans for rows that are not whole 16-byte vectors, and for fp64. Instructions decide how long they take.
template <typename Plan>
constexpr bool kReadsElements = Plan::kVec <= 2;

// The most bytes that one iteration of an SM reads and writes, where memory decides (rows of whole vectors without row
// gate or epilogue; but not fp32 with stages where rows are finished one behind): with more rows at a time it takes
// longer, with fewer too (benchmarks/tuning.md, "Backward, how much at a time"). H200, bf16, a residual, 8192 columns
// by a cluster of four: two rows 270 us, three 257, where it needs five tensors for four two 325, three 342. By two
// blocks 384 columns by six rows each 259, seven 265; by three 256 columns by five rows 323, seven 343.
constexpr int64_t most_iteration_bytes(int blocks_per_sm) {
  return (blocks_per_sm == 1 ? 54 : blocks_per_sm == 2 ? 41 : 42) * 1024;
}

// How a block, or a cluster, shares rows of `vectors` vectors: the least warps that hold a row, and as many rows as the
// warps of the plan then hold, within most_iteration_bytes(). element_bytes: what is read and written for an element;
// 0: no limit. The vectors of a block and of a warp are adjacent, so that the addresses of a thread's vectors differ by
// constants.
struct FusedRowsPlan {
  int cluster, slice, warp_slice;  // vectors of a block, a multiple of `set`; of a warp, and the last one has the rest
  int threads, rows;

  // max_cluster: with a global exchange the SMs of the card.
  template <typename Plan>
  FusedRowsPlan(Plan, int64_t vectors, int set, int max_cluster, int element_bytes = 0) {
    const auto ceil_div = [](int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); };
    cluster = Plan::kGlobalExchange ? peers_for<Plan>(vectors, max_cluster) : cluster_for<Plan>(vectors, max_cluster);
    slice = ceil_div(vectors, cluster * set) * set;
    warp_slice = slice;
    threads = Plan::kThreads;
    rows = 32 * Plan::kWarps / threads;
    constexpr int kMost = 32 * Plan::kVecs;                    // of a warp
    constexpr int kUnit = kReadsElements<Plan> ? 4 * 32 : 32;  // what RegisterSlots skips, or takes whole
    const int most_warps = ceil_div(threads, 32);
    if (threads > 32) rows = Plan::kWarps / std::clamp(ceil_div(slice, kMost), 2, most_warps);
    if (element_bytes > 0 && threads >= 32 && !kReadsElements<Plan>) {
      constexpr int kBlocks = Plan::Shape::kBlocksPerSm;
      const int64_t row_bytes = int64_t{slice} * Plan::kVec * element_bytes;
      rows = static_cast<int>(std::clamp<int64_t>(most_iteration_bytes(kBlocks) / (kBlocks * row_bytes), 1, rows));
    }
    if (threads <= 32) return;
    if (Plan::kGlobalExchange) rows = 1;
    // Warps that are left over make the parts smaller, unless there would be a warp without a part
    int warps = std::min(Plan::kWarps / rows, most_warps);
    warp_slice = std::min(ceil_div(slice, warps * kUnit) * kUnit, kMost);
    warps = std::clamp(ceil_div(slice, warp_slice), 2, warps);
    threads = 32 * warps;
    const int last = slice - (warps - 1) * (warp_slice - kUnit);
    if (last < warp_slice) warp_slice -= kUnit;
  }
};

// Whether blocks of backward are paced (pace.cuh): fp32 RMSNorm of 4096 columns and more gained 2 to 6%; blocks with
// several short rows at once, and ragged rows, lost up to 18%; bf16 within 1%.
template <typename scalar_t, typename Shape>
constexpr bool kIsPaced =
    sizeof(scalar_t) == 4 && Shape::kOneBehind && Shape::kVec * sizeof(scalar_t) == 16 && !Shape::kGlobalExchange;
// About the bytes between two paced iterations; the half iterations that a block may be ahead of the mean; the number
// of polls, and the time between them, before it goes on unpaced. Unpaced and a slack of 0.5, 1, 1.5, 2, 4 iterations,
// RMSNorm fp32: N = 4096 0.916, 0.922, 0.971, 0.968, 0.959, 0.931; 16384 0.945, 0.934, 0.962, 0.961, 0.957, 0.955.
// Blocks of LayerNorm stay together without pacing, because they wait for two statistics a row.
constexpr int kPaceBytes = 32768;
constexpr int kPaceSlackHalves = 3;
constexpr int kPaceLooks = 32;
constexpr unsigned kPaceNanoseconds = 100;
constexpr unsigned kPaceNever = 1u << 30;  // credit of a block that goes on unpaced

// One ladder for both strategies, so that grad_input has the same bits with either. Warps and blocks were tuned at the
// size of each plan; neighbouring values lost 2 to 10%. Empty slots cost time (H200, part of the copy without and with
// a plan for the size: bf16 4608 columns 0.89 and 0.99, fp32 2304 0.77 and 0.96, 5120 0.87 and 0.96). The plan for one
// block of up to 8192 (fp32: 4096) columns is for cards without clusters. More than eight blocks a row are 16
// (cluster_for), which have too little of rows of 32769 to 65535 columns at once: 40000 columns by 16 blocks bf16 289
// us, fp32 261, by the five of the last plan 204 and 204 (but few rows of 65536 columns take 2 to 18% more by eight).
template <typename scalar_t>
struct BackwardLadder {
  using type = Ladder<BackwardPlan<8, 1, 8, 7, 3>, BackwardPlan<16, 1, 8, 7, 3>, BackwardPlan<32, 1, 8, 7, 3>,
                      BackwardPlan<32, 2, 8, 7, 2>, BackwardPlan<224, 2, 8, 15, 1>, BackwardPlan<64, 4, 8, 6, 1, 2>,
                      BackwardPlan<80, 4, 8, 10, 1, 2>, BackwardPlan<64, 4, 8, 8, 1, 4>, BackwardPlan<256, 4, 8, 8, 1>,
                      BackwardPlan<128, 4, 8, 8, 1, 8>, BackwardPlan<256, 4, 8, 8, 1, 16>>;
};
template <>
struct BackwardLadder<float> {
  using type = Ladder<BackwardPlan<8, 1, 4, 7, 3>, BackwardPlan<16, 1, 4, 7, 3>, BackwardPlan<32, 2, 4, 7, 3>,
                      BackwardPlan<96, 2, 4, 15, 1>, BackwardPlan<128, 4, 4, 8, 1>, BackwardPlan<128, 4, 4, 12, 1, 2>,
                      BackwardPlan<96, 4, 4, 12, 1, 4>, BackwardPlan<256, 4, 4, 8, 1>,
                      BackwardPlan<256, 4, 4, 12, 1, 8>, BackwardPlan<512, 4, 4, 16, 1, 16>>;
};
template <>
struct BackwardLadder<double> {
  using type = Ladder<BackwardPlan<32, 4, 1, 1, 1>, BackwardPlan<512, 4, 1, 16, 1>>;
};

// Rows of whole vectors that no cluster holds, up to 8192 columns an SM (fp32: 4096). More rows between a row's sums
// and its end hide the exchange, but fewer slots are filled ahead. H200, us by two and three slots that are summed or
// filled, of six: bf16 150528 columns 264 and 239, 262144 260 and 243, 524288 267 and 258; fp32 524288 259 and 269.
// Paced blocks: within 2% (H100).
constexpr int kFilledSlots = 3;
template <typename scalar_t>
using WholeCardPlan = BackwardPlan<256, 4, 16 / static_cast<int>(sizeof(scalar_t)), 8, 1, kWholeCard>;

// With a load stage: two more tensors, so fewer rows at a time (most_iteration_bytes()). H200, bf16, us: 3072 columns
// by a block and one row 274, by a cluster of two and four rows 254; 5120 by three blocks 263, two 253. Its kernels for
// clusters have no other path: with the plain norm's that kernel has 110 KB of code, not 63, and waits for instructions
// even in its loop of 10 KB (H200, LayerNorm of 2048 x 4096, bf16: 31 us, 23; fp32 of 8192 columns 205 us, 196).
template <typename scalar_t>
struct LoadGradLadder {
  using type = Ladder<BackwardPlan<8, 1, 8, 7, 3>, BackwardPlan<16, 1, 8, 7, 3>, BackwardPlan<32, 1, 8, 7, 3>,
                      BackwardPlan<32, 2, 8, 7, 2>, BackwardPlan<160, 2, 8, 10, 1>, BackwardPlan<96, 2, 8, 12, 1, 2>,
                      BackwardPlan<256, 2, 8, 10, 1>, BackwardPlan<160, 2, 8, 12, 1, 2>,
                      BackwardPlan<128, 2, 8, 12, 1, 16>, BackwardPlan<256, 2, 8, 12, 1, 16>>;
};
template <>
struct LoadGradLadder<float> {
  using type = Ladder<BackwardPlan<8, 1, 4, 7, 3>, BackwardPlan<16, 1, 4, 7, 3>, BackwardPlan<32, 2, 4, 7, 3>,
                      BackwardPlan<160, 4, 4, 8, 1>, BackwardPlan<256, 4, 4, 8, 1>, BackwardPlan<128, 4, 4, 8, 1, 4>,
                      BackwardPlan<256, 4, 4, 8, 1, 16>>;
};

// With an epilogue, whose gradient takes instructions: 16 elements a thread, and as many warps as registers allow and
// rows fill, 12 to 15 beside the producer; above 3072 columns also 16 warps that take turns as producer, in clusters
// half as large (4096 to 16384: 2 to 9%).
template <typename scalar_t>
struct EpilogueGradLadder {
  using type = Ladder<BackwardPlan<8, 1, 8, 7, 2>, BackwardPlan<16, 1, 8, 7, 2>, BackwardPlan<32, 1, 8, 7, 3>,
                      BackwardPlan<32, 2, 8, 7, 2>, BackwardPlan<96, 1, 8, 18, 1>, BackwardPlan<64, 2, 8, 14, 1>,
                      BackwardPlan<96, 3, 4, 15, 1>, BackwardPlan<192, 2, 8, 15, 1>, BackwardPlan<256, 2, 8, 16, 1>,
                      BackwardPlan<192, 2, 8, 15, 1, 2>, BackwardPlan<256, 2, 8, 16, 1, 16>>;
};
template <>
struct EpilogueGradLadder<float> {
  using type = Ladder<BackwardPlan<32, 2, 4, 14, 1>, BackwardPlan<256, 2, 4, 18, 1>, BackwardPlan<128, 4, 4, 9, 1, 2>,
                      BackwardPlan<256, 4, 4, 9, 1, 16>>;
};

// With a gate, whose gradient is a third sum along the columns: fewer columns a thread, fewer rows.
template <typename scalar_t>
struct GateGradLadder {
  using type = Ladder<BackwardPlan<8, 1, 8, 7, 2>, BackwardPlan<16, 1, 8, 7, 2>, BackwardPlan<32, 1, 8, 7, 2>,
                      BackwardPlan<32, 2, 8, 7, 1>, BackwardPlan<256, 2, 8, 10, 1>, BackwardPlan<160, 2, 8, 10, 1, 2>,
                      BackwardPlan<128, 2, 8, 8, 1, 4>, BackwardPlan<256, 2, 8, 8, 1, 16>>;
};
template <>
struct GateGradLadder<float> {
  using type = Ladder<BackwardPlan<32, 2, 4, 7, 2>, BackwardPlan<256, 2, 4, 8, 2>, BackwardPlan<128, 4, 4, 8, 1, 16>>;
};

// With a row gate, whose activation is a third of the instructions. Up to 2048 columns eight elements a thread, for
// more warps (two vectors of four at 2048, where warps that take turns as producer hold up the rest). Longer rows by
// clusters with several rows at once, so that a warp seldom waits for the sums of another block. Empty slots cost their
// share of the time. H200, bf16, silu, us by four and five rows: 2560 columns 347 and 335, 3072 339 and 354. 64 columns
// (0.85 of the copy) are short of warps: three blocks an SM leave 80 registers and spill.
template <typename scalar_t>
struct RowGateGradLadder {
  using type =
      Ladder<BackwardPlan<8, 1, 8, 7, 2>, BackwardPlan<16, 1, 8, 7, 2>, BackwardPlan<32, 1, 8, 7, 2>,
             BackwardPlan<192, 1, 8, 15, 1>, BackwardPlan<256, 2, 4, 16, 1>, BackwardPlan<96, 2, 8, 12, 1, 2>,
             BackwardPlan<160, 2, 8, 16, 1, 2>, BackwardPlan<96, 2, 8, 15, 1, 4>, BackwardPlan<128, 2, 8, 12, 1, 4>,
             BackwardPlan<192, 2, 8, 15, 1, 4>, BackwardPlan<256, 2, 8, 16, 1, 16>>;
};
template <>
struct RowGateGradLadder<float> {
  using type = Ladder<BackwardPlan<16, 1, 4, 7, 2>, BackwardPlan<32, 1, 4, 7, 2>, BackwardPlan<32, 2, 4, 7, 2>,
                      BackwardPlan<256, 2, 4, 9, 1>, BackwardPlan<128, 4, 4, 9, 1, 16>>;
};

// With per-row weights (norm_backward_per_row.cu): two vectors a thread and 1024 threads an SM; three or four vectors
// lost 3 to 20%. Rows of several tiles, and rows that are read by the element, take more.
constexpr int kMostPerRowThreads = 512;
constexpr int per_row_vecs(int element_bytes, int vec, bool has_tiles) {
  return vec == 1 ? 4 : !has_tiles ? 2 : element_bytes == 2 ? 3 : 4;
}
// threads: `least`, or whole warps with as few empty slots as possible. held: the vectors of a thread in a tile. Rows
// of several tiles have blocks of 256, of which two fill an SM, unless one tile by 512 threads holds them.
struct PerRowPlan {
  bool has_tiles;
  int threads, held;

  PerRowPlan(int64_t vectors, int element_bytes, int vec, int least) {
    const auto ceil_div = [](int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); };
    held = per_row_vecs(element_bytes, vec, false);
    has_tiles = vectors > kMostPerRowThreads * held;
    threads = vectors <= least * held ? least : ceil_div(vectors, held * 32) * 32;
    if (!has_tiles) return;
    held = per_row_vecs(element_bytes, vec, true);
    threads = vectors > kMostPerRowThreads * held ? 256 : kMostPerRowThreads;
    held = ceil_div(vectors, int64_t{threads} * ceil_div(vectors, threads * held));
  }
};

// Threads of an SM, for the compiler: as many as registers allow. same: all tensors have one dtype, which saves the
// tests.
constexpr int per_row_bound(int element_bytes, bool same, bool has_tiles) {
  return has_tiles || element_bytes == 8 ? 512 : element_bytes == 2 && !same ? 768 : 1024;
}

// Ragged rows: vectors of two 16-bit elements, or single elements. Empty slots cost time here too (H100, bf16, without
// and with a plan for the size: 65 columns 619 us and 362, 129 384 and 293, 1025 308 and 284, 6001 313 and 287).
template <typename scalar_t>
struct RaggedBackwardLadder {
  using type = Ladder<BackwardPlan<8, 5, 2, 7, 3>, BackwardPlan<16, 5, 2, 7, 3>, BackwardPlan<32, 4, 2, 7, 3>,
                      BackwardPlan<32, 8, 2, 7, 2>, BackwardPlan<96, 8, 2, 15, 1>, BackwardPlan<128, 20, 2, 4, 2>,
                      BackwardPlan<128, 20, 2, 4, 2, 16>, BackwardPlan<256, 16, 2, 8, 1, 16>>;
};
template <>
struct RaggedBackwardLadder<float> {
  using type =
      Ladder<BackwardPlan<8, 5, 1, 7, 3>, BackwardPlan<16, 5, 1, 7, 3>, BackwardPlan<32, 4, 1, 7, 3>,
             BackwardPlan<32, 8, 1, 7, 3>, BackwardPlan<96, 8, 1, 15, 1>, BackwardPlan<256, 20, 1, 8, 1>,
             BackwardPlan<128, 20, 1, 8, 1, 4>, BackwardPlan<256, 20, 1, 8, 1, 16>, BackwardPlan<256, 32, 1, 8, 1, 16>>;
};
template <>
struct RaggedBackwardLadder<double> : BackwardLadder<double> {};

// A backward plan with clusters must never be selected for rows that one of its blocks holds: in every ladder the
// previous plan holds as many columns. Such a launch has no cluster attribute (ClusterLaunch), and so an implicit
// cluster of one block, in which SumExchange still uses mapa, st.async to itself and barrier.cluster. On an H200, with
// clusters of up to 16 in the ladder, it ended with an illegal instruction (with clusters of up to 2 it ran). Counts
// and addresses are right for one block: one arrival, kWarps pairs of bytes announced and sent, rank 0. The faulting
// instruction was not found. The forward kernels use no cluster instruction in a cluster of one block.
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
              kClustersAreShared<LoadGradLadder> && kClustersAreShared<EpilogueGradLadder> &&
              kClustersAreShared<GateGradLadder> && kClustersAreShared<RowGateGradLadder>);

// The fused kernels count rows in 32 bits, with room for some iterations ahead, to save registers. More rows, which
// have few columns, go to the split strategy.
constexpr int64_t kFusedMaxRows = 1 << 30;
constexpr int kMaxFusedSegments = 65535;  // a grid dimension

// Plans that take interleaved segments: those of few columns a thread, which heads are short enough for. Others would
// spill, or be slower without interleaved segments too (LayerNorm, bf16, 65536 x 2048: 2%).
template <typename Shape>
constexpr bool kMayInterleave = !Shape::kClusters && !Shape::kGlobalExchange && Shape::kVecs * Shape::kVec <= 16;
constexpr int kMostInterleavedWaves = 4;  // of blocks, to take interleaved segments

// Slots of the ring, and the bytes that are read and written for a slot from which on one less is faster. Where memory
// decides and a row is finished in its own iteration, H200, us by two and three slots: LayerNorm of 1024 columns, 42
// KiB 204 and 194; 2560, 45 KiB 200 and 202; with a residual 2048, 40 KiB 338 and 321; 2560, 50 KiB 326 and 342. With
// two blocks an SM, RMSNorm of 384 columns, 16 KiB 226 and 197; 512, 21 KiB 200 and 208; with a residual 384, 26 KiB
// 334 and 348; with a row gate 64 to 256 gain 3 to 6% by the third.
template <typename Shape>
constexpr int kFusedDepth = Shape::kOneBehind ? Shape::kMaxDepth : 3;
template <typename Shape>
constexpr int64_t most_deep_slot_bytes(bool memory_decides) {
  if (Shape::kOneBehind) return INT64_MAX;
  if (Shape::kBlocksPerSm == 2) return 20 * 1024;
  return memory_decides && !kReadsElements<Shape> ? 42 * 1024 : INT64_MAX;
}

// Strategy "split": in one launch, blocks of rows write grad_input and blocks of columns sum the weight gradients. It
// reads x and grad_output twice, so it is for rows that the fused strategy cannot hold, and for small problems, where
// it saves the second launch.
struct SmallProblem {
  int64_t rows, elements;  // at most; a row counts as 512 elements more than it has
  bool has(int64_t of_rows, int64_t hidden_size) const {
    return of_rows <= rows && of_rows * (hidden_size + 512) <= elements;
  }
};
// H200, us by split and fused: bf16 2048 x 2048 9.7 and 10.3, 1024 x 4096 10.0 and 13.5, but 1536 x 3072 13.3 and 11.0,
// 4096 x 256 7.2 and 6.7; fp32 512 x 4096 8.1 and 10.9, but 1536 x 1152 10.0 and 8.5. With a residual bf16 2048 x 1536
// 9.9 and 10.2, but 512 x 8192 15.9 and 14.1. Ragged: bf16 1024 x 769 7.5 and 9.1, 512 x 4097 15.7 and 17.4, but
// 1536 x 769 10.6 and 9.1; fp32 128 x 4097 7.9 and 11.9, but 768 x 769 10.7 and 9.6.
template <typename scalar_t, typename Plan>
constexpr SmallProblem small_problem(bool has_residual) {
  constexpr bool kIsWide = sizeof(scalar_t) > 2;
  if (kForRacecheck) return {8, int64_t{1} << 20};
  if (kReadsElements<Plan>) return {kIsWide || Plan::kVecs <= 8 ? 1024 : 512, (kIsWide ? 800 : 2560) * int64_t{1024}};
  return {2048, (kIsWide ? 2304 : has_residual ? 4096 : 5120) * int64_t{1024}};
}

// Threads of a block; with 512 a thread has no registers for 32 vectors. One block replaces a cluster that has no more
// threads, so that few rows need no cluster (H200, bf16, 32 x 16384: 4.7 us, by clusters 9.0).
template <typename Plan>
constexpr int kSplitThreads =
    Plan::kVecs <= 20 && Plan::kThreads * std::min(Plan::kMaxCluster, 512 / Plan::kThreads) > 256 ? 512 : 256;

// 80 registers a thread, 128 if a thread holds more than two vectors of x and grad_output.
template <int vecs, int block>
constexpr int kSplitBlocksPerSm = std::max((vecs > 8   ? 256
                                            : vecs > 2 ? 512
                                                       : 768) /
                                               block,
                                           1);

// The vectors of columns that a block of the split strategy has (column_lanes()): at most as many as leave each thread
// one sum at the end, at least as many as leave no sum to more than a warp. With fewer, a thread has fewer rows, but
// there are more blocks, which read less than a 128-byte line of a row. A thread has more than kRowsOfFullCard rows if
// there is a block for every SM, and proportionally fewer rows if there are fewer blocks. H200, bf16, us by 32, 16, 4,
// 2 and 1: 1 x 1024 1.8, 1.7, 1.8; 1024 x 256 6.0, 5.6, 4.7, 3.7, 3.4; 1024 x 1024 6.7, 6.4, 5.3, 4.5, 5.2; 128 x
// 4096 4.6, 3.1, 3.6, 5.2, 6.2; 1024 x 4096 11.2, 11.0, 10.0, 11.8, 15.7.
template <int vec, int block>
constexpr int kMostColumnLanes = std::min(32, block / (2 * vec));
template <int vec, int block>
constexpr int kLeastColumnLanes = std::max(vec <= 2 ? 4 : 1, block / (2 * vec) / 32);
constexpr int kRowsOfFullCard = 10;
constexpr int kColumnRowsAtOnce = 3;      // that a thread loads; four spill. Two: 0 to 8% slower
constexpr int kColumnBlocks = 1024;       // rows are split over this many column blocks
constexpr int kColumnRowsPerThread = 16;  // unless a thread would get fewer rows than this

// ---- huge rows: read twice by the whole card, in two launches (norm_huge.cu) -----------------------------------------

// Rows longer than a cluster of 16 holds at once are huge, if the whole card does not hold them either.
constexpr int64_t huge_forward_columns(DType x_dtype, DType weight_dtype) {
  return (weight_dtype == x_dtype && x_dtype != DType::kFloat64 ? 2 : 1) * kClusterColumns;
}

// The registers of a block: vectors of 16 bytes, or elements of ragged rows and of fp64. With 512 threads and two
// blocks an SM, the second forward kernel spills.
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
// Groups of one row: H200, 1 x 16M, bf16 / fp32: 82 / 155 us; by the kernel for several rows 91 / 167. More blocks an
// SM than run at once would merge the row's sums more often. Five or six an SM, with fewer registers: 85, 87 / 156,
// 157.
constexpr int kHugeRowBlocksPerSm = 4;
constexpr int kHugeRowsAhead = 2;  // rows whose x and grad_output a thread loads at once; 4 was slower
constexpr int kHugeTable = 64;     // rows whose sums a block of gradients merges at once

// Slices of a row: 256, and up to 512 if they would be longer than four tiles. Every block of a second kernel merges
// all slices of its rows, so the bytes read for that grow with the square of their number; an H200 has room for 528
// blocks of sums.
constexpr int64_t kHugeSlices = 256;
constexpr int64_t kHugeMaxSlices = 512;
constexpr int64_t kHugeTilesEach = 4;

// ---- elementwise kernels -------------------------------------------------------------------------------------------

constexpr int kEightsThreads = 256;
constexpr int64_t kKeepingBlocks = 2112;  // 16 an SM of an H200, for kernels that keep parameters between rows

// ---- sum of the per-block partial weight gradients -----------------------------------------------------------------

constexpr int kFinalizeColumns = 32;
constexpr int kFinalizeRows = 32;                     // threads along the partial sums, or 4 if there are few
constexpr int kFewPartials = kForRacecheck ? 2 : 40;  // with 32 threads, 7 partial sums at N = 131072 took 30 us (H200)
// From here on, few partial sums by four columns a thread: 8 at 32768 columns 2.8 us, 2.1; 131072 6.5, 3.3; 33 at 16384
// 2.4, 2.5 (H200).
constexpr int64_t kFinalizeWideColumns = kForRacecheck ? 256 : 32768;
// An early start of its blocks (launch_dependents) gained 0.2 us of 200.

}  // namespace fused_layernorm
