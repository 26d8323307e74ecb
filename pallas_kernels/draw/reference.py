"""Draws a token of each line, in plain jnp: by temperature, top_k, top_p, min_p and a random number. Sorts nothing."""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

NO_LIMIT = 1 << 30  # of top_k
NEGLIGIBLE = -110.0  # exp of this is 0 in f32
_NUM_KEYS = int(np.float32(-NEGLIGIBLE).view(np.int32)) + 1  # of [-110, 0), see _ordered; less than 2**31
_CHUNK = 128  # tokens of the first level of a draw
_SPLIT = 16_384  # values of a row above which XLA:GPU splits its reduction


class DrawParams(NamedTuple):
  """What each line is drawn by.

  Attributes:
    temperature: f32[S]; 0: nothing is drawn, and the line's token means nothing.
    top_p: f32[S], of what min_p and top_k left; 1 or more: no limit.
    min_p: f32[S], of the most likely token's probability, both tempered; 0: no limit.
    top_k: int32[S]; NO_LIMIT: none.
    seed: uint32[S].
    position: int32[S].
  """

  temperature: jax.Array
  top_p: jax.Array
  min_p: jax.Array
  top_k: jax.Array
  seed: jax.Array
  position: jax.Array


def _column(values: jax.Array, like: jax.Array) -> jax.Array:
  """[S] as [S, V]."""
  return jnp.broadcast_to(values[:, None], like.shape)


def _ordered(x: jax.Array) -> jax.Array:
  """f32 -> int32 in the same order, every step of one a step to the next float (and back: it is its own inverse)."""
  bits = lax.bitcast_convert_type(x, jnp.int32)
  return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _unordered(key: jax.Array) -> jax.Array:
  return lax.bitcast_convert_type(jnp.where(key < 0, key ^ jnp.int32(0x7FFFFFFF), key), jnp.float32)


def threshold(z: jax.Array, weights: jax.Array, need: jax.Array, wide: bool) -> jax.Array:
  """The largest t for which the weights of {z >= t} reach `need`, or NEGLIGIBLE; exact, digit by digit of t's bits.

  As in the sorting-free sampling of FlashInfer (https://flashinfer.ai/2025/03/10/sampling.html) every pass reads all of
  z and narrows the range in which t lies; here by as many times as a digit has values, so the number of passes is
  fixed: 8 of 4 bits, or 16 of 2, none of which waits for the host or loops on the device, or 31 of one.

  Sums of floats are exact enough: of one order of adding, the sum over more weights is never less.

  Args:
    z: f32[S, V], at most 0.
    weights: f32[S, V], not negative.
    need: f32[S].
    wide: whether a pass tries 15 values (3 of a small vocabulary), unrolled, rather than one, in a loop (see `draw`).
  """
  bits = (4 if z.shape[1] > _SPLIT else 2) if wide else 1
  low = jnp.full(z.shape[0], -_NUM_KEYS, jnp.int32)

  def narrow(low, shift):  # t's key is at least `low`, and less than `low` plus the 2**bits-fold of 2**shift
    # low + (digit << shift) may be above 0, or beyond int32: then it is not tried.
    tried = [(-low >> shift) >= digit for digit in range(1, 2**bits)]
    keys = [jnp.where(ok, low + (jnp.int32(digit) << shift), 0) for digit, ok in enumerate(tried, 1)]
    masses = [jnp.where(z >= _column(_unordered(key), z), weights, 0.0) for key in keys]
    # One reduction of all: of several, XLA makes a kernel each, every one of which reads z. Only where it splits a row
    # does XLA:GPU fuse into it what it adds up; a smaller vocabulary's masses are written and read again, so there they
    # are few.
    totals = lax.reduce(
      masses, [jnp.float32(0)] * len(masses), lambda a, b: [x + y for x, y in zip(a, b, strict=True)], (1,)
    )
    reached = [ok & (total >= need) for ok, total in zip(tried, totals, strict=True)]
    return low + (sum(digit.astype(jnp.int32) for digit in reached) << shift)

  shifts = range(-(-_NUM_KEYS.bit_length() // bits) * bits - bits, -1, -bits)
  if wide:
    for shift in shifts:
      low = narrow(low, jnp.int32(shift))
  else:
    low = lax.fori_loop(0, len(shifts), lambda i, low: narrow(low, jnp.int32(shifts[0]) - bits * i), low)
  return _unordered(low)


def draw(x: jax.Array, asked: DrawParams, wide: bool = False) -> jax.Array:
  """See `api.draw`.

  Args:
    wide: how a threshold is searched, which changes no token: in few passes that each do much, for devices on which a
      pass costs its launch and its reading; or in many that do little, each of which XLA:CPU compiles once.
  """
  temperature = jnp.where(asked.temperature > 0.0, asked.temperature, 1.0)
  z = (x - _column(jnp.max(x, axis=1), x)) / _column(temperature, x)
  weights = jnp.exp(z)

  def top_k(least):
    return jnp.maximum(least, threshold(z, jnp.ones_like(z), asked.top_k.astype(jnp.float32), wide))

  def top_p(least):
    share = jnp.where(asked.top_p < 1.0, asked.top_p, 2.0)
    left = jnp.where(z >= _column(least, z), weights, 0.0)
    return jnp.maximum(least, threshold(z, left, share * jnp.sum(left, axis=1), wide))

  least = jnp.log(asked.min_p)
  least = lax.cond(jnp.any(asked.top_k < NO_LIMIT), top_k, lambda least: least, least)
  least = lax.cond(jnp.any(asked.top_p < 1.0), top_p, lambda least: least, least)
  weights = jnp.where(z >= _column(least, z), weights, 0.0)
  return _invert(weights, jax.vmap(uniform)(asked.seed, asked.position))


def uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
  """The number in [0, 1) that decides the token at `position` (f32[], a multiple of 2**-24) of a request with `seed`.

  The folded key is itself 64 random bits; to hash it once more, as jax.random.uniform does, only costs.
  """
  key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
  bits = lax.shift_right_logical(jax.random.key_data(key)[0], jnp.uint32(8))
  return bits.astype(jnp.float32) * jnp.float32(2**-24)


def _invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
  """The token at which the cumulative weight passes `uniform` times the whole: first the chunk, then the token in it.

  Never a token of weight 0: rounding could otherwise carry the draw past the last one.
  """
  rows, vocab = weights.shape
  chunks = jnp.pad(weights, ((0, 0), (0, -vocab % _CHUNK))).reshape(rows, -1, _CHUNK)
  line = jnp.arange(rows, dtype=jnp.int32)

  def passes(masses, wanted):  # f32[S, n], f32[S] -> int32[S], and f32[S] what is left of `wanted` there
    ends = jnp.cumsum(masses, axis=1)
    found = (ends > _column(wanted, ends)) & (masses > 0.0)
    index = lax.broadcasted_iota(jnp.int32, masses.shape, 1)
    last = jnp.max(jnp.where(masses > 0.0, index, 0), axis=1)
    first = jnp.minimum(jnp.min(jnp.where(found, index, masses.shape[1]), axis=1), last)
    return first, wanted - (ends[line, first] - masses[line, first])

  masses = chunks.sum(axis=2)
  chunk, left = passes(masses, uniform * masses.sum(axis=1))
  token, _ = passes(chunks[line, chunk], left)
  return chunk * _CHUNK + token
