// Forward of ragged rows: rows that are not whole 16-byte vectors. norm_forward.cu has the formulas.
//
// Rows are normalized in shared memory. The copy engine moves the adjacent rows of a block as one chunk of whole
// 16-byte words, in which they keep their alignment; only shared memory is accessed by the element, or by pairs of
// 16-bit elements where the rows of a warp begin at words. Each pass reads x there, and y replaces it. A row too long
// for shared memory is read from global memory, in the same order, so the card does not change the bits of a result.
#include "async.cuh"
#include "dispatch.cuh"
#include "forward_rows.cuh"
#include "launchers.h"
#include "run_time_rows.cuh"

namespace fused_layernorm {
namespace {

struct RaggedPlan {
  const void* x_end;  // past the last element of x
  int log_threads;    // of a row
  int stride;         // where rows share a warp: vectors of a thread, which are adjacent,
  int rows_apart;     // and rows from a row of the warp to its next one, 1 or 2
  int chunk_bytes;    // of x in shared memory
  int slot_bytes;     // of a row of x there, if not in_chunks
  bool in_chunks;     // adjacent rows of x are adjacent in memory, and one piece of the chunk
  bool stages_y;      // y is written by way of shared memory,
  int y_offset;       // so many bytes behind x; 0: in its place
};

constexpr int kBatch = 4;  // vectors that a thread loads before it uses them

// kApart: vectors between those of a batch, a constant, so that the batch has one address. 32: a warp takes 32 * kBatch
// adjacent vectors. 1: a thread takes adjacent ones; rows share a warp.
template <typename scalar_t, bool kIsShared, int kApart>
struct RaggedRow : RunTimeRow<scalar_t, kBatch> {
  static constexpr int kVec = sizeof(scalar_t) == 2 ? 2 : 1;
  static constexpr int kBytes = sizeof(scalar_t);
  using Base = RunTimeRow<scalar_t, kBatch>;
  using Base::hidden_size, Base::rank, Base::row, Base::threads;

  const KernelForwardParams& params;
  const RaggedPlan& plan;
  int first, end;                               // columns of this thread; of an absent row it has none
  int64_t block_row;                            // the block's first row
  unsigned chunk, barrier, x_shared, y_shared;  // shared addresses: the chunk's, and this row's
  const scalar_t* x_global;

  __device__ __forceinline__ RaggedRow(const KernelForwardParams& params, const RaggedPlan& plan, const void* chunk,
                                       const uint64_t* barrier)
      : Base(params.hidden_size, plan.log_threads, 1),
        params(params),
        plan(plan),
        block_row(static_cast<int64_t>(blockIdx.x) * (blockDim.x >> plan.log_threads)),
        chunk(shared_address(chunk)),
        barrier(shared_address(barrier)) {
    int index = this->part;
    if (kApart == 1 && plan.rows_apart == 2) {
      const int rows_of_warp = 32 >> plan.log_threads;
      index = (this->warp / 2 * rows_of_warp + index % rows_of_warp) * 2 + this->warp % 2;
    }
    row = block_row + index;
    first = (kApart == 1 ? rank * plan.stride : rank / 32 * 32 * kBatch + this->lane) * kVec;
    end = !is_present() ? 0 : kApart == 1 ? min(first + plan.stride * kVec, hidden_size) : hidden_size;
    const int row_bytes = hidden_size * kBytes;
    if (!kIsShared) x_global = x_of(row);
    x_shared = this->chunk +
               (plan.in_chunks ? past(x_of(block_row)) + index * row_bytes : past(x_of(row)) + index * plan.slot_bytes);
    y_shared = this->chunk + plan.y_offset + past(y_of_block()) + index * row_bytes;
  }

