"""The server program: flags, and the one place where all parts are put together. Holds no logic of its own.

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

from absl import app, flags

from engine.admission import ADMISSION
from engine.batching import BATCHING
from engine.checked import CheckedEngine
from engine.config import PREFIX_CACHE_SCOPES, EngineConfig
from engine.disaggregated import AnyEngine
from engine.engine import Emit, Engine
from engine.errors import ConfigError, EngineError
from engine.fake_build import build_fake
from engine.faults import FaultPlan, Injector, inject_engine
from engine.policy import POLICIES
from server import logs, tracing, watchdog
from server.admin import AdminActions
from server.errors import NotConfigured, Starting
from server.faults import inject_front_end, load_plan
from server.frontends import Frontends, TextOptions
from server.generation import Generations
from server.host import Host, HostOptions, is_local
from server.http.tool_calls import PARSERS
from server.port import LocalEngine
from server.service import Backend, server_version
from server.tokenizer import Tokenizer

_ROOT = pathlib.Path(__file__).resolve().parent.parent

_DEFAULT_HTTP_PORT = 8000
_NO_FAULTS = '{"faults": []}'
# Reading a tokenizer keeps everything else from running; what takes longer is not one.
_TOKENIZER_LIMIT_S = 120.0

# Names are those of BuildOptions, EngineConfig and HostOptions; texts say what a user must know to choose.
_MODEL = flags.DEFINE_string("model", str(_ROOT / "models" / "demo"), "Model folder, of Hugging Face or of Sluice.")
_SERVED_MODEL_NAME = flags.DEFINE_string("served_model_name", "", "What clients call it; empty: the model's own name.")
_BUILD_FLAGS = (
  flags.DEFINE_bool(
    "random_weights", False, "Draw the weights instead of reading them, to measure a shape: see models/shapes."
  ),
  flags.DEFINE_enum(
    "dtype", "auto", ["auto", "float32", "bfloat16"], "Of weights, activations and KV; auto: float32 on CPU."
  ),
  flags.DEFINE_enum(
    "attention",
    "auto",
    ["auto", "reference", "cpu", "gpu", "tpu"],
    "Paged attention; auto: the platform's own kernels.",
  ),
  flags.DEFINE_enum(
    "matmul", "auto", ["auto", "xla", "packed"], "Weights as they are, or packed at load; auto: packed on one CPU."
  ),
  flags.DEFINE_integer("kv_cache_mb", 0, "MiB of KV; 0: what is free (on CPU 256).", lower_bound=0),
  flags.DEFINE_integer("num_blocks", 0, "KV pool in blocks, instead of --kv_cache_mb; 0: by memory.", lower_bound=0),
  flags.DEFINE_integer("block_size", 0, "Tokens a KV block; 0: what the attention likes best.", lower_bound=0),
  flags.DEFINE_integer("max_num_seqs", EngineConfig.max_num_seqs, "Sequences running at once.", lower_bound=1),
  flags.DEFINE_integer(
    "max_model_len", 0, "Longest prompt and output together, in tokens; 0: the model's.", lower_bound=0
  ),
  flags.DEFINE_integer("prefill_chunk", EngineConfig.prefill_chunk, "Most prompt tokens a step takes.", lower_bound=1),
  flags.DEFINE_integer(
    "max_queued_requests", EngineConfig.max_queued_requests, "More are refused, RESOURCE_EXHAUSTED.", lower_bound=1
  ),
  flags.DEFINE_integer(
    "max_queued_tokens", EngineConfig.max_queued_tokens, "Prompt tokens that may wait.", lower_bound=1
  ),
  flags.DEFINE_float(
    "queue_timeout_s", EngineConfig.queue_timeout_s, "Longest wait in the queue; 0: no limit.", lower_bound=0
  ),
  flags.DEFINE_float(
    "request_timeout_s", EngineConfig.request_timeout_s, "Longest a request may take; 0: no limit.", lower_bound=0
  ),
  flags.DEFINE_enum("policy", EngineConfig.policy, sorted(POLICIES), "Who goes first."),
  flags.DEFINE_enum(
    "batching", EngineConfig.batching, BATCHING, "How requests form batches; others than chunked to compare."
  ),
  flags.DEFINE_float(
    "dynamic_window_s",
    EngineConfig.dynamic_window_s,
    "With --batching=dynamic: longest wait for company.",
    lower_bound=0,
  ),
  flags.DEFINE_integer(
    "dynamic_max_batch", EngineConfig.dynamic_max_batch, "With --batching=dynamic: most rows of a batch.", lower_bound=1
  ),
  flags.DEFINE_enum(
    "admission", EngineConfig.admission, ADMISSION, "goodput also refuses what would miss its deadline."
  ),
  flags.DEFINE_float(
    "sjf_aging_tokens_per_s",
    EngineConfig.sjf_aging_tokens_per_s,
    "With --policy=sjf: max_tokens that a second of waiting is worth.",
    lower_bound=0,
  ),
  flags.DEFINE_float(
    "tier_share",
    EngineConfig.tier_share,
    "With --policy=tiers: part of slots and prompt tokens that batch work (priority above 0) may not take.",
    lower_bound=0,
    upper_bound=0.99,
  ),
  flags.DEFINE_float(
    "tier_delay_s",
    EngineConfig.tier_delay_s,
    "With --policy=tiers: how much later an interactive request may come and go first.",
    lower_bound=0,
  ),
  flags.DEFINE_integer(
    "tier_long_context",
    EngineConfig.tier_long_context,
    "With --policy=tiers: batch rows of more tokens make way for interactive ones; 0: none.",
    lower_bound=0,
  ),
  flags.DEFINE_float(
    "aging_s", EngineConfig.aging_s, "Seconds of waiting worth one unit of priority; 0: none.", lower_bound=0
  ),
  flags.DEFINE_bool("enable_prefix_caching", EngineConfig.enable_prefix_caching, "Share KV of equal prefixes."),
  flags.DEFINE_enum(
    "prefix_cache_scope",
    EngineConfig.prefix_cache_scope,
    PREFIX_CACHE_SCOPES,
    "Between whom: requests of anybody, of one tenant, the outputs of one request, or nobody. Whoever shares can see, "
    "by time and by cached_tokens, what others have sent.",
  ),
  flags.DEFINE_float(
    "max_queued_share_per_tenant",
    EngineConfig.max_queued_share_per_tenant,
    "Part of --max_queued_requests and --max_queued_tokens that one tenant may hold; 1: all.",
    lower_bound=0.001,
    upper_bound=1,
  ),
  flags.DEFINE_integer("num_devices", 1, "Devices to spread the model over; 0: all.", lower_bound=0),
  flags.DEFINE_integer(
    "prefill_devices", 0, "With --batching=disaggregated: how many of them do prefill; 0: half.", lower_bound=0
  ),
  flags.DEFINE_string(
    "compile_cache_dir",
    str(pathlib.Path.home() / ".cache" / "sluice" / "programs"),
    "Where compiled steps are kept between starts; empty: nowhere.",
  ),
)
_TOKEN_BUDGETS = flags.DEFINE_list(
  "token_budgets",
  [str(tokens) for tokens in EngineConfig.token_budgets],
  "The ladder of step sizes, in tokens; one program is compiled for each.",
)
_HOST_FLAGS = (
  flags.DEFINE_string("host", HostOptions.host, "Address to bind. Beyond this machine, give it TLS and API keys."),
  flags.DEFINE_integer("port", HostOptions.port, "TCP port; 0: a free one.", lower_bound=0, upper_bound=65535),
  flags.DEFINE_integer("max_request_bytes", HostOptions.max_request_bytes, "Largest message taken.", lower_bound=1024),
  flags.DEFINE_integer("max_response_bytes", HostOptions.max_response_bytes, "Largest message sent.", lower_bound=1024),
  flags.DEFINE_integer(
    "max_metadata_bytes", HostOptions.max_metadata_bytes, "Largest metadata of a call.", lower_bound=1024
  ),
  flags.DEFINE_integer(
    "max_resident_mb",
    HostOptions.max_resident_mb,
    "Refuse new work while the process holds more MiB of memory, before the system kills it; 0: no limit.",
    lower_bound=0,
  ),
  flags.DEFINE_integer("max_concurrent_rpcs", HostOptions.max_concurrent_rpcs, "More are refused.", lower_bound=1),
  flags.DEFINE_integer(
    "max_concurrent_streams",
    HostOptions.max_concurrent_streams,
    "Calls at once on one connection; clients keep further ones to themselves.",
    lower_bound=1,
  ),
  flags.DEFINE_float(
    "keepalive_time_s", HostOptions.keepalive_time_s, "Ping a silent client this often.", lower_bound=1
  ),
  flags.DEFINE_float(
    "keepalive_timeout_s", HostOptions.keepalive_timeout_s, "Longest wait for a ping's answer.", lower_bound=1
  ),
  flags.DEFINE_float(
    "min_ping_interval_s", HostOptions.min_ping_interval_s, "Clients may ping this often.", lower_bound=0
  ),
  flags.DEFINE_float(
    "max_connection_idle_s",
    HostOptions.max_connection_idle_s,
    "Close connections without a call for this long; 0: never.",
    lower_bound=0,
  ),
  flags.DEFINE_float(
    "max_connection_age_s", HostOptions.max_connection_age_s, "Close older connections; 0: never.", lower_bound=0
  ),
  flags.DEFINE_float(
    "max_connection_age_grace_s",
    HostOptions.max_connection_age_grace_s,
    "How long the calls on such a connection may still take.",
    lower_bound=0,
  ),
  flags.DEFINE_float(
    "stream_stall_timeout_s",
    HostOptions.stream_stall_timeout_s,
    "Stop the work for a client that takes nothing for this long.",
    lower_bound=0.1,
  ),
  flags.DEFINE_float(
    "drain_delay_s",
    HostOptions.drain_delay_s,
    "After SIGTERM, go on accepting this long (about 15 behind a balancer).",
    lower_bound=0,
  ),
  flags.DEFINE_float(
    "drain_timeout_s", HostOptions.drain_timeout_s, "How long running requests may take to finish then.", lower_bound=0
  ),
  flags.DEFINE_float(
    "step_timeout_s",
    HostOptions.step_timeout_s,
    "An engine or an event loop that stands this long ends the server; 0: nothing is watched.",
    lower_bound=0,
  ),
  flags.DEFINE_float(
    "watchdog_grace_s",
    HostOptions.watchdog_grace_s,
    "From there to the hard end of the process, for clients to be told.",
    lower_bound=0.1,
  ),
  flags.DEFINE_bool("enable_reflection", HostOptions.enable_reflection, "Answer grpcurl and the like."),
  flags.DEFINE_bool(
    "enable_vllm_api", HostOptions.enable_vllm_api, "Also answer vllm.grpc.engine.VllmEngine, for routers made for it."
  ),
  flags.DEFINE_string(
    "api_key_file",
    HostOptions.api_key_file,
    "Keys, one a line with its tenant if it has one, # for comments; all calls but health need one. Read again when it "
    "changes.",
  ),
  flags.DEFINE_bool("open_reflection", HostOptions.open_reflection, "With API keys: reflection needs none."),
  flags.DEFINE_string("tls_cert_file", HostOptions.tls_cert_file, "PEM certificate; read again when it changes."),
  flags.DEFINE_string("tls_key_file", HostOptions.tls_key_file, "Its PEM key."),
  flags.DEFINE_string(
    "tls_client_ca_file", HostOptions.tls_client_ca_file, "PEM authorities; clients need a certificate of theirs."
  ),
  flags.DEFINE_string(
    "access_log", HostOptions.access_log, "File for a line of JSON a call, without prompt or output; - is stderr."
  ),
  flags.DEFINE_string("admin_host", HostOptions.admin_host, "Address of the admin service."),
  flags.DEFINE_integer(
    "admin_port", HostOptions.admin_port, "Its port; 0: a free one; -1: none.", lower_bound=-1, upper_bound=65535
  ),
  flags.DEFINE_string("admin_api_key_file", HostOptions.admin_api_key_file, "As --api_key_file, for it alone."),
  flags.DEFINE_bool(
    "debug_invariants",
    HostOptions.debug_invariants,
    "Check pages, queues and counts after every step, and end of the first that is wrong. For tests.",
  ),
  flags.DEFINE_bool("enable_channelz", HostOptions.enable_channelz, "gRPC's own statistics, on the admin port."),
)
_HTTP_FLAGS = (
  flags.DEFINE_string("http_host", HostOptions.http_host, "Address of the HTTP side; empty: that of --host."),
  flags.DEFINE_list(
    "http_allowed_hosts",
    [],
    "What the Host header may say; * is anything. Empty: local names alone, if the address is local and there are no "
    "API keys, so that no web page can reach the model through DNS; else anything.",
  ),
  flags.DEFINE_bool(
    "strict_requests", HostOptions.strict_requests, "Refuse unknown fields, instead of naming them in a header."
  ),
  flags.DEFINE_enum(
    "tool_call_parser",
    HostOptions.tool_call_parser,
    PARSERS,
    "How the model writes calls of tools; auto: by its chat template; none: they stay text.",
  ),
  flags.DEFINE_integer(
    "metrics_port",
    HostOptions.metrics_port,
    "Port for /metrics, /health and /ready alone, without TLS and keys; 0: a free one; -1: on the HTTP port only.",
    lower_bound=-1,
    upper_bound=65535,
  ),
  flags.DEFINE_bool(
    "vllm_metric_names", HostOptions.vllm_metric_names, "/metrics also has vLLM's names, for what was made for vLLM."
  ),
)
_OTLP_ENDPOINT = flags.DEFINE_string(
  "otlp_endpoint",
  "",
  "Send an OpenTelemetry span for each generation to this collector, such as http://127.0.0.1:4317; https:// is TLS. "
  "Needs the extra otel.",
)
_LOG_FORMAT = flags.DEFINE_enum("log_format", "text", logs.FORMATS, "Of the program's own lines on standard error.")
_HTTP_PORT = flags.DEFINE_integer(
  "http_port",
  None,
  f"Port of the OpenAI-compatible HTTP side; 0: a free one; -1: no HTTP. Default {_DEFAULT_HTTP_PORT}, or a free one "
  "with --port=0.",
  lower_bound=-1,
  upper_bound=65535,
)
_HTTP_PORT_FILE = flags.DEFINE_string("http_port_file", "", "File to write the HTTP port into, once ready.")
_MAX_PROMPT_BYTES = flags.DEFINE_integer("max_prompt_bytes", 1 << 20, "Longest text that is tokenized.", lower_bound=1)
_PORT_FILE = flags.DEFINE_string("port_file", "", "File to write the port into, once ready.")
_TRACE_FILE = flags.DEFINE_string("trace_file", "", "Step trace (JSON lines); each recording begins the file anew.")
_TRACE_AT_START = flags.DEFINE_bool("trace_at_start", True, "Record from ready on; false: wait for SIGUSR1.")


_FRONTEND_PROCESSES = flags.DEFINE_integer(
  "frontend_processes",
  0,
  "Processes for gRPC, HTTP and text, which then take no time from the engine's; limits of calls, connections and "
  "memory hold for each. 0: everything in one process.",
  lower_bound=0,
  upper_bound=64,
)
_FAKE_DEVICE = flags.DEFINE_bool(
  "fake_device",
  False,
  "No model: tokens are a hash of the tokens before, seed and parameters (engine/fake_device.py tells clients which). "
  "Of --model only the configuration and the tokenizer are read.",
)
_FAKE_STEP_MS = flags.DEFINE_float(
  "fake_step_ms", 0.0, "With --fake_device: how long a step takes, in ms.", lower_bound=0
)

_ENABLE_FAULT_INJECTION = flags.DEFINE_bool(
  "enable_fault_injection", False, "Let --fault_plan and the admin service's SetFaultPlan do harm. For tests."
)
_FAULT_PLAN = flags.DEFINE_string(
  "fault_plan", "", "With --enable_fault_injection: JSON, whose format is in engine/faults.py."
)

_LINES = logs.Lines()
_say = _LINES.say


def _parse(argv: Sequence[str]) -> list[str]:
  """absl's parsing, with errors in one line."""
  try:
    return flags.FLAGS(list(argv))
  except flags.Error as error:
    _say(f"error: {' '.join(str(error).removeprefix('ERROR:: ').split())}; --help lists the flags")
    sys.exit(2)


