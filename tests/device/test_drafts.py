"""Steps that verify drafts: any drafts in any batch give the tokens and log probabilities of no drafts."""

from collections.abc import Callable
import inspect
import random
import textwrap
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.batch import MAX_DRAFT_MASKS, MAX_DRAFTS, Admission, Batch
from engine.device import programs, runner, sampler
from engine.device.model_input import Column, Flag, SamplingRows
from engine.device.runner import LaunchedStep, ModelRunner
from engine.device.sampler import Sampled
from engine.device.step_packer import Packer
from engine.sampling_params import SamplingParams
from engine.shapes import StepShape
from pallas_kernels import native
from tests.device.drafts import DraftCounts, limits_of, serve_with_drafts
from tests.device.serving import serve
from tests.device.several_devices import serve_on_devices
from tests.device.test_several_devices import SETTINGS, make_model
from tests.device.tiny_model import TINY, make_runner, random_params

pytestmark = pytest.mark.usefixtures("quick_steps")

POISON = 50
KERNELS = ("argmax", "sampling", "adjust")


@pytest.fixture(scope="module")
def model():
  """A model in which the embedding of POISON is NaN."""
  graphdef, state = random_params(TINY, jnp.float32)
  state = jax.tree.map(lambda leaf: leaf, state)
  embed = state["embed"]["matrix"]
  embed["array"] = embed["array"].replace(embed["array"].get_value().at[POISON].set(jnp.nan))
  return graphdef, state


def make_sealed(model, spec_settings) -> ModelRunner:
  made = make_runner(model=model, num_blocks=140, spec_settings=spec_settings)
  made.warm_up(lambda *_: None)
  made.seal()
  return made


@pytest.fixture(scope="module")
def sealed(model):
  return make_sealed(model, {})


def serve_mixtures(runner: ModelRunner, seeds: range) -> DraftCounts:
  counts = DraftCounts()
  for seed in seeds:
    counts += serve_with_drafts(runner, limits_of(runner), seed, poison=POISON)
  return counts


@pytest.mark.parametrize("kernels", ["reference", "cpu", pytest.param("deterministic", marks=pytest.mark.long)])
def test_drafts_change_no_token_and_no_log_probability(model, kernels):
  settings = {}
  if kernels == "cpu":
    settings = {name: native.choose_implementation(name, "cpu") for name in KERNELS}
  elif kernels == "deterministic":
    settings = {"deterministic": True}
  runner = make_sealed(model, settings)
  counts = serve_mixtures(runner, range(6))
  assert counts.accepted > 800 and counts.rejected > 500 and counts.in_flight > 100, counts
  assert counts.bad > 5 and counts.preempted > 10 and counts.behind > 60 and counts.across > 30, counts
  assert runner.compiles_after_ready == 0


@pytest.mark.long
@pytest.mark.parametrize("more", [{}, {"deterministic": True, "prefill_chunk": 8}], ids=str)
def test_one_and_two_devices_verify_drafts(tmp_path, more):
  """Packed weights and C++ kernels, which give the same bits with and without drafts."""
  folder = make_model(tmp_path / "model", "qwen2", vocab_size=250, intermediate_size=203)
  base = SETTINGS | more | {"token_budgets": [4, 16], "num_blocks": 70, "max_model_len": 64, "drafts": True}
  for found in serve_on_devices(folder, [base | {"num_devices": devices} for devices in (1, 2)], []):
    assert found["accepted"] > 150 and found["rejected"] > 60 and found["in_flight"] > 30, found
    assert found["kernels"] == ["cpu", "packed", "cpu"] and found["compiles"] == 0, found


@pytest.mark.parametrize("overlap", [True, False])
def test_an_engine_that_drafts_gives_the_tokens_of_one_that_does_not(sealed, overlap):
  """Outputs of few tokens repeat themselves, so that n-grams of them are right often, and wrong too."""
  few = tuple(range(5, 9))
  choices = [
    {"temperature": 0.0},
    {"temperature": 0.0, "allowed_token_ids": few[:3]},
    {"allowed_token_ids": few, "presence_penalty": 0.3, "logprobs": 2},
    {"temperature": 0.0, "allowed_token_ids": few, "frequency_penalty": 0.1, "logprobs": 0},
  ]
  rng = random.Random(1)
  requests = []
  for index in range(20):
    prompt = 2 * [rng.randrange(51, TINY.vocab_size) for _ in range(rng.randint(1, 12))]
    params = SamplingParams(36, ignore_eos=True, seed=index, **choices[index % len(choices)])
    requests.append((prompt, params))
  expected, _ = serve(sealed, requests, overlap=overlap)
  num_drafts = 0
  for num_blocks in (64, 30):
    # Steps of milliseconds, beside which the search for drafts costs little.
    found, engine = serve(sealed, requests, tick_s=1e-3, overlap=overlap, num_blocks=num_blocks, speculation="ngram")
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    for one, other in zip(found, expected, strict=True):
      assert len(one.logprobs) == len(other.logprobs)
      values = [[each.logprob for each in served.logprobs] for served in (one, other)]
      np.testing.assert_allclose(*values, rtol=0, atol=2e-4)
    assert engine.stats().num_preemptions > 0
    num_drafts += sum(record.decode_tokens - record.decode_rows for record in engine.stats(10_000).steps)
  assert num_drafts > 20
  assert sealed.compiles_after_ready == 0


