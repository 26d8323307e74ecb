// Samples a token for each row of x [S, V] by temperature, min_p, top_k and top_p, as reference.py does. api.py
// documents the call.
//
// XLA would make one pass over all rows, padding included, for every bit of a threshold. It would also compile these
// passes longer than the rest of a step.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "pallas_kernels/native.h"

namespace sluice {
namespace {

constexpr int64_t kChunk = 128;              // tokens a chunk in the first level of the search
constexpr float kNegligible = -110.0f;       // exp of this is 0
constexpr int32_t kNoLimit = 1 << 30;        // of top_k
enum Input { kTemperature, kTopP, kMinP, kTopK, kSeed, kPosition, kNumInputs };  // rows of `inputs`, floats as bits

float as_float(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// The float below 0 with rank `key`: adjacent keys are adjacent floats.
float unordered(int32_t key) { return as_float(key < 0 ? key ^ 0x7fffffff : key); }

// Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror and Shaw, SC 2011): the first word, as in jax.random.fold_in.
uint32_t hash(uint32_t seed, uint32_t position) {
  constexpr int kTurns[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {0, seed, seed ^ 0x1bd11bdau};
  uint32_t a = keys[0], b = position + keys[1];
  for (uint32_t group = 0; group < 5; ++group) {
    for (int turn : kTurns[group % 2]) {
      a += b;
      b = (b << turn) | (b >> (32 - turn));
      b ^= a;
    }
    a += keys[(group + 1) % 3];
    b += keys[(group + 2) % 3] + group + 1;
  }
  return a;
}

// The tokens among which a threshold search looks; n is a multiple of kLanes.
struct Tokens {
  const float *z, *weights;
  int64_t n;
};

struct Mass {
  float weight, count;
};

// The mass of {z >= least}, each token counting as its weight or as 1.
template <bool kAsOne>
Mass mass(const Tokens& tokens, float least) {
  Vec weight{}, count{};
  for (int64_t i = 0; i < tokens.n; i += kLanes) {
    const Vec z = load(tokens.z + i);
    if (!kAsOne) weight += z >= least ? load(tokens.weights + i) : Vec{};
    count += z >= least ? all(1.0f) : Vec{};
  }
  const float counted = sum_of(count);
  return {kAsOne ? counted : sum_of(weight), counted};
}

// Copies the tokens with low <= z < high, in order, to z and weights, which may alias the source.
Tokens between(const Tokens& tokens, float low, float high, float* z, float* weights) {
  int64_t n = 0;
#if defined(__AVX512F__)
  for (int64_t i = 0; i < tokens.n; i += kLanes) {
    const __m512 at = _mm512_loadu_ps(tokens.z + i), of = _mm512_loadu_ps(tokens.weights + i);
    const __mmask16 is = _mm512_cmp_ps_mask(at, _mm512_set1_ps(low), _CMP_GE_OQ) &
                         _mm512_cmp_ps_mask(at, _mm512_set1_ps(high), _CMP_LT_OQ);
    _mm512_storeu_ps(z + n, _mm512_maskz_compress_ps(is, at));
    _mm512_storeu_ps(weights + n, _mm512_maskz_compress_ps(is, of));
    n += __builtin_popcount(is);
  }
#else
  for (int64_t i = 0; i < tokens.n; ++i) {
    const float at = tokens.z[i];
    z[n] = at, weights[n] = tokens.weights[i];
    n += (at >= low) & (at < high);
  }
#endif
  for (; n % kLanes; ++n) z[n] = -std::numeric_limits<float>::infinity(), weights[n] = 0.0f;
  return {z, weights, n};
}

// The largest t for which the mass of {z >= t} reaches `need`, else kNegligible; found bit by bit. When at most a
// quarter of the tokens can still be t, the search drops the others and copies these to z and weights.
template <bool kAsOne>
float threshold(Tokens open, float need, float* z, float* weights) {
  int32_t bits;
  const float most = -kNegligible;
  std::memcpy(&bits, &most, sizeof bits);
  int32_t low = -(bits + 1);
  float high = std::numeric_limits<float>::infinity();
  float dropped = 0.0f;                         // weight of the dropped tokens, all of them above t
  float from_low = static_cast<float>(open.n);  // number of open tokens at `low` or above
  Mass from_high{};                             // mass of open tokens at `high` or above
  for (int shift = 30; shift >= 0; --shift) {
    const int64_t tried = int64_t{low} + (int64_t{1} << shift);
    if (tried > 0) continue;
    const float t = unordered(static_cast<int32_t>(tried));
    const Mass here = mass<kAsOne>(open, t);
    if (dropped + here.weight >= need) low = static_cast<int32_t>(tried), from_low = here.count;
    else high = t, from_high = here;
    if (4 * (from_low - from_high.count) > static_cast<float>(open.n)) continue;
    dropped += from_high.weight;
    open = between(open, unordered(low), high, z, weights);
    from_low = static_cast<float>(open.n), from_high = {};
  }
  return unordered(low);
}

// The first of n masses at which their sum passes `wanted`, or the last nonzero one. Leaves the remainder in `wanted`.
int64_t passes(const float* masses, int64_t n, float& wanted) {
  float end = 0.0f, before = 0.0f;
  int64_t last = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!(masses[i] > 0.0f)) continue;
    before = end, end += masses[i], last = i;
    if (end > wanted) break;
  }
  wanted -= before;
  return last;
}

int32_t sample(const float* x, int64_t V, const int32_t* inputs, int64_t S) {
  const auto number = [=](Input which) { return as_float(inputs[which * S]); };
  const int64_t padded = (V + kChunk - 1) / kChunk * kChunk;
  static thread_local std::vector<float> kept;  // the buffers below, reused by the thread in every step
  kept.resize(4 * padded + padded / kChunk);
  float *z = kept.data(), *weights = z + padded, *some_z = weights + padded, *some_weights = some_z + padded;
  float* masses = some_weights + padded;

  constexpr float kLeast = -std::numeric_limits<float>::infinity();
  std::copy(x, x + V, z);
  std::fill(z + V, z + padded, kLeast);
  Vec most = all(kLeast);
  for (int64_t i = 0; i < padded; i += kLanes) most = load(z + i) > most ? load(z + i) : most;
  const Vec top = all(max_of(most)), temperature = all(number(kTemperature));
  for (int64_t i = 0; i < padded; i += kLanes) {
    store(z + i, (load(z + i) - top) / temperature);
    store(weights + i, exp_of_negative(load(z + i)));
  }

  float least = std::log(number(kMinP));
  // Each threshold search sees only the tokens that earlier thresholds leave.
  const auto left = [&] {
    const Tokens every{z, weights, padded};
    return least > kLeast ? between(every, least, -kLeast, some_z, some_weights) : every;
  };
  if (inputs[kTopK * S] < kNoLimit) {
    const float need = static_cast<float>(inputs[kTopK * S]);
    least = std::max(least, threshold<true>(left(), need, some_z, some_weights));
  }
  if (number(kTopP) < 1.0f) {
    const Tokens some = left();
    const float need = number(kTopP) * mass<false>(some, kLeast).weight;
    least = std::max(least, threshold<false>(some, need, some_z, some_weights));
  }

  for (int64_t chunk = 0; chunk < padded / kChunk; ++chunk) {
    Vec sum{};
    for (int64_t i = chunk * kChunk; i < (chunk + 1) * kChunk; i += kLanes) {
      const Vec left = load(z + i) >= least ? load(weights + i) : Vec{};
      store(weights + i, left);
      sum += left;
    }
    masses[chunk] = sum_of(sum);
  }
  float whole = 0.0f;
  for (int64_t chunk = 0; chunk < padded / kChunk; ++chunk) whole += masses[chunk];
  const uint32_t bits = hash(inputs[kSeed * S], inputs[kPosition * S]);
  float wanted = static_cast<float>(bits >> 8) * 0x1p-24f * whole;
  const int64_t chunk = passes(masses, padded / kChunk, wanted);
  const int64_t token = chunk * kChunk + passes(weights + chunk * kChunk, kChunk, wanted);
  return static_cast<int32_t>(std::min(token, V - 1));
}

// x [S, V], inputs [6, S], rows in use [1] or [0] for all -> tokens [S].
ffi::Error sample_tokens(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> inputs,
                         ffi::Buffer<ffi::S32> used, ffi::Result<ffi::Buffer<ffi::S32>> tokens) {
  const int64_t S = x.dimensions()[0], V = x.dimensions()[1];
  const int64_t rows = used.dimensions()[0] ? used.typed_data()[0] : S;
  if (rows < 0 || rows > S)
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      "sampling: " + std::to_string(rows) + " rows in use of " + std::to_string(S));
  const float* from = x.typed_data();
  const int32_t* inputs_from = inputs.typed_data();
  int32_t* to = tokens->typed_data();
  std::fill(to, to + S, 0);
  spread(threads, rows, rows * V > 10000, [=](int64_t s) {
    if (as_float(inputs_from[kTemperature * S + s]) > 0.0f) to[s] = sample(from + s * V, V, inputs_from + s, S);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SluiceSampling, sample_tokens,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>());

}  // namespace sluice
