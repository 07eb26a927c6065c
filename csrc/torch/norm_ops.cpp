// From tensors to params structs: checks, allocation, device guard, stream. The only file that knows both torch and
// the kernels. Built into fused_layernorm_cuda (FUSED_LAYERNORM_WITH_CUDA) or fused_layernorm_cpu.
//
// Host time of a small norm is spent here: the usual call passes through no dispatcher (one at:: operation takes as
// long as all checks together) and copies no tensor.

#include <algorithm>

#include "norm_call.h"
#include "norm_params.h"
#include "philox.h"

namespace fused_layernorm {

using at::Tensor;

at::ScalarType accumulation_type(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

std::optional<int64_t> segments_of(const Tensor& parameter, const Tensor& x, int64_t normalized_ndim, bool per_head) {
  const int64_t leading = x.dim() - normalized_ndim;
  const int64_t own = parameter.dim() - normalized_ndim;  // leading dimensions
  if (own < 0 || parameter.sizes().slice(own) != x.sizes().slice(leading)) return std::nullopt;
  int64_t segments = 1;
  if (per_head) {
    if (own > leading || parameter.sizes() != x.sizes().slice(leading - own)) return std::nullopt;
    for (int64_t dim = 0; dim < own; ++dim) segments *= parameter.size(dim);
    return segments;
  }
  if (own != 0 && own != leading && !(own == 1 && parameter.size(0) == x.size(0))) return std::nullopt;
  int64_t split = own;  // along the dimensions behind it, values are shared
  while (own == leading && split > 0 && parameter.size(split - 1) == 1) --split;
  for (int64_t dim = 0; dim < split; ++dim) {
    if (parameter.size(dim) != x.size(dim)) return std::nullopt;
    segments *= x.size(dim);
  }
  return segments;
}

namespace {

DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kHalf: return DType::kFloat16;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kFloat: return DType::kFloat32;
    default: return DType::kFloat64;
  }
}

bool is_supported(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 || type == at::kFloat || type == at::kDouble;
}

const void* data_or_null(const Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; }

bool is_aligned16(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0; }

// ---- checks: the same mistakes and words as fused_layernorm/reference.py -------------------------------------------
// Messages are put together from strings: a stream in this file would bring in locales, which crash where the compiler
// links its own libstdc++ beside torch's.

std::string text(at::IntArrayRef shape) {
  std::string joined;
  for (const int64_t size : shape) joined += (joined.empty() ? "" : ", ") + std::to_string(size);
  return joined;
}

// Refuses memory that was freed (as FSDP does between uses): to the kernels a null pointer means "absent".
void check_dense(const char* name, const Tensor& tensor) {
  TORCH_CHECK_TYPE(is_dense(tensor), std::string(name) + " must be a dense (strided) tensor, got a sparse layout");
  TORCH_CHECK(has_memory(tensor), std::string(name) + " has no memory: its storage was freed, or never filled");
}

void check_supported(const char* name, at::ScalarType type) {
  TORCH_CHECK_TYPE(is_supported(type),
                   std::string(name) + " must be float16, bfloat16, float32 or float64, got " + name_of(type));
}

void check_x(const Tensor& x) {
  check_supported("x", x.scalar_type());
  check_dense("x", x);
  TORCH_CHECK(x.is_cpu() || (kWithCuda && x.is_cuda()),
              std::string("x must be on ") + (kWithCuda ? "cpu or cuda" : "cpu") + ", got " + x.device().str());
}

// The dtypes that tensors beside x may have, for error messages.
std::string dtypes_beside(at::ScalarType x) {
  return name_of(x) + (x == at::kDouble || x == at::kFloat ? "" : ", or float32");
}

void check_beside_x(const char* name, const Tensor& tensor, const Tensor& x) {
  const at::ScalarType dtype = x.scalar_type(), given = tensor.scalar_type();
  TORCH_CHECK(tensor.device() == x.device(),
              std::string(name) + " must be on x's device, " + x.device().str() + ", got " + tensor.device().str());
  TORCH_CHECK_TYPE(given == dtype || (given == at::kFloat && dtype != at::kDouble),
                   std::string(name) + " must be of x's dtype, " + dtypes_beside(dtype) + ", got " + name_of(given));
  check_dense(name, tensor);
}

// Checks weight or bias. Returns the number of its segments.
int64_t check_parameter(const char* name, const Tensor& parameter, const Tensor& x, const NormOptions& options) {
  const int64_t normalized_ndim = options.normalized_ndim;
  const std::optional<int64_t> segments = segments_of(parameter, x, normalized_ndim, options.per_head);
  TORCH_CHECK(segments, std::string(name) + " must have the shape of normalized_shape, [" +
                            text(x.sizes().slice(x.dim() - normalized_ndim)) + "], got [" + text(parameter.sizes()) +
                            "]");
  check_beside_x(name, parameter, x);
  return *segments;
}

void check_gradient(const char* name, const Tensor& gradient, const Tensor& z) {
  TORCH_CHECK(gradient.sizes() == z.sizes() && gradient.device() == z.device(),
              std::string(name) + " must have x's shape and device, [" + text(z.sizes()) + "] on " + z.device().str() +
                  ", got [" + text(gradient.sizes()) + "] on " + gradient.device().str());
  check_supported(name, gradient.scalar_type());
  check_dense(name, gradient);
}

// The gate of a gated norm, and what goes with it.
void check_row_gate(const NormOptions& options, const Tensor& gate, const Tensor& x, const Tensor& philox) {
  TORCH_CHECK(gate.sizes() == x.sizes(),
              "gate must have x's shape, [" + text(x.sizes()) + "], got [" + text(gate.sizes()) + "]");
  TORCH_CHECK(gate.device() == x.device(),
              "gate must be on x's device, " + x.device().str() + ", got " + gate.device().str());
  check_supported("gate", gate.scalar_type());
  check_dense("gate", gate);
  TORCH_CHECK(!philox.defined() && options.stats_grad, "a gated norm goes without dropout, and with stats_grad");
}

void check_stages(const NormOptions& options, const Tensor& philox, int64_t segments, int64_t rows, at::Device device,
                  bool is_gated) {
  const Activation last = is_gated ? Activation::kSigmoid : Activation::kSilu;
  TORCH_CHECK(options.activation >= 0 && options.activation <= static_cast<int64_t>(last),
              "activation must be the number of one of those there are, got " + std::to_string(options.activation));
  TORCH_CHECK_VALUE(options.dropout_p >= 0 && options.dropout_p <= 1,
                    "dropout_p must be from 0 to 1, got " + std::to_string(options.dropout_p));
  TORCH_CHECK(!philox.defined() || (philox.scalar_type() == at::kLong && philox.numel() == 2 &&
                                    philox.is_contiguous() && philox.device() == device),
              "philox must hold two int64 on x's device");
  TORCH_CHECK(
      segments <= 1 || (rows < (int64_t{1} << 31) && !philox.defined() && (is_gated || options.activation == 0)),
      "a weight for each of several segments goes with fewer than 2**31 rows, no dropout and no activation, got " +
          std::to_string(segments) + " segments of " + std::to_string(rows) + " rows");
}

// x as rows: its last normalized_ndim dimensions are one row.
struct Extent {
  int64_t rows = 1;
  int64_t hidden_size = 1;
};

Extent extent_of(const Tensor& x, int64_t normalized_ndim) {
  Extent extent;
  for (int64_t dim = 0; dim < x.dim(); ++dim)
    (dim < x.dim() - normalized_ndim ? extent.rows : extent.hidden_size) *= x.size(dim);
  return extent;
}

// ---- memory and layout ---------------------------------------------------------------------------------------------

Tensor of_dtype(const Tensor& tensor, at::ScalarType dtype) {
  return tensor.scalar_type() == dtype ? tensor : tensor.to(dtype);
}

// The strides of x's rows if kernels can read x as it lies: elements of a row adjacent, and the leading dimensions
// fold into at most two levels. Dimensions of size 1 have no stride worth looking at.
std::optional<RowStrides> row_strides_of(const Tensor& x, int64_t normalized_ndim, const Extent& extent) {
  int64_t expected = 1;
  const int64_t leading = x.dim() - normalized_ndim;
  for (int64_t dim = x.dim() - 1; dim >= leading; --dim) {
    if (x.size(dim) == 1) continue;
    if (x.stride(dim) != expected) return std::nullopt;
    expected *= x.size(dim);
  }
  // Levels from the innermost outwards: a dimension joins a level when it continues that level's even spacing.
  int64_t sizes[2] = {1, 1}, strides[2] = {extent.hidden_size, 0};
  int level = -1;
  for (int64_t dim = leading - 1; dim >= 0; --dim) {
    if (x.size(dim) == 1) continue;
    if (level >= 0 && x.stride(dim) == strides[level] * sizes[level]) {
      sizes[level] *= x.size(dim);
    } else {
      if (++level == 2) return std::nullopt;
      sizes[level] = x.size(dim);
      strides[level] = x.stride(dim);
    }
  }
  if (level == 1 && extent.rows >= (int64_t{1} << 31)) return std::nullopt;
  return RowStrides{sizes[0], strides[0], strides[1]};
}

// x itself where the kernels can read its rows in place, else a contiguous copy.
struct RowView {
  Tensor tensor;
  RowStrides strides;

