"""One front end process: gRPC, HTTP and text, for an engine in its parent process. Has no flags of its own.

`server.ipc.front_end_spawn` starts it as `python -m server.lifecycle.front_end_process LINK HTTP METRICS`, with numbers
of sockets; all else comes over the link. It ends when the link says so, or when the engine's process has gone.
"""

import asyncio
from collections.abc import Callable
import gc
import os
import pathlib
import signal
import socket
import sys

import uvloop

from server.errors import EngineDead
from server.generation.generations import Generations
from server.generation.serving_state import Backend
from server.ipc.frame_link import Link
from server.ipc.messages import (
  CensusQuestion,
  CountsQuestion,
  DrainOrder,
  EngineDeath,
  FrontEndSettings,
  NamedAborts,
  ServedAdapters,
  ServedModel,
  StepEvents,
  TextOptions,
)
from server.ipc.remote_engine import RemoteEngine
from server.lifecycle import watchdog
from server.lifecycle.composition import Composition
from server.lifecycle.host import Host, SharedPorts
from server.security import memory_limit
from server.telemetry import log_lines, tracing
from server.telemetry.process_counts import ProcessCounts
from server.text.tokenizer import Tokenizer, load_tokenizer
from server.version import server_version


class _FrontEndProcess:
  """The state of the process. Belongs to its event loop."""

  def __init__(
    self, composition: Composition, link: socket.socket, http: socket.socket | None, metrics: socket.socket | None
  ):
    self._composition = composition
    self._shared = SharedPorts(http, metrics, self._fetch_census, lambda: self._others)
    self._others: list[int] = []
    self._host: Host | None = None
    self._texts: TextOptions
    self._tokenizer: asyncio.Future[Tokenizer | None]
    self._tracer: tracing.Tracer | None = None
    self._engine: RemoteEngine | None = None
    self._generations: Generations | None = None
    self._begun = asyncio.Event()  # also set if the host can never begin
    self._link = Link(
      link,
      {
        FrontEndSettings: self._start_listening,
        ServedModel: self._begin_serving,
        ServedAdapters: lambda served: self._engine.set_adapters(served.adapters) if self._engine else None,
        StepEvents: self._dispatch_events,
        NamedAborts: self._abort_names,
        CountsQuestion: lambda _: self._host.own_counts() if self._host else ProcessCounts(pids=[os.getpid()]),
        DrainOrder: lambda _: self._host.request_stop() if self._host else None,
        EngineDeath: lambda message: self._die(message.reason),
      },
      self._die,
    )

  async def run_host(self) -> int:
    """Runs from the first message to the exit code."""
    await self._begun.wait()
    if self._host is None:
      return watchdog.EXIT_CODE
    code = await self._host.wait_stopped()
    if self._tracer is not None:
      self._tracer.shutdown()
    return code

  async def _start_listening(self, settings: FrontEndSettings) -> None:
    texts = self._texts = settings.texts
    log_lines.Lines().set_up(texts.log_format)
    host = Host(settings.options, may_exit=True, shared=self._shared, composition=self._composition)
    watchdog.watch_threads(host.fail)
    await host.start_listening()
    self._tokenizer = asyncio.ensure_future(
      asyncio.to_thread(
        load_tokenizer,
        pathlib.Path(texts.model_dir),
        max_prompt_bytes=texts.max_prompt_bytes,
        chat_template=texts.chat_template,
      )
    )
    self._host = host
    self._begun.set()

  async def _begin_serving(self, served: ServedModel) -> None:
    assert self._host is not None, "start_listening() comes before serve()"
    # Before anything awaits, so that no change of the adapters is missed.
    engine = self._engine = RemoteEngine(self._link, served.config, served.adapters)
    tokenizer = await self._tokenizer
    self._others = [pid for pid in served.others if pid != os.getpid()]
    if self._texts.otlp_endpoint:
      self._tracer = tracing.Tracer(self._texts.otlp_endpoint, served.model, server_version())
    self._generations = generations = Generations(engine, tokenizer, tracer=self._tracer)
    # The start's objects stay, so the collector need not scan them while requests wait.
    gc.collect()
    gc.freeze()
    await self._host.serve(
      Backend(
        model=served.model,
        engine=engine,
        tokenizer=tokenizer,
        generations=generations,
        load_s=served.load_s,
        warmup_s=served.warmup_s,
        defaults=self._texts.defaults,
      )
    )

  def _dispatch_events(self, step: StepEvents) -> None:
    if self._generations is not None:
      self._generations.dispatch_events(step.others, step.request_ids, step.token_ids)

  def _abort_names(self, asked: NamedAborts) -> None:
    if self._generations is not None:
      for name in asked.names:
        self._generations.abort_generation(name, asked.owner)

  async def _fetch_census(self) -> ProcessCounts:
    return await self._link.ask_peer(CensusQuestion(), ProcessCounts)

  def _die(self, reason: str) -> None:
    self._begun.set()
    if self._host is not None:
      self._host.fail(EngineDead(reason))


def main(compose: Callable[[], Composition] = Composition) -> None:
  """Entry point; ends the process. Args: see server.main.main."""
  # A stop signal reaches all processes of the server, and the engine's process handles it.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  memory_limit.limit_malloc_arenas()
  composition = compose()

  async def run() -> None:
    link, http, metrics = [None if int(number) < 0 else socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    assert link is not None, "the parent process passes a link"
    code = await _FrontEndProcess(composition, link, http, metrics).run_host()
    # Exits at once: taking down the loop would only wait for things that nobody needs any more.
    watchdog.exit_now(code)

  asyncio.run(run(), loop_factory=uvloop.new_event_loop)


if __name__ == "__main__":
  main()
