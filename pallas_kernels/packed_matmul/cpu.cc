// Multiplies x [M, D] by a matrix that the loader packed once as [N / 32, D, 32]. api.py documents the call.
//
// XLA's matmul on a CPU packs the matrix at every call; for a step of few rows that takes longer than the product. Here
// a block of 32 columns is contiguous, and a tile of rows streams over it with all sums in registers. A single tile
// prefetches a little ahead of itself. Several tiles prefetch the thread's next block, one cache line at a time, so
// that their own reads do not queue behind it. The processor's own prefetcher stops at the end of a page.
//
// The kernel also applies the norm or SwiGLU before a matmul and adds the residual after it. Every element of the
// result is one sum in a fixed order, whatever M is, so a row has the same bits alone and in any batch. For an int8
// matrix the kernel multiplies the integers and scales each sum by its column's scale. With AMX, and unless the caller
// sets `ordered`, many rows take the faster path of amx.h.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "pallas_kernels/native.h"
#include "pallas_kernels/packed_matmul/amx.h"
#include "pallas_kernels/packed_matmul/blocks.h"
#include "pallas_kernels/packed_matmul/group_tiles.h"
#include "pallas_kernels/packed_matmul/groups.h"
#include "pallas_kernels/packed_matmul/tiles.h"
#include "pallas_kernels/rows.h"