  __device__ __forceinline__ bool is_present() const { return row < params.rows; }
  __device__ __forceinline__ static unsigned past(const void* address) {
    return static_cast<unsigned>(reinterpret_cast<uintptr_t>(address)) % 16;
  }
  __device__ __forceinline__ const scalar_t* x_of(int64_t row) const {
    return static_cast<const scalar_t*>(params.x) + params.x_strides.offset(row);
  }
  __device__ __forceinline__ scalar_t* y_of_block() const {
    return static_cast<scalar_t*>(params.y) + block_row * hidden_size;
  }
  __device__ __forceinline__ int rows_of_block() const {
    return static_cast<int>(min(static_cast<int64_t>(blockDim.x >> plan.log_threads), params.rows - block_row));
  }

  // Reads the chunk into shared memory: the 16-byte words that cover it, or each of its rows, but nothing past x_end.
  __device__ __forceinline__ void fill() const {
    const int pieces = plan.in_chunks ? 1 : rows_of_block();
    const unsigned bytes = hidden_size * kBytes * (plan.in_chunks ? rows_of_block() : 1);
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      init_barrier(barrier, pieces);
      fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x < pieces) {
      const char* source = reinterpret_cast<const char*>(x_of(block_row + threadIdx.x));
      const unsigned skipped = past(source), target = chunk + threadIdx.x * plan.slot_bytes;
      const unsigned covered = covering_bytes(source, skipped, bytes, static_cast<const char*>(plan.x_end));
      copy_rest<scalar_t>(target, source, skipped, bytes, covered);
      expect_bytes(barrier, covered);
      if (covered > 0) copy_bulk(target, source - skipped, covered, barrier);
    }
    wait_barrier(barrier, 0);
#else
    for (int piece = 0; piece < pieces; ++piece) {
      const char* source = reinterpret_cast<const char*>(x_of(block_row + piece));
      const unsigned skipped = past(source), target = chunk + piece * plan.slot_bytes;
      for (unsigned at = 16 * threadIdx.x; at < skipped + bytes; at += 16 * blockDim.x)
        copy_async(target + at, source - skipped + at, min(static_cast<int>(skipped + bytes - at), 16));
    }
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
#endif
  }

  // Calls f(column, vectors, elements), with two std::integral_constant<int>, for this thread's vectors: kBatch at a
  // time, kApart apart, then one by one, then the last element of a row of an odd length.
  template <bool kBatches = true, typename F>
  __device__ __forceinline__ void for_each_batch(F&& f) const {
    using One = std::integral_constant<int, 1>;
    const int step = kApart == 1 ? kVec : threads * kVec;
    int col = first;
    if constexpr (kBatches) {
      const int last = (kApart == 1 ? end : first + end) - kBatch * step;
#pragma unroll 1
      for (; col <= last; col += kBatch * step)
        f(col, std::integral_constant<int, kBatch>(), std::integral_constant<int, kVec>());
    }
    if (kApart > 1) col -= (kBatch - 1) * kVec * (rank & -32);
#pragma unroll 1
    for (; col + kVec <= end; col += step) f(col, One(), std::integral_constant<int, kVec>());
    if (kVec > 1 && col < end) f(col, One(), One());
  }

  __device__ __forceinline__ float element(int col) const {
    if constexpr (kIsShared)
      return widen(load_shared<scalar_t>(x_shared + col * kBytes));
    else
      return widen(load<true>(x_global + col));
  }
  // Calls f(std::true_type()) if the rows of this warp begin at words of shared memory, so that a vector of x, and one
  // of y, is one access; else f(std::false_type()). Both ways give the same bits.
  template <typename F>
  __device__ __forceinline__ void by_alignment(F&& f) const {
    if constexpr (kVec > 1 && kIsShared)
      if (__all_sync(0xffffffffu, (x_shared | y_shared) % 4 == 0)) return f(std::true_type());
    f(std::false_type());
  }

  template <bool kIsAligned, int kVectors, int kElements>
  __device__ __forceinline__ void load_batch(float (&values)[kVectors][kElements], int col) const {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int from = col + k * kApart * kVec;
      if constexpr (kIsAligned && kElements > 1) {
        unpack(RawVec<scalar_t, kVec>{load_shared<unsigned>(x_shared + from * kBytes)}, values[k]);
      } else {
#pragma unroll
        for (int i = 0; i < kElements; ++i) values[k][i] = element(from + i);
      }
    }
  }

