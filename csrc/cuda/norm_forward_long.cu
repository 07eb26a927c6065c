// Forward of LayerNorm and RMSNorm for long rows, on cards with the copy engine and clusters of 16 (sm_90, sm_100).
//
// Several persistent blocks share each row; a block has the same columns of every row, and keeps their weight and bias
// in registers. Slices of rows stream through a ring in shared memory: a slice is summed when it arrives, and read
// again and written as y some rows later, when the sums of the other blocks are there. So x is read from memory once,
// and no thread waits for an exchange. Up to 16 blocks are a cluster. Clusters claim the next row when they have a free
// slot: memory is accessed almost in order, and all clusters end together (benchmarks/tuning.md, "Persistent blocks
// drift apart"). More blocks exchange their sums through global memory, and take rows in turn.
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
  __device__ static Slice of(int64_t hidden_size, int64_t blocks, int rank) {
    const int64_t all = hidden_size / kVec, most = (all + blocks - 1) / blocks;
    const int64_t first = rank * most;
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

// Arguments beside KernelForwardParams.
struct StreamArguments {
  float inverse_n;
  unsigned* next_row;  // a counter in global memory, initially 0; nullptr: rows are assigned round-robin
  // With a global exchange
  int blocks;            // that share a row
  Moments<float>* sums;  // [rows, blocks], initially 0
};

// Bytes of a slice in the ring, with room for its alignment modulo 128 bytes (see RowRing in row_ring.cuh).
template <typename Plan>
constexpr int kSlicePitch = Plan::kThreads * Plan::kVecs * 16 + 128;

// A slot of the ring, and the parity of its phase.
template <int kDepth>
struct RingSlot {
  unsigned parity = 0;
  int slot = 0;

  __device__ void next() {
    if (++slot == kDepth) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// A block: what all its warps know. The ring and the arrays are shared memory.
template <typename scalar_t, typename Plan>
struct StreamBlock {
  static constexpr int kThreads = Plan::kThreads, kVec = Plan::kVec, kWarps = kThreads / 32, kDepth = Plan::kDepth;
  static constexpr bool kGlobal = Plan::kGlobalExchange;
  static constexpr int kPitch = kSlicePitch<Plan>, kExchangeSlots = kExchanges<Plan>;
  static_assert(kExchangeSlots >= Plan::kDelay + 3 && kDepth > Plan::kDelay && Plan::kDelay > 0);

  const KernelForwardParams& params;
  const StreamArguments& arguments;
  const uint4* ring_memory;
  int64_t (&claims)[kDepth];          // by the first block
  int64_t (&rows)[kDepth];            // in the ring; -1: the end
  unsigned (&slice_offsets)[kDepth];  // alignment of a slice in its slot
  Moments<float> (&warp_parts)[kExchangeSlots][kWarps];
  Moments<float> (&block_parts)[kExchangeSlots][kMaxCluster];
  RowNorm<float> (&norms)[kExchangeSlots];
  // Barriers of each slot, and of each exchange (shared addresses)
  unsigned claimed, arrived, released, summed, exchanged, finished;

  int blocks = kGlobal ? arguments.blocks : cluster_size();  // of a row
  int rank = kGlobal ? static_cast<int>(blockIdx.x) % blocks : cluster_rank();
  int64_t first_row = blockIdx.x / blocks, row_step = gridDim.x / blocks;
  Slice slice = Slice::of<kVec>(params.hidden_size, blocks, rank);
  int warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32;
  unsigned memory = shared_address(ring_memory);

  // Called by one thread; ready after the next barrier of the cluster.
  __device__ void init_barriers() const {
    for (int i = 0; i < kDepth; ++i) {
      init_barrier(claimed + 8 * i, 1);
      init_barrier(arrived + 8 * i, 1);
      init_barrier(released + 8 * i, kWarps * kWarpArrivals);
    }
    for (int i = 0; i < kExchangeSlots; ++i) {
      init_barrier(summed + 8 * i, kWarps);
      init_barrier(exchanged + 8 * i, 1);
      init_barrier(finished + 8 * i, kWarpArrivals);
    }
    fence_barrier_init();
  }

  // The exchange of a block's `iteration`-th row
  __device__ static unsigned exchange_of(unsigned iteration) { return iteration % kExchangeSlots; }
  __device__ static unsigned parity_of(unsigned iteration) { return iteration / kExchangeSlots % 2; }

  // Load, by one thread: claims rows, and issues the bulk copies of their slices.
  __device__ __forceinline__ void produce() {
    unsigned* const next_row = arguments.next_row;
    const unsigned bytes = 16 * slice.vecs;
    const char* x = reinterpret_cast<const char*>(static_cast<const scalar_t*>(params.x) + slice.first_col);
    const bool claims_rows = next_row && rank == 0;
    int64_t next = claims_rows ? atomicAdd(next_row, 1u) : 0;  // requested early, to overlap the waits
    RingSlot<kDepth> ring;
    for (int64_t row = first_row;; row += row_step) {
      const int slot = ring.slot;
      const unsigned parity = ring.parity;
      wait_barrier(released + 8 * slot, parity ^ 1);
      if (claims_rows) {
        // All blocks have read the previous claim of this slot: this block has their sums of that row
        for (int peer = 0; peer < blocks; ++peer) send_to_peer(&claims[slot], claimed + 8 * slot, peer, next);
        if (next < params.rows) next = atomicAdd(next_row, 1u);
      }
      if (next_row) {
        expect_bytes(claimed + 8 * slot, sizeof(claims[slot]));
        wait_barrier(claimed + 8 * slot, parity);
        row = claims[slot];
      }
      if (row >= params.rows) {
        rows[slot] = -1;
        arrive_barrier(arrived + 8 * slot);
        break;
      }
      const char* source = x + params.x_strides.offset(row) * static_cast<int64_t>(sizeof(scalar_t));
      const unsigned slice_offset = static_cast<unsigned>(reinterpret_cast<uintptr_t>(source) % 128);
      rows[slot] = row;
      slice_offsets[slot] = slice_offset;
      expect_bytes(arrived + 8 * slot, bytes);
      copy_bulk(memory + slot * kPitch + slice_offset, source, bytes, arrived + 8 * slot);
      ring.next();
    }
  }

  // The sums of the block's `iteration`-th row, merged from those of its warps.
  __device__ __forceinline__ Moments<float> block_sums(unsigned iteration) const {
    const unsigned exchange = exchange_of(iteration);
    wait_barrier(summed + 8 * exchange, parity_of(iteration));
    const float inverse_slice = quick_ratio(1.f, max(slice.vecs * kVec, 1));
    Moments<float> part = merge_moments<kWarps>(warp_parts[exchange][lane % kWarps], inverse_slice);
    part.n = static_cast<float>(slice.vecs * kVec);
    return part;
  }

  // Publishes the statistics of row `row`, the `iteration`-th of the block, to its consumer warps.
  __device__ __forceinline__ void finish(unsigned iteration, int64_t row, const Moments<float>& sums) const {
    const RowNorm<float> norm = finish_row(sums, arguments.inverse_n, params, row, lane == 0 && rank == 0);
    if (lane == 0) norms[exchange_of(iteration)] = norm;
    arrive_of_warp(finished + 8 * exchange_of(iteration));
  }

  // Statistics, by one warp of each block of a cluster: sends the sums of a row to all blocks, and finishes the row
  // before.
  __device__ __forceinline__ void exchange_in_cluster() {
    RingSlot<kDepth> ring;
    unsigned iteration = 0;
    int64_t row_before = 0;
    const auto finish_before = [&] {
      if (iteration == 0) return;
      const unsigned exchange = exchange_of(iteration - 1);
      wait_barrier(exchanged + 8 * exchange, parity_of(iteration - 1));
      Moments<float> part{};
      if (lane % kMaxCluster < blocks) part = block_parts[exchange][lane % kMaxCluster];
      finish(iteration - 1, row_before, merge_moments<kMaxCluster>(part, arguments.inverse_n));
    };
    for (;; ++iteration) {
      wait_barrier(arrived + 8 * ring.slot, ring.parity);
      const int64_t row = rows[ring.slot];
      if (row < 0) break;
      ring.next();
      const Moments<float> part = block_sums(iteration);
      const unsigned exchange = exchange_of(iteration);
      if (lane == 0) expect_bytes(exchanged + 8 * exchange, blocks * static_cast<unsigned>(sizeof(part)));
      if (lane < blocks) send_to_peer(&block_parts[exchange][rank], exchanged + 8 * exchange, lane, part);
      finish_before();
      row_before = row;
    }
    finish_before();  // a block must not exit while others send to it
  }

  // Statistics, by the `which`-th of kExchangeWarps warps, which take rows in turn: publishes the sums of a row in
  // global memory, and merges those of all blocks.
  __device__ __forceinline__ void exchange_in_memory(int which) {
    const int all = static_cast<int>(params.hidden_size / kVec), most = (all + blocks - 1) / blocks;
    for (unsigned iteration = which;; iteration += kExchangeWarps) {
      const int64_t row = first_row + iteration * row_step;
      if (row >= params.rows) break;
      const Moments<float> part = block_sums(iteration);
      Moments<float>* const of_row = arguments.sums + row * blocks;
      if (lane == 0) publish(of_row + rank, part);
      Moments<float> parts[kWholeCard / 32] = {};
      for_each_of_blocks<Moments<float>>(
          of_row, blocks,
          // A slice without elements has the zeros that are there
          [&](const Moments<float>& found, int block) {
            return found.n == static_cast<float>(max(min(all - block * most, most), 0) * kVec);
          },
          [&](const Moments<float>& found, int i) { parts[i] = found; });
      finish(iteration, row, merge_moments(parts, arguments.inverse_n));
    }
  }
};

// The work of a consumer thread on its columns. plain: y of x's type, no weight_offset.
template <typename scalar_t, typename weight_t, typename Plan>
struct StreamRows : StreamBlock<scalar_t, Plan> {
  using Block = StreamBlock<scalar_t, Plan>;
  using Block::params, Block::slice, Block::rows, Block::kThreads, Block::kVec;
  static constexpr int kVecs = Plan::kVecs;
  static constexpr int kSample = sizeof(scalar_t) > 2 || kVecs < 4 ? kVecs : kVecs / 4;  // see tile_moments()
  using Row = RowThreads<kThreads>;
  using Vec = RawVec<scalar_t, kVec>;
  static constexpr bool kHasBias = Plan::kHasBias;
  using Weights = RawVec<weight_t, kVec>[kVecs];
  using Biases = RawVec<weight_t, kVec>[kHasBias ? kVecs : 1];

  Weights& weight;  // a member array would keep the compiler from splitting this object into registers early
  Biases& bias;
  int own = threadIdx.x;  // the thread's first vector of the slice
  int64_t own_col = slice.first_col + own * kVec;
  float weight_offset;
  int sampled;
  float held;

  __device__ bool has(int v) const { return v * kThreads + own < slice.vecs; }
  __device__ __forceinline__ StreamRows(const Block& block, Weights& weight, Biases& bias)
      : Block(block), weight(weight), bias(bias) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      weight[v] = one_vec<weight_t, kVec>();
      if constexpr (kHasBias) bias[v] = zero_vec<weight_t, kVec>();
      const auto load = [&](const void* parameter) {
        return load_vec<weight_t, kVec>(static_cast<const weight_t*>(parameter) + own_col + v * kThreads * kVec);
      };
      if (params.weight && has(v)) weight[v] = load(params.weight);
      if (kHasBias && params.bias && has(v)) bias[v] = load(params.bias);
    }
    weight_offset = params.weight ? static_cast<float>(params.weight_offset) : 0.f;
    sampled = slice.template warp_elements<kThreads, kVec>(kSample);
    held = static_cast<float>(slice.template warp_elements<kThreads, kVec>(kVecs));
  }

  __device__ unsigned slice_at(int slot) const {
    return this->memory + slot * this->kPitch + this->slice_offsets[slot];
  }
  __device__ Vec read(unsigned at, int v) const {
    Vec raw;
    raw.words[0] = load_shared<uint4>(at + 16 * (v * kThreads + own));
    return raw;
  }

  // The sums of this warp's part of a slice. `all`: the slice is full, no vector needs a test.
  template <typename All>
  __device__ __forceinline__ Moments<float> sum_up(unsigned at, All all) const {
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
  }

  // Store: writes this thread's part of a slice as y.
  template <typename All, typename Plain>
  __device__ __forceinline__ void write(unsigned at, const RowNorm<float>& norm, int64_t y_index, All all,
                                        Plain plain) {
    optimization_barrier(weight);  // or the widened values are kept, in twice the registers
    if constexpr (kHasBias) optimization_barrier(bias);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      if (!all && !has(v)) continue;
      float values[kVec], scale[kVec], offset[kVec] = {};
      unpack(weight[v], scale);
      if constexpr (kHasBias) unpack(bias[v], offset);
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
  }

  // Sums each slice as it arrives, and writes the one of kDelay rows before.
  __device__ __forceinline__ void run() {
    const bool full = slice.vecs == kThreads * kVecs;
    const bool plain = params.y_dtype == dtype_of<scalar_t> && weight_offset == 0;
    RingSlot<Plan::kDepth> ring;
    unsigned written = 0, iteration = 0;  // rows written, rows summed
    int writing = 0;                      // slot of the next row to write
    for (bool more = true; more || written < iteration;) {
      if (more) {
        const unsigned exchange = this->exchange_of(iteration);
        wait_barrier(this->arrived + 8 * ring.slot, ring.parity);
        if (rows[ring.slot] < 0) {
          more = false;
          continue;
        }
        const unsigned at = slice_at(ring.slot);
        const Moments<float> part = full ? sum_up(at, std::true_type{}) : sum_up(at, std::false_type{});
        if (this->lane == 0) {
          this->warp_parts[exchange][this->warp] = part;
          arrive_barrier(this->summed + 8 * exchange);
        }
        ring.next();
        if (++iteration <= Plan::kDelay) continue;
      }
      const unsigned exchange = this->exchange_of(written);
      wait_barrier(this->finished + 8 * exchange, this->parity_of(written));
      const RowNorm<float> norm = this->norms[exchange];
      const unsigned at = slice_at(writing);
      const int64_t y_index = rows[writing] * params.hidden_size + own_col;
      if (!plain) {
        write(at, norm, y_index, std::false_type{}, std::false_type{});
      } else if (full) {
        write(at, norm, y_index, std::true_type{}, std::true_type{});
      } else {
        write(at, norm, y_index, std::false_type{}, std::true_type{});
      }
      arrive_of_warp(this->released + 8 * writing);
      if (++writing == Plan::kDepth) writing = 0;
      ++written;
    }
  }
};

// Beside the consumer warps, which sum and write, one producer warp loads slices, and other warps merge the sums of
// warps and blocks. They synchronize row by row through mbarriers. The bits of a row do not depend on the blocks that
// have it.
template <typename scalar_t, typename weight_t, typename Plan>
__global__ void __launch_bounds__(kStreamThreads<Plan>, 1)
    norm_forward_stream_kernel(const __grid_constant__ KernelForwardParams params,
                               const __grid_constant__ StreamArguments arguments) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint4 ring_memory[];
  constexpr int kSlots = kExchanges<Plan>;
  __shared__ uint64_t claimed[Plan::kDepth], arrived[Plan::kDepth], released[Plan::kDepth];
  __shared__ int64_t claims[Plan::kDepth], rows[Plan::kDepth];
  __shared__ unsigned slice_offsets[Plan::kDepth];
  __shared__ uint64_t summed[kSlots], exchanged[kSlots], finished[kSlots];
  alignas(16) __shared__ Moments<float> warp_parts[kSlots][Plan::kThreads / 32];
  alignas(16) __shared__ Moments<float> block_parts[kSlots][kMaxCluster];
  __shared__ RowNorm<float> norms[kSlots];
  StreamBlock<scalar_t, Plan> block{params,
                                    arguments,
                                    ring_memory,
                                    claims,
                                    rows,
                                    slice_offsets,
                                    warp_parts,
                                    block_parts,
                                    norms,
                                    shared_address(claimed),
                                    shared_address(arrived),
                                    shared_address(released),
                                    shared_address(summed),
                                    shared_address(exchanged),
                                    shared_address(finished)};
  if (threadIdx.x == 0) block.init_barriers();
  if constexpr (Plan::kGlobalExchange) {
    __syncthreads();
  } else {
    cluster_sync();
  }
  if (block.warp == block.kWarps) {
    if (block.lane == 0) block.produce();
  } else if (block.warp > block.kWarps) {
    if constexpr (Plan::kGlobalExchange) {
      block.exchange_in_memory(block.warp - block.kWarps - 1);
    } else {
      block.exchange_in_cluster();
    }
  } else {
    using Rows = StreamRows<scalar_t, weight_t, Plan>;
    typename Rows::Weights weight;
    typename Rows::Biases bias;
    Rows(block, weight, bias).run();
  }
#endif
}

