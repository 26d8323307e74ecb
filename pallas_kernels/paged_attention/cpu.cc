// Paged attention on a CPU; reads each page of a row once, in place. cpu.py documents the call.
//
// A page of a KV head holds K transposed, [H, page], then V, [page, H]. Both products of attention are therefore sums
// of broadcast times vector, one register wide, and need no sum over lanes. Pages of int8 are in int8.h. The kernel
// walks keys in fixed blocks of 64 positions with an online softmax (arXiv:2205.14135). A query's sums have the same
// terms in the same order in every tile and step, so the bits of its result depend only on its row.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "pallas_kernels/native.h"
#include "pallas_kernels/paged_attention/int8.h"

namespace sluice {
namespace {

constexpr int kBlock = 64;              // keys a pass
constexpr int kGroups = kBlock / kLanes;
constexpr int kMostQueries = 48;        // (token, head of the group) pairs a tile
constexpr int kMostHeadDim = int8::kMostHeadDim;
constexpr float kMasked = -1e30f;       // below every real score; finite, so that masked - masked is not NaN
constexpr int kRegisterGroups = kRegisters == 32 ? 4 : 2, kRegisterRows = 6;  // sums in 24 of 32 registers, or 12 of 16

struct Sizes {
  int64_t tokens, rows, table_width, heads, group, head_dim;
  int64_t width;  // head_dim rounded up to whole vectors
  int64_t page, num_blocks;
  float scale, soft_cap;  // soft_cap 0: none
  int64_t window;         // 0: none
};

struct Rows {
  const int32_t *tables, *lengths, *starts;
};

// c[m][j] (+)= sum over k of a[m][k] * b(k)[j], for R rows and V vectors.
template <int R, int V, typename RowOf>
void product(const float* a, int64_t a_stride, const RowOf& row_of, int count, float* c, int64_t c_stride, bool add) {
  Vec sums[R][V];
#pragma GCC unroll 8
  for (int m = 0; m < R; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) sums[m][j] = add ? load(c + m * c_stride + j * kLanes) : Vec{};
  for (int k = 0; k < count; ++k) {
    Vec row[V];
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) row[j] = load(row_of(k, j));
#pragma GCC unroll 8
    for (int m = 0; m < R; ++m)
#pragma GCC unroll 4
      for (int j = 0; j < V; ++j) sums[m][j] += a[m * a_stride + k] * row[j];
  }
#pragma GCC unroll 8
  for (int m = 0; m < R; ++m)
#pragma GCC unroll 8
    for (int j = 0; j < V; ++j) store(c + m * c_stride + j * kLanes, sums[m][j]);
}

// The same for `rows` rows, at most R.
template <int R, int V, typename RowOf>
void product_of(int rows, const float* a, int64_t a_stride, const RowOf& row_of, int count, float* c, int64_t c_stride,
                bool add) {
  if constexpr (R > 1) {
    if (rows < R) return product_of<R - 1, V>(rows, a, a_stride, row_of, count, c, c_stride, add);
  }
  product<R, V>(a, a_stride, row_of, count, c, c_stride, add);
}

// The same for any number of rows and vectors, in tiles of up to R rows and V vectors; row_of(k, j) returns the address
// of vector j.
template <int R, int V, typename RowOf>
void product_of_all(int rows, int groups, const float* a, int64_t a_stride, const RowOf& row_of, int count, float* c,
                    int64_t c_stride, bool add) {
  int done = 0;
  const auto part = [&](int k, int j) { return row_of(k, done + j); };
  for (; groups - done >= V; done += V)
    for (int m = 0; m < rows; m += R)
      product_of<R, V>(std::min(rows - m, R), a + m * a_stride, a_stride, part, count, c + m * c_stride + done * kLanes,
                       c_stride, add);
  if constexpr (V > 1)
    product_of_all<R, V / 2>(rows, groups - done, a, a_stride, part, count, c + done * kLanes, c_stride, add);
}

// Eight independent sums hide the latency of two multiply-add units, so few rows take more vectors.
template <typename RowOf>
void matmul(int rows, int groups, const float* a, int64_t a_stride, const RowOf& row_of, int count, float* c,
            int64_t c_stride, bool add) {
  if (rows == 1) return product_of_all<1, 8>(rows, groups, a, a_stride, row_of, count, c, c_stride, add);
  if (rows == 2) return product_of_all<2, 4>(rows, groups, a, a_stride, row_of, count, c, c_stride, add);
  product_of_all<kRegisterRows, kRegisterGroups>(rows, groups, a, a_stride, row_of, count, c, c_stride, add);
}

// A thread's scratch memory.
struct alignas(64) Scratch {
  float queries[kMostQueries * kMostHeadDim];
  float out[kMostQueries * kMostHeadDim];
  float scores[kMostQueries * kBlock];
  float keys[kMostHeadDim * kBlock];    // copy of a block of keys that the thread cannot read in place: f32, [H, 64]
  float values[kBlock * kMostHeadDim];  // [64, H], H rounded up to whole vectors
  float peak[kMostQueries], total[kMostQueries];
#if SLUICE_VNNI
  int8_t query_high[kMostQueries * kMostHeadDim], query_low[kMostQueries * kMostHeadDim];
  uint8_t weight_high[kMostQueries * kBlock], weight_low[kMostQueries * kBlock];
  int8::QueryPlanes planes[kMostQueries];
  float weight_scales[kMostQueries];
#endif
};

// The pages of one row and KV head. P: the element type of the pool.
template <typename P>
struct Pages {
  const P* pool;
  const int32_t* table;
  int64_t heads, head, half;  // half: elements of K (or V) in a page
  const P* keys(int64_t column) const { return pool + (table[column] * heads + head) * 2 * half; }
  const P* values(int64_t column) const { return keys(column) + half; }
};

// The keys that a tile's queries see in one block: from `begin` to `last`.
template <typename P>
struct Keys {
  Pages<P> pages;
  int64_t begin, last;
};

// Elements of a pool for the key or value of a token and head.
template <typename P>
int64_t stored_size(int64_t head_dim) {
  return head_dim + (std::is_same_v<P, int8_t> ? int8::kScaleBytes : 0);
}

// The largest of numbers without NaN.
inline float highest_of(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);  // max_of takes one lane after the other
#else
  return max_of(v);
#endif
}

