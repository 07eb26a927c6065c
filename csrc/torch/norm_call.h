// One description of a norm with everything that is fused around it, and its two directions on tensors. Autograd
// (autograd.cpp), the operators (library.cpp) and Python (python.cpp) fill it; norm_params.h has the formulas.
//
// for_each() lists every field once. The operators' schemas, the readers and the writers are made from that list, in
// its order. An undefined tensor is absent.
#pragma once

#include <optional>

#include "tensor.h"

namespace fused_layernorm {

#ifdef FUSED_LAYERNORM_WITH_CUDA
constexpr bool kWithCuda = true;
#else
constexpr bool kWithCuda = false;
#endif

using OptionalDtype = std::optional<at::ScalarType>;

struct NormOptions {
  int64_t normalized_ndim = 0;  // the last so many dimensions are normalized together
  double eps = 0;
  double weight_offset = 0;
  bool is_rms_norm = false;
  bool stats_grad = true;   // false: mean and rstd are constants in backward
  int64_t activation = 0;   // an Activation of norm_params.h: of y, or of the gate of a gated norm
  double dropout_p = 0;     // ignored without philox
  bool drops_y = false;     // dropout applies to y, not to x
  OptionalDtype out_dtype;  // of y; none: x's, or with adds_y residual's
  // Of z, x's or fp32. None: residual's in forward; without a residual there is no load stage, and z is x.
  OptionalDtype residual_dtype;
  bool gates_y = false;       // a gated norm's gate multiplies y, not x
  bool per_head = false;      // the leading dimensions of weight and bias are x's last ones before the normalized
  bool adds_y = false;        // residual is added to y, not to x: there is no load stage. Backward does not read this
  bool rounds_x_hat = false;  // to z's dtype before the product with weight (Llama). Backward does not read this

  template <class Self, class Function>
  static void for_each_option(Self& self, Function&& function) {
    function("normalized_ndim", self.normalized_ndim);
    function("eps", self.eps);
    function("weight_offset", self.weight_offset);
    function("is_rms_norm", self.is_rms_norm);
    function("stats_grad", self.stats_grad);
    function("activation", self.activation);
    function("dropout_p", self.dropout_p);
    function("drops_y", self.drops_y);
    function("out_dtype", self.out_dtype);
    function("residual_dtype", self.residual_dtype);
    function("gates_y", self.gates_y);
    function("per_head", self.per_head);
    function("adds_y", self.adds_y);
    function("rounds_x_hat", self.rounds_x_hat);
  }
};

// weight, bias and gate have one shape: x's last normalized_ndim dimensions, and in front of these
//   - nothing: all rows share the values;
//   - x's leading dimensions, with 1 for the last of them along which values are shared;
//   - or x's first dimension alone;
//   - or, per_head, x's last ones, without a gate of that shape.
// Without a load stage a gate makes a gated norm: it has x's shape, and any dtype.
struct NormCall : NormOptions {
  at::Tensor x, residual, gate, weight, bias;
  at::Tensor philox;  // int64 [2] on x's device: the seed and offset of philox.h

  template <class Self, class Function>
  static void for_each(Self& self, Function&& function) {
    function("x", self.x);
    function("residual", self.residual);
    function("gate", self.gate);
    function("weight", self.weight);
    function("bias", self.bias);
    function("philox", self.philox);
    for_each_option(self, function);
  }

  bool has_load_stage() const { return residual_dtype || (residual.defined() && !adds_y); }
  bool is_gated() const { return gate.defined() && !has_load_stage(); }
  at::ScalarType z_dtype() const {
    return residual_dtype.value_or((residual.defined() && !adds_y ? residual : x).scalar_type());
  }
  at::ScalarType y_dtype() const { return out_dtype.value_or((adds_y ? residual : x).scalar_type()); }
};

struct NormResults {
  at::Tensor y, z;   // z is undefined without a load stage, and may be where it is not wanted
  at::Tensor stats;  // [1, *x's leading dimensions] for RMSNorm (rstd), [3, *] for LayerNorm (rstd, mean, mean_tail)
};

NormResults norm_forward(const NormCall& call, bool save_stats, bool wants_z = true);

// Raises what norm_forward() would raise.
void check(const NormCall& call);

struct NormBackwardCall : NormOptions {
  at::Tensor grad_output;        // of y
  at::Tensor grad_residual_out;  // of z as it was returned; undefined: 0
  at::Tensor z;                  // forward's z, or x without a load stage; forward's y with z_is_y
  at::Tensor stats;              // forward's; [1 or 3, *any shape of the rows]
  at::Tensor x, gate;            // forward's; undefined without a gate; x also in a gated norm, where it is z
  at::Tensor weight, bias;       // forward's; bias is needed with an activation, z_is_y or gates_y only
  at::Tensor philox;
  bool z_is_y = false;
  at::ScalarType x_dtype = at::kFloat;
  bool wants_x = false;
  bool wants_gate = false;
  OptionalDtype grad_residual_dtype, grad_weight_dtype, grad_bias_dtype;  // none: not wanted

