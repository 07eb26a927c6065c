// Forward of LayerNorm and RMSNorm.
//
//   mean = is_rms_norm ? 0 : sum(x)/N      rstd = rsqrt(sum((x-mean)^2)/N + eps)
//   x_hat = (x-mean)*rstd                  y = x_hat*(weight+weight_offset) + bias
//
// A group of threads holds each row in registers: norm_usual.cu for what most models run, norm_epilogue.cu for the same
// with an epilogue in common sizes, norm_gated.cu for a gate, norm_any.cu for all other rows of whole vectors. Ragged
// rows lie in shared memory (norm_ragged.cu); longer rows are streamed by clusters or the whole card
// (norm_forward_long.cu); rows that the card cannot hold are read twice (norm_huge.cu). The kernel of this file takes
// the rest: fp64, long rows with per-row weights, and long rows on cards without the streaming kernel. forward_rows.cuh
// explains the statistics.
#include "async.cuh"
#include "dispatch.cuh"
#include "forward_rows.cuh"
#include "kernel_params.h"
#include "launch_plan.h"
#include "launchers.h"
#include "reduce.cuh"
#include "vector_io.cuh"

namespace fused_layernorm {
namespace {

// The moments of this thread's vectors of a row, or of a tile of it with `left` elements. All threads of a warp get the
// same reference point, the mean of the first kSample vectors of its lanes: the first, which saves most of a pass. The
// mean of a quarter of a set is at most 1.7 sigma from the mean of all, that of an eighth 2.6 (Cauchy-Schwarz): var
// loses at most three bits.
template <typename Row, typename Slots, typename scalar_t, int kVecs, int kVec>
__device__ __forceinline__ Moments<acc_type<scalar_t>> tile_moments(RawVec<scalar_t, kVec> (&raw)[kVecs],
                                                                    const Slots& slots, int left, int rank,
                                                                    bool is_rms_norm) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kSample = sizeof(scalar_t) > 4 ? kVecs : 1;
  const int own = rank * kVec;
  acc_t values[kVec];
  Moments<acc_t> here{static_cast<acc_t>(slots.count_of(kVecs, rank, 1)), 0, 0, 0};
  if (!is_rms_norm) {
    acc_t sum = 0;
#pragma unroll
    for (int v = 0; v < kSample; ++v)
      if (v * Slots::kStep + own < left) {
        unpack(raw[v], values);
        sum += vec_sum(values);
      }
    unpack(raw[0], values);
    const int sampled = slots.count_of(kSample, rank / Row::kLanes * Row::kLanes, Row::kLanes);
    here.m = reference_point<Row>(sum, values[0], sampled);
  }
  optimization_barrier(raw);
  slots.for_each([&](int v, auto whole) {
    if (!whole && slots.count(v) <= 0) return;
    unpack(raw[v], values);
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] -= here.m;
    here.add(values);
  });
  return here;
}

// The moments of a row that `blocks` blocks of a cluster share, each of which has `elements` elements of it, perhaps
// fewer than 0. The cluster must have arrived (cluster_arrive) before.
template <typename Row, typename T>
__device__ __forceinline__ Moments<T> whole_row_moments(Moments<T> part, int blocks, int elements, T inverse_n,
                                                        Moments<T>* scratch, Moments<T>* cluster_scratch, int rank) {
  part = row_moments<Row>(part, blocks > 1 ? quick_ratio(T(1), max(elements, 1)) : inverse_n, scratch, rank);
  if (blocks == 1) return part;
  part.n = static_cast<T>(max(elements, 0));
  cluster_wait();
  if (threadIdx.x < blocks) push_to_peer(cluster_scratch + cluster_rank(), threadIdx.x, part);
  cluster_sync();
  return merge_moments<kMaxCluster>(
      threadIdx.x % kMaxCluster < blocks ? cluster_scratch[threadIdx.x % kMaxCluster] : Moments<T>{}, inverse_n);
}

