"""Reads the head of a sequence classification model from config.json. May not open files or import jax."""

from collections.abc import Mapping
from typing import Any

from models.config import ClassActivation, ClassHead, ModelConfig
from models.families.common import read
from models.families.keys import UnsupportedModel

_MOST_LABELS = 2**16
_DEFAULT_NUM_LABELS = 2  # of transformers, which leaves it out of the file
_PROBLEM_TYPES: dict[str, ClassActivation] = {
  "regression": "none",
  "single_label_classification": "softmax",
  "multi_label_classification": "sigmoid",
}
# By family, for a file without the key; in other families there is none then.
_PAD_TOKEN_IDS = {"gemma2": 0, "gemma3_text": 0}
# Of sentence-transformers' CrossEncoder.
_PAIR_ACTIVATIONS: dict[str, ClassActivation] = {
  "torch.nn.modules.activation.Sigmoid": "sigmoid",
  "torch.nn.modules.linear.Identity": "none",
}


def read_class_head(raw: Mapping[str, Any], config: ModelConfig) -> ClassHead:
  """Reads labels and activations. As in vLLM, probabilities come from softmax (one class: sigmoid) by default.

  Raises:
    UnsupportedModel: a key is broken, or Sluice does not have the activation.
  """
  labels = _read_labels(raw)
  problem = read(raw, "problem_type", str, None)
  if problem is not None and problem not in _PROBLEM_TYPES:
    raise UnsupportedModel(f"problem_type={problem!r:.80} is not supported; supported are {', '.join(_PROBLEM_TYPES)}")
  activation = _PROBLEM_TYPES.get(problem or "", "softmax")
  if activation == "softmax" and len(labels) == 1:
    activation = "sigmoid"
  pad = raw.get("pad_token_id", _PAD_TOKEN_IDS.get(config.family))
  if pad is None:
    pad = -1
  elif type(pad) is not int or not -1 <= pad < config.vocab_size:
    raise UnsupportedModel(f"pad_token_id={pad!r:.80} must be a token id from 0 to {config.vocab_size - 1}, or null")
  return ClassHead(labels, activation, _read_pair_activation(raw), pad)


def _read_labels(raw: Mapping[str, Any]) -> tuple[str, ...]:
  given, number = raw.get("id2label"), read(raw, "num_labels", int, None)
  if given is None:
    number = _DEFAULT_NUM_LABELS if number is None else number
    if not 1 <= number <= _MOST_LABELS:
      raise UnsupportedModel(f"num_labels={number} is not supported; supported are 1 to {_MOST_LABELS}")
    return tuple(f"LABEL_{index}" for index in range(number))
  if not isinstance(given, Mapping) or not 1 <= len(given) <= _MOST_LABELS:
    raise UnsupportedModel(f"id2label={given!r:.200} must be an object with 1 to {_MOST_LABELS} labels")
  names = [given.get(str(index)) for index in range(len(given))]
  if not all(isinstance(name, str) for name in names):
    raise UnsupportedModel(f"id2label={given!r:.200} must map the keys 0 to {len(given) - 1} to texts")
  if number not in (None, len(given)):
    raise UnsupportedModel(f"num_labels={number} and the {len(given)} entries of id2label contradict each other")
  return tuple(map(str, names))


def _read_pair_activation(raw: Mapping[str, Any]) -> ClassActivation:
  inner = raw.get("sentence_transformers")
  if inner is not None and not isinstance(inner, Mapping):
    raise UnsupportedModel(f"sentence_transformers={inner!r:.80} must be an object")
  key, name = "sentence_transformers.activation_fn", (inner or {}).get("activation_fn")
  if name is None:
    key = "sbert_ce_default_activation_function"
    name = read(raw, key, str, None)
  if name is None:
    return "sigmoid"
  if name not in _PAIR_ACTIVATIONS:
    raise UnsupportedModel(f"{key}={name!r:.80} is not supported; supported are {', '.join(_PAIR_ACTIVATIONS)}")
  return _PAIR_ACTIVATIONS[name]
