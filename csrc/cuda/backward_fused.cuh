// Strategy "fused" of backward: persistent blocks iterate over rows. norm_backward.cu has the formulas; row_ring.cuh
// moves the data.
//
// A kernel is a type, a plan and a family, which decide its registers. Everything else is a run-time value. A call
// takes one of the kernel's paths, straight-line code selected once a block: with a branch for each vector, clusters
// lost 8% (H200, bf16, N = 8192: 0.84 instead of 0.91 of the copy).
#pragma once

#include <numeric>

#include "activation.cuh"
#include "backward_rows.cuh"
#include "dispatch.cuh"
#include "kernel_params.h"
#include "launch_plan.h"
#include "launchers.h"
#include "reduce.cuh"
#include "row_ring.cuh"
#include "stages.cuh"
#include "vector_io.cuh"

namespace fused_layernorm {
namespace {

struct NoStage {};

// kLoad: the plain norm, with a load stage without gate, and from y. kGate: a load stage with a gate, whose gradient is
// a third sum along the columns. kEpilogue: an epilogue, with or without a load stage without gate. kRowGate: a gated
// norm.
enum class Family { kLoad, kGate, kEpilogue, kRowGate };

// Whether a ladder holds a plan. A kernel has the paths whose ladders hold its plan.
template <typename Plan, typename... Plans>
constexpr bool holds(Ladder<Plans...>) {
  return (std::is_same<Plan, Plans>::value || ...);
}
template <typename scalar_t, typename Plan>
constexpr bool kIsRagged = Plan::kVec * sizeof(scalar_t) < 16;
template <typename scalar_t, typename Plan>
constexpr bool kTakesPlain = kIsRagged<scalar_t, Plan> || holds<Plan>(typename BackwardLadder<scalar_t>::type{});
// The path from y keeps bias in registers, which ragged rows and the longest rows do not leave.
constexpr int64_t kFromYColumns = 65536;
template <typename scalar_t, typename Plan>
constexpr bool kTakesFromY =
    kTakesPlain<scalar_t, Plan> && !kIsRagged<scalar_t, Plan> && Plan::kThreads * Plan::kVecs * Plan::kVec <= 4096;
template <typename scalar_t, typename Plan>
constexpr bool kTakesLoad = kIsRagged<scalar_t, Plan> || holds<Plan>(typename LoadGradLadder<scalar_t>::type{});

// Calls f(Work) for the path of a call.
template <typename scalar_t, typename Plan, Family family, typename F>
__host__ __device__ __forceinline__ void with_work(const GradStages& stages, F&& f) {
  const auto with_grad = [&](auto path) {
    constexpr Path kPath = decltype(path)::value;
    if constexpr (sizeof(scalar_t) == 4 && !kIsRagged<scalar_t, Plan>) {
      if (stages.grad_output_dtype == DType::kFloat16) return f(Work<__half, kPath>{});
      if (stages.grad_output_dtype == DType::kBFloat16) return f(Work<__nv_bfloat16, kPath>{});
    }
    f(Work<scalar_t, kPath>{});
  };
  if constexpr (family == Family::kEpilogue) {
    f(Work<scalar_t, Path::kEpilogue>{});
  } else if constexpr (family == Family::kRowGate) {
    if (stages.row_gate.gates_y) return f(Work<scalar_t, Path::kRowGateOfY>{});
    f(Work<scalar_t, Path::kRowGateOfX>{});
  } else if constexpr (family == Family::kGate) {
    with_grad(std::integral_constant<Path, Path::kGate>{});
  } else {
    if constexpr (kTakesLoad<scalar_t, Plan>) {
      if (stages.has_load_stage) return with_grad(std::integral_constant<Path, Path::kLoad>{});
    }
    if constexpr (kTakesFromY<scalar_t, Plan>) {
      if (stages.from_y) return f(Work<scalar_t, Path::kFromY>{});
    }
    if constexpr (kTakesPlain<scalar_t, Plan>) f(Work<scalar_t, Path::kPlain>{});
  }
}

// Shared memory behind the ring: with an epilogue, wdy of two rows.
template <typename scalar_t, typename Plan, Family family>
constexpr int kKeptBytes =
    family == Family::kEpilogue && Plan::kOneBehind
        ? 2 * Plan::kThreads * Plan::kRows * Plan::kVecs * Plan::kVec * static_cast<int>(sizeof(acc_type<scalar_t>))
        : 0;

// Vectors of four-byte elements in shared memory, interleaved so that `kCount` neighbouring threads access neighbouring
// 16-byte words. `at`: this thread's first word.
template <int kCount, int kVec>
__device__ __forceinline__ void store_words(unsigned at, const float (&values)[kVec]) {
#pragma unroll
  for (int i = 0; i < kVec; i += 4) {
    uint4 word;
    memcpy(&word, values + i, sizeof(word));
    store_shared(at + i / 4 * kCount * 16, word);
  }
}
template <typename T, int kVec, int kCount>
__device__ __forceinline__ RawVec<T, kVec> load_words(unsigned at) {
  RawVec<T, kVec> raw;
#pragma unroll
  for (int i = 0; i < kVec / 4; ++i) {
    const uint4 word = load_shared<uint4>(at + i * kCount * 16);
    memcpy(reinterpret_cast<char*>(&raw) + i * sizeof(word), &word, sizeof(word));
  }
  return raw;
}

// Sums along the columns over a block's rows: grad_weight, grad_bias and, with a gate, grad_gate.
template <typename scalar_t, typename Plan, Family family>
struct ColumnSums {
  static constexpr int kSums = family == Family::kGate ? 3 : 2;
  acc_type<scalar_t> sums[kSums][Plan::kVecs][Plan::kVec];
};

// The rows and columns of a thread. by_warp: `group` is provably uniform in a warp, so that shuffles need no
// convergence code, 15 instructions a row; it takes a register.
template <typename scalar_t, typename Plan, bool by_warp = true>
struct BlockThreads {
  using Row = RowThreads<Plan::kThreads, Plan::kRows>;
  static constexpr int kThreads = Plan::kThreads, kVec = Plan::kVec, kConsumers = Plan::kThreads * Plan::kRows;
  static constexpr bool kAligned = Plan::kVec * sizeof(scalar_t) % 8 == 0;
  static constexpr bool kGroupOfWarp = by_warp && kThreads >= 32 && Plan::kRows > 1;

  const Slice& slice;
  int warp, rank, group;
  RegisterSlots<Plan, !kAligned> held;

  __device__ explicit BlockThreads(const Slice& slice)
      : slice(slice),
        warp(__shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0)),
        rank(Row::rank()),
        group(kGroupOfWarp ? warp / Row::kWarps : Row::group()),
        held(slice.elements, rank * kVec) {}

