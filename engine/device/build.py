"""Builds a ready engine from a model folder: loads, sizes, compiles, warms up and seals. May not schedule requests.

It measures the memory for the KV pool, and pool_size.py sizes the pool. It rejects settings that contradict each other
or the model before it allocates memory for them.
"""

from collections.abc import Callable
import dataclasses
import functools
import hashlib
import importlib.util
import os
import time
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from engine import accelerator
from engine.build_facts import DeviceFact, FactReporter, KVFact, ModelFact, ProgramsFact, ProgramsMadeFact, ignore_fact
from engine.config import EngineConfig, choose_overlap, choose_speculation
from engine.device import compile_cache, deterministic, host_memory, kv_cache
from engine.device import mesh as mesh_lib
from engine.device.adapter_folder import AdapterArrays, AdapterReader
from engine.device.adapter_support import adapter_bytes, adapter_step_bytes, check_adapter_support, slot_rank
from engine.device.draft_folder import OpenDraft, open_draft
from engine.device.draft_model import DraftModel
from engine.device.host_blocks import device_bytes
from engine.device.kernel_choice import (
  attention_candidates,
  check_dtype,
  choose_attention,
  choose_matmul,
  choose_matrix_form,
  fit_to_attention,
  multiplies_fp8,
)
from engine.device.memory_check import check_fits, host_free_bytes, size_host_pool, step_bytes
from engine.device.options import BuildOptions
from engine.device.pool_size import CPU_KV_BYTES, PoolSize, PoolSizer
from engine.device.pooling import choose_pooling
from engine.device.programs import Program, ProgramSpec, adapter_shardings, all_programs, step_program
from engine.device.runner import Making, ModelRunner, Progress
from engine.device.served_model import ServedModel
from engine.device.stored_programs import open_stored_programs
from engine.device.weights import LoadedModel, open_checkpoint
from engine.engine import Emit, Engine
from engine.errors import ConfigError
from engine.scheduler import Scheduler
from engine.settings import SchedulingSettings, declared_settings
from engine.shapes import LadderChoice, ShapeLadder, StepShape
from models.config import ModelConfig
from models.registry import architecture_of
from models.split import ModelSplit
from models.weight_form import WeightForm
from pallas_kernels import native
from pallas_kernels.low_rank.api import choose_low_rank
from pallas_kernels.paged_attention import api as paged_attention

_GPU_MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # JAX rejects both at once
_MIB = 2**20
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin", "libtpu")  # JAX's packages for accelerators


class ExecutableSource(Protocol):
  """A source of compiled executables. The build calls its methods in their order here.

  Attributes:
    has_draft_programs: it also has those of a draft model or an EAGLE-3 head.
  """

  has_draft_programs: bool

  def choose_pool(
    self,
    sizer: PoolSizer,
    spec: Callable[[int, int], ProgramSpec],
    rungs: tuple[StepShape, ...],
    cpu_bytes: int | None,
  ) -> PoolSize | None:
    """Returns the pool of its executables if the memory holds it. The build calls this if memory decides the size.

    Args:
      spec: makes the programs' spec from the numbers of blocks and max_model_len.
      cpu_bytes: memory for KV on a CPU, if the system reports it.
    """
    ...

  def begin(self, spec: ProgramSpec, rungs: tuple[StepShape, ...]) -> None:
    """Announces the programs that the build will request."""
    ...

  def executable(self, program: Program) -> jax.stages.Compiled:
    """Returns the program's executable, or compiles it. Safe on any thread."""
    ...

  def finish(self, num_blocks: int) -> str:
    """Called after all programs ran with a pool of `num_blocks`. Returns why it compiled some, a line, or ""."""
    ...


