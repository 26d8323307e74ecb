"""Defines the parameters of an LLM's generations. Checks no value: the server's validation does.

Light to import: neither JAX nor gRPC.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
from typing import Any

from engine.errors import InvalidRequest

_CONSTRAINTS = ("json_schema", "json_object", "regex", "choice", "grammar")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
  """Parameters with the names, meanings and limits of sluice.v1 (server/proto/sluice.proto) and the Python client.

  None leaves a field out. It then has the default of the model's generation_config.json, or else Sluice's own.

  Attributes:
    max_tokens: most tokens to generate; by default 256, or the rest of the model's length if that is less.
    temperature: 0 is greedy; 1 by default.
    top_k, top_p, min_p: limits on the candidate tokens.
    presence_penalty, frequency_penalty, repetition_penalty: penalties on repeated tokens.
    seed: makes sampling repeatable.
    n: outputs for each prompt, 1 to 16.
    logit_bias: token id -> value from -100 to 100, added to the logits.
    allowed_token_ids: only these may be sampled.
    min_tokens: fewest tokens before the output may end.
    stop: a stop string or up to 16; the output ends before the first match.
    stop_token_ids: tokens that end the output and are not part of it.
    ignore_eos: whether end-of-sequence tokens are ordinary tokens.
    logprobs, prompt_logprobs: return the log probabilities of each token and of this many (0 to 20) most likely ones.
    skip_special_tokens: whether to leave special tokens out of the text; true by default.
    json_schema, json_object, regex, choice, grammar: the output's constraint; at most one of them. A schema is a
      mapping or its JSON text.
  """

  max_tokens: int | None = None
  temperature: float | None = None
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  presence_penalty: float | None = None
  frequency_penalty: float | None = None
  repetition_penalty: float | None = None
  seed: int | None = None
  n: int | None = None
  logit_bias: Mapping[int, float] | None = None
  allowed_token_ids: Sequence[int] | None = None
  min_tokens: int | None = None
  stop: str | Sequence[str] | None = None
  stop_token_ids: Sequence[int] | None = None
  ignore_eos: bool | None = None
  logprobs: int | None = None
  prompt_logprobs: int | None = None
  skip_special_tokens: bool | None = None
  json_schema: str | Mapping[str, Any] | None = None
  json_object: bool | None = None
  regex: str | None = None
  choice: Sequence[str] | None = None
  grammar: str | None = None

  def __post_init__(self) -> None:
    """Raises InvalidRequest if two constraints are set."""
    constraints = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
    if len(constraints) > 1:
      raise InvalidRequest(
        f"is given together with {constraints[0]}, and an output follows one constraint; leave one of them out",
        field=constraints[1],
      )

  def options(self) -> dict[str, Any]:
    """Returns the fields that are set, by their names in the Python client's Options."""
    values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    values = {name: value for name, value in values.items() if value is not None}
    if isinstance(values.get("stop"), str):
      values["stop"] = [values["stop"]]
    if isinstance(values.get("json_schema"), Mapping):
      values["json_schema"] = json.dumps(values["json_schema"])
    return values
