"""Weights of float8 (e4m3) with a scale an output, a tensor, or a block: `quant_method` fp8, and compressed-tensors.

A layer has weight e4m3[outputs, inputs] and weight_scale or weight_scale_inv, which both multiply: of one number, of
[outputs, 1], or of [ceil(outputs / R), ceil(inputs / C)] for blocks of [R, C]. Blocks of
outputs alone are scales of outputs.
"""

import dataclasses
import pathlib
from typing import Any, NoReturn

import numpy as np

from engine.device.formats.quantized_tensor import SCALE_DTYPES, LayerTensors, map_scales, refuse_format
from engine.device.safetensors_file import StoredTensor
from engine.errors import CheckpointError
from models.fp8_weight import Fp8Weight

SUFFIXES = ("weight", "weight_scale", "weight_scale_inv")
UNREAD = (".input_scale", ".output_scale", ".k_scale", ".v_scale")
_ROWS_BYTES = 4_000_000  # of values at a time
_MAGNITUDE = np.uint8(0x7F)  # the bits of a number without its sign; all set: NaN


@dataclasses.dataclass(frozen=True)
class Fp8Tensor:
  """A matrix [outputs, inputs] of e4m3.

  Attributes:
    name: of the plain tensor in its place.
    file: holds the values.
    values: their place.
    scales: f32[outputs / rows, inputs / columns], rounded up; finite.
    block: [rows, columns] that share a scale.
    parts: the names of the tensors in the file.
  """

  name: str
  file: pathlib.Path
  shape: tuple[int, int]
  values: StoredTensor
  scales: np.ndarray
  block: tuple[int, int]
  parts: tuple[str, ...]

  @property
  def has_output_scales(self) -> bool:
    """Whether all inputs of an output share a scale."""
    return self.scales.shape[1] == 1

  def read(self) -> Fp8Weight:
    """Returns the values as they are, as [inputs, outputs]; only with output scales. Raises CheckpointError for NaN."""
    values = self.values.map()
    outputs, inputs = self.shape
    step = max(1, _ROWS_BYTES // inputs)
    for start in range(0, outputs, step):
      if ((values[start : start + step].view(np.uint8) & _MAGNITUDE) == _MAGNITUDE).any():
        self._refuse_nan()
    scales = self.scales[np.arange(outputs) // self.block[0], 0]
    return Fp8Weight(values.T, scales)

  def dequantize(self, dtype: np.dtype) -> np.ndarray:
    """Returns [outputs, inputs], products in f32 rounded to `dtype`. Raises CheckpointError for NaN."""
    values = self.values.map()
    outputs, inputs = self.shape
    rows, columns = self.block
    out = np.empty(self.shape, dtype)
    step = max(1, _ROWS_BYTES // inputs)
    for start in range(0, outputs, step):
      lines = slice(start, min(start + step, outputs))
      exact = values[lines].astype(np.float32)
      if not np.isfinite(exact).all():
        self._refuse_nan()
      scales = self.scales[np.arange(lines.start, lines.stop) // rows]
      exact *= scales if scales.shape[1] == 1 else np.repeat(scales, columns, axis=1)[:, :inputs]
      out[lines] = exact
    return out

  def _refuse_nan(self) -> NoReturn:
    raise CheckpointError(f"{self.file}: tensor {self.values.name} holds NaN; the file is corrupt: copy it again")


def check_config(file: pathlib.Path, config: dict[str, Any]) -> None:
  """Raises CheckpointError if the folder's settings are not supported."""
  if config.get("activation_scheme", "dynamic") not in ("dynamic", "static"):
    refuse_format(file, f"fp8 activation_scheme={config['activation_scheme']!r:.80}", "'dynamic' or 'static'")
  if config.get("fmt", "e4m3") != "e4m3":
    refuse_format(file, f"fp8 fmt={config['fmt']!r:.80}", "'e4m3'")
  read_block(file, config, "weight_block_size")


def open_layer(file: pathlib.Path, config: dict[str, Any], layer: LayerTensors) -> Fp8Tensor:
  """Checks the tensors of a layer of `quant_method` fp8. Args: file: config.json."""
  return open_values(layer, read_block(file, config, "weight_block_size"))


def open_values(layer: LayerTensors, block: tuple[int, int] | None) -> Fp8Tensor:
  """Checks the values and scales of a layer. Args: block: of the settings; None: a scale an output or a tensor."""
  outputs, inputs = layer.shape
  values = layer.take("weight", ("F8_E4M3",), (outputs, inputs))
  suffix = "weight_scale_inv" if layer.find("weight_scale_inv") is not None else "weight_scale"
  if block is None:
    tensor = layer.take(suffix, (*SCALE_DTYPES, "F8_E8M0"), (outputs, 1), (outputs,), (1,), (), (1, 1))
    scales = map_scales(tensor).astype(np.float32).reshape(-1, 1)
    block = (1 if len(scales) == outputs else outputs, inputs)
  else:
    blocks = -(-outputs // block[0]), -(-inputs // block[1])
    scales = map_scales(layer.take(suffix, (*SCALE_DTYPES, "F8_E8M0"), blocks)).astype(np.float32)
  return Fp8Tensor(f"{layer.name}.weight", values.file, layer.shape, values, scales, block, layer.parts(*SUFFIXES))


def read_block(file: pathlib.Path, settings: dict[str, Any], key: str) -> tuple[int, int] | None:
  """Returns the size of blocks, [rows, columns]. Raises CheckpointError if it is neither null nor two integers."""
  value = settings.get(key)
  if value is None:
    return None
  if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
    raise CheckpointError(
      f"{file}: quantization_config: {key}={value!r:.80} must be null or two positive integers; correct the file"
    )
  return value[0], value[1]
