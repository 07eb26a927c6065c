// at::parallel_for and at::get_num_threads on torch's stable C interface.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <stdexcept>

namespace at {

inline int64_t get_num_threads() {
  uint32_t count = 1;
  return torch_get_num_threads(&count) == 0 ? static_cast<int64_t>(count) : 1;
}

// Calls body(begin, end) for parts of at least `grain`. The body must not throw.
template <class Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  if (begin >= end) return;
  if (end - begin <= grain) return body(begin, end);
  const auto call = [](int64_t first, int64_t last, void* context) {
    (*static_cast<const Body*>(context))(first, last);
  };
  if (torch_parallel_for(begin, end, grain, call, const_cast<Body*>(&body)) != 0)
    throw std::runtime_error("torch could not do this: parallel_for");
}

}  // namespace at
