// From tensors to params structs: checks, allocation, device guard, stream. The only file that knows both torch and
// the kernels. Built into fused_layernorm_cuda (FUSED_LAYERNORM_WITH_CUDA) or fused_layernorm_cpu.
//
// Small norms wait for this file, not for their kernel: the usual call passes through no dispatcher (an operation of
// at:: takes as long as all the checks together) and copies no tensor.
#include "norm_ops.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#ifdef FUSED_LAYERNORM_WITH_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include "norm_params.h"
#include "philox.h"

namespace fused_layernorm {

using at::Tensor;

at::ScalarType accumulation_type(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

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

std::string text(at::ScalarType type) {
  switch (type) {
    case at::kHalf: return "torch.float16";
    case at::kBFloat16: return "torch.bfloat16";
    case at::kFloat: return "torch.float32";
    case at::kDouble: return "torch.float64";
    default: return std::string("torch's ") + c10::toString(type);
  }
}

// A null pointer means "absent" to the kernels, so that memory which was freed (as FSDP does between uses) must not
// pass.
void check_dense(const char* name, const Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided,
                   std::string(name) + " must be a dense (strided) tensor, got a sparse layout");
  TORCH_CHECK(tensor.numel() == 0 || tensor.storage().data() != nullptr || tensor._is_zerotensor(),
              std::string(name) + " has no memory: its storage was freed, or never filled");
}

void check_supported(const char* name, at::ScalarType type) {
  TORCH_CHECK_TYPE(is_supported(type),
                   std::string(name) + " must be float16, bfloat16, float32 or float64, got " + text(type));
}

void check_x(const Tensor& x) {
  check_supported("x", x.scalar_type());
  check_dense("x", x);
  TORCH_CHECK(x.is_cpu() || (kWithCuda && x.is_cuda()),
              std::string("x must be on ") + (kWithCuda ? "cpu or cuda" : "cpu") + ", got " + x.device().str());
}

// What tensors beside x may be of, for the end of a sentence.
std::string dtypes_beside(at::ScalarType x) {
  return text(x) + (x == at::kDouble || x == at::kFloat ? "" : ", or float32");
}

void check_parameter(const char* name, const Tensor& parameter, const Tensor& x, at::IntArrayRef shape) {
  if (!parameter.defined()) return;
  const at::ScalarType dtype = x.scalar_type(), given = parameter.scalar_type();
  TORCH_CHECK(parameter.sizes() == shape, std::string(name) + " must have the shape of normalized_shape, [" +
                                              text(shape) + "], got [" + text(parameter.sizes()) + "]");
  TORCH_CHECK(parameter.device() == x.device(),
              std::string(name) + " must be on x's device, " + x.device().str() + ", got " + parameter.device().str());
  TORCH_CHECK_TYPE(given == dtype || (given == at::kFloat && dtype != at::kDouble),
                   std::string(name) + " must be of x's dtype, " + dtypes_beside(dtype) + ", got " + text(given));
  check_dense(name, parameter);
}

void check_residual(const Tensor& residual, const Tensor& x) {
  const at::ScalarType dtype = x.scalar_type(), given = residual.scalar_type();
  TORCH_CHECK(residual.sizes() == x.sizes(),
              "residual must have x's shape, [" + text(x.sizes()) + "], got [" + text(residual.sizes()) + "]");
  TORCH_CHECK(residual.device() == x.device(),
              "residual must be on x's device, " + x.device().str() + ", got " + residual.device().str());
  TORCH_CHECK_TYPE(given == dtype || (given == at::kFloat && dtype != at::kDouble),
                   "residual must be of x's dtype, " + dtypes_beside(dtype) + ", got " + text(given));
  check_dense("residual", residual);
}

void check_dropout(const Tensor& philox, double p, at::Device device) {
  TORCH_CHECK_VALUE(p >= 0 && p <= 1, "dropout_p must be from 0 to 1, got " + std::to_string(p));
  TORCH_CHECK(!philox.defined() || (philox.scalar_type() == at::kLong && philox.numel() == 2 &&
                                    philox.is_contiguous() && philox.device() == device),
              "philox must hold two int64 on x's device");
}

// How x splits into rows, by the number of its last dimensions that are normalized together.
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

// Uninitialized memory on `like`'s device, which is current. As at::empty, past the dispatcher.
Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, const Tensor& like) {
  if (at::globalContext().deterministicAlgorithms()) {  // in which mode at::empty may fill what it returns
    return at::empty(sizes, like.options().dtype(dtype));
  }
#ifdef FUSED_LAYERNORM_WITH_CUDA
  if (like.is_cuda()) {
    constexpr c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
    return at::detail::empty_generic(sizes, c10::cuda::CUDACachingAllocator::get(), keys, dtype, std::nullopt);
  }
#endif
  return at::detail::empty_cpu(sizes, dtype);
}