def made_rows(drafts: list[tuple[int, ...]]) -> SamplingRows:
  """Logit rows of at most 5 sequences with these drafts, and padding."""
  columns = np.zeros((len(Column), 5 * (MAX_DRAFTS + 1) + 2), np.int32)
  first = 0
  for ids in drafts:
    for number in range(len(ids) + 1):
      columns[Column.NUM_DRAFTS, first + number] = number
      columns[Column.DRAFT, first + number] = ids[number - 1] if number else 99
    first += len(ids) + 1
  return SamplingRows(jnp.asarray(columns), jnp.zeros((columns.shape[1], 1), jnp.int32))


def test_host_and_device_accept_the_same_drafts():
  """Tokens of two kinds, so that drafts often come true; and bad rows, which end a sequence."""
  rng, accept, num_accepted = random.Random(0), jax.jit(sampler.accept_drafts), 0
  for _ in range(40):
    drafts = [tuple(rng.randrange(2) for _ in range(rng.randint(0, MAX_DRAFTS))) for _ in range(5)]
    rows = made_rows(drafts)
    size = rows.columns.shape[1]
    tokens, bad = [rng.randrange(2) for _ in range(size)], [rng.random() < 0.05 for _ in range(size)]
    expected = np.ones(size, bool)  # as for padding
    last = np.ones(size, bool)
    spans, first = [], 0
    for ids in drafts:
      count = 0
      while count < len(ids) and tokens[first + count] == ids[count] and not bad[first + count]:
        count += 1
      expected[first + count + 1 : first + len(ids) + 1] = False
      last[first : first + len(ids) + 1] = False
      last[first + count] = True
      spans.append((first, first + count + 1))
      first += len(ids) + 1
    zeros = jnp.zeros(size, jnp.float32)
    sampled = Sampled(jnp.asarray(tokens, jnp.int32), jnp.asarray(bad), zeros, jnp.zeros((size, 0), jnp.int32), zeros)
    accepted, is_last = accept(rows, sampled)
    np.testing.assert_array_equal(np.asarray(accepted), expected)
    np.testing.assert_array_equal(np.asarray(is_last), last)
    starts = [start for start, _ in spans]
    by_row = [(row, start, ids) for row, (start, ids) in enumerate(zip(starts, drafts, strict=True)) if ids]
    kept = [int(value) for value in bad]
    found = runner._accept_drafts(by_row, tokens, kept)
    assert found == {row: spans[row] for row, _, _ in by_row}
    rest = [position for position, (one, other) in enumerate(zip(bad, kept, strict=True)) if one != other]
    assert all(bad[position] and not expected[position] for position in rest)
    assert not any(kept[position] for position in range(size) if not expected[position])
    num_accepted += sum(end - first - 1 for first, end in spans)
  assert num_accepted > 100


def test_a_rejected_bad_row_is_no_error():
  """Row 0 has its only draft rejected, after which logits are bad; the bad logits of row 1 are accepted."""
  params = SamplingParams(9, temperature=0.0, logprobs=2)
  packer = Packer(4, 8, 4, (1,))
  layout = packer.layout(StepShape(8, 4, 4))
  for slot in (0, 1):
    packer.admit(Admission(slot, (5, 6), 2, (slot + 1,), params, 1))
  two = (2, 2)
  batch = Batch(0, layout.shape, ("a", "b"), (0, 1), two, two, two, (True,) * 2, ((7, 8), (7, 8)), num_drafts=(1, 1))
  _, rows = packer.pack(batch, layout)
  output = np.zeros((3, 4), np.int32)
  output[0], output[1] = [9, 0, 8, 0], [0, 1, 0, 1]
  result = LaunchedStep((output, np.zeros((2, 4, 5), np.int32)), rows, [], False, lambda: None).result()
  assert result.tokens == [9, 8, 0] and result.row_ends == (1, 3) and result.bad_rows == {1}
  assert [entry.token_id for entry in result.logprobs[0]] == [9]
  assert [entry.token_id for entry in result.logprobs[1]] == [8, 0]


