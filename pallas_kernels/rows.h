// Prepares a row for a product: converts it to f32, through a norm or SwiGLU. Shared by the kernels that multiply.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "pallas_kernels/native.h"

namespace sluice {

// Converts a row to f32, through the norm if it has a scale, with the rounding of the model's dtype.
template <typename X>
void prepare(const X* x, int64_t D, const X* scale, float epsilon, float* to) {
  if (scale == nullptr) {
    for (int64_t k = 0; k < D; ++k) to[k] = value(x[k]);
    return;
  }
  Vec squares{};
  int64_t k = 0;
  for (; k + kLanes <= D; k += kLanes) {
    const Vec v = load(x + k);
    squares += v * v;
  }
  float sum = sum_of(squares);
  for (; k < D; ++k) sum += value(x[k]) * value(x[k]);
  const float factor = 1.0f / std::sqrt(sum / static_cast<float>(D) + epsilon);
  for (k = 0; k < D; ++k) {
    X normed, scaled;
    assign(normed, value(x[k]) * factor);
    assign(scaled, value(normed) * value(scale[k]));
    to[k] = value(scaled);
  }
}

// Computes a row of SwiGLU (arXiv:2002.05202) from gates [D] and then values [D]: g / (1 + e^-g) * v.
inline Vec silu(Vec g) {
  const Vec e = exp_of_negative(g < 0.0f ? g : -g);
  return g * ((g < 0.0f ? e : all(1.0f)) / (1.0f + e));
}

template <typename X>
void prepare_gated(const X* x, int64_t D, float* to) {
  int64_t k = 0;
  if constexpr (std::is_same_v<X, float>) {
    for (; k + kLanes <= D; k += kLanes) store(to + k, silu(load(x + k)) * load(x + D + k));
  }
  for (; k < D; k += kLanes) {
    float gates[kLanes] = {}, made[kLanes];
    const int64_t count = std::min<int64_t>(kLanes, D - k);
    for (int64_t i = 0; i < count; ++i) gates[i] = value(x[k + i]);
    store(made, silu(load(gates)));
    for (int64_t i = 0; i < count; ++i) {
      X gate, gated;
      assign(gate, made[i]);
      assign(gated, value(gate) * value(x[D + k + i]));
      to[k + i] = value(gated);
    }
  }
}

// Prepares row m of x [M, D], or gated [M, 2 D], for the product.
template <typename X>
void prepare_row(const X* x, int64_t m, int64_t D, const X* scale, float epsilon, bool gated, float* to) {
  if (gated) {
    prepare_gated(x + 2 * m * D, D, to);
  } else {
    prepare(x + m * D, D, scale, epsilon, to);
  }
}

}  // namespace sluice
