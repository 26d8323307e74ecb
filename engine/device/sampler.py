"""From logits to tokens, on the device, every parameter a per-row array. Pure; knows no model and no batch.

A logit row goes through these steps, in the order of vLLM's sampler (vllm/v1/sample/sampler.py); other texts refer to
this list:

1. The mask of an output constraint forbids tokens (-inf).
2. `allowed_token_ids` forbids all others.
3. `min_tokens` forbids the tokens that end the request; where nothing else is left it gives way.
4. `logit_bias` is added. Steps 2 and 4 are one line of numbers, added before step 3: a sum with -inf has no order.
5. Penalties: repetition, then frequency, then presence. They see the sign that a bias gave a logit.
6. The greedy token is the most likely one. For a draw, temperature divides the logits.
7. `min_p` keeps tokens by their share of the most likely one's probability, as tempered.
8. `top_k` keeps the most likely of these.
9. `top_p` keeps the most likely of what 7 and 8 left, whose probabilities are renormalised.

Tokens of equal probability at a limit are all kept. Log probabilities are of the model's own distribution, before all
of this.

Work that no row of the step asks for is skipped by `lax.cond` on the rows' flags, so one program serves every mixture.
A branch hands out numbers a row wherever it can: what it hands out of the logits' size is copied where it is skipped.
Truncation searches a threshold, a draw inverts the cumulative distribution in two levels, and on an accelerator the
most likely tokens are found in a tournament, so that nothing there is sorted: on a CPU a sort of [64, 32000] costs
180 ms and Gumbel noise 20 ms, where a threshold and a draw take about 10 ms and 1 ms; and XLA:GPU sorts for every top_k
of more than 16.

A row whose logits hold NaN or Inf is reported as bad, and its other values are 0; rows never touch each other.
"""

from collections.abc import Sequence
import dataclasses
import functools
import operator

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from engine.device.model_input import Column, Flag, SamplingRows
from engine.sampling_params import MAX_LOGPROBS, SamplingParams
from pallas_kernels.adjust.api import PROMPT_BIT, Kind, Memory, adjust
from pallas_kernels.adjust.api import AdjustParams as Adjustments
from pallas_kernels.argmax.api import argmax
from pallas_kernels.draw.api import NO_LIMIT, DrawParams, draw

_FAN = 16  # of the tournament: each is the largest of so many
_ADJUSTMENTS = {
  Kind.MASK: Flag.MASK,
  Kind.BIAS: Flag.BIAS,
  Kind.SUPPRESS: Flag.SUPPRESS,
  Kind.PENALTY: Flag.PENALTY,
}
_ADJUSTED = functools.reduce(operator.or_, _ADJUSTMENTS.values())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotState:
  """What the sampler remembers of each slot, one row more than there are slots: the last is the padding slot's.

  Attributes:
    history: int32[slots + 1, V], how often a token was generated, plus PROMPT_BIT where the prompt holds it. Only kept
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
    top_ids, top_logprobs: int32 and f32[S, num_alternatives(V)], most likely first; 0 unless some row wants them.
  """

  tokens: jax.Array
  bad: jax.Array
  logprobs: jax.Array
  top_ids: jax.Array
  top_logprobs: jax.Array


def num_alternatives(vocab_size: int) -> int:
  """How many of the most likely tokens a step reports: no more than the vocabulary has."""
  return min(MAX_LOGPROBS, vocab_size)


def history_row(token_ids: Sequence[int], num_prompt_tokens: int, vocab_size: int) -> np.ndarray:
  """A slot's line of `SlotState.history` from all its tokens, on the host: int32[V]."""
  row = np.bincount(np.asarray(token_ids[num_prompt_tokens:], np.int64), minlength=vocab_size).astype(np.int32)
  row[np.asarray(token_ids[:num_prompt_tokens], np.int64)] |= PROMPT_BIT
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


def _column(values: jax.Array, like: jax.Array) -> jax.Array:
  """[S] as [S, V]."""
  return jnp.broadcast_to(values[:, None], like.shape)


def _adjusted(x: jax.Array, rows: SamplingRows, state: SlotState, num_rows: jax.Array | None, by: str) -> jax.Array:
  """Everything that comes before the temperature."""
  kinds = [jnp.where(rows.has(flag), jnp.int32(kind), 0) for kind, flag in _ADJUSTMENTS.items()]
  asked = Adjustments(
    kinds=functools.reduce(operator.or_, kinds),
    slot=rows[Column.SLOT],
    repetition=rows[Column.REPETITION],
    frequency=rows[Column.FREQUENCY],
    presence=rows[Column.PRESENCE],
  )
  return adjust(x, asked, rows.stop_ids, Memory(state.history, state.bias, state.mask), num_rows, by)


def _draw(
  x: jax.Array, rows: SamplingRows, best: jax.Array, wide: bool, num_rows: jax.Array | None, by: str
) -> jax.Array:
  """A token of each RANDOM row from the tempered and truncated distribution; `best` in the others."""
  random = rows.has(Flag.RANDOM)
  asked = DrawParams(
    temperature=jnp.where(random, rows[Column.TEMPERATURE], 0.0),
    top_p=jnp.where(rows.has(Flag.TOP_P), rows[Column.TOP_P], 2.0),
    min_p=rows[Column.MIN_P],
    top_k=jnp.where(rows.has(Flag.TOP_K), rows[Column.TOP_K], NO_LIMIT),
    seed=rows[Column.SEED],
    position=rows[Column.POSITION],
  )
  return jnp.where(random, draw(x, asked, num_rows, by, wide), best)


