// The instructions of AMX tiles in plain C++, for machines without them (pallas_kernels/packed_matmul/tiles.h).
//
// Written from the operations and exceptions in Intel's Architecture Instruction Set Extensions reference. What faults on
// a processor does nothing here, and `SluiceTileFault` says what it was.
#pragma once

#include <atomic>
#include <cmath>
#include <cstring>

// The number of the seeded bug in force, of those that test_tiles.py puts into the kernel. 0: none; -1: tiles take unsigned
// codes for signed ones; -2: and signed ones for unsigned.
extern "C" {
volatile int32_t SluiceSeededBug = 0;
}

namespace sluice {
namespace amx {

// Static, so that each library has its own state.
static std::atomic<const char*> first_fault{nullptr};
static std::atomic<int64_t> products{0};    // of tiles of bytes
static std::atomic<int64_t> configured{0};  // times that tiles were configured and not released

struct Emulation {
  bool is_configured = false;
  Shapes shapes;
  uint8_t tiles[kTileNames][kRows][kRowBytes] = {};
};
static thread_local Emulation emulation;

#define SLUICE_QUICK __attribute__((optimize("O2")))  // in libraries without optimization, too

struct Tiles {  // of one source file, like the state that it uses
  static bool fault(const char* text) {
    const char* none = nullptr;
    first_fault.compare_exchange_strong(none, text);
    return false;
  }

  static bool check_shapes(const Shapes& shapes) {
    if (shapes.palette != 1) return fault("ldtilecfg: palette");
    for (uint8_t byte : shapes.reserved)
      if (byte != 0) return fault("ldtilecfg: reserved bytes");
    for (int tile = 0; tile < 16; ++tile) {
      const int rows = shapes.rows[tile], row_bytes = shapes.row_bytes[tile];
      if (tile >= kTileNames && (rows != 0 || row_bytes != 0)) return fault("ldtilecfg: tile beyond the last");
      if (rows > kRows) return fault("ldtilecfg: rows");
      if (row_bytes > kRowBytes) return fault("ldtilecfg: bytes of a row");
      if ((rows == 0) != (row_bytes == 0)) return fault("ldtilecfg: either rows or bytes are 0");
    }
    return true;
  }
  static void configure(const Shapes& shapes) {
    if (!check_shapes(shapes)) return;
    std::memset(emulation.tiles, 0, sizeof emulation.tiles);
    emulation.shapes = shapes;
    emulation.is_configured = true;
    ++configured;
  }
  static void release() {
    if (emulation.is_configured) --configured;
    emulation = {};
  }

  static bool check_tile(int tile) {
    if (!emulation.is_configured) return fault("no tiles are configured");
    if (tile < 0 || tile >= kTileNames) return fault("no such tile");
    if (emulation.shapes.rows[tile] == 0) return fault("the tile has no rows");
    if (emulation.shapes.row_bytes[tile] % 4 != 0) return fault("bytes of a row are no multiple of 4");
    return true;
  }
  template <int T>
  static void zero() {
    if (check_tile(T)) std::memset(emulation.tiles[T], 0, sizeof emulation.tiles[T]);
  }
  template <int T>
  static void load(const void* from, int64_t stride) {
    if (!check_tile(T)) return;
    std::memset(emulation.tiles[T], 0, sizeof emulation.tiles[T]);
    for (int row = 0; row < emulation.shapes.rows[T]; ++row)
      std::memcpy(emulation.tiles[T][row], static_cast<const char*>(from) + row * stride, emulation.shapes.row_bytes[T]);
  }
  template <int T>
  static void store(void* to, int64_t stride) {
    if (!check_tile(T)) return;
    for (int row = 0; row < emulation.shapes.rows[T]; ++row)
      std::memcpy(static_cast<char*>(to) + row * stride, emulation.tiles[T][row], emulation.shapes.row_bytes[T]);
  }

