"""Packs steps of few tokens without numpy. May not choose shapes or know models.

Right after a step a CPU's caches are cold, and each kind of numpy call costs microseconds whatever its size. A step
that repeats the one before needs few of them, but steps with drafts or forced tokens never repeat. Packer makes 60
calls for such a step, in 60 to 90 us; here it is plain Python over lists, in 33 to 73.
"""

from array import array

import numpy as np

from engine.batch import IN_FLIGHT, MAX_DRAFT_MASKS, MAX_DRAFTS, Admission, Batch
from engine.device.model_input import NUM_SLOT_COLUMNS, Column, Flag, LogitRows, Packer, StepLayout

MOST_TOKENS = 40  # of a small step
_MASK, _SAMPLE = int(Flag.MASK), int(Flag.SAMPLE)


class SmallStepPacker(Packer):
  """A Packer that packs most small steps by itself, to the same arrays. Others it leaves to Packer."""

  def __init__(
    self,
    num_slots: int,
    table_width: int,
    block_size: int,
    eos_token_ids: tuple[int, ...],
    pooling: str = "last",
    class_weights: np.ndarray | None = None,
  ):
    super().__init__(num_slots, table_width, block_size, eos_token_ids, pooling, class_weights)
    self._table_values = memoryview(self._block_tables.reshape(-1))
    self._slot_columns: list[tuple[int, ...]] = [(0,) * NUM_SLOT_COLUMNS] * (num_slots + 1)  # by slot
    self._wants_more: set[int] = set()  # slots with min_tokens or log probabilities

  def admit(self, admission: Admission) -> None:
    """See Packer."""
    super().admit(admission)
    slot, params = admission.slot, admission.params
    self._slot_columns[slot] = tuple(self._columns[:, slot].tolist())
    self._wants_more.discard(slot)
    if params.min_tokens or slot in self._logprobs:
      self._wants_more.add(slot)

  def _is_small(self, batch: Batch, layout: StepLayout) -> bool:
    return (
      len(batch.slots) > 0
      and batch.num_tokens == batch.computed_tokens <= MOST_TOKENS
      and not batch.behind
      and self._wants_more.isdisjoint(batch.slots)
      and all(batch.num_logits)
      and not (layout.plans or (layout.has_adapters and self._adapted))
    )

  def _pack(self, batch: Batch, layout: StepLayout, packed: np.ndarray) -> LogitRows:
    """Fills a zeroed array and returns its logit rows."""
    if not self._is_small(batch, layout):
      return super()._pack(batch, layout, packed)
    values, tables = memoryview(packed), self._table_values
    width, block_size, padding, slots = self._table_width, self._block_size, self._num_slots, batch.slots
    fields = {name: offset for name, (offset, _) in layout.fields.items()}
    num_rows, num_columns = layout.shape.rows, layout.shape.logits
    tokens, positions, places, ends, kv_lens = [], [], [], [], []
    # Of each logit row: its row's values, and its own.
    slot_of, fixed, masks, position_of, token_of, numbers, laters = [], [], [], [], [], [], []
    last, drafts, masked = [], [], padding
    num_drafts = batch.num_drafts or (0,) * len(slots)
    plain = all(batch.samples)
    table = fields["block_tables"]
    columns = zip(
      slots, batch.starts, batch.counts, batch.num_logits, batch.samples, batch.token_ids, num_drafts, strict=True
    )
    for row, (slot, start, count, num_logits, samples, ids, of_row) in enumerate(columns):
      assert of_row <= MAX_DRAFTS, f"a row has {of_row} drafts; the limit is {MAX_DRAFTS}"
      assert not of_row or num_logits == of_row + 1, "a row with drafts has logit rows of other positions"
      if ids and ids[0] != IN_FLIGHT:
        tokens += ids
      else:
        tokens.append(-1 - slot)
        tokens += ids[1:]
      first, stop = slot * width, start + count
      for position in range(start, stop):
        positions.append(position)
        places.append(tables[first + position // block_size] * block_size + position % block_size)
      kv_lens.append(stop)
      ends.append(len(tokens))
      values[table + row * width : table + (row + 1) * width] = tables[first : first + width]
      of_slot = self._slot_columns[slot]
      flags = of_slot[Column.FLAGS]
      for back in range(num_logits - 1, -1, -1):  # distance from the row's last position
        number = of_row - back if of_row else 0
        samples_here = samples and back <= of_row
        is_masked = number > 0 and samples_here and flags & _MASK
        masked += bool(is_masked)
        slot_of.append(slot)
        fixed.append(of_slot if samples_here else (*of_slot[:-1], 0))
        masks.append(masked if is_masked else slot)
        position_of.append(stop - back)
        token_of.append(len(tokens) - 1 - back)
        numbers.append(number)
        laters.append(of_row - number if of_row else 0)
      last.append(len(slot_of) - 1)
      if of_row:
        drafts.append((row, len(slot_of) - 1 - of_row, ids[1:]))
    total, num_logits = len(tokens), len(slot_of)
    assert masked - padding <= MAX_DRAFT_MASKS, (
      f"the step has {masked - padding} masks after drafts; MAX_DRAFT_MASKS is the limit"
    )

    def put(offset: int, numbers: list[int]) -> None:
      values[offset : offset + len(numbers)] = array("i", numbers)

    put(fields["tokens"], tokens)
    put(fields["positions"], positions)
    put(fields["slot_mapping"], places)
    put(fields["used"], [total, num_logits])
    put(fields["query_starts"], [0, *ends, *[total] * (num_rows - len(ends))])
    put(fields["kv_lens"], kv_lens)
    offset = fields["columns"]
    for column, of_column in enumerate(zip(*fixed, strict=True)):
      if any(of_column):
        put(offset + column * num_columns, list(of_column))
    rest = [padding] * (num_columns - num_logits)
    put(offset + Column.SLOT * num_columns, slot_of + rest)
    put(offset + Column.MASK * num_columns, masks + rest)
    put(offset + Column.POSITION * num_columns, position_of)
    put(offset + Column.TARGET * num_columns, [-1] * num_columns)
    put(offset + Column.TOKEN * num_columns, token_of)
    if drafts:
      put(offset + Column.NUM_DRAFTS * num_columns, numbers)
      put(offset + Column.DRAFT * num_columns, [tokens[index] for index in token_of])
      put(offset + Column.LATER_DRAFTS * num_columns, laters)
    plain = plain and num_logits == len(slots)
    return LogitRows(last, {}, [-1] * num_logits, tuple(drafts), plain)
