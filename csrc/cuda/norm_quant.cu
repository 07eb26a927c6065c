// The norm with a quantized result, for inference, in one pass: a group of threads, or a cluster, holds each row of z
// in registers. All but the type of z is a run-time value.
#include <cuda_fp8.h>

#include "async.cuh"
#include "dispatch.cuh"
#include "forward_rows.cuh"
#include "launch_plan.h"
#include "reduce.cuh"
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

template <int kOffset>
__device__ __forceinline__ float greatest_of_lanes(float value) {
#pragma unroll
  for (int offset = kOffset; offset > 0; offset /= 2)
    value = greater(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

// The codes of two numbers, the first in the lower byte.
template <CodeDType dtype>
__device__ __forceinline__ unsigned two_codes(float low, float high) {
  if constexpr (dtype == CodeDType::kInt8) {
    const auto code = [](float value) {  // 0 for NaN
      return static_cast<unsigned>(max(min(__float2int_rn(value), 127), -127)) & 0xffu;
    };
    return code(low) | code(high) << 8;
  } else {
    constexpr auto kind = dtype == CodeDType::kFloat8E4M3 ? __NV_E4M3 : __NV_E5M2;
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, kind);
  }
}

// Calls f(CodeDType as a constant).
template <typename F>
__device__ __forceinline__ void with_codes(CodeDType dtype, F&& f) {
  switch (dtype) {
    case CodeDType::kFloat8E4M3: return f(std::integral_constant<CodeDType, CodeDType::kFloat8E4M3>());
    case CodeDType::kFloat8E5M2: return f(std::integral_constant<CodeDType, CodeDType::kFloat8E5M2>());
    case CodeDType::kInt8: return f(std::integral_constant<CodeDType, CodeDType::kInt8>());
  }
}

// This thread's part of a row. All threads of the row call load(), norm() and quantize(), in this order.
template <typename scalar_t, typename Plan>
struct QuantRow {
  static constexpr int kThreads = Plan::kThreads, kVecs = Plan::kVecs, kVec = Plan::kVec;
  // Interleaved, not by warps (kByWarps): rows that leave slots empty leave as many in each warp
  static constexpr int kStep = kThreads * kVec;
  static_assert(kStep % kQuantGroup == 0 && 32 * kVec >= kQuantGroup, "lanes of one warp hold a group, in one slot");
  using Row = RowThreads<kThreads, kForwardThreads<Plan> / kThreads, true>;
  using Slots = RegisterSlots<Plan, false>;
  template <typename T>
  using Raw = RawVec<T, kVec>;

  const NormQuantParams& params;
  float weight_offset;  // params' in fp32: an operand of its own, in no register
  int64_t row;
  int blocks;    // that share the row
  int first;     // column of this block's slice
  int elements;  // from there to the end of the slice; perhaps < 0
  int own;       // offset of this thread's first vector in the slice
  Slots slots;
  Raw<scalar_t> z[kVecs];

  __device__ __forceinline__ QuantRow(const NormQuantParams& params, float weight_offset, int64_t row, int blocks)
      : params(params),
        weight_offset(weight_offset),
        row(row),
        blocks(blocks),
        first(blocks > 1 ? static_cast<int>(cluster_rank()) * slice_of(params, blocks) : 0),
        elements(min(blocks > 1 ? slice_of(params, blocks) : 1 << 30, static_cast<int>(params.hidden_size) - first)),
        own(Row::rank() * kVec),
        slots(elements, own) {}

  __device__ static int slice_of(const NormQuantParams& params, int blocks) {  // of whole groups
    const int groups = (static_cast<int>(params.hidden_size) + kQuantGroup - 1) / kQuantGroup;
    return (groups + blocks - 1) / blocks * kQuantGroup;
  }
  __device__ __forceinline__ int col(int v) const { return first + own + v * kStep; }

  // Calls f(v) for each vector v that this thread has.
  template <typename F>
  __device__ __forceinline__ void for_each(F&& f) const {
#pragma unroll
    for (int v = 0; v < kVecs; ++v)
      if (slots.count(v) > 0) f(v);
  }

  // Calls f(T()) for a tensor beside z: of z's type, or beside fp32 z of any.
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

  __device__ __forceinline__ void load() {
    with_type(params.x_dtype, [&](auto zero) {
      using x_t = decltype(zero);
      const x_t* x = static_cast<const x_t*>(params.x) + params.x_strides.offset(row);
      if (params.residual) return add_residual(x);
      if constexpr (std::is_same<x_t, scalar_t>::value) {
#pragma unroll
        for (int v = 0; v < kVecs; ++v) z[v] = load_or_zero(x + col(0), v);
      }
    });
  }

  template <typename T>
  __device__ __forceinline__ Raw<T> load_or_zero(const T* first_vec, int v) const {
    return slots.count(v) > 0 ? load_vec<T, kVec>(first_vec + v * kStep) : zero_vec<T, kVec>();
  }

  template <typename x_t>
  __device__ __forceinline__ void add_residual(const x_t* x) {
    const scalar_t* residual = static_cast<const scalar_t*>(params.residual) + params.residual_strides.offset(row);
    scalar_t* out = static_cast<scalar_t*>(params.residual_out) + row * params.hidden_size + col(0);
    Raw<x_t> x_raw[kVecs];
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      x_raw[v] = load_or_zero(x + col(0), v);
      z[v] = load_or_zero(residual + col(0), v);
    }
    for_each([&](int v) {
      float sum[kVec], other[kVec];
      unpack(z[v], sum);
      unpack(x_raw[v], other);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum[i] += other[i];
      z[v] = pack<scalar_t>(sum);
      store_raw(out + v * kStep, z[v]);
    });
  }

  __device__ __forceinline__ RowNorm<float> norm(float inverse_n, Moments<float>* scratch,
                                                 Moments<float>* cluster_scratch) {
    if (params.is_rms_norm && !Plan::kClusters) {  // fewer instructions of a row than with moments
      float sum = 0;
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        float values[kVec], squares = 0;
        unpack(z[v], values);
#pragma unroll
        for (int i = 0; i < kVec; ++i) squares = fma(values[i], values[i], squares);
        sum += squares;
      }
      sum = sum_of_row(sum, &scratch->n);
      return {0, inverse_sqrt(fma(sum, inverse_n, static_cast<float>(params.eps))), 0};
    }
    const int rank = Row::rank();
    Moments<float> part = tile_moments<Row, Plan>(z, slots, elements, rank, params.is_rms_norm);
    part.n = static_cast<float>(slots.count_of(kVecs, rank / Row::kLanes * Row::kLanes, Row::kLanes));
    part = whole_row_moments<Row>(part, blocks, elements, inverse_n, scratch, cluster_scratch, rank);
    return finish_row(part, inverse_n, params, row, false);
  }

  __device__ __forceinline__ static float sum_of_row(float sum, float* scratch) {
    sum = Row::warp_sum(sum);
    if constexpr (Row::kWarps > 1) {
      if (threadIdx.x % 32 == 0) scratch[Row::warp()] = sum;
      Row::barrier();
      sum = Row::template lanes_sum<Row::kWarps>(scratch[threadIdx.x % Row::kWarps]);
    }
    return sum;
  }

  // ---- y and its codes
  //
  // y is values * factor. RMSNorm with a weight of z's dtype and codes of e4m3 or int8, as most models have it, has
  // code of its own (Product), with rstd, the factor, in the reciprocal of the scale.

  __device__ __forceinline__ void quantize(const RowNorm<float>& norm, float* scratch, float* cluster_scratch) {
    if constexpr (kWidenAnew<Plan>) optimization_barrier(z);
    const int64_t at = parameters_of(params, row) + col(0);
    const bool is_product =
        params.is_rms_norm && params.weight && params.weight_dtype == dtype_of<scalar_t> && !params.bias && !params.y;
    if (is_product && params.code_dtype == CodeDType::kFloat8E4M3)
      return quantize(Product<CodeDType::kFloat8E4M3>{*this, at, norm.rstd}, scratch, cluster_scratch);
    if (is_product && params.code_dtype == CodeDType::kInt8)
      return quantize(Product<CodeDType::kInt8>{*this, at, norm.rstd}, scratch, cluster_scratch);
    quantize(AnyNorm{*this, at, norm}, scratch, cluster_scratch);
  }

  // x * (weight + weight_offset). Of a vector that this thread does not have, z and so the values are 0.
  template <CodeDType dtype>
  struct Product {
    const QuantRow& row;
    int64_t at;  // of weight
    float factor;

    __device__ __forceinline__ void get(int v, float (&values)[kVec]) const {
      const scalar_t* weight = static_cast<const scalar_t*>(row.params.weight) + at + v * kStep;
      float scale[kVec];
      unpack(row.z[v], values);
      unpack(load_some<scalar_t, kVec>(weight, row.slots.count(v)), scale);
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[i] *= scale[i] + row.weight_offset;
    }
    template <typename F>
    __device__ __forceinline__ void store(int, const float (&)[kVec], F&& with_codes_of) const {
      with_codes_of(std::integral_constant<CodeDType, dtype>());
    }
  };

  // y.
  struct AnyNorm {
    static constexpr float factor = 1;
    const QuantRow& row;
    int64_t at;  // of weight and bias
    RowNorm<float> norm;

    __device__ __forceinline__ void get(int v, float (&y)[kVec]) const {
      const NormQuantParams& params = row.params;
      if (row.slots.count(v) <= 0) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) y[i] = 0;
        return;
      }
      unpack(row.z[v], y);
      const auto by = [&](auto zero) {
        using T = decltype(zero);
        const auto load = [&](const void* parameter, Raw<T> neutral) {
          return load_parameter<kVec, true>(static_cast<const T*>(parameter) + at + v * kStep, kVec, parameter,
                                            neutral);
        };
        const Raw<T> weight = load(params.weight, one_vec<T, kVec>()), bias = load(params.bias, zero_vec<T, kVec>());
        float scale[kVec], shift[kVec];
        unpack(weight, scale);
        unpack(bias, shift);
#pragma unroll
        for (int i = 0; i < kVec; ++i) y[i] = fma(norm.x_hat(y[i]), scale[i] + row.weight_offset, shift[i]);
      };
      if (sizeof(scalar_t) == 2 && params.weight_dtype == DType::kFloat32) return by(float());
      with_type(params.weight_dtype, by);
    }
    template <typename F>
    __device__ __forceinline__ void store(int v, const float (&y)[kVec], F&& with_codes_of) const {
      const NormQuantParams& params = row.params;
      if (params.y)
        with_type(params.y_dtype, [&](auto zero) {
          store_vec(static_cast<decltype(zero)*>(params.y) + row.row * params.hidden_size + row.col(v), y);
        });
      with_codes(params.code_dtype, with_codes_of);
    }
  };

  template <typename Source>
  __device__ __forceinline__ void quantize(const Source& source, float* scratch, float* cluster_scratch) {
    if (params.scale) {
      const float inverse = __frcp_rn(*params.scale) * source.factor;
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        float values[kVec];
        source.get(v, values);
        store(source, v, values, inverse);
      }
      return;
    }
    if (params.group_size != params.hidden_size) return quantize_groups(source);
    float values[kVecs][kVec], amax = 0;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      source.get(v, values[v]);
      amax = greater(amax, amax_of(values[v]));
    }
    const float scale = scale_of(amax_of_row(amax, scratch, cluster_scratch) * source.factor);
    if (Row::rank() == 0 && first == 0) params.scales[row * params.scale_row_stride] = scale;
    const float inverse = __frcp_rn(scale) * source.factor;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) store(source, v, values[v], inverse);
  }

  // Four vectors at a time, for whose groups lane i of each four then has the scale of vector i.
  template <typename Source>
  __device__ __forceinline__ void quantize_groups(const Source& source) {
    const int group_size = static_cast<int>(params.group_size), shift = __ffs(group_size) - 1;
    const int in_four = static_cast<int>(threadIdx.x) % 4;
    float* scales = params.scales + row * params.scale_row_stride;
#pragma unroll
    for (int from = 0; from < kVecs; from += 4) {
      float values[4][kVec], most[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (from + i < kVecs) source.get(from + i, values[i]);
        most[i] = from + i < kVecs ? amax_of(values[i]) : 0;
      }
      float amax = greatest_of_four_lanes(most);
#pragma unroll
      for (int offset = 4; offset <= kQuantGroup / kVec / 2; offset *= 2)
        if (2 * offset * kVec <= group_size) amax = greater(amax, __shfl_xor_sync(0xffffffffu, amax, offset));
      const float scale = scale_of(amax * source.factor);
      const int mine = from + in_four;
      if (mine < kVecs && slots.count(mine) > 0 && (own & (group_size - 1)) < 4 * kVec)
        scales[(col(mine) >> shift) * params.scale_group_stride] = scale;
      // A unit in the last place more or less than 1 / scale
      const float inverse = __fdividef(source.factor, scale);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float of_vector = __shfl_sync(0xffffffffu, inverse, i, 4);
        if (from + i < kVecs) store(source, from + i, values[i], of_vector);
      }
    }
  }

  __device__ __forceinline__ static float amax_of(const float (&y)[kVec]) {
    float amax = fabsf(y[0]);
#pragma unroll
    for (int i = 1; i < kVec; ++i) amax = greater(amax, fabsf(y[i]));
    return amax;
  }

  __device__ __forceinline__ float scale_of(float amax) const {
    return greater(amax, kLeastAmax) * params.inverse_largest;
  }

  __device__ __forceinline__ float amax_of_row(float amax, float* scratch, float* cluster_scratch) const {
    amax = greatest_of_lanes<Row::kLanes / 2>(amax);
    if constexpr (Row::kWarps > 1) {
      if (threadIdx.x % 32 == 0) scratch[Row::warp()] = amax;
      Row::barrier();
      amax = greatest_of_lanes<Row::kWarps / 2>(scratch[threadIdx.x % Row::kWarps]);
    }
    if (Plan::kClusters && blocks > 1) {
      if (threadIdx.x < blocks) push_to_peer(cluster_scratch + cluster_rank(), threadIdx.x, amax);
      cluster_sync();
      amax = greatest_of_lanes<kMaxCluster / 2>(cluster_scratch[threadIdx.x % blocks]);
    }
    return amax;
  }

  template <typename Source>
  __device__ __forceinline__ void store(const Source& source, int v, const float (&values)[kVec], float inverse) const {
    if (slots.count(v) <= 0) return;
    source.store(v, values, [&](auto dtype) {
      constexpr CodeDType kCodes = decltype(dtype)::value;
      unsigned words[kVec / 4];
#pragma unroll
      for (int i = 0; i < kVec; i += 4)
        words[i / 4] = two_codes<kCodes>(values[i] * inverse, values[i + 1] * inverse) |
                       two_codes<kCodes>(values[i + 2] * inverse, values[i + 3] * inverse) << 16;
      Raw<uint8_t> raw;
      memcpy(&raw, words, sizeof(raw));
      store_raw(static_cast<uint8_t*>(params.codes) + row * params.hidden_size + col(0) + v * kStep, raw);
    });
  }
};

