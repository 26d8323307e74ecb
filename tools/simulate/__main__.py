"""Serves requests in virtual time, under one policy or several side by side, and prints a table. Imports no jax.

  python -m tools.simulate --policies=fcfs,sjf,my_policy:MyPolicy --report=out
  python -m tools.simulate --costs=costs.json --trace=FILE.csv --scale=0.1 --rate_scale=2 --json
  python -m tools.simulate --costs=costs.json --trace=FILE.csv --replicas=4 --router=prefix_aware
  python -m tools.simulate --costs=costs.json --trace=FILE.csv --prefill_replicas=2 --decode_replicas=3
  python -m tools.simulate --costs=costs.json --trace=FILE.csv --find_replicas --slo_ttft_ms=500 --slo_tpot_ms=50

The Scheduler and Engine are the server's own, and their flags have the server's names. tools.simulate.events describes
the model, tools.simulate.measure_costs makes the cost table, tools.report.latency defines the latency metrics, and
tools.report.senders defines fairness. Every policy serves the same requests at the same times.

Without other flags the command serves the first 1,000 requests of a sample of a production chat trace, by the step
times of the demo model on a CPU. They arrive at --load times what the engine can serve, so a queue builds up and
policies differ. --rate sets the arrival rate itself, --rate_scale keeps the trace's own times, and --requests replays
a request file unchanged. The simulated queue has no limit and no timeout unless a flag sets one.

With --draft_acceptance, requests have drafts (speculative decoding): the engine's own code chooses how many pay by the
simulated step times, and each is accepted with that chance. --draft_trace measures it, and how often requests have
drafts, from a server's step trace.

--report=DIR writes a run file for each policy, plots, and one page (tools.report). --json prints the figures as one
JSON line instead of the table, with several policies under "runs". --output=FILE writes the same JSON. --find_replicas
finds the smallest number of replicas (or, with --prefill_replicas and --decode_replicas, of such groups) at which the
share --attainment of all requests meets the objectives; refused requests miss. Exit code 2 with one line for bad input.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import gc
import json
import math
import sys
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError
from engine.routing import POLICIES
from engine.shapes import choose_ladder
from tools import workload
from tools.arguments import CommandParser, output_file, positive_float, positive_int
from tools.measure import ROOT, write_result
from tools.report.latency import Objectives
from tools.simulate.draft_chances import DraftChances, measure_chances
from tools.simulate.events import Collector, Fleet, Simulation
from tools.simulate.policy_runs import (
  check_policies,
  measure_capacity,
  paced,
  policy_table,
  run_policies,
  write_report,
)
from tools.simulate.replica import Arrival, made_up
from tools.simulate.step_costs import AttentionWork, StepCosts

DEMO_COSTS = str(ROOT / "benchmarks" / "costs" / "demo_cpu.json")
SAMPLE_TRACE = str(ROOT / "benchmarks" / "traces" / "azure_conv_5000.csv")
_SAMPLE_REQUESTS = 1000  # requests of the sample, by default
_SLO = {"ttft": 1000.0, "tpot": 100.0}  # milliseconds, by default
_SENDERS = {"num_tenants": 4, "batch_share": 0.25}  # by default: enough to distinguish fair from tiers
VOCAB_SIZE = 2**31 - 1  # the simulator ignores token ids
_FROM_TABLE = ("max_model_len", "num_blocks", "block_size", "max_num_seqs")  # by default
_UNLIMITED = {  # by default: a limit would truncate a policy's queue
  "max_queued_requests": 10**9,
  "max_queued_tokens": 10**9,
  "queue_timeout_s": 0.0,
  "request_timeout_s": 0.0,
}
_OF_LADDER = {"token_budgets": (), "prefill_chunk": 0}  # by default, as in engine.shapes
_NOT_FLAGS = ("vocab_size", "eos_token_ids", "computes_padding", "speculation", "has_draft_model")


# --- Settings ---------------------------------------------------------------------------------------------------------


def boolean(text: str) -> bool:
  """Parses a truth value as the server's flags do."""
  if text.lower() not in ("true", "false", "1", "0"):
    raise argparse.ArgumentTypeError(f"{text!r} must be true or false")
  return text.lower() in ("true", "1")


def budgets(text: str) -> tuple[int, ...]:
  """Parses a ladder as the server's flags do."""
  try:
    return tuple(int(item) for item in text.split(","))
  except ValueError:
    raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers separated by commas") from None


