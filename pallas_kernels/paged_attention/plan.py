"""Which piece of a ragged step each GPU thread block works on; decided on the host, sent as data. numpy only.

A step's kernels have a fixed grid and find their work in an int32 array that travels with the step: what changes is its
contents, so nothing recompiles. Rows of few queries (decode, speculation, a chunk's short tail) go to the decode
kernel, which reads the keys of one row once for all its queries and splits long rows over streaming multiprocessors
(SMs; Flash-Decoding, https://pytorch.org/blog/flash-decoding); the others go to the prefill kernel in tiles of queries.

Where a row is split follows from its own length alone, and parts are combined in order: so a row's result does not
depend on the batch, to the bit. Which SM takes which part does depend on the batch: each gets a list of its own, made
by longest processing time first (R. L. Graham, 1969).

The balance of a step's decode is the mean over SMs of the blocks they read, over the most that one of them reads. A row
that alone could keep all SMs busy has parts of one SM's share at most; and every split row ends in parts that halve,
which fill what the large ones leave uneven.
"""

import dataclasses
from functools import cached_property
import math

import numpy as np

ROWS_PER_TILE = 128  # (query, head of the group) pairs a tile of the prefill kernel: two warpgroups of 64
_DECODE_ROWS = 64  # the same for the decode kernel: one warpgroup
_DECODE_QUERIES = 4  # rows of so many are still bound by memory in the decode kernel, whose tile has 64 rows anyway
# int32 values, 128 bytes. XLA hands a kernel a pointer into the packed array where it can (slices of a multiple of 128
# bytes, wherever they begin), and the kernel's loads are of up to 16 bytes at once, at multiples of their size.
ALIGNMENT = 32
_TILE_KEYS = 64  # of the decode kernel: parts begin at whole tiles
_TURNS_SHARE = 16  # longest items that an SM's share must hold for SMs to take items in turns, see _deal
_HALVINGS = 4  # of what whole parts of a row leave over: its smallest part is about 20 times smaller than a whole one


def place(shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int]:
  """Puts int32 arrays one after the other, each at a multiple of ALIGNMENT.

  Returns:
    name -> offset and shape; and how many values there are in all, a multiple of ALIGNMENT.
  """
  fields, offset = {}, 0
  for name, shape in shapes.items():
    fields[name] = offset, shape
    offset += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
  return fields, offset


