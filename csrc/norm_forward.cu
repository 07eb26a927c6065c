// Forward of LayerNorm and RMSNorm.
//
//   mean = is_rms_norm ? 0 : sum(x)/N      rstd = rsqrt(sum((x-mean)^2)/N + eps)
//   x_hat = (x-mean)*rstd                  y = x_hat*(weight+weight_offset) + bias
//
// Here each row is in the registers of a group of threads, or of a cluster. How the statistics are put together is said
// in forward_rows.cuh; rows too long for this are streamed (norm_forward_long.cu).
#include "dispatch.cuh"
#include "forward_rows.cuh"
#include "launch_plan.h"
#include "norm_params.h"
#include "reduce.cuh"
#include "vector_io.cuh"

namespace fused_layernorm {
namespace {

// Of this block's part of a row, from each thread's part. All parts of a warp have the same m; n counts the warp's
// elements.
template <typename Row, typename T>
__device__ __forceinline__ Moments<T> row_moments(Moments<T> part, T inverse_n, Moments<T>* scratch) {
  part.c = Row::warp_sum(part.c);
  part.q = Row::warp_sum(part.q);
  if constexpr (Row::kWarps > 1) {
    scratch += Row::group() * Row::kWarps;
    const int lane = threadIdx.x % 32;
    if (lane == 0) scratch[Row::warp()] = part;
    Row::barrier();
    part = merge_moments<Row::kWarps>(scratch[lane % Row::kWarps], inverse_n);
  }
  return part;
}

template <typename weight_t, int kVec, typename T>
__device__ __forceinline__ void load_parameter(T (&values)[kVec], const void* parameter, int64_t col, int count) {
  const weight_t* first = static_cast<const weight_t*>(parameter) + col;
  if (count >= kVec) {
    unpack(load_vec<weight_t, kVec>(first), values);
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i)
      if (i < count) values[i] = static_cast<T>(widen(__ldg(first + i)));
  }
}

// weight + weight_offset and bias of a vector, or 1 and 0 where they are absent: as loaded before, or of a vector's
// first `count` elements from memory.
template <typename weight_t, int kVec, typename T>
__device__ __forceinline__ void affine_of(T (&scale)[kVec], T (&offset)[kVec], const NormForwardParams& params,
                                          const RawVec<weight_t, kVec>& weight, const RawVec<weight_t, kVec>& bias) {
  if (params.weight) unpack(weight, scale);
  if (params.bias) unpack(bias, offset);
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    scale[i] = params.weight ? scale[i] + static_cast<T>(params.weight_offset) : T(1);
    if (!params.bias) offset[i] = 0;
  }
}
template <typename weight_t, int kVec, typename T>
__device__ __forceinline__ void load_affine(T (&scale)[kVec], T (&offset)[kVec], const NormForwardParams& params,
                                            int64_t col, int count) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    scale[i] = 1;
    offset[i] = 0;
  }
  if (params.weight) {
    load_parameter<weight_t>(scale, params.weight, col, count);
    if (params.weight_offset != 0) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) scale[i] += static_cast<T>(params.weight_offset);
    }
  }
  if (params.bias) load_parameter<weight_t>(offset, params.bias, col, count);
}

