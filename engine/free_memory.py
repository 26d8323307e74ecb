"""Reads how much memory of the host and of a GPU this process may still allocate. May not allocate any."""

import ctypes
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


def read_gpu_bytes(ordinal: int) -> tuple[int, int] | None:
  """Returns the free and all bytes of an NVIDIA GPU, as its driver counts them; None without the driver.

  Args:
    ordinal: number of the GPU among those that CUDA shows this process.
  """
  try:
    cuda = ctypes.CDLL("libcuda.so.1")
  except OSError:
    return None
  device, context = ctypes.c_int(), ctypes.c_void_p()
  free, total = ctypes.c_size_t(), ctypes.c_size_t()
  if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), ordinal):
    return None
  if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):  # the one that JAX uses
    return None
  try:
    if cuda.cuCtxPushCurrent_v2(context):
      return None
    failed = cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
  finally:
    cuda.cuDevicePrimaryCtxRelease_v2(device)
  return None if failed else (free.value, total.value)
