"""Describes the HTTP API as an OpenAPI document, for users, code generators and fuzzers. May not check anything.

The schemas of bodies follow their declarations, and a test compares responses with this document. A field that is null
counts as absent, so every optional field may be null.
"""

from collections.abc import Sequence
import functools
import re
from typing import Any

import msgspec

from server.http.batches.batch_fields import BatchRequest
from server.http.embeddings.embedding_fields import (
  ClassifyRequest,
  EmbeddingRequest,
  RerankRequest,
  ScoreRequest,
)
from server.http.messages.message_fields import CountTokensRequest, MessageRequest
from server.http.openai.request_fields import (
  INT32_MAX,
  INT64_MAX,
  SHOWN,
  ChatCompletionRequest,
  CompletionRequest,
  DetokenizeRequest,
  GenerationFields,
  LoadAdapterRequest,
  TokenizeChat,
  TokenizeText,
  UnloadAdapterRequest,
)
from server.http.responses.response_fields import ResponseRequest

PATH = "/openapi.json"
_ABOUT = (
  "OpenAI's API for text, with vLLM's extra fields, its Responses API and batches, and Anthropic's Messages API. "
  "A field that is null counts as absent."
)
_NULL: dict[str, Any] = {"type": "null"}
_TEXT: dict[str, Any] = {"type": "string"}
_OBJECT: dict[str, Any] = {"type": "object"}


def _whole(low: int, high: int = INT32_MAX) -> dict[str, Any]:
  return {"type": "integer", "minimum": low, "maximum": high}


def _list(items: dict[str, Any], low: int = 0) -> dict[str, Any]:
  return {"type": "array", "items": items, "minItems": low}


def _object(**properties: Any) -> dict[str, Any]:
  """Returns the schema of an object that requires all of these."""
  return {"type": "object", "properties": properties, "required": list(properties)}


def _with_optional(schema: dict[str, Any], **properties: Any) -> dict[str, Any]:
  return schema | {"properties": schema["properties"] | properties}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
  return {"anyOf": [schema, _NULL]}


def _said(schema: dict[str, Any], text: str) -> dict[str, Any]:
  return {**schema, "description": text}


def _ref(name: str) -> dict[str, Any]:
  return {"$ref": f"#/components/schemas/{name}"}


_TOKEN_IDS = _list(_whole(0))


def _request_schemas() -> dict[str, Any]:
  """Returns the declared schemas, with the ignored and refused fields."""
  _, plain = msgspec.json.schema_components(BODIES, ref_template=_ref("{name}")["$ref"])
  schemas = _replace_shown(plain)
  for kind in BODIES:
    properties = schemas[kind.__name__]["properties"]
    properties |= {name: {"description": "Taken, and of no effect here."} for name in kind.harmless}
    for name, (values, _) in kind.unsupported.items():
      schema = {"enum": [None, *values]} if values else _NULL
      properties.setdefault(name, _said(schema, "No other value is supported."))
  _, batch = msgspec.json.schema_components((BatchRequest,), ref_template=_ref("{name}")["$ref"])
  return schemas | batch


def _replace_shown(schema: Any) -> Any:
  """Returns the schema with the documented limits in place of msgspec's."""
  if isinstance(schema, dict):
    return {name: _replace_shown(value) for name, value in schema.items() if name != SHOWN} | schema.get(SHOWN, {})
  return [_replace_shown(value) for value in schema] if isinstance(schema, list) else schema


def _logprob(**more: Any) -> dict[str, Any]:
  return _object(token=_TEXT, logprob={"type": "number"}, bytes=_list(_whole(0, 255)), **more)


def _choice(**properties: Any) -> dict[str, Any]:
  schema = _object(index=_whole(0), **properties)
  return _with_optional(schema, stop_reason={"type": ["integer", "string", "null"]}, token_ids=_TOKEN_IDS)


