"""Sends the demo's load over gRPC, from more clients than the server has slots, and keeps the results.

Displays nothing. The load is closed: each client sends its next turn once it has the answer to the previous one. Slots,
queue and preemptions therefore depend on the population and the KV pool, not on the machine's speed.
"""

import asyncio
from collections import deque
from collections.abc import Callable
import dataclasses
import itertools
import time

import grpc

from server.proto import sluice_pb2 as pb
from server.proto import sluice_pb2_grpc as pb_grpc
from tools.demo.chats import CHECKED, DemoChat, DemoTurn, make_chats
from tools.report.latency import Outcome

# (share of the load sent, clients for each slot): a few more than slots, then a long queue, then few again.
PHASES = ((0.0, 1.25), (0.45, 1.8), (0.75, 1.25))
POLL_S = 0.25
RATE_WINDOW_S, LATENCY_WINDOW_S = 2.0, 10.0
_MAX_RECENT = 20_000  # values for the view's percentiles


@dataclasses.dataclass(eq=False)
class DemoStream:
  """A live request, as the view shows it. Times on time.monotonic."""

  id: int
  turn: DemoTurn
  sent_s: float
  text: str = ""
  chunks: list[tuple[float, int]] = dataclasses.field(default_factory=list)
  ended_s: float | None = None
  error: str | None = None
  num_prompt_tokens: int = 0
  num_cached_tokens: int = 0

  @property
  def right(self) -> bool | None:
    """Whether the answer is the expected one; None while it is open or if nothing is expected."""
    if self.turn.answer is None or self.ended_s is None:
      return None
    return self.error is None and self.text.strip() == self.turn.answer


@dataclasses.dataclass(frozen=True)
class Occupancy:
  """The server's occupancy over time.

  Attributes:
    slots: slots in use, on average.
    full_share: share of the time with every slot in use.
    queue, longest_queue: waiting requests, on average and at most.
    queue_share: share of the time with a queue.
  """

  slots: float
  full_share: float
  queue: float
  longest_queue: int
  queue_share: float


def measure_occupancy(steps: list[pb.StepLoad], max_num_seqs: int) -> Occupancy:
  """Measures the occupancy from steps in order of time. A step counts until the next was planned."""
  weights = [after.time - before.time for before, after in itertools.pairwise(steps)]
  total = sum(weights)
  if total <= 0:
    return Occupancy(0.0, 0.0, 0.0, 0, 0.0)

  def mean(values: list[float]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=False)) / total

  return Occupancy(
    mean([step.num_running for step in steps]),
    mean([float(step.num_running >= max_num_seqs) for step in steps]),
    mean([step.num_waiting for step in steps]),
    max(step.num_waiting for step in steps),
    mean([float(step.num_waiting > 0) for step in steps]),
  )


def wanted_clients(share: float, max_num_seqs: int) -> int:
  """Returns the population at this share of the load."""
  return round(max_num_seqs * next(clients for start, clients in reversed(PHASES) if share >= start))


