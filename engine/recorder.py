"""Counters, a ring of step records, and a replayable trace. Pure Python; may not change scheduling."""

from collections import deque
from collections.abc import Sequence
import dataclasses
import functools
import hashlib
import json
import logging
import operator
from typing import Any, NamedTuple, TextIO

from engine.batch import MAX_DRAFTS, Batch, StepResult
from engine.constraint import Verdicts
from engine.host_pool import HostPoolCounts
from engine.request import NUMERICAL_ERROR, FinishReason, Request, TokenEvent
from engine.scheduler import Scheduler
from engine.snapshot import scheduler_state

_log = logging.getLogger(__name__)

RING_STEPS = 1024
KV_ROWS = 16  # mean number of requests inspected a step; inspecting 256 takes 20 us


class StepRecord(NamedTuple):
  """One step. Times in seconds; counts after planning it.

  Useful tokens, padding and skipped tokens (`skipped`) sum to the shape. A slot is idle if it has no row while a
  request waits. Idle slots are not part of padding, although static batching pads their rows. Linear layers compute
  useful tokens and padding; attention computes decode_keys + prefill_pairs pairs of query and key.

  Attributes:
    step: serial number in this engine.
    side: the engine among several in one process: "", "prefill" or "decode".
    time: engine clock at planning.
    shape_tokens, shape_rows: the rung.
    num_rows: sequences in the step.
    decode_rows: rows whose input is on the device, and those with drafts.
    decode_tokens, prefill_tokens: useful tokens of decode rows and of the others; decode tokens beyond one a row are
      drafts.
    decode_keys: keys that the decode rows attend to, position + 1 each.
    prefill_pairs: causal pairs of query and key in the other rows.
    padding: computed padding tokens (Batch.device_tokens minus useful tokens).
    idle_slots: slots without a row while as many requests wait.
    blocks_used, blocks_cached: blocks of the pool that requests hold, and free ones kept for later prompts.
    kv_tokens: tokens of running requests with KV.
    kv_slots: capacity of their blocks in tokens; the difference is fragmentation. Shared blocks count once a holder.
      The recorder updates both every (num_running / KV_ROWS) steps.
    num_waiting, num_running: requests.
    num_preemptions: preemptions in this step.
    host_s: planning, packing and dispatch.
    device_s: from launch, or from the end of the previous step, to the arrival of the values.
    commit_s: commit of the values.
    num_drafts, num_accepted: draft tokens of its rows, and those that equal the sampled tokens.
  """

  step: int
  side: str
  time: float
  shape_tokens: int
  shape_rows: int
  num_rows: int
  decode_rows: int
  decode_tokens: int
  prefill_tokens: int
  decode_keys: int
  prefill_pairs: int
  padding: int
  idle_slots: int
  blocks_used: int
  blocks_cached: int
  kv_tokens: int
  kv_slots: int
  num_waiting: int
  num_running: int
  num_preemptions: int
  host_s: float
  device_s: float
  commit_s: float
  num_drafts: int = 0
  num_accepted: int = 0

  @property
  def skipped(self) -> int:
    """Tokens of the shape that the device skips."""
    return self.shape_tokens - self.decode_tokens - self.prefill_tokens - self.padding


# The fields of a StepRecord before host_s, once its step is planned. The complete record is made once, at its commit:
# right after a step, each change of one takes 5 us.
StartedRecord = tuple[Any, ...]


class RequestRecord(NamedTuple):
  """A finished request. Times in seconds on the engine's clock; None for events that did not happen.

  Attributes:
    id: the request's id.
    side: as in StepRecord.
    reason: value of its FinishReason.
    arrival, first_scheduled, first_token, end: times.
    prompt_tokens, cached_tokens, output_tokens: prompt tokens, those cached at first admission, and output tokens.
    lost_tokens: computed tokens lost to preemptions.
    num_preemptions: number of preemptions.
  """

  id: str
  side: str
  reason: str
  arrival: float
  first_scheduled: float | None
  first_token: float | None
  end: float
  prompt_tokens: int
  cached_tokens: int
  output_tokens: int
  lost_tokens: int
  num_preemptions: int


