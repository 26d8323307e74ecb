"""Compares batching modes and policies: a real server for each, the same loads, one report. Measures nothing.

  python -m tools.bench.modes --output=modes
  python -m tools.bench.modes --modes=chunked --policies=fcfs,sjf,my_policy:MyPolicy --rates=24 --output=policies
  python -m tools.bench.modes --modes=static,chunked --rates=2,4,8 --seconds=30 --model=DIR --output=modes
  python -m tools.bench.modes --load="--prompt_len=fixed:100 --output_len=uniform:5:500 --num_tenants=4"

For each mode and policy the tool starts a server on a free port (server.main), loads it with tools.bench_serving at
each rate in turn, and stops it. All servers get the same requests at a rate, and other requests at each rate, so that
no prompt comes twice. A run's label is its mode, its policy, or both, depending on what is compared.
Disaggregated serving gets --num_devices devices, --prefill_devices of them for prefill; a CPU emulates them.
The tool prints one line about a failed run and continues. --output keeps the run files (LABEL_RATE.jsonl) and server
logs; tools.report writes report.html and the plots there. Prints one JSON line; exit code 1 if a run failed, 2 for bad
flags.
"""

import argparse
from collections.abc import Sequence
import contextlib
import itertools
import json
import os
import pathlib
import shlex
import signal
import sys
from typing import Any

from engine.errors import ConfigError
from engine.policy import find_policy_class
from tools.arguments import CommandParser, positive_float, positive_int
from tools.measure import ROOT, run_tool
from tools.report import __main__ as bench_report
from tools.report.accounting import Flops
from tools.report.shown_runs import MODES
from tools.server_process import RunningServer

_LOAD = "--trace=benchmarks/traces/azure_conv_500.csv --scale=0.2 --max_len=1000"
_SHOWN = ("completed", "requests", "output_tok_s", "goodput_request_s", "slo_attainment", "ttft_p99_ms", "itl_p99_ms")


def _modes(text: str) -> list[str]:
  modes = text.split(",")
  for mode in modes:
    if mode not in MODES or modes.count(mode) > 1:
      raise argparse.ArgumentTypeError(f"{text!r} must name some of {','.join(MODES)}, each once")
  return modes


def _policies(text: str) -> list[str]:
  policies = text.split(",")
  for policy in policies:
    try:
      find_policy_class(policy)
    except ConfigError as error:
      raise argparse.ArgumentTypeError(str(error)) from None
    if policies.count(policy) > 1:
      raise argparse.ArgumentTypeError(f"{text!r} names {policy} twice")
  return policies


def _rates(text: str) -> list[float]:
  rates = [positive_float(item) for item in text.split(",")]
  if len(set(rates)) < len(rates):
    raise argparse.ArgumentTypeError(f"{text!r} names a rate twice")
  if float("inf") in rates:
    raise argparse.ArgumentTypeError(f"{text!r} must be finite: a rate lasts for --seconds")
  return rates


def _flags(text: str) -> list[str]:
  try:
    return shlex.split(text)
  except ValueError as error:
    raise argparse.ArgumentTypeError(f"{text!r} must be flags with spaces between: {error}") from None


def label_of(args: Any, mode: str, policy: str) -> str:
  """Returns a run's label; a custom policy goes by its class name if that is unique."""
  if len(args.policies) == 1:
    return mode
  classes = [each.rpartition(":")[2] for each in args.policies]
  short = policy.rpartition(":")[2]
  name = short if classes.count(short) == 1 else policy
  return name if len(args.modes) == 1 else f"{mode} {name}"


def file_name(label: str) -> str:
  """Returns a label as part of a file's name."""
  return label.replace(" ", "_").replace(":", ".")


def server_flags(args: Any, mode: str, policy: str) -> list[str]:
  """Returns the server's flags for a mode and a policy; --server_flags come last and override."""
  flags = [f"--model={args.model}", f"--batching={mode}", f"--policy={policy}"]
  flags += [f"--compile_cache_dir={args.compile_cache_dir}"]
  flags += [f"--max_num_seqs={args.max_num_seqs}", f"--token_budgets={args.token_budgets}"]
  # Only chunks beside decodes must be small; the other modes use the whole step.
  flags.append(f"--prefill_chunk={args.prefill_chunk if mode == 'chunked' else args.token_budgets.split(',')[-1]}")
  if mode == "disaggregated":
    flags += [f"--num_devices={args.num_devices}", f"--prefill_devices={args.prefill_devices}"]
  return flags + args.server_flags


