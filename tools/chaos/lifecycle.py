"""Scenarios: processes that end on SIGTERM, on SIGKILL, or because their engine failed."""

import asyncio
import dataclasses
import json
import pathlib
import random
import time

import grpc

from engine.errors import ConfigError
from tools.chaos import plans
from tools.chaos.process import READY_S, Server
from tools.chaos.report import Row
from tools.chaos.rig import Rig
from tools.chaos.streams import Answer, StreamRequest, on_loop, random_prompt, send, stub_of
from tools.server_process import find_free_port

_GRACE_S = 20.0
_STREAMS = 12
_STEP = "--fake_step_ms=4"
_TOLD_S = 1.0
_EXIT_S = 10.0
_PROCESSES = 3  # clients, and therefore servers at the same time


@dataclasses.dataclass
class Trials:
  """The result of several trials.

  Attributes:
    count: trials.
    exact: streams that ended well, with every token.
    refused: streams that the server refused with a status.
    cut: streams that the server ended with an error status.
    faults: descriptions of faults.
    slowest_s: the slowest time, of the trial's subject.
  """

  count: int = 0
  exact: int = 0
  refused: int = 0
  cut: int = 0
  faults: list[str] = dataclasses.field(default_factory=list)
  slowest_s: float = 0.0

  def add(self, other: "Trials") -> None:
    """Adds another process's result."""
    self.count += other.count
    self.exact += other.exact
    self.refused += other.refused
    self.cut += other.cut
    self.faults += other.faults
    self.slowest_s = max(self.slowest_s, other.slowest_s)

  def take(self, answer: Answer, codes: tuple[str, ...]) -> None:
    """Counts a stream that may fail with one of these codes, but may not have wrong tokens."""
    if not answer.sound:
      self.faults.append(answer.fault() or "wrong tokens")
    elif answer.exact:
      self.exact += 1
    elif answer.code not in codes:
      self.faults.append(answer.fault())
    elif answer.tokens:
      self.cut += 1
    else:
      self.refused += 1

  def end(self, server: Server, code: int | None, right: bool) -> None:
    """Counts a trial whose server ended with this exit code; None: it still runs."""
    if not right:
      self.faults.append(f"trial {self.count}: exit code {code}: {server.last_words()}")
    self.count += 1

  def row(self, check: str, target: str, text: str, met: bool, asked: int) -> Row:
    """Returns the row; it passes if `met` and there is no fault, else it shows the first."""
    if self.faults:
      text += f"; {len(self.faults)} faults: {self.faults[0]}"
    return Row(check, target, f"{self.count}: {text}", met and not self.faults, asked, self.count)


async def _ready(server: Server) -> None:
  deadline = time.monotonic() + READY_S
  while not server.is_ready():
    if time.monotonic() > deadline:
      raise ConfigError(f"a server was not ready after {READY_S:g} s: {server.last_words()}")
    await asyncio.sleep(0.02)


async def _exit_code(server: Server, within_s: float) -> int | None:
  """Returns the exit code; None if the server still runs."""
  deadline = time.monotonic() + within_s
  while server.process.poll() is None and time.monotonic() < deadline:
    await asyncio.sleep(0.02)
  return server.process.returncode


async def _send_later(channel: grpc.aio.Channel, ask: StreamRequest, delay_s: float) -> Answer:
  await asyncio.sleep(delay_s)
  return await send(stub_of(channel), ask, 60.0)


def _streams(
  channel: grpc.aio.Channel, rng: random.Random, over_s: float, tokens: tuple[int, int]
) -> list[asyncio.Task]:
  """Starts streams at random moments of the next `over_s` seconds."""
  asks = [
    StreamRequest(random_prompt(rng, rng.randint(1, 60)), rng.randint(*tokens), f"s{index}")
    for index in range(_STREAMS)
  ]
  return [asyncio.create_task(_send_later(channel, ask, rng.random() * over_s)) for ask in asks]


# --- SIGTERM ----------------------------------------------------------------------------------------------------------


def drain_trials(folder: pathlib.Path, count: int, seed: int) -> Trials:
  """A job: sends SIGTERM to servers under load."""
  return on_loop(_drain_trials(folder, count, seed))


async def _drain_trials(folder: pathlib.Path, count: int, seed: int) -> Trials:
  rng = random.Random(seed)
  trials = Trials()
  for serial in range(count):
    server = Server(folder, (_STEP, f"--drain_timeout_s={_GRACE_S:g}"), name=f"drain-{seed}-{serial}").start()
    try:
      await _ready(server)
      async with grpc.aio.insecure_channel(server.target) as channel:
        await channel.channel_ready()
        streams = _streams(channel, rng, 0.2, (1, 80))
        await asyncio.sleep(rng.random() * 0.4)
        server.terminate()
        began = time.monotonic()
        for answer in await asyncio.gather(*streams):
          if answer.code != "OK" and answer.tokens:
            trials.faults.append(f"trial {serial}: {answer.fault()} after {len(answer.tokens)} tokens")
          else:
            trials.take(answer, ("UNAVAILABLE",))
      code = await _exit_code(server, _GRACE_S + 2)
      trials.slowest_s = max(trials.slowest_s, time.monotonic() - began)
      trials.end(server, code, code == 0)
    finally:
      server.kill()
  return trials