// Online softmax of the scores of a block of `groups` vectors from `begin`: makes weights of them, and prepares sums and
// outputs. last: of the tile's positions.
inline void soften(const Sizes& size, int64_t begin, int groups, int64_t first_position, int64_t last, int M,
                   Scratch& s) {
  const int64_t W = size.width;
  // Only blocks at the edge of a query's visible keys need a mask.
  const bool masked = begin + groups * kLanes - 1 > first_position || (size.window && begin <= last - size.window);
  for (int m = 0; m < M; ++m) {
    float* scores = s.scores + m * kBlock;
    const int64_t position = first_position + m / size.group;
    const int32_t most = static_cast<int32_t>(position - begin);
    const int32_t least = size.window ? static_cast<int32_t>(std::max<int64_t>(position - size.window + 1 - begin, -1)) : -1;
    IntVec seen[kGroups];
    Vec peak = all(s.peak[m]);
    for (int j = 0; j < groups; ++j) {
      Vec x = load(scores + j * kLanes);
      if (size.soft_cap != 0.0f) {  // cap * tanh(x / cap)
        const Vec y = x / size.soft_cap;
        const Vec e = exp_of_negative((y < 0.0f ? y : -y) * 2.0f);
        const Vec t = (1.0f - e) / (1.0f + e);
        x = (y < 0.0f ? -t : t) * size.soft_cap;
      }
      if (masked) {
        const IntVec key = lane_numbers() + j * kLanes;
        seen[j] = (key <= most) & (key >= least);
        x = seen[j] ? x : all(kMasked);
      }
      store(scores + j * kLanes, x);
      peak = x > peak ? x : peak;
    }
    const float top = highest_of(peak);
    Vec sum{};
    for (int j = 0; j < groups; ++j) {
      Vec weight = exp_of_negative(load(scores + j * kLanes) - top);
      if (masked) weight = seen[j] ? weight : Vec{};
      store(scores + j * kLanes, weight);
      sum += weight;
    }
    const float decay = exp_of_negative(all(s.peak[m] - top))[0];
    s.peak[m] = top;
    s.total[m] = s.total[m] * decay + sum_of(sum);
    if (decay != 1.0f)
      for (int64_t h = 0; h < W; h += kLanes) store(s.out + m * W + h, load(s.out + m * W + h) * decay);
  }
}

