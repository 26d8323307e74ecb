"""Loads a running server over gRPC, open loop, from client processes; prints one JSON line. Runs no engine.

  python -m tools.bench_serving --target=HOST:PORT --requests=FILE.jsonl
  python -m tools.bench_serving --target=HOST:PORT --trace=benchmarks/traces/azure_conv_500.csv --scale=0.1
  python -m tools.bench_serving --target=HOST:PORT --num_requests=200 --rate=4 --burstiness=0.5
  python -m tools.bench_serving --target=HOST:PORT --trace=FILE.csv --scale=0.1 --rate=8 --warmup_requests=20 \
      --num_prefixes=4 --prefix_len=32 --slo_ttft_ms=500 --slo_tpot_ms=50 --run_file=chunked_8.jsonl

Open loop: clients send each request at its intended time, whatever became of earlier ones, and latencies count from
that time (tools.report.latency defines every figure). A refused or failed request is a miss in goodput and attainment,
and is in no percentile. Sampling is greedy, each request generates exactly output_len tokens, and end-of-sequence is
ignored. The --warmup_requests finish before the measured ones begin, and appear under `warmup_load`. Server-side
figures are differences of GetLoad. With --run_file or --account, the tool reads the server's records of steps and
finished requests twice a second during the load. `account` and `account_requests` sum them up: time in queue, prefill
and decode, cached tokens, preemptions. The run file holds the records beside one row a request, in the format of
tools.report.run_file; tools.report turns it into pages and plots.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
import contextlib
import dataclasses
import json
import math
import multiprocessing
from multiprocessing.connection import Connection
import sys
import threading
import time
from typing import Any

import grpc

from engine.errors import ConfigError
from engine.recorder import RequestRecord, StepRecord
from server.client import Client, SluiceError
from server.proto import sluice_pb2 as pb
from server.proto import sluice_pb2_grpc as pb_grpc
from tools import workload
from tools.arguments import CommandParser, positive_float, positive_int
from tools.measure import machine
from tools.report.accounting import (
  Flops,
  account,
  account_requests,
  padding_by_request,
  request_table,
  table,
  whole_requests,
)
from tools.report.latency import Objectives, Outcome, percentile, summary
from tools.report.run_file import RecordedRun, shifted, write_run
from tools.workload import WorkRequest, read_requests, write_tokens

COUNTERS = (
  "steps",
  "decode_tokens",
  "prefill_tokens",
  "preemptions",
  "prefix_hit_tokens",
  "idle_slots",
  "lost_tokens",
  "skipped_tokens",
)
RUNG_COUNTERS = (
  "steps",
  "decode_tokens",
  "prefill_tokens",
  "padding_tokens",
  "skipped_tokens",
  "idle_slots",
  "host_s",
  "device_s",
)
POLL_S = 0.5  # seconds between two reads of the step records: the server keeps about a thousand
START_DELAY_S = (
  0.2  # seconds from the start message to the first intended arrival: every process has received it by then
)


# --- One client process -----------------------------------------------------------------------------------------------


def _client_process(target: str, requests: list[WorkRequest], timeout_s: float, pipe: Connection) -> None:
  """Connects, reports ready, waits for the start on the monotonic clock, sends, and returns the outcomes."""
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
    tenant=request.tenant,
    priority=request.priority,
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
    error = f"WRONG_LENGTH: {len(tokens)} tokens received, {request.output_len} requested"
  sender = request.tenant, request.priority
  return Outcome(request.id, request.output_len, intended_s, sent_s, tuple(chunks), tuple(tokens), error, *sender)


# --- Parent process ---------------------------------------------------------------------------------------------------


def drive(target: str, requests: Sequence[WorkRequest], num_clients: int, timeout_s: float) -> list[Outcome]:
  """Sends every request at its time from `num_clients` processes; returns outcomes in the order of `requests`.

  Raises:
    ConfigError: a client process could not connect or died.
  """
  context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
  # Dealt out in order of arrival, so that every process has the same load.
  in_order = sorted(requests, key=lambda request: request.arrival_s)
  shares = [share for share in (in_order[index::num_clients] for index in range(num_clients)) if share]
  processes, pipes = [], []
  try:
    for share in shares:
      own_end, theirs = context.Pipe()
      process = context.Process(target=_client_process, args=(target, share, timeout_s, theirs), daemon=True)
      process.start()
      theirs.close()
      processes.append(process)
      pipes.append(own_end)
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


class StepCollector(contextlib.AbstractContextManager["StepCollector"]):
  """Reads the server's records of steps and finished requests while a block runs, in its own thread."""

  def __init__(self, client: Client):
    self._client = client
    self._found: dict[tuple[str, int], StepRecord] = {}
    self._ended: dict[tuple[str, str, float], RequestRecord] = {}
    self._done = threading.Event()
    self._failure: SluiceError | None = None

  def __enter__(self) -> "StepCollector":
    before = time.monotonic()
    self._start_s = self._client.load().now_s
    self._offset_s = (
      before + time.monotonic()
    ) / 2 - self._start_s  # seconds from the server's clock to this process's clock
    self._thread = threading.Thread(target=self._poll, name="steps")
    self._thread.start()
    return self

  def __exit__(self, *exc: object) -> None:
    self._done.set()
    self._thread.join()

  def _poll(self) -> None:
    last = False
    try:
      while not last:
        last = self._done.wait(POLL_S)
        self._read()
    except SluiceError as error:
      self._failure = error

  def _read(self) -> None:
    # With two engines in one process, each side continues from its latest record.
    newest: dict[str, float] = {}
    for record in self._found.values():
      newest[record.side] = max(record.time, newest.get(record.side, 0.0))
    after = min(newest.values(), default=self._start_s)
    load = self._client.load(after)
    for step in load.steps:
      record = StepRecord(**{name: getattr(step, name) for name in StepRecord._fields})
      self._found[record.side, record.step] = record
    for request in load.requests:
      values = {name: getattr(request, name) for name in RequestRecord._fields}
      values |= {name: None for name in ("first_scheduled", "first_token") if not request.HasField(name)}
      self._ended[request.side, request.id, request.end] = RequestRecord(**values)

  def records(self) -> tuple[StepRecord, ...]:
    """Returns all steps planned during the block, in order, on this clock. Raises SluiceError if the server is gone."""
    if self._failure is not None:
      raise self._failure
    ordered = sorted(self._found.values(), key=lambda record: (record.time, record.step))
    return tuple(record._replace(time=record.time + self._offset_s) for record in ordered)

  def served(self) -> tuple[RequestRecord, ...]:
    """Returns one record for each request that finished during the block, on this clock."""
    return tuple(shifted(record, self._offset_s) for record in whole_requests(self._ended.values()))


