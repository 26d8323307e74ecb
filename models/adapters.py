"""Low-rank adapters of a decoder's linear layers: their shapes, their arrays and their place in a forward pass.

An adapter adds `B A x` to a layer's product (LoRA, arXiv:2106.09685). The arrays hold several adapters, each in a slot,
and every token names its slot. A layer that fuses several matrices of a checkpoint has a part for each of them.
"""

from collections.abc import Mapping
import dataclasses

import jax
import jax.numpy as jnp

from models.config import LayerAttention, ModelConfig
from pallas_kernels.low_rank.api import add_low_rank


@dataclasses.dataclass(frozen=True)
class AdapterSpec:
  """The shape of one layer's adapters.

  Attributes:
    inputs: numbers of one input.
    runs: for each part, the length of its run of outputs.
    repeats: how often the runs follow each other.
  """

  inputs: int
  runs: tuple[int, ...]
  repeats: int = 1

  @property
  def outputs(self) -> int:
    return sum(self.runs) * self.repeats

  def shapes(self, num_slots: int, rank: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Returns the shapes of A [slots, inputs, parts * rank] and B [slots, rank, outputs]."""
    return (num_slots, self.inputs, len(self.runs) * rank), (num_slots, rank, self.outputs)


def adapter_specs(config: ModelConfig, declared: LayerAttention) -> dict[str, AdapterSpec]:
  """Returns the layers of a Block that take adapters, by stored name within it."""
  d, f, h = config.model_dim, config.hidden_dim, declared.head_dim
  return {
    "attention.qkv": AdapterSpec(d, (declared.group_size * h, h, h), declared.num_kv_heads),
    "attention.out": AdapterSpec(declared.num_heads * h, (d,)),
    "mlp.gate_up": AdapterSpec(d, (f, f)),
    "mlp.down": AdapterSpec(f, (d,)),
  }


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
  """Returns the abstract arrays of every layer, for `layer_adapters`."""

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
