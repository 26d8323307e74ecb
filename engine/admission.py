"""Decides whether the queue takes one more request, and the error if not. May not change a queue.

"queue" limits the waiting requests. "goodput" also rejects a request that would miss its deadline, at once and with the
predicted wait, because late work helps nobody (goodput: DistServe, OSDI 2024).
"""

from collections import deque

from engine.config import EngineConfig
from engine.errors import Overloaded, PrefillBacklog, TenantQuota
from engine.request import Request

_NEWEST = 0.1  # weight of the latest step in the mean step time


class AdmissionControl:
  """Limits of the queue, and a prediction of the wait from the recent pace. The caller owns the counts."""

  def __init__(self, config: EngineConfig):
    self._config = config
    self._times: deque[float] = deque(maxlen=16)  # times of the latest admissions to a slot
    self._step_s = 0.0  # recent mean; 0: not known yet

  def note_admission(self, now: float) -> None:
    """Records that a request got a slot."""
    self._times.append(now)

  def note_step_time(self, seconds: float) -> None:
    """Records the duration of a step."""
    self._step_s += (seconds - self._step_s) * (_NEWEST if self._step_s else 1.0)

  def check_capacity(
    self, request: Request, num_requests: int, num_tokens: int, has_slot: bool, of_tenant: tuple[int, int] = (0, 0)
  ) -> None:
    """Raises Overloaded if the queue is full for `request`, or would hold it past its deadline.

    Args:
      num_requests, num_tokens: waiting requests and their prompt tokens.
      has_slot: whether a request could start at once if none waited.
      of_tenant: the same two numbers for the request's tenant alone.
    """
    config = self._config
    if config.max_queued_share_per_tenant < 1:
      self._check_bounds(request, *of_tenant, config.max_queued_share_per_tenant)
    self._check_bounds(request, num_requests, num_tokens, 1)
    if config.admission == "goodput":
      self._check_deadlines(request, num_requests, num_tokens, has_slot)

  def _check_bounds(self, request: Request, num_requests: int, num_tokens: int, share: float) -> None:
    """Checks limits times `share`: 1 for all requests, less for one tenant."""
    config = self._config
    whose, limit = (" of this tenant", "its share of the queue") if share < 1 else ("", "the limit")
    max_requests, max_tokens = max(1, int(share * config.max_queued_requests)), int(share * config.max_queued_tokens)
    if num_requests >= max_requests:
      error = TenantQuota if share < 1 else Overloaded
      raise error(f"{num_requests} requests{whose} are queued, {limit} is {max_requests}", self._interval())
    if num_requests and num_tokens + request.num_prompt_tokens > max_tokens:
      error = TenantQuota if share < 1 else PrefillBacklog
      raise error(
        f"{num_tokens} prompt tokens{whose} are queued and this request has {request.num_prompt_tokens}, {limit} is "
        f"{max_tokens}",
        self._interval(),
      )

  def _check_deadlines(self, request: Request, num_requests: int, num_tokens: int, has_slot: bool) -> None:
    config = self._config
    start, finish = self.predict_delays(request, num_requests, num_tokens, has_slot)
    for name, predicted, deadline, default in (
      ("start", start, request.queue_deadline, config.queue_timeout_s),
      ("finish", finish, request.deadline, config.request_timeout_s),
    ):
      allowed = deadline - request.arrival_time if deadline is not None else default or float("inf")
      if predicted > allowed:
        retry_after = min(max(predicted - allowed, 0.1), 60.0)
        raise Overloaded(
          f"this request would {name} in about {predicted:.1f} s, its deadline is in {allowed:.1f} s",
          retry_after,
          " or allow more time",
        )

  def predict_delays(self, request: Request, num_requests: int, num_tokens: int, has_slot: bool) -> tuple[float, float]:
    """Predicts the seconds until `request` gets a slot, and until its last token if it uses all of max_tokens.

    It starts after the requests before it have got slots, at the recent pace of admissions, and computed their prompts,
    a chunk a step. Then every token takes a mean step. Returns 0 before the first steps.
    """
    chunk = self._config.prefill_chunk
    start = num_tokens / chunk * self._step_s
    if num_requests or not has_slot:
      start = max(start, (num_requests + 1) * self._interval(unknown=0.0))
    steps = -(-request.num_prompt_tokens // chunk) + request.params.max_tokens - 1
    return start, start + steps * self._step_s

  def _interval(self, unknown: float = 1.0) -> float:
    """Returns the mean seconds between recent admissions: the approximate time until the queue has a free place."""
    times = tuple(self._times)
    if len(times) < 2:
      return unknown
    return min(max((times[-1] - times[0]) / (len(times) - 1), 0.1), 60.0)
