"""The HTTP API as an OpenAPI document, for people, for code generators and for fuzzers. May not check anything.

Limits are taken from where they are enforced; a test holds the names to those that the endpoints read. What null means
is said once: a field that is null counts as absent, so every field may be null.
"""

from collections.abc import Sequence
from typing import Any

from engine.sampling_params import MAX_BIAS, MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, RANGES
from server.generation import request_validation
from server.http.json_fields import INT32
from server.http.openai.chat_messages import MAX_TOOLS, REASONING_EFFORTS, TOOL_NAME, TURN_FIELDS
from server.http.openai.completions import MAX_PROMPTS
from server.http.openai.shared_fields import CHAT_UNSUPPORTED, COMPLETION_UNSUPPORTED, HARMLESS, INT64, UNSUPPORTED
from server.text.chat_template import MAX_MESSAGES, ROLES
from server.text.constraint_compiler import MAX_CHOICES

PATH = "/openapi.json"
_ABOUT = "OpenAI's API for text, with vLLM's extra fields. A field that is null counts as absent."
_NULL: dict[str, Any] = {"type": "null"}
_TEXT: dict[str, Any] = {"type": "string"}
_FLAG: dict[str, Any] = {"type": "boolean"}
_OBJECT: dict[str, Any] = {"type": "object"}


def _whole(low: int = INT32[0], high: int = INT32[1]) -> dict[str, Any]:
  return {"type": "integer", "minimum": low, "maximum": high}


def _list(items: dict[str, Any], low: int = 0, high: int | None = None) -> dict[str, Any]:
  return {"type": "array", "items": items, "minItems": low} | ({} if high is None else {"maxItems": high})


def _object(*required: str, **properties: Any) -> dict[str, Any]:
  return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
  kind = schema.get("type")
  if kind == "null":
    return schema
  return {**schema, "type": [kind, "null"]} if isinstance(kind, str) else {"anyOf": [schema, _NULL]}


def _said(schema: dict[str, Any], text: str) -> dict[str, Any]:
  return {**schema, "description": text}


def _ref(name: str) -> dict[str, Any]:
  return {"$ref": f"#/components/schemas/{name}"}


_TOKEN_ID = _whole(0)
_TOKEN_IDS = _list(_TOKEN_ID)
_STRING_OR_SCHEMA = _said({"type": ["object", "string"]}, "A JSON schema, or its text.")
_ALLOWED = {"type": "object", "propertyNames": {"pattern": "^[0-9]{1,9}$"}, "maxProperties": MAX_LOGIT_BIAS}
_CONSTRAINTS = {
  "json": _STRING_OR_SCHEMA,
  "regex": _TEXT,
  "choice": _list({"type": "string", "minLength": 1}, 1, MAX_CHOICES),
  "grammar": _TEXT,
}


