"""From a model folder to an engine that is ready: load, size, compile, warm up, seal. Run once, by whoever composes.

Decides the size of the KV pool and nothing else; settings that contradict each other or the model are refused before
memory is taken for them.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from engine.admission import AdmissionControl
from engine.batching import make_batching
from engine.config import CPU_PREFILL_CHUNK, EngineConfig, default_overlap, default_prefill_chunk
from engine.device import compile_cache, deterministic, host_memory, kv_cache
from engine.device import mesh as mesh_lib
from engine.device.bundle import Bundle, made_for
from engine.device.executables import Program
from engine.device.fit import check_fits, step_bytes
from engine.device.programs import ProgramSpec, compile_step
from engine.device.runner import ModelRunner, Progress
from engine.device.weights import LoadedModel, load_checkpoint
from engine.disaggregated import DisaggregatedEngine
from engine.engine import Emit, Engine
from engine.errors import ConfigError
from engine.policy import make_policy
from engine.scheduler import Scheduler
from engine.shapes import ShapeLadder
from models.config import ModelConfig
from models.layers import WeightForm
from pallas_kernels.argmax import api as argmax
from pallas_kernels.packed_matmul import api as packed_matmul
from pallas_kernels.paged_attention import api
from pallas_kernels.paged_attention.plan import Geometry

_CPU_KV_CACHE_MB = 256
_DTYPES = ("auto", "float32", "bfloat16")
_MATMULS = ("auto", "xla", "packed")
_QUANTIZATIONS = ("none", "int8")
_OVERLAPS = ("auto", "true", "false")


@dataclasses.dataclass(frozen=True)
class BuildOptions:
  """What a user may choose; names as the flags'. Those that EngineConfig has too mean the same there.

  Attributes:
    model_dir: a Hugging Face or a Sluice folder.
    random_weights: draw the weights; the folder needs config.json alone.
    dtype: of weights, activations and KV: float32 or bfloat16; auto is float32 on CPU, bfloat16 elsewhere.
    attention: name of the paged attention (pallas_kernels.paged_attention.api.IMPLEMENTATIONS); auto is the platform's.
    matmul: xla, or packed: weights are laid out at load for a kernel (pallas_kernels/packed_matmul), on one CPU; auto:
      packed where that can be.
    quantization: none, or int8: the linear layers' weights and the head's are held as int8 with a scale an output.
    block_size: tokens a KV block; 0 is what the attention likes best.
    kv_cache_mb: memory for KV in MiB, over all devices; 0 takes what is free (on CPU, where nobody knows, 256).
    num_blocks: exact size of the pool instead; 0 sizes it by memory.
    max_model_len: 0 is the model's own.
    prefill_chunk: 0 is what suits the matmul, within the ladder.
    num_devices: how many to spread the model over; 0 is all.
    overlap: auto, true or false; auto is true, but on a CPU whose steps are long beside the host's part.
    prefill_devices: with batching disaggregated, how many of them do prefill; 0 is half of them.
    compile_cache_dir: where compiled programs are kept between starts; "" keeps none.
    executable_bundle: folder of executables made before, which are loaded instead of compiled where they fit; "": none.
    write_executable_bundle: store there what had to be compiled.
    num_token_ids: ids that the tokenizer makes; a model of fewer is refused. 0: there is no tokenizer.
    deterministic: the same request has the same bits in any company (engine/device/deterministic.py).
  """

  model_dir: str
  random_weights: bool = False
  dtype: str = "auto"
  attention: str = "auto"
  matmul: str = "auto"
  quantization: str = "none"
  kv_cache_mb: int = 0
  num_blocks: int = 0
  block_size: int = 0
  token_budgets: tuple[int, ...] = EngineConfig.token_budgets
  max_num_seqs: int = EngineConfig.max_num_seqs
  max_model_len: int = 0
  prefill_chunk: int = 0
  overlap: str = "auto"
  max_queued_requests: int = EngineConfig.max_queued_requests
  max_queued_tokens: int = EngineConfig.max_queued_tokens
  queue_timeout_s: float = EngineConfig.queue_timeout_s
  request_timeout_s: float = EngineConfig.request_timeout_s
  policy: str = EngineConfig.policy
  batching: str = EngineConfig.batching
  dynamic_window_s: float = EngineConfig.dynamic_window_s
  dynamic_max_batch: int = EngineConfig.dynamic_max_batch
  admission: str = EngineConfig.admission
  aging_s: float = EngineConfig.aging_s
  sjf_aging_tokens_per_s: float = EngineConfig.sjf_aging_tokens_per_s
  tier_share: float = EngineConfig.tier_share
  tier_delay_s: float = EngineConfig.tier_delay_s
  tier_long_context: int = EngineConfig.tier_long_context
  max_queued_share_per_tenant: float = EngineConfig.max_queued_share_per_tenant
  enable_prefix_caching: bool = EngineConfig.enable_prefix_caching
  prefix_cache_scope: str = EngineConfig.prefix_cache_scope
  num_devices: int = 1
  prefill_devices: int = 0
  compile_cache_dir: str = ""
  executable_bundle: str = ""
  write_executable_bundle: bool = False
  num_token_ids: int = 0
  deterministic: bool = False

  def __post_init__(self):
    if self.dtype not in _DTYPES:
      raise ConfigError(f"dtype={self.dtype!r} is not one of {', '.join(_DTYPES)}; set --dtype")
    if self.attention not in ("auto", *api.IMPLEMENTATIONS):
      raise ConfigError(
        f"attention={self.attention!r} is not one of auto, {', '.join(api.IMPLEMENTATIONS)}; set --attention"
      )
    if self.matmul not in _MATMULS:
      raise ConfigError(f"matmul={self.matmul!r} is not one of {', '.join(_MATMULS)}; set --matmul")
    if self.quantization not in _QUANTIZATIONS:
      raise ConfigError(
        f"quantization={self.quantization!r} is not one of {', '.join(_QUANTIZATIONS)}; set --quantization"
      )
    if self.overlap not in _OVERLAPS:
      raise ConfigError(f"overlap={self.overlap!r} is not one of {', '.join(_OVERLAPS)}; set --overlap")
    for name in ("kv_cache_mb", "num_blocks", "block_size", "max_model_len", "num_devices", "prefill_devices"):
      if getattr(self, name) < 0:
        raise ConfigError(f"{name}={getattr(self, name)} must be 0 or more; set --{name}")
    if self.kv_cache_mb and self.num_blocks:
      raise ConfigError(
        f"kv_cache_mb={self.kv_cache_mb} and num_blocks={self.num_blocks} both size the KV pool; "
        "set only one of --kv_cache_mb and --num_blocks"
      )
    if self.executable_bundle and self.batching == "disaggregated":
      raise ConfigError(
        f"executable_bundle={self.executable_bundle} holds the programs of one engine, and batching=disaggregated has "
        "two; leave --executable_bundle empty, or choose another --batching"
      )
    if self.write_executable_bundle and not self.executable_bundle:
      raise ConfigError("write_executable_bundle needs a folder to write to; set --executable_bundle")
    ShapeLadder(self.token_budgets, self.max_num_seqs)
    config = self.engine_config(
      vocab_size=2**31 - 1,
      max_model_len=max(1, self.max_model_len),
      num_blocks=max(1, self.num_blocks),
      block_size=max(1, self.block_size),
      eos_token_ids=(),
    )
    make_policy(config)
    AdmissionControl(config)
    make_batching(config)

  def engine_config(
    self, vocab_size: int, max_model_len: int, num_blocks: int, block_size: int, eos_token_ids: tuple[int, ...]
  ) -> EngineConfig:
    """The engine's settings, once the model and the device are known. Raises ConfigError."""
    known = {
      "vocab_size": vocab_size,
      "max_model_len": max_model_len,
      "num_blocks": num_blocks,
      "block_size": block_size,
      "eos_token_ids": eos_token_ids,
    }
    chosen = {
      field.name: getattr(self, field.name) for field in dataclasses.fields(EngineConfig) if field.name not in known
    }
    chosen["overlap"] = self.overlap != "false"
    chosen["prefill_chunk"] = self.prefill_chunk or default_prefill_chunk(self.token_budgets)
    return EngineConfig(**known, **chosen)


