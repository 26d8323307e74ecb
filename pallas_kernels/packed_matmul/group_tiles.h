// The products of groups.h on AMX's tiles of bytes, with the same bits as by vectors.
//
// A tile of values has up to 16 rows of x, and one of codes 16 columns, with 64 inputs of a chunk. Codes of 8 bits lie in
// memory as tiles need them. Codes of 4 and 6 bits are widened to bytes once for all rows. The sums of a chunk go
// through memory to vectors, which scale and add them as groups.h does.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "pallas_kernels/native.h"
#include "pallas_kernels/packed_matmul/blocks.h"
#include "pallas_kernels/packed_matmul/groups.h"
#include "pallas_kernels/packed_matmul/tiles.h"

#if SLUICE_AMX
namespace sluice {
namespace groups {

using amx::Tiles;
static_assert(kPiece == amx::kRows);

constexpr int kSumsOfLeft = 0, kSumsOfRight = 1;  // tiles: the sums of 16 columns each
// Tiles of values and of codes: of 64 inputs; of a chunk's last inputs, if fewer; and of those of a group's last chunk.
constexpr int kWhole = 2, kRest = 4, kLast = 6;
constexpr int64_t kDepth = amx::kRowBytes;       // inputs of a tile
constexpr int64_t kHalf = 4 * kColumns / 2;      // bytes of 16 columns
typedef int32_t Dots[amx::kRows][kColumns];      // sums of a chunk

// The inputs of a group's last chunk.
inline int64_t last_chunk(const Layout& layout) { return layout.group - (layout.num_chunks - 1) * layout.chunk; }

// The shapes for tiles of `count` rows of x.
inline amx::Shapes shape_tiles(const Layout& layout, int64_t count) {
  amx::Shapes shapes;
  shapes.set(kSumsOfLeft, count, kHalf);
  shapes.set(kSumsOfRight, count, kHalf);
  const auto set_inputs = [&](int tile, int64_t inputs) {
    if (inputs == 0) return;
    shapes.set(tile, count, inputs);
    shapes.set(tile + 1, inputs / 4, kHalf);
  };
  set_inputs(kWhole, kDepth);
  set_inputs(kRest, layout.chunk % kDepth);
  set_inputs(kLast, last_chunk(layout) % kDepth);
  return shapes;
}

// Adds the products of one tile of values, `stride` from row to row, to the sums of all columns.
template <int T>
inline __attribute__((always_inline)) void add_tile(const int8_t* values, int64_t stride, const uint8_t* codes) {
  Tiles::load<T>(values, stride);
  Tiles::load<T + 1>(codes, 2 * kHalf);
  Tiles::add_bytes<kSumsOfLeft, T, T + 1>();
  Tiles::load<T + 1>(codes + kHalf, 2 * kHalf);
  Tiles::add_bytes<kSumsOfRight, T, T + 1>();
}

// Writes the sums of values times codes, over `inputs` inputs of a chunk.
inline void multiply_chunk(const int8_t* values, int64_t stride, const uint8_t* codes, int64_t inputs, bool is_last,
                           Dots& dots) {
  Tiles::zero<kSumsOfLeft>();
  Tiles::zero<kSumsOfRight>();
  for (; inputs >= kDepth; inputs -= kDepth, values += kDepth, codes += kDepth * kColumns)
    add_tile<kWhole>(values, stride, codes);
  if (inputs > 0) {
    if (is_last) {
      add_tile<kLast>(values, stride, codes);
    } else {
      add_tile<kRest>(values, stride, codes);
    }
  }
  Tiles::store<kSumsOfLeft>(dots[0], 2 * kHalf);
  Tiles::store<kSumsOfRight>(dots[0] + kColumns / 2, 2 * kHalf);
}

// Scales the sums of a chunk and adds them to `count` rows of y. chunks: of the first row, `num_chunks` from row to row.
template <bool kHasOffsets, typename S>
void add_chunk(const Dots& dots, const Chunk* chunks, int64_t num_chunks, const S* scales, int64_t count,
               float (*y)[kColumns]) {
  constexpr int V = kColumns / kLanes;
  const S* offsets = scales + kColumns;
  Vec scale[V], offset[V];
#pragma GCC unroll 8
  for (int j = 0; j < V; ++j) {
    scale[j] = load_value(scales + j * kLanes);
    offset[j] = kHasOffsets ? load_value(offsets + j * kLanes) : Vec{};
  }
  for (int64_t m = 0; m < count; ++m, chunks += num_chunks) {
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) {
      const IntVec sum = load_ints(dots[m] + j * kLanes) + all_ints(chunks->start);
      const Vec dot = __builtin_convertvector(sum, Vec);
      Vec total = fused(every(chunks->factor), dot * scale[j], load(y[m] + j * kLanes));
      if (kHasOffsets) total = fused(every(chunks->sum), offset[j], total);
      store(y[m] + j * kLanes, total);
    }
  }
}

// y [count, 32] = up to 16 rows times a block of columns of codes of 8 bits. The tiles have the shapes of `count` rows.
template <typename S>
void multiply_rows(const Rows<Vnni>& rows, int64_t count, const Layout& layout, const uint8_t* block, float (*y)[kColumns],
                   Ahead& ahead) {
  alignas(kLine) Dots dots[2];  // of this chunk and of the next, which tiles multiply meanwhile
  std::memset(y, 0, static_cast<size_t>(count) * sizeof *y);
  const uint8_t* codes = block;
  const int8_t* values = rows.values;
  int64_t begin = 0;  // of the next chunk, in its group
  const auto multiply_next = [&](Dots& to) {
    const int64_t inputs = std::min(layout.chunk, layout.group - begin);
    begin += inputs;
    multiply_chunk(values, rows.stride, codes, inputs, begin == layout.group, to);
    values += inputs;
    codes += inputs * kColumns;
    if (begin == layout.group) {
      begin = 0;
      codes += layout.behind_bytes();
    }
    ahead.prefetch_next(1);
  };
  multiply_next(dots[0]);
  const Chunk* chunk = rows.chunks;
  const int64_t all = layout.chunks();
  for (int64_t g = 0, i = 0; g < layout.num_groups; ++g) {
    block += layout.code_bytes;
    const S* scales = reinterpret_cast<const S*>(block);
    for (int64_t k = 0; k < layout.num_chunks; ++k, ++chunk) {
      if (++i < all) multiply_next(dots[i % 2]);
      if (layout.value_rows == 2) {
        add_chunk<true>(dots[(i - 1) % 2], chunk, rows.num_chunks, scales, count, y);
      } else {
        add_chunk<false>(dots[(i - 1) % 2], chunk, rows.num_chunks, scales, count, y);
      }
    }
    block += layout.behind_bytes();
  }
}

// Multiplies `count` rows by the blocks of columns from `block` to `stop`. Arguments are those of `multiply`; residual
// and y begin at the first row.
template <int kBits, typename S, typename O>
void multiply_by_tiles(const Rows<Vnni>& rows, int64_t count, const Layout& layout, const uint8_t* weight, int64_t block,
                       int64_t stop, const O* residual, O* y, int64_t N) {
  const int64_t tiles = (count + amx::kRows - 1) / amx::kRows, of_tile = (count + tiles - 1) / tiles;
  const Layout bytes = layout.widened();
  static thread_local std::vector<uint8_t> widened;
  uint8_t* codes = nullptr;
  if constexpr (kBits != 8) {
    widened.resize(bytes.block_bytes() + kLine);
    codes = align_to_line(widened.data());
  }
  const amx::Configured tiles_in_use(shape_tiles(layout, of_tile));
  for (; block < stop; ++block) {
    const uint8_t* from = weight + block * layout.block_bytes();
    if constexpr (kBits != 8) widen_block<kBits>(layout, from, bytes, codes);
    Ahead ahead{false, reinterpret_cast<const char*>(from + layout.block_bytes()), layout.block_bytes() / kLine,
                tiles * layout.chunks()};
    const int64_t left = block * kColumns, columns = std::min<int64_t>(kColumns, N - left);
    for (int64_t row = 0; row < count; row += of_tile) {
      const int64_t top = std::min(row, count - of_tile);  // all tiles have one shape, so the last may begin earlier
      alignas(kLine) float result[amx::kRows][kColumns];
      multiply_rows<S>(rows.from(top), of_tile, bytes, kBits == 8 ? from : codes, result, ahead);
      for (int64_t m = row; m < top + of_tile; ++m) {
        const int64_t at = m * N + left;
        finish<O>(result[m - top], columns, nullptr, residual ? residual + at : nullptr, y + at);
      }
    }
  }
}

// Whether tiles multiply a small matrix of a few chunks as plain integers do: a check of this processor, or of its
// emulation.
[[maybe_unused]] static bool tiles_are_exact() {
  constexpr int64_t kInputs = 76, kCount = 11;
  Layout layout(kInputs, 1, 8, false, false, false);
  int8_t values[kCount][kInputs];
  uint8_t codes[kInputs / 4][kColumns][4];
  for (int64_t m = 0; m < kCount; ++m)
    for (int64_t k = 0; k < kInputs; ++k) values[m][k] = static_cast<int8_t>((m * 89 + k * 57) % 255 - 127);
  for (int64_t k = 0; k < kInputs; ++k)
    for (int64_t n = 0; n < kColumns; ++n) codes[k / 4][n][k % 4] = static_cast<uint8_t>((k * 101 + n * 31) % 256);
  Dots dots;
  const amx::Configured tiles_in_use(shape_tiles(layout, kCount));
  multiply_chunk(values[0], kInputs, codes[0][0], kInputs, true, dots);
  for (int64_t m = 0; m < kCount; ++m)
    for (int64_t n = 0; n < kColumns; ++n) {
      int32_t sum = 0;
      for (int64_t k = 0; k < kInputs; ++k) sum += values[m][k] * codes[k / 4][n][k % 4];
      if (dots[m][n] != sum) return false;
    }
  return true;
}

// Whether tiles take fewer cycles than VNNI for so many rows, by a count of instructions. Scaling the sums of a chunk
// costs tiles more than VNNI, so chunks of few inputs do not pay (docs/decisions/packed-matmul.md, 2026-11-27).
inline bool pays_by_tiles(const Layout& layout, int64_t rows) {
  return layout.chunk >= 64 ? rows >= 8 : layout.chunk >= 32 && rows >= 13;
}

// Whether the products may use tiles; checked once. Not `inline`: libraries that one process loads would share it.
[[maybe_unused]] static bool tiles_available() {
  static const bool are = Vnni::available() && amx::permitted(amx::kBytes) && tiles_are_exact();
  return are;
}

}  // namespace groups
}  // namespace sluice
#else
namespace sluice {
namespace groups {

inline bool tiles_available() { return false; }
inline bool pays_by_tiles(const Layout&, int64_t) { return false; }

}  // namespace groups
}  // namespace sluice
#endif
