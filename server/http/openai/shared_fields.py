"""From the fields that completions and chats share to a sluice.v1 GenerateRequest, whose own checks do the rest.

Three kinds of fields exist besides. Those that would change the output and are not built are refused: a parameter or a
constraint is applied or refused, never dropped. Those that change nothing here are ignored. What nobody has heard of is
ignored and named in the answer's header `x-sluice-ignored-fields`, or refused under --strict_requests.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import json
import re
from typing import Any

from engine.errors import InvalidRequest
from server.generation import request_validation
from server.http.error_responses import UnsupportedField
from server.http.json_fields import Fields, as_float, kind_of
from server.proto import sluice_pb2 as pb

INT64 = (-(2**63), 2**63 - 1)
# What changes no answer here: what only OpenAI's own service can act on, where and how fast something is computed, and
# what tunes a kind of sampling that is off, since the switch that turns it on is among UNSUPPORTED.
HARMLESS = (
  "user",
  "metadata",
  "store",
  "service_tier",
  "safety_identifier",
  "prompt_cache_key",
  "prompt_cache_retention",
  "prediction",
  "spaces_between_special_tokens",
  "guided_decoding_backend",
  "truncation_side",
  "cache_prompt",
  "id_slot",
  "n_keep",
  "dry_base",
  "dry_allowed_length",
  "dry_penalty_last_n",
  "dry_sequence_breakers",
  "xtc_threshold",
  "mirostat_tau",
  "mirostat_eta",
  "dynatemp_exponent",
  "adaptive_decay",
)
_NOTHING: tuple[object, ...] = (False, [], {}, "")
_OFF: tuple[object, ...] = (0, 0.0)
_ONE: tuple[object, ...] = (1, 1.0)
_SAMPLERS = "it is not built; use temperature, top_p, top_k and min_p"
_NO_REASONING = "reasoning is not parsed, and stays in the text; leave it out"
_OTHER_CONSTRAINT = "send response_format, or one of json, regex, choice and grammar in structured_outputs"
# Name, the values besides null that change nothing, and what to say about the others. What would change the output is
# here, so that nobody gets another output than the one that was asked for: the fields of OpenAI, vLLM, SGLang and
# llama.cpp's server.
UNSUPPORTED: tuple[tuple[str, tuple[object, ...], str], ...] = (
  ("use_beam_search", (False,), "there is no beam search; leave it out"),
  ("length_penalty", _ONE, "there is no beam search; leave it out"),
  ("include_stop_str_in_output", (False,), "the text ends before the stop string; append it from stop_reason"),
  ("no_stop_trim", (False,), "the text ends before the stop string; append it from stop_reason"),
  ("stop_regex", _NOTHING, "send stop, with strings"),
  ("bad_words", ([],), "send logit_bias of -100 for their tokens"),
  ("truncate_prompt_tokens", (), "prompts are never cut; shorten the prompt"),
  ("prompt_logprobs", (), "send echo with logprobs to /v1/completions"),
  ("prompt_logprob_token_ids", _NOTHING, "send echo with logprobs to /v1/completions"),
  ("logprob_token_ids", _NOTHING, "send logprobs, for the most likely tokens"),
  ("n_probs", _OFF, "send logprobs"),
  ("logits_processors", ([],), "code from requests is not run; leave it out"),
  ("custom_logit_processor", _NOTHING, "code from requests is not run; leave it out"),
  ("custom_params", _NOTHING, "code from requests is not run; leave it out"),
  ("vllm_xargs", _NOTHING, "there are no plugins; leave it out"),
  ("prompt_embeds", (), "send text or token ids"),
  ("input_ids", (), "send the ids as prompt to /v1/completions"),
  ("image_data", _NOTHING, "the model reads text; leave it out"),
  ("mm_processor_kwargs", _NOTHING, "the model reads text; leave it out"),
  ("media_io_kwargs", _NOTHING, "the model reads text; leave it out"),
  ("documents", _NOTHING, "write the documents into the messages"),
  ("web_search_options", (), "the server searches nothing; write what was found into the prompt"),
  ("kv_transfer_params", ({},), "leave it out"),
  ("ec_transfer_params", ({},), "leave it out"),
  ("session_params", _NOTHING, "there are no sessions; send the whole prompt"),
  ("lora", _NOTHING, "one model is served, without adapters; leave it out"),
  ("lora_path", _NOTHING, "one model is served, without adapters; leave it out"),
  ("guided_whitespace_pattern", (), "put the whitespace into the grammar, or leave it out"),
  ("guided_json_object", (False,), 'send response_format {"type": "json_object"}'),
  ("structural_tag", (), _OTHER_CONSTRAINT),
  ("grammar_lazy", (False,), "a grammar holds from the first token on; leave it out"),
  ("grammar_triggers", ([],), "a grammar holds from the first token on; leave it out"),
  ("preserved_tokens", ([],), "send skip_special_tokens=false for special tokens in the text"),
  ("n_predict", (), "send max_tokens"),
  ("max_new_tokens", (), "send max_tokens"),
  ("t_max_predict_ms", (0, 0.0, -1), "send max_tokens, or end the request when its time is over"),
  ("n_cmpl", _ONE, "send n"),
  ("n_indent", _OFF, "send a grammar with the indentation"),
  ("repeat_penalty", _ONE, "send repetition_penalty"),
  ("repeat_last_n", (-1,), "penalties look at the whole text; leave it out"),
  ("typical_p", _ONE, _SAMPLERS),
  ("typ_p", _ONE, _SAMPLERS),
  ("tfs_z", _ONE, _SAMPLERS),
  ("top_a", _OFF, _SAMPLERS),
  ("top_n_sigma", (*_OFF, -1, -1.0), _SAMPLERS),
  ("mirostat", _OFF, _SAMPLERS),
  ("mirostat_mode", _OFF, _SAMPLERS),
  ("dynatemp_range", _OFF, _SAMPLERS),
  ("dry_multiplier", _OFF, _SAMPLERS),
  ("xtc_probability", _OFF, _SAMPLERS),
  ("adaptive_target", (-1, -1.0), _SAMPLERS),
  ("min_keep", (*_OFF, *_ONE), _SAMPLERS),
  ("samplers", (), _SAMPLERS),
  ("watermarking", (False,), "leave it out"),
  ("repetition_detection", (), "send repetition_penalty, or max_tokens"),
  ("thinking_token_budget", (-1,), _NO_REASONING),
  ("thinking_budget_tokens", (-1,), _NO_REASONING),
  ("reasoning_budget", (-1,), _NO_REASONING),
  ("include_reasoning", (True,), _NO_REASONING),
  ("separate_reasoning", (False,), _NO_REASONING),
  ("reasoning_format", ("none",), _NO_REASONING),
  ("verbosity", ("medium",), "say in the messages how long the answer should be"),
  ("parse_tool_calls", (True,), "serve with --tool_call_parser=none for calls that stay text"),
  ("return_hidden_states", (False,), "leave it out"),
)
# Fields that the other endpoint has: what they ask for would be missing here.
CHAT_UNSUPPORTED: tuple[tuple[str, tuple[object, ...], str], ...] = (
  ("echo", (False,), "send the prompt to /v1/completions"),
  ("suffix", ("",), "there is no infilling; leave it out"),
  ("best_of", _ONE, "send n"),
)
COMPLETION_UNSUPPORTED: tuple[tuple[str, tuple[object, ...], str], ...] = (
  ("max_completion_tokens", (), "send max_tokens, as /v1/completions calls it"),
  ("top_logprobs", _OFF, "send logprobs with a number, as /v1/completions calls it"),
  ("tools", ([],), "send messages to /v1/chat/completions"),
  ("tool_choice", ("none", "auto"), "send messages to /v1/chat/completions"),
  ("chat_template_kwargs", ({},), "send messages to /v1/chat/completions"),
  ("reasoning_effort", (), "send messages to /v1/chat/completions"),
)
# What an output must look like: vLLM's names in `structured_outputs`, which older clients send as guided_NAME, and
# those of sluice.v1.
_CONSTRAINTS = (
  ("json", "json_schema"),
  ("regex", "regex"),
  ("choice", "choice"),
  ("grammar", "grammar"),
)
# The same at the top level, as llama.cpp's server (json_schema, grammar) and SGLang (json_schema, regex, ebnf) have it.
_BARE_CONSTRAINTS = (
  ("json_schema", "json_schema"),
  ("regex", "regex"),
  ("grammar", "grammar"),
  ("ebnf", "grammar"),
)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_NAMED = 16


@dataclasses.dataclass(slots=True)
class CompletionRequest:
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


def read_shared_fields(fields: Fields, tenant: str) -> CompletionRequest:
  """Takes the shared fields.

  Args:
    fields: of the request's body; the caller takes its own, then calls `finish`.
    tenant: of the caller's key, or empty.

  Raises:
    InvalidRequest: a value of the wrong type, or too many outputs. Other ranges are checked by
      `request_validation.make_generation_call`.
  """
  request = pb.GenerateRequest(request_id=fields.text("request_id") or "", tenant=tenant)
  if request.request_id:
    request_validation.check_request_id(request.request_id)
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
    raise InvalidRequest("is allowed with stream=true alone: leave it out, or send stream=true", field="stream_options")
  options = options or Fields({}, "stream_options.")
  asked = CompletionRequest(
    request=request,
    model=fields.text("model") or "",
    stream=stream,
    include_usage=bool(options.flag("include_usage")),
    continuous_usage=bool(options.flag("continuous_usage_stats")),
    n=request_validation.num_outputs(request.sampling),
    return_token_ids=bool(fields.flag("return_token_ids")),
    token_ids_as_names=bool(fields.flag("return_tokens_as_token_ids")),
  )
  options.take_value("include_obfuscation")
  request.output.return_token_ids = asked.return_token_ids or asked.continuous_usage
  asked.ignored = tuple(f"stream_options.{name}" for name in options.unknown())
  return asked


def judge_other_fields(
  fields: Fields, asked: CompletionRequest, unsupported: Sequence[tuple[str, tuple[object, ...], str]], *, strict: bool
) -> None:
  """Judges what is left of the fields; `unsupported` are those of this endpoint, besides UNSUPPORTED.

  Raises:
    UnsupportedField: one must not be ignored; or, under `strict`, nobody has heard of it.
  """
  for name in HARMLESS:
    fields.take_value(name)
  for name, harmless, remedy in (*UNSUPPORTED, *unsupported):
    value = fields.take_value(name)
    if value is not None and not any(value == same and type(value) is type(same) for same in harmless):
      raise UnsupportedField(f"{_shown(value)} is not supported: {remedy}", field=name)
  for name in fields.unknown():
    if name.startswith("guided_"):
      raise UnsupportedField(
        f"is not supported: {_OTHER_CONSTRAINT}", field=name if _NAME.fullmatch(name) else "guided_"
      )
  add_ignored(asked, fields.unknown(), strict=strict)


def add_ignored(asked: CompletionRequest, names: Iterable[str], *, strict: bool) -> None:
  """Names fields that the answer is made without. Raises UnsupportedField, under `strict`, if there are any."""
  asked.ignored += tuple(names)
  if strict:
    refuse_unknown(asked.ignored)


def _shown(value: object) -> str:
  """A value in an error, if it is short and no text of the caller's."""
  return f"={json.dumps(value)}" if isinstance(value, bool | int | float) and abs(value) < 1e30 else ""