@dataclasses.dataclass(frozen=True)
class Built:
  """An engine that is ready, and what it was made of.

  Attributes:
    engine: nothing submitted yet; its loop is not running.
    runner: the device (that of decodes, if there are two), for `compiles_after_ready`.
    attention: name of the paged attention in use.
    matmul: "xla" or "packed".
    quantization: as asked for.
    fallbacks: why one of them is not the platform's best, a line each.
    deterministic: what that costs, a line; "" where it was not asked for.
    model: numbers of the decoder.
    model_name: as the checkpoint calls it.
    config: the engine's settings.
    tokenizer_dir: the folder of tokenizer.json, or None where the model has none.
    load_s, warmup_s: seconds for the weights, and for compiling and the first run of every program.
    bundle_whole: the next start with the same options finds every program in the executable bundle.
  """

  engine: Engine | DisaggregatedEngine
  runner: ModelRunner
  attention: str
  matmul: str
  quantization: str
  fallbacks: tuple[str, ...]
  model: ModelConfig
  model_name: str
  config: EngineConfig
  tokenizer_dir: str | None
  load_s: float
  warmup_s: float
  bundle_whole: bool
  deterministic: str = ""


@dataclasses.dataclass(frozen=True)
class _Side:
  """A model on some of the devices, ready to run."""

  scheduler: Scheduler
  runner: ModelRunner
  loaded: LoadedModel
  attention: str
  matmul: str
  fallbacks: tuple[str, ...]
  load_s: float
  trial: dict[int, bytes]


