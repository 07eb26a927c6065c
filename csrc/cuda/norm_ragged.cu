// Forward of ragged rows: rows that are not whole 16-byte vectors. norm_forward.cu has the formulas.
//
// Rows are normalized in shared memory. The copy engine moves adjacent rows as one chunk of whole 16-byte words, in
// which they keep their alignment; only shared memory is accessed by the element, or by pairs of 16-bit elements where
// the rows of a warp begin at words. Each pass reads x there, and y replaces it. A row too long for shared memory is
// read from global memory, in the same order, so the card does not change the bits of a result.
#include "async.cuh"
#include "dispatch.cuh"
#include "forward_rows.cuh"
#include "launchers.h"
#include "run_time_rows.cuh"

namespace fused_layernorm {
namespace {

// A chunk has the rows of a warp, or the one row of a block.
struct RaggedPlan {
  const void* x_end;  // past the last element of x
  int log_threads;    // of a row
  int stride, step;   // vectors from a thread's first one to that of the next thread, and to its own next one
  int chunk_bytes;    // of x in shared memory
  bool in_chunks;     // adjacent rows of x are adjacent in memory
  bool stages_y;      // y is written by way of shared memory,
  int y_offset;       // so many bytes behind x; 0: in its place
};

constexpr int kBatch = 4;  // vectors that a thread loads before it uses them

template <typename scalar_t, bool kIsShared>
struct RaggedRow : RunTimeRow<scalar_t, kBatch> {
  static constexpr int kVec = sizeof(scalar_t) == 2 ? 2 : 1;
  static constexpr int kBytes = sizeof(scalar_t);
  using Base = RunTimeRow<scalar_t, kBatch>;
  using Base::hidden_size, Base::rank, Base::row, Base::threads;

  const KernelForwardParams& params;
  const RaggedPlan& plan;
  int first, end, step;                         // columns of this thread
  int member, members;                          // this thread of those that share the chunk
  int64_t chunk_row;                            // the chunk's first row
  unsigned chunk, barrier, x_shared, y_shared;  // shared addresses: the chunk's, and this row's
  const scalar_t* x_global;

  __device__ __forceinline__ RaggedRow(const KernelForwardParams& params, const RaggedPlan& plan, const void* chunks,
                                       const uint64_t* barriers)
      : Base(params.hidden_size, plan.log_threads, 1), params(params), plan(plan) {
    first = rank * plan.stride * kVec;
    end = plan.stride > 1 ? min(first + plan.stride * kVec, hidden_size) : hidden_size;
    step = plan.step * kVec;
    members = max(threads, 32);
    member = threadIdx.x & (members - 1);
    chunk_row = row - (member >> plan.log_threads);
    const int index = static_cast<int>(row - chunk_row), row_bytes = hidden_size * kBytes;
    chunk = shared_address(chunks) + threadIdx.x / members * (plan.chunk_bytes + plan.y_offset);
    barrier = shared_address(barriers + threadIdx.x / members);
    x_global = x_of(row);
    x_shared =
        chunk + (plan.in_chunks ? past(x_of(chunk_row)) + index * row_bytes : index * slot_bytes() + past(x_global));
    y_shared = chunk + plan.y_offset + past(y_of_chunk()) + index * row_bytes;
  }

  __device__ __forceinline__ static unsigned past(const void* address) {
    return static_cast<unsigned>(reinterpret_cast<uintptr_t>(address)) % 16;
  }
  __device__ __forceinline__ const scalar_t* x_of(int64_t row) const {
    return static_cast<const scalar_t*>(params.x) + params.x_strides.offset(row);
  }
  __device__ __forceinline__ scalar_t* y_of_chunk() const {
    return static_cast<scalar_t*>(params.y) + chunk_row * hidden_size;
  }
  __device__ __forceinline__ int slot_bytes() const { return plan.chunk_bytes / (members >> plan.log_threads); }
  __device__ __forceinline__ int rows_of_chunk() const {
    return static_cast<int>(min(static_cast<int64_t>(members >> plan.log_threads), params.rows - chunk_row));
  }
  // The threads of the chunk that have a row.
  __device__ __forceinline__ int present() const { return rows_of_chunk() << plan.log_threads; }
  __device__ __forceinline__ void synchronize() const {
    if (threads > 32)
      __syncthreads();
    else
      __syncwarp();
  }

