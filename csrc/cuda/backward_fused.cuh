// Strategy "fused" of backward: persistent blocks iterate over rows. norm_backward.cu has the formulas; row_ring.cuh
// moves the data.
//
// A kernel is a type, a shape and a family, which decide its registers. Everything else is a run-time value. A call
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
// norm. kWords: as kLoad, for ragged rows of 16-bit elements that all are whole words. H200, us by elements and by
// words: bf16 LayerNorm 66 columns 318, 246; 770 244, 214; 4098 219, 212; 12346 257, 214; with a residual 130 349, 296.
// Kernels of their own: as a path of the same kernel, odd lengths took 1 to 4 us more a launch. Chosen row by row, for
// every second row of odd lengths, the code of both ways ran at once, and 4097 columns took 262 us for 219.
enum class Family { kLoad, kGate, kEpilogue, kRowGate, kWords };

// Whether a ladder has a plan of this shape. A kernel has the paths of the ladders that do.
template <typename Shape, typename... Plans>
constexpr bool has_shape(Ladder<Plans...>) {
  return (std::is_same<Shape, typename Plans::Shape>::value || ...);
}
template <typename scalar_t, typename Shape>
constexpr bool kTakesPlain =
    kReadsElements<Shape> || Shape::kGlobalExchange || has_shape<Shape>(typename BackwardLadder<scalar_t>::type{});
// The path from y keeps bias in registers, which ragged rows do not leave.
constexpr int64_t kFromYColumns = 65536;
template <typename scalar_t, typename Shape>
constexpr bool kTakesFromY = kTakesPlain<scalar_t, Shape> && !kReadsElements<Shape> && !Shape::kGlobalExchange;
// Whether that bias is widened: there is room beside up to two vectors a thread. Else it has the type of y.
template <typename Shape>
constexpr bool kWidensBiasOfY = Shape::kVecs <= 2;
template <typename scalar_t, typename Shape>
constexpr bool kTakesLoad = kReadsElements<Shape> || has_shape<Shape>(typename LoadGradLadder<scalar_t>::type{});

// Calls f(Work) for the path of a call.
template <typename scalar_t, typename Shape, Family family, typename F>
__host__ __device__ __forceinline__ void with_work(const GradStages& stages, F&& f) {
  const auto with_grad = [&](auto path) {
    constexpr Path kPath = decltype(path)::value;
    if constexpr (sizeof(scalar_t) == 4 && !kReadsElements<Shape>) {
      if (stages.grad_output_dtype == DType::kFloat16) return f(Work<__half, kPath>{});
      if (stages.grad_output_dtype == DType::kBFloat16) return f(Work<__nv_bfloat16, kPath>{});
    }
    f(Work<scalar_t, kPath>{});
  };
  if constexpr (family == Family::kWords) {
    if (stages.has_load_stage) return f(Work<scalar_t, Path::kLoad, true>{});
    f(Work<scalar_t, Path::kPlain, true>{});
  } else if constexpr (family == Family::kEpilogue) {
    f(Work<scalar_t, Path::kEpilogue>{});
  } else if constexpr (family == Family::kRowGate) {
    if (stages.row_gate.gates_y) return f(Work<scalar_t, Path::kRowGateOfY>{});
    f(Work<scalar_t, Path::kRowGateOfX>{});
  } else if constexpr (family == Family::kGate) {
    with_grad(std::integral_constant<Path, Path::kGate>{});
  } else {
    if constexpr (kTakesLoad<scalar_t, Shape>) {
      if (stages.has_load_stage) return with_grad(std::integral_constant<Path, Path::kLoad>{});
    }
    if constexpr (kTakesFromY<scalar_t, Shape>) {
      if (stages.from_y) return f(Work<scalar_t, Path::kFromY>{});
    }
    if constexpr (kTakesPlain<scalar_t, Shape>) f(Work<scalar_t, Path::kPlain>{});
  }
}

// Shared memory behind the ring: with an epilogue, wdy of two rows.
template <typename scalar_t, typename Shape, Family family>
constexpr int kKeptBytes =
    family == Family::kEpilogue && Shape::kOneBehind
        ? 2 * Shape::kConsumers * Shape::kVecs * Shape::kVec * static_cast<int>(sizeof(acc_type<scalar_t>))
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
template <typename scalar_t, typename Shape, Family family>
struct ColumnSums {
  static constexpr int kSums = family == Family::kGate ? 3 : 2;
  acc_type<scalar_t> sums[kSums][Shape::kVecs][Shape::kVec];
};

// The columns of a thread: of lane `lane` of the row's warp `warp`, or where several rows share a warp of its lanes.
template <typename scalar_t, typename Shape>
struct ThreadColumns {
  static constexpr int kVecs = Shape::kVecs, kVec = Shape::kVec, kLanes = Shape::kLanes;
  static constexpr bool kAligned = kVec * sizeof(scalar_t) % 8 == 0;