  RowView(const Tensor& x, int64_t normalized_ndim, const Extent& extent) : tensor(materialized(x)) {
    const auto found = row_strides_of(tensor, normalized_ndim, extent);
    if (found && is_in_place(*found, extent)) {
      strides = *found;
    } else {
      tensor = contiguous_copy(tensor);
      strides = RowStrides{extent.rows, extent.hidden_size, 0};
    }
  }

 private:
  // CUDA kernels move rows that are made of whole 16 bytes as such, so these must begin at multiples of 16 bytes.
  bool is_in_place(const RowStrides& rows, const Extent& extent) const {
    const int64_t vec = 16 / static_cast<int64_t>(tensor.element_size());
    return tensor.is_cpu() || extent.hidden_size % vec != 0 ||
           (is_aligned16(tensor) && rows.row_stride % vec == 0 && rows.group_stride % vec == 0);
  }
};

// weight, bias or gate as the kernels read it: rows of whole segments that begin at multiples of 16 bytes and lie
// equally far apart, such as columns of one projection's result. Copied only if it does not lie so.
struct Parameter {
  Tensor tensor;
  int64_t stride = 0;

  Parameter() = default;
  Parameter(const Tensor& given, at::ScalarType dtype, int64_t segments, int64_t normalized_ndim) : tensor(given) {
    if (!given.defined()) return;
    tensor = of_dtype(materialized(given), dtype);
    if (segments <= 1) {
      tensor = tensor.contiguous();
      if (!is_aligned16(tensor)) tensor = tensor.clone();
      return;
    }
    const Extent extent = extent_of(tensor, normalized_ndim);
    const auto rows = row_strides_of(tensor, normalized_ndim, extent);
    const int64_t vec = 16 / static_cast<int64_t>(tensor.element_size());
    if (rows && rows->is_even(segments) && rows->row_stride % vec == 0 && is_aligned16(tensor)) {
      stride = rows->row_stride;
    } else {
      copy(segments, extent.hidden_size);
    }
  }

