"""Drafts of the scheduler, on a device that follows a script: fewer steps for copies, none where they do not pay.

Times are counted, not measured: a step takes what a function of its tokens says.
"""

from collections import Counter
from collections.abc import Callable
import dataclasses
import json
import logging
from pathlib import Path
import random
from typing import Any

import pytest

from engine.batch import IN_FLIGHT, Batch, StepResult
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.recorder import batch_line
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.snapshot import restore_scheduler, scheduler_state
from tests.engine.speculation.guessing import GuessingDrafter, GuessingWorld, guessing_config
from tests.engine.world import World
from tests.fakes import small_config
from tools import replay
from tools.chaos.server.books import check_scheduler

CONFIG = small_config(
  vocab_size=1000,
  max_model_len=1024,
  num_blocks=400,
  token_budgets=(8, 16, 64),
  max_num_seqs=64,
  prefill_chunk=64,
  speculation="ngram",
  overlap=False,
  computes_padding=False,
  queue_timeout_s=0.0,
  request_timeout_s=0.0,
)


def flat(num_tokens: int) -> float:
  return 0.01


def linear(num_tokens: int) -> float:
  return 0.01 * num_tokens


def square(num_tokens: int) -> float:
  return 0.01 * num_tokens**2


class Script:
  """A scheduler, and a device that gives each request the tokens written for it.

  Attributes:
    batches: all steps so far.
    outputs: tokens so far by request.
    now: virtual seconds.
  """

  def __init__(self, config: EngineConfig, texts: dict[str, tuple[list[int], list[int]]], seconds: Callable):
    """Args: texts: prompt and answer by request. seconds: of a step, by its tokens."""
    self.scheduler = Scheduler(config)
    self.texts, self.seconds, self.now = texts, seconds, 0.0
    self.batches: list[Batch] = []
    self.outputs: dict[str, list[int]] = {name: [] for name in texts}
    for name, (prompt, answer) in texts.items():
      self.scheduler.add_request(Request(name, prompt, SamplingParams(max_tokens=len(answer), seed=1)))

  def _values(self, batch: Batch) -> StepResult:
    tokens, ends = [], []
    for row, name in enumerate(batch.request_ids):
      answer, at = self.texts[name][1], len(self.outputs[name])
      drafts = batch.token_ids[row][-batch.num_drafts[row] :] if batch.num_drafts and batch.num_drafts[row] else ()
      found = [answer[at]] if batch.samples[row] else [0]
      for number, draft in enumerate(drafts, 1):
        if draft != found[-1]:
          break
        found.append(answer[at + number])
      tokens += found
      ends.append(len(tokens))
    return StepResult(tokens, row_ends=tuple(ends) if batch.num_drafts else ())

  def commit(self, batch: Batch) -> None:
    """Gives the scheduler the values of a launched step; the clock has passed its time."""
    self.now += self.seconds(batch.num_tokens)
    for event in self.scheduler.commit(batch, self._values(batch), self.now):
      self.outputs[event.request_id] += event.token_ids
    check_scheduler(self.scheduler)

  def run(self) -> "Script":
    """Runs to the end, with overlap if the settings have it."""
    in_flight = None
    while self.scheduler.num_running or self.scheduler.num_waiting:
      batch = self.scheduler.schedule(self.now)
      if batch is not None:
        self.batches.append(batch)
      if self.scheduler.config.overlap:
        batch, in_flight = in_flight, batch
      if batch is not None:
        self.commit(batch)
    if in_flight is not None:
      self.commit(in_flight)
    assert self.outputs == {name: answer for name, (_, answer) in self.texts.items()}
    assert self.scheduler.pool.num_used == 0
    return self

  @property
  def num_drafts(self) -> int:
    return sum(sum(batch.num_drafts) for batch in self.batches)


def copy_text(seed: int, length: int = 60) -> tuple[list[int], list[int]]:
  """A prompt without repetitions, and an answer that copies it."""
  prompt = random.Random(seed).sample(range(1000), length)
  return prompt, prompt[1:50]


