"""Clients that go away, deadlines, drains, deaths: every request one ending, every page back."""

from concurrent.futures import ThreadPoolExecutor
import contextlib
import random
import socket
import struct
import threading
import time

from google.rpc import error_details_pb2
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
import pytest

from engine.errors import ConfigError
from engine.request import FinishReason, Request
from engine.sampling_params import SamplingParams
from server.lifecycle.host import HostOptions
from server.proto import sluice_pb2 as pb
from server.proto import sluice_pb2_grpc as pb_grpc
from tests.fakes import oracle
from tests.server import http2
from tests.server.harness import (
  Served,
  detail_of,
  endings_of,
  generate,
  pages_come_back_within_two_steps,
  reason_of,
  running,
  tiny_config,
  token_ids_of,
)

IDS = pb.TokenIds(ids=[7, 8, 9])
FOREVER = pb.StopParams(max_tokens=400, ignore_eos=True)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
INVALID = grpc.StatusCode.INVALID_ARGUMENT
READINESS = "sluice.v1.GenerationService"


def health(served: Served, service: str) -> int:
  stub = health_pb2_grpc.HealthStub(served.channel)
  return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60).status


def begin(served: Served, **fields):
  """A stream that has brought its first message, with the device stopped after it."""
  call = served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER, **fields), timeout=60)
  first = next(call)
  served.runner.go.clear()
  return call, first


@pytest.fixture
def paced(tokenizer):
  """A server whose device takes some time, so that streams do not end before a test can act."""
  with running(tokenizer) as served:
    served.runner.seconds = 0.005
    yield served


@pytest.mark.catalogue("B2")
def test_cancel_frees_the_pages_within_two_steps(paced):
  call, _ = begin(paced)
  call.cancel()
  pages_come_back_within_two_steps(paced)
  with pytest.raises(grpc.RpcError):
    next(call)
  assert paced.engine.stats().finished[FinishReason.ABORT] == 1


@pytest.mark.catalogue("B2")
def test_cancel_of_a_unary_call(paced):
  call = paced.generation.GenerateUnary.future(
    pb.GenerateRequest(token_ids=IDS, stopping=FOREVER, sampling=pb.SamplingParams(n=3))
  )
  paced.wait_for_steps(3)
  paced.runner.go.clear()
  call.cancel()
  pages_come_back_within_two_steps(paced)


@pytest.mark.catalogue("B2")
def test_cancel_while_queued(paced):
  paced.runner.go.clear()
  calls = [paced.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER)) for _ in range(4)]
  paced.wait_until(lambda: len(paced.generations) == 4)
  for call in calls:
    call.cancel()
  pages_come_back_within_two_steps(paced)


@pytest.mark.catalogue("B1")
def test_a_client_that_vanishes(paced):
  """Its connection is cut, as when a process is killed."""
  host, port = paced.address.rsplit(":", 1)
  listener = socket.create_server(("127.0.0.1", 0))
  sockets = []

  def forward(source, sink):
    try:
      while data := source.recv(65536):
        sink.sendall(data)
    except OSError:
      pass

  def relay():
    inner, _ = listener.accept()
    outer = socket.create_connection((host, int(port)))
    sockets.extend((inner, outer))
    for pair in ((inner, outer), (outer, inner)):
      threading.Thread(target=forward, args=pair).start()

  thread = threading.Thread(target=relay)
  thread.start()
  with grpc.insecure_channel(f"127.0.0.1:{listener.getsockname()[1]}") as channel:
    call = pb_grpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER))
    next(call)
    thread.join(60)
    paced.runner.go.clear()
    for each in sockets:
      each.shutdown(socket.SHUT_RDWR)
    pages_come_back_within_two_steps(paced)
    with pytest.raises(grpc.RpcError):
      list(call)
  for each in (*sockets, listener):
    each.close()