def _values(chosen: Sequence[flags.FlagHolder]) -> dict[str, Any]:
  return {flag.name: flag.value for flag in chosen}


def _token_budgets() -> tuple[int, ...]:
  try:
    return tuple(int(tokens) for tokens in _TOKEN_BUDGETS.value)
  except ValueError:
    raise ConfigError(
      f"token_budgets={','.join(_TOKEN_BUDGETS.value)} must be whole numbers; "
      "set --token_budgets, for example 8,16,32,64,128,256,384,512"
    ) from None


def _configuration() -> list[str]:
  """Lines that work as a --flagfile. No flag is a secret: keys are in files."""
  chosen = flags.FLAGS.get_key_flags_for_module(sys.modules[__name__])
  return [line for line in sorted(flag.serialize() for flag in chosen) if line]


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


def _http_port() -> int:
  """Whoever lets the system choose one port wants no fixed one beside it."""
  if _HTTP_PORT.value is not None:
    return _HTTP_PORT.value
  return 0 if flags.FLAGS.port == 0 else _DEFAULT_HTTP_PORT


def _injector() -> Injector | None:
  """What makes faults, if that is allowed."""
  if _ENABLE_FAULT_INJECTION.value:
    return Injector(load_plan(_FAULT_PLAN.value))
  if _FAULT_PLAN.value:
    raise ConfigError(
      f"fault_plan={_FAULT_PLAN.value} needs --enable_fault_injection, as it does harm; set it, or leave the plan out"
    )
  return None


