"""Layout and size of the KV buffers, and free memory. May not know requests; BlockPool tracks who owns a block.

Each layer has a separate buffer, which XLA updates in place; it would copy a stacked buffer for every layer's slice.
A layer's attention determines its shape, and all layers share one block table. A buffer of int8 holds the scales of its
numbers, too, so whatever copies blocks copies both (pallas_kernels/paged_attention/int8_kv.py); one of uint8 has fp8.
Physical block 0 takes the writes of padding tokens, so a pool of n blocks has n + 1 on the device.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from engine.device import mesh as mesh_lib
from engine.free_memory import read_gpu_bytes
from models.config import LayerAttention, ModelConfig
from models.split import ModelSplit
from pallas_kernels.paged_attention import api

Buffers = tuple[jax.Array, ...]
_FLOAT32 = jnp.dtype(jnp.float32)
# The share of a GPU's memory that JAX allocates at start unless the user sets another. JAX's own default of 0.75 leaves
# a fifth unused; CUDA, its libraries and its graphs need the last 0.05.
GPU_MEMORY_SHARE = 0.95


def bytes_per_block(
  model: ModelConfig, block_size: int, dtype: jnp.dtype, attention: str = "reference", num_devices: int = 1
) -> int:
  """Returns the bytes of one block over all layers and devices.

  Args:
    attention: the implementation's name.
    dtype: of the pool.
    num_devices: devices that share each layer. A KV head may be on several of them.
  """
  values = sum(
    len(layers) * math.prod(api.kv_shape(1, block_size, declared.num_kv_heads, declared.head_dim, attention, dtype))
    for declared, layers in ModelSplit(model, num_devices).share.groups.items()
  )
  return values * num_devices * jnp.dtype(dtype).itemsize


def head_axis(
  block_size: int, declared: LayerAttention, attention: str = "reference", dtype: jnp.dtype = _FLOAT32
) -> int:
  """Returns the dimension of KV heads, the only part of the kernel's layout that sharding needs."""
  once = api.kv_shape(3, block_size, declared.num_kv_heads, declared.head_dim, attention, dtype)
  twice = api.kv_shape(3, block_size, 2 * declared.num_kv_heads, declared.head_dim, attention, dtype)
  (axis,) = [i for i, (a, b) in enumerate(zip(once, twice, strict=True)) if a != b]
  return axis


def abstract(
  mesh: Mesh, model: ModelConfig, num_blocks: int, block_size: int, dtype: jnp.dtype, attention: str = "reference"
) -> tuple[jax.ShapeDtypeStruct, ...]:
  """Returns the abstract buffers of a pool of `num_blocks`, one a layer, sharded over KV heads."""
  share = ModelSplit(model, mesh_lib.num_shares(mesh)).share

  def of_group(declared: LayerAttention) -> jax.ShapeDtypeStruct:
    shape = api.kv_shape(num_blocks + 1, block_size, declared.num_kv_heads, declared.head_dim, attention, dtype)
    axis = head_axis(block_size, declared, attention, dtype)
    return mesh_lib.spread(mesh, shape, dtype, tuple("kv_heads" if i == axis else None for i in range(len(shape))))

  buffers = {declared: of_group(declared) for declared in share.groups}
  return tuple(buffers[declared] for declared in share.layers)


def free_bytes(mesh: Mesh, step_bytes: int, reserve_share: float = 0.05) -> int | None:
  """Returns the bytes left for KV on all devices together, or None if the backend does not report memory (CPU).

  JAX counts the memory of a GPU only if it has taken all of it at start. With another allocator, as some XLA_FLAGS
  choose one, the driver's counts stand in.

  Args:
    mesh: the devices; the one with the least memory decides for all.
    step_bytes: other memory of a device: temporaries of the largest step program, and the sampler's state.
    reserve_share: share of the limit to leave for fragmentation and the runtime's own allocations.
  """
  left = []
  for device in mesh.local_devices:  # another host knows its own devices
    stats = device.memory_stats() or {}
    limit, used = stats.get("bytes_limit"), stats.get("bytes_in_use", 0)
    if limit is None and device.platform == "gpu" and (memory := read_gpu_bytes(device.local_hardware_id)):
      free, total = memory
      limit, used = GPU_MEMORY_SHARE * total, total - free
    if limit is None:
      return None
    left.append(limit * (1 - reserve_share) - used - step_bytes)
  return max(0, int(min(left))) * mesh.size
