// The two directions of a norm on tensors: what autograd (autograd.cpp) and Python (bindings.cpp) call. They record
// nothing for autograd and touch no Python. A tensor that is not defined is one that was not given, or is not wanted.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/OptionalArrayRef.h>

#include <optional>

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
  bool stats_grad = true;  // false: backward takes mean and rstd for constants
  // weight and bias may have one dimension more before those of normalized_shape: the rows are as many equal parts,
  // each with its own.
  bool takes_segments = false;
};

// z = residual + dropout(x) is normalized, where forward is given one of these.
struct AddOptions {
  at::Tensor residual;                           // undefined: 0
  std::optional<at::ScalarType> residual_dtype;  // of z: x's or fp32; otherwise residual's, or else x's
  at::Tensor philox;  // int64 [2] on x's device: the seed and offset of philox.h; or undefined
  double dropout_p;
  at::Tensor gate = {};  // of x's dtype, with as many rows as weight, which x is multiplied by; undefined: 1
};

// y = dropout(activation(norm(x))) is the result, where forward is given one of these.
struct AfterOptions {
  int64_t activation;  // an Activation of norm_params.h
  at::Tensor philox;
  double dropout_p;
};

struct NormResults {
  at::Tensor y, stats, residual_out;
};

// The dtype that statistics and sums of `dtype` are kept in.
at::ScalarType accumulation_type(at::ScalarType dtype);

// stats, wanted for backward, holds one row of [rows] values for RMSNorm (rstd) and three for LayerNorm (rstd, mean,
// mean_tail), in one allocation; undefined when save_stats is false. residual_out is z; undefined without `add`.
NormResults norm_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                         const NormOptions& options, bool save_stats, const AddOptions* add = nullptr,
                         const AfterOptions* after = nullptr);

struct NormGradients {
  at::Tensor x, weight, bias, residual, gate;
};

// What backward must know of forward's `add`; backward's own x is then forward's residual_out.
struct AddGradOptions {
  at::Tensor grad_residual_out;  // undefined: 0
  at::Tensor philox;             // as in forward
  double dropout_p;
  at::ScalarType x_dtype;
  std::optional<at::ScalarType> residual_dtype;  // none: no gradient of the residual is wanted
  at::Tensor gate = {}, x = {};  // forward's, or undefined; where the kernel has that stage (gated_norm_backward())
};

// What backward must know of forward's `after`, or, where there is none, of forward, as its own x is forward's y.
struct BiasedGradOptions {
  std::optional<AfterOptions> after;  // as in forward
  at::Tensor bias;                    // as in forward, or undefined
};

void check_normalized_ndim(int64_t normalized_ndim, const at::Tensor& x);

// Only what is wanted is computed: x, weight (with its dtype), and bias where a dtype is given for it. x, weight and
// stats are forward's; the rows of stats may have any shape. Where the gradients of x and residual are the same values
// in the same dtype, they are one tensor. `into`: fp32 tensors that the wanted gradients of weight and bias are added
// to; the result then holds none. `biased`: where the kernel has that stage (after_norm_backward(), backward_from_y()).
NormGradients norm_backward(const at::Tensor& grad_output, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& stats, int64_t normalized_ndim, double weight_offset, bool is_rms_norm,
                            bool wants_x, bool wants_weight, std::optional<at::ScalarType> bias_dtype, bool stats_grad,
                            const AddGradOptions* add = nullptr, const NormGradients* into = nullptr,
                            const BiasedGradOptions* biased = nullptr);

// The same where forward was given `after`, whose gradient is taken first: on CUDA that of the norm is rounded to the
// dtype of grad_output or x, whichever is wider.
NormGradients after_norm_backward(const at::Tensor& grad_output, const at::Tensor& x, const at::Tensor& weight,
                                  const at::Tensor& bias, const at::Tensor& stats, int64_t normalized_ndim,
                                  double weight_offset, bool is_rms_norm, bool wants_x, bool wants_weight,
                                  bool wants_bias, const AfterOptions& after);

// The same of the plain norm, from its y instead of x, by x_hat = (y - bias) / (weight + weight_offset): for weights
// that allow it.
NormGradients backward_from_y(const at::Tensor& grad_output, const at::Tensor& y, const at::Tensor& weight,
                              const at::Tensor& bias, const at::Tensor& stats, int64_t normalized_ndim,
                              double weight_offset, bool is_rms_norm, bool wants_x, bool wants_weight, bool wants_bias);

// The same of the norm of z = residual + gate * x, with gate's gradient; that of residual is in z's dtype.
NormGradients gated_norm_backward(const at::Tensor& grad_output, const at::Tensor& grad_residual_out,
                                  const at::Tensor& z, const at::Tensor& x, const at::Tensor& gate,
                                  const at::Tensor& weight, const at::Tensor& stats, int64_t normalized_ndim,
                                  double weight_offset, bool is_rms_norm, bool wants_x, bool wants_residual,
                                  bool wants_weight, std::optional<at::ScalarType> bias_dtype);

// Which elements of [rows, hidden_size] a call with this philox and dropout_p keeps: bool.
at::Tensor dropout_mask(const at::Tensor& philox, int64_t rows, int64_t hidden_size, double dropout_p);

}  // namespace fused_layernorm
