"""One tenant from another: what it may abort and queue, what ids it sees, which prefixes it hits. And limits of all."""

from collections.abc import Iterator
import contextlib
import dataclasses
import pathlib
import re
import subprocess
import sys
import time

from google.rpc import error_details_pb2
import grpc
import httpx
import psutil
import pytest

from engine.errors import ConfigError
from server.client import Client, SluiceError
from server.errors import MemoryPressure
from server.lifecycle.host import HostOptions
from server.proto import sluice_pb2 as pb
from server.security import memory_limit
from server.security.memory_limit import MemoryLimit
from tests.server.harness import Served, detail_of, endings_of, reason_of, running, tiny_config
from tools.certificates import replace_file

KEYS = {
  "a": "the-key-of-tenant-a",
  "a2": "another-key-of-tenant-a",
  "b": "the-key-of-tenant-b",
  "": "a-key-of-nobody-else",
}
PROMPT = list(range(20, 60))  # five blocks of 8
IDS = pb.TokenIds(ids=PROMPT)
FOREVER = pb.StopParams(max_tokens=400, ignore_eos=True)
FEW = pb.StopParams(max_tokens=3, ignore_eos=True)
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
CONFIG = tiny_config(max_num_seqs=1, max_queued_requests=4, max_queued_tokens=200)


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> pathlib.Path:
  path = tmp_path_factory.mktemp("keys") / "keys"
  lines = (f"{KEYS['a']} a", f"{KEYS['a2']} a", f"{KEYS['b']} b", KEYS[""])
  replace_file(path, "\n".join(lines).encode())
  return path


@contextlib.contextmanager
def locked(keys, **changes) -> Iterator[Served]:
  """A server with tenants."""
  config = dataclasses.replace(CONFIG, max_num_seqs=8, max_queued_requests=64, max_queued_tokens=9999, **changes)
  with running(None, host=HostOptions(http_port=0, api_key_file=str(keys)), config=config) as served:
    yield served


@pytest.fixture
def tenants(keys) -> Iterator[Served]:
  with locked(keys) as served:
    yield served


def of(who: str) -> tuple[tuple[str, str], ...]:
  """The metadata of a call by a tenant."""
  return (("x-api-key", KEYS[who]),)


def abort(served: Served, who: str, *request_ids: str) -> list[int]:
  answer = served.generation.Abort(pb.AbortRequest(request_ids=request_ids), metadata=of(who), timeout=30)
  return list(answer.outcomes)


@pytest.mark.catalogue("B3", "I6")
def test_a_tenant_aborts_its_own_requests_alone(tenants):
  aborted, not_found = pb.AbortResponse.OUTCOME_ABORTED, pb.AbortResponse.OUTCOME_NOT_FOUND
  tenants.runner.seconds = 0.02
  asked = pb.GenerateRequest(token_ids=IDS, stopping=FOREVER, request_id="job")
  call = tenants.generation.Generate(asked, metadata=of("a"), timeout=60)
  next(call)
  tenants.runner.go.clear()
  assert abort(tenants, "b", "job") == abort(tenants, "", "job") == [not_found]
  assert len(tenants.generations) == 1
  assert abort(tenants, "a2", "job", "job") == [aborted, not_found], "by any key of the same tenant"
  tenants.runner.go.set()
  with pytest.raises(grpc.RpcError, match="request job was aborted by an Abort call") as caught:
    list(call)
  assert caught.value.code() is grpc.StatusCode.CANCELLED and reason_of(caught.value) == "ABORTED_BY_REQUEST"


@pytest.mark.catalogue("B9", "I6")
def test_ids_of_other_tenants_are_not_seen(tenants):
  """The same id is a duplicate within a tenant; between two it is neither refused nor mixed up."""
  tenants.runner.seconds = 0.05
  asked = pb.GenerateRequest(token_ids=IDS, stopping=FOREVER, request_id="job")
  calls = [tenants.generation.Generate(asked, metadata=of(who), timeout=60) for who in "ab"]
  firsts = [next(call) for call in calls]
  assert [first.started.request_id for first in firsts] == ["job", "job"]
  with pytest.raises(grpc.RpcError, match="request_id=job is in use by a live request; choose another") as caught:
    tenants.generation.GenerateUnary(asked, metadata=of("a2"), timeout=30)
  assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS and reason_of(caught.value) == "DUPLICATE_REQUEST"
  body = {"prompt": PROMPT, "max_tokens": 2, "request_id": "job"}
  url = f"http://127.0.0.1:{tenants.host.http_port}/v1/completions"
  assert httpx.post(url, json=body, headers={"x-api-key": KEYS["b"]}, timeout=30).status_code == 200
  assert abort(tenants, "b", "job") == [pb.AbortResponse.OUTCOME_ABORTED]
  tenants.runner.seconds = 0.0
  tokens = [sum(len(delta.token_ids) for delta in first.deltas) for first in firsts]
  tokens[0] += sum(len(delta.token_ids) for message in calls[0] for delta in message.deltas)
  assert tokens[0] == 400, "the first tenant's goes on to its end"
  with pytest.raises(grpc.RpcError):
    list(calls[1])


