// Keeps persistent blocks at about the same iteration, so that memory is accessed almost in order and all blocks end
// together.
//
// SMs do not get equal shares of the memory bandwidth (benchmarks/tuning.md has figures). At intervals a block compares
// its iterations with the mean of all blocks, and waits while it is too far ahead. The rows of a block do not change,
// so neither do results.
#pragma once

#include "launch_plan.h"

namespace fused_layernorm {
namespace {

// Paced iterations of all blocks so far. It is never reset: only differences are used. Kernels of other streams that
// add to it make blocks wait less; blocks that could not start yet make the others wait in vain, once.
__device__ unsigned paced_iterations;

// Every `every`-th iteration is paced.
template <bool kPaced>
class Pace {
 public:
  // The first `free` iterations, which fill the ring, are not paced: after them all blocks have started.
  __device__ Pace(int free, int every) : mean_(look()), free_(free), every_(every) {}

  // Called by one thread before each iteration of the block.
  __device__ void next_iteration() {
    if (free_ > 0) {
      --free_;
      return;
    }
    free_ = every_ - 1;
    mean_ += gridDim.x;
    atomicAdd(&paced_iterations, 1u);
    const int slack = static_cast<int>(kPaceSlackHalves * gridDim.x / 2);
    for (int looks = 0; static_cast<int>(mean_ - look()) > slack; ++looks) {
      if (looks == kPaceLooks) mean_ -= kPaceNever;
      __nanosleep(kPaceNanoseconds);
    }
  }

 private:
  __device__ static unsigned look() { return *static_cast<volatile unsigned*>(&paced_iterations); }

  unsigned mean_;  // the value of paced_iterations at which the mean of the blocks equals this block's count
  int free_, every_;
};

template <>
class Pace<false> {  // no iteration is paced
 public:
  __device__ Pace(int, int) {}
  __device__ void next_iteration() {}
};

}  // namespace
}  // namespace fused_layernorm