def refuse_unknown(names: Sequence[str]) -> None:
  """Raises UnsupportedField if there are any: each is a wish that would not be granted."""
  if names:
    name = names[0]
    if not _NAME.fullmatch(name):
      raise UnsupportedField(
        "has a field that this server does not know: leave it out, or serve with --nostrict_requests", field="body"
      )
    raise UnsupportedField(
      "is not a field that this server knows: leave it out, or serve with --nostrict_requests to ignore it", field=name
    )


def _read_constraint(fields: Fields, request: pb.GenerateRequest) -> None:
  """What the output must look like, by one of the names that it has in OpenAI's API and elsewhere."""
  found = [(f"guided_{name}", kind, fields.take_value(f"guided_{name}")) for name, kind in _CONSTRAINTS]
  found += [(name, kind, fields.take_value(name)) for name, kind in _BARE_CONSTRAINTS]
  structured = fields.inner("structured_outputs")
  if structured is not None:
    found += [(f"structured_outputs.{name}", kind, structured.take_value(name)) for name, kind in _CONSTRAINTS]
    if structured.flag("json_object"):
      found.append(("structured_outputs.json_object", "json_object", True))
    for name in structured.unknown():
      # Switches of vLLM's backends, off: as here.
      if structured.take_value(name) is not False:
        shown = f".{name}" if _NAME.fullmatch(name) else ""
        raise UnsupportedField(
          "is not supported: send one of json, json_object, regex, choice and grammar",
          field=f"structured_outputs{shown}",
        )
  found.append(_response_format(fields))
  found = [(name, kind, value) for name, kind, value in found if value is not None]
  if len(found) > 1:
    raise InvalidRequest(f"is not allowed beside {found[0][0]}: send one of them", field=found[1][0])
  for name, kind, value in found:
    _set_constraint(request.constraint, name, kind, value)


