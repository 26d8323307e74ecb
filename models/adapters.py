"""Low-rank adapters of a decoder's linear layers: their shapes, their arrays and their place in a forward pass.

An adapter adds `B A x` to a layer's product (LoRA, arXiv:2106.09685). The arrays hold several adapters, each in a slot,
and every token names its slot. A layer that fuses several matrices of a checkpoint has a part for each of them.
"""

from collections.abc import Mapping
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from models.config import LayerAttention, ModelConfig
from models.split import ModelSplit
from pallas_kernels.low_rank.api import add_low_rank


@dataclasses.dataclass(frozen=True)
class AdapterSpec:
  """The shape of one layer's adapters.

  Attributes:
    inputs: numbers of one input.
    runs: for each part, the length of its run of outputs.
    repeats: how often the runs follow each other.
    splits_inputs: devices that share the layer have a share of its inputs each; else of its outputs.
  """

  inputs: int
  runs: tuple[int, ...]
  repeats: int = 1
  splits_inputs: bool = False

  @property
  def outputs(self) -> int:
    return sum(self.runs) * self.repeats

  def shapes(self, num_slots: int, rank: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Returns the shapes of A [slots, inputs, parts * rank] and B [slots, rank, outputs]."""
    return (num_slots, self.inputs, len(self.runs) * rank), (num_slots, rank, self.outputs)

  @property
  def axes(self) -> tuple[tuple[str | None, ...], tuple[str | None, ...]]:
    """The logical names of the dimensions of A and B without their slots."""
    return ("share", None) if self.splits_inputs else (None, None), (None, None if self.splits_inputs else "share")


def adapter_specs(config: ModelConfig, declared: LayerAttention) -> dict[str, AdapterSpec]:
  """Returns the layers of a Block that take adapters, by stored name within it."""
  d, f, h = config.model_dim, config.hidden_dim, declared.head_dim
  return {
    "attention.qkv": AdapterSpec(d, (declared.group_size * h, h, h), declared.num_kv_heads),
    "attention.out": AdapterSpec(declared.num_heads * h, (d,), splits_inputs=True),
    "mlp.gate_up": AdapterSpec(d, (f, f)),
    "mlp.down": AdapterSpec(f, (d,), splits_inputs=True),
  }


def spread_adapter(
  split: ModelSplit, layer: int, name: str, a: np.ndarray, b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the shares of all devices together of A [inputs, parts * R] and B [R, outputs], one after the other."""
  if split.num_devices == 1:
    return a, b
  declared, stored, last = split.model.layers[layer], f"layers.{layer}.{name}", (a.shape[1],)
  k, g, h = declared.num_kv_heads, declared.group_size, declared.head_dim
  match name:
    case "attention.qkv":
      b = split.spread(stored, b.reshape(-1, k, g + 2, h), (None, "kv_heads", None, None)).reshape(len(b), -1)
    case "attention.out":
      a = split.spread(stored, a.reshape(k, g, h, *last), ("kv_heads", None, None, None)).reshape(-1, *last)
    case "mlp.gate_up":
      b = split.spread(stored, b.reshape(len(b), 2, -1), (None, None, "mlp"))
      b = b.reshape(len(b), 2, split.num_devices, -1).transpose(0, 2, 1, 3).reshape(len(b), -1)
    case _:
      a = split.spread(stored, a, ("mlp", None))
  return a, b


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearAdapter:
  """The adapters of one linear layer, and each token's slot: A [S, D, parts * R], B [S, R, N], slots int32[T]."""

  a: jax.Array
  b: jax.Array
  slots: jax.Array
  spec: AdapterSpec = dataclasses.field(metadata={"static": True})
  implementation: str = dataclasses.field(metadata={"static": True})

  @property
  def prepares_inputs(self) -> bool:
    """Whether `add_to` takes a norm or gates."""
    return self.implementation == "cpu"

  def add_to(
    self, y: jax.Array, x: jax.Array, norm: tuple[jax.Array, float] | None = None, gated: bool = False
  ) -> jax.Array:
    """Returns y [T, ...] plus the adapters' outputs for x [T, ...]; norm, gated: as in pallas_kernels.low_rank.api."""
    tokens = self.slots.shape[0]
    sums = add_low_rank(
      y.reshape(tokens, self.spec.outputs),
      x.reshape(tokens, self.spec.inputs * (2 if gated else 1)),
      self.slots,
      self.a,
      self.b,
      self.spec.runs,
      self.spec.repeats,
      self.implementation,
      norm,
      gated,
    )
    return sums.reshape(y.shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerAdapters:
  """The adapters of one Block: (A, B) by name in `specs`, and slots int32[T]."""

  arrays: dict[str, tuple[jax.Array, jax.Array]]
  slots: jax.Array
  specs: tuple[tuple[str, AdapterSpec], ...] = dataclasses.field(metadata={"static": True})
  implementation: str = dataclasses.field(metadata={"static": True})

  def of_linear(self, name: str) -> LinearAdapter:
    """Returns the adapters of a linear layer by its name in the Block."""
    return LinearAdapter(*self.arrays[name], self.slots, dict(self.specs)[name], self.implementation)

  def of_tokens(self, tokens: jax.Array) -> "LayerAdapters":
    """Returns the adapters for some of the tokens, by index."""
    return dataclasses.replace(self, slots=self.slots[tokens])


def declare_adapters(
  config: ModelConfig, num_slots: int, rank: int, dtype: jnp.dtype
) -> tuple[dict[str, tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]], ...]:
  """Returns the abstract arrays of every layer, for `layer_adapters`; config: of one device's share."""

  def declare(spec: AdapterSpec) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    a, b = spec.shapes(num_slots, rank)
    return jax.ShapeDtypeStruct(a, dtype), jax.ShapeDtypeStruct(b, dtype)

  return tuple(
    {name: declare(spec) for name, spec in adapter_specs(config, declared).items()} for declared in config.layers
  )


def layer_adapters(
  config: ModelConfig,
  arrays: tuple[Mapping[str, tuple[jax.Array, jax.Array]], ...],
  slots: jax.Array,
  implementation: str,
) -> tuple[LayerAdapters, ...]:
  """Returns the argument of Decoder.hidden.

  Args:
    arrays: as in `declare_adapters`.
    slots: int32[T].
    implementation: of pallas_kernels.low_rank.api.
  """
  return tuple(
    LayerAdapters(dict(of_layer), slots, tuple(adapter_specs(config, declared).items()), implementation)
    for declared, of_layer in zip(config.layers, arrays, strict=True)
  )
