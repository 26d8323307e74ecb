"""Compares every sampling parameter with a plain numpy sampler, and tests that rows are independent."""

import dataclasses
import functools

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.batch import Admission, Batch
from engine.device import sampler
from engine.device.model_input import unpack
from engine.device.sampler import SlotState
from engine.device.step_packer import Packer
from engine.sampling_params import SamplingParams
from engine.shapes import StepShape
from pallas_kernels import native
from pallas_kernels.sampling import reference
from tests import numpy_sampler

V, SLOTS, EOS = 300, 7, (3, 4)  # V is no multiple of a chunk
SHAPE = StepShape(8, 8, 8)
KERNELS = ("argmax", "sampling", "adjust")


@functools.partial(jax.jit, static_argnames="wide", compiler_options={"xla_backend_optimization_level": 1})
def run(logits, packed, history, bias, mask, wide=False):
  inputs = unpack(Packer(SLOTS, 32, 4, EOS).layout(SHAPE), packed)
  rows, state = inputs.sampling, SlotState(history, bias, mask)
  kernels = ("reference",) * 3 if wide else [native.choose_implementation(name, "cpu") for name in KERNELS]
  sampled = sampler.sample(logits, rows, state, wide, inputs.num_logit_rows, *kernels)
  accepted, _ = sampler.accept_drafts(rows, sampled)
  return sampled, sampler.remember(state, rows, sampled.tokens, accepted).history


@functools.partial(jax.jit, static_argnames="by", compiler_options={"xla_backend_optimization_level": 1})
def adjusted(logits, packed, history, bias, mask, by):
  inputs = unpack(Packer(SLOTS, 32, 4, EOS).layout(SHAPE), packed)
  rows, state = inputs.sampling, SlotState(history, bias, mask)
  return sampler.adjust_rows(logits, rows, sampler.preceding_drafts(rows), state, inputs.num_logit_rows, by)


@dataclasses.dataclass
class Row:
  """One running request."""

  params: SamplingParams
  prompt: tuple[int, ...] = (5, 6, 7)
  outputs: tuple[int, ...] = (8, 8, 9)
  seed: int = 0
  slot: int | None = None
  allowed: tuple[int, ...] | None = None  # by an output constraint