@dataclasses.dataclass(frozen=True)
class Built:
  """A ready engine and its properties.

  Attributes:
    engine: has no requests; its loop does not run yet.
    runner: the runner (of decodes, if there are two), for `compiles_after_ready`.
    attention: name of the paged attention in use.
    matmul: "xla" or "packed".
    quantization: what the weights are: "none", the setting, or what a folder of low-precision weights holds.
    fallbacks: why attention or matmul is not the platform's best, a line each.
    lowered: why the default max_model_len is below the model's own, and the flags that change it; else "".
    warnings: warnings about the model folder, a line each.
    read_adapter: reads a LoRA adapter's folder for Engine.load_adapter, on any thread; None without --enable_lora.
    ladder: the ladder and the reason for it.
    deterministic: the cost of --deterministic, a line; "" without it.
    model: configuration of the decoder.
    model_name: name in the checkpoint.
    config: the engine's settings.
    load_s, warmup_s: seconds to load weights, and to compile and first run every program.
  """

  engine: Engine
  runner: ModelRunner
  attention: str
  matmul: str
  quantization: str
  fallbacks: tuple[str, ...]
  ladder: LadderChoice
  model: ModelConfig
  model_name: str
  config: EngineConfig
  load_s: float
  warmup_s: float
  deterministic: str = ""
  lowered: str = ""
  warnings: tuple[str, ...] = ()
  read_adapter: Callable[[str], AdapterArrays] | None = None


@dataclasses.dataclass(frozen=True)
class EngineSide:
  """A ready model on some of the devices."""

  scheduler: Scheduler
  runner: ModelRunner
  loaded: LoadedModel
  attention: str
  matmul: str
  quantization: str
  fallbacks: tuple[str, ...]
  load_s: float
  warmup_s: float
  trial: dict[int, bytes]
  lowered: str
  ladder: LadderChoice


def build_engine(
  options: BuildOptions,
  progress: Progress,
  emit: Emit,
  clock: Callable[[], float] = time.monotonic,
  engine_class: type[Engine] = Engine,
  source: ExecutableSource | None = None,
  report_fact: FactReporter = ignore_fact,
) -> Built:
  """Builds an engine that is ready to serve.

  Args:
    options: the user's settings.
    progress: called with (what, done, total) as work proceeds; `what` is "load" (MiB), "compile" or "warm up"
      (programs).
    emit, clock: arguments of the Engine.
    engine_class: Engine or a subclass.
    source: source of executables; None: compiles all.
    report_fact: called with each fact as soon as the build knows it.

  Raises:
    CheckpointError: the folder is missing or invalid.
    ConfigError: settings contradict each other, the model or the machine.
  """
  if options.batching == "disaggregated":
    raise ConfigError(
      "batching=disaggregated needs two engines, and this program makes one; set --batching=chunked, or run server.main"
    )
  devices, cache_reason = begin_build(options)
  side = build_side(options, devices, progress, source, report_fact=report_fact)
  engine = engine_class(side.scheduler, side.runner, clock, emit)
  return finish_build(options, cache_reason, engine, side, source=source)


def begin_build(options: BuildOptions) -> tuple[list[Any], str]:
  """Opens the compile cache and finds the devices.

  Returns:
    The devices (jax.Device), and why the cache cannot keep compiled programs, or "".

  Raises:
    ConfigError: the machine has too few devices, or other users may write to the cache.
  """
  cache_reason = compile_cache.use_compile_cache(options.compile_cache_dir) if options.compile_cache_dir else ""
  return find_devices(options.num_devices), cache_reason


def finish_build(
  options: BuildOptions,
  cache_reason: str,
  engine: Engine,
  side: EngineSide,
  *others: EngineSide,
  source: ExecutableSource | None = None,
) -> Built:
  """Seals the runners and describes the engine; `side` is the one that decodes."""
  for each in (*others, side):
    each.runner.seal()
  source_note = source.finish(side.scheduler.config.num_blocks) if source is not None else ""
  if options.compile_cache_dir and not cache_reason:
    compile_cache.check_cached_programs(options.compile_cache_dir)
  return Built(
    engine=engine,
    runner=side.runner,
    attention=side.attention,
    matmul=side.matmul,
    quantization=side.quantization,
    fallbacks=tuple(reason for reason in (*side.fallbacks, cache_reason, source_note) if reason),
    ladder=side.ladder,
    model=side.loaded.config,
    model_name=side.loaded.name,
    config=side.scheduler.config,
    load_s=sum(each.load_s for each in (side, *others)),
    warmup_s=sum(each.warmup_s for each in (side, *others)),
    deterministic=deterministic.describe_cost(side.scheduler.ladder) if options.deterministic else "",
    lowered=next((each.lowered for each in (side, *others) if each.lowered), ""),
    warnings=side.loaded.warnings,
    read_adapter=_make_reader(side, options.max_lora_rank),
  )


