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

// Four vectors a thread, as few threads as that allows; between powers of two, plans that such rows fill. H200, x of
// 256 MiB, LayerNorm, fraction of the copy, bf16: N = 64 0.98, 128 0.98, 256 0.975, 384 0.97 (by the plan of 512 0.92),
// 512 0.98, 1024 0.98, 4096 0.97, 8192 0.97, 16384 0.955; fp32 0.96 to 0.99. Up to N = 512 it was 0.92 to 0.94 while
// sums named the lanes of a row by a mask worked out at run time (RowThreads).
//
// Rows that leave places of their threads empty lose, so that 16-bit rows of some usual sizes have plans of their own,
// by seven or nine vectors. The least us of 40, bf16 by six or four vectors and by these / fp16 (copy 130): N = 1152
// 140 136 / 140 136, 1792 140 133 / 149 135, 2304 144 135 / 147 135, 3584 137 134 / 150 132, 7168 141 132 / 162 134;
// with 8 segments, bf16, 1792 159 144, 2304 173 149, 3584 164 146, 7168 155 148. Few rows wait longer: 8 rows of
// 2304 2.06 us, not 1.85; 1152 1.99, 1.95; 3584 1.88, 1.83; 7168 as before. What did not help: predicates for the empty
// places, where there are branches now, 1792 145, 1280 139, 2560 141 (139, 136, 140); 1152 by five vectors 143; eight
// vectors for 2048, 4096 and 8192 137, 139, 142 (134, 134, 138), in turns for 64 segments 153, 162, 176 (168, 175,
// 183); nine for 4608 137 (135).
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

// With an add stage: the plans above for rows of 256 elements or more, one block a row. H200, bf16, x of 256 MiB, N =
// 1024, 2048, 4096, 8192: 263 262 265 266 us (two copies of x 262). What did not help: two vectors a thread and all of
// an SM's threads 262 261 265 266; eight 267 267 267 266; 640 or 1024 threads an SM, z written with y, no slices by
// warps (269 268 at 4096 and 8192); loads that are the first to leave the caches 285 291 297 306, that pass L1 by 274
// to 281, of 256 bytes into L2 265 264 268 269; stores the first to leave 264 262 269 268.
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

// With an activation or dropout after the norm, where instructions decide, a third of them a row's own: more elements a
// thread, and no empty places. H200, bf16, x of 256 MiB, the least us of 30 (copy 130), relu, gelu, silu, dropout of y,
// by the plans of AddLadder; and by these:
//   N = 1024  136 146 141 165; by 16 x 8 137 147 145 160
//   N = 1152  180 191 187 196; 138 155 156 158; by 32 x 5 157 181 174 199
//   N = 1792  159 191   - 195; 137 151   - 155
//   N = 2560  180 206   - 202; 145 160   - 180
//   N = 4096  141 154 148 174; 136 148 146 159
//   N = 8192  146 158 154 174; 135 147 146 156
// (gelu with two terms of its polynomial fewer than it has.) Those of float32 were taken over, and not timed.
//
// By a branch to its activation for each vector 1.9 warps waited for their next instruction for each one issued (gelu
// at 4096, a quarter of all that waited); a prototype of gelu's straight code alone 0.4. So each activation has
// straight code (AfterRow). The least us of 30 on another card (plain 135 to 139), gelu, gelu_tanh, silu, dropout of y,
// gelu and dropout, by branches and straight:
//   N = 1024  153 147 143 167 207; 150 143 139 159 198
//   N = 1152  170 160 160 163 209; 148 140 137 146 201
//   N = 1536  158 154 149 157 209; 148 141 137 152 193
//   N = 2048  163 154 147 158 210; 145 137 139 147 194
//   N = 4096  162 159 152 165 214; 147 138 137 157 205
//   N = 8192  161 156 150 162 213; 145 140 135 158 197
// By four vectors of twice the threads and by eight, relu, gelu, gelu_tanh, silu, dropout of y, gelu and dropout
// (another card): N = 256 132 148 135 132 157 191; 135 135 133 135 143 192; 512 131 146 135 132 155 193; 134 135 136
// 134 144 192; 896 136 171 158 152 196 233; 145 156 148 147 169 218; 1024 131 148 136 133 156 193; 134 134 135 135 144
// 193. 1024 by 16 x 9 154 164 158 162 177 207.
//
// What did not help while it branched: a loop over vectors that lie in shared memory, of which each activation has its
// own; nobody waits then, but 8% more instructions run: 1024 151 / 144 / 165 (gelu, silu, dropout of y) became 160 to
// 170 / 146 / 168 to 189, 4096 157 / 149 / 161 155 to 161 / 142 / 163 to 174. The same with 16 vectors a thread, copied
// there without registers: 28 instructions an element, as now, but weights come from L2, as shared memory takes L1's
// place: 174 / 154 / 174. Nor the code of one group of vectors for all, to whose registers the next moves: 4096 159 /
// 153 / 169 became 162 / 153 / 173, 1152 159 / 160 / 165 163 / 153 / 173. Nor the differences from the reference point
// kept, 2 instructions of 28 fewer for twice the registers, so two thirds of the threads: 162 / 151 / 168 became 178 /
// 170 / 178.
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

