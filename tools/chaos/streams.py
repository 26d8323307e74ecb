"""Well-behaved clients: they send, read, and know every expected token. Jobs for client processes.

extensions/fake_device computes the expected tokens from the request alone. Comparison finds every token that is lost,
doubled, changed or another request's.
"""

import asyncio
from collections.abc import Coroutine, Sequence
import dataclasses
import functools
import gc
import pathlib
import random
import time
from typing import Any

from google.rpc import error_details_pb2, status_pb2
import grpc

from engine.sampling_params import SamplingParams
from extensions.fake_device.device import expected_tokens
from server.proto import sluice_pb2 as pb
from server.proto import sluice_pb2_grpc as pb_grpc

TIMEOUT_S = 120.0  # only a request that hangs reaches it


@dataclasses.dataclass(frozen=True, slots=True)
class StreamRequest:
  """A greedy request of exactly max_tokens. Output under a `regex` is not predicted."""

  prompt: tuple[int, ...]
  max_tokens: int
  request_id: str = ""
  priority: int = 0
  cache_salt: str = ""
  tenant: str = ""
  unary: bool = False
  text: bool = False
  regex: str = ""

  def message(self) -> pb.GenerateRequest:
    """Returns the protobuf."""
    constraint = pb.OutputConstraint(regex=self.regex) if self.regex else None
    return pb.GenerateRequest(
      request_id=self.request_id,
      token_ids=pb.TokenIds(ids=self.prompt),
      sampling=pb.SamplingParams(temperature=0.0),
      stopping=pb.StopParams(max_tokens=self.max_tokens, ignore_eos=True),
      output=pb.OutputParams(return_text=self.text),
      constraint=constraint,
      priority=self.priority,
      cache_salt=self.cache_salt,
      tenant=self.tenant,
    )


@dataclasses.dataclass(slots=True)
class Answer:
  """The response to a request. Times are on the machine's monotonic clock.

  Attributes:
    `ask`: the request.
    tokens: all received tokens.
    code, reason: its end: a status code's name, and the ErrorInfo's reason.
    sent: time of sending.
    times: times of messages with tokens.
    ended: time of the status.
    cached_tokens: cached tokens of the prompt.
    exact: whether it ended well with exactly the expected tokens.
    sound: whether the tokens are a prefix of the expected ones.
  """

  ask: StreamRequest
  tokens: list[int] = dataclasses.field(default_factory=list)
  code: str = ""
  reason: str = ""
  sent: float = 0.0
  times: list[float] = dataclasses.field(default_factory=list)
  ended: float = 0.0
  cached_tokens: int = 0
  exact: bool = False
  sound: bool = False

  def judge(self) -> None:
    """Compares with the expected tokens; call it when the response is complete."""
    if self.ask.regex or (self.code != "OK" and not self.tokens):
      self.sound, self.exact = True, self.code == "OK"
      return
    expected = demo_model().expected(self.ask)
    self.sound = tuple(self.tokens) == expected[: len(self.tokens)]
    self.exact = self.code == "OK" and self.sound and len(self.tokens) == len(expected)

  def fault(self) -> str:
    """Returns a description of the fault; empty if the response is exact."""
    if self.exact:
      return ""
    if self.code != "OK":
      return f"{self.ask.request_id or 'a stream'} ended {self.code} {self.reason}".rstrip()
    return f"{self.ask.request_id or 'a stream'} has other tokens than expected"


@dataclasses.dataclass(frozen=True)
class Model:
  """The model's properties that determine expected tokens."""

  vocab_size: int
  eos_token_ids: tuple[int, ...]

  def expected(self, ask: StreamRequest) -> tuple[int, ...]:
    """Returns the expected tokens of an answer."""
    params = SamplingParams(max_tokens=ask.max_tokens, temperature=0.0, ignore_eos=True)
    return expected_tokens(ask.prompt, params, vocab_size=self.vocab_size, eos_token_ids=self.eos_token_ids)[0]


