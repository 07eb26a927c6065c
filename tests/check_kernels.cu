// Checks the entry points of csrc/norm_params.h against a naive fp64 reference on the CPU. Needs norm_params.h and
// philox.h only; no torch.
//
//   nvcc -std=c++20 -O3 -arch=sm_90 --expt-relaxed-constexpr -Icsrc -c csrc/cuda/FILE.cu -o build/FILE.o   (each file)
//   nvcc -std=c++17 -O2 -arch=sm_90 -Icsrc tests/check_kernels.cu build/*.o -o build/check_kernels
//   build/check_kernels [-v] [--from N] [--time] [TEXT]
//
// TEXT: only cases whose name contains it; -v: one line for each case. --from: from the Nth case on, which a run says
// that SIGINT stopped. --time: no checks, but times as CSV (the end of this file), of the cells whose name contains
// TEXT. Exits with 1 on a failure (one line each, up to 200) and with 2 on a CUDA error. For the CPU kernels:
// -DFLN_CHECK_CPU -Xcompiler -fopenmp, and their object.
//
// Every case runs forward, then backward from forward's own results, with all memory poisoned by 0xff bytes (NaN), and
// checks the results, the 64 bytes behind each result and behind the workspace, and that the first rows get the same
// bits when fewer rows are given. The tolerance of each element follows from the absolute values of what was added up.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "norm_params.h"
#include "philox.h"

using namespace fused_layernorm;
using Values = std::vector<double>;

// ---- memory --------------------------------------------------------------------------------------------------------

int64_t kPool = int64_t{3} << 29;
constexpr int64_t kGuard = 64;
char* pool = nullptr;
int64_t used = 0;

void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("CUDA error: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}
#ifdef FLN_CHECK_CPU
void make_pool() { pool = static_cast<char*>(aligned_alloc(256, kPool)); }
void poison() { std::memset(pool, 0xff, used), used = 0; }
void upload(void* to, const void* from, int64_t bytes) { std::memcpy(to, from, bytes); }
void download(void* to, const void* from, int64_t bytes) { std::memcpy(to, from, bytes); }
void finish(const char*) {}
#else
void make_pool() { check_cuda(cudaMalloc(&pool, kPool), "cudaMalloc"); }
void poison() { check_cuda(cudaMemset(pool, 0xff, used), "poison"), used = 0; }
void upload(void* to, const void* from, int64_t bytes) {
  check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "upload");
}
void download(void* to, const void* from, int64_t bytes) {
  check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "download");
}
void finish(const char* what) { check_cuda(cudaDeviceSynchronize(), what); }
#endif
char* take(int64_t bytes) {
  char* found = pool + used;
  used += (bytes + kGuard + 255) / 256 * 256;
  if (used > kPool) std::printf("the pool is too small\n"), std::exit(2);
  return found;
}

void put(char* at, DType dtype, double value) {
  switch (dtype) {
    case DType::kFloat16: {
      const __half v = __float2half_rn(static_cast<float>(value));
      std::memcpy(at, &v, 2);
      break;
    }
    case DType::kBFloat16: {
      const __nv_bfloat16 v = __float2bfloat16_rn(static_cast<float>(value));
      std::memcpy(at, &v, 2);
      break;
    }
    case DType::kFloat32: {
      const float v = static_cast<float>(value);
      std::memcpy(at, &v, 4);
      break;
    }
    case DType::kFloat64: std::memcpy(at, &value, 8);
  }
}
double get(const char* at, DType dtype) {
  switch (dtype) {
    case DType::kFloat16: {
      __half v;
      std::memcpy(&v, at, 2);
      return __half2float(v);
    }
    case DType::kBFloat16: {
      __nv_bfloat16 v;
      std::memcpy(&v, at, 2);
      return __bfloat162float(v);
    }
    case DType::kFloat32: {
      float v;
      std::memcpy(&v, at, 4);
      return v;
    }
    default: {
      double v;
      std::memcpy(&v, at, 8);
      return v;
    }
  }
}
double unit(DType dtype) {  // twice the rounding of a number near 1
  return dtype == DType::kBFloat16  ? 0x1p-8
         : dtype == DType::kFloat16 ? 0x1p-11
         : dtype == DType::kFloat32 ? 0x1p-23
                                    : 0x1p-52;
}

template <typename F>
void parallel(int64_t count, F&& f) {
  const int threads = std::max(1u, std::min(16u, std::thread::hardware_concurrency()));
  std::atomic<int64_t> next{0};
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t)
    pool.emplace_back([&] {
      for (int64_t i; (i = next++) < count;) f(i);
    });
  for (auto& thread : pool) thread.join();
}

// About normal, from counters.
double noise(uint64_t seed, uint64_t index) {
  uint64_t h = (seed * 0x9e3779b97f4a7c15u) ^ (index * 0xd1342543de82ef95u);
  double sum = 0;
  for (int i = 0; i < 3; ++i) {
    h ^= h >> 31, h *= 0xbf58476d1ce4e5b9u, h ^= h >> 29, h *= 0x94d049bb133111ebu, h ^= h >> 32;
    sum += (h >> 11) * 0x1p-53;
  }
  return (sum - 1.5) * 2;
}

// Three rows among others whose sums are far from what a kernel expects: of an element, of all but the first eight, so
// that these do not tell the mean (fp32), and of all, so that the mean is far from 0 (16 bits).
double offset_of_far(int64_t row, int64_t column) {
  const bool is_far = row == 1 ? column == 0 : row == 4 ? column >= 8 : row == 2;
  return is_far ? 100 : 0;
}

// ---- cases ---------------------------------------------------------------------------------------------------------

struct Types {
  DType x, residual, z, weight, y, go, gro, gw, gb, gg;
};
enum Layout { kDense, kPadded, kGroups, kExpandedGrad };
struct Case {
  std::string name;
  Types t;
  int64_t rows, n;
  int segments = 0;
  bool rms = false, has_weight = true, has_bias = true, load = false, has_residual = false, has_gate = false;
  Activation activation = Activation::kNone;
  bool drops_x = false, drops_y = false;
  double p = 0.3, weight_offset = 0, eps = 1e-5;
  bool has_gro = false, stats_grad = true, accumulate = false, z_is_y = false, save_stats = true;
  bool wants_x = true, wants_residual = false, wants_weight = true, wants_bias = true, wants_gate = true;
  bool adds_y = false, rounds_x_hat = false;  // adds_y: has_residual without load
  bool has_next = false;                      // with adds_y
  bool has_far_rows = false;                  // offset_of_far()
  bool has_row_gate = false, gates_y = true;
  Activation gate_activation = Activation::kSilu;
  Layout layout = kDense;
};

struct Tensor {
  char* data = nullptr;
  DType dtype = DType::kFloat32;
  RowStrides strides{1, 0, 0};
  Values values;  // [rows, n] as rounded
};

int failures = 0;
bool verbose = false;

// [rows, n] in memory as `layout` says; value(row, col).
template <typename F>
Tensor make_rows(DType dtype, int64_t rows, int64_t n, Layout layout, F&& value) {
  Tensor t;
  t.dtype = dtype;
  const int bytes = dtype_bytes(dtype), vec = 16 / bytes;
  const bool whole = n % vec == 0;
  const int64_t pad = whole ? vec : 1, first = whole || layout == kDense ? 0 : 1;
  t.strides = {rows, n, 0};
  if (layout == kPadded) t.strides.row_stride = n + pad;
  if (layout == kGroups && rows > 2) {
    int64_t group = 2;
    while (rows % group) ++group;
    t.strides = {group, n + pad, group * (n + pad) + 2 * pad};
  }
  if (layout == kExpandedGrad) t.strides.row_stride = 0;
  int64_t elements = first + n;
  for (int64_t r = 0; r < rows; ++r) elements = std::max(elements, first + t.strides.offset(r) + n);
  std::vector<char> host(elements * bytes, static_cast<char>(0xff));
  t.values.resize(rows * n);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < n; ++c) {
      char* at = &host[(first + t.strides.offset(r) + c) * bytes];
      put(at, dtype, value(layout == kExpandedGrad ? 0 : r, c));
      t.values[r * n + c] = get(at, dtype);
    }
  t.data = take(elements * bytes);
  upload(t.data, host.data(), elements * bytes);
  t.data += first * bytes;
  return t;
}

struct Result {
  char* data = nullptr;
  DType dtype;
  int64_t count = 0;

  void make(DType of, int64_t elements) { dtype = of, count = elements, data = take(elements * dtype_bytes(of)); }
  Values values(const Case& c, const char* name) const {
    const int64_t bytes = count * dtype_bytes(dtype);
    std::vector<char> host(bytes + kGuard);
    download(host.data(), data, bytes + kGuard);
    for (int64_t i = bytes; i < bytes + kGuard; ++i)
      if (host[i] != static_cast<char>(0xff)) {
        std::printf("FAIL %s: %s: written %ld bytes behind its end\n", c.name.c_str(), name,
                    static_cast<long>(i - bytes));
        ++failures;
        break;
      }
    Values found(count);
    for (int64_t i = 0; i < count; ++i) found[i] = get(&host[i * dtype_bytes(dtype)], dtype);
    return found;
  }
};

void fail(const Case& c, const std::string& text) {
  if (failures++ < 200) std::printf("FAIL %s: %s\n", c.name.c_str(), text.c_str());
}

// |got - want| <= |want| * rounding of the result + error
void compare(const Case& c, const char* name, const Result& result, const Values& want, const Values& error) {
  if (!result.data) return;
  const Values got = result.values(c, name);
  const double u = unit(result.dtype), least = result.dtype == DType::kFloat16 ? 0x1p-24 : 1e-30;
  int64_t bad = 0, at = -1;
  double worst = 0;
  for (int64_t i = 0; i < result.count; ++i) {
    const double tolerance = std::fabs(want[i]) * u + error[i] + least, off = std::fabs(got[i] - want[i]);
    if (off <= tolerance) continue;
    ++bad;
    const double ratio = std::isnan(off) ? 1e300 : off / tolerance;
    if (ratio > worst) worst = ratio, at = i;
  }
  if (!bad) return;
  char text[300];
  std::snprintf(text, sizeof(text), "%s: %ld of %ld wrong, worst at [%ld, %ld]: got %.9g, want %.9g, tolerance %.3g",
                name, static_cast<long>(bad), static_cast<long>(result.count), static_cast<long>(at / c.n),
                static_cast<long>(at % c.n), got[at], want[at], std::fabs(want[at]) * u + error[at] + least);
  fail(c, text);
}

