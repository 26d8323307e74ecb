"""What a model calls for attention over paged keys and values; it may not compute anything itself.

An implementation is a module of this folder with `kv_shape` and `attend`, as reference.py has them. It owns the layout
of the KV buffer: callers treat a buffer as opaque and get its shape from `kv_shape`. It may have besides

  check_supported(geometry, dtype)            refuses, with NotImplementedError, what it cannot do
  make_plan(geometry, device_kind) -> Plan    host-made work lists that travel with every step (plan.py)

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
    work: the pieces of the implementation's plan, by name; None where it has no plan.
  """

  block_tables: jax.Array
  kv_lens: jax.Array
  query_starts: jax.Array
  work: dict[str, jax.Array] | None = None


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

  @cached_property
  def plan(self) -> Plan | None:
    """What the host computes for every step of this shape; None where the implementation needs nothing."""
    make_plan = getattr(implementation(self.implementation), "make_plan", None)
    return make_plan(self.geometry, self.device_kind) if make_plan else None

  def meta(
    self, block_tables: jax.Array, kv_lens: jax.Array, query_starts: jax.Array, plan: jax.Array | None = None
  ) -> RaggedMeta:
    """The rows of a step.

    Args:
      block_tables, kv_lens, query_starts: see RaggedMeta.
      plan: int32[self.plan.size], of `self.plan.make`; None where there is no plan.
    """
    work = None if self.plan is None else self.plan.split(plan)
    return RaggedMeta(block_tables, kv_lens, query_starts, work)

  def attend(
    self, qkv: jax.Array, cos: jax.Array, sin: jax.Array, kv: jax.Array, meta: RaggedMeta, slot_mapping: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Rotary embedding, KV write and attention of a layer.

    Args:
      qkv: [T, K, G + 2, H]; the G query heads of a KV head, its key, its value, before rotary embedding.
      cos, sin: f32[T, H / 2].
      kv: a buffer of `kv_shape`; updated in place where the caller's jit donates it.
      meta: of `self.meta`.
      slot_mapping: int32[T], block id * block_size + offset in the block; padding tokens map into block 0, whose
        content is never read.

    Returns:
      [T, N, H] of qkv's dtype, zeros at padding tokens; and the buffer.
    """
    return implementation(self.implementation).attend(self, qkv, cos, sin, kv, meta, slot_mapping)


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
  return implementation(name).kv_shape(num_blocks, block_size, num_kv_heads, head_dim)