def _answer(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
  usage = _object(
    prompt_tokens=_whole(0),
    completion_tokens=_whole(0),
    total_tokens=_whole(0),
    prompt_tokens_details=_object(cached_tokens=_whole(0)),
  )
  return _object(
    id=_TEXT,
    object={"const": kind},
    created=_whole(0, INT64_MAX),
    model=_TEXT,
    choices=_list(choice, 1),
    usage=usage,
  )


def _message() -> dict[str, Any]:
  """Returns the schema of Anthropic's message."""
  block = _with_optional(
    _object(type={"enum": ["text", "thinking", "tool_use"]}),
    text=_TEXT,
    thinking=_TEXT,
    signature=_TEXT,
    id=_TEXT,
    name=_TEXT,
    input=_OBJECT,
  )
  return _object(
    id=_TEXT,
    type={"const": "message"},
    role={"const": "assistant"},
    model=_TEXT,
    content=_list(block),
    stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
    stop_sequence={"type": ["string", "null"]},
    usage=_object(
      input_tokens=_said(_whole(0), "Without those from the prefix cache."),
      cache_creation_input_tokens=_whole(0),
      cache_read_input_tokens=_whole(0),
      output_tokens=_whole(0),
    ),
  )


def _response() -> dict[str, Any]:
  """Returns the schema of a response of the Responses API."""
  part = _with_optional(
    _object(type={"enum": ["output_text", "reasoning_text"]}, text=_TEXT),
    annotations=_list(_OBJECT),
    logprobs=_list(_logprob(top_logprobs=_list(_logprob()))),
  )
  item = _with_optional(
    _object(type={"enum": ["message", "reasoning", "function_call", "custom_tool_call"]}, id=_TEXT, status=_TEXT),
    role={"const": "assistant"},
    content=_list(part),
    summary=_list(_OBJECT),
    call_id=_TEXT,
    name=_TEXT,
    namespace=_TEXT,
    arguments=_TEXT,
  )
  usage = _object(
    input_tokens=_whole(0),
    input_tokens_details=_object(cached_tokens=_whole(0), cache_write_tokens=_whole(0)),
    output_tokens=_whole(0),
    output_tokens_details=_object(reasoning_tokens=_whole(0)),
    total_tokens=_whole(0),
  )
  return _object(
    id=_TEXT,
    object={"const": "response"},
    created_at=_whole(0, INT64_MAX),
    completed_at={"type": ["integer", "null"]},
    model=_TEXT,
    status={"enum": ["completed", "incomplete", "in_progress", "cancelled", "failed"]},
    output=_list(item),
    usage=_or_null(usage),
    error=_or_null(_object(code={"type": ["string", "null"]}, message=_TEXT)),
    incomplete_details=_or_null(_object(reason=_TEXT)),
    instructions={"type": ["string", "null"]},
    metadata=_OBJECT,
    previous_response_id={"type": ["string", "null"]},
    store={"type": "boolean"},
    temperature={"type": "number"},
    text=_OBJECT,
    tool_choice={"type": ["string", "object"]},
    tools=_list(_OBJECT),
    top_p={"type": "number"},
    truncation={"const": "disabled"},
  )


def _schemas() -> dict[str, Any]:
  text_logprobs = _object(
    tokens=_list(_TEXT),
    token_logprobs=_list({"type": ["number", "null"]}),
    top_logprobs=_list(_or_null(_OBJECT)),
    text_offset=_list(_whole(0)),
  )
  text_choice = _choice(
    text=_TEXT,
    logprobs=_or_null(text_logprobs),
    finish_reason={"enum": ["stop", "length", None]},
  )
  call = _with_optional(
    _object(id=_TEXT, type={"enum": ["function", "custom"]}),
    function=_object(name=_TEXT, arguments=_said(_TEXT, "A JSON object's text; incomplete if the output ends inside.")),
    custom=_object(name=_TEXT, input=_said(_TEXT, "The text; incomplete if the output ends inside.")),
  )
  chat_choice = _choice(
    message=_with_optional(
      _object(role={"const": "assistant"}, content={"type": ["string", "null"]}),
      refusal=_NULL,
      reasoning_content=_said(_TEXT, "What the model thought before it answered."),
      reasoning=_said(_TEXT, "The same, under vLLM's newer name."),
      tool_calls=_list(call, 1),
    ),
    logprobs=_or_null(_object(content=_list(_logprob(top_logprobs=_list(_logprob()))))),
    finish_reason={"enum": ["stop", "length", "tool_calls"]},
  )
  model = _object(
    id=_TEXT,
    object={"const": "model"},
    created=_whole(0, INT64_MAX),
    owned_by=_TEXT,
    root=_said(_TEXT, "Of an adapter: its folder."),
    parent=_said({"type": ["string", "null"]}, "Of an adapter: the served model."),
    max_model_len=_whole(1),
  )
  return {
    **_request_schemas(),
    "Completion": _answer("text_completion", _with_optional(text_choice, prompt_token_ids=_TOKEN_IDS)),
    "ChatCompletion": _answer("chat.completion", chat_choice),
    "Model": model,
    "Models": _object(object={"const": "list"}, data=_list(model, 1)),
    "Tokens": _with_optional(
      _object(tokens=_TOKEN_IDS, count=_whole(0), max_model_len=_whole(1)), token_strs=_list(_TEXT)
    ),
    "Detokenized": _object(prompt=_TEXT),
    "TokenizerInfo": _object(
      vocab_size=_whole(1), chat_template={"type": ["string", "null"]}, model_max_length=_whole(1)
    ),
    "Message": _message(),
    "TokenCount": _object(input_tokens=_whole(1)),
    "Response": _response(),
    "InputTokens": _object(object={"const": "response.input_tokens"}, input_tokens=_whole(1)),
    "InputItems": _object(
      object={"const": "list"}, data=_list(_OBJECT), first_id=_TEXT, last_id=_TEXT, has_more={"type": "boolean"}
    ),
    "DeletedResponse": _object(id=_TEXT, object={"const": "response"}, deleted={"const": True}),
    "Embeddings": _object(
      object={"const": "list"},
      data=_list(_object(object={"const": "embedding"}, index=_whole(0), embedding=_embedding()), 1),
      model=_TEXT,
      usage=_object(prompt_tokens=_whole(1), total_tokens=_whole(1)),
    ),
    "Classes": _object(
      id=_TEXT,
      object={"const": "list"},
      created=_whole(0),
      model=_TEXT,
      data=_list(_object(index=_whole(0), label=_TEXT, probs=_list({"type": "number"}, 1), num_classes=_whole(1)), 1),
      usage=_object(prompt_tokens=_whole(1), total_tokens=_whole(1)),
    ),
    "Scores": _object(
      id=_TEXT,
      object={"const": "list"},
      created=_whole(0),
      model=_TEXT,
      data=_list(_object(index=_whole(0), object={"const": "score"}, score={"type": "number"}), 1),
      usage=_object(prompt_tokens=_whole(1), total_tokens=_whole(1)),
    ),
    "Ranking": _object(
      id=_TEXT,
      model=_TEXT,
      results=_list(
        _with_optional(_object(index=_whole(0), relevance_score={"type": "number"}), document=_object(text=_TEXT)),
        1,
      ),
      usage=_object(prompt_tokens=_whole(1), total_tokens=_whole(1)),
    ),
    "File": _file(),
    "Files": _page(_file()),
    "DeletedFile": _object(id=_TEXT, object={"const": "file"}, deleted={"const": True}),
    "Batch": _batch(),
    "Batches": _page(_batch()),
    "MessageError": _object(
      type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT), request_id=_said(_TEXT, "As x-request-id.")
    ),
    "Error": _object(
      error=_object(message=_TEXT, type=_TEXT, param={"type": ["string", "null"]}, code={"type": ["string", "null"]})
    ),
  }


