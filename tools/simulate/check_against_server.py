"""Serves the same requests on the real engine and in the simulator, and prints the differences. Tunes neither.

  python -m tools.simulate.check_against_server [--model=DIR] [--costs=FILE] [--loads=NAME,...] [--output=FILE]
  python -m tools.simulate.check_against_server --planner

The loads are each --trace with lengths and rate scaled to a small machine, a synthetic Poisson load, and the first
trace all at once, which measures the throughput. A trace without arrival times gets Poisson arrivals at --lengths_load
of the machine's throughput for it, measured anew in each round. The real engine serves each load --rounds times in its
own process (tools.bench_offline). The simulator serves it under the same settings, with the cost table of --costs, or
with one measured before each round, since a shared machine's speed changes. Random step times move a 99th percentile of
some hundred requests by a tenth, so the simulator runs `--draws` times. The tool compares medians over rounds and runs,
beside the spread of the real rounds. With --over_grpc the real side is a server under tools.bench_serving, whose
clients and front end share the machine. Steps take longer there, so the table's device part comes from the step trace
of a warm-up load of that server. A request's time outside the engine is the difference between that load's measured
and simulated median TTFT. --output keeps earlier loads of the file, each with its commit. Exit code 1 if a difference
is above --throughput_tolerance or, for percentiles, --tolerance.

With --planner, tools.plan_fleet takes the simulator's place. It has no random step times, so it runs once.
"""

from collections.abc import Sequence
import dataclasses
import itertools
import json
import pathlib
import statistics
import sys
import tempfile
from typing import Any

from engine.errors import ConfigError, EngineError
from tools import workload
from tools.arguments import CommandParser, output_file, positive_float, positive_int
from tools.measure import ROOT, commit, machine, median_of, run_tool, write_result
from tools.server_process import RunningServer
from tools.simulate.step_costs import StepCosts
from tools.workload import WorkRequest

SAMPLE = ROOT / "benchmarks" / "traces" / "azure_conv_500.csv"
THROUGHPUT = ("output_tok_s", "total_tok_s")
LATENCIES = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
OTHERS = ("steps", "padding_share", "tpot_p50_ms", "e2e_p50_ms")
# Flags of both sides.
_SETTINGS = ("token_budgets", "prefill_chunk", "overlap", "max_num_seqs", "max_model_len")


@dataclasses.dataclass(frozen=True)
class TracedLoad:
  """Requests, and their arrivals: at their own times, at a share of the capacity, or (neither) all at once."""

  requests: list[WorkRequest]
  timed: bool = False
  paced: bool = False

  def at(self, request_s: float) -> list[WorkRequest]:
    """Returns the requests with Poisson arrivals at a rate."""
    times = workload.arrivals(len(self.requests), request_s, 1.0, seed=0)
    return [dataclasses.replace(each, arrival_s=time) for each, time in zip(self.requests, times, strict=True)]


def loads(args: Any, vocab_size: int) -> dict[str, TracedLoad]:
  """Returns the loads by name. Raises ConfigError."""
  traces = {}
  for path in args.trace.split(","):
    rows = workload.read_trace(path)
    requests = workload.from_trace(rows, vocab_size, 0, args.scale, args.rate_scale, args.num_requests, args.max_len)
    timed = any(arrival_s for arrival_s, *_ in rows)
    traces[pathlib.Path(path).stem] = TracedLoad(requests, timed=timed, paced=not timed)
  first = next(iter(traces))
  poisson = workload.synthetic(
    args.num_requests, "lognormal:64:8:512", "lognormal:64:4:256", vocab_size, seed=1, rate=args.rate
  )
  every = traces | {"poisson": TracedLoad(poisson, timed=True), f"{first} at once": TracedLoad(traces[first].requests)}
  wanted = args.loads.split(",") if args.loads else list(every)
  unknown = [name for name in wanted if name not in every]
  if unknown:
    raise ConfigError(f"load {unknown[0]!r} is none of {', '.join(every)}; set --loads")
  return {name: every[name] for name in wanted}


