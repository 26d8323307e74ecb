"""Serves the demo model on two hosts, loses them under load, and checks that no stream gets a wrong token.

  make host-losses                               # each fault three times
  make host-losses ARGS="--faults=kill,stop --rounds=100 --output=FILE"

Each host is a process on this machine; leader and follower take turns. kill and stop lose a host, corrupt changes bits
of what the leader sends, and delay holds it back for a second. The first three end both hosts; then they start again.
Exit code 0 only if every check held, 1 if one did not, 2 for a bad command.
"""

import asyncio
from collections.abc import Sequence
import os
import pathlib
import sys
import tempfile
import time

from rich.console import Console

from engine.errors import ConfigError
from tools.arguments import CommandParser, output_file, positive_int
from tools.chaos.report import Row, as_json, show
from tools.chaos.restart_times import LEAST_STARTS
from tools.fleet.checked_streams import StreamLoad, learn_outputs
from tools.host_losses.host_cluster import Cluster, Proxy
from tools.host_losses.loss_rounds import HostFault, LossRounds
from tools.measure import commit, machine, write_result
from tools.server_process import RunningServer, find_free_port

_OUTPUT_TOKENS = (48, 240)
_CPU = {"JAX_PLATFORMS": "cpu"}


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("python -m tools.host_losses", __doc__)
  parser.add_argument("--faults", default=",".join(fault.value for fault in HostFault), help="kinds, with commas")
  parser.add_argument("--rounds", type=positive_int, default=3, help="times that each fault happens")
  parser.add_argument("--seed", type=int, default=0, help="determines hosts and instants")
  parser.add_argument("--output", type=output_file, default="", help="file for the table as JSON")
  args = parser.parse_args(arguments)
  names = {fault.value: fault for fault in HostFault}
  chosen = [name for name in args.faults.split(",") if name]
  if not chosen or not names.keys() >= set(chosen):
    parser.error(f"--faults={args.faults} is unknown; use some of {','.join(names)}")
  console, began = Console(stderr=True), time.monotonic()

  def report(line: str) -> None:
    console.print(f"{time.monotonic() - began:7.1f} s  {line}", style="dim", highlight=False)

  with tempfile.TemporaryDirectory(prefix="sluice-hosts-") as name:
    folder = pathlib.Path(name)
    try:
      rows = asyncio.run(_run(folder, [names[each] for each in chosen], args.rounds, args.seed, report))
    except ConfigError as error:
      return parser.failed(error, 1)
  seconds = time.monotonic() - began
  show(rows, seconds, Console(width=None if sys.stdout.isatty() else 160), "host losses")
  write_result(args.output, as_json(rows, seconds, {"machine": machine(), "commit": commit()}))
  return 0 if rows and all(row.passed for row in rows) else 1


async def _run(folder: pathlib.Path, faults: list[HostFault], rounds: int, seed: int, report) -> list[Row]:
  port, http_port = find_free_port(), find_free_port()
  flags = (f"--port={port}", f"--http_port={http_port}")
  report("learning the outputs from one plain server")
  with RunningServer(("--http_port=-1",), folder / "plain.log", _CPU) as plain:
    known = await asyncio.to_thread(
      learn_outputs, plain.target, count=32, max_tokens=_OUTPUT_TOKENS, num_long=8, ignore_eos=True
    )
  load = StreamLoad(f"127.0.0.1:{port}", f"http://127.0.0.1:{http_port}", known, cancelled_share=0.1, seed=seed)
  with Cluster(folder) as cluster, Proxy(cluster.port) as proxy:
    check = LossRounds(cluster, proxy, load, f"127.0.0.1:{port}", flags, seed)
    try:
      starts = sorted(await check.measure_starts(max(rounds, LEAST_STARTS)))
      report(f"{len(starts)} starts: two hosts serve after {', '.join(f'{each:.1f}' for each in starts)} s")
      await check.check_all(faults, rounds, report)
    except (ConfigError, AssertionError, OSError) as error:
      check.rows.append(Row("the run reaches its end", "it does", " ".join(str(error).split())[:300], False))
  return check.rows


if __name__ == "__main__":
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  sys.exit(main())
