"""The fast path of a Scheduler: a step of the same decodes as the one before, planned and committed from columns.

The mechanism in scheduler.py is complete without it, and gives the same steps and events (tests/engine/
test_steady_decode.py compares them). It pays because a device's step leaves nothing in the processor's caches, and 256
requests are some thousand cold lines of memory. While the same requests decode, all that changes of them is a position
and a token: the requests' own counters follow when somebody is about to look (`settle_counts`).

Medians of 256 rows with the demo model on two cores, with it and without (tools.bench.host): schedule 49 and 124 us,
commit 333 and 477 us; without a device between the steps, 18 and 81, 119 and 198.
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
  """Requests that decode, in the order of their rows, as a Batch has them; made anew when others do.

  They are the same for as long as these requests decode in these slots: one that lost its slot comes back with a row of
  several tokens or of a known one, so that at least one step has other decodes.

  Attributes:
    requests, request_ids, slots: the rows; `requests` is never changed.
    ones, samples, token_ids: what a Batch says of every such row.
    ends: positions that are ever computed of each.
    alone: the latest step had these rows and no others.
    tables, outputs: of the requests; empty until a step is repeated, as the next two.
    stop_ids: of them all.
    rows_ahead: rows by how far they are ahead of the first one, modulo block size.
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
    """The rows for which `offset` positions behind `starts`, where one of these steps began, a block begins."""
    if not self.rows_ahead:
      self.tables = [request.block_table for request in self.requests]
      self.outputs = [request.output_token_ids for request in self.requests]
      self.stop_ids = frozenset().union(*{request.stop_ids for request in self.requests})
      self.rows_ahead = rows_ahead = [[] for _ in range(block_size)]
      first = starts[0]
      for row, start in enumerate(starts):
        rows_ahead[(start - first) % block_size].append(row)
    return self.rows_ahead[-(starts[0] + offset) % block_size]  # rows keep their distance

  def grow_tables(self, rows: list[int], blocks: list[int]) -> tuple[tuple[int, int, int], ...]:
    """Gives each of these rows a block; returns Batch.new_blocks."""
    tables, slots = self.tables, self.slots
    grown = tuple([(slots[row], len(tables[row]), block) for row, block in zip(rows, blocks, strict=True)])
    for row, block in zip(rows, blocks, strict=True):
      tables[row].append(block)
    return grown


class SteadyDecode:
  """The decodes of the latest step, and how many steps more are the same.

  Call order: `columns_of` for the decodes of a step that was planned from requests, `begin_run` if they are all that
  runs; from then on `plan_step` and `commit_step` do what they can, and `stop_run` ends it.

  Attributes:
    steps_left: how many more steps are these rows and no others if nobody joins, leaves or wants for a block; 0 unless
      the latest step was one of all running requests, which all decoded.
  """

  def __init__(self, block_size: int, reserves: bool):
    """Args: block_size: tokens a KV block. reserves: requests that run have all the blocks they will ever need."""
    self.steps_left = 0
    self._block_size, self._reserves = block_size, reserves
    self._columns = Columns([])
    self._starts: tuple[int, ...] = ()  # of the latest step
    # What the requests' num_computed_tokens and num_in_flight do not know yet:
    self._uncounted_steps = 0  # planned
    self._uncounted_tokens = 0  # and committed, of each request

  @property
  def num_uncounted(self) -> int:
    """Positions computed, over all rows, that the requests' own counters lack."""
    return self._uncounted_steps * len(self._columns.requests)

  def columns_of(self, decodes: list[Request]) -> Columns:
    """Columns of the requests that decode in the step being planned: the same ones, if they are the latest step's."""
    if decodes != self._columns.requests:
      self._columns = Columns(decodes)
    return self._columns

  def begin_run(self, starts: tuple[int, ...]) -> None:
    """The latest step began at `starts`, its rows are the latest columns', and no other request runs or may join."""
    self._starts = starts
    self.steps_left = min(map(operator.sub, self._columns.ends, starts)) - 1

  def plan_step(
    self, step: int, pool: BlockPool, batching: Batching, ladder: ShapeLadder
  ) -> tuple[Batch, list[Request]] | None:
    """The step after the latest and its rows, if it is the latest one a position on; else None, and nothing is done."""
    if not self.steps_left:
      return None
    columns = self._columns
    growing = columns.rows_at_a_block(self._starts, 1, self._block_size)
    if self._reserves:
      growing = []  # their blocks are there
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
    """Gives each request its token, if these are its rows and none of them has ended or ends; else None, nothing done.

    Args:
      rows: of the batch.
      publish: shares a request's leading full blocks, so many; None where none are shared.
    """
    columns = self._columns
    if rows is not columns.requests or not self.steps_left or not columns.outputs:
      return None  # other rows, a row that ends by its length, or no step was repeated
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
      make_event(TokenEvent, (request_id, (token,), (), (), None, "", 0, None, ""))
      for request_id, token in zip(batch.request_ids, tokens, strict=True)
    ]

  def settle_counts(self) -> None:
    """Brings the requests' counters up to date. The steps may go on repeating."""
    steps, tokens = self._uncounted_steps, self._uncounted_tokens
    if steps or tokens:
      for request in self._columns.requests:
        request.num_computed_tokens += steps
        request.num_in_flight += steps - tokens
      self._uncounted_steps = self._uncounted_tokens = 0

  def stop_run(self) -> None:
    """The next step will be planned from the requests themselves."""
    self.settle_counts()
    self.steps_left = 0