// Tensors that say "negated" or "all zero" without holding such data in memory get it.
Tensor materialized(const Tensor& tensor) {
  if (tensor._is_zerotensor()) return at::zeros(tensor.sizes(), tensor.options());
  return tensor.is_neg() ? tensor.resolve_neg() : tensor;
}

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
      tensor = tensor.clone(at::MemoryFormat::Contiguous);
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

// In how many equal parts the rows have weights of their own: as many as `parameter` has in the dimension that it has
// more than are normalized. 0: none such.
int64_t segments_of(const Tensor& parameter, int64_t normalized_ndim) {
  return parameter.defined() && parameter.dim() > normalized_ndim ? parameter.size(0) : 0;
}

// Weight and bias of segments as they lie, such as columns of one projection's result, where each segment's begin at
// multiples of 16 bytes and equally far from the one's before; else copies of which that is true. Returns how far.
int64_t ready_segments(Tensor& weight, Tensor& bias, at::ScalarType dtype) {
  const auto stride_of = [&](const Tensor& parameter) -> int64_t {
    if (!parameter.select(0, 0).is_contiguous() || parameter.scalar_type() != dtype || !is_aligned16(parameter))
      return -1;
    return parameter.stride(0) * static_cast<int64_t>(parameter.element_size()) % 16 == 0 ? parameter.stride(0) : -1;
  };
  weight = materialized(weight);
  if (bias.defined()) bias = materialized(bias);
  const int64_t stride = stride_of(weight);
  if (stride >= 0 && (!bias.defined() || stride_of(bias) == stride)) return stride;
  const int64_t segments = weight.size(0), columns = weight.numel() / segments;
  const int64_t vec = 16 / static_cast<int64_t>(c10::elementSize(dtype)), padded = (columns + vec - 1) / vec * vec;
  for (Tensor* parameter : {&weight, &bias}) {
    if (!parameter->defined()) continue;
    const Tensor copy = empty({segments, padded}, dtype, *parameter);
    copy.narrow(1, 0, columns).copy_(parameter->reshape({segments, columns}));
    *parameter = copy;
  }
  return padded;
}

// A parameter as the kernels read it: contiguous, 16-byte aligned, of the given dtype. Copies only where it must.
Tensor ready_parameter(const Tensor& parameter, at::ScalarType dtype) {
  if (!parameter.defined()) return parameter;
  Tensor ready = of_dtype(materialized(parameter), dtype).contiguous();
  return is_aligned16(ready) ? ready : ready.clone();
}

// From where rstd, mean and mean_tail lie, one behind the other. Not by mutable_data_ptr(), which takes a tensor that
// backward only reads for one that is written to.
template <class Params>
void point_to_stats(Params& params, const Tensor& stats) {
  char* rstd = static_cast<char*>(const_cast<void*>(stats.const_data_ptr()));
  const int64_t row_bytes = params.rows * static_cast<int64_t>(stats.element_size());
  params.rstd = rstd;
  if (params.is_rms_norm) return;
  params.mean = rstd + row_bytes;
  params.mean_tail = rstd + 2 * row_bytes;
}

// Of weight and bias as kernels take them, where some are given: where they differ, one of them is fp32.
at::ScalarType parameters_dtype(const Tensor& weight, const Tensor& bias, const Tensor& x) {
  if (weight.defined() && bias.defined() && weight.scalar_type() != bias.scalar_type()) return at::kFloat;
  return (weight.defined() ? weight : bias.defined() ? bias : x).scalar_type();
}

Dropout dropout_of(const Tensor& philox, double p) {
  return {philox.defined() && p > 0 ? philox.const_data_ptr<int64_t>() : nullptr, most_dropped(p), dropout_scale(p)};
}

AfterNorm after_of(const AfterOptions& after, const Tensor& x) {
  check_dropout(after.philox, after.dropout_p, x.device());
  TORCH_CHECK(after.activation >= 0 && after.activation <= static_cast<int64_t>(Activation::kSilu),
              "activation must be the number of one of those there are");
  return {static_cast<Activation>(after.activation), dropout_of(after.philox, after.dropout_p)};
}

// Whether a kernel reads what surrounds the norm together with it, or there is nothing around it.
template <class Params>
bool has_add_stage(const Params& params, const Tensor& x) {
#ifdef FUSED_LAYERNORM_WITH_CUDA
  if (params.add && x.is_cuda()) return has_add_stage_cuda(params);
#endif
  (void)params;
  (void)x;
  return true;
}

// ---- launches ------------------------------------------------------------------------------------------------------

void launch(NormForwardParams& params, const Tensor& x) {
#ifdef FUSED_LAYERNORM_WITH_CUDA
  if (x.is_cuda()) {
    Tensor workspace;
    if (const int64_t bytes = norm_forward_workspace_cuda(params)) {
      workspace = empty({bytes}, at::kByte, x);
      params.workspace = workspace.mutable_data_ptr();
    }
    C10_CUDA_CHECK(
        static_cast<cudaError_t>(launch_norm_forward_cuda(params, c10::cuda::getCurrentCUDAStream(x.get_device()))));
    return;
  }
#endif
  (void)x;
  launch_norm_forward_cpu(params);
}

