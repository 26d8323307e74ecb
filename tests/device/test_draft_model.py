"""The draft model on the device: its proposals are its own greedy continuation, and it writes to no foreign block."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.batch import Admission, Batch, StepResult
from engine.device import kv_cache
from engine.device.draft_model import DraftModel
from engine.device.draft_programs import draft_programs
from engine.device.runner import Making, ModelRunner
from engine.sampling_params import SamplingParams
from tests.device.drafts import DraftCounts, limits_of, serve_with_drafts
from tests.device.tiny_model import MAX_LEN, TINY, dense_greedy, make_runner, random_params

DRAFT = dataclasses.replace(TINY, num_layers=1, num_heads=2, num_kv_heads=1)
NUM_PROPOSALS = 4


@pytest.fixture(scope="module")
def draft_params():
  return random_params(DRAFT, jnp.float32, seed=5)


@pytest.fixture(scope="module")
def runner(draft_params) -> ModelRunner:
  made = make_runner(num_blocks=140)
  graphdef, state = draft_params
  leaves, tree = jax.tree.flatten(state)
  spec = dataclasses.replace(
    made.spec,
    model=DRAFT,
    graphdef=graphdef,
    params_tree=tree,
    params=tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=made.params[0].sharding) for leaf in leaves),
    kv=kv_cache.abstract(made.spec.mesh, DRAFT, 140, 4, jnp.dtype(jnp.float32), made.spec.attention),
  )
  with Making(draft_programs(spec, made.spec, tuple(made.steps), NUM_PROPOSALS)) as making:
    leaves = [jax.device_put(leaf, made.params[0].sharding) for leaf in leaves]
    made.draft = DraftModel(spec, tuple(leaves), _Rungs(tuple(made.steps)), making.wait(lambda *_: None))
  made.warm_up(lambda *_: None)
  made.seal()
  return made


class _Rungs:
  """The only part of a ShapeLadder that a DraftModel reads."""

  def __init__(self, shapes):
    self._shapes = shapes

  def rungs(self):
    return self._shapes


class ProposalChecker:
  """A Runner that asks for proposals in random steps, and compares them with the draft model's own continuation."""

  def __init__(self, runner: ModelRunner, draft_params, seed: int):
    self._runner, self._draft_params, self._rng = runner, draft_params, random.Random(seed)
    self._tokens: dict[int, list[int]] = {}
    self._known: dict[tuple[int, ...], list[int]] = {}
    self.num_checked = self.num_after_drafts = 0

  def launch(self, batch: Batch):
    wants = self._rng.random() < 0.15
    launched = self._runner.launch(dataclasses.replace(batch, num_proposals=NUM_PROPOSALS * wants))
    checker = self

    class Checked:
      def result(self) -> StepResult:
        result = launched.result()
        checker.check(batch, result, wants)
        return result

    return Checked()

  def check(self, batch: Batch, result: StepResult, wants: bool) -> None:
    for admission in batch.admissions:
      self._tokens[admission.slot] = list(admission.token_ids)
    assert set(result.proposals) == {row for row, samples in enumerate(batch.samples) if samples and wants}
    for row, slot in enumerate(batch.slots):
      if batch.samples[row]:
        self._tokens[slot] += result.tokens_of(row)
    for row, proposals in result.proposals.items():
      known = self._tokens[batch.slots[row]]
      count = min(NUM_PROPOSALS, MAX_LEN - len(known))
      assert len(proposals) == NUM_PROPOSALS
      if count > 0:
        assert list(proposals[:count]) == self._continue(known, count)
        self.num_checked += 1
        self.num_after_drafts += bool(batch.num_drafts and batch.num_drafts[row])

  def _continue(self, known: list[int], count: int) -> list[int]:
    key = tuple(known)
    if len(self._known.get(key, ())) < count:
      self._known[key] = dense_greedy(self._draft_params, known, count)
    return self._known[key][:count]


def test_proposals_continue_the_known_tokens(runner, draft_params):
  """Chunks of prompts, decodes, right and wrong drafts, tokens in flight and lost slots: KV of the draft has no hole."""
  checker, counts = ProposalChecker(runner, draft_params, 1), DraftCounts()
  for seed in range(2):
    counts += serve_with_drafts(checker, limits_of(runner), seed, count=16)
  assert counts.accepted > 100 and counts.rejected > 50 and counts.in_flight > 20 and counts.preempted > 1, counts
  assert checker.num_checked > 100 and checker.num_after_drafts > 20
  assert runner.compiles_after_ready == 0


@pytest.mark.parametrize("num_tokens", [8, 7, MAX_LEN - 1, MAX_LEN - 3])
def test_proposals_past_the_table_touch_padding_alone(runner, num_tokens):
  """A request whose blocks are full, or almost; and one at the end of the longest table."""
  assert runner.draft is not None
  blocks = tuple(range(3, 3 + -(-num_tokens // 4)))
  params = SamplingParams(max_tokens=1, temperature=0.0)
  shape = list(runner.steps)[-1]
  tokens = tuple(range(5, 5 + num_tokens))
  admission = Admission(0, tokens, num_tokens, blocks, params, 0)
  done = 0
  while done < num_tokens:
    count = min(shape.tokens, num_tokens - done)
    runner.draft.kv = tuple(jnp.array(np.random.default_rng(1).normal(size=each.shape), each.dtype) for each in runner.draft.kv) if not done else runner.draft.kv
    before = [np.array(each) for each in runner.draft.kv]
    is_last = done + count == num_tokens
    batch = Batch(
      done, shape, ("a",), (0,), (done,), (count,), (1,), (is_last,), (tokens[done : done + count],),
      admissions=() if done else (admission,), num_proposals=NUM_PROPOSALS * is_last,
    )
    result = runner.launch(batch).result()
    done += count
  assert len(result.proposals[0]) == NUM_PROPOSALS
  foreign = [block for block in range(140) if block != 0 and block not in blocks]
  for old, new in zip(before, runner.draft.kv, strict=True):
    np.testing.assert_array_equal(old[foreign], np.asarray(new)[foreign])
    assert not np.array_equal(old[0], np.asarray(new)[0])  # those past the table are here
