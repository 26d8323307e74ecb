// The products of cpu.cc on AMX tiles, which multiply 16 rows by 16 columns of bfloat16 and sum in f32.
//
// An f32 number is exactly the sum of three bfloat16 parts: 24 bits are 8 + 8 + 8. The kernel sums the six of the nine
// products of parts that are significant in f32, smaller ones first (arXiv:1904.06376). The result is more exact than a
// sum of f32 multiply-adds. It takes six times the multiplications, on a unit that is sixteen times as fast. bfloat16
// and int8 need one part. The matrix keeps its packed layout: the kernel converts a cache-sized piece of two blocks
// while the tiles multiply by the previous piece.
#pragma once

#include "pallas_kernels/native.h"
#include "pallas_kernels/packed_matmul/blocks.h"
#include "pallas_kernels/packed_matmul/tiles.h"

#if SLUICE_AMX
#include <vector>

namespace sluice {
namespace amx {

constexpr int kSumColumns = 64;           // of the sums of 16 rows, in four tiles: two blocks of a packed matrix
constexpr int kDepth = 32;                // terms of a row or column in a tile
constexpr int64_t kTile = kRows * kDepth, kSums = kRows * kSumColumns;
constexpr int64_t kMade = 128;      // most terms of the columns that one conversion prepares
constexpr int64_t kNear = 3 << 10;  // prefetch distance in the matrix, in bytes

// Whether the kernel may use these tiles; checked once. Not `inline`: libraries that one process loads would share it.
[[maybe_unused]] static bool available() {
  static const bool is = permitted(kBfloat16);
  return is;
}

template <typename T>
constexpr int kParts = std::is_same_v<T, float> ? 3 : 1;

// The parts of 16 rows of D terms: kParts tiles for every 32 terms.
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

// Writes a row's parts into tiles of rows, with zeros beyond D; `to` is this row's line in the first tile.
template <int P>
void place_row(const float* row, int64_t D, uint16_t* to) {
  for (int64_t k = 0; k < deep(D) * kDepth; k += 16) {
    const int64_t left = std::clamp<int64_t>(D - k, 0, 16);
    const Parts parts = parts_of<P>(_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << left) - 1), row + k));
    uint16_t* at = to + k / kDepth * P * kTile + k % kDepth;
    for (int i = 0; i < P; ++i)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(at + i * kTile),
                          _mm512_cvtepi32_epi16(_mm512_srli_epi32(parts.bits[i], 16)));
  }
}

// Converts columns for tiles: the parts of two terms of two blocks at a time, interleaved as tiles need them.
template <typename W>
struct Making {
  const W* blocks[2];  // each at its first term
  int64_t D, first;    // terms of a block, and the first one to convert
  int64_t pairs;       // number of pairs of terms
  uint16_t* to;        // tiles: for every 32 terms four of columns, kParts each
  int64_t done = 0;

  inline __attribute__((always_inline)) void step() {
    constexpr int P = kParts<W>;
    uint16_t* line = to + done / 16 * 4 * P * kTile + done % 16 * kDepth;
    const int64_t k = first + 2 * done;
    for (int block = 0; block < 2; ++block) {
      const W* from = blocks[block] + k * 32;
      for (int64_t i = 0; i < 64 * static_cast<int64_t>(sizeof(W)); i += kLine)
        __builtin_prefetch(reinterpret_cast<const char*>(from) + kNear + i, 0, 1);
      for (int half = 0; half < 2; ++half) {
        const Parts even = parts_of<P>((__m512)(k < D ? load(from + half * 16) : Vec{}));
        const Parts odd = parts_of<P>((__m512)(k + 1 < D ? load(from + 32 + half * 16) : Vec{}));
        for (int i = 0; i < P; ++i)
          _mm512_storeu_si512(line + ((block * 2 + half) * P + i) * kTile,
                              _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even.bits[i], 16), odd.bits[i]));
      }
    }
    ++done;
  }
  inline __attribute__((always_inline)) void until(int64_t count) {
    for (count = std::min(count, pairs); done < count;) step();
  }
};

// Whole tiles.
inline Shapes shape_all() {
  Shapes shapes;
  for (int tile = 0; tile < kTileNames; ++tile) shapes.set(tile, kRows, kRowBytes);
  return shapes;
}

