"""Turns a body's declared fields into a sluice.v1 GenerateRequest, whose checks do the rest. Knows no endpoint."""

from collections.abc import Sequence
import dataclasses
import json
import re
from typing import Any

import msgspec

from engine.errors import InvalidRequest
from server.generation import request_validation
from server.generation.reasoning_budget import ReasoningLimit
from server.http.error_responses import UnsupportedField
from server.http.json_fields import convert_fields, show_number
from server.http.openai.request_fields import (
  OTHER_CONSTRAINT,
  PROMPT_REMEDY,
  GenerationFields,
  RequestFields,
  ResponseFormat,
  StreamOptions,
  StructuredOutputs,
)
from server.proto import sluice_pb2 as pb
from server.text.constraint_compiler import describe_unenforced, prepare_schema_text

# Kinds of sluice.v1's constraints, by the names of a body's fields and of vLLM's `structured_outputs`.
_CONSTRAINTS = {
  "guided_json": "json_schema",
  "guided_regex": "regex",
  "guided_choice": "choice",
  "guided_grammar": "grammar",
  "json_schema": "json_schema",
  "regex": "regex",
  "grammar": "grammar",
  "ebnf": "grammar",
}
_STRUCTURED_OUTPUTS = {
  "json": "json_schema",
  "regex": "regex",
  "choice": "choice",
  "grammar": "grammar",
  "json_object": "json_object",
}
_NAME = re.compile(r"[A-Za-z0-9_.$[\]-]{1,64}")
_MAX_NAMED = 16


@dataclasses.dataclass(slots=True)
class RequestedGeneration[T: GenerationFields]:
  """A completion or chat request, read but not yet checked against the engine.

  Attributes:
    fields: the body's fields.
    stream_options: the stream's options; unset without a stream.
    request: the GenerateRequest, without a prompt.
    n: outputs a prompt.
    ignored: names of ignored fields.
    field_names: the caller's names of fields of `request`, where they differ.
    strict_schema: whether to refuse keywords of the constraint's JSON schema that are not enforced.
    shown_token_ids: special tokens that the text has even where it omits special tokens.
    reasoning: the limit of the reasoning before the answer, or None.
    adapter: name of the LoRA adapter; empty: the base model alone.
  """

  fields: T
  stream_options: StreamOptions
  request: pb.GenerateRequest
  n: int
  ignored: list[str]
  field_names: dict[str, str]
  strict_schema: bool = False
  shown_token_ids: frozenset[int] = frozenset()
  reasoning: ReasoningLimit | None = None
  adapter: str = ""


def read_fields[T: RequestFields](values: dict[str, Any], kind: type[T]) -> tuple[T, list[str]]:
  """Returns the declared fields of a body, and the names of unknown ones.

  Raises:
    InvalidRequest: a field is missing, has a wrong type, or is outside its limits.
    UnsupportedField: a field is not supported and must not be ignored.
  """
  fields = convert_fields(values, kind)
  unknown = []
  for name in _undeclared(values, kind):
    if name in kind.unsupported:
      value, (harmless, remedy) = values[name], kind.unsupported[name]
      if not any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in harmless):
        raise UnsupportedField(f"{show_number(value)} is not supported: {remedy}", field=name)
    elif name not in kind.harmless:
      unknown.append(name)
  return fields, unknown


def judge_ignored(names: Sequence[str], *, strict: bool) -> dict[str, str]:
  """Returns the header that names ignored fields. It counts fields whose names do not fit into a header.

  Raises:
    UnsupportedField: under `strict`, if there are any.
  """
  if not names:
    return {}
  if strict:
    field = _path(names[0])
    problem = (
      "has a field that this server does not know" if field == "body" else "is not a field that this server knows"
    )
    raise UnsupportedField(f"{problem}: leave it out, or serve with --nostrict_requests to ignore it", field=field)
  named = [name for name in names if _NAME.fullmatch(name)][:_MAX_NAMED]
  more = len(names) - len(named)
  return {"x-sluice-ignored-fields": ", ".join([*named, *([f"and {more} more"] if more else [])])}


