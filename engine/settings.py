"""Declares each setting once, as a dataclass field with help, group, unit and limits. Pure Python; may not read flags.

The server's flags, the checks of their values, `--help` and docs/reference/flags.md follow from these declarations. A
new setting is one field, in the class whose object the code already holds.
"""

from collections.abc import Iterator
import dataclasses
import math
import pathlib
import re
import typing
from typing import Any

from engine.batch import MAX_DRAFTS
from engine.errors import ConfigError
from engine.shapes import GPU, PADDED, TPU, UNPADDED_CPU, LadderDefault, ShapeLadder, check_prefill_chunk

POLICIES = ("fair", "fcfs", "priority", "sjf", "tiers")  # engine/policy.py has them
BATCHING = ("chunked", "continuous", "disaggregated", "dynamic", "static")  # engine/batching.py
LOCKSTEP = ("static", "dynamic")  # of BATCHING, those whose rows decode in lockstep
ADMISSION = ("queue", "goodput")  # engine/admission.py
PREFIX_CACHE_SCOPES = ("global", "tenant", "request", "off")
SPECULATION = ("none", "ngram", "draft", "auto")  # engine/speculation has the drafters

# Values of SchedulingSettings for callers that wait as long as needed: nothing is refused, and nothing times out.
UNBOUNDED_QUEUE = {
  "max_queued_requests": 1 << 30,
  "max_queued_tokens": 1 << 40,
  "queue_timeout_s": 0.0,
  "request_timeout_s": 0.0,
}

