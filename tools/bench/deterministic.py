"""Measures the cost of --deterministic: the same work with and without it, alternating, in one run. Decides nothing.

  python -m tools.bench.deterministic --model=models/demo [--matmul=xla --attention=reference] [--output=FILE.json]

The work is steps of --batches rows with one new token each at position --context, through the real runner, and
--requests concurrent greedy requests through the whole engine. The best of --rounds counts on either side. Before it
times the programs, the tool verifies that one request gives the same bits in many kinds of batches
(tools/bench/batch_invariance.py).
"""

from collections.abc import Callable, Sequence
import dataclasses
import statistics
import sys
from typing import Any

from engine.errors import ConfigError, EngineError
from tools.arguments import CommandParser, output_file, positive_float, positive_int, positive_ints
from tools.bench import batch_invariance
from tools.bench_offline import OfflineRun, add_build_arguments, build_options
from tools.measure import commit, machine, show, write_result
from tools.simulate.measure_costs import HandMade
from tools.workload import WorkRequest, synthetic


def same_bits(run: OfflineRun) -> int:
  """Returns the number of variants that gave a request the same bits as alone. Raises ConfigError if one did not."""
  runner, config = run.built.runner, dataclasses.replace(run.built.config, prefix_cache_scope="tenant")
  ways = batch_invariance.ways(config)
  for name, subject in batch_invariance.SUBJECTS.items():
    alone = batch_invariance.serve(runner, config, subject).bits
    for way in ways:
      if batch_invariance.serve(runner, config, subject, **way).bits != alone:
        raise ConfigError(f"the {name} request has other bits served as {way} than alone")
  return len(ways) * len(batch_invariance.SUBJECTS)


def step_s(run: OfflineRun, batch: int, context: int, seconds: float) -> tuple[int, float]:
  """Returns the tokens that a decode step is padded to, and its median seconds."""
  config = run.built.config
  shape = config.ladder.fit(batch)
  times = HandMade(run.built.runner, config).times(shape, [(context - 1, 1)] * batch, seconds)
  return shape.tokens, statistics.median(times)


def offline_s(run: OfflineRun, requests: Sequence[WorkRequest]) -> float:
  """Returns the seconds from the first request to the last token."""
  outcomes = run.serve(requests)
  return max(one.chunks[-1][0] for one in outcomes) - min(one.sent_s for one in outcomes)


def measure(args: Any, keep: Callable[[dict[str, Any]], None] = lambda result: None) -> dict[str, Any]:
  """Measures both sides alternately; returns the JSON. Calls `keep` after each round. Raises EngineError."""
  # Steps made by hand write anywhere in the pool, so no blocks may be kept for a later round.
  options = dataclasses.replace(build_options(args), prefix_cache_scope="off")
  normal = OfflineRun(dataclasses.replace(options, deterministic=False))
  deterministic = OfflineRun(dataclasses.replace(options, deterministic=True))
  built = deterministic.built
  ways = same_bits(deterministic)
  prompts, outputs = (f"uniform:{low}:{high}" for low, high in (args.prompts, args.outputs))
  requests = synthetic(args.requests, prompts, outputs, built.config.vocab_size, seed=0)
  work: dict[str, list[list[float]]] = {}
  padded: dict[str, list[int]] = {}

  def result() -> dict[str, Any]:
    rows = []
    for name, times in work.items():
      best = [min(side) for side in times]
      rows.append({"work": name, "normal_s": best[0], "deterministic_s": best[1], "ratio": round(best[1] / best[0], 3)})
      rows[-1] |= {"padded_to": padded[name]} if name in padded else {}
    return {
      "model": built.model_name,
      "attention": built.attention,
      "matmul": built.matmul,
      "says": built.deterministic,
      "token_budgets": [list(run.built.config.token_budgets) for run in (normal, deterministic)],
      "same_bits_in_ways": ways,
      "rounds": args.rounds,
      "work": rows,
      "machine": machine(),
      "commit": commit(),
    }

  keep(result())
  for _ in range(args.rounds):
    for side, run in enumerate((normal, deterministic)):
      for batch in args.batches:
        name = f"decode of {batch} at {args.context}"
        tokens, seconds = step_s(run, batch, args.context, args.seconds)
        work.setdefault(name, [[], []])[side].append(seconds)
        padded.setdefault(name, [0, 0])[side] = tokens
      work.setdefault("offline", [[], []])[side].append(offline_s(run, requests))
    keep(result())
  return result()


def table(result: dict[str, Any]) -> str:
  """Formats the result as a table."""
  lines = [f"{result['model']}, attention {result['attention']}, matmul {result['matmul']}; {result['says']}"]
  lines.append(
    f"the same bits in {result['same_bits_in_ways']} variants of serving; best of {result['rounds']} rounds:"
  )
  for row in result["work"]:
    shapes = "{} and {} tokens".format(*row["padded_to"]) if "padded_to" in row else ""
    lines.append(
      f"{row['work']:20s} {1e3 * row['normal_s']:10.2f} ms {1e3 * row['deterministic_s']:10.2f} ms deterministic, "
      f"ratio {row['ratio']:.3f} {shapes}".rstrip()
    )
  return "\n".join(lines)


def _range(text: str) -> tuple[int, int]:
  low, _, high = text.partition(":")
  return positive_int(low), positive_int(high)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns 2 after one line if something cannot be measured."""
  parser = CommandParser("tools.bench.deterministic", __doc__)
  parser.add_argument("--model", required=True, help="model folder; with --random_weights config.json is enough")
  parser.add_argument("--batches", type=positive_ints, default=(1, 8, 32), help="rows of decode steps")
  parser.add_argument("--context", type=positive_int, default=128, help="their positions")
  parser.add_argument("--requests", type=positive_int, default=32, help="offline: how many")
  parser.add_argument("--prompts", type=_range, default=(16, 128), help="offline: shortest:longest prompt")
  parser.add_argument("--outputs", type=_range, default=(16, 64), help="offline: shortest:longest output")
  parser.add_argument("--rounds", type=positive_int, default=3, help="rounds that alternate both sides")
  parser.add_argument("--seconds", type=positive_float, default=0.5, help="seconds for each kind of step in a round")
  parser.add_argument("--output", type=output_file, default="", help="JSON file to write")
  add_build_arguments(parser)
  args = parser.parse_args(argv)
  try:
    result = measure(args, lambda found: write_result(args.output, found))  # a killed run keeps its results so far
  except EngineError as error:
    return parser.failed(error)
  show(result, table(result), args.output)
  return 0


if __name__ == "__main__":
  sys.exit(main())