void launch(NormBackwardParams& params, const Tensor& x) {
  int64_t workspace_bytes = 0;
#ifdef FUSED_LAYERNORM_WITH_CUDA
  if (x.is_cuda()) workspace_bytes = norm_backward_workspace_cuda(params);
#endif
  if (x.is_cpu()) workspace_bytes = norm_backward_workspace_cpu(params);
  Tensor workspace;
  if (workspace_bytes > 0) {
    workspace = empty({workspace_bytes}, at::kByte, x);
    params.workspace = workspace.mutable_data_ptr();
  }
#ifdef FUSED_LAYERNORM_WITH_CUDA
  if (x.is_cuda()) {
    C10_CUDA_CHECK(
        static_cast<cudaError_t>(launch_norm_backward_cuda(params, c10::cuda::getCurrentCUDAStream(x.get_device()))));
    return;
  }
#endif
  launch_norm_backward_cpu(params);
}

// Makes x's device current while in scope; costs nothing on the CPU, and next to nothing where it is current.
struct DeviceScope {
#ifdef FUSED_LAYERNORM_WITH_CUDA
  c10::cuda::OptionalCUDAGuard guard;
  explicit DeviceScope(const Tensor& x) {
    if (x.is_cuda() && x.get_device() != c10::cuda::current_device()) guard.set_device(x.device());
  }
#else
  explicit DeviceScope(const Tensor&) {}
#endif
};

}  // namespace

// ---- the two entry points ------------------------------------------------------------------------------------------

void check_normalized_ndim(int64_t normalized_ndim, const Tensor& x) {
  TORCH_CHECK(
      normalized_ndim >= 1 && normalized_ndim <= x.dim(),
      "normalized_ndim must be from 1 to " + std::to_string(x.dim()) + ", got " + std::to_string(normalized_ndim));
}

