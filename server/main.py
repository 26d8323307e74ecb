"""The server program: composes all parts. Holds no logic of its own.

    python -m server.main --model=DIR --port=50051

SIGTERM and SIGINT drain: readiness ends first, then running requests finish; a second signal exits at once. SIGUSR1
switches the step trace on and off. Exit codes: 0 after a drain, 1 if the start failed or the engine died, 2 for bad
flags.
"""

import gc

if __name__ == "__main__":
  gc.disable()  # until the server is ready: imports and traces leave no garbage, and collections among them take 50 ms

import asyncio
from collections.abc import Callable, Sequence
import concurrent.futures
import dataclasses
import os
import pathlib
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

from absl import app
import uvloop

from engine import accelerator
from engine.config import EngineConfig
from engine.engine import Emit, Engine
from engine.errors import ConfigError, EngineError, InvalidRequest
from engine.free_memory import read_free_bytes
from engine.model_folder import count_weight_bytes
from engine.prefix_events import PrefixEventLog
from extensions.prefill_decode.composition import RoleComposition
from pallas_kernels import huge_pages
from server import flags
from server.errors import NotConfigured, Starting
from server.flags import ProgramSettings
from server.generation.adapter_loader import AdapterLoader, check_adapter_name, parse_lora_modules
from server.generation.generations import Generations
from server.generation.sampling_defaults import FILE, SamplingDefaults, describe_defaults, read_sampling_defaults
from server.generation.serving_state import Backend
from server.host_options import ClusterSettings
from server.lifecycle import watchdog
from server.lifecycle.composition import Composition
from server.lifecycle.front_end_group import FrontEndGroup, TextOptions
from server.lifecycle.host import Host, HostOptions
from server.lifecycle.start_report import StartReport, served_addresses
from server.model_source.download_watch import DownloadWatch
from server.model_source.resolve_model import resolve_model_folder
from server.rpc.admin_service import AdminActions
from server.security import descriptor_limit, memory_limit
from server.telemetry import log_lines, tracing
from server.telemetry.throughput_lines import ThroughputLines
from server.text.tokenizer import Tokenizer, load_tokenizer, read_chat_template
from server.version import server_version

if TYPE_CHECKING:
  from extensions.kv_events.event_publisher import EventPublisher
  from extensions.multi_host.leader import Leader

# Reading a tokenizer blocks the interpreter; no real tokenizer takes longer.
_TOKENIZER_LIMIT_S = 120.0
# A stopped download ends at its next piece, or at its connection's timeout.
_DOWNLOAD_GRACE_S = 3.0

_LINES = log_lines.Lines()
_say = _LINES.say


def _parse(argv: Sequence[str], program: str = "server.main") -> list[str]:
  try:
    return flags.parse_flags(argv, program)
  except ConfigError as error:
    _say(f"error: {error}")
    sys.exit(2)


class _Trace:
  """Switches the step trace on and off."""

  def __init__(self, path: str):
    self.engine: Engine | None = None
    self._path = path
    self._on = False

  def toggle(self) -> None:
    """Starts or ends a recording; the signal handler."""
    try:
      self.set(not self._on)
    except EngineError as error:
      _say(f"SIGUSR1: {error}")

  def set(self, on: bool) -> str:
    """Starts a new recording, or ends it; returns the file's path.

    Raises:
      NotConfigured: --trace_file is not set, or cannot be written.
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
  """Runs `work` in a daemon thread, which, unlike an executor's, does not keep the process from exiting."""
  future = concurrent.futures.Future()

  def run() -> None:
    try:
      future.set_result(work())
    except BaseException as error:
      future.set_exception(error)

  threading.Thread(target=run, name="build", daemon=True).start()
  return asyncio.wrap_future(future)


