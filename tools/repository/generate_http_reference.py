"""Writes docs/reference/http-api.md from the declared fields of bodies. Holds no limit and no field itself.

python -m tools.repository.generate_http_reference

The proto's comments explain fields that sluice.v1 has too, unless their declaration has a description.
"""

from collections.abc import Iterable, Mapping, Sequence
import json
from types import MappingProxyType
from typing import Any

from server.http.messages import message_fields
from server.http.openai import openapi, request_fields
from server.http.openai.request_fields import (
  GenerationFields,
  Unsupported,
)
from server.http.responses.response_fields import RESPONSE_UNSUPPORTED
from tools.measure import ROOT
from tools.repository.generate_grpc_reference import field_comments
from tools.repository.markdown import end_sentence, make_table

PAGE = ROOT / "docs" / "reference" / "http-api.md"
_HEAD = """# HTTP API

`make docs` writes this page from the declarations that check every body; a test compares. A running server shows the
same as an OpenAPI document at `/openapi.json`. The API is OpenAI's for text, with the extra fields of vLLM and its
Responses API, and Anthropic's Messages API. A field that is `null` counts as absent. [errors.md](errors.md) lists every
status and error object.

- Send `Authorization: Bearer KEY` or `x-api-key: KEY` where the server has keys (`--api_key_file`). `/health`, `/ready`
  and `/openapi.json` need none.
- `x-request-id` names a request in the access log. The server sends it back, or makes one.
- The header `x-sluice-ignored-fields` of an answer names fields that the server does not know. With
  `--strict_requests` such fields return 400.
- With `stream: true` the answer is a stream of server-sent events: a chunk an event, and `[DONE]` at the end. An event
  with an error object ends the stream instead. `/v1/messages` has Anthropic's events and errors,
  and `/v1/responses` the typed events of OpenAI's Responses API.
"""
_PAGES = (
  ("/", "The live page with a playground."),
  ("/live", "A stream of events with what the live page shows."),
  ("/metrics", "Prometheus metrics: [metrics.md](metrics.md)."),
  ("/openapi.json", "This API as an OpenAPI document."),
)
_ANSWERS = (
  "Completion",
  "ChatCompletion",
  "Message",
  "TokenCount",
  "Response",
  "InputTokens",
  "InputItems",
  "DeletedResponse",
  "Embeddings",
  "Classes",
  "Scores",
  "Ranking",
  "File",
  "Files",
  "DeletedFile",
  "Batch",
  "Batches",
  "Models",
  "Model",
  "Tokens",
  "Detokenized",
  "TokenizerInfo",
  "Error",
  "MessageError",
)
_SHARED = ("SamplingParams", "StopParams", "GenerateRequest")


def http_reference() -> str:
  """Returns the page's text."""
  document = openapi.document("")
  schemas = document["components"]["schemas"]
  parts = [_HEAD, "## Endpoints\n", _endpoints(document), ""]
  shared = [name for name in GenerationFields.__struct_fields__ if name != "max_tokens"]  # of which each has its own
  parts += [
    "## Fields of completions and chats\n",
    _fields(schemas["CompletionRequest"], schemas, shared, _meanings()),
    "",
  ]
  for kind in openapi.BODIES:
    names = [name for name in kind.__struct_fields__ if not (issubclass(kind, GenerationFields) and name in shared)]
    parts += [f"## {kind.__name__}\n", _fields(schemas[kind.__name__], schemas, names), ""]
  parts += ["## BatchRequest\n", _fields(schemas["BatchRequest"], schemas), ""]
  parts += ["## Parts of bodies\n"]
  for name in _nested(schemas):
    parts += [f"### {name}\n", schemas[name].get("description", ""), "", _fields(schemas[name], schemas), ""]
  parts += ["## Answers\n"]
  for name in _ANSWERS:
    parts += [f"### {name}\n", _answer_fields(schemas[name]), ""]
  parts += ["## Fields that return 400\n", _REFUSED, _unsupported(), ""]
  parts += ["## Fields without effect\n", _HARMLESS, ", ".join(f"`{name}`" for name in request_fields.HARMLESS) + "."]
  return "\n".join(parts) + "\n"


_REFUSED = """These fields of OpenAI, Anthropic, vLLM, SGLang and llama.cpp would change the output, and Sluice does not
support them. Any other value than the allowed ones returns 400 with the advice of this table.
"""
_HARMLESS = """Sluice takes these fields and does nothing with them, because they change no output here:
"""


def _endpoints(document: dict[str, Any]) -> str:
  rows = []
  for path, methods in document["paths"].items():
    for method, operation in methods.items():
      body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
      answer = next(iter(operation["responses"]["200"]["content"].values()))["schema"]
      rows.append((f"`{method.upper()} {path}`", _show(body) if body else "", _show(answer), operation["summary"]))
  rows += [(f"`GET {path}`", "", "", text) for path, text in _PAGES]
  return make_table(("endpoint", "body", "answer", ""), rows)


def _meanings() -> dict[str, str]:
  return {name: text for message in _SHARED for name, text in field_comments(message).items()}


