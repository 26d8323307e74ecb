// Applies each row's adjustments to x [S, V], bit for bit as reference.py does. api.py documents the call.
//
// XLA would make one pass for each kind over all rows, padding included. It would also compile these passes longer than
// all layers of a step.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "pallas_kernels/native.h"

namespace sluice {
namespace {

constexpr float kForbidden = -std::numeric_limits<float>::infinity();
constexpr float kHuge = 1e30f;
constexpr int32_t kCount = (1 << 30) - 1;  // the bits of a history entry that count outputs
enum Kind { kMask = 1, kBias = 2, kSuppress = 4, kPenalty = 8 };  // in the reference's order; see `adjust_row`
enum Param { kKinds, kSlot, kMaskLine, kRepetition, kFrequency, kPresence };  // rows of `params`, floats as bits

float as_float(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// x - a * b, rounded once where the processor can, as XLA rounds it.
inline float less(float x, float a, float b) {
#if defined(__FMA__)
  return __builtin_fmaf(-a, b, x);
#else
  return x - a * b;
#endif
}

struct Penalties {
  float repetition, frequency, presence, divided;
};

// Adds the bias, if any, then applies penalties; a token that the bias forbids stays forbidden. Each choice computes
// both of its sides, so that the compiler vectorizes a loop of these.
template <bool kBiased>
inline float penalize_token(float from, float bias, int32_t past, const Penalties& by) {
  const int32_t count = past & kCount;
  const float x = kBiased ? from + bias : from;
  const float lower = x * by.divided, higher = x * by.repetition, repeated = x > 0.0f ? lower : higher;
  const float y = less(past == 0 ? x : repeated, by.frequency, static_cast<float>(count)), present = y - by.presence;
  const float held = std::min(std::max(count > 0 ? present : y, -kHuge), kHuge);
  return kBiased && x == kForbidden ? kForbidden : held;
}

// `drafts` are d tokens that count as outputs besides those of `history`, which does not change.
template <bool kBiased>
void penalize(const float* from, int64_t V, const float* bias, const int32_t* history, const Penalties& penalties,
              const int32_t* drafts, int64_t d, float* to) {
  const Penalties by = penalties;
  for (int64_t i = 0; i < V; ++i) to[i] = penalize_token<kBiased>(from[i], kBiased ? bias[i] : 0.0f, history[i], by);
  for (int64_t j = 0; j < d; ++j) {
    const int64_t i = drafts[j];
    if (i < 0 || i >= V) continue;
    const int32_t more = static_cast<int32_t>(std::count(drafts, drafts + d, drafts[j]));
    to[i] = penalize_token<kBiased>(from[i], kBiased ? bias[i] : 0.0f, history[i] + more, by);
  }
}

void mask(float* x, int64_t V, const int32_t* words) {
  for (int64_t i = 0; i < V; i += 32) {
    const uint32_t word = static_cast<uint32_t>(words[i / 32]);
    const int64_t n = std::min<int64_t>(32, V - i);
    for (int64_t j = 0; j < n; ++j) x[i + j] = (word >> j) & 1 ? x[i + j] : kForbidden;
  }
}

void suppress(float* x, int64_t V, const int32_t* ids, int64_t n, const float* before) {
  for (int64_t i = 0; i < n; ++i)
    if (ids[i] >= 0 && ids[i] < V) x[ids[i]] = kForbidden;
  bool left = false;
  for (int64_t i = 0; i < V; ++i) left |= x[i] > kForbidden;
  if (!left) std::copy(before, before + V, x);
}

struct Slots {
  const int32_t* history;
  const float* bias;
  const int32_t* mask;
  int64_t number, masks, words;
};

void adjust_row(const float* x, int64_t V, const int32_t* params, int64_t S, const int32_t* ids, int64_t n,
                const int32_t* drafts, int64_t d, const Slots& slots, float* to) {
  const int64_t slot = std::clamp<int64_t>(params[kSlot * S], 0, slots.number - 1);
  const int32_t kinds = params[kKinds * S];
  const float* bias = slots.bias + slot * V;
  // A token at -inf stays at -inf after any sum, so masks and suppression may come last here.
  if (kinds & kPenalty) {
    const auto all = kinds & kBias ? penalize<true> : penalize<false>;
    const float repetition = as_float(params[kRepetition * S]);
    const Penalties by{repetition, as_float(params[kFrequency * S]), as_float(params[kPresence * S]),
                       1.0f / repetition};  // XLA too divides a row by a scalar this way
    all(x, V, bias, slots.history + slot * V, by, drafts, d, to);
  } else if (kinds & kBias) {
    for (int64_t i = 0; i < V; ++i) to[i] = x[i] + bias[i];
  } else {
    std::copy(x, x + V, to);
  }
  const int64_t line = std::clamp<int64_t>(params[kMaskLine * S], 0, slots.masks - 1);
  if (kinds & kMask) mask(to, V, slots.mask + line * slots.words);
  if (kinds & kSuppress) {
    static thread_local std::vector<float> before;  // reused for all rows of a thread
    before.assign(to, to + V);
    suppress(to, V, ids, n, before.data());
  }
}

// x [S, V], params [6, S], ids [S, n], drafts [S, d], the slots' history and bias, masks, rows in use [1] or [0] for all
// -> [S, V].
ffi::Error adjust(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> params,
                  ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::S32> drafts, ffi::Buffer<ffi::S32> history,
                  ffi::Buffer<ffi::F32> bias, ffi::Buffer<ffi::S32> mask, ffi::Buffer<ffi::S32> used,
                  ffi::Result<ffi::Buffer<ffi::F32>> y) {
  const int64_t S = x.dimensions()[0], V = x.dimensions()[1], n = ids.dimensions()[1], d = drafts.dimensions()[1];
  const int64_t rows = used.dimensions()[0] ? used.typed_data()[0] : S;
  if (rows < 0 || rows > S)
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      "adjust: " + std::to_string(rows) + " rows in use of " + std::to_string(S));
  const Slots slots{history.typed_data(),    bias.typed_data(),    mask.typed_data(),
                    history.dimensions()[0], mask.dimensions()[0], mask.dimensions()[1]};
  const float* from = x.typed_data();
  const int32_t *params_from = params.typed_data(), *ids_from = ids.typed_data(), *drafts_from = drafts.typed_data();
  float* to = y->typed_data();
  spread(threads, rows, rows * V > 100000, [=, &slots](int64_t s) {
    adjust_row(from + s * V, V, params_from + s, S, ids_from + s * n, n, drafts_from + s * d, d, slots, to + s * V);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SluiceAdjust, adjust,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

}  // namespace sluice
