#pragma once
// How the bodies run on a GPU: in kernels whose threads stride over the elements, rows by teams,
// and sums over rows in a fixed order: no sum depends on which thread comes first, so the bits are
// the same in every run. The launchers have the names and arguments of cpu/launch.h.

// Before the bodies are included: nvcc compiles their functions for both processors.
#define LOCKSTEP_BODY __host__ __device__ __forceinline__
#define LOCKSTEP_UNROLL _Pragma("unroll")

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "common/core/tensor.h"
#include "common/kernels/bodies/portable.h"
#include "common/kernels/cuda/cuda_stream.h"
#include "common/kernels/cuda/packs.cuh"

namespace lockstep::cuda {

constexpr int kBlock = 256;  // threads

/// Threads of this kernel for n elements, in blocks that fit on the GPU side by side: one more
/// would begin when others have ended. More elements than threads are taken in strides.
template <class... Arguments>
unsigned blocks_for(int64_t n, const CudaStream& stream, void (*kernel)(Arguments...)) {
  const int64_t most = stream.side_by_side(reinterpret_cast<const void*>(kernel), kBlock);
  return static_cast<unsigned>(std::clamp<int64_t>((n + kBlock - 1) / kBlock, 1, most));
}

/// Calls f(n as uint32_t) where n fits, else f(n): 32-bit division takes a fraction of the time.
template <class F>
void with_narrow_index(int64_t n, F f) {
  if (n < int64_t{std::numeric_limits<int32_t>::max()}) {
    f(static_cast<uint32_t>(n));
  } else {
    f(n);
  }
}

/// Whole numbers divided by `divisor`, at least 1.
template <class Index>
struct Divisor {
  Index divisor;
  __host__ __device__ constexpr Index quotient(Index i) const { return i / divisor; }
};

/// 32 bits, for numbers below 2^31: a multiplication and a shift, where the GPU's own division
/// takes a dozen instructions (Granlund and Montgomery, "Division by invariant integers using
/// multiplication", 1994).
template <>
struct Divisor<uint32_t> {
  explicit constexpr Divisor(uint32_t extent)
      : divisor(extent > 0 ? extent : 1),  // 0: an empty array, of which no kernel reads anything
        shift(uint32_t(std::bit_width(divisor - 1))),
        factor(uint32_t((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor) / divisor + 1)) {}
  __host__ __device__ constexpr uint32_t quotient(uint32_t i) const {
    return (uint32_t(uint64_t{i} * factor >> 32) + i) >> shift;
  }
  uint32_t divisor, shift, factor;
};
static_assert(Divisor<uint32_t>(0).quotient(0) == 0);
static_assert(Divisor<uint32_t>(1).quotient(0x7fffffff) == 0x7fffffff);
static_assert(Divisor<uint32_t>(7).quotient(0x7fffffff) == 0x7fffffff / 7);
static_assert(Divisor<uint32_t>(64).quotient(64 * 33 - 1) == 32);

/// visit(i) for i in [0, n), over all threads of the grid. Unrolled, the loop would begin with a
/// division: how often it runs.
template <class Index, class Visit>
__device__ __forceinline__ void grid_stride(Index n, Visit visit) {
  const Index stride = Index(gridDim.x) * blockDim.x;
#pragma unroll 1
  for (Index i = Index(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride) visit(i);
}

/// use(load(i)) for i = first, first + step, ... below end, in this order. Memory answers after
/// hundreds of cycles: kAhead values are loaded before the first of them is used.
template <class Load, class Use>
__device__ __forceinline__ void load_ahead(int64_t first, int64_t end, int64_t step, Load load,
                                           Use use) {
  constexpr int kAhead = 4;
  int64_t i = first;
  for (; i + (kAhead - 1) * step < end; i += kAhead * step) {
    decltype(load(i)) values[kAhead];
    LOCKSTEP_UNROLL
    for (int k = 0; k < kAhead; ++k) values[k] = load(i + k * step);
    LOCKSTEP_UNROLL
    for (int k = 0; k < kAhead; ++k) use(values[k]);
  }
#pragma unroll 1
  for (; i < end; i += step) use(load(i));
}

// --- Kernels of element-wise bodies -------------------------------------------------------------

/// What each_of_packs() calls where each element is the body's own work.
struct RunElement {
  template <class Body>
  __device__ __forceinline__ void operator()(const Body& here, int k) const {
    here(k);
  }
};

/// run(i) for the elements in packs, over all threads of the grid. Two packs of four numbers are on
/// their way together: most of these bodies read one or two arrays. Eight numbers of 16 bits, or 16
/// pixels, need the registers for themselves.
template <class Body, class Run>
__device__ __forceinline__ void each_pack(const Split<Body>& at, const Run& run) {
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  int64_t pack = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if constexpr (Split<Body>::kSize <= 4) {
#pragma unroll 1
    for (; pack + stride < at.packs; pack += 2 * stride) {
      each_of_packs(run, RunElement(), at.first_of(pack), at.first_of(pack + stride));
    }
  }
#pragma unroll 1
  for (; pack < at.packs; pack += stride) each_of_packs(run, RunElement(), at.first_of(pack));
}

template <class Body>
__global__ void __launch_bounds__(kBlock) each_kernel(Split<Body> at, Body body) {
  if constexpr (requires { body.enabled(); }) {
    if (!body.enabled()) return;
  }
  const auto run = bodies::prepared(body);
  if constexpr (Split<Body>::kSize > 1) {
    each_pack(at, run);
  }
  grid_stride(at.alone(), [&](int64_t k) { run(at.element(k)); });
}

/// The stretch of the elements that a thread comes to in ascending order, and the body for it. A
/// thread looks for it only where it has left the one before.
template <class Body>
struct StretchBody {
  bodies::Marked marked;
  Body body;
  const Stretch* stretch = marked.stretches;
  int64_t end = 0;
  bool updates = false;
  // A copy of the body from the start: so the compiler sees that only what prepared() sets differs
  // between stretches, and keeps no registers for the rest.
  decltype(bodies::prepared_for(body, 0)) run = body;

  __device__ __forceinline__ void move_to(int64_t i) {
    if (i < end) return;
    while (i >= stretch->end) ++stretch;
    end = stretch->end;
    updates = marked.updates(*stretch);
    run = bodies::prepared_for(body, stretch->parameter);
  }
  __device__ __forceinline__ void operator()(int64_t i) {
    move_to(i);
    if (updates) run(i);
  }
};

/// A pack in which a stretch ends is taken element by element.
template <class Body>
__global__ void __launch_bounds__(kBlock)
    each_marked_kernel(Split<Body> at, bodies::Marked marked, Body body) {
  if (!body.enabled()) return;
  StretchBody<Body> in_packs{marked, body}, alone{marked, body};
  grid_stride(at.packs, [&](int64_t pack) {
    const int64_t first = at.first_of(pack), end = at.first_of(pack + 1);
    in_packs.move_to(first);
    if (end > in_packs.end) {
#pragma unroll 1
      for (int64_t i = first; i < end; ++i) in_packs(i);
    } else if (in_packs.updates) {
      each_of_packs(in_packs.run, RunElement(), first);
    }
  });
  grid_stride(at.alone(), [&](int64_t k) { alone(at.element(k)); });
}

/// Rows of whole packs of kSize, or of single elements.
template <class Index, int kSize, class Body>
__global__ void __launch_bounds__(kBlock)
    each_row_kernel(Index packs, Divisor<Index> packs_of_row, Body body) {
  grid_stride(packs, [&](Index pack) {
    const Index row = packs_of_row.quotient(pack);
    const int64_t i = int64_t(pack) * kSize;
    const int64_t feature = int64_t(pack - row * packs_of_row.divisor) * kSize;
    if constexpr (kSize == 1) {
      body(i, row, feature);
    } else {
      run_row_pack<kSize>(body, i, row, feature);
    }
  });
}

template <class Index, class Body>
__global__ void __launch_bounds__(kBlock)
    each_pixel_kernel(Index n, Divisor<Index> height, Divisor<Index> width, Divisor<Index> channels,
                      Body body) {
  grid_stride(n, [&](Index i) {
    const Index pixel = channels.quotient(i), row = width.quotient(pixel);
    const Index image = height.quotient(row);
    body(image, row - image * height.divisor, pixel - row * width.divisor,
         i - pixel * channels.divisor);
  });
}

// --- Rows by teams ------------------------------------------------------------------------------

struct Sum {
  __device__ Real operator()(Real a, Real b) const { return a + b; }
};
struct Max {
  __device__ Real operator()(Real a, Real b) const { return fmaxf(a, b); }
};

/// A block of threads that works on one row, where the CPU uses one thread.
struct BlockTeam {
  static constexpr int kWarp = 32;

  template <class F>
  __device__ Real max(int64_t n, F f) const {
    Real top = f(threadIdx.x < n ? threadIdx.x : 0);
    load_ahead(threadIdx.x, n, blockDim.x, f, [&](Real value) { top = fmaxf(top, value); });
    return combine(top, Max());
  }
  template <class F>
  __device__ Real sum(int64_t n, F f) const {
    Real total = 0;
    load_ahead(threadIdx.x, n, blockDim.x, f, [&](Real value) { total += value; });
    return combine(total, Sum());
  }
  /// The sum of f(values[i]), four neighbours by each thread, wherever they begin.
  template <class F>
  __device__ Real sum(const Real* values, int64_t n, F f) const {
    constexpr int kSize = kWidest / sizeof(Real);
    Real total = 0;
    const auto add = [&](const Pack<Real, kSize>& pack) {
      for (Real value : pack.values) total += f(value);
    };
    const int64_t packs = n / kSize;
    if (may_begin_at<Pack<Real, kSize>>(values)) {
      load_ahead(
          threadIdx.x, packs, blockDim.x,
          [&](int64_t i) { return load_pack<kSize, true>(values + i * kSize); }, add);
    } else {
      load_ahead(
          threadIdx.x, packs, blockDim.x,
          [&](int64_t i) { return load_pack<kSize, false>(values + i * kSize); }, add);
    }
    for (int64_t i = packs * kSize + threadIdx.x; i < n; i += blockDim.x) total += f(values[i]);
    return combine(total, Sum());
  }
  template <class F>
  __device__ void each(int64_t n, F f) const {
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) f(i);
  }
  template <class F>
  __device__ void leader(F f) const {
    if (threadIdx.x == 0) f();
  }

 private:
  /// op over the values of all threads: within each warp by shuffles, then over the warps. Every
  /// thread gets the result.
  template <class Op>
  __device__ Real combine(Real value, Op op) const {
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      value = op(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    if (blockDim.x <= kWarp) return value;
    __shared__ Real of_warp[kBlock / kWarp];
    if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
    __syncthreads();
    value = of_warp[0];
    for (unsigned warp = 1; warp < blockDim.x / kWarp; ++warp) value = op(value, of_warp[warp]);
    __syncthreads();  // before a next combine() writes there
    return value;
  }
};

template <class Body>
__global__ void __launch_bounds__(kBlock) each_team_kernel(int64_t rows, Body body) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) body(BlockTeam(), row);
}

