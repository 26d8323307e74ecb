"""Makes the server's flags from the declared settings, and checks their values. Starts nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import os
import pathlib
import re
import sys
import textwrap
from typing import Any

from absl import flags

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.policy import find_policy_class
from engine.settings import (
  GROUPS,
  DeclaredSetting,
  DeviceSettings,
  SchedulingSettings,
  check_draft_model,
  check_host_pool,
  check_pool_and_ladder,
  check_quantization,
  check_settings,
  check_speculation,
  declared_settings,
  setting,
)
from server.flag_spellings import translate_argument
from server.generation.adapter_loader import parse_lora_modules
from server.host_options import ClusterSettings, HostOptions, split_kv_address
from server.http.model_output.call_formats import PARSERS
from server.http.model_output.reasoning import REASONING_PARSERS
from server.model_settings import ModelSettings
from server.rpc.grpc_server import is_local
from server.setting_text import describe_setting, value_text
from server.telemetry import log_lines

DEFAULT_HTTP_PORT = 8000
_ROOT = pathlib.Path(__file__).resolve().parent.parent
_DEMO = _ROOT / "models" / "demo"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramSettings(ModelSettings):
  """The settings of the server program itself."""

  model: str = setting(
    str(_DEMO),
    "The model: a folder in Hugging Face's or Sluice's format, ORG/NAME or ORG/NAME@REVISION on the Hugging Face hub, "
    "gs://BUCKET/PATH or s3://BUCKET/PATH. Also accepted as an argument without a flag.",
    group="Model",
    common=True,
  )
  served_model_name: str = setting(
    "", "Name of the model in the APIs; empty: the model's own name.", group="Model", common=True
  )
  tool_call_parser: str = setting(
    "auto",
    "Format in which the model writes tool calls; auto: from its chat template; none: they stay text.",
    group="Model",
    choices=PARSERS,
    common=True,
  )
  reasoning_parser: str = setting(
    "auto",
    "Format in which the model writes its reasoning; auto: from its chat template; none: it stays in the text.",
    group="Model",
    choices=REASONING_PARSERS,
  )
  lora_modules: tuple[str, ...] = setting(
    (),
    "With --enable_lora: adapters to load at the start, NAME=FOLDER each. Requests send the name as their model.",
    group="Model",
  )
  lora_dir: str = setting(
    "",
    "With --enable_lora: folder below which administrators may load adapters while the server runs; empty: none.",
    group="Model",
  )
  http_port: int | None = setting(
    None,
    f"Port of the OpenAI-compatible HTTP API; 0: a free one; -1: no HTTP. Default {DEFAULT_HTTP_PORT}, or a free one "
    "with --port=0.",
    group="Addresses",
    at_least=-1,
    at_most=65535,
    common=True,
  )
  port_file: str = setting("", "File to write the gRPC port to when the server is ready.", group="Addresses")
  http_port_file: str = setting("", "File to write the HTTP port to when the server is ready.", group="Addresses")
  frontend_processes: int = setting(
    0,
    "Processes for gRPC, HTTP and text, which frees the engine's process from that work. Limits of calls, connections "
    "and memory apply to each. 0: everything in one process.",
    group="Devices and programs",
    at_least=0,
    at_most=64,
    common=True,
  )
  otlp_endpoint: str = setting(
    "",
    "Send an OpenTelemetry span for each generation to this collector, such as http://127.0.0.1:4317; https:// is TLS. "
    "Needs the extra otel.",
    group="Observability",
    common=True,
  )
  kv_events_endpoint: str = setting(
    "",
    "Publish what the prefix cache stores and removes as vLLM's KV events, over ZeroMQ: tcp://*:PORT or ipc://PATH to "
    "bind, tcp://HOST:PORT to connect. Whoever receives them learns the tokens of all prompts and outputs, of all "
    "tenants; there is neither encryption nor a key. Needs the extra kv-events. Empty: none.",
    group="Replicas",
  )
  kv_events_replay_endpoint: str = setting(
    "",
    "With --kv_events_endpoint: tcp://*:PORT or ipc://PATH to bind, where subscribers get batches that they missed; "
    "empty: none.",
    group="Replicas",
  )
  kv_events_topic: str = setting(
    "", "With --kv_events_endpoint: topic of the messages; empty: kv@HOSTNAME@MODEL.", group="Replicas"
  )
  log_format: str = setting(
    "text",
    "Format of the program's own lines on standard error.",
    group="Observability",
    choices=log_lines.FORMATS,
    common=True,
  )
  verbose: bool = setting(
    False, "Also print every setting, and the reasons for the ladder.", group="Observability", common=True
  )
  throughput_line_s: float = setting(
    10.0,
    "Under load, print a throughput line this often; 0: never.",
    group="Observability",
    unit="s",
    at_least=0,
  )
  trace_file: str = setting(
    "", "File for the step trace (JSON lines); each recording overwrites it.", group="Observability", common=True
  )
  trace_at_start: bool = setting(
    True, "Start recording when the server is ready; false: wait for SIGUSR1.", group="Observability"
  )
  fake_device: bool = setting(
    False,
    "Run no model: each token is a hash of the previous tokens, the seed and the parameters "
    "(extensions/fake_device/device.py defines it). Sluice reads only the configuration and the tokenizer of --model.",
    group="Tests",
    common=True,
  )
  fake_step_ms: float = setting(0.0, "Duration of a step with --fake_device.", group="Tests", unit="ms", at_least=0)


DECLARATIONS: list[type] = []
_DEFINE: dict[Any, Callable[..., Any]] = {
  bool: flags.DEFINE_bool,
  int: flags.DEFINE_integer,
  int | None: flags.DEFINE_integer,
  float: flags.DEFINE_float,
  str: flags.DEFINE_string,
  tuple[int, ...]: flags.DEFINE_list,
  tuple[str, ...]: flags.DEFINE_list,
}


def declared_flags() -> Iterator[DeclaredSetting]:
  """Yields every flag of the server, group by group."""
  found = [declared for cls in DECLARATIONS for declared in declared_settings(cls)]
  for group in GROUPS:
    yield from (declared for declared in found if declared.setting.group == group)


def help_text(program: str, every_flag: bool) -> str:
  """Returns the text of --help: the flags in groups, each with its default.

  Args:
    program: a module, or a command of several words as a user types it.
    every_flag: returns the text of --helpfull instead.
  """
  command = program if " " in program else f"python -m {program}"
  lines = [f"usage: {command} [MODEL] [--name=value ...] [--flagfile=FILE]"]
  group = ""
  for declared in declared_flags():
    if not (every_flag or declared.setting.common):
      continue
    if declared.setting.group != group:
      group = declared.setting.group
      lines += ["", group]
    name = f"  --{'[no]' if declared.type is bool else ''}{declared.name}"
    text = textwrap.wrap(describe_setting(declared), 120 - 34)
    if len(name) < 33:
      text[0] = f"{name:34}{text[0]}"
      lines += [text[0], *(f"{'':34}{line}" for line in text[1:])]
    else:
      lines += [name, *(f"{'':34}{line}" for line in text)]
  if not every_flag:
    lines += ["", "--helpfull lists every flag; so does docs/reference/flags.md."]
  return "\n".join(lines)


def define_flags(cls: type) -> None:
  """Defines a flag for each setting of `cls`. A program that adds flags does so before it reads any."""
  DECLARATIONS.append(cls)
  for declared in declared_settings(cls):
    default = list(map(str, declared.default)) if isinstance(declared.default, tuple) else declared.default
    _DEFINE[declared.type](declared.name, default, describe_setting(declared))


for _cls in (ProgramSettings, DeviceSettings, SchedulingSettings, HostOptions, ClusterSettings):
  define_flags(_cls)


def parse_flags(argv: Sequence[str], program: str) -> list[str]:
  """Parses the program's arguments and checks the flags' values; returns the remaining arguments.

  --help and --helpfull print their text and end the program with exit code 0.

  Raises:
    ConfigError: a flag is unknown or its value is not allowed; the message is one line.
  """
  for argument in argv[1:]:
    if argument in ("-h", "-?", "-help", "--help", "--helpshort", "-helpfull", "--helpfull"):
      _print_help(help_text(program, every_flag=argument.endswith("full")))
      raise SystemExit(0)
  names = list(flags.FLAGS)
  bools = [name for name in names if flags.FLAGS[name].boolean]
  try:
    arguments = flags.FLAGS.read_flags_from_files(list(argv))  # from --flagfile
    rest = flags.FLAGS([translate_argument(argument, names, bools) for argument in arguments])
  except flags.Error as error:
    text = " ".join(str(error).removeprefix("ERROR:: ").split())
    raise ConfigError(f"{text}; --help lists the flags") from None
  if len(rest) > 1 and not flags.FLAGS["model"].present:
    flags.FLAGS["model"].parse(rest.pop(1))
  for cls in DECLARATIONS:
    check_settings(read_settings(cls))
  check_pool_and_ladder(read_settings(DeviceSettings))
  check_quantization(read_settings(DeviceSettings))
  check_speculation(read_settings(SchedulingSettings))
  find_policy_class(flags.FLAGS.policy)
  _check_adapters(read_settings(ProgramSettings))
  _check_role(host_options(), read_settings(ProgramSettings))
  _check_cluster(read_settings(ClusterSettings))
  _check_host_pool()
  _check_draft_model()
  _check_kv_events(read_settings(ProgramSettings))
  return rest


_ENDPOINT = re.compile(r"tcp://(\*|[A-Za-z0-9_.-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}|ipc://.+")


def _check_kv_events(program: ProgramSettings) -> None:
  """Raises ConfigError for addresses that are none, and for KV events of a cache that has none."""
  for name in ("kv_events_replay_endpoint", "kv_events_topic"):
    if getattr(program, name) and not program.kv_events_endpoint:
      raise ConfigError(f"{name}={getattr(program, name):.200} needs --kv_events_endpoint; set it, or leave this out")
  if not program.kv_events_endpoint:
    return
  for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
    address = getattr(program, name)
    if address and not _ENDPOINT.fullmatch(address):
      raise ConfigError(f"{name}={address!r:.200} must be tcp://HOST:PORT, tcp://*:PORT or ipc://PATH; set --{name}")
  values = flags.FLAGS
  excluded = {
    "prefix_cache_scope": values.prefix_cache_scope in ("request", "off"),
    "batching": values.batching == "disaggregated",
    "role": values.role == "decode",
  }
  for name, is_excluded in excluded.items():
    if is_excluded:
      raise ConfigError(f"kv_events_endpoint does not go with --{name}={values[name].value}; leave out one of them")


_OF_ROLE = {
  "prefill": ("max_lease_mb", "lease_timeout_s"),
  "decode": (
    "prefill_servers",
    "transfer_ca_file",
    "trust_prefill_header",
    "min_remote_prefill_tokens",
    "remote_prefill_timeout_s",
  ),
}


def _check_role(options: HostOptions, program: ProgramSettings) -> None:
  """Raises ConfigError if --role lacks what it needs, or comes with what it excludes."""
  role = options.role
  for of_role, names in _OF_ROLE.items():
    for name in names:
      if role != of_role and flags.FLAGS[name].value != flags.FLAGS[name].default:
        raise ConfigError(f"{name} needs --role={of_role}, and role is {role}; leave out --{name}")
  if role == "both":
    for name in ("transfer_secret_file", "kv_transport", "kv_transport_address"):
      if flags.FLAGS[name].value != flags.FLAGS[name].default:
        raise ConfigError(f"{name} needs --role=prefill or --role=decode; leave it out")
    return
  if not options.transfer_secret_file:
    raise ConfigError(f"role={role} needs a secret that its peers share; set --transfer_secret_file")
  excluded = {
    "batching": flags.FLAGS.batching not in ("chunked", "continuous"),
    "fake_device": program.fake_device,
    "frontend_processes": program.frontend_processes > 0,
    "enable_embeddings": role == "prefill" and flags.FLAGS.enable_embeddings,
    "enable_lora": role == "prefill" and flags.FLAGS.enable_lora,
    "prefix_cache_scope": role == "decode" and flags.FLAGS.prefix_cache_scope not in ("global", "tenant"),
  }
  for name, is_excluded in excluded.items():
    if is_excluded:
      value = value_text(flags.FLAGS[name].value)
      raise ConfigError(f"role={role} does not go with --{name}={value}; leave out one of them")
  _check_kv_transport(options)
  if role == "decode" and not (options.prefill_servers or options.trust_prefill_header):
    raise ConfigError(
      "role=decode has no prefill server; set --prefill_servers=HOST:PORT, or --trust_prefill_header behind a router"
    )
  for address in options.prefill_servers:
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
      raise ConfigError(f"prefill_servers={address!r:.80} is not HOST:PORT; write for example 10.0.0.7:50051")


def _check_kv_transport(options: HostOptions) -> None:
  """Raises ConfigError for an address that is none or has no use, and for TLS that pieces would not have."""
  if options.kv_transport != "jax":
    if options.kv_transport_address != flags.FLAGS["kv_transport_address"].default:
      raise ConfigError(
        f"kv_transport_address needs --kv_transport=jax, and it is {options.kv_transport}; leave it out"
      )
    return
  _, port = split_kv_address(options.kv_transport_address)
  if port == 65535 or (port and options.role == "decode"):
    raise ConfigError(
      f"kv_transport_address={options.kv_transport_address}: a prefill server also needs the next port, and a decode "
      "server needs none; write port 0"
    )
  if options.transfer_ca_file:
    raise ConfigError("kv_transport=jax has no TLS, so it does not go with --transfer_ca_file; leave out one of them")


def _check_adapters(program: ProgramSettings) -> None:
  """Raises ConfigError for adapters without --enable_lora, a bad list of them, or a folder that does not exist."""
  for name in ("lora_modules", "lora_dir"):
    if getattr(program, name) and not flags.FLAGS.enable_lora:
      value = value_text(getattr(program, name))
      raise ConfigError(f"{name}={value:.200} needs slots for adapters; set --enable_lora, or leave out --{name}")
  num_modules = len(parse_lora_modules(program.lora_modules))
  if num_modules > flags.FLAGS.max_loras:
    raise ConfigError(
      f"lora_modules has {num_modules} adapters, the limit is {flags.FLAGS.max_loras}; raise --max_loras"
    )
  if program.lora_dir and not pathlib.Path(program.lora_dir).is_dir():
    raise ConfigError(f"lora_dir={program.lora_dir} is not a folder; make it, or leave out --lora_dir")


def _check_excluded(name: str, excluded: Mapping[str, bool]) -> None:
  """Raises ConfigError if one of the `excluded` flags is set beside flag `name`."""
  values = flags.FLAGS
  for other, is_set in excluded.items():
    if is_set:
      raise ConfigError(
        f"{name}={value_text(values[name].value):.200} does not go with --{other}="
        f"{value_text(values[other].value):.200}; leave out one of them"
      )


def _check_host_pool() -> None:
  """Raises ConfigError if a flag excludes --host_kv_mb."""
  values = flags.FLAGS
  check_host_pool(read_settings(DeviceSettings), read_settings(SchedulingSettings))
  if values.host_kv_mb:
    # A replay would lack the blocks.
    _check_excluded("host_kv_mb", _list_other_engines() | {"trace_file": bool(values.trace_file)})


def _check_draft_model() -> None:
  """Raises ConfigError if a flag excludes --draft_model, or --speculation lacks it."""
  check_draft_model(read_settings(DeviceSettings), read_settings(SchedulingSettings))
  if flags.FLAGS.draft_model:
    _check_excluded("draft_model", _list_other_engines())


def _list_other_engines() -> dict[str, bool]:
  """Returns the flags that replace the plain engine of one process, and whether each is set."""
  values = flags.FLAGS
  return {
    "fake_device": values.fake_device,
    "executable_bundle": bool(values.executable_bundle),
    "role": values.role != "both",
    "num_hosts": read_settings(ClusterSettings).has_several_hosts,
  }


def _check_cluster(cluster: ClusterSettings) -> None:
  """Raises ConfigError for settings of several hosts that contradict each other or the program's."""
  cluster.check_cluster()
  if not cluster.has_several_hosts:
    return
  values = flags.FLAGS
  if values["num_devices"].present and values.num_devices:
    raise ConfigError(
      f"num_devices={values.num_devices}: several hosts share the model over all of their devices; leave out "
      "--num_devices, or set --num_hosts=1"
    )
  for name in ("fake_device", "executable_bundle", "enable_lora"):
    value = values[name].value
    if value:
      raise ConfigError(f"{name}={value_text(value)} works on one host only; leave out --{name}, or set --num_hosts=1")
  if values.batching == "disaggregated":
    raise ConfigError("batching=disaggregated copies KV within one host; set another --batching, or --num_hosts=1")
  if values.role != "both":
    raise ConfigError(f"role={values.role} works on one host only; leave out --role, or set --num_hosts=1")


