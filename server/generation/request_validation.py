"""Turns a protobuf into a checked call, or refuses it before anything is queued. Knows no gRPC.

The engine itself checks sampling values and token ids (`SamplingParams.validate`, `Engine.submit`). This module checks
what the engine cannot know: names, ids, texts, stop strings and counts of the wire.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import re

from google.protobuf import message as protobuf_message
from google.protobuf import unknown_fields as protobuf_unknown

from engine.config import EngineConfig
from engine.constraint import Constraint
from engine.errors import InvalidRequest
from engine.sampling_params import SamplingParams
from server.errors import ModelNotFound, NoTokenizer
from server.generation.sampling_defaults import SamplingDefaults
from server.proto import sluice_pb2 as pb
from server.text.chat_template import Message
from server.text.tokenizer import Tokenizer

MAX_N = 16
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_ABORTS = 256
MAX_PROMPT_LOGPROB_TOKENS = 8192  # each makes a list of alternatives in the response
DEFAULT_MAX_TOKENS = 256
# The value for no seed, as in vLLM and llama.cpp; every other value is a seed, negative ones too.
NO_SEED = -1
_MAX_SALT_BYTES = 128
_MAX_TENANT_BYTES = 128
# Fields with the same name as in a request have the same meaning.
_ENGINE_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
# Messages in which every field changes the output, so that none may be ignored.
_CHOICES = frozenset(
  message.DESCRIPTOR.full_name
  for message in (
    pb.SamplingParams,
    pb.StopParams,
    pb.OutputConstraint,
    pb.Choices,
    pb.ChatPrompt,
    pb.ChatMessage,
    pb.EmbedRequest,
    pb.EmbedInput,
    pb.ClassifyRequest,
    pb.ClassifyInput,
    pb.TextPair,
  )
)
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationCall:
  """A checked generation.

  Attributes:
    request_id: the client's id, or empty.
    prompt_token_ids: at least one.
    params: one for each of the n outputs; they differ in seed, and only the first returns prompt log probabilities.
    stop_strings: strings that end the text.
    return_text, return_token_ids, skip_special_tokens: what the response holds.
    priority: a lower number goes first.
    queue_timeout_s: the client's limit in seconds, or None.
    cache_salt, tenant: may be empty.
    constraints: one for each of the n outputs, or empty.
    shown_token_ids: special tokens that the text has even under skip_special_tokens.
    adapter: name of the LoRA adapter; empty: the base model alone.
    speculation: which drafts it may get; empty: the server's.
  """

  request_id: str
  prompt_token_ids: tuple[int, ...]
  params: tuple[SamplingParams, ...]
  stop_strings: tuple[str, ...]
  return_text: bool
  return_token_ids: bool
  skip_special_tokens: bool
  priority: int
  queue_timeout_s: float | None
  cache_salt: bytes
  tenant: str
  constraints: tuple[Constraint, ...] = ()
  shown_token_ids: frozenset[int] = frozenset()
  adapter: str = ""
  speculation: str = ""


def unknown_fields(message: protobuf_message.Message) -> list[str]:
  """Returns the message's fields that this server's proto lacks, such as "sluice.v1.SamplingParams.99"."""
  found = {
    f"{message.DESCRIPTOR.full_name}.{field.field_number}" for field in protobuf_unknown.UnknownFieldSet(message)
  }
  for field, value in message.ListFields():
    if field.message_type is not None and not isinstance(value, Mapping):  # sluice.v1's maps hold numbers
      for each in value if field.is_repeated else (value,):
        found.update(unknown_fields(each))
  return sorted(found)


def refuse_unknown_choices(unknown: list[str]) -> None:
  """Raises InvalidRequest for an unknown field of a message in which every field changes the output."""
  refuse_unknown_fields([name for name in unknown if name.rpartition(".")[0] in _CHOICES])


def refuse_unknown_fields(unknown: list[str]) -> None:
  """Raises InvalidRequest if there are any, since the server would not apply them."""
  if unknown:
    raise InvalidRequest("is not a field that this server knows: leave it out", field=unknown[0])


def find_adapter(name: str, served: str, adapters: Sequence[str] = ()) -> str:
  """Returns the LoRA adapter that a request's `model` names; "" if that is empty or the served model's name.

  Args:
    name: the request's `model`.
    served: the served model's name.
    adapters: names of the loaded adapters.

  Raises:
    ModelNotFound: nothing of that name is served.
  """
  if not name or name == served:
    return ""
  if name in adapters:
    return name
  names = f"one of {', '.join(map(repr, (served, *adapters)))}" if adapters else repr(served)
  raise ModelNotFound(f"model={name!r:.80} is not served here; send {names}, or leave it empty")


def check_request_id(request_id: str) -> None:
  """Raises InvalidRequest for an id that is unfit for a log line."""
  if not REQUEST_ID.fullmatch(request_id):
    raise InvalidRequest(f"={request_id!r:.80} is not allowed: send 1 to 128 of A-Z a-z 0-9 . _ -", field="request_id")


def check_token_ids(name: str, token_ids, vocab_size: int) -> None:
  """Raises InvalidRequest for an id outside the vocabulary."""
  for token_id in token_ids:
    if not 0 <= token_id < vocab_size:
      raise InvalidRequest(f"={token_id} is not allowed: token ids of this model are 0 to {vocab_size - 1}", field=name)


def need_tokenizer(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
  """Returns the tokenizer; raises NoTokenizer, which names the field that needs it."""
  if tokenizer is None:
    raise NoTokenizer("needs a tokenizer, and the served model has none; send and request token ids only", field=what)
  return tokenizer


def prompt_token_ids(request: pb.GenerateRequest | pb.TokenizeRequest, tokenizer: Tokenizer | None) -> list[int]:
  """Returns the token ids of a request's prompt. Slow for a long text: call it away from the event loop.

  Raises:
    InvalidRequest: the prompt is missing, empty, or a text that the tokenizer refuses.
    NoTokenizer, NoChatTemplate: the model has none, and the prompt needs it.
  """
  kind = request.WhichOneof("prompt")
  if kind is None:
    raise InvalidRequest("is missing: send text, token_ids or chat", field="prompt")
  if isinstance(request, pb.GenerateRequest) and kind == "token_ids":
    return list(request.token_ids.ids)
  tokenizer = need_tokenizer(tokenizer, f"prompt.{kind}")
  if kind == "text":
    if not request.text:
      raise InvalidRequest("is empty: send at least one character", field="prompt")
    add_special_tokens = True
    if isinstance(request, pb.TokenizeRequest) and request.HasField("add_special_tokens"):
      add_special_tokens = request.add_special_tokens
    return tokenizer.encode(request.text, add_special_tokens=add_special_tokens)
  chat = request.chat
  return tokenizer.encode_chat(
    [Message(message.role, message.content) for message in chat.messages],
    add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
  )


def num_outputs(sampling: pb.SamplingParams) -> int:
  """Returns the number of outputs of a prompt, checked before anything is made for each of them.

  Raises:
    InvalidRequest: it is 0 or too large.
  """
  n = sampling.n if sampling.HasField("n") else 1
  if not 1 <= n <= MAX_N:
    raise InvalidRequest(f"={n} is not allowed: send a whole number from 1 to {MAX_N}", field="n")
  return n


def default_max_tokens(defaults: SamplingDefaults, fallback: int, num_left: int) -> int:
  """Returns max_tokens of a request that sets none: the model's default, else `fallback`; at most `num_left` tokens."""
  return max(1, min(int(defaults.get("max_tokens", fallback)), num_left))


