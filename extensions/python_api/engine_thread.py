"""Runs an LLM's engine, its generations and an event loop on one thread. Knows no prompts and no model.

Between two engine steps the loop starts requests and passes pieces to streams. Callers are other threads, such as a
notebook's. They wait for futures and read queues, so they need no event loop of their own.
"""

import asyncio
from collections.abc import Callable, Sequence
import concurrent.futures
import functools
import queue
import threading

import uvloop

from engine.adapters import AdapterWeights
from engine.engine import Engine
from engine.errors import EngineError, Unavailable
from engine.request import TokenEvent
from extensions.python_api.outputs import RequestOutput, read_outputs
from server.client import Piece, Prompt, read_pieces
from server.errors import EngineFailed
from server.generation.engine_client import LocalEngine
from server.generation.generations import Generation, Generations
from server.generation.request_validation import GenerationCall
from server.telemetry.latency_histograms import NoObservations
from server.text.tokenizer import Tokenizer

_WAIT_S = 0.001  # between two polls of an engine that has requests and no work, as in the window of a dynamic batch
_CLOSED = "this LLM is closed; make another one"
_CLOSED_MEANWHILE = "this LLM was closed before the request was finished"

# A stream's pieces, then its end: None or an error.
type Pieces = queue.SimpleQueue[Piece | BaseException | None]


class Job:
  """The requests of one call.

  Attributes:
    future: done when all requests are finished, or with the first error. An error ends the other requests too.
    num_ended: the number of finished requests; any thread may read it.
  """

  def __init__(self, prompts: Sequence[Prompt], calls: Sequence[GenerationCall]):
    """Args: prompts: the caller's prompts, one for each call."""
    self.prompts, self.calls = prompts, calls
    self.future: concurrent.futures.Future[None] = concurrent.futures.Future()
    self.num_ended = 0
    self.finished: dict[int, Generation] = {}  # by index in `calls`
    self.live: dict[int, Generation] = {}  # by index in `calls`

  def read_outputs(self) -> list[RequestOutput]:
    """Returns the outputs in the order of the requests, once all are finished.

    The caller's thread makes the texts, after the last step: between two steps that work is several times slower, since
    the steps leave none of its memory in the processor's caches.
    """
    triples = zip(self.prompts, self.calls, sorted(self.finished.items()), strict=True)
    return [read_outputs(prompt, call.prompt_token_ids, each) for prompt, call, (_, each) in triples]


