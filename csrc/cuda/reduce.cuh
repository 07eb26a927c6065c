// Sums over the threads that share one row.
//
// Contract of every function here: all threads of the row call it, each gets the result, and the order of the sum
// depends on kThreads only. Butterfly exchanges give every lane the same bits, as each adds the same two numbers.
#pragma once

#include <cstdint>
#include <cstring>

namespace fused_layernorm {

// The kThreads (a power of two, 2 to 1024, or a multiple of 32) neighbouring threads of a block that work on one row;
// kRows rows a block. whole_warps: rows that share a warp run in lockstep, and lanes without a row have returned from
// the kernel (a skipped `if` is not enough: __shfl_sync waits for every named lane that has not exited). Then every
// mask is all lanes; a mask computed at run time costs a vote and a branch per exchange.
template <int kThreads, int kRows, bool whole_warps = false>
struct RowThreads {
  static_assert(kThreads <= 32 || kRows <= 8, "barrier() counts to eight");
  static constexpr int kThreadsOfRow = kThreads;
  static constexpr int kLanes = kThreads < 32 ? kThreads : 32;
  static constexpr int kWarps = kThreads / kLanes;

  __device__ static int rank() { return static_cast<int>(threadIdx.x) % kThreads; }
  __device__ static int group() { return static_cast<int>(threadIdx.x) / kThreads; }  // which row of the block
  __device__ static int warp() { return rank() / kLanes; }                            // which warp of the row

  // The lanes of this warp that belong to the row.
  __device__ static unsigned lane_mask() {
    if constexpr (kLanes == 32 || whole_warps) {
      return 0xffffffffu;
    } else {
      return ((1u << kLanes) - 1u) << (threadIdx.x % 32 / kLanes * kLanes);
    }
  }

  // Waits for the threads of this row only, so that rows of one block may take different numbers of steps. The
  // barrier's number must be a constant: for a number computed at run time the block reserves all 16 barriers, which
  // limited an SM to 4 blocks (H200: forward at N = 4096 ran at 0.58 of the copy, not 0.95).
  __device__ static void barrier() {
    if constexpr (kWarps == 1) {
      __syncwarp(lane_mask());
    } else if constexpr (kRows == 1) {
      __syncthreads();
    } else {
      switch (group()) {  // uniform in a warp; barrier 0 is that of __syncthreads
        case 0: asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); break;
        case 1: asm volatile("bar.sync 2, %0;" ::"n"(kThreads) : "memory"); break;
        case 2: asm volatile("bar.sync 3, %0;" ::"n"(kThreads) : "memory"); break;
        case 3: asm volatile("bar.sync 4, %0;" ::"n"(kThreads) : "memory"); break;
        case 4: asm volatile("bar.sync 5, %0;" ::"n"(kThreads) : "memory"); break;
        case 5: asm volatile("bar.sync 6, %0;" ::"n"(kThreads) : "memory"); break;
        case 6: asm volatile("bar.sync 7, %0;" ::"n"(kThreads) : "memory"); break;
        default: asm volatile("bar.sync 8, %0;" ::"n"(kThreads) : "memory"); break;
      }
    }
  }

  // Sum over `kCount` neighbouring lanes.
  template <int kCount, typename T>
  __device__ static T lanes_sum(T value) {
#pragma unroll
    for (int offset = kCount / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(lane_mask(), value, offset);
    return value;
  }

  template <typename T>
  __device__ static T warp_sum(T value) {
    return lanes_sum<kLanes>(value);
  }
};

// Two sums at once over the threads of a row, with one barrier. `scratch` holds RowThreads::kWarps elements for each
// row of the block. Consecutive calls must alternate between two scratch areas, so that a warp that is already in the
// next sum does not overwrite values that others still read.
template <typename T>
struct alignas(2 * sizeof(T)) Pair {
  T first, second;
};

// Both sums over `kCount` neighbouring lanes in one butterfly: the halves first exchange values, and each half then
// reduces one of the sums. The lower half returns the first sum, the upper half the second.
template <typename Row, int kCount, typename T>
__device__ __forceinline__ T lanes_half_sum(Pair<T> value) {
  const bool upper = threadIdx.x % kCount >= kCount / 2;
  const T received = __shfl_xor_sync(Row::lane_mask(), upper ? value.first : value.second, kCount / 2);
  return Row::template lanes_sum<kCount / 2>((upper ? value.second : value.first) + received);
}

// Every thread adds up the sums that the warps of a row stored in shared memory, in four independent chains: broadcast
// reads, and no further exchange.
template <int kWarps, typename T>
__device__ __forceinline__ Pair<T> sum_of_warps(const Pair<T>* shared) {
  constexpr int kStrands = kWarps < 4 ? kWarps : 4;
  Pair<T> sums[kStrands];
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    const Pair<T> here = shared[warp];
    Pair<T>& sum = sums[warp % kStrands];
    sum = warp < kStrands ? here : Pair<T>{sum.first + here.first, sum.second + here.second};
  }
#pragma unroll
  for (int strand = 1; strand < kStrands; ++strand) {
    sums[0].first += sums[strand].first;
    sums[0].second += sums[strand].second;
  }
  return sums[0];
}

template <typename Row, typename T>
__device__ __forceinline__ Pair<T> row_sum(Pair<T> value, Pair<T>* scratch) {
  const T half = lanes_half_sum<Row, Row::kLanes>(value);
  if constexpr (Row::kWarps == 1) {
    const T other = __shfl_xor_sync(Row::lane_mask(), half, Row::kLanes / 2);
    const bool upper = threadIdx.x % Row::kLanes >= Row::kLanes / 2;
    return {upper ? other : half, upper ? half : other};
  } else {
    scratch += Row::group() * Row::kWarps;
    const int lane = threadIdx.x % 32;
    if (lane % 16 == 0) reinterpret_cast<T*>(scratch + Row::warp())[lane / 16] = half;
    Row::barrier();
    return sum_of_warps<Row::kWarps>(scratch);
  }
}

}  // namespace fused_layernorm
