// Forward of LayerNorm and RMSNorm for long rows, on cards with the copy engine and clusters of 16 (sm_90, sm_100).
//
// Persistent clusters share rows; a block has the same columns of every row, whose weight and bias its threads keep in
// registers. Slices of rows stream through a ring in shared memory: a slice is summed when it has arrived, and read
// again and written as y some rows later, by when the sums of the other blocks have come. So x is read from memory
// once, and nobody waits for an exchange. Clusters claim the next row when they have room for it: memory is read and
// written almost in order, and they end together (benchmarks/README.md, "Persistent blocks drift apart").
#include "dispatch.cuh"
#include "forward_rows.cuh"
#include "kernel_params.h"
#include "launch_plan.h"
#include "reduce.cuh"
#include "vector_io.cuh"

namespace fused_layernorm {
namespace {

// Rows whose sums are on their way between warps and blocks, at most; a power of two. Nobody overruns them: a block
// sums row i + kExchanges after it wrote row i + kExchanges - delay - 1, for which it needed every block's sums of that
// row; a block sends those after it is done with the exchange two rows before. So all are done with row i if kExchanges
// >= delay + 3.
template <typename Plan>
constexpr int kExchanges = Plan::kDelay + 3 <= 8 ? 8 : 16;

// The part of each row that one block holds.
struct Slice {
  int64_t first_col;
  int vecs;

  template <int kVec>
  __device__ static Slice of(int64_t hidden_size) {
    const int64_t all = hidden_size / kVec, blocks = cluster_size(), most = (all + blocks - 1) / blocks;
    const int64_t first = cluster_rank() * most;
    return {first * kVec, static_cast<int>(max(min(most, all - first), int64_t{0}))};
  }

  // Elements that this warp has of the first `vecs_each` vectors of its threads.
  template <int kThreads, int kVec>
  __device__ int warp_elements(int vecs_each) const {
    const int warp_first = static_cast<int>(threadIdx.x) / 32 * 32;
    int count = 0;
    for (int v = 0; v < vecs_each; ++v) count += min(max(vecs - v * kThreads - warp_first, 0), 32);
    return count * kVec;
  }
};

// Whether threads keep bias in registers, as weight; else they read it from the cache for each row.
template <typename Plan>
constexpr bool kKeepsBias = Plan::kVecs <= 4;

// Bytes of a slice in the ring, with room for its address's place within 128 bytes (RowRing in backward_fused.cuh says
// why).
template <typename Plan>
constexpr int kSlicePitch = Plan::kThreads * Plan::kVecs * 16 + 128;

// Beside the warps that sum and write there are one that asks the copy engine for slices and one that merges the sums
// of warps and blocks. They wait for each other row by row, at barriers in shared memory.
//
// next_row: 0 at first, in global memory; nullptr: rows are dealt out in turn. Which cluster has a row is not seen in
// its bits.
template <typename scalar_t, typename weight_t, typename Plan>
__global__ void __launch_bounds__(kStreamThreads<Plan>, Plan::kBlocksPerSm)
    norm_forward_stream_kernel(const __grid_constant__ KernelForwardParams params, float inverse_n,
                               unsigned* next_row) {
#if __CUDA_ARCH__ >= 900
  constexpr int kThreads = Plan::kThreads, kVecs = Plan::kVecs, kVec = Plan::kVec, kPitch = kSlicePitch<Plan>;
  constexpr int kSlots = kExchanges<Plan>;
  constexpr int kSample = sizeof(scalar_t) > 2 || kVecs < 4 ? kVecs : kVecs / 4;  // as in norm_forward.cu
  static_assert(kSlots >= Plan::kDelay + 3 && Plan::kDepth > Plan::kDelay && Plan::kDelay > 0);
  using Row = RowThreads<kThreads, 1>;
  using Vec = RawVec<scalar_t, kVec>;
  extern __shared__ __align__(128) uint4 ring_memory[];
  __shared__ uint64_t claimed[Plan::kDepth], arrived[Plan::kDepth], released[Plan::kDepth];
  __shared__ int64_t claims[Plan::kDepth], rows[Plan::kDepth];  // by the first block; those loaded here, -1 at the end
  __shared__ unsigned places[Plan::kDepth];                     // of a slice in its stage
  __shared__ uint64_t summed[kSlots], exchanged[kSlots], finished[kSlots];
  alignas(16) __shared__ Moments<float> warp_parts[kSlots][Row::kWarps];
  alignas(16) __shared__ Moments<float> block_parts[kSlots][kMaxCluster];
  __shared__ RowNorm<float> norms[kSlots];

  const int blocks = cluster_size();
  const int64_t first_row = blockIdx.x / blocks, row_step = gridDim.x / blocks;
  const Slice slice = Slice::of<kVec>(params.hidden_size);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32;
  const unsigned memory = shared_address(ring_memory);
  const unsigned claimed_at = shared_address(claimed);
  const unsigned arrived_at = shared_address(arrived), released_at = shared_address(released);
  const unsigned summed_at = shared_address(summed), exchanged_at = shared_address(exchanged);
  const unsigned finished_at = shared_address(finished);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Plan::kDepth; ++i) {
      init_barrier(claimed_at + 8 * i, 1);
      init_barrier(arrived_at + 8 * i, 1);
      init_barrier(released_at + 8 * i, Row::kWarps * kWarpArrivals);
    }
    for (int i = 0; i < kSlots; ++i) {
      init_barrier(summed_at + 8 * i, Row::kWarps);
      init_barrier(exchanged_at + 8 * i, 1);
      init_barrier(finished_at + 8 * i, kWarpArrivals);
    }
    fence_barrier_init();
  }
  cluster_sync();

