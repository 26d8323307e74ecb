"""Settings, each declared once: a dataclass field that carries its help, group, unit and limits. Pure Python.

The server's flags, the checks of their values, `--help` and docs/reference/flags.md are made from these declarations. A
new setting is one field, of the class whose object the code that needs it already holds.
"""

from collections.abc import Iterator
import dataclasses
import math
import pathlib
import typing
from typing import Any

from engine.errors import ConfigError
from engine.shapes import GPU, PADDED, TPU, UNPADDED_CPU, LadderDefault

POLICIES = ("fair", "fcfs", "priority", "sjf", "tiers")  # engine/policy.py has them
BATCHING = ("chunked", "continuous", "disaggregated", "dynamic", "static")  # engine/batching.py
ADMISSION = ("queue", "goodput")  # engine/admission.py
PREFIX_CACHE_SCOPES = ("global", "tenant", "request", "off")

# In the order of --help.
GROUPS = (
  "Model",
  "Memory",
  "Batching and scheduling",
  "Queue",
  "Devices and programs",
  "Addresses",
  "Limits of clients",
  "Security",
  "Observability",
  "Life of the server",
  "Tests",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """What a setting is, beside its name, type and default, which are the field's.

  Attributes:
    help: what a user must know to choose; ends with a period.
    group: one of GROUPS.
    unit: of a number, such as "s" or "MiB"; "" where the help says it.
    choices: the allowed words; None: any value.
    at_least, at_most: limits of a number, both allowed.
    common: `--help` shows it; `--helpfull` and the reference page show all.
    resolved: where the user has not set it, the build decides, and EngineConfig has what it decided.
  """

  help: str
  group: str
  unit: str = ""
  choices: tuple[str, ...] | None = None
  at_least: float | None = None
  at_most: float | None = None
  common: bool = False
  resolved: bool = False

  def limits(self) -> str:
    """The allowed values as words, such as "at least 1 and at most 65535"; "" where every value is."""
    if self.choices is not None:
      return f"one of {', '.join(self.choices)}"
    bounds = [("at least", self.at_least), ("at most", self.at_most)]
    return " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)


def setting(default: Any, help: str, *, group: str, **more: Any) -> Any:
  """A dataclass field that declares a setting; `more` as in Setting."""
  assert group in GROUPS, group
  return dataclasses.field(default=default, metadata={"setting": Setting(help=help, group=group, **more)})


@dataclasses.dataclass(frozen=True)
class DeclaredSetting:
  """A setting with what its field says: name, default, and type (one of bool, int, float, str, tuple[int, ...] and
  tuple[str, ...])."""

  name: str
  default: Any
  type: Any
  setting: Setting


def declared_settings(cls: type) -> Iterator[DeclaredSetting]:
  """The settings of a dataclass, in the order of its fields; fields without a declaration are left out."""
  types = typing.get_type_hints(cls)
  for field in dataclasses.fields(cls):
    if "setting" in field.metadata:
      yield DeclaredSetting(field.name, field.default, types[field.name], field.metadata["setting"])


def check_settings(values: Any) -> None:
  """Raises ConfigError for the first setting of a dataclass object that is outside its limits."""
  for declared in declared_settings(type(values)):
    value, found = getattr(values, declared.name), declared.setting
    if found.choices is not None:
      bad = value not in found.choices
    elif isinstance(value, int | float) and not isinstance(value, bool):
      least, most = found.at_least, found.at_most
      bad = not math.isfinite(value) or least is not None and value < least or most is not None and value > most
    else:
      bad = False
    if bad:
      limits = found.limits()
      if isinstance(value, float) and not math.isfinite(value):
        limits = f"a finite number{limits and f', {limits}'}"
      raise ConfigError(f"{declared.name}={value!r} must be {limits}; set --{declared.name}")


def _listed(default: LadderDefault) -> str:
  return ",".join(map(str, default.token_budgets))


_MODEL, _MEMORY, _BATCHING = "Model", "Memory", "Batching and scheduling"
_QUEUE, _DEVICES = "Queue", "Devices and programs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulingSettings:
  """The settings that the scheduler follows as they are, on every device."""

  policy: str = setting("fcfs", "Which request goes first.", group=_BATCHING, choices=POLICIES, common=True)
  batching: str = setting(
    "chunked",
    "How requests form batches; the others than chunked are for comparisons.",
    group=_BATCHING,
    choices=BATCHING,
    common=True,
  )
  dynamic_window_s: float = setting(
    0.05,
    "With --batching=dynamic: how long a batch waits for more requests.",
    group=_BATCHING,
    unit="s",
    at_least=0,
  )
  dynamic_max_batch: int = setting(64, "With --batching=dynamic: most rows of a batch.", group=_BATCHING, at_least=1)
  aging_s: float = setting(
    10.0,
    "With --policy=priority: waiting time that is worth one unit of priority; 0: none.",
    group=_BATCHING,
    unit="s",
    at_least=0,
  )
  sjf_aging_tokens_per_s: float = setting(
    50.0,
    "With --policy=sjf: max_tokens that a second of waiting is worth; 0: none.",
    group=_BATCHING,
    at_least=0,
  )
  tier_share: float = setting(
    0.25,
    "With --policy=tiers: share of slots and of prompt tokens that batch work (priority above 0) may not take.",
    group=_BATCHING,
    at_least=0,
    at_most=0.99,
  )
  tier_delay_s: float = setting(
    30.0,
    "With --policy=tiers: how much later an interactive request may arrive and still go first.",
    group=_BATCHING,
    unit="s",
    at_least=0,
  )
  tier_long_context: int = setting(
    0,
    "With --policy=tiers: batch rows of more tokens make way for interactive ones; 0: none.",
    group=_BATCHING,
    unit="tokens",
    at_least=0,
  )
  prefix_cache_scope: str = setting(
    "tenant",
    "Who shares the KV of equal prefixes and equal salts: everybody, the requests of one tenant, the outputs of one "
    "request, or nobody. Those who share can learn of each other's prompts, by time and by cached_tokens.",
    group=_MEMORY,
    choices=PREFIX_CACHE_SCOPES,
    common=True,
  )
  admission: str = setting(
    "queue",
    "queue: refuse what the queue cannot hold; goodput: also what would miss its deadline.",
    group=_QUEUE,
    choices=ADMISSION,
    common=True,
  )
  max_queued_requests: int = setting(
    256,
    "Requests that may wait; more are refused with RESOURCE_EXHAUSTED or 429.",
    group=_QUEUE,
    at_least=1,
    common=True,
  )
  max_queued_tokens: int = setting(262_144, "Prompt tokens that may wait.", group=_QUEUE, unit="tokens", at_least=1)
  max_queued_share_per_tenant: float = setting(
    1.0,
    "Share of --max_queued_requests and --max_queued_tokens for one tenant; requests without a tenant count as one.",
    group=_QUEUE,
    at_least=0.001,
    at_most=1,
    common=True,
  )
  queue_timeout_s: float = setting(
    60.0,
    "Longest wait in the queue, for a request that brings no limit; 0: no limit.",
    group=_QUEUE,
    unit="s",
    at_least=0,
    common=True,
  )
  request_timeout_s: float = setting(
    600.0,
    "Longest time that a request may take, if it brings no limit; 0: no limit.",
    group=_QUEUE,
    unit="s",
    at_least=0,
    common=True,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceSettings:
  """The settings that are resolved when the model and the device are known: 0, auto and empty ones are chosen then."""

  random_weights: bool = setting(
    False, "Draw the weights instead of reading them, to measure a shape; see models/shapes.", group=_MODEL
  )
  dtype: str = setting(
    "auto",
    "Of weights, activations and KV; auto: float32 on CPU, bfloat16 elsewhere.",
    group=_MODEL,
    choices=("auto", "float32", "bfloat16"),
    common=True,
  )
  quantization: str = setting(
    "none",
    "Weights of linear layers and head: as in --dtype, or int8 with a scale an output.",
    group=_MODEL,
    choices=("none", "int8"),
    common=True,
  )
  max_model_len: int = setting(
    0,
    "Longest prompt and output together; 0: the model's, or what the KV pool and the kernels hold of it.",
    group=_MODEL,
    unit="tokens",
    at_least=0,
    common=True,
    resolved=True,
  )
  deterministic: bool = setting(
    False,
    "The same request has the same bits alone, in any batch and after preemption (with temperature, given a seed); the "
    "server says at start what it costs. Elsewhere than with a CPU's own kernels every step has one size.",
    group=_MODEL,
    common=True,
  )
  kv_cache_mb: int = setting(
    0,
    "KV pool over all devices; 0: what is free. On a CPU half of that, and no more than the largest of 256 MiB, one "
    "full sequence and half of what weights take, for every page is written at start.",
    group=_MEMORY,
    unit="MiB",
    at_least=0,
    common=True,
  )
  num_blocks: int = setting(
    0, "Exact size of the KV pool, instead of --kv_cache_mb; 0: by memory.", group=_MEMORY, unit="blocks", at_least=0
  )
  block_size: int = setting(
    0,
    "Tokens a KV block; 0: what the attention likes best.",
    group=_MEMORY,
    unit="tokens",
    at_least=0,
    resolved=True,
  )
  token_budgets: tuple[int, ...] = setting(
    (),
    "The ladder: the token budgets that a step may have, each a rung, for which a program is compiled if a step can "
    f"need it. Empty: {_listed(GPU)} on a GPU, {_listed(TPU)} on a TPU; on a CPU {_listed(UNPADDED_CPU)} with "
    f"--matmul=packed, where padding costs nothing, else {_listed(PADDED)}.",
    group=_BATCHING,
    common=True,
    resolved=True,
  )
  max_num_seqs: int = setting(
    0,
    f"Sequences running at once; 0: {GPU.max_num_seqs} on a GPU, {TPU.max_num_seqs} on a TPU, {PADDED.max_num_seqs} on "
    "a CPU, and no more than the largest of --token_budgets.",
    group=_BATCHING,
    at_least=0,
    common=True,
    resolved=True,
  )
  prefill_chunk: int = setting(
    0,
    f"Most prompt tokens that a step takes; 0: {GPU.prefill_chunk} on a GPU, {TPU.prefill_chunk} on a TPU, on a CPU "
    f"{UNPADDED_CPU.prefill_chunk} with --matmul=packed, else {PADDED.prefill_chunk}; no more than the largest of "
    "--token_budgets.",
    group=_BATCHING,
    at_least=0,
    common=True,
    resolved=True,
  )
  overlap: str = setting(
    "auto",
    "Plan and launch a step while the one before is computed; auto: not where a CPU's steps are long beside the host's "
    "part, for without it first tokens come sooner.",
    group=_BATCHING,
    choices=("auto", "true", "false"),
    resolved=True,
  )
  attention: str = setting(
    "auto",
    "Paged attention; auto: the platform's own kernels.",
    group=_DEVICES,
    choices=("auto", "reference", "cpu", "gpu", "tpu"),
  )
  matmul: str = setting(
    "auto",
    "Weights as they are, or packed at load; auto: packed on one CPU.",
    group=_DEVICES,
    choices=("auto", "xla", "packed"),
  )
  num_devices: int = setting(1, "Devices to spread the model over; 0: all.", group=_DEVICES, at_least=0, common=True)
  prefill_devices: int = setting(
    0, "With --batching=disaggregated: how many of them do prefill; 0: half.", group=_DEVICES, at_least=0
  )
  compile_cache_dir: str = setting(
    str(pathlib.Path.home() / ".cache" / "sluice" / "programs"),
    "Where compiled steps are kept between starts; empty: nowhere.",
    group=_DEVICES,
    common=True,
  )
