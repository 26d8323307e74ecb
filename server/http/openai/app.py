"""The HTTP application: its routes, and the guard around them. Knows no socket.

Every request passes the guard first: request id, credentials, Host header, concurrent requests, header sizes. The guard
also turns every error into the error object of the path's API, never into Python's text.
"""

from collections.abc import Sequence
import email.utils
import re
import secrets
import time

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import Overloaded
from server.errors import PermissionDenied
from server.generation.prefill_hint import keep_prefill_server
from server.generation.serving_state import ServingState
from server.http.embeddings.embedding_endpoints import EmbeddingEndpoints
from server.http.error_responses import OPENAI_ERRORS, Refused, make_error_answer
from server.http.host_names import find_allowed_hosts, read_host_name
from server.http.http_options import HttpOptions
from server.http.json_exchange import ClientGone
from server.http.messages.message_endpoints import MessageEndpoints
from server.http.messages.message_errors import MESSAGES_ERRORS
from server.http.openai import openapi
from server.http.openai.adapter_endpoints import ADMIN_PATHS, AdapterEndpoints
from server.http.openai.completions import CompletionEndpoints
from server.http.openai.model_endpoints import ModelEndpoints
from server.http.responses.response_endpoints import ResponseEndpoints
from server.security.api_keys import AdminKeys, ApiKeys
from server.telemetry import tracing
from server.telemetry.access_log import AccessLog
from server.version import server_version

# Paths that need no key, since probes have none.
PROBES = ("/health", "/ready")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# nginx's status for a client that did not wait for its response; only the access log shows it.
_CLIENT_GONE = 499
# By the beginning of a path; other paths have OpenAI's.
_ERROR_FORMS = {"/v1/messages/": MESSAGES_ERRORS}
_CHAT_PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "POST")
# Headers of responses that scripts of allowed origins may read.
_EXPOSED = ("request-id", "retry-after", "retry-after-ms", "x-request-id", "x-should-retry", "x-sluice-ignored-fields")