namespace sluice {
namespace {

constexpr int kSums = kRegisters == 32 ? 24 : 12;  // vectors of a tile's sums, in registers
// Rows of a tile. With 16 registers, an f32 tile has few rows and all columns, so that it reads a cache line once and
// multiplies from memory. Weights that need widening take more rows and some of the columns.
template <typename W>
constexpr int kRows = kRegisters == 32 ? 12 : std::is_same_v<W, float> ? 3 : 6;
// Vectors of a row that a tile sums at once: eight independent sums hide the latency of two multiply-add units.
template <typename W>
constexpr int vectors_of(int rows) {
  return std::min(kColumns / kLanes, std::max(kSums / kRows<W>, rows == 1 ? 8 : rows == 2 ? 4 : 1));
}

// y[R, columns of V vectors] = x [R, D], `stride` from row to row, times the columns at w (whose rows are 32 apart).
template <int R, int V, typename W>
void product(const float* x, int64_t stride, int64_t D, const W* w, float (*y)[kColumns], Ahead& all) {
  Ahead ahead = all;
  Vec sums[R][V];
#pragma GCC unroll 16
  for (int m = 0; m < R; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) sums[m][j] = Vec{};
  for (int64_t k = 0; k < D; ++k, w += kColumns) {
    ahead.prefetch<3 << 10>(w, kColumns * sizeof(W));
    Vec row[V];
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) row[j] = load(w + j * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < R; ++m)
#pragma GCC unroll 8
      for (int j = 0; j < V; ++j) sums[m][j] += x[m * stride + k] * row[j];
  }
#pragma GCC unroll 16
  for (int m = 0; m < R; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) store(y[m] + j * kLanes, sums[m][j]);
  all = ahead;
}

// The same for a whole block of columns, in as many passes as needed.
template <typename W, int R = kRows<W>>
void product_of(int rows, const float* x, int64_t stride, int64_t D, const W* w, float (*y)[kColumns], Ahead& ahead) {
  if constexpr (R > 1) {
    if (rows < R) return product_of<W, R - 1>(rows, x, stride, D, w, y, ahead);
  }
  constexpr int V = vectors_of<W>(R), kPass = V * kLanes;
  for (int j = 0; j < kColumns; j += kPass) {
    product<R, V, W>(x, stride, D, w + j, reinterpret_cast<float(*)[kColumns]>(&y[0][j]), ahead);
    ahead.near = false;  // the first pass has brought the block into the cache
  }
}

// Multiplies all rows by one block of columns. next: the thread's next block, and its bytes. scales: per column, or
// null. residual: [M, N] as y, or null.
template <typename W, typename O>
void block_of(const float* x, int64_t stride, int64_t M, int64_t D, const W* w, const char* next, int64_t bytes, O* y,
              int64_t N, int64_t columns, const float* scales, const O* residual) {
  if constexpr (std::is_same_v<W, int8_t>) {
    if (M > kRows<W>) {  // several tiles: widen the block once
      static thread_local std::vector<float> wide;
      wide.resize(D * kColumns + kLine / sizeof(float));
      void* at = wide.data();  // aligned to cache lines: a vector across two of them takes two loads
      size_t room = wide.size() * sizeof(float);
      float* to = static_cast<float*>(std::align(kLine, D * kColumns * sizeof(float), at, room));
      for (int64_t k = 0; k < D * kColumns; k += kLanes) store(to + k, load(w + k));
      return block_of<float, O>(x, stride, M, D, to, next, bytes, y, N, columns, scales, residual);
    }
  }
  // Tiles of even size: 16 rows become 8 and 8, not 12 and 4.
  const int64_t tiles = (M + kRows<W> - 1) / kRows<W>, rows = (M + tiles - 1) / tiles;
  const int64_t passes = kColumns / (vectors_of<W>(static_cast<int>(rows)) * kLanes);
  Ahead ahead{tiles == 1, next, tiles == 1 ? 0 : bytes / kLine, tiles * D * passes};
  float result[kRows<W>][kColumns];
  for (int64_t m = 0; m < M; m += rows) {
    const int count = static_cast<int>(std::min(rows, M - m));
    product_of(count, x + m * stride, stride, D, w, result, ahead);
    for (int i = 0; i < count; ++i)
      finish(result[i], columns, scales, residual ? residual + (m + i) * N : nullptr, y + (m + i) * N);
  }
}

#if SLUICE_AMX
// The number of rows from which the kernel uses AMX tiles. Fewer rows gain nothing with weights of f32
// (docs/decisions/packed-matmul.md, 2026-11-28), and a row has the same bits in each of these smaller steps.
template <typename W>
constexpr int64_t kTiledFrom = std::is_same_v<W, float> ? 65 : kRows<W> + 1;

// Like `multiply`, with AMX tiles.
template <typename X, typename W, typename O>
void multiply_by_tiles(ffi::ThreadPool& threads, const X* x, int64_t M, int64_t D, const X* scale, float epsilon,
                       bool gated, const W* w, const float* scales, const O* residual, int64_t blocks, O* y, int64_t N) {
  constexpr int P = amx::kParts<X>;
  const bool worth_it = M * D * N > 500000;
  const int64_t pairs = (M + 2 * amx::kRows - 1) / (2 * amx::kRows), tiles = 2 * pairs;
  const int64_t tile_rows = (M + tiles - 1) / tiles;
  const int64_t size = amx::deep(D) * P * 2 * amx::kTile;  // of one pair's rows
  static thread_local std::vector<uint16_t> placed;
  placed.resize(pairs * size + kLine / sizeof(uint16_t));
  uint16_t* rows = align_to_line(placed.data());
  const auto place = [=](int64_t tile) {
    static thread_local std::vector<float> row;
    row.resize(D);
    const bool as_it_is = std::is_same_v<X, float> && scale == nullptr && !gated;
    for (int64_t i = 0; i < tile_rows; ++i) {
      const int64_t m = tile * tile_rows + i;
      if (m >= M) {
        std::fill(row.begin(), row.end(), 0.0f);
      } else if (!as_it_is) {
        prepare_row(x, m, D, scale, epsilon, gated, row.data());
      }
      amx::place_row<P>(as_it_is && m < M ? reinterpret_cast<const float*>(x) + m * D : row.data(), D,
                        rows + tile / 2 * size + tile % 2 * amx::kTile + i * amx::kDepth);
    }
  };
  // As many rows as stay in a second-level cache for a whole run of blocks. Every part of the rows converts the columns
  // again, so too few rows would spend more time on conversion than on products.
  const int64_t most = std::max<int64_t>(2, (1 << 20) / (size * static_cast<int64_t>(sizeof(uint16_t))));
  const int64_t run = std::clamp<int64_t>(blocks / 12, 2, 16), runs = (blocks + run - 1) / run;
  const int64_t few = std::clamp<int64_t>(4 * spread_over(threads, 64, worth_it) / runs, 1, (pairs + 1) / 2);
  const int64_t wanted = std::max((pairs + most - 1) / most, few);
  const int64_t part = (pairs + wanted - 1) / wanted, parts = (pairs + part - 1) / part;
  const int64_t pieces = runs * parts, lanes = spread_over(threads, pieces, worth_it);
  const auto product = [=](int64_t i) {
    const int64_t piece = dealt(i, pieces, lanes);
    const int64_t begin = piece % parts * part, first = piece / parts * run;
    amx::multiply_blocks<P>(
        rows + begin * size, tile_rows, std::min(part, pairs - begin), D, w + first * D * kColumns,
        std::min(run, blocks - first), [=](int64_t block, int64_t pair, float* sums) {
          const int64_t top = (begin + pair) * 2 * tile_rows, left = (first + block) * kColumns;
          for (int64_t m = top; m < std::min(M, top + 2 * tile_rows); ++m) {
            const int64_t line = (m - top) / tile_rows * 2 * amx::kRows + (m - top) % tile_rows;  // of the left half
            for (int64_t j = 0, n = left; j < 2 && n < N; ++j, n += 16)
              finish(sums + (line + j * amx::kRows) * 16, std::min<int64_t>(16, N - n), scales ? scales + n : nullptr,
                     residual ? residual + m * N + n : nullptr, y + m * N + n);
          }
        });
  };
  spread(threads, tiles, place, pieces, product, worth_it);
}
#endif

// M: rows in use. gated: x is [M, 2 D].
template <typename X, typename W, typename O>
void multiply(ffi::ThreadPool& threads, const X* x, int64_t M, int64_t D, const X* scale, float epsilon, bool gated,
              const W* w, const float* scales, const O* residual, int64_t blocks, O* y, int64_t N) {
  const bool worth_it = M * D * N > 500000;
  // An odd stride in cache lines: with a power of two, 12 rows would evict each other from the cache.
  constexpr int64_t kInLine = kLine / sizeof(float);
  int64_t stride = (D + kInLine - 1) / kInLine / 2 * 2 * kInLine + kInLine;
  const bool as_it_is = std::is_same_v<X, float> && scale == nullptr && !gated;
  static thread_local std::vector<float> prepared;
  if (as_it_is) {
    stride = D;
  } else {
    prepared.resize(M * stride);
  }
  float* to = prepared.data();
  const float* rows = as_it_is ? reinterpret_cast<const float*>(x) : to;
  const auto prepare = [=](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) prepare_row(x, m, D, scale, epsilon, gated, to + m * stride);
  };
  const auto product = [=](int64_t block, int64_t stop, int64_t begin, int64_t count) {
    for (; block < stop; ++block) {
      const W* from = w + block * D * kColumns;
      const char* next = reinterpret_cast<const char*>(from + D * kColumns);
      const int64_t bytes = D * kColumns * static_cast<int64_t>(sizeof(W)), first = block * kColumns;
      block_of(rows + begin * stride, stride, count, D, from, next, bytes, y + begin * N + first, N,
               std::min<int64_t>(kColumns, N - first), scales ? scales + first : nullptr,
               residual ? residual + begin * N + first : nullptr);
    }
  };
  spread_blocks(threads, M, blocks, kRows<W>, !as_it_is, worth_it, prepare, product);
}