  // Into rows that are as far apart as whole 16 bytes allow; nothing to do where they are.
  void copy(int64_t segments, int64_t hidden_size) {
    const int64_t vec = 16 / static_cast<int64_t>(tensor.element_size());
    if (stride == (hidden_size + vec - 1) / vec * vec) return;
    stride = (hidden_size + vec - 1) / vec * vec;
    const Tensor padded = empty({segments, stride}, tensor.scalar_type(), tensor);
    padded.narrow(1, 0, hidden_size).copy_(tensor.reshape({segments, hidden_size}));
    tensor = padded;
  }

  const void* data() const { return data_or_null(tensor); }
};

// weight and bias have one dtype in the kernels: where they differ, one of them is fp32, and both are widened, which
// loses nothing. With segments they also have one stride.
struct Affine {
  at::ScalarType dtype;
  Parameter weight, bias;

  Affine(const Tensor& given_weight, const Tensor& given_bias, const Tensor& x, at::ScalarType x_dtype,
         int64_t segments, int64_t normalized_ndim)
      : dtype(given_weight.defined() && given_bias.defined() && given_weight.scalar_type() != given_bias.scalar_type()
                  ? at::kFloat
              : given_weight.defined() ? given_weight.scalar_type()
              : given_bias.defined()   ? given_bias.scalar_type()
                                       : x_dtype),
        weight(given_weight, dtype, segments, normalized_ndim),
        bias(given_bias, dtype, segments, normalized_ndim) {
    if (weight.tensor.defined() && bias.tensor.defined() && weight.stride != bias.stride) {
      const int64_t hidden_size = extent_of(x, normalized_ndim).hidden_size;
      weight.copy(segments, hidden_size);
      bias.copy(segments, hidden_size);
    }
  }

  template <class Params>
  void point(Params& params) const {
    params.weight = weight.data();
    params.bias = bias.data();
    params.weight_stride = weight.tensor.defined() ? weight.stride : bias.stride;
    params.weight_dtype = dtype_of(dtype);
  }
};

// rstd, mean and mean_tail lie one behind the other. Not by mutable_data_ptr(), which marks the tensor as written:
// backward only reads it.
template <class Params>
void point_to_stats(Params& params, const Tensor& stats) {
  char* rstd = static_cast<char*>(const_cast<void*>(stats.const_data_ptr()));
  const int64_t row_bytes = params.rows * static_cast<int64_t>(stats.element_size());
  params.rstd = rstd;
  if (params.is_rms_norm) return;
  params.mean = rstd + row_bytes;
  params.mean_tail = rstd + 2 * row_bytes;
}

// The options of both directions.
void set_stages(NormStages& stages, const NormOptions& options, const Tensor& philox, int64_t segments, bool is_gated) {
  const bool drops = philox.defined() && options.dropout_p > 0;
  stages.dropout = {drops ? philox.const_data_ptr<int64_t>() : nullptr, most_dropped(options.dropout_p),
                    dropout_scale(options.dropout_p)};
  stages.drops_y = options.drops_y;
  (is_gated ? stages.gate_activation : stages.activation) = static_cast<Activation>(options.activation);
  stages.gates_y = is_gated && options.gates_y;
  stages.segments = static_cast<int>(segments);
  stages.interleaves = options.per_head && segments > 1;
  stages.weight_offset = options.weight_offset;
  stages.is_rms_norm = options.is_rms_norm;
}

// ---- launches ------------------------------------------------------------------------------------------------------

#ifdef FUSED_LAYERNORM_WITH_CUDA
template <class Params>
void launch_cuda(int (*function)(const Params&, CUstream_st*), const Params& params, const Tensor& x) {
  check_cuda(function(params, current_stream(x)));
}
#endif

Tensor workspace_of(int64_t bytes, const Tensor& x) { return bytes > 0 ? empty({bytes}, at::kByte, x) : Tensor(); }

void launch(NormForwardParams& params, const Tensor& x) {
#ifdef FUSED_LAYERNORM_WITH_CUDA
  if (x.is_cuda()) {
    const Tensor workspace = workspace_of(norm_forward_workspace_cuda(params), x);
    if (workspace.defined()) params.workspace = workspace.mutable_data_ptr();
    return launch_cuda(launch_norm_forward_cuda, params, x);
  }
#endif
  (void)x;
  launch_norm_forward_cpu(params);
}

void launch(NormBackwardParams& params, const Tensor& x) {
#ifdef FUSED_LAYERNORM_WITH_CUDA
  if (x.is_cuda()) {
    const Tensor workspace = workspace_of(norm_backward_workspace_cuda(params), x);
    if (workspace.defined()) params.workspace = workspace.mutable_data_ptr();
    return launch_cuda(launch_norm_backward_cuda, params, x);
  }
#endif
  const Tensor workspace = workspace_of(norm_backward_workspace_cpu(params), x);
  if (workspace.defined()) params.workspace = workspace.mutable_data_ptr();
  launch_norm_backward_cpu(params);
}

// Rows of an input that may be absent.
struct OptionalRows {
  std::optional<RowView> view;

