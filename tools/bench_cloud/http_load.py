"""Loads Sluice and peers over OpenAI-compatible HTTP with one client and the same requests, each alone on the device.

  python -m tools.bench_cloud.http_load --out=DIR --model=DIR --server="NAME=COMMAND" [--server=...]

A COMMAND starts a server; the tool fills in {model}, {port} and {python}. Servers run one after the other, since each
uses the whole device. Each gets two loads: all requests at once, then 0.6 of the requests a second that the first
server reached. Prompts are token ids; answers are greedy, with forced lengths. Servers may send several tokens in one
message, so each message counts an equal share of the tokens in `usage`. The tool prints one JSON line, {NAME: figures
or {"error": ...}}, and writes run files for tools.report into --out.
"""

import argparse
import asyncio
from collections.abc import Sequence
import contextlib
import json
import math
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
from typing import Any

import httpx

from engine.errors import ConfigError
from tools.arguments import CommandParser, positive_float, positive_int
from tools.gpu.protocol import ENDING_S
from tools.measure import ROOT, machine
from tools.report.latency import Outcome, summary
from tools.report.run_file import RecordedRun, write_run
from tools.server_process import find_free_port
from tools.workload import WorkRequest, synthetic

_SHARE = 0.6
_REQUEST_S = 600.0


@contextlib.contextmanager
def running_server(command: Sequence[str], url: str, log: pathlib.Path, ready_s: float):
  """Runs a server; the block begins when the server lists its models. Raises ConfigError if it never does."""
  with open(log, "wb") as said:
    process = subprocess.Popen(
      command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
    )
  try:
    deadline = time.monotonic() + ready_s
    while True:
      with contextlib.suppress(httpx.HTTPError):
        if httpx.get(f"{url}/v1/models", timeout=5).status_code == 200:
          break
      if process.poll() is not None or time.monotonic() > deadline:
        lines = log.read_text("utf-8", "replace").strip().splitlines() or ["it said nothing"]
        why = "was not ready in time" if process.poll() is None else f"ended with exit code {process.returncode}"
        raise ConfigError(f"the server {why}: {lines[-1][:200]}")
      time.sleep(0.2)
    yield
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGTERM)
    try:
      process.wait(ENDING_S + 30)
    except subprocess.TimeoutExpired:
      os.killpg(process.pid, signal.SIGKILL)
      process.wait(ENDING_S)


