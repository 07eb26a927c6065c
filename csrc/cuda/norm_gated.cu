// Forward of a gated norm, or of one to whose y a residual is added, perhaps with another norm behind it (RowGate).
// norm_forward.cu has the formulas.
#include "launchers.h"
#include "run_time_rows.cuh"
#include "stages.cuh"

namespace fused_layernorm {
namespace {

struct GatedParams : UsualParams {
  RowGate gate;
  int64_t weight_stride;
  int segments;
  float most_offset;
  DType weight_dtype;
  bool interleaves, is_rms_norm;

  GatedParams(const KernelForwardParams& params, const RowGate& gate, const RunTimePlan& plan)
      : UsualParams(params, {}, plan),
        gate(gate),
        weight_stride(params.weight_stride),
        segments(params.segments),
        most_offset(most_offset_of(params.is_rms_norm, params.x_dtype, params.weight_dtype, params.y_dtype)),
        weight_dtype(params.weight_dtype),
        interleaves(params.interleaves),
        is_rms_norm(params.is_rms_norm) {}
};

// kGatesY: z is x, and y = u * activation(gate), or u + residual. Else z = x * activation(gate), which is not rounded.
template <typename scalar_t, int kHeld, bool kGatesY>
struct GatedRow : RunTimeRow<scalar_t, kHeld> {
  using Base = RunTimeRow<scalar_t, kHeld>;
  using Base::clamped, Base::first_col, Base::for_each, Base::hidden_size, Base::kFew, Base::kVec, Base::row;
  using typename Base::Vec;
  using Words = ParameterWords<kVec>;

  const GatedParams& params;

  __device__ __forceinline__ GatedRow(const GatedParams& params)
      : Base(params.hidden_size, params.log_threads, params.slots), params(params) {}

  // y = x_hat * (weight + offset) + bias, then finish(y, held), and the store. Few rows have weight and bias in
  // `early`.
  template <bool kStraight, typename z_t, typename F>
  __device__ __forceinline__ void store_each(const RawVec<z_t, kVec> (&z)[kHeld], const RowNorm<float>& norm,
                                             void* target, const void* weight, const void* bias, int64_t at,
                                             DType dtype, float weight_offset, const Words (&early)[2],
                                             F&& finish) const {
    scalar_t* y_row = static_cast<scalar_t*>(target) + row * hidden_size;
    asm volatile("" : "+l"(y_row), "+l"(at));  // worked out once: else some plans spill
    const auto store = [&](int held, int col) {
      Words words[2] = {early[0], early[1]};
      if (!kFew) words[0].template load<scalar_t>(weight, dtype, at + col, 1);
      if (!kFew) words[1].template load<scalar_t>(bias, dtype, at + col, -0.f);
      float y[kVec], scale[kVec], offset[kVec];
      unpack(z[held], y);
      words[0].template widen<scalar_t>(scale, dtype);
      words[1].template widen<scalar_t>(offset, dtype);
#pragma unroll
      for (int i = 0; i < kVec; ++i) y[i] = fma(norm.x_hat(y[i]), scale[i] + weight_offset, offset[i]);
      finish(y, held);
      store_vec(y_row + col, y);
    };
    if (kStraight && (kHeld == 4 || kHeld == 8) && hidden_size == kHeld * Base::step) {  // 3% less time
#pragma unroll
      for (int held = 0; held < kHeld; ++held) store(held, first_col + held * Base::step);
    } else {
      for_each(store);
    }
  }