  OptionalRows(const Tensor& given, int64_t normalized_ndim, const Extent& extent) {
    if (given.defined()) view.emplace(given, normalized_ndim, extent);
  }
  void point(const void*& data, RowStrides& strides, DType& dtype) const {
    if (!view) return;
    data = view->tensor.const_data_ptr();
    strides = view->strides;
    dtype = dtype_of(view->tensor.scalar_type());
  }
};

}  // namespace

// ---- the two directions --------------------------------------------------------------------------------------------

void check_normalized_ndim(int64_t normalized_ndim, const at::Tensor& x) {
  TORCH_CHECK(
      normalized_ndim >= 1 && normalized_ndim <= x.dim(),
      "normalized_ndim must be from 1 to " + std::to_string(x.dim()) + ", got " + std::to_string(normalized_ndim));
}

namespace {

// Returns the number of segments.
int64_t check_forward(const NormCall& call) {
  const Tensor& x = call.x;
  const int64_t normalized_ndim = call.normalized_ndim;
  check_x(x);
  check_normalized_ndim(normalized_ndim, x);
  int64_t segments = 0;
  if (call.weight.defined()) segments = check_parameter("weight", call.weight, x, call);
  if (call.bias.defined()) {
    const int64_t of_bias = check_parameter("bias", call.bias, x, call);
    TORCH_CHECK(!call.weight.defined() || call.bias.sizes() == call.weight.sizes(),
                "bias must have the shape of weight, [" + text(call.weight.sizes()) + "], got [" +
                    text(call.bias.sizes()) + "]");
    segments = of_bias;
  }
  TORCH_CHECK_VALUE(call.weight.defined() || call.weight_offset == 0.0,
                    "weight_offset needs a weight to be added to, got weight=None, weight_offset=" +
                        std::to_string(call.weight_offset));
  const at::ScalarType x_dtype = x.scalar_type(), z_dtype = call.z_dtype();
  TORCH_CHECK(!call.adds_y || (call.residual.defined() && !call.residual_dtype && !call.gate.defined() &&
                               !call.philox.defined() && call.activation == 0),
              "adds_y needs a residual, and goes without residual_dtype, gate, dropout and activation");
  TORCH_CHECK(!call.rounds_x_hat || (!call.bias.defined() && !call.adds_y && !call.is_gated()),
              "rounds_x_hat goes without bias, adds_y and the gate of a gated norm");
  check_supported("out_dtype", call.y_dtype());
  if (call.residual.defined()) {
    TORCH_CHECK(call.residual.sizes() == x.sizes(),
                "residual must have x's shape, [" + text(x.sizes()) + "], got [" + text(call.residual.sizes()) + "]");
    check_beside_x("residual", call.residual, x);
  }
  TORCH_CHECK_TYPE(z_dtype == x_dtype || (z_dtype == at::kFloat && x_dtype != at::kDouble),
                   "residual_dtype must be x's dtype, " + dtypes_beside(x_dtype) + ", got " + name_of(z_dtype));
  TORCH_CHECK(call.has_load_stage() || !call.philox.defined() || call.drops_y,
              "dropout of x needs a residual, or residual_dtype, the dtype of z");
  if (call.is_gated()) {
    check_row_gate(call, call.gate, x, call.philox);
  } else if (call.gate.defined()) {
    TORCH_CHECK(!call.per_head, "a gate of x goes with no weight for each head");
    const auto gates = segments_of(call.gate, x, normalized_ndim);
    TORCH_CHECK(gates && (*gates == segments || (!call.weight.defined() && !call.bias.defined())) &&
                    call.gate.scalar_type() == x_dtype && call.gate.device() == x.device() && !call.philox.defined(),
                "gate must have weight's shape and x's dtype and device, and goes without dropout");
    check_dense("gate", call.gate);
    segments = *gates;
  }
  const Extent extent = extent_of(x, normalized_ndim);
  TORCH_CHECK(extent.hidden_size < (int64_t{1} << 31), "normalized_shape must hold fewer than 2**31 elements, got [" +
                                                           text(x.sizes().slice(x.dim() - normalized_ndim)) + "]");
  check_stages(call, call.philox, segments, extent.rows, x.device(), call.is_gated());
  return segments;
}

}  // namespace

