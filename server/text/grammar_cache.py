"""Grammars that were compiled before, each for its tenant alone. Compiles nothing.

Compiling takes 10 to 60 ms and a copy some 10 us, which a client can tell apart: nobody must learn so what others ask
for. So what one tenant has compiled serves that tenant only, and who keeps most gives way first: a tenant with less
than an equal part of the room loses nothing, whatever the others do.
"""

from collections import OrderedDict
from collections.abc import Callable
import threading
from typing import Protocol, Self

# The largest that were measured (1,200 constants; 30 fields) hold 0.5 MiB once compiled.
MAX_ENTRIES = 64
_MAX_SOURCE_BYTES = 1 << 20


class Copied(Protocol):
  """What is kept: never used itself."""

  def copy(self) -> Self:
    """The same, on its own from here on."""
    ...


class GrammarCache[T: Copied]:
  """Least recently used first out, within a tenant. Threads may share it."""

  def __init__(self, max_entries: int = MAX_ENTRIES, max_source_bytes: int = _MAX_SOURCE_BYTES):
    """Args: max_entries, max_source_bytes: of all tenants together."""
    self._max_entries, self._max_source_bytes = max_entries, max_source_bytes
    self._lock = threading.Lock()
    self._kept: dict[str, OrderedDict[str, T]] = {}  # by tenant and source; none is empty
    self._source_bytes = 0

  def get(self, tenant: str, source: str) -> T | None:
    """A copy of what was kept, or None."""
    with self._lock:
      kept = self._kept.get(tenant, {})
      if source not in kept:
        return None
      self._kept[tenant].move_to_end(source)
      return kept[source].copy()

  def keep(self, tenant: str, source: str, grammar: T) -> None:
    """Keeps a copy."""
    copy = grammar.copy()
    with self._lock:
      kept = self._kept.setdefault(tenant, OrderedDict())
      self._source_bytes += len(source) if source not in kept else 0
      kept[source] = copy
      kept.move_to_end(source)
      while self._source_bytes > self._max_source_bytes:
        self._drop_one(lambda tenant: sum(map(len, self._kept[tenant])))
      while sum(map(len, self._kept.values())) > self._max_entries:
        self._drop_one(lambda tenant: len(self._kept[tenant]))

  def _drop_one(self, room: Callable[[str], int]) -> None:
    most = max(self._kept, key=room)
    source, _ = self._kept[most].popitem(last=False)
    self._source_bytes -= len(source)
    if not self._kept[most]:
      del self._kept[most]
