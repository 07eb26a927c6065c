// The norm with a quantized result, for inference, in one pass: the threads of a row hold it in registers. All but the
// type of z and the slots of a thread are run-time values; for what most models run there is shorter code.
#include <cuda_fp8.h>

#include "async.cuh"
#include "dispatch.cuh"
#include "forward_rows.cuh"
#include "launch_plan.h"
#include "run_time_rows.cuh"
#include "stages.cuh"
#include "vector_io.cuh"

namespace fused_layernorm {
namespace {

// The greater of two numbers that are not negative; NaN if one of them is. The bits of such floats are in their order.
__device__ __forceinline__ float greater(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float found;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(found) : "f"(a), "f"(b));
  return found;
#else
  return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b)));
#endif
}

// Off by at most a unit in the last place. The exact one has a function call for subnormal numbers, which spills.
__device__ __forceinline__ float reciprocal(float value) {
  float found;
  asm("rcp.approx.f32 %0, %1;" : "=f"(found) : "f"(value));
  return found;
}

// The greatest of each of four values over four adjacent lanes: lane i of the four gets that of value i. Three
// exchanges, where a butterfly for each value takes eight.
__device__ __forceinline__ float greatest_of_four_lanes(const float (&values)[4]) {
  const bool upper = (threadIdx.x & 2) != 0, odd = (threadIdx.x & 1) != 0;
  float kept[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float received = __shfl_xor_sync(0xffffffffu, upper ? values[i] : values[i + 2], 2);
    kept[i] = greater(upper ? values[i + 2] : values[i], received);
  }
  return greater(odd ? kept[1] : kept[0], __shfl_xor_sync(0xffffffffu, odd ? kept[0] : kept[1], 1));
}

// The codes of two numbers, the first in the lower byte.
template <CodeDType dtype>
__device__ __forceinline__ unsigned two_codes(float low, float high) {
  if constexpr (dtype == CodeDType::kInt8) {
    const auto rounded = [](float value) { return max(__float2int_rn(value), -127); };  // 0 for NaN
#if __CUDA_ARCH__ >= 720
    unsigned codes;
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(codes) : "r"(rounded(high)), "r"(rounded(low)));
    return codes;
#else
    const auto code = [&](float value) { return static_cast<unsigned>(min(rounded(value), 127)) & 0xffu; };
    return code(low) | code(high) << 8;
#endif
  } else {
    constexpr auto kind = dtype == CodeDType::kFloat8E4M3 ? __NV_E4M3 : __NV_E5M2;
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, kind);
  }
}

template <CodeDType dtype, int kVec>
__device__ __forceinline__ RawVec<uint8_t, kVec> codes_of(const float (&values)[kVec], float inverse) {
  unsigned words[kVec / 4];
#pragma unroll
  for (int i = 0; i < kVec; i += 4)
    words[i / 4] = two_codes<dtype>(values[i] * inverse, values[i + 1] * inverse) |
                   two_codes<dtype>(values[i + 2] * inverse, values[i + 3] * inverse) << 16;
  RawVec<uint8_t, kVec> raw;
  memcpy(&raw, words, sizeof(raw));
  return raw;
}

template <int kVec>
__device__ __forceinline__ float amax_of(const float (&values)[kVec]) {
  float amax = fabsf(values[0]);
#pragma unroll
  for (int i = 1; i < kVec; ++i) amax = greater(amax, fabsf(values[i]));
  return amax;
}

// What most models run has code of its own: codes of y = z * (weight + weight_offset) * rstd, where rstd goes into the
// reciprocal of the scale, and of y = x_hat * weight + bias. kAny takes every call.
enum class QuantKind { kUsualRms, kUsualLayer, kAny };

QuantKind kind_of(const NormQuantParams& params) {
  const bool is_usual = params.weight && !params.y && params.segments <= 1 &&
                        params.code_dtype != CodeDType::kFloat8E5M2 && params.x_dtype == params.z_dtype;
  const bool has_weight_of_z = params.weight_dtype == params.z_dtype;
  if (!is_usual) return QuantKind::kAny;
  if (!params.is_rms_norm)
    return has_weight_of_z && params.weight_offset == 0 ? QuantKind::kUsualLayer : QuantKind::kAny;
  return !params.bias && (has_weight_of_z || params.weight_dtype == DType::kFloat32) ? QuantKind::kUsualRms
                                                                                     : QuantKind::kAny;
}

// For finish_row(), which stores no statistics.
struct QuantNorm {
  float eps;
  bool is_rms_norm;
  static constexpr void *rstd = nullptr, *mean = nullptr, *mean_tail = nullptr;
};

