// Sums over the threads that share one row.
//
// Contract of every function here: all threads of the row call it, each gets the result, and the order of the sum
// depends on kThreads only. Butterfly exchanges give every lane the same bits, as each adds the same two numbers.
#pragma once

#include <cstdint>

namespace fused_layernorm {

// The kThreads (a power of two, 4 to 1024) neighbouring threads of a block that work on one row; kRows rows a block.
template <int kThreads, int kRows>
struct RowThreads {
  static_assert(kThreads <= 32 || kRows <= 4, "barrier() counts to four");
  static constexpr int kLanes = kThreads < 32 ? kThreads : 32;
  static constexpr int kWarps = kThreads / kLanes;

  __device__ static int rank() { return static_cast<int>(threadIdx.x) % kThreads; }
  __device__ static int group() { return static_cast<int>(threadIdx.x) / kThreads; }  // which row of the block
  __device__ static int warp() { return rank() / kLanes; }                            // which warp of the row

  // The lanes of this warp that belong to this row.
  __device__ static unsigned lane_mask() {
    if constexpr (kLanes == 32) {
      return 0xffffffffu;
    } else {
      return ((1u << kLanes) - 1u) << (threadIdx.x % 32 / kLanes * kLanes);
    }
  }

  // Waits for the threads of this row only, so that rows of one block may differ in how many steps they take. The
  // barrier's number must be a constant: an SM has few barriers, and a block whose number is computed at run time is
  // given all 16, which left room for 4 blocks an SM (H200: forward at N = 4096 ran at 0.58 of the copy, not 0.95).
  __device__ static void barrier() {
    if constexpr (kWarps == 1) {
      __syncwarp(lane_mask());
    } else if constexpr (kRows == 1) {
      __syncthreads();
    } else {
      switch (group()) {  // the same for a whole warp; barrier 0 is __syncthreads'
        case 0: asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); break;
        case 1: asm volatile("bar.sync 2, %0;" ::"n"(kThreads) : "memory"); break;
        case 2: asm volatile("bar.sync 3, %0;" ::"n"(kThreads) : "memory"); break;
        default: asm volatile("bar.sync 4, %0;" ::"n"(kThreads) : "memory"); break;
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
// row of the block. Calls that follow each other must alternate between two scratch areas: then a warp that runs
// ahead into the next sum writes where nobody still reads.
template <typename T>
struct Pair {
  T first, second;
};

template <typename Row, typename T>
__device__ __forceinline__ Pair<T> row_sum(Pair<T> value, Pair<T>* scratch) {
  value = {Row::warp_sum(value.first), Row::warp_sum(value.second)};
  if constexpr (Row::kWarps > 1) {
    scratch += Row::group() * Row::kWarps;
    const int lane = threadIdx.x % 32;
    if (lane == 0) scratch[Row::warp()] = value;
    Row::barrier();
    value = scratch[lane % Row::kWarps];
    value = {Row::template lanes_sum<Row::kWarps>(value.first), Row::template lanes_sum<Row::kWarps>(value.second)};
  }
  return value;
}

}  // namespace fused_layernorm
