"""Plans a fleet: serves a trace of up to millions of requests by counts, or finds the cheapest fleet for objectives.

  python -m tools.plan_fleet --replicas=4 --router=prefix_aware --trace=FILE.jsonl
  python -m tools.plan_fleet --device=h200 --model_shape=llama-3-8b --prefill_replicas=2 --decode_replicas=3
  python -m tools.plan_fleet --device=h200 --replicas=2 --autoscale=2:20 --hours=24 --swing=0.6 --rate_scale=10
  python -m tools.plan_fleet --device=h200 --find_cheapest --tp=1,2 --ratios=1:1,1:2 --slo_ttft_p99_ms=1000 \
      --slo_gap_p99_ms=100

A replica is numbers, not tokens: rows, positions, blocks, cached keys. It plans steps by the scheduler's rules under
fcfs, and skips over steps that repeat. tools.plan_fleet.check_agreement compares it with tools.simulate, which runs the
scheduler itself, and so supports every policy and batching mode, and drafts.

Step costs are a measured table (--costs, tools.simulate.measure_costs), or modelled from the data sheet of --device.
Everything printed names which. Links between replicas and to host memory are as fast as the flags say. Steps take mean
times, and a scaled fleet's routers see every replica at once. Exit code 2 with one line for bad input.
"""

from collections.abc import Mapping, Sequence
import gc
import json
import math
import sys
import time
from typing import Any

from engine.errors import ConfigError, EngineError
from tools.arguments import CommandParser
from tools.measure import ROOT, write_result
from tools.plan_fleet.cheapest_fleet import FleetCandidate, FleetObjectives, find_cheapest
from tools.plan_fleet.counted_fleet import CountedFleet
from tools.plan_fleet.fleet_trace import describe_trace
from tools.plan_fleet.plan_flags import (
  DEMO_COSTS,
  add_engine_flags,
  add_fleet_flags,
  add_search_flags,
  add_trace_flags,
  config_from,
  costs_from,
  plan_from,
  trace_from,
)
from tools.simulate.step_costs import StepCosts

_COLUMNS: tuple[tuple[str, str, str], ...] = (
  ("TTFT p50 ms", "ttft_p50_ms", "{:,.0f}"),
  ("p99", "ttft_p99_ms", "{:,.0f}"),
  ("gap p50 ms", "itl_p50_ms", "{:,.1f}"),
  ("p99", "itl_p99_ms", "{:,.1f}"),
  ("output tok/s", "output_tok_s", "{:,.0f}"),
  ("cached", "cached_share", "{:.1%}"),
  ("busy", "device_busy_share", "{:.0%}"),
  ("device-hours", "device_hours", "{:,.2f}"),
)


def make_parser() -> CommandParser:
  """Returns the parser of the command line."""
  parser = CommandParser("tools.plan_fleet", __doc__)
  add_trace_flags(parser)
  add_engine_flags(parser)
  add_fleet_flags(parser)
  add_search_flags(parser)
  return parser


def candidates_from(args: Any) -> list[FleetCandidate]:
  """Returns the kinds of fleet to search. Raises ConfigError."""
  if args.replicas != 1 or args.prefill_replicas or args.decode_replicas or args.autoscale or args.lose:
    raise ConfigError(
      "find_cheapest=true finds the numbers itself; leave out --replicas, --prefill_replicas, --decode_replicas, "
      "--autoscale and --lose, and set --ratios for disaggregated fleets"
    )
  found = []
  for tp in args.tp:
    costs = costs_from(args, tp)
    config, plan = config_from(args, costs), plan_from(args, tp)
    found.append(FleetCandidate(plan, config, costs))
    for prefill, decode in args.ratios:
      args.prefill_replicas, args.decode_replicas = prefill, decode
      found.append(FleetCandidate(plan_from(args, tp), config, costs))
    args.prefill_replicas = args.decode_replicas = 0
  return found


def describe_costs(args: Any, costs: StepCosts) -> str:
  """Describes where step times come from."""
  about = costs.about
  if "tp" in about:
    return f"step times: MODELLED, {about['model']} on {about['device']} (roofline, data sheet)"
  source = about.get("source", "unknown")
  kind = "measured" if source == "measured" else f"MODELLED ({source})"
  return f"step times: {kind}, {(args.costs or DEMO_COSTS).removeprefix(f'{ROOT}/')}"