void same_bits(const Case& c, const char* name, const Result& all, const Result& some, int64_t elements) {
  if (!all.data || !some.data) return;
  const int64_t bytes = elements * dtype_bytes(all.dtype);
  std::vector<char> a(bytes), b(bytes);
  download(a.data(), all.data, bytes);
  download(b.data(), some.data, bytes);
  if (std::memcmp(a.data(), b.data(), bytes)) fail(c, std::string(name) + ": other bits with fewer rows");
}

double activated(Activation a, double u) {
  switch (a) {
    case Activation::kRelu: return u > 0 ? u : 0;
    case Activation::kGelu: return u * 0.5 * std::erfc(-u * 0.70710678118654752440);
    case Activation::kGeluTanh: return 0.5 * u * (1 + std::tanh(0.79788456080286535588 * (u + 0.044715 * u * u * u)));
    case Activation::kSilu: return u / (1 + std::exp(-u));
    case Activation::kSigmoid: return 1 / (1 + std::exp(-u));
    default: return u;
  }
}
double slope(Activation a, double u) {
  switch (a) {
    case Activation::kRelu: return u > 0;
    case Activation::kGelu:
      return 0.5 * std::erfc(-u * 0.70710678118654752440) + u * 0.39894228040143267794 * std::exp(-0.5 * u * u);
    case Activation::kGeluTanh: {
      const double k = 0.79788456080286535588, t = std::tanh(k * (u + 0.044715 * u * u * u));
      return 0.5 * (1 + t) + 0.5 * u * (1 - t * t) * k * (1 + 3 * 0.044715 * u * u);
    }
    case Activation::kSilu: {
      const double s = 1 / (1 + std::exp(-u));
      return s + u * s * (1 - s);
    }
    case Activation::kSigmoid: {
      const double s = 1 / (1 + std::exp(-u));
      return s * (1 - s);
    }
    default: return 1;
  }
}

constexpr int64_t kSeed = 1234567, kOffset = (int64_t{1} << 33) + 24;
bool is_kept(const Case& c, int64_t row, int64_t col) {
  const DropoutOctet octet(kSeed, dropout_where(kOffset, row), static_cast<uint32_t>(row),
                           static_cast<uint32_t>(col / 8));
  return octet.number(static_cast<int>(col % 4), col % 8 >= 4) > most_dropped(c.p);
}

int run_forward(NormForwardParams& params) {
#ifdef FLN_CHECK_CPU
  launch_norm_forward_cpu(params);
  return 0;
#else
  Result workspace;
  const int64_t bytes = norm_forward_workspace_cuda(params);
  if (bytes > 0) workspace.make(DType::kFloat64, (bytes + 7) / 8), params.workspace = workspace.data;
  const int error = launch_norm_forward_cuda(params, nullptr);
  if (bytes > 0) {
    char guard[kGuard];
    download(guard, workspace.data + bytes, kGuard);
    for (char g : guard)
      if (g != static_cast<char>(0xff)) {
        std::printf("FAIL: forward wrote behind its workspace\n"), ++failures;
        break;
      }
  }
  return error;
#endif
}
int run_backward(NormBackwardParams& params) {
  Result workspace;
#ifdef FLN_CHECK_CPU
  const int64_t bytes = norm_backward_workspace_cpu(params);
#else
  const int64_t bytes = norm_backward_workspace_cuda(params);
#endif
  if (bytes > 0) workspace.make(DType::kFloat64, (bytes + 7) / 8), params.workspace = workspace.data;
#ifdef FLN_CHECK_CPU
  launch_norm_backward_cpu(params);
  const int error = 0;
#else
  const int error = launch_norm_backward_cuda(params, nullptr);
#endif
  if (bytes > 0) {
    char guard[kGuard];
    download(guard, workspace.data + bytes, kGuard);
    for (char g : guard)
      if (g != static_cast<char>(0xff)) {
        std::printf("FAIL: backward wrote behind its workspace\n"), ++failures;
        break;
      }
  }
  return error;
}