  // Reads the chunk, or each of its rows, into shared memory: the 16-byte words that cover it, but nothing past x_end.
  __device__ __forceinline__ void fill() const {
    const int pieces = plan.in_chunks ? 1 : rows_of_chunk();
    const unsigned bytes = hidden_size * kBytes * (plan.in_chunks ? rows_of_chunk() : 1);
    const auto for_each_piece = [&](auto&& f) {  // f(its first element, bytes before it in its first word, target)
      for (int index = 0; index < pieces; ++index) {
        const char* source = reinterpret_cast<const char*>(x_of(chunk_row + index));
        f(source, past(source), chunk + index * slot_bytes());
      }
    };
#if __CUDA_ARCH__ >= 900
    if (member == 0) {
      init_barrier(barrier, pieces);
      fence_barrier_init();
      for_each_piece([&](const char* source, unsigned skipped, unsigned target) {
        const unsigned covered = covering_bytes(source, skipped, bytes, static_cast<const char*>(plan.x_end));
        expect_bytes(barrier, covered);
        if (covered > 0) copy_bulk(target, source - skipped, covered, barrier);
        copy_rest<scalar_t>(target, source, skipped, bytes, covered);
      });
    }
    synchronize();
    wait_barrier(barrier, 0);
#else
    for_each_piece([&](const char* source, unsigned skipped, unsigned target) {
      for (unsigned at = 16 * member; at < skipped + bytes; at += 16 * present())
        copy_async(target + at, source - skipped + at, min(static_cast<int>(skipped + bytes - at), 16));
    });
    commit_copies();
    wait_for_copies<0>();
    synchronize();
#endif
  }

  // Calls f(column, std::integral_constant<int, count>()) for this thread's vectors: kBatch at a time, which are whole
  // and `step` columns apart, then one by one.
  template <bool kBatches = true, typename F>
  __device__ __forceinline__ void for_each_batch(F&& f) const {
    int col = first;
    if constexpr (kBatches) {
      const int last = end - (kBatch - 1) * step - kVec;
      for (; col <= last; col += kBatch * step) f(col, std::integral_constant<int, kBatch>());
    }
#pragma unroll 1
    for (; col < end; col += step) f(col, std::integral_constant<int, 1>());
  }

  __device__ __forceinline__ float element(int col) const {
    if constexpr (kIsShared)
      return widen(load_shared<scalar_t>(x_shared + col * kBytes));
    else
      return widen(load<true>(x_global + col));
  }
  // Calls f(std::true_type()) if the rows of this warp begin at words of shared memory, so that a vector of x, and one
  // of y, is one access; else f(std::false_type()). The lanes of absent rows have left, hence __activemask(). Both ways
  // give the same bits.
  template <typename F>
  __device__ __forceinline__ void by_alignment(F&& f) const {
    if constexpr (kVec > 1 && kIsShared)
      if (__all_sync(__activemask(), (x_shared | y_shared) % 4 == 0)) return f(std::true_type());
    f(std::false_type());
  }