def _print_help(text: str) -> None:
  try:
    print(text, flush=True)
  except BrokenPipeError:  # as in `--help | head`; discards what Python flushes at exit
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_settings[T](cls: type[T], **more: Any) -> T:
  """Returns an object of `cls` with the values of its flags, and `more`. Raises ConfigError."""
  return cls(**setting_values(cls), **more)


def setting_values(cls: type) -> dict[str, Any]:
  """Returns the values of the flags of `cls`, by name. Raises ConfigError if a list of numbers holds another value."""
  return {declared.name: _flag_value(declared) for declared in declared_settings(cls)}


def engine_setting_values() -> dict[str, Any]:
  """Returns the settings of BuildOptions that have flags, by name. Raises ConfigError."""
  return setting_values(DeviceSettings) | setting_values(SchedulingSettings)


def _flag_value(declared: DeclaredSetting) -> Any:
  value: Any = flags.FLAGS[declared.name].value
  if declared.type == tuple[int, ...]:
    try:
      return tuple(int(number) for number in value)
    except ValueError:
      raise ConfigError(
        f"{declared.name}={','.join(value)} must be whole numbers; set --{declared.name}, for example 8,32,128"
      ) from None
  return tuple(value) if isinstance(value, list) else value


def configuration_lines(served: EngineConfig | None = None) -> list[str]:
  """Returns lines that work as a --flagfile. No flag is a secret: keys are in files.

  Args:
    served: the built engine's settings, with the values that the build decided. If None, the lines omit flags that
      the build decides and the user has not set.
  """
  lines = []
  for declared in sorted(declared_flags(), key=lambda declared: declared.name):
    flag = flags.FLAGS[declared.name]
    if not declared.setting.resolved:
      line = flag.serialize()
    elif served is not None:
      line = f"--{declared.name}={value_text(getattr(served, declared.name))}"
    else:
      line = flag.serialize() if flag.present else ""
    lines += [line] if line else []
  return lines


