"""Compiles every rung's whole step for GPUs and TPUs without the hardware, and checks the result.

  make check-device                     the demo model's and Llama-3's shapes, and a tiny one on other GPUs and TPUs
  make check-device ARGS=--small        a few rungs of a tiny model: what CI runs
  make check-device ARGS=--emulate      no rungs: the PTX of each GPU kernel runs on this CPU (tools/ptx_emulator)
  make check-device ARGS="--emulate --model=demo"
                                        no rungs: whole steps of the demo model run there, and serve ten requests;
                                        with --target=sm_80 or sm_120 by the portable kernels

It asserts that KV is updated in place, that neither KV nor a weight is copied or (int8) widened in memory, that
temporaries are bounded, and that executables can be stored. Where devices share a model, a layer has two all-reduces,
and no step gathers logits. On the GPU it also asserts that a step is one command
buffer of few launches, without a sort or a loop, and that its kernels spill nothing. It times only the compilers. Exit
code 1 with a line for each violation; a table comes last.
"""

from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import NamedTuple

from tools.arguments import CommandParser, positive_int
from tools.check_device import facts, judge
from tools.check_device.targets import TARGETS, environment

_QUANTIZATIONS = ("none", "int8", "w8a8", "fp8", "int4")
_KV_DTYPES = ("auto", "int8", "fp8")
_MODELS = pathlib.Path(__file__).resolve().parents[2] / "models"
_BUDGETS = "8,16,32,64,128,256,512"
# Layers are alike, and a compiler's time grows with them: the plain steps of an 8B model have all, other steps so many.
_LAYERS = 4


class TargetCase(NamedTuple):
  """Rungs of a model on a target; see engine.device.build.BuildOptions."""

  target: str
  model: str
  token_budgets: str
  deterministic: bool = False
  quantization: str = "none"
  adapters: bool = False
  drafts: bool = False  # the programs of a draft model of this shape, instead of steps
  heads: bool = False  # the same of an EAGLE-3 head, and the step whose states it reads
  kv_dtype: str = "auto"
  layers: int = 0  # of the model; 0: its own
  dtype: str = "bfloat16"
  pool_tokens: int = 0  # of the KV pool; 0: as many as the model's case has

  def __str__(self) -> str:
    how = ["deterministic"] * self.deterministic + [self.quantization] * (self.quantization != "none")
    how += ["adapters"] * self.adapters + ["drafts"] * self.drafts + ["heads"] * self.heads
    how += [f"{self.kv_dtype} KV"] * (self.kv_dtype != "auto")
    how += [f"{self.layers} layers"] * bool(self.layers) + [self.dtype] * (self.dtype != "bfloat16")
    how += [f"pool of {self.pool_tokens} tokens"] * bool(self.pool_tokens)
    return ", ".join((self.target, self.model, *how))