void run(const Case& c) {
  if (verbose) std::printf("%s\n", c.name.c_str()), std::fflush(stdout);
  poison();
  const int64_t rows = c.rows, n = c.n, parts = std::max(c.segments, 1), rows_each = rows / parts;
  const Types& t = c.t;
  const bool is_double = t.x == DType::kFloat64;
  const DType acc = is_double ? DType::kFloat64 : DType::kFloat32;
  const double scale = dropout_scale(c.p);
  const Layout in_layout = c.layout == kExpandedGrad ? kDense : c.layout;

  const Tensor x = make_rows(t.x, rows, n, in_layout, [&](int64_t r, int64_t i) {
    return noise(1, r * n + i) + 0.5 + (c.has_far_rows ? offset_of_far(r, i) : 0);
  });
  Tensor residual, gate, weight, bias, gro, row_gate;
  if (c.has_residual)
    residual = make_rows(t.residual, rows, n, in_layout,
                         [&](int64_t r, int64_t i) { return 0.7 * noise(2, r * n + i) - 0.2; });
  if (c.has_gro) gro = make_rows(t.gro, rows, n, in_layout, [&](int64_t r, int64_t i) { return noise(7, r * n + i); });
  if (c.has_row_gate)
    row_gate = make_rows(t.x, rows, n, in_layout, [&](int64_t r, int64_t i) { return 2 * noise(8, r * n + i); });
  const auto parameter = [&](DType dtype, uint64_t seed, double mean, int64_t& stride) {
    const int64_t vec = 16 / dtype_bytes(dtype), padded = (n + vec - 1) / vec * vec + vec;
    stride = padded;
    return make_rows(dtype, parts, padded, kDense, [&](int64_t r, int64_t i) {
      const double v = mean + 0.3 * noise(seed, r * n + i);
      return mean != 0 && std::fabs(v) < 0.25 ? 0.25 : v;  // z_is_y divides by weight
    });
  };
  int64_t weight_stride = 0, gate_stride = 0;
  if (c.has_bias) bias = parameter(t.weight, 4, c.activation == Activation::kNone ? 0.4 : 0.1, weight_stride);
  if (c.has_weight) weight = parameter(t.weight, 3, 1.0, weight_stride);
  if (c.has_gate) gate = parameter(t.x, 5, 0.8, gate_stride);
  const int64_t philox[2] = {kSeed, kOffset};
  char* philox_at = take(16);
  upload(philox_at, philox, 16);

  NormForwardParams f{};
  const bool drops = c.drops_x || c.drops_y;
  const auto set_stages = [&](NormStages& s) {
    if (drops) s.dropout = {reinterpret_cast<const int64_t*>(philox_at), most_dropped(c.p), scale};
    s.drops_y = c.drops_y;
    s.activation = c.activation;
    s.segments = c.segments;
    s.weight_stride = weight_stride;
    s.gate_stride = gate_stride;
    s.weight_offset = c.has_weight ? c.weight_offset : 0;
    s.is_rms_norm = c.rms;
    s.gate_activation = c.gate_activation, s.gates_y = c.has_row_gate && c.gates_y;
  };
  set_stages(f);
  Result y, z, rstd, mean, tail, next_y, next_rstd;
  const auto make_forward = [&](int64_t rows) {
    y = z = rstd = mean = tail = next_y = next_rstd = Result();
    y.make(t.y, rows * n);
    if (c.load) z.make(t.z, rows * n);
    if (c.save_stats) {
      rstd.make(acc, rows);
      if (!c.rms) mean.make(acc, rows), tail.make(acc, rows);
    }
    if (c.has_next) next_y.make(t.x, rows * n), next_rstd.make(acc, rows);
    f.next_y = next_y.data, f.next_rstd = next_rstd.data;
    f.y = y.data, f.residual_out = z.data, f.rstd = rstd.data, f.mean = mean.data, f.mean_tail = tail.data;
    f.rows = rows;
  };
  f.x = x.data, f.residual = residual.data, f.gate = gate.data, f.weight = weight.data, f.bias = bias.data;
  f.x_strides = x.strides, f.residual_strides = residual.strides;
  f.row_gate = row_gate.data, f.row_gate_strides = row_gate.strides, f.row_gate_dtype = t.x;
  f.hidden_size = n, f.eps = c.eps;
  f.x_dtype = t.x, f.residual_dtype = t.residual, f.z_dtype = c.load ? t.z : t.x, f.weight_dtype = t.weight,
  f.y_dtype = t.y;
  f.has_load_stage = c.load;
  f.adds_y = c.adds_y, f.rounds_x_hat = c.rounds_x_hat;
  f.next_weight = weight.data, f.next_weight_dtype = t.weight, f.next_eps = 1e-3;
  f.next_weight_offset = c.has_weight ? 0.5 : 0;
  make_forward(rows);
  if (const int error = run_forward(f)) return fail(c, "forward: CUDA error " + std::to_string(error));
  finish(c.name.c_str());

  // ---- reference, from the z that was stored
  Values z_of = x.values, error(rows * n), x_hat(rows * n), u(rows * n), want(rows * n), rstds(rows), means(rows);
  const double e_acc = is_double ? 1e-13 : 0x1p-22, e_sum = is_double ? 1e-12 : 0x1p-17;
  if (c.load) {
    parallel(rows, [&](int64_t r) {
      for (int64_t i = 0; i < n; ++i) {
        const int64_t at = r * n + i;
        double v = c.has_gate ? gate.values[r / rows_each * gate_stride + i] * x.values[at] : x.values[at];
        if (c.drops_x) v = is_kept(c, r, i) ? v * scale : 0;
        const double skip = c.has_residual ? residual.values[at] : 0;
        want[at] = skip + v;
        error[at] = e_acc * (std::fabs(skip) + std::fabs(v));
      }
    });
    compare(c, "residual_out", z, want, error);
    z_of = z.values(c, "residual_out");
  }
  // The gate's activation, where it multiplies y and where it multiplies x, and what its approximation may cost
  const auto factor_of = [&](bool gates_y, int64_t at) {
    return c.has_row_gate && c.gates_y == gates_y ? activated(c.gate_activation, row_gate.values[at]) : 1.0;
  };
  const auto factor_error = [&](bool gates_y, int64_t at) {
    return c.has_row_gate && c.gates_y == gates_y ? e_sum * (std::fabs(factor_of(gates_y, at)) + 0.1) : 0.0;
  };
  if (c.has_row_gate && !c.gates_y)
    for (int64_t at = 0; at < rows * n; ++at) z_of[at] *= factor_of(false, at);
  const auto w = [&](int64_t r, int64_t i) {
    return c.has_weight ? weight.values[r / rows_each * weight_stride + i] + c.weight_offset : 1.0;
  };
  const auto b = [&](int64_t r, int64_t i) {
    return c.has_bias ? bias.values[r / rows_each * weight_stride + i] : 0.0;
  };
  Values stat_error(rows), mean_error(rows);
  parallel(rows, [&](int64_t r) {
    double sum = 0, square = 0, absolute = 0;
    for (int64_t i = 0; i < n; ++i) sum += z_of[r * n + i], absolute += std::fabs(z_of[r * n + i]);
    const double m = c.rms ? 0 : sum / n;
    for (int64_t i = 0; i < n; ++i) square += (z_of[r * n + i] - m) * (z_of[r * n + i] - m);
    means[r] = m;
    rstds[r] = 1 / std::sqrt(square / n + c.eps);
    stat_error[r] = rstds[r] * e_sum;
    mean_error[r] = e_sum * absolute / n;
    for (int64_t i = 0; i < n; ++i)
      mean_error[r] += std::fabs(x.values[r * n + i]) * factor_error(false, r * n + i) / n;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = r * n + i;
      x_hat[at] = (z_of[at] - m) * rstds[r];
      u[at] = x_hat[at] * w(r, i) + b(r, i);
      want[at] = activated(c.activation, u[at]) * factor_of(true, at) + (c.adds_y ? residual.values[at] : 0);
      // The roundings to a 16-bit z: that of x_hat, and that of the product. tests/test_fusions.py has their bits
      const double least = f.z_dtype == DType::kFloat16 ? 0x1p-25 * (1 + std::fabs(w(r, i))) : 0;  // of subnormals
      const double e_rounded = c.rounds_x_hat ? 2.5 * (unit(f.z_dtype) * std::fabs(u[at]) + least) : 0;  // silu: 1.1
      // The error of a mean is a part of the sum of |z|, which |m| may be far below
      error[at] = e_rounded + (c.rms ? 0 : e_acc * absolute / n * std::fabs(rstds[r] * w(r, i))) +
                  e_sum * (std::fabs(z_of[at] * rstds[r] * w(r, i)) + std::fabs(m * rstds[r] * w(r, i)) +
                           std::fabs(b(r, i)) + std::fabs(want[at]));
      if (c.has_row_gate)
        error[at] = error[at] * std::fabs(factor_of(true, at)) + std::fabs(u[at]) * factor_error(true, at) +
                    std::fabs(x.values[at] * rstds[r] * w(r, i)) * factor_error(false, at);
      if (c.drops_y) want[at] = is_kept(c, r, i) ? want[at] * scale : 0, error[at] *= scale;
    }
  });
  compare(c, "y", y, want, error);
  compare(c, "rstd", rstd, rstds, stat_error);
  compare(c, "mean", mean, means, mean_error);
  if (c.has_next) {  // of y as it was stored
    const Values stored = y.values(c, "y");
    Values next_rstds(rows), next_error(rows);
    parallel(rows, [&](int64_t r) {
      double square = 0;
      for (int64_t i = 0; i < n; ++i) square += stored[r * n + i] * stored[r * n + i];
      next_rstds[r] = 1 / std::sqrt(square / n + f.next_eps);
      next_error[r] = next_rstds[r] * e_sum;
      for (int64_t i = 0; i < n; ++i) {
        const double factor = weight.data ? weight.values[i] + f.next_weight_offset : 1;
        want[r * n + i] = stored[r * n + i] * next_rstds[r] * factor;
        error[r * n + i] = e_sum * std::fabs(want[r * n + i]);
      }
    });
    compare(c, "next_y", next_y, want, error);
    compare(c, "next_rstd", next_rstd, next_rstds, next_error);
  }
  const Result next_all = next_y, next_rstd_all = next_rstd;
  const Result y_all = y, z_all = z, rstd_all = rstd, mean_all = mean, tail_all = tail;
  const int64_t fewer = std::max<int64_t>(1, rows / 3);
  if (c.segments <= 1) {
    make_forward(fewer);
    if (const int error = run_forward(f)) return fail(c, "forward of fewer rows: CUDA error " + std::to_string(error));
    finish(c.name.c_str());
    same_bits(c, "y", y_all, y, fewer * n);
    same_bits(c, "next_y", next_all, next_y, fewer * n);
    same_bits(c, "next_rstd", next_rstd_all, next_rstd, fewer);
    same_bits(c, "residual_out", z_all, z, fewer * n);
    same_bits(c, "rstd", rstd_all, rstd, fewer);
#ifndef FLN_CHECK_CPU
    if (c.load) {
      make_forward(fewer);
      f.residual_out = nullptr;
      if (const int error = run_forward(f)) return fail(c, "forward without z: CUDA error " + std::to_string(error));
      finish(c.name.c_str());
      same_bits(c, "y without z", y_all, y, fewer * n);
      same_bits(c, "rstd without z", rstd_all, rstd, fewer);
    }
#endif
  }
  if (!c.save_stats) return;

  // ---- backward. grad_output correlates with x_hat and has a mean, so that c1 and c2 are seen
  const Tensor go = make_rows(t.go, rows, n, c.layout, [&](int64_t r, int64_t i) {
    return 0.4 + 0.6 * x_hat[r * n + i] + 0.5 * noise(6, r * n + i);
  });
  NormBackwardParams p{};
  set_stages(p);
  p.has_load_stage = c.load;
  p.grad_output = go.data, p.grad_output_strides = go.strides, p.grad_output_dtype = t.go;
  p.grad_residual_out = gro.data, p.grad_residual_out_strides = gro.strides, p.grad_residual_out_dtype = t.gro;
  p.z = c.z_is_y ? y_all.data : c.load ? z_all.data : x.data;
  p.z_strides = c.z_is_y || c.load ? RowStrides{rows, n, 0} : x.strides;
  p.z_dtype = c.z_is_y ? t.y : c.load ? t.z : t.x;
  if (c.has_gate) p.x = x.data;
  p.x_strides = x.strides;
  p.row_gate = row_gate.data, p.row_gate_strides = row_gate.strides, p.row_gate_dtype = t.x;
  p.gate = gate.data, p.weight = weight.data, p.bias = bias.data;
  p.rstd = rstd_all.data, p.mean = c.z_is_y ? nullptr : mean_all.data, p.mean_tail = c.z_is_y ? nullptr : tail_all.data;
  p.hidden_size = n;
  p.x_dtype = t.x, p.residual_dtype = t.residual, p.weight_dtype = t.weight;
  p.grad_gate_dtype = t.gg;
  p.grad_weight_dtype = c.accumulate ? DType::kFloat32 : t.gw;
  p.grad_bias_dtype = c.accumulate ? DType::kFloat32 : t.gb;
  p.stats_grad = c.stats_grad, p.accumulate = c.accumulate, p.z_is_y = c.z_is_y;
  Result grad_x, grad_residual, grad_gate, grad_row_gate, grad_weight, grad_bias;
  Values start(parts * n);
  for (int64_t i = 0; i < parts * n; ++i) start[i] = c.accumulate ? static_cast<float>(noise(9, i)) : 0;
  const auto make_backward = [&](int64_t rows) {
    grad_x = grad_residual = grad_gate = grad_row_gate = grad_weight = grad_bias = Result();
    if (c.wants_x) grad_x.make(t.x, rows * n);
    if (c.wants_residual) grad_residual.make(t.residual, rows * n);
    if (c.has_row_gate && c.wants_gate) grad_row_gate.make(t.x, rows * n);
    if (c.has_gate && c.wants_gate) grad_gate.make(t.gg, parts * n);
    if (c.has_weight && c.wants_weight) grad_weight.make(p.grad_weight_dtype, parts * n);
    if (c.has_bias && c.wants_bias) grad_bias.make(p.grad_bias_dtype, parts * n);
    for (const Result* sum : {&grad_weight, &grad_bias}) {
      if (!c.accumulate || !sum->data) continue;
      std::vector<float> host(start.begin(), start.end());
      upload(sum->data, host.data(), 4 * parts * n);
    }
    p.grad_input = grad_x.data, p.grad_residual = grad_residual.data, p.grad_gate = grad_gate.data;
    p.grad_weight = grad_weight.data, p.grad_bias = grad_bias.data, p.grad_row_gate = grad_row_gate.data;
    p.rows = rows;
  };
  make_backward(rows);
  if (const int error = run_backward(p)) return fail(c, "backward: CUDA error " + std::to_string(error));
  finish(c.name.c_str());

  // What intermediate results in a 16-bit z's dtype may cost
  const DType zt = p.z_dtype;
  const bool is_composed = dtype_bytes(zt) == 2 && t.go == zt &&
                           (c.activation != Activation::kNone || drops || c.has_gate || c.z_is_y || c.load);
  const double e = is_composed ? 2 * unit(zt) : is_double ? 1e-11 : 0x1p-15;
  if (c.z_is_y) {
    const Values y_of = y_all.values(c, "y");
    for (int64_t at = 0; at < rows * n; ++at) x_hat[at] = (y_of[at] - b(at / n, at % n)) / w(at / n, at % n);
  }
  Values grad_u(rows * n), grad_z(rows * n), z_error(rows * n), want_x(rows * n), x_error(rows * n), u_error(rows * n),
      want_gate(rows * n), gate_error(rows * n);
  parallel(rows, [&](int64_t r) {
    double c1 = 0, c2 = 0, a1 = 0, a2 = 0, extra = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = r * n + i;
      double g = go.values[at] * slope(c.activation, u[at]) * factor_of(true, at);
      double most = std::fabs(go.values[at]);
      if (c.drops_y) g = is_kept(c, r, i) ? g * scale : 0, most *= scale;
      grad_u[at] = g;
      // A relu whose u is about 0
      u_error[at] = c.activation == Activation::kRelu && std::fabs(u[at]) < 1e-4
                        ? most
                        : e * (std::fabs(g) + 0.02 * (c.activation != Activation::kNone || c.has_row_gate) * most);
      const double wdy = w(r, i) * g;
      c1 += x_hat[at] * wdy, c2 += wdy;
      a1 += std::fabs(x_hat[at] * wdy), a2 += std::fabs(wdy);
      extra += std::fabs(w(r, i)) * u_error[at] * (1 + std::fabs(x_hat[at]));
    }
    const double on = c.stats_grad;
    c1 *= on / n, a1 *= on / n, c2 *= c.rms ? 0 : on / n, a2 *= c.rms ? 0 : on / n, extra *= on / n;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = r * n + i;
      const double wdy = w(r, i) * grad_u[at], skip = c.has_gro ? gro.values[at] : 0, h = std::fabs(x_hat[at]);
      grad_z[at] = (wdy - x_hat[at] * c1 - c2) * rstds[r] + skip;
      z_error[at] = rstds[r] * (std::fabs(w(r, i)) * u_error[at] + e * (std::fabs(wdy) + h * a1 + a2) +
                                (1 + h) * extra * 0.25 + e_sum * (1 + std::fabs(means[r]) * rstds[r]) * a1) +
                    e * std::fabs(skip);
      double factor = c.has_gate ? gate.values[r / rows_each * gate_stride + i] : factor_of(false, at);
      if (c.has_row_gate) {
        const double other = c.gates_y ? u[at] : x.values[at], product = c.gates_y ? go.values[at] : grad_z[at];
        const double s = slope(c.gate_activation, row_gate.values[at]);
        const double product_error = c.gates_y ? 0 : z_error[at];
        const double s_error = e * (std::fabs(s) + 0.1);
        const double other_error =
            c.gates_y ? e * (std::fabs(x_hat[at] * w(r, i)) + std::fabs(b(r, i)) + std::fabs(w(r, i))) : 0;
        want_gate[at] = product * other * s;
        gate_error[at] = product_error * std::fabs(other * s) + std::fabs(product * other) * s_error +
                         std::fabs(product * s) * other_error;
      }
      if (c.drops_x) factor = is_kept(c, r, i) ? factor * scale : 0;
      want_x[at] = factor * grad_z[at];
      x_error[at] = std::fabs(factor) * (z_error[at] + (is_composed && c.has_gate ? e * std::fabs(grad_z[at]) : 0)) +
                    std::fabs(grad_z[at]) * factor_error(false, at);
    }
  });
  compare(c, "grad_input", grad_x, want_x, x_error);
  compare(c, "grad_residual", grad_residual, grad_z, z_error);
  compare(c, "grad_row_gate", grad_row_gate, want_gate, gate_error);
  // With 16-bit x backward does not read mean_tail: the rounding of the mean is below that of x, but not of x - mean
  Values x_hat_error(rows);
  for (int64_t r = 0; r < rows; ++r)
    if (!c.rms && dtype_bytes(zt) == 2) x_hat_error[r] = 0x1p-24 * std::fabs(means[r]) * rstds[r];
  Values sums[3], errors[3];
  for (int k = 0; k < 3; ++k) sums[k] = k < 2 ? start : Values(parts * n), errors[k].resize(parts * n);
  parallel(parts * ((n + 63) / 64), [&](int64_t job) {
    const int64_t part = job / ((n + 63) / 64), first = job % ((n + 63) / 64) * 64;
    for (int64_t i = first; i < std::min(first + 64, n); ++i)
      for (int64_t r = part * rows_each; r < (part + 1) * rows_each; ++r) {
        const int64_t at = r * n + i, to = part * n + i;
        // x_hat of one element is 0, or what rounding y left
        if (n == 1 && !c.rms) errors[0][to] += std::fabs(grad_u[at] * x_hat[at]);
        sums[0][to] += grad_u[at] * x_hat[at],
            errors[0][to] += u_error[at] * std::fabs(x_hat[at]) +
                             std::fabs(grad_u[at]) * (e * (0.01 + std::fabs(x_hat[at])) + x_hat_error[r]);
        sums[1][to] += grad_u[at], errors[1][to] += u_error[at];
        double xs = x.values[at];
        if (c.has_gate && c.drops_x) xs = is_kept(c, r, i) ? xs * scale : 0;
        sums[2][to] += xs * grad_z[at], errors[2][to] += std::fabs(xs) * (z_error[at] + e * std::fabs(grad_z[at]));
      }
  });
  compare(c, "grad_weight", grad_weight, sums[0], errors[0]);
  compare(c, "grad_bias", grad_bias, sums[1], errors[1]);
  compare(c, "grad_gate", grad_gate, sums[2], errors[2]);
  if (c.segments <= 1 && (c.wants_x || c.wants_residual)) {
    const Result all_x = grad_x, all_residual = grad_residual, all_gate = grad_row_gate;
    make_backward(fewer);
    if (const int error = run_backward(p))
      return fail(c, "backward of fewer rows: CUDA error " + std::to_string(error));
    finish(c.name.c_str());
    same_bits(c, "grad_input", all_x, grad_x, fewer * n);
    same_bits(c, "grad_residual", all_residual, grad_residual, fewer * n);
    same_bits(c, "grad_row_gate", all_gate, grad_row_gate, fewer * n);
  }
}