  __device__ bool produces() const {
    return Plan::kHasProducer && (kGroupOfWarp ? warp >= kConsumers / 32 : threadIdx.x >= kConsumers);
  }
  __device__ int elements_of(int v) const { return held.count(v); }
  __device__ int column_of(int v) const { return (held.index(v) * kThreads + rank) * kVec; }
};

// On the path from y, plans that keep a row in registers would spill.
template <typename Plan, typename Work>
constexpr bool kByWarp = !Work::kFromY || Plan::kOneBehind;

// The work of a consumer thread on its rows.
template <typename scalar_t, typename Plan, Family family, typename Work>
struct FusedRows {
  using acc_t = acc_type<scalar_t>;
  using grad_t = typename Work::grad_t;
  using Ring = RowRing<scalar_t, Plan, Work>;
  using Exchange = SumExchange<Plan, acc_t>;
  using Threads = BlockThreads<scalar_t, Plan, kByWarp<Plan, Work>>;
  using Row = typename Threads::Row;
  using Stats = RowStats<scalar_t>;
  using XVec = RawVec<scalar_t, Plan::kVec>;
  using GradVec = RawVec<grad_t, Plan::kVec>;
  static constexpr int kThreads = Plan::kThreads, kVecs = Plan::kVecs, kVec = Plan::kVec, kRows = Plan::kRows;
  static constexpr bool kAligned = Ring::kAligned;
  static constexpr bool kHasEpilogue = Work::kHasEpilogue;
  // Whether a row's grad_residual_out is kept in registers; else it is read from the ring, for lack of registers
  static constexpr bool kHoldsResidualGrad = Work::kAlwaysAdds && kAligned;
  // Whether a warp skips the last register slot if it is empty: in plans whose rows often end before it
  static constexpr bool kMayEnd = kAligned && kThreads >= 64 && (kHasEpilogue ? kVecs > 1 : kVecs == 3);

  const KernelBackwardParams& params;
  const FusedArguments& arguments;
  const Slice& slice;
  const Threads& threads;
  Ring& ring;
  ColumnSums<scalar_t, Plan, family>& columns;
  unsigned kept_memory;  // shared address of the memory behind the ring

  acc_t weight[kVecs][kVec], bias[Work::kNeedsBias ? kVecs : 1][kVec], gate[Work::kHasGate ? kVecs : 1][kVec];
  grad_t* grad_input;
  scalar_t* grad_residual;

