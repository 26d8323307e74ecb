"""Packing against a token-by-token twin: whatever the rows, every number arrives where the device reads it."""

from collections.abc import Callable
import dataclasses
from pathlib import Path
import random
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.batch import Admission, Batch, Launched, StepResult
from engine.config import EngineConfig
from engine.device import step_packer
from engine.device.model_input import Column, Flag, unpack
from engine.device.step_packer import Packer, flags_of
from engine.sampling_params import SamplingParams
from engine.shapes import StepShape
from tests.engine.speculation.guessing import GuessingWorld
from tests.engine.world import World
from tests.fakes import FakeRunner

SLOTS, WIDTH, BLOCK = 6, 8, 4
EOS = (1, 2)


def params_of(rng: random.Random) -> SamplingParams:
  return SamplingParams(
    temperature=rng.choice((0.0, 0.5)),
    top_k=rng.choice((0, 3)),
    top_p=rng.choice((1.0, 0.5)),
    min_p=rng.random(),
    presence_penalty=rng.choice((0.0, -1.5)),
    frequency_penalty=rng.random(),
    repetition_penalty=0.5 + rng.random(),
    min_tokens=rng.choice((0, 3)),
    ignore_eos=rng.random() < 0.5,
    stop_token_ids=tuple(rng.sample(range(90), 3)),
    logprobs=rng.choice((None, 0, 4)),
    prompt_logprobs=rng.choice((None, 0, 7)),
  )


class Twin:
  """One slot, in Python."""

  def __init__(self, rng: random.Random, slot: int, blocks: list[int]):
    self.slot, self.params, self.seed = slot, params_of(rng), rng.getrandbits(32)
    self.tokens = [rng.randrange(90) for _ in range(rng.randint(1, WIDTH * BLOCK - 1))]
    self.num_prompt = rng.randint(max(1, len(self.tokens) - 5), len(self.tokens))
    self.table = [blocks.pop() for _ in range(WIDTH)]
    self.start = 0  # position the next row starts at


def make_step(rng: random.Random, shape: StepShape, twins: list[Twin]) -> tuple[Batch, list]:
  """A batch over some of the slots, and (slot, position, token or None, num logits, samples) of every row."""
  rows, tokens_left, logits_left = [], shape.tokens, shape.logits
  for twin in rng.sample(twins, rng.randint(0, min(len(twins), shape.rows))):
    waiting = len(twin.tokens) - twin.start
    count = rng.randint(0, min(waiting, tokens_left, 9)) if waiting > 0 else min(1, tokens_left)
    if twin.start == WIDTH * BLOCK or not logits_left:
      continue
    if not count:
      continue
    samples = twin.start + count >= len(twin.tokens)
    num_logits = count if twin.params.prompt_logprobs is not None and count <= logits_left else 1
    rows.append((twin, twin.start, count, num_logits, samples))
    tokens_left -= count
    logits_left -= num_logits
  ids = [tuple(t.tokens[start : start + count]) for t, start, count, *_ in rows]
  for twin, start, count, *_ in rows:
    twin.start = start + count
  starts, counts, num_logits, samples = (tuple(row[column] for row in rows) for column in range(1, 5))
  slots = tuple(twin.slot for twin, *_ in rows)
  return Batch(0, shape, tuple(map(str, slots)), slots, starts, counts, num_logits, samples, tuple(ids)), rows