// Copies keys and values of a block to s.keys and s.values, as f32: positions from `from` to `count`.
template <typename P>
void copy_block(const Sizes& size, const Pages<P>& pages, int64_t begin, int from, int count, Scratch& s) {
  const int64_t H = size.head_dim, W = size.width, page = size.page;
  if constexpr (std::is_same_v<P, int8_t>) {
    for (int i = 0; i < count; i += kLanes) {
      const int64_t position = begin + i;
      int8::widen_keys(pages.keys(position / page), H, page, position % page, s.keys + i, kBlock);
    }
    for (int i = from / int8::kQuad * int8::kQuad; i < count; i += int8::kQuad) {
      const int64_t position = begin + i;
      int8::widen_values(pages.values(position / page), H, page, position % page, s.values + i * W, W);
    }
  } else {
    const bool whole_vectors = page % kLanes == 0 && H == W;
    for (int i = from; i < count; ++i) {
      const int64_t position = begin + i, offset = position % page;
      const P* row = pages.values(position / page) + offset * H;
      float* to = s.values + i * W;
      if (whole_vectors) {
        for (int64_t h = 0; h < H; h += kLanes) store(to + h, load(row + h));
      } else {
        for (int64_t h = 0; h < W; ++h) to[h] = h < H ? value(row[h]) : 0.0f;
      }
    }
    for (int i = 0; i < count; i += whole_vectors ? kLanes : 1) {
      const int64_t position = begin + i, offset = position % page;
      const P* column = pages.keys(position / page) + offset;
      float* to = s.keys + i;
      if (whole_vectors) {
        for (int64_t h = 0; h < H; ++h) store(to + h * kBlock, load(column + h * page));
      } else {
        for (int64_t h = 0; h < H; ++h) to[h * kBlock] = value(column[h * page]);
      }
    }
  }
}

// Computes the scores of a block of keys, [M, 64], and adds its weighted values to the output. after: the memory that
// this thread usually reads next. Tiles of few queries are memory bound, so they prefetch: a cache line of values with
// every vector of keys, and a cache line of the following keys with every vector of values.
template <typename P>
void attend_tile(const Sizes& size, const Keys<P>& keys, int64_t first_position, int queries, const Keys<P>& after,
                 Scratch& s) {
  const Pages<P>& pages = keys.pages;
  const int64_t H = size.head_dim, W = size.width, page = size.page;
  const int M = queries * static_cast<int>(size.group);
  const int64_t last = first_position + queries - 1;
  const int64_t low = size.window ? std::max<int64_t>(0, first_position - size.window + 1) : 0;
  const bool whole_vectors = page % kLanes == 0 && H == W;
  const bool in_place = std::is_same_v<P, float> && whole_vectors;
  std::fill_n(s.peak, M, kMasked);
  std::fill_n(s.total, M, 0.0f);
  std::fill_n(s.out, M * W, 0.0f);
  for (int64_t begin = keys.begin; begin <= last; begin += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, last + 1 - begin));
    const int from = static_cast<int>(std::max<int64_t>(0, low - begin));  // earlier positions may hold NaN
    const int groups = (count + kLanes - 1) / kLanes;
    // Addresses of the keys, a vector of positions each, and of each position's row of values.
    const float* key_group[kGroups];
    const float* value_row[kBlock];
    int64_t key_stride = page;
    if (in_place) {
      for (int j = 0; j < groups; ++j) {
        const int64_t position = begin + j * kLanes;
        key_group[j] = reinterpret_cast<const float*>(pages.keys(position / page)) + position % page;
      }
      for (int i = from; i < count;) {
        const int64_t position = begin + i, offset = position % page;
        const float* rows = reinterpret_cast<const float*>(pages.values(position / page)) + offset * H;
        for (int stop = std::min<int64_t>(count, i + page - offset); i < stop; ++i, rows += H) value_row[i] = rows;
      }
    } else {
      key_stride = kBlock;
      for (int j = 0; j < kGroups; ++j) key_group[j] = s.keys + j * kLanes;
      for (int i = from; i < count; ++i) value_row[i] = s.values + i * W;
      copy_block(size, pages, begin, from, count, s);
    }
    const bool fetches = in_place && M <= kRegisterRows;
    const float* next_group[kGroups];
    if (fetches) {
      const bool ends = begin + kBlock > last;
      const Keys<P> next = ends ? after : Keys<P>{pages, begin + kBlock, last};
      for (int j = 0; j < kGroups; ++j) {
        const int64_t position = std::min(next.begin + j * kLanes, next.last);
        const int64_t lane = position % page / kLanes * kLanes;
        next_group[j] = reinterpret_cast<const float*>(next.pages.keys(position / page)) + lane;
      }
    }
    const auto key_at = [&](int h, int j) {
      const float* at = key_group[j] + h * key_stride;
      if (fetches) __builtin_prefetch(at + page * H, 0, 2);
      return at;
    };
    matmul(M, groups, s.queries, H, key_at, static_cast<int>(H), s.scores, kBlock, false);
    soften(size, begin, groups, first_position, last, M, s);
    const auto value_at = [&](int k, int j) {
      if (fetches) __builtin_prefetch(next_group[k / kLanes] + (k % kLanes * (W / kLanes) + j) * page, 0, 2);
      return value_row[from + k] + j * kLanes;
    };
    matmul(M, static_cast<int>(W / kLanes), s.scores + from, kBlock, value_at, count - from, s.out, W, true);
  }
}

