"""Serves a trace in tools.simulate, which runs the scheduler itself, and by counts, and prints the differences.

  python -m tools.plan_fleet.check_agreement --num_requests=500 --rate_scale=2
  python -m tools.plan_fleet.check_agreement --trace=FILE.jsonl --replicas=4 --router=prefix_aware --device=h200

The flags are those of tools.plan_fleet. Exit code 1 if a difference exceeds its limit: a share of the exact figure, or
for the cached share a difference of shares. tools.simulate has no host pools, scaling or losses.
"""

from collections.abc import Sequence
import json
import sys
import time
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError
from tools.arguments import CommandParser, output_file
from tools.measure import commit, write_result
from tools.plan_fleet.counted_fleet import CountedFleet, FleetPlan
from tools.plan_fleet.fleet_trace import FleetTrace, describe_trace
from tools.plan_fleet.plan_flags import (
  add_engine_flags,
  add_fleet_flags,
  add_trace_flags,
  config_from,
  costs_from,
  plan_from,
  trace_from,
)
from tools.report.latency import Objectives
from tools.simulate.events import Collector, Fleet, Simulation
from tools.simulate.replica import Arrival
from tools.simulate.step_costs import StepCosts

LIMITS = {
  "ttft_p50_ms": 0.10,
  "ttft_p99_ms": 0.10,
  "itl_p50_ms": 0.05,
  "itl_p99_ms": 0.10,
  "tpot_p50_ms": 0.10,
  "output_tok_s": 0.02,
  "cached_share": 0.02,
}


def arrivals_of(trace: FleetTrace) -> list[Arrival]:
  """Returns requests with token ids that share blocks where the trace's keys are equal, and nowhere else."""
  longest = max(trace.prompts, default=0)
  zeros, size, found = bytes(longest), trace.key_tokens, []
  for index in range(len(trace)):
    prompt, keys = trace.prompts[index], trace.keys_of(index)
    tokens: Sequence[int] = zeros[:prompt]
    salt = index.to_bytes(8, "little")
    if keys:
      ids = [key + 1 for key in keys for _ in range(size)][:prompt]
      tokens, salt = ids + [2**30 + index] * (prompt - len(ids)), b""  # the rest is this request's own
    found.append(Arrival(index, trace.arrivals[index], tokens, trace.outputs[index], salt))
  return found


def run_exact(config: EngineConfig, costs: StepCosts, plan: FleetPlan, trace: FleetTrace) -> dict[str, Any]:
  """Returns the exact simulator's figures, with the cached share of all prompt tokens."""
  if plan.scaling or plan.losses or plan.host_kv_bytes:
    raise ConfigError(
      "tools.simulate has no autoscaling, lost replicas or host pools; leave out --autoscale, --lose and --host_kv_mb"
    )
  fleet = Fleet(
    max(1, plan.replicas),
    plan.router,
    plan.prefill_replicas,
    plan.decode_replicas,
    plan.transfer_bytes_s,
    plan.transfer_latency_s,
  )
  simulation = Simulation(config, costs, fleet, Collector(Objectives()))
  simulation.run(arrivals_of(trace))
  figures = simulation.figures()
  return figures | {"cached_share": figures["prefix_hit_tokens"] / max(1, figures["prompt_tokens"])}


def compare_simulators(config: EngineConfig, costs: StepCosts, plan: FleetPlan, trace: FleetTrace) -> dict[str, Any]:
  """Returns both simulators' figures and whether each difference is within its limit."""
  started = time.process_time()
  exact = run_exact(config, costs, plan, trace)
  exact_s, started = time.process_time() - started, time.process_time()
  fleet = CountedFleet(config, costs, plan, trace)
  fleet.run()
  counted = fleet.figures()
  counted_s = time.process_time() - started
  rows = {}
  for name, limit in LIMITS.items():
    wanted, got = exact[name] or 0.0, counted[name] or 0.0
    difference = got - wanted if name == "cached_share" else got / wanted - 1 if wanted else 0.0
    rows[name] = {
      "exact": round(wanted, 4),
      "counted": got,
      "difference": round(difference, 5),
      "limit": limit,
      "within": abs(difference) <= limit,
    }
  return {
    "figures": rows,
    "completed": [exact["completed"], counted["completed"]],
    "preemptions": [exact["preemptions"], counted["preemptions"]],
    "processor_s": [round(exact_s, 2), round(counted_s, 2)],
    "within": all(row["within"] for row in rows.values()) and exact["completed"] == counted["completed"],
  }


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns 1 if a difference is above its limit, 2 after one line for bad input."""
  parser = CommandParser("tools.plan_fleet.check_agreement", __doc__)
  add_trace_flags(parser)
  add_engine_flags(parser)
  add_fleet_flags(parser)
  parser.add_argument("--output", type=output_file, default="", help="also write the JSON to this file")
  args = parser.parse_args(argv)
  try:
    costs = costs_from(args, args.tp[0])
    config = config_from(args, costs)
    trace = trace_from(args, config.block_size, config.max_model_len)
    plan = plan_from(args, args.tp[0])
    result = compare_simulators(config, costs, plan, trace)
    result |= {"fleet": plan.describe(), "router": plan.router, "commit": commit()}
    result["workload"] = {"trace": args.trace, "rate_scale": args.rate_scale} | describe_trace(trace)
    write_result(args.output, result)
  except (EngineError, OSError) as error:
    return parser.failed(error)
  print(f"{'':16}{'exact':>12}{'counted':>12}{'difference':>12}{'limit':>8}", file=sys.stderr)
  for name, row in result["figures"].items():
    line = f"{name:16}{row['exact']:12.4g}{row['counted']:12.4g}{row['difference']:+12.2%}{row['limit']:8.0%}"
    print(line, file=sys.stderr)
  exact_s, counted_s = result["processor_s"]
  print(f"processor time: {exact_s} and {counted_s} s; preemptions {result['preemptions']}", file=sys.stderr)
  print(json.dumps(result), flush=True)
  return 0 if result["within"] else 1


if __name__ == "__main__":
  sys.exit(main())
