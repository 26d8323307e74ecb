"""Gets memory on huge pages, and some of it ahead of its use. May not know arrays, and imports nothing large.

The system clears a page when a process first touches it, which on a virtual machine can take longer than reading the
weights that go there. A start imports for a second or more on one thread; `fetch_ahead` lets another thread touch the
memory of the weights meanwhile.
"""

from collections.abc import Iterator
import contextlib
import ctypes
import mmap
import threading
import weakref

HUGE_PAGE = 2**21
_BLOCK = 32 * HUGE_PAGE  # shared by several takers, so that few of them end on a page of their own
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python 3.12's mmap does not name it
_PIECE = 2 * HUGE_PAGE  # between two pieces, other threads may map memory
_ALIGNMENT = 4096


def _map_pages(num_bytes: int) -> tuple[mmap.mmap, int]:
  """Maps new memory of whole huge pages if the system has them; returns it, and where its `num_bytes` begin."""
  size = -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
  memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
  begin = -_address(memory) % HUGE_PAGE
  if hasattr(mmap, "MADV_HUGEPAGE"):
    with contextlib.suppress(OSError):  # an operating system without huge pages
      memory.madvise(mmap.MADV_HUGEPAGE, begin, size)
  return memory, begin


def _address(memory: mmap.mmap) -> int:
  return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _align(num_bytes: int) -> int:
  return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class _Block:
  """Memory of whole huge pages that several takers share; it lives until none of them holds its part."""

  def __init__(self, memory: mmap.mmap, begin: int, size: int):
    self._memory, self._begin, self._left = weakref.ref(memory), begin, size

  @property
  def left(self) -> int:
    """Bytes that nobody has taken."""
    return self._left if self._memory() is not None else 0

  def take(self, num_bytes: int) -> tuple[mmap.mmap, int] | None:
    memory = self._memory()
    if memory is None or num_bytes > self._left:
      return None
    begin = self._begin
    self._begin, self._left = begin + _align(num_bytes), self._left - _align(num_bytes)
    return memory, begin


class _Ahead:
  """Memory that a thread touches piece by piece from its beginning; others take parts of it in the same order."""

  def __init__(self, num_bytes: int):
    self._memory, self._begin = _map_pages(num_bytes)
    self._size, self._taken, self._touched = num_bytes, 0, 0  # bytes from the beginning
    self._lock = threading.Lock()  # held while a piece is touched
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._touch, name="fetch pages", daemon=True)
    self._thread.start()

  def _touch(self) -> None:
    try:
      advise = ctypes.CDLL(None, use_errno=True).madvise  # unlike mmap's method, without the interpreter lock
    except (OSError, AttributeError):
      return
    address = _address(self._memory) + self._begin
    while not self._ended.is_set():
      with self._lock:
        start = max(self._touched, self._taken // HUGE_PAGE * HUGE_PAGE)
        size = min(_PIECE, self._size - start)
        if size <= 0:
          return
        if advise(ctypes.c_void_p(address + start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
          return  # an older system
        self._touched = start + size

  @property
  def spare_bytes(self) -> int:
    return max(0, self._touched - self._taken)

  def take(self, num_bytes: int) -> tuple[mmap.mmap, int] | None:
    start = self._taken
    if start + num_bytes > self._size:
      return None
    self._taken = _align(start + num_bytes)
    return self._memory, self._begin + start

  def end(self) -> None:
    self._ended.set()
    self._thread.join()
    start = -(-self._taken // HUGE_PAGE) * HUGE_PAGE
    if start < self._size:  # what nobody took returns to the system
      self._memory.madvise(mmap.MADV_DONTNEED, self._begin + start, self._size - start)

  @contextlib.contextmanager
  def hold_still(self) -> Iterator[int]:
    with self._lock:
      yield self.spare_bytes


_ahead: _Ahead | None = None  # a start fetches once
_block: _Block | None = None  # the one with most left
_sharing = threading.Lock()


def fetch_ahead(num_bytes: int) -> None:
  """Begins to touch memory for `take_zeros` on a thread of its own. `end_fetch` must follow."""
  global _ahead
  assert _ahead is None, "fetched already"
  if num_bytes >= HUGE_PAGE and hasattr(mmap, "MADV_DONTNEED"):
    _ahead = _Ahead(num_bytes)


def end_fetch() -> None:
  """Ends `fetch_ahead`, if it began, and gives back what nobody has taken."""
  global _ahead
  ahead, _ahead = _ahead, None
  if ahead is not None:
    ahead.end()


@contextlib.contextmanager
def hold_fetch() -> Iterator[int]:
  """Pauses `fetch_ahead`; the value is the bytes that it has touched and that nobody has taken."""
  if _ahead is None:
    yield 0
  else:
    with _ahead.hold_still() as spare:
      yield spare


def take_zeros(num_bytes: int) -> tuple[mmap.mmap, int]:
  """Returns memory of zeros and where its `num_bytes` begin, at a multiple of 4,096 bytes. Safe on any thread.

  It is touched already where `fetch_ahead` has come that far. Otherwise it shares its first and last page with what was
  taken before and after it, so that all of it lies on huge pages.
  """
  global _block
  with _sharing:
    found = _ahead.take(num_bytes) if _ahead is not None else None
    if found is not None:
      return found
    found = _block.take(num_bytes) if _block is not None else None
    if found is None:
      size = max(_BLOCK, -(-num_bytes // HUGE_PAGE) * HUGE_PAGE)
      memory, begin = _map_pages(size)
      made = _Block(memory, begin, size)
      found = made.take(num_bytes)
      if _block is None or made.left >= _block.left:
        _block = made
  assert found is not None, num_bytes
  return found
