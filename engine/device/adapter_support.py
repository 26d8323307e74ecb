"""Rejects settings that exclude LoRA adapters, and sizes their memory, before anything is allocated."""

import math

import jax
import jax.numpy as jnp

from engine.device.options import BuildOptions
from engine.errors import ConfigError
from models.adapters import declare_adapters
from models.config import ModelConfig
from pallas_kernels.low_rank.api import RANK_MULTIPLE


def check_adapter_support(options: BuildOptions, has_bundle: bool) -> None:
  """Raises ConfigError if a setting excludes --enable_lora."""
  if not options.enable_lora:
    return
  if has_bundle:
    raise ConfigError(
      "enable_lora: a bundle's programs take no adapters; serve without --executable_bundle or without --enable_lora"
    )
  if options.deterministic:
    raise ConfigError(
      "enable_lora: steps with and without adapters are two programs, which may round differently; serve without "
      "--deterministic or without --enable_lora"
    )


def slot_rank(options: BuildOptions, implementation: str) -> int:
  """Returns the rank of a slot: the largest of an adapter, rounded up for the CPU kernel; 0 without adapters."""
  multiple = RANK_MULTIPLE if implementation == "cpu" else 1
  return -(-options.max_lora_rank // multiple) * multiple if options.enable_lora else 0


def adapter_bytes(options: BuildOptions, share: ModelConfig, rank: int, dtype: jnp.dtype) -> int:
  """Returns the bytes of all adapter slots on a device, which computes `share`; 0 without adapters."""
  if not options.enable_lora:
    return 0
  layers = declare_adapters(share, options.max_loras + 1, rank, dtype)
  return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(layers))


def adapter_step_bytes(options: BuildOptions, rank: int, tokens: int) -> int:
  """Returns the bytes of a step's largest temporary of the reference: f32[tokens, slots, parts * rank]."""
  return 4 * tokens * (options.max_loras + 1) * 3 * rank