  __device__ __forceinline__ void load_parameters() {
    const int64_t first = slice.parameters_of<Plan>(params, threads.group);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int64_t at = first + threads.column_of(v);
      const int count = threads.elements_of(v);
      const auto load = [&](auto type) {
        using T = decltype(type);
        load_weight<T>(weight[v], params, at, count);
        if constexpr (Work::kNeedsBias) {
          RawVec<T, kVec> raw = zero_vec<T, kVec>();
          if (params.bias) raw = load_some<T, kVec>(static_cast<const T*>(params.bias) + at, count);
          unpack(raw, bias[v]);
        }
      };
      if (sizeof(grad_t) == 2 && params.weight_dtype == DType::kFloat32) {
        load(float{});
      } else {
        load(grad_t{});
      }
      if constexpr (kHasEpilogue) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) weight[v][i] *= arguments.norm_scale, bias[v][i] *= arguments.norm_scale;
      }
#pragma unroll
      for (int sum = 0; sum < columns.kSums; ++sum)
#pragma unroll
        for (int i = 0; i < kVec; ++i) columns.sums[sum][v][i] = 0;
      if constexpr (Work::kHasGate) {
        GradVec raw = zero_vec<grad_t, kVec>();
        if (count > 0)
          raw = load_vec<grad_t, kVec>(static_cast<const grad_t*>(arguments.stages.gate) +
                                       slice.segment * arguments.stages.gate_stride + slice.first_col +
                                       threads.column_of(v));
        unpack(raw, gate[v]);
      }
    }
  }

  // A thread without a v-th vector reads the row's vector 0 as x and zeros as grad_output and weight: it adds 0 without
  // a branch. (An infinite x times 0 is nan, but then all of its row is nan; an infinite grad_output leaves the sums
  // infinite.) Without the copy engine, vector 0 arrives by another thread's copy, which this thread does not wait for.
  template <typename T>
  __device__ __forceinline__ RawVec<T, kVec> read_as(unsigned at, int v, bool whole) const {
    if constexpr (kAligned) {
      bool is_there = threads.elements_of(v) > 0;
      if constexpr (!Plan::kOneBehind && kHasEpilogue) {
        int at_rank = threads.rank;  // hidden from the optimizer: derived values would be kept and spill
        asm volatile("" : "+r"(at_rank));
        is_there = (v * kThreads + at_rank) * kVec < slice.elements;
      }
      if (!kBulk && !is_there) return zero_vec<T, kVec>();
      return ring.template vec<T>(at, is_there ? v * kThreads + threads.rank : 0, kVec);
    } else {
      return ring.template vec<T>(at, threads.held.index(v) * kThreads + threads.rank,
                                  whole ? kVec : threads.elements_of(v));
    }
  }
  __device__ __forceinline__ XVec read(unsigned at, int v, bool whole) const { return read_as<scalar_t>(at, v, whole); }
  __device__ __forceinline__ GradVec read_grad(unsigned at, int v, bool whole) const {
    return read_as<grad_t>(!kAligned || threads.elements_of(v) > 0 ? at : ring.zeros(), v, whole);
  }
  __device__ __forceinline__ GradVec read_gated(unsigned at, int v, bool whole) const {
    return read_as<grad_t>(at, v, whole);
  }
  __device__ __forceinline__ XVec read_residual_grad(unsigned at, int v, bool whole) const {
    if constexpr (Work::kHasRowGate)  // a gate of 0 where there is no column: no activation of it is infinite
      return read_as<scalar_t>(threads.elements_of(v) > 0 ? at : ring.zeros(), v, whole);
    return Work::kMayAdd && arguments.stages.grad_residual_out ? read(at, v, whole) : zero_vec<scalar_t, kVec>();
  }

  // The lanes of this warp that have a row: if several rows share a warp, some lanes may have left the loop before the
  // last iteration. Rows go to lanes in order.
  __device__ __forceinline__ unsigned active_lanes(int row) const {
    constexpr int kRowsOfWarp = 32 / Row::kLanes;
    if constexpr (kRowsOfWarp == 1) return 0xffffffffu;
    const int count = min(slice.end_row - (row - threads.group % kRowsOfWarp), kRowsOfWarp);
    return count == kRowsOfWarp ? 0xffffffffu : (1u << count * Row::kLanes) - 1;
  }

  template <typename F>
  __device__ __forceinline__ void for_all(F&& f) const {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) f(v, std::true_type{});
  }
  template <typename F>
  __device__ __forceinline__ void for_each(F&& f) const {
    if constexpr (kMayEnd) {
      const auto has_last = [&] {
        int first = threads.rank - threads.rank % 32;
        asm volatile("" : "+r"(first));  // hidden from the optimizer: the result would be kept and spill
        return ((kVecs - 1) * kThreads + first) * kVec < slice.elements;
      };
#pragma unroll
      for (int v = 0; v < kVecs; ++v)
        if (v + 1 < kVecs || has_last()) f(v, std::true_type{});
    } else if constexpr (kAligned) {
      for_all(f);
    } else {
      threads.held.for_each(f);
    }
  }

  // With an epilogue: the sums along the row are those of x_hat; `keep` receives wdy up to a factor of the row.
  template <typename XOf, typename GradOf, typename Keep>
  __device__ __forceinline__ Pair<acc_t> add_up_epilogue(const Stats& stats, int row, XOf x_vec, GradOf grad_vec,
                                                         Keep keep) {
    Pair<acc_t> sums{0, 0};
    with_epilogue(arguments.stages.epilogue, [&](auto which, auto drops) {
      constexpr bool kDrops = decltype(drops)::value;
      [[maybe_unused]] const auto dropout = [&] {
        if constexpr (kDrops)
          return RowDropout<acc_t>(arguments.stages.epilogue.dropout, row);
        else
          return NoStage{};
      }();
      constexpr int kStrands =
          kVecs == 2 && !kDrops && (Plan::kOneBehind || !std::is_same<scalar_t, __half>::value) ? 2 : 1;
      Pair<acc_t> strands[kStrands] = {};
      constexpr bool kActivates = !std::is_same<decltype(which), Which<Activation::kNone>>::value;
      const auto add_vec = [&](int v, auto whole) {
        acc_t x[kVec], grad[kVec];
        XVec x_of[1] = {x_vec(v, whole)};
        unpack(grad_vec(v, whole), grad);
        if constexpr (kDrops) {
          int col = threads.column_of(v);  // hidden from the optimizer: derived values would be kept and spill
          asm volatile("" : "+r"(col));
          dropout.drop(grad, slice.first_col + col);
        }
        const auto normalize = [&] {
          unpack(x_of[0], x);
#pragma unroll
          for (int i = 0; i < kVec; ++i) x[i] = mul(stats.centered(x[i]), stats.rstd);
        };
        normalize();
        if constexpr (kActivates) {
          acc_t norm[kVec];
#pragma unroll
          for (int i = 0; i < kVec; ++i) norm[i] = fma(x[i], weight[v][i], bias[v][i]);
          activate_backward<sizeof(grad_t) == 2>(grad, norm, which);
          if constexpr (kDrops) {  // recomputed: keeping x_hat would spill
            optimization_barrier(x_of);
            normalize();
          }
        }
        add_from_x_hat(strands[v % kStrands], columns.sums[0][v], columns.sums[1][v], x, grad, weight[v]);
        keep(v, grad);
      };
      // Interleaving the random numbers of several vectors gains more than skipping an empty slot
      if constexpr (kDrops)
        for_all(add_vec);
      else
        for_each(add_vec);
      sums = strands[0];
      if constexpr (kStrands > 1) sums = {add(sums.first, strands[1].first), add(sums.second, strands[1].second)};
    });
    return sums;
  }

  // Returns the sums along the row, and adds this row to the sums along the columns.
  template <typename XOf, typename GradOf, typename GateOf, typename Keep>
  __device__ __forceinline__ Pair<acc_t> add_up(const Stats& stats, [[maybe_unused]] int row, XOf x_vec,
                                                GradOf grad_vec, [[maybe_unused]] GateOf gate_vec,
                                                [[maybe_unused]] Keep keep) {
    if constexpr (kHasEpilogue) {
      return add_up_epilogue(stats, row, x_vec, grad_vec, keep);
    } else {
      Pair<acc_t> sums{0, 0};
      if constexpr (Work::kHasRowGate) {
        with_gate_activation(arguments.stages.row_gate.activation, [&](auto which) {
          for_each([&](int v, auto whole) {
            acc_t x[kVec], grad[kVec], gate[kVec];
            unpack(gate_vec(v, whole), gate);
            activate<sizeof(scalar_t) == 2>(gate, which);
            unpack(grad_vec(v, whole), grad);
            unpack(x_vec(v, whole), x);
#pragma unroll
            for (int i = 0; i < kVec; ++i) (Work::kGatesY ? grad : x)[i] *= gate[i];
            add_to_row(sums, stats, x, grad, weight[v]);
            add_to_columns(columns.sums[0][v], columns.sums[1][v], stats, x, grad);
          });
        });
        return sums;
      }
      for_each([&](int v, auto whole) {
        acc_t x[kVec], grad[kVec];
        unpack(grad_vec(v, whole), grad);
        unpack(x_vec(v, whole), x);
        if constexpr (Work::kFromY) {
#pragma unroll
          for (int i = 0; i < kVec; ++i) x[i] = sub(x[i], bias[v][i]);
          add_from_y(sums, columns.sums[0][v], columns.sums[1][v], x, grad, weight[v]);
        } else {
          add_to_row(sums, stats, x, grad, weight[v]);
          add_to_columns(columns.sums[0][v], columns.sums[1][v], stats, x, grad);
        }
      });
      return sums;
    }
  }

  // (slope, level) of slope_and_level(); with an epilogue both times rstd.
  __device__ __forceinline__ Pair<acc_t> row_terms(const Stats& stats, Pair<acc_t> sums) const {
    if constexpr (kHasEpilogue) {
      if (!params.stats_grad) sums = {0, 0};
      const acc_t slope = mul(mul(sums.first, arguments.sum_factor), stats.rstd);
      acc_t level = params.is_rms_norm ? acc_t(0) : mul(sums.second, arguments.sum_factor);
      if constexpr (Stats::kFoldsMean) level = fma(-stats.mean, slope, level);
      return {mul(slope, stats.rstd), mul(level, stats.rstd)};
    } else if constexpr (Work::kFromY) {
      return slope_and_level(sums, UnitStats<acc_t>{1}, params, acc_t(arguments.inverse_n));
    } else {
      return slope_and_level(sums, stats, params, acc_t(arguments.inverse_n));
    }
  }

  // Stores a vector to grad_input or grad_residual.
  template <typename T>
  __device__ __forceinline__ void write(T* target, bool wanted, int v, [[maybe_unused]] bool whole,
                                        const acc_t (&values)[kVec]) const {
    if constexpr (kAligned) {
      store_vec_if(threads.elements_of(v) > 0 && wanted, target + v * kThreads * kVec, values);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        if (wanted && (whole || i < threads.elements_of(v)))
          target[threads.held.index(v) * kThreads * kVec + i] = narrow<T>(values[i]);
    }
  }

  // From the cache for each row: a gated norm seldom has a bias, and its registers would cost warps.
  __device__ __forceinline__ void load_bias(acc_t (&values)[kVec], int v) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = 0;
    if (!params.bias || threads.elements_of(v) <= 0) return;
    const int64_t at = slice.parameters_of<Plan>(params, threads.group) + threads.column_of(v);
    if (sizeof(grad_t) == 2 && params.weight_dtype == DType::kFloat32) {
      unpack(load_vec<float, kVec>(static_cast<const float*>(params.bias) + at), values);
    } else {
      unpack(load_vec<grad_t, kVec>(static_cast<const grad_t*>(params.bias) + at), values);
    }
  }

  // The end of a gated norm's row: what store() does, and the gradient of the gate.
  template <typename XOf, typename GradOf, typename GateOf>
  __device__ __forceinline__ void store_gated(const Stats& stats, Pair<acc_t> sums, XOf x_vec, GradOf grad_vec,
                                              GateOf gate_vec) {
    const Pair<acc_t> terms = row_terms(stats, sums);
    with_gate_activation(arguments.stages.row_gate.activation, [&](auto which) {
      for_each([&](int v, auto whole) {
        acc_t x[kVec], grad[kVec], gate[kVec], factor[kVec], derivative[kVec], values[kVec];
        unpack(gate_vec(v, whole), gate);
        gate_of<sizeof(scalar_t) == 2>(gate, factor, derivative, which);
        unpack(x_vec(v, whole), x);
        unpack(grad_vec(v, whole), grad);
        if constexpr (Work::kGatesY) {
          acc_t shift[kVec];
          load_bias(shift, v);
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            derivative[i] *= grad[i] * fma(stats.centered(x[i]) * stats.rstd, weight[v][i], shift[i]);
            grad[i] *= factor[i];
          }
          grad_input_of(values, stats, terms, x, grad, weight[v]);
        } else {
          acc_t z[kVec];
#pragma unroll
          for (int i = 0; i < kVec; ++i) z[i] = x[i] * factor[i];
          grad_input_of(values, stats, terms, z, grad, weight[v]);
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            derivative[i] *= values[i] * x[i];
            values[i] *= factor[i];
          }
        }
        write(grad_residual, arguments.stages.grad_residual, v, whole, derivative);
        write(grad_input, params.grad_input, v, whole, values);
      });
    });
  }

  // kAdds: with a load stage.
  template <bool kAdds, typename XOf, typename GradOf, typename ResidualGradOf, typename GatedOf>
  __device__ __forceinline__ void store(const Stats& stats, [[maybe_unused]] int row, Pair<acc_t> sums, XOf x_vec,
                                        GradOf grad_vec, [[maybe_unused]] ResidualGradOf residual_grad_vec,
                                        [[maybe_unused]] GatedOf gated_vec) {
    const GradStages& stages = arguments.stages;
    // With an epilogue there is no register for a second pointer between rows
    if constexpr (kAdds && kHasEpilogue)
      grad_residual =
          static_cast<scalar_t*>(stages.grad_residual) + (grad_input - static_cast<grad_t*>(params.grad_input));
    const Pair<acc_t> terms = row_terms(stats, sums);
    [[maybe_unused]] const acc_t wdy_factor = kHasEpilogue ? mul(stats.rstd, arguments.wdy_factor) : acc_t(1);
    [[maybe_unused]] const auto dropout = [&] {
      if constexpr (kAdds && !Work::kHasGate && kAligned)
        return RowDropout<acc_t>(stages.dropout, row);
      else
        return NoStage{};
    }();
    for_each([&](int v, auto whole) {
      acc_t x[kVec], grad[kVec], values[kVec];
      unpack(x_vec(v, whole), x);
      unpack(grad_vec(v, whole), grad);
      if constexpr (kHasEpilogue) {
#pragma unroll
        for (int i = 0; i < kVec; ++i)
          values[i] = fma(grad[i], wdy_factor, fma(stats.uncentered(x[i]), terms.first, terms.second));
      } else if constexpr (Work::kFromY) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) x[i] = mul(sub(x[i], bias[v][i]), quick_inverse(weight[v][i]));
        grad_input_of(values, UnitStats<acc_t>{stats.rstd}, terms, x, grad, weight[v]);
      } else {
        grad_input_of(values, stats, terms, x, grad, weight[v]);
      }
      if constexpr (kAdds) {
        acc_t residual_grad[kVec];
        unpack(residual_grad_vec(v, whole), residual_grad);
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[i] = add(values[i], residual_grad[i]);
        write(grad_residual, stages.grad_residual, v, whole, values);
        if constexpr (Work::kHasGate) {
          acc_t gated[kVec];
          unpack(gated_vec(v, whole), gated);
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            columns.sums[2][v][i] = fma(gated[i], values[i], columns.sums[2][v][i]);
            values[i] = mul(values[i], gate[v][i]);
          }
        } else if constexpr (kAligned) {
          if (stages.dropout.philox) dropout.apply(values, slice.first_col + threads.column_of(v));
        }
      }
      // The plain path is taken only if grad_input is wanted
      write(grad_input, Work::kIsPlain || params.grad_input, v, whole, values);
    });
  }

  // Selects store(): with an epilogue a load stage is a run-time value.
  template <typename XOf, typename GradOf, typename ResidualGradOf, typename GatedOf>
  __device__ __forceinline__ void store_row(const Stats& stats, int row, Pair<acc_t> sums, XOf x_vec, GradOf grad_vec,
                                            ResidualGradOf residual_grad_vec, GatedOf gated_vec) {
    if constexpr (Work::kHasRowGate) {
      store_gated(stats, sums, x_vec, grad_vec, residual_grad_vec);
    } else if constexpr (Work::kHasEpilogue) {
      if (arguments.stages.has_load_stage) {
        store<true>(stats, row, sums, x_vec, grad_vec, residual_grad_vec, gated_vec);
      } else {
        store<false>(stats, row, sums, x_vec, grad_vec, residual_grad_vec, gated_vec);
      }
    } else {
      store<Work::kAlwaysAdds>(stats, row, sums, x_vec, grad_vec, residual_grad_vec, gated_vec);
    }
    // At most the elements that all blocks hold, which fits 32 bits
    const unsigned step = static_cast<unsigned>(slice.row_step) * static_cast<unsigned>(params.hidden_size);
    grad_input += step;
    if constexpr (Work::kAlwaysAdds) grad_residual += step;
  }

  // Load, reduce, store: the row stays in registers.
  __device__ __forceinline__ void walk_rows(Pair<acc_t> (*scratch)[kRows * Row::kWarps]) {
    // Whether the slot is released only after the row is stored
    const bool keeps_slot = !kHoldsResidualGrad && Work::kMayAdd && arguments.stages.has_load_stage;
    const int group = threads.group;
#pragma unroll 1
    for (int row = slice.first_row + group; row < slice.end_row; row += slice.row_step) {
      ring.wait_full();
      XVec x_raw[kVecs], residual_grad_raw[kHoldsResidualGrad ? kVecs : 1] = {};
      GradVec grad_raw[kVecs], gated_raw[Work::kHasGate ? kVecs : 1] = {};
      [[maybe_unused]] RawVec<acc_t, kVec> kept[kHasEpilogue ? kVecs : 1];
      const auto entry = ring.entry(params, ring.slot, row, group);
      const Stats stats = ring.stats(params, entry, ring.slot, row, group);
      if constexpr (kMayEnd) {  // initialized, because it is used even if not read
        x_raw[kVecs - 1] = zero_vec<scalar_t, kVec>();
        grad_raw[kVecs - 1] = zero_vec<grad_t, kVec>();
      }
      for_each([&](int v, auto whole) {
        x_raw[v] = read(entry.x, v, whole);
        grad_raw[v] = read_grad(entry.grad, v, whole);
        if constexpr (kHoldsResidualGrad) residual_grad_raw[v] = read_residual_grad(entry.residual, v, whole);
        if constexpr (Work::kHasGate) gated_raw[v] = read_gated(entry.gated, v, whole);
      });
      const auto release = [&](int slot) {
        ring.release(params, arguments.stages, slice.first_col, slot, row + arguments.depth * slice.row_step, group,
                     threads.rank, active_lanes(row));
      };
      if (!keeps_slot) release(ring.slot);
      ring.next_slot();
      const Pair<acc_t> sums =
          row_sum<Row>(add_up(
                           stats, row, [&](int v, auto) { return x_raw[v]; }, [&](int v, auto) { return grad_raw[v]; },
                           [&](int v, auto) { return residual_grad_raw[kHoldsResidualGrad ? v : 0]; },
                           [&](int v, const acc_t(&wdy)[kVec]) { kept[kHasEpilogue ? v : 0] = pack<acc_t>(wdy); }),
                       scratch[ring.slot]);  // alternates, as row_sum() requires
      optimization_barrier(x_raw);
      if constexpr (!kHasEpilogue) optimization_barrier(grad_raw);
      if constexpr (Work::kHasRowGate) optimization_barrier(residual_grad_raw);
      store_row(
          stats, row, sums, [&](int v, auto) { return x_raw[v]; },
          [&](int v, auto) {
            if constexpr (kHasEpilogue)
              return kept[v];
            else
              return grad_raw[v];
          },
          [&](int v, auto whole) {
            if constexpr (kHoldsResidualGrad)
              return residual_grad_raw[v];
            else
              return read_residual_grad(ring.more_entry(ring.slot_before(), group, 0), v, whole);
          },
          [&](int v, auto) { return gated_raw[Work::kHasGate ? v : 0]; });
      if (keeps_slot) release(ring.slot_before());
    }
  }

  // The all-reduce of one row overlaps the sums of the next; then the row is read from its slot again. Nothing of it
  // stays in registers, so that a thread can hold more columns. With an epilogue each thread keeps wdy of two rows in
  // shared memory behind the ring: written back into the slot, wdy would need a fence against the copy engine in every
  // iteration (H200, bf16, N = 4096, no activation: 246 us instead of 209).
  __device__ __forceinline__ void walk_rows_one_behind(Exchange& exchange) {
    const GradStages& stages = arguments.stages;
    const int group = threads.group, depth = ring.depth;
    int row = slice.first_row + group;
    unsigned iteration = 0;
    [[maybe_unused]] int produces_in = threads.warp;  // iterations until this warp is the producer
    if (!Plan::kHasProducer && threads.warp == 0)
      Ring(ring).produce(params, stages, slice, slice.first_row, depth - Ring::kLag);
    [[maybe_unused]] const auto kept_at = [&](unsigned of_iteration, int v) {
      return kept_memory + threadIdx.x * 16 +
             (of_iteration % 2 * kVecs + v) * (kThreads * kRows * kVec * static_cast<int>(sizeof(acc_t)));
    };
    const auto finish = [&] {
      const int behind = ring.slot_before();
      const auto entry = ring.entry(params, behind, row - slice.row_step, group);
      store_row(
          ring.stats(params, entry, behind, row - slice.row_step, group), row - slice.row_step,
          exchange.collect(iteration - 1), [&](int v, auto whole) { return read(entry.x, v, whole); },
          [&](int v, auto whole) {
            if constexpr (kHasEpilogue)
              return load_words<acc_t, kVec, kThreads * kRows>(kept_at(iteration - 1, v));
            else
              return read_grad(entry.grad, v, whole);
          },
          [&](int v, auto whole) {
            return read_residual_grad(kHasEpilogue ? ring.more_entry(behind, group, 0) : entry.residual, v, whole);
          },
          [&](int v, auto whole) { return read_gated(entry.gated, v, whole); });
      ring.release(params, stages, slice.first_col, behind, row + (depth - 1) * slice.row_step, group, threads.rank,
                   0xffffffffu);
    };
    // An extra iteration finishes the last row with the same code where a second copy of that code spills or is long; a
    // second copy saves 6% of the instructions a row (128 x 2, with a load stage)
    constexpr bool kOneMore = Work::kFromY || kHasEpilogue || Work::kHasRowGate || (Work::kMayAdd && !kAligned);
#pragma unroll 1
    for (; kOneMore || row < slice.end_row; row += slice.row_step, ++iteration) {
      const bool has_row = !kOneMore || row < slice.end_row;
      if (has_row) {
        if constexpr (!Plan::kHasProducer) {
          if (produces_in == 0) {
            ring.produce_ahead(params, stages, slice, row - group);
            produces_in = Threads::kConsumers / 32;
          }
          --produces_in;
        }
        ring.wait_full();
        const auto entry = ring.entry(params, ring.slot, row, group);
        const Stats stats = ring.stats(params, entry, ring.slot, row, group);
        exchange.share(iteration, add_up(
                                      stats, row, [&](int v, auto whole) { return read(entry.x, v, whole); },
                                      [&](int v, auto whole) { return read_grad(entry.grad, v, whole); },
                                      [&](int v, auto whole) { return read_residual_grad(entry.residual, v, whole); },
                                      [&](int v, const acc_t(&wdy)[kVec]) {
                                        if constexpr (kHasEpilogue)
                                          store_words<kThreads * kRows>(kept_at(iteration, v), wdy);
                                      }));
      }
      if (iteration > 0) finish();
      if (!has_row) break;
      ring.next_slot();
    }
    if (!kOneMore && iteration > 0) finish();
  }

  __device__ __forceinline__ void run(Exchange& exchange, Pair<acc_t> (*scratch)[kRows * Row::kWarps]) {
    load_parameters();
    ring.prefetch_first(params, arguments.stages, slice, threads.group, threads.rank);
    const int row = slice.first_row + threads.group;
    const int64_t own = static_cast<int64_t>(row) * params.hidden_size + slice.first_col + threads.rank * kVec;
    grad_input = static_cast<grad_t*>(params.grad_input) + own;
    if constexpr (Work::kAlwaysAdds) grad_residual = static_cast<scalar_t*>(arguments.stages.grad_residual) + own;
    if constexpr (Plan::kOneBehind) {
      walk_rows_one_behind(exchange);
    } else {
      walk_rows(scratch);
    }
    if constexpr (Work::kFromY) {
#pragma unroll
      for (int v = 0; v < kVecs; ++v)
#pragma unroll
        for (int i = 0; i < kVec; ++i) columns.sums[0][v][i] *= quick_inverse(weight[v][i]);
    }
  }
};

