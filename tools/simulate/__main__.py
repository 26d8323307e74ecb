"""Serves a trace in virtual time and prints one JSON line, as bench_serving does of a real server. Imports no jax.

  python -m tools.simulate --costs=costs.json --trace=benchmarks/traces/azure_conv_500.csv --scale=0.1
  python -m tools.simulate --costs=costs.json --trace=FILE.csv --replicas=4 --router=prefix_aware
  python -m tools.simulate --costs=costs.json --trace=FILE.csv --prefill_replicas=2 --decode_replicas=3
  python -m tools.simulate --costs=costs.json --trace=FILE.csv --find_replicas --slo_ttft_ms=500 --slo_tpot_ms=50

The Scheduler and Engine are the server's own, and the flags about them have the server's names; tools.simulate.events
says what is modelled, tools.simulate.measure_costs makes the cost table, tools.report.latency defines the words.
--find_replicas looks for the smallest number of replicas (or, with --prefill_replicas and --decode_replicas, of such
groups) with which the share --attainment of all requests meets the objectives; refused requests miss. Exit code 2 with
one line for bad input.
"""

import argparse
from collections.abc import Callable, Sequence
import dataclasses
import gc
import json
import math
import sys
import time
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError
from engine.shapes import choose_ladder
from tools import workload
from tools.arguments import CommandParser, positive_float, positive_int
from tools.report.latency import Objectives
from tools.simulate.events import Collector, Fleet, Simulation
from tools.simulate.replica import ROUTERS, Arrival, made_up
from tools.simulate.step_costs import AttentionWork, StepCosts

VOCAB_SIZE = 2**31 - 1  # token ids are not looked at
_FROM_TABLE = ("max_model_len", "num_blocks", "block_size", "max_num_seqs")  # where no flag says otherwise
_OF_LADDER = {"token_budgets": (), "prefill_chunk": 0}  # where no flag says otherwise, as engine.shapes says
_NOT_FLAGS = ("vocab_size", "eos_token_ids", "computes_padding")


# --- Settings ---------------------------------------------------------------------------------------------------------


def boolean(text: str) -> bool:
  """The server's way to write a truth value."""
  if text.lower() not in ("true", "false", "1", "0"):
    raise argparse.ArgumentTypeError(f"{text!r} must be true or false")
  return text.lower() in ("true", "1")


def budgets(text: str) -> tuple[int, ...]:
  """The server's way to write a ladder."""
  try:
    return tuple(int(item) for item in text.split(","))
  except ValueError:
    raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers with commas between") from None


def add_engine_arguments(parser: CommandParser) -> None:
  """A flag for each setting of the engine, under the server's name."""
  for field in dataclasses.fields(EngineConfig):
    if field.name in _NOT_FLAGS:
      continue
    if field.name in _FROM_TABLE:
      parser.add_argument(f"--{field.name}", type=int, default=0, help="as the server's flag; 0: as the table says")
      continue
    parse: Callable[[str], Any] = {bool: boolean, tuple: budgets}.get(type(field.default), type(field.default))
    default: Any = _OF_LADDER.get(field.name, field.default)
    parser.add_argument(f"--{field.name}", type=parse, default=default, help="as the server's flag")
  parser.add_argument("--kv_cache_mb", type=int, default=0, help="as the server's flag, instead of --num_blocks")


