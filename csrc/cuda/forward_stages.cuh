// The forward kernel with stages: every stage of ForwardStages is a run-time value, so that one kernel serves all
// combinations. A group of threads, or a cluster, holds each row in registers, as z is stored.
#pragma once

#include "activation.cuh"
#include "async.cuh"
#include "dispatch.cuh"
#include "forward_rows.cuh"
#include "kernel_params.h"
#include "launch_plan.h"
#include "reduce.cuh"
#include "stages.cuh"
#include "vector_io.cuh"

namespace fused_layernorm {
namespace {

// This thread's part of a row of z, of type scalar_t. Each phase is one method; all threads of the row call load(),
// moments() and store(), in this order.
template <typename scalar_t, typename Plan>
struct StagedRow {
  using acc_t = acc_type<scalar_t>;
  static constexpr int kThreads = Plan::kThreads, kVecs = Plan::kVecs, kVec = Plan::kVec;
  static constexpr bool kRagged = kVec * sizeof(scalar_t) < 16;
  static constexpr bool kQuick = sizeof(scalar_t) == 2;
  // Adjacent threads: all of the row, or one warp that has a contiguous slice of it
  static constexpr int kSpan = kByWarps<Plan> ? 32 : kThreads;
  static constexpr int kStep = kSpan * kVec;
  // The vectors that are widened at once behind the statistics: the epilogue branches once for so many.
  static constexpr int kChunk = 2;
  using Row = RowThreads<kThreads, kForwardThreads<Plan> / kThreads, true>;
  using Slots = RegisterSlots<Plan, kRagged, kSpan>;
  template <typename T>
  using Raw = RawVec<T, kVec>;

  const KernelForwardParams& params;
  const ForwardStages& stages;
  int64_t row;
  int blocks;    // that share the row
  int first;     // column of this thread's slice
  int elements;  // from there to the end of the slice; perhaps < 0
  int own;       // offset of this thread's first vector in the slice
  Slots slots;
  Raw<scalar_t> z[kVecs];
  Raw<scalar_t> row_gate[kVecs];  // where it multiplies y

  __device__ __forceinline__ StagedRow(const KernelForwardParams& params, const ForwardStages& stages, int64_t row,
                                       int blocks)
      : params(params),
        stages(stages),
        row(row),
        blocks(blocks),
        first(blocks > 1       ? static_cast<int>(cluster_rank()) * slice_of(params, blocks)
              : kByWarps<Plan> ? Row::rank() / 32 * kVecs * kStep
                               : 0),
        elements(min(blocks > 1 ? slice_of(params, blocks) : 1 << 30, static_cast<int>(params.hidden_size) - first)),
        own(Row::rank() % kSpan * kVec),
        slots(elements, own) {}

  __device__ static int slice_of(const KernelForwardParams& params, int blocks) {
    return (static_cast<int>(params.hidden_size) - 1) / (kVec * blocks) * kVec + kVec;
  }
  __device__ __forceinline__ int col(int v) const { return first + own + slots.index(v) * kStep; }

  // Calls f(v) for each vector v that this thread has.
  template <typename F>
  __device__ __forceinline__ void for_each(F&& f) const {
#pragma unroll
    for (int v = 0; v < kVecs; ++v)
      if (slots.count(v) > 0) f(v);
  }

  // This thread's vectors of the row of `source` that begins at `offset`.
  template <typename T>
  __device__ __forceinline__ void load_rows(Raw<T> (&raw)[kVecs], const void* source, int64_t offset) const {
    const T* typed = static_cast<const T*>(source) + offset;
    for_each([&](int v) { raw[v] = load_vec<T, kVec>(typed + col(v)); });
  }

  // ---- load: z from x, of type x_t

