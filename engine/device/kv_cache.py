"""The KV buffers: how many blocks fit, and how the arrays are laid out. No request; who owns a block is BlockPool's.

One buffer a layer, as separate leaves: XLA then updates each in place (a stacked one is copied by every layer's slice).
Physical block 0 belongs to nobody: padding tokens are written there, so a pool of n blocks has n + 1 on the device.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from engine.device import mesh as mesh_lib
from engine.errors import ConfigError
from models.config import ModelConfig
from pallas_kernels.paged_attention import api

Buffers = tuple[jax.Array, ...]


def bytes_per_block(model: ModelConfig, block_size: int, dtype: jnp.dtype, attention: str = "reference") -> int:
  """Bytes of one block over all layers, on all devices together; `attention` is the implementation's name."""
  shape = api.kv_shape(1, block_size, model.num_kv_heads, model.head_dim, attention)
  size = jnp.dtype(dtype).itemsize
  for extent in shape:
    size *= extent
  return size * model.num_layers


def head_axis(block_size: int, model: ModelConfig, attention: str = "reference") -> int:
  """Which dimension of a buffer counts KV heads: the layout is the kernel's secret, but this one must be split."""
  once = api.kv_shape(3, block_size, model.num_kv_heads, model.head_dim, attention)
  twice = api.kv_shape(3, block_size, 2 * model.num_kv_heads, model.head_dim, attention)
  (axis,) = [i for i, (a, b) in enumerate(zip(once, twice, strict=True)) if a != b]
  return axis


def abstract(
  mesh: Mesh, model: ModelConfig, num_blocks: int, block_size: int, dtype: jnp.dtype, attention: str = "reference"
) -> tuple[jax.ShapeDtypeStruct, ...]:
  """The buffers of a pool of `num_blocks`, one a layer, split over KV heads, without memory."""
  shape = api.kv_shape(num_blocks + 1, block_size, model.num_kv_heads, model.head_dim, attention)
  axis = head_axis(block_size, model, attention)
  names = tuple("kv_heads" if i == axis else None for i in range(len(shape)))
  sharding = mesh_lib.sharding_of(mesh, "KV cache", shape, names)
  return (jax.ShapeDtypeStruct(shape, dtype, sharding=sharding),) * model.num_layers


def fit_blocks(available_bytes: int, block_bytes: int, longest_table: int, most_useful: int) -> int:
  """How many blocks a pool gets.

  Args:
    available_bytes: for KV, on all devices together.
    block_bytes: of one block (`bytes_per_block`).
    longest_table: blocks of one sequence of the greatest length: the least that can work.
    most_useful: more than this is never needed.

  Raises:
    ConfigError: not even one full sequence fits.
  """
  fits = available_bytes // block_bytes - 1  # the padding block
  if fits < longest_table:
    raise ConfigError(
      f"{available_bytes / 2**20:.0f} MiB hold {max(fits, 0)} KV blocks, but one sequence of the "
      f"greatest length needs {longest_table} ({(longest_table + 1) * block_bytes / 2**20:.0f} MiB); "
      "raise --kv_cache_mb or lower --max_model_len"
    )
  return min(fits, most_useful)


def free_bytes(mesh: Mesh, step_bytes: int, reserve_share: float = 0.05) -> int | None:
  """Memory left for KV on all devices together, or None where the backend does not say (CPU).

  Args:
    mesh: the devices; the one with the least memory decides for all.
    step_bytes: what a device needs besides: temporaries of the largest step program, and the sampler's state.
    reserve_share: share of the limit left alone, for fragmentation and what the runtime allocates by itself.
  """
  left = []
  for device in mesh.devices.flat:
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
      return None
    left.append(stats["bytes_limit"] * (1 - reserve_share) - stats["bytes_in_use"] - step_bytes)
  return max(0, int(min(left))) * mesh.size
