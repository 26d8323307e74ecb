"""A cluster of real servers whose hosts die, hang, lag or disagree: every stream ends, and every process exits."""

import os
import pathlib
import shutil
import signal
import time

import pytest

from tools.host_losses.host_cluster import ROOT, Cluster, Proxy, Stream, wait_for
from tools.server_process import RunningServer

pytestmark = pytest.mark.long

# JAX's own client aborts the process if it notices the loss of the coordinator first.
LOST = {1, -signal.SIGABRT}

DEMO = ROOT / "models" / "demo"


@pytest.fixture(scope="module", autouse=True)
def cached_programs(tmp_path_factory: pytest.TempPathFactory):
  """All clusters of this file compile once, and not into the user's folder."""
  folder = tmp_path_factory.mktemp("home")
  before = os.environ.get("HOME")
  os.environ["HOME"] = str(folder)
  yield
  if before is not None:
    os.environ["HOME"] = before


@pytest.fixture
def cluster(tmp_path: pathlib.Path):
  with Cluster(tmp_path) as cluster:
    yield cluster


def assert_told_and_ended(cluster: Cluster, stream: Stream, *, others: set[int]) -> None:
  """The client has the error of a failed engine, and the hosts in `others` have ended with an error."""
  # A request of the failed engine, or one that ends because the server does.
  assert any(f'"code":"{code}"' in stream.last_event() for code in ("engine_failure", "engine_dead"))
  for host in others:
    assert cluster.hosts[host].wait(60) in (LOST if host else {1}), cluster.log(host)[-2000:]


def test_a_cluster_serves_reports_and_drains(cluster: Cluster):
  cluster.start_all()
  text = cluster.complete()
  with RunningServer(["--http_port=-1"], cluster.folder / "one", {"JAX_PLATFORMS": "cpu"}) as one:
    from server.client import Client

    with Client(one.target) as client:
      assert client.generate("Once upon a time", max_tokens=24, temperature=0, ignore_eos=True).text == text
  status, answer = cluster.request("/v1/completions", {"prompt": "x"}, host=1)
  assert status == 421 and "this is host 1 of 2, which serves no API; send requests to host 0" in answer
  assert cluster.request("/health", host=1)[0] == cluster.request("/ready", host=1)[0] == 200
  wait_for(lambda: cluster.metric("sluice_host_lag_seconds") > 0)
  assert cluster.metric("sluice_hosts") == 2 and cluster.metric("sluice_host_broadcast_steps_total") >= 24
  assert cluster.metric("sluice_compiles_total") == cluster.metric("sluice_host_compiles_total") == 0
  stream = Stream(cluster)
  cluster.send_signal(0, signal.SIGTERM)
  assert stream.last_event() == "[DONE]"
  assert cluster.exit_codes() == [0, 0]
  assert "0 compilations after ready" in cluster.log(1)