template <class Body>
__global__ void __launch_bounds__(kBlock) report_if_any_kernel(Split<Body> at, Body body) {
  bool found = false;
  const int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  const auto found_in_pack = [&](int64_t pack) {
    bool any = false;
    const auto look = [&](const Body& here, int k) { any |= here.found(k); };
    each_of_packs(body, look, at.first_of(pack));
    return any;
  };
  load_ahead(first, at.packs, step, found_in_pack, [&](bool it) { found |= it; });
  load_ahead(
      first, at.alone(), step, [&](int64_t k) { return body.found(at.element(k)); },
      [&](bool it) { found |= it; });
  // Several blocks may report: they write the same.
  if (__syncthreads_or(found) && threadIdx.x == 0) body.report();
}

// --- Sums over the rows of [rows, channels] -----------------------------------------------------

// The threads of a block stand in lines of up to kTile channels, so that neighbouring threads read
// neighbouring addresses; a line takes every (lines * gridDim.y)-th row. Who adds what depends on
// the shape alone: the sums are the same in every run, and on every GPU.

constexpr int64_t kTile = 32;         // if wider, a tile's last block has more to add up
constexpr int kSumBlocks = 3;         // per multiprocessor, side by side: 80 registers a thread
constexpr int64_t kMostBlocks = 384;  // that fills 128 multiprocessors
static_assert(kMostBlocks <= CudaStream::kBlockCounters);

