"""The server's flags: what each is called and means, and what is wrong with their values alone. Starts nothing."""

from collections.abc import Sequence
import pathlib
import sys
from typing import Any

from absl import flags

from engine.admission import ADMISSION
from engine.batching import BATCHING
from engine.config import CPU_PREFILL_CHUNK, CPU_TOKEN_BUDGETS, PREFIX_CACHE_SCOPES, EngineConfig
from engine.errors import ConfigError
from engine.policy import POLICIES
from server import logs
from server.grpc_server import is_local
from server.host_options import HostOptions
from server.http.tool_calls import PARSERS

DEFAULT_HTTP_PORT = 8000
_ROOT = pathlib.Path(__file__).resolve().parent.parent

# Names are those of BuildOptions, EngineConfig and HostOptions; texts say what a user must know to choose.
MODEL = flags.DEFINE_string("model", str(_ROOT / "models" / "demo"), "Model folder, of Hugging Face or of Sluice.")
SERVED_MODEL_NAME = flags.DEFINE_string("served_model_name", "", "What clients call it; empty: the model's own name.")
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
  flags.DEFINE_bool(
    "deterministic",
    False,
    "The same request has the same bits alone, in any batch and after preemption (with temperature, given a seed); the "
    "server says at start what it costs. Elsewhere than with a CPU's own kernels every step has one size.",
  ),
  flags.DEFINE_enum(
    "quantization", "none", ["none", "int8"], "Weights of linear layers and head: as in --dtype, or int8 by channel."
  ),
  flags.DEFINE_integer("kv_cache_mb", 0, "MiB of KV; 0: what is free (on CPU 256).", lower_bound=0),
  flags.DEFINE_integer("num_blocks", 0, "KV pool in blocks, instead of --kv_cache_mb; 0: by memory.", lower_bound=0),
  flags.DEFINE_integer("block_size", 0, "Tokens a KV block; 0: what the attention likes best.", lower_bound=0),
  flags.DEFINE_integer("max_num_seqs", EngineConfig.max_num_seqs, "Sequences running at once.", lower_bound=1),
  flags.DEFINE_integer(
    "max_model_len", 0, "Longest prompt and output together, in tokens; 0: the model's.", lower_bound=0
  ),
  flags.DEFINE_integer(
    "prefill_chunk",
    0,
    f"Most prompt tokens a step takes; 0: {CPU_PREFILL_CHUNK} with --matmul=packed, else {EngineConfig.prefill_chunk}.",
    lower_bound=0,
  ),
  flags.DEFINE_enum(
    "overlap",
    "auto",
    ["auto", "true", "false"],
    "Plan and launch a step while the one before is computed; auto: not where a CPU's steps are long beside the host's "
    "part, for without it first tokens come sooner.",
  ),
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
  flags.DEFINE_string(
    "executable_bundle",
    "",
    "Folder of executables, made by an earlier start with --write_executable_bundle or by tools.bundle. Loaded instead "
    "of compiled, if they were made for just this model, ladder, device and version; else compiled, with the reason.",
  ),
  flags.DEFINE_bool("write_executable_bundle", False, "Store in --executable_bundle what had to be compiled."),
)
_TOKEN_BUDGETS = flags.DEFINE_list(
  "token_budgets",
  [str(tokens) for tokens in EngineConfig.token_budgets],
  "The ladder of step sizes, in tokens; one program is compiled for each that can be reached. With --matmul=packed and "
  f"this default {','.join(map(str, CPU_TOKEN_BUDGETS))}, for padding costs nothing there.",
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
    "Refuse new work while the server holds more MiB of memory, before the system kills it; 0: no limit.",
    lower_bound=0,
  ),
  flags.DEFINE_integer("max_concurrent_rpcs", HostOptions.max_concurrent_rpcs, "More are refused.", lower_bound=1),
  flags.DEFINE_integer(
    "max_concurrent_streams",
    HostOptions.max_concurrent_streams,
    "Calls at once on one connection; clients keep further ones to themselves. Raise it for routers that send all over "
    "one connection, where no stranger reaches the port: it bounds what a flood of resets does to others.",
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
  flags.DEFINE_integer(
    "max_grpc_connections", HostOptions.max_grpc_connections, "More are closed at once.", lower_bound=1
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
  flags.DEFINE_string(
    "admin_api_key_file",
    HostOptions.admin_api_key_file,
    "As --api_key_file, for it alone; keys of users are told that they may not.",
  ),
  flags.DEFINE_bool(
    "debug_invariants",
    HostOptions.debug_invariants,
    "Check pages, queues and counts after every step, and end of the first that is wrong. For tests.",
  ),
  flags.DEFINE_bool("enable_channelz", HostOptions.enable_channelz, "gRPC's own statistics, on the admin port."),
  flags.DEFINE_integer(
    "max_http_connections", HostOptions.max_http_connections, "More are closed at once.", lower_bound=1
  ),
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
OTLP_ENDPOINT = flags.DEFINE_string(
  "otlp_endpoint",
  "",
  "Send an OpenTelemetry span for each generation to this collector, such as http://127.0.0.1:4317; https:// is TLS. "
  "Needs the extra otel.",
)
LOG_FORMAT = flags.DEFINE_enum("log_format", "text", logs.FORMATS, "Of the program's own lines on standard error.")
_HTTP_PORT = flags.DEFINE_integer(
  "http_port",
  None,
  f"Port of the OpenAI-compatible HTTP side; 0: a free one; -1: no HTTP. Default {DEFAULT_HTTP_PORT}, or a free one "
  "with --port=0.",
  lower_bound=-1,
  upper_bound=65535,
)
HTTP_PORT_FILE = flags.DEFINE_string("http_port_file", "", "File to write the HTTP port into, once ready.")
MAX_PROMPT_BYTES = flags.DEFINE_integer("max_prompt_bytes", 1 << 20, "Longest text that is tokenized.", lower_bound=1)
PORT_FILE = flags.DEFINE_string("port_file", "", "File to write the port into, once ready.")
TRACE_FILE = flags.DEFINE_string("trace_file", "", "Step trace (JSON lines); each recording begins the file anew.")
TRACE_AT_START = flags.DEFINE_bool("trace_at_start", True, "Record from ready on; false: wait for SIGUSR1.")


FRONTEND_PROCESSES = flags.DEFINE_integer(
  "frontend_processes",
  0,
  "Processes for gRPC, HTTP and text, which then take no time from the engine's; limits of calls, connections and "
  "memory hold for each. 0: everything in one process.",
  lower_bound=0,
  upper_bound=64,
)
FAKE_DEVICE = flags.DEFINE_bool(
  "fake_device",
  False,
  "No model: tokens are a hash of the tokens before, seed and parameters (engine/fake_device.py tells clients which). "
  "Of --model only the configuration and the tokenizer are read.",
)
FAKE_STEP_MS = flags.DEFINE_float(
  "fake_step_ms", 0.0, "With --fake_device: how long a step takes, in ms.", lower_bound=0
)

_ENABLE_FAULT_INJECTION = flags.DEFINE_bool(
  "enable_fault_injection", False, "Let --fault_plan and the admin service's SetFaultPlan do harm. For tests."
)
_FAULT_PLAN = flags.DEFINE_string(
  "fault_plan", "", "With --enable_fault_injection: JSON, whose format is in engine/faults.py."
)


def parse(argv: Sequence[str]) -> list[str]:
  """Takes the flags out of the program's arguments; returns the rest. Raises ConfigError, in one line."""
  try:
    return flags.FLAGS(list(argv))
  except flags.Error as error:
    text = " ".join(str(error).removeprefix("ERROR:: ").split())
    raise ConfigError(f"{text}; --help lists the flags") from None


def configuration() -> list[str]:
  """Lines that work as a --flagfile. No flag is a secret: keys are in files."""
  chosen = flags.FLAGS.get_key_flags_for_module(sys.modules[__name__])
  return [line for line in sorted(flag.serialize() for flag in chosen) if line]


def build_settings() -> dict[str, Any]:
  """Fields of BuildOptions, but for the model's folder. Raises ConfigError."""
  return {"token_budgets": _token_budgets()} | _values(_BUILD_FLAGS)


def host_options() -> HostOptions:
  """Raises ConfigError."""
  return HostOptions(**_values(_HOST_FLAGS), http_port=_http_port())


def fault_plan() -> str | None:
  """The plan's file, empty for no plan yet; None where faults are not allowed. Raises ConfigError."""
  if _ENABLE_FAULT_INJECTION.value:
    return _FAULT_PLAN.value
  if _FAULT_PLAN.value:
    raise ConfigError(
      f"fault_plan={_FAULT_PLAN.value} needs --enable_fault_injection, as it does harm; set it, or leave the plan out"
    )
  return None


def exposure() -> str:
  """What is missing where others can reach the server; empty where nothing is."""
  values = flags.FLAGS
  hosts = [values.host, values.http_host] if values.http_host and _http_port() >= 0 else [values.host]
  exposed = [host for host in hosts if not is_local(host)]
  missing = []
  if not values.tls_cert_file:
    missing.append("what is sent can be read and changed on its way (--tls_cert_file, --tls_key_file)")
  if not (values.api_key_file or values.tls_client_ca_file):
    missing.append("anybody may call (--api_key_file or --tls_client_ca_file)")
  if not exposed or not missing:
    return ""
  return f"{' and '.join(exposed)} can be reached by others, and {', and '.join(missing)}"


def narrowness() -> str:
  """What clients with one connection cannot use; empty where they can use all."""
  values = flags.FLAGS
  if values.max_concurrent_streams >= values.max_num_seqs:
    return ""
  return (
    f"one connection may have {values.max_concurrent_streams} calls (--max_concurrent_streams), and "
    f"{values.max_num_seqs} sequences run at once: clients need several connections to use them all"
  )


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


def _http_port() -> int:
  """Whoever lets the system choose one port wants no fixed one beside it."""
  if _HTTP_PORT.value is not None:
    return _HTTP_PORT.value
  return 0 if flags.FLAGS.port == 0 else DEFAULT_HTTP_PORT
