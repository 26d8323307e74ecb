"""The flags of tools.plan_fleet, and what they stand for: trace, costs, settings of an engine, fleet."""

import argparse
import dataclasses
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.routing import POLICIES
from engine.shapes import choose_ladder
from tools.arguments import CommandParser, output_file, positive_float, positive_int, positive_ints
from tools.measure import ROOT
from tools.plan_fleet.counted_fleet import FleetPlan, ScalingRule
from tools.plan_fleet.fleet_trace import MOONCAKE_KEY_TOKENS, FleetTrace, read_fleet_trace, shape_trace
from tools.plan_fleet.modelled_costs import DEVICES, MODELS, model_costs, read_model_shape
from tools.simulate.step_costs import StepCosts

SAMPLE_TRACE = str(ROOT / "benchmarks" / "traces" / "azure_conv_5000.csv")
DEMO_COSTS = str(ROOT / "benchmarks" / "costs" / "demo_cpu.json")
_VOCAB_SIZE = 2**31 - 1  # token ids do not matter
_MAX_TOKENS = 8192  # of a modelled step
_DRAFT_FLAGS = ("draft_acceptance", "draft_share", "draft_trace")  # of tools.simulate


def parse_bool(text: str) -> bool:
  """Parses a truth value as the server's flags do."""
  if text.lower() not in ("true", "false", "1", "0"):
    raise argparse.ArgumentTypeError(f"{text!r} must be true or false")
  return text.lower() in ("true", "1")


def parse_pair(text: str) -> tuple[int, int]:
  """Parses two whole numbers of at least 1, as in 2:3."""
  first, colon, second = text.partition(":")
  if not colon:
    raise argparse.ArgumentTypeError(f"{text!r} must be two whole numbers, such as 1:2")
  return positive_int(first), positive_int(second)


def parse_pairs(text: str) -> tuple[tuple[int, int], ...]:
  """Parses pairs separated by commas."""
  return tuple(parse_pair(item) for item in text.split(","))


def parse_loss(text: str) -> tuple[float, int]:
  """Parses SECONDS:REPLICA."""
  try:
    second, _, replica = text.partition(":")
    return float(second), int(replica)
  except ValueError:
    raise argparse.ArgumentTypeError(f"{text!r} must be SECONDS:REPLICA, such as 600:0") from None


def add_trace_flags(parser: CommandParser) -> None:
  """Adds the flags of the requests."""
  group = parser.add_argument_group("requests")
  group.add_argument("--trace", default=SAMPLE_TRACE, help="Azure's CSV, Mooncake's JSON lines, or a request file")
  group.add_argument("--key_tokens", type=positive_int, default=MOONCAKE_KEY_TOKENS, help="tokens of a hash id")
  group.add_argument("--num_requests", type=positive_int, help="number of requests; beyond the trace it repeats")
  group.add_argument("--hours", type=positive_float, help="repeat the trace for so long, instead of --num_requests")
  group.add_argument("--swing", type=float, default=0.0, help="with --hours: the rate swings by this share of its mean")
  group.add_argument("--scale", type=positive_float, default=1.0, help="factor of lengths")
  group.add_argument("--rate_scale", type=positive_float, default=1.0, help="factor of the arrival rate")
  group.add_argument("--max_len", type=positive_int, help="limit for prompt + output; longer prompts are cut")
  group.add_argument("--at_once", action="store_true", help="all requests arrive at the start")