def relax_schema(text: str, field: str, *, closes: bool, strict: bool) -> tuple[str, list[str]]:
  """Leaves keywords that are not enforced out of a JSON schema.

  Args:
    text: the schema's text.
    field: its field in the body.
    closes: whether objects have no properties but those that they list; `prepare_schema` has the rule.
    strict: refuse such keywords instead, and close objects.

  Returns:
    The text without them, and their names for x-sluice-ignored-fields.

  Raises:
    InvalidRequest: the text is no schema, or exceeds a limit.
    UnsupportedField: under `strict`, if there are any.
  """
  try:
    text, unenforced = prepare_schema_text(text, closes=closes or strict)
  except InvalidRequest as error:
    raise InvalidRequest(error.problem, field=field) from None
  if unenforced and strict:
    problem = f"{describe_unenforced(unenforced[0])}, or send strict=false to have it ignored"
    raise UnsupportedField(problem, field=_path(unenforced[0].keyword, field))
  return text, list(dict.fromkeys(f"{field}.{keyword.keyword}" for keyword in unenforced))


def read_generation[T: GenerationFields](values: dict[str, Any], kind: type[T], tenant: str) -> RequestedGeneration[T]:
  """Reads the body of a completion or a chat.

  Args:
    values: the body.
    kind: the class that declares its fields.
    tenant: the tenant of the caller's key, or empty.

  Raises:
    InvalidRequest: a field is wrong, or two exclude each other.
    UnsupportedField: a field must not be ignored. `request_validation.make_generation_call` checks the rest.
  """
  fields, ignored = read_fields(values, kind)
  for name in ignored:
    if name.startswith("guided_"):
      raise UnsupportedField(f"is not supported: {OTHER_CONSTRAINT}", field=_path(name))
  if fields.stream_options is not None:
    if not fields.stream:
      raise InvalidRequest(
        "is allowed with stream=true alone: leave it out, or send stream=true", field="stream_options"
      )
    ignored += (f"stream_options.{name}" for name in _undeclared(values["stream_options"], StreamOptions))
  if fields.request_id:
    request_validation.check_request_id(fields.request_id)
  options, allowed = fields.stream_options or StreamOptions(), fields.allowed_token_ids
  constraint, field_names = _make_constraint(values, fields)
  request = pb.GenerateRequest(
    request_id=fields.request_id,
    tenant=tenant,
    cache_salt=fields.cache_salt,
    priority=fields.priority,
    speculation=fields.speculation,
    sampling=pb.SamplingParams(
      temperature=fields.temperature,
      top_p=fields.top_p,
      min_p=fields.min_p,
      presence_penalty=fields.presence_penalty,
      frequency_penalty=fields.frequency_penalty,
      repetition_penalty=fields.repetition_penalty,
      top_k=0 if fields.top_k == -1 else fields.top_k,  # vLLM's value for all
      n=fields.n,
      seed=fields.seed,
      logit_bias=fields.logit_bias,
      allowed_token_ids=None if allowed is None else pb.TokenIds(ids=allowed),
    ),
    stopping=pb.StopParams(
      max_tokens=fields.max_tokens,
      min_tokens=fields.min_tokens,
      ignore_eos=fields.ignore_eos,
      stop=[fields.stop] if isinstance(fields.stop, str) else fields.stop,
      stop_token_ids=fields.stop_token_ids,
    ),
    output=pb.OutputParams(
      skip_special_tokens=fields.skip_special_tokens is not False,
      return_token_ids=bool(fields.return_token_ids or options.continuous_usage_stats),
    ),
    constraint=constraint,
  )
  n = request_validation.num_outputs(request.sampling)
  form = fields.response_format
  strict = form is not None and form.json_schema is not None and bool(form.json_schema.strict)
  return RequestedGeneration(fields, options, request, n, ignored, field_names, strict_schema=strict)


