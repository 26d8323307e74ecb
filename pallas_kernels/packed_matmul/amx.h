// The products of cpu.cc on AMX tiles, which multiply 16 rows by 16 columns of bfloat16 and sum in f32.
//
// An f32 number is exactly the sum of three bfloat16 parts: 24 bits are 8 + 8 + 8. The kernel sums the six of the nine
// products of parts that are significant in f32, the largest last (arXiv:1904.06376). The result is more exact than a
// sum of f32 multiply-adds. It takes six times the multiplications, on a unit that is sixteen times as fast. bfloat16
// and int8 need one part. The matrix keeps its packed layout: the kernel converts a cache-sized piece of a block while
// the tiles multiply by the previous piece. They multiply a pair of tiles of rows by both halves of the block, so that
// four sums, of which none waits for another, share four tiles of operands.
#pragma once

#include "pallas_kernels/native.h"
#include "pallas_kernels/packed_matmul/blocks.h"
#include "pallas_kernels/packed_matmul/tiles.h"

#if SLUICE_AMX
#include <vector>

namespace sluice {
namespace amx {

constexpr int kDepth = 32;  // terms of a row or column in a tile
constexpr int64_t kTile = kRows * kDepth;
constexpr int64_t kSums = 4 * kRows * kRows;  // of a pair of tiles of rows and a block: [2, 2 halves, 16, 16]
constexpr int64_t kMade = 128;                // most terms of the columns that one conversion prepares
constexpr int64_t kNear = 3 << 10;            // prefetch distance in the matrix, in bytes

// Whether the kernel may use these tiles; checked once. Not `inline`: libraries that one process loads would share it.
[[maybe_unused]] static bool available() {
  static const bool is = permitted(kBfloat16);
  return is;
}

template <typename T>
constexpr int kParts = std::is_same_v<T, float> ? 3 : 1;

// The tiles that D terms need.
inline int64_t deep(int64_t D) { return (D + kDepth - 1) / kDepth; }

struct Parts {
  __m512i bits[3];  // in the upper halves; a single part's lower halves are not zero
};

template <int P>
inline __attribute__((always_inline)) Parts parts_of(__m512 v) {
  if constexpr (P == 1) return {{_mm512_castps_si512(v)}};
  const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const __m512i high = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(v), half), upper);
  const __m512 rest = _mm512_sub_ps(v, _mm512_castsi512_ps(high));
  const __m512i middle = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(rest), half), upper);
  return {{high, middle, _mm512_castps_si512(_mm512_sub_ps(rest, _mm512_castsi512_ps(middle)))}};
}

// Writes a row's parts into a pair of tiles for each part and 32 terms, with zeros beyond D. to: this row's line in its
// first tile.
template <int P>
void place_row(const float* row, int64_t D, uint16_t* to) {
  for (int64_t k = 0; k < deep(D) * kDepth; k += 16) {
    const int64_t left = std::clamp<int64_t>(D - k, 0, 16);
    const Parts parts = parts_of<P>(_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << left) - 1), row + k));
    uint16_t* at = to + k / kDepth * P * 2 * kTile + k % kDepth;
    for (int i = 0; i < P; ++i)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(at + i * 2 * kTile),
                          _mm512_cvtepi32_epi16(_mm512_srli_epi32(parts.bits[i], 16)));
  }
}

// Converts a block's columns for tiles: the parts of two terms at a time, interleaved as tiles need them.
template <typename W>
struct Making {
  const W* from;  // the first term to convert
  int64_t left;   // terms of the block from there on
  int64_t pairs;  // number of pairs of terms to convert
  uint16_t* to;   // tiles: for every 32 terms, two of columns for each part
  int64_t done = 0;

  inline __attribute__((always_inline)) void step() {
    constexpr int P = kParts<W>;
    uint16_t* line = to + done / 16 * P * 2 * kTile + done % 16 * kDepth;
    const int64_t k = 2 * done;
    const W* at = from + k * kColumns;
    for (int64_t i = 0; i < 2 * kColumns * static_cast<int64_t>(sizeof(W)); i += kLine)
      __builtin_prefetch(reinterpret_cast<const char*>(at) + kNear + i, 0, 2);
    for (int half = 0; half < 2; ++half) {
      const Parts even = parts_of<P>((__m512)(k < left ? load(at + half * 16) : Vec{}));
      const Parts odd = parts_of<P>((__m512)(k + 1 < left ? load(at + kColumns + half * 16) : Vec{}));
      for (int i = 0; i < P; ++i)
        _mm512_storeu_si512(line + (i * 2 + half) * kTile,
                            _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even.bits[i], 16), odd.bits[i]));
    }
    ++done;
  }
  inline __attribute__((always_inline)) void until(int64_t count) {
    for (count = std::min(count, pairs); done < count;) step();
  }
};

// Tiles of `rows` rows: 0 to 3 for sums, 4 and 5 for rows. 6 and 7 are for halves of columns.
inline Shapes shape_all(int64_t rows) {
  Shapes shapes;
  for (int tile = 0; tile < kTileNames; ++tile) shapes.set(tile, tile < 6 ? rows : kRows, kRowBytes);
  return shapes;
}

