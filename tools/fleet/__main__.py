"""Runs a fleet on this machine, loses its processes under load, and checks that no stream gets a wrong token.

  make fleet                                     # about 4 minutes on 2 cores
  make fleet ARGS="--faults=kill,stop --rounds=3 --output=FILE"
  make fleet ARGS=--faults=corrupt,delay

The fleet serves the demo model: two replicas under Ray Serve, a decode and a prefill server, and a router in front of
them. HTTP streams go through the router, gRPC streams to Ray Serve. A plain server's outputs are the expected ones.
kill and stop lose processes. corrupt changes bits of what passes between processes, and delay holds it back for a
second; then the connections have TLS, which finds a changed bit, and gRPC streams go to Ray Serve beside them. With
three rounds or more, what is lost and replaced also starts as often, in turns, and restarts must take no longer.
Shows the fleet live and ends with a table. Exit code 0 only if every check held, 1 if one did not, 2 for a bad command.
"""

import asyncio
from collections.abc import Sequence
import contextlib
import pathlib
import sys
import tempfile
import time

from rich.console import Console
from rich.live import Live

from engine.errors import ConfigError
from tools.arguments import CommandParser, output_file, positive_int
from tools.chaos.report import Row, as_json, show
from tools.fleet.checked_streams import StreamLoad
from tools.fleet.fleet_check import FleetCheck
from tools.fleet.fleet_members import FleetTls, LinkFault, LossKind, RunningFleet
from tools.fleet.fleet_view import FleetView, list_new_ends
from tools.measure import commit, machine, write_result

_CANCELLED_SHARE = 0.1
_REFRESH_S = 0.2


async def run_fleet(
  fleet: RunningFleet, faults: Sequence[LossKind | LinkFault], rounds: int, console: Console, together: bool = False
) -> list[Row]:
  """Checks a fleet with a live view, or a line for each event where there is no terminal; returns the results."""
  load = StreamLoad(
    fleet.cluster.grpc_target,
    fleet.http_url,
    fleet.known,
    cancelled_share=_CANCELLED_SHARE,
    tls=fleet.tls.context if fleet.tls else None,
    application=fleet.cluster.application,
  )
  began, seen = time.monotonic(), 0

  def report(line: str) -> None:
    text = f"{time.monotonic() - began:6.1f} s  {line}"
    view.lines.append(text)
    if not console.is_terminal:
      console.print(text, highlight=False, soft_wrap=True)

  check = FleetCheck(fleet, load, report)
  view = FleetView(fleet, load, check)
  work = asyncio.create_task(check.check_all(faults, rounds, together))
  screen = (
    Live(get_renderable=lambda: view, console=console, screen=True, refresh_per_second=5)
    if console.is_terminal
    else contextlib.nullcontext()
  )
  with screen:
    while not work.done():
      await asyncio.wait((work,), timeout=_REFRESH_S)
      if not console.is_terminal:
        for line in list_new_ends(load, seen):
          console.print(line, highlight=False, soft_wrap=True)
        seen = len(load.ends)
  try:
    await work
  except (ConfigError, RuntimeError, OSError) as error:
    check.rows.append(Row("the run reaches its end", "it does", " ".join(str(error).split())[:300], False))
  return check.rows


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("python -m tools.fleet", __doc__)
  parser.add_argument("--faults", default="kill", help="some of kill, stop, corrupt and delay, with commas")
  parser.add_argument(
    "--rounds", type=positive_int, default=1, help="times that each process or connection has a fault"
  )
  parser.add_argument(
    "--together", action="store_true", help="a round loses every process within seconds, instead of one process"
  )
  parser.add_argument("--output", type=output_file, default="", help="file for the table as JSON")
  args = parser.parse_args(arguments)
  names: dict[str, LossKind | LinkFault] = {fault.value: fault for kind in (LossKind, LinkFault) for fault in kind}
  chosen = [name for name in args.faults.split(",") if name]
  if not chosen or not names.keys() >= set(chosen):
    parser.error(f"--faults={args.faults} is unknown; use some of {','.join(names)}")
  faults = [names[name] for name in chosen]
  has_links = any(isinstance(fault, LinkFault) for fault in faults)
  if has_links and args.together:
    parser.error("--together is for kill and stop; leave out corrupt and delay")
  try:
    from tools.ray_check.cluster import RayCluster  # here, since --help needs no Ray
  except ModuleNotFoundError as error:
    return parser.failed(ConfigError(f"{error}; run it as `make fleet`, which sets up Ray's environment"))
  console, began = Console(stderr=True), time.monotonic()

  def report(line: str) -> None:
    console.print(f"{line} ...", style="dim", highlight=False)

  with contextlib.ExitStack() as stack:
    folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-fleet-")))
    tls = FleetTls(folder) if has_links else None
    report("starting Ray")
    cluster = stack.enter_context(RayCluster(certificate=tls.files if tls else None))
    try:
      fleet = stack.enter_context(RunningFleet(cluster, folder, report, tls))
    except (ConfigError, RuntimeError) as error:
      return parser.failed(error, 1)
    rows = asyncio.run(run_fleet(fleet, faults, args.rounds, console, args.together))
    report("stopping the fleet")
  seconds = time.monotonic() - began
  show(rows, seconds, Console(width=None if sys.stdout.isatty() else 160), "fleet")
  write_result(args.output, as_json(rows, seconds, {"machine": machine(), "commit": commit()}))
  return 0 if rows and all(row.passed for row in rows) else 1


if __name__ == "__main__":
  sys.exit(main())