NormResults norm_forward(const Tensor& x, const Tensor& weight, const Tensor& bias, const NormOptions& options,
                         bool save_stats, const AddOptions* add, const AfterOptions* after) {
  check_x(x);
  TORCH_CHECK_VALUE(options.normalized_shape || weight.defined() || bias.defined(),
                    "normalized_shape is needed when neither weight nor bias is given");
  const at::IntArrayRef shape =
      options.normalized_shape ? *options.normalized_shape : (weight.defined() ? weight.sizes() : bias.sizes());
  const int64_t normalized_ndim = static_cast<int64_t>(shape.size());
  TORCH_CHECK(normalized_ndim >= 1, "normalized_shape must have at least one dimension, got ()");
  TORCH_CHECK(x.dim() >= normalized_ndim && x.sizes().slice(x.dim() - normalized_ndim) == shape,
              "x must have shape [*, " + text(shape) + "] to match normalized_shape, got [" + text(x.sizes()) + "]");
  const int64_t segments = options.takes_segments ? segments_of(weight, normalized_ndim) : 0;
  const at::IntArrayRef parameter_shape = segments > 0 && weight.sizes().slice(1) == shape ? weight.sizes() : shape;
  check_parameter("weight", weight, x, parameter_shape);
  check_parameter("bias", bias, x, parameter_shape);
  TORCH_CHECK_VALUE(weight.defined() || options.weight_offset == 0.0,
                    "weight_offset needs a weight to be added to, got weight=None, weight_offset=" +
                        std::to_string(options.weight_offset));
  const at::ScalarType y_dtype = options.out_dtype.value_or(x.scalar_type());
  check_supported("out_dtype", y_dtype);
  at::ScalarType z_dtype = x.scalar_type();
  if (add) {
    if (add->residual.defined()) check_residual(add->residual, x);
    check_dropout(add->philox, add->dropout_p, x.device());
    z_dtype = add->residual_dtype.value_or(add->residual.defined() ? add->residual.scalar_type() : z_dtype);
    TORCH_CHECK_TYPE(z_dtype == x.scalar_type() || (z_dtype == at::kFloat && x.scalar_type() != at::kDouble),
                     "residual_dtype must be x's dtype, " + dtypes_beside(x.scalar_type()) + ", got " + text(z_dtype));
  }

  const DeviceScope scope(x);
  const Extent extent = extent_of(x, normalized_ndim);
  TORCH_CHECK(extent.hidden_size < (int64_t{1} << 31),
              "normalized_shape must hold fewer than 2**31 elements, got [" + text(shape) + "]");
  TORCH_CHECK(segments == 0 ||
                  (extent.rows % segments == 0 && extent.rows < (int64_t{1} << 31) && !(add && add->philox.defined())),
              "a weight of several rows needs as many equal parts of fewer than 2**31 rows, and no dropout, got " +
                  std::to_string(segments) + " for " + std::to_string(extent.rows) + " rows");
  const at::ScalarType acc_dtype = accumulation_type(x.scalar_type());
  Tensor y = empty(x.sizes(), y_dtype, x), stats, residual_out;
  if (add) residual_out = empty(x.sizes(), z_dtype, x);
  if (save_stats) stats = empty({options.is_rms_norm ? 1 : 3, extent.rows}, acc_dtype, x);
  if (y.numel() == 0) return {std::move(y), std::move(stats), std::move(residual_out)};

  const RowView rows(x, normalized_ndim, extent);
  NormForwardParams params{};
  params.x = rows.tensor.const_data_ptr();
  params.y = y.mutable_data_ptr();
  params.x_strides = rows.strides;
  params.rows = extent.rows;
  params.hidden_size = extent.hidden_size;
  params.eps = options.eps;
  params.weight_offset = options.weight_offset;
  params.x_dtype = dtype_of(x.scalar_type());
  params.y_dtype = dtype_of(y_dtype);
  params.is_rms_norm = options.is_rms_norm;
  if (save_stats) point_to_stats(params, stats);
  std::optional<RowView> residual_rows;
  AddStage stage;
  AfterNorm after_norm;
  if (after) {
    after_norm = after_of(*after, x);
    params.after = &after_norm;
  }
  if (add) {
    stage = {};
    stage.residual_strides = RowStrides{extent.rows, 0, 0};
    params.add = &stage;
    if (add->residual.defined()) {
      residual_rows.emplace(add->residual, normalized_ndim, extent);
      stage.residual = residual_rows->tensor.const_data_ptr();
      stage.residual_strides = residual_rows->strides;
    }
    stage.residual_out = residual_out.mutable_data_ptr();
    stage.residual_dtype = dtype_of(add->residual.defined() ? add->residual.scalar_type() : z_dtype);
    stage.residual_out_dtype = dtype_of(z_dtype);
    stage.dropout = dropout_of(add->philox, add->dropout_p);
  }
  Tensor ready_gate;
  if (add && add->gate.defined()) {
    ready_gate = add->gate;
    const int64_t gates = segments_of(ready_gate, normalized_ndim);
    TORCH_CHECK(ready_gate.scalar_type() == x.scalar_type() && ready_gate.device() == x.device() && gates > 0 &&
                    gates == std::max<int64_t>(segments, 1) && ready_gate.numel() == gates * extent.hidden_size &&
                    !add->philox.defined(),
                "gate must have a row for each of weight's, be of x's dtype and device, and without dropout");
    Tensor no_bias;
    stage.gate_stride = ready_segments(ready_gate, no_bias, x.scalar_type());
    stage.gate = ready_gate.const_data_ptr();
  }

  // Kernels take weight and bias of one dtype; where they differ, both are widened, which loses nothing. So are those
  // narrower than z, where no kernel has the stage.
  at::ScalarType weight_dtype = parameters_dtype(weight, bias, x);
  if (weight_dtype != z_dtype && !has_add_stage(params, x)) weight_dtype = at::kFloat;
  Tensor ready_weight = weight, ready_bias = bias;
  if (segments > 0) {
    params.segments = static_cast<int>(segments);
    params.weight_stride = ready_segments(ready_weight, ready_bias, weight_dtype);
  } else {
    ready_weight = ready_parameter(weight, weight_dtype);
    ready_bias = ready_parameter(bias, weight_dtype);
  }
  params.weight = data_or_null(ready_weight);
  params.bias = data_or_null(ready_bias);
  params.weight_dtype = dtype_of(weight_dtype);
  launch(params, x);
  return {std::move(y), std::move(stats), std::move(residual_out)};
}

