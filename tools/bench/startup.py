"""Measures the time from the start of a server's process to readiness, by part; prints a table.

  python -m tools.bench.startup [--model=DIR] [--runs=3] [--output=FILE.json] [--only=cold,cache,bundle] [FLAG ...]

Three kinds of start: `cold`, with an empty compile cache; `cache`, with that cache filled; `bundle`, with an executable
bundle and no cache. Further flags go to the server. The tool separates the parts by the arrival times of the server's
lines. `import` ends with the first line of loading, and `load` with the last. `programs` ends with the last program
compiled or restored, `warm up` with the first run of each, and `rest` with readiness. On a CPU, the server compiles
programs during the load, so `programs` is the rest of that. Figures are medians of the runs.
"""

from collections.abc import Sequence
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from engine.errors import ConfigError
from tools.arguments import CommandParser, output_file, positive_int
from tools.measure import ROOT, commit, machine, write_result

WAYS = ("cold", "cache", "bundle")
# As by default, Python keeps compiled sources: compiling Sluice's own takes 0.4 s of each start.
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
# The line that ends each part: the last that matches, but for the first part the first.
_PARTS = {
  "import": "load: 0 of ",
  "load": "load: ",
  "programs": "compile: ",
  "warm up": "warm up: ",
  "rest": "ready",
}


def start_once(flags: Sequence[str]) -> dict[str, float]:
  """Starts a server, waits until it is ready, and ends it.

  Returns:
    Seconds by part, and `ready`, their sum.

  Raises:
    ConfigError: the server did not become ready; the text has its last lines.
  """
  began, last, words = time.perf_counter(), dict.fromkeys(_PARTS, 0.0), ""
  command = [sys.executable, "-m", "server.main", "--port=0", "--http_port=0", *flags]
  process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=_ENVIRONMENT)
  assert process.stderr is not None
  try:
    for words in process.stderr:
      for part, line in _PARTS.items():
        if words.startswith(line) and not (part == "import" and last[part]):
          last[part] = time.perf_counter() - began
      if last["rest"]:
        break
    else:
      raise ConfigError(f"the server was not ready: {words.strip()}")
  finally:
    process.send_signal(signal.SIGTERM)
    process.communicate()
  seconds, before = {}, 0.0
  for part, end in last.items():
    seconds[part], before = end - before, end
  return seconds | {"ready": before}


def measure(model: str, ways: Sequence[str], runs: int, flags: Sequence[str]) -> dict[str, list[dict[str, float]]]:
  """Returns the parts of each run, by kind of start. Raises ConfigError."""
  found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
  with tempfile.TemporaryDirectory(prefix="sluice-startup-") as folder:
    bundle, filled = pathlib.Path(folder) / "bundle", pathlib.Path(folder) / "filled"
    shared = [f"--model={model}", *flags]
    if "cache" in ways:
      start_once([*shared, f"--compile_cache_dir={filled}"])
    if "bundle" in ways:
      make = ["-m", "tools.bundle", *shared, f"--executable_bundle={bundle}", "--compile_cache_dir="]
      subprocess.run([sys.executable, *make], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    for run in range(runs):
      for way in ways:
        print(f"{way}, run {run + 1} of {runs} ...", file=sys.stderr, flush=True)
        cache = {"cold": f"{folder}/cold{run}", "cache": str(filled), "bundle": ""}[way]
        more = [f"--executable_bundle={bundle}"] if way == "bundle" else []
        found[way].append(start_once([*shared, f"--compile_cache_dir={cache}", *more]))
  return found


def table(medians: dict[str, dict[str, float]]) -> str:
  """Formats the seconds as a Markdown table."""
  names = (*_PARTS, "ready")
  lines = [f"| start | {' | '.join(names)} |", "| --- |" + " ---: |" * len(names)]
  lines += [f"| {way} | {' | '.join(f'{parts[name]:.2f}' for name in names)} |" for way, parts in medians.items()]
  return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("bench_startup", __doc__)
  parser.add_argument("--model", default=str(ROOT / "models" / "demo"), help="model folder")
  parser.add_argument("--runs", type=positive_int, default=3, help="of each way")
  parser.add_argument("--only", default=",".join(WAYS), help="kinds of start, separated by commas")
  parser.add_argument("--output", type=output_file, default="", help="file for everything as JSON")
  args, flags = parser.parse_known_args(argv)
  ways = args.only.split(",")
  if unknown := set(ways) - set(WAYS):
    parser.error(f"--only: {', '.join(sorted(unknown))} is not one of {', '.join(WAYS)}")
  try:
    runs = measure(args.model, ways, args.runs, flags)
  except ConfigError as error:
    print(f"bench_startup: {error}", file=sys.stderr)
    return 1
  medians = {
    way: {name: statistics.median(run[name] for run in found) for name in found[0]} for way, found in runs.items()
  }
  about = {"machine": machine(), "commit": commit(), "model": pathlib.Path(args.model).name, "flags": flags}
  write_result(args.output, {"about": about, "medians": medians, "runs": runs})
  print(table(medians))
  print(json.dumps({"medians": medians}), file=sys.stderr)
  return 0


if __name__ == "__main__":
  sys.exit(main())
