"""Rejects requests that the engine can never serve, before it queues them. May not know scheduler or load."""

from engine.config import EngineConfig
from engine.errors import InvalidRequest, RequestTooLong
from engine.request import Request
from engine.settings import SPECULATION


def check_generates(config: EngineConfig) -> None:
  """Raises InvalidRequest if the model has no head of tokens. Names what it serves."""
  if not config.headless:
    return
  if not config.labels:
    served = "embeddings: send texts to /v1/embeddings, /v1/score, /v1/rerank or Embed of gRPC"
  elif len(config.labels) == 1:
    served = "scores: send texts to /v1/score, /v1/rerank, /classify or Classify of gRPC"
  else:
    served = "classes: send texts to /classify or Classify of gRPC"
  raise InvalidRequest(
    f"generates no text, since {config.headless} has no head of tokens; it serves {served}", field="model"
  )


def allowed_speculation(config: EngineConfig) -> tuple[str, ...]:
  """Returns the values of `speculation` that a request may have."""
  if config.speculation != "auto":
    return tuple(dict.fromkeys(("none", config.speculation)))
  return tuple(value for value in SPECULATION if value != "draft" or config.has_draft_model)


def validate_request(config: EngineConfig, request: Request) -> None:
  """Rejects a request that the engine can never serve, before any allocation. Safe on any thread.

  RequestTooLong has the words "maximum context length is N tokens", by which clients decide to shorten a chat.

  Raises:
    InvalidRequest: the prompt is empty or has ids outside the vocabulary, or sampling values are invalid or contradict
      each other.
    RequestTooLong: prompt and max_tokens together exceed the model's length or the whole KV pool.
  """
  prompt = request.prompt_token_ids
  if len(prompt) < 1:
    raise InvalidRequest("is empty; send at least one token", field="prompt")
  request.params.validate(config.vocab_size)
  if not request.params.embed:
    check_generates(config)
  elif not config.enable_embeddings:
    raise InvalidRequest("is not served here; serve with --enable_embeddings", field="embed")
  if request.constraint is not None and request.params.allowed_token_ids is not None:
    raise InvalidRequest(
      "is not allowed together with an output constraint, which might then allow no token at all: remove one of them",
      field="allowed_token_ids",
    )
  allowed = allowed_speculation(config)
  if request.speculation not in ("", *allowed):
    raise InvalidRequest(
      f"={request.speculation!r:.40} is not served here: send one of {', '.join(allowed)}, or serve with another "
      "--speculation",
      field="speculation",
    )
  total = len(prompt) + request.params.max_tokens
  if total > config.max_model_len:
    raise RequestTooLong(
      f"of {len(prompt)} tokens plus max_tokens={request.params.max_tokens} is {total}, but "
      f"the maximum context length is {config.max_model_len} tokens; shorten the prompt or lower max_tokens",
      field="prompt",
    )
  if total > config.pool_tokens:
    raise RequestTooLong(
      f"of {len(prompt)} tokens plus max_tokens={request.params.max_tokens} is {total}, but "
      f"the maximum context length is {config.pool_tokens} tokens, which the KV pool holds; lower max_tokens or serve "
      "with a larger pool (--kv_cache_mb, --num_blocks)",
      field="prompt",
    )
  if min(prompt) < 0 or max(prompt) >= config.vocab_size:
    bad = next(token for token in prompt if not 0 <= token < config.vocab_size)
    raise InvalidRequest(
      f"token id {bad} is not in the vocabulary; ids of this model are 0 to {config.vocab_size - 1}", field="prompt"
    )
