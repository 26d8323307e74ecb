"""Holds what serves, and admits requests, for gRPC, HTTP and the operator's pages alike. Knows no protocol.

A request is admitted once, before the server reads its body or tokenizes its text. From then on a drain waits for it.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import contextlib
import dataclasses
import time
from typing import Any

from engine.config import EngineConfig
from engine.constraint import Constraint
from engine.errors import Unavailable
from engine.validation import check_generates
from server.errors import EngineDead, Starting
from server.generation import request_validation
from server.generation.engine_client import EngineClient
from server.generation.generations import Generations
from server.generation.reasoning_budget import ReasoningBudget, ReasoningLimit
from server.generation.sampling_defaults import SamplingDefaults
from server.proto import sluice_pb2 as pb
from server.security.memory_limit import MemoryLimit
from server.text.constraint_compiler import ConstraintCompiler
from server.text.tokenizer import Tokenizer

_INLINE_CHARS = 2048


@dataclasses.dataclass(frozen=True)
class Backend:
  """The parts that serve, once the server is ready.

  Attributes:
    model: the served name.
    engine: used for reports only; requests reach it through `generations`.
    tokenizer: the model's tokenizer, or None.
    generations: the live generations.
    load_s, warmup_s: seconds that the start took.
    defaults: the model's defaults, for sampling fields that requests leave out.
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

  @property
  def most_background(self) -> int:
    """The number of live generations from which batches start no more: other requests that come find free slots."""
    most = self.config.max_num_seqs
    return most - max(1, most // 8)

  def find_adapter(self, name: str | None) -> str:
    """Returns the LoRA adapter that a request's `model` names, or ""; see `request_validation.find_adapter`."""
    if not name or name == self.model:
      return ""
    return request_validation.find_adapter(name, self.model, [adapter.name for adapter in self.engine.adapters()])

  def find_generator(self, name: str | None) -> str:
    """Returns the same for a request that generates. Raises InvalidRequest if the model has no head of tokens."""
    adapter = self.find_adapter(name)
    check_generates(self.config)
    return adapter


class ServingState:
  """Whether a server admits requests, and its backend. A server has one; it belongs to the server's event loop.

  Attributes:
    closes_objects: whether objects of a JSON schema are closed by default.
    ready, alive: for health checks and metrics. A draining server is not ready. A server whose engine is stuck or has
      failed is neither.
  """

  def __init__(self, memory: MemoryLimit | None = None, *, closes_objects: bool = True):
    """Makes the state of a server that starts.

    Args:
      memory: the limit above which the server admits no new work; None is no limit.
      closes_objects: whether objects of a JSON schema are closed by default; see `prepare_schema`.
    """
    self._memory = memory
    self._backend: Backend | None = None
    self._compiler: ConstraintCompiler | None = None
    self.closes_objects = closes_objects
    self._refusal: Unavailable | None = Starting()
    self._num_admitted = 0
    self._none_admitted = asyncio.Event()
    self._none_admitted.set()
    # Two threads: tokenizing a long prompt must not block the loop, and must not use all cores either.
    self._text_pool = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="tokenize")
    self._ready_at = 0.0
    self.ready = False
    self.alive = True

  def begin_serving(self, backend: Backend) -> None:
    """Admits requests from now on."""
    self._backend = backend
    if backend.tokenizer is not None:
      config = backend.config
      self._compiler = ConstraintCompiler(
        backend.tokenizer, config.vocab_size, config.eos_token_ids, closes_objects=self.closes_objects
      )
    self._refusal = None
    self._ready_at = time.monotonic()

  def refuse_work(self, error: Unavailable) -> None:
    """Refuses new requests with `error`. Admitted requests continue."""
    self._refusal = error

  def end_threads(self) -> None:
    """Ends the text pool's threads."""
    self._text_pool.shutdown(wait=False, cancel_futures=True)

  @property
  def uptime_s(self) -> float:
    """Seconds since ready."""
    return time.monotonic() - self._ready_at

  @property
  def backend(self) -> Backend | None:
    """The backend; None before the server is ready and after the engine has failed."""
    return None if isinstance(self._refusal, EngineDead) else self._backend

  def require_backend(self) -> Backend:
    """Returns the backend, also while draining; raises the error with which the server refuses requests."""
    if self._backend is None or isinstance(self._refusal, EngineDead):
      raise self._refusal or Starting()
    return self._backend

  @contextlib.contextmanager
  def admit(self) -> Iterator[Backend]:
    """Admits one request, for a block that lasts until its generations have started.

    Raises:
      Unavailable: the server starts, drains or has failed.
      MemoryPressure: its resident memory exceeds the limit.
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
    """Returns when no admitted request is left."""
    while self._num_admitted or (self._backend is not None and len(self._backend.generations)):
      await self._none_admitted.wait()
      if self._backend is not None:
        await self._backend.generations.wait_idle()

  async def tokenize_prompt(
    self, request: pb.GenerateRequest | pb.TokenizeRequest, tokenizer: Tokenizer | None
  ) -> list[int]:
    """Returns the token ids of a prompt of any kind; tokenizes long texts away from the loop.

    Raises the errors of `request_validation.prompt_token_ids`.
    """
    if request.WhichOneof("prompt") == "chat" or len(request.text) > _INLINE_CHARS:
      return await self.run_in_text_pool(lambda: request_validation.prompt_token_ids(request, tokenizer))
    return request_validation.prompt_token_ids(request, tokenizer)

  async def add_constraints(
    self,
    request: pb.GenerateRequest,
    calls: Sequence[request_validation.GenerationCall],
    reasoning: ReasoningLimit | None = None,
  ) -> list[request_validation.GenerationCall]:
    """Returns the calls with the constraints that `request` sets, compiled away from the loop.

    Args:
      request: the request.
      calls: its calls.
      reasoning: the limit of the reasoning before each answer; None has no limit, and no reasoning before a constraint.

    Raises:
      InvalidRequest: the constraint does not compile, or exceeds a limit.
    """
    compiler, backend = self._compiler, self._backend
    is_constrained = request.HasField("constraint")
    if compiler is None or backend is None or backend.tokenizer is None or not (is_constrained or reasoning):
      return list(calls)
    token_bytes, config = backend.tokenizer.token_bytes, backend.config

    def compile_all() -> list[request_validation.GenerationCall]:
      grammar = compiler.compile(request.constraint, request.tenant) if is_constrained else None

      def make_constraints(number: int) -> Iterator[Constraint]:
        for _ in range(number):
          answer = None if grammar is None else grammar.copy()
          if reasoning is not None:
            yield ReasoningBudget(reasoning, answer, token_bytes, config)
          elif answer is not None:
            yield answer

      return [dataclasses.replace(call, constraints=tuple(make_constraints(len(call.params)))) for call in calls]

    return await self.run_in_text_pool(compile_all)

  async def run_in_text_pool(self, work: Callable[[], Any]) -> Any:
    """Runs `work` on a thread of the text pool, away from the loop."""
    return await asyncio.get_running_loop().run_in_executor(self._text_pool, work)
