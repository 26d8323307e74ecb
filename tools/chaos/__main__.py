"""Injects every fault of the catalogue into servers, and reports which checks passed. Runs no engine itself.

  python -m tools.chaos [--quick | --full] [--scenario=NAME,NAME] [--output=FILE]     # about 10 minutes on 2 cores
  python -m tools.chaos --soak --hours=H [--output=FILE]

Servers are real processes with the fake device, whose tokens clients can compute; clients are separate processes. The
scenario endpoints serves the demo model.
Prints a table; --output writes it as JSON. Exit code 1 if a check failed, 2 for a bad command line.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import sys
import time
from typing import Any

from rich.console import Console

from engine.errors import ConfigError
from tools.arguments import CommandParser, output_file, positive_float
from tools.chaos import (
  batches,
  cancels,
  crowds,
  disconnects,
  endpoints,
  fairness,
  floods,
  fuzz,
  http,
  lifecycle,
  overload,
  poison,
  refusals,
  soak,
)
from tools.chaos.report import Row, as_json, show
from tools.chaos.rig import Rig
from tools.measure import machine, write_result

type Scenario = Callable[[Rig], list[Row]]

# Each scenario, and with the counts of --quick.
SCENARIOS: dict[str, tuple[Scenario, Scenario]] = {
  "disconnects": (disconnects.disconnects, functools.partial(disconnects.disconnects, count=400, warmup=100)),
  "cancels": (cancels.cancels, functools.partial(cancels.cancels, count=50)),
  "parse": (fuzz.parse, functools.partial(fuzz.parse, count=40_000)),
  "wire": (fuzz.wire, functools.partial(fuzz.wire, count=2_000)),
  "refusals": (refusals.refusals, functools.partial(refusals.refusals, count=20)),
  "http": (http.http, functools.partial(http.http, count=500)),
  "drains": (lifecycle.drains, functools.partial(lifecycle.drains, count=6)),
  "kills": (lifecycle.kills, functools.partial(lifecycle.kills, count=6)),
  "failures": (lifecycle.failures, functools.partial(lifecycle.failures, count=6)),
  "poisoned": (poison.poisoned, functools.partial(poison.poisoned, count=100, neighbours=400)),
  "preempted": (crowds.preempted, functools.partial(crowds.preempted, count=100)),
  "concurrent": (crowds.concurrent, functools.partial(crowds.concurrent, count=200)),
  "salts": (crowds.salts, functools.partial(crowds.salts, count=50)),
  "overload": (overload.overload, functools.partial(overload.overload, seconds=8.0, peak_s=4.0)),
  "slow_readers": (overload.slow_readers, functools.partial(overload.slow_readers, count=50, quiet_s=4.0)),
  "junk": (floods.junk, functools.partial(floods.junk, count=4_000)),
  "resets": (floods.resets, functools.partial(floods.resets, count=4_000)),
  "resets_on": (floods.resets_on, functools.partial(floods.resets_on, seconds=3.0)),
  "frames": (floods.frames, functools.partial(floods.frames, count=10_000)),
  "ageing": (fairness.ageing, functools.partial(fairness.ageing, levels=(2, 4), starved_s=2.0)),
  "batches": (batches.batches, functools.partial(batches.batches, count=3)),
  "endpoints": (endpoints.endpoints, endpoints.endpoints),
  "tenants": (fairness.tenants, functools.partial(fairness.tenants, seconds=3.0)),
}
# Counts for --full, which take longer than ten minutes.
FULL: dict[str, Scenario] = {"http": functools.partial(http.http, count=20_000)}


def run(rig: Rig, chosen: Sequence[str], console: Console, *, quick: bool, full: bool = False) -> list[Row]:
  """Runs scenarios one after the other; a server that does not start is a failed check."""
  rows: list[Row] = []
  for name in chosen:
    console.print(f"{name} ...", style="dim")
    began = time.monotonic()
    try:
      scenario = FULL[name] if full and name in FULL else SCENARIOS[name][quick]
      found = scenario(rig)
    except ConfigError as error:
      found = [Row("a server that serves", "it does", str(error), False)]
    seconds = time.monotonic() - began
    rows += [dataclasses.replace(row, scenario=name, seconds=seconds) for row in found]
    for row in found:
      console.print(f"  {row.check}: {row.measured}: {row.verdict}", style="dim", highlight=False)
  return rows


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser(
    "python -m tools.chaos", "Inject the catalogue's faults into servers; report which checks passed."
  )
  parser.add_argument("--scenario", default="", help=f"names separated by commas: {', '.join(SCENARIOS)}")
  parser.add_argument("--quick", action="store_true", help="small counts, as the table shows")
  parser.add_argument("--full", action="store_true", help="also the counts that take longer than ten minutes")
  parser.add_argument("--output", type=output_file, default="", help="file for the table as JSON")
  parser.add_argument("--soak", action="store_true", help="run a mixture of everything for hours")
  parser.add_argument("--hours", type=positive_float, default=8.0, help="with --soak: hours to run")
  args = parser.parse_args(arguments)
  chosen = [name for name in args.scenario.split(",") if name] or list(SCENARIOS)
  unknown = [name for name in chosen if name not in SCENARIOS]
  if unknown:
    parser.error(f"--scenario={unknown[0]} is unknown; use one of {', '.join(SCENARIOS)}")
  console = Console(stderr=True)
  began = time.monotonic()
  about: dict[str, Any] = {"machine": machine()}
  with Rig() as rig:
    if args.soak:
      rows = soak.soak(rig, 3600 * args.hours, lambda line: console.print(line, style="dim", highlight=False))
      rows = [dataclasses.replace(row, scenario="soak") for row in rows]
    else:
      rows = run(rig, chosen, console, quick=args.quick, full=args.full)
  seconds = time.monotonic() - began
  show(rows, seconds, Console(width=None if sys.stdout.isatty() else 160))
  write_result(args.output, as_json(rows, seconds, about))
  return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
  sys.exit(main())
