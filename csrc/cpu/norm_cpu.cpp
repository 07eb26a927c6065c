// CPU kernels: rows spread over threads, columns over SIMD lanes. The arithmetic is in norm_cpu_rows.inl, compiled for
// several instruction sets in one build; this file picks one, widens the affine parameters, and gives rows to threads.
//
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
#include <utility>

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

// weight (offset included), bias and gate are rows of acc_t, and so are intermediate rows. Rows are [begin, end).
// y_row, grad_row: if not null, the result goes there instead of to the rows of params.y or params.grad_input.
using ForwardRows = void (*)(const NormForwardParams&, const void* weight, const void* bias, int64_t begin, int64_t end,
                             void* y_row);
using BackwardRows = void (*)(const NormBackwardParams&, const void* weight, void* grad_weight_partial,
                              void* grad_bias_partial, int64_t begin, int64_t end, void* grad_row);
// scales_memory: hidden_size elements of acc_t, for dropout.
using LoadStageRow = void (*)(const NormForwardParams&, const void* gate, int64_t row, void* scales_memory);
using LoadStageGradRow = void (*)(const NormBackwardParams&, const void* gate, void* grad_gate_partial, int64_t row,
                                  const void* grad_norm, const void* grad_residual_out, void* scales_memory);
using EpilogueRow = void (*)(const NormForwardParams&, int64_t row, const void* u, void* scales_memory);
using EpilogueGradRow = void (*)(const NormBackwardParams&, const void* weight, const void* bias, int64_t row,
                                 const void* grad_output, void* grad, void* scales_memory);
using RecoverRow = void (*)(const NormBackwardParams&, const void* weight, const void* bias, int64_t row, void* x_hat);
using KeepRow = void (*)(const Dropout&, int64_t row, int64_t hidden_size, uint8_t* keep);
using SumChunks = void (*)(const void* partial, int64_t chunks, int64_t hidden_size, void* grad, bool accumulate,
                           int64_t begin, int64_t end);
// to = from + offset, or offset alone where `from` is null.
using WidenColumns = void (*)(const void* from, double offset, int64_t hidden_size, void* to);

struct Kernels {
  ForwardRows (*forward_rows_of)(DType x_dtype, DType y_dtype);
  BackwardRows (*backward_rows_of)(DType z_dtype, DType grad_output_dtype, DType grad_input_dtype);
  LoadStageRow (*load_stage_row_of)(DType x_dtype, DType residual_dtype, DType z_dtype);
  LoadStageGradRow (*load_stage_grad_row_of)(DType x_dtype, DType residual_dtype, DType z_dtype);
  EpilogueRow (*epilogue_row_of)(bool is_double, DType y_dtype, Activation activation);
  EpilogueGradRow (*epilogue_grad_row_of)(DType z_dtype, Activation activation);
  RecoverRow (*recover_row_of)(DType y_dtype);
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

// A thread's own row of the accumulation type; no memory if it is not needed.
class RowMemory {
 public:
  RowMemory(bool is_needed, int64_t hidden_size, DType x_dtype)
      : memory_(is_needed ? new char[hidden_size * acc_bytes(x_dtype)] : nullptr) {}
  char* get() const { return memory_.get(); }

 private:
  std::unique_ptr<char[]> memory_;
};

template <class T>
T* advanced(T* data, int64_t elements, DType dtype) {
  using Byte = typename std::conditional<std::is_const<T>::value, const char, char>::type;
  return data ? static_cast<Byte*>(data) + elements * dtype_bytes(dtype) : nullptr;
}

// weight + offset, bias or gate as a row of the accumulation type: the tensor itself if it is one already, else a
// widened copy. So no row converts it, and the kernels need no template argument for its type. The copy is made once a
// launch if all rows share the parameter, else by take(), when a thread enters a segment.
class ParameterRow {
 public:
  ParameterRow(const void* tensor, DType dtype, double offset, double if_absent, DType x_dtype, int64_t hidden_size)
      : tensor_(tensor),
        dtype_(dtype),
        is_double_(x_dtype == DType::kFloat64),
        offset_(tensor ? offset : if_absent),
        hidden_size_(hidden_size) {
    const bool is_ready = tensor && offset == 0 && dtype == (is_double_ ? DType::kFloat64 : DType::kFloat32);
    if (!is_ready) memory_.reset(new char[hidden_size * (is_double_ ? 8 : 4)]);
    take(0);
  }