  // For fp32 the median of four means of two elements, nearer to the row's mean than that of four elements: a thread
  // adds up to 48 elements here, one after the other. Of the first four elements, or the first of fewer, in shorter
  // rows.
  __device__ __forceinline__ float near_mean() const {
    if (Base::kSumsAboutZero) return 0;
    if (hidden_size < 4) return element(0);
    float values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = element(hidden_size < 8 ? i : 2 * i);
      if (hidden_size >= 8) values[i] = fmaf(element(2 * i + 1) - values[i], 0.5f, values[i]);
    }
    return median_of(values);
  }

  // Writes the chunk's y from shared memory: whole 16-byte words, and by the element in words that it shares with other
  // chunks.
  __device__ __forceinline__ void drain() const {
    constexpr int kWord = 16 / kBytes;
    const int skipped = static_cast<int>(past(y_of_block())) / kBytes, elements = rows_of_block() * hidden_size;
    const int begin = skipped > 0 ? kWord : 0, whole = (skipped + elements) / kWord * kWord;
    const unsigned source = chunk + plan.y_offset;
    scalar_t* const y = y_of_block() - skipped;
    fence_bulk_store();
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0 && begin < whole) store_bulk(y + begin, source + begin * kBytes, (whole - begin) * kBytes);
#else
    for (int at = begin + kWord * threadIdx.x; at < whole; at += kWord * blockDim.x)
      *reinterpret_cast<uint4*>(y + at) = load_shared<uint4>(source + at * kBytes);
#endif
    if (threadIdx.x < 2 * kWord) {
      const int index = threadIdx.x, at = index < kWord ? index : max(whole, begin) + index - kWord;
      if (at >= skipped && at < skipped + elements && (at < begin || at >= whole))
        y[at] = load_shared<scalar_t>(source + at * kBytes);
    }
    if (threadIdx.x == 0) wait_for_bulk_stores();
  }
};