_SMALL = (
  TargetCase("h200", "tiny", "8,64,256"),
  TargetCase("h200", "tiny", "128", deterministic=True),
  TargetCase("h200", "tiny", "64", quantization="int8"),
  TargetCase("h200", "tiny", "64", quantization="fp8"),
  TargetCase("h200", "tiny", "64", adapters=True),
  TargetCase("h200", "tiny", "64", kv_dtype="fp8"),
  TargetCase("h200", "tiny", "64", drafts=True, heads=True),
  TargetCase("sm_80", "tiny", "64"),
  TargetCase("sm_80", "tiny", "64", dtype="float16"),
  TargetCase("sm_100a", "tiny", "64"),
  TargetCase("v5e", "tiny", "64"),
  TargetCase("v5e", "tiny", "64", kv_dtype="fp8"),
  TargetCase("v5e", "tiny", "64", kv_dtype="int8"),
  # Without the kernels of row_copies, XLA copies a head's features to vector memory and back in so small a pool.
  TargetCase("v5e", "tiny", "8,64", drafts=True, heads=True, pool_tokens=1024),
  TargetCase("v6e", "tiny", "8,64", drafts=True),
  TargetCase("v5e", "tiny", "64", quantization="int4"),
  TargetCase("v6e", "tiny", "64", quantization="w8a8"),
  TargetCase("v7", "tiny", "64", quantization="fp8"),
  TargetCase("v5e-4", "tiny", "64"),
)
_WHOLE = (  # too large for one chip, so it has four
  TargetCase("h200", "demo", _BUDGETS),
  TargetCase("h200", "llama3-8b", _BUDGETS),
  TargetCase("h200", "llama3-8b", "128", deterministic=True, layers=_LAYERS),
  TargetCase("h200", "llama3-8b", "8,64,512", quantization="int8", layers=_LAYERS),
  TargetCase("h200", "llama3-8b", "8,64,512", quantization="w8a8", layers=_LAYERS),
  TargetCase("h200", "llama3-8b", "8,64,512", quantization="fp8", layers=_LAYERS),
  TargetCase("h200", "llama3-8b", "64", adapters=True, layers=_LAYERS),
  TargetCase("h200", "llama3-8b", "8,64,512", kv_dtype="fp8", layers=_LAYERS),
  *(TargetCase(target, "tiny", "8,64,256") for target in ("sm_80", "sm_86", "sm_89", "sm_100a", "sm_120")),
  TargetCase("h200", "llama3-8b", "8,64,512", drafts=True, heads=True, layers=_LAYERS),
  TargetCase("h200", "tiny", "8,64", drafts=True, heads=True, kv_dtype="fp8"),
  TargetCase("sm_80", "tiny", "8,64", drafts=True, heads=True),
  TargetCase("sm_100a", "tiny", "64", drafts=True, heads=True),
  TargetCase("sm_80", "tiny", "64", kv_dtype="fp8"),
  TargetCase("sm_80", "tiny", "128", deterministic=True),
  *(TargetCase("sm_80", "tiny", "64", quantization=each, dtype="float16") for each in ("none", "int8", "w8a8")),
  TargetCase("sm_89", "tiny", "64", quantization="fp8", dtype="float16"),
  TargetCase("v4", "tiny", "8,64"),
  TargetCase("v5p", "tiny", "8,64"),
  TargetCase("v6e", "demo", _BUDGETS),
  TargetCase("v6e", "llama3-8b", _BUDGETS),
  TargetCase("v6e", "llama3-8b", "64", adapters=True, layers=_LAYERS),
  TargetCase("v6e", "llama3-8b", "8,64,512", kv_dtype="fp8", layers=_LAYERS),
  TargetCase("v6e", "llama3-8b", "8,64,512", kv_dtype="int8", layers=_LAYERS),
  TargetCase("v5e-4", "llama3-8b", "64", kv_dtype="int8", layers=_LAYERS),
  TargetCase("v6e", "qwen3-0.6b", "8,64,512", drafts=True),
  TargetCase("v5e", "tiny", "8,64", heads=True, kv_dtype="int8"),
  TargetCase("v6e", "tiny", "8,64", heads=True),
  TargetCase("v6e", "llama3-8b", "64", heads=True, layers=_LAYERS),
  TargetCase("v6e", "llama3-8b", "8,64,512", quantization="int8", layers=_LAYERS),
  TargetCase("v6e", "llama3-8b", "8,64,512", quantization="w8a8", layers=_LAYERS),
  TargetCase("v6e", "llama3-8b", "8,64,512", quantization="int4", layers=_LAYERS),
  TargetCase("v7", "llama3-8b", "8,64,512", quantization="fp8", layers=_LAYERS),
  TargetCase("v5e-4", "llama3-8b", "8,64,512", quantization="w8a8", layers=_LAYERS),
  TargetCase("v5e-4", "llama3-8b", "8,64,512", quantization="int4", layers=_LAYERS),
  TargetCase("v5e-4", "llama3-8b", _BUDGETS, layers=_LAYERS),
  TargetCase("h200-8", "llama3-70b", "8,64,512"),
  TargetCase("v5e-16", "llama3-70b", "8,64,256"),  # at 512, activations have the size of a weight's share
)


class CompileError(Exception):
  """The compiling process failed; the message ends with the last lines of its standard error."""


def compile_all(case: TargetCase, attention: str, max_num_seqs: int = 64) -> list[dict]:
  """Returns facts of every rung, smallest first, with ptxas's output (`kernels`). Raises CompileError."""
  target = TARGETS[case.target]
  with tempfile.TemporaryDirectory(prefix="sluice-device-") as folder:
    out = pathlib.Path(folder)
    command = [sys.executable, "-m", "tools.check_device.compile", f"--target={target.name}", f"--model={case.model}"]
    command += [f"--attention={attention}", f"--token_budgets={case.token_budgets}", f"--max_num_seqs={max_num_seqs}"]
    command += [f"--layers={case.layers}", f"--dtype={case.dtype}", f"--pool_tokens={case.pool_tokens}"]
    command += [f"--quantization={case.quantization}", f"--kv_dtype={case.kv_dtype}", f"--out={out}"]
    command += ["--deterministic"] * case.deterministic
    command += ["--adapters"] * case.adapters + ["--drafts"] * case.drafts + ["--heads"] * case.heads
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


def emulate_kernels(small: bool, schedules: int) -> int:
  """Compares the emulated kernels with dense attention on tiny batches of each kind; returns the exit code.

  Args: schedules: of each kernel on its least batch.
  """
  command = [sys.executable, "-m", "tools.ptx_emulator", f"--schedules={schedules}"]
  devices = environment(TARGETS["h200"], None)
  if failed := subprocess.run(command, env=os.environ | devices, check=False).returncode:
    return failed
  with tempfile.TemporaryDirectory(prefix="sluice-emulate-") as out:
    command = [sys.executable, "-m", "tools.gpu", "--dry_run=emulate", "--only=check,settings", "--minutes=240"]
    command += [f"--out={out}", *(["--match=parts decode 63"] if small else [])]
    return subprocess.run(command, check=False).returncode


