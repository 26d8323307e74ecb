"""Serves /v1/responses: creates responses over the chat pipeline, and keeps them for later requests."""

import functools
import secrets
from typing import Any
import weakref

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.errors import InvalidRequest
from server.generation.response_store import KeptResponses, LocalResponses, ResponseStore, StoredResponse
from server.generation.serving_state import Backend, ServingState
from server.http.error_responses import Refused, UnsupportedField
from server.http.http_options import HttpOptions
from server.http.json_exchange import read_json_object
from server.http.openai.chat_pipeline import ChatPipeline, PreparedChat
from server.http.openai.generate_request import judge_ignored, read_fields
from server.http.openai.generation_responder import GenerationResponder
from server.http.responses.chat_translation import TranslatedChat, list_references, translate_response
from server.http.responses.response_fields import ResponseRequest
from server.http.responses.response_reply import ResponseReply, describe_request

_MAX_LISTED, _NUM_LISTED = 100, 20
_NO_STORE = "this server stores no responses, by --max_stored_responses=0"


class ResponseEndpoints:
  """The endpoints of responses."""

  def __init__(self, state: ServingState, options: HttpOptions):
    self._state = state
    self._options = options
    self._pipeline = ChatPipeline(state, options)
    self._responder = GenerationResponder(state, options)
    self._max_stored = options.max_stored_responses
    self._own = LocalResponses(ResponseStore(self._max_stored))
    # Responses in the making, by owner and id; one leaves when its request has ended.
    self._running: weakref.WeakValueDictionary[tuple[str, str], ResponseReply] = weakref.WeakValueDictionary()

  async def create(self, request: Request) -> Response:
    """POST /v1/responses."""
    owner = request.state.tenant
    with self._state.admit() as backend:
      values = await read_json_object(request, self._state, self._options)
      fields, ignored = read_fields(values, ResponseRequest)
      if fields.store and not self._max_stored:
        raise UnsupportedField(f"=true is not supported: {_NO_STORE}; leave it out", field="store")
      is_stored = fields.store is not False and self._max_stored > 0
      translated, chat = await self._prepare(request, backend, values, fields, ignored)
      response_id = f"resp_{secrets.token_hex(24)}"
      model = chat.requested.adapter or backend.model
      reply = ResponseReply(
        describe_request(response_id, model, values, fields, backend.defaults, is_stored=is_stored),
        len(chat.prompt.token_ids),
        translated.tools,
        chat.make_parser(),
        chat.tokenizer,
        request.state.notes,
        functools.partial(self._keep, backend, owner, translated),
      )
      self._running[owner, response_id] = reply
      answer = await self._responder.respond(request, backend, chat.requested, [chat.prompt], reply, response_id)
      if not fields.stream:
        await self._keep(backend, owner, translated, reply.response)
      return answer

  async def count_input_tokens(self, request: Request) -> Response:
    """POST /v1/responses/input_tokens: the tokens of the same response's prompt, also of one that is too long."""
    with self._state.admit() as backend:
      values = await read_json_object(request, self._state, self._options)
      fields, ignored = read_fields(values, ResponseRequest)
      fields.max_output_tokens = 1
      _, chat = await self._prepare(request, backend, values, fields, ignored)
      headers = judge_ignored(chat.requested.ignored, strict=self._options.strict_requests)
      counted = {"object": "response.input_tokens", "input_tokens": len(chat.prompt.token_ids)}
      return JSONResponse(counted, headers=headers)

  async def retrieve(self, request: Request) -> Response:
    """GET /v1/responses/ID."""
    for name in ("stream", "starting_after"):
      if request.query_params.get(name, "false") != "false":
        raise UnsupportedField("is not supported: a stored response is returned whole; leave it out", field=name)
    running = self._running.get(_key_of(request))
    if running is not None and running.response["status"] == "in_progress" and running.response["store"]:
      return JSONResponse(running.response)
    stored = await self._find(request)
    return Response(stored.response, media_type="application/json")

  async def delete(self, request: Request) -> Response:
    """DELETE /v1/responses/ID."""
    owner, response_id = _key_of(request)
    await self._find(request)
    await self._responses().remove_response(owner, response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})

  async def list_input_items(self, request: Request) -> Response:
    """GET /v1/responses/ID/input_items: the items of the prompt, the newest first."""
    order, limit = request.query_params.get("order", "desc"), request.query_params.get("limit", str(_NUM_LISTED))
    if order not in ("asc", "desc"):
      raise InvalidRequest("is not one that exists: send asc or desc", field="order")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= _MAX_LISTED):
      raise InvalidRequest(f"is not allowed: send 1 to {_MAX_LISTED}", field="limit")
    items = (await self._find(request)).read_context()
    if order == "desc":
      items.reverse()
    after = request.query_params.get("after")
    if after is not None:
      place = next((place for place, item in enumerate(items) if item["id"] == after), None)
      if place is None:
        raise InvalidRequest("is not the id of an item of this response: send one of the list", field="after")
      items = items[place + 1 :]
    listed = items[: int(limit)]
    return JSONResponse(
      {
        "object": "list",
        "data": listed,
        "first_id": listed[0]["id"] if listed else "",
        "last_id": listed[-1]["id"] if listed else "",
        "has_more": len(items) > len(listed),
      }
    )

  async def cancel(self, request: Request) -> Response:
    """POST /v1/responses/ID/cancel."""
    owner, response_id = _key_of(request)
    reply = self._running.get((owner, response_id))
    backend = self._state.require_backend()
    if reply is not None and backend.generations.abort_generation(response_id, owner):
      return JSONResponse({**reply.response, "status": "cancelled"})
    [is_cancelled] = await backend.engine.abort_elsewhere(owner, [response_id])
    if is_cancelled:  # the process that generates it has the rest
      return JSONResponse({"id": response_id, "object": "response", "status": "cancelled", "output": []})
    await self._find(request)
    raise Refused(400, "the response has ended, so it cannot be cancelled; leave it, or delete it")

  async def _prepare(
    self,
    request: Request,
    backend: Backend,
    values: dict[str, Any],
    fields: ResponseRequest,
    ignored: list[str],
  ) -> tuple[TranslatedChat, PreparedChat]:
    """Translates a body and prepares its chat, whose errors then have the caller's names of fields."""
    owner = request.state.tenant
    earlier: list[dict[str, Any]] = []
    if fields.previous_response_id is not None:
      previous = await self._responses().find_response(owner, fields.previous_response_id)
      if previous is None:
        problem = "is not the id of a stored response" if self._max_stored else f"is not supported, since {_NO_STORE}"
        raise InvalidRequest(f"{problem}: send all items in input", field="previous_response_id")
      earlier = previous.read_context() + previous.read_response()["output"]
    wanted = list_references(fields)
    known = await self._responses().find_items(owner, wanted) if wanted else {}
    items = {item_id: msgspec.json.decode(item) for item_id, item in known.items()}
    translated = translate_response(values, fields, earlier, items)
    try:
      chat = await self._pipeline.prepare_chat(request, backend, translated.body)
    except InvalidRequest as error:
      if error.field not in translated.names:  # or the guard names it
        error.field = translated.name_field(error.field)
      raise
    finally:
      names = translated.names
      known_names = {name: translated.name_field(own) for name, own in request.state.field_names.items()}
      request.state.field_names = names | known_names
    chat.requested.ignored = ignored + [*map(translated.name_field, chat.requested.ignored), *translated.ignored]
    return translated, chat

  def _responses(self, backend: Backend | None = None) -> KeptResponses:
    """Returns the stored responses: those of all front end processes, or this one's own."""
    return (backend or self._state.require_backend()).engine.responses or self._own

  async def _keep(self, backend: Backend, owner: str, translated: TranslatedChat, response: dict[str, Any]) -> None:
    if response["store"]:
      await self._responses(backend).put_response(owner, StoredResponse.of_response(response, translated.items))

  async def _find(self, request: Request) -> StoredResponse:
    owner, response_id = _key_of(request)
    stored = await self._responses().find_response(owner, response_id)
    if stored is None:
      raise Refused(
        404,
        "there is no stored response of this id"
        + (f": {_NO_STORE}" if not self._max_stored else "; it may have been the oldest of too many"),
        code="response_not_found",
      )
    return stored


def _key_of(request: Request) -> tuple[str, str]:
  return request.state.tenant, request.path_params["response_id"]
