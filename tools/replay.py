"""Replays a step trace through the scheduler and reports the first decision that differs.

`python -m tools.replay TRACE` rebuilds the scheduler from the trace's first line, feeds it the engine's inputs, and
compares every batch: shape, rows, counts, block ids, inputs. Exit code 0: all are the same; 1: one differs; 2: the
file is not a trace. Uses the standard library and the pure engine alone.
"""

from collections.abc import Iterable
import dataclasses
import json
import sys
from typing import Any

from engine.batch import Batch, StepResult
from engine.constraint import Verdicts
from engine.recorder import batch_line
from engine.request import FinishReason, Request
from engine.scheduler import Scheduler
from engine.shapes import StepShape
from engine.snapshot import restore_scheduler
from tools.arguments import CommandParser


class NotATrace(Exception):
  """The file is not a Recorder's trace; the message names the line."""


@dataclasses.dataclass(frozen=True)
class Replayed:
  """The result. Attributes: num_batches: compared batches; num_lines: lines read; difference: the first or None."""

  num_batches: int
  num_lines: int
  difference: str | None


def replay(lines: Iterable[str]) -> Replayed:
  """Feeds the lines of a trace to a new scheduler, up to the first difference.

  Raises:
    NotATrace: a line is no JSON, is cut off, or does not follow from those before it.
  """
  scheduler: Scheduler | None = None
  launched: dict[int, Batch] = {}
  num_batches = number = 0
  for number, line in enumerate(lines, 1):
    try:
      entry = json.loads(line)
      if number == 1:
        scheduler, launched = _begin(entry)
        continue
      assert scheduler is not None
      difference = _feed(entry, scheduler, launched)
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
      raise NotATrace(f"line {number}: {type(error).__name__}: {error}") from error
    num_batches += entry["event"] == "schedule" and entry["batch"] is not None
    if difference:
      return Replayed(num_batches, number, f"line {number}: {difference}")
  if scheduler is None:
    raise NotATrace("the file is empty")
  return Replayed(num_batches, number, None)


def _begin(entry: dict[str, Any]) -> tuple[Scheduler, dict[int, Batch]]:
  if entry["event"] != "state":
    raise ValueError(
      f"the first event is {entry['event']!r}, a trace begins with the scheduler's state; give a whole trace"
    )
  in_flight = entry["in_flight"] and _batch(entry["in_flight"])
  return restore_scheduler(entry["scheduler"]), {in_flight.step: in_flight} if in_flight else {}


def _feed(entry: dict[str, Any], scheduler: Scheduler, launched: dict[int, Batch]) -> str | None:
  """Feeds one line; returns a description of the difference, or None."""
  match entry["event"]:
    case "add":
      scheduler.add_request(Request.from_state(entry["request"]))
    case "abort":
      scheduler.abort_request(entry["id"], FinishReason(entry["reason"]))
    case "expire":
      ids = [event.request_id for event in scheduler.expire_requests(entry["now"])]
      if ids != entry["ids"]:
        return f"requests past their deadline were {entry['ids']}, are now {ids}"
    case "schedule":
      drafts = entry.get("drafts", {})
      scheduler.set_constrained_drafts({name: (tuple(draft[1:]), draft[0]) for name, draft in drafts.items()})
      batch = scheduler.schedule(entry["now"])
      if batch is not None:
        launched[batch.step] = batch
      return _compare(entry["batch"], batch and batch_line(batch, scheduler.config.computes_padding))
    case "commit":
      result = StepResult(
        entry["tokens"],
        frozenset(entry["bad_rows"]),
        row_ends=tuple(entry.get("row_ends", ())),
        proposals={row: tuple(found) for row, *found in entry.get("proposals", ())},
        fill_seconds=entry.get("fill_seconds", 0.0),
      )
      forced = {row: tuple(tokens) for row, *tokens in entry.get("forced", ())}
      done, failed, taken = (
        frozenset(entry.get("done", ())),
        dict(entry.get("failed", ())),
        dict(entry.get("taken", ())),
      )
      verdicts = Verdicts(done, failed, taken, forced)
      scheduler.commit(launched.pop(entry["step"]), result, entry["now"], verdicts)
    case unknown:
      raise ValueError(f"unknown event {unknown!r}")
  return None


def _compare(recorded: dict[str, Any] | None, replayed: dict[str, Any] | None) -> str | None:
  if recorded is None or replayed is None:
    return None if recorded == replayed else f"the batch was {recorded}, is now {replayed}"
  for name, value in (recorded | {"shape": [*dataclasses.astuple(_shape(recorded["shape"]))]}).items():
    if replayed.get(name) != value:
      return f"step {recorded['step']}: {name} was {value}, is now {replayed.get(name)}"
  return None


def _batch(line: dict[str, Any]) -> Batch:
  """Returns the batch in flight at the trace's start, with the fields that commit() reads."""
  num_drafts = tuple(line.get("num_drafts", ()))
  decodes = line["num_decodes"]  # rows without token ids, before those of prompts
  token_ids = []
  for count, drafts in zip(line["counts"], num_drafts or (0,) * len(line["counts"]), strict=True):
    is_decode = not drafts and decodes > 0
    decodes -= is_decode
    token_ids.append(() if is_decode else (0,) * count)
  return Batch(
    step=line["step"],
    shape=_shape(line["shape"]),
    request_ids=tuple(line["ids"]),
    slots=tuple(line["slots"]),
    starts=tuple(line["starts"]),
    counts=tuple(line["counts"]),
    num_logits=tuple(line["num_logits"]),
    samples=tuple(map(bool, line["samples"])),
    token_ids=tuple(token_ids),
    num_drafts=num_drafts,
    num_proposals=line.get("num_proposals", 0),
    fills_draft=line.get("fills_draft", False),
    behind=tuple(line.get("behind", ())),
  )


def _shape(values: list[int]) -> StepShape:
  """Returns the step's shape. Older traces have tokens and rows alone, with as many logit rows as rows."""
  tokens, rows, *logits = values
  return StepShape(tokens, rows, *(logits or (rows,)))


def main(arguments: list[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("python -m tools.replay", "Replay a step trace through the scheduler and compare all batches.")
  parser.add_argument("trace", help="step trace written by the engine's start_trace()")
  path = parser.parse_args(arguments).trace
  try:
    with open(path, encoding="utf-8") as file:
      replayed = replay(file)
  except (OSError, NotATrace) as error:
    print(f"{path} cannot be replayed: {error}", file=sys.stderr)
    return 2
  if replayed.difference:
    print(f"{replayed.num_batches - 1} batches are the same, then they differ. {replayed.difference}")
    return 1
  print(f"{replayed.num_batches} batches are the same ({replayed.num_lines} lines)")
  return 0


if __name__ == "__main__":
  sys.exit(main())