@pytest.mark.catalogue("I6")
def test_ids_that_the_server_makes_cannot_be_guessed(served):
  made = set()
  for _ in range(50):
    (*_, last) = served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FEW), timeout=30)
    answer = served.generation.GenerateUnary(pb.GenerateRequest(token_ids=IDS, stopping=FEW), timeout=30)
    made.add(answer.request_id)
    assert last.finished[-1].last
  assert len(made) == 50 and all(re.fullmatch("g-[0-9a-f]{32}", each) for each in made), "128 random bits"


def cached_tokens(served: Served, who: str, **fields) -> int:
  call = served.generation.Generate(
    pb.GenerateRequest(token_ids=IDS, stopping=FEW, **fields), metadata=of(who), timeout=30
  )
  return endings_of(list(call))[-1].usage.cached_tokens


@pytest.mark.catalogue("I1")
def test_prefixes_are_shared_within_a_tenant_alone(tenants):
  """And what is reported as cached is what the caller's own tenant has sent before."""
  assert cached_tokens(tenants, "a") == 0
  assert cached_tokens(tenants, "a") == cached_tokens(tenants, "a2") == 32, "of 40 tokens the last block is computed"
  assert cached_tokens(tenants, "b") == cached_tokens(tenants, "") == 0
  assert cached_tokens(tenants, "b") == cached_tokens(tenants, "") == 32
  assert cached_tokens(tenants, "a", cache_salt="x") == 0
  assert cached_tokens(tenants, "a", cache_salt="x") == 32
  # Spelled together they are the same.
  assert cached_tokens(tenants, "", cache_salt="a") == 0


@pytest.mark.catalogue("I1")
def test_probing_another_tenants_prefix_finds_nothing(tenants):
  """A thousand guesses that would hit if they were the victim's own; with salts, so that none hits another guess."""
  assert cached_tokens(tenants, "a") == 0

  def guess(index: int) -> grpc.Future:
    asked = pb.GenerateRequest(token_ids=IDS, stopping=pb.StopParams(max_tokens=1), cache_salt=f"guess {index}")
    return tenants.generation.GenerateUnary.future(asked, metadata=of("b"), timeout=60)

  hits = 0
  for start in range(0, 1000, 25):
    calls = [guess(index) for index in range(start, start + 25)]
    hits += sum(call.result(60).completions[0].finished.usage.cached_tokens for call in calls)
    assert cached_tokens(tenants, "a") == 32, "the victim's is still there"
  assert hits == 0


@pytest.mark.catalogue("I1")
@pytest.mark.parametrize("scope, own, others", [("global", 32, 32), ("request", 0, 0), ("off", 0, 0)])
def test_other_scopes_of_the_prefix_cache(keys, scope, own, others):
  with locked(keys, prefix_cache_scope=scope) as served:
    assert [cached_tokens(served, who) for who in ("a", "a", "b")] == [0, own, others]


# The queue.


def fill(served: Served, count: int, **fields) -> list[grpc.Call]:
  """One request that runs and `count` that wait."""
  served.runner.go.clear()
  calls = [served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER, **fields), timeout=60)]
  served.wait_until(lambda: served.engine.stats().num_running == 1)
  calls += [
    served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER, **fields), timeout=60)
    for _ in range(count)
  ]
  served.wait_until(lambda: len(served.generations) == count + 1)
  return calls