def _fields(
  schema: dict[str, Any],
  schemas: dict[str, Any],
  names: Iterable[str] = (),
  meanings: Mapping[str, str] = MappingProxyType({}),
) -> str:
  """Returns a table of an object's fields.

  Args:
    schema: the object's schema.
    schemas: the schemas that it refers to.
    names: the names of the fields; empty: all.
    meanings: the meanings of fields whose declarations have no description.
  """
  properties, required = schema["properties"], schema.get("required", ())
  rows = []
  for name in names or properties:
    found = properties[name]
    inner = " ".join(schemas[each].get("description", "") for each in _references(found))
    text = _description(found) or meanings.get(name) or inner
    rows.append((f"`{name}`{' (required)' if name in required else ''}", _show(found), end_sentence(text)))
  return make_table(("field", "type and limits", ""), rows)


def _answer_fields(schema: dict[str, Any]) -> str:
  rows = [(f"`{name}`", _show(found)) for name, found in _flat(schema, "")]
  return make_table(("field", "type"), rows)


def _flat(schema: dict[str, Any], prefix: str) -> list[tuple[str, dict[str, Any]]]:
  """Returns the fields of an object and of its nested objects, by path."""
  found: list[tuple[str, dict[str, Any]]] = []
  for name, inner in schema["properties"].items():
    path = f"{prefix}{name}"
    options = [option for option in inner.get("anyOf", [inner]) if option.get("type") != "null"]
    only = options[0] if len(options) == 1 else inner
    items = only.get("items", {})
    if "properties" in only:
      found += _flat(only, f"{path}.")
    elif "properties" in items:
      found += _flat(items, f"{path}[].")
    else:
      found.append((path, inner))
  return found


def _nested(schemas: dict[str, Any]) -> list[str]:
  """Returns the names of the objects nested in bodies."""
  names: list[str] = []
  queue = [kind.__name__ for kind in openapi.BODIES]
  while queue:
    for name in _references(schemas[queue.pop(0)]):
      if name not in names:
        names.append(name)
        queue.append(name)
  return names


def _references(schema: Any) -> list[str]:
  if isinstance(schema, dict):
    own = [schema["$ref"].rpartition("/")[2]] if "$ref" in schema else []
    return own + [name for value in schema.values() for name in _references(value)]
  return [name for value in schema for name in _references(value)] if isinstance(schema, list) else []


def _description(schema: dict[str, Any]) -> str:
  """Returns a field's description, wherever its declaration has it."""
  if "description" in schema:
    return schema["description"]
  return " ".join(option["description"] for option in schema.get("anyOf", ()) if "description" in option)


def _show(schema: dict[str, Any]) -> str:
  """Describes a schema in words."""
  if "$ref" in schema:
    name = schema["$ref"].rpartition("/")[2]
    return f"[{name}](#{name.lower()})"
  if "anyOf" in schema:
    options = [_show(option) for option in schema["anyOf"] if option.get("type") != "null"]
    return " or ".join(dict.fromkeys(options))
  if "const" in schema:
    return f"`{json.dumps(schema['const'])}`"
  if "enum" in schema:
    return "one of " + ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
  kind = schema.get("type", "any")
  if kind == "array":
    return f"list of {_show(schema.get('items', {}))}{_limits(schema, 'minItems', 'maxItems', 'entries')}"
  if kind == "object":
    if "additionalProperties" in schema and isinstance(schema["additionalProperties"], dict):
      inner = _show(schema["additionalProperties"])
      return f"object of {inner}{_limits(schema, 'minProperties', 'maxProperties', 'entries')}"
    return "object"
  if isinstance(kind, list):
    return " or ".join(word for word in kind if word != "null")
  if kind == "string":
    pattern = f" that matches `{schema['pattern']}`" if "pattern" in schema else ""
    return f"string{pattern}{_limits(schema, 'minLength', 'maxLength', 'bytes')}"
  return kind + _numbers(schema)


def _limits(schema: dict[str, Any], low: str, high: str, unit: str) -> str:
  least, most = schema.get(low) or 0, schema.get(high)
  if most is not None:
    return f" ({least} to {most} {unit})" if least else f" (at most {most} {unit})"
  return " (not empty)" if least == 1 else f" (at least {least} {unit})" if least else ""


# Bounds of integer types, which readers do not need.
_WIDE = {
  request_fields.INT32_MAX,
  -request_fields.INT32_MAX - 1,
  request_fields.INT64_MAX,
  -request_fields.INT64_MAX - 1,
}


def _numbers(schema: dict[str, Any]) -> str:
  words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
  found = [f"{word} {schema[name]:g}" for name, word in words.items() if schema.get(name, 2**31 - 1) not in _WIDE]
  return f" ({' and '.join(found)})" if found else ""


def _unsupported() -> str:
  """Returns one row for each field, with the places that refuse it unless all do."""
  rows: list[Sequence[str]] = []
  groups: tuple[tuple[Unsupported, str], ...] = (
    (request_fields.UNSUPPORTED, ""),
    (request_fields.PROMPT_UNSUPPORTED, "chats"),
    (request_fields.CHAT_UNSUPPORTED, "chats"),
    (request_fields.COMPLETION_UNSUPPORTED, "completions"),
    (message_fields.UNSUPPORTED, "messages"),
    (RESPONSE_UNSUPPORTED, "responses"),
  )
  for fields, where in groups:
    for name, (values, remedy) in fields.items():
      allowed = ", ".join(f"`{json.dumps(value)}`" for value in values)
      rows.append(
        (f"`{name}`{f' of {where}' if where else ''}", allowed, end_sentence(remedy[:1].upper() + remedy[1:]))
      )
  return make_table(("field", "allowed", "advice"), rows)


def main() -> None:
  """Runs the command line."""
  PAGE.write_text(http_reference())


if __name__ == "__main__":
  main()