// Rows that are not made of whole 16 bytes, by pairs of 16-bit elements, or single ones. What a row costs beside its
// elements is a third of the instructions or more, so few threads have many elements each; 20 places, not 16, so that
// one element more than a power of two does not need twice the threads. H200, bf16, N = 4097: 128 x 20 0.80 of the
// copy; N = 2049 by 128 threads 0.54.
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

// Rows of one warp or less share a block of 64 threads; longer rows have a block each. H200, N = 64 to 1024, blocks of
// 128, 64 and 32 threads: 0.977, 0.984, 0.983 of the copy (bf16), 0.97, 0.985, 0.983 (fp32). Loads that pass L1 by, or
// are the first to leave L2, lost 0.03 and more; two vectors a thread lost 0.01 to 0.3, but gained 0.005 in fp32 up to
// 512 columns without statistics; 1280 threads an SM, loads of 256 bytes into L2, hints for stores: within 0.008.
template <typename Plan>
constexpr int kForwardThreads = Plan::kThreads > 32 ? Plan::kThreads : 64;

// Whether each warp of a longer row has a slice of it, rather than every so many-th 512 bytes: one more piece of memory
// that is read at a time. H200, of the copy: bf16 N = 4096 0.969 became 0.984, 8192 the same, 12288 0.964 0.974, 16384
// 0.957 0.966; fp32 2048 0.965 0.971, 4096 0.973 0.981, 6144 0.958 0.97; by 512 threads 8192 0.95 0.94.
template <typename Plan>
constexpr bool kByWarps = Plan::kVec >= 4 && !Plan::kClusters && Plan::kThreads > 32 && Plan::kThreads <= 256;

