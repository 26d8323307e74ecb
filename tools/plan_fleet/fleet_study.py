"""Runs tools.plan_fleet for the questions of benchmarks/fleet/README.md, and writes one JSON file.

  python -m tools.plan_fleet.fleet_study --output=benchmarks/fleet/study.json
  python -m tools.plan_fleet.fleet_study --parts=days --mooncake=conversation_trace.jsonl --output=FILE.json

  affinity        cached prompt tokens by router, on 4 replicas and in one cache of their size
  disaggregation  the smallest fleet for each limit of gaps, with prefill and decode together and apart
  links           the same fleet apart, over slower links
  host            a host pool behind a small device pool, over links of two speeds
  days            fixed and scaled fleets over a day whose rate swings by 0.6 of its mean

Step times are modelled: Llama-3's shapes on H200. Every row has the flags that make it. --mooncake names
conversation_trace.jsonl of github.com/kvcache-ai/Mooncake (FAST25-release/traces, Apache-2.0), which is not in this
tree; without it, those rows are left out. --output keeps earlier parts of the file.
"""

from collections.abc import Iterator, Sequence
import gc
import json
import pathlib
import sys
import tempfile
from typing import Any

from engine.errors import ConfigError, EngineError
from tools.arguments import CommandParser, output_file
from tools.measure import commit, write_result
from tools.plan_fleet import make_sessions
from tools.plan_fleet.__main__ import make_parser, run_plan, search_plans

PARTS = ("affinity", "disaggregation", "links", "host", "days")
ROUTERS = ("round_robin", "least_loaded", "prefix_aware")
GAP_LIMITS_MS = (6, 8, 10, 12, 16, 20, 30, 50, 100)
TTFT_P99_MS = {"AZURE": 2000.0, "MOONCAKE": 10_000.0}  # the longest prompts of Mooncake's take 7 s alone
_KEPT = (
  "fleet",
  "requests",
  "completed",
  "ttft_p50_ms",
  "ttft_p99_ms",
  "itl_p50_ms",
  "itl_p99_ms",
  "tpot_p50_ms",
  "output_tok_s",
  "cached_share",
  "host_hit_share",
  "device_busy_share",
  "most_replicas",
  "device_hours",
  "processor_s",
)


class FleetStudy:
  """Runs commands of tools.plan_fleet, and keeps their flags and figures."""

  def __init__(self, sessions: str, mooncake: str):
    """Args: sessions, mooncake: paths of traces; an empty path leaves its rows out."""
    self._paths = {"SESSIONS": sessions, "MOONCAKE": mooncake}

  def has_trace(self, name: str) -> bool:
    """Returns whether a trace is at hand."""
    return bool(self._paths.get(name, name))

  def run_row(self, flags: Sequence[str], **about: Any) -> dict[str, Any]:
    """Runs once; `about` describes the row."""
    args = self._parse(flags)
    figures = search_plans(args)[0]["cheapest"] if args.find_cheapest else run_plan(args)[0]
    gc.unfreeze()
    row = about | {name: figures[name] for name in _KEPT if name in figures}
    print(" ".join(f"{key}={value}" for key, value in row.items()), file=sys.stderr, flush=True)
    return row | {"flags": list(flags)}

  def _parse(self, flags: Sequence[str]) -> Any:
    args = make_parser().parse_args(list(flags))
    args.trace = self._paths.get(args.trace, args.trace)
    return args


