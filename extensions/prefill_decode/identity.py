"""Says what two servers must have alike for the KV blocks of one to be those of the other. Sends nothing."""

import hashlib

import jax
import numpy as np

from engine.device.block_transfer import PIECE_BLOCKS
from engine.device.runner import ModelRunner
from pallas_kernels.paged_attention.api import name_kv_dtype

_SAMPLES = 64  # values a dimension of a weight that the digest reads


def describe_identity(runner: ModelRunner) -> str:
  """Returns words of the form name=value; equal texts mean that blocks can be exchanged.

  The digest of the weights reads a grid of each array, as another checkpoint differs nearly everywhere. It is of the
  arrays on the device, so quantization and packing count, too.
  """
  spec = runner.spec
  layers = " ".join(f"{leaf.shape[1:]}{leaf.dtype.name}" for leaf in spec.kv)
  parts = {
    "weights": _digest_weights(runner.params),
    "kv_dtype": name_kv_dtype(
      spec.kv[0].dtype
    ),  # before the layout, which depends on it: the first difference is named
    "kv_layout": hashlib.sha256(layers.encode()).hexdigest()[:16],
    "block_size": spec.block_size,
    "piece_blocks": PIECE_BLOCKS,
    "attention": spec.attention,
    "deterministic": spec.deterministic,
    "num_devices": spec.mesh.size,
    "device": spec.device_kind.replace(" ", "_"),
    "jax": jax.__version__,
  }
  return " ".join(f"{name}={value}" for name, value in parts.items())


def add_transport(identity: str, kv_transport: str) -> str:
  """Returns an identity with what both servers must have alike of --kv_transport."""
  return f"{identity} jax_transport={'yes' if kv_transport == 'jax' else 'no'}"


def describe_difference(ours: str, theirs: str) -> str:
  """Returns the first value in which two identities differ, or "" if they are equal."""
  if ours == theirs:
    return ""
  for own, other in zip(ours.split(), theirs.split(), strict=False):
    if own != other:
      return f"{other} here {own}"
  return "another version of the software"


def _digest_weights(params: tuple[jax.Array, ...]) -> str:
  digest = hashlib.sha256()
  for leaf in params:
    digest.update(f"{leaf.shape}{leaf.dtype}".encode())
    grid = tuple(slice(None, None, max(1, size // _SAMPLES)) for size in leaf.shape)
    if leaf.sharding.device_set and next(iter(leaf.sharding.device_set)).platform == "cpu":
      values = np.asarray(leaf)[grid]  # no copy, and no program
    else:
      values = np.asarray(leaf[grid])
    digest.update(np.ascontiguousarray(values).tobytes())
  return digest.hexdigest()[:16]
