"""An engine in another process, as a front end sees it: `generation.engine_client.EngineClient` over a link.

Keeps no state of requests.

Ids on the wire are numbers of this front end; which names they go by, and that no two live generations of a server have
the same, is the engine's side to know.
"""

from collections.abc import Sequence
import itertools
import time

from engine.config import EngineConfig
from engine.request import FinishReason, Request
from engine.validation import validate_request
from server.generation.engine_client import Report
from server.ipc.frame_link import Link
from server.ipc.messages import AbortElsewhere, ReportQuestion, RequestAbort, Submission
from server.text.constraint_compiler import OutputGrammar


class RemoteEngine:
  """Belongs to one event loop. Implements EngineClient."""

  def __init__(self, link: Link, config: EngineConfig):
    self.config = config
    self._link = link
    self._serials = itertools.count()

  def now(self) -> float:
    """One clock for all processes of a machine, which is the engine's, too."""
    return time.monotonic()

  def num_held(self) -> int:
    """None: ids are never used again."""
    return 0

  def new_id(self, name: str) -> str:
    return f"{next(self._serials):x}"

  def ended(self, request_id: str) -> None:
    """An id is never used again."""

  async def submit(self, owner: str, name: str, requests: Sequence[Request]) -> None:
    """What can be judged without the engine is judged here."""
    grammar = None
    for request in requests:
      validate_request(self.config, request)
      if request.constraint is not None:
        assert isinstance(request.constraint, OutputGrammar), "only a text can travel"
        grammar = request.constraint.source
    await self._link.ask_peer(Submission.of_requests(owner, name, requests, grammar), None)

  def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
    self._link.tell_peer(RequestAbort(request_id, reason))

  async def abort_elsewhere(self, owner: str, names: Sequence[str]) -> list[bool]:
    return await self._link.ask_peer(AbortElsewhere(owner, list(names)), list[bool])

  async def report(self, num_records: int = 0, *, with_blocks: bool = False) -> Report:
    return await self._link.ask_peer(ReportQuestion(num_records, with_blocks), Report)