// Asked of the compiler, so that it takes the registers the plan needs and no fewer (left to itself it aimed at 48 and
// spilled): 64 a thread, 80 or 128 for 8 vectors a thread, 96 for 7 or 9. At 71 to 80 registers, three quarters of the
// threads an SM, forward lost 0.08 of the copy (H200, bf16, N = 1024 to 8192); fp16 has to make do with that, as at 64
// it spills (the assembler computes a widened bf16 again, one shift, but keeps a widened fp16). N = 16384, threads an
// SM: bf16 256 x 8 768 0.955, 512 0.93, 512 x 4 1024 0.92; fp32 512 x 8 1024 0.955, 512 0.86, 1024 x 4 1024 0.83, in
// two turns 512 x 4 1024 0.90; N = 8192, fp32 256 x 8 768 0.967, 512 0.96, bf16 128 x 8 768 as 256 x 4.
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
// other are on different SMs, and each SM reads every segment's weight (H200, bf16, x of 256 MiB, the least us of 30
// for 1, 8, 16, 64, 256 segments, of prototypes that took rows one after the other by 1, 2, 4, 8):
//   N = 768   138 144 157 168 169;  138 144 151 160 159;  137 144 148 151 151;  138 152 153 152 152
//   N = 1024  136 142 150 162 169;  136 141 144 154 155;  136 143 144 146 146;  136 145 145 147 149
//   N = 1152  153 163 170 178 188;  142 164 181 175 180;  144 162 162 165 169;  145 163 164 165 168
//   N = 4096  135 145 155 174 184;  140 147 152 168 170;  140 151 151 162 167;  140 154 156 165 168
// At 4096 all but the first spilled, which cost rows without segments 4%: such plans take one row. (With loads that
// keep to their places nothing spills, and it is slower: 128 segments, one row / four, 2048 141 147, 4096 142 154, 8192
// 147 162.) With 1 + scale, adding weight_offset to every weight is better than to ask about it, 8 / 128 segments: 1152
// 145 / 151 became 140 / 142, 2048 141 / 171 134 / 143, 4096 144 / 175 135 / 144, 8192 147 / 180 140 / 148; one segment
// and no offset within 1%. What did not help (N = 4096): the weight asked for together with x, within 1 us for 1 to 64
// segments; asked for 2048 rows ahead as well, what 8 segments cost more than 1 stayed 10 us (and working that out
// before the loads of x took 18 us more); two and four rows side by side in a block, 4 to 11 us slower with 8 segments.
//
// As it then was, by turns of 1 / 2 / 4, 8 segments and 128 (least us of 30, copy 128.5): 512 137 137 138, 153 145 138;
// 768 133 135 137, 139 136 138; 1024 137 139 140, 157 149 140; 1152 139 136 141, 154 139 140; 1536 135 134 137, 141 139
// 138. A product in the place of the division by which a row finds its segment: within 1%.
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

// H200, fraction of the copy, LayerNorm / RMSNorm; Cn: clusters of n, Dn: depth, dn: delay, B2: two blocks an SM. Rows
// claimed (and dealt out in turn):
//   16-bit: 512 x 4 D6, 32768 C2 d3 0.94 / 0.94 (0.85), d2 0.93, d4 0.89 (0.91); 65536 C4 d3 0.94 / 0.94 (0.87), d2
//   0.93, d4 0.84; 131072 C8 d3 0.94 / 0.94 (0.89), d2 0.93; 262144 C16 d3 0.92 / 0.935, d2 0.936. 256 x 4 B2 D6 d2
//   0.92 to 0.95; 128 x 4, four blocks an SM, D6 d3 0.92; the register kernel, 512 x 8 for 32768, 0.92.
//
//   fp32: 32768 256 x 4 C8 D8 d2 0.95 / 0.96 (0.88), B2 D6 d3 0.94, 512 x 4 C4 D6 d2 0.92; 65536 512 x 4 C8 D6 d2 0.93
//   (0.88), 256 x 4 C16 0.91 (0.95), B2 0.94; 131072 512 x 4 C16 D6 d2 0.93 (0.91); 262144 512 x 8 C16 D3 d1 0.71 /
//   0.88 (0.69 / 0.87), with bias in registers, which spilled, 0.71 / 0.76, by two launches 0.48. Slices of one vector
//   a thread 0.55.
// fp32 weights of 16-bit x take twice the registers: half the threads. Not measured.
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

// Whether blocks of backward wait for the mean of all (pace.cuh): where the recorded benchmark gained by it (H200,
// fp32, LayerNorm / RMSNorm: N = 4096 0.936 / 0.887 became 0.942 / 0.949, 8192 0.953 / 0.898 0.939 / 0.952, 16384 0.935
// / 0.888 0.927 / 0.938, 65536 0.908 / 0.910 0.921 / 0.921). It lost where blocks have several short rows at once (N =
// 512 0.936 / 0.964 became 0.803 / 0.843, 1024 0.945 / 0.915 0.864 / 0.906) and with ragged rows (769 0.893 0.731),
// which a prototype that ran this kernel alone did not show; bf16 was within 0.01 of what it was.
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

