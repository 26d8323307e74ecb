"""The server program: the one place where all parts are put together. Holds no logic of its own.

    python -m server.main --model=DIR --port=50051

Signals: SIGTERM and SIGINT drain (readiness goes first, what runs may finish), a second one ends at once; SIGUSR1
switches the step trace on and off. Exit codes: 0 after a drain, 1 when the start failed or the engine died, 2 for bad
flags.
"""

import asyncio
from collections.abc import Callable, Sequence
import gc
import os
import pathlib
import signal
import sys
import threading
from typing import Any

from absl import app
from absl.flags import adopt_module_key_flags
import uvloop

from engine.checked import CheckedEngine
from engine.disaggregated import AnyEngine
from engine.engine import Emit, Engine
from engine.errors import ConfigError, EngineError
from engine.fake_build import build_fake
from engine.faults import FaultPlan, Injector, inject_engine
from server import descriptors, flags, logs, memory, tracing, watchdog
from server.admin import AdminActions
from server.errors import NotConfigured, Starting
from server.faults import inject_front_end, load_plan
from server.frontends import Frontends, TextOptions
from server.generation import Generations
from server.host import Host, HostOptions
from server.port import LocalEngine
from server.service import Backend, server_version
from server.tokenizer import Tokenizer

_NO_FAULTS = '{"faults": []}'
# Reading a tokenizer keeps everything else from running; what takes longer is not one.
_TOKENIZER_LIMIT_S = 120.0

# --help and --helpfull tell a program's own flags from those of the libraries by the module it runs.
adopt_module_key_flags(flags)
_LINES = logs.Lines()
_say = _LINES.say


def _parse(argv: Sequence[str]) -> list[str]:
  try:
    return flags.parse(argv)
  except ConfigError as error:
    _say(f"error: {error}")
    sys.exit(2)


def _progress(what: str, done: int, total: int) -> None:
  _say(f"{what}: {done} of {total}")


class _Trace:
  """The step trace's switch."""

  def __init__(self, path: str):
    self.engine: AnyEngine | None = None
    self._path = path
    self._on = False

  def toggle(self) -> None:
    """Starts or ends a recording, on a signal."""
    try:
      self.set(not self._on)
    except EngineError as error:
      _say(f"SIGUSR1: {error}")

  def set(self, on: bool) -> str:
    """Starts a recording anew, or ends it; returns the file's path.

    Raises:
      NotConfigured: there is no file for it, or it cannot be written.
      Starting: there is no engine yet.
    """
    if not self._path:
      raise NotConfigured("no step trace without --trace_file")
    if self.engine is None:
      raise Starting("the model is loading; the step trace begins with it")
    try:
      if self._on:
        self.engine.stop_trace()
      self._on = False
      if on:
        self.engine.start_trace(self._path)
    except OSError as error:
      raise NotConfigured(f"step trace: {self._path}: {error.strerror}") from None
    self._on = on
    _say(f"step trace: {'recording to' if on else 'closed'} {self._path}")
    return self._path


def _start_thread(work: Callable[[], Any]) -> asyncio.Future:
  """Runs `work` in a daemon thread: unlike an executor's, it cannot keep a stopping process from ending."""
  loop = asyncio.get_running_loop()
  future = loop.create_future()

  def settle(result: Any, error: BaseException | None) -> None:
    if not future.done():
      future.set_exception(error) if error is not None else future.set_result(result)

  def run() -> None:
    result, failure = None, None
    try:
      result = work()
    except BaseException as error:
      failure = error
    loop.call_soon_threadsafe(settle, result, failure)

  threading.Thread(target=run, name="build", daemon=True).start()
  return future


def _build(settings: dict[str, Any], emit: Emit, engine_class: type[Engine], injector: Injector | None):
  """The engine and the tokenizer, if the model has one."""
  if injector is not None:
    injector.hit("load")
  if flags.FAKE_DEVICE.value:
    step_s = flags.FAKE_STEP_MS.value / 1000
    return build_fake(flags.MODEL.value, settings, step_s, emit, engine_class=engine_class), _load_tokenizer()
  # Here and not above: JAX takes seconds to import, and a bad flag should not have to wait for it.
  from engine.device.build import build as build_engine
  from engine.device.options import BuildOptions

  # First, because it is quick: a broken tokenizer should not be found after minutes of compiling.
  tokenizer = _load_tokenizer()
  num_token_ids = tokenizer.num_token_ids if tokenizer is not None else 0
  options = BuildOptions(model_dir=flags.MODEL.value, num_token_ids=num_token_ids, **settings)
  return build_engine(options, _progress, emit, engine_class=engine_class), tokenizer


