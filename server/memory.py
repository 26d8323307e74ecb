"""Says no before the system's memory is gone: the process's own size against a limit. Frees nothing, and stops nothing.

What was accepted goes on; only new work is refused. The kernel's own answer would be to kill the process, and every
request with it.
"""

import os
import pathlib

from engine.errors import ConfigError
from server.errors import MemoryPressure

_STATM = pathlib.Path("/proc/self/statm")  # in pages: size, resident, ...
_RETRY_S = 5.0


class MemoryLimit:
  """Of this process. Any thread may ask."""

  def __init__(self, max_resident_mb: int):
    """Args: max_resident_mb: MiB of resident memory; 0 is no limit.

    Raises:
      ConfigError: this system does not tell.
    """
    self._max_resident_mb = max_resident_mb
    if max_resident_mb and not _STATM.is_file():
      raise ConfigError(
        f"max_resident_mb={max_resident_mb} needs {_STATM}, which this system has not; leave --max_resident_mb out"
      )

  def check(self) -> None:
    """Raises MemoryPressure above the limit; costs about 10 us where there is one."""
    if not self._max_resident_mb:
      return
    resident_mb = int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    if resident_mb >= self._max_resident_mb:
      raise MemoryPressure(
        f"the server holds {resident_mb} MiB of memory, the limit is {self._max_resident_mb}; try again in "
        f"{_RETRY_S:.1f} s, or raise --max_resident_mb",
        _RETRY_S,
      )