def new_text(seed: int, length: int = 200) -> tuple[list[int], list[int]]:
  """Tokens of few words: pairs occur again all the time, and what follows differs."""
  rng = random.Random(seed)
  return [rng.randrange(12) for _ in range(60)], [rng.randrange(12) for _ in range(length)]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_copy_takes_fewer_steps(overlap: bool):
  config = dataclasses.replace(CONFIG, overlap=overlap)
  plain = Script(dataclasses.replace(config, speculation="none"), {"a": copy_text(1)}, flat).run()
  drafted = Script(config, {"a": copy_text(1)}, flat).run()
  assert len(plain.batches) >= 49 and len(drafted.batches) < 20 and drafted.now < 0.5 * plain.now
  known = [tokens[0] == IN_FLIGHT for batch in drafted.batches for tokens in batch.token_ids if tokens]
  assert any(known) == overlap


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_begin_with_one_draft_and_grow_as_drafts_are_accepted(overlap: bool):
  def seconds(num_tokens: int) -> float:
    return 0.01 + 0.001 * num_tokens

  config = dataclasses.replace(CONFIG, overlap=overlap)
  script = Script(config, {"a": copy_text(1)}, seconds).run()
  counts = [batch.num_drafts[0] for batch in script.batches if batch.num_drafts]
  assert counts[:3] == [1, 1, 1] and max(counts) == 7 and counts.index(7) > 3
  script = Script(dataclasses.replace(config, computes_padding=True), {"a": copy_text(1)}, flat).run()
  counts = [batch.num_drafts[0] for batch in script.batches if batch.num_drafts]
  assert counts[0] == 7, "to the edge of the rung, where padding is computed"


@pytest.mark.parametrize("overlap", [False, True])
def test_where_drafts_fail_trials_are_short(overlap: bool):
  def seconds(num_tokens: int) -> float:
    return 0.01 + 0.001 * num_tokens

  script = Script(dataclasses.replace(CONFIG, overlap=overlap), {"a": new_text(3, 900)}, seconds).run()
  counts = [sum(batch.num_drafts) for batch in script.batches if batch.num_drafts]
  assert counts and sum(count == 1 for count in counts) >= 0.7 * len(counts), counts


@pytest.mark.parametrize("overlap", [False, True])
def test_a_limit_keeps_steps_with_drafts_short(overlap: bool):
  def seconds(num_tokens: int) -> float:
    return 0.01 + 0.001 * num_tokens

  def most_drafts(**changes: Any) -> int:
    """Returns the most drafts of a step after those that measure each size."""
    config = dataclasses.replace(CONFIG, overlap=overlap, **changes)
    text = [*range(400)]
    script = Script(config, {"a": (text, text[1:])}, seconds).run()
    return max(sum(batch.num_drafts) for batch in script.batches if batch.num_drafts and batch.step > 50)

  assert most_drafts() == most_drafts(draft_step_limit=9.0) == 7
  assert most_drafts(draft_step_limit=1.35) == 3 and most_drafts(speculation="auto") == 2, "0.014 and 0.013 s"


@pytest.mark.parametrize("overlap", [False, True])
def test_where_plain_steps_are_longer_than_usual_drafts_hardly_lengthen_them(overlap: bool):
  """After 24 steps all later ones take twice as long. The first 62 tokens repeat nothing, then 200 copy the prompt."""
  texts = {"a": ([*range(400)], [*range(500, 562), *range(10, 210)])}

  def count_drafts(longer: float, draft_cost: float) -> int:
    config = dataclasses.replace(CONFIG, overlap=overlap, draft_step_limit=1.25)
    script = Script(config, texts, flat)
    script.seconds = lambda num_tokens: (
      (longer if len(script.outputs["a"]) > 24 else 1) * (0.01 + draft_cost * (num_tokens - 1))
    )
    return script.run().num_drafts

  assert count_drafts(1, 0.0003) > 100, "as long as ever: within the limit of 1.25"
  assert count_drafts(2, 0.0003) < 20, "a step with drafts would be among the longest"
  assert count_drafts(2, 0.0) > 100, "drafts cost nothing"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_restored_scheduler_knows_how_long_plain_steps_usually_are(overlap: bool):
  config = dataclasses.replace(CONFIG, overlap=overlap)
  script = Script(config, {"a": new_text(3)}, lambda num_tokens: 0.01 + 0.001 * num_tokens).run()
  saved = json.loads(json.dumps(scheduler_state(script.scheduler)))
  costs = saved["speculation"]["costs"]
  usual, high = costs["plain_quantiles"]
  assert 0.01 < usual <= high < 0.02
  twin = restore_scheduler(saved)
  assert scheduler_state(twin)["speculation"]["costs"] == costs
  del costs["plain_quantiles"]  # a trace of an earlier version
  assert scheduler_state(restore_scheduler(saved))["speculation"]["costs"]["plain_quantiles"] == [0.0, 0.0]


