"""Packs a Batch into the array of a step, on the host. May not choose shapes or know models."""

from array import array
from collections.abc import Iterator, Sequence
import dataclasses
import itertools
import math
from typing import NamedTuple

import numpy as np

from engine.batch import IN_FLIGHT, MAX_DRAFT_MASKS, MAX_DRAFTS, Admission, Batch
from engine.device.model_input import FLOAT_COLUMNS, NUM_SLOT_COLUMNS, Column, Flag, StepLayout
from engine.device.pooling import PooledStates
from engine.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from engine.shapes import StepShape

_GREEDY_BELOW = 1e-5  # as in vLLM: a lower temperature would overflow
_SMALL_STEP = 32  # tokens of a step up to which numpy's calls take longer than values one by one
_SMALL_KINDS = 8  # of such steps, of which the packer keeps what they have in common


def _field(layout: StepLayout, packed: np.ndarray, name: str) -> np.ndarray:
  """Returns a field of a packed array, as a view."""
  offset, shape = layout.fields[name]
  return packed[offset : offset + math.prod(shape)].reshape(shape)


def _make_plans(layout: StepLayout, packed: np.ndarray, behind: Sequence[int] = ()) -> None:
  """Fills the plans from the packed rows.

  Args: behind: as in Batch.
  """
  for number, plan in enumerate(layout.plans):
    kv_lens = least = _field(layout, packed, "kv_lens")
    if behind:
      least = kv_lens.copy()
      least[: len(behind)] -= behind
    _field(layout, packed, f"plan {number}")[:] = plan.make_work(_field(layout, packed, "query_starts"), kv_lens, least)


def flags_of(params: SamplingParams) -> Flag:
  """Returns the flags of all rows of a request that sample."""
  flags = Flag.SAMPLE
  if params.temperature >= _GREEDY_BELOW:
    flags |= Flag.RANDOM
    if params.top_k > 0:
      flags |= Flag.TOP_K
    if params.top_p < 1.0:
      flags |= Flag.TOP_P
  if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
    flags |= Flag.PENALTY
  if params.logit_bias or params.allowed_token_ids is not None:
    flags |= Flag.BIAS
  if params.logprobs is not None:
    flags |= Flag.LOGPROB
    if params.logprobs:
      flags |= Flag.TOP_LOGPROBS
  return flags


@dataclasses.dataclass(frozen=True, slots=True)
class LogitRows:
  """The meaning of a packed step's logit rows, for reading its output.

  Attributes:
    last: each row's last logit row, which samples.
    wants: row -> (first logit row, one number of alternatives for each logit row), for rows that want logprobs.
    targets: of each logit row, as packed.
    drafts: (row, first logit row, drafts) for each row with drafts, in order.
    plain: every row samples from its only logit row, and min_tokens suppresses nothing.
  """

  last: list[int]
  wants: dict[int, tuple[int, tuple[int, ...]]]
  targets: list[int]
  drafts: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
  plain: bool = False

  @property
  def wants_top(self) -> bool:
    """Whether the host must read the arrays of alternatives."""
    return any(max(numbers) > 0 for _, numbers in self.wants.values())


class EmbeddingRow(NamedTuple):
  """A row of a batch whose hidden states belong to an embedding.

  Attributes:
    row: its index.
    num_states: its last logit rows, one for each position.
    pooled: takes their states.
    is_last: whether the embedding is complete then.
  """

  row: int
  num_states: int
  pooled: PooledStates
  is_last: bool


