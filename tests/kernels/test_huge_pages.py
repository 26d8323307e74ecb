"""Memory on huge pages, and memory that a thread touches ahead: zeros that nobody shares, and no more than is used."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
import pathlib
import sys
import threading

import numpy as np
import pytest

from pallas_kernels import huge_pages

MIB = 2**20


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
  yield
  huge_pages.end_fetch()


def take(num_bytes: int) -> np.ndarray:
  memory, begin = huge_pages.take_zeros(num_bytes)
  found = np.frombuffer(memory, np.uint8, num_bytes, begin)
  assert found.ctypes.data % 4096 == 0
  return found


def wait_until_touched(num_bytes: int) -> None:
  while True:
    with huge_pages.hold_fetch() as spare:
      if spare >= num_bytes:
        return
    threading.Event().wait(0.01)


def resident_bytes() -> int:
  """Returns this process's anonymous memory."""
  lines = pathlib.Path("/proc/self/status").read_text().splitlines()
  return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.parametrize("ahead", [0, 3 * MIB, 64 * MIB])
def test_parts_are_zeros_of_their_own(ahead: int) -> None:
  """Some lie in memory that is touched ahead, and others have no place there."""
  if ahead:
    huge_pages.fetch_ahead(ahead)
  sizes = (2 * MIB, 5 * MIB + 12345, 1, 4096, 40 * MIB, 20 * MIB)
  parts = [take(size) for size in sizes]
  for number, part in enumerate(parts, 1):
    assert not part.any()
    part[:] = number
  huge_pages.end_fetch()
  for number, part in enumerate(parts, 1):
    assert (part == number).all()


@pytest.mark.parametrize("ahead", [0, 64 * MIB])
def test_threads_take_different_parts(ahead: int) -> None:
  """Two threads pack weights at a time."""
  if ahead:
    huge_pages.fetch_ahead(ahead)
  interval = sys.getswitchinterval()
  sys.setswitchinterval(1e-6)
  try:
    with ThreadPoolExecutor(4) as threads:
      parts = list(threads.map(take, [4096] * 4000))
  finally:
    sys.setswitchinterval(interval)
  assert len({part.ctypes.data for part in parts}) == len(parts)


def test_takers_share_pages(monkeypatch: pytest.MonkeyPatch) -> None:
  """So no part ends on an ordinary page, which a step of one row reads more slowly."""
  monkeypatch.setattr(huge_pages, "_block", None)  # that of other tests' weights
  whole = take(64 * MIB)  # leaves nothing of its block
  first, second = take(3 * MIB + 1), take(5 * MIB)
  third = take(60 * MIB)  # has no place beside them
  fourth = take(MIB)
  begin = first.ctypes.data
  assert begin % huge_pages.HUGE_PAGE == 0
  assert second.ctypes.data == begin + 3 * MIB + 4096
  assert fourth.ctypes.data == second.ctypes.data + 5 * MIB
  assert third.ctypes.data % huge_pages.HUGE_PAGE == 0
  assert not whole.any()


def test_shared_memory_returns_to_the_system_when_nobody_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(huge_pages, "_block", None)
  before = resident_bytes()
  parts = [take(size * MIB) for size in (10, 20, 30)]
  for part in parts:
    part[:] = 1
  assert resident_bytes() - before > 50 * MIB
  del parts, part
  assert resident_bytes() - before < 10 * MIB
  assert not take(10 * MIB).any()


def test_memory_is_touched_before_it_is_taken() -> None:
  huge_pages.fetch_ahead(48 * MIB)
  wait_until_touched(48 * MIB)
  before = resident_bytes()
  part = take(16 * MIB)
  part[:] = 1
  with huge_pages.hold_fetch() as spare:
    assert spare == 32 * MIB
  assert resident_bytes() - before < 4 * MIB


def test_what_nobody_took_returns_to_the_system() -> None:
  before = resident_bytes()
  huge_pages.fetch_ahead(256 * MIB)
  wait_until_touched(256 * MIB)
  assert resident_bytes() - before > 200 * MIB
  part = take(MIB)
  part[:] = 7
  huge_pages.end_fetch()
  assert resident_bytes() - before < 64 * MIB
  assert (part == 7).all()
  with huge_pages.hold_fetch() as spare:
    assert spare == 0


def test_an_older_system_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(huge_pages, "_MADV_POPULATE_WRITE", 12345)
  huge_pages.fetch_ahead(8 * MIB)
  part = take(4 * MIB)
  huge_pages.end_fetch()
  assert not part.any()


def test_a_second_fetch_needs_the_end_of_the_first() -> None:
  huge_pages.fetch_ahead(4 * MIB)
  with pytest.raises(AssertionError, match="fetched already"):
    huge_pages.fetch_ahead(4 * MIB)
