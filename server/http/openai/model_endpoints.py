"""Serves the model list and the tokenizer over HTTP. Starts no generation."""

import functools
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.adapters import AdapterInfo
from server.generation import request_validation
from server.generation.serving_state import Backend, ServingState
from server.http.http_options import HttpOptions
from server.http.json_exchange import read_json_object
from server.http.json_fields import convert_fields
from server.http.openai.chat_messages import read_chat
from server.http.openai.completion_replies import TokenNames
from server.http.openai.generate_request import judge_ignored, read_fields
from server.http.openai.request_fields import DetokenizeRequest, RequestFields, TokenizeChat, TokenizeText
from server.proto import sluice_pb2 as pb


class ModelEndpoints:
  """/v1/models, and vLLM's /tokenize, /detokenize and /tokenizer_info."""

  def __init__(self, state: ServingState, options: HttpOptions):
    self._state = state
    self._options = options
    self._created = int(time.time())

  async def models(self, request: Request) -> Response:
    """GET /v1/models."""
    backend = self._state.require_backend()
    adapters = [self._adapter(backend, adapter) for adapter in backend.engine.adapters()]
    return JSONResponse({"object": "list", "data": [self._model(backend), *adapters]})

  async def model(self, request: Request) -> Response:
    """GET /v1/models/NAME."""
    backend = self._state.require_backend()
    name = backend.find_adapter(request.path_params["model"])
    adapter = next((adapter for adapter in backend.engine.adapters() if adapter.name == name), None)
    return JSONResponse(self._model(backend) if adapter is None else self._adapter(backend, adapter))

  def _model(self, backend: Backend) -> dict[str, Any]:
    return {
      "id": backend.model,
      "object": "model",
      "created": self._created,
      "owned_by": "sluice",
      "root": backend.model,
      "parent": None,
      "max_model_len": backend.config.max_model_len,
    }

  def _adapter(self, backend: Backend, adapter: AdapterInfo) -> dict[str, Any]:
    return self._model(backend) | {"id": adapter.name, "root": adapter.path, "parent": backend.model}

  async def tokenizer_info(self, request: Request) -> Response:
    """GET /tokenizer_info: what an evaluation harness without the tokenizer needs to know."""
    backend = self._state.require_backend()
    tokenizer = request_validation.need_tokenizer(backend.tokenizer, "tokenizer_info")
    return JSONResponse(
      {
        **tokenizer.special_tokens,
        "vocab_size": tokenizer.vocab_size,
        "chat_template": tokenizer.chat_template,
        "model_max_length": backend.config.max_model_len,
      }
    )

  async def tokenize(self, request: Request) -> Response:
    """POST /tokenize: {"prompt"} or {"messages"} -> {"tokens", "count", "max_model_len"}."""
    backend, values = await self._begin(request)
    if values.get("prompt") is not None:
      fields, ignored = read_fields(values, TokenizeText)
      wanted = pb.TokenizeRequest(text=fields.prompt, add_special_tokens=fields.add_special_tokens)
      make_ids = functools.partial(request_validation.prompt_token_ids, wanted, backend.tokenizer)
    else:
      fields, ignored = read_fields(values, TokenizeChat)
      chat = read_chat(values, fields)
      tokenizer = request_validation.need_tokenizer(backend.tokenizer, "messages")
      ignored += chat.ignored(tokenizer)
      make_ids = functools.partial(chat.token_ids, tokenizer)
    headers = judge_ignored(ignored, strict=self._options.strict_requests)
    token_ids = await self._state.run_in_text_pool(make_ids)
    said: dict[str, Any] = {
      "tokens": token_ids,
      "count": len(token_ids),
      "max_model_len": backend.config.max_model_len,
    }
    if fields.return_token_strs:
      names = TokenNames(backend.tokenizer, as_ids=False)
      said["token_strs"] = [names.name(token_id) for token_id in token_ids]
    return JSONResponse(said, headers=headers)

  async def detokenize(self, request: Request) -> Response:
    """POST /detokenize: {"tokens"} -> {"prompt"}."""
    backend, values = await self._begin(request)
    fields, ignored = read_fields(values, DetokenizeRequest)
    tokenizer = request_validation.need_tokenizer(backend.tokenizer, "tokens")
    request_validation.check_token_ids("tokens", fields.tokens, backend.config.vocab_size)
    headers = judge_ignored(ignored, strict=self._options.strict_requests)
    # vLLM keeps special tokens here, so that a prompt round-trips.
    skip = bool(fields.skip_special_tokens)
    text = await self._state.run_in_text_pool(lambda: tokenizer.decode(fields.tokens, skip_special_tokens=skip))
    return JSONResponse({"prompt": text}, headers=headers)

  async def _begin(self, request: Request) -> tuple[Backend, dict[str, Any]]:
    backend = self._state.require_backend()
    values = await read_json_object(request, self._state, self._options)
    backend.find_adapter(convert_fields(values, RequestFields).model)
    return backend, values