// Rows in the registers of a group of threads or of a cluster, which takes several tiles of rows that do not fit.
template <typename scalar_t, typename weight_t, typename Plan>
__device__ __forceinline__ void forward_row(const KernelForwardParams& params, acc_type<scalar_t> inverse_n,
                                            int64_t row) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kThreads = Plan::kThreads, kVecs = Plan::kVecs, kVec = Plan::kVec;
  constexpr int kRows = kForwardThreads<Plan> / kThreads;
  constexpr int kStep = kThreads * kVec, kTile = kVecs * kStep;
  using Row = RowThreads<kThreads, true>;
  using Held = RegisterSlots<kVecs, kVec, kThreads, false>;
  __shared__ Moments<acc_t> scratch[kRows * Row::kWarps];
  __shared__ Moments<acc_t> cluster_scratch[Plan::kClusters ? kMaxCluster : 1];

  // This block's slice of the row
  const int blocks = Plan::kClusters ? cluster_size() : 1;
  if (blocks > 1) cluster_arrive();
  const int hidden_size = static_cast<int>(params.hidden_size);
  const int slice_most = (hidden_size - 1) / (kVec * blocks) * kVec + kVec;
  const int slice_col = blocks > 1 ? cluster_rank() * slice_most : 0;
  const int elements = min(slice_most, hidden_size - slice_col);  // perhaps < 0
  const int own = Row::rank() * kVec;                             // offset of this thread's first vector
  const int last_tile = kManyTiles<Plan> ? max(elements - 1, 0) / kTile * kTile : 0;
  const scalar_t* x = static_cast<const scalar_t*>(params.x) + params.x_strides.offset(row) + slice_col;

  // Load; elements beyond the row are never used
  RawVec<scalar_t, kVec> raw[kVecs];
  const auto load = [&](int tile) {
    const scalar_t* first = x + tile + own;
    const Held held(elements - tile, own);
    held.for_each([&](int v, auto whole) {
      if (whole || held.count(v) > 0) raw[v] = load_vec<scalar_t, kVec>(first + v * kStep);
    });
  };

  Moments<acc_t> part{};
#pragma unroll 1
  for (int tile = 0; kManyTiles<Plan> ? tile <= last_tile : tile == 0; tile += kTile) {
    load(tile);
    const int left = elements - tile;
    const Held held(left, own);
    Moments<acc_t> here = tile_moments<Row>(raw, held, left, Row::rank(), params.is_rms_norm);
    const int warp_first = Row::rank() / Row::kLanes * Row::kLanes;
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
  part = whole_row_moments<Row>(part, blocks, elements, inverse_n, scratch, cluster_scratch, Row::rank());
  const RowNorm<acc_t> norm = finish_row(part, inverse_n, params, row, Row::rank() == 0);

  // Store, last tile first: it is still in registers
  optimization_barrier(raw);
  // Ordered loads stay behind earlier stores, within the register budget of 16-bit weights
  constexpr bool kOrdered = sizeof(weight_t) > sizeof(scalar_t);
  const int64_t parameters = parameters_of(params, row) + slice_col + own;
  const weight_t* weight = static_cast<const weight_t*>(params.weight) + parameters;
  const weight_t* bias = static_cast<const weight_t*>(params.bias) + parameters;
  const int64_t y_row = row * params.hidden_size + slice_col + own;
  const bool has_offset = params.weight && params.weight_offset != 0;
  const acc_t weight_offset = static_cast<acc_t>(has_offset ? params.weight_offset : -0.0);  // -0 changes no weight
#pragma unroll 1
  for (int tile = last_tile; kManyTiles<Plan> ? tile >= 0 : tile == 0; tile -= kTile) {
    if (tile != last_tile) load(tile);
    const Held held(elements - tile, own);
    held.for_each([&](int v, auto whole) {
      if (!whole && held.count(v) <= 0) return;
      const int at = tile + v * kStep;
      acc_t values[kVec], scale[kVec], offset[kVec];
      unpack(load_parameter<kVec, kOrdered>(weight + at, kVec, params.weight, one_vec<weight_t, kVec>()), scale);
      unpack(load_parameter<kVec, kOrdered>(bias + at, kVec, params.bias, zero_vec<weight_t, kVec>()), offset);
      unpack(raw[v], values);
#pragma unroll
      for (int i = 0; i < kVec; ++i) values[i] = fma(norm.x_hat(values[i]), scale[i] + weight_offset, offset[i]);
      if (params.y_dtype == dtype_of<scalar_t>) {
        store_vec(static_cast<scalar_t*>(params.y) + y_row + at, values);
      } else {
        store_vec_as(params.y, params.y_dtype, y_row + at, values, kVec, true);
      }
    });
  }
}

// Weight is of scalar_t or fp32. Each has a separate path through the kernel, with its own register allocation.
template <typename scalar_t, typename Plan>
__global__ void __launch_bounds__(kForwardThreads<Plan>, (Plan::kClusters ? 512 : 1024) / kForwardThreads<Plan>)
    norm_forward_kernel(const __grid_constant__ KernelForwardParams params, acc_type<scalar_t> inverse_n) {
  constexpr int kRows = kForwardThreads<Plan> / Plan::kThreads;
  using Row = RowThreads<Plan::kThreads, true>;
  const int64_t row = static_cast<int64_t>(blockIdx.x / (Plan::kClusters ? cluster_size() : 1)) * kRows + Row::group();
  // Return, do not skip: rows that share a warp name all of its lanes in their exchanges (whole_warps in reduce.cuh)
  if (row >= params.rows) return;
  if constexpr (sizeof(scalar_t) == 2) {
    if (params.weight_dtype == DType::kFloat32) return forward_row<scalar_t, float, Plan>(params, inverse_n, row);
  }
  forward_row<scalar_t, scalar_t, Plan>(params, inverse_n, row);
}