def missed_steps(steps: Sequence[StepRecord]) -> int:
  """Returns the number of steps between the first and the last of each side that are not in `steps`."""
  missed = 0
  for side in {step.side for step in steps}:
    numbers = [step.step for step in steps if step.side == side]
    missed += max(numbers) - min(numbers) + 1 - len(numbers)
  return missed


def server_figures(before: pb.GetLoadResponse, after: pb.GetLoadResponse) -> dict[str, Any]:
  """Returns what the server did between two reports, and the figures of its start."""
  change = {
    name: getattr(after, f"{name}_total") - getattr(before, f"{name}_total") for name in (*COUNTERS, "padding_tokens")
  }
  computed = change["decode_tokens"] + change["prefill_tokens"] + change["padding_tokens"]
  rungs = {}
  for old, new in zip(before.rungs, after.rungs, strict=True):
    counts = {name: getattr(new, f"{name}_total") - getattr(old, f"{name}_total") for name in RUNG_COUNTERS}
    if counts["steps"]:
      rungs[str(new.tokens)] = {name: round(count, 6) for name, count in counts.items()}
  return {
    "peak_rss_mb": round(after.peak_rss_bytes / 2**20, 1),
    "load_s": round(after.load_s, 3),
    "warmup_s": round(after.warmup_s, 3),
    "compiles_after_ready": after.compiles_after_ready,
    "padding_share": round(change["padding_tokens"] / computed, 5) if computed else None,
    **{name: change[name] for name in COUNTERS},
    "by_rung": rungs,
  }


