"""Samples a token for each row in plain jnp, by temperature, min_p, top_k and top_p. May not sort the vocabulary."""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

NO_LIMIT = 1 << 30  # of top_k
NEGLIGIBLE = -110.0  # exp of this is 0 in f32
_NUM_KEYS = int(np.float32(-NEGLIGIBLE).view(np.int32)) + 1  # of [-110, 0), see _ordered; less than 2**31
_CHUNK = 128  # tokens a chunk in the first level of `_invert`
_SPLIT = 16_384  # values of a row above which XLA:GPU splits its reduction


class SamplingInputs(NamedTuple):
  """The sampling parameters of each row.

  Attributes:
    temperature: f32[S]; 0: the kernel samples nothing, and the row's token is arbitrary.
    top_p: f32[S], a share of the weight that min_p and top_k leave; 1 or more: no threshold.
    min_p: f32[S], a share of the most likely token's probability, both after temperature; 0: no threshold.
    top_k: int32[S]; NO_LIMIT: no threshold.
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
  """Broadcasts [S] to [S, V]."""
  return jnp.broadcast_to(values[:, None], like.shape)


def _ordered(x: jax.Array) -> jax.Array:
  """Maps f32 to int32 in the same order; adjacent floats become adjacent integers. The map is its own inverse."""
  bits = lax.bitcast_convert_type(x, jnp.int32)
  return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _unordered(key: jax.Array) -> jax.Array:
  return lax.bitcast_convert_type(jnp.where(key < 0, key ^ jnp.int32(0x7FFFFFFF), key), jnp.float32)


def find_threshold(z: jax.Array, weights: jax.Array, need: jax.Array, wide: bool) -> jax.Array:
  """Returns f32[S]: the largest t for which the weights of {z >= t} sum to at least `need`, else NEGLIGIBLE.

  As in FlashInfer's sorting-free sampling (https://flashinfer.ai/2025/03/10/sampling.html), every pass reads all of z
  and narrows the range of t. A pass here fixes one digit of t's bits, so the result is exact and the number of passes
  is fixed: 8 of 4 bits, 16 of 2 bits, or 31 of one bit. No pass waits for the host.

  Rounding is harmless: in one order of summation, the sum over more weights is never smaller.

  Args:
    z: f32[S, V], at most 0.
    weights: f32[S, V], not negative.
    need: f32[S].
    wide: True unrolls passes that try 15 values each (3 for a small vocabulary); False loops over passes of one value.
  """
  bits = (4 if z.shape[1] > _SPLIT else 2) if wide else 1
  low = jnp.full(z.shape[0], -_NUM_KEYS, jnp.int32)

  def narrow(low, shift):  # invariant: low <= key of t < low + 2**(bits + shift)
    # low + (digit << shift) may be above 0 or overflow int32; `tried` excludes those.
    tried = [(-low >> shift) >= digit for digit in range(1, 2**bits)]
    keys = [jnp.where(ok, low + (jnp.int32(digit) << shift), 0) for digit, ok in enumerate(tried, 1)]
    masses = [jnp.where(z >= _column(_unordered(key), z), weights, 0.0) for key in keys]
    # A single variadic reduction: XLA would compile a kernel for each of several, and each would read z. XLA:GPU fuses
    # the masses into the reduction only where it splits a row; for smaller vocabularies it writes them out, so a pass
    # tries fewer values there.
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


def sample_tokens(x: jax.Array, inputs: SamplingInputs, wide: bool = False) -> jax.Array:
  """See `api.sample_tokens`.

  Args:
    wide: how to search thresholds; it changes no token. True makes few large passes, for devices where every pass
      costs a launch and a read of the logits. False makes many small passes in a loop that XLA:CPU compiles once.
  """
  temperature = jnp.where(inputs.temperature > 0.0, inputs.temperature, 1.0)
  z = (x - _column(jnp.max(x, axis=1), x)) / _column(temperature, x)
  weights = jnp.exp(z)

  def top_k(least):
    return jnp.maximum(least, find_threshold(z, jnp.ones_like(z), inputs.top_k.astype(jnp.float32), wide))

  def top_p(least):
    share = jnp.where(inputs.top_p < 1.0, inputs.top_p, 2.0)
    left = jnp.where(z >= _column(least, z), weights, 0.0)
    return jnp.maximum(least, find_threshold(z, left, share * jnp.sum(left, axis=1), wide))

  least = jnp.log(inputs.min_p)
  least = lax.cond(jnp.any(inputs.top_k < NO_LIMIT), top_k, lambda least: least, least)
  least = lax.cond(jnp.any(inputs.top_p < 1.0), top_p, lambda least: least, least)
  weights = jnp.where(z >= _column(least, z), weights, 0.0)
  return _invert(weights, jax.vmap(uniform)(inputs.seed, inputs.position))


def uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
  """Returns the random number in [0, 1), f32[] and a multiple of 2**-24, for `position` of a request with `seed`.

  The folded key already holds 64 random bits, so this skips the second hash of jax.random.uniform.
  """
  key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
  bits = lax.shift_right_logical(jax.random.key_data(key)[0], jnp.uint32(8))
  return bits.astype(jnp.float32) * jnp.float32(2**-24)


def _invert(weights: jax.Array, uniform: jax.Array) -> jax.Array:
  """Returns the token at which the cumulative weight passes `uniform` times the total: finds the chunk, then the token.

  The token never has weight 0; rounding could otherwise select one past the last allowed token.
  """
  rows, vocab = weights.shape
  chunks = jnp.pad(weights, ((0, 0), (0, -vocab % _CHUNK))).reshape(rows, -1, _CHUNK)
  line = jnp.arange(rows, dtype=jnp.int32)

  def passes(masses, wanted):  # f32[S, n], f32[S] -> int32[S], f32[S]: the index and the remainder of `wanted`
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