#if SLUICE_VNNI

// Calls `work` with R = the queries of a tile, up to 3, for all rows. Four are two and two.
template <typename Work>
void for_rows(int rows, const Work& work) {
  for (int m = 0; m < rows;) {
    const int left = rows - m, count = left == 4 ? 2 : std::min(left, 3);
    if (count == 3) work(std::integral_constant<int, 3>{}, m);
    if (count == 2) work(std::integral_constant<int, 2>{}, m);
    if (count == 1) work(std::integral_constant<int, 1>{}, m);
    m += count;
  }
}

// As attend_tile, in integers: reads pages in place.
inline void attend_tile_vnni(const Sizes& size, const Keys<int8_t>& keys, int64_t first_position, int queries,
                             const Keys<int8_t>& after, Scratch& s) {
  const Pages<int8_t>& pages = keys.pages;
  const int64_t H = size.head_dim, page = size.page, step = page * int8::kQuad;
  const int M = queries * static_cast<int>(size.group);
  const int64_t last = first_position + queries - 1;
  const int64_t low = size.window ? std::max<int64_t>(0, first_position - size.window + 1) : 0;
  const bool fetches = M <= kRegisterRows;
  std::fill_n(s.peak, M, kMasked);
  std::fill_n(s.total, M, 0.0f);
  std::fill_n(s.out, M * H, 0.0f);
  for (int m = 0; m < M; ++m)
    s.planes[m] = int8::split_query(s.queries + m * H, H, s.query_high + m * H, s.query_low + m * H);
  for (int64_t begin = keys.begin; begin <= last; begin += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, last + 1 - begin));
    const int from = static_cast<int>(std::max<int64_t>(0, low - begin));
    const int groups = (count + kLanes - 1) / kLanes;
    const int8_t *vectors[kGroups], *quads[kBlock / int8::kQuad];
    Vec key_scales[kGroups], value_scales[kGroups];
    for (int j = 0; j < groups; ++j) {
      const int64_t position = begin + j * kLanes, offset = position % page;
      const int8_t* at = pages.keys(position / page);
      vectors[j] = at + offset * int8::kQuad;
      key_scales[j] = int8::scales_at(at, H, page, offset);
      at += pages.half;
      value_scales[j] = int8::scales_at(at, H, page, offset);
      for (int i = 0; i < kLanes / int8::kQuad; ++i)
        quads[j * (kLanes / int8::kQuad) + i] = at + (offset + i * int8::kQuad) * H;
    }
    for_rows(M, [&](auto rows, int m) {
      const auto scores = [&](auto width, int j) {
        int8::score<rows, width>(s.query_high + m * H, s.query_low + m * H, H, s.planes + m, vectors + j,
                                 key_scales + j, step, H / int8::kQuad, fetches && m == 0 ? pages.half : 0,
                                 s.scores + m * kBlock + j * kLanes, kBlock);
      };
      if (groups == kGroups) return scores(std::integral_constant<int, kGroups>{}, 0);
      for (int j = 0; j < groups; ++j) scores(std::integral_constant<int, 1>{}, j);
    });
    soften(size, begin, groups, first_position, last, M, s);
    for (int m = 0; m < M; ++m)
      s.weight_scales[m] = int8::split_weights(s.scores + m * kBlock, value_scales, groups, s.weight_high + m * kBlock,
                                               s.weight_low + m * kBlock);
    int8::NextKeys next{{}, step};
    if (fetches) {
      const Keys<int8_t> then = begin + kBlock > last ? after : Keys<int8_t>{pages, begin + kBlock, last};
      for (int j = 0; j < kGroups; ++j) {
        const int64_t position = std::min(then.begin + j * kLanes, then.last);
        const int8_t* at = then.pages.keys(position / page);
        next.vectors[j] = at + position % page / kLanes * kLanes * int8::kQuad;
        __builtin_prefetch(at + page * H + position % page * int8::kScaleBytes, 0, 2);
        __builtin_prefetch(at + page * H + position % page * int8::kScaleBytes + pages.half, 0, 2);
      }
    }
    for_rows(M, [&](auto rows, int m) {
      const auto add = [&](auto width, int64_t vector) {
        int8::add_values<rows, width>(s.weight_high + m * kBlock, s.weight_low + m * kBlock, s.weight_scales + m, quads,
                                      vector, from / int8::kQuad, (count + int8::kQuad - 1) / int8::kQuad,
                                      H / int8::kQuad, fetches && m == 0 ? &next : nullptr, s.out + m * H, H);
      };
      int64_t vector = 0;
      for (; vector + 4 <= H / kLanes; vector += 4) add(std::integral_constant<int, 4>{}, vector);
      for (; vector < H / kLanes; ++vector) add(std::integral_constant<int, 1>{}, vector);
    });
  }
}