void check_mask() {
  Case c;
  c.name = "dropout_mask", c.rows = 37, c.n = 1003;
  poison();
  const int64_t philox[2] = {kSeed, kOffset};
  char* at = take(16);
  upload(at, philox, 16);
  char* mask = take(c.rows * c.n);
  const DropoutMaskParams params{reinterpret_cast<uint8_t*>(mask),
                                 c.rows,
                                 c.n,
                                 {reinterpret_cast<const int64_t*>(at), most_dropped(c.p), dropout_scale(c.p)}};
#ifdef FLN_CHECK_CPU
  launch_dropout_mask_cpu(params);
#else
  if (launch_dropout_mask_cuda(params, nullptr)) return fail(c, "not launched");
#endif
  finish("mask");
  std::vector<uint8_t> found(c.rows * c.n);
  download(found.data(), mask, c.rows * c.n);
  for (int64_t i = 0; i < c.rows * c.n; ++i)
    if (found[i] != is_kept(c, i / c.n, i % c.n)) return fail(c, "wrong at " + std::to_string(i));
}

// ---- the list ------------------------------------------------------------------------------------------------------

constexpr DType kF16 = DType::kFloat16, kBf16 = DType::kBFloat16, kF32 = DType::kFloat32, kF64 = DType::kFloat64;
struct NamedTypes {
  const char* name;
  Types t;
};
//                              x      residual z    weight y     go     gro    gw     gb     gg
const NamedTypes kTypes[] = {
    {"bf16", {kBf16, kBf16, kBf16, kBf16, kBf16, kBf16, kBf16, kBf16, kBf16, kBf16}},
    {"fp16", {kF16, kF16, kF16, kF16, kF16, kF16, kF16, kF16, kF16, kF16}},
    {"fp32", {kF32, kF32, kF32, kF32, kF32, kF32, kF32, kF32, kF32, kF32}},
    {"fp64", {kF64, kF64, kF64, kF64, kF64, kF64, kF64, kF64, kF64, kF64}},
    {"bf16/w32", {kBf16, kBf16, kBf16, kF32, kBf16, kBf16, kBf16, kF32, kF32, kF32}},
    {"bf16/z32", {kBf16, kF32, kF32, kBf16, kBf16, kBf16, kF32, kBf16, kBf16, kBf16}},
    {"fp16/z32/w32", {kF16, kF32, kF32, kF32, kF16, kF16, kF32, kF32, kF32, kF16}},
    {"bf16/r16/z32/y32", {kBf16, kBf16, kF32, kF32, kF32, kF32, kF32, kF32, kF32, kF32}},
    {"bf16/y32", {kBf16, kBf16, kBf16, kBf16, kF32, kF32, kBf16, kF32, kBf16, kF64}},
    {"fp32/y16", {kF32, kF32, kF32, kF32, kBf16, kBf16, kF32, kBf16, kF64, kF32}},
    {"fp16/r32/z16/go64", {kF16, kF32, kF16, kF16, kF64, kF64, kBf16, kF16, kF32, kF16}},
    {"bf16/go fp16", {kBf16, kBf16, kBf16, kF32, kF16, kF16, kF16, kF32, kBf16, kBf16}},
    {"fp64/y32", {kF64, kF64, kF64, kF64, kF32, kF32, kBf16, kF64, kF32, kF64}},
};
constexpr int kTypeCount = sizeof(kTypes) / sizeof(kTypes[0]);

