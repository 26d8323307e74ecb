"""Checkpoints of compressed-tensors (llm-compressor): integers of 4 and 8 bits, FP8 and MXFP4, by layer.

A layer's stored tensors decide its form, and quantization_config must describe that form. So `ignore`, and targets that
name layers, need no interpretation: an ignored layer is stored plain.

  pack-quantized   weight_packed int32[N, K * bits / 32], weight_scale [N, groups], weight_shape int[2], and for zero
                   points weight_zero_point int32[N * bits / 32, groups]. The lowest bits come first; values are signed
                   and have 2**(bits - 1) added.
  int-quantized    weight int8[N, K], weight_scale [N, groups] or of the tensor; weight_zero_point int8 likewise.
  float-quantized  weight e4m3[N, K], weight_scale [N, 1], of the tensor, or of blocks (fp8.py).
  mxfp4-pack-quantized  weight_packed uint8[N, K / 2] of e2m1, weight_scale uint8[N, K / 32] of exponents.
"""

import pathlib
from typing import Any

import numpy as np

from engine.device.formats import fp8
from engine.device.formats.fp8 import Fp8Tensor
from engine.device.formats.quantized_tensor import (
  SCALE_DTYPES,
  LayerTensors,
  QuantizedTensor,
  bytes_of,
  map_scales,
  read_int,
  refuse_format,
  widen_scales,
  words_of,
  zero_offsets,
)
from engine.errors import CheckpointError
from models.grouped_weight import WORD, GroupedWeight, unpack_nibbles

