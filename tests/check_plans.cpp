// Checks for every hidden size that the plans of the fused backward (csrc/cuda/launch_plan.h) hold the row: each vector
// belongs to one warp, which has registers for it, and no warp is without work. Host code; no CUDA. Prints a line for
// each failure, and exits with 1 if there is one.
//
//   c++ -std=c++17 -O1 -Icsrc tests/check_plans.cpp -o build/check_plans && build/check_plans
#include <cstdint>
#include <cstdio>
#include <string>

#include "cuda/launch_plan.h"

using namespace fused_layernorm;

constexpr int kMostOfCluster = 16;
int failures = 0, rows_checked = 0;

template <typename Plan>
void check(Plan plan, const char* ladder, int64_t hidden_size, int set, int max_cluster, int element_bytes) {
  const int64_t vectors = (hidden_size + Plan::kVec - 1) / Plan::kVec;
  if (vectors > int64_t{Plan::kThreads} * Plan::kVecs * std::min(Plan::kMaxCluster, max_cluster)) return;
  const FusedRowsPlan rows(plan, vectors, set, max_cluster, element_bytes);
  using Shape = typename Plan::Shape;
  ++rows_checked;
  const auto expect = [&](bool holds, const char* what) {
    if (holds) return;
    std::printf("%s, %ld columns, clusters of up to %d: %s\n", ladder, long(hidden_size), max_cluster, what);
    ++failures;
  };
  expect(rows.slice % set == 0 && int64_t{rows.slice} * rows.cluster >= vectors, "the blocks do not hold the row");
  expect(rows.threads * rows.rows <= Shape::kConsumers, "more threads than the kernel has");
  expect(rows.rows >= 1 && rows.rows <= Shape::kMostRows, "more rows than the kernel has");
  if (Shape::kOneWarp) {
    expect(rows.threads == Shape::kLanes && rows.slice <= Shape::kLanes * Shape::kVecs,
           "the lanes do not hold the row");
    return;
  }
  const int warps = rows.threads / 32, last = rows.slice - (warps - 1) * rows.warp_slice, most = 32 * Shape::kVecs;
  expect(rows.threads % 32 == 0 && warps >= 2, "less than two warps");
  expect(rows.warp_slice <= most && last <= most, "a warp has more vectors than registers");
  expect(rows.warp_slice > 0 && last > 0, "a warp has no vector");
  expect(warps <= 8 || Shape::kClusters, "more than eight sums in a block without a cluster");
}

template <typename... Plans>
void check_ladder(Ladder<Plans...> ladder, const char* name, int64_t hidden_size, int max_cluster) {
  // The first plan that holds the row, as pick_plan() of dispatch.cuh
  bool found = false;
  const auto consider = [&](auto plan) {
    using Plan = decltype(plan);
    if (found || hidden_size > Plan::kThreads * Plan::kVecs * Plan::kVec * std::min(Plan::kMaxCluster, max_cluster))
      return;
    found = true;
    for (const int element_bytes : {0, 6, 20}) {
      check(plan, name, hidden_size, 1, max_cluster, element_bytes);
      if (Plan::kVec > 2) check(plan, name, hidden_size, 2, max_cluster, element_bytes);
    }
  };
  (consider(Plans{}), ...);
}

// 16-byte rows of 16 bits and of fp32, or ragged rows, of which any number of elements is a row.
template <template <typename> class LadderOf>
void check_both(const char* name, int64_t hidden_size, int max_cluster, bool ragged = false) {
  if (ragged || hidden_size % 8 == 0)
    check_ladder(typename LadderOf<uint16_t>::type{}, (std::string(name) + ", 16 bits").c_str(), hidden_size,
                 max_cluster);
  if (ragged || hidden_size % 4 == 0)
    check_ladder(typename LadderOf<float>::type{}, (std::string(name) + ", fp32").c_str(), hidden_size, max_cluster);
}

// Rows that the blocks of the whole card share, on cards of that many SMs.
template <typename scalar_t>
void check_whole_card(const char* name, int64_t hidden_size, int multiprocessors) {
  using Plan = WholeCardPlan<scalar_t>;
  const int64_t tile = int64_t{Plan::kThreads} * Plan::kVecs * Plan::kVec;
  if (hidden_size % Plan::kVec != 0 || hidden_size > tile * std::min(multiprocessors, kWholeCard)) return;
  const int blocks = peers_for<Plan>(hidden_size / Plan::kVec, multiprocessors);
  if (blocks * tile < hidden_size || blocks > std::min(multiprocessors, kWholeCard) || blocks <= kMostOfCluster) {
    std::printf("%s, %ld columns, %d SMs: %d blocks\n", name, long(hidden_size), multiprocessors, blocks);
    ++failures;
  }
  check(Plan{}, name, hidden_size, 1, multiprocessors, 3 * static_cast<int>(sizeof(scalar_t)));
}

int main() {
  for (const int multiprocessors : {66, 78, 114, 132, 148, 160, 188})
    for (int64_t n = kClusterColumns + 4; n <= 1400000; n += 4) {
      check_whole_card<uint16_t>("whole card, 16 bits", n, multiprocessors);
      check_whole_card<float>("whole card, fp32", n, multiprocessors);
    }
  for (const int max_cluster : {1, 8, 16})
    for (int64_t n = 1; n <= 131072; ++n) {
      check_both<BackwardLadder>("plain", n, max_cluster);
      check_both<LoadGradLadder>("load stage", n, max_cluster);
      check_both<EpilogueGradLadder>("epilogue", n, max_cluster);
      check_both<GateGradLadder>("gate", n, max_cluster);
      check_both<RowGateGradLadder>("row gate", n, max_cluster);
      check_both<RaggedBackwardLadder>("ragged", n, max_cluster, true);
    }
  std::printf("%d plans, %d failures\n", rows_checked, failures);
  return failures > 0 || rows_checked == 0;
}