// The arguments of a call that do not depend on element types.
struct Call {
  ffi::ThreadPool& threads;
  int64_t rows, inputs, outputs, blocks;  // rows in use
  const void *x, *norm, *w, *scales, *residual;  // norm, scales, residual: or null
  void* y;
  float epsilon;
  bool gated, ordered;
};

template <typename X, typename W, typename O>
void multiply_plain(const Call& call) {
  auto way = multiply<X, W, O>;
#if SLUICE_AMX
  if (!call.ordered && call.rows >= kTiledFrom<W> && amx::available()) way = multiply_by_tiles<X, W, O>;
#endif
  way(call.threads, static_cast<const X*>(call.x), call.rows, call.inputs, static_cast<const X*>(call.norm),
      call.epsilon, call.gated, static_cast<const W*>(call.w), static_cast<const float*>(call.scales),
      static_cast<const O*>(call.residual), call.blocks, static_cast<O*>(call.y), call.outputs);
}

template <typename X, typename S, typename O>
void multiply_groups(const Call& call, const groups::Layout& layout, int bits) {
  const auto by = [&](auto way, bool tiled = false) {
    way(call.threads, static_cast<const X*>(call.x), call.rows, layout, static_cast<const X*>(call.norm), call.epsilon,
        call.gated, static_cast<const uint8_t*>(call.w), static_cast<const O*>(call.residual), call.blocks,
        static_cast<O*>(call.y), call.outputs, tiled);
  };
#if defined(__AVX512F__)
  if (groups::Vnni::available())
    return by(bits == 4   ? groups::multiply<groups::Vnni, 4, X, S, O>
              : bits == 6 ? groups::multiply<groups::Vnni, 6, X, S, O>
                          : groups::multiply<groups::Vnni, 8, X, S, O>,
              groups::pays_by_tiles(layout, call.rows) && groups::tiles_available());
#endif
  by(bits == 4   ? groups::multiply<groups::Halves, 4, X, S, O>
     : bits == 6 ? groups::multiply<groups::Halves, 6, X, S, O>
                 : groups::multiply<groups::Pairs, 8, X, S, O>);
}