def warm_up(args: Any) -> list[WorkRequest]:
  """Returns a load like the others whose last prompts fill the largest step several times."""
  mixed = workload.synthetic(
    args.num_requests, "lognormal:100:8:400", "lognormal:40:4:200", args.vocab_size, seed=9, rate=args.rate
  )
  end_s, top = mixed[-1].arrival_s, int(args.token_budgets.split(",")[-1])
  prompt = tuple(token % args.vocab_size for token in range(min(top, args.max_model_len - 8)))
  return mixed + [WorkRequest(f"long{number}", end_s, prompt, 4) for number in range(8)]


# --- The real side ----------------------------------------------------------------------------------------------------


def _requests_file(requests: Sequence[WorkRequest], path: pathlib.Path) -> str:
  with open(path, "w", encoding="utf-8") as file:
    workload.write_requests(file, requests, {"made_by": "tools.simulate.check_against_server"})
  return str(path)


def offline(args: Any, flags: Sequence[str], path: str, realtime: bool, what: str) -> dict[str, Any]:
  """Runs the engine once in its own process."""
  command = [sys.executable, "-m", "tools.bench_offline", f"--model={args.model}", f"--requests={path}", *flags]
  return run_tool(command + ["--realtime"] * realtime, what)


def online(target: str, path: str, what: str) -> dict[str, Any]:
  """Runs the server once."""
  command = [sys.executable, "-m", "tools.bench_serving", f"--target={target}", f"--requests={path}", "--clients=1"]
  return run_tool(command, what)


# --- Both sides -------------------------------------------------------------------------------------------------------


def compare(
  name: str, real: list[dict[str, Any]], simulated: list[dict[str, Any]], args: Any, timed: bool
) -> dict[str, Any]:
  """Returns medians of the real and the simulated runs; differences are shares of the real ones."""
  rows, worst = {}, True
  for figure in (*THROUGHPUT, *LATENCIES, *OTHERS):
    if figure not in simulated[0]:
      continue
    measured, modelled = median_of(real, figure), median_of(simulated, figure)
    difference = modelled / measured - 1 if measured else 0.0
    # All at once, TTFT and ITL depend on the queue; they are shown, but throughput counts.
    limit = args.throughput_tolerance if figure in THROUGHPUT else None
    if figure in LATENCIES and timed:
      limit = args.tolerance
    worst = worst and (limit is None or abs(difference) <= limit)
    rows[figure] = {
      "measured": measured,
      "simulated": modelled,
      "difference": round(difference, 4),
      "limit": limit,
      "runs_apart": round(_apart([run[figure] for run in real]), 4),
      "runs": [run[figure] for run in real],
      "simulated_runs": [run[figure] for run in simulated],
    }
  head = f"\n{name:30}{'measured':>12}{'simulated':>12}{'difference':>12}{'limit':>8}{'runs apart':>12}"
  print(head, file=sys.stderr)
  for figure, row in rows.items():
    limit_text = f"{row['limit']:.0%}" if row["limit"] else ""
    line = f"{figure:30}{row['measured']:12.4g}{row['simulated']:12.4g}{row['difference']:+12.1%}{limit_text:>8}"
    print(f"{line}{row['runs_apart']:12.1%}", file=sys.stderr)
  return {"within": worst, "figures": rows}


def _apart(values: Sequence[float]) -> float:
  """Returns the relative difference of two runs: the median over all pairs."""
  pairs = [max(pair) / min(pair) - 1 for pair in itertools.combinations(values, 2) if min(pair) > 0]
  return statistics.median(pairs) if pairs else 0.0


def simulated(costs: str, path: str, timed: bool, flags: Sequence[str], what: str) -> dict[str, Any]:
  """Runs the simulator once."""
  command = [sys.executable, "-m", "tools.simulate", f"--costs={costs}", f"--requests={path}", "--json", *flags]
  return run_tool(command + ["--at_once"] * (not timed), what)


def planned(costs: str, path: str, timed: bool, flags: Sequence[str], what: str) -> dict[str, Any]:
  """Runs the fleet's planner once, with one replica."""
  command = [sys.executable, "-m", "tools.plan_fleet", f"--costs={costs}", f"--trace={path}", "--json", *flags]
  return run_tool(command + ["--at_once"] * (not timed), what)


