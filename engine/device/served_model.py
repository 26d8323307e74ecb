"""What a draft model or an EAGLE-3 head must fit. May not read files."""

import dataclasses

import jax.numpy as jnp
from jax.sharding import Mesh

from models.config import ModelConfig
from models.weight_form import WeightForm


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
  """A model that is served, before its weights are read.

  Attributes:
    folder: the user's name of it.
    config: of the decoder.
    mesh, dtype, form, random_weights: as in engine.device.weights.open_checkpoint.
    kv_dtype, block_size: of its KV.
    attention: name of its implementation (pallas_kernels.paged_attention.api).
  """

  folder: str
  config: ModelConfig
  mesh: Mesh
  dtype: jnp.dtype
  form: WeightForm
  kv_dtype: jnp.dtype
  block_size: int
  attention: str
  random_weights: bool = False