def _response_format(fields: Fields) -> tuple[str, str, Any]:
  """(name, kind, value); the value is None where nothing is asked for.

  Beside OpenAI's form, {"type": "json_schema", "json_schema": {"schema": ...}}, there is llama.cpp's: the schema right
  in the object, with either of the types for JSON.
  """
  form = fields.inner("response_format")
  if form is None:
    return "response_format", "", None
  kind = form.text("type")
  found: list[tuple[str, Any]] = []
  if kind == "structural_tag":
    raise UnsupportedField("of type 'structural_tag' is not supported: send a json_schema", field="response_format")
  if kind not in ("text", "json_object", "json_schema"):
    raise InvalidRequest("is not one that exists: send text, json_object or json_schema", field="response_format.type")
  if kind == "json_schema":
    inner = form.inner("json_schema")
    if inner is not None:
      found.append(("response_format.json_schema.schema", inner.take_value("schema")))
  if kind != "text":
    found.append(("response_format.schema", form.take_value("schema")))
  left = form.unknown()
  if left:
    shown = f".{left[0]}" if _NAME.fullmatch(left[0]) else ""
    raise UnsupportedField(
      f"is not supported with type {kind}: send a schema as "
      '{"type": "json_schema", "json_schema": {"schema": ...}}, or leave it out',
      field=f"response_format{shown}",
    )
  given = [(name, schema) for name, schema in found if schema is not None]
  if len(given) > 1:
    raise InvalidRequest(f"is not allowed beside {given[0][0]}: send one of them", field=given[1][0])
  if kind == "json_schema" and not given:
    raise InvalidRequest("is missing: send a JSON schema", field="response_format.json_schema.schema")
  if kind == "json_object" and (not given or given[0][1] == {}):
    return "response_format", "json_object", True
  if not given:
    return "response_format", "", None
  ((name, schema),) = given
  return name, "json_schema", schema