def _page(item: dict[str, Any]) -> dict[str, Any]:
  ends = {"first_id": _or_null(_TEXT), "last_id": _or_null(_TEXT)}
  return _object(object={"const": "list"}, data=_list(item), **ends, has_more={"type": "boolean"})


def _file() -> dict[str, Any]:
  return _object(
    id=_TEXT,
    object={"const": "file"},
    bytes=_whole(0, INT64_MAX),
    created_at=_whole(0, INT64_MAX),
    expires_at=_NULL,
    filename=_TEXT,
    purpose={"enum": ["batch", "batch_output"]},
    status={"const": "processed"},
    status_details=_NULL,
  )


def _batch() -> dict[str, Any]:
  time, text = _whole(0, INT64_MAX), _or_null(_TEXT)
  problem = _object(code=_TEXT, message=_TEXT, param=text, line=_or_null(_whole(1)))
  states = ("validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled")
  times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
  return _object(
    id=_TEXT,
    object={"const": "batch"},
    endpoint=_TEXT,
    errors=_or_null(_object(object={"const": "list"}, data=_list(problem))),
    input_file_id=_TEXT,
    completion_window=_TEXT,
    status={"enum": [*states]},
    output_file_id=text,
    error_file_id=text,
    created_at=time,
    expires_at=time,
    **{f"{name}_at": _or_null(time) for name in times},
    request_counts=_object(total=_whole(0), completed=_whole(0), failed=_whole(0)),
    metadata=_or_null(_OBJECT),
  )


