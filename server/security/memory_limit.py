"""Says no before the system's memory is gone: the server's size against a limit. Stops nothing.

What was accepted goes on; only new work is refused. The kernel's own answer would be to kill the process, and every
request with it. What the C library keeps of memory that was freed is no reason to refuse: it is given back first.
"""

from collections.abc import Callable, Sequence
import contextlib
import ctypes
import os
import time

from engine.errors import ConfigError
from server.errors import MemoryPressure

_STATM = "/proc/{}/statm"  # in pages: size, resident, ...
_RETRY_S = 5.0
_M_ARENA_MAX = -8  # of mallopt(3)
_ARENAS = 2


def limit_malloc_arenas() -> None:
  """Asks glibc to serve all threads from two heaps; another C library, and who has set MALLOC_ARENA_MAX, is left alone.

  By itself it makes one a thread, up to eight a core, and each keeps what the largest burst that met it has freed. Must
  come before threads do.
  """
  if "MALLOC_ARENA_MAX" not in os.environ:
    with contextlib.suppress(OSError, AttributeError):
      ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)


class MemoryLimit:
  """Of all processes of a server. Any thread may ask."""

  def __init__(self, max_resident_mb: int, others: Callable[[], Sequence[int]] = tuple):
    """What to compare.

    Args:
      max_resident_mb: MiB of resident memory; 0 is no limit.
      others: the ids of the server's other processes; pages that they share count once for each.

    Raises:
      ConfigError: this system does not tell.
    """
    self._max_resident_mb = max_resident_mb
    self._others = others
    self._given_back = -_RETRY_S  # when this process last was asked to, by the monotonic clock
    statm = _STATM.format("self")
    if max_resident_mb and not os.path.isfile(statm):
      raise ConfigError(
        f"max_resident_mb={max_resident_mb} needs {statm}, which this system has not; leave --max_resident_mb out"
      )

  def check_memory(self) -> None:
    """Raises MemoryPressure above the limit; costs about 10 us a process where there is one.

    Above it, this process first gives back what it has freed, but once in as long as clients are told to wait.
    """
    if not self._max_resident_mb:
      return
    resident_mb, now = self._resident_mb(), time.monotonic()
    if resident_mb >= self._max_resident_mb and now >= self._given_back + _RETRY_S:
      self._given_back = now
      # glibc returns what it keeps of freed memory: some 0.1 s a GiB, and other threads may wait for it.
      with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
      resident_mb = self._resident_mb()
    if resident_mb >= self._max_resident_mb:
      raise MemoryPressure(
        f"the server holds {resident_mb} MiB of memory, the limit is {self._max_resident_mb}",
        _RETRY_S,
        ", or raise --max_resident_mb",
      )

  def _resident_mb(self) -> int:
    pages = 0
    for pid in ("self", *self._others()):
      with contextlib.suppress(OSError), open(_STATM.format(pid), "rb") as statm:  # another may have ended
        pages += int(statm.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20
