"""Converts a Scheduler to plain JSON values and back, for traces. May not decide anything or keep references.

Only this module and scheduler.py know the attributes of a Scheduler. It covers all state that later decisions use.
"""

import dataclasses
from typing import Any

from engine.batching import make_batching
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.request import Request, RequestStatus
from engine.scheduler import Scheduler
from engine.waiting_queue import WaitingQueue


def scheduler_state(scheduler: Scheduler) -> dict:
  """Returns all state of later decisions as plain JSON values; restore_scheduler() is the inverse."""
  scheduler.settle_counts()
  ended = {
    id(request): request
    for rows in scheduler._launched.values()
    for request in rows
    if request.status is RequestStatus.FINISHED
  }
  # Rows are indices of live requests in the order of arrival, then of finished ones that a step still holds.
  requests = [*scheduler._requests.values(), *ended.values()]
  index = {id(request): number for number, request in enumerate(requests)}
  return {
    "config": dataclasses.asdict(scheduler.config),
    "requests": [request.state() for request in requests],
    "waiting": [index[id(request)] for request in scheduler._waiting],
    "running": [index[id(request)] for request in scheduler._running],
    "launched": {str(step): [index[id(request)] for request in rows] for step, rows in scheduler._launched.items()},
    "slots": list(scheduler._slots),
    "pool": scheduler.pool.state(),
    "batching": scheduler._batching.state(),
    "policy": scheduler._policy.state(),
    "times": list(scheduler._times.items()),
    "behind_steps": sorted(scheduler._behind_steps),
    "last_commit": scheduler._last_commit,
    "num_steps": scheduler._num_steps,
    "num_arrivals": scheduler._num_arrivals,
    "constrained_step": scheduler._constrained_step,
    "drafted_step": scheduler._drafts.drafted_step,
    "awaited_step": scheduler._drafts.awaited_step,
    "speculation": scheduler._speculation and scheduler._speculation.state(),
    "num_preemptions": scheduler.num_preemptions,
    "next_deadline": None if scheduler._next_deadline == float("inf") else scheduler._next_deadline,
  }


def restore_scheduler(state: dict) -> Scheduler:
  """Makes a scheduler that decides like the one with this scheduler_state()."""
  config: dict[str, Any] = {
    name: tuple(value) if isinstance(value, list) else value for name, value in state["config"].items()
  }
  scheduler = Scheduler(EngineConfig(**config))
  requests = [Request.from_state(item) for item in state["requests"]]
  live = {request.id: request for request in requests if request.status is not RequestStatus.FINISHED}
  for request, item in zip(requests, state["requests"], strict=True):
    request.leader = live.get(item["leader"])
  scheduler._requests = live
  scheduler._waiting = WaitingQueue(requests[number] for number in state["waiting"])
  scheduler._running = [requests[number] for number in state["running"]]
  scheduler._launched = {int(step): [requests[number] for number in rows] for step, rows in state["launched"].items()}
  scheduler._slots = state["slots"]
  scheduler.pool = BlockPool.from_state(state["pool"])
  scheduler._batching = make_batching(scheduler.config, state["batching"])
  scheduler._policy.restore_state(state["policy"])
  scheduler._constrained_step = state.get("constrained_step", -1)
  scheduler._drafts.drafted_step = state.get("drafted_step", -1)
  scheduler._drafts.awaited_step = state.get("awaited_step", -1)
  if scheduler._speculation is not None:
    scheduler._speculation.restore_state(state["speculation"], live)
  scheduler._num_constrained = sum(request.constraint is not None for request in live.values())
  scheduler._times = dict(state["times"])
  scheduler._behind_steps = set(state.get("behind_steps", ()))
  scheduler._last_commit = state["last_commit"]
  scheduler._num_steps = state["num_steps"]
  scheduler._num_arrivals = state["num_arrivals"]
  scheduler.num_preemptions = state["num_preemptions"]
  scheduler._next_deadline = float("inf") if state["next_deadline"] is None else state["next_deadline"]
  return scheduler
