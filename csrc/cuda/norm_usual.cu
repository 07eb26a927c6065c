// Forward of what most models run: y = x_hat * (weight + weight_offset) + bias of z = x or residual + x, all of one
// type. RMSNorm has no bias here, LayerNorm no weight_offset. norm_forward.cu has the formulas.
#include "forward_rows.cuh"
#include "launchers.h"
#include "run_time_rows.cuh"

namespace fused_layernorm {
namespace {

RunTimePlan usual_plan(int64_t hidden_size, int element_bytes, int64_t rows, bool is_rms_norm) {
  return RunTimePlan::of(hidden_size, element_bytes, rows, least_usual_threads(hidden_size * element_bytes),
                         kUsualFewRows, [&](int held) { return most_usual_threads(held, element_bytes, is_rms_norm); });
}

// The same for few rows of RMSNorm without residual, evenly spaced: code that is jumped over, and a longer list of
// arguments, take time (H200, bf16: 32 x 512 1.27 us, 1.12; LayerNorm gains nothing).
struct FewRmsParams {
  struct EvenStrides {
    int64_t row_stride;
    __device__ int64_t offset(int64_t row) const { return row * row_stride; }
  };
  const void *x, *weight;
  void *y, *rstd;
  EvenStrides x_strides, residual_strides;  // the second: not read
  int64_t rows;
  int hidden_size, log_threads, slots;
  float inverse_n, eps, weight_offset;
  static constexpr const void* residual = nullptr;
  static constexpr void* residual_out = nullptr;

  explicit FewRmsParams(const UsualParams& all)
      : x(all.x),
        weight(all.weight),
        y(all.y),
        rstd(all.rstd),
        x_strides{all.x_strides.row_stride},
        residual_strides{0},
        rows(all.rows),
        hidden_size(all.hidden_size),
        log_threads(all.log_threads),
        slots(all.slots),
        inverse_n(all.inverse_n),
        eps(all.eps),
        weight_offset(all.weight_offset) {}
};

template <int kHeld>
constexpr int kUsualBlock = kHeld == 1   ? kUsualFewRows.block
                            : kHeld == 2 ? kRunTimeBlock
                                         : most_usual_threads(kHeld);
// Registers: 64 a thread, 40 for two vectors, 80 for five.
template <int kHeld>
constexpr int kUsualBlocksPerSm = kHeld == 1   ? 1
                                  : kHeld == 2 ? 1536 / kUsualBlock<kHeld>
                                  : kHeld == 5 ? 3
                                               : 1024 / kUsualBlock<kHeld>;

template <typename scalar_t, int kHeld, bool kIsRms, typename Params>
__global__ void __launch_bounds__(kUsualBlock<kHeld>, kUsualBlocksPerSm<kHeld>)
    usual_norm_kernel(const __grid_constant__ Params params) {
  using Row = RunTimeRow<scalar_t, kHeld>;
  constexpr int kVec = Row::kVec;
  __shared__ SumScratch<kHeld, kIsRms ? 1 : 2, kIsRms ? 1 : 2> scratch;
  const Row row(params.hidden_size, params.log_threads, params.slots);
  if (row.row >= params.rows) return;  // rows that share a warp: as in norm_forward_kernel
  wait_for_previous_kernel();

  UsualVectors<scalar_t, kHeld> vectors;
  auto& z = vectors.z;
  RowNorm<float> norm{};
  if constexpr (kIsRms) {
    typename Row::template First<scalar_t> unused;
    row.template load<scalar_t, false>(z, unused, params, [&] {
      row.for_each([&](int held, int col) {
        if (vectors.kEarlyWeights) vectors.load_weight(params, held, col);
      });
    });
    float sum[1] = {};
    const auto square = [&](int held, int) {
      float values[kVec], squares = 0;
      unpack(z[held], values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) squares = fma(values[i], values[i], squares);
      sum[0] += squares;
      if (kHeld > 6) asm volatile("" : "+f"(sum[0]));  // a vector at a time, for lack of registers
    };
    if constexpr (kHeld > 5) {
      row.for_each(square);
    } else {
#pragma unroll
      for (int held = 0; held < kHeld; ++held) square(held, 0);
    }
    row.add_up(sum, scratch, 0);
    norm.rstd = inverse_sqrt(fma(sum[0], params.inverse_n, params.eps));
    if (params.rstd && row.first_col == 0) static_cast<float*>(params.rstd)[row.row] = norm.rstd;
  } else {
    const Moments<float> moments = vectors.load_for_layer_norm(row, params, params.inverse_n, scratch, [] {});
    norm = finish_row(moments, params.inverse_n, params, row.row, row.first_col == 0);
  }
  if (kHeld > 3) optimization_barrier(z);
  scalar_t* y = static_cast<scalar_t*>(params.y) + row.row * row.hidden_size;
  row.for_each([&](int held, int col) {
    float values[kVec];
    if constexpr (kIsRms) {
      float scale[kVec];
      if (!vectors.kEarlyWeights) vectors.load_weight(params, held, col);
      unpack(z[held], values);
      unpack(vectors.weights[held], scale);
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[i] = values[i] * norm.rstd * (scale[i] + params.weight_offset);
    } else {
      vectors.layer_norm(values, norm, params, held, col);
    }
    store_vec(y + col, values);
  });
}

template <typename scalar_t, bool kIsRms>
cudaError_t launch(const KernelForwardParams& params, const LoadStage& stage, cudaStream_t stream) {
  const RunTimePlan plan = usual_plan(params.hidden_size, sizeof(scalar_t), params.rows, kIsRms);
  const UsualParams arguments(params, stage, plan);
  const OverlappedLaunch launch(dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.block), stream);
  if constexpr (kIsRms) {
    if (plan.held == 1 && !stage.residual && params.x_strides.is_even(params.rows))
      return cudaLaunchKernelEx(&launch.config, usual_norm_kernel<scalar_t, 1, kIsRms, FewRmsParams>,
                                FewRmsParams(arguments));
  }
  return with_constant<1, 2, 3, 4, 5, 6, 8>(plan.held, [&](auto held) {
    return cudaLaunchKernelEx(&launch.config, usual_norm_kernel<scalar_t, decltype(held)::value, kIsRms, UsualParams>,
                              arguments);
  });
}

}  // namespace

cudaError_t launch_usual_norm(const KernelForwardParams& params, const LoadStage& stage, cudaStream_t stream) {
  const bool is_rms = params.is_rms_norm;
  if (!params.weight || (is_rms ? params.bias != nullptr : params.weight_offset != 0) || params.segments > 1 ||
      stage.rounds_x_hat || stage.gate || stage.dropout.philox || params.weight_dtype != params.x_dtype ||
      params.y_dtype != params.x_dtype || params.hidden_size % (16 / dtype_bytes(params.x_dtype)) != 0 ||
      (stage.residual && (stage.residual_dtype != params.x_dtype || stage.residual_out_dtype != params.x_dtype)))
    return cudaErrorNotSupported;
  return dispatch_type(params.x_dtype, [&](auto types) -> cudaError_t {
    using scalar_t = typename decltype(types)::scalar_t;
    if constexpr (sizeof(scalar_t) == 8)
      return cudaErrorNotSupported;
    else
      return is_rms ? launch<scalar_t, true>(params, stage, stream) : launch<scalar_t, false>(params, stage, stream);
  });
}

}  // namespace fused_layernorm