def _make_reader(side: EngineSide, max_rank: int) -> AdapterReader | None:
  spec = side.runner.spec
  if not spec.max_loras:
    return None
  place = functools.partial(jax.device_put, device=list(adapter_shardings(spec)))
  dtype, num_devices = spec.adapters[0].dtype, spec.split.num_devices
  return AdapterReader(side.loaded.config, max_rank, spec.max_lora_rank, dtype, place, num_devices)


def build_side(
  options: BuildOptions,
  devices: list[Any],
  progress: Progress,
  source: ExecutableSource | None,
  num_sides: int = 1,
  report_fact: FactReporter = ignore_fact,
  agree_on_blocks: Callable[[int], int] | None = None,
) -> EngineSide:
  """Loads, sizes, compiles and warms up one engine side; several devices share each layer of the model.

  Args:
    num_sides: sides still to build, including this one; on a CPU they share one memory.
    report_fact: as in build_engine.
    agree_on_blocks: maps the blocks that this host's memory holds to those that all hosts hold; None: one host.
  """
  mesh = mesh_lib.make_mesh(devices)
  device = devices[0]
  candidates, capability_reason = attention_candidates(options.attention, device)
  check_adapter_support(options, source is not None)
  if options.host_kv_mb and source is not None:
    raise ConfigError(
      f"host_kv_mb={options.host_kv_mb}: a bundle has no programs that copy blocks; serve without --executable_bundle "
      "or without --host_kv_mb"
    )
  if options.deterministic:
    deterministic.check_determinism_support(candidates)
  dtype = jnp.dtype(
    ("float32" if device.platform == "cpu" else "bfloat16") if options.dtype == "auto" else options.dtype
  )
  check_dtype(dtype, device)
  kv_dtype = dtype if options.kv_dtype == "auto" else paged_attention.EIGHT_BIT_KV[options.kv_dtype]
  started = time.perf_counter()
  matmul, matmul_reason = choose_matmul(options.matmul, mesh, dtype)
  matrix, slowness = choose_matrix_form(options, matmul, device)
  form = WeightForm(
    packed=matmul == "packed",
    matrix=matrix,
    ordered=options.deterministic,
    flat=device.platform == "tpu",
    keeps_fp8=multiplies_fp8(device),
  )
  if slowness:
    matmul_reason = f"{matmul_reason or 'matmul=xla'}; {slowness}"
  checkpoint = open_checkpoint(options.model_dir, mesh, dtype, form, options.random_weights, options.num_token_ids)
  if options.quantization != "auto" and not checkpoint.is_requantizable:
    raise ConfigError(
      f"quantization={options.quantization}: {options.model_dir:.200} holds {checkpoint.label} weights already; set "
      "--quantization=auto, or --model to plain weights"
    )
  if checkpoint.has_codes and not (form.packed or form.flat):
    slow = f"every step converts {checkpoint.label} weights, which saves memory but no time"
    matmul_reason = f"{matmul_reason or 'matmul=xla'}; {slow}"
  quantization = options.quantization
  if quantization in ("auto", "none"):
    quantization = checkpoint.label or "none"
  declared = checkpoint.declared
  model = declared.config
  if not model.has_token_head:
    if options.batching == "disaggregated":
      raise ConfigError(
        f"batching=disaggregated: {architecture_of(model)} has no head of tokens, so it needs no decode; serve without "
        "--batching=disaggregated"
      )
    options = dataclasses.replace(options, enable_embeddings=True)  # it serves nothing else
  pooling = choose_pooling(options, model)
  share = ModelSplit(model, mesh_lib.num_shares(mesh)).share
  attention, attention_reason, block_size, wanted_len = choose_attention(options, candidates, share, dtype, kv_dtype)
  fallbacks = tuple(reason for reason in (capability_reason, attention_reason, matmul_reason) if reason)
  report_fact(
    DeviceFact(
      kind=device.device_kind,
      count=len(devices),
      dtype=dtype.name,
      attention=attention,
      matmul=matmul,
      quantization=quantization,
      fallbacks=fallbacks,
    )
  )
  draft: OpenDraft | None = None
  if options.draft_model:
    if source is not None and not source.has_draft_programs:
      raise ConfigError(
        f"draft_model={options.draft_model:.200}: a bundle has no programs of a draft model; serve without "
        "--executable_bundle or without --draft_model"
      )
    served = ServedModel(
      folder=options.model_dir,
      config=model,
      mesh=mesh,
      dtype=dtype,
      form=form,
      kv_dtype=kv_dtype,
      block_size=block_size,
      attention=attention,
      random_weights=options.random_weights,
    )
    draft = open_draft(options.draft_model, served)
    draft.check_length(wanted_len)
  computes_padding = matmul != "packed"  # packed kernels skip padding
  one_size = options.deterministic and deterministic.needs_one_size(attention, matmul)
  choice = options.choose_ladder(device.platform, not computes_padding, one_size)
  ladder = choice.ladder
  block_bytes = kv_cache.bytes_per_block(model, block_size, kv_dtype, attention, mesh_lib.num_shares(mesh))
  sizer = PoolSizer(
    block_bytes=block_bytes + (draft.block_bytes if draft is not None else 0),
    block_size=block_size,
    longest=wanted_len,
    is_chosen=bool(options.max_model_len),
    max_num_seqs=choice.max_num_seqs,
    shares_prefixes=options.prefix_cache_scope != "off",
  )
  kv_bytes, kv_for = _smallest_pool(options, sizer)
  largest = ladder.rungs()[-1]
  step = step_bytes(share, largest, dtype.itemsize)
  low_rank = choose_low_rank(device.platform, dtype)
  rank = slot_rank(options, low_rank)
  step += adapter_bytes(options, share, rank, dtype) + adapter_step_bytes(options, rank, largest.tokens)
  copying = device_bytes(block_bytes) // mesh.size if options.host_kv_mb else 0
  step += copying
  step_for = f"{largest.tokens} tokens of {largest.rows} sequences"
  kept = dict(checkpoint.kept)
  if draft is not None:
    kept |= {f"draft {name}": leaf for name, leaf in draft.kept.items()}
  left = check_fits(options.model_dir, mesh, kept, kv_bytes, kv_for, step, step_for)
  if device.platform == "cpu":
    left_for_host, beside = None if left is None else left - kv_bytes, f" beside weights, a step and KV ({kv_for})"
  else:
    left_for_host, beside = host_free_bytes(), ""
  host_dir = options.host_kv_dir
  num_host_blocks = size_host_pool(options.host_kv_mb, block_bytes, left_for_host, beside, host_dir)
  if left is not None and device.platform == "cpu" and not host_dir:
    left -= num_host_blocks * block_bytes
  weight_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in checkpoint.kept.values())
  abstract, tree = jax.tree.flatten(declared.params)

  def spec(num_blocks: int, max_model_len: int) -> ProgramSpec:
    return ProgramSpec(
      mesh=mesh,
      model=model,
      graphdef=declared.graphdef,
      params_tree=tree,
      params=tuple(abstract),
      dtype=dtype,
      kv=kv_cache.abstract(mesh, model, num_blocks, block_size, kv_dtype, attention),
      block_size=block_size,
      table_width=-(-max_model_len // block_size),
      num_slots=choice.max_num_seqs,
      num_eos=len(declared.eos_token_ids),
      attention=attention,
      device_kind=device.device_kind,
      deterministic=options.deterministic,
      argmax=native.choose_implementation("argmax", device.platform),
      sampling=native.choose_implementation("sampling", device.platform),
      adjust=native.choose_implementation("adjust", device.platform),
      embeds=options.enable_embeddings,
      max_loras=options.max_loras if options.enable_lora else 0,
      max_lora_rank=rank,
      low_rank=low_rank,
      weight_form=hashlib.sha256(repr(checkpoint.form).encode()).hexdigest(),
      feature_layers=() if draft is None else draft.feature_layers,
    )

  longest, length_reason = fit_to_attention(
    lambda width: spec(1, width * block_size), wanted_len, sizer.is_chosen, ladder
  )
  if draft is not None:  # its shapes too, or an error
    fit_to_attention(lambda width: draft.make_spec(spec(1, width * block_size), 1), longest, True, ladder)
  sizer = dataclasses.replace(sizer, longest=longest)

  def load() -> tuple[LoadedModel, float]:
    total = -(-weight_bytes // _MIB)
    progress("load", 0, total)
    # Reports the last MiB when all weights are on the devices.
    loaded = checkpoint.load(lambda done: progress("load", min(done // _MIB, total - 1), total))
    jax.block_until_ready(loaded.params)
    progress("load", total, total)
    return loaded, time.perf_counter() - started

  # On a CPU, programs compile while weights load. Elsewhere the pool size may depend on the memory that weights leave.
  before = None if device.platform == "cpu" else load()
  cpu_bytes = None
  if left is not None and device.platform == "cpu":
    cpu_bytes = sizer.cpu_bytes((left - (num_sides - 1) * (weight_bytes + step * mesh.size)) // num_sides, weight_bytes)
  pool = _size_pool(options, sizer, spec, ladder, source, cpu_bytes, copying)
  if agree_on_blocks is not None:
    pool = sizer.size_by_blocks(agree_on_blocks(pool.num_blocks), "the host with the least memory has")
  max_model_len = pool.max_model_len
  reasons = [reason for reason in (length_reason, pool.reason) if reason]
  lowered = _describe_lowering(wanted_len, max_model_len, reasons)
  report_fact(
    ModelFact(
      name=declared.name,
      folder=options.model_dir,
      num_parameters=checkpoint.num_parameters,
      num_bytes=weight_bytes,
      max_model_len=max_model_len,
      own_length=model.max_position,
      is_chosen=sizer.is_chosen,
      lowered="; ".join(reasons),
      is_random=options.random_weights,
      draft_name="" if draft is None else draft.name,
      num_draft_parameters=0 if draft is None else draft.num_parameters,
    )
  )
  report_fact(
    KVFact(
      num_blocks=pool.num_blocks,
      block_size=block_size,
      dtype=paged_attention.name_kv_dtype(kv_dtype),
      num_bytes=(pool.num_blocks + 1) * sizer.block_bytes,
      max_model_len=max_model_len,
      num_host_blocks=num_host_blocks,
      num_host_bytes=num_host_blocks * block_bytes,
      host_dir=host_dir,
    )
  )
  head = _describe_head(model)
  settings = {declared.name: getattr(options, declared.name) for declared in declared_settings(SchedulingSettings)}
  settings["speculation"] = choose_speculation(
    options.speculation, options.batching, choice.max_num_seqs, head.get("headless", ""), draft is not None
  )
  config = EngineConfig(
    vocab_size=model.vocab_size,
    max_model_len=max_model_len,
    num_blocks=pool.num_blocks,
    block_size=block_size,
    block_bytes=block_bytes,
    num_host_blocks=num_host_blocks,
    token_budgets=choice.token_budgets,
    max_num_seqs=choice.max_num_seqs,
    prefill_chunk=choice.prefill_chunk,
    computes_padding=computes_padding,
    has_draft_model=draft is not None,
    overlap=choose_overlap(options.overlap, device.platform, weight_bytes),
    eos_token_ids=declared.eos_token_ids,
    embedding_size=model.model_dim if options.enable_embeddings and model.class_head is None else 0,
    pooling=pooling,
    **head,
    **settings,
  )
  chosen, make, stored = spec(pool.num_blocks, max_model_len), Program.compile, None
  if source is not None:
    if options.enable_embeddings:
      raise ConfigError(
        f"{'enable_embeddings' if model.has_token_head else architecture_of(model)}: a bundle's programs return no "
        "embeddings; serve without --executable_bundle"
      )
    source.begin(chosen, ladder.rungs())
    make = source.executable
  elif draft is None and (stored := open_stored_programs(options.compile_cache_dir, chosen, ladder.rungs())):
    make = stored.executable
  programs = all_programs(chosen, ladder.rungs())
  draft_spec = None
  if draft is not None:
    draft_spec = draft.make_spec(chosen, pool.num_blocks)
    programs |= draft.make_programs(draft_spec, chosen, ladder.rungs(), config.num_proposals)
  report_fact(
    ProgramsFact(
      count=len(programs),
      token_budgets=choice.token_budgets,
      has_bundle=source is not None,
      cache_dir=options.compile_cache_dir,
      is_cache_empty=not compile_cache.has_cached_programs(options.compile_cache_dir),
    )
  )
  with Making(programs, make) as making:
    loaded, load_s = before or load()
    leaves = tuple(jax.tree.leaves(loaded.params))
    by_name = dict(zip(checkpoint.kept, leaves, strict=True))
    draft_leaves = () if draft is None or draft_spec is None else draft.load_leaves(draft_spec, by_name)
    made = making.wait(progress)
  if stored is not None:
    stored.keep()
  report_fact(ProgramsMadeFact(count=len(programs), num_compiled=making.num_compiled))
  weights = by_name.get("score.weight")
  class_weights = None if weights is None else np.asarray(weights, np.float64)
  runner = ModelRunner(
    chosen, leaves, ladder, config.eos_token_ids, made, config.pooling, class_weights, num_host_blocks, host_dir
  )
  if draft_spec is not None:
    runner.draft = DraftModel(draft_spec, draft_leaves, ladder, made)
  if device.platform == "cpu":
    host_memory.keep_freed()  # only now, so that the memory of loading and compiling returns to the system
  runner.warm_up(progress)
  trial = deterministic.try_determinism(runner, config, ladder) if options.deterministic else {}
  warmup_s = time.perf_counter() - started - load_s
  return EngineSide(
    scheduler=Scheduler(config),
    runner=runner,
    loaded=loaded,
    attention=attention,
    matmul=matmul,
    quantization=quantization,
    fallbacks=fallbacks,
    load_s=load_s,
    warmup_s=warmup_s,
    trial=trial,
    lowered=lowered,
    ladder=choice,
  )


def _describe_head(model: ModelConfig) -> dict[str, Any]:
  """Returns EngineConfig's fields on what a model without a head of tokens serves."""
  if model.has_token_head:
    return {}
  head = model.class_head
  found: dict[str, Any] = {"headless": architecture_of(model)}
  if head is not None:
    found |= {
      "labels": head.labels,
      "class_activation": head.activation,
      "pair_activation": head.pair_activation,
      "pad_token_id": head.pad_token_id,
    }
  return found


def _describe_lowering(wanted_len: int, max_model_len: int, reasons: list[str]) -> str:
  """Returns the line that explains why max_model_len is below the model's own, or ""."""
  if not reasons:
    return ""
  return (
    f"max_model_len is {max_model_len}, not the model's {wanted_len}: {'; '.join(reasons)}; --max_model_len chooses a "
    "length, --kv_cache_mb the memory"
  )


def find_devices(count: int) -> list[Any]:
  """Returns the first `count` devices of this process (jax.Device), or all for 0.

  Raises:
    ConfigError: the machine has fewer, or JAX chose the CPU by itself on a machine with a GPU or a TPU.
  """
  if not any(os.environ.get(name) for name in _GPU_MEMORY_VARIABLES):
    os.environ[_GPU_MEMORY_VARIABLES[0]] = str(kv_cache.GPU_MEMORY_SHARE)  # JAX reads it when its GPU backend starts
  chosen = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
  try:
    found = jax.devices()
  # JAX raises an empty AssertionError if the platform's plugin does not load.
  except (RuntimeError, AssertionError) as error:
    why = " ".join(str(error).split()).partition(" (set JAX_PLATFORMS")[0] or "its plugin is missing or does not load"
    raise ConfigError(
      f"JAX_PLATFORMS={chosen or ''}: JAX finds no such device ({why}); supported are cpu, cuda and tpu; unset "
      "JAX_PLATFORMS to use this machine's devices, or install JAX for the device (jax[cuda13], jax[tpu])"
    ) from error
  if found[0].platform == "cpu" and not chosen:
    machine = accelerator.read_machine(report=accelerator.ask_nvidia_smi())
    installed = (name for name in _PLUGINS if importlib.util.find_spec(name) is not None)
    accelerator.check_cpu_is_meant(machine, os.environ, next(installed, ""))
  if count > len(found):
    raise ConfigError(
      f"num_devices={count}, but this machine has {len(found)} ({found[0].platform}); lower --num_devices"
    )
  return found[:count] if count else found


def _smallest_pool(options: BuildOptions, sizer: PoolSizer) -> tuple[int, str]:
  """Returns the bytes of the smallest sufficient pool, and its purpose."""
  if options.kv_cache_mb:
    return options.kv_cache_mb * 2**20, f"--kv_cache_mb={options.kv_cache_mb}"
  if options.num_blocks:
    return (options.num_blocks + 1) * sizer.block_bytes, f"--num_blocks={options.num_blocks}"
  return sizer.bytes_for(sizer.least_length), f"one sequence of {sizer.least_length} tokens"


def _size_pool(
  options: BuildOptions,
  sizer: PoolSizer,
  spec: Callable[[int, int], ProgramSpec],
  ladder: ShapeLadder,
  source: ExecutableSource | None,
  cpu_bytes: int | None,
  copying: int,
) -> PoolSize:
  """Returns the configured pool, else the pool of `source`'s executables, else the pool that memory holds.

  Args:
    spec: makes the programs' spec from the numbers of blocks and max_model_len.
    cpu_bytes: memory for KV on a CPU, if the system reports it.
    copying: bytes of each device that copies of blocks need.
  """
  if options.num_blocks:
    return sizer.size_by_blocks(options.num_blocks, "--num_blocks gives")
  if options.kv_cache_mb:
    return sizer.size_by_memory(options.kv_cache_mb * 2**20, f"--kv_cache_mb={options.kv_cache_mb}")
  trial = spec(-(-sizer.longest // sizer.block_size), sizer.longest)
  on_cpu, memory = kv_cache.free_bytes(trial.mesh, 0) is None, "at most half of what weights and a step leave"
  if on_cpu and cpu_bytes is None:
    cpu_bytes, memory = CPU_KV_BYTES, "the default where the system does not report free memory"
  stored = source.choose_pool(sizer, spec, ladder.rungs(), cpu_bytes if on_cpu else None) if source else None
  if stored is not None:
    return stored
  if on_cpu:
    assert cpu_bytes is not None
    return sizer.size_by_memory(cpu_bytes, memory)
  # Does not depend on the size of the pool.
  analysis = step_program(trial, ladder.rungs()[-1], bool(trial.max_loras)).compile().memory_analysis()
  step_bytes = analysis.temp_size_in_bytes if analysis else 0
  available = kv_cache.free_bytes(trial.mesh, trial.slot_bytes + step_bytes + copying) or 0
  return sizer.size_by_memory(available, "left by weights and the largest step")