template <typename scalar_t, typename Plan>
__global__ void __launch_bounds__(kForwardThreads<Plan>, quant_blocks_per_sm<Plan>())
    norm_quant_kernel(const __grid_constant__ NormQuantParams params, float inverse_n, float weight_offset) {
  using Quant = QuantRow<scalar_t, Plan>;
  using Row = typename Quant::Row;
  constexpr int kRows = kForwardThreads<Plan> / Plan::kThreads;
  __shared__ Moments<float> scratch[kRows * Row::kWarps];
  __shared__ Moments<float> cluster_scratch[Plan::kClusters ? kMaxCluster : 1];
  __shared__ float amax_scratch[Row::kWarps], amax_cluster_scratch[Plan::kClusters ? kMaxCluster : 1];

  const int blocks = Plan::kClusters ? cluster_size() : 1;
  const int64_t row = static_cast<int64_t>(blockIdx.x / blocks) * kRows + Row::group();
  // Return, do not skip: rows that share a warp name all of its lanes in their exchanges (whole_warps in reduce.cuh)
  if (row >= params.rows) return;
  if (blocks > 1) cluster_arrive();
  Quant quant(params, weight_offset, row, blocks);
  quant.load();
  const RowNorm<float> norm = quant.norm(inverse_n, scratch, cluster_scratch);
  quant.quantize(norm, amax_scratch, amax_cluster_scratch);
}

}  // namespace

