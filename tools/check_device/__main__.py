"""Compiles every rung's whole step for an H200 and for TPUs that are not there, and checks what came out.

  make check-device                     every rung of the demo model and of Llama-3-8B's shapes, on every target
  make check-device ARGS=--small        a few rungs of a tiny model: what CI runs

It asserts that KV is updated in place, that neither KV nor a weight is copied, that temporaries are bounded, and on the
GPU that a step is one command buffer of few launches, without a sort or a loop, whose kernels spill nothing. It times
nothing but the compilers. Exit code 1 with a line for each violation; a table comes last.
"""

from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from tools.arguments import CommandParser
from tools.check_device import facts, judge
from tools.check_device.targets import TARGETS, Target, environment

_BUDGETS = "8,16,32,64,128,256,512"
# Of (target, model), whether --deterministic, and the rungs: four chips hold what one does not.
_SMALL = (
  ("h200", "tiny", False, "8,64,256"),
  ("h200", "tiny", True, "128"),
  ("v5e", "tiny", False, "64"),
  ("v5e-4", "tiny", False, "64"),
)
_WHOLE = (
  ("h200", "demo", False, _BUDGETS),
  ("h200", "llama3-8b", False, _BUDGETS),
  ("h200", "llama3-8b", True, "128"),
  ("v6e", "demo", False, _BUDGETS),
  ("v6e", "llama3-8b", False, _BUDGETS),
  ("v5e-4", "llama3-8b", False, _BUDGETS),
)


class CompileError(Exception):
  """The compiling process failed; the message ends with the last lines of its standard error."""


def compile_all(target: Target, model: str, attention: str, budgets: str, deterministic: bool = False) -> list[dict]:
  """Facts of every rung, smallest first, with what ptxas said (`kernels`). Raises CompileError."""
  with tempfile.TemporaryDirectory(prefix="sluice-device-") as folder:
    out = pathlib.Path(folder)
    command = [sys.executable, "-m", "tools.check_device.compile", f"--target={target.name}", f"--model={model}"]
    command += [f"--attention={attention}", f"--token_budgets={budgets}", f"--out={out}"]
    command += ["--deterministic"] if deterministic else []
    done = subprocess.run(
      command, env=os.environ | environment(target, out), capture_output=True, encoding="utf-8", errors="replace"
    )
    if done.returncode:
      raise CompileError(f"exit code {done.returncode}:\n" + "\n".join(done.stderr.rstrip().splitlines()[-8:]))
    rungs = [json.loads(line) for line in (out / "facts.jsonl").read_text("utf-8").splitlines()]
  parts = done.stdout.split("\n@@ ")[1:]
  for rung, part in zip(rungs, parts, strict=True):
    rung["kernels"] = [dataclasses.asdict(kernel) for kernel in facts.kernel_uses(part)]
  return rungs


def main(arguments: Sequence[str] | None = None) -> int:
  """The command line; returns the exit code."""
  parser = CommandParser("python -m tools.check_device", "Compile every step for devices that are not there.")
  parser.add_argument("--small", action="store_true", help="a few rungs of a tiny model")
  parser.add_argument("--target", choices=sorted(TARGETS), help="this one alone")
  parser.add_argument("--model", choices=("tiny", "demo", "llama3-8b"), help="this one alone")
  parser.add_argument("--token_budgets", help="rungs to compile, as the server's flag")
  parser.add_argument("--deterministic", action="store_true", help="only steps of servers with --deterministic")
  parser.add_argument("--attention", help="implementation of paged attention; the platform's own unless given")
  parser.add_argument("--out", type=pathlib.Path, help="JSON file for everything that was found")
  args = parser.parse_args(arguments)
  jobs = _SMALL if args.small else _WHOLE
  if args.target and args.model:
    jobs = ((args.target, args.model, args.deterministic, "128" if args.deterministic else _BUDGETS),)
  jobs = [job for job in jobs if args.target in (None, job[0]) and args.model in (None, job[1])]
  jobs = [job for job in jobs if job[2] or not args.deterministic]
  if not jobs:
    parser.error(f"nothing to do for --target={args.target} --model={args.model}; give both")
  rungs, failures = [], 0
  for name, model, deterministic, budgets in jobs:
    target = TARGETS[name]
    attention = args.attention or target.attention
    how = f"attention {attention}{', deterministic' if deterministic else ''}"
    print(f"{name}, {model}, {how}: compiling {args.token_budgets or budgets}", flush=True)
    try:
      found = compile_all(target, model, attention, args.token_budgets or budgets, deterministic)
    except CompileError as error:
      print(f"{name}, {model}: {error}", file=sys.stderr)
      failures += 1
      continue
    for rung in found:
      rung |= {"target": name, "model": model, "attention": attention}
      rung["violations"] = judge.violations(rung, [facts.KernelUse(**kernel) for kernel in rung["kernels"]])
      for line in rung["violations"]:
        print(f"{name}, {model}, {rung['tokens']} tokens: {line}")
      failures += len(rung["violations"])
    rungs += found
    if found and "launches" in found[-1]:
      print(f"{name}, {model}, {found[-1]['tokens']} tokens: the launches of a layer")
      print("\n".join(f"  {line}" for line in judge.layer_launches(found[-1])), flush=True)
  if args.out:
    args.out.write_text(json.dumps(rungs, indent=1) + "\n", "utf-8")
  print("\n".join(judge.table(rungs)))
  print(f"{len(rungs)} rungs compiled, {failures} violations")
  return 1 if failures else 0


if __name__ == "__main__":
  sys.exit(main())
