"""Runs jobs in a process that may hang or die, and continues with the others in a new one. Knows neither jax nor a job.

A kernel that was never run can stop a GPU for good or leave the process unable to use it. A benchmark therefore talks
to a worker over pipes. It sends lists of jobs (JSON objects, one list a line) and gets one event a line. It kills a
worker that sends no event for too long, and reports the worker's job as failed, with a reason.

A record is a JSON object: "job", "ok", and "figures" or "error"; one with both was wrong and says how. "lost": true
means that the job cost its process: it hung, ended the process, or left a device that no longer computes. "stuck" holds
lines of a debugger about a job that hung.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
import contextlib
import dataclasses
import faulthandler
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any, TextIO

Job = dict[str, Any]
Record = dict[str, Any]
OUT_OF_TIME = "out of time"
_HEARTBEAT_S = 5.0
ENDING_S = 10.0  # seconds for a process to end by itself
_START_S = 120.0  # seconds for a process to import its packages and open the device
_DUMP_S = 1.0  # seconds for a process to write its stacks
_COMPILE_S = 300.0  # seconds in which at least one of the jobs that compile must be done
_ERROR = re.compile(r"CUDA_ERROR|Check failed|Error:|error:|FATAL|terminate called|what\(\):")
HANGS = "hangs"  # the last word of the error of a job that hung
_SPOILT = 3  # exit code of a worker that reported a failure and cannot go on after it


class DidNotStart(Exception):
  """The worker's process ended before it could take a job: a package is missing, or the device is lost."""


@dataclasses.dataclass(frozen=True)
class Prepared:
  """A job that may be compiled beside others and then runs alone.

  Attributes:
    compile: called in its own thread.
    run: called with the result of `compile`; returns the job's figures.
  """

  compile: Callable[[], Any]
  run: Callable[[Any], dict[str, Any]]


def _text(error: BaseException) -> str:
  return f"{type(error).__name__}: {error}"[:2000]


def serve(
  hello: Mapping[str, Any],
  prepare: Callable[[Job], Prepared],
  usable: Callable[[], bool],
  threads: int = 8,
  is_spoilt_by_failure: bool = False,
) -> int:
  """The worker's side: runs the jobs on standard input until it ends; returns the exit code.

  Args:
    hello: sent first.
    prepare: turns a job into something to compile and to run; called in this thread.
    usable: called after a failure; if it returns False, the process ends, and a new one goes on.
    threads: compiling threads.
    is_spoilt_by_failure: the process ends after any failure, which is then no loss; for interpreters.
  """
  faulthandler.register(signal.SIGUSR1, all_threads=True)  # a process that hangs says where
  events = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
  os.dup2(2, 1)  # output of libraries belongs in the log

  def tell(**event: Any) -> None:
    events.write(json.dumps(event) + "\n")

  tell(event="ready", hello=dict(hello))
  for line in sys.stdin:
    jobs: list[Job] = json.loads(line)
    found: dict[int, tuple[Prepared, Any, float]] = {}
    errors: dict[int, str] = {}
    lower_s: dict[int, float] = {}
    with ThreadPoolExecutor(threads) as pool:
      waiting = {}
      for number, job in enumerate(jobs):
        tell(event="prepare", number=number)
        try:
          prepared, lower_s[number] = _timed(lambda job=job: prepare(job))
        except Exception as error:
          errors[number] = _text(error)
          continue
        waiting[pool.submit(_timed, prepared.compile)] = number, prepared
      while waiting:
        done, _ = wait(waiting, timeout=_HEARTBEAT_S, return_when=FIRST_COMPLETED)
        for future in done:
          number, prepared = waiting.pop(future)
          try:
            found[number] = prepared, *future.result()
          except Exception as error:
            errors[number] = _text(error)
        tell(event="compiling", left=len(waiting))  # slow is not dead: it is a kernel that may hang
    for number, job in enumerate(jobs):
      record: Record = {"job": job, "ok": False}
      if number in found:
        prepared, compiled, record["compile_s"] = found.pop(number)
        record["lower_s"] = lower_s[number]
        tell(event="begin", number=number)
        try:
          record["figures"], record["run_s"] = _timed(lambda p=prepared, c=compiled: p.run(c))
          record["ok"] = True
        except Exception as error:
          errors[number] = _text(error)
          record |= {"figures": error.figures} if hasattr(error, "figures") else {}  # pyright: ignore
        del prepared, compiled
      if number in errors:
        record["error"] = errors[number]
        tell(event="failed", error=errors[number])  # the next call may hang
        if is_spoilt_by_failure or not usable():
          tell(event="end", number=number, record=record if is_spoilt_by_failure else record | {"lost": True})
          return _SPOILT
      tell(event="end", number=number, record=record)
    tell(event="idle")
  return 0


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
  start = time.monotonic()
  result = call()
  return result, round(time.monotonic() - start, 3)


