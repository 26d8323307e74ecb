"""What a model calls for attention over paged keys and values; it may not compute anything itself.

An implementation is a module of this folder with the functions that `reference.py` has: `kv_shape`, `num_kv_heads`,
`write_kv`, `ragged_paged_attention`. It owns the layout of the KV buffer: callers treat a buffer as opaque and get its
shape from `kv_shape`. It may have besides

  check_supported(geometry, dtype)                  refuses, with NotImplementedError, what it cannot do
  attend(qkv, cos, sin, kv, ...)                    rotary embedding, KV write and attention as one (gpu.py, cpu.py)
  make_plan(geometry, device_kind) -> Plan          host-made work lists that travel with every step (plan.py)
  prepare(block_tables, kv_lens, query_starts, ...) what all layers of a step need, computed once on the device

Choosing happens here, by name, before anything is compiled.
"""

from collections.abc import Callable
import dataclasses
from functools import cached_property
import importlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.plan import Geometry, Plan

# By name; imported when first used, since a GPU's needs what a TPU's machine may lack.
IMPLEMENTATIONS = ("reference", "cpu", "gpu", "tpu")
# Where a query goes through the same sums alone in its row or in a chunk, if `Geometry.invariant` asks for it; and
# where they are the same in a step of any shape besides.
WITHIN_A_SHAPE = ("reference", "cpu", "gpu")
ACROSS_SHAPES = ("cpu",)
# Best first. A CPU's second is as whole as its first, only slower: so there, and there alone, "auto" may take it.
_OF_PLATFORM = {"cpu": ("cpu", "reference"), "gpu": ("gpu",), "cuda": ("gpu",), "tpu": ("tpu",)}
GPU_CAPABILITY = "9.0"  # older GPUs have no TMA and no wgmma, newer ones no wgmma


def implementation(name: str) -> ModuleType:
  """The module of an implementation; ValueError for a name that is none."""
  if name not in IMPLEMENTATIONS:
    raise ValueError(f"paged attention: implementation {name!r} is not one of {', '.join(IMPLEMENTATIONS)}")
  return importlib.import_module(f"pallas_kernels.paged_attention.{name}")


def candidates(requested: str, platform: str) -> tuple[str, ...]:
  """The implementations for a platform ("cpu", "gpu", "tpu"), best first: `requested`, or with "auto" its own.

  Raises:
    NotImplementedError: the platform has none of its own.
  """
  if requested != "auto":
    implementation(requested)
    return (requested,)
  if platform not in _OF_PLATFORM:
    raise NotImplementedError(
      f"paged attention: no implementation for platform {platform!r}; supported are {', '.join(_OF_PLATFORM)}, and "
      "--attention=reference runs anywhere, slowly"
    )
  return _OF_PLATFORM[platform]


def check_gpu_capability(compute_capability: str) -> None:
  """Refuses a GPU that the implementation "gpu" cannot run on, before anything compiles.

  Args:
    compute_capability: as `jax.Device.compute_capability` has it, such as "9.0".

  Raises:
    NotImplementedError: it is not GPU_CAPABILITY.
  """
  if compute_capability != GPU_CAPABILITY:
    raise NotImplementedError(
      f"paged attention on GPU: compute capability {compute_capability} is not supported; supported is "
      f"{GPU_CAPABILITY} (Hopper: H100, H200, H20, GH200); set --attention=reference, which runs on any GPU, slowly"
    )


def choose(names: tuple[str, ...], check: Callable[[str], None]) -> tuple[str, str]:
  """The first of `candidates` that can do the work, and why those before it cannot ("" for the first).

  Args:
    check: `check_supported` of a name for the work at hand. Not called for the last, which is taken unseen: whoever
      builds the programs checks them anyway.
  """
  reasons = []
  for name in names[:-1]:
    try:
      check(name)
    except NotImplementedError as error:
      reasons.append(str(error))
      continue
    return name, "; ".join(reasons)
  return names[-1], "; ".join(reasons)


