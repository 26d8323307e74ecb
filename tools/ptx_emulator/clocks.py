"""Knows which accesses to shared memory are ordered. May not know instructions.

Warps have vector clocks (Fidge and Mattern). An asynchronous operation, such as a copy by TMA, is an event of its own:
others know it when they have waited for it. Writes through the generic proxy are visible to the asynchronous proxy only
behind a fence.proxy.async that a path of synchronization passes (PTX ISA, memory consistency model, proxies). So each
warp has a second clock, `published`: the writes that such a fence has made visible. Copies of cp.async need one, too.

Lanes of one warp are one agent: an exchange between lanes without __syncwarp goes unnoticed.
"""

from __future__ import annotations

import copy
import dataclasses

import numpy as np

ASYNC = -2  # in place of a warp: an asynchronous operation
NOBODY = -1
_DENSE = 8  # a range with fewer bytes for each that is accessed is looked at as a whole first


class OrderError(Exception):
  """Two accesses that nothing orders."""


@dataclasses.dataclass
class Knowledge:
  """What an agent, or a synchronization object, knows to have happened.

  Attributes:
    clock: int64[warps], the latest epoch of each warp.
    published: int64[warps], the latest epoch whose writes the asynchronous proxy sees.
    operations: bit set of completed asynchronous operations.
    published_operations: of these, those that a fence.proxy.async followed.
  """

  clock: np.ndarray
  published: np.ndarray
  operations: int = 0
  published_operations: int = 0

  @classmethod
  def nothing(cls, num_warps: int) -> Knowledge:
    return cls(np.zeros(num_warps, np.int64), np.zeros(num_warps, np.int64))

  def join(self, other: Knowledge) -> None:
    """Adds what the other knows."""
    np.maximum(self.clock, other.clock, out=self.clock)
    np.maximum(self.published, other.published, out=self.published)
    self.operations |= other.operations
    self.published_operations |= other.published_operations

  def copy(self) -> Knowledge:
    return Knowledge(self.clock.copy(), self.published.copy(), self.operations, self.published_operations)


@dataclasses.dataclass
class Agent:
  """A warp, for ordering.

  Attributes:
    number: in its block.
    knowledge: of the warp; clock[number] is its own epoch.
  """

  number: int
  knowledge: Knowledge

  @classmethod
  def start(cls, number: int, num_warps: int) -> Agent:
    agent = cls(number, Knowledge.nothing(num_warps))
    agent.knowledge.clock[number] = 1
    return agent

  @property
  def epoch(self) -> int:
    return int(self.knowledge.clock[self.number])

  def release_to(self, target: Knowledge) -> None:
    """Hands its knowledge on; later accesses are of a new epoch."""
    target.join(self.knowledge)
    self.knowledge.clock[self.number] += 1

  def publish(self) -> None:
    """fence.proxy.async: the asynchronous proxy sees all writes that the warp knows."""
    np.maximum(self.knowledge.published, self.knowledge.clock, out=self.knowledge.published)
    self.knowledge.published_operations |= self.knowledge.operations
    self.knowledge.clock[self.number] += 1


