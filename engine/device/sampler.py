"""From logits to tokens, on the device, every parameter a per-row array. Pure; knows no model and no batch.

Order, as in vLLM: penalties, then logit_bias and allowed ids, then the mask of an output constraint, then min_tokens
(which yields where the constraint leaves nothing but an ending); the greedy token is the most likely of what is left.
For a draw: temperature, then top_k, then top_p on what top_k left (renormalised), then min_p. Tokens of equal
probability at a limit are all kept. Log probabilities are of the model's own distribution, before all of this.

Work that no row of the step asks for is skipped by `lax.cond` on the rows' flags, so one program serves every mixture.
Truncation searches a threshold by bisection and a draw inverts the cumulative distribution in two levels: on a CPU a
sort of [64, 32000] costs 180 ms and Gumbel noise 20 ms, where these take about 10 ms and 1 ms.

A row whose logits hold NaN or Inf is reported as bad; rows never touch each other.
"""

from collections.abc import Callable, Sequence
import dataclasses

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from engine.device.model_input import Flag, SamplingRows
from engine.sampling_params import MAX_LOGPROBS, SamplingParams

_PROMPT_BIT = 1 << 30  # of a history entry: the token is in the prompt; the bits below count outputs
_HUGE = 1e30  # a penalty may overflow a logit; this keeps it finite and on its side
_NEGLIGIBLE = -110.0  # exp of this is 0 in f32
_CHUNK = 128  # tokens of the first level of a draw


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotState:
  """What the sampler remembers of each slot, one row more than there are slots: the last is the padding slot's.

  Attributes:
    history: int32[slots + 1, V], how often a token was generated, plus _PROMPT_BIT where the prompt holds it. Only kept
      for requests with penalties.
    bias: f32[slots + 1, V], added to the logits; -inf where a token is not allowed. Only for requests that ask.
    mask: int32[slots + 1, ceil(V / 32)], the tokens that an output constraint allows next: token t is bit t % 32 of
      word t // 32. Only for constrained requests, and written anew before each of their draws.
  """

  history: jax.Array
  bias: jax.Array
  mask: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
  """Values of the logit rows.

  Attributes:
    tokens: int32[S], drawn; 0 in bad rows.
    bad: bool[S], the logits held NaN or Inf.
    logprobs: f32[S], of the target, or of the drawn token where there is none; 0 unless some row wants it.
    top_ids, top_logprobs: int32 and f32[S, 20], most likely first; 0 unless some row wants them.
  """

  tokens: jax.Array
  bad: jax.Array
  logprobs: jax.Array
  top_ids: jax.Array
  top_logprobs: jax.Array


def history_row(token_ids: Sequence[int], num_prompt_tokens: int, vocab_size: int) -> np.ndarray:
  """A slot's line of `SlotState.history` from all its tokens, on the host: int32[V]."""
  row = np.bincount(np.asarray(token_ids[num_prompt_tokens:], np.int64), minlength=vocab_size).astype(np.int32)
  row[np.asarray(token_ids[:num_prompt_tokens], np.int64)] |= _PROMPT_BIT
  return row


def bias_row(params: SamplingParams, vocab_size: int) -> np.ndarray:
  """A slot's line of `SlotState.bias`, on the host: f32[V]."""
  row = np.zeros(vocab_size, np.float32)
  if params.allowed_token_ids is not None:
    row[:] = -np.inf
    row[list(params.allowed_token_ids)] = 0.0
  for token, bias in params.logit_bias:
    row[token] += bias
  return row


