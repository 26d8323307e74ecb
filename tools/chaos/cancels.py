"""Scenario: cancelled calls in each state that a request can be in; what state it was is read from the server.

The client acts at random within a window; the server's own record of the request says where that caught it:
queued (never scheduled), admitted (its one prompt step runs), mid_prefill (some chunks of its prompt are computed),
mid_decode (a token is being computed that it will not get), unsent (on a server that holds every step's tokens back:
one was sampled and not sent), unsaid (the engine has finished it and the client was not told), finished (the status is
out; an Abort finds nobody).
"""

import asyncio
from collections.abc import Sequence
import contextlib
import dataclasses
import hashlib
import json
import random

import grpc

from server.proto import sluice_pb2 as pb
from tools.chaos import plans
from tools.chaos.process import Server
from tools.chaos.report import Row, none_of
from tools.chaos.rig import Rig
from tools.chaos.streams import StreamRequest, on_loop, random_prompt, stub_of

_CHUNK = 64
_MOST_ROUNDS = 400


@dataclasses.dataclass(frozen=True)
class Tactic:
  """How to be likely to catch one state.

  Attributes:
    state: which.
    at_once: requests of a round, sent together.
    prompt, max_tokens: their sizes.
    messages: to read before the wait; None: read to the status, then cancel and Abort.
    wait_s: shortest and longest wait before the cancel.
    waves: how often in a round, one after the other.
  """

  state: str
  at_once: int
  prompt: int
  max_tokens: int
  messages: int | None
  wait_s: tuple[float, float]
  waves: int = 1


# By the server they need: of slow steps, of quick steps, and of steps whose tokens are held back.
_SLOW = (
  Tactic("queued", 170, 8, 40, 0, (0.005, 0.03)),
  Tactic("admitted", 50, 8, 40, 0, (0.002, 0.025)),
  Tactic("mid_decode", 60, 8, 100, 1, (0.0, 0.06)),
  Tactic("finished", 60, 8, 2, None, (0.0, 0.0)),
)
_QUICK = (Tactic("mid_prefill", 3, 500, 4, 0, (0.002, 0.025), 12),)
_HELD = (
  Tactic("unsent", 30, 8, 100, 1, (0.002, 0.015)),
  Tactic("unsaid", 30, 8, 2, 1, (0.0, 0.012)),
)
_HOLD_BACK_S = 0.0005  # of each of about 30 requests in a step


@dataclasses.dataclass(frozen=True)
class SeenCancel:
  """What a client saw of a call it cancelled: tokens that came, the status, and what Abort said afterwards."""

  tokens: int
  code: str
  abort: int = pb.AbortResponse.OUTCOME_UNSPECIFIED


def cancel_round(target: str, tactic: Tactic, names: Sequence[str], seed: int) -> dict[str, SeenCancel]:
  """A job: one round; by request id."""
  return on_loop(_cancel_round(target, tactic, names, seed))