  template <typename x_t>
  __device__ __forceinline__ void load() {
    const LoadStage& stage = stages.load;
    Raw<x_t> x[kVecs];
    load_rows(x, params.x, params.x_strides.offset(row));
    if (stage.residual_out) {
      const int64_t at = stage.residual ? stage.residual_strides.offset(row) : 0;
      // Beside z, of another type: rare, and not prefetched
      using other_t = std::conditional_t<std::is_same<x_t, scalar_t>::value, acc_t, x_t>;
      if (!stage.residual) {
        add_to(x, [](int, acc_t(&)[kVec]) {});
      } else if (stage.residual_dtype == dtype_of<scalar_t>) {
        Raw<scalar_t> residual[kVecs];
        load_rows(residual, stage.residual, at);
        add_to(x, [&](int v, acc_t(&sum)[kVec]) { add_residual(sum, residual[v]); });
      } else {
        const other_t* residual = static_cast<const other_t*>(stage.residual) + at;
        add_to(x, [&](int v, acc_t(&sum)[kVec]) {
          add_residual(sum, load_vec<other_t, kVec>(residual + col(v)));
        });
      }
      return;
    }
    if constexpr (std::is_same<scalar_t, acc_t>::value) {
      if (stages.row_gate.gate && !stages.row_gate.gates_y) {
        Raw<x_t> gate[kVecs];
        load_rows(gate, stages.row_gate.gate, stages.row_gate.strides.offset(row));
        for_each([&](int v) {
          acc_t product[kVec];
          unpack(x[v], product);
          multiply_by_gate(product, gate[v]);
          z[v] = pack<scalar_t>(product);
        });
        return;
      }
    }
    if constexpr (std::is_same<x_t, scalar_t>::value) {
      if (stages.row_gate.gate)
        load_rows(row_gate, stages.row_gate.gate, stages.row_gate.strides.offset(row));
      for_each([&](int v) { z[v] = x[v]; });
    }
  }

  template <typename T>
  __device__ __forceinline__ static void add_residual(acc_t (&sum)[kVec], const Raw<T>& raw) {
    acc_t residual[kVec];
    unpack(raw, residual);
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum[i] = add(residual[i], sum[i]);
  }

  template <typename T>
  __device__ __forceinline__ void multiply_by_gate(acc_t (&values)[kVec], const Raw<T>& raw) const {
    acc_t gate[kVec];
    unpack(raw, gate);
    with_gate_activation(stages.row_gate.activation, [&](auto which) { activate<sizeof(T) == 2>(gate, which); });
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = mul(values[i], gate[i]);
  }

  // z = residual + keep * dropout_scale * gate * x, rounded and stored. with_residual(v, sum) adds the residual.
  template <typename x_t, typename F>
  __device__ __forceinline__ void add_to(const Raw<x_t> (&x)[kVecs], F&& with_residual) {
    const LoadStage& stage = stages.load;
    scalar_t* out = static_cast<scalar_t*>(stage.residual_out) + row * params.hidden_size;
    const auto sum_each = [&](auto&& scaled) {
      for_each([&](int v) {
        acc_t sum[kVec];
        unpack(x[v], sum);
        scaled(sum, v);
        with_residual(v, sum);
        z[v] = pack<scalar_t>(sum);
        store_raw(out + col(v), z[v]);
      });
    };
    const RowDropout<acc_t> dropout(stage.dropout, row);
    if (stage.gate) {
      Raw<x_t> gate[kVecs];
      load_rows(gate, stage.gate, segment_of(params, row) * stage.gate_stride);
      sum_each([&](acc_t(&values)[kVec], int v) {
        if (stage.dropout.philox) dropout.apply(values, col(v));
        acc_t factor[kVec];
        unpack(gate[v], factor);
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[i] = mul(values[i], factor[i]);
      });
    } else if (stage.dropout.philox) {
      sum_each([&](acc_t(&values)[kVec], int v) { dropout.apply(values, col(v)); });
    } else {
      sum_each([](acc_t(&)[kVec], int) {});
    }
  }

  // ---- row: the statistics of z

  __device__ __forceinline__ Moments<acc_t> moments(acc_t inverse_n, Moments<acc_t>* scratch,
                                                    Moments<acc_t>* cluster_scratch) {
    const int rank = Row::rank();
    Moments<acc_t> part = tile_moments<Row, Plan>(z, slots, elements, rank, params.is_rms_norm);
    part.n = static_cast<acc_t>(slots.count_of(kVecs, rank % kSpan / Row::kLanes * Row::kLanes, Row::kLanes));
    return whole_row_moments<Row>(part, blocks, elements, inverse_n, scratch, cluster_scratch, rank);
  }

