// The arguments that the torch layer passes to the kernels: one plain struct per direction, the same for CUDA and CPU.
// No torch, no CUDA headers. A null pointer is an absent input or an unwanted result.
//
//   z    = residual + keep * dropout_scale * gate * x       load stage; rounded once, to z_dtype. Without one z is x
//   mean = is_rms_norm ? 0 : sum(z)/N     rstd = 1/sqrt(sum((z-mean)^2)/N + eps)     x_hat = (z-mean)*rstd
//   u    = x_hat * (weight + weight_offset) + bias
//   y    = keep * dropout_scale * activation(u)             epilogue; without one y is u
//   y    = residual + u                                     with adds_y, and neither stage; then, with next_y,
//   next_y = y * (1/sqrt(sum(y^2)/N + next_eps)) * (next_weight + next_weight_offset)
//
// A gated norm has neither stage, and a row gate with a value for each element of x. a = gate_activation(row_gate):
//   gates_y:   z = x                            y = u * a
//   otherwise: z = x * a, never rounded         y = u
//
//   grad_u = keep * dropout_scale * grad_output * activation'(u)      wdy = (weight + weight_offset) * grad_u
//   c1 = sum(x_hat*wdy)/N    c2 = is_rms_norm ? 0 : sum(wdy)/N        (c1 = c2 = 0 without stats_grad)
//   grad_z = (wdy - x_hat*c1 - c2)*rstd + grad_residual_out
//   grad_residual = grad_z     grad_input = keep * dropout_scale * gate * grad_z
//   grad_gate = sum(keep * dropout_scale * x * grad_z)     over the rows that share the gate, likewise:
//   grad_weight = sum(grad_u * x_hat)     grad_bias = sum(grad_u)
//
//   gates_y:   grad_u = grad_output * a     grad_row_gate = grad_output * u * gate_activation'(row_gate)
//   otherwise: grad_input = grad_z * a      grad_row_gate = grad_z * x * gate_activation'(row_gate)
#pragma once

#include <cstdint>

struct CUstream_st;  // cudaStream_t is a pointer to this; spelled so that C++ files need no CUDA header

#if defined(__CUDACC__)
#define FLN_HOST_DEVICE __host__ __device__
#define FLN_PHILOX_INLINE __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define FLN_HOST_DEVICE
#define FLN_PHILOX_INLINE __attribute__((always_inline)) inline
#else
#define FLN_HOST_DEVICE
#define FLN_PHILOX_INLINE inline
#endif
#if defined(__GNUC__)
#define FLN_EXPORT __attribute__((visibility("default")))
#else
#define FLN_EXPORT
#endif

namespace fused_layernorm {

enum class DType : int { kFloat16, kBFloat16, kFloat32, kFloat64 };
constexpr int dtype_bytes(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }
constexpr DType accumulation_dtype(DType dtype) { return dtype == DType::kFloat64 ? dtype : DType::kFloat32; }

// The factor that turns the sum of a row into its mean.
template <typename T>
T inverse_of(int64_t hidden_size) {
  return static_cast<T>(1.0 / static_cast<double>(hidden_size));
}

// Where each row of a tensor starts, in elements. Rows come in groups of `rows_per_group` that lie `row_stride`
// apart; groups lie `group_stride` apart. That covers a matrix with padded rows (one group) and a slice of a fused
// QKV projection, whose heads are adjacent while its tokens are far apart (one group a token). Strides may be 0.
// With several groups there are fewer than 2^31 rows: a 64-bit division would be a call in the middle of a kernel.
struct RowStrides {
  int64_t rows_per_group;
  int64_t row_stride;
  int64_t group_stride;

  FLN_HOST_DEVICE bool is_even(int64_t rows) const { return rows <= rows_per_group; }  // all rows equally far apart