  // The ring: which stage, and the parity of its phase
  int stage = 0;
  unsigned parity = 0;
  const auto next_stage = [&] {
    if (++stage == Plan::kDepth) {
      stage = 0;
      parity ^= 1;
    }
  };
  // The exchange of a block's `turn`-th row
  const auto slot_of = [](unsigned turn) { return turn % kSlots; };
  const auto parity_of = [](unsigned turn) { return turn / kSlots % 2; };

  if (warp == Row::kWarps) {
    // Load
    if (lane > 0) return;
    const unsigned bytes = 16 * slice.vecs;
    const char* x = reinterpret_cast<const char*>(static_cast<const scalar_t*>(params.x) + slice.first_col);
    const bool claims_rows = next_row && cluster_rank() == 0;
    int64_t next = claims_rows ? atomicAdd(next_row, 1u) : 0;  // on its way while others are waited for
    for (int64_t row = first_row;; row += row_step) {
      wait_barrier(released_at + 8 * stage, parity ^ 1);
      if (claims_rows) {
        // The others are done with the claim before in this place: this block has their sums of that row
        for (int peer = 0; peer < blocks; ++peer) send_to_peer(&claims[stage], claimed_at + 8 * stage, peer, next);
        if (next < params.rows) next = atomicAdd(next_row, 1u);
      }
      if (next_row) {
        expect_bytes(claimed_at + 8 * stage, sizeof(claims[stage]));
        wait_barrier(claimed_at + 8 * stage, parity);
        row = claims[stage];
      }
      if (row >= params.rows) {
        rows[stage] = -1;
        arrive_barrier(arrived_at + 8 * stage);
        break;
      }
      const char* source = x + params.x_strides.offset(row) * static_cast<int64_t>(sizeof(scalar_t));
      const unsigned place = static_cast<unsigned>(reinterpret_cast<uintptr_t>(source) % 128);
      rows[stage] = row;
      places[stage] = place;
      expect_bytes(arrived_at + 8 * stage, bytes);
      copy_bulk(memory + stage * kPitch + place, source, bytes, arrived_at + 8 * stage);
      next_stage();
    }
  } else if (warp == Row::kWarps + 1) {
    // Statistics, from the warps' sums on; those of other blocks one row behind
    const float elements = static_cast<float>(slice.vecs * kVec);
    const float inverse_slice = quick_ratio(1.f, max(slice.vecs * kVec, 1));
    const auto receive = [&](unsigned turn, int64_t row) {
      const unsigned slot = slot_of(turn);
      wait_barrier(exchanged_at + 8 * slot, parity_of(turn));
      Moments<float> part{};
      if (lane % kMaxCluster < blocks) part = block_parts[slot][lane % kMaxCluster];
      const RowNorm<float> norm = finish_row(merge_moments<kMaxCluster>(part, inverse_n), inverse_n, params, row,
                                             lane == 0 && cluster_rank() == 0);
      if (lane == 0) norms[slot] = norm;
      arrive_of_warp(finished_at + 8 * slot);
    };
    unsigned turn = 0;
    int64_t row_before = 0;
    for (;; ++turn) {
      wait_barrier(arrived_at + 8 * stage, parity);
      const int64_t row = rows[stage];
      if (row < 0) break;
      next_stage();
      const unsigned slot = slot_of(turn);
      wait_barrier(summed_at + 8 * slot, parity_of(turn));
      Moments<float> part = merge_moments<Row::kWarps>(warp_parts[slot][lane % Row::kWarps], inverse_slice);
      part.n = elements;
      if (lane == 0) expect_bytes(exchanged_at + 8 * slot, blocks * static_cast<unsigned>(sizeof(part)));
      if (lane < blocks) send_to_peer(&block_parts[slot][cluster_rank()], exchanged_at + 8 * slot, lane, part);
      if (turn > 0) receive(turn - 1, row_before);
      row_before = row;
    }
    // A block does not end before all that others send to it has come
    if (turn > 0) receive(turn - 1, row_before);
  } else {
    const int rank = threadIdx.x;
    const bool full = slice.vecs == kThreads * kVecs;
    const auto has = [&](int v) { return v * kThreads + rank < slice.vecs; };
    const int64_t own_col = slice.first_col + rank * kVec;
    RawVec<weight_t, kVec> weight[kVecs], bias[kKeepsBias<Plan> ? kVecs : 1];
    const auto load_bias = [&](int v) {
      if (!params.bias || !has(v)) return zero_vec<weight_t, kVec>();
      return load_vec<weight_t, kVec>(static_cast<const weight_t*>(params.bias) + own_col + v * kThreads * kVec);
    };
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      weight[v] = one_vec<weight_t, kVec>();
      if (params.weight && has(v))
        weight[v] =
            load_vec<weight_t, kVec>(static_cast<const weight_t*>(params.weight) + own_col + v * kThreads * kVec);
      if constexpr (kKeepsBias<Plan>) bias[v] = load_bias(v);
    }
    const float weight_offset = params.weight ? static_cast<float>(params.weight_offset) : 0.f;
    const int sampled = slice.warp_elements<kThreads, kVec>(kSample);
    const float held = static_cast<float>(slice.warp_elements<kThreads, kVec>(kVecs));
    const auto slice_at = [&](int stage) { return memory + stage * kPitch + places[stage]; };
    const auto read = [&](unsigned at, int v) {
      Vec raw;
      raw.words[0] = load_shared(at + 16 * (v * kThreads + rank));
      return raw;
    };