@pytest.mark.catalogue("B7")
def test_the_clients_deadline_frees_the_pages_within_two_steps(paced):
  for timeout in (0.8, 5.0, 50.0):
    call = paced.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER), timeout=timeout)
    with contextlib.suppress(grpc.RpcError):  # a busy machine has let it pass before the first token
      next(call)
      break
  paced.runner.go.clear()
  with pytest.raises(grpc.RpcError) as caught:
    list(call)
  assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
  pages_come_back_within_two_steps(paced)


@pytest.mark.catalogue("B6")
def test_a_deadline_in_the_queue_never_runs(tokenizer):
  config = tiny_config(max_num_seqs=1)
  with running(tokenizer, config=config) as served:
    served.runner.seconds = 0.02
    first = served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER))
    next(first)
    request = pb.GenerateRequest(token_ids=IDS, stopping=FOREVER)
    request.queue_timeout.FromMilliseconds(50)
    with pytest.raises(grpc.RpcError, match="still queued after .* its queue deadline; try again") as caught:
      served.generation.GenerateUnary(request)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert reason_of(caught.value) == "DEADLINE_EXCEEDED"
    assert served.engine.stats().finished[FinishReason.TIMEOUT] == 1
    served.runner.seconds = 0.0
    assert len(token_ids_of(list(first))) > 0
    assert served.engine.stats().num_prefill_tokens == 3, "the expired request must not have run"


@pytest.mark.catalogue("B8")
def test_the_servers_own_limit_on_a_request(tokenizer):
  config = tiny_config(max_num_seqs=8, request_timeout_s=0.2)
  with running(tokenizer, config=config) as served:
    served.runner.seconds = 0.005
    for timeout in (None, 1000):  # a client cannot buy more time
      with pytest.raises(grpc.RpcError, match="not finished after .* its deadline") as caught:
        list(served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER), timeout=timeout))
      assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.catalogue("B3")
def test_abort(paced):
  call, first = begin(paced, request_id="mine", sampling=pb.SamplingParams(n=2))
  assert first.started.request_id == "mine"
  answer = paced.generation.Abort(pb.AbortRequest(request_ids=["mine", "unknown", "mine"]))
  assert list(answer.outcomes) == [
    pb.AbortResponse.OUTCOME_ABORTED,
    pb.AbortResponse.OUTCOME_NOT_FOUND,
    pb.AbortResponse.OUTCOME_NOT_FOUND,
  ]
  with pytest.raises(grpc.RpcError, match="request mine was aborted by an Abort call") as caught:
    list(call)
  assert caught.value.code() is grpc.StatusCode.CANCELLED
  assert reason_of(caught.value) == "ABORTED_BY_REQUEST"
  pages_come_back_within_two_steps(paced)
  generate(paced, token_ids=IDS, request_id="mine", stopping=pb.StopParams(max_tokens=3))


