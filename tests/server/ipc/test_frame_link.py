"""Frames between processes: whatever comes in is understood or ends the link, and what went in comes out."""

import asyncio
from collections.abc import Callable
import dataclasses
import random
import socket
from typing import Any

import msgspec
import pytest

from engine.adapters import AdapterInfo
from engine.batch import TokenLogprobs
from engine.config import EngineConfig
from engine.errors import EngineError, InvalidRequest, Overloaded
from engine.host_pool import HostPoolCounts
from engine.recorder import DraftCounts, EngineStats, RequestRecord, RungTotals, StepRecord
from engine.request import FinishReason, Request, TokenEvent
from engine.sampling_params import SamplingParams
from server.errors import Draining, InternalError, Starting
from server.generation.engine_client import Report
from server.generation.reasoning_budget import ReasoningLimit
from server.host_options import HostOptions
from server.ipc import frame_link
from server.ipc.messages import (
  CountsQuestion,
  EngineDeath,
  FrontEndSettings,
  LinkMessage,
  NamedAborts,
  ReportQuestion,
  ServedModel,
  StepEvents,
  Submission,
  TextOptions,
)
from server.telemetry.latency_histograms import Observations
from server.telemetry.process_counts import ProcessCounts


def over_the_wire[T](value: T, of_type: Any = None) -> T:
  """As the other side gets it."""
  return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=of_type or type(value))


def framed(*parts: Any) -> bytes:
  body = msgspec.msgpack.encode(parts)
  return len(body).to_bytes(4, "little") + body


class Pair:
  """A link and the bare socket at its other end; both end with the block."""

  def __init__(self, handlers: dict | None = None):
    ours, self.other = socket.socketpair()
    self.reasons: list[str] = []
    self.link = frame_link.Link(ours, handlers or {}, self.reasons.append)

  def __enter__(self) -> "Pair":
    return self

  def __exit__(self, *_: object) -> None:
    self.link.close()
    self.other.close()

  async def until_closed(self) -> str:
    for _ in range(2000):
      if self.reasons:
        return self.reasons[0]
      await asyncio.sleep(0.005)
    raise AssertionError("the link never closed")


def run(work: Callable[[], Any]) -> Any:
  async def whole() -> Any:
    async with asyncio.timeout(60):
      return await work()

  return asyncio.run(whole())


@pytest.mark.parametrize(
  "raw, reason",
  [
    ((frame_link.MAX_FRAME_BYTES + 1).to_bytes(4, "little"), "bytes were announced, the limit is"),
    (b"\x01\x00\x00\x00\xc1", "malformed"),
    (b"\x02\x00\x00\x00\x92\x01", "truncated"),
    (b"\x01\x00\x00\x00\x07", "Expected `array`, got `int`"),
    (b"\x01\x00\x00\x00\x90", "Expected `array` of length 2"),
    (frame_link.pack_frame(0, NamedAborts("owner", [])), "Invalid value 'NamedAborts'"),
    (frame_link.pack_frame(1, ReportQuestion(1, True)), "Invalid value 'ReportQuestion'"),
    (framed(0, ["EngineDeath", 7]), "Expected `str`, got `int`"),
    (framed(0, ["EngineDeath"]), "Expected `array` of at least length 2"),
    (framed("serial", ["EngineDeath", "why"]), "Expected `int`, got `str`"),
    (frame_link.pack_frame(0, CountsQuestion()), "RuntimeError"),
    (b"", "the other side has gone"),
  ],
)
def test_what_is_not_understood_ends_the_link(raw, reason):
  def fail(_: CountsQuestion) -> None:
    raise RuntimeError("of ours")

  async def check() -> None:
    with Pair({EngineDeath: lambda message: None, CountsQuestion: fail}) as pair:
      pair.other.sendall(raw)
      if not raw:
        pair.other.close()
      assert reason in await pair.until_closed()
      assert not pair.link.is_open
      with pytest.raises(EngineError):
        await pair.link.ask_peer(CountsQuestion(), None)

  run(check)


def test_random_bytes_never_do_more_than_end_the_link():
  random_ = random.Random(7)
  good = frame_link.pack_frame(0, StepEvents(["a"], [5], []))

  async def check() -> None:
    ended = 0
    for _ in range(300):
      with Pair({StepEvents: lambda message: None}) as pair:
        raw = bytearray(good * 3)
        for _ in range(random_.randint(1, 4)):
          raw[random_.randrange(len(raw))] = random_.randrange(256)
        pair.other.sendall(raw)
        pair.other.close()
        ended += "has gone" not in await pair.until_closed()
    assert ended > 100

  run(check)