// ---- host ----------------------------------------------------------------------------------------------------------

// How many blocks share a row, and how many rows run at once; 0: none.
struct StreamGrid {
  int blocks = 0, rows = 0;

  // Workspace: the counter, or the sums of the blocks.
  int64_t workspace(const KernelForwardParams& params) const {
    if (rows == 0) return 0;
    return blocks > kMaxCluster ? params.rows * blocks * static_cast<int64_t>(sizeof(Moments<float>))
                                : static_cast<int64_t>(sizeof(unsigned));
  }
};

template <typename Plan>
constexpr int kStreamBytes = Plan::kDepth * kSlicePitch<Plan>;

template <typename scalar_t, typename weight_t, typename Plan>
StreamGrid stream_grid(const KernelForwardParams& params, const DeviceFacts& facts) {
  constexpr int kDevices = 64, kThreads = kStreamThreads<Plan>, kBytes = kStreamBytes<Plan>;
  static std::atomic<int> known[kDevices][kMaxCluster + 1];  // by blocks of a cluster: 0: unknown, else 1 + at once
  if (facts.max_cluster < kMaxCluster || params.hidden_size % Plan::kVec != 0) return {};  // never measured
  const int64_t tile = Plan::kThreads * Plan::kVecs * Plan::kVec;
  int cluster = 1;
  StreamGrid grid;
  if (Plan::kGlobalExchange) {
    grid.blocks = peers_for<Plan>(params.hidden_size / Plan::kVec, facts.multiprocessors);
    if (grid.blocks * tile < params.hidden_size) return {};
  } else {
    while (cluster == 1 || cluster * tile < params.hidden_size) cluster *= 2;  // powers of two fill the GPCs of a card
    grid.blocks = cluster;
  }
  int at_once = facts.device < kDevices ? known[facts.device][cluster].load(std::memory_order_acquire) - 1 : -1;
  if (at_once < 0) {
    const auto kernel = norm_forward_stream_kernel<scalar_t, weight_t, Plan>;
    cudaFuncAttributes attributes{};
    const ClusterLaunch one(cluster, kThreads, kBytes, cluster);
    const bool runs = cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess &&
                      static_cast<int>(attributes.sharedSizeBytes) + kBytes <= facts.shared_bytes &&
                      allow_more(kernel, kBytes, facts.max_cluster) == cudaSuccess &&
                      (cluster == 1 || cudaOccupancyMaxActiveClusters(&at_once, kernel, &one.config) == cudaSuccess);
    if (cluster == 1) at_once = facts.multiprocessors;
    if (!runs) {  // as in a MIG slice
      cudaGetLastError();
      at_once = 0;
    }
    if (facts.device < kDevices) known[facts.device][cluster].store(1 + at_once, std::memory_order_release);
  }
  grid.rows = std::min(cluster == 1 ? at_once / grid.blocks : at_once, kMostClusters);
  return grid;
}

