#include "memory_efficient.h"

#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <mutex>
#include <unordered_map>

#ifdef FUSED_LAYERNORM_WITH_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#endif

namespace fused_layernorm {

using at::Tensor;

namespace {

std::atomic<int64_t> optimizer_steps{0};
PyObject* watch_optimizers = nullptr;

// Calls function(T()) for the tensor's element type.
template <class Function>
auto with_type(at::ScalarType type, Function&& function) {
  switch (type) {
    case at::kHalf: return function(at::Half());
    case at::kBFloat16: return function(at::BFloat16());
    case at::kFloat: return function(0.0f);
    default: return function(0.0);
  }
}

// The columns of a parameter, copied to the CPU and widened.
std::vector<double> columns_of(const Tensor& parameter) {
  const Tensor columns = parameter.detach().cpu().contiguous();
  std::vector<double> values(columns.numel());
  with_type(columns.scalar_type(), [&](auto type) {
    const auto* data = static_cast<const decltype(type)*>(columns.const_data_ptr());
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<double>(data[i]);
    return 0;
  });
  return values;
}

bool look(const NormCall& call) {
  const auto [tiny, most] = with_type(call.x.scalar_type(), [](auto type) {
    using Limits = std::numeric_limits<decltype(type)>;
    return std::pair(static_cast<double>(Limits::min()), static_cast<double>(Limits::max()));
  });
  std::vector<double> weight, bias;
  if (call.weight.defined()) weight = columns_of(call.weight);
  if (call.bias.defined()) bias = columns_of(call.bias);
  const size_t columns = std::max(weight.size(), bias.size());
  const double root = std::sqrt(static_cast<double>(columns));  // |x_hat| <= sqrt(N)
  const bool is_double = call.x.scalar_type() == at::kDouble;
  const auto sum = [&](double a, double b) {  // in the accumulation type
    return is_double ? a + b : static_cast<double>(static_cast<float>(a) + static_cast<float>(b));
  };
  bool tells = true;
  for (size_t i = 0; i < columns; ++i) {  // NaN fails every comparison
    const double scale = weight.empty() ? 1 : std::abs(sum(weight[i], call.weight_offset));
    const double shift = bias.empty() ? 0 : std::abs(bias[i]);
    tells &= scale >= 1024 * tiny && scale <= 0x1p125 && shift <= scale && scale * root + shift <= most;
  }
  return tells;
}

#ifdef FUSED_LAYERNORM_WITH_CUDA
// A parameter as it was when the verdict was found.
struct Seen {
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
  uint32_t version;
  const void* data;

  explicit Seen(const Tensor& given)
      : tensor(given.getIntrusivePtr()),
        version(given.defined() ? given._version() : 0),
        data(given.defined() ? given.const_data_ptr() : nullptr) {}
  bool is(const Tensor& given) const {
    return tensor._unsafe_get_target() == given.unsafeGetTensorImpl() && !(given.defined() && tensor.expired()) &&
           (!given.defined() || (version == given._version() && data == given.const_data_ptr()));
  }
};

struct Verdict {
  Seen weight, bias;
  at::ScalarType dtype;
  double weight_offset;
  int64_t steps;
  bool tells;
};

bool look_once(const NormCall& call) {
  static std::mutex mutex;
  static std::unordered_map<c10::TensorImpl*, Verdict> verdicts;
  const Tensor& key = call.weight.defined() ? call.weight : call.bias;
  const bool has_versions =
      !(call.weight.defined() && call.weight.is_inference()) && !(call.bias.defined() && call.bias.is_inference());
  if (has_versions) {
    static std::once_flag once;
    std::call_once(once, [] {
      const py::gil_scoped_acquire gil;
      const py::handle watch(watch_optimizers);
      if (watch) watch();
    });
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = verdicts.find(key.unsafeGetTensorImpl());
    if (found != verdicts.end()) {
      const Verdict& verdict = found->second;
      if (verdict.weight.is(call.weight) && verdict.bias.is(call.bias) && verdict.dtype == call.x.scalar_type() &&
          verdict.weight_offset == call.weight_offset && verdict.steps == optimizer_steps)
        return verdict.tells;
    }
  }
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) return false;
  const int64_t steps = optimizer_steps;
  const bool tells = look(call);
  if (has_versions) {
    const std::lock_guard<std::mutex> lock(mutex);
    for (auto entry = verdicts.begin(); entry != verdicts.end();)  // drop those of tensors that are gone
      entry = entry->second.weight.tensor.expired() && entry->second.bias.tensor.expired() ? verdicts.erase(entry)
                                                                                           : std::next(entry);
    verdicts.insert_or_assign(
        key.unsafeGetTensorImpl(),
        Verdict{Seen(call.weight), Seen(call.bias), call.x.scalar_type(), call.weight_offset, steps, tells});
  }
  return tells;
}
#endif

}  // namespace

bool y_tells_x(const NormCall& call) {
  if (!call.weight.defined() && !call.bias.defined()) return true;
#ifdef FUSED_LAYERNORM_WITH_CUDA
  if (call.x.is_cuda()) return look_once(call);
#endif
  return look(call);
}

void set_watch_optimizers(PyObject* function) {
  Py_INCREF(function);
  Py_XSETREF(watch_optimizers, function);
}

void count_optimizer_step() { ++optimizer_steps; }

}  // namespace fused_layernorm