def test_frames_come_whole_and_in_order_however_they_are_cut():
  async def check() -> None:
    seen: list[int] = []
    raw = b"".join(frame_link.pack_frame(0, EngineDeath("x" * number)) for number in range(200))
    random_ = random.Random(3)
    with Pair({EngineDeath: lambda message: seen.append(len(message.reason))}) as pair:
      while raw:
        cut = random_.randint(1, 700)
        pair.other.sendall(raw[:cut])
        raw = raw[cut:]
        await asyncio.sleep(0)
      while len(seen) < 200:
        await asyncio.sleep(0.001)
    assert seen == list(range(200))

  run(check)


def test_a_reader_that_does_not_read_keeps_nobody_waiting_and_is_given_up(monkeypatch):
  monkeypatch.setattr(frame_link, "MAX_BACKLOG_BYTES", 32 << 20)

  async def check() -> None:
    with Pair() as pair:
      for _ in range(20):
        pair.link.tell_peer(EngineDeath("x" * (4 << 20)))
      assert "left 33554432 bytes unread" in await pair.until_closed()

  run(check)


def test_questions_are_answered_or_refused():
  async def check() -> None:
    ours, theirs = socket.socketpair()
    loud = Overloaded("full", 2.5)
    order: list[str] = []

    def refuse(_: ReportQuestion) -> None:
      raise loud

    async def answer_later(asked: NamedAborts) -> list[str]:
      order.append("asked")
      await asyncio.sleep(0.001)
      return asked.names

    def fail(_: CountsQuestion) -> None:
      raise RuntimeError("of ours")

    closed: list[str] = []
    handlers: dict = {
      EngineDeath: lambda message: order.append("told") or len(message.reason),
      ReportQuestion: refuse,
      NamedAborts: answer_later,
      CountsQuestion: fail,
    }
    one = frame_link.Link(ours, handlers, closed.append)
    two = frame_link.Link(theirs, {}, closed.append)
    asked = asyncio.ensure_future(two.ask_peer(NamedAborts("", ["a", "b"]), list[str]))
    await asyncio.sleep(0)
    two.tell_peer(EngineDeath("behind it"))
    assert await asyncio.gather(asked, two.ask_peer(EngineDeath("four"), int)) == [["a", "b"], 4]
    assert order == ["asked", "told", "told"]
    with pytest.raises(Overloaded, match="full") as caught:
      await two.ask_peer(ReportQuestion(0, False), Report)
    assert caught.value.retry_after_s == 3
    with pytest.raises(InternalError, match="internal error, incident [0-9a-f]{8} in the server's log"):
      await two.ask_peer(CountsQuestion(), ProcessCounts)
    waiting = asyncio.ensure_future(two.ask_peer(NamedAborts("", []), list[str]))
    await asyncio.sleep(0)
    two.close()
    with pytest.raises(EngineError):
      await waiting
    while not closed:
      await asyncio.sleep(0.001)
    assert closed == ["the other side has gone"] and not one.is_open

  run(check)


def test_an_answer_of_another_type_ends_the_link():
  async def check() -> None:
    ours, theirs = socket.socketpair()
    closed: list[str] = []
    frame_link.Link(ours, {CountsQuestion: lambda _: "text"}, lambda reason: None)
    two = frame_link.Link(theirs, {}, closed.append)
    with pytest.raises(EngineError):
      await two.ask_peer(CountsQuestion(), ProcessCounts)
    assert closed == ["a frame was not understood: Expected `object`, got `str`"]

  run(check)


@pytest.mark.parametrize("error", [InvalidRequest("a"), Draining("b"), Starting("c"), Overloaded("d", 3.0)])
def test_errors_come_back_as_they_were(error):
  again = frame_link.decode_error(over_the_wire(frame_link.encode_error(error)))
  assert type(again) is type(error) and str(again) == str(error)
  assert getattr(again, "retry_after_s", None) == getattr(error, "retry_after_s", None)


def test_a_generation_comes_back_as_it_was():
  params = SamplingParams(
    max_tokens=7,
    temperature=0.5,
    logit_bias=((3, -1.5), (4, 2.0)),
    allowed_token_ids=(1, 2),
    stop_token_ids=(9,),
    seed=-(2**63),
    logprobs=0,
  )
  first = Request(
    "1", (5, 2**31), params, priority=-3, queue_deadline=1.5, cache_salt=b"\0s", tenant="t", speculation="none"
  )
  second = dataclasses.replace(first, id="2", params=SamplingParams(seed=2**63 - 1), leader_id="1")
  limit = ReasoningLimit(5, "<think>", "</think>", (1, 2), (3,), (), is_open=True)
  asked = over_the_wire(Submission.of_requests("owner", "name", [first, second], "grammar", limit))
  assert asked.reasoning == limit
  assert asked.grammar == "grammar" and [request_id for request_id, _ in asked.outputs] == ["1", "2"]
  again = asked.make_requests(["1", "2"], [None, None])
  for before, after in zip((first, second), again, strict=True):
    assert all(getattr(before, field.name) == getattr(after, field.name) for field in dataclasses.fields(Request))