template <int kHeld, QuantKind kKind>
struct QuantScratch {
  static constexpr int kSums = kKind == QuantKind::kUsualRms ? 1 : 2;
  SumScratch<kHeld, kSums, kSums> sums;
  float amax[32];  // the greatest of each warp
};

template <typename scalar_t, int kHeld, QuantKind kKind>
struct QuantRow : RunTimeRow<scalar_t, kHeld> {
  static constexpr bool kIsUsual = kKind != QuantKind::kAny;
  using Base = RunTimeRow<scalar_t, kHeld>;
  using Base::first_col, Base::for_each, Base::hidden_size, Base::kFew, Base::kVec, Base::lane, Base::row,
      Base::spans_warps, Base::step, Base::threads, Base::warp;
  using typename Base::Vec;

  const NormQuantParams& params;
  QuantScratch<kHeld, kKind>& scratch;

  __device__ __forceinline__ QuantRow(const NormQuantParams& params, QuantScratch<kHeld, kKind>& scratch,
                                      int log_threads, int slots)
      : Base(params.hidden_size, log_threads, slots), params(params), scratch(scratch) {}

  // Calls f(T()) for x, y, weight or bias: of z's type, beside fp32 z of any.
  template <typename F>
  __device__ __forceinline__ static void with_type(DType dtype, F&& f) {
    if constexpr (sizeof(scalar_t) == 2) {
      f(scalar_t());
    } else if (dtype == DType::kFloat16) {
      f(__half());
    } else if (dtype == DType::kBFloat16) {
      f(__nv_bfloat16());
    } else {
      f(float());
    }
  }

  // The greatest of a row. A row that spans warps needs a barrier between the two calls.
  __device__ __forceinline__ void share_greatest(float& amax) const {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
      if (offset < 16 || kFew || threads > 16) amax = greater(amax, __shfl_xor_sync(0xffffffffu, amax, offset));
    if (spans_warps() && lane == 0) scratch.amax[warp] = amax;
  }
  __device__ __forceinline__ float greatest(float amax) const {
    if (!spans_warps()) return amax;
    amax = lane < static_cast<int>(blockDim.x) / 32 ? scratch.amax[lane] : 0;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) amax = greater(amax, __shfl_xor_sync(0xffffffffu, amax, offset));
    return amax;
  }

  // ---- codes of y = values * factor

  __device__ __forceinline__ bool finds_scale_of_row() const {
    return !params.scale && params.group_size == hidden_size;
  }
  __device__ __forceinline__ float scale_of(float amax) const {
    return greater(amax, kLeastAmax) * params.inverse_largest;
  }

  __device__ __forceinline__ void store_y(const float (&y)[kHeld][kVec]) const {
    if (!params.y) return;
    with_type(params.y_dtype, [&](auto type) {
      auto* target = static_cast<decltype(type)*>(params.y) + row * hidden_size;
      for_each([&](int held, int col) { store_vec(target + col, y[held]); });
    });
  }

  __device__ __forceinline__ uint8_t* codes_of_row() const {
    uint8_t* codes = static_cast<uint8_t*>(params.codes) + row * hidden_size;
    asm volatile("" : "+l"(codes));  // else it is worked out again for each vector
    return codes;
  }
  __device__ __forceinline__ void store_codes(uint8_t* codes, const float (&values)[kVec], float inverse) const {
    if (!kIsUsual && params.code_dtype == CodeDType::kFloat8E5M2)
      store_raw(codes, codes_of<CodeDType::kFloat8E5M2>(values, inverse));
    else if (params.code_dtype == CodeDType::kInt8)
      store_raw(codes, codes_of<CodeDType::kInt8>(values, inverse));
    else
      store_raw(codes, codes_of<CodeDType::kFloat8E4M3>(values, inverse));
  }

  // With one scale for the row, given or found.
  __device__ __forceinline__ void quantize(const float (&values)[kHeld][kVec], float factor, float scale) const {
    if (!params.scale && first_col == 0) params.scales[row * params.scale_row_stride] = scale;
    const float inverse = reciprocal(scale) * factor;
    uint8_t* const codes = codes_of_row();
    for_each([&](int held, int col) { store_codes(codes + col, values[held], inverse); });
  }

  // With a scale for each group.
  __device__ __forceinline__ void quantize_groups(const float (&values)[kHeld][kVec], float factor) const {
    const int group_size = static_cast<int>(params.group_size), shift = __ffs(group_size) - 1;
    float* scales = params.scales + row * params.scale_row_stride;
    uint8_t* const codes = codes_of_row();
    // Four vectors at a time, for whose groups lane i of each four then has the scale of vector i
#pragma unroll
    for (int from = 0; from < kHeld; from += 4) {
      float most[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) most[i] = from + i < kHeld ? amax_of(values[std::min(from + i, kHeld - 1)]) : 0;
      float amax = greatest_of_four_lanes(most);
#pragma unroll
      for (int offset = 4; offset <= kQuantGroup / kVec / 2; offset *= 2)
        if (2 * offset * kVec <= group_size) amax = greater(amax, __shfl_xor_sync(0xffffffffu, amax, offset));
      const float scale = scale_of(amax * factor), inverse = reciprocal(scale) * factor;
      const int mine = from + lane % 4, col = first_col + mine * step;
      if ((first_col & (group_size - 1)) < 4 * kVec && mine < kHeld && col < hidden_size)
        scales[(col >> shift) * params.scale_group_stride] = scale;
#pragma unroll
      for (int i = 0; i < 4 && from + i < kHeld; ++i) {
        const float of_vector = __shfl_sync(0xffffffffu, inverse, i, 4);
        const int col = first_col + (from + i) * step;
        if (col < hidden_size) store_codes(codes + col, values[from + i], of_vector);
      }
    }
  }
};

