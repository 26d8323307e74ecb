"""What drafts may cost, by counts: the credit alone, and bounds on whole runs at step times that are functions."""

from collections.abc import Callable
import dataclasses
import random

import pytest

from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.speculation.credit import (
  EARNED_SHARE,
  FIRST_CREDIT,
  FREE_COST,
  LEAST_CHARGE,
  LEAST_CREDIT,
  MOST_COST,
  DraftCredit,
)
from tests.engine.speculation.test_speculation import CONFIG, Script, copy_text, flat, linear, new_text, square


def demo(num_tokens: int) -> float:
  """Near the demo model's times on a CPU: eight tokens take less than twice as long as one."""
  return 0.312 + 0.043 * num_tokens


def test_steps_without_drafts_earn_a_share_and_costs_end_trials_then_drafts():
  credit = DraftCredit()
  credit.earn_steps(1000)
  assert credit.steps == FIRST_CREDIT, "no more is saved up"
  for _ in range(4):
    credit.charge_step(2.0, 1.0)
  assert not credit.allows_trials and credit.allows_drafts
  credit.charge_step(100.0, 1.0)
  assert credit.steps == 1.0 - MOST_COST, "one bad moment costs little"
  for _ in range(6):
    credit.charge_step(2.0, 1.0)
  assert credit.steps == LEAST_CREDIT and not credit.allows_drafts
  credit.earn_steps(2 / EARNED_SHARE)
  assert credit.steps == LEAST_CREDIT + 2 and credit.allows_drafts


def test_gains_pay_costs_back_but_are_no_credit_for_trials():
  credit = DraftCredit()
  credit.charge_step(1.0, 5.0)
  assert credit.steps == FIRST_CREDIT
  for _ in range(6):
    credit.charge_step(2.0, 1.0)
  credit.charge_step(1.5, 2.0)
  assert credit.steps == -1.5
  credit.charge_step(1.0, 8.0)
  assert credit.steps == 0 and not credit.allows_trials


def test_a_trial_that_fails_counts_as_a_step_unless_it_is_free():
  credit = DraftCredit()
  credit.charge_step(1.0 + FREE_COST / 2, 1.0)
  assert credit.steps == pytest.approx(FIRST_CREDIT - FREE_COST / 2)
  credit.charge_step(1.1, 1.0)
  assert credit.steps == pytest.approx(FIRST_CREDIT - FREE_COST / 2 - LEAST_CHARGE), "each delays its requests"
  credit.charge_step(1.3, 1.2)
  assert credit.steps == pytest.approx(FIRST_CREDIT - FREE_COST / 2 - LEAST_CHARGE - 0.1), "a draft was accepted"
  for _ in range(4):
    credit.charge_step(2.0, 1.0)
  least = credit.steps
  assert not credit.allows_trials
  credit.charge_step(1.1, 1.0)
  assert credit.steps == pytest.approx(least - 0.1), "proved drafts cost their time"


def serve_in_turn(speculation: str, overlap: bool, texts: list, seconds: Callable, at_once: int = 1) -> Script:
  """Serves texts, `at_once` of them at any time, with one scheduler."""
  config = dataclasses.replace(CONFIG, speculation=speculation, overlap=overlap)
  script, in_flight, waiting = Script(config, {}, seconds), None, list(enumerate(texts))
  while waiting or script.scheduler.num_running or script.scheduler.num_waiting or in_flight is not None:
    while waiting and script.scheduler.num_running + script.scheduler.num_waiting < at_once:
      number, (prompt, answer) = waiting.pop(0)
      name = str(number)
      script.texts[name], script.outputs[name] = (prompt, answer), []
      script.scheduler.add_request(Request(name, prompt, SamplingParams(max_tokens=len(answer), seed=1)))
    batch = script.scheduler.schedule(script.now)
    if batch is not None:
      script.batches.append(batch)
    if overlap:
      batch, in_flight = in_flight, batch
    if batch is not None:
      script.commit(batch)
  return script


def short_texts(seed: int, count: int, share_of_copies: float) -> list[tuple[list[int], list[int]]]:
  """Requests of which few are long enough to learn from."""
  rng = random.Random(seed)
  texts = []
  for number in range(count):
    prompt, answer = (copy_text if rng.random() < share_of_copies else new_text)(seed * 1000 + number)
    texts.append((prompt, answer[: rng.choice((6, 12, 20, 49))]))
  return texts


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seconds", [flat, demo, linear, square])
@pytest.mark.parametrize("at_once", [1, 4])
def test_drafts_that_fail_cost_a_share_of_the_time_and_a_few_steps(seconds: Callable, overlap: bool, at_once: int):
  """However short requests are, and whatever steps cost."""
  texts = short_texts(1, 60, 0.0)
  plain = serve_in_turn("none", overlap, texts, seconds, at_once)
  drafted = serve_in_turn("ngram", overlap, texts, seconds, at_once)
  most = FIRST_CREDIT - LEAST_CREDIT + MOST_COST
  assert drafted.num_drafts > 0
  assert drafted.now <= plain.now * (1 + EARNED_SHARE) + most * seconds(at_once), (drafted.now, plain.now)


