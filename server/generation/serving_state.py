"""What serves and whether it takes work, for gRPC, HTTP and the operator's pages alike. Knows no protocol.

A request is let in once, before its body is read or its text is tokenized. From then on it is the server's own: a drain
waits for it, whether it is still being read or generates already.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import contextlib
import dataclasses
import time
from typing import Any

from engine.config import EngineConfig
from engine.errors import Unavailable
from server.errors import EngineDead, Starting
from server.generation import request_validation
from server.generation.engine_client import EngineClient
from server.generation.generations import Generations
from server.generation.sampling_defaults import SamplingDefaults
from server.proto import sluice_pb2 as pb
from server.security.memory_limit import MemoryLimit
from server.text.constraint_compiler import ConstraintCompiler
from server.text.tokenizer import Tokenizer

_INLINE_CHARS = 2048


@dataclasses.dataclass(frozen=True)
class Backend:
  """What serves, once it is ready.

  Attributes:
    model: the served name.
    engine: asked for reports only; requests reach it through `generations`.
    tokenizer: of the model, or None.
    generations: the live ones.
    load_s, warmup_s: what the start took.
    defaults: the model's own, for sampling fields that requests leave out.
  """

  model: str
  engine: EngineClient
  tokenizer: Tokenizer | None
  generations: Generations
  load_s: float
  warmup_s: float
  defaults: SamplingDefaults = dataclasses.field(default_factory=dict)

  @property
  def config(self) -> EngineConfig:
    return self.engine.config


class ServingState:
  """One object a server; all methods belong to its event loop.

  Attributes:
    ready, alive: for probes and metrics. Not ready while draining or not alive; not alive when the engine stands or has
      failed.
  """

  def __init__(self, memory: MemoryLimit | None = None):
    """Args: memory: above it no new work is let in; None is no limit."""
    self._memory = memory
    self._backend: Backend | None = None
    self._compiler: ConstraintCompiler | None = None
    self._refusal: Unavailable | None = Starting()
    self._num_admitted = 0
    self._none_admitted = asyncio.Event()
    self._none_admitted.set()
    # Two threads: tokenizing a long prompt must not stop the loop, and must not take all cores either.
    self._text_pool = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="tokenize")
    self._ready_at = 0.0
    self.ready = False
    self.alive = True

  def begin_serving(self, backend: Backend) -> None:
    """Lets work in from now on."""
    self._backend = backend
    if backend.tokenizer is not None:
      config = backend.config
      self._compiler = ConstraintCompiler(backend.tokenizer, config.vocab_size, config.eos_token_ids)
    self._refusal = None
    self._ready_at = time.monotonic()

  def refuse_work(self, error: Unavailable) -> None:
    """Lets no new work in; `error` is what callers are told. Work inside goes on."""
    self._refusal = error

  def end_threads(self) -> None:
    """Gives them back."""
    self._text_pool.shutdown(wait=False, cancel_futures=True)

  @property
  def uptime_s(self) -> float:
    """Seconds since ready."""
    return time.monotonic() - self._ready_at

  @property
  def backend(self) -> Backend | None:
    """What serves, or nothing: before it does, and when it is dead."""
    return None if isinstance(self._refusal, EngineDead) else self._backend

  def require_backend(self) -> Backend:
    """The backend, also while draining; raises what keeps the server shut."""
    if self._backend is None or isinstance(self._refusal, EngineDead):
      raise self._refusal or Starting()
    return self._backend

  @contextlib.contextmanager
  def admit(self) -> Iterator[Backend]:
    """Lets one request in, or raises why not; the block lasts until its generations have started.

    Raises:
      Unavailable: the server starts, drains or is dead.
      MemoryPressure: it is larger than it may be.
    """
    if self._refusal is not None:
      raise self._refusal
    if self._memory is not None:
      self._memory.check_memory()
    backend = self.require_backend()
    self._num_admitted += 1
    self._none_admitted.clear()
    try:
      yield backend
    finally:
      self._num_admitted -= 1
      if not self._num_admitted:
        self._none_admitted.set()

  async def wait_idle(self) -> None:
    """Returns when no request that was let in is left."""
    while self._num_admitted or (self._backend is not None and len(self._backend.generations)):
      await self._none_admitted.wait()
      if self._backend is not None:
        await self._backend.generations.wait_idle()

  async def tokenize_prompt(
    self, request: pb.GenerateRequest | pb.TokenizeRequest, tokenizer: Tokenizer | None
  ) -> list[int]:
    """Token ids of a prompt of any kind; away from the loop where it takes long.

    Raises as `request_validation.prompt_token_ids`.
    """
    if request.WhichOneof("prompt") == "chat" or len(request.text) > _INLINE_CHARS:
      return await self.run_in_text_pool(lambda: request_validation.prompt_token_ids(request, tokenizer))
    return request_validation.prompt_token_ids(request, tokenizer)

  async def add_constraints(
    self, request: pb.GenerateRequest, calls: Sequence[request_validation.GenerationCall]
  ) -> list[request_validation.GenerationCall]:
    """The calls, with constraints for their outputs if `request` asks for one; compiled away from the loop.

    Raises:
      InvalidRequest: the constraint cannot be followed.
    """
    compiler = self._compiler
    if not request.HasField("constraint") or compiler is None:
      return list(calls)

    def compile_all() -> list[request_validation.GenerationCall]:
      grammar = compiler.compile(request.constraint, request.tenant)
      return [dataclasses.replace(call, constraints=tuple(grammar.copy() for _ in call.params)) for call in calls]

    return await self.run_in_text_pool(compile_all)

  async def run_in_text_pool(self, work: Callable[[], Any]) -> Any:
    """Runs `work`, which takes long for a long text, away from the loop."""
    return await asyncio.get_running_loop().run_in_executor(self._text_pool, work)
