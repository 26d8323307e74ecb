"""Runs all benchmarks for a rented GPU or TPU in one command; writes one JSON file and one page.

  python -m tools.bench_cloud [--out=DIR] [--minutes=30] [--model=DIR] [--only=answers,attention]    # make bench-cloud
  python -m tools.bench_cloud --dry_run                       # tiny sizes on the CPU, to test the tool itself

Each part runs in order, in a process of its own with a time limit. The page reports a failed part; the others continue:

  answers    the demo model's answers to questions with known answers
  attention  the device's paged attention against the reference, and its time
  kernels    tools.gpu on a Hopper GPU: every kernel against dense attention, then its time beside the card's ceilings
  engine     tools.bench.engine on the largest shape of models/shapes that fits, with random weights
  served     a real server under tools.bench_serving: a burst, then 0.6 of the rate that it reached
  peers      vLLM and SGLang if they are on PATH, and every --peer, over HTTP beside Sluice; needs --model

cloud.json and report.html in --out are complete after every part. The exit code is 1 if a part failed.
"""

import argparse
from collections.abc import Sequence
import datetime
import json
import os
import pathlib
import shutil
import signal
import sys
import time
from typing import Any

from tools.arguments import CommandParser, positive_float
from tools.bench_cloud.http_load import named_command
from tools.bench_cloud.page import describe_part, make_lead
from tools.gpu import engine
from tools.gpu.engine import Command
from tools.measure import ROOT, commit, machine
from tools.report.__main__ import make_report
from tools.report.latency import Objectives
from tools.report.run_file import read_run
from tools.report.shown_runs import prepared

PARTS = ("answers", "attention", "kernels", "engine", "served", "peers")
# Shapes by the memory in GiB that weights in bf16, 1,100 blocks of 64 tokens and a step need; the first that fits.
SHAPES = ((28.0, "llama3-8b"), (8.0, "llama3.2-1b"), (0.0, "llama-125m"))
HOPPER = "9.0"
OURS = "{python} -m server.main --model={model} --port=0 --http_port={port} --speculation=none"
# Program that must be on PATH -> the peer's command.
KNOWN_PEERS = {
  "vllm": "vllm serve {model} --port={port} --served-model-name=model",
  "sglang": "sglang serve --model-path={model} --port={port} --served-model-name=model",
}


def choose_shape(facts: dict[str, Any]) -> str:
  """Returns the largest shape that fits one device."""
  memory = facts["memory_bytes"] / 2**30
  return next(name for least, name in SHAPES if memory >= least)


def plan_parts(facts: dict[str, Any], args: argparse.Namespace) -> dict[str, Command | str]:
  """Returns each part's command, or the reason to skip it."""
  python, out, tiny = sys.executable, args.out.absolute(), ["--tiny"] if args.dry_run else []

  def command(name: str, share: float, module: str, *words: str, kept: pathlib.Path | None = None) -> Command:
    return Command(name, (python, "-m", module, *words), share * 60 * args.minutes, kept=kept)

  checks = "tools.bench_cloud.device_checks"
  found: dict[str, Command | str] = {
    "answers": command("answers", 0.2, checks, "answers", *tiny),
    "attention": command("attention", 0.2, checks, "attention", *tiny),
  }
  if args.dry_run or facts["compute_capability"] == HOPPER:
    minutes = 0.25 * args.minutes
    dry = ["--dry_run"] if args.dry_run else []
    found["kernels"] = command(
      "kernels", 0.28, "tools.bench_cloud.gpu_kernels", f"--out={out / 'kernels'}", f"--minutes={minutes:g}", *dry
    )
  else:
    found["kernels"] = f"tools.gpu measures kernels for compute capability {HOPPER} (H100, H200), not {facts['device']}"
  cache = f"--compile_cache_dir={out / 'programs'}"
  shape, kept = "llama-15m" if args.dry_run else choose_shape(facts), out / "engine.json"
  words = ["--random_weights=true", f"--model={ROOT / 'models' / 'shapes' / shape}", cache, f"--output={kept}"]
  if args.model:
    words = [f"--model={args.model}", cache, f"--output={kept}"]
  if args.dry_run:
    words += ["--batches=1,2", "--contexts=32", "--prompts=8", "--requests=3", "--lengths=4,9", "--seconds=0.01"]
    words += ["--max_model_len=128", "--num_blocks=64", "--token_budgets=8", "--max_num_seqs=8", "--prefill_chunk=8"]
    words += ["--parts=decode,offline"]
  else:
    words += ["--max_model_len=2048", "--num_blocks=1100", "--block_size=64", "--max_num_seqs=64", "--contexts=1024"]
    words += ["--requests=128", "--lengths=100,1024", "--parts=decode,prefill,offline,sampler"]
  found["engine"] = command("engine", 0.35, "tools.bench.engine", *words, kept=kept)
  load = ["--num_requests=6", "--prompt_len=uniform:4:16", "--output_len=uniform:4:8"] if args.dry_run else []
  model = args.model or str(ROOT / "models" / "demo")
  server = [f"--model={model}", cache]
  if not args.model and not args.dry_run:
    server = [f"--model={ROOT / 'models' / 'shapes' / shape}", "--random_weights", "--max_model_len=2048", cache]
  served = f"--out={out / 'served'}"
  found["served"] = command("served", 0.3, "tools.bench_cloud.served_load", served, *load, "--", *server)
  peers = dict(args.peer) or {name: text for name, text in KNOWN_PEERS.items() if shutil.which(name)}
  if not peers:
    found["peers"] = f"none of {', '.join(KNOWN_PEERS)} is on PATH; install one, or give --peer=NAME=COMMAND"
  elif not args.model and not args.dry_run:
    found["peers"] = "peers need weights and a tokenizer; give --model=DIR"
  else:
    servers = [f"--server={name}={text}" for name, text in ({"sluice": f"{OURS} {cache}"} | peers).items()]
    found["peers"] = command(
      "peers", 0.5, "tools.bench_cloud.http_load", f"--out={out / 'peers'}", f"--model={model}", *servers, *load
    )
  return found


