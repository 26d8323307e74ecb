"""From a protobuf to what the engine takes, refusing everything else before anything is queued. Knows no gRPC.

Sampling values and token ids are judged by the engine's own `SamplingParams.validate` and `Engine.submit`; here is
only what the engine cannot know: names, ids, texts, stop strings and counts of the wire.
"""

from collections.abc import Mapping
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
MAX_PROMPT_LOGPROB_TOKENS = 8192  # each is a list of alternatives in the answer
DEFAULT_MAX_TOKENS = 256
# A seed that is none, as in vLLM and llama.cpp; all others are seeds, negative ones too.
NO_SEED = -1
_MAX_SALT_BYTES = 128
_MAX_TENANT_BYTES = 128
# Those that requests have by the same name have the same meaning.
_ENGINE_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
# Messages in which every field changes the output: served without one, a request gets another output than it asked for.
_CHOICES = frozenset(
  message.DESCRIPTOR.full_name
  for message in (pb.SamplingParams, pb.StopParams, pb.OutputConstraint, pb.Choices, pb.ChatPrompt, pb.ChatMessage)
)
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationCall:
  """A checked generation.

  Attributes:
    request_id: the client's, or empty.
    prompt_token_ids: at least one.
    params: one for each of the n outputs; they differ in seed, and only the first reports on the prompt.
    stop_strings: end the text.
    return_text, return_token_ids, skip_special_tokens: what to send.
    priority: lower first.
    queue_timeout_s: the client's, or None.
    cache_salt, tenant: may be empty.
    constraints: one for each of the n outputs, or none at all.
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


def unknown_fields(message: protobuf_message.Message) -> list[str]:
  """Fields that the message came with and this server's proto has not, as "sluice.v1.SamplingParams.99"."""
  found = {
    f"{message.DESCRIPTOR.full_name}.{field.field_number}" for field in protobuf_unknown.UnknownFieldSet(message)
  }
  for field, value in message.ListFields():
    if field.message_type is not None and not isinstance(value, Mapping):  # ours map numbers to numbers
      for each in value if field.is_repeated else (value,):
        found.update(unknown_fields(each))
  return sorted(found)


def refuse_unknown_choices(unknown: list[str]) -> None:
  """Raises InvalidRequest for an unknown field of a message in which every field changes the output."""
  refuse_unknown_fields([name for name in unknown if name.rpartition(".")[0] in _CHOICES])


def refuse_unknown_fields(unknown: list[str]) -> None:
  """Raises InvalidRequest if there are any: each is a wish that would not be granted."""
  if unknown:
    raise InvalidRequest("is not a field that this server knows: leave it out", field=unknown[0])


def check_model_name(asked: str, served: str) -> None:
  """Raises ModelNotFound unless `asked` is empty or the served name."""
  if asked and asked != served:
    raise ModelNotFound(f"model={asked!r:.80} is not served here; send {served!r}, or leave it empty")


def check_request_id(request_id: str) -> None:
  """Raises InvalidRequest for an id that could not stand in a log line."""
  if not REQUEST_ID.fullmatch(request_id):
    raise InvalidRequest(f"={request_id!r:.80} is not allowed: send 1 to 128 of A-Z a-z 0-9 . _ -", field="request_id")


def check_token_ids(name: str, token_ids, vocab_size: int) -> None:
  """Raises InvalidRequest for an id outside the vocabulary."""
  for token_id in token_ids:
    if not 0 <= token_id < vocab_size:
      raise InvalidRequest(f"={token_id} is not allowed: token ids of this model are 0 to {vocab_size - 1}", field=name)


def need_tokenizer(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
  """The tokenizer; raises NoTokenizer, saying what it is needed for."""
  if tokenizer is None:
    raise NoTokenizer("needs a tokenizer, and the served model has none; send and ask for token ids only", field=what)
  return tokenizer


def prompt_token_ids(request: pb.GenerateRequest | pb.TokenizeRequest, tokenizer: Tokenizer | None) -> list[int]:
  """Token ids of a request's prompt. May take long for a long text: call it away from the event loop.

  Raises:
    InvalidRequest: there is no prompt, it is empty, or its text is refused.
    NoTokenizer, NoChatTemplate: the model cannot do that.
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
  """Outputs a prompt. Whoever makes something for each of them asks here first.

  Raises:
    InvalidRequest: they are none, or too many.
  """
  n = sampling.n if sampling.HasField("n") else 1
  if not 1 <= n <= MAX_N:
    raise InvalidRequest(f"={n} is not allowed: send a whole number from 1 to {MAX_N}", field="n")
  return n


def default_max_tokens(defaults: SamplingDefaults, ours: int, room: int) -> int:
  """max_tokens of a request that names none: the model's, else `ours`; no more than the prompt leaves room for."""
  return max(1, min(int(defaults.get("max_tokens", ours)), room))


def make_generation_call(
  request: pb.GenerateRequest,
  config: EngineConfig,
  tokenizer: Tokenizer | None,
  prompt: list[int],
  defaults: SamplingDefaults,
) -> GenerationCall:
  """Checks what the engine's own validation at submit does not.

  Args:
    request: as it came.
    config: the engine's.
    tokenizer: the model's, or None.
    prompt: from `prompt_token_ids`.
    defaults: the model's own, for fields that the request leaves out.

  Raises:
    InvalidRequest: with field, value, limit and remedy.
    NoTokenizer: text is needed and cannot be made.
  """
  if request.request_id:
    check_request_id(request.request_id)
  salt = request.cache_salt.encode()
  if len(salt) > _MAX_SALT_BYTES:
    raise InvalidRequest(f"has {len(salt)} bytes, the limit is {_MAX_SALT_BYTES}: shorten it", field="cache_salt")
  if len(request.tenant.encode()) > _MAX_TENANT_BYTES:
    raise InvalidRequest(
      f"has {len(request.tenant.encode())} bytes, the limit is {_MAX_TENANT_BYTES}: shorten it", field="tenant"
    )
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
  """What was set; for the rest the model's defaults, and Sluice's."""
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