def add_engine_arguments(parser: CommandParser) -> None:
  """Adds a flag for each setting of the engine, under the server's name."""
  for field in dataclasses.fields(EngineConfig):
    if field.name in _NOT_FLAGS:
      continue
    if field.name in _FROM_TABLE:
      parser.add_argument(f"--{field.name}", type=int, default=0, help="as the server's flag; 0: as the table says")
      continue
    parse: Callable[[str], Any] = {bool: boolean, tuple: budgets}.get(type(field.default), type(field.default))
    default: Any = (_OF_LADDER | _UNLIMITED).get(field.name, field.default)
    parser.add_argument(f"--{field.name}", type=parse, default=default, help="as the server's flag")
  parser.add_argument("--kv_cache_mb", type=int, default=0, help="as the server's flag, instead of --num_blocks")


def engine_config(args: Any, costs: StepCosts, has_drafts: bool = False) -> EngineConfig:
  """Returns the settings from the flags and the cost table, for requests with or without drafts. Raises ConfigError."""
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
  # A rung costs a simulation nothing, so the ladder keeps all.
  ladder = choose_ladder(
    "cpu",
    token_budgets=values["token_budgets"] or None,
    max_num_seqs=values["max_num_seqs"],
    prefill_chunk=values["prefill_chunk"] or None,
    all_rungs=True,
  )
  values |= {name: getattr(ladder, name) for name in _OF_LADDER}
  speculation = "auto" if has_drafts else "none"
  return EngineConfig(vocab_size=VOCAB_SIZE, computes_padding=not costs.by_tokens, speculation=speculation, **values)


def add_draft_arguments(parser: CommandParser) -> None:
  """Adds the flags of speculative decoding."""
  parser.add_argument("--draft_acceptance", type=float, help="chance that a draft is accepted; without it, no drafts")
  parser.add_argument("--draft_share", type=float, help="chance that a decode has drafts (default: 1)")
  parser.add_argument("--draft_trace", default="", help="step trace of a server with drafts, to measure both from")


def drafts_from(args: Any) -> DraftChances | None:
  """Returns what drafters find in the requests, from the flags; None: nothing. Raises ConfigError."""
  if args.draft_trace:
    if args.draft_acceptance is not None or args.draft_share is not None:
      raise ConfigError("--draft_trace measures both chances; leave out --draft_acceptance and --draft_share")
    return measure_chances(args.draft_trace)
  if args.draft_acceptance is None:
    if args.draft_share is not None:
      raise ConfigError(f"draft_share={args.draft_share:g} needs --draft_acceptance")
    return None
  return DraftChances(args.draft_acceptance, 1.0 if args.draft_share is None else args.draft_share)


def expand_flagfile(argv: Sequence[str]) -> list[str]:
  """Replaces --flagfile=FILE with the lines of the file, as the server's flags do. Raises ConfigError."""
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
  """Adds the flags of the requests: those of tools.workload, and request files."""
  parser.add_argument(
    "--requests", help="request file (JSON lines) with real token ids, in which prefixes may be equal"
  )
  parser.add_argument("--at_once", action="store_true", help="with --requests: all requests arrive at the start")
  parser.add_argument("--repeat", type=positive_int, default=1, help="with --trace: number of passes, end to end")
  workload.add_shape_arguments(parser)