def run_files(found: dict[str, Any]) -> list[str]:
  """Returns the run files of a part, or of one of its servers."""
  own = found.get("run_files", [])
  return [*own, *(file for value in found.values() if isinstance(value, dict) for file in value.get("run_files", []))]


def write_outcome(out: pathlib.Path, about: dict[str, Any], parts: dict[str, dict[str, Any]]) -> None:
  """Writes cloud.json, report.html and the plots."""
  (out / "cloud.json").write_text(json.dumps({"about": about, "parts": parts}, indent=1) + "\n", "utf-8")
  runs = [read_run(path) for found in parts.values() for path in run_files(found)]
  title = f"Sluice on {about.get('facts', {}).get('device', 'an unknown device')}"
  make_report(prepared(runs, Objectives()), {}, out, title, lead=make_lead(about, parts))


def measure(args: argparse.Namespace) -> int:
  """Runs all parts and writes the files; returns the exit code."""
  started, parts = time.monotonic(), {}
  deadline = started + 60 * args.minutes
  about: dict[str, Any] = {
    "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "commit": commit(),
    "machine": machine(),
    "dry_run": args.dry_run,
    "model": args.model,
  }

  def keep(name: str, found: dict[str, Any]) -> None:
    parts[name] = found
    about["minutes"] = round((time.monotonic() - started) / 60, 2)
    write_outcome(args.out, about, parts)
    print(f"{name}: {describe_part(name, found)} ({found.get('took_s', 0):.0f} s)", flush=True)

  with open(args.out / "log.txt", "w", encoding="utf-8") as log:
    facts_command = Command("device", (sys.executable, "-m", "tools.bench_cloud.device_checks", "facts"), 120.0)
    facts = engine.run(facts_command, deadline, log)
    if "error" not in facts:
      about["facts"] = facts
      plan = plan_parts(facts, args)
    else:  # the plan depends on the device's facts
      keep("device", facts)
      plan = dict.fromkeys(PARTS, "the device did not start")
    for name in PARTS:
      if name in args.only:
        todo = plan[name]
        keep(name, {"left_out": todo} if isinstance(todo, str) else engine.run(todo, deadline, log))
  print(f"{args.out / 'cloud.json'}\n{args.out / 'report.html'}", flush=True)
  return int(any("error" in found for found in parts.values()))


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("python -m tools.bench_cloud", __doc__)
  parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(".cache/bench_cloud"), help="folder to write to")
  parser.add_argument("--minutes", type=positive_float, default=30.0, help="time limit of all parts together")
  parser.add_argument("--model", default="", help="model folder for engine, served and peers; empty: random weights")
  parser.add_argument("--only", default=",".join(PARTS), help="parts to run, separated by commas")
  parser.add_argument(
    "--peer", type=named_command, action="append", default=[], help="NAME=COMMAND with {model} and {port} in it"
  )
  parser.add_argument("--dry_run", action="store_true", help="tiny sizes on the CPU")
  args = parser.parse_args(arguments)
  args.only = args.only.split(",")
  if unknown := set(args.only) - set(PARTS):
    parser.error(f"--only: {', '.join(sorted(unknown))} is not one of {', '.join(PARTS)}")
  if args.model and not (pathlib.Path(args.model) / "config.json").is_file():
    parser.error(f"--model={args.model} has no config.json; give a model folder")
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # no part may outlive it
  if args.dry_run:
    os.environ["JAX_PLATFORMS"] = "cpu"  # for every part
  args.out.mkdir(parents=True, exist_ok=True)
  return measure(args)


if __name__ == "__main__":
  sys.exit(main())