void check(const NormCall& call) { check_forward(call); }

namespace {

// `sandwich`: the same call where a second norm follows (on CUDA), whose results `next` takes.
NormResults forward_of(const NormCall& call, bool save_stats, bool wants_z, const SandwichCall* sandwich = nullptr,
                       NormResults* next = nullptr) {
  const int64_t segments = check_forward(call), normalized_ndim = call.normalized_ndim;
  const Tensor& x = call.x;
  const at::ScalarType x_dtype = x.scalar_type(), y_dtype = call.y_dtype();
  const bool has_load_stage = call.has_load_stage();
  const at::ScalarType z_dtype = call.z_dtype();
  const DeviceScope scope(x);
  const Extent extent = extent_of(x, normalized_ndim);
  NormResults results;
  results.y = empty(x.sizes(), y_dtype, x);
  if (has_load_stage && (wants_z || !x.is_cuda())) results.z = empty(x.sizes(), z_dtype, x);
  const auto make_stats = [&] {
    at::DimVector shape(x.sizes().begin(), x.sizes().end() - normalized_ndim);
    shape.insert(shape.begin(), call.is_rms_norm ? 1 : 3);
    return empty(shape, accumulation_type(x_dtype), x);
  };
  if (save_stats) results.stats = make_stats();
  if (next) *next = {empty(x.sizes(), x_dtype, x), Tensor(), make_stats()};
  if (results.y.numel() == 0) return results;

  NormForwardParams params{};
  set_stages(params, call, call.philox, segments, call.is_gated());
  params.rows = extent.rows;
  params.hidden_size = extent.hidden_size;
  params.eps = call.eps;
  params.y = results.y.mutable_data_ptr();
  params.has_load_stage = has_load_stage;
  if (results.z.defined()) params.residual_out = results.z.mutable_data_ptr();
  params.z_dtype = params.residual_dtype = dtype_of(z_dtype);
  params.y_dtype = dtype_of(y_dtype);
  params.adds_y = call.adds_y;
  params.rounds_x_hat = call.rounds_x_hat;
  if (save_stats) point_to_stats(params, results.stats);
  const RowView rows(x, normalized_ndim, extent);
  params.x = rows.tensor.const_data_ptr();
  params.x_strides = rows.strides;
  params.x_dtype = dtype_of(x_dtype);
  const OptionalRows residual(call.residual, normalized_ndim, extent);
  residual.point(params.residual, params.residual_strides, params.residual_dtype);
  const OptionalRows row_gate(call.is_gated() ? call.gate : Tensor(), normalized_ndim, extent);
  row_gate.point(params.row_gate, params.row_gate_strides, params.row_gate_dtype);
  const Parameter gate(call.is_gated() ? Tensor() : call.gate, x_dtype, segments, normalized_ndim);
  params.gate = gate.data();
  params.gate_stride = gate.stride;
  const Affine affine(call.weight, call.bias, x, x_dtype, segments, normalized_ndim);
  affine.point(params);
  const Affine of_next(sandwich ? sandwich->next_weight : Tensor(), Tensor(), x, x_dtype, 1, normalized_ndim);
  if (sandwich) {
    params.next_weight = of_next.weight.data();
    params.next_weight_dtype = dtype_of(of_next.dtype);
    params.next_weight_offset = sandwich->next_weight_offset;
    params.next_eps = sandwich->next_eps;
    params.next_y = next->y.mutable_data_ptr();
    params.next_rstd = next->stats.mutable_data_ptr();
  }
  launch(params, x);
  return results;
}

}  // namespace

NormResults norm_forward(const NormCall& call, bool save_stats, bool wants_z) {
  return forward_of(call, save_stats, wants_z);
}

SandwichResults sandwich_norm(SandwichCall call) {
  call.is_rms_norm = call.adds_y = true;
  NormCall next;
  next.x = call.residual;
  next.weight = call.next_weight;
  next.normalized_ndim = call.normalized_ndim;
  next.eps = call.next_eps;
  next.weight_offset = call.next_weight_offset;
  next.is_rms_norm = true;
  next.out_dtype = call.x.scalar_type();
  TORCH_CHECK(check_forward(call) <= 1 && check_forward(next) <= 1, "sandwich_norm takes weights that all rows share");
  NormResults first, second;
  if (call.x.is_cuda()) {
    first = forward_of(call, /*save_stats=*/true, /*wants_z=*/true, &call, &second);
  } else {
    first = norm_forward(call, /*save_stats=*/true);
    next.x = first.y;
    second = norm_forward(next, /*save_stats=*/true);
  }
  return {std::move(second.y), std::move(first.y), std::move(first.stats), std::move(second.stats)};
}

