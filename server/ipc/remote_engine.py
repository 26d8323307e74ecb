"""Reaches an engine in another process: `generation.engine_client.EngineClient` over a link. Keeps no request state.

Ids on the wire are this front end's numbers. The engine's side maps them to names, and keeps the names of live
generations unique.
"""

import asyncio
from collections.abc import Sequence
import itertools
import time

from engine.adapters import AdapterInfo
from engine.config import EngineConfig
from engine.request import FinishReason, Request
from engine.validation import validate_request
from server.generation.engine_client import Report
from server.generation.reasoning_budget import ReasoningBudget
from server.generation.response_store import MAX_RESPONSE_BYTES, KeptResponses, StoredResponse
from server.ipc.frame_link import Link
from server.ipc.messages import (
  AbortElsewhere,
  AdapterLoad,
  AdapterUnload,
  ItemsQuestion,
  ReportQuestion,
  RequestAbort,
  ResponseQuestion,
  ResponseRemoval,
  ResponseToKeep,
  Submission,
)
from server.text.constraint_compiler import OutputGrammar


class RemoteEngine:
  """Implements EngineClient over a link. Belongs to one event loop."""

  def __init__(self, link: Link, config: EngineConfig, adapters: Sequence[AdapterInfo]):
    self.config = config
    self.responses: KeptResponses | None = RemoteResponses(link)
    self._link = link
    self._adapters = adapters
    self._serials = itertools.count()

  def now(self) -> float:
    """Returns the time of the monotonic clock, which all processes of a machine share with the engine."""
    return time.monotonic()

  def num_held(self) -> int:
    """Always 0, since no id is reused."""
    return 0

  def new_id(self, name: str) -> str:
    return f"{next(self._serials):x}"

  def ended(self, request_id: str) -> None:
    """Does nothing, since no id is reused."""

  async def submit(self, owner: str, name: str, requests: Sequence[Request]) -> None:
    """Checks what needs no engine, then submits over the link."""
    for request in requests:
      validate_request(self.config, request)
    constraint = requests[0].constraint
    reasoning = None
    if isinstance(constraint, ReasoningBudget):
      reasoning, constraint = constraint.limit, constraint.answer
    grammar = None
    if constraint is not None:
      assert isinstance(constraint, OutputGrammar), "only a text can travel"
      grammar = constraint.source
    await self._link.ask_peer(Submission.of_requests(owner, name, requests, grammar, reasoning), None)

  def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
    self._link.tell_peer(RequestAbort(request_id, reason))

  async def abort_elsewhere(self, owner: str, names: Sequence[str]) -> list[bool]:
    return await self._link.ask_peer(AbortElsewhere(owner, list(names)), list[bool])

  async def report(self, num_records: int = 0, *, with_blocks: bool = False) -> Report:
    return await self._link.ask_peer(ReportQuestion(num_records, with_blocks), Report)

  def adapters(self) -> Sequence[AdapterInfo]:
    """Returns those of the latest `set_adapters`; the engine refuses a request for one that has left since."""
    return self._adapters

  def set_adapters(self, adapters: Sequence[AdapterInfo]) -> None:
    """Takes the engine's list of adapters that take requests."""
    self._adapters = adapters

  async def load_adapter(self, name: str, path: str, *, replaces: bool = False) -> None:
    await self._link.ask_peer(AdapterLoad(name, path, replaces), None)

  async def unload_adapter(self, name: str) -> int:
    return await self._link.ask_peer(AdapterUnload(name), int)


class RemoteResponses:
  """Stored responses in the engine's process; implements KeptResponses. One message at a time, since they are large."""

  def __init__(self, link: Link):
    self._link = link
    self._lock = asyncio.Lock()

  async def put_response(self, owner: str, stored: StoredResponse) -> None:
    if stored.num_bytes <= MAX_RESPONSE_BYTES:
      async with self._lock:
        await self._link.ask_peer(ResponseToKeep(owner, stored), None)

  async def find_response(self, owner: str, response_id: str) -> StoredResponse | None:
    async with self._lock:
      return await self._link.ask_peer(ResponseQuestion(owner, response_id), StoredResponse | None)

  async def remove_response(self, owner: str, response_id: str) -> bool:
    async with self._lock:
      return await self._link.ask_peer(ResponseRemoval(owner, response_id), bool)

  async def find_items(self, owner: str, item_ids: Sequence[str]) -> dict[str, bytes]:
    async with self._lock:
      return await self._link.ask_peer(ItemsQuestion(owner, list(item_ids)), dict[str, bytes])