def _largest(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """The `count` largest of each line, in descending order, of equals the first: f32 and int32[S, count], as lax.top_k.

  A tournament: level by level each is the largest of _FAN below it. Going down again, the largest of a level lie below
  the largest of the level above, and are put in order by how many others each has before it.

  Args:
    x: f32[S, V], finite; V at least `count`.
  """
  levels = [x]
  while levels[-1].shape[1] > count * _FAN:
    width = levels[-1].shape[1]
    padded = jnp.pad(levels[-1], ((0, 0), (0, -width % _FAN)), constant_values=-jnp.inf)
    levels.append(padded.reshape(x.shape[0], -1, _FAN).max(axis=2))
  values = levels[-1]
  ids = lax.broadcasted_iota(jnp.int32, values.shape, 1)
  for level in reversed(levels):
    if level is not levels[-1]:
      ids = (ids[:, :, None] * _FAN + jnp.arange(_FAN, dtype=jnp.int32)[None, None, :]).reshape(x.shape[0], -1)
      inside = ids < level.shape[1]
      values = jnp.take_along_axis(level, jnp.where(inside, ids, 0), axis=1)
      values = jnp.where(inside, values, -jnp.inf)
    mine, other = (jnp.expand_dims(values, axis) for axis in (2, 1))
    before = (other > mine) | ((other == mine) & (ids[:, None, :] < ids[:, :, None]))
    rank = jnp.sum(before.astype(jnp.int32), axis=2)
    chosen = rank[:, None, :] == jnp.arange(count, dtype=jnp.int32)[None, :, None]
    values = jnp.max(jnp.where(chosen, values[:, None, :], -jnp.inf), axis=2)
    ids = jnp.max(jnp.where(chosen, ids[:, None, :], 0), axis=2)
  return values, ids


def _logprobs(
  logits: jax.Array, rows: SamplingRows, tokens: jax.Array, bad: jax.Array, wide: bool
) -> tuple[jax.Array, ...]:
  """What `Sampled` says of probabilities, where some row wants it: logprobs, top_ids, top_logprobs."""
  count = num_alternatives(logits.shape[1])
  line = jnp.arange(logits.shape[0], dtype=jnp.int32)
  norm = jax.nn.logsumexp(logits, axis=1)
  own = logits[line, jnp.where(rows[Column.TARGET] < 0, tokens, rows[Column.TARGET])] - norm

  def top():
    values, ids = _largest(logits, count) if wide else lax.top_k(logits, count)
    values = jnp.where(_column(bad, values), 0.0, values - _column(norm, values))
    return jnp.where(_column(bad, ids), 0, ids), values

  nothing = _no_logprobs(logits)
  wanted = jnp.any(rows.has(Flag.TOP_LOGPROBS))
  return jnp.where(bad, 0.0, own), *lax.cond(wanted, top, lambda: nothing[1:])


def _no_logprobs(logits: jax.Array) -> tuple[jax.Array, ...]:
  num_rows, vocab_size = logits.shape
  shape = (num_rows, num_alternatives(vocab_size))
  return jnp.zeros(num_rows, jnp.float32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)


def sample(
  logits: jax.Array,
  rows: SamplingRows,
  state: SlotState,
  wide: bool = False,
  num_rows: jax.Array | None = None,
  argmax_by: str = "reference",
  draw_by: str = "reference",
  adjust_by: str = "reference",
) -> Sampled:
  """Draws a token for every logit row.

  Args:
    logits: f32[S, V], of the model.
    rows: parameters.
    state: of the slots, before this step.
    wide: how a threshold is searched, which changes no token: in few passes that each do much, for devices on which a
      pass costs its launch and its reading; or in many that do little, each of which XLA:CPU compiles once. And whether
      the most likely tokens are found in a tournament, since only XLA:CPU has a top_k that does not sort.
    num_rows: int32[1], of the rows how many are in use, those in front; None: all. What comes out for the others means
      nothing.
    argmax_by, draw_by, adjust_by: implementations (pallas_kernels/argmax, pallas_kernels/draw, pallas_kernels/adjust).
  """
  likeliest, finite = argmax(logits, num_rows, argmax_by)
  bad = ~finite

  def adjusted():
    x = _adjusted(logits, rows, state, num_rows, adjust_by)
    return x, argmax(x, num_rows, argmax_by)[0]

  def chosen():
    x, best = lax.cond(jnp.any(rows.has(_ADJUSTED)), adjusted, lambda: (logits, likeliest))
    return lax.cond(jnp.any(rows.has(Flag.RANDOM)), lambda: _draw(x, rows, best, wide, num_rows, draw_by), lambda: best)

  # Around both, since a step that is greedy throughout would else copy the logits on their way to a draw.
  tokens = lax.cond(jnp.any(rows.has(_ADJUSTED | Flag.RANDOM)), chosen, lambda: likeliest)
  tokens = jnp.where(bad, 0, tokens)
  logprobs = lax.cond(
    jnp.any(rows.has(Flag.LOGPROB)),
    lambda: _logprobs(logits, rows, tokens, bad, wide),
    lambda: _no_logprobs(logits),
  )
  return Sampled(tokens, bad, *logprobs)


def remember(state: SlotState, rows: SamplingRows, tokens: jax.Array) -> SlotState:
  """Counts the new tokens of rows with penalties; every other row counts in the padding slot, which nobody reads."""
  padding = state.history.shape[0] - 1
  slots = jnp.where(rows.has(Flag.PENALTY), rows[Column.SLOT], padding)
  return dataclasses.replace(state, history=state.history.at[slots, tokens].add(1))