def host_options() -> HostOptions:
  """Returns the settings of the network side. Raises ConfigError."""
  program = read_settings(ProgramSettings)
  http_port = program.http_port
  if http_port is None:  # if the system chooses the gRPC port, it chooses this one too
    http_port = 0 if flags.FLAGS.port == 0 else DEFAULT_HTTP_PORT
  if http_port == flags.FLAGS.port > 0:
    raise ConfigError(
      f"port={http_port} is that of gRPC, and http_port={http_port} that of HTTP and the OpenAI-compatible API; set "
      "--port and --http_port to different ones, or leave out --port"
    )
  if flags.FLAGS.batch_dir and (program.frontend_processes or http_port < 0):
    processes = program.frontend_processes
    other = f"frontend_processes={processes}" if processes else f"http_port={http_port}"
    raise ConfigError(
      f"batch_dir={flags.FLAGS.batch_dir} is not possible with {other}: one process with HTTP owns the folder; leave "
      f"out --batch_dir or --{other.partition('=')[0]}"
    )
  return read_settings(
    HostOptions,
    http_port=http_port,
    tool_call_parser=program.tool_call_parser,
    reasoning_parser=program.reasoning_parser,
  )


def describe_exposure() -> str:
  """Returns the protections that a server reachable from other machines lacks; "" if it lacks none."""
  options = host_options()
  hosts = [options.host, options.http_host] if options.http_host and options.http_port >= 0 else [options.host]
  exposed = [host for host in hosts if not is_local(host)]
  missing = []
  if not options.tls_cert_file:
    missing.append("what is sent can be read and changed on its way (--tls_cert_file, --tls_key_file)")
  if not (options.api_key_file or options.tls_client_ca_file):
    missing.append("anybody may call (--api_key_file or --tls_client_ca_file)")
  if not exposed or not missing:
    return ""
  return f"{' and '.join(exposed)} can be reached by others, and {', and '.join(missing)}"


def describe_narrowness(max_num_seqs: int) -> str:
  """Returns a warning if one connection cannot use all `max_num_seqs` rows; else ""."""
  streams = flags.FLAGS.max_concurrent_streams
  if streams >= max_num_seqs:
    return ""
  return (
    f"one connection may have {streams} calls (--max_concurrent_streams), and {max_num_seqs} sequences run at once: "
    "clients need several connections to use them all"
  )
