"""Scenario: cancelled calls in each state of a request; the server's records show the state.

The client cancels at random within a window. The server's record of the request gives its state at that moment:

  queued       The engine has never scheduled the request.
  admitted     Its one prompt step runs.
  mid_prefill  The engine has computed some chunks of its prompt.
  mid_decode   The step computes a token that the client will not receive.
  unsent       The server, which holds every step's tokens back, has sampled a token and not sent it.
  unsaid       The engine has finished the request, but the client does not know.
  finished     The status is out; an Abort finds no request.
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
  """How to catch one state with high probability.

  Attributes:
    state: the state.
    at_once: requests of a round, sent together.
    prompt, max_tokens: their sizes.
    messages: number to read before the wait; None: read to the status, then cancel and Abort.
    wait_s: shortest and longest wait before the cancel.
    waves: number of waves in a round, one after the other.
  """

  state: str
  at_once: int
  prompt: int
  max_tokens: int
  messages: int | None
  wait_s: tuple[float, float]
  waves: int = 1


# By server: with slow steps, with quick steps, and with tokens held back after each step.
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
_HOLD_BACK_S = 0.0005  # delay of each of about 30 requests in a step


@dataclasses.dataclass(frozen=True)
class SeenCancel:
  """A client's view of a call it cancelled: received tokens, the status, and Abort's result afterwards."""

  tokens: int
  code: str
  abort: int = pb.AbortResponse.OUTCOME_UNSPECIFIED


def cancel_round(target: str, tactic: Tactic, names: Sequence[str], seed: int) -> dict[str, SeenCancel]:
  """A job: runs one round; returns the results by request id."""
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
  """Returns a request's state at its cancel, from the server's record of it.

  Args: held_back: whether the server spends nearly all of its time between sampling tokens and sending them.
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
  """Runs rounds of a tactic until its state was caught `count` times."""
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
  """Cancels at least `count` requests in each state; afterwards releases must equal starts."""
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
  text = ", ".join(f"{state} {number:,}" for state, number in caught.items())
  fewest = min(caught[tactic.state] for tactics, _ in servers for tactic in tactics)
  return [
    Row("cancels in each of 7 states", f"{count:,} in each", text, fewest >= count, asked, min(fewest, asked)),
    none_of("releases over starts, pages, generations after them", "equal, 0 held", faults, started, 0),
  ]
