"""Proposals of a draft model: they serve while they agree with the output, and where drafts pay."""

import dataclasses
import json
from pathlib import Path
import random
from typing import Any

import pytest

from engine.batch import Batch, StepResult
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.settings import DeviceSettings, SchedulingSettings, check_draft_model
from engine.snapshot import restore_scheduler, scheduler_state
from engine.speculation.drafter import NO_DRAFT, Draft
from engine.speculation.model_drafter import MODEL, JointDrafter, ModelDrafter
from engine.validation import allowed_speculation
from tests.engine.speculation.proposing import ProposingWorld
from tests.engine.speculation.test_speculation import CONFIG, Script, flat
from tools import replay


def make_request(prompt: list[int], outputs: list[int], **more) -> Request:
  request = Request("a", prompt, SamplingParams(max_tokens=50), **more)
  request.output_token_ids += outputs
  return request


def test_a_proposal_serves_while_the_output_agrees_with_it():
  drafter = ModelDrafter()
  request = make_request([1, 2], [3])
  assert not drafter.update(request) and drafter.propose(request, 4) == NO_DRAFT
  drafter.take_proposal("a", 3, (4, 5, 6))
  assert drafter.update(request) and drafter.propose(request, 2) == Draft((4, 5), MODEL)
  request.output_token_ids.append(4)  # the token in flight came out as proposed
  assert drafter.update(request) and drafter.propose(request, 4) == Draft((5, 6), MODEL)
  request.output_token_ids.append(9)
  assert drafter.propose(request, 4) == NO_DRAFT
  drafter.take_proposal("a", 5, (7,))
  assert drafter.propose(request, 4) == Draft((7,), MODEL)
  request.output_token_ids.append(7)
  assert not drafter.update(request) and drafter.propose(request, 4) == NO_DRAFT
  drafter.forget("a")
  assert drafter.state() == {}


def test_long_matches_come_before_the_model_and_requests_choose():
  copied, fresh = list(range(20, 40)) + list(range(20, 30)), list(range(20, 40)) + [20, 21]
  cases = [
    (copied, "", "prompt8"),
    (copied, "ngram", "prompt8"),
    (copied, MODEL, MODEL),
    (fresh, "", MODEL),
    (fresh, "ngram", "prompt2"),
    (fresh, "auto", MODEL),
  ]
  for prompt, speculation, source in cases:
    model = ModelDrafter()
    drafter = JointDrafter(model)
    request = make_request(prompt, [], speculation=speculation)
    model.take_proposal("a", len(prompt), (5, 6))
    assert drafter.update(request) and drafter.propose(request, 3).source == source, (prompt, speculation)
  drafter = JointDrafter(ModelDrafter())
  request = make_request(fresh, [])
  assert drafter.update(request) and drafter.propose(request, 3).source == "prompt2"  # nothing was proposed


class ProposedScript(Script):
  """A device with a draft model, of whose tokens a share is right. Passes of it take time."""

  def __init__(self, config: EngineConfig, texts, seconds, right: float, pass_seconds: float):
    super().__init__(config, texts, seconds)
    self._right, self._pass_seconds = right, pass_seconds

  def _values(self, batch: Batch) -> StepResult:
    self.now += self._pass_seconds * batch.num_proposals
    result = super()._values(batch)
    found = {}
    for row, name in enumerate(batch.request_ids if batch.num_proposals else ()):
      if batch.samples[row]:
        prompt, answer = self.texts[name]
        drafts = batch.num_drafts[row] if batch.num_drafts else 0
        at = batch.starts[row] + batch.counts[row] - drafts + len(result.tokens_of(row)) - len(prompt)
        rng = random.Random(f"{name} {at}")
        truth = (*answer[at:], *range(9))[: batch.num_proposals]
        found[row] = tuple(token if rng.random() < self._right else 999 for token in truth)
    return dataclasses.replace(result, proposals=found)


def fresh_text(seed: int, length: int = 200) -> tuple[list[int], list[int]]:
  """A text without repetitions."""
  tokens = random.Random(seed).sample(range(990), 20 + length)
  return tokens[:20], tokens[20:]


def run_script(right: float, pass_seconds: float, overlap: bool, names: str = "a", **more) -> tuple[float, int, int]:
  """Returns the speed-up over no speculation, and the steps with proposals and with drafts."""
  texts = {name: fresh_text(number) for number, name in enumerate(names)}
  config = dataclasses.replace(CONFIG, speculation=MODEL, has_draft_model=True, overlap=overlap, **more)
  plain = Script(dataclasses.replace(config, speculation="none"), texts, flat).run()
  script = ProposedScript(config, texts, flat, right, pass_seconds).run()
  proposing = sum(batch.num_proposals > 0 for batch in script.batches)
  return plain.now / script.now, proposing, sum(any(batch.num_drafts) for batch in script.batches)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("names", ["a", "abcd"])
def test_good_and_cheap_proposals_pay(overlap: bool, names: str):
  speed_up, proposing, drafted = run_script(0.9, 0.0001, overlap, names)
  assert speed_up > 1.7 and proposing < 1.4 * drafted + 8, (speed_up, proposing, drafted)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("right", "pass_seconds", "most"), [(0.9, 0.02, 5), (0.0, 0.0001, 24)])
