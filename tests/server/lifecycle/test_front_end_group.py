"""A server of several processes does what one of a single process does; and no process of it outlives another."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import hashlib
import io
import json
import operator
import pathlib
import signal
import socket
import subprocess
import time
import zipfile

from google.rpc import error_details_pb2
import grpc
import httpx
import psutil
import pytest
import tokenizers

from engine.sampling_params import SamplingParams
from extensions.fake_device.device import expected_tokens
from extensions.vllm_api.proto.smg_common_pb2 import GetTokenizerRequest
from extensions.vllm_api.proto.vllm_engine_pb2_grpc import VllmEngineStub
from server.proto import sluice_pb2 as pb
from server.proto import sluice_pb2_grpc as pb_grpc
from tests.server.harness import detail_of, endings_of, reason_of, text_of, token_ids_of
from tests.server.test_main import DEMO, start, wait_for_file

IDS = (7, 8, 9)
# It goes on while a test acts: 20 s at the pace of `server`.
LONG = pb.StopParams(max_tokens=4000, ignore_eos=True)
NUM_CHANNELS = 12
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


@dataclasses.dataclass
class Running:
  """A server's processes."""

  process: subprocess.Popen
  front_ends: list[psutil.Process]
  port: int
  http_port: int
  folder: pathlib.Path

  def channels(
    self,
    stack: contextlib.ExitStack,
    count: int = NUM_CHANNELS,
    connect: Callable[..., grpc.Channel] = grpc.insecure_channel,
  ) -> list[grpc.Channel]:
    """Each with a connection of its own, so many that every process has one where `count` allows that.

    The system spreads connections over the processes by a hash of their ports, now and then all on one: another one
    is opened then in place of the last.
    """
    channels: list[grpc.Channel] = []
    before = self._connections()
    for _ in range(1000):
      channels.append(stack.enter_context(connect(f"127.0.0.1:{self.port}", options=OWN_CONNECTION)))
      grpc.channel_ready_future(channels[-1]).result(timeout=120)
      if len(channels) == count:
        if count < len(self.front_ends) or all(map(operator.sub, self._connections(), before)):
          return channels
        channels.pop().close()
    raise AssertionError(f"of {count} connections a process has none, again and again")

  def _connections(self) -> list[set]:
    """Of each front end, those that it has accepted on the port."""
    return [
      {found.raddr for found in front_end.net_connections("tcp") if found.raddr and found.laddr.port == self.port}
      for front_end in self.front_ends
    ]

  def stubs(self, stack: contextlib.ExitStack, count: int = NUM_CHANNELS) -> list[pb_grpc.GenerationServiceStub]:
    return [pb_grpc.GenerationServiceStub(channel) for channel in self.channels(stack, count)]

  def url(self, path: str) -> str:
    return f"http://127.0.0.1:{self.http_port}{path}"

  def end(self) -> tuple[int, str]:
    """Exit code and standard error, once it has ended; none of its processes may be left."""
    said = self.process.communicate(timeout=180)[1]
    _, left = psutil.wait_procs(self.front_ends, timeout=120)
    assert not left
    return self.process.returncode, said


@contextlib.contextmanager
def serving(folder: pathlib.Path, processes: int, *arguments: str) -> Iterator[Running]:
  """With the fake device; killed at the end, if it has not ended."""
  files = folder / "port", folder / "http_port"
  process = start(
    *("--fake_device", f"--model={DEMO}", "--port=0", f"--port_file={files[0]}", f"--http_port_file={files[1]}"),
    *(f"--frontend_processes={processes}", *arguments),
    module="tools.chaos.server" if "--debug_invariants" in arguments else "server.main",
  )
  try:
    port, http_port = (int(wait_for_file(path, process)) for path in files)
    front_ends = psutil.Process(process.pid).children()
    assert len(front_ends) == processes
    yield Running(process, front_ends, port, http_port, folder)
  finally:
    process.kill()
    process.communicate()