constexpr int kMostOfRow = 4;  // numbers of a row that a thread adds up: more need more registers

/// Rows that a thread asks for before it adds the first.
template <int kSize>
constexpr int kInFlight = kSize == 1 ? 8 : 4;

/// The blocks of a sum, and the threads of each: (packs of channels, lines).
template <int kSize>
struct ColumnGrid {
  ColumnGrid(int64_t rows, int64_t channels) {
    const int64_t packs = channels / kSize;
    const int64_t tile = std::bit_ceil(uint64_t(std::clamp<int64_t>(packs, 1, kTile / kSize)));
    const int64_t tiles = (packs + tile - 1) / tile, lines = kBlock / tile;
    // Rows for all that a block can have in flight, but no more blocks than are at work at once:
    // the last one adds up what all found.
    const int64_t most = std::max<int64_t>(1, kMostBlocks / std::max<int64_t>(1, tiles));
    const int64_t blocks = std::clamp<int64_t>(rows / (kInFlight<kSize> * lines), 1, most);
    grid = dim3{unsigned(tiles), unsigned(blocks)};
    block = dim3{unsigned(tile), unsigned(lines)};
  }
  dim3 grid, block;
};

struct alignas(16) ColumnSums {  // one load
  double first = 0, second = 0;
};

/// The sums of terms(i) for i = first, first + step, ... below end, for each of a pack's channels.
/// Memory answers after hundreds of cycles, so the terms of kInFlight rows are loaded at once,
/// whatever i; which of them count is decided later. They are added in their own type, and only
/// what that gives in double, which most GPUs add at a fraction of the speed.
template <int kSize, class Load>
__device__ __forceinline__ Pack<ColumnSums, kSize> sum_strided(int64_t first, int64_t end,
                                                               int64_t step, Load terms) {
  constexpr int kRows = kInFlight<kSize>;
  Pack<ColumnSums, kSize> total{};
  for (int64_t i = first; i < end; i += kRows * step) {
    decltype(terms(i)) rows[kRows];
    LOCKSTEP_UNROLL
    for (int k = 0; k < kRows; ++k) {
      const int64_t at = i + k * step;
      rows[k] = terms(at < end ? at : i);
    }
    LOCKSTEP_UNROLL
    for (int c = 0; c < kSize; ++c) {
      auto sums = rows[0].values[c];
      LOCKSTEP_UNROLL
      for (int k = 1; k < kRows; ++k) {
        const bool counts = i + k * step < end;
        sums.first += counts ? rows[k].values[c].first : 0;
        sums.second += counts ? rows[k].values[c].second : 0;
      }
      total.values[c].first += sums.first;
      total.values[c].second += sums.second;
    }
  }
  return total;
}