def _build(
  program: ProgramSettings, emit: Emit, composition: Composition, report: StartReport, leader: "Leader | None"
):
  """Builds the engine; returns it and the model's tokenizer, or None."""
  composition.before_load()
  engine_class = composition.engine_class
  settings = flags.engine_setting_values()
  if program.fake_device:
    from extensions.fake_device.build import build_fake

    step_s = program.fake_step_ms / 1000
    built = build_fake(program.model, settings, step_s, emit, engine_class=engine_class, report_fact=report.tell_fact)
    _load_modules(program, built, report)
    return built, _load_tokenizer(program, report)
  if leader is not None:
    report.enter_stage("waiting for the other hosts")
    leader.gather_hosts(settings)
  # Imported here because JAX takes seconds to import, and a bad flag should fail at once.
  report.enter_stage("importing JAX")
  _fetch_memory(program, settings)
  from engine.device.options import BuildOptions
  from extensions.disaggregated.build import build_any

  gc.freeze()  # the collection before ready, 190 ms over all objects, need not visit what the imports made
  # First, because it is quick: a broken tokenizer should fail before minutes of compilation.
  tokenizer = _load_tokenizer(program, report)
  if leader is not None:
    from extensions.multi_host.build import join_devices

    report.enter_stage("connecting the hosts' devices")
    join_devices(leader.place, leader.start_timeout_s)
  report.enter_stage("finding devices and reading the model's tensor list")
  num_token_ids = tokenizer.num_token_ids if tokenizer is not None else 0
  options = BuildOptions(program.model, num_token_ids=num_token_ids, **settings)
  if leader is not None:
    from extensions.multi_host.build import build_leader

    built = build_leader(
      options, leader, report.tell_progress, emit, engine_class=engine_class, report_fact=report.tell_fact
    )
    return built, tokenizer
  source = None
  if program.executable_bundle:
    from extensions.executable_bundle.bundle import Bundle

    source = Bundle(program.executable_bundle, options.batching)
  try:
    built = build_any(
      options, report.tell_progress, emit, engine_class=engine_class, source=source, report_fact=report.tell_fact
    )
  finally:
    huge_pages.end_fetch()
  _load_modules(program, built, report)
  return built, tokenizer


def _fetch_memory(program: ProgramSettings, settings: dict[str, Any]) -> None:
  """Begins to touch memory for weights on another thread, if this start will load such weights as its files hold.

  Only a guess: weights find memory without it, and what they leave returns to the system.
  """
  is_other = settings["quantization"] not in ("auto", "none") or settings["matmul"] == "xla"
  platforms = os.environ.get("JAX_PLATFORMS", "")
  if settings["random_weights"] or is_other or platforms not in ("", "cpu") or (os.cpu_count() or 1) < 2:
    return
  if not platforms:
    machine = accelerator.read_machine()
    if machine.nvidia_nodes or machine.tpu_nodes:
      return
  num_bytes, free = count_weight_bytes(pathlib.Path(program.model)), read_free_bytes()
  if free is not None and num_bytes <= free // 2:
    huge_pages.fetch_ahead(num_bytes)


def _load_modules(program: ProgramSettings, built: Any, report: StartReport) -> None:
  """Loads the adapters of --lora_modules into an engine whose thread has not started. Raises ConfigError."""
  loads = []
  for name, folder in parse_lora_modules(program.lora_modules):
    report.enter_stage(f"loading the adapter {name}")
    try:
      check_adapter_name(name, program.served_model_name or built.model_name)
      built.engine.check_adapter_load(name)
      loads.append(built.engine.load_adapter(name, built.read_adapter(folder)))
    except InvalidRequest as error:
      raise ConfigError(f"lora_modules: {error}") from None
  if loads:
    built.engine.step()  # takes the loads from the inbox
  for load in loads:
    try:
      load.result(timeout=0)
    except ValueError as error:
      raise ConfigError(f"lora_modules: an adapter does not fit the model: {error}") from None
  if loads:
    _say(f"adapters  {', '.join(adapter.name for adapter in built.engine.adapters())}")


def _load_tokenizer(program: ProgramSettings, report: StartReport) -> Tokenizer | None:
  folder = pathlib.Path(program.model)
  report.enter_stage("reading tokenizer.json")
  report.tell_detail(f"reading {folder / 'tokenizer.json'}")
  with watchdog.limit_seconds(_TOKENIZER_LIMIT_S):
    tokenizer = load_tokenizer(folder, max_prompt_bytes=program.max_prompt_bytes, chat_template=program.chat_template)
  if tokenizer is not None and tokenizer.chat_template_error:
    _say(f"warning: no chats are served: {' '.join(tokenizer.chat_template_error.split())}")
  return tokenizer


def _sampling_defaults(program: ProgramSettings, report: StartReport) -> SamplingDefaults:
  """Returns the model's own sampling defaults, unless --generation_config=none."""
  if program.generation_config == "none":
    return {}
  defaults = read_sampling_defaults(pathlib.Path(program.model))
  if defaults:
    report.tell_detail(
      f"sampling defaults of {FILE}: {describe_defaults(defaults)} (--generation_config=none leaves them out)"
    )
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
    chat_template=program.chat_template,
    otlp_endpoint=program.otlp_endpoint,
    log_format=program.log_format,
    defaults=defaults,
  )
  return FrontEndGroup(program.frontend_processes, options, texts, admin, may_exit=True, composition=composition)