class DemoLoad:
  """Sends the load and keeps the results; the view reads them from another thread.

  Attributes:
    seconds, requests: the limit on new turns: a time, or a number of requests if that is not 0.
    samples: (time, the server's answer to GetLoad), without its steps.
    steps: the server's step records, from the first request on until the load was over.
  """

  def __init__(self, target: str, seconds: float, seed: int = 0, requests: int = 0):
    self.seconds = seconds
    self.requests = requests
    self.started_s: float | None = None
    self.first_token_s: float | None = None
    self.live: list[DemoStream] = []
    self.ended: list[DemoStream] = []
    self.samples: deque[tuple[float, pb.GetLoadResponse]] = deque(maxlen=4096)
    self.steps: list[pb.StepLoad] = []
    self._recent_ttft_s: deque[tuple[float, float]] = deque(maxlen=_MAX_RECENT)
    self._recent_gap_s: deque[tuple[float, float]] = deque(maxlen=_MAX_RECENT)
    self._target = target
    self._chats = make_chats(seed)
    self._num_sent = 0

  @property
  def share(self) -> float:
    """The share of the load that was sent; at least 1 at its end."""
    if self.started_s is None:
      return 0.0
    return self._num_sent / self.requests if self.requests else (time.monotonic() - self.started_s) / self.seconds

  @property
  def max_num_seqs(self) -> int:
    """The server's slots; 0 before its first answer."""
    return self.samples[-1][1].max_num_seqs if self.samples else 0

  async def run(self, on_first_token: Callable[[], None]) -> None:
    """Keeps the phase's number of clients; returns when the load is over and the last request has ended.

    Raises:
      grpc.aio.AioRpcError: the server no longer answers.
    """
    async with grpc.aio.insecure_channel(self._target) as channel:
      generation, model = pb_grpc.GenerationServiceStub(channel), pb_grpc.ModelServiceStub(channel)
      await self._sample(model)
      poll = asyncio.create_task(self._poll(model))
      self.started_s = time.monotonic()
      clients: set[asyncio.Task[None]] = set()
      try:
        while self.share < 1:
          if poll.done():
            await poll  # it ends only on failure: the server is gone
          while len(clients) < wanted_clients(self.share, self.max_num_seqs):
            client = asyncio.create_task(self._run_client(generation, clients, on_first_token))
            clients.add(client)
            client.add_done_callback(clients.discard)
          await asyncio.sleep(0.02)
        poll.cancel()
        await self._sample(model)  # only steps under the full load; the rest belong to its tail
        await asyncio.gather(*clients)
        await asyncio.sleep(2 * POLL_S)
        await self._sample(model, with_steps=False)
      finally:
        poll.cancel()
        for client in tuple(clients):
          client.cancel()

  async def _poll(self, model) -> None:
    while True:
      await asyncio.sleep(POLL_S)
      await self._sample(model)

  async def _sample(self, model, *, with_steps: bool = True) -> None:
    # Steps before the first request belong to no request.
    after = self.steps[-1].time if self.steps else self.samples[-1][1].now_s if self.samples else float("inf")
    load = await model.GetLoad(pb.GetLoadRequest(steps_after_s=after if with_steps else None))
    self.steps += load.steps
    del load.steps[:], load.requests[:]
    self.samples.append((time.monotonic(), load))

  async def _run_client(self, generation, clients: set, on_first_token: Callable[[], None]) -> None:
    """Runs one chat after the other, until the load is over or has too many clients."""
    while self.share < 1 and len(clients) <= wanted_clients(self.share, self.max_num_seqs):
      await self._run_chat(generation, next(self._chats), on_first_token)

  async def _run_chat(self, generation, chat: DemoChat, on_first_token: Callable[[], None]) -> None:
    messages = list(chat.before)
    for turn in chat.turns:
      messages.append(("user", turn.text))
      stream = await self._send(generation, messages, turn, on_first_token)
      if stream.error or self.share >= 1:
        return
      messages.append(("assistant", stream.text))

  async def _send(
    self, generation, messages: list[tuple[str, str]], turn: DemoTurn, on_first_token: Callable[[], None]
  ) -> DemoStream:
    request = pb.GenerateRequest(
      chat=pb.ChatPrompt(messages=[pb.ChatMessage(role=role, content=content) for role, content in messages]),
      sampling=turn.sampling,
      stopping=pb.StopParams(max_tokens=turn.max_tokens, min_tokens=turn.min_tokens),
    )
    stream = DemoStream(self._num_sent, turn, time.monotonic())
    self._num_sent += 1
    self.live.append(stream)
    try:
      async for response in generation.Generate(request, timeout=120):
        now = time.monotonic()
        for delta in response.deltas:
          stream.text += delta.text
          if delta.token_ids:
            self._note_tokens(stream, now, len(delta.token_ids), on_first_token)
        for finished in response.finished:
          stream.num_prompt_tokens = finished.usage.prompt_tokens
          stream.num_cached_tokens = finished.usage.cached_tokens
    except grpc.aio.AioRpcError as failure:
      stream.error = f"{failure.code().name}: {failure.details()}"
    except asyncio.CancelledError:  # the demo ended early: neither an answer nor a failure
      self.live.remove(stream)
      raise
    stream.ended_s = time.monotonic()
    self.live.remove(stream)
    self.ended.append(stream)
    return stream

  def _note_tokens(self, stream: DemoStream, now: float, count: int, on_first_token: Callable[[], None]) -> None:
    if stream.chunks:
      self._recent_gap_s.append((now, now - stream.chunks[-1][0]))
    else:
      self._recent_ttft_s.append((now, now - stream.sent_s))
      if self.first_token_s is None:
        self.first_token_s = now
        on_first_token()
    stream.chunks.append((now, count))

  # For the view and the summary.

  def recent_latencies(self) -> tuple[list[float], list[float]]:
    """Returns (times to the first token, gaps between tokens) of the last LATENCY_WINDOW_S, seconds."""
    since = time.monotonic() - LATENCY_WINDOW_S
    first, gaps = tuple(self._recent_ttft_s), tuple(self._recent_gap_s)
    return [value for at, value in first if at >= since], [value for at, value in gaps if at >= since]

  def rates(self) -> dict[str, float]:
    """Returns rates over the last RATE_WINDOW_S, from differences of GetLoad: `..._s` a second; or nothing."""
    samples = list(self.samples)
    if len(samples) < 2:
      return {}
    end_s, end = samples[-1]
    begin_s, begin = next(((at, load) for at, load in samples if at >= end_s - RATE_WINDOW_S), samples[0])
    if end_s <= begin_s:
      begin_s, begin = samples[-2]
    passed = end_s - begin_s
    decode, prefill, padding, output = (
      getattr(end, name) - getattr(begin, name)
      for name in ("decode_tokens_total", "prefill_tokens_total", "padding_tokens_total", "output_tokens_total")
    )
    return {
      "decode_s": decode / passed,
      "prefill_s": prefill / passed,
      "output_s": output / passed,
      "padding_share": padding / max(1, decode + prefill + padding),
    }

  def recent_rungs(self) -> list[tuple[int, float]]:
    """Returns (tokens of the rung, its share of the steps in the last RATE_WINDOW_S), smallest first."""
    samples = list(self.samples)
    if not samples:
      return []
    end_s, end = samples[-1]
    begin = next((load for at, load in samples if at >= end_s - RATE_WINDOW_S), end)
    before = {rung.tokens: rung.steps_total for rung in begin.rungs}
    steps = [(rung.tokens, rung.steps_total - before.get(rung.tokens, 0)) for rung in end.rungs]
    total = max(1, sum(count for _, count in steps))
    return [(tokens, count / total) for tokens, count in steps]

  def cached_tokens(self) -> tuple[int, int]:
    """Returns (prompt tokens from the prefix cache, all prompt tokens) of finished requests."""
    ended = tuple(self.ended)
    return sum(stream.num_cached_tokens for stream in ended), sum(stream.num_prompt_tokens for stream in ended)

  def score(self) -> dict[str, tuple[int, int]]:
    """Returns the score: checked kind -> (right, of how many)."""
    score = {}
    for kind in CHECKED:
      rights = [stream.right for stream in tuple(self.ended) if stream.turn.kind == kind]
      score[kind] = (sum(right is True for right in rights), len(rights))
    return score

  def outcomes(self) -> list[Outcome]:
    """Returns the outcomes of finished requests, for tools.report.latency."""
    return [
      Outcome(
        stream.id,
        sum(count for _, count in stream.chunks),
        stream.sent_s,
        stream.sent_s,
        tuple(stream.chunks),
        error=stream.error or (None if stream.chunks else "EMPTY"),
      )
      for stream in self.ended
    ]