NormGradients norm_backward(const Tensor& grad_output, const Tensor& x, const Tensor& weight, const Tensor& stats,
                            int64_t normalized_ndim, double weight_offset, bool is_rms_norm, bool wants_x,
                            bool wants_weight, std::optional<at::ScalarType> bias_dtype, bool stats_grad,
                            const AddGradOptions* add, const NormGradients* into, const BiasedGradOptions* biased) {
  check_x(x);
  check_normalized_ndim(normalized_ndim, x);
  const auto check_like_x = [&](const char* name, const Tensor& gradient) {
    TORCH_CHECK(gradient.sizes() == x.sizes() && gradient.device() == x.device(),
                std::string(name) + " must have x's shape and device, [" + text(x.sizes()) + "] on " +
                    x.device().str() + ", got [" + text(gradient.sizes()) + "] on " + gradient.device().str());
    check_supported(name, gradient.scalar_type());
    check_dense(name, gradient);
  };
  check_like_x("grad_output", grad_output);
  const Extent extent = extent_of(x, normalized_ndim);
  TORCH_CHECK(stats.numel() == extent.rows * (is_rms_norm ? 1 : 3) && stats.is_contiguous() &&
                  stats.device() == x.device() && stats.scalar_type() == accumulation_type(x.scalar_type()),
              "stats must be what norm_forward returned for this x");
  if (add) {
    if (add->grad_residual_out.defined()) check_like_x("grad_residual_out", add->grad_residual_out);
    check_dropout(add->philox, add->dropout_p, x.device());
  }
  wants_weight = wants_weight && weight.defined();

  const DeviceScope scope(x);
  const int64_t segments = segments_of(weight, normalized_ndim);
  const at::IntArrayRef columns = x.sizes().slice(x.dim() - normalized_ndim);
  const at::IntArrayRef shape = segments > 0 ? weight.sizes() : columns;
  TORCH_CHECK((segments == 0 || (extent.rows % segments == 0 && shape.slice(1) == columns)) &&
                  (!weight.defined() || weight.sizes() == shape) &&
                  (!biased || !biased->bias.defined() || biased->bias.sizes() == columns) &&
                  (!add || !add->gate.defined() || add->gate.sizes().slice(1) == columns),
              "weight, bias and gate must be forward's");
  if (weight.defined()) check_dense("weight", weight);
  if (into) {
    const auto check_into = [&](const char* name, const Tensor& sum) {
      TORCH_CHECK(sum.defined() && sum.sizes() == shape && sum.scalar_type() == at::kFloat && sum.is_contiguous() &&
                      sum.device() == x.device(),
                  std::string(name) + " must be added to a contiguous float32 tensor of its shape on x's device");
    };
    if (wants_weight) check_into("grad_weight", into->weight);
    if (bias_dtype) check_into("grad_bias", into->bias);
  }
  const Dropout dropout = add ? dropout_of(add->philox, add->dropout_p) : Dropout{};
  const at::ScalarType x_dtype = add ? add->x_dtype : x.scalar_type();
  const bool wants_residual = add && add->residual_dtype;
  const bool has_gate = add && add->gate.defined();
  const bool is_shared = wants_x && wants_residual && !dropout.philox && !has_gate && *add->residual_dtype == x_dtype;
  NormGradients gradients;
  if (x.numel() == 0) {  // no rows: the sums over rows are 0
    if (wants_x) gradients.x = empty(x.sizes(), x_dtype, x);
    if (wants_residual) gradients.residual = is_shared ? gradients.x : empty(x.sizes(), *add->residual_dtype, x);
    if (wants_weight && !into) gradients.weight = at::zeros(shape, weight.options());
    if (bias_dtype && !into) gradients.bias = at::zeros(shape, x.options().dtype(bias_dtype));
    return gradients;
  }

  // The kernels read grad_output in x's dtype, an add stage also a 16-bit one beside fp32 x. Where out_dtype made them
  // differ otherwise, both are taken to the accumulation type, at the price of a copy on a rare path.
  const at::ScalarType grad_dtype = grad_output.scalar_type();
  const at::ScalarType kernel_dtype =
      grad_dtype == x.scalar_type() ? x.scalar_type() : accumulation_type(x.scalar_type());
  const at::ScalarType grad_input_dtype = add ? x_dtype : kernel_dtype;
  if (wants_x) gradients.x = empty(x.sizes(), grad_input_dtype, x);
  if (wants_residual) gradients.residual = is_shared ? gradients.x : empty(x.sizes(), *add->residual_dtype, x);
  if (wants_weight) gradients.weight = into ? into->weight : empty(shape, weight.scalar_type(), x);
  if (bias_dtype) gradients.bias = into ? into->bias : empty(shape, *bias_dtype, x);
  if (has_gate) gradients.gate = empty(add->gate.sizes(), add->gate.scalar_type(), x);
  if (!wants_x && !wants_residual && !wants_weight && !bias_dtype && !has_gate) return gradients;

  NormBackwardParams params{};
  params.grad_input = wants_x ? gradients.x.mutable_data_ptr() : nullptr;
  params.grad_weight = wants_weight ? gradients.weight.mutable_data_ptr() : nullptr;
  params.grad_bias = bias_dtype ? gradients.bias.mutable_data_ptr() : nullptr;
  params.rows = extent.rows;
  params.hidden_size = extent.hidden_size;
  params.segments = static_cast<int>(segments);
  params.weight_offset = weight_offset;
  params.x_dtype = dtype_of(kernel_dtype);
  params.grad_weight_dtype = dtype_of(wants_weight ? gradients.weight.scalar_type() : kernel_dtype);
  params.grad_bias_dtype = dtype_of(bias_dtype ? gradients.bias.scalar_type() : kernel_dtype);
  params.accumulate = into;
  params.is_rms_norm = is_rms_norm;
  params.stats_grad = stats_grad;
  point_to_stats(params, stats);
  std::optional<RowView> grad_residual_rows, gated_rows;
  GateGradStage stage;
  Tensor ready_gate;
  if (add) {
    stage = {};
    stage.grad_residual_out_strides = RowStrides{extent.rows, 0, 0};
    if (add->grad_residual_out.defined()) {
      grad_residual_rows.emplace(of_dtype(add->grad_residual_out, kernel_dtype), normalized_ndim, extent);
      stage.grad_residual_out = grad_residual_rows->tensor.const_data_ptr();
      stage.grad_residual_out_strides = grad_residual_rows->strides;
    }
    stage.grad_residual = wants_residual && !is_shared ? gradients.residual.mutable_data_ptr() : nullptr;
    stage.grad_output_dtype =
        dtype_of(x.scalar_type() == at::kFloat && grad_dtype != at::kDouble ? grad_dtype : kernel_dtype);
    stage.grad_input_dtype = dtype_of(grad_input_dtype);
    stage.grad_residual_dtype = dtype_of(add->residual_dtype.value_or(has_gate ? x.scalar_type() : x_dtype));
    stage.dropout = dropout;
    params.add = &stage;
  }
  if (has_gate) {
    gated_rows.emplace(add->x, normalized_ndim, extent);
    stage.x = gated_rows->tensor.const_data_ptr();
    stage.x_strides = gated_rows->strides;
    Tensor no_bias;
    ready_gate = add->gate;
    stage.gate_stride = ready_segments(ready_gate, no_bias, add->gate.scalar_type());
    stage.gate = ready_gate.const_data_ptr();
    params.grad_gate = gradients.gate.mutable_data_ptr();
    params.grad_gate_dtype = dtype_of(gradients.gate.scalar_type());
    params.gate = &stage;
  }

  // Beside an add stage, grad_output and weight may be narrower than x.
  const bool takes_narrow = add && (has_gate || has_add_stage(params, x));
  if (!takes_narrow) stage.grad_output_dtype = params.x_dtype;
  const at::ScalarType kernel_grad_dtype = stage.grad_output_dtype == params.x_dtype ? kernel_dtype : grad_dtype;
  at::ScalarType weight_dtype = !weight.defined() || kernel_dtype != x.scalar_type()   ? kernel_dtype
                                : takes_narrow || weight.scalar_type() == kernel_dtype ? weight.scalar_type()
                                                                                       : at::kFloat;
  Tensor ready_weight = weight, ready_bias;
  AfterNorm after_norm;
  if (biased) {
    if (biased->after) {
      after_norm = after_of(*biased->after, x);
      params.after = &after_norm;
    } else {
      params.x_is_y = true;
      params.mean = params.mean_tail = nullptr;
    }
    weight_dtype = parameters_dtype(weight, biased->bias, x);
    ready_bias = ready_parameter(biased->bias, weight_dtype);
    params.bias = data_or_null(ready_bias);
  }
  if (segments > 0) {
    params.weight_stride = ready_segments(ready_weight, ready_bias, weight_dtype);
  } else {
    ready_weight = ready_parameter(weight, weight_dtype);
  }
  // LayerNorm of one element is 0 and, to the kernels, constant. With frozen statistics it has a slope: as RMSNorm of
  // 0.
  const bool is_zero = !stats_grad && !is_rms_norm && extent.hidden_size == 1;
  if (is_zero) {
    params.is_rms_norm = true;
    params.mean = params.mean_tail = nullptr;
  }
  const RowView x_rows(of_dtype(is_zero ? at::zeros_like(x) : x, kernel_dtype), normalized_ndim, extent);
  const RowView grad_rows(of_dtype(grad_output, kernel_grad_dtype), normalized_ndim, extent);
  params.grad_output = grad_rows.tensor.const_data_ptr();
  params.x = x_rows.tensor.const_data_ptr();
  params.weight = data_or_null(ready_weight);
  params.grad_output_strides = grad_rows.strides;
  params.x_strides = x_rows.strides;
  params.weight_dtype = dtype_of(weight_dtype);
  launch(params, x);
  if (wants_x && !add) gradients.x = of_dtype(gradients.x, x.scalar_type());
  if (into) gradients.weight = gradients.bias = Tensor();
  return gradients;
}

