"""A quantized matrix of a checkpoint: what is known when the folder opens, and how it becomes a GroupedWeight.

Readers of formats (`compressed_tensors.py`, `awq.py`, `gptq.py`, `gguf_blocks.py`) make these.
"""

from collections.abc import Callable
import dataclasses
import pathlib
from typing import NoReturn

import numpy as np

from engine.device.safetensors_file import StoredTensor
from engine.errors import CheckpointError
from models.grouped_weight import GroupedWeight

SCALE_DTYPES = ("F16", "BF16", "F32")
_HALF = np.finfo(np.float16)


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
  """A matrix [outputs, inputs] whose codes are not read yet.

  Attributes:
    name: of the plain tensor in its place, such as `model.layers.0.mlp.down_proj.weight`.
    file: holds its codes.
    shape: [outputs, inputs].
    bits, group, has_offsets: of the GroupedWeight that `read` returns; one group: one scale an output.
    scale_dtype: float16 or float32, of scales and offsets.
    decode: reads the codes as a GroupedWeight [inputs, outputs], exactly, with scales of either dtype.
    parts: the names of the tensors in the file, those included whose values the format repeats.
    has_superblocks: whether that weight has superblocks.
  """

  name: str
  file: pathlib.Path
  shape: tuple[int, int]
  bits: int
  group: int
  has_offsets: bool
  scale_dtype: np.dtype
  decode: Callable[[], GroupedWeight]
  parts: tuple[str, ...]
  has_superblocks: bool = False

  def dequantize(self, dtype: np.dtype) -> np.ndarray:
    """Returns [outputs, inputs]. Raises CheckpointError as `read`."""
    return self.read().dequantize().T.astype(dtype, copy=False)

  def read(self) -> GroupedWeight:
    """Reads the codes, with scales and offsets rounded to `scale_dtype`.

    Raises:
      CheckpointError: a scale is NaN, infinite or too large.
    """
    weight = self.decode()
    with np.errstate(over="ignore"):
      scales = weight.scales.astype(self.scale_dtype, copy=False)
      offsets = None if weight.offsets is None else weight.offsets.astype(self.scale_dtype, copy=False)
    for values in (scales, offsets):
      if values is not None and not are_finite(values):
        self._refuse_scales(weight)
    return dataclasses.replace(weight, scales=scales, offsets=offsets)

  def _refuse_scales(self, weight: GroupedWeight) -> NoReturn:
    limit = float(np.finfo(self.scale_dtype).max)
    exact = [values.astype(np.float64) for values in (weight.scales, weight.offsets) if values is not None]
    values = np.concatenate([each.reshape(-1) for each in exact])
    value = values[~(np.abs(values) <= limit)][0]
    raise CheckpointError(
      f"{self.file}: tensor {self.name} has a scale of {value:.6g}; supported are finite scales up to {limit:.0f}: "
      "copy the file again"
    )