ffi::Error invalid(const std::string& text) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "packed matmul: " + text);
}

// x [M, D], or gated [M, 2 D], w [ceil(N / 32), D, 32], scales [N] float32 or [0], norm's scale [D] or [0], rows in use
// [1] or [0] for all, residual as y or [0, 0] -> y [M, N], zeros in the other rows. All are float32 or bfloat16, but w
// may be bfloat16 beside float32, int8 with scales, or with `bits` the uint8 [ceil(N / 32), bytes] of groups.h. ordered: sums in the fixed order.
ffi::Error packed(ffi::ThreadPool threads, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::F32> scales,
                  ffi::AnyBuffer norm, ffi::Buffer<ffi::S32> used, ffi::AnyBuffer residual,
                  ffi::Result<ffi::AnyBuffer> y, float epsilon, bool gated, bool ordered, int32_t bits,
                  int64_t num_groups, bool halves, bool has_offsets, bool superblocks) {
  const int64_t M = x.dimensions()[0], D = x.dimensions()[1] / (gated ? 2 : 1), N = y->dimensions()[1];
  const int64_t blocks = w.dimensions()[0];
  const bool normed = norm.dimensions()[0] != 0, adds = residual.dimensions()[0] != 0;
  if ((N + kColumns - 1) / kColumns != blocks || y->dimensions()[0] != M ||
      (normed && (gated || norm.dimensions()[0] != D)) || norm.element_type() != x.element_type() ||
      (adds && (residual.dimensions()[0] != M || residual.dimensions()[1] != N ||
                residual.element_type() != y->element_type())))
    return invalid("shapes do not match");
  const int64_t rows = used.dimensions()[0] ? used.typed_data()[0] : M;
  if (rows < 0 || rows > M) return invalid(std::to_string(rows) + " rows in use of " + std::to_string(M));
  const int64_t used_bytes = rows * N * (y->size_bytes() / std::max<int64_t>(1, M * N));
  std::memset(static_cast<char*>(y->untyped_data()) + used_bytes, 0, y->size_bytes() - used_bytes);
  if (rows == 0) return ffi::Error::Success();
  const auto data_of = [](const auto& buffer) -> const void* {
    return buffer.element_count() ? buffer.untyped_data() : nullptr;
  };
  const Call call{threads, rows, D, N, blocks, x.untyped_data(), data_of(norm), w.untyped_data(), data_of(scales),
                  data_of(residual), y->untyped_data(), epsilon, gated, ordered};
  const auto x_type = x.element_type(), w_type = w.element_type(), y_type = y->element_type();
  const bool narrow = x_type == ffi::BF16;
  if ((!narrow && x_type != ffi::F32) || (y_type != ffi::F32 && y_type != x_type))
    return invalid("x is not float32 or bfloat16, or the result neither like x nor float32");
  if (bits != 0) {
    if ((bits != 4 && bits != 6 && bits != 8) || w_type != ffi::U8 || num_groups < 1 || D % num_groups != 0)
      return invalid("codes are not uint8 of 4, 6 or 8 bits in groups that divide the inputs");
    if (superblocks && (!halves || bits == 8 || D % groups::kSuper != 0 ||
                        num_groups != D / (has_offsets ? 32 : 16) || (bits == 4 && !has_offsets)))
      return invalid("superblocks are of 256 inputs, in groups of 32 with offsets or of 16 at 6 bits");
    const groups::Layout layout(D, num_groups, bits, halves, has_offsets, superblocks);
    if ((layout.padded() != D && num_groups != 1) ||
        static_cast<int64_t>(w.element_count()) != blocks * layout.block_bytes())
      return invalid("the bytes of the groups do not match");
    const auto with = [&](auto scale_type) {
      using S = decltype(scale_type);
      if (!narrow) {
        multiply_groups<float, S, float>(call, layout, bits);
      } else if (y_type == ffi::F32) {
        multiply_groups<Bf16, S, float>(call, layout, bits);
      } else {
        multiply_groups<Bf16, S, Bf16>(call, layout, bits);
      }
      return ffi::Error::Success();
    };
    return halves ? with(uint16_t{}) : with(float{});
  }
  const bool quantized = w_type == ffi::S8, widened = w_type == ffi::BF16 && !narrow;
  if (w.dimensions()[1] != D || (!quantized && !widened && w_type != x_type) ||
      scales.dimensions()[0] != (quantized ? N : 0))
    return invalid("w is neither like x, nor bfloat16, nor int8 with scales");
  if (widened) {
    multiply_plain<float, Bf16, float>(call);
  } else if (quantized && !narrow) {
    multiply_plain<float, int8_t, float>(call);
  } else if (quantized && y_type == ffi::F32) {
    multiply_plain<Bf16, int8_t, float>(call);
  } else if (quantized) {
    multiply_plain<Bf16, int8_t, Bf16>(call);
  } else if (!narrow) {
    multiply_plain<float, float, float>(call);
  } else if (y_type == ffi::F32) {
    multiply_plain<Bf16, Bf16, float>(call);
  } else {
    multiply_plain<Bf16, Bf16, Bf16>(call);
  }
  return ffi::Error::Success();
}

