// Products of rows with weights of 4, 6 or 8 bits that have a scale for each group of inputs. README.md has the arithmetic.
//
// A row becomes signed 8-bit integers, with a factor for each chunk of at most 128 inputs. Integers multiply integers
// and the sums of a chunk are exact, so every instruction set gives the same ones. Sums of chunks are f32, in a fixed
// order whatever the number of rows.
//
// A weight is one stream of bytes for each block of 32 columns: for every group its codes, its scales and its offsets.
// Codes lie as [inputs / 4, 32, 4] bytes, or for 4 bits as [inputs / 8, 32, 4], where the low halves are four inputs and
// the high halves the next four. For 6 bits they lie as [inputs / 16, 3, 32, 4]: twice the low four bits in this way, and
// then the high two of all sixteen inputs, those of the first four in the lowest bits of a byte.
//
// With superblocks, scales and offsets are products of numbers of GGUF's K types, which lie before the codes of 256 inputs:
// a float16 of each column, another for its offsets if any, and the file's bytes of small factors, [3 or 4, 32, 4].
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "pallas_kernels/native.h"
#include "pallas_kernels/packed_matmul/blocks.h"
#include "pallas_kernels/packed_matmul/tiles.h"
#include "pallas_kernels/rows.h"

namespace sluice {
namespace groups {

constexpr int64_t kLargestChunk = 128;  // inputs
constexpr int64_t kSuper = 256;         // inputs of a superblock

// Inputs of a step, whose codes lie together.
constexpr int64_t step_inputs(int bits) { return bits == 4 ? 8 : bits == 6 ? 16 : 4; }

// A weight's block of columns, and how a row's inputs are cut into chunks, each of one group. Zeros pad a single group to
// whole bytes.
struct Layout {
  int64_t inputs, num_groups, group;
  int64_t num_chunks, chunk;  // of a group; its last chunk may be smaller
  int64_t code_bytes, value_bytes, value_rows;  // of a group; value_rows: scales, or scales and offsets
  int64_t of_super = 0;                         // groups of a superblock, or 0
  float zero;                                   // the code of weight 0 that a superblock's offsets are for

  Layout(int64_t D, int64_t num_groups, int bits, bool halves, bool has_offsets, bool supers)
      : inputs(D), num_groups(num_groups), zero(bits == 4 ? 8 : 16) {
    const int64_t whole = step_inputs(bits), even = std::max<int64_t>(8, whole);
    group = (D / num_groups + whole - 1) / whole * whole;
    num_chunks = (group + kLargestChunk - 1) / kLargestChunk;
    chunk = ((group + num_chunks - 1) / num_chunks + even - 1) / even * even;
    code_bytes = group * kColumns * bits / 8;
    value_bytes = kColumns * (halves ? 2 : 4);
    value_rows = has_offsets ? 2 : 1;
    if (supers) of_super = kSuper / group;
  }
  int64_t padded() const { return num_groups * group; }
  int64_t chunks() const { return num_groups * num_chunks; }
  // Bytes of scales and offsets behind a group's codes, and of a superblock's before them.
  int64_t behind_bytes() const { return of_super ? 0 : value_rows * value_bytes; }
  int64_t words() const { return value_rows == 2 ? 3 : 4; }  // of a column's factors, four bytes each
  int64_t super_value_bytes() const { return value_rows * kColumns * 2; }  // of a group's scales and offsets, multiplied
  int64_t super_bytes() const { return of_super ? kColumns * (value_rows * 2 + words() * 4) : 0; }
  int64_t block_bytes() const {
    return num_groups * (code_bytes + behind_bytes()) + (of_super ? num_groups / of_super * super_bytes() : 0);
  }
  bool begins_super(int64_t g) const { return of_super && g % of_super == 0; }
  // The same with codes of 8 bits, and without superblocks.
  Layout widened() const {
    Layout wide = *this;
    wide.code_bytes = group * kColumns;
    wide.of_super = 0;
    return wide;
  }
};

// A chunk of a row: the row's numbers are about factor * values.
struct Chunk {
  float factor;
  float sum;      // of factor * values
  int32_t start;  // minus the sum of the values, times the code of weight 0: where the sum of products begins
};

// The f16 of IEEE 754 as f32, exactly; processors before x86-64-v3 have no instruction for it.
inline float wide(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = half & 0x7fff;
  uint32_t bits = (rest << 13) + (112u << 23);
  if (rest >= 0x7c00) bits += 112u << 23;
  float x;
  if (rest < 0x400) {
    x = static_cast<float>(rest) * 5.9604644775390625e-8f;  // 2^-24
    std::memcpy(&bits, &x, sizeof x);
  }
  bits |= sign;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline Vec load_value(const float* from) { return load(from); }
inline Vec load_value(const uint16_t* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = wide(from[i]);
  return v;
#endif
}

// The nearest f16 of IEEE 754, ties to even.
inline uint16_t narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000;
  uint32_t rest = bits & 0x7fffffff;
  if (rest < 0x38800000) {  // below 2^-14: a multiple of 2^-24, the last place of 0.5
    std::memcpy(&x, &rest, sizeof x);
    x += 0.5f;
    std::memcpy(&rest, &x, sizeof rest);
    return static_cast<uint16_t>(sign | (rest - 0x3f000000));
  }
  rest += 0xfff + (rest >> 13 & 1) - (112u << 23);
  return static_cast<uint16_t>(sign | std::min<uint32_t>(rest >> 13, 0x7c00));
}
inline void store_value(Vec v, uint16_t* to) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; ++i) to[i] = narrow(v[i]);
#endif
}