def preferred_block_size(name: str) -> int:
  """Tokens a KV block that an implementation is best at."""
  return getattr(implementation(name), "PREFERRED_BLOCK_SIZE", 16)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RaggedMeta:
  """Which tokens of the packed axis belong to which row, and where each row's keys and values lie.

  Row r owns tokens `query_starts[r]:query_starts[r + 1]`; they are its LAST positions, so its first query is at
  position `kv_lens[r] - (query_starts[r + 1] - query_starts[r])`. Unused rows have no token and kv_len 0. Tokens from
  `query_starts[S]` on are padding.

  Attributes:
    block_tables: int32[S, B], ids of physical blocks; entries past a row's length are never read (0 by custom).
    kv_lens: int32[S], positions of the row including those written in this step.
    query_starts: int32[S + 1], not decreasing.
    work: what the implementation made of these for all layers (see `PagedAttention.meta`), or None.
  """

  block_tables: jax.Array
  kv_lens: jax.Array
  query_starts: jax.Array
  work: Any = None


@dataclasses.dataclass(frozen=True)
class PagedAttention:
  """The attention of one compiled step: an implementation and everything static about its calls. Hashable.

  Attributes:
    implementation: a name of IMPLEMENTATIONS.
    geometry: shapes, on one device.
    scale: factor on q.k, usually H ** -0.5.
    soft_cap: scores become soft_cap * tanh(score / soft_cap) (Gemma 2, arXiv:2408.00118); None leaves them.
    device_kind: as JAX calls it, for tuned settings.
  """

  implementation: str
  geometry: Geometry
  scale: float
  soft_cap: float | None = None
  device_kind: str = ""

  @property
  def _module(self) -> ModuleType:
    return implementation(self.implementation)

  @cached_property
  def plan(self) -> Plan | None:
    """What the host computes for every step of this shape; None where the implementation needs nothing."""
    make_plan = getattr(self._module, "make_plan", None)
    return make_plan(self.geometry, self.device_kind) if make_plan else None

  @property
  def fused(self) -> bool:
    """Whether `attend` may be called; otherwise rotary embedding is the caller's, then write_kv and the rest."""
    return hasattr(self._module, "attend")

  def meta(
    self, block_tables: jax.Array, kv_lens: jax.Array, query_starts: jax.Array, plan: jax.Array | None = None
  ) -> RaggedMeta:
    """The rows of a step, with what all its layers share computed once.

    Args:
      block_tables, kv_lens, query_starts: see RaggedMeta.
      plan: int32[self.plan.size], of `self.plan.make`; None where there is no plan.
    """
    prepare = getattr(self._module, "prepare", None)
    if self.plan is not None:
      work = self.plan.split(plan)
    else:
      work = prepare(self.geometry, block_tables, kv_lens, query_starts) if prepare else None
    return RaggedMeta(block_tables, kv_lens, query_starts, work)

  def attend(
    self, qkv: jax.Array, cos: jax.Array, sin: jax.Array, kv: jax.Array, meta: RaggedMeta, slot_mapping: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Rotary embedding, KV write and attention of a layer, where the implementation has them as one.

    Args:
      qkv: [T, K, G + 2, H]; the G query heads of a KV head, its key, its value, before rotary embedding.
      cos, sin: f32[T, H / 2].
      kv: a buffer of `kv_shape`; updated in place where the caller's jit donates it.
      meta: of `self.meta`.
      slot_mapping: see `write_kv`.

    Returns:
      [T, N, H] of qkv's dtype, zeros at padding tokens; and the buffer.
    """
    return self._module.attend(
      qkv,
      cos,
      sin,
      kv,
      meta.block_tables,
      meta.kv_lens,
      meta.query_starts,
      slot_mapping,
      meta.work,
      plan=self.plan,
      scale=self.scale,
      sliding_window=self.geometry.sliding_window,
      soft_cap=self.soft_cap,
      device_kind=self.device_kind,
    )


def check_supported(name: str, geometry: Geometry, dtype: Any) -> None:
  """Raises NotImplementedError, with the value and what is supported, for what an implementation cannot do.

  Args:
    name: of IMPLEMENTATIONS.
    geometry: heads, head size and block size are looked at.
    dtype: of q, k, v and the buffer.
  """
  check = getattr(implementation(name), "check_supported", None)
  if check:  # the reference takes everything
    check(geometry, jnp.dtype(dtype))


def kv_shape(
  num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, name: str = "reference"
) -> tuple[int, ...]:
  """Shape of one layer's KV buffer.

  Args:
    num_blocks: physical blocks, the padding block 0 included.
    block_size: tokens a block.
    num_kv_heads: K.
    head_dim: H.
    name: of the implementation.
  """
  for what, value in (
    ("num_blocks", num_blocks),
    ("block_size", block_size),
    ("num_kv_heads", num_kv_heads),
    ("head_dim", head_dim),
  ):
    if value < 1:
      raise ValueError(f"paged attention: {what}={value} must be at least 1")
  return implementation(name).kv_shape(num_blocks, block_size, num_kv_heads, head_dim)


def write_kv(kv: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array, name: str = "reference") -> jax.Array:
  """Stores this step's keys and values; in place where the caller's jit donates `kv`.

  Args:
    kv: a buffer of `kv_shape`, of any float dtype (k and v are cast to it).
    k, v: [T, K, H].
    slot_mapping: int32[T], block id * block_size + offset in the block; padding tokens map into block 0, whose
      content is never read.
    name: of the implementation.

  Returns:
    The buffer with the tokens written.
  """
  if k.shape != v.shape or slot_mapping.shape != k.shape[:1]:
    raise ValueError(
      f"write_kv: k {k.shape}, v {v.shape} and slot_mapping {slot_mapping.shape} must be [T, K, H], [T, K, H] and [T]"
    )
  return implementation(name).write_kv(kv, k, v, slot_mapping)


def ragged_paged_attention(
  q: jax.Array,
  kv: jax.Array,
  meta: RaggedMeta,
  *,
  scale: float,
  sliding_window: int | None = None,
  soft_cap: float | None = None,
  name: str = "reference",
  **static: Any,
) -> jax.Array:
  """Causal attention of every packed token over its row's paged keys and values.

  Args:
    q: [T, N, H]; N is a multiple of the buffer's K.
    kv: a buffer of `kv_shape` that already holds this step's keys and values (see `write_kv`).
    meta: the rows.
    scale: factor on q.k, usually H ** -0.5.
    sliding_window: a query sees its last `sliding_window` positions, itself included; None sees all.
    soft_cap: as in PagedAttention.
    name: of the implementation.
    static: what only that implementation takes (`plan` of gpu.py).

  Returns:
    [T, N, H] of q's dtype; zeros at padding tokens.
  """
  module = implementation(name)
  if sliding_window is not None and sliding_window < 1:
    raise ValueError(f"paged attention: sliding_window={sliding_window} must be at least 1, or None")
  if soft_cap is not None and soft_cap <= 0:
    raise ValueError(f"paged attention: soft_cap={soft_cap} must be above 0, or None")
  num_kv_heads = module.num_kv_heads(kv)
  if q.shape[1] % num_kv_heads:
    raise ValueError(
      f"paged attention: {q.shape[1]} query heads are not a multiple of the {num_kv_heads} KV heads of the buffer"
    )
  rows = meta.kv_lens.shape[0]
  if meta.block_tables.ndim != 2 or meta.block_tables.shape[0] != rows or meta.query_starts.shape != (rows + 1,):
    raise ValueError(
      f"paged attention: block_tables {meta.block_tables.shape}, kv_lens {meta.kv_lens.shape} and "
      f"query_starts {meta.query_starts.shape} must be [S, B], [S] and [S + 1]"
    )
  for what, array in (
    ("block_tables", meta.block_tables),
    ("kv_lens", meta.kv_lens),
    ("query_starts", meta.query_starts),
  ):
    if array.dtype != jnp.int32:
      raise ValueError(f"paged attention: {what} has dtype {array.dtype}; it must be int32")
  work = {} if meta.work is None else {"work": meta.work}
  return module.ragged_paged_attention(
    q,
    kv,
    meta.block_tables,
    meta.kv_lens,
    meta.query_starts,
    scale=scale,
    sliding_window=sliding_window,
    soft_cap=soft_cap,
    **work,
    **static,
  )