def _set_constraint(constraint: pb.OutputConstraint, name: str, kind: str, value: Any) -> None:
  match kind:
    case "json_object":
      constraint.json_object = True
    case "json_schema":
      if not isinstance(value, str | dict):
        raise InvalidRequest(f"is {kind_of(value)}: send a JSON schema, as an object or its text", field=name)
      constraint.json_schema = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    case "choice":
      if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InvalidRequest("is not a list of strings: send one", field=name)
      constraint.choice.values.extend(value)
      constraint.choice.SetInParent()
    case _:
      if not isinstance(value, str):
        raise InvalidRequest(f"is {kind_of(value)}: send a string", field=name)
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
  bias = fields.take_value("logit_bias")
  if bias is None:
    return
  if not isinstance(bias, dict):
    fields.wrong("logit_bias", bias, "an object from token ids to numbers")
  for key, value in bias.items():
    # The key is JSON's text of a number.
    if not re.fullmatch(r"-?[0-9]{1,10}", key):
      raise InvalidRequest("has a key that is not a token id: send whole numbers as keys", field="logit_bias")
    if not isinstance(value, int | float) or isinstance(value, bool):
      raise InvalidRequest(f"is {kind_of(value)}: send a number", field=f"logit_bias[{key}]")
    sampling.logit_bias[_int32("logit_bias", int(key))] = as_float(value)


def _read_stopping(fields: Fields, stopping: pb.StopParams) -> None:
  for name in ("max_tokens", "min_tokens"):
    value = fields.whole(name)
    if value is not None:
      setattr(stopping, name, value)
  ignore_eos = fields.flag("ignore_eos")
  if ignore_eos is not None:
    stopping.ignore_eos = ignore_eos
  stop = fields.take_value("stop")
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
    raise InvalidRequest("has an id of more than 32 bits: send token ids of this model", field=name)
  return token_id
