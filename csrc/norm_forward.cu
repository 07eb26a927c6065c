// Forward of LayerNorm and RMSNorm.
//
//   mean = is_rms_norm ? 0 : sum(x)/N      rstd = rsqrt(sum((x-mean)^2)/N + eps)
//   x_hat = (x-mean)*rstd                  y = x_hat*(weight+weight_offset) + bias
//
// Each warp takes the mean m of its share of the row, then sums d = x-m and d*d: two passes over registers. A set of n
// numbers described by (m, c = sum(d), q = sum(d*d)) is moved to another reference point m + shift exactly, by
//   c -> c - n*shift        q -> q - shift*(2c - n*shift)
// so the warps' sets are brought to one reference point m and added: one exchange between warps, and no cancellation,
// as every difference is taken between near numbers. With delta = c/N the mean is m + delta to twice the precision of
// the type (delta is kept as mean_tail), var = q/N - delta^2, and x_hat = (x-m)*rstd - delta*rstd.
#include <cmath>

#include "dispatch.cuh"
#include "launch_plan.h"
#include "norm_params.h"
#include "reduce.cuh"
#include "vector_io.cuh"

namespace fused_layernorm {
namespace {

template <typename T>
struct Moments {
  T n, m, c, q;

  // The same set seen from another reference point.
  __device__ Moments about(T other) const {
    const T d = m - other;
    const T moved = q + d * (n * d + 2 * c);
    return {n, other, c + n * d, isinf(q) ? q : moved};  // keeps inf from becoming inf - inf
  }
};

// Pairwise, which is exacter and a shorter chain of dependent additions.
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

// Of a row, from each thread's part. All parts of a warp have the same m; n counts the warp's elements.
template <typename Row, typename T>
__device__ __forceinline__ Moments<T> row_moments(Moments<T> part, T inverse_n, Moments<T>* scratch) {
  part.c = Row::warp_sum(part.c);
  part.q = Row::warp_sum(part.q);
  if constexpr (Row::kWarps > 1) {
    scratch += Row::group() * Row::kWarps;
    const int lane = threadIdx.x % 32;
    if (lane == 0) scratch[Row::warp()] = part;
    Row::barrier();
    part = scratch[lane % Row::kWarps];
    part = part.about(Row::template lanes_sum<Row::kWarps>(part.m * (part.n * inverse_n)));
    part.c = Row::template lanes_sum<Row::kWarps>(part.c);
    part.q = Row::template lanes_sum<Row::kWarps>(part.q);
  }
  return part;
}

// Good enough for a reference point, which only has to lie near the mean; a true division is a call that spills.
__device__ __forceinline__ float quick_ratio(float sum, int n) { return __fdividef(sum, static_cast<float>(n)); }
__device__ __forceinline__ double quick_ratio(double sum, int n) { return sum / n; }

__device__ __forceinline__ float inverse_sqrt(float value) { return __frsqrt_rn(value); }
__device__ __forceinline__ double inverse_sqrt(double value) { return 1.0 / sqrt(value); }

// weight + weight_offset and bias of one vector, or 1 and 0 where they are absent.
template <typename weight_t, int kVec, typename T>
__device__ __forceinline__ void load_affine(T (&scale)[kVec], T (&offset)[kVec], const NormForwardParams& params,
                                            int64_t col) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    scale[i] = 1;
    offset[i] = 0;
  }
  if (params.weight) {
    unpack(load_vec<weight_t, kVec>(static_cast<const weight_t*>(params.weight) + col), scale);
    if (params.weight_offset != 0) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) scale[i] += static_cast<T>(params.weight_offset);
    }
  }
  if (params.bias) unpack(load_vec<weight_t, kVec>(static_cast<const weight_t*>(params.bias) + col), offset);
}

template <typename scalar_t, typename weight_t, typename Plan>
__global__ void __launch_bounds__(kForwardThreads<Plan>, kForwardBlocksPerSm<Plan>)
    norm_forward_kernel(const __grid_constant__ NormForwardParams params, acc_type<scalar_t> inverse_n,
                        bool x_aligned) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kThreads = Plan::kThreads, kVecs = Plan::kVecs, kVec = Plan::kVec;
  constexpr int kRows = kForwardThreads<Plan> / kThreads;
  using Row = RowThreads<kThreads, kRows>;
  __shared__ Moments<acc_t> scratch[kRows * Row::kWarps];

  // In 16-bit x the rounding of a warp's mean is far below what x can tell apart, so c is taken for 0.
  constexpr bool kCompensated = sizeof(scalar_t) > 2;

  // Which row
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + Row::group();
  if (row >= params.rows) return;
  const scalar_t* x = static_cast<const scalar_t*>(params.x) + params.x_strides.offset(row);
  const int rank = Row::rank();
  const int warp_first = rank - rank % Row::kLanes;
  const int vec_count = static_cast<int>(params.hidden_size / kVec);
  const int last_tile = (vec_count - 1) / (kThreads * kVecs) * (kThreads * kVecs);

  // Load and statistics: of the whole row when it fits the registers, else tile by tile
  RawVec<scalar_t, kVec> raw[kVecs];
  Moments<acc_t> part{};
