"""Chooses attention and matmul kernels for a platform, and explains fallbacks. May not compile anything."""

import bisect
from collections.abc import Callable
import re
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from engine.device.options import BuildOptions
from engine.device.programs import ProgramSpec
from engine.errors import ConfigError
from engine.shapes import ShapeLadder
from models.config import ModelConfig
from models.weight_form import INT8, PLAIN_MATRIX, MatrixForm
from pallas_kernels.packed_matmul import api as packed_matmul
from pallas_kernels.paged_attention import api, capabilities
from pallas_kernels.paged_attention.plan import Geometry

_INT4_GROUP = 32  # inputs that share a scale, as in GGUF's Q4_0
_TPU_INT4_GROUP = 128  # a TPU multiplies blocks of 128 inputs or more; smaller groups are as slow
# See docs/decisions/gpu-and-tpu.md for a GPU, and benchmarks/README.md for a CPU.
_COST = "the reference loops over keys in many small kernels, and decodes several times slower"
_FP8_CAPABILITY = 8.9  # least compute capability of GPUs that multiply e4m3


def attention_candidates(requested: str, device: Any) -> tuple[tuple[str, ...], str]:
  """Returns the implementations to try on a device (jax.Device), before anything compiles.

  Returns:
    Names, the best first; and why the device has only the reference, or "".

  Raises:
    ConfigError: the requested implementation cannot run there.
  """
  where = device.platform, str(getattr(device, "compute_capability", ""))
  if requested != "auto":
    refusal = capabilities.find_device_refusal(requested, *where)
    if refusal:
      raise ConfigError(
        f"attention={requested} cannot run on this machine's device ({device.device_kind}): {refusal}; set "
        "--attention=auto, or --attention=reference, which runs anywhere, slowly"
      )
    return api.candidates(requested, *where), ""
  reason = capabilities.explain_reference(*where)
  if reason:
    reason = f"attention=reference on {device.device_kind}: {reason}; {_COST}"
  return api.candidates(requested, *where), reason


def choose_attention(
  options: BuildOptions, candidates: tuple[str, ...], model: ModelConfig, dtype: jnp.dtype, kv_dtype: jnp.dtype
) -> tuple[str, str, int, int]:
  """Returns the implementation, why it is not the best (or ""), tokens a block, and the longest sequence.

  Args: model: what one device computes (ModelSplit.share).
  """

  def check(name: str) -> None:
    # One token, row and block: the ladder does not exist yet.
    block_size = options.block_size or api.preferred_block_size(name, kv_dtype)
    for each in model.groups:
      geometry = Geometry(1, 1, 1, block_size, each.num_heads, each.num_kv_heads, each.head_dim, each.window)
      api.check_supported(name, geometry, dtype, kv_dtype)

  attention, reason = api.choose_attention(candidates, check)
  if reason:
    cost = f"; {_COST}" if attention == "reference" else ""
    reason = f"attention={attention}: {reason}{cost}"
  max_model_len = options.max_model_len or model.max_position
  if max_model_len > model.max_position:
    raise ConfigError(
      f"max_model_len={max_model_len} exceeds the {model.max_position} positions of {options.model_dir}; "
      "lower --max_model_len, or leave it at 0"
    )
  return attention, reason, options.block_size or api.preferred_block_size(attention, kv_dtype), max_model_len


def choose_matmul(requested: str, mesh: Mesh, dtype: jnp.dtype) -> tuple[str, str]:
  """Returns the matmul, and why it is not packed on a platform that could (or "")."""
  if requested == "xla":
    return "xla", ""
  platform = mesh.devices.flat[0].platform
  expected, reason = platform == "cpu", ""
  if expected:
    try:
      packed_matmul.check_supported(dtype)
    except NotImplementedError as error:
      reason = str(error)
  else:
    reason = f"packed matmul: only on platform cpu, not on {platform}"
  if not reason:
    return "packed", ""
  if requested == "packed":
    raise ConfigError(f"{reason}; set --matmul=xla")
  return "xla", reason if expected else ""


def check_dtype(dtype: jnp.dtype, device: Any) -> None:
  """Raises ConfigError unless a device (jax.Device) computes in a dtype of weights and activations."""
  if dtype == jnp.float16 and device.platform == "tpu":
    raise ConfigError(f"dtype=float16: {device.device_kind} does not compute in it; set --dtype=bfloat16")


