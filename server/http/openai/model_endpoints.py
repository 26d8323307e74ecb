"""The small endpoints: which model is served, and its tokenizer over HTTP. Starts no generation."""

from collections.abc import Sequence
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.errors import InvalidRequest
from server.generation import request_validation
from server.generation.serving_state import Backend, ServingState
from server.http.http_options import HttpOptions
from server.http.json_exchange import JSONAnswer, read_json_object
from server.http.json_fields import Fields
from server.http.openai.chat_messages import read_chat
from server.http.openai.completion_replies import TokenNames
from server.http.openai.shared_fields import ignored_header, refuse_unknown
from server.proto import sluice_pb2 as pb


class ModelEndpoints:
  """/v1/models, and /tokenize, /detokenize and /tokenizer_info as vLLM has them."""

  def __init__(self, state: ServingState, options: HttpOptions):
    self._state = state
    self._options = options
    self._created = int(time.time())

  async def models(self, request: Request) -> Response:
    """GET /v1/models."""
    return JSONAnswer({"object": "list", "data": [self._model(self._state.require_backend())]})

  async def model(self, request: Request) -> Response:
    """GET /v1/models/NAME."""
    backend = self._state.require_backend()
    request_validation.check_model_name(request.path_params["model"], backend.model)
    return JSONAnswer(self._model(backend))

  def _model(self, backend: Backend) -> dict[str, Any]:
    return {
      "id": backend.model,
      "object": "model",
      "created": self._created,
      "owned_by": "sluice",
      "max_model_len": backend.config.max_model_len,
    }

  async def tokenizer_info(self, request: Request) -> Response:
    """GET /tokenizer_info: what a harness needs to know of a tokenizer that it has not got."""
    backend = self._state.require_backend()
    tokenizer = request_validation.need_tokenizer(backend.tokenizer, "tokenizer_info")
    return JSONAnswer(
      {
        **tokenizer.special_tokens,
        "vocab_size": tokenizer.vocab_size,
        "chat_template": tokenizer.chat_template,
        "model_max_length": backend.config.max_model_len,
      }
    )

  async def tokenize(self, request: Request) -> Response:
    """POST /tokenize: {"prompt"} or {"messages"} -> {"tokens", "count", "max_model_len"}."""
    backend, fields = await self._begin(request)
    prompt, wants_names = fields.text("prompt"), bool(fields.flag("return_token_strs"))
    if prompt is not None:
      add_special_tokens = fields.flag("add_special_tokens")
      headers = self._judge_unknown(fields)
      wanted = pb.TokenizeRequest(text=prompt, add_special_tokens=add_special_tokens)
      token_ids = await self._state.run_in_text_pool(
        lambda: request_validation.prompt_token_ids(wanted, backend.tokenizer)
      )
    else:
      chat = read_chat(fields)
      tokenizer = request_validation.need_tokenizer(backend.tokenizer, "messages")
      headers = self._judge_unknown(fields, chat.ignored(tokenizer))
      token_ids = await self._state.run_in_text_pool(lambda: chat.token_ids(tokenizer))
    said: dict[str, Any] = {
      "tokens": token_ids,
      "count": len(token_ids),
      "max_model_len": backend.config.max_model_len,
    }
    if wants_names:
      names = TokenNames(backend.tokenizer, as_ids=False)
      said["token_strs"] = [names.name(token_id) for token_id in token_ids]
    return JSONAnswer(said, headers=headers)

  async def detokenize(self, request: Request) -> Response:
    """POST /detokenize: {"tokens"} -> {"prompt"}."""
    backend, fields = await self._begin(request)
    token_ids = fields.list_of("tokens", int, "token ids")
    if token_ids is None:
      raise InvalidRequest("is missing: send a list of token ids", field="tokens")
    tokenizer = request_validation.need_tokenizer(backend.tokenizer, "tokens")
    request_validation.check_token_ids("tokens", token_ids, backend.config.vocab_size)
    # vLLM keeps special tokens here, so that a prompt comes back as it was.
    skip = bool(fields.flag("skip_special_tokens"))
    headers = self._judge_unknown(fields)
    text = await self._state.run_in_text_pool(lambda: tokenizer.decode(token_ids, skip_special_tokens=skip))
    return JSONAnswer({"prompt": text}, headers=headers)

  def _judge_unknown(self, fields: Fields, ignored: Sequence[str] = ()) -> dict[str, str]:
    """What is left of the fields when all are taken: refused under --strict_requests, else named in a header."""
    unknown = [*fields.unknown(), *ignored]
    if self._options.strict_requests:
      refuse_unknown(unknown)
    return ignored_header(unknown)

  async def _begin(self, request: Request) -> tuple[Backend, Fields]:
    backend = self._state.require_backend()
    options = self._options
    values = await read_json_object(
      request, self._state, max_bytes=options.max_body_bytes, timeout_s=options.body_timeout_s
    )
    fields = Fields(values)
    request_validation.check_model_name(fields.text("model") or "", backend.model)
    return backend, fields
