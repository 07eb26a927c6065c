// The norm with a quantized result, for inference, in one pass: the threads of a row hold it in registers. All but the
// type of z and the slots of a thread are run-time values; for RMSNorm without bias there is shorter code.
#include <cuda_fp8.h>

#include "async.cuh"
#include "dispatch.cuh"
#include "forward_rows.cuh"
#include "launch_plan.h"
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

// What the threads of a row share: sums of a vector, of a warp; the greatest of a warp; the row's first element.
template <int kHeld>
struct QuantScratch {
  float slots[3][kHeld == 1 ? kQuantFewRowsBlock : 1], warps[3][32], amax[32], first;
};

// kUsual: what most models run, y = z * (weight + weight_offset) * rstd. It multiplies rstd into the reciprocal of the
// scale. kAny takes every call.
enum class QuantKind { kUsual, kAny };

bool is_usual(const NormQuantParams& params) {
  return params.is_rms_norm && params.weight && !params.bias && !params.y && params.segments <= 1 &&
         params.code_dtype != CodeDType::kFloat8E5M2 && params.x_dtype == params.z_dtype &&
         (params.weight_dtype == params.z_dtype || params.weight_dtype == DType::kFloat32) &&
         params.x_strides.is_even(params.rows) && (!params.residual || params.residual_strides.is_even(params.rows));
}

// A thread's part of a row. A row has 2^log_threads threads with up to five slots each; slot s of thread t is vector s
// * threads + t of the row. With kHeld 3 to 5 a thread holds all of its slots, and a block has one row, or several of
// at most 32 threads. With kHeld 1, for few rows, a block has one row and a thread for each slot. Both add in the same
// order, so a row's codes do not depend on the number of rows.
template <typename scalar_t, int kHeld, QuantKind kKind>
struct QuantRow {
  static constexpr bool kFew = kHeld == 1, kIsUsual = kKind == QuantKind::kUsual;
  static constexpr int kVec = 16 / sizeof(scalar_t);
  using Vec = RawVec<scalar_t, kVec>;

  const NormQuantParams& params;
  QuantScratch<kHeld>& scratch;
  int threads, log_threads, slots;
  int rank, part;  // thread t; with kHeld 1 its slot, else its row of the block
  int lane, warp, hidden_size, step, first_col;
  int64_t row;

  __device__ __forceinline__ QuantRow(const NormQuantParams& params, QuantScratch<kHeld>& scratch, int log_threads,
                                      int slots)
      : params(params),
        scratch(scratch),
        threads(1 << log_threads),
        log_threads(log_threads),
        slots(slots),
        rank(threadIdx.x & (threads - 1)),
        part(threadIdx.x >> log_threads),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        hidden_size(static_cast<int>(params.hidden_size)),
        step(threads * kVec),
        first_col(rank * kVec + (kFew ? part * step : 0)),
        row(kFew ? blockIdx.x : static_cast<int64_t>(blockIdx.x) * (blockDim.x >> log_threads) + part) {}

  __device__ __forceinline__ bool spans_warps() const { return kFew || threads > 32; }

  // Calls f(held, column) for each vector that this thread has.
  template <typename F>
  __device__ __forceinline__ void for_each(F&& f) const {
#pragma unroll
    for (int held = 0; held < kHeld; ++held)
      if (first_col + held * step < hidden_size) f(held, first_col + held * step);
  }

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

  __device__ __forceinline__ int64_t offset(const RowStrides& strides) const {
    return kIsUsual ? row * strides.row_stride : strides.offset(row);
  }

  // z = x, or residual + x. z is zero where this thread has no vector. load_more() starts further loads.
  template <typename x_t, typename F>
  __device__ __forceinline__ void load(Vec (&z)[kHeld], F&& load_more) const {
    const x_t* x = static_cast<const x_t*>(params.x) + offset(params.x_strides);
    if (!params.residual) {
      if constexpr (std::is_same<x_t, scalar_t>::value)
        for_each([&](int held, int col) { z[held] = load_vec<scalar_t, kVec, true>(x + col); });
      return load_more();
    }
    const scalar_t* residual = static_cast<const scalar_t*>(params.residual) + offset(params.residual_strides);
    RawVec<x_t, kVec> x_raw[kHeld];
    for_each([&](int held, int col) { x_raw[held] = load_vec<x_t, kVec, true>(x + col); });
    for_each([&](int held, int col) { z[held] = load_vec<scalar_t, kVec, true>(residual + col); });
    if (kFew) load_more();
    scalar_t* out = static_cast<scalar_t*>(params.residual_out) + row * hidden_size;
    for_each([&](int held, int col) {
      float sum[kVec], values[kVec];
      unpack(z[held], sum);
      unpack(x_raw[held], values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum[i] += values[i];
      z[held] = pack<scalar_t>(sum);
      store_raw(out + col, z[held]);
    });
    if (!kFew) load_more();  // for lack of registers
  }

  // Replaces sums over a thread's slots by sums over the row. `first`: the scratch that this call uses, its own.
  template <int kCount>
  __device__ __forceinline__ void add_up(float (&sums)[kCount], int first) const {
    if constexpr (kFew) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) scratch.slots[first + i][threadIdx.x] = sums[i];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        sums[i] = 0;
#pragma unroll
        for (int slot = 0; slot < kMostQuantSlots; ++slot)
          if (slot < slots) sums[i] += scratch.slots[first + i][(slot << log_threads) + rank];
      }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
      if (offset < 16 || threads > 16)
#pragma unroll
        for (int i = 0; i < kCount; ++i) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], offset);
    if (threads <= 32) return;
    if (lane == 0 && (!kFew || part == 0))
