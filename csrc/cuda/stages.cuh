// What the stages are made of: dropout, and arithmetic with pinned rounding.
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

// A variant of the plain forward kernel: with an epilogue instruction issue decides, and a kernel with all stages at run
// time was 1.2 to 1.4 times slower (H200, bf16). With and without dropout are separate kernels, because dropout takes
// registers.
struct NoStage {};
template <bool drops>
struct WithEpilogue : Epilogue {};
template <typename Stage>
constexpr bool kHasEpilogue = std::is_base_of<Epilogue, Stage>::value;
template <typename Stage>
constexpr bool kDropsY = std::is_same<Stage, WithEpilogue<true>>::value;

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
    static_assert(kVec == 1 || kVec == 4 || kVec == 8, "random numbers come by eights");
    const DropoutOctet numbers(seed, where, row, static_cast<uint32_t>(col / 8));
    const bool behind = col % 8 >= 4;
    if constexpr (kVec == 1) {
      const int k = static_cast<int>(col % 4);
      const uint32_t low = k % 2 ? numbers.number(1, behind) : numbers.number(0, behind);
      const uint32_t high = k % 2 ? numbers.number(3, behind) : numbers.number(2, behind);
      if ((k < 2 ? low : high) <= most_dropped) values[0] = 0;
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        if (numbers.number(i % 4, kVec == 8 ? i >= 4 : behind) <= most_dropped) values[i] = 0;
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
