// The lowest index of the largest number of each row of x [S, V], and whether the row is finite. api.py documents the
// call.
//
// On a CPU, XLA makes three passes over all rows, padding included, some of them on one thread.
#include <algorithm>
#include <limits>
#include <string>

#include "pallas_kernels/native.h"

namespace sluice {
namespace {

void scan_row(const float* x, int64_t V, int32_t* best, bool* finite) {
  constexpr float kLeast = -std::numeric_limits<float>::infinity();
  IntVec index = lane_numbers(), at = index;
  Vec most = all(kLeast), zeros{};  // zeros: the sum of x * 0, which is NaN if an x is Inf or NaN
  int64_t i = 0;
  for (; i + kLanes <= V; i += kLanes, index += kLanes) {
    const Vec v = load(x + i);
    const IntVec more = v > most;
    most = more ? v : most;
    at = more ? index : at;
    zeros += v * 0.0f;
  }
  float top = kLeast, zero = 0.0f;
  int32_t where = 0;
  for (int j = 0; j < kLanes && V >= kLanes; ++j) {
    if (most[j] > top || (most[j] == top && at[j] < where)) top = most[j], where = at[j];
    zero += zeros[j];
  }
  for (; i < V; ++i) {
    if (x[i] > top) top = x[i], where = static_cast<int32_t>(i);
    zero += x[i] * 0.0f;
  }
  *best = where;
  *finite = zero == 0.0f;
}

// x [S, V], rows in use [1] or [0] for all -> best [S], finite [S].
ffi::Error argmax(ffi::ThreadPool threads, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> used,
                  ffi::Result<ffi::Buffer<ffi::S32>> best, ffi::Result<ffi::Buffer<ffi::PRED>> finite) {
  const int64_t S = x.dimensions()[0], V = x.dimensions()[1];
  const int64_t rows = used.dimensions()[0] ? used.typed_data()[0] : S;
  if (rows < 0 || rows > S)
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      "argmax: " + std::to_string(rows) + " rows in use of " + std::to_string(S));
  const float* from = x.typed_data();
  int32_t* best_to = best->typed_data();
  bool* finite_to = finite->typed_data();
  std::fill(best_to + rows, best_to + S, 0);
  std::fill(finite_to + rows, finite_to + S, true);
  spread(threads, rows, rows * V > 100000, [=](int64_t s) { scan_row(from + s * V, V, best_to + s, finite_to + s); });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SluiceArgmax, argmax,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::PRED>>());

}  // namespace sluice
