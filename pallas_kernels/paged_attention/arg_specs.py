"""Batches on which tests and benchmarks run every implementation; it may not import one.

A spec is a geometry, and `make_arguments` fills it with seeded numbers. A row is (queries, length): its queries are the
last of its `length` positions.
"""

import dataclasses
from typing import Any

import numpy as np

from pallas_kernels.paged_attention.plan import Geometry


@dataclasses.dataclass(frozen=True)
class ArgSpec:
  """The shapes of one call of ragged_paged_attention.

  Attributes:
    name: for test ids and tables.
    rows: (queries, length) of each used row, in batch order.
    num_tokens: T; tokens after the last row are padding.
    num_rows: S.
    block_size, table_width: tokens a block, and blocks a row of the table (B).
    num_heads, num_kv_heads, head_dim: N, K, H.
    sliding_window, soft_cap: see api.
    dtype: of q, k and v.
    kv_dtype: of the buffer; "": dtype.
    shared_blocks: leading blocks that all sufficiently long rows share (a cached prefix).
    spare_blocks: blocks of the pool that no row uses.
  """

  name: str
  rows: tuple[tuple[int, int], ...]
  num_tokens: int
  num_rows: int
  block_size: int = 16
  table_width: int = 24
  num_heads: int = 6
  num_kv_heads: int = 2
  head_dim: int = 64
  sliding_window: int | None = None
  soft_cap: float | None = None
  dtype: str = "float32"
  kv_dtype: str = ""
  shared_blocks: int = 0
  spare_blocks: int = 3

  def __str__(self) -> str:
    return self.name

  @property
  def stored_dtype(self) -> str:
    """Dtype of the buffer."""
    return self.kv_dtype or self.dtype

  @property
  def geometry(self) -> Geometry:
    """The static arguments of the call."""
    return Geometry(
      tokens=self.num_tokens,
      rows=self.num_rows,
      table_width=self.table_width,
      block_size=self.block_size,
      num_heads=self.num_heads,
      num_kv_heads=self.num_kv_heads,
      head_dim=self.head_dim,
      sliding_window=self.sliding_window,
    )

  @property
  def scale(self) -> float:
    """Factor on q.k."""
    return self.head_dim**-0.5