class Shadow:
  """The latest accesses of each byte of a block's shared memory."""

  def __init__(self, size: int, num_warps: int, name: str = "byte {} of shared memory"):
    """Args: name: of a byte, or of what else is accessed, for errors."""
    self._name = name
    self._writer = np.full(size, NOBODY, np.int16)
    self._written = np.zeros(size, np.int64)  # epoch of the warp, or number of the operation
    self._read = np.zeros((num_warps, size), np.int64)
    self._generic = 0  # bit set of operations that write through the generic proxy
    self._latest = np.zeros(num_warps, np.int64)  # epoch of each warp's latest read
    self._readers: list[tuple[int, np.ndarray, slice]] = []  # operations that read, where, and from first to last

  def take(self, bytes_: np.ndarray) -> Shadow:
    """Returns what is known of some bytes, which no asynchronous operation reads. Args: bytes_: offsets."""
    shadow = copy.copy(self)
    shadow._writer, shadow._written, shadow._read = self._writer[bytes_], self._written[bytes_], self._read[:, bytes_]
    shadow._latest, shadow._readers = self._latest.copy(), []
    return shadow

  def note_read(self, agent: Agent, bytes_: np.ndarray) -> None:
    """Checks and notes a warp's read. Args: bytes_: offsets."""
    self._check_writers(agent.knowledge, bytes_, "reads")
    self._read[agent.number, bytes_] = self._latest[agent.number] = agent.epoch

  def note_write(self, agent: Agent, bytes_: np.ndarray) -> None:
    """Checks and notes a warp's write."""
    self._check_writers(agent.knowledge, bytes_, "overwrites")
    self._check_readers(agent.knowledge, bytes_)
    self._writer[bytes_], self._written[bytes_] = agent.number, agent.epoch

  def check_known(self, agent: Agent, bytes_: np.ndarray) -> None:
    """Checks that the warp knows the latest writes."""
    self._check_writers(agent.knowledge, bytes_, "uses")

  def check_free(self, agent: Agent, bytes_: np.ndarray) -> None:
    """Checks that the warp knows all accesses, because what is here ends."""
    self._check_writers(agent.knowledge, bytes_, "frees")
    self._check_readers(agent.knowledge, bytes_.reshape(-1))

  def begin_async_read(self, issuer: Knowledge, operation: int, bytes_: np.ndarray) -> None:
    """Checks and notes that an asynchronous operation will read. Args: issuer: what its warps know."""
    self._check_writers(issuer, bytes_, "reads through the asynchronous proxy", is_generic=False)
    self._readers.append((operation, bytes_, _span(bytes_)))

  def begin_async_write(self, issuer: Knowledge, operation: int, bytes_: np.ndarray, is_generic: bool = False) -> None:
    """Checks and notes that an asynchronous operation will write. Args: is_generic: through the generic proxy."""
    does = "overwrites" if is_generic else "overwrites through the asynchronous proxy"
    self._check_writers(issuer, bytes_, does, is_generic)
    self._check_readers(issuer, bytes_)
    self._generic |= is_generic << operation
    self._writer[bytes_], self._written[bytes_] = ASYNC, operation

  def forget_reads(self, known: int) -> None:
    """Drops reads of operations that every warp knows. Args: known: bit set."""
    self._readers = [reader for reader in self._readers if not known >> reader[0] & 1]

  def _check_writers(self, knows: Knowledge, bytes_: np.ndarray, does: str, is_generic: bool = True) -> None:
    writer, written = self._writer[bytes_], self._written[bytes_]
    by_warp, visible = writer >= 0, knows.clock if is_generic else knows.published
    late = by_warp & (written > visible[np.where(by_warp, writer, 0)])
    if late.any():
      where = int(np.flatnonzero(late.reshape(-1))[0])
      byte, warp = int(bytes_.reshape(-1)[where]), int(writer.reshape(-1)[where])
      ordered = int(written.reshape(-1)[where]) <= knows.clock[warp]
      raise OrderError(
        f"{does} {self._name.format(byte)}, which warp {warp} wrote; "
        + ("no fence.proxy.async is between them" if ordered else "nothing orders the two")
      )
    by_async = writer == ASYNC
    if by_async.any():
      for operation in np.unique(written[by_async]):
        is_known = knows.operations >> int(operation) & 1
        needs_fence = not is_generic and self._generic & ~knows.published_operations
        if not is_known or (needs_fence and needs_fence >> int(operation) & 1):
          byte = int(bytes_[by_async & (written == operation)].reshape(-1)[0])
          raise OrderError(
            f"{does} {self._name.format(byte)}, which asynchronous operation {operation} "
            + ("wrote; no fence.proxy.async is between them" if is_known else "writes; nobody has waited")
          )

  def _check_readers(self, knows: Knowledge, bytes_: np.ndarray) -> None:
    span = _span(bytes_)
    for warp in np.flatnonzero(self._latest > knows.clock).tolist():  # all reads of other warps are known
      known = knows.clock[warp]
      if span.stop - span.start < _DENSE * bytes_.size and not (self._read[warp, span] > known).any():
        continue
      late = self._read[warp, bytes_] > known
      if late.any():
        place = self._name.format(int(bytes_[late][0]))
        raise OrderError(f"overwrites {place}, which warp {warp} reads; nothing orders the two")
    for operation, where, other in self._readers:
      if knows.operations >> operation & 1 or other.start >= span.stop or span.start >= other.stop:
        continue
      hit = np.isin(where, bytes_)
      if hit.any():
        place = self._name.format(int(where[hit].min()))
        raise OrderError(f"overwrites {place}, which asynchronous operation {operation} reads; nobody has waited")


def _span(bytes_: np.ndarray) -> slice:
  """Returns the range from the first to the last of some offsets."""
  return slice(int(bytes_.min()), int(bytes_.max()) + 1) if bytes_.size else slice(0, 0)
