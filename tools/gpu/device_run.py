"""Runs the jobs of one run on a device: limits of time, what to skip after losses, and files that are always complete.

After every job results.jsonl has its record, and table.txt and meta.json the state of the whole run, so a run that is
cut off leaves all that it found. Knows no kernel.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import Any, TextIO

from tools.gpu import debugger, protocol, report
from tools.gpu.losses import Losses
from tools.gpu.protocol import Job, Record
from tools.measure import commit

_BATCH = 8  # jobs that compile concurrently
_PATIENCE_S = {"device": 90.0, "interpret": 300.0, "emulate": 900.0, "compile": 600.0}
SMOKE_SHARE = 0.6  # of the time, if kernels hang: nothing else is worth as much
# Seconds without a sign of life after which a job of the smoke stage hangs; interpreted kernels are slow.
SMOKE_PATIENCE_S = {"device": 20.0, "interpret": 300.0, "emulate": 900.0, "compile": 600.0}
_MOST_EXAMINED = 4  # jobs to which the debugger is attached
_LEAST_EXAMINING_S = 10.0  # seconds left, without which it is not


def describe_card() -> str:
  """Returns nvidia-smi's report of the card, or the reason why there is none."""
  return _query_card("name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu")


def card_bytes() -> int | None:
  """Returns the bytes of the first card's memory; None if nvidia-smi does not say."""
  found = re.match(r"(\d+) MiB", _query_card("memory.total"))
  return int(found.group(1)) * 2**20 if found else None


def _query_card(query: str) -> str:
  if not shutil.which("nvidia-smi"):
    return "no nvidia-smi"
  command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
  try:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
  except subprocess.TimeoutExpired:
    return "nvidia-smi did not answer"
  return (done.stdout or done.stderr).strip()


def share_out(parts: Mapping[str, float]) -> dict[str, float]:
  """Returns the share of the time after which each stage starts no further jobs; earlier stages leave the rest."""
  whole = sum(parts.values())
  return {stage: part / whole for stage, part in zip(parts, itertools.accumulate(parts.values()), strict=True)}


