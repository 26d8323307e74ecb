"""Finds the quantized matrices of a model folder, and reads one parameter at a time. May not choose a device's layout.

A layer that is stored plain stays plain, whatever the settings say.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import pathlib
from typing import Any

import numpy as np

from engine.device.formats import awq, compressed_tensors, fp8, gptq
from engine.device.formats.fp8 import Fp8Tensor
from engine.device.formats.quantized_tensor import LayerTensors, QuantizedTensor, refuse_format
from engine.device.safetensors_file import StoredTensor
from engine.errors import CheckpointError
from models.families.tensor_map import Piece, TensorMap
from models.fp8_weight import Fp8Weight, assemble_fp8
from models.grouped_weight import GroupedWeight, assemble_grouped, place_pieces
from models.matrices import Weight
from models.weight_form import MatrixForm

EMBEDDING = "embed"  # stored name of the parameter [V, D]
_WEIGHT = ".weight"
_READERS = {"awq": awq, "gptq": gptq, "compressed-tensors": compressed_tensors, "fp8": fp8}
_UNREAD = {"compressed-tensors": compressed_tensors.UNREAD, "fp8": fp8.UNREAD}
AnyTensor = QuantizedTensor | Fp8Tensor


@dataclasses.dataclass(frozen=True)
class QuantizedSource:
  """The quantized parameters of a model folder, which are not read yet.

  Attributes:
    label: names the form, such as "4-bit awq (groups of 128)".
    forms: the form of each parameter that `read` returns in low precision, by stored name.
    reads: the names that `read` takes: those of `forms`, and parameters that hold a quantized tensor but are plain.
    parts: names of the stored tensors that belong to quantized matrices.
    warnings: what the folder has and Sluice does not apply, a line each.
    pieces: the tensors of each parameter.
    quantized: by name of the plain tensor.
    stored: the other tensors.
  """

  label: str
  forms: Mapping[str, MatrixForm]
  reads: frozenset[str]
  parts: frozenset[str]
  warnings: tuple[str, ...]
  pieces: TensorMap
  quantized: Mapping[str, AnyTensor]
  stored: Mapping[str, StoredTensor]

  def read(self, name: str, dtype: np.dtype) -> Weight:
    """Reads a parameter, whole and in its own axes; codes of the embedding are those of the matrix [D, V].

    Args:
      name: one of `reads`; the result is a GroupedWeight or Fp8Weight of the form in `forms`, or else a plain array.
      dtype: of a plain array.

    Raises:
      CheckpointError: the file holds NaN, infinite or too large scales.
    """
    pieces = self.pieces[name]
    if name not in self.forms:
      plain = [(piece, self._read_plain(piece, dtype)) for piece in pieces]
      return place_pieces([(piece, value.reshape(piece.split).transpose(piece.order)) for piece, value in plain])
    count = _num_inputs(pieces[0])
    read = [(piece, self.quantized[piece.name].read()) for piece in pieces]
    if self.forms[name].kind == "fp8":
      return assemble_fp8([(piece, weight) for piece, weight in read if isinstance(weight, Fp8Weight)], count)
    grouped = [(piece, weight) for piece, weight in read if isinstance(weight, GroupedWeight)]
    return grouped[0][1] if name == EMBEDDING else assemble_grouped(grouped, count)

  def _read_plain(self, piece: Piece, dtype: np.dtype) -> np.ndarray:
    """Returns the piece in its own shape."""
    if piece.name in self.quantized:
      return self.quantized[piece.name].dequantize(dtype)
    return self.stored[piece.name].map().astype(dtype)


def _num_inputs(piece: Piece) -> int:
  """Returns how many of a parameter's dimensions are inputs of the stored [outputs, inputs]."""
  size, count = 1, 0
  while size < piece.shape[1]:
    count += 1
    size *= piece.split[-count]
  return count