  const void* get() const { return row_; }

  // Takes the segment that begins `elements` behind the tensor's first.
  void take(int64_t elements) {
    const void* from = advanced(tensor_, elements, dtype_);
    row_ = memory_ ? memory_.get() : from;
    if (memory_) kernels().widen_columns_of(is_double_, dtype_)(from, offset_, hidden_size_, memory_.get());
  }

 private:
  const void* tensor_;
  DType dtype_;
  bool is_double_;
  double offset_;
  int64_t hidden_size_;
  const void* row_ = nullptr;
  std::unique_ptr<char[]> memory_;
};

// weight, bias and gate of a thread's current segment. With one segment all threads share one object.
class Parameters {
 public:
  template <class Params>
  Parameters(const Params& params, bool needs_weight, bool needs_bias)
      : weight_stride_(params.weight_stride),
        gate_stride_(params.gate_stride),
        has_gate_(params.gate),
        weight_(needs_weight ? params.weight : nullptr, params.weight_dtype, params.weight_offset, 1, params.x_dtype,
                needs_weight ? params.hidden_size : 0),
        bias_(needs_bias ? params.bias : nullptr, params.weight_dtype, 0, 0, params.x_dtype,
              needs_bias ? params.hidden_size : 0),
        gate_(params.gate, params.x_dtype, 0, 1, params.x_dtype, params.gate ? params.hidden_size : 0) {}

  void take(int64_t segment) {
    if (segment == segment_) return;
    segment_ = segment;
    weight_.take(segment * weight_stride_);
    bias_.take(segment * weight_stride_);
    if (has_gate_) gate_.take(segment * gate_stride_);
  }
  const void* weight() const { return weight_.get(); }
  const void* bias() const { return bias_.get(); }
  const void* gate() const { return gate_.get(); }

 private:
  int64_t segment_ = 0, weight_stride_, gate_stride_;
  bool has_gate_;
  ParameterRow weight_, bias_, gate_;
};

// The least work of a thread: fewer elements than this take less time than waking another thread.
constexpr int64_t kElementsPerThread = 8192;

int64_t grain(int64_t elements_per_item) {
  return elements_per_item >= kElementsPerThread ? 1 : kElementsPerThread / elements_per_item;
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t segments_of(const NormStages& stages) { return stages.segments > 1 ? stages.segments : 1; }

// Splits rows [begin, end) where segments end, and calls rows(parameters, begin, end) for each piece.
template <class F>
void for_rows_of_segments(Parameters& shared, const NormForwardParams& params, int64_t begin, int64_t end, F&& rows) {
  const int64_t segments = segments_of(params);
  if (segments == 1) return rows(shared, begin, end);
  Parameters own(params, true, true);
  const int64_t rows_each = params.rows / segments;
  while (begin < end) {
    const int64_t segment = begin / rows_each, until = least((segment + 1) * rows_each, end);
    own.take(segment);
    rows(own, begin, until);
    begin = until;
  }
}

}  // namespace

// Parallel over rows: a single huge row is the work of one thread.
void launch_norm_forward_cpu(const NormForwardParams& params) {
  const bool has_load_stage = params.residual_out, has_epilogue = params.has_epilogue();
  const DType acc_dtype = accumulation_dtype(params.x_dtype);
  NormForwardParams of_z = params;
  if (has_load_stage) {
    of_z.x = params.residual_out;
    of_z.x_dtype = params.z_dtype;
    of_z.x_strides = RowStrides{params.rows, params.hidden_size, 0};
  }
  const ForwardRows forward_rows = kernels().forward_rows_of(of_z.x_dtype, has_epilogue ? acc_dtype : params.y_dtype);
  const LoadStageRow load_stage_row =
      kernels().load_stage_row_of(params.x_dtype, params.residual_dtype, params.z_dtype);
  const EpilogueRow epilogue_row =
      kernels().epilogue_row_of(acc_dtype == DType::kFloat64, params.y_dtype, params.activation);
  Parameters shared(params, true, true);
  at::parallel_for(0, params.rows, grain(params.hidden_size), [&](int64_t begin, int64_t end) {
    const RowMemory u(has_epilogue, params.hidden_size, params.x_dtype);
    const RowMemory scales(params.dropout.philox, params.hidden_size, params.x_dtype);
    for_rows_of_segments(shared, params, begin, end, [&](const Parameters& of_row, int64_t first, int64_t until) {
      if (!has_load_stage && !has_epilogue)
        return forward_rows(of_z, of_row.weight(), of_row.bias(), first, until, nullptr);
      for (int64_t row = first; row < until; ++row) {  // each stage finds the row in the cache
        if (has_load_stage) load_stage_row(params, of_row.gate(), row, scales.get());
        forward_rows(of_z, of_row.weight(), of_row.bias(), row, row + 1, u.get());
        if (has_epilogue) epilogue_row(params, row, u.get(), scales.get());
      }
    });
  });
}

void launch_dropout_mask_cpu(const DropoutMaskParams& params) {
  at::parallel_for(0, params.rows, grain(params.hidden_size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      kernels().keep_row(params.dropout, row, params.hidden_size, params.mask + row * params.hidden_size);
  });
}

// ---- backward ------------------------------------------------------------------------------------------------------

namespace {

// Weight gradients are summed within chunks of a segment's rows, then over the chunks in their order. The chunks depend
// on the shape alone, so the thread count cannot change a bit. At most 64 of them a segment bound the workspace; 16
// rows (fewer where rows are very long) keep the partial sums small beside x itself. A segment of one chunk needs no
// workspace: its sum is final.
struct ChunkPlan {
  int64_t rows_of_segment, rows_per_chunk, chunks_of_segment, chunks, partial_bytes;

