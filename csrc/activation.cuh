// Activations after a norm, and their derivatives.
#pragma once

#include <cuda_runtime.h>

#include "norm_params.h"

namespace fused_layernorm {

__device__ __forceinline__ float erf_of(float t) { return erff(t); }
__device__ __forceinline__ double erf_of(double t) { return erf(t); }
__device__ __forceinline__ float exp_of(float t) { return expf(t); }
__device__ __forceinline__ double exp_of(double t) { return exp(t); }
__device__ __forceinline__ float sigmoid(float t) { return __fdividef(1.0f, 1.0f + expf(-t)); }
__device__ __forceinline__ double sigmoid(double t) { return 1.0 / (1.0 + exp(-t)); }

// gelu(t) = t * Phi(t); by its tanh formula t * sigmoid(2u), u = sqrt(2/pi) * (t + 0.044715 * t^3).
template <typename T>
constexpr T kHalfRoot2 = T(0.70710678118654752440);
template <typename T>
constexpr T kInverseRoot2Pi = T(0.39894228040143267794);
template <typename T>
constexpr T kTwoRoot2OverPi = T(1.59576912160573071176);
template <typename T>
constexpr T kCubic = T(0.044715);

template <typename T>
__device__ __forceinline__ T twice_u(T t) {
  return kTwoRoot2OverPi<T> * t * fma(kCubic<T> * t, t, T(1));
}

template <int kVec, typename T>
__device__ __forceinline__ void activate(T (&values)[kVec], Activation activation) {
  const auto each = [&](auto f) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = f(values[i]);
  };
  switch (activation) {
    case Activation::kNone: return;
    case Activation::kRelu: return each([](T t) { return t < 0 ? T(0) : t; });  // nan stays nan
    case Activation::kGelu: return each([](T t) { return T(0.5) * t * (1 + erf_of(t * kHalfRoot2<T>)); });
    case Activation::kGeluTanh: return each([](T t) { return t * sigmoid(twice_u(t)); });
    case Activation::kSilu: return each([](T t) { return t * sigmoid(t); });
  }
}

// grad *= the derivative at t.
template <int kVec, typename T>
__device__ __forceinline__ void activate_backward(T (&grad)[kVec], const T (&t)[kVec], Activation activation) {
  const auto each = [&](auto slope) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) grad[i] *= slope(t[i]);
  };
  // Of t * sigmoid(v), where v is v(t)
  const auto with_sigmoid = [](T t, T v, T dv) {
    const T s = sigmoid(v);
    return s + t * s * (1 - s) * dv;
  };
  switch (activation) {
    case Activation::kNone: return;
    case Activation::kRelu: return each([](T t) { return T(t > 0); });
    case Activation::kGelu:
      return each([](T t) {
        return T(0.5) * (1 + erf_of(t * kHalfRoot2<T>)) + t * kInverseRoot2Pi<T> * exp_of(T(-0.5) * t * t);
      });
    case Activation::kGeluTanh:
      return each(
          [&](T t) { return with_sigmoid(t, twice_u(t), kTwoRoot2OverPi<T> * fma(3 * kCubic<T> * t, t, T(1))); });
    case Activation::kSilu: return each([&](T t) { return with_sigmoid(t, t, T(1)); });
  }
}

}  // namespace fused_layernorm
