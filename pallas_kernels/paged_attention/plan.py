"""Assigns the work of a ragged step to GPU thread blocks, on the host. May use numpy only.

A step's kernels have a fixed grid and read their work from an int32 array that travels with the step. Only the array's
contents change, so nothing recompiles. Rows of few queries (decode, speculation, a chunk's short tail) go to the decode
kernel. It reads a row's keys once for all its queries and splits long rows over streaming multiprocessors (SMs;
Flash-Decoding, https://pytorch.org/blog/flash-decoding). Other rows go to the prefill kernel in tiles of queries. A
rung of no more tokens than rows is for decodes, and an empty launch costs it time, so it has no prefill kernel. There,
the decode kernel takes longer rows in items of 64 (query, head of the group) pairs.

A row's own length and the rung decide where the plan splits it, and the kernel sums its parts in order. So the bits of
its result do not depend on the other rows. The assignment of parts to SMs does: longest processing time first (R. L.
Graham, 1969).

The balance of a step's decode is the mean number of blocks that SMs read, over the largest. A row that alone could keep
all SMs busy has parts of at most one SM's share. Every split row ends in parts that halve, which even out the loads.
Prefill items are not split. The longest come first, and SMs take them back and forth, so that loads differ by at most
the longest item.
"""

import dataclasses
from functools import cached_property
import math

import numpy as np

ROWS_PER_TILE = 128  # (query, head of the group) pairs a tile of the prefill kernel: two warpgroups of 64
_DECODE_ROWS = 64  # (query, head of the group) pairs a tile of the decode kernel: one warpgroup
_DECODE_QUERIES = 4  # most queries of a decode row: memory still bounds the kernel, whose tile has 64 rows anyway
# int32 values, 256 bytes. XLA passes a kernel a pointer into the packed array for a slice at a multiple of 128 bytes,
# and Mosaic GPU refuses to launch a kernel with an argument that is not at a multiple of 256 (`kExpectedHbmAlignment`).
ALIGNMENT = 64
_TILE_KEYS = 64  # keys a tile of the decode kernel; parts begin at whole tiles
_TURNS_SHARE = 16  # SMs take items in turns if an SM's share is at least this many of the longest items, see _deal
# The most tokens of a rung without the prefill kernel. That has 128 pairs an item, so it reads keys half as often; with
# 256 tokens, groups of 4 and 8 KV heads it has 64 items, which leave half of 132 SMs idle, and the decode kernel 128.
_MOST_TOKENS_WITHOUT_PREFILL = 256
_HALVINGS = 4  # halvings of a row's remainder: its smallest part is about 20 times smaller than a whole part


def place_arrays(shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int]:
  """Lays int32 arrays out one after the other, each at a multiple of ALIGNMENT.

  Returns:
    name -> offset and shape; and the total number of values, a multiple of ALIGNMENT.
  """
  fields, offset = {}, 0
  for name, shape in shapes.items():
    fields[name] = offset, shape
    offset += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
  return fields, offset


@dataclasses.dataclass(frozen=True)
class Geometry:
  """The static shapes of a step's attention on one device.

  Attributes:
    tokens, rows, table_width: T, S, B of the rung.
    block_size: tokens a block of KV.
    num_heads, num_kv_heads, head_dim: N, K, H, on this device.
    sliding_window: a query sees its last `sliding_window` positions, itself included; None: all.
    invariant: a query must have the same sums alone in its row and in a chunk.
  """

  tokens: int
  rows: int
  table_width: int
  block_size: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  sliding_window: int | None = None
  invariant: bool = False

  @property
  def group(self) -> int:
    """G, the query heads that share a KV head."""
    return self.num_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True)
