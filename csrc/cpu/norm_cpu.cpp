// CPU kernels: rows spread over threads, columns over SIMD lanes. The arithmetic is in norm_cpu_rows.inl, compiled for
// several instruction sets in one build; this file picks one, widens the affine parameters, and gives rows to threads.
//
// Statistics: mean = sum(x)/N rounded; then tail = sum(x - mean)/N and var = sum((x - mean)^2)/N - tail^2, so that
// mean + tail carries about twice the precision of the type. RMSNorm is the same with mean = tail = c2 = 0.
// A row's result is a function of that row alone: threads and row count decide where it is computed, never how.
//
// at::parallel_for is parallel only in a file compiled with -fopenmp; that of torch's stable interface, always.
#ifdef FUSED_LAYERNORM_STABLE_ABI
#include "stable/parallel.h"
#else
#include <ATen/Parallel.h>
#endif
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

template <class T>
using AccOf = typename std::conditional<std::is_same<T, double>::value, double, float>::type;

// weight (offset included), bias and gate of the rows at hand, as rows of the accumulation type; weight and bias of
// interleaved segments side by side.
struct ParameterRows {
  const void* weight;
  const void* bias;
  const void* gate;
};

// Partial sums of a chunk's rows, of the accumulation type and as wide as the parameters; null: not wanted.
struct PartialRows {
  void* weight;
  void* bias;
  void* gate;
};

// A thread's own rows of the accumulation type, by what they hold: kU is u, then backward grad_z; kResidual is
// residual, and backward grad_residual_out, then x; kScales is the row gate where there is one, and the residual that
// is added to y; kGrad is forward's rounded x_hat. Null where it is not needed.
enum ThreadRow { kZ, kGrad, kResidual, kU, kScales, kThreadRows };
constexpr int64_t kBlockColumns = 1024;  // of u, of a part of a row or several rows, so that an epilogue finds it in L1
struct ThreadMemory {
  void* row[kThreadRows];
};

// Rows are [begin, end), all of one segment unless these are interleaved. [4]: by the DType of the rows that they read;
// [2]: for float and double as the accumulation type.
struct Kernels {
  void (*forward_rows[4])(const NormForwardParams&, const ParameterRows&, const ThreadMemory&, int64_t begin,
                          int64_t end);
  void (*backward_rows[4])(const NormBackwardParams&, const ParameterRows&, const ThreadMemory&, const PartialRows&,
                           int64_t begin, int64_t end);
  void (*keep_row)(const Dropout&, int64_t row, int64_t hidden_size, uint8_t* keep);
  void (*sum_chunks[2])(const void* partial, int64_t chunks, int64_t hidden_size, void* grad, DType dtype,
                        bool accumulate, int64_t begin, int64_t end);
  void (*make_parameter[2])(const void* from, DType dtype, double offset, int64_t hidden_size, void* to);
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

// Segments of adjacent rows, and interleaved ones: not both are more than 1.
int64_t segments_of(const NormStages& stages) {
  return stages.segments > 1 && !stages.interleaves ? stages.segments : 1;
}
int64_t interleaved_of(const NormStages& stages) {
  return stages.segments > 1 && stages.interleaves ? stages.segments : 1;
}

size_t acc_bytes(DType dtype) { return dtype_bytes(accumulation_dtype(dtype)); }
int is_double(DType dtype) { return dtype == DType::kFloat64; }

// The rows of a ThreadMemory that are needed.
class OwnRows {
 public:
  OwnRows(DType dtype, int64_t hidden_size, const bool (&is_needed)[kThreadRows]) {
    for (int i = 0; i < kThreadRows; ++i) {
      const int64_t elements = i == kU && hidden_size < kBlockColumns ? kBlockColumns : hidden_size;
      if (is_needed[i]) memory_[i].reset(new char[elements * acc_bytes(dtype)]);
      rows.row[i] = memory_[i].get();
    }
  }
  ThreadMemory rows;

 private:
  std::unique_ptr<char[]> memory_[kThreadRows];
};

// weight + offset, bias or gate as a row of the accumulation type: the tensor itself if it is one already, else a
// widened copy. So no row converts it, and the kernels need no template argument for its type. The copy is made once a
// launch if all rows share the parameter, else by take(), when a thread enters a segment. Of interleaved segments it is
// one copy of all, so that rows can be read in their order: `parts` rows side by side, `stride` apart in the tensor.
class ParameterRow {
 public:
  ParameterRow(const void* tensor, DType dtype, double offset, double if_absent, DType x_dtype, int64_t hidden_size,
               int64_t parts, int64_t stride)
      : tensor_(tensor),
        dtype_(dtype),
        acc_dtype_(accumulation_dtype(x_dtype)),
        offset_(tensor ? offset : if_absent),
        hidden_size_(hidden_size),
        parts_(parts),
        stride_(stride) {
    const bool is_ready = tensor && offset == 0 && dtype == acc_dtype_ && (parts == 1 || stride == hidden_size);
    if (!is_ready) memory_.reset(new char[parts * hidden_size * acc_bytes(x_dtype)]);
    take(0);
  }

