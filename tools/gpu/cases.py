"""Makes numbers for the GPU kernels' specs on the device, and the expected results. Times nothing.

Keys and values that no row uses are NaN, as are the projections of padding tokens and every unwritten output, so a
kernel that reads or skips one shows. The oracle is numpy's dense attention in f32, row by row, on the kernel's numbers.
"""

from collections.abc import Callable, Iterable
import dataclasses
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import arg_specs
from pallas_kernels.paged_attention.arg_specs import ArgSpec
from pallas_kernels.paged_attention.fp8_kv import BYTES, from_fp8, to_fp8

_ROPE_THETA = 500_000.0
# bf16 keeps 8 bits of f32 results, and weights are rounded before they are multiplied with values.
_ABSOLUTE, _NORM = 4e-3, 5e-3
_BF16_STEP, _FP8_STEP = 2.0**-7, 2.0**-3  # largest relative distances of two neighbors in bf16 and e4m3


class Wrong(Exception):
  """A kernel's result is wrong; the text says where and by how much.

  Attributes:
    figures: what was found nevertheless.
  """

  figures: dict[str, Any] = {}


class Comparisons:
  """The comparisons of one job. A wrong one does not stop those that follow."""

  def __init__(self):
    self.errors: dict[str, float] = {}
    self.wrong: list[str] = []

  def add(self, name: str, compare: Callable[[], float]) -> None:
    """Calls a comparison that returns its error or raises Wrong."""
    try:
      self.errors[name] = compare()
    except Wrong as error:
      self.wrong.append(str(error))

  def require(self, is_right: bool, otherwise: str) -> None:
    """Adds a wrong result, described by `otherwise`, unless `is_right`."""
    if not is_right:
      self.wrong.append(otherwise)

  def finish(self, **figures: Any) -> dict[str, Any]:
    """Returns the figures and each error by name; raises Wrong, which holds them, with all wrong results."""
    figures = {**figures, **self.errors}
    if not self.wrong:
      return figures
    error = Wrong("; ".join(self.wrong))
    error.figures = figures | {"wrong": self.wrong}
    raise error