namespace {

// Checks that these may be the tensors and options of the forward call. Returns the number of segments.
int64_t check_backward(const NormBackwardCall& call, const Extent& extent) {
  const Tensor& z = call.z;
  check_gradient("grad_output", call.grad_output, z);
  if (call.grad_residual_out.defined()) check_gradient("grad_residual_out", call.grad_residual_out, z);
  check_supported("x_dtype", call.x_dtype);
  const bool has_load_stage = call.residual_dtype.has_value();
  TORCH_CHECK(has_load_stage ? z.scalar_type() == *call.residual_dtype : z.scalar_type() == call.x_dtype,
              "z must be of residual_dtype, or without a residual_dtype of x_dtype, got " + name_of(z.scalar_type()));
  TORCH_CHECK(call.stats.defined() && call.stats.numel() == extent.rows * (call.is_rms_norm ? 1 : 3) &&
                  call.stats.is_contiguous() && call.stats.device() == z.device() &&
                  call.stats.scalar_type() == accumulation_type(z.scalar_type()),
              "stats must be what norm_forward returned for this z");
  int64_t segments = 0;
  const bool is_gated = call.is_gated();
  for (const Tensor* parameter : {&call.weight, &call.bias, &call.gate}) {
    if (!parameter->defined() || (is_gated && parameter == &call.gate)) continue;
    const char* name = parameter == &call.weight ? "weight" : parameter == &call.bias ? "bias" : "gate";
    const auto found = segments_of(*parameter, z, call.normalized_ndim, call.per_head);
    const at::ScalarType dtype = parameter->scalar_type();
    TORCH_CHECK(
        found && (segments == 0 || segments == *found) && parameter->device() == z.device() &&
            (dtype == call.x_dtype || (dtype == at::kFloat && call.x_dtype != at::kDouble && parameter != &call.gate)),
        std::string(name) + " must be forward's, got [" + text(parameter->sizes()) + "] of " + name_of(dtype));
    check_dense(name, *parameter);
    segments = *found;
  }
  if (is_gated) check_row_gate(call, call.gate, z, call.philox);
  check_stages(call, call.philox, segments, extent.rows, z.device(), is_gated);
  TORCH_CHECK(!call.z_is_y || (!has_load_stage && !is_gated && !call.philox.defined() && call.activation == 0 &&
                               segments <= 1 && call.stats_grad),
              "z_is_y goes with the plain norm");
  TORCH_CHECK(has_load_stage || (!call.grad_residual_out.defined() && !call.grad_residual_dtype &&
                                 (!call.philox.defined() || call.drops_y)),
              "grad_residual_out, grad_residual_dtype and dropout of x need residual_dtype");
  TORCH_CHECK((call.gate.defined() && !is_gated) == call.x.defined(), "a gate of x and x are given together");
  TORCH_CHECK(!call.per_head || is_gated || !call.gate.defined(), "a gate of x goes with no weight for each head");
  if (call.x.defined()) {
    TORCH_CHECK(call.x.sizes() == z.sizes() && call.x.device() == z.device() && call.x.scalar_type() == call.x_dtype,
                "x must be forward's, got [" + text(call.x.sizes()) + "] of " + name_of(call.x.scalar_type()));
    check_dense("x", call.x);
  }
  TORCH_CHECK(!call.grad_weight_dtype || call.weight.defined(), "a gradient of weight needs the weight");
  for (const OptionalDtype& dtype : {call.grad_residual_dtype, call.grad_weight_dtype, call.grad_bias_dtype})
    if (dtype) check_supported("the dtype of a gradient", *dtype);
  for (const Tensor* sum : {&call.weight_sum, &call.bias_sum}) {
    TORCH_CHECK(!sum->defined() || (sum->numel() == extent.hidden_size && sum->scalar_type() == at::kFloat &&
                                    sum->is_contiguous() && sum->device() == z.device() && segments <= 1),
                "gradients are added to contiguous float32 tensors of the parameters' shapes");
  }
  return segments;
}

}  // namespace