def arrivals_from(args: Any, max_len: int | None) -> tuple[list[Arrival], dict[str, Any]]:
  """Returns the requests in order of arrival, and their description. Raises ConfigError.

  With --trace, a finite --rate keeps the trace's lengths and samples new arrival times.
  """
  if args.requests:
    requests = workload.read_requests(args.requests)
    requests.sort(key=lambda request: 0.0 if args.at_once else request.arrival_s)
    made = [
      Arrival(
        request.id,
        0.0 if args.at_once else request.arrival_s,
        request.prompt,
        request.output_len,
        tenant=request.tenant,
        priority=request.priority,
      )
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
    about |= {"num_requests": len(rows)}
    made = made_up(rows)
    if workload.has_senders(args):
      senders = workload.make_senders(len(made), args.num_tenants, args.batch_share, args.seed)
      about |= {"num_tenants": args.num_tenants, "batch_share": args.batch_share}
      made = [
        arrival._replace(tenant=tenant, priority=priority)
        for arrival, (tenant, priority) in zip(made, senders, strict=True)
      ]
    return made, about
  requests, about = workload.from_arguments(args, vocab_size=1)
  made = made_up([(request.arrival_s, len(request.prompt), request.output_len) for request in requests])
  return [
    arrival._replace(tenant=request.tenant, priority=request.priority)
    for arrival, request in zip(made, requests, strict=True)
  ], about


def repeated(rows: list[tuple[float, int, int]], times: int) -> list[tuple[float, int, int]]:
  """Repeats a trace end to end, with its mean gap between two passes."""
  last = rows[-1][0]
  period = last + (last / (len(rows) - 1) if len(rows) > 1 else 0.0)
  return [(arrival_s + turn * period, *lengths) for turn in range(times) for arrival_s, *lengths in rows]  # type: ignore[misc]


# --- The search for a number ------------------------------------------------------------------------------------------


def alone_attainment(
  config: EngineConfig, costs: StepCosts, objectives: Objectives, arrivals: Sequence[Arrival]
) -> tuple[float, float]:
  """Returns the attainment that no number of replicas can exceed: each request has its own device.

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
  """Returns the smallest multiple of the fleet that meets the objectives, and its figures.

  Doubles the number, then halves the interval, on the assumption that more replicas never serve worse. A run stops as
  soon as too many requests have missed.

  Raises:
    ConfigError: no number up to `max_replicas` meets them.
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
  """Adds the flags of the fleet."""
  parser.add_argument("--replicas", type=positive_int, default=1, help="engines behind the router")
  parser.add_argument("--router", choices=sorted(POLICIES), default=Fleet.router, help="router of the requests")
  parser.add_argument(
    "--prefill_replicas", type=int, default=0, help="disaggregated: engines for prefill (0: --replicas)"
  )
  parser.add_argument("--decode_replicas", type=int, default=0, help="disaggregated: engines for decode")
  parser.add_argument(
    "--transfer_gb_s", type=positive_float, default=50.0, help="disaggregated: KV transfer, 10^9 bytes/s"
  )
  parser.add_argument("--transfer_latency_ms", type=float, default=0.0, help="disaggregated: latency of a transfer")
  parser.add_argument("--step_seed", type=int, default=0, help="seed of the step times sampled from the table's spread")


def fleet_from(args: Any) -> Fleet:
  """Returns the fleet from the flags. Raises ConfigError."""
  prefill, decode = args.prefill_replicas, args.decode_replicas
  if args.batching == "disaggregated" and not prefill and not decode:
    prefill = decode = args.replicas
  latency_s = args.transfer_latency_ms / 1e3
  drafts = drafts_from(args)
  return Fleet(args.replicas, args.router, prefill, decode, args.transfer_gb_s * 1e9, latency_s, args.step_seed, drafts)


def policy_names(text: str) -> tuple[str, ...]:
  """Parses names separated by commas."""
  return tuple(item for item in text.split(",") if item)


def make_parser() -> CommandParser:
  """Returns the parser of the command line."""
  parser = CommandParser("tools.simulate", __doc__)
  add_arguments(parser)
  return parser


def add_arguments(parser: CommandParser) -> None:
  """Adds all flags of the command."""
  parser.add_argument("--costs", default=DEMO_COSTS, help="cost table of tools.simulate.measure_costs")
  parser.add_argument(
    "--policies", type=policy_names, default=(), help="policies to run side by side; MODULE:CLASS is one of your own"
  )
  parser.add_argument(
    "--load", type=positive_float, help="arrival rate over capacity (default: 1.1, unless another flag sets arrivals)"
  )
  add_request_arguments(parser)
  add_engine_arguments(parser)
  add_draft_arguments(parser)
  add_fleet_arguments(parser)
  parser.set_defaults(rate=None, prompt_len=None, output_len=None, **_SENDERS)
  parser.add_argument("--slo_ttft_ms", type=positive_float, help="goodput: time to first token (default: 1000)")
  parser.add_argument("--slo_tpot_ms", type=positive_float, help="goodput: time per output token (default: 100)")
  parser.add_argument("--find_replicas", action="store_true", help="find the smallest fleet that meets the objectives")
  parser.add_argument("--attainment", type=float, default=0.9, help="find_replicas: share that meets objectives")
  parser.add_argument("--max_replicas", type=positive_int, default=256, help="find_replicas: largest number to try")
  parser.add_argument("--flagfile", help="more flags, one a line, as tools.simulate.tune_ladder writes them")
  parser.add_argument("--report", default="", help="folder for a page and plots of all policies, and their run files")
  parser.add_argument("--json", action="store_true", help="print one JSON line instead of the table")
  parser.add_argument("--output", type=output_file, default="", help="also write the JSON to this file")


def settle_arguments(args: Any) -> None:
  """Sets the flags that depend on other flags. Raises ConfigError."""
  if not 0 < args.attainment <= 1:
    raise ConfigError(f"attainment={args.attainment} must be above 0 and at most 1; set --attainment")
  args.policies = args.policies or (args.policy,)
  check_policies(args.policies)
  if args.find_replicas and (len(args.policies) > 1 or args.report):
    raise ConfigError("--find_replicas runs one policy and makes no plots; leave out --policies and --report")
  own_times = args.requests or args.rate is not None or args.rate_scale is not None or args.find_replicas
  if args.load is not None and own_times:
    raise ConfigError(
      f"load={args.load:g} sets the arrival rate, and so does another flag; set --load alone, or one of --rate, "
      "--rate_scale, --requests and --find_replicas"
    )
  args.load = None if own_times else args.load or 1.1
  args.rate = math.inf if args.rate is None else args.rate
  if not (args.requests or args.trace or args.prompt_len or args.output_len):
    args.trace, args.num_requests = SAMPLE_TRACE, args.num_requests or _SAMPLE_REQUESTS
  args.prompt_len = args.prompt_len or workload.PROMPT_LEN
  args.output_len = args.output_len or workload.OUTPUT_LEN
  if args.slo_ttft_ms is None and args.slo_tpot_ms is None and not args.find_replicas:
    args.slo_ttft_ms, args.slo_tpot_ms = _SLO["ttft"], _SLO["tpot"]


def describe_run(args: Any, config: EngineConfig, costs: StepCosts, about: Mapping[str, Any]) -> str:
  """Describes the run, as lines above the table."""
  source = about.get("trace") or about.get("requests_file") or "made-up lengths"
  lines = [f"{about['num_requests']:,} requests of {_short(source)}"]
  if "num_tenants" in about:
    lines[0] += f", {about['num_tenants']} tenants, {about['batch_share']:.0%} of the requests with priority 1"
  if about.get("capacity_request_s"):
    lines.append(
      f"load {about['load']:g}: {about['rate']:.4g} requests/s arrive (burstiness {args.burstiness:g}), and the engine "
      f"can serve {about['capacity_request_s']:.4g} requests/s of these"
    )
  lines.append(
    f"step times of {_short(args.costs)} ({costs.about.get('source')}); {config.max_num_seqs} slots, "
    f"{config.num_blocks:,} KV blocks of {config.block_size} tokens, batching {config.batching}"
  )
  limits = {"TTFT": args.slo_ttft_ms, "TPOT": args.slo_tpot_ms}
  wanted = [f"{name} at most {limit:g} ms" for name, limit in limits.items() if limit]
  lines.append(f"goodput counts requests with {' and '.join(wanted) or 'any latency'}")
  return "\n".join(lines)


def _short(path: str) -> str:
  """Returns a path as typed in this checkout."""
  return path.removeprefix(f"{ROOT}/")


def load_requests(
  args: Any, config: EngineConfig, costs: StepCosts, fleet: Fleet
) -> tuple[list[Arrival], dict[str, Any]]:
  """Returns the arrivals, at the rate of --load, and their description. Raises EngineError."""
  arrivals, about = arrivals_from(args, config.max_model_len)
  if args.load is not None:
    capacity = measure_capacity(config, costs, fleet, arrivals)
    arrivals = paced(arrivals, args.load * capacity, args.burstiness, args.seed)
    about |= {"load": args.load, "capacity_request_s": capacity, "rate": args.load * capacity, "rate_scale": None}
  return arrivals, about


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns 1 if a policy served no request, 2 after one line for bad input."""
  parser = make_parser()
  try:
    args = parser.parse_args(expand_flagfile(sys.argv[1:] if argv is None else argv))
    settle_arguments(args)
    costs = StepCosts.load(args.costs)
    args.policy = args.policies[0]
    fleet = fleet_from(args)
    config = engine_config(args, costs, fleet.drafts is not None)
    limits_ms = (args.slo_ttft_ms or math.inf, args.slo_tpot_ms or math.inf)
    objectives = Objectives(*(limit / 1e3 for limit in limits_ms))
    arrivals, about = load_requests(args, config, costs, fleet)
    gc.collect()
    gc.freeze()  # the arrivals stay, so no collection needs to scan them
    if args.find_replicas:
      found, one = find_replicas(config, costs, fleet, objectives, arrivals, args.attainment, args.max_replicas)
      figures, page = [one | {"found_replicas": found, "policy": args.policy}], ""
    else:
      runs = run_policies(args.policies, config, costs, fleet, objectives, arrivals, keep=bool(args.report))
      figures = [run.figures for run in runs]
      page = write_report(runs, about, costs, args.costs, args.report) if args.report else ""
    source = {name: costs.about.get(name) for name in ("source", "device", "model", "dtype", "commit", "date")}
    more = {"fleet": dataclasses.asdict(fleet), "workload": about, "costs": {"file": args.costs} | source}
    figures = [each | more for each in figures]
    result = figures[0] if len(figures) == 1 else {"runs": figures}
    write_result(args.output, result)
  except (EngineError, OSError) as error:
    return parser.failed(error)
  if args.json:
    print(json.dumps(result), flush=True)
  else:
    lines = [describe_run(args, config, costs, about), "", policy_table(figures)]
    if args.find_replicas:
      lines += ["", f"replicas that meet the objectives: {figures[0]['found_replicas']}"]
    if page:
      lines += ["", f"report: {page}"]
    print("\n".join(lines), flush=True)
  return 0 if all(each["completed"] for each in figures) else 1


if __name__ == "__main__":
  sys.exit(main())