  FLN_HOST_DEVICE int64_t offset(int64_t row) const {
    if (row < rows_per_group) return row * row_stride;
    const uint32_t group = static_cast<uint32_t>(row) / static_cast<uint32_t>(rows_per_group);
    return group * group_stride + (row - group * rows_per_group) * row_stride;
  }
};

// keep(seed, offset, row, col) of philox.h decides which elements remain. A dropped element is 0 even where it was not
// finite.
struct Dropout {
  const int64_t* philox;  // [2], (seed, offset), in the device's memory: CUDA graphs replay with others; nullptr: none
  uint32_t most_dropped;  // most_dropped(p)
  double scale;           // dropout_scale(p)
};

// kSigmoid is for gates only: it is no activation of y.
enum class Activation : int { kNone, kRelu, kGelu, kGeluTanh, kSilu, kSigmoid };
constexpr const char* kActivationNames[] = {"", "relu", "gelu", "gelu_tanh", "silu", "sigmoid"};  // Python's

// Options of both directions.
struct NormStages {
  Dropout dropout;        // of x, or of y
  bool drops_y;           // which of the two
  Activation activation;  // of the epilogue
  // The rows are `segments` equal parts, each with a weight, bias and gate of its own, which lie weight_stride (gate:
  // gate_stride) elements behind those of the part before. 0 or 1: the rows share one. With more there are fewer than
  // 2^31 rows, no dropout and no epilogue.
  int segments;
  bool interleaves;  // row r is of segment r % segments (a weight for each head), not of r / (rows / segments); no gate
  int64_t weight_stride;
  int64_t gate_stride;
  double weight_offset;  // added to weight in the accumulation type (1.0: Gemma); 0 without weight
  bool is_rms_norm;
  Activation gate_activation;  // of row_gate
  bool gates_y;                // where row_gate multiplies

  bool drops_x() const { return dropout.philox && !drops_y; }
  bool has_epilogue() const { return activation != Activation::kNone || (dropout.philox && drops_y); }
};

// Pointers to "rows" are [rows, hidden_size] with the elements of one row adjacent; results are contiguous and 16-byte
// aligned. weight, bias and gate begin at multiples of 16 bytes.
struct NormForwardParams : NormStages {
  const void* x;         // rows, x_dtype
  const void* residual;  // rows, residual_dtype: x_dtype or fp32; of the load stage, or with adds_y added to u
  const void* gate;      // [segments, hidden_size], x_dtype; nullptr: 1
  const void* row_gate;  // rows, row_gate_dtype: any; nullptr: no gated norm
  const void* weight;    // [segments, hidden_size], weight_dtype: x_dtype or fp32; nullptr: 1
  const void* bias;      // as weight; nullptr: 0

  void* y;             // rows, y_dtype: any
  void* residual_out;  // z as rows, z_dtype: x_dtype or fp32. nullptr: no load stage; on CUDA also: z is not stored
  // Saved for backward, [rows] each, in the accumulation type (fp64 for fp64 x, else fp32).
  // mean + mean_tail is the mean to about twice the precision of the type; both are nullptr for RMSNorm.
  void* rstd;
  void* mean;
  void* mean_tail;
  // The RMSNorm of y as it was rounded, with adds_y, one segment, and y of x_dtype or of fp32 beside 16-bit x. The CPU
  // kernels do not compute it.
  const void* next_weight;  // [hidden_size], next_weight_dtype: x_dtype or fp32, aligned as weight; nullptr: 1
  void* next_y;             // rows, x_dtype; nullptr: there is none
  void* next_rstd;          // as rstd
  void* workspace;          // norm_forward_workspace_cuda() bytes, 16-byte aligned; contents undefined before and after

  RowStrides x_strides;
  RowStrides residual_strides;
  RowStrides row_gate_strides;
  int64_t rows;         // >= 1: the caller returns early when there is nothing to do
  int64_t hidden_size;  // >= 1
  double eps;
  double next_eps;
  double next_weight_offset;  // 0 without next_weight
  DType x_dtype;
  DType residual_dtype;
  DType z_dtype;
  DType row_gate_dtype;
  DType weight_dtype;
  DType next_weight_dtype;
  DType y_dtype;
  bool has_load_stage;  // without it z is x
  bool adds_y;          // goes with no other stage
  bool rounds_x_hat;  // to z_dtype, and the product with weight to the wider of z_dtype and weight_dtype; then there is
                      // neither a bias nor a row gate
};

struct NormBackwardParams : NormStages {
  const void* grad_output;        // of y: rows, grad_output_dtype: any
  const void* grad_residual_out;  // of z as it was returned: rows, grad_residual_out_dtype: any; nullptr: 0
  const void* z;                  // what forward normalized: rows, z_dtype. With z_is_y forward's y, of the same dtype.
                                  // With a row gate forward's x
  const void* x;                  // with a gate: forward's x, rows, x_dtype
  const void* gate;               // as in forward
  const void* row_gate;           // as in forward
  const void* weight;             // as in forward
  const void* bias;               // as in forward; only read with an epilogue, z_is_y or gates_y
  const void* rstd;               // as saved by forward
  const void* mean;               // nullptr for RMSNorm, and with z_is_y
  const void* mean_tail;

