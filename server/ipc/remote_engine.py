"""An engine in another process, as a front end sees it: `generation.engine_client.EngineClient` over a link.

Keeps no state of requests.

Ids on the wire are numbers of this front end; which names they go by, and that no two live generations of a server have
the same, is the engine's side to know.
"""

from collections.abc import Sequence
import itertools
import threading
import time

from engine.config import EngineConfig
from engine.request import FinishReason, Request
from engine.validation import validate_request
from server.errors import EngineDead
from server.generation.engine_client import Report
from server.ipc.frame_link import Link
from server.ipc.messages import AbortElsewhere, ReportQuestion, RequestAbort, Submission
from server.text.constraint_compiler import OutputGrammar


class RemoteEngine:
  """Belongs to one event loop. Implements EngineClient."""

  def __init__(self, link: Link, config: EngineConfig):
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
    """See EngineClient."""
    return f"{next(self._serials):x}"

  def ended(self, request_id: str) -> None:
    """See EngineClient; an id is never used again."""

  async def submit(self, owner: str, name: str, requests: Sequence[Request]) -> None:
    """See EngineClient. What can be judged without the engine is judged here."""
    grammar = None
    for request in requests:
      validate_request(self._config, request)
      if request.constraint is not None:
        assert isinstance(request.constraint, OutputGrammar), "only a text can travel"
        grammar = request.constraint.source
    await self._link.ask_peer(Submission.of_requests(owner, name, requests, grammar), None)

  def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
    """See EngineClient."""
    self._link.tell_peer(RequestAbort(request_id, reason))

  async def abort_elsewhere(self, owner: str, names: Sequence[str]) -> list[bool]:
    """See EngineClient."""
    return await self._link.ask_peer(AbortElsewhere(owner, list(names)), list[bool])

  async def report(self, num_records: int = 0, *, with_blocks: bool = False) -> Report:
    """See EngineClient."""
    return await self._link.ask_peer(ReportQuestion(num_records, with_blocks), Report)

  def run(self, stop_event: threading.Event) -> None:
    """Only waits: the link has the loop's attention, and its end is told to the host."""
    stop_event.wait()

  def wake(self) -> None:
    """run() sleeps on the event itself."""