def study_affinity(study: FleetStudy) -> Iterator[dict[str, Any]]:
  """Yields a row for each trace, pool and router, and for one replica with four times the device and the pool."""
  for trace, rate in (("SESSIONS", 1.0), ("MOONCAKE", 2.0)):
    if not study.has_trace(trace):
      continue
    base = [f"--trace={trace}", "--device=h200", f"--rate_scale={rate:g}"]
    for blocks in (12_500, 25_000, 50_000):
      about = {"trace": trace, "pool_tokens": 16 * blocks}
      for router in ROUTERS:
        flags = [*base, "--replicas=4", f"--router={router}", f"--num_blocks={blocks}"]
        yield study.run_row(flags, router=router, **about)
      flags = [*base, "--tp=4", f"--num_blocks={4 * blocks}", "--max_num_seqs=1024"]
      yield study.run_row(flags, router="one cache", **about)
    base[-1] = f"--rate_scale={3 * rate:g}"
    slo = ["--slo_ttft_p99_ms=2000", "--slo_gap_p99_ms=60"] if trace == "SESSIONS" else ["--slo_ttft_p99_ms=10000"]
    for router in ROUTERS:
      flags = [*base, "--find_cheapest", *slo, f"--router={router}"]
      yield study.run_row(flags, trace=trace, search=router)


