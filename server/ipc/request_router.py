"""Routes requests of front ends to the engine in this process, and its events back. Knows no process, port or text.

The router alone keeps the names of live generations, so that a name is unique across all front ends.
"""

import asyncio
from collections.abc import Sequence
import concurrent.futures
import contextlib
import dataclasses
from typing import Any

from engine.constraint import Constraint
from engine.errors import DuplicateRequest
from engine.request import FinishReason, TokenEvent, make_event
from server.errors import AbortedByRequest
from server.generation.engine_client import LocalEngine
from server.generation.reasoning_budget import ReasoningBudget
from server.ipc.frame_link import Link
from server.ipc.messages import AbortElsewhere, NamedAborts, RequestAbort, StepEvents, Submission
from server.text.constraint_compiler import ConstraintCompiler
from server.text.tokenizer import Tokenizer


class Peer:
  """A front end, on the engine's side.

  Attributes:
    link: the link to it.
    ids: the engine's id of each live request, by the front end's id.
    compiling: whether each request whose constraint is being compiled was aborted, by the front end's id.
  """

  def __init__(self) -> None:
    self.link: Link
    self.ids: dict[str, str] = {}
    self.compiling: dict[str, bool] = {}


@dataclasses.dataclass(slots=True)
class _NamedGeneration:
  """A live generation's owner and name.

  Attributes:
    peer: its front end.
    num_live: its unfinished requests.
    is_aborted: whether an Abort call has named it.
  """

  peer: Peer
  num_live: int
  is_aborted: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Route:
  """Where the events of a request go: the front end, its id there, and the name of its generation."""

  peer: Peer
  request_id: str
  key: tuple[str, str]


