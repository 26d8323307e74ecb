"""Serves Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens."""

import secrets

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.config import EngineConfig
from engine.errors import EngineError, RequestTooLong
from server.generation import request_validation
from server.generation.serving_state import ServingState
from server.http.http_options import HttpOptions
from server.http.json_exchange import read_json_object
from server.http.messages.message_reply import MessageReply
from server.http.messages.message_translation import translate_message, translate_prompt
from server.http.openai.chat_messages import read_chat
from server.http.openai.chat_pipeline import ChatPipeline
from server.http.openai.generate_request import judge_ignored, read_fields
from server.http.openai.generation_responder import GenerationResponder
from server.http.openai.request_fields import TokenizeChat


class MessageEndpoints:
  """Both endpoints. Headers such as anthropic-version and anthropic-beta have no effect."""

  def __init__(self, state: ServingState, options: HttpOptions):
    self._state = state
    self._options = options
    self._pipeline = ChatPipeline(state, options)
    self._responder = GenerationResponder(state, options)

  async def create(self, request: Request) -> Response:
    """POST /v1/messages."""
    with self._state.admit() as backend:
      values = await read_json_object(request, self._state, self._options)
      translated = translate_message(values)
      request.state.field_names |= translated.field_names
      if not self._pipeline.may_reason(backend) and translated.body.pop("thinking_token_budget", None) is not None:
        translated.ignored.append("thinking.budget_tokens")
      try:
        chat = await self._pipeline.prepare_chat(request, backend, translated.body)
      except EngineError as error:
        error.field = translated.name_field(error.field)
        raise
      request.state.field_names |= translated.name_constraint(request.state.field_names)
      requested, fields = chat.requested, translated.fields
      requested.ignored = translated.name_ignored(requested.ignored)
      num_tokens = len(chat.prompt.token_ids)
      _check_length(backend.config, num_tokens, fields.max_tokens)
      answer_id = f"msg_{secrets.token_hex(12)}"
      reply = MessageReply(
        answer_id,
        requested.adapter or backend.model,
        num_tokens,
        chat.make_parser(),
        request.state.notes,
        shows_thinking=fields.thinking is None or fields.thinking.display != "omitted",
      )
      return await self._responder.respond(request, backend, requested, [chat.prompt], reply, answer_id)

  async def count_tokens(self, request: Request) -> Response:
    """POST /v1/messages/count_tokens: the tokens of the same message's prompt."""
    backend = self._state.require_backend()
    values = await read_json_object(request, self._state, self._options)
    translated = translate_prompt(values)
    request.state.field_names |= translated.field_names
    fields, _ = read_fields(translated.body, TokenizeChat)
    chat = read_chat(translated.body, fields)
    backend.find_adapter(fields.model)
    tokenizer = request_validation.need_tokenizer(backend.tokenizer, "messages")
    ignored = translated.name_ignored(chat.ignored(tokenizer))
    headers = judge_ignored(ignored, strict=self._options.strict_requests)
    token_ids = await self._state.run_in_text_pool(lambda: chat.token_ids(tokenizer))
    return JSONResponse({"input_tokens": len(token_ids)}, headers=headers)


def _check_length(config: EngineConfig, num_tokens: int, max_tokens: int) -> None:
  """Raises RequestTooLong in Anthropic's words, by which clients shorten a chat or lower max_tokens."""
  limit = min(config.max_model_len, config.pool_tokens)
  if num_tokens >= limit:
    raise RequestTooLong(
      f"is too long: {num_tokens} tokens > {limit - 1} maximum; shorten it, or serve with a larger --max_model_len",
      field="prompt",
    )
  if num_tokens + max_tokens > limit:
    raise RequestTooLong(
      f"input length and `max_tokens` exceed context limit: {num_tokens} + {max_tokens} > {limit}, decrease input "
      "length or `max_tokens` and try again"
    )