// Reduces the column sums of this block, or cluster, to one partial sum, [kSums, hidden_size]; with interleaved
// segments, each group of threads writes one. Within a warp by
// shuffles, then through the memory of the ring, which all threads add up in parallel (H200, bf16: by serial
// additions with a stride of 32 bytes between threads 2048 x 1024 took 18.6 us, now 11.6; 4096 x 8192 69, now 61;
// 32768 x 4096 208, now 202). Called by all threads after the last use of the ring.
template <typename scalar_t, typename Plan, Family family>
__device__ __forceinline__ void write_partial(const KernelBackwardParams& params, const FusedArguments& arguments,
                                              const Slice& slice, ColumnSums<scalar_t, Plan, family>& columns,
                                              uint4* ring_memory) {
  using acc_t = acc_type<scalar_t>;
  using Threads = BlockThreads<scalar_t, Plan>;
  const Threads threads(slice);
  constexpr int kThreads = Plan::kThreads, kVecs = Plan::kVecs, kVec = Plan::kVec, kRows = Plan::kRows;
  constexpr int kSums = columns.kSums;
  constexpr int kElements = kSums * kVecs * kVec, kUnit = kVec < 4 ? kVec : 4;  // of a thread; written together
  constexpr int kAdders = kRows * Threads::Row::kLanes / 32 > 0 ? kRows * Threads::Row::kLanes / 32 : 1;
  // The smallest ring: that of the plain path, or with a gate that of 16-bit gradients
  using Narrow = std::conditional_t<sizeof(scalar_t) == 4 && family == Family::kGate, __half, scalar_t>;
  using Least = RowRing<scalar_t, Plan, Work<Narrow, family == Family::kGate ? Path::kGate : Path::kPlain>>;
  static_assert(kAdders > 1 || kRows == 1);
  static_assert(kRows >= kAdders && kRows * kElements * kThreads * sizeof(acc_t) <=
                                        2 * Least::slot_bytes_of(family == Family::kGate ? 4 : 2));
  const bool interleaves = kMayInterleave<Plan> && params.interleaves;
  if (kThreads < 32 && !interleaves && threadIdx.x < kThreads * kRows) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v)