class Router:
  """Belongs to one event loop, except `emit`.

  Attributes:
    num_started: generations so far.
  """

  def __init__(self) -> None:
    """Must be made inside the running loop."""
    self._loop = asyncio.get_running_loop()
    self._engine: LocalEngine | None = None
    self._compiler: ConstraintCompiler | None = None
    self._tokenizer: Tokenizer | None = None
    self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="compile")
    self._routes: dict[str, _Route] = {}
    self._names: dict[tuple[str, str], _NamedGeneration] = {}
    self.num_started = 0

  def open(self, engine: LocalEngine, tokenizer: Tokenizer | None) -> None:
    """Begins to accept requests. Args: engine: receives them. tokenizer: compiles their constraints."""
    self._engine = engine
    self._tokenizer = tokenizer
    if tokenizer is not None:
      self._compiler = ConstraintCompiler(tokenizer, engine.config.vocab_size, engine.config.eos_token_ids)

  def close(self) -> None:
    """Ends its thread."""
    self._pool.shutdown(wait=False, cancel_futures=True)

  @property
  def num_live(self) -> int:
    """The number of live generations."""
    return len(self._names)

  def num_held(self) -> int:
    """The number of entries, which must be 0 when no request is live."""
    assert self._engine is not None, "nothing is held before anything runs"
    return self._engine.num_held() + len(self._routes) + len(self._names)

  def emit(self, events: list[TokenEvent]) -> None:
    """Sends a step's events, one frame to each front end that has a request in it. Runs on the engine's thread."""
    routes, ended = self._routes, []
    steps: dict[Peer, StepEvents] = {}
    for event in events:
      engine_id, token_ids, logprobs, prompt_logprobs, reason, *_ = event
      if reason is not None:
        ended.append(engine_id)
      route = routes.get(engine_id)
      if route is None:
        continue  # nobody waits for it any more
      step = steps.get(route.peer)
      if step is None:
        step = steps[route.peer] = StepEvents([], [], [])
      if reason is None and not logprobs and not prompt_logprobs and len(token_ids) == 1:
        step.request_ids.append(route.request_id)
        step.token_ids.append(token_ids[0])
      else:
        step.others.append(make_event(TokenEvent, (route.request_id, *event[1:])))
    if ended:  # before a client can know it and use the name again
      with contextlib.suppress(RuntimeError):  # the loop has ended
        self._loop.call_soon_threadsafe(self._forget, ended)
    for peer, step in steps.items():
      peer.link.tell_peer(step)

  def lost(self, peer: Peer) -> None:
    """Aborts the requests of a front end that has gone."""
    for engine_id in list(peer.ids.values()):
      self._drop(engine_id, FinishReason.ABORT)
    peer.ids.clear()

  def submit(self, peer: Peer, asked: Submission) -> Any:
    """Submits requests of a front end; returns at once, or after compiling their constraint."""
    key = asked.owner, asked.name
    if key in self._names:
      raise DuplicateRequest(f"request_id={asked.name} is in use by a live request; choose another, or leave it empty")
    self._names[key] = _NamedGeneration(peer, len(asked.outputs))
    if asked.grammar is not None:
      return self._compile_and_accept(peer, key, asked, asked.grammar)
    self._accept(peer, key, asked, [None] * len(asked.outputs))
    return None

  async def _compile_and_accept(self, peer: Peer, key: tuple[str, str], asked: Submission, grammar: str) -> None:
    request_ids = [request_id for request_id, _ in asked.outputs]
    peer.compiling.update(dict.fromkeys(request_ids, False))
    compiler = self._compiler
    assert compiler is not None, "a front end without a tokenizer has no grammars"
    try:
      first = await self._loop.run_in_executor(self._pool, compiler.compile_source, grammar, asked.tenant)
      if not peer.link.is_open or any(peer.compiling[request_id] for request_id in request_ids):
        raise AbortedByRequest("the request was aborted")
    except BaseException:
      del self._names[key]
      raise
    finally:
      for request_id in request_ids:
        del peer.compiling[request_id]
    self._accept(peer, key, asked, [first, *(first.copy() for _ in request_ids[1:])])

  def _accept(
    self,
    peer: Peer,
    key: tuple[str, str],
    asked: Submission,
    constraints: Sequence[Constraint | None],
  ) -> None:
    engine, name = self._engine, asked.name
    assert engine is not None, "front ends serve once there is one"
    if asked.reasoning is not None:
      assert self._tokenizer is not None, "a front end without a tokenizer knows no reasoning"
      token_bytes, limit = self._tokenizer.token_bytes, asked.reasoning
      constraints = [ReasoningBudget(limit, answer, token_bytes, engine.config) for answer in constraints]
    ids = [engine.new_id(name if index == 0 else f"{name}/{index}") for index in range(len(asked.outputs))]
    for engine_id, (request_id, _) in zip(ids, asked.outputs, strict=True):
      self._routes[engine_id] = _Route(peer, request_id, key)
    try:
      engine.inner.submit_all(asked.make_requests(ids, constraints))
    except Exception:
      del self._names[key]
      for engine_id in ids:
        del self._routes[engine_id]
        engine.ended(engine_id)
      raise
    peer.ids.update((request_id, engine_id) for engine_id, (request_id, _) in zip(ids, asked.outputs, strict=True))
    self.num_started += 1

  def abort(self, peer: Peer, asked: RequestAbort) -> None:
    """Aborts one request of a front end."""
    engine_id = peer.ids.pop(asked.request_id, None)
    if engine_id is not None:
      self._drop(engine_id, asked.reason)
    elif asked.request_id in peer.compiling:
      peer.compiling[asked.request_id] = True

  def abort_elsewhere(self, peer: Peer, asked: AbortElsewhere) -> list[bool]:
    """See EngineClient, for this front end."""
    found = []
    for name in asked.names:
      named = self._names.get((asked.owner, name))
      found.append(named is not None and named.peer is not peer and not named.is_aborted)
      if named is not None and found[-1]:
        named.is_aborted = True
        named.peer.link.tell_peer(NamedAborts(asked.owner, [name]))
    return found

  def _drop(self, engine_id: str, reason: FinishReason) -> None:
    """Removes a request's route and frees its name."""
    route = self._routes.pop(engine_id, None)
    if route is not None and self._engine is not None:
      self._release_name(route.key)
      self._engine.abort(engine_id, reason)

  def _forget(self, engine_ids: Sequence[str]) -> None:
    """Removes the routes of requests that the engine has finished."""
    assert self._engine is not None, "nothing ends before anything runs"
    for engine_id in engine_ids:
      route = self._routes.pop(engine_id, None)
      if route is not None:
        route.peer.ids.pop(route.request_id, None)
        self._release_name(route.key)
      self._engine.ended(engine_id)

  def _release_name(self, key: tuple[str, str]) -> None:
    named = self._names[key]
    named.num_live -= 1
    if not named.num_live:
      del self._names[key]