def packed_step(rows: list[Row], logits: np.ndarray):
  """Returns the arguments of `run`, after admission and packing as in serving, and the rows' slots."""
  packer = Packer(SLOTS, 32, 4, EOS)
  history, bias = np.zeros((SLOTS + 1, V), np.int32), np.full((SLOTS + 1, V), np.nan, np.float32)
  mask = np.zeros((SLOTS + 1, -(-V // 32)), np.int32)  # forbids every token by default
  slots = tuple(index if row.slot is None else row.slot for index, row in enumerate(rows))
  for slot, row in zip(slots, rows, strict=True):
    tokens = row.prompt + row.outputs
    row.params.validate(V)
    constrained = row.allowed is not None
    packer.admit(Admission(slot, tokens, len(row.prompt), (1, 2, 3), row.params, row.seed, constrained))
    if row.allowed is not None:
      bits = sum(1 << token for token in row.allowed)
      mask[slot] = np.frombuffer(bits.to_bytes(4 * mask.shape[1], "little"), "<i4")
    history[slot] = sampler.history_row(tokens, len(row.prompt), V)
    bias[slot] = sampler.bias_row(row.params, V)
  ones = (1,) * len(rows)
  batch = Batch(
    0,
    SHAPE,
    tuple(map(str, slots)),
    slots,
    tuple(len(row.prompt + row.outputs) - 1 for row in rows),
    ones,
    ones,
    (True,) * len(rows),
    ((),) * len(rows),
  )
  packed, _ = packer.pack(batch, packer.layout(SHAPE))
  padded = np.zeros((SHAPE.rows, V), np.float32)
  padded[: len(rows)] = logits
  return (padded, packed, history, bias, mask), slots


def sample_rows(rows: list[Row], logits: np.ndarray, wide: bool = False):
  """Samples one token a row; returns the tokens, the change of the history, and the rows' slots."""
  arguments, slots = packed_step(rows, logits)
  sampled, after = run(*arguments, wide)
  history = arguments[2]
  return jax.tree.map(lambda x: np.asarray(x)[: len(rows)], sampled), np.asarray(after) - history, slots


def processed(row: Row, logits: np.ndarray) -> np.ndarray:
  """Returns the adjusted logits, f64[V]; the greedy token is their largest."""
  return numpy_sampler.adjust(logits, row.params, row.prompt, row.outputs, EOS, row.allowed)


def distribution(row: Row, logits: np.ndarray) -> np.ndarray:
  """Returns the unnormalized sampling weights, f64[V]."""
  params = row.params
  return numpy_sampler.truncate(processed(row, logits), params.temperature, params.min_p, params.top_k, params.top_p)


def uniform(row: Row) -> float:
  key = jax.random.fold_in(jax.random.key(np.uint32(row.seed)), len(row.prompt + row.outputs))
  return (int(jax.random.key_data(key)[0]) >> 8) / 2**24


RANDOM = [
  {},
  {"temperature": 0.3},
  {"temperature": 40.0},
  {"top_k": 1},
  {"top_k": 5},
  {"top_k": 299},
  {"top_k": 10**6},
  {"top_p": 1e-6},
  {"top_p": 0.3},
  {"top_p": 0.95},
  {"min_p": 0.05},
  {"min_p": 1.0},
  {"top_k": 20, "top_p": 0.7},
  {"top_k": 20, "top_p": 0.7, "min_p": 0.2, "temperature": 1.7},
  {"allowed_token_ids": (7, 70, 299)},
  {"allowed_token_ids": tuple(range(50)), "top_k": 100, "top_p": 0.9},
  {"logit_bias": ((11, 4.0), (12, -100.0))},
  {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
  {"repetition_penalty": 0.5},
  {"min_tokens": 4, "stop_token_ids": (10, 11)},
  {"min_tokens": 3, "stop_token_ids": (10, 11)},
]


@pytest.mark.parametrize("choice", RANDOM, ids=str)
def test_draw_is_the_inverse_of_the_cumulative_distribution(choice):
  rng = np.random.default_rng(len(str(choice)))
  for _ in range(8):
    rows = [Row(SamplingParams(**choice), seed=int(seed)) for seed in rng.integers(2**32, size=7)]
    logits = (rng.normal(size=(7, V)) * 3).astype(np.float32)
    logits[:, list(EOS)] += 4.0  # min_tokens must matter
    sampled, _, _ = sample_rows(rows, logits)
    for row, line, token in zip(rows, logits, sampled.tokens, strict=True):
      numpy_sampler.check_sample(distribution(row, line), uniform(row), token)


@pytest.mark.parametrize("choice", RANDOM, ids=str)
def test_greedy_takes_the_most_likely_of_what_is_left(choice):
  greedy = {"temperature": 0.0} | {name: value for name, value in choice.items() if name != "temperature"}
  rng = np.random.default_rng(1)
  rows = [Row(SamplingParams(**greedy), outputs=(8, 8, 9, int(token))) for token in rng.integers(V, size=7)]
  logits = rng.normal(size=(7, V)).astype(np.float32) * 3
  logits[:, 8] = logits.max() + 0.5  # penalties must matter
  logits[:, 4] = logits.max() + 0.1  # and min_tokens
  sampled, _, _ = sample_rows(rows, logits)
  assert sampled.tokens.tolist() == [int(processed(row, line).argmax()) for row, line in zip(rows, logits, strict=True)]


def random_row(rng: np.random.Generator) -> Row:
  """A request with a random mixture of all parameters, about half of each; one in four is greedy."""

  def some(count: int) -> tuple[int, ...]:
    return tuple(int(token) for token in rng.choice(V, count, replace=False))

  choices = {
    "top_k": int(rng.integers(1, 60)),
    "top_p": float(rng.uniform(0.2, 0.99)),
    "min_p": float(rng.choice([0.01, 0.1, 0.3])),
    "presence_penalty": float(rng.uniform(-2, 2)),
    "frequency_penalty": float(rng.uniform(-2, 2)),
    "repetition_penalty": float(rng.uniform(0.5, 2)),
    "logit_bias": tuple((token, float(rng.uniform(-6, 6))) for token in some(40)),
    "allowed_token_ids": some(120),
    "min_tokens": int(rng.integers(1, 9)),
    "stop_token_ids": some(3),
    "ignore_eos": True,
  }
  chosen = {name: value for name, value in choices.items() if rng.random() < 0.5}
  params = SamplingParams(temperature=0.0 if rng.random() < 0.25 else float(rng.uniform(0.3, 3)), **chosen)
  # A constraint and allowed_token_ids have something in common.
  allowed = None if rng.random() < 0.5 else tuple({*some(80), *(params.allowed_token_ids or ())[:60]})
  outputs = tuple(int(token) for token in rng.integers(0, 40, int(rng.integers(0, 12))))
  return Row(params, some(60), outputs, seed=int(rng.integers(2**32)), allowed=allowed)


@pytest.mark.parametrize("by", ["reference", native.choose_implementation("adjust", "cpu")])
def test_any_mixture_of_parameters_forbids_what_the_numpy_sampler_forbids(by):
  rng = np.random.default_rng(18)
  for _ in range(40):
    rows = [random_row(rng) for _ in range(7)]
    logits = (rng.normal(size=(7, V)) * 3).astype(np.float32)
    found = np.asarray(adjusted(*packed_step(rows, logits)[0], by))[:7]
    expected = np.stack([processed(row, line) for row, line in zip(rows, logits, strict=True)])
    np.testing.assert_array_equal(found == -np.inf, expected == -np.inf)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wide", [False, True])
def test_any_mixture_of_parameters_is_drawn_as_by_the_numpy_sampler(wide):
  rng = np.random.default_rng(17)
  for _ in range(60):
    rows = [random_row(rng) for _ in range(7)]
    logits = (rng.normal(size=(7, V)) * 3).astype(np.float32)
    logits[:, :40] += 2.0  # what was generated is likely, so that penalties matter
    logits[:, list(EOS)] += 4.0  # and min_tokens
    sampled, _, _ = sample_rows(rows, logits, wide)
    for row, line, token in zip(rows, logits, sampled.tokens.tolist(), strict=True):
      if row.params.temperature:
        numpy_sampler.check_sample(distribution(row, line), uniform(row), token)
      else:
        assert token == int(processed(row, line).argmax()), row


def test_truncation_keeps_all_tokens_of_equal_probability():
  logits = np.full((1, V), -5.0, np.float32)
  logits[0, [10, 20, 30]] = 1.0
  seen = {int(sample_rows([Row(SamplingParams(top_k=2), seed=seed)], logits)[0].tokens[0]) for seed in range(40)}
  assert seen == {10, 20, 30}


def test_draws_follow_the_distribution():
  logits = np.log(np.arange(1, V + 1, dtype=np.float32))[None].repeat(7, 0)
  counts = np.zeros(V)
  for start in range(0, 7 * 300, 7):
    rows = [Row(SamplingParams(), seed=start + index) for index in range(7)]
    np.add.at(counts, sample_rows(rows, logits)[0].tokens, 1)
  expected = np.arange(1, V + 1) / (V * (V + 1) / 2) * counts.sum()
  groups = np.arange(V) // 30
  seen, wanted = np.bincount(groups, counts), np.bincount(groups, expected)
  chi2 = ((seen - wanted) ** 2 / wanted).sum()
  assert chi2 < 27.9  # 9 degrees of freedom, p = 0.001; the seeds are fixed


@pytest.mark.catalogue("D10")
def test_a_draw_depends_on_seed_and_position_alone():
  rng = np.random.default_rng(2)
  line = rng.normal(size=V).astype(np.float32)
  me = Row(SamplingParams(temperature=2.0, top_p=0.9), seed=77)
  alone = int(sample_rows([me], line[None])[0].tokens[0])
  others = [Row(SamplingParams(**choice), seed=index) for index, choice in enumerate(RANDOM[8:14])]
  for place in range(7):
    rows = others[:place] + [me] + others[place:]
    logits = rng.normal(size=(7, V)).astype(np.float32)
    logits[place] = line
    assert int(sample_rows(rows, logits)[0].tokens[place]) == alone
  later = [dataclasses.replace(me, outputs=(8,) * count) for count in range(7)]
  assert len(set(sample_rows(later, np.stack([line] * 7))[0].tokens.tolist())) > 3


def test_a_bad_row_is_reported_and_touches_no_other():
  rng = np.random.default_rng(3)
  rows = [Row(SamplingParams(**choice, logprobs=2), seed=index) for index, choice in enumerate(RANDOM[:7])]
  logits = rng.normal(size=(7, V)).astype(np.float32)
  clean, _, _ = sample_rows(rows, logits)
  for value in (np.nan, np.inf, -np.inf):
    broken = logits.copy()
    broken[2, 17] = value
    sampled, _, _ = sample_rows(rows, broken)
    assert sampled.bad.tolist() == [False, False, True, False, False, False, False]
    for got, wanted in zip(jax.tree.leaves(sampled), jax.tree.leaves(clean), strict=True):
      assert np.isfinite(got).all()
      np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(wanted, 2, 0))


def test_extreme_values_stay_finite():
  extremes = [
    {"repetition_penalty": 1e-38},
    {"temperature": 1e-4},
    {"temperature": 1e-30},
    {"temperature": 100.0},
    {"top_p": 1e-38},
    {"min_p": 1.0},
    {"logit_bias": tuple((token, -100.0) for token in range(V))},
  ]
  rows = [Row(SamplingParams(**choice)) for choice in extremes]
  logits = np.random.default_rng(4).normal(size=(7, V)).astype(np.float32) * 1e3
  sampled, _, _ = sample_rows(rows, logits)
  assert not sampled.bad.any()
  best = logits.argmax(1)
  assert [int(sampled.tokens[index]) for index in (1, 2, 4, 5)] == [int(best[index]) for index in (1, 2, 4, 5)]


def test_min_tokens_gives_way_where_only_ends_are_allowed():
  row = Row(SamplingParams(min_tokens=9, max_tokens=9, allowed_token_ids=(3, 50), stop_token_ids=(50,)))
  sampled, _, _ = sample_rows([row], np.zeros((1, V), np.float32))
  assert int(sampled.tokens[0]) in (3, 50) and not sampled.bad[0]


@pytest.mark.parametrize("choice", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}], ids=str)
@pytest.mark.parametrize("more", [{}, {"presence_penalty": 2.0}, {"logit_bias": ((31, -100.0), (8, 100.0))}], ids=str)
def test_only_tokens_of_the_mask_are_drawn(choice, more):
  # Edges of words, the sign bit, the last token; and one token alone.
  masks = [(0,), (31,), (32,), (V - 1,), (31, 32, 63, 64, 95), tuple(range(0, V, 7)), tuple(range(V))]
  params = SamplingParams(**choice, **more)
  rng = np.random.default_rng(3)
  for trial in range(6):
    rows = [Row(params, seed=trial + 10 * index, allowed=mask) for index, mask in enumerate(masks)]
    logits = rng.normal(size=(7, V)).astype(np.float32) * 3
    sampled, _, _ = sample_rows(rows, logits)
    for row, line, token in zip(rows, logits, sampled.tokens.tolist(), strict=True):
      assert token in (row.allowed or ())
      if params.temperature:
        assert distribution(row, line)[token] > 0
      else:
        assert token == int(processed(row, line).argmax())


def test_a_bias_comes_before_penalties():
  # The bias makes token 9 positive, so that repetition halves it. Before the bias it would double -1, and 20 would win.
  logits = np.full((1, V), -5.0, np.float32)
  logits[0, [9, 20]] = -1.0, 0.25
  row = Row(SamplingParams(temperature=0.0, repetition_penalty=2.0, logit_bias=((9, 2.0),)))
  assert sample_rows([row], logits)[0].tokens.tolist() == [9]


def test_penalties_let_nothing_through_that_is_forbidden():
  # Negative penalties raise what was generated, also where a mask forbids it.
  raised = {"frequency_penalty": -2.0, "presence_penalty": -2.0, "repetition_penalty": 1e-30}
  params = SamplingParams(temperature=0.0, min_tokens=50, **raised)
  rows = [
    Row(params, outputs=(8,) * 9 + (3,) * 9, allowed=(20, 21)),
    Row(dataclasses.replace(params, allowed_token_ids=(30,)), outputs=(8,) * 9),
    Row(params, outputs=(3,) * 9 + (4,) * 9),
  ]
  logits = np.zeros((3, V), np.float32)
  logits[:, 20] = -100.0
  logits[:, 21] = -200.0
  logits[:, list(EOS)] = 50.0
  tokens = sample_rows(rows, logits)[0].tokens.tolist()
  assert tokens[:2] == [20, 30] and tokens[2] not in EOS


def test_a_mask_touches_no_other_row():
  rng = np.random.default_rng(4)
  logits = rng.normal(size=(7, V)).astype(np.float32)
  plain = [Row(SamplingParams(logprobs=3), seed=index) for index in range(7)]
  masked = [dataclasses.replace(row, allowed=(index,)) if index % 2 else row for index, row in enumerate(plain)]
  before, after = sample_rows(plain, logits)[0], sample_rows(masked, logits)[0]
  for index in range(7):
    assert after.tokens[index] == (index if index % 2 else before.tokens[index])
  # The alternatives are those of the model.
  assert np.array_equal(before.top_ids, after.top_ids) and np.array_equal(before.top_logprobs, after.top_logprobs)


def test_min_tokens_gives_way_where_a_mask_leaves_only_ends():
  logits = np.zeros((2, V), np.float32)
  params = SamplingParams(min_tokens=9, max_tokens=9)
  rows = [Row(params, allowed=(3, 4)), Row(params, allowed=(3, 50))]
  tokens = sample_rows(rows, logits)[0].tokens.tolist()
  assert tokens[0] in (3, 4) and tokens[1] == 50


def test_counts_are_kept_only_for_rows_with_penalties():
  rows = [Row(SamplingParams(temperature=0.0, presence_penalty=1.0)), Row(SamplingParams(temperature=0.0))]
  logits = np.zeros((2, V), np.float32)
  logits[:, 40] = 5.0
  sampled, change, slots = sample_rows(rows, logits)
  assert sampled.tokens.tolist() == [40, 40]
  assert change[slots[0], 40] == 1 and change[slots[0]].sum() == 1
  assert not change[slots[1]].any()


@pytest.mark.catalogue("I5")
def test_logprobs_are_of_the_unmodified_distribution():
  rng = np.random.default_rng(5)
  logits = (rng.normal(size=(2, V)) * 3).astype(np.float32)
  rows = [
    Row(SamplingParams(temperature=3.0, top_k=4, logit_bias=((9, 50.0),), logprobs=20)),
    Row(SamplingParams(temperature=0.0)),
  ]
  sampled, _, _ = sample_rows(rows, logits)
  assert int(sampled.tokens[0]) == 9
  wanted = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
  order = np.argsort(-wanted, kind="stable")[:20]
  np.testing.assert_allclose(sampled.logprobs[0], wanted[9], rtol=1e-5)
  assert sampled.top_ids[0].tolist() == order.tolist()
  np.testing.assert_allclose(sampled.top_logprobs[0], wanted[order], rtol=1e-5)


def test_a_vocabulary_smaller_than_the_list_of_alternatives():
  logits = jnp.asarray(np.random.default_rng(6).normal(size=(8, 11)), jnp.float32)
  packer = Packer(SLOTS, 4, 4, ())
  packer.admit(Admission(0, (1,), 1, (1,), SamplingParams(logprobs=11), 0))
  batch = Batch(0, SHAPE, ("a",), (0,), (0,), (1,), (1,), (True,), ((1,),))
  packed, _ = packer.pack(batch, packer.layout(SHAPE))
  rows = unpack(packer.layout(SHAPE), jnp.asarray(packed)).sampling
  lines = (SLOTS + 1, 11)
  state = SlotState(jnp.zeros(lines, jnp.int32), jnp.zeros(lines, jnp.float32), jnp.zeros((SLOTS + 1, 1), jnp.int32))
  sampled = jax.jit(sampler.sample)(logits, rows, state)
  assert sorted(sampled.top_ids[0].tolist()) == list(range(11))
  expected = np.sort(jax.nn.log_softmax(logits[0]))[::-1]
  np.testing.assert_allclose(sampled.top_logprobs[0], expected, rtol=1e-5)


# --- the search without a sort ----------------------------------------------------------------------------------------

# Ties, the ends of the range and what is beyond it, neighbors in the last bit.
_LEVELS = (
  0.0,
  -0.0,
  -1e-30,
  -0.5,
  -1.0,
  np.nextafter(np.float32(-1), np.float32(0)),
  -1.5,
  -109.9,
  -111,
  -np.inf,
)
_threshold = jax.jit(
  reference.find_threshold, static_argnums=3, compiler_options={"xla_backend_optimization_level": 0}
)  # the wide search is not meant for this compiler
_largest = jax.jit(sampler.largest, static_argnums=1)


@st.composite
def _rows_of_levels(draw_value):
  """f32[4, 40] of few different values, each row with its largest at 0; and what each row needs."""
  index = draw_value(st.lists(st.integers(0, len(_LEVELS) - 1), min_size=160, max_size=160))
  z = np.array(_LEVELS, np.float32)[index].reshape(4, 40)
  z[:, 17] = 0.0
  need = draw_value(st.lists(st.sampled_from((1, 2, 3, 20, 39, 40, 41, 10**6)), min_size=4, max_size=4))
  return z, np.array(need, np.float32)


@settings(max_examples=60)
@given(_rows_of_levels(), st.integers(0, 2**32 - 1))
def test_a_threshold_is_where_sorting_finds_it(case, seed):
  z, need = case
  weights = np.random.default_rng(seed).integers(0, 4, z.shape).astype(np.float32)  # sums are exact
  for values in (np.ones_like(z), weights):
    narrow, wide = (np.asarray(_threshold(z, values, need, wide)) for wide in (False, True))
    np.testing.assert_array_equal(narrow, wide)
    for line, value, wanted, found in zip(z, values, need, narrow, strict=True):
      order = np.argsort(-line, kind="stable")
      reached = np.flatnonzero(np.cumsum(value[order]) >= wanted)
      expected = line[order[reached[0]]] if len(reached) else -np.inf
      assert found == max(expected, np.float32(reference.NEGLIGIBLE))


@settings(max_examples=40)
@given(st.sampled_from((20, 300, 331, 5001)), st.integers(0, 2**32 - 1), st.integers(1, 400))
def test_the_largest_are_those_of_a_stable_sort(vocab, seed, num_levels):
  x = np.random.default_rng(seed).integers(0, num_levels, (3, vocab)).astype(np.float32)
  values, ids = map(np.asarray, _largest(x, 20))
  order = np.argsort(-x, axis=1, kind="stable")[:, :20]
  np.testing.assert_array_equal(ids, order)
  np.testing.assert_array_equal(values, np.take_along_axis(x, order, 1))


def test_how_a_threshold_is_searched_changes_no_token():
  choices = [{"top_k": 5}, {"top_p": 0.3}, {"top_k": V}, {"top_k": 20, "top_p": 0.7, "min_p": 0.2}, {"top_p": 1e-9}]
  rows = [Row(SamplingParams(**choice, logprobs=3), seed=n) for n, choice in enumerate(choices)]
  rows.append(Row(SamplingParams(top_k=3), allowed=(2, 31, 32, 299)))
  rows.append(Row(SamplingParams(temperature=0.0, top_k=2)))
  rng = np.random.default_rng(9)
  for special in (0.0, np.nan, np.inf, -np.inf):
    logits = rng.integers(-12, 4, (len(rows), V)).astype(np.float32)  # many are equal
    logits[2, 5] = special
    found, expected = (sample_rows(rows, logits, wide)[0] for wide in (True, False))
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
      np.testing.assert_array_equal(mine, theirs)
    assert found.bad.tolist() == [special != 0.0 and index == 2 for index in range(len(rows))]
