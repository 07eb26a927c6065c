// Activations after a norm, and their derivatives.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "kernel_params.h"

namespace fused_layernorm {

template <typename T>
constexpr T kLog2OfE = T(1.44269504088896340736);

__device__ __forceinline__ float quick_power_of_two(float t) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(t));
  return result;
}
__device__ __forceinline__ float quick_reciprocal(float t) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(t));
  return result;
}

// max(t, 0), and nan where t is, which fmaxf() would lose.
__device__ __forceinline__ double relu(double t) { return t < 0 ? 0 : t; }
__device__ __forceinline__ float relu(float t) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(t));
  return result;
#else
  return t < 0 ? 0 : t;
#endif
}

// kQuick: approximations of a few instructions, for 16-bit results. A kernel bound by memory has few instructions to
// spare (H200: about 30 for each 16-bit element, of which the norm needs ten).
template <bool kQuick, typename T>
__device__ __forceinline__ T exp_of(T t) {
  if constexpr (kQuick) {
    return quick_power_of_two(t * kLog2OfE<T>);
  } else if constexpr (sizeof(T) == 4) {
    return expf(t);
  } else {
    return exp(t);
  }
}

template <bool kQuick, typename T>
__device__ __forceinline__ T sigmoid(T t) {
  const T below = 1 + exp_of<kQuick>(-t);
  if constexpr (kQuick) {
    return quick_reciprocal(below);
  } else if constexpr (sizeof(T) == 4) {
    return __fdividef(1.0f, below);
  } else {
    return 1 / below;
  }
}

// Phi, the distribution function of the normal distribution, and its derivative, exp(-t^2/2) / sqrt(2*pi).
__device__ __forceinline__ float normal_distribution(float t) { return 0.5f * (1 + erff(t * 0.70710678f)); }
__device__ __forceinline__ double normal_distribution(double t) { return 0.5 * (1 + erf(t * 0.70710678118654752440)); }
template <typename T>
__device__ __forceinline__ T normal_density(T t) {
  return T(0.39894228040143267794) * exp_of<false>(T(-0.5) * t * t);
}

// gelu(t) = t * Phi(t). Quick: max(t, 0) - |t| * Phi(-|t|), with Phi(-a) as two to the power of a polynomial in a of
// the sixth degree, found by least squares, reweighted until the largest error relative to 1 + |gelu| was as small as
// it gets (Lawson): off by 8e-8 of that (all 16-bit numbers, by float32 arithmetic against float64), where PyTorch's
// gelu on the CPU is off by 1.2e-6. Of the fifth degree 4.4e-7.
template <bool kQuick, typename T>
__device__ __forceinline__ T gelu(T t) {
  if constexpr (kQuick) {
    constexpr float kPowers[] = {-0.999993265f,  -1.15120077f,     -0.458771646f,  -0.0534136519f,
                                 0.00808296539f, -0.000770205399f, 3.32328709e-05f};
    const float size = fminf(fabsf(t), 12.0f);  // there it is 2^-98; from 13.5 on the polynomial rises
    float power = kPowers[6];
#pragma unroll
    for (int i = 5; i >= 0; --i) power = fmaf(power, size, kPowers[i]);
    return fmaf(-size, quick_power_of_two(power), relu(t));
  } else {
    return t * normal_distribution(t);
  }
}

// By its tanh formula t * sigmoid(2u), u = sqrt(2/pi) * (t + 0.044715 * t^3).
template <typename T>
constexpr T kTwoRoot2OverPi = T(1.59576912160573071176);
template <typename T>
constexpr T kCubic = T(0.044715);

template <bool kQuick, typename T>
__device__ __forceinline__ T tanh_gate(T t) {
  if constexpr (kQuick) {
    constexpr float kLinear = -kLog2OfE<float> * kTwoRoot2OverPi<float>;  // the power of two's
    return quick_reciprocal(1 + quick_power_of_two(t * fmaf(kLinear * kCubic<float>, t * t, kLinear)));
  } else {
    return sigmoid<kQuick>(kTwoRoot2OverPi<T> * t * fma(kCubic<T> * t, t, T(1)));
  }
}

// An activation as a compile-time constant.
template <Activation activation>
struct Which {};

// Calls f(Which<activation>{}). A chain of tests, most expensive activation first, written so that nvcc emits no jump
// table, which took nine instructions (H200).
template <typename F>
__device__ __forceinline__ void with_activation(Activation activation, F&& f) {
  const auto is = [&](Activation one) {
    return (1u << static_cast<int>(activation) >> static_cast<int>(one) & 1) != 0;
  };
  if (is(Activation::kGelu)) return f(Which<Activation::kGelu>{});
  if (is(Activation::kSilu)) return f(Which<Activation::kSilu>{});
  if (is(Activation::kGeluTanh)) return f(Which<Activation::kGeluTanh>{});
  if (is(Activation::kRelu)) return f(Which<Activation::kRelu>{});
  f(Which<Activation::kNone>{});
}

// Any activation of a gate but the usual ones: a branch for each vector, for less code.
struct OtherGate {
  Activation activation;
};

// Calls f(which) for the activation of a gate: Which<kSilu>, Which<kSigmoid> or OtherGate.
template <typename F>
__device__ __forceinline__ void with_gate_activation(Activation activation, F&& f) {
  if (activation == Activation::kSilu) return f(Which<Activation::kSilu>{});
  if (activation == Activation::kSigmoid) return f(Which<Activation::kSigmoid>{});
  f(OtherGate{activation});
}

