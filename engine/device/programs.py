"""The device programs: pure functions and their compilation ahead of time. No request, no slot table, no I/O.

`step` runs one rung; `write_lines` sets slots' lines of one of the sampler's tables. Each is lowered from abstract
arrays that carry their shardings, so what a program takes and returns always agrees, and nothing is resharded or
compiled for a second time.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from engine.device import kv_cache, sampler
from engine.device import mesh as mesh_lib
from engine.device.model_input import Column, Flag, SamplingRows, StepLayout, unpack
from engine.device.sampler import SlotState
from engine.shapes import StepShape
from models.attention import AttentionMeta, PagedGroups, paged_attend
from models.config import LayerAttention, ModelConfig
from pallas_kernels.paged_attention.api import PagedAttention
from pallas_kernels.paged_attention.plan import Geometry, Plan

# Lines of one call of `write_lines`, by table of SlotState. History and bias are written at an admission; a step has a
# new mask for each of its constrained rows, and a call costs more than a mask.
NUM_LINES = {"history": 1, "bias": 1, "mask": 8}
# Options of XLA:GPU that leave a matmul one way to be done; where its sum is split, the shape alone says how.
_ONE_MATMUL: dict[str, bool | int | str] = {
  "xla_gpu_cublas_fallback": False,
  "xla_gpu_override_gemm_autotuner": (
    "block_m: 64 block_n: 128 block_k: 64 split_k: 1 num_stages: 4 num_warps: 4 num_ctas: 1"
  ),
  "xla_allow_excess_precision": False,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
  """A function on arrays, ready to be compiled.

  Attributes:
    name: unique among a runner's programs.
    function: pure; takes `arguments`, returns `results`.
    arguments: a tree of jax.ShapeDtypeStruct for each argument, with shardings.
    results: a tree of jax.ShapeDtypeStruct, with shardings.
    donated: which arguments are updated in place.
    compiler_options: see `step_options`.
  """

  name: str
  function: Callable[..., Any]
  arguments: tuple[Any, ...]
  results: Any
  donated: tuple[int, ...]
  compiler_options: dict[str, bool | int | str] | None

  def compile(self) -> jax.stages.Compiled:
    """Traces, lowers and compiles."""
    program = jax.jit(
      self.function,
      donate_argnums=self.donated,
      keep_unused=True,  # so that the executable takes what `arguments` says, whatever it reads
      out_shardings=jax.tree.map(lambda leaf: leaf.sharding, self.results),
    )
    return program.lower(*self.arguments).compile(self.compiler_options)


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramSpec:
  """Everything static about a set of programs. Compared by identity: there is one per runner.

  Attributes:
    mesh: where they run.
    model: numbers of the decoder.
    graphdef, params_tree: structure of the module and of its nnx.State, whose leaves are `params`.
    params: the leaves, abstract, with shardings.
    kv: the KV buffers, abstract, with shardings.
    block_size, table_width, num_slots, num_eos: as in StepLayout.
    attention: name of the implementation (pallas_kernels.paged_attention.api), whose layout `kv` has.
    device_kind: as JAX calls the devices; decides tuned settings of kernels.
    deterministic: every sum of a row is made in an order that nothing but the row decides (see `deterministic.py`).
    argmax, draw, adjust: names of the implementations (pallas_kernels.argmax.api, and so on).
  """

  mesh: Mesh
  model: ModelConfig
  graphdef: nnx.GraphDef
  params_tree: Any
  params: tuple[jax.ShapeDtypeStruct, ...]
  kv: tuple[jax.ShapeDtypeStruct, ...]
  block_size: int
  table_width: int
  num_slots: int
  num_eos: int
  attention: str = "reference"
  device_kind: str = ""
  deterministic: bool = False
  argmax: str = "reference"
  draw: str = "reference"
  adjust: str = "reference"

  @property
  def platform(self) -> str:
    """As JAX calls it: cpu, gpu (cuda where there is none to see), tpu."""
    return self.mesh.devices.flat[0].platform

  def attention_groups(self, shape: StepShape) -> PagedGroups:
    """The attention of a rung for each group of layers, as one device runs it: on several, each has its own heads."""
    devices = self.mesh.size

    def of_group(declared: LayerAttention) -> PagedAttention:
      geometry = Geometry(
        tokens=shape.tokens,
        rows=shape.rows,
        table_width=self.table_width,
        block_size=self.block_size,
        num_heads=declared.num_heads // devices,
        num_kv_heads=declared.num_kv_heads // devices,
        head_dim=declared.head_dim,
        sliding_window=declared.window,
        invariant=self.deterministic,
      )
      return PagedAttention(self.attention, geometry, declared.scale, declared.soft_cap, self.device_kind)

    return tuple((declared, of_group(declared)) for declared in self.model.groups)

  def layout(self, shape: StepShape) -> StepLayout:
    """The packed array of a rung."""
    plans = dict.fromkeys(attention.plan for _, attention in self.attention_groups(shape))
    return StepLayout(
      shape, self.table_width, self.num_slots, self.num_eos, tuple(plan for plan in plans if plan is not None)
    )

  def whole(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An abstract array that every device holds."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=mesh_lib.replicated(self.mesh))

  @property
  def last_tokens(self) -> jax.ShapeDtypeStruct:
    return self.whole((self.num_slots + 1,), jnp.int32)

  @property
  def slot_state(self) -> SlotState:
    """Abstract sampler state."""
    lines, vocab = self.num_slots + 1, self.model.vocab_size
    return SlotState(
      history=self.whole((lines, vocab), jnp.int32),  # pyright: ignore
      bias=self.whole((lines, vocab), jnp.float32),  # pyright: ignore
      mask=self.whole((lines, -(-vocab // 32)), jnp.int32),  # pyright: ignore
    )

  @property
  def slot_bytes(self) -> int:
    """Of the sampler's state."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.slot_state))


