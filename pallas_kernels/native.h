// Shared by the CPU kernels: vectors of floats, element types, and work spread over XLA's threads.
// Vectors are those of GCC and Clang, so one source serves AVX-512, AVX2, NEON and others; native.py selects the
// instruction set at compile time. A vector must be as wide as a register: GCC keeps the sums of wider ones in memory
// (64 rows with AVX2: 21 GFLOP/s instead of 200).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace sluice {

namespace ffi = xla::ffi;

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRegisters = 32;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif
constexpr int64_t kLine = 64;  // bytes of a cache line
typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef int8_t ByteVec __attribute__((vector_size(kLanes)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));
typedef uint32_t WideVec __attribute__((vector_size(4 * kLanes)));

inline Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
// Intrinsics, because GCC 12 splits the generic vector conversion into single bytes.
inline Vec load(const int8_t* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  ByteVec bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, IntVec), Vec);
#endif
}
inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }
inline Vec all(float x) { return Vec{} + x; }
// 0, 1, 2, ...
inline IntVec lane_numbers() {
  IntVec v;
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

// bfloat16: the upper half of a float.
struct Bf16 {
  uint16_t bits;
};

inline Vec load(const Bf16* from) {
  HalfVec half;
  std::memcpy(&half, from, sizeof half);
  WideVec wide = __builtin_convertvector(half, WideVec) << 16;
  Vec v;
  std::memcpy(&v, &wide, sizeof v);
  return v;
}
// Rounds to nearest, ties to even; NaN stays NaN.
inline uint16_t round_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline float value(float x) { return x; }
inline float value(Bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}
inline void assign(float& to, float x) { to = x; }
inline void assign(Bf16& to, float x) { to.bits = round_to_bf16(x); }

inline float max_of(Vec v) {
  float most = v[0];
  for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
  return most;
}
inline float sum_of(Vec v) {
  float sums[kLanes];
  store(sums, v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  return sums[0];
}

// e^x for x <= 0: exactly 1 at 0, 0 below -87, elsewhere within 2 units in the last place.
inline Vec exp_of_negative(Vec x) {
  const Vec low = all(-87.3f);
  const IntVec vanishes = x < low;
  x = vanishes ? low : x;
  const Vec magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec n = (x * 1.44269504f + magic) - magic;
  const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  return vanishes ? Vec{} : p * scale;
}

// The number of threads that `spread` uses.
inline int64_t spread_over(ffi::ThreadPool& threads, int64_t count, bool worth_it) {
  return worth_it ? std::max<int64_t>(1, std::min<int64_t>(threads.num_threads(), count)) : 1;
}

// Calls work(i) for every i below `count`, on the calling thread and on XLA's, and returns when all are done. A thread
// that starts late finds no work left, so the caller never waits for a busy thread.
template <typename Work>
void spread(ffi::ThreadPool& threads, int64_t count, bool worth_it, const Work& work) {
  const int64_t helpers = spread_over(threads, count, worth_it) - 1;
  if (helpers == 0) {
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  struct State {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto state = std::make_shared<State>();
  auto help = [state, count, &work] {  // helpers use `work` only while an i is left, so before `spread` returns
    for (int64_t i; (i = state->next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      work(i);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 0; i < helpers; ++i) threads.Schedule([help] { help(); });
  help();
  for (int spins = 0; state->done.load(std::memory_order_acquire) < count; ++spins) {
    if (spins > 1000) std::this_thread::yield();
  }
}

// Like `spread`, for work in two parts: every `second` runs after all of `first`. One call wakes XLA's threads once.
// It cannot deadlock: threads start parts in order, so `second` waits only for parts that are already running.
template <typename First, typename Second>
void spread(ffi::ThreadPool& threads, int64_t firsts, const First& first, int64_t seconds, const Second& second,
            bool worth_it) {
  std::atomic<int64_t> ready{0};
  spread(threads, firsts + seconds, worth_it, [&](int64_t i) {
    if (i < firsts) {
      first(i);
      ready.fetch_add(1, std::memory_order_release);
      return;
    }
    for (int spins = 0; ready.load(std::memory_order_acquire) < firsts; ++spins) {
      if (spins > 1000) std::this_thread::yield();
    }
    second(i - firsts);
  });
}

}  // namespace sluice
