"""Drives an engine with random requests of every kind and counts what compiles: the answer must be 0.

  python -m tools.soak_compiles --model=DIR [--num_steps=10000] [--seed=0]

Prints one JSON line: steps, requests, aborts, preemptions, errors, compiles_after_ready, wall_s. Exit code 1 if
anything compiled or a request failed.
"""

from collections.abc import Sequence
import dataclasses
import json
import random
import sys
import time

from engine.config import EngineConfig
from engine.device.build import build_engine
from engine.device.options import BuildOptions
from engine.engine import Engine
from engine.errors import EngineError
from engine.request import Request, TokenEvent
from engine.sampling_params import SamplingParams
from tools.arguments import CommandParser, positive_int


@dataclasses.dataclass
class CompileSoak:
  """The result.

  Attributes:
    steps, requests, aborts, preemptions: counts.
    errors: requests that ended for another reason than stop, length or abort.
  """

  steps: int = 0
  requests: int = 0
  aborts: int = 0
  preemptions: int = 0
  errors: int = 0


def random_params(rng: random.Random, vocab_size: int, max_tokens: int) -> SamplingParams:
  """Returns a random mixture of parameters: each keeps its default about half of the time, so that all combine."""

  def ids(most: int) -> tuple[int, ...]:
    return tuple(rng.sample(range(vocab_size), rng.randint(1, min(most, vocab_size))))

  choices = {
    "temperature": lambda: rng.choice((0.0, 0.2, 1.0, 3.0)),
    "top_k": lambda: rng.randint(1, vocab_size),
    "top_p": lambda: rng.uniform(0.01, 1.0),
    "min_p": lambda: rng.uniform(0.0, 1.0),
    "presence_penalty": lambda: rng.uniform(-2, 2),
    "frequency_penalty": lambda: rng.uniform(-2, 2),
    "repetition_penalty": lambda: rng.uniform(0.1, 2),
    "logit_bias": lambda: tuple((token, rng.uniform(-100, 100)) for token in ids(20)),
    "allowed_token_ids": lambda: ids(50),
    "min_tokens": lambda: rng.randint(0, max_tokens),
    "stop_token_ids": lambda: ids(16),
    "ignore_eos": lambda: True,
    "seed": lambda: rng.getrandbits(63),
    "logprobs": lambda: rng.randint(0, 20),
    "prompt_logprobs": lambda: rng.randint(0, 20),
  }
  plain = rng.random() < 0.3
  chosen = {} if plain else {name: make() for name, make in choices.items() if rng.random() < 0.4}
  return SamplingParams(max_tokens=max_tokens, **chosen)


def random_request(rng: random.Random, config: EngineConfig, name: str) -> Request:
  """Returns a request of any length that fits; a third of them share a prefix."""
  longest = min(config.max_model_len, config.pool_tokens)
  total = min(longest, int(2 * longest ** rng.random()) + 1)
  num_prompt = rng.randint(1, max(1, total - 1))
  prompt = [rng.randrange(config.vocab_size) for _ in range(num_prompt)]
  if rng.random() < 0.33:
    prompt = [index % config.vocab_size for index in range(num_prompt)]
  params = random_params(rng, config.vocab_size, max(1, total - num_prompt))
  return Request(name, prompt, params, priority=rng.randint(-2, 2), seed=(params.seed or 0) & 0xFFFFFFFF)


def soak(engine: Engine, inbox: list[TokenEvent], num_steps: int, seed: int) -> CompileSoak:
  """Steps `engine` under random traffic, then lets live requests finish.

  Args:
    engine: ready; its loop is not running.
    inbox: receives the engine's events.
    num_steps: steps under traffic.
    seed: seed of the traffic.

  Raises:
    EngineError: the engine died.
  """
  rng = random.Random(seed)
  soaked = CompileSoak()
  live: set[str] = set()

  def turn() -> None:
    engine.step()
    soaked.steps += 1
    if engine.dead is not None:
      raise engine.dead
    for event in inbox:
      if event.finish_reason is not None:
        live.discard(event.request_id)
        soaked.errors += event.finish_reason.value in ("error", "timeout")
    inbox.clear()

  for _ in range(num_steps):
    while len(live) < 2 * engine.config.max_num_seqs and rng.random() < 0.5:
      name = str(soaked.requests)
      engine.submit(random_request(rng, engine.config, name))
      live.add(name)
      soaked.requests += 1
    if live and rng.random() < 0.05:
      engine.abort(rng.choice(sorted(live)))
      soaked.aborts += 1
    turn()
  while engine.num_live:
    turn()
  soaked.preemptions = engine.stats().num_preemptions
  return soaked


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("python -m tools.soak_compiles", "Count what compiles under random requests.")
  parser.add_argument("--model", default="models/demo", help="a Hugging Face or Sluice model folder")
  parser.add_argument("--num_steps", type=positive_int, default=10_000, help="steps to run")
  parser.add_argument("--seed", type=int, default=0, help="of the traffic")
  parser.add_argument("--num_blocks", type=positive_int, default=96, help="KV blocks: few, so preemption is common")
  parser.add_argument("--max_model_len", type=positive_int, default=512, help="longest sequence, in tokens")
  args = parser.parse_args(arguments)
  inbox: list[TokenEvent] = []
  try:
    built = build_engine(
      BuildOptions(
        model_dir=args.model,
        num_blocks=args.num_blocks,
        max_model_len=args.max_model_len,
        token_budgets=(8, 16, 32, 64),
        max_num_seqs=16,
        prefill_chunk=48,
        policy="priority",
        request_timeout_s=0.0,
        queue_timeout_s=0.0,
      ),
      lambda what, done, total: print(f"{what} {done}/{total}", file=sys.stderr),
      inbox.extend,
    )
    started = time.perf_counter()
    soaked = soak(built.engine, inbox, args.num_steps, args.seed)
  except EngineError as error:
    print(error, file=sys.stderr)
    return 2
  compiles = built.runner.compiles_after_ready
  print(
    json.dumps(
      dataclasses.asdict(soaked) | {"compiles_after_ready": compiles, "wall_s": round(time.perf_counter() - started, 1)}
    )
  )
  return 1 if compiles or soaked.errors else 0


if __name__ == "__main__":
  sys.exit(main())
