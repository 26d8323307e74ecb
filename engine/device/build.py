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

from engine.config import EngineConfig, chosen_overlap, default_overlap
from engine.device import compile_cache, deterministic, host_memory, kv_cache
from engine.device import mesh as mesh_lib
from engine.device.bundle import Bundle, made_for
from engine.device.choices import attention_candidates, check_attention, choose_attention, choose_matmul
from engine.device.executables import Program
from engine.device.fit import check_fits, step_bytes
from engine.device.options import BuildOptions
from engine.device.programs import ProgramSpec, all_programs, compile_step
from engine.device.runner import Making, ModelRunner, Progress
from engine.device.weights import LoadedModel, open_checkpoint
from engine.disaggregated import DisaggregatedEngine
from engine.engine import Emit, Engine
from engine.errors import ConfigError
from engine.scheduler import Scheduler
from engine.shapes import ShapeLadder
from models.config import ModelConfig
from models.layers import WeightForm
from pallas_kernels.adjust import api as adjust
from pallas_kernels.argmax import api as argmax
from pallas_kernels.draw import api as draw

_CPU_KV_CACHE_MB = 256


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
    deterministic.check(devices, attention_candidates(options.attention, devices[0].platform), num_prefill)
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
  candidates = attention_candidates(options.attention, device.platform)
  dtype = jnp.dtype(
    ("float32" if device.platform == "cpu" else "bfloat16") if options.dtype == "auto" else options.dtype
  )
  started = time.perf_counter()
  progress("load", 0, 1)
  matmul, matmul_reason = choose_matmul(options.matmul, mesh, dtype)
  if matmul == "packed":
    options = options.for_packed_matmul()
  options = options.without_unreachable_rungs()
  form = WeightForm(matmul == "packed", options.quantization == "int8", options.deterministic)
  if form.int8 and not form.packed and device.platform == "cpu":
    why = matmul_reason or "matmul=xla"
    matmul_reason = f"{why}; int8 weights are converted at every step, which saves memory but no time"

  checkpoint = open_checkpoint(options.model_dir, mesh, dtype, form, options.random_weights, options.num_token_ids)
  declared = checkpoint.declared
  model = declared.config
  attention, attention_reason, block_size, max_model_len = choose_attention(options, candidates, model, dtype)
  blocks = options.num_blocks or -(-max_model_len // block_size)
  block_bytes = kv_cache.bytes_per_block(model, block_size, dtype, attention)
  kv_bytes = options.kv_cache_mb * 2**20 or (blocks + 1) * block_bytes
  largest = ShapeLadder(options.token_budgets, options.max_num_seqs).rungs()[-1]
  step = step_bytes(model, largest, dtype.itemsize, mesh.size)
  step_for = f"{largest.tokens} tokens of {largest.rows} sequences"
  check_fits(options.model_dir, mesh, checkpoint.kept, kv_bytes, _kv_setting(options, max_model_len), step, step_for)
  computes_padding = matmul != "packed"  # whose kernels are told how many tokens there are
  weight_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in checkpoint.kept.values())
  overlap = chosen_overlap(options.overlap, default_overlap(device.platform, weight_bytes))
  if options.deterministic:
    budgets = deterministic.ladder_of(options.token_budgets, options.max_num_seqs, device.platform, attention, matmul)
    options = dataclasses.replace(options, token_budgets=budgets, prefill_chunk=min(options.prefill_chunk, budgets[-1]))
  ladder = ShapeLadder(options.token_budgets, options.max_num_seqs)
  table_width = -(-max_model_len // block_size)
  abstract, tree = jax.tree.flatten(declared.params)

  def spec(num_blocks: int) -> ProgramSpec:
    return ProgramSpec(
      mesh=mesh,
      model=model,
      graphdef=declared.graphdef,
      params_tree=tree,
      params=tuple(abstract),
      kv=kv_cache.abstract(mesh, model, num_blocks, block_size, dtype, attention),
      block_size=block_size,
      table_width=table_width,
      num_slots=options.max_num_seqs,
      num_eos=len(declared.eos_token_ids),
      attention=attention,
      device_kind=device.device_kind,
      deterministic=options.deterministic,
      argmax=argmax.choose(device.platform, mesh.size),
      draw=draw.choose(device.platform, mesh.size),
      adjust=adjust.choose(device.platform, mesh.size),
    )

  check_attention(spec(table_width), ladder, dtype)

  def load() -> tuple[LoadedModel, float]:
    loaded = checkpoint.load()
    jax.block_until_ready(loaded.params)
    progress("load", 1, 1)
    return loaded, time.perf_counter() - started

  # A CPU's programs are made meanwhile. Elsewhere the size of the pool may follow from the memory that weights leave.
  before = None if device.platform == "cpu" else load()
  num_blocks = options.num_blocks or _stored_pool(options, bundle, spec, ladder)
  num_blocks = num_blocks or _size_pool(options, model, spec, ladder)
  eos_token_ids = declared.eos_token_ids
  config = options.engine_config(
    model.vocab_size, max_model_len, num_blocks, block_size, eos_token_ids, overlap, computes_padding
  )
  chosen, make = spec(num_blocks), Program.compile
  if bundle is not None:
    bundle.begin(made_for(chosen, ladder.rungs()), mesh)
    make = bundle.executable
  with Making(all_programs(chosen, ladder.rungs()), make) as making:
    loaded, load_s = before or load()
    made = making.wait(progress)
  runner = ModelRunner(chosen, tuple(jax.tree.leaves(loaded.params)), ladder, eos_token_ids, made)
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


def _kv_setting(options: BuildOptions, max_model_len: int) -> str:
  """What decides on the smallest pool."""
  if options.kv_cache_mb:
    return f"--kv_cache_mb={options.kv_cache_mb}"
  return f"--num_blocks={options.num_blocks}" if options.num_blocks else f"one sequence of {max_model_len} tokens"


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
  options: BuildOptions, model: ModelConfig, spec: Callable[[int], ProgramSpec], ladder: ShapeLadder
) -> int:
  """Blocks that the memory holds, as many as can be of use."""
  smallest = spec(1)
  table_width = smallest.table_width
  block_bytes = kv_cache.bytes_per_block(model, smallest.block_size, smallest.kv[0].dtype, smallest.attention)
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
