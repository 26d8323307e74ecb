"""Checks that a model fits the memory before the loader reads it. May not allocate, and sizes no pool."""

import math
import os
import shutil
from typing import Any

from jax.sharding import Mesh

from engine.device import kv_cache
from engine.errors import ConfigError
from engine.free_memory import read_free_bytes
from engine.shapes import StepShape
from models.config import ModelConfig
from pallas_kernels import huge_pages


def step_bytes(share: ModelConfig, shape: StepShape, itemsize: int) -> int:
  """Returns a lower bound of a step's bytes on each device, which computes `share` (ModelSplit.share).

  It counts a layer's input and output, gate and up, and for each logit row its logits and two rows of the sampler's
  state. A row of a model without logits has its hidden state.
  """
  token = (2 * share.model_dim + 2 * share.hidden_dim) * itemsize
  row = 3 * share.vocab_size if share.has_token_head else share.model_dim
  return shape.tokens * token + shape.logits * row * 4


def check_fits(
  name: str, mesh: Mesh, params: dict[str, Any], kv_bytes: int, kv_for: str, step: int = 0, step_for: str = ""
) -> int | None:
  """Rejects a model that does not fit the memory.

  Args:
    name: name of the model, for the error.
    mesh: the devices.
    params: jax.ShapeDtypeStruct with shardings, by name.
    kv_bytes: bytes of the smallest sufficient pool, on all devices together.
    kv_for: its purpose, for the error.
    step, step_for: bytes of the largest step on each device, and its description.

  Returns:
    Bytes that weights and step leave, on all devices together; None if the system does not report free memory.

  Raises:
    ConfigError: with the needed, free and missing bytes of the device with the least memory.
  """
  weights = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in params.values())
  free, where = kv_cache.free_bytes(mesh, 0), "on each device"
  if free is None:
    own, where = host_free_bytes(), "of this machine's memory for each device"
    if own is None:
      return None
    free = own // len(mesh.local_devices) * mesh.size
  free, kv = free // mesh.size, kv_bytes // mesh.size
  missing = weights + kv + step - free
  if missing > 0:
    raise ConfigError(
      f"{name} needs {_mib(weights)} for weights, {_mib(kv)} for KV ({kv_for}) and at least {_mib(step)} for a step "
      f"({step_for}) {where}, and {_mib(free)} are free: {_mib(missing)} are missing; use more devices "
      "(--num_devices), a smaller --dtype, --max_model_len or --token_budgets, --quantization=int8 or int4, or a "
      "smaller model"
    )
  return (free - weights - step) * mesh.size


def size_host_pool(host_kv_mb: int, block_bytes: int, free: int | None, beside: str, folder: str = "") -> int:
  """Returns the KV blocks that `host_kv_mb` MiB of the host's memory, or of a folder's disk, hold.

  Args:
    block_bytes: bytes of a block over all layers and devices.
    free: bytes of memory that are left for it, if known.
    beside: what else needs memory there, for the error.
    folder: where a file has the blocks; "": they are in memory.

  Raises:
    ConfigError: it holds no block, or the memory or the disk does not hold it.
  """
  where = f"this machine's memory{beside}"
  if folder and host_kv_mb:
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
      raise ConfigError(
        f"host_kv_dir={folder:.200} is not a folder in which this user may write; make it, or set --host_kv_dir to "
        "another"
      )
    free, where = shutil.disk_usage(folder).free, f"the disk of host_kv_dir={folder:.200}"
  wanted = host_kv_mb * 2**20
  if wanted and wanted < block_bytes:
    raise ConfigError(
      f"host_kv_mb={host_kv_mb} holds no block of this model's KV, which has {_mib(block_bytes)}; raise --host_kv_mb"
    )
  if free is not None and wanted > free:
    raise ConfigError(
      f"host_kv_mb={host_kv_mb} needs {_mib(wanted)} of {where}, and {_mib(max(0, free))} are free; lower --host_kv_mb"
    )
  return wanted // block_bytes


def host_free_bytes() -> int | None:
  """Returns the bytes that this process may still allocate, with those fetched ahead for weights; None if unknown."""
  with huge_pages.hold_fetch() as spare:
    free = read_free_bytes()
  return None if free is None else free + spare


def _mib(size: int) -> str:
  return f"{-(-size // 2**20)} MiB"
