"""The parent's side of tools.peers: an adapter as a child that is stopped unless it is its turn. Knows no engine.

Each child leads a process group, which is stopped (SIGSTOP) while others run, so that its spinning or polling threads
take no processor time from the measured engine.
"""

from collections.abc import Sequence
import contextlib
import json
import os
import pathlib
import selectors
import signal
import subprocess
import time
from typing import Any

from engine.errors import ConfigError
from tools.measure import ROOT
from tools.report.latency import Outcome

TAIL_BYTES = 4096
END_S = 3.0  # seconds for a child to end by itself


class PeerProcess:
  """One adapter (see face), from start to close. Standard error goes to `log`."""

  def __init__(self, name: str, command: Sequence[str], log: pathlib.Path, ready_timeout_s: float):
    """Starts the adapter, waits until it is ready, and stops it.

    Raises:
      ConfigError: it ended, or was not ready in time; the text has its last output.
    """
    self.name = name
    self._log = log
    self._received = b""
    with open(log, "wb") as errors:
      self._process = subprocess.Popen(
        list(command),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
      )
    try:
      self.about = self._answer(ready_timeout_s)
    except BaseException:
      self.close()
      raise
    self._signal(signal.SIGSTOP)

  def order(self, value: dict[str, Any], timeout_s: float) -> None:
    """Continues the child, sends an order, and waits until it is done. Raises ConfigError."""
    assert self._process.stdin is not None
    self._signal(signal.SIGCONT)
    try:
      self._process.stdin.write(json.dumps(value).encode() + b"\n")
      self._process.stdin.flush()
      self._answer(timeout_s)
    except BrokenPipeError as error:
      raise ConfigError(f"{self.name} has ended: {self._tail()}") from error
    self._signal(signal.SIGSTOP)

  def serve(self, requests: pathlib.Path, output: pathlib.Path, *, realtime: bool, timeout_s: float) -> list[Outcome]:
    """Serves a request file; returns each request's outcome."""
    self.order({"requests": str(requests), "output": str(output), "realtime": realtime}, timeout_s)
    return read_outcomes(output)

  def close(self) -> None:
    """Ends the whole group, politely first: a child at the end of its input stops its own servers."""
    self._signal(signal.SIGCONT)
    if self._process.stdin is not None:
      with contextlib.suppress(BrokenPipeError):
        self._process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
      self._process.wait(END_S)
    self._signal(signal.SIGKILL)
    self._process.wait()
    assert self._process.stdout is not None
    self._process.stdout.close()

  def _signal(self, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._process.pid, number)

  def _answer(self, timeout_s: float) -> dict[str, Any]:
    """Returns the next line of its standard output."""
    output = self._process.stdout
    assert output is not None
    end = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
      selector.register(output, selectors.EVENT_READ)
      while True:
        if not selector.select(max(0.0, end - time.monotonic())):
          raise ConfigError(f"{self.name} did not answer within {timeout_s:g} s: {self._tail()}")
        piece = os.read(output.fileno(), 65536)
        if not piece:
          raise ConfigError(f"{self.name} ended with exit code {self._process.wait()}: {self._tail()}")
        self._received += piece
        while b"\n" in self._received:
          line, _, self._received = self._received.partition(b"\n")
          if line.startswith(b"{"):  # a library may print on import
            return json.loads(line)

  def _tail(self) -> str:
    text = self._log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
    return " | ".join(text.strip().splitlines()[-4:]) or "it wrote nothing"


def read_outcomes(path: pathlib.Path) -> list[Outcome]:
  """Returns an adapter's outcomes; an output of another length than requested is an error."""
  outcomes = []
  with open(path, encoding="utf-8") as file:
    for row in map(json.loads, file):
      tokens = tuple(row["tokens"])
      error = None if len(tokens) == row["output_len"] else f"WRONG_LENGTH: {len(tokens)} tokens received"
      chunks = tuple((time_s, count) for time_s, count in row["chunks"])
      outcomes.append(Outcome(row["id"], row["output_len"], row["intended_s"], row["sent_s"], chunks, tokens, error))
  return outcomes
