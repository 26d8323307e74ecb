"""The fake device goes wrong as a real one would, and a client can know what it must get."""

import dataclasses
import json
import subprocess
import sys
import time

import pytest

from engine.batch import Admission, Batch
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.request import FinishReason, fold_seed
from engine.sampling_params import SamplingParams
from engine.shapes import StepShape
from extensions.fake_device.build import build_fake
from extensions.fake_device.device import FakeDevice, expected_tokens, logprob

CONFIG = EngineConfig(
  vocab_size=1000,
  max_model_len=64,
  num_blocks=16,
  block_size=4,
  token_budgets=(16,),
  prefill_chunk=16,
  max_num_seqs=4,
  eos_token_ids=(2,),
)
PROMPT = tuple(range(10, 20))
PARAMS = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, seed=2**40 + 5, ignore_eos=True)


def expected(prompt=PROMPT, params=PARAMS, seed=None):
  return expected_tokens(prompt, params, seed, vocab_size=CONFIG.vocab_size, eos_token_ids=CONFIG.eos_token_ids)[0]


@pytest.mark.parametrize("vocab_size", [3, 20, 25, 1000])
def test_alternatives_are_tokens_of_the_vocabulary(vocab_size):
  for token in {0, 1, 2, vocab_size // 2, vocab_size - 1}:
    entry = logprob(token, 12345, 20, vocab_size)
    ids = [alternative for alternative, _ in entry.top]
    assert len(ids) == len(set(ids)) == min(20, vocab_size) and ids[0] == token
    assert all(0 <= alternative < vocab_size for alternative in ids)


class Driver:
  """One request by hand on the device, in slot 0."""

  def __init__(self, device: FakeDevice, table: tuple[int, ...] = (3, 1, 4, 5, 9), params: SamplingParams = PARAMS):
    self.device, self.params, self.table = device, params, table
    self.tokens = list(PROMPT)
    self.steps = 0

  def step(self, start: int, count: int, *, admit: bool = False, inputs: tuple[int, ...] | None = None) -> int:
    end = start + count
    admission = Admission(0, tuple(self.tokens), len(PROMPT), self.table, self.params, fold_seed(self.params.seed or 0))
    batch = Batch(
      step=self.steps,
      shape=StepShape(16, 4, 4),
      request_ids=("r",),
      slots=(0,),
      starts=(start,),
      counts=(count,),
      num_logits=(1,),
      samples=(end == len(self.tokens),),
      token_ids=(tuple(self.tokens[start:end]) if inputs is None else inputs,),
      admissions=(admission,) if admit else (),
    )
    self.steps += 1
    (token,) = self.device.launch(batch).result().tokens
    if end == len(self.tokens):
      self.tokens.append(token)
    return token

  def decode(self) -> int:
    return self.step(len(self.tokens) - 1, 1, inputs=())


def started(device: FakeDevice, **options) -> Driver:
  driver = Driver(device, **options)
  driver.step(0, 6, admit=True)
  driver.step(6, 4)
  return driver


def test_chunks_and_decodes_give_the_expected_tokens():
  driver = started(FakeDevice(CONFIG))
  for _ in range(7):
    driver.decode()
  assert tuple(driver.tokens[len(PROMPT) :]) == expected()


def test_a_prefix_in_other_pages_gives_the_expected_tokens():
  device = FakeDevice(CONFIG)
  started(device)
  shared = Driver(device, table=(3, 1, 7, 8))
  assert shared.step(8, 2, admit=True) == expected()[0]
  assert shared.decode() == expected()[1]


def test_a_wrong_page_changes_the_tokens():
  driver = started(FakeDevice(CONFIG))
  driver.device._slots[0].table[1] = 6
  assert driver.decode() != expected()[1]


@pytest.mark.parametrize("block", [3, 4], ids=["full", "partial"])
def test_an_overwritten_page_changes_the_tokens(block):
  driver = started(FakeDevice(CONFIG))
  other = Driver(driver.device, table=(block,))
  other.tokens = [7]
  batch = Batch(
    step=2,
    shape=StepShape(16, 4, 4),
    request_ids=("other",),
    slots=(1,),
    starts=(0,),
    counts=(1,),
    num_logits=(1,),
    samples=(True,),
    token_ids=((7,),),
    admissions=(Admission(1, (7,), 1, (block,), PARAMS, 1),),
  )
  driver.device.launch(batch).result()
  assert driver.decode() != expected()[1]
  assert driver.decode() != expected()[2]


def test_a_lost_recompute_changes_the_tokens():
  driver = started(FakeDevice(CONFIG))
  again = Driver(driver.device, table=(10, 11, 12, 13))
  again.tokens = list(driver.tokens)
  assert again.step(8, 3, admit=True) != expected()[1]


def test_a_stale_page_changes_the_tokens():
  """The first chunk of another prompt under the table of this one."""
  driver = started(FakeDevice(CONFIG))
  other = Driver(driver.device)
  other.tokens[2] += 1
  assert other.step(8, 2, admit=True) != expected((*PROMPT[:2], PROMPT[2] + 1, *PROMPT[3:]))[0]


@pytest.mark.parametrize(
  "changed",
  [{"temperature": 0.9}, {"top_p": 0.8}, {"top_k": 3}, {"repetition_penalty": 1.5}, {"logit_bias": ((3, 1),)}],
)
def test_parameters_shape_the_tokens(changed):
  assert expected(params=dataclasses.replace(PARAMS, **changed)) != expected()


@pytest.mark.catalogue("D10")
def test_greedy_ignores_the_seed_and_sampling_does_not():
  greedy = dataclasses.replace(PARAMS, temperature=0.0)
  assert expected(params=greedy) == expected(params=greedy, seed=9)
  assert expected() != expected(seed=9)


def test_floats_are_those_of_protobuf():
  assert expected(params=dataclasses.replace(PARAMS, temperature=0.800000011920929)) == expected()


def test_endings_and_minimum():
  def ending(**changed):
    params = dataclasses.replace(PARAMS, max_tokens=400, ignore_eos=False, **changed)
    return expected_tokens(PROMPT, params, vocab_size=1000, eos_token_ids=(2,))

  tokens, reason = ending()
  assert reason is FinishReason.STOP and 2 not in tokens and len(tokens) < 400
  longer, _ = ending(min_tokens=len(tokens) + 5)
  assert len(longer) >= len(tokens) + 5 and longer[: len(tokens)] == tokens
  only, _ = ending(allowed_token_ids=(2, 5, 6), min_tokens=20)
  assert set(only[:20]) == {5, 6}


def test_chance_needs_a_seed():
  with pytest.raises(ValueError, match="without a seed"):
    expected(params=dataclasses.replace(PARAMS, seed=None))


def test_steps_take_their_time_one_after_the_other():
  now, slept = [100.0], []
  device = FakeDevice(CONFIG, step_s=2.0, clock=lambda: now[0])
  driver = Driver(device)

  def sleep(seconds):
    slept.append(seconds)
    now[0] += seconds

  original, time.sleep = time.sleep, sleep
  try:
    driver.step(0, 6, admit=True)
    now[0] += 0.5  # the host does something else: the device had not been told of a step
    driver.step(6, 4)
    first = device._ready_at
    batches = [device.launch(Batch(9 + i, StepShape(16, 4, 4), (), (), (), (), (), (), ())) for i in range(2)]
    now[0] += 1.5
    for launched in batches:
      launched.result()
  finally:
    time.sleep = original
  assert slept == [2.0, 2.0, 0.5, 2.0] and first == 104.5


def test_a_client_needs_no_jax():
  code = (
    "import sys, extensions.fake_device.device, extensions.fake_device.build; "
    "print([m for m in ('jax', 'numpy') if m in sys.modules])"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert done.stdout.strip() == "[]"


def test_overlap_is_the_flags_word(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1000, "max_position_embeddings": 64}))

  def built(**settings):
    return build_fake(str(tmp_path), settings, 0.001, lambda events: None).config.overlap

  assert [built(), built(overlap="auto"), built(overlap="true"), built(overlap="false")] == [True, True, True, False]
  with pytest.raises(ConfigError, match="overlap='no' must be one of auto, true, false; set --overlap"):
    built(overlap="no")
