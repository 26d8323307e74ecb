"""From a model folder to an engine that is ready: load, size, compile, warm up, seal. Run once, by whoever composes.

Finds the memory for the KV pool (pool_size.py sizes it). Settings that contradict each other or the model are refused
before memory is taken for them.
"""

from collections.abc import Callable
import dataclasses
import os
import time
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from engine.config import EngineConfig, choose_overlap
from engine.device import compile_cache, deterministic, host_memory, kv_cache
from engine.device import mesh as mesh_lib
from engine.device.kernel_choice import attention_candidates, choose_attention, choose_matmul, fit_to_attention
from engine.device.memory_check import check_fits, step_bytes
from engine.device.options import BuildOptions
from engine.device.pool_size import CPU_KV_BYTES, PoolSize, PoolSizer
from engine.device.programs import Program, ProgramSpec, all_programs, step_program
from engine.device.runner import Making, ModelRunner, Progress
from engine.device.weights import LoadedModel, open_checkpoint
from engine.engine import Emit, Engine
from engine.errors import ConfigError
from engine.scheduler import Scheduler
from engine.settings import SchedulingSettings, declared_settings
from engine.shapes import LadderChoice, ShapeLadder, StepShape
from models.config import ModelConfig
from models.linear import WeightForm
from pallas_kernels.adjust import api as adjust
from pallas_kernels.argmax import api as argmax
from pallas_kernels.draw import api as draw

# Part of a GPU's memory that JAX allocates at its start, where the user has not said. JAX's own 0.75 leaves a fifth of
# it to nobody; CUDA, its libraries and its graphs need the last 0.05.
_GPU_MEMORY_SHARE = "0.95"
_GPU_MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # JAX refuses both at once


class ExecutableSource(Protocol):
  """Executables that need not be compiled. Asked in the order of its methods."""

  def choose_pool(
    self,
    sizer: PoolSizer,
    spec: Callable[[int, int], ProgramSpec],
    rungs: tuple[StepShape, ...],
    cpu_bytes: int | None,
  ) -> PoolSize | None:
    """The pool that its executables are for, if there is memory for it. Asked where memory decides.

    Args:
      spec: programs, from blocks and max_model_len.
      cpu_bytes: memory for KV where a CPU says what is free.
    """
    ...

  def begin(self, spec: ProgramSpec, rungs: tuple[StepShape, ...]) -> None:
    """Says what programs will be asked for."""
    ...

  def executable(self, program: Program) -> jax.stages.Compiled:
    """The program's executable; compiles it where there is none. Safe on any thread."""
    ...

  def finish(self, num_blocks: int) -> str:
    """All programs have run, with a pool of `num_blocks`. Returns why some had to be compiled, a line, or ""."""
    ...


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
    lowered: why max_model_len is below the model's own though nobody chose it, and what changes it; "" where it is not.
    warnings: what the user should know about the model's folder, a line each.
    ladder: the ladder and why it is this one.
    deterministic: what that costs, a line; "" where it was not asked for.
    model: numbers of the decoder.
    model_name: as the checkpoint calls it.
    config: the engine's settings.
    load_s, warmup_s: seconds for the weights, and for compiling and the first run of every program.
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


@dataclasses.dataclass(frozen=True)
class EngineSide:
  """A model on some of the devices, ready to run."""

  scheduler: Scheduler
  runner: ModelRunner
  loaded: LoadedModel
  attention: str
  matmul: str
  fallbacks: tuple[str, ...]
  load_s: float
  warmup_s: float
  trial: dict[int, bytes]
  lowered: str
  ladder: LadderChoice


