"""The registry of model families: config reader, tensor map and decoder of each. May not open files.

To add a family, write a module in models/families, and add a line to FAMILIES and a case to tools/parity/cases.py. A
family with Llama's shape and tensor names needs no `tensors`; a family with another block names its own decoder.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from flax import nnx
import jax.numpy as jnp

from models.config import ModelConfig
from models.decoder import Decoder
from models.families import gemma, granite, llama, mistral, qwen2, qwen3
from models.families.keys import UnsupportedModel
from models.families.tensor_map import TensorMap, llama_tensors
from models.linear import PLAIN, WeightForm


@dataclasses.dataclass(frozen=True)
class Family:
  """An entry of the registry.

  Attributes:
    architecture: config.json's `architectures` entry.
    read_config: reads a parsed config.json. Raises UnsupportedModel.
    tensors: returns the checkpoint tensors of every parameter, by dotted path in the decoder.
    decoder: a class with the constructor Decoder(config, dtype, form).
  """

  architecture: str
  read_config: Callable[[Mapping[str, Any]], ModelConfig]
  tensors: Callable[[ModelConfig], TensorMap] = llama_tensors
  decoder: type[Decoder] = Decoder


# Ends of architectures whose head is not one of tokens.
_HEADS = ("ForSequenceClassification", "ForTokenClassification", "RewardModel")
# Keyed by config.json's `model_type`, which is also ModelConfig.family.
FAMILIES: dict[str, Family] = {
  "llama": Family("LlamaForCausalLM", llama.read_config),
  "mistral": Family("MistralForCausalLM", mistral.read_config),
  "ministral": Family("MinistralForCausalLM", mistral.read_ministral),
  "qwen2": Family("Qwen2ForCausalLM", qwen2.read_config),
  "qwen3": Family("Qwen3ForCausalLM", qwen3.read_config),
  "granite": Family("GraniteForCausalLM", granite.read_config),
  "gemma2": Family("Gemma2ForCausalLM", gemma.read_gemma2, gemma.gemma_tensors),
  "gemma3_text": Family("Gemma3ForCausalLM", gemma.read_gemma3, gemma.gemma_tensors),
}


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
  """Reads a parsed config.json.

  Raises:
    UnsupportedModel: Sluice does not compute this model; the text has the key and the supported values.
    ValueError: the sizes contradict each other.
  """
  return FAMILIES[_family_of(raw)].read_config(raw)


def tensors(config: ModelConfig) -> TensorMap:
  """Returns the checkpoint tensors of every parameter, by dotted path in the decoder."""
  return FAMILIES[config.family].tensors(config)


def abstract(config: ModelConfig, dtype: jnp.dtype, form: WeightForm = PLAIN) -> tuple[nnx.GraphDef, nnx.State]:
  """Returns the model without arrays: a static graph and a tree of ShapeDtypeStructs with logical axes."""
  decoder = FAMILIES[config.family].decoder
  return nnx.split(nnx.eval_shape(lambda: decoder(config, dtype, form)))


def _family_of(raw: Mapping[str, Any]) -> str:
  """Finds the family by `architectures`, `model_type`, or both, which must agree."""
  names, kind = raw.get("architectures"), raw.get("model_type")
  if names:
    found = [key for key, family in FAMILIES.items() if names == [family.architecture]]
  else:
    found = [key for key in FAMILIES if key == kind]
  if not found:
    given = f"architectures={names!r:.200}" if names else f"model_type={kind!r:.80} without architectures"
    supported = ", ".join(family.architecture for family in FAMILIES.values())
    if any(str(name).endswith(_HEADS) for name in (names if isinstance(names, list) else ())):
      raise UnsupportedModel(
        f"{given} is not supported: its head gives scores of classes, and Sluice serves heads of tokens; serve a model "
        f"with one of {supported}, whose embeddings --enable_embeddings scores and ranks"
      )
    raise UnsupportedModel(f"{given} is not supported; supported are {supported}")
  if kind is not None and kind != found[0]:
    raise UnsupportedModel(
      f"architectures={names!r:.200} and model_type={kind!r:.80} contradict each other; with these architectures "
      f"model_type is {found[0]!r}: correct the one that is wrong"
    )
  return found[0]


def refuse_uncomputed(config: ModelConfig) -> None:
  """Raises UnsupportedModel if a config declares attention that no decoder computes."""
  for attention in config.groups:
    for name, value, supported in (
      ("num_heads", attention.num_heads, config.num_heads),
      ("num_kv_heads", attention.num_kv_heads, config.num_kv_heads),
      ("head_dim", attention.head_dim, config.head_dim),
      ("rotary_dim", attention.rotary_dim, attention.head_dim),
      ("has_sinks", attention.has_sinks, False),
    ):
      if value != supported:
        raise UnsupportedModel(f"{config.family}: attention {name}={value} is not supported; supported is {supported}")
