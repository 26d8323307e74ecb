"""What the C library keeps: few heaps, and given back before anybody is refused. Each in a process of its own."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of another C library nothing is asked")

_FREED = """
import ctypes
from engine.device.host_memory import keep_freed
from server.security import memory_limit
keep_freed()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
limit = memory_limit.MemoryLimit(128 + memory_limit.MemoryLimit(1)._resident_mb())
blocks = [libc.malloc(1 << 16) for _ in range(4096)]
for block in blocks:
  ctypes.memset(ctypes.c_void_p(block), 1, 1 << 16)
try:
  limit.check_memory()
except memory_limit.MemoryPressure:
  print("refused")
limit._given_back = -100.0  # as if some time had passed
for block in blocks:
  libc.free(ctypes.c_void_p(block))
print("kept" if limit._resident_mb() > limit._max_resident_mb else "gone")
limit.check_memory()
print("accepted")
"""


@pytest.mark.catalogue("C8")
def test_memory_that_is_only_kept_refuses_nobody():
  """256 MiB in use are too much; freed, glibc keeps them, and gives them back before anybody is refused."""
  said = subprocess.run([sys.executable, "-c", _FREED], capture_output=True, text=True, timeout=60, check=False)
  assert said.stdout.split() == ["refused", "kept", "accepted"], said.stderr


_ARENAS = """
import ctypes, re, sys, threading
from server.security import memory_limit
memory_limit.limit_malloc_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
all_here = threading.Barrier(8)
def allocate():
  all_here.wait()
  libc.malloc(1000)
  all_here.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
file = libc.fopen(sys.argv[1].encode(), b"w")
libc.malloc_info(0, ctypes.c_void_p(file))
libc.fclose(ctypes.c_void_p(file))
print(len(re.findall("<heap nr=", open(sys.argv[1]).read())))
"""


@pytest.mark.parametrize(("asked", "most"), [(None, 2), ("1", 1)])
def test_threads_share_few_heaps(asked, most, tmp_path):
  """Eight threads that allocate at once; what the operator has set is left alone."""
  environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
  if asked is not None:
    environment["MALLOC_ARENA_MAX"] = asked
  command = [sys.executable, "-c", _ARENAS, str(tmp_path / "heaps.xml")]
  said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
  assert said.stdout.strip() == str(most), said.stderr