@dataclasses.dataclass(frozen=True)
class Geometry:
  """Everything static about a step's attention on one device.

  Attributes:
    tokens, rows, table_width: T, S, B of the rung.
    block_size: tokens a block of KV.
    num_heads, num_kv_heads, head_dim: N, K, H, on this device.
    sliding_window: a query sees its last `sliding_window` positions, itself included; None: all.
    invariant: a query must go through the same sums whether it is alone in its row or one of many.
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
    """G, query heads that share a KV head."""
    return self.num_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True)
class Plan:
  """The layout of a rung's work list, and its making.

  The array, int32[size], is six pieces (itself placed at a multiple of ALIGNMENT):
    counts [2]: how many decode items and prefill items there are.
    decode_items [max_decode_items, 4]: row, where its partial result goes (-1: the row has no other part), first block
      and last block + 1 of the row's table. Each is work for every KV head.
    sm_starts [num_sms + 1]: SM i works on sm_items[sm_starts[i]:sm_starts[i + 1]].
    sm_items [max_decode_items * K]: decode item * K + KV head; longest first in each SM's list.
    row_slots [S + 1]: row r has its partial results, in order, at row_slots[r] to row_slots[r + 1]; none if not split.
    prefill_items [max_prefill_items, 2]: (row, first token); row -1 is padding to be filled with zeros.
  Every token of the step is in exactly one decode row, prefill item or padding item.

  Partial results take `partial_bytes` of the device, whatever the rows hold. There is room for rows * max_splits * K of
  them, and max_splits is at most num_sms / K + 5: for 8 KV heads of 128, groups of 4 and 132 SMs 1.4 MiB a row.

  Attributes:
    geometry: of the rung.
    split_blocks: blocks of a part at least, 1 or more, but for the parts at a row's end. Shorter rows are not split.
    decode_queries: rows of 1 to this many queries, which fit a tile, are decoded; others are prefilled. 0: all are.
    num_sms: SMs that the decode kernel runs on.
  """

  geometry: Geometry
  split_blocks: int
  decode_queries: int = 4
  num_sms: int = 132

  @cached_property
  def max_splits(self) -> int:
    """The most parts of one row; 1 means that nothing is ever combined."""
    return self._parts.shape[1]

  @property
  def max_decode_items(self) -> int:
    """Also the number of slots for partial results."""
    return self.geometry.rows * self.max_splits

  @property
  def part_rows(self) -> int:
    """(Query, head of the group) pairs of a partial result: those of the most queries, as whole tiles of 8."""
    return -(-self.decode_queries * self.geometry.group // 8) * 8

  @property
  def partial_bytes(self) -> int:
    """Of all partial results: f32[slots, K, part_rows, H], and f32[slots, K, 64] for the sums of weights."""
    if self.max_splits == 1 or not self.decode_queries:
      return 0
    values = self.part_rows * self.geometry.head_dim + _DECODE_ROWS
    return self.max_decode_items * self.geometry.num_kv_heads * values * 4

  @property
  def tile_tokens(self) -> int:
    """Tokens a prefill item has at most."""
    return ROWS_PER_TILE // self.geometry.group

  @property
  def max_prefill_items(self) -> int:
    """All the tiles there can be: whole ones, one more a prefilled row, and those of the padding."""
    tokens, rows = self.geometry.tokens, self.geometry.rows
    return tokens // self.tile_tokens + min(rows, tokens // (self.decode_queries + 1)) + 1

  @cached_property
  def _placed(self) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int]:
    return place(
      {
        "counts": (2,),
        "decode_items": (self.max_decode_items, 4),
        "sm_starts": (self.num_sms + 1,),
        "sm_items": (self.max_decode_items * self.geometry.num_kv_heads,),
        "row_slots": (self.geometry.rows + 1,),
        "prefill_items": (self.max_prefill_items, 2),
      }
    )

  @property
  def fields(self) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Name -> offset and shape."""
    return self._placed[0]

  @property
  def size(self) -> int:
    """int32 values in all."""
    return self._placed[1]

  def split(self, array):
    """The pieces of an int32[size], numpy's or jax's, by name."""
    found = {}
    for name, (offset, shape) in self.fields.items():
      found[name] = array[offset : offset + math.prod(shape)].reshape(shape)
    return found

  @cached_property
  def _parts(self) -> np.ndarray:
    """int64[B + 1, max_splits]: how a row is split whose queries see so many blocks; zeros follow its last part.

    A whole part is what one SM reads if the row is alone, and `split_blocks` at least. What is left over, half to one
    and a half of a whole part, is halved again and again.
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
    ends = np.stack([*ends, left, np.zeros_like(left)], axis=1)  # not increasing
    at = np.arange(count.max() + _HALVINGS + 1)[None, :]
    behind = np.take_along_axis(ends, np.clip(at - count[:, None], 0, _HALVINGS + 1), axis=1)
    parts = np.where(at < count[:, None], whole[:, None], behind)
    until = np.minimum(np.cumsum(parts * quantum, axis=1), blocks[:, None])  # the last tile may have fewer blocks
    parts = np.diff(until, axis=1, prepend=0)
    return parts[:, : max(1, (parts > 0).sum(axis=1).max())]

  def make(self, query_starts: np.ndarray, kv_lens: np.ndarray) -> np.ndarray:
    """The work of a step.

    Args:
      query_starts: int32[S + 1], kv_lens: int32[S], as in api.RaggedMeta.

    Returns:
      int32[size].
    """
    geometry = self.geometry
    packed = np.zeros(self.size, np.int32)
    pieces = self.split(packed)  # views
    counts = np.diff(query_starts)
    window = geometry.sliding_window or geometry.table_width * geometry.block_size
    first = np.maximum(kv_lens - counts - (window - 1), 0)
    blocks = -(-kv_lens // geometry.block_size) - first // geometry.block_size

    rows = np.flatnonzero((counts > 0) & (counts <= self.decode_queries))
    parts = self._parts[blocks[rows]]
    is_part = parts > 0
    splits = is_part.sum(axis=1)
    slots = np.zeros(geometry.rows, np.int64)
    slots[rows] = np.where(splits > 1, splits, 0)
    pieces["row_slots"][1:] = np.cumsum(slots)
    length = parts[is_part]  # row by row
    row = np.repeat(rows, splits)
    number = np.arange(len(row)) - np.repeat(np.cumsum(splits) - splits, splits)
    slot = np.where(slots[row] > 0, pieces["row_slots"][row] + number, -1)
    end = np.cumsum(parts, axis=1)[is_part] + (first // geometry.block_size)[row]
    order = np.argsort(-length, kind="stable")
    pieces["decode_items"][: len(row)] = np.stack([row, slot, end - length, end], 1)[order]
    starts, numbers = _deal(length[order], geometry.num_kv_heads, self.num_sms)
    pieces["sm_starts"][:] = starts
    pieces["sm_items"][: len(numbers)] = numbers

    decode_items = len(row)
    rows = np.flatnonzero(counts > self.decode_queries)
    tiles = -(-counts[rows] // self.tile_tokens)
    tiled = np.repeat(rows, tiles)
    number = np.arange(len(tiled)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    token = query_starts[tiled] + number * self.tile_tokens
    end = np.minimum(token + self.tile_tokens, query_starts[tiled + 1])
    walk = kv_lens[tiled] - query_starts[tiled + 1] + end  # keys the tile's last query sees, but for the window
    order = np.argsort(-walk, kind="stable")
    padding = np.arange(query_starts[-1], geometry.tokens, self.tile_tokens)
    items = np.concatenate([np.stack([tiled, token], 1)[order], np.stack([np.full_like(padding, -1), padding], 1)])
    pieces["prefill_items"][: len(items)] = items
    pieces["counts"][:] = decode_items, len(items)
    return packed


def _deal(sizes: np.ndarray, copies: int, num_sms: int) -> tuple[np.ndarray, np.ndarray]:
  """Deals items out to SMs, the longest first and each to the SM that has least to do.

  Items of one size are dealt at once. Beyond 8 blocks those within a factor of two count as of one size: it takes as
  many passes as there are sizes.

  Where an SM's share of the work is at least _TURNS_SHARE times the longest item, the SMs take items in turns, forth
  and back, in one pass. Their loads then differ by the longest item at most: the balance is at least 16 / 17.

  Args:
    sizes: int[n] > 0, descending.
    copies: of each item, as many KV heads.
    num_sms: SMs.

  Returns:
    int[num_sms + 1], where each SM's list begins, and int[n * copies], the lists: item * copies + copy.
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
  before = np.append(0, np.cumsum(sizes))  # work of one copy of the items before
  padded = np.append(sizes, 0)
  counts, firsts = np.zeros((2, len(begins), num_sms), np.int64)
  loads, many = np.zeros(num_sms, np.int64), np.arange(1, num_sms + 1)
  for kind, (begin, end) in enumerate(zip(begins, ends, strict=True)):
    number = (end - begin) * copies
    work = (before[end] - before[begin]) * copies
    size = work / number
    order = np.argsort(loads, kind="stable")
    load = loads[order]
    # How high the work stands, poured over the SMs with the least. Each takes what fits below, the lowest one more.
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
  """The plan of a rung.

  Args:
    geometry: of the rung.
    split_tokens: positions that a part of a split row has at least, but for those at its end. A rung of few rows and KV
      heads, which all together give no SM twice as much to do, has shorter ones.
    num_sms: of the device, see tuning.count_sms.
  """
  split_blocks = -(-split_tokens // geometry.block_size)
  split_blocks = max(1, min(split_blocks, -(-2 * split_blocks * geometry.rows * geometry.num_kv_heads // num_sms)))
  # The two kernels add in different orders, so where that matters one of them takes all rows.
  decode_queries = 0 if geometry.invariant else min(_DECODE_QUERIES, _DECODE_ROWS // geometry.group)
  return Plan(geometry, split_blocks, decode_queries, num_sms)
