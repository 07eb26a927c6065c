// What is fused with a norm forward (AddStage, AfterNorm in kernel_params.h) as template arguments of the kernels,
// dropout, and arithmetic that rounds the same way everywhere.
#pragma once

#include <cuda_runtime.h>

#include "activation.cuh"
#include "kernel_params.h"
#include "philox.h"
#include "vector_io.cuh"

namespace fused_layernorm {

// Rounding pinned: left to itself the compiler may fuse a product into either of two sums, kernel by kernel.
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double mul(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ double sub(double a, double b) { return __dsub_rn(a, b); }

__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }

// Forward: a row is x as it lies in memory, or z = residual + dropout(x), which is made, rounded and written where it
// is loaded. `x` is x's type; that of the kernel is residual's and z's.
struct NotFused {};
template <typename x>
struct Add : AddStage {};

// What comes after the norm, forward; x's type is the kernel's. With dropout and without it as kernels of their own,
// for the registers.
template <typename x, bool drops>
struct After : AfterNorm {};

template <typename Stage, typename scalar_t>
struct TypeOfX {
  using type = scalar_t;
};
template <typename x, typename scalar_t>
struct TypeOfX<Add<x>, scalar_t> {
  using type = x;
};
template <typename Stage, typename scalar_t>
using x_type = typename TypeOfX<Stage, scalar_t>::type;
template <typename Stage>
constexpr bool kIsFused = !std::is_same<Stage, NotFused>::value;
template <typename Stage>
constexpr bool kAdds = std::is_base_of<AddStage, Stage>::value;
template <typename Stage>
constexpr bool kHasAfter = std::is_base_of<AfterNorm, Stage>::value;
template <typename Stage>
constexpr bool kDropsY = false;
template <typename x>
constexpr bool kDropsY<After<x, true>> = true;

// Dropout of the elements of one row, which are of the accumulation type.
template <typename T>
struct RowDropout {
  int64_t seed;
  uint64_t where;
  uint32_t row, most_dropped;
  T scale;

  // Without dropout it is not to be applied.
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