@functools.cache
def _attend(spec: ProgramSpec, groups: PagedGroups):
  """Paged attention; on several devices each runs its own heads, whatever the kernel is made of."""
  attend = paged_attend(groups)
  if spec.mesh.size == 1:
    return attend
  heads, whole = PartitionSpec(None, mesh_lib.AXIS), PartitionSpec()

  def attend_on_each(declared: LayerAttention, *arrays):
    buffer = spec.kv[spec.model.groups[declared][0]]
    pages = buffer.sharding.spec  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    return jax.shard_map(
      functools.partial(attend, declared),
      mesh=spec.mesh,
      in_specs=(heads, whole, whole, pages, whole),
      out_specs=(heads, pages),
      check_vma=False,
    )(*arrays)

  return attend_on_each


def _with_all_rows(logits: jax.Array, rows: SamplingRows, num_slots: int) -> tuple[jax.Array, SamplingRows]:
  """Adds rows of padding, one for each slot without: XLA adds up rows in an order that the shape decides."""
  missing = num_slots - logits.shape[0]
  padding = np.zeros((len(Column), missing), np.int32)
  padding[Column.SLOT], padding[Column.TARGET] = num_slots, -1
  rows = SamplingRows(
    columns=jnp.concatenate([rows.columns, padding], axis=1),
    stop_ids=jnp.pad(rows.stop_ids, ((0, missing), (0, 0)), constant_values=-1),
  )
  logits = jnp.pad(logits, ((0, missing), (0, 0)))
  return lax.optimization_barrier(logits), rows


