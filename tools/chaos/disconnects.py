"""Scenario: clients that disconnect at any moment: by RST, FIN, half a request, a cancelled call, SIGKILL."""

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time

import grpc

from tools.chaos import wire
from tools.chaos.process import Server, Usage
from tools.chaos.report import Row, none_of
from tools.chaos.rig import Rig, wait_for
from tools.chaos.streams import StreamRequest, on_loop, random_prompt, stub_of
from tools.measure import ROOT

_STEP_MS = 4
_MAX_RSS_GROWTH = 20e6
_OPEN_AT_ONCE = 24
_HELD_BY_PROCESS = 40
_OURS = 1  # a connection to read the server's counters


def cancel_many(target: str, count: int, at_once: int, seed: int) -> int:
  """A job: makes calls of a real gRPC client and cancels each at a random moment; returns their number."""
  return on_loop(_cancel_many(target, count, at_once, seed))


async def _cancel_many(target: str, count: int, at_once: int, seed: int) -> int:
  rng = random.Random(seed)
  done = 0
  async with grpc.aio.insecure_channel(target) as channel:
    stub = stub_of(channel)

    async def client(share: int) -> None:
      nonlocal done
      for _ in range(share):
        call = stub.Generate(StreamRequest(random_prompt(rng, rng.randint(1, 100)), 200).message())
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
          if rng.random() < 0.5:
            await asyncio.sleep(rng.random() * 0.02)
          else:
            for _ in range(rng.randint(1, 4)):
              await call.read()
        call.cancel()
        done += 1

    await asyncio.gather(*(client(len(range(index, count, at_once))) for index in range(at_once)))
  return done


def requests_of(server: Server, rng: random.Random) -> list[tuple[int, bytes]]:
  """Returns long generations for both protocols; clients leave before their end."""
  made = []
  for _ in range(30):
    prompt = random_prompt(rng, rng.randint(1, 100))
    made.append((server.port, wire.grpc_request(StreamRequest(prompt, 200).message().SerializeToString())))
  for _ in range(6):
    body = {"model": "sluice-demo", "prompt": list(random_prompt(rng, 20)), "max_tokens": 200, "stream": True}
    made.append((server.http_port, wire.http_request(json.dumps(body).encode())))
  return made


def _kill_holders(server: Server, count: int, rng: random.Random) -> int:
  """Kills processes full of open streams; returns the number of streams cut off."""
  killed = 0
  while killed < count:
    size = min(_HELD_BY_PROCESS, count - killed)
    message = StreamRequest(random_prompt(rng, 10), 400).message().SerializeToString()
    holder = subprocess.Popen(
      [sys.executable, "-S", "-m", "tools.chaos.wire", str(server.port), str(size), wire.grpc_request(message).hex()],
      cwd=ROOT,
      stdout=subprocess.PIPE,
    )
    try:
      assert holder.stdout is not None and holder.stdout.readline() == b"open\n", "a client could not connect"
      time.sleep(rng.random() * 0.05)
    finally:
      holder.kill()
      holder.wait()
      if holder.stdout is not None:
        holder.stdout.close()
    killed += size
  return killed


def _abuse(rig: Rig, server: Server, count: int, seed: int) -> tuple[int, int, int]:
  """Makes `count` disconnects: 60 % on bare sockets, 25 % cancelled, 15 % killed; returns the number of each."""
  rng = random.Random(seed)
  killed, cancelled = round(0.15 * count), round(0.25 * count)
  vanishing = rig.submit(
    wire.vanish, requests_of(server, rng), count - killed - cancelled, _OPEN_AT_ONCE, 0.001, rng.getrandbits(32)
  )
  cancelling = rig.submit(cancel_many, server.target, cancelled, 8, rng.getrandbits(32))
  return vanishing.result(), cancelling.result(), _kill_holders(server, killed, rng)


def _growth(server: Server, before: Usage) -> Usage:
  """Returns the server's growth once pending releases are done."""
  wait_for(lambda: server.usage().fds <= before.fds, 15.0, 0.2)
  after = server.usage()
  return Usage(after.rss - before.rss, after.fds - before.fds, after.threads - before.threads)


def disconnects(rig: Rig, count: int = 10_000, warmup: int = 600, asked: int = 10_000) -> list[Row]:
  """Disconnects at random moments, beside streams that must not be affected."""
  with rig.server(f"--fake_step_ms={_STEP_MS}", "--max_num_seqs=128", "--keepalive_time_s=5") as server:
    # Does everything once before: what the server makes at first use is no leak.
    with rig.controls(server, num_streams=8, max_tokens=60) as control:
      _abuse(rig, server, warmup, 1)
    control()
    server.settle()
    rig.end_clients()
    wait_for(lambda: server.num_connections() <= _OURS, 15.0, 0.1)
    books, before = server.books(), server.usage()
    with rig.controls(server, num_streams=8, max_tokens=60) as control:
      vanished, cancelled, killed = _abuse(rig, server, count, 2)
    seen = control()
    held = server.settle()
    rig.end_clients()
    growth = _growth(server, before)
    tasks = server.books().asyncio_tasks - books.asyncio_tasks
    lost = server.imbalance()
  ran = vanished + cancelled + killed
  held += [f"{growth.fds} descriptors more"] if growth.fds > 0 else []
  held += [f"{tasks} tasks more"] if tasks > 0 else []
  text = f"{vanished:,} closed, {cancelled:,} cancelled, {killed:,} killed: "
  return [
    Row(
      "client disconnects at random moments",
      "0 pages, tasks, descriptors leaked",
      text + ("0 leaked" if not held else "; ".join(held)),
      not held,
      asked,
      ran,
    ),
    Row(
      "resident memory growth over them",
      "< 20 MB",
      f"{growth.rss / 1e6:+.1f} MB",
      growth.rss < _MAX_RSS_GROWTH,
      asked,
      ran,
    ),
    none_of(f"control streams beside them ({seen.tokens:,} tokens)", "all exact", seen.faults, seen.streams, 0),
    none_of("accepted requests = finished + failed + in flight", "always", lost, ran, 0),
  ]