  const void* get() const { return row_; }

  // Takes the segment that begins `elements` behind the tensor's first.
  void take(int64_t elements) {
    row_ = memory_ ? memory_.get() : baseline::row_at(tensor_, dtype_, elements);
    for (int64_t i = 0; memory_ && i < parts_; ++i)
      kernels().make_parameter[is_double(acc_dtype_)](baseline::row_at(tensor_, dtype_, elements + i * stride_), dtype_,
                                                      offset_, hidden_size_,
                                                      baseline::row_at(memory_.get(), acc_dtype_, i * hidden_size_));
  }

 private:
  const void* tensor_;
  DType dtype_, acc_dtype_;
  double offset_;
  int64_t hidden_size_, parts_, stride_;
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
                needs_weight ? params.hidden_size : 0, interleaved_of(params), params.weight_stride),
        bias_(needs_bias ? params.bias : nullptr, params.weight_dtype, 0, 0, params.x_dtype,
              needs_bias ? params.hidden_size : 0, interleaved_of(params), params.weight_stride),
        gate_(params.gate, params.x_dtype, 0, 1, params.x_dtype, params.gate ? params.hidden_size : 0, 1, 0) {}

  void take(int64_t segment) {
    if (segment == segment_) return;
    segment_ = segment;
    weight_.take(segment * weight_stride_);
    bias_.take(segment * weight_stride_);
    if (has_gate_) gate_.take(segment * gate_stride_);
  }
  ParameterRows rows() const { return {weight_.get(), bias_.get(), gate_.get()}; }

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

}  // namespace

