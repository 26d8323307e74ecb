"""Measures kernels and engine on one GPU: their correctness, their distance from the device's ceilings, their settings.

  python -m tools.gpu --out=DIR [--minutes=9.5] [--only=check,time] [--match=REGEX]
  python -m tools.gpu --out=DIR --dry_run=interpret|emulate|compile
  python -m tools.gpu --out=DIR --only=decode,start,offline,full,overlap,deterministic,buffers
  python -m tools.gpu --out=DIR --only=twin
  python -m tools.gpu --merge=DIR/tuning.json

The stages of the kernels run by default:

  smoke     a copy by TMA, and each kernel alone on tiny data that the host makes; 20 s of patience a job
  ceilings  a read-only reduction, a copy and a bf16 matmul
  check     every kernel on every arg spec against dense attention in f32; with --deterministic, one request's bits in
            every batch
  time      each kernel beside the ceilings; cuDNN's dense attention beside prefill
  profile   the profiler's figures for some kernels
  peers     torch and FlashInfer
  step      whole decode steps of Llama-3-8B
  sweep     settings of the kernels

Another stage runs only where --only names it:

  settings  every kernel with each setting of tuning.py, in every block size, and with each that the sweep tries,
            against dense attention in f32

Each job runs in a process that may hang or die without affecting the others. A kernel that costs two processes is not
run again; hangs.txt in DIR has its program counters, where cuda-gdb is installed. The tool writes results.jsonl,
table.txt and meta.json into DIR after every job, and tuning.json at the end. --merge puts tuning.json into
pallas_kernels/paged_attention/tuning.py. The exit code is 1 if a kernel failed, or if a dry run did not reach a job.

The stages of the engine (tools/gpu/engine.py), the most important first:

  decode         steps of Llama-3-8B and Llama-3.2-1B beside the roofline, the sampler's share, a cold start
  start          the same from a bundle and from the cache
  offline        256 requests at once
  full           1,000 tokens in, 1,000 out
  overlap        the offline stage without overlap
  deterministic  the same bits in any batch, and the cost
  buffers        command buffers under several settings of their updates; answers under the fastest one
  twin           the same requests through transformers' continuous batching, and through its compiled decode over a
                 static cache; the tool compares the tokens

engine.json and engine.txt in DIR are complete after every command; programs and weights go into --scratch.

A dry run needs no GPU. `interpret` runs tiny sizes through the GPU interpreter on a CPU; its times mean nothing, and
the engine's stages run on the CPU's own kernels. `emulate` compiles the kernels for an H200, in the same sizes, and
runs their PTX on a CPU (tools/ptx_emulator); it needs the packages of requirements-device.lock. `compile` compiles
everything for an H200 without the hardware.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import json
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any

from engine.errors import ConfigError
from tools.arguments import CommandParser, positive_float, positive_int
from tools.gpu import engine, sweep
from tools.gpu.device_run import (
  SMOKE_PATIENCE_S,
  SMOKE_SHARE,
  DeviceRun,
  card_bytes,
  describe_card,
  finish,
  open_run,
  share_out,
)
from tools.gpu.protocol import Job
from tools.measure import ROOT, commit

STAGES = ("smoke", "ceilings", "check", "time", "profile", "peers", "step", "sweep")
_SETTINGS = "settings"
# Shares of the time.
_PARTS = {"smoke": 2, "ceilings": 4, "check": 6, "time": 4, "profile": 1, "peers": 2, "step": 2, "sweep": 1}
_PARTS[_SETTINGS] = 6
_TUNING = ROOT / "pallas_kernels" / "paged_attention" / "tuning.py"

_DECODED = (
  "decode 32 x 4096",
  "decode 64 zipf",
  "decode 1 x 16384",
  "decode 64 x 1024",
  "decode 8 x 1024",
  "verify 32 x 4 of 4096",
  "decode 32 x 8192, window 4096",
  "decode 32 x 4096, heads of 64",
)
_PREFILLED = ("prefill 1 x 4096", "prefill 4 x 4096", "prefill 512 of 4096")
_PROMPTS = _PREFILLED[:2]
# Checked over a pool of fp8 too: every page size, both kernels, splits, a window.
_FP8 = ("decode 63 x 1024 + prefill 449", "mixed", "mixed_window", "page_128_one_kv_head")


def _timings() -> list[Job]:
  pairs = [("decode", name) for name in _DECODED[:3]]
  pairs += [(op, name) for name in _PROMPTS for op in ("prefill", "dense")]
  pairs += [("prefill", _PREFILLED[2]), ("write", "decode 64 x 1024"), ("write", "prefill 1 x 4096")]
  pairs += [("decode", name) for name in _DECODED[3:]]
  pairs += [("attend", name) for name in ("decode 64 x 1024", "decode 63 x 1024 + prefill 449", "prefill 1 x 4096")]
  return [{"kind": "time", "op": op, "spec": name} for op, name in pairs]


def _checks() -> list[Job]:
  import jax.numpy as jnp

  from pallas_kernels.paged_attention import api, arg_specs

  found: list[Job] = []
  for spec in (*arg_specs.GPU_BENCHMARK, *arg_specs.CONFORMANCE):
    try:
      api.check_supported("gpu", spec.geometry, jnp.bfloat16)
    except NotImplementedError:
      continue
    found.append({"kind": "check", "op": "parts", "spec": spec.name})
  found += [{"kind": "check", "op": "parts", "spec": name, "kv_dtype": "uint8"} for name in _FP8]
  found += [{"kind": "check", "op": "attend", "spec": spec.name} for spec in arg_specs.GPU_BENCHMARK[:7]]
  found.append({"kind": "deterministic"})
  return found


def _fields(tuning: Any) -> dict[str, Any]:
  """Returns the fields of a Tuning, as a job has them."""
  return dataclasses.asdict(tuning) | {"lowering": tuning.lowering.name}


def _settings() -> list[Job]:
  from pallas_kernels.paged_attention.arg_specs import SETTINGS
  from pallas_kernels.paged_attention.capabilities import TABLE
  from pallas_kernels.paged_attention.tuning import list_tunings, tuning_for

  spec_names = {spec.head_dim: spec.name for spec in SETTINGS}
  found: list[Job] = []
  for head_dim, block_size, tuning in list_tunings():
    for size in TABLE["gpu"].block_sizes if block_size is None else (block_size,):
      job: Job = {"kind": "check", "op": "parts", "spec": spec_names[head_dim]}
      job |= {"block_size": size, "tuning": _fields(tuning)}
      found += [job, job | {"kv_dtype": "uint8"}]
  current = _fields(tuning_for("", 128, 64)) | {"block_size": 64}
  for factor in sweep.FACTORS:
    jobs = [job | {"kind": "check", "op": "parts", "spec": spec_names[128]} for job in sweep.jobs(factor, current)]
    found += [job for number, job in enumerate(jobs) if job not in found + jobs[:number]]
  return found


def jobs_of(stage: str) -> list[Job]:
  """Returns a stage's jobs; the sweep's follow from its results."""
  if stage == _SETTINGS:
    return _settings()
  if stage == "smoke":
    from tools.gpu.smoke import smoke_jobs

    return smoke_jobs()
  if stage == "ceilings":
    ways = ("rows", "all", "sum")
    read: list[Job] = [{"kind": "ceiling", "what": "read", "way": way} for way in ways]
    return [*read, {"kind": "ceiling", "what": "copy"}, {"kind": "ceiling", "what": "matmul"}]
  if stage == "check":
    return _checks()
  if stage == "time":
    return _timings()
  if stage == "profile":
    chosen = ("decode", _DECODED[0]), ("decode", _DECODED[2]), ("prefill", _PROMPTS[0]), ("attend", "decode 64 x 1024")
    return [{"kind": "profile", "op": op, "spec": name} for op, name in chosen]
  if stage == "peers":
    pairs: list[Job] = [{"kind": "peer", "what": what} for what in ("read", "copy", "matmul")]
    pairs += [{"kind": "peer", "what": what, "spec": name} for name in _PROMPTS for what in ("cudnn", "flash")]
    pairs += [{"kind": "peer", "what": what, "spec": _DECODED[0]} for what in ("flash", "efficient", "cudnn")]
    pairs += [{"kind": "peer", "what": "flashinfer", "spec": name} for name in (*_DECODED[:4], *_PROMPTS)]
    return pairs
  if stage == "step":
    return [{"kind": "step", "rows": rows, "context": 1024} for rows in (64, 8)]
  return []


def sweep_settings(run: DeviceRun) -> dict[str, Any] | None:
  """Varies the settings until the time is spent, and adds a line a factor to the table.

  Returns:
    The contents of tuning.json, or None if no factor could be judged.
  """
  from pallas_kernels.paged_attention.tuning import tuning_for

  if not run.worker.hello:  # no job has run yet
    list(run.worker.run([{"kind": "ceiling", "what": "copy"}], run.started + run.seconds))
  kind, judged = run.worker.hello.get("device", ""), False
  current = _fields(tuning_for(kind, 128, 64)) | {"block_size": 64}
  for factor in sweep.FACTORS:
    records = list(run.do(sweep.jobs(factor, current), 1.0))
    if not records:
      continue
    chosen, ratio = sweep.choose(factor, current, records)
    judged |= ratio is not None
    changed = {name: value for name, value in chosen.items() if value != current[name]}
    timed = sum(record["ok"] for record in records)
    run.notes.append(
      f"sweep: {factor.name}: {timed} of {len(records)} timed; "
      + ("unknown" if ratio is None else f"{changed} takes {ratio:.3f} of the time" if changed else "as it is")
    )
    if factor.name != "block size":  # the kernels' caller chooses the size
      current = chosen
  tuning = {name: value for name, value in current.items() if name != "block_size"}
  return {"device_kind": kind, "head_dim": 128, "block_size": 64, "tuning": tuning} if judged else None


def merge(path: pathlib.Path) -> None:
  """Merges a run's tuning.json into tuning.py."""
  found = json.loads(path.read_text("utf-8"))
  _TUNING.write_text(sweep.merged(_TUNING.read_text("utf-8"), **found), "utf-8")
  print(f"{_TUNING}: the settings of {found['device_kind']} for heads of {found['head_dim']} are from {path}")


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("python -m tools.gpu", "Check and time the attention kernels on a GPU.")
  parser.add_argument(
    "--out", type=pathlib.Path, default=pathlib.Path(".cache/bench_gpu"), help="folder for the results"
  )
  parser.add_argument("--minutes", type=positive_float, default=9.5, help="for everything")
  parser.add_argument("--only", default=",".join(STAGES), help="stages")
  parser.add_argument("--match", type=re.compile, default="", help="regular expression for the jobs to do")
  parser.add_argument("--dry_run", choices=("interpret", "emulate", "compile"), help="on a machine without a GPU")
  parser.add_argument(
    "--scratch", type=pathlib.Path, default=pathlib.Path(".cache/bench_gpu_scratch"), help="engine: programs, weights"
  )
  parser.add_argument("--attention", default="", help="engine: attention implementation, instead of the platform's own")
  parser.add_argument(
    "--num_blocks", type=positive_int, help="engine: blocks of 64 tokens offline, instead of what the card holds"
  )
  parser.add_argument("--torch_python", default=sys.executable, help="engine: a Python with torch and transformers")
  parser.add_argument("--merge", type=pathlib.Path, help="put this tuning.json into tuning.py, and do nothing else")
  args = parser.parse_args(arguments)
  if args.merge:
    merge(args.merge)
    return 0
  stages = args.only.split(",")
  known = (*STAGES, _SETTINGS, *engine.STAGES)
  if unknown := set(stages) - set(known):
    parser.error(f"--only: {', '.join(sorted(unknown))} is not one of {', '.join(known)}")
  if set(stages) - set(engine.STAGES) and set(stages) & set(engine.STAGES):
    parser.error("--only: stages of the kernels and of the engine do not fit into one run; give one kind")
  if "start" in stages and "decode" not in stages:
    parser.error("--only: start restores the programs that decode compiles; give both")
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no worker outlives this process
  args.out.mkdir(parents=True, exist_ok=True)
  if not set(stages) - set(engine.STAGES):
    if args.dry_run == "compile":
      return compile_engine(stages, args.out)
    sizes = engine.TINY if args.dry_run else engine.Sizes()
    try:
      blocks = args.num_blocks or (sizes.blocks if args.dry_run else engine.fit_blocks(card_bytes()))
    except ConfigError as error:
      return parser.failed(error)
    sizes = dataclasses.replace(sizes, blocks=blocks)
    if args.attention:
      sizes = dataclasses.replace(sizes, engine=(*sizes.engine, f"--attention={args.attention}"))
    deadline = time.monotonic() + 60 * args.minutes
    return measure_engine(stages, args.out, args.scratch.absolute(), deadline, sizes, args.torch_python)
  mode, match = args.dry_run or "device", re.compile(args.match)
  with open_run(args.out, mode=mode, seconds=60 * args.minutes, match=match) as run:
    return finish(run, functools.partial(run_stages, stages=stages))