namespace {

#ifdef FUSED_LAYERNORM_WITH_CUDA
// What the operations beside backward are told of the norm, and the tensors it lies in. `x`: that whose rows they read.
struct NormAgain {
  NormForwardParams params{};
  RowView rows;
  Tensor weight, bias, stats;

  NormAgain(const Tensor& x, const Tensor& given_weight, const Tensor& given_bias, const Tensor& given_stats,
            int64_t normalized_ndim, double weight_offset, bool is_rms_norm)
      : rows(x, normalized_ndim, extent_of(x, normalized_ndim)), stats(given_stats) {
    const Extent extent = extent_of(x, normalized_ndim);
    TORCH_CHECK(x.is_cuda() && is_supported(x.scalar_type()) && stats.is_contiguous() && stats.device() == x.device() &&
                    stats.scalar_type() == accumulation_type(x.scalar_type()) &&
                    stats.numel() >= extent.rows * (is_rms_norm ? 1 : 3),
                "stats must be what norm_forward returned, of CUDA tensors");
    const at::ScalarType dtype = parameters_dtype(given_weight, given_bias, x);
    for (const Tensor& parameter : {std::cref(given_weight), std::cref(given_bias)})
      TORCH_CHECK(!parameter.defined() || (parameter.numel() == extent.hidden_size && parameter.device() == x.device()),
                  "weight and bias must be forward's");
    weight = ready_parameter(given_weight, dtype);
    bias = ready_parameter(given_bias, dtype);
    params.x = rows.tensor.const_data_ptr();
    params.weight = data_or_null(weight);
    params.bias = data_or_null(bias);
    params.x_strides = rows.strides;
    params.rows = extent.rows;
    params.hidden_size = extent.hidden_size;
    params.weight_offset = weight_offset;
    params.x_dtype = dtype_of(x.scalar_type());
    params.weight_dtype = dtype_of(dtype);
    params.y_dtype = params.x_dtype;
    params.is_rms_norm = is_rms_norm;
    point_to_stats(params, stats);
  }
};

// What has_after_stage_cuda() and has_y_stage_cuda() are asked about.
NormBackwardParams asked_of(const Tensor& x, int64_t normalized_ndim) {
  const Extent extent = extent_of(x, normalized_ndim);
  NormBackwardParams asked{};
  asked.rows = extent.rows;
  asked.hidden_size = extent.hidden_size;
  asked.x_dtype = dtype_of(x.scalar_type());
  return asked;
}
#endif

}  // namespace