#pragma unroll
      for (int i = 0; i < kCount; ++i) scratch.warps[first + i][warp] = sums[i];
    __syncthreads();
    const int warps = threads / 32;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = scratch.warps[first + i][lane & (warps - 1)];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
      if (offset < warps)
#pragma unroll
        for (int i = 0; i < kCount; ++i) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], offset);
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

  __device__ __forceinline__ void store_codes(int col, const float (&values)[kVec], float inverse) const {
    uint8_t* codes = static_cast<uint8_t*>(params.codes) + row * hidden_size + col;
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
    const float inverse = __frcp_rn(scale) * factor;
    for_each([&](int held, int col) { store_codes(col, values[held], inverse); });
  }

  // With a scale for each group. __fdividef is off by at most a unit in the last place.
  __device__ __forceinline__ void quantize_groups(const float (&values)[kHeld][kVec], float factor) const {
    const int group_size = static_cast<int>(params.group_size), shift = __ffs(group_size) - 1;
    float* scales = params.scales + row * params.scale_row_stride;
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
      const float scale = scale_of(amax * factor), inverse = __fdividef(factor, scale);
      const int mine = from + lane % 4, col = first_col + mine * step;
      if ((first_col & (group_size - 1)) < 4 * kVec && mine < kHeld && col < hidden_size)
        scales[(col >> shift) * params.scale_group_stride] = scale;
#pragma unroll
      for (int i = 0; i < 4 && from + i < kHeld; ++i) {
        const float of_vector = __shfl_sync(0xffffffffu, inverse, i, 4);
        const int col = first_col + (from + i) * step;
        if (col < hidden_size) store_codes(col, values[from + i], of_vector);
      }
    }
  }
};