def _build(emit: Emit, token_budgets: tuple[int, ...], injector: Injector | None):
  """The engine and the tokenizer, if the model has one."""
  settings: dict[str, Any] = {"token_budgets": token_budgets} | _values(_BUILD_FLAGS)
  if injector is not None:
    injector.hit("load")
  engine_class = CheckedEngine if flags.FLAGS.debug_invariants else Engine
  if _FAKE_DEVICE.value:
    step_s = _FAKE_STEP_MS.value / 1000
    return build_fake(_MODEL.value, settings, step_s, emit, engine_class=engine_class), _load_tokenizer()
  # Here and not above: JAX takes seconds to import, and a bad flag should not have to wait for it.
  from engine.device.build import BuildOptions
  from engine.device.build import build as build_engine

  # First, because it is quick: a broken tokenizer should not be found after minutes of compiling.
  tokenizer = _load_tokenizer()
  num_token_ids = tokenizer.num_token_ids if tokenizer is not None else 0
  options = BuildOptions(model_dir=_MODEL.value, num_token_ids=num_token_ids, **settings)
  return build_engine(options, _progress, emit, engine_class=engine_class), tokenizer


def _load_tokenizer() -> Tokenizer | None:
  folder = pathlib.Path(_MODEL.value)
  if not (folder / "tokenizer.json").is_file():
    return None
  _say(f"reading {folder / 'tokenizer.json'}")
  with watchdog.at_most(_TOKENIZER_LIMIT_S):
    return Tokenizer(folder, max_prompt_bytes=_MAX_PROMPT_BYTES.value)


