"""Measures kernels and engine on one GPU: their correctness, their distance from the device's ceilings, their settings.

  python -m tools.gpu --out=DIR [--minutes=9.5] [--only=check,time] [--match=REGEX]
  python -m tools.gpu --out=DIR --dry_run=interpret|emulate|compile
  python -m tools.gpu --out=DIR --only=decode,start,offline,full,overlap,deterministic,buffers
  python -m tools.gpu --out=DIR --only=twin
  python -m tools.gpu --merge=DIR/tuning.json

The stages of the kernels run by default:

  ceilings  a read-only reduction, a copy and a bf16 matmul
  check     every kernel on every arg spec against dense attention in f32; with --deterministic, one request's bits in
            every batch
  time      each kernel beside the ceilings; cuDNN's dense attention beside prefill
  profile   the profiler's figures for some kernels
  peers     torch and FlashInfer
  step      whole decode steps of Llama-3-8B
  sweep     settings of the kernels

Each job runs in a process that may hang or die without affecting the others. The tool writes results.jsonl into DIR
after every job, and table.txt and tuning.json at the end. --merge puts tuning.json into
pallas_kernels/paged_attention/tuning.py. The exit code is 1 if a kernel failed.

The stages of the engine (tools/gpu/engine.py), the most important first:

  decode         steps of Llama-3-8B and Llama-3.2-1B beside the roofline, the sampler's share, a cold start
  start          the same from a bundle and from the cache
  offline        256 requests at once
  full           1,000 tokens in, 1,000 out
  overlap        the offline stage without overlap
  deterministic  the same bits in any batch, and the cost
  buffers        command buffers under several settings of their updates
  twin           the same requests through transformers' continuous batching, and through its compiled decode over a
                 static cache; the tool compares the tokens

engine.json and engine.txt in DIR are complete after every command; programs and weights go into --scratch.

A dry run needs no GPU. `interpret` runs tiny sizes through the GPU interpreter on a CPU; its times mean nothing, and
the engine's stages run on the CPU's own kernels. `emulate` compiles the kernels for an H200, in the same sizes, and
runs their PTX on a CPU (tools/ptx_emulator); it needs the packages of requirements-device.lock. `compile` compiles
everything for an H200 without the hardware.
"""

from collections.abc import Generator, Sequence
import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, TextIO

from tools.arguments import CommandParser, positive_float, positive_int
from tools.gpu import engine, protocol, report, sweep
from tools.gpu.protocol import Job, Record
from tools.measure import ROOT, commit

STAGES = ("ceilings", "check", "time", "profile", "peers", "step", "sweep")
_PARTS = {"ceilings": 4, "check": 6, "time": 4, "profile": 1, "peers": 2, "step": 2, "sweep": 1}  # share of the time
_BATCH = 8  # jobs that compile concurrently
_PATIENCE_S = {"device": 90.0, "interpret": 300.0, "emulate": 900.0, "compile": 600.0}
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

  from pallas_kernels.paged_attention import arg_specs, gpu

  found: list[Job] = []
  for spec in (*arg_specs.GPU_BENCHMARK, *arg_specs.CONFORMANCE):
    try:
      gpu.check_supported(spec.geometry, jnp.bfloat16)
    except NotImplementedError:
      continue
    found.append({"kind": "check", "op": "parts", "spec": spec.name})
  found += [{"kind": "check", "op": "parts", "spec": name, "kv_dtype": "uint8"} for name in _FP8]
  found += [{"kind": "check", "op": "attend", "spec": spec.name} for spec in arg_specs.GPU_BENCHMARK[:7]]
  found.append({"kind": "deterministic"})
  return found


def ends(stages: Sequence[str]) -> dict[str, float]:
  """Returns the share of the time after which each stage starts no further jobs; earlier stages leave the rest."""
  chosen = [stage for stage in STAGES if stage in stages]
  reached = itertools.accumulate(_PARTS[stage] for stage in chosen)
  whole = sum(_PARTS[stage] for stage in chosen)
  return {stage: part / whole for stage, part in zip(chosen, reached, strict=True)}


def jobs_of(stage: str) -> list[Job]:
  """Returns a stage's jobs; the sweep's follow from its results."""
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
    pairs += [{"kind": "peer", "what": "flashinfer", "spec": name} for name in (*_DECODED[:3], *_PROMPTS)]
    return pairs
  if stage == "step":
    return [{"kind": "step", "rows": rows, "context": 1024} for rows in (64, 8)]
  return []