NormGradients norm_backward(const NormBackwardCall& call) {
  const Tensor& z = call.z;
  check_x(z);
  const int64_t normalized_ndim = call.normalized_ndim;
  check_normalized_ndim(normalized_ndim, z);
  const Extent extent = extent_of(z, normalized_ndim);
  const int64_t segments = check_backward(call, extent);
  const bool is_shared = shares_gradient(call);
  const at::IntArrayRef columns = z.sizes().slice(z.dim() - normalized_ndim);
  const at::IntArrayRef bias_shape = call.bias.defined()     ? call.bias.sizes()
                                     : call.weight.defined() ? call.weight.sizes()
                                     : call.x.defined()      ? call.gate.sizes()
                                                             : columns;

  const DeviceScope scope(z);
  NormGradients gradients;
  if (call.wants_x) gradients.x = empty(z.sizes(), call.x_dtype, z);
  if (call.grad_residual_dtype)
    gradients.residual = is_shared ? gradients.x : empty(z.sizes(), *call.grad_residual_dtype, z);
  const bool is_empty = z.numel() == 0;  // sums over no rows are 0
  const auto column_sums = [&](at::IntArrayRef shape, at::ScalarType dtype) {
    return is_empty ? zeros(shape, dtype, z) : empty(shape, dtype, z);
  };
  if (call.wants_gate && call.gate.defined()) gradients.gate = column_sums(call.gate.sizes(), call.gate.scalar_type());
  if (call.grad_weight_dtype && !call.weight_sum.defined())
    gradients.weight = column_sums(call.weight.sizes(), *call.grad_weight_dtype);
  const bool is_gated = call.is_gated();
  if (call.grad_bias_dtype && !call.bias_sum.defined()) gradients.bias = column_sums(bias_shape, *call.grad_bias_dtype);
  if (is_empty) return gradients;

  NormBackwardParams params{};
  set_stages(params, call, call.philox, segments, is_gated);
  const auto target = [](const Tensor& gradient, void*& data, DType& dtype) {
    if (!gradient.defined()) return;
    data = gradient.mutable_data_ptr();
    dtype = dtype_of(gradient.scalar_type());
  };
  params.x_dtype = params.residual_dtype = dtype_of(call.x_dtype);
  target(gradients.x, params.grad_input, params.x_dtype);
  if (!is_shared) target(gradients.residual, params.grad_residual, params.residual_dtype);
  if (is_gated) {
    target(gradients.gate, params.grad_row_gate, params.row_gate_dtype);
  } else {
    target(gradients.gate, params.grad_gate, params.grad_gate_dtype);
  }
  target(call.weight_sum.defined() ? call.weight_sum : gradients.weight, params.grad_weight, params.grad_weight_dtype);
  target(call.bias_sum.defined() ? call.bias_sum : gradients.bias, params.grad_bias, params.grad_bias_dtype);
  if (!params.wants_rows() && !params.wants_columns()) return gradients;
  params.rows = extent.rows;
  params.hidden_size = extent.hidden_size;
  params.stats_grad = call.stats_grad;
  params.accumulate = call.weight_sum.defined() || call.bias_sum.defined();
  params.has_load_stage = call.residual_dtype.has_value();
  params.z_is_y = call.z_is_y;
  point_to_stats(params, call.stats);
  if (call.z_is_y) params.mean = params.mean_tail = nullptr;

  // LayerNorm of one element is 0, and constant to the kernels. With frozen statistics it has the slope of RMSNorm at
  // 0.
  const bool is_zero = !call.stats_grad && !call.is_rms_norm && extent.hidden_size == 1;
  if (is_zero) {
    params.is_rms_norm = true;
    params.mean = params.mean_tail = nullptr;
  }
  const RowView z_rows(is_zero ? zeros(z.sizes(), z.scalar_type(), z) : z, normalized_ndim, extent);
  params.z = z_rows.tensor.const_data_ptr();
  params.z_strides = z_rows.strides;
  params.z_dtype = dtype_of(z.scalar_type());
  const OptionalRows grad_output(call.grad_output, normalized_ndim, extent);
  grad_output.point(params.grad_output, params.grad_output_strides, params.grad_output_dtype);
  const OptionalRows grad_residual_out(call.grad_residual_out, normalized_ndim, extent);
  params.grad_residual_out_dtype = params.z_dtype;
  grad_residual_out.point(params.grad_residual_out, params.grad_residual_out_strides, params.grad_residual_out_dtype);
  const OptionalRows x(call.x, normalized_ndim, extent);
  x.point(params.x, params.x_strides, params.x_dtype);
  const OptionalRows row_gate(is_gated ? call.gate : Tensor(), normalized_ndim, extent);
  row_gate.point(params.row_gate, params.row_gate_strides, params.row_gate_dtype);
  const Parameter gate(is_gated ? Tensor() : call.gate, call.x_dtype, segments, normalized_ndim);
  params.gate = gate.data();
  params.gate_stride = gate.stride;
  const bool reads_bias = call.z_is_y || params.gates_y || (!is_gated && call.activation != 0);
  const Affine affine(call.weight, reads_bias ? call.bias : Tensor(), z, call.x_dtype, segments, normalized_ndim);
  affine.point(params);
  launch(params, z);
  return gradients;
}

