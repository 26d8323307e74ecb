"""Computes scores of classes of prompts, for every protocol. Knows no socket and no fields of a request.

An input runs as an embedding does; the engine's head gives a number for each class instead of a hidden state.
"""

from collections.abc import Sequence
import math

from engine.config import EngineConfig
from engine.errors import InvalidRequest
from server.generation.serving_state import Backend


def find_classifier_adapter(name: str | None, backend: Backend) -> str:
  """Returns the adapter that a `model` names, or "". Raises ModelNotFound, or InvalidRequest without a class head."""
  adapter = backend.find_adapter(name)
  check_classifies(backend.config)
  return adapter


def check_classifies(config: EngineConfig) -> None:
  """Raises InvalidRequest if a model has no head of classes."""
  if not config.labels:
    raise InvalidRequest(
      "has no head of classes: serve a checkpoint with one, such as LlamaForSequenceClassification", field="model"
    )


def check_scores_pairs(config: EngineConfig) -> None:
  """Raises InvalidRequest if a model has a head of several classes, which gives no score of a pair."""
  if len(config.labels) > 1:
    raise InvalidRequest(
      f"has a head of {len(config.labels)} classes, and a score needs a head of one: send the texts to /classify",
      field="model",
    )


def make_probabilities(outputs: Sequence[float], activation: str) -> list[float]:
  """Returns the probabilities of classes, in float64.

  Args:
    outputs: the head's numbers.
    activation: softmax, sigmoid, or none for the numbers themselves.
  """
  if activation == "sigmoid":
    return [_sigmoid(output) for output in outputs]
  if activation == "softmax":
    largest = max(outputs)
    powers = [math.exp(output - largest) for output in outputs]
    total = math.fsum(powers)
    return [power / total for power in powers]
  return list(outputs)


def _sigmoid(x: float) -> float:
  """Returns 1 / (1 + e^-x); never overflows."""
  power = math.exp(-abs(x))
  return (1.0 if x >= 0 else power) / (1.0 + power)