def split_warmup(requests: Sequence[WorkRequest], count: int) -> tuple[list[WorkRequest], list[WorkRequest]]:
  """Splits off the first `count` requests to arrive; moves the others so that the first of them arrives at 0.

  Raises:
    ConfigError: no request would be left to measure.
  """
  if count >= len(requests):
    raise ConfigError(f"warmup_requests={count} leaves none of {len(requests)} requests to measure; lower it")
  ordered = sorted(requests, key=lambda request: request.arrival_s)
  rest, begin = ordered[count:], ordered[count].arrival_s if count else 0.0
  return ordered[:count], [dataclasses.replace(request, arrival_s=request.arrival_s - begin) for request in rest]


def run(
  client: Client,
  target: str,
  requests: Sequence[WorkRequest],
  num_clients: int,
  timeout_s: float,
  objectives: Objectives,
  with_steps: bool = False,
) -> tuple[list[Outcome], dict[str, Any], tuple[StepRecord, ...], tuple[RequestRecord, ...]]:
  """Loads the server; returns each request's outcome, the figures of the JSON line, and the records if requested."""
  before = client.load()
  steps: tuple[StepRecord, ...] = ()
  served: tuple[RequestRecord, ...] = ()
  if with_steps:
    with StepCollector(client) as collector:
      outcomes = drive(target, requests, num_clients, timeout_s)
    steps, served = collector.records(), collector.served()
  else:
    outcomes = drive(target, requests, num_clients, timeout_s)
  after = client.load()
  prompt_tokens = sum(len(request.prompt) for request, outcome in zip(requests, outcomes, strict=True) if outcome.ok)
  errors = Counter(outcome.error.split(":")[0] for outcome in outcomes if outcome.error)
  figures = summary(outcomes, prompt_tokens, objectives) | server_figures(before, after)
  return outcomes, figures | {"errors": dict(sorted(errors.items())), "clients": num_clients}, steps, served


def accounted(
  steps: Sequence[StepRecord], outcomes: Sequence[Outcome], block_size: int, num_blocks: int, model: str
) -> dict[str, Any]:
  """Returns the account of a load's steps, with the padding attributed to each of its requests."""
  if not steps:
    raise ConfigError("the server ran no step, so --account has nothing to sum; send requests that it accepts")
  figures = account(steps, block_size, num_blocks, Flops.of_model(model) if model else None)
  spans = [(outcome.sent_s, outcome.chunks[-1][0]) for outcome in outcomes if outcome.ok]
  padding = padding_by_request(steps, spans)
  shares = {f"p{percent}": percentile(padding, percent) for percent in (50, 99)}
  return figures | {
    "padding_tokens_per_request": {name: value and round(value, 2) for name, value in shares.items()},
    "steps_missed": missed_steps(steps),
  }


