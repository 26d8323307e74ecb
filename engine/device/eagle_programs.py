"""The device programs of an EAGLE-3 head: pure functions, compiled ahead of time. May not know requests, or do I/O.

As in draft_programs.py, a program of the same rung follows each step of the served model and reads the same packed
array. The head's key and value at a position come from the token there and the feature of the position before. Within a
step that is the row's token before; for a row's first token it is in a buffer with one feature a block, that of the
block's last known token. So chunks, rejected drafts, shared prefixes and preemption need no state of a slot.
"""

from collections.abc import Sequence
from typing import NamedTuple

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp

from engine.device import kv_cache
from engine.device.draft_programs import PassesAhead, find_next_tokens, make_following_programs
from engine.device.model_input import ModelInput, StepLayout, take_back_rejected, unpack
from engine.device.programs import Program, ProgramSpec
from engine.shapes import StepShape
from models.attention import AttentionMeta, paged_attend
from models.eagle_head import EmbeddedHead
from pallas_kernels.argmax.api import argmax
from pallas_kernels.row_copies.api import make_buffer_shape, read_rows, write_rows


class _NextTokens(NamedTuple):
  """What each row of a step goes on with; see draft_programs.find_next_tokens."""

  tokens: jax.Array
  positions: jax.Array
  is_live: jax.Array


def _merge_head(spec: ProgramSpec, params: tuple[jax.Array, ...]) -> EmbeddedHead:
  return nnx.merge(spec.graphdef, jax.tree.unflatten(spec.params_tree, params))


def choose_row_copies(attention: str) -> str:
  """Returns what reads and writes the buffer of features beside an implementation of attention."""
  return "tpu" if attention == "tpu" else "reference"


def make_features_shape(num_blocks: int, width: int, attention: str) -> tuple[int, ...]:
  """Returns the shape of the buffer with a feature of `width` numbers a block."""
  return make_buffer_shape(num_blocks, width, choose_row_copies(attention))


def _read_features(spec: ProgramSpec, stored: jax.Array, inputs: ModelInput, positions: jax.Array) -> jax.Array:
  """Returns for each row the stored feature of the block with a position, [S, D]. Args: positions: int32[S]."""
  pages = jnp.maximum(positions, 0) // spec.block_size
  blocks = jnp.take_along_axis(inputs.block_tables, pages[:, None], axis=1)[:, 0]
  return read_rows(stored, blocks, spec.model.model_dim, choose_row_copies(spec.attention))


def shift_features(
  spec: ProgramSpec, fused: jax.Array, stored: jax.Array, inputs: ModelInput, row_of_token: jax.Array
) -> jax.Array:
  """Returns the feature of the position before each token of a step, [T, D]; arbitrary at padding.

  Args:
    spec: of the head.
    fused: [T, D], features of the step's own positions.
    stored: of `make_features_shape`, that of each block's last known token.
    row_of_token: int32[T].
  """
  starts = inputs.query_starts[:-1]
  first = inputs.positions[jnp.minimum(starts, fused.shape[0] - 1)]
  carried = _read_features(spec, stored, inputs, first - 1)
  is_first = starts[row_of_token] == jnp.arange(fused.shape[0], dtype=jnp.int32)
  return jnp.where(is_first[:, None], carried[row_of_token], jnp.roll(fused, 1, axis=0))