def _ranges() -> dict[str, Any]:
  return {
    name: {"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high}
    for name, (low, high, above) in RANGES.items()
  }


def _harmless(values: tuple[object, ...]) -> dict[str, Any]:
  # 1 and 1.0 are one number in JSON.
  return {"enum": [value for at, value in enumerate(values) if value not in values[:at]]} if values else _NULL


def _common() -> dict[str, Any]:
  """Of completions and chats; see server/http/openai/shared_fields.py."""
  return {
    "model": _said(_TEXT, "The served name; absent: the same."),
    **_ranges(),
    "top_k": _said(_whole(-1), "0 and -1 are all."),
    "n": _whole(1, request_validation.MAX_N),
    "seed": _said(_whole(*INT64), "-1 is none."),
    "logit_bias": {**_ALLOWED, "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}},
    "allowed_token_ids": _list(_TOKEN_ID, 1),
    "max_tokens": _whole(1),
    "min_tokens": _whole(0),
    "ignore_eos": _FLAG,
    "stop": {
      "anyOf": [
        {"type": "string", "minLength": 1, "maxLength": request_validation.MAX_STOP_BYTES},
        _list(
          {"type": "string", "minLength": 1, "maxLength": request_validation.MAX_STOP_BYTES},
          0,
          request_validation.MAX_STOP_STRINGS,
        ),
      ]
    },
    "stop_token_ids": _list(_TOKEN_ID, 0, MAX_STOP_TOKEN_IDS),
    "skip_special_tokens": _FLAG,
    "stream": _FLAG,
    "stream_options": _said(
      _object(include_usage=_FLAG, continuous_usage_stats=_FLAG, include_obfuscation=_FLAG), "With stream alone."
    ),
    "return_token_ids": _FLAG,
    "return_tokens_as_token_ids": _FLAG,
    "request_id": {"type": "string", "pattern": f"^{request_validation.REQUEST_ID.pattern}$"},
    "cache_salt": _said(
      {"type": "string", "maxLength": 128}, "Prefixes are shared with requests of the same one alone."
    ),
    "priority": _said(_whole(), "Lower first."),
    "response_format": {
      "anyOf": [
        _object("type", type={"const": "text"}),
        _said(_object("type", type={"const": "json_object"}, schema=_STRING_OR_SCHEMA), "Any object; or by a schema."),
        _object("type", "json_schema", type={"const": "json_schema"}, json_schema=_object("schema", schema=_OBJECT)),
        _object("type", "schema", type={"const": "json_schema"}, schema=_STRING_OR_SCHEMA),
      ]
    },
    "json_schema": _STRING_OR_SCHEMA,
    "regex": _TEXT,
    "grammar": _TEXT,
    "ebnf": _said(_TEXT, "The same as grammar."),
    "structured_outputs": _object(**_CONSTRAINTS, json_object=_FLAG),
    **{f"guided_{name}": schema for name, schema in _CONSTRAINTS.items()},
    **{name: _said({}, "Taken, and of no effect here.") for name in HARMLESS},
    **_unsupported(UNSUPPORTED),
  }


def _unsupported(fields: Sequence[tuple[str, tuple[object, ...], str]]) -> dict[str, Any]:
  return {name: _said(_harmless(values), "No other value is supported.") for name, values, _ in fields}


def _completion_request() -> dict[str, Any]:
  text, token_ids = {"type": "string", "minLength": 1}, _list(_TOKEN_ID, 1)
  prompt = {"anyOf": [text, _list(text, 1, MAX_PROMPTS), token_ids, _list(token_ids, 1, MAX_PROMPTS)]}
  own = {
    "max_tokens": _said(_whole(0), "Default 16. 0 with echo alone: the prompt's logprobs, and no output."),
    "add_special_tokens": _FLAG,
    "echo": _FLAG,
    "logprobs": _whole(0, MAX_LOGPROBS),
    "suffix": _said(_harmless(("",)), "There is no infilling."),
    "best_of": _said(_whole(1, request_validation.MAX_N), "The same as n."),
  }
  return _request("prompt", prompt=prompt, **{**_common(), **_unsupported(COMPLETION_UNSUPPORTED), **own})


def _tool() -> dict[str, Any]:
  function = _object(
    "name", name={"type": "string", "pattern": f"^{TOOL_NAME.pattern}$"}, description=_TEXT, parameters=_OBJECT
  )
  return _object("type", "function", type={"const": "function"}, function=function)


def _chat_fields() -> dict[str, Any]:
  """Of a chat's prompt; see server/http/openai/chat_messages.py."""
  part = _object("type", "text", type={"const": "text"}, text=_TEXT)
  call = _object(
    "function", id=_TEXT, type={"const": "function"}, function=_object("name", name=_TEXT, arguments=_TEXT)
  )
  message = _object(
    "role",
    role={"enum": list(ROLES)},
    content={"anyOf": [_TEXT, _list(part), _NULL]},
    **{name: _or_null(_list(call, 1) if name == "tool_calls" else _TEXT) for name in TURN_FIELDS},
  )
  # Content may be missing beside calls alone.
  message["anyOf"] = [
    _object("content", content={"type": ["string", "array"]}),
    _object("tool_calls", tool_calls={"type": "array"}),
  ]
  choice = _object("type", "function", type={"const": "function"}, function=_object("name", name=_TEXT))
  return {
    "messages": _list(message, 1, MAX_MESSAGES),
    "tools": _list(_tool(), 0, MAX_TOOLS),
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, choice]},
    "parallel_tool_calls": _FLAG,
    "add_generation_prompt": _FLAG,
    "chat_template_kwargs": {
      "type": "object",
      "additionalProperties": {
        "anyOf": [{"type": ["boolean", "number"]}, {"type": "string", "pattern": "^[A-Za-z0-9_-]{0,32}$"}]
      },
    },
    "reasoning_effort": _said({"enum": list(REASONING_EFFORTS)}, "For templates that read it."),
    "modalities": {"const": ["text"]},
    **{
      name: _said(schema, "No other value is supported.")
      for name, schema in {
        "continue_final_message": _harmless((False,)),
        "add_special_tokens": _harmless((False,)),
        "chat_template": _NULL,
        "audio": _NULL,
        "functions": _NULL,
        "function_call": _NULL,
      }.items()
    },
  }