async def _find_model(program: ProgramSettings, report: StartReport) -> pathlib.Path:
  """Returns the model's folder; downloads it if needed. Uses a thread, so that a signal need not wait for a server."""
  watch = DownloadWatch(_say, report.tell_progress)
  report.enter_stage(f"looking for {program.model}")
  finding = _start_thread(
    lambda: resolve_model_folder(
      program.model,
      revision=program.revision,
      cache_dir=program.model_cache_dir,
      needs_weights=not (program.fake_device or flags.engine_setting_values()["random_weights"]),
      watch=watch,
    )
  )
  loop = asyncio.get_running_loop()
  stopped = asyncio.Event()
  for number in (signal.SIGTERM, signal.SIGINT):
    loop.add_signal_handler(number, stopped.set)
  stopping = asyncio.ensure_future(stopped.wait())
  await asyncio.wait((finding, stopping), return_when=asyncio.FIRST_COMPLETED)
  stopping.cancel()
  if stopped.is_set():
    watch.request_stop()
    await asyncio.wait((finding,), timeout=_DOWNLOAD_GRACE_S)  # time to clean up
    report.end_report()
    _say("stopped while looking for the model")
    os._exit(0)
  return finding.result()


async def _serve(composition: Composition, report: StartReport) -> int:
  """Starts the server from the flags, and serves; returns the exit code."""
  program = flags.read_settings(ProgramSettings)
  if program.chat_template:
    read_chat_template(program.chat_template, {}, program.max_prompt_bytes)
  program = dataclasses.replace(program, model=str(await _find_model(program, report)))
  trace = _Trace(program.trace_file)
  options = flags.host_options()
  cluster, place, leader = flags.read_settings(ClusterSettings), None, None
  if cluster.has_several_hosts:
    from extensions.multi_host.cluster_place import find_place

    place = find_place(cluster)
    if not place.is_leader:
      from extensions.multi_host.follower_process import follow

      code = await follow(program, options, cluster, place, _load_tokenizer(program, report), report, _say)
      watchdog.exit_now(code)  # not finalized: JAX would wait for the other hosts
  processes = program.frontend_processes
  descriptor_limit.check_descriptor_limit(
    options.share(processes) if processes else options, descriptor_limit.raise_descriptor_limit()
  )
  served: EngineConfig | None = None  # set when the model is loaded
  defaults = _sampling_defaults(program, report)
  actions = AdminActions(flags=lambda: flags.configuration_lines(served), set_trace=trace.set)
  host = _make_host(program, options, actions, defaults, composition)
  watchdog.watch_threads(host.fail)
  if place is not None:
    from extensions.multi_host.leader import make_leader

    leader = make_leader(place, cluster, program.model, _say, host)
    of_hosts, of_others = leader.collect_metrics, composition.collect_metrics
    composition.collect_metrics = lambda: (*of_others(), *of_hosts())
  if program.otlp_endpoint:
    tracing.check_otlp_endpoint(program.otlp_endpoint)
  publisher = _open_kv_events(program, composition)
  for port_file in (program.port_file, program.http_port_file):
    if port_file:
      _check_port_file(pathlib.Path(port_file))
  loop = asyncio.get_running_loop()
  for number in (signal.SIGTERM, signal.SIGINT):
    loop.add_signal_handler(number, host.request_stop)
  report.enter_stage(f"starting {processes} front end processes" if processes else "binding the ports")
  port = await host.start_listening()
  addresses = served_addresses(options, port, host.http_port, host.metrics_port)
  report.tell_detail(f"listening on {addresses.grpc}, loading {program.model}")
  if host.admin_port >= 0:
    _say(f"admin     {options.admin_host}:{host.admin_port}")
  stopped = asyncio.create_task(host.wait_stopped())

  building = _start_thread(lambda: _build(program, host.emit, composition, report, leader))
  await asyncio.wait((building, stopped), return_when=asyncio.FIRST_COMPLETED)
  if stopped.done():
    report.end_report()
    # A compilation cannot be interrupted, and finalizing the interpreter during one may crash.
    _say("stopped while starting")
    if leader is not None and not stopped.result():
      leader.dismiss_hosts()
    os._exit(stopped.result())
  try:
    built, tokenizer = building.result()
  except BaseException as error:
    if leader is not None:
      leader.report_fault(str(error))
    host.request_stop()
    await stopped
    if leader is not None and isinstance(error, EngineError):
      report.end_report()
      _say(f"error: {' '.join(str(error).split())}")
      watchdog.exit_now(1)  # not finalized: JAX would wait for the other hosts
    raise
  name = program.served_model_name or built.model_name
  loader = AdapterLoader(built.engine, built.read_adapter, model=name, lora_dir=program.lora_dir)
  engine = composition.make_client(built.engine, lambda: built.runner.compiles_after_ready, loader)
  trace.engine, served = built.engine, built.config
  if publisher is not None:
    _start_kv_events(program, publisher, built, name)
  report.enter_stage("starting the engine")
  if program.trace_file and program.trace_at_start:
    trace.toggle()
  loop.add_signal_handler(signal.SIGUSR1, trace.toggle)
  # The start's objects live as long as the process; freezing them keeps collections short.
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
  report.tell_detail(built.ladder.reason)
  narrowness = flags.describe_narrowness(built.config.max_num_seqs)
  no_tokenizer = "" if tokenizer else "the folder has no tokenizer.json: requests are token ids, and there are no chats"
  report.tell_notes((no_tokenizer, narrowness, *built.fallbacks, built.deterministic), built.warnings)
  report.tell_ready(built.load_s, built.warmup_s, addresses)
  throughput = _start_throughput_lines(built.engine, program.throughput_line_s)
  code = await stopped
  if throughput is not None:
    throughput.cancel()
  if publisher is not None:
    publisher.stop_publishing()
  if tracer is not None:
    tracer.shutdown()
  if leader is not None and not code:
    leader.dismiss_hosts()
  _say(f"stopped, exit code {code}")
  if code or leader is not None:
    # The failed part may block the interpreter's finalization, or JAX's wait for other hosts.
    watchdog.exit_now(code)
  watchdog.exit_soon(options.watchdog_grace_s)
  return code