def format_rows(rows: Sequence[Mapping[str, Any]], first: str) -> str:
  """Formats figures as a table; `first` names the first column's figure."""
  table = [[first, *(title for title, _, _ in _COLUMNS)]]
  for row in rows:
    cells = ["-" if row.get(name) is None else form.format(row[name]) for _, name, form in _COLUMNS]
    table.append([str(row[first]), *cells])
  widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
  return "\n".join(
    "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
    for row in table
  )


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns 1 if no request was served, 2 after one line for bad input."""
  parser = make_parser()
  args = parser.parse_args(argv)
  try:
    if args.find_cheapest:
      result, text = search_plans(args)
    else:
      result, text = run_plan(args)
    write_result(args.output, result)
  except (EngineError, OSError) as error:
    return parser.failed(error)
  print(json.dumps(result) if args.json else text, flush=True)
  return 0 if result["completed"] else 1


def _limits(args: Any) -> tuple[float | None, ...]:
  """Returns the objectives of the flags, in the order of FleetObjectives."""
  return args.slo_ttft_p50_ms, args.slo_ttft_p99_ms, args.slo_gap_p99_ms, args.slo_tpot_p99_ms


def run_plan(args: Any) -> tuple[dict[str, Any], str]:
  """Serves the trace once; returns the figures, and the same as text. Raises EngineError."""
  if any(_limits(args)) or args.ratios:
    raise ConfigError("objectives and --ratios are for the search; add --find_cheapest, or leave them out")
  if len(args.tp) > 1:
    raise ConfigError(f"tp={','.join(map(str, args.tp))} has several values; add --find_cheapest, or set one")
  costs = costs_from(args, args.tp[0])
  config = config_from(args, costs)
  trace = trace_from(args, config.block_size, config.max_model_len)
  fleet = CountedFleet(config, costs, plan_from(args, args.tp[0]), trace)
  gc.collect()
  gc.freeze()  # the trace stays, so no collection needs to scan it
  started = time.process_time()
  fleet.run()
  took = time.process_time() - started
  result = fleet.figures() | {
    "processor_s": round(took, 3),
    "workload": {"trace": args.trace, "rate_scale": args.rate_scale} | describe_trace(trace),
    "costs": describe_costs(args, costs),
  }
  about = result["workload"]
  lines = [
    f"{about['requests']:,} requests over {about['hours']:.2f} h, mean {about['mean_prompt']:,.0f} prompt and "
    f"{about['mean_output']:,.0f} output tokens; simulated in {took:.1f} s of one core",
    result["costs"],
    "",
    format_rows([result], "fleet"),
  ]
  if result["errors"]:
    lines.append(f"not served: {result['errors']}")
  return result, "\n".join(lines)


def search_plans(args: Any) -> tuple[dict[str, Any], str]:
  """Finds the cheapest fleet; returns all kinds' figures, and the same as text. Raises EngineError."""
  objectives = FleetObjectives(*(limit or math.inf for limit in _limits(args)))
  candidates = candidates_from(args)
  config = candidates[0].config
  trace = trace_from(args, config.block_size, config.max_model_len)
  gc.collect()
  gc.freeze()
  rows = find_cheapest(
    candidates, objectives, trace, args.max_replicas, lambda line: print(line, file=sys.stderr, flush=True)
  )
  best = rows[0]
  source = describe_costs(args, candidates[0].costs)
  result = {"completed": best["completed"], "cheapest": best, "rows": rows, "costs": source}
  result["workload"] = {"trace": args.trace, "rate_scale": args.rate_scale} | describe_trace(trace)
  margins = ", ".join(f"{name} {margin:.1%} below its limit" for name, margin in best["margins"].items())
  shown = [row | {"fleet": row.get("fleet") or f"{row['kind']}: not up to {row['tried_up_to']}"} for row in rows]
  lines = [source, "", format_rows(shown, "fleet"), ""]
  lines.append(f"cheapest: {best['fleet']}, {best['device_hours']:,.2f} device-hours; {margins}")
  return result, "\n".join(lines)


if __name__ == "__main__":
  sys.exit(main())
