"""Scenarios: guarantees of policies: low priorities age, and no tenant can crowd out another."""

import random
import time

from tools.chaos import streams
from tools.chaos.report import Row
from tools.chaos.rig import Rig
from tools.chaos.streams import StreamRequest, random_prompt
from tools.report.latency import percentile

_AGING_S = 0.4
_TOKENS = 20
_STEP_MS = 5
_SLOTS = 4
_FLOOD = 24
_TTFT_FACTOR = 2.0
_LEAST_SHARE = 0.45


def ageing(rig: Rig, levels: tuple[int, ...] = (2, 4, 6, 8, 10), starved_s: float = 4.0) -> list[Row]:
  """Sends low-priority requests beside a flood of higher ones: with ageing, they run in bounded time."""
  low = [StreamRequest(random_prompt(random.Random(level), 8), _TOKENS, f"low-{level}", level) for level in levels]
  flags = ("--policy=priority", f"--fake_step_ms={_STEP_MS}", f"--max_num_seqs={_SLOTS}")
  with rig.server(*flags, f"--aging_s={_AGING_S}") as server:
    with rig.controls(server, num_streams=_FLOOD, max_tokens=_TOKENS, unary=True) as control:
      time.sleep(1.0)
      answers = rig.ask(server.target, low, at_once=len(low), processes=1)
    seen = control()
  served = len(seen.ends) / (max(end for end, _ in seen.ends) - min(end for end, _ in seen.ends))
  # When it is due, older requests still go first, and then it takes its turn.
  ahead_s = (_FLOOD + len(low)) / served
  waits = {answer.ask.priority: answer.times[0] - answer.sent for answer in answers if answer.times}
  late = [level for level in levels if waits.get(level, float("inf")) > level * _AGING_S + 2 * ahead_s]
  text = ", ".join(f"{level}: {waits[level]:.1f} s" for level in sorted(waits))
  with rig.server(*flags, "--aging_s=0") as server:
    with rig.controls(server, num_streams=_FLOOD, max_tokens=_TOKENS, unary=True):
      time.sleep(1.0)
      job = rig.submit(streams.run_all, server.target, low[:1], 1)
      time.sleep(starved_s)
      starved = not job.done()
    job.result()
  exact = all(answer.exact for answer in answers) and not seen.faults
  return [
    Row(
      f"low priorities beside a flood, ageing {_AGING_S} s a level",
      f"first token within level x {_AGING_S} s + 2 x {ahead_s:.1f} s of queue; starved without ageing",
      f"{text}; without ageing {'starved' if starved else 'NOT starved'} for {starved_s:g} s",
      not late and starved and exact,
      len(levels),
      len(waits),
    )
  ]


def tenants(rig: Rig, seconds: float = 5.0) -> list[Row]:
  """Runs a tenant beside one with far more requests, under policy fair."""
  flags = ("--policy=fair", "--fake_step_ms=10", "--max_num_seqs=32", "--max_queued_requests=512")
  # A step takes 10 ms, whatever it holds. Prompts therefore take several steps, so that the wait for running steps (one
  # and a half) does not dominate. Budgets of 96, and of 96 beside 32 decodes, let a step take as much of a prompt
  # beside other requests as alone. If 96 were padded to 128, a lone prompt would profit from the padding.
  asks = {"max_tokens": 3, "tenant": "quiet", "longest_prompt": 480}
  with rig.server(*flags, "--prefill_chunk=96", "--token_budgets=8,16,32,64,96,128,256,512") as server:
    with rig.controls(server, 1, **asks) as control:
      time.sleep(seconds / 2)
    alone = control()
    with rig.controls(server, 100, _TOKENS, tenant="loud", unary=True) as loud:
      time.sleep(1.0)
      with rig.controls(server, 1, **asks) as control:
        time.sleep(seconds)
      beside = control()
      time.sleep(0.5)
      began = time.monotonic()
      with rig.controls(server, 32, _TOKENS, tenant="quiet", unary=True) as many:
        time.sleep(seconds)
        ended = time.monotonic()
      quiet = many()
    flood = loud()
    faults = alone.faults + beside.faults + quiet.faults + flood.faults + server.settle() + server.imbalance()
  medians = [percentile(control.firsts, 50) or 0.0 for control in (alone, beside)]
  factor = medians[1] / medians[0] if medians[0] else float("inf")
  used = [sum(tokens for at, tokens in each.ends if began + 1 < at < ended) for each in (quiet, flood)]
  share = used[0] / max(1, sum(used))
  return [
    Row(
      "a tenant's first token beside one with 100 times its requests, p50",
      f"<= {_TTFT_FACTOR:g} times alone",
      f"{factor:.2f} times ({1000 * medians[0]:.0f} to {1000 * medians[1]:.0f} ms, {beside.streams} requests)",
      factor <= _TTFT_FACTOR and not faults,
    ),
    Row(
      "share of a tenant with 32 requests beside one with 100",
      f">= {_LEAST_SHARE:.0%}; half is fair",
      f"{share:.1%}" + (f"; {faults[0]}" if faults else ""),
      share >= _LEAST_SHARE and not faults,
    ),
  ]