class EngineThread:
  """Owns an engine until it is closed. Other threads call the public methods, except take_events.

  Attributes:
    engine: the engine, until `close`.
  """

  def __init__(self) -> None:
    """The engine's constructor needs `take_events`. Call `start` before any other method."""
    self._jobs: set[Job] = set()
    self._waiting: dict[str, tuple[Job, int]] = {}  # engine id -> job, index in its calls
    self._wake = asyncio.Event()
    self._ends = False  # only the loop uses it
    self._tasks: set[asyncio.Task[None]] = set()  # starts of jobs, and streams
    self._is_called = False  # whether another thread's call waits for the loop
    self._lock = threading.Lock()
    self._is_closed = False  # under the lock: no callback enters the loop after _begin_end
    self._thread = threading.Thread(target=self._run, name="sluice-engine", daemon=True)

  def start(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
    """Takes over an engine and starts the thread."""
    self._loop = uvloop.new_event_loop()
    self.engine = engine
    self._generations = Generations(LocalEngine(engine), tokenizer, observations=NoObservations())
    self._thread.start()

  def submit_job(self, job: Job) -> None:
    """Starts all requests of a job before the next step. Raises Unavailable after `close`."""
    with self._lock:
      self._check_open()
      self._call_loop(self._take_job, job)

  def cancel_job(self, job: Job) -> None:
    """Cancels a job's live requests; returns when the engine has the cancellations."""
    told = threading.Event()

    def cancel() -> None:
      job.future.cancel()
      self._drop_job(job)
      told.set()

    with self._lock:
      if self._is_closed:
        return
      self._call_loop(cancel)
    while self._thread.is_alive() and not told.wait(0.1):
      pass

  def open_stream(self, call: GenerationCall, pieces: Pieces) -> concurrent.futures.Future[None]:
    """Generates into a queue; cancelling the future ends the generation. Raises Unavailable after `close`."""
    with self._lock:
      self._check_open()
      future = asyncio.run_coroutine_threadsafe(self._stream(call, pieces), self._loop)
      self._is_called = True
    future.add_done_callback(functools.partial(_end_pieces, pieces))
    return future

  def load_adapter(self, name: str, weights: AdapterWeights, replaces: bool) -> concurrent.futures.Future[None]:
    """Loads an adapter before the next step; see Engine.load_adapter. Raises Unavailable after `close`."""
    with self._lock:
      self._check_open()
      loaded = self.engine.load_adapter(name, weights, replaces)
      self._call_loop(self._turn_engine)
    return loaded

  def close(self) -> None:
    """Ends every request, waits for the thread and releases the engine. May be called twice."""
    with self._lock:
      if not self._is_closed:
        self._is_closed = True
        self._call_loop(self._begin_end)
    if threading.current_thread() is not self._thread:  # the garbage collector may close the owner on this thread
      self._thread.join()

  def _check_open(self) -> None:
    if self._is_closed:
      raise Unavailable(_CLOSED)

  def _call_loop(self, callback: Callable[..., None], *args: Job) -> None:
    self._loop.call_soon_threadsafe(callback, *args)
    self._is_called = True  # afterwards: the loop clears it, then runs what it has

  # On the thread.

  def _run(self) -> None:
    with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
      runner.run(self._serve())
    # The engine's callback holds this object. Breaking the cycle here frees the device arrays at once.
    del self.engine, self._generations

  async def _serve(self) -> None:
    """Steps while there are requests. After a step the loop turns, 30 us, only if a task or a call waits."""
    engine = self.engine
    while not self._ends:
      if engine.dead is not None:
        self._end_all(EngineFailed(f"the engine has failed: {engine.dead!r:.200}; make another LLM"))
      if engine.dead is not None or not engine.num_live:
        self._wake.clear()
        await self._wake.wait()
        continue
      if not engine.step():
        await asyncio.sleep(_WAIT_S)
      elif self._is_called or self._tasks:
        self._is_called = False
        await asyncio.sleep(0)
    self._end_all(Unavailable(_CLOSED_MEANWHILE))
    while engine.step():  # launched steps finish, and every block returns to the pool
      pass

  def _turn_engine(self) -> None:
    """Lets the engine take its messages, also if it has no requests."""
    self.engine.step()

  def _begin_end(self) -> None:
    self._ends = True
    self._wake.set()

  def _take_job(self, job: Job) -> None:
    self._jobs.add(job)
    self._keep_task(self._loop.create_task(self._start_job(job)))

  def _keep_task(self, task: asyncio.Task[None]) -> None:
    self._tasks.add(task)
    task.add_done_callback(self._tasks.discard)

  async def _start_job(self, job: Job) -> None:
    for place, call in enumerate(job.calls):
      if job.future.done():
        return
      try:
        generation = await self._generations.start_generation(call, None)
      except EngineError as error:
        self._fail_job(job, error, place)
        return
      job.live[place] = generation
      for output in generation.outputs:
        self._waiting[output.engine_id] = job, place
    self._wake.set()

  async def _stream(self, call: GenerationCall, pieces: Pieces) -> None:
    task = asyncio.current_task()
    assert task is not None, "a stream outside its task"
    self._keep_task(task)
    generation = await self._generations.start_generation(call, None)
    self._wake.set()
    try:
      async for message in generation.messages():
        for piece in read_pieces(message):
          pieces.put(piece)
    finally:
      self._generations.close_generation(generation)

  def take_events(self, events: list[TokenEvent]) -> None:
    """Receives the engine's events, inside its step."""
    if not self._generations.dispatch_events(events):
      return
    for event in events:
      if event.finish_reason is not None and event.request_id in self._waiting:
        self._note_ending(*self._waiting.pop(event.request_id))

  def _note_ending(self, job: Job, place: int) -> None:
    generation = job.live.get(place)
    if generation is None or not generation.ended:
      return
    if generation.error is not None:
      self._fail_job(job, generation.error, place)
      return
    job.finished[place] = generation
    self._generations.close_generation(job.live.pop(place))
    job.num_ended += 1
    if job.num_ended == len(job.calls):
      self._jobs.discard(job)
      job.future.set_result(None)

  def _fail_job(self, job: Job, error: EngineError, place: int | None = None) -> None:
    self._drop_job(job)
    if job.future.done():
      return
    if isinstance(error, EngineFailed):
      error.__cause__ = self.engine.dead
    if place is not None and len(job.calls) > 1:
      error.add_note(describe_place(place))
    job.future.set_exception(error)

  def _drop_job(self, job: Job) -> None:
    """Cancels the job's live requests; they end in the engine's next step."""
    self._jobs.discard(job)
    for generation in job.live.values():
      for output in generation.outputs:
        self._waiting.pop(output.engine_id, None)
      self._generations.close_generation(generation)
    job.live.clear()
    self._wake.set()

  def _end_all(self, error: EngineError) -> None:
    """Ends every generation, and fails those that would start later."""
    self._generations.end_all(error)
    for job in list(self._jobs):
      self._fail_job(job, error)


def describe_place(place: int) -> str:
  """Returns the note for an error in one of several prompts."""
  return f"This is about prompts[{place}]."


def _end_pieces(pieces: Pieces, future: concurrent.futures.Future[None]) -> None:
  pieces.put(Unavailable(_CLOSED_MEANWHILE) if future.cancelled() else future.exception())
