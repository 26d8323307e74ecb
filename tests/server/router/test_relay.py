"""What passes through the router, and how: bodies, headers, streams, disconnects, limits."""

import json
import socket

import httpx
import pytest

from tests.server.router.replica_stub import EVENTS, running_stubs
from tests.server.router.router_harness import running_router, wait_until

CHAT = "/v1/chat/completions"


@pytest.fixture
def one():
  with running_stubs(1) as [stub], running_router([stub.name], max_request_bytes=5000, max_header_bytes=4096) as router:
    router.wait_ready(1)
    yield stub, router


def test_a_request_arrives_unchanged(one):
  stub, router = one
  body = b'{ "messages" : [], "odd":"\\u00e9\xc3\xa9" }'
  headers = {
    "authorization": "Bearer key",
    "x-api-key": "other",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "x-request-id": "mine.1",
    "x-tenant": "team",
    "x-prefiller-host-port": "evil:1",
    "connection": "keep-alive, x-secret-hop",
    "x-secret-hop": "1",
    "te": "trailers",
  }
  answer = router.http.post(f"{CHAT}?a=1&b=%2F", content=body, headers=headers)
  assert answer.json() == {"id": "x", "from": stub.name, "size": len(body)}
  assert answer.headers["x-kept"] == "2" and "x-hop" not in answer.headers
  [(method, path, seen, arrived)] = stub.seen
  assert (method, path, arrived) == ("POST", f"{CHAT}?a=1&b=%2F", body)
  for name in ("authorization", "x-api-key", "traceparent", "x-request-id", "x-tenant"):
    assert seen[name] == headers[name]
  assert seen["host"] == stub.name and seen["content-length"] == str(len(body))
  assert not {"x-prefiller-host-port", "x-secret-hop", "te"} & seen.keys()


def test_a_request_without_an_id_gets_one(one):
  stub, router = one
  router.http.get("/v1/models", headers={"x-request-id": "not allowed!"})
  assert stub.seen[0][2]["x-request-id"].startswith("req-")


def test_statuses_and_bodies_of_errors_are_the_replicas(one):
  stub, router = one
  stub.status = 422
  answer = router.http.post(CHAT, json={})
  assert answer.status_code == 422 and answer.json()["from"] == stub.name


def test_a_stream_is_relayed_event_by_event(one):
  stub, router = one
  stub.mode = "stream"
  stub.go.clear()
  with router.http.stream("POST", CHAT, json={}) as answer:
    events = answer.iter_raw()
    assert next(events) == EVENTS[0]  # while the replica waits
    stub.go.set()
    assert b"".join(events) == b"".join(EVENTS[1:])
  assert router.value("sluice_router_requests_total", replica=stub.name, outcome="2xx") == 1
  assert router.value("sluice_router_added_latency_seconds_count") == 1


@pytest.mark.parametrize("mode", ["stream", "hang"])
def test_a_client_that_leaves_ends_the_replicas_request(one, mode):
  stub, router = one
  stub.mode = mode
  stub.go.clear()
  if mode == "stream":
    with router.http.stream("POST", CHAT, json={}) as answer:
      next(answer.iter_raw())
    assert stub.gone.wait(30)
  else:
    with pytest.raises(httpx.ReadTimeout):
      router.http.post(CHAT, json={}, timeout=0.2)
  wait_until(lambda: router.value("sluice_router_requests_total", replica=stub.name, outcome="client_gone") == 1)
  assert router.value("sluice_router_replica_in_flight", replica=stub.name) == 0


@pytest.mark.parametrize(
  ("request_of", "status", "words"),
  [
    ({"content": b"x" * 5001}, 413, "5001 bytes, the limit is 5000"),
    ({"content": (b"x" * 600 for _ in range(10))}, 413, "more than 5000 bytes"),
    ({"content": b"{}", "headers": {"x-long": "y" * 4000}}, 431, "the limit is 4096"),
    ({"content": b"{}", "headers": {"host": "evil.example"}}, 403, "--http_allowed_hosts"),
  ],
)
def test_limits(one, request_of, status, words):
  stub, router = one
  answer = router.http.post(CHAT, **request_of)
  error = answer.json()["error"]
  assert answer.status_code == status and words in error["message"] and "type" in error
  assert not stub.seen
  assert router.http.post(CHAT, json={}).status_code == 200


def test_errors_have_the_form_of_the_paths_api(one):
  stub, router = one
  answer = router.http.post("/v1/messages", content=b"x" * 5001, headers={"x-request-id": "mine"})
  error = answer.json()
  assert error["type"] == "error" and error["error"]["type"] == "request_too_large" and error["request_id"] == "mine"
  assert answer.headers["request-id"] == "mine"


def test_a_body_that_does_not_come():
  with running_stubs(1) as [stub], running_router([stub.name], body_timeout_s=0.1) as router:
    with socket.create_connection(("127.0.0.1", router.program.port), timeout=30) as client:
      client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{")
      assert b"408" in client.recv(4096).partition(b"\r\n")[0]
    assert not stub.seen


def test_too_many_requests():
  with running_stubs(1) as [stub], running_router([stub.name], max_requests=1) as router:
    router.wait_ready(1)
    stub.mode = "stream"
    stub.go.clear()
    with router.http.stream("POST", CHAT, json={}) as answer:
      events = answer.iter_raw()
      next(events)
      refused = router.http.post(CHAT, json={})
      assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
      assert router.http.get("/health").status_code == 200  # its own pages have no such limit
      stub.go.set()
      assert b"".join(events)


def test_a_client_that_reads_nothing_is_cut_off():
  with running_stubs(1) as [stub], running_router([stub.name], stream_stall_timeout_s=0.2) as router:
    router.wait_ready(1)
    stub.mode = "stream"
    stub.events = [b"data: " + b"x" * (1 << 20) + b"\n\n"] * 40
    with pytest.raises(httpx.HTTPError), router.http.stream("POST", CHAT, json={}) as answer:
      wait_until(lambda: router.value("sluice_router_replica_in_flight", replica=stub.name) == 0)
      answer.read()


def test_the_access_log_names_the_replica(tmp_path):
  log = tmp_path / "log"
  with running_stubs(1) as [stub], running_router([stub.name], access_log=str(log)) as router:
    router.wait_ready(1)
    router.http.post(CHAT, json={}, headers={"x-request-id": "mine"})
    router.http.get("/")
  lines = {line["method"]: line for line in map(json.loads, log.read_text().splitlines())}
  routed, refused = lines[f"POST {CHAT}"], lines["GET /"]
  assert (routed["code"], routed["replica"], routed["tries"], routed["request_id"]) == (200, stub.name, 1, "mine")
  assert (refused["code"], refused["tries"]) == (404, 0) and "replica" not in refused
