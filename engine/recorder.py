"""What happened: counters, a ring of step records, and a trace that replays. Pure Python; decides nothing."""

from collections import deque
import dataclasses
import hashlib
import json
from typing import NamedTuple, TextIO

from engine.batch import Batch, StepResult
from engine.request import FinishReason, Request, TokenEvent
from engine.scheduler import Scheduler

RING_STEPS = 1024


class StepRecord(NamedTuple):
  """One step. Times in seconds; counts after planning it.

  Attributes:
    step: serial number.
    time: engine clock when it was planned.
    shape_tokens, shape_rows: the rung.
    num_rows: sequences in it.
    decode_tokens, prefill_tokens: useful tokens, of rows that read their input on the device and of the others.
    padding: shape_tokens minus useful tokens.
    blocks_used, blocks_cached: of the pool; cached ones may also be used.
    num_waiting, num_running: requests.
    num_preemptions: in this step.
    host_s: planning, packing and dispatch.
    device_s: from launch, or from the end of the step before, to the values' arrival.
    commit_s: taking the values in.
  """

  step: int
  time: float
  shape_tokens: int
  shape_rows: int
  num_rows: int
  decode_tokens: int
  prefill_tokens: int
  padding: int
  blocks_used: int
  blocks_cached: int
  num_waiting: int
  num_running: int
  num_preemptions: int
  host_s: float
  device_s: float
  commit_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
  """A snapshot for load reports and displays; taken from any thread, each number right at some instant of late.

  Attributes:
    num_waiting, num_waiting_tokens, num_running, num_live: requests, prompt tokens; live also counts the inbox.
    max_num_seqs, num_blocks: limits to compare with.
    blocks_used, blocks_free, blocks_cached: of the pool; free ones may still be cached.
    num_steps, num_decode_tokens, num_prefill_tokens, num_padding_tokens, num_cached_tokens, num_preemptions: totals.
    num_output_tokens: tokens that reached requests.
    steps_by_rung: steps so far by the token budget of their shape.
    finished: endings by reason.
    steps: the latest step records, oldest first.
  """

  num_waiting: int
  num_waiting_tokens: int
  num_running: int
  num_live: int
  max_num_seqs: int
  num_blocks: int
  blocks_used: int
  blocks_free: int
  blocks_cached: int
  num_steps: int
  num_decode_tokens: int
  num_prefill_tokens: int
  num_padding_tokens: int
  num_cached_tokens: int
  num_preemptions: int
  num_output_tokens: int
  steps_by_rung: dict[int, int]
  finished: dict[FinishReason, int]
  steps: tuple[StepRecord, ...]