def engine_config(args: Any, costs: StepCosts) -> EngineConfig:
  """The settings that the flags and the cost table give. Raises ConfigError."""
  values = {
    field.name: getattr(args, field.name) for field in dataclasses.fields(EngineConfig) if field.name not in _NOT_FLAGS
  }
  if args.kv_cache_mb and args.num_blocks:
    raise ConfigError(
      f"kv_cache_mb={args.kv_cache_mb} and num_blocks={args.num_blocks} both size the KV pool; set only one of them"
    )
  values["block_size"] = values["block_size"] or int(costs.about.get("block_size", 16))
  if args.kv_cache_mb:
    if not costs.kv_bytes_per_token:
      raise ConfigError("the cost table has no kv_bytes_per_token to divide --kv_cache_mb by; set --num_blocks")
    values["num_blocks"] = (args.kv_cache_mb << 20) // (costs.kv_bytes_per_token * values["block_size"])
  for name in _FROM_TABLE:
    values[name] = values[name] or int(costs.about.get(name, 0))
    if not values[name]:
      remedy = "set --num_blocks or --kv_cache_mb" if name == "num_blocks" else f"set --{name}"
      raise ConfigError(f"{name} is in neither the flags nor the cost table; {remedy}")
  measured = costs.about.get("max_num_seqs", values["max_num_seqs"])
  if measured != values["max_num_seqs"]:
    print(
      f"note: the cost table was measured with max_num_seqs={measured}, and --max_num_seqs is {values['max_num_seqs']}",
      file=sys.stderr,
    )
  # A rung costs a simulation nothing: all are kept, whatever a step needs.
  ladder = choose_ladder(
    "cpu",
    token_budgets=values["token_budgets"] or None,
    max_num_seqs=values["max_num_seqs"],
    prefill_chunk=values["prefill_chunk"] or None,
    all_rungs=True,
  )
  values |= {name: getattr(ladder, name) for name in _OF_LADDER}
  return EngineConfig(vocab_size=VOCAB_SIZE, computes_padding=not costs.by_tokens, **values)