// One ladder for both strategies, so that grad_input is the same bits whichever runs. H200, LayerNorm, x of 256 MiB,
// fraction of the two-read-one-write pass, sum of the partials included; R: rows, B: blocks an SM, C: cluster.
//   bf16: N = 64 0.86; 128 0.91; 256 0.94; 512 32 x 2 R7 B2 0.95; 1024 64 x 2 R6 0.945, R5 0.91, R3 B2 0.93; 1152 96 x
//   2 R5 0.98, 64 x 3 R4 0.87; 1536 64 x 3 R4 0.94, R5 0.94 (RMSNorm 0.88), R6 0.87, R3 0.86, by the plan of 2048 0.81,
//   96 x 2 R5 as R4; 2048 64 x 4 R3 0.925, R2 0.84, R2 B2 0.86; 3072 64 x 3 R5 C2 0.94, R4 0.93; 4096 64 x 4 R3 C2
//   0.92, R4 C2 0.89, R5 C2 0.84, R2 B2 C2 0.86, 128 x 4 R2 0.87, R1 B2 0.82; 5120 0.87; 6144 0.93; 8192 64 x 4 R4 C4
//   0.93, R5 C4 0.86, R3 C4 0.87, R2 B2 C4 0.89; 16384 0.92; 32768 0.92; 65536 0.90; 131072 0.85.
//   fp32: N = 64 0.885; 128 0.915; 256 0.91; 512 0.95; 1024 64 x 2 R6 0.96, R4 B2 0.96; 2048 128 x 4 R2 0.935, R3 0.91,
//   64 x 4 R4 C2 0.95 (RMSNorm 0.90, for 0.91); 4096 256 x 4 0.915, 128 x 4 R2 C2 0.92; 8192 128 x 4 R2 C4 0.97, R1 B2
//   C4 0.88; 16384 0.955.
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

// With a load stage: a fourth and a fifth tensor are work, so more warps, with fewer
// columns a thread, from 2048 columns on. H200, bf16, x of 256 MiB, us, without dropout / with: by the plans above 2048
// 262 / 350, 3072 269 / 362, 4096 264 / 354, 8192 274 / 353, 4096 rows of 8192 86 / 107; by 128 x 2 R3 259 / 359, 265 /
// 340, 262 / 350, 264 / 338, 82 / 99; by 128 x 2 R2 261 / 337, 294 / 378, 266 / 338, 274 / 352, 83 / 99. Shorter rows
// gain nothing: 1024 64 x 2 R6 259 / 360, R7 265 / 367; 1152 64 x 3 R4 267 / 349, R5 263 / 350; 1536 264 / 361, 266 /
// 366. Code of its own where nothing is dropped: 1152 3% less with dropout, 2048 3% more.
template <typename scalar_t>
struct AddGradLadder {
  using type = Ladder<BackwardPlan<8, 1, 8, 28, 3>, BackwardPlan<16, 1, 8, 14, 3>, BackwardPlan<32, 1, 8, 7, 3>,
                      BackwardPlan<32, 2, 8, 7, 2>, BackwardPlan<64, 2, 8, 6, 1>, BackwardPlan<64, 3, 8, 4, 1>,
                      BackwardPlan<128, 2, 8, 2, 1>, BackwardPlan<128, 2, 8, 3, 1, 16>,
                      BackwardPlan<128, 4, 8, 2, 1, 16>>;
};
template <>
struct AddGradLadder<float> {
  using type =
      Ladder<BackwardPlan<8, 1, 4, 28, 3>, BackwardPlan<16, 1, 4, 14, 3>, BackwardPlan<32, 1, 4, 7, 3>,
             BackwardPlan<32, 2, 4, 7, 3>, BackwardPlan<64, 2, 4, 6, 1>, BackwardPlan<64, 4, 4, 4, 1>,
             BackwardPlan<128, 4, 4, 2, 1>, BackwardPlan<256, 4, 4, 1, 1>, BackwardPlan<128, 4, 4, 2, 1, 4>,
             BackwardPlan<256, 4, 4, 1, 1, 16>>;
};