  int own;                                             // the first vector of this thread in the slice
  RegisterSlots<kVecs, kVec, kLanes, !kAligned> held;  // of a warp's part of the slice

  __device__ ThreadColumns(const Slice& slice, const FusedArguments& arguments, int warp, int lane) : held(0, 0) {
    const int first = warp * arguments.warp_slice;
    const bool is_last = Shape::kOneWarp || warp + 1 == arguments.threads / 32;
    own = first + lane;
    const int left = max(slice.elements - first * kVec, 0);
    held = RegisterSlots<kVecs, kVec, kLanes, !kAligned>(is_last ? left : min(left, arguments.warp_slice * kVec),
                                                         lane * kVec);
  }

  __device__ int elements_of(int v) const { return held.count(v); }
  __device__ int vec_of(int v) const { return own + held.index(v) * kLanes; }
  __device__ int column_of(int v) const { return vec_of(v) * kVec; }
};

// The row and the columns of this thread.
template <typename scalar_t, typename Shape>
struct BlockThreads : ThreadColumns<scalar_t, Shape> {
  static constexpr int kLanes = Shape::kLanes;

  // The warp of the block, and where a row has a warp the row of the block: provably uniform in a warp, so that
  // shuffles need no convergence code, 15 instructions a row
  int warp, group;

  __device__ BlockThreads(const Slice& slice, const FusedArguments& arguments)
      : BlockThreads(slice, arguments, __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0)) {}

  // A block's last warp is the producer; before it may be the warps of a global exchange.
  __device__ bool produces() const {
    return Shape::kHasProducer && warp >= consumer_warps<Shape>() + Shape::kExchangers;
  }
  __device__ bool exchanges() const { return Shape::kGlobalExchange && warp >= consumer_warps<Shape>(); }
  __device__ int warp_of_row(const FusedArguments& arguments) const { return warp_of_row(arguments, warp, group); }

 private:
  __device__ static int group_of(const FusedArguments& arguments, int warp) {
    if (!Shape::kOneWarp) return warp * arguments.inverse_of_warps >> 10;
    return kLanes < 32 ? static_cast<int>(threadIdx.x) / kLanes : warp;
  }
  __device__ static int warp_of_row(const FusedArguments& arguments, int warp, int group) {
    return Shape::kOneWarp ? 0 : warp - group * (arguments.threads / 32);
  }
  __device__ BlockThreads(const Slice& slice, const FusedArguments& arguments, int warp)
      : ThreadColumns<scalar_t, Shape>(slice, arguments, warp_of_row(arguments, warp, group_of(arguments, warp)),
                                       static_cast<int>(threadIdx.x) % kLanes),
        warp(warp),
        group(group_of(arguments, warp)) {}
};

// The work of a consumer thread on its rows.
template <typename scalar_t, typename Shape, Family family, typename Work>
struct FusedRows {
  using acc_t = acc_type<scalar_t>;
  using grad_t = typename Work::grad_t;
  using Ring = RowRing<scalar_t, Shape, Work>;
  using Exchange = SumExchange<Shape, acc_t>;
  using Threads = BlockThreads<scalar_t, Shape>;
  using Stats = RowStats<scalar_t>;
  using XVec = RawVec<scalar_t, Shape::kVec>;
  using GradVec = RawVec<grad_t, Shape::kVec>;
  using Scratch = Pair<acc_t> (*)[Shape::kConsumers / 32];  // [slots of the ring][warps]
  static constexpr int kLanes = Shape::kLanes, kVecs = Shape::kVecs, kVec = Shape::kVec;
  static constexpr bool kAligned = Ring::kAligned;
  static constexpr bool kHasEpilogue = Work::kHasEpilogue;
  // Whether a row's grad_residual_out is kept in registers; else it is read from the ring, for lack of registers
  static constexpr bool kHoldsResidualGrad = Work::kAlwaysAdds && kAligned;
  // bias in registers
  static constexpr bool kWideBias = kHasEpilogue || (Work::kFromY && kWidensBiasOfY<Shape>);
  static constexpr bool kNarrowBias = Work::kFromY && !kWideBias;
  // Whether a warp skips the last register slot if it is empty: in plans whose rows often end before it
  static constexpr bool kMayEnd = kAligned && !Shape::kOneWarp && (kHasEpilogue ? kVecs > 1 : kVecs == 3);

  const KernelBackwardParams& params;
  const FusedArguments& arguments;
  const Slice& slice;
  const Threads& threads;
  Ring& ring;
  ColumnSums<scalar_t, Shape, family>& columns;
  unsigned kept_memory;  // shared address of the memory behind the ring

  acc_t weight[kVecs][kVec], bias[kWideBias ? kVecs : 1][kVec], gate[Work::kHasGate ? kVecs : 1][kVec];
  GradVec narrow_bias[kNarrowBias ? kVecs : 1];
  grad_t* grad_input;
  scalar_t* grad_residual;

