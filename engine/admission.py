"""Whether the queue takes one more request, and what to tell whom it turns away. Reads counts; changes no queue.

"queue" bounds what waits. "goodput" also turns away, at once and with the wait it predicts, a request that would miss
its deadline: work that comes too late is done for nobody (goodput: DistServe, OSDI 2024).
"""

from collections import deque

from engine.config import EngineConfig
from engine.errors import Overloaded, PrefillBacklog, TenantQuota
from engine.request import Request

_NEWEST = 0.1  # weight of the latest step in the mean step time


class AdmissionControl:
  """Bounds on the queue, and a guess of the wait from the pace of late. Counts are the caller's."""

  def __init__(self, config: EngineConfig):
    self._config = config
    self._times: deque[float] = deque(maxlen=16)  # of the latest admissions to a slot
    self._step_s = 0.0  # mean of late; 0 is not known yet

  def note_admission(self, now: float) -> None:
    """A request got a slot."""
    self._times.append(now)

  def note_step_time(self, seconds: float) -> None:
    """A step took this long."""
    self._step_s += (seconds - self._step_s) * (_NEWEST if self._step_s else 1.0)

  def check_room(
    self, request: Request, num_requests: int, num_tokens: int, has_slot: bool, of_tenant: tuple[int, int] = (0, 0)
  ) -> None:
    """Raises Overloaded if the queue has no room for `request`, or would keep it past its deadline.

    Args:
      num_requests, num_tokens: that wait already, and their prompt tokens.
      has_slot: whether a request could start at once if none waited.
      of_tenant: the same two numbers, of the request's tenant alone.
    """
    config = self._config
    if config.max_queued_share_per_tenant < 1:
      self._check_bounds(request, *of_tenant, config.max_queued_share_per_tenant)
    self._check_bounds(request, num_requests, num_tokens, 1)
    if config.admission == "goodput":
      self._check_deadlines(request, num_requests, num_tokens, has_slot)

  def _check_bounds(self, request: Request, num_requests: int, num_tokens: int, share: float) -> None:
    """`share` of what may wait: 1 for all requests together, less for those of a tenant."""
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
    """Seconds until `request` would get a slot, and until its last token if it uses all of max_tokens.

    It starts when those before it have got their slots, at the pace of the latest admissions, and their prompts are
    computed, a chunk a step; from then on every token takes a mean step. Nothing is known before the first steps: 0.
    """
    chunk = self._config.prefill_chunk
    start = num_tokens / chunk * self._step_s
    if num_requests or not has_slot:
      start = max(start, (num_requests + 1) * self._interval(unknown=0.0))
    steps = -(-request.num_prompt_tokens // chunk) + request.params.max_tokens - 1
    return start, start + steps * self._step_s

  def _interval(self, unknown: float = 1.0) -> float:
    """Mean time between the latest admissions, seconds: about when the queue has a place again."""
    times = tuple(self._times)
    if len(times) < 2:
      return unknown
    return min(max((times[-1] - times[0]) / (len(times) - 1), 0.1), 60.0)
