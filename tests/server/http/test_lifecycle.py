"""Clients that go away or stand still, drains, deaths, starts: as on the gRPC side, every page comes back."""

import asyncio
import contextlib
import json
import re
import socket
import struct
import threading

import httpx
import openai
import pytest

from engine.request import FinishReason
from server.http.http_listener import Listener
from server.http.http_options import HttpOptions
from server.http.openai.app import make_app
from server.lifecycle.host import HostOptions
from server.proto import sluice_pb2 as pb
from tests.server.harness import Served, endings_of, generate, pages_come_back_within_two_steps, running, tiny_config
from tests.server.http.conftest import url_of

IDS = [7, 8, 9]
FOREVER = {"prompt": IDS, "max_tokens": 400, "ignore_eos": True}


def connect(served: Served) -> socket.socket:
  return socket.create_connection(("127.0.0.1", served.host.http_port), timeout=60)


def post(path: str = "/v1/completions", **body) -> bytes:
  content = json.dumps(body).encode()
  head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
  return head.encode() + b"\r\n\r\n" + content


def read_all(connection: socket.socket) -> bytes:
  received = b""
  while piece := connection.recv(1 << 16):
    received += piece
  return received


def read_until(connection: socket.socket, end: bytes) -> bytes:
  received = b""
  while not received.endswith(end):
    piece = connection.recv(1 << 16)
    assert piece, received
    received += piece
  return received


def reset(connection: socket.socket) -> None:
  """Closes as the system does for a process that is killed with unread data."""
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
  connection.close()


@pytest.mark.catalogue("B1")
@pytest.mark.parametrize("end", [socket.socket.close, reset])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompts", [1, 3])
def test_a_client_that_goes_away(paced, end, stream, prompts):
  connection = connect(paced)
  connection.sendall(post(**{**FOREVER, "prompt": [IDS] * prompts}, stream=stream, n=2))
  if stream:
    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
  paced.wait_for_steps(3)
  paced.runner.go.clear()
  end(connection)
  pages_come_back_within_two_steps(paced)
  assert paced.engine.stats().finished[FinishReason.ABORT] == 2 * prompts


@pytest.mark.catalogue("B2")
def test_a_client_that_goes_away_while_queued(paced):
  paced.runner.go.clear()
  connections = [connect(paced) for _ in range(4)]
  for index, connection in enumerate(connections):
    connection.sendall(post(**FOREVER, stream=bool(index % 2)))
  paced.wait_until(lambda: len(paced.generations) == 4)
  for connection in connections:
    connection.close()
  pages_come_back_within_two_steps(paced)


def test_a_client_that_leaves_in_the_middle_of_its_body(paced):
  connection = connect(paced)
  connection.sendall(post(**FOREVER)[:-5])
  connection.close()
  with httpx.Client(base_url=url_of(paced)) as client:
    assert client.get("/health").status_code == 200
  assert paced.generations.num_started == 0


def test_closing_the_openai_stream_ends_the_work(paced):
  with openai.OpenAI(base_url=f"{url_of(paced)}/v1", api_key="x") as client:
    with client.completions.create(
      model="tiny", prompt=IDS, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
      next(iter(stream))
      paced.runner.go.clear()
    pages_come_back_within_two_steps(paced)


@pytest.mark.catalogue("B1")
def test_neighbours_of_clients_that_vanish_are_exact(paced):
  with httpx.Client(base_url=url_of(paced), timeout=60) as client:
    answers = []
    body = {"prompt": IDS, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True, "seed": 1}
    wanted = client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    thread = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=body).json()))
    thread.start()
    for index in range(30):
      connection = connect(paced)
      connection.sendall(post(**FOREVER, stream=True))
      if index % 3:
        connection.recv(1 << 16)
      (reset if index % 2 else socket.socket.close)(connection)
    thread.join(60)
  assert answers[0]["choices"][0]["token_ids"] == wanted
  paced.wait_until(lambda: paced.engine.num_live == 0)


@pytest.mark.catalogue("B5", "B12")
def test_a_reader_that_stands_still_is_cut_off(tokenizer, monkeypatch):
  create_server = socket.create_server

  def with_small_buffers(*args, **kwargs):
    listening = create_server(*args, **kwargs)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listening

  monkeypatch.setattr(socket, "create_server", with_small_buffers)
  with running(tokenizer, host=HostOptions(http_port=0, stream_stall_timeout_s=0.3)) as server:
    with contextlib.closing(socket.socket()) as connection:
      connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
      connection.settimeout(60)
      connection.connect(("127.0.0.1", server.host.http_port))
      connection.sendall(post(**{**FOREVER, "prompt": [IDS] * 2, "n": 16, "logprobs": 0}, stream=True))
      server.wait_until(lambda: server.generations.num_started == 2)
      server.wait_until(lambda: len(server.generations) == 0)
      server.wait_until(lambda: server.engine.num_live == 0)
      # What the system still holds comes, then nothing: half an answer must not look like a whole one.
      received = read_all(connection)
      assert received and b"[DONE]" not in received and not received.endswith(b"0\r\n\r\n")
    assert endings_of(generate(server, token_ids=pb.TokenIds(ids=IDS)))[-1].last