/// What one row adds, for each channel of the pack that begins at element i.
template <int kSize, bool kAligned, class Body>
__device__ __forceinline__ Pack<bodies::Terms, kSize> terms_of_pack(Body body, int64_t i) {
  Pack<bodies::Terms, kSize> terms;
  with_packs<kSize, kAligned>(typename Body::Arrays(), body, i, [&](const Body& here) {
    LOCKSTEP_UNROLL
    for (int k = 0; k < kSize; ++k) terms.values[k] = here.terms(k, k);
  });
  return terms;
}

/// Adds up the lines of sums [lines, width], of which there are `count`, into the first one: half
/// of the lines to the other half, and so on. All threads of the block call this.
__device__ inline void add_lines(ColumnSums* sums, unsigned width, unsigned count) {
  const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
  __syncthreads();
  for (unsigned half = count / 2; half >= width; half /= 2) {
    for (unsigned i = thread; i < half; i += kBlock) {
      sums[i].first += sums[i + half].first;
      sums[i].second += sums[i + half].second;
    }
    __syncthreads();
  }
}

/// True in all threads of the last block of this tile that comes here; what the others wrote before
/// is then visible to it. Leaves the ticket at zero. (NVIDIA's sample threadFenceReduction.)
__device__ inline bool is_last_block(unsigned* ticket) {
  __shared__ bool last;
  __threadfence();  // what this block wrote comes before its ticket
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    last = atomicAdd(ticket, 1u) == gridDim.y - 1;
    if (last) *ticket = 0;
    __threadfence();  // and what the last one reads comes after all tickets
  }
  __syncthreads();
  return last;
}