@pytest.mark.parametrize("overlap", [False, True])
def test_where_one_draft_is_too_long_requests_are_seldom_looked_at(overlap: bool):
  """Also if each request is a new one."""

  def seconds(num_tokens: int) -> float:
    return 0.01 if num_tokens == 1 else 0.014

  config = dataclasses.replace(CONFIG, overlap=overlap, speculation="auto")
  script = Script(config, {"a": copy_text(1)}, seconds).run()
  speculation, looks = script.scheduler._speculation, []
  assert speculation is not None and script.num_drafts > 0, "sizes were tried"
  update = speculation.drafter.update
  speculation.drafter.update = lambda request: looks.append(request.id) or update(request)
  for number in range(20):
    name = f"b{number}"
    script.texts[name], script.outputs[name] = (copy_text(1)[0], copy_text(1)[1][:20]), []
    script.scheduler.add_request(Request(name, script.texts[name][0], SamplingParams(max_tokens=20, seed=1)))
    script.run()
  assert len(looks) < 20, looks


def test_with_overlap_drafts_leave_a_position_to_the_next_step():
  """Or a row with rejected drafts near the end of its output would be planned alone."""
  config = dataclasses.replace(CONFIG, overlap=True)
  for length in range(20, 50):
    prompt, answer = copy_text(length)
    script = Script(config, {"a": (prompt, answer[:length])}, flat).run()
    ends = [batch.starts[0] + batch.counts[0] for batch in script.batches if batch.num_drafts]
    assert ends and max(ends) < len(prompt) + length - 1


@pytest.mark.parametrize("overlap", [False, True])
def test_several_copies_share_steps(overlap: bool):
  config = dataclasses.replace(CONFIG, overlap=overlap)
  texts = {name: copy_text(number) for number, name in enumerate("abcd")}
  plain = Script(dataclasses.replace(config, speculation="none"), texts, flat).run()
  drafted = Script(config, texts, flat).run()
  assert drafted.now < 0.6 * plain.now


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("text", [copy_text, new_text])
def test_where_time_grows_with_tokens_only_trials_are_drafted(text: Callable, overlap: bool):
  config = dataclasses.replace(CONFIG, overlap=overlap)
  texts = {name: text(number) for number, name in enumerate("abcd")}
  plain = Script(dataclasses.replace(config, speculation="none"), texts, linear).run()
  drafted = Script(config, texts, linear).run()
  # With overlap it tries both steps that wait and steps that do not.
  most = (1.08 if overlap else 1.05) * plain.now
  assert drafted.num_drafts <= 150 and drafted.now < most, (drafted.num_drafts, drafted.now, plain.now)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_text_that_no_draft_foresees_sleeps(overlap: bool):
  """Also where drafts cost nothing, it is tried less and less often."""
  config = dataclasses.replace(CONFIG, overlap=overlap)
  rng = random.Random(1)
  # What follows 5, 6 is new each time.
  answer = [token for number in range(180) for token in (5, 6, *range(10 + 3 * number, 13 + 3 * number))]
  script = Script(config, {"a": ([rng.randrange(800, 1000) for _ in range(20)], answer)}, flat).run()
  tries = [batch.step for batch in script.batches if batch.num_drafts]
  late = [step for step in tries if step > 300]
  assert 1 < len(tries) < 30 and len(late) < 10, (len(tries), len(late))


def test_a_full_ladder_takes_no_drafts_and_no_time():
  config = dataclasses.replace(CONFIG, token_budgets=(4,), max_num_seqs=4, prefill_chunk=4)
  texts = {name: ([1, 2, 3, 4], [1, 2, 3, 4] * 20) for name in "abcd"}
  script = Script(config, texts, flat).run()
  full = [batch for batch in script.batches if len(batch.slots) == 4]
  assert len(full) > 20 and not any(batch.num_drafts for batch in full) and any(batch.repeats for batch in full)


