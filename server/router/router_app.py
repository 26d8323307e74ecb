"""The router's HTTP application: checks a request, chooses a replica, relays the answer. Knows no socket of a client.

A request may begin again at another replica while no byte of an answer has reached the client. That needs one of three
reasons: there was no connection, the replica returned 503, which it does before any work, or the replica was lost and
the request leaves nothing behind. A lost replica ends the connection, or a proxy before it, such as Ray Serve's, says
so by an error without JSON. After the first byte nothing is repeated. A stream of events then ends with an error
event of its API. Any other answer is cut off, so that it cannot look whole.
"""

import asyncio
from collections.abc import Callable, Sequence
import dataclasses
import re
import secrets
import time
from typing import Any
import urllib.parse

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from engine.errors import Overloaded, Unavailable
from server.errors import Draining, NotConfigured
from server.generation.prefill_hint import PREFILL_HEADER
from server.http.error_responses import OPENAI_ERRORS, Refused, make_error_answer
from server.http.host_names import find_allowed_hosts, read_host_name
from server.http.http_options import HttpOptions
from server.http.json_exchange import ClientGone, unless_gone
from server.http.messages.message_errors import MESSAGES_ERRORS
from server.router.event_relay import EventRelay, make_last_event
from server.router.path_rules import Destination, PathRule, find_path_rule
from server.router.prompt_keys import make_prompt_keys, read_prompt_fields
from server.router.replicas.prefill_servers import PrefillServer, PrefillServers
from server.router.replicas.replica_exchange import (
  ReplicaBroken,
  ReplicaExchange,
  ReplicaUnreachable,
  UnsendableRequest,
)
from server.router.replicas.replica_pool import ReplicaPool, RoutedReplica
from server.router.replicas.replica_probes import ReplicaProbes
from server.router.replicas.response_homes import ResponseHomes
from server.router.router_metrics import RouterMetrics
from server.router.router_settings import RouterSettings
from server.telemetry.access_log import AccessLog