  void* grad_input;     // rows, x_dtype
  void* grad_residual;  // rows, residual_dtype: x_dtype or fp32
  void* grad_row_gate;  // rows, row_gate_dtype
  void* grad_gate;      // [segments, hidden_size], contiguous, of the dtype given below: any of the four; likewise
  void* grad_weight;
  void* grad_bias;
  void* workspace;  // norm_backward_workspace_*() bytes, 16-byte aligned; contents undefined before and after

  RowStrides grad_output_strides;
  RowStrides grad_residual_out_strides;
  RowStrides z_strides;
  RowStrides x_strides;
  RowStrides row_gate_strides;
  int64_t rows;         // >= 1
  int64_t hidden_size;  // >= 1
  DType grad_output_dtype;
  DType grad_residual_out_dtype;
  DType z_dtype;
  DType x_dtype;
  DType residual_dtype;
  DType row_gate_dtype;
  DType weight_dtype;  // x_dtype or fp32
  DType grad_gate_dtype;
  DType grad_weight_dtype;
  DType grad_bias_dtype;
  bool stats_grad;      // false: mean and rstd are constants
  bool accumulate;      // add grad_weight and grad_bias, both fp32, to what is there
  bool has_load_stage;  // forward had one; without it z_dtype is x_dtype
  bool z_is_y;  // x_hat = (y - bias) / (weight + weight_offset), which must not be 0; no load stage, no epilogue

  bool wants_rows() const { return grad_input || grad_residual || grad_row_gate || grad_gate; }
  bool wants_columns() const { return grad_weight || grad_bias || grad_gate; }
};

// A norm whose result is quantized: the rows of y, of NormForwardParams above without saved statistics, gates, dropout
// and epilogue, are stored as
//   code = saturate(round(y * (1 / s)))     s = scale, or max(|y| of the group, kLeastAmax) * inverse_largest
// rounded to the nearest, ties to even, and saturated at the largest finite code, for int8 at -127 and 127. NaN stays
// NaN; as int8 it is 0.
enum class CodeDType : int { kFloat8E4M3, kFloat8E5M2, kInt8 };
constexpr float kLeastAmax = 1e-12f;

struct NormQuantParams : NormForwardParams {  // y: of x_dtype; nullptr: unwanted
  void* codes;                                // rows, code_dtype
  const float* scale;                         // of all elements, in the device's memory; nullptr: found
  float* scales;  // found: of group g of row r at r * scale_row_stride + g * scale_group_stride
  int64_t scale_row_stride;
  int64_t scale_group_stride;
  int64_t group_size;     // adjacent columns that share a scale: hidden_size, or 32, 64 or 128
  float inverse_largest;  // 1 / the largest code
  CodeDType code_dtype;
};

// keep(...) of every element as bytes of 0 and 1.
struct DropoutMaskParams {
  uint8_t* mask;  // [rows, hidden_size], contiguous
  int64_t rows;   // >= 1
  int64_t hidden_size;
  Dropout dropout;
};

// The launchers take every combination that the structs above allow. Those of CUDA are the C interface of the kernels,
// which may lie in a library of their own. They return a cudaError_t as int (0: launched); the workspace sizes are
// computed by the same code as the launches.
extern "C" {
FLN_EXPORT int launch_norm_forward_cuda(const NormForwardParams& params, CUstream_st* stream);
FLN_EXPORT int launch_norm_backward_cuda(const NormBackwardParams& params, CUstream_st* stream);
FLN_EXPORT int launch_dropout_mask_cuda(const DropoutMaskParams& params, CUstream_st* stream);
// For rows of x of whole 16-byte vectors, residual of z's dtype, and at most 64 KiB of z.
FLN_EXPORT int launch_norm_quant_cuda(const NormQuantParams& params, CUstream_st* stream);
FLN_EXPORT int64_t norm_forward_workspace_cuda(const NormForwardParams& params);
FLN_EXPORT int64_t norm_backward_workspace_cuda(const NormBackwardParams& params);
FLN_EXPORT const char* cuda_error_text(int error);
}

void launch_norm_forward_cpu(const NormForwardParams& params);
void launch_norm_backward_cpu(const NormBackwardParams& params);
void launch_dropout_mask_cpu(const DropoutMaskParams& params);
int64_t norm_backward_workspace_cpu(const NormBackwardParams& params);

}  // namespace fused_layernorm