#endif

// One piece of work: some queries of a row.
struct Tile {
  int32_t row, token, queries;
  int64_t cost;
};

// E: the element type of a layer's projections and output; P: of the pool.
template <typename E, typename P>
struct Attention {
  const Sizes& size;
  const Rows& rows;
  const E* qkv;  // [T, K, G + 2, H]
  const float *cos, *sin;
  const P* pool;
  E* out;

  std::vector<Tile> tiles() const {
    const int most = static_cast<int>(std::max<int64_t>(1, kMostQueries / size.group));
    std::vector<Tile> all;
    for (int32_t row = 0; row < size.rows; ++row) {
      for (int32_t token = rows.starts[row]; token < rows.starts[row + 1]; token += most) {
        const int32_t count = std::min(most, rows.starts[row + 1] - token);
        const int64_t seen = rows.lengths[row] - rows.starts[row + 1] + token + count;
        all.push_back({row, token, count, (size.window ? std::min(seen, size.window + count) : seen) * (4 + count)});
      }
    }
    return all;
  }

  void load_queries(const Tile& tile, int64_t head, float* to) const {
    const int64_t H = size.head_dim, half = H / 2;
    for (int32_t token = tile.token; token < tile.token + tile.queries; ++token) {
      for (int64_t g = 0; g < size.group; ++g, to += H) {
        const E* from = qkv + ((token * size.heads + head) * (size.group + 2) + g) * H;
        const float *c = cos + token * half, *d = sin + token * half;
        for (int64_t h = 0; h < half; ++h) {
          E first, second;  // rounded to the layer's dtype
          assign(first, value(from[h]) * c[h] - value(from[h + half]) * d[h]);
          assign(second, value(from[h + half]) * c[h] + value(from[h]) * d[h]);
          to[h] = value(first) * size.scale;
          to[h + half] = value(second) * size.scale;
        }
      }
    }
  }

  Keys<P> keys_of(const Tile& tile, int64_t head) const {
    const int64_t first = first_of(tile);
    const int64_t low = size.window ? std::max<int64_t>(0, first - size.window + 1) : 0;
    return {{pool, rows.tables + tile.row * size.table_width, size.heads, head, size.page * stored_size<P>(size.head_dim)},
            low / kBlock * kBlock, first + tile.queries - 1};
  }
  int64_t first_of(const Tile& tile) const {  // position of the tile's first query
    return rows.lengths[tile.row] - (rows.starts[tile.row + 1] - tile.token);
  }

  void attend(const Tile& tile, int64_t head, const Keys<P>& after, Scratch& s) const {
    const Keys<P> keys = keys_of(tile, head);
#if SLUICE_VNNI
    if constexpr (std::is_same_v<P, int8_t>) {
      if (int8::has_vnni()) return attend_tile_vnni(size, keys, first_of(tile), tile.queries, after, s);
    }
#endif
    attend_tile(size, keys, first_of(tile), tile.queries, after, s);
  }