@pytest.fixture(scope="module", params=[0, 2], ids=["one process", "two front ends"])
def server(request, tmp_path_factory) -> Iterator[Running]:
  """Nothing is left in it between tests; it drains at the end."""
  folder = tmp_path_factory.mktemp("server")
  with serving(
    *(folder, request.param, "--fake_step_ms=5", "--max_queued_requests=40", "--max_num_seqs=32"),
    *(f"--access_log={folder / 'calls'}", "--debug_invariants", "--enable_vllm_api"),
  ) as running:
    yield running
    running.process.send_signal(signal.SIGTERM)
    code, said = running.end()
    assert code == 0 and "0 KV blocks in use" in said and said.endswith("stopped, exit code 0\n"), said
    assert "Traceback" not in said


def expected(prompt=IDS, **params) -> list[int]:
  tokens, _ = expected_tokens(prompt, SamplingParams(temperature=0.0, **params), vocab_size=2048, eos_token_ids=(2,))
  return list(tokens)


def asked(prompt=IDS, **fields) -> pb.GenerateRequest:
  fields.setdefault("stopping", pb.StopParams(max_tokens=40, ignore_eos=True))
  fields.setdefault("sampling", pb.SamplingParams(temperature=0.0))
  return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), **fields)


def all_front_ends_told(calls) -> None:
  """Each of these streams ends with UNAVAILABLE or INTERNAL."""
  for call in calls:
    with pytest.raises(grpc.RpcError) as caught:
      list(call)
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL), caught.value


def begin(stubs, **fields) -> list:
  """A long stream on each, of which something has come."""
  calls = [stub.Generate(asked(**{"stopping": LONG} | fields), timeout=240) for stub in stubs]
  for call in calls:
    next(call)
  return calls


# The same with one process and with several.


def test_streams_are_exact_wherever_they_fall(server):
  with contextlib.ExitStack() as stack:
    stubs = server.stubs(stack)
    calls = [(serial, stub.Generate(asked((*IDS, 50 + serial)), timeout=60)) for serial, stub in enumerate(stubs * 2)]
    for serial, call in calls:
      messages = list(call)
      assert token_ids_of(messages) == expected((*IDS, 50 + serial), max_tokens=40, ignore_eos=True)
      (ending,) = endings_of(messages)
      assert ending.reason == pb.FINISH_REASON_LENGTH and ending.last and messages[0].started.model == "sluice-demo"
      assert ending.usage.completion_tokens == 40 and ending.timing.time_to_first_token_s > 0