def _where_any(rows: SamplingRows, flag: Flag, change: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
  """`change(x)` in the rows that carry `flag`; nothing is computed where no row does."""
  chosen = rows.has(flag)
  return lax.cond(jnp.any(chosen), lambda x: jnp.where(_column(chosen, x), change(x), x), lambda x: x, x)


def _column(values: jax.Array, like: jax.Array) -> jax.Array:
  """[S] as [S, V]."""
  return jnp.broadcast_to(values[:, None], like.shape)


def _argmax(x: jax.Array) -> jax.Array:  # f32[S, V] -> int32[S], the lowest index of the largest
  """Two plain reductions: XLA's variadic argmax takes 8 times as long on a CPU."""
  index = lax.broadcasted_iota(jnp.int32, x.shape, 1)
  return jnp.min(jnp.where(x == _column(jnp.max(x, axis=1), x), index, x.shape[1] - 1), axis=1)


def _penalise(x: jax.Array, rows: SamplingRows, history: jax.Array) -> jax.Array:
  """Repetition (arXiv:1909.05858) over prompt and outputs, then frequency and presence over outputs."""
  past = history[rows.slots]
  count = past & jnp.int32(_PROMPT_BIT - 1)
  repetition = _column(rows.repetition, x)
  x = jnp.where(past != 0, jnp.where(x > 0.0, x / repetition, x * repetition), x)
  x = x - _column(rows.frequency, x) * count.astype(jnp.float32)
  x = jnp.where(count > 0, x - _column(rows.presence, x), x)
  return jnp.clip(x, -_HUGE, _HUGE)


def _only_masked(x: jax.Array, words: jax.Array) -> jax.Array:  # f32[S, V], int32[S, W] -> f32[S, V]
  """Forbids the tokens whose bit is 0."""
  bits = words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None, :]
  allowed = (bits & jnp.int32(1)).reshape(x.shape[0], -1)[:, : x.shape[1]]
  return jnp.where(allowed != 0, x, -jnp.inf)


def _suppress(x: jax.Array, rows: SamplingRows) -> jax.Array:
  """Forbids the ids that would end the request. Where nothing else is allowed the request may end early."""
  line = jnp.arange(x.shape[0], dtype=jnp.int32)
  ids = jnp.where(rows.stop_ids < 0, x.shape[1], rows.stop_ids)  # out of range: dropped
  masked = x.at[line[:, None], ids].set(-jnp.inf, mode="drop")
  return jnp.where(_column(jnp.max(masked, axis=1) == -jnp.inf, x), x, masked)


def _ordered(x: jax.Array) -> jax.Array:
  """f32 -> int32 in the same order, every step of one a step to the next float (and back: it is its own inverse)."""
  bits = lax.bitcast_convert_type(x, jnp.int32)
  return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _unordered(key: jax.Array) -> jax.Array:
  return lax.bitcast_convert_type(jnp.where(key < 0, key ^ jnp.int32(0x7FFFFFFF), key), jnp.float32)


def _threshold(z: jax.Array, weights: jax.Array, need: jax.Array) -> jax.Array:
  """The largest t for which the weights of {z >= t} reach `need`, or _NEGLIGIBLE; exact, by bisection on the bits.

  Args:
    z: f32[S, V], at most 0.
    weights: f32[S, V], not negative.
    need: f32[S].
  """
  rows = z.shape[0]
  low = jnp.broadcast_to(_ordered(jnp.float32(_NEGLIGIBLE)), (rows,))
  high = jnp.zeros(rows, jnp.int32)  # the key of 0.0

  def halve(_, bounds):
    low, high = bounds
    middle = low + ((high - low + 1) >> 1)
    reached = jnp.sum(jnp.where(z >= _column(_unordered(middle), z), weights, 0.0), axis=1) >= need
    return jnp.where(reached, middle, low), jnp.where(reached, high, middle - 1)

  low, _ = lax.fori_loop(0, 31, halve, (low, high))  # the keys of [-110, 0] span less than 2**31
  return _unordered(low)