// Adds 16 rows times 64 columns, over `depth` times 32 terms, to sums [4][16][16], or sets the sums on the first call.
// Meanwhile converts `share` pairs of the next columns for every 32 terms.
template <int X, typename W>
void multiply(const uint16_t* rows, const uint16_t* columns, int64_t depth, float* sums, bool first, Making<W>& making,
              int64_t share) {
  constexpr int P = kParts<W>;
  if (first) {
    Tiles::zero<0>();
    Tiles::zero<1>();
    Tiles::zero<2>();
    Tiles::zero<3>();
  } else {
    Tiles::load<0>(sums, 64);
    Tiles::load<1>(sums + 256, 64);
    Tiles::load<2>(sums + 512, 64);
    Tiles::load<3>(sums + 768, 64);
  }
  for (int64_t k = 0; k < depth; ++k, rows += X * kTile, columns += 4 * P * kTile) {
    const int64_t made = making.done;
    Tiles::load<4>(rows, 64);
    if constexpr (X == 3) {
      Tiles::load<5>(rows + kTile, 64);
      Tiles::load<6>(rows + 2 * kTile, 64);
    }
    // Adds to one tile of sums; tiles 4, 5 and 6 hold the parts of the rows, the largest part first.
    const auto add_columns = [&](auto number) __attribute__((always_inline)) {
      constexpr int J = number;
      if constexpr (P == 3) {
        Tiles::load<7>(columns + (J * P + 2) * kTile, 64);
        Tiles::add_bfloat16<J, 4, 7>();
        Tiles::load<7>(columns + (J * P + 1) * kTile, 64);
        Tiles::add_bfloat16<J, 5, 7>();
        Tiles::add_bfloat16<J, 4, 7>();
      }
      Tiles::load<7>(columns + J * P * kTile, 64);
      if constexpr (X == 3) {
        Tiles::add_bfloat16<J, 6, 7>();
        Tiles::add_bfloat16<J, 5, 7>();
      }
      Tiles::add_bfloat16<J, 4, 7>();
      making.until(made + share * (J + 1) / 4);
    };
    add_columns(std::integral_constant<int, 0>());
    add_columns(std::integral_constant<int, 1>());
    add_columns(std::integral_constant<int, 2>());
    add_columns(std::integral_constant<int, 3>());
  }
  Tiles::store<0>(sums, 64);
  Tiles::store<1>(sums + 256, 64);
  Tiles::store<2>(sums + 512, 64);
  Tiles::store<3>(sums + 768, 64);
}

// Multiplies rows, stored as tiles of kParts X each, by `count` adjacent blocks of 32 columns. Calls finish(block,
// tile, sums [4][16][16]) for every two blocks and 16 rows; for a last single block the second block's sums are
// arbitrary.
template <int X, typename W, typename Finish>
void multiply_blocks(const uint16_t* rows, int64_t tiles, int64_t D, const W* w, int64_t count, const Finish& finish) {
  constexpr int P = kParts<W>;
  constexpr int64_t kRoom = kMade / kDepth * 4 * P * kTile;
  static thread_local std::vector<uint16_t> columns;
  static thread_local std::vector<float> sums;
  columns.resize(2 * kRoom + kLine / sizeof(uint16_t));
  sums.resize(tiles * kSums + kLine / sizeof(float));
  uint16_t *ready = align_to_line(columns.data()), *next = ready + kRoom;
  float* all_sums = align_to_line(sums.data());
  const int64_t terms = deep(D) * kDepth, share = (16 + tiles - 1) / tiles;
  // Few rows: a piece that fits a first-level cache. Many rows: a larger one, so that sums move less often.
  const int64_t made = P == 3 && tiles <= 4 ? kDepth : kMade;
  const auto making = [&](int64_t block, int64_t first, uint16_t* to) {
    const W* from = w + block * D * 32;
    const int64_t pairs = block < count ? std::min(made, terms - first) / 2 : 0;
    return Making<W>{{from, block + 1 < count ? from + D * 32 : from}, D, first, pairs, to};
  };
  Making<W> start = making(0, 0, ready);
  start.until(start.pairs);
  const Configured tiles_in_use(shape_all());
  for (int64_t block = 0; block < count; block += 2) {
    for (int64_t k = 0; k < terms; k += made) {
      const bool last = k + made >= terms;
      Making<W> more = making(last ? block + 2 : block, last ? 0 : k + made, next);
      const int64_t depth = std::min(made, terms - k) / kDepth;
      for (int64_t tile = 0; tile < tiles; ++tile)
        multiply<X, W>(rows + (tile * deep(D) + k / kDepth) * X * kTile, ready, depth, all_sums + tile * kSums, k == 0,
                       more, share);
      more.until(more.pairs);
      std::swap(ready, next);
    }
    for (int64_t tile = 0; tile < tiles; ++tile) finish(block, tile, all_sums + tile * kSums);
  }
}

}  // namespace amx
}  // namespace sluice
#endif