// Adds a pair of tiles of rows times a block of columns, over `depth` times 32 terms, to the sums in tiles. Meanwhile
// converts `share` pairs of the next columns for every 32 terms.
template <int X, typename W>
void multiply(const uint16_t* rows, const uint16_t* columns, int64_t depth, Making<W>& making, int64_t share) {
  constexpr int P = kParts<W>, kProducts = X == 3 && P == 3 ? 6 : X * P;
  for (int64_t k = 0; k < depth; ++k, rows += X * 2 * kTile, columns += P * 2 * kTile) {
    const int64_t made = making.done;
    int added = 0;
    const auto load_rows = [&](int part) __attribute__((always_inline)) {
      Tiles::load<4>(rows + part * 2 * kTile, 64);
      Tiles::load<5>(rows + (part * 2 + 1) * kTile, 64);
    };
    const auto load_columns = [&](int part) __attribute__((always_inline)) {
      Tiles::load<6>(columns + part * 2 * kTile, 64);
      Tiles::load<7>(columns + (part * 2 + 1) * kTile, 64);
    };
    const auto add_part = [&]() __attribute__((always_inline)) {
      Tiles::add_bfloat16<0, 4, 6>();
      Tiles::add_bfloat16<1, 4, 7>();
      Tiles::add_bfloat16<2, 5, 6>();
      Tiles::add_bfloat16<3, 5, 7>();
      ++added;
      making.until(made + share * added / kProducts);
    };
    // Part 0 is the largest. Weights of bfloat16 give the sums of the same weights in f32, whose other parts are zeros.
    load_rows(X == 3 && P == 1 ? 1 : 0);
    load_columns(P - 1);
    add_part();
    if constexpr (P == 3) {
      load_columns(1);
      add_part();
      if constexpr (X == 3) {
        load_rows(1);
        add_part();
      }
      load_columns(0);
      add_part();
    }
    if constexpr (X == 3) {
      load_rows(2);
      add_part();
      load_rows(0);
      add_part();
    }
  }
}

// Multiplies rows, stored as pairs of tiles with `tile_rows` rows in use, of X parts, by `count` adjacent blocks of
// columns. Calls finish(block, pair, sums [2, 2, 16, 16]) for every block and pair.
template <int X, typename W, typename Finish>
void multiply_blocks(const uint16_t* rows, int64_t tile_rows, int64_t row_pairs, int64_t D, const W* w, int64_t count,
                     const Finish& finish) {
  constexpr int64_t kRoom = kMade / kDepth * kParts<W> * 2 * kTile;
  static thread_local std::vector<uint16_t> columns;
  static thread_local std::vector<float> sums;
  columns.resize(2 * kRoom + kLine / sizeof(uint16_t));
  sums.resize(row_pairs * kSums + kLine / sizeof(float));
  uint16_t *ready = align_to_line(columns.data()), *next = ready + kRoom;
  float* all_sums = align_to_line(sums.data());
  const int64_t terms = deep(D) * kDepth, share = (kDepth / 2 + row_pairs - 1) / row_pairs;
  const auto making = [&](int64_t block, int64_t first, uint16_t* to) {
    const int64_t pairs = block < count ? std::min(kMade, terms - first) / 2 : 0;
    return Making<W>{w + (block * D + first) * kColumns, D - first, pairs, to};
  };
  Making<W> start = making(0, 0, ready);
  start.until(start.pairs);
  const Configured tiles_in_use(shape_all(tile_rows));
  for (int64_t block = 0; block < count; ++block) {
    for (int64_t k = 0; k < terms; k += kMade) {
      const bool last = k + kMade >= terms;
      Making<W> more = making(last ? block + 1 : block, last ? 0 : k + kMade, next);
      const int64_t depth = std::min(kMade, terms - k) / kDepth;
      for (int64_t pair = 0; pair < row_pairs; ++pair) {
        float* to = all_sums + pair * kSums;
        if (k == 0) {
          Tiles::zero<0>();
          Tiles::zero<1>();
          Tiles::zero<2>();
          Tiles::zero<3>();
        } else if (row_pairs > 1) {  // the sums of a single pair stay in the tiles
          Tiles::load<0>(to, 64);
          Tiles::load<1>(to + kSums / 4, 64);
          Tiles::load<2>(to + kSums / 2, 64);
          Tiles::load<3>(to + kSums / 4 * 3, 64);
        }
        multiply<X, W>(rows + (pair * deep(D) + k / kDepth) * X * 2 * kTile, ready, depth, more, share);
        if (row_pairs > 1 || last) {
          Tiles::store<0>(to, 64);
          Tiles::store<1>(to + kSums / 4, 64);
          Tiles::store<2>(to + kSums / 2, 64);
          Tiles::store<3>(to + kSums / 4 * 3, 64);
        }
      }
      more.until(more.pairs);
      std::swap(ready, next);
    }
    for (int64_t pair = 0; pair < row_pairs; ++pair) finish(block, pair, all_sums + pair * kSums);
  }
}

}  // namespace amx
}  // namespace sluice
#endif