// Calls f(kernel, Plan, StreamGrid).
template <typename F>
cudaError_t dispatch_stream(const KernelForwardParams& params, F&& f) {
  DeviceFacts facts;
  const cudaError_t error = device_facts(facts);
  if (error != cudaSuccess) return error;
  return dispatch_types(params.x_dtype, params.weight_dtype, [&](auto types) {
    using scalar_t = typename decltype(types)::scalar_t;
    using weight_t = typename decltype(types)::weight_t;
    if constexpr (sizeof(scalar_t) == 8) {
      return cudaErrorNotSupported;
    } else {
      const auto launch = [&](auto plan) {
        const auto kernel = norm_forward_stream_kernel<scalar_t, weight_t, decltype(plan)>;
        return f(kernel, plan, stream_grid<scalar_t, weight_t, decltype(plan)>(params, facts));
      };
      if constexpr (sizeof(scalar_t) == 4) {
        if (has_no_bias_plan(params.bias, params.hidden_size)) return launch(NoBiasPlan{});
      }
      return dispatch_plan<StreamLadder<scalar_t, weight_t>>(params.hidden_size, facts.max_cluster, launch);
    }
  });
}

}  // namespace

int64_t forward_long_workspace(const KernelForwardParams& params) {
  int64_t bytes = 0;
  dispatch_stream(params, [&](auto, auto, const StreamGrid& grid) {
    bytes = grid.workspace(params);
    return cudaSuccess;
  });
  return bytes;
}

