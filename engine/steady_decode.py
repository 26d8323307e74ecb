"""The Scheduler's fast path for a step of the same decodes as the previous one. May not change its results.

scheduler.py works without it and gives the same steps and events; tests/engine/test_steady_decode.py compares them. The
fast path plans and commits from columns. It saves time because a device's step evicts the processor's caches, and 256
requests are some thousand cold cache lines. While the same requests decode, only a position and a token of each change;
the requests' own counters follow at the next `settle_counts`.

Medians of 256 rows with the demo model on two cores, with and without it (tools.bench.host): schedule 49 and 124 us,
commit 333 and 477 us. Without a device between the steps: 18 and 81 us, 119 and 198 us.
"""

from collections.abc import Callable, Sequence
import operator

from engine.batch import Batch, StepResult
from engine.batching import Batching
from engine.block_pool import BlockPool
from engine.request import Request, TokenEvent, make_event
from engine.shapes import ShapeLadder

Publish = Callable[[Request, int], None]


class Columns:
  """The columns of a Batch for the requests that decode, in row order.

  One object serves while these requests decode in these slots. A request that loses its slot returns with a row of
  several or of known tokens, so at least one step has other decodes.

  Attributes:
    requests, request_ids, slots: the rows; `requests` is never changed.
    ones, samples, token_ids: the Batch columns of such rows.
    ends: positions that the device ever computes of each request.
    alone: the latest step had these rows and no others.
    tables, outputs: of the requests; empty until a step repeats, like the next two.
    stop_ids: stop ids of all requests.
    rows_ahead: rows by their distance from the first one, modulo block size.
  """

  def __init__(self, requests: list[Request]):
    num_rows = len(requests)
    self.requests = requests
    self.request_ids = tuple([request.id for request in requests])
    self.slots = tuple([request.slot for request in requests])
    self.ones = (1,) * num_rows
    self.samples = (True,) * num_rows
    self.token_ids: tuple[tuple[int, ...], ...] = ((),) * num_rows
    self.ends = [request.max_computed_tokens for request in requests]
    self.alone = False
    self.tables: list[list[int]] = []
    self.outputs: list[list[int]] = []
    self.stop_ids: frozenset[int] = frozenset()
    self.rows_ahead: list[list[int]] = []

  def rows_at_a_block(self, starts: Sequence[int], offset: int, block_size: int) -> list[int]:
    """Returns the rows that begin a block `offset` positions after `starts`, the starts of one of these steps."""
    if not self.rows_ahead:
      self.tables = [request.block_table for request in self.requests]
      self.outputs = [request.output_token_ids for request in self.requests]
      self.stop_ids = frozenset().union(*{request.stop_ids for request in self.requests})
      self.rows_ahead = rows_ahead = [[] for _ in range(block_size)]
      first = starts[0]
      for row, start in enumerate(starts):
        rows_ahead[(start - first) % block_size].append(row)
    return self.rows_ahead[-(starts[0] + offset) % block_size]  # distances between rows are constant

  def grow_tables(self, rows: list[int], blocks: list[int]) -> tuple[tuple[int, int, int], ...]:
    """Appends a block to each of these rows' tables; returns Batch.new_blocks."""
    tables, slots = self.tables, self.slots
    grown = tuple([(slots[row], len(tables[row]), block) for row, block in zip(rows, blocks, strict=True)])
    for row, block in zip(rows, blocks, strict=True):
      tables[row].append(block)
    return grown