  // ---- store: y from z, by chunks of vectors

  __device__ __forceinline__ void store(const RowNorm<acc_t>& norm) {
    const int64_t at = parameters_of(params, row) + first + own;
    const int64_t y_at = row * params.hidden_size;
    const int64_t at_byte = at * dtype_bytes(params.weight_dtype);
    const char* weight = params.weight ? static_cast<const char*>(params.weight) + at_byte : nullptr;
    const char* bias = params.bias ? static_cast<const char*>(params.bias) + at_byte : nullptr;
    asm volatile("" : "+l"(weight), "+l"(bias));  // else addresses are computed for each vector
    __builtin_assume(__isGlobal(weight) && __isGlobal(bias));
    const acc_t weight_offset = params.weight ? static_cast<acc_t>(params.weight_offset) : acc_t(0);
    if constexpr (kWidenAnew<Plan>) optimization_barrier(z);
#pragma unroll
    for (int from = 0; from < kVecs; from += kChunk) {
      if (!kRagged && from * kStep >= elements) continue;
      acc_t u[kChunk][kVec];
      const auto normalize = [&](auto zero) {
        using weight_t = decltype(zero);
        const auto load = [&](const char* data, int v, RawVec<weight_t, kVec> neutral) {
          const weight_t* vec = reinterpret_cast<const weight_t*>(data) + slots.index(v) * kStep;
          return load_parameter<kVec, true>(vec, kVec, data, neutral);
        };
        // The weights of a chunk first, where their registers suffice
        constexpr bool kAhead = sizeof(weight_t) <= sizeof(scalar_t);
        RawVec<weight_t, kVec> scale_raw[kChunk];
        const auto load_weight = [&](int v, int c) { scale_raw[c] = load(weight, v, one_vec<weight_t, kVec>()); };
        if constexpr (kAhead) each_of_chunk(from, load_weight);
        each_of_chunk(from, [&](int v, int c) {
          if constexpr (!kAhead) load_weight(v, c);
          acc_t scale[kVec], offset[kVec];
          unpack(scale_raw[c], scale);
          unpack(load(bias, v, zero_vec<weight_t, kVec>()), offset);
          if (weight_offset != 0) {
#pragma unroll
            for (int i = 0; i < kVec; ++i) scale[i] += weight_offset;
          }
          unpack(z[v], u[c]);
#pragma unroll
          for (int i = 0; i < kVec; ++i) u[c][i] = fma(norm.x_hat(u[c][i]), scale[i], offset[i]);
        });
      };
      if (sizeof(acc_t) == 8 || params.weight_dtype == DType::kFloat32) {
        normalize(acc_t());
      } else if (sizeof(scalar_t) == 2 || params.weight_dtype == DType::kBFloat16) {
        normalize(std::conditional_t<sizeof(scalar_t) == 2, scalar_t, __nv_bfloat16>());
      } else {
        normalize(__half());
      }
      apply_epilogue(u, from);
      if (params.y_dtype == dtype_of<scalar_t>) {
        each_of_chunk(
            from, [&](int v, int c) { store_vec(static_cast<scalar_t*>(params.y) + y_at + col(v), u[c]); });
      } else {
        each_of_chunk(
            from, [&](int v, int c) { store_vec_as(params.y, params.y_dtype, y_at + col(v), u[c], kVec, true); });
      }
    }
  }

  // Calls f(v, c) for each vector v of the chunk that this thread has; c counts from 0.
  template <typename F>
  __device__ __forceinline__ void each_of_chunk(int from, F&& f) const {
#pragma unroll
    for (int c = 0; c < kChunk; ++c)
      if (from + c < kVecs && (slots.count(from + c) > 0)) f(from + c, c);
  }

