// AMX tiles: eight registers of up to 16 rows of 64 bytes, which Intel's processors have since 2023.
//
// Tests compile the same kernels on machines without AMX: SLUICE_EMULATED_TILES then names a header with another
// `Tiles`, written from Intel's description of the instructions (tests/kernels/emulated_tiles.h).
#pragma once

#include "pallas_kernels/native.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define SLUICE_AMX 1
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>

namespace sluice {
namespace amx {

constexpr int kRows = 16;       // most rows of a tile
constexpr int kRowBytes = 64;   // most bytes of a row
constexpr int kTileNames = 8;

// What `ldtilecfg` reads: the rows of each tile and their bytes, or zeros for a tile that is not in use.
struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t tile_rows, int64_t tile_row_bytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<uint16_t>(tile_row_bytes);
  }
};
static_assert(sizeof(Shapes) == 64);

}  // namespace amx
}  // namespace sluice

#if defined(SLUICE_EMULATED_TILES)
#include SLUICE_EMULATED_TILES
#else
namespace sluice {
namespace amx {

// The instructions, by name, so that the rest of this library needs no more than x86-64-v4. T, To, A, B: tiles.
struct Tiles {
  using Any = const char[];  // what lies in memory from an address on

  static void configure(const Shapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
  static void release() { asm volatile("tilerelease"); }
  template <int T>
  static inline __attribute__((always_inline)) void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  // stride: in bytes, from row to row.
  template <int T>
  static inline __attribute__((always_inline)) void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T), "m"(*static_cast<const Any*>(from)));
  }
  template <int T>
  static inline __attribute__((always_inline)) void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
  }
  // Adds A's rows of signed bytes times B's columns of signed ones, four bytes of a column in each row of B, to int32.
  template <int To, int A, int B>
  static inline __attribute__((always_inline)) void add_signed() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(To), "i"(A), "i"(B));
  }
  // The same with unsigned bytes in B.
  template <int To, int A, int B>
  static inline __attribute__((always_inline)) void add_unsigned() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(To), "i"(A), "i"(B));
  }
  // The same of bfloat16 to float32, two numbers of a column in each row of B.
  template <int To, int A, int B>
  static inline __attribute__((always_inline)) void add_bfloat16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(To), "i"(A), "i"(B));
  }
  // Whether this processor has tiles and instructions for the elements, and the system lets this process use them.
  static bool permitted(unsigned elements) {
    unsigned a, b, c, d;
    constexpr unsigned kTiles = 1u << 24, kSaved = 1u << 27;  // saved: by the system, at a change of threads
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & kSaved) == 0) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTiles) == 0 || (d & elements) == 0) return false;
    asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    constexpr unsigned kTileState = 3u << 17;
    if ((a & kTileState) != kTileState) return false;
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }
};

}  // namespace amx
}  // namespace sluice
#endif

namespace sluice {
namespace amx {

// Configures the thread's tiles for as long as it lives.
struct Configured {
  explicit Configured(const Shapes& shapes) { Tiles::configure(shapes); }
  ~Configured() { Tiles::release(); }
  Configured(const Configured&) = delete;
};

constexpr unsigned kBfloat16 = 1u << 22, kBytes = 1u << 25;  // elements, as CPUID has them

// Whether the kernels may use tiles of these elements. SLUICE_AMX=off in the environment forbids it.
inline bool permitted(unsigned elements) {
  const char* wanted = std::getenv("SLUICE_AMX");
  return (wanted == nullptr || std::strcmp(wanted, "off") != 0) && Tiles::permitted(elements);
}

}  // namespace amx
}  // namespace sluice
#else
#define SLUICE_AMX 0
#endif