template <int kHeld>
constexpr int kQuantBlock = kHeld == 1 ? kUsualFewRows.block : most_quant_threads(kHeld);

template <typename scalar_t, int kHeld, QuantKind kKind>
__global__ void __launch_bounds__(kQuantBlock<kHeld>)
    norm_quant_kernel(const __grid_constant__ NormQuantParams params, int log_threads, int slots, float inverse_n,
                      float eps, float weight_offset) {
  using Row = QuantRow<scalar_t, kHeld, kKind>;
  using Vec = typename Row::Vec;
  constexpr int kVec = Row::kVec;
  __shared__ QuantScratch<kHeld, kKind> scratch;
  const Row row(params, scratch, log_threads, slots);
  if (row.row >= params.rows) return;  // rows that share a warp: as in norm_forward_kernel
  wait_for_previous_kernel();
  // Loaded late, for lack of registers: weights of another type than z, and for many rows of LayerNorm the scale
  constexpr bool kEarly = Row::kFew || kKind == QuantKind::kUsualRms;
  float given = 0;
  const auto load_scale = [&] {
    if (kEarly && params.scale) given = *params.scale;
  };

  float values[kHeld][kVec] = {}, amax = 0, factor = 1;
  const auto find_greatest = [&] {
    if (!row.finds_scale_of_row()) return;
#pragma unroll
    for (int held = 0; held < kHeld; ++held) amax = greater(amax, amax_of(values[held]));
    row.share_greatest(amax);
  };
  if constexpr (kKind == QuantKind::kUsualRms) {
    UsualVectors<scalar_t, kHeld> vectors;
#pragma unroll
    for (auto& weights : vectors.weights) weights = zero_vec<scalar_t, kVec>();
    const bool is_early = params.weight_dtype == dtype_of<scalar_t>;
    typename Row::template First<scalar_t> unused;
    row.template load<scalar_t, false>(vectors.z, unused, params, [&] {
      if (is_early) row.for_each([&](int held, int col) { vectors.load_weight(params, held, col); });
      load_scale();
    });
    float sum[1] = {};
    const auto take = [&](int held, const auto& weight) {
      float scale[kVec], squares = 0;
      unpack(vectors.z[held], values[held]);
      unpack(weight, scale);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        squares = fma(values[held][i], values[held][i], squares);
        values[held][i] *= scale[i] + weight_offset;
      }
      sum[0] += squares;
    };
    if (is_early) {
#pragma unroll
      for (int held = 0; held < kHeld; ++held) take(held, vectors.weights[held]);
    } else {
      row.for_each([&](int held, int col) {
        take(held, load_vec<float, kVec, true>(static_cast<const float*>(params.weight) + col));
      });
    }
    find_greatest();
    row.add_up(sum, scratch.sums, 0);
    factor = inverse_sqrt(fma(sum[0], inverse_n, eps));
  } else if constexpr (kKind == QuantKind::kUsualLayer) {
    UsualVectors<scalar_t, kHeld, false> vectors;
    const Moments<float> moments = vectors.load_for_layer_norm(row, params, inverse_n, scratch.sums, load_scale);
    const RowNorm<float> norm = finish_row(moments, inverse_n, QuantNorm{eps, false}, row.row, /*saves=*/false);
    if (params.scale) {  // a vector at a time
      optimization_barrier(vectors.z);
      const float inverse = reciprocal(kEarly ? given : *params.scale);
      uint8_t* const codes = row.codes_of_row();
      return row.for_each([&](int held, int col) {
        float y[kVec];
        vectors.layer_norm(y, norm, params, held, col);
        row.store_codes(codes + col, y, inverse);
      });
    }
    optimization_barrier(vectors.z);
    row.for_each([&](int held, int col) { vectors.layer_norm(values[held], norm, params, held, col); });
    find_greatest();
    if (row.spans_warps() && row.finds_scale_of_row()) __syncthreads();
  } else {
    Vec z[kHeld];
    float near_mean = 0;
    Row::with_type(params.x_dtype, [&](auto type) {
      using x_t = decltype(type);
      typename Row::template First<x_t> first;
      row.template load<x_t, true>(z, first, params, load_scale);
      if (!params.is_rms_norm) near_mean = first.median();
    });
    const Moments<float> moments = row.moments(
        z, near_mean, most_offset_of(params.is_rms_norm, dtype_of<scalar_t>, dtype_of<scalar_t>, dtype_of<scalar_t>),
        inverse_n, scratch.sums, [] {});
    const RowNorm<float> norm =
        finish_row(moments, inverse_n, QuantNorm{eps, params.is_rms_norm}, row.row, /*saves=*/false);
    const int64_t at = parameters_of(params, row.row);
    const auto normalize = [&](auto type) {
      using T = decltype(type);
      row.for_each([&](int held, int col) {
        float parameter[kVec];
        const auto load = [&](const void* source) {
          unpack(load_vec<T, kVec, true>(static_cast<const T*>(source) + at + col), parameter);
        };
        unpack(z[held], values[held]);
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[held][i] = norm.x_hat(values[held][i]);
        if (params.weight) {
          load(params.weight);
#pragma unroll
          for (int i = 0; i < kVec; ++i) values[held][i] *= parameter[i] + weight_offset;
        }
        if (params.bias) {
          load(params.bias);
#pragma unroll
          for (int i = 0; i < kVec; ++i) values[held][i] += parameter[i];
        }
        if (sizeof(T) > sizeof(scalar_t)) asm volatile("" ::: "memory");  // a vector at a time, for lack of registers
      });
    };
    if (sizeof(scalar_t) == 2 && params.weight_dtype == DType::kFloat32)
      normalize(float());
    else
      Row::with_type(params.weight_dtype, normalize);
    find_greatest();
    if (row.spans_warps()) __syncthreads();
    row.store_y(values);
  }

  if (row.finds_scale_of_row())
    row.quantize(values, factor, row.scale_of(row.greatest(amax) * factor));
  else if (params.scale)
    row.quantize(values, factor, kEarly ? given : *params.scale);
  else
    row.quantize_groups(values, factor);
}