def drains(rig: Rig, count: int = 100, asked: int = 100) -> list[Row]:
  """Sends SIGTERM at random moments of a load."""
  trials = _run(rig, drain_trials, count)
  text = f"{trials.exact} streams exact, {trials.refused} never accepted, slowest exit {trials.slowest_s:.1f} s"
  target = f"every accepted stream token-exact, exit 0 within {_GRACE_S + 2:g} s"
  return [trials.row("SIGTERM drains at random moments", target, text, trials.exact > trials.count, asked)]


# --- SIGKILL ----------------------------------------------------------------------------------------------------------


def kill_trials(folder: pathlib.Path, count: int, seed: int) -> Trials:
  """A job: kills a server and restarts it on the same port, again and again."""
  return on_loop(_kill_trials(folder, count, seed))


async def _kill_trials(folder: pathlib.Path, count: int, seed: int) -> Trials:
  rng = random.Random(seed)
  trials = Trials()
  server = Server(folder, (_STEP,), name=f"kill-{seed}", port=find_free_port())
  try:
    for _ in range(count):
      began = time.monotonic()
      server.start()
      if rng.random() < 0.2:  # during its start; the next server finds the remains
        await asyncio.sleep(rng.random() * 0.6)
        server.kill()
        trials.count += 1
        continue
      await _ready(server)
      trials.slowest_s = max(trials.slowest_s, time.monotonic() - began)
      async with grpc.aio.insecure_channel(server.target) as channel:
        streams = _streams(channel, rng, 0.1, (1, 200))
        await asyncio.sleep(rng.random() * 0.4)
        server.kill()
        for answer in await asyncio.gather(*streams):
          trials.take(answer, ("UNAVAILABLE",))
      trials.count += 1
    server.start()
    await _ready(server)
    async with grpc.aio.insecure_channel(server.target) as channel:
      answer = await send(stub_of(channel), StreamRequest((1, 2, 3), 8), 30.0)
      if not answer.exact:
        trials.faults.append(f"after the last restart, {answer.fault()}")
  except ConfigError as error:
    trials.faults.append(str(error))
  finally:
    server.kill()
  return trials


def kills(rig: Rig, count: int = 100, asked: int = 100) -> list[Row]:
  """Sends SIGKILL at random moments, including the start, and restarts the server on the same port."""
  trials = _run(rig, kill_trials, count)
  text = (
    f"slowest ready again after {trials.slowest_s:.1f} s; {trials.cut + trials.refused} streams UNAVAILABLE, "
    f"{trials.exact} had ended"
  )
  return [
    trials.row(
      "SIGKILLs and restarts", "all ready again, clients UNAVAILABLE", text, trials.cut + trials.refused > 0, asked
    )
  ]


# --- The engine fails -------------------------------------------------------------------------------------------------


def failure_trials(folder: pathlib.Path, count: int, seed: int) -> Trials:
  """A job: raises an exception in a step, which fails the batch."""
  return on_loop(_failure_trials(folder, count, seed))


async def _failure_trials(folder: pathlib.Path, count: int, seed: int) -> Trials:
  rng = random.Random(seed)
  trials = Trials()
  for serial in range(count):
    plan = folder / f"failure-{seed}-{serial}.json"
    plan.write_text(json.dumps(plans.raise_after(rng.randint(1, 60))))
    flags = (_STEP, f"--fault_plan={plan}")
    server = Server(folder, flags, name=f"failure-{seed}-{serial}").start()
    try:
      await _ready(server)
      async with grpc.aio.insecure_channel(server.target) as channel:
        answers = await asyncio.gather(*_streams(channel, rng, 0.05, (100, 300)))
      # Every step brings tokens to all streams, so the last ones came just before the failure.
      failed_at = max([answer.times[-1] for answer in answers if answer.times], default=answers[0].sent)
      for answer in answers:
        trials.take(answer, ("INTERNAL", "UNAVAILABLE"))
        late = answer.ended - max(failed_at, answer.sent)
        trials.slowest_s = max(trials.slowest_s, late)
        if answer.exact or late > _TOLD_S:
          trials.faults.append(f"trial {serial}: a stream ended {answer.code}, {late:.2f} s after the failure")
      code = await _exit_code(server, _EXIT_S)
      trials.end(server, code, code not in (0, None))
    finally:
      server.kill()
  return trials


def failures(rig: Rig, count: int = 100, asked: int = 100) -> list[Row]:
  """Raises exceptions in the engine's step."""
  trials = _run(rig, failure_trials, count)
  text = f"{trials.cut + trials.refused} streams ended, the slowest after {trials.slowest_s:.2f} s"
  target = "every stream ended within 1 s, exit code not 0"
  return [trials.row("engine exceptions", target, text, trials.cut + trials.refused > 0, asked)]


def _run(rig: Rig, job, count: int) -> Trials:
  shares = [len(range(index, count, _PROCESSES)) for index in range(_PROCESSES)]
  jobs = [rig.submit(job, rig.folder, share, seed) for seed, share in enumerate(shares) if share]
  trials = Trials()
  for each in jobs:
    trials.add(each.result())
  return trials
