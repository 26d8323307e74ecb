"""Small steps packed in plain Python are the arrays of Packer, value by value."""

from collections.abc import Callable
import dataclasses
import inspect
import random
import textwrap

import numpy as np
import pytest

from engine.batch import IN_FLIGHT, Admission, Batch
from engine.device.model_input import Packer
from engine.device.small_steps import MOST_TOKENS, SmallStepPacker
from engine.sampling_params import SamplingParams
from engine.shapes import StepShape

SLOTS, WIDTH, BLOCK = 12, 8, 4
EOS = (1, 2)


def make_params(rng: random.Random) -> SamplingParams:
  return SamplingParams(
    max_tokens=9,
    temperature=rng.choice((0.0, 0.5)),
    top_k=rng.choice((0, 3)),
    top_p=rng.choice((1.0, 0.5)),
    min_p=rng.random(),
    presence_penalty=rng.choice((0.0, -1.5)),
    repetition_penalty=0.5 + rng.random(),
    min_tokens=rng.choice((0,) * 15 + (3,)),
    logprobs=rng.choice((None,) * 15 + (2,)),
  )


def make_step(rng: random.Random, shape: StepShape) -> Batch:
  """Decodes, some with drafts, and parts of prompts, some with a logit row for each position."""
  rows = []
  tokens_left, logits_left = shape.tokens, shape.logits
  for slot in rng.sample(range(SLOTS), rng.randint(1, SLOTS)):
    kind = rng.choice(("decode", "drafts", "drafts", "prompt", "every"))
    count = min({"decode": 1, "drafts": rng.randint(2, 8)}.get(kind, rng.randint(1, 9)), tokens_left)
    num_logits = count if kind in ("drafts", "every") else 1
    if count < 1 + (kind == "drafts") or num_logits > logits_left:
      continue
    tokens_left, logits_left = tokens_left - count, logits_left - num_logits
    ids = tuple(rng.randrange(90) for _ in range(count))
    if kind == "decode":
      ids = rng.choice((ids, ()))
    elif kind == "drafts" and rng.random() < 0.3:
      ids = (IN_FLIGHT, *ids[1:])
    samples = kind in ("decode", "drafts") or rng.random() < 0.5
    start = rng.randint(0, WIDTH * BLOCK - count)
    rows.append((slot, start, count, num_logits, samples, ids, (count - 1) * (kind == "drafts")))
  if not rows:
    return make_step(rng, shape)
  slots, starts, counts, num_logits, samples, ids, num_drafts = zip(*rows, strict=True)
  names = tuple(map(str, slots))
  if not any(num_drafts):
    num_drafts = ()
  batch = Batch(0, shape, names, slots, starts, counts, num_logits, samples, ids, num_drafts=num_drafts)
  return dataclasses.replace(batch, padded_tokens=rng.choice((0, batch.num_tokens, batch.num_tokens, shape.tokens)))


def compare_packers(num_worlds: int) -> int:
  """Packs random steps by both; returns how many were small."""
  num_small = 0
  for seed in range(num_worlds):
    rng = random.Random(seed)
    quick = SmallStepPacker(SLOTS, WIDTH, BLOCK, EOS)
    packers = [Packer(SLOTS, WIDTH, BLOCK, EOS), quick]
    for step in range(8):
      for slot in range(SLOTS):
        if step == 0 or rng.random() < 0.2:
          blocks = tuple(rng.sample(range(1, 500), WIDTH))
          params, seed_of_slot, constrained = make_params(rng), rng.getrandbits(32), rng.random() < 0.5
          for packer in packers:
            packer.admit(Admission(slot, (5, 6), 2, blocks, params, seed_of_slot, constrained))
      shape = StepShape(rng.choice((8, 24, MOST_TOKENS, 2 * MOST_TOKENS)), SLOTS, rng.choice((12, 24)))
      batch = make_step(rng, shape)
      (one, rows), (other, other_rows) = (packer.pack(batch, packer.layout(shape)) for packer in packers)
      np.testing.assert_array_equal(one, other)
      assert rows == other_rows
      num_small += quick._is_small(batch, quick.layout(shape))
  return num_small


def test_small_steps_are_those_of_the_packer():
  assert compare_packers(60) > 100


@pytest.mark.parametrize(
  "right, wrong",
  [
    ("ids[0] != IN_FLIGHT", "True"),
    ("tokens.append(-1 - slot)", "tokens.append(-slot)"),
    ("position // block_size", "(position + 1) // block_size"),
    ("table + row * width : table", "table + slot * width : table"),
    ("samples and back <= of_row", "samples and back == 0"),
    ("number > 0 and samples_here", "samples_here"),
    ("masked += bool(is_masked)", "masked += 1"),
    ("(*of_slot[:-1], 0)", "of_slot"),
    ("stop - back)", "stop)"),
    ("len(tokens) - 1 - back", "len(tokens) - 1"),
    ("of_row - number if of_row", "number if of_row"),
    ("[total] * (num_rows - len(ends))", "[0] * (num_rows - len(ends))"),
    ("slot_of + rest", "slot_of"),
    ("[-1] * num_columns", "[-1] * len(slots)"),
    ("ids[1:]))", "ids))"),
    ("plain and num_logits == len(slots)", "plain"),
  ],
)
def test_a_bug_is_found(monkeypatch: pytest.MonkeyPatch, right: str, wrong: str):
  function: Callable = SmallStepPacker._pack
  source = textwrap.dedent(inspect.getsource(function)).replace("super()", "super(SmallStepPacker, self)")
  assert source.count(right) == 1, f"{right!r} occurs {source.count(right)} times"
  names: dict = {}
  exec(compile(source.replace(right, wrong), "seeded _pack.py", "exec"), function.__globals__, names)
  monkeypatch.setattr(SmallStepPacker, "_pack", names["_pack"])
  with pytest.raises((AssertionError, ValueError)):
    compare_packers(60)


@pytest.mark.parametrize("right, wrong", [("params.min_tokens or", "False or"), ("slot in self._logprobs", "False")])
def test_slots_that_want_more_are_left_to_the_packer(monkeypatch: pytest.MonkeyPatch, right: str, wrong: str):
  function: Callable = SmallStepPacker.admit
  source = textwrap.dedent(inspect.getsource(function)).replace("super()", "super(SmallStepPacker, self)")
  assert source.count(right) == 1, f"{right!r} occurs {source.count(right)} times"
  names: dict = {}
  exec(compile(source.replace(right, wrong), "seeded admit.py", "exec"), function.__globals__, names)
  monkeypatch.setattr(SmallStepPacker, "admit", names["admit"])
  with pytest.raises(AssertionError):
    compare_packers(60)
