"""Which piece of a ragged step each GPU thread block works on; decided on the host, sent as data. numpy only.

A step's kernels have a fixed grid and find their work in an int32 array that travels with the step: what changes is its
contents, so nothing recompiles. Rows of few queries (decode, speculation, a chunk's short tail) go to the decode
kernel, which reads the keys of one row once for all its queries and splits long rows over thread blocks
(Flash-Decoding, https://pytorch.org/blog/flash-decoding); the others go to the prefill kernel in tiles of queries.

A row is split every `split_blocks` blocks, whatever its neighbours are, and parts are combined in order: so a row's
result does not depend on the batch, to the bit. Balance comes from the parts being small and the longest going first.
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
# That a rung has room for. Each has a partial result a KV head: 64 MiB in all for 8 KV heads of 128 and groups of 4.
_MOST_DECODE_ITEMS = 1024


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
    sliding_window: as in api.ragged_paged_attention.
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

  The array, int32[size], is four pieces (itself placed at a multiple of ALIGNMENT):
    counts [2]: how many decode items and prefill items there are.
    decode_items [max_decode_items, 2]: (row, split).
    first_slots [S]: where the partial results of a row's splits begin; split i is at first_slots[row] + i.
    prefill_items [max_prefill_items, 2]: (row, first token); row -1 is padding to be filled with zeros.
  Every token of the step is in exactly one decode row, prefill item or padding item.

  Attributes:
    geometry: of the rung.
    split_blocks: blocks a split.
    decode_queries: rows of 1 to this many queries are decoded; those of more are prefilled. 0: all are.
  """

  geometry: Geometry
  split_blocks: int
  decode_queries: int = 4

  def __post_init__(self):
    if self.split_blocks < 1 or not 0 <= self.decode_queries <= _DECODE_ROWS // self.geometry.group:
      raise ValueError(
        f"split_blocks={self.split_blocks} must be at least 1, and decode_queries={self.decode_queries} within "
        f"0..{_DECODE_ROWS // self.geometry.group} for groups of {self.geometry.group} heads"
      )

  @property
  def max_splits(self) -> int:
    """The most splits of one row; 1 means that nothing is ever combined."""
    return -(-self.geometry.table_width // self.split_blocks)

  @property
  def max_decode_items(self) -> int:
    """Also the number of slots for partial results."""
    return self.geometry.rows * self.max_splits

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
        "decode_items": (self.max_decode_items, 2),
        "first_slots": (self.geometry.rows,),
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
    splits = -(-blocks[rows] // self.split_blocks)
    pieces["first_slots"][rows] = np.cumsum(splits) - splits
    row = np.repeat(rows, splits)
    split = np.arange(len(row)) - np.repeat(np.cumsum(splits) - splits, splits)
    length = np.minimum(blocks[row] - split * self.split_blocks, self.split_blocks)
    order = np.argsort(-length, kind="stable")
    pieces["decode_items"][: len(row)] = np.stack([row, split], 1)[order]

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
    pieces["counts"][:] = len(row), len(items)
    return packed


def make_plan(geometry: Geometry, split_tokens: int) -> Plan:
  """The plan of a rung.

  Args:
    geometry: of the rung.
    split_tokens: positions a split has at least. It is doubled while the rung could have more than 1024 decode items:
      a rung of many rows has enough to do without short splits.

  Raises:
    ValueError: a group has more than 64 query heads.
  """
  split_blocks = -(-split_tokens // geometry.block_size)
  while split_blocks < geometry.table_width and (
    geometry.rows * -(-geometry.table_width // split_blocks) > _MOST_DECODE_ITEMS
  ):
    split_blocks *= 2
  # The two kernels add in different orders, so where that matters one of them takes all rows.
  decode_queries = 0 if geometry.invariant else min(_DECODE_QUERIES, _DECODE_ROWS // geometry.group)
  return Plan(geometry, split_blocks, decode_queries)
