"""Which attention and which matmul a model gets on a platform, and why not the best; refuses what kernels cannot do."""

import bisect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from engine.device.options import BuildOptions
from engine.device.programs import ProgramSpec
from engine.errors import ConfigError
from engine.shapes import ShapeLadder
from models.config import ModelConfig
from pallas_kernels.packed_matmul import api as packed_matmul
from pallas_kernels.paged_attention import api
from pallas_kernels.paged_attention.plan import Geometry


def attention_candidates(requested: str, device: Any) -> tuple[tuple[str, ...], str]:
  """Which implementations to try on a device (jax.Device), before anything compiles.

  Returns:
    Names, the best first; and why the platform's best is not among them, "" where it is.

  Raises:
    ConfigError: the one asked for cannot run there.
  """
  platform = device.platform
  try:
    names = api.candidates(requested, platform)
    # The others run anywhere: the reference, and what a benchmark has registered.
    if requested in ("cpu", "gpu", "tpu") and requested not in api.candidates("auto", platform):
      raise NotImplementedError(
        f"attention={requested} cannot run on this machine's device ({device.device_kind}, platform {platform}); set "
        "--attention=auto, or --attention=reference, which runs anywhere, slowly"
      )
  except NotImplementedError as error:
    raise ConfigError(str(error)) from error
  if "gpu" not in names:
    return names, ""
  capability = str(getattr(device, "compute_capability", "unknown"))
  try:
    api.check_gpu_capability(capability)
  except NotImplementedError as error:
    if requested == "gpu":
      raise ConfigError(f"attention=gpu: {error}") from error
    return ("reference",), (
      f"attention=reference: the GPU kernels need compute capability {api.GPU_CAPABILITY}, and "
      f"{device.device_kind} has {capability}"
    )
  return names, ""


def choose_attention(
  options: BuildOptions, candidates: tuple[str, ...], model: ModelConfig, dtype: jnp.dtype
) -> tuple[str, str, int, int]:
  """The implementation, why it is not the best one ("" if it is), tokens a block, and the longest sequence."""

  def check(name: str) -> None:
    # A token of a row of a block: there is no ladder yet.
    block_size = options.block_size or api.preferred_block_size(name)
    for each in model.groups:
      geometry = Geometry(1, 1, 1, block_size, each.num_heads, each.num_kv_heads, each.head_dim, each.window)
      api.check_supported(name, geometry, dtype)

  attention, reason = api.choose(candidates, check)
  max_model_len = options.max_model_len or model.max_position
  if max_model_len > model.max_position:
    raise ConfigError(
      f"max_model_len={max_model_len} exceeds the {model.max_position} positions of {options.model_dir}; "
      "lower --max_model_len, or leave it at 0"
    )
  return attention, reason, options.block_size or api.preferred_block_size(attention), max_model_len


def choose_matmul(requested: str, mesh: Mesh, dtype: jnp.dtype) -> tuple[str, str]:
  """How weights are multiplied by, and why not packed where one would expect that ("" elsewhere)."""
  if requested == "xla":
    return "xla", ""
  platform = mesh.devices.flat[0].platform
  expected, reason = platform == "cpu" and mesh.size == 1, ""
  if expected:
    try:
      packed_matmul.check_supported(dtype)
    except NotImplementedError as error:
      reason = str(error)
  else:
    reason = f"packed matmul: only on one device of platform cpu, not on {mesh.size} of {platform}"
  if not reason:
    return "packed", ""
  if requested == "packed":
    raise ConfigError(f"{reason}; set --matmul=xla")
  return "xla", reason if expected else ""


def fit_to_attention(
  spec_of_width: Callable[[int], ProgramSpec], longest: int, is_chosen: bool, ladder: ShapeLadder, dtype: jnp.dtype
) -> tuple[int, str]:
  """Refuses before anything compiles what the attention kernels cannot do; never falls back unasked.

  Args:
    spec_of_width: the programs, from blocks in a block table.
    longest: max_model_len, in tokens.
    is_chosen: the user chose it; else it is lowered to the longest that the kernels take, if any is.
    ladder: whose rungs are compiled.
    dtype: of queries and KV.

  Returns:
    The longest sequence in tokens, and why it is less than `longest`, "" where it is not.

  Raises:
    ConfigError: what they cannot do.
  """
  block_size = spec_of_width(1).block_size
  width = -(-longest // block_size)
  refusal = _refusal(spec_of_width(width), ladder, dtype)
  if refusal is None:
    return longest, ""
  fits = bisect.bisect_left(range(1, width), True, key=lambda w: _refusal(spec_of_width(w), ladder, dtype) is not None)
  if not fits:  # whatever the length
    raise ConfigError(f"{refusal}; or set --attention=reference, which runs anywhere, slowly") from refusal
  if is_chosen:
    raise ConfigError(
      f"max_model_len={longest}: {refusal}; lower --max_model_len to {fits * block_size} or --max_num_seqs, raise "
      "--block_size, or set --attention=reference, which runs anywhere, slowly"
    ) from refusal
  return fits * block_size, str(refusal)


def _refusal(spec: ProgramSpec, ladder: ShapeLadder, dtype: jnp.dtype) -> NotImplementedError | None:
  """What the attention kernels say of the rungs, if they cannot do one of them."""
  try:
    for shape in ladder.rungs():
      for _, attention in spec.attention_groups(shape):
        api.check_supported(spec.attention, attention.geometry, dtype)
  except NotImplementedError as error:
    return error
  return None