def test_proposals_that_do_not_pay_are_tried_only(right: float, pass_seconds: float, most: int, overlap: bool):
  """Too slow: only to measure them. Never right: less and less often."""
  speed_up, proposing, _ = run_script(right, pass_seconds, overlap)
  assert 3 <= proposing <= most, (speed_up, proposing)


def test_requests_without_drafts_of_the_model_cost_no_pass():
  config = dataclasses.replace(CONFIG, speculation="auto", has_draft_model=True)
  for speculation in ("none", "ngram"):
    script = ProposedScript(config, {}, flat, 1.0, 0.0)
    prompt, answer = fresh_text(1)
    script.texts, script.outputs = {"a": (prompt, answer)}, {"a": []}
    params = SamplingParams(max_tokens=len(answer), seed=1)
    script.scheduler.add_request(Request("a", prompt, params, speculation=speculation))
    script.run()
    assert not any(batch.num_proposals for batch in script.batches)


@pytest.mark.parametrize("overlap", [False, True])
def test_proposals_change_nothing_but_the_number_of_steps(overlap: bool):
  """Random worlds check each output, log probability, finish and block."""
  num_drafts = num_unknown = 0
  for seed in range(10):
    world = ProposingWorld(seed, overlap)
    for number in range(100):
      if number % 20 == 0:
        for _ in range(6):
          world.submit()
      world.random_op()
    world.drain()
    num_drafts, num_unknown = num_drafts + world.num_drafts, num_unknown + world.num_unknown
    speculation = world.scheduler._speculation
    assert speculation is not None and speculation.model is not None and not speculation.model.state()
  assert num_drafts > 150 and (num_unknown > 20 if overlap else not num_unknown), (num_drafts, num_unknown)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_trace_with_proposals_replays(overlap: bool, tmp_path: Path):
  """From the first step, and from one in the middle, with proposals known and in flight."""
  num_drafts = num_known = 0
  for seed in range(6):
    world = ProposingWorld(seed, overlap, at_random=False)
    begin = seed * 25
    for number in range(150):
      if number == begin:
        world.engine.start_trace(str(tmp_path / "trace"))
      world.random_op()
    world.drain()
    world.engine.stop_trace()
    world.step()
    lines = (tmp_path / "trace").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    num_drafts += sum(sum((entry.get("batch") or {}).get("num_drafts", ())) for entry in entries)
    num_known += len(entries[0]["scheduler"]["speculation"]["proposals"])
    replayed = replay.replay(lines)
    assert replayed.difference is None and replayed.num_batches > 10
  assert num_drafts > 30 and num_known > 0, (num_drafts, num_known)


def test_a_restored_scheduler_proposes_alike():
  config = dataclasses.replace(CONFIG, speculation="auto", has_draft_model=True)
  texts = {name: fresh_text(number, 60) for number, name in enumerate("abc")}
  script = ProposedScript(config, texts, flat, 0.8, 0.0001)
  number = 0
  while script.scheduler.num_running or script.scheduler.num_waiting:
    number += 1
    if number % 5 == 0:
      twin = restore_scheduler(json.loads(json.dumps(scheduler_state(script.scheduler))))
      assert scheduler_state(twin) == scheduler_state(script.scheduler)
      script.scheduler = twin
    batch = script.scheduler.schedule(script.now)
    if batch is not None:
      script.batches.append(batch)
      script.commit(batch)
  assert script.num_drafts > 50


def test_settings_that_exclude_a_draft_model_are_refused():
  def check(path: str, num_devices: int = 1, **scheduling: Any) -> None:
    settings: dict[str, Any] = {"speculation": MODEL} | scheduling
    check_draft_model(DeviceSettings(draft_model=path, num_devices=num_devices), SchedulingSettings(**settings))

  check("d")
  check("", speculation="auto")
  cases: list[tuple[str, dict[str, Any]]] = [
    ("speculation=none; leave out --draft_model, or set --speculation=draft or auto", {"speculation": "none"}),
    ("speculation=ngram", {"speculation": "ngram"}),
    ("batching=disaggregated", {"batching": "disaggregated"}),
    ("enable_lora=true", {"enable_lora": True}),
    ("num_devices=2", {"num_devices": 2}),
  ]
  for message, more in cases:
    with pytest.raises(ConfigError, match=f"draft_model=d does not go with {message}"):
      check("d", **more)
  with pytest.raises(ConfigError, match="speculation=draft needs a draft model; set --draft_model"):
    check("")


def test_a_request_may_have_less_than_the_server():
  cases = {
    ("none", False): ("none",),
    ("ngram", False): ("none", "ngram"),
    (MODEL, True): ("none", MODEL),
    ("auto", False): ("none", "ngram", "auto"),
    ("auto", True): ("none", "ngram", MODEL, "auto"),
  }
  for (speculation, has_draft_model), allowed in cases.items():
    config = dataclasses.replace(CONFIG, speculation=speculation, has_draft_model=has_draft_model)
    assert allowed_speculation(config) == allowed
