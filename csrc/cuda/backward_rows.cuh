// Shared by the backward kernels: the steps of one row. norm_backward.cu has the formulas.
#pragma once

#include <cuda_runtime.h>

#include "kernel_params.h"
#include "reduce.cuh"
#include "stages.cuh"
#include "vector_io.cuh"

namespace fused_layernorm {

// The statistics that forward saved of a row.
template <typename T>
struct SavedStats {
  T rstd, mean, mean_tail;
};

// mean_tail is below the precision of 16-bit x; one load a row less gains 0.03 of the copy bandwidth at N = 256 (H200,
// bf16).
template <typename scalar_t, bool kOrdered = false, typename T = acc_type<scalar_t>>
__device__ __forceinline__ SavedStats<T> load_stats(const KernelBackwardParams& params, int64_t row) {
  const T rstd = load<kOrdered>(static_cast<const T*>(params.rstd) + row);
  if (!params.mean) return {rstd, 0, 0};
  const T mean = load<kOrdered>(static_cast<const T*>(params.mean) + row);
  if constexpr (sizeof(scalar_t) == 2) return {rstd, mean, 0};
  return {rstd, mean, load<kOrdered>(static_cast<const T*>(params.mean_tail) + row)};
}

// SavedStats with the operations that use it.
template <typename scalar_t, typename T = acc_type<scalar_t>>
struct RowStats : SavedStats<T> {
  __device__ explicit RowStats(SavedStats<T> saved) : SavedStats<T>(saved) {}
  // The variance of a row of one element is 0: rstd = 0 makes grad_input exactly 0, whatever the rounding of the sums.
  __device__ RowStats(SavedStats<T> saved, const KernelBackwardParams& params) : SavedStats<T>(saved) {
    if (params.mean && params.hidden_size == 1) this->rstd = 0;
  }
  __device__ T centered(T x) const {
    const T difference = sub(x, this->mean);
    if constexpr (sizeof(scalar_t) == 2) return difference;
    return sub(difference, this->mean_tail);
  }
  // The factor of slope in grad_input: x - mean, or for 16-bit x just x, one operation an element less, with
  // -mean*slope folded into level. The added rounding error is about that of mean itself; it is 0 for a row of equal
  // numbers, where slope is 0.
  static constexpr bool kFoldsMean = sizeof(scalar_t) == 2;
  __device__ T uncentered(T x) const {
    if constexpr (kFoldsMean) return x;
    return centered(x);
  }
};

// Adds weight_offset, or without a weight 1, to the first `count` elements of a vector.
template <int kVec, typename T>
__device__ __forceinline__ void add_weight_offset(T (&weight)[kVec], const KernelBackwardParams& params, int count) {
  const T more = params.weight ? static_cast<T>(params.weight_offset) : T(1);
#pragma unroll
  for (int i = 0; i < kVec; ++i) weight[i] += is_element<kVec>(i, count) ? more : T(0);
}

// Loads weight + weight_offset of the first `count` elements of a vector; the others are 0.
template <typename weight_t, bool kOrdered = false, int kVec, typename T>
__device__ __forceinline__ void load_weight(T (&values)[kVec], const KernelBackwardParams& params, int64_t col,
                                            int count) {
  unpack(
      load_some<weight_t, kVec, kOrdered>(static_cast<const weight_t*>(params.weight) + col, params.weight ? count : 0),
      values);
  add_weight_offset(values, params, count);
}

// For weights of `narrow`, or fp32 beside a 16-bit type. The dtype is a run-time value: weight is read once a block, or
// from the cache.
template <typename narrow, int kVec, typename T>
__device__ __forceinline__ void load_weight_of(T (&values)[kVec], const KernelBackwardParams& params, int64_t col,
                                               int count) {
  if (sizeof(narrow) == 2 && params.weight_dtype == DType::kFloat32) {
    load_weight<float>(values, params, col, count);
  } else {
    load_weight<narrow>(values, params, col, count);
  }
}

// Adds a vector to the sums along the row, (sum((x-mean)*wdy), sum(wdy)). grad_output is 0 for elements beyond the row,
// which so add nothing.
template <int kVec, typename Stats, typename T>
__device__ __forceinline__ void add_to_row(Pair<T>& sums, const Stats& stats, const T (&x)[kVec], const T (&grad)[kVec],
                                           const T (&weight)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    sums.first = fma(mul(grad[i], stats.centered(x[i])), weight[i], sums.first);
    sums.second = fma(grad[i], weight[i], sums.second);
  }
}
// Adds a vector to the sums along the columns.
template <int kVec, typename Stats, typename T>
__device__ __forceinline__ void add_to_columns(T (&grad_weight)[kVec], T (&grad_bias)[kVec], const Stats& stats,
                                               const T (&x)[kVec], const T (&grad)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    grad_weight[i] = fma(mul(grad[i], stats.centered(x[i])), stats.rstd, grad_weight[i]);
    grad_bias[i] += grad[i];
  }
}

