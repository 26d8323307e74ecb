"""Measures the front end on a fake device: streamed tokens a second, the effect on the engine, first tokens.

  python -m tools.bench.frontend [--frontend_processes=2] [--streams=256] [--step_ms=10] [--client_processes=2]

The tool measures three parts and prints one JSON line. First, the engine runs alone in this process, with as many
rows. Second, clients stream from a server continuously. Third, a client sends single requests; the figure is how much
later than the engine it has the first token. Clients run on the server's machine and take processor time from it; the
result shows their time separately. The tool compares every streamed token with the fake device's expected one.
"""

from collections.abc import Sequence
import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
import psutil

from engine.engine import Engine
from engine.errors import EngineError
from engine.request import Request
from engine.sampling_params import SamplingParams
from extensions.fake_device.build import build_fake
from extensions.fake_device.device import expected_tokens
from server.proto import sluice_pb2 as pb
from server.proto import sluice_pb2_grpc as pb_grpc
from tools.arguments import CommandParser, positive_float, positive_int
from tools.measure import ROOT
from tools.server_process import RunningServer

_MODEL = ROOT / "models" / "demo"
_SETTINGS = {"num_blocks": 65536, "max_queued_requests": 4096, "max_queued_tokens": 1 << 22}
_WARM_S = 2.0


def _flags(streams: int) -> dict[str, Any]:
  budgets = sorted({8, 64, max(64, streams), max(512, streams)})
  return {**_SETTINGS, "max_num_seqs": streams, "token_budgets": tuple(budgets), "prefill_chunk": 64}


