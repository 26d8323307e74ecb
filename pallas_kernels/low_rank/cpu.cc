// Adds to each row of y [T, N] the product of its x [T, D] with the two low-rank matrices of its slot. api.py documents
// the call. Like packed_matmul, the kernel applies the norm or SwiGLU before the product.
//
// A step has few rows of each slot, so the kernel orders rows by slot and multiplies a tile of up to kRows of them, with
// all sums in registers. Both products are sums of rows of a matrix, so neither needs a sum across a vector. Every sum
// has a fixed order, whatever else is in the batch. Rows of slot 0 are not touched.
#include <algorithm>
#include <string>
#include <vector>

#include "pallas_kernels/native.h"
#include "pallas_kernels/rows.h"

namespace sluice {
namespace {

constexpr int kRows = kRegisters == 32 ? 8 : 4;     // of a tile
constexpr int kVectors = kRegisters == 32 ? 3 : 2;  // of a row that a tile sums at once
constexpr int64_t kRankMultiple = 16;               // the api rejects other ranks
constexpr int64_t kNear = 2 << 10;                  // bytes that a tile prefetches ahead in A
constexpr int64_t kNext = 2 * kVectors * kLanes;    // columns that it prefetches ahead in B
constexpr int64_t kPiece = 768;                     // columns of one piece of work, about

// Some rows of one slot: order[first .. first + count).
struct Tile {
  int64_t first, slot;
  int count;
};

// Adjacent outputs of one part.
struct Run {
  int64_t start, length, part;
};

inline void put(float* to, Vec v, bool adds) { store(to, adds ? load(to) + v : v); }
inline void put(Bf16* to, Vec v, bool adds) {
  for (int i = 0; i < kLanes; ++i) assign(to[i], adds ? value(to[i]) + v[i] : v[i]);
}

// to[m][V vectors] = or += the sum over k of x[m][k] * w[k][V vectors]; rows of w are `stride` apart. Prefetches `ahead`
// elements ahead: few rows use each matrix, so it is seldom in a near cache.
template <int R, int V, typename W, typename O>
void product(const float* const* x, int64_t K, const W* w, int64_t stride, int64_t ahead, O* const* to, int64_t column,
             bool adds) {
  Vec sums[R][V];
#pragma GCC unroll 8
  for (int m = 0; m < R; ++m)
#pragma GCC unroll 3
    for (int j = 0; j < V; ++j) sums[m][j] = Vec{};
  for (int64_t k = 0; k < K; ++k, w += stride) {
    Vec row[V];
#pragma GCC unroll 3
    for (int j = 0; j < V; ++j) {
      row[j] = load(w + j * kLanes);
      __builtin_prefetch(w + ahead + j * kLanes, 0, 2);
    }
#pragma GCC unroll 8
    for (int m = 0; m < R; ++m) {
      const float factor = x[m][k];
#pragma GCC unroll 3
      for (int j = 0; j < V; ++j) sums[m][j] += factor * row[j];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < R; ++m)
#pragma GCC unroll 3
    for (int j = 0; j < V; ++j) put(to[m] + column + j * kLanes, sums[m][j], adds);
}

// The same for `columns` columns from `column` on, of a tile of `rows` rows.
template <typename W, typename O, int R = kRows>
void product_of(int rows, const float* const* x, int64_t K, const W* w, int64_t stride, int64_t ahead, O* const* to,
                int64_t column, int64_t columns, bool adds) {
  if constexpr (R > 1) {
    if (rows < R) return product_of<W, O, R - 1>(rows, x, K, w, stride, ahead, to, column, columns, adds);
  }
  int64_t n = column;
  const int64_t end = column + columns;
  for (; n + kVectors * kLanes <= end; n += kVectors * kLanes)
    product<R, kVectors>(x, K, w + n, stride, ahead, to, n, adds);
  for (; n + kLanes <= end; n += kLanes) product<R, 1>(x, K, w + n, stride, ahead, to, n, adds);
  for (; n < end; ++n)
    for (int m = 0; m < R; ++m) {
      float sum = 0.0f;
      for (int64_t k = 0; k < K; ++k) sum += x[m][k] * value(w[k * stride + n]);
      assign(to[m][n], adds ? value(to[m][n]) + sum : sum);
    }
}

// Orders the rows by slot, without those of slot 0, and cuts each slot's rows into tiles of even size.
std::vector<Tile> make_tiles(const int32_t* slots, int64_t T, int64_t S, std::vector<int32_t>& order) {
  std::vector<int64_t> starts(S + 1, 0);
  for (int64_t t = 0; t < T; ++t) ++starts[slots[t] + 1];
  starts[1] = 0;
  for (int64_t s = 1; s <= S; ++s) starts[s] += starts[s - 1];
  order.resize(starts[S]);
  std::vector<int64_t> next(starts.begin(), starts.end() - 1);
  for (int64_t t = 0; t < T; ++t)
    if (slots[t]) order[next[slots[t]]++] = static_cast<int32_t>(t);
  std::vector<Tile> tiles;
  for (int64_t s = 1; s < S; ++s) {
    const int64_t count = starts[s + 1] - starts[s], parts = (count + kRows - 1) / kRows;
    for (int64_t p = 0; p < parts; ++p) {
      const int64_t first = starts[s] + count * p / parts, last = starts[s] + count * (p + 1) / parts;
      tiles.push_back({first, s, static_cast<int>(last - first)});
    }
  }
  return tiles;
}

template <typename X>
void add_products(ffi::ThreadPool& threads, const X* x, const int32_t* slots, const X* a, const X* b, X* y, int64_t T,
                  int64_t D, int64_t N, int64_t S, int64_t R, const std::vector<Run>& runs, int64_t parts,
                  const X* scale, float epsilon, bool gated) {
  static thread_local std::vector<int32_t> order_of_rows;
  static thread_local std::vector<float> states;
  const std::vector<Tile> tiles = make_tiles(slots, T, S, order_of_rows);
  if (tiles.empty()) return;
  const int64_t rows = static_cast<int64_t>(order_of_rows.size()), width = parts * R;
  states.resize(rows * width);
  const bool as_it_is = std::is_same_v<X, float> && scale == nullptr && !gated;
  const int64_t stride = (D + 2 * kLanes - 1) / kLanes * kLanes;  // prepare_row may write whole vectors
  float* h = states.data();
  const int32_t* order = order_of_rows.data();
  const auto first = [=, &tiles](int64_t i) {
    const Tile tile = tiles[i];
    static thread_local std::vector<float> prepared;
    prepared.resize(kRows * stride);
    const float* from[kRows];
    float* to[kRows];
    for (int m = 0; m < tile.count; ++m) {
      const int64_t row = order[tile.first + m];
      if (as_it_is) {
        from[m] = reinterpret_cast<const float*>(x) + row * D;
      } else {
        prepare_row(x, row, D, scale, epsilon, gated, prepared.data() + m * stride);
        from[m] = prepared.data() + m * stride;
      }
      to[m] = h + (tile.first + m) * width;
    }
    product_of(tile.count, from, D, a + tile.slot * D * width, width, kNear / sizeof(X), to, 0, width, false);
  };
  const int64_t num_runs = static_cast<int64_t>(runs.size());
  const int64_t pieces = std::clamp<int64_t>(N / kPiece, 1, num_runs);
  const auto second = [=, &tiles, &runs](int64_t i) {
    const Tile tile = tiles[i / pieces];
    const int64_t piece = i % pieces;
    const float* from[kRows];
    X* to[kRows];
    for (int64_t r = num_runs * piece / pieces; r < num_runs * (piece + 1) / pieces; ++r) {
      const Run run = runs[r];
      for (int m = 0; m < tile.count; ++m) {
        from[m] = h + (tile.first + m) * width + run.part * R;
        to[m] = y + order[tile.first + m] * N;
      }
      product_of(tile.count, from, R, b + tile.slot * R * N, N, kNext, to, run.start, run.length, true);
    }
  };
  const int64_t count = static_cast<int64_t>(tiles.size());
  spread(threads, count, first, count * pieces, second, rows * (D * width + R * N) > 500000);
}

// y [T, N], x [T, D], or gated [T, 2 D], slots [T] below S, a [S, D, parts * R], b [S, R, N], norm's scale [D] or [0]
// -> y [T, N], the same memory.
ffi::Error low_rank(ffi::ThreadPool threads, ffi::AnyBuffer y, ffi::AnyBuffer x, ffi::Buffer<ffi::S32> slots,
                    ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer scale, ffi::Result<ffi::AnyBuffer> out,
                    ffi::Span<const int64_t> lengths, int64_t repeats, float epsilon, bool gated) {
  const int64_t T = x.dimensions()[0], D = x.dimensions()[1] / (gated ? 2 : 1), N = y.dimensions()[1];
  const bool normed = scale.dimensions()[0] != 0;
  const int64_t S = b.dimensions()[0], R = b.dimensions()[1], parts = static_cast<int64_t>(lengths.size());
  if (y.dimensions()[0] != T || slots.dimensions()[0] != T || a.dimensions()[0] != S || a.dimensions()[1] != D ||
      a.dimensions()[2] != parts * R || b.dimensions()[2] != N || R % kRankMultiple || out->dimensions()[1] != N ||
      (normed && (gated || scale.dimensions()[0] != D)))
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "low rank: shapes do not match");
  const int32_t* slot = slots.typed_data();
  for (int64_t t = 0; t < T; ++t)
    if (slot[t] < 0 || slot[t] >= S)
      return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                        "low rank: slot " + std::to_string(slot[t]) + " of " + std::to_string(S));
  std::vector<Run> runs;
  int64_t start = 0;
  for (int64_t i = 0; i < repeats; ++i)
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t length = lengths[part], cuts = std::max<int64_t>(1, length / kPiece);
      for (int64_t cut = 0; cut < cuts; ++cut) {
        const int64_t from = length * cut / cuts / kRankMultiple * kRankMultiple;
        const int64_t to = cut + 1 == cuts ? length : length * (cut + 1) / cuts / kRankMultiple * kRankMultiple;
        runs.push_back({start + from, to - from, part});
      }
      start += length;
    }
  if (start != N) return ffi::Error(ffi::ErrorCode::kInvalidArgument, "low rank: the runs do not fill the outputs");
  if (out->untyped_data() != y.untyped_data()) std::memcpy(out->untyped_data(), y.untyped_data(), y.size_bytes());
  const auto type = x.element_type();
  if (type != y.element_type() || type != a.element_type() || type != b.element_type() || type != scale.element_type())
    return ffi::Error(ffi::ErrorCode::kUnimplemented, "low rank: the arrays have several dtypes");
  const auto with = [&](auto element) {
    using X = decltype(element);
    add_products(threads, static_cast<const X*>(x.untyped_data()), slot, static_cast<const X*>(a.untyped_data()),
                 static_cast<const X*>(b.untyped_data()), static_cast<X*>(out->untyped_data()), T, D, N, S, R, runs,
                 parts, normed ? static_cast<const X*>(scale.untyped_data()) : nullptr, epsilon, gated);
    return ffi::Error::Success();
  };
  if (type == ffi::F32) return with(float{});
  if (type == ffi::BF16) return with(Bf16{});
  return ffi::Error(ffi::ErrorCode::kUnimplemented, "low rank: the arrays are not float32 or bfloat16");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SluiceLowRank, low_rank,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<ffi::Span<const int64_t>>("runs")
                                  .Attr<int64_t>("repeats")
                                  .Attr<float>("epsilon")
                                  .Attr<bool>("gated"));

}  // namespace sluice