@pytest.mark.catalogue("C1", "B13")
def test_overload_is_told_at_once_with_when_to_retry(tokenizer):
  config = tiny_config(max_num_seqs=1, max_queued_requests=2)
  with running(tokenizer, config=config) as served:
    served.runner.seconds = 0.05
    running_call = served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER))
    next(running_call)
    queued = [served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER)) for _ in range(2)]
    served.wait_until(lambda: served.engine.num_live == 3)
    for n in (1, 4):
      with pytest.raises(grpc.RpcError, match="2 requests are queued, the limit is 2; try again") as caught:
        served.generation.GenerateUnary(pb.GenerateRequest(token_ids=IDS, sampling=pb.SamplingParams(n=n)))
      assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
      assert reason_of(caught.value) == "OVERLOADED"
      retry_ms = detail_of(caught.value, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds()
      assert retry_ms > 0
      assert dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"] == str(retry_ms)
    assert served.engine.num_live == 3
    for call in (running_call, *queued):
      call.cancel()


def test_n_outputs_are_admitted_all_or_none(tokenizer):
  config = tiny_config(max_num_seqs=2, max_queued_requests=3)
  with running(tokenizer, config=config) as served:
    served.runner.go.clear()
    with pytest.raises(grpc.RpcError, match="requests are queued, the limit is 3"):
      served.generation.GenerateUnary(pb.GenerateRequest(token_ids=IDS, sampling=pb.SamplingParams(n=16)))
    pages_come_back_within_two_steps(served)


@pytest.mark.catalogue("A1")
def test_drain_lets_running_streams_finish_and_nobody_else_in(tokenizer):
  host = HostOptions(drain_delay_s=1.0, drain_timeout_s=60)
  with running(tokenizer, host=host) as served:
    served.runner.seconds = 0.02
    assert (health(served, ""), health(served, READINESS)) == (SERVING, SERVING)
    calls = [served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER)) for _ in range(8)]
    firsts = [next(call) for call in calls]
    stopped = time.monotonic()
    served.stop()
    served.wait_until(lambda: health(served, READINESS) == NOT_SERVING)
    assert health(served, "") == SERVING
    try:
      generate(served, token_ids=IDS, stopping=pb.StopParams(max_tokens=2))
    except grpc.RpcError:
      assert time.monotonic() - stopped >= 1.0, "the balancer does not know yet"
    with pytest.raises(grpc.RpcError, match="shutting down; send the request to another") as caught:
      while True:
        generate(served, token_ids=IDS, stopping=pb.StopParams(max_tokens=2))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and reason_of(caught.value) == "DRAINING"
    assert detail_of(caught.value, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 5000
    assert "grpc-retry-pushback-ms" not in dict(caught.value.trailing_metadata()), "another server may take it at once"
    served.runner.seconds = 0.0
    for first, call in zip(firsts, calls, strict=True):
      messages = [first, *call]
      assert len(token_ids_of(messages)) == 400 and endings_of(messages)[-1].last
    served.thread.join(180)
    assert served.exit_code == [0]


@pytest.mark.catalogue("A2", "A3")
@pytest.mark.parametrize("how", ["timeout", "second signal"])
def test_a_drain_that_takes_too_long_ends_streams_with_an_error(tokenizer, how):
  host = HostOptions(drain_timeout_s=0.05 if how == "timeout" else 600)
  with running(tokenizer, host=host) as served:
    served.runner.seconds = 0.05
    call = served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER))
    next(call)
    served.stop()
    if how == "second signal":
      served.stop()
    with pytest.raises(grpc.RpcError, match="shut down before this request finished") as caught:
      list(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and reason_of(caught.value) == "DRAINING"
    served.thread.join(180)
    assert served.exit_code == [0]


def test_the_engines_death_is_seen_by_all(tokenizer, caplog):
  with running(tokenizer) as served:
    served.runner.seconds = 0.02
    calls = [served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER)) for _ in range(4)]
    for call in calls:
      next(call)
    served.runner.fail = RuntimeError("secret: the device is on fire")
    for call in calls:
      with pytest.raises(grpc.RpcError, match="the engine has failed, incident [0-9a-f]{8} in") as caught:
        list(call)
      assert caught.value.code() is grpc.StatusCode.INTERNAL and reason_of(caught.value) == "ENGINE_FAILURE"
      assert "secret" not in str(caught.value) and "RuntimeError" not in str(caught.value)
    served.thread.join(180)
    assert served.exit_code == [1]
    with pytest.raises(grpc.RpcError) as caught:
      generate(served, token_ids=IDS)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
  assert "secret: the device is on fire" in caplog.text


@pytest.mark.catalogue("A7")
def test_starting_is_told(tokenizer):
  with running(tokenizer, serve=False) as served:
    assert (health(served, ""), health(served, READINESS)) == (SERVING, NOT_SERVING)
    for call in (
      lambda: generate(served, token_ids=IDS),
      lambda: served.generation.Abort(pb.AbortRequest(request_ids=["a"])),
      lambda: served.model.GetModelInfo(pb.GetModelInfoRequest()),
      lambda: served.model.GetLoad(pb.GetLoadRequest()),
    ):
      with pytest.raises(grpc.RpcError, match="the model is loading; try again") as caught:
        call()
      assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and reason_of(caught.value) == "STARTING"


