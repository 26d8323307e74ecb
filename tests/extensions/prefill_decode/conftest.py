"""Prefill and decode servers as processes, on a small random model."""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from server.client import Client
from tests.server.conftest import no_test_hangs as no_test_hangs
from tests.server.conftest import tokenizer_dir as tokenizer_dir
from tests.server.harness import CHILDREN
from tests.server.test_main import RAW, ROOT, wait_for_file
from tools.make_random_model import write_model

_FLAGS = ("--token_budgets=8,64", "--max_num_seqs=4", "--prefill_chunk=64", "--kv_cache_mb=1", "--http_port=0")


class Server:
  """A server process with a role."""

  def __init__(self, folder: pathlib.Path, name: str, *flags: str, port: int = 0, fault: str = ""):
    self._port_file, self._log = folder / f"{name}.port", folder / f"{name}.log"
    self._http_file = folder / f"{name}.http"
    for stale in (self._port_file, self._http_file):
      stale.unlink(missing_ok=True)
    module = "tests.extensions.prefill_decode.faulty_server" if fault else "server.main"
    paths = (f"--port_file={self._port_file}", f"--http_port_file={self._http_file}")
    with open(self._log, "w") as log:
      self.process = subprocess.Popen(
        [sys.executable, "-m", module, f"--model={folder / 'model'}", f"--port={port}", *paths, *_FLAGS]
        + [f"--transfer_secret_file={folder / 'secret'}", f"--compile_cache_dir={folder / 'cache'}", *flags],
        cwd=ROOT,
        stderr=log,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "FAULT": fault},
      )
    CHILDREN.append(self.process)

  def wait_ready(self) -> "Server":
    with contextlib.suppress(AssertionError):
      wait_for_file(self._port_file, self.process)
    assert self.process.poll() is None, self.log
    self.address = f"127.0.0.1:{self._port_file.read_text().strip()}"
    return self

  @property
  def log(self) -> str:
    return self._log.read_text()

  def counts(self) -> dict[str, int]:
    """The transfer's metrics, without zeros: their name's end, reason or transport, and their value."""
    url = f"http://127.0.0.1:{self._http_file.read_text().strip()}/metrics"
    with urllib.request.urlopen(url, timeout=60) as response:
      text = response.read().decode()
    line = r'^sluice_transfer_(\w+?)(?:_total)?(?:\{(?:reason|transport)="(\w+)"\})? (\S+)$'
    found = re.findall(line, text, re.MULTILINE)
    return {label or name: round(float(value)) for name, label, value in found if round(float(value))}

  def wait_for(self, name: str, least: int) -> None:
    """Returns once a count is at least `least`."""
    for _ in range(1200):
      if self.counts().get(name, 0) >= least:
        return
      time.sleep(0.05)
    raise AssertionError(f"{name} stays below {least}: {self.counts()}")

  def stop(self) -> str:
    """Ends it with a signal; returns its log."""
    self.process.send_signal(signal.SIGCONT)
    self.process.send_signal(signal.SIGTERM)
    assert self.process.wait(180) == 0, self.log
    return self.log

  def kill(self) -> None:
    self.process.kill()
    self.process.wait()


@pytest.fixture(autouse=True)
def no_server_is_left() -> Iterator[None]:
  """Ends the servers that a test started, also after a failure: the next one has their port."""
  num_before = len(CHILDREN)
  yield
  for child in CHILDREN[num_before:]:
    child.kill()
    child.wait()


@pytest.fixture(scope="module")
def folder(tokenizer_dir, tmp_path_factory) -> pathlib.Path:
  """A folder with a model, a secret and a cache of programs."""
  folder = tmp_path_factory.mktemp("roles")
  write_model(folder / "model", RAW, seed=1)
  for path in tokenizer_dir.iterdir():
    shutil.copy(path, folder / "model")
  (folder / "secret").write_text("a secret of the tests\n".replace(" ", "-"))
  (folder / "secret").chmod(0o600)
  (folder / "cache").mkdir(mode=0o700)
  return folder


@pytest.fixture(scope="module")
def free_port() -> int:
  """A port of this machine for a prefill server, which comes and goes."""
  with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    return one.getsockname()[1]


@pytest.fixture(scope="module")
def decode(folder, free_port) -> Iterator[Server]:
  """A decode server whose prefill server is at `free_port`, or absent."""
  peer = f"--prefill_servers=127.0.0.1:{free_port}"
  limits = ("--min_remote_prefill_tokens=32", "--remote_prefill_timeout_s=20")
  server = Server(folder, "decode", "--role=decode", peer, *limits).wait_ready()
  yield server
  with Client(server.address) as client:
    load = client.load()
  assert (load.kv_blocks_in_use, load.compiles_after_ready) == (0, 0)
  log = server.stop()
  assert "0 KV blocks in use" in log and "Traceback" not in log, log
