"""Starts a real server and loads it twice with tools.bench_serving: a burst, then a rate below its capacity.

  python -m tools.bench_cloud.served_load --out=DIR [--num_requests=200] -- --model=DIR

The server's flags follow `--`. Prints one JSON line and writes run files for tools.report into --out.
"""

from collections.abc import Sequence
import json
import pathlib
import sys
from typing import Any

from engine.errors import ConfigError
from tools.arguments import CommandParser, positive_int
from tools.measure import run_tool
from tools.server_process import RunningServer

_SHARE = 0.6  # of the requests a second that the burst reached


def load_server(target: str, out: pathlib.Path, num_requests: int, prompt_len: str, output_len: str) -> dict[str, Any]:
  """Returns the figures of both loads, and their run files."""
  lengths = [f"--num_requests={num_requests}", f"--prompt_len={prompt_len}", f"--output_len={output_len}"]
  found: dict[str, Any] = {"run_files": []}
  rate = ""
  for name in ("burst", "steady"):
    file = out / f"{name}.jsonl"
    command = [sys.executable, "-m", "tools.bench_serving", f"--target={target}", "--label=sluice", *lengths]
    command += [f"--run_file={file}", *([f"--rate={rate}"] if rate else [])]
    found[name] = run_tool(command, f"served load: {name}")
    found["run_files"].append(str(file))
    rate = f"{max(0.1, _SHARE * (found[name].get('request_s') or 0.0)):.3g}"
  return found


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns 1 after one line if the server or a load fails."""
  parser = CommandParser("tools.bench_cloud.served_load", __doc__)
  parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for log and run files")
  parser.add_argument("--num_requests", type=positive_int, default=200, help="requests of each load")
  parser.add_argument("--prompt_len", default="lognormal:256:16:1024", help="as tools.bench_serving's")
  parser.add_argument("--output_len", default="lognormal:128:8:512", help="as tools.bench_serving's")
  parser.add_argument("flags", nargs="*", help="the server's flags, after --")
  args = parser.parse_args(arguments)
  args.out.mkdir(parents=True, exist_ok=True)
  try:
    with RunningServer([*args.flags, "--http_port=-1"], args.out / "server.log") as server:
      found = load_server(server.target, args.out, args.num_requests, args.prompt_len, args.output_len)
  except (ConfigError, OSError) as error:
    return parser.failed(error, 1)
  print(json.dumps(found), flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