def test_a_follower_that_is_stopped_drains_the_cluster(cluster: Cluster):
  cluster.start_all()
  stream = Stream(cluster)
  cluster.send_signal(1, signal.SIGTERM)
  assert stream.last_event() == "[DONE]"
  assert cluster.exit_codes() == [0, 0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_follower_ends_all_and_a_restart_serves(cluster: Cluster, number: signal.Signals):
  cluster.start_all("--overlap=false")
  text = cluster.complete()
  stream = Stream(cluster)
  began = time.monotonic()
  cluster.send_signal(1, number)
  assert_told_and_ended(cluster, stream, others={0})
  print(f"{number.name}: clients knew after {stream.ended_at - began:.2f} s")
  assert "error: host 1 of 2 is lost" in cluster.log(0)
  cluster.send_signal(1, signal.SIGCONT)
  assert cluster.hosts[1].wait(60) in ({-signal.SIGKILL} if number == signal.SIGKILL else LOST)
  cluster.start_all("--overlap=false")
  assert cluster.complete() == text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_leader_ends_followers(cluster: Cluster, number: signal.Signals):
  cluster.start_all()
  cluster.send_signal(0, number)
  code = cluster.hosts[1].wait(60)
  assert code in LOST
  assert code != 1 or "error: host 0, the leader, is lost" in cluster.log(1)


def test_a_lost_host_while_starting_ends_all(cluster: Cluster):
  for host in range(2):
    cluster.start_host(host)
  wait_for(lambda: "device " in cluster.log(1) and "device " in cluster.log(0))
  cluster.send_signal(1, signal.SIGKILL)
  assert cluster.hosts[0].wait(60) == 1


def start_with_proxy(cluster: Cluster, proxy: Proxy) -> None:
  cluster.start_host(0)
  cluster.start_host(1, port=proxy.port)
  cluster.wait_ready()


@pytest.mark.parametrize("connection", [0, 1], ids=["steps", "pulse"])
def test_a_changed_byte_ends_all(cluster: Cluster, connection: int):
  with Proxy(cluster.port) as proxy:
    start_with_proxy(cluster, proxy)
    stream = Stream(cluster)

    def flip(number: int, data: bytes) -> bytes:
      return data[:-1] + bytes([data[-1] ^ 4]) if number == connection else data

    proxy.change = flip
    assert_told_and_ended(cluster, stream, others={0, 1})
    assert "does not match its MAC" in cluster.log(1) and "does not match its MAC" in cluster.log(0)


def test_a_follower_that_falls_behind_ends_all(cluster: Cluster):
  """Its heartbeats come, but steps reach it late."""
  with Proxy(cluster.port) as proxy:
    start_with_proxy(cluster, proxy)
    stream = Stream(cluster)

    def delay(number: int, data: bytes) -> bytes:
      if number == 0:
        time.sleep(20)
      return data

    proxy.change = delay
    assert_told_and_ended(cluster, stream, others={0, 1})
    assert "it falls behind" in cluster.log(0)


def test_a_short_delay_costs_time_alone(cluster: Cluster):
  with Proxy(cluster.port) as proxy:
    start_with_proxy(cluster, proxy)
    text = cluster.complete()

    def delay(number: int, data: bytes) -> bytes:
      time.sleep(0.05)
      return data

    proxy.change = delay
    assert cluster.complete() == text
    proxy.change = lambda number, data: data
    cluster.send_signal(0, signal.SIGTERM)
    assert cluster.exit_codes() == [0, 0]


def test_hosts_with_other_models_settings_and_numbers_name_them(cluster: Cluster, tmp_path: pathlib.Path):
  other = tmp_path / "other"
  shutil.copytree(DEMO, other)
  file = other / "generation_config.json"
  file.write_text(file.read_text() + " ")
  cluster.start_host(0)
  cluster.start_host(1, f"--model={other}", "--dtype=bfloat16")
  assert cluster.exit_codes() == [1, 1]
  for host in range(2):
    (line,) = [line for line in cluster.log(host).splitlines() if line.startswith("error: ")]
    assert "host 1 has --dtype bfloat16, host 0 auto" in line and "the model's generation_config.json" in line


def test_a_host_without_the_secret_is_named(cluster: Cluster, tmp_path: pathlib.Path):
  other = tmp_path / "other"
  other.touch(mode=0o600)
  other.write_text("another secret of more than 32 bytes")
  cluster.start_host(0, "--host_start_timeout_s=8")
  cluster.start_host(1, f"--cluster_secret_file={other}", "--host_start_timeout_s=60")
  assert cluster.exit_codes() == [1, 1]
  assert "host 1 did not join within 8 s; refused: a peer at 127.0.0.1: it has another secret" in cluster.log(0)
  assert "is no leader for this host: it has another secret" in cluster.log(1)


def test_a_host_that_does_not_come_is_named_on_all(tmp_path: pathlib.Path):
  with Cluster(tmp_path, num_hosts=3) as cluster:
    for host in (0, 1):
      cluster.start_host(host, "--host_start_timeout_s=8")
    assert cluster.exit_codes() == [1, 1]
    for host in (0, 1):
      assert "num_hosts=3, but host 2 did not join within 8 s" in cluster.log(host)