class RungTotals(NamedTuple):
  """Totals of the steps of one token budget; counts and seconds as in StepRecord."""

  steps: int = 0
  decode_tokens: int = 0
  prefill_tokens: int = 0
  padding: int = 0
  idle_slots: int = 0
  host_s: float = 0.0
  device_s: float = 0.0

  def skipped(self, shape_tokens: int) -> int:
    """Returns the tokens of these steps' shapes that the device skipped; `shape_tokens` is their token budget."""
    return self.steps * shape_tokens - self.decode_tokens - self.prefill_tokens - self.padding

  def plus(self, other: "RungTotals") -> "RungTotals":
    """Returns the sum of both totals."""
    return RungTotals._make(map(operator.add, self, other))


class DraftCounts(NamedTuple):
  """What became of draft tokens so far. An accepted one saves its request a step, and so does a forced token.

  Attributes:
    rows: rows with drafts.
    tokens: their drafts.
    accepted_at: accepted drafts by their position in the row, from the first.
    forced: tokens that joined an output without a draft, because its constraint allowed no other.
  """

  rows: int = 0
  tokens: int = 0
  accepted_at: tuple[int, ...] = (0,) * MAX_DRAFTS
  forced: int = 0

  @property
  def accepted(self) -> int:
    """All accepted drafts."""
    return sum(self.accepted_at)

  def plus(self, other: "DraftCounts") -> "DraftCounts":
    """Returns the sum of both counts."""
    accepted_at = tuple(map(operator.add, self.accepted_at, other.accepted_at))
    return DraftCounts(self.rows + other.rows, self.tokens + other.tokens, accepted_at, self.forced + other.forced)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineStats:
  """A snapshot for load reports and displays. Any thread may take it; each number was exact at some recent instant.

  Attributes:
    num_waiting, num_waiting_tokens, num_running, num_live: requests, prompt tokens; live also counts the inbox.
    max_num_seqs, num_blocks: limits to compare with.
    blocks_used, blocks_cached: blocks of the pool that requests hold, and free ones kept for later prompts.
    num_steps, num_decode_tokens, num_prefill_tokens, num_padding_tokens, num_preemptions: totals; padding as in
      StepRecord.
    num_queried_tokens, num_cached_tokens: prompt tokens of finished requests, and those found in the prefix cache.
    num_output_tokens: output tokens of requests.
    num_lost_tokens: computed tokens of finished requests lost to preemptions.
    num_idle_slots: see StepRecord; summed over steps.
    rungs: totals by the token budget of a step's shape.
    num_numerical_errors: requests that ended with NaN or Inf.
    finished: finished requests by reason.
    steps: the latest step records, oldest first.
    requests: records of the latest finished requests, oldest first, at most as many.
    host_pool: what the host pool did; None without one.
    drafts: what became of draft tokens.
  """

  num_waiting: int
  num_waiting_tokens: int
  num_running: int
  num_live: int
  max_num_seqs: int
  num_blocks: int
  blocks_used: int
  blocks_cached: int
  num_steps: int
  num_decode_tokens: int
  num_prefill_tokens: int
  num_padding_tokens: int
  num_queried_tokens: int
  num_cached_tokens: int
  num_preemptions: int
  num_output_tokens: int
  num_lost_tokens: int
  num_idle_slots: int
  rungs: dict[int, RungTotals]
  num_numerical_errors: int
  finished: dict[FinishReason, int]
  steps: tuple[StepRecord, ...]
  requests: tuple[RequestRecord, ...]
  host_pool: HostPoolCounts | None = None
  drafts: DraftCounts = DraftCounts()

  @property
  def num_skipped_tokens(self) -> int:
    """Tokens of the steps' shapes that the device skipped."""
    return sum(totals.skipped(tokens) for tokens, totals in self.rungs.items())

  @property
  def steps_by_rung(self) -> dict[int, int]:
    """Steps so far by the token budget of their shape."""
    return {tokens: totals.steps for tokens, totals in self.rungs.items()}