// kAligned: rows of x and y begin at multiples of 16 bytes and are made of whole vectors. Two kernels, as what the
// others need costs registers (bf16: 64 a thread, which must do, became 64 and spills); the arithmetic is the same.
//
// kEager, for few rows, where the time is that of one row: weight and bias are loaded at the start, not when they are
// used, and the launch overlaps the kernel before (H200, fp32, 32 x 512: 2.5 us became 1.3).
template <typename scalar_t, typename weight_t, typename Plan, bool kAligned, bool kEager>
__global__ void __launch_bounds__(kForwardThreads<Plan>,
                                  kEager ? 1 : forward_blocks_per_sm<Plan, kAligned>(dtype_of<scalar_t>))
    norm_forward_kernel(const __grid_constant__ NormForwardParams params, acc_type<scalar_t> inverse_n) {
  using acc_t = acc_type<scalar_t>;
  constexpr int kThreads = Plan::kThreads, kVecs = Plan::kVecs, kVec = Plan::kVec;
  constexpr int kRows = kForwardThreads<Plan> / kThreads;
  using Row = RowThreads<kThreads, kRows>;
  __shared__ Moments<acc_t> scratch[kRows * Row::kWarps];
  __shared__ Moments<acc_t> cluster_scratch[Plan::kClusters ? kMaxCluster : 1];

  // The reference point of a warp: its mean; for 16-bit x the mean of a quarter, the vectors with v < kSample, which
  // saves most of a pass. A quarter of a set lies at most 2 sigma from its mean (Cauchy-Schwarz): var loses at most two
  // bits, of many more than 16-bit results can show.
  constexpr int kSample = sizeof(scalar_t) > 2 || kVecs < 4 ? kVecs : kVecs / 4;

  if constexpr (kEager) wait_for_previous_kernel();
  // Which row, and which slice of it: the blocks of a cluster share a row
  const int blocks = Plan::kClusters ? cluster_size() : 1;
  const int64_t row = static_cast<int64_t>(blockIdx.x / blocks) * kRows + Row::group();
  if (row >= params.rows) return;
  if (blocks > 1) cluster_arrive();
  const int64_t slice_most = (vecs_of<kVec>(params.hidden_size) + blocks - 1) / blocks * kVec;
  const int64_t slice_col = blocks > 1 ? cluster_rank() * slice_most : 0;
  const int elements = static_cast<int>(min(slice_most, params.hidden_size - slice_col));  // 0 or less in a last block
  const scalar_t* x = static_cast<const scalar_t*>(params.x) + params.x_strides.offset(row) + slice_col;
  const int rank = Row::rank();
  const int warp_first = rank - rank % Row::kLanes;
  constexpr int kTile = kThreads * kVecs * kVec;
  const int last_tile = max(elements - 1, 0) / kTile * kTile;

  RawVec<weight_t, kVec> weight_raw[kEager ? kVecs : 1], bias_raw[kEager ? kVecs : 1];
  if constexpr (kEager) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int at = (v * kThreads + rank) * kVec;
      if (at < elements && params.weight)
        weight_raw[v] = load_vec<weight_t, kVec>(static_cast<const weight_t*>(params.weight) + at);
      if (at < elements && params.bias)
        bias_raw[v] = load_vec<weight_t, kVec>(static_cast<const weight_t*>(params.bias) + at);
    }
  }

  // A full tile goes without a test a vector, so that its loads need not wait for one another.
  // Load and statistics: of the whole row when it fits the registers, else tile by tile
  RawVec<scalar_t, kVec> raw[kVecs];
  acc_t values[kVec];
  Moments<acc_t> part{};
#pragma unroll 1
  for (int tile = 0; tile <= last_tile; tile += kTile) {
    const int left = elements - tile;
    load_tile<scalar_t, kThreads>(raw, x + tile, left, rank, kAligned);
    // How many elements of this tile this thread, this warp, and this warp's sample hold
    int thread_has = kVecs * kVec, warp_has = thread_has * Row::kLanes, sample_has = kSample * kVec * Row::kLanes;
    if (left < kTile) {
      thread_has = warp_has = sample_has = 0;
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        const int from_warp = min(max(left - (v * kThreads + warp_first) * kVec, 0), Row::kLanes * kVec);
        thread_has += min(max(left - (v * kThreads + rank) * kVec, 0), kVec);
        warp_has += from_warp;
        if (v < kSample) sample_has += from_warp;
      }
    }
    acc_t sum = 0;
#pragma unroll
    for (int v = 0; v < kSample; ++v) {
      unpack(raw[v], values);
      sum += vec_sum(values);
    }
    Moments<acc_t> here{static_cast<acc_t>(thread_has), 0, 0, 0};
    if (!params.is_rms_norm && sample_has > 0) here.m = quick_ratio(Row::warp_sum(sum), sample_has);
    if constexpr (kWidenAnew<Plan>) forget(raw);
    const auto add_up = [&](auto full) {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        const int count = left - (v * kThreads + rank) * kVec;
        if (!full && count <= 0) continue;
        unpack(raw[v], values);
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[i] -= here.m;
        if (!kAligned && count < kVec) {  // what is not there must add nothing
#pragma unroll
          for (int i = 0; i < kVec; ++i)
            if (i >= count) values[i] = 0;
        }
        here.add(values);
      }
    };
    if (left >= kTile) {
      add_up(std::true_type{});
    } else {
      add_up(std::false_type{});
    }
    if (tile == 0) {
      part = here;
      part.n = static_cast<acc_t>(warp_has);
    } else {
      here = here.about(part.m);
      part.c += here.c;
      part.q += here.q;
      part.n += static_cast<acc_t>(warp_has);
    }
  }
  part = row_moments<Row>(part, blocks > 1 ? quick_ratio(acc_t(1), max(elements, 1)) : inverse_n, scratch);
  if (blocks > 1) {
    part.n = static_cast<acc_t>(max(elements, 0));
    cluster_wait();
    if (threadIdx.x < blocks) push_to_peer(cluster_scratch + cluster_rank(), threadIdx.x, part);
    cluster_sync();
    part = merge_moments<kMaxCluster>(
        threadIdx.x % kMaxCluster < blocks ? cluster_scratch[threadIdx.x % kMaxCluster] : Moments<acc_t>{}, inverse_n);
  }
  const RowNorm<acc_t> norm = finish_row(part, inverse_n, params, row, rank == 0);

  // Store: backwards, as the last tile is still in registers
  if constexpr (kWidenAnew<Plan>) forget(raw);
  const int64_t y_row = row * params.hidden_size + slice_col;
