"""Checks and times the attention kernels on one TPU: what to run first on a device that has never run them.

  python -m tools.tpu --out=DIR [--minutes=9.5] [--only=smoke,check] [--match=REGEX]
  python -m tools.tpu --out=DIR --dry_run=interpret|compile [--target=v6e]

The stages:

  smoke     XLA alone, an asynchronous copy, and each kernel alone on tiny data that the host makes; 20 s of patience a
            job
  ceilings  a read-only reduction, a copy and a bf16 matmul
  check     a whole layer on every arg spec against dense attention in f32
  time      each kernel beside the ceilings

Each job runs in a process that may hang or die without affecting the others. A kernel that costs two processes is not
run again. The tool writes results.jsonl, table.txt and meta.json into DIR after every job. The exit code is 1 if a
kernel failed.

A dry run needs no TPU. `interpret` runs tiny sizes in Pallas' simulator of a TPU; its times mean nothing. `compile`
compiles everything for a TPU that is not there; it needs the packages of requirements-device.lock.
"""

from collections.abc import Sequence
import functools
import pathlib
import re
import signal
import sys

from tools.arguments import CommandParser, positive_float
from tools.check_device.targets import TARGETS
from tools.gpu.device_run import SMOKE_PATIENCE_S, SMOKE_SHARE, DeviceRun, finish, open_run, share_out
from tools.gpu.protocol import Job

STAGES = ("smoke", "ceilings", "check", "time")
_PARTS = {"smoke": 2, "ceilings": 2, "check": 6, "time": 4}  # shares of the time
_TIMED = (
  ("decode", "decode 32 x 4096"),
  ("decode", "decode 64 zipf"),
  ("decode", "decode 1 x 16384"),
  ("prefill", "prefill 1 x 4096"),
  ("write", "decode 64 x 1024"),
  ("write", "prefill 1 x 4096"),
  ("decode", "decode 64 x 1024"),
  ("decode", "decode 32 x 4096, heads of 64"),
)


def jobs_of(stage: str) -> list[Job]:
  """Returns a stage's jobs."""
  from tools.tpu import jobs

  if stage == "smoke":
    return jobs.smoke_jobs()
  if stage == "ceilings":
    read: list[Job] = [{"kind": "ceiling", "what": "read", "way": way} for way in ("rows", "all")]
    return [*read, {"kind": "ceiling", "what": "copy"}, {"kind": "ceiling", "what": "matmul"}]
  if stage == "check":
    return jobs.check_jobs()
  return [{"kind": "time", "implementation": "tpu", "op": op, "spec": spec} for op, spec in _TIMED]


def run_stages(run: DeviceRun, stages: Sequence[str]) -> None:
  """Runs the stages."""
  shares = share_out({stage: _PARTS[stage] for stage in STAGES if stage in stages})
  for stage, share in shares.items():
    if stage == "smoke":
      records = run.do_twice(jobs_of(stage), max(share, SMOKE_SHARE), SMOKE_PATIENCE_S[run.mode])
    else:
      records = run.do(jobs_of(stage), share)
    for _ in records:
      pass


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("python -m tools.tpu", "Check and time the attention kernels on a TPU.")
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(".cache/bench_tpu"), help="folder for results")
  parser.add_argument("--minutes", type=positive_float, default=9.5, help="for everything")
  parser.add_argument("--only", default=",".join(STAGES), help="stages")
  parser.add_argument("--match", type=re.compile, default="", help="regular expression for the jobs to do")
  parser.add_argument("--dry_run", choices=("interpret", "compile"), help="on a machine without a TPU")
  chips = [name for name, target in TARGETS.items() if target.platform == "tpu" and target.chips == 1]
  parser.add_argument("--target", choices=chips, default="v6e", help="TPU to compile for with --dry_run=compile")
  args = parser.parse_args(arguments)
  stages = args.only.split(",")
  if unknown := set(stages) - set(STAGES):
    parser.error(f"--only: {', '.join(sorted(unknown))} is not one of {', '.join(STAGES)}")
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no worker outlives this process
  mode, match = args.dry_run or "device", re.compile(args.match)
  worker = ("tools.tpu.worker", mode, args.target)
  with open_run(args.out, mode=mode, seconds=60 * args.minutes, match=match, worker_words=worker) as run:
    return finish(run, functools.partial(run_stages, stages=stages))


if __name__ == "__main__":
  sys.exit(main())