// A block has at most kBlock threads.
template <typename scalar_t, int kBlock, bool kIsShared, int kApart>
__global__ void __launch_bounds__(kBlock, kRaggedThreadsPerSm / kBlock)
    ragged_norm_kernel(const __grid_constant__ KernelForwardParams params, const __grid_constant__ RaggedPlan plan,
                       float inverse_n) {
  using Row = RaggedRow<scalar_t, kIsShared, kApart>;
  extern __shared__ uint4 chunk[];
  __shared__ uint64_t barrier;
  __shared__ SumScratch<kBatch, 2, 2> scratch;
  const Row row(params, plan, chunk, &barrier);
  wait_for_previous_kernel();
  if constexpr (kIsShared) row.fill();

  const auto add_differences = [&](float m, float (&sums)[2]) {
    row.by_alignment([&](auto is_aligned) {
      row.for_each_batch([&](int col, auto vectors, auto elements) {
        constexpr int kVectors = vectors, kElements = elements;
        float values[kVectors][kElements], of_vec[kVectors], squares = 0;
        row.template load_batch<is_aligned>(values, col);
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
#pragma unroll
          for (float& value : values[k]) {
            value -= m;
            squares = fma(value, value, squares);
          }
          of_vec[k] = vec_sum(values[k]);
        }
        sums[0] += vec_sum(of_vec);
        sums[1] += squares;
      });
    });
  };
  const float most_offset = most_offset_of(params.is_rms_norm, params.x_dtype, params.weight_dtype, params.y_dtype);
  const Moments<float> moments = row.template moments_by<scalar_t>(params.is_rms_norm ? 0 : row.near_mean(),
                                                                   most_offset, inverse_n, scratch, add_differences);
  const RowNorm<float> norm = finish_row(moments, inverse_n, params, row.row, row.rank == 0 && row.is_present());
  __syncwarp();  // all lanes have read the first elements

  const float weight_offset = params.weight ? static_cast<float>(params.weight_offset) : 0;
  const auto store = [&](auto type, auto stages_y, auto is_aligned) {
    using weight_t = decltype(type);
    const int64_t at = row.is_present() ? parameters_of(params, row.row) : 0;
    const weight_t* weight = static_cast<const weight_t*>(params.weight) + at;
    const weight_t* bias = static_cast<const weight_t*>(params.bias) + at;
    int has_weight = params.weight != nullptr, has_bias = params.bias != nullptr;
    // Hide them from the optimizer: else all are worked out again for each batch
    asm volatile("" : "+l"(weight), "+l"(bias), "+r"(has_weight), "+r"(has_bias));
    __builtin_assume(__isGlobal(weight) && __isGlobal(bias));
    row.template for_each_batch<stages_y>([&](int col, auto vectors, auto elements) {
      constexpr int kVectors = vectors, kElements = elements;
      float values[kVectors][kElements], scale[kVectors][kElements], offset[kElements];
      RawVec<weight_t, kElements> weights[kVectors], biases[kVectors];
      row.template load_batch<is_aligned>(values, col);
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int from = col + k * kApart * Row::kVec;
        weights[k] =
            load_parameter<kElements, true>(weight + from, kElements, has_weight, one_vec<weight_t, kElements>());
        biases[k] =
            load_parameter<kElements, true>(bias + from, kElements, has_bias, filled_vec<weight_t, kElements>(-0.f));
      }
#pragma unroll
      for (int k = 0; k < kVectors; ++k) unpack(weights[k], scale[k]);
      if (weight_offset != 0) {
#pragma unroll
        for (int k = 0; k < kVectors; ++k)
#pragma unroll
          for (float& factor : scale[k]) factor += weight_offset;
      }
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int from = col + k * kApart * Row::kVec;
        unpack(biases[k], offset);
#pragma unroll
        for (int i = 0; i < kElements; ++i) values[k][i] = fma(norm.x_hat(values[k][i]), scale[k][i], offset[i]);
        if constexpr (stages_y) {
          const RawVec<scalar_t, kElements> raw = pack<scalar_t>(values[k]);
          if constexpr (is_aligned && kElements > 1) {
            store_shared(row.y_shared + from * Row::kBytes, raw.words[0]);
          } else {
            scalar_t found[kElements];
            memcpy(found, &raw, sizeof(raw));
#pragma unroll
            for (int i = 0; i < kElements; ++i) store_shared(row.y_shared + (from + i) * Row::kBytes, found[i]);
          }
        } else {
          store_vec_as(params.y, params.y_dtype, row.row * row.hidden_size + from, values[k], kElements, false);
        }
      }
    });
  };
  const auto store_by = [&](auto type) {
    if constexpr (kIsShared) {
      if (plan.stages_y) {
        row.by_alignment([&](auto is_aligned) { store(type, std::true_type(), is_aligned); });
        return row.drain();
      }
    }
    store(type, std::false_type(), std::false_type());
  };
  if constexpr (sizeof(scalar_t) == 2)
    if (params.weight_dtype != DType::kFloat32) return store_by(scalar_t());
  store_by(float());
}

// The most lanes of a warp that access one bank of shared memory, if its rows begin `row_bytes` apart, and the threads
// of a row `apart`.
int lanes_of_a_bank(int threads, unsigned row_bytes, unsigned apart) {
  int lanes[32] = {}, most = 0;
  for (int lane = 0; lane < 32; ++lane)
    most = std::max(most, ++lanes[(lane / threads * row_bytes + lane % threads * apart) / 4 % 32]);
  return most;
}

