"""Dispatches a model's attention over paged keys and values to an implementation; it may not compute anything itself.

An implementation is a module of this folder with the functions `kv_shape` and `attend`, as in reference.py. It owns the
layout of the KV buffer: callers treat a buffer as opaque and get its shape from `kv_shape`. It may also define

  check_supported(geometry, dtype)            raises NotImplementedError for what the table of capabilities.py allows
  check_kv_dtype(geometry, kv_dtype)          the same for the buffer's dtypes of EIGHT_BIT_KV
  PREFERRED_BLOCK_SIZE, PREFERRED_BLOCK_SIZES the tokens of a block, and those of a buffer's dtype
  make_plan(geometry, device_kind) -> Plan    work lists that the host sends with every step (plan.py)

This module chooses an implementation by name, before anything compiles.
"""

from collections.abc import Callable
import dataclasses
from functools import cached_property
import importlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import capabilities
from pallas_kernels.paged_attention.fp8_kv import BYTES
from pallas_kernels.paged_attention.plan import Geometry, Plan

# Imported on first use, because the GPU's module needs packages that a TPU machine may lack.
IMPLEMENTATIONS = ("reference", "cpu", "gpu", "portable", "tpu")
# With `Geometry.invariant`, a query has the same sums alone in its row and in a chunk; in ACROSS_SHAPES also in steps
# of different shapes.
WITHIN_A_SHAPE = ("reference", "cpu", "gpu", "portable")
ACROSS_SHAPES = ("cpu",)
# The dtypes of buffers besides the layer's own, by the names that users know.
EIGHT_BIT_KV = {"int8": jnp.dtype(jnp.int8), "fp8": BYTES}


def implementation(name: str) -> ModuleType:
  """Returns the module of an implementation; raises ValueError for an unknown name."""
  if name not in IMPLEMENTATIONS:
    raise ValueError(f"paged attention: implementation {name!r} is not one of {', '.join(IMPLEMENTATIONS)}")
  return importlib.import_module(f"pallas_kernels.paged_attention.{name}")


def candidates(requested: str, platform: str, compute_capability: str = "") -> tuple[str, ...]:
  """Returns the implementations to try on a device, best first; the reference runs anywhere.

  Args:
    requested: the only candidate, or "auto" for all that run on the device.
    platform: as JAX names it, such as "cpu", "gpu", "tpu".
    compute_capability: of a GPU, such as "9.0".
  """
  if requested != "auto":
    implementation(requested)
    return (requested,)
  return capabilities.candidates(platform, compute_capability)


def check_gpu_capability(compute_capability: str) -> None:
  """Raises NotImplementedError for a GPU on which the implementation "gpu" cannot run, with the compute capability."""
  if refusal := capabilities.find_device_refusal("gpu", "gpu", compute_capability):
    raise NotImplementedError(f"paged attention: {refusal}; set --attention=auto, which takes what the GPU can run")