def make_source(
  kind: str,
  pieces: TensorMap,
  quantized: Mapping[str, AnyTensor],
  stored: Mapping[str, StoredTensor],
  unread: Iterable[str] = (),
  keeps_fp8: bool = False,
) -> QuantizedSource:
  """Returns the source of a folder.

  Args:
    kind: the format's name.
    quantized: by name of the plain tensor.
    stored: all tensors of the folder.
    unread: names of tensors that hold scales of activations or KV.
    keeps_fp8: as in WeightForm.
  """
  forms, reads, widened = {}, set(), []
  for name, parts in pieces.items():
    found = [quantized[piece.name] for piece in parts if piece.name in quantized]
    if not found:
      continue
    reads.add(name)
    grouped = [tensor for tensor in found if isinstance(tensor, QuantizedTensor)]
    by_output = [tensor for tensor in found if isinstance(tensor, Fp8Tensor) and tensor.has_output_scales]
    is_matrix = parts[0].order[0] != 0
    if len(grouped) == len(parts) and (name == EMBEDDING or is_matrix):
      forms[name] = _joint_form(grouped)
    elif keeps_fp8 and len(by_output) == len(parts) and is_matrix:
      forms[name] = MatrixForm("fp8")
    elif keeps_fp8:
      widened += [tensor for tensor in found if isinstance(tensor, Fp8Tensor) and not tensor.has_output_scales]
  unread = sorted(unread)
  warnings = []
  if unread:
    warnings.append(
      f"{stored[unread[0]].file}: tensor {unread[0]}{_others(unread)}: scales of activations and KV are not read; "
      "activations are quantized as they come, and --kv_dtype sets the form of KV"
    )
  if widened:
    rows, columns = widened[0].block
    warnings.append(
      f"{widened[0].file}: tensor {widened[0].name}{_others(widened)}: e4m3 with a scale for each block of {rows}x"
      f"{columns} becomes plain weights of --dtype, because no product here takes scales inside of its sum; "
      "--quantization=fp8 rounds them to e4m3 again, with a scale an output; a checkpoint with such scales stays fp8"
    )
  return QuantizedSource(
    label=_label(kind, quantized, forms),
    forms=forms,
    reads=frozenset(reads),
    parts=frozenset(part for tensor in quantized.values() for part in tensor.parts) | set(unread),
    warnings=tuple(warnings),
    pieces=pieces,
    quantized=quantized,
    stored=stored,
  )


def _joint_form(tensors: list[QuantizedTensor]) -> MatrixForm:
  """Returns the form of `assemble_grouped`."""
  inputs = tensors[0].shape[1]
  group = np.gcd.reduce([tensor.group for tensor in tensors]).item()
  has_one_kind = len({(tensor.bits, tensor.group) for tensor in tensors}) == 1
  return MatrixForm(
    kind="grouped",
    bits=max(tensor.bits for tensor in tensors),
    group=0 if group == inputs else group,
    has_offsets=any(tensor.has_offsets for tensor in tensors),
    scale_dtype=np.result_type(*(tensor.scale_dtype for tensor in tensors)).name,
    has_superblocks=has_one_kind and all(tensor.has_superblocks for tensor in tensors),
  )


def _others(names: Sequence[Any]) -> str:
  return f" and {len(names) - 1} others" if len(names) > 1 else ""


def _label(kind: str, quantized: Mapping[str, AnyTensor], forms: Mapping[str, MatrixForm]) -> str:
  """Returns the bits and groups of most matrices and the format's name."""
  grouped = [tensor for tensor in quantized.values() if isinstance(tensor, QuantizedTensor)]
  if not grouped:
    name = kind if "fp8" in kind else f"fp8 {kind}"
    return name if forms else f"dequantized {name}" if quantized else kind
  found = Counter((tensor.bits, 0 if tensor.group == tensor.shape[1] else tensor.group) for tensor in grouped)
  (bits, group), _ = found.most_common(1)[0]
  return f"{bits}-bit {kind}{f' (groups of {group})' if group else ''}"


def open_quantized(
  config_file: pathlib.Path,
  raw: Mapping[str, Any],
  stored: dict[str, StoredTensor],
  pieces: TensorMap,
  keeps_fp8: bool = False,
) -> QuantizedSource | None:
  """Checks the quantized matrices of a safetensors folder by their declarations and scales.

  Args:
    config_file: config.json, whose object is `raw`.
    stored: every tensor of the folder.
    pieces: the tensors of a plain model.
    keeps_fp8: as in WeightForm.

  Returns:
    None if config.json has no quantization_config.

  Raises:
    CheckpointError: the format is not supported, or a part is missing or does not fit.
  """
  config = raw.get("quantization_config")
  if not config:
    return None
  if not isinstance(config, dict):
    raise CheckpointError(f"{config_file}: quantization_config={config!r:.80} must be an object; correct the file")
  method = config.get("quant_method")
  if not isinstance(method, str) or method not in _READERS:
    refuse_format(config_file, f"quant_method={method!r:.80}", ", ".join(_READERS))
  reader = _READERS[method]
  reader.check_config(config_file, config)
  every = {piece.name: piece for parts in pieces.values() for piece in parts}
  quantized = {}
  for name, piece in every.items():
    plain = stored.get(name)
    if not name.endswith(_WEIGHT) or len(piece.shape) != 2 or plain is not None and plain.is_plain:
      continue
    layer = LayerTensors(name.removesuffix(_WEIGHT), stored, piece.shape, method)
    if not layer.parts(*reader.SUFFIXES):
      continue  # the check of plain tensors reports the missing weight
    if reader is gptq:
      has_bias = f"{layer.name}.bias" in every
      quantized[name] = gptq.open_layer(config_file, config, layer, has_bias)
    else:
      quantized[name] = reader.open_layer(config_file, config, layer)
  unread = [name for name in stored if name.endswith(_UNREAD.get(method, ()))]
  return make_source(method, pieces, quantized, stored, unread, keeps_fp8)
