// Forward with an epilogue, of rows in the registers of a group of threads; and the plain norm of rows that no other
// kernel takes, which a cluster shares. norm_forward.cu has the formulas.
#pragma once

#include "activation.cuh"
#include "async.cuh"
#include "dispatch.cuh"
#include "forward_rows.cuh"
#include "kernel_params.h"
#include "launch_plan.h"
#include "reduce.cuh"
#include "stages.cuh"
#include "vector_io.cuh"

namespace fused_layernorm {
namespace {

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
template <typename scalar_t, bool kHasEpilogue>
using ForwardParams = std::conditional_t<kHasEpilogue, PlainForwardParams<scalar_t>, KernelForwardParams>;

template <typename scalar_t, typename weight_t, typename Plan, bool kHasEpilogue>
__device__ __forceinline__ void forward_row(const ForwardParams<scalar_t, kHasEpilogue>& params,
                                            acc_type<scalar_t> inverse_n, const Epilogue& stage, int64_t row) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kThreads = Plan::kThreads, kVecs = Plan::kVecs, kVec = Plan::kVec;
  constexpr int kRows = kForwardThreads<Plan> / kThreads;
  using Row = RowThreads<kThreads, kRows, true>;
  __shared__ Moments<acc_t> scratch[kRows * Row::kWarps];
  __shared__ Moments<acc_t> cluster_scratch[Plan::kClusters ? kMaxCluster : 1];

  // Adjacent threads: all of the row, or one warp that has a contiguous slice of it
  constexpr int kSpan = kByWarps<Plan> ? 32 : kThreads;
  constexpr int kStep = kSpan * kVec;
  using Held = RegisterSlots<Plan, false, kSpan, kHasEpilogue>;

  static_assert(!kHasEpilogue || !kManyTiles<Plan>, "plans for rows at once");
  // The slice of the row: the blocks of a cluster share a row, or the warps of a block
  const int blocks = Plan::kClusters ? cluster_size() : 1;
  const int rank = Row::rank();
  if (blocks > 1) cluster_arrive();
  const int hidden_size = static_cast<int>(params.hidden_size);
  const int slice_most = (hidden_size - 1) / (kVec * blocks) * kVec + kVec;
  const int slice_col = blocks > 1 ? cluster_rank() * slice_most : kByWarps<Plan> ? rank / 32 * kVecs * kStep : 0;
  const int elements = blocks > 1 ? min(slice_most, hidden_size - slice_col) : hidden_size - slice_col;  // perhaps < 0
  const int own = rank % kSpan * kVec;  // offset of this thread's first vector
  constexpr int kTile = kVecs * kStep;
  const int last_tile = kManyTiles<Plan> ? max(elements - 1, 0) / kTile * kTile : 0;
  const scalar_t* x = static_cast<const scalar_t*>(params.x) + params.x_strides.offset(row) + slice_col;

  const auto parameter_at = [&] { return parameters_of(params, row) + slice_col + own; };
  const weight_t* weight = static_cast<const weight_t*>(params.weight) + parameter_at();
  const weight_t* bias = static_cast<const weight_t*>(params.bias) + parameter_at();
  // Hide both pointers from the optimizer: else their addresses are recomputed for each vector
  asm volatile("" : "+l"(weight), "+l"(bias));
  // fp32 weights beside 16-bit x, within the register budget of 16-bit weights
  constexpr bool kIsWide = !kHasEpilogue && sizeof(weight_t) > sizeof(scalar_t);
  // Ordered loads of parameters stay behind earlier stores (load_parameter). The compiler must be told again that they
  // are global.
  constexpr bool kOrdered = kHasEpilogue || kIsWide;
  if constexpr (kOrdered) __builtin_assume(__isGlobal(weight) && __isGlobal(bias));
  const auto weight_vec = [&](const auto* weight, bool given) {
    return load_parameter<kVec, kOrdered>(weight, kVec, given, one_vec<std::decay_t<decltype(*weight)>, kVec>());
  };
  const auto bias_vec = [&](const auto* bias) {
    using bias_t = std::decay_t<decltype(*bias)>;
    return load_parameter<kVec, kOrdered>(bias, kVec, params.bias, filled_vec<bias_t, kVec>(acc_t(0)));
  };

