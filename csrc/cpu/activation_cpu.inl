// Activations after a norm and their derivatives, of vectors: what activation.cuh is for CUDA. Part of
// norm_cpu_rows.inl.

// Calls f(lane) for each lane of fp64, where this library has no functions of its own.
template <class F>
FLN_INLINE DoubleVec of_lanes(DoubleVec t, F f) {
  double lanes[kLanes<double>];
  memcpy(lanes, &t, sizeof(t));
  for (int k = 0; k < kLanes<double>; ++k) lanes[k] = f(lanes[k]);
  memcpy(&t, lanes, sizeof(t));
  return t;
}

FLN_INLINE DoubleVec exp_of(DoubleVec t) {
  return of_lanes(t, [](double lane) FLN_INLINE_LAMBDA { return exp(lane); });
}

// max(limit, t) and min(limit, t), NaN where t is NaN: the second operand of these instructions.
template <class V>
FLN_INLINE V at_least(V limit, V t) {
#if FLN_VECTOR_BYTES == 64
  if constexpr (std::is_same<V, FloatVec>::value) return (V)_mm512_maskz_max_ps(0xffff, (__m512)limit, (__m512)t);
#elif FLN_VECTOR_BYTES == 32
  if constexpr (std::is_same<V, FloatVec>::value) return (V)_mm256_max_ps((__m256)limit, (__m256)t);
#endif
  return t < limit ? limit : t;
}
template <class V>
FLN_INLINE V at_most(V limit, V t) {
#if FLN_VECTOR_BYTES == 64
  if constexpr (std::is_same<V, FloatVec>::value) return (V)_mm512_maskz_min_ps(0xffff, (__m512)limit, (__m512)t);
#elif FLN_VECTOR_BYTES == 32
  if constexpr (std::is_same<V, FloatVec>::value) return (V)_mm256_min_ps((__m256)limit, (__m256)t);
#endif
  return t > limit ? limit : t;
}

// 2^n * e^r with |r| <= ln(2) / 2, e^r by a polynomial of the sixth degree (least squares, reweighted until the largest
// relative error, 4e-9, was as small as it gets). Without AVX-512, 2^n in two factors, as results may be infinite or
// subnormal.
FLN_INLINE FloatVec exp_of(FloatVec t) {
  constexpr float kPowers[] = {0.49999994f, 0.166665211f, 0.041668389f, 0.00836871751f, 0.00138145976f};
  constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: of a sum with it no fraction is left
  t = at_most(FloatVec{} + 90.0f, at_least(FloatVec{} - 150.0f, t));
  const FloatVec shifted = t * 1.44269504f + kToInteger, n = shifted - kToInteger;
  const FloatVec r = (t - n * 0.693359375f) - n * -2.12194440e-4f;  // ln(2) in two parts, of which the first is exact
  FloatVec power = FloatVec{} + kPowers[4];
  for (int i = 3; i >= 0; --i) power = power * r + kPowers[i];
  power = power * (r * r) + r + 1.0f;
#if FLN_VECTOR_BYTES == 64
  return (FloatVec)_mm512_maskz_scalef_ps(0xffff, (__m512)power, (__m512)n);
#else
  const Bits32 twice = bits_as<Bits32>(shifted) - (bits_as<Bits32>(FloatVec{} + kToInteger) - 254u);  // n + 254
  const Bits32 half = twice >> 1;
  return power * bits_as<FloatVec>(half << 23) * bits_as<FloatVec>((twice - half) << 23);
#endif
}

// max(t, 0), and NaN where t is.
template <class V>
FLN_INLINE V relu_of(V t) {
  return at_least(V{}, t);
}

template <class V>
FLN_INLINE V size_of(V t) {
  return at_least(-t, t);
}

template <class V>
FLN_INLINE V sigmoid(V t) {
  return 1 / (1 + exp_of(-t));
}

// Phi(-size), Phi being the distribution function of the normal distribution, and its density there.
template <class V>
struct Normal {
  V below, density;
};