#pragma unroll
      for (int i = 0; i < kVec; ++i)
#pragma unroll
        for (int offset = kThreads; offset < 32; offset *= 2)
#pragma unroll
          for (int sum = 0; sum < kSums; ++sum)
            columns.sums[sum][v][i] += __shfl_xor_sync(0xffffffffu, columns.sums[sum][v][i], offset);
  }
  const int adder = kThreads < 32 ? threadIdx.x / 32 : threads.group;
  const bool adds = threadIdx.x < kThreads * kRows && (kThreads >= 32 || threadIdx.x % 32 < kThreads);
  const auto partial_at = [&](int64_t index) {
    return static_cast<acc_t*>(params.workspace) + index * kSums * params.hidden_size + slice.first_col;
  };
  const auto write = [&](acc_t* partial, int element, const acc_t(&values)[kUnit]) {
    const int v = element / kVec % kVecs, first = element % kVec, count = threads.elements_of(v) - first;
    acc_t* target = partial + element / (kVecs * kVec) * params.hidden_size + threads.column_of(v) + first;
    if constexpr (Threads::kAligned) {
      if (count <= 0) return;
      if constexpr (family == Family::kEpilogue) {
        acc_t scaled[kUnit];
#pragma unroll
        for (int i = 0; i < kUnit; ++i) scaled[i] = values[i] * arguments.column_factor;
        store_vec(target, scaled);
      } else {
        store_vec(target, values);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kUnit; ++i)
        if (i < count) target[i] = values[i];
    }
  };
  const auto sum_of = [&](int element) -> acc_t& {
    return columns.sums[element / (kVecs * kVec)][element / kVec % kVecs][element % kVec];
  };
  const int64_t cluster = blockIdx.x / slice.blocks;
  acc_t* const partial = partial_at(cluster);
  if constexpr (kAdders == 1) {
    if (!adds) return;
#pragma unroll
    for (int element = 0; element < kElements; element += kUnit) {
      acc_t values[kUnit];
#pragma unroll
      for (int i = 0; i < kUnit; ++i) values[i] = sum_of(element + i);
      write(partial, element, values);
    }
  } else {
    // Elements of neighbouring threads are adjacent
    acc_t* left = reinterpret_cast<acc_t*>(ring_memory) + threads.rank;
    if (interleaves ? threadIdx.x < kThreads * kRows : adds) {
      const int at = interleaves ? threads.group : adder;
#pragma unroll
      for (int element = 0; element < kElements; ++element)
        left[(at * kElements + element) * kThreads] = sum_of(element);
    }
    __syncthreads();
    if (kForRacecheck) __syncthreads();
    if (!adds) return;
#pragma unroll 1
    for (int element = adder * kUnit; element < kElements; element += kAdders * kUnit) {
      acc_t total[kUnit] = {};
      if (interleaves) {
#pragma unroll 1
        for (int row = 0; row < kRows; ++row) {
#pragma unroll
          for (int i = 0; i < kUnit; ++i) total[i] = left[(row * kElements + element + i) * kThreads];
          write(partial_at(cluster * kRows + row), element, total);
        }
        continue;
      }
#pragma unroll
      for (int row = 0; row < kAdders; ++row)
#pragma unroll
        for (int i = 0; i < kUnit; ++i) total[i] += left[(row * kElements + element + i) * kThreads];
      write(partial, element, total);
    }
  }
}

