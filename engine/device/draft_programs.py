"""The device programs of a draft model: pure functions, compiled ahead of time. May not know requests, or do I/O.

A draft model has KV of its own in blocks of the same ids, so block tables, prefix sharing and preemption hold for it as
they are. After each step of the target, a program of the same rung reads the same packed array and fills the draft
model's KV. Where proposals are wanted, it then runs the draft model one token a row at a time, each the likeliest one.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from engine.device import kv_cache, sampler
from engine.device.model_input import Column, Flag, ModelInput, StepLayout, take_back_rejected, unpack
from engine.device.programs import Program, ProgramSpec, pool_programs, step_options, zeros_program
from engine.device.sampler import Sampled
from engine.shapes import StepShape
from models.attention import AttentionMeta, paged_attend
from models.config import ModelConfig
from models.decoder import Decoder
from pallas_kernels.argmax.api import argmax
from pallas_kernels.paged_attention.api import implementation

NO_TOKENS_KEY = "draft-no-tokens"  # of the program that makes the last tokens before a step, if they are not known


def _decoder(spec: ProgramSpec, params: tuple[jax.Array, ...]) -> Decoder:
  return nnx.merge(spec.graphdef, jax.tree.unflatten(spec.params_tree, params))


def _fill_kv(
  spec: ProgramSpec, shape: StepShape, decoder: Decoder, kv: kv_cache.Buffers, before: jax.Array, inputs: ModelInput
) -> kv_cache.Buffers:
  """Computes the draft model's keys and values of the step's tokens; see `fill`."""
  waiting = inputs.tokens < 0
  tokens = jnp.where(waiting, before[0, jnp.where(waiting, -1 - inputs.tokens, 0)], inputs.tokens)
  groups = spec.attention_groups(shape)
  ragged = tuple(attention.meta(inputs.block_tables, inputs.kv_lens, inputs.query_starts) for _, attention in groups)
  meta = AttentionMeta(ragged, inputs.slot_mapping)
  none = jnp.zeros(1, jnp.int32)  # no token needs the last layer's output
  return decoder.hidden(
    tokens, inputs.positions, kv, meta, paged_attend(groups), inputs.num_tokens, wanted=(none, none)
  )[1]


def find_next_tokens(
  layout: StepLayout, inputs: ModelInput, output: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns for each row of the step the token after its accepted ones: int32[S], its position, and bool[S].

  The last one says whether the row samples a token at all.

  Args: output: of the target's step, int32[3, L].
  """
  rows, num_rows = inputs.sampling, layout.shape.rows
  tokens, none = output[0], output[:0].T
  _, is_last = sampler.accept_drafts(rows, Sampled(tokens, output[1] != 0, tokens, none, none))
  # A padding logit row has no SAMPLE.
  row = jnp.sum(inputs.query_starts[None, 1:] <= rows[Column.TOKEN][:, None], axis=1, dtype=jnp.int32)
  row = jnp.where(rows.has(Flag.SAMPLE) & is_last, row, num_rows)

  def by_row(values: jax.Array) -> jax.Array:
    return jnp.zeros(num_rows, values.dtype).at[row].set(values, mode="drop")

  return by_row(tokens), by_row(rows[Column.POSITION]), by_row(jnp.ones_like(row, jnp.bool_))


def map_slots(
  block_tables: jax.Array, positions: jax.Array, is_live: jax.Array, block_size: int
) -> tuple[jax.Array, jax.Array]:
  """Returns the slot of a token of each row, int32[S], and whether its position is inside of the table, bool[S].

  Positions past a row's blocks are in padding block 0: its table has 0 there, and further ones are beyond the table.
  """
  pages, offsets = jnp.divmod(positions, block_size)
  inside = is_live & (pages < block_tables.shape[1])
  blocks = jnp.take_along_axis(block_tables, jnp.where(inside, pages, 0)[:, None], axis=1)[:, 0]
  return jnp.where(inside, blocks * block_size + offsets, 0), inside


class PassesAhead:
  """The rows of passes behind a step, of one token each.

  Attributes:
    groups: the attention of each group of layers.
    num_rows: int32[1], rows in use.
  """

  def __init__(self, spec: ProgramSpec, layout: StepLayout, inputs: ModelInput):
    """Args: spec: of what proposes. inputs: of the step."""
    rows = layout.shape.rows
    self.groups = spec.attention_groups(StepShape(rows, rows, rows))
    self.num_rows = jnp.sum(inputs.kv_lens > 0, dtype=jnp.int32)[None]
    line = jnp.arange(rows + 1, dtype=jnp.int32)
    self._starts, self._is_used = jnp.minimum(line, self.num_rows), line[:-1] < self.num_rows
    self._block_tables, self._block_size = inputs.block_tables, spec.block_size

  def make_meta(self, positions: jax.Array, is_live: jax.Array) -> AttentionMeta:
    """Returns the attention of a pass. Args: positions, is_live: of each row, as find_next_tokens returns them."""
    slots, inside = map_slots(self._block_tables, positions, is_live, self._block_size)
    kv_lens = jnp.where(self._is_used, jnp.where(inside, positions + 1, 1), 0)
    rows = self._block_tables, kv_lens, self._starts
    return AttentionMeta(tuple(attention.meta(*rows) for _, attention in self.groups), slots)