/// `partial` [gridDim.y, channels] holds what each block found; the last one adds it up in order.
/// Of a tile's channels each thread first has a pack, from kSize numbers of a row at once, and then
/// one.
template <int kSize, bool kAligned, class Body>
__global__ void __launch_bounds__(kBlock, kSumBlocks)
    reduce_rows_kernel(int64_t rows, int64_t channels, Body body, ColumnSums* partial,
                       unsigned* block_counters) {
  __shared__ ColumnSums all[kSize * kBlock];  // [lines, width]
  const unsigned width = kSize * blockDim.x, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int64_t tile = int64_t(blockIdx.x) * width, pack = tile + kSize * threadIdx.x;
  const int64_t line = blockIdx.y * blockDim.y + threadIdx.y, lines = blockDim.y * gridDim.y;
  Pack<ColumnSums, kSize> sums{};
  if (pack < channels && line < rows) {
    Body mine = body;  // finish() needs the arrays themselves
    with_packs<kSize, false>(typename Body::FeatureArrays(), mine, pack, [&](const Body& here) {
      sums = sum_strided<kSize>(line, rows, lines, [&](int64_t row) {
        return terms_of_pack<kSize, kAligned>(here, row * channels + pack);
      });
    });
  }
  LOCKSTEP_UNROLL
  for (int k = 0; k < kSize; ++k) all[kSize * thread + k] = sums.values[k];
  add_lines(all, width, kSize * kBlock);
  const bool has_result = thread < width && tile + thread < channels;
  if (gridDim.y > 1) {
    if (has_result) partial[blockIdx.y * channels + tile + thread] = all[thread];
    if (!is_last_block(block_counters + blockIdx.x)) return;
    // thread / width, its rest, and how many lines there are now, without a division.
    const unsigned block_line = threadIdx.y / kSize, block_lines = blockDim.y / kSize;
    const int64_t c = tile + threadIdx.y % kSize * blockDim.x + threadIdx.x;
    const auto of_blocks = sum_strided<1>(
        block_line, c < channels ? gridDim.y : 0, block_lines,
        [&](int64_t block) { return Pack<ColumnSums, 1>{partial[block * channels + c]}; });
    all[thread] = of_blocks.values[0];
    add_lines(all, width, kBlock);
  }
  if (has_result) body.finish(tile + thread, all[thread].first, all[thread].second);
}

// --- Launchers ----------------------------------------------------------------------------------

/// Part of an operation: body(i) for i in [0, n).
template <class Body>
void launch_each(const CudaStream& s, int64_t n, Body body) {
  const Split at = split(n, body);
  const unsigned blocks = blocks_for(at.packs + at.alone(), s, each_kernel<Body>);
  each_kernel<<<blocks, kBlock, 0, s.raw()>>>(at, body);
}

/// Part of an operation: body(n, h, w, c) for every element of an NHWC shape.
template <class Body>
void launch_pixels(const CudaStream& s, const Shape& shape, Body body) {
  with_narrow_index(shape.elements(), [&](auto count) {
    using Index = decltype(count);
    const unsigned blocks = blocks_for(shape.elements(), s, each_pixel_kernel<Index, Body>);
    each_pixel_kernel<<<blocks, kBlock, 0, s.raw()>>>(count, Divisor<Index>{Index(shape[1])},
                                                      Divisor<Index>{Index(shape[2])},
                                                      Divisor<Index>{Index(shape[3])}, body);
  });
}

/// Part of an operation: body(i, row, feature) for rows of whole packs.
template <class Index, int kSize, class Body>
void launch_row_packs(const CudaStream& s, int64_t rows, int64_t features, Body body) {
  const int64_t packs = rows * features / kSize;
  const unsigned blocks = blocks_for(packs, s, each_row_kernel<Index, kSize, Body>);
  each_row_kernel<Index, kSize, Body>
      <<<blocks, kBlock, 0, s.raw()>>>(Index(packs), Divisor<Index>{Index(features / kSize)}, body);
}

/// Part of an operation: sums over the rows of [rows, channels].
template <int kSize, bool kAligned, class Body>
void launch_reduction(CudaStream& s, int64_t rows, int64_t channels, Body body) {
  const ColumnGrid<kSize> at(rows, channels);
  void* partial = s.scratch(at.grid.y * size_t(channels) * sizeof(ColumnSums));
  reduce_rows_kernel<kSize, kAligned, Body><<<at.grid, at.block, 0, s.raw()>>>(
      rows, channels, body, static_cast<ColumnSums*>(partial), s.block_counters());
}