  // to [m, n] is to have the products of a [m, k] and b [k, n], in elements of four bytes.
  static bool check_product(int to, int a, int b) {
    if (to == a || to == b || a == b) return fault("a tile occurs twice");
    if (!check_tile(to) || !check_tile(a) || !check_tile(b)) return false;
    const Shapes& shapes = emulation.shapes;
    if (shapes.row_bytes[to] != shapes.row_bytes[b]) return fault("columns do not match");
    if (shapes.rows[to] != shapes.rows[a]) return fault("rows do not match");
    if (shapes.row_bytes[a] / 4 != shapes.rows[b]) return fault("terms do not match");
    return true;
  }
  // Beyond the rows and columns in use, the result is zeros.
  static void zero_rest(int tile) {
    const Shapes& shapes = emulation.shapes;
    for (int row = 0; row < kRows; ++row) {
      const int used = row < shapes.rows[tile] ? shapes.row_bytes[tile] : 0;
      std::memset(emulation.tiles[tile][row] + used, 0, static_cast<size_t>(kRowBytes - used));
    }
  }
  template <int To, int A, int B>
  static void add_signed() {
    add_bytes(To, A, B, SluiceSeededBug != -2);
  }
  template <int To, int A, int B>
  static void add_unsigned() {
    add_bytes(To, A, B, SluiceSeededBug == -1);
  }
  SLUICE_QUICK static void add_bytes(int to, int a, int b, bool is_signed) {
    if (!check_product(to, a, b)) return;
    ++products;
    const int rows = emulation.shapes.rows[to], terms = emulation.shapes.rows[b];
    const int columns = emulation.shapes.row_bytes[to] / 4;
    for (int m = 0; m < rows; ++m) {
      uint32_t sums[kRowBytes / 4];  // wraps around, without saturation
      std::memcpy(sums, emulation.tiles[to][m], sizeof sums);
      for (int k = 0; k < terms; ++k)
        for (int n = 0; n < columns; ++n)
          for (int i = 0; i < 4; ++i) {
            const int32_t left = static_cast<int8_t>(emulation.tiles[a][m][4 * k + i]);
            const uint8_t right = emulation.tiles[b][k][4 * n + i];
            sums[n] += static_cast<uint32_t>(left * (is_signed ? static_cast<int8_t>(right) : right));
          }
      std::memcpy(emulation.tiles[to][m], sums, sizeof sums);
    }
    zero_rest(to);
  }

  // Numbers below 2^-126 count as zeros, before and after each operation.
  static float flush(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }
  static float widen(const uint8_t* at) {
    uint32_t bits = static_cast<uint32_t>(at[0]) << 16 | static_cast<uint32_t>(at[1]) << 24;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return flush(x);
  }
  template <int To, int A, int B>
  static void add_bfloat16() {
    add_bfloat16(To, A, B);
  }
  SLUICE_QUICK static void add_bfloat16(int to, int a, int b) {
    if (!check_product(to, a, b)) return;
    const int rows = emulation.shapes.rows[to], terms = emulation.shapes.rows[b];
    const int columns = emulation.shapes.row_bytes[to] / 4;
    for (int m = 0; m < rows; ++m) {
      float pairs[kRowBytes / 4][2] = {};  // of even terms and of odd ones
      for (int k = 0; k < terms; ++k)
        for (int i = 0; i < 2; ++i) {
          const float left = widen(emulation.tiles[a][m] + 4 * k + 2 * i);
          for (int n = 0; n < columns; ++n) {
            const float right = widen(emulation.tiles[b][k] + 4 * n + 2 * i);
            pairs[n][i] = flush(__builtin_fmaf(left, right, pairs[n][i]));
          }
        }
      float sums[kRowBytes / 4];
      std::memcpy(sums, emulation.tiles[to][m], sizeof sums);
      for (int n = 0; n < columns; ++n) sums[n] = flush(flush(sums[n]) + flush(pairs[n][0] + pairs[n][1]));
      std::memcpy(emulation.tiles[to][m], sums, sizeof sums);
    }
    zero_rest(to);
  }

  static bool permitted(unsigned) { return true; }
};

#undef SLUICE_QUICK

}  // namespace amx
}  // namespace sluice

// Return, since the last call, the first fault, or null; the number of products of tiles of bytes; and the number of times
// that tiles were configured and not released.
extern "C" {
const char* SluiceTileFault() { return sluice::amx::first_fault.exchange(nullptr); }
int64_t SluiceTileProducts() { return sluice::amx::products.exchange(0); }
int64_t SluiceTilesHeld() { return sluice::amx::configured.exchange(0); }
}