def fill(
  spec: ProgramSpec,
  layout: StepLayout,
  params: tuple[jax.Array, ...],
  kv: kv_cache.Buffers,
  before: jax.Array,
  after: jax.Array,
  output: jax.Array,
  packed: jax.Array,
):
  """Fills the draft model's KV for the tokens of a step.

  Args:
    spec, layout: static; the layout is the target's.
    params, kv: of the draft model; kv is donated, like the next one.
    before, after: int32[2, slots + 1], last_tokens before and after the target's step.
    output: of the target's step, int32[3, L].
    packed: of the target's step.

  Returns:
    kv, a copy of `after`, and int32[1, 1] that exists when the program is done.
  """
  inputs = take_back_rejected(unpack(layout, packed), before[1], spec.block_size)
  kv = _fill_kv(spec, layout.shape, _decoder(spec, params), kv, before, inputs)
  return kv, after, output[:1, :1]


def propose(
  spec: ProgramSpec,
  layout: StepLayout,
  num_proposals: int,
  params: tuple[jax.Array, ...],
  kv: kv_cache.Buffers,
  before: jax.Array,
  after: jax.Array,
  output: jax.Array,
  packed: jax.Array,
):
  """Fills KV as `fill` does, and returns int32[num_proposals, S] in place of the marker: proposals for each row.

  A row's proposals follow the last token that the step gave it. Those of rows without such a token are arbitrary.
  """
  inputs, decoder = take_back_rejected(unpack(layout, packed), before[1], spec.block_size), _decoder(spec, params)
  kv = _fill_kv(spec, layout.shape, decoder, kv, before, inputs)
  passes = PassesAhead(spec, layout, inputs)
  tokens, positions, is_live = find_next_tokens(layout, inputs, output)
  found = []
  for _ in range(num_proposals):  # a loop on the device would copy the KV
    meta = passes.make_meta(positions, is_live)
    hidden, kv = decoder.hidden(tokens, positions, kv, meta, paged_attend(passes.groups), passes.num_rows)
    tokens, _ = argmax(decoder.logits(hidden, passes.num_rows), passes.num_rows, spec.argmax)
    positions = positions + 1
    found.append(tokens)
  return kv, after, jnp.stack(found)


def fill_key(shape: StepShape) -> str:
  """Returns the key, among a runner's programs, of the program that fills a rung's KV."""
  return "-".join(map(str, ("draft-fill", *dataclasses.astuple(shape))))


def propose_key(shape: StepShape) -> str:
  """Returns the key of the program of a rung that also proposes."""
  return "-".join(map(str, ("draft-propose", *dataclasses.astuple(shape))))


def choose_draft_attention(attention: str) -> str:
  """Returns the implementation of attention beside the served model's.

  It is the same one, unless the host plans its work by the lengths of rows, which passes ahead change on the device.
  """
  return "portable" if hasattr(implementation(attention), "make_plan") else attention


def make_following_spec(
  target: ProgramSpec,
  *,
  model: ModelConfig,
  graphdef: nnx.GraphDef,
  params_tree: Any,
  params: tuple[jax.ShapeDtypeStruct, ...],
  num_blocks: int,
  attention: str,
) -> ProgramSpec:
  """Returns the spec of programs that follow the steps of `target`, with KV of their own in blocks of the same ids.

  Args:
    model, graphdef, params_tree, params, attention: as in ProgramSpec, of what proposes tokens.
    num_blocks: as many as the served model has.
  """
  return dataclasses.replace(
    target,
    model=model,
    graphdef=graphdef,
    params_tree=params_tree,
    params=params,
    kv=kv_cache.abstract(target.mesh, model, num_blocks, target.block_size, target.kv[0].dtype, attention),
    attention=attention,
    deterministic=False,  # the served model decides each token
    embeds=False,
    feature_layers=(),
  )


def draft_programs(
  spec: ProgramSpec, target: ProgramSpec, rungs: Sequence[StepShape], num_proposals: int
) -> dict[StepShape | str, Program]:
  """Returns the programs of a draft model by key: (params, kv, before, after, output, packed) -> (kv, before, found).

  Args:
    spec: of the draft model, on the one device of `target`.
    target: of the model whose steps these follow.
    rungs: of the steps.
    num_proposals: tokens that a row gets.
  """
  return make_following_programs(spec, target, rungs, num_proposals, fill, propose)


def make_following_programs(
  spec: ProgramSpec,
  target: ProgramSpec,
  rungs: Sequence[StepShape],
  num_proposals: int,
  fill: Callable[..., Any],
  propose: Callable[..., Any],
  reads_states: bool = False,
) -> dict[StepShape | str, Program]:
  """Returns the programs that follow a step of each rung, by key, and those of the arrays that they take.

  Args:
    spec, target, rungs, num_proposals: as in draft_programs.
    fill, propose: what they compute, as in this module.
    reads_states: both take the states of the step's layers last.
  """
  programs: dict[StepShape | str, Program] = {}
  for shape in reversed(rungs):
    layout = target.layout(shape)
    arguments = (
      spec.params,
      spec.kv,
      spec.last_tokens,
      spec.last_tokens,
      spec.whole((3, shape.logits), jnp.int32),
      spec.whole((layout.size,), jnp.int32),
      *((target.states(shape),) if reads_states else ()),
    )
    for key, function, size in (
      (propose_key(shape), functools.partial(propose, spec, layout, num_proposals), (num_proposals, shape.rows)),
      (fill_key(shape), functools.partial(fill, spec, layout), (1, 1)),
    ):
      results = spec.kv, spec.last_tokens, spec.whole(size, jnp.int32)
      programs[key] = Program(key, function, arguments, results, (1, 2), step_options(spec))
  return programs | pool_programs(spec) | {NO_TOKENS_KEY: zeros_program(spec, NO_TOKENS_KEY, spec.last_tokens)}
