"""A load of streams whose every output is known beforehand, over gRPC and HTTP. Starts no server and prints nothing.

`learn_outputs` requests them from one plain server. With --deterministic a model gives the same tokens in any batch, so
any other output under load is a fault. `StreamLoad` then keeps a number of streams going and judges how each one ends.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
import contextlib
import dataclasses
import enum
import json
import random
import ssl
import time
from typing import Any

import grpc
import httpx

from server.client import Client
from server.proto import sluice_pb2 as pb
from server.proto import sluice_pb2_grpc as pb_grpc

_OPENINGS = (
  "Once upon a time",
  "The little boat",
  "A dog and a cat",
  "In the morning",
  "Tom was very",
  "One day a girl named Lily",
  "The sun was",
  "There was a big tree",
)
LONG_PROMPT_BYTES = 1600
_WORDS = tuple(word for opening in _OPENINGS for word in opening.split())
_WORD_BYTES = 5  # with its space
_RETRY_S = 0.2  # after an error, as a polite client waits


class Verdict(enum.Enum):
  """How a stream ended. The first three keep the rules."""

  FINISHED = "finished"  # with exactly the expected output
  ERROR = "error"  # a status or an error event, after a prefix of the expected output
  CANCELLED = "cancelled"  # by the client itself, after such a prefix
  WRONG = "wrong"  # other tokens than expected
  CUT_SHORT = "cut short"  # ended as if complete, with a part of the output
  SILENT = "silent"  # nothing came for too long


@dataclasses.dataclass(frozen=True)
class KnownRequest:
  """A greedy request and its output.

  Attributes:
    prompt, max_tokens: the request.
    token_ids, text: the whole output.
    ignore_eos: see the API.
  """

  prompt: str
  max_tokens: int
  token_ids: tuple[int, ...]
  text: str
  ignore_eos: bool = False


@dataclasses.dataclass(frozen=True)
class StreamEnd:
  """The end of one stream.

  Attributes:
    verdict: how it ended.
    protocol: "grpc" or "http".
    said: the error's text; empty without one.
    ended: time of the end on the machine's monotonic clock.
    waited_s: seconds from the last message, or the request, to the end.
    size: tokens that came; over HTTP, bytes of text.
  """

  verdict: Verdict
  protocol: str
  said: str
  ended: float
  waited_s: float
  size: int = 0


def learn_outputs(
  target: str, *, count: int, max_tokens: tuple[int, int], num_long: int = 0, ignore_eos: bool = False, seed: int = 0
) -> list[KnownRequest]:
  """Returns `count` requests with their outputs, from a server that serves nothing else.

  Args:
    target: HOST:PORT of its gRPC port.
    count: number of requests.
    max_tokens: fewest and most tokens of an output.
    num_long: the first requests have a prompt of about LONG_PROMPT_BYTES; every second one begins as another does.
    ignore_eos: every output has as many tokens as its request allows.
    seed: determines the requests.
  """
  rng = random.Random(seed)
  known = []
  with Client(target) as client:
    for index in range(count):
      prompt = f"{_OPENINGS[index % len(_OPENINGS)]} {index // len(_OPENINGS)} "
      if index < num_long:
        words = " ".join(random.Random(index // 2).choices(_WORDS, k=LONG_PROMPT_BYTES // _WORD_BYTES))
        prompt = f"{words}. {prompt}"
      length = rng.randint(*max_tokens)
      output = client.generate(prompt, max_tokens=length, temperature=0.0, ignore_eos=ignore_eos)
      known.append(KnownRequest(prompt, length, output.token_ids, output.text, ignore_eos))
  return known


class StreamLoad:
  """A closed loop of streams, half over gRPC and half over HTTP. Belongs to one event loop.

  Attributes:
    ends: every stream's end, in order.
    num_open: streams that run now.
  """

  def __init__(
    self,
    grpc_target: str,
    http_url: str,
    known: Sequence[KnownRequest],
    *,
    silence_s: float = 60.0,
    cancelled_share: float = 0.0,
    seed: int = 0,
    tls: ssl.SSLContext | None = None,
    application: str = "",
  ):
    """Args:
    grpc_target: HOST:PORT, in plain text.
    http_url: such as http://127.0.0.1:8000.
    known: the requests, sent in a random order again and again.
    silence_s: a stream without a message for this long is silent, in seconds.
    cancelled_share: share of the streams that the client leaves early.
    seed: determines the order.
    tls: verifies the certificate of an https URL.
    application: of Ray Serve that gRPC calls name; empty: none.
    """
    # A lost server comes back within seconds; by default a client would then wait up to two minutes.
    self._channel = grpc.aio.insecure_channel(grpc_target, [("grpc.max_reconnect_backoff_ms", 1000)])
    self._stub: Any = pb_grpc.GenerationServiceStub(self._channel)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    self._http = httpx.AsyncClient(
      base_url=http_url, timeout=httpx.Timeout(silence_s), limits=limits, trust_env=False, verify=tls or False
    )
    self._metadata = (("application", application),) if application else ()
    self._known, self._silence_s, self._cancelled_share = known, silence_s, cancelled_share
    self._rng = random.Random(seed)
    self._workers: list[asyncio.Task[None]] = []
    self._stopping: set[asyncio.Task[None]] = set()
    self._wanted = 0
    self.ends: list[StreamEnd] = []
    self.num_open = 0

  def set_streams(self, count: int) -> None:
    """Changes the number of concurrent streams. Streams beyond a smaller number finish first."""
    self._wanted = count
    while len(self._workers) < count:
      self._workers.append(asyncio.create_task(self._run_worker(len(self._workers))))

  def set_requests(self, known: Sequence[KnownRequest]) -> None:
    """Changes the requests that are sent from now on."""
    self._known = known

  async def stop(self) -> None:
    """Lets every stream end, then closes the connections."""
    self.set_streams(0)
    await asyncio.gather(*self._workers)
    await self._channel.close()
    await self._http.aclose()

  def count_verdicts(self, since: int = 0) -> Counter[Verdict]:
    """Returns the number of ends of each kind, from the end numbered `since` on."""
    return Counter(end.verdict for end in self.ends[since:])

  def find_faults(self, since: int = 0, *, allow_errors: bool = True) -> list[str]:
    """Returns a line for each end that breaks the rules; without `allow_errors`, also for each error."""
    kept = {Verdict.FINISHED, Verdict.CANCELLED} | ({Verdict.ERROR} if allow_errors else set())
    return [
      f"{end.protocol} {end.verdict.value}: {end.said}".rstrip(": ")
      for end in self.ends[since:]
      if end.verdict not in kept
    ]

  async def _run_worker(self, index: int) -> None:
    while True:
      if index >= self._wanted:
        if self._wanted == 0:
          return
        await asyncio.sleep(_RETRY_S)
        continue
      request = self._rng.choice(self._known)
      leaves = self._rng.random() < self._cancelled_share
      self.num_open += 1
      try:
        end = await (self._stream_grpc(request, leaves) if index % 2 else self._stream_http(request, leaves))
      finally:
        self.num_open -= 1
      self.ends.append(end)
      if end.verdict is Verdict.ERROR:
        await asyncio.sleep(_RETRY_S)

  async def _stream_grpc(self, request: KnownRequest, leaves: bool) -> StreamEnd:
    call = self._stub.Generate(
      pb.GenerateRequest(
        text=request.prompt,
        sampling=pb.SamplingParams(temperature=0.0),
        stopping=pb.StopParams(max_tokens=request.max_tokens, ignore_eos=request.ignore_eos),
      ),
      metadata=self._metadata,
    )
    tokens: list[int] = []
    heard, finished, said = time.monotonic(), False, ""

    def judge(told: Verdict) -> StreamEnd:
      verdict = told
      if tuple(tokens) != request.token_ids[: len(tokens)]:
        verdict = Verdict.WRONG
      elif told is Verdict.FINISHED and (not finished or len(tokens) < len(request.token_ids)):
        verdict = Verdict.CUT_SHORT
      now = time.monotonic()
      return StreamEnd(verdict, "grpc", said, now, now - heard, len(tokens))

    try:
      while True:
        async with asyncio.timeout(self._silence_s):
          message = await call.read()
        if message is grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue]  (no stub)
          return judge(Verdict.FINISHED)
        heard = time.monotonic()
        for delta in message.deltas:
          tokens += delta.token_ids
        finished = finished or bool(message.finished)
        if leaves and tokens:
          return judge(Verdict.CANCELLED)
    except TimeoutError:
      return judge(Verdict.SILENT)
    except grpc.aio.AioRpcError as error:
      said = f"{error.code().name}: {error.details()}"[:200]
      return judge(Verdict.ERROR)
    finally:
      call.cancel()

  async def _stream_http(self, request: KnownRequest, leaves: bool) -> StreamEnd:
    body = {"prompt": request.prompt, "max_tokens": request.max_tokens, "temperature": 0.0, "stream": True}
    body["ignore_eos"] = request.ignore_eos
    text, heard, is_done, said = "", time.monotonic(), False, ""

    def judge(told: Verdict) -> StreamEnd:
      verdict = told
      if not request.text.startswith(text):
        verdict = Verdict.WRONG
      elif told is Verdict.FINISHED and (not is_done or text != request.text):
        verdict = Verdict.CUT_SHORT
      now = time.monotonic()
      return StreamEnd(verdict, "http", said, now, now - heard, len(text.encode()))

    try:
      async with self._http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
          said = f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')}"[:200]
          return judge(Verdict.ERROR)
        generator: Any = response.aiter_lines()
        # A generator that is left early must be closed here, not by the collector.
        async with contextlib.aclosing(generator) as lines:
          async for line in lines:
            if not line.startswith("data: "):
              continue
            if line == "data: [DONE]":
              is_done = True
              continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
              said = str(event["error"])[:200]
              return judge(Verdict.ERROR)
            heard = time.monotonic()
            text += event["choices"][0]["text"]
            if leaves and text:
              return judge(Verdict.CANCELLED)
      return judge(Verdict.FINISHED)
    except httpx.TimeoutException:
      return judge(Verdict.SILENT)
    except (httpx.HTTPError, ssl.SSLError) as error:  # httpx passes on what TLS finds in a record
      said = f"{type(error).__name__}: {error}"[:200]
      return judge(Verdict.ERROR)