// The same from x_hat, for row and columns. The sums along the row are (sum(x_hat*wdy), sum(wdy)); grad becomes wdy.
template <int kVec, typename T>
__device__ __forceinline__ void add_from_x_hat(Pair<T>& sums, T (&grad_weight)[kVec], T (&grad_bias)[kVec],
                                               const T (&x_hat)[kVec], T (&grad)[kVec], const T (&weight)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    grad_weight[i] = fma(grad[i], x_hat[i], grad_weight[i]);
    grad_bias[i] += grad[i];
    grad[i] = mul(grad[i], weight[i]);
    sums.first = fma(grad[i], x_hat[i], sums.first);
    sums.second = add(sums.second, grad[i]);
  }
}

// The same from y, with x_hat*weight = y - bias = `scaled`: grad_weight comes out multiplied by weight.
template <int kVec, typename T>
__device__ __forceinline__ void add_from_y(Pair<T>& sums, T (&grad_weight)[kVec], T (&grad_bias)[kVec],
                                           const T (&scaled)[kVec], const T (&grad)[kVec], const T (&weight)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    sums.first = fma(grad[i], scaled[i], sums.first);
    sums.second = fma(grad[i], weight[i], sums.second);
    grad_weight[i] = fma(grad[i], scaled[i], grad_weight[i]);
    grad_bias[i] += grad[i];
  }
}

// Statistics of a row that is already x_hat; rstd is that of x.
template <typename T>
struct UnitStats {
  T rstd;
  static constexpr bool kFoldsMean = false;
  __device__ T uncentered(T x_hat) const { return x_hat; }
};

// 1 / value to a unit in the last place. volatile, or the results of all columns are hoisted out of the loop over rows
// and spill.
__device__ __forceinline__ float quick_inverse(float value) {
  float result;
  asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// grad_input = (weight*grad_output + (x-mean)*slope + level)*rstd: the formula of norm_backward.cu with the factors of
// a row combined.
template <int kVec, typename Stats, typename T>
__device__ __forceinline__ void grad_input_of(T (&values)[kVec], const Stats& stats, Pair<T> row, const T (&x)[kVec],
                                              const T (&grad)[kVec], const T (&weight)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; ++i)
    values[i] = mul(fma(grad[i], weight[i], fma(stats.uncentered(x[i]), row.first, row.second)), stats.rstd);
}

// (slope, level) from the sums: slope = -rstd*c1 = -rstd^2*sum((x-mean)*wdy)/N, level = -c2, less mean*slope if the
// mean is folded. Both are 0 where the statistics are constants: assigned, not multiplied by 0, because a sum may be
// infinite.
template <typename Stats, typename T>
__device__ __forceinline__ Pair<T> slope_and_level(Pair<T> sums, const Stats& stats, const KernelBackwardParams& params,
                                                   T inverse_n) {
  if (!params.stats_grad) sums = {0, 0};
  const T c1 = mul(mul(sums.first, stats.rstd), inverse_n);
  const T slope = mul(-stats.rstd, c1), level = params.is_rms_norm ? T(0) : mul(-sums.second, inverse_n);
  if constexpr (Stats::kFoldsMean) return {slope, fma(-stats.mean, slope, level)};
  return {slope, level};
}

// Bytes that are read and written for an element of x. It does not depend on which gradients a call wants, so that they
// have the same bits in every call. The residual's gradient is that of x unless something is between them.
inline int element_bytes(const KernelBackwardParams& params, const GradStages& stages) {
  const int wide = dtype_bytes(params.x_dtype), narrow = dtype_bytes(stages.grad_output_dtype);
  const bool has_row_gate = stages.row_gate.gate, is_changed = stages.gate || stages.dropout.philox || narrow < wide;
  const bool reads_more = stages.has_load_stage || has_row_gate;
  const bool writes_more = (stages.has_load_stage && is_changed) || has_row_gate;
  return wide * (1 + reads_more + writes_more) + narrow * (stages.gate ? 3 : 2);
}
// The same where it limits the rows that a plan takes at once (most_iteration_bytes()); else 0.
template <typename Plan>
int limiting_bytes(const KernelBackwardParams& params, const GradStages& stages) {
  const bool is_wide = dtype_bytes(params.x_dtype) == 4;
  return is_wide && Plan::Shape::kOneBehind && stages.any() ? 0 : element_bytes(params, stages);
}

// Stores a scalar to a tensor whose dtype is a run-time value.
template <typename T>
__device__ __forceinline__ void store_as(void* target, DType dtype, int64_t index, T value) {
  const T values[1] = {value};
  store_vec_as<1>(target, dtype, index, values, 1, true);
}

// An element of grad_weight or grad_bias.
template <typename T>
__device__ __forceinline__ void store_gradient(const KernelBackwardParams& params, void* gradient, DType dtype,
                                               int64_t index, T value) {
  if (params.accumulate) value += static_cast<const float*>(gradient)[index];
  store_as(gradient, dtype, index, value);
}

}  // namespace fused_layernorm
