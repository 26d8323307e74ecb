"""Compares speculation with none at Poisson loads, in virtual time; prints a table. Imports no jax.

  python -m tools.simulate.draft_loads [--acceptances=0,0.1,0.3,0.7] [--loads=0.1,0.2,...,1] [--rounds=5]

A load is a share of the requests a second that the engine serves without drafts when all are there at the start. The
engine's own code chooses the drafts, as in tools.simulate, whose flags this command takes. Each round has arrivals and
step times of its own, the same with drafts and without. Three figures of the runs with drafts are divided by those
without: output tokens a second (above 1 is better), the 99th percentile of the gaps between tokens, and the mean time
per output token (below 1 is better). A cell has the medians over rounds.

The column `none` shows the noise of a sample. It serves the requests once more without drafts, each up to one step
later. Behind its ratios are the least and the largest ratio of gaps. --output=FILE has the ratios of every round.
"""

from collections.abc import Sequence
import dataclasses
import gc
import operator
import random
import statistics
import sys
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError
from tools.arguments import CommandParser, chances, positive_floats, positive_int
from tools.measure import commit, write_result
from tools.report.latency import Objectives
from tools.simulate.__main__ import add_arguments, arrivals_from, engine_config, fleet_from, settle_arguments
from tools.simulate.draft_chances import DraftChances
from tools.simulate.events import Collector, Fleet, Simulation
from tools.simulate.policy_runs import measure_capacity, paced
from tools.simulate.replica import Arrival
from tools.simulate.step_costs import StepCosts

_FIGURES = ("output_tok_s", "itl_p99_ms", "tpot_mean_ms")
_REQUESTS = 200
# Flags of tools.simulate that the sweep sets itself, or has no use for.
_REFUSED = ("policies", "load", "rate", "rate_scale", "draft_acceptance", "draft_share", "draft_trace", "find_replicas")
_REFUSED += ("report", "json")


def measure_round(
  config: EngineConfig, costs: StepCosts, fleet: Fleet, arrivals: Sequence[Arrival], acceptances: Sequence[float]
) -> list[dict[str, float]]:
  """Returns the ratios of _FIGURES to those of the arrivals without drafts: once more without, then by acceptance."""
  without = dataclasses.replace(config, speculation="none")
  plain = run_once(without, costs, fleet, arrivals)
  found = [run_once(without, costs, fleet, delay_arrivals(arrivals, costs.rung_s[0][1], fleet.step_seed))]
  for acceptance in acceptances:
    found.append(run_once(config, costs, dataclasses.replace(fleet, drafts=DraftChances(acceptance)), arrivals))
  return [{name: each[name] / plain[name] for name in _FIGURES} for each in found]


def delay_arrivals(arrivals: Sequence[Arrival], most_s: float, seed: int) -> list[Arrival]:
  """Returns the arrivals, each later by a random time of up to `most_s`, in order."""
  delay = random.Random(seed).random
  moved = [arrival._replace(arrival_s=arrival.arrival_s + most_s * delay()) for arrival in arrivals]
  return sorted(moved, key=operator.attrgetter("arrival_s"))


def run_once(config: EngineConfig, costs: StepCosts, fleet: Fleet, arrivals: Sequence[Arrival]) -> dict[str, Any]:
  """Returns the figures of one run. Raises EngineError."""
  simulation = Simulation(config, costs, fleet, Collector(Objectives()))
  simulation.run(arrivals)
  return simulation.figures()


def add_sweep_arguments(parser: CommandParser) -> None:
  """Adds the flags of the sweep."""
  parser.add_argument("--acceptances", type=chances, default="0,0.1,0.3,0.7", help="chances that a draft is right")
  parser.add_argument(
    "--loads", type=positive_floats, default="0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1", help="with commas"
  )
  parser.add_argument("--rounds", type=positive_int, default=5, help="rounds with arrivals and step times of their own")


def print_table(results: Sequence[dict[str, Any]], acceptances: Sequence[float]) -> None:
  """Prints a line for each load, and a column for `none` and for each acceptance."""
  print("| load | none | " + " | ".join(f"acceptance {acceptance:g}" for acceptance in acceptances) + " |")
  print("| --- |" + " --- |" * (1 + len(acceptances)))
  for each in results:
    cells = [", ".join(f"{found[name]:.2f}" for name in _FIGURES) for found in [each["none"], *each["ratios"]]]
    gaps = [ratios[0]["itl_p99_ms"] for ratios in each["rounds"]]
    cells[0] += f" ({min(gaps):.2f} to {max(gaps):.2f})"
    print(f"| {each['load']:g} | " + " | ".join(cells) + " |", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns 2 after one line for bad input."""
  parser = CommandParser("tools.simulate.draft_loads", __doc__)
  add_arguments(parser)
  add_sweep_arguments(parser)
  try:
    args = parser.parse_args(argv)
    for name in _REFUSED:
      if getattr(args, name) != parser.get_default(name):
        raise ConfigError(f"{name}={getattr(args, name)} is of tools.simulate alone; leave out --{name}")
    args.num_requests = args.num_requests or _REQUESTS
    settle_arguments(args)
    costs = StepCosts.load(args.costs)
    fleet = fleet_from(args)
    config = engine_config(args, costs, has_drafts=True)
    arrivals, about = arrivals_from(args, config.max_model_len)
    plain = dataclasses.replace(config, speculation="none")
    gc.collect()
    gc.freeze()  # the arrivals stay, so no collection needs to scan them
    capacity = measure_capacity(plain, costs, fleet, arrivals)
    results = []
    for load in args.loads:
      rounds = []
      for number in range(args.rounds):
        timed = paced(arrivals, load * capacity, args.burstiness, args.seed + number)
        seeded = dataclasses.replace(fleet, step_seed=args.step_seed + number)
        rounds.append(measure_round(config, costs, seeded, timed, args.acceptances))
      none, *ratios = [
        {name: statistics.median(each[place][name] for each in rounds) for name in _FIGURES}
        for place in range(1 + len(args.acceptances))
      ]
      results.append({"load": load, "none": none, "ratios": ratios, "rounds": rounds})
      print(f"load {load:g} of {args.loads[-1]:g}", file=sys.stderr, flush=True)
    write_result(
      args.output,
      {"costs": args.costs, "workload": about, "capacity_request_s": capacity, "overlap": config.overlap}
      | {"acceptances": args.acceptances, "rounds": args.rounds, "commit": commit(), "loads": results},
    )
  except (EngineError, OSError) as error:
    return parser.failed(error)
  print(f"{about['num_requests']} requests, step times of {args.costs}, overlap {config.overlap}\n")
  print_table(results, args.acceptances)
  return 0


if __name__ == "__main__":
  sys.exit(main())
