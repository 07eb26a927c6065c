// Forward of LayerNorm and RMSNorm for long rows, on cards with the copy engine and clusters of 16 (sm_90, sm_100).
//
// A persistent cluster shares each row; a block has the same columns of every row, and keeps their weight and bias in
// registers. Slices of rows stream through a ring in shared memory: a slice is summed when it arrives, and read again
// and written as y some rows later, when the sums of the other blocks are there. So x is read from memory once, and no
// thread waits for an exchange. Clusters claim the next row when they have a free slot: memory is accessed almost
// in order, and all clusters end together (benchmarks/tuning.md, "Persistent blocks drift apart").
#include "dispatch.cuh"
#include "forward_rows.cuh"
#include "kernel_params.h"
#include "launch_plan.h"
#include "reduce.cuh"
#include "vector_io.cuh"

namespace fused_layernorm {
namespace {

// The most rows whose sums are being exchanged; a power of two. An exchange is never overwritten too early: a block
// sums row i + kExchanges after it wrote row i + kExchanges - delay - 1, for which it needed every block's sums of that
// row; a block sends those after it has finished the exchange two rows before. So all have finished row i if kExchanges
// >= delay + 3.
template <typename Plan>
constexpr int kExchanges = Plan::kDelay + 3 <= 8 ? 8 : 16;

// The columns of a block.
struct Slice {
  int64_t first_col;
  int vecs;

  template <int kVec>
  __device__ static Slice of(int64_t hidden_size) {
    const int64_t all = hidden_size / kVec, blocks = cluster_size(), most = (all + blocks - 1) / blocks;
    const int64_t first = cluster_rank() * most;
    return {first * kVec, static_cast<int>(max(min(most, all - first), int64_t{0}))};
  }

  // The number of elements in the first `vecs_each` vectors of this warp's threads.
  template <int kThreads, int kVec>
  __device__ int warp_elements(int vecs_each) const {
    const int warp_first = static_cast<int>(threadIdx.x) / 32 * 32;
    int count = 0;
    for (int v = 0; v < vecs_each; ++v) count += min(max(vecs - v * kThreads - warp_first, 0), 32);
    return count * kVec;
  }
};

// Whether threads keep bias in registers, like weight; else they read it from the cache for each row.
template <typename Plan>
constexpr bool kKeepsBias = Plan::kVecs <= 4;

// Bytes of a slice in the ring, with room for its alignment modulo 128 bytes (see RowRing in row_ring.cuh).
template <typename Plan>
constexpr int kSlicePitch = Plan::kThreads * Plan::kVecs * 16 + 128;

// Beside the warps that sum and write, one producer warp issues bulk copies of slices, and one warp merges the sums of
// warps and blocks. They synchronize row by row through mbarriers.
//
// next_row: a counter in global memory, initially 0; nullptr: rows are assigned round-robin. The bits of a row do not
// depend on its cluster.
template <typename scalar_t, typename weight_t, typename Plan>
__global__ void __launch_bounds__(kStreamThreads<Plan>, Plan::kBlocksPerSm)
    norm_forward_stream_kernel(const __grid_constant__ KernelForwardParams params, float inverse_n,
                               unsigned* next_row) {
#if __CUDA_ARCH__ >= 900
  constexpr int kThreads = Plan::kThreads, kVecs = Plan::kVecs, kVec = Plan::kVec, kPitch = kSlicePitch<Plan>;
  constexpr int kExchangeSlots = kExchanges<Plan>;
  constexpr int kSample = sizeof(scalar_t) > 2 || kVecs < 4 ? kVecs : kVecs / 4;  // as in norm_forward.cu
  static_assert(kExchangeSlots >= Plan::kDelay + 3 && Plan::kDepth > Plan::kDelay && Plan::kDelay > 0);
  using Row = RowThreads<kThreads, 1>;
  using Vec = RawVec<scalar_t, kVec>;
  extern __shared__ __align__(128) uint4 ring_memory[];
  __shared__ uint64_t claimed[Plan::kDepth], arrived[Plan::kDepth], released[Plan::kDepth];
  __shared__ int64_t claims[Plan::kDepth];          // by the first block
  __shared__ int64_t rows[Plan::kDepth];            // in the ring; -1: the end
  __shared__ unsigned slice_offsets[Plan::kDepth];  // alignment of a slice in its slot
  __shared__ uint64_t summed[kExchangeSlots], exchanged[kExchangeSlots], finished[kExchangeSlots];
  alignas(16) __shared__ Moments<float> warp_parts[kExchangeSlots][Row::kWarps];
  alignas(16) __shared__ Moments<float> block_parts[kExchangeSlots][kMaxCluster];
  __shared__ RowNorm<float> norms[kExchangeSlots];

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
    for (int i = 0; i < kExchangeSlots; ++i) {
      init_barrier(summed_at + 8 * i, Row::kWarps);
      init_barrier(exchanged_at + 8 * i, 1);
      init_barrier(finished_at + 8 * i, kWarpArrivals);
    }
    fence_barrier_init();
  }
  cluster_sync();