  // after: the tile that this thread usually runs next.
  void run(const Tile& tile, int64_t head, const Keys<P>& after) const {
    static thread_local std::unique_ptr<Scratch> scratch(new Scratch);
    Scratch& s = *scratch;
    const int64_t H = size.head_dim;
    load_queries(tile, head, s.queries);
    attend(tile, head, after, s);
    const float* from = s.out;
    for (int32_t token = tile.token, m = 0; token < tile.token + tile.queries; ++token) {
      for (int64_t g = 0; g < size.group; ++g, ++m, from += size.width) {
        E* to = out + (token * size.heads * size.group + head * size.group + g) * H;
        const float total = s.total[m] == 0.0f ? 1.0f : s.total[m];
        for (int64_t h = 0; h < H; ++h) assign(to[h], from[h] / total);
      }
    }
  }
};

// Checks the rows; inconsistent ones would make the kernel access memory outside the buffers.
std::string fault_of(const Sizes& size, const Rows& rows) {
  if (rows.starts[0] != 0) return "query_starts[0] is not 0";
  for (int64_t row = 0; row < size.rows; ++row) {
    const int64_t count = rows.starts[row + 1] - rows.starts[row], length = rows.lengths[row];
    if (count < 0 || rows.starts[row + 1] > size.tokens) return "query_starts of row " + std::to_string(row);
    if (count == 0) continue;
    if (length < count || length > size.table_width * size.page)
      return "kv_lens[" + std::to_string(row) + "]=" + std::to_string(length);
    const int64_t low = size.window ? std::max<int64_t>(0, length - count - size.window + 1) / kBlock * kBlock : 0;
    for (int64_t column = low / size.page; column * size.page < length; ++column) {
      const int32_t block = rows.tables[row * size.table_width + column];
      if (block < 0 || block >= size.num_blocks)
        return "block_tables[" + std::to_string(row) + "][" + std::to_string(column) + "]=" + std::to_string(block);
    }
  }
  return "";
}

ffi::Error invalid(const std::string& what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "paged attention: " + what + " does not match the buffers");
}

constexpr int64_t kWritten = 16;  // tokens that one piece of work writes

// Stores the rotated keys and the values of one piece of the tokens in use.
template <typename E, typename P>
void write(const Sizes& size, const E* qkv, const float* cos, const float* sin, const int32_t* slots, int64_t used,
           int64_t piece, P* pool) {
  const int64_t H = size.head_dim, half = H / 2, page = size.page, wide = size.group + 2;
  for (int64_t token = piece * kWritten; token < std::min(used, (piece + 1) * kWritten); ++token) {
    const int64_t block = slots[token] / page, offset = slots[token] % page;
    const float *c = cos + token * half, *d = sin + token * half;
    for (int64_t head = 0; head < size.heads; ++head) {
      const E* key = qkv + ((token * size.heads + head) * wide + size.group) * H;
      const E* values = key + H;
      P* at = pool + (block * size.heads + head) * 2 * page * stored_size<P>(H);
      if constexpr (std::is_same_v<P, int8_t>) {
        alignas(64) float rotated[kMostHeadDim], wide[kMostHeadDim];
        for (int64_t h = 0; h < half; ++h) {
          E first, second;  // rounded to the layer's dtype
          assign(first, value(key[h]) * c[h] - value(key[h + half]) * d[h]);
          assign(second, value(key[h + half]) * c[h] + value(key[h]) * d[h]);
          rotated[h] = value(first), rotated[h + half] = value(second);
        }
        for (int64_t h = 0; h < H; ++h) wide[h] = value(values[h]);
        int8::write_line(rotated, wide, H, page, offset, at);
      } else {
        P *keys_to = at + offset, *values_to = at + page * H + offset * H;
        for (int64_t h = 0; h < half; ++h) {
          assign(keys_to[h * page], value(key[h]) * c[h] - value(key[h + half]) * d[h]);
          assign(keys_to[(h + half) * page], value(key[h + half]) * c[h] + value(key[h]) * d[h]);
        }
        std::copy(values, values + H, values_to);
      }
    }
  }
}