/// The launchers of GPUs, for BodyKernels (kernels.inl).
struct Launch {
  /// body(i) for i in [0, n). A body that has enabled() is asked when the operation runs; one that
  /// has prepared() is prepared then, by each thread.
  template <class Body>
  static void for_each(Stream stream, const char* op, int64_t n, Body body) {
    CudaStream& s = cuda_stream(stream);
    s.enqueue(op, [&](cudaStream_t) { launch_each(s, n, body); });
  }

  /// body(i) for i in [0, n) in marked stretches; each of them is prepared by itself.
  template <class Body>
  static void for_each_marked(Stream stream, const char* op, int64_t n, bodies::Marked marked,
                              Body body) {
    CudaStream& s = cuda_stream(stream);
    s.enqueue(op, [&](cudaStream_t raw) {
      const Split at = split(n, body);
      const unsigned blocks = blocks_for(at.packs + at.alone(), s, each_marked_kernel<Body>);
      each_marked_kernel<<<blocks, kBlock, 0, raw>>>(at, marked, body);
    });
  }

  /// body(i, row, feature) for every element i of [rows, features].
  template <class Body>
  static void for_each_row(Stream stream, const char* op, int64_t rows, int64_t features,
                           Body body) {
    CudaStream& s = cuda_stream(stream);
    s.enqueue(op, [&](cudaStream_t) {
      constexpr int kSize = kPackSize<Body>;
      if (rows_are_packs<kSize>(rows, features, body)) {
        launch_row_packs<uint32_t, kSize>(s, rows, features, body);
      } else {
        with_narrow_index(rows * features, [&](auto count) {
          launch_row_packs<decltype(count), 1>(s, rows, features, body);
        });
      }
    });
  }

  /// body(n, h, w, c) for every element of an NHWC shape.
  template <class Body>
  static void for_each_pixel(Stream stream, const char* op, const Shape& shape, Body body) {
    CudaStream& s = cuda_stream(stream);
    s.enqueue(op, [&](cudaStream_t) { launch_pixels(s, shape, body); });
  }

  /// body(team, row) for every row of `length` elements: a warp for each of many short rows, else a
  /// block.
  template <class Body>
  static void for_each_team(Stream stream, const char* op, int64_t rows, int64_t length,
                            Body body) {
    CudaStream& s = cuda_stream(stream);
    s.enqueue(op, [&](cudaStream_t raw) {
      const unsigned blocks = unsigned(std::clamp<int64_t>(rows, 1, 65535));
      const bool short_rows = rows > 1 && length < 4 * kBlock;
      each_team_kernel<<<blocks, short_rows ? BlockTeam::kWarp : kBlock, 0, raw>>>(rows, body);
    });
  }

  /// body.report() if body.found(i) for any i in [0, n).
  template <class Body>
  static void report_if_any(Stream stream, const char* op, int64_t n, Body body) {
    CudaStream& s = cuda_stream(stream);
    s.enqueue(op, [&](cudaStream_t raw) {
      const Split at = split(n, body);
      const unsigned blocks = blocks_for(at.packs + at.alone(), s, report_if_any_kernel<Body>);
      report_if_any_kernel<<<blocks, kBlock, 0, raw>>>(at, body);
    });
  }

  /// Sums body.terms(i, c) over the rows of [rows, channels], then body.finish(c, sums).
  template <class Body>
  static void reduce_rows(Stream stream, const char* op, int64_t rows, int64_t channels,
                          Body body) {
    CudaStream& s = cuda_stream(stream);
    s.enqueue(op, [&](cudaStream_t) {
      constexpr int kSize = std::min(kPackSize<Body>, kMostOfRow);
      if (channels % kSize != 0) {
        launch_reduction<1, true>(s, rows, channels, body);
      } else if (packs_begin_at<kSize>(0, body, typename Body::Arrays())) {
        launch_reduction<kSize, true>(s, rows, channels, body);
      } else {  // the same sums in the same order
        launch_reduction<kSize, false>(s, rows, channels, body);
      }
    });
  }
};

}  // namespace lockstep::cuda