# In the order of --help.
GROUPS = (
  "Model",
  "Memory",
  "Batching and scheduling",
  "Queue",
  "Devices and programs",
  "Addresses",
  "Prefill and decode servers",
  "Replicas",
  "Limits of clients",
  "Security",
  "Observability",
  "Life of the server",
  "Tests",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """The declaration of a setting; its field has the name, type and default.

  Attributes:
    help: all that a user must know; ends with a period.
    group: one of GROUPS.
    unit: unit of a number, such as "s" or "MiB"; "" if the help has it.
    choices: the allowed words; None: any value.
    takes_class: allows MODULE:CLASS besides the choices; the code that needs the class imports it.
    at_least, at_most: inclusive limits of a number.
    common: `--help` shows it; `--helpfull` and the reference page show all.
    resolved: the build chooses the value if the user does not, and EngineConfig has the result.
  """

  help: str
  group: str
  unit: str = ""
  choices: tuple[str, ...] | None = None
  takes_class: bool = False
  at_least: float | None = None
  at_most: float | None = None
  common: bool = False
  resolved: bool = False

  def limits(self) -> str:
    """The allowed values as words, such as "at least 1 and at most 65535"; "": every value."""
    if self.choices is not None:
      return f"one of {', '.join(self.choices)}{' or MODULE:CLASS' if self.takes_class else ''}"
    bounds = [("at least", self.at_least), ("at most", self.at_most)]
    return " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)


def setting(default: Any, help: str, *, group: str, **more: Any) -> Any:
  """Returns a dataclass field that declares a setting; `more` as in Setting."""
  assert group in GROUPS, group
  return dataclasses.field(default=default, metadata={"setting": Setting(help=help, group=group, **more)})


@dataclasses.dataclass(frozen=True)
class DeclaredSetting:
  """A setting with its field's name, default and type (bool, int, float, str, tuple[int, ...] or tuple[str, ...])."""

  name: str
  default: Any
  type: Any
  setting: Setting


def declared_settings(cls: type) -> Iterator[DeclaredSetting]:
  """Yields the settings of a dataclass in the order of its fields; skips fields without a declaration."""
  types = typing.get_type_hints(cls)
  for field in dataclasses.fields(cls):
    if "setting" in field.metadata:
      yield DeclaredSetting(field.name, field.default, types[field.name], field.metadata["setting"])


_CLASS_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def check_settings(values: Any) -> None:
  """Raises ConfigError for the first setting of a dataclass object that is outside its limits."""
  for declared in declared_settings(type(values)):
    value, found = getattr(values, declared.name), declared.setting
    if found.choices is not None:
      bad = value not in found.choices and not (found.takes_class and _CLASS_NAME.fullmatch(value))
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
  """The settings of the scheduler, equal on every device."""

  policy: str = setting(
    "fcfs",
    "The order of requests; MODULE:CLASS names your own policy.",
    group=_BATCHING,
    choices=POLICIES,
    takes_class=True,
    common=True,
  )
  batching: str = setting(
    "chunked",
    "The batching mode; all modes but chunked are for comparisons.",
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
    "With --policy=priority: waiting time that counts as one unit of priority; 0: no aging.",
    group=_BATCHING,
    unit="s",
    at_least=0,
  )
  sjf_aging_tokens_per_s: float = setting(
    50.0,
    "With --policy=sjf: max_tokens that a second of waiting offsets; 0: no aging.",
    group=_BATCHING,
    at_least=0,
  )
  tier_share: float = setting(
    0.25,
    "With --policy=tiers: share of slots and prompt tokens reserved from batch work (priority above 0).",
    group=_BATCHING,
    at_least=0,
    at_most=0.99,
  )
  tier_delay_s: float = setting(
    30.0,
    "With --policy=tiers: how much later an interactive request may arrive and still run before batch work.",
    group=_BATCHING,
    unit="s",
    at_least=0,
  )
  tier_long_context: int = setting(
    0,
    "With --policy=tiers: batch rows of more tokens run only in every fourth step while interactive requests run; 0: "
    "never.",
    group=_BATCHING,
    unit="tokens",
    at_least=0,
  )
  prefix_cache_scope: str = setting(
    "tenant",
    "Sets who shares cached prefixes with equal salts: all requests, those of one tenant, outputs of one request, or "
    "none. Sharing lets tenants learn of each other's prompts by timing and cached_tokens.",
    group=_MEMORY,
    choices=PREFIX_CACHE_SCOPES,
    common=True,
  )
  admission: str = setting(
    "queue",
    "queue: rejects requests when the queue is full; goodput: also requests that would miss their deadline.",
    group=_QUEUE,
    choices=ADMISSION,
    common=True,
  )
  max_queued_requests: int = setting(
    256,
    "Most waiting requests; the server rejects more with RESOURCE_EXHAUSTED or 429.",
    group=_QUEUE,
    at_least=1,
    common=True,
  )
  max_queued_tokens: int = setting(
    262_144, "Most prompt tokens of waiting requests.", group=_QUEUE, unit="tokens", at_least=1
  )
  max_queued_share_per_tenant: float = setting(
    1.0,
    "Share of --max_queued_requests and --max_queued_tokens for one tenant; requests without a tenant share one.",
    group=_QUEUE,
    at_least=0.001,
    at_most=1,
    common=True,
  )
  queue_timeout_s: float = setting(
    60.0,
    "Longest wait in the queue of a request without its own limit; 0: no limit.",
    group=_QUEUE,
    unit="s",
    at_least=0,
    common=True,
  )
  request_timeout_s: float = setting(
    600.0,
    "Longest duration of a request without its own limit; 0: no limit.",
    group=_QUEUE,
    unit="s",
    at_least=0,
    common=True,
  )

  speculation: str = setting(
    "auto",
    "Speculative decoding: the step that computes a token also verifies drafts of the next ones. ngram: drafts are "
    "what followed the latest tokens when the prompt or the output had them before; draft: what --draft_model "
    "proposes; auto: both, and tokens that an output constraint leaves no choice about, within --draft_step_limit. "
    "Outputs do not change. With --batching=static or dynamic, auto is none.",
    group=_BATCHING,
    choices=SPECULATION,
  )
  num_speculative_tokens: int = setting(
    MAX_DRAFTS,
    "With --speculation: most draft tokens of a request in a step. A step has as many as pay; rows and drafts together "
    "are at most --max_num_seqs.",
    group=_BATCHING,
    at_least=1,
    at_most=MAX_DRAFTS,
  )

  draft_step_limit: float = setting(
    0.0,
    "With --speculation: most times that a step may take as long with drafts as without. A larger limit shortens the "
    "mean time of a token, a smaller one keeps the gaps between tokens even. A step may also take as long as one in "
    "twenty steps without drafts does. Where steps without drafts are longer than usual, as with long contexts, drafts "
    "hardly lengthen them. 0: 1.25 with --speculation=auto and no --draft_model, otherwise no limit.",
    group=_BATCHING,
    at_least=0,
  )

  enable_embeddings: bool = setting(
    False,
    "Serves embeddings: every step also returns the final hidden state of each row. Not with --executable_bundle, "
    "--batching=disaggregated or --fake_device.",
    group=_DEVICES,
  )
  enable_lora: bool = setting(
    False,
    "Serves LoRA adapters beside the model. On one device; not with --deterministic, --executable_bundle or "
    "--batching=disaggregated.",
    group=_DEVICES,
  )
  max_loras: int = setting(
    8,
    "With --enable_lora: most adapters that are loaded at once; memory for all of them is allocated at start.",
    group=_DEVICES,
    at_least=1,
    at_most=256,
  )
  max_lora_rank: int = setting(
    16, "With --enable_lora: the largest rank of an adapter.", group=_DEVICES, at_least=1, at_most=512
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceSettings:
  """The settings that depend on model and device; the build chooses values for 0, auto and empty ones."""

  random_weights: bool = setting(
    False, "Make random weights instead of reading them, to measure a shape; see models/shapes.", group=_MODEL
  )
  draft_model: str = setting(
    "",
    "Folder of a small model with the same tokenizer, or of the model's EAGLE-3 head, whose proposals "
    "--speculation=draft or auto verifies; demo, demo_eagle: those of the demo model. On one device; not with "
    "--enable_lora, --executable_bundle, --batching=disaggregated, --role, --num_hosts or --fake_device.",
    group=_MODEL,
  )
  dtype: str = setting(
    "auto",
    "Dtype of weights and activations; auto: float32 on CPU, bfloat16 elsewhere. float16 is for GPUs: three more bits "
    "than bfloat16, numbers up to 65,504, and --attention=portable; on a CPU it is slow.",
    group=_MODEL,
    choices=("auto", "float32", "bfloat16", "float16"),
    common=True,
  )
  quantization: str = setting(
    "auto",
    "Weights of linear layers and head; auto: as in the checkpoint; none: --dtype. From plain weights at load: int8: "
    "8 bits with one scale an output; w8a8: the same, and products quantize activations; int4, on CPUs and TPUs: 4 "
    "bits with one scale a group of inputs, and a CPU's packed matmul quantizes activations; fp8, on GPUs from compute "
    "capability 8.9 and on TPU v7: w8a8 with e4m3 instead of integers.",
    group=_MODEL,
    choices=("auto", "none", "int8", "w8a8", "int4", "fp8"),
    common=True,
  )
  quantization_group_size: int = setting(
    0,
    "With --quantization=int4: inputs with one scale, a multiple of 8 that divides the inputs of each layer; 0: 32 "
    "on a CPU, 128 on a TPU.",
    group=_MODEL,
    unit="inputs",
    at_least=0,
  )
  max_model_len: int = setting(
    0,
    "Longest prompt plus output; 0: the model's length, or less if the KV pool or the kernels cannot hold it.",
    group=_MODEL,
    unit="tokens",
    at_least=0,
    common=True,
    resolved=True,
  )
  deterministic: bool = setting(
    False,
    "Gives a request the same bits alone, in any batch and after preemption (with temperature, given a seed). The "
    "server logs the cost at start. Except with a CPU's own kernels, every step has one size.",
    group=_MODEL,
    common=True,
  )
  kv_dtype: str = setting(
    "auto",
    "Keys and values in the KV pool: auto: --dtype; int8: int8 with a scale a token and KV head, half the bytes of "
    "bfloat16 and a little more, for CPUs and TPUs; fp8: e4m3 without a scale, half the bytes of bfloat16, for Hopper "
    "GPUs and TPUs. --attention=reference has both.",
    group=_MEMORY,
    choices=("auto", "int8", "fp8"),
  )
  kv_cache_mb: int = setting(
    0,
    "KV pool over all devices; 0: all free memory. On a CPU the default is half of the free memory in four "
    "significant bits, at most the largest of 256 MiB, one full sequence and half of the weights; blocks take memory "
    "when they are first filled.",
    group=_MEMORY,
    unit="MiB",
    at_least=0,
    common=True,
  )
  num_blocks: int = setting(
    0, "Exact size of the KV pool, instead of --kv_cache_mb; 0: by memory.", group=_MEMORY, unit="blocks", at_least=0
  )
  host_kv_mb: int = setting(
    0,
    "Memory of the host for prefix blocks that leave the KV pool; they come back when a prompt needs them. The start "
    "allocates all of it; 0: none. Not with --prefix_cache_scope=off, --batching=disaggregated, --executable_bundle, "
    "--role, --num_hosts, --trace_file or --fake_device.",
    group=_MEMORY,
    unit="MiB",
    at_least=0,
  )
  host_kv_dir: str = setting(
    "",
    "Folder for the blocks of --host_kv_mb: in a file without a name, which the system caches in free memory and "
    "which may be larger than it. Empty: the blocks are in memory.",
    group=_MEMORY,
  )
  block_size: int = setting(
    0,
    "Tokens a KV block; 0: the best size for the attention kernels.",
    group=_MEMORY,
    unit="tokens",
    at_least=0,
    resolved=True,
  )
  token_budgets: tuple[int, ...] = setting(
    (),
    "The ladder: the padded sizes of a step. The server compiles a program for each size that a step can need. "
    f"Empty: {_listed(GPU)} on a GPU, {_listed(TPU)} on a TPU; on a CPU {_listed(UNPADDED_CPU)} with "
    f"--matmul=packed, which skips padding, else {_listed(PADDED)}.",
    group=_BATCHING,
    common=True,
    resolved=True,
  )
  max_num_seqs: int = setting(
    0,
    f"Most sequences that run at once; 0: {GPU.max_num_seqs} on a GPU, {TPU.max_num_seqs} on a TPU, "
    f"{PADDED.max_num_seqs} on a CPU, and at most the largest of --token_budgets.",
    group=_BATCHING,
    at_least=0,
    common=True,
    resolved=True,
  )
  prefill_chunk: int = setting(
    0,
    f"Most prompt tokens of a step; 0: {GPU.prefill_chunk} on a GPU, {TPU.prefill_chunk} on a TPU, on a CPU "
    f"{UNPADDED_CPU.prefill_chunk} with --matmul=packed, else {PADDED.prefill_chunk}; at most the largest of "
    "--token_budgets. With --matmul=packed, prompts may fill the largest step where no request runs.",
    group=_BATCHING,
    at_least=0,
    common=True,
    resolved=True,
  )
  overlap: str = setting(
    "auto",
    "Launches a step while the device computes the previous one; auto: off if a CPU's steps are long compared to the "
    "host's part, because first tokens then arrive sooner.",
    group=_BATCHING,
    choices=("auto", "true", "false"),
    resolved=True,
  )
  attention: str = setting(
    "auto",
    "Paged attention kernels; cpu: in C++; gpu: for Hopper; portable: for any NVIDIA GPU from compute capability 8.0; "
    "reference: anywhere, slow; auto: the best that has the device and the model.",
    group=_DEVICES,
    choices=("auto", "reference", "cpu", "gpu", "portable", "tpu"),
  )
  matmul: str = setting(
    "auto",
    "Matmul: xla, or packed, for which the server packs weights at load; auto: packed on one CPU.",
    group=_DEVICES,
    choices=("auto", "xla", "packed"),
  )
  pooling: str = setting(
    "auto",
    "What an embedding is made of: the hidden state of the last token, or the mean of all; auto: as the checkpoint's "
    "1_Pooling/config.json says, else last.",
    group=_DEVICES,
    choices=("auto", "last", "mean"),
    resolved=True,
  )
  num_devices: int = setting(1, "Devices that share the model; 0: all.", group=_DEVICES, at_least=0, common=True)
  prefill_devices: int = setting(
    0, "With --batching=disaggregated: number of devices for prefill; 0: half.", group=_DEVICES, at_least=0
  )
  compile_cache_dir: str = setting(
    str(pathlib.Path.home() / ".cache" / "sluice" / "programs"),
    "Folder that keeps compiled steps between starts; empty: none.",
    group=_DEVICES,
    common=True,
  )


def check_speculation(scheduling: SchedulingSettings, without_drafts: tuple[str, ...] = ("none", "auto")) -> None:
  """Raises ConfigError if a setting excludes speculation.

  Args: without_drafts: values of speculation that may mean that no step has drafts.
  """
  if scheduling.speculation not in without_drafts and scheduling.batching in LOCKSTEP:
    raise ConfigError(
      f"speculation={scheduling.speculation} does not go with batching={scheduling.batching}, whose waves decode in "
      "lockstep; leave out --speculation, or set another --batching"
    )
  if 0 < scheduling.draft_step_limit < 1:
    raise ConfigError(
      f"draft_step_limit={scheduling.draft_step_limit:g} must be 0 or at least 1; set --draft_step_limit"
    )


def check_draft_model(devices: DeviceSettings, scheduling: SchedulingSettings) -> None:
  """Raises ConfigError if a setting excludes draft_model, or speculation lacks it."""
  path = devices.draft_model
  if not path:
    if scheduling.speculation == "draft":
      raise ConfigError(
        "speculation=draft needs a draft model; set --draft_model to its folder, or set another --speculation"
      )
    return
  for name, excluded, remedy in (
    ("speculation", scheduling.speculation in ("none", "ngram"), "set --speculation=draft or auto"),
    ("batching", scheduling.batching in ("disaggregated", *LOCKSTEP), "set another --batching"),
    ("enable_lora", scheduling.enable_lora, "leave out --enable_lora"),
    ("num_devices", devices.num_devices != 1, "set --num_devices=1"),
  ):
    if excluded:
      value = str(getattr(scheduling if hasattr(scheduling, name) else devices, name)).lower()
      raise ConfigError(
        f"draft_model={path:.200} does not go with {name}={value}; leave out --draft_model, or {remedy}"
      )


def check_host_pool(devices: DeviceSettings, scheduling: SchedulingSettings) -> None:
  """Raises ConfigError if a setting excludes host_kv_mb, or host_kv_dir is without it."""
  if not devices.host_kv_mb:
    if devices.host_kv_dir:
      raise ConfigError(
        f"host_kv_dir={devices.host_kv_dir:.200} is for blocks that the host keeps; set --host_kv_mb, or leave out "
        "--host_kv_dir"
      )
    return
  for name, excluded, remedy in (
    ("prefix_cache_scope", scheduling.prefix_cache_scope == "off", "the host keeps blocks of the prefix cache"),
    ("batching", scheduling.batching == "disaggregated", "two engines share no host pool"),
  ):
    if excluded:
      value = getattr(scheduling, name)
      raise ConfigError(
        f"host_kv_mb={devices.host_kv_mb} does not go with {name}={value}: {remedy}; leave out --host_kv_mb, or set "
        f"another --{name}"
      )


def check_quantization(values: DeviceSettings) -> None:
  """Rejects a group size that no form has. Raises ConfigError."""
  group = values.quantization_group_size
  if group and values.quantization != "int4":
    raise ConfigError(
      f"quantization_group_size={group} needs --quantization=int4, and quantization={values.quantization}; set "
      "--quantization=int4, or leave it at 0"
    )
  if group % 8:
    raise ConfigError(
      f"quantization_group_size={group} must be a multiple of 8; set --quantization_group_size to 32, 64 or 128"
    )


def check_pool_and_ladder(values: DeviceSettings) -> None:
  """Rejects sizes of the KV pool and the ladder that contradict each other on every device. Raises ConfigError."""
  if values.kv_cache_mb and values.num_blocks:
    raise ConfigError(
      f"kv_cache_mb={values.kv_cache_mb} and num_blocks={values.num_blocks} both size the KV pool; "
      "set only one of --kv_cache_mb and --num_blocks"
    )
  if values.token_budgets:
    ShapeLadder(values.token_budgets, values.max_num_seqs or 1)
    check_prefill_chunk(values.prefill_chunk or 1, values.token_budgets[-1])