// With an activation or dropout after the norm, whose gradient is work: 16 elements a thread, and as many warps as that
// leaves registers for and rows fill, 12 to 15 of them beside the one that fetches. H200, bf16, x of 256 MiB, us, relu
// / gelu / gelu_tanh / silu / dropout of y / gelu and dropout (plain 197 to 203; gelu with a term of its polynomial
// fewer than it has):
//   N = 512   32 x 2 R7 B2 198 208 216 199 213 260; 64 x 1 R8 226 228 238 226 246 279, R4 B2 233 242 248 234 265 301
//   N = 768   96 x 1 R6 215 227 234 220 248 275; 64 x 2 R7 213 267 300 257 264 342
//   N = 1024  64 x 2 R7 198 216 232 207 216 270; 128 x 1 R4 226 230 240 227 249 288
//   N = 1152  96 x 2 R5 202 245 270 238 254 319; 64 x 3 R5 244 294 320 284 280 372; 192 x 1 R3 251 293 312 300 330 393
//   N = 1536  96 x 2 R5 200 211 219 198 211 252; 64 x 3 R5 224 235 251 232 233 295
//   N = 2048  128 x 2 R3 200 221 239 220 221 280; 160 x 2 R3 198 228 258 224 245 313; 256 x 1 R2 220 249 268 242 262
//   N = 2560  160 x 2 R3 197 207 229 203 217 263
//   N = 3072  96 x 2 R5 C2 201 220 224 210 219 265; 128 x 4 R2, bias in shared memory, 240 264 314 256 306 396
//   N = 4096  128 x 2 R3 C2 213 236 236 227 234 280; 160 x 2 221 257 269 240 261 327; 96 x 2 R5 C3 233 276 280 259 267
//   N = 6144  96 x 2 R5 C4 210 243 247 227 236 299; 160 x 2 R3 C3 241 285 303 269 293 365
//   N = 8192  128 x 2 R3 C4 229 263 266 248 256 311; 128 x 4 R2 C2, bias in shared memory, 235 256 303 247 251 320
// Finishing a row when the next one is added up costs those of one block 10% (1024 222 234 236 231 236 281).
//
// Counted by ncu, gelu at 4096 took 55 instructions an element at first (plain 23), and 37.8 now, 246 us for 309. Each
// activation has code of its own; sums are of x_hat and of the gradient before it is rounded; wdy is kept, in float32,
// so that grad_input needs neither weight nor rounding; factors of dropout and of the derivatives are left to what is
// one number a row or a column; mean is (RowStats::uncentered). With random numbers no vector is left out: that cost
// dropout 7% where the others gained up to 10%, as those of two vectors at once hide each other's latency; two strands
// of sums, which help activations, cost it 4% at 1024, and fp16 spills.
//
// Above 3072 columns (AfterGrad) 16 warps have rows, and ask in turns, not 12 and one that asks (ncu, gelu: an
// instruction issued in 68 of 100 cycles at 4096, 65 at 8192), and clusters are half as large. Least us of 30 on
// another card, by 128 x 2 R3 and by 256 x 2 R2, relu / gelu / silu / dropout of y: 3584 219 249 231 245; 207 235 222
// 232; 4096 204 227 217 224; 201 220 210 215; 8192 222 255 237 249; 209 239 228 233; 12288 250 298 277 290; 229 266 254
// 258; 16384 222 259 240 253; 225 259 247 253. What did not help (4096): to ask in the middle of a turn 221 239 234
// 233, or at its end 232 251 246 245; who leaves a stage last asks 254 270 261 261; statistics that are copied, so that
// nobody waits for them, 198 226 214 219 (8192 208 241 228 238). Shorter rows without a warp that asks, each row in
// registers, six turns ahead: 1024 64 x 2 R8 215 209 205 208 (by R7 193 214 203 214); 2048 128 x 2 R4 208 221 216 217
// (by R3 197 217 215 221). Nor with an add stage, without dropout / with: 3072 256 / 325 (256 / 332), 4096 262 / 344
// (256 / 339), 8192 265 / 348 (262 / 331). 1152 columns by 96 x 3 vectors of four elements, which they fill, R5, 199
// 227 219 279, by 96 x 2 of eight 199 245 231 252.
//
// fp32, relu / gelu / silu / dropout of y (plain 197 to 205): 256 32 x 2 R14 203 / 207 / 205 / 206, R9 B2 210 / 210 /
// 211 / 213, R7 B3 (which spilled) 219 / 222 / 231 / 228; 512 64 x 2 R6 200 / 210 / 200 / 201, R8 205 / 201 / 202 /
// 205; 1024 128 x 2 R4 200 / 199 / 200 / 203, 64 x 4 R4 201 / 220 / 202 / 202; 1152 128 x 3 R3 198 / 253 / 200 / 217,
// 64 x 5 R4 211 / 233 / 215 / 215, 128 x 4 R2 216 / 323 / 240 / 287; 1536 128 x 3 R3 207 / 200 / 212 / 216, 64 x 5 R4
// 200 / 247 / 202 / 224; 2048 256 x 2 R2 199 / 207 / 198 / 199, 128 x 4 R2 198 / 215 / 198 / 200; 4096 128 x 4 R2 C2
// 205 / 228 / 207 / 207, 128 x 2 R3 C4 219 / 268 / 227 / 238.
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