@dataclasses.dataclass(frozen=True)
class LayerTensors:
  """The stored tensors of one linear layer.

  Attributes:
    name: of the layer, such as `model.layers.0.mlp.down_proj`.
    stored: every tensor of the checkpoint.
    shape: [outputs, inputs] of the plain weight.
    format: the format's name, for error texts.
  """

  name: str
  stored: dict[str, StoredTensor]
  shape: tuple[int, int]
  format: str

  def find(self, suffix: str) -> StoredTensor | None:
    return self.stored.get(f"{self.name}.{suffix}")

  def take(self, suffix: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> StoredTensor:
    """Returns a tensor of one of these shapes and dtypes. Raises CheckpointError if there is none."""
    tensor = self.find(suffix)
    if tensor is None:
      present = next(iter(tensor for name, tensor in self.stored.items() if name.startswith(f"{self.name}.")), None)
      raise CheckpointError(
        f"{present.file if present else self.name}: tensor {self.name}.{suffix} of shape {list(shapes[0])} is missing "
        f"from the {self.format} checkpoint; copy all files of one model"
      )
    if tensor.dtype not in dtypes:
      raise CheckpointError(
        f"{tensor.file}: tensor {tensor.name} has dtype {tensor.dtype}; supported in {self.format} are "
        f"{', '.join(dtypes)}"
      )
    if tensor.shape not in shapes:
      raise CheckpointError(
        f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}, but {self.format} of a layer "
        f"{list(self.shape)} requires {' or '.join(str(list(shape)) for shape in shapes)}; use files of one model"
      )
    return tensor

  def check_multiple(self, file: pathlib.Path, axis: int, divisor: int, reason: str) -> None:
    """Raises CheckpointError unless a dimension of the layer is a multiple of `divisor`."""
    size = self.shape[axis]
    if size % divisor:
      raise CheckpointError(
        f"{file}: layer {self.name} has {size} {('outputs', 'inputs')[axis]}, no multiple of {divisor} ({reason}); "
        "such a layer is not supported: use another checkpoint of the model"
      )

  def parts(self, *suffixes: str) -> tuple[str, ...]:
    """Returns the full names of those tensors that are stored."""
    return tuple(f"{self.name}.{suffix}" for suffix in suffixes if self.find(suffix) is not None)

  def quantized(
    self, bits: int, group: int, scales: np.ndarray, has_offsets: bool, decode: Callable[[], GroupedWeight], *parts: str
  ) -> QuantizedTensor:
    """Returns the layer's matrix. Args: scales: all its scales, of any float dtype; parts: suffixes."""
    return QuantizedTensor(
      name=f"{self.name}.weight",
      file=self.stored[self.parts(*parts)[0]].file,
      shape=self.shape,
      bits=bits,
      group=group,
      has_offsets=has_offsets,
      scale_dtype=choose_scale_dtype(scales, self.shape[1] // group, bits, has_offsets),
      decode=decode,
      parts=self.parts(*parts),
    )


def map_scales(tensor: StoredTensor) -> np.ndarray:
  """Returns a map of scales, of any float dtype. Raises CheckpointError if one is NaN or infinite."""
  scales = np.asarray(tensor.map())
  if not are_finite(scales):
    exact = widen_scales(scales)
    value = exact[~np.isfinite(exact)].reshape(-1)[0]
    raise CheckpointError(
      f"{tensor.file}: tensor {tensor.name} holds a scale of {value}; the file is corrupt: copy it again"
    )
  return scales


def widen_scales(scales: np.ndarray) -> np.ndarray:
  """Returns scales of any float dtype as float16 or float32, exactly."""
  return scales if scales.dtype == np.float16 else scales.astype(np.float32)


def _bits(values: np.ndarray) -> np.ndarray:
  """Returns the bits of floats of 16 or 32 bits. Opening passes over all scales; passes over bits are the quickest."""
  return values.view(np.uint16 if values.itemsize == 2 else np.uint32)


def are_finite(values: np.ndarray) -> bool:
  """Returns whether floats have neither NaN nor infinities."""
  if values.itemsize == 1:
    return bool(np.isfinite(values.astype(np.float32)).all())
  bits = _bits(values)
  exponent = bits.dtype.type({"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F80_0000}[values.dtype.name])
  return not ((bits & exponent) == exponent).any()


def _magnitudes(scales: np.ndarray) -> tuple[float, float]:
  """Returns the greatest magnitude of scales, and the least that is not 0; 0 and 1 if there is none."""
  bits = _bits(scales)
  kind = bits.dtype.type
  magnitudes = bits & kind(np.iinfo(kind).max >> 1)  # ordered as their floats
  greatest = magnitudes.max(initial=0)
  if not greatest:
    return 0.0, 1.0
  least = (magnitudes - kind(1)).min() + kind(1)  # 0 becomes the greatest
  ends = np.array([greatest, least], kind).view(scales.dtype).astype(np.float32)
  return float(ends[0]), float(ends[1])


def choose_scale_dtype(scales: np.ndarray, num_groups: int, bits: int, has_offsets: bool) -> np.dtype:
  """Returns the dtype in which scales and offsets are kept.

  float16 halves their bytes. It holds scales of float16 and, within its range, of bfloat16 exactly. An offset of 4 bits
  rounds by at most 1/512 of a step. The offset of a zero point of 8 bits would round by 1/32, and one scale an output
  takes no memory, so these are float32.
  """
  if num_groups == 1 or bits == 8 and has_offsets:
    return np.dtype(np.float32)
  greatest, least = _magnitudes(scales)
  largest = greatest * (1 << bits - 1 if has_offsets else 1)
  fits = largest <= float(_HALF.max) and (scales.dtype == np.float16 or least >= float(_HALF.smallest_normal))
  return np.dtype(np.float16 if fits else np.float32)


def zero_offsets(scales: np.ndarray, zeros: np.ndarray, bits: int) -> np.ndarray:
  """Returns the f32 offsets of zero points. Args: zeros: codes of weight 0, of the shape of `scales`."""
  return scales.astype(np.float32) * ((1 << bits - 1) - zeros.astype(np.int32)).astype(np.float32)


def words_of(tensor: StoredTensor) -> np.ndarray:
  """Returns a map of a tensor of int32 as uint32, which GroupedWeight takes as words of codes of 4 bits."""
  return np.asarray(tensor.map()).view(np.uint32)


def bytes_of(tensor: StoredTensor) -> np.ndarray:
  """Returns a map of a tensor of integers [..., K] as uint8 [..., K * itemsize], the lowest byte first."""
  values = tensor.map()
  return values.view(np.uint8).reshape(*values.shape[:-1], values.shape[-1] * values.dtype.itemsize)


def refuse_format(file: pathlib.Path, value: str, supported: str) -> NoReturn:
  raise CheckpointError(
    f"{file}: quantization_config: {value} is not supported; supported is {supported}: use another checkpoint of the "
    "model, or its plain weights with --quantization"
  )


def read_int(file: pathlib.Path, config: dict, key: str, default: int | None = None) -> int:
  """Returns an integer of quantization_config. Raises CheckpointError if it is missing or of another type."""
  value = config.get(key, default)
  if type(value) is not int or abs(value) > 2**31:
    raise CheckpointError(f"{file}: quantization_config: {key}={value!r:.80} must be an integer; correct the file")
  return value


def resolve_group(file: pathlib.Path, size: int, layer: LayerTensors) -> int:
  """Returns the inputs that share a scale. Args: size: of a group; -1: all inputs."""
  group = layer.shape[1] if size == -1 else size
  if group < 1:
    raise CheckpointError(f"{file}: quantization_config: group_size={size} must be -1 or at least 1; correct the file")
  layer.check_multiple(file, 1, group, "group_size")
  return group
