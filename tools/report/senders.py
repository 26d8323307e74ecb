"""Computes shares of service: TTFT by tenant and by priority, and each tenant's part of a fair share. Arithmetic only.

The module compares the tokens served while requests arrive with a max-min fair division of the same tokens. In that
division, a tenant that requests less than an equal part gets all it requests, and the others divide the rest. Fairness
is the smallest ratio of served tokens to that share among tenants: 1 is a fair division, 0 means that one tenant got
nothing. A prompt counts at its first token's time, and each output token at its own.
"""

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tools.report.latency import Outcome, percentile


class _Sent:
  """The requested and served tokens of one tenant, or one priority."""

  __slots__ = ("demand", "served", "ttfts", "requests")

  def __init__(self):
    self.demand = self.served = self.requests = 0
    self.ttfts: list[float] = []

  def figures(self) -> dict[str, Any]:
    spread = {f"ttft_p{percent}_ms": percentile(self.ttfts, percent) for percent in (50, 99)}
    return {
      "requests": self.requests,
      "tokens": self.demand,
      **{name: None if value is None else round(value * 1e3, 3) for name, value in spread.items()},
    }


class SenderTally:
  """Counts requests as they end.

  Attributes:
    end_s: the last arrival, on the clock of the requests; service counts until then.
  """

  def __init__(self, end_s: float = 0.0):
    self.end_s = end_s
    self._tenants: dict[str, _Sent] = {}
    self._priorities: dict[int, _Sent] = {}

  def add(
    self, tenant: str, priority: int, arrival_s: float, asked: tuple[int, int], times: Sequence[float], ok: bool
  ) -> None:
    """Counts a request.

    Args:
      tenant, priority, arrival_s: the request's tenant, priority and arrival time.
      `asked`: the number of requested tokens, prompt and output.
      times: the arrival time of each token, in order.
      ok: whether the request succeeded; otherwise its TTFT does not count.
    """
    num_prompt, num_output = asked
    served = bisect.bisect_right(times, self.end_s)
    for sent in (self._tenants.setdefault(tenant, _Sent()), self._priorities.setdefault(priority, _Sent())):
      sent.requests += 1
      sent.demand += num_prompt + num_output
      sent.served += served + (num_prompt if served else 0)
      if ok:
        sent.ttfts.append(times[0] - arrival_s)

  def figures(self) -> dict[str, Any]:
    """Returns `fairness` and `tenants` if there are several tenants, and `priorities` if there are several."""
    found: dict[str, Any] = {}
    if len(self._tenants) > 1:
      served = {name: sent.served for name, sent in self._tenants.items()}
      shares = fair_shares({name: sent.demand for name, sent in self._tenants.items()}, sum(served.values()))
      parts = {name: served[name] / share for name, share in shares.items() if share}
      found["fairness"] = round(min(1.0, *parts.values()), 4) if parts else None
      found["tenants"] = {name: sent.figures() for name, sent in sorted(self._tenants.items())}
      for name, part in parts.items():
        found["tenants"][name]["of_fair_share"] = round(part, 4)
    if len(self._priorities) > 1:
      found["priorities"] = {str(priority): sent.figures() for priority, sent in sorted(self._priorities.items())}
    return found


def fair_shares(demands: Mapping[str, float], total: float) -> dict[str, float]:
  """Returns the max-min fair division of `total`, which is at most the sum of demands."""
  shares: dict[str, float] = {}
  for number, name in enumerate(sorted(demands, key=lambda name: demands[name])):
    shares[name] = min(demands[name], total / (len(demands) - number))
    total -= shares[name]
  return shares


def sender_figures(outcomes: Iterable[Outcome], prompt_lens: Iterable[int]) -> dict[str, Any]:
  """Returns SenderTally.figures() of a run file's run."""
  rows = list(zip(outcomes, prompt_lens, strict=True))
  tally = SenderTally(max((outcome.intended_s for outcome, _ in rows), default=0.0))
  for outcome, prompt_len in rows:
    times = [time for time, count in outcome.chunks for _ in range(count)]
    tally.add(outcome.tenant, outcome.priority, outcome.intended_s, (prompt_len, outcome.output_len), times, outcome.ok)
  return tally.figures()