def test_a_slow_reader_gets_fewer_and_larger_events(paced):
  """What waits for a reader is merged, so that an event can carry many tokens."""
  paced.runner.seconds = 0.0
  with connect(paced) as connection:
    connection.sendall(post(**FOREVER, stream=True, return_token_ids=True))
    paced.wait_until(lambda: paced.generations.num_started == 1)
    paced.wait_until(lambda: len(paced.generations) == 0)
    received = b""
    while b"[DONE]" not in received:
      received += connection.recv(1 << 16)
  events = [json.loads(line[6:]) for line in received.split(b"\r\n") if line.startswith(b'data: {"id')]
  assert sum(len(event["choices"][0]["token_ids"]) for event in events) <= 400


@pytest.mark.catalogue("A1")
def test_drain_lets_streams_finish_and_refuses_new_work(paced):
  with connect(paced) as connection, httpx.Client(base_url=url_of(paced), timeout=60) as client:
    assert client.get("/ready").json() == {"ready": True}
    connection.sendall(post(**FOREVER | {"max_tokens": 100}, stream=True, return_token_ids=True))
    received = connection.recv(1 << 16)
    paced.runner.go.clear()
    paced.stop()
    paced.wait_until(lambda: client.get("/ready").status_code == 503)
    assert client.get("/health").status_code == 200, "what drains is alive"
    paced.wait_until(lambda: client.post("/v1/completions", json=FOREVER | {"max_tokens": 1}).status_code == 503)
    refused = client.post("/v1/completions", json=FOREVER)
    assert refused.json()["error"]["code"] == "draining" and int(refused.headers["retry-after"]) > 0
    paced.runner.go.set()
    received += read_all(connection)
    assert b"[DONE]" in received and b'"error"' not in received
  paced.thread.join(180)
  assert paced.exit_code == [0]


@pytest.mark.catalogue("A2")
def test_what_does_not_fit_the_drain_is_told_so(tokenizer):
  with running(tokenizer, host=HostOptions(http_port=0, drain_timeout_s=0.2)) as server:
    server.runner.seconds = 0.05
    with connect(server) as connection:
      connection.sendall(post(**FOREVER, stream=True))
      received = connection.recv(1 << 16)
      server.stop()
      received += read_all(connection)
    assert b"[DONE]" not in received
    error = json.loads(received[received.index(b'{"error"') :].split(b"\n")[0])["error"]
    assert error["code"] == "draining" and "shut down before" in error["message"]
    server.thread.join(180)
    assert server.exit_code == [0]


def test_errors_of_one_request_have_their_status(tokenizer):
  """A poisoned request, one that waits too long, and one that somebody aborts; of streams before their first token."""
  config = tiny_config(max_num_seqs=1, queue_timeout_s=0.5)
  with (
    running(tokenizer, host=HostOptions(http_port=0), config=config, poison=13) as server,
    openai.OpenAI(base_url=f"{url_of(server)}/v1", api_key="x", timeout=60) as client,
  ):
    asked = {"model": "tiny", "max_tokens": 400}
    for stream in (False, True):
      with pytest.raises(openai.InternalServerError) as poisoned:
        client.completions.create(**asked, prompt=[7, 13, 8], stream=stream)
      assert (poisoned.value.status_code, poisoned.value.code) == (500, "numerical_error")
      assert server.generations.num_started == 1 + stream, "and it was not sent again"
    server.runner.seconds = 0.05
    safe = {"ignore_eos": True, "allowed_token_ids": [20, 21]}  # never the poison
    with client.completions.create(**asked, prompt=IDS, stream=True, extra_body=safe) as running_one:
      next(iter(running_one))
      for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as late:
          client.completions.create(**asked, prompt=IDS, stream=stream, extra_body=safe)
        assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")
    answers = []

    def ask():
      with pytest.raises(openai.APIStatusError) as aborted:
        client.completions.create(**asked, prompt=IDS, extra_body=safe | {"request_id": "a"})
      answers.append(aborted.value)

    thread = threading.Thread(target=ask)
    thread.start()
    server.wait_until(lambda: server.generation.Abort(pb.AbortRequest(request_ids=["cmpl-a"])).outcomes == [1])
    thread.join(60)
    assert (answers[0].status_code, answers[0].code) == (499, "aborted_by_request")


def test_of_several_prompts_one_failure_is_told(tokenizer):
  with running(tokenizer, host=HostOptions(http_port=0), poison=13) as server:
    for stream in (False, True):
      body = {"prompt": [IDS, [7, 13], [7, 13, 13]], "max_tokens": 400, "ignore_eos": True, "stream": stream}
      answer = httpx.post(f"{url_of(server)}/v1/completions", json=body, timeout=60)
      assert '"code":"numerical_error"' in answer.text and "[DONE]" not in answer.text
      server.wait_until(lambda: server.engine.num_live == 0)


