// An array of zeros whose memory the system provides at the first access. api.py documents the call.
//
// XLA's own zeros write each page, and for that the system clears each page first.
#include <cstdint>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "pallas_kernels/native.h"

namespace sluice {
namespace {

ffi::Error zeros(ffi::Result<ffi::AnyBuffer> out) {
  char* const begin = static_cast<char*>(out->untyped_data());
  char* const end = begin + out->size_bytes();
#if defined(__linux__)
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  char* const first = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page);
  char* const last = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(end) / page * page);
  // Dropped pages of private memory, such as an allocator's, read as zeros: madvise(2). Locked ones stay.
  if (first < last && madvise(first, static_cast<size_t>(last - first), MADV_DONTNEED) == 0) {
    std::memset(begin, 0, static_cast<size_t>(first - begin));
    std::memset(last, 0, static_cast<size_t>(end - last));
    return ffi::Error::Success();
  }
#endif
  std::memset(begin, 0, static_cast<size_t>(end - begin));
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SluiceZeros, zeros, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());

}  // namespace sluice