// a * b + c. By intrinsics with one rounding, whatever the compiler makes of a product and a sum.
inline float fused(float a, float b, float c) {
#if defined(__FMA__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
inline Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && defined(__AVX2__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline IntVec load_ints(const void* from) {
  IntVec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline IntVec all_ints(int32_t x) { return IntVec{} + x; }
inline Vec every(float x) { return x - Vec{}; }  // like `all`, without an addition: x - 0 is x, but -0 + 0 is not -0

// Writes the scales and offsets of a superblock's group g, [1 or 2, 32] of float16, as other layouts have them. Every
// product is exact in f32, so each number is rounded as the loader rounds it. bytes: of the superblock.
inline __attribute__((always_inline)) void expand_group(const Layout& layout, const uint8_t* bytes, int64_t g,
                                                        uint16_t* to) {
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(bytes);
  const uint8_t* words = bytes + layout.value_rows * kColumns * 2;
  const int at = static_cast<int>(g % 4) * 8;
#pragma GCC unroll 8
  for (int j = 0; j < kColumns; j += kLanes) {
    const auto word_at = [=](int64_t i) { return load_ints(words + (i * kColumns + j) * 4); };
    const Vec step = load_value(halves + j);
    if (layout.value_rows == 1) {  // 16 signed bytes
      const IntVec factor = (word_at(g / 4) << (24 - at)) >> 24;
      store_value(step * __builtin_convertvector(factor, Vec), to + j);
      continue;
    }
    IntVec factor = word_at(0), minimum = word_at(1);  // 6 bits each; those of the last four groups lie apart
    if (g < 4) {
      factor = factor >> at & 63;
      minimum = minimum >> at & 63;
    } else {
      const IntVec mixed = word_at(2);
      factor = (mixed >> at & 15) | (factor >> (at + 2) & 48);
      minimum = (mixed >> (at + 4) & 15) | (minimum >> (at + 2) & 48);
    }
    const Vec scale = step * __builtin_convertvector(factor, Vec), least = load_value(halves + kColumns + j);
    store_value(scale, to + j);
    store_value(every(layout.zero) * scale - least * __builtin_convertvector(minimum, Vec), to + kColumns + j);
  }
}

// A way to multiply: a row's integers in memory, and a step that adds, for each of kLanes columns, the products of four
// inputs. `codes` holds a byte for each of the four in every lane.
#if defined(__AVX512F__)
// Bytes in their order, for vpdpbusd: unsigned codes times signed values, summed in 32 bits without saturation.
struct Vnni {
  using Value = int8_t;
  static constexpr int kRows = 8, kVectors = 2, kTogether = 4;
  static bool available() {
    static const bool is = __builtin_cpu_supports("avx512vnni") != 0;
    return is;
  }
  static inline __attribute__((always_inline)) IntVec values_at(const Value* four) {
    int32_t bits;
    std::memcpy(&bits, four, sizeof bits);
    return all_ints(bits);
  }
  // By name, so that the rest of this library needs no more than x86-64-v4.
  static inline __attribute__((always_inline)) IntVec add(IntVec sums, IntVec codes, IntVec values) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(values));
    return sums;
  }
  static inline __attribute__((always_inline)) void place(IntVec values, Value* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)values));
  }
};
#endif

#if defined(__AVX512BW__) || defined(__AVX2__)
// Bytes in their order, for codes of 4 and 6 bits without VNNI: two products of at most 63 * 127 fit in 16 bits.
struct Halves {
  using Value = int8_t;
  static constexpr int kRows = kRegisters == 32 ? 6 : 4, kVectors = 2, kTogether = 1;
  static inline __attribute__((always_inline)) IntVec values_at(const Value* four) {
    int32_t bits;
    std::memcpy(&bits, four, sizeof bits);
    return all_ints(bits);
  }
  static inline __attribute__((always_inline)) IntVec add(IntVec sums, IntVec codes, IntVec values) {
#if defined(__AVX512BW__)
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, (__m512i)values);
    return sums + (IntVec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, (__m256i)values);
    return sums + (IntVec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
  }
  static inline __attribute__((always_inline)) void place(IntVec values, Value* to) {
#if defined(__AVX512BW__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)values));
#else
    for (int i = 0; i < kLanes; ++i) to[i] = static_cast<Value>(values[i]);
#endif
  }
};
#else
using Halves = struct Pairs;
#endif