def emulate_steps(model: str, target: str, drafts: bool, draft_model: str) -> int:
  """Serves requests by emulated steps of a model in models/; returns the exit code.

  Args:
    target: a GPU of TARGETS.
    drafts: the steps verify drafts.
    draft_model: what proposes them, by emulated programs; "": the answers do.
  """
  command = [sys.executable, "-m", "tools.ptx_emulator.serve", f"--model={_MODELS / model}", f"--target={target}"]
  command += ["--drafts"] * drafts + [f"--draft_model={draft_model}"] * bool(draft_model)
  return subprocess.run(command, env=os.environ | environment(TARGETS[target], None), check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("python -m tools.check_device", "Compile every step for devices that this machine lacks.")
  parser.add_argument("--small", action="store_true", help="a few rungs of a tiny model")
  parser.add_argument(
    "--emulate",
    action="store_true",
    help="run the GPU kernels' PTX; with --small on one batch; with --model=demo whole steps, of --target",
  )
  parser.add_argument("--drafts", action="store_true", help="with --emulate --model=demo: the steps verify drafts")
  parser.add_argument(
    "--draft_model", default="", help="likewise; demo or demo_eagle proposes them, by emulated programs"
  )
  parser.add_argument("--schedules", type=positive_int, default=5, help="with --emulate: a kernel on its least batch")
  parser.add_argument("--target", choices=sorted(TARGETS), help="this one alone")
  parser.add_argument("--model", help="only this model: tiny, demo, or a folder of models/shapes")
  parser.add_argument("--token_budgets", help="rungs to compile; see the server's flag of this name")
  parser.add_argument("--max_num_seqs", type=positive_int, default=64, help="rows of the largest steps")
  parser.add_argument("--layers", type=positive_int, default=0, help="compile so many of a model's layers; all alike")
  parser.add_argument("--deterministic", action="store_true", help="only steps of servers with --deterministic")
  parser.add_argument("--quantization", choices=_QUANTIZATIONS, default="none", help="only these steps")
  parser.add_argument("--kv_dtype", choices=_KV_DTYPES, default="auto", help="only these steps")
  parser.add_argument("--attention", help="implementation of paged attention; the platform's own unless given")
  parser.add_argument("--out", type=pathlib.Path, help="JSON file for all facts")
  args = parser.parse_args(arguments)
  if args.emulate and args.model:
    if not (_MODELS / args.model / "tokenizer.json").exists():
      parser.error(
        f"--emulate --model={args.model}: whole steps need a folder of models/ with weights; give --model=demo"
      )
    return emulate_steps(args.model, args.target or "h200", args.drafts, args.draft_model)
  if args.drafts or args.draft_model:
    parser.error("--drafts and --draft_model are for whole steps; give --emulate --model=demo too")
  if args.emulate and args.target:
    parser.error(
      f"--emulate --target={args.target}: the kernels of all targets run; for whole steps, give --model=demo"
    )
  if args.emulate:
    return emulate_kernels(args.small, args.schedules)
  cases = _SMALL if args.small else _WHOLE
  if args.target and args.model:
    cases = (
      TargetCase(
        *(args.target, args.model, "128" if args.deterministic else _BUDGETS, args.deterministic, args.quantization),
        kv_dtype=args.kv_dtype,
      ),
    )
  cases = [case for case in cases if args.target in (None, case.target) and args.model in (None, case.model)]
  cases = [case for case in cases if case.deterministic or not args.deterministic]
  cases = [case for case in cases if args.quantization in ("none", case.quantization)]
  cases = [case for case in cases if args.kv_dtype in ("auto", case.kv_dtype)]
  if not cases:
    parser.error(f"nothing to do for --target={args.target} --model={args.model}; give both")
  rungs, failures = [], 0
  for case in cases:
    case = case._replace(token_budgets=args.token_budgets or case.token_budgets, layers=args.layers or case.layers)
    attention = args.attention or TARGETS[case.target].attention
    print(f"{case}, attention {attention}: compiling {case.token_budgets}", flush=True)
    try:
      found = compile_all(case, attention, args.max_num_seqs)
    except CompileError as error:
      print(f"{case}: {error}", file=sys.stderr)
      failures += 1
      continue
    for rung in found:
      model = ", ".join((str(case).partition(", ")[2], *filter(None, [rung.get("program")])))
      rung |= {"target": case.target, "model": model}
      rung["violations"] = judge.violations(rung, [facts.KernelUse(**kernel) for kernel in rung["kernels"]])
      for line in rung["violations"]:
        print(f"{case}, {rung['tokens']} tokens: {line}")
      failures += len(rung["violations"])
    rungs += found
    if args.out:
      args.out.write_text(json.dumps(rungs, indent=1) + "\n", "utf-8")
    if found and "shallow_launches" in found[-1]:
      print(f"{case}, {found[-1]['tokens']} tokens: the launches of a layer")
      print("\n".join(f"  {line}" for line in judge.layer_launches(found[-1])), flush=True)
  print("\n".join(judge.table(rungs)))
  print(f"{len(rungs)} rungs compiled, {failures} violations")
  return 1 if failures else 0


if __name__ == "__main__":
  sys.exit(main())
