"""What requests add to the logits and forbid, in plain jnp. Draws nothing."""

from collections.abc import Callable
import enum
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

PROMPT_BIT = 1 << 30  # of a history entry: the token is in the prompt; the bits below count outputs
_HUGE = 1e30  # a penalty may overflow a logit; this keeps it finite and on its side


class Kind(enum.IntFlag):
  """What is done to a line, in this order (engine/device/sampler.py has the whole order and its reasons)."""

  MASK = 1
  BIAS = 2
  SUPPRESS = 4
  PENALTY = 8


class AdjustParams(NamedTuple):
  """What is done to each line, and with what.

  Attributes:
    kinds: int32[S], a Kind; of what a line does not ask for, the other numbers mean nothing.
    slot: int32[S], its line in `Memory`.
    repetition, frequency, presence: f32[S], for PENALTY.
  """

  kinds: jax.Array
  slot: jax.Array
  repetition: jax.Array
  frequency: jax.Array
  presence: jax.Array


class Memory(NamedTuple):
  """One line a slot.

  Attributes:
    history: int32[slots, V], how often a token was generated, plus PROMPT_BIT where the prompt holds it.
    bias: f32[slots, V], added to the logits; -inf where a token is not allowed.
    mask: int32[slots, ceil(V / 32)], what is allowed: token t is bit t % 32 of word t // 32.
  """

  history: jax.Array
  bias: jax.Array
  mask: jax.Array


def _column(values: jax.Array, like: jax.Array) -> jax.Array:
  """[S] as [S, V]."""
  return jnp.broadcast_to(values[:, None], like.shape)


def _penalise(x: jax.Array, asked: AdjustParams, history: jax.Array) -> jax.Array:
  """Repetition (arXiv:1909.05858) over prompt and outputs, then frequency and presence over outputs.

  A forbidden token (-inf) stays forbidden; every other logit stays finite.
  """
  forbidden = x == -jnp.inf
  past = history[asked.slot]
  count = past & jnp.int32(PROMPT_BIT - 1)
  repetition = _column(asked.repetition, x)
  x = jnp.where(past != 0, jnp.where(x > 0.0, x / repetition, x * repetition), x)
  x = x - _column(asked.frequency, x) * count.astype(jnp.float32)
  x = jnp.where(count > 0, x - _column(asked.presence, x), x)
  return jnp.where(forbidden, -jnp.inf, jnp.clip(x, -_HUGE, _HUGE))


def _only_masked(x: jax.Array, words: jax.Array) -> jax.Array:  # f32[S, V], int32[S, W] -> f32[S, V]
  """Forbids the tokens whose bit is 0."""
  bits = words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None, :]
  allowed = (bits & jnp.int32(1)).reshape(x.shape[0], -1)[:, : x.shape[1]]
  return jnp.where(allowed != 0, x, -jnp.inf)


def _suppress(x: jax.Array, stop_ids: jax.Array) -> jax.Array:
  """Forbids the ids that would end the request. Where nothing else is allowed the request may end early."""
  line = jnp.arange(x.shape[0], dtype=jnp.int32)
  ids = jnp.where(stop_ids < 0, x.shape[1], stop_ids)  # out of range: dropped
  masked = x.at[line[:, None], ids].set(-jnp.inf, mode="drop")
  return jnp.where(_column(jnp.max(masked, axis=1) == -jnp.inf, x), x, masked)


def adjust(x: jax.Array, asked: AdjustParams, stop_ids: jax.Array, memory: Memory) -> jax.Array:
  """See api.adjust. What no line asks for is skipped, so that one program serves every mixture."""

  def where_any(kind: Kind, change: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    chosen = (asked.kinds & jnp.int32(kind)) != 0
    return lax.cond(jnp.any(chosen), lambda x: jnp.where(_column(chosen, x), change(x), x), lambda x: x, x)

  x = where_any(Kind.MASK, lambda x: _only_masked(x, memory.mask[asked.slot]), x)
  x = where_any(Kind.BIAS, lambda x: x + memory.bias[asked.slot], x)
  x = where_any(Kind.SUPPRESS, lambda x: _suppress(x, stop_ids), x)
  return where_any(Kind.PENALTY, lambda x: _penalise(x, asked, memory.history), x)