def test_health_of_an_unknown_service(served):
  with pytest.raises(grpc.RpcError) as caught:
    health(served, "nonsense")
  assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_second_server_on_the_port_is_refused(served):
  port = int(served.address.rsplit(":", 1)[1])
  with (
    pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another"),
    running(None, host=HostOptions(port=port)),
  ):
    pass
  with (
    pytest.raises(ConfigError, match="cannot listen on nowhere.invalid:"),
    running(None, host=HostOptions(host="nowhere.invalid")),
  ):
    pass
  generate(served, token_ids=IDS, stopping=pb.StopParams(max_tokens=2))


def test_more_rpcs_than_allowed_are_refused_at_once(tokenizer):
  with running(tokenizer, host=HostOptions(max_concurrent_rpcs=2)) as served:
    served.runner.go.clear()
    calls = [served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER)) for _ in range(2)]
    served.wait_until(lambda: len(served.generations) == 2)
    with pytest.raises(grpc.RpcError, match="2 calls are in progress, the limit is 2; try again in 1 s") as caught:
      generate(served, token_ids=IDS)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and reason_of(caught.value) == "OVERLOADED"
    assert dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"
    assert health(served, "") == SERVING, "probes are not among them"
    for call in calls:
      call.cancel()
    served.runner.go.set()


@pytest.mark.catalogue("B5")
def test_a_client_that_stops_reading(tokenizer):
  """Once its window is full the work for it stops, pages and all; when it reads again it is told."""
  config = tiny_config(max_model_len=4096, num_blocks=8192, max_num_seqs=16)
  host, window = HostOptions(stream_stall_timeout_s=0.2), (("grpc.http2.bdp_probe", 0),)  # of 64 KiB
  with (
    running(tokenizer, config=config, host=host) as served,
    grpc.insecure_channel(served.address, options=window) as channel,
  ):
    stalled = pb_grpc.GenerationServiceStub(channel).Generate(
      pb.GenerateRequest(
        token_ids=IDS,
        sampling=pb.SamplingParams(n=16),
        output=pb.OutputParams(logprobs=0),
        stopping=pb.StopParams(max_tokens=4000, ignore_eos=True),
      )
    )
    served.wait_until(lambda: served.engine.stats().finished[FinishReason.ABORT] == 16)
    assert served.blocks_in_use == 0
    generate(served, token_ids=IDS, stopping=pb.StopParams(max_tokens=5))  # nobody else is harmed
    with pytest.raises(grpc.RpcError, match="the client took nothing for 0.2 s; read the stream faster") as caught:
      list(stalled)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and reason_of(caught.value) == "SLOW_CONSUMER"


@pytest.mark.catalogue("B1", "B2", "B11")
def test_clients_of_all_kinds_at_once(tokenizer):
  """Cancels, deadlines, aborts, duplicates and mistakes between streams that must be token-exact."""
  config = tiny_config(max_model_len=256, num_blocks=40, max_num_seqs=8, max_queued_requests=1000)

  def behave(seed: int) -> str:
    rng = random.Random(seed)
    prompt = [rng.randrange(5, 400) for _ in range(rng.randrange(1, 40))]
    stopping = pb.StopParams(max_tokens=rng.randrange(1, 60), ignore_eos=True)
    sampling = pb.SamplingParams(temperature=0.0, n=rng.choice((1, 1, 3)))
    request = pb.GenerateRequest(
      token_ids=pb.TokenIds(ids=prompt),
      stopping=stopping,
      sampling=sampling,
      request_id=f"r{seed // 2}" if rng.random() < 0.2 else f"u{seed}",
    )
    kind = rng.choice(("stream", "stream", "cancel", "deadline", "abort", "mistake", "stop"))
    if kind == "mistake":
      request.sampling.top_p = 7.0
    if kind == "stop":
      request.stopping.stop.extend("aeiou")
    call = served.generation.Generate(request, timeout=rng.random() / 20 if kind == "deadline" else 60)
    messages = []
    try:
      for message in call:
        messages.append(message)
        if kind == "cancel" and rng.random() < 0.2:
          call.cancel()
        if kind == "abort" and rng.random() < 0.2:
          served.generation.Abort(pb.AbortRequest(request_ids=[request.request_id]))
    except grpc.RpcError as error:
      assert error.code() in (
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ALREADY_EXISTS,
        INVALID,
      ), error
      # A client's own cancel or deadline may come between the last message and the status.
      assert kind in ("cancel", "deadline") or not any(finished.last for finished in endings_of(messages))
      return kind
    assert [finished.last for finished in endings_of(messages)] == [False] * (sampling.n - 1) + [True]
    params = SamplingParams(temperature=0.0, max_tokens=stopping.max_tokens, ignore_eos=True)
    wanted, _ = oracle(config, Request("alone", tuple(prompt), params))
    for index in range(sampling.n):
      ids = token_ids_of(messages, index)
      assert ids == list(wanted) or kind == "stop" and ids == list(wanted[: len(ids)])
    return "exact"

  with running(tokenizer, config=config) as served:
    with ThreadPoolExecutor(32) as pool:
      outcomes = list(pool.map(behave, range(400)))
    assert {"exact", "cancel", "deadline", "mistake"} <= set(outcomes)
    served.wait_until(lambda: served.engine.num_live == 0 and len(served.generations) == 0)
    assert not served.generations._outputs and not served.port._held