class Recorder:
  """Always on: totals and the latest steps. On demand: the trace. Written by the engine thread alone."""

  def __init__(self):
    self.steps: deque[StepRecord] = deque(maxlen=RING_STEPS)
    self.num_steps = 0
    self.num_decode_tokens = 0
    self.num_prefill_tokens = 0
    self.num_padding_tokens = 0
    self.num_cached_tokens = 0
    self.num_output_tokens = 0
    self.steps_by_rung: dict[int, int] = {}
    self.finished = dict.fromkeys(FinishReason, 0)
    self.trace_error: OSError | None = None  # why the latest trace ended early
    self._trace: TextIO | None = None

  # Counters.

  def planned(self, batch: Batch, scheduler: Scheduler, now: float, num_preemptions: int) -> StepRecord:
    """The record of a step that was just launched; the times come with done()."""
    num_tokens = sum(batch.counts)
    prefill_tokens = sum(map(len, batch.token_ids))
    return StepRecord(
      batch.step,
      now,
      batch.shape.tokens,
      batch.shape.rows,
      len(batch.slots),
      num_tokens - prefill_tokens,
      prefill_tokens,
      batch.shape.tokens - num_tokens,
      scheduler.pool.num_used,
      scheduler.pool.num_cached,
      scheduler.num_waiting,
      scheduler.num_running,
      num_preemptions,
      0.0,
      0.0,
      0.0,
    )

  def done(self, record: StepRecord) -> None:
    """Keeps a complete record."""
    self.steps.append(record)
    self.num_steps += 1
    self.num_decode_tokens += record.decode_tokens
    self.num_prefill_tokens += record.prefill_tokens
    self.num_padding_tokens += record.padding
    self.steps_by_rung[record.shape_tokens] = self.steps_by_rung.get(record.shape_tokens, 0) + 1

  def emitted(self, events: list[TokenEvent]) -> None:
    """Counts tokens and endings."""
    self.num_output_tokens += sum([len(event.token_ids) for event in events])
    for event in events:
      if event.finish_reason is not None:
        self.finished[event.finish_reason] += 1
        self.num_cached_tokens += event.num_cached_tokens

  def stats(self, scheduler: Scheduler, num_live: int, num_steps: int) -> EngineStats:
    """A snapshot with the latest `num_steps` records."""
    pool = scheduler.pool
    steps = tuple(self.steps)
    return EngineStats(
      num_waiting=scheduler.num_waiting,
      num_waiting_tokens=scheduler.num_waiting_tokens,
      num_running=scheduler.num_running,
      num_live=num_live,
      max_num_seqs=scheduler.config.max_num_seqs,
      num_blocks=pool.num_blocks,
      blocks_used=pool.num_used,
      blocks_free=pool.num_free,
      blocks_cached=pool.num_cached,
      num_steps=self.num_steps,
      num_decode_tokens=self.num_decode_tokens,
      num_prefill_tokens=self.num_prefill_tokens,
      num_padding_tokens=self.num_padding_tokens,
      num_cached_tokens=self.num_cached_tokens,
      num_preemptions=scheduler.num_preemptions,
      num_output_tokens=self.num_output_tokens,
      steps_by_rung=dict(self.steps_by_rung),
      finished=dict(self.finished),
      steps=steps[len(steps) - min(num_steps, len(steps)) :],
    )

  # The trace: JSON lines. First the scheduler's complete state, then whatever goes into it and what comes out. It holds
  # the token ids of prompts and answers: as private as the requests themselves.

  @property
  def is_tracing(self) -> bool:
    return self._trace is not None

  def start_trace(self, path: str, scheduler: Scheduler, in_flight: Batch | None) -> None:
    """Begins a trace with a snapshot; one in progress ends. A file that fails ends the trace, not the engine."""
    self.stop_trace()
    self.trace_error = None
    try:
      self._trace = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed by stop_trace()
    except OSError as error:
      self.trace_error = error
    self._line({"event": "state", "scheduler": scheduler.state(), "in_flight": in_flight and batch_line(in_flight)})

  def stop_trace(self) -> None:
    """Ends and closes the trace, if there is one."""
    trace, self._trace = self._trace, None
    if trace is not None:
      try:
        trace.close()
      except OSError as error:
        self.trace_error = error

  def trace_add(self, request: Request) -> None:
    """Before the request is queued."""
    if self._trace is not None:
      self._line({"event": "add", "request": request.state()})

  def trace_abort(self, request_id: str, reason: FinishReason) -> None:
    """Before the request is ended."""
    if self._trace is not None:
      self._line({"event": "abort", "id": request_id, "reason": reason.value})

  def trace_expire(self, now: float, events: list[TokenEvent]) -> None:
    """After deadlines ended requests; a look at the clock that ended none leaves no line."""
    if self._trace is not None and events:
      self._line({"event": "expire", "now": now, "ids": [event.request_id for event in events]})

  def trace_schedule(self, now: float, batch: Batch | None, scheduler: Scheduler) -> None:
    """After planning; an engine without requests leaves no line."""
    if self._trace is not None and (batch is not None or scheduler.num_waiting or scheduler.num_running):
      self._line({"event": "schedule", "now": now, "batch": batch and batch_line(batch)})

  def trace_commit(self, batch: Batch, result: StepResult, now: float, record: StepRecord) -> None:
    """Before the values are taken in."""
    if self._trace is not None:
      self._line(
        {
          "event": "commit",
          "step": batch.step,
          "now": now,
          "tokens": [int(token) for token in result.tokens],
          "bad_rows": sorted(result.bad_rows),
          "host_s": round(record.host_s, 6),
          "device_s": round(record.device_s, 6),
        }
      )

  def _line(self, value: dict) -> None:
    if self._trace is not None:
      try:
        self._trace.write(json.dumps(value, separators=(",", ":")) + "\n")
      except OSError as error:
        self.stop_trace()
        self.trace_error = error


def batch_line(batch: Batch) -> dict:
  """A batch as the trace keeps it: counts in full; block ids, and what is told to the device, as digests."""
  blocks = [[admission.slot, *admission.block_ids] for admission in batch.admissions]
  told = [
    [admission.slot, admission.num_prompt_tokens, admission.seed, *admission.token_ids]
    for admission in batch.admissions
  ]
  return {
    "step": batch.step,
    "shape": [batch.shape.tokens, batch.shape.rows],
    "ids": list(batch.request_ids),
    "slots": list(batch.slots),
    "starts": list(batch.starts),
    "counts": list(batch.counts),
    "num_logits": list(batch.num_logits),
    "samples": [int(samples) for samples in batch.samples],
    "num_decodes": batch.token_ids.count(()),
    "blocks": _digest([blocks, batch.new_blocks]),
    "inputs": _digest([told, batch.token_ids, batch.num_output_tokens]),
  }


def _digest(value: list) -> str:
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()
