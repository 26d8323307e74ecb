"""The server program: the one place where all parts are put together. Holds no logic of its own.

    python -m server.main --model=DIR --port=50051

Signals: SIGTERM and SIGINT drain (readiness goes first, what runs may finish), a second one ends at once; SIGUSR1
switches the step trace on and off. Exit codes: 0 after a drain, 1 when the start failed or the engine died, 2 for bad
flags.
"""

import asyncio
from collections.abc import Callable, Sequence
import concurrent.futures
import gc
import os
import pathlib
import signal
import sys
import threading
from typing import Any

from absl import app
import uvloop

from engine.config import EngineConfig
from engine.engine import Emit, Engine
from engine.errors import ConfigError, EngineError
from extensions.vllm_api.composition import VllmComposition
from server import flags
from server.errors import NotConfigured, Starting
from server.flags import ProgramSettings
from server.generation.engine_client import LocalEngine
from server.generation.generations import Generations
from server.generation.sampling_defaults import FILE, SamplingDefaults, describe_defaults, read_sampling_defaults
from server.generation.serving_state import Backend
from server.lifecycle import watchdog
from server.lifecycle.composition import Composition
from server.lifecycle.front_end_group import FrontEndGroup, TextOptions
from server.lifecycle.host import Host, HostOptions
from server.rpc.admin_service import AdminActions
from server.security import descriptor_limit, memory_limit
from server.telemetry import log_lines, tracing
from server.text.tokenizer import Tokenizer
from server.version import server_version

# Reading a tokenizer keeps everything else from running; what takes longer is not one.
_TOKENIZER_LIMIT_S = 120.0

_LINES = log_lines.Lines()
_say = _LINES.say


def _parse(argv: Sequence[str], program: str = "server.main") -> list[str]:
  try:
    return flags.parse_flags(argv, program)
  except ConfigError as error:
    _say(f"error: {error}")
    sys.exit(2)


def _progress(what: str, done: int, total: int) -> None:
  _say(f"{what}: {done} of {total}")


class _Trace:
  """The step trace's switch."""

  def __init__(self, path: str):
    self.engine: Engine | None = None
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
  future = concurrent.futures.Future()

  def run() -> None:
    try:
      future.set_result(work())
    except BaseException as error:
      future.set_exception(error)

  threading.Thread(target=run, name="build", daemon=True).start()
  return asyncio.wrap_future(future)


def _build(program: ProgramSettings, emit: Emit, composition: Composition):
  """The engine and the tokenizer, if the model has one."""
  composition.before_load()
  engine_class = composition.engine_class
  settings = flags.engine_setting_values()
  if program.fake_device:
    from extensions.fake_device.build import build_fake

    step_s = program.fake_step_ms / 1000
    return build_fake(program.model, settings, step_s, emit, engine_class=engine_class), _load_tokenizer(program)
  # Here and not above: JAX takes seconds to import, and a bad flag should not have to wait for it.
  from engine.device.options import BuildOptions
  from extensions.disaggregated.build import build_any

  # First, because it is quick: a broken tokenizer should not be found after minutes of compiling.
  tokenizer = _load_tokenizer(program)
  num_token_ids = tokenizer.num_token_ids if tokenizer is not None else 0
  options = BuildOptions(program.model, num_token_ids=num_token_ids, **settings)
  source = None
  if program.executable_bundle:
    from extensions.executable_bundle.bundle import Bundle

    source = Bundle(program.executable_bundle, options.batching)
  return build_any(options, _progress, emit, engine_class=engine_class, source=source), tokenizer


def _load_tokenizer(program: ProgramSettings) -> Tokenizer | None:
  folder = pathlib.Path(program.model)
  if not (folder / "tokenizer.json").is_file():
    return None
  _say(f"reading {folder / 'tokenizer.json'}")
  with watchdog.limit_seconds(_TOKENIZER_LIMIT_S):
    tokenizer = Tokenizer(folder, max_prompt_bytes=program.max_prompt_bytes)
  if tokenizer.chat_template_error:
    _say(f"warning: no chats are served: {' '.join(tokenizer.chat_template_error.split())}")
  return tokenizer


def _sampling_defaults(program: ProgramSettings) -> SamplingDefaults:
  """The model's own, unless they are not wanted."""
  if program.generation_config == "none":
    return {}
  defaults = read_sampling_defaults(pathlib.Path(program.model))
  if defaults:
    _say(f"sampling defaults of {FILE}: {describe_defaults(defaults)} (--generation_config=none leaves them out)")
  return defaults


def _make_host(
  program: ProgramSettings,
  options: HostOptions,
  admin: AdminActions,
  defaults: SamplingDefaults,
  composition: Composition,
) -> Host | FrontEndGroup:
  if not program.frontend_processes:
    return Host(options, admin, may_exit=True, composition=composition)
  texts = TextOptions(
    model_dir=program.model,
    max_prompt_bytes=program.max_prompt_bytes,
    otlp_endpoint=program.otlp_endpoint,
    log_format=program.log_format,
    defaults=defaults,
  )
  return FrontEndGroup(program.frontend_processes, options, texts, admin, may_exit=True, composition=composition)


