"""Policies that change their mind, for tests: named as tests.engine.policies:CLASS, as a user names one."""

import zlib

from engine.policy import Policy
from engine.request import Request


class Restless(Policy):
  """Every step of a request may move it anywhere in the order: what the mechanism must stand."""

  is_dynamic = True

  def rank(self, request: Request, now: float) -> tuple[float, ...]:
    state = f"{request.id} {request.num_computed_tokens} {request.num_tokens} {now}"
    return (zlib.crc32(state.encode()) % 7,)


class LeastLeft(Policy):
  """The request with the fewest output tokens still to come goes first."""

  is_dynamic = True

  def rank(self, request: Request, now: float) -> tuple[float, ...]:
    return (request.num_prompt_tokens + request.params.max_tokens - request.num_tokens,)


class ResponseRatio(Policy):
  """The request that has waited longest for its size goes first: long ones catch up more slowly."""

  is_dynamic = True

  def rank(self, request: Request, now: float) -> tuple[float, ...]:
    return (-(now - request.arrival_time) / request.params.max_tokens,)


class ByTwo(Policy):
  """Static, but with a say in everything: overrides each hook that decides, with fcfs's own answers."""

  def candidates(self, waiting):
    return super().candidates(waiting)

  def begin_step(self, running, waiting):
    self._left = len(running) + len(waiting)

  def holds_back(self, request):
    return False

  def grant_tokens(self, request, count):
    return count

  def may_join(self, request):
    return True


NOT_A_POLICY = 7