  // The slot of the ring, and the parity of its phase
  int slot = 0;
  unsigned parity = 0;
  const auto next_slot = [&] {
    if (++slot == Plan::kDepth) {
      slot = 0;
      parity ^= 1;
    }
  };
  // The exchange of a block's `iteration`-th row
  const auto exchange_of = [](unsigned iteration) { return iteration % kExchangeSlots; };
  const auto parity_of = [](unsigned iteration) { return iteration / kExchangeSlots % 2; };

  if (warp == Row::kWarps) {
    // Load
    if (lane > 0) return;
    const unsigned bytes = 16 * slice.vecs;
    const char* x = reinterpret_cast<const char*>(static_cast<const scalar_t*>(params.x) + slice.first_col);
    const bool claims_rows = next_row && cluster_rank() == 0;
    int64_t next = claims_rows ? atomicAdd(next_row, 1u) : 0;  // requested early, to overlap the waits
    for (int64_t row = first_row;; row += row_step) {
      wait_barrier(released_at + 8 * slot, parity ^ 1);
      if (claims_rows) {
        // All blocks have read the previous claim of this slot: this block has their sums of that row
        for (int peer = 0; peer < blocks; ++peer) send_to_peer(&claims[slot], claimed_at + 8 * slot, peer, next);
        if (next < params.rows) next = atomicAdd(next_row, 1u);
      }
      if (next_row) {
        expect_bytes(claimed_at + 8 * slot, sizeof(claims[slot]));
        wait_barrier(claimed_at + 8 * slot, parity);
        row = claims[slot];
      }
      if (row >= params.rows) {
        rows[slot] = -1;
        arrive_barrier(arrived_at + 8 * slot);
        break;
      }
      const char* source = x + params.x_strides.offset(row) * static_cast<int64_t>(sizeof(scalar_t));
      const unsigned slice_offset = static_cast<unsigned>(reinterpret_cast<uintptr_t>(source) % 128);
      rows[slot] = row;
      slice_offsets[slot] = slice_offset;
      expect_bytes(arrived_at + 8 * slot, bytes);
      copy_bulk(memory + slot * kPitch + slice_offset, source, bytes, arrived_at + 8 * slot);
      next_slot();
    }
  } else if (warp == Row::kWarps + 1) {
    // Merge the sums of the warps; those of the other blocks one row behind
    const float elements = static_cast<float>(slice.vecs * kVec);
    const float inverse_slice = quick_ratio(1.f, max(slice.vecs * kVec, 1));
    const auto receive = [&](unsigned iteration, int64_t row) {
      const unsigned exchange = exchange_of(iteration);
      wait_barrier(exchanged_at + 8 * exchange, parity_of(iteration));
      Moments<float> part{};
      if (lane % kMaxCluster < blocks) part = block_parts[exchange][lane % kMaxCluster];
      const RowNorm<float> norm = finish_row(merge_moments<kMaxCluster>(part, inverse_n), inverse_n, params, row,
                                             lane == 0 && cluster_rank() == 0);
      if (lane == 0) norms[exchange] = norm;
      arrive_of_warp(finished_at + 8 * exchange);
    };
    unsigned iteration = 0;
    int64_t row_before = 0;
    for (;; ++iteration) {
      wait_barrier(arrived_at + 8 * slot, parity);
      const int64_t row = rows[slot];
      if (row < 0) break;
      next_slot();
      const unsigned exchange = exchange_of(iteration);
      wait_barrier(summed_at + 8 * exchange, parity_of(iteration));
      Moments<float> part = merge_moments<Row::kWarps>(warp_parts[exchange][lane % Row::kWarps], inverse_slice);
      part.n = elements;
      if (lane == 0) expect_bytes(exchanged_at + 8 * exchange, blocks * static_cast<unsigned>(sizeof(part)));
      if (lane < blocks) send_to_peer(&block_parts[exchange][cluster_rank()], exchanged_at + 8 * exchange, lane, part);
      if (iteration > 0) receive(iteration - 1, row_before);
      row_before = row;
    }
    // A block must not exit while others send to it
    if (iteration > 0) receive(iteration - 1, row_before);
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
    const auto slice_at = [&](int slot) { return memory + slot * kPitch + slice_offsets[slot]; };
    const auto read = [&](unsigned at, int v) {
      Vec raw;
      raw.words[0] = load_shared(at + 16 * (v * kThreads + rank));
      return raw;
    };

    // `all`: the slice is full, no vector needs a test.
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
      optimization_barrier(raw);
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
    // plain: y of x's type, no weight_offset
    const auto write = [&](unsigned at, const RowNorm<float>& norm, int64_t y_index, auto all, auto plain) {
      optimization_barrier(weight);  // or the widened values are kept, in twice the registers
      if constexpr (kKeepsBias<Plan>) optimization_barrier(bias);
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

    unsigned iteration = 0, written = 0;  // rows summed, rows written
    int writing = 0;                      // slot of the next row to write
    for (bool more = true; more || written < iteration;) {
      if (more) {
        const unsigned exchange = exchange_of(iteration);
        wait_barrier(arrived_at + 8 * slot, parity);
        if (rows[slot] < 0) {
          more = false;
          continue;
        }
        const unsigned at = slice_at(slot);
        const Moments<float> part = full ? sum_up(at, std::true_type{}) : sum_up(at, std::false_type{});
        if (lane == 0) {
          warp_parts[exchange][warp] = part;
          arrive_barrier(summed_at + 8 * exchange);
        }
        next_slot();
        if (++iteration <= Plan::kDelay) continue;
      }
      const unsigned exchange = exchange_of(written);
      wait_barrier(finished_at + 8 * exchange, parity_of(written));
      const RowNorm<float> norm = norms[exchange];
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

// The number of resident clusters of a kernel on the current device; 0 if none fits, as in a MIG slice.
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
  cudaGetLastError();  // clear the error of a query
  return 0;
}

template <typename scalar_t, typename weight_t, typename Plan>
cudaError_t launch_plan(const KernelForwardParams& params, int device, const DeviceFacts& facts, cudaStream_t stream) {
  constexpr int kDevices = 64, kThreads = kStreamThreads<Plan>, kBytes = Plan::kDepth * kSlicePitch<Plan>;
  static std::atomic<int> known[kDevices][kMaxCluster + 1];  // 0: unknown, else 1 + clusters
  const int64_t tile = Plan::kThreads * Plan::kVecs * Plan::kVec;
  int cluster = 2;  // powers of two fill the GPCs of a card
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
