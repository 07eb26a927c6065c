// Keeps persistent blocks together, so that memory is read and written almost in order and all blocks end together.
//
// SMs do not get equal shares of the memory's bandwidth (benchmarks/README.md has figures). Now and then a block
// compares its turns with the mean of all and waits while it is too far ahead. Which rows a block has does not change,
// so neither do results.
#pragma once

#include "launch_plan.h"

namespace fused_layernorm {
namespace {

// Paced turns of all blocks so far. Never set to 0: only its growth is looked at. Kernels of other streams that add to
// it make blocks wait less, and blocks that could not begin yet make the others wait in vain, once.
__device__ unsigned paced_turns;

// kEvery: of how many turns one is paced. Few fields: the kernels have no register to spare.
template <int kEvery>
class Pace {
 public:
  // The first `free` turns, which fill a ring, are not: by then all blocks have begun.
  __device__ explicit Pace(int free) : mean_(look()), free_(free) {}

  // Before the block's next turn, by one of its threads.
  __device__ void next_turn() {
    if (free_ > 0) {
      --free_;
      return;
    }
    free_ = kEvery - 1;
    mean_ += gridDim.x;
    atomicAdd(&paced_turns, 1u);
    const int slack = static_cast<int>(kPaceSlackHalves * gridDim.x / 2);
    for (int looks = 0; static_cast<int>(mean_ - look()) > slack; ++looks) {
      if (looks == kPaceLooks) mean_ -= kPaceNever;
      __nanosleep(kPaceNanoseconds);
    }
  }

 private:
  __device__ static unsigned look() { return *static_cast<volatile unsigned*>(&paced_turns); }

  unsigned mean_;  // what paced_turns is when the mean of the blocks has as many turns as this one
  int free_;
};

template <>
class Pace<0> {  // no turn is paced
 public:
  __device__ explicit Pace(int) {}
  __device__ void next_turn() {}
};

}  // namespace
}  // namespace fused_layernorm