#pragma unroll 1
  for (int tile = last_tile; tile >= 0; tile -= kTile) {
    const int left = elements - tile;
    if (tile != last_tile) load_tile<scalar_t, kThreads>(raw, x + tile, left, rank, kAligned);
    const auto store = [&](auto full) {
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        const int at = (v * kThreads + rank) * kVec;
        const int count = full ? kVec : left - at;
        if (kAligned && count <= 0) continue;
        acc_t scale[kVec], offset[kVec];
        if constexpr (kEager) {
          affine_of(scale, offset, params, weight_raw[v], bias_raw[v]);
        } else {
          load_affine<weight_t>(scale, offset, params, slice_col + tile + at, kAligned ? kVec : count);
        }
        unpack(raw[v], values);
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[i] = fma(norm.x_hat(values[i]), scale[i], offset[i]);
        if (params.y_dtype != dtype_of<scalar_t>) {
          store_vec_as(params.y, params.y_dtype, y_row + tile + at, values, kAligned ? kVec : count, kAligned);
        } else if constexpr (kAligned) {
          store_vec(static_cast<scalar_t*>(params.y) + y_row + tile + at, values);
        } else {
          store_vec_anywhere<scalar_t, kVec, Row::kLanes>(static_cast<scalar_t*>(params.y) + y_row + tile + at, values,
                                                          count, Row::lane_mask());
        }
      }
    };
    if (kAligned && left >= kTile) {
      store(std::true_type{});
    } else {
      store(std::false_type{});
    }
  }
}

}  // namespace

int launch_norm_forward_cuda(const NormForwardParams& params, CUstream_st* stream) {
  int device = 0;
  DeviceFacts facts;
  const cudaError_t error = device_facts(device, facts);
  if (error != cudaSuccess) return error;
  if (is_long_row(params.x_dtype, params.hidden_size)) {
    const cudaError_t launched = launch_forward_long(params, stream);
    if (launched != cudaErrorNotSupported) return launched;
  }
  return dispatch_types(params.x_dtype, params.weight_dtype, [&](auto types) {
    using scalar_t = typename decltype(types)::scalar_t;
    using weight_t = typename decltype(types)::weight_t;
    return dispatch_plan<ForwardLadder<scalar_t>>(params.hidden_size, facts.max_cluster, [&](auto plan) {
      using Plan = decltype(plan);
      constexpr int kRows = kForwardThreads<Plan> / Plan::kThreads;
      const bool aligned =
          params.hidden_size % Plan::kVec == 0 && rows_are_aligned<scalar_t, Plan::kVec>(params.x, params.x_strides);
      const int64_t blocks = (params.rows + kRows - 1) / kRows;
      const auto inverse_n = static_cast<acc_type<scalar_t>>(1.0 / static_cast<double>(params.hidden_size));
      if constexpr (!Plan::kClusters && sizeof(scalar_t) < 8 && Plan::kVecs <= 4) {
        if (aligned && blocks <= kEagerBlocks) {
          const OverlappedLaunch launch(dim3(static_cast<unsigned>(blocks)), dim3(kForwardThreads<Plan>), stream);
          return cudaLaunchKernelEx(&launch.config, norm_forward_kernel<scalar_t, weight_t, Plan, true, true>, params,
                                    inverse_n);
        }
      }
      const auto kernel = aligned ? norm_forward_kernel<scalar_t, weight_t, Plan, true, false>
                                  : norm_forward_kernel<scalar_t, weight_t, Plan, false, false>;
      int cluster = 1;
      if constexpr (Plan::kClusters) {
        static OncePerDevice allowed[2];
        const cudaError_t error =
            allowed[aligned].run(device, [&] { return allow_more(kernel, 0, facts.max_cluster); });
        if (error != cudaSuccess) return error;
        cluster = cluster_for<Plan>(vecs_of<Plan::kVec>(params.hidden_size), facts.max_cluster);
      }
      const ClusterLaunch launch(blocks * cluster, kForwardThreads<Plan>, 0, cluster, stream);
      return cudaLaunchKernelEx(&launch.config, kernel, params, inverse_n);
    });
  });
}

}  // namespace fused_layernorm
