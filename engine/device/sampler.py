"""Samples tokens from logits on the device, with every parameter a per-row array. May not know models or batches.

A logit row takes these steps, in the order of vLLM's sampler (vllm/v1/sample/sampler.py). Other texts refer to this
list:

1. The mask of an output constraint forbids tokens (-inf).
2. `allowed_token_ids` forbids all others.
3. `min_tokens` forbids the tokens that end the request, unless no other token is allowed.
4. `logit_bias` adds to logits. Steps 2 and 4 add one row of biases before step 3, because sums with -inf commute.
5. Penalties: repetition, then frequency, then presence. They use the sign of the biased logit.
6. The greedy token is the most likely one. For sampling, temperature divides the logits.
7. `min_p` keeps tokens by their share of the largest probability after temperature.
8. `top_k` keeps the most likely of these tokens.
9. `top_p` keeps the most likely of the tokens that 7 and 8 leave, with renormalized probabilities.

Tokens of equal probability at a threshold all stay. Log probabilities are of the model's own distribution, before all
steps.

`lax.cond` on the rows' flags skips work that no row of the step needs, so one program serves every mixture. Branches
return per-row values where possible, because a skipped branch still copies results of the logits' size.

The sampler avoids sorts. Truncation searches thresholds, and sampling inverts the cumulative distribution in two
levels. On an accelerator a tournament finds the most likely tokens, because XLA:GPU sorts for every top_k above 16. On
a CPU, a sort of [64, 32000] takes 180 ms and Gumbel noise 20 ms, a threshold about 10 ms and the inversion 1 ms.

A sequence with drafts has a logit row for each of them and one more, which all sample. A draft is accepted if the
preceding row is accepted and sampled it, so the accepted rows' tokens are those of steps without drafts.

The sampler reports a row with NaN or Inf logits as bad and sets its other values to 0. Sequences never affect each
other.
"""

from collections.abc import Sequence
import dataclasses
import functools
import operator

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from engine.batch import MAX_DRAFTS
from engine.device.model_input import Column, Flag, SamplingRows
from engine.sampling_params import MAX_LOGPROBS, SamplingParams
from pallas_kernels.adjust.api import PROMPT_BIT, AdjustParams, Kind, Memory, adjust_logits
from pallas_kernels.argmax.api import argmax
from pallas_kernels.sampling.api import NO_LIMIT, SamplingInputs, sample_tokens

_FAN = 16  # entries that each entry of the tournament's next level covers
_ADJUSTMENTS = {
  Kind.MASK: Flag.MASK,
  Kind.BIAS: Flag.BIAS,
  Kind.SUPPRESS: Flag.SUPPRESS,
  Kind.PENALTY: Flag.PENALTY,
}
ADJUSTED = functools.reduce(operator.or_, _ADJUSTMENTS.values())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotState:
  """The sampler's state of each slot; the last row belongs to the padding slot.

  Attributes:
    history: int32[slots + 1, V], how often the request generated a token, plus PROMPT_BIT for tokens of the prompt.
      Valid only for requests with penalties.
    bias: f32[slots + 1, V], added to the logits; -inf forbids a token. Valid only for requests with biases.
    mask: int32[slots + 1 + MAX_DRAFT_MASKS, ceil(V / 32)], the tokens that an output constraint allows next: token t is
      bit t % 32 of word t // 32. Valid only for constrained requests; rewritten before each of their sampling steps.
      The lines after the padding slot's belong to no slot: they are the masks after drafts, in the order of logit rows.
  """

  history: jax.Array
  bias: jax.Array
  mask: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
  """Values of the logit rows.

  Attributes:
    tokens: int32[S], the sampled tokens; 0 in bad rows.
    bad: bool[S], the logits held NaN or Inf.
    logprobs: f32[S], of the target, else of the sampled token; 0 if no row needs it.
    top_ids, top_logprobs: int32 and f32[S, num_alternatives(V)], most likely first; 0 if no row needs them.
  """

  tokens: jax.Array
  bad: jax.Array
  logprobs: jax.Array
  top_ids: jax.Array
  top_logprobs: jax.Array

  def pack(self) -> tuple[jax.Array, jax.Array]:
    """Returns int32[3, S]: tokens, bad, bits of logprobs; and int32[2, S, n]: top_ids, bits of top_logprobs."""
    logprobs, top_logprobs = (lax.bitcast_convert_type(each, jnp.int32) for each in (self.logprobs, self.top_logprobs))
    return jnp.stack([self.tokens, self.bad.astype(jnp.int32), logprobs]), jnp.stack([self.top_ids, top_logprobs])