def build(
  options: BuildOptions,
  progress: Progress,
  emit: Emit,
  clock: Callable[[], float] = time.monotonic,
  engine_class: type[Engine] = Engine,
  source: ExecutableSource | None = None,
) -> Built:
  """Makes everything, ready to serve.

  Args:
    options: what the user chose.
    progress: called as (what, done, of how many) while it goes on; `what` is "load", "compile" or "warm up".
    emit, clock: given to the Engine.
    engine_class: Engine, or one that does more.
    source: of executables, for one engine; None: all are compiled.

  Raises:
    CheckpointError: the folder is missing or broken.
    ConfigError: settings do not fit each other, the model or the machine.
  """
  if options.batching == "disaggregated":
    raise ConfigError(
      "batching=disaggregated needs two engines, and this program makes one; set --batching=chunked, or run server.main"
    )
  devices, cache_reason = begin_build(options)
  side = build_side(options, devices, progress, source)
  engine = engine_class(side.scheduler, side.runner, clock, emit)
  return finish_build(options, cache_reason, engine, side, source=source)


def begin_build(options: BuildOptions) -> tuple[list[Any], str]:
  """Opens the compile cache and finds the devices.

  Returns:
    The devices to build on (jax.Device), and why compiled programs are not kept, "" where they are.

  Raises:
    ConfigError: there are not as many devices, or others may write to the cache.
  """
  cache_reason = compile_cache.use(options.compile_cache_dir) if options.compile_cache_dir else ""
  return find_devices(options.num_devices), cache_reason


def finish_build(
  options: BuildOptions,
  cache_reason: str,
  engine: Engine,
  side: EngineSide,
  *others: EngineSide,
  source: ExecutableSource | None = None,
) -> Built:
  """Seals the runners and says what was made; `side` is the one that decodes."""
  for each in (*others, side):
    each.runner.seal()
  source_note = source.finish(side.scheduler.config.num_blocks) if source is not None else ""
  if options.compile_cache_dir and not cache_reason:
    compile_cache.look_through(options.compile_cache_dir)
  return Built(
    engine=engine,
    runner=side.runner,
    attention=side.attention,
    matmul=side.matmul,
    quantization=options.quantization,
    fallbacks=tuple(reason for reason in (*side.fallbacks, cache_reason, source_note) if reason),
    ladder=side.ladder,
    model=side.loaded.config,
    model_name=side.loaded.name,
    config=side.scheduler.config,
    load_s=sum(each.load_s for each in (side, *others)),
    warmup_s=sum(each.warmup_s for each in (side, *others)),
    deterministic=deterministic.cost(side.scheduler.ladder) if options.deterministic else "",
    lowered=next((each.lowered for each in (side, *others) if each.lowered), ""),
    warnings=side.loaded.warnings,
  )