def choose_matrix_form(options: BuildOptions, matmul: str, device: Any) -> tuple[MatrixForm, str]:
  """Returns the form in which the loader stores matrices of plain weights, and why it is slow (or "").

  Args:
    matmul: result of choose_matmul.
    device: jax.Device.

  Raises:
    ConfigError: the device does not multiply by it.
  """
  platform = device.platform
  if options.quantization not in (choices := _quantizations(device)):
    raise ConfigError(
      f"quantization={options.quantization} is not for {device.device_kind}; set --quantization to one of "
      f"{', '.join(choices)}"
    )
  form = matrix_form(options.quantization, platform, options.quantization_group_size)
  reason = ""
  if platform == "cpu" and matmul != "packed" and form != PLAIN_MATRIX:
    reason = f"every step converts {options.quantization} weights, which saves memory but no time"
  return form, reason


def matrix_form(quantization: str, platform: str, group: int = 0) -> MatrixForm:
  """Returns the form of matrices that the loader makes of plain weights. Args: group: inputs of int4; 0: the default.

  w8a8 on a CPU has codes like those of checkpoints, which the packed kernel multiplies.
  """
  by_code = MatrixForm("grouped", 8, scale_dtype="float32")
  group = group or (_TPU_INT4_GROUP if platform == "tpu" else _INT4_GROUP)
  return {
    "int8": INT8,
    "w8a8": by_code if platform == "cpu" else MatrixForm("w8a8"),
    "int4": MatrixForm("grouped", 4, group, scale_dtype="float16"),
    "fp8": MatrixForm("fp8"),
  }.get(quantization, PLAIN_MATRIX)


def multiplies_fp8(device: Any) -> bool:
  """Whether a device has products of two operands of e4m3."""
  if device.platform == "cpu":
    return False
  if device.platform == "tpu":
    return "7" in device.device_kind
  capability = str(getattr(device, "compute_capability", "0"))
  return float(re.sub(r"[^\d.]", "", capability) or 0) >= _FP8_CAPABILITY


def _quantizations(device: Any) -> tuple[str, ...]:
  """Returns the values of --quantization that a device multiplies by without a wider copy of the weights."""
  always = ("auto", "none", "int8", "w8a8")
  return (*always, *["int4"] * (device.platform in ("cpu", "tpu")), *["fp8"] * multiplies_fp8(device))


def fit_to_attention(
  spec_of_width: Callable[[int], ProgramSpec], longest: int, is_chosen: bool, ladder: ShapeLadder
) -> tuple[int, str]:
  """Rejects shapes that the attention kernels cannot run, before anything compiles. Never falls back to others.

  Args:
    spec_of_width: makes the programs' spec from the blocks of a block table.
    longest: max_model_len, in tokens.
    is_chosen: the user set it; otherwise this function may lower it to the longest that the kernels support.
    ladder: the rungs to compile.

  Returns:
    The longest sequence in tokens, and why it is less than `longest`, or "".

  Raises:
    ConfigError: the kernels support no length, or not the chosen one.
  """
  block_size = spec_of_width(1).block_size
  width = -(-longest // block_size)
  refusal = _refusal(spec_of_width(width), ladder)
  if refusal is None:
    return longest, ""
  fits = bisect.bisect_left(range(1, width), True, key=lambda w: _refusal(spec_of_width(w), ladder) is not None)
  if not fits:  # no length works
    raise ConfigError(f"{refusal}; or set --attention=reference, which runs anywhere, slowly") from refusal
  if is_chosen:
    raise ConfigError(
      f"max_model_len={longest}: {refusal}; lower --max_model_len to {fits * block_size} or --max_num_seqs, raise "
      "--block_size, or set --attention=reference, which runs anywhere, slowly"
    ) from refusal
  return fits * block_size, str(refusal)


def _refusal(spec: ProgramSpec, ladder: ShapeLadder) -> NotImplementedError | None:
  """Returns the error of the attention kernels for the first rung that they cannot run, or None."""
  try:
    for shape in ladder.rungs():
      for _, attention in spec.attention_groups(shape):
        api.check_supported(spec.attention, attention.geometry, spec.dtype, spec.kv[0].dtype)
  except NotImplementedError as error:
    return error
  return None
