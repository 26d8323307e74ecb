"""Runs published clients, unchanged, against a real server on the demo model; reports which work. Judges no figure.

  python -m tools.clients [--only=openai,langchain] [--table=clients.md]     # make clients

Clients come from the environment of Sluice, from tools/clients/requirements.txt and requirements-openai2.txt, from
package.json where there is npm, and from PATH: grpcurl, and Go with protoc. `vllm` is `vllm bench serve`, if make peers
has made its environment. The tool prints a line for each client, also for one that is not installed, and the folder
with their output. Exit code 1 if one fails.
"""

from collections.abc import Sequence
import json
import pathlib
import sys
import tempfile
import time
import urllib.request

from engine.errors import EngineError
from tools.arguments import CommandParser
from tools.clients.catalog import CLIENTS
from tools.clients.environments import DEMO, Failed, Place
from tools.server_process import RunningServer


def _run_client(name: str, place: Place) -> tuple[str, bool]:
  """Runs a client; returns what it said, and whether it works."""
  try:
    return CLIENTS[name].run(place), True
  except Failed as error:
    return f"FAILED: {error}", False


def _make_row(name: str, works: bool) -> str:
  """Returns a client's row of the table."""
  client = CLIENTS[name]
  cells = (
    name,
    client.package,
    client.environment.version(client.package),
    client.environment.language,
    client.requests,
  )
  return f"| {' | '.join(cells)} | {'works' if works else 'FAILED'} |"


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("tools.clients", __doc__)
  parser.add_argument("--only", default="", help="clients to run, separated by commas; default: all that are installed")
  parser.add_argument("--table", help="file for a table of clients, versions and results")
  args = parser.parse_args(argv)
  chosen = args.only.split(",") if args.only else list(CLIENTS)
  if unknown := set(chosen) - CLIENTS.keys():
    parser.error(f"--only: {', '.join(sorted(unknown))} is not one of {', '.join(CLIENTS)}")
  missing = {name: why for name in chosen if (why := CLIENTS[name].environment.missing())}
  if args.only and missing:
    parser.error("; ".join(missing.values()))
  folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-clients-"))
  port_file = folder / "http_port"
  flags = [f"--model={DEMO}", "--http_port=0", f"--http_port_file={port_file}", "--strict_requests=false"]
  flags += ["--enable_vllm_api", "--enable_embeddings", f"--batch_dir={folder / 'batches'}"]
  rows = ["| name | package | version | language | requests | result |", "| --- " * 6 + "|"]
  failed = 0
  try:
    with RunningServer(flags, folder / "server.log") as server:
      url = f"http://127.0.0.1:{port_file.read_text('utf-8').strip()}"
      with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        place = Place(url, server.target, json.load(answer)["data"][0]["id"], folder)
      for name in chosen:
        if name in missing:
          print(f"{name:20}    left out: {missing[name]}", flush=True)
          continue
        started = time.monotonic()
        said, works = _run_client(name, place)
        seconds = time.monotonic() - started
        failed += not works
        rows.append(_make_row(name, works))
        print(f"{name:20}{seconds:6.1f} s  {said}", flush=True)
  except EngineError as error:
    return parser.failed(error)
  if args.table:
    pathlib.Path(args.table).write_text("\n".join(rows) + "\n", "utf-8")
  print(f"{len(rows) - 2 - failed} clients work, {failed} failed, {len(missing)} left out")
  print(f"logs: {folder}")
  return int(failed > 0)


if __name__ == "__main__":
  sys.exit(main())