def _open_kv_events(program: ProgramSettings, composition: Composition) -> "EventPublisher | None":
  """Opens the sockets of --kv_events_endpoint; None without it. Raises ConfigError."""
  if not program.kv_events_endpoint:
    return None
  from extensions.kv_events.event_publisher import EventPublisher

  publisher = EventPublisher(program.kv_events_endpoint, program.kv_events_replay_endpoint)
  of_others = composition.collect_metrics
  composition.collect_metrics = lambda: (*of_others(), *publisher.collect_metrics())
  return publisher


def _start_kv_events(program: ProgramSettings, publisher: "EventPublisher", built: Any, name: str) -> None:
  """Starts to publish the prefix cache's changes."""
  log = PrefixEventLog(built.config.num_blocks)
  built.engine.log_prefix_events(log)
  topic = program.kv_events_topic or f"kv@{socket.gethostname()}@{name}"
  publisher.start_publishing(log, built.config.block_size, topic)


def _start_throughput_lines(engine: Engine, period_s: float) -> asyncio.Task | None:
  if not period_s:
    return None
  return asyncio.create_task(ThroughputLines(engine.stats, engine.now, _say).run(period_s))


def _check_port_file(path: pathlib.Path) -> None:
  """Removes a stale port file. Raises ConfigError if the file cannot be written, before minutes of loading."""
  if not os.access(path.parent, os.W_OK | os.X_OK) or path.is_dir():
    raise ConfigError(f"{path} cannot be written; give --port_file and --http_port_file in a folder that can be")
  path.unlink(missing_ok=True)


def _write_whole(path: pathlib.Path, text: str) -> None:
  """Writes a file that a reader sees whole or not at all."""
  part = path.with_name(path.name + ".part")
  part.write_text(text)
  part.replace(path)


def _main(argv: Sequence[str], compose: Callable[[], Composition] = RoleComposition) -> int:
  if len(argv) > 1:
    _say(f"error: unexpected argument {argv[1]!r}; flags are written --name=value, and --help lists them")
    return 2
  # The longest that the engine's thread waits for the interpreter while the event loop writes messages. The default
  # of 5 ms exceeds a small model's step; at 64 streams, this value raises output tokens/s by about 10%.
  sys.setswitchinterval(0.0005)
  memory_limit.limit_malloc_arenas()
  gc.disable()  # a program that imports this module may not have done it
  program = flags.read_settings(ProgramSettings)
  _LINES.set_up(program.log_format)
  report = StartReport(_LINES, program.verbose)
  report.tell_detail("configuration:\n" + "\n".join(f"  {line}" for line in flags.configuration_lines()))
  if exposure := flags.describe_exposure():
    _say(f"warning: {exposure}")
  try:
    with report:
      return asyncio.run(_serve(compose(), report), loop_factory=uvloop.new_event_loop)
  except EngineError as error:
    _say(f"error: {' '.join(str(error).split())}")
    return 1
  except OSError as error:
    _say(f"error: {error.filename or ''}: {error.strerror or error}")
    return 1
  except SystemExit as error:
    # A task raised it: the server's own code never ends the program this way.
    _say(f"error: something called exit({error.code}) in the server")
    return 1
  finally:
    threading.excepthook = threading.__excepthook__  # releases the host before finalization


def main(compose: Callable[[], Composition] = RoleComposition, program: str = "server.main") -> None:
  """Entry point; ends the process.

  Args:
    compose: makes the additions to the core when the flags are parsed. May raise ConfigError.
    program: the program's module or command, for its help text.
  """
  app.run(lambda argv: _main(argv, compose), flags_parser=lambda argv: _parse(argv, program))


if __name__ == "__main__":
  main()