@pytest.mark.parametrize(
  "name, value",
  [("prompt", "ab"), ("prompt", [True]), ("priority", 1.5), ("deadline", "x"), ("cache_salt", 3), ("tenant", 7)]
  + [("speculation", None)]
  + [("grammar", 1), ("outputs", ()), ("outputs", [("1", {"top_k": 1.5})]), ("outputs", [("1", {"seed": "x"})])],
)
def test_a_generation_with_a_wrong_field_is_not_taken(name, value):
  good = Submission.of_requests("owner", "name", [Request("1", (5,), SamplingParams())], None)
  with pytest.raises(msgspec.ValidationError):
    over_the_wire(msgspec.structs.replace(good, **{name: value}))


def test_events_come_back_as_they_were():
  entry = TokenLogprobs(5, -0.25, ((5, -0.25), (7, -2.0)))
  event = TokenEvent("id", (5, 6), (entry, entry), (entry,), FinishReason.STOP, "why", 3, 6)
  step = StepEvents(["a", "b"], [1, 2], [event])
  assert over_the_wire(step) == step
  for columns in (([1], [1]), (["a"], [True]), (["a"], ["1"]), ("a", [1])):
    with pytest.raises(msgspec.ValidationError):
      over_the_wire(StepEvents(*columns, []))


def test_settings_and_counts_come_back_as_they_were():
  settings = FrontEndSettings(
    HostOptions(port=7, http_allowed_hosts=("a", "b")), TextOptions(model_dir="m", defaults={"top_p": 0.5, "top_k": 3})
  )
  assert over_the_wire(settings) == settings
  config = EngineConfig(vocab_size=8, max_model_len=64, num_blocks=8, eos_token_ids=(1, 2))
  adapters = [AdapterInfo("a", 8, "/adapters/a", 2, "loaded")]
  served = over_the_wire(ServedModel("m", config, 1.5, 2.5, adapters, [7]))
  assert (served.config, served.adapters) == (config, adapters)
  seen = Observations()
  seen.first_token(7.0, 0.25)
  seen.gap(7.0, 0.5, 3)
  counts = ProcessCounts(
    seen, {("grpc", "m", "OK"): 2}, {("http", "r"): 1}, 5, 4, {"failed": 1}, lag_s=0.5, num_tasks=3, pids=[7]
  )
  again = over_the_wire(counts)
  assert again == counts
  again.add_process(over_the_wire(counts))
  assert again.calls == {("grpc", "m", "OK"): 4} and again.num_ended == {"failed": 2} and again.pids == [7, 7]
  assert again.failed == {("http", "r"): 2} and (again.num_started, again.num_live, again.num_tasks) == (10, 8, 6)
  assert sum(again.observations.inter_token.counts) == 6 and again.observations.recent_gaps == [(7.0, 0.5, 3)] * 2
  assert again.lag_s == 0.5, "the longest, not the sum"


def test_a_report_comes_back_as_it_was():
  numbers = {field.name: index for index, field in enumerate(dataclasses.fields(EngineStats))}
  stats = EngineStats(
    **numbers
    | {
      "host_pool": HostPoolCounts(1, 2, 3),
      "drafts": DraftCounts(3, 9, (2, 1, 0, 0, 0, 0, 0), 5),
      "rungs": {8: RungTotals(1, 2, 3, 4, 5, 0.5, 0.25)},
      "finished": dict.fromkeys(FinishReason, 2),
      "steps": (StepRecord(0, "prefill", *range(len(StepRecord._fields) - 2)),),  # pyright: ignore[reportArgumentType]
      "requests": (RequestRecord(*"abc", *range(len(RequestRecord._fields) - 3)),),  # pyright: ignore
    }  # pyright: ignore[reportArgumentType]
  )
  queue = Observations().queue
  queue.observe(0.5, 3)
  adapters = (AdapterInfo("a", 8, "/adapters/a", 2, "draining"),)
  report = Report(stats, 1.5, 1.25, 2, 1 << 30, queue, b"\0\1", adapters)
  assert over_the_wire(report) == report


def test_nothing_but_plain_values_can_be_sent():
  class AnyValue(LinkMessage):
    value: Any

  with pytest.raises(TypeError):
    frame_link.pack_frame(0, AnyValue(object()))
  with pytest.raises(frame_link.FrameError, match="the limit is"):
    frame_link.pack_frame(0, AnyValue(b"x" * frame_link.MAX_FRAME_BYTES))