  // All loads are in flight at once, by short code, which comes from memory too: by a branch for each vector the first
  // row of a launch was read 2 to 4 us later (H200, bf16).
  __device__ __forceinline__ void load_parameters() {
    const int64_t first = slice.parameters_of<Shape>(params, threads.group);
    const auto load_raw = [&](auto& raw, const auto* parameter) {
#pragma unroll
      for (int v = 0; v < kVecs; ++v)
        raw[v] = load_some<std::decay_t<decltype(*parameter)>, kVec>(parameter + first + threads.column_of(v),
                                                                     parameter ? threads.elements_of(v) : 0);
    };
    const auto load = [&](auto type, const void* parameter, auto& values) {
      using T = decltype(type);
      RawVec<T, kVec> raw[kVecs];
      load_raw(raw, static_cast<const T*>(parameter));
#pragma unroll
      for (int v = 0; v < kVecs; ++v) unpack(raw[v], values[v]);
    };
    const auto load_all = [&](auto type) {
      load(type, params.weight, weight);
      if constexpr (kWideBias) load(type, params.bias, bias);
    };
    if (sizeof(grad_t) == 2 && !kNarrowBias && params.weight_dtype == DType::kFloat32) {
      load_all(float{});
    } else {
      load_all(grad_t{});
    }
    if constexpr (kNarrowBias) load_raw(narrow_bias, static_cast<const grad_t*>(params.bias));
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      add_weight_offset(weight[v], params, threads.elements_of(v));
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
        if (threads.elements_of(v) > 0)
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
      if constexpr (!Shape::kOneBehind && kHasEpilogue) {
        int left = threads.held.left;  // hidden from the optimizer: derived values would be kept and spill
        asm volatile("" : "+r"(left));
        is_there = v * threads.held.kStep < left;
      }
      if (!kBulk && !is_there) return zero_vec<T, kVec>();
      return ring.template vec<T>(at, is_there ? threads.vec_of(v) : 0, kVec);
    } else {
      return ring.template vec<T>(at, threads.vec_of(v), whole ? kVec : threads.elements_of(v));
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
    constexpr int kRowsOfWarp = 32 / kLanes;
    if constexpr (kRowsOfWarp == 1) return 0xffffffffu;
    const int count = min(slice.end_row - (row - threads.group % kRowsOfWarp), kRowsOfWarp);
    return count == kRowsOfWarp ? 0xffffffffu : (1u << count * kLanes) - 1;
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
        int elements = threads.held.elements;
        asm volatile("" : "+r"(elements));  // hidden from the optimizer: the result would be kept and spill
        return (kVecs - 1) * threads.held.kStep < elements;
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
          kVecs == 2 && !kDrops && (Shape::kOneBehind || !std::is_same<scalar_t, __half>::value) ? 2 : 1;
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
#pragma unroll  // else the compiler adds grad to the sums behind the branches, and spills
        for (acc_t& sum : columns.sums[1][v]) asm volatile("" : "+f"(sum));
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

  // From the cache: a gated norm seldom has a bias, and its registers would cost warps.
  __device__ __forceinline__ void load_bias(acc_t (&values)[kVec], int v) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = 0;
    if (!params.bias || threads.elements_of(v) <= 0) return;
    const int64_t at = slice.parameters_of<Shape>(params, threads.group) + threads.column_of(v);
    if (sizeof(grad_t) == 2 && params.weight_dtype == DType::kFloat32) {
      unpack(load_vec<float, kVec>(static_cast<const float*>(params.bias) + at), values);
    } else {
      unpack(load_vec<grad_t, kVec>(static_cast<const grad_t*>(params.bias) + at), values);
    }
  }

  // From forward's y.
  __device__ __forceinline__ void subtract_bias(acc_t (&y)[kVec], int v) const {
    acc_t values[kVec];
    if constexpr (kNarrowBias) unpack(narrow_bias[v], values);
#pragma unroll
    for (int i = 0; i < kVec; ++i) y[i] = sub(y[i], kNarrowBias ? values[i] : bias[kWideBias ? v : 0][i]);
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
          subtract_bias(x, v);
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
      store_vec_if(threads.elements_of(v) > 0 && wanted, target + v * kLanes * kVec, values);
    } else if constexpr (Work::kByWords) {
      if (wanted && (whole || threads.elements_of(v) > 0))
        store_vec(target + threads.held.index(v) * kLanes * kVec, values);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        if (wanted && (whole || i < threads.elements_of(v)))
          target[threads.held.index(v) * kLanes * kVec + i] = narrow<T>(values[i]);
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
        subtract_bias(x, v);
#pragma unroll
        for (int i = 0; i < kVec; ++i) x[i] = mul(x[i], quick_inverse(weight[v][i]));
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
    grad_input += arguments.element_step;
    if constexpr (Work::kAlwaysAdds) grad_residual += arguments.element_step;
  }