  explicit ChunkPlan(const NormBackwardParams& params) {
    rows_of_segment = params.rows / segments_of(params);
    rows_per_chunk = 1;
    if (params.wants_columns()) {
      const int64_t small = (int64_t{1} << 18) / params.hidden_size;
      const int64_t at_least = small < 1 ? 1 : small > 16 ? 16 : small;
      const int64_t spread = divide_up(rows_of_segment, 64);
      rows_per_chunk = spread > at_least ? spread : at_least;
    }
    chunks_of_segment = divide_up(rows_of_segment, rows_per_chunk);
    chunks = chunks_of_segment * segments_of(params);
    partial_bytes = params.hidden_size * static_cast<int64_t>(acc_bytes(params.z_dtype));
  }
  int64_t workspace_bytes(const NormBackwardParams& params) const {
    const int64_t sums = (params.grad_weight ? 1 : 0) + (params.grad_bias ? 1 : 0) + (params.grad_gate ? 1 : 0);
    return chunks_of_segment == 1 ? 0 : sums * chunks * partial_bytes;
  }
};

// The sums over rows of one gradient: partial sums of the chunks, and the gradient that they become.
struct ColumnSums {
  void* grad;  // [segments, hidden_size], or null
  DType dtype;
  bool accumulate;
  char* partials;  // [chunks, hidden_size] of the workspace, or null: a chunk's sum is final

  ColumnSums(void* grad, DType dtype, bool accumulate, const ChunkPlan& plan, char*& workspace)
      : grad(grad),
        dtype(dtype),
        accumulate(accumulate),
        partials(grad && plan.chunks_of_segment > 1 ? workspace : nullptr) {
    if (partials) workspace += plan.chunks * plan.partial_bytes;
  }
  char* begin_chunk(const ChunkPlan& plan, int64_t chunk, const RowMemory& own) const {
    if (!grad) return nullptr;
    char* partial = partials ? partials + chunk * plan.partial_bytes : own.get();
    memset(partial, 0, plan.partial_bytes);
    return partial;
  }
  void finish(const NormBackwardParams& params, const void* partial, int64_t chunks, int64_t segment, int64_t begin,
              int64_t end) const {
    kernels().sum_chunks_of(params.z_dtype == DType::kFloat64, dtype)(
        partial, chunks, params.hidden_size, advanced(grad, segment * params.hidden_size, dtype), accumulate, begin,
        end);
  }
};

// Which rows a thread converts, or computes from others, before it reads them.
struct MadeRows {
  const NormBackwardParams& params;
  DType acc_dtype = accumulation_dtype(params.z_dtype);
  bool is_double = acc_dtype == DType::kFloat64;
  // Without an epilogue most pairs of types are read as they are (backward_rows_of)
  bool is_read_as_it_is = params.grad_output_dtype == params.z_dtype || params.grad_output_dtype == acc_dtype ||
                          (params.z_dtype == DType::kFloat32 && dtype_bytes(params.grad_output_dtype) == 2);
  bool widens_grad = params.has_epilogue() ? params.grad_output_dtype != acc_dtype : !is_read_as_it_is;
  bool makes_grad = widens_grad || params.has_epilogue();
  bool widens_residual_grad = params.grad_residual_out && params.grad_residual_out_dtype != params.z_dtype;