def list_prompts(given: str | list[Any], field: str) -> list[str | list[int]]:
  """Returns prompts as a list of texts or of lists of token ids.

  Args:
    given: a text, token ids, or a list of texts or of token ids.
    field: its name in the body.

  Raises:
    InvalidRequest: there are none, or several kinds.
  """
  if isinstance(given, str):
    return [given]
  kinds = set(map(type, given))
  if len(kinds) != 1:
    what = "a list of several kinds" if kinds else "an empty list"
    raise InvalidRequest(f"is {what}: send {PROMPT_REMEDY}", field=field)
  return [given] if int in kinds else given


def _undeclared(values: dict[str, Any], kind: type[msgspec.Struct]) -> list[str]:
  return [name for name, value in values.items() if value is not None and name not in kind.__struct_fields__]


def _path(name: str, where: str = "") -> str:
  """Returns the path of an unknown field, without its name if that is unfit for a header."""
  shown = name if _NAME.fullmatch(name) else ""
  return f"{where}.{shown}".strip(".") or "body"


def _make_constraint(
  values: dict[str, Any], fields: GenerationFields
) -> tuple[pb.OutputConstraint | None, dict[str, str]]:
  """Returns the constraint of the output, and its name in the body for errors."""
  found = [(name, kind, getattr(fields, name)) for name, kind in _CONSTRAINTS.items()]
  structured, form = fields.structured_outputs, fields.response_format
  if structured is not None:
    given = values["structured_outputs"]
    for name in _undeclared(given, StructuredOutputs):
      # Options of vLLM's backends, which change nothing when off.
      if given[name] is not False:
        raise UnsupportedField(
          "is not supported: send one of json, json_object, regex, choice and grammar",
          field=_path(name, "structured_outputs"),
        )
    found += [
      (f"structured_outputs.{name}", kind, getattr(structured, name)) for name, kind in _STRUCTURED_OUTPUTS.items()
    ]
  if form is not None:
    found += _read_response_format(values["response_format"], form)
  found = [(name, kind, value) for name, kind, value in found if value is not None and value is not False]
  if not found:
    return None, {}
  if len(found) > 1:
    raise InvalidRequest(f"is not allowed beside {found[0][0]}: send one of them", field=found[1][0])
  ((name, kind, value),) = found
  if isinstance(value, dict):
    value = json.dumps(value, ensure_ascii=False)
  constraint: dict[str, Any] = {kind: pb.Choices(values=value) if isinstance(value, list) else value}
  return pb.OutputConstraint(**constraint), {"constraint": name, f"constraint.{kind}": name}


def _read_response_format(values: dict[str, Any], form: ResponseFormat) -> list[tuple[str, str, Any]]:
  """Returns (name, kind, value) of the response format; the value is None for plain text."""
  kind = form.type
  if kind == "structural_tag":
    raise UnsupportedField("of type 'structural_tag' is not supported: send a json_schema", field="response_format")
  if kind not in ("text", "json_object", "json_schema"):
    raise InvalidRequest("is not one that exists: send text, json_object or json_schema", field="response_format.type")
  wrong = _undeclared(values, ResponseFormat)
  if form.json_schema is not None and kind != "json_schema":
    wrong.append("json_schema")
  if form.schema is not None and kind == "text":
    wrong.append("schema")
  if wrong:
    raise UnsupportedField(
      f"is not supported with type {kind}: send a schema as "
      '{"type": "json_schema", "json_schema": {"schema": ...}}, or leave it out',
      field=_path(wrong[0], "response_format"),
    )
  wrapped = form.json_schema.schema if form.json_schema is not None else None
  if kind == "json_schema" and wrapped is None and form.schema is None:
    raise InvalidRequest("is missing: send a JSON schema", field="response_format.json_schema.schema")
  if kind == "json_object" and not form.schema:
    return [("response_format", "json_object", True)]
  return [
    ("response_format.json_schema.schema", "json_schema", wrapped),
    ("response_format.schema", "json_schema", form.schema),
  ]