def build(
  options: BuildOptions,
  progress: Progress,
  emit: Emit,
  clock: Callable[[], float] = time.monotonic,
  engine_class: type[Engine] = Engine,
) -> Built:
  """Makes everything, ready to serve.

  Args:
    options: what the user chose.
    progress: called as (what, done, of how many) while it goes on; `what` is "load", "compile" or "warm up".
    emit, clock: given to the Engine.
    engine_class: Engine, or one that does more.

  Raises:
    CheckpointError: the folder is missing or broken.
    ConfigError: settings do not fit each other, the model or the machine.
  """
  cache_reason = compile_cache.use(options.compile_cache_dir) if options.compile_cache_dir else ""
  devices = _devices(options.num_devices)
  if options.deterministic:
    num_prefill = (options.prefill_devices or len(devices) // 2) if options.batching == "disaggregated" else 0
    deterministic.check(devices, _attention_candidates(options.attention, devices[0].platform), num_prefill)
  bundle = Bundle(options.executable_bundle) if options.executable_bundle else None
  started = time.perf_counter()
  if options.batching == "disaggregated":
    num_prefill = options.prefill_devices or len(devices) // 2
    if not 0 < num_prefill < len(devices):
      raise ConfigError(
        f"batching=disaggregated splits {len(devices)} devices into {num_prefill} for prefill and "
        f"{len(devices) - num_prefill} for decode, and each side needs one; set --num_devices and --prefill_devices"
      )
    first = _build_side(options, devices[:num_prefill], progress, None)
    side = _build_side(options, devices[num_prefill:], progress, None)
    if first.trial != side.trial:
      raise ConfigError(
        "deterministic: a trial prompt has other bits on the devices for prefill than on those for decode; serve "
        "without --batching=disaggregated or without --deterministic"
      )
    first.runner.connect(side.runner)
    sides = (first.scheduler, first.runner), (side.scheduler, side.runner)
    engine = DisaggregatedEngine(*sides, clock, emit, engine_class)
    first.runner.seal()
    load_s = first.load_s + side.load_s
  else:
    anew = options.write_executable_bundle and devices[0].platform == "cpu"
    with compile_cache.set_aside() if anew else contextlib.nullcontext():
      side = _build_side(options, devices, progress, bundle)
    engine = engine_class(side.scheduler, side.runner, clock, emit)
    load_s = side.load_s
  side.runner.seal()
  warmup_s = time.perf_counter() - started - load_s
  if bundle is not None and options.write_executable_bundle:
    bundle.write(side.scheduler.config.num_blocks)
  if options.compile_cache_dir and not cache_reason:
    compile_cache.look_through(options.compile_cache_dir)
  bundle_note = bundle.note() if bundle is not None else ""
  return Built(
    engine=engine,
    runner=side.runner,
    attention=side.attention,
    matmul=side.matmul,
    quantization=options.quantization,
    fallbacks=tuple(reason for reason in (*side.fallbacks, cache_reason, bundle_note) if reason),
    model=side.loaded.config,
    model_name=side.loaded.name,
    config=side.scheduler.config,
    tokenizer_dir=side.loaded.tokenizer_dir,
    load_s=load_s,
    warmup_s=warmup_s,
    deterministic=deterministic.cost(side.scheduler.ladder) if options.deterministic else "",
    bundle_whole=bundle is not None and bundle.is_whole,
  )


def _build_side(options: BuildOptions, devices: list[Any], progress: Progress, bundle: Bundle | None) -> _Side:
  """Loads, sizes, compiles and warms up; on several devices the model is spread over them."""
  mesh = mesh_lib.make_mesh(devices)
  device = devices[0]
  candidates = _attention_candidates(options.attention, device.platform)
  dtype = jnp.dtype(
    ("float32" if device.platform == "cpu" else "bfloat16") if options.dtype == "auto" else options.dtype
  )
  started = time.perf_counter()
  progress("load", 0, 1)
  matmul, matmul_reason = _choose_matmul(options.matmul, mesh, dtype)
  if matmul == "packed" and not options.prefill_chunk:
    chunk = default_prefill_chunk(options.token_budgets, CPU_PREFILL_CHUNK)
    options = dataclasses.replace(options, prefill_chunk=chunk)
  form = WeightForm(packed=matmul == "packed", int8=options.quantization == "int8")
  if form.int8 and not form.packed and device.platform == "cpu":
    why = matmul_reason or "matmul=xla"
    matmul_reason = f"{why}; int8 weights are converted at every step, which saves memory but no time"

  def before(model: ModelConfig, params: dict[str, jax.ShapeDtypeStruct]) -> None:
    attention, _, block_size, max_model_len = _choose_attention(options, candidates, model, dtype)
    blocks = options.num_blocks or -(-max_model_len // block_size)
    block_bytes = kv_cache.bytes_per_block(model, block_size, dtype, attention)
    kv_bytes = options.kv_cache_mb * 2**20 or (blocks + 1) * block_bytes
    largest = ShapeLadder(options.token_budgets, options.max_num_seqs).rungs()[-1]
    step = step_bytes(model, largest, dtype.itemsize, mesh.size)
    step_for = f"{largest.tokens} tokens of {largest.rows} sequences"
    check_fits(options.model_dir, mesh, params, kv_bytes, _kv_setting(options, max_model_len), step, step_for)

  loaded = load_checkpoint(options.model_dir, mesh, dtype, form, options.random_weights, options.num_token_ids, before)
  jax.block_until_ready(loaded.params)
  progress("load", 1, 1)
  load_s = time.perf_counter() - started
  if options.overlap == "auto":
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
    overlap = default_overlap(device.platform, weight_bytes)
    options = dataclasses.replace(options, overlap="true" if overlap else "false")

  model = loaded.config
  attention, attention_reason, block_size, max_model_len = _choose_attention(options, candidates, model, dtype)
  if options.deterministic:
    budgets = deterministic.ladder_of(options.token_budgets, options.max_num_seqs, device.platform, attention, matmul)
    options = dataclasses.replace(options, token_budgets=budgets, prefill_chunk=min(options.prefill_chunk, budgets[-1]))
  ladder = ShapeLadder(options.token_budgets, options.max_num_seqs)
  table_width = -(-max_model_len // block_size)
  leaves, tree = jax.tree.flatten(loaded.params)

  def spec(num_blocks: int) -> ProgramSpec:
    return ProgramSpec(
      mesh=mesh,
      model=model,
      graphdef=loaded.graphdef,
      params_tree=tree,
      params=tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in leaves),
      kv=kv_cache.abstract(mesh, model, num_blocks, block_size, dtype, attention),
      block_size=block_size,
      table_width=table_width,
      num_slots=options.max_num_seqs,
      num_eos=len(loaded.eos_token_ids),
      attention=attention,
      device_kind=device.device_kind,
      deterministic=options.deterministic,
      argmax=argmax.choose(device.platform, mesh.size),
    )

  _check_attention(spec(table_width), ladder, dtype)
  num_blocks = options.num_blocks or _stored_pool(options, bundle, spec, ladder)
  num_blocks = num_blocks or _size_pool(options, loaded, spec, ladder)
  config = options.engine_config(model.vocab_size, max_model_len, num_blocks, block_size, loaded.eos_token_ids)
  chosen, make = spec(num_blocks), Program.compile
  if bundle is not None:
    bundle.begin(made_for(chosen, ladder.rungs()), mesh)
    make = bundle.executable
  runner = ModelRunner(chosen, tuple(leaves), ladder, config.eos_token_ids, progress, make)
  if device.platform == "cpu":
    host_memory.keep_freed()  # not before: what loading and compiling took may go back
  runner.warm_up(progress)
  trial = deterministic.try_out(runner, config, ladder) if options.deterministic else {}
  fallbacks = tuple(reason for reason in (attention_reason, matmul_reason) if reason)
  return _Side(Scheduler(config), runner, loaded, attention, matmul, fallbacks, load_s, trial)


def _devices(count: int) -> list[Any]:
  found = jax.devices()
  if count > len(found):
    raise ConfigError(
      f"num_devices={count}, but this machine has {len(found)} ({found[0].platform}); lower --num_devices"
    )
  return found[:count] if count else found


def _attention_candidates(requested: str, platform: str) -> tuple[str, ...]:
  try:
    return api.candidates(requested, platform)
  except NotImplementedError as error:
    raise ConfigError(str(error)) from error


def _choose_attention(
  options: BuildOptions, candidates: tuple[str, ...], model: ModelConfig, dtype: jnp.dtype
) -> tuple[str, str, int, int]:
  """The implementation, why it is not the best one ("" if it is), tokens a block, and the longest sequence."""
  attention, reason = api.choose(
    candidates, lambda name: api.check_supported(name, _geometry(model, options.block_size, name), dtype)
  )
  max_model_len = options.max_model_len or model.max_position
  if max_model_len > model.max_position:
    raise ConfigError(
      f"max_model_len={max_model_len} exceeds the {model.max_position} positions of {options.model_dir}; "
      "lower --max_model_len, or leave it at 0"
    )
  return attention, reason, options.block_size or api.preferred_block_size(attention), max_model_len


def _kv_setting(options: BuildOptions, max_model_len: int) -> str:
  """What decides on the smallest pool."""
  if options.kv_cache_mb:
    return f"--kv_cache_mb={options.kv_cache_mb}"
  return f"--num_blocks={options.num_blocks}" if options.num_blocks else f"one sequence of {max_model_len} tokens"


def _choose_matmul(requested: str, mesh: Mesh, dtype: jnp.dtype) -> tuple[str, str]:
  """How weights are multiplied by, and why not packed where one would expect that ("" elsewhere)."""
  if requested == "xla":
    return "xla", ""
  platform = mesh.devices.flat[0].platform
  expected, reason = platform == "cpu" and mesh.size == 1, ""
  if expected:
    try:
      packed_matmul.check_supported(dtype)
    except NotImplementedError as error:
      reason = str(error)
  else:
    reason = f"packed matmul: only on one device of platform cpu, not on {mesh.size} of {platform}"
  if not reason:
    return "packed", ""
  if requested == "packed":
    raise ConfigError(f"{reason}; set --matmul=xla")
  return "xla", reason if expected else ""


def _geometry(model: ModelConfig, block_size: int, attention: str) -> Geometry:
  """What of a step's attention is known before there is a ladder."""
  return Geometry(
    tokens=1,
    rows=1,
    table_width=1,
    block_size=block_size or api.preferred_block_size(attention),
    num_heads=model.num_heads,
    num_kv_heads=model.num_kv_heads,
    head_dim=model.head_dim,
    sliding_window=model.sliding_window,
  )


def _check_attention(spec: ProgramSpec, ladder: ShapeLadder, dtype: jnp.dtype) -> None:
  """Refuses before anything compiles what the attention kernels cannot do; never falls back unasked."""
  try:
    for shape in ladder.rungs():
      api.check_supported(spec.attention, spec.attention_of(shape).geometry, dtype)
  except NotImplementedError as error:
    raise ConfigError(f"{error}; or set --attention=reference, which runs anywhere, slowly") from error


def _stored_pool(
  options: BuildOptions, bundle: Bundle | None, spec: Callable[[int], ProgramSpec], ladder: ShapeLadder
) -> int:
  """Where memory decides on the pool: the blocks of a bundle that fits else, if there is memory for them; or 0.

  Free memory is never twice the same to the byte, and executables are for one size of the pool. Asking the bundle also
  saves compiling a step only to learn what memory it needs.
  """
  if options.kv_cache_mb or bundle is None or bundle.pool is None:
    return 0
  num_blocks, step_bytes = bundle.pool
  stored = spec(num_blocks)
  if num_blocks < stored.table_width or not bundle.fits(made_for(stored, ladder.rungs())):
    return 0
  free = kv_cache.free_bytes(stored.mesh, _slot_bytes(stored) + step_bytes, reserve_share=0.02)
  kv_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in stored.kv)
  return num_blocks if free is not None and kv_bytes <= free else 0


def _slot_bytes(spec: ProgramSpec) -> int:
  """Of the sampler's state."""
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(spec.slot_state))


