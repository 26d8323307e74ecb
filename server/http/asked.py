"""From the fields that completions and chats share to a sluice.v1 GenerateRequest, whose own checks do the rest.

Three kinds of fields exist besides: those that would change the answer and are not built are refused; those that
change nothing here are ignored; what nobody has heard of is ignored and named in the answer's header
`x-sluice-ignored-fields`, or refused under --strict_requests.
"""

from collections.abc import Sequence
import dataclasses
import json
import re
from typing import Any

from engine.errors import InvalidRequest
from server import validation
from server.http.errors import UnsupportedField
from server.http.fields import Fields, as_float, kind_of
from server.proto import sluice_pb2 as pb

INT64 = (-(2**63), 2**63 - 1)
# A default that changes nothing, or one that only OpenAI's own service can act on.
HARMLESS = (
  "user",
  "metadata",
  "store",
  "service_tier",
  "safety_identifier",
  "prompt_cache_key",
  "prompt_cache_retention",
  "spaces_between_special_tokens",
)
# Name, the values besides null that change nothing, and what to say about the others.
UNSUPPORTED: tuple[tuple[str, tuple[object, ...], str], ...] = (
  ("use_beam_search", (False,), "there is no beam search; leave it out"),
  ("length_penalty", (1, 1.0), "there is no beam search; leave it out"),
  ("include_stop_str_in_output", (False,), "the text ends before the stop string; append it from stop_reason"),
  ("bad_words", ([],), "send logit_bias of -100 for their tokens"),
  ("truncate_prompt_tokens", (), "prompts are never cut; shorten the prompt"),
  ("prompt_logprobs", (), "send echo with logprobs to /v1/completions"),
  ("logits_processors", ([],), "code from requests is not run; leave it out"),
  ("prompt_embeds", (), "send text or token ids"),
  ("kv_transfer_params", ({},), "leave it out"),
  ("guided_whitespace_pattern", (), "put the whitespace into the grammar, or leave it out"),
)
# vLLM's names of constraints in `structured_outputs`, and those of sluice.v1; older clients send them as guided_NAME.
_CONSTRAINTS = (
  ("json", "json_schema"),
  ("regex", "regex"),
  ("choice", "choice"),
  ("grammar", "grammar"),
)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_NAMED = 16


@dataclasses.dataclass(slots=True)
class Asked:
  """What both kinds of requests may ask for.

  Attributes:
    request: without a prompt; its sampling, stopping and output say the rest.
    model: the served name, or empty.
    stream, include_usage, continuous_usage: as server-sent events; with a last event of usage; with usage in each.
    n: outputs a prompt.
    return_token_ids: beside the text.
    token_ids_as_names: tokens in logprobs are named "token_id:N".
    ignored: fields that nobody has heard of.
  """

  request: pb.GenerateRequest
  model: str
  stream: bool
  include_usage: bool
  continuous_usage: bool
  n: int
  return_token_ids: bool
  token_ids_as_names: bool
  ignored: tuple[str, ...] = ()

  @property
  def headers(self) -> dict[str, str]:
    """Of the answer."""
    return ignored_header(self.ignored)


def ignored_header(names: Sequence[str]) -> dict[str, str]:
  """Names the fields that an answer was made without; those that could not stand in a header are counted."""
  if not names:
    return {}
  named = [name for name in names if _NAME.fullmatch(name)][:_MAX_NAMED]
  more = len(names) - len(named)
  return {"x-sluice-ignored-fields": ", ".join([*named, *([f"and {more} more"] if more else [])])}