template <typename scalar_t, QuantKind kKind>
cudaError_t launch_norm_quant(const NormQuantParams& params, cudaStream_t stream) {
  const RunTimePlan plan =
      RunTimePlan::of(params.hidden_size, sizeof(scalar_t), params.rows,
                      kQuantGroup * static_cast<int>(sizeof(scalar_t)) / 16, kUsualFewRows, most_quant_threads);
  return with_constant<1, 3, 4, 5>(plan.held, [&](auto held) {
    const OverlappedLaunch launch(dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.block), stream);
    return cudaLaunchKernelEx(&launch.config, norm_quant_kernel<scalar_t, decltype(held)::value, kKind>, params,
                              plan.log_threads, plan.slots, inverse_of<float>(params.hidden_size),
                              static_cast<float>(params.eps),
                              static_cast<float>(params.weight ? params.weight_offset : 0));
  });
}

}  // namespace

int launch_norm_quant_cuda(const NormQuantParams& params, CUstream_st* stream) {
  return dispatch_type(params.z_dtype, [&](auto types) -> cudaError_t {
    using scalar_t = typename decltype(types)::scalar_t;
    if constexpr (sizeof(scalar_t) == 8) {
      return cudaErrorInvalidValue;
    } else {
      switch (kind_of(params)) {
        case QuantKind::kUsualRms: return launch_norm_quant<scalar_t, QuantKind::kUsualRms>(params, stream);
        case QuantKind::kUsualLayer: return launch_norm_quant<scalar_t, QuantKind::kUsualLayer>(params, stream);
        default: return launch_norm_quant<scalar_t, QuantKind::kAny>(params, stream);
      }
    }
  });
}

}  // namespace fused_layernorm
