"""How a model lies on several devices, each of which computes a smaller decoder. May not hold or place arrays.

Every device has the same share of the heads, of the MLP's hidden dimension and of the vocabulary. A device with whole
layers would wait for its neighbors; with shares, two sums over the devices complete a layer (Megatron-LM,
arXiv:1909.08053).

- Fewer KV heads than devices: each KV head is on several devices, and its query heads are divided among them.
- Sizes that do not divide are padded. Padding is exact: padded heads and hidden numbers meet rows of zeros, and the
  sampler never chooses padded tokens.
"""

from collections.abc import Iterator, Sequence
import dataclasses
from functools import cached_property

import numpy as np

from models.config import LayerAttention, ModelConfig
from models.layers import SPLIT_AXES

# A share of the vocabulary is a multiple of this: an output constraint's mask has 32 tokens a word.
VOCAB_MULTIPLE = 32

Box = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class HeadSplit:
  """The heads of one layer on several devices.

  Attributes:
    repeats: devices that have each KV head.
    num_kv_heads: KV heads of a device.
    group_size: query heads of a device that share a KV head.
  """

  repeats: int
  num_kv_heads: int
  group_size: int

  @classmethod
  def of_layer(cls, declared: LayerAttention | ModelConfig, num_devices: int) -> "HeadSplit":
    """Returns the split with the fewest padded heads for which all devices have equal shares."""
    repeats = max(1, num_devices // declared.num_kv_heads)
    return cls(
      repeats=repeats,
      num_kv_heads=-(-declared.num_kv_heads * repeats // num_devices),
      group_size=-(-declared.group_size // repeats),
    )


@dataclasses.dataclass(frozen=True)
class ModelSplit:
  """A model on `num_devices` devices.

  Attributes:
    model: as in the checkpoint.
    num_devices: devices that share each layer; 1: the share is the model.
  """

  model: ModelConfig
  num_devices: int = 1

  @cached_property
  def share(self) -> ModelConfig:
    """The decoder of one device."""
    return self._sized(1)

  @cached_property
  def padded(self) -> ModelConfig:
    """The shares of all devices together."""
    return self._sized(self.num_devices)

  @property
  def is_exact(self) -> bool:
    """Whether nothing is padded or repeated: the shares together are the model."""
    return self.padded == self.model

  def _sized(self, shares: int) -> ModelConfig:
    model, devices = self.model, self.num_devices
    if devices == 1:
      return model

    def heads(declared: LayerAttention | ModelConfig) -> dict[str, int]:
      split = HeadSplit.of_layer(declared, devices)
      kv_heads = split.num_kv_heads * shares
      return {"num_kv_heads": kv_heads, "num_heads": kv_heads * split.group_size}

    vocab = -(-model.vocab_size // (devices * VOCAB_MULTIPLE)) * VOCAB_MULTIPLE
    return dataclasses.replace(
      model,
      vocab_size=vocab * shares,
      hidden_dim=-(-model.hidden_dim // devices) * shares,
      layer_attention=tuple(dataclasses.replace(layer, **heads(layer)) for layer in model.layer_attention),
      **heads(model),
    )

  def boxes(self, name: str, shape: Sequence[int], axes: Sequence[str | None]) -> Iterator[tuple[Box, Box]]:
    """Yields where a parameter's parts lie among the shares, and where in the model. The rest is zeros.

    Args:
      name: stored name, such as `layers.0.attention.qkv`.
      shape: shape in the model, of the plain form.
      axes: logical name of each dimension.
    """
    whole = tuple(slice(0, size) for size in shape)
    if "kv_heads" not in axes:
      yield whole, whole
      return
    declared = self.model.layers[int(name.split(".")[1])]
    split = HeadSplit.of_layer(declared, self.num_devices)
    if split.repeats == 1:
      yield whole, whole
      return
    axis, group = axes.index("kv_heads"), declared.group_size
    has_key_and_value = shape[axis + 1] > group

    def box(head: int, start: int, stop: int) -> Box:
      return (*whole[:axis], slice(head, head + 1), slice(start, stop), *whole[axis + 2 :])

    for place in range(declared.num_kv_heads * split.repeats):
      head, part = divmod(place, split.repeats)
      start = part * split.group_size
      stop = min(group, start + split.group_size)
      if start < stop:
        yield box(place, 0, stop - start), box(head, start, stop)
      if has_key_and_value:
        yield box(place, split.group_size, split.group_size + 2), box(head, group, group + 2)

  def spread(self, name: str, values: np.ndarray, axes: Sequence[str | None]) -> np.ndarray:
    """Returns an array of the model, with the axes of a parameter, as the shares of all devices together.

    Args:
      name: stored name of the parameter.
      values: the array.
      axes: logical name of each dimension. A dimension after `kv_heads` holds query heads, or these with key and value.
    """
    shape = list(values.shape)
    if "mlp" in axes:
      shape[axes.index("mlp")] = self.padded.hidden_dim
    if "kv_heads" in axes:
      axis, layer = axes.index("kv_heads"), int(name.split(".")[1])
      more = shape[axis + 1] - self.model.layers[layer].group_size
      shape[axis : axis + 2] = self.padded.layers[layer].num_kv_heads, self.share.layers[layer].group_size + more
    out = np.zeros(shape, values.dtype)
    for place, source in self.boxes(name, values.shape, axes):
      out[place] = values[source]
    return out


def spread_shape(shape: Sequence[int], axes: Sequence[str | None], num_devices: int) -> tuple[int, ...]:
  """Returns the shape of all shares together of a parameter, from the shape of one."""
  return tuple(size * (num_devices if axis in SPLIT_AXES else 1) for size, axis in zip(shape, axes, strict=True))