OWN_PATHS = ("/health", "/ready", "/metrics")  # the last may have a port of its own
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_CLIENT_GONE = 499
_PROXY_ERRORS = (500, 502, 504)  # a replica's own have JSON
# Of one connection only (RFC 9110, section 7.6.1), besides those that the Connection header names.
_HOP_BY_HOP = frozenset(
  (b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization")
) | frozenset((b"te", b"trailer", b"transfer-encoding", b"upgrade"))
# Written anew, or for the router alone. A client that could name a prefill server would have prompts sent there.
_NOT_FORWARDED = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-request-id", PREFILL_HEADER.encode()}


@dataclasses.dataclass
class RoutedRequest:
  """A request on its way.

  Attributes:
    method, target: as they go to the replica.
    path: the decoded path, without a slash at its end.
    headers: those for the replica, without the host's and the body's.
    rule: where it goes.
    request_id: its id in all access logs.
    body: the whole body; None for an upload, which is streamed.
    content_length: the header's value for an upload; b"" if it has none.
    keys: keys of the prompt's pieces.
    prefill: the server that may compute the prompt; None: the replica does.
    ready_s: time.perf_counter() when the request was complete.
    status: the status that the client got; 0 before that.
    replica: the replica that answered.
    num_tries: the replicas that saw it.
  """

  method: bytes
  target: bytes
  path: str
  headers: list[tuple[bytes, bytes]]
  rule: PathRule
  request_id: str
  body: bytes | None = b""
  content_length: bytes = b""
  keys: Sequence[bytes] = ()
  prefill: PrefillServer | None = None
  ready_s: float = 0.0
  status: int = 0
  replica: str | None = None
  num_tries: int = 0


class NoReplicaReady(Unavailable):
  """No replica takes requests."""

  reason = "NO_REPLICA"


class RouterApp:
  """The application; see the module.

  Attributes:
    is_draining: refuses new requests.
    num_requests: requests in progress, without the router's own pages.
  """

  def __init__(
    self,
    pool: ReplicaPool,
    prefill: PrefillServers,
    probes: ReplicaProbes,
    metrics: RouterMetrics,
    settings: RouterSettings,
    access_log: AccessLog,
  ):
    self._pool = pool
    self._prefill = prefill
    self._probes = probes
    self._metrics = metrics
    self._settings = settings
    self._access_log = access_log
    self._homes = ResponseHomes(pool, settings.max_response_homes, settings.probe_timeout_s)
    options = HttpOptions(host=settings.host, allowed_hosts=settings.http_allowed_hosts)
    self._allowed_hosts = find_allowed_hosts(options, has_keys=False)
    self._own_paths = OWN_PATHS if settings.metrics_port < 0 else OWN_PATHS[:2]
    self.is_stopping = False
    self.is_draining = False
    self.num_requests = 0

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers one request; see the ASGI specification."""
    assert scope["type"] == "http", "neither WebSocket nor lifespan is switched on"
    headers = Headers(scope=scope)
    path = scope["path"].rstrip("/") or "/"
    if path in self._own_paths:
      await self.answer_own_page(path, headers)(scope, receive, send)
      return
    request = self._read_head(scope, headers, path)
    started, code = time.monotonic(), None

    async def send_noted(message: Message) -> None:
      if message["type"] == "http.response.start":
        request.status = message["status"]
      try:
        async with asyncio.timeout(self._settings.stream_stall_timeout_s):
          await send(message)
      except TimeoutError:
        self._cut_off(scope)  # the socket's buffer is full of unread bytes, for which a graceful close would wait
        raise ClientGone from None

    self.num_requests += 1
    try:
      self._check_head(scope, headers)
      await self._serve(request, headers, scope, receive, send_noted)
    except ClientGone:
      request.status = request.status or _CLIENT_GONE
    except Exception as error:
      answer = make_error_answer(error)
      code = answer.body["error"]["code"]
      self._metrics.refused.labels(code or "invalid_request").inc()
      if request.status:
        self._cut_off(scope)
      else:
        is_messages = path.startswith("/v1/messages")
        form = MESSAGES_ERRORS if is_messages else OPENAI_ERRORS
        more = {"x-request-id": request.request_id} | ({"request-id": request.request_id} if is_messages else {})
        body = form.make_body(answer, request.request_id)
        await JSONResponse(body, answer.status, answer.headers | more)(scope, receive, send_noted)
    finally:
      self.num_requests -= 1
      self._access_log.write(
        request_id=request.request_id,
        method=f"{scope['method']} {path}",
        peer=":".join(map(str, scope["client"] or ())),
        code=request.status or _CLIENT_GONE,
        reason=code,
        duration_s=round(time.monotonic() - started, 6),
        replica=request.replica,
        tries=request.num_tries,
      )

  def answer_own_page(self, path: str, headers: Headers) -> Response:
    """Returns the answer of /health, /ready or /metrics."""
    if path == "/metrics":
      text, content_type = self._metrics.exposition(headers.get("accept", ""))
      return Response(text, headers={"content-type": content_type})
    if path == "/health":
      return JSONResponse({"status": "ok"})
    is_ready = not self.is_stopping and self._pool.num_ready > 0
    body = {"ready": is_ready, "replicas_ready": self._pool.num_ready, "replicas": len(self._pool.replicas)}
    return JSONResponse(body, 200 if is_ready else 503)

  def _read_head(self, scope: Scope, headers: Headers, path: str) -> RoutedRequest:
    request_id = headers.get("x-request-id", "")
    if not _REQUEST_ID.fullmatch(request_id):
      request_id = f"req-{secrets.token_hex(16)}"
    kept = _without_hop_headers(scope["headers"], _NOT_FORWARDED)
    kept.append((b"x-request-id", request_id.encode()))
    target = (scope.get("raw_path") or urllib.parse.quote(scope["path"]).encode()).partition(b"?")[0]
    if scope["query_string"]:
      target += b"?" + scope["query_string"]
    rule = find_path_rule(scope["method"], path)
    return RoutedRequest(scope["method"].encode(), target, path, kept, rule, request_id)

  def _check_head(self, scope: Scope, headers: Headers) -> None:
    size, most = len(scope["raw_path"]) + len(scope["query_string"]), self._settings.max_header_bytes
    size += sum(len(name) + len(value) for name, value in headers.raw)
    if size > most:
      raise Refused(431, f"the request line and the headers have {size} bytes, the limit is {most}: send fewer")
    if scope["http_version"] not in ("1.0", "1.1"):
      raise Refused(505, "this is not a version of HTTP that is spoken here; send HTTP/1.1")
    host = headers.get("host", "")
    if self._allowed_hosts is not None and read_host_name(host) not in self._allowed_hosts:
      raise Refused(
        403,
        f"the Host header {host!r:.80} is not one of this router's names; call it as 127.0.0.1 or localhost, or name "
        "the host in --http_allowed_hosts",
        code="host_not_allowed",
      )
    if self.is_draining:
      raise Draining("the router is shutting down; send the request to another one")
    if self.num_requests > self._settings.max_requests:
      raise Overloaded(f"{self._settings.max_requests} requests are in progress, which is the limit")

  async def _serve(self, request: RoutedRequest, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
    rule = request.rule
    if rule.destination is Destination.NONE:
      raise Refused(404, f"{request.path} shows one server: open it at a replica's own port", code="not_routed")
    if rule.is_upload:
      await self._relay_upload(request, headers, scope, receive, send)
      return
    request.body = await self._read_body(headers, receive)
    request.ready_s = time.perf_counter()
    await unless_gone(receive, self._serve_whole(request, scope, send))

  async def _serve_whole(self, request: RoutedRequest, scope: Scope, send: Send) -> None:
    """Sends a request whose body is whole to where its rule says."""
    rule = request.rule
    if rule.destination is Destination.BATCH_REPLICA:
      await self._serve_at(self._find_batch_replica(), request, scope, send)
      return
    if rule.destination is Destination.EVERY:
      await self._serve_everywhere(request, scope, send)
      return
    response_id = rule.response_id
    fields = read_prompt_fields(request.body or b"") if rule.has_prompt or rule.may_continue else None
    if fields is not None and rule.may_continue and isinstance(fields.previous_response_id, str):
      response_id = fields.previous_response_id
    if fields is not None and rule.has_prompt:
      if self._pool.policy.uses_keys:
        settings = self._settings
        request.keys = make_prompt_keys(fields, settings.prefix_piece_bytes, settings.max_prefix_pieces)
      if fields.num_bytes >= self._settings.min_prefill_bytes:
        request.prefill = self._prefill.choose_server(request.keys)
    if response_id:
      home = await self._homes.find_home(response_id, request.headers)
      if home is not None:
        await self._serve_at(home, request, scope, send)
        return
    await self._serve_anywhere(request, scope, send)

  async def _serve_anywhere(self, request: RoutedRequest, scope: Scope, send: Send) -> None:
    """Sends a request to a replica that the policy chooses, and to others while nothing has reached the client."""
    tried: list[RoutedReplica] = []
    while True:
      replica = self._pool.choose_replica(request.keys, tried)
      if replica is None:
        raise NoReplicaReady(f"{self._pool.describe_trouble()}; try again when the router's /ready returns 200")
      tried.append(replica)
      may_try_another = len(tried) <= self._settings.max_retries and any(
        other.is_ready and other not in tried for other in self._pool.replicas
      )
      try:
        await self._try_replica(replica, request, scope, send, may_pass_on=may_try_another)
        return
      except ReplicaUnreachable:
        reason = "unreachable"
      except _RefusedByReplica:
        reason = "refused"
      except ReplicaBroken:
        if not request.rule.may_repeat:
          raise Refused(502, f"{_lost(replica)}; send the request again", code="replica_lost") from None
        reason = "broken"
      if len(tried) > self._settings.max_retries:
        raise Refused(502, f"{_lost(replica)}, after {len(tried)} tries; send the request again", code="replica_lost")
      self._metrics.retries.labels(reason).inc()

  async def _serve_at(self, replica: RoutedReplica, request: RoutedRequest, scope: Scope, send: Send) -> None:
    """Sends a request to the one replica that can answer it."""
    if not replica.is_ready:
      raise NoReplicaReady(
        f"the replica that holds what this request names takes no requests ({replica.trouble}); try again later"
      )
    try:
      await self._try_replica(replica, request, scope, send)
    except ConnectionError:
      raise Refused(502, f"{_lost(replica)}; send the request again", code="replica_lost") from None

  def _find_batch_replica(self) -> RoutedReplica:
    replica = self._pool.find_replica(self._settings.batch_replica)
    if replica is None:
      raise NotConfigured("files and batches are in one replica's folder; start the router with --batch_replica")
    return replica

  async def _serve_everywhere(self, request: RoutedRequest, scope: Scope, send: Send) -> None:
    """Sends a request to all replicas, one after the other; the client gets the last answer, or the first error."""
    replicas = self._pool.replicas
    for replica in replicas:
      if not replica.is_ready:
        raise NoReplicaReady(
          f"{replica.name} takes no requests ({replica.trouble}), and this request is for every replica; nothing was "
          "changed: try again when all are ready"
        )
    for number, replica in enumerate(replicas):
      is_last = number == len(replicas) - 1
      try:
        await self._try_replica(replica, request, scope, send, drops_success=not is_last)
      except ConnectionError:
        raise Refused(
          502,
          f"{_lost(replica)}; {number} of {len(replicas)} replicas had done it: send the request again",
          code="replica_lost",
        ) from None
      if request.status:
        return

  async def _relay_upload(
    self, request: RoutedRequest, headers: Headers, scope: Scope, receive: Receive, send: Send
  ) -> None:
    """Passes a body on while it comes."""
    replica, most = self._find_batch_replica(), self._settings.max_upload_bytes
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
      raise _too_large(length, most, "max_upload_bytes")
    request.body, request.content_length = None, length.encode()
    request.ready_s = time.perf_counter()
    if not replica.is_ready:
      raise NoReplicaReady(f"the replica with the batches takes no requests ({replica.trouble}); try again later")
    exchange, outcome = replica.begin_exchange(), "client_gone"
    request.num_tries = 1
    try:
      await self._send_request_head(exchange, replica, request)
      size, more = 0, True
      while more:
        message = await self._receive_part(receive)
        data, more = message.get("body", b""), message.get("more_body", False)
        size += len(data)
        if size > most:
          raise _too_large(f"more than {most}", most, "max_upload_bytes")
        if data:
          await exchange.send_data(data)
      await exchange.end_request()
      await unless_gone(receive, self._relay_answer(exchange, replica, request, scope, send))
      outcome = f"{request.status // 100}xx"
    except ConnectionError as error:
      outcome = "broken"
      self._probes.report_failure(replica, str(error))
      raise Refused(502, f"{_lost(replica)}; list the files before you send it again", code="replica_lost") from None
    finally:
      replica.end_exchange(exchange)
      self._metrics.requests.labels(replica.name, outcome).inc()

  async def _read_body(self, headers: Headers, receive: Receive) -> bytes:
    """Returns the whole body. Raises Refused with 413 or 408, or ClientGone."""
    most, length = self._settings.max_request_bytes, headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
      raise _too_large(length, most, "max_request_bytes")
    body, more = bytearray(), True
    while more:
      message = await self._receive_part(receive)
      body += message.get("body", b"")
      more = message.get("more_body", False)
      if len(body) > most:
        raise _too_large(f"more than {most}", most, "max_request_bytes")
    return bytes(body)

  async def _receive_part(self, receive: Receive) -> Message:
    limit_s = self._settings.body_timeout_s
    try:
      async with asyncio.timeout(limit_s):
        message = await receive()
    except TimeoutError:
      raise Refused(408, f"no part of the body came within {limit_s:g} s; send it at once") from None
    if message["type"] == "http.disconnect":
      raise ClientGone
    return message

  async def _try_replica(
    self,
    replica: RoutedReplica,
    request: RoutedRequest,
    scope: Scope,
    send: Send,
    *,
    may_pass_on: bool = False,
    drops_success: bool = False,
  ) -> None:
    """Sends a whole request to one replica and relays the answer.

    Args:
      replica, request: what goes where.
      scope, send: the client's side.
      may_pass_on: whether a 503 may be dropped, since another replica can be tried.
      drops_success: whether an answer below 300 is dropped.

    Raises:
      ReplicaUnreachable, ReplicaBroken, _RefusedByReplica: nothing has reached the client.
    """
    request.num_tries += 1
    exchange, outcome = replica.begin_exchange(), "client_gone"
    prefill = request.prefill
    if prefill is not None:
      prefill.num_waiting += 1

    def end_prefill() -> None:
      nonlocal prefill
      if prefill is not None:
        prefill.num_waiting -= 1
        prefill = None

    try:
      await self._send_request_head(exchange, replica, request)
      if request.body:
        await exchange.send_data(request.body)
      await exchange.end_request()
      outcome = await self._relay_answer(
        exchange,
        replica,
        request,
        scope,
        send,
        may_pass_on=may_pass_on,
        drops_success=drops_success,
        note_first_byte=end_prefill,
      )
    except (ReplicaUnreachable, ReplicaBroken) as error:
      outcome = "unreachable" if isinstance(error, ReplicaUnreachable) else "broken"
      self._probes.report_failure(replica, str(error))
      raise
    except _RefusedByReplica:
      outcome = "5xx"
      self._probes.report_failure(replica, "it returned 503")
      raise
    finally:
      end_prefill()
      replica.end_exchange(exchange)
      self._metrics.requests.labels(replica.name, outcome).inc()

  async def _send_request_head(self, exchange: ReplicaExchange, replica: RoutedReplica, request: RoutedRequest) -> None:
    if replica.place is None:
      raise ReplicaUnreachable("its name has no address")
    await exchange.connect(replica.place, self._settings.connect_timeout_s)
    headers = [(b"host", replica.authority.encode()), *request.headers]
    if request.prefill is not None:
      headers.append((PREFILL_HEADER.encode(), request.prefill.name.encode()))
    if request.body is None:
      headers.append(
        (b"content-length", request.content_length) if request.content_length else (b"transfer-encoding", b"chunked")
      )
    elif request.body or request.method in (b"POST", b"PUT", b"PATCH"):
      headers.append((b"content-length", str(len(request.body)).encode()))
    try:
      await exchange.send_head(request.method, request.target, headers)
    except UnsendableRequest as error:
      raise Refused(400, f"the request's head is malformed ({error}); send it as HTTP/1.1 says") from None

  async def _relay_answer(
    self,
    exchange: ReplicaExchange,
    replica: RoutedReplica,
    request: RoutedRequest,
    scope: Scope,
    send: Send,
    *,
    may_pass_on: bool = False,
    drops_success: bool = False,
    note_first_byte: Callable[[], None] = lambda: None,
  ) -> str:
    """Relays the answer as it comes; returns the outcome for the metrics. Raises as `_try_replica` does."""
    sent_s = time.perf_counter()
    head = await exchange.read_head()
    if head.status_code == 503 and may_pass_on:
      raise _RefusedByReplica
    content_type = next((value for name, value in head.headers if name == b"content-type"), b"")
    if head.status_code in _PROXY_ERRORS and not content_type.startswith(b"application/json"):
      raise ReplicaBroken(f"a proxy before it returned {head.status_code}")
    # With the first part of the body, which a replica sends along: until then the request can begin elsewhere.
    data = await exchange.read_data()
    note_first_byte()
    outcome = f"{head.status_code // 100}xx"
    if drops_success and head.status_code < 300:
      return outcome
    came_s, headers = time.perf_counter(), _without_hop_headers(list(head.headers), _HOP_BY_HOP)
    is_events = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
    events = EventRelay() if is_events else None
    request.replica = replica.name
    if request.path == "/v1/responses":
      self._homes.learn_home(data, replica)
    await send({"type": "http.response.start", "status": head.status_code, "headers": headers})
    is_first = True
    try:
      while True:
        passed = data if events is None else events.take_data(data)
        if exchange.has_ended:
          passed += b"" if events is None else events.take_rest()
          await _send_data(send, passed, more=False)
        elif passed:
          await _send_data(send, passed)
        if is_first:
          is_first = False
          self._metrics.added_latency.observe(sent_s - request.ready_s + time.perf_counter() - came_s)
        if exchange.has_ended:
          return outcome
        data = await exchange.read_data()
    except ReplicaBroken as error:
      self._probes.report_failure(replica, str(error))
      if events is None:
        self._cut_off(scope)
      else:
        lost = Refused(502, f"{_lost(replica)} within the answer; send the request again", code="replica_lost")
        answer, number = make_error_answer(lost), events.next_sequence_number
        await _send_data(send, make_last_event(request.path, answer, request.request_id, number), more=False)
      return "broken_stream"

  def _cut_off(self, scope: Scope) -> None:
    """Closes the client's connection at once, so that a partial answer cannot look whole."""
    abort: Any = scope.get("state", {}).get("abort")
    if abort is not None:
      abort()


class OwnPagesApp:
  """The application of the metrics port: the router's own pages, and nothing else."""

  def __init__(self, app: RouterApp):
    self._app = app

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers one request; see the ASGI specification."""
    if scope["path"] in OWN_PATHS:
      answer = self._app.answer_own_page(scope["path"], Headers(scope=scope))
    else:
      error = make_error_answer(Refused(404, f"there is no such path here; served are {', '.join(OWN_PATHS)}"))
      answer = JSONResponse(error.body, error.status)
    await answer(scope, receive, send)


def _without_hop_headers(
  headers: Sequence[tuple[bytes, bytes]], left_out: frozenset[bytes]
) -> list[tuple[bytes, bytes]]:
  """Returns the headers without those in `left_out` and those that a Connection header names; names in lower case."""
  for name, value in headers:
    if name == b"connection":
      left_out = left_out | {part.strip().lower() for part in value.split(b",")}
  return [(name, value) for name, value in headers if name not in left_out]


class _RefusedByReplica(Exception):
  """The replica returned 503, and another may be tried."""


async def _send_data(send: Send, data: bytes, *, more: bool = True) -> None:
  await send({"type": "http.response.body", "body": data, "more_body": more})


def _lost(replica: RoutedReplica) -> str:
  return f"the replica {replica.name} was lost"


def _too_large(size: str, most: int, flag: str) -> Refused:
  return Refused(413, f"the body has {size} bytes, the limit is {most}: send less, or raise the router's --{flag}")
