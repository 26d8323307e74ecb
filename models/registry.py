"""The registry of model families: config reader, tensor map and decoder of each. May not open files.

To add a family, write a module in models/families, and add a line to FAMILIES and cases to tools/parity/cases.py. A
family with Llama's shape and tensor names needs no `tensors`; a family with another block names its own decoder.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from models.config import ModelConfig
from models.decoder import Decoder
from models.families import gemma, granite, llama, mistral, qwen2, qwen3
from models.families.class_head import read_class_head
from models.families.keys import UnsupportedModel
from models.families.tensor_map import TensorMap, llama_tensors
from models.weight_form import PLAIN, WeightForm


@dataclasses.dataclass(frozen=True)
class Family:
  """An entry of the registry.

  Attributes:
    architecture: config.json's `architectures` entry.
    backbone: the entry of a checkpoint without a head, which gives hidden states alone.
    classifier: the entry of one with a head of classes; "": transformers has none.
    read_config: reads a parsed config.json. Raises UnsupportedModel.
    tensors: returns the checkpoint tensors of every parameter, by dotted path in the decoder.
    decoder: a class with the constructor Decoder(config, dtype, form).
  """

  architecture: str
  backbone: str
  classifier: str
  read_config: Callable[[Mapping[str, Any]], ModelConfig]
  tensors: Callable[[ModelConfig], TensorMap] = llama_tensors
  decoder: type[Decoder] = Decoder


# Ends of architectures whose head is not one of tokens.
_HEADS = ("ForSequenceClassification", "ForTokenClassification", "RewardModel")
# Keyed by config.json's `model_type`, which is also ModelConfig.family.
FAMILIES: dict[str, Family] = {
  "llama": Family("LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification", llama.read_config),
  "mistral": Family("MistralForCausalLM", "MistralModel", "MistralForSequenceClassification", mistral.read_config),
  "ministral": Family(
    "MinistralForCausalLM", "MinistralModel", "MinistralForSequenceClassification", mistral.read_ministral
  ),
  "qwen2": Family("Qwen2ForCausalLM", "Qwen2Model", "Qwen2ForSequenceClassification", qwen2.read_config),
  "qwen3": Family("Qwen3ForCausalLM", "Qwen3Model", "Qwen3ForSequenceClassification", qwen3.read_config),
  "granite": Family("GraniteForCausalLM", "GraniteModel", "", granite.read_config),
  "gemma2": Family(
    "Gemma2ForCausalLM", "Gemma2Model", "Gemma2ForSequenceClassification", gemma.read_gemma2, gemma.gemma_tensors
  ),
  "gemma3_text": Family(
    "Gemma3ForCausalLM",
    "Gemma3TextModel",
    "Gemma3TextForSequenceClassification",
    gemma.read_gemma3,
    gemma.gemma_tensors,
  ),
}


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
  """Reads a parsed config.json.

  Raises:
    UnsupportedModel: Sluice does not compute this model; the text has the key and the supported values.
    ValueError: the sizes contradict each other.
  """
  name, family = _family_of(raw)
  config = family.read_config(raw)
  if name == family.classifier:
    return dataclasses.replace(config, has_token_head=False, class_head=read_class_head(raw, config))
  return config if name == family.architecture else dataclasses.replace(config, has_token_head=False)


def architecture_of(config: ModelConfig) -> str:
  """Returns the `architectures` entry of a model of this configuration."""
  family = FAMILIES[config.family]
  if config.has_token_head:
    return family.architecture
  return family.backbone if config.class_head is None else family.classifier


def tensors(config: ModelConfig) -> TensorMap:
  """Returns the checkpoint tensors of every parameter, by dotted path in the decoder."""
  return FAMILIES[config.family].tensors(config)


def abstract(config: ModelConfig, dtype: jnp.dtype, form: WeightForm = PLAIN) -> tuple[nnx.GraphDef, nnx.State]:
  """Returns the model without arrays: a static graph and a tree of ShapeDtypeStructs with logical axes."""
  graphdef, state = _declare_decoder(FAMILIES[config.family].decoder, config, jnp.dtype(dtype), form)
  return graphdef, jax.tree.map(lambda leaf: leaf, state)  # a tree of its own, which the caller may change


@functools.lru_cache(maxsize=8)  # opening a checkpoint declares the same decoder up to four times
def _declare_decoder(
  decoder: type[Decoder], config: ModelConfig, dtype: jnp.dtype, form: WeightForm
) -> tuple[nnx.GraphDef, nnx.State]:
  return nnx.split(nnx.eval_shape(lambda: decoder(config, dtype, form)))


def _family_of(raw: Mapping[str, Any]) -> tuple[str, Family]:
  """Finds the architecture by `architectures`, `model_type`, or both, which must agree."""
  names, kind = raw.get("architectures"), raw.get("model_type")
  if names:
    found = [
      (key, name)
      for key, family in FAMILIES.items()
      for name in (family.architecture, family.backbone, family.classifier)
      if name and names == [name]
    ]
  else:
    found = [(key, family.architecture) for key, family in FAMILIES.items() if key == kind]
  if not found:
    given = f"architectures={names!r:.200}" if names else f"model_type={kind!r:.80} without architectures"
    if any(str(name).endswith(_HEADS) for name in (names if isinstance(names, list) else ())):
      supported = ", ".join(family.classifier for family in FAMILIES.values() if family.classifier)
      raise UnsupportedModel(f"{given} is not supported; supported heads of classes are {supported}")
    supported = ", ".join(family.architecture for family in FAMILIES.values())
    raise UnsupportedModel(f"{given} is not supported; supported are {supported}")
  ((key, name),) = found
  if kind is not None and kind != key:
    raise UnsupportedModel(
      f"architectures={names!r:.200} and model_type={kind!r:.80} contradict each other; with these architectures "
      f"model_type is {key!r}: correct the one that is wrong"
    )
  return name, FAMILIES[key]


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
