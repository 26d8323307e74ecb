// Shared by the products of this folder: blocks of 32 columns, what tiles prefetch, and how threads share blocks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "pallas_kernels/native.h"

namespace sluice {

constexpr int kColumns = 32;
constexpr int64_t kPiece = 16;  // most rows that one piece of work prepares

// Prefetches the bytes of a tile's own stream. kNear: bytes ahead. kLevel: of __builtin_prefetch for them; 3: into the
// first-level cache, 2: into the second. kFar: bytes ahead, or 0, of lines that go into the second before.
template <int64_t kNear, int kLevel = 2, int64_t kFar = 0>
inline __attribute__((always_inline)) void prefetch_own(const void* own, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kLine) {
    __builtin_prefetch(static_cast<const char*>(own) + kNear + i, 0, kLevel);
    if (kFar) __builtin_prefetch(static_cast<const char*>(own) + kFar + i, 0, 2);
  }
}

// What the tiles of a block prefetch.
struct Ahead {
  bool near;             // their own stream, a little ahead
  const char* far;       // or this many cache lines from here, spread evenly over the terms of the sums
  int64_t lines, terms;
  int64_t due = 0;

  // Called for every term, with the bytes of the tile's own stream there.
  template <int64_t kNear>
  inline __attribute__((always_inline)) void prefetch(const void* own, int64_t bytes) {
    if (near) prefetch_own<kNear>(own, bytes);
    if ((due -= lines) < 0) {
      due += terms;
      __builtin_prefetch(far, 0, 2);
      far += kLine;
    }
  }
  // Called for every `count` terms, to which several lines may fall, by tiles that prefetch none of their own stream.
  inline __attribute__((always_inline)) void prefetch_next(int64_t count) {
    for (due -= count * lines; due < 0; due += terms, far += kLine) __builtin_prefetch(far, 0, 2);
  }
};

// The first address from `at` on where a cache line begins.
template <typename T>
T* align_to_line(T* at) {
  return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(at) + kLine - 1) / kLine * kLine);
}

// Turns a row's sums into its result: applies the columns' scales and adds the residual, if any.
template <typename O>
void finish(float* sums, int64_t columns, const float* scales, const O* residual, O* to) {
  if (scales)
    for (int64_t n = 0; n < columns; ++n) sums[n] *= scales[n];
  for (int64_t n = 0; n < columns; ++n) assign(to[n], sums[n]);
  if (residual)
    for (int64_t n = 0; n < columns; ++n) assign(to[n], value(residual[n]) + value(to[n]));
}

// The piece to start i-th, such that each lane, taking turns, gets adjacent pieces.
inline int64_t dealt(int64_t i, int64_t pieces, int64_t lanes) {
  const int64_t lane = i % lanes;
  return lane * (pieces / lanes) + std::min(lane, pieces % lanes) + i / lanes;
}

// Calls prepare(first row, end) for pieces of the M rows, if `prepares`, and then product(first block, stop, first row,
// count) for every block of columns. tile_rows: rows that a tile multiplies at once.
template <typename Prepare, typename Product>
void spread_blocks(ffi::ThreadPool& threads, int64_t M, int64_t blocks, int64_t tile_rows, bool prepares, bool worth_it,
                   const Prepare& prepare, const Product& product) {
  const int64_t some = std::clamp<int64_t>(M / (2 * spread_over(threads, M, worth_it)), 1, kPiece);
  const auto prepare_piece = [=](int64_t i) { prepare(i * some, std::min(M, (i + 1) * some)); };
  // Runs of adjacent blocks, short enough that threads finish together. If there are few blocks and many rows, parts of
  // the rows share a block.
  const int64_t run = std::clamp<int64_t>(blocks / 16, 1, 16), runs = (blocks + run - 1) / run;
  const int64_t parts = runs < 16 ? std::clamp<int64_t>(M / (2 * tile_rows), 1, 4) : 1, part = (M + parts - 1) / parts;
  const int64_t pieces = runs * parts, lanes = spread_over(threads, pieces, worth_it);
  const auto multiply_piece = [=](int64_t i) {
    const int64_t piece = dealt(i, pieces, lanes);
    const int64_t begin = piece % parts * part, count = std::min(part, M - begin);
    const int64_t stop = std::min(blocks, (piece / parts + 1) * run);
    product(piece / parts * run, stop, begin, count);
  };
  spread(threads, prepares ? (M + some - 1) / some : 0, prepare_piece, pieces, multiply_piece, worth_it);
}

}  // namespace sluice