@pytest.mark.parametrize("overlap", [False, True])
def test_where_drafts_cost_much_requests_without_copies_keep_their_speed(overlap: bool):
  """The gains of some requests pay for no trials of the others."""
  texts = short_texts(2, 100, 0.3)
  plain = serve_in_turn("none", overlap, texts, demo)
  drafted = serve_in_turn("ngram", overlap, texts, demo)
  is_copy = [answer == prompt[1 : 1 + len(answer)] for prompt, answer in texts]
  others = {str(number) for number, copies in enumerate(is_copy) if not copies}
  steps = [batch for batch in drafted.batches if batch.request_ids[0] in others and not batch.token_ids[0][1:]]
  tried = [batch for batch in drafted.batches if batch.request_ids[0] in others and batch.num_drafts]
  extra = sum(demo(batch.num_tokens) - demo(1) for batch in tried)
  assert tried and extra <= 0.02 * demo(1) * len(steps), (extra, len(tried), len(steps))
  assert drafted.now < 0.95 * plain.now, (drafted.now, plain.now)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seconds", [flat, demo])
def test_copies_keep_their_gain(seconds: Callable, overlap: bool):
  texts = [copy_text(number) for number in range(12)]
  plain = serve_in_turn("none", overlap, texts, seconds)
  drafted = serve_in_turn("ngram", overlap, texts, seconds)
  assert plain.now > 1.8 * drafted.now, (drafted.now, plain.now)


@pytest.mark.parametrize("overlap", [False, True])
def test_other_work_during_the_first_trials_does_not_end_drafts(overlap: bool):
  """Three steps four times as long as alone decided for thousands of steps that no draft pays."""
  slow = [4.0] * 3

  def disturbed(num_tokens: int) -> float:
    return demo(num_tokens) * (slow.pop() if 1 < num_tokens <= 8 and slow else 1.0)

  texts = [copy_text(number) for number in range(24)]
  plain = serve_in_turn("none", overlap, texts, demo)
  drafted = serve_in_turn("ngram", overlap, texts, disturbed)
  assert not slow and plain.now > 1.8 * drafted.now, (drafted.now, plain.now)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_whose_drafts_fail_is_charged(overlap: bool):
  config = dataclasses.replace(CONFIG, overlap=overlap)
  script = Script(config, {"a": new_text(1)}, linear)
  speculation, in_flight, drafted = script.scheduler._speculation, None, None
  assert speculation is not None
  credit, num_sampled = speculation.costs.credit, 0
  while drafted is None or in_flight is drafted:
    assert credit.steps == FIRST_CREDIT
    batch = script.scheduler.schedule(script.now)
    drafted = batch if batch is not None and batch.num_drafts else drafted
    if overlap:
      batch, in_flight = in_flight, batch
    if batch is not None:
      num_sampled = -len(script.outputs["a"])
      script.commit(batch)
      num_sampled += len(script.outputs["a"])
  cost = min(MOST_COST, drafted.num_tokens) - num_sampled
  assert cost > 0 and credit.steps == pytest.approx(FIRST_CREDIT - cost)


def some_late(seed: int) -> Callable:
  """Steps with drafts near the default limit, of which one in ten of any kind waits for other work."""
  rng = random.Random(seed)

  def seconds(num_tokens: int) -> float:
    usual = (
      0.8 if num_tokens == 1 else 0.93 + 0.008 * num_tokens if num_tokens <= 8 else 1.2 + 0.02 * num_tokens
    ) / 1e3
    return usual * rng.lognormvariate(0, 0.04) * (rng.uniform(1.5, 3) if rng.random() < 0.1 else 1)

  return seconds


@pytest.mark.parametrize("overlap", [False, True])
def test_late_steps_end_no_copies(overlap: bool):
  """A late step or two among the first ones of a size must not make it seem too long for thousands of steps."""
  gains = []
  for seed in range(8):
    texts = short_texts(seed, 160, 1.0)
    plain, drafted = (serve_in_turn(each, overlap, texts, some_late(seed)) for each in ("none", "auto"))
    gains.append(plain.now / drafted.now)
  assert sorted(gains)[1] > 1.15, gains
