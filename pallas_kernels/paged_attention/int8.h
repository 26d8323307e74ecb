// Pages of int8 for cpu.cc: their layout, writing, and products on AVX-512 VNNI. int8_kv.py defines numbers and scales.
//
// A page of a KV head holds its keys as bytes x + 128, [H / 4, page, 4], then their scales, bf16 [page]; then its values
// as signed bytes, [page / 4, H, 4], and their scales. So both products multiply four bytes a lane and add to int32, as
// VNNI does. Queries and weights of values become 16-bit integers with a scale, in two planes of bytes: their rounding
// is a hundredth of what int8 costs. Integer sums are exact, so their order does not matter.
//
// Without VNNI, the kernel makes blocks of f32 of the pages.
#pragma once

#include <cmath>
#include <limits>

#include "pallas_kernels/native.h"

#if defined(__x86_64__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define SLUICE_VNNI 1
#define SLUICE_VNNI_TARGET __attribute__((target("avx512vnni")))
#endif

namespace sluice {
namespace int8 {

constexpr int64_t kScaleBytes = 2;  // int8_kv.SCALE_BYTES
constexpr int kQuad = 4, kOffset = 128;
constexpr int kMostHeadDim = 256;

// Bits of the bf16 scale of a line: max |x| / 127, rounded up; NaN if a number is not finite. H in whole vectors.
inline uint16_t scale_of(const float* x, int64_t H) {
  Vec most{}, poison{};
  for (int64_t h = 0; h < H; h += kLanes) {
    const Vec v = load(x + h), size = v < 0.0f ? -v : v;
    most = size > most ? size : most;
    poison += v * 0.0f;  // NaN for NaN and infinity
  }
  if (sum_of(poison) != 0.0f) return 0x7fc0;
  const float scale = max_of(most) / 127.0f;
  uint32_t bits;
  std::memcpy(&bits, &scale, sizeof bits);
  return static_cast<uint16_t>((bits + 0xffff) >> 16);
}

// Rounds x / scale to integers, ties to even; zeros for a scale that is NaN, or below the normal numbers.
inline void round_line(const float* x, int64_t H, float scale, int32_t* to) {
  const float inverse = scale >= 0x1p-126f ? 1.0f / scale : 0.0f;
  for (int64_t h = 0; h < H; ++h) to[h] = inverse == 0.0f ? 0 : static_cast<int32_t>(std::rint(x[h] * inverse));
}

// Stores a key and a value, f32[H] each, at `offset` of a page.
inline void write_line(const float* key, const float* values, int64_t H, int64_t page, int64_t offset, int8_t* at) {
  alignas(64) int32_t numbers[kMostHeadDim];
  Bf16 scale{scale_of(key, H)};
  round_line(key, H, value(scale), numbers);
  for (int64_t h = 0; h < H; h += kQuad) {
    uint8_t quad[kQuad];
    for (int i = 0; i < kQuad; ++i) quad[i] = static_cast<uint8_t>(numbers[h + i] + kOffset);
    std::memcpy(at + h * page + offset * kQuad, quad, sizeof quad);
  }
  std::memcpy(at + page * H + offset * kScaleBytes, &scale, sizeof scale);
  at += page * (H + kScaleBytes);
  scale = {scale_of(values, H)};
  round_line(values, H, value(scale), numbers);
  int8_t* lane = at + offset / kQuad * kQuad * H + offset % kQuad;
  for (int64_t h = 0; h < H; ++h) lane[h * kQuad] = static_cast<int8_t>(numbers[h]);
  std::memcpy(at + page * H + offset * kScaleBytes, &scale, sizeof scale);
}

// The scales of kLanes positions from `offset` of a page's keys or values.
inline Vec scales_at(const int8_t* at, int64_t H, int64_t page, int64_t offset) {
  return load(reinterpret_cast<const Bf16*>(at + page * H) + offset);
}

// Makes f32 of kLanes keys from `offset` of a page: [H, stride].
inline void widen_keys(const int8_t* at, int64_t H, int64_t page, int64_t offset, float* to, int64_t stride) {
  const Vec scales = scales_at(at, H, page, offset);
  for (int64_t h = 0; h < H; h += kQuad) {
    WideVec quads;
    std::memcpy(&quads, at + h * page + offset * kQuad, sizeof quads);
    for (int i = 0; i < kQuad; ++i) {
      const IntVec n = __builtin_convertvector((quads >> (8 * i)) & 255, IntVec) - kOffset;
      store(to + (h + i) * stride, __builtin_convertvector(n, Vec) * scales);
    }
  }
}

// Makes f32 of the four values from `offset` of a page: [4, stride].
inline void widen_values(const int8_t* at, int64_t H, int64_t page, int64_t offset, float* to, int64_t stride) {
  const Bf16* scales = reinterpret_cast<const Bf16*>(at + page * H) + offset;
  for (int64_t h = 0; h < H; h += kLanes) {
    IntVec quads;
    std::memcpy(&quads, at + offset * H + h * kQuad, sizeof quads);
    for (int i = 0; i < kQuad; ++i) {
      const IntVec n = (quads << (24 - 8 * i)) >> 24;
      store(to + i * stride + h, __builtin_convertvector(n, Vec) * value(scales[i]));
    }
  }
}

#if SLUICE_VNNI

inline bool has_vnni() {
  static const bool has = __builtin_cpu_supports("avx512vnni");
  return has;
}

constexpr float kMostOfQuery = 32639.0f;   // 127 * 256 + 127
constexpr float kMostOfWeight = 65535.0f;  // unsigned

// What a query's planes lack: x = scale * (256 * high + low); and the sums of both planes.
struct QueryPlanes {
  float scale;
  int32_t high, low;
};

// Makes planes of a query of H numbers.
inline QueryPlanes split_query(const float* x, int64_t H, int8_t* high, int8_t* low) {
  Vec most{}, poison{};
  for (int64_t h = 0; h < H; h += kLanes) {
    const Vec v = load(x + h), size = v < 0.0f ? -v : v;
    most = size > most ? size : most;
    poison += v * 0.0f;
  }
  const float peak = max_of(most), factor = peak > 0.0f ? kMostOfQuery / peak : 0.0f;
  __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  for (int64_t h = 0; h < H; h += kLanes) {
    const __m512i n = _mm512_cvtps_epi32((__m512)(load(x + h) * factor));
    const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(128)), 8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high + h), _mm512_cvtepi32_epi8(upper));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low + h), _mm512_cvtepi32_epi8(n));
    sums[0] = _mm512_add_epi32(sums[0], upper);
    sums[1] = _mm512_add_epi32(sums[1], _mm512_sub_epi32(n, _mm512_slli_epi32(upper, 8)));
  }
  return {peak / kMostOfQuery + sum_of(poison), _mm512_reduce_add_epi32(sums[0]), _mm512_reduce_add_epi32(sums[1])};
}