// 16-bit integers, of four inputs the first, third, second and fourth: a pair of them times the even bytes of the codes
// and a pair times the odd ones.
struct Pairs {
  using Value = int16_t;
  static constexpr int kRows = kRegisters == 32 ? 6 : 4, kVectors = 2, kTogether = 1;
  static inline __attribute__((always_inline)) IntVec multiply(IntVec codes, const Value* pair) {
#if defined(__AVX512BW__) || defined(__AVX2__)
    int32_t bits;
    std::memcpy(&bits, pair, sizeof bits);
#if defined(__AVX512BW__)
    return (IntVec)_mm512_madd_epi16((__m512i)codes, (__m512i)all_ints(bits));
#else
    return (IntVec)_mm256_madd_epi16((__m256i)codes, (__m256i)all_ints(bits));
#endif
#else
    return (codes & 0xffff) * static_cast<int32_t>(pair[0]) + (codes >> 16) * static_cast<int32_t>(pair[1]);
#endif
  }
  static inline __attribute__((always_inline)) const Value* values_at(const Value* four) { return four; }
  static inline __attribute__((always_inline)) IntVec add(IntVec sums, IntVec codes, const Value* values) {
    const IntVec even = codes & 0x00ff00ff, odd = (codes >> 8) & 0x00ff00ff;
    return sums + multiply(even, values) + multiply(odd, values + 2);
  }
  static inline __attribute__((always_inline)) void place(IntVec values, Value* to) {
#if defined(__AVX512BW__)
    const __m512i order = _mm512_shuffle_epi32((__m512i)values, static_cast<_MM_PERM_ENUM>(_MM_SHUFFLE(3, 1, 2, 0)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(order));
#else
    for (int i = 0; i < kLanes; i += 4)
      for (int k = 0; k < 4; ++k) to[i + k] = static_cast<Value>(values[i + (k == 1 ? 2 : k == 2 ? 1 : k)]);
#endif
  }
};

// x * inverse, rounded to the nearest integer, ties to even; for magnitudes up to 127.
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23
constexpr int32_t kMagicBits = 0x4b400000;
constexpr int32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;
constexpr int32_t kSmallest = 0x0d800000;  // 2^-100: a chunk below it counts as 0, or its inverse would be infinite

// Quantizes `count` numbers of a chunk; `to` has space for `whole` values, and those beyond `count` become 0.
template <typename Way>
void quantize_chunk(const float* x, int64_t count, int64_t whole, int32_t zero, typename Way::Value* to, Chunk& chunk) {
  // Calls work(vector at k, k), with zeros beyond `count` in the last vector.
  const auto each_vector = [=](const auto& work) __attribute__((always_inline)) {
    int64_t k = 0;
    for (; k + kLanes <= count; k += kLanes) work(load(x + k), k);
    if (k < count) {
      float last[kLanes] = {};
      std::memcpy(last, x + k, static_cast<size_t>(count - k) * sizeof(float));
      work(load(last), k);
    }
  };
  IntVec most{};
  each_vector([&](Vec v, int64_t) {
    const IntVec bits = load_ints(&v) & kMagnitude;
    most = bits > most ? bits : most;
  });
  int32_t greatest = 0;
  for (int i = 0; i < kLanes; ++i) greatest = std::max(greatest, most[i]);
  if (greatest >= kInfinity || greatest < kSmallest) {
    std::memset(to, 0, static_cast<size_t>(whole) * sizeof *to);
    const float factor = greatest < kSmallest ? 0.0f : std::nanf("");  // NaN reaches all of the row's outputs
    chunk = {factor, factor, 0};
    return;
  }
  float magnitude;
  std::memcpy(&magnitude, &greatest, sizeof magnitude);
  const float inverse = 127.0f / magnitude;
  IntVec sums{};
  each_vector([&](Vec v, int64_t k) {
    const Vec shifted = fused(v, every(inverse), every(kMagic));
    const IntVec values = load_ints(&shifted) - kMagicBits;
    sums += values;
    if (k + kLanes <= whole) return Way::place(values, to + k);
    typename Way::Value last[kLanes];
    Way::place(values, last);
    std::memcpy(to + k, last, static_cast<size_t>(whole - k) * sizeof *to);
  });
  const int64_t done = (count + kLanes - 1) / kLanes * kLanes;
  if (done < whole) std::memset(to + done, 0, static_cast<size_t>(whole - done) * sizeof *to);
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += sums[i];
  chunk.factor = magnitude / 127.0f;
  chunk.sum = chunk.factor * static_cast<float>(sum);
  chunk.start = -zero * sum;
}

template <typename Way>
void quantize_row(const float* x, const Layout& layout, int32_t zero, typename Way::Value* to, Chunk* chunks) {
  for (int64_t g = 0; g < layout.num_groups; ++g) {
    for (int64_t c = 0; c < layout.num_chunks; ++c, ++chunks) {
      const int64_t begin = g * layout.group + c * layout.chunk, end = std::min(begin + layout.chunk, (g + 1) * layout.group);
      const int64_t count = std::clamp<int64_t>(layout.inputs - begin, 0, end - begin);
      quantize_chunk<Way>(x + begin, count, end - begin, zero, to + begin, *chunks);
    }
  }
}

// Tiles have up to 6 rows or an even number of them, and where several share a block at least 4, so few functions compile.
constexpr int kSmallTile = 6;
constexpr int least_tile(int most) { return most > 4 ? 4 : 2; }  // of several, and of at most `most` rows each
constexpr int smaller_tile(int size) { return size > kSmallTile ? size - 2 : size - 1; }

// How rows are shared among tiles of one size, at most `most`. The last tile may have fewer rows in use.
struct Tiling {
  int64_t rows, tiles = 1, of_tile;

  Tiling(int64_t rows, int most) : rows(rows), of_tile(rows > kSmallTile ? (rows + 1) / 2 * 2 : rows) {
    if (of_tile <= most) return;
    of_tile = most;
    for (int size = most; size >= least_tile(most); size = smaller_tile(size))
      if (cost_of(size) < cost_of(of_tile)) of_tile = size;
    tiles = tiles_of(of_tile);
  }
  int64_t tiles_of(int64_t size) const { return (rows + size - 1) / size; }
  // Every tile reads the whole block, which takes as long as three rows more: 16 rows become 8 and 8, not 12 and 4.
  int64_t cost_of(int64_t size) const { return tiles_of(size) * (size + 3); }
};

// Returns a number that no other call has.
inline int64_t number_call() {
  static std::atomic<int64_t> calls{0};
  return calls.fetch_add(1, std::memory_order_relaxed) + 1;
}

// Rows as a product reads them: values, and the chunks of a row.
template <typename Way>
struct Rows {
  const typename Way::Value* values;
  int64_t stride;  // from row to row
  const Chunk* chunks;
  int64_t num_chunks;