  // Load; elements beyond the row are never used
  RawVec<scalar_t, kVec> raw[kVecs];
  const auto load = [&](int tile) {
    const scalar_t* first = x + tile + own;
    const Held held(elements - tile, own);
    held.for_each([&](int v, auto whole) {
      if (whole || held.count(v) > 0) raw[v] = load_vec<scalar_t, kVec>(first + v * kStep);
    });
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
  const bool has_offset = params.weight && params.weight_offset != 0;
  const acc_t weight_offset = static_cast<acc_t>(has_offset ? params.weight_offset : -0.0);  // -0 changes no weight
  const bool same_dtype = kHasEpilogue || params.y_dtype == dtype_of<scalar_t>;
  const EpilogueRow<acc_t, sizeof(scalar_t) == 2> epilogue(stage, row);  // unused without one
#pragma unroll 1
  for (int tile = last_tile; kManyTiles<Plan> ? tile >= 0 : tile == 0; tile -= kTile) {
    const int left = elements - tile;
    const Held held(left, own);
    if (tile != last_tile) load(tile);
    scalar_t* y = static_cast<scalar_t*>(params.y) + y_row + tile;
    // `plain`: y of x's type; with an epilogue, also a weight and no weight_offset
    const auto store = [&](const auto* weight, const auto* bias, auto plain) {
      // With an epilogue, prefetch the next vector's weight and bias: the ordered loads (load_parameter) keep the
      // compiler from hoisting them. fp32 weights beside 16-bit x, and eight vectors of fp32, would spill.
      using parameter_t = std::decay_t<decltype(*weight)>;
      constexpr bool kAhead =
          kHasEpilogue && RawVec<parameter_t, kVec>::kBytes <= 16 && (sizeof(scalar_t) == 2 || kVecs < 8);
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
          if (!plain || !kHasEpilogue) {
#pragma unroll
            for (int i = 0; i < kVec; ++i) scale[i] += weight_offset;
          }
          unpack(raw[v], values);
#pragma unroll
          for (int i = 0; i < kVec; ++i) values[i] = norm.x_hat(values[i]);
#pragma unroll
          for (int i = 0; i < kVec; ++i) values[i] = fma(values[i], scale[i], offset[i]);
          apply(values, slice_col + own + skip);
          if (!plain && !same_dtype) {
            store_vec_as(params.y, params.y_dtype, y_row + tile + skip + own, values, kVec, true);
          } else {
            store_vec(y + own + skip, values);
          }
        });
      };
      if constexpr (!kHasEpilogue) {
        store_each([](acc_t(&)[kVec], int) {});
      } else {
        epilogue.template apply<plain>(store_each);
      }
    };
    const auto store_by = [&](const auto* weight, const auto* bias) {
      const bool is_plain = kHasEpilogue ? weight_offset == 0 && params.weight && epilogue.is_simple() : same_dtype;
      // Straight-line code for an epilogue beside fp32 weights would double the code
      constexpr bool kMayBePlain = !kHasEpilogue || sizeof(*weight) == sizeof(scalar_t);
      if constexpr (kMayBePlain) {
        if (is_plain) return store(weight, bias, std::true_type{});
      }
      store(weight, bias, std::false_type{});
    };
    if constexpr (kHasEpilogue && sizeof(weight_t) == 2) {
      if (params.weight_dtype == DType::kFloat32) {
        // Calling parameter_at() again spilled
        const int64_t at = weight - static_cast<const weight_t*>(params.weight);
        store_by(static_cast<const float*>(params.weight) + at, static_cast<const float*>(params.bias) + at);
        continue;
      }
    }
    store_by(weight, bias);
  }
}

// Weight is of scalar_t or fp32. Each has a separate path through the kernel, with its own register allocation and
// schedule; with an epilogue, the store loop tests weight's dtype.
template <typename scalar_t, typename Plan, bool kHasEpilogue>
__global__ void __launch_bounds__(kForwardThreads<Plan>, forward_blocks_per_sm<Plan>(dtype_of<scalar_t>))
    norm_forward_kernel(const __grid_constant__ ForwardParams<scalar_t, kHasEpilogue> params,
                        acc_type<scalar_t> inverse_n, const __grid_constant__ Epilogue stage) {
  constexpr int kRows = kForwardThreads<Plan> / Plan::kThreads;
  using Row = RowThreads<Plan::kThreads, kRows, true>;
  const int64_t row = static_cast<int64_t>(blockIdx.x / (Plan::kClusters ? cluster_size() : 1)) * kRows + Row::group();
  // Return, do not skip: rows that share a warp name all of its lanes in their exchanges (whole_warps in reduce.cuh)
  if (row >= params.rows) return;
  if constexpr (!kHasEpilogue && sizeof(scalar_t) == 2) {
    if (params.weight_dtype == DType::kFloat32)
      return forward_row<scalar_t, float, Plan, kHasEpilogue>(params, inverse_n, stage, row);
  }
  forward_row<scalar_t, scalar_t, Plan, kHasEpilogue>(params, inverse_n, stage, row);
}

// ---- host ----------------------------------------------------------------------------------------------------------

// The number of blocks, or clusters.
template <typename Plan>
int64_t forward_blocks(int64_t rows) {
  constexpr int kRows = kForwardThreads<Plan> / Plan::kThreads;
  return (rows + kRows - 1) / kRows;
}

}  // namespace

template <typename scalar_t>
cudaError_t launch_epilogue(const KernelForwardParams& params, const Epilogue& epilogue, cudaStream_t stream) {
  return dispatch_plan<EpilogueLadder<scalar_t>>(params.hidden_size, 1, [&](auto plan) {
    using Plan = decltype(plan);
    const ClusterLaunch launch(forward_blocks<Plan>(params.rows), kForwardThreads<Plan>, 0, 1, stream);
    return cudaLaunchKernelEx(&launch.config, norm_forward_kernel<scalar_t, Plan, true>,
                              PlainForwardParams<scalar_t>(params), inverse_of<float>(params.hidden_size), epilogue);
  });
}

}  // namespace fused_layernorm