// Scales the weights of a block, [64], by those of its values, and makes planes of them; returns the scale of the sums.
inline float split_weights(const float* weights, const Vec* scales, int groups, uint8_t* high, uint8_t* low) {
  Vec scaled[4], most{}, sum{};
  for (int j = 0; j < groups; ++j) {
    const Vec weight = load(weights + j * kLanes);
    // A weight of 0 may belong to a position that holds NaN.
    scaled[j] = weight > 0.0f ? weight * scales[j] : Vec{};
    most = scaled[j] > most ? scaled[j] : most;
    sum += scaled[j];
  }
  const float peak = _mm512_reduce_max_ps((__m512)most), factor = peak > 0.0f ? kMostOfWeight / peak : 0.0f;
  for (int j = 0; j < 4; ++j) {
    const __m512i n = _mm512_cvtps_epi32((__m512)((j < groups ? scaled[j] : Vec{}) * factor));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high + j * kLanes), _mm512_cvtepi32_epi8(_mm512_srli_epi32(n, 8)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low + j * kLanes), _mm512_cvtepi32_epi8(n));
  }
  const bool is_finite = _mm512_cmp_ps_mask((__m512)(sum - sum), _mm512_setzero_ps(), _CMP_NEQ_UQ) == 0;
  return is_finite ? peak / kMostOfWeight : std::numeric_limits<float>::quiet_NaN();
}