def _make_host(options: HostOptions, admin: AdminActions) -> Host | Frontends:
  if not _FRONTEND_PROCESSES.value:
    return Host(options, admin, may_exit=True)
  texts = TextOptions(
    model_dir=_MODEL.value,
    max_prompt_bytes=_MAX_PROMPT_BYTES.value,
    otlp_endpoint=_OTLP_ENDPOINT.value,
    log_format=_LOG_FORMAT.value,
  )
  return Frontends(_FRONTEND_PROCESSES.value, options, texts, admin, may_exit=True)


async def _serve() -> int:
  """From flags to exit code."""
  trace = _Trace(_TRACE_FILE.value)
  options = HostOptions(**_values(_HOST_FLAGS), **_values(_HTTP_FLAGS), http_port=_http_port())
  injector = _injector()
  set_faults = None if injector is None else lambda text: injector.replace(FaultPlan.parse(text or _NO_FAULTS))
  host = _make_host(options, AdminActions(flags=_configuration, set_trace=trace.set, set_faults=set_faults))
  watchdog.watch_threads(host.fail)
  budgets = _token_budgets()
  if _OTLP_ENDPOINT.value:
    tracing.check(_OTLP_ENDPOINT.value)
  for port_file in (_PORT_FILE.value, _HTTP_PORT_FILE.value):
    if port_file:
      _check_port_file(pathlib.Path(port_file))
  loop = asyncio.get_running_loop()
  for number in (signal.SIGTERM, signal.SIGINT):
    loop.add_signal_handler(number, host.request_stop)
  port = await host.start()
  address = f"{flags.FLAGS.host}:{port}"
  _say(f"listening on {address}, loading {_MODEL.value}")
  if host.http_port >= 0:
    _say(f"HTTP on {flags.FLAGS.http_host or flags.FLAGS.host}:{host.http_port}")
  if host.metrics_port >= 0:
    _say(f"metrics on {flags.FLAGS.http_host or flags.FLAGS.host}:{host.metrics_port}")
  if host.admin_port >= 0:
    _say(f"admin service on {flags.FLAGS.admin_host}:{host.admin_port}")
  stopped = asyncio.create_task(host.wait_stopped())

  building = _start_thread(lambda: _build(host.emit, budgets, injector))
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
  name = _SERVED_MODEL_NAME.value or built.model_name
  engine = LocalEngine(built.engine, lambda: built.runner.compiles_after_ready)
  trace.engine = built.engine
  if injector is not None:
    inject_engine(built.engine, injector)
    _say("warning: faults are injected (--enable_fault_injection)")
  if _TRACE_FILE.value and _TRACE_AT_START.value:
    trace.toggle()
  loop.add_signal_handler(signal.SIGUSR1, trace.toggle)
  # What the start has made stays: the collector need not look at it again while requests wait.
  gc.collect()
  gc.freeze()
  tracer = None
  if isinstance(host, Frontends):
    await host.serve(engine, model=name, tokenizer=tokenizer, load_s=built.load_s, warmup_s=built.warmup_s)
  else:
    if _OTLP_ENDPOINT.value:
      tracer = tracing.Tracer(_OTLP_ENDPOINT.value, name, server_version())
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
  if _HTTP_PORT_FILE.value and host.http_port >= 0:
    _write_whole(pathlib.Path(_HTTP_PORT_FILE.value), f"{host.http_port}\n")
  if _PORT_FILE.value:
    _write_whole(pathlib.Path(_PORT_FILE.value), f"{port}\n")
  config = built.config
  _say(
    f"model {name}: {config.vocab_size} tokens, length {config.max_model_len}, "
    f"{'with' if tokenizer else 'without'} tokenizer; KV {config.num_blocks} blocks of {config.block_size}; "
    f"attention {built.attention}, matmul {built.matmul}; "
    f"loaded in {built.load_s:.1f} s, compiled in {built.warmup_s:.1f} s"
  )
  for reason in built.fallbacks:
    _say(f"note: {reason}; slower than it could be")
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