def masked_batch(packer: Packer, shape: StepShape, counts: tuple[int, ...]) -> Batch:
  """Constrained rows with so many drafts each, whose masks are numbered."""
  for slot in range(len(counts)):
    packer.admit(Admission(slot, (5, 6), 2, (slot + 1,), SamplingParams(9), 1, constrained=True))
  size = tuple(count + 1 for count in counts)
  masks = [row for row, count in enumerate(size) for _ in range(count)]
  return Batch(
    0,
    shape,
    tuple(map(str, range(len(counts)))),
    tuple(range(len(counts))),
    (1,) * len(counts),
    size,
    size,
    (True,) * len(counts),
    tuple((7,) * count for count in size),
    masks=tuple((row, bytes([number])) for number, row in enumerate(masks)),
    num_drafts=counts,
  )


def test_each_logit_row_has_the_line_of_its_own_mask():
  packer, shape = Packer(12, 8, 4, (1,)), StepShape(100, 12, 100)
  counts = (7, 0, 3, 7, 7, 7, 7, 7, 7, 7, 5)
  batch = masked_batch(packer, shape, counts)
  packed, _ = packer.pack(batch, packer.layout(shape))
  offset, sizes = packer.layout(shape).fields["columns"]
  columns = packed[offset : offset + sizes[0] * sizes[1]].reshape(sizes)
  lines = dict(packer.mask_lines(batch))
  wanted = [lines[line][0] for line in columns[Column.MASK, : sum(counts) + len(counts)].tolist()]
  assert wanted == list(range(len(wanted))) and sum(counts) == MAX_DRAFT_MASKS
  assert (columns[Column.FLAGS, : len(wanted)] & int(Flag.MASK)).all()


def test_more_masks_or_drafts_than_a_step_has_are_refused():
  packer, shape = Packer(12, 8, 4, (1,)), StepShape(100, 12, 100)
  with pytest.raises(AssertionError, match="MAX_DRAFT_MASKS"):
    packer.pack(masked_batch(packer, shape, (7,) * 9 + (2,)), packer.layout(shape))
  with pytest.raises(AssertionError, match="8 drafts; the limit is 7"):
    packer.pack(masked_batch(packer, shape, (8,)), packer.layout(shape))


# --- Seeded bugs ------------------------------------------------------------------------------------------------------

