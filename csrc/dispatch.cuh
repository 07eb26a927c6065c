// From run-time dtype and row length to compile-time types and row plan.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "launch_plan.h"
#include "norm_params.h"

namespace fused_layernorm {

template <typename scalar, typename weight>
struct Types {
  using scalar_t = scalar;
  using weight_t = weight;
};

// The only list of supported (x, weight) types. Calls f(Types<scalar_t, weight_t>{}).
template <typename F>
cudaError_t dispatch_types(DType x, DType weight, F&& f) {
  if (x == DType::kFloat16 && weight == DType::kFloat16) return f(Types<__half, __half>{});
  if (x == DType::kFloat16 && weight == DType::kFloat32) return f(Types<__half, float>{});
  if (x == DType::kBFloat16 && weight == DType::kBFloat16) return f(Types<__nv_bfloat16, __nv_bfloat16>{});
  if (x == DType::kBFloat16 && weight == DType::kFloat32) return f(Types<__nv_bfloat16, float>{});
  if (x == DType::kFloat32 && weight == DType::kFloat32) return f(Types<float, float>{});
  if (x == DType::kFloat64 && weight == DType::kFloat64) return f(Types<double, double>{});
  return cudaErrorInvalidValue;
}

// Calls f.operator()<Plan>() for the first plan of the ladder that holds vec_count vectors at once, or for the last,
// which takes several turns.
template <typename F, typename First, typename... Rest>
cudaError_t pick_plan(Ladder<First, Rest...>, int64_t vec_count, F&& f) {
  if constexpr (sizeof...(Rest) == 0) {
    return f(First{});
  } else {
    if (vec_count <= First::kThreads * First::kVecs) return f(First{});
    return pick_plan(Ladder<Rest...>{}, vec_count, f);
  }
}

// Vectors of 16 bytes where a row is made of whole ones, else single elements: a function of hidden_size and dtype
// alone, so that a row's result never depends on where it lies. fp64 is served, not tuned: elements always.
template <typename scalar_t, template <typename, int> class LadderOf, typename F>
cudaError_t dispatch_plan(int64_t hidden_size, F&& f) {
  if constexpr (sizeof(scalar_t) < 8) {
    constexpr int kVec = 16 / static_cast<int>(sizeof(scalar_t));
    if (hidden_size % kVec == 0) return pick_plan(typename LadderOf<scalar_t, kVec>::type{}, hidden_size / kVec, f);
  }
  return pick_plan(typename LadderOf<scalar_t, 1>::type{}, hidden_size, f);
}

}  // namespace fused_layernorm