def check(args: Any, folder: pathlib.Path) -> dict[str, Any]:
  """Measures and simulates all loads. Raises ConfigError."""
  cache = f"--compile_cache_dir={args.compile_cache_dir}"
  # Rounds repeat their prompts: with a prefix cache the second would be another load.
  settings = ["--prefix_cache_scope=off", f"--num_blocks={args.num_blocks}"]
  settings += [f"--{name}={getattr(args, name)}" for name in _SETTINGS]
  engine = [cache, *settings, "--speculation=none"]  # the simulator has no drafts unless it is given an acceptance
  unbounded = ["--max_queued_requests=1000000000", "--max_queued_tokens=1000000000"]
  unbounded += ["--queue_timeout_s=0", "--request_timeout_s=0"]
  every = loads(args, args.vocab_size)
  every = {name: load for name, load in every.items() if load.timed or load.paced or not args.over_grpc}
  files = {
    name: _requests_file(load.requests, folder / f"load{number}.jsonl")
    for number, (name, load) in enumerate(every.items())
  }
  rates: dict[str, list[float]] = {name: [] for name, load in every.items() if load.paced}

  def paced(name: str, number: int) -> str:
    """Returns the file of a load in a round; one without times is served all at once first."""
    if name not in rates:
      return files[name]
    what = f"{name} at once: the capacity, round {number + 1} of {args.rounds}"
    capacity = offline(args, engine, files[name], False, what)["request_s"]
    rates[name].append(round(args.lengths_load * capacity, 3))
    return _requests_file(every[name].at(rates[name][-1]), pathlib.Path(files[name]).with_suffix(f".round{number}"))

  paths: dict[str, list[str]] = {name: [] for name in files}
  given = [args.costs] if args.costs else []
  measure = [sys.executable, "-m", "tools.simulate.measure_costs", f"--model={args.model}", *engine]
  measure += [f"--max_context={args.max_context}", f"--load_seconds={args.load_seconds}"]
  real: dict[str, list[dict[str, Any]]] = {name: [] for name in files}
  if args.over_grpc:
    server = [f"--model={args.model}", *engine, *unbounded]
    warm_up_file = _requests_file(warm_up(args), folder / "warm_up.jsonl")
    trace = folder / "steps.jsonl"
    log = folder / "server.log"
    with RunningServer([*server, f"--trace_file={trace}"], log) as running:
      warm = online(running.target, warm_up_file, "warm-up load, whose steps make the cost table")
    with RunningServer(server, log) as running:
      for number in range(args.rounds):
        for name in files:
          paths[name].append(paced(name, number))
          what = f"{name} over gRPC, round {number + 1} of {args.rounds}"
          real[name].append(online(running.target, paths[name][-1], what))
    tables = given or [str(folder / "costs.json")]
    if not given:
      run_tool([*measure, f"--step_trace={trace}", f"--output={tables[0]}"], "cost table")
      modelled = simulated(tables[0], warm_up_file, True, [*settings, *unbounded], "warm-up load, simulated")
      table = StepCosts.load(tables[0])
      front_s = max(0.0, table.host.front_s + (warm["ttft_p50_ms"] - modelled["ttft_p50_ms"]) / 1e3)
      dataclasses.replace(table, host=dataclasses.replace(table.host, front_s=front_s)).save(tables[0])
  else:
    tables = given or [str(folder / f"costs{number}.json") for number in range(args.rounds)]
    for number in range(args.rounds):
      if not given:
        run_tool([*measure, "--rounds=1", "--seconds=0.1", f"--output={tables[number]}"], "cost table")
      for name, load in every.items():
        paths[name].append(paced(name, number))
        what = f"{name}, round {number + 1} of {args.rounds}"
        real[name].append(offline(args, engine, paths[name][-1], load.timed or load.paced, what))
  result: dict[str, Any] = {}
  for name, load in every.items():
    timed = load.timed or load.paced
    # One table for all rounds, or one a round; the same for the arrival times.
    pairs = dict.fromkeys(itertools.zip_longest(tables, paths[name], fillvalue=tables[0]))
    if args.planner:
      figures = [planned(costs, path, timed, settings, f"{name}, planned") for costs, path in pairs]
    else:
      figures = [
        simulated(costs, path, timed, [*settings, *unbounded, f"--step_seed={seed}"], f"{name}, simulated, seed {seed}")
        for costs, path in pairs
        for seed in range(args.draws)
      ]
    result[name] = compare(name, real[name], figures, args, timed)
    if load.paced:
      result[name] |= {"load": args.lengths_load, "requests_per_s": rates[name]}
  costs = [json.loads(pathlib.Path(table).read_text("utf-8")) for table in tables]
  for table in costs:
    for long in ("points", "spread", "launch_spread"):
      table.pop(long, None)
  made = {
    "commit": commit(),
    "rounds": args.rounds,
    "over_grpc": args.over_grpc,
    "planner": args.planner,
    "machine": machine(),
    "costs": costs,
  }
  return {"loads": {name: load | made for name, load in result.items()}}