int launch_norm_quant_cuda(const NormQuantParams& params, CUstream_st* stream) {
  DeviceFacts facts;
  const cudaError_t error = device_facts(facts);
  if (error != cudaSuccess) return error;
  return dispatch_type(params.z_dtype, [&](auto types) -> cudaError_t {
    using scalar_t = typename decltype(types)::scalar_t;
    if constexpr (sizeof(scalar_t) == 8) {
      return cudaErrorInvalidValue;
    } else {
      return dispatch_plan<QuantLadder<scalar_t>>(params.hidden_size, facts.max_cluster, [&](auto plan) {
        using Plan = decltype(plan);
        constexpr int kRows = kForwardThreads<Plan> / Plan::kThreads;
        const int cluster = cluster_for<Plan>(vecs_of<Plan::kVec>(params.hidden_size), facts.max_cluster);
        if (params.hidden_size > int64_t{Plan::kThreads} * Plan::kVecs * Plan::kVec * cluster)
          return cudaErrorNotSupported;
        const ClusterLaunch launch((params.rows + kRows - 1) / kRows * cluster, kForwardThreads<Plan>, 0, cluster,
                                   stream);
        return cudaLaunchKernelEx(&launch.config, norm_quant_kernel<scalar_t, Plan>, params,
                                  inverse_of<float>(params.hidden_size),
                                  static_cast<float>(params.weight ? params.weight_offset : 0));
      });
    }
  });
}

}  // namespace fused_layernorm