struct Feature {
  const char* name;
  void (*apply)(Case&);
};
const Feature kFeatures[] = {
    {"plain", [](Case&) {}},
    {"plain, padded rows", [](Case& c) { c.layout = kPadded; }},
    {"plain, groups, weight_offset", [](Case& c) { c.layout = kGroups, c.weight_offset = 1; }},
    {"no parameters", [](Case& c) { c.has_weight = c.has_bias = false; }},
    {"no bias, grad_weight alone", [](Case& c) { c.has_bias = false, c.wants_x = false; }},
    {"no bias, padded rows", [](Case& c) { c.has_bias = false, c.layout = kPadded; }},
    {"no bias, groups, weight_offset, no stats",
     [](Case& c) { c.has_bias = c.save_stats = false, c.layout = kGroups, c.weight_offset = 1; }},
    {"residual, no bias",
     [](Case& c) { c.load = c.has_residual = c.has_gro = c.wants_residual = true, c.has_bias = false; }},
    {"residual, no bias, padded rows",
     [](Case& c) {
       c.load = c.has_residual = c.has_gro = c.wants_residual = true, c.has_bias = false, c.layout = kPadded;
     }},
    {"no weight, expanded grad", [](Case& c) { c.has_weight = false, c.layout = kExpandedGrad; }},
    {"stats_grad=False", [](Case& c) { c.stats_grad = false; }},
    {"accumulate", [](Case& c) { c.accumulate = true; }},
    {"no stats", [](Case& c) { c.save_stats = false; }},
    {"grad_x alone", [](Case& c) { c.wants_weight = c.wants_bias = false; }},
    {"residual", [](Case& c) { c.load = c.has_residual = c.has_gro = c.wants_residual = true; }},
    {"residual after", [](Case& c) { c.adds_y = c.has_residual = true; }},
    {"residual after, padded, no bias, offset",
     [](Case& c) { c.adds_y = c.has_residual = true, c.has_bias = false, c.weight_offset = 1, c.layout = kPadded; }},
    {"residual after, next norm",
     [](Case& c) { c.adds_y = c.has_residual = c.has_next = true, c.has_bias = false, c.weight_offset = 0.5; }},
    {"residual after, next norm, padded, no weight",
     [](Case& c) {
       c.adds_y = c.has_residual = c.has_next = true, c.has_weight = c.has_bias = false, c.layout = kPadded;
     }},
    {"residual after, segments", [](Case& c) { c.adds_y = c.has_residual = true, c.segments = 4; }},
    {"rounded x_hat", [](Case& c) { c.rounds_x_hat = true, c.has_bias = false; }},
    {"rounded x_hat, no weight, padded",
     [](Case& c) { c.rounds_x_hat = true, c.has_bias = c.has_weight = false, c.layout = kPadded; }},
    {"rounded x_hat, segments, no stats",
     [](Case& c) { c.rounds_x_hat = true, c.has_bias = c.save_stats = false, c.segments = 4; }},
    {"rounded x_hat, residual",
     [](Case& c) {
       c.load = c.has_residual = c.has_gro = c.wants_residual = c.rounds_x_hat = true, c.has_bias = false;
     }},
    {"rounded x_hat, residual, dropout of x",
     [](Case& c) {
       c.load = c.has_residual = c.wants_residual = c.rounds_x_hat = c.drops_x = true, c.has_bias = false;
     }},
    {"rounded x_hat, silu, dropout of y",
     [](Case& c) { c.rounds_x_hat = c.drops_y = true, c.has_bias = false, c.activation = Activation::kSilu; }},
    {"residual, padded, no grad_residual_out",
     [](Case& c) { c.load = c.has_residual = c.wants_residual = true, c.layout = kPadded; }},
    {"residual, x alone, groups", [](Case& c) { c.load = c.has_residual = c.has_gro = true, c.layout = kGroups; }},
    {"residual alone",
     [](Case& c) { c.load = c.has_residual = c.has_gro = c.wants_residual = true, c.wants_x = false; }},
    {"load without residual", [](Case& c) { c.load = c.has_gro = true; }},
    {"dropout of x", [](Case& c) { c.load = c.drops_x = true; }},
    {"residual, dropout of x",
     [](Case& c) { c.load = c.has_residual = c.has_gro = c.wants_residual = c.drops_x = true; }},
    {"gate", [](Case& c) { c.load = c.has_gate = c.has_residual = c.has_gro = c.wants_residual = true; }},
    {"gate, no grad_gate", [](Case& c) { c.load = c.has_gate = c.has_residual = true, c.wants_gate = false; }},
    {"gate, accumulate, no residual", [](Case& c) { c.load = c.has_gate = c.accumulate = true; }},
    {"gate alone wanted",
     [](Case& c) { c.load = c.has_gate = c.has_residual = true, c.wants_x = c.wants_weight = c.wants_bias = false; }},
    {"gate, dropout of x", [](Case& c) { c.load = c.has_gate = c.has_residual = c.drops_x = c.wants_residual = true; }},
    {"segments", [](Case& c) { c.segments = 4; }},
    {"segments, offset, padded", [](Case& c) { c.segments = 3, c.weight_offset = 1, c.layout = kPadded; }},
    {"segments across groups", [](Case& c) { c.segments = 2, c.rows = 12, c.layout = kGroups; }},
    {"segments, gate, residual",
     [](Case& c) { c.segments = 4, c.load = c.has_gate = c.has_residual = c.has_gro = c.wants_residual = true; }},
    {"segments, accumulate", [](Case& c) { c.segments = 4, c.accumulate = true; }},
    {"segments, gate without weight",
     [](Case& c) { c.segments = 4, c.load = c.has_gate = true, c.has_weight = c.has_bias = false; }},
    {"segments, from y", [](Case& c) { c.segments = 4, c.z_is_y = true; }},
    {"per-row weight", [](Case& c) { c.segments = -1; }},
    {"per-row weight, gate, residual",
     [](Case& c) {
       c.segments = -1, c.load = c.has_gate = c.has_residual = c.has_gro = c.wants_residual = true, c.weight_offset = 1;
     }},
    {"per-row gate without weight",
     [](Case& c) { c.segments = -1, c.load = c.has_gate = true, c.has_weight = c.has_bias = false; }},
    {"per-row weight, from y", [](Case& c) { c.segments = -1, c.z_is_y = true; }},
    {"per-row weight, accumulate", [](Case& c) { c.segments = -1, c.accumulate = true; }},
    {"relu", [](Case& c) { c.activation = Activation::kRelu; }},
    {"gelu", [](Case& c) { c.activation = Activation::kGelu; }},
    {"gelu_tanh, no bias, padded",
     [](Case& c) { c.activation = Activation::kGeluTanh, c.has_bias = false, c.layout = kPadded; }},
    {"silu, no weight, no stats",
     [](Case& c) { c.activation = Activation::kSilu, c.has_weight = false, c.save_stats = false; }},
    {"silu, stats_grad=False", [](Case& c) { c.activation = Activation::kSilu, c.stats_grad = false; }},
    {"dropout of y", [](Case& c) { c.drops_y = true; }},
    {"gelu, dropout of y, accumulate",
     [](Case& c) { c.activation = Activation::kGelu, c.drops_y = c.accumulate = true; }},
    {"residual, gelu",
     [](Case& c) { c.load = c.has_residual = c.has_gro = c.wants_residual = true, c.activation = Activation::kGelu; }},
    {"residual, silu, dropout of y, padded",
     [](Case& c) {
       c.load = c.has_residual = c.has_gro = c.drops_y = true, c.activation = Activation::kSilu, c.layout = kPadded;
     }},
    {"dropout of x, relu",
     [](Case& c) { c.load = c.has_residual = c.drops_x = c.wants_residual = true, c.activation = Activation::kRelu; }},
    {"gate, gelu_tanh, dropout of y",
     [](Case& c) { c.load = c.has_gate = c.has_residual = c.drops_y = true, c.activation = Activation::kGeluTanh; }},
    {"residual, gelu, no stats",
     [](Case& c) { c.load = c.has_residual = true, c.activation = Activation::kGelu, c.save_stats = false; }},
    {"dropout of x alone, gelu, residual alone",
     [](Case& c) {
       c.load = c.has_residual = c.has_gro = c.wants_residual = c.drops_x = true, c.activation = Activation::kGelu;
       c.wants_x = c.wants_weight = false;
     }},
    {"gate, residual, accumulate, grad_gate alone of the parameters",
     [](Case& c) {
       c.load = c.has_gate = c.has_residual = c.has_gro = c.wants_residual = c.accumulate = true;
       c.wants_weight = c.wants_bias = false;
     }},
    {"residual, gelu, no grad_residual_out, groups",
     [](Case& c) {
       c.load = c.has_residual = c.wants_residual = true, c.activation = Activation::kGelu, c.layout = kGroups;
     }},
    {"row gate", [](Case& c) { c.has_row_gate = true; }},
    {"row gate first, no bias", [](Case& c) { c.has_row_gate = true, c.gates_y = c.has_bias = false; }},
    {"row gate, sigmoid, offset, padded",
     [](Case& c) {
       c.has_row_gate = true, c.gate_activation = Activation::kSigmoid, c.weight_offset = 1, c.layout = kPadded;
     }},
    {"row gate first, gelu, groups, accumulate",
     [](Case& c) {
       c.has_row_gate = c.accumulate = true, c.gates_y = false, c.gate_activation = Activation::kGelu;
       c.layout = kGroups;
     }},
    {"row gate, segments, gelu_tanh",
     [](Case& c) { c.has_row_gate = true, c.gate_activation = Activation::kGeluTanh, c.segments = 4; }},
    {"row gate, no weight, its gradient alone",
     [](Case& c) { c.has_row_gate = true, c.has_weight = c.wants_x = c.wants_bias = false; }},
    {"from y, padded", [](Case& c) { c.z_is_y = true, c.layout = kPadded; }},
    {"from y", [](Case& c) { c.z_is_y = true; }},
    {"from y, offset, no bias", [](Case& c) { c.z_is_y = true, c.has_bias = false, c.weight_offset = 1; }},
    {"from y, no weight, columns alone", [](Case& c) { c.z_is_y = true, c.has_weight = false, c.wants_x = false; }},
};