  bool any() const { return makes_grad || params.z_is_y; }
  DType grad_dtype() const { return makes_grad ? acc_dtype : params.grad_output_dtype; }
  DType z_dtype() const { return params.z_is_y ? acc_dtype : params.z_dtype; }
};

const void* row_of(const void* data, const RowStrides& strides, DType dtype, int64_t row) {
  return advanced(data, strides.offset(row), dtype);
}

// Backward of rows [begin, end) of one segment, by one thread.
class BackwardWork {
 public:
  BackwardWork(const NormBackwardParams& params, const MadeRows& made)
      : params_(params),
        made_(made),
        of_row_(params),
        has_load_stage_(params.has_load_stage),
        grad_norm_(has_load_stage_, params.hidden_size, params.z_dtype),
        grad_(made.makes_grad, params.hidden_size, params.z_dtype),
        x_hat_(params.z_is_y, params.hidden_size, params.z_dtype),
        residual_grad_(made.widens_residual_grad, params.hidden_size, params.z_dtype),
        scales_(params.dropout.philox, params.hidden_size, params.z_dtype) {
    const DType acc = made.acc_dtype;
    backward_rows_ =
        kernels().backward_rows_of(made.z_dtype(), made.grad_dtype(), has_load_stage_ ? acc : params.x_dtype);
    load_stage_grad_row_ = kernels().load_stage_grad_row_of(params.x_dtype, params.residual_dtype,
                                                            made.widens_residual_grad ? acc : params.z_dtype);
    epilogue_grad_row_ = kernels().epilogue_grad_row_of(params.z_dtype, params.activation);
    recover_row_ = kernels().recover_row_of(params.z_dtype);
    if (made.makes_grad) {
      of_row_.grad_output = grad_.get();
      of_row_.grad_output_strides = RowStrides{params.rows, 0, 0};
    }
    if (params.z_is_y) {
      of_row_.z = x_hat_.get();
      of_row_.z_strides = RowStrides{params.rows, 0, 0};
    }
  }

  void operator()(const Parameters& parameters, char* weight_partial, char* bias_partial, char* gate_partial,
                  int64_t begin, int64_t end) const {
    if (!has_load_stage_ && !made_.any())
      return backward_rows_(params_, parameters.weight(), weight_partial, bias_partial, begin, end, nullptr);
    for (int64_t row = begin; row < end; ++row) {
      if (made_.makes_grad) make_grad(parameters, row);
      if (params_.z_is_y) recover_row_(params_, parameters.weight(), parameters.bias(), row, x_hat_.get());
      const bool wants_z = has_load_stage_ && params_.wants_rows();
      backward_rows_(of_row_, parameters.weight(), weight_partial, bias_partial, row, row + 1,
                     wants_z ? grad_norm_.get() : nullptr);
      if (wants_z)
        load_stage_grad_row_(params_, parameters.gate(), gate_partial, row, grad_norm_.get(), residual_grad(row),
                             scales_.get());
    }
  }

 private:
  void make_grad(const Parameters& parameters, int64_t row) const {
    const void* given = row_of(params_.grad_output, params_.grad_output_strides, params_.grad_output_dtype, row);
    if (made_.widens_grad) {
      kernels().widen_columns_of(made_.is_double, params_.grad_output_dtype)(given, 0, params_.hidden_size,
                                                                             grad_.get());
      given = grad_.get();
    }
    if (params_.has_epilogue())
      epilogue_grad_row_(params_, parameters.weight(), parameters.bias(), row, given, grad_.get(), scales_.get());
  }
  const void* residual_grad(int64_t row) const {
    if (!params_.grad_residual_out) return nullptr;
    const DType dtype = params_.grad_residual_out_dtype;
    const void* given = row_of(params_.grad_residual_out, params_.grad_residual_out_strides, dtype, row);
    if (!made_.widens_residual_grad) return given;
    kernels().widen_columns_of(made_.is_double, dtype)(given, 0, params_.hidden_size, residual_grad_.get());
    return residual_grad_.get();
  }