class _Repetition:
  """The latest packed step of decodes only, from which the next step is made while a Batch repeats it.

  The device may still read the array, so the next step gets another one: a sum, and then the rows that begin a block.
  """

  def __init__(self, batch: Batch, layout: StepLayout, packed: np.ndarray, rows: LogitRows):
    """Args: packed, rows: the results of `Packer.pack` for `batch`."""
    self.rows = rows
    self._layout, self._packed = layout, packed
    self._starts = batch.starts
    self._num_repeated = 0
    # The first repetition sets the following fields.
    self._advance: np.ndarray | None = None  # int32[layout.size]: the increments of a step, 1 for positions
    self._row_of: dict[int, int] = {}  # slot -> row
    self._begins: list[list[int]] = []  # rows that begin a block, by repetition modulo block size

  def pack_next(self, batch: Batch, layout: StepLayout, block_size: int, packed: np.ndarray) -> None:
    """Fills `packed`, the array of `batch`, which repeats the latest step."""
    starts, slots = batch.starts, batch.slots
    rows = len(starts)
    assert layout is self._layout and starts[0] == self._starts[0] + 1, "this step does not repeat the step before it"
    if self._advance is None:
      self._advance = advance = np.zeros(layout.size, np.int32)
      for name in ("positions", "slot_mapping", "kv_lens"):
        _field(layout, advance, name)[:rows] = 1
      _field(layout, advance, "columns")[Column.POSITION, :rows] = 1
      self._row_of = {slot: row for row, slot in enumerate(slots)}
      self._begins = [[] for _ in range(block_size)]
      for row, start in enumerate(starts):
        self._begins[(1 - start) % block_size].append(row)
    np.add(self._packed, self._advance, out=packed)
    self._packed, self._starts = packed, starts
    self._num_repeated += 1
    # Sets the few other values one by one, because each kind of numpy call costs 20 us right after a step.
    values = memoryview(packed)
    tables, (_, width) = layout.fields["block_tables"]
    for slot, index, block in batch.new_blocks:
      row = self._row_of.get(slot)
      if row is not None:
        values[tables + row * width + index] = block
    slot_mapping, _ = layout.fields["slot_mapping"]
    for row in self._begins[self._num_repeated % block_size]:
      values[slot_mapping + row] = values[tables + row * width + starts[row] // block_size] * block_size
    _make_plans(layout, packed)


class _SmallSteps:
  """What small steps of the same rows and numbers of tokens have in common.

  Attributes:
    values: the packed array, with 0 for what differs.
    last, targets: see LogitRows.
    drafted: (row, first logit row) of rows with drafts.
  """

  def __init__(self, batch: Batch, layout: StepLayout, of_slots: list[list[int]], num_slots: int):
    """Args: of_slots: for each row the columns that its slot fixes."""
    self._layout, self._slots, self._counts, self._behind = layout, batch.slots, batch.counts, batch.behind
    ends = list(itertools.accumulate(batch.counts))
    self.last, self.targets = [end - 1 for end in ends], [-1] * ends[-1]
    self.drafted: list[tuple[int, int]] = []
    columns: list[list[int]] = [[] for _ in Column]
    behind_slots: list[int] = []
    behind_rows: list[int] = []
    num_masks = 0
    for row, (slot, count, fixed) in enumerate(zip(batch.slots, batch.counts, of_slots, strict=True)):
      is_behind = bool(batch.behind and batch.behind[row])
      behind_slots.append(slot + 1 if is_behind else 0)
      behind_rows += [row + 1 if is_behind else 0] * count
      for column, value in zip(columns, fixed, strict=False):
        column += [value] * count
      if is_behind:
        columns[Column.FLAGS][-count:] = [fixed[Column.FLAGS] | int(Flag.BEHIND)] * count
      columns[Column.SLOT] += [slot] * count
      columns[Column.MASK] += [slot] * count
      columns[Column.NUM_DRAFTS] += range(count)
      columns[Column.LATER_DRAFTS] += range(count - 1, -1, -1)
      if count == 1:
        continue
      assert count == 1 + batch.num_drafts[row], f"a row of {count} tokens has {batch.num_drafts[row]} drafts"
      assert count <= 1 + MAX_DRAFTS, f"a row has {count - 1} drafts; the limit is {MAX_DRAFTS}"
      self.drafted.append((row, ends[row] - count))
      if fixed[Column.FLAGS] & int(Flag.MASK):
        columns[Column.MASK][1 - count :] = range(num_slots + 1 + num_masks, num_slots + num_masks + count)
        num_masks += count - 1
    assert num_masks <= MAX_DRAFT_MASKS, f"the step has {num_masks} masks after drafts; MAX_DRAFT_MASKS is the limit"
    columns[Column.TOKEN] += range(ends[-1])
    num_logits = layout.shape.logits
    columns[Column.TARGET] = [-1] * num_logits
    for column in (Column.SLOT, Column.MASK):
      columns[column] += [num_slots] * (num_logits - ends[-1])
    values = array("i", bytes(4 * layout.size))
    for name, numbers in (
      ("used", [ends[-1], ends[-1]]),
      ("query_starts", [0, *ends, *[ends[-1]] * (layout.shape.rows - len(ends))]),
      ("behind_slots", behind_slots),
      ("behind_rows", behind_rows),
    ):
      place = layout.fields[name][0]
      values[place : place + len(numbers)] = array("i", numbers)
    for number, column in enumerate(columns):
      place = layout.fields["columns"][0] + number * num_logits
      values[place : place + len(column)] = array("i", column)
    self.values = values

  def fits(self, batch: Batch, layout: StepLayout) -> bool:
    """Returns whether a step is one of these."""
    return (
      layout is self._layout
      and batch.slots == self._slots
      and batch.counts == self._counts
      and batch.behind == self._behind
    )


class Packer:
  """The host's copy of slot data, from which it packs steps.

  Only a Batch's admissions and new blocks change it. Packing works on whole numpy arrays, never on single tokens.
  """

  def __init__(
    self,
    num_slots: int,
    table_width: int,
    block_size: int,
    eos_token_ids: tuple[int, ...],
    pooling: str = "last",
    class_weights: np.ndarray | None = None,
  ):
    self._num_slots, self._table_width, self._block_size = num_slots, table_width, block_size
    self._eos = eos_token_ids
    self._block_tables = np.zeros((num_slots + 1, table_width), np.int32)
    self._columns = np.zeros((NUM_SLOT_COLUMNS, num_slots + 1), np.int32)
    self._table_view, self._column_view = memoryview(self._block_tables.ravel()), memoryview(self._columns.ravel())
    self._stop_ids = np.full((num_slots + 1, MAX_STOP_TOKEN_IDS + len(eos_token_ids)), -1, np.int32)
    self._min_lens = np.zeros(num_slots + 1, np.int32)  # tokens at which the request reaches min_tokens
    self._logprobs: dict[int, SamplingParams] = {}  # slots with logprobs
    self._pooling, self._class_weights = pooling, class_weights
    self._pooled: dict[int, PooledStates] = {}  # of slots with embeddings
    self._known: dict[int, Sequence[int]] = {}  # tokens of slots with prompt logprobs
    self._adapter_slots = np.zeros(num_slots + 1, np.int32)
    self._adapted: set[int] = set()  # slots with an adapter
    # Slots whose rows need more than values of the slot: those with an adapter, log probabilities or min_tokens.
    self._intricate: set[int] = set()
    self._latest: _Repetition | None = None  # the latest step, if the next may repeat it
    # What each of the latest kinds of steps without numpy has in common, if no slot has changed since.
    self._small: list[_SmallSteps] = []

  def layout(self, shape: StepShape) -> StepLayout:
    """Returns the layout of `shape`'s packed array."""
    return StepLayout(shape, self._table_width, self._num_slots, len(self._eos))

  def admit(self, admission: Admission) -> None:
    """Writes a slot for a new request."""
    self._latest = None
    self._small.clear()
    slot, params = admission.slot, admission.params
    table = self._block_tables[slot]
    table[:] = 0
    table[: len(admission.block_ids)] = admission.block_ids
    column = self._columns[:, slot]
    column[Column.SEED] = np.uint32(admission.seed & 0xFFFFFFFF).view(np.int32)
    column[Column.TOP_K] = params.top_k
    column[FLOAT_COLUMNS] = np.array(
      (
        params.temperature,
        params.top_p,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
      ),
      np.float32,
    ).view(np.int32)
    column[Column.FLAGS] = int(flags_of(params) | (Flag.MASK if admission.constrained else 0))
    self._min_lens[slot] = admission.num_prompt_tokens + params.min_tokens if params.min_tokens else 0
    if params.min_tokens:
      ids = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *self._eos)
      self._stop_ids[slot] = -1
      self._stop_ids[slot, : len(ids)] = ids
    self._logprobs.pop(slot, None)
    self._known.pop(slot, None)
    self._adapter_slots[slot] = admission.adapter_slot
    self._adapted.discard(slot)
    if admission.adapter_slot:
      self._adapted.add(slot)
    self._pooled.pop(slot, None)
    if params.embed:
      self._pooled[slot] = PooledStates(self._pooling, self._class_weights)  # new: steps on their way keep the last one
    if params.logprobs is not None or params.prompt_logprobs is not None:
      self._logprobs[slot] = params
    if params.prompt_logprobs is not None:
      self._known[slot] = admission.token_ids
    if admission.adapter_slot or params.min_tokens or slot in self._logprobs:
      self._intricate.add(slot)
    else:
      self._intricate.discard(slot)

  def mask_lines(self, batch: Batch) -> Iterator[tuple[int, bytes]]:
    """Yields each mask of the step and its line of SlotState.mask: the slot's, or a further one after a draft."""
    line, latest = self._num_slots, -1
    for row, mask in batch.masks:
      if row == latest:
        line += 1
        yield line, mask
      else:
        yield batch.slots[row], mask
      latest = row

  def has_adapters(self, batch: Batch) -> bool:
    """Returns whether a row of the step has an adapter."""
    return not self._adapted.isdisjoint(batch.slots)

  def embedding_rows(self, batch: Batch) -> list[EmbeddingRow]:
    """Returns the rows of a step whose hidden states belong to an embedding."""
    if not self._pooled:
      return []
    found = []
    for row, slot in enumerate(batch.slots):
      pooled = self._pooled.get(slot)
      if pooled is not None and (batch.samples[row] or pooled.needs_every_state):
        assert not pooled.needs_every_state or batch.num_logits[row] == batch.counts[row], "a mean needs every position"
        found.append(EmbeddingRow(row, batch.num_logits[row], pooled, batch.samples[row]))
    return found

  def pack(self, batch: Batch, layout: StepLayout, out: np.ndarray | None = None) -> tuple[np.ndarray, LogitRows]:
    """Returns the step's array, int32[layout.size].

    Call `admit` for all admissions of the batch first.

    Args:
      out: array to overwrite, for example that of a completed step, even the latest; None: allocates one. Nobody else
        may write to it until the next call.
    """
    for slot, index, block in batch.new_blocks:
      self._block_tables[slot, index] = block
    packed = np.empty(layout.size, np.int32) if out is None else out
    latest = self._latest
    if batch.repeats and latest is not None:
      latest.pack_next(batch, layout, self._block_size, packed)
      return packed, latest.rows
    rows = (self._pack_small if self._is_small(batch, layout) else self._pack)(batch, layout, packed)
    repeats = rows.plain and not any(batch.token_ids) and not batch.behind
    self._latest = _Repetition(batch, layout, packed, rows) if repeats else None
    return packed, rows

  def _is_small(self, batch: Batch, layout: StepLayout) -> bool:
    """Returns whether `_pack_small` may pack the step: few tokens, each of which is sampled after."""
    total, rows = batch.num_tokens, len(batch.slots)
    return (
      0 < total <= _SMALL_STEP
      and total == rows + sum(batch.num_drafts)
      and batch.num_logits == batch.counts
      and batch.computed_tokens == total
      and all(batch.samples)
      and self._intricate.isdisjoint(batch.slots)
      and not layout.plans
    )

  def _find_small(self, batch: Batch, layout: StepLayout) -> _SmallSteps:
    """Returns what the step has in common with others of its rows and counts, with and without drafts."""
    for small in reversed(self._small):
      if small.fits(batch, layout):
        return small
    columns = [self._column_view[slot :: self._num_slots + 1].tolist() for slot in batch.slots]
    small = _SmallSteps(batch, layout, columns, self._num_slots)
    self._small = [*self._small[1 - _SMALL_KINDS :], small]
    return small

  def _pack_small(self, batch: Batch, layout: StepLayout, packed: np.ndarray) -> LogitRows:
    """Does what `_pack` does for a step that `_is_small`, without numpy.

    Right after a step, caches are cold and each kind of numpy call takes 20 us, so the 25 kinds in `_pack` take longer
    than a small model's step has to spare for drafts.
    """
    small = self._find_small(batch, layout)
    values, num_logits = memoryview(packed), layout.shape.logits
    values[:] = small.values
    block_size, width, tables = self._block_size, self._table_width, self._table_view
    tokens: list[int] = []
    positions: list[int] = []
    places: list[int] = []
    line = layout.fields["block_tables"][0]
    for slot, start, count, ids in zip(batch.slots, batch.starts, batch.counts, batch.token_ids, strict=True):
      first = len(tokens)
      tokens += ids or (-1 - slot,)
      if ids and ids[0] == IN_FLIGHT:
        tokens[first] = -1 - slot
      table = tables[slot * width : (slot + 1) * width]
      values[line : line + width] = table
      line += width
      for position in range(start, start + count):
        positions.append(position)
        places.append(table[position // block_size] * block_size + position % block_size)
    columns = layout.fields["columns"][0]
    for place, numbers in (
      (layout.fields["tokens"][0], tokens),
      (layout.fields["positions"][0], positions),
      (layout.fields["slot_mapping"][0], places),
      (layout.fields["kv_lens"][0], [start + count for start, count in zip(batch.starts, batch.counts, strict=True)]),
      (columns + Column.POSITION * num_logits, [position + 1 for position in positions]),
      (columns + Column.DRAFT * num_logits, tokens if small.drafted else ()),
    ):
      values[place : place + len(numbers)] = array("i", numbers)
    drafts = tuple([(row, first, batch.token_ids[row][1:]) for row, first in small.drafted])
    return LogitRows(small.last, {}, small.targets, drafts, not drafts)

  def _pack(self, batch: Batch, layout: StepLayout, packed: np.ndarray) -> LogitRows:
    """Fills an array and returns its logit rows."""
    packed.fill(0)

    def field(name: str) -> np.ndarray:
      return _field(layout, packed, name)

    columns = field("columns")
    columns[Column.SLOT : Column.MASK + 1] = self._num_slots
    columns[Column.TARGET] = -1
    rows = len(batch.slots)
    if not rows:
      _make_plans(layout, packed)
      return LogitRows([], {}, [])

    slots = np.array(batch.slots, np.int32)
    starts = np.array(batch.starts, np.int32)
    total = batch.num_tokens
    # If a batching mode pads rows, the device computes that padding too, so that comparisons include its cost.
    computed = batch.computed_tokens
    num_logits = sum(batch.num_logits)
    field("used")[:] = computed, num_logits if computed == total else min(computed, layout.shape.logits)
    query_starts = field("query_starts")
    if total == rows:  # every row has one token
      row_of_token = slice(None)
      first = np.arange(rows, dtype=np.int32)
      ends = first + 1
      kv_lens, positions = starts + 1, starts
    else:
      counts = np.array(batch.counts, np.int32)
      ends = np.cumsum(counts, dtype=np.int32)
      first = ends - counts
      row_of_token = np.repeat(np.arange(rows), counts)
      kv_lens = starts + counts
      positions = np.arange(total, dtype=np.int32) + (starts - first)[row_of_token]
    query_starts[1 : rows + 1] = ends
    query_starts[rows + 1 :] = total
    field("kv_lens")[:rows] = kv_lens
    field("positions")[:total] = positions
    tokens = field("tokens")
    tokens[first] = -1 - slots
    if any(batch.token_ids):
      for row, ids in enumerate(batch.token_ids):
        if ids:
          in_flight = ids[0] == IN_FLIGHT
          tokens[first[row] + in_flight : ends[row]] = ids[in_flight:]
    np.take(self._block_tables, slots, axis=0, out=field("block_tables")[:rows], mode="clip")
    pages, offsets = np.divmod(positions, self._block_size)
    blocks = self._block_tables[slots[row_of_token], pages]
    field("slot_mapping")[:total] = blocks * self._block_size + offsets
    if layout.has_adapters and self._adapted:
      field("adapter_slots")[:total] = self._adapter_slots[slots[row_of_token]]
    if batch.behind:
      is_behind = np.array(batch.behind, np.int32) > 0
      field("behind_slots")[:rows] = np.where(is_behind, slots + 1, 0)
      field("behind_rows")[:total] = np.where(is_behind, np.arange(1, rows + 1), 0)[row_of_token]
    _make_plans(layout, packed, batch.behind)
    return self._pack_logit_rows(batch, layout, packed, slots, kv_lens, ends)

  def _pack_logit_rows(
    self, batch: Batch, layout: StepLayout, packed: np.ndarray, slots: np.ndarray, kv_lens: np.ndarray, ends: np.ndarray
  ) -> LogitRows:
    """Fills `columns` and `stop_ids`; returns how to read the output."""
    rows = len(slots)
    columns = _field(layout, packed, "columns")
    samples = np.array(batch.samples, np.bool_)
    num_logits = np.array(batch.num_logits, np.int32)
    logit_ends = np.cumsum(num_logits, dtype=np.int32)
    total = int(logit_ends[-1])
    last = logit_ends - 1
    if not total:
      return LogitRows(last.tolist(), {}, [])
    if (num_logits == 1).all():
      row, back = slice(None), np.int32(0)
    else:
      row = np.repeat(np.arange(rows), num_logits)
      back = (logit_ends[row] - 1) - np.arange(total, dtype=np.int32)  # distance from the row's last position
    num_after = np.array(batch.num_drafts, np.int32)[row] if batch.num_drafts else 0
    final = samples[row] & (back <= num_after)  # a row with drafts samples at each of them
    slot = slots[row]
    live = columns[:, :total]
    live[:NUM_SLOT_COLUMNS] = self._columns[:, slot]
    live[Column.SLOT : Column.MASK + 1] = slot
    live[Column.POSITION] = kv_lens[row] - back
    live[Column.TOKEN] = ends[row] - 1 - back
    flags = live[Column.FLAGS]
    flags *= final
    behind = np.array(batch.behind, np.int32)[row] if batch.behind else 0
    suppress = final & (live[Column.POSITION] - behind < self._min_lens[slot])
    suppresses = bool(suppress.any())
    if suppresses:
      flags[suppress] |= int(Flag.SUPPRESS)
      live[Column.MIN_LENGTH] = self._min_lens[slot]
      _field(layout, packed, "stop_ids")[:total] = self._stop_ids[slot]
    if batch.behind:
      flags[behind > 0] |= int(Flag.BEHIND)
    drafts = ()
    if any(batch.num_drafts):
      drafts = self._pack_drafts(batch, _field(layout, packed, "tokens"), live, logit_ends, back, row)
    wants: dict[int, tuple[int, tuple[int, ...]]] = {}
    if self._logprobs:
      for index, slot_of_row in enumerate(batch.slots):
        params = self._logprobs.get(slot_of_row)
        if params is not None and num_logits[index]:
          numbers = self._request_logprobs(index, batch, params, live, int(last[index]))
          if numbers:
            wants[index] = int(logit_ends[index]) - len(numbers), numbers
    plain = not suppresses and total == rows and bool(final.all())
    return LogitRows(last.tolist(), wants, live[Column.TARGET].tolist(), drafts, plain)

  def _pack_drafts(
    self,
    batch: Batch,
    tokens: np.ndarray,
    live: np.ndarray,
    logit_ends: np.ndarray,
    back: np.ndarray | np.int32,
    row: np.ndarray | slice,
  ) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Fills the columns of rows with drafts; returns LogitRows.drafts.

    Args:
      tokens: the packed token axis.
      live: the columns of the logit rows.
      logit_ends: the end of each row's logit rows.
      back, row: of each logit row, its distance from its row's last one, and the row.
    """
    num_drafts = np.array(batch.num_drafts, np.int32)
    assert num_drafts.max() <= MAX_DRAFTS, f"a row has {num_drafts.max()} drafts; the limit is {MAX_DRAFTS}"
    of_row = num_drafts[row]
    number = (of_row - back) * (of_row > 0)
    assert (number >= 0).all(), "a row with drafts has logit rows of other positions"
    live[Column.NUM_DRAFTS] = number
    live[Column.LATER_DRAFTS] = of_row - number
    live[Column.DRAFT] = tokens[live[Column.TOKEN]]
    masked = np.flatnonzero((number > 0) & ((live[Column.FLAGS] & int(Flag.MASK)) != 0))
    assert len(masked) <= MAX_DRAFT_MASKS, (
      f"the step has {len(masked)} masks after drafts; MAX_DRAFT_MASKS is the limit"
    )
    live[Column.MASK, masked] = np.arange(len(masked), dtype=np.int32) + (self._num_slots + 1)
    ends = logit_ends.tolist()
    return tuple(
      [(row, ends[row] - count - 1, batch.token_ids[row][1:]) for row, count in enumerate(batch.num_drafts) if count]
    )

  def _request_logprobs(
    self, row: int, batch: Batch, params: SamplingParams, live: np.ndarray, last: int
  ) -> tuple[int, ...]:
    """Marks the prompt positions of one row; returns the number of alternatives of each of its logit rows."""
    if batch.num_drafts and batch.num_drafts[row]:
      return () if params.logprobs is None else (params.logprobs,) * batch.num_logits[row]
    first = last - batch.num_logits[row] + 1
    end = last if batch.samples[row] else last + 1  # the sampled position has no target
    on_prompt = params.prompt_logprobs is not None and end > first
    if on_prompt:
      known = self._known[batch.slots[row]]
      live[Column.TARGET, first:end] = [known[position] for position in live[Column.POSITION, first:end].tolist()]
      live[Column.FLAGS, first:end] = int(Flag.LOGPROB | (Flag.TOP_LOGPROBS if params.prompt_logprobs else 0))
    elif params.logprobs is None or not batch.samples[row]:
      return ()
    numbers = (params.prompt_logprobs or 0,) * (end - first)
    return (*numbers, params.logprobs or 0) if batch.samples[row] else numbers