template <typename scalar_t>
cudaError_t launch_ragged(const KernelForwardParams& params, cudaStream_t stream) {
  DeviceFacts facts;
  const cudaError_t error = device_facts(facts);
  if (error != cudaSuccess) return error;
  constexpr int kBytes = sizeof(scalar_t), kVec = RaggedRow<scalar_t, true, 1>::kVec;
  const int64_t n = params.hidden_size, row_bytes = n * kBytes;
  RaggedPlan plan{};
  int threads = 1;
  for (; row_bytes > static_cast<int64_t>(ragged_bytes(threads)) * threads && threads < kRaggedBlock; threads *= 2)
    ++plan.log_threads;
  const int block = ragged_block(kBytes, threads);
  // Of odd lengths every second row begins at a word: those share a warp. Else what has the fewest lanes a bank (H200,
  // bf16: 100 columns 151 us by every second row, 139; 258 with fp32 weights 138, 149)
  const int least = static_cast<int>((n - 1) / (threads * kVec)) + 1;
  int fewest = 33;
  for (int apart = 2; apart >= (row_bytes % 4 == 0 ? 1 : 2) && threads < 32; --apart)
    for (int stride = least; stride <= least + kRaggedStrides; ++stride) {
      const int lanes = lanes_of_a_bank(threads, apart * static_cast<unsigned>(row_bytes), 4 * stride);
      if (lanes < fewest) fewest = lanes, plan.stride = stride, plan.rows_apart = apart;
    }
  const RowStrides& x = params.x_strides;
  plan.x_end = static_cast<const scalar_t*>(params.x) + x.offset(params.rows - 1) + n;
  plan.in_chunks = x.row_stride == n && x.is_even(params.rows);

  const int64_t rows_of_block = block / threads;
  const int64_t slot_bytes = (row_bytes + 30) / 16 * 16, chunk_bytes = slot_bytes * rows_of_block;
  const int64_t most = facts.shared_bytes - kRaggedScratch;
  const bool is_shared = chunk_bytes <= most;
  const bool in_place =
      plan.in_chunks && (reinterpret_cast<uintptr_t>(params.x) - reinterpret_cast<uintptr_t>(params.y)) % 16 == 0;
  plan.stages_y = is_shared && params.y_dtype == params.x_dtype && (in_place || 2 * chunk_bytes <= most);
  plan.chunk_bytes = is_shared ? static_cast<int>(chunk_bytes) : 0;
  plan.slot_bytes = is_shared ? static_cast<int>(slot_bytes) : 0;
  plan.y_offset = plan.stages_y && !in_place ? plan.chunk_bytes : 0;

  const auto launch = [&](auto kernel, int carveout, OncePerDevice& allowed) {
    // Carveout: beside more shared memory, weight and bias would not fit into the L1 cache
    cudaError_t error = allowed.run(facts.device, [&] {
      const auto attribute = cudaFuncAttributePreferredSharedMemoryCarveout;
      const cudaError_t error = cudaFuncSetAttribute(kernel, attribute, carveout);
      if (error != cudaSuccess || carveout == 0) return error;
      return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most));
    });
    if (error != cudaSuccess) return error;
    OverlappedLaunch launch(dim3(static_cast<unsigned>((params.rows + rows_of_block - 1) / rows_of_block)), dim3(block),
                            stream);
    launch.config.dynamicSmemBytes = plan.chunk_bytes + plan.y_offset;
    return cudaLaunchKernelEx(&launch.config, kernel, params, plan, inverse_of<float>(n));
  };
  static OncePerDevice allowed[4];
  if (threads < 32)
    return launch(ragged_norm_kernel<scalar_t, kRaggedWarpsBlock, true, 1>, kRaggedCarveout, allowed[0]);
  if (!is_shared) return launch(ragged_norm_kernel<scalar_t, kRaggedBlock, false, 32>, 0, allowed[1]);
  if (block > kRaggedBlock / 2) return launch(ragged_norm_kernel<scalar_t, kRaggedBlock, true, 32>, 100, allowed[2]);
  return launch(ragged_norm_kernel<scalar_t, kRaggedBlock / 2, true, 32>, kRaggedCarveout, allowed[3]);
}

}  // namespace

cudaError_t launch_forward_ragged(const KernelForwardParams& params, cudaStream_t stream) {
  if (params.hidden_size * dtype_bytes(params.x_dtype) % 16 == 0) return cudaErrorNotSupported;
  switch (params.x_dtype) {
    case DType::kFloat16: return launch_ragged<__half>(params, stream);
    case DType::kBFloat16: return launch_ragged<__nv_bfloat16>(params, stream);
    case DType::kFloat32: return launch_ragged<float>(params, stream);
    default: return cudaErrorNotSupported;
  }
}

}  // namespace fused_layernorm
