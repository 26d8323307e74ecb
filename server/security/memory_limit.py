"""Refuses new work while the server's resident memory exceeds a limit. Stops no accepted work.

Otherwise the kernel would kill the process and every request with it. Memory that the C library keeps after it was
freed is no reason to refuse: the server first returns that to the system.
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
  """Makes glibc serve all threads from two heaps, unless MALLOC_ARENA_MAX is set. Other C libraries stay as they are.

  By default glibc makes a heap for each thread, up to eight a core, and each keeps the memory that its largest burst
  has freed. Call it before the first thread starts.
  """
  if "MALLOC_ARENA_MAX" not in os.environ:
    with contextlib.suppress(OSError, AttributeError):
      ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)


class MemoryLimit:
  """The memory limit of all processes of a server. Any thread may check it."""

  def __init__(self, max_resident_mb: int, others: Callable[[], Sequence[int]] = tuple):
    """Sets the limit.

    Args:
      max_resident_mb: MiB of resident memory; 0 is no limit.
      others: ids of the server's other processes; shared pages count once for each process.

    Raises:
      ConfigError: this system does not report resident memory.
    """
    self._max_resident_mb = max_resident_mb
    self._others = others
    self._given_back = -_RETRY_S  # when this process last returned memory, by the monotonic clock
    statm = _STATM.format("self")
    if max_resident_mb and not os.path.isfile(statm):
      raise ConfigError(
        f"max_resident_mb={max_resident_mb} needs {statm}, which this system has not; leave --max_resident_mb out"
      )

  def check_memory(self) -> None:
    """Raises MemoryPressure above the limit; costs about 10 us for each process.

    Above the limit, this process first returns freed memory to the system, at most once in the retry time that clients
    get.
    """
    if not self._max_resident_mb:
      return
    resident_mb, now = self._resident_mb(), time.monotonic()
    if resident_mb >= self._max_resident_mb and now >= self._given_back + _RETRY_S:
      self._given_back = now
      # malloc_trim takes about 0.1 s for a GiB, and other threads may wait for it.
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
      with contextlib.suppress(OSError), open(_STATM.format(pid), "rb") as statm:  # another process may have ended
        pages += int(statm.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20
