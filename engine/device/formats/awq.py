"""AWQ checkpoints in AutoAWQ's gemm order: codes of 4 bits with a scale and a zero point a group.

A layer has qweight int32[inputs, outputs / 8], qzeros int32[groups, outputs / 8] and scales [groups, outputs]. The
weight is scale * (code - zero). Nibble i of an integer is output ORDER[i] of its eight.
"""

import pathlib
from typing import Any

import numpy as np

from engine.device.formats.quantized_tensor import (
  SCALE_DTYPES,
  LayerTensors,
  QuantizedTensor,
  bytes_of,
  map_scales,
  read_int,
  refuse_format,
  resolve_group,
  widen_scales,
  zero_offsets,
)
from models.grouped_weight import GroupedWeight

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SUFFIXES = ("qweight", "qzeros", "scales")


def check_config(file: pathlib.Path, config: dict[str, Any]) -> None:
  """Raises CheckpointError if the folder's settings are not supported."""
  version = config.get("version", config.get("format", "gemm"))
  if str(version).lower() != "gemm":
    refuse_format(file, f"awq version={version!r:.80}", "'gemm'")
  if read_int(file, config, "bits", 4) != 4:
    refuse_format(file, f"awq bits={config['bits']!r:.80}", "4")
  if config.get("zero_point", True) is not True:
    refuse_format(file, f"awq zero_point={config['zero_point']!r:.80}", "true")
  read_int(file, config, "group_size", 128)


def open_layer(file: pathlib.Path, config: dict[str, Any], layer: LayerTensors) -> QuantizedTensor:
  """Checks the tensors of a layer. Args: file: config.json."""
  outputs, inputs = layer.shape
  group = resolve_group(file, read_int(file, config, "group_size", 128), layer)
  layer.check_multiple(file, 0, 8, "AWQ packs eight outputs")
  codes = layer.take("qweight", ("I32",), (inputs, outputs // 8))
  zeros = layer.take("qzeros", ("I32",), (inputs // group, outputs // 8))
  scales = map_scales(layer.take("scales", SCALE_DTYPES, (inputs // group, outputs)))

  def decode() -> GroupedWeight:
    offsets = zero_offsets(scales, _unpack(bytes_of(zeros)), 4)
    return GroupedWeight(_unpack(bytes_of(codes)), widen_scales(scales), 4, 1, offsets)

  return layer.quantized(4, group, scales, True, decode, *SUFFIXES)


def _unpack(packed: np.ndarray) -> np.ndarray:
  """uint8[K, N / 2] -> uint8[K, N]."""
  rows, size = packed.shape
  packed = packed.reshape(rows, size // 4, 4)
  codes = np.empty((rows, size // 4, 8), np.uint8)
  for byte in range(4):
    np.bitwise_and(packed[..., byte], 15, out=codes[..., ORDER[2 * byte]])
    np.right_shift(packed[..., byte], 4, out=codes[..., ORDER[2 * byte + 1]])
  return codes.reshape(rows, 2 * size)