@functools.cache
def demo_model() -> Model:
  """Returns the properties of the chaos servers' model folder, which has no weights."""
  import json

  from tools.measure import ROOT

  config = json.loads((ROOT / "models" / "demo" / "config.json").read_text("utf-8"))
  eos = config["eos_token_id"]
  return Model(config["vocab_size"], tuple(eos) if isinstance(eos, list) else (eos,))


def random_prompt(rng: random.Random, length: int) -> tuple[int, ...]:
  """Returns random token ids of the demo model."""
  size = demo_model().vocab_size
  return tuple([rng.randrange(size) for _ in range(length)])


def random_asks(
  rng: random.Random, count: int, prompts: tuple[int, int], outputs: tuple[int, int], name: str
) -> list[StreamRequest]:
  """Returns requests with lengths from these ranges."""
  return [
    StreamRequest(random_prompt(rng, rng.randint(*prompts)), rng.randint(*outputs), f"{name}-{index}")
    for index in range(count)
  ]


async def send(stub: Any, ask: StreamRequest, timeout_s: float = TIMEOUT_S) -> Answer:
  """Sends a request and reads to the end."""
  answer = Answer(ask, sent=time.monotonic())
  try:
    if ask.unary:
      await _read_unary(stub, answer, timeout_s)
    else:
      await _read_stream(stub, answer, timeout_s)
    answer.code = "OK"
  except grpc.aio.AioRpcError as error:
    answer.code, answer.reason = error.code().name, reason_of(error)
  answer.ended = time.monotonic()
  answer.judge()
  return answer


async def _read_stream(stub: Any, answer: Answer, timeout_s: float) -> None:
  async for message in stub.Generate(answer.ask.message(), timeout=timeout_s):
    for delta in message.deltas:
      answer.tokens.extend(delta.token_ids)
      answer.times.append(time.monotonic())
    for finished in message.finished:
      answer.cached_tokens = finished.usage.cached_tokens


async def _read_unary(stub: Any, answer: Answer, timeout_s: float) -> None:
  message = await stub.GenerateUnary(answer.ask.message(), timeout=timeout_s)
  (completion,) = message.completions
  answer.tokens.extend(completion.token_ids)
  answer.cached_tokens = completion.finished.usage.cached_tokens


def reason_of(error: grpc.aio.AioRpcError) -> str:
  """Returns the reason among the details of a status; empty if there are none.

  Does not use grpc_status, which refuses the mixture of a client's own deadline and a status under way.
  """
  info = error_details_pb2.ErrorInfo()
  for key, value in error.trailing_metadata() or ():
    if key == "grpc-status-details-bin" and isinstance(value, bytes):
      for detail in status_pb2.Status.FromString(value).details:
        if detail.Unpack(info):
          return info.reason
  return ""


def stub_of(channel: grpc.aio.Channel) -> Any:
  """Returns the stub for generations."""
  return pb_grpc.GenerationServiceStub(channel)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
  return asyncio.new_event_loop()


def on_loop[T](work: Coroutine[Any, Any, T]) -> T:
  """As asyncio.run, but with one loop for a client process: grpc.aio may still call a closed one."""
  try:
    return _loop().run_until_complete(work)
  finally:
    gc.collect()  # a closed channel in a reference cycle keeps its connection, which would look like the server's


# --- Jobs: each runs in a client process ------------------------------------------------------------------------------


def run_all(target: str, asks: Sequence[StreamRequest], at_once: int) -> list[Answer]:
  """Runs a closed loop: sends all requests, `at_once` at a time; returns answers in the order of `asks`."""
  return on_loop(_run_all(target, asks, at_once))


async def _run_all(target: str, asks: Sequence[StreamRequest], at_once: int) -> list[Answer]:
  answers: list[Answer | None] = [None] * len(asks)
  todo = iter(enumerate(asks))

  async def client(stub: Any) -> None:
    for index, ask in todo:
      answers[index] = await send(stub, ask)

  async with grpc.aio.insecure_channel(target) as channel:
    stub = stub_of(channel)
    await asyncio.gather(*(client(stub) for _ in range(min(at_once, len(asks)))))
  return [answer for answer in answers if answer is not None]