class Plan:
  """The layout of a rung's work list.

  The array, int32[size] at a multiple of ALIGNMENT, has seven pieces:
    decode_items [max_decode_items, 5]: row, slot of the partial result (-1: there is one part), first block and last
      block + 1 of the row's table, first token. Each item is work for every KV head. Row -1 is padding, which the
      kernel fills with zeros.
    sm_starts [num_sms + 1]: SM i works on sm_items[sm_starts[i]:sm_starts[i + 1]].
    sm_items [max_decode_items * K]: decode item * K + KV head; longest first in each SM's list.
    row_slots [S + 1]: the partial results of row r are at row_slots[r]:row_slots[r + 1], in order; none if not split.
    prefill_items [max_prefill_items, 2]: (row, first token); row -1 is padding, which the kernel fills with zeros.
    prefill_count [1]: the number of prefill items.
  Every token of the step is in exactly one decode row, prefill item or padding item. Without the prefill kernel, there
  is no prefill item, and decode items have `item_queries` tokens of a longer row or of padding.

  Partial results take `partial_bytes` of the device. The plan allocates rows * max_splits * K of them, and max_splits
  is at most num_sms / K + 5. For 8 KV heads of 128, groups of 4 and 132 SMs that is 1.4 MiB a row.

  Attributes:
    geometry: of the rung.
    split_blocks: least blocks of a part, 1 or more, except at a row's end. The plan does not split shorter rows.
    decode_queries: the decode kernel takes rows of 1 to this many queries, the prefill kernel all others. 0: no rows.
    num_sms: SMs of the device, or of its part that the two attention kernels use.
    has_prefill: whether the rung has the prefill kernel; without it, the decode kernel takes all rows.
  """

  geometry: Geometry
  split_blocks: int
  decode_queries: int = 4
  num_sms: int = 132
  has_prefill: bool = True

  @cached_property
  def max_splits(self) -> int:
    """The most parts of one row; 1: no row is ever split."""
    return self._parts.shape[1]

  @property
  def max_slots(self) -> int:
    """The number of slots for partial results."""
    return self.geometry.rows * self.max_splits

  @property
  def max_decode_items(self) -> int:
    """The most decode items: parts, and without the prefill kernel tiles of longer rows and of padding."""
    return self.max_slots + (0 if self.has_prefill else self._most_tiles(self.item_queries))

  @property
  def item_queries(self) -> int:
    """The most tokens of a decode item."""
    return self.decode_queries if self.has_prefill else _DECODE_ROWS // self.geometry.group

  @property
  def item_rows(self) -> int:
    """(Query, head of the group) pairs of a decode item, rounded up to tiles of 8."""
    return -(-self.item_queries * self.geometry.group // 8) * 8

  @property
  def part_rows(self) -> int:
    """(Query, head of the group) pairs of a partial result: the most of a row, rounded up to tiles of 8."""
    return -(-self.decode_queries * self.geometry.group // 8) * 8

  @property
  def partial_bytes(self) -> int:
    """Bytes of all partial results: f32[slots, K, part_rows, H], and f32[slots, K, 64] for the sums of weights."""
    if self.max_splits == 1 or not self.decode_queries:
      return 0
    values = self.part_rows * self.geometry.head_dim + _DECODE_ROWS
    return self.max_slots * self.geometry.num_kv_heads * values * 4

  @property
  def tile_tokens(self) -> int:
    """The most tokens of a prefill item."""
    return ROWS_PER_TILE // self.geometry.group

  @property
  def max_prefill_items(self) -> int:
    """The most prefill items."""
    return self._most_tiles(self.tile_tokens) if self.has_prefill else 0

  def _most_tiles(self, tile_tokens: int) -> int:
    """Returns the most tiles of longer rows and of padding: whole ones, and one more for each row and for padding."""
    tokens, rows = self.geometry.tokens, self.geometry.rows
    return tokens // tile_tokens + min(rows, tokens // (self.decode_queries + 1)) + 1

  @cached_property
  def _placed(self) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int]:
    return place_arrays(
      {
        "decode_items": (self.max_decode_items, 5),
        "sm_starts": (self.num_sms + 1,),
        "sm_items": (self.max_decode_items * self.geometry.num_kv_heads,),
        "row_slots": (self.geometry.rows + 1,),
        "prefill_items": (self.max_prefill_items, 2),
        "prefill_count": (1,),
      }
    )

  @property
  def fields(self) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Offset and shape of each piece, by name."""
    return self._placed[0]

  @property
  def size(self) -> int:
    """The number of int32 values."""
    return self._placed[1]

  def split(self, array):
    """Returns the pieces of an int32[size] array of numpy or JAX, by name."""
    found = {}
    for name, (offset, shape) in self.fields.items():
      found[name] = array[offset : offset + math.prod(shape)].reshape(shape)
    return found

  @cached_property
  def _parts(self) -> np.ndarray:
    """int64[B + 1, max_splits]: blocks of each part, by the number of blocks that a row's queries see; then zeros.

    A whole part has the blocks that one SM reads if the row is alone, and at least `split_blocks`. The remainder, half
    to one and a half whole parts, is halved repeatedly.
    """
    blocks = np.arange(self.geometry.table_width + 1)
    quantum = max(1, _TILE_KEYS // self.geometry.block_size)  # blocks
    units = -(-blocks // quantum)
    least = -(-self.split_blocks // quantum)
    whole = np.maximum(least, -(-units * self.geometry.num_kv_heads // self.num_sms))
    count = np.where(units < least, 0, np.maximum(units - whole // 2, 0) // whole)
    left = units - count * whole
    ends = []
    for _ in range(_HALVINGS):
      half = np.where(units < least, left, (left + 1) // 2)
      ends.append(half)
      left = left - half
    ends = np.stack([*ends, left, np.zeros_like(left)], axis=1)  # non-increasing
    at = np.arange(count.max() + _HALVINGS + 1)[None, :]
    behind = np.take_along_axis(ends, np.clip(at - count[:, None], 0, _HALVINGS + 1), axis=1)
    parts = np.where(at < count[:, None], whole[:, None], behind)
    until = np.minimum(np.cumsum(parts * quantum, axis=1), blocks[:, None])  # the last tile may have fewer blocks
    parts = np.diff(until, axis=1, prepend=0)
    return parts[:, : max(1, (parts > 0).sum(axis=1).max())]

  def make_work(
    self, query_starts: np.ndarray, kv_lens: np.ndarray, least_lens: np.ndarray | None = None
  ) -> np.ndarray:
    """Returns the work list of a step.

    Args:
      query_starts: int32[S + 1], kv_lens: int32[S], as in api.RaggedMeta. On the device a row may turn out shorter.
      least_lens: int32[S], the least lengths of the rows; None: kv_lens.

    Returns:
      int32[size].
    """
    geometry = self.geometry
    packed = np.zeros(self.size, np.int32)
    pieces = self.split(packed)  # views
    counts = np.diff(query_starts)
    least_lens = kv_lens if least_lens is None else least_lens

    rows = np.flatnonzero((counts > 0) & (counts <= self.decode_queries))
    first = self._first_blocks(least_lens[rows] - counts[rows])
    parts = self._parts[-(-kv_lens[rows] // geometry.block_size) - first]
    is_part = parts > 0
    splits = is_part.sum(axis=1)
    slots = np.zeros(geometry.rows, np.int64)
    slots[rows] = np.where(splits > 1, splits, 0)
    pieces["row_slots"][1:] = np.cumsum(slots)
    length = parts[is_part]  # in row order
    row = np.repeat(rows, splits)
    number = np.arange(len(row)) - np.repeat(np.cumsum(splits) - splits, splits)
    slot = np.where(slots[row] > 0, pieces["row_slots"][row] + number, -1)
    end = np.cumsum(parts, axis=1)[is_part] + np.repeat(first, splits)
    decode_items = np.stack([row, slot, end - length, end, query_starts[row]], 1)

    tile_tokens = self.tile_tokens if self.has_prefill else self.item_queries
    rows = np.flatnonzero(counts > self.decode_queries)
    tiles = -(-counts[rows] // tile_tokens)
    tiled = np.repeat(rows, tiles)
    number = np.arange(len(tiled)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    token = query_starts[tiled] + number * tile_tokens
    position = kv_lens[tiled] - query_starts[tiled + 1] + token
    seen = position + np.minimum(tile_tokens, query_starts[tiled + 1] - token)  # keys of the last query, no window
    first = self._first_blocks(position - kv_lens[tiled] + least_lens[tiled])
    end = -(-seen // geometry.block_size)
    padding = np.arange(query_starts[-1], geometry.tokens, tile_tokens)
    none, zero = np.full_like(padding, -1), np.zeros_like(padding)
    if self.has_prefill:
      order = np.argsort(first - end, kind="stable")
      items = np.concatenate([np.stack([tiled, token], 1)[order], np.stack([none, padding], 1)])
      pieces["prefill_items"][: len(items)] = items
      pieces["prefill_count"][0] = len(items)
    else:
      longer = np.stack([tiled, np.full_like(tiled, -1), first, end, token], 1)
      decode_items = np.concatenate([decode_items, longer, np.stack([none, none, zero, zero, padding], 1)])
      tile = max(1, _TILE_KEYS // geometry.block_size)  # what an item of padding costs, in blocks
      length = np.concatenate([length, end - first, np.full_like(padding, tile)])

    order = np.argsort(-length, kind="stable")
    pieces["decode_items"][: len(order)] = decode_items[order]
    starts, numbers = _deal(length[order], geometry.num_kv_heads, self.num_sms)
    pieces["sm_starts"][:] = starts
    pieces["sm_items"][: len(numbers)] = numbers
    return packed

  def _first_blocks(self, positions: np.ndarray) -> np.ndarray:
    """Returns the first block that a query at each position sees."""
    window = self.geometry.sliding_window or self.geometry.table_width * self.geometry.block_size
    return np.maximum(positions - (window - 1), 0) // self.geometry.block_size


def _deal(sizes: np.ndarray, copies: int, num_sms: int) -> tuple[np.ndarray, np.ndarray]:
  """Assigns items to SMs, the longest first and each to the SM with the least work.

  One pass assigns all items of one size. Beyond 8 blocks, sizes within a factor of two count as one, which limits the
  number of passes.

  If an SM's share of the work is at least _TURNS_SHARE times the longest item, a single pass deals items back and forth
  over the SMs. Loads then differ by at most the longest item, so the balance is at least 16 / 17.

  Args:
    sizes: int[n] > 0, descending.
    copies: copies of each item, one a KV head.
    num_sms: number of SMs.

  Returns:
    int[num_sms + 1], the start of each SM's list, and int[n * copies], the lists of item * copies + copy.
  """
  total = len(sizes) * copies
  if total and sizes[0] * num_sms * _TURNS_SHARE <= sizes.sum() * copies:
    turns = np.arange(-(-total // num_sms) * num_sms).reshape(-1, num_sms)
    turns[1::2] = turns[1::2, ::-1]
    lists = turns.transpose()
    is_item = lists < total
    return np.append(0, np.cumsum(is_item.sum(axis=1))), lists[is_item]
  kinds = np.where(sizes <= 8, sizes, 8 + np.ceil(np.log2(sizes / 8)))
  begins = np.flatnonzero(np.diff(kinds, prepend=-1))
  ends = np.append(begins, len(sizes))[1:]
  before = np.append(0, np.cumsum(sizes))  # work of one copy of the preceding items
  padded = np.append(sizes, 0)
  counts, firsts = np.zeros((2, len(begins), num_sms), np.int64)
  loads, many = np.zeros(num_sms, np.int64), np.arange(1, num_sms + 1)
  for kind, (begin, end) in enumerate(zip(begins, ends, strict=True)):
    number = (end - begin) * copies
    work = (before[end] - before[begin]) * copies
    size = work / number
    order = np.argsort(loads, kind="stable")
    load = loads[order]
    # Fills the least loaded SMs up to a common level. Each takes the items that fit below it, the lowest one more.
    levels = (work + np.cumsum(load)) / many
    level = levels[np.argmax(np.append(levels[:-1] <= load[1:], True))]
    taken = (np.maximum(level - load, 0) / size + 1e-9).astype(np.int64)
    taken[np.argsort(load + taken * size, kind="stable")[: number - taken.sum()]] += 1
    until = begin * copies + np.append(0, np.cumsum(taken))
    item, copy = np.divmod(until, copies)
    loads[order] = load + np.diff(before[item] * copies + padded[item] * copy)
    counts[kind, order], firsts[kind, order] = taken, until[:-1]
  lengths, starts = counts.T.ravel(), firsts.T.ravel()
  numbers = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
  return np.append(0, np.cumsum(counts.sum(axis=0))), numbers


def make_plan(geometry: Geometry, split_tokens: int, num_sms: int) -> Plan:
  """Makes the plan of a rung.

  Args:
    geometry: of the rung.
    split_tokens: least positions of a part, except at a row's end, for each (row, KV head) of an SM's share. On an H100
      a part costs as much as 60 positions more, whatever its length. Rungs of many rows have enough items to keep SMs
      busy with few parts; rungs of few rows have not.
    num_sms: SMs of the device, see tuning.count_sms.
  """
  share = geometry.rows * geometry.num_kv_heads / num_sms
  split_blocks = max(1, math.ceil(split_tokens * share / geometry.block_size))
  # The two kernels sum in different orders, so an invariant step sends all rows to one of them.
  decode_queries = 0 if geometry.invariant else min(_DECODE_QUERIES, _DECODE_ROWS // geometry.group)
  is_for_decodes = geometry.tokens <= min(geometry.rows, _MOST_TOKENS_WITHOUT_PREFILL)
  return Plan(geometry, split_blocks, decode_queries, num_sms, geometry.invariant or not is_for_decodes)