// Weight is of grad_input's type or fp32, a run-time value: weight is read once a block.
template <typename scalar_t, typename Plan, Family family>
__global__ void __launch_bounds__(kFusedThreads<Plan>, Plan::kBlocksPerSm)
    norm_backward_fused_kernel(const __grid_constant__ KernelBackwardParams params,
                               const __grid_constant__ FusedArguments arguments) {
  using acc_t = acc_type<scalar_t>;
  using Row = RowThreads<Plan::kThreads, Plan::kRows>;
  using Exchange = SumExchange<Plan, acc_t>;
  extern __shared__ __align__(128) uint4 ring_memory[];
  __shared__ RingBarriers<scalar_t, Plan> ring_barriers;
  // Scratch of row_sum(); plans that finish one row behind use SumExchange
  __shared__ Pair<acc_t> scratch[Plan::kOneBehind ? 1 : kMaxDepth][Plan::kRows * Row::kWarps];
  __shared__ typename Exchange::Shared exchange_shared;

  // The rows and columns of this block
  const bool is_narrow = sizeof(scalar_t) == 4 && arguments.stages.grad_output_dtype != DType::kFloat32;
  const int set = is_narrow || Plan::kVec * sizeof(scalar_t) == 8 ? 2 : 1;
  const Slice slice = Slice::of<Plan>(params, set);
  if (kBulk && threadIdx.x == 0) ring_barriers.init();
  Exchange exchange(exchange_shared, slice, min(BlockThreads<scalar_t, Plan>(slice).group, Plan::kRows - 1));
  if (kForRacecheck) __syncthreads();
  if constexpr (Plan::kClusters) {
    cluster_sync();
  } else {
    __syncthreads();
  }

  ColumnSums<scalar_t, Plan, family> columns;
  with_work<scalar_t, Plan, family>(arguments.stages, [&](auto work) {
    using Chosen = decltype(work);
    const BlockThreads<scalar_t, Plan, kByWarp<Plan, Chosen>> threads(slice);
    RowRing<scalar_t, Plan, Chosen> ring(ring_memory, ring_barriers, slice, arguments);
    if (threads.produces()) {
      ring.produce(params, arguments.stages, slice, slice.first_row, INT_MAX);
    } else {
      const unsigned kept = shared_address(ring_memory) + arguments.depth * ring.slot_bytes;
      FusedRows<scalar_t, Plan, family, Chosen> rows{params, arguments, slice, threads, ring, columns, kept};
      rows.run(exchange, scratch);
    }
  });

  if (kForRacecheck) __syncthreads();
  if constexpr (Plan::kClusters) {
    cluster_sync();  // no block exits while others may write to its shared memory
  } else {
    __syncthreads();
  }
  if (!params.grad_weight && !params.grad_bias && !params.grad_gate) return;
  write_partial<scalar_t, Plan, family>(params, arguments, slice, columns, ring_memory);
}

