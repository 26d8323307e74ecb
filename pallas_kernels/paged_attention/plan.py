"""Assigns the work of a ragged step to GPU thread blocks, on the host. May use numpy only.

A step's kernels have a fixed grid and read their work from an int32 array that travels with the step. Only the array's
contents change, so nothing recompiles. Rows of few queries (decode, speculation, a chunk's short tail) go to the decode
kernel. It reads a row's keys once for all its queries and splits long rows over streaming multiprocessors (SMs;
Flash-Decoding, https://pytorch.org/blog/flash-decoding). Other rows go to the prefill kernel in tiles of queries. A
rung of no more tokens than rows is for decodes, and an empty launch costs it time, so it has no prefill kernel. There,
the decode kernel takes longer rows in items of 64 (query, head of the group) pairs.

The plan of a decode lays the tiles of keys of all (row, KV head) pairs on one line and cuts it into equal shares, one a
worker (Stream-K, arXiv:2301.03598; for attention: LeanAttention, arXiv:2405.10480). A worker is a pair of warpgroups;
an SM has two. So a worker has whole rows and at most two parts of rows, whatever their lengths. Each part costs as much
as another tile. The plan cuts no row where whole rows are balanced within two tiles.

The kernel sums a row's parts in order, so no result depends on timing. The other rows decide where a row is cut, and so
the last bits of its result; invariant rungs send all rows to the prefill kernel, which splits none.

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
_PART_TILES = 1  # tiles of keys that a part costs more, whatever its length: 1.46 us beside 1.52 a tile on an H100
_MOST_SLACK_TILES = 2  # a worker may have at most so many tiles above its share before the plan cuts rows
_SHORTEST_SHARE = 16  # a cut leaves at least a sixteenth of a share on each side
_SHARES_OF_ONE_PAIR = 4  # an SM with as many least shares or less leaves its other pair idle: fewer parts to sum
# The most tokens of a rung without the prefill kernel. That has 128 pairs an item, so it reads keys half as often; with
# 256 tokens, groups of 4 and 8 KV heads it has 64 items, which leave half of 132 SMs idle, and the decode kernel 128.
_MOST_TOKENS_WITHOUT_PREFILL = 256


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


# Of each part, in the order of workers: its unit (an item of one KV head), first tile and last tile + 1 in it; and the
# number of parts of each worker.
_Parts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Plan:
  """The layout of a rung's work list.

  The array, int32[size] at a multiple of ALIGNMENT, has four pieces:
    decode_items [max_decode_items, 8]: row, KV head, first block and last block + 1 of the row's table, first token.
      Then slot of the partial result, and first slot and number of parts of the row and head. Slot -1 is for a row of
      one part, and row -1 is padding, which the kernel fills with zeros.
    worker_starts [num_workers + 1]: worker i works on decode_items[worker_starts[i]:worker_starts[i + 1]], which are
      neighbors on the line. Worker p * num_sms + s is pair p of SM s.
    prefill_items [max_prefill_items, 2]: (row, first token); row -1 is padding, which the kernel fills with zeros.
    prefill_count [1]: the number of prefill items.
  Every token of the step is in exactly one decode row, prefill item or padding item. Without the prefill kernel, there
  is no prefill item, and decode items have `item_queries` tokens of a longer row or of padding.

  Partial results take `partial_bytes` of the device: the plan cuts at most num_workers - 1 times, and each cut gives at
  most two parts.

  Attributes:
    geometry: of the rung.
    split_blocks: least blocks of a worker's share, 1 or more.
    decode_queries: the decode kernel takes rows of 1 to this many queries, the prefill kernel all others. 0: no rows.
    num_sms: SMs of the device, or of its part that the two attention kernels use.
    pairs: pairs of warpgroups of the decode kernel on an SM.
    has_prefill: whether the rung has the prefill kernel; without it, the decode kernel takes all rows.
  """

  geometry: Geometry
  split_blocks: int
  decode_queries: int = 4
  num_sms: int = 132
  pairs: int = 2
  has_prefill: bool = True

  @property
  def num_workers(self) -> int:
    """Pairs of warpgroups of the decode kernel on all SMs."""
    return self.num_sms * self.pairs

  @property
  def _quantum(self) -> int:
    """Blocks of a tile of keys, or 1 if a block is longer; the plan cuts at multiples of it, and calls it a tile."""
    return max(1, _TILE_KEYS // self.geometry.block_size)

  @property
  def _least(self) -> int:
    """The least tiles of a worker's share."""
    return -(-self.split_blocks // self._quantum)

  @property
  def _shortest(self) -> int:
    """The least tiles of a part."""
    return max(1, self._least // 4)

  @property
  def _slack(self) -> int:
    """Tiles that a worker may have above its share before the plan cuts rows; 0 for shares of a tile."""
    return min(_MOST_SLACK_TILES, self._least // 2)

  @property
  def max_parts(self) -> int:
    """The most parts of a row and head; 1: no row is ever cut."""
    return max(1, min(self.num_workers, -(-self.geometry.table_width // self._quantum) // self._shortest))

  @property
  def max_slots(self) -> int:
    """The number of slots for partial results, each of a KV head."""
    return 2 * (self.num_workers - 1) if self.max_parts > 1 else 0

  @property
  def max_decode_items(self) -> int:
    """The most decode items: rows, without the prefill kernel tiles of longer rows and of padding, and a part a cut."""
    whole = self.geometry.rows + (0 if self.has_prefill else self._most_tiles(self.item_queries))
    return whole * self.geometry.num_kv_heads + self.num_workers - 1

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
    """Bytes of all partial results: f32[slots, part_rows, H], and f32[slots, 64] for the sums of weights."""
    return self.max_slots * (self.part_rows * self.geometry.head_dim + _DECODE_ROWS) * 4 if self.decode_queries else 0

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
        "decode_items": (self.max_decode_items, 8),
        "worker_starts": (self.num_workers + 1,),
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
    decoded = [np.stack([rows, first, -(-kv_lens[rows] // geometry.block_size), query_starts[rows]], 1)]

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
      decoded += [np.stack([tiled, first, end, token], 1), np.stack([none, zero, zero, padding], 1)]
    if any(map(len, decoded)):
      self._share_out(np.concatenate(decoded), len(decoded[0]), pieces["decode_items"], pieces["worker_starts"])
    return packed

  def _share_out(self, items: np.ndarray, num_rows: int, decode_items: np.ndarray, worker_starts: np.ndarray) -> None:
    """Shares items out over the workers.

    Args:
      items: int[n, 4] of row, first block, last block + 1, first token; one for all KV heads.
      num_rows: the items at the start that may be cut.
      decode_items, worker_starts: the pieces to fill.
    """
    heads, quantum = self.geometry.num_kv_heads, self._quantum
    # What follows is by unit: an item of one KV head.
    of_item = np.maximum(-(-(items[:, 2] - items[:, 1]) // quantum), 1)  # padding costs a tile
    tiles = np.repeat(of_item, heads)
    costs = tiles + _PART_TILES
    total = int(costs.sum())
    is_short = total <= _SHARES_OF_ONE_PAIR * self._least * self.num_sms
    workers = self.num_sms if is_short else self.num_workers

    share = max(total / workers, self._least + _PART_TILES)  # without the parts that cuts add
    found, num_cut = None, num_rows * heads
    if self.max_parts == 1 or len(tiles) > workers:
      found = self._deal_whole(of_item, costs, workers, share + self._slack)
    else:
      parts = -(-tiles // (int(share) + self._slack - _PART_TILES))
      if parts.sum() <= workers and (parts[num_cut:] == 1).all():
        found = _cut_evenly(tiles, parts)
    units, begins, ends, lengths = found or self._cut_line(tiles, costs, num_cut, share)
    parts = np.bincount(units)[units]

    count = len(units)
    columns = np.empty((8, count), np.int32)
    item, columns[1] = np.divmod(units, heads)
    columns[0], first, last, columns[4] = np.ascontiguousarray(items.T)[:, item]
    columns[2] = first + begins * quantum
    columns[3] = np.minimum(first + ends * quantum, last)
    columns[5], columns[6], columns[7] = -1, 0, parts
    cut = np.flatnonzero(parts > 1)  # a unit's parts are neighbors
    if len(cut):
      columns[5, cut] = np.arange(len(cut))
      firsts = np.flatnonzero(np.diff(units[cut], prepend=-1))
      columns[6, cut] = np.repeat(firsts, parts[cut[firsts]])
    decode_items[:count] = columns.T
    worker_starts[1 : 1 + len(lengths)] = np.cumsum(lengths)
    worker_starts[1 + len(lengths) :] = count

  def _deal_whole(self, of_item: np.ndarray, costs: np.ndarray, workers: int, most: float) -> _Parts | None:
    """Deals whole units back and forth over the workers, the longest first; None if one has a cost above `most`.

    Args:
      of_item: int[n] tiles of each item.
      costs: int[n * K] of each unit.
    """
    heads = self.geometry.num_kv_heads
    units = (np.argsort(-of_item, kind="stable")[:, None] * heads + np.arange(heads)).ravel()
    turns = np.arange(-(-len(units) // workers) * workers).reshape(-1, workers)
    turns[1::2] = turns[1::2, ::-1]
    loads = np.append(costs[units], np.zeros(turns.size - len(units), np.int64))[turns].sum(axis=0)
    if loads.max() > most and self.max_parts > 1:
      return None
    is_unit = len(units) > turns.T
    units = units[turns.T[is_unit]]
    return units, np.zeros_like(units), np.repeat(of_item, heads)[units], is_unit.sum(axis=1)

  def _cut_line(self, tiles: np.ndarray, costs: np.ndarray, num_cut: int, share: float) -> _Parts:
    """Cuts the line of units into shares of equal cost.

    Args:
      tiles, costs: int[n] of each unit.
      num_cut: the units at the start that may be cut.
      share: cost of a share.
    """
    total = int(costs.sum())
    cuts = share * np.arange(1, math.ceil(total / share - 1e-9))
    until = np.cumsum(costs)
    unit = np.minimum(np.searchsorted(until, cuts, "right"), len(tiles) - 1)
    length = tiles[unit]
    at = np.clip(np.rint(cuts - (until - costs)[unit] - _PART_TILES), 0, length).astype(np.int64)
    shortest = max(self._shortest, int(share) // _SHORTEST_SHARE)
    is_whole = (np.minimum(at, length - at) < shortest) | (unit >= num_cut)
    at = np.where(is_whole, np.where(2 * at < length, 0, length), at)
    ends = np.cumsum(tiles)
    cuts = (ends - tiles)[unit] + at  # positions on the line, in tiles
    begins = np.sort(np.concatenate([ends - tiles, cuts[cuts < ends[-1]]]), kind="stable")  # two runs
    begins = begins[np.diff(begins, prepend=-1) > 0]
    of_part = np.searchsorted(ends, begins, "right")
    before = (ends - tiles)[of_part]
    lasts = np.append(begins[1:], ends[-1])
    starts = np.searchsorted(begins, cuts)
    return of_part, begins - before, lasts - before, np.diff(starts, prepend=0, append=len(begins))

  def _first_blocks(self, positions: np.ndarray) -> np.ndarray:
    """Returns the first block that a query at each position sees."""
    window = self.geometry.sliding_window or self.geometry.table_width * self.geometry.block_size
    return np.maximum(positions - (window - 1), 0) // self.geometry.block_size


def _cut_evenly(tiles: np.ndarray, parts: np.ndarray) -> _Parts:
  """Cuts units into parts of equal length, one a worker.

  Args:
    tiles, parts: int[n] of each unit.
  """
  units = np.repeat(np.arange(len(tiles)), parts)
  number = np.arange(len(units)) - np.repeat(np.cumsum(parts) - parts, parts)
  begins, ends = (tiles[units] * each // parts[units] for each in (number, number + 1))
  return units, begins, ends, np.ones_like(units)


def make_plan(geometry: Geometry, split_tokens: int, num_sms: int, pairs: int) -> Plan:
  """Makes the plan of a rung.

  Args:
    geometry: of the rung.
    split_tokens: least positions of a worker's share.
    num_sms: SMs of the device, see tuning.count_sms.
    pairs: pairs of warpgroups of the decode kernel on an SM.
  """
  split_blocks = max(1, split_tokens // geometry.block_size)
  # The two kernels sum in different orders, so an invariant step sends all rows to one of them.
  decode_queries = 0 if geometry.invariant else min(_DECODE_QUERIES, _DECODE_ROWS // geometry.group)
  is_for_decodes = geometry.tokens <= min(geometry.rows, _MOST_TOKENS_WITHOUT_PREFILL)
  return Plan(geometry, split_blocks, decode_queries, num_sms, pairs, geometry.invariant or not is_for_decodes)