FLN_INLINE Normal<DoubleVec> normal_of(DoubleVec size) {
  return {of_lanes(size, [](double lane) FLN_INLINE_LAMBDA { return 0.5 * erfc(lane * 0.70710678118654752440); }),
          0.39894228040143267794 * exp_of(-0.5 * size * size)};
}

// By Mills' ratio Phi(-a) / phi(a) as a polynomial of the ninth degree in 1 / (1 + 0.26 * a), found as in exp_of: off
// by 6e-7 of itself up to a = 14, where Phi is 8e-45. (By float32 arithmetic, against float64, gelu is off by 8e-8 of
// 1 + |gelu|, PyTorch's on the CPU by 1e-6.)
FLN_INLINE Normal<FloatVec> normal_of(FloatVec size) {
  constexpr float kPowers[] = {0.26002875f,   0.259045452f, 0.253435791f,  0.142936632f, 0.376275897f,
                               -0.349404216f, 0.612912118f, -0.377888024f, 0.0759717748f};
  const FloatVec inverse = 1.0f / (1.0f + 0.26f * size);
  FloatVec ratio = FloatVec{} + kPowers[8];
  for (int i = 7; i >= 0; --i) ratio = ratio * inverse + kPowers[i];
  const FloatVec density = 0.39894228f * exp_of(-0.5f * size * size);
  return {density * (ratio * inverse), density};
}

// By gelu's tanh formula, t * sigmoid(2u) with u = sqrt(2/pi) * (t + 0.044715 * t^3).
template <class acc_t, class V>
FLN_INLINE V tanh_gate(V t) {
  return sigmoid(acc_t(1.59576912160573071176) * t * (1 + acc_t(0.044715) * t * t));
}

template <Activation activation, class acc_t>
FLN_INLINE Vec<acc_t> activated(Vec<acc_t> t) {
  using V = Vec<acc_t>;
  if constexpr (activation == Activation::kGelu) {        // max(t, 0) - |t| * Phi(-|t|)
    const V size = at_most(V{} + acc_t(40), size_of(t));  // of inf the product were NaN
    return relu_of(t) - size * normal_of(size).below;
  } else if constexpr (activation == Activation::kSilu) {
    return t * sigmoid(t);
  } else if constexpr (activation == Activation::kGeluTanh) {
    return t * tanh_gate<acc_t>(t);
  } else if constexpr (activation == Activation::kRelu) {
    return relu_of(t);
  } else if constexpr (activation == Activation::kSigmoid) {
    return sigmoid(t);
  } else {
    return t;
  }
}

// The derivative at t.
template <Activation activation, class acc_t>
FLN_INLINE Vec<acc_t> slope(Vec<acc_t> t) {
  using V = Vec<acc_t>;
  if constexpr (activation == Activation::kGelu) {  // Phi(t) + t * phi(t)
    const V size = at_most(V{} + acc_t(40), size_of(t));
    const Normal<V> normal = normal_of(size);
    const V below = normal.below - size * normal.density;
    return t > 0 ? 1 - below : below;
  } else if constexpr (activation == Activation::kSilu) {
    const V s = sigmoid(t);
    return s + t * s * (1 - s);
  } else if constexpr (activation == Activation::kGeluTanh) {  // of t * sigmoid(v): s + t*s * (1-s) * dv
    constexpr acc_t kLinear = acc_t(1.59576912160573071176), kCubic = acc_t(3 * 0.044715) * kLinear;
    const V s = tanh_gate<acc_t>(t);
    return s + t * s * (1 - s) * (kLinear + kCubic * t * t);
  } else if constexpr (activation == Activation::kRelu) {
    return t <= 0 ? V{} : V{} + acc_t(1);  // of NaN 1, as in PyTorch
  } else if constexpr (activation == Activation::kSigmoid) {
    const V s = sigmoid(t);
    return s * (1 - s);
  } else {
    return V{} + acc_t(1);
  }
}