def add_engine_flags(parser: CommandParser) -> None:
  """Adds the flags of costs and engine."""
  group = parser.add_argument_group("one replica")
  group.add_argument("--costs", default="", help="cost table of tools.simulate.measure_costs (default: the demo model)")
  group.add_argument("--device", default="", help=f"model the costs instead, of {', '.join(DEVICES)}")
  group.add_argument(
    "--model_shape", default="llama-3-8b", help=f"with --device: {', '.join(MODELS)}, or a config.json"
  )
  group.add_argument("--tp", type=positive_ints, default=(1,), help="with --device: devices of a replica")
  for name in ("max_model_len", "num_blocks", "block_size", "max_num_seqs", "prefill_chunk"):
    group.add_argument(f"--{name}", type=positive_int, help="as the server's flag (default: as the costs say)")
  group.add_argument("--token_budgets", type=positive_ints, help="as the server's flag")
  group.add_argument("--overlap", type=parse_bool, default=True, help="as the server's flag, without auto")
  group.add_argument("--prefix_cache_scope", choices=("global", "off"), default="global", help="as the server's flag")
  for name in _DRAFT_FLAGS:
    group.add_argument(f"--{name}", default="", help=argparse.SUPPRESS)


def add_fleet_flags(parser: CommandParser) -> None:
  """Adds the flags of the fleet."""
  group = parser.add_argument_group("fleet")
  group.add_argument("--replicas", type=positive_int, default=1, help="engines behind the router")
  group.add_argument("--router", choices=sorted(POLICIES), default=FleetPlan.router, help="routing policy")
  group.add_argument("--prefill_replicas", type=int, default=0, help="engines for prefill alone, instead of --replicas")
  group.add_argument("--decode_replicas", type=int, default=0, help="engines for decode alone")
  group.add_argument("--transfer_gb_s", type=positive_float, default=50.0, help="KV between replicas, 10^9 bytes/s")
  group.add_argument("--transfer_latency_ms", type=float, default=0.0, help="latency of a transfer")
  group.add_argument("--host_kv_mb", type=float, default=0.0, help="host pool of each replica, MiB; needs keys")
  group.add_argument("--host_gb_s", type=positive_float, default=20.0, help="loads from the host pool, 10^9 bytes/s")
  group.add_argument("--host_latency_ms", type=float, default=0.0, help="latency of a load from the host pool")
  group.add_argument("--autoscale", type=parse_pair, help="MIN:MAX replicas; --replicas is the start")
  group.add_argument("--target_load", type=float, default=ScalingRule.target_load, help="unfinished requests a replica")
  group.add_argument("--target_kv", type=float, default=ScalingRule.target_kv, help="KV usage of a replica")
  group.add_argument("--start_s", type=float, default=ScalingRule.start_s, help="start-up time of a replica")
  group.add_argument("--scale_up_delay_s", type=float, default=ScalingRule.up_delay_s, help="wait before a start")
  group.add_argument("--scale_down_delay_s", type=float, default=ScalingRule.down_delay_s, help="wait before a stop")
  group.add_argument("--scale_interval_s", type=float, default=ScalingRule.interval_s, help="time between decisions")
  group.add_argument(
    "--lose", type=parse_loss, action="append", default=[], help="SECONDS:REPLICA: lose a replica then; repeatable"
  )


def add_search_flags(parser: CommandParser) -> None:
  """Adds the flags of the search."""
  group = parser.add_argument_group("search")
  group.add_argument("--find_cheapest", action="store_true", help="find the fleet with the fewest device-hours")
  group.add_argument("--slo_ttft_p50_ms", type=positive_float, help="objective: median time to first token")
  group.add_argument("--slo_ttft_p99_ms", type=positive_float, help="objective: 99th percentile of it")
  group.add_argument("--slo_gap_p99_ms", type=positive_float, help="objective: 99th percentile of gaps between tokens")
  group.add_argument("--slo_tpot_p99_ms", type=positive_float, help="objective: 99th percentile of TPOT")
  group.add_argument("--ratios", type=parse_pairs, default=(), help="prefill:decode ratios to try, such as 1:1,1:2")
  group.add_argument("--max_replicas", type=positive_int, default=256, help="largest fleet to try")
  group.add_argument("--json", action="store_true", help="print one JSON line instead of tables")
  group.add_argument("--output", type=output_file, default="", help="also write the JSON to this file")