def _embedding() -> dict[str, Any]:
  return {"anyOf": [_list({"type": "number"}, 1), _said(_TEXT, "base64 of little-endian float32.")]}


# Kinds of bodies, in the order of the reference page.
BODIES = (
  CompletionRequest,
  ChatCompletionRequest,
  MessageRequest,
  CountTokensRequest,
  ResponseRequest,
  EmbeddingRequest,
  ClassifyRequest,
  ScoreRequest,
  RerankRequest,
  LoadAdapterRequest,
  UnloadAdapterRequest,
  TokenizeText,
  TokenizeChat,
  DetokenizeRequest,
)
_STREAM = "With stream: a chunk an event, and [DONE] at the end; an event with an error object ends it instead."
_MESSAGE_STREAM = "With stream: events from message_start to message_stop; an error event ends it instead."
_RESPONSE_STREAM = "With stream: typed events from response.created to response.completed, incomplete or failed."
_CONTENT = _said(_TEXT, "As it was stored.")
_UPLOAD = _object(purpose={"const": "batch"}, file={"type": "string", "format": "binary"})
_LIMITED: dict[str, Any] = {"after": _said(_TEXT, "The last id of the page before."), "limit": _whole(1, 10_000)}
# Of GET.
_QUERIES = {
  "/v1/files": _LIMITED | {"purpose": _TEXT, "order": {"enum": ["asc", "desc"]}},
  "/v1/batches": _LIMITED | {"limit": _whole(1, 100)},
}
# Path, method, kinds of body, schema of the response (a name in _schemas, or the schema itself), and summary.
_OPERATIONS: tuple[tuple[str, str, tuple[type[msgspec.Struct], ...], str | dict[str, Any], str], ...] = (
  ("/v1/models", "get", (), "Models", "The served model and its LoRA adapters."),
  ("/v1/models/{model}", "get", (), "Model", "One of them, by its name."),
  ("/v1/completions", "post", (CompletionRequest,), "Completion", "Text after each prompt."),
  ("/v1/chat/completions", "post", (ChatCompletionRequest,), "ChatCompletion", "The next turn of a chat."),
  ("/v1/messages", "post", (MessageRequest,), "Message", "The next turn of a chat, in Anthropic's form."),
  ("/v1/messages/count_tokens", "post", (CountTokensRequest,), "TokenCount", "The tokens of its prompt."),
  ("/v1/responses", "post", (ResponseRequest,), "Response", "The next turn of a chat, as items."),
  ("/v1/responses/input_tokens", "post", (ResponseRequest,), "InputTokens", "The tokens of its prompt."),
  ("/v1/responses/{response_id}/cancel", "post", (), "Response", "Ends a response in the making."),
  ("/v1/responses/{response_id}/input_items", "get", (), "InputItems", "The items of a stored response's prompt."),
  ("/v1/responses/{response_id}", "get", (), "Response", "A stored response."),
  ("/v1/responses/{response_id}", "delete", (), "DeletedResponse", "Forgets a stored response."),
  ("/v1/embeddings", "post", (EmbeddingRequest,), "Embeddings", "One embedding for each input."),
  ("/classify", "post", (ClassifyRequest,), "Classes", "Classes of texts, by a model with a head of classes."),
  ("/v1/score", "post", (ScoreRequest,), "Scores", "Scores of pairs of texts, by cosine or by a head of one class."),
  ("/v1/rerank", "post", (RerankRequest,), "Ranking", "Documents by their score with the query."),
  ("/v1/files", "get", (), "Files", "The caller's files. Files and batches need --batch_dir."),
  ("/v1/files", "post", (), "File", "Stores a file of requests, sent as multipart/form-data."),
  ("/v1/files/{id}", "get", (), "File", "A stored file."),
  ("/v1/files/{id}", "delete", (), "DeletedFile", "Deletes a file."),
  ("/v1/files/{id}/content", "get", (), _CONTENT, "A file's bytes."),
  ("/v1/batches", "get", (), "Batches", "The caller's batches."),
  ("/v1/batches", "post", (BatchRequest,), "Batch", "Starts to run a file of requests."),
  ("/v1/batches/{id}", "get", (), "Batch", "A batch."),
  ("/v1/batches/{id}/cancel", "post", (), "Batch", "Ends a batch, which keeps the results that it has."),
  (
    "/v1/load_lora_adapter",
    "post",
    (LoadAdapterRequest,),
    _TEXT,
    "Loads a LoRA adapter, with a key of an administrator.",
  ),
  ("/v1/unload_lora_adapter", "post", (UnloadAdapterRequest,), _TEXT, "Unloads one, with such a key."),
  ("/tokenize", "post", (TokenizeText, TokenizeChat), "Tokens", "Token ids of a text or a chat."),
  ("/detokenize", "post", (DetokenizeRequest,), "Detokenized", "The text of token ids."),
  ("/tokenizer_info", "get", (), "TokenizerInfo", "What a harness needs to know of the tokenizer."),
  ("/version", "get", (), _object(version=_TEXT), "The server's version."),
  ("/health", "get", (), _OBJECT, "200 while the process need not be killed, else 503."),
  ("/ready", "get", (), _OBJECT, "200 while requests can be sent here, else 503."),
)