def test_the_engines_death_is_told_to_streams_and_others(paced):
  with connect(paced) as stream, connect(paced) as unary:
    stream.sendall(post(**FOREVER, stream=True))
    unary.sendall(post(**FOREVER))
    received = stream.recv(1 << 16)
    paced.wait_until(lambda: len(paced.generations) == 2)
    paced.runner.fail = RuntimeError("a secret of ours")
    received += read_all(stream)
    answer = read_all(unary)
  # Whichever comes first of the engine's word and the host's.
  assert re.search(b'"code":"(engine_dead|engine_failure)"', received) and b"[DONE]" not in received
  assert re.match(b"HTTP/1.1 50[03]", answer)
  assert b"secret" not in received + answer
  paced.thread.join(180)
  assert paced.exit_code == [1]


@pytest.mark.catalogue("D3")
def test_an_engine_that_stands_is_told_to_streams(tokenizer):
  with running(tokenizer, host=HostOptions(http_port=0, step_timeout_s=1.0)) as server, connect(server) as stream:
    server.runner.seconds = 0.02
    stream.sendall(post(stream=True, **FOREVER))
    received = stream.recv(1 << 16)
    server.runner.go.clear()
    while data := stream.recv(65536):
      received += data
    server.thread.join(180)
    assert server.exit_code == [1]
  assert received.count(b'"code":"engine_dead"') == 1 and b"[DONE]" not in received


def test_no_answer_waits_for_the_acknowledgement_of_its_headers(server):
  """Nagle's algorithm is off: else, with a client that delays acknowledgements, each answer takes 40 ms longer."""
  with connect(server) as connection:
    connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert b"200 OK" in read_until(connection, b"}")
    http = server.host._http
    assert http is not None
    sockets = [each.transport.get_extra_info("socket") for each in list(http._state.connections)]
    assert sockets and all(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in sockets)


@pytest.mark.catalogue("A7")
def test_before_it_is_ready(tokenizer):
  with (
    running(tokenizer, host=HostOptions(http_port=0), serve=False) as server,
    httpx.Client(base_url=url_of(server)) as client,
  ):
    assert (client.get("/health").status_code, client.get("/ready").status_code) == (200, 503)
    for answer in (client.get("/v1/models"), client.post("/v1/completions", json=FOREVER)):
      assert answer.status_code == 503 and answer.json()["error"]["code"] == "starting"
      assert answer.headers["retry-after"]


@pytest.mark.catalogue("A9")
def test_idle_connections_do_not_hold_up_the_end(tokenizer):
  with running(tokenizer, host=HostOptions(http_port=0)) as server:
    idle = [connect(server) for _ in range(20)]
    with connect(server) as used:
      used.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
      assert b"200 OK" in read_until(used, b"}")
      server.stop()
      assert all(connection.recv(1) == b"" for connection in (*idle, used))
    for connection in idle:
      connection.close()
    server.thread.join(180)


@pytest.mark.catalogue("B12")
def test_slow_heads_and_bodies_are_given_up(server):
  options = HttpOptions(port=0, head_timeout_s=0.2, body_timeout_s=0.2, idle_timeout_s=1)
  impatient = Listener(make_app(server.host._state, options), options)
  port = asyncio.run_coroutine_threadsafe(impatient.start_listening(), server.loop).result(30)
  with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
    connection.sendall(b"GET /health HT")
    answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408") and b"did not come within 0.2 s" in answer
  with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
    connection.sendall(post(**FOREVER)[:-5])
    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408")
  with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
    assert connection.recv(1) == b"", "a connection without a request is closed"
  asyncio.run_coroutine_threadsafe(impatient.stop_listening(2), server.loop).result(30)


@pytest.mark.catalogue("B10")
def test_limits_of_connections_and_requests(paced):
  paced.runner.seconds = 0.05
  options = HttpOptions(port=0, max_connections=3, max_requests=1)
  strict = Listener(make_app(paced.host._state, options), options)
  port = asyncio.run_coroutine_threadsafe(strict.start_listening(), paced.loop).result(30)
  connections = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(3)]
  connections[0].sendall(post(**FOREVER, stream=True))
  connections[0].recv(1 << 16)
  connections[1].sendall(post(**FOREVER))
  assert connections[1].recv(1 << 16).startswith(b"HTTP/1.1 429")
  connections[2].sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
  assert connections[2].recv(1 << 16).startswith(b"HTTP/1.1 200"), "probes are always answered"
  with socket.create_connection(("127.0.0.1", port), timeout=30) as fourth, contextlib.suppress(ConnectionResetError):
    assert fourth.recv(1) == b""
  for connection in connections:
    connection.close()
  asyncio.run_coroutine_threadsafe(strict.stop_listening(2), paced.loop).result(30)
