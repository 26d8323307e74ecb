"""Serves one request alone and in many batches on programs compiled once, and compares bits. Compiles nothing.

Shared by tests, `tools.bench.deterministic` and the GPU's check of --deterministic. A variant is a set of changes to an
EngineConfig (for `dataclasses.replace`), with `others` (the number of other requests) and `seed` (of those requests).
"""

from collections.abc import Sequence
import dataclasses
import random
from typing import Any

import numpy as np

from engine.batch import Runner
from engine.config import EngineConfig
from engine.engine import Engine
from engine.recorder import EngineStats
from engine.request import Request, TokenEvent
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler

_PROMPT = 70
# Greedy, with every position's log probabilities; and sampled, with a prefix that may come from the cache.
SUBJECTS = {
  "greedy": SamplingParams(24, temperature=0.0, ignore_eos=True, logprobs=20, prompt_logprobs=20),
  "sampled": SamplingParams(24, temperature=1.1, top_p=0.9, top_k=40, seed=5, ignore_eos=True, logprobs=20),
}


def _any_params(rng: random.Random) -> SamplingParams:
  """Returns random parameters for another request; each feature adds work to the sampler's program."""
  return SamplingParams(
    rng.randrange(3, 50),
    temperature=rng.choice((0.0, 0.9)),
    seed=rng.randrange(99),
    top_k=rng.choice((0, 0, 7)),
    top_p=rng.choice((1.0, 0.8)),
    min_p=rng.choice((0.0, 0.1)),
    repetition_penalty=rng.choice((1.0, 1.2)),
    logit_bias=rng.choice(((), ((3, 2.0),))),
    logprobs=rng.choice((None, 3)),
    ignore_eos=True,
  )


def ways(config: EngineConfig, num_random: int = 4) -> list[dict[str, Any]]:
  """Returns variants of serving a request: some of every kind, and random ones."""
  rng, budgets = random.Random(3), config.token_budgets
  rows = config.max_num_seqs
  found: list[dict[str, Any]] = [
    {"others": 0},
    {"others": 7, "prefill_chunk": 5, "seed": 1},
    {"others": 12, "num_blocks": _blocks(config, 190), "seed": 2},
    {"others": 0, "prefill_chunk": 1},
    {"others": 9, "batching": "static"},
    {"others": 5, "batching": "continuous", "seed": 3},
  ]
  for seed in range(4, 4 + num_random):
    found.append(
      {
        "others": rng.randrange(14),
        "seed": seed,
        "prefill_chunk": rng.randrange(1, budgets[-1] + 1),
        "num_blocks": _blocks(config, rng.choice((160, 240, 1000))),
        "policy": rng.choice(("fcfs", "sjf")),
      }
    )
  return found + [{"others": 3, "token_budgets": (one,), "prefill_chunk": 4} for one in budgets if one >= rows]


def _blocks(config: EngineConfig, tokens: int) -> int:
  return min(config.num_blocks, -(-tokens // config.block_size))


@dataclasses.dataclass(frozen=True)
class Served:
  """The result. Attributes: bits: the request's tokens and log probabilities. stats: the engine's statistics."""

  bits: bytes
  stats: EngineStats


def serve(
  runner: Runner, config: EngineConfig, subject: SamplingParams, others: int = 0, seed: int = 0, **changes: Any
) -> Served:
  """Serves a request of 70 tokens with a fresh scheduler, beside other requests that arrive while it runs.

  Args:
    runner: the device; its programs must be those of `config` with the changes.
    config: allows at least 128 positions a sequence.
    subject: the request's parameters.
    others: number of other requests.
    seed: seed of the other requests. If it is odd, a request with the same prefix runs first.
    changes: fields of the config.
  """
  values: list[float] = []

  def emit(events: Sequence[TokenEvent]) -> None:
    for event in events:
      if event.request_id == "subject":
        values.extend(event.token_ids)
        for entry in (*event.prompt_logprobs, *event.logprobs):
          values.extend((entry.logprob, *(value for pair in entry.top for value in pair)))

  rng, clock = random.Random(seed), iter(range(10**9))
  config = dataclasses.replace(config, **{"speculation": "none"} | changes)  # static batching takes no drafts
  engine = Engine(Scheduler(config), runner, lambda: next(clock) * 1e-6, emit)

  def prompt(length: int, rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randrange(config.vocab_size) for _ in range(length))

  own = prompt(_PROMPT, random.Random(7))
  if seed % 2:
    engine.submit(Request("first", (*own[:50], 5), SamplingParams(3, temperature=0.0, ignore_eos=True)))
    while engine.num_live:
      engine.step()
  requests = [Request(str(number), prompt(rng.randrange(1, 78), rng), _any_params(rng)) for number in range(others)]
  requests.insert(rng.randrange(others + 1), Request("subject", own, subject))
  for request in requests:
    engine.submit(request)
    for _ in range(rng.randrange(3)):
      engine.step()
  while engine.num_live:
    engine.step()
  if engine.dead is not None:
    raise engine.dead
  return Served(np.array(values, np.float32).tobytes(), engine.stats())