def _operation(
  path: str, method: str, bodies: Sequence[type[msgspec.Struct]], answer: str | dict[str, Any], text: str
) -> dict[str, Any]:
  schema = _ref(answer) if isinstance(answer, str) else answer
  said: dict[str, Any] = {"application/octet-stream" if answer is _CONTENT else "application/json": {"schema": schema}}
  if any(issubclass(body, GenerationFields) for body in bodies):
    said["text/event-stream"] = {"schema": _said(_TEXT, _STREAM)}
  if MessageRequest in bodies:
    said["text/event-stream"] = {"schema": _said(_TEXT, _MESSAGE_STREAM)}
  if ResponseRequest in bodies:
    said["text/event-stream"] = {"schema": _said(_TEXT, _RESPONSE_STREAM)}
  error = _ref("MessageError" if path.startswith("/v1/messages") else "Error")
  if path in ("/health", "/ready"):
    error = _OBJECT
  operation: dict[str, Any] = {
    "summary": text,
    "responses": {
      "200": {"description": "The requested response.", "content": said},
      "default": {"description": "An error.", "content": {"application/json": {"schema": error}}},
    },
  }
  if bodies:
    refs = [_ref(body.__name__) for body in bodies]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
  if (path, method) == ("/v1/files", "post"):
    operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}
  if names := re.findall(r"{(\w+)}", path):
    operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
  if method == "get" and path in _QUERIES:
    operation["parameters"] = [
      {"name": name, "in": "query", "required": False, "schema": schema} for name, schema in _QUERIES[path].items()
    ]
  if path in ("/health", "/ready"):
    operation["security"] = []
  return operation


@functools.cache
def document(version: str) -> dict[str, Any]:
  """Returns the document for this server version."""
  paths: dict[str, Any] = {}
  for path, method, bodies, answer, text in _OPERATIONS:
    paths.setdefault(path, {})[method] = _operation(path, method, bodies, answer, text)
  return {
    "openapi": "3.1.0",
    "info": {"title": "Sluice", "version": version, "description": _ABOUT},
    "paths": paths,
    "components": {
      "schemas": _schemas(),
      "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    },
    # Only where the server requires keys.
    "security": [{"key": []}, {}],
  }
