"""What clients get when replicas fail, and where their requests go instead."""

import json
import threading

import httpx
import pytest

from tests.server.router.replica_stub import running_stubs
from tests.server.router.router_harness import running_router, wait_until

CHAT = "/v1/chat/completions"


@pytest.fixture
def two():
  """Two replicas; the first request goes to the first."""
  with running_stubs(2) as stubs, running_router([stub.name for stub in stubs], policy="round_robin") as router:
    router.wait_ready(2)
    yield *stubs, router


@pytest.mark.parametrize(("mode", "reason"), [("close", "broken"), ("proxy", "broken"), ("503", "refused")])
def test_a_request_begins_again_elsewhere_before_its_first_byte(two, mode, reason):
  first, second, router = two
  first.mode = mode
  body = b'{"messages": [1]}'
  answer = router.http.post(CHAT, content=body)
  assert answer.json()["from"] == second.name and second.seen[0][3] == body
  assert first.seen[0][2]["x-request-id"] == second.seen[0][2]["x-request-id"]
  assert router.value("sluice_router_retries_total", reason=reason) == 1


def test_a_replica_that_has_ended(two):
  """It leaves the rotation, and comes back by itself."""
  first, second, router = two
  first.stop()
  for _ in range(4):
    assert router.http.post(CHAT, json={}).json()["from"] == second.name
  router.wait_ready(1)
  assert router.value("sluice_router_replica_ready", replica=first.name) == 0
  first.start()
  router.wait_ready(2)
  assert {router.http.post(CHAT, json={}).json()["from"] for _ in range(4)} == {first.name, second.name}


def test_a_replica_that_drains_gets_no_new_requests(two):
  first, second, router = two
  first.mode = "stream"
  first.go.clear()
  with router.http.stream("POST", CHAT, json={}) as answer:
    events = answer.iter_raw()
    next(events)
    first.is_ready = False
    router.wait_ready(1)
    for _ in range(4):
      assert router.http.post(CHAT, json={}).json()["from"] == second.name
    first.go.set()
    assert b"".join(events).endswith(b"[DONE]\n\n")  # it finishes what it has


def test_the_number_of_tries_is_bounded():
  with running_stubs(4) as stubs, running_router([stub.name for stub in stubs], max_retries=1) as router:
    router.wait_ready(4)
    for stub in stubs:
      stub.mode = "close"
    answer = router.http.post(CHAT, json={})
    assert answer.status_code == 502 and answer.json()["error"]["code"] == "replica_lost"
    assert "2 tries" in answer.json()["error"]["message"]
    assert sum(len(stub.seen) for stub in stubs) == 2


def test_the_last_503_is_the_replicas_own(two):
  first, second, router = two
  first.mode = second.mode = "503"
  answer = router.http.post(CHAT, json={})
  assert answer.status_code == 503 and answer.json() == {"error": {"code": "starting"}}
  assert answer.headers["retry-after"] == "7"


def test_a_replicas_own_error_is_passed_on(two):
  first, second, router = two
  first.status = 500
  answer = router.http.post(CHAT, json={})
  assert answer.status_code == 500 and answer.json()["from"] == first.name and not second.seen


def test_without_any_replica():
  with running_stubs(1) as [stub]:
    name = stub.name
  with running_router([name]) as router:
    wait_until(lambda: router.value("sluice_router_probes_total", replica=name, answered="false") > 0)
    answer = router.http.post(CHAT, json={})
    assert answer.status_code == 503 and "1 of 1 replicas" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) >= 1
    assert router.http.get("/ready").status_code == 503 and router.http.get("/health").status_code == 200


@pytest.mark.parametrize("mode", ["close", "proxy"])
def test_a_response_that_may_be_stored_is_not_made_twice(two, mode):
  first, second, router = two
  first.mode = mode
  answer = router.http.post("/v1/responses", json={"input": "hi"})
  assert answer.status_code == 502 and answer.json()["error"]["code"] == "replica_lost"
  assert not second.seen


def events_of(text: str) -> list[tuple[str, dict]]:
  found = []
  for block in text.strip().split("\n\n"):
    lines = dict(line.split(": ", 1) for line in block.splitlines())
    found.append((lines.get("event", ""), json.loads(lines["data"])))
  return found


@pytest.mark.parametrize(
  ("path", "mode"), [(CHAT, "break"), ("/v1/completions", "end"), ("/v1/messages", "break"), ("/v1/responses", "end")]
)
def test_a_stream_that_breaks_ends_with_an_error_event_of_its_api(two, path, mode):
  first, second, router = two
  first.mode = mode
  first.events = [b'event: x\ndata: {"sequence_number": 6}\n\n', b'data: {"sequence_number": 7}\n\n']
  answer = router.http.post(path, json={"stream": True}, headers={"x-request-id": "mine"})
  whole, (name, last) = events_of(answer.text)
  assert whole == ("x", {"sequence_number": 6})  # and nothing of the half event
  if path == "/v1/messages":
    assert (name, last["type"], last["error"]["type"], last["request_id"]) == ("error", "error", "api_error", "mine")
  elif path == "/v1/responses":
    assert (name, last["type"], last["sequence_number"], last["code"]) == ("error", "error", 7, "replica_lost")
  else:
    assert (name, last["error"]["code"], last["error"]["type"]) == ("", "replica_lost", "server_error")
  assert not second.seen
  assert router.value("sluice_router_requests_total", replica=first.name, outcome="broken_stream") == 1


def test_another_answer_that_breaks_is_cut_off(two):
  first, second, router = two
  first.mode = "break_json"
  with pytest.raises(httpx.RemoteProtocolError):
    router.http.post(CHAT, json={})
  assert not second.seen


def test_a_replica_that_stands_still(two):
  """Its stream ends with an error, its request without an answer begins elsewhere, and later it serves again."""
  first, second, router = two
  first.mode = second.mode = "stream"
  first.go.clear()
  found = {}
  with router.http.stream("POST", CHAT, json={}) as answer:
    events = answer.iter_raw()
    next(events)
    router.http.post(CHAT, json={})  # the second's turn
    first.frozen.clear()
    waiting = threading.Thread(target=lambda: found.update(second=router.http.post(CHAT, json={})))
    waiting.start()
    assert b"replica_lost" in b"".join(events)
  waiting.join()
  assert found["second"].text.endswith("[DONE]\n\n") and len(second.seen) == 2
  router.wait_ready(1)
  first.frozen.set()
  first.go.set()
  router.wait_ready(2)


def test_a_check_that_fails_is_no_end_of_requests():
  """Only silence of the whole time is."""
  with running_stubs(1) as [stub], running_router([stub.name], probe_timeout_s=0.1, replica_timeout_s=30) as router:
    router.wait_ready(1)
    stub.mode = "stream"
    stub.go.clear()
    with router.http.stream("POST", CHAT, json={}) as answer:
      events = answer.iter_raw()
      next(events)
      stub.frozen.clear()
      router.wait_ready(0)
      stub.frozen.set()
      router.wait_ready(1)
      stub.go.set()
      assert b"".join(events).endswith(b"[DONE]\n\n")