inline __m512i broadcast(const void* from) {
  int32_t quad;
  std::memcpy(&quad, from, sizeof quad);
  return _mm512_set1_epi32(quad);
}

// Scores of R queries and V vectors of keys. high, low: planes of queries, `stride` apart. keys: the address of each
// vector's first quad; quads lie `step` apart. ahead: bytes to what is read next, 0 for none.
template <int R, int V>
SLUICE_VNNI_TARGET void score(const int8_t* high, const int8_t* low, int64_t stride, const QueryPlanes* queries,
                              const int8_t* const* keys, const Vec* key_scales, int64_t step, int64_t quads,
                              int64_t ahead, float* scores, int64_t scores_stride) {
  __m512i sums[R][V][2];
#pragma GCC unroll 8
  for (int m = 0; m < R; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) {
      sums[m][j][0] = _mm512_set1_epi32(-kOffset * queries[m].high);
      sums[m][j][1] = _mm512_set1_epi32(-kOffset * queries[m].low);
    }
  for (int64_t i = 0; i < quads; ++i) {
    __m512i key[V];
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) {
      key[j] = _mm512_loadu_si512(keys[j] + i * step);
      if (ahead) __builtin_prefetch(keys[j] + i * step + ahead, 0, 2);
    }
#pragma GCC unroll 8
    for (int m = 0; m < R; ++m) {
      const __m512i of_high = broadcast(high + m * stride + i * kQuad), of_low = broadcast(low + m * stride + i * kQuad);
#pragma GCC unroll 8
      for (int j = 0; j < V; ++j) {
        sums[m][j][0] = _mm512_dpbusd_epi32(sums[m][j][0], key[j], of_high);
        sums[m][j][1] = _mm512_dpbusd_epi32(sums[m][j][1], key[j], of_low);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < R; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) {
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(sums[m][j][0], 8), sums[m][j][1]);
      store(scores + m * scores_stride + j * kLanes, (Vec)_mm512_cvtepi32_ps(sum) * queries[m].scale * key_scales[j]);
    }
}

// The keys that are read after some values: the address of each vector of 16, and bytes between their quads.
struct NextKeys {
  const int8_t* vectors[4];
  int64_t step;
};

// Adds the values of quads first to end, weighted, to V vectors of the outputs of R queries. high, low: planes of
// weights, [R, 64]. values: the address of each quad. quads: H / 4. next: nullptr for none.
template <int R, int V>
SLUICE_VNNI_TARGET void add_values(const uint8_t* high, const uint8_t* low, const float* scales,
                                   const int8_t* const* values, int64_t vector, int first, int end, int64_t quads,
                                   const NextKeys* next, float* out, int64_t width) {
  constexpr int64_t kStride = 64;
  __m512i sums[R][V][2];
#pragma GCC unroll 8
  for (int m = 0; m < R; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) sums[m][j][0] = sums[m][j][1] = _mm512_setzero_si512();
  for (int i = first; i < end; ++i) {
    __m512i line[V];
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) {
      line[j] = _mm512_loadu_si512(values[i] + (vector + j) * kLine);
      if (next)
        __builtin_prefetch(next->vectors[i / kQuad] + (i % kQuad * (quads / kQuad) + vector + j) * next->step, 0, 2);
    }
#pragma GCC unroll 8
    for (int m = 0; m < R; ++m) {
      const __m512i of_high = broadcast(high + m * kStride + i * kQuad), of_low = broadcast(low + m * kStride + i * kQuad);
#pragma GCC unroll 8
      for (int j = 0; j < V; ++j) {
        sums[m][j][0] = _mm512_dpbusd_epi32(sums[m][j][0], of_high, line[j]);
        sums[m][j][1] = _mm512_dpbusd_epi32(sums[m][j][1], of_low, line[j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < R; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) {
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(sums[m][j][0], 8), sums[m][j][1]);
      float* to = out + m * width + (vector + j) * kLanes;
      store(to, load(to) + (Vec)_mm512_cvtepi32_ps(sum) * scales[m]);
    }
}

#endif

}  // namespace int8
}  // namespace sluice