def _chat_request() -> dict[str, Any]:
  own = {
    "max_completion_tokens": _said(_whole(1), "Wins over max_tokens."),
    "logprobs": _FLAG,
    "top_logprobs": _said(_whole(0, MAX_LOGPROBS), "With logprobs alone."),
  }
  return _request("messages", **{**_common(), **_unsupported(CHAT_UNSUPPORTED), **_chat_fields(), **own})


def _request(*required: str, **properties: dict[str, Any]) -> dict[str, Any]:
  optional = {name: schema if name in required else _or_null(schema) for name, schema in properties.items()}
  return _object(*required, **optional) | {
    "description": "Fields that are not listed are ignored and named in the header x-sluice-ignored-fields, or refused "
    "under --strict_requests."
  }


def _logprob(**more: Any) -> dict[str, Any]:
  properties = {"token": _TEXT, "logprob": {"type": "number"}, "bytes": _list(_whole(0, 255))}
  return _object("token", "logprob", "bytes", *more, **properties, **more)


def _schemas() -> dict[str, Any]:
  usage = _object(
    "prompt_tokens",
    "completion_tokens",
    "total_tokens",
    "prompt_tokens_details",
    prompt_tokens=_whole(0),
    completion_tokens=_whole(0),
    total_tokens=_whole(0),
    prompt_tokens_details=_object("cached_tokens", cached_tokens=_whole(0)),
  )
  ending = {
    "index": _whole(0),
    "stop_reason": {"type": ["integer", "string", "null"]},
    "token_ids": _TOKEN_IDS,
  }
  numbers = _list({"type": ["number", "null"]})
  text_logprobs = _object(
    "tokens",
    "token_logprobs",
    "top_logprobs",
    "text_offset",
    tokens=_list(_TEXT),
    token_logprobs=numbers,
    top_logprobs=_list(_or_null(_OBJECT)),
    text_offset=_list(_whole(0)),
  )
  text_choice = _object(
    "index",
    "text",
    "logprobs",
    "finish_reason",
    **ending,
    text=_TEXT,
    logprobs=_or_null(text_logprobs),
    finish_reason={"enum": ["stop", "length", None]},
    prompt_token_ids=_TOKEN_IDS,
  )
  call = _object(
    "id",
    "type",
    "function",
    id=_TEXT,
    type={"const": "function"},
    function=_object("name", "arguments", name=_TEXT, arguments=_said(_TEXT, "A JSON object's text.")),
  )
  message = _object(
    "role",
    "content",
    role={"const": "assistant"},
    content={"type": ["string", "null"]},
    refusal=_NULL,
    tool_calls=_list(call, 1),
  )
  content = _logprob(top_logprobs=_list(_logprob()))
  chat_choice = _object(
    "index",
    "message",
    "logprobs",
    "finish_reason",
    **ending,
    message=message,
    logprobs=_or_null(_object("content", content=_list(content))),
    finish_reason={"enum": ["stop", "length", "tool_calls"]},
  )
  model = _object(
    *("id", "object", "created", "owned_by", "max_model_len"),
    id=_TEXT,
    object={"const": "model"},
    created=_whole(0, INT64[1]),
    owned_by=_TEXT,
    max_model_len=_whole(1),
  )

  def answer(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    return _object(
      *("id", "object", "created", "model", "choices", "usage"),
      id=_TEXT,
      object={"const": kind},
      created=_whole(0, INT64[1]),
      model=_TEXT,
      choices=_list(choice, 1),
      usage=usage,
    )

  chat_prompt = {name: _or_null(schema) for name, schema in _chat_fields().items()}
  tokenize = {"prompt": {"type": "string", "minLength": 1}, "add_special_tokens": _FLAG, "return_token_strs": _FLAG}
  return {
    "CompletionRequest": _completion_request(),
    "ChatCompletionRequest": _chat_request(),
    "Completion": answer("text_completion", text_choice),
    "ChatCompletion": answer("chat.completion", chat_choice),
    "Model": model,
    "Models": _object("object", "data", object={"const": "list"}, data=_list(model, 1)),
    "TokenizeRequest": _said(
      _object(model=_or_null(_TEXT), **chat_prompt | {name: _or_null(schema) for name, schema in tokenize.items()}),
      "Either prompt or messages.",
    ),
    "Tokens": _object(
      *("tokens", "count", "max_model_len"),
      tokens=_TOKEN_IDS,
      count=_whole(0),
      max_model_len=_whole(1),
      token_strs=_list(_TEXT),
    ),
    "DetokenizeRequest": _request("tokens", model=_TEXT, tokens=_TOKEN_IDS, skip_special_tokens=_FLAG),
    "Detokenized": _object("prompt", prompt=_TEXT),
    "TokenizerInfo": _object(
      *("vocab_size", "chat_template", "model_max_length"),
      vocab_size=_whole(1),
      chat_template={"type": ["string", "null"]},
      model_max_length=_whole(1),
    ),
    "Error": _object(
      "error",
      error=_object(
        *("message", "type", "param", "code"),
        message=_TEXT,
        type=_TEXT,
        param={"type": ["string", "null"]},
        code={"type": ["string", "null"]},
      ),
    ),
  }


_STREAM = "With stream: a chunk an event, and [DONE] at the end; an event with an error object ends it instead."
# Path, method, schema of the body and of the answer (a name of _schemas, or the schema itself), and what it does.
_OPERATIONS: tuple[tuple[str, str, str, str | dict[str, Any], str], ...] = (
  ("/v1/models", "get", "", "Models", "The served model."),
  ("/v1/models/{model}", "get", "", "Model", "The same, by its name."),
  ("/v1/completions", "post", "CompletionRequest", "Completion", "Text after each prompt."),
  ("/v1/chat/completions", "post", "ChatCompletionRequest", "ChatCompletion", "The next turn of a chat."),
  ("/tokenize", "post", "TokenizeRequest", "Tokens", "Token ids of a text or a chat."),
  ("/detokenize", "post", "DetokenizeRequest", "Detokenized", "The text of token ids."),
  ("/tokenizer_info", "get", "", "TokenizerInfo", "What a harness needs to know of the tokenizer."),
  ("/version", "get", "", _object("version", version=_TEXT), "The server's version."),
  ("/health", "get", "", _OBJECT, "200 while the process need not be killed, else 503."),
  ("/ready", "get", "", _OBJECT, "200 while requests can be sent here, else 503."),
)


def _operation(path: str, body: str, answer: str | dict[str, Any], text: str) -> dict[str, Any]:
  schema = _ref(answer) if isinstance(answer, str) else answer
  said: dict[str, Any] = {"application/json": {"schema": schema}}
  if body in ("CompletionRequest", "ChatCompletionRequest"):
    said["text/event-stream"] = {"schema": _said(_TEXT, _STREAM)}
  error = _OBJECT if path in ("/health", "/ready") else _ref("Error")
  operation: dict[str, Any] = {
    "summary": text,
    "responses": {
      "200": {"description": "As asked for.", "content": said},
      "default": {"description": "An error.", "content": {"application/json": {"schema": error}}},
    },
  }
  if body:
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(body)}}}
  if "{model}" in path:
    operation["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": _TEXT}]
  if path in ("/health", "/ready"):
    operation["security"] = []
  return operation


def document(version: str) -> dict[str, Any]:
  """The document, for a server of this version."""
  paths: dict[str, Any] = {}
  for path, method, body, answer, text in _OPERATIONS:
    paths.setdefault(path, {})[method] = _operation(path, body, answer, text)
  return {
    "openapi": "3.1.0",
    "info": {"title": "Sluice", "version": version, "description": _ABOUT},
    "paths": paths,
    "components": {
      "schemas": _schemas(),
      "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    },
    # Only where the server has keys.
    "security": [{"key": []}, {}],
  }