def report_states(states: jax.Array, vocab_size: int) -> tuple[jax.Array, jax.Array]:
  """Returns the packed values of rows of a model without logits: token 0, and whether the state holds NaN or Inf.

  The first numbers of a state are in place of log probabilities, for the trial of --deterministic.

  Args:
    states: f32[S, D], after the final norm.
    vocab_size: decides the number of alternatives.
  """
  number = num_alternatives(vocab_size)
  tokens = jnp.zeros(states.shape[:1], jnp.int32)
  shown = jnp.pad(states[:, :number], ((0, 0), (0, max(0, number - states.shape[1]))))
  bad = ~jnp.isfinite(states).all(axis=-1)
  return Sampled(tokens, bad, shown[:, 0], jnp.zeros(shown.shape, jnp.int32), shown).pack()


def num_alternatives(vocab_size: int) -> int:
  """Returns the number of most likely tokens that a step reports, at most the vocabulary."""
  return min(MAX_LOGPROBS, vocab_size)


def history_row(token_ids: Sequence[int], num_prompt_tokens: int, vocab_size: int) -> np.ndarray:
  """Returns a slot's row of `SlotState.history`, int32[V] on the host, from all its tokens."""
  row = np.bincount(np.asarray(token_ids[num_prompt_tokens:], np.int64), minlength=vocab_size).astype(np.int32)
  row[np.asarray(token_ids[:num_prompt_tokens], np.int64)] |= PROMPT_BIT
  return row


def bias_row(params: SamplingParams, vocab_size: int) -> np.ndarray:
  """Returns a slot's row of `SlotState.bias`, f32[V] on the host."""
  row = np.zeros(vocab_size, np.float32)
  if params.allowed_token_ids is not None:
    row[:] = -np.inf
    row[list(params.allowed_token_ids)] = 0.0
  for token, bias in params.logit_bias:
    row[token] += bias
  return row


def _column(values: jax.Array, like: jax.Array) -> jax.Array:
  """Broadcasts [S] to [S, V]."""
  return jnp.broadcast_to(values[:, None], like.shape)


def _shift(values: jax.Array, count: int) -> jax.Array:
  """Returns the value `count` rows before each row, [S]; 0 before the first row. A negative count: after it."""
  size = values.shape[0]
  if count < 0:
    return jnp.pad(values, (0, -count))[-count:]
  return jnp.pad(values, (count, 0))[:size]


def preceding_drafts(rows: SamplingRows) -> jax.Array:
  """Returns int32[S, MAX_DRAFTS]: the drafts of each row's sequence up to its own token, latest first; -1 pads."""
  back = jnp.arange(MAX_DRAFTS, dtype=jnp.int32)
  tokens = jnp.stack([_shift(rows[Column.DRAFT], count) for count in range(MAX_DRAFTS)], axis=1)
  return jnp.where(back[None, :] < rows[Column.NUM_DRAFTS][:, None], tokens, -1)


def adjust_rows(
  x: jax.Array,
  rows: SamplingRows,
  drafts: jax.Array,
  state: SlotState,
  num_rows: jax.Array | None,
  by: str,
  suppresses: bool = True,
) -> jax.Array:
  """Applies all steps before the temperature; without `suppresses`, not step 3.

  Args: drafts: int32[S, d], as in adjust_logits; the columns of x that penalties count besides the history.
  """
  kinds = [
    jnp.where(rows.has(flag), jnp.int32(kind), 0)
    for kind, flag in _ADJUSTMENTS.items()
    if suppresses or flag != Flag.SUPPRESS
  ]
  params = AdjustParams(
    kinds=functools.reduce(operator.or_, kinds),
    slot=rows[Column.SLOT],
    mask=rows[Column.MASK],
    repetition=rows[Column.REPETITION],
    frequency=rows[Column.FREQUENCY],
    presence=rows[Column.PRESENCE],
  )
  return adjust_logits(x, params, rows.stop_ids, drafts, Memory(state.history, state.bias, state.mask), num_rows, by)


def sample_random_rows(
  x: jax.Array, rows: SamplingRows, best: jax.Array, wide: bool, num_rows: jax.Array | None, by: str
) -> jax.Array:
  """Samples a token for each RANDOM row from the truncated distribution; returns `best` for the others."""
  random = rows.has(Flag.RANDOM)
  inputs = SamplingInputs(
    temperature=jnp.where(random, rows[Column.TEMPERATURE], 0.0),
    top_p=jnp.where(rows.has(Flag.TOP_P), rows[Column.TOP_P], 2.0),
    min_p=rows[Column.MIN_P],
    top_k=jnp.where(rows.has(Flag.TOP_K), rows[Column.TOP_K], NO_LIMIT),
    seed=rows[Column.SEED],
    position=rows[Column.POSITION],
  )
  return jnp.where(random, sample_tokens(x, inputs, num_rows, by, wide), best)


