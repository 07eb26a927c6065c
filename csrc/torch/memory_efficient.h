// The rule of memory_efficient: when x_hat can be recovered from y.
#pragma once

#include <Python.h>

#include "norm_call.h"

namespace fused_layernorm {

// Whether every column of N has 1024 * tiny <= |w + o| <= 2^125, |b| <= |w + o| and sqrt(N) * |w + o| + |b| <= max,
// tiny and max being those of y's dtype: x_hat = (y - b) / (w + o) is then about as exact as from a rounded x.
//
// On the CPU each call looks at the parameters. On CUDA, where a look waits for the device, the verdict is kept until
// weight or bias has changed, or an optimizer has made a step; while a graph is captured it is false.
bool y_tells_x(const NormCall& call);

// A Python function that makes every step of torch.optim call count_optimizer_step(). It is called once, at the first
// look on CUDA: mixed precision writes new weights through .data, which changes no version. With the GIL; never
// released.
void set_watch_optimizers(PyObject* function);
void count_optimizer_step();

}  // namespace fused_layernorm
