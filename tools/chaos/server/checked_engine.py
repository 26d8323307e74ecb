"""An engine that looks at all of its books after every turn of its loop, and dies of what does not add up. For tests.

`python -m tools.chaos.server --debug_invariants` composes it in the place of Engine.
"""

import logging

from engine.engine import Engine, StepInFlight
from engine.errors import EngineError
from engine.request import TokenEvent
from tools.chaos.server.books import check_scheduler

_log = logging.getLogger(__name__)


class InvariantBroken(EngineError):
  """An invariant does not hold, which is a bug in Sluice. The server ends."""

  reason = "INVARIANT_BROKEN"

  def __init__(self, text: str):
    super().__init__(text)
    _log.critical("invariant broken: %s", text)


class CheckedEngine(Engine):
  """Attributes: num_checks: turns after which everything was right."""

  num_checks = 0

  def step(self) -> bool:
    active = super().step()
    if self.dead is None:
      try:
        self.check_books()
      except AssertionError as error:
        self.fail(InvariantBroken(str(error)))
      else:
        self.num_checks += 1
    return active

  def check_books(self) -> None:
    """Asserts what holds between turns: the scheduler's books, and that every request accepted is somewhere, once."""
    scheduler = self._scheduler
    check_scheduler(scheduler)
    assert len(scheduler._launched) == (self._in_flight is not None), "a launched step is known to one side only"
    with self._lock:
      live, queued, has_messages = set(self._live), self._inbox_requests, bool(self._inbox)
      accepted, ended = self.num_accepted, sum(self.recorder.finished.values())
    known = scheduler._requests
    assert live.issuperset(known), "the scheduler has a request that the engine has ended"
    # Those that were handed over by another engine are not counted in the inbox.
    assert len(live) - len(known) >= queued, "a request is neither queued nor running"
    if not has_messages:
      assert len(live) == len(known), "a request was accepted and lost"
    assert accepted == ended + len(live), f"{accepted} requests accepted, {ended} ended, {len(live)} live"

  def _commit(self, in_flight: StepInFlight) -> list[TokenEvent]:
    events = super()._commit(in_flight)
    for event in events:
      for token in event.token_ids:
        if not 0 <= token < self.config.vocab_size:
          raise InvariantBroken(f"token {token} was sampled, the vocabulary has {self.config.vocab_size}")
    return events
