"""The demo's traffic: who asks what and when, over gRPC, and whether the answers were right. Draws nothing."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
import dataclasses
import itertools
import random
import time

import grpc

from server.proto import sluice_pb2 as pb
from server.proto import sluice_pb2_grpc as pb_grpc
from tools.demo_model import corpus, skills
from tools.report.latency import Outcome

CHECKED = ("copy", "reverse", "arithmetic", "json", "recall")
# Kind of request -> its share of the traffic.
MIXTURE = {"story": 0.34, "recall": 0.14, "talk": 0.1, "copy": 0.1, "reverse": 0.1, "arithmetic": 0.12, "json": 0.1}
# How stories are drawn: every sampling parameter at work in one batch.
STORY_SAMPLING = (
  pb.SamplingParams(temperature=0.7),
  pb.SamplingParams(temperature=1.0, top_p=0.9),
  pb.SamplingParams(temperature=0.9, top_k=20),
  pb.SamplingParams(temperature=1.0, min_p=0.1),
  pb.SamplingParams(temperature=0.7, repetition_penalty=1.1, presence_penalty=0.2),
  pb.SamplingParams(temperature=0.0),
)
GREEDY = pb.SamplingParams(temperature=0.0)
# (share of the time gone, requests alive at once): calm, busy, more than there are slots, calm again.
PHASES = ((0.0, 4), (0.12, 12), (0.3, 24), (0.5, 48), (0.75, 16), (0.92, 6))
POLL_S = 0.25
WINDOW_S = 2.0


@dataclasses.dataclass(frozen=True)
class DemoRequest:
  """A request before it is sent; `answer` is None where there is nothing to check."""

  kind: str
  messages: tuple[tuple[str, str], ...]
  sampling: pb.SamplingParams
  max_tokens: int
  answer: str | None = None


@dataclasses.dataclass(eq=False)
class DemoStream:
  """A request on its way, as the view shows it. Times on time.monotonic."""

  id: int
  ask: DemoRequest
  sent_s: float
  text: str = ""
  chunks: list[tuple[float, int]] = dataclasses.field(default_factory=list)
  ended_s: float | None = None
  error: str | None = None

  @property
  def right(self) -> bool | None:
    """Whether the answer is the expected one; None while it is open or where nothing is expected."""
    if self.ask.answer is None or self.ended_s is None:
      return None
    return self.error is None and self.text.strip() == self.ask.answer


def traffic(seed: int) -> Iterator[DemoRequest]:
  """An endless, repeatable mixture. A recall comes again a little later, as when two users share a long prompt."""
  rng = random.Random(seed)
  again: deque[DemoRequest] = deque()
  stories = itertools.cycle(STORY_SAMPLING)
  while True:
    kind = rng.choices(list(MIXTURE), list(MIXTURE.values()))[0]
    if kind == "story":
      turn = corpus.story_turns(rng)[0]
      yield DemoRequest(kind, (("user", turn.user),), next(stories), 220)
    elif kind == "talk":
      turn = corpus.talk_turn(rng)
      yield DemoRequest(kind, (("user", turn.user),), GREEDY, 40)
    elif kind == "recall" and len(again) > 2:
      yield again.popleft()
    else:
      distance = rng.randint(150, 1200) if kind == "recall" else None
      instance = skills.make_instances(kind, 1, rng.getrandbits(32), distance)[0]
      messages = tuple((message["role"], message["content"]) for message in instance.messages)
      ask = DemoRequest(kind, messages, GREEDY, 80, instance.answer)
      if kind == "recall":
        again.append(ask)
      yield ask


def wanted_live(share: float) -> int:
  """How many requests are to be alive when this share of the time has gone."""
  return next(count for start, count in reversed(PHASES) if share >= start)


class DemoLoad:
  """Sends the traffic and remembers what came of it; the view reads it from another thread."""

  def __init__(self, target: str, seconds: float, seed: int = 0):
    self.seconds = seconds
    self.started_s: float | None = None
    self.first_token_s: float | None = None
    self.live: list[DemoStream] = []
    self.ended: list[DemoStream] = []
    self.samples: deque[tuple[float, pb.GetLoadResponse]] = deque(maxlen=4096)
    self.recent_ttft_s: deque[float] = deque(maxlen=200)
    self.recent_gap_s: deque[float] = deque(maxlen=4000)
    self._target = target
    self._asks = traffic(seed)
    self._ids = itertools.count()

  async def run(self, on_first_token: Callable[[], None]) -> None:
    """Keeps as many requests alive as the phase wants; returns when the time is over and the last has ended.

    Raises:
      grpc.aio.AioRpcError: the server no longer answers.
    """
    async with grpc.aio.insecure_channel(self._target) as channel:
      generation, model = pb_grpc.GenerationServiceStub(channel), pb_grpc.ModelServiceStub(channel)
      poll = asyncio.create_task(self._poll(model))
      self.started_s = time.monotonic()
      tasks: set[asyncio.Task[None]] = set()
      try:
        while (share := (time.monotonic() - self.started_s) / self.seconds) < 1:
          if poll.done():
            await poll  # it only ends by failing: the server is gone
          if len(tasks) < wanted_live(share):
            task = asyncio.create_task(self._send(generation, next(self._asks), on_first_token))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
          await asyncio.sleep(0.02)  # users do not come in one instant
        await asyncio.gather(*tasks)
        await asyncio.sleep(2 * POLL_S)
        self.samples.append((time.monotonic(), await model.GetLoad(pb.GetLoadRequest())))
      finally:
        poll.cancel()
        for task in tuple(tasks):
          task.cancel()

  async def _poll(self, model) -> None:
    while True:
      self.samples.append((time.monotonic(), await model.GetLoad(pb.GetLoadRequest())))
      await asyncio.sleep(POLL_S)

  async def _send(self, generation, ask: DemoRequest, on_first_token: Callable[[], None]) -> None:
    request = pb.GenerateRequest(
      chat=pb.ChatPrompt(messages=[pb.ChatMessage(role=role, content=content) for role, content in ask.messages]),
      sampling=ask.sampling,
      stopping=pb.StopParams(max_tokens=ask.max_tokens),
    )
    stream = DemoStream(next(self._ids), ask, time.monotonic())
    self.live.append(stream)
    try:
      async for response in generation.Generate(request, timeout=120):
        now = time.monotonic()
        for delta in response.deltas:
          stream.text += delta.text
          if delta.token_ids:
            self._note_tokens(stream, now, len(delta.token_ids), on_first_token)
    except grpc.aio.AioRpcError as failure:
      stream.error = f"{failure.code().name}: {failure.details()}"
    except asyncio.CancelledError:  # the demo was ended: neither an answer nor a failure
      self.live.remove(stream)
      raise
    stream.ended_s = time.monotonic()
    self.live.remove(stream)
    self.ended.append(stream)

  def _note_tokens(self, stream: DemoStream, now: float, count: int, on_first_token: Callable[[], None]) -> None:
    if stream.chunks:
      self.recent_gap_s.append(now - stream.chunks[-1][0])
    else:
      self.recent_ttft_s.append(now - stream.sent_s)
      if self.first_token_s is None:
        self.first_token_s = now
        on_first_token()
    stream.chunks.append((now, count))

  def rates(self) -> dict[str, float]:
    """What the server did in the last seconds: differences of GetLoad, `..._s` a second; empty before two answers."""
    samples = list(self.samples)
    if len(samples) < 2:
      return {}
    end_s, end = samples[-1]
    begin_s, begin = next(((at, load) for at, load in samples if at >= end_s - WINDOW_S), samples[0])
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
    """(tokens of the rung, its share of the last seconds' steps), smallest first."""
    samples = list(self.samples)
    if not samples:
      return []
    end_s, end = samples[-1]
    begin = next((load for at, load in samples if at >= end_s - WINDOW_S), end)
    before = {rung.tokens: rung.steps_total for rung in begin.rungs}
    steps = [(rung.tokens, rung.steps_total - before.get(rung.tokens, 0)) for rung in end.rungs]
    total = max(1, sum(count for _, count in steps))
    return [(tokens, count / total) for tokens, count in steps]

  def score(self) -> dict[str, tuple[int, int]]:
    """Checked kind -> (right, of how many)."""
    score = {}
    for kind in CHECKED:
      rights = [stream.right for stream in tuple(self.ended) if stream.ask.kind == kind]
      score[kind] = (sum(right is True for right in rights), len(rights))
    return score

  def outcomes(self) -> list[Outcome]:
    """For tools.report.latency: what ended, with made-up token ids (only their number matters there)."""
    return [
      Outcome(
        stream.id,
        sum(count for _, count in stream.chunks),
        stream.sent_s,
        stream.sent_s,
        tuple(stream.chunks),
        (0,) * sum(count for _, count in stream.chunks),
        stream.error or (None if stream.chunks else "EMPTY"),
      )
      for stream in self.ended
    ]
