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

template <int kOffset>
__device__ __forceinline__ float greatest_of_lanes(float value) {
#pragma unroll
  for (int offset = kOffset; offset > 0; offset /= 2)
    value = greater(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

// Of two numbers, the first in the lower byte.
template <__nv_fp8_interpretation_t kind>
__device__ __forceinline__ unsigned two_codes(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, kind);
}
__device__ __forceinline__ unsigned int8_code(float value) {  // 0 for NaN
  return static_cast<unsigned>(max(min(__float2int_rn(value), 127), -127)) & 0xffu;
}

// This thread's part of a row. All threads of the row call load(), moments() and quantize(), in this order.
template <typename scalar_t, typename Plan>
struct QuantRow {
  static constexpr int kThreads = Plan::kThreads, kVecs = Plan::kVecs, kVec = Plan::kVec;
  // Adjacent threads: all of the row, or one warp that has a contiguous slice of it
  static constexpr int kSpan = kByWarps<Plan> ? 32 : kThreads;
  static constexpr int kStep = kSpan * kVec;
  static_assert(kStep % kQuantGroup == 0 && 32 * kVec >= kQuantGroup, "lanes of one warp hold a group, in one slot");
  using Row = RowThreads<kThreads, kForwardThreads<Plan> / kThreads, true>;
  using Slots = RegisterSlots<Plan, false, kSpan>;
  template <typename T>
  using Raw = RawVec<T, kVec>;

  const NormQuantParams& params;
  int64_t row;
  int blocks;    // that share the row
  int first;     // column of this thread's slice
  int elements;  // from there to the end of the slice; perhaps < 0
  int own;       // offset of this thread's first vector in the slice
  Slots slots;
  Raw<scalar_t> z[kVecs];

  __device__ __forceinline__ QuantRow(const NormQuantParams& params, int64_t row, int blocks)
      : params(params),
        row(row),
        blocks(blocks),
        first(blocks > 1       ? static_cast<int>(cluster_rank()) * slice_of(params, blocks)
              : kByWarps<Plan> ? Row::rank() / 32 * kVecs * kStep
                               : 0),
        elements(min(blocks > 1 ? slice_of(params, blocks) : 1 << 30, static_cast<int>(params.hidden_size) - first)),
        own(Row::rank() % kSpan * kVec),
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
      if constexpr (std::is_same<x_t, scalar_t>::value)
        for_each([&](int v) { z[v] = load_vec<x_t, kVec>(x + col(v)); });
    });
  }

  template <typename x_t>
  __device__ __forceinline__ void add_residual(const x_t* x) {
    const scalar_t* residual = static_cast<const scalar_t*>(params.residual) + params.residual_strides.offset(row);
    scalar_t* out = static_cast<scalar_t*>(params.residual_out) + row * params.hidden_size;
    Raw<x_t> x_raw[kVecs];
    for_each([&](int v) {
      x_raw[v] = load_vec<x_t, kVec>(x + col(v));
      z[v] = load_vec<scalar_t, kVec>(residual + col(v));
    });
    for_each([&](int v) {
      float sum[kVec], other[kVec];
      unpack(z[v], sum);
      unpack(x_raw[v], other);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum[i] += other[i];
      z[v] = pack<scalar_t>(sum);
      store_raw(out + col(v), z[v]);
    });
  }

  __device__ __forceinline__ Moments<float> moments(float inverse_n, Moments<float>* scratch,
                                                    Moments<float>* cluster_scratch) {
    const int rank = Row::rank();
    Moments<float> part = tile_moments<Row, Plan>(z, slots, elements, rank, params.is_rms_norm);
    part.n = static_cast<float>(slots.count_of(kVecs, rank % kSpan / Row::kLanes * Row::kLanes, Row::kLanes));
    return whole_row_moments<Row>(part, blocks, elements, inverse_n, scratch, cluster_scratch, rank);
  }

  // ---- y and its codes, vector by vector; where amax is the row's, y is held between the two

  __device__ __forceinline__ void quantize(const RowNorm<float>& norm, float* scratch, float* cluster_scratch) {
    if constexpr (kWidenAnew<Plan>) optimization_barrier(z);
    const auto by_weights_of = [&](auto zero) {
      quantize(Weights<decltype(zero)>(*this), norm, scratch, cluster_scratch);
    };
    if (sizeof(scalar_t) == 2 && params.weight_dtype == DType::kFloat32) return by_weights_of(float());
    with_type(params.weight_dtype, by_weights_of);
  }

  template <typename weight_t>
  struct Weights {
    const weight_t *weight, *bias;
    float offset;

    __device__ __forceinline__ explicit Weights(const QuantRow& of) {
      const int64_t at = parameters_of(of.params, of.row) + of.first + of.own;
      weight = of.params.weight ? static_cast<const weight_t*>(of.params.weight) + at : nullptr;
      bias = of.params.bias ? static_cast<const weight_t*>(of.params.bias) + at : nullptr;
      offset = weight ? static_cast<float>(of.params.weight_offset) : 0.0f;
    }
    __device__ __forceinline__ void apply(const RowNorm<float>& norm, int v, float (&y)[kVec]) const {
      float scale[kVec], shift[kVec];
      unpack(load_parameter<kVec, true>(weight + v * kStep, kVec, weight, one_vec<weight_t, kVec>()), scale);
      if (offset != 0) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) scale[i] += offset;
      }
