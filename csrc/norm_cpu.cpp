// CPU kernels: rows spread over threads, columns over SIMD lanes. The arithmetic is in norm_cpu_rows.inl, compiled for
// several instruction sets in one build; this file picks one, widens the affine parameters, and deals out the rows.
// Statistics: mean = sum(x)/N rounded; then tail = sum(x - mean)/N and var = sum((x - mean)^2)/N - tail^2, so that
// mean + tail carries about twice the precision of the type. RMSNorm is the same with mean = tail = c2 = 0.
// A row's result is a function of that row alone: threads and row count decide where it is computed, never how.
//
// at::parallel_for is parallel only in a file compiled with -fopenmp.
#include <ATen/Parallel.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <memory>
#include <type_traits>

#include "norm_params.h"
#include "philox.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define FLN_X86_DISPATCH 1
#include <immintrin.h>
#endif
#if defined(__GNUC__)
#define FLN_INLINE __attribute__((always_inline)) inline
#define FLN_INLINE_LAMBDA __attribute__((always_inline))
// Into L2: the row at hand fills L1 (2048 columns fp32 on Zen 3: 1.35 times as fast as into L1).
#define FLN_PREFETCH(address) __builtin_prefetch(address, 0, 2)
#define FLN_BASELINE_VECTOR_BYTES 16
#else
#define FLN_INLINE inline
#define FLN_INLINE_LAMBDA
#define FLN_PREFETCH(address) static_cast<void>(address)
#define FLN_BASELINE_VECTOR_BYTES 0
#endif

namespace fused_layernorm {
namespace {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <class x_t>
using AccOf = typename std::conditional<std::is_same<x_t, double>::value, double, float>::type;

// `weight` and `bias` come as acc_t rows, never null; rows and columns as [begin, end).
using ForwardRows = void (*)(const NormForwardParams&, const void* weight, const void* bias, int64_t begin, int64_t end,
                             void* y_row);
using BackwardRows = void (*)(const NormBackwardParams&, const void* weight, void* grad_weight_partial,
                              void* grad_bias_partial, int64_t begin, int64_t end, void* grad_row);
// One row of the gradient of weight or bias, where each row has its own.
using OwnGradRow = void (*)(const NormBackwardParams&, int64_t row, bool of_weight, void* grad);
// `gate`: as weight, or null. `scales_memory`: hidden_size elements of acc_t, for dropout.
using AddRow = void (*)(const NormForwardParams&, const void* gate, int64_t row, void* scales_memory);
using AddGradRow = void (*)(const NormBackwardParams&, const void* gate, void* grad_gate_partial, int64_t row,
                            const void* grad_norm, void* scales_memory);
// Makes y of a row of the norm, which is in acc_t.
using AfterRow = void (*)(const NormForwardParams&, int64_t row, const void* norm, void* scales_memory);
// Makes a row that backward reads, in acc_t: the norm's gradient from y's, or x_hat from y.
using NormRow = void (*)(const NormBackwardParams&, const void* weight, const void* bias, int64_t row, void* made,
                         void* scales_memory);
using KeepRow = void (*)(const Dropout&, int64_t row, int64_t hidden_size, uint8_t* keep);
using SumChunks = void (*)(const void* partial, int64_t chunks, int64_t hidden_size, void* grad, bool accumulate,
                           int64_t begin, int64_t end);
// to = from + offset, or offset alone where `from` is null.
using WidenColumns = void (*)(const void* from, double offset, int64_t hidden_size, void* to);

struct Kernels {
  ForwardRows (*forward_rows_of)(DType x_dtype, DType y_dtype);
  BackwardRows (*backward_rows_of)(DType x_dtype, DType grad_output_dtype, DType grad_input_dtype);
  OwnGradRow (*own_grad_row_of)(DType x_dtype, DType grad_dtype);
  AddRow (*add_row_of)(DType x_dtype, DType residual_dtype, DType z_dtype);
  AddGradRow (*add_grad_row_of)(DType x_dtype, DType residual_dtype, DType z_dtype);
  AfterRow (*after_row_of)(bool is_double, DType y_dtype, Activation activation);
  NormRow (*after_grad_row_of)(DType x_dtype, Activation activation);
  NormRow (*recover_row_of)(DType y_dtype);
  KeepRow keep_row;
  SumChunks (*sum_chunks_of)(bool is_double, DType grad_dtype);
  WidenColumns (*widen_columns_of)(bool is_double, DType from_dtype);
};

#define FLN_ISA baseline
#define FLN_VECTOR_BYTES FLN_BASELINE_VECTOR_BYTES
#include "norm_cpu_rows.inl"

#if FLN_X86_DISPATCH

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define FLN_ISA avx2
#define FLN_VECTOR_BYTES 32
#include "norm_cpu_rows.inl"

#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")  // on top of the options above
#endif
#define FLN_ISA avx512
#define FLN_VECTOR_BYTES 64
#include "norm_cpu_rows.inl"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // FLN_X86_DISPATCH

// The widest instruction set that the CPU has. torch's own switch holds it back: ATEN_CPU_CAPABILITY=avx2 or default.
const Kernels& pick_kernels() {
#if FLN_X86_DISPATCH
  const char* limit = getenv("ATEN_CPU_CAPABILITY");
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (!has_avx2 || (limit && strcmp(limit, "default") == 0)) return baseline::kernels;
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has_avx512 && !(limit && strcmp(limit, "avx2") == 0) ? avx512::kernels : avx2::kernels;
#else
  return baseline::kernels;
#endif
}

const Kernels& kernels() {
  static const Kernels& picked = pick_kernels();
  return picked;
}

size_t acc_bytes(DType x_dtype) { return dtype_bytes(accumulation_dtype(x_dtype)); }

// A row of the accumulation type that a thread has for itself.
class RowMemory {
 public:
  RowMemory(int64_t hidden_size, DType x_dtype)
      : memory_(hidden_size > 0 ? new char[hidden_size * acc_bytes(x_dtype)] : nullptr) {}
  void* get() const { return memory_.get(); }

