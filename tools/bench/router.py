"""Measures what the router adds to a request, and what its choices save, on fake devices.

  python -m tools.bench.router
  python -m tools.bench.router --parts=affinity --blocks=1000 --requests=3000

Two parts (--parts):

  latency    streams of one replica, directly and through the router: first tokens alone and under load, tokens/s, and
             the router's processor time a token
  affinity   the cached share of prompt tokens over --replicas replicas of --blocks KV blocks each, by policy, on
             conversations with shared beginnings; and that of one replica with as many blocks as all of them

The replicas are real servers whose device is a fake: scheduling, prefix cache and HTTP are real, and a step takes
--step_ms. Client, router and replicas share the cores that this process may use.
"""

import asyncio
from collections.abc import Sequence
import contextlib
import dataclasses
import itertools
import json
import pathlib
import random
import re
import statistics
import sys
import tempfile
import time
from typing import Any

import httpx

from engine.errors import ConfigError
from engine.routing import POLICIES
from tools.arguments import CommandParser, positive_float, positive_int
from tools.measure import commit, machine
from tools.plan_fleet.make_sessions import make_sessions
from tools.report.latency import percentile
from tools.server_process import RunningRouter, RunningServer

_PARTS = ("latency", "affinity")
_BLOCK_TOKENS = 16  # of the fake device, and of the trace's pieces
_VOCABULARY = 2000
_PATH = "/v1/completions"


@dataclasses.dataclass(frozen=True)
class TimedAnswer:
  """One answer.

  Attributes:
    first_s, total_s: seconds from sending to the first event of a stream, and to the end.
    num_events: events of a stream, without the last one.
    body: the whole body.
  """

  first_s: float
  total_s: float
  num_events: int
  body: bytes


async def send_request(address: str, body: dict[str, Any]) -> TimedAnswer:
  """Sends a request on a connection of its own, and reads the answer. Raises ConnectionError unless it has status 200.

  Args:
    address: HOST:PORT.
    body: of /v1/completions.
  """
  content = json.dumps(body, separators=(",", ":")).encode()
  head = f"POST {_PATH} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\nconnection: close\r\n"
  host, _, port = address.rpartition(":")
  began, first_s, parts = time.perf_counter(), 0.0, []
  reader, writer = await asyncio.open_connection(host, int(port))
  try:
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content)
    while data := await reader.read(1 << 16):
      parts.append(data)
      if not first_s and b"\ndata: " in data:
        first_s = time.perf_counter() - began
  finally:
    writer.close()
  answer = b"".join(parts)
  status, _, rest = answer.partition(b"\r\n\r\n")
  if not status.startswith(b"HTTP/1.1 200 "):
    raise ConnectionError(f"{address} returned {answer[:300]!r}")
  if b"\r\ntransfer-encoding: chunked" in status.lower() and not rest.endswith(b"0\r\n\r\n"):
    raise ConnectionError(f"{address} broke off its answer")
  return TimedAnswer(first_s, time.perf_counter() - began, rest.count(b"data: {"), rest)


async def send_all(address: str, bodies: Sequence[dict[str, Any]], at_once: int) -> list[TimedAnswer]:
  """Sends requests in their order, `at_once` at any time; returns the answers in this order."""
  answers: list[TimedAnswer | None] = [None] * len(bodies)
  left = iter(enumerate(bodies))

  async def work() -> None:
    for index, body in left:
      answers[index] = await send_request(address, body)

  await asyncio.gather(*(work() for _ in range(at_once)))
  return [answer for answer in answers if answer is not None]


def make_stream_bodies(count: int, num_tokens: int, seed: int) -> list[dict[str, Any]]:
  """Returns bodies of streams with prompts of 64 random tokens, all different."""
  rng = random.Random(seed)
  return [
    {
      "prompt": [rng.randrange(3, _VOCABULARY) for _ in range(64)],
      "max_tokens": num_tokens,
      "temperature": 0,
      "ignore_eos": True,
      "stream": True,
    }
    for _ in range(count)
  ]


def measure_latency(args: Any, folder: pathlib.Path) -> dict[str, Any]:
  """Returns first tokens and tokens/s, directly and through the router."""
  with RunningServer([*_fake_flags(args), f"--http_port_file={folder}/http"], folder / "server.log"):
    direct = f"127.0.0.1:{(folder / 'http').read_text().strip()}"
    with RunningRouter([direct], folder / "router.log") as router:
      found: dict[str, Any] = {}
      seeds = itertools.count()  # no prompt is sent twice
      places = {"direct": direct, "router": router.address}
      for name, at_once, num_tokens in (("alone", 1, 2), ("32 streams", 32, 64)):
        firsts: dict[str, list[float]] = {place: [] for place in places}
        for _ in range(args.rounds):  # in turns, since the machine's speed changes
          for place, address in places.items():
            count = args.requests_alone if at_once == 1 else 4 * at_once
            bodies = make_stream_bodies(count, num_tokens, next(seeds))
            firsts[place] += [each.first_s for each in asyncio.run(send_all(address, bodies, at_once))]
        found[f"first token ms, {name}"] = {
          place: {f"p{share}": 1000 * (percentile(times, share) or 0.0) for share in (50, 99)}
          for place, times in firsts.items()
        }
      rates: dict[str, list[float]] = {place: [] for place in places}
      router_s = []
      for _ in range(args.rounds):
        for place, address in places.items():
          bodies = make_stream_bodies(64, args.stream_tokens, next(seeds))
          before, began = router.processor_s(), time.perf_counter()
          answers = asyncio.run(send_all(address, bodies, 64))
          num_tokens = sum(answer.num_events for answer in answers)
          rates[place].append(num_tokens / (time.perf_counter() - began))
          if place == "router":
            router_s.append((router.processor_s() - before) / num_tokens)
      found["output tokens/s, 64 streams"] = {place: statistics.median(each) for place, each in rates.items()}
      found["router's processor microseconds a token"] = 1e6 * statistics.median(router_s)
      page = httpx.get(f"http://{router.address}/metrics", timeout=60).text
      sums = [float(re.findall(rf"added_latency_seconds_{name} (\S+)", page)[0]) for name in ("sum", "count")]
      found["added latency ms, mean, as the router reports it"] = 1000 * sums[0] / sums[1]
  return found