# Owner and name of a function, text that occurs once in it, and its replacement.
_HOST_BUGS = {
  "one_token_too_many": (runner, "_accept_drafts", "first + count + 1, first", "first + len(ids) + 1, first"),
  "one_token_too_few": (runner, "_accept_drafts", "first + count + 1, first", "first + max(count, 1), first"),
  "rejected_rows_stay_bad": (runner, "_accept_drafts", "bad[end:last] = [0] * (last - end)", "pass"),
  "in_flight_is_slot_0": (Packer, "_pack", "in_flight = ids[0] == IN_FLIGHT", "in_flight = 0"),
  "only_the_last_row_samples": (Packer, "_pack_logit_rows", "back <= num_after", "back == 0"),
  "min_tokens_by_the_last_row": (Packer, "_pack_logit_rows", "(live[Column.POSITION] - behind <", "(kv_lens[row] <"),
  "masks_one_line_off": (Packer, "mask_lines", "self._num_slots, -1", "self._num_slots + 1, -1"),
  "the_mask_of_the_slot": (Packer, "_pack_drafts", "live[Column.MASK, masked] =", "unused ="),
  "drafts_one_row_late": (Packer, "_pack_drafts", "= tokens[live[Column.TOKEN]]", "= tokens[live[Column.TOKEN] - 1]"),
  "drafts_counted_from_the_end": (Packer, "_pack_drafts", "(of_row - back) *", "back *"),
  "rows_behind_drafts_are_unmarked": (Packer, "_pack", "np.where(is_behind, slots + 1, 0)", "0 * slots"),
  "tokens_behind_drafts_are_unmarked": (Packer, "_pack", "np.arange(1, rows + 1), 0)", "0 * slots, 0)"),
  "tokens_behind_drafts_have_another_row": (Packer, "_pack", "np.arange(1, rows + 1), 0)", "np.arange(rows), 0)"),
  "logit_rows_behind_drafts_are_unmarked": (
    Packer,
    "_pack_logit_rows",
    "flags[behind > 0] |= int(Flag.BEHIND)",
    "pass",
  ),
  "min_tokens_where_planned": (
    Packer,
    "_pack_logit_rows",
    "live[Column.POSITION] - behind <",
    "live[Column.POSITION] <",
  ),
  "too_few_rejected": (Packer, "_pack_drafts", "= of_row - number", "= np.maximum(of_row - number - 1, 0)"),
  "log_probabilities_of_rejected_drafts": (LaunchedStep, "_read_logprobs", "[: accepted[row][1] - first]", ""),
}
_DEVICE_BUGS = {
  "every_draft_is_accepted": (sampler, "accept_drafts", "rejects = follows &", "rejects = follows & False &"),
  "only_the_draft_before_counts": (sampler, "accept_drafts", "(line - number)", "(line - 1)"),
  "the_first_draft_does_not_count": (sampler, "accept_drafts", "(line - number)", "(line - number + 1)"),
  "drafts_of_another_sequence_count": (sampler, "accept_drafts", "(line - number)", "(line - number - 2)"),
  "the_last_token_of_a_rejected_row": (sampler, "accept_drafts", "accepted & (rejects | ~follows)", "~follows"),
  "rejected_tokens_are_remembered": (sampler, "remember", " & accepted", ""),
  "penalties_of_another_position": (
    sampler,
    "preceding_drafts",
    "[Column.DRAFT], count)",
    "[Column.DRAFT], count - 1)",
  ),
  "penalties_without_drafts": (sampler, "preceding_drafts", "back[None, :] <", "back[None, :] + 9 <"),
  "penalties_one_position_late": (sampler, "preceding_drafts", "[Column.DRAFT], count)", "[Column.DRAFT], count + 1)"),
  "lengths_behind_drafts_are_planned": (programs, "take_back_rejected", "inputs.kv_lens - of_row", "inputs.kv_lens"),
  "blocks_behind_drafts_are_planned": (
    programs,
    "take_back_rejected",
    "jnp.where(of_token > 0, places, inputs.slot_mapping)",
    "inputs.slot_mapping",
  ),
  "positions_behind_drafts_are_planned": (programs, "take_back_rejected", "    positions=positions,\n", ""),
  "seeds_behind_drafts_are_planned": (
    programs,
    "take_back_rejected",
    "columns.at[Column.POSITION].set(position)",
    "columns",
  ),
  "min_tokens_behind_drafts_last_longer": (
    programs,
    "take_back_rejected",
    "position >= columns",
    "position < -columns",
  ),
  "no_draft_was_rejected": (programs, "step", "rows[Column.LATER_DRAFTS]", "0 * rows[Column.LATER_DRAFTS]"),
  "the_mask_of_the_first_row": (sampler, "adjust_rows", "mask=rows[Column.MASK]", "mask=rows[Column.SLOT]"),
}


def seed_bug(monkeypatch: pytest.MonkeyPatch, bug: tuple[types.ModuleType | type, str, str, str]) -> None:
  owner, name, right, wrong = bug
  function: Callable = getattr(owner, name)
  source = textwrap.dedent(inspect.getsource(function))
  assert source.count(right) == 1, f"{right!r} occurs {source.count(right)} times in {name}"
  names: dict = {}
  exec(compile(source.replace(right, wrong), f"seeded {name}.py", "exec"), function.__globals__, names)
  monkeypatch.setattr(owner, name, names[name])


def find_bug(runner: ModelRunner) -> None:
  with pytest.raises((AssertionError, ValueError)):
    serve_mixtures(runner, range(4))
    test_a_rejected_bad_row_is_no_error()


def test_sources_without_a_bug_pass(sealed, monkeypatch: pytest.MonkeyPatch):
  for owner, name in {bug[:2] for bug in _HOST_BUGS.values()}:
    seed_bug(monkeypatch, (owner, name, f"def {name}", f"def {name}"))
  serve_mixtures(sealed, range(1))


@pytest.mark.parametrize("name", _HOST_BUGS)
def test_a_bug_of_the_host_is_found(sealed, monkeypatch: pytest.MonkeyPatch, name: str):
  seed_bug(monkeypatch, _HOST_BUGS[name])
  find_bug(sealed)


@pytest.mark.long
@pytest.mark.parametrize("name", _DEVICE_BUGS)
def test_a_bug_of_the_device_is_found(model, monkeypatch: pytest.MonkeyPatch, name: str):
  seed_bug(monkeypatch, _DEVICE_BUGS[name])
  find_bug(make_sealed(model, {}))
