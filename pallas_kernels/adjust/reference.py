"""Adjusts logits in plain jnp: masks, biases, suppressed tokens and penalties. May not sample."""

from collections.abc import Callable
import enum
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

PROMPT_BIT = 1 << 30  # of a history entry: the token is in the prompt; the bits below count outputs
_HUGE = 1e30  # clips logits that a penalty would overflow, so they stay finite and keep their sign


class Kind(enum.IntFlag):
  """The adjustments of a row, in the order they apply; engine/device/sampler.py documents the whole order."""

  MASK = 1
  BIAS = 2
  SUPPRESS = 4
  PENALTY = 8


class AdjustParams(NamedTuple):
  """The adjustments of each row.

  Attributes:
    kinds: int32[S], a Kind. Values for a kind that the row does not have are arbitrary.
    slot: int32[S], the row's entry in history and bias of `Memory`.
    mask: int32[S], the row's entry in the mask of `Memory`.
    repetition, frequency, presence: f32[S], for PENALTY.
  """

  kinds: jax.Array
  slot: jax.Array
  mask: jax.Array
  repetition: jax.Array
  frequency: jax.Array
  presence: jax.Array


class Memory(NamedTuple):
  """Per-slot data of the adjustments.

  Attributes:
    history: int32[slots, V], how often the request generated a token, plus PROMPT_BIT for tokens of the prompt.
    bias: f32[slots, V], added to the logits; -inf where a token is not allowed.
    mask: int32[masks, ceil(V / 32)], the allowed tokens: token t is bit t % 32 of word t // 32.
  """

  history: jax.Array
  bias: jax.Array
  mask: jax.Array


def _column(values: jax.Array, like: jax.Array) -> jax.Array:
  """Broadcasts [S] to [S, V]."""
  return jnp.broadcast_to(values[:, None], like.shape)


def _penalize(x: jax.Array, params: AdjustParams, past: jax.Array) -> jax.Array:
  """Applies the repetition penalty (arXiv:1909.05858) to prompt and outputs, then frequency and presence to outputs.

  A forbidden token (-inf) stays forbidden; every other logit stays finite.

  Args: past: int32[S, V], each row's history.
  """
  forbidden = x == -jnp.inf
  count = past & jnp.int32(PROMPT_BIT - 1)
  repetition = _column(params.repetition, x)
  x = jnp.where(past != 0, jnp.where(x > 0.0, x / repetition, x * repetition), x)
  x = x - _column(params.frequency, x) * count.astype(jnp.float32)
  x = jnp.where(count > 0, x - _column(params.presence, x), x)
  return jnp.where(forbidden, -jnp.inf, jnp.clip(x, -_HUGE, _HUGE))


def _only_masked(x: jax.Array, words: jax.Array) -> jax.Array:  # f32[S, V], int32[S, W] -> f32[S, V]
  """Forbids the tokens whose bit is 0."""
  bits = words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None, :]
  allowed = (bits & jnp.int32(1)).reshape(x.shape[0], -1)[:, : x.shape[1]]
  return jnp.where(allowed != 0, x, -jnp.inf)


def _suppress(x: jax.Array, stop_ids: jax.Array) -> jax.Array:
  """Forbids the ids that would end the request. If no other token is allowed, the request may end early."""
  line = jnp.arange(x.shape[0], dtype=jnp.int32)
  ids = jnp.where(stop_ids < 0, x.shape[1], stop_ids)  # out of range: dropped
  masked = x.at[line[:, None], ids].set(-jnp.inf, mode="drop")
  return jnp.where(_column(jnp.max(masked, axis=1) == -jnp.inf, x), x, masked)


def adjust_logits(
  x: jax.Array, params: AdjustParams, stop_ids: jax.Array, drafts: jax.Array, memory: Memory
) -> jax.Array:
  """See api.adjust_logits. The program skips kinds that no row has, so one program serves every mixture."""

  def has(kind: Kind) -> jax.Array:
    return (params.kinds & jnp.int32(kind)) != 0

  def where_any(kind: Kind, change: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return lax.cond(jnp.any(has(kind)), lambda x: jnp.where(_column(has(kind), x), change(x), x), lambda x: x, x)

  def after_drafts(past: jax.Array) -> jax.Array:
    line = jnp.arange(x.shape[0], dtype=jnp.int32)
    return past.at[line[:, None], jnp.where(drafts < 0, x.shape[1], drafts)].add(1, mode="drop")

  def penalize(x: jax.Array, change: Callable[[jax.Array], jax.Array]) -> jax.Array:
    past = change(memory.history[params.slot])
    return jnp.where(_column(has(Kind.PENALTY), x), _penalize(x, params, past), x)

  x = where_any(Kind.MASK, lambda x: _only_masked(x, memory.mask[params.mask]), x)
  x = where_any(Kind.BIAS, lambda x: x + memory.bias[params.slot], x)
  x = where_any(Kind.SUPPRESS, lambda x: _suppress(x, stop_ids), x)
  penalized = has(Kind.PENALTY)
  # Three branches, because a skipped one inside of another would copy the logits once more.
  which = jnp.any(penalized).astype(jnp.int32) + jnp.any(penalized[:, None] & (drafts >= 0)).astype(jnp.int32)
  branches = lambda x: x, lambda x: penalize(x, lambda past: past), lambda x: penalize(x, after_drafts)
  return lax.switch(which, branches, x)
