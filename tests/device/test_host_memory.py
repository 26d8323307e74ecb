"""Freed memory is kept: the next step's does not come from the system again, in the first thread or in another."""

import platform
import subprocess
import sys

import pytest

from tools.measure import ROOT

_PROGRAM = """
import ctypes, resource, threading
from engine.device.host_memory import keep_freed

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
SIZE = 49 * 2**20

def step():
  memory = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(SIZE)))
  libc.memset(memory, 1, ctypes.c_size_t(SIZE))
  libc.free(memory)

def faults():
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  for _ in range(3):
    step()
  print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

def both():
  step()
  faults()
  thread = threading.Thread(target=lambda: (step(), faults()))
  thread.start()
  thread.join()

both()
keep_freed()
both()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_step_touches_the_memory_of_the_one_before() -> None:
  done = subprocess.run([sys.executable, "-c", _PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
  pages = 49 * 2**20 // 4096
  *before, first, other = map(int, done.stdout.split())
  assert len(before) == 2 and min(before) > pages, "glibc keeps it by itself; is this still needed?"
  assert max(first, other) < pages // 10