def largest(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """Returns the `count` largest values and indices of each row, f32 and int32[S, count], ordered like lax.top_k.

  A tournament: an entry of a level is the largest of _FAN entries below it. On the way down, the largest of a level lie
  below the largest of the level above; each is ranked by the number of entries before it.

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
  """Returns logprobs, top_ids and top_logprobs of `Sampled`, as far as rows need them."""
  count = num_alternatives(logits.shape[1])
  line = jnp.arange(logits.shape[0], dtype=jnp.int32)
  norm = jax.nn.logsumexp(logits, axis=1)
  own = logits[line, jnp.where(rows[Column.TARGET] < 0, tokens, rows[Column.TARGET])] - norm

  def top():
    values, ids = largest(logits, count) if wide else lax.top_k(logits, count)
    return finish_top(values, ids, norm, bad)

  nothing = no_logprobs(*logits.shape)
  wanted = jnp.any(rows.has(Flag.TOP_LOGPROBS))
  return jnp.where(bad, 0.0, own), *lax.cond(wanted, top, lambda: nothing[1:])


def finish_top(values: jax.Array, ids: jax.Array, norm: jax.Array, bad: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns top_ids and top_logprobs of `Sampled` from the largest logits, f32[S, n]; norm, bad: f32 and bool[S]."""
  values = jnp.where(_column(bad, values), 0.0, values - _column(norm, values))
  return jnp.where(_column(bad, ids), 0, ids), values


def no_logprobs(num_rows: int, vocab_size: int) -> tuple[jax.Array, ...]:
  """Returns logprobs, top_ids and top_logprobs of `Sampled` where no row needs them."""
  shape = (num_rows, num_alternatives(vocab_size))
  return jnp.zeros(num_rows, jnp.float32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)


def sample(
  logits: jax.Array,
  rows: SamplingRows,
  state: SlotState,
  wide: bool = False,
  num_rows: jax.Array | None = None,
  argmax_by: str = "reference",
  sampling_by: str = "reference",
  adjust_by: str = "reference",
) -> Sampled:
  """Samples a token for every logit row.

  Args:
    logits: f32[S, V], of the model.
    rows: sampling parameters.
    state: state of the slots before this step.
    wide: how to search thresholds; it changes no token. True makes few large passes, for devices where every pass costs
      a launch and a read of the logits. False makes many small passes in a loop. True also finds the most likely tokens
      in a tournament, because only XLA:CPU has a top_k that does not sort.
    num_rows: int32[1], the number of leading rows in use; None: all. Results of the other rows are arbitrary.
    argmax_by, sampling_by, adjust_by: implementations of pallas_kernels/argmax, pallas_kernels/sampling and
      pallas_kernels/adjust.
  """
  likeliest, finite = argmax(logits, num_rows, argmax_by)
  bad = ~finite

  def adjusted():
    x = adjust_rows(logits, rows, preceding_drafts(rows), state, num_rows, adjust_by)
    return x, argmax(x, num_rows, argmax_by)[0]

  def chosen():
    x, best = lax.cond(jnp.any(rows.has(ADJUSTED)), adjusted, lambda: (logits, likeliest))
    random = jnp.any(rows.has(Flag.RANDOM))
    return lax.cond(random, lambda: sample_random_rows(x, rows, best, wide, num_rows, sampling_by), lambda: best)

  # Around both branches, because an entirely greedy step would otherwise copy the logits for the sampling branch.
  tokens = lax.cond(jnp.any(rows.has(ADJUSTED | Flag.RANDOM)), chosen, lambda: likeliest)
  tokens = jnp.where(bad, 0, tokens)
  logprobs = lax.cond(
    jnp.any(rows.has(Flag.LOGPROB)),
    lambda: _logprobs(logits, rows, tokens, bad, wide),
    lambda: no_logprobs(*logits.shape),
  )
  return Sampled(tokens, bad, *logprobs)


def accept_drafts(rows: SamplingRows, sampled: Sampled) -> tuple[jax.Array, jax.Array]:
  """Returns two bool[S]: the accepted rows, whose tokens count, and the last one of these in each sequence.

  A row is accepted if no row before it in its sequence rejects the next row's draft.
  """
  number = rows[Column.NUM_DRAFTS]
  follows = _shift(number, -1) > 0  # the next row is of the same sequence
  rejects = follows & ((sampled.tokens != _shift(rows[Column.DRAFT], -1)) | sampled.bad)
  line = jnp.arange(number.shape[0], dtype=jnp.int32)
  # All pairs of rows, because the few comparisons are one kernel: shifts of computed values would be one each.
  before = (line[None, :] < line[:, None]) & (line[None, :] >= (line - number)[:, None])
  accepted = ~jnp.any(before & rejects[None, :], axis=1)
  return accepted, accepted & (rejects | ~follows)


def remember(state: SlotState, rows: SamplingRows, tokens: jax.Array, accepted: jax.Array) -> SlotState:
  """Counts the new tokens of rows with penalties; other rows count in the padding slot, which is never read.

  Args: accepted: see accept_drafts.
  """
  padding = state.history.shape[0] - 1
  slots = jnp.where(rows.has(Flag.PENALTY) & accepted, rows[Column.SLOT], padding)
  return dataclasses.replace(state, history=state.history.at[slots, tokens].add(1))