// ---- host ----------------------------------------------------------------------------------------------------------

template <typename scalar_t>
cudaError_t launch_rows(const KernelForwardParams& params, cudaStream_t stream) {
  DeviceFacts facts;
  const cudaError_t error = device_facts(facts);
  if (error != cudaSuccess) return error;
  const auto launch_plan = [&](auto plan) {
    using Plan = decltype(plan);
    const auto kernel = norm_forward_kernel<scalar_t, Plan>;
    int cluster = 1;
    if constexpr (Plan::kClusters) {
      static OncePerDevice allowed;
      const cudaError_t error = allowed.run(facts.device, [&] { return allow_more(kernel, 0, facts.max_cluster); });
      if (error != cudaSuccess) return error;
      cluster = cluster_for<Plan>(vecs_of<Plan::kVec>(params.hidden_size), facts.max_cluster);
    }
    constexpr int kRows = kForwardThreads<Plan> / Plan::kThreads;
    const ClusterLaunch launch((params.rows + kRows - 1) / kRows * cluster, kForwardThreads<Plan>, 0, cluster, stream);
    return cudaLaunchKernelEx(&launch.config, kernel, params, inverse_of<acc_type<scalar_t>>(params.hidden_size));
  };
  return dispatch_plan<ForwardLadder<scalar_t>>(params.hidden_size, facts.max_cluster, launch_plan);
}

}  // namespace

int64_t forward_workspace(const KernelForwardParams& params) {
  const bool is_long = is_long_row(params.x_dtype, params.hidden_size);
  return std::max(is_long ? forward_long_workspace(params) : 0,
                  is_huge_forward(params) ? forward_huge_workspace(params) : 0);
}

cudaError_t launch_forward(const KernelForwardParams& params, cudaStream_t stream) {
  if (params.rows >= 2 * kMaxRowsOfLaunch) {
    for (int64_t first = 0; first < params.rows; first += kMaxRowsOfLaunch) {
      const int64_t rows = std::min(kMaxRowsOfLaunch, params.rows - first);
      const cudaError_t launched = launch_forward(part_of(params, first, rows), stream);
      if (launched != cudaSuccess) return launched;
    }
    return cudaSuccess;
  }
  if (!is_huge_forward(params)) {
    const cudaError_t launched = launch_forward_ragged(params, stream);
    if (launched != cudaErrorNotSupported) return launched;
  }
  // The streaming kernel keeps one weight for all rows. Where the next row has another, clusters hold a row in
  // registers; their last plan takes rows of any length
  const bool is_per_row = params.segments > 1 && (params.segments == params.rows || params.interleaves);
  const bool is_long = is_long_row(params.x_dtype, params.hidden_size) && !is_per_row;
  if (params.segments > 1 && (is_huge_forward(params) || is_long)) {
    for (int segment = 0; segment < params.segments; ++segment) {
      const cudaError_t launched = launch_forward(segment_of_rows(params, segment), stream);
      if (launched != cudaSuccess) return launched;
    }
    return cudaSuccess;
  }
  if (is_long) {
    const cudaError_t launched = launch_forward_long(params, stream);
    if (launched != cudaErrorNotSupported) return launched;
  }
  if (is_huge_forward(params)) return launch_forward_huge(params, stream);
  LoadStage none{};
  none.residual_out_dtype = params.x_dtype;
  const cudaError_t launched = launch_usual_norm(params, none, stream);
  if (launched != cudaErrorNotSupported) return launched;
  if (!is_long_row(params.x_dtype, params.hidden_size) && params.x_dtype != DType::kFloat64)
    return launch_any_norm(params, none, {}, stream);
  return dispatch_type(params.x_dtype,
                       [&](auto types) { return launch_rows<typename decltype(types)::scalar_t>(params, stream); });
}

bool takes_stages(const KernelForwardParams& params, const LoadStage& stage, const Epilogue& epilogue) {
  const DType x = params.x_dtype, z = stage.residual_out_dtype;
  return has_fused_plan(params, z) && x != DType::kFloat64 && (z == x || z == DType::kFloat32) &&
         (!stage.residual || stage.residual_dtype == z) && !(stage.gate && stage.dropout.philox) &&
         (!epilogue.any() || params.y_dtype == x);
}

cudaError_t launch_forward(const KernelForwardParams& params, const LoadStage& stage, const Epilogue& epilogue,
                           cudaStream_t stream) {
  if (!takes_stages(params, stage, epilogue)) return cudaErrorNotSupported;
  cudaError_t launched = cudaErrorNotSupported;
  if (epilogue.any()) {
    launched = launch_epilogue_norm(params, stage, epilogue, stream);
  } else if (stage.residual) {
    launched = launch_usual_norm(params, stage, stream);
  }
  return launched != cudaErrorNotSupported ? launched : launch_any_norm(params, stage, epilogue, stream);
}

}  // namespace fused_layernorm