FORMATS = (
  "pack-quantized",
  "int-quantized",
  "float-quantized",
  "naive-quantized",
  "mxfp4-pack-quantized",
  "mixed-precision",
)
SUFFIXES = ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
# Scales of activations and KV, which Sluice makes itself as activations come.
UNREAD = (".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".k_scale", ".v_scale")
_NAME = "compressed-tensors"


def check_config(file: pathlib.Path, config: dict[str, Any]) -> None:
  """Raises CheckpointError if the folder's settings are not supported."""
  stored = config.get("format")
  if stored not in FORMATS:
    refuse_format(file, f"compressed-tensors format={stored!r:.80}", ", ".join(FORMATS))
  status = config.get("quantization_status", "compressed")
  if status != "compressed":
    refuse_format(file, f"compressed-tensors quantization_status={status!r:.80}", "'compressed'")
  for key in ("sparsity_config", "transform_config"):
    value = config.get(key)
    if value and (key != "sparsity_config" or not isinstance(value, dict) or value.get("format", "dense") != "dense"):
      refuse_format(file, f"compressed-tensors {key}={value!r:.80}", "none")
  for weights in _groups(file, config):
    kind = weights.get("type", "int"), read_int(file, weights, "num_bits", 8)
    if kind not in (("int", 4), ("int", 8), ("float", 8), ("float", 4)):
      refuse_format(
        file, f"weights of type={kind[0]!r:.80} num_bits={kind[1]}", "int of 4 and 8, float of 8, and mxfp4"
      )
    if kind == ("float", 4) and (weights.get("strategy"), weights.get("group_size")) != ("group", 32):
      refuse_format(
        file,
        f"float num_bits=4 strategy={weights.get('strategy')!r:.80} group_size={weights.get('group_size')!r:.80}",
        "mxfp4: strategy='group' group_size=32",
      )
    if weights.get("actorder") in ("group", "dynamic", True):
      refuse_format(file, f"actorder={weights['actorder']!r:.80} (act-order)", "null, 'weight' or 'static'")


def _groups(file: pathlib.Path, config: dict[str, Any]) -> list[dict[str, Any]]:
  """Returns the settings of the weights of each group."""
  groups = config.get("config_groups")
  schemes = list(groups.values()) if isinstance(groups, dict) else []
  if not schemes or not all(isinstance(scheme, dict) for scheme in schemes):
    raise CheckpointError(
      f"{file}: quantization_config: config_groups={groups!r:.200} must hold an object for each group; correct the file"
    )
  found = [scheme.get("weights") for scheme in schemes]
  if not all(isinstance(weights, dict) for weights in found):
    refuse_format(file, "a group without settings of weights", "weights of each group")
  return found


def open_layer(file: pathlib.Path, config: dict[str, Any], layer: LayerTensors) -> QuantizedTensor | Fp8Tensor:
  """Checks the tensors of a layer. Args: file: config.json."""
  if (order := layer.find("weight_g_idx")) is not None:
    raise CheckpointError(
      f"{order.file}: tensor {order.name}: act-order is not supported; use a checkpoint made with actorder='weight' or "
      "null"
    )
  packed, plain = layer.find("weight_packed"), layer.find("weight")
  if plain is not None and plain.dtype == "F8_E4M3":
    return _open_fp8(file, config, layer)
  if packed is None:
    return _open_int8(file, config, layer)
  if packed.dtype == "U8":
    return _open_mxfp4(file, config, layer)
  return _open_packed(file, config, layer)


def _open_packed(file: pathlib.Path, config: dict[str, Any], layer: LayerTensors) -> QuantizedTensor:
  outputs, inputs = layer.shape
  widths = {-(-inputs * bits // 32): bits for bits in (4, 8)}
  packed = layer.take("weight_packed", ("I32",), *((outputs, width) for width in widths))
  bits = widths[packed.shape[1]]
  if layer.find("weight_shape") is not None:
    shape = layer.take("weight_shape", ("I64", "I32"), (2,))
    if tuple(shape.map().tolist()) != layer.shape:
      raise CheckpointError(
        f"{shape.file}: tensor {shape.name} is {shape.map().tolist()}, but config.json requires {list(layer.shape)}; "
        "use files of one model"
      )
  group, scales, is_symmetric = _read_groups(file, config, layer, "int", bits)
  pack = 32 // bits
  zeros = None
  if not is_symmetric:
    zeros = layer.take("weight_zero_point", ("I32",), (-(-outputs // pack), scales.shape[1]))

  def decode() -> GroupedWeight:
    if bits == 4 and inputs % WORD == 0:
      codes = words_of(packed)
    else:
      codes = (bytes_of(packed) if bits == 8 else unpack_nibbles(bytes_of(packed)))[:, :inputs]
    offsets = None
    if zeros is not None:
      stored = np.ascontiguousarray(zeros.map().T).view(np.uint8)  # [groups, outputs * bits / 8]
      points = stored if bits == 8 else unpack_nibbles(stored)
      offsets = zero_offsets(scales.T, points[:, :outputs], bits)
    return GroupedWeight(codes.T, widen_scales(scales.T), bits, 1, offsets)

  return layer.quantized(bits, group, scales, not is_symmetric, decode, *SUFFIXES)


def _open_fp8(file: pathlib.Path, config: dict[str, Any], layer: LayerTensors) -> Fp8Tensor:
  found = [weights for weights in _groups(file, config) if weights.get("type") == "float"]
  if not found:
    raise CheckpointError(
      f"{file}: quantization_config has no group with type=float, but {layer.name}.weight is F8_E4M3; use "
      "config.json and weights of one model"
    )
  blocks = {fp8.read_block(file, weights, "block_structure") for weights in found}
  if len(blocks) > 1:
    refuse_format(file, f"block_structure of {len(blocks)} kinds", "one kind of FP8 in a model")
  return fp8.open_values(layer, blocks.pop())


def _open_int8(file: pathlib.Path, config: dict[str, Any], layer: LayerTensors) -> QuantizedTensor:
  outputs, inputs = layer.shape
  values = layer.take("weight", ("I8",), (outputs, inputs))
  group, scales, is_symmetric = _read_groups(file, config, layer, "int", 8)
  zeros = None
  if not is_symmetric:
    zeros = layer.take("weight_zero_point", ("I8",), *_scale_shapes(layer, inputs // group))

  def decode() -> GroupedWeight:
    codes = values.map().view(np.uint8) ^ np.uint8(128)
    offsets = None
    if zeros is not None:
      points = np.broadcast_to(zeros.map().reshape(-1, inputs // group), scales.shape).T
      offsets = zero_offsets(scales.T, points.astype(np.int32) + 128, 8)
    return GroupedWeight(codes.T, widen_scales(scales.T), 8, 1, offsets)

  return layer.quantized(8, group, scales, not is_symmetric, decode, *SUFFIXES)


# The integers 2 * value of e2m1's sixteen codes, as codes of 6 bits, whose zero is 32.
_E2M1 = (32 + np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)).view(np.uint8)


def _open_mxfp4(file: pathlib.Path, config: dict[str, Any], layer: LayerTensors) -> QuantizedTensor:
  outputs, inputs = layer.shape
  _match_group(file, config, layer, "float", 4, 32)
  layer.check_multiple(layer.stored[f"{layer.name}.weight_packed"].file, 1, 32, "blocks of MXFP4")
  packed = layer.take("weight_packed", ("U8",), (outputs, inputs // 2))
  exponents = layer.take("weight_scale", ("U8", "F8_E8M0"), (outputs, inputs // 32))
  scales = halved_powers(exponents.map().view(np.uint8))
  if np.isnan(scales).any():
    raise CheckpointError(
      f"{exponents.file}: tensor {exponents.name} holds an exponent of 255, which is NaN; the file is corrupt: copy it "
      "again"
    )

  def decode() -> GroupedWeight:
    return GroupedWeight(decode_e2m1(packed.map()).T, scales.T, 6, 1)

  return layer.quantized(6, 32, scales, False, decode, *SUFFIXES)


def halved_powers(exponents: np.ndarray) -> np.ndarray:
  """uint8[...] of e8m0 -> f32[...], 2**(e - 128), half of what e8m0 means; NaN for 255."""
  powers = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)
  return np.where(exponents == 255, np.float32(np.nan), powers)


def decode_e2m1(packed: np.ndarray) -> np.ndarray:
  """uint8[..., K / 2] -> the codes of twice the values, uint8[..., K], whose zero is 32."""
  return _E2M1[unpack_nibbles(packed)]


def _scale_shapes(layer: LayerTensors, groups: int) -> tuple[tuple[int, ...], ...]:
  outputs = layer.shape[0]
  return ((outputs, groups), (1,), (), (outputs,)) if groups == 1 else ((outputs, groups),)


def _read_groups(
  file: pathlib.Path, config: dict[str, Any], layer: LayerTensors, kind: str, bits: int
) -> tuple[int, np.ndarray, bool]:
  """Returns the group of a layer's scales, the scales [outputs, groups], and whether there are no zero points."""
  outputs, inputs = layer.shape
  stored = layer.find("weight_scale")
  groups = stored.shape[1] if stored is not None and len(stored.shape) == 2 and stored.shape[1] else 1
  tensor = layer.take("weight_scale", SCALE_DTYPES, *_scale_shapes(layer, groups))
  layer.check_multiple(tensor.file, 1, groups, f"tensor {tensor.name} has {groups} groups")
  group = inputs // groups
  is_symmetric = _match_group(file, config, layer, kind, bits, group)
  scales = np.broadcast_to(map_scales(tensor).reshape(-1, groups), (outputs, groups))
  return group, scales, is_symmetric


def _match_group(
  file: pathlib.Path, config: dict[str, Any], layer: LayerTensors, kind: str, bits: int, group: int
) -> bool:
  """Returns whether a group of quantization_config with this form is symmetric; refuses a form of none."""
  found = set()
  for weights in _groups(file, config):
    size = weights.get("group_size")
    size = layer.shape[1] if weights.get("strategy") in ("channel", "tensor") or size in (None, -1) else size
    if (weights.get("type", "int"), weights.get("num_bits", 8), size) == (kind, bits, group):
      found.add(weights.get("symmetric", True) is not False)
  zeros = layer.find("weight_zero_point")
  if found == {True, False}:
    return zeros is None
  if not found:
    raise CheckpointError(
      f"{file}: quantization_config has no group with type={kind} num_bits={bits} and {group} inputs a scale, but the "
      f"tensors of {layer.name} are so; use config.json and weights of one model"
    )
  is_symmetric = found.pop()
  if is_symmetric and zeros is not None and (zeros.dtype != "I8" or zeros.map().any()):
    raise CheckpointError(
      f"{zeros.file}: tensor {zeros.name} holds zero points, but quantization_config says symmetric=true; use "
      "config.json and weights of one model"
    )
  return is_symmetric
