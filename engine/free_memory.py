"""Reads how much memory this process may still allocate. May not allocate any."""

import pathlib

_MEMINFO = pathlib.Path("/proc/meminfo")
_CGROUP = pathlib.Path("/sys/fs/cgroup")  # cgroup of this process, as a container sees it


def read_free_bytes() -> int | None:
  """Returns the bytes that this process may still allocate, including swappable memory; None if unknown."""
  try:
    lines = _MEMINFO.read_text().splitlines()
    numbers = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    free = numbers["MemAvailable"] + numbers["SwapFree"]
  except (OSError, ValueError, LookupError):
    return None
  try:
    limit = int((_CGROUP / "memory.max").read_text())  # ValueError: "max"
    cached = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    used = int((_CGROUP / "memory.current").read_text()) - int(cached["inactive_file"])
    free = min(free, limit - used)
  except (OSError, ValueError, LookupError):
    pass
  return max(free, 0)
