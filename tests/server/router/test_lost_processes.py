"""Real replicas and a real router as processes, under streams, while one of them is killed or stands still."""

from collections.abc import Iterator
from concurrent import futures
import contextlib
import json
import signal
import subprocess
import time

import httpx
import pytest

from tests.server.router.router_harness import wait_until
from tests.server.test_main import start, wait_for_file
from tools.server_process import find_free_port

NUM_STREAMS, NUM_TOKENS = 24, 60
ROUNDS = 10  # of each fault
FLAGS = ("--fake_device", "--fake_step_ms=15", "--port=0", "--throughput_line_s=0")


def start_replica(port: int, folder) -> subprocess.Popen:
  ready = folder / f"{port}.{time.monotonic_ns()}"
  process = start(*FLAGS, f"--http_port={port}", f"--port_file={ready}", stderr=subprocess.DEVNULL)
  wait_for_file(ready, process)
  return process


@contextlib.contextmanager
def fleet(folder) -> Iterator[tuple[list[subprocess.Popen], list[int], subprocess.Popen, httpx.Client]]:
  """Two replicas and a router."""
  ports = [find_free_port() for _ in range(2)]
  replicas = [start_replica(port, folder) for port in ports]
  names = ",".join(f"127.0.0.1:{port}" for port in ports)
  flags = ("--probe_period_s=0.2", "--probe_timeout_s=1", "--replica_timeout_s=2")
  router = start(
    f"--replicas={names}",
    "--port=0",
    f"--port_file={folder}/router",
    *flags,
    module="server.router",
    stderr=subprocess.DEVNULL,
  )
  try:
    url = f"http://127.0.0.1:{wait_for_file(folder / 'router', router).strip()}"
    with httpx.Client(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None)) as client:
      wait_until(lambda: client.get("/ready").json()["replicas_ready"] == 2)
      yield replicas, ports, router, client
  finally:
    for process in (router, *replicas):
      process.kill()
      process.wait()


def read_stream(client: httpx.Client, prompt: int, num_tokens: int = NUM_TOKENS) -> tuple[str, str]:
  """Returns the text of a stream, and how it ended: "done", or the code of an error."""
  body = {
    "prompt": f"prompt {prompt}",
    "max_tokens": num_tokens,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
  }
  answer = client.post("/v1/completions", json=body)
  if answer.status_code != 200:
    return "", answer.json()["error"]["code"]
  text, ending = "", "nothing"
  for event in answer.text.strip().split("\n\n"):
    data = event.removeprefix("data: ")
    if data == "[DONE]":
      ending = "done"
    elif "error" in (found := json.loads(data)):
      ending = found["error"]["code"]
    else:
      text += found["choices"][0]["text"]
  return text, ending


@pytest.mark.long
def test_replicas_are_lost_under_load(tmp_path):
  """Every stream ends by the rules and has the right tokens, and the capacity comes back by itself."""
  with fleet(tmp_path) as (replicas, ports, _, client), futures.ThreadPoolExecutor(NUM_STREAMS) as pool:
    expected = [text for text, _ in pool.map(lambda prompt: read_stream(client, prompt), range(NUM_STREAMS))]
    assert all(expected)
    endings = {"done": 0, "replica_lost": 0}
    for turn in range(2 * ROUNDS):
      lost = turn % 2
      streams = [pool.submit(read_stream, client, prompt) for prompt in range(NUM_STREAMS)]
      time.sleep(0.05 + 0.06 * turn)  # before the first tokens, among them, near the end
      fault = signal.SIGKILL if turn < ROUNDS else signal.SIGSTOP
      replicas[lost].send_signal(fault)
      for stream, whole in zip(streams, expected, strict=True):
        text, ending = stream.result()
        endings[ending] += 1
        assert text == whole if ending == "done" else whole.startswith(text)
      if fault == signal.SIGKILL:
        replicas[lost].wait()
        replicas[lost] = start_replica(ports[lost], tmp_path)
      else:
        replicas[lost].send_signal(signal.SIGCONT)
      wait_until(lambda: client.get("/ready").json()["replicas_ready"] == 2)
    assert endings["replica_lost"] > 0 and sum(endings.values()) == 2 * ROUNDS * NUM_STREAMS
    assert all(replica.poll() is None for replica in replicas)
    page = client.get("/metrics").text
    assert "sluice_router_retries_total{" in page
    for port in ports:  # nothing runs on
      url = f"http://127.0.0.1:{port}/metrics"
      wait_until(lambda url=url: "sluice_kv_blocks_used 0.0" in httpx.get(url, timeout=60).text)


@pytest.mark.long
def test_the_router_is_lost_under_load(tmp_path):
  """Its clients see broken connections, never whole answers, and its replicas end what nobody reads."""
  with fleet(tmp_path) as (_, ports, router, client), futures.ThreadPoolExecutor(NUM_STREAMS) as pool:
    streams = [pool.submit(read_stream, client, prompt, 2000) for prompt in range(NUM_STREAMS)]
    urls = [f"http://127.0.0.1:{port}/metrics" for port in ports]
    wait_until(lambda: all("sluice_kv_blocks_used 0.0" not in httpx.get(url, timeout=60).text for url in urls))
    router.kill()
    for stream in streams:
      with pytest.raises(httpx.TransportError):
        stream.result()
    for url in urls:
      wait_until(lambda url=url: "sluice_kv_blocks_used 0.0" in httpx.get(url, timeout=60).text)