def refusal(served: Served, **fields) -> grpc.RpcError:
  with pytest.raises(grpc.RpcError) as caught:
    served.generation.GenerateUnary(pb.GenerateRequest(stopping=FEW, **fields), timeout=30)
  error = caught.value
  assert error.code() is EXHAUSTED
  retry_ms = detail_of(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds()
  assert retry_ms > 0 and dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == str(retry_ms)
  assert not error.initial_metadata(), "a status alone, so that a client may retry"
  return error


@pytest.mark.catalogue("C1")
def test_exactly_those_beyond_the_queue_are_refused():
  """One runs, four wait, and of ten more each is told so, over both protocols; all that got in are served."""
  host = HostOptions(http_port=0)
  with running(None, host=host, config=CONFIG) as served:
    calls = fill(served, 4)
    for _ in range(5):
      error = refusal(served, token_ids=IDS)
      assert error.details() == "4 requests are queued, the limit is 4; try again in 1 s"
      assert reason_of(error) == "OVERLOADED"
      answer = httpx.post(
        f"http://127.0.0.1:{served.host.http_port}/v1/completions", json={"prompt": PROMPT}, timeout=30
      )
      assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
      assert answer.json()["error"] == {
        "message": "4 requests are queued, the limit is 4; try again in 1 s",
        "type": "rate_limit_error",
        "param": None,
        "code": "server_overloaded",
      }
    assert served.engine.num_live == 5 and served.generations.num_started == 5
    served.runner.go.set()
    assert [endings_of(list(call))[-1].last for call in calls] == [True] * 5


@pytest.mark.catalogue("C2")
def test_exactly_those_beyond_the_backlog_of_prompt_tokens_are_refused():
  config = dataclasses.replace(CONFIG, max_queued_requests=64)
  with running(None, host=HostOptions(http_port=0), config=config) as served:
    calls = fill(served, 5)  # of 40 tokens each
    for prompt in (PROMPT, [7]):
      error = refusal(served, token_ids=pb.TokenIds(ids=prompt))
      said = f"200 prompt tokens are queued and this request has {len(prompt)}, the limit is 200; try again in 1 s"
      assert error.details() == said and reason_of(error) == "PREFILL_BACKLOG"
      answer = httpx.post(
        f"http://127.0.0.1:{served.host.http_port}/v1/completions", json={"prompt": prompt}, timeout=30
      )
      assert (answer.status_code, answer.json()["error"]["message"]) == (429, said)
    assert served.engine.num_live == 6
    served.runner.go.set()
    assert [endings_of(list(call))[-1].last for call in calls] == [True] * 6


@pytest.mark.catalogue("C14")
def test_a_tenant_that_floods_leaves_room_for_the_others(keys):
  config = dataclasses.replace(CONFIG, max_queued_share_per_tenant=0.5)
  with running(None, host=HostOptions(http_port=0, api_key_file=str(keys)), config=config) as served:
    served.runner.go.clear()
    asked = pb.GenerateRequest(token_ids=IDS, stopping=FEW)
    calls = [served.generation.GenerateUnary.future(asked, metadata=of("a"), timeout=60)]
    served.wait_until(lambda: served.engine.stats().num_running == 1)
    calls += [served.generation.GenerateUnary.future(asked, metadata=of(who), timeout=60) for who in ("a", "a2")]
    served.wait_until(lambda: len(served.generations) == 3)
    said = "2 requests of this tenant are queued, its share of the queue is 2; try again in 1 s"
    for who in ("a", "a2"):
      with pytest.raises(grpc.RpcError) as caught:
        served.generation.GenerateUnary(asked, metadata=of(who), timeout=30)
      assert (caught.value.code(), caught.value.details()) == (EXHAUSTED, said)
      assert reason_of(caught.value) == "TENANT_QUOTA"
      assert detail_of(caught.value, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 1000
      url, headers = f"http://127.0.0.1:{served.host.http_port}/v1/completions", {"x-api-key": KEYS[who]}
      answer = httpx.post(url, json={"prompt": PROMPT}, headers=headers, timeout=30)
      assert (answer.status_code, answer.json()["error"]["message"]) == (429, said)
    calls += [served.generation.GenerateUnary.future(asked, metadata=of("b"), timeout=60) for _ in range(2)]
    served.wait_until(lambda: len(served.generations) == 5)
    served.runner.go.set()
    assert [len(call.result(60).completions) for call in calls] == [1] * 5


# Memory.


@pytest.mark.catalogue("C8")
def test_new_work_is_refused_while_the_process_is_too_large(tokenizer, monkeypatch):
  with running(tokenizer, host=HostOptions(http_port=0, max_resident_mb=1 << 20)) as served:
    served.runner.seconds = 0.002
    url = f"http://127.0.0.1:{served.host.http_port}"
    running_call = served.generation.Generate(pb.GenerateRequest(token_ids=IDS, stopping=FOREVER), timeout=60)
    first = next(running_call)
    monkeypatch.setattr(served.host._state, "_memory", MemoryLimit(1))
    error = refusal(served, token_ids=IDS)
    said = r"the server holds \d+ MiB of memory, the limit is 1; try again in 5 s, or raise --max_resident_mb"
    assert re.fullmatch(said, error.details()) and reason_of(error) == "MEMORY_PRESSURE"
    for path, body in (("completions", {"prompt": "the"}), ("chat/completions", {"messages": []})):
      answer = httpx.post(f"{url}/v1/{path}", json=body, timeout=30)
      assert answer.status_code == 429 and re.fullmatch(said, answer.json()["error"]["message"])
      assert answer.headers["retry-after"] == "5"
    assert httpx.get(f"{url}/ready").status_code == 200 and httpx.get(f"{url}/v1/models").status_code == 200
    tokens = [token for message in (first, *running_call) for delta in message.deltas for token in delta.token_ids]
    assert len(tokens) == 400, "what was accepted goes on"
    monkeypatch.undo()
    with Client(served.address) as client:
      assert client.generate([7, 8], max_tokens=1).text is not None


@pytest.mark.catalogue("C8")
def test_the_memory_of_all_processes_counts():
  """This one alone has room; with another beside it, not. One that has ended counts for nothing."""
  with subprocess.Popen([sys.executable, "-c", "x = b'x' * (256 << 20); input()"], stdin=subprocess.PIPE) as other:
    own = psutil.Process().memory_info().rss >> 20
    while psutil.Process(other.pid).memory_info().rss >> 20 < 256:
      time.sleep(0.01)
    limit = own + 128
    MemoryLimit(limit).check_memory()
    with pytest.raises(MemoryPressure, match=f"the limit is {limit}; try again"):
      MemoryLimit(limit, lambda: [other.pid]).check_memory()
    other.communicate(b"\n")
  MemoryLimit(limit, lambda: [other.pid]).check_memory()


def test_processes_share_the_limits_of_a_server():
  options = HostOptions(max_concurrent_rpcs=7, max_grpc_connections=9, max_http_connections=2)
  shared = options.share(3)
  assert (shared.max_concurrent_rpcs, shared.max_grpc_connections, shared.max_http_connections) == (2, 3, 1)
  whole = {"max_concurrent_rpcs": 7, "max_grpc_connections": 9, "max_http_connections": 2}
  assert dataclasses.replace(shared, **whole) == options, "and nothing else"


@pytest.mark.catalogue("C8")
def test_a_system_that_does_not_tell_is_said_at_the_start(monkeypatch, tmp_path):
  monkeypatch.setattr(memory_limit, "_STATM", str(tmp_path / "none"))
  MemoryLimit(0).check_memory()
  with pytest.raises(ConfigError, match="max_resident_mb=5 needs .*none, which this system has not; leave"):
    MemoryLimit(5)


# Metrics for scrapers without a key.


@pytest.mark.catalogue("H8")
def test_a_port_for_metrics_alone(keys):
  options = HostOptions(http_port=0, metrics_port=0, api_key_file=str(keys))
  with running(None, host=options, config=CONFIG) as served:
    url = f"http://127.0.0.1:{served.host.metrics_port}"
    text = httpx.get(f"{url}/metrics").text
    assert "sluice_ready 1.0" in text and "sluice_requests_waiting 0.0" in text
    assert [httpx.get(f"{url}/{path}").status_code for path in ("health", "ready", "version")] == [200] * 3
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/live"), ("GET", "/")):
      assert httpx.request(method, url + path, headers={"x-api-key": KEYS["a"]}).status_code == 404
    assert httpx.get(f"{url}/metrics", headers={"host": "evil.example"}).status_code == 403
    assert httpx.get(f"http://127.0.0.1:{served.host.http_port}/metrics").status_code == 401
    with (
      pytest.raises(ConfigError, match=r"choose another --metrics_port \(-1: no HTTP\) or --http_host"),
      running(None, host=HostOptions(metrics_port=served.host.metrics_port)),
    ):
      pass


def test_metrics_need_no_http_port(tokenizer):
  with running(tokenizer, host=HostOptions(metrics_port=0)) as served:
    assert served.host.http_port == -1
    assert httpx.get(f"http://127.0.0.1:{served.host.metrics_port}/metrics").status_code == 200
    with Client(served.address) as client, pytest.raises(SluiceError):
      client.generate([])