  __device__ __forceinline__ void apply_epilogue(acc_t (&u)[kChunk][kVec], int from) const {
    if (stages.epilogue.activation != Activation::kNone)
      with_activation(stages.epilogue.activation, [&](auto which) {
#pragma unroll
        for (int c = 0; c < kChunk; ++c) activate<kQuick>(u[c], which);
      });
    if (stages.epilogue.dropout.philox) {
      const RowDropout<acc_t> dropout(stages.epilogue.dropout, row);
#pragma unroll
      for (int c = 0; c < kChunk; ++c) dropout.apply(u[c], col(from + c));
    }
    if (stages.row_gate.gate && stages.row_gate.gates_y)
      each_of_chunk(from, [&](int v, int c) { multiply_by_gate(u[c], row_gate[v]); });
  }
};

// scalar_t: the type of z. x is of that type, or 16-bit beside fp32 z.
template <typename scalar_t, typename Plan>
__global__ void __launch_bounds__(kForwardThreads<Plan>, staged_blocks_per_sm<Plan>(sizeof(scalar_t)))
    norm_forward_stages_kernel(const __grid_constant__ KernelForwardParams params, acc_type<scalar_t> inverse_n,
                               const __grid_constant__ ForwardStages stages) {
  using acc_t = acc_type<scalar_t>;
  using Staged = StagedRow<scalar_t, Plan>;
  using Row = typename Staged::Row;
  constexpr int kRows = kForwardThreads<Plan> / Plan::kThreads;
  __shared__ Moments<acc_t> scratch[kRows * Row::kWarps];
  __shared__ Moments<acc_t> cluster_scratch[Plan::kClusters ? kMaxCluster : 1];

  const int blocks = Plan::kClusters ? cluster_size() : 1;
  const int64_t row = static_cast<int64_t>(blockIdx.x / blocks) * kRows + Row::group();
  // Return, do not skip: rows that share a warp name all of its lanes in their exchanges (whole_warps in reduce.cuh)
  if (row >= params.rows) return;
  if (blocks > 1) cluster_arrive();
  Staged staged(params, stages, row, blocks);
  if (sizeof(scalar_t) == 4 && params.x_dtype == DType::kFloat16) {
    staged.template load<std::conditional_t<sizeof(scalar_t) == 4, __half, scalar_t>>();
  } else if (sizeof(scalar_t) == 4 && params.x_dtype == DType::kBFloat16) {
    staged.template load<std::conditional_t<sizeof(scalar_t) == 4, __nv_bfloat16, scalar_t>>();
  } else {
    staged.template load<scalar_t>();
  }
  const Moments<acc_t> moments = staged.moments(inverse_n, scratch, cluster_scratch);
  staged.store(finish_row(moments, inverse_n, params, row, Row::rank() == 0));
}

}  // namespace

template <typename scalar_t>
cudaError_t launch_staged(const KernelForwardParams& params, const ForwardStages& stages, cudaStream_t stream) {
  DeviceFacts facts;
  const cudaError_t error = device_facts(facts);
  if (error != cudaSuccess) return error;
  return dispatch_plan<StagedLadder<scalar_t>>(params.hidden_size, facts.max_cluster, [&](auto plan) {
    using Plan = decltype(plan);
    constexpr int kRows = kForwardThreads<Plan> / Plan::kThreads;
    const auto kernel = norm_forward_stages_kernel<scalar_t, Plan>;
    const int cluster = cluster_for<Plan>(vecs_of<Plan::kVec>(params.hidden_size), facts.max_cluster);
    if constexpr (Plan::kClusters) {
      static OncePerDevice allowed;
      const cudaError_t error = allowed.run(facts.device, [&] { return allow_more(kernel, 0, facts.max_cluster); });
      if (error != cudaSuccess) return error;
    }
    const ClusterLaunch launch((params.rows + kRows - 1) / kRows * cluster, kForwardThreads<Plan>, 0, cluster, stream);
    return cudaLaunchKernelEx(&launch.config, kernel, params, inverse_of<acc_type<scalar_t>>(params.hidden_size),
                              stages);
  });
}

}  // namespace fused_layernorm