def build_side(
  options: BuildOptions, devices: list[Any], progress: Progress, source: ExecutableSource | None, num_sides: int = 1
) -> EngineSide:
  """Loads, sizes, compiles and warms up; on several devices the model is spread over them.

  Args: num_sides: how many like this, it included, are still to be built; those of a CPU share one memory.
  """
  mesh = mesh_lib.make_mesh(devices)
  device = devices[0]
  candidates, capability_reason = attention_candidates(options.attention, device)
  if options.deterministic:
    deterministic.check(devices, candidates)
  dtype = jnp.dtype(
    ("float32" if device.platform == "cpu" else "bfloat16") if options.dtype == "auto" else options.dtype
  )
  started = time.perf_counter()
  progress("load", 0, 1)
  matmul, matmul_reason = choose_matmul(options.matmul, mesh, dtype)
  form = WeightForm(matmul == "packed", options.quantization, options.deterministic)
  if form.quantization == "int8" and not form.packed and device.platform == "cpu":
    why = matmul_reason or "matmul=xla"
    matmul_reason = f"{why}; int8 weights are converted at every step, which saves memory but no time"

  checkpoint = open_checkpoint(options.model_dir, mesh, dtype, form, options.random_weights, options.num_token_ids)
  declared = checkpoint.declared
  model = declared.config
  attention, attention_reason, block_size, wished = choose_attention(options, candidates, model, dtype)
  computes_padding = matmul != "packed"  # whose kernels are told how many tokens there are
  one_size = options.deterministic and deterministic.needs_one_size(attention, matmul)
  choice = options.choose_ladder(device.platform, not computes_padding, one_size)
  ladder = choice.ladder
  sizer = PoolSizer(
    block_bytes=kv_cache.bytes_per_block(model, block_size, dtype, attention),
    block_size=block_size,
    longest=wished,
    is_chosen=bool(options.max_model_len),
    max_num_seqs=choice.max_num_seqs,
    shares_prefixes=options.prefix_cache_scope != "off",
  )
  kv_bytes, kv_for = _smallest_pool(options, sizer)
  largest = ladder.rungs()[-1]
  step = step_bytes(model, largest, dtype.itemsize, mesh.size)
  step_for = f"{largest.tokens} tokens of {largest.rows} sequences"
  left = check_fits(options.model_dir, mesh, checkpoint.kept, kv_bytes, kv_for, step, step_for)
  weight_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in checkpoint.kept.values())
  abstract, tree = jax.tree.flatten(declared.params)

  def spec(num_blocks: int, max_model_len: int) -> ProgramSpec:
    return ProgramSpec(
      mesh=mesh,
      model=model,
      graphdef=declared.graphdef,
      params_tree=tree,
      params=tuple(abstract),
      kv=kv_cache.abstract(mesh, model, num_blocks, block_size, dtype, attention),
      block_size=block_size,
      table_width=-(-max_model_len // block_size),
      num_slots=choice.max_num_seqs,
      num_eos=len(declared.eos_token_ids),
      attention=attention,
      device_kind=device.device_kind,
      deterministic=options.deterministic,
      argmax=argmax.choose(device.platform, mesh.size),
      draw=draw.choose(device.platform, mesh.size),
      adjust=adjust.choose(device.platform, mesh.size),
    )

  longest, length_reason = fit_to_attention(
    lambda width: spec(1, width * block_size), wished, sizer.is_chosen, ladder, dtype
  )
  sizer = dataclasses.replace(sizer, longest=longest)

  def load() -> tuple[LoadedModel, float]:
    loaded = checkpoint.load()
    jax.block_until_ready(loaded.params)
    progress("load", 1, 1)
    return loaded, time.perf_counter() - started

  # A CPU's programs are made meanwhile. Elsewhere the size of the pool may follow from the memory that weights leave.
  before = None if device.platform == "cpu" else load()
  cpu_bytes = None
  if left is not None and device.platform == "cpu":
    cpu_bytes = sizer.cpu_bytes((left - (num_sides - 1) * (weight_bytes + step * mesh.size)) // num_sides, weight_bytes)
  pool = _size_pool(options, sizer, spec, ladder, source, cpu_bytes)
  max_model_len = pool.max_model_len
  lowered = _describe_lowering(wished, max_model_len, [reason for reason in (length_reason, pool.reason) if reason])
  config = EngineConfig(
    vocab_size=model.vocab_size,
    max_model_len=max_model_len,
    num_blocks=pool.num_blocks,
    block_size=block_size,
    token_budgets=choice.token_budgets,
    max_num_seqs=choice.max_num_seqs,
    prefill_chunk=choice.prefill_chunk,
    computes_padding=computes_padding,
    overlap=choose_overlap(options.overlap, device.platform, weight_bytes),
    eos_token_ids=declared.eos_token_ids,
    **{declared.name: getattr(options, declared.name) for declared in declared_settings(SchedulingSettings)},
  )
  chosen, make = spec(pool.num_blocks, max_model_len), Program.compile
  if source is not None:
    source.begin(chosen, ladder.rungs())
    make = source.executable
  with Making(all_programs(chosen, ladder.rungs()), make) as making:
    loaded, load_s = before or load()
    made = making.wait(progress)
  runner = ModelRunner(chosen, tuple(jax.tree.leaves(loaded.params)), ladder, config.eos_token_ids, made)
  if device.platform == "cpu":
    host_memory.keep_freed()  # not before: what loading and compiling took may go back
  runner.warm_up(progress)
  trial = deterministic.try_out(runner, config, ladder) if options.deterministic else {}
  fallbacks = tuple(reason for reason in (capability_reason, attention_reason, matmul_reason) if reason)
  warmup_s = time.perf_counter() - started - load_s
  return EngineSide(
    Scheduler(config), runner, loaded, attention, matmul, fallbacks, load_s, warmup_s, trial, lowered, choice
  )


def _describe_lowering(wished: int, max_model_len: int, reasons: list[str]) -> str:
  """The line that says that max_model_len is not the model's own, or ""."""
  if not reasons:
    return ""
  return (
    f"max_model_len is {max_model_len}, not the model's {wished}: {'; '.join(reasons)}; --max_model_len chooses a "
    "length, --kv_cache_mb the memory"
  )


def find_devices(count: int) -> list[Any]:
  """The first `count` devices of this process (jax.Device), or all for 0. Raises ConfigError."""
  if not any(os.environ.get(name) for name in _GPU_MEMORY_VARIABLES):
    os.environ[_GPU_MEMORY_VARIABLES[0]] = _GPU_MEMORY_SHARE  # JAX reads it when its backends start, for a GPU alone
  try:
    found = jax.devices()
  # JAX raises AssertionError, without words, where the platform's plugin does not load.
  except (RuntimeError, AssertionError) as error:
    chosen = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    why = " ".join(str(error).split()).partition(" (set JAX_PLATFORMS")[0] or "its plugin is missing or does not load"
    raise ConfigError(
      f"JAX_PLATFORMS={chosen or ''}: JAX finds no such device ({why}); supported are cpu, cuda and tpu; unset "
      "JAX_PLATFORMS to take what this machine has, or install JAX for the device (jax[cuda13], jax[tpu])"
    ) from error
  if count > len(found):
    raise ConfigError(
      f"num_devices={count}, but this machine has {len(found)} ({found[0].platform}); lower --num_devices"
    )
  return found[:count] if count else found


def _smallest_pool(options: BuildOptions, sizer: PoolSizer) -> tuple[int, str]:
  """Bytes of the smallest pool that will do, and what decides on it."""
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
) -> PoolSize:
  """The pool that was chosen, or the one that `source` has executables for, or what memory holds.

  Args:
    spec: programs, from blocks and max_model_len.
    cpu_bytes: memory for KV where a CPU says what is free.
  """
  if options.num_blocks:
    return sizer.size_by_blocks(options.num_blocks, "--num_blocks gives")
  if options.kv_cache_mb:
    return sizer.size_by_memory(options.kv_cache_mb * 2**20, f"--kv_cache_mb={options.kv_cache_mb}")
  trial = spec(-(-sizer.longest // sizer.block_size), sizer.longest)
  on_cpu, memory = kv_cache.free_bytes(trial.mesh, 0) is None, "half of what weights and a step leave"
  if on_cpu and cpu_bytes is None:
    cpu_bytes, memory = CPU_KV_BYTES, "the default where the system does not say what is free"
  stored = source.choose_pool(sizer, spec, ladder.rungs(), cpu_bytes if on_cpu else None) if source else None
  if stored is not None:
    return stored
  if on_cpu:
    assert cpu_bytes is not None
    return sizer.size_by_memory(cpu_bytes, memory)
  analysis = step_program(trial, ladder.rungs()[-1]).compile().memory_analysis()  # whatever the size of the pool
  step_bytes = analysis.temp_size_in_bytes if analysis else 0
  available = kv_cache.free_bytes(trial.mesh, trial.slot_bytes + step_bytes) or 0
  return sizer.size_by_memory(available, "left by weights and the largest step")