def read(fields: Fields, tenant: str) -> Asked:
  """Takes the shared fields.

  Args:
    fields: of the request's body; the caller takes its own, then calls `finish`.
    tenant: of the caller's key, or empty.

  Raises:
    InvalidRequest: a value of the wrong type, or too many outputs. Other ranges are checked by
      `validation.generate_call`.
  """
  request = pb.GenerateRequest(request_id=fields.text("request_id") or "", tenant=tenant)
  if request.request_id:
    validation.check_request_id(request.request_id)
  request.cache_salt = fields.text("cache_salt") or ""
  priority = fields.whole("priority")
  if priority is not None:
    request.priority = priority
  _read_sampling(fields, request.sampling)
  _read_stopping(fields, request.stopping)
  _read_constraint(fields, request)
  skip = fields.flag("skip_special_tokens")
  request.output.skip_special_tokens = True if skip is None else skip
  stream = bool(fields.flag("stream"))
  options = fields.inner("stream_options")
  if options is not None and not stream:
    raise InvalidRequest("stream_options is allowed with stream=true alone: leave it out, or send stream=true")
  options = options or Fields({}, "stream_options.")
  asked = Asked(
    request=request,
    model=fields.text("model") or "",
    stream=stream,
    include_usage=bool(options.flag("include_usage")),
    continuous_usage=bool(options.flag("continuous_usage_stats")),
    n=validation.num_outputs(request.sampling),
    return_token_ids=bool(fields.flag("return_token_ids")),
    token_ids_as_names=bool(fields.flag("return_tokens_as_token_ids")),
  )
  options.take("include_obfuscation")
  request.output.return_token_ids = asked.return_token_ids or asked.continuous_usage
  asked.ignored = tuple(f"stream_options.{name}" for name in options.unknown())
  return asked


def finish(fields: Fields, asked: Asked, *, strict: bool) -> None:
  """Judges what is left of the fields.

  Raises:
    UnsupportedField: one must not be ignored; or, under `strict`, nobody has heard of it.
  """
  for name in HARMLESS:
    fields.take(name)
  for name, harmless, remedy in UNSUPPORTED:
    value = fields.take(name)
    if value is not None and not any(value == same and type(value) is type(same) for same in harmless):
      raise UnsupportedField(f"{name} is not supported: {remedy}")
  asked.ignored += tuple(fields.unknown())
  if strict:
    refuse_unknown(asked.ignored)


def refuse_unknown(names: Sequence[str]) -> None:
  """Raises UnsupportedField if there are any: each is a wish that would not be granted."""
  if names:
    name = names[0]
    raise UnsupportedField(
      f"{name} is not a field that this server knows: leave it out, or serve with --nostrict_requests to ignore it"
      if _NAME.fullmatch(name)
      else "the body has a field that this server does not know: leave it out, or serve with --nostrict_requests"
    )


def _read_constraint(fields: Fields, request: pb.GenerateRequest) -> None:
  """What the output must look like, by OpenAI's name or by vLLM's; at most one of them."""
  found = [(f"guided_{name}", kind, fields.take(f"guided_{name}")) for name, kind in _CONSTRAINTS]
  structured = fields.inner("structured_outputs")
  if structured is not None:
    found += [(f"structured_outputs.{name}", kind, structured.take(name)) for name, kind in _CONSTRAINTS]
    if structured.flag("json_object"):
      found.append(("structured_outputs.json_object", "json_object", True))
    for name in structured.unknown():
      # Switches of vLLM's backends, off: as here.
      if structured.take(name) is not False:
        shown = f".{name}" if _NAME.fullmatch(name) else ""
        raise UnsupportedField(
          f"structured_outputs{shown} is not supported: send one of json, json_object, regex, choice and grammar"
        )
  found.append(_response_format(fields))
  found = [(name, kind, value) for name, kind, value in found if value is not None]
  if len(found) > 1:
    raise InvalidRequest(f"{found[1][0]} is not allowed beside {found[0][0]}: send one of them")
  for name, kind, value in found:
    _set_constraint(request.constraint, name, kind, value)