class Worker:
  """The benchmark's side: a process that starts when needed, and again after a loss."""

  def __init__(
    self,
    command: Sequence[str],
    environment: Mapping[str, str],
    log: TextIO,
    patience_s: float,
    examine: Callable[[int], list[str]] | None = None,
  ):
    """Initializes the worker; the first job starts its process.

    Args:
      log: receives the process's standard error.
      patience_s: seconds without an event after which a job hangs.
      examine: called with the process id of a job that hangs, before the process is killed; returns lines about it.
    """
    self._command, self._environment, self._log, self._patience_s = command, environment, log, patience_s
    self._examine = examine
    self._process: subprocess.Popen[str] | None = None
    self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
    self.hello: dict[str, Any] = {}
    self.starts = 0
    self._ready = False

  def _start(self) -> subprocess.Popen[str]:
    self.starts += 1
    self._ready = False
    process = subprocess.Popen(
      self._command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._log,
      text=True,
      env=dict(self._environment),
      start_new_session=True,
    )
    self._process, events = process, queue.Queue()
    self._events = events

    def read() -> None:
      assert process.stdout is not None
      with process.stdout:
        for line in process.stdout:
          events.put(json.loads(line))
      events.put(None)

    threading.Thread(target=read, daemon=True).start()
    return process

  def close(self) -> None:
    """Ends the process, whatever it is doing."""
    if self._process is not None:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(self._process.pid, signal.SIGKILL)
      with contextlib.suppress(subprocess.TimeoutExpired):  # a process held by the driver does not end
        self._process.wait(ENDING_S)
      if self._process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
          self._process.stdin.close()
      self._process = None

  def run(self, jobs: Sequence[Job], deadline: float, patience_s: float | None = None) -> Generator[Record]:
    """Yields one record for each job, in the order in which they end. A caller that stops early ends the process.

    Args:
      jobs: compiled beside each other, then run one by one.
      deadline: time.monotonic() after which nothing goes on; the rest is reported as OUT_OF_TIME.
      patience_s: instead of the worker's own.

    Raises:
      DidNotStart: further attempts are useless.
    """
    patience_s = self._patience_s if patience_s is None else patience_s
    pending, alone = list(jobs), False
    while pending:
      batch = pending[:1] if alone else list(pending)
      reason, at, stuck = "", None, []
      try:
        for kind, value in self._batch(batch, deadline, patience_s):
          if kind == "end":
            pending.remove(value["job"])
            yield value
          elif kind == "begin":
            at = value
          elif kind == "stuck":
            stuck = value
          else:
            reason = value
      except GeneratorExit:  # the caller does not need the rest, which the process is at
        self.close()
        raise
      if reason == OUT_OF_TIME:
        self.close()
        yield from ({"job": job, "ok": False, "error": OUT_OF_TIME} for job in pending)
        return
      if reason:
        self.close()
        culprit = batch[0] if len(batch) == 1 else None if at is None else batch[at]
        if culprit is not None and culprit in pending:
          pending.remove(culprit)
          record = {"job": culprit, "ok": False, "error": reason, "lost": True}
          yield record | ({"stuck": stuck} if stuck else {})
        alone = alone or culprit is None  # the failed one is unknown

  def _batch(self, batch: list[Job], deadline: float, patience_s: float) -> Iterator[tuple[str, Any]]:
    """Sends the jobs; yields what happens to them.

    Yields:
      ("begin", number) and ("end", record) of jobs; at last, after a failure, ("stuck", lines) and ("lost", reason).
    """
    process = self._process or self._start()
    assert process.stdin is not None
    begin = os.fstat(self._log.fileno()).st_size  # first, because a job may print and end at once
    with contextlib.suppress(BrokenPipeError):  # its end comes as an event
      process.stdin.write(json.dumps(batch) + "\n")
      process.stdin.flush()
    left, progress, failed = len(batch) + 1, time.monotonic(), ""
    while True:
      patience = patience_s if self._ready else max(patience_s, _START_S)
      try:
        event = self._events.get(timeout=max(0.0, min(deadline - time.monotonic(), patience)))
      except queue.Empty:
        if deadline - time.monotonic() <= 0:
          yield "lost", OUT_OF_TIME
          return
        if not self._ready:
          self.close()
          command = " ".join(self._command)
          raise DidNotStart(f"{command} gave no sign of life for {patience:.0f} s at its start") from None
        yield "stuck", self._look_at(process.pid)
        yield "lost", f"{failed}no sign of life for {patience:.0f} s: {HANGS}"
        return
      if event is None:
        with contextlib.suppress(subprocess.TimeoutExpired):  # its output is closed, but it may still hang
          process.wait(ENDING_S)
        code = process.returncode
        self.close()
        if not self._ready:
          raise DidNotStart(f"{' '.join(self._command)} ended with {name_exit(code)} before it took a job; see its log")
        if code != _SPOILT:
          yield "lost", f"{failed}the process ended with {name_exit(code)}: {last_words(self._log.name, begin)}"
        return
      if event["event"] == "ready":
        self.hello, self._ready = event["hello"], True
      elif event["event"] == "compiling":
        if event["left"] < left:
          left, progress = event["left"], time.monotonic()
        elif time.monotonic() - progress > max(patience_s, _COMPILE_S):
          yield "lost", f"nothing compiled in {time.monotonic() - progress:.0f} s: {HANGS}"
          return
      elif event["event"] == "begin":
        failed = ""
        yield "begin", event["number"]
      elif event["event"] == "failed":
        failed = f"{event['error']}; then "
      elif event["event"] == "end":
        yield "end", event["record"]
      elif event["event"] == "idle":
        return

  def _look_at(self, pid: int) -> list[str]:
    """Writes the Python stacks of a process that hangs into its log, and returns what `examine` finds."""
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, signal.SIGUSR1)
      time.sleep(_DUMP_S)
    return self._examine(pid) if self._examine else []


def name_exit(code: int | None) -> str:
  """Returns the words for a process's exit code: the signal's name, if one ended it."""
  if code is not None and code < 0:
    with contextlib.suppress(ValueError):
      return signal.Signals(-code).name
  return f"exit code {code}"


def last_words(path: str, begin: int) -> str:
  """Returns the last line behind byte `begin` of a log that names an error, or else the last non-empty one."""
  with open(path, "rb") as file:
    file.seek(max(begin, os.fstat(file.fileno()).st_size - 16384))
    lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
  errors = [line for line in lines if _ERROR.search(line)]
  return (errors or lines or ["it printed nothing"])[-1][:200]