def _draw(x: jax.Array, rows: SamplingRows, best: jax.Array) -> jax.Array:
  """A token of each RANDOM row from the tempered and truncated distribution; `best` in the others."""
  random = rows.has(Flag.RANDOM)
  temperature = jnp.where(random, rows.temperature, 1.0)
  z = (x - _column(jnp.max(x, axis=1), x)) / _column(temperature, x)
  weights = jnp.exp(z)

  def top_k(weights):
    k = jnp.where(rows.has(Flag.TOP_K), rows.top_k, 2**30).astype(jnp.float32)
    return jnp.where(z >= _column(_threshold(z, jnp.ones_like(z), k), z), weights, 0.0)

  def top_p(weights):
    share = jnp.where(rows.has(Flag.TOP_P), rows.top_p, 2.0)
    return jnp.where(z >= _column(_threshold(z, weights, share * jnp.sum(weights, axis=1)), z), weights, 0.0)

  weights = lax.cond(jnp.any(rows.has(Flag.TOP_K)), top_k, lambda weights: weights, weights)
  weights = lax.cond(jnp.any(rows.has(Flag.TOP_P)), top_p, lambda weights: weights, weights)
  weights = jnp.where(z >= _column(jnp.log(rows.min_p), z), weights, 0.0)

  token = _invert(weights, jax.vmap(uniform)(rows.seeds, rows.positions))
  return jnp.where(random, token, best)


def uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
  """The number in [0, 1) that decides the token at `position` (f32[], a multiple of 2**-24) of a request with `seed`.

  The folded key is itself 64 random bits; to hash it once more, as jax.random.uniform does, only costs.
  """
  key = jax.random.fold_in(jax.random.key(seed), position)
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


def sample(logits: jax.Array, rows: SamplingRows, state: SlotState) -> Sampled:
  """Draws a token for every logit row.

  Args:
    logits: f32[S, V], of the model.
    rows: parameters.
    state: of the slots, before this step.
  """
  bad = ~jnp.all(jnp.isfinite(logits), axis=1)
  logits = jnp.where(_column(bad, logits), 0.0, logits)
  x = _where_any(rows, Flag.PENALTY, lambda x: _penalise(x, rows, state.history), logits)
  x = _where_any(rows, Flag.BIAS, lambda x: x + state.bias[rows.slots], x)
  x = _where_any(rows, Flag.MASK, lambda x: _only_masked(x, state.mask[rows.slots]), x)
  x = _where_any(rows, Flag.SUPPRESS, lambda x: _suppress(x, rows), x)
  best = _argmax(x)
  tokens = lax.cond(jnp.any(rows.has(Flag.RANDOM)), lambda: _draw(x, rows, best), lambda: best)
  tokens = jnp.where(bad, 0, tokens)

  count = min(MAX_LOGPROBS, logits.shape[1])
  shape = (logits.shape[0], MAX_LOGPROBS)

  def own():
    line = jnp.arange(logits.shape[0], dtype=jnp.int32)
    token = jnp.where(rows.targets < 0, tokens, rows.targets)
    norm = jax.nn.logsumexp(logits, axis=1)
    return logits[line, token] - norm, norm

  def top(norm):
    values, ids = lax.top_k(logits, count)
    pad = ((0, 0), (0, MAX_LOGPROBS - count))
    return jnp.pad(ids.astype(jnp.int32), pad), jnp.pad(values - _column(norm, values), pad)

  nothing = jnp.zeros(logits.shape[0], jnp.float32)
  logprobs, norm = lax.cond(jnp.any(rows.has(Flag.LOGPROB)), own, lambda: (nothing, nothing))
  top_ids, top_logprobs = lax.cond(
    jnp.any(rows.has(Flag.TOP_LOGPROBS)),
    top,
    lambda _: (jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)),
    norm,
  )
  return Sampled(tokens, bad, logprobs, top_ids, top_logprobs)


def remember(state: SlotState, rows: SamplingRows, tokens: jax.Array) -> SlotState:
  """Counts the new tokens of rows with penalties; every other row counts in the padding slot, which nobody reads."""
  padding = state.history.shape[0] - 1
  slots = jnp.where(rows.has(Flag.PENALTY), rows.slots, padding)
  return dataclasses.replace(state, history=state.history.at[slots, tokens].add(1))
