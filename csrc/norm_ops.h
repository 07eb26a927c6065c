// The two directions of a norm on tensors: what autograd (autograd.cpp) and Python (bindings.cpp) call. They record
// nothing for autograd and touch no Python. A tensor that is not defined is one that was not given, or is not wanted.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/OptionalArrayRef.h>

#include <optional>
#include <utility>

namespace fused_layernorm {

#ifdef FUSED_LAYERNORM_WITH_CUDA
constexpr bool kWithCuda = true;
#else
constexpr bool kWithCuda = false;
#endif

struct NormOptions {
  at::OptionalIntArrayRef normalized_shape;  // that of weight, or else of bias, where it is not given
  double eps;
  double weight_offset;
  bool is_rms_norm;
  std::optional<at::ScalarType> out_dtype;
};

// The dtype that statistics and sums of `dtype` are kept in.
at::ScalarType accumulation_type(at::ScalarType dtype);

// Returns (y, stats). stats, wanted for backward, holds one row of [rows] values for RMSNorm (rstd) and three for
// LayerNorm (rstd, mean, mean_tail), in one allocation; undefined when save_stats is false.
std::pair<at::Tensor, at::Tensor> norm_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                                               const NormOptions& options, bool save_stats);

struct NormGradients {
  at::Tensor x, weight, bias;
};

void check_normalized_ndim(int64_t normalized_ndim, const at::Tensor& x);

// Only what is wanted is computed: x, weight (with its dtype), and bias where a dtype is given for it. x, weight and
// stats are forward's; the rows of stats may have any shape.
NormGradients norm_backward(const at::Tensor& grad_output, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& stats, int64_t normalized_ndim, double weight_offset, bool is_rms_norm,
                            bool wants_x, bool wants_weight, std::optional<at::ScalarType> bias_dtype);

}  // namespace fused_layernorm
