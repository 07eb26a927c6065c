// What stages of forward do to a vector: dropout, a row gate; arithmetic with pinned rounding.
#pragma once

#include <cuda_runtime.h>

#include "activation.cuh"
#include "kernel_params.h"
#include "philox.h"
#include "vector_io.cuh"

namespace fused_layernorm {

// Pinned rounding: otherwise nvcc may contract a product into either of two sums, differently in each kernel.
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double mul(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ double sub(double a, double b) { return __dsub_rn(a, b); }

__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }

// Multiplies a vector by the activation of its gate, or adds a residual.
template <typename x_t, int kVec, typename T>
__device__ __forceinline__ void apply_gate(const RowGate& stage, const RawVec<x_t, kVec>& raw, T (&values)[kVec]) {
  T gate[kVec];
  unpack(raw, gate);
  if (stage.adds) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = add(values[i], gate[i]);
    return;
  }
  with_gate_activation(stage.activation, [&](auto which) { activate<sizeof(x_t) == 2>(gate, which); });
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] = mul(values[i], gate[i]);
}

// Dropout of the elements of one row, in the accumulation type.
template <typename T>
struct RowDropout {
  int64_t seed;
  uint64_t where;
  uint32_t row, most_dropped;
  T scale;

  // Without dropout neither function may be called.
  __device__ RowDropout(const Dropout& dropout, int64_t row)
      : seed(dropout.philox ? __ldg(dropout.philox) : 0),
        where(dropout_where(dropout.philox ? __ldg(dropout.philox + 1) : 0, row)),
        row(static_cast<uint32_t>(row)),
        most_dropped(dropout.most_dropped),
        scale(static_cast<T>(dropout.scale)) {}

  // keep * value for the columns from `col` on, a multiple of kVec.
  template <int kVec>
  __device__ __forceinline__ void drop(T (&values)[kVec], int64_t col) const {
    static_assert(kVec == 4 || kVec == 8, "random numbers come by eights");
    const DropoutOctet numbers(seed, where, row, static_cast<uint32_t>(col / 8));
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const bool is_kept = numbers.number(i % 4, kVec == 8 ? i >= 4 : col % 8 >= 4) > most_dropped;
      values[i] = is_kept ? values[i] : T(0);
    }
  }
  // keep * dropout_scale * value.
  template <int kVec>
  __device__ __forceinline__ void apply(T (&values)[kVec], int64_t col) const {
    drop(values, col);
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = mul(values[i], scale);
  }
};

}  // namespace fused_layernorm