  Rows from(int64_t row) const { return {values + row * stride, stride, chunks + row * num_chunks, num_chunks}; }
};

// Rows as tiles read them, such that one address and constant distances reach a tile's rows: of each tile, values
// [inputs / 4, R, 4] and chunks [chunks, R]. R may be more than the rows in use; nobody uses the results of the others.
template <typename Way>
struct TileRows {
  const typename Way::Value* values;
  const Chunk* chunks;

  TileRows from(int64_t row, const Layout& layout) const {
    return {values + row * layout.padded(), chunks + row * layout.chunks()};
  }
};

// Lays out the rows of a call from `begin` on by tile, unless this thread did so last.
template <typename Way>
TileRows<Way> lay_out_rows(const Rows<Way>& rows, const Tiling& tiling, const Layout& layout, int64_t call,
                           int64_t begin) {
  if (tiling.of_tile == 1) return {rows.values, rows.chunks};
  using Value = typename Way::Value;
  static thread_local std::pair<int64_t, int64_t> laid_out;
  static thread_local std::vector<Value> all_values;
  static thread_local std::vector<Chunk> all_chunks;
  if (laid_out == std::pair(call, begin)) return {align_to_line(all_values.data()), all_chunks.data()};
  laid_out = {call, begin};
  all_values.resize(tiling.tiles * tiling.of_tile * layout.padded() + kLine);
  all_chunks.assign(tiling.tiles * tiling.of_tile * layout.chunks(), Chunk{});
  Value* values = align_to_line(all_values.data());
  for (int64_t m = 0; m < tiling.rows; ++m) {
    const int64_t size = tiling.of_tile, tile = m / size * size;
    const Rows<Way> row = rows.from(m);
    Value* to = values + tile * layout.padded() + (m - tile) * 4;
    for (int64_t k = 0; k < layout.padded(); k += 4, to += 4 * size) std::memcpy(to, row.values + k, 4 * sizeof(Value));
    Chunk* chunks = all_chunks.data() + tile * layout.chunks() + (m - tile);
    for (int64_t c = 0; c < layout.chunks(); ++c) chunks[c * size] = row.chunks[c];
  }
  return {values, all_chunks.data()};
}

// Returns the codes of inputs 4 * kPart to 4 * kPart + 3 of a step, a byte each in every lane.
template <int kBits, int kPart>
inline __attribute__((always_inline)) IntVec codes_at(const uint8_t* step) {
  constexpr int kLines = 4 * kColumns;  // bytes of a column's four codes, for all columns
  if constexpr (kBits == 8) return load_ints(step);
  const IntVec halves = load_ints(step + kPart / 2 * kLines);
  const IntVec low = (kPart % 2 ? halves >> 4 : halves) & 0x0f0f0f0f;
  if constexpr (kBits == 4) return low;
  const IntVec all = load_ints(step + 2 * kLines);
  const IntVec high = kPart == 0 ? all << 4 : kPart == 1 ? all << 2 : kPart == 2 ? all : all >> 2;
  return low | (high & 0x30303030);
}

// y[R, V vectors from column `first`] = rows times those columns of a block. S: of scales and offsets, float or the bits
// of a float16. supers: where superblocks' scales and offsets are or, with `expands`, where this tile writes them first.
// kSteps: of each group, which is one chunk; 0: the layout says it. kAlone: the tile prefetches its own stream, not the
// next block. kBlocks: that the tile multiplies side by side, adjacent in memory; the second block's result of the one
// row is y[1].
template <typename Way, int kBits, int R, int V, typename S, int kSteps, bool kAlone, int kBlocks = 1>
void multiply_tile(const TileRows<Way>& rows, const Layout& layout, const uint8_t* block, int64_t first,
                   float (*y)[kColumns], uint16_t* supers, bool expands, Ahead& state) {
  static_assert(kBlocks == 1 || (R == 1 && kAlone && V * kLanes == kColumns && sizeof(S) == 4));  // no superblocks
  Ahead ahead = state;
  constexpr int kVectors = kBlocks * V;
  const int64_t apart = layout.block_bytes();  // from block to block
  constexpr int64_t kStep = step_inputs(kBits), kBytes = kStep * kColumns * kBits / 8;
  // docs/decisions/packed-matmul.md, 2026-11-26 and 27. Of 8 bits, float scales are mostly those of whole outputs.
  constexpr bool kWhole = kBits == 8 && sizeof(S) == 4;
  constexpr int64_t kNear = 3 << 10, kFar = kWhole ? 0 : 8 << 10;
  constexpr int kLevel = kWhole ? 2 : 3;
  const auto prefetch = [&](const auto* own, int64_t bytes) __attribute__((always_inline)) {
    if (kAlone) {
#pragma GCC unroll 2
      for (int i = 0; i < kBlocks; ++i)
        prefetch_own<kNear, kLevel, kFar>(reinterpret_cast<const uint8_t*>(own) + i * apart, bytes);
    } else {
      ahead.prefetch_next(1);
    }
  };
  const auto* values = rows.values;
  Vec sums[R][kVectors];
#pragma GCC unroll 16
  for (int m = 0; m < R; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) sums[m][j] = Vec{};
  const Chunk* chunk = rows.chunks;
  const uint8_t *w = block + 4 * first, *super = nullptr;
  int64_t in_super = 0;  // the group's number in its superblock
  for (int64_t g = 0; g < layout.num_groups; ++g) {
    if (layout.of_super && in_super == 0) {
      super = w - 4 * first;
      prefetch(super, layout.super_bytes());
      w += layout.super_bytes();
    }
    uint16_t* own = supers + g * layout.value_rows * kColumns;
    if (layout.of_super && expands) expand_group(layout, super, in_super, own);
    if (++in_super == layout.of_super) in_super = 0;
    // Behind the group's codes, whose columns are 4 bytes each.
    const S* scales = reinterpret_cast<const S*>(w - 4 * first + layout.code_bytes) + first;
    if (layout.of_super) scales = reinterpret_cast<const S*>(own) + first;
    for (int64_t begin = 0; begin < (kSteps ? 1 : layout.group); begin += layout.chunk, chunk += R) {
      IntVec dots[R][kVectors];
#pragma GCC unroll 16
      for (int m = 0; m < R; ++m)
#pragma GCC unroll 8
        for (int j = 0; j < kVectors; ++j) dots[m][j] = all_ints(chunk[m].start);
      const int64_t steps = kSteps ? kSteps : std::min(layout.chunk, layout.group - begin) / kStep;
      const auto add_step = [&](int64_t k) __attribute__((always_inline)) {
        const auto add_part = [&](auto part) __attribute__((always_inline)) {
          IntVec codes[kVectors];
#pragma GCC unroll 8
          for (int j = 0; j < kVectors; ++j)
            codes[j] = codes_at<kBits, part>(w + j / V * apart + k * kBytes + j % V * 4 * kLanes);
#pragma GCC unroll 16
          for (int m = 0; m < R; ++m) {
            const auto four = Way::values_at(values + k * kStep * R + 4 * (part * R + m));
#pragma GCC unroll 8
            for (int j = 0; j < kVectors; ++j) dots[m][j] = Way::add(dots[m][j], codes[j], four);
          }
        };
        add_part(std::integral_constant<int, 0>());
        if constexpr (kBits != 8) add_part(std::integral_constant<int, 1>());
        if constexpr (kBits == 6) {
          add_part(std::integral_constant<int, 2>());
          add_part(std::integral_constant<int, 3>());
        }
      };
      // Steps between two looks at what to prefetch.
      constexpr int kTogether = kSteps == 1 ? 1 : kBits == 6 ? std::min(2, Way::kTogether) : Way::kTogether;
      int64_t k = 0;
      for (; kTogether > 1 && k + kTogether <= steps; k += kTogether) {
        if (!kAlone) ahead.prefetch_next(kTogether);
#pragma GCC unroll 4
        for (int i = 0; i < kTogether; ++i) {
          if (kAlone) prefetch(w + i * kBytes, kBytes);
          add_step(i);
        }
        w += kTogether * kBytes;
        values += kTogether * kStep * R;
      }
      if constexpr (kSteps % kTogether != 0 || kSteps == 0 || kTogether == 1) {
#pragma GCC unroll 4
        for (; k < steps; ++k, w += kBytes, values += kStep * R) {
          prefetch(w, kBytes);
          add_step(0);
        }
      }
      const auto add_dots = [&](auto has_offsets) __attribute__((always_inline)) {
        Vec scale[kVectors], offset[kVectors];
#pragma GCC unroll 8
        for (int j = 0; j < kVectors; ++j) {
          const S* own_scales = scales + j / V * apart / static_cast<int64_t>(sizeof(S)) + j % V * kLanes;
          scale[j] = load_value(own_scales);
          offset[j] = has_offsets ? load_value(own_scales + kColumns) : Vec{};
        }
#pragma GCC unroll 16
        for (int m = 0; m < R; ++m) {
          const Chunk& of_row = chunk[m];
#pragma GCC unroll 8
          for (int j = 0; j < kVectors; ++j) {
            const Vec dot = __builtin_convertvector(dots[m][j], Vec);
            sums[m][j] = fused(every(of_row.factor), dot * scale[j], sums[m][j]);
            if (has_offsets) sums[m][j] = fused(every(of_row.sum), offset[j], sums[m][j]);
          }
        }
      };
      if (layout.value_rows == 2) {
        add_dots(std::true_type());
      } else {
        add_dots(std::false_type());
      }
    }
    prefetch(scales, layout.behind_bytes());
    w += layout.behind_bytes();
  }
#pragma GCC unroll 16
  for (int m = 0; m < R; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) store(y[m + j / V] + j % V * kLanes, sums[m][j]);
  state = ahead;
}

// The same for a whole block of columns, in as many passes as needed, or for kBlocks blocks side by side. size: R of the
// tile.
template <typename Way, int kBits, typename S, int R = Way::kRows, int kBlocks = 1>
void multiply_tiles(int64_t size, const TileRows<Way>& rows, const Layout& layout, const uint8_t* block,
                    float (*y)[kColumns], uint16_t* supers, bool expands, Ahead& ahead) {
  if constexpr (R > 1) {
    if (size < R)
      return multiply_tiles<Way, kBits, S, smaller_tile(R)>(size, rows, layout, block, y, supers, expands, ahead);
  }
  constexpr int V = Way::kVectors, kPass = V * kLanes;
  const auto multiply_passes = [&](auto steps) __attribute__((always_inline)) {
    for (int j = 0; j < kColumns; j += kPass) {
      const auto multiply = [&](auto is_alone) __attribute__((always_inline)) {
        multiply_tile<Way, kBits, R, V, S, steps, is_alone, kBlocks>(
            rows, layout, block, j, reinterpret_cast<float(*)[kColumns]>(&y[0][j]), supers, expands && j == 0, ahead);
      };
      if (ahead.near) {
        multiply(std::true_type());
      } else if constexpr (R >= least_tile(Way::kRows) || kPass < kColumns) {
        multiply(std::false_type());
      }
      ahead.near = false;  // the first pass has brought the block into the cache
    }
  };
  if constexpr (sizeof(S) == 2) {  // the groups of int4 and of GGUF's types
    constexpr int64_t kStep = step_inputs(kBits);
    if (layout.group == 32) return multiply_passes(std::integral_constant<int, 32 / kStep>());
    if (kBits == 6 && layout.group == 16) return multiply_passes(std::integral_constant<int, kBits == 6 ? 1 : 0>());
  }
  multiply_passes(std::integral_constant<int, 0>());
}

// Calls take(fours, at, codes) for the codes of 4 or 6 bits of a group, as bytes: those of the fours-th four inputs, of the
// columns from byte `at` of their line on.
template <int kBits, typename Take>
inline __attribute__((always_inline)) void expand_codes(const Layout& layout, const uint8_t* from, const Take& take) {
  constexpr int64_t kLines = 4 * kColumns, kParts = step_inputs(kBits) / 4, kStepBytes = kLines * kParts * kBits / 8;
  for (int64_t k = 0, fours = 0; k < layout.code_bytes; k += kStepBytes, fours += kParts) {
    for (int64_t at = 0; at < kLines; at += 4 * kLanes) {
      const auto take_part = [&](auto part) __attribute__((always_inline)) {
        take(fours + part, at, codes_at<kBits, part>(from + k + at));
      };
      take_part(std::integral_constant<int, 0>());
      take_part(std::integral_constant<int, 1>());
      if constexpr (kBits == 6) {
        take_part(std::integral_constant<int, 2>());
        take_part(std::integral_constant<int, 3>());
      }
    }
  }
}

// Writes a block of codes of 4 or 6 bits as one of 8, with the same scales. wide: the layout of `to`, which has no
// superblocks.
template <int kBits>
void widen_block(const Layout& layout, const uint8_t* block, const Layout& wide, uint8_t* to) {
  const int64_t value_bytes = wide.behind_bytes();
  const uint8_t* super = nullptr;
  for (int64_t g = 0; g < layout.num_groups; ++g) {
    if (layout.begins_super(g)) {
      super = block;
      block += layout.super_bytes();
    }
    expand_codes<kBits>(layout, block, [=](int64_t fours, int64_t at, IntVec codes) __attribute__((always_inline)) {
      std::memcpy(to + fours * 4 * kColumns + at, &codes, sizeof codes);
    });
    block += layout.code_bytes;
    to += wide.code_bytes;
    if (layout.of_super) {
      expand_group(layout, super, g % layout.of_super, reinterpret_cast<uint16_t*>(to));
    } else {
      std::memcpy(to, block, static_cast<size_t>(value_bytes));
    }
    block += layout.behind_bytes();
    to += value_bytes;
  }
}

// Multiplies one row by two adjacent blocks of columns at once, so that a thread reads two streams, where scales are of
// whole outputs. `columns` of both blocks are in use.
template <typename Way, int kBits, typename S, typename O>
void multiply_pair(const TileRows<Way>& rows, const Layout& layout, const uint8_t* block, int64_t columns,
                   const O* residual, O* y) {
  Ahead ahead{true, nullptr, 0, 1};
  alignas(kLine) float result[2][kColumns];
  multiply_tiles<Way, kBits, S, 1, 2>(1, rows, layout, block, result, nullptr, false, ahead);
  finish<O>(result[0], columns, nullptr, residual, y);
}

// Multiplies rows by one block of columns, of which `columns` are in use. y, residual: of the first row, with N numbers
// from row to row. next, lines: the thread's next block, for several tiles to prefetch, and its cache lines.
template <typename Way, int kBits, typename S, typename O>
void multiply_block(const TileRows<Way>& rows, const Tiling& tiling, const Layout& layout, const uint8_t* block,
                    int64_t columns, const O* residual, O* y, int64_t N, const uint8_t* next, int64_t lines) {
  const int64_t passes = kColumns / (Way::kVectors * kLanes);
  if constexpr (kBits == 6) {
    if (tiling.tiles > 1) {  // each would take the codes apart again
      const Layout wide = layout.widened();
      static thread_local std::vector<uint8_t> codes;
      codes.resize(wide.block_bytes());
      widen_block<kBits>(layout, block, wide, codes.data());
      return multiply_block<Way, 8, S, O>(rows, tiling, wide, codes.data(), columns, residual, y, N, next, lines);
    }
  }
  static thread_local std::vector<uint16_t> supers;
  if (layout.of_super) supers.resize(layout.num_groups * layout.value_rows * kColumns);
  const int64_t supers_of_block = layout.of_super ? layout.num_groups / layout.of_super : 0;
  const int64_t terms =
      tiling.tiles * passes * (layout.padded() / step_inputs(kBits) + layout.num_groups + supers_of_block);
  Ahead ahead{tiling.tiles == 1, reinterpret_cast<const char*>(next), tiling.tiles == 1 ? 0 : lines, terms};
  alignas(kLine) float result[Way::kRows][kColumns];
  for (int64_t first = 0; first < tiling.rows; first += tiling.of_tile) {
    multiply_tiles<Way, kBits, S>(tiling.of_tile, rows.from(first, layout), layout, block, result, supers.data(),
                                  first == 0, ahead);
    for (int64_t i = 0; i < std::min(tiling.of_tile, tiling.rows - first); ++i) {
      const int64_t at = (first + i) * N;
      finish<O>(result[i], columns, nullptr, residual ? residual + at : nullptr, y + at);
    }
  }
}

#if SLUICE_AMX
// In group_tiles.h.
template <int kBits, typename S, typename O>
void multiply_by_tiles(const Rows<Vnni>& rows, int64_t count, const Layout& layout, const uint8_t* weight, int64_t block,
                       int64_t stop, const O* residual, O* y, int64_t N, int64_t call, int64_t begin);
#endif

// tiled: by AMX tiles, beside VNNI only.
template <typename Way, int kBits, typename X, typename S, typename O>
void multiply(ffi::ThreadPool& threads, const X* x, int64_t M, const Layout& layout, const X* norm, float epsilon, bool gated,
              const uint8_t* weight, const O* residual, int64_t blocks, O* y, int64_t N, bool tiled) {
  const int64_t D = layout.inputs;
  const bool worth_it = M * D * N > 500000;
  // An odd stride in cache lines: with a power of two, the rows of a tile would evict each other from the cache.
  constexpr int64_t kInLine = kLine / sizeof(typename Way::Value);
  const int64_t stride = (layout.padded() + kInLine - 1) / kInLine / 2 * 2 * kInLine + kInLine;
  static thread_local std::vector<typename Way::Value> all_values;
  static thread_local std::vector<Chunk> all_chunks;
  // With space to begin at a cache line, and for rows of a tile that are not in use.
  all_values.resize((M + (tiled ? kPiece : 0)) * stride + kInLine);
  all_chunks.resize(M * layout.chunks());
  typename Way::Value* values = align_to_line(all_values.data());
  Chunk* chunks = all_chunks.data();
  const auto prepare = [=](int64_t begin, int64_t end) {
    static thread_local std::vector<float> row;
    row.resize(D);
    const bool as_it_is = std::is_same_v<X, float> && norm == nullptr && !gated;
    for (int64_t m = begin; m < end; ++m) {
      if (!as_it_is) prepare_row(x, m, D, norm, epsilon, gated, row.data());
      quantize_row<Way>(as_it_is ? reinterpret_cast<const float*>(x) + m * D : row.data(), layout, 1 << (kBits - 1),
                        values + m * stride, chunks + m * layout.chunks());
    }
  };
  const int64_t call = number_call();
  const auto product = [=](int64_t block, int64_t stop, int64_t begin, int64_t count) {
    const auto rows = Rows<Way>{values, stride, chunks, layout.chunks()}.from(begin);
#if SLUICE_AMX
    if constexpr (std::is_same_v<Way, Vnni>) {
      if (tiled)
        return multiply_by_tiles<kBits, S, O>(rows, count, layout, weight, block, stop,
                                              residual ? residual + begin * N : nullptr, y + begin * N, N, call, begin);
    }
#endif
    const Tiling tiling(count, layout.chunk > 32 ? Way::kRows : std::min(Way::kRows, kSmallTile));
    const TileRows<Way> by_tile = lay_out_rows(rows, tiling, layout, call, begin);
    const int64_t bytes = layout.block_bytes();
    if constexpr (kBits == 8 && sizeof(S) == 4 && Way::kVectors * kLanes == kColumns) {
      for (; count == 1 && block + 2 <= stop; block += 2) {
        const int64_t at = begin * N + block * kColumns;
        multiply_pair<Way, kBits, S, O>(by_tile, layout, weight + block * bytes,
                                        std::min<int64_t>(2 * kColumns, N - block * kColumns),
                                        residual ? residual + at : nullptr, y + at);
      }
    }
    for (; block < stop; ++block) {
      const int64_t at = begin * N + block * kColumns;
      multiply_block<Way, kBits, S, O>(by_tile, tiling, layout, weight + block * bytes,
                                       std::min<int64_t>(kColumns, N - block * kColumns),
                                       residual ? residual + at : nullptr, y + at, N, weight + (block + 1) * bytes,
                                       bytes / kLine);
    }
  };
  spread_blocks(threads, M, blocks, tiled ? kPiece : Way::kRows, true, worth_it, prepare, product);
}

// Packs the codes of one step of a block: `count` inputs of `columns` columns, and zeros for the other inputs.
template <int kBits>
inline __attribute__((always_inline)) void pack_step(const uint8_t* from, int64_t down, int64_t across, int64_t count,
                                                     int64_t columns, uint8_t* to) {
  constexpr int64_t kStep = step_inputs(kBits), kLines = 4 * kColumns;
  for (int64_t j = 0; j < columns; ++j) {
    uint8_t codes[kStep] = {};
    for (int64_t i = 0; i < count; ++i) codes[i] = from[i * down + j * across];
    for (int64_t i = 0; i < 4; ++i) {
      uint8_t* at = to + 4 * j + i;
      if constexpr (kBits == 8) {
        *at = codes[i];
      } else if constexpr (kBits == 4) {
        *at = static_cast<uint8_t>(codes[i] | codes[i + 4] << 4);
      } else {
        const uint8_t own[] = {codes[i], codes[i + 4], codes[i + 8], codes[i + 12]};
        at[0] = static_cast<uint8_t>((own[0] & 15) | own[1] << 4);
        at[kLines] = static_cast<uint8_t>((own[2] & 15) | own[3] << 4);
        at[2 * kLines] = static_cast<uint8_t>(own[0] >> 4 | (own[1] & 48) >> 2 | (own[2] & 48) | (own[3] & 48) << 2);
      }
    }
  }
}

// Packs scales and offsets (or null) from number `first` on, each of `size` bytes; returns the bytes of all columns.
inline int64_t pack_values(const char* scales, const char* offsets, int64_t first, int64_t columns, int64_t size,
                           uint8_t* to) {
  int64_t done = 0;
  for (const char* values : {scales, offsets}) {
    if (values == nullptr) continue;
    std::memcpy(to + done, values + first * size, static_cast<size_t>(columns * size));
    done += kColumns * size;
  }
  return done;
}

// Packs GGUF's bytes of scales of `columns` superblocks; returns the bytes of all columns. from: those of the first column.
inline int64_t pack_super(const Layout& layout, const char* from, int64_t columns, uint8_t* to) {
  const int64_t half_bytes = 2 * layout.value_rows, word_bytes = 4 * layout.words();
  const int64_t halves_at = layout.value_rows == 2 ? 0 : word_bytes, words_at = layout.value_rows == 2 ? half_bytes : 0;
  for (int64_t j = 0; j < columns; ++j, from += half_bytes + word_bytes) {
    for (int64_t i = 0; i < layout.value_rows; ++i)
      std::memcpy(to + (i * kColumns + j) * 2, from + halves_at + i * 2, 2);
    for (int64_t i = 0; i < layout.words(); ++i)
      std::memcpy(to + half_bytes * kColumns + (i * kColumns + j) * 4, from + words_at + i * 4, 4);
  }
  return layout.super_bytes();
}

// Packs codes [D, N] of 8, 6 or 4 bits, with strides `down` along D and `across` along N, and scales and offsets (or null)
// [groups, N], or instead of them superblocks [D / 256, N]. Leaves the last block's columns beyond N alone.
template <int kBits>
void pack(const uint8_t* from, int64_t N, int64_t down, int64_t across, const char* scales, const char* offsets,
          const char* supers, const Layout& layout, uint8_t* to) {
  constexpr int64_t kStep = step_inputs(kBits);
  const int64_t size = layout.value_bytes / kColumns, steps = layout.group / kStep;
  const int64_t super_size = layout.super_bytes() / kColumns;
  for (int64_t n = 0; n < N; n += kColumns) {
    const int64_t columns = std::min<int64_t>(kColumns, N - n);
    for (int64_t g = 0; g < layout.num_groups; ++g) {
      if (layout.begins_super(g))
        to += pack_super(layout, supers + (g / layout.of_super * N + n) * super_size, columns, to);
      for (int64_t k = 0; k < steps; ++k, to += kStep * kColumns * kBits / 8) {
        const int64_t d = g * layout.group + k * kStep, count = std::min(kStep, layout.inputs - d);
        const uint8_t* at = from + d * down + n * across;
        if (count == kStep && columns == kColumns && across == 1) {  // known at compile time, for vectors
          pack_step<kBits>(at, down, 1, kStep, kColumns, to);
        } else if (count == kStep && down == 1) {
          pack_step<kBits>(at, 1, across, kStep, columns, to);
        } else {
          pack_step<kBits>(at, down, across, count, columns, to);
        }
      }
      if (!layout.of_super) to += pack_values(scales, offsets, g * N + n, columns, size, to);
    }
  }
}

// Returns a word of eight codes, the first in the lowest bits, as its bytes lie in a block: the first four in the low
// halves and the other four in the high ones.
inline uint32_t rearrange(uint32_t word) {
  const auto spread = [](uint32_t half) {
    half = (half | half << 8) & 0x00ff00ff;
    return (half | half << 4) & 0x0f0f0f0f;
  };
  return spread(word & 0xffff) | spread(word >> 16) << 4;
}

// The same from words of eight codes [D / 8, N]; groups are multiples of 8 inputs.
inline void pack_words(const uint32_t* from, int64_t N, int64_t down, int64_t across, const char* scales,
                       const char* offsets, const Layout& layout, uint8_t* to) {
  constexpr int64_t kMost = 16;  // steps at once: a cache line of each column
  const int64_t size = layout.value_bytes / kColumns, steps = layout.group / 8, all = layout.num_groups * steps;
  for (int64_t n = 0; n < N; n += kColumns) {
    const int64_t columns = std::min<int64_t>(kColumns, N - n);
    for (int64_t first = 0; first < all; first += kMost) {
      const int64_t some = std::min(kMost, all - first);
      uint32_t words[kMost][kColumns] = {};
      const uint32_t* at = from + first * down + n * across;
      if (across == 1) {
        for (int64_t k = 0; k < some; ++k) std::copy_n(at + k * down, columns, words[k]);
      } else {
        for (int64_t j = 0; j < columns; ++j)
          for (int64_t k = 0; k < some; ++k) words[k][j] = at[k * down + j * across];
      }
      for (int64_t k = 0; k < some; ++k) {
        for (uint32_t& word : words[k]) word = rearrange(word);
        std::memcpy(to, words[k], sizeof words[k]);
        to += sizeof words[k];
        const int64_t step = first + k;
        if ((step + 1) % steps == 0) to += pack_values(scales, offsets, step / steps * N + n, columns, size, to);
      }
    }
  }
}

}  // namespace groups
}  // namespace sluice
