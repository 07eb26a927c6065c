// The forward kernel for rows that fit into the registers of a group of threads, or of a cluster. norm_forward.cu has
// the formulas.
#pragma once

#include "activation.cuh"
#include "async.cuh"
#include "dispatch.cuh"
#include "few_rows.cuh"
#include "forward_rows.cuh"
#include "kernel_params.h"
#include "launch_plan.h"
#include "reduce.cuh"
#include "stages.cuh"
#include "vector_io.cuh"

namespace fused_layernorm {
namespace {

// The load stage: computes this thread's part of z, rounded. `x` is this thread's first element, at column `col` of the
// row, and `gate` its factor, or nullptr. All loads are issued before the first use (gate is in the cache); z is stored
// as it is computed.
template <typename Held, typename Plan, typename x_t, typename scalar_t>
__device__ __forceinline__ void load_sum(RawVec<scalar_t, Plan::kVec> (&z)[Plan::kVecs], const LoadStage& stage,
                                         const x_t* x, const x_t* gate, int64_t row, int hidden_size, int col,
                                         const Held& held) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kVecs = Plan::kVecs, kVec = Plan::kVec, kStep = Held::kStep;
  const scalar_t* residual = static_cast<const scalar_t*>(stage.residual) + stage.residual_strides.offset(row) + col;
  scalar_t* residual_out = static_cast<scalar_t*>(stage.residual_out) + row * hidden_size + col;
  const auto is_there = [&](int v, auto whole) { return whole || held.count(v) > 0; };
  RawVec<x_t, kVec> x_raw[kVecs];
  held.for_each([&](int v, auto whole) {
    if (!is_there(v, whole)) return;
    x_raw[v] = load_vec<x_t, kVec>(x + v * kStep);
    z[v] = filled_vec<scalar_t, kVec>(acc_t(-0.0));  // x + -0 is x, also where that is -0
    if (stage.residual) z[v] = load_vec<scalar_t, kVec>(residual + v * kStep);
  });
  // `drop` modifies one vector of x
  const auto sum = [&](int v, auto drop) {
    acc_t from_x[kVec], values[kVec];
    unpack(x_raw[v], from_x);
    drop(from_x, col + v * kStep);
    unpack(z[v], values);
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = add(values[i], from_x[i]);
    z[v] = pack<scalar_t>(values);
    if (stage.residual_out) store_raw(residual_out + v * kStep, z[v]);
  };
  if (stage.dropout.philox) {
    const RowDropout<acc_t> dropout(stage.dropout, row);
    // Predicate each vector: random numbers of several vectors at once would spill
#pragma unroll
    for (int v = 0; v < kVecs; ++v)
      if (is_there(v, false)) sum(v, [&](acc_t(&values)[kVec], int col) { dropout.apply(values, col); });
  } else if (stage.gate) {
    held.for_each([&](int v, auto whole) {
      if (!is_there(v, whole)) return;
      sum(v, [&](acc_t(&values)[kVec], int) {
        acc_t factor[kVec];
        unpack(load_vec<x_t, kVec>(gate + v * kStep), factor);
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[i] = mul(values[i], factor[i]);
      });
    });
  } else {
    held.for_each([&](int v, auto whole) {
      if (is_there(v, whole)) sum(v, [](acc_t(&)[kVec], int) {});
    });
  }
}

// The epilogue of one row.
template <typename T, bool kQuick>
struct EpilogueRow {
  Activation activation;
  RowDropout<T> dropout;
  bool drops;  // a run-time value

  __device__ EpilogueRow(const Epilogue& epilogue, int64_t row)
      : activation(epilogue.activation), dropout(epilogue.dropout, row), drops(epilogue.dropout.philox) {}

  // An activation or dropout, not both.
  __device__ bool is_simple() const { return !drops || activation == Activation::kNone; }