// Parallel over rows: a single huge row is the work of one thread.
void launch_norm_forward_cpu(const NormForwardParams& params) {
  const DType acc_dtype = accumulation_dtype(params.x_dtype);
  const bool is_of_one_dtype =
      params.row_gate ? params.gates_y
                      : !params.residual_out || (params.z_dtype == params.x_dtype &&
                                                 (!params.residual || params.residual_dtype == params.x_dtype));
  const DType row_dtype = is_of_one_dtype ? params.x_dtype : acc_dtype;
  const bool makes_u = params.has_epilogue() || params.row_gate || params.adds_y || params.rounds_x_hat;
  const bool needs[kThreadRows] = {!is_of_one_dtype, params.rounds_x_hat, !is_of_one_dtype,
                                   makes_u && params.y_dtype != acc_dtype,
                                   params.dropout.philox || params.row_gate || params.adds_y};
  const int64_t segments = segments_of(params), rows_each = params.rows / segments;
  Parameters shared(params, true, true);
  at::parallel_for(0, params.rows, grain(params.hidden_size), [&](int64_t begin, int64_t end) {
    const OwnRows memory(params.x_dtype, params.hidden_size, needs);
    std::unique_ptr<Parameters> own(segments > 1 ? new Parameters(params, true, true) : nullptr);
    while (begin < end) {
      const int64_t segment = begin / rows_each, until = least((segment + 1) * rows_each, end);
      if (own) own->take(segment);
      kernels().forward_rows[static_cast<int>(row_dtype)](params, (own ? *own : shared).rows(), memory.rows, begin,
                                                          until);
      begin = until;
    }
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
// workspace: its sum is final. Interleaved segments are summed side by side, and one row of each is a row here: it has
// that many `columns`.
struct ChunkPlan {
  int64_t columns, rows_of_segment, rows_per_chunk, chunks_of_segment, chunks, partial_bytes;

  explicit ChunkPlan(const NormBackwardParams& params) {
    columns = params.hidden_size * interleaved_of(params);
    rows_of_segment = params.rows / interleaved_of(params) / segments_of(params);
    rows_per_chunk = 1;
    if (params.wants_columns()) {
      const int64_t small = (int64_t{1} << 18) / columns;
      const int64_t at_least = small < 1 ? 1 : small > 16 ? 16 : small;
      const int64_t spread = divide_up(rows_of_segment, 64);
      rows_per_chunk = spread > at_least ? spread : at_least;
    }
    chunks_of_segment = divide_up(rows_of_segment, rows_per_chunk);
    chunks = chunks_of_segment * segments_of(params);
    partial_bytes = columns * static_cast<int64_t>(acc_bytes(params.z_dtype));
  }
  int64_t workspace_bytes(const NormBackwardParams& params) const {
    const int64_t sums = (params.grad_weight ? 1 : 0) + (params.grad_bias ? 1 : 0) + (params.grad_gate ? 1 : 0);
    return chunks_of_segment == 1 ? 0 : sums * chunks * partial_bytes;
  }
};

// The sums over rows of one gradient: partial sums of the chunks, and the gradient that they become.
struct ColumnSums {
  void* grad;  // [segments, columns], or null
  DType dtype;
  bool accumulate;
  char* partials;  // [chunks, columns] of the workspace, or null: a chunk's sum is final

  ColumnSums(void* grad, DType dtype, bool accumulate, const ChunkPlan& plan, char*& workspace)
      : grad(grad),
        dtype(dtype),
        accumulate(accumulate),
        partials(grad && plan.chunks_of_segment > 1 ? workspace : nullptr) {
    if (partials) workspace += plan.chunks * plan.partial_bytes;
  }
  char* begin_chunk(const ChunkPlan& plan, int64_t chunk, char* own) const {
    if (!grad) return nullptr;
    char* partial = partials ? partials + chunk * plan.partial_bytes : own;
    memset(partial, 0, plan.partial_bytes);
    return partial;
  }
  void finish(const NormBackwardParams& params, const ChunkPlan& plan, const void* partial, int64_t segment,
              int64_t begin, int64_t end) const {
    kernels().sum_chunks[is_double(params.z_dtype)](partial, plan.chunks_of_segment, plan.columns,
                                                    baseline::row_at(grad, dtype, segment * plan.columns), dtype,
                                                    accumulate, begin, end);
  }
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
  const DType acc_dtype = accumulation_dtype(params.z_dtype);
  const auto is_of_z_dtype = [&](const void* rows, DType dtype) { return !rows || dtype == params.z_dtype; };
  const bool is_of_one_dtype = !params.z_is_y && !params.has_epilogue() && !params.row_gate &&
                               is_of_z_dtype(params.grad_output, params.grad_output_dtype) &&
                               is_of_z_dtype(params.grad_residual_out, params.grad_residual_out_dtype) &&
                               is_of_z_dtype(params.gate, params.x_dtype);
  const DType row_dtype = is_of_one_dtype ? params.z_dtype : acc_dtype;
  const bool needs[kThreadRows] = {!is_of_one_dtype, !is_of_one_dtype, !is_of_one_dtype,
                                   params.gate || params.drops_x() || params.grad_residual || params.row_gate,
                                   params.dropout.philox || params.row_gate};
  // Only these read the weight, and the bias
  const bool needs_bias = params.has_epilogue() || params.z_is_y || (params.gates_y && params.grad_row_gate);
  const bool needs_weight = params.wants_rows() || needs_bias;
  Parameters shared(params, needs_weight, needs_bias);
  const bool is_one_chunk = plan.chunks_of_segment == 1;
  const bool has_segments = segments_of(params) > 1;
  const int64_t at_once = interleaved_of(params);
  at::parallel_for(
      0, plan.chunks, grain(plan.columns * least(plan.rows_per_chunk, plan.rows_of_segment)),
      [&](int64_t begin, int64_t end) {
        const OwnRows memory(params.z_dtype, params.hidden_size, needs);
        const std::unique_ptr<char[]> sums(is_one_chunk ? new char[3 * plan.partial_bytes] : nullptr);
        std::unique_ptr<Parameters> own(has_segments ? new Parameters(params, needs_weight, needs_bias) : nullptr);
        for (int64_t chunk = begin; chunk < end; ++chunk) {
          const int64_t segment = chunk / plan.chunks_of_segment;
          const int64_t first =
              segment * plan.rows_of_segment + (chunk - segment * plan.chunks_of_segment) * plan.rows_per_chunk;
          const int64_t until = least(first + plan.rows_per_chunk, (segment + 1) * plan.rows_of_segment);
          if (own) own->take(segment);
          const auto own_sum = [&](int i) { return sums ? sums.get() + i * plan.partial_bytes : nullptr; };
          char* const of_weight = weight_sums.begin_chunk(plan, chunk, own_sum(0));
          char* const of_bias = bias_sums.begin_chunk(plan, chunk, own_sum(1));
          char* const of_gate = gate_sums.begin_chunk(plan, chunk, own_sum(2));
          kernels().backward_rows[static_cast<int>(row_dtype)](params, (own ? *own : shared).rows(), memory.rows,
                                                               {of_weight, of_bias, of_gate}, first * at_once,
                                                               until * at_once);
          if (!is_one_chunk) continue;
          for (const auto& [column_sums, partial] :
               {std::pair(&weight_sums, of_weight), std::pair(&bias_sums, of_bias), std::pair(&gate_sums, of_gate)})
            if (partial) column_sums->finish(params, plan, partial, segment, 0, plan.columns);
        }
      });
  if (is_one_chunk) return;
  for (const ColumnSums* sums : {&weight_sums, &bias_sums, &gate_sums}) {
    if (!sums->grad) continue;
    for (int64_t segment = 0; segment < segments_of(params); ++segment) {
      const char* partials = sums->partials + segment * plan.chunks_of_segment * plan.partial_bytes;
      at::parallel_for(0, plan.columns, grain(plan.chunks_of_segment),
                       [&](int64_t begin, int64_t end) { sums->finish(params, plan, partials, segment, begin, end); });
    }
  }
}

}  // namespace fused_layernorm