#pragma unroll 1
  for (int tile = 0; tile <= last_tile; tile += kThreads * kVecs) {
    load_tile<scalar_t, kThreads>(raw, x, tile, vec_count, rank, x_aligned);
    // How many vectors of this tile this thread, and this warp, holds
    int thread_vecs = kVecs, warp_vecs = kVecs * Row::kLanes;
    const int left = vec_count - tile;
    if (left < kThreads * kVecs) {
      thread_vecs = warp_vecs = 0;
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        thread_vecs += v * kThreads + rank < left;
        warp_vecs += min(max(left - v * kThreads - warp_first, 0), Row::kLanes);
      }
    }
    acc_t values[kVec];
    acc_t sum = 0;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      unpack(raw[v], values);
      sum += vec_sum(values);
    }
    Moments<acc_t> here{static_cast<acc_t>(thread_vecs * kVec), 0, 0, 0};
    if (!params.is_rms_norm && warp_vecs > 0) here.m = quick_ratio(Row::warp_sum(sum), warp_vecs * kVec);
    if constexpr (!kKeepWidened<Plan>) forget(raw);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      if (v * kThreads + rank >= left) continue;  // a masked lane must add nothing
      unpack(raw[v], values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[i] -= here.m;
      if constexpr (kCompensated) here.c += vec_sum(values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) here.q = fma(values[i], values[i], here.q);
    }
    if (tile == 0) {
      part = here;
      part.n = static_cast<acc_t>(warp_vecs * kVec);
    } else {
      here = here.about(part.m);
      part.c += here.c;
      part.q += here.q;
      part.n += static_cast<acc_t>(warp_vecs * kVec);
    }
  }
  part = row_moments<Row>(part, inverse_n, scratch);
  const acc_t mean = part.m;
  const acc_t mean_tail = params.is_rms_norm ? acc_t(0) : part.c * inverse_n;
  acc_t variance = part.q * inverse_n - mean_tail * mean_tail;
  if (variance < 0) variance = 0;          // by rounding only; nan stays nan
  if (isinf(part.q)) variance = part.q;  // overflow: rstd is 0, as in torch
  const acc_t rstd = inverse_sqrt(variance + static_cast<acc_t>(params.eps));
  if (rank == 0 && params.rstd) {
    static_cast<acc_t*>(params.rstd)[row] = rstd;
    if (!params.is_rms_norm) {
      static_cast<acc_t*>(params.mean)[row] = mean;
      static_cast<acc_t*>(params.mean_tail)[row] = mean_tail;
    }
  }

  // Store: backwards, as the last tile is still in registers
  if constexpr (!kKeepWidened<Plan>) forget(raw);
  const acc_t shift = -mean_tail * rstd;
  const int64_t y_row = row * params.hidden_size;
#pragma unroll 1
  for (int tile = last_tile; tile >= 0; tile -= kThreads * kVecs) {
    if (tile != last_tile) load_tile<scalar_t, kThreads>(raw, x, tile, vec_count, rank, x_aligned);
    const int64_t first_col = static_cast<int64_t>(tile + rank) * kVec;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      if (v * kThreads + rank >= vec_count - tile) continue;
      const int64_t col = first_col + v * kThreads * kVec;
      acc_t values[kVec], scale[kVec], offset[kVec];
      load_affine<weight_t>(scale, offset, params, col);
      unpack(raw[v], values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[i] = fma(fma(values[i] - mean, rstd, shift), scale[i], offset[i]);
      if (params.y_dtype == dtype_of<scalar_t>) {
        store_vec(static_cast<scalar_t*>(params.y) + y_row + col, values);
      } else {
        store_vec_as(params.y, params.y_dtype, y_row + col, values);
      }
    }
  }
}

}  // namespace

int launch_norm_forward_cuda(const NormForwardParams& params, CUstream_st* stream) {
  return dispatch_types(params.x_dtype, params.weight_dtype, [&](auto types) {
    using scalar_t = typename decltype(types)::scalar_t;
    using weight_t = typename decltype(types)::weight_t;
    return dispatch_plan<scalar_t, ForwardLadder>(params.hidden_size, [&](auto plan) {
      using Plan = decltype(plan);
      constexpr int kRows = kForwardThreads<Plan> / Plan::kThreads;
      const unsigned blocks = static_cast<unsigned>((params.rows + kRows - 1) / kRows);
      const bool x_aligned = rows_are_aligned<scalar_t, Plan::kVec>(params.x, params.x_strides);
      norm_forward_kernel<scalar_t, weight_t, Plan><<<blocks, kForwardThreads<Plan>, 0, stream>>>(
          params, static_cast<acc_type<scalar_t>>(1.0 / static_cast<double>(params.hidden_size)), x_aligned);
      return cudaGetLastError();
    });
  });
}

}  // namespace fused_layernorm