  const NormBackwardParams& params_;
  const MadeRows& made_;
  NormBackwardParams of_row_;
  bool has_load_stage_;
  RowMemory grad_norm_, grad_, x_hat_, residual_grad_, scales_;
  BackwardRows backward_rows_;
  LoadStageGradRow load_stage_grad_row_;
  EpilogueGradRow epilogue_grad_row_;
  RecoverRow recover_row_;
};

}  // namespace

int64_t norm_backward_workspace_cpu(const NormBackwardParams& params) {
  return ChunkPlan(params).workspace_bytes(params);
}

void launch_norm_backward_cpu(const NormBackwardParams& params) {
  const ChunkPlan plan(params);
  char* workspace = static_cast<char*>(params.workspace);
  const ColumnSums weight_sums(params.grad_weight, params.grad_weight_dtype, params.accumulate, plan, workspace);
  const ColumnSums bias_sums(params.grad_bias, params.grad_bias_dtype, params.accumulate, plan, workspace);
  const ColumnSums gate_sums(params.grad_gate, params.grad_gate_dtype, false, plan, workspace);
  const MadeRows made{params};
  // Only these read the weight
  const bool needs_weight = params.wants_rows() || made.any(), needs_bias = made.any();
  Parameters shared(params, needs_weight, needs_bias);
  const bool is_one_chunk = plan.chunks_of_segment == 1;
  const bool has_segments = params.segments > 1;
  at::parallel_for(
      0, plan.chunks, grain(params.hidden_size * least(plan.rows_per_chunk, plan.rows_of_segment)),
      [&](int64_t begin, int64_t end) {
        const RowMemory weight_sum(params.grad_weight && is_one_chunk, params.hidden_size, params.z_dtype);
        const RowMemory bias_sum(params.grad_bias && is_one_chunk, params.hidden_size, params.z_dtype);
        const RowMemory gate_sum(params.grad_gate && is_one_chunk, params.hidden_size, params.z_dtype);
        const BackwardWork work(params, made);
        std::unique_ptr<Parameters> own(has_segments ? new Parameters(params, needs_weight, needs_bias) : nullptr);
        for (int64_t chunk = begin; chunk < end; ++chunk) {
          const int64_t segment = chunk / plan.chunks_of_segment;
          const int64_t first =
              segment * plan.rows_of_segment + (chunk - segment * plan.chunks_of_segment) * plan.rows_per_chunk;
          const int64_t until = least(first + plan.rows_per_chunk, (segment + 1) * plan.rows_of_segment);
          if (own) own->take(segment);
          char* const of_weight = weight_sums.begin_chunk(plan, chunk, weight_sum);
          char* const of_bias = bias_sums.begin_chunk(plan, chunk, bias_sum);
          char* const of_gate = gate_sums.begin_chunk(plan, chunk, gate_sum);
          work(own ? *own : shared, of_weight, of_bias, of_gate, first, until);
          if (!is_one_chunk) continue;
          for (const auto& [sums, partial] :
               {std::pair(&weight_sums, of_weight), std::pair(&bias_sums, of_bias), std::pair(&gate_sums, of_gate)})
            if (partial) sums->finish(params, partial, 1, segment, 0, params.hidden_size);
        }
      });
  if (is_one_chunk) return;
  for (const ColumnSums* sums : {&weight_sums, &bias_sums, &gate_sums}) {
    if (!sums->grad) continue;
    for (int64_t segment = 0; segment < segments_of(params); ++segment) {
      const char* partials = sums->partials + segment * plan.chunks_of_segment * plan.partial_bytes;
      at::parallel_for(0, params.hidden_size, grain(plan.chunks_of_segment), [&](int64_t begin, int64_t end) {
        sums->finish(params, partials, plan.chunks_of_segment, segment, begin, end);
      });
    }
  }
}

}  // namespace fused_layernorm