class Recorder:
  """Records totals and the latest steps always, and a trace on demand. Only the engine thread writes."""

  def __init__(self, side: str = ""):
    """Args: side: name of this engine in its records, if a process has several."""
    self.side = side
    self.steps: deque[StepRecord] = deque(maxlen=RING_STEPS)
    self.requests: deque[RequestRecord] = deque(maxlen=RING_STEPS)
    self.num_steps = 0
    self.num_queried_tokens = 0  # if there is a prefix cache
    self.num_cached_tokens = 0
    self.num_output_tokens = 0
    self.num_lost_tokens = 0
    self._rung_sums: dict[int, list[Any]] = {}  # fields of RungTotals by token budget
    self._draft_sums = [0, 0, 0]  # rows, tokens and forced of DraftCounts
    self._accepted_at = [0] * MAX_DRAFTS
    self.finished = dict.fromkeys(FinishReason, 0)
    self.num_numerical_errors = 0
    self.trace_error: OSError | None = None  # the error that ended the latest trace early
    self._trace: TextIO | None = None
    self._kv_usage = 0, 0

  def keep_all(self) -> None:
    """Keeps all records of steps and requests from now on, beyond RING_STEPS; for finite runs."""
    self.steps, self.requests = deque(self.steps), deque(self.requests)

  # Counters.

  @property
  def drafts(self) -> DraftCounts:
    """What became of draft tokens so far."""
    rows, tokens, forced = self._draft_sums
    return DraftCounts(rows, tokens, tuple(self._accepted_at), forced)

  def start_record(self, batch: Batch, scheduler: Scheduler, now: float, num_preemptions: int) -> StartedRecord:
    """Returns the fields of a StepRecord that are known before the step."""
    counts, starts = batch.counts, batch.starts
    num_rows, num_tokens = len(counts), sum(counts)
    first = decode_rows = batch.token_ids.count(())  # the leading ones
    prefill_tokens = prefill_pairs = 0
    if decode_rows == num_rows:
      decode_keys = sum(starts) + num_tokens
    else:
      decode_keys = sum(starts[:first]) + sum(counts[:first])
      for num_drafts in batch.num_drafts[first:]:
        if not num_drafts:
          break
        count = counts[decode_rows]
        decode_keys += count * starts[decode_rows] + count * (count + 1) // 2
        decode_rows += 1
      for start, count in zip(starts[decode_rows:], counts[decode_rows:], strict=True):
        prefill_tokens += count
        prefill_pairs += count * start + count * (count + 1) // 2
    num_waiting, num_running = scheduler.num_waiting, scheduler.num_running
    if batch.step % (num_running // KV_ROWS or 1) == 0:
      self._kv_usage = scheduler.kv_usage()
    return (
      batch.step,
      self.side,
      now,
      batch.shape.tokens,
      batch.shape.rows,
      num_rows,
      decode_rows,
      num_tokens - prefill_tokens,
      prefill_tokens,
      decode_keys,
      prefill_pairs,
      batch.device_tokens(scheduler.config.computes_padding) - num_tokens,
      min(scheduler.config.max_num_seqs - num_rows, num_waiting),
      scheduler.pool.num_used,
      scheduler.pool.num_cached,
      *self._kv_usage,
      num_waiting,
      num_running,
      num_preemptions,
    )

  def count_drafts(self, batch: Batch, result: StepResult) -> tuple[int, int]:
    """Counts the drafts of a step; returns them, and the accepted ones."""
    num_rows = num_tokens = num_accepted = 0
    for row, num_drafts in enumerate(batch.num_drafts):
      if num_drafts:
        num_rows += 1
        num_tokens += num_drafts
        if row not in result.bad_rows:
          accepted = len(result.tokens_of(row)) - 1
          num_accepted += accepted
          for position in range(accepted):
            self._accepted_at[position] += 1
    self._draft_sums[0] += num_rows
    self._draft_sums[1] += num_tokens
    return num_tokens, num_accepted

  def count_forced(self, verdicts: Verdicts) -> None:
    """Counts the tokens that follow those of a step because their constraints allow no others."""
    self._draft_sums[2] += sum(map(len, verdicts.forced.values()))

  def keep_record(self, record: StepRecord) -> None:
    """Keeps a complete record."""
    self.steps.append(record)
    self.num_steps += 1
    sums = self._rung_sums.get(record.shape_tokens)
    if sums is None:
      sums = self._rung_sums[record.shape_tokens] = [*RungTotals()]
    sums[0] += 1
    sums[1] += record.decode_tokens
    sums[2] += record.prefill_tokens
    sums[3] += record.padding
    sums[4] += record.idle_slots
    sums[5] += record.host_s
    sums[6] += record.device_s

  def count_events(self, events: list[TokenEvent]) -> None:
    """Counts tokens and finished requests."""
    self.num_output_tokens += sum([len(event.token_ids) for event in events])
    for event in events:
      if event.finish_reason is not None:
        self.finished[event.finish_reason] += 1
        self.num_numerical_errors += event.error == NUMERICAL_ERROR
        self.num_cached_tokens += event.num_cached_tokens

  def record_requests(self, requests: list[Request], now: float) -> None:
    """Keeps a record of each request that finished in this turn of the loop."""
    for request in requests:
      self.num_lost_tokens += request.num_lost_tokens
      # Requests with prompt logprobs compute their whole prompt.
      if request.first_scheduled_time is not None and request.params.prompt_logprobs is None:
        self.num_queried_tokens += request.num_prompt_tokens
      self.requests.append(
        RequestRecord(
          request.id,
          self.side,
          request.finish_reason.value if request.finish_reason else "",
          request.arrival_time,
          request.first_scheduled_time,
          request.first_token_time,
          now,
          request.num_prompt_tokens,
          request.num_prompt_cached_tokens,
          len(request.output_token_ids),
          request.num_lost_tokens,
          request.num_preemptions,
        )
      )

  def stats(self, scheduler: Scheduler, num_live: int, num_steps: int) -> EngineStats:
    """Returns a snapshot with the latest `num_steps` records."""
    pool = scheduler.pool
    rungs = {tokens: RungTotals(*sums) for tokens, sums in dict(self._rung_sums).items()}
    total = functools.reduce(RungTotals.plus, rungs.values(), RungTotals())
    return EngineStats(
      num_waiting=scheduler.num_waiting,
      num_waiting_tokens=scheduler.num_waiting_tokens,
      num_running=scheduler.num_running,
      num_live=num_live,
      max_num_seqs=scheduler.config.max_num_seqs,
      num_blocks=pool.num_blocks,
      blocks_used=pool.num_used,
      blocks_cached=pool.num_cached,
      num_steps=total.steps,
      num_decode_tokens=total.decode_tokens,
      num_prefill_tokens=total.prefill_tokens,
      num_padding_tokens=total.padding,
      num_queried_tokens=self.num_queried_tokens if scheduler.config.shares_prefixes else 0,
      num_cached_tokens=self.num_cached_tokens,
      num_preemptions=scheduler.num_preemptions,
      num_output_tokens=self.num_output_tokens,
      num_lost_tokens=self.num_lost_tokens,
      num_idle_slots=total.idle_slots,
      rungs=rungs,
      drafts=self.drafts,
      num_numerical_errors=self.num_numerical_errors,
      finished=dict(self.finished),
      steps=latest_records(tuple(self.steps), num_steps),
      requests=latest_records(tuple(self.requests), num_steps),
      host_pool=dataclasses.replace(scheduler.loads.host.counts) if scheduler.loads is not None else None,
    )

  # The trace is JSON lines: the scheduler's complete state, then its inputs and outputs. It holds the token ids of
  # prompts and outputs, so it is as private as the requests.

  def start_trace(self, path: str, scheduler: Scheduler, in_flight: Batch | None) -> None:
    """Starts a trace with a snapshot and ends any current trace. A write error ends the trace, not the engine."""
    self.stop_trace()
    self.trace_error = None
    try:
      self._trace = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed by stop_trace()
    except OSError as error:
      self._trace_failed(error)
    in_flight_line = in_flight and batch_line(in_flight, scheduler.config.computes_padding)
    self._line({"event": "state", "scheduler": scheduler_state(scheduler), "in_flight": in_flight_line})

  def stop_trace(self) -> None:
    """Ends and closes the current trace, if any."""
    trace, self._trace = self._trace, None
    if trace is not None:
      try:
        trace.close()
      except OSError as error:
        self._trace_failed(error)

  def trace_add(self, request: Request) -> None:
    """Traces an added request; call before queuing it."""
    if self._trace is not None:
      self._line({"event": "add", "request": request.state()})

  def trace_abort(self, request_id: str, reason: FinishReason) -> None:
    """Traces an abort; call before finishing the request."""
    if self._trace is not None:
      self._line({"event": "abort", "id": request_id, "reason": reason.value})

  def trace_expire(self, now: float, events: list[TokenEvent]) -> None:
    """Traces expired requests; writes no line if none expired."""
    if self._trace is not None and events:
      self._line({"event": "expire", "now": now, "ids": [event.request_id for event in events]})

  def trace_schedule(self, now: float, batch: Batch | None, scheduler: Scheduler) -> None:
    """Traces a planned step; writes no line for an engine without requests."""
    if self._trace is not None and (batch is not None or scheduler.num_waiting or scheduler.num_running):
      line = batch and batch_line(batch, scheduler.config.computes_padding)
      drafts = scheduler.constrained_drafts()
      found = {name: [draft.is_forced, *draft.tokens] for name, draft in drafts.items()}
      self._line({"event": "schedule", "now": now, "batch": line} | ({"drafts": found} if found else {}))

  def trace_commit(
    self, batch: Batch, result: StepResult, now: float, verdicts: Verdicts, host_s: float, device_s: float
  ) -> None:
    """Traces the values of a step; call before committing them. Args: host_s, device_s: see StepRecord."""
    if self._trace is not None:
      self._line(
        {
          "event": "commit",
          "step": batch.step,
          "now": now,
          "tokens": [int(token) for token in result.tokens],
          "bad_rows": sorted(result.bad_rows),
          "host_s": round(host_s, 6),
          "device_s": round(device_s, 6),
        }
        | ({"row_ends": list(result.row_ends)} if result.row_ends else {})
        | ({"fill_seconds": result.fill_seconds} if result.fill_seconds else {})
        | ({"proposals": [[row, *found] for row, found in result.proposals.items()]} if result.proposals else {})
        | ({"done": sorted(verdicts.done), "failed": sorted(verdicts.failed.items())} if any(verdicts[:2]) else {})
        | ({"taken": sorted(verdicts.num_taken.items())} if verdicts.num_taken else {})
        | ({"forced": [[row, *tokens] for row, tokens in verdicts.forced.items()]} if verdicts.forced else {})
      )

  def _line(self, value: dict) -> None:
    if self._trace is not None:
      try:
        self._trace.write(json.dumps(value, separators=(",", ":")) + "\n")
      except OSError as error:
        self._trace_failed(error)
        self.stop_trace()

  def _trace_failed(self, error: OSError) -> None:
    """Ends the trace after a write error, logs it once, and lets serving continue."""
    if self.trace_error is None:
      _log.warning("the step trace ends early: %s", error.strerror)
    self.trace_error = error


def latest_records[T](records: Sequence[T], count: int) -> tuple[T, ...]:
  """Returns the last `count` records, or all if there are fewer."""
  return tuple(records[max(0, len(records) - count) :])


def batch_line(batch: Batch, computes_padding: bool) -> dict:
  """Returns the trace line of a batch: counts in full, block ids and device inputs as digests.

  Args:
    computes_padding: see EngineConfig.
  """
  blocks = [[admission.slot, *admission.block_ids] for admission in batch.admissions]
  told = [
    [admission.slot, admission.num_prompt_tokens, admission.seed, *admission.token_ids]
    for admission in batch.admissions
  ]
  return {
    "step": batch.step,
    "shape": list(dataclasses.astuple(batch.shape)),
    "computed": batch.device_tokens(computes_padding),
    "ids": list(batch.request_ids),
    "slots": list(batch.slots),
    "starts": list(batch.starts),
    "counts": list(batch.counts),
    "num_logits": list(batch.num_logits),
    "samples": [int(samples) for samples in batch.samples],
    "num_decodes": batch.token_ids.count(()),
    **({"num_drafts": list(batch.num_drafts)} if batch.num_drafts else {}),
    **({"num_proposals": batch.num_proposals} if batch.num_proposals else {}),
    **({"fills_draft": True} if batch.fills_draft else {}),
    **({"behind": list(batch.behind)} if batch.behind else {}),
    "blocks": _digest([blocks, batch.new_blocks]),
    "inputs": _digest([told, batch.token_ids]),
  }


def _digest(value: list) -> str:
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()