 private:
  std::unique_ptr<char[]> memory_;
};

// weight + offset, or bias, as a row of the accumulation type. The tensor itself where it is one already; else a
// widened copy, made once a launch, which spares every row the conversion, and the kernels a type and two flags.
class AffineRow {
 public:
  AffineRow(const void* tensor, DType dtype, double offset, double if_absent, DType x_dtype, int64_t hidden_size) {
    const bool is_double = x_dtype == DType::kFloat64;
    if (tensor && offset == 0 && dtype == (is_double ? DType::kFloat64 : DType::kFloat32)) {
      row_ = tensor;
      return;
    }
    copy_.reset(new char[hidden_size * acc_bytes(x_dtype)]);
    row_ = copy_.get();
    kernels().widen_columns_of(is_double, dtype)(tensor, tensor ? offset : if_absent, hidden_size, copy_.get());
  }

  const void* get() const { return row_; }

 private:
  const void* row_;
  std::unique_ptr<char[]> copy_;
};

// What a thread should at least have: fewer elements than this take less time than waking another thread.
constexpr int64_t kElementsPerThread = 8192;

int64_t grain(int64_t elements_per_item) {
  return elements_per_item >= kElementsPerThread ? 1 : kElementsPerThread / elements_per_item;
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Weight gradients are summed within chunks of rows, then over the chunks in their order. The chunks depend on the
// shape alone, so the thread count cannot change a bit. At most 64 of them bound the workspace; 16 rows (fewer where
// rows are very long) keep the partial sums small beside x itself.
struct ChunkPlan {
  int64_t rows_per_chunk, chunks, partial_bytes, bias_offset, gate_offset, workspace_bytes;
};

ChunkPlan plan_chunks(const NormBackwardParams& params) {
  ChunkPlan plan{};
  plan.rows_per_chunk = 1;
  if (params.grad_weight || params.grad_bias || params.grad_gate) {
    const int64_t small = (int64_t{1} << 18) / params.hidden_size;
    const int64_t at_least = small < 1 ? 1 : small > 16 ? 16 : small;
    const int64_t spread = divide_up(params.rows, 64);
    plan.rows_per_chunk = spread > at_least ? spread : at_least;
  }
  plan.chunks = divide_up(params.rows, plan.rows_per_chunk);
  plan.partial_bytes = params.hidden_size * acc_bytes(params.x_dtype);
  plan.bias_offset = params.grad_weight ? plan.chunks * plan.partial_bytes : 0;
  plan.gate_offset = plan.bias_offset + (params.grad_bias ? plan.chunks * plan.partial_bytes : 0);
  plan.workspace_bytes = plan.gate_offset + (params.grad_gate ? plan.chunks * plan.partial_bytes : 0);
  return plan;
}

}  // namespace

// Threads share out rows, so a single huge row is the work of one thread. Calls rows(weight, bias, begin, end).
template <class F>
static void for_rows(const NormForwardParams& params, F&& rows) {
  const AffineRow weight(params.weight, params.weight_dtype, params.weight_offset, 1, params.x_dtype,
                         params.hidden_size);
  const AffineRow bias(params.bias, params.weight_dtype, 0, 0, params.x_dtype, params.hidden_size);
  at::parallel_for(0, params.rows, grain(params.hidden_size),
                   [&](int64_t begin, int64_t end) { rows(weight.get(), bias.get(), begin, end); });
}

static void launch_add_norm_forward(const NormForwardParams& params) {
  const AddStage& add = *params.add;
  NormForwardParams of_z = params;
  of_z.x = add.residual_out;
  of_z.x_dtype = add.residual_out_dtype;
  of_z.x_strides = RowStrides{params.rows, params.hidden_size, 0};
  const ForwardRows forward_rows = kernels().forward_rows_of(of_z.x_dtype, params.y_dtype);
  const AddRow add_row = kernels().add_row_of(params.x_dtype, add.residual_dtype, of_z.x_dtype);
  const AffineRow gate(add.gate, params.x_dtype, 0, 1, params.x_dtype, add.gate ? params.hidden_size : 0);
  for_rows(of_z, [&](const void* weight, const void* bias, int64_t begin, int64_t end) {
    const RowMemory scales(add.dropout.philox ? params.hidden_size : 0, of_z.x_dtype);
    for (int64_t row = begin; row < end; ++row) {  // z's row is normalized while it lies in the cache
      add_row(params, add.gate ? gate.get() : nullptr, row, scales.get());
      forward_rows(of_z, weight, bias, row, row + 1, nullptr);
    }
  });
}

static void launch_norm_forward_after(const NormForwardParams& params) {
  const DType acc_dtype = accumulation_dtype(params.x_dtype);
  const ForwardRows forward_rows = kernels().forward_rows_of(params.x_dtype, acc_dtype);
  const AfterRow after_row =
      kernels().after_row_of(acc_dtype == DType::kFloat64, params.y_dtype, params.after->activation);
  for_rows(params, [&](const void* weight, const void* bias, int64_t begin, int64_t end) {
    const RowMemory norm(params.hidden_size, params.x_dtype);
    const RowMemory scales(params.after->dropout.philox ? params.hidden_size : 0, params.x_dtype);
    for (int64_t row = begin; row < end; ++row) {
      forward_rows(params, weight, bias, row, row + 1, norm.get());
      after_row(params, row, norm.get(), scales.get());
    }
  });
}

// Segments next to each other, until there is one that has work for all threads: then they work on it together. Calls
// segments(begin, end).
template <class Params, class F>
static void for_segments(const Params& params, F&& segments) {
  const int64_t rows = params.rows / params.segments, elements = rows * params.hidden_size;
  const int64_t threads = at::get_num_threads();
  if (rows >= threads && elements >= kElementsPerThread * threads) return segments(0, params.segments);
  at::parallel_for(0, params.segments, grain(elements), segments);
}

void launch_norm_forward_cpu(const NormForwardParams& params) {
  if (params.segments > 1) {
    return for_segments(params, [&](int64_t begin, int64_t end) {
      for (int64_t segment = begin; segment < end; ++segment)
        launch_norm_forward_cpu(ForwardSegment(params, static_cast<int>(segment)));
    });
  }
  if (params.add) return launch_add_norm_forward(params);
  if (params.after) return launch_norm_forward_after(params);
  const ForwardRows forward_rows = kernels().forward_rows_of(params.x_dtype, params.y_dtype);
  for_rows(params, [&](const void* weight, const void* bias, int64_t begin, int64_t end) {
    forward_rows(params, weight, bias, begin, end, nullptr);
  });
}

void launch_dropout_mask_cpu(const DropoutMaskParams& params) {
  at::parallel_for(0, params.rows, grain(params.hidden_size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      kernels().keep_row(params.dropout, row, params.hidden_size, params.mask + row * params.hidden_size);
  });
}

int64_t norm_backward_workspace_cpu(const NormBackwardParams& params) {
  if (params.segments > 1) return 0;  // whoever has segments has memory for one
  return plan_chunks(params).workspace_bytes;
}

// Of segments of one row each (a scale for each token): nothing is summed, and memory is a thread's own.
static void launch_norm_backward_of_own(const NormBackwardParams& params) {
  const AddGradStage* add = params.add;
  const GateGradStage* gate = params.gate;
  const int64_t n = params.hidden_size;
  const bool is_double = params.x_dtype == DType::kFloat64;
  const bool wants_rows = params.grad_input || params.grad_gate || (add && add->grad_residual);
  const OwnGradRow grad_weight_row = kernels().own_grad_row_of(params.x_dtype, params.grad_weight_dtype);
  const OwnGradRow grad_bias_row = kernels().own_grad_row_of(params.x_dtype, params.grad_bias_dtype);
  const WidenColumns widen = kernels().widen_columns_of(is_double, params.weight_dtype);
  const WidenColumns widen_gate = gate ? kernels().widen_columns_of(is_double, gate->grad_input_dtype) : nullptr;
  const BackwardRows backward_rows = kernels().backward_rows_of(
      params.x_dtype, params.x_dtype, add ? accumulation_dtype(params.x_dtype) : params.x_dtype);
  const AddGradRow add_grad_row =
      add ? kernels().add_grad_row_of(add->grad_input_dtype, add->grad_residual_dtype, params.x_dtype) : nullptr;
  at::parallel_for(0, params.rows, grain(n), [&](int64_t begin, int64_t end) {
    const RowMemory weight(n, params.x_dtype), grad_norm(add ? n : 0, params.x_dtype);
    const RowMemory gate_row(gate ? n : 0, params.x_dtype), gate_partial(params.grad_gate ? n : 0, params.x_dtype);
    for (int64_t row = begin; row < end; ++row) {
      if (params.grad_weight) grad_weight_row(params, row, true, params.grad_weight);
      if (params.grad_bias) grad_bias_row(params, row, false, params.grad_bias);
      if (!wants_rows) continue;
      widen(advanced(params.weight, row * params.weight_stride, params.weight_dtype), params.weight_offset, n,
            weight.get());
      backward_rows(params, weight.get(), nullptr, nullptr, row, row + 1, grad_norm.get());
      if (!add) continue;
      if (gate) widen_gate(advanced(gate->gate, row * gate->gate_stride, gate->grad_input_dtype), 0, n, gate_row.get());
      if (params.grad_gate) memset(gate_partial.get(), 0, n * acc_bytes(params.x_dtype));
      add_grad_row(params, gate_row.get(), gate_partial.get(), row, grad_norm.get(), nullptr);
      if (params.grad_gate)
        kernels().sum_chunks_of(is_double, params.grad_gate_dtype)(
            gate_partial.get(), 1, n, advanced(params.grad_gate, row * n, params.grad_gate_dtype), false, 0, n);
    }
  });
}

void launch_norm_backward_cpu(const NormBackwardParams& params) {
  if (params.segments > 1 && params.segments == params.rows &&
      (!params.add || params.add->grad_output_dtype == params.x_dtype))
    return launch_norm_backward_of_own(params);
  if (params.segments > 1) {
    return for_segments(params, [&](int64_t begin, int64_t end) {
      const std::unique_ptr<char[]> workspace(
          new char[norm_backward_workspace_cpu(BackwardSegment(params, static_cast<int>(begin)))]);
      for (int64_t segment = begin; segment < end; ++segment) {
        BackwardSegment one(params, static_cast<int>(segment));
        one.workspace = workspace.get();
        launch_norm_backward_cpu(one);
      }
    });
  }
  const ChunkPlan plan = plan_chunks(params);
  char* const workspace = static_cast<char*>(params.workspace);

  // Rows: grad_input, and the partial sums of each chunk. Where something came after the norm, or x is y, a row that
  // backward reads is made first. Only that and grad_input read the weight.
  const AddGradStage* add = params.add;
  const AfterNorm* after = params.after;
  const bool makes_rows = after || params.x_is_y;
  const bool wants_rows = params.grad_input || params.grad_gate || (add && add->grad_residual);
  const int64_t weight_columns = wants_rows || makes_rows ? params.hidden_size : 0;
  const AffineRow weight(weight_columns ? params.weight : nullptr, params.weight_dtype, params.weight_offset, 1,
                         params.x_dtype, weight_columns);
  const AffineRow bias(makes_rows ? params.bias : nullptr, params.weight_dtype, 0, 0, params.x_dtype,
                       makes_rows ? params.hidden_size : 0);
  const void* gate_tensor = params.gate ? params.gate->gate : nullptr;
  const DType gate_dtype = params.gate ? params.gate->grad_input_dtype : params.x_dtype;
  const AffineRow gate(gate_tensor, gate_dtype, 0, 1, params.x_dtype, gate_tensor ? params.hidden_size : 0);

  const DType acc_dtype = accumulation_dtype(params.x_dtype);
  const DType grad_dtype = after ? acc_dtype : add ? add->grad_output_dtype : params.x_dtype;
  const BackwardRows backward_rows = kernels().backward_rows_of(params.x_is_y ? acc_dtype : params.x_dtype, grad_dtype,
                                                                add ? acc_dtype : params.x_dtype);
  const NormRow make_row = params.x_is_y ? kernels().recover_row_of(params.x_dtype)
                           : after       ? kernels().after_grad_row_of(params.x_dtype, after->activation)
                                         : nullptr;
  const Dropout* dropout = add ? &add->dropout : after ? &after->dropout : nullptr;
  if (!wants_rows) add = nullptr;
  const AddGradRow add_grad_row =
      add ? kernels().add_grad_row_of(add->grad_input_dtype, add->grad_residual_dtype, params.x_dtype) : nullptr;
  const int64_t chunk_grain = grain(params.hidden_size * plan.rows_per_chunk);
  at::parallel_for(0, plan.chunks, chunk_grain, [&](int64_t begin, int64_t end) {
    const RowMemory grad_norm(add ? params.hidden_size : 0, params.x_dtype);
    const RowMemory made(makes_rows ? params.hidden_size : 0, params.x_dtype);
    const RowMemory scales(dropout && dropout->philox ? params.hidden_size : 0, params.x_dtype);
    NormBackwardParams of_row = params;
    if (makes_rows) {
      (params.x_is_y ? of_row.x : of_row.grad_output) = made.get();
      (params.x_is_y ? of_row.x_strides : of_row.grad_output_strides) = RowStrides{params.rows, 0, 0};
    }
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const auto partial_at = [&](void* wanted, int64_t offset) -> char* {
        if (!wanted) return nullptr;
        char* const partial = workspace + offset + chunk * plan.partial_bytes;
        memset(partial, 0, plan.partial_bytes);
        return partial;
      };
      char* const weight_partial = partial_at(params.grad_weight, 0);
      char* const bias_partial = partial_at(params.grad_bias, plan.bias_offset);
      char* const gate_partial = partial_at(params.grad_gate, plan.gate_offset);
      const int64_t first_row = chunk * plan.rows_per_chunk;
      const int64_t end_row =
          first_row + plan.rows_per_chunk < params.rows ? first_row + plan.rows_per_chunk : params.rows;
      if (!add && !makes_rows) {
        backward_rows(params, weight.get(), weight_partial, bias_partial, first_row, end_row, nullptr);
        continue;
      }
      for (int64_t row = first_row; row < end_row; ++row) {
        if (make_row) make_row(params, weight.get(), bias.get(), row, made.get(), scales.get());
        backward_rows(of_row, weight.get(), weight_partial, bias_partial, row, row + 1, grad_norm.get());
        if (add)
          add_grad_row(params, gate_tensor ? gate.get() : nullptr, gate_partial, row, grad_norm.get(), scales.get());
      }
    }
  });

  // Columns: the chunks' sums.
  const auto sum_chunks = [&](int64_t offset, void* grad, DType dtype) {
    if (!grad) return;
    const SumChunks sum_columns = kernels().sum_chunks_of(params.x_dtype == DType::kFloat64, dtype);
    at::parallel_for(0, params.hidden_size, grain(plan.chunks), [&](int64_t begin, int64_t end) {
      sum_columns(workspace + offset, plan.chunks, params.hidden_size, grad, params.accumulate, begin, end);
    });
  };
  sum_chunks(0, params.grad_weight, params.grad_weight_dtype);
  sum_chunks(plan.bias_offset, params.grad_bias, params.grad_bias_dtype);
  sum_chunks(plan.gate_offset, params.grad_gate, params.grad_gate_dtype);
}

}  // namespace fused_layernorm