@pytest.mark.parametrize("seed", range(30))
def test_every_number_arrives(seed):
  rng = random.Random(seed)
  shape = StepShape(rng.choice((6, 24, 40)), SLOTS, SLOTS)
  packer = Packer(SLOTS, WIDTH, BLOCK, EOS)
  layout = packer.layout(shape)
  blocks = rng.sample(range(1, 500), SLOTS * WIDTH)
  twins = [Twin(rng, slot, blocks) for slot in range(SLOTS)]
  grown = []
  for twin in twins:
    known = rng.randint(1, WIDTH)
    table = tuple(twin.table[:known])
    packer.admit(Admission(twin.slot, tuple(twin.tokens), twin.num_prompt, table, twin.params, twin.seed))
    grown += [(twin.slot, index, twin.table[index]) for index in range(known, WIDTH)]
  for step in range(8):
    batch, rows = make_step(rng, shape, twins)
    if step == 0:
      batch = dataclasses.replace(batch, new_blocks=tuple(grown))
    packed, logit_rows = packer.pack(batch, layout)
    inputs = jax.tree.map(np.asarray, unpack(layout, jnp.asarray(packed)))
    sampling = inputs.sampling
    token = line = 0
    for index, (twin, start, count, num_logits, samples) in enumerate(rows):
      params = twin.params
      assert inputs.query_starts[index] == token and inputs.kv_lens[index] == start + count
      assert inputs.block_tables[index].tolist() == twin.table
      for position in range(start, start + count):
        expected = twin.tokens[position] if position < len(twin.tokens) else -1 - twin.slot
        assert (inputs.tokens[token], inputs.positions[token]) == (expected, position)
        assert inputs.slot_mapping[token] == twin.table[position // BLOCK] * BLOCK + position % BLOCK
        token += 1
      numbers = []
      for back in range(num_logits - 1, -1, -1):
        final = samples and back == 0
        assert inputs.logit_tokens[line] == token - 1 - back
        assert sampling[Column.SLOT][line] == twin.slot and sampling[Column.POSITION][line] == start + count - back
        assert int(sampling[Column.SEED][line]) == twin.seed and sampling[Column.TOP_K][line] == params.top_k
        for column, value in (
          (Column.TEMPERATURE, params.temperature),
          (Column.TOP_P, params.top_p),
          (Column.MIN_P, params.min_p),
          (Column.PRESENCE, params.presence_penalty),
          (Column.FREQUENCY, params.frequency_penalty),
          (Column.REPETITION, params.repetition_penalty),
        ):
          assert sampling[column][line] == np.float32(value)
        flags = flags_of(params) if final else Flag(0)
        if final and start + count - twin.num_prompt < params.min_tokens:
          flags |= Flag.SUPPRESS
          stops = [*params.stop_token_ids, *(() if params.ignore_eos else EOS)]
          assert sampling.stop_ids[line].tolist() == stops + [-1] * (layout.num_stop_ids - len(stops))
        target = -1
        if not final and params.prompt_logprobs is not None:
          target = twin.tokens[start + count - back]
          flags |= Flag.LOGPROB | (Flag.TOP_LOGPROBS if params.prompt_logprobs else Flag(0))
          numbers.append(params.prompt_logprobs)
        elif final and (params.logprobs is not None or numbers):
          numbers.append(params.logprobs or 0)
        assert Flag(int(sampling[Column.FLAGS][line])) == flags and sampling[Column.TARGET][line] == target
        line += 1
      assert logit_rows.last[index] == line - 1
      assert logit_rows.wants.get(index, (0, ()))[1] == tuple(numbers)
      if numbers:
        assert logit_rows.wants[index][0] == line - len(numbers)
    # Padding: no token, the padding slot, block 0, no flags.
    rest = len(rows)
    assert inputs.num_tokens.tolist() == [token] and inputs.num_logit_rows.tolist() == [line]
    assert (inputs.query_starts[rest:] == token).all() and not inputs.kv_lens[rest:].any()
    for name in ("tokens", "positions", "slot_mapping"):
      assert not getattr(inputs, name)[token:].any()
    assert not inputs.block_tables[rest:].any() and not sampling[Column.FLAGS][line:].any()
    assert (sampling[Column.SLOT][line:] == SLOTS).all() and (sampling[Column.TARGET][line:] == -1).all()


def test_a_slot_forgets_its_former_request():
  packer = Packer(SLOTS, WIDTH, BLOCK, EOS)
  layout = packer.layout(StepShape(8, SLOTS, SLOTS))
  rich = SamplingParams(
    min_tokens=5, stop_token_ids=(9,), logprobs=3, prompt_logprobs=3, top_k=4, logit_bias=((4, 1.0),)
  )
  packer.admit(Admission(2, (5, 6, 7), 3, (11, 12, 13), rich, 99))
  packer.admit(Admission(2, (5,), 1, (14,), SamplingParams(temperature=0.0), 1))
  batch = Batch(0, StepShape(8, SLOTS, SLOTS), ("a",), (2,), (0,), (1,), (1,), (True,), ((5,),))
  packed, rows = packer.pack(batch, layout)
  inputs = unpack(layout, jnp.asarray(packed))
  assert not rows.wants
  assert int(inputs.sampling[Column.FLAGS][0]) == int(Flag.SAMPLE) and int(inputs.sampling[Column.SEED][0]) == 1
  assert inputs.block_tables[0].tolist() == [14] + [0] * (WIDTH - 1)


@pytest.mark.parametrize(("padded", "used"), [(0, [2, 1]), (2, [2, 1]), (6, [6, SLOTS])])
def test_padding_of_rows_is_computed_and_that_of_the_ladder_is_not(padded, used):
  packer = Packer(SLOTS, WIDTH, BLOCK, EOS)
  layout = packer.layout(StepShape(8, SLOTS, SLOTS))
  packer.admit(Admission(2, (5, 6), 2, (14,), SamplingParams(temperature=0.0), 1))
  batch = Batch(0, layout.shape, ("a",), (2,), (0,), (2,), (1,), (True,), ((5, 6),), padded_tokens=padded)
  inputs = unpack(layout, jnp.asarray(packer.pack(batch, layout)[0]))
  assert [*inputs.num_tokens.tolist(), *inputs.num_logit_rows.tolist()] == used


def test_each_step_has_memory_of_its_own():
  """The device may read a step's array after the next one is packed; so it is, unless the caller says where."""
  packer = Packer(SLOTS, WIDTH, BLOCK, EOS)
  layout = packer.layout(StepShape(8, SLOTS, SLOTS))
  empty = Batch(0, layout.shape, (), (), (), (), (), (), ())
  first, second = packer.pack(empty, layout)[0], packer.pack(empty, layout)[0]
  assert not np.shares_memory(first, second)


class PackedStep:
  """A step that the fake device runs: until it is done the device may read the array, and then its targets are read."""

  def __init__(self, step: Launched, done: Callable[[], None], *kept: tuple[np.ndarray, np.ndarray]):
    """Args: kept: what is there, and what must be."""
    self.step, self.done, self.kept = step, done, kept

  def result(self) -> StepResult:
    for array, written in self.kept:
      np.testing.assert_array_equal(array, written)
    self.done()
    return self.step.result()


class NumpyPacker(Packer):
  """Packs each step anew, and small ones like others."""

  def _is_small(self, batch, layout):
    return False


class PackingRunner:
  """Packs what the fake device runs twice: as a runner does, step after step, and by a packer that repeats nothing.

  Attributes: num_repeated, num_small: steps that repeated the one before, and those packed without numpy.
  """

  def __init__(self, config: EngineConfig, fake: FakeRunner, packer_class: type[Packer], simplifies: bool = False):
    """Args: simplifies: the rows of most slots need only values of the slot."""
    self.simplifies = simplifies
    width = -(-config.max_model_len // config.block_size)
    self.fake = fake
    self.packer = packer_class(config.max_num_seqs, width, config.block_size, config.eos_token_ids)
    self.fresh = NumpyPacker(config.max_num_seqs, width, config.block_size, config.eos_token_ids)
    self.layouts = {}
    self.free: dict[StepShape, list[np.ndarray]] = {}
    self.num_repeated = self.num_small = 0

  def launch(self, batch: Batch) -> Launched:
    layout = self.layouts.setdefault(batch.shape, self.packer.layout(batch.shape))
    for admission in batch.admissions:
      if self.simplifies and admission.slot % 4:
        params = dataclasses.replace(admission.params, min_tokens=0, logprobs=None, prompt_logprobs=None)
        admission = dataclasses.replace(admission, params=params)
      self.packer.admit(admission)
      self.fresh.admit(admission)
    before = self.packer._latest
    free = self.free.setdefault(batch.shape, [])
    packed, rows = self.packer.pack(batch, layout, free.pop() if free else np.full(layout.size, 99, np.int32))
    repeated = before is not None and self.packer._latest is before
    self.num_repeated += repeated
    self.num_small += not repeated and self.packer._is_small(batch, layout)
    self.fresh._latest = None
    expected, expected_rows = self.fresh.pack(batch, layout)
    np.testing.assert_array_equal(packed, expected)
    np.testing.assert_array_equal(rows.last, expected_rows.last)
    np.testing.assert_array_equal(rows.targets, expected_rows.targets)
    assert (rows.wants, rows.plain) == (expected_rows.wants, expected_rows.plain)
    assert rows.drafts == expected_rows.drafts
    kept = (packed, expected), (rows.targets, list(expected_rows.targets))
    return PackedStep(self.fake.launch(batch), lambda: free.append(packed), *kept)


def pack_a_world(seed: int, packer_class: type[Packer] = Packer) -> int:
  """A random life with preemptions, aborts and slots that change hands; returns how many steps were repeated."""
  world = World(seed, overlap=True, host_pool=False)
  runner = world.engine._runner = PackingRunner(world.config, world.runner, packer_class)
  for _ in range(120):
    world.random_op()
  world.drain()
  return runner.num_repeated


def test_a_repeated_step_equals_a_fresh_one():
  assert sum(pack_a_world(seed) for seed in range(40)) > 200


def pack_a_world_with_drafts(seed: int, packer_class: type[Packer] = Packer) -> tuple[int, int]:
  """The same with drafts and rows behind drafts; returns the numbers of small steps and of all drafts."""
  world = GuessingWorld(seed)
  runner = world.engine._runner = PackingRunner(world.config, world.runner, packer_class, simplifies=True)
  for _ in range(80):
    world.random_op()
  world.drain()
  return runner.num_small, world.num_drafts


def test_a_small_step_equals_one_by_numpy():
  num_small, num_drafts = map(sum, zip(*map(pack_a_world_with_drafts, range(40)), strict=True))
  assert num_small > 200 and num_drafts > 200


def pack_masks(_: int = 0, packer_class: type[Packer] = Packer) -> None:
  """Packs a step with masks after the drafts of two rows."""
  layout = Packer(SLOTS, WIDTH, BLOCK, EOS).layout(StepShape(12, SLOTS, 12))
  drafts = (3, 0, 2, 0, 2)
  batch = Batch(
    step=0,
    shape=layout.shape,
    request_ids=tuple("abcde"),
    slots=(4, 0, 1, 5, 2),
    starts=(3, 8, 5, 1, 2),
    counts=tuple(1 + count for count in drafts),
    num_logits=tuple(1 + count for count in drafts),
    samples=(True,) * 5,
    token_ids=((-1, 7, 8, 9), (), (3, 4, 5), (6,), (1, 2, 3)),
    num_drafts=drafts,
  )
  found = []
  for packer in (packer_class(SLOTS, WIDTH, BLOCK, EOS), NumpyPacker(SLOTS, WIDTH, BLOCK, EOS)):
    for slot in batch.slots:
      blocks = tuple(range(10 * slot + 1, 10 * slot + 5))
      params = SamplingParams(temperature=0.5, top_k=slot, seed=slot)
      packer.admit(Admission(slot, (5, 6), 2, blocks, params, slot, constrained=slot in (1, 4, 5)))
    found.append(packer.pack(batch, layout))
    assert packer._is_small(batch, layout) is not isinstance(packer, NumpyPacker)
  (packed, rows), (expected, expected_rows) = found
  np.testing.assert_array_equal(packed, expected)
  assert rows == expected_rows


def test_a_small_step_with_masks_equals_one_by_numpy():
  pack_masks()


@pytest.mark.parametrize(
  "old, new",
  [
    ("        values[tables + row * width + index] = block\n", "        pass\n"),
    ("self._begins[(1 - start) % block_size]", "self._begins[(2 - start) % block_size]"),
    ('"positions", "slot_mapping", "kv_lens"', '"positions", "slot_mapping"'),
    ('      _field(layout, advance, "columns")[Column.POSITION, :rows] = 1\n', ""),
    ("self._advance, out=packed)\n", "self._advance, out=self._packed); packed[:] = self._packed\n"),
    ("live[Column.TARGET].tolist()", "live[Column.TARGET]"),
    ("    packed.fill(0)\n", ""),
    ("plain = not suppresses and ", "plain = "),
  ],
)
def test_a_bug_in_repeating_is_caught(old: str, new: str):
  with pytest.raises(AssertionError):
    run_seeded(old, new, pack_a_world, 60)


@pytest.mark.parametrize(
  ("old", "new"),
  [
    ("behind_slots.append(slot + 1 if is_behind else 0)", "behind_slots.append(0)"),
    ("columns[Column.NUM_DRAFTS] += range(count)", "columns[Column.NUM_DRAFTS] += range(1, count + 1)"),
    ("      and batch.counts == self._counts\n", ""),
    ("      and batch.behind == self._behind\n", ""),
    ("      self._intricate.add(slot)\n", "      pass\n"),
    ("self._latest = self._small = None", "self._latest = None"),
    ("        tokens[first] = -1 - slot\n", "        pass\n"),
    ("[position + 1 for position in positions]", "positions"),
  ],
)
def test_a_bug_in_a_small_step_is_caught(old: str, new: str):
  with pytest.raises(AssertionError):
    run_seeded(old, new, pack_a_world_with_drafts, 60)


def test_a_bug_in_the_masks_of_a_small_step_is_caught():
  with pytest.raises(AssertionError):
    run_seeded("        num_masks += count - 1\n", "        num_masks += count\n", pack_masks, 1)


def run_seeded(old: str, new: str, pack: Callable[[int, type[Packer]], object], num_worlds: int) -> None:
  """Packs worlds by a module in which `new` is in place of `old`."""
  source = Path(step_packer.__file__).read_text()
  assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
  module = types.ModuleType("seeded_step_packer")
  sys.modules[module.__name__] = module
  try:
    exec(compile(source.replace(old, new), "seeded step_packer.py", "exec"), module.__dict__)
    for seed in range(num_worlds):
      pack(seed, module.Packer)
  finally:
    del sys.modules[module.__name__]


def test_only_the_same_decodes_one_position_on_are_repeated():
  """Other rows, though as many and as far; and one batch launched many times, as measurements do."""
  packer = Packer(SLOTS, WIDTH, BLOCK, EOS)
  layout = packer.layout(StepShape(8, SLOTS, SLOTS))
  params = SamplingParams(temperature=0.0)
  for slot in (1, 2, 3):
    packer.admit(Admission(slot, (5, 6), 2, (10 * slot + 1, 10 * slot + 2), params, 1))

  def make(*rows: tuple[int, int], token_ids: tuple[int, ...] = ()) -> Batch:
    slots, starts = zip(*rows, strict=True)
    ones = (max(1, len(token_ids)),) * len(rows)
    ids = tuple(map(str, slots))
    num_rows = len(rows)
    return Batch(
      0, layout.shape, ids, slots, starts, ones, (1,) * num_rows, (True,) * num_rows, (token_ids,) * num_rows
    )

  for batch in (
    make((1, 2), (2, 3)),
    make((1, 2), (2, 3)),
    make((2, 3), (1, 4)),
    make((2, 4), (3, 5)),
    make((2, 5), (3, 6)),
    make((1, 1), token_ids=(7, 8)),
    make((1, 2), token_ids=(7, 8)),
  ):
    inputs = unpack(layout, jnp.asarray(packer.pack(batch, layout)[0]))
    count = batch.counts[0]
    for row, (slot, start) in enumerate(zip(batch.slots, batch.starts, strict=True)):
      token = row * count
      positions = list(range(start, start + count))
      assert inputs.positions[token : token + count].tolist() == positions
      assert int(inputs.kv_lens[row]) == start + count
      blocks = [10 * slot + 1 + position // BLOCK for position in positions]
      places = [block * BLOCK + position % BLOCK for block, position in zip(blocks, positions, strict=True)]
      assert inputs.slot_mapping[token : token + count].tolist() == places
