"""Makes the C library keep memory that steps on a CPU free. May not allocate."""

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # parameters of mallopt(3)
_KEPT_BYTES = 2**30
_HEAP_BYTES = 2**26  # the largest heap of a glibc thread other than the first


def keep_freed() -> None:
  """Makes glibc keep up to 1 GiB of freed memory; does nothing with other C libraries.

  XLA allocates a step's memory in every step: 49 MiB for 64 rows of 32,000 logits. For 32 MiB or more, glibc would map
  new pages and unmap them at the end, which costs a thousand page faults a step.
  """
  with contextlib.suppress(OSError, AttributeError):
    mallopt = ctypes.CDLL(None).mallopt
    for parameter, value in (
      (_M_MMAP_THRESHOLD, _KEPT_BYTES),
      (_M_TRIM_THRESHOLD, _KEPT_BYTES),
      (_M_TOP_PAD, _HEAP_BYTES),  # glibc would otherwise unmap a thread's empty heap regardless of the threshold
    ):
      mallopt(parameter, value)
