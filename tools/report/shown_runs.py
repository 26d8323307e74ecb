"""Selects the runs, loads and figures that a report shows. Plots and measures nothing."""

from collections.abc import Iterable, Sequence
import dataclasses
import math
from typing import Any

from engine.recorder import StepRecord
from engine.settings import BATCHING, POLICIES
from tools.report.latency import Objectives, summary
from tools.report.run_file import RecordedRun
from tools.report.senders import sender_figures

MODES = ("static", "dynamic", "continuous", "chunked", "disaggregated")  # from the oldest idea to the newest
assert set(MODES) == set(BATCHING)


@dataclasses.dataclass(frozen=True)
class Shown:
  """A run as the report shows it.

  Attributes:
    run: the run file's contents.
    load: the offered requests a second; infinite for a burst.
    objectives: the report's objectives.
    figures: the figures of tools.report.latency.summary for these objectives, and of tools.report.senders.
  """

  run: RecordedRun
  load: float
  objectives: Objectives
  figures: dict[str, Any]

  @property
  def label(self) -> str:
    return self.run.label


def offered_load(run: RecordedRun) -> float:
  """Returns requests a second over the time of arrivals; infinite if that time is 0."""
  times = [outcome.intended_s for outcome in run.outcomes]
  span = max(times) - min(times)
  return (len(times) - 1) / span if span > 0 else math.inf


def nominal_load(run: RecordedRun) -> float:
  """Returns the requested rate, if there was one; else the offered load."""
  rate = (run.about.get("workload") or {}).get("rate")
  return float(rate) if isinstance(rate, int | float) else offered_load(run)


def objectives_of(run: RecordedRun, given: Objectives) -> Objectives:
  """Returns `given` if it limits anything, else the run's own objectives."""
  return given if given != Objectives() else Objectives(**(run.about.get("slo") or {}))


def prepared(runs: Iterable[RecordedRun], given: Objectives) -> list[Shown]:
  """Returns the runs by label and load, with their figures."""
  shown = []
  for run in runs:
    lens = zip(run.outcomes, run.prompt_lens, strict=True)
    prompt_tokens = sum(length for outcome, length in lens if outcome.ok)
    objectives = objectives_of(run, given)
    figures = summary(run.outcomes, prompt_tokens, objectives) | sender_figures(run.outcomes, run.prompt_lens)
    shown.append(Shown(run, nominal_load(run), objectives, figures))
  return sorted(shown, key=lambda one: (rank(one.label), one.label, one.load))


def rank(label: str) -> int:
  """Returns a label's rank: batching modes in their order, then Sluice's policies, then the rest."""
  return MODES.index(label) if label in MODES else len(MODES) + (label not in POLICIES)


def side_by_side(shown: Sequence[Shown]) -> list[Shown]:
  """Returns one run for each label at one load: of the loads that most labels share, the one with the most goodput.

  Below that load all runs do well, and far above it none does.
  """
  by_load: dict[str, dict[str, Shown]] = {}
  for one in shown:
    by_load.setdefault(f"{one.load:.3g}", {})[one.label] = one

  def merit(found: dict[str, Shown]) -> tuple[float, ...]:
    goodput = max(one.figures["goodput_request_s"] or 0.0 for one in found.values())
    return len(found), goodput, max(one.load for one in found.values())

  return list(max(by_load.values(), key=merit, default={}).values())


def padding_share(steps: Sequence[StepRecord]) -> float | None:
  """Returns the share of padding in all computed tokens; None without steps."""
  computed = sum(step.decode_tokens + step.prefill_tokens + step.padding for step in steps)
  return sum(step.padding for step in steps) / computed if computed else None


def likeness(beside: Sequence[Shown]) -> str:
  """Describes whether the compared runs had the same requests."""
  offered = {
    tuple(
      (length, outcome.output_len, round(outcome.intended_s, 3))
      for length, outcome in zip(one.run.prompt_lens, one.run.outcomes, strict=True)
    )
    for one in beside
  }
  if len(offered) == 1:
    return "All had requests of the same lengths at the same times."
  return "Their requests differ in length, number or time, so that the bars differ for that reason too."