// Packs the matrix [D, N] at `from`, with strides `down` along D and `across` along N, into [N / 32, D, 32]. Leaves the
// last block's columns beyond N alone. Works in squares, so that both sides stay in the cache.
template <typename T>
void pack(const T* from, int64_t D, int64_t N, int64_t down, int64_t across, T* to) {
  constexpr int64_t kDown = 16;
  for (int64_t n = 0; n < N; n += kColumns, from += kColumns * across, to += D * kColumns) {
    const int64_t columns = std::min<int64_t>(kColumns, N - n);
    for (int64_t first = 0; first < D; first += kDown) {
      const int64_t last = std::min(first + kDown, D);
      for (int64_t j = 0; j < columns; ++j)
        for (int64_t d = first; d < last; ++d) to[d * kColumns + j] = from[d * down + j * across];
    }
  }
}

}  // namespace

// Packs elements of 1, 2 or 4 bytes for api.pack_weight; returns false for other sizes. Does not need the interpreter
// lock.
extern "C" bool SluicePack(const void* from, int64_t bytes, int64_t D, int64_t N, int64_t down, int64_t across,
                           void* to) {
  const auto as = [&](auto element) {
    using T = decltype(element);
    pack(static_cast<const T*>(from), D, N, down, across, static_cast<T*>(to));
    return true;
  };
  switch (bytes) {
    case 1: return as(uint8_t{});
    case 2: return as(uint16_t{});
    case 4: return as(uint32_t{});
  }
  return false;
}

// Packs codes of 4, 6 or 8 bits, a byte each or (code_size 4) eight of 4 bits in a word, with scales and offsets (or null) of
// 2 or 4 bytes, for api.pack_groups. down, across: in codes or words. supers: null, or what replaces scales and offsets.
extern "C" void SluicePackGroups(const void* codes, int64_t bits, int64_t code_size, int64_t D, int64_t N, int64_t down,
                                 int64_t across, const char* scales, const char* offsets, const char* supers,
                                 int64_t num_groups, int64_t value_size, uint8_t* to) {
  const groups::Layout layout(D, num_groups, static_cast<int>(bits), value_size == 2, offsets != nullptr,
                              supers != nullptr);
  if (code_size == 4) {
    groups::pack_words(static_cast<const uint32_t*>(codes), N, down, across, scales, offsets, layout, to);
  } else {
    const auto packs = bits == 4 ? groups::pack<4> : bits == 6 ? groups::pack<6> : groups::pack<8>;
    packs(static_cast<const uint8_t*>(codes), N, down, across, scales, offsets, supers, layout, to);
  }
}

// Returns the AMX tiles in use, for api.find_tile_types: 1 for bfloat16, 2 for int8, or their sum.
extern "C" int32_t SluiceTileTypes() {
#if SLUICE_AMX
  return (amx::available() ? 1 : 0) + (groups::tiles_available() ? 2 : 0);
#else
  return 0;
#endif
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(SluicePackedMatmul, packed,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("epsilon")
                                  .Attr<bool>("gated")
                                  .Attr<bool>("ordered")
                                  .Attr<int32_t>("bits")
                                  .Attr<int64_t>("num_groups")
                                  .Attr<bool>("halves")
                                  .Attr<bool>("has_offsets")
                                  .Attr<bool>("superblocks"));

}  // namespace sluice