def _load_tokenizer() -> Tokenizer | None:
  folder = pathlib.Path(flags.MODEL.value)
  if not (folder / "tokenizer.json").is_file():
    return None
  _say(f"reading {folder / 'tokenizer.json'}")
  with watchdog.at_most(_TOKENIZER_LIMIT_S):
    return Tokenizer(folder, max_prompt_bytes=flags.MAX_PROMPT_BYTES.value)


def _make_host(options: HostOptions, admin: AdminActions) -> Host | Frontends:
  if not flags.FRONTEND_PROCESSES.value:
    return Host(options, admin, may_exit=True)
  texts = TextOptions(
    model_dir=flags.MODEL.value,
    max_prompt_bytes=flags.MAX_PROMPT_BYTES.value,
    otlp_endpoint=flags.OTLP_ENDPOINT.value,
    log_format=flags.LOG_FORMAT.value,
  )
  return Frontends(flags.FRONTEND_PROCESSES.value, options, texts, admin, may_exit=True)


async def _serve() -> int:
  """From flags to exit code."""
  trace = _Trace(flags.TRACE_FILE.value)
  options = flags.host_options()
  plan = flags.fault_plan()
  injector = None if plan is None else Injector(load_plan(plan))
  set_faults = None if injector is None else lambda text: injector.replace(FaultPlan.parse(text or _NO_FAULTS))
  processes = flags.FRONTEND_PROCESSES.value
  descriptors.check(options.share(processes) if processes else options, descriptors.raise_limit())
  host = _make_host(options, AdminActions(flags=flags.configuration, set_trace=trace.set, set_faults=set_faults))
  watchdog.watch_threads(host.fail)
  settings = flags.build_settings()
  if flags.OTLP_ENDPOINT.value:
    tracing.check(flags.OTLP_ENDPOINT.value)
  for port_file in (flags.PORT_FILE.value, flags.HTTP_PORT_FILE.value):
    if port_file:
      _check_port_file(pathlib.Path(port_file))
  loop = asyncio.get_running_loop()
  for number in (signal.SIGTERM, signal.SIGINT):
    loop.add_signal_handler(number, host.request_stop)
  port = await host.start()
  address = f"{options.host}:{port}"
  _say(f"listening on {address}, loading {flags.MODEL.value}")
  if host.http_port >= 0:
    _say(f"HTTP on {options.http_host or options.host}:{host.http_port}")
  if host.metrics_port >= 0:
    _say(f"metrics on {options.http_host or options.host}:{host.metrics_port}")
  if host.admin_port >= 0:
    _say(f"admin service on {options.admin_host}:{host.admin_port}")
  stopped = asyncio.create_task(host.wait_stopped())

  engine_class = CheckedEngine if options.debug_invariants else Engine
  building = _start_thread(lambda: _build(settings, host.emit, engine_class, injector))
  await asyncio.wait((building, stopped), return_when=asyncio.FIRST_COMPLETED)
  if stopped.done():
    # A compilation cannot be interrupted, and taking down the interpreter under it may crash.
    if isinstance(host.failure, ConfigError):  # of a front end, which found out first
      _say(f"error: {' '.join(str(host.failure).split())}")
    _say("stopped while starting")
    os._exit(stopped.result())
  try:
    built, tokenizer = building.result()
  except BaseException:
    host.request_stop()
    await stopped
    raise
  name = flags.SERVED_MODEL_NAME.value or built.model_name
  engine = LocalEngine(built.engine, lambda: built.runner.compiles_after_ready)
  trace.engine = built.engine
  if injector is not None:
    inject_engine(built.engine, injector)
    _say("warning: faults are injected (--enable_fault_injection)")
  if flags.TRACE_FILE.value and flags.TRACE_AT_START.value:
    trace.toggle()
  loop.add_signal_handler(signal.SIGUSR1, trace.toggle)
  # What the start has made stays: the collector need not look at it again while requests wait.
  gc.collect()
  gc.freeze()
  gc.enable()
  tracer = None
  if isinstance(host, Frontends):
    await host.serve(engine, model=name, tokenizer=tokenizer, load_s=built.load_s, warmup_s=built.warmup_s)
  else:
    if flags.OTLP_ENDPOINT.value:
      tracer = tracing.Tracer(flags.OTLP_ENDPOINT.value, name, server_version())
    generations = Generations(engine, tokenizer, tracer=tracer)
    if injector is not None:
      inject_front_end(generations, tokenizer, injector)
    await host.serve(
      Backend(
        model=name,
        engine=engine,
        tokenizer=tokenizer,
        generations=generations,
        load_s=built.load_s,
        warmup_s=built.warmup_s,
      )
    )
  if flags.HTTP_PORT_FILE.value and host.http_port >= 0:
    _write_whole(pathlib.Path(flags.HTTP_PORT_FILE.value), f"{host.http_port}\n")
  if flags.PORT_FILE.value:
    _write_whole(pathlib.Path(flags.PORT_FILE.value), f"{port}\n")
  config = built.config
  _say(
    f"model {name}: {config.vocab_size} tokens, length {config.max_model_len}, "
    f"{'with' if tokenizer else 'without'} tokenizer; KV {config.num_blocks} blocks of {config.block_size}; "
    f"attention {built.attention}, matmul {built.matmul}, quantization {built.quantization}; "
    f"loaded in {built.load_s:.1f} s, compiled in {built.warmup_s:.1f} s"
  )
  for reason in built.fallbacks:
    _say(f"note: {reason}; slower than it could be")
  if built.deterministic:
    _say(built.deterministic)
  _say(f"ready on {address}")
  code = await stopped
  if tracer is not None:
    tracer.shutdown()
  _say(f"stopped, exit code {code}")
  if code:
    # What has failed may hold up whatever the interpreter does at its end.
    watchdog.exit_now(code)
  watchdog.exit_soon(options.watchdog_grace_s)
  return code


