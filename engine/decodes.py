"""The requests that decode in a step, as columns, and how the same step is made again. Plans nothing, ends nobody.

A device's step leaves nothing in the processor's caches, and 256 requests are some thousand cold lines of memory. While
the same requests decode, all that changes of them is a position and a token; so a step that repeats the one before is
planned and committed from columns, and the requests' own counters follow when somebody is about to look (`settle`).
"""

from collections.abc import Sequence
import operator

from engine.request import Request


class Decodes:
  """Requests that decode, in the order of their rows; made anew when others do.

  The columns are the same for as long as these requests decode in these slots: one that lost its slot comes back with a
  row of several tokens or of a known one, so that at least one step has other decodes.

  Attributes:
    requests, request_ids, slots: the rows; `requests` is never changed.
    ones, samples, token_ids: what a Batch says of every such row.
    starts: of the latest step.
    steps_left: how many more steps are these rows and no others if nobody joins, leaves or wants for a block; 0 unless
      the latest step was one of all running requests, which all decoded.
  """

  __slots__ = (
    "requests",
    "request_ids",
    "slots",
    "ones",
    "samples",
    "token_ids",
    "starts",
    "steps_left",
    "_ends",
    "_tables",
    "_outputs",
    "_stop_ids",
    "_rows_ahead",
    "_uncounted_steps",
    "_uncounted_tokens",
  )

  def __init__(self, requests: list[Request]):
    num_rows = len(requests)
    self.requests = requests
    self.request_ids = tuple([request.id for request in requests])
    self.slots = tuple([request.slot for request in requests])
    self.ones = (1,) * num_rows
    self.samples = (True,) * num_rows
    self.token_ids: tuple[tuple[int, ...], ...] = ((),) * num_rows
    self.starts: tuple[int, ...] = ()
    self.steps_left = 0
    self._ends = [request.max_computed_tokens for request in requests]
    # What follows is made by the first repetition.
    self._tables: list[list[int]] = []
    self._outputs: list[list[int]] = []
    self._stop_ids: frozenset[int] = frozenset()  # of them all
    self._rows_ahead: list[list[int]] = []  # rows by how far they are ahead of the first one, modulo block size
    # What the requests' num_computed_tokens and num_in_flight do not know yet:
    self._uncounted_steps = 0  # planned
    self._uncounted_tokens = 0  # and committed, of each request

  @property
  def num_uncounted(self) -> int:
    """Positions computed, over all rows, that the requests' own counters lack."""
    return self._uncounted_steps * len(self.requests)

  def planned(self, starts: tuple[int, ...]) -> None:
    """The latest step began at `starts`, its rows are these, and no other request runs: it may be repeated."""
    self.starts = starts
    self.steps_left = min(map(operator.sub, self._ends, starts)) - 1

  def beginning(self, starts: tuple[int, ...], offset: int, block_size: int) -> list[int]:
    """The rows for which `offset` positions behind `starts`, where one of these steps began, a block begins."""
    if not self._rows_ahead:
      self._tables = [request.block_table for request in self.requests]
      self._outputs = [request.output_token_ids for request in self.requests]
      self._stop_ids = frozenset().union(*{request.stop_ids for request in self.requests})
      self._rows_ahead = rows_ahead = [[] for _ in range(block_size)]
      first = starts[0]
      for row, start in enumerate(starts):
        rows_ahead[(start - first) % block_size].append(row)
    return self._rows_ahead[-(starts[0] + offset) % block_size]  # rows keep their distance

  def repeat(self) -> tuple[int, ...]:
    """Plans the step after the latest; returns where its rows begin."""
    self.starts = starts = tuple([start + 1 for start in self.starts])
    self.steps_left -= 1
    self._uncounted_steps += 1
    return starts

  def grow(self, rows: list[int], blocks: list[int]) -> tuple[tuple[int, int, int], ...]:
    """Gives each of these rows a block; returns Batch.new_blocks."""
    tables, slots = self._tables, self.slots
    grown = tuple([(slots[row], len(tables[row]), block) for row, block in zip(rows, blocks, strict=True)])
    for row, block in zip(rows, blocks, strict=True):
      tables[row].append(block)
    return grown

  def take(self, tokens: Sequence[int]) -> bool:
    """Gives each request its token of a step; False, and nothing is done, if one may end it or nothing was repeated."""
    if not self._outputs or not self._stop_ids.isdisjoint(tokens):
      return False
    for outputs, token in zip(self._outputs, tokens, strict=True):
      outputs.append(token)
    self._uncounted_tokens += 1
    return True

  def settle(self) -> None:
    """Brings the requests' counters up to date. The steps may go on repeating."""
    steps, tokens = self._uncounted_steps, self._uncounted_tokens
    if steps or tokens:
      for request in self.requests:
        request.num_computed_tokens += steps
        request.num_in_flight += steps - tokens
      self._uncounted_steps = self._uncounted_tokens = 0

  def stop(self) -> None:
    """The next step will be planned from the requests themselves."""
    self.settle()
    self.steps_left = 0
