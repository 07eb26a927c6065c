// What the two registrations of the operators share (library.cpp; csrc/stable/library.cpp): schemas, and results.
//
//   norm_forward(Tensor x, Tensor? residual, ...) -> (Tensor y, Tensor z, Tensor stats)
//   norm_backward(Tensor grad_output, ...) -> (Tensor grad_x, grad_residual, grad_gate, grad_weight, grad_bias)
//   sandwich_norm(Tensor x, Tensor residual, ...) -> (Tensor y, Tensor z, Tensor stats, Tensor next_stats)
//   norm_quant(Tensor x, Tensor? residual, ...) -> (Tensor q, Tensor scale, Tensor y, Tensor z)     CUDA only
//
// The arguments are those of the lists of fields in norm_call.h, all positional: DTensor caches sharding decisions by
// positional arguments, and not by every keyword. A result that is absent is an empty tensor; grad_residual is also
// empty if it equals grad_x (shares_gradient()). stats is [1 or 3, *x's leading dimensions], so that DTensor can shard
// it along the dimensions along which it shards x.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "norm_call.h"

namespace fused_layernorm {

template <class T>
constexpr const char* kTypeName = "";
template <>
constexpr const char* kTypeName<int64_t> = "int";
template <>
constexpr const char* kTypeName<double> = "float";
template <>
constexpr const char* kTypeName<bool> = "bool";
template <>
constexpr const char* kTypeName<at::ScalarType> = "ScalarType";
template <>
constexpr const char* kTypeName<OptionalDtype> = "ScalarType?";

// The operator of each description of a call.
template <class Call>
struct Operator;
template <>
struct Operator<NormCall> {
  static constexpr const char* kName = "norm_forward";
  static constexpr const char* kResults = "Tensor y, Tensor z, Tensor stats";
  static bool is_required(std::string_view tensor) { return tensor == "x"; }
};
template <>
struct Operator<NormBackwardCall> {
  static constexpr const char* kName = "norm_backward";
  static constexpr const char* kResults =
      "Tensor grad_x, Tensor grad_residual, Tensor grad_gate, Tensor grad_weight, Tensor grad_bias";
  static bool is_required(std::string_view tensor) {
    return tensor == "grad_output" || tensor == "z" || tensor == "stats";
  }
};

template <>
struct Operator<SandwichCall> {
  static constexpr const char* kName = "sandwich_norm";
  static constexpr const char* kResults = "Tensor y, Tensor z, Tensor stats, Tensor next_stats";
  static bool is_required(std::string_view tensor) { return tensor == "x" || tensor == "residual"; }
};

template <>
struct Operator<NormQuantCall> {
  static constexpr const char* kName = "norm_quant";
  static constexpr const char* kResults = "Tensor q, Tensor scale, Tensor y, Tensor z";
  static bool is_required(std::string_view tensor) { return tensor == "x"; }
};

template <class Call>
std::string schema_of() {
  std::string arguments;
  const Call call;
  Call::for_each(call, [&](const char* field, const auto& value) {
    using Field = std::decay_t<decltype(value)>;
    arguments += arguments.empty() ? "" : ", ";
    if constexpr (std::is_same_v<Field, at::Tensor>) {
      arguments += Operator<Call>::is_required(field) ? "Tensor" : "Tensor?";
    } else {
      arguments += kTypeName<Field>;
    }
    arguments += std::string(" ") + field;
  });
  return std::string(Operator<Call>::kName) + "(" + arguments + ") -> (" + Operator<Call>::kResults + ")";
}
constexpr const char* kDropoutMaskSchema =
    "dropout_mask(Tensor philox, SymInt rows, SymInt hidden_size, float dropout_p) -> Tensor";

// What an operator returns for the call, in its order; undefined where absent.
inline std::array<at::Tensor, 3> results_of(const NormCall& call, bool save_stats = true, bool wants_z = true) {
  NormResults found = norm_forward(call, save_stats, wants_z);
  return {std::move(found.y), std::move(found.z), std::move(found.stats)};
}

inline std::array<at::Tensor, 5> results_of(NormBackwardCall& call) {
  call.stats = call.stats.contiguous();
  NormGradients found = norm_backward(call);
  if (shares_gradient(call)) found.residual.reset();  // an operator must not return one tensor twice
  return {std::move(found.x), std::move(found.residual), std::move(found.gate), std::move(found.weight),
          std::move(found.bias)};
}

inline std::array<at::Tensor, 4> results_of(const SandwichCall& call) {
  SandwichResults found = sandwich_norm(call);
  return {std::move(found.y), std::move(found.z), std::move(found.stats), std::move(found.next_stats)};
}

inline std::array<at::Tensor, 4> results_of(const NormQuantCall& call) {
  NormQuantResults found = norm_quant(call);
  return {std::move(found.q), std::move(found.scale), std::move(found.y), std::move(found.z)};
}

// The tensor that an absent result is like.
inline const at::Tensor& like_results(const NormCall& call) { return call.x; }
inline const at::Tensor& like_results(const NormBackwardCall& call) { return call.z; }

}  // namespace fused_layernorm