def run_out_of_time(target: str, asks: Sequence[StreamRequest], at_once: int) -> list[str]:
  """Runs a closed loop of clients with deadlines of 1 to 50 ms; returns the faults in what they received."""
  return on_loop(_run_out_of_time(target, asks, at_once))


async def _run_out_of_time(target: str, asks: Sequence[StreamRequest], at_once: int) -> list[str]:
  faults: list[str] = []
  todo = iter(asks)
  rng = random.Random(len(asks))

  async def client(stub: Any) -> None:
    for ask in todo:
      answer = await send(stub, ask, rng.uniform(0.001, 0.05))
      if not answer.sound or answer.code not in ("OK", "DEADLINE_EXCEEDED"):
        faults.append(f"with a deadline, {answer.fault()}")

  async with grpc.aio.insecure_channel(target) as channel:
    await channel.channel_ready()
    stub = stub_of(channel)
    await asyncio.gather(*(client(stub) for _ in range(at_once)))
  return faults


@dataclasses.dataclass
class Control:
  """The results of control streams, which only read.

  Attributes:
    streams, tokens: finished streams, and their tokens.
    faults: faults of streams that were not exact.
    gaps: seconds between messages of one stream, each with the time of the later one.
    firsts: seconds to the first token.
    ends: time of each end, with its number of tokens.
  """

  streams: int = 0
  tokens: int = 0
  faults: list[str] = dataclasses.field(default_factory=list)
  gaps: list[tuple[float, float]] = dataclasses.field(default_factory=list)
  firsts: list[float] = dataclasses.field(default_factory=list)
  ends: list[tuple[float, int]] = dataclasses.field(default_factory=list)

  def add(self, answer: Answer) -> None:
    """Adds an answer."""
    self.streams += 1
    self.tokens += len(answer.tokens)
    self.ends.append((answer.ended, len(answer.tokens)))
    if not answer.exact:
      self.faults.append(answer.fault())
    if answer.times:
      self.firsts.append(answer.times[0] - answer.sent)
    self.gaps += [(later, later - earlier) for earlier, later in zip(answer.times, answer.times[1:], strict=False)]


def control(
  target: str,
  stop_file: pathlib.Path,
  num_streams: int,
  max_tokens: int,
  seed: int,
  *,
  tenant: str = "",
  priority: int = 0,
  unary: bool = False,
  longest_prompt: int = 40,
) -> Control:
  """Keeps `num_streams` requests running, one after the other, until `stop_file` exists; the last ones end as usual.

  Lengths are half of `max_tokens` to one and a half, so that streams do not end together.
  """
  like = StreamRequest((), max_tokens, "control", priority, tenant=tenant, unary=unary)
  return on_loop(_control(target, stop_file, num_streams, like, longest_prompt, seed))


async def _control(
  target: str, stop_file: pathlib.Path, num_streams: int, like: StreamRequest, longest_prompt: int, seed: int
) -> Control:
  seen = Control()
  rng = random.Random(seed)

  async def client(stub: Any, number: int) -> None:
    serial = 0
    while not serial or not stop_file.exists():
      serial += 1
      prompt = random_prompt(rng, rng.randint(1, longest_prompt))
      request_id = f"{like.request_id}-{seed}-{number}-{serial}"
      length = rng.randint(max(1, like.max_tokens // 2), like.max_tokens * 3 // 2)
      ask = dataclasses.replace(like, prompt=prompt, max_tokens=length, request_id=request_id)
      seen.add(await send(stub, ask))

  async with grpc.aio.insecure_channel(target) as channel:
    await channel.channel_ready()
    begun_file(stop_file).touch()
    stub = stub_of(channel)
    await asyncio.gather(*(client(stub, number) for number in range(num_streams)))
  return seen


def begun_file(stop_file: pathlib.Path) -> pathlib.Path:
  """Returns the file that marks the beginning of control streams."""
  return stop_file.with_suffix(".begun")
