"""Runs the kernel stages of tools.gpu as a part of the cloud benchmark; prints one JSON line. Measures nothing itself.

python -m tools.bench_cloud.gpu_kernels --out=DIR --minutes=5 [--dry_run]
"""

from collections.abc import Sequence
import contextlib
import json
import os
import pathlib
import sys

from tools.arguments import CommandParser, positive_float
from tools.gpu import __main__ as gpu_main

_STAGES = "smoke,ceilings,check,time,peers"
# A dry run interprets kernels, at seconds each, so it runs two specs.
_DRY = ("--dry_run=interpret", "--only=check", "--match=^check parts (decode|one_row_of_one_token)$")


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns 0 if tools.gpu wrote a table."""
  parser = CommandParser("tools.bench_cloud.gpu_kernels", __doc__)
  parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the files of tools.gpu")
  parser.add_argument("--minutes", type=positive_float, default=5.0, help="time limit of the whole run")
  parser.add_argument("--dry_run", action="store_true", help="a few kernels through the interpreter, on the CPU")
  args = parser.parse_args(arguments)
  if args.dry_run:
    os.environ.setdefault("NPROC", "8")  # in the interpreter each waiting warpgroup holds a thread of XLA's pool
  words = _DRY if args.dry_run else (f"--only={_STAGES}",)
  with contextlib.redirect_stdout(sys.stderr):
    code = gpu_main.main([f"--out={args.out}", f"--minutes={args.minutes}", *words])
  if not (args.out / "table.txt").is_file():
    return code or 1
  table = (args.out / "table.txt").read_text("utf-8").splitlines()
  wrong = [line for line in table if line.startswith("failed:")]
  found = {"table": table} | ({"error": wrong[0] if wrong else f"tools.gpu ended with code {code}"} if code else {})
  print(json.dumps(found), flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