@dataclasses.dataclass
class GpuRun:
  """One run: its time, its workers and its files.

  Attributes:
    log, results: the processes' output, and a JSON line for each job.
    mode: "device", "interpret", "emulate" or "compile".
    seconds: limit for all of it, from `started` (time.monotonic()) on.
    match: leaves out jobs whose description does not contain it.
  """

  log: TextIO
  results: TextIO
  mode: str
  seconds: float
  match: re.Pattern[str]
  started: float = dataclasses.field(default_factory=time.monotonic)
  records: list[Record] = dataclasses.field(default_factory=list)

  def __post_init__(self):
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # torch's process needs memory as well
    if self.mode != "device":
      environment["JAX_PLATFORMS"] = "cpu"
    python, patience = sys.executable, _PATIENCE_S[self.mode]
    worker_command = [python, "-m", "tools.gpu.worker", self.mode]
    self.worker = protocol.Worker(worker_command, environment, self.log, patience)
    self.peer = protocol.Worker([python, "-m", "tools.gpu.torch_peer"], environment, self.log, patience)

  def close(self) -> None:
    """Ends the workers."""
    for worker in (self.worker, self.peer):
      worker.close()

  def write(self, **line: Any) -> None:
    """Adds a line to results.jsonl."""
    self.results.write(json.dumps(line) + "\n")
    self.results.flush()

  def do(self, jobs: Sequence[Job], share: float) -> Generator[Record]:
    """Runs jobs in batches until this share of the time is spent; every job gets a record."""
    jobs = [job for job in jobs if self.match.search(report.describe(job))]
    while jobs:
      batch, jobs = jobs[:_BATCH], jobs[_BATCH:]
      hard = self.started + self.seconds
      if time.monotonic() >= self.started + share * self.seconds:
        found = ({"job": job, "ok": False, "error": protocol.OUT_OF_TIME} for job in batch)
      elif batch[0]["kind"] == "peer":
        found = self._peers(batch, hard)
      else:
        found = self.worker.run(batch, hard)
      for record in found:
        self.records.append(record)
        self.write(**record)
        state = f"{record['figures'].get('us', 0):.1f} us" if record["ok"] else record["error"].splitlines()[0][:160]
        print(f"{time.monotonic() - self.started:6.1f} s  {report.describe(record['job'])}: {state}", file=sys.stderr)
        yield record

  def _peers(self, batch: Sequence[Job], deadline: float) -> list[Record]:
    try:
      return list(self.peer.run(batch, deadline))
    except protocol.DidNotStart as error:  # torch is missing
      return [{"job": job, "ok": False, "error": str(error)} for job in batch]

  def sweep(self) -> tuple[list[str], dict[str, Any] | None]:
    """Varies the settings until the time is spent; returns lines for the table and the contents of tuning.json.

    Returns no settings if no factor could be judged.
    """
    from pallas_kernels.paged_attention.tuning import tuning_for

    if not self.worker.hello:  # no job has run yet
      list(self.worker.run([{"kind": "ceiling", "what": "copy"}], self.started + self.seconds))
    kind, lines, judged = self.worker.hello.get("device", ""), [], False
    start = dataclasses.asdict(tuning_for(kind, 128, 64))
    current = start | {"lowering": start["lowering"].name, "block_size": 64}
    for factor in sweep.FACTORS:
      records = list(self.do(sweep.jobs(factor, current), 1.0))
      if not records:
        continue
      chosen, ratio = sweep.choose(factor, current, records)
      judged |= ratio is not None
      changed = {name: value for name, value in chosen.items() if value != current[name]}
      timed = sum(record["ok"] for record in records)
      lines.append(
        f"{factor.name}: {timed} of {len(records)} timed; "
        + ("unknown" if ratio is None else f"{changed} takes {ratio:.3f} of the time" if changed else "as it is")
      )
      if factor.name != "block size":  # the kernels' caller chooses the size
        current = chosen
    tuning = {name: value for name, value in current.items() if name != "block_size"}
    return lines, {"device_kind": kind, "head_dim": 128, "block_size": 64, "tuning": tuning} if judged else None