def test_beside_prompts_drafts_take_padding_alone():
  config = dataclasses.replace(CONFIG, batching="continuous", token_budgets=(8, 64), computes_padding=True)
  script = Script(config, {"a": copy_text(1)}, flat)
  while len(script.outputs["a"]) < 15:
    batch = script.scheduler.schedule(script.now)
    assert batch is not None
    script.batches.append(batch)
    script.commit(batch)
  script.texts["b"] = copy_text(2, 40)
  script.outputs["b"] = []
  script.scheduler.add_request(Request("b", script.texts["b"][0], SamplingParams(max_tokens=49)))
  script.texts["b"] = script.texts["b"][0], (script.texts["b"][1] * 2)[:49]
  batch = script.scheduler.schedule(script.now)
  assert batch is not None and batch.counts[1] == 40 and batch.shape.tokens == 64
  assert batch.num_drafts == (7, 0)
  script.commit(batch)
  script.run()


def test_drafts_take_free_blocks_alone_and_leave_one_for_each_request():
  config = dataclasses.replace(CONFIG, num_blocks=25, prefix_cache_scope="off", block_size=4)
  texts = {name: (copy_text(number)[0][:30], copy_text(number)[1][:15]) for number, name in enumerate("ab")}
  script = Script(config, texts, flat).run()
  assert script.scheduler.num_preemptions == 0 and script.num_drafts > 0
  texts = {name: (copy_text(number)[0][:40], copy_text(number)[1][:35]) for number, name in enumerate("abc")}
  assert Script(config, texts, flat).run().num_drafts > 0


@pytest.mark.parametrize("most", [1, 2, 7])
def test_num_speculative_tokens_limits_a_row(most: int):
  script = Script(dataclasses.replace(CONFIG, num_speculative_tokens=most), {"a": copy_text(1)}, flat).run()
  assert max(max(batch.num_drafts, default=0) for batch in script.batches) == most


class Broken:
  """A drafter that fails."""

  def update(self, request: Request) -> bool:
    raise ValueError("broken")

  propose = update

  def forget(self, request_id: str) -> None:
    raise ValueError("broken")


def test_a_drafter_that_fails_costs_drafts_alone_and_is_logged_once(caplog: pytest.LogCaptureFixture):
  texts = {name: copy_text(number) for number, name in enumerate("abc")}
  script = Script(CONFIG, texts, flat)
  assert script.scheduler._speculation is not None
  script.scheduler._speculation.drafter = Broken()  # type: ignore[assignment]
  with caplog.at_level(logging.ERROR):
    script.run()
  assert script.num_drafts == 0
  assert [record.message.split(";")[0] for record in caplog.records] == ["a drafter failed"]


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_waves_take_no_speculation(batching: str):
  with pytest.raises(ConfigError, match=f"speculation=ngram does not go with batching={batching}.*leave out"):
    dataclasses.replace(CONFIG, batching=batching)


def test_a_step_without_logit_rows_for_drafts_is_refused():
  with pytest.raises(ConfigError, match="max_num_seqs=1; set --max_num_seqs to 2 or more"):
    dataclasses.replace(CONFIG, max_num_seqs=1)


def test_a_model_that_generates_nothing_refuses_speculation():
  with pytest.raises(ConfigError, match="BertModel has no head of tokens; leave out --speculation"):
    dataclasses.replace(CONFIG, headless="BertModel")
  assert dataclasses.replace(CONFIG, headless="BertModel", speculation="none").headless