def prompts(count: int) -> list[list[int]]:
  """Returns prompts of a few tokens, all different."""
  return [[3 + index % 2000, 7, 8 + index // 2000] for index in range(count)]


def alone(streams: int, step_ms: float, seconds: float) -> float:
  """Returns the engine's mean step in ms, with no receiver of its tokens."""
  built = build_fake(str(_MODEL), _flags(streams), step_ms / 1000, lambda events: None, engine_class=Engine)
  engine = built.engine
  max_tokens = _max_tokens(step_ms, seconds)
  for index, prompt in enumerate(prompts(streams)):
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    engine.submit(Request(f"r-{index}", prompt, params))
  stop = threading.Event()
  thread = threading.Thread(target=engine.run, args=(stop,))
  thread.start()
  time.sleep(_WARM_S + seconds)
  steps = [(step.time, step.num_rows) for step in engine.stats(1024).steps]
  stop.set()
  thread.join()
  return _mean_step_ms(steps, streams, seconds)


def _max_tokens(step_ms: float, seconds: float) -> int:
  """Returns enough tokens for all streams to last as long as the measurement, at the shortest step time."""
  return int((2 * _WARM_S + seconds) * 1000 / step_ms) + 50


def _mean_step_ms(steps: Sequence[tuple[float, int]], rows: int, seconds: float) -> float:
  full = [at for at, num_rows in steps if num_rows == rows]
  full = [at for at in full if at > full[-1] - seconds]
  return 1000 * (full[-1] - full[0]) / (len(full) - 1)


def streamed(arguments: Any) -> dict[str, Any]:
  """Runs a server and its clients for `seconds`."""
  streams, step_ms, seconds = arguments.streams, arguments.step_ms, arguments.seconds
  with _server(arguments) as (target, server), grpc.insecure_channel(target) as channel:
    clients = []
    max_tokens = _max_tokens(step_ms, seconds)
    whole = prompts(streams)
    shares = [list(range(place, streams, arguments.client_processes)) for place in range(arguments.client_processes)]
    for share in shares:
      client = subprocess.Popen(
        [sys.executable, "-m", "tools.bench.frontend_streams"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
      )
      assert client.stdin is not None
      asked = {
        "target": target,
        "streams": [[f"s-{index}", whole[index]] for index in share],
        "max_tokens": max_tokens,
        "text": not arguments.ids_only,
        "channels": arguments.channels,
      }
      client.stdin.write(json.dumps(asked))
      client.stdin.close()
      clients.append(client)
    stub = pb_grpc.ModelServiceStub(channel)
    most = 0
    while (running := stub.GetLoad(pb.GetLoadRequest()).running_requests) < streams:
      if running < most or any(client.poll() is not None for client in clients):
        raise EngineError(
          f"the first streams ended when {most} of {streams} ran; set --seconds higher or --streams lower"
        )
      most = running
      time.sleep(0.1)
    time.sleep(_WARM_S)
    processes = {
      "engine": [server],
      "front_ends": server.children(),
      "clients": [psutil.Process(c.pid) for c in clients],
    }
    begin, before = time.monotonic(), _cpu(processes)
    time.sleep(seconds)
    end, after = time.monotonic(), _cpu(processes)
    steps = [(step.time, step.num_rows) for step in stub.GetLoad(pb.GetLoadRequest(steps_after_s=0)).steps]
    answers = []
    for client in clients:
      assert client.stdout is not None
      with client.stdout as output:
        answers.append(json.loads(output.read()))
      client.wait()
  in_time = [part for answer in answers for part in answer["slices"] if begin <= part[0] < end]
  tokens, messages = sum(part[1] for part in in_time), sum(part[2] for part in in_time)
  wrong = 0
  for share, answer in zip(shares, answers, strict=True):
    for index, got in zip(share, answer["tokens"], strict=True):
      params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
      wanted, _ = expected_tokens(whole[index], params, vocab_size=2048, eos_token_ids=(2,))
      wrong += tuple(got) != wanted
  return {
    "tokens_per_s": round(tokens / (end - begin)),
    "messages_per_s": round(messages / (end - begin)),
    "tokens_per_message": round(tokens / max(1, messages), 2),
    "step_ms_with_front_end": round(_mean_step_ms(steps, streams, seconds), 3),
    "streams_failed": sum(answer["failed"] for answer in answers),
    "streams_wrong": wrong,
    "cores": {name: round((after[name] - before[name]) / (end - begin), 2) for name in processes},
  }


def _cpu(processes: dict[str, list[psutil.Process]]) -> dict[str, float]:
  return {name: sum(sum(process.cpu_times()[:2]) for process in several) for name, several in processes.items()}


class _server:
  """Starts a server of the measured kind; yields its address and its process."""

  def __init__(self, arguments: Any):
    flags = {**_flags(arguments.streams), "fake_step_ms": arguments.step_ms}
    flags["frontend_processes"] = arguments.frontend_processes
    flags["token_budgets"] = ",".join(map(str, flags["token_budgets"]))
    self._folder = tempfile.TemporaryDirectory(prefix="sluice-bench-")
    lines = ["--fake_device", f"--model={_MODEL}", "--http_port=-1", "--max_model_len=4096"]
    lines += [f"--{name}={value}" for name, value in flags.items()]
    self._running = RunningServer(lines, pathlib.Path(self._folder.name) / "log")

  def __enter__(self) -> tuple[str, psutil.Process]:
    running = self._running.__enter__()
    return running.target, psutil.Process(running._process.pid)

  def __exit__(self, *error: Any) -> None:
    self._running.__exit__(*error)
    self._folder.cleanup()


def first_tokens(arguments: Any) -> dict[str, Any]:
  """Sends one request after the other; returns the client's time to first token less the engine's.

  The difference includes the client's own time. Health checks of the same client, which take the same way without any
  work, show how much that may be.
  """
  with _server(arguments) as (target, _), grpc.insecure_channel(target) as channel:
    stub = pb_grpc.GenerationServiceStub(channel)
    seen: dict[str, float] = {}
    for index in range(arguments.requests):
      request = pb.GenerateRequest(
        request_id=f"f-{index}",
        text=f"the cat {index} sat on the mat",
        stopping=pb.StopParams(max_tokens=4, ignore_eos=True),
      )
      begin = time.monotonic()
      call = stub.Generate(request)
      next(call)
      seen[hashlib.sha256(f"f-{index}".encode()).hexdigest()[:16]] = time.monotonic() - begin
      list(call)
    load = pb_grpc.ModelServiceStub(channel).GetLoad(pb.GetLoadRequest(steps_after_s=0))
    health = health_pb2_grpc.HealthStub(channel)
    round_trips = []
    for _ in range(arguments.requests):
      begin = time.monotonic()
      health.Check(health_pb2.HealthCheckRequest())  # pyright: ignore[reportAttributeAccessIssue]  (missing in the stubs)
      round_trips.append(1000 * (time.monotonic() - begin))
  engines = {each.id: each.first_token - each.arrival for each in load.requests}
  overheads = sorted(1000 * (seconds - engines[key]) for key, seconds in seen.items() if key in engines)
  return {
    "requests": len(overheads),
    "p50_ms": round(overheads[len(overheads) // 2], 3),
    "p90_ms": round(overheads[len(overheads) * 9 // 10], 3),
    "p99_ms": round(overheads[len(overheads) * 99 // 100], 3),
    "health_check_p50_ms": round(sorted(round_trips)[len(round_trips) // 2], 3),
  }


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("tools.bench.frontend", __doc__)
  parser.add_argument(
    "--frontend_processes",
    type=int,
    default=2,
    help="front end processes; 0 runs the front end in the engine's process",
  )
  parser.add_argument("--streams", type=positive_int, default=256, help="concurrent streams, each a row of every step")
  parser.add_argument("--step_ms", type=positive_float, default=10.0, help="milliseconds of a step of the fake device")
  parser.add_argument("--seconds", type=positive_float, default=8.0, help="measured")
  parser.add_argument(
    "--client_processes", type=positive_int, default=2, help="client processes that share the streams"
  )
  parser.add_argument("--channels", type=positive_int, default=1, help="connections of each")
  parser.add_argument("--requests", type=positive_int, default=300, help="single requests whose first token is timed")
  parser.add_argument("--ids_only", action="store_true", help="clients request no text")
  arguments = parser.parse_args(argv)
  try:
    step_ms_alone = alone(arguments.streams, arguments.step_ms, arguments.seconds)
    found = streamed(arguments)
    first = first_tokens(arguments)
  except EngineError as error:
    return parser.failed(error)
  found["step_ms_alone"] = round(step_ms_alone, 3)
  found["step_ratio"] = round(found["step_ms_with_front_end"] / step_ms_alone, 3)
  print(json.dumps({**vars(arguments), **found, "first_token_overhead": first}))
  return 0


if __name__ == "__main__":
  sys.exit(main())