def kept_loads(path: str) -> dict[str, Any]:
  """Returns the loads of an earlier run's --output. Raises ConfigError."""
  try:
    return json.loads(pathlib.Path(path).read_text("utf-8"))["loads"] if path and pathlib.Path(path).exists() else {}
  except (ValueError, KeyError, TypeError) as error:
    raise ConfigError(f"{path} is no result of this check ({error}); set --output to another file") from error


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns 1 if a difference is above its limit, 2 after one line for bad input."""
  parser = CommandParser("tools.simulate.check_against_server", __doc__)
  parser.add_argument("--model", default=str(ROOT / "models" / "demo"), help="model folder")
  parser.add_argument("--costs", default="", help="cost table; empty: measure them")
  parser.add_argument("--trace", default=str(SAMPLE), help="public traces (CSV), separated by commas")
  parser.add_argument("--scale", type=positive_float, default=0.1, help="lengths of the trace are multiplied by this")
  parser.add_argument("--rate_scale", type=positive_float, default=6.0, help="multiplier of the trace's rate")
  parser.add_argument("--loads", default="", help="names of the loads to run, separated by commas; empty: all")
  parser.add_argument("--rate", type=positive_float, default=15.0, help="Poisson load: requests a second")
  parser.add_argument(
    "--lengths_load", type=positive_float, default=0.6, help="trace without arrival times: rate as a share of capacity"
  )
  parser.add_argument("--num_requests", type=positive_int, default=400, help="requests of each load")
  parser.add_argument(
    "--max_len", type=positive_int, default=1024, help="most tokens of a request; the trace is cut to them"
  )
  parser.add_argument("--rounds", type=positive_int, default=3, help="runs of each load; their medians count")
  parser.add_argument("--draws", type=positive_int, default=5, help="simulated runs of each round, by --step_seed")
  parser.add_argument("--planner", action="store_true", help="compare tools.plan_fleet, not tools.simulate")
  parser.add_argument("--over_grpc", action="store_true", help="the real side is a server and its clients")
  parser.add_argument("--throughput_tolerance", type=positive_float, default=0.10)
  parser.add_argument("--tolerance", type=positive_float, default=0.15, help="for percentiles of TTFT and ITL")
  parser.add_argument("--token_budgets", default="8,16,32,64,128,256,384,512", help="as the server's flag")
  parser.add_argument("--prefill_chunk", type=positive_int, default=512, help="as the server's flag")
  parser.add_argument("--overlap", choices=("true", "false"), default="true", help="as the server's flag")
  parser.add_argument("--max_num_seqs", type=positive_int, default=64, help="as the server's flag")
  parser.add_argument("--max_model_len", type=positive_int, default=2048, help="as the server's flag")
  parser.add_argument("--num_blocks", type=positive_int, default=4096, help="as the server's flag")
  parser.add_argument("--max_context", type=positive_int, default=1024, help="longest context of the cost table")
  parser.add_argument("--load_seconds", type=positive_float, default=10.0, help="seconds of each load for a cost table")
  parser.add_argument("--vocab_size", type=positive_int, default=2048, help="token ids of prompts are below this")
  parser.add_argument("--compile_cache_dir", default=str(pathlib.Path.home() / ".cache" / "sluice" / "programs"))
  parser.add_argument("--output", type=output_file, default="", help="also write the result here")
  args = parser.parse_args(argv)
  try:
    with tempfile.TemporaryDirectory() as folder:
      kept = kept_loads(args.output)
      result = check(args, pathlib.Path(folder))
  except (EngineError, OSError) as error:
    return parser.failed(error)
  within = all(load["within"] for load in result["loads"].values())
  result["loads"] = kept | result["loads"]
  write_result(args.output, result)
  print(json.dumps(result), flush=True)
  return 0 if within else 1


if __name__ == "__main__":
  sys.exit(main())
