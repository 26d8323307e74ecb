"""Scenarios: ten times a server's capacity, and clients that never read."""

import asyncio
from collections import Counter
import contextlib
import dataclasses
import random
import time

import grpc

from server.proto import sluice_pb2 as pb
from tools.chaos import wire
from tools.chaos.process import Server
from tools.chaos.report import Row, none_of
from tools.chaos.rig import Rig, wait_for
from tools.chaos.streams import StreamRequest, on_loop, random_prompt, send, stub_of
from tools.report.latency import percentile

_STEP_MS = 10
_SEQS = 8
_TOKENS = 20
_PROMPT = 8
_GOODPUT = 0.95
_REJECT_MS = 50.0
_SLOW_FACTOR = 1.5
_SLOW_STEP_MS = 40
_STALL_S = 4.0
_LONGEST_S = 40.0


@dataclasses.dataclass
class Offered:
  """The result of an open loop. Rejects in seconds from sending to the status; `done` are times of good endings."""

  sent: int = 0
  codes: Counter[str] = dataclasses.field(default_factory=Counter)
  rejects: list[float] = dataclasses.field(default_factory=list)
  done: list[float] = dataclasses.field(default_factory=list)
  faults: list[str] = dataclasses.field(default_factory=list)
  latest_s: float = 0.0

  def add(self, other: "Offered") -> None:
    """Adds another process's result."""
    self.sent += other.sent
    self.codes += other.codes
    self.rejects += other.rejects
    self.done += other.done
    self.faults += other.faults
    self.latest_s = max(self.latest_s, other.latest_s)


def offer(target: str, rate: float, seconds: float, seed: int) -> Offered:
  """A job: sends `rate` requests a second at random moments, without waiting for results."""
  return on_loop(_offer(target, rate, seconds, seed))


async def _offer(target: str, rate: float, seconds: float, seed: int) -> Offered:
  rng = random.Random(seed)
  offered = Offered()
  live: set[asyncio.Task] = set()

  async def one(stub, ask: StreamRequest) -> None:
    answer = await send(stub, ask, 60.0)
    offered.codes[answer.code] += 1
    if answer.exact:
      offered.done.append(answer.ended)
    elif answer.code == "RESOURCE_EXHAUSTED":
      offered.rejects.append(answer.ended - answer.sent)
    else:
      offered.faults.append(answer.fault())

  async with grpc.aio.insecure_channel(target) as channel:
    stub = stub_of(channel)
    await channel.channel_ready()
    began = due = time.monotonic()
    while due < began + seconds:
      pause = due - time.monotonic()
      if pause > 0:
        await asyncio.sleep(pause)
      offered.latest_s = max(offered.latest_s, -pause)
      task = asyncio.create_task(one(stub, StreamRequest(random_prompt(rng, _PROMPT), _TOKENS, unary=True)))
      live.add(task)
      task.add_done_callback(live.discard)
      offered.sent += 1
      due += rng.expovariate(rate)
    await asyncio.gather(*live)
  return offered


