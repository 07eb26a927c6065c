// Forward of few rows, where latency decides, of calls that norm_usual.cu does not take: modulated, with a row gate,
// with float32 weights or without weight, and short rows. Behind a matrix product a kernel finds none of its
// instructions in a cache, so this one executes few. A thread has one vector, or few; weight and bias are prefetched;
// and the launch overlaps the previous kernel.
//
// A row has the bits that forward_kernel.cuh gives it: vectors that one thread holds there may belong to several
// threads here, which add their sums in the same order, through shared memory.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cstring>

#include "dispatch.cuh"
#include "forward_rows.cuh"
#include "kernel_params.h"
#include "launch_plan.h"
#include "reduce.cuh"
#include "stages.cuh"
#include "vector_io.cuh"

namespace fused_layernorm {
namespace {

// Offsets within each tensor must be ints.
template <typename scalar_t>
struct FewRowsParams {
  const void *x, *residual;  // without residual z is x
  const void *weight, *bias;
  void *y, *residual_out;
  const void* gate;
  void *rstd, *mean, *mean_tail;
  int rows, hidden_size, residual_stride;
  int rows_of_group, x_stride, group_stride;  // RowStrides of x
  int rows_of_segment, weight_stride, gate_stride;
  int vecs;  // Plan::kVecs
  float eps, weight_offset;
  DType weight_dtype;
  bool is_rms_norm;

  static bool holds(const KernelForwardParams& params, const LoadStage& stage) {
    constexpr DType dtype = dtype_of<scalar_t>;
    const RowStrides &x = params.x_strides, &residual = stage.residual_strides;
    const int64_t most =
        std::max({x.row_stride, x.group_stride, residual.row_stride, params.weight_stride, stage.gate_stride});
    return params.x_dtype == dtype && params.y_dtype == dtype && !params.interleaves && most < INT_MAX / params.rows &&
           !stage.dropout.philox && !stage.rounds_x_hat &&
           (!stage.residual ||
            (stage.residual_dtype == dtype && stage.residual_out_dtype == dtype && residual.is_even(params.rows)));
  }
  FewRowsParams(const KernelForwardParams& params, const LoadStage& stage, int vecs)
      : x(params.x),
        residual(stage.residual),
        weight(params.weight),
        bias(params.bias),
        y(params.y),
        residual_out(stage.residual_out),
        gate(stage.gate),
        rstd(params.rstd),
        mean(params.mean),
        mean_tail(params.mean_tail),
        rows(static_cast<int>(params.rows)),
        hidden_size(static_cast<int>(params.hidden_size)),
        residual_stride(static_cast<int>(stage.residual_strides.row_stride)),
        rows_of_group(static_cast<int>(std::min(params.x_strides.rows_per_group, params.rows))),
        x_stride(static_cast<int>(params.x_strides.row_stride)),
        group_stride(static_cast<int>(params.x_strides.group_stride)),
        rows_of_segment(rows / std::max(params.segments, 1)),
        weight_stride(static_cast<int>(params.weight_stride)),
        gate_stride(static_cast<int>(stage.gate_stride)),
        vecs(vecs),
        eps(static_cast<float>(params.eps)),
        weight_offset(static_cast<float>(params.weight_offset)),
        weight_dtype(params.weight_dtype),
        is_rms_norm(params.is_rms_norm) {}
};

template <typename scalar_t>
struct GatedFewRowsParams : FewRowsParams<scalar_t> {
  RowGate row_gate;