def expand_flagfile(argv: Sequence[str]) -> list[str]:
  """Puts the lines of --flagfile=FILE in its place, as the server's flags do. Raises ConfigError."""
  found: list[str] = []
  for argument in argv:
    if not argument.startswith("--flagfile="):
      found.append(argument)
      continue
    path = argument.removeprefix("--flagfile=")
    try:
      with open(path, encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
      raise ConfigError(
        f"flagfile {path} cannot be read ({error}); make one with python -m tools.simulate.tune_ladder"
      ) from error
    lines = [line for line in lines if line and not line.startswith(("#", "//"))]
    bad = [line for line in lines if not (line.startswith("--") and "=" in line)]
    if bad:
      raise ConfigError(f"flagfile {path} has the line {bad[0]!r:.60}; lines are --name=value, or begin with #")
    found += lines
  return found


# --- Requests ---------------------------------------------------------------------------------------------------------


def add_request_arguments(parser: CommandParser) -> None:
  """What arrives: the flags of tools.workload, and request files."""
  parser.add_argument(
    "--requests", help="request file (JSON lines) with real token ids, in which prefixes may be equal"
  )
  parser.add_argument("--at_once", action="store_true", help="with --requests: all are there at the start")
  parser.add_argument("--repeat", type=positive_int, default=1, help="with --trace: so many times, end to end")
  workload.add_shape_arguments(parser)


def arrivals_from(args: Any, max_len: int | None) -> tuple[list[Arrival], dict[str, Any]]:
  """The requests in order of arrival, and their description. Raises ConfigError.

  A finite --rate with --trace keeps the trace's lengths and draws the times anew.
  """
  if args.requests:
    requests = workload.read_requests(args.requests)
    requests.sort(key=lambda request: 0.0 if args.at_once else request.arrival_s)
    made = [
      Arrival(request.id, 0.0 if args.at_once else request.arrival_s, request.prompt, request.output_len)
      for request in requests
    ]
    return made, {"requests_file": args.requests, "num_requests": len(made)}
  if args.trace:
    rate_scale = args.rate_scale if args.rate_scale is not None else args.scale
    max_len = args.max_len or max_len
    rows = repeated(workload.read_trace(args.trace), args.repeat)
    rows = workload.scale_rows(rows, args.scale, rate_scale, args.num_requests, max_len)
    about = {"trace": args.trace, "length_scale": args.scale, "rate_scale": rate_scale, "max_len": max_len}
    if args.rate < math.inf:
      times = workload.arrivals(len(rows), args.rate, args.burstiness, args.seed)
      rows = [(arrival_s, *row[1:]) for arrival_s, row in zip(times, rows, strict=True)]
      about |= {"rate": args.rate, "burstiness": args.burstiness, "seed": args.seed, "rate_scale": None}
    return made_up(rows), about | {"num_requests": len(rows)}
  requests, about = workload.from_arguments(args, vocab_size=1)
  return made_up([(request.arrival_s, len(request.prompt), request.output_len) for request in requests]), about


def repeated(rows: list[tuple[float, int, int]], times: int) -> list[tuple[float, int, int]]:
  """A trace end to end; between two passes lies its mean gap."""
  last = rows[-1][0]
  period = last + (last / (len(rows) - 1) if len(rows) > 1 else 0.0)
  return [(arrival_s + turn * period, *lengths) for turn in range(times) for arrival_s, *lengths in rows]  # type: ignore[misc]


# --- One run, and the search for a number -----------------------------------------------------------------------------


def simulate(
  config: EngineConfig, costs: StepCosts, fleet: Fleet, objectives: Objectives, arrivals: Sequence[Arrival]
) -> dict[str, Any]:
  """The figures of one run. Raises EngineError."""
  simulation = Simulation(config, costs, fleet, Collector(objectives))
  simulation.run(arrivals)
  return simulation.figures()


def alone_attainment(
  config: EngineConfig, costs: StepCosts, objectives: Objectives, arrivals: Sequence[Arrival]
) -> tuple[float, float]:
  """What no number of replicas can exceed: each request with a device of its own.

  Returns:
    The share of requests that would meet the objectives, and the longest time to first token among all, seconds.
  """
  top = config.token_budgets[-1]
  step = costs.seconds(config.token_budgets[0], AttentionWork(1, 1, 0, 0, 0))
  met, slowest = 0, 0.0
  for arrival in arrivals:
    count = len(arrival.prompt)
    full, rest = divmod(count, top)
    pairs = count * (count + 1) // 2
    ttft = full * costs.rung(top) + costs.attention(AttentionWork(0, 0, count, count, pairs))
    ttft += costs.rung(rest) if rest else 0.0
    slowest = max(slowest, ttft)
    met += ttft <= objectives.ttft_s and (arrival.output_len < 2 or step <= objectives.tpot_s)
  return met / len(arrivals), slowest


def find_replicas(
  config: EngineConfig,
  costs: StepCosts,
  fleet: Fleet,
  objectives: Objectives,
  arrivals: Sequence[Arrival],
  attainment: float,
  max_replicas: int,
) -> tuple[int, dict[str, Any]]:
  """The smallest multiple of the fleet that meets the objectives, and its figures.

  By doubling, then halving the interval: it takes more replicas never to serve worse. A run stops as soon as too many
  requests have missed.

  Raises:
    ConfigError: no number up to `max_replicas` does.
  """
  alone, slowest = alone_attainment(config, costs, objectives, arrivals)
  wanted = f"attainment={attainment:g} with TTFT {_ms(objectives.ttft_s)} and TPOT {_ms(objectives.tpot_s)}"
  if alone < attainment:
    raise ConfigError(
      f"{wanted} cannot be met by any number of devices: alone on one, {alone:.1%} of the requests meet it, and the "
      f"slowest first token takes {_ms(slowest)}; raise --slo_ttft_ms or --slo_tpot_ms, or lower --attainment"
    )
  may_miss = math.floor((1 - attainment) * len(arrivals) + 1e-9)

  def attempt(count: int) -> dict[str, Any] | None:
    sized = dataclasses.replace(
      fleet,
      replicas=fleet.replicas * count,
      prefill_replicas=fleet.prefill_replicas * count,
      decode_replicas=fleet.decode_replicas * count,
    )
    simulation = Simulation(config, costs, sized, Collector(objectives))
    ended = simulation.run(arrivals, may_miss)
    good = ended and simulation.collector.misses <= may_miss
    print(f"{count}: {'enough' if good else 'too few'}", file=sys.stderr, flush=True)
    return simulation.figures() if good else None

  low, high, best = 0, 1, attempt(1)
  while best is None:
    if high == max_replicas:
      raise ConfigError(
        f"{wanted} is not met with {max_replicas} replicas, the limit; raise --max_replicas or --slo_ttft_ms, or "
        "lower --attainment"
      )
    low, high = high, min(2 * high, max_replicas)
    best = attempt(high)
  while high - low > 1:
    middle = (low + high) // 2
    figures = attempt(middle)
    if figures is None:
      low = middle
    else:
      high, best = middle, figures
  return high, best


def _ms(seconds: float) -> str:
  return f"{seconds * 1e3:.4g} ms" if seconds < math.inf else "any"


# --- Command line -----------------------------------------------------------------------------------------------------


def add_fleet_arguments(parser: CommandParser) -> None:
  """Who serves."""
  parser.add_argument("--replicas", type=positive_int, default=1, help="engines behind the router")
  parser.add_argument("--router", choices=sorted(ROUTERS), default=Fleet.router, help="who gets a request")
  parser.add_argument(
    "--prefill_replicas", type=int, default=0, help="disaggregated: engines for prompts (0: --replicas)"
  )
  parser.add_argument("--decode_replicas", type=int, default=0, help="disaggregated: engines for the tokens after them")
  parser.add_argument("--transfer_gb_s", type=positive_float, default=50.0, help="disaggregated: 10^9 bytes a second")
  parser.add_argument("--transfer_latency_ms", type=float, default=0.0, help="disaggregated: of each transfer")
  parser.add_argument("--step_seed", type=int, default=0, help="of the draws of step times from the table's spread")


def fleet_from(args: Any) -> Fleet:
  """The fleet that the flags describe. Raises ConfigError."""
  prefill, decode = args.prefill_replicas, args.decode_replicas
  if args.batching == "disaggregated" and not prefill and not decode:
    prefill = decode = args.replicas
  latency_s = args.transfer_latency_ms / 1e3
  return Fleet(args.replicas, args.router, prefill, decode, args.transfer_gb_s * 1e9, latency_s, args.step_seed)


def main(argv: Sequence[str] | None = None) -> int:
  """The command; exit code 1 when no request was served, 2 with one line for bad input."""
  parser = CommandParser("tools.simulate", __doc__)
  parser.add_argument("--costs", required=True, help="cost table of tools.simulate.measure_costs")
  add_request_arguments(parser)
  add_engine_arguments(parser)
  add_fleet_arguments(parser)
  parser.add_argument("--slo_ttft_ms", type=positive_float, default=math.inf, help="goodput: time to first token")
  parser.add_argument("--slo_tpot_ms", type=positive_float, default=math.inf, help="goodput: time per output token")
  parser.add_argument("--find_replicas", action="store_true", help="search for the smallest number that serves well")
  parser.add_argument("--attainment", type=float, default=0.9, help="find_replicas: share of requests to serve well")
  parser.add_argument("--max_replicas", type=positive_int, default=256, help="find_replicas: where to give up")
  parser.add_argument("--flagfile", help="more flags, one a line; what tools.simulate.tune_ladder writes")
  try:
    args = parser.parse_args(expand_flagfile(sys.argv[1:] if argv is None else argv))
    if not 0 < args.attainment <= 1:
      raise ConfigError(f"attainment={args.attainment} must be above 0 and at most 1; set --attainment")
    costs = StepCosts.load(args.costs)
    config, fleet = engine_config(args, costs), fleet_from(args)
    objectives = Objectives(args.slo_ttft_ms / 1e3, args.slo_tpot_ms / 1e3)
    arrivals, about = arrivals_from(args, config.max_model_len)
    gc.collect()
    gc.freeze()  # what arrives stays: no collection looks at it again
    started = time.process_time()
    if args.find_replicas:
      found, figures = find_replicas(config, costs, fleet, objectives, arrivals, args.attainment, args.max_replicas)
      figures["found_replicas"] = found
    else:
      figures = simulate(config, costs, fleet, objectives, arrivals)
    took = time.process_time() - started
  except EngineError as error:
    return parser.failed(error)
  source = {name: costs.about.get(name) for name in ("source", "device", "model", "dtype", "commit", "date")}
  figures |= {"fleet": dataclasses.asdict(fleet), "workload": about, "costs": {"file": args.costs} | source}
  # Processor time, so that a busy machine does not look like a slow simulator; the steps are those of the last run.
  figures["simulator"] = {"processor_s": round(took, 3), "steps_per_minute": round(figures["steps"] / took * 60)}
  print(json.dumps(figures), flush=True)
  return 0 if figures["completed"] else 1


if __name__ == "__main__":
  sys.exit(main())