void add_case(std::vector<Case>& cases, const NamedTypes& types, const Feature& feature, int64_t n, int64_t rows,
              bool rms) {
  Case c;
  c.t = types.t, c.n = n, c.rows = rows, c.rms = rms;
  feature.apply(c);
  if (c.segments > 0) c.rows = std::max<int64_t>(c.rows / c.segments, 1) * c.segments;
  if (c.segments < 0) c.segments = static_cast<int>(c.rows);
  if (c.layout == kGroups && !(c.segments == 2)) c.rows = std::max<int64_t>(c.rows / 6, 1) * 6;
  if (c.segments == 2 && c.layout == kGroups) c.rows = 6;  // three groups of two: the boundary is within one
  if (!c.load && !c.adds_y) c.t.residual = c.t.x;
  if (!c.load) c.t.z = c.t.x;
  if (c.z_is_y) c.t.y = c.t.x;
  if (c.has_next) c.t.y = c.t.residual;
  if (n == 1 && !rms && !c.stats_grad) return;  // the torch layer's
  if (n <= 3 && !rms) c.eps = 1e-2;
  c.name = std::string(rms ? "RMS " : "LN ") + types.name + " " + std::to_string(c.rows) + " x " + std::to_string(n) +
           ": " + feature.name;
  cases.push_back(c);
}

#ifndef FLN_CHECK_CPU
// ---- times ---------------------------------------------------------------------------------------------------------

constexpr int64_t kTimedBytes = int64_t{1} << 28;  // of x
constexpr int kLaunches = 20;

__global__ void fill_kernel(void* data, DType dtype, int64_t count, unsigned seed, float center) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    uint64_t h = (static_cast<uint64_t>(seed) << 40 ^ static_cast<uint64_t>(i)) * 0x9e3779b97f4a7c15u;
    h ^= h >> 31, h *= 0xbf58476d1ce4e5b9u, h ^= h >> 29;
    const float value = center + static_cast<float>(h >> 40) * 0x1p-23f - 1;
    if (dtype == DType::kFloat32) static_cast<float*>(data)[i] = value;
    if (dtype == DType::kFloat16) static_cast<__half*>(data)[i] = __float2half_rn(value);
    if (dtype == DType::kBFloat16) static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(value);
  }
}

char* take_filled(DType dtype, int64_t count, unsigned seed, float center) {
  char* data = take(count * dtype_bytes(dtype));
  fill_kernel<<<2048, 256>>>(data, dtype, count, seed, center);
  return data;
}

// Much code, as that of matrix products: what runs behind two of these finds none of its own in a cache.
template <int kSeed>
__global__ void much_code_kernel(float* data) {
  float a = data[blockIdx.x * blockDim.x + threadIdx.x], b = a + kSeed;
#pragma unroll
  for (int i = 0; i < 2000; ++i) {
    a = fmaf(a, 1 + i * 1e-7f + kSeed, b);
    b = fmaf(b, 0.5f + i * 1e-7f, a);
  }
  data[blockIdx.x * blockDim.x + threadIdx.x] = a + b;
}

void launch_much_code(cudaStream_t stream) {
  float* const data = reinterpret_cast<float*>(pool + kPool - (1 << 20));
  much_code_kernel<1><<<132, 128, 0, stream>>>(data);
  much_code_kernel<2><<<132, 128, 0, stream>>>(data);
}

// The median us of kLaunches calls of f(stream). Short calls: of kLaunches CUDA graphs of 50 calls each, because the
// host takes longer than the GPU; each call runs behind launch_much_code(), as in a model, whose time is subtracted.
template <typename F>
float median_us(bool is_short, F&& f, bool is_code = false) {
  static cudaEvent_t events[kLaunches + 1];
  static cudaStream_t stream = nullptr;
  if (!stream) {
    for (auto& event : events) check_cuda(cudaEventCreate(&event), "event");
    check_cuda(cudaStreamCreate(&stream), "stream");
  }
  static float code_us = -1;
  if (is_short && !is_code && code_us < 0) code_us = median_us(true, launch_much_code, true);
  check_cuda(cudaDeviceSynchronize(), "filled");
  const int calls = is_short ? 50 : 1;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replayed = nullptr;
  if (is_short) {
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    for (int i = 0; i < calls; ++i) {
      if (!is_code) launch_much_code(stream);
      f(stream);
    }
    check_cuda(cudaStreamEndCapture(stream, &graph), "captured");
    check_cuda(cudaGraphInstantiate(&replayed, graph, 0), "graph");
  }
  const auto run = [&] {
    if (is_short) {
      cudaGraphLaunch(replayed, stream);
    } else {
      f(stream);
    }
  };
  for (int i = 0; i < 2; ++i) run();
  cudaEventRecord(events[0], stream);
  for (int i = 0; i < kLaunches; ++i) {
    run();
    cudaEventRecord(events[i + 1], stream);
  }
  check_cuda(cudaDeviceSynchronize(), "timed");
  if (is_short) cudaGraphExecDestroy(replayed), cudaGraphDestroy(graph);
  std::vector<float> us(kLaunches);
  for (int i = 0; i < kLaunches; ++i) {
    cudaEventElapsedTime(&us[i], events[i], events[i + 1]);
    us[i] *= 1000.0f / calls;
  }
  std::sort(us.begin(), us.end());
  return us[kLaunches / 2] - (is_short && !is_code ? code_us : 0);
}

// A line each for forward and backward: name, direction, dtype, rows, columns, us, us of a copy of the same bytes.
void time_case(const Case& c, const char* dtypes) {
  used = 0;
  const Types& t = c.t;
  const int64_t rows = c.rows, n = c.n, count = rows * n;
  const int64_t parts = std::max(c.segments, 1), vec = 8, stride = (n + vec - 1) / vec * vec;
  NormForwardParams f{};
  NormBackwardParams b{};
  const int64_t philox[2] = {kSeed, kOffset};
  char* philox_at = take(16);
  upload(philox_at, philox, 16);
  const auto set = [&](NormStages& stages) {
    stages.activation = c.activation;
    stages.drops_y = c.drops_y;
    if (c.drops_x || c.drops_y)
      stages.dropout = {reinterpret_cast<const int64_t*>(philox_at), most_dropped(c.p), dropout_scale(c.p)};
    stages.segments = c.segments;
    stages.weight_stride = stages.gate_stride = stride;
    stages.is_rms_norm = c.rms;
  };
  set(f), set(b);
  f.x = take_filled(t.x, count, 1, 0.5f);
  if (c.has_residual) f.residual = take_filled(t.residual, count, 2, 0.2f);
  if (c.has_gate) f.gate = take_filled(t.x, parts * stride, 3, 1);
  f.weight = take_filled(t.weight, parts * stride, 4, 2.5f);
  if (!c.rms) f.bias = take_filled(t.weight, parts * stride, 5, 0);
  f.x_strides = f.residual_strides = {rows, n, 0};
  f.rows = rows, f.hidden_size = n, f.eps = 1e-5;
  f.x_dtype = t.x, f.residual_dtype = t.residual, f.z_dtype = c.load ? t.z : t.x, f.weight_dtype = t.weight;
  f.y_dtype = t.y;
  f.has_load_stage = c.load;
  f.adds_y = c.adds_y, f.rounds_x_hat = c.rounds_x_hat;
  if (c.has_next) f.next_y = take(count * dtype_bytes(t.x)), f.next_rstd = take(rows * 4), f.next_weight = f.weight;
  f.next_weight_dtype = t.weight, f.next_eps = 1e-5;
  f.y = take(count * dtype_bytes(t.y));
  if (c.load) f.residual_out = take(count * dtype_bytes(t.z));
  f.rstd = take(rows * 4);
  if (!c.rms) f.mean = take(rows * 4), f.mean_tail = take(rows * 4);
  if (c.has_row_gate) {
    f.row_gate = b.row_gate = take_filled(t.x, count, 8, 0.1f), f.row_gate_dtype = b.row_gate_dtype = t.x;
    f.row_gate_strides = b.row_gate_strides = {rows, n, 0};
    f.gate_activation = b.gate_activation = Activation::kSilu, f.gates_y = b.gates_y = c.gates_y;
    b.grad_row_gate = take(count * dtype_bytes(t.x));
  }
  f.workspace = take(norm_forward_workspace_cuda(f));

  b.grad_output = take_filled(t.go, count, 6, 0.1f), b.grad_output_dtype = t.go;
  if (c.has_gro) b.grad_residual_out = take_filled(t.gro, count, 7, 0), b.grad_residual_out_dtype = t.gro;
  b.z = c.z_is_y ? f.y : c.load ? f.residual_out : f.x;
  b.z_dtype = c.z_is_y ? t.y : f.z_dtype;
  if (c.has_gate) b.x = f.x;
  b.gate = f.gate, b.weight = f.weight, b.bias = f.bias, b.rstd = f.rstd;
  if (!c.z_is_y) b.mean = f.mean, b.mean_tail = f.mean_tail;
  b.grad_output_strides = b.grad_residual_out_strides = b.z_strides = b.x_strides = {rows, n, 0};
  b.rows = rows, b.hidden_size = n;
  b.x_dtype = t.x, b.residual_dtype = t.residual, b.weight_dtype = t.weight;
  b.grad_gate_dtype = b.grad_weight_dtype = b.grad_bias_dtype = t.weight;
  b.stats_grad = true, b.has_load_stage = c.load, b.z_is_y = c.z_is_y;
  b.grad_input = take(count * dtype_bytes(t.x));
  // As for autograd, to which the gradient of x is that of residual too where it can be
  const bool has_own_residual_grad = c.has_residual && c.load && (t.residual != t.x || c.has_gate || c.drops_x);
  if (has_own_residual_grad) b.grad_residual = take(count * dtype_bytes(t.residual));
  if (c.has_gate) b.grad_gate = take(parts * n * 4);
  b.grad_weight = take(parts * n * 4);
  if (!c.rms) b.grad_bias = take(parts * n * 4);
  b.workspace = take(norm_backward_workspace_cuda(b));

  const bool is_each = c.segments == rows;
  const int64_t parameters = is_each ? (c.rms ? 1 : 2) * count * dtype_bytes(t.weight) : 0;
  const int64_t gates = is_each && c.has_gate ? count * dtype_bytes(t.x) : 0;
  const int64_t forward_bytes = count * (dtype_bytes(t.x) + dtype_bytes(t.y) + c.load * dtype_bytes(t.z) +
                                         c.has_residual * dtype_bytes(t.residual) + c.has_row_gate * dtype_bytes(t.x) +
                                         c.has_next * dtype_bytes(t.x)) +
                                parameters + gates;
  const int64_t backward_bytes =
      count * (dtype_bytes(t.go) + 2 * dtype_bytes(t.x) + c.has_gate * dtype_bytes(t.x) +
               c.has_gro * dtype_bytes(t.gro) + has_own_residual_grad * dtype_bytes(t.residual) +
               c.load * dtype_bytes(t.z) - c.load * dtype_bytes(t.x) + 2 * c.has_row_gate * dtype_bytes(t.x)) +
      2 * parameters + 2 * gates;
  const bool is_short = count * dtype_bytes(t.x) < kTimedBytes / 8;
  const auto forward = [&](cudaStream_t stream) { return launch_norm_forward_cuda(f, stream); };
  const auto backward = [&](cudaStream_t stream) { return launch_norm_backward_cuda(b, stream); };
  const float forward_us = forward(nullptr) ? -1 : median_us(is_short, forward);
  const float backward_us = backward(nullptr) ? -1 : median_us(is_short, backward);
  const auto line = [&](const char* direction, float us, int64_t bytes) {
    const int64_t half = std::min<int64_t>(bytes / 2, kPool / 2);
    const float copy = median_us(is_short, [&](cudaStream_t stream) {
      cudaMemcpyAsync(pool + kPool / 2, pool, half, cudaMemcpyDefault, stream);
    });
    std::printf("%s,%s,%s,%ld,%ld,%.2f,%.2f\n", c.name.c_str(), direction, dtypes, long(rows), long(n), us, copy);
  };
  line("forward", forward_us, forward_bytes);
  line("backward", backward_us, backward_bytes);
  std::fflush(stdout);
}

