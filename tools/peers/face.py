"""The child's side of tools.peers: how an adapter is started, told to run, and heard. Standard library alone.

It runs in every peer's own environment (Python 3.11 or later), so it imports nothing of Sluice. An adapter is started
as `python -m tools.peers.run_NAME --model=DIR ...`, gets ready, and then speaks JSON lines: on standard output first
`{"ready": true, ...}`; for each `{"requests": FILE, "output": FILE, "realtime": false}` on standard input it serves the
file, writes what came of each request, and answers `{"done": true}`; `{"judge": FILE, "output": FILE}` asks for logits.
The end of its input ends it. What the libraries print goes to standard error. No figure is made here: the parent reads
times and tokens.
"""

import argparse
from collections.abc import Callable
import dataclasses
import json
import os
import sys
import time
from typing import Any


class Log:
  """What came of each request, and when, on the machine-wide monotonic clock."""

  def __init__(self, requests, start_s, realtime):
    self._rows = {
      request["id"]: {
        "id": request["id"],
        "output_len": request["output_len"],
        "intended_s": start_s + (request["arrival_s"] if realtime else 0.0),
        "sent_s": None,
        "chunks": [],
        "tokens": [],
      }
      for request in requests
    }

  def sent(self, identity):
    """A request goes to the engine now."""
    self._rows[identity]["sent_s"] = time.monotonic()

  def got(self, identity, tokens):
    """Tokens of a request have come now; none is no event."""
    if tokens:
      row = self._rows[identity]
      row["chunks"].append([time.monotonic(), len(tokens)])
      row["tokens"] += [int(token) for token in tokens]

  def take(self, identity, **values):
    """All of a request at once, from an engine that keeps its own times on the same clock."""
    self._rows[identity] |= values

  def write(self, path):
    """A line for each request."""
    with open(path, "w", encoding="utf-8") as file:
      for row in self._rows.values():
        file.write(json.dumps(row, separators=(",", ":")) + "\n")


def read_requests(path):
  """The request lines of a file, its first line skipped where it only describes the file."""
  with open(path, encoding="utf-8") as file:
    lines = [json.loads(line) for line in file if line.strip()]
  return [line for line in lines if "prompt" in line]


def due(waiting, start_s, realtime):
  """Takes the requests out of `waiting` (ordered by arrival, the latest first) whose time has come."""
  taken = []
  while waiting and (not realtime or start_s + waiting[-1]["arrival_s"] <= time.monotonic()):
    taken.append(waiting.pop())
  return taken


def parser(doc):
  """The flags that every adapter has."""
  made = argparse.ArgumentParser(description=doc, allow_abbrev=False)
  made.add_argument("--model", required=True, help="a Hugging Face folder with f32 weights")
  made.add_argument("--work", required=True, help="a folder for what the adapter converts; kept between runs")
  made.add_argument("--threads", type=int, default=2)
  made.add_argument("--max_len", type=int, default=1024, help="prompt and output together, tokens")
  made.add_argument("--max_requests", type=int, default=64, help="sequences at once")
  made.add_argument("--realtime", action="store_true", help="requests will come at their times")
  return made


@dataclasses.dataclass(frozen=True)
class Peer:
  """An engine that is ready.

  Attributes:
    settings: how it is set up, for the report.
    run: run(requests, log, start_s, realtime) serves all requests and tells the log.
    judge: judge(prompt, tokens) gives each token's distance from the largest logit; None where it cannot.
  """

  settings: dict[str, Any]
  run: Callable[[list[dict[str, Any]], "Log", float, bool], None] | None = None
  judge: Callable[[list[int], list[int]], list[float]] | None = None


def serve(begin: Callable[[], Peer]):
  """Runs an adapter to the end of its input; `begin` loads, and is part of the time to get ready."""
  answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
  os.dup2(2, 1)  # what a library prints is no answer
  start_s = time.monotonic()
  peer = begin()
  _answer(answers, {"ready": True, "ready_s": round(time.monotonic() - start_s, 3), "settings": peer.settings})
  for line in sys.stdin:
    order = json.loads(line)
    if "judge" in order:
      _judge(peer, order["judge"], order["output"])
    else:
      requests = read_requests(order["requests"])
      start_s = time.monotonic()
      log = Log(requests, start_s, order["realtime"])
      assert peer.run is not None
      peer.run(requests, log, start_s, order["realtime"])
      log.write(order["output"])
    _answer(answers, {"done": True})


def _judge(peer, path, output):
  assert peer.judge is not None
  with open(path, encoding="utf-8") as file:
    rows = [json.loads(line) for line in file]
  with open(output, "w", encoding="utf-8") as file:
    for row in rows:
      file.write(json.dumps({"id": row["id"], "margins": peer.judge(row["prompt"], row["tokens"])}) + "\n")


def _answer(answers, value):
  answers.write(json.dumps(value) + "\n")
  answers.flush()