// ---- host ----------------------------------------------------------------------------------------------------------

// The occupancy of a fused kernel: the depth of the ring, at most the plan's, and the number of resident clusters.
// Queried once a device, cluster size and kind of ring.
struct Residence {
  int depth = 0, clusters = 0;
};
constexpr int kRingKinds = 6;  // 2 to 4 tensors, with gradients of z's type or narrower

template <typename scalar_t, typename Plan, Family family>
cudaError_t residence_of(const DeviceFacts& facts, int cluster, int slot_bytes, int ring_kind, Residence& residence) {
  constexpr int kDevices = 16;
  const int device = facts.device;
  static std::atomic<uint64_t> known[kDevices][kMaxCluster + 1][kRingKinds];
  static OncePerDevice allowed;
  const auto kernel = norm_backward_fused_kernel<scalar_t, Plan, family>;
  const uint64_t before = device < kDevices ? known[device][cluster][ring_kind].load(std::memory_order_relaxed) : 0;
  if (before > 0) {
    residence = {static_cast<int>(before >> 32), static_cast<int>(before & 0xffffffffu)};
    return cudaSuccess;
  }
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) return error;
  const int room = facts.shared_bytes - static_cast<int>(attributes.sharedSizeBytes);
  constexpr int kKept = kKeptBytes<scalar_t, Plan, family>;
  const int depth = std::min(kFusedDepth<Plan>, (room - kKept) / slot_bytes);
  // Consumers that take turns as producer refill a slot kLag behind
  using Ring = RowRing<scalar_t, Plan, Work<scalar_t, Path::kPlain>>;
  static_assert(Plan::kHasProducer || 2 + Plan::kOneBehind > Ring::kLag, "a slot would wait for itself");
  if (depth < 2 + Plan::kOneBehind) return cudaSuccess;
  const int bytes = depth * slot_bytes + kKept;
  // The largest of all kinds of ring: a later setting would replace this one
  error = allowed.run(device, [&] { return allow_more(kernel, room, Plan::kClusters ? facts.max_cluster : 1); });
  if (error != cudaSuccess) return error;
  int clusters = 0;
  if (cluster > 1) {
    const ClusterLaunch one(cluster, kFusedThreads<Plan>, bytes, cluster);
    error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &one.config);
  } else {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&clusters, kernel, kFusedThreads<Plan>, bytes);
    clusters = std::min(clusters, Plan::kBlocksPerSm) * facts.multiprocessors;
  }
  if (error != cudaSuccess) return error;
  clusters = std::min(clusters, kMostClusters);
  residence = {depth, clusters};
  if (device < kDevices)
    known[device][cluster][ring_kind].store(static_cast<uint64_t>(depth) << 32 | static_cast<uint32_t>(clusters),
                                            std::memory_order_relaxed);
  return cudaSuccess;
}

// The number of partial sums of a launch: one for each cluster, of which all segments of the rows have the same number,
// at least one. With interleaved segments one for each group of threads, and as many clusters as make row_step a
// multiple of the segments; 0 if that were too many.
template <typename Plan>
int partial_sums(const KernelBackwardParams& params, const Residence& residence) {
  const int segments = std::max(params.segments, 1);
  if (params.interleaves) {
    if (!kMayInterleave<Plan>) return 0;
    const int64_t unit = segments / std::gcd(segments, Plan::kRows);
    if (unit > kMostInterleavedWaves * residence.clusters) return 0;
    const int64_t clusters = std::min<int64_t>(residence.clusters, (params.rows + Plan::kRows - 1) / Plan::kRows);
    return static_cast<int>(std::max<int64_t>(clusters / unit, 1) * unit * Plan::kRows);
  }
  const int64_t iterations = (params.rows / segments + Plan::kRows - 1) / Plan::kRows;
  return static_cast<int>(std::clamp<int64_t>(residence.clusters / segments, 1, iterations)) * segments;
}

