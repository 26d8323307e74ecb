"""The one int32 array that a step gets, and how the device unpacks it. May not choose shapes or know models.

A step has one array, because every argument of a call costs microseconds and every transfer more. Floats travel as
their bits. Only `StepLayout` knows offsets: `Packer` (step_packer.py) writes through it in numpy, and `unpack` reads
through it while JAX traces a step program.
"""

import dataclasses
import enum
from functools import cached_property
import math

import jax
from jax import lax
import jax.numpy as jnp

from engine.sampling_params import MAX_STOP_TOKEN_IDS
from engine.shapes import StepShape
from pallas_kernels.paged_attention.plan import Plan, place_arrays


class Flag(enum.IntFlag):
  """The sampler work of a logit row; a step skips work that none of its rows needs."""

  SAMPLE = 1  # its token becomes last_tokens[slot], if no later row of its sequence is accepted
  RANDOM = 2  # temperature above 0
  TOP_K = 4
  TOP_P = 8
  PENALTY = 16
  BIAS = 32  # logit_bias or allowed_token_ids
  SUPPRESS = 64  # min_tokens not reached
  LOGPROB = 128  # log probability of the row's own token
  TOP_LOGPROBS = 256  # log probabilities of the most likely tokens
  MASK = 512  # allows only tokens of a mask
  BEHIND = 1024  # its position counts drafts of the step before, of which the device knows how many it rejected


class Column(enum.IntEnum):
  """Values of each logit row, an int32 row of the array each. The first ones are fixed at the slot's admission."""

  SEED = 0
  TOP_K = 1
  TEMPERATURE = 2  # f32 bits, like the next five
  TOP_P = 3
  MIN_P = 4
  PRESENCE = 5
  FREQUENCY = 6
  REPETITION = 7
  FLAGS = 8
  SLOT = 9  # these change from step to step
  MASK = 10  # line of SlotState.mask
  POSITION = 11  # position of the token to sample
  TARGET = 12  # token with a reported log probability; -1: the sampled token
  TOKEN = 13  # index of the logit row's token in the packed token axis
  NUM_DRAFTS = 14  # drafts of its sequence up to its own token, which the preceding logit rows verify
  DRAFT = 15  # its own token, a draft if NUM_DRAFTS is above 0, else arbitrary
  LATER_DRAFTS = 16  # drafts of its sequence after its own token
  MIN_LENGTH = 17  # of SUPPRESS rows: tokens at which the request reaches min_tokens


NUM_SLOT_COLUMNS = Column.FLAGS + 1
FLOAT_COLUMNS = slice(Column.TEMPERATURE, Column.FLAGS)  # the bits of f32


@dataclasses.dataclass(frozen=True)
class StepLayout:
  """Offsets of a step's packed array; static in its program.

  Attributes:
    shape: the rung.
    table_width: B, blocks of a full table.
    num_slots: slots for requests; index num_slots is the padding slot.
    num_eos: end-of-sequence ids of the model, which min_tokens suppresses too.
    plans: distinct plans of the attention kernels of this rung.
    has_adapters: the array holds each token's adapter slot.
  """

  shape: StepShape
  table_width: int
  num_slots: int
  num_eos: int
  plans: tuple[Plan, ...] = ()
  has_adapters: bool = False

  @property
  def num_stop_ids(self) -> int:
    """The most ids that a row may suppress."""
    return MAX_STOP_TOKEN_IDS + self.num_eos

  @cached_property
  def fields(self) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Name -> offset and shape; aligned, because XLA passes kernels pointers to slices of the array."""
    t, s, logits = self.shape.tokens, self.shape.rows, self.shape.logits
    shapes = {
      "tokens": (t,),  # an id, or -1 - slot for last_tokens[slot]
      "positions": (t,),
      "slot_mapping": (t,),
      **({"adapter_slots": (t,)} if self.has_adapters else {}),
      "used": (2,),  # numbers of leading tokens and logit rows in use
      "query_starts": (s + 1,),
      "kv_lens": (s,),
      "behind_slots": (s,),  # of rows behind drafts 1 + slot, else 0
      "behind_rows": (t,),  # of tokens of these rows 1 + row, else 0
      "columns": (len(Column), logits),
      "stop_ids": (logits, self.num_stop_ids),
      **{f"plan {number}": (plan.size,) for number, plan in enumerate(self.plans)},
      "block_tables": (s, self.table_width),
    }
    return place_arrays(shapes)[0]

  @cached_property
  def size(self) -> int:
    """The number of int32 values."""
    offset, shape = self.fields["block_tables"]
    return offset + math.prod(shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingRows:
  """Sampling parameters of every logit row.

  Code reads each from `columns` where it needs it: XLA copies the outer values that a branch uses, so one array is
  cheaper than thirteen.

  Attributes:
    columns: int32[len(Column), L].
    stop_ids: int32[L, n]; -1 is padding.
  """

  columns: jax.Array
  stop_ids: jax.Array

  def has(self, flags: Flag) -> jax.Array:
    """Returns bool[L]: the rows with one of `flags`."""
    return (self[Column.FLAGS] & jnp.int32(int(flags))) != 0

  def __getitem__(self, column: Column) -> jax.Array:
    """Returns int32, f32 or uint32[L], the column's dtype."""
    line = self.columns[column]
    if column == Column.SEED:
      return lax.bitcast_convert_type(line, jnp.uint32)
    return lax.bitcast_convert_type(line, jnp.float32) if FLOAT_COLUMNS.start <= column < FLOAT_COLUMNS.stop else line


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelInput:
  """A step on the device, of S rows and L logit rows. Padding rows have no token and use the padding slot.

  Tokens, rows and logit rows in use come before padding.
  """

  tokens: jax.Array  # int32[T]; negative: -1 - slot
  positions: jax.Array  # int32[T]
  slot_mapping: jax.Array  # int32[T]
  query_starts: jax.Array  # int32[S + 1]
  kv_lens: jax.Array  # int32[S]
  block_tables: jax.Array  # int32[S, B]
  plans: tuple[jax.Array, ...]  # int32[size] for each of layout.plans
  num_tokens: jax.Array  # int32[1], tokens in use
  num_logit_rows: jax.Array  # int32[1], logit rows in use
  behind_slots: jax.Array  # int32[S]; see StepLayout.fields
  behind_rows: jax.Array  # int32[T]
  logit_tokens: jax.Array  # int32[L], index into the token axis
  sampling: SamplingRows
  adapter_slots: jax.Array | None  # int32[T]; 0 is none