def overload(rig: Rig, seconds: float = 60.0, peak_s: float = 8.0, factor: float = 10.0) -> list[Row]:
  """Measures the peak under constant demand, then offers `factor` times as much."""
  flags = (f"--fake_step_ms={_STEP_MS}", f"--max_num_seqs={_SEQS}", f"--max_queued_requests={2 * _SEQS}")
  flags += ("--num_blocks=256",)  # the invariants scan all blocks after every step
  rng = random.Random(8)
  capacity = _SEQS / ((_TOKENS + 1) * _STEP_MS / 1000)
  with rig.server(*flags) as server:
    asks = [StreamRequest(random_prompt(rng, _PROMPT), _TOKENS, unary=True) for _ in range(int(capacity * peak_s))]
    answers = rig.ask(server.target, asks, at_once=2 * _SEQS)
    ended = sorted(answer.ended for answer in answers if answer.exact)
    peak = _rate(ended)
    jobs = [rig.submit(offer, server.target, factor * peak / 2, seconds, seed) for seed in range(2)]
    offered = Offered()
    for job in jobs:
      offered.add(job.result())
    faults = offered.faults + server.settle() + server.imbalance()
  goodput = _rate(sorted(offered.done))
  share = goodput / peak if peak else 0.0
  p99_ms = 1000 * (percentile(offered.rejects, 99) or 0.0)
  times = offered.sent / seconds / peak if peak else 0.0
  text = f"{offered.sent:,} sent, {len(offered.done):,} served, {len(offered.rejects):,} refused"
  return [
    Row(
      f"goodput at {times:.1f} times the peak for {seconds:g} s",
      f">= {_GOODPUT:.0%} of the peak",
      f"{share:.1%} ({goodput:.1f} of {peak:.1f} requests/s; {text})",
      share >= _GOODPUT and times >= 0.9 * factor,
      60,
      round(seconds),
    ),
    Row(
      "refusals under overload, p99",
      f"<= {_REJECT_MS:g} ms",
      f"{p99_ms:.1f} ms of {len(offered.rejects):,}",
      p99_ms <= _REJECT_MS and len(offered.rejects) > 0,
    ),
    none_of("everything else under overload", "no other error, nothing held", faults, offered.sent, 0),
  ]


def _rate(times: list[float]) -> float:
  """Returns the requests a second between the first and the last tenth, without the load's beginning and end."""
  cut = len(times) // 10
  inner = times[cut : len(times) - cut]
  return (len(inner) - 1) / (inner[-1] - inner[0]) if len(inner) > 2 else 0.0


def slow_readers(rig: Rig, count: int = 200, quiet_s: float = 8.0, asked: int = 200) -> list[Row]:
  """Opens long streams that never read, beside others, until the server has given them all up."""
  flags = (f"--fake_step_ms={_SLOW_STEP_MS}", "--max_num_seqs=256", f"--stream_stall_timeout_s={_STALL_S:g}")
  rng = random.Random(9)
  messages = []
  for _ in range(count):
    message = StreamRequest(random_prompt(rng, 20), 450).message()
    message.output.CopyFrom(pb.OutputParams(logprobs=20))  # large: gRPC's buffers must not hold a whole answer
    messages.append(message.SerializeToString())
  with rig.server(*flags, "--num_blocks=16384") as server:
    rig.ask(server.target, [StreamRequest(random_prompt(rng, 8), 10) for _ in range(64)], at_once=32)  # warm-up
    with rig.controls(server, num_streams=16, max_tokens=60) as control:
      time.sleep(quiet_s)
      began = time.monotonic()
      with contextlib.closing(wire.Deaf(server.port, messages)):
        wait_for(lambda: _aborted(server) >= count, _LONGEST_S, 1.0)
        ended = time.monotonic()
        given_up = _aborted(server)
    seen = control()
    faults = seen.faults + server.settle() + server.imbalance()
  quiet = [gap for at, gap in seen.gaps if at < began]
  beside = [gap for at, gap in seen.gaps if began < at < ended]
  quiet_p99, beside_p99 = (percentile(gaps, 99) or 0.0 for gaps in (quiet, beside))
  factor = beside_p99 / quiet_p99 if quiet_p99 else float("inf")
  return [
    Row(
      f"others' gaps between tokens beside {count} clients that never read, p99",
      f"<= {_SLOW_FACTOR} times quiet",
      f"{factor:.2f} times ({1000 * quiet_p99:.1f} to {1000 * beside_p99:.1f} ms, {len(beside):,} gaps)",
      factor <= _SLOW_FACTOR and len(beside) > 100,
      asked,
      count,
    ),
    Row(
      f"the server gives up clients that never read {_STALL_S:g} s after their buffers are full",
      "all",
      f"{given_up} of {count} in {ended - began:.1f} s",
      given_up == count,
      asked,
      count,
    ),
    none_of("streams beside them; pages afterwards", "all exact, 0 held", faults, seen.streams, 0),
  ]


def _aborted(server: Server) -> int:
  return server.books().requests_cancelled_total