async def _send(client: httpx.AsyncClient, model: str, request: WorkRequest, start_s: float) -> Outcome:
  intended_s = start_s + request.arrival_s
  await asyncio.sleep(max(0.0, intended_s - time.monotonic()))
  body = {
    "model": model,
    "prompt": list(request.prompt),
    "max_tokens": request.output_len,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
  }
  times, total, error, sent_s = [], 0, None, time.monotonic()
  try:
    async with client.stream("POST", "/v1/completions", json=body) as response:
      if response.status_code != 200:
        error = f"HTTP_{response.status_code}: {(await response.aread()).decode('utf-8', 'replace'):.200}"
      else:
        async for line in response.aiter_lines():
          if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            if event.get("choices"):
              times.append(time.monotonic())
            total = (event.get("usage") or {}).get("completion_tokens", total)
  except (httpx.HTTPError, ValueError) as failure:
    error = f"{type(failure).__name__}: {failure}"
  times = times[:total]
  counts = [total * (index + 1) // len(times) - total * index // len(times) for index in range(len(times))]
  if error is None and total != request.output_len:
    error = f"WRONG_LENGTH: {total} tokens received, {request.output_len} requested"
  return Outcome(
    request.id, request.output_len, intended_s, sent_s, tuple(zip(times, counts, strict=True)), error=error
  )


async def send_all(url: str, requests: Sequence[WorkRequest]) -> list[Outcome]:
  """Sends every request at its arrival time, whether or not earlier ones have ended."""
  limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
  async with httpx.AsyncClient(base_url=url, timeout=_REQUEST_S, limits=limits) as client:
    model = (await client.get("/v1/models")).json()["data"][0]["id"]
    start_s = time.monotonic() + 0.1
    return await asyncio.gather(*(_send(client, model, request, start_s) for request in requests))


def load_one(name: str, url: str, vocab_size: int, args: Any, rate: float) -> dict[str, Any]:
  """Warms up and runs both loads; returns their figures and run files."""
  asyncio.run(send_all(url, synthetic(4, args.prompt_len, "fixed:4", vocab_size, seed=1)))
  found: dict[str, Any] = {"run_files": []}
  for load, at in (("burst", math.inf), ("steady", rate)):
    at = at or max(0.1, _SHARE * (found["burst"]["request_s"] or 0.0))
    requests = synthetic(args.num_requests, args.prompt_len, args.output_len, vocab_size, seed=0, rate=at)
    outcomes = asyncio.run(send_all(url, requests))
    lens = tuple(len(request.prompt) for request in requests)
    found[load] = summary(outcomes, sum(lens)) | {"rate": None if math.isinf(at) else at}
    errors = [outcome.error for outcome in outcomes if outcome.error]
    if errors:
      found[load]["first_error"] = errors[0]
    if any(outcome.ok for outcome in outcomes):
      workload = {"num_requests": len(requests), "prompt_len": args.prompt_len, "output_len": args.output_len}
      workload |= {} if math.isinf(at) else {"rate": at}
      about = {"tool": "tools.bench_cloud.http_load", "label": f"{name} (HTTP)", "model": args.model}
      about |= {"workload": workload, "machine": machine(), "slo": {}}
      path = args.out / f"{name}_{load}.jsonl"
      start_s = min(outcome.intended_s for outcome in outcomes)
      write_run(str(path), RecordedRun(about, found[load], tuple(outcomes), lens, ()), start_s)
      found["run_files"].append(str(path))
  if not found["burst"]["completed"]:
    found["error"] = f"no request was answered: {found['burst'].get('first_error')}"
  return found


def named_command(text: str) -> tuple[str, str]:
  name, _, command = text.partition("=")
  if not name.replace("_", "").isalnum() or not command:
    raise argparse.ArgumentTypeError(f"{text!r} must be NAME=COMMAND, the name of letters and digits")
  return name, command


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line. The JSON line reports a failed server; the others continue."""
  parser = CommandParser("tools.bench_cloud.http_load", __doc__)
  parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for logs and run files")
  parser.add_argument("--model", required=True, help="model folder, with its tokenizer")
  parser.add_argument("--server", type=named_command, action="append", required=True, help="NAME=COMMAND")
  parser.add_argument("--num_requests", type=positive_int, default=200, help="requests of each load")
  parser.add_argument("--prompt_len", default="lognormal:256:16:1024", help="as tools.bench_serving's")
  parser.add_argument("--output_len", default="lognormal:128:8:512", help="as tools.bench_serving's")
  parser.add_argument("--ready_s", type=positive_float, default=600.0, help="time limit for a server to start")
  args = parser.parse_args(arguments)
  args.out.mkdir(parents=True, exist_ok=True)
  found: dict[str, Any] = {}
  rate = 0.0
  try:
    config = json.loads((pathlib.Path(args.model) / "config.json").read_text("utf-8"))
    vocab_size = int(config.get("text_config", config)["vocab_size"])
  except (OSError, ValueError, KeyError) as error:
    return parser.failed(ConfigError(f"--model={args.model}: no vocab_size in its config.json ({error})"))
  for name, text in args.server:
    port = find_free_port()
    words = [word.format(model=args.model, port=port, python=sys.executable) for word in shlex.split(text)]
    url = f"http://127.0.0.1:{port}"
    print(f"{name}: {shlex.join(words)}", file=sys.stderr, flush=True)
    try:
      with running_server(words, url, args.out / f"{name}.log", args.ready_s):
        found[name] = load_one(name, url, vocab_size, args, rate)
      rate = rate or found[name]["steady"]["rate"]
    except (ConfigError, OSError, httpx.HTTPError, ValueError, KeyError) as error:
      found[name] = {"error": f"{type(error).__name__}: {error}", "run_files": []}
  print(json.dumps(found), flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
