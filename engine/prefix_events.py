"""Records which blocks the prefix cache stores and removes, with their tokens. Pure Python; sends nothing.

The engine's thread records, and any one other thread takes. The record is bounded: if nobody takes events for long, it
drops them and notes that everything known so far is void, so that what a reader knows is never wrong for long.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class StoredBlock:
  """A block that requests can now share.

  Attributes:
    key: its key; see engine.block_pool.
    parent: the key of the block before it; None for a first block.
    token_ids: its tokens.
    adapter: the LoRA adapter that computed it; "": the base model.
  """

  key: bytes
  parent: bytes | None
  token_ids: tuple[int, ...]
  adapter: str


@dataclasses.dataclass(frozen=True, slots=True)
class RemovedBlock:
  """A block that the pool evicted."""

  key: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class AllRemoved:
  """No earlier event counts any more."""


type PrefixEvent = StoredBlock | RemovedBlock | AllRemoved


class PrefixEventLog:
  """The events that nobody has taken.

  Attributes:
    num_lost: events that were dropped, or whose tokens were no longer known.
  """

  def __init__(self, num_blocks: int, capacity: int = 1 << 16):
    """Args:
    num_blocks: blocks of the pool.
    capacity: the most events to keep.
    """
    self.num_lost = 0
    self._capacity = capacity
    self._events: deque[PrefixEvent] = deque((AllRemoved(),))
    # Of keys whose blocks may be stored soon: requests make keys before their blocks are computed.
    self._contents: OrderedDict[bytes, StoredBlock] = OrderedDict()
    self._max_contents = 4 * num_blocks + 4096

  def note_key(self, key: bytes, parent: bytes | None, token_ids: Sequence[int], adapter: str) -> None:
    """Notes what a key stands for; arguments as in StoredBlock."""
    self._contents[key] = StoredBlock(key, parent, tuple(token_ids), adapter)
    self._contents.move_to_end(key)
    if len(self._contents) > self._max_contents:
      self._contents.popitem(last=False)

  def note_stored(self, key: bytes) -> None:
    """Notes that a block of this key can be shared."""
    block = self._contents.get(key)
    if block is None:
      self.num_lost += 1
    else:
      self._note(block)

  def note_removed(self, key: bytes) -> None:
    """Notes that no block has this key any more."""
    self._note(RemovedBlock(key))

  def _note(self, event: PrefixEvent) -> None:
    if len(self._events) >= self._capacity:
      self.num_lost += len(self._events)
      self._events.clear()
      self._events.append(AllRemoved())
    self._events.append(event)

  def take_events(self, most: int) -> list[PrefixEvent]:
    """Returns the oldest events, at most `most`, and forgets them."""
    taken: list[PrefixEvent] = []
    while self._events and len(taken) < most:
      try:
        taken.append(self._events.popleft())
      except IndexError:  # dropped in between
        break
    return taken
