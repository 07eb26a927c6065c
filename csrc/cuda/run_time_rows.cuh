// Rows whose plan is a run-time value, for kernels with few options: the forward of RMSNorm and norms with a quantized
// result. One kernel for all sizes, with less code than a kernel for each plan that has every option.
//
// A row has 2^log_threads threads with up to five slots each; slot s of thread t is vector s * threads + t of the row.
// With kHeld 3 to 5 a thread holds all of its slots, and a block has one row, or several of at most 32 threads. With
// kHeld 1, for few rows, a block has one row and a thread for each slot. Both add in the same order, so the result of a
// row does not depend on the number of rows.
#pragma once

#include <algorithm>
#include <type_traits>

#include "dispatch.cuh"
#include "kernel_params.h"
#include "launch_plan.h"
#include "vector_io.cuh"

namespace fused_layernorm {

struct RunTimePlan {
  int held, log_threads, slots, block, rows;  // rows of a block
  int64_t blocks;

  // held is 0 where a row needs more than 1024 threads.
  static RunTimePlan of(int64_t hidden_size, int element_bytes, int64_t rows) {
    const int vectors = static_cast<int>(hidden_size * element_bytes / 16);
    const auto log_threads_of = [&](int held) {
      int log_threads = log_of(kQuantGroup * element_bytes / 16);  // a group's, at least
      while (held << log_threads < vectors) ++log_threads;
      return log_threads;
    };
    // As few empty slots as possible. In fp32 four vectors a thread: fewer kernels
    int held = 4;
    for (int other : {3, 5})
      if (element_bytes == 2 && 1 << log_threads_of(other) <= most_run_time_threads(other) &&
          other << log_threads_of(other) < held << log_threads_of(held))
        held = other;
    RunTimePlan plan{};
    plan.held = held;
    plan.log_threads = log_threads_of(held);
    const int threads = 1 << plan.log_threads;
    if (threads > most_run_time_threads(held)) return {};
    plan.slots = (vectors - 1) / threads + 1;
    plan.block = std::max(threads, 64);
    if (plan.slots * threads <= kRunTimeFewRowsBlock && rows * vectors <= kRunTimeFewRowsVectors) {
      plan.held = 1;
      plan.block = (plan.slots * threads + 31) / 32 * 32;
    }
    plan.rows = plan.held == 1 ? 1 : plan.block / threads;
    plan.blocks = (rows + plan.rows - 1) / plan.rows;
    return plan;
  }
};

// Calls f(kHeld) for a plan of these elements.
template <typename scalar_t, typename F>
cudaError_t with_held(const RunTimePlan& plan, F&& f) {
  if (plan.held == 1) return f(std::integral_constant<int, 1>());
  if constexpr (sizeof(scalar_t) == 2) {
    if (plan.held == 3) return f(std::integral_constant<int, 3>());
    if (plan.held == 5) return f(std::integral_constant<int, 5>());
  }
  return f(std::integral_constant<int, 4>());
}

template <int kHeld>
constexpr int kRunTimeBlock = kHeld == 1 ? kRunTimeFewRowsBlock : most_run_time_threads(kHeld);

// For kSums sums along a row, each used once.
template <int kHeld, int kSums>
struct SumScratch {
  float slots[kSums][kHeld == 1 ? kRunTimeFewRowsBlock : 1], warps[kSums][32];
};

// A thread's part of a row.
template <typename scalar_t, int kHeld>
struct RunTimeRow {
  static constexpr bool kFew = kHeld == 1;
  static constexpr int kVec = 16 / sizeof(scalar_t);
  using Vec = RawVec<scalar_t, kVec>;

  int threads, log_threads, slots;
  int rank, part;  // thread t; with kHeld 1 its slot, else its row of the block
  int lane, warp, hidden_size, step, first_col;
  int64_t row;

  __device__ __forceinline__ RunTimeRow(int64_t hidden_size, int log_threads, int slots)
      : threads(1 << log_threads),
        log_threads(log_threads),
        slots(slots),
        rank(threadIdx.x & (threads - 1)),
        part(threadIdx.x >> log_threads),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        hidden_size(static_cast<int>(hidden_size)),
        step(threads * kVec),
        first_col(rank * kVec + (kFew ? part * step : 0)),
        row(kFew ? blockIdx.x : static_cast<int64_t>(blockIdx.x) * (blockDim.x >> log_threads) + part) {}

  __device__ __forceinline__ bool spans_warps() const { return kFew || threads > 32; }

  // Calls f(held, column) for each vector that this thread has.
  template <typename F>
  __device__ __forceinline__ void for_each(F&& f) const {
#pragma unroll
    for (int held = 0; held < kHeld; ++held)
      if (first_col + held * step < hidden_size) f(held, first_col + held * step);
  }

  // z = x, or residual + x, which is stored if residual_out is wanted. z is zero where this thread has no vector.
  // load_more() starts further loads.
  template <typename x_t, typename Params, typename F>
  __device__ __forceinline__ void load(Vec (&z)[kHeld], const Params& params, F&& load_more) const {
#pragma unroll
    for (int held = 0; held < kHeld; ++held) z[held] = zero_vec<scalar_t, kVec>();
    const x_t* x = static_cast<const x_t*>(params.x) + params.x_strides.offset(row);
    if (!params.residual) {
      if constexpr (std::is_same<x_t, scalar_t>::value)
        for_each([&](int held, int col) { z[held] = load_vec<scalar_t, kVec, true>(x + col); });
      return load_more();
    }
    const scalar_t* residual = static_cast<const scalar_t*>(params.residual) + params.residual_strides.offset(row);
    RawVec<x_t, kVec> x_raw[kHeld];
    for_each([&](int held, int col) { x_raw[held] = load_vec<x_t, kVec, true>(x + col); });
    for_each([&](int held, int col) { z[held] = load_vec<scalar_t, kVec, true>(residual + col); });
    if (kFew) load_more();
    scalar_t* out = static_cast<scalar_t*>(params.residual_out) + row * hidden_size;
    for_each([&](int held, int col) {
      float sum[kVec], values[kVec];
      unpack(z[held], sum);
      unpack(x_raw[held], values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum[i] += values[i];
      z[held] = pack<scalar_t>(sum);
      if (params.residual_out) store_raw(out + col, z[held]);
    });
    if (!kFew) load_more();  // for lack of registers
  }

  // Replaces sums over a thread's slots by sums over the row. `first`: which of the scratch's sums the first is.
  template <int kCount, int kSums>
  __device__ __forceinline__ void add_up(float (&sums)[kCount], SumScratch<kHeld, kSums>& scratch, int first) const {
    if constexpr (kFew) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) scratch.slots[first + i][threadIdx.x] = sums[i];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        sums[i] = 0;
#pragma unroll
        for (int slot = 0; slot < kMostRunTimeSlots; ++slot)
          if (slot < slots) sums[i] += scratch.slots[first + i][(slot << log_threads) + rank];
      }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
      if (offset < 16 || threads > 16)
#pragma unroll
        for (int i = 0; i < kCount; ++i) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], offset);
    if (threads <= 32) return;
    if (lane == 0 && (!kFew || part == 0))
#pragma unroll
      for (int i = 0; i < kCount; ++i) scratch.warps[first + i][warp] = sums[i];
    __syncthreads();
    const int warps = threads / 32;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = scratch.warps[first + i][lane & (warps - 1)];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
      if (offset < warps)
#pragma unroll
        for (int i = 0; i < kCount; ++i) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], offset);
  }
};

}  // namespace fused_layernorm
