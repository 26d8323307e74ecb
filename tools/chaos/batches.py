"""Scenario: a server that is killed with SIGKILL beside running batches, which must answer each line exactly once."""

from collections import Counter
import dataclasses
import json
import random
import time
from typing import Any

import httpx

from tools.chaos.process import Server
from tools.chaos.report import Row
from tools.chaos.rig import Rig

_NUM_LINES = 200
_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_FLAGS = ("--fake_step_ms=5", "--max_num_seqs=16")
_WAIT_S = 120.0
_UNFINISHED = ("validating", "in_progress", "finalizing")
# Every such line has a body that the endpoint refuses.
_BAD_EVERY = 10


@dataclasses.dataclass
class Killings:
  """What a client knows of its batches over several lives of one server.

  Attributes:
    made: batches by id, with the most lines that a response has shown as done.
    kills, interrupted: kills, and those with an unfinished batch.
    faults: descriptions of faults.
  """

  made: dict[str, int] = dataclasses.field(default_factory=dict)
  kills: int = 0
  interrupted: int = 0
  faults: list[str] = dataclasses.field(default_factory=list)

  def count_unfinished(self, client: httpx.Client) -> int:
    """Looks at each batch; returns the number of those that have not ended."""
    unfinished = 0
    for batch_id, seen in self.made.items():
      batch = client.get(f"/v1/batches/{batch_id}").raise_for_status().json()
      done = batch["request_counts"]["completed"] + batch["request_counts"]["failed"]
      if done < seen:
        self.faults.append(f"a batch had {seen} finished lines, and {done} after a kill")
      self.made[batch_id] = max(seen, done)
      unfinished += batch["status"] in _UNFINISHED
    return unfinished

  def live_once(self, server: Server, rng: random.Random) -> None:
    """Serves until a few more lines are done, and is killed."""
    with server, _client_of(server) as client:
      if not self.count_unfinished(client):
        for endpoint in _ENDPOINTS:
          self.made[_create_batch(client, endpoint)] = 0
      goal = sum(self.made.values()) + rng.randint(0, _NUM_LINES // 2)
      deadline = time.monotonic() + _WAIT_S
      while self.count_unfinished(client) and sum(self.made.values()) < goal and time.monotonic() < deadline:
        time.sleep(0.01)
      unfinished = self.count_unfinished(client)
      server.kill()
    self.kills += 1
    self.interrupted += unfinished > 0

  def check_answers(self, server: Server) -> None:
    """Lets every batch end, and looks for each line in the two files."""
    with server, _client_of(server) as client:
      deadline = time.monotonic() + _WAIT_S
      while self.count_unfinished(client) and time.monotonic() < deadline:
        time.sleep(0.05)
      for batch_id in self.made:
        batch = client.get(f"/v1/batches/{batch_id}").json()
        if batch["status"] != "completed":
          self.faults.append(f"a batch is {batch['status']}")
          continue
        for name, is_bad in (("output_file_id", False), ("error_file_id", True)):
          wanted = [number for number in range(_NUM_LINES) if (number % _BAD_EVERY == 0) == is_bad]
          found = Counter(int(line["custom_id"]) for line in _read_file(client, batch[name]))
          self.faults += [
            f"line {number} is {found[number]} times in {name}" for number in wanted if found[number] != 1
          ]
          self.faults += [f"line {number} is in {name}" for number in found.keys() - {*wanted}]
      self.faults += server.settle()


def batches(rig: Rig, count: int = 10, asked: int = 10) -> list[Row]:
  """Kills one server `count` times, each time after a random number of further lines."""
  killings, rng = Killings(), random.Random(count)
  server = rig.server(*_FLAGS, f"--batch_dir={rig.folder / f'batches-{time.monotonic_ns()}'}")
  for _ in range(count):
    killings.live_once(server, rng)
  killings.check_answers(server)
  lines = _NUM_LINES * len(killings.made)
  measured = f"{killings.kills} kills, {killings.interrupted} beside an unfinished batch; {lines:,} lines"
  if killings.faults:
    measured += f"; {len(killings.faults)} faults: {killings.faults[0]}"
  return [
    Row(
      "lines of batches, the server killed with -9 beside them",
      "each answered exactly once, in the right file; none lost",
      measured,
      not killings.faults and killings.interrupted > 0,
      asked,
      killings.kills,
    )
  ]


def _client_of(server: Server) -> httpx.Client:
  return httpx.Client(base_url=f"http://127.0.0.1:{server.http_port}", timeout=30)


def _create_batch(client: httpx.Client, endpoint: str) -> str:
  """Returns the id of a new batch, whose lines follow its endpoint."""
  lines = "\n".join(_make_line(endpoint, number) for number in range(_NUM_LINES))
  form: Any = {"files": {"file": ("in.jsonl", lines.encode())}, "data": {"purpose": "batch"}}
  file_id = client.post("/v1/files", **form).raise_for_status().json()["id"]
  body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
  return client.post("/v1/batches", json=body).raise_for_status().json()["id"]


def _make_line(endpoint: str, number: int) -> str:
  body: dict[str, Any] = {"top_p": 5 if number % _BAD_EVERY == 0 else 0.5}
  match endpoint:
    case "/v1/chat/completions":
      body |= {"messages": [{"role": "user", "content": f"line {number}"}], "max_tokens": 8}
    case "/v1/responses":
      body |= {"input": f"line {number}", "max_output_tokens": 8}
    case _:
      body |= {"prompt": f"line {number}", "max_tokens": 8}
  return json.dumps({"custom_id": str(number), "method": "POST", "url": endpoint, "body": body})


def _read_file(client: httpx.Client, file_id: str | None) -> list[dict[str, Any]]:
  if file_id is None:
    return []
  text = client.get(f"/v1/files/{file_id}/content").raise_for_status().text
  return [json.loads(line) for line in text.splitlines()]
