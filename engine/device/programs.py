"""The device programs: pure functions, compiled ahead of time. May not know requests or slots, or do I/O.

`step` runs one rung, and `write_lines` sets slots' rows in a table of the sampler. JAX lowers both from abstract arrays
with shardings. So the results of one program match the arguments of the next, and JAX never reshards or recompiles.
On several devices each runs the function on its own parts of the arrays (engine/device/mesh.py).
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from engine.batch import MAX_DRAFT_MASKS
from engine.device import kv_cache, sampler, split_sampler
from engine.device import mesh as mesh_lib
from engine.device.model_input import Column, Flag, SamplingRows, StepLayout, take_back_rejected, unpack
from engine.device.sampler import SlotState
from engine.device.split_sampler import VocabularySplit
from engine.shapes import StepShape
from models.adapters import adapter_specs, declare_adapters, layer_adapters
from models.attention import AttentionMeta, PagedGroups, paged_attend
from models.config import LayerAttention, ModelConfig
from models.split import ModelSplit
from pallas_kernels import native
from pallas_kernels.paged_attention.api import PagedAttention
from pallas_kernels.paged_attention.plan import Geometry, Plan
from pallas_kernels.zeros.api import make_zeros

# (A, B) of each linear layer by name, for each layer; see models.adapters.declare_adapters.
AdapterLayers = tuple[dict[str, tuple[Any, Any]], ...]

# Rows of one call of `write_lines`, by the program's name. An admission writes history and bias. A step writes a new
# mask for each constrained row and each of its drafts, and a call costs more than a mask.
NUM_LINES = {"history": 1, "bias": 1, "mask": 8, "masks": MAX_DRAFT_MASKS}
# The table of SlotState that each of these programs writes.
LINE_TABLES = {"history": "history", "bias": "bias", "mask": "mask", "masks": "mask"}
# XLA:GPU options that fix a matmul's algorithm, so that only the shape decides how its sum is split.
_ONE_MATMUL: dict[str, bool | int | str] = {
  "xla_gpu_cublas_fallback": False,
  "xla_gpu_override_gemm_autotuner": (
    "block_m: 64 block_n: 128 block_k: 64 split_k: 1 num_stages: 4 num_warps: 4 num_ctas: 1"
  ),
  "xla_allow_excess_precision": False,
}


# Tokens of a CPU's rung from which on the last layer computes only those with logits. Most tokens of a prompt, and of
# those that a constraint forces, have none. The time of smaller steps is that of reading weights.
_SELECTS_FROM = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
  """A function on arrays, ready to compile.

  Attributes:
    name: unique among a runner's programs.
    function: pure function from `arguments` to `results`.
    arguments: a tree of jax.ShapeDtypeStruct for each argument, with shardings.
    results: a tree of jax.ShapeDtypeStruct, with shardings.
    donated: arguments that the program updates in place.
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
      keep_unused=True,  # the executable takes all of `arguments`, also those that it does not read
      out_shardings=jax.tree.map(lambda leaf: leaf.sharding, self.results),
    )
    return program.lower(*self.arguments).compile(self.compiler_options)


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramSpec:
  """The static inputs of a set of programs, compared by identity: a runner has one.

  Attributes:
    mesh: the devices.
    model: configuration of the decoder.
    graphdef, params_tree: structure of one device's share of the module and of its nnx.State.
    params: the leaves of the state, abstract, of all devices together, with shardings.
    dtype: of activations, and of weights that are not quantized.
    kv: the KV buffers, abstract, with shardings.
    block_size, table_width, num_slots, num_eos: as in StepLayout.
    attention: name of the implementation (pallas_kernels.paged_attention.api), which determines the layout of `kv`.
    device_kind: JAX's device kind, for tuned settings of kernels.
    deterministic: only a row decides the order of its sums (see `deterministic.py`).
    argmax, sampling, adjust: names of the implementations (pallas_kernels.argmax.api, and so on).
    embeds: a step also returns its rows' final hidden states.
    max_loras: slots for adapters; 0: none.
    max_lora_rank: rank of a slot.
    low_rank: name of the implementation (pallas_kernels.low_rank.api).
    weight_form: digest of models.weight_form.WeightForm, since `params` have only sizes.
    feature_layers: numbers of layers whose inputs a step also returns, for an EAGLE-3 head.
  """

  mesh: Mesh
  model: ModelConfig
  graphdef: nnx.GraphDef
  params_tree: Any
  params: tuple[jax.ShapeDtypeStruct, ...]
  dtype: jnp.dtype
  kv: tuple[jax.ShapeDtypeStruct, ...]
  block_size: int
  table_width: int
  num_slots: int
  num_eos: int
  attention: str = "reference"
  device_kind: str = ""
  deterministic: bool = False
  argmax: str = "reference"
  sampling: str = "reference"
  adjust: str = "reference"
  embeds: bool = False
  max_loras: int = 0
  max_lora_rank: int = 0
  low_rank: str = "reference"
  weight_form: str = ""
  feature_layers: tuple[int, ...] = ()

  @property
  def platform(self) -> str:
    """JAX's platform name: cpu, tpu, gpu, or cuda when compiling without a GPU."""
    return self.mesh.devices.flat[0].platform

  @functools.cached_property
  def split(self) -> ModelSplit:
    """The model on the devices that share each layer."""
    return ModelSplit(self.model, mesh_lib.num_shares(self.mesh))

  @property
  def vocabulary(self) -> VocabularySplit:
    """The share of the vocabulary that a device has in `step`."""
    return VocabularySplit(mesh_lib.AXIS, self.split.num_devices, self.model.vocab_size, self.split.share.vocab_size)

  def attention_groups(self, shape: StepShape) -> PagedGroups:
    """Returns the attention of a rung for each group of layers, on one device with its share of the heads."""

    def of_group(declared: LayerAttention) -> PagedAttention:
      geometry = Geometry(
        tokens=shape.tokens,
        rows=shape.rows,
        table_width=self.table_width,
        block_size=self.block_size,
        num_heads=declared.num_heads,
        num_kv_heads=declared.num_kv_heads,
        head_dim=declared.head_dim,
        sliding_window=declared.window,
        invariant=self.deterministic,
      )
      return PagedAttention(self.attention, geometry, declared.scale, declared.soft_cap, self.device_kind)

    return tuple((declared, of_group(declared)) for declared in self.split.share.groups)

  def layout(self, shape: StepShape) -> StepLayout:
    """Returns the layout of a rung's packed array."""
    plans = dict.fromkeys(attention.plan for _, attention in self.attention_groups(shape))
    return StepLayout(
      shape,
      self.table_width,
      self.num_slots,
      self.num_eos,
      tuple(plan for plan in plans if plan is not None),
      self.max_loras > 0,
    )

  def whole(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns an abstract array that every device holds whole."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=mesh_lib.replicated(self.mesh))

  def states(self, shape: StepShape) -> jax.ShapeDtypeStruct:
    """Returns what a step of a rung returns of `feature_layers`, abstract."""
    return self.whole((shape.tokens, len(self.feature_layers) * self.model.model_dim), self.dtype)

  @property
  def last_tokens(self) -> jax.ShapeDtypeStruct:
    return self.whole((2, self.num_slots + 1), jnp.int32)

  @property
  def slot_state(self) -> SlotState:
    """Abstract sampler state; each device has the columns of its share of the vocabulary."""
    lines, vocab = self.num_slots + 1, self.split.share.vocab_size

    def table(lines: int, width: int, dtype: Any) -> Any:
      return mesh_lib.spread(self.mesh, (lines, width), dtype, (None, "vocab"))

    return SlotState(
      history=table(lines, vocab, jnp.int32),
      bias=table(lines, vocab, jnp.float32),
      mask=table(lines + MAX_DRAFT_MASKS, -(-vocab // 32), jnp.int32),
    )

  @property
  def adapter_layers(self) -> AdapterLayers:
    """Abstract arrays of all adapters by layer and name, with slot 0 for none; () without adapters."""
    if not self.max_loras:
      return ()
    share, num_slots, rank = self.split.share, self.max_loras + 1, self.max_lora_rank
    layers = declare_adapters(share, num_slots, rank, self.dtype)
    specs = [adapter_specs(share, declared) for declared in share.layers]

    def spread(leaf: jax.ShapeDtypeStruct, axes: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
      return mesh_lib.spread(self.mesh, leaf.shape, leaf.dtype, (None, *axes))

    return tuple(
      {name: (spread(a, of_layer[name].axes[0]), spread(b, of_layer[name].axes[1])) for name, (a, b) in arrays.items()}
      for arrays, of_layer in zip(layers, specs, strict=True)
    )

  @property
  def adapters(self) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The leaves of `adapter_layers`."""
    return tuple(jax.tree.leaves(self.adapter_layers))

  @property
  def slot_bytes(self) -> int:
    """Bytes of the sampler's state and the adapters on each device."""
    leaves = jax.tree.leaves((self.slot_state, self.adapters))
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def _with_all_rows(logits: jax.Array, rows: SamplingRows, num_slots: int) -> tuple[jax.Array, SamplingRows]:
  """Adds padding rows up to one a slot, because the shape decides the order of XLA's sums."""
  missing = num_slots - logits.shape[0]
  if missing:  # XLA:CPU crashes on arrays without rows inside of a shard_map
    padding = np.zeros((len(Column), missing), np.int32)
    padding[Column.SLOT : Column.MASK + 1], padding[Column.TARGET] = num_slots, -1
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
  adapters: tuple[jax.Array, ...] = (),
):
  """One step of the engine on a device. On several devices, arrays are this device's parts (see mesh.on_each_device).

  Args:
    spec, layout: static.
    params: the model's leaves.
    kv: one buffer a layer; donated, like the next two.
    last_tokens: int32[2, slots + 1], the newest token of each slot, and the rejected drafts of its latest row.
    slot_state: the sampler's state.
    packed: int32[layout.size], see model_input.
    adapters: as spec.adapters; () for a step whose rows have none.

  Returns:
    kv, last_tokens and slot_state after the step, and the output:
    - int32[3, L]: tokens, bad, bits of log probabilities
    - int32[2, L, sampler.num_alternatives(V)]: ids of the most likely tokens, bits of their log probabilities
    - with spec.embeds, f32[L, D]: hidden states after the final norm
    - with spec.feature_layers, [T, n * D]: the inputs of these n layers side by side
  """
  inputs = take_back_rejected(unpack(layout, packed), last_tokens[1], spec.block_size)
  rows = inputs.sampling
  decoder = nnx.merge(spec.graphdef, jax.tree.unflatten(spec.params_tree, params))
  waiting = inputs.tokens < 0
  tokens = jnp.where(waiting, last_tokens[0, jnp.where(waiting, -1 - inputs.tokens, 0)], inputs.tokens)
  groups = spec.attention_groups(layout.shape)
  plans: dict[Plan | None, jax.Array] = dict(zip(layout.plans, inputs.plans, strict=True))
  rows_of_step = inputs.block_tables, inputs.kv_lens, inputs.query_starts
  ragged = tuple(attention.meta(*rows_of_step, plans.get(attention.plan)) for _, attention in groups)
  meta = AttentionMeta(ragged, inputs.slot_mapping)
  attend = paged_attend(groups)
  # With as many logit rows as tokens, selecting tokens adds a launch. It gains where matmuls skip the rows not in use.
  skips = spec.platform == "cpu" and not spec.deterministic and layout.shape.tokens >= _SELECTS_FROM
  some = skips or layout.shape.logits < layout.shape.tokens
  wanted = (inputs.logit_tokens, inputs.num_logit_rows) if some else None
  of_layers = None
  if adapters:
    assert inputs.adapter_slots is not None, "the layout has no adapter slots"
    layers = jax.tree.unflatten(jax.tree.structure(spec.adapter_layers), adapters)
    of_layers = layer_adapters(spec.split.share, layers, inputs.adapter_slots, spec.low_rank)
  hidden, kv, states = decoder.hidden_and_features(
    spec.feature_layers, tokens, inputs.positions, kv, meta, attend, inputs.num_tokens, wanted, of_layers
  )
  hidden = hidden if some else hidden[inputs.logit_tokens]
  if not spec.model.has_token_head:
    final = decoder.final_norm(hidden).astype(jnp.float32)
    return kv, last_tokens, slot_state, (*sampler.report_states(final, spec.model.vocab_size), final)
  logits = decoder.logits(hidden, inputs.num_logit_rows)
  if spec.deterministic:
    logits, rows = _with_all_rows(logits, rows, spec.num_slots)
  with jax.named_scope("sample"):
    wide = spec.platform != "cpu"
    kernels = spec.argmax, spec.sampling, spec.adjust
    if spec.split.num_devices == 1:
      sampled = sampler.sample(logits, rows, slot_state, wide, inputs.num_logit_rows, *kernels)
      accepted, is_last = sampler.accept_drafts(rows, sampled)
      slot_state = sampler.remember(slot_state, rows, sampled.tokens, accepted)
    else:
      split = spec.vocabulary
      sampled = split_sampler.sample_split(logits, rows, slot_state, split, wide, inputs.num_logit_rows, *kernels)
      accepted, is_last = sampler.accept_drafts(rows, sampled)
      slot_state = split_sampler.remember_split(slot_state, rows, sampled.tokens, accepted, split)
  slots = jnp.where(rows.has(Flag.SAMPLE) & is_last, rows[Column.SLOT], layout.num_slots)
  if spec.deterministic:
    sampled = lax.optimization_barrier(sampled)  # otherwise XLA would sample only the returned rows
  last_tokens = last_tokens.at[:, slots].set(jnp.stack([sampled.tokens, rows[Column.LATER_DRAFTS]]))
  output, top = sampled.pack()
  num_logits = layout.shape.logits
  outputs = (output[:, :num_logits], top[:, :num_logits])
  if spec.embeds:
    outputs += (decoder.final_norm(hidden).astype(jnp.float32),)
  if states:
    outputs += (jnp.concatenate(states, axis=-1),)
  return kv, last_tokens, slot_state, outputs


def write_lines(table: jax.Array, packed: jax.Array) -> jax.Array:
  """Sets row packed[i, 0] of `table` (int32 or f32[slots + 1, W], donated) to the bits of packed[i, 1:], for each i."""
  lines = lax.bitcast_convert_type(packed[:, 1:], table.dtype)
  if lines.shape[0] > NUM_LINES["mask"]:
    return table.at[packed[:, 0]].set(lines)  # compiles in a tenth of the time of as many updates
  for index in range(lines.shape[0]):  # takes half the time of a scatter on a CPU
    table = lax.dynamic_update_slice(table, lines[index : index + 1], (packed[index, 0], jnp.int32(0)))
  return table


def pack_lines(
  name: str, lines: Sequence[tuple[int, np.ndarray]], width: int, padding: int, num_devices: int = 1
) -> np.ndarray:
  """Returns the second argument of `write_lines`: int32[NUM_LINES[name], 1 + W] for each device, one after the other.

  Args:
    name: of the program.
    lines: (slot, 32-bit values), at most NUM_LINES[name]. Values that are missing at the end are padding.
    width: columns of the table on all devices together.
    padding: the padding slot, for unused rows.
    num_devices: devices that share the columns.
  """
  packed = np.zeros((num_devices, NUM_LINES[name], 1 + width // num_devices), np.int32)
  packed[:, :, 0] = padding
  for index, (slot, line) in enumerate(lines):
    values = np.zeros(width, np.int32)
    values[: len(line)] = line.view(np.int32)
    packed[:, index, 0] = slot
    packed[:, index, 1:] = values.reshape(num_devices, -1)
  return packed.reshape(-1, packed.shape[2])


def step_options(spec: ProgramSpec) -> dict[str, bool | int | str] | None:
  """Returns the compiler options of a step, by platform.

  CPU: LLVM at -O1. It compiles a fifth faster than -O3, and steps are as fast, because matmuls are in a library.

  GPU: cuBLASLt matmuls, which fuse the residual: 11 launches a layer at Llama-3-8B shapes, 14 with XLA's own matmuls
  (`make check-device`). int8 weights use XLA's own matmuls, which widen weights in registers. For cuBLASLt, XLA would
  first widen each matrix into a buffer: at 8 tokens, two layers of these shapes and the head take 1,010 MiB of
  temporaries instead of 24. Deterministic steps use XLA's own matmuls too, with one fixed tile.
  """
  match spec.platform:
    case "cpu":
      return {"xla_backend_optimization_level": 1}
    case "gpu" | "cuda":
      int8 = any(leaf.dtype == jnp.int8 for leaf in spec.params)
      one = _ONE_MATMUL if spec.deterministic else {}
      return {"xla_gpu_enable_triton_gemm": spec.deterministic or int8} | one
  return None


def step_program(spec: ProgramSpec, shape: StepShape, with_adapters: bool = False) -> Program:
  """Returns the program of a rung: (params, kv, last_tokens, slot_state, packed[, adapters]) -> results of `step`."""
  layout = spec.layout(shape)
  outputs = (
    spec.whole((3, shape.logits), jnp.int32),
    spec.whole((2, shape.logits, sampler.num_alternatives(spec.model.vocab_size)), jnp.int32),
  )
  if spec.embeds:
    outputs += (spec.whole((shape.logits, spec.model.model_dim), jnp.float32),)
  if spec.feature_layers:
    outputs += (spec.states(shape),)
  arguments = (
    spec.params,
    spec.kv,
    spec.last_tokens,
    spec.slot_state,
    spec.whole((layout.size,), jnp.int32),
    *((spec.adapters,) if with_adapters else ()),
  )
  results = spec.kv, spec.last_tokens, spec.slot_state, outputs
  return Program(
    name=adapted_key(shape) if with_adapters else "-".join(map(str, ("step", *dataclasses.astuple(shape)))),
    function=mesh_lib.on_each_device(spec.mesh, functools.partial(step, spec, layout), arguments, results),
    arguments=arguments,
    results=results,
    donated=(1, 2, 3),
    compiler_options=step_options(spec),
  )


def lines_program(spec: ProgramSpec, name: str) -> Program:
  """Returns the program `name` of NUM_LINES, which sets rows of a sampler table: (table, packed) -> table."""
  lines = getattr(spec.slot_state, LINE_TABLES[name])
  own_width = lines.sharding.shard_shape(lines.shape)[1]
  packed = mesh_lib.spread(spec.mesh, (NUM_LINES[name], 1 + own_width), jnp.int32, ("share", None))
  function = mesh_lib.on_each_device(spec.mesh, write_lines, (lines, packed), lines)
  return Program(f"lines-{name}", function, (lines, packed), lines, (0,), step_options(spec))


def write_adapter(
  adapters: tuple[jax.Array, ...], slot: jax.Array, weights: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
  """Sets a slot, int32[], of all adapter arrays (donated) to `weights`, which have no axis of slots."""
  return tuple(
    lax.dynamic_update_index_in_dim(array, own, slot, 0) for array, own in zip(adapters, weights, strict=True)
  )


def adapter_program(spec: ProgramSpec) -> Program:
  """Returns the program that writes one adapter: (adapters, slot, weights) -> adapters."""
  weights = tuple(
    jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=sharding)
    for leaf, sharding in zip(spec.adapters, adapter_shardings(spec), strict=True)
  )
  arguments = spec.adapters, spec.whole((), jnp.int32), weights
  function = mesh_lib.on_each_device(spec.mesh, write_adapter, arguments, spec.adapters)
  return Program("write-adapter", function, arguments, spec.adapters, (0,), step_options(spec))


def adapter_shardings(spec: ProgramSpec) -> tuple[jax.sharding.Sharding, ...]:
  """Returns the shardings of one adapter's arrays, in the order of spec.adapters."""
  specs = (leaf.sharding.spec for leaf in spec.adapters)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
  return tuple(NamedSharding(spec.mesh, PartitionSpec(*each[1:])) for each in specs)


def adapted_key(shape: StepShape) -> str:
  """Returns the key, among a runner's programs, of the step with adapters of a rung."""
  return "-".join(map(str, ("adapted", *dataclasses.astuple(shape))))


def zeros_program(spec: ProgramSpec, name: str, results: Any) -> Program:
  """Returns the program that allocates `results`: () -> zeros, because 0 * NaN in a masked product would be NaN."""
  fill = functools.partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), results)
  return Program(f"zeros-{name}", fill, (), results, (), step_options(spec))


def pool_programs(spec: ProgramSpec) -> dict[str, Program]:
  """Returns the programs that allocate the layers' KV, by `layer_key`."""
  device = spec.mesh.devices.flat[0]
  implementation = native.choose_implementation("zeros", device.platform) if spec.mesh.size == 1 else "reference"
  made = {}
  for buffer in spec.kv:
    fill = functools.partial(make_zeros, buffer.shape, buffer.dtype, implementation)
    made[layer_key(buffer)] = Program(f"zeros-{layer_key(buffer)}", fill, (), buffer, (), step_options(spec))
  return made


def layer_key(buffer: jax.ShapeDtypeStruct) -> str:
  """Returns the name of the program that allocates a layer's KV, which layers of one shape share."""
  return "-".join(map(str, ("layer", *buffer.shape)))


def all_programs(spec: ProgramSpec, rungs: Sequence[StepShape]) -> dict[StepShape | str, Program]:
  """Returns all programs of a runner, steps by shape; the largest first, because it compiles longest."""
  steps: dict[StepShape | str, Program] = {shape: step_program(spec, shape) for shape in reversed(rungs)}
  if spec.max_loras:
    steps |= {adapted_key(shape): step_program(spec, shape, with_adapters=True) for shape in reversed(rungs)}
    steps |= {
      "write-adapter": adapter_program(spec),
      "adapters": zeros_program(spec, "adapters", spec.adapters),
    }
  return steps | {
    **{name: lines_program(spec, name) for name in NUM_LINES},
    **pool_programs(spec),
    "slots": zeros_program(spec, "slots", spec.slot_state),
  }