  // Elements past the row are `absent`.
  template <bool kIsAligned, int kVectors>
  __device__ __forceinline__ void load_batch(float (&values)[kVectors][kVec], int col, float absent) const {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if constexpr (kIsAligned && kVectors > 1) {
        unpack(RawVec<scalar_t, kVec>{load_shared<unsigned>(x_shared + (col + k * step) * kBytes)}, values[k]);
      } else {
#pragma unroll
        for (int i = 0; i < kVec; ++i)
          values[k][i] = kVectors > 1 || i == 0 || col + i < end ? element(col + k * step + i) : absent;
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
    const int skipped = static_cast<int>(past(y_of_chunk())) / kBytes, elements = rows_of_chunk() * hidden_size;
    const int begin = skipped > 0 ? kWord : 0, whole = (skipped + elements) / kWord * kWord;
    const unsigned source = chunk + plan.y_offset;
    scalar_t* const y = y_of_chunk() - skipped;
    fence_bulk_store();
    synchronize();
#if __CUDA_ARCH__ >= 900
    if (member == 0 && begin < whole) store_bulk(y + begin, source + begin * kBytes, (whole - begin) * kBytes);
#else
    for (int at = begin + kWord * member; at < whole; at += kWord * present())
      *reinterpret_cast<uint4*>(y + at) = load_shared<uint4>(source + at * kBytes);
#endif
    for (int index = member; index < 2 * kWord; index += present()) {
      const int at = index < kWord ? index : max(whole, begin) + index - kWord;
      if (at >= skipped && at < skipped + elements && (at < begin || at >= whole))
        y[at] = load_shared<scalar_t>(source + at * kBytes);
    }
    if (member == 0) wait_for_bulk_stores();
  }
};

// A block has at most kBlock threads.
template <typename scalar_t, int kBlock, bool kIsShared>
__global__ void __launch_bounds__(kBlock, kRaggedThreadsPerSm / kBlock)
    ragged_norm_kernel(const __grid_constant__ KernelForwardParams params, const __grid_constant__ RaggedPlan plan,
                       float inverse_n) {
  using Row = RaggedRow<scalar_t, kIsShared>;
  constexpr int kVec = Row::kVec;
  extern __shared__ uint4 chunks[];
  __shared__ uint64_t barriers[kRaggedWarpsBlock / 32];
  __shared__ SumScratch<kBatch, 2, 2> scratch;
  const Row row(params, plan, chunks, barriers);
  if (row.row >= params.rows) return;  // rows that share a warp: as in norm_forward_kernel
  wait_for_previous_kernel();
  if constexpr (kIsShared) row.fill();

  const auto add_differences = [&](float m, float (&sums)[2]) {
    row.by_alignment([&](auto is_aligned) {
      row.for_each_batch([&](int col, auto count) {
        constexpr int kVectors = decltype(count)::value;
        float values[kVectors][kVec], of_vec[kVectors], squares = 0;
        row.template load_batch<is_aligned>(values, col, m);
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
  const RowNorm<float> norm = finish_row(moments, inverse_n, params, row.row, row.rank == 0);
  __syncwarp();  // all lanes have read the first elements

  const float weight_offset = params.weight ? static_cast<float>(params.weight_offset) : 0;
  const auto store = [&](auto type, auto stages_y, auto is_aligned) {
    using weight_t = decltype(type);
    const int64_t at = parameters_of(params, row.row);
    const weight_t* weight = static_cast<const weight_t*>(params.weight) + at;
    const weight_t* bias = static_cast<const weight_t*>(params.bias) + at;
    int has_weight = params.weight != nullptr, has_bias = params.bias != nullptr;
    // Hide them from the optimizer: else all are worked out again for each vector
    asm volatile("" : "+l"(weight), "+l"(bias), "+r"(has_weight), "+r"(has_bias));
    __builtin_assume(__isGlobal(weight) && __isGlobal(bias));
    row.template for_each_batch<stages_y>([&](int col, auto vectors) {
      constexpr int kVectors = decltype(vectors)::value;
      const int count = kVectors > 1 ? kVec : row.end - col;
      float values[kVectors][kVec], scale[kVec], offset[kVec];
      RawVec<weight_t, kVec> weights[kVectors], biases[kVectors];
      row.template load_batch<is_aligned>(values, col, 0);
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const unsigned from = col + k * row.step;
        weights[k] = load_parameter<kVec, true>(weight + from, count, has_weight, one_vec<weight_t, kVec>());
        biases[k] = load_parameter<kVec, true>(bias + from, count, has_bias, filled_vec<weight_t, kVec>(-0.f));
      }
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int from = col + k * row.step;
        unpack(weights[k], scale);
        unpack(biases[k], offset);
        if (weight_offset != 0) {
#pragma unroll
          for (int i = 0; i < kVec; ++i) scale[i] += weight_offset;
        }
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[k][i] = fma(norm.x_hat(values[k][i]), scale[i], offset[i]);
        if constexpr (stages_y) {
          const RawVec<scalar_t, kVec> raw = pack<scalar_t>(values[k]);
          if constexpr (is_aligned && kVectors > 1) {
            store_shared(row.y_shared + from * Row::kBytes, raw.words[0]);
          } else {
            scalar_t elements[kVec];
            memcpy(elements, &raw, sizeof(raw));
#pragma unroll
            for (int i = 0; i < kVec; ++i)
              if (i < count) store_shared(row.y_shared + (from + i) * Row::kBytes, elements[i]);
          }
        } else {
          store_vec_as(params.y, params.y_dtype, row.row * row.hidden_size + from, values[k], count, false);
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

// The most lanes of a warp that access one bank of shared memory, if the threads of a row begin `apart` bytes apart.
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
  constexpr int kBytes = sizeof(scalar_t), kVec = RaggedRow<scalar_t, true>::kVec;
  const int64_t n = params.hidden_size, row_bytes = n * kBytes;
  RaggedPlan plan{};
  int threads = 1;
  for (; row_bytes > static_cast<int64_t>(ragged_bytes(kBytes, threads)) * threads && threads < kRaggedBlock;
       threads *= 2)
    ++plan.log_threads;
  const int block = threads > 32 ? threads : kRaggedWarpsBlock;
  plan.stride = 1, plan.step = threads;  // a thread takes every threads-th vector,
  if (threads < 32) {                    // or adjacent ones where fewer lanes then share a bank
    const int least = static_cast<int>((n - 1) / (threads * kVec)) + 1;
    int fewest = lanes_of_a_bank(threads, static_cast<unsigned>(row_bytes), 4);
    for (int stride = std::max(least, 2); stride <= least + kRaggedStrides; ++stride) {
      const int lanes = lanes_of_a_bank(threads, static_cast<unsigned>(row_bytes), 4 * stride);
      if (lanes < fewest) fewest = lanes, plan.stride = stride, plan.step = 1;
    }
  }
  const RowStrides& x = params.x_strides;
  plan.x_end = static_cast<const scalar_t*>(params.x) + x.offset(params.rows - 1) + n;
  plan.in_chunks = x.row_stride == n && x.is_even(params.rows);

  const int64_t rows_of_block = block / threads, chunks = block / std::max(threads, 32);
  const int64_t chunk_bytes = (row_bytes + 30) / 16 * 16 * (rows_of_block / chunks);
  const int64_t most = facts.shared_bytes - kRaggedScratch;
  const bool is_shared = chunks * chunk_bytes <= most;
  const bool in_place =
      plan.in_chunks && (reinterpret_cast<uintptr_t>(params.x) - reinterpret_cast<uintptr_t>(params.y)) % 16 == 0;
  plan.stages_y = is_shared && params.y_dtype == params.x_dtype && (in_place || 2 * chunks * chunk_bytes <= most);
  plan.chunk_bytes = is_shared ? static_cast<int>(chunk_bytes) : 0;
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
    launch.config.dynamicSmemBytes = chunks * (plan.chunk_bytes + plan.y_offset);
    return cudaLaunchKernelEx(&launch.config, kernel, params, plan, inverse_of<float>(n));
  };
  static OncePerDevice allowed[3];
  if (!is_shared) return launch(ragged_norm_kernel<scalar_t, kRaggedBlock, false>, 0, allowed[0]);
  if (block > kRaggedBlock / 2) return launch(ragged_norm_kernel<scalar_t, kRaggedBlock, true>, 100, allowed[1]);
  return launch(ragged_norm_kernel<scalar_t, kRaggedBlock / 2, true>, kRaggedCarveout, allowed[2]);
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