def _clocks() -> str:
  """Returns nvidia-smi's report of the card, or the reason why there is none."""
  query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"
  if not shutil.which("nvidia-smi"):
    return "no nvidia-smi"
  command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
  try:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
  except subprocess.TimeoutExpired:
    return "nvidia-smi did not answer"
  return (done.stdout or done.stderr).strip()


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
    "--num_blocks", type=positive_int, help="engine: blocks of 64 tokens offline, for a card with less memory"
  )
  parser.add_argument("--torch_python", default=sys.executable, help="engine: a Python with torch and transformers")
  parser.add_argument("--merge", type=pathlib.Path, help="put this tuning.json into tuning.py, and do nothing else")
  args = parser.parse_args(arguments)
  if args.merge:
    merge(args.merge)
    return 0
  stages = args.only.split(",")
  known = (*STAGES, *engine.STAGES)
  if unknown := set(stages) - set(known):
    parser.error(f"--only: {', '.join(sorted(unknown))} is not one of {', '.join(known)}")
  if set(stages) & set(STAGES) and set(stages) & set(engine.STAGES):
    parser.error("--only: stages of the kernels and of the engine do not fit into one run; give one kind")
  if "start" in stages and "decode" not in stages:
    parser.error("--only: start restores the programs that decode compiles; give both")
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no worker outlives this process
  args.out.mkdir(parents=True, exist_ok=True)
  if not set(stages) & set(STAGES):
    if args.dry_run == "compile":
      return compile_engine(stages, args.out)
    sizes = engine.TINY if args.dry_run else engine.Sizes()
    if args.num_blocks:
      sizes = dataclasses.replace(sizes, blocks=args.num_blocks)
    if args.attention:
      sizes = dataclasses.replace(sizes, engine=(*sizes.engine, f"--attention={args.attention}"))
    deadline = time.monotonic() + 60 * args.minutes
    return measure_engine(stages, args.out, args.scratch.absolute(), deadline, sizes, args.torch_python)
  with (
    open(args.out / "log.txt", "w", encoding="utf-8") as log,
    open(args.out / "results.jsonl", "w", encoding="utf-8") as results,
  ):
    run = GpuRun(log, results, args.dry_run or "device", 60 * args.minutes, re.compile(args.match))
    try:
      return measure(run, stages, args.out)
    except protocol.DidNotStart as error:
      print(f"{error}: {args.out / 'log.txt'}", file=sys.stderr)
      return 2


def measure_engine(
  stages: Sequence[str], out: pathlib.Path, scratch: pathlib.Path, deadline: float, sizes: engine.Sizes, torch: str
) -> int:
  """Runs stages of the engine; writes engine.json and engine.txt after each command; returns the exit code."""
  dry = " (dry: no time means anything)" if sizes.device == "cpu" else ""
  head = f"commit {commit()}, {_clocks()}{dry}"
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
  print(f"clocks after: {_clocks()}\n{(out / 'engine.txt').read_text('utf-8')}", end="", flush=True)
  return int(any("error" in found for found in results.values()))


def compile_engine(stages: Sequence[str], out: pathlib.Path) -> int:
  """Compiles the steps of the engine's stages for an H200 without the hardware; returns the exit code."""
  failed = 0
  for number, words in enumerate(engine.compile_only(stages)):
    command = [sys.executable, "-m", "tools.check_device", "--target=h200", *words, f"--out={out}/steps_{number}.json"]
    failed |= subprocess.run(command, cwd=ROOT, check=False).returncode
  return int(failed != 0)


def measure(run: GpuRun, stages: Sequence[str], out: pathlib.Path) -> int:
  """Runs the stages, writes the files, prints the table; returns the exit code."""
  meta: dict[str, Any] = {
    "mode": run.mode,
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "commit": commit(),
    "clocks_before": _clocks(),
  }
  lines: list[str] = []
  try:
    run.write(meta=meta)
    for stage in STAGES:
      if stage in stages and not (stage in ("profile", "peers") and run.mode != "device"):
        with contextlib.closing(run.do(jobs_of(stage), ends(stages)[stage])) as records:
          for record in records:
            if stage == "profile" and not record["ok"]:
              break  # a profiler that fails or hangs once will do so again
        if stage == "time":
          meta["clocks_after_time"] = _clocks()
    if "sweep" in stages:
      lines, suggestion = run.sweep()
      if suggestion:
        (out / "tuning.json").write_text(json.dumps(suggestion, indent=1) + "\n", "utf-8")
  finally:
    run.close()
    meta |= run.worker.hello | run.peer.hello | {"minutes": (time.monotonic() - run.started) / 60}
    meta["processes"] = run.worker.starts
    (out / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", "utf-8")
    text = report.table(meta, run.records, lines)
    (out / "table.txt").write_text("\n".join(text) + "\n", "utf-8")
    print("\n".join(text), flush=True)
  return int(any(report.failed(record) for record in run.records))


if __name__ == "__main__":
  sys.exit(main())