  template <typename Scratch>
  __device__ __forceinline__ void run(Scratch& scratch) const {
    const RowGate& stage = params.gate;
    const scalar_t* x = static_cast<const scalar_t*>(params.x) + params.x_strides.offset(row);
    const scalar_t* gate = static_cast<const scalar_t*>(stage.gate) + stage.strides.offset(row);
    const int64_t at = parameters_of(params, row);
    Vec x_raw[kHeld], gates[kHeld];
#pragma unroll
    for (int held = 0; held < kHeld; ++held) {
      x_raw[held] = load_vec<scalar_t, kVec, kFew>(x + clamped(held));
      gates[held] = load_vec<scalar_t, kVec, kFew>(gate + clamped(held));
    }
    Words early[2], next_early[2];
    if constexpr (kFew) {
      early[0].template load<scalar_t>(params.weight, params.weight_dtype, at + clamped(0), 1);
      early[1].template load<scalar_t>(params.bias, params.weight_dtype, at + clamped(0), -0.f);
      next_early[0].template load<scalar_t>(stage.next.weight, stage.next.weight_dtype, clamped(0), 1);
      next_early[1].template load<scalar_t>(nullptr, stage.next.weight_dtype, 0, -0.f);
    }
    const auto normalize = [&](auto& z, float near_mean) {
      const Moments<float> moments = Base::moments(z, near_mean, params.most_offset, params.inverse_n, scratch, [] {});
      const RowNorm<float> norm = finish_row(moments, params.inverse_n, params, row, first_col == 0);
      store_each<true>(z, norm, params.y, params.weight, params.bias, at, params.weight_dtype, params.weight_offset,
                       early, [&](float (&y)[kVec], int held) {
                         if constexpr (kGatesY) {
                           apply_gate(stage, gates[held], y);
                           x_raw[held] = pack<scalar_t>(y);
                         }
                       });
    };
    if constexpr (kGatesY) {
      normalize(x_raw, params.is_rms_norm ? 0 : Base::near_mean_of(x));
      const NextNorm& next = stage.next;
      if (!next.y) return;
      if (Base::spans_warps()) __syncthreads();  // scratch is used again
      const Moments<float> moments = Base::moments(x_raw, 0, /*most_offset=*/0, params.inverse_n, scratch, [] {});
      const RowNorm<float> norm = finish_row(moments, params.inverse_n, next, row, first_col == 0);
      store_each<false>(x_raw, norm, next.y, next.weight, nullptr, 0, next.weight_dtype, next.weight_offset, next_early,
                        [](float (&)[kVec], int) {});
    } else {
      RawVec<float, kVec> z[kHeld];
      for_each([&](int held, int) {
        float values[kVec];
        unpack(x_raw[held], values);
        apply_gate(stage, gates[held], values);
        z[held] = pack<float>(values);
      });
      normalize(z, 0);
    }
  }
};

// Threads of an SM, for the compiler, which then has 65536 registers for them. Four vectors of fp16 would spill 8 bytes
// with 80 registers.
template <typename scalar_t, int kHeld>
constexpr int kGatedThreads = kHeld == 1                                                            ? kAnyFewRows.block
                              : kHeld > 5                                                           ? 512
                              : kHeld == 5 || (kHeld == 4 && std::is_same<scalar_t, __half>::value) ? 640
                              : kHeld == 4                                                          ? 768
                                                                                                    : 896;

template <typename scalar_t, int kHeld, bool kGatesY>
__global__ void __launch_bounds__(kGatedThreads<scalar_t, kHeld>)
    gated_norm_kernel(const __grid_constant__ GatedParams params) {
  __shared__ SumScratch<kHeld, 2, 2, kAnyFewRows.block> scratch;
  const GatedRow<scalar_t, kHeld, kGatesY> row(params);
  if (row.row >= params.rows) return;  // rows that share a warp: as in norm_forward_kernel
  if (kHeld == 1) wait_for_previous_kernel();
  row.run(scratch);
}

template <typename scalar_t>
cudaError_t launch(const KernelForwardParams& params, const RowGate& gate, cudaStream_t stream) {
  const RunTimePlan plan = RunTimePlan::of(params.hidden_size, sizeof(scalar_t), params.rows,
                                           least_usual_threads(params.hidden_size * sizeof(scalar_t)), kAnyFewRows,
                                           most_any_threads<scalar_t>);
  const GatedParams arguments(params, gate, plan);
  return with_constant<1, 2, 3, 4, 5, 6, 8>(plan.held, [&](auto held) {
    constexpr int kHeld = decltype(held)::value;
    const auto kernel =
        gate.gates_y ? gated_norm_kernel<scalar_t, kHeld, true> : gated_norm_kernel<scalar_t, kHeld, false>;
    const dim3 blocks(static_cast<unsigned>(plan.blocks)), threads(plan.block);
    if (kHeld > 1) {
      const ClusterLaunch launch(plan.blocks, plan.block, 0, 1, stream);
      return cudaLaunchKernelEx(&launch.config, kernel, arguments);
    }
    const OverlappedLaunch launch(blocks, threads, stream);
    return cudaLaunchKernelEx(&launch.config, kernel, arguments);
  });
}

}  // namespace

bool takes_gate(const KernelForwardParams& params) {
  return has_fused_plan(params, params.x_dtype) && params.x_dtype != DType::kFloat64 &&
         params.y_dtype == params.x_dtype;
}

cudaError_t launch_forward(const KernelForwardParams& params, const RowGate& gate, cudaStream_t stream) {
  switch (params.x_dtype) {
    case DType::kFloat16: return launch<__half>(params, gate, stream);
    case DType::kBFloat16: return launch<__nv_bfloat16>(params, gate, stream);
    default: return launch<float>(params, gate, stream);
  }
}

}  // namespace fused_layernorm