def _response_format(fields: Fields) -> tuple[str, str, Any]:
  """(name, kind, value); the value is None where nothing is asked for."""
  form = fields.inner("response_format")
  nothing = "response_format", "", None
  if form is None:
    return nothing
  kind = form.text("type")
  if kind == "text":
    return nothing
  if kind == "json_object":
    return "response_format", "json_object", True
  if kind == "structural_tag":
    raise UnsupportedField("response_format of type 'structural_tag' is not supported: send a json_schema")
  if kind != "json_schema":
    raise InvalidRequest("response_format.type is not one that exists: send text, json_object or json_schema")
  inner = form.inner("json_schema")
  schema = None if inner is None else inner.take("schema")
  if schema is None:
    raise InvalidRequest("response_format.json_schema.schema is missing: send a JSON schema")
  return "response_format.json_schema.schema", "json_schema", schema


def _set_constraint(constraint: pb.OutputConstraint, name: str, kind: str, value: Any) -> None:
  match kind:
    case "json_object":
      constraint.json_object = True
    case "json_schema":
      if not isinstance(value, str | dict):
        raise InvalidRequest(f"{name} is {kind_of(value)}: send a JSON schema, as an object or its text")
      constraint.json_schema = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    case "choice":
      if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InvalidRequest(f"{name} is not a list of strings: send one")
      constraint.choice.values.extend(value)
      constraint.choice.SetInParent()
    case _:
      if not isinstance(value, str):
        raise InvalidRequest(f"{name} is {kind_of(value)}: send a string")
      setattr(constraint, kind, value)


def _read_sampling(fields: Fields, sampling: pb.SamplingParams) -> None:
  for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
    value = fields.number(name)
    if value is not None:
      setattr(sampling, name, value)
  top_k = fields.whole("top_k")
  if top_k is not None:
    sampling.top_k = 0 if top_k == -1 else top_k  # vLLM's word for all
  n = fields.whole("n")
  if n is not None:
    sampling.n = n
  seed = fields.whole("seed", INT64)
  if seed is not None:
    sampling.seed = seed
  _read_logit_bias(fields, sampling)
  allowed = fields.list_of("allowed_token_ids", int, "token ids")
  if allowed is not None:
    sampling.allowed_token_ids.ids.extend(_int32("allowed_token_ids", token_id) for token_id in allowed)
    sampling.allowed_token_ids.SetInParent()


def _read_logit_bias(fields: Fields, sampling: pb.SamplingParams) -> None:
  bias = fields.take("logit_bias")
  if bias is None:
    return
  if not isinstance(bias, dict):
    fields.wrong("logit_bias", bias, "an object from token ids to numbers")
  for key, value in bias.items():
    # The key is JSON's text of a number.
    if not re.fullmatch(r"-?[0-9]{1,10}", key):
      raise InvalidRequest("logit_bias has a key that is not a token id: send whole numbers as keys")
    if not isinstance(value, int | float) or isinstance(value, bool):
      raise InvalidRequest(f"logit_bias[{key}] is {kind_of(value)}: send a number")
    sampling.logit_bias[_int32("logit_bias", int(key))] = as_float(value)


def _read_stopping(fields: Fields, stopping: pb.StopParams) -> None:
  for name in ("max_tokens", "min_tokens"):
    value = fields.whole(name)
    if value is not None:
      setattr(stopping, name, value)
  ignore_eos = fields.flag("ignore_eos")
  if ignore_eos is not None:
    stopping.ignore_eos = ignore_eos
  stop = fields.take("stop")
  if isinstance(stop, str):
    stop = [stop]
  if stop is not None:
    if not isinstance(stop, list) or not all(isinstance(each, str) for each in stop):
      fields.wrong("stop", stop, "a string or a list of strings")
    stopping.stop.extend(stop)
  ids = fields.list_of("stop_token_ids", int, "token ids")
  if ids is not None:
    stopping.stop_token_ids.extend(_int32("stop_token_ids", token_id) for token_id in ids)


def _int32(name: str, token_id: int) -> int:
  if not -(2**31) <= token_id < 2**31:
    raise InvalidRequest(f"{name} has an id of more than 32 bits: send token ids of this model")
  return token_id
