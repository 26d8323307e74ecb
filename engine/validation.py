"""Requests that can never be served are refused here, before they are queued. Knows settings; no scheduler, no load."""

from engine.config import EngineConfig
from engine.errors import InvalidRequest, RequestTooLong
from engine.request import Request


def validate_request(config: EngineConfig, request: Request) -> None:
  """Refuses what can never be served, before anything is allocated. Safe on any thread.

  Raises:
    InvalidRequest: a prompt that is empty or holds ids outside the vocabulary, sampling values out of range, or values
      that contradict each other.
    RequestTooLong: prompt and max_tokens together exceed the model's length or the whole KV pool.
  """
  prompt = request.prompt_token_ids
  if len(prompt) < 1:
    raise InvalidRequest("the prompt is empty; send at least one token")
  request.params.validate(config.vocab_size)
  if request.constraint is not None and request.params.allowed_token_ids is not None:
    raise InvalidRequest(
      "allowed_token_ids is not allowed together with an output constraint, which might then allow no token at all: "
      "leave one of them out"
    )
  total = len(prompt) + request.params.max_tokens
  if total > config.max_model_len:
    raise RequestTooLong(
      f"prompt of {len(prompt)} tokens plus max_tokens={request.params.max_tokens} is {total}, but "
      f"the model takes {config.max_model_len}; shorten the prompt or lower max_tokens"
    )
  if total > config.pool_tokens:
    raise RequestTooLong(
      f"prompt of {len(prompt)} tokens plus max_tokens={request.params.max_tokens} is {total}, but "
      f"the KV pool holds {config.pool_tokens}; lower max_tokens or serve with a larger pool"
    )
  if min(prompt) < 0 or max(prompt) >= config.vocab_size:
    bad = next(token for token in prompt if not 0 <= token < config.vocab_size)
    raise InvalidRequest(
      f"prompt token id {bad} is not in the vocabulary; ids of this model are 0 to {config.vocab_size - 1}"
    )
