"""Samples tokens from logits whose vocabulary several devices share, inside of a shard_map. May not gather logits.

A device has the logits, and the sampler's state, of a share of the vocabulary. What a row needs of all tokens moves as
a few numbers a device: the largest logit and its token, the logarithm of the sum of exponentials, the most likely
tokens. Truncation needs the whole row: there the devices exchange shares of the vocabulary for shares of the rows, each
samples its rows like a single device, and the tokens are gathered. So a step with the logits of one device gives that
device's tokens, and no device holds the logits of all rows.

The steps and their order are those of engine/device/sampler.py.
"""

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

from engine.device import sampler
from engine.device.model_input import Column, Flag, SamplingRows
from engine.device.sampler import Sampled, SlotState
from pallas_kernels.argmax.api import argmax

_LEAST = float(jnp.finfo(jnp.float32).min)  # of padding: finite, so that a row with padding is not a bad row


@dataclasses.dataclass(frozen=True)
class VocabularySplit:
  """The vocabulary on several devices.

  Attributes:
    axis: the mesh axis.
    num_devices: N.
    vocab_size: V, tokens of the model.
    share: tokens of each device, at least V / N; ids from V on are padding.
  """

  axis: str
  num_devices: int
  vocab_size: int
  share: int

  @property
  def first(self) -> jax.Array:
    """The first token of this device, int32[]."""
    return lax.axis_index(self.axis) * self.share

  def own(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns whether this device has a token, and the token's column there, else `share`; of the shape of `tokens`."""
    column = tokens - self.first
    is_own = (column >= 0) & (column < self.share) & (tokens < self.vocab_size)
    return is_own, jnp.where(is_own, column, self.share)

  def gather(self, values: jax.Array) -> jax.Array:
    """Returns [N, ...]: a small array of each device."""
    return lax.all_gather(values, self.axis)


def _with_padding(x: jax.Array, split: VocabularySplit, value: float) -> jax.Array:
  """Gives padded tokens the logit `value`."""
  if split.share * split.num_devices == split.vocab_size:
    return x
  tokens = split.first + lax.broadcasted_iota(jnp.int32, x.shape, 1)
  return jnp.where(tokens < split.vocab_size, x, value)


def _argmax(x: jax.Array, split: VocabularySplit, num_rows: jax.Array | None, by: str) -> tuple[jax.Array, jax.Array]:
  """Returns the lowest token of the largest logit, int32[S], and whether all logits are finite, bool[S]."""
  column, finite = argmax(x, num_rows, by)
  value = x[jnp.arange(x.shape[0], dtype=jnp.int32), column]
  own = jnp.stack([lax.bitcast_convert_type(value, jnp.int32), split.first + column, finite.astype(jnp.int32)])
  found = split.gather(own)
  values, tokens, is_finite = found[:, 0], found[:, 1], found[:, 2]
  values = lax.bitcast_convert_type(values, jnp.float32)
  is_most = values == jnp.broadcast_to(jnp.max(values, axis=0), values.shape)
  best = jnp.min(jnp.where(is_most, tokens, split.vocab_size - 1), axis=0)
  return best, jnp.all(is_finite != 0, axis=0)


def _suppress(x: jax.Array, rows: SamplingRows, split: VocabularySplit) -> jax.Array:
  """Forbids the ids that would end a SUPPRESS row's request, unless no device has another allowed token."""
  line = jnp.arange(x.shape[0], dtype=jnp.int32)
  _, columns = split.own(rows.stop_ids)
  masked = x.at[line[:, None], columns].set(-jnp.inf, mode="drop")
  has_other = lax.pmax(jnp.max(masked, axis=1), split.axis) > -jnp.inf
  changes = jnp.broadcast_to((rows.has(Flag.SUPPRESS) & has_other)[:, None], x.shape)
  return jnp.where(changes, masked, x)


def _sample_random_rows(
  x: jax.Array,
  rows: SamplingRows,
  best: jax.Array,
  split: VocabularySplit,
  wide: bool,
  num_rows: jax.Array | None,
  by: str,
) -> jax.Array:
  """Like sampler.sample_random_rows: each device samples a share of the rows, from the whole vocabulary."""
  number, missing = x.shape[0], -x.shape[0] % split.num_devices
  share = (number + missing) // split.num_devices
  start = lax.axis_index(split.axis) * share
  x = lax.all_to_all(jnp.pad(x, ((0, missing), (0, 0))), split.axis, 0, 1, tiled=True)[:, : split.vocab_size]

  def own(values: jax.Array) -> jax.Array:  # [..., S] -> [..., share]
    padded = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
    return lax.dynamic_slice_in_dim(padded, start, share, axis=-1)

  own_rows = SamplingRows(own(rows.columns), own(rows.stop_ids.T).T)
  used = None if num_rows is None else jnp.clip(num_rows - start, 0, share)
  tokens = sampler.sample_random_rows(x, own_rows, own(best), wide, used, by)
  return lax.all_gather(tokens, split.axis, tiled=True)[:number]


def _logprobs(
  logits: jax.Array, rows: SamplingRows, tokens: jax.Array, bad: jax.Array, split: VocabularySplit, wide: bool
) -> tuple[jax.Array, ...]:
  """Returns logprobs, top_ids and top_logprobs of `Sampled`, as far as rows need them."""
  count = sampler.num_alternatives(split.vocab_size)
  line = jnp.arange(logits.shape[0], dtype=jnp.int32)
  is_own, column = split.own(jnp.where(rows[Column.TARGET] < 0, tokens, rows[Column.TARGET]))
  target = jnp.where(is_own, logits[line, jnp.where(is_own, column, 0)], 0.0)
  parts = split.gather(jnp.stack([jax.nn.logsumexp(logits, axis=1), target]))
  norm, own = jax.nn.logsumexp(parts[:, 0], axis=0), jnp.sum(parts[:, 1], axis=0)

  def largest(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    values, ids = sampler.largest(x, count) if wide else lax.top_k(x, count)
    return values, ids

  def top():
    values, columns = largest(logits, min(count, split.share))
    found = split.gather(jnp.stack([lax.bitcast_convert_type(values, jnp.int32), split.first + columns]))
    found = found.transpose(1, 2, 0, 3).reshape(2, logits.shape[0], -1)  # by device, so equal values by token
    values, places = largest(lax.bitcast_convert_type(found[0], jnp.float32), count)
    ids = jnp.take_along_axis(found[1], places, axis=1)
    return sampler.finish_top(values, ids, norm, bad)

  nothing = sampler.no_logprobs(logits.shape[0], split.vocab_size)
  wanted = jnp.any(rows.has(Flag.TOP_LOGPROBS))
  return jnp.where(bad, 0.0, own - norm), *lax.cond(wanted, top, lambda: nothing[1:])


def sample_split(
  logits: jax.Array,
  rows: SamplingRows,
  state: SlotState,
  split: VocabularySplit,
  wide: bool = False,
  num_rows: jax.Array | None = None,
  argmax_by: str = "reference",
  sampling_by: str = "reference",
  adjust_by: str = "reference",
) -> Sampled:
  """Samples a token for every logit row; all devices return the same.

  Args:
    logits: f32[S, split.share], of this device's tokens.
    rows: sampling parameters, on every device.
    state: this device's columns of the state of the slots.
    wide, num_rows, argmax_by, sampling_by, adjust_by: as in sampler.sample.
  """
  logits = _with_padding(logits, split, _LEAST)
  likeliest, finite = _argmax(logits, split, num_rows, argmax_by)
  bad = ~finite

  def adjusted():
    # A penalty neither allows nor forbids a token, so suppression may follow it.
    _, drafts = split.own(sampler.preceding_drafts(rows))
    x = sampler.adjust_rows(logits, rows, drafts, state, num_rows, adjust_by, suppresses=False)
    x = _with_padding(x, split, -jnp.inf)
    x = lax.cond(jnp.any(rows.has(Flag.SUPPRESS)), lambda: _suppress(x, rows, split), lambda: x)
    return x, _argmax(x, split, num_rows, argmax_by)[0]

  def chosen():
    x, best = lax.cond(jnp.any(rows.has(sampler.ADJUSTED)), adjusted, lambda: (logits, likeliest))
    random = jnp.any(rows.has(Flag.RANDOM))
    return lax.cond(
      random, lambda: _sample_random_rows(x, rows, best, split, wide, num_rows, sampling_by), lambda: best
    )

  tokens = lax.cond(jnp.any(rows.has(sampler.ADJUSTED | Flag.RANDOM)), chosen, lambda: likeliest)
  tokens = jnp.where(bad, 0, tokens)
  logprobs = lax.cond(
    jnp.any(rows.has(Flag.LOGPROB)),
    lambda: _logprobs(logits, rows, tokens, bad, split, wide),
    lambda: sampler.no_logprobs(logits.shape[0], split.vocab_size),
  )
  return Sampled(tokens, bad, *logprobs)


def remember_split(
  state: SlotState, rows: SamplingRows, tokens: jax.Array, accepted: jax.Array, split: VocabularySplit
) -> SlotState:
  """Like sampler.remember, for this device's tokens."""
  padding = state.history.shape[0] - 1
  slots = jnp.where(rows.has(Flag.PENALTY) & accepted, rows[Column.SLOT], padding)
  _, columns = split.own(tokens)
  return dataclasses.replace(state, history=state.history.at[slots, columns].add(1, mode="drop"))
