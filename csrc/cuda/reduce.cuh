// Sums over the threads that share one row.
//
// Contract of every function here: all threads of the row call it, each gets the result, and the order of the sum
// depends on kThreads only. Butterfly exchanges give every lane the same bits, as each adds the same two numbers.
#pragma once

#include <cstdint>
#include <cstring>

namespace fused_layernorm {

// The kThreads (a power of two, 2 to 1024, or a multiple of 32) neighbouring threads of a block that work on one row:
// all of the block, or several rows have a warp or less each. whole_warps: rows that share a warp run in lockstep, and
// lanes without a row have returned from the kernel (a skipped `if` is not enough: __shfl_sync waits for every named
// lane that has not exited). Then every mask is all lanes; a mask computed at run time costs a vote and a branch per
// exchange.
template <int kThreads, bool whole_warps = false>
struct RowThreads {
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

  // Waits for the threads of this row.
  __device__ static void barrier() {
    if constexpr (kWarps == 1) {
      __syncwarp(lane_mask());
    } else {
      __syncthreads();
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

// Two sums at once over the threads of a row, with one barrier. `scratch` holds RowThreads::kWarps elements.
// Consecutive calls must alternate between two scratch areas, so that a warp that is already in the next sum does not
// overwrite values that others still read.
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

// The same for a run-time number of warps up to eight, without a branch: behind one the compiler forgets what it
// widened before.
template <typename T>
__device__ __forceinline__ Pair<T> sum_of_few_warps(const Pair<T>* shared, int warps) {
  Pair<T> sums[8];
#pragma unroll
  for (int warp = 0; warp < 8; ++warp) sums[warp] = warp < warps ? shared[warp] : Pair<T>{0, 0};
  return sum_of_warps<8>(sums);
}

// The same for any number of warps, of a block or a cluster. Of more than eight a full warp adds the sums, half of it
// each.
template <typename T>
__device__ __forceinline__ Pair<T> sum_of_warps(const Pair<T>* shared, int warps) {
  if (warps <= 8) return sum_of_few_warps(shared, warps);
  const int lane = threadIdx.x % 16;
  const bool upper = threadIdx.x % 32 >= 16;
  const T* of_half = &shared->first + upper;
  T half = 0;
#pragma unroll 1
  for (int first = 0; first < warps; first += 16)
    if (first + lane < warps) half += of_half[2 * (first + lane)];
  half = RowThreads<32>::lanes_sum<16>(half);
  const T other = __shfl_xor_sync(0xffffffffu, half, 16);
  return {upper ? other : half, upper ? half : other};
}

// Both sums over the `group`-th row of a block, which has a run-time number of whole warps; `warp`: of the row. For
// kernels with up to four blocks an SM: for a barrier whose number is a run-time value a block reserves all 16, of
// which an SM has 64 (H200: so limited, forward of 4096 columns fell from 0.95 to 0.58 of the copy). scratch: of the
// row; as for row_sum().
template <typename T>
__device__ __forceinline__ void share_in_row(Pair<T> value, Pair<T>* scratch, int group, int warp, int threads) {
  const T half = lanes_half_sum<RowThreads<32>, 32>(value);
  const int lane = threadIdx.x % 32;
  if (lane % 16 == 0) reinterpret_cast<T*>(scratch + warp)[lane / 16] = half;
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(threads) : "memory");
}

template <typename Row, typename T>
__device__ __forceinline__ Pair<T> row_sum(Pair<T> value, Pair<T>* scratch) {
  const T half = lanes_half_sum<Row, Row::kLanes>(value);
  if constexpr (Row::kWarps == 1) {
    const T other = __shfl_xor_sync(Row::lane_mask(), half, Row::kLanes / 2);
    const bool upper = threadIdx.x % Row::kLanes >= Row::kLanes / 2;
    return {upper ? other : half, upper ? half : other};
  } else {
    const int lane = threadIdx.x % 32;
    if (lane % 16 == 0) reinterpret_cast<T*>(scratch + Row::warp())[lane / 16] = half;
    Row::barrier();
    return sum_of_warps<Row::kWarps>(scratch);
  }
}

}  // namespace fused_layernorm