def measure_engine(
  stages: Sequence[str], out: pathlib.Path, scratch: pathlib.Path, deadline: float, sizes: engine.Sizes, torch: str
) -> int:
  """Runs stages of the engine; writes engine.json and engine.txt after each command; returns the exit code."""
  dry = " (dry: no time means anything)" if sizes.device == "cpu" else ""
  head = f"commit {commit()}, {describe_card()}{dry}"
  commands = engine.stages(scratch, sizes, torch)
  chosen = [command for stage in engine.STAGES if stage in stages for command in commands[stage]]

  def keep(results: dict[str, dict[str, Any]]) -> None:
    name, found = list(results.items())[-1]
    print(f"{name}: {found.get('error', 'done')}, {found['took_s']} s", file=sys.stderr, flush=True)
    (out / "engine.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    (out / "engine.txt").write_text("\n".join([head, *engine.table(results)]) + "\n", "utf-8")

  scratch.mkdir(parents=True, exist_ok=True)
  with open(out / "engine_log.txt", "w", encoding="utf-8") as log:
    results = engine.measure(chosen, deadline, log, keep)
  print(f"clocks after: {describe_card()}\n{(out / 'engine.txt').read_text('utf-8')}", end="", flush=True)
  return int(any("error" in found for found in results.values()))


def compile_engine(stages: Sequence[str], out: pathlib.Path) -> int:
  """Compiles the steps of the engine's stages for an H200 without the hardware; returns the exit code."""
  failed = 0
  for number, words in enumerate(engine.compile_only(stages)):
    command = [sys.executable, "-m", "tools.check_device", "--target=h200", *words, f"--out={out}/steps_{number}.json"]
    failed |= subprocess.run(command, cwd=ROOT, check=False).returncode
  return int(failed != 0)


def run_stages(run: DeviceRun, stages: Sequence[str]) -> None:
  """Runs the stages of the kernels; writes tuning.json if there is a sweep."""
  chosen = [stage for stage in (*STAGES, _SETTINGS) if stage in stages]
  for stage, share in share_out({stage: _PARTS[stage] for stage in chosen}).items():
    if stage in ("profile", "peers") and run.mode != "device":
      continue
    if stage == "smoke":
      records = run.do_twice(jobs_of(stage), max(share, SMOKE_SHARE), SMOKE_PATIENCE_S[run.mode])
    else:
      records = run.do(jobs_of(stage), share)
    with contextlib.closing(records):
      for record in records:
        if stage == "profile" and not record["ok"]:
          break  # a profiler that fails or hangs once will do so again
    if stage == "time":
      run.meta["card_after_time"] = describe_card()
  if "sweep" in stages:
    suggestion = sweep_settings(run)
    if suggestion:
      (run.out / "tuning.json").write_text(json.dumps(suggestion, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
  sys.exit(main())
