"""An engine in another process, as a front end sees it: server.port.EnginePort over a link. Keeps no state of requests.

Ids on the wire are numbers of this front end; which names they go by, and that no two live generations of a server have
the same, is the engine's side to know.
"""

from collections.abc import Callable, Sequence
import itertools
import threading
import time
from typing import Any

from engine.config import EngineConfig
from engine.request import FinishReason, Request, TokenEvent
from engine.validation import validate_request
from server import plain, wire
from server.constraints import OutputGrammar
from server.counts import Counts
from server.errors import EngineDead
from server.port import Report

Dispatch = Callable[[Sequence[TokenEvent], Sequence[str], Sequence[int]], None]


class RemoteEngine:
  """Belongs to one event loop. Implements EnginePort."""

  def __init__(self, link: wire.Link, config: EngineConfig):
    """Args: link: to the engine's process. config: of the engine there."""
    self._link = link
    self._config = config
    self._serials = itertools.count()

  @property
  def config(self) -> EngineConfig:
    return self._config

  @property
  def heartbeat(self) -> float:
    """The engine's own process watches its loop, and ends this one; here is nothing to add."""
    return time.monotonic()

  @property
  def dead(self) -> BaseException | None:
    """Known as the end of the link."""
    return None if self._link.is_open else EngineDead("the engine's process has gone")

  @property
  def num_live(self) -> int:
    """None to wait for: the engine's process looks after what this one leaves behind."""
    return 0

  def now(self) -> float:
    """One clock for all processes of a machine, which is the engine's, too."""
    return time.monotonic()

  def num_held(self) -> int:
    """None: ids are never used again."""
    return 0

  def new_id(self, name: str) -> str:
    """See EnginePort."""
    return f"{next(self._serials):x}"

  def ended(self, request_id: str) -> None:
    """See EnginePort; an id is never used again."""

  async def submit(self, owner: str, name: str, requests: Sequence[Request]) -> None:
    """See EnginePort. What can be judged without the engine is judged here."""
    grammar = None
    for request in requests:
      validate_request(self._config, request)
      if request.constraint is not None:
        assert isinstance(request.constraint, OutputGrammar), "only a text can travel"
        grammar = request.constraint.source
    await self._link.ask(wire.SUBMIT, owner, name, *plain.plain_generation(requests, grammar))

  def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
    """See EnginePort."""
    self._link.tell(wire.ABORT, request_id, reason.value)

  async def abort_elsewhere(self, owner: str, names: Sequence[str]) -> list[bool]:
    """See EnginePort."""
    return [found is True for found in await self._link.ask(wire.ABORT_ELSEWHERE, owner, list(names))]

  async def report(self, num_records: int = 0, *, with_blocks: bool = False) -> Report:
    """See EnginePort."""
    return plain.report_from(await self._link.ask(wire.REPORT, num_records, with_blocks))

  def run(self, stop_event: threading.Event) -> None:
    """Only waits: the link has the loop's attention, and its end is told to the host."""
    stop_event.wait()

  def wake(self) -> None:
    """run() sleeps on the event itself."""


async def census(link: wire.Link) -> Counts:
  """Of all processes of the server."""
  return Counts.from_plain(await link.ask(wire.TOTALS))


def events_from(dispatch: Dispatch) -> Callable[[Any, Any, Any], None]:
  """What to do with a frame of EVENTS."""

  def take(request_ids: Any, token_ids: Any, others: Any) -> None:
    dispatch([plain.event_from(fields) for fields in others], *plain.columns_from(request_ids, token_ids))

  return take