#pragma unroll
      for (int i = 0; i < kVec; ++i) y[i] = norm.x_hat(y[i]);
      if (bias) {
        unpack(load_vec<weight_t, kVec, true>(bias + v * kStep), shift);
#pragma unroll
        for (int i = 0; i < kVec; ++i) y[i] = fma(y[i], scale[i], shift[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kVec; ++i) y[i] *= scale[i];
      }
    }
  };

  template <typename weight_t>
  __device__ __forceinline__ void quantize(const Weights<weight_t>& weights, const RowNorm<float>& norm, float* scratch,
                                           float* cluster_scratch) {
    const auto y_of = [&](int v, float (&y)[kVec]) {
      unpack(z[v], y);
      weights.apply(norm, v, y);
    };
    if (params.scale) {
      const float inverse = __frcp_rn(*params.scale);
      for_each([&](int v) {
        float y[kVec];
        y_of(v, y);
        store(v, y, inverse);
      });
      return;
    }
    if (params.group_size != params.hidden_size) return quantize_groups(y_of);
    float y[kVecs][kVec];
    float amax = 0;
    for_each([&](int v) {
      y_of(v, y[v]);
      amax = greater(amax, amax_of(y[v]));
    });
    const float scale = scale_of(amax_of_row(amax, scratch, cluster_scratch));
    if (Row::rank() == 0 && first == 0) params.scales[row * params.scale_row_stride] = scale;
    const float inverse = __frcp_rn(scale);
    for_each([&](int v) { store(v, y[v], inverse); });
  }

  template <typename F>
  __device__ __forceinline__ void quantize_groups(F&& y_of) {
    const int group_size = static_cast<int>(params.group_size), shift = __ffs(group_size) - 1;
    float* scales = params.scales + row * params.scale_row_stride;
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const bool is_there = slots.count(v) > 0;
      float y[kVec] = {};
      if (is_there) y_of(v, y);
      float amax = amax_of(y);
#pragma unroll
      for (int offset = kQuantGroup / kVec / 2; offset > 0; offset /= 2)
        if (offset * 2 * kVec <= group_size) amax = greater(amax, __shfl_xor_sync(0xffffffffu, amax, offset));
      const float scale = scale_of(amax);
      if (!is_there) continue;
      if (own % group_size == 0) scales[(col(v) >> shift) * params.scale_group_stride] = scale;
      store(v, y, __fdividef(1.0f, scale));  // a unit in the last place more or less than 1 / scale
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

  __device__ __forceinline__ void store(int v, const float (&y)[kVec], float inverse) const {
    const int64_t at = row * params.hidden_size + col(v);
    if (params.y)
      with_type(params.y_dtype, [&](auto zero) { store_vec(static_cast<decltype(zero)*>(params.y) + at, y); });
    const auto store_codes = [&](auto&& two) {
      Raw<uint8_t> raw;
      unsigned words[kVec / 4];
#pragma unroll
      for (int i = 0; i < kVec; i += 4)
        words[i / 4] = two(y[i] * inverse, y[i + 1] * inverse) | two(y[i + 2] * inverse, y[i + 3] * inverse) << 16;
      memcpy(&raw, words, sizeof(raw));
      store_raw(static_cast<uint8_t*>(params.codes) + at, raw);
    };
    switch (params.code_dtype) {
      case CodeDType::kFloat8E4M3: return store_codes([](float a, float b) { return two_codes<__NV_E4M3>(a, b); });
      case CodeDType::kFloat8E5M2: return store_codes([](float a, float b) { return two_codes<__NV_E5M2>(a, b); });
      case CodeDType::kInt8: return store_codes([](float a, float b) { return int8_code(a) | int8_code(b) << 8; });
    }
  }
};

template <typename scalar_t, typename Plan>
__global__ void __launch_bounds__(kForwardThreads<Plan>, quant_blocks_per_sm<Plan>())
    norm_quant_kernel(const __grid_constant__ NormQuantParams params, float inverse_n) {
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
  Quant quant(params, row, blocks);
  quant.load();
  const Moments<float> moments = quant.moments(inverse_n, scratch, cluster_scratch);
  quant.quantize(finish_row(moments, inverse_n, params, row, false), amax_scratch, amax_cluster_scratch);
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
                                  inverse_of<float>(params.hidden_size));
      });
    }
  });
}

}  // namespace fused_layernorm