def test_texts_stops_logprobs_and_several_outputs(server):
  with contextlib.ExitStack() as stack:
    stub = server.stubs(stack, 1)[0]
    whole = list(stub.Generate(asked(), timeout=60))
    text = text_of(whole)
    stop = text[len(text) // 2 :][:3]
    cut = list(stub.Generate(asked(stopping=pb.StopParams(max_tokens=40, ignore_eos=True, stop=[stop])), timeout=60))
    assert text_of(cut) == text[: text.index(stop)]
    assert endings_of(cut)[0].stop_string == stop
    with_logprobs = list(stub.Generate(asked(output=pb.OutputParams(logprobs=2, prompt_logprobs=1)), timeout=60))
    deltas = [delta for message in with_logprobs for delta in message.deltas]
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert [entry.token_id for entry in entries] == token_ids_of(whole) and {len(entry.top) for entry in entries} == {2}
    assert [entry.token_id for delta in deltas for entry in delta.prompt_logprobs] == list(IDS[1:])
    several = stub.GenerateUnary(asked(sampling=pb.SamplingParams(temperature=1.0, seed=5, n=3)), timeout=60)
    assert len({tuple(each.token_ids) for each in several.completions}) == 3


def test_every_process_sends_the_same_tokenizer(server):
  text = "Once upon a time 37 + 5 = ?"
  with contextlib.ExitStack() as stack:
    zips = set()
    for channel in server.channels(stack):
      chunks = list(VllmEngineStub(channel).GetTokenizer(GetTokenizerRequest(), timeout=60))
      zips.add(b"".join(chunk.data for chunk in chunks))
      assert chunks[-1].sha256 == hashlib.sha256(b"".join(chunk.data for chunk in chunks)).hexdigest()
      ids = pb_grpc.GenerationServiceStub(channel).Tokenize(pb.TokenizeRequest(text=text), timeout=60).token_ids
    with zipfile.ZipFile(io.BytesIO(zips.pop())) as archive:
      made = tokenizers.Tokenizer.from_str(archive.read("tokenizer.json").decode())
  assert not zips and list(ids) == made.encode(text).ids


def test_constraints(server):
  choices = ["red", "green", "blue"]
  with contextlib.ExitStack() as stack:
    for stub in server.stubs(stack, 4):
      constraint = pb.OutputConstraint(choice=pb.Choices(values=choices))
      answer = stub.GenerateUnary(
        asked(constraint=constraint, sampling=pb.SamplingParams(temperature=1.0, seed=3, n=2)), timeout=60
      )
      assert all(each.text in choices for each in answer.completions)
      with pytest.raises(grpc.RpcError) as caught:
        stub.GenerateUnary(asked(constraint=pb.OutputConstraint(regex="(")), timeout=60)
      assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_what_cannot_be_served_is_refused_in_the_same_words(server):
  with contextlib.ExitStack() as stack:
    stub = server.stubs(stack, 1)[0]
    for request, code, reason, text in (
      (asked((5000,)), "INVALID_ARGUMENT", "INVALID_REQUEST", "prompt token id 5000 is not in the vocabulary"),
      (asked((2**31 - 1,)), "INVALID_ARGUMENT", "INVALID_REQUEST", "prompt token id 2147483647 is not in"),
      (asked(sampling=pb.SamplingParams(top_p=7)), "INVALID_ARGUMENT", "INVALID_REQUEST", "top_p=7.0 is not allowed"),
      (
        asked(stopping=pb.StopParams(max_tokens=10**6)),
        "INVALID_ARGUMENT",
        "REQUEST_TOO_LONG",
        "length is 4096 tokens",
      ),
    ):
      with pytest.raises(grpc.RpcError, match=text) as caught:
        list(stub.Generate(request, timeout=60))
      assert (caught.value.code().name, reason_of(caught.value)) == (code, reason)


def test_a_full_queue_is_told_before_any_header_with_a_time_to_retry(server):
  with contextlib.ExitStack() as stack:
    stubs = server.stubs(stack)
    calls = begin([stubs[i % NUM_CHANNELS] for i in range(32)])
    calls += [stubs[i % NUM_CHANNELS].Generate(asked(stopping=LONG), timeout=60) for i in range(40)]
    wait_for(server, "sluice_requests_waiting ", 40)
    for stub in stubs:
      call = stub.Generate(asked(stopping=LONG), timeout=60)
      with pytest.raises(grpc.RpcError) as caught:
        list(call)
      assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and reason_of(caught.value) == "OVERLOADED"
      assert detail_of(caught.value, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0
      assert not call.initial_metadata() and dict(call.trailing_metadata())["grpc-retry-pushback-ms"]
    response = httpx.post(
      server.url("/v1/completions"), json={"prompt": [7], "max_tokens": 1, "stream": True}, timeout=60
    )
    assert response.status_code == 429 and response.headers["retry-after"]
    for call in calls:
      call.cancel()
  wait_for(server, "sluice_requests_running ", 0)
  wait_for(server, "sluice_generations_live ", 0)


def test_an_id_is_unique_and_can_be_aborted_from_everywhere(server):
  with contextlib.ExitStack() as stack:
    stubs = server.stubs(stack)
    (call,) = begin(stubs[:1], request_id="mine")
    for stub in stubs:
      with pytest.raises(grpc.RpcError, match="request_id=mine is in use by a live request") as caught:
        list(stub.Generate(asked(request_id="mine"), timeout=60))
      assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    outcomes = [stub.Abort(pb.AbortRequest(request_ids=["mine", "other"])).outcomes for stub in reversed(stubs)]
    aborted, unknown = pb.AbortResponse.OUTCOME_ABORTED, pb.AbortResponse.OUTCOME_NOT_FOUND
    assert [list(each) for each in outcomes] == [[aborted, unknown]] + [[unknown, unknown]] * (NUM_CHANNELS - 1)
    with pytest.raises(grpc.RpcError) as caught:
      list(call)
    assert caught.value.code() is grpc.StatusCode.CANCELLED and reason_of(caught.value) == "ABORTED_BY_REQUEST"
    again = list(stubs[3].Generate(asked(request_id="mine"), timeout=60))
    assert token_ids_of(again) == expected(max_tokens=40, ignore_eos=True)


def metric(text: str, name: str) -> float:
  return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def scrape(server: Running) -> str:
  return httpx.get(server.url("/metrics"), timeout=30).text


def wait_for(server: Running, name: str, wanted: float) -> None:
  give_up_at = time.monotonic() + 120
  while time.monotonic() < give_up_at:
    if metric(scrape(server), name) == wanted:
      return
    time.sleep(0.01)
  raise AssertionError(f"{name} never came to {wanted}")


def test_a_scrape_of_any_process_tells_of_all(server):
  name = 'sluice_calls_total{code="OK",method="sluice.v1.GenerationService/GenerateUnary"'
  wait_for(server, "sluice_generations_live ", 0)
  before = scrape(server)
  with contextlib.ExitStack() as stack:
    for stub in server.stubs(stack):
      stub.GenerateUnary(asked(), timeout=60)
    finished = "sluice_requests_finished_total"
    wait_for(server, finished, metric(before, finished) + NUM_CHANNELS)
    load = pb_grpc.ModelServiceStub(server.channels(stack, 1)[0]).GetLoad(pb.GetLoadRequest(steps_after_s=0))
  for _ in range(6):  # each by a connection of its own
    after = scrape(server)
    for each, grown in (
      (name, NUM_CHANNELS),
      ("sluice_generations_total", NUM_CHANNELS),
      ("sluice_output_tokens_total", 40 * NUM_CHANNELS),
      ("sluice_time_to_first_token_seconds_count", NUM_CHANNELS),
      ("sluice_request_queue_time_seconds_count", NUM_CHANNELS),
      ("sluice_requests_finished_total", NUM_CHANNELS),
    ):
      assert metric(after, each) - metric(before, each) == grown, each
    assert metric(after, "sluice_generations_live ") == 0
    assert metric(after, "sluice_processes ") == 1 + len(server.front_ends)
  assert load.output_tokens_total == metric(after, "sluice_output_tokens_total") and load.steps and load.requests
  assert load.peak_rss_bytes >= (1 + len(server.front_ends)) << 24
  lines = (server.folder / "calls").read_text().splitlines()
  assert sum("GenerateUnary" in line and '"OK"' in line for line in lines) >= NUM_CHANNELS


def test_http_and_the_page(server):
  for _ in range(4):
    body = {"prompt": list(IDS), "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(server.url("/v1/completions"), json=body, timeout=60).json()
    assert answer["choices"][0]["token_ids"] == expected(max_tokens=40, ignore_eos=True)
    assert httpx.get(server.url("/ready")).json() == {"ready": True}
    assert httpx.get(server.url("/")).status_code == 200
  with httpx.stream("GET", server.url("/live"), timeout=30) as live:
    tick = next(line for line in live.iter_lines() if line.startswith("data: "))
    assert '"state":"ready"' in tick and '"map":[[' in tick


def test_no_second_server_joins_the_port(server):
  """Not one that wants the port for itself, and not one that would share it, as gRPC's servers do by themselves."""
  for shares in (0, 1):
    with socket.socket() as other:
      other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shares)
      with pytest.raises(OSError, match="Address already in use"):
        other.bind(("127.0.0.1", server.port))
        other.listen()
  second = start("--fake_device", f"--port={server.port}", "--frontend_processes=1", f"--model={DEMO}")
  said = second.communicate(timeout=180)[1]
  assert second.returncode == 1
  assert said.splitlines()[-1] == (
    f"error: cannot listen on 127.0.0.1:{server.port}: Address already in use; choose another --port or --host"
  )


# How it ends.


def test_a_drain_lets_streams_finish_and_a_signal_to_a_front_end_alone_means_nothing(tmp_path):
  with serving(tmp_path, 2, "--fake_step_ms=1") as server, contextlib.ExitStack() as stack:
    calls = begin(server.stubs(stack), stopping=pb.StopParams(max_tokens=2000, ignore_eos=True))
    for front_end in server.front_ends:
      front_end.send_signal(signal.SIGTERM)
      front_end.send_signal(signal.SIGINT)
    server.process.send_signal(signal.SIGTERM)
    wanted = expected(max_tokens=2000, ignore_eos=True)
    for call in calls:
      rest = list(call)
      assert (
        endings_of(rest)[0].usage.completion_tokens == 2000 and token_ids_of(rest) == wanted[-len(token_ids_of(rest)) :]
      )
    code, said = server.end()
    assert code == 0 and said.endswith("stopped, exit code 0\n") and "0 KV blocks in use" in said, said


def test_a_second_signal_ends_at_once(tmp_path):
  with serving(tmp_path, 1, "--fake_step_ms=200") as server, contextlib.ExitStack() as stack:
    calls = begin(server.stubs(stack, 2))
    server.process.send_signal(signal.SIGTERM)
    # Two of them at once may count as one.
    while httpx.get(server.url("/ready"), timeout=60).status_code == 200:
      pass
    server.process.send_signal(signal.SIGTERM)
    all_front_ends_told(calls)
    assert server.end()[0] == 0


@pytest.mark.catalogue("A5")
def test_the_death_of_the_engines_process_ends_the_others(tmp_path):
  with serving(tmp_path, 2, "--fake_step_ms=2") as server, contextlib.ExitStack() as stack:
    calls = begin(server.stubs(stack))
    server.process.kill()
    all_front_ends_told(calls)
    assert server.end()[0] == -signal.SIGKILL
    with pytest.raises(OSError):
      socket.create_connection(("127.0.0.1", server.port)).close()


@pytest.mark.catalogue("A5")
def test_the_death_of_a_front_end_ends_the_server(tmp_path):
  with serving(tmp_path, 2, "--fake_step_ms=2") as server, contextlib.ExitStack() as stack:
    calls = begin(server.stubs(stack))
    server.front_ends[0].kill()
    all_front_ends_told(calls)
    code, said = server.end()
    assert code == 1 and "front end 0 (process" in said and said.endswith("stopped, exit code 1\n"), said


@pytest.mark.catalogue("A5")
def test_a_front_end_that_stands_does_not_keep_an_engine_that_dies(tmp_path):
  """A stopped process hears of nothing, and ends as soon as it runs again."""
  with serving(tmp_path, 1, "--fake_step_ms=2") as server:
    server.front_ends[0].suspend()
    server.process.kill()
    server.process.wait()
    server.front_ends[0].resume()
    assert server.end()[0] == -signal.SIGKILL


@pytest.mark.parametrize(
  "arguments, said",
  [
    (("--api_key_file=/does/not/exist",), "api_key_file=/does/not/exist cannot be read"),
    (("--enable_channelz", "--admin_port=0"), "enable_channelz shows the connections of one process"),
    (("--model=BAD",), "tokenizer"),
  ],
)
def test_a_bad_start_is_one_line(tmp_path, arguments, said):
  bad = tmp_path / "bad"
  bad.mkdir()
  for path in DEMO.glob("*.json"):
    (bad / path.name).write_bytes(path.read_bytes())
  (bad / "tokenizer.json").write_text("{}")
  arguments = [argument.replace("BAD", str(bad)) for argument in arguments]
  process = start("--fake_device", f"--model={DEMO}", "--port=0", "--frontend_processes=2", *arguments)
  text = process.communicate(timeout=180)[1]
  errors = [line for line in text.splitlines() if line.startswith("error: ")]
  assert process.returncode == 1 and len(errors) == 1 and said in errors[0] and "Traceback" not in text, text


@contextlib.contextmanager
def responses_of(server) -> Iterator[httpx.Client]:
  """A client with a connection for each request, which any front end may accept."""
  url, limits = f"http://127.0.0.1:{server.http_port}/v1/responses", httpx.Limits(max_keepalive_connections=0)
  with httpx.Client(base_url=url, limits=limits, timeout=60) as client:
    yield client


def test_every_front_end_knows_every_stored_response(server):
  with responses_of(server) as client:
    first = client.post("", json={"input": "37 + 5 = ?", "max_output_tokens": 4}).json()
    place, [message] = f"/{first['id']}", first["output"]
    question, more = ({"role": "user", "content": text} for text in ("37 + 5 = ?", "And?"))
    counts = set()
    for _ in range(10):
      assert client.get(place).json() == first
      assert client.get(f"{place}/input_items").json()["data"][0]["content"][0]["text"] == "37 + 5 = ?"
      for body in (
        {"input": "And?", "previous_response_id": first["id"]},
        {"input": [question, {"id": message["id"]}, more]},
      ):
        counts.add(client.post("/input_tokens", json=body).json()["input_tokens"])
    assert len(counts) == 1
    assert client.delete(place).json()["deleted"]
    assert {client.get(place).status_code for _ in range(10)} == {404}


def test_every_front_end_cancels_every_response(server):
  body = {"input": "37 + 5 = ?", "max_output_tokens": 2000, "stream": True, "ignore_eos": True}
  with responses_of(server) as client:
    for _ in range(6):
      with client.stream("POST", "", json=body) as stream:
        lines = stream.iter_lines()
        response_id = next(json.loads(line[6:])["response"]["id"] for line in lines if line.startswith("data: "))
        assert next(line for line in lines if "output_item.added" in line)
        cancelled = client.post(f"/{response_id}/cancel").json()
        assert (cancelled["id"], cancelled["status"]) == (response_id, "cancelled")
        last = [line for line in lines if line.startswith("data: ")][-1]
        assert json.loads(last[6:])["response"]["status"] == "cancelled"
      assert client.get(f"/{response_id}").json()["status"] == "cancelled"
      assert client.post(f"/{response_id}/cancel").status_code == 400


@pytest.mark.long
def test_a_budget_of_reasoning_reaches_the_engine(tmp_path):
  (tmp_path / "template").write_text("{% for message in messages %}{{ message.content }}{% endfor %}<think>")
  with serving(tmp_path, 2, f"--chat_template={tmp_path / 'template'}") as server:
    url = f"http://127.0.0.1:{server.http_port}/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "37 + 5 = ?"}], "thinking_token_budget": 6, "n": 4, "seed": 1}
    for more in ({"max_tokens": 40, "ignore_eos": True}, {"structured_outputs": {"choice": ["yes"]}}):
      answer = httpx.post(url, json=body | more, timeout=60).json()
      messages = [choice["message"] for choice in answer["choices"]]
      assert len(messages) == 4 and all(message["content"] for message in messages)
      assert any(message.get("reasoning") for message in messages)
    assert {message["content"] for message in messages} == {"yes"}