  // Calls store_each(apply), which loops over the row's vectors and calls apply(values, first column) for each.
  // kIsStraight: one loop for dropout and for each activation, as straight-line code that warps fetch without stalls,
  // if is_simple(); else one loop that branches for each vector, for less code.
  template <bool kIsStraight, typename F>
  __device__ __forceinline__ void apply(F&& store_each) const {
    if constexpr (kIsStraight) {
      if (drops) return store_each([&](auto& values, int col) { dropout.apply(values, static_cast<unsigned>(col)); });
      with_activation(activation, [&](auto which) {
        if constexpr (!std::is_same<decltype(which), Which<Activation::kNone>>::value)
          store_each([&](auto& values, int) { activate<kQuick>(values, which); });
      });
    } else {
      store_each([&](auto& values, int col) {
        if (activation != Activation::kNone)
          with_activation(activation, [&](auto which) { activate<kQuick>(values, which); });
        int drops = this->drops;  // hidden from the optimizer: code of later vectors would be hoisted and spill
        asm volatile("" : "+r"(drops));
        if (drops) dropout.apply(values, static_cast<unsigned>(col));
      });
    }
  }
};

// An epilogue goes with one weight for all rows.
template <typename scalar_t, typename Fused>
using ForwardParams = std::conditional_t<kHasEpilogue<Fused>, PlainForwardParams<scalar_t>, KernelForwardParams>;

template <typename Fused>
constexpr Fuses kFuses = kHasLoad<Fused>       ? Fuses::kLoad
                         : kHasEpilogue<Fused> ? Fuses::kEpilogue
                         : kHasGate<Fused>     ? Fuses::kGate
                                               : Fuses::kNothing;

// Whether threads may iterate over rows (kIteratesRows). fp32 weights of 16-bit x would spill.
template <typename scalar_t, typename weight_t, typename Plan, typename Fused>
constexpr bool kIterates = !kHasStage<Fused> && sizeof(weight_t) == sizeof(scalar_t) && kIteratesRows<scalar_t, Plan>;

// The norm behind the addition of a residual, of a row that no cluster shares: from y as it was rounded, in `raw`.
template <typename Row, typename Plan, typename Held, typename scalar_t, typename acc_t>
__device__ __forceinline__ void norm_next(RawVec<scalar_t, Plan::kVec> (&raw)[Plan::kVecs], const NextNorm& next,
                                          int hidden_size, acc_t inverse_n, Moments<acc_t>* scratch) {
  constexpr int kVec = Plan::kVec, kSpan = Held::kStep / kVec;
  // The registers are read again: values kept from the first norm would spill
  unsigned thread, block;
  asm volatile("mov.u32 %0, %%tid.x; mov.u32 %1, %%ctaid.x;" : "=r"(thread), "=r"(block));
  const int rank = static_cast<int>(thread) % Plan::kThreads;
  const int64_t row = static_cast<int64_t>(block) * (kForwardThreads<Plan> / Plan::kThreads) + thread / Plan::kThreads;
  const int slice_col = kByWarps<Plan> ? rank / 32 * Plan::kVecs * Held::kStep : 0, own = rank % kSpan * kVec;
  const Held held(hidden_size - slice_col, own);
  if constexpr (Row::kWarps > 1) Row::barrier();  // scratch is used again
  Moments<acc_t> part = tile_moments<Row, Plan>(raw, held, hidden_size - slice_col, rank, true);
  part.n = static_cast<acc_t>(held.count_of(Plan::kVecs, rank % kSpan / Row::kLanes * Row::kLanes, Row::kLanes));
  part = row_moments<Row>(part, inverse_n, scratch, rank);
  const RowNorm<acc_t> norm = finish_row(part, inverse_n, next, row, rank == 0);
  scalar_t* y = static_cast<scalar_t*>(next.y) + row * hidden_size + slice_col + own;
  const auto store = [&](const auto* weight) {
    using weight_t = std::decay_t<decltype(*weight)>;
    weight += slice_col + own;
    held.for_each([&](int v, auto whole) {
      if (!whole && held.count(v) <= 0) return;
      acc_t values[kVec], scale[kVec];
      unpack(load_parameter<kVec>(weight + v * Held::kStep, kVec, next.weight, one_vec<weight_t, kVec>()), scale);
      unpack(raw[v], values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[i] = fma(norm.x_hat(values[i]), scale[i] + next.weight_offset, acc_t(0));
      store_vec(y + v * Held::kStep, values);
    });
  };
  if (next.weight_dtype == DType::kFloat32) {
    store(static_cast<const float*>(next.weight));
  } else {
    store(static_cast<const scalar_t*>(next.weight));
  }
}

template <typename scalar_t, typename weight_t, typename Plan, typename Fused>
__device__ __forceinline__ void forward_row(const ForwardParams<scalar_t, Fused>& params, acc_type<scalar_t> inverse_n,
                                            const Fused& fused, int64_t row) {
  using acc_t = acc_type<scalar_t>;
  using x_t = x_type<Fused, scalar_t>;
  constexpr int kThreads = Plan::kThreads, kVecs = Plan::kVecs, kVec = Plan::kVec;
  constexpr int kRows = kForwardThreads<Plan> / kThreads;
  using Row = RowThreads<kThreads, kRows, true>;
  __shared__ Moments<acc_t> scratch[kRows * Row::kWarps];
  __shared__ Moments<acc_t> cluster_scratch[Plan::kClusters ? kMaxCluster : 1];

  // Adjacent threads: all of the row, or one warp that has a contiguous slice of it
  constexpr int kSpan = kByWarps<Plan> ? 32 : kThreads;
  constexpr int kStep = kSpan * kVec;
  using Held = RegisterSlots<Plan, false, kSpan, kHasEpilogue<Fused>>;

  static_assert(!kHasStage<Fused> || !kManyTiles<Plan>, "plans for rows at once");
  // The slice of the row: the blocks of a cluster share a row, or the warps of a block
  const int blocks = Plan::kClusters ? cluster_size() : 1;
  int rank = Row::rank();
  // Hide `rank` from the optimizer: derived values are recomputed for each row; keeping them spills
  if constexpr (kIterates<scalar_t, weight_t, Plan, Fused>) asm volatile("" : "+r"(rank));
  if (blocks > 1) cluster_arrive();
  const int hidden_size = static_cast<int>(params.hidden_size);
  const int slice_most = (hidden_size - 1) / (kVec * blocks) * kVec + kVec;
  const int slice_col = blocks > 1 ? cluster_rank() * slice_most : kByWarps<Plan> ? rank / 32 * kVecs * kStep : 0;
  const int elements = blocks > 1 ? min(slice_most, hidden_size - slice_col) : hidden_size - slice_col;  // perhaps < 0
  const int own = rank % kSpan * kVec;  // offset of this thread's first vector
  constexpr int kTile = kVecs * kStep;
  const int last_tile = kManyTiles<Plan> ? max(elements - 1, 0) / kTile * kTile : 0;
  const x_t* x = static_cast<const x_t*>(params.x) + params.x_strides.offset(row) + slice_col;

  const auto parameter_at = [&] { return parameters_of(params, row) + slice_col + own; };
  const weight_t* weight = static_cast<const weight_t*>(params.weight) + parameter_at();
  const weight_t* bias = static_cast<const weight_t*>(params.bias) + parameter_at();
  // Hide both pointers from the optimizer: else their addresses are recomputed for each vector
  asm volatile("" : "+l"(weight), "+l"(bias));
  // weight_offset is added to every weight where the kernel waits for memory, which it does not at 64 columns of 16
  // bits (H200: 5% slower, by this and by the order of loads)
  constexpr bool kIsTiny = kThreads == 2 && sizeof(weight_t) == sizeof(scalar_t);
  constexpr bool kAddsOffset = !kHasEpilogue<Fused> && !kIsTiny;
  // fp32 weights beside 16-bit x, within the register budget of 16-bit weights
  constexpr bool kIsWide = !kHasStage<Fused> && sizeof(weight_t) > sizeof(scalar_t);
  // Ordered loads of parameters stay behind earlier stores (load_parameter). The compiler must be told again that they
  // are global. Plans of four vectors that iterate over rows would spill without the order.
  constexpr bool kOrdered =
      kHasEpilogue<Fused> || kIsWide || (kAddsOffset && kVecs == 4 && kIterates<scalar_t, weight_t, Plan, Fused>);
  if constexpr (kOrdered) __builtin_assume(__isGlobal(weight) && __isGlobal(bias));
  const auto weight_vec = [&](const auto* weight, bool given) {
    return load_parameter<kVec, kOrdered>(weight, kVec, given, one_vec<std::decay_t<decltype(*weight)>, kVec>());
  };
  const auto bias_vec = [&](const auto* bias) {
    using bias_t = std::decay_t<decltype(*bias)>;
    constexpr acc_t kNone = kHasLoad<Fused> ? acc_t(-0.0) : acc_t(0);  // Llama's product keeps the sign of a zero
    return load_parameter<kVec, kOrdered>(bias, kVec, params.bias, filled_vec<bias_t, kVec>(kNone));
  };

  // Load; elements beyond the row are never used
  RawVec<scalar_t, kVec> raw[kVecs];
  [[maybe_unused]] RawVec<x_t, kVec> gate_raw[kHasGate<Fused> ? kVecs : 1];
  const auto load = [&](int tile) {
    if constexpr (kHasLoad<Fused>) {
      const int col = slice_col + own;
      const x_t* gate = static_cast<const x_t*>(fused.gate) + segment_of(params, row) * fused.gate_stride + col;
      load_sum<Held, Plan>(raw, fused, x + own, gate, row, hidden_size, col, Held(elements, own));
    } else if constexpr (kHasGate<Fused>) {
      const x_t* gate = static_cast<const x_t*>(fused.gate) + fused.strides.offset(row) + slice_col + own;
      const Held held(elements, own);
      RawVec<x_t, kVec> x_raw[kVecs];
      held.for_each([&](int v, auto whole) {
        if (!whole && held.count(v) <= 0) return;
        x_raw[v] = load_vec<x_t, kVec>(x + own + v * kStep);
        gate_raw[v] = load_vec<x_t, kVec>(gate + v * kStep);
      });
      held.for_each([&](int v, auto whole) {
        if (!whole && held.count(v) <= 0) return;
        if constexpr (kGatesY<Fused>) {
          raw[v] = x_raw[v];
        } else {
          acc_t z[kVec];
          unpack(x_raw[v], z);
          apply_gate(fused, gate_raw[v], z);
          raw[v] = pack<scalar_t>(z);
        }
      });
    } else {
      const int left = elements - tile;
      const scalar_t* first = x + tile + own;
      const Held held(left, own);
      held.for_each([&](int v, auto whole) {
        if (whole || held.count(v) > 0) raw[v] = load_vec<scalar_t, kVec>(first + v * kStep);
      });
    }
  };

  // Statistics: of the whole row if it fits into registers, else tile by tile
  acc_t values[kVec];
  Moments<acc_t> part{};
#pragma unroll 1
  for (int tile = 0; kManyTiles<Plan> ? tile <= last_tile : tile == 0; tile += kTile) {
    load(tile);
    const int left = elements - tile;
    const Held held(left, own);
    Moments<acc_t> here = tile_moments<Row, Plan>(raw, held, left, rank, params.is_rms_norm);
    const int warp_first = rank % kSpan / Row::kLanes * Row::kLanes;
    const acc_t warp_has = static_cast<acc_t>(held.count_of(kVecs, warp_first, Row::kLanes));
    if (tile == 0) {
      part = here;
      part.n = warp_has;
    } else {
      here = here.about(part.m);
      part.c += here.c;
      part.q += here.q;
      part.n += warp_has;
    }
  }
  part = whole_row_moments<Row>(part, blocks, elements, inverse_n, scratch, cluster_scratch, rank);
  const RowNorm<acc_t> norm = finish_row(part, inverse_n, params, row, rank == 0);

  // Store, last tile first: it is still in registers
  if constexpr (kWidenAnew<Plan>) optimization_barrier(raw);
  const int64_t y_row = row * params.hidden_size + slice_col;
  const bool has_offset = params.weight && (kIsTiny || params.weight_offset != 0);
  const acc_t no_offset = kIsTiny ? acc_t(0) : acc_t(-0.0);  // which changes no weight
  const acc_t weight_offset = has_offset ? static_cast<acc_t>(params.weight_offset) : no_offset;
  const bool same_dtype = kHasStage<Fused> || params.y_dtype == dtype_of<x_t>;
  const auto epilogue = [&] {
    if constexpr (kHasEpilogue<Fused>)
      return EpilogueRow<acc_t, sizeof(x_t) == 2>(fused, row);
    else
      return NoStage{};
  }();
#pragma unroll 1
  for (int tile = last_tile; kManyTiles<Plan> ? tile >= 0 : tile == 0; tile -= kTile) {
    const int left = elements - tile;
    const Held held(left, own);
    if (tile != last_tile) load(tile);
    x_t* y = static_cast<x_t*>(params.y) + y_row + tile;
    // `plain`: y of x's type and, without kAddsOffset, no weight_offset; with an epilogue, also a weight
    const auto store = [&](const auto* weight, const auto* bias, auto plain) {
      // With an epilogue, prefetch the next vector's weight and bias: the ordered loads (load_parameter) keep the
      // compiler from hoisting them. fp32 weights beside 16-bit x, and eight vectors of fp32, would spill.
      using parameter_t = std::decay_t<decltype(*weight)>;
      constexpr bool kAhead =
          kHasEpilogue<Fused> && RawVec<parameter_t, kVec>::kBytes <= 16 && (sizeof(x_t) == 2 || kVecs < 8);
      [[maybe_unused]] RawVec<parameter_t, kVec> next_weight, next_bias;
      [[maybe_unused]] const auto ask_for = [&](int v, bool is_there) {
        if (v >= kVecs || !(is_there || held.count(v) > 0)) return;
        next_weight = weight_vec(weight + v * kStep, plain || params.weight);
        next_bias = bias_vec(bias + v * kStep);
      };
      const auto store_each = [&](auto&& apply) {
        if constexpr (kAhead) ask_for(0, false);
        held.for_each([&](int v, auto whole) {
          const int skip = v * kStep;
          if (!whole && held.count(v) <= 0) return;
          acc_t scale[kVec], offset[kVec];
          if constexpr (kAhead) {
            unpack(next_weight, scale);
            unpack(next_bias, offset);
            ask_for(v + 1, whole && (v + 1) % Held::kGroup != 0);
          } else {
            unpack(weight_vec(weight + tile + skip, params.weight), scale);
            unpack(bias_vec(bias + tile + skip), offset);
          }
          if (!plain || kAddsOffset) {
#pragma unroll
            for (int i = 0; i < kVec; ++i) scale[i] += weight_offset;
          }
          unpack(raw[v], values);
#pragma unroll
          for (int i = 0; i < kVec; ++i) values[i] = norm.x_hat(values[i]);
          if constexpr (kHasLoad<Fused> && sizeof(scalar_t) == 2) {
            acc_t rounded[kVec];
            unpack(pack<scalar_t>(values), rounded);
#pragma unroll
            for (int i = 0; i < kVec; ++i) values[i] = fused.rounds_x_hat ? rounded[i] : values[i];
          }
#pragma unroll
          for (int i = 0; i < kVec; ++i) values[i] = fma(values[i], scale[i], offset[i]);
          if constexpr (kGatesY<Fused>) apply_gate(fused, gate_raw[v], values);
          apply(values, slice_col + own + skip);
          if (!plain && !same_dtype) {
            store_vec_as(params.y, params.y_dtype, y_row + tile + skip + own, values, kVec, true);
          } else if constexpr (kGatesY<Fused>) {
            raw[v] = pack<scalar_t>(values);  // for norm_next()
            store_raw(y + own + skip, raw[v]);
          } else {
            store_vec(y + own + skip, values);
          }
        });
      };
      if constexpr (!kHasEpilogue<Fused>) {
        store_each([](acc_t(&)[kVec], int) {});
      } else {
        epilogue.template apply<plain>(store_each);
      }
    };
    const auto store_by = [&](const auto* weight, const auto* bias) {
      // With a load stage or a gate a branch per vector is free, and halves the code
      bool is_plain = (!kHasLoad<Fused> && !kHasGate<Fused> && same_dtype &&
                       (kAddsOffset || (weight_offset == 0 && (!kHasEpilogue<Fused> || params.weight))));
      if constexpr (kHasEpilogue<Fused>) is_plain &= epilogue.is_simple();
      // Straight-line code for an epilogue beside fp32 weights would double the code
      constexpr bool kMayBePlain = !kHasEpilogue<Fused> || sizeof(*weight) == sizeof(x_t);
      if constexpr (kMayBePlain) {
        if (is_plain) return store(weight, bias, std::true_type{});
      }
      store(weight, bias, std::false_type{});
    };
    if constexpr (kHasStage<Fused> && sizeof(weight_t) == 2) {
      if (params.weight_dtype == DType::kFloat32) {
        // Calling parameter_at() again spilled
        const int64_t at = weight - static_cast<const weight_t*>(params.weight);
        store_by(static_cast<const float*>(params.weight) + at, static_cast<const float*>(params.bias) + at);
        continue;
      }
    }
    store_by(weight, bias);
  }
  if constexpr (kGatesY<Fused>) {
    if (fused.next.y) norm_next<Row, Plan, Held>(raw, fused.next, hidden_size, inverse_n, scratch);
  }
}

// Dispatches run-time dtypes to forward_row(): fp32 weights beside 16-bit x, and 16-bit x beside fp32 z. With a stage,
// the store loop tests weight's dtype.
template <typename scalar_t, typename Plan, typename Fused>
__device__ __forceinline__ void forward_row_of_types(const ForwardParams<scalar_t, Fused>& params,
                                                     acc_type<scalar_t> inverse_n, const Fused& fused, int64_t row) {
  if constexpr (!kHasStage<Fused> && sizeof(scalar_t) == 2) {
    if (params.weight_dtype == DType::kFloat32) {
      return forward_row<scalar_t, float, Plan>(params, inverse_n, fused, row);
    }
  }
  if constexpr (std::is_same<Fused, WithLoad<float>>::value) {
    if (params.x_dtype == DType::kFloat16)
      return forward_row<float, __half, Plan>(params, inverse_n, WithLoad<__half>{fused}, row);
    if (params.x_dtype == DType::kBFloat16)
      return forward_row<float, __nv_bfloat16, Plan>(params, inverse_n, WithLoad<__nv_bfloat16>{fused}, row);
  }
  if constexpr (kGatesY<Fused>) {
    if (!fused.gates_y)
      return forward_row<float, scalar_t, Plan>(params, inverse_n, WithGate<scalar_t, false>{fused}, row);
  }
  forward_row<scalar_t, scalar_t, Plan>(params, inverse_n, fused, row);
}

// Fused: NoStage, WithLoad, WithEpilogue or WithGate. Weight is of scalar_t or fp32. Each run-time dtype has a separate
// path through the kernel, with its own register allocation and schedule.
template <typename scalar_t, typename Plan, typename Fused>
__global__ void __launch_bounds__(kForwardThreads<Plan>, forward_blocks_per_sm<Plan>(dtype_of<scalar_t>, kFuses<Fused>))
    norm_forward_kernel(const __grid_constant__ ForwardParams<scalar_t, Fused> params, acc_type<scalar_t> inverse_n,
                        const __grid_constant__ Fused fused) {
  constexpr int kRows = kForwardThreads<Plan> / Plan::kThreads;
  using Row = RowThreads<Plan::kThreads, kRows, true>;
  if constexpr (kIterates<scalar_t, scalar_t, Plan, Fused>) {
    int64_t row = static_cast<int64_t>(blockIdx.x) * params.iterations * kRows + Row::group();
    do {
      if (row >= params.rows) return;
      forward_row_of_types<scalar_t, Plan>(params, inverse_n, fused, row);
      if (params.iterations == 1 || (sizeof(scalar_t) == 2 && params.weight_dtype == DType::kFloat32)) return;
      row += kRows;
      asm volatile("" : "+l"(row));
      if constexpr (Row::kWarps > 1) Row::barrier();  // scratch may be reused
    } while (row / kRows % kSegmentIterations<Plan> != 0);
  } else {
    const int64_t row =
        static_cast<int64_t>(blockIdx.x / (Plan::kClusters ? cluster_size() : 1)) * kRows + Row::group();
    // Return, do not skip: rows that share a warp name all of its lanes in their exchanges (whole_warps in reduce.cuh)
    if (row >= params.rows) return;
    forward_row_of_types<scalar_t, Plan>(params, inverse_n, fused, row);
  }
}

// ---- host ----------------------------------------------------------------------------------------------------------

// The number of blocks, or clusters. Sets params.iterations.
template <typename scalar_t, typename Plan, typename Fused>
int64_t forward_blocks(KernelForwardParams& params) {
  constexpr int kRows = kForwardThreads<Plan> / Plan::kThreads;
  params.iterations = 1;
  if (kIterates<scalar_t, scalar_t, Plan, Fused> && params.weight_dtype == dtype_of<scalar_t> &&
      params.segments > kFewSegments<Plan> && params.segments < params.rows && !params.interleaves &&
      params.rows * Plan::kThreads >= kSegmentIterations<Plan> * kSegmentIterationThreads)
    params.iterations = kSegmentIterations<Plan>;
  const int64_t rows = kRows * params.iterations;
  return (params.rows + rows - 1) / rows;
}

// Launches forward with a stage, by the ladder of that stage.
template <typename scalar_t, typename Stage>
cudaError_t launch_staged_forward(KernelForwardParams params, const Stage& stage, cudaStream_t stream) {
  using LadderOf = std::conditional_t<kHasEpilogue<Stage>, EpilogueLadder<scalar_t>,
                                      std::conditional_t<kHasGate<Stage>, GateLadder<scalar_t>, LoadLadder<scalar_t>>>;
  return dispatch_plan<LadderOf>(params.hidden_size, 1, [&](auto plan) {
    using Plan = decltype(plan);
    if constexpr (!kHasEpilogue<Stage>) {
      const cudaError_t launched = launch_few_rows<scalar_t, Plan>(params, stage, stream);
      if (launched != cudaErrorNotSupported) return launched;
    }
    const ClusterLaunch launch(forward_blocks<scalar_t, Plan, Stage>(params), kForwardThreads<Plan>, 0, 1, stream);
    return cudaLaunchKernelEx(&launch.config, norm_forward_kernel<scalar_t, Plan, Stage>,
                              ForwardParams<scalar_t, Stage>(params), inverse_of<float>(params.hidden_size), stage);
  });
}

}  // namespace

template <typename scalar_t>
cudaError_t launch_rows(const KernelForwardParams& params, cudaStream_t stream) {
  DeviceFacts facts;
  const cudaError_t error = device_facts(facts);
  if (error != cudaSuccess) return error;
  const auto launch_plan = [&](auto plan) {
    using Plan = decltype(plan);
    const cudaError_t launched = launch_few_rows<scalar_t, Plan>(params, NoStage{}, stream);
    if (launched != cudaErrorNotSupported) return launched;
    const auto kernel = norm_forward_kernel<scalar_t, Plan, NoStage>;
    int cluster = 1;
    if constexpr (Plan::kClusters) {
      static OncePerDevice allowed;
      const cudaError_t error = allowed.run(facts.device, [&] { return allow_more(kernel, 0, facts.max_cluster); });
      if (error != cudaSuccess) return error;
      cluster = cluster_for<Plan>(vecs_of<Plan::kVec>(params.hidden_size), facts.max_cluster);
    }
    KernelForwardParams arguments = params;
    const ClusterLaunch launch(forward_blocks<scalar_t, Plan, NoStage>(arguments) * cluster, kForwardThreads<Plan>, 0,
                               cluster, stream);
    return cudaLaunchKernelEx(&launch.config, kernel, arguments, inverse_of<acc_type<scalar_t>>(params.hidden_size),
                              NoStage{});
  };
  return dispatch_plan<ForwardLadder<scalar_t>>(params.hidden_size, facts.max_cluster, launch_plan);
}

template <typename scalar_t>
cudaError_t launch_load(const KernelForwardParams& params, const LoadStage& stage, cudaStream_t stream) {
  return launch_staged_forward<scalar_t>(params, WithLoad<scalar_t>{stage}, stream);
}

template <typename scalar_t>
cudaError_t launch_gate(const KernelForwardParams& params, const RowGate& gate, cudaStream_t stream) {
  return launch_staged_forward<scalar_t>(params, WithGate<scalar_t, true>{gate}, stream);
}

template <typename scalar_t>
cudaError_t launch_epilogue(const KernelForwardParams& params, const Epilogue& epilogue, cudaStream_t stream) {
  return launch_staged_forward<scalar_t>(params, WithEpilogue<scalar_t>{epilogue}, stream);
}

}  // namespace fused_layernorm