def store_features(
  spec: ProgramSpec,
  stored: jax.Array,
  fused: jax.Array,
  inputs: ModelInput,
  row_of_token: jax.Array,
  following: _NextTokens,
) -> jax.Array:
  """Returns `stored` with the feature of each block's last known token, after a step.

  A block's last known token is its last one, or before that the row's last token that is no rejected draft. Args: as in
  shift_features.
  """
  ends = jnp.maximum(inputs.query_starts[1:] - 1, 0)
  kept = jnp.where(following.is_live, following.positions - 1, inputs.positions[ends])[row_of_token]
  positions = inputs.positions
  in_use = jnp.arange(fused.shape[0], dtype=jnp.int32) < inputs.num_tokens
  is_last = (positions == kept) | ((positions < kept) & (positions % spec.block_size == spec.block_size - 1))
  blocks = jnp.where(in_use & is_last, inputs.slot_mapping // spec.block_size, stored.shape[0])
  return write_rows(stored, blocks, fused, choose_row_copies(spec.attention))


def _fill_head(
  spec: ProgramSpec,
  layout: StepLayout,
  model: EmbeddedHead,
  kv: kv_cache.Buffers,
  before: jax.Array,
  inputs: ModelInput,
  states: jax.Array,
  following: _NextTokens,
) -> kv_cache.Buffers:
  """Stores the head's keys, values and features of the step's tokens; see `fill_head`."""
  pool, stored = kv
  head, groups = model.head, spec.attention_groups(layout.shape)
  waiting = inputs.tokens < 0
  tokens = jnp.where(waiting, before[0, jnp.where(waiting, -1 - inputs.tokens, 0)], inputs.tokens)
  line = jnp.arange(layout.shape.tokens, dtype=jnp.int32)
  row = jnp.sum(inputs.query_starts[None, 1:] <= line[:, None], axis=1, dtype=jnp.int32)
  row = jnp.minimum(row, layout.shape.rows - 1)
  fused = head.fuse_features(states, inputs.num_tokens)
  shifted = shift_features(spec, fused, stored, inputs, row)
  # The write into `stored` depends on the reads before it. Otherwise XLA would copy the buffer.
  shifted, stored = lax.optimization_barrier((shifted, stored))
  stored = store_features(spec, stored, fused, inputs, row, following)
  qkv = head.project(model.look_up(tokens, shifted.dtype), shifted, inputs.positions, inputs.num_tokens)
  # Nothing reads the attention's output, so rows look as if they began with the step: it stays short.
  counts = inputs.query_starts[1:] - inputs.query_starts[:-1]
  ragged = tuple(attention.meta(inputs.block_tables, counts, inputs.query_starts) for _, attention in groups)
  meta = AttentionMeta(ragged, inputs.slot_mapping)
  _, pool = head.attend_to_pages(qkv, inputs.positions, pool, meta, paged_attend(groups))
  return pool, stored


def fill_head(
  spec: ProgramSpec,
  layout: StepLayout,
  params: tuple[jax.Array, ...],
  kv: kv_cache.Buffers,
  before: jax.Array,
  after: jax.Array,
  output: jax.Array,
  packed: jax.Array,
  states: jax.Array,
):
  """Fills the head's buffers for the tokens of a step.

  Args:
    spec, layout: static; the layout is the served model's.
    params, kv: of the head; kv, its keys and values and then the features, is donated, like the next one.
    before, after: int32[2, slots + 1], last_tokens before and after the step.
    output: of the step, int32[3, L].
    packed: of the step.
    states: of the step, [T, 3 * D]: inputs of three of its layers.

  Returns:
    kv, a copy of `after`, and int32[1, 1] that exists when the program is done.
  """
  inputs = take_back_rejected(unpack(layout, packed), before[1], spec.block_size)
  following = _NextTokens(*find_next_tokens(layout, inputs, output))
  kv = _fill_head(spec, layout, _merge_head(spec, params), kv, before, inputs, states, following)
  return kv, after, output[:1, :1]


def propose_with_head(
  spec: ProgramSpec,
  layout: StepLayout,
  num_proposals: int,
  params: tuple[jax.Array, ...],
  kv: kv_cache.Buffers,
  before: jax.Array,
  after: jax.Array,
  output: jax.Array,
  packed: jax.Array,
  states: jax.Array,
):
  """Fills buffers as `fill_head` does, and returns int32[num_proposals, S] in place of the marker.

  A row's proposals follow the last token that the step gave it. Those of rows without such a token are arbitrary. After
  the first one, the head's own hidden states stand in for features.
  """
  inputs, model = take_back_rejected(unpack(layout, packed), before[1], spec.block_size), _merge_head(spec, params)
  following = _NextTokens(*find_next_tokens(layout, inputs, output))
  pool, stored = _fill_head(spec, layout, model, kv, before, inputs, states, following)
  head, passes = model.head, PassesAhead(spec, layout, inputs)
  tokens, positions, is_live = following
  features = _read_features(spec, stored, inputs, positions - 1)
  found = []
  for _ in range(num_proposals):  # a loop on the device would copy the KV
    meta = passes.make_meta(positions, is_live)
    qkv = head.project(model.look_up(tokens, features.dtype), features, positions, passes.num_rows)
    attended, pool = head.attend_to_pages(qkv, positions, pool, meta, paged_attend(passes.groups))
    features = head.finish_layer(features, attended, passes.num_rows)
    best, _ = argmax(head.score_tokens(features, passes.num_rows), passes.num_rows, spec.argmax)
    tokens = head.target_ids[...][best]
    positions = positions + 1
    found.append(tokens)
  return (pool, stored), after, jnp.stack(found)


def head_programs(
  spec: ProgramSpec, target: ProgramSpec, rungs: Sequence[StepShape], num_proposals: int
) -> dict[StepShape | str, Program]:
  """Returns the programs of a head by key: (params, kv, before, after, output, packed, states) -> (kv, before, found).

  Args: as in draft_programs.draft_programs.
  """
  return make_following_programs(spec, target, rungs, num_proposals, fill_head, propose_with_head, reads_states=True)