// Calls f(which, drops) with a Which and a std::bool_constant, so that the loop over a row's vectors inside f has no
// branch.
template <typename F>
__device__ __forceinline__ void with_epilogue(const Epilogue& epilogue, F&& f) {
  with_activation(epilogue.activation, [&](auto which) {
    if (epilogue.dropout.philox) {
      f(which, std::true_type{});
    } else {
      f(which, std::false_type{});
    }
  });
}

template <bool kQuick, Activation activation, typename T>
__device__ __forceinline__ T activated(Which<activation>, T t) {
  if constexpr (activation == Activation::kGelu) return gelu<kQuick>(t);
  if constexpr (activation == Activation::kSilu) return t * sigmoid<kQuick>(t);
  if constexpr (activation == Activation::kGeluTanh) return t * tanh_gate<kQuick>(t);
  if constexpr (activation == Activation::kRelu) return relu(t);
  if constexpr (activation == Activation::kSigmoid) return sigmoid<kQuick>(t);
  return t;
}
template <bool kQuick, int kVec, typename T, typename Activation>
__device__ __forceinline__ void activate(T (&values)[kVec], Activation which) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] = activated<kQuick>(which, values[i]);
}

// The derivative at t is slope(which, slope_scale(activation) * t). The caller folds the scale into weight and bias,
// which saves an operation an element.
template <bool kQuick>
constexpr float slope_scale(Activation activation) {
  if (kQuick && activation == Activation::kGelu) return 0.84932180f;  // sqrt(log2(e) / 2)
  if (kQuick && activation == Activation::kSilu) return -kLog2OfE<float>;
  return 1;
}
template <bool kQuick, Activation activation, typename T>
__device__ __forceinline__ T slope(Which<activation>, T t) {
  if constexpr (activation == Activation::kGelu && kQuick) {
    // Phi(-a) - a*phi(a) for a = |t|, by phi(a) * (R(a) - a), where Mills' ratio R is a polynomial in 1 / (1 + 0.43*a),
    // found as in gelu: off by less than 3e-6, and by 1.5e-4 of itself where it is small. Factors of
    // scaled t and of phi lie in the constants.
    constexpr float kPowers[] = {0.4645471f, 0.20525476f, 0.88405627f, -0.30054694f};
    constexpr float kScale = slope_scale<kQuick>(activation);
    const float size = fabsf(t), inverse = quick_reciprocal(fmaf(0.43f / kScale, size, 1));
    float ratio = kScale * kPowers[3];
#pragma unroll
    for (int i = 2; i >= 0; --i) ratio = fmaf(ratio, inverse, kScale * kPowers[i]);
    constexpr float kLog2OfFactor = -1.3257480647f + 0.23561678f;  // of 1 / (sqrt(2*pi) * kScale)
    const float below = quick_power_of_two(fmaf(-t, t, kLog2OfFactor)) * fmaf(ratio, inverse, -size);
    return t > 0 ? 1 - below : below;
  } else if constexpr (activation == Activation::kGelu) {
    return normal_distribution(t) + t * normal_density(t);
  } else if constexpr (activation == Activation::kSilu && kQuick) {
    constexpr float kNaturalLogOf2 = 0.69314718f;
    const float s = quick_reciprocal(1 + quick_power_of_two(t));
    return s * fmaf(t, fmaf(s, kNaturalLogOf2, -kNaturalLogOf2), 1);
  } else if constexpr (activation == Activation::kSilu) {
    const T s = sigmoid<kQuick>(t);
    return s + t * s * (1 - s);
  } else if constexpr (activation == Activation::kGeluTanh) {  // of t * sigmoid(v): s + t*s * (1-s) * dv
    const T s = tanh_gate<kQuick>(t);
    return fma(t * s, (1 - s) * fma(3 * kCubic<T> * kTwoRoot2OverPi<T>, t * t, kTwoRoot2OverPi<T>), s);
  } else if constexpr (activation == Activation::kRelu) {
    return T(!(t <= 0));  // of nan 1, as in PyTorch
  } else {
    return T(1);
  }
}
// grad *= the derivative; t is scaled by slope_scale().
template <bool kQuick, int kVec, typename T, typename Activation>
__device__ __forceinline__ void activate_backward(T (&grad)[kVec], const T (&t)[kVec], Activation which) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) grad[i] *= slope<kQuick>(which, t[i]);
}

template <bool kQuick, int kVec, typename T>
__device__ __forceinline__ void activate(T (&values)[kVec], OtherGate other) {
  with_activation(other.activation, [&](auto which) { activate<kQuick>(values, which); });
}

// A gate's activation and its derivative: both of silu and sigmoid from one sigmoid.
template <bool kQuick, int kVec, typename T, Activation activation>
__device__ __forceinline__ void gate_of(const T (&t)[kVec], T (&value)[kVec], T (&derivative)[kVec],
                                        Which<activation>) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    if constexpr (activation == Activation::kSilu || activation == Activation::kSigmoid) {
      const T s = sigmoid<kQuick>(t[i]);
      value[i] = activation == Activation::kSilu ? t[i] * s : s;
      derivative[i] = activation == Activation::kSilu ? fma(value[i], 1 - s, s) : s * (1 - s);
    } else {
      value[i] = activated<kQuick>(Which<activation>{}, t[i]);
      derivative[i] = slope<kQuick>(Which<activation>{}, t[i] * T(slope_scale<kQuick>(activation)));
    }
  }
}
template <bool kQuick, int kVec, typename T>
__device__ __forceinline__ void gate_of(const T (&t)[kVec], T (&value)[kVec], T (&derivative)[kVec], OtherGate other) {
  with_activation(other.activation, [&](auto which) { gate_of<kQuick>(t, value, derivative, which); });
}

}  // namespace fused_layernorm