def check_tenant(tenant: str) -> None:
  """Raises InvalidRequest if it is too long."""
  size = len(tenant.encode())
  if size > _MAX_TENANT_BYTES:
    raise InvalidRequest(f"has {size} bytes, the limit is {_MAX_TENANT_BYTES}: shorten it", field="tenant")


def make_generation_call(
  request: pb.GenerateRequest,
  config: EngineConfig,
  tokenizer: Tokenizer | None,
  prompt: list[int],
  defaults: SamplingDefaults,
  adapter: str = "",
) -> GenerationCall:
  """Makes a checked call of a request. Checks what the engine's validation at submit does not.

  Args:
    request: the client's message.
    config: the engine's configuration.
    tokenizer: the model's tokenizer, or None.
    prompt: token ids from `prompt_token_ids`.
    defaults: the model's defaults, for fields that the request leaves out.
    adapter: name of a loaded adapter, from `find_adapter`.

  Raises:
    InvalidRequest: a field is wrong; the text has field, value, limit and remedy.
    NoTokenizer: the request needs text, and the model has no tokenizer.
  """
  if request.request_id:
    check_request_id(request.request_id)
  salt = request.cache_salt.encode()
  if len(salt) > _MAX_SALT_BYTES:
    raise InvalidRequest(f"has {len(salt)} bytes, the limit is {_MAX_SALT_BYTES}: shorten it", field="cache_salt")
  check_tenant(request.tenant)
  output = request.output
  if request.HasField("constraint"):
    need_tokenizer(tokenizer, "constraint")
  if output.return_text:
    need_tokenizer(tokenizer, "output.return_text")
  stops = tuple(request.stopping.stop)
  if stops:
    need_tokenizer(tokenizer, "stopping.stop")
  _check_stop_strings(stops)
  params = _sampling_params(request, config, len(prompt), defaults)
  if params.prompt_logprobs is not None and len(prompt) > MAX_PROMPT_LOGPROB_TOKENS:
    raise InvalidRequest(
      f"of a prompt of {len(prompt)} tokens is not allowed, the limit is {MAX_PROMPT_LOGPROB_TOKENS} "
      "tokens: shorten the prompt, or leave it out",
      field="prompt_logprobs",
    )
  n = num_outputs(request.sampling)
  return GenerationCall(
    request_id=request.request_id,
    prompt_token_ids=tuple(prompt),
    params=tuple(_for_index(params, index) for index in range(n)),
    stop_strings=stops,
    return_text=tokenizer is not None and (output.return_text or not output.HasField("return_text")),
    return_token_ids=output.return_token_ids or not output.HasField("return_token_ids"),
    skip_special_tokens=output.skip_special_tokens or not output.HasField("skip_special_tokens"),
    priority=request.priority,
    queue_timeout_s=_queue_timeout_s(request),
    cache_salt=salt,
    tenant=request.tenant,
    adapter=adapter,
    speculation=request.speculation,
  )