  // The sums over the threads of a row. scratch: alternates, as row_sum() requires.
  __device__ __forceinline__ Pair<acc_t> sum_of_row(Pair<acc_t> sums, Pair<acc_t>* scratch) const {
    if constexpr (Shape::kOneWarp) {
      return row_sum<RowThreads<kLanes>>(sums, scratch);
    } else {
      scratch += threads.group * (arguments.threads / 32);
      share_in_row(sums, scratch, threads.group, threads.warp_of_row(arguments), arguments.threads);
      return sum_of_few_warps(scratch, arguments.threads / 32);
    }
  }

  // Load, reduce, store: the row stays in registers.
  __device__ __forceinline__ void walk_rows(Scratch scratch) {
    // Whether the slot is released only after the row is stored
    const bool keeps_slot = !kHoldsResidualGrad && Work::kMayAdd && arguments.stages.has_load_stage;
    const int group = threads.group;
#pragma unroll 1
    for (int row = slice.first_row + group; row < slice.end_row; row += arguments.row_step) {
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
        ring.release(params, arguments.stages, slice.first_col, slot, row + arguments.depth * arguments.row_step, group,
                     threads.own, threads.held.left, active_lanes(row));
      };
      if (!keeps_slot) release(ring.slot);
      ring.next_slot();
      const Pair<acc_t> sums =
          sum_of_row(add_up(
                         stats, row, [&](int v, auto) { return x_raw[v]; }, [&](int v, auto) { return grad_raw[v]; },
                         [&](int v, auto) { return residual_grad_raw[kHoldsResidualGrad ? v : 0]; },
                         [&](int v, const acc_t(&wdy)[kVec]) { kept[kHasEpilogue ? v : 0] = pack<acc_t>(wdy); }),
                     scratch[ring.slot]);
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

  // The all-reduce of one row overlaps the sums of the next, or of more; then the row is read from its slot again.
  // Nothing of it stays in registers, so that a thread can hold more columns. With an epilogue each thread keeps wdy of
  // two rows in shared memory behind the ring: written back into the slot, wdy would need a fence against the copy
  // engine in every iteration (H200, bf16, N = 4096, no activation: 246 us instead of 209).
  __device__ __forceinline__ void walk_rows_one_behind(Exchange& exchange) {
    const GradStages& stages = arguments.stages;
    const int rows_behind = Shape::kGlobalExchange ? arguments.behind : 1;
    const int group = threads.group, depth = arguments.depth;
    int row = slice.first_row + group;
    unsigned iteration = 0;
    [[maybe_unused]] int produces_in = threads.warp;  // iterations until this warp is the producer
    if (!Shape::kHasProducer && threads.warp == 0)
      Ring(ring).produce(params, stages, slice, slice.first_row, depth - Ring::kLag);
    [[maybe_unused]] const auto kept_at = [&](unsigned of_iteration, int v) {
      return kept_memory + threadIdx.x * 16 +
             (of_iteration % 2 * kVecs + v) * (Shape::kConsumers * kVec * static_cast<int>(sizeof(acc_t)));
    };
    const auto finish = [&] {
      const int behind = ring.slot_before(rows_behind), finished = row - rows_behind * arguments.row_step;
      const auto entry = ring.entry(params, behind, finished, group);
      store_row(
          ring.stats(params, entry, behind, finished, group), finished, exchange.collect(iteration - rows_behind),
          [&](int v, auto whole) { return read(entry.x, v, whole); },
          [&](int v, auto whole) {
            if constexpr (kHasEpilogue)
              return load_words<acc_t, kVec, Shape::kConsumers>(kept_at(iteration - 1, v));
            else
              return read_grad(entry.grad, v, whole);
          },
          [&](int v, auto whole) {
            return read_residual_grad(kHasEpilogue ? ring.more_entry(behind, group, 0) : entry.residual, v, whole);
          },
          [&](int v, auto whole) { return read_gated(entry.gated, v, whole); });
      ring.release(params, stages, slice.first_col, behind, finished + depth * arguments.row_step, group, threads.own,
                   threads.held.left, 0xffffffffu);
    };
    // More iterations finish the last rows with the same code where a second copy of that code spills or is
    // long; a second copy saves 6% of the instructions a row (128 x 2, with a load stage)
    constexpr bool kMore =
        Shape::kGlobalExchange || Work::kFromY || kHasEpilogue || Work::kHasRowGate || (Work::kMayAdd && !kAligned);
#pragma unroll 1
    for (; kMore || row < slice.end_row; row += arguments.row_step, ++iteration) {
      const bool has_row = !kMore || row < slice.end_row;
      if (has_row) {
        if constexpr (!Shape::kHasProducer) {
          if (produces_in == 0) {
            ring.produce_ahead(params, stages, slice, row - group);
            produces_in = consumer_warps<Shape>();
          }
          --produces_in;
        }
        ring.wait_full();
        const auto entry = ring.entry(params, ring.slot, row, group);
        const Stats stats = ring.stats(params, entry, ring.slot, row, group);
        const Pair<acc_t> sums = add_up(
            stats, row, [&](int v, auto whole) { return read(entry.x, v, whole); },
            [&](int v, auto whole) { return read_grad(entry.grad, v, whole); },
            [&](int v, auto whole) { return read_residual_grad(entry.residual, v, whole); },
            [&](int v, const acc_t(&wdy)[kVec]) {
              if constexpr (kHasEpilogue) store_words<Shape::kConsumers>(kept_at(iteration, v), wdy);
            });
        exchange.share(iteration, sums, threads.own == 0);
      }
      if (iteration >= rows_behind) finish();
      if (!has_row && row - (rows_behind - 1) * arguments.row_step >= slice.end_row) break;
      ring.next_slot();
    }
    if (!kMore && iteration > 0) finish();
  }

  __device__ __forceinline__ void run(Exchange& exchange, Scratch scratch) {
    load_parameters();
    if constexpr (Shape::kClusters) cluster_wait();
    ring.prefetch_first(params, arguments.stages, slice, threads.group, threads.own, threads.held.left);
    const int row = slice.first_row + threads.group;
    const int64_t own = static_cast<int64_t>(row) * params.hidden_size + slice.first_col + threads.own * kVec;
    grad_input = static_cast<grad_t*>(params.grad_input) + own;
    if constexpr (Work::kAlwaysAdds) grad_residual = static_cast<scalar_t*>(arguments.stages.grad_residual) + own;
    if constexpr (Shape::kOneBehind) {
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
// segments, each group of threads writes one. Within a warp by shuffles, then through the memory of the ring, from
// which all threads write adjacent words. (Straight from registers, the compiler made four-byte stores 32 bytes apart
// of them, which took 8 us of 1 x 131072, H200, bf16.) Called by all threads after the last use of the ring.
template <typename scalar_t, typename Shape, Family family>
__device__ __forceinline__ void write_partial(const KernelBackwardParams& params, const FusedArguments& arguments,
                                              const Slice& slice, ColumnSums<scalar_t, Shape, family>& columns,
                                              uint4* ring_memory) {
  using acc_t = acc_type<scalar_t>;
  using Threads = BlockThreads<scalar_t, Shape>;
  const Threads threads(slice, arguments);
  constexpr int kLanes = Shape::kLanes, kVecs = Shape::kVecs, kVec = Shape::kVec, kSums = columns.kSums;
  constexpr int kElements = kSums * kVecs * kVec, kUnit = kVec < 4 ? kVec : 4;  // of a thread; written together
  const int warps = consumer_warps<Shape>();
  const bool interleaves = kMayInterleave<Shape> && params.interleaves, by_warps = kLanes < 32 && !interleaves;
  if (by_warps && threads.warp < warps) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v)
#pragma unroll
      for (int i = 0; i < kVec; ++i)
#pragma unroll
        for (int offset = kLanes; offset < 32; offset *= 2)
#pragma unroll
          for (int sum = 0; sum < kSums; ++sum)
            columns.sums[sum][v][i] += __shfl_xor_sync(0xffffffffu, columns.sums[sum][v][i], offset);
  }
  // [parts][kElements][threads of a row], so that no two lanes write to the same bank
  const int parts = by_warps ? warps : arguments.rows, part = by_warps ? threads.warp : threads.group;
  const int row_threads = threads_of_row<Shape>(arguments);
  acc_t* const memory = reinterpret_cast<acc_t*>(ring_memory);
  if (threads.warp < warps && (!by_warps || threadIdx.x % 32 < kLanes)) {
    acc_t* const mine =
        memory + part * kElements * row_threads + (by_warps ? threadIdx.x % kLanes : threadIdx.x - part * row_threads);
#pragma unroll
    for (int element = 0; element < kElements; ++element)
      mine[element * row_threads] = columns.sums[element / (kVecs * kVec)][element / kVec % kVecs][element % kVec];
  }
  __syncthreads();
  if (kForRacecheck) __syncthreads();
  const int64_t first = index_of_blocks<Shape>(arguments) * int64_t{interleaves ? parts : 1};
  acc_t* const partial = static_cast<acc_t*>(params.workspace) + first * kSums * params.hidden_size + slice.first_col;
#pragma unroll 1
  for (int unit = threadIdx.x; unit < kElements / kUnit * row_threads; unit += blockDim.x) {
    const int i = unit % (kVec / kUnit) * kUnit, lane = unit / (kVec / kUnit) % kLanes,
              vec = unit / (kVec / kUnit * kLanes);
    const int v = vec % kVecs, sum = vec / kVecs % kSums, warp = vec / (kVecs * kSums);
    const ThreadColumns<scalar_t, Shape> of(slice, arguments, warp, lane);
    const acc_t* const found = memory + ((sum * kVecs + v) * kVec + i) * row_threads + warp * 32 + lane;
    acc_t total[kUnit] = {};
#pragma unroll 2
    for (int of_part = 0; of_part < parts; ++of_part) {
#pragma unroll
      for (int k = 0; k < kUnit; ++k)
        total[k] = (interleaves ? acc_t(0) : total[k]) + found[(of_part * kElements + k) * row_threads];
      if (!interleaves && of_part + 1 < parts) continue;
      if constexpr (family == Family::kEpilogue) {
#pragma unroll
        for (int k = 0; k < kUnit; ++k) total[k] *= arguments.column_factor;
      }
      const int index = (interleaves ? of_part : 0) * kSums + sum;
      store_some(partial + index * params.hidden_size + of.column_of(v) + i, total, of.elements_of(v) - i);
    }
  }
}

// Weight is of grad_input's type or fp32, a run-time value: weight is read once a block.
template <typename scalar_t, typename Shape, Family family>
__global__ void __launch_bounds__(Shape::kBlockThreads, Shape::kBlocksPerSm)
    norm_backward_fused_kernel(const __grid_constant__ KernelBackwardParams params,
                               const __grid_constant__ FusedArguments arguments) {
  using acc_t = acc_type<scalar_t>;
  using Exchange = SumExchange<Shape, acc_t>;
  extern __shared__ __align__(128) uint4 ring_memory[];
  __shared__ RingBarriers<scalar_t, Shape> ring_barriers;
  // Scratch of row_sum(); plans that finish one row behind use SumExchange
  __shared__ Pair<acc_t> scratch[Shape::kOneBehind ? 1 : Shape::kMaxDepth][Shape::kConsumers / 32];

  // The rows and columns of this block
  const Slice slice = Slice::of<Shape>(params, arguments);
  const BlockThreads<scalar_t, Shape> threads(slice, arguments);
  if (kBulk && threadIdx.x == 0) ring_barriers.init();
  Exchange exchange(ring_memory, arguments, slice, min(threads.group, arguments.rows - 1),
                    threads.warp_of_row(arguments));
  if (kForRacecheck) __syncthreads();
  __syncthreads();
  // The other blocks may be written to after cluster_wait(); loads begin before it
  if constexpr (Shape::kClusters) cluster_arrive();

  ColumnSums<scalar_t, Shape, family> columns;
  with_work<scalar_t, Shape, family>(arguments.stages, [&](auto work) {
    using Chosen = decltype(work);
    RowRing<scalar_t, Shape, Chosen> ring(ring_memory, ring_barriers, slice, arguments);
    if (threads.produces()) {
      ring.produce(params, arguments.stages, slice, slice.first_row, INT_MAX);
      if constexpr (Shape::kClusters) cluster_wait();
    } else if (threads.exchanges()) {
      exchange.exchange_rows(slice, threads.warp - consumer_warps<Shape>());
    } else {
      const unsigned kept = shared_address(ring_memory) + arguments.depth * arguments.slot_bytes;
      FusedRows<scalar_t, Shape, family, Chosen> rows{params, arguments, slice, threads, ring, columns, kept};
      rows.run(exchange, scratch);
    }
  });

  if (kForRacecheck) __syncthreads();
  if constexpr (Shape::kClusters) {
    cluster_sync();  // no block exits while others may write to its shared memory
  } else {
    __syncthreads();
  }
  if (!params.grad_weight && !params.grad_bias && !params.grad_gate) return;
  write_partial<scalar_t, Shape, family>(params, arguments, slice, columns, ring_memory);
}

// ---- host ----------------------------------------------------------------------------------------------------------

// What is known of a fused kernel on a device, queried once: its own shared memory; and the number of clusters of each
// size that run at once with 1, 2, ... blocks an SM.
struct KernelFacts {
  std::atomic<int> own_bytes{0};
  std::atomic<int> clusters[3][kMaxCluster + 1]{};
};

template <typename scalar_t, typename Shape, Family family>
cudaError_t kernel_facts(const DeviceFacts& device, KernelFacts*& facts) {
  constexpr int kDevices = 64;
  static KernelFacts known[kDevices];
  static OncePerDevice asked;
  facts = &known[device.device % kDevices];
  return asked.run(device.device, [&] {
    const auto kernel = norm_backward_fused_kernel<scalar_t, Shape, family>;
    cudaFuncAttributes attributes{};
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
    facts->own_bytes = static_cast<int>(attributes.sharedSizeBytes);
    return allow_more(kernel, device.shared_bytes - facts->own_bytes, Shape::kClusters ? device.max_cluster : 1);
  });
}

// The number of partial sums of a launch: one for each cluster, of which all segments of the rows have the same number,
// at least one. With interleaved segments one for each group of threads, and as many clusters as make row_step a
// multiple of the segments; 0 if that were too many. rows: of a block; resident: clusters that run at once.
template <typename Shape>
int partial_sums(const KernelBackwardParams& params, int rows, int resident) {
  const int segments = std::max(params.segments, 1);
  if (params.interleaves) {
    if (!kMayInterleave<Shape>) return 0;
    const int64_t unit = segments / std::gcd(segments, rows);
    if (unit > kMostInterleavedWaves * resident) return 0;
    const int64_t clusters = std::min<int64_t>(resident, (params.rows + rows - 1) / rows);
    return static_cast<int>(std::max<int64_t>(clusters / unit, 1) * unit * rows);
  }
  const int64_t iterations = (params.rows / segments + rows - 1) / rows;
  return static_cast<int>(std::clamp<int64_t>(resident / segments, 1, iterations)) * segments;
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

// Whether memory decides how long rows take, not instructions.
constexpr bool memory_decides(Family family) {
  return family == Family::kLoad || family == Family::kGate || family == Family::kWords;
}

template <typename scalar_t, typename Shape, Family family>
cudaError_t fused_by_shape(const KernelBackwardParams& params, const GradStages& stages, const DeviceFacts& device,
                           const FusedRowsPlan& plan, FusedCall& call) {
  using acc_t = acc_type<scalar_t>;
  using Exchange = SumExchange<Shape, acc_t>;
  FusedArguments arguments = fused_arguments<scalar_t>(params, stages);
  arguments.cluster = plan.cluster;
  arguments.threads = plan.threads;
  arguments.rows = plan.rows;
  arguments.slice = plan.slice * Shape::kVec;
  arguments.warp_slice = plan.warp_slice;
  arguments.inverse_of_warps = (1024 * 32 - 1) / plan.threads + 1;
  int tensors = 0;
  with_work<scalar_t, Shape, family>(stages, [&](auto work) {
    using Chosen = decltype(work);
    tensors = Chosen::kHasEpilogue && !stages.has_load_stage ? 2 : Chosen::kTensors;
    arguments.slot_bytes = RowRing<scalar_t, Shape, Chosen>::slot_bytes_of(tensors, arguments.slice, plan.rows);
  });
  if (tensors == 0) return cudaSuccess;  // the kernel has no such path
  if (stages.from_y && !kWidensBiasOfY<Shape> && params.weight_dtype != params.x_dtype) return cudaSuccess;
  KernelFacts* facts = nullptr;
  cudaError_t error = kernel_facts<scalar_t, Shape, family>(device, facts);
  if (error != cudaSuccess) return error;

  // Shared memory: the ring, wdy of two rows, the exchange. write_partial() uses it from its beginning
  constexpr int kKept = kKeptBytes<scalar_t, Shape, family>, kSums = ColumnSums<scalar_t, Shape, family>::kSums;
  const int consumers = plan.threads * plan.rows;
  arguments.sums = (Shape::kGlobalExchange ? 1 : plan.cluster) * plan.threads / 32;
  const int more = kKept + Exchange::bytes_of(arguments.sums, plan.rows);
  const int64_t iteration_bytes = int64_t{plan.rows} * arguments.slice * element_bytes(params, stages);
  const int most_depth = kFusedDepth<Shape> - (iteration_bytes > most_deep_slot_bytes<Shape>(memory_decides(family)));
  // Consumers that take turns as producer refill a slot kLag behind
  constexpr int kLeastDepth = Shape::kGlobalExchange ? kFilledSlots + 1 : 2 + Shape::kOneBehind;
  using Ring = RowRing<scalar_t, Shape, Work<scalar_t, Path::kPlain>>;
  static_assert(Shape::kHasProducer || kLeastDepth > Ring::kLag, "a slot would wait for itself");
  int blocks = Shape::kBlocksPerSm + 1, room = 0;
  do {
    --blocks;
    room = std::min(device.shared_bytes, device.sm_shared_bytes / blocks - device.reserved_shared_bytes) -
           facts->own_bytes;
    arguments.depth = std::min(most_depth, (room - more) / arguments.slot_bytes);
  } while (arguments.depth < kLeastDepth && blocks > 1);
  arguments.behind = arguments.depth - kFilledSlots;
  arguments.exchange = arguments.depth * arguments.slot_bytes + kKept;
  const int shared_bytes = std::max(arguments.depth * arguments.slot_bytes + more,
                                    consumers * kSums * Shape::kVecs * Shape::kVec * static_cast<int>(sizeof(acc_t)));
  if (arguments.depth < kLeastDepth || shared_bytes > room) return cudaSuccess;

  const auto kernel = norm_backward_fused_kernel<scalar_t, Shape, family>;
  int resident = blocks * device.multiprocessors;
  if (Shape::kGlobalExchange) {
    resident /= plan.cluster;
  } else if (plan.cluster > 1) {
    std::atomic<int>& known = facts->clusters[blocks - 1][plan.cluster];
    resident = known;
    if (resident == 0) {
      const ClusterLaunch one(plan.cluster, Shape::kBlockThreads, room, plan.cluster);
      error = cudaOccupancyMaxActiveClusters(&resident, kernel, &one.config);
      if (error != cudaSuccess || resident == 0) return error;
      known = resident;
    }
  }
  call.running = partial_sums<Shape>(params, plan.rows, std::min(resident, kMostClusters));
  call.exchange_bytes = Shape::kGlobalExchange ? params.rows * plan.cluster * static_cast<int>(sizeof(BlockSums)) : 0;
  if (call.running == 0 || !call.launches) return cudaSuccess;
  const int64_t clusters = params.interleaves ? call.running / plan.rows : call.running;
  arguments.row_step = static_cast<int>(clusters / (params.interleaves ? 1 : std::max(params.segments, 1))) * plan.rows;
  arguments.element_step = static_cast<unsigned>(arguments.row_step) * static_cast<unsigned>(params.hidden_size);
  if (Shape::kGlobalExchange) {  // behind the partial sums
    const bool has_partials = params.grad_weight || params.grad_bias;
    arguments.block_sums = reinterpret_cast<BlockSums*>(static_cast<acc_t*>(params.workspace) +
                                                        (has_partials ? call.running * kSums * params.hidden_size : 0));
    error = cudaMemsetAsync(arguments.block_sums, 0, call.exchange_bytes, call.stream);
    if (error != cudaSuccess) return error;
  }
  const ClusterLaunch persistent(clusters * plan.cluster, consumers + 32 * (Shape::kHasProducer + Shape::kExchangers),
                                 shared_bytes, plan.cluster, call.stream);
  return cudaLaunchKernelEx(&persistent.config, kernel, params, arguments);
}

template <typename scalar_t, typename Plan, Family family>
cudaError_t fused_by_plan(const KernelBackwardParams& params, const GradStages& stages, const DeviceFacts& device,
                          FusedCall& call) {
  // Slices are whole 16-byte words of narrower tensors too, and with vectors of 8 bytes
  const bool is_narrow = stages.grad_output_dtype != params.x_dtype;
  const int64_t vectors = vecs_of<Plan::kVec>(params.hidden_size);
  using Shape = typename Plan::Shape;
  const FusedRowsPlan plan(Plan{}, vectors, is_narrow || Plan::kVec * sizeof(scalar_t) == 8 ? 2 : 1,
                           Plan::kGlobalExchange ? device.multiprocessors : device.max_cluster,
                           memory_decides(family) ? limiting_bytes<Plan>(params, stages) : 0);
  // Rows longer than a block holds go to a cluster, whatever the number of rows, so that the order of a row's sums is
  // fixed
  if (vectors > static_cast<int64_t>(plan.cluster) * Plan::kThreads * Plan::kVecs) return cudaSuccess;
  const bool is_small = small_problem<scalar_t, Plan>(stages.any()).has(params.rows, params.hidden_size) &&
                        plan.cluster * plan.threads <= kSplitThreads<Plan>;
  if (stages.any()) {
    if (is_small && takes_split(params, stages)) return cudaSuccess;
  } else {
    const bool wanted = params.segments > 1 ? plan.cluster > 1 || !Plan::kClusters
                        : Plan::kClusters   ? plan.cluster > 1 && !is_small
                                            : (params.grad_weight || params.grad_bias) && !is_small;
    if (!params.grad_input || !wanted) return cudaSuccess;
  }
  return fused_by_shape<scalar_t, Shape, family>(params, stages, device, plan, call);
}

// Whether all rows, of results too, are whole words of two 16-bit elements, and begin at words.
bool takes_words(const KernelBackwardParams& params, const GradStages& stages) {
  const auto at_words = [](const void* rows, const RowStrides& strides = {}) {
    return !rows ||
           (reinterpret_cast<uintptr_t>(rows) % 4 == 0 && strides.row_stride % 2 == 0 && strides.group_stride % 2 == 0);
  };
  return params.hidden_size % 2 == 0 && at_words(params.x, params.x_strides) &&
         at_words(params.grad_output, params.grad_output_strides) &&
         at_words(stages.grad_residual_out, stages.grad_residual_out_strides) && at_words(params.grad_input) &&
         at_words(stages.grad_residual);
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
  DeviceFacts device;
  const cudaError_t error = device_facts(device);
  if (error != cudaSuccess) return error;
  const auto launch = [&](auto family, auto ladder) {
    return pick_plan(ladder, params.hidden_size, device.max_cluster, [&](auto plan) {
      return fused_by_plan<scalar_t, decltype(plan), decltype(family)::value>(params, stages, device, call);
    });
  };
  const std::integral_constant<Family, Family::kLoad> load;
  if (params.hidden_size > kClusterColumns) {
    if (is_ragged || stages.any() || params.segments > 1 || device.max_cluster < kMaxCluster) return cudaSuccess;
    return fused_by_plan<scalar_t, WholeCardPlan<scalar_t>, Family::kLoad>(params, stages, device, call);
  }
  if (is_ragged) {
    const typename RaggedBackwardLadder<scalar_t>::type ladder;
    if constexpr (sizeof(scalar_t) == 2)
      if (takes_words(params, stages)) return launch(std::integral_constant<Family, Family::kWords>{}, ladder);
    return launch(load, ladder);
  }
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
