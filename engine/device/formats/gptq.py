"""GPTQ checkpoints of AutoGPTQ and GPTQModel: codes of 4 or 8 bits with a scale and a zero point a group.

A layer has qweight int32[inputs / P, outputs], qzeros int32[groups, outputs / P], scales [groups, outputs] and g_idx
int32[inputs]; P codes lie in an integer, the lowest bits first. The weight is scale * (code - zero). Version 1 stores
zero - 1, modulo 2**bits.
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
  words_of,
  zero_offsets,
)
from engine.errors import CheckpointError
from models.grouped_weight import GroupedWeight, unpack_nibbles

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx", "bias")


def check_config(file: pathlib.Path, config: dict[str, Any]) -> None:
  """Raises CheckpointError if the folder's settings are not supported."""
  bits = read_int(file, config, "bits")
  if bits not in (4, 8):
    refuse_format(file, f"gptq bits={bits}", "4 or 8")
  _stored_less(file, config)
  read_int(file, config, "group_size")
  for key in ("dynamic", "pack_dtype"):
    if config.get(key) not in (None, False, {}, "int32"):
      refuse_format(file, f"gptq {key}={config[key]!r:.80}", "one form of all layers, in int32")


def _stored_less(file: pathlib.Path, config: dict[str, Any]) -> int:
  """Returns how much the stored zero points are less than the zero points."""
  version = config.get("checkpoint_format") or config.get("format") or "gptq"
  if version not in ("gptq", "gptq_v2"):
    refuse_format(file, f"gptq checkpoint_format={version!r:.80}", "'gptq' or 'gptq_v2'")
  return 1 if version == "gptq" else 0


def open_layer(file: pathlib.Path, config: dict[str, Any], layer: LayerTensors, has_bias: bool) -> QuantizedTensor:
  """Checks the tensors of a layer, and reads its zero points.

  Args:
    file: config.json.
    has_bias: whether the model's layer has a bias; the format may store one of zeros for any layer.
  """
  outputs, inputs = layer.shape
  bits, less = read_int(file, config, "bits"), _stored_less(file, config)
  group = resolve_group(file, read_int(file, config, "group_size"), layer)
  pack = 32 // bits
  layer.check_multiple(file, 0, pack, f"GPTQ packs {pack} outputs' zero points")
  layer.check_multiple(file, 1, pack, f"GPTQ packs {pack} inputs")
  codes = layer.take("qweight", ("I32",), (inputs // pack, outputs))
  zeros = layer.take("qzeros", ("I32",), (inputs // group, outputs // pack))
  scales = map_scales(layer.take("scales", SCALE_DTYPES, (inputs // group, outputs)))
  if layer.find("g_idx") is not None:
    order = layer.take("g_idx", ("I32",), (inputs,))
    if not np.array_equal(order.map(), np.arange(inputs) // group):
      raise CheckpointError(
        f"{order.file}: tensor {order.name} does not assign inputs to groups in order: the checkpoint was made with "
        f"act-order (desc_act={config.get('desc_act')!r:.80}), which is not supported; use one made with desc_act=false"
      )
  if not has_bias and layer.find("bias") is not None:
    bias = layer.take("bias", SCALE_DTYPES, (outputs,))
    if np.asarray(bias.map()).any():
      raise CheckpointError(
        f"{bias.file}: tensor {bias.name} is not zero, but config.json describes a layer without bias; use config.json "
        "and weights of one model"
      )
  stored = bytes_of(zeros)
  points = (unpack_nibbles(stored) if bits == 4 else stored) + np.uint8(less) & np.uint8((1 << bits) - 1)
  has_offsets = bool((points != 1 << bits - 1).any())

  def decode() -> GroupedWeight:
    offsets = zero_offsets(scales, points, bits) if has_offsets else None
    found = words_of(codes) if bits == 4 else _unpack(codes.map())
    return GroupedWeight(found, widen_scales(scales), bits, 1, offsets)

  used = SUFFIXES[:-1] if has_bias else SUFFIXES
  return layer.quantized(bits, group, scales, has_offsets, decode, *used)


def _unpack(packed: np.ndarray) -> np.ndarray:
  """int32[K / 4, N] of four codes of 8 bits each -> uint8[K, N]."""
  rows, outputs = packed.shape
  parts = packed.view(np.uint8).reshape(rows, outputs, 4)
  codes = np.empty((rows, 4, outputs), np.uint8)
  for byte in range(4):
    codes[:, byte] = parts[..., byte]
  return codes.reshape(rows * 4, outputs)