def make_conversations(num_requests: int, seed: int) -> list[dict[str, Any]]:
  """Returns bodies of conversations' turns in the order of their arrival, as token ids."""
  lines = make_sessions(
    num_requests,
    rate=5.0,
    num_systems=20,
    system_len="lognormal:256:64:1024",
    message_len="lognormal:64:8:256",
    output_len="lognormal:64:8:256",
    mean_turns=4.0,
    pause_s=30.0,
    max_len=2048,
    key_tokens=_BLOCK_TOKENS,
    seed=seed,
  )

  def make_prompt(line: dict) -> list[int]:
    tokens: list[int] = []
    for hash_id in line["hash_ids"]:
      rng = random.Random(hash_id)
      tokens += [rng.randrange(3, _VOCABULARY) for _ in range(_BLOCK_TOKENS)]
    return tokens[: line["input_length"]]

  return [{"prompt": make_prompt(line), "max_tokens": 4, "temperature": 0, "ignore_eos": True} for line in lines]


def measure_affinity(args: Any, folder: pathlib.Path) -> dict[str, Any]:
  """Returns the cached share of each policy, and that of one large cache."""
  bodies = make_conversations(args.requests, args.seed)
  found: dict[str, Any] = {"prompt tokens": sum(len(body["prompt"]) for body in bodies)}
  settings = [("one large cache", 1, args.blocks * args.replicas, "round_robin")]
  settings += [(policy, args.replicas, args.blocks, policy) for policy in POLICIES]
  for name, num_replicas, num_blocks, policy in settings:
    with contextlib.ExitStack() as stack:
      names = []
      for number in range(num_replicas):
        port_file = folder / f"{number}.http"
        flags = [*_fake_flags(args), f"--num_blocks={num_blocks}", f"--http_port_file={port_file}"]
        stack.enter_context(RunningServer(flags, folder / f"{number}.log"))
        names.append(f"127.0.0.1:{port_file.read_text().strip()}")
      router = stack.enter_context(RunningRouter(names, folder / "router.log", [f"--policy={policy}"]))
      answers = asyncio.run(send_all(router.address, bodies, args.at_once))
      usages = [json.loads(answer.body)["usage"] for answer in answers]
      counted = httpx.get(f"http://{router.address}/metrics", timeout=60).text
    cached = sum((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for usage in usages)
    tries = [int(float(value)) for value in re.findall(r"router_requests_total\{.*2xx.*\} (\S+)", counted)]
    found[name] = {"cached share": cached / sum(usage["prompt_tokens"] for usage in usages), "requests": tries}
  shares = {name: each["cached share"] for name, each in found.items() if isinstance(each, dict)}
  found["prefix_aware over round_robin"] = shares["prefix_aware"] / shares["round_robin"]
  found["prefix_aware over one large cache"] = shares["prefix_aware"] / shares["one large cache"]
  return found


def _fake_flags(args: Any) -> list[str]:
  return ["--fake_device", f"--fake_step_ms={args.step_ms:g}", "--http_port=0", "--throughput_line_s=0"]


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("python -m tools.bench.router", __doc__)
  parser.add_argument("--parts", default=",".join(_PARTS), help="which parts to run, separated by commas")
  parser.add_argument("--step_ms", type=positive_float, default=5.0, help="what a step of the fake device takes")
  parser.add_argument("--rounds", type=positive_int, default=3, help="latency: measurements of each kind")
  parser.add_argument("--requests_alone", type=positive_int, default=100, help="latency: requests one after the other")
  parser.add_argument("--stream_tokens", type=positive_int, default=256, help="latency: tokens of each of 64 streams")
  parser.add_argument("--replicas", type=positive_int, default=4, help="affinity: replicas")
  parser.add_argument("--blocks", type=positive_int, default=2000, help="affinity: KV blocks of a replica")
  parser.add_argument("--requests", type=positive_int, default=1500, help="affinity: turns of conversations")
  parser.add_argument("--at_once", type=positive_int, default=8, help="affinity: requests at once")
  parser.add_argument("--seed", type=int, default=0, help="affinity: seed of the conversations")
  args = parser.parse_args(arguments)
  parts = args.parts.split(",")
  if unknown := set(parts) - set(_PARTS):
    parser.error(f"--parts={args.parts}: {', '.join(sorted(unknown))} is none of {', '.join(_PARTS)}")
  found: dict[str, Any] = {}
  try:
    for part in parts:
      with tempfile.TemporaryDirectory(prefix="sluice-router-") as folder:
        found[part] = {"latency": measure_latency, "affinity": measure_affinity}[part](args, pathlib.Path(folder))
  except (ConfigError, ConnectionError) as error:
    return parser.failed(error)
  print(json.dumps({"commit": commit(), "machine": machine(), **found}, indent=2))
  return 0


if __name__ == "__main__":
  sys.exit(main())