def choose_attention(names: tuple[str, ...], check: Callable[[str], None]) -> tuple[str, str]:
  """Returns the first implementation of `names` that passes `check`, and why earlier ones fail ("" for the first).

  Args:
    check: calls `check_supported` for a name. The last name needs no check here, because building the programs checks
      it anyway.
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


def preferred_block_size(name: str, kv_dtype: Any = None) -> int:
  """Returns the tokens a KV block with which an implementation is fastest.

  Args:
    kv_dtype: of the buffer; None: the layer's own.
  """
  module = implementation(name)
  usual = getattr(module, "PREFERRED_BLOCK_SIZE", 16)
  return usual if kv_dtype is None else getattr(module, "PREFERRED_BLOCK_SIZES", {}).get(jnp.dtype(kv_dtype), usual)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RaggedMeta:
  """Maps tokens of the packed axis to rows, and rows to their keys and values.

  Row r owns tokens `query_starts[r]:query_starts[r + 1]`; they are its LAST positions, so its first query is at
  position `kv_lens[r] - (query_starts[r + 1] - query_starts[r])`. Unused rows have no token and kv_len 0. Tokens from
  `query_starts[S]` on are padding.

  Attributes:
    block_tables: int32[S, B], ids of physical blocks; entries past a row's length are never read (0 by custom).
    kv_lens: int32[S], positions of the row including those written in this step.
    query_starts: int32[S + 1], not decreasing.
    work: the pieces of the implementation's plan, by name; None for an implementation without a plan.
  """

  block_tables: jax.Array
  kv_lens: jax.Array
  query_starts: jax.Array
  work: dict[str, jax.Array] | None = None


@dataclasses.dataclass(frozen=True)
class PagedAttention:
  """The attention of one compiled step: an implementation and its static arguments. Hashable.

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

  @cached_property
  def plan(self) -> Plan | None:
    """The plan that the host fills for every step of this shape; None for an implementation without a plan."""
    make_plan = getattr(implementation(self.implementation), "make_plan", None)
    return make_plan(self.geometry, self.device_kind) if make_plan else None

  def meta(
    self, block_tables: jax.Array, kv_lens: jax.Array, query_starts: jax.Array, plan: jax.Array | None = None
  ) -> RaggedMeta:
    """Returns the rows of a step.

    Args:
      block_tables, kv_lens, query_starts: see RaggedMeta.
      plan: int32[self.plan.size], from `self.plan.make_work`; None without a plan.
    """
    work = None if self.plan is None else self.plan.split(plan)
    return RaggedMeta(block_tables, kv_lens, query_starts, work)

  def attend(
    self, qkv: jax.Array, cos: jax.Array, sin: jax.Array, kv: jax.Array, meta: RaggedMeta, slot_mapping: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Applies rotary embedding, writes keys and values, and attends, for one layer.

    Args:
      qkv: [T, K, G + 2, H]; the G query heads of a KV head, its key, its value, before rotary embedding.
      cos, sin: f32[T, H / 2].
      kv: a buffer of shape `kv_shape`, of qkv's dtype or one of EIGHT_BIT_KV; updated in place if the caller's jit
        donates it.
      meta: result of `self.meta`.
      slot_mapping: int32[T], block id * block_size + offset in the block; padding tokens map into block 0, which
        no kernel reads.

    Returns:
      [T, N, H] of qkv's dtype, zeros at padding tokens; and the buffer.
    """
    return implementation(self.implementation).attend(self, qkv, cos, sin, kv, meta, slot_mapping)


def name_kv_dtype(kv_dtype: Any) -> str:
  """Returns what users call the dtype of a buffer: a name of EIGHT_BIT_KV, or the dtype's own."""
  dtype = jnp.dtype(kv_dtype)
  return next((name for name, each in EIGHT_BIT_KV.items() if each == dtype), dtype.name)


def check_supported(name: str, geometry: Geometry, dtype: Any, kv_dtype: Any = None) -> None:
  """Raises NotImplementedError, with the value and the supported ones, for shapes that an implementation cannot run.

  Args:
    name: a name of IMPLEMENTATIONS.
    geometry: of the rung.
    dtype: of q, k and v.
    kv_dtype: of the buffer: `dtype`, which is also meant by None, or one of EIGHT_BIT_KV.
  """
  module, dtype, kv_dtype = implementation(name), jnp.dtype(dtype), jnp.dtype(dtype if kv_dtype is None else kv_dtype)
  kv_name = name_kv_dtype(kv_dtype)
  if refusal := capabilities.find_refusal(name, geometry, dtype.name, kv_name):
    raise NotImplementedError(refusal)
  own = [("check_kv_dtype", kv_dtype)] if kv_name in EIGHT_BIT_KV else []
  for check, *more in (("check_supported", dtype), *own):
    if hasattr(module, check):
      getattr(module, check)(geometry, *more)


def kv_shape(
  num_blocks: int,
  block_size: int,
  num_kv_heads: int,
  head_dim: int,
  name: str = "reference",
  dtype: Any = jnp.float32,
) -> tuple[int, ...]:
  """Returns the shape of one layer's KV buffer.

  Args:
    num_blocks: physical blocks, the padding block 0 included.
    block_size: tokens a block.
    num_kv_heads: K.
    head_dim: H.
    name: the implementation.
    dtype: of the buffer. One of int8 has the scale of each key and value, too (int8_kv.py).
  """
  return implementation(name).kv_shape(num_blocks, block_size, num_kv_heads, head_dim, jnp.dtype(dtype))