def unpack(layout: StepLayout, packed: jax.Array) -> ModelInput:
  """Returns static slices of the packed array, int32[layout.size]."""

  def field(name: str) -> jax.Array:
    offset, shape = layout.fields[name]
    return lax.slice(packed, (offset,), (offset + math.prod(shape),)).reshape(shape)

  columns, used = field("columns"), field("used")
  return ModelInput(
    tokens=field("tokens"),
    positions=field("positions"),
    slot_mapping=field("slot_mapping"),
    query_starts=field("query_starts"),
    kv_lens=field("kv_lens"),
    block_tables=field("block_tables"),
    plans=tuple(field(f"plan {number}") for number in range(len(layout.plans))),
    num_tokens=used[:1],
    num_logit_rows=used[1:],
    behind_slots=field("behind_slots"),
    behind_rows=field("behind_rows"),
    logit_tokens=columns[Column.TOKEN],
    sampling=SamplingRows(columns, field("stop_ids")),
    adapter_slots=field("adapter_slots") if layout.has_adapters else None,
  )


def take_back_rejected(inputs: ModelInput, rejected: jax.Array, block_size: int) -> ModelInput:
  """Moves rows behind drafts back by the rejected ones. Of a step without such rows it returns equal values.

  Args:
    rejected: int32[slots + 1], drafts of each slot's latest row that were rejected.
    block_size: tokens a block.
  """
  slots, rows = inputs.behind_slots, inputs.behind_rows
  of_row = jnp.where(slots > 0, rejected[jnp.maximum(slots - 1, 0)], 0)
  row = jnp.maximum(rows - 1, 0)
  of_token = jnp.where(rows > 0, of_row[row], 0)
  positions = inputs.positions - of_token
  places = inputs.block_tables[row, positions // block_size] * block_size + positions % block_size
  sampling = inputs.sampling
  columns, behind = sampling.columns, sampling.has(Flag.BEHIND)
  position = columns[Column.POSITION] - jnp.where(behind, rejected[columns[Column.SLOT]], 0)
  # The host has decided this for other rows.
  reaches = behind & (position >= columns[Column.MIN_LENGTH])
  flags = jnp.where(reaches, columns[Column.FLAGS] & ~jnp.int32(int(Flag.SUPPRESS)), columns[Column.FLAGS])
  columns = columns.at[Column.POSITION].set(position).at[Column.FLAGS].set(flags)
  return dataclasses.replace(
    inputs,
    positions=positions,
    kv_lens=inputs.kv_lens - of_row,
    slot_mapping=jnp.where(of_token > 0, places, inputs.slot_mapping),
    sampling=dataclasses.replace(sampling, columns=columns),
  )