def test_health_lists_all_services(tokenizer):
  with running(tokenizer, host=HostOptions(enable_vllm_api=True)) as served:
    listed = health_pb2_grpc.HealthStub(served.channel).List(health_pb2.HealthListRequest(), timeout=60).statuses
    names = ("", "sluice.v1.GenerationService", "sluice.v1.ModelService", "vllm.grpc.engine.VllmEngine")
    assert {name: status.status for name, status in listed.items()} == dict.fromkeys(names, SERVING)
    assert [health(served, name) for name in names] == [SERVING] * 4


@pytest.mark.catalogue("A1", "B5")
def test_one_who_watches_health_and_never_reads_holds_up_no_drain(tokenizer):
  watch = health_pb2.HealthCheckRequest(service="sluice.v1.GenerationService")
  with running(tokenizer) as served, http2.Connection(served.address) as deaf:
    body = watch.SerializeToString()
    deaf.send(
      http2.PREFACE,
      http2.frame(http2.SETTINGS, payload=struct.pack(">HI", 4, 0)),  # no byte may be sent to it
      http2.frame(http2.SETTINGS, http2.ACK),
      http2.frame(http2.HEADERS, http2.END_HEADERS, 1, http2.headers("/grpc.health.v1.Health/Watch")),
      http2.frame(http2.DATA, http2.END_STREAM, 1, struct.pack(">BI", 0, len(body)) + body),
    )
    deaf.wait_for(http2.HEADERS)  # behind which the status waits
    beside = health_pb2_grpc.HealthStub(served.channel).Watch(watch, timeout=60)
    assert next(beside).status == SERVING
    served.stop()
    assert next(beside).status == NOT_SERVING
    served.thread.join(180)
    assert served.exit_code == [0]


def test_reflection_speaks_both_versions(served):
  from grpc_reflection.v1alpha import reflection_pb2

  request = reflection_pb2.ServerReflectionRequest
  for version in ("v1", "v1alpha"):
    call = served.channel.stream_stream(
      f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
      request_serializer=request.SerializeToString,
      response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    services, symbol, method, nothing = call(
      iter(
        [
          request(list_services=""),
          request(file_containing_symbol="sluice.v1.GenerationService"),
          request(file_containing_symbol="sluice.v1.GenerationService.Generate"),
          request(file_containing_symbol="sluice.v1.GenerationService.Nothing"),
        ]
      )
    )
    names = {service.name for service in services.list_services_response.service}
    assert {"sluice.v1.GenerationService", "sluice.v1.ModelService", "grpc.health.v1.Health"} <= names
    assert symbol.file_descriptor_response.file_descriptor_proto
    assert method.file_descriptor_response == symbol.file_descriptor_response
    assert nothing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