cudaError_t launch_forward_long(const KernelForwardParams& params, cudaStream_t stream) {
  return dispatch_stream(params, [&](auto kernel, auto plan, const StreamGrid& grid) {
    using Plan = decltype(plan);
    if (grid.rows == 0) return cudaErrorNotSupported;
    StreamArguments arguments{inverse_of<float>(params.hidden_size), nullptr, grid.blocks, nullptr};
    if (Plan::kGlobalExchange) {
      arguments.sums = static_cast<Moments<float>*>(params.workspace);
    } else if (params.rows >= kClaimedRows * grid.rows) {
      arguments.next_row = static_cast<unsigned*>(params.workspace);
    }
    if (arguments.sums || arguments.next_row) {
      const cudaError_t error = cudaMemsetAsync(params.workspace, 0, grid.workspace(params), stream);
      if (error != cudaSuccess) return error;
    }
    const ClusterLaunch launch(std::min<int64_t>(params.rows, grid.rows) * grid.blocks, kStreamThreads<Plan>,
                               kStreamBytes<Plan>, grid.blocks, stream);
    const cudaError_t launched = cudaLaunchKernelEx(&launch.config, kernel, params, arguments);
    if (launched != cudaErrorCooperativeLaunchTooLarge) return launched;
    cudaGetLastError();  // the context has fewer SMs than the card, as a green context
    return cudaErrorNotSupported;
  });
}

}  // namespace fused_layernorm