// With a gate, whose gradient is a third sum along the columns. H200, bf16, x of 256 MiB, 8 segments, us (the plain
// pass over four inputs and two outputs 374): N = 256 32 x 1 R7 B2 391, R14 402, B3 437; 512 32 x 2 R7 403, R11 418, R5
// B2 410, R7 B2 541 (spilled); 1024 64 x 2 R3 404, R5 413, R4 427; 1152 64 x 3 R3 400, 128 x 2 R2 431, R1 B2 424; 1536
// 64 x 3 R3 414, 128 x 2 R2 401; 2048 128 x 2 R2 415, 64 x 4 R3 428; 3072 128 x 2 R2 C2 402, R3 413, 64 x 4 R3 C2 412;
// 4096 128 x 2 R2 C2 410, R3 428, R1 B2 420, 64 x 4 R3 C2 426; 8192 128 x 2 R2 C4 405, R3 447, R1 B2 423, 64 x 4 R3 C4
// 446. By a pass of its own over x and the gradient of z 470 (4096). Not measured: fp32, and rows of 1544 to 2048
// columns by their own plan (above: by that with clusters).
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

// Where each row has a weight of its own (norm_backward_each.cu). H200, bf16, x of 256 MiB, the least us of 20, alone /
// with a residual / with a gate too, whose tensors take 322 / 387 / 644 at the rate of a copy: N = 512 315 / 370 / 583,
// 768 312 / 383 / 610, 1024 315 / 370 / 581, 1152 312 / 383 / 602, 1536 315 / 370 / 585, 2048 315 / 369 / 584, 4096 317
// / 372 / 591, 8192 316 / 379 / 603. Prototypes that spilled a little, by vectors a thread and threads an SM, 1024 and
// 8192: 2, 1024 318 / 377 / 612, 321 / 398 / 645; 2, 768 313 / 409 / 650, 397 / 560 / 839 (one block an SM); 3, 768 322
// / 418 / 668, 323 / 433 / 708; 4, 512 317 / 459 / 762, 323 / 473 / 764; 1, 1024 335 / 418 / 634, 422 / 529 / 720. What
// made room for 1024 threads is that nothing is asked about types where all are one. Forward, by its usual plans, 245
// to 248 of 258; asking L2 for scale and shift before x is loaded: 247 to 269.
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

// Ragged rows, by pairs of 16-bit elements, or single ones, chosen as for forward. H200, bf16: N = 4097 128 x 20 B2
// 0.81, 64 x 20 R3 C2 0.63, 64 x 16 R4 C3 0.53, 128 x 8 R3 C3 0.49; 12345 128 x 20 B2 C3 0.69, 128 x 16 R2 C4 0.51; 769
// 64 x 8 R6 0.72, 32 x 16 R10 0.66.
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
template <typename Plan>
constexpr int kSplitBlocksPerSm = round_up_to((Plan::kVecs > 8   ? 256
                                               : Plan::kVecs > 2 ? 512
                                                                 : 768) /
                                                  kSplitThreads<Plan>,
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
