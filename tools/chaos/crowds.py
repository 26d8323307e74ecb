"""Scenarios: many concurrent streams, and a pool so small that they preempt each other. Every token must be right."""

import dataclasses
import random

from tools.chaos.report import Row, none_of
from tools.chaos.rig import Rig
from tools.chaos.streams import Answer, StreamRequest, random_asks, random_prompt


def _faults(answers: list[Answer]) -> list[str]:
  return [answer.fault() for answer in answers if not answer.exact]


def concurrent(rig: Rig, count: int = 1000, asked: int = 1000) -> list[Row]:
  """Runs many streams at the same time."""
  flags = (
    "--fake_step_ms=20",
    "--max_num_seqs=1024",
    "--token_budgets=64,256,512,1024,2048",
    f"--max_queued_requests={count + 100}",
    "--num_blocks=16384",
    "--max_concurrent_streams=1024",  # the server limits calls a connection, and clients use few connections
  )
  asks = random_asks(random.Random(5), count, (4, 40), (30, 50), "crowd")
  with rig.server(*flags) as server:
    answers = rig.ask(server.target, asks, at_once=count)
    faults = _faults(answers) + server.settle() + server.imbalance()
  most = _most_at_once(answers)
  row = none_of("concurrent streams", "all exact", faults, len(answers), asked)
  return [
    Row(
      f"{row.check} (at most {most} open at one instant)",
      row.target,
      row.measured,
      row.passed,
      asked,
      min(row.ran, most),
    )
  ]


def _most_at_once(answers: list[Answer]) -> int:
  """Returns the largest number of streams open at one instant."""
  changes = sorted([(answer.sent, 1) for answer in answers] + [(answer.ended, -1) for answer in answers])
  most = now = 0
  for _, change in changes:
    now += change
    most = max(most, now)
  return most


def preempted(rig: Rig, count: int = 1000, asked: int = 1000) -> list[Row]:
  """Runs requests in a pool too small for them, until `count` of them were preempted at least once."""
  rng = random.Random(6)
  # 32 requests of up to 220 tokens need 1,760 blocks at their end, and a few at their start.
  flags = ("--num_blocks=400", "--block_size=4", "--max_num_seqs=32", "--max_queued_requests=1024")
  answers: list[Answer] = []
  num_preempted = 0
  with rig.server(*flags) as server:
    for serial in range(40):
      since = server.load().now_s
      asks = random_asks(rng, min(400, 2 * count), (4, 20), (100, 200), f"preempt-{serial}")
      answers += rig.ask(server.target, [dataclasses.replace(ask, unary=True) for ask in asks], at_once=64)
      num_preempted += sum(record.num_preemptions > 0 for record in server.load(since).requests)
      if num_preempted >= count:
        break
    faults = _faults(answers) + server.settle() + server.imbalance()
  measured = f"{num_preempted:,} preempted among {len(answers):,} requests: {len(faults)} faults"
  if faults:
    measured += f": {faults[0]}"
  passed = not faults and num_preempted >= count
  return [Row("preempted requests", "identical tokens", measured, passed, asked, min(num_preempted, asked))]


def salts(rig: Rig, count: int = 500, asked: int = 0) -> list[Row]:
  """Sends the same prompts with different cache salts; no cached block may serve another salt."""
  rng = random.Random(7)
  prompts = [random_prompt(rng, rng.randint(33, 100)) for _ in range(count)]

  def asks(salt: str) -> list[StreamRequest]:
    return [StreamRequest(prompt, 2, cache_salt=salt, unary=True) for prompt in prompts]

  with rig.server("--num_blocks=16384") as server:
    first = rig.ask(server.target, asks("one"), at_once=16)
    crossed = [answer for salt in ("two", "", "on") for answer in rig.ask(server.target, asks(salt), at_once=16)]
    again = rig.ask(server.target, asks("one"), at_once=16)
    faults = _faults(first + crossed + again) + server.settle() + server.imbalance()
  hits = sum(answer.cached_tokens > 0 for answer in first + crossed)
  own = sum(answer.cached_tokens > 0 for answer in again)
  measured = f"{hits} of {len(crossed):,}; within one salt {own} of {len(again)}"
  if faults:
    measured += f"; {len(faults)} faults: {faults[0]}"
  passed = hits == 0 and own == len(again) and not faults
  return [Row("prefix-cache hits across salts", "0, and all within one salt", measured, passed, asked, len(crossed))]