void time_all(const std::string& only) {
  std::printf("name,direction,dtype,rows,columns,us,copy_us\n");
  struct Timed {
    const char* name;
    const char* types;
    void (*apply)(Case&);
    std::vector<int64_t> sizes;
    bool rms = false;
  };
  const std::vector<int64_t> all{64,   128,  256,  384,  512,  768,  1024, 1152, 1536,  1792, 2048,
                                 2304, 2560, 3072, 3584, 4096, 5120, 6144, 8192, 12288, 16384},
      some{256, 512, 1024, 1152, 1536, 2048, 3072, 4096, 8192, 16384}, few{1024, 4096, 8192},
      ragged{33, 65, 66, 129, 130, 257, 258, 769, 770, 1025, 1537, 2049, 4097, 4098, 8193, 12345, 12346, 20001},
      longer{20000, 32768, 40000, 65536, 131072};
  const auto plain = [](Case&) {};
  const auto residual = [](Case& c) { c.load = c.has_residual = c.has_gro = true; };
  const auto modulated = [](Case& c) { c.segments = -1, c.load = c.has_residual = c.has_gro = c.has_gate = true; };
  const auto gated = [](Case& c) { c.has_row_gate = true; };
  const auto sandwich = [](Case& c) { c.adds_y = c.has_residual = c.has_next = true; };
  const std::vector<Timed> timed = {
      {"layer_norm", "bf16", plain, all},
      {"rms_norm", "bf16", plain, all, true},
      {"layer_norm", "fp16", plain, some},
      {"layer_norm", "fp32", plain, all},
      {"rms_norm", "fp32", plain, some, true},
      {"layer_norm", "bf16/w32", plain, some},
      {"residual", "bf16", residual, all},
      {"residual", "fp32", residual, some},
      {"residual", "bf16/z32", residual, some},
      {"residual rms", "bf16", residual, some, true},
      {"residual dropout of x", "bf16",
       [](Case& c) { c.load = c.has_residual = c.has_gro = c.drops_x = true, c.p = 0.1; }, some},
      {"from y", "bf16", [](Case& c) { c.z_is_y = true; }, some},
      {"from y", "fp32", [](Case& c) { c.z_is_y = true; }, few},
      {"segments 8", "bf16", [](Case& c) { c.segments = 8; }, some},
      {"segments 128", "bf16", [](Case& c) { c.segments = 128; }, some},
      {"segments 8 gate residual", "bf16",
       [](Case& c) { c.segments = 8, c.load = c.has_residual = c.has_gro = c.has_gate = true; }, some},
      {"segments 8 gate residual", "fp32",
       [](Case& c) { c.segments = 8, c.load = c.has_residual = c.has_gro = c.has_gate = true; }, few},
      {"per-row weight", "bf16", [](Case& c) { c.segments = -1; }, few},
      {"per-row weight", "bf16/w32", [](Case& c) { c.segments = -1; }, few},
      {"per-row weight gate residual", "bf16", modulated, few},
      {"relu", "bf16", [](Case& c) { c.activation = Activation::kRelu; }, few},
      {"gelu", "bf16", [](Case& c) { c.activation = Activation::kGelu; }, some},
      {"gelu_tanh", "bf16", [](Case& c) { c.activation = Activation::kGeluTanh; }, few},
      {"silu", "bf16", [](Case& c) { c.activation = Activation::kSilu; }, some},
      {"dropout of y", "bf16", [](Case& c) { c.drops_y = true, c.p = 0.1; }, some},
      {"dropout of y", "fp16", [](Case& c) { c.drops_y = true, c.p = 0.1; }, few},
      {"dropout of y", "fp32", [](Case& c) { c.drops_y = true, c.p = 0.1; }, few},
      {"gelu dropout of y", "bf16", [](Case& c) { c.activation = Activation::kGelu, c.drops_y = true, c.p = 0.1; },
       few},
      {"gelu", "fp16", [](Case& c) { c.activation = Activation::kGelu; }, few},
      {"gelu", "fp32", [](Case& c) { c.activation = Activation::kGelu; }, few},
      {"gelu", "bf16/w32", [](Case& c) { c.activation = Activation::kGelu; }, few},
      {"residual gelu", "bf16",
       [](Case& c) { c.load = c.has_residual = c.has_gro = true, c.activation = Activation::kGelu; }, few},
      {"residual after rms", "bf16", [](Case& c) { c.adds_y = c.has_residual = true; }, some, true},
      {"residual after rms", "fp32", [](Case& c) { c.adds_y = c.has_residual = true; }, few, true},
      {"residual after next rms", "bf16", sandwich, some, true},
      {"residual after next rms", "fp32", sandwich, few, true},
      {"rounded x_hat rms", "bf16", [](Case& c) { c.rounds_x_hat = true; }, some, true},
      {"rounded x_hat residual rms", "bf16",
       [](Case& c) { c.load = c.has_residual = c.has_gro = c.rounds_x_hat = true; }, some, true},
      {"row gate rms", "bf16", gated, some, true},
      {"row gate rms", "fp32", gated, few, true},
      {"gate first rms", "bf16", [](Case& c) { c.has_row_gate = true, c.gates_y = false; }, some, true},
      {"gelu", "bf16", [](Case& c) { c.activation = Activation::kGelu; }, ragged},
      {"layer_norm", "bf16", plain, ragged},
      {"layer_norm", "fp16", plain, ragged},
      {"layer_norm", "fp32", plain, ragged},
      {"layer_norm", "bf16/w32", plain, ragged},
      {"rms_norm", "bf16", plain, ragged, true},
      {"rms_norm", "fp32", plain, ragged, true},
      {"residual", "bf16", residual, ragged},
      {"layer_norm", "bf16", plain, longer},
      {"layer_norm", "fp32", plain, longer},
      {"residual", "bf16", residual, longer},
  };
  const auto run_case = [&](const Timed& cell, int64_t n, int64_t rows) {
    Case c;
    const auto* types = std::find_if(kTypes, kTypes + kTypeCount,
                                     [&](const NamedTypes& named) { return std::string(named.name) == cell.types; });
    c.t = types->t, c.n = n, c.rms = cell.rms, c.rows = rows, c.name = cell.name;
    cell.apply(c);
    if (c.segments < 0) c.segments = static_cast<int>(c.rows);
    if (c.segments > 1) c.rows = std::max<int64_t>(c.rows / c.segments, 1) * c.segments;
    c.wants_residual = c.has_residual;
    if (!c.load) c.t.z = c.t.residual = c.t.x;
    if (c.rounds_x_hat) c.has_bias = false;
    if ((c.name + " " + cell.types).find(only) != std::string::npos) time_case(c, cell.types);
  };
  for (const Timed& cell : timed) {
    const DType x = std::find_if(kTypes, kTypes + kTypeCount, [&](const NamedTypes& named) {
                      return std::string(named.name) == cell.types;
                    })->t.x;
    for (const int64_t n : cell.sizes) run_case(cell, n, kTimedBytes / dtype_bytes(x) / n);
  }
  for (const char* types : {"bf16", "fp32"})
    for (const int64_t n : {4194304, 16777216})
      for (const int64_t rows : {1, 8}) run_case({"layer_norm", types, plain, {}}, n, rows);
  const std::vector<int64_t> usual{128, 512, 768, 1024, 1152, 1536, 2048, 4096, 8192},
      other{64, 256, 3072, 6144, 12288, 16384, 257, 769, 4097, 8193};
  const Timed few_rows[] = {{"few rows layer_norm", "bf16", plain, usual},
                            {"few rows layer_norm", "bf16", plain, other},
                            {"few rows rms_norm", "bf16", plain, usual, true},
                            {"few rows layer_norm", "fp32", plain, usual},
                            {"few rows layer_norm", "fp32", plain, other},
                            {"few rows layer_norm", "bf16/w32", plain, usual},
                            {"few rows residual", "bf16", residual, usual},
                            {"few rows residual", "fp32", residual, usual},
                            {"few rows residual rms", "bf16", residual, usual, true},
                            {"few rows modulated", "bf16", modulated, usual},
                            {"few rows row gate rms", "bf16", gated, usual, true},
                            {"few rows residual after next rms", "bf16", sandwich, usual, true}};
  for (const Timed& cell : few_rows)
    for (const int64_t n : cell.sizes)
      for (const int64_t rows : {1, 8, 32, 256, 512, 1024, 2048}) run_case(cell, n, rows);
}
#endif