def _size_pool(
  options: BuildOptions, loaded: LoadedModel, spec: Callable[[int], ProgramSpec], ladder: ShapeLadder
) -> int:
  """Blocks that the memory holds, as many as can be of use."""
  smallest = spec(1)
  table_width = smallest.table_width
  block_bytes = kv_cache.bytes_per_block(loaded.config, smallest.block_size, smallest.kv[0].dtype, smallest.attention)
  shares_prefixes = options.enable_prefix_caching and options.prefix_cache_scope != "off"
  # Twice what can run at once: the rest keeps prefixes of what ran before.
  most_useful = options.max_num_seqs * table_width * (2 if shares_prefixes else 1)
  available = options.kv_cache_mb * 2**20
  if not available:
    trial = spec(table_width)  # what a step needs does not depend on the size of the pool
    available = kv_cache.free_bytes(trial.mesh, 0)
    if available is None:
      available = _CPU_KV_CACHE_MB * 2**20
    else:
      analysis = compile_step(trial, ladder.rungs()[-1]).memory_analysis()
      step_bytes = analysis.temp_size_in_bytes if analysis else 0
      available = kv_cache.free_bytes(trial.mesh, _slot_bytes(trial) + step_bytes) or 0
  return kv_cache.fit_blocks(available, block_bytes, table_width, most_useful)