NormGradients after_norm_backward(const Tensor& grad_output, const Tensor& x, const Tensor& weight, const Tensor& bias,
                                  const Tensor& stats, int64_t normalized_ndim, double weight_offset, bool is_rms_norm,
                                  bool wants_x, bool wants_weight, bool wants_bias, const AfterOptions& after) {
  check_normalized_ndim(normalized_ndim, x);
  check_supported("grad_output", grad_output.scalar_type());
  TORCH_CHECK(grad_output.sizes() == x.sizes() && grad_output.device() == x.device(),
              "grad_output must have x's shape and device");
  const auto bias_dtype = wants_bias && bias.defined() ? std::optional(bias.scalar_type()) : std::nullopt;
  const auto rest = [&](const Tensor& grad, const BiasedGradOptions* stage) {
    return norm_backward(grad, x, weight, stats, normalized_ndim, weight_offset, is_rms_norm, wants_x, wants_weight,
                         bias_dtype, /*stats_grad=*/true, nullptr, nullptr, stage);
  };
  const DeviceScope scope(x);
  const BiasedGradOptions stage{after, bias};
  if (x.is_cpu() || x.numel() == 0) return rest(grad_output, x.numel() == 0 ? nullptr : &stage);
#ifdef FUSED_LAYERNORM_WITH_CUDA
  const AfterNorm after_norm = after_of(after, x);
  const Tensor rounded = of_dtype(grad_output, c10::promoteTypes(grad_output.scalar_type(), x.scalar_type()));
  if (rounded.scalar_type() == x.scalar_type() && has_after_stage_cuda(asked_of(x, normalized_ndim)))
    return rest(rounded, &stage);
  // Beside fp64 all is fp64
  const bool is_double = rounded.scalar_type() == at::kDouble;
  Tensor grad = empty(x.sizes(), rounded.scalar_type(), x);
  const auto as_wide = [&](const Tensor& t) { return is_double && t.defined() ? of_dtype(t, at::kDouble) : t; };
  NormAgain norm(as_wide(x), as_wide(weight), as_wide(bias), as_wide(stats), normalized_ndim, weight_offset,
                 is_rms_norm);
  const RowView grad_rows(rounded, normalized_ndim, extent_of(x, normalized_ndim));
  norm.params.y_dtype = dtype_of(grad.scalar_type());
  const AfterNormGradParams params{grad_rows.tensor.const_data_ptr(), grad.mutable_data_ptr(), grad_rows.strides,
                                   after_norm};
  C10_CUDA_CHECK(static_cast<cudaError_t>(
      launch_after_norm_grad_cuda(norm.params, params, c10::cuda::getCurrentCUDAStream(x.get_device()))));
  return rest(grad, nullptr);
#else
  TORCH_CHECK(false, "x must be on the CPU, got " + x.device().str());
#endif
}

NormGradients backward_from_y(const Tensor& grad_output, const Tensor& y, const Tensor& weight, const Tensor& bias,
                              const Tensor& stats, int64_t normalized_ndim, double weight_offset, bool is_rms_norm,
                              bool wants_x, bool wants_weight, bool wants_bias) {
  check_x(y);
  check_normalized_ndim(normalized_ndim, y);
  const DeviceScope scope(y);
  const auto bias_dtype = wants_bias && bias.defined() ? std::optional(bias.scalar_type()) : std::nullopt;
  const auto backward = [&](const Tensor& x, const Tensor& stats, const BiasedGradOptions* stage) {
    return norm_backward(grad_output, x, weight, stats, normalized_ndim, weight_offset, is_rms_norm, wants_x,
                         wants_weight, bias_dtype, /*stats_grad=*/true, nullptr, nullptr, stage);
  };
  if (y.numel() == 0) return backward(y, stats, nullptr);
  const BiasedGradOptions stage{std::nullopt, bias};
  if (y.is_cpu()) return backward(y, stats, &stage);
#ifdef FUSED_LAYERNORM_WITH_CUDA
  if (grad_output.scalar_type() == y.scalar_type() && has_y_stage_cuda(asked_of(y, normalized_ndim)))
    return backward(y, stats, &stage);
  // x - mean first, rounded to y's dtype; of fp16, where it may overflow, in fp32
  Tensor x = empty(y.sizes(), y.scalar_type() == at::kHalf ? at::kFloat : y.scalar_type(), y);
  NormAgain norm(y, weight, bias, stats, normalized_ndim, weight_offset, /*is_rms_norm=*/true);
  norm.params.y = x.mutable_data_ptr();
  norm.params.y_dtype = dtype_of(x.scalar_type());
  C10_CUDA_CHECK(
      static_cast<cudaError_t>(launch_recover_cuda(norm.params, c10::cuda::getCurrentCUDAStream(y.get_device()))));
  const Tensor about_0 = at::zeros_like(stats);
  about_0[0].copy_(stats[0]);
  NormGradients found = backward(x, about_0, nullptr);
  if (wants_x) found.x = of_dtype(found.x, y.scalar_type());
  return found;
#else
  TORCH_CHECK(false, "y must be on the CPU, got " + y.device().str());
#endif
}