def _check_stop_strings(stops: tuple[str, ...]) -> None:
  if len(stops) > MAX_STOP_STRINGS:
    raise InvalidRequest(f"has {len(stops)} strings, the limit is {MAX_STOP_STRINGS}: send fewer", field="stop")
  for index, stop in enumerate(stops):
    size = len(stop.encode())
    if not 1 <= size <= MAX_STOP_BYTES:
      raise InvalidRequest(
        f"has {size} bytes, allowed are 1 to {MAX_STOP_BYTES}: leave it out or shorten it", field=f"stop[{index}]"
      )


def _queue_timeout_s(request: pb.GenerateRequest) -> float | None:
  if not request.HasField("queue_timeout"):
    return None
  seconds = request.queue_timeout.seconds + request.queue_timeout.nanos / 1e9
  if seconds <= 0:
    raise InvalidRequest(
      f"={seconds:g} s is not allowed: send more than 0, or leave it out for the server's default",
      field="queue_timeout",
    )
  return seconds


def _sampling_params(
  request: pb.GenerateRequest, config: EngineConfig, prompt_len: int, defaults: SamplingDefaults
) -> SamplingParams:
  """Returns the request's parameters; where it sets none, the model's defaults, then Sluice's."""
  values = dict(defaults) | {
    field.name: value
    for message in (request.sampling, request.stopping, request.output)
    for field, value in message.ListFields()
    if field.name in _ENGINE_FIELDS
  }
  if values.get("seed") == NO_SEED:
    del values["seed"]
  if not request.stopping.HasField("max_tokens"):
    values["max_tokens"] = default_max_tokens(defaults, DEFAULT_MAX_TOKENS, config.max_model_len - prompt_len)
  if request.sampling.HasField("allowed_token_ids"):
    values["allowed_token_ids"] = tuple(request.sampling.allowed_token_ids.ids)
  values["logit_bias"] = tuple(sorted(request.sampling.logit_bias.items()))
  values["stop_token_ids"] = tuple(request.stopping.stop_token_ids)
  return SamplingParams(**values)


def _for_index(params: SamplingParams, index: int) -> SamplingParams:
  if index == 0:
    return params
  seed = params.seed
  if seed is not None:
    seed = (seed + index + 2**63) % 2**64 - 2**63
  return dataclasses.replace(params, seed=seed, prompt_logprobs=None)


def count_tokens_left(config: EngineConfig, num_prompt_tokens: int) -> int:
  """Returns the number of tokens that a prompt leaves of the model's length, at least 1."""
  return max(1, min(config.max_model_len, config.pool_tokens) - num_prompt_tokens)
