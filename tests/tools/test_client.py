"""The terminal client at a terminal of its own, against a real server on the fake device."""

from collections.abc import Iterator
import os
import pathlib
import pty
import select
import subprocess
import sys
import time
from typing import Self

import pytest

from server.client import Client
from tests.commands import run_module
from tools.chaos.process import Server

ROOT = pathlib.Path(__file__).resolve().parents[2]
_LIMIT_S = 60.0
# Makes standard input the controlling terminal, which sends Ctrl-C, and then becomes the client. A hook of Popen would
# fork this process, which JAX forbids.
_TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "tools.client", *sys.argv[1:]])
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
  """Steps take 150 ms, so that an answer can be stopped."""
  with Server(tmp_path_factory.mktemp("server"), ("--fake_step_ms=150",)) as running:
    yield running


class Terminal:
  """A client whose standard streams are a terminal; keys go in, the screen comes out."""

  def __init__(self, *arguments: str):
    self._master, slave = pty.openpty()
    self.shown = ""
    self._process = subprocess.Popen(
      [sys.executable, "-c", _TAKE_TERMINAL, "--chat", *arguments],
      cwd=ROOT,
      stdin=slave,
      stdout=slave,
      stderr=slave,
      env=os.environ | {"TERM": "xterm", "COLUMNS": "200"},
      start_new_session=True,
    )
    os.close(slave)

  def type_keys(self, keys: str) -> None:
    os.write(self._master, keys.encode())

  def wait_for(self, text: str) -> str:
    """What was shown until `text`, from the last such wait on."""
    deadline = time.monotonic() + _LIMIT_S
    while text not in self.shown:
      assert time.monotonic() < deadline, self.shown
      if select.select([self._master], [], [], 0.1)[0]:
        try:
          self.shown += os.read(self._master, 65536).decode(errors="replace")
        except OSError:  # the other side has ended
          assert text in self.shown, self.shown
    before, _, self.shown = self.shown.partition(text)
    return before

  def wait_end(self) -> int:
    return self._process.wait(_LIMIT_S)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error: object) -> None:
    self._process.kill()
    self._process.wait()
    os.close(self._master)


PROMPT = "> "


@pytest.mark.parametrize("over", ["grpc", "http"])
def test_a_conversation(server, over):
  target = server.target if over == "grpc" else f"http://127.0.0.1:{server.http_port}"
  with Terminal(f"--target={target}", "--max_tokens=5") as terminal:
    converse(terminal)
  with Client(server.target) as client:
    deadline = time.monotonic() + _LIMIT_S
    while client.load().running_requests:
      assert time.monotonic() < deadline, "the stopped answer still runs"
      time.sleep(0.05)


def converse(terminal: Terminal) -> None:
  terminal.wait_for("Talking to ")
  terminal.wait_for(PROMPT)
  terminal.type_keys("/help\n")
  terminal.wait_for("/set temperature=0.5")
  terminal.wait_for(PROMPT)
  terminal.type_keys("hello\n")
  terminal.wait_for("5 generated")
  terminal.wait_for(PROMPT)
  # What is refused stands in the next line; a line that is sent does not.
  terminal.type_keys("/set max_tokens=100000\n")
  terminal.wait_for("max_tokens: 100000")
  terminal.wait_for(PROMPT)
  terminal.type_keys("a refused message\n")
  terminal.wait_for("lower max_tokens")
  assert "UNAVAILABLE" not in terminal.shown
  terminal.wait_for("a refused message")
  terminal.type_keys("\x15/set max_tokens=400\n")
  terminal.wait_for("max_tokens: 400")
  terminal.wait_for(PROMPT)
  # The keys for the lines before bring back what was taken, not what was refused.
  terminal.type_keys("\x1b[A\x1b[A\n")
  terminal.wait_for("max_tokens: 100000")
  terminal.wait_for(PROMPT)
  terminal.type_keys("/set max_tokens=400\n")
  terminal.wait_for("max_tokens: 400")
  terminal.wait_for(PROMPT)
  terminal.type_keys("a long one\n")
  terminal.wait_for("long one")
  time.sleep(0.5)
  terminal.type_keys("\x03")
  terminal.wait_for("stopped")
  terminal.wait_for(PROMPT)
  terminal.type_keys("/nonsense\n")
  terminal.wait_for("/nonsense is no command; /help lists them")
  terminal.wait_for("/nonsense")
  terminal.type_keys("\x15/quit\n")
  assert terminal.wait_end() == 0


def test_commands_in_a_pipe(server):
  said = run_module(
    "tools.client",
    "--chat",
    f"--target={server.target}",
    "--max_tokens=3",
    "--nostats",
    text="/system be\n/set temperature=1.5\n/set temperature=\n/set seed=x\n/set nothing=1\n/set\n//slash\n/clear\n",
  )
  assert said.returncode == 1
  for line in (
    "A new conversation, with that system message.",
    "temperature: 1.5",
    "temperature: as the server has it",
    "/set seed=x: seed must be a whole number",
    "/set nothing=1: write /set NAME=VALUE with one of max_tokens, ",
    "max_tokens=3; else the server's defaults",
    "The conversation is forgotten.",
  ):
    assert line in said.stderr
  assert len(said.stdout.splitlines()) >= 1


def test_ports_that_are_not_what_they_were_taken_for(server):
  http, nobody = f"127.0.0.1:{server.http_port}", "127.0.0.1:1"
  for target, line in {
    http: f"{http} is an HTTP port: use the gRPC port (50051 unless the server's --port says otherwise), or --target="
    f"http://{http}",
    f"http://{server.target}": f"{server.target} does not speak HTTP; if it is the gRPC port, set --target="
    f"{server.target}",
    nobody: f"no server answers at {nobody} (",
    f"http://{nobody}": f"no server answers at {nobody} (Connection refused); start one, or correct --target",
  }.items():
    done = run_module("tools.client", "--prompt=a", f"--target={target}")
    assert done.returncode == 1 and done.stdout == ""
    assert line in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_over_http_raw_text_is_the_same_as_over_grpc(server):
  flags = ("--prompt=the cat", "--temperature=0", "--max_tokens=9", "--nostats")
  one, two = (
    run_module("tools.client", f"--target={target}", *flags)
    for target in (server.target, f"http://127.0.0.1:{server.http_port}/v1")
  )
  assert one.returncode == two.returncode == 0, one.stderr + two.stderr
  assert one.stdout == two.stdout != "\n"