def trace_from(args: Any, block_size: int, max_len: int) -> FleetTrace:
  """Returns the requests. Raises ConfigError."""
  trace = read_fleet_trace(args.trace, block_size, args.key_tokens)
  shaped = shape_trace(
    trace,
    num_requests=args.num_requests,
    length_scale=args.scale,
    rate_scale=args.rate_scale,
    max_len=args.max_len or max_len,
    hours=args.hours,
    swing=args.swing,
  )
  if args.at_once:
    shaped.arrivals[:] = type(shaped.arrivals)("d", bytes(8 * len(shaped)))
  return shaped


def costs_from(args: Any, tp: int) -> StepCosts:
  """Returns the measured or modelled table. Raises ConfigError."""
  if args.device:
    if args.costs:
      raise ConfigError(f"costs={args.costs} and device={args.device} both set the step costs; set one of them")
    return model_costs(read_model_shape(args.model_shape), args.device, tp, _MAX_TOKENS, args.block_size or 16)
  if args.tp != (1,):
    raise ConfigError(
      f"tp={','.join(map(str, args.tp))} needs modelled costs, since a table holds one degree; set --device, or "
      "measure a table of that degree and set --costs alone"
    )
  return StepCosts.load(args.costs or DEMO_COSTS)


def config_from(args: Any, costs: StepCosts) -> EngineConfig:
  """Returns the settings of one engine. Raises ConfigError."""
  for name in _DRAFT_FLAGS:
    if getattr(args, name):
      raise ConfigError(
        f"{name}={getattr(args, name):.200}: a planned fleet serves by counts, and so without drafts; leave out "
        f"--{name}, or simulate with python -m tools.simulate"
      )
  about = costs.about
  ladder = choose_ladder(
    str(about.get("ladder", "cpu")),
    token_budgets=args.token_budgets,
    max_num_seqs=args.max_num_seqs or (about.get("max_num_seqs") if "ladder" not in about else None),
    prefill_chunk=args.prefill_chunk,
    all_rungs=True,
  )
  values = {
    "num_blocks": args.num_blocks or about.get("num_blocks"),
    "max_model_len": args.max_model_len or about.get("max_model_len") or (131072 if "ladder" in about else None),
  }
  for name, value in values.items():
    if not value:
      raise ConfigError(f"{name} is in neither the flags nor the cost table; set --{name}")
  return EngineConfig(
    vocab_size=_VOCAB_SIZE,
    max_model_len=int(values["max_model_len"]),
    num_blocks=int(values["num_blocks"]),
    block_size=args.block_size or int(about.get("block_size", 16)),
    token_budgets=ladder.token_budgets,
    max_num_seqs=ladder.max_num_seqs,
    prefill_chunk=ladder.prefill_chunk,
    computes_padding=not costs.by_tokens,
    overlap=args.overlap,
    prefix_cache_scope=args.prefix_cache_scope,
    max_queued_requests=10**9,
    max_queued_tokens=10**9,
    queue_timeout_s=0.0,
    request_timeout_s=0.0,
  )


def plan_from(args: Any, tp: int) -> FleetPlan:
  """Returns the fleet of the flags. Raises ConfigError."""
  scaling = None
  if args.autoscale or args.lose:
    low, high = args.autoscale or (args.replicas, args.replicas)
    scaling = ScalingRule(
      low,
      high,
      args.target_load,
      args.target_kv,
      args.start_s,
      args.scale_up_delay_s,
      args.scale_down_delay_s,
      args.scale_interval_s,
    )
  plan = FleetPlan(
    replicas=args.replicas,
    prefill_replicas=args.prefill_replicas,
    decode_replicas=args.decode_replicas,
    router=args.router,
    devices_per_replica=tp,
    transfer_bytes_s=args.transfer_gb_s * 1e9,
    transfer_latency_s=args.transfer_latency_ms / 1e3,
    host_kv_bytes=args.host_kv_mb * 2**20,
    host_bytes_s=args.host_gb_s * 1e9,
    host_latency_s=args.host_latency_ms / 1e3,
    scaling=scaling,
    losses=tuple(args.lose),
  )
  return dataclasses.replace(plan, replicas=0) if plan.is_split else plan