def study_disaggregation(study: FleetStudy) -> Iterator[dict[str, Any]]:
  """Yields a row for each kind of fleet and number of devices; find_fewest() evaluates them."""
  for trace, rate, count, most in (("AZURE", 30.0, 15_000, 12), ("MOONCAKE", 6.0, 5_000, 16)):
    if not study.has_trace(trace):
      continue
    base = ["--device=h200", f"--rate_scale={rate:g}", f"--num_requests={count}", "--router=prefix_aware"]
    base += [] if trace == "AZURE" else [f"--trace={trace}"]
    for chunk in (256, 512, 2048):
      for replicas in range(2, most + 1):
        flags = [*base, f"--replicas={replicas}", f"--prefill_chunk={chunk}"]
        yield study.run_row(flags, trace=trace, kind=f"together, chunk {chunk}", devices=replicas)
    for prefill, decode in ((3, 1), (2, 1), (1, 1), (1, 2), (1, 3)):
      for times in range(1, most // (prefill + decode) + 1):
        flags = [*base, f"--prefill_replicas={prefill * times}", f"--decode_replicas={decode * times}"]
        devices = (prefill + decode) * times
        yield study.run_row(flags, trace=trace, kind=f"apart, {prefill}:{decode}", devices=devices)


def find_fewest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  """Returns, for each trace and limit of the p99 gap, the fewest devices together and apart that meet it.

  All meet the trace's TTFT_P99_MS too, and the median TPOT is within the limit of gaps. None: no fleet that was tried.
  """
  found = []
  for trace in dict.fromkeys(row["trace"] for row in rows):
    for limit_ms in GAP_LIMITS_MS:
      entry: dict[str, Any] = {"trace": trace, "gap_p99_ms": limit_ms}
      for way in ("together", "apart"):
        good = [
          row
          for row in rows
          if row["trace"] == trace
          and row["kind"].startswith(way)
          and row["ttft_p99_ms"] <= TTFT_P99_MS[trace]
          and row["itl_p99_ms"] <= limit_ms
          and row["tpot_p50_ms"] <= limit_ms  # a wait for a decode replica is one gap of a request, too few for the p99
        ]
        best = min(good, key=lambda row: (row["devices"], row["ttft_p99_ms"]), default=None)
        entry[way] = best and best["devices"]
        entry[f"{way}_kind"] = best and best["kind"]
      found.append(entry)
  return found


def study_links(study: FleetStudy) -> Iterator[dict[str, Any]]:
  """Yields a row for each speed of the link between prefill and decode replicas."""
  for trace, rate, count, fleet in (("AZURE", 30.0, 15_000, (4, 4)), ("MOONCAKE", 6.0, 5_000, (10, 5))):
    if not study.has_trace(trace):
      continue
    base = ["--device=h200", f"--rate_scale={rate:g}", f"--num_requests={count}", "--router=prefix_aware"]
    base += [] if trace == "AZURE" else [f"--trace={trace}"]
    for speed in (450, 50, 12.5, 1.25):
      flags = [*base, f"--prefill_replicas={fleet[0]}", f"--decode_replicas={fleet[1]}", f"--transfer_gb_s={speed:g}"]
      yield study.run_row(flags, trace=trace, transfer_gb_s=speed)


def study_host_pools(study: FleetStudy) -> Iterator[dict[str, Any]]:
  """Yields a row for each size and speed of the host pool, for 4 replicas with 200,000 tokens of KV each."""
  for trace, rate in (("SESSIONS", 1.0), ("MOONCAKE", 2.0)):
    if not study.has_trace(trace):
      continue
    base = [f"--trace={trace}", "--device=h200", f"--rate_scale={rate:g}", "--replicas=4", "--router=prefix_aware"]
    for size_mb, speed in ((0, 20), (65_536, 20), (65_536, 2), (262_144, 20)):
      flags = [*base, "--num_blocks=12500", f"--host_kv_mb={size_mb}", f"--host_gb_s={speed}"]
      yield study.run_row(flags, trace=trace, host_kv_mb=size_mb, host_gb_s=speed)


def study_days(study: FleetStudy) -> Iterator[dict[str, Any]]:
  """Yields, for each trace, the smallest fleet for the peak hour, and days with a fixed and with scaled fleets."""
  loads = {"AZURE": 40, "MOONCAKE": 6}  # about what a replica has in the peak hour
  for trace, rate, ttft_ms, gap_ms in (("AZURE", 1.0, 5000, 250), ("MOONCAKE", 0.5, 30_000, 500)):
    if not study.has_trace(trace):
      continue
    base = ["--device=h200", "--model_shape=llama-3-70b", "--tp=2", "--router=prefix_aware"]
    base += [] if trace == "AZURE" else [f"--trace={trace}"]
    slo = [f"--slo_ttft_p99_ms={ttft_ms}", f"--slo_gap_p99_ms={gap_ms}"]
    peak = study.run_row(
      [*base, f"--rate_scale={rate * 1.6:g}", "--hours=1", "--find_cheapest", *slo], trace=trace, what="peak hour"
    )
    yield peak
    count = peak["most_replicas"]
    day = [*base, f"--rate_scale={rate:g}", "--hours=24", "--swing=0.6"]
    yield study.run_row([*day, f"--replicas={count}"], trace=trace, what="day, fixed")
    for load, start_s in ((loads[trace], 60), (loads[trace], 300), (loads[trace] // 2, 60)):
      flags = [*day, f"--replicas={max(1, count // 2)}", f"--autoscale=1:{2 * count}", f"--target_load={load}"]
      yield study.run_row(
        [*flags, f"--start_s={start_s}"], trace=trace, what=f"day, target load {load}, start {start_s} s"
      )


STUDIES = {
  "affinity": study_affinity,
  "disaggregation": study_disaggregation,
  "links": study_links,
  "host": study_host_pools,
  "days": study_days,
}


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns 2 after one line for bad input."""
  parser = CommandParser("tools.plan_fleet.fleet_study", __doc__)
  parser.add_argument("--parts", default=",".join(PARTS), help="parts to run, separated by commas")
  parser.add_argument("--mooncake", default="", help="path of Mooncake's conversation_trace.jsonl")
  parser.add_argument("--output", type=output_file, required=True, help="JSON file to write")
  args = parser.parse_args(argv)
  try:
    parts = args.parts.split(",")
    unknown = [part for part in parts if part not in STUDIES]
    if unknown:
      raise ConfigError(f"part {unknown[0]!r} is none of {', '.join(PARTS)}; set --parts")
    path = pathlib.Path(args.output)
    result: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
      sessions = str(pathlib.Path(folder) / "sessions.jsonl")
      if make_sessions.main(["--num_requests=12000", "--rate=20", f"--output={sessions}"]):
        raise ConfigError(f"{sessions} could not be written; see the line above")
      study = FleetStudy(sessions, args.mooncake)
      for part in parts:
        rows = list(STUDIES[part](study))
        result[part] = {"commit": commit(), "rows": rows}
        if part == "disaggregation":
          result[part]["fewest"] = find_fewest(rows)
        write_result(args.output, result)
  except (EngineError, OSError, ValueError) as error:
    return parser.failed(error)
  print(args.output)
  return 0


if __name__ == "__main__":
  sys.exit(main())
