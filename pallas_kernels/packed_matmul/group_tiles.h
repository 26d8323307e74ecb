// The products of groups.h on AMX's tiles of bytes, with the same bits as by vectors.
//
// A tile of values has up to 16 rows of x, and one of codes 16 columns, half a block, with 64 inputs of a chunk. Codes
// of 8 bits lie in memory as tiles need them. Codes of 4 and 6 bits become signed bytes once for all rows. The sums of
// a chunk go through memory to vectors, which scale and add them as groups.h does, and hold the sums of a row. Tiles
// are two chunks ahead of vectors through all rows and blocks of a piece of work, so that neither waits for the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
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

constexpr int kSums = 0;  // tile: the sums of 16 columns
// Tiles of values and of codes: of 64 inputs; of a chunk's last inputs, if fewer; and of those of a group's last chunk.
constexpr int kWhole = 2, kRest = 4, kLast = 6;
constexpr int64_t kDepth = amx::kRowBytes;       // inputs of a tile
constexpr int64_t kHalf = 4 * kColumns / 2;      // bytes of four inputs of 16 columns
typedef int32_t Dots[amx::kRows][kColumns / 2];  // sums of a chunk

// The inputs of a group's last chunk.
inline int64_t last_chunk(const Layout& layout) { return layout.group - (layout.num_chunks - 1) * layout.chunk; }