volatile std::sig_atomic_t is_stopped = 0;

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 1 << 12);  // a run that is stopped has written its failures
  std::signal(SIGINT, [](int) { is_stopped = 1; });
  std::string only;
  bool times = false;
  size_t from = 0;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "-v")
      verbose = true;
    else if (std::string(argv[i]) == "--from" && i + 1 < argc)
      from = std::strtoul(argv[++i], nullptr, 10);
    else if (std::string(argv[i]) == "--time")
      times = true;
    else
      only = argv[i];
  }
#ifndef FLN_CHECK_CPU
  if (times) {
    kPool = int64_t{6} << 30;
    make_pool();
    time_all(only);
    return 0;
  }
#endif
  make_pool();
  used = kPool;
  poison();
  std::vector<Case> cases;
  int turn = 0;
  for (const int64_t n : {1, 3, 8, 64, 257, 768, 1024, 1025, 1536, 4096, 4097, 8192, 20000, 40000, 131072, 300000})
    for (const Feature& feature : kFeatures) {
      const int64_t rows = std::clamp<int64_t>(40000 / n, 2, 37);
      // A few dtypes each; every pair of dtypes and feature comes up at some size
      const int count = n > 100000 ? 1 : 3;
      for (int k = 0; k < count; ++k, turn += 1)
        add_case(cases, kTypes[(turn * 5 + k) % kTypeCount], feature, n, rows, turn % 2);
    }
  // Enough rows for persistent blocks, rows in turns, finalized partial sums
  const struct {
    int64_t n, rows;
  } many[] = {{1, 5000},    {3, 4001},   {64, 3001},  {257, 4200}, {768, 1600}, {1024, 1100},
              {1025, 1100}, {2048, 600}, {4096, 270}, {8192, 140}, {20000, 60}};
  for (const auto& size : many)
    for (size_t f = 0; f < sizeof(kFeatures) / sizeof(kFeatures[0]); ++f)
      if (++turn % 3 == 0) add_case(cases, kTypes[turn / 3 % kTypeCount], kFeatures[f], size.n, size.rows, turn % 2);
  {
    const Feature turns{"64 segments in turns", [](Case& c) { c.segments = 64, c.weight_offset = 1; }};
    add_case(cases, kTypes[0], turns, 768, 9216, false);
    add_case(cases, kTypes[2], turns, 64, 40960, true);
  }
  // Every number of vectors that a thread of the kernel for usual calls may hold, few rows and many
  const Feature usual[] = {
      kFeatures[0],
      {"no bias", [](Case& c) { c.has_bias = false; }},
      {"far", [](Case& c) { c.has_far_rows = true; }},
      {"far, padded rows", [](Case& c) { c.has_far_rows = true, c.layout = kPadded; }},
      {"residual, far", [](Case& c) { c.load = c.has_residual = c.has_gro = c.has_far_rows = true; }},
      {"residual, no bias, far, no stats",
       [](Case& c) { c.load = c.has_residual = c.has_gro = c.has_far_rows = true, c.has_bias = c.save_stats = false; }},
  };
  for (const int64_t n :
       {72, 96, 128, 160, 256, 384, 640, 1280, 1536, 3072, 5120, 6144, 8192, 12288, 14336, 16384, 24576, 32768})
    for (const NamedTypes& types : kTypes) {
      const Types& t = types.t;
      if (t.weight != t.x || t.y != t.x || t.z != t.x || t.residual != t.x || t.x == DType::kFloat64) continue;
      for (const Feature& feature : usual)
        for (const int64_t rows : {int64_t{5}, 600000 / n + 3})
          for (const bool rms : {false, true}) add_case(cases, types, feature, n, rows, rms);
    }
  // Epilogues: sizes that have a kernel and sizes that fill no plan, few rows and many
  const Feature epilogues[] = {
      {"gelu", [](Case& c) { c.activation = Activation::kGelu; }},
      {"silu, padded rows", [](Case& c) { c.activation = Activation::kSilu, c.layout = kPadded; }},
      {"gelu_tanh, no bias, far",
       [](Case& c) { c.activation = Activation::kGeluTanh, c.has_bias = false, c.has_far_rows = true; }},
      {"dropout of y", [](Case& c) { c.drops_y = true; }},
      {"relu, dropout of y", [](Case& c) { c.activation = Activation::kRelu, c.drops_y = true; }},
      {"residual, dropout of y",
       [](Case& c) { c.load = c.has_residual = c.has_gro = c.wants_residual = c.drops_y = true; }},
      {"gate, residual, silu, offset",
       [](Case& c) {
         c.load = c.has_gate = c.has_residual = c.wants_residual = true, c.activation = Activation::kSilu;
         c.weight_offset = 1;
       }},
  };
  for (const int64_t n : {16, 128, 256, 512, 640, 1152, 1280, 1408, 1536, 2048, 3072, 5120, 12288, 16384})
    for (const NamedTypes& types : kTypes) {
      if (types.t.x == DType::kFloat64) continue;
      for (const Feature& feature : epilogues)
        for (const int64_t rows : {int64_t{6}, 300000 / n + 3})
          if (++turn % 5 == 0) add_case(cases, types, feature, n, rows, turn % 2);
    }
  // Ragged rows: several in a warp, one in a warp or in a block, and rows too long for shared memory
  for (const int64_t n :
       {2, 7, 33, 34, 65, 129, 193, 258, 319, 513, 769, 1281, 2049, 12345, 12346, 30001, 70001, 120001})
    for (const NamedTypes& types : kTypes) {
      if (types.t.x == DType::kFloat64) continue;
      for (int feature = 0; feature < 4; ++feature)  // those without residual, which is added by another kernel
        for (const int64_t rows : {int64_t{5}, 40000 / n + 3})
          if (++turn % 3 == 0) add_case(cases, types, usual[feature], n, rows, turn % 2);
    }
  // Rows that the blocks of the whole card share: few rows and many, slices that fill a block and that do not, the
  // longest rows, and rows that are too long
  for (const int64_t n : {131080, 200000, 262144, 300008, 540672, 1081344, 1081352, 2162688})
    for (const NamedTypes& types : kTypes) {
      if (types.t.x == DType::kFloat64) continue;
      for (const Feature& feature : usual)
        for (const int64_t rows : {int64_t{1}, 4000000 / n})
          if (++turn % 5 == 0) add_case(cases, types, feature, n, rows, turn % 2);
    }
  // Backward by the fused strategy, which takes the plain norm and a residual where the problem is not small
  // (small_problem() of launch_plan.h): sizes that do not fill a plan, so that warps have unequal parts of a row
  const Feature fused[] = {
      kFeatures[0],
      {"padded rows", [](Case& c) { c.layout = kPadded; }},
      {"residual", [](Case& c) { c.load = c.has_residual = c.has_gro = c.wants_residual = true; }},
      {"gate, residual", [](Case& c) { c.load = c.has_gate = c.has_residual = c.wants_residual = true; }},
      {"gelu, residual",
       [](Case& c) {
         c.load = c.has_residual = c.has_gro = c.wants_residual = true, c.activation = Activation::kGelu;
       }},
      {"from y", [](Case& c) { c.z_is_y = true; }},
      {"row gate", [](Case& c) { c.has_row_gate = true; }},
      {"row gate first, no bias", [](Case& c) { c.has_row_gate = true, c.gates_y = c.has_bias = false; }},
  };
  const auto not_small = [](int64_t n) { return 5300000 / (n + 512) + 9; };  // rows
  for (const int64_t n : {11,   33,   40,   66,   97,   130,  200,  264,  513,  640,  776,  900,   1153,
                          1400, 1537, 1800, 2304, 2600, 3073, 3600, 5000, 7001, 8193, 9000, 12345, 40000})
    for (const NamedTypes& types : kTypes) {
      if (types.t.x == DType::kFloat64) continue;
      for (const Feature& feature : fused) {
        const bool may_be_small = &feature < fused + 3;
        const int64_t rows = may_be_small ? std::min<int64_t>(2060, not_small(n))
                                          : std::clamp<int64_t>(1030, n < 800 ? 1030 : 0, (1 << 20) / n + 9);
        if (++turn % 7 == 0) add_case(cases, types, feature, n, rows, turn % 2);
      }
    }
  // Backward by words of two 16-bit elements (Family::kWords): each plan; padded rows, which begin at odd elements, are
  // accessed by elements
  for (const int64_t n : {34, 66, 130, 258, 514, 770, 1538, 4098, 8194, 12346, 40002, 100002})
    for (const NamedTypes& types : kTypes) {
      const Types& t = types.t;
      if (dtype_bytes(t.x) != 2 || t.y != t.x || t.z != t.x || t.residual != t.x || t.go != t.x) continue;
      for (int feature = 0; feature < 3; ++feature) add_case(cases, types, fused[feature], n, not_small(n), ++turn % 2);
    }
  const auto start = std::chrono::steady_clock::now();
  int count = 0;
  size_t at = from;
  for (; at < cases.size() && !is_stopped; ++at) {
    if (!only.empty() && cases[at].name.find(only) == std::string::npos) continue;
    run(cases[at]);
    ++count;
  }
  if (at < cases.size()) std::printf("stopped before case %zu of %zu\n", at, cases.size());
  if (only.empty()) check_mask();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf("%d cases, %d failures, %.1f s\n", count, failures, seconds);
  return failures > 0;
}
