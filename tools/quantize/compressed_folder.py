"""Writes quantized checkpoints in the form of compressed-tensors, which transformers and vLLM take. Quantizes nothing.

  int4, int8   format pack-quantized: weight_packed int32[N, K * bits / 32], weight_scale [N, groups], weight_shape
  w8a8         format int-quantized: weight int8[N, K], weight_scale [N, 1]; activations are quantized by token

Packed codes have their lowest bits first, with 2**(bits - 1) for 0 (https://github.com/vllm-project/compressed-tensors).
"""

from collections.abc import Iterator, Sequence
import dataclasses
import json
import os
import pathlib
import shutil
import tempfile
from typing import Any

import ml_dtypes
import numpy as np

from engine.errors import CheckpointError, ConfigError
from engine.model_folder import CONFIG, INDEX, SINGLE

_NAMES = {
  np.dtype(np.float32): "F32",
  np.dtype(np.float16): "F16",
  np.dtype(ml_dtypes.bfloat16): "BF16",
  np.dtype(np.int8): "I8",
  np.dtype(np.int32): "I32",
  np.dtype(np.int64): "I64",
}


@dataclasses.dataclass(frozen=True)
class Scheme:
  """A form of quantized weights.

  Attributes:
    bits: of a weight.
    group: adjacent inputs that share a scale; 0: all inputs of an output.
    quantizes_activations: whether the format says so: 8 bits, as they come, by token.
  """

  bits: int
  group: int = 0
  quantizes_activations: bool = False

  def group_of(self, inputs: int) -> int:
    return self.group or inputs

  def describe(self, ignored: Sequence[str]) -> dict[str, Any]:
    """Returns config.json's quantization_config. Args: ignored: linear modules that stay plain."""
    integers = {"type": "int", "symmetric": True}
    grouping = {"strategy": "group", "group_size": self.group} if self.group else {"strategy": "channel"}
    weights = {"num_bits": self.bits, **integers, **grouping, "dynamic": False}
    activations = {"num_bits": 8, **integers, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights}
    if self.quantizes_activations:
      group["input_activations"] = activations
    return {
      "quant_method": "compressed-tensors",
      "format": "int-quantized" if self.quantizes_activations else "pack-quantized",
      "quantization_status": "compressed",
      "config_groups": {"group_0": group},
      "ignore": list(ignored),
    }

  def scale_dtype(self, dtype: np.dtype) -> np.dtype:
    """Returns the dtype of scales for a tensor of `dtype`: the same, but float16 for the many scales of 4 bits."""
    return np.dtype(np.float16) if self.bits == 4 and dtype == np.float32 else dtype

  def stored_shapes(self, shape: tuple[int, ...], dtype: np.dtype) -> list[tuple[str, np.dtype, tuple[int, ...]]]:
    """Returns suffix, dtype and shape of each tensor that stands for a weight [outputs, inputs] of `dtype`."""
    outputs, inputs = shape
    scale = ("weight_scale", self.scale_dtype(dtype), (outputs, inputs // self.group_of(inputs)))
    if self.quantizes_activations:
      return [("weight", np.dtype(np.int8), shape), scale]
    packed = ("weight_packed", np.dtype(np.int32), (outputs, -(-inputs * self.bits // 32)))
    return [packed, scale, ("weight_shape", np.dtype(np.int64), (2,))]

  def store(self, codes: np.ndarray, scales: np.ndarray) -> list[np.ndarray]:
    """Returns the tensors of `stored_shapes`. Args: codes: uint8[outputs, inputs]; scales: [outputs, groups]."""
    if self.quantizes_activations:
      return [(codes ^ np.uint8(128)).view(np.int8), scales]
    return [pack_codes(codes, self.bits), scales, np.array(codes.shape, np.int64)]


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
  """uint8[N, K] of 4 or 8 bits -> int32[N, K * bits / 32], padded with codes of 0."""
  outputs, inputs = codes.shape
  padded = np.pad(codes, ((0, 0), (0, -inputs % (32 // bits))))
  if bits == 4:
    padded = padded[:, ::2] | padded[:, 1::2] << 4
  return np.ascontiguousarray(padded).view("<i4").reshape(outputs, -1)


@dataclasses.dataclass(frozen=True)
class PlannedTensor:
  """A tensor to write, before its values exist."""

  name: str
  dtype: np.dtype
  shape: tuple[int, ...]

  @property
  def num_bytes(self) -> int:
    return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


class FolderDraft:
  """A model folder under a temporary name beside its final one; `with` removes it unless `publish` was called."""

  def __init__(self, output: pathlib.Path):
    """Makes the folder. Raises ConfigError if `output` exists or cannot be written."""
    if output.exists() or output.is_symlink():
      raise ConfigError(f"{output}: exists already; choose a new folder for --output, or remove this one")
    self._output = output
    try:
      output.parent.mkdir(parents=True, exist_ok=True)
      self._parent = tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent)
      self.folder = pathlib.Path(self._parent.name) / output.name
      self.folder.mkdir()
    except OSError as error:
      raise ConfigError(
        f"{output}: cannot be written ({error.strerror}: {error.filename}); choose a folder for --output that you may "
        "write to"
      ) from error

  def __enter__(self) -> "FolderDraft":
    return self

  def __exit__(self, *_: object) -> None:
    self._parent.cleanup()

  def write_config(self, raw: dict[str, Any], companions: Sequence[pathlib.Path]) -> None:
    """Writes config.json, and copies other files."""
    (self.folder / CONFIG).write_text(json.dumps(raw, indent=2) + "\n", "utf-8")
    for file in companions:
      shutil.copyfile(file, self.folder / file.name)

  def write_weights(self, files: dict[str, list[PlannedTensor]], values: Iterator[np.ndarray]) -> int:
    """Writes safetensors files, a tensor at a time, and the index of several; returns the bytes of tensors.

    Args:
      files: the planned tensors by file name.
      values: the tensors' values, file after file.

    Raises:
      ConfigError: the disk is too small.
      CheckpointError: writing failed.
    """
    num_bytes = sum(planned.num_bytes for file in files.values() for planned in file)
    free = shutil.disk_usage(self.folder).free
    if num_bytes > free:
      raise ConfigError(
        f"{self._output}: needs {num_bytes} bytes, and {free} are free; free disk space, or choose another folder"
      )
    try:
      for file, planned in files.items():
        _write_safetensors(self.folder / file, planned, values)
      if set(files) != {SINGLE}:
        weight_map = {planned.name: file for file, each in files.items() for planned in each}
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    except OSError as error:
      raise CheckpointError(f"{self._output}: cannot be written ({error.strerror}); nothing of it is kept") from error
    return num_bytes

  def publish(self) -> None:
    """Gives the folder its final name."""
    os.rename(self.folder, self._output)


def _write_safetensors(file: pathlib.Path, planned: list[PlannedTensor], values: Iterator[np.ndarray]) -> None:
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  offset = 0
  for each in planned:
    end = offset + each.num_bytes
    header[each.name] = {"dtype": _NAMES[each.dtype], "shape": list(each.shape), "data_offsets": [offset, end]}
    offset = end
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  with open(file, "wb") as stream:
    stream.write(len(text).to_bytes(8, "little") + text)
    for each in planned:
      value = next(values)
      assert value.dtype == each.dtype and value.shape == each.shape, (each, value.dtype, value.shape)
      stream.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
