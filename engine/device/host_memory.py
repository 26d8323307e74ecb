"""How the C library keeps memory that steps on a CPU take and give back. Decides nothing about what they need."""

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)
_KEPT_BYTES = 2**30
_HEAP_BYTES = 2**26  # the most that glibc has for a thread other than the first, in one piece


def keep_freed() -> None:
  """Asks glibc to keep up to 1 GiB of freed memory; another C library is left alone.

  XLA allocates what a step needs anew at each: 49 MiB for 64 rows of 32,000 logits. From 32 MiB on glibc would fetch
  that from the system, page by page as it is touched, and give it back at the end: a thousand faults a step.
  """
  with contextlib.suppress(OSError, AttributeError):
    mallopt = ctypes.CDLL(None).mallopt
    for parameter, value in (
      (_M_MMAP_THRESHOLD, _KEPT_BYTES),
      (_M_TRIM_THRESHOLD, _KEPT_BYTES),
      (_M_TOP_PAD, _HEAP_BYTES),  # a thread's heap that is empty is else given back whatever the threshold
    ):
      mallopt(parameter, value)