def make_app(
  state: ServingState,
  options: HttpOptions,
  *,
  api_keys: ApiKeys | None = None,
  admin_keys: AdminKeys | None = None,
  access_log: AccessLog | None = None,
  extra_routes: Sequence[BaseRoute] = (),
  public_paths: Sequence[str] = (),
) -> ASGIApp:
  """Makes the application.

  Args:
    state: admits requests, for gRPC too.
    options: limits.
    api_keys: the accepted keys; None accepts every caller.
    admin_keys: the accepted keys of paths for administrators; None refuses every caller there.
    access_log: receives a line for each request except health checks.
    extra_routes: routes of other pages, behind the same guard.
    public_paths: paths of those routes that need no key.
  """
  endpoints, texts = CompletionEndpoints(state, options), ModelEndpoints(state, options)
  messages, responses = MessageEndpoints(state, options), ResponseEndpoints(state, options)
  embeddings, adapters = EmbeddingEndpoints(state, options), AdapterEndpoints(state, options)
  routes = [
    *_probes(state),
    Route("/v1/models", texts.models),
    Route("/v1/models/{model:path}", texts.model),
    Route("/v1/completions", endpoints.completions, methods=["POST"]),
    Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
    Route("/v1/messages", messages.create, methods=["POST"]),
    Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
    Route("/v1/responses", responses.create, methods=["POST"]),
    Route("/v1/responses/input_tokens", responses.count_input_tokens, methods=["POST"]),
    Route("/v1/responses/{response_id}", responses.retrieve),
    Route("/v1/responses/{response_id}", responses.delete, methods=["DELETE"]),
    Route("/v1/responses/{response_id}/input_items", responses.list_input_items),
    Route("/v1/responses/{response_id}/cancel", responses.cancel, methods=["POST"]),
    Route("/v1/embeddings", embeddings.embeddings, methods=["POST"]),
    *(Route(path, embeddings.classify, methods=["POST"]) for path in ("/v1/classify", "/classify")),
    *(Route(path, embeddings.score, methods=["POST"]) for path in ("/v1/score", "/score")),
    *(Route(path, embeddings.rerank, methods=["POST"]) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
    *(Route(path, handler, methods=["POST"]) for path, handler in adapters.handlers().items()),
    Route("/tokenize", texts.tokenize, methods=["POST"]),
    Route("/tokenizer_info", texts.tokenizer_info),
    Route("/detokenize", texts.detokenize, methods=["POST"]),
    Route(openapi.PATH, _openapi),
    *extra_routes,
  ]
  public = frozenset((*PROBES, openapi.PATH, *public_paths))
  guard = _Guard(_make_router(routes), options, api_keys, admin_keys, access_log, public)
  if not options.allowed_origins:
    return guard
  # Around the guard: a browser's preflight has no credentials, and errors need these headers too.
  return CORSMiddleware(
    guard,
    allow_origins=options.allowed_origins,
    allow_methods=_METHODS,
    allow_headers=("*",),
    allow_private_network=True,
    expose_headers=_EXPOSED,
  )


def make_probe_app(
  state: ServingState,
  options: HttpOptions,
  *,
  access_log: AccessLog | None = None,
  extra_routes: Sequence[BaseRoute] = (),
) -> ASGIApp:
  """Makes an application of health checks and `extra_routes`, behind the guard without keys. It serves no texts."""
  return _Guard(_make_router([*_probes(state), *extra_routes]), options, None, None, access_log, frozenset(PROBES))


def _make_router(routes: Sequence[BaseRoute]) -> Router:
  """Returns the router, which names the served paths where there is no such path."""
  served = sorted({route.path.replace(":path}", "}") for route in routes if isinstance(route, Route)})

  async def refuse_path(scope: Scope, receive: Receive, send: Send) -> None:
    raise Refused(404, f"there is no such path here; served are {', '.join(served)}")

  return Router(routes, redirect_slashes=False, default=refuse_path)


def _probes(state: ServingState) -> list[Route]:
  async def health(request: Request) -> Response:
    """Liveness: whether the process may go on; true also while loading and draining."""
    return JSONResponse({"status": "ok" if state.alive else "dead"}, 200 if state.alive else 503)

  async def ready(request: Request) -> Response:
    """Readiness: whether the server accepts requests."""
    return JSONResponse({"ready": state.ready}, 200 if state.ready else 503)

  async def version(request: Request) -> Response:
    return JSONResponse({"version": server_version()})

  return [Route("/health", health), Route("/ready", ready), Route("/version", version)]


async def _openapi(request: Request) -> Response:
  return JSONResponse(openapi.document(server_version()))


class _Guard:
  """ASGI middleware; see the module."""

  def __init__(
    self,
    app: ASGIApp,
    options: HttpOptions,
    api_keys: ApiKeys | None,
    admin_keys: AdminKeys | None,
    access_log: AccessLog | None,
    public_paths: frozenset[str],
  ):
    self._app = app
    self._options = options
    self._api_keys = api_keys
    self._admin_keys = admin_keys
    self._access_log = access_log
    self._public_paths = public_paths
    self._allowed_hosts = find_allowed_hosts(options, has_keys=api_keys is not None)
    self._num_requests = 0

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    assert scope["type"] == "http", "neither WebSocket nor lifespan is switched on"
    headers = Headers(scope=scope)
    if scope["path"] != "/":
      scope["path"] = scope["path"].removesuffix("/")  # /v1/models/ is /v1/models
    request_id = headers.get("x-request-id", "")
    if not _REQUEST_ID.fullmatch(request_id):
      request_id = f"req-{secrets.token_hex(16)}"
    state = scope.setdefault("state", {})
    form = next((form for path, form in _ERROR_FORMS.items() if f"{scope['path']}/".startswith(path)), OPENAI_ERRORS)
    state.update(tenant="", notes={}, field_names={}, request_id=request_id, error_form=form)
    keep_prefill_server(headers)
    tracing.keep_trace_parent(headers, tracing.CHAT if scope["path"] in _CHAT_PATHS else tracing.TEXT_COMPLETION)
    started = time.monotonic()
    status, code = 0, None

    async def send_more(message: Message) -> None:
      nonlocal status
      if message["type"] == "http.response.start":
        status = message["status"]
        message["headers"] = [
          *message.get("headers", ()),
          (b"x-request-id", request_id.encode()),
          *(((form.id_header, request_id.encode()),) if form.id_header else ()),
          (b"x-content-type-options", b"nosniff"),
          (b"date", email.utils.formatdate(usegmt=True).encode()),
        ]
      await send(message)

    scope["app"] = self  # makes the router raise 404 and 405 instead of answering them
    is_probe = scope["path"] in PROBES
    self._num_requests += not is_probe
    try:
      self._check(scope, headers)
      await self._app(scope, receive, send_more)
    except ClientGone:
      status = _CLIENT_GONE
    except Exception as error:
      said = make_error_answer(error, state["field_names"])
      code = said.body["error"]["code"]
      if not status:
        await JSONResponse(form.make_body(said, request_id), said.status, said.headers)(scope, receive, send_more)
      elif "abort" in state:
        state["abort"]()  # a partial response must not look complete
    finally:
      self._num_requests -= not is_probe
      if self._access_log is not None and not is_probe:
        self._access_log.write(
          request_id=request_id,
          method=f"{scope['method']} {scope['path']}",
          peer=":".join(map(str, scope["client"] or ())),
          tenant=state["tenant"] or None,
          code=status or _CLIENT_GONE,
          reason=code,
          duration_s=round(time.monotonic() - started, 6),
          **state["notes"],
        )

  def _check(self, scope: Scope, headers: Headers) -> None:
    options = self._options
    size = len(scope["raw_path"]) + len(scope["query_string"])
    size += sum(len(name) + len(value) for name, value in headers.raw)
    most = options.max_header_bytes
    if size > most:
      raise Refused(431, f"the request line and the headers have {size} bytes, the limit is {most}: send fewer")
    if scope["http_version"] not in ("1.0", "1.1"):
      raise Refused(505, "this is not a version of HTTP that is spoken here; send HTTP/1.1")
    host, path = headers.get("host", ""), scope["path"]
    if path in PROBES:
      return
    if self._allowed_hosts is not None and read_host_name(host) not in self._allowed_hosts:
      raise Refused(
        403,
        f"the Host header {host!r:.80} is not one of this server's names; call it as 127.0.0.1 or localhost, or name "
        "the host in --http_allowed_hosts",
        code="host_not_allowed",
      )
    if self._api_keys is None and headers.get("content-type", "").startswith("multipart/"):
      self._check_origin(headers)
    keys = self._admin_keys if path in ADMIN_PATHS else self._api_keys
    if path in ADMIN_PATHS and keys is None:
      raise PermissionDenied(
        f"{path} is for administrators: serve with --enable_lora and --admin_api_key_file=FILE, and send a key of it"
      )
    if keys is not None and path not in self._public_paths:
      scope["state"]["tenant"] = keys.check_credentials(headers.get("authorization"), headers.get("x-api-key"))
    if self._num_requests > options.max_requests:
      raise Overloaded(f"{options.max_requests} requests are in progress, which is the limit")

  def _check_origin(self, headers: Headers) -> None:
    """Refuses a form with files from a web page of another origin, since browsers send it without a preflight."""
    origin, allowed = headers.get("origin"), self._options.allowed_origins
    if origin is not None and origin.partition("://")[2] != headers.get("host") and not {"*", origin} & {*allowed}:
      raise Refused(
        403,
        "a web page of another origin sent this form; name its origin in --http_allowed_origins, or set --api_key_file",
        code="origin_not_allowed",
      )