@pytest.mark.parametrize("overlap", [False, True])
def test_a_restored_scheduler_drafts_alike(overlap: bool):
  """From any step on, through JSON."""
  texts = {name: copy_text(number) if number % 2 else new_text(number, 60) for number, name in enumerate("abcde")}
  config = dataclasses.replace(CONFIG, overlap=overlap, num_blocks=90)
  script = Script(config, texts, flat)
  rng, in_flight, num_compared = random.Random(1), None, 0
  while script.scheduler.num_running or script.scheduler.num_waiting:
    if rng.random() < 0.2:
      twin = restore_scheduler(json.loads(json.dumps(scheduler_state(script.scheduler))))
      assert scheduler_state(twin) == scheduler_state(script.scheduler)
      script.scheduler = twin
      num_compared += 1
    batch = script.scheduler.schedule(script.now)
    if batch is not None:
      script.batches.append(batch)
    if overlap:
      batch, in_flight = in_flight, batch
    if batch is not None:
      script.commit(batch)
  alike = Script(config, texts, flat).run()
  lines, wanted = ([batch_line(batch, False) for batch in each.batches] for each in (script, alike))
  assert lines == wanted and num_compared > 5 and script.num_drafts > 50


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_drafts_change_nothing_but_the_number_of_steps(first: int, overlap: bool):
  """Each request gets the tokens of one served alone, its log probabilities and finish; and each block comes back."""
  drafts = accepted = unknown = preemptions = 0
  for seed in range(first, first + 20):
    world = GuessingWorld(seed, overlap)
    world.live()
    drafts, accepted = drafts + world.num_drafts, accepted + world.num_accepted
    unknown += world.num_unknown
    preemptions += world.scheduler.num_preemptions
  assert drafts > 150 and accepted > 100 and drafts - accepted > 50 and preemptions > 5
  assert unknown > 30 if overlap else not unknown


@pytest.mark.parametrize("overlap", [False, True])
def test_a_trace_with_drafts_replays(overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """From the first step, and from one in the middle, with drafts in flight."""
  drafter = GuessingDrafter(guessing_config(0), 0.7)
  monkeypatch.setattr("engine.speculation.speculation.NgramDrafter", lambda: drafter)
  num_drafts = 0
  for seed in range(6):
    world = World(seed, config=guessing_config(seed), overlap=overlap)
    begin = seed % 2 * 60
    for number in range(150):
      if number == begin:
        world.engine.start_trace(str(tmp_path / "trace"))
      world.random_op()
    world.drain()
    world.engine.stop_trace()
    world.step()
    lines = (tmp_path / "trace").read_text().splitlines()
    num_drafts += sum(sum((json.loads(line).get("batch") or {}).get("num_drafts", ())) for line in lines)
    replayed = replay.replay(lines)
    assert replayed.difference is None and replayed.num_batches > 10
  assert num_drafts > 50


def test_drafts_and_accepted_ones_are_counted():
  """In totals, by position and by step."""
  accepted = rejected = 0
  for seed in range(8):
    world = GuessingWorld(seed, prefix_cache_scope="off")
    for _ in range(100):
      world.random_op()
    world.drain()
    stats = world.engine.stats(1 << 20)
    counts = stats.drafts
    assert counts.tokens == world.num_drafts and counts.rows <= counts.tokens
    assert sum(step.num_drafts for step in stats.steps) == counts.tokens
    assert sum(step.num_accepted for step in stats.steps) == counts.accepted
    assert list(counts.accepted_at) == sorted(counts.accepted_at, reverse=True)
    # Results of requests that have ended or were preempted count, too.
    assert counts.accepted >= world.num_accepted
    accepted, rejected = accepted + counts.accepted, rejected + counts.tokens - counts.accepted
  assert accepted > 50 and rejected > 5


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_that_do_not_pay_leave_steps_that_repeat(overlap: bool):
  """A step planned from columns costs the host less than any draft could bring here."""
  config = dataclasses.replace(CONFIG, overlap=overlap)
  texts = {name: (copy_text(number)[0], copy_text(number)[0] * 4) for number, name in enumerate("abcd")}
  plain = Script(dataclasses.replace(config, speculation="none"), texts, square).run()
  drafted = Script(config, texts, square).run()
  counts = [sum(batch.repeats for batch in script.batches) for script in (plain, drafted)]
  assert counts[1] > 0.8 * counts[0] > 100, counts


def soak_drafts(num_ops: int, first: int = 0) -> Counter:
  """Random operations in worlds with drafts, each drained at its end, which finds every leak; returns totals."""
  totals, seed = Counter(), first
  while totals["operations"] < num_ops:
    world = GuessingWorld(seed)
    world.live(1000)
    totals["operations"] += world.num_ops
    totals["preemptions"] += world.scheduler.num_preemptions
    totals["accepted drafts"] += world.num_accepted
    totals["rejected drafts"] += world.num_drafts - world.num_accepted
    seed += 1
  return totals


@pytest.mark.long
def test_a_million_operations_with_rejected_drafts_leak_nothing():
  totals = soak_drafts(1_000_000)
  print(dict(totals))
  assert min(totals["preemptions"], totals["rejected drafts"], totals["accepted drafts"]) > 10_000
