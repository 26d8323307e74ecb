"""Says no before the system's memory is gone: the server's size against a limit. Frees nothing, and stops nothing.

What was accepted goes on; only new work is refused. The kernel's own answer would be to kill the process, and every
request with it.
"""

from collections.abc import Callable, Sequence
import contextlib
import os
import pathlib

from engine.errors import ConfigError
from server.errors import MemoryPressure

_STATM = pathlib.Path("/proc/self/statm")  # in pages: size, resident, ...
_STATM_OF = "/proc/{}/statm"
_RETRY_S = 5.0


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
    if max_resident_mb and not _STATM.is_file():
      raise ConfigError(
        f"max_resident_mb={max_resident_mb} needs {_STATM}, which this system has not; leave --max_resident_mb out"
      )

  def check(self) -> None:
    """Raises MemoryPressure above the limit; costs about 10 us a process where there is one."""
    if not self._max_resident_mb:
      return
    pages = _resident_pages(_STATM)
    for pid in self._others():
      with contextlib.suppress(OSError):  # it has ended
        pages += _resident_pages(pathlib.Path(_STATM_OF.format(pid)))
    resident_mb = pages * os.sysconf("SC_PAGE_SIZE") >> 20
    if resident_mb >= self._max_resident_mb:
      raise MemoryPressure(
        f"the server holds {resident_mb} MiB of memory, the limit is {self._max_resident_mb}; try again in "
        f"{_RETRY_S:.1f} s, or raise --max_resident_mb",
        _RETRY_S,
      )


def _resident_pages(statm: pathlib.Path) -> int:
  return int(statm.read_bytes().split()[1])