NormGradients gated_norm_backward(const Tensor& grad_output, const Tensor& grad_residual_out, const Tensor& z,
                                  const Tensor& x, const Tensor& gate, const Tensor& weight, const Tensor& stats,
                                  int64_t normalized_ndim, double weight_offset, bool is_rms_norm, bool wants_x,
                                  bool wants_residual, bool wants_weight, std::optional<at::ScalarType> bias_dtype) {
  check_x(z);
  check_normalized_ndim(normalized_ndim, z);
  const int64_t gates = segments_of(gate, normalized_ndim);
  TORCH_CHECK(x.sizes() == z.sizes() && x.device() == z.device() && gate.device() == z.device() &&
                  gate.scalar_type() == x.scalar_type() && gates > 0 && gates == segments_of(weight, normalized_ndim),
              "x and gate must be forward's");
  const DeviceScope scope(z);
  bool has_stage = z.is_cpu() && z.numel() > 0;
#ifdef FUSED_LAYERNORM_WITH_CUDA
  if (z.is_cuda() && z.numel() > 0 && grad_output.scalar_type() == x.scalar_type()) {
    GateGradStage stage{};
    stage.grad_output_dtype = stage.grad_input_dtype = dtype_of(x.scalar_type());
    stage.grad_residual_dtype = dtype_of(z.scalar_type());
    NormBackwardParams asked = asked_of(z, normalized_ndim);
    asked.segments = static_cast<int>(gates);
    asked.gate = &stage;
    has_stage = has_gate_stage_cuda(asked);
  }
#endif
  if (has_stage) {
    const AddGradOptions add{grad_residual_out,
                             {},
                             0.0,
                             x.scalar_type(),
                             wants_residual ? std::optional(z.scalar_type()) : std::nullopt,
                             gate,
                             x};
    return norm_backward(grad_output, z, weight, stats, normalized_ndim, weight_offset, is_rms_norm, wants_x,
                         wants_weight, bias_dtype, /*stats_grad=*/true, &add);
  }
  const AddGradOptions add{grad_residual_out, {}, 0.0, z.scalar_type(), std::nullopt};
  NormGradients found = norm_backward(grad_output, z, weight, stats, normalized_ndim, weight_offset, is_rms_norm,
                                      /*wants_x=*/true, wants_weight, bias_dtype, /*stats_grad=*/true, &add);
  // gate * x is a norm whose statistics are constants, 0 and 1
  const Extent extent = extent_of(x, normalized_ndim);
  const Tensor ones = empty({1, extent.rows}, accumulation_type(x.scalar_type()), x).fill_(1);
  NormGradients of_product = norm_backward(found.x, x, gate, ones, normalized_ndim, 0.0, /*is_rms_norm=*/true, wants_x,
                                           /*wants_weight=*/true, std::nullopt, /*stats_grad=*/false);
  if (wants_residual) found.residual = found.x;
  found.x = of_product.x;
  found.gate = of_product.weight;
  return found;
}

Tensor dropout_mask(const Tensor& philox, int64_t rows, int64_t hidden_size, double dropout_p) {
  check_dropout(philox, dropout_p, philox.device());
  TORCH_CHECK(rows >= 0 && hidden_size >= 0, "a mask needs sizes of 0 or more");
  const DeviceScope scope(philox);
  Tensor mask = empty({rows, hidden_size}, at::kBool, philox);
  if (mask.numel() == 0) return mask;
  if (dropout_p == 0) return mask.fill_(true);
  const DropoutMaskParams params{static_cast<uint8_t*>(mask.mutable_data_ptr()),
                                 rows,
                                 hidden_size,
                                 {philox.const_data_ptr<int64_t>(), most_dropped(dropout_p), 0}};
#ifdef FUSED_LAYERNORM_WITH_CUDA
  if (philox.is_cuda()) {
    C10_CUDA_CHECK(static_cast<cudaError_t>(
        launch_dropout_mask_cuda(params, c10::cuda::getCurrentCUDAStream(philox.get_device()))));
    return mask;
  }
#endif
  launch_dropout_mask_cpu(params);
  return mask;
}

}  // namespace fused_layernorm
