"""One host of a cluster that serves a list of requests; the tests run it in processes of its own.

Argument: JSON of a Task. The leader prints JSON of its tokens, a follower of its counts.
"""

import dataclasses
import json
import os
import pathlib
import sys
import time
from typing import Any

from engine.device.build import Built
from engine.device.options import BuildOptions
from engine.request import Request, TokenEvent
from engine.sampling_params import SamplingParams
from extensions.multi_host.build import build_follower, build_leader, join_devices
from extensions.multi_host.cluster_place import ClusterPlace
from extensions.multi_host.follower import Follower
from extensions.multi_host.host_facts import collect_facts
from extensions.multi_host.leader import Leader
from server.host_options import ClusterSettings

SECRET = b"0123456789abcdef0123456789abcdef"


@dataclasses.dataclass(frozen=True)
class Task:
  """What a process does: its place, the model, the engine's settings, and prompts with sampling parameters."""

  num_hosts: int
  host_id: int
  port: int
  model: str
  settings: dict[str, Any]
  requests: list[tuple[list[int], dict[str, Any]]]


def fail(reason: object) -> None:
  print(f"lost: {reason}", file=sys.stderr, flush=True)
  os._exit(1)


def make_options(model: str, settings: dict[str, Any]) -> BuildOptions:
  return BuildOptions(
    model, **{name: tuple(each) if isinstance(each, list) else each for name, each in settings.items()}
  )


def serve(built: Built, events: list[TokenEvent], requests: list[tuple[list[int], dict[str, Any]]]) -> dict[str, Any]:
  """Serves all requests at once; `events` is what the engine emits."""
  engine = built.engine
  for index, (prompt, params) in enumerate(requests):
    choices = {name: tuple(map(tuple, each)) if name == "logit_bias" else each for name, each in params.items()}
    engine.submit(Request(str(index), prompt, SamplingParams(**choices), seed=index))
  while engine.num_live:
    engine.step()
    assert engine.dead is None, engine.dead
  tokens = [[] for _ in requests]
  for event in events:
    tokens[int(event.request_id)] += event.token_ids
  return {
    "tokens": tokens,
    "preemptions": engine.stats().num_preemptions,
    "compiles": built.runner.compiles_after_ready,
    "blocks": built.config.num_blocks,
  }


def main(task: Task) -> None:
  options = make_options(task.model, task.settings)
  place = ClusterPlace("127.0.0.1", task.port, task.num_hosts, task.host_id, False)
  cluster = ClusterSettings(num_hosts=task.num_hosts, host_timeout_s=60, host_start_timeout_s=120)
  if task.host_id:
    follower = Follower(place, cluster, SECRET, fail, lambda: fail("stopped"))
    follower.join_cluster(collect_facts(pathlib.Path(task.model), task.num_hosts, task.settings))
    join_devices(place, 120)
    side = build_follower(options, follower, lambda *_: None)
    follower.follow_leader(side.runner, side.scheduler.config.overlap)
    found = {"steps": follower.num_steps, "compiles": side.runner.compiles_after_ready}
    found["bytes_read"] = side.loaded.num_bytes_read
  else:
    leader = Leader(place, cluster, SECRET, pathlib.Path(task.model), print, fail, lambda: None)
    leader.gather_hosts(task.settings)
    join_devices(place, 120)
    events = []
    found = serve(build_leader(options, leader, lambda *_: None, events.extend), events, task.requests)
    time.sleep(0.6)  # a heartbeat
    found["metrics"] = {metric.name: [each.value for each in metric.samples] for metric in leader.collect_metrics()}
    leader.dismiss_hosts()
  print(json.dumps(found), flush=True)
  os._exit(0)


if __name__ == "__main__":
  main(Task(**json.loads(sys.argv[1])))