template <typename scalar_t>
FusedArguments fused_arguments(const KernelBackwardParams& params, const GradStages& stages) {
  FusedArguments arguments{};
  arguments.stages = stages;
  if (!params.grad_input && !stages.grad_residual && !stages.gate)
    arguments.stages.grad_residual_out = nullptr;  // it would not be read
  if (stages.row_gate.gate) {
    arguments.stages.grad_residual_out = stages.row_gate.gate;
    arguments.stages.grad_residual_out_strides = stages.row_gate.strides;
    arguments.stages.grad_residual = stages.grad_row_gate;
  }
  arguments.inverse_n = inverse_of<float>(params.hidden_size);
  const Dropout& dropout = stages.epilogue.dropout;
  arguments.norm_scale = slope_scale<sizeof(scalar_t) == 2>(stages.epilogue.activation);
  arguments.column_factor = dropout.philox ? static_cast<float>(dropout.scale) : 1;
  arguments.wdy_factor = arguments.column_factor / arguments.norm_scale;
  arguments.sum_factor = -arguments.wdy_factor * arguments.inverse_n;
  return arguments;
}

template <typename scalar_t, typename Plan, Family family>
cudaError_t fused_by_plan(const KernelBackwardParams& params, const GradStages& stages, FusedCall& call) {
  DeviceFacts facts;
  cudaError_t error = device_facts(facts);
  if (error != cudaSuccess) return error;
  const int64_t vec_count = vecs_of<Plan::kVec>(params.hidden_size);
  // Rows longer than a block holds go to a cluster, whatever the number of rows, so that the order of a row's sums is
  // fixed
  const int cluster = cluster_for<Plan>(vec_count, facts.max_cluster);
  if (vec_count > static_cast<int64_t>(cluster) * Plan::kThreads * Plan::kVecs) return cudaSuccess;
  if (!stages.any()) {
    const bool small = params.rows <= kSplitMaxRows && params.rows * params.hidden_size <= kSplitMaxElements;
    const bool wanted = params.segments > 1 ? cluster > 1 || !Plan::kClusters
                        : Plan::kClusters   ? cluster > 1 && !(small && kSplitClusters<Plan>)
                                            : (params.grad_weight || params.grad_bias) && !small;
    if (!params.grad_input || !wanted) return cudaSuccess;
  }
  int slot_bytes = 0, tensors = 0;
  with_work<scalar_t, Plan, family>(stages, [&](auto work) {
    using Chosen = decltype(work);
    tensors = Chosen::kHasEpilogue && !stages.has_load_stage ? 2 : Chosen::kTensors;
    slot_bytes = RowRing<scalar_t, Plan, Chosen>::slot_bytes_of(tensors);
  });
  if (slot_bytes == 0) return cudaSuccess;  // the plan has no such path
  const int ring_kind = tensors - 2 + (stages.grad_output_dtype == params.x_dtype ? 0 : 3);
  Residence residence;
  error = residence_of<scalar_t, Plan, family>(facts, cluster, slot_bytes, ring_kind, residence);
  if (error != cudaSuccess || residence.clusters == 0) return error;
  call.running = partial_sums<Plan>(params, residence);
  if (call.running == 0 || !call.launches) return cudaSuccess;
  FusedArguments arguments = fused_arguments<scalar_t>(params, stages);
  const int64_t bytes = Plan::kRows * params.hidden_size * tensors * static_cast<int64_t>(sizeof(scalar_t));
  arguments.depth = bytes > kMostThirdSlotBytes<Plan> ? 2 : residence.depth;
  arguments.slot_bytes = slot_bytes;
  const int64_t clusters = params.interleaves ? call.running / Plan::kRows : call.running;
  const ClusterLaunch persistent(clusters * cluster, kFusedThreads<Plan>,
                                 arguments.depth * slot_bytes + kKeptBytes<scalar_t, Plan, family>, cluster,
                                 call.stream);
  return cudaLaunchKernelEx(&persistent.config, norm_backward_fused_kernel<scalar_t, Plan, family>, params, arguments);
}

}  // namespace

template <typename scalar_t>
cudaError_t backward_fused(const KernelBackwardParams& params, const GradStages& stages, FusedCall& call) {
  call.running = 0;
  const bool is_narrow = stages.grad_output_dtype != params.x_dtype, has_epilogue = stages.epilogue.any();
  const bool has_row_gate = stages.row_gate.gate;
  const bool is_ragged = params.hidden_size % (16 / dtype_bytes(stages.grad_output_dtype)) != 0;
  if (params.rows > kFusedMaxRows || params.segments > kMaxFusedSegments ||
      stages.grad_input_dtype != stages.grad_output_dtype ||
      (stages.grad_residual && stages.grad_residual_dtype != params.x_dtype) ||
      (is_narrow && (sizeof(scalar_t) != 4 || dtype_bytes(stages.grad_output_dtype) != 2 || !stages.has_load_stage)) ||
      (has_row_gate && is_narrow) || (has_epilogue && (is_narrow || stages.gate || params.segments > 1)) ||
      (stages.from_y && params.hidden_size > kFromYColumns) || (stages.gate && stages.dropout.philox) ||
      (is_ragged &&
       (is_narrow || stages.gate || stages.from_y || stages.dropout.philox || has_epilogue || has_row_gate)))
    return cudaSuccess;
  const auto launch = [&](auto family, auto ladder) {
    DeviceFacts facts;
    const cudaError_t error = device_facts(facts);
    if (error != cudaSuccess) return error;
    return pick_plan(ladder, params.hidden_size, facts.max_cluster, [&](auto plan) {
      return fused_by_plan<scalar_t, decltype(plan), decltype(family)::value>(params, stages, call);
    });
  };
  const std::integral_constant<Family, Family::kLoad> load;
  if (is_ragged) return launch(load, typename RaggedBackwardLadder<scalar_t>::type{});
  if (stages.gate)
    return launch(std::integral_constant<Family, Family::kGate>{}, typename GateGradLadder<scalar_t>::type{});
  if (has_row_gate)
    return launch(std::integral_constant<Family, Family::kRowGate>{}, typename RowGateGradLadder<scalar_t>::type{});
  if (has_epilogue)
    return launch(std::integral_constant<Family, Family::kEpilogue>{}, typename EpilogueGradLadder<scalar_t>::type{});
  if (stages.has_load_stage) return launch(load, typename LoadGradLadder<scalar_t>::type{});
  return launch(load, typename BackwardLadder<scalar_t>::type{});
}

}  // namespace fused_layernorm
