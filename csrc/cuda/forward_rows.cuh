// Shared by the forward kernels: the statistics of a row, merged from those of its parts.
//
// Each warp takes a reference point m near the mean of its share of the row, then sums d = x-m and d*d: two passes over
// registers. A set of n numbers described by (m, c = sum(d), q = sum(d*d)) is moved to another reference point m +
// shift exactly, by
//   c -> c - n*shift        q -> q - shift*(2c - n*shift)
// so the warps' sets are brought to one reference point m and added: one exchange between warps, and no cancellation,
// as every difference is taken between near numbers. With delta = c/N the variance is q/N - delta^2 and the mean is
// m + delta, kept as mean + mean_tail to twice the precision of the type; x_hat = (x-mean)*rstd - mean_tail*rstd.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

#include "async.cuh"
#include "kernel_params.h"
#include "launch_plan.h"
#include "reduce.cuh"
#include "vector_io.cuh"

namespace fused_layernorm {

// Pairwise: more accurate, and a shorter dependency chain.
template <int kVec, typename T>
__device__ __forceinline__ T vec_sum(const T (&values)[kVec]) {
  T sums[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) sums[i] = values[i];
#pragma unroll
  for (int width = kVec / 2; width > 0; width /= 2)
#pragma unroll
    for (int i = 0; i < width; ++i) sums[i] += sums[i + width];
  return sums[0];
}

// Approximate, which is enough for a reference point near the mean; an exact division is a function call, around which
// registers spill.
__device__ __forceinline__ float quick_ratio(float sum, int n) { return __fdividef(sum, static_cast<float>(n)); }
__device__ __forceinline__ double quick_ratio(double sum, int n) { return sum / n; }

template <typename T>
struct Moments {
  T n, m, c, q;

  // Adds a vector of differences from m; the caller counts n. A vector's squares are summed first: a shorter chain of
  // dependent instructions.
  template <int kVec>
  __device__ __forceinline__ void add(const T (&differences)[kVec]) {
    T squares = differences[0] * differences[0];
#pragma unroll
    for (int i = 1; i < kVec; ++i) squares = fma(differences[i], differences[i], squares);
    c += vec_sum(differences);
    q += squares;
  }