// Runs `firsts` pieces of other work first, on all threads too.
template <typename E, typename P, typename First>
void attend(ffi::ThreadPool& threads, const Attention<E, P>& attention, int64_t firsts, const First& first) {
  const Sizes& size = attention.size;
  std::vector<Tile> tiles = attention.tiles();
  // Longest first, so that threads finish at about the same time.
  std::stable_sort(tiles.begin(), tiles.end(), [](const Tile& a, const Tile& b) { return a.cost > b.cost; });
  int64_t cost = 0;
  for (const Tile& tile : tiles) cost += tile.cost;
  const bool worth_it = cost * size.heads * size.head_dim * size.group > 200000;
  const int64_t pieces = static_cast<int64_t>(tiles.size()) * size.heads;
  const int64_t lanes = spread_over(threads, pieces, worth_it);
  const auto work = [&](int64_t i) {
    const int64_t next = std::min(i + lanes, pieces - 1);
    const auto after = attention.keys_of(tiles[next / size.heads], next % size.heads);
    attention.run(tiles[i / size.heads], i % size.heads, after);
  };
  spread(threads, firsts, first, pieces, work, worth_it);
  const int64_t width = size.heads * size.group * size.head_dim, used = attention.rows.starts[size.rows];
  std::memset(static_cast<void*>(attention.out + used * width), 0, (size.tokens - used) * width * sizeof(E));
}

// qkv [T, K, G + 2, H], cos and sin [T, H / 2], kv, block_tables, kv_lens, query_starts, slots [T] -> out, kv (the same
// memory).
ffi::Error fused(ffi::ThreadPool threads, ffi::AnyBuffer qkv, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                 ffi::AnyBuffer kv, ffi::Buffer<ffi::S32> tables, ffi::Buffer<ffi::S32> lengths,
                 ffi::Buffer<ffi::S32> starts, ffi::Buffer<ffi::S32> slots, ffi::Result<ffi::AnyBuffer> out,
                 ffi::Result<ffi::AnyBuffer> kv_out, float scale, float soft_cap, int64_t window) {
  const auto dtype = qkv.element_type();
  const bool is_int8 = kv.element_type() == ffi::S8;
  if ((dtype != ffi::F32 && dtype != ffi::BF16) || (!is_int8 && kv.element_type() != dtype))
    return ffi::Error(ffi::ErrorCode::kUnimplemented,
                      "paged attention: arrays must be float32 or bfloat16, all the same, and the pool these or int8");
  const int64_t heads = qkv.dimensions()[1], group = qkv.dimensions()[2] - 2, head_dim = qkv.dimensions()[3];
  const Sizes size{qkv.dimensions()[0], tables.dimensions()[0], tables.dimensions()[1], heads, group, head_dim,
                   (head_dim + kLanes - 1) / kLanes * kLanes, kv.dimensions()[3] / (head_dim + (is_int8 ? int8::kScaleBytes : 0)), kv.dimensions()[0],
                   scale, soft_cap, window};
  const Rows rows{tables.typed_data(), lengths.typed_data(), starts.typed_data()};
  if (std::string fault = fault_of(size, rows); !fault.empty()) return invalid(fault);
  const int64_t used = rows.starts[size.rows];
  for (int64_t token = 0; token < used; ++token) {
    const int32_t slot = slots.typed_data()[token];
    if (slot < 0 || slot >= size.num_blocks * size.page)
      return invalid("slot_mapping[" + std::to_string(token) + "]=" + std::to_string(slot));
  }
  if (kv_out->untyped_data() != kv.untyped_data())  // the caller does not donate the buffer
    std::memcpy(kv_out->untyped_data(), kv.untyped_data(), kv.size_bytes());
  const auto with = [&](auto element, auto stored) {
    using E = decltype(element);
    using P = decltype(stored);
    const E* from = static_cast<const E*>(qkv.untyped_data());
    P* pool = static_cast<P*>(kv_out->untyped_data());
    const auto write_piece = [&](int64_t piece) {
      write(size, from, cos.typed_data(), sin.typed_data(), slots.typed_data(), used, piece, pool);
    };
    attend(threads, Attention<E, P>{size, rows, from, cos.typed_data(), sin.typed_data(), pool,
                                 static_cast<E*>(out->untyped_data())},
           (used + kWritten - 1) / kWritten, write_piece);
    return ffi::Error::Success();
  };
  if (is_int8) return dtype == ffi::F32 ? with(float{}, int8_t{}) : with(Bf16{}, int8_t{});
  return dtype == ffi::F32 ? with(float{}, float{}) : with(Bf16{}, Bf16{});
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SluicePagedAttend, fused,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window"));

}  // namespace sluice
