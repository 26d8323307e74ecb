"""Defines the latency metrics: TTFT, ITL, TPOT and goodput from token times. Arithmetic only, no clock.

Names are vLLM's (`vllm bench serve`). Engines differ in two definitions. TTFT counts from the INTENDED arrival, so a
late client cannot hide a stall (coordinated omission); TTFT from the time of sending is a separate figure. ITL has one
entry for each token, so a chunk of m tokens is one real gap and m - 1 zeros; the gaps between chunks are a separate
figure. TPOT is (last - first) / (n - 1), for n of at least 2.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
  """The outcome of one request. Times are seconds on one clock.

  Attributes:
    id: the request's id.
    output_len: the number of requested tokens.
    intended_s: the intended time of sending.
    sent_s: the time of sending.
    chunks: (time, number of tokens) of each message with tokens, in order.
    tokens: the token ids, in order; empty unless requested.
    error: None, or the failure, which starts with a short, stable word.
    tenant: the sender.
    priority: the request's priority.
  """

  id: int | str
  output_len: int
  intended_s: float
  sent_s: float
  chunks: tuple[tuple[float, int], ...]
  tokens: tuple[int, ...] = ()
  error: str | None = None
  tenant: str = ""
  priority: int = 0

  @property
  def num_tokens(self) -> int:
    """The number of received tokens."""
    return sum(count for _, count in self.chunks)

  @property
  def ok(self) -> bool:
    """Whether it ended well with exactly the requested tokens."""
    return self.error is None and self.num_tokens == self.output_len

  @property
  def ttft_s(self) -> float:
    """The time to the first token from the intended arrival."""
    return self.chunks[0][0] - self.intended_s

  @property
  def ttft_from_send_s(self) -> float:
    """The time to the first token from sending."""
    return self.chunks[0][0] - self.sent_s

  @property
  def e2e_s(self) -> float:
    """The time to the last token from the intended arrival."""
    return self.chunks[-1][0] - self.intended_s

  @property
  def tpot_s(self) -> float | None:
    """The mean time of each token after the first; None for a single token."""
    count = self.num_tokens
    return None if count < 2 else (self.chunks[-1][0] - self.chunks[0][0]) / (count - 1)

  @property
  def chunk_gaps_s(self) -> tuple[float, ...]:
    """The times between messages."""
    return tuple(after - before for (before, _), (after, _) in zip(self.chunks, self.chunks[1:], strict=False))

  @property
  def itl_s(self) -> tuple[float, ...]:
    """The times between tokens, one entry for each token after the first."""
    gaps = [0.0] * (self.chunks[0][1] - 1)
    for gap, (_, count) in zip(self.chunk_gaps_s, self.chunks[1:], strict=True):
      gaps += [gap] + [0.0] * (count - 1)
    return tuple(gaps)


@dataclasses.dataclass(frozen=True, slots=True)
class Objectives:
  """Latency objectives in seconds; infinity sets no limit."""

  ttft_s: float = math.inf
  tpot_s: float = math.inf
  e2e_s: float = math.inf

  def met(self, outcome: Outcome) -> bool:
    """Returns whether a request meets the objectives. A failed one does not; a single token meets any TPOT."""
    if not outcome.ok or outcome.ttft_s > self.ttft_s or outcome.e2e_s > self.e2e_s:
      return False
    return (outcome.tpot_s or 0.0) <= self.tpot_s


def percentile(values: Iterable[float], percent: float) -> float | None:
  """Returns a percentile by linear interpolation between closest ranks (numpy's default); None for no values."""
  ordered = sorted(values)
  if not ordered:
    return None
  position = (len(ordered) - 1) * percent / 100
  low = math.floor(position)
  high = min(low + 1, len(ordered) - 1)
  return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _spread(name: str, values: Iterable[float]) -> dict[str, float | None]:
  """Returns named mean and percentiles of seconds, in milliseconds."""
  ordered = sorted(values)
  figures = {"mean": math.fsum(ordered) / len(ordered) if ordered else None}
  figures |= {f"p{percent}": percentile(ordered, percent) for percent in (50, 90, 99)}
  figures["max"] = ordered[-1] if ordered else None
  return {f"{name}_{key}_ms": None if value is None else round(value * 1e3, 3) for key, value in figures.items()}


def summary(outcomes: Sequence[Outcome], prompt_tokens: int, objectives: Objectives = Objectives()) -> dict[str, Any]:
  """Returns the figures of a run.

  Args:
    outcomes: one for each request OFFERED; failed ones count in every share but in no latency percentile.
    prompt_tokens: total over the successful requests.
    objectives: the objectives of goodput.
  """
  good = [outcome for outcome in outcomes if outcome.ok]
  # From the first intended arrival to the last received token; 0 if every request failed.
  end = max((outcome.chunks[-1][0] for outcome in outcomes if outcome.chunks), default=math.nan)
  wall_s = end - min(outcome.intended_s for outcome in outcomes)
  wall_s = wall_s if wall_s > 0 else math.nan
  output_tokens = sum(outcome.num_tokens for outcome in good)
  met = sum(objectives.met(outcome) for outcome in outcomes)

  def rate(count: float) -> float | None:
    return None if math.isnan(wall_s) else round(count / wall_s, 3)

  return {
    "wall_s": None if math.isnan(wall_s) else round(wall_s, 4),
    "output_tok_s": rate(output_tokens),
    "total_tok_s": rate(output_tokens + prompt_tokens),
    "request_s": rate(len(good)),
    "requests": len(outcomes),
    "completed": len(good),
    "failed": len(outcomes) - len(good),
    "output_tokens": output_tokens,
    "prompt_tokens": prompt_tokens,
    "goodput_request_s": rate(met),
    "slo_attainment": round(met / len(outcomes), 4),
    **_spread("ttft", (outcome.ttft_s for outcome in good)),
    **_spread("ttft_from_send", (outcome.ttft_from_send_s for outcome in good)),
    **_spread("itl", (gap for outcome in good for gap in outcome.itl_s)),
    **_spread("chunk_gap", (gap for outcome in good for gap in outcome.chunk_gaps_s)),
    **_spread("tpot", (outcome.tpot_s for outcome in good if outcome.tpot_s is not None)),
    **_spread("e2e", (outcome.e2e_s for outcome in good)),
    **_spread("stall", (max(outcome.itl_s) for outcome in good if outcome.itl_s)),
    **_spread("send_delay", (outcome.sent_s - outcome.intended_s for outcome in outcomes)),
  }