  GatedFewRowsParams(const KernelForwardParams& params, const RowGate& row_gate, int vecs)
      : FewRowsParams<scalar_t>(params, {}, vecs), row_gate(row_gate) {}
};

template <typename scalar_t, bool kGates>
using FewRowsParamsOf = std::conditional_t<kGates, GatedFewRowsParams<scalar_t>, FewRowsParams<scalar_t>>;

// kThreads: of the plan. A block has, for each group of kHeld of the plan's vectors v, the warps of the plan; a thread
// holds the group's vectors. Rows of fewer than 32 threads share warps. kGates: with a RowGate.
template <typename scalar_t, int kThreads, int kHeld, bool kGates>
__global__ void __launch_bounds__(kFewRowsBlock)
    norm_forward_few_rows_kernel(const __grid_constant__ FewRowsParamsOf<scalar_t, kGates> params, float inverse_n) {
  using Row = RowThreads<kThreads, 1, true>;
  constexpr int kVec = 16 / sizeof(scalar_t), kLanes = Row::kLanes, kWarps = Row::kWarps, kStep = kLanes * kVec;
  constexpr int kSpan = 32 * kWarps, kMostVecs = std::min(kFewRowsBlock / kSpan * kHeld, kMostFewRowsVecs);
  using z_t = std::conditional_t<kGates, float, scalar_t>;  // x * activation(gate) is not rounded
  using Vec = RawVec<scalar_t, kVec>;
  using ZVec = RawVec<z_t, kVec>;
  using Words = RawVec<float, kVec>;  // of a vector of weight or bias, of either dtype
  __shared__ Pair<float> sums[kMostVecs][kSpan];
  __shared__ Moments<float> scratch[kWarps];

  // Which row, and which columns: vectors first_v on of the slice of the plan's warp `warp`
  const int rank = threadIdx.x % kSpan, lane = rank % kLanes, warp = rank / 32, first_v = threadIdx.x / kSpan * kHeld;
  const int row = blockIdx.x * (32 / kLanes) + rank % 32 / kLanes;
  if (row >= params.rows) return;  // rows that share a warp: as in norm_forward_kernel
  const int hidden_size = params.hidden_size, vecs = params.vecs, slice_col = warp * vecs * kStep;
  const int sample_col = slice_col + lane * kVec, col = sample_col + first_v * kStep;
  const int count = min(vecs - first_v, (hidden_size - col + kStep - 1) / kStep);  // of vectors; perhaps < 0
  const bool is_first = first_v == 0;
  const auto for_each = [&](auto&& f) {
#pragma unroll
    for (int held = 0; held < kHeld; ++held)
      if (held < count) f(held, col + held * kStep);
  };

  // Load
  wait_for_previous_kernel();
  int x_row = row * params.x_stride;
  if (params.rows_of_group < params.rows)
    x_row += row / params.rows_of_group * (params.group_stride - params.rows_of_group * params.x_stride);
  const scalar_t* x = static_cast<const scalar_t*>(params.x) + x_row;
  // The residual, or the row's gate
  const auto* other = static_cast<const scalar_t*>(params.residual) + row * params.residual_stride;
  if constexpr (kGates)
    other = static_cast<const scalar_t*>(params.row_gate.gate) + params.row_gate.strides.offset(row);
  const bool has_sample = !params.is_rms_norm && !is_first && sample_col < hidden_size;
  Vec x_raw[kHeld], other_raw[kHeld], sample_x = zero_vec<scalar_t, kVec>(), sample_other = sample_x;
#pragma unroll
  for (int held = 0; held < kHeld; ++held) x_raw[held] = other_raw[held] = sample_x;
  for_each([&](int held, int col) { x_raw[held] = load_vec<scalar_t, kVec, true>(x + col); });
  if (has_sample) sample_x = load_vec<scalar_t, kVec, true>(x + sample_col);
  if (kGates || params.residual) {
    for_each([&](int held, int col) { other_raw[held] = load_vec<scalar_t, kVec, true>(other + col); });
    if (has_sample) sample_other = load_vec<scalar_t, kVec, true>(other + sample_col);
  }
  const int segment = kGates ? 0 : static_cast<unsigned>(row) / static_cast<unsigned>(params.rows_of_segment);
  Words weight[kHeld], bias[kHeld];
  [[maybe_unused]] Words next_weight[kHeld];
  const auto of_type = [&](DType dtype, auto&& f) {
    if (sizeof(scalar_t) == 4 || dtype == DType::kFloat32) {
      f(Words{}, float{});
    } else {
      f(Vec{}, scalar_t{});
    }
  };
  const auto load = [&](Words(&words)[kHeld], const void* parameter, auto vec, auto element, float neutral) {
    using weight_t = decltype(element);
    vec = filled_vec<weight_t, kVec>(neutral);
#pragma unroll
    for (int held = 0; held < kHeld; ++held) memcpy(&words[held], &vec, sizeof(vec));
    if (!parameter) return;
    const weight_t* first = static_cast<const weight_t*>(parameter) + segment * params.weight_stride;
    for_each([&](int held, int col) {
      vec = load_vec<weight_t, kVec, true>(first + col);
      memcpy(&words[held], &vec, sizeof(vec));
    });
  };
  of_type(params.weight_dtype, [&](auto vec, auto element) {
    load(weight, params.weight, vec, element, 1);
    load(bias, params.bias, vec, element, params.residual ? -0.f : 0.f);
  });
  if constexpr (kGates) {
    const NextNorm& next = params.row_gate.next;
    if (next.y)
      of_type(next.weight_dtype, [&](auto vec, auto element) { load(next_weight, next.weight, vec, element, 1); });
  }

  // z = residual + gate * x, rounded; x * activation(gate); or x
  float values[kVec];
  const int y_row = row * hidden_size;
  const auto z_of = [&](const Vec& x, const Vec& other, int col) {
    unpack(x, values);
    if constexpr (kGates) {
      apply_gate(params.row_gate, other, values);
    } else {
      float others[kVec];
      if (params.gate) {
        const scalar_t* gate = static_cast<const scalar_t*>(params.gate) + segment * params.gate_stride;
        unpack(load_vec<scalar_t, kVec, true>(gate + col), others);
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[i] = mul(values[i], others[i]);
      }
      unpack(other, others);
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[i] = add(others[i], values[i]);
    }
    return pack<z_t>(values);
  };
  const auto widened = [&](const Vec& x) {
    if constexpr (std::is_same<z_t, scalar_t>::value) {
      return x;
    } else {
      unpack(x, values);
      return pack<z_t>(values);
    }
  };
  ZVec z[kHeld], sample = widened(sample_x);
#pragma unroll
  for (int held = 0; held < kHeld; ++held) z[held] = widened(x_raw[held]);
  bool is_x = !params.residual;
  if constexpr (kGates) is_x = params.row_gate.gates_y;
  if (!is_x) {
    for_each([&](int held, int col) {
      z[held] = z_of(x_raw[held], other_raw[held], col);
      if (!kGates && params.residual_out) store_raw(static_cast<z_t*>(params.residual_out) + y_row + col, z[held]);
    });
    if (has_sample) sample = z_of(sample_x, sample_other, sample_col);
  }
  if (is_first) sample = z[0];

  // Statistics, as tile_moments() computes them
  const int left = max(hidden_size - slice_col, 0);
  Moments<float> part{static_cast<float>(min(left, vecs * kStep)), 0, 0, 0};
  if (!params.is_rms_norm) {
    unpack(sample, values);
    part.m = reference_point<Row>(0 + vec_sum(values), values[0], min(left, kStep));
  }
  const auto moments_of_row = [&](Moments<float> part) {
    Moments<float> own[kHeld] = {};
    for_each([&](int held, int) {
      unpack(z[held], values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[i] -= part.m;
      own[held].add(values);
    });
    if (vecs <= kHeld) {
#pragma unroll
      for (int held = 0; held < kHeld; ++held) {
        part.c += own[held].c;
        part.q += own[held].q;
      }
    } else {
#pragma unroll
      for (int held = 0; held < kHeld; ++held)
        if (first_v + held < vecs) sums[first_v + held][rank] = {own[held].c, own[held].q};
      __syncthreads();
#pragma unroll
      for (int v = 0; v < kMostVecs; ++v) {
        if (v < vecs) {
          part.c += sums[v][rank].first;
          part.q += sums[v][rank].second;
        }
      }
    }
    return row_moments<Row>(part, inverse_n, scratch, rank, is_first);
  };
  const bool saves = is_first && rank % kThreads == 0;
  const auto store = [&](const RowNorm<float>& norm, void* y, const Words(&weight)[kHeld], DType weight_dtype,
                         float weight_offset, auto&& finish) {
    of_type(weight_dtype, [&](auto vec, auto) {
      for_each([&](int held, int col) {
        float scale[kVec], offset[kVec];
        memcpy(&vec, &weight[held], sizeof(vec));
        unpack(vec, scale);
        memcpy(&vec, &bias[held], sizeof(vec));
        unpack(vec, offset);
        unpack(z[held], values);
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[i] = fma(norm.x_hat(values[i]), scale[i] + weight_offset, offset[i]);
        finish(held);
        store_vec(static_cast<scalar_t*>(y) + y_row + col, values);
      });
    });
  };
  const float weight_offset = params.weight && params.weight_offset != 0 ? params.weight_offset : -0.f;  // -0: none
  store(finish_row(moments_of_row(part), inverse_n, params, row, saves), params.y, weight, params.weight_dtype,
        weight_offset, [&](int held) {
          if constexpr (kGates) {
            if (params.row_gate.gates_y) apply_gate(params.row_gate, other_raw[held], values);
            float rounded[kVec];
            unpack(pack<scalar_t>(values), rounded);
            z[held] = pack<z_t>(rounded);
          }
        });
  if constexpr (kGates) {
    const NextNorm& next = params.row_gate.next;
    if (!next.y) return;
    __syncthreads();  // sums and scratch are used again
#pragma unroll
    for (int held = 0; held < kHeld; ++held) bias[held] = Words{};
    part.m = 0;
    store(finish_row(moments_of_row(part), inverse_n, next, row, saves), next.y, next_weight, next.weight_dtype,
          next.weight_offset, [](int) {});
  }
}

// Stage: NoStage, WithLoad or WithGate. Returns cudaErrorNotSupported for calls without such a kernel.
template <typename scalar_t, typename Plan, typename Stage>
cudaError_t launch_few_rows(const KernelForwardParams& params, const Stage& stage, cudaStream_t stream) {
  if constexpr (kMayBeFewRows<scalar_t, Plan>) {
    static_assert(kByWarps<Plan> == (Plan::kThreads > 32), "the slices of warps");
    constexpr int kThreads = Plan::kThreads, kHeld = kFewRowsVecs<kThreads>;
    const int64_t vectors = params.rows * (params.hidden_size / Plan::kVec);
    const auto launch = [&](auto* kernel, const auto& arguments) {
      constexpr int kRows = std::max(32 / kThreads, 1);
      const OverlappedLaunch launch(dim3(static_cast<unsigned>((params.rows + kRows - 1) / kRows)),
                                    dim3(few_rows_block<Plan, kHeld>()), stream);
      return cudaLaunchKernelEx(&launch.config, kernel, arguments, inverse_of<float>(params.hidden_size));
    };
    using Params = FewRowsParams<scalar_t>;
    if constexpr (kHasGate<Stage>) {
      if (vectors <= kGatedFewRowsVectors && params.segments <= 1 && Params::holds(params, {}))
        return launch(norm_forward_few_rows_kernel<scalar_t, kThreads, kHeld, true>,
                      GatedFewRowsParams<scalar_t>(params, stage, Plan::kVecs));
    } else {
      LoadStage load{};
      if constexpr (kHasLoad<Stage>) {
        if (!stage.residual) return cudaErrorNotSupported;
        load = stage;
      }
      if (vectors <= kFewRowsVectors && Params::holds(params, load))
        return launch(norm_forward_few_rows_kernel<scalar_t, kThreads, kHeld, false>,
                      Params(params, load, Plan::kVecs));
    }
  }
  return cudaErrorNotSupported;
}

}  // namespace
}  // namespace fused_layernorm