  // The same set with another reference point.
  __device__ Moments about(T other) const {
    const T d = m - other;
    const T moved = q + d * (n * d + 2 * c);
    return {n, other, c + n * d, isinf(q) ? q : moved};  // keeps inf from becoming inf - inf
  }
};

// Returns `first`, one of the averaged numbers, if it differs from `mean` by no more than the rounding of a sum; else
// `mean`. So the reference point of equal numbers is that number, and their variance is exactly 0: the rounding error
// of a mean of 1e6 would otherwise exceed an eps of 1e-12.
template <typename T>
__device__ __forceinline__ T snapped(T mean, T first) {
  constexpr T kNear = sizeof(T) == 8 ? T(0x1p-48) : T(0x1p-19);  // 32 roundings
  return abs(mean - first) <= abs(mean) * kNear ? first : mean;
}

// The union of `kCount` sets, one a lane, in neighbouring lanes of a full warp. The first set must not be empty.
template <int kCount, typename T>
__device__ __forceinline__ Moments<T> merge_moments(Moments<T> part, T inverse_n) {
  using Lanes = RowThreads<32>;
  const T mean = Lanes::lanes_sum<kCount>(part.m * (part.n * inverse_n));
  part = part.about(snapped(mean, __shfl_sync(0xffffffffu, part.m, threadIdx.x % 32 / kCount * kCount)));
  part.c = Lanes::lanes_sum<kCount>(part.c);
  part.q = Lanes::lanes_sum<kCount>(part.q);
  return part;
}

// The union of the sets of a warp's lanes, `kParts` each. Lane 0's first set must not be empty.
template <int kParts, typename T>
__device__ __forceinline__ Moments<T> merge_moments(const Moments<T> (&parts)[kParts], T inverse_n) {
  using Lanes = RowThreads<32>;
  T mean = 0;
#pragma unroll
  for (const Moments<T>& part : parts) mean += part.m * (part.n * inverse_n);
  const T other = snapped(Lanes::warp_sum(mean), __shfl_sync(0xffffffffu, parts[0].m, 0));
  Moments<T> all{0, other, 0, 0};
#pragma unroll
  for (const Moments<T>& part : parts) {
    const Moments<T> moved = part.about(other);
    all.n += part.n;
    all.c += moved.c;
    all.q += moved.q;
  }
  all.c = Lanes::warp_sum(all.c);
  all.q = Lanes::warp_sum(all.q);
  return all;
}

// The reference point of a warp, from the lanes' sums of `sampled` of its elements, and lane 0's first of them.
template <typename Row, typename T>
__device__ __forceinline__ T reference_point(T sum, T first, int sampled) {
  sum = Row::warp_sum(sum);
  first = __shfl_sync(Row::lane_mask(), first, 0, Row::kLanes);
  return sampled > 0 ? snapped(quick_ratio(sum, sampled), first) : T(0);
}

// Merges the threads' parts into this block's part of a row. All parts of a warp have the same m, and n counts the
// elements of the warp. Includes a barrier of the block if the row has several warps: the block then has one row.
// `shares`: this warp writes its part to scratch (of several that have the same).
template <typename Row, typename T>
__device__ __forceinline__ Moments<T> row_moments(Moments<T> part, T inverse_n, Moments<T>* scratch, int rank,
                                                  bool shares = true) {
  const T half = lanes_half_sum<Row, Row::kLanes>(Pair<T>{part.c, part.q});
  if constexpr (Row::kWarps == 1) {
    const T other = __shfl_xor_sync(Row::lane_mask(), half, Row::kLanes / 2);
    const bool upper = threadIdx.x % Row::kLanes >= Row::kLanes / 2;
    part.c = upper ? other : half;
    part.q = upper ? half : other;
  } else {
    const int lane = rank % 32;
    T* const mine = &scratch[rank / 32].n;  // n, m, c, q
    T* const sum = mine + 2 + lane / 16;
    if (shares && lane == 0) {
      mine[0] = part.n;
      mine[1] = part.m;
    }
    if (shares && lane % 16 == 0) *sum = half;
    Row::barrier();
    part = merge_moments<Row::kWarps>(scratch[lane % Row::kWarps], inverse_n);
  }
  return part;
}

// Loads the first `count` elements of a parameter's vector if the parameter is `given`; the others are `neutral`.
// kOrdered keeps the load behind earlier stores: read-only loads of all vectors of straight-line code are hoisted,
// which spills.
template <int kVec, bool kOrdered = false, typename weight_t>
__device__ __forceinline__ RawVec<weight_t, kVec> load_parameter(const weight_t* source, int count, bool given,
                                                                 RawVec<weight_t, kVec> neutral) {
  if (count >= kVec) {
    if (given) neutral = load_vec<weight_t, kVec, kOrdered>(source);
    return neutral;
  }
  weight_t elements[kVec];
  memcpy(elements, &neutral, sizeof(neutral));
#pragma unroll
  for (int i = 0; i < kVec; ++i)
    if (given && i < count) elements[i] = source[i];
  memcpy(&neutral, elements, sizeof(neutral));
  return neutral;
}

__device__ __forceinline__ float inverse_sqrt(float value) { return __frsqrt_rn(value); }
__device__ __forceinline__ double inverse_sqrt(double value) { return 1.0 / sqrt(value); }

// The segment of a row, and the offset of its weight and bias.
template <typename Params>
__device__ __forceinline__ unsigned segment_of(const Params& params, int64_t row) {
  if (params.segments <= 1) return 0;
  if (params.interleaves) return static_cast<unsigned>(row) % static_cast<unsigned>(params.segments);
  const unsigned rows = static_cast<unsigned>(params.rows) / static_cast<unsigned>(params.segments);
  return static_cast<unsigned>(row) / rows;
}
template <typename Params>
__device__ __forceinline__ int64_t parameters_of(const Params& params, int64_t row) {
  return segment_of(params, row) * params.weight_stride;
}

// Maps an element to x_hat.
template <typename T>
struct RowNorm {
  T mean, rstd, shift;

  __device__ __forceinline__ T x_hat(T x) const { return fma(x - mean, rstd, shift); }
};

// From the moments of a whole row. `saves`: this thread stores the statistics, if they are wanted.
template <typename T, typename Params>
__device__ __forceinline__ RowNorm<T> finish_row(const Moments<T>& part, T inverse_n, const Params& params, int64_t row,
                                                 bool saves) {
  const T delta = params.is_rms_norm ? T(0) : part.c * inverse_n;
  const T mean = part.m + delta;
  const T mean_tail = (part.m - mean) + delta;
  T variance = fma(part.q, inverse_n, -(delta * delta));
  if (variance < 0) variance = 0;        // by rounding only; nan stays nan
  if (isinf(part.q)) variance = part.q;  // overflow: rstd is 0, as in torch
  const T rstd = inverse_sqrt(variance + static_cast<T>(params.eps));
  if (saves && params.rstd) {
    static_cast<T*>(params.rstd)[row] = rstd;
    if (!params.is_rms_norm) {
      static_cast<T*>(params.mean)[row] = mean;
      static_cast<T*>(params.mean_tail)[row] = mean_tail;
    }
  }
  return {mean, rstd, -mean_tail * rstd};
}

}  // namespace fused_layernorm