  bool is_gated() const { return gate.defined() && !residual_dtype; }

  // In eager mode only: contiguous fp32 tensors that the gradients of weight and bias are added to.
  at::Tensor weight_sum, bias_sum;

  template <class Self, class Function>
  static void for_each(Self& self, Function&& function) {
    function("grad_output", self.grad_output);
    function("grad_residual_out", self.grad_residual_out);
    function("z", self.z);
    function("stats", self.stats);
    function("x", self.x);
    function("gate", self.gate);
    function("weight", self.weight);
    function("bias", self.bias);
    function("philox", self.philox);
    for_each_option(self, function);
    function("z_is_y", self.z_is_y);
    function("x_dtype", self.x_dtype);
    function("wants_x", self.wants_x);
    function("wants_gate", self.wants_gate);
    function("grad_residual_dtype", self.grad_residual_dtype);
    function("grad_weight_dtype", self.grad_weight_dtype);
    function("grad_bias_dtype", self.grad_bias_dtype);
  }
};

struct NormGradients {
  at::Tensor x, residual, gate, weight, bias;
};

// Whether the gradients of x and residual are the same values in the same dtype, and so one tensor.
inline bool shares_gradient(const NormBackwardCall& call) {
  const bool drops_x = call.philox.defined() && call.dropout_p > 0 && !call.drops_y;
  return call.wants_x && call.grad_residual_dtype == call.x_dtype && !drops_x && !call.gate.defined();
}

// Computes the gradients that are wanted. The others are undefined, and so are those that were added to weight_sum and
// bias_sum. No gradient shares memory with an argument.
NormGradients norm_backward(const NormBackwardCall& call);

// Which elements of [rows, hidden_size] a call with this philox and dropout_p keeps: bool.
at::Tensor dropout_mask(const at::Tensor& philox, int64_t rows, int64_t hidden_size, double dropout_p);

// A norm with a quantized result (NormQuantParams), of the plain norm or of z = residual + x.
struct NormQuantCall : NormCall {
  at::Tensor scale;  // fp32, one element; undefined: found for each group of columns
  at::ScalarType dtype = at::kChar;
  int64_t group_size = 0;
  bool column_major_scales = false;
  bool return_norm = false;

  template <class Self, class Function>
  static void for_each(Self& self, Function&& function) {
    function("x", self.x);
    function("residual", self.residual);
    function("weight", self.weight);
    function("bias", self.bias);
    function("scale", self.scale);
    function("normalized_ndim", self.normalized_ndim);
    function("eps", self.eps);
    function("weight_offset", self.weight_offset);
    function("is_rms_norm", self.is_rms_norm);
    function("residual_dtype", self.residual_dtype);
    function("dtype", self.dtype);
    function("group_size", self.group_size);
    function("column_major_scales", self.column_major_scales);
    function("return_norm", self.return_norm);
  }
};

struct NormQuantResults {
  at::Tensor q;
  at::Tensor scale;  // [*x's leading dimensions, groups], with column_major_scales [groups, *]; undefined if given
  at::Tensor y, z;   // undefined if not wanted, and without a residual
};

// On CUDA, for the calls that NormQuantParams allows.
NormQuantResults norm_quant(const NormQuantCall& call);

// The norm after a block, the addition and the next norm: z = residual + RMSNorm(x), which NormCall describes, and
// y = RMSNorm(z) by next_weight, of x's dtype.
struct SandwichCall : NormCall {
  at::Tensor next_weight;
  double next_eps = 0;
  double next_weight_offset = 0;

  template <class Self, class Function>
  static void for_each(Self& self, Function&& function) {
    function("x", self.x);
    function("residual", self.residual);
    function("weight", self.weight);
    function("next_weight", self.next_weight);
    function("normalized_ndim", self.normalized_ndim);
    function("eps", self.eps);
    function("next_eps", self.next_eps);
    function("weight_offset", self.weight_offset);
    function("next_weight_offset", self.next_weight_offset);
  }
};

struct SandwichResults {
  at::Tensor y, z;
  at::Tensor stats, next_stats;  // of the norms of x and of z, as NormResults::stats
};

SandwichResults sandwich_norm(SandwichCall call);

// The dtype that statistics and sums of `dtype` are kept in.
at::ScalarType accumulation_type(at::ScalarType dtype);

void check_normalized_ndim(int64_t normalized_ndim, const at::Tensor& x);

// The segments (equal parts of x's rows, each with values of its own) of a weight, bias or gate of this shape: 1 if all
// rows share it, none if it has none of the shapes above.
std::optional<int64_t> segments_of(const at::Tensor& parameter, const at::Tensor& x, int64_t normalized_ndim,
                                   bool per_head = false);

}  // namespace fused_layernorm