template <typename scalar_t, int kHeld, QuantKind kKind>
__global__ void __launch_bounds__(kHeld == 1 ? kQuantFewRowsBlock : most_quant_threads(kHeld))
    norm_quant_kernel(const __grid_constant__ NormQuantParams params, int log_threads, int slots, float inverse_n,
                      float eps, float weight_offset) {
  using Row = QuantRow<scalar_t, kHeld, kKind>;
  using Vec = typename Row::Vec;
  constexpr int kVec = Row::kVec;
  __shared__ QuantScratch<kHeld> scratch;
  const Row row(params, scratch, log_threads, slots);
  if (row.row >= params.rows) return;  // rows that share a warp: as in norm_forward_kernel
  wait_for_previous_kernel();
  Vec z[kHeld], weights[kHeld];
#pragma unroll
  for (int held = 0; held < kHeld; ++held) z[held] = weights[held] = zero_vec<scalar_t, kVec>();
  // Loaded late, for lack of registers: weights of another type than z, and the scale of the general kernel
  constexpr bool kEarly = Row::kFew || Row::kIsUsual;
  const bool is_early = params.weight_dtype == dtype_of<scalar_t>;
  float given = 0;
  const auto load_more = [&] {
    if (Row::kIsUsual && is_early) {
      row.for_each([&](int held, int col) {
        weights[held] = load_vec<scalar_t, kVec, true>(static_cast<const scalar_t*>(params.weight) + col);
      });
    }
    if (kEarly && params.scale) given = *params.scale;
  };
  if constexpr (Row::kIsUsual)
    row.template load<scalar_t>(z, load_more);
  else
    Row::with_type(params.x_dtype, [&](auto type) { row.template load<decltype(type)>(z, load_more); });

  float values[kHeld][kVec] = {}, amax = 0, factor = 1;
  const auto find_greatest = [&] {
    if (!row.finds_scale_of_row()) return;
#pragma unroll
    for (int held = 0; held < kHeld; ++held) amax = greater(amax, amax_of(values[held]));
    row.share_greatest(amax);
  };
  if constexpr (Row::kIsUsual) {
    float sum[1] = {};
    const auto take = [&](int held, const auto& weight) {
      float scale[kVec], squares = 0;
      unpack(z[held], values[held]);
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
      for (int held = 0; held < kHeld; ++held) take(held, weights[held]);
    } else {
      row.for_each([&](int held, int col) {
        take(held, load_vec<float, kVec, true>(static_cast<const float*>(params.weight) + col));
      });
    }
    find_greatest();
    row.add_up(sum, 0);
    factor = inverse_sqrt(fma(sum[0], inverse_n, eps));
  } else {
    // As forward_rows.cuh: differences from a number near the mean, and what is left of the mean
    float m = 0, sums[2] = {};
    if (!params.is_rms_norm) {
      float sum[1] = {}, first = 0;
#pragma unroll
      for (int held = 0; held < kHeld; ++held) {
        float x[kVec];
        unpack(z[held], x);
        sum[0] = fma(vec_sum(x), inverse_n, sum[0]);
        if (held == 0) first = x[0];
      }
      if (row.spans_warps() && row.first_col == 0) scratch.first = first;
      row.add_up(sum, 0);
      first = row.spans_warps() ? scratch.first : __shfl_sync(0xffffffffu, first, 0, row.threads);
      m = snapped(sum[0], first);
    }
    row.for_each([&](int held, int) {
      float squares = 0;
      unpack(z[held], values[held]);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        values[held][i] -= m;
        squares = fma(values[held][i], values[held][i], squares);
      }
      sums[0] = fma(vec_sum(values[held]), inverse_n, sums[0]);
      sums[1] += squares;
    });
    row.add_up(sums, 1);
    const float delta = params.is_rms_norm ? 0 : sums[0];
    float variance = fma(sums[1], inverse_n, -delta * delta);
    if (variance < 0) variance = 0;          // by rounding only; nan stays nan
    if (isinf(sums[1])) variance = sums[1];  // overflow: rstd is 0, as in torch
    const float rstd = inverse_sqrt(variance + eps), tail = -delta * rstd;
    const int64_t at = parameters_of(params, row.row);
    const auto normalize = [&](auto type) {
      using T = decltype(type);
      row.for_each([&](int held, int col) {
        float scale[kVec], shift[kVec];
        const auto load = [&](const void* parameter, float neutral, float (&target)[kVec]) {
          RawVec<T, kVec> raw = filled_vec<T, kVec>(neutral);
          if (parameter) raw = load_vec<T, kVec, true>(static_cast<const T*>(parameter) + at + col);
          unpack(raw, target);
        };
        load(params.weight, 1, scale);
        load(params.bias, 0, shift);
#pragma unroll
        for (int i = 0; i < kVec; ++i)
          values[held][i] = fma(fma(values[held][i], rstd, tail), scale[i] + weight_offset, shift[i]);
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
  constexpr int kVec = 16 / sizeof(scalar_t);
  const int vectors = static_cast<int>(params.hidden_size) / kVec;
  const auto log_threads_of = [&](int held) {
    int log_threads = log_of(kQuantGroup / kVec);
    while (held << log_threads < vectors) ++log_threads;
    return log_threads;
  };
  // As few empty slots as possible. In fp32 four vectors a thread: fewer kernels
  int held = 4;
  for (int other : {3, 5})
    if (sizeof(scalar_t) == 2 && 1 << log_threads_of(other) <= most_quant_threads(other) &&
        other << log_threads_of(other) < held << log_threads_of(held))
      held = other;
  const int log_threads = log_threads_of(held), threads = 1 << log_threads;
  if (threads > most_quant_threads(held)) return cudaErrorNotSupported;
  const int slots = (vectors - 1) / threads + 1;
  const auto launch = [&](auto kernel, int block, int rows) {
    const OverlappedLaunch launch(dim3(static_cast<unsigned>((params.rows + rows - 1) / rows)), dim3(block), stream);
    return cudaLaunchKernelEx(&launch.config, kernel, params, log_threads, slots, inverse_of<float>(params.hidden_size),
                              static_cast<float>(params.eps),
                              static_cast<float>(params.weight ? params.weight_offset : 0));
  };
  if (slots * threads <= kQuantFewRowsBlock && params.rows * vectors <= kQuantFewRowsVectors)
    return launch(norm_quant_kernel<scalar_t, 1, kKind>, (slots * threads + 31) / 32 * 32, 1);
  const int block = std::max(threads, 64);
  if constexpr (sizeof(scalar_t) == 2) {
    if (held == 3) return launch(norm_quant_kernel<scalar_t, 3, kKind>, block, block / threads);
    if (held == 5) return launch(norm_quant_kernel<scalar_t, 5, kKind>, block, block / threads);
  }
  return launch(norm_quant_kernel<scalar_t, 4, kKind>, block, block / threads);
}

}  // namespace

int launch_norm_quant_cuda(const NormQuantParams& params, CUstream_st* stream) {
  return dispatch_type(params.z_dtype, [&](auto types) -> cudaError_t {
    using scalar_t = typename decltype(types)::scalar_t;
    if constexpr (sizeof(scalar_t) == 8) {
      return cudaErrorInvalidValue;
    } else {
      if (is_usual(params)) return launch_norm_quant<scalar_t, QuantKind::kUsual>(params, stream);
      return launch_norm_quant<scalar_t, QuantKind::kAny>(params, stream);
    }
  });
}

}  // namespace fused_layernorm