    // A full slice goes without a test a vector.
    const auto sum_up = [&](unsigned at, auto all) {
      Vec raw[kVecs];
      float values[kVec];
#pragma unroll
      for (int v = 0; v < kVecs; ++v) raw[v] = all || has(v) ? read(at, v) : zero_vec<scalar_t, kVec>();
      Moments<float> part{held, 0, 0, 0};
      if (!params.is_rms_norm) {
        float sum = 0;
#pragma unroll
        for (int v = 0; v < kSample; ++v) {
          unpack(raw[v], values);
          sum += vec_sum(values);
        }
        sum = Row::warp_sum(sum);
        unpack(raw[0], values);
        const float first = __shfl_sync(0xffffffffu, values[0], 0);
        if (sampled > 0) part.m = snapped(quick_ratio(sum, sampled), first);
      }
      forget(raw);
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        if (!all && !has(v)) continue;
        unpack(raw[v], values);
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[i] -= part.m;
        part.add(values);
      }
      part.c = Row::warp_sum(part.c);
      part.q = Row::warp_sum(part.q);
      return part;
    };
    // Plain: y of x's type, no weight_offset
    const auto write = [&](unsigned at, const RowNorm<float>& norm, int64_t y_index, auto all, auto plain) {
      forget(weight);  // or they are kept widened, in twice the registers
      if constexpr (kKeepsBias<Plan>) forget(bias);
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        if (!all && !has(v)) continue;
        float values[kVec], scale[kVec], offset[kVec];
        unpack(weight[v], scale);
        unpack(kKeepsBias<Plan> ? bias[kKeepsBias<Plan> ? v : 0] : load_bias(v), offset);
        unpack(read(at, v), values);
        if (!plain) {
#pragma unroll
          for (int i = 0; i < kVec; ++i) scale[i] += weight_offset;
        }
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[i] = fma(norm.x_hat(values[i]), scale[i], offset[i]);
        if (plain || params.y_dtype == dtype_of<scalar_t>) {
          store_vec(static_cast<scalar_t*>(params.y) + y_index + v * kThreads * kVec, values);
        } else {
          store_vec_as(params.y, params.y_dtype, y_index + v * kThreads * kVec, values, kVec, true);
        }
      }
    };
    const bool plain = params.y_dtype == dtype_of<scalar_t> && weight_offset == 0;

    unsigned turn = 0, written = 0;  // rows summed, rows written
    int writing = 0;                 // stage of the next to write
    for (bool more = true; more || written < turn;) {
      if (more) {
        const unsigned slot = slot_of(turn);
        wait_barrier(arrived_at + 8 * stage, parity);
        if (rows[stage] < 0) {
          more = false;
          continue;
        }
        const unsigned at = slice_at(stage);
        const Moments<float> part = full ? sum_up(at, std::true_type{}) : sum_up(at, std::false_type{});
        if (lane == 0) {
          warp_parts[slot][warp] = part;
          arrive_barrier(summed_at + 8 * slot);
        }
        next_stage();
        if (++turn <= Plan::kDelay) continue;
      }
      const unsigned slot = slot_of(written);
      wait_barrier(finished_at + 8 * slot, parity_of(written));
      const RowNorm<float> norm = norms[slot];
      const unsigned at = slice_at(writing);
      const int64_t y_index = rows[writing] * params.hidden_size + own_col;
      if (!plain) {
        write(at, norm, y_index, std::false_type{}, std::false_type{});
      } else if (full) {
        write(at, norm, y_index, std::true_type{}, std::true_type{});
      } else {
        write(at, norm, y_index, std::false_type{}, std::true_type{});
      }
      arrive_of_warp(released_at + 8 * writing);
      if (++writing == Plan::kDepth) writing = 0;
      ++written;
    }
  }