#ifdef FUSED_LAYERNORM_WITH_CUDA
NormQuantResults norm_quant(const NormQuantCall& call) {
  const int64_t segments = check_forward(call), normalized_ndim = call.normalized_ndim;
  const Tensor& x = call.x;
  const Extent extent = extent_of(x, normalized_ndim);
  const int64_t hidden_size = extent.hidden_size, group_size = call.scale.defined() ? hidden_size : call.group_size;
  const bool is_group = group_size == 32 || group_size == 64 || group_size == 128;
  TORCH_CHECK(x.is_cuda() && x.scalar_type() != at::kDouble && hidden_size % (16 / x.element_size()) == 0 &&
                  call.has_load_stage() == call.residual.defined() &&
                  (!call.residual.defined() || call.residual.scalar_type() == call.z_dtype()),
              "norm_quant takes 16-bit and float32 rows of whole 16 bytes on cuda, and residual_dtype is residual's");
  TORCH_CHECK(group_size == hidden_size || (is_group && hidden_size % group_size == 0),
              "group_size must be the size of a row, or 32, 64 or 128 and divide it, got " +
                  std::to_string(group_size) + " for " + std::to_string(hidden_size));
  TORCH_CHECK(!call.scale.defined() || (call.scale.scalar_type() == at::kFloat && call.scale.numel() == 1 &&
                                        call.scale.device() == x.device()),
              "scale must be float32 with one element, on x's device");
  TORCH_CHECK_TYPE(call.dtype == at::kFloat8_e4m3fn || call.dtype == at::kFloat8_e5m2 || call.dtype == at::kChar,
                   "dtype must be torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8, got " + name_of(call.dtype));
  const DeviceScope scope(x);
  NormQuantResults results;
  results.q = empty(x.sizes(), call.dtype, x);
  if (call.return_norm) results.y = empty(x.sizes(), x.scalar_type(), x);
  if (call.residual.defined()) results.z = empty(x.sizes(), call.z_dtype(), x);
  const int64_t groups = group_size > 0 ? hidden_size / group_size : 1;
  if (!call.scale.defined()) {
    at::DimVector shape(x.sizes().begin(), x.sizes().end() - normalized_ndim);
    shape.insert(call.column_major_scales ? shape.begin() : shape.end(), groups);
    results.scale = empty(shape, at::kFloat, x);
  }
  if (x.numel() == 0) return results;

  NormQuantParams params{};
  set_stages(params, call, Tensor(), segments, /*is_gated=*/false);
  params.rows = extent.rows;
  params.hidden_size = hidden_size;
  params.group_size = group_size;
  params.eps = call.eps;
  params.codes = results.q.mutable_data_ptr();
  if (results.y.defined()) params.y = results.y.mutable_data_ptr();
  if (results.z.defined()) params.residual_out = results.z.mutable_data_ptr();
  if (results.scale.defined()) params.scales = static_cast<float*>(results.scale.mutable_data_ptr());
  if (call.scale.defined()) params.scale = call.scale.const_data_ptr<float>();
  params.scale_row_stride = call.column_major_scales ? 1 : groups;
  params.scale_group_stride = call.column_major_scales ? extent.rows : 1;
  const bool is_e4m3 = call.dtype == at::kFloat8_e4m3fn, is_int8 = call.dtype == at::kChar;
  params.code_dtype = is_e4m3 ? CodeDType::kFloat8E4M3 : is_int8 ? CodeDType::kInt8 : CodeDType::kFloat8E5M2;
  params.inverse_largest = static_cast<float>(1.0 / (is_e4m3 ? 448.0 : is_int8 ? 127.0 : 57344.0));
  params.z_dtype = dtype_of(call.z_dtype());
  const RowView rows(x, normalized_ndim, extent);
  params.x = rows.tensor.const_data_ptr();
  params.x_strides = rows.strides;
  params.x_dtype = params.y_dtype = dtype_of(x.scalar_type());
  const OptionalRows residual(call.residual, normalized_ndim, extent);
  residual.point(params.residual, params.residual_strides, params.residual_dtype);
  const Affine affine(call.weight, call.bias, x, x.scalar_type(), segments, normalized_ndim);
  affine.point(params);
  launch_cuda(launch_norm_quant_cuda, params, x);
  return results;
}
#endif

Tensor dropout_mask(const Tensor& philox, int64_t rows, int64_t hidden_size, double dropout_p) {
  NormOptions options;
  options.dropout_p = dropout_p;
  check_stages(options, philox, 1, rows, philox.device(), /*is_gated=*/false);
  TORCH_CHECK(rows >= 0 && hidden_size >= 0, "a mask needs sizes of 0 or more");
  const DeviceScope scope(philox);
  if (dropout_p == 0) return ones({rows, hidden_size}, at::kBool, philox);
  Tensor mask = empty({rows, hidden_size}, at::kBool, philox);
  if (mask.numel() == 0) return mask;
  const DropoutMaskParams params{static_cast<uint8_t*>(mask.mutable_data_ptr()),
                                 rows,
                                 hidden_size,
                                 {philox.const_data_ptr<int64_t>(), most_dropped(dropout_p), 0}};
#ifdef FUSED_LAYERNORM_WITH_CUDA
  if (philox.is_cuda()) {
    launch_cuda(launch_dropout_mask_cuda, params, philox);
    return mask;
  }
#endif
  launch_dropout_mask_cpu(params);
  return mask;
}

}  // namespace fused_layernorm
