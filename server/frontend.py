"""One front end process: gRPC, HTTP and text, for an engine in the process that started it. Has no flags of its own.

Started by server.spawn as `python -m server.frontend PARENT_PID LINK HTTP METRICS`, the last three being numbers of
sockets; all else comes over the link. It ends when it is told to drain or to die, and when the engine's process has
gone, however that went.
"""

import asyncio
from collections.abc import Sequence
import gc
import os
import pathlib
import signal
import socket
import sys
from typing import Any

import uvloop

from engine.errors import EngineError
from server import logs, memory, plain, spawn, tracing, watchdog, wire
from server.counts import Counts
from server.errors import EngineDead
from server.generation import Generations
from server.host import Host, SharedPorts
from server.remote import RemoteEngine, census, events_from
from server.service import Backend, server_version
from server.tokenizer import Tokenizer

_EXIT_CODE = 1


class _FrontEnd:
  """The process's one object. Belongs to its event loop."""

  def __init__(self, parent: int, link: socket.socket, http: socket.socket | None, metrics: socket.socket | None):
    self._parent = parent
    self._shared = SharedPorts(http, metrics, lambda: census(self._link), lambda: self._others)
    self._others: list[int] = []
    self._host: Host | None = None
    self._generations: Generations | None = None
    loop = asyncio.get_running_loop()
    self._settings: asyncio.Future[tuple[Any, ...]] = loop.create_future()
    self._serve: asyncio.Future[tuple[Any, ...]] = loop.create_future()
    self._gone = asyncio.Event()
    self._link = wire.Link(
      link,
      told={
        wire.SETTINGS: lambda *fields: self._settings.set_result(fields),
        wire.SERVE: lambda *fields: self._serve.set_result(fields),
        wire.EVENTS: events_from(lambda *columns: self._generations.dispatch(*columns) if self._generations else None),
        wire.ABORT_NAMES: self._abort_names,
        wire.DRAIN: self._drain,
        wire.DIE: self._die,
      },
      asked={wire.COUNTS: lambda: self._counts().plain()},
      closed=self._die,
    )

  async def run(self) -> int:
    """From the first message to the exit code."""
    self._link.tell(wire.HELLO, wire.VERSION, os.getpid())
    gone = asyncio.ensure_future(self._gone.wait())
    await asyncio.wait((self._settings, gone), return_when=asyncio.FIRST_COMPLETED)
    if not self._settings.done():
      return _EXIT_CODE
    version, options, model_dir, max_prompt_bytes, otlp_endpoint, log_format = self._settings.result()
    if version != wire.VERSION:
      raise wire.WireError(f"version {version} is not {wire.VERSION}: two installations are mixed")
    logs.Lines().set_up(log_format)
    try:
      host = self._host = Host(plain.options_from(options), may_exit=True, shared=self._shared)
      watchdog.watch_threads(host.fail)
      await host.start()
      self._link.tell(wire.LISTENING)
      tokenizer = await asyncio.to_thread(_load_tokenizer, model_dir, max_prompt_bytes)
    except (EngineError, OSError) as error:
      self._link.tell(wire.FAILED, " ".join(str(error).split()))
      return _EXIT_CODE
    stopped = asyncio.create_task(host.wait_stopped())
    await asyncio.wait((self._serve, stopped), return_when=asyncio.FIRST_COMPLETED)
    tracer = None
    if not stopped.done():
      model, config, load_s, warmup_s, self._others = self._serve.result()
      engine = RemoteEngine(self._link, plain.config_from(config))
      if otlp_endpoint:
        tracer = tracing.Tracer(otlp_endpoint, model, server_version())
      self._generations = generations = Generations(engine, tokenizer, tracer=tracer)
      # What the start has made stays: the collector need not look at it again while requests wait.
      gc.collect()
      gc.freeze()
      await host.serve(
        Backend(
          model=model, engine=engine, tokenizer=tokenizer, generations=generations, load_s=load_s, warmup_s=warmup_s
        )
      )
      self._link.tell(wire.SERVING)
    code = await stopped
    if tracer is not None:
      tracer.shutdown()
    return code

  def check_parent(self) -> None:
    """On SIGTERM, which the system sends when the parent dies; from anybody else it means nothing here."""
    if os.getppid() != self._parent:
      self._die("the engine's process has gone")

  def _die(self, reason: str) -> None:
    self._gone.set()
    if self._host is not None:
      self._host.fail(EngineDead(str(reason)))

  def _drain(self) -> None:
    if self._host is not None:
      self._host.request_stop()

  def _abort_names(self, owner: str, names: Sequence[str]) -> None:
    if self._generations is not None:
      for name in names:
        self._generations.abort(name, owner)

  def _counts(self) -> Counts:
    return self._host.own_counts() if self._host is not None else Counts(pids=[os.getpid()])


def _load_tokenizer(model_dir: str, max_prompt_bytes: int) -> Tokenizer | None:
  folder = pathlib.Path(model_dir)
  if not (folder / "tokenizer.json").is_file():
    return None
  return Tokenizer(folder, max_prompt_bytes=max_prompt_bytes)


async def _run(parent: int, link: int, http: int, metrics: int) -> None:
  """Ends the process from within: nothing that taking down the loop would wait for is of use to anybody any more."""
  listening = [None if number < 0 else socket.socket(fileno=number) for number in (http, metrics)]
  front_end = _FrontEnd(parent, socket.socket(fileno=link), *listening)
  asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, front_end.check_parent)
  front_end.check_parent()  # it may have died before the handler was there
  watchdog.exit_now(await front_end.run())


def main() -> None:
  """Entry point; ends the process."""
  # Whoever stops a server signals all of its processes, and the engine's knows how to stop.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  parent, link, http, metrics = map(int, sys.argv[1:])
  memory.few_arenas()
  if spawn.die_with(parent):
    asyncio.run(_run(parent, link, http, metrics), loop_factory=uvloop.new_event_loop)
  watchdog.exit_now(_EXIT_CODE)


if __name__ == "__main__":
  main()