#endif
}

// ---- host ----------------------------------------------------------------------------------------------------------

// How many clusters of a kernel run at once on the current device; 0 where they find no room, as in a slice of a card
// (MIG).
template <typename Kernel>
int clusters_at_once(Kernel kernel, const DeviceFacts& facts, int threads, int bytes, int cluster) {
  cudaFuncAttributes attributes{};
  int clusters = 0;
  const ClusterLaunch one(cluster, threads, bytes, cluster);
  const bool runs = cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess &&
                    static_cast<int>(attributes.sharedSizeBytes) + bytes <= facts.shared_bytes &&
                    allow_more(kernel, bytes, facts.max_cluster) == cudaSuccess &&
                    cudaOccupancyMaxActiveClusters(&clusters, kernel, &one.config) == cudaSuccess;
  if (runs) return std::min(clusters, kMostClusters);
  cudaGetLastError();  // the error of a question is nobody else's business
  return 0;
}

template <typename scalar_t, typename weight_t, typename Plan>
cudaError_t launch_plan(const KernelForwardParams& params, int device, const DeviceFacts& facts, cudaStream_t stream) {
  constexpr int kDevices = 64, kThreads = kStreamThreads<Plan>, kBytes = Plan::kDepth * kSlicePitch<Plan>;
  static std::atomic<int> known[kDevices][kMaxCluster + 1];  // 0: not asked yet, else 1 + clusters
  const int64_t tile = Plan::kThreads * Plan::kVecs * Plan::kVec;
  int cluster = 2;  // powers of two, which fill a card's groups of SMs
  while (cluster * tile < params.hidden_size) cluster *= 2;
  if (cluster > facts.max_cluster || params.hidden_size % Plan::kVec != 0) return cudaErrorNotSupported;

  const auto kernel = norm_forward_stream_kernel<scalar_t, weight_t, Plan>;
  int clusters = device < kDevices ? known[device][cluster].load(std::memory_order_acquire) - 1 : -1;
  if (clusters < 0) {
    clusters = clusters_at_once(kernel, facts, kThreads, kBytes, cluster);
    if (device < kDevices) known[device][cluster].store(1 + clusters, std::memory_order_release);
  }
  if (clusters == 0) return cudaErrorNotSupported;
  unsigned* next_row = params.rows >= kClaimedRows * clusters ? static_cast<unsigned*>(params.workspace) : nullptr;
  if (next_row) {
    const cudaError_t error = cudaMemsetAsync(next_row, 0, sizeof(*next_row), stream);
    if (error != cudaSuccess) return error;
  }
  const ClusterLaunch launch(std::min<int64_t>(params.rows, clusters) * cluster, kThreads, kBytes, cluster, stream);
  return cudaLaunchKernelEx(&launch.config, kernel, params, inverse_of<float>(params.hidden_size), next_row);
}

}  // namespace

cudaError_t launch_forward_long(const KernelForwardParams& params, cudaStream_t stream) {
  int device = 0;
  DeviceFacts facts;
  const cudaError_t error = device_facts(device, facts);
  if (error != cudaSuccess) return error;
  if (facts.max_cluster < kMaxCluster) return cudaErrorNotSupported;  // never measured on such cards
  return dispatch_types(params.x_dtype, params.weight_dtype, [&](auto types) {
    using scalar_t = typename decltype(types)::scalar_t;
    using weight_t = typename decltype(types)::weight_t;
    if constexpr (sizeof(scalar_t) == 8) {
      return cudaErrorNotSupported;
    } else {
      return dispatch_plan<StreamLadder<scalar_t, weight_t>>(params.hidden_size, facts.max_cluster, [&](auto plan) {
        return launch_plan<scalar_t, weight_t, decltype(plan)>(params, device, facts, stream);
      });
    }
  });
}

}  // namespace fused_layernorm
