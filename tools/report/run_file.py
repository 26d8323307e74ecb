"""Reads and writes run files for tools.report: figures, a row for each request, a row for each step. Measures nothing.

A run file is JSON lines. The first is

  {"format": "sluice run 1", "about": {...}, "figures": {...}, "request_fields": [...], "step_fields": [...],
   "served_fields": [...]}

where `about` describes the run (label, batching, workload, slots, block_size, num_blocks, SLOs, machine) and `figures`
is the JSON line that the tool printed. Every other line is a request as its client saw it, {"r": [values of
request_fields]}, a step, {"s": [values of step_fields]}, or a request as the engine saw it, {"e": [values of
served_fields]}. All times are seconds since the start of the measured load; the file has no warm-up. Request fields:
id, prompt_len, output_len, intended_s, sent_s, error (null or text), chunks ([[seconds, tokens], ...], one entry for
each message), tenant, priority. Step fields are those of engine/recorder.py's StepRecord, served fields those of its
RequestRecord. Readers look fields up by name, so new fields may follow, and accept files without served requests,
tenants or priorities. A run file holds no prompts and no tokens. The simulator writes run files with virtual times and
"costs" in `about`.
"""

from collections.abc import Sequence
import dataclasses
import json
import pathlib
from typing import Any

from engine.errors import ConfigError
from engine.recorder import RequestRecord, StepRecord
from tools.report.latency import Outcome
from tools.simulate.step_points import parse_step_trace

FORMAT = "sluice run 1"
REQUEST_FIELDS = ("id", "prompt_len", "output_len", "intended_s", "sent_s", "error", "chunks", "tenant", "priority")
_MICRO = 6  # decimal digits of a second


@dataclasses.dataclass(frozen=True)
class RecordedRun:
  """The contents of a run file; see the module docstring.

  Attributes:
    about, figures: plain JSON values.
    outcomes: the outcomes of the measured requests, without token ids.
    prompt_lens: the prompt lengths of the same requests.
    steps: the step records, possibly none.
    served: the engine's records of finished requests, possibly none.
  """

  about: dict[str, Any]
  figures: dict[str, Any]
  outcomes: tuple[Outcome, ...]
  prompt_lens: tuple[int, ...]
  steps: tuple[StepRecord, ...]
  served: tuple[RequestRecord, ...] = ()

  @property
  def label(self) -> str:
    """The run's name in a report."""
    return str(self.about.get("label") or "run")


def write_run(path: str, run: RecordedRun, start_s: float) -> None:
  """Writes a run; `start_s` is the start of the load on the clock of its times."""
  head = {
    "format": FORMAT,
    "about": run.about,
    "figures": run.figures,
    "request_fields": REQUEST_FIELDS,
    "step_fields": StepRecord._fields,
    "served_fields": RequestRecord._fields,
  }
  with open(path, "w", encoding="utf-8") as file:
    file.write(json.dumps(head) + "\n")
    for outcome, prompt_len in zip(run.outcomes, run.prompt_lens, strict=True):
      row = [
        outcome.id,
        prompt_len,
        outcome.output_len,
        round(outcome.intended_s - start_s, _MICRO),
        round(outcome.sent_s - start_s, _MICRO),
        outcome.error,
        [[round(time - start_s, _MICRO), count] for time, count in outcome.chunks],
        outcome.tenant,
        outcome.priority,
      ]
      file.write(json.dumps({"r": row}, separators=(",", ":")) + "\n")
    for step in run.steps:
      file.write(_row("s", step._replace(time=step.time - start_s)))
    for record in run.served:
      file.write(_row("e", shifted(record, -start_s)))


def _row(kind: str, record: Sequence[Any]) -> str:
  row = [round(value, _MICRO) if isinstance(value, float) else value for value in record]
  return json.dumps({kind: row}, separators=(",", ":")) + "\n"


def shifted(record: RequestRecord, seconds: float) -> RequestRecord:
  """Returns the record with `seconds` added to its times."""
  times = {name: getattr(record, name) for name in ("arrival", "first_scheduled", "first_token", "end")}
  return record._replace(**{name: time + seconds for name, time in times.items() if time is not None})


def read_run(path: str) -> RecordedRun:
  """Reads a file that write_run() wrote.

  Raises:
    ConfigError: the file is missing, or is no run file.
  """
  remedy = "make one with --run_file of tools.bench_serving or tools.bench_offline"
  try:
    lines = pathlib.Path(path).read_text("utf-8").splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise ConfigError(f"run {path} cannot be read ({error}); {remedy}") from error
  number, outcomes, prompt_lens, steps, served = 1, [], [], [], []
  try:
    head = json.loads(lines[0])
    if head["format"] != FORMAT:
      raise ValueError(f"format {head['format']!r:.40} is unknown")
    for line in lines[1:]:
      number += 1
      entry = json.loads(line)
      if "r" in entry:
        row = dict(zip(head["request_fields"], entry["r"], strict=True))
        chunks = tuple((float(time), int(count)) for time, count in row["chunks"])
        sender = row.get("tenant", ""), row.get("priority", 0)
        times = row["intended_s"], row["sent_s"]
        outcomes.append(Outcome(row["id"], row["output_len"], *times, chunks, (), row["error"], *sender))
        prompt_lens.append(row["prompt_len"])
      elif "e" in entry:
        row = dict(zip(head["served_fields"], entry["e"], strict=True))
        served.append(RequestRecord(**{name: row[name] for name in RequestRecord._fields}))
      else:
        row = dict(zip(head["step_fields"], entry["s"], strict=True))
        steps.append(StepRecord(**{name: row[name] for name in StepRecord._fields if name in row}))
    return RecordedRun(head["about"], head["figures"], tuple(outcomes), tuple(prompt_lens), tuple(steps), tuple(served))
  except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
    raise ConfigError(
      f"{path}, line {number} is not of a run file ({type(error).__name__}: {error}); {remedy}"
    ) from error


def steps_of_trace(path: str, side: str = "") -> tuple[StepRecord, ...]:
  """Returns the steps of a step trace (the engine's start_trace) as records.

  Fields that a trace lacks are 0: idle slots, KV, queues, and commit times.

  Raises:
    ConfigError: the file is missing, or is no step trace.
  """
  found = parse_step_trace(path, lambda batch, now: _record(batch, now, side))
  first = min(step.time for step in found)
  return tuple(step._replace(time=step.time - first) for step in found)


def _record(batch: dict[str, Any], now: float, side: str) -> StepRecord:
  starts: Sequence[int] = batch["starts"]
  counts: Sequence[int] = batch["counts"]
  decodes = batch["num_decodes"]
  pairs = [count * start + count * (count + 1) // 2 for start, count in zip(starts, counts, strict=True)]
  values: dict[str, Any] = dict.fromkeys(StepRecord._fields, 0) | {
    "step": batch["step"],
    "side": side,
    "time": now,
    "shape_tokens": batch["shape"][0],
    "shape_rows": batch["shape"][1],
    "num_rows": len(counts),
    "decode_rows": decodes,
    "decode_tokens": sum(counts[:decodes]),
    "prefill_tokens": sum(counts[decodes:]),
    "decode_keys": sum(pairs[:decodes]),
    "prefill_pairs": sum(pairs[decodes:]),
    # A trace without "computed" comes from a device that computes all padding.
    "padding": batch.get("computed", batch["shape"][0]) - sum(counts),
    "num_running": len(counts),
  }
  return StepRecord(**values)