def environment(args: Any, mode: str) -> dict[str, str]:
  """Returns variables that let a server find this process's policies and emulate devices on a CPU."""
  found = {"PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])}
  if mode == "disaggregated":
    pretend = f"--xla_force_host_platform_device_count={args.num_devices}"
    found["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {pretend}".strip()
  return found


def load_command(args: Any, target: str, label: str, number: int, path: pathlib.Path) -> list[str]:
  """Returns the tools.bench_serving command at the rate of this number, which alone determines the requests."""
  rate = args.rates[number]
  command = [sys.executable, "-m", "tools.bench_serving", f"--target={target}", *args.load]
  command += [f"--num_requests={args.warmup_requests + max(1, round(rate * args.seconds))}", f"--rate={rate:g}"]
  command += [f"--warmup_requests={args.warmup_requests}", f"--seed={args.seed + number}", f"--clients={args.clients}"]
  command += [f"--slo_ttft_ms={args.slo_ttft_ms}", f"--slo_tpot_ms={args.slo_tpot_ms}"]
  command += [f"--label={label}", f"--run_file={path}"]
  with contextlib.suppress(ConfigError):  # a model whose FLOPs cannot be counted is still measured
    Flops.of_model(args.model)
    command += [f"--model={args.model}"]
  return command


def _say(line: str) -> None:
  print(line, file=sys.stderr, flush=True)


def sweep(args: Any, folder: pathlib.Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
  """Runs everything; returns the successful runs, and the failed runs' reasons by name."""
  runs: list[dict[str, Any]] = []
  left_out: dict[str, str] = {}

  def leave_out(what: str, error: ConfigError) -> None:
    left_out[what] = " ".join(str(error).split())
    _say(f"tools.bench.modes: {what} left out: {left_out[what]}")

  for mode, policy in itertools.product(args.modes, args.policies):
    label = label_of(args, mode, policy)
    name = file_name(label)
    _say(f"{label}: starting a server ...")
    try:
      flags, log = server_flags(args, mode, policy), folder / f"{name}.log"
      with RunningServer(flags, log, environment(args, mode)) as server:
        for number, rate in enumerate(args.rates):
          path = folder / f"{name}_{rate:g}.jsonl"
          what = f"{label} at {rate:g} requests a second"
          try:
            figures = run_tool(load_command(args, server.target, label, number, path), what)
          except ConfigError as error:
            leave_out(what, error)
            if not server.is_alive:
              raise ConfigError(f"the server ended: {server.last_words()}") from error
            continue
          run = {"mode": mode, "policy": policy, "rate": rate, "run_file": str(path)}
          runs.append(run | {name: figures[name] for name in _SHOWN})
          _say(
            f"  {figures['completed']} of {figures['requests']} requests, {figures['output_tok_s']:.0f} output "
            f"tokens/s, TTFT p99 {figures['ttft_p99_ms']:.0f} ms, {figures['slo_attainment']:.0%} met the objectives"
          )
    except ConfigError as error:
      leave_out(label, error)
  return runs, left_out


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line."""
  parser = CommandParser("tools.bench.modes", __doc__)
  parser.add_argument("--modes", type=_modes, default=",".join(MODES), help="batching modes, separated by commas")
  parser.add_argument(
    "--policies", type=_policies, default="fcfs", help="policies, separated by commas; MODULE:CLASS is your own"
  )
  parser.add_argument("--rates", type=_rates, default="8,16,32,48", help="requests a second, separated by commas")
  parser.add_argument("--seconds", type=positive_float, default=10.0, help="seconds of arrivals at each rate")
  parser.add_argument("--model", default=str(ROOT / "models" / "demo"), help="model folder")
  parser.add_argument(
    "--load", type=_flags, default=_LOAD, help="flags of tools.bench_serving that describe the requests"
  )
  parser.add_argument("--slo_ttft_ms", type=positive_float, default=500.0, help="goodput: time to first token")
  parser.add_argument("--slo_tpot_ms", type=positive_float, default=50.0, help="goodput: time per output token")
  parser.add_argument(
    "--warmup_requests", type=positive_int, default=4, help="warm-up requests before each load, not measured"
  )
  parser.add_argument("--clients", type=positive_int, default=1, help="client processes")
  parser.add_argument("--seed", type=int, default=0, help="seed of the first rate's requests; each later rate adds 1")
  parser.add_argument("--max_num_seqs", type=positive_int, default=32, help="as the server's flag")
  parser.add_argument("--token_budgets", default="8,16,32,64,128,256,384,512", help="as the server's flag")
  parser.add_argument("--prefill_chunk", type=positive_int, default=64, help="most prompt tokens a step, if chunked")
  parser.add_argument("--num_devices", type=positive_int, default=2, help="devices of disaggregated serving")
  parser.add_argument("--prefill_devices", type=positive_int, default=1, help="devices for prefill")
  parser.add_argument("--server_flags", type=_flags, default="", help="further flags of every server, in one text")
  parser.add_argument("--compile_cache_dir", default=str(pathlib.Path.home() / ".cache" / "sluice" / "programs"))
  parser.add_argument("--output", default="modes", help="folder for runs, logs and report")
  args = parser.parse_args(argv)
  for number in (signal.SIGTERM, signal.SIGHUP):  # ends as Ctrl-C does, so that no server outlives this process
    signal.signal(number, signal.default_int_handler)
  folder = pathlib.Path(args.output).absolute()
  try:
    folder.mkdir(parents=True, exist_ok=True)
    runs, left_out = sweep(args, folder)
  except OSError as error:
    return parser.failed(error)
  except KeyboardInterrupt:
    _say(f"tools.bench.modes: stopped; finished runs are in {folder}")
    return 130
  report = None
  if runs:
    with contextlib.redirect_stdout(sys.stderr):
      compared = "policies" if len(args.policies) > len(args.modes) == 1 else "batching modes"
      title = f"Sluice: {pathlib.Path(args.model).name}, {compared} side by side"
      code = bench_report.main([*(run["run_file"] for run in runs), f"--output={folder}", f"--title={title}"])
    report = str(folder / "report.html") if code == 0 else None
  print(json.dumps({"report": report, "runs": runs, "left_out": left_out}), flush=True)
  return 0 if report and not left_out else 1


if __name__ == "__main__":
  sys.exit(main())