def step(
  spec: ProgramSpec,
  layout: StepLayout,
  params: tuple[jax.Array, ...],
  kv: kv_cache.Buffers,
  last_tokens: jax.Array,
  slot_state: SlotState,
  packed: jax.Array,
):
  """One step of the engine on the device.

  Args:
    spec, layout: static.
    params: the model's leaves.
    kv: one buffer a layer; donated, as the next two are.
    last_tokens: int32[slots + 1], the newest token of each slot.
    slot_state: the sampler's memory.
    packed: int32[layout.size], see model_input.

  Returns:
    kv, last_tokens and slot_state after the step, and the output: int32[3, L] (tokens, bad, bits of log probabilities)
    and int32[2, L, sampler.num_alternatives(V)] (ids of the most likely tokens, bits of their log probabilities).
  """
  inputs = unpack(layout, packed)
  rows = inputs.sampling
  decoder = nnx.merge(spec.graphdef, jax.tree.unflatten(spec.params_tree, params))
  waiting = inputs.tokens < 0
  tokens = jnp.where(waiting, last_tokens[jnp.where(waiting, -1 - inputs.tokens, 0)], inputs.tokens)
  groups = spec.attention_groups(layout.shape)
  plans: dict[Plan | None, jax.Array] = dict(zip(layout.plans, inputs.plans, strict=True))
  rows_of_step = inputs.block_tables, inputs.kv_lens, inputs.query_starts
  ragged = tuple(attention.meta(*rows_of_step, plans.get(attention.plan)) for _, attention in groups)
  meta = AttentionMeta(ragged, inputs.slot_mapping)
  attend = _attend(spec, groups)
  # Where there are as many logit rows as tokens, to leave tokens out would only be one launch more.
  some = layout.shape.logits < layout.shape.tokens
  wanted = (inputs.logit_tokens, inputs.num_logit_rows) if some else None
  hidden, kv = decoder.hidden(tokens, inputs.positions, kv, meta, attend, inputs.num_tokens, wanted)
  logits = decoder.logits(hidden if some else hidden[inputs.logit_tokens], inputs.num_logit_rows)
  # In two steps: asked for whole logits at once, XLA would rather gather the head than what comes out of it.
  logits = lax.with_sharding_constraint(logits, NamedSharding(spec.mesh, PartitionSpec(None, mesh_lib.AXIS)))
  logits = lax.with_sharding_constraint(logits, mesh_lib.replicated(spec.mesh))
  if spec.deterministic:
    logits, rows = _with_all_rows(logits, rows, spec.num_slots)
  with jax.named_scope("sample"):
    wide = spec.platform != "cpu"
    kernels = spec.argmax, spec.draw, spec.adjust
    sampled = sampler.sample(logits, rows, slot_state, wide, inputs.num_logit_rows, *kernels)
    slot_state = sampler.remember(slot_state, rows, sampled.tokens)
  slots = jnp.where(rows.has(Flag.SAMPLE), rows[Column.SLOT], layout.num_slots)
  if spec.deterministic:
    sampled = lax.optimization_barrier(sampled)  # else XLA would sample only the rows that are returned
  last_tokens = last_tokens.at[slots].set(sampled.tokens)
  output = jnp.stack(
    [sampled.tokens, sampled.bad.astype(jnp.int32), lax.bitcast_convert_type(sampled.logprobs, jnp.int32)]
  )
  top = jnp.stack([sampled.top_ids, lax.bitcast_convert_type(sampled.top_logprobs, jnp.int32)])
  num_logits = layout.shape.logits
  return kv, last_tokens, slot_state, (output[:, :num_logits], top[:, :num_logits])


def write_lines(table: jax.Array, packed: jax.Array) -> jax.Array:
  """Sets line packed[i, 0] of `table` (int32 or f32[slots + 1, W], donated) to packed[i, 1:], its bits, for each i."""
  lines = lax.bitcast_convert_type(packed[:, 1:], table.dtype)
  for index in range(lines.shape[0]):  # on a CPU half the time of a scatter
    table = lax.dynamic_update_slice(table, lines[index : index + 1], (packed[index, 0], jnp.int32(0)))
  return table