async def _cancel_round(target: str, tactic: Tactic, names: Sequence[str], seed: int) -> dict[str, SeenCancel]:
  rng = random.Random(seed)
  async with grpc.aio.insecure_channel(target) as channel:
    stub = stub_of(channel)
    await channel.channel_ready()

    async def one(name: str) -> SeenCancel:
      call = stub.Generate(
        StreamRequest(random_prompt(rng, tactic.prompt), tactic.max_tokens, name).message(), timeout=60
      )
      tokens = 0
      enough, over = asyncio.Event(), asyncio.Event()
      if tactic.messages == 0:
        enough.set()

      async def read() -> None:
        nonlocal tokens
        messages = 0
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
          async for message in call:
            tokens += sum(len(delta.token_ids) for delta in message.deltas)
            messages += 1
            if messages == tactic.messages:
              enough.set()
        over.set()
        enough.set()

      reader = asyncio.create_task(read())
      await (over if tactic.messages is None else enough).wait()
      await asyncio.sleep(rng.uniform(*tactic.wait_s))
      call.cancel()
      await reader
      code = await call.code()
      if tactic.messages is not None:
        return SeenCancel(tokens, code.name)
      answer = await stub.Abort(pb.AbortRequest(request_ids=[name]), timeout=30)
      return SeenCancel(tokens, code.name, answer.outcomes[0])

    size = -(-len(names) // tactic.waves)
    waves = [names[first : first + size] for first in range(0, len(names), size)]
    return {
      name: seen for wave in waves for name, seen in zip(wave, await asyncio.gather(*map(one, wave)), strict=True)
    }


def state_of(record: pb.RequestLoad, seen: SeenCancel, *, held_back: bool) -> str:
  """The state in which a cancel caught a request, by the server's record of it.

  Args: held_back: nearly all of the server's time is spent between sampling tokens and sending them.
  """
  if seen.code == "OK":
    gone = record.reason == "length" and seen.abort == pb.AbortResponse.OUTCOME_NOT_FOUND
    return "finished" if gone else "late"
  if record.reason != "abort":
    return "unsaid"
  if not record.HasField("first_scheduled"):
    return "queued"
  if not record.HasField("first_token"):
    return "admitted" if record.prompt_tokens <= _CHUNK else "mid_prefill"
  if record.output_tokens <= seen.tokens:
    return "late"
  return "unsent" if held_back else "mid_decode"


def _catch(rig: Rig, server: Server, tactic: Tactic, count: int, caught: dict[str, int]) -> None:
  """Rounds of a tactic until its state was caught `count` times."""
  for serial in range(_MOST_ROUNDS):
    if caught[tactic.state] >= count:
      return
    since = server.load().now_s
    size = tactic.waves * (tactic.at_once // 2 + 1)
    shares = [[f"{tactic.state}-{serial}-{half}-{i}" for i in range(size)] for half in range(2)]
    jobs = [
      rig.submit(cancel_round, server.target, tactic, names, 1000 * serial + half) for half, names in enumerate(shares)
    ]
    seen = {name: each for job in jobs for name, each in job.result().items()}
    server.settle()
    records = {record.id: record for record in server.load(since).requests}
    for name, each in seen.items():
      record = records.get(hashlib.sha256(name.encode()).hexdigest()[:16])
      if record is not None:
        state = state_of(record, each, held_back=tactic in _HELD)
        caught[state] = caught.get(state, 0) + 1


def cancels(rig: Rig, count: int = 1000, asked: int = 1000) -> list[Row]:
  """At least `count` cancels in each state; afterwards as much was released as was started."""
  caught = {tactic.state: 0 for tactics in (_SLOW, _QUICK, _HELD) for tactic in tactics}
  plan = rig.folder / "hold_back.json"
  plan.write_text(json.dumps(plans.hold_back(_HOLD_BACK_S)))
  common = ("--max_queued_requests=1024", f"--prefill_chunk={_CHUNK}")
  faults: list[str] = []
  servers: tuple[tuple[tuple[Tactic, ...], tuple[str, ...]], ...] = (
    (_SLOW, ("--fake_step_ms=20",)),
    (_QUICK, ("--fake_step_ms=1",)),
    (_HELD, ("--fake_step_ms=1", f"--fault_plan={plan}")),
  )
  started = 0
  for tactics, flags in servers:
    with rig.server(*common, *flags) as server:
      for tactic in tactics:
        _catch(rig, server, tactic, count, caught)
      faults += server.settle() + server.imbalance()
      started += server.books().requests_accepted_total
  told = ", ".join(f"{state} {number:,}" for state, number in caught.items())
  fewest = min(caught[tactic.state] for tactics, _ in servers for tactic in tactics)
  return [
    Row("cancels in each of 7 states", f"{count:,} in each", told, fewest >= count, asked, min(fewest, asked)),
    none_of("releases over starts, pages, generations after them", "equal, 0 held", faults, started, 0),
  ]