def shrunk(spec: ArgSpec) -> ArgSpec:
  """Returns a spec of the same kind, with the same heads and blocks, that the interpreter runs in seconds."""
  rows = []
  for queries, length in spec.rows[:4]:
    few = queries if queries <= 4 else max(5, queries // 256)
    rows.append((few, few if queries == length else max(few, length // 64)))
  window = spec.sliding_window and max(1, spec.sliding_window // 64)
  return dataclasses.replace(
    spec,
    rows=tuple(rows),
    num_tokens=sum(queries for queries, _ in rows) + 3,
    num_rows=len(rows) + 1,
    table_width=-(-max(length for _, length in rows) // spec.block_size) + 1,
    num_heads=2 * spec.geometry.group,
    num_kv_heads=2,
    sliding_window=window,
  )


def with_blocks_of(spec: ArgSpec, block_size: int) -> ArgSpec:
  """Returns the same rows over blocks of another size."""
  positions = spec.block_size * spec.table_width
  return dataclasses.replace(spec, block_size=block_size, table_width=-(-positions // block_size))


def read_bytes(spec: ArgSpec) -> int:
  """Returns the bytes of keys and values that the rows' queries see: the least that attention reads."""
  seen = 0
  for queries, length in spec.rows:
    seen += min(length, queries + spec.sliding_window - 1) if spec.sliding_window and queries else length
  return seen * spec.num_kv_heads * 2 * spec.head_dim * 2


def flops(spec: ArgSpec) -> int:
  """Returns the operations of the two products, for the visible pairs of query and key."""
  pairs = 0
  for queries, length in spec.rows:
    positions = np.arange(length - queries, length) + 1
    pairs += int(np.minimum(positions, spec.sliding_window or length).sum())
  return pairs * spec.num_heads * spec.head_dim * 4


@dataclasses.dataclass(frozen=True)
class KernelCase:
  """A spec laid out `copies` times over one pool, so that repeated calls read other memory.

  Attributes:
    spec: dtype bfloat16; kv_dtype "" or "uint8", for bytes of fp8.
    copies: copies of the rows.
    seed: seed of the layout and of the numbers.
  """

  spec: ArgSpec
  copies: int = 1
  seed: int = 0

  @cached_property
  def _placed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    spec, rows = self.spec, len(self.spec.rows)
    several = dataclasses.replace(spec, rows=spec.rows * self.copies, num_rows=rows * self.copies + 1)
    tables, _, _, num_blocks = arg_specs.place_rows(several, np.random.default_rng(self.seed))
    layouts = np.empty((self.copies, spec.num_rows, spec.table_width), np.int32)
    layouts[:, :rows] = tables[:-1].reshape(self.copies, rows, tables.shape[-1])
    layouts[:, rows:] = tables[-1]  # as for an unused row: a spare block
    _, lens, starts, _ = arg_specs.place_rows(spec, np.random.default_rng(self.seed))
    return layouts, lens, starts, num_blocks

  @property
  def tables(self) -> np.ndarray:
    """int32[copies, S, B]."""
    return self._placed[0]

  @property
  def kv_lens(self) -> np.ndarray:
    """int32[S]."""
    return self._placed[1]

  @property
  def query_starts(self) -> np.ndarray:
    """int32[S + 1]."""
    return self._placed[2]

  @property
  def num_blocks(self) -> int:
    return self._placed[3]

  @cached_property
  def positions(self) -> np.ndarray:
    """int32[T], each token's position in its row; 0 at padding."""
    found = np.zeros(self.spec.num_tokens, np.int32)
    for row, (queries, length) in enumerate(self.spec.rows):
      found[self.query_starts[row] :][:queries] = np.arange(length - queries, length)
    return found

  @cached_property
  def slots(self) -> np.ndarray:
    """int32[copies, T], slots of each token's key and value; 0 at padding."""
    page, counts = self.spec.block_size, [queries for queries, _ in self.spec.rows]
    rows, used = np.repeat(np.arange(len(counts)), counts), sum(counts)
    found = np.zeros((self.copies, self.spec.num_tokens), np.int32)
    at = self.positions[:used]
    found[:, :used] = self.tables[:, rows, at // page] * page + at % page
    return found

  @cached_property
  def angles(self) -> np.ndarray:
    """f32[T, H / 2], rotation angles by token and pair."""
    half = self.spec.head_dim // 2
    frequencies = _ROPE_THETA ** (-np.arange(half, dtype=np.float64) / half)
    return (self.positions[:, None] * frequencies).astype(np.float32)

  @property
  def nbytes(self) -> int:
    """The pool's size in bytes."""
    return self.kv_dtype.itemsize * int(np.prod(self.kv_shape()))

  @property
  def kv_dtype(self) -> np.dtype:
    """The pool's dtype."""
    return jnp.dtype(self.spec.stored_dtype)

  def kv_shape(self) -> tuple[int, ...]:
    """The pool's shape in the GPU kernels' layout: [P, K, 2, page, H]."""
    spec = self.spec
    return self.num_blocks, spec.num_kv_heads, 2, spec.block_size, spec.head_dim

  def _valid(self, before: bool) -> np.ndarray:
    """bool[P, page]: places of the pool with numbers, before or after this step's tokens are written."""
    page = self.spec.block_size
    valid = np.zeros((self.num_blocks, page), bool)
    for row, (queries, length) in enumerate(self.spec.rows):
      at = np.arange(length - queries if before else length)
      valid[self.tables[:, row, at // page], at % page] = True
    return valid

  def pool(self, before: bool) -> jax.Array:
    """bf16 or bytes of fp8: normal numbers where `_valid`, NaN elsewhere."""
    filled = _fill(self.kv_shape(), jax.random.key(self.seed), jnp.asarray(self._valid(before)))
    return to_fp8(filled) if self.kv_dtype == BYTES else filled

  def qkv(self, copy: int) -> jax.Array:
    """bf16[T, K, G + 2, H]: normal numbers, NaN at padding."""
    spec = self.spec
    shape = spec.num_tokens, spec.num_kv_heads, spec.num_heads // spec.num_kv_heads + 2, spec.head_dim
    return _padded(shape, jax.random.key(1000 + 31 * self.seed + copy), int(self.query_starts[-1]))

  def packed_queries(self, copy: int) -> jax.Array:
    """bf16[K, T * G, H], in the attention kernels' layout: of `qkv`, not rotated."""
    spec = self.spec
    group = spec.num_heads // spec.num_kv_heads
    q = self.qkv(copy)[:, :, :group].transpose(1, 0, 2, 3)
    return q.reshape(spec.num_kv_heads, -1, spec.head_dim)

  def sampled(self, most: int) -> np.ndarray:
    """Returns tokens to compare: all of a short row; else every few, and the last.

    The stride is a multiple of 13, so that it reaches all places of a tile.
    """
    found = []
    for row, (queries, _) in enumerate(self.spec.rows):
      step = max(1, 13 * round(queries / (13 * most))) if queries > most else 1
      at = np.unique(np.append(np.arange(0, queries, step), queries - 1)) if queries else np.arange(0)
      found.append(self.query_starts[row] + at)
    return np.concatenate(found).astype(np.int64) if found else np.zeros(0, np.int64)

  def rotated(self, vectors: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns f32 [n, ..., H] of `tokens`, rotated in split halves."""
    angle = np.expand_dims(self.angles[tokens], tuple(range(1, vectors.ndim - 1)))
    low, high = np.split(vectors, 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

  def attention(self, kv: jax.Array, queries: np.ndarray, tokens: np.ndarray, copy: int = 0) -> np.ndarray:
    """Returns the expected attention for some tokens.

    Args:
      kv: the pool with this step's keys and values.
      queries: f32[n, N, H], rotated, of `tokens` (ascending).
    """
    spec, out = self.spec, np.zeros(queries.shape, np.float32)
    for row, (_, length) in enumerate(spec.rows):
      mine = (tokens >= self.query_starts[row]) & (tokens < self.query_starts[row + 1])
      if mine.any():
        blocks = -(-length // spec.block_size)
        pages = numbers_of(kv[jnp.asarray(self.tables[copy, row, :blocks])])
        keys, values = pages.transpose(2, 1, 0, 3, 4).reshape(2, spec.num_kv_heads, -1, spec.head_dim)[:, :, :length]
        out[mine] = _dense(queries[mine], keys, values, self.positions[tokens[mine]], spec)
    return out


@partial(jax.jit, static_argnums=0)
def _fill(shape: tuple[int, ...], key: jax.Array, valid: jax.Array) -> jax.Array:
  numbers = jax.random.normal(key, shape, jnp.bfloat16)
  return jnp.where(valid[:, None, None, :, None], numbers, jnp.bfloat16(jnp.nan))


@partial(jax.jit, static_argnums=(0, 2))
def _padded(shape: tuple[int, ...], key: jax.Array, used: int) -> jax.Array:
  token = jnp.arange(shape[0], dtype=jnp.int32)[:, None, None, None]
  return jnp.where(token < used, jax.random.normal(key, shape, jnp.bfloat16), jnp.bfloat16(jnp.nan))


def _dense(q: np.ndarray, keys: np.ndarray, values: np.ndarray, positions: np.ndarray, spec: ArgSpec) -> np.ndarray:
  """Returns attention of queries [n, N, H] at `positions` over keys and values [K, L, H], in f32, by KV head."""
  out, (heads, length) = np.zeros(q.shape, np.float32), keys.shape[:2]
  group = spec.num_heads // heads
  key = np.arange(length)[None, None, :]
  seen = key <= positions[:, None, None]
  if spec.sliding_window is not None:
    seen &= key > positions[:, None, None] - spec.sliding_window
  for head in range(heads):
    here = slice(head * group, (head + 1) * group)
    scores = (q[:, here].reshape(-1, spec.head_dim) @ keys[head].T).reshape(len(q), group, length) * np.float32(
      spec.scale
    )
    if spec.soft_cap is not None:
      scores = spec.soft_cap * np.tanh(scores / spec.soft_cap)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out[:, here] = (weights.reshape(-1, length) @ values[head]).reshape(len(q), group, -1)
  return out


def rounded(array: np.ndarray) -> np.ndarray:
  """Returns f32 numbers rounded to bf16."""
  return array.astype(jnp.bfloat16).astype(np.float32)


def numbers_of(kv: jax.Array) -> np.ndarray:
  """Returns the numbers of a part of a pool, f32."""
  return np.asarray(from_fp8(kv) if kv.dtype == BYTES else kv).astype(np.float32)


def stored(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """Returns numbers of bf16, held in f32, as a pool of `dtype` holds them."""
  return np.asarray(from_fp8(to_fp8(jnp.asarray(array)))) if dtype == BYTES else array


def compare(
  what: str, found: np.ndarray, expected: np.ndarray, tokens: np.ndarray, dtype: np.dtype | None = None
) -> float:
  """Returns the relative error in norm of [n, ...] at `tokens`.

  Args: dtype: what `expected` was rounded to; None: it was not.

  Raises:
    Wrong: it is too large, or an element is NaN or off by more than rounding explains.
  """
  found = found.astype(np.float32)
  if not found.size:
    return 0.0
  if not np.isfinite(found).all():
    bad = ~np.isfinite(found).reshape(len(found), -1).all(1)
    raise Wrong(f"{what}: {bad.sum()} of {len(bad)} tokens hold NaN or Inf, the first is token {tokens[bad.argmax()]}")
  off = np.abs(found - expected)
  norm = float(np.linalg.norm(off) / max(np.linalg.norm(expected), 1e-30))
  # What both sides round may become two neighbors.
  relative = _BF16_STEP / 2 if dtype is None else _FP8_STEP if dtype == BYTES else _BF16_STEP
  over = off - (_ABSOLUTE + relative * np.abs(expected))
  if over.max() > 0 or not norm < _NORM:
    at = np.unravel_index(over.argmax(), over.shape)
    wrong = int((over.reshape(len(over), -1).max(1) > 0).sum())
    raise Wrong(
      f"{what}: error {norm:.1e} of the norm, {wrong} of {len(over)} tokens off; worst at token {tokens[at[0]]}, "
      f"index {tuple(int(i) for i in at[1:])}: {found[at]:.5f} and not {expected[at]:.5f}"
    )
  return norm


def tokens_of(out: jax.Array, tokens: Iterable[int] | np.ndarray) -> np.ndarray:
  """Returns some tokens of a device array [T, ...], f32 on the host."""
  return np.asarray(out[jnp.asarray(np.asarray(tokens, np.int32))]).astype(np.float32)
