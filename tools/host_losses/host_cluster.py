"""Real servers as several hosts, each a process of its own, and a proxy between them that can break what passes."""

from collections.abc import Callable
import http.client
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from typing import Self

from tools.faulty_link import FaultyLink
from tools.server_process import find_free_port

ROOT = pathlib.Path(__file__).parents[2]
LIMIT_S = 120.0
FAST = ("--token_budgets=8,64", "--max_num_seqs=8", "--num_blocks=300", "--max_model_len=1024", "--drain_timeout_s=100")


class Cluster:
  """Servers with one secret on one coordinator address; all are ended with the block."""

  def __init__(self, folder: pathlib.Path, num_hosts: int = 2, devices: int = 1):
    self.folder, self.num_hosts, self._devices = folder, num_hosts, devices
    self.port = find_free_port()
    self.secret = folder / "secret"
    self.secret.touch(mode=0o600)
    self.secret.write_text("0123456789abcdef" * 4)
    self.hosts: dict[int, subprocess.Popen] = {}

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    for process in self.hosts.values():
      if process.poll() is None:
        process.kill()
      process.wait()

  def start_host(self, host: int, *flags: str, port: int | None = None) -> None:
    """Starts a host.

    Args:
      host: its number.
      flags: outrank the usual ones.
      port: of a proxy before the coordinator; None: there is no proxy.
    """
    self.port_file(host).unlink(missing_ok=True)
    command = [sys.executable, "-m", "server.main", f"--num_hosts={self.num_hosts}", f"--host_id={host}"]
    command += [f"--coordinator_address=127.0.0.1:{port or self.port}", f"--cluster_secret_file={self.secret}"]
    command += ["--port=0", "--http_port=0", f"--http_port_file={self.port_file(host)}", *FAST, *flags]
    environment = os.environ | {
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": f"--xla_force_host_platform_device_count={self._devices}",
    }
    with open(self.log_file(host), "w") as log:
      self.hosts[host] = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
      )

  def start_all(self, *flags: str) -> None:
    """Starts all hosts and waits until the cluster serves."""
    for host in range(self.num_hosts):
      self.start_host(host, *flags)
    self.wait_ready()

  def wait_ready(self) -> None:
    """Waits until every host is ready."""
    for host in self.hosts:
      wait_for(lambda host=host: self.port_file(host).exists() or self._raise_if_ended())

  def _raise_if_ended(self) -> bool:
    for host, process in self.hosts.items():
      assert process.poll() is None, f"host {host}: {self.log(host)[-3000:]}"
    return False

  def port_file(self, host: int) -> pathlib.Path:
    return self.folder / f"http_port_{host}"

  def log_file(self, host: int) -> pathlib.Path:
    return self.folder / f"log_{host}"

  def log(self, host: int) -> str:
    return self.log_file(host).read_text()

  def exit_codes(self) -> list[int]:
    """Waits until all hosts have ended by themselves."""
    return [self.hosts[host].wait(LIMIT_S) for host in sorted(self.hosts)]

  def send_signal(self, host: int, number: signal.Signals) -> None:
    self.hosts[host].send_signal(number)

  def request(self, path: str, body: dict | None = None, host: int = 0) -> tuple[int, str]:
    """Returns status and body."""
    connection = http.client.HTTPConnection("127.0.0.1", int(self.port_file(host).read_text()), timeout=LIMIT_S)
    try:
      method = "GET" if body is None else "POST"
      text = None if body is None else json.dumps(body)
      connection.request(method, path, text, {"Content-Type": "application/json"})
      answer = connection.getresponse()
      return answer.status, answer.read().decode()
    finally:
      connection.close()

  def complete(self, max_tokens: int = 24) -> str:
    """Returns the greedy continuation of a prompt."""
    body = {"prompt": "Once upon a time", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    status, text = self.request("/v1/completions", body)
    assert status == 200, text
    return json.loads(text)["choices"][0]["text"]

  def metric(self, name: str) -> float:
    """Returns the sum of a metric's samples."""
    lines = self.request("/metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


class Stream(threading.Thread):
  """A long streamed completion.

  Attributes:
    events: the text of each event's data.
    begun: set at the first event.
  """

  def __init__(self, cluster: Cluster):
    super().__init__(daemon=True)
    self._port = int(cluster.port_file(0).read_text())
    self.events: list[str] = []
    self.begun = threading.Event()
    self.ended_at = 0.0
    self.start()
    assert self.begun.wait(LIMIT_S)

  def run(self) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=LIMIT_S)
    body = {"prompt": "Once upon", "max_tokens": 900, "ignore_eos": True, "stream": True, "seed": 1}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    while line := answer.readline():
      if line.startswith(b"data: "):
        self.events.append(line[6:].decode())
        self.begun.set()
    self.ended_at = time.monotonic()
    answer.close()
    connection.close()

  def last_event(self) -> str:
    """Waits for the stream's end."""
    self.join(LIMIT_S)
    assert not self.is_alive(), "a stream without an ending"
    return self.events[-1].strip()


def wait_for(condition: Callable[[], bool]) -> None:
  deadline = time.monotonic() + LIMIT_S
  while not condition():
    assert time.monotonic() < deadline, "not within the limit"
    time.sleep(0.05)


class Proxy:
  """Passes connections at `port` on to the coordinator's, and those at the next port to the leader's.

  `change` sees what the leader sends on the connections of the leader's port: (connection's number, bytes) -> bytes.
  """

  def __init__(self, target: int):
    self.port = find_free_port()
    self.change: Callable[[int, bytes], bytes] = lambda number, data: data
    self._coordinator, self._leader = FaultyLink(target, self.port), FaultyLink(target + 1, self.port + 1)
    self._leader.change = lambda number, is_answer, data: self.change(number, data) if is_answer else data

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self._coordinator.__exit__()
    self._leader.__exit__()

  def forget_connections(self) -> None:
    """Numbers connections from 0 again; call it before hosts start again."""
    self._leader.forget_connections()
