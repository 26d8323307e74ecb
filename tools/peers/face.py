"""The child's side of tools.peers: starts an adapter, reads its orders, reports its results. Standard library alone.

It runs in every peer's own environment (Python 3.11 or later), so it imports nothing of Sluice. tools.peers starts an
adapter as `python -m tools.peers.run_NAME --model=DIR ...`. The adapter loads and then speaks JSON lines: first
`{"ready": true, ...}` on standard output. For each `{"requests": FILE, "output": FILE, "realtime": false}` on standard
input it serves the file, writes each request's outcome, and answers `{"done": true}`; `{"judge": FILE, "output": FILE}`
requests logits. It ends with its input. Output of libraries goes to standard error. The parent computes the figures
from times and tokens.
"""

import argparse
from collections.abc import Callable
import dataclasses
import json
import os
import sys
import time
from typing import Any

PRECISIONS = ("f32", "int8", "int4")


class Log:
  """Each request's tokens and their times, on the machine-wide monotonic clock."""

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
    """Records that a request goes to the engine now."""
    self._rows[identity]["sent_s"] = time.monotonic()

  def got(self, identity, tokens):
    """Records that tokens of a request have come now; an empty list is no event."""
    if tokens:
      row = self._rows[identity]
      row["chunks"].append([time.monotonic(), len(tokens)])
      row["tokens"] += [int(token) for token in tokens]

  def take(self, identity, **values):
    """Records all of a request at once, for an engine with its own times on the same clock."""
    self._rows[identity] |= values

  def write(self, path):
    """Writes a line for each request."""
    with open(path, "w", encoding="utf-8") as file:
      for row in self._rows.values():
        file.write(json.dumps(row, separators=(",", ":")) + "\n")


def read_requests(path):
  """Returns the request lines of a file, without the line that describes the file."""
  with open(path, encoding="utf-8") as file:
    lines = [json.loads(line) for line in file if line.strip()]
  return [line for line in lines if "prompt" in line]


def due(waiting, start_s, realtime, most):
  """Takes at most `most` due requests out of `waiting` (ordered by arrival, the latest first)."""
  taken = []
  while waiting and len(taken) < most and (not realtime or start_s + waiting[-1]["arrival_s"] <= time.monotonic()):
    taken.append(waiting.pop())
  return taken


def parser(doc):
  """Returns a parser with the flags that every adapter has."""
  made = argparse.ArgumentParser(description=doc, allow_abbrev=False)
  made.add_argument("--model", required=True, help="a Hugging Face folder with plain weights")
  made.add_argument("--work", required=True, help="folder for converted models; kept between runs")
  made.add_argument("--threads", type=int, default=2)
  made.add_argument("--precision", choices=PRECISIONS, default="f32", help="of weights")
  made.add_argument("--max_len", type=int, default=1024, help="prompt and output together, tokens")
  made.add_argument("--max_requests", type=int, default=64, help="sequences at once")
  made.add_argument("--realtime", action="store_true", help="requests arrive at their times")
  return made


@dataclasses.dataclass(frozen=True)
class Peer:
  """An engine that is ready.

  Attributes:
    settings: its settings, for the report.
    run: run(requests, log, start_s, realtime) serves all requests and records them in the log.
    judge: judge(prompt, tokens) gives each token's distance from the largest logit; None if it cannot.
  """

  settings: dict[str, Any]
  run: Callable[[list[dict[str, Any]], "Log", float, bool], None] | None = None
  judge: Callable[[list[int], list[int]], list[float]] | None = None


def serve(begin: Callable[[], Peer]):
  """Runs an adapter until its input ends; `begin` loads, and counts towards the time to ready."""
  answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
  os.dup2(2, 1)  # keeps output of libraries apart from the answers
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