@dataclasses.dataclass(frozen=True)
class Arguments:
  """The arrays of a spec, on the host and in f32; the caller rounds them to the spec's dtype.

  Attributes:
    q: [T, N, H]; padding tokens hold NaN.
    keys, values: [length, K, H] of each used row.
    block_tables, kv_lens, query_starts: see api.RaggedMeta; entries past a row's blocks name a spare block.
    num_blocks: physical blocks, block 0 included.
  """

  q: np.ndarray
  keys: tuple[np.ndarray, ...]
  values: tuple[np.ndarray, ...]
  block_tables: np.ndarray
  kv_lens: np.ndarray
  query_starts: np.ndarray
  num_blocks: int

  def slots(self, row: int, block_size: int) -> np.ndarray:
    """Returns the slot of each position of `row`, int32[length]."""
    positions = np.arange(self.kv_lens[row])
    return (self.block_tables[row, positions // block_size] * block_size + positions % block_size).astype(np.int32)


def place_rows(spec: ArgSpec, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
  """Assigns blocks to the rows; returns block_tables, kv_lens, query_starts and num_blocks as in Arguments."""
  page, num_blocks = spec.block_size, 1 + spec.spare_blocks
  tables = []
  for _, length in spec.rows:
    shared = tables[0][: spec.shared_blocks] if tables and length >= spec.shared_blocks * page else []
    own = -(-length // page) - len(shared)
    tables.append([*shared, *range(num_blocks, num_blocks + own)])
    num_blocks += own
  ids = np.concatenate([[0], rng.permutation(np.arange(1, num_blocks))]).astype(np.int32)  # block 0 belongs to padding
  block_tables = np.full((spec.num_rows, spec.table_width), ids[1], np.int32)
  kv_lens, query_starts = np.zeros(spec.num_rows, np.int32), np.zeros(spec.num_rows + 1, np.int32)
  for row, (queries, length) in enumerate(spec.rows):
    block_tables[row, : len(tables[row])] = ids[tables[row]]
    kv_lens[row] = length
    query_starts[row + 1] = query_starts[row] + queries
  query_starts[len(spec.rows) + 1 :] = query_starts[len(spec.rows)]
  return block_tables, kv_lens, query_starts, num_blocks


def make_arguments(spec: ArgSpec, seed: int = 0) -> Arguments:
  """Fills a spec with seeded normal numbers and a random block table, in which rows share only the prefix."""
  rng = np.random.default_rng(seed)
  block_tables, kv_lens, query_starts, num_blocks = place_rows(spec, rng)
  shared = spec.shared_blocks * spec.block_size
  keys, values = [], []
  q = np.full((spec.num_tokens, spec.num_heads, spec.head_dim), np.nan, np.float32)
  for row, (queries, length) in enumerate(spec.rows):
    for each in (keys, values):
      each.append(rng.standard_normal((length, spec.num_kv_heads, spec.head_dim), np.float32))
      if row and shared and block_tables[row, 0] == block_tables[0, 0]:
        each[row][:shared] = each[0][:shared]
    q[slice(*query_starts[row : row + 2])] = rng.standard_normal((queries, spec.num_heads, spec.head_dim), np.float32)
  return Arguments(q, tuple(keys), tuple(values), block_tables, kv_lens, query_starts, num_blocks)


_MIXED = ((1, 5), (1, 300), (7, 7), (0, 0), (1, 1), (40, 140), (1, 16), (1, 17), (2, 65))

CONFORMANCE = (
  ArgSpec("nothing", (), 8, 4),
  ArgSpec("one_row_of_one_token", ((1, 1),), 2, 2),
  ArgSpec("decode", ((1, 3), (1, 64), (1, 65), (1, 380), (1, 16)), 8, 8),
  ArgSpec("chunk_among_decodes", ((1, 70), (20, 60), (2, 9), (0, 0), (1, 300)), 32, 32),
  ArgSpec("full_prefill_no_padding", ((33, 33),), 33, 1),
  ArgSpec("mixed", _MIXED, 64, 12),
  ArgSpec("mixed_window", _MIXED, 64, 12, sliding_window=50),
  ArgSpec("window_of_one", ((1, 90), (20, 90)), 24, 2, sliding_window=1),
  ArgSpec("soft_cap", _MIXED, 64, 12, soft_cap=2.0),
  ArgSpec("shared_prefix", ((1, 50), (1, 40), (10, 50), (1, 33)), 16, 4, shared_blocks=2),
  ArgSpec("page_8_head_128", _MIXED, 64, 12, block_size=8, table_width=40, head_dim=128, num_heads=2, num_kv_heads=2),
  ArgSpec("page_128_one_kv_head", _MIXED, 64, 12, block_size=128, table_width=3, num_heads=8, num_kv_heads=1),
  ArgSpec("table_no_multiple_of_a_chunk", ((1, 79), (5, 80)), 8, 2, table_width=5),
  ArgSpec("odd_sizes", ((1, 31), (11, 50)), 13, 3, block_size=10, table_width=7, head_dim=18, num_heads=5,
          num_kv_heads=5),
  ArgSpec("bfloat16", _MIXED, 64, 12, dtype="bfloat16"),
  ArgSpec("long", ((1, 2500), (30, 1800)), 32, 2, table_width=160, num_heads=4),
)  # fmt: skip


# Where a setting of the GPU kernels is wrong, one of these shows it: a row of several parts, two items of queries over
# more tiles of keys than a ring has, whole tiles of written tokens and a part of one, and rows of one tile.
SETTINGS = tuple(
  ArgSpec(f"settings, heads of {size}", ((1, 1100), (36, 700), (30, 30), (2, 130), (1, 64)), 73, 6, block_size=64,
          table_width=18, num_heads=8, num_kv_heads=2, head_dim=size, dtype="bfloat16")
  for size in (64, 128)
)  # fmt: skip


def _model_125m(name: str, rows: tuple[tuple[int, int], ...], num_tokens: int, num_rows: int) -> ArgSpec:
  """A Llama-shaped layer of 125M parameters: 12 query heads, 4 KV heads of 64, tables of 2,048 positions."""
  return ArgSpec(name, rows, num_tokens, num_rows, table_width=128, num_heads=12, num_kv_heads=4)


BENCHMARK = (
  _model_125m("1 row, 5 long", ((1, 5),), 8, 8),
  _model_125m("8 rows, 128 long", ((1, 128),) * 8, 8, 8),
  _model_125m("8 rows, 1000 long", ((1, 1000),) * 8, 8, 8),
  _model_125m("64 rows, 128 long", ((1, 128),) * 64, 64, 64),
  _model_125m("64 rows, 256 long", ((1, 256),) * 64, 64, 64),
  _model_125m("32 rows, 2048 long", ((1, 2048),) * 32, 32, 32),
  _model_125m("64 rows, 512 long", ((1, 512),) * 64, 64, 64),
  _model_125m("prefill of 256", ((256, 256),), 256, 64),
  _model_125m("prefill of 256 after 500", ((256, 756),), 256, 64),
  _model_125m("8 prefills of 64", ((64, 64),) * 8, 512, 64),
  _model_125m("64 rows, 200 long + prefill of 256", (*((1, 200),) * 63, (256, 256)), 512, 64),
)


def _llama_8b(name: str, rows: tuple[tuple[int, int], ...], num_tokens: int, **changes) -> ArgSpec:
  """A layer of Llama-3-8B: 32 query heads, 8 KV heads of 128, bf16, up to 64 rows of up to 16,384 positions."""
  settings: dict[str, Any] = {
    "num_rows": 64,
    "block_size": 64,
    "table_width": 256,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
  }
  return ArgSpec(name, rows, num_tokens, dtype="bfloat16", **(settings | changes))


# 64 lengths from 16,384 down to 128 by Zipf's law, unsorted.
_ZIPF = tuple((1, round(16384 * (1 + (rank * 37 + 20) % 64) ** (-7 / 6))) for rank in range(64))

GPU_BENCHMARK = (
  _llama_8b("decode 32 x 4096", ((1, 4096),) * 32, 32, num_rows=32),
  _llama_8b("decode 64 zipf", _ZIPF, 64),
  _llama_8b("decode 1 x 16384", ((1, 16384),), 8, num_rows=8),
  _llama_8b("prefill 1 x 4096", ((4096, 4096),), 4096),
  _llama_8b("prefill 4 x 4096", ((4096, 4096),) * 4, 16384),
  _llama_8b("prefill 512 of 4096", ((512, 4096),), 512),
  _llama_8b("decode 63 x 1024 + prefill 449", (*((1, 1024),) * 63, (449, 949)), 512),
  _llama_8b("decode 8 x 1024", ((1, 1024),) * 8, 8, num_rows=8),
  _llama_8b("decode 64 x 1024", ((1, 1024),) * 64, 64),
  _llama_8b("verify 32 x 4 of 4096", ((4, 4096),) * 32, 128),
  _llama_8b("decode 32 x 8192, window 4096", ((1, 8192),) * 32, 32, num_rows=32, sliding_window=4096),
  _llama_8b("decode 32 x 4096, heads of 64", ((1, 4096),) * 32, 32, num_rows=32, head_dim=64),
)
GPU_SPECS = (*GPU_BENCHMARK, *CONFORMANCE, *SETTINGS)  # what checks and timings of GPU kernels know by name
