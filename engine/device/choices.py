"""Which attention and which matmul a model gets on a platform, and why not the best; refuses what kernels cannot do."""

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


def attention_candidates(requested: str, platform: str) -> tuple[str, ...]:
  """Names of implementations to try, the best first. Raises ConfigError where the one asked for cannot run there."""
  try:
    return api.candidates(requested, platform)
  except NotImplementedError as error:
    raise ConfigError(str(error)) from error


def choose_attention(
  options: BuildOptions, candidates: tuple[str, ...], model: ModelConfig, dtype: jnp.dtype
) -> tuple[str, str, int, int]:
  """The implementation, why it is not the best one ("" if it is), tokens a block, and the longest sequence."""
  attention, reason = api.choose(
    candidates, lambda name: api.check_supported(name, _geometry(model, options.block_size, name), dtype)
  )
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


def _geometry(model: ModelConfig, block_size: int, attention: str) -> Geometry:
  """What of a step's attention is known before there is a ladder."""
  return Geometry(
    tokens=1,
    rows=1,
    table_width=1,
    block_size=block_size or api.preferred_block_size(attention),
    num_heads=model.num_heads,
    num_kv_heads=model.num_kv_heads,
    head_dim=model.head_dim,
    sliding_window=model.sliding_window,
  )


def check_attention(spec: ProgramSpec, ladder: ShapeLadder, dtype: jnp.dtype) -> None:
  """Refuses before anything compiles what the attention kernels cannot do; never falls back unasked."""
  try:
    for shape in ladder.rungs():
      api.check_supported(spec.attention, spec.attention_of(shape).geometry, dtype)
  except NotImplementedError as error:
    raise ConfigError(f"{error}; or set --attention=reference, which runs anywhere, slowly") from error