class SteadyDecode:
  """The decodes of the latest step, and the number of further equal steps.

  Call order: `columns_of` for the decodes of a step planned from requests, then `begin_run` if no other request runs.
  From then on `plan_step` and `commit_step` handle equal steps, until `stop_run`.

  Attributes:
    steps_left: further steps with exactly these rows, if no request joins, leaves or lacks a block; 0 unless the latest
      step decoded all running requests.
  """

  def __init__(self, block_size: int, reserves: bool, may_spare: bool = False):
    """Args:
    block_size: tokens a KV block.
    reserves: running requests hold all blocks that they will need.
    may_spare: some of them may hold blocks that they need only soon, because drafts were rejected.
    """
    self.steps_left = 0
    self._block_size, self._reserves, self._may_spare = block_size, reserves, may_spare
    self._columns = Columns([])
    self._starts: tuple[int, ...] = ()  # starts of the latest step
    # Not yet counted in the requests' num_computed_tokens and num_in_flight:
    self._uncounted_steps = 0  # planned steps
    self._uncounted_tokens = 0  # committed tokens of each request

  @property
  def num_uncounted(self) -> int:
    """Computed positions of all rows that the requests' own counters lack."""
    return self._uncounted_steps * len(self._columns.requests)

  def columns_of(self, decodes: list[Request]) -> Columns:
    """Returns the columns of the decoding requests; the same object if they are the latest step's."""
    if decodes != self._columns.requests:
      self._columns = Columns(decodes)
    return self._columns

  def begin_run(self, starts: tuple[int, ...]) -> None:
    """Starts a run: the latest step has these starts and the latest columns, and no other request runs or may join."""
    self._starts = starts
    self.steps_left = min(map(operator.sub, self._columns.ends, starts)) - 1

  def plan_step(
    self, step: int, pool: BlockPool, batching: Batching, ladder: ShapeLadder
  ) -> tuple[Batch, list[Request]] | None:
    """Plans the next step and its rows if it repeats the latest one; otherwise changes nothing and returns None."""
    if not self.steps_left:
      return None
    columns = self._columns
    growing = columns.rows_at_a_block(self._starts, 1, self._block_size)
    if self._reserves:
      growing = []  # their blocks are allocated
    elif self._may_spare:
      tables, starts = columns.tables, self._starts
      growing = [row for row in growing if len(tables[row]) * self._block_size == starts[row] + 1]
    if len(growing) > pool.num_free:
      return None
    self._starts = starts = tuple([start + 1 for start in self._starts])
    self.steps_left -= 1
    self._uncounted_steps += 1
    num_rows = len(starts)
    padded = batching.step_tokens(num_rows, 1, num_rows)
    batch = Batch(
      step=step,
      shape=ladder.fit(padded),
      request_ids=columns.request_ids,
      slots=columns.slots,
      starts=starts,
      counts=columns.ones,
      num_logits=columns.ones,
      samples=columns.samples,
      token_ids=columns.token_ids,
      new_blocks=columns.grow_tables(growing, pool.allocate_blocks(len(growing))),
      padded_tokens=padded,
      repeats=True,
    )
    return batch, columns.requests

  def commit_step(
    self, rows: list[Request], batch: Batch, result: StepResult, publish: Publish | None
  ) -> list[TokenEvent] | None:
    """Appends each request's token if no row ended or ends; otherwise changes nothing and returns None.

    Args:
      rows: requests of the batch.
      publish: shares the given number of a request's leading full blocks; None: shares none.
    """
    columns = self._columns
    if rows is not columns.requests or not self.steps_left or not columns.outputs:
      return None  # other rows, a row that reaches its length, or no repeated step
    tokens = result.tokens
    if result.bad_rows or result.logprobs or result.row_ends or not columns.stop_ids.isdisjoint(tokens):
      return None
    for outputs, token in zip(columns.outputs, tokens, strict=True):
      outputs.append(token)
    self._uncounted_tokens += 1
    if publish is not None:
      starts, block_size = batch.starts, self._block_size
      for row in columns.rows_at_a_block(starts, 1, block_size):
        publish(rows[row], (starts[row] + 1) // block_size)
    return [
      make_event(TokenEvent, (request_id, (token,), (), (), None, "", 0, None, "", b""))
      for request_id, token in zip(batch.request_ids, tokens, strict=True)
    ]

  def settle_counts(self) -> None:
    """Updates the requests' counters. Steps may continue to repeat."""
    steps, tokens = self._uncounted_steps, self._uncounted_tokens
    if steps or tokens:
      for request in self._columns.requests:
        request.num_computed_tokens += steps
        request.num_in_flight += steps - tokens
      self._uncounted_steps = self._uncounted_tokens = 0

  def stop_run(self) -> None:
    """Ends the run; the scheduler plans the next step from the requests."""
    self.settle_counts()
    self.steps_left = 0