// The shapes for tiles of `count` rows of x.
inline amx::Shapes shape_tiles(const Layout& layout, int64_t count) {
  amx::Shapes shapes;
  shapes.set(kSums, count, kHalf);
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

// A chunk of a block: its inputs, and where its values, codes and scales are, in bytes from the row's first value and
// the block's first code and scale. is_last: of its group.
struct PlacedChunk {
  int64_t inputs, values, codes, scales;
  bool is_last;
};

// Returns the chunks of a block in order. They stay until this thread calls again. in_place: as in TiledBlocks.
inline const PlacedChunk* place_chunks(const Layout& layout, bool in_place) {
  static thread_local std::vector<PlacedChunk> places;
  places.clear();
  int64_t values = 0;
  for (int64_t g = 0; g < layout.num_groups; ++g) {
    const int64_t before = g * layout.behind_bytes();  // bytes of scales between codes
    const int64_t scales = layout.of_super ? g * layout.super_value_bytes() : (g + 1) * layout.code_bytes + before;
    for (int64_t k = 0; k < layout.num_chunks; ++k) {
      const int64_t inputs = std::min(layout.chunk, layout.group - k * layout.chunk);
      const int64_t codes = in_place ? values * kColumns + before : values * kColumns / 2;
      places.push_back({inputs, values, codes, scales, k + 1 == layout.num_chunks});
      values += inputs;
    }
  }
  return places.data();
}

// Writes codes of 4 or 6 bits as signed bytes for tiles, [2, inputs / 4, 16, 4], and scales of superblocks, [groups, 1
// or 2, 32].
template <int kBits>
void place_block(const Layout& layout, const uint8_t* block, uint8_t* to, uint16_t* supers) {
  static_assert(4 * kLanes == kHalf);
  const IntVec zero = all_ints(0x01010101 << (kBits - 1));
  const int64_t group_bytes = layout.group * kColumns / 2, half_bytes = layout.padded() * kColumns / 2;
  const uint8_t* super = nullptr;
  for (int64_t g = 0; g < layout.num_groups; ++g, to += group_bytes) {
    if (layout.begins_super(g)) {
      super = block;
      block += layout.super_bytes();
    }
    if (layout.of_super) {
      expand_group(layout, super, g % layout.of_super, supers);
      supers += layout.value_rows * kColumns;
    }
    expand_codes<kBits>(layout, block, [=](int64_t fours, int64_t at, IntVec codes) __attribute__((always_inline)) {
      _mm512_storeu_si512(to + fours * kHalf + (at == 0 ? 0 : half_bytes),
                          _mm512_sub_epi8((__m512i)codes, (__m512i)zero));
    });
    block += layout.code_bytes + layout.behind_bytes();
  }
}

// Multiplies values, `stride` from row to row, by the codes of half a block, over `inputs` inputs of a chunk. is_last:
// of its group.
template <bool kInPlace>
inline __attribute__((always_inline)) void multiply_chunk(const int8_t* values, int64_t stride, const uint8_t* codes,
                                                          int64_t inputs, bool is_last) {
  constexpr int64_t kApart = kInPlace ? 2 * kHalf : kHalf;  // bytes from four inputs to the next
  const auto add_tile = [&](auto tile) __attribute__((always_inline)) {
    constexpr int kValues = tile, kCodes = tile + 1;
    Tiles::load<kValues>(values, stride);
    Tiles::load<kCodes>(codes, kApart);
    if constexpr (kInPlace) {
      Tiles::add_unsigned<kSums, kValues, kCodes>();
    } else {
      Tiles::add_signed<kSums, kValues, kCodes>();
    }
  };
  Tiles::zero<kSums>();
  for (; inputs >= kDepth; inputs -= kDepth, values += kDepth, codes += kDepth / 4 * kApart)
    add_tile(std::integral_constant<int, kWhole>());
  if (inputs == 0) return;
  if (is_last) {
    add_tile(std::integral_constant<int, kLast>());
  } else {
    add_tile(std::integral_constant<int, kRest>());
  }
}

// Which blocks of columns tiles multiply, and where results go. Codes of 8 bits are in place: unsigned, both halves
// of the columns side by side. Others are signed, and the right half lies behind the left one.
struct TiledBlocks {
  struct Opened {
    const uint8_t *codes, *scales;
  };
  const Layout& layout;
  const uint8_t* weight;  // the first block
  char* results;          // of the first row and column
  int64_t column_bytes, row_bytes;

  TiledBlocks(const Layout& layout, const uint8_t* weight, void* results, int64_t column_bytes, int64_t row_bytes)
      : layout(layout),
        weight(weight),
        results(static_cast<char*>(results)),
        column_bytes(column_bytes),
        row_bytes(row_bytes) {}
  // Returns a block. Its codes stay until the next one is opened, and its scales until the next but one.
  virtual Opened open(int64_t block) = 0;
  // Takes the results of rows `row` to `stop`.
  virtual void finish(int64_t block, int64_t row, int64_t stop, float (*sums)[kColumns]) = 0;
};

// Rows in tiles of R, where the last ones begin earlier if R do not remain. With fewer than R rows in all, a tile reads
// on behind them, and nobody uses those results.
template <int R>
struct RowsOfTiles {
  const Rows<Vnni>& rows;
  int64_t count;

  int64_t tiles() const { return (count + R - 1) / R; }
  int64_t top(int64_t tile) const { return std::max<int64_t>(0, std::min(tile * R, count - R)); }
  const int8_t* values(int64_t tile) const { return rows.from(top(tile)).values; }
};

// The chunks of R rows, side by side: what vectors multiply a chunk's sums by.
template <int R>
struct Scaling {
  float factor[R], sum[R];
  int32_t start[R];
};

// Returns [tiles, chunks] of Scaling, laid out unless this thread did so last.
template <int R>
const Scaling<R>* lay_out_scalings(const RowsOfTiles<R>& tiled, int64_t call, int64_t begin) {
  static thread_local std::pair<int64_t, int64_t> last;
  static thread_local std::vector<Scaling<R>> scalings;
  if (last == std::pair(call, begin)) return scalings.data();
  last = {call, begin};
  const int64_t chunks = tiled.rows.num_chunks;
  scalings.assign(tiled.tiles() * chunks, Scaling<R>{});
  for (int64_t tile = 0; tile < tiled.tiles(); ++tile) {
    Scaling<R>* to = scalings.data() + tile * chunks;
    for (int64_t m = 0, top = tiled.top(tile); m < std::min<int64_t>(R, tiled.count - top); ++m) {
      const Chunk* from = tiled.rows.from(top + m).chunks;
      for (int64_t c = 0; c < chunks; ++c) {
        to[c].factor[m] = from[c].factor;
        to[c].sum[m] = from[c].sum;
        to[c].start[m] = from[c].start;
      }
    }
  }
  return scalings.data();
}

// Scales the sums of a chunk, of R rows and 16 columns, and adds them.
template <int R, bool kInPlace, bool kHasOffsets, typename S>
inline __attribute__((always_inline)) void add_chunk(const Dots& dots, const Scaling<R>& chunk, const S* scales,
                                                     Vec (&sums)[R]) {
  const Vec scale = load_value(scales), offset = kHasOffsets ? load_value(scales + kColumns) : Vec{};
#pragma GCC unroll 16
  for (int m = 0; m < R; ++m) {
    IntVec dot = load_ints(dots[m]);
    if (kInPlace) dot += all_ints(chunk.start[m]);
    sums[m] = fused(every(chunk.factor[m]), __builtin_convertvector(dot, Vec) * scale, sums[m]);
    if (kHasOffsets) sums[m] = fused(every(chunk.sum[m]), offset, sums[m]);
  }
}

// Multiplies rows by the blocks of columns from `block` to `stop`, in tiles of R rows. A block has at least two chunks.
template <bool kInPlace, int R, bool kHasOffsets, typename S>
void multiply_rows(const RowsOfTiles<R>& tiled, const Scaling<R>* scalings, TiledBlocks& blocks, int64_t block,
                   int64_t stop) {
  static_assert(kColumns == 2 * kLanes);
  const Layout& layout = blocks.layout;
  const PlacedChunk* places = place_chunks(layout, kInPlace);
  const int64_t to_right = kInPlace ? kHalf : layout.padded() * kColumns / 2;  // bytes from a code of the left half
  const int64_t chunks = layout.chunks(), stride = tiled.rows.stride, tiles = tiled.tiles();
  alignas(kLine) Dots dots[2];  // of a chunk and of the next
  alignas(kLine) float results[R][kColumns];
  // The next block's lines, and those of a tile's results, spread over the chunks that tiles multiply before.
  const int64_t bytes = layout.block_bytes(), steps = 2 * tiles * chunks;
  const int64_t lines = (bytes / kLine + steps - 1) / steps, ahead = bytes / steps;
  const int64_t rows_ahead = (R + chunks - 1) / chunks;
  int64_t now = 0;
  const auto multiply_next = [&](const int8_t* values, const uint8_t* codes, int64_t c) __attribute__((always_inline)) {
    const PlacedChunk& at = places[c];
    multiply_chunk<kInPlace>(values + at.values, stride, codes + at.codes, at.inputs, at.is_last);
  };
  TiledBlocks::Opened opened = blocks.open(block), next = opened;
  const int8_t* values = tiled.values(0);
  multiply_next(values, opened.codes, 0);
  Tiles::store<kSums>(dots[0], kHalf);
  multiply_next(values, opened.codes, 1);
  for (; block < stop; ++block, opened = next) {
    const char* far = reinterpret_cast<const char*>(blocks.weight + (block + 1) * bytes);
    for (int64_t pass = 0; pass < 2 * tiles; ++pass) {
      const int64_t tile = pass / 2, half = pass % 2;
      const Scaling<R>* scaling = scalings + tile * chunks;
      const uint8_t* scales = opened.scales + half * kLanes * sizeof(S);
      char* result = blocks.results + tiled.top(tile) * blocks.row_bytes + block * kColumns * blocks.column_bytes;
      Vec sums[R];
#pragma GCC unroll 16
      for (int m = 0; m < R; ++m) sums[m] = Vec{};
      // Adds chunk c, while tiles multiply chunk `ahead_of` of values and codes; null values: there is none.
      const auto add_next = [&](int64_t c, const int8_t* values, const uint8_t* codes,
                                int64_t ahead_of) __attribute__((always_inline)) {
        Tiles::store<kSums>(dots[1 - now], kHalf);
        if (values) multiply_next(values, codes, ahead_of);
        for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(far + i * kLine, 0, 2);
        far += ahead;
        for (int64_t i = half ? rows_ahead : 0; i < rows_ahead; ++i, result += blocks.row_bytes) {
          __builtin_prefetch(result, 1, 3);
          __builtin_prefetch(result + kLine, 1, 3);
        }
        add_chunk<R, kInPlace, kHasOffsets>(dots[now], scaling[c],
                                            reinterpret_cast<const S*>(scales + places[c].scales), sums);
        now = 1 - now;
      };
      const uint8_t* codes = opened.codes + half * to_right;
      int64_t c = 0;
      for (; c + 2 < chunks; ++c) add_next(c, values, codes, c + 2);
      // The first two chunks of the next pass.
      if (half == 0) {
        codes = opened.codes + to_right;
      } else if (tile + 1 < tiles) {
        values = tiled.values(tile + 1);
        codes = opened.codes;
      } else if (block + 1 < stop) {
        next = blocks.open(block + 1);
        values = tiled.values(0);
        codes = next.codes;
      } else {
        values = nullptr;
      }
      add_next(c, values, codes, 0);
      add_next(c + 1, values, codes, 1);
#pragma GCC unroll 16
      for (int m = 0; m < R; ++m) store(results[m] + half * kLanes, sums[m]);
      if (half) {
        const int64_t row = tile * R;
        blocks.finish(block, row, std::min(tiled.count, row + R), results + (row - tiled.top(tile)));
      }
    }
  }
}

// The blocks of a weight. Arguments are those of `multiply`; residual and y begin at the first row.
template <int kBits, typename O>
struct BlocksOfWeight : TiledBlocks {
  const O* residual;
  O* y;
  int64_t N;

  BlocksOfWeight(const Layout& layout, const uint8_t* weight, const O* residual, O* y, int64_t N)
      : TiledBlocks(layout, weight, y, sizeof(O), N * static_cast<int64_t>(sizeof(O))),
        residual(residual),
        y(y),
        N(N) {}

  Opened open(int64_t block) override {
    const uint8_t* from = weight + block * layout.block_bytes();
    if constexpr (kBits == 8) return {from, from};
    static thread_local std::vector<uint8_t> codes;
    static thread_local std::vector<uint16_t> supers_of_two[2];
    std::vector<uint16_t>& supers = supers_of_two[block % 2];
    codes.resize(layout.padded() * kColumns + kLine);
    if (layout.of_super) supers.resize(layout.num_groups * layout.super_value_bytes() / 2);
    uint8_t* to = align_to_line(codes.data());
    place_block<kBits>(layout, from, to, supers.data());
    return {to, layout.of_super ? reinterpret_cast<const uint8_t*>(supers.data()) : from};
  }
  void finish(int64_t block, int64_t row, int64_t stop, float (*sums)[kColumns]) override {
    const int64_t left = block * kColumns, columns = std::min<int64_t>(kColumns, N - left);
    for (int64_t m = row; m < stop; ++m) {
      const int64_t at = m * N + left;
      sluice::finish<O>(sums[m - row], columns, nullptr, residual ? residual + at : nullptr, y + at);
    }
  }
};

// Multiplies `count` rows by the blocks of columns from `block` to `stop`. Other arguments are those of `multiply`.
template <int kBits, typename S, typename O>
void multiply_by_tiles(const Rows<Vnni>& rows, int64_t count, const Layout& layout, const uint8_t* weight,
                       int64_t block, int64_t stop, const O* residual, O* y, int64_t N, int64_t call, int64_t begin) {
  BlocksOfWeight<kBits, O> blocks(layout, weight, residual, y, N);
  const auto multiply = [&](auto size) {
    constexpr int R = size;
    const RowsOfTiles<R> tiled{rows, count};
    const Scaling<R>* scalings = lay_out_scalings(tiled, call, begin);
    const amx::Configured tiles_in_use(shape_tiles(layout, R));
    constexpr bool kInPlace = kBits == 8;
    const auto way =
        layout.value_rows == 2 ? multiply_rows<kInPlace, R, true, S> : multiply_rows<kInPlace, R, false, S>;
    way(tiled, scalings, blocks, block, stop);
  };
  const int64_t tiles = (count + amx::kRows - 1) / amx::kRows;
  if ((count + tiles - 1) / tiles > 12) {
    multiply(std::integral_constant<int, 16>());
  } else {
    multiply(std::integral_constant<int, 12>());
  }
}

// Whether tiles multiply a chunk as plain integers do: a check of this processor, or of its
// emulation.
[[maybe_unused]] static bool tiles_are_exact() {
  constexpr int64_t kInputs = 76, kCount = 11;
  Layout layout(kInputs, 1, 8, false, false, false);
  int8_t values[kCount][kInputs];
  uint8_t codes[kInputs / 4 * kColumns * 4];
  for (int64_t m = 0; m < kCount; ++m)
    for (int64_t k = 0; k < kInputs; ++k) values[m][k] = static_cast<int8_t>((m * 89 + k * 57) % 255 - 127);
  for (int64_t i = 0; i < kInputs * kColumns; ++i) codes[i] = static_cast<uint8_t>((i * 101 + i / 128 * 31) % 256);
  const amx::Configured tiles_in_use(shape_tiles(layout, kCount));
  // is_signed: as signed bytes of 16 columns; or as unsigned ones, the left half of 32 columns.
  const auto is_exact = [&](bool is_signed) {
    Dots dots;
    Tiles::store<kSums>(dots, kHalf);
    for (int64_t m = 0; m < kCount; ++m) {
      for (int64_t n = 0; n < kColumns / 2; ++n) {
        int32_t sum = 0;
        for (int64_t k = 0; k < kInputs; ++k) {
          const uint8_t code = codes[k / 4 * (is_signed ? kHalf : 2 * kHalf) + n * 4 + k % 4];
          sum += values[m][k] * (is_signed ? static_cast<int8_t>(code) : code);
        }
        if (dots[m][n] != sum) return false;
      }
    }
    return true;
  };
  multiply_chunk<true>(values[0], kInputs, codes, kInputs, true);
  if (!is_exact(false)) return false;
  multiply_chunk<false>(values[0], kInputs, codes, kInputs, true);
  return is_exact(true);
}

// Whether tiles are faster than VNNI for so many rows, as measured (docs/decisions/packed-matmul.md, 2026-11-28). To
// scale the sums of a chunk takes as long as to multiply it, so chunks of few inputs need more rows or do not pay.
// Tiles are two chunks ahead, so a block needs as many.
inline bool pays_by_tiles(const Layout& layout, int64_t rows) {
  return layout.chunk >= 32 && layout.chunks() > 1 && rows >= (layout.chunk < 64 ? 16 : 12);
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