def _check_port_file(path: pathlib.Path) -> None:
  """Removes one that is stale; one that could not be written should not be found after minutes of loading."""
  if not os.access(path.parent, os.W_OK | os.X_OK) or path.is_dir():
    raise ConfigError(f"{path} cannot be written; give --port_file and --http_port_file in a folder that can be")
  path.unlink(missing_ok=True)


def _write_whole(path: pathlib.Path, text: str) -> None:
  """A reader sees all of it or nothing."""
  part = path.with_name(path.name + ".part")
  part.write_text(text)
  part.replace(path)


def _main(argv: Sequence[str]) -> int:
  if len(argv) > 1:
    _say(f"error: unexpected argument {argv[1]!r}; flags are written --name=value, and --help lists them")
    return 2
  # How long the engine's thread may wait for the interpreter while the loop's writes messages. The default, 5 ms, is
  # more than a step of a small model takes; with 64 streams this gave about 10 % more tokens a second.
  sys.setswitchinterval(0.0005)
  memory.few_arenas()
  gc.disable()  # until the server is ready: what is imported and traced is not garbage
  _LINES.set_up(flags.LOG_FORMAT.value)
  _say("configuration:\n" + "\n".join(f"  {line}" for line in flags.configuration()))
  if exposure := flags.exposure():
    _say(f"warning: {exposure}")
  if narrowness := flags.narrowness():
    _say(f"note: {narrowness}")
  try:
    return asyncio.run(_serve(), loop_factory=uvloop.new_event_loop)
  except EngineError as error:
    _say(f"error: {' '.join(str(error).split())}")
    return 1
  except OSError as error:
    _say(f"error: {error.filename or ''}: {error.strerror or error}")
    return 1
  except SystemExit as error:
    # A task's: nothing of ours ends the program this way.
    _say(f"error: something called exit({error.code}) in the server")
    return 1
  finally:
    threading.excepthook = threading.__excepthook__  # lets the host go, while it still can


def main() -> None:
  """Entry point; ends the process."""
  app.run(_main, flags_parser=_parse)


if __name__ == "__main__":
  main()