def pack_lines(table: str, lines: Sequence[tuple[int, np.ndarray]], width: int, padding: int) -> np.ndarray:
  """The second argument of `write_lines`: int32[NUM_LINES[table], 1 + W].

  Args:
    lines: (slot, 32-bit values), at most NUM_LINES[table].
    width: W.
    padding: the slot that nobody reads, for the rest.
  """
  packed = np.zeros((NUM_LINES[table], 1 + width), np.int32)
  packed[:, 0] = padding
  for index, (slot, line) in enumerate(lines):
    packed[index, 0] = slot
    packed[index, 1:] = line.view(np.int32)
  return packed


def step_options(spec: ProgramSpec) -> dict[str, bool | int | str] | None:
  """What a step is compiled with, by platform.

  CPU: LLVM at -O1: a fifth less time to compile, and steps as fast as at -O3 (matmuls are a library's).
  GPU: matmuls by cuBLASLt, which takes the residual add along: 11 launches a layer at Llama-3-8B shapes, 14 with XLA's
  own (`make check-device`). XLA's own are for int8 weights, which they widen in registers. For the library each matrix
  is first widened into a buffer of its own by a fusion of its own, so that a step moves more than without int8: seen in
  the compiled HLO of two layers of these shapes and the head, 1,010 MiB of temporaries at 8 tokens, where XLA's own
  take 24. And for deterministic steps, all with one tile, which nothing times and chooses anew.
  """
  match spec.platform:
    case "cpu":
      return {"xla_backend_optimization_level": 1}
    case "gpu" | "cuda":
      int8 = any(leaf.dtype == jnp.int8 for leaf in spec.params)
      one = _ONE_MATMUL if spec.deterministic else {}
      return {"xla_gpu_enable_triton_gemm": spec.deterministic or int8} | one
  return None


def step_program(spec: ProgramSpec, shape: StepShape) -> Program:
  """A rung: (params, kv, last_tokens, slot_state, packed) -> as `step` returns."""
  layout = spec.layout(shape)
  outputs = (
    spec.whole((3, shape.logits), jnp.int32),
    spec.whole((2, shape.logits, sampler.num_alternatives(spec.model.vocab_size)), jnp.int32),
  )
  return Program(
    name="-".join(map(str, ("step", *dataclasses.astuple(shape)))),
    function=functools.partial(step, spec, layout),
    arguments=(spec.params, spec.kv, spec.last_tokens, spec.slot_state, spec.whole((layout.size,), jnp.int32)),
    results=(spec.kv, spec.last_tokens, spec.slot_state, outputs),
    donated=(1, 2, 3),
    compiler_options=step_options(spec),
  )


def lines_program(spec: ProgramSpec, table: str) -> Program:
  """Sets lines of a table of the sampler's state: (table, packed) -> table."""
  lines = getattr(spec.slot_state, table)
  packed = spec.whole((NUM_LINES[table], 1 + lines.shape[1]), jnp.int32)
  return Program(f"lines-{table}", write_lines, (lines, packed), lines, (0,), step_options(spec))


def zeros_program(spec: ProgramSpec, name: str, results: Any) -> Program:
  """Allocates `results`: () -> results. Zeros and not garbage, because 0 * NaN in a masked product would be NaN."""
  fill = functools.partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), results)
  return Program(f"zeros-{name}", fill, (), results, (), step_options(spec))


def layer_key(buffer: jax.ShapeDtypeStruct) -> str:
  """The name of the program that allocates a layer's KV: layers of one shape share it."""
  return "-".join(map(str, ("layer", *buffer.shape)))


def all_programs(spec: ProgramSpec, rungs: Sequence[StepShape]) -> dict[StepShape | str, Program]:
  """Everything that a runner calls, the step of each rung by its shape; the largest first, which takes longest."""
  steps: dict[StepShape | str, Program] = {shape: step_program(spec, shape) for shape in reversed(rungs)}
  return steps | {
    **{table: lines_program(spec, table) for table in NUM_LINES},
    **{layer_key(buffer): zeros_program(spec, layer_key(buffer), buffer) for buffer in spec.kv},
    "slots": zeros_program(spec, "slots", spec.slot_state),
  }
