"""Reads an engine's steps from its step trace, and makes points for a cost table's fit. Fits nothing.

Standard library only.
"""

from collections.abc import Callable, Iterable
import json
import math
from typing import Any, NamedTuple

from engine.errors import ConfigError
from tools.simulate.step_costs import WARM_AFTER, After, AttentionWork, Launch, Warmth, work_of


class Point(NamedTuple):
  """A measured step: the rung's tokens, its work, seconds on the device, and the device's state before it (Warmth)."""

  tokens: int
  work: AttentionWork
  seconds: float
  since_cold: int = WARM_AFTER
  after: After = After.ALIKE


class LaunchPoint(NamedTuple):
  """A measured launch: rows, prefill tokens, admissions, seconds of planning, packing and dispatch."""

  rows: int
  prefill_tokens: int
  admissions: int
  seconds: float
  kind: Launch = Launch.DECODES


class RecordedStep(NamedTuple):
  """A step of a step trace: its planning time and durations; None if its values never arrived."""

  step: int
  time: float
  tokens: int
  starts: tuple[int, ...]
  counts: tuple[int, ...]
  host_s: float | None
  device_s: float | None
  admissions: int = 0  # a step trace does not record them
  num_drafts: tuple[int, ...] = ()  # of each row, or () without drafts


def read_trace_entries(path: str, add_entry: Callable[[dict[str, Any]], None]) -> None:
  """Calls `add_entry` with each entry of a file from the engine's start_trace(), in order.

  Raises:
    ConfigError: the file cannot be read, or `add_entry` cannot take a line.
  """
  number = 0
  try:
    with open(path, encoding="utf-8") as file:
      for line in file:
        number += 1
        add_entry(json.loads(line))
  except OSError as error:
    raise ConfigError(f"step trace {path} cannot be read: {error.strerror}; check the path") from error
  except (ValueError, KeyError, TypeError, IndexError) as error:
    raise ConfigError(
      f"{path}, line {number} is no line of a step trace ({type(error).__name__}: {error}); record one with "
      "--trace_file of the server or of tools.bench_offline"
    ) from error


def parse_step_trace[Step](path: str, make: Callable[[dict[str, Any], float], Step]) -> list[Step]:
  """Returns the steps of a file from the engine's start_trace(), in order.

  Args:
    make: makes a step from its batch (see engine.recorder.batch_line) and its planning time. The function sets the
      step's fields host_s and device_s if its values arrived.

  Raises:
    ConfigError: the file is missing, or is no step trace.
  """
  steps: dict[int, Any] = {}

  def add_entry(entry: dict[str, Any]) -> None:
    if entry["event"] == "schedule" and entry["batch"] is not None:
      steps[entry["batch"]["step"]] = make(entry["batch"], float(entry["now"]))
    elif entry["event"] == "commit" and entry["step"] in steps:
      times = {name: float(entry[name]) for name in ("host_s", "device_s")}
      steps[entry["step"]] = steps[entry["step"]]._replace(**times)

  read_trace_entries(path, add_entry)
  if not steps:
    raise ConfigError(f"step trace {path} holds no step; record one with --trace_file while requests run")
  return list(steps.values())


def read_step_trace(path: str) -> list[RecordedStep]:
  """Returns the steps of a step trace with the inputs of the cost model. Raises ConfigError, as parse_step_trace."""

  def make(batch: dict[str, Any], now: float) -> RecordedStep:
    return RecordedStep(
      batch["step"],
      now,
      batch["shape"][0],
      tuple(batch["starts"]),
      tuple(batch["counts"]),
      None,
      None,
      num_drafts=tuple(batch.get("num_drafts", ())),
    )

  return parse_step_trace(path, make)


def points_of(steps: Iterable[RecordedStep]) -> tuple[list[Point], list[LaunchPoint]]:
  """Returns one device's recorded steps, in order, as measured points; skips steps without a time or with drafts."""
  warmth, points, launches = Warmth(), [], []
  last = -math.inf
  for step in steps:
    if not step.device_s:
      continue
    work, host_s = work_of(step.starts, step.counts), step.host_s or 0.0
    has_prompt = work.prefill_tokens > 0
    since, after = warmth.step(step.time, step.tokens, has_prompt)
    last = max(step.time + host_s, last) + step.device_s
    warmth.ended(last)
    if step.num_drafts:
      continue
    points.append(Point(step.tokens, work, step.device_s, since, after))
    if host_s:
      kind = Launch.of(has_prompt, since, after)
      launches.append(LaunchPoint(len(step.counts), work.prefill_tokens, step.admissions, host_s, kind))
  return points, launches