async def _serve(composition: Composition) -> int:
  """From flags to exit code."""
  program = flags.read_settings(ProgramSettings)
  trace = _Trace(program.trace_file)
  options = flags.host_options()
  processes = program.frontend_processes
  descriptor_limit.check_descriptor_limit(
    options.share(processes) if processes else options, descriptor_limit.raise_descriptor_limit()
  )
  served: EngineConfig | None = None  # once the model is loaded
  defaults = _sampling_defaults(program)
  actions = AdminActions(flags=lambda: flags.configuration_lines(served), set_trace=trace.set)
  host = _make_host(program, options, actions, defaults, composition)
  watchdog.watch_threads(host.fail)
  if program.otlp_endpoint:
    tracing.check_otlp_endpoint(program.otlp_endpoint)
  for port_file in (program.port_file, program.http_port_file):
    if port_file:
      _check_port_file(pathlib.Path(port_file))
  loop = asyncio.get_running_loop()
  for number in (signal.SIGTERM, signal.SIGINT):
    loop.add_signal_handler(number, host.request_stop)
  port = await host.start_listening()
  address = f"{options.host}:{port}"
  _say(f"listening on {address}, loading {program.model}")
  if host.http_port >= 0:
    _say(f"HTTP on {options.http_host or options.host}:{host.http_port}")
  if host.metrics_port >= 0:
    _say(f"metrics on {options.http_host or options.host}:{host.metrics_port}")
  if host.admin_port >= 0:
    _say(f"admin service on {options.admin_host}:{host.admin_port}")
  stopped = asyncio.create_task(host.wait_stopped())

  building = _start_thread(lambda: _build(program, host.emit, composition))
  await asyncio.wait((building, stopped), return_when=asyncio.FIRST_COMPLETED)
  if stopped.done():
    # A compilation cannot be interrupted, and taking down the interpreter under it may crash.
    _say("stopped while starting")
    os._exit(stopped.result())
  try:
    built, tokenizer = building.result()
  except BaseException:
    host.request_stop()
    await stopped
    raise
  name = program.served_model_name or built.model_name
  engine = LocalEngine(built.engine, lambda: built.runner.compiles_after_ready)
  trace.engine, served = built.engine, built.config
  if program.trace_file and program.trace_at_start:
    trace.toggle()
  loop.add_signal_handler(signal.SIGUSR1, trace.toggle)
  # What the start has made stays: the collector need not look at it again while requests wait.
  gc.collect()
  gc.freeze()
  gc.enable()
  tracer = None
  if isinstance(host, FrontEndGroup):
    await host.serve(engine, model=name, tokenizer=tokenizer, load_s=built.load_s, warmup_s=built.warmup_s)
  else:
    if program.otlp_endpoint:
      tracer = tracing.Tracer(program.otlp_endpoint, name, server_version())
    generations = Generations(engine, tokenizer, tracer=tracer)
    await host.serve(
      Backend(
        model=name,
        engine=engine,
        tokenizer=tokenizer,
        generations=generations,
        load_s=built.load_s,
        warmup_s=built.warmup_s,
        defaults=defaults,
      )
    )
  if program.http_port_file and host.http_port >= 0:
    _write_whole(pathlib.Path(program.http_port_file), f"{host.http_port}\n")
  if program.port_file:
    _write_whole(pathlib.Path(program.port_file), f"{port}\n")
  config = built.config
  _say(
    f"model {name}: {config.vocab_size} tokens, length {config.max_model_len}, "
    f"{'with' if tokenizer else 'without'} tokenizer; KV {config.num_blocks} blocks of {config.block_size}; steps of "
    f"{', '.join(map(str, config.token_budgets))} tokens; "
    f"attention {built.attention}, matmul {built.matmul}, quantization {built.quantization}; "
    f"loaded in {built.load_s:.1f} s, compiled in {built.warmup_s:.1f} s"
  )
  if built.lowered:
    _say(f"note: {built.lowered}")
  for warning in built.warnings:
    _say(f"warning: {warning}")
  _say(built.ladder.reason)
  if narrowness := flags.describe_narrowness(config.max_num_seqs):
    _say(f"note: {narrowness}")
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


def _main(argv: Sequence[str], compose: Callable[[], Composition] = VllmComposition) -> int:
  if len(argv) > 1:
    _say(f"error: unexpected argument {argv[1]!r}; flags are written --name=value, and --help lists them")
    return 2
  # How long the engine's thread may wait for the interpreter while the loop's writes messages. The default, 5 ms, is
  # more than a step of a small model takes; with 64 streams this gave about 10 % more tokens a second.
  sys.setswitchinterval(0.0005)
  memory_limit.limit_malloc_arenas()
  gc.disable()  # until the server is ready: what is imported and traced is not garbage
  _LINES.set_up(flags.read_settings(ProgramSettings).log_format)
  _say("configuration:\n" + "\n".join(f"  {line}" for line in flags.configuration_lines()))
  if exposure := flags.describe_exposure():
    _say(f"warning: {exposure}")
  try:
    return asyncio.run(_serve(compose()), loop_factory=uvloop.new_event_loop)
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


def main(compose: Callable[[], Composition] = VllmComposition, program: str = "server.main") -> None:
  """Entry point; ends the process.

  Args:
    compose: what is added to the core, made when the flags are read. May raise ConfigError.
    program: that program's module, for its help.
  """
  app.run(lambda argv: _main(argv, compose), flags_parser=lambda argv: _parse(argv, program))


if __name__ == "__main__":
  main()