def _warn_of_exposure() -> None:
  """Says what is missing where others can reach the server."""
  values = flags.FLAGS
  hosts = [values.host, values.http_host] if values.http_host and _http_port() >= 0 else [values.host]
  exposed = [host for host in hosts if not is_local(host)]
  if not exposed:
    return
  missing = []
  if not values.tls_cert_file:
    missing.append("what is sent can be read and changed on its way (--tls_cert_file, --tls_key_file)")
  if not (values.api_key_file or values.tls_client_ca_file):
    missing.append("anybody may call (--api_key_file or --tls_client_ca_file)")
  if missing:
    _say(f"warning: {' and '.join(exposed)} can be reached by others, and {', and '.join(missing)}")


def _main(argv: Sequence[str]) -> int:
  if len(argv) > 1:
    _say(f"error: unexpected argument {argv[1]!r}; flags are written --name=value, and --help lists them")
    return 2
  # How long the engine's thread may wait for the interpreter while the loop's writes messages. The default, 5 ms, is
  # more than a step of a small model takes; with 64 streams this gave about 10 % more tokens a second.
  sys.setswitchinterval(0.0005)
  _LINES.set_up(_LOG_FORMAT.value)
  _say("configuration:\n" + "\n".join(f"  {line}" for line in _configuration()))
  _warn_of_exposure()
  try:
    return asyncio.run(_serve())
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