def measure(
  client: Client, info: pb.GetModelInfoResponse, args: Any, requests: list[WorkRequest], description: dict[str, Any]
) -> dict[str, Any]:
  """Runs warm-up and load and writes the files; returns the JSON line."""
  objectives = Objectives(args.slo_ttft_ms / 1e3, args.slo_tpot_ms / 1e3, args.slo_e2e_ms / 1e3)
  first: list[Outcome] = []
  warm: dict[str, Any] = {}
  measured: Sequence[WorkRequest] = requests
  if args.warmup_requests > 0:
    warm_up, measured = split_warmup(requests, args.warmup_requests)
    first, figures, _, _ = run(client, args.target, warm_up, args.clients, args.timeout_s, objectives)
    warm = {"warmup_load": figures}
  wants_steps = bool(args.account or args.run_file)
  outcomes, figures, steps, served = run(
    client, args.target, measured, args.clients, args.timeout_s, objectives, wants_steps
  )
  figures |= warm | {"workload": description, "batching": info.batching}
  if wants_steps:
    figures["account"] = accounted(steps, outcomes, info.block_size, info.num_blocks, args.model)
    figures["account_requests"] = account_requests(served)
    print(f"{table(figures['account'])}\n{request_table(figures['account_requests'])}", file=sys.stderr)
  if args.output_tokens:
    by_id = {outcome.id: outcome.tokens for outcome in (*first, *outcomes)}
    write_tokens(args.output_tokens, {request.id: by_id[request.id] for request in requests})
  if args.run_file:
    about = {
      "tool": "tools.bench_serving",
      "label": args.label or info.batching,
      "batching": info.batching,
      "model": info.model,
      "workload": description,
      "slots": info.max_num_seqs,
      "block_size": info.block_size,
      "num_blocks": info.num_blocks,
      "token_budgets": list(info.token_budgets),
      "slo": {name: limit for name, limit in dataclasses.asdict(objectives).items() if limit < math.inf},
      "machine": machine(),
    }
    start_s = min(outcome.intended_s for outcome in outcomes)
    prompt_lens = tuple(len(request.prompt) for request in measured)
    write_run(args.run_file, RecordedRun(about, figures, tuple(outcomes), prompt_lens, steps, served), start_s)
  for outcome in [outcome for outcome in (*first, *outcomes) if outcome.error][:3]:
    print(f"request {outcome.id!r} failed: {outcome.error}", file=sys.stderr)
  return figures


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns 1 after one line if the server is not reachable or every request failed."""
  parser = CommandParser("tools.bench_serving", __doc__)
  parser.add_argument("--target", required=True, help="HOST:PORT of a running server")
  parser.add_argument("--requests", help="request file (JSON lines); without it, the flags below make the requests")
  workload.add_shape_arguments(parser)
  parser.add_argument("--output_tokens", default="", help="file for the generated tokens")
  parser.add_argument("--clients", type=positive_int, default=2, help="client processes")
  parser.add_argument("--timeout_s", type=positive_float, default=600.0, help="deadline of each request")
  parser.add_argument("--slo_ttft_ms", type=positive_float, default=math.inf, help="goodput: time to first token")
  parser.add_argument("--slo_tpot_ms", type=positive_float, default=math.inf, help="goodput: time per output token")
  parser.add_argument("--slo_e2e_ms", type=positive_float, default=math.inf, help="goodput: time to the last token")
  parser.add_argument(
    "--warmup_requests", type=int, default=0, help="first requests to serve as a warm-up, before the measured ones"
  )
  parser.add_argument("--account", action="store_true", help="read the server's records and sum them up")
  parser.add_argument("--model", default="", help="with --account or --run_file: model folder, to count FLOPs")
  parser.add_argument("--run_file", default="", help="file for requests and steps, for tools.report")
  parser.add_argument("--label", default="", help="in --run_file: name of the run; empty: the server's --batching")
  args = parser.parse_args(argv)
  try:
    if args.trace and not args.requests:
      workload.read_trace(args.trace)  # flag errors come before the wait for a server
    with contextlib.redirect_stdout(sys.stderr), Client(args.target) as client:
      if not args.requests:
        client.wait_ready(30)
      info = client.model_info()
      if args.requests:
        requests, description = read_requests(args.requests), {"requests_file": args.requests}
      else:
        requests, description = workload.from_arguments(args, info.vocab_size, info.max_model_len)
      figures = measure(client, info, args, requests, description)
  except (ConfigError, SluiceError, OSError) as error:
    return parser.failed(error, 1)
  print(json.dumps(figures), flush=True)
  return 0 if figures["completed"] else 1


if __name__ == "__main__":
  sys.exit(main())
