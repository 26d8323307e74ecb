"""Loads a running server over gRPC, open loop, from processes of its own; prints one JSON line. Runs no engine.

  python -m tools.bench_serving --target=HOST:PORT --requests=FILE.jsonl
  python -m tools.bench_serving --target=HOST:PORT --trace=benchmarks/traces/azure_conv_500.csv --scale=0.1
  python -m tools.bench_serving --target=HOST:PORT --num_requests=200 --rate=4 --burstiness=0.5

Open loop: a request is sent at its intended time whatever became of those before it, and latencies count from that
time (tools.latency has every definition). A refused or failed request is a miss in goodput and attainment, and is in
no percentile. Greedy, exactly output_len tokens a request, end-of-sequence ignored. Server-side figures are
differences of GetLoad.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
import contextlib
import json
import math
import multiprocessing
from multiprocessing.connection import Connection
import sys
import time
from typing import Any

import grpc

from engine.errors import ConfigError
from server.client import Client, SluiceError
from server.proto import sluice_pb2 as pb
from server.proto import sluice_pb2_grpc as pb_grpc
from tools import workload
from tools.arguments import CommandParser, positive_float, positive_int
from tools.latency import Objectives, Outcome, summary
from tools.workload import WorkRequest, read_requests, write_tokens

COUNTERS = ("steps", "decode_tokens", "prefill_tokens", "preemptions", "prefix_hit_tokens")
START_DELAY_S = 0.2  # between the order to start and the first intended arrival: every process has heard it by then


# --- One client process -----------------------------------------------------------------------------------------------


def _client_process(target: str, requests: list[WorkRequest], timeout_s: float, pipe: Connection) -> None:
  """Connects, says so, waits for the start on the machine-wide monotonic clock, sends, and returns the outcomes."""
  asyncio.run(_send_all(target, requests, timeout_s, pipe))


async def _send_all(target: str, requests: list[WorkRequest], timeout_s: float, pipe: Connection) -> None:
  async with grpc.aio.insecure_channel(target) as channel:
    await asyncio.wait_for(channel.channel_ready(), 30)
    stub = pb_grpc.GenerationServiceStub(channel)
    prepared = [(request, _message(request)) for request in sorted(requests, key=lambda request: request.arrival_s)]
    pipe.send("connected")
    start = await asyncio.to_thread(pipe.recv)
    tasks = []
    for request, message in prepared:
      await asyncio.sleep(max(0.0, start + request.arrival_s - time.monotonic()))
      tasks.append(asyncio.create_task(_send(stub, request, message, start + request.arrival_s, timeout_s)))
    pipe.send(await asyncio.gather(*tasks))


def _message(request: WorkRequest) -> pb.GenerateRequest:
  return pb.GenerateRequest(
    token_ids=pb.TokenIds(ids=request.prompt),
    sampling=pb.SamplingParams(temperature=0.0),
    stopping=pb.StopParams(max_tokens=request.output_len, ignore_eos=True),
    output=pb.OutputParams(return_text=False, return_token_ids=True),
  )


async def _send(
  stub: Any, request: WorkRequest, message: pb.GenerateRequest, intended_s: float, timeout_s: float
) -> Outcome:
  chunks: list[tuple[float, int]] = []
  tokens: list[int] = []
  error = None
  sent_s = time.monotonic()
  try:
    async for response in stub.Generate(message, timeout=timeout_s):
      now = time.monotonic()
      for delta in response.deltas:
        if delta.token_ids:
          chunks.append((now, len(delta.token_ids)))
          tokens.extend(delta.token_ids)
  except grpc.aio.AioRpcError as failure:
    error = f"{failure.code().name}: {failure.details()}"
  if error is None and len(tokens) != request.output_len:
    error = f"WRONG_LENGTH: {len(tokens)} tokens came, {request.output_len} were asked for"
  return Outcome(request.id, request.output_len, intended_s, sent_s, tuple(chunks), tuple(tokens), error)


# --- The parent -------------------------------------------------------------------------------------------------------


def drive(target: str, requests: Sequence[WorkRequest], num_clients: int, timeout_s: float) -> list[Outcome]:
  """Sends every request at its time from `num_clients` processes; returns outcomes in the order of `requests`.

  Raises:
    ConfigError: a client process could not connect or died.
  """
  context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
  # In order of arrival, in turn: every process sees the same load.
  in_order = sorted(requests, key=lambda request: request.arrival_s)
  shares = [share for share in (in_order[index::num_clients] for index in range(num_clients)) if share]
  processes, pipes = [], []
  try:
    for share in shares:
      ours, theirs = context.Pipe()
      process = context.Process(target=_client_process, args=(target, share, timeout_s, theirs), daemon=True)
      process.start()
      theirs.close()
      processes.append(process)
      pipes.append(ours)
    for pipe in pipes:
      pipe.recv()
    start = time.monotonic() + START_DELAY_S
    for pipe in pipes:
      pipe.send(start)
    outcomes = {outcome.id: outcome for pipe in pipes for outcome in pipe.recv()}
  except EOFError as error:
    raise ConfigError(f"a client process could not work with {target} (its error is above); check --target") from error
  finally:
    for process in processes:
      process.terminate()
      process.join()
  return [outcomes[request.id] for request in requests]


def server_figures(before: pb.GetLoadResponse, after: pb.GetLoadResponse) -> dict[str, Any]:
  """What the server did in between, and what its start took."""
  change = {
    name: getattr(after, f"{name}_total") - getattr(before, f"{name}_total") for name in (*COUNTERS, "padding_tokens")
  }
  computed = change["decode_tokens"] + change["prefill_tokens"] + change["padding_tokens"]
  return {
    "peak_rss_mb": round(after.peak_rss_bytes / 2**20, 1),
    "load_s": round(after.load_s, 3),
    "warmup_s": round(after.warmup_s, 3),
    "compiles_after_ready": after.compiles_after_ready,
    "padding_share": round(change["padding_tokens"] / computed, 5) if computed else None,
    **{name: change[name] for name in COUNTERS},
  }


def run(
  target: str, requests: Sequence[WorkRequest], num_clients: int, timeout_s: float, objectives: Objectives
) -> tuple[list[Outcome], dict[str, Any]]:
  """Drives the server and returns what came of each request and the figures of the JSON line."""
  with Client(target) as client:
    before = client.load()
    outcomes = drive(target, requests, num_clients, timeout_s)
    after = client.load()
  prompt_tokens = sum(len(request.prompt) for request, outcome in zip(requests, outcomes, strict=True) if outcome.ok)
  errors = Counter(outcome.error.split(":")[0] for outcome in outcomes if outcome.error)
  return outcomes, summary(outcomes, prompt_tokens, objectives) | server_figures(before, after) | {
    "errors": dict(sorted(errors.items())),
    "clients": num_clients,
  }


def main(argv: Sequence[str] | None = None) -> int:
  """The command; exit code 1 with one line when the server cannot be reached or every request failed."""
  parser = CommandParser("tools.bench_serving", __doc__)
  parser.add_argument("--target", required=True, help="HOST:PORT of a running server")
  parser.add_argument("--requests", help="request file (JSON lines); the flags below make requests otherwise")
  workload.add_shape_arguments(parser)
  parser.add_argument("--output_tokens", default="", help="file for the generated tokens")
  parser.add_argument("--clients", type=positive_int, default=2, help="client processes")
  parser.add_argument("--timeout_s", type=positive_float, default=600.0, help="deadline of each request")
  parser.add_argument("--slo_ttft_ms", type=positive_float, default=math.inf, help="goodput: time to first token")
  parser.add_argument("--slo_tpot_ms", type=positive_float, default=math.inf, help="goodput: time per output token")
  args = parser.parse_args(argv)
  try:
    with contextlib.redirect_stdout(sys.stderr):
      if args.requests:
        requests, description = read_requests(args.requests), {"requests_file": args.requests}
      else:
        with Client(args.target) as client:
          client.wait_ready(30)
          info = client.model_info()
        requests, description = workload.from_arguments(args, info.vocab_size, info.max_model_len)
      objectives = Objectives(args.slo_ttft_ms / 1e3, args.slo_tpot_ms / 1e3)
      outcomes, figures = run(args.target, requests, args.clients, args.timeout_s, objectives)
      if args.output_tokens:
        write_tokens(args.output_tokens, {outcome.id: outcome.tokens for outcome in outcomes})
      for outcome in [outcome for outcome in outcomes if outcome.error][:3]:
        print(f"request {outcome.id!r} failed: {outcome.error}", file=sys.stderr)
  except (ConfigError, SluiceError, OSError) as error:
    print(f"tools.bench_serving: {' '.join(str(error).split())}", file=sys.stderr)
    return 1
  print(json.dumps(figures | {"workload": description}), flush=True)
  return 0 if figures["completed"] else 1


if __name__ == "__main__":
  sys.exit(main())