@dataclasses.dataclass
class DeviceRun:
  """One run: its time, its workers and its files.

  Attributes:
    out: folder for the files.
    log, results: the processes' output, and a JSON line for each job.
    mode: "device", "interpret", "emulate" or "compile".
    seconds: limit for all of it, from `started` (time.monotonic()) on.
    match: leaves out jobs whose description does not contain it.
    worker_words: module and arguments of the worker's side; (): tools.gpu.worker in this mode.
    records: of the jobs so far.
    meta: facts for the table's head and meta.json.
    notes: further lines of the table.
  """

  out: pathlib.Path
  log: TextIO
  results: TextIO
  mode: str
  seconds: float
  match: re.Pattern[str] = re.compile("")
  worker_words: tuple[str, ...] = ()
  started: float = dataclasses.field(default_factory=time.monotonic)
  records: list[Record] = dataclasses.field(default_factory=list)
  losses: Losses = dataclasses.field(default_factory=Losses)
  notes: list[str] = dataclasses.field(default_factory=list)

  def __post_init__(self):
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # torch's process needs memory as well
    if self.mode != "device":
      environment["JAX_PLATFORMS"] = "cpu"
    elif environment.get("JAX_PLATFORMS") and "cpu" not in environment["JAX_PLATFORMS"]:
      environment["JAX_PLATFORMS"] += ",cpu"  # operands of the smoke stage
    python, patience = sys.executable, _PATIENCE_S[self.mode]
    worker_command = [python, "-m", *(self.worker_words or ("tools.gpu.worker", self.mode))]
    examine = self._examine if self.mode == "device" else None
    self.worker = protocol.Worker(worker_command, environment, self.log, patience, examine)
    self.peer = protocol.Worker([python, "-m", "tools.gpu.torch_peer"], environment, self.log, patience)
    self.meta: dict[str, Any] = {
      "mode": self.mode,
      "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
      "commit": commit(),
      "card_before": describe_card(),
    }
    self._examined = 0
    self.write(meta=self.meta)
    self.save()

  def _examine(self, pid: int) -> list[str]:
    """Returns a debugger's lines about a process that hangs."""
    self._examined += 1
    left = self.started + self.seconds - time.monotonic()
    if self._examined > _MOST_EXAMINED or left < _LEAST_EXAMINING_S:
      return []
    return debugger.list_counters(pid, self.out / "hangs.txt", left)

  def close(self) -> None:
    """Ends the workers."""
    for worker in (self.worker, self.peer):
      worker.close()

  def write(self, **line: Any) -> None:
    """Adds a line to results.jsonl."""
    self.results.write(json.dumps(line) + "\n")
    self.results.flush()

  def save(self) -> list[str]:
    """Writes table.txt and meta.json, complete at any moment; returns the table's lines."""
    meta = self.meta | self.worker.hello | self.peer.hello | {"minutes": (time.monotonic() - self.started) / 60}
    meta["processes"] = self.worker.starts
    lines = report.table(meta, self.records, self.notes)
    for name, text in (("meta.json", json.dumps(meta, indent=1)), ("table.txt", "\n".join(lines))):
      part = self.out / f".{name}"
      part.write_text(text + "\n", "utf-8")
      part.replace(self.out / name)
    return lines

  def do(self, jobs: Sequence[Job], share: float, patience_s: float | None = None) -> Generator[Record]:
    """Runs jobs in batches until this share of the time is spent; every job gets a record.

    Args:
      jobs: in order; one that uses a kernel which cost two processes is skipped.
      share: of `seconds`.
      patience_s: seconds without an event after which a job hangs; None: by the mode.
    """
    jobs = [job for job in jobs if self.match.search(report.describe(job))]
    job_s = 0.0  # seconds a job of the last batch
    while jobs:
      started = time.monotonic()
      # What a batch has compiled and not yet run when the time ends is lost, so the last batches are smaller.
      left = self.started + self.seconds - started
      size = max(1, min(_BATCH, int(left / job_s))) if job_s else _BATCH
      batch, jobs = jobs[:size], jobs[size:]
      skipped = {n: why for n, job in enumerate(batch) if (why := self.losses.why_skip(job))}
      for record in ({"job": batch[n], "ok": False, "error": why} for n, why in skipped.items()):
        yield self._keep(record)
      batch = [job for n, job in enumerate(batch) if n not in skipped]
      done = []
      for record in self._run(batch, share, patience_s):
        done.append(record["job"])
        yield self._keep(record)
        if record.get("lost"):  # what is left of the batch may use the same kernel
          break
      jobs = [job for job in batch if job not in done] + jobs
      job_s = (time.monotonic() - started) / max(1, len(done))

  def do_twice(self, jobs: Sequence[Job], share: float, patience_s: float) -> Generator[Record]:
    """As `do`; a job that cost its process runs once more, because what costs two is not run again."""
    lost = []
    for record in self.do(jobs, share, patience_s):
      yield record
      if record.get("lost"):
        lost.append(record["job"])
    yield from self.do(lost, share, patience_s)

  def _run(self, batch: Sequence[Job], share: float, patience_s: float | None) -> Iterator[Record]:
    hard = self.started + self.seconds
    if time.monotonic() >= self.started + share * self.seconds:
      yield from ({"job": job, "ok": False, "error": protocol.OUT_OF_TIME} for job in batch)
    elif batch and batch[0]["kind"] == "peer":
      try:
        yield from self.peer.run(batch, hard)
      except protocol.DidNotStart as error:  # torch is missing
        yield from ({"job": job, "ok": False, "error": str(error)} for job in batch)
    else:
      yield from self.worker.run(batch, hard, patience_s)

  def _keep(self, record: Record) -> Record:
    self.records.append(record)
    self.losses.add(record)
    self.write(**record)
    self.save()
    state = f"{record['figures'].get('us', 0):.1f} us" if record["ok"] else record["error"].splitlines()[0][:160]
    if record["ok"] and "us" not in record["figures"]:
      state = "right"
    elapsed = time.monotonic() - self.started
    print(f"{elapsed:6.1f} s  {report.describe(record['job'])}: {state}", file=sys.stderr, flush=True)
    return record


@contextlib.contextmanager
def open_run(out: pathlib.Path, **settings: Any) -> Iterator[DeviceRun]:
  """Opens the files of a run in `out`; the arguments are those of DeviceRun. Ends its workers."""
  out.mkdir(parents=True, exist_ok=True)
  with (
    open(out / "log.txt", "w", encoding="utf-8") as log,
    open(out / "results.jsonl", "w", encoding="utf-8") as results,
  ):
    run = DeviceRun(out, log, results, **settings)
    try:
      yield run
    finally:
      run.close()


def finish(run: DeviceRun, stages: Callable[[DeviceRun], None]) -> int:
  """Runs `stages`, prints the table whatever happens, and returns the exit code."""
  try:
    stages(run)
  except protocol.DidNotStart as error:
    run.notes.append(f"stopped: {error}")
    print(f"{error}: {run.out / 'log.txt'}", file=sys.stderr)
    return 2
  finally:
    run.close()
    run.meta["card_after"] = describe_card()
    print("\n".join(run.save()), flush=True)
  # Without a device nothing hurries, so a job that was not reached has not been shown to be right.
  is_late = run.mode != "device" and any(record.get("error") == protocol.OUT_OF_TIME for record in run.records)
  return int(is_late or any(report.failed(record) for record in run.records))
