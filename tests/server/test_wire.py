"""Frames between processes: whatever comes in is understood or ends the link, and what went in comes out."""

import asyncio
from collections.abc import Callable
import dataclasses
import random
import socket
from typing import Any

import msgpack
import pytest

from engine.batch import TokenLogprobs
from engine.config import EngineConfig
from engine.errors import EngineError, InvalidRequest, Overloaded
from engine.recorder import EngineStats, RequestRecord, RungTotals, StepRecord
from engine.request import FinishReason, Request, TokenEvent
from engine.sampling_params import SamplingParams
from server import plain, wire
from server.counts import Counts
from server.errors import Draining, Starting
from server.host_options import HostOptions
from server.observations import Observations
from server.port import Report


def over_the_wire(value: Any) -> Any:
  """As the other side gets it."""
  return wire.unpack(wire.pack((1, value))[4:])[1]


class Pair:
  """A link and the bare socket at its other end; both end with the block."""

  def __init__(self, told: dict | None = None):
    ours, self.other = socket.socketpair()
    self.reasons: list[str] = []
    self.link = wire.Link(ours, told=told or {}, asked={}, closed=self.reasons.append)

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
    ((wire.MAX_FRAME_BYTES + 1).to_bytes(4, "little"), "was announced, the limit is"),
    (b"\x01\x00\x00\x00\xc1", "not msgpack"),
    (b"\x02\x00\x00\x00\x92\x01", "not msgpack"),
    (b"\x01\x00\x00\x00\x07", "no array that begins with its kind"),
    (b"\x01\x00\x00\x00\x90", "no array that begins with its kind"),
    (wire.pack((99,)), "of kind 99 is not known"),
    (wire.pack((1, "too", "many", "fields")), "not understood: TypeError"),
    (wire.pack((64, 0, 98)), "question of kind 98 is not known"),
    (wire.pack((64, "serial", 1)), "is not known"),
    (b"", "the other side has gone"),
  ],
)
def test_what_is_not_understood_ends_the_link(raw, reason):
  async def check() -> None:
    with Pair(told={1: lambda field: None}) as pair:
      pair.other.sendall(raw)
      if not raw:
        pair.other.close()
      assert reason in await pair.until_closed()
      assert not pair.link.is_open
      with pytest.raises(EngineError):
        await pair.link.ask(1)

  run(check)


def test_random_bytes_never_do_more_than_end_the_link():
  random_ = random.Random(7)
  good = wire.pack((wire.EVENTS, ["a"], [5], []))

  async def check() -> None:
    ended = 0
    for _ in range(300):
      with Pair(told={wire.EVENTS: lambda *columns: plain.columns_from(*columns[:2])}) as pair:
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
    raw = b"".join(wire.pack((1, number, b"x" * number)) for number in range(200))
    random_ = random.Random(3)
    with Pair(told={1: lambda number, body: seen.append(number)}) as pair:
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
  monkeypatch.setattr(wire, "MAX_BACKLOG_BYTES", 32 << 20)

  async def check() -> None:
    with Pair() as pair:
      for _ in range(20):
        pair.link.tell(1, b"x" * (4 << 20))
      assert "left 33554432 bytes unread" in await pair.until_closed()

  run(check)


def test_questions_are_answered_or_refused():
  async def check() -> None:
    ours, theirs = socket.socketpair()
    loud = Overloaded("full", 2.5)

    def refuse() -> None:
      raise loud

    async def later(value: int) -> int:
      await asyncio.sleep(0.001)
      return value + 1

    closed: list[str] = []
    one = wire.Link(ours, told={}, asked={1: lambda value: value * 2, 2: refuse, 3: later}, closed=closed.append)
    two = wire.Link(theirs, told={}, asked={}, closed=closed.append)
    assert await asyncio.gather(two.ask(1, 21), two.ask(3, 4), two.ask(1, "a")) == [42, 5, "aa"]
    with pytest.raises(Overloaded, match="full") as caught:
      await two.ask(2)
    assert caught.value.retry_after_s == 2.5
    waiting = asyncio.ensure_future(two.ask(3, 1))
    await asyncio.sleep(0)
    two.close()
    with pytest.raises(EngineError):
      await waiting
    while not closed:
      await asyncio.sleep(0.001)
    assert closed == ["the other side has gone"] and not one.is_open

  run(check)


@pytest.mark.parametrize("error", [InvalidRequest("a"), Draining("b"), Starting("c"), Overloaded("d", 3.0)])
def test_errors_come_back_as_they_were(error):
  again = wire.error_from(over_the_wire(wire.plain_error(error)))
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
  first = Request("1", (5, 2**31), params, priority=-3, queue_deadline=1.5, cache_salt=b"\0s", tenant="t")
  second = dataclasses.replace(first, id="2", params=SamplingParams(seed=2**63 - 1), leader_id="1")
  asked = plain.generation_from(*over_the_wire(plain.plain_generation([first, second], "grammar")))
  assert asked.grammar == "grammar" and [request_id for request_id, _ in asked.outputs] == ["1", "2"]
  again = asked.requests(["1", "2"], [None, None])
  for before, after in zip((first, second), again, strict=True):
    assert all(getattr(before, field.name) == getattr(after, field.name) for field in dataclasses.fields(Request))


def test_every_parameter_has_a_type():
  assert set(plain._TYPES) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
  "place, value", [(0, b"abc"), (0, "ab"), (1, 1.5), (3, "x"), (4, "s"), (5, 7), (6, 1), (7, ())]
)
def test_a_generation_with_a_wrong_field_is_not_taken(place, value):
  fields = list(over_the_wire(plain.plain_generation([Request("1", (5,), SamplingParams())], None)))
  fields[place] = value
  with pytest.raises((TypeError, ValueError)):
    plain.generation_from(*fields)


def test_events_come_back_as_they_were():
  entry = TokenLogprobs(5, -0.25, ((5, -0.25), (7, -2.0)))
  event = TokenEvent("id", (5, 6), (entry, entry), (entry,), FinishReason.STOP, "why", 3, 6)
  assert plain.event_from(over_the_wire(plain.plain_event(event, "id"))) == event
  assert plain.columns_from(*over_the_wire((["a", "b"], [1, 2]))) == (("a", "b"), (1, 2))
  for columns in ((["a"], []), ([1], [1]), (["a"], [True]), (["a"], ["1"]), ("a", [1])):
    with pytest.raises(TypeError):
      plain.columns_from(*over_the_wire(columns))


def test_settings_and_counts_come_back_as_they_were():
  options = HostOptions(port=7, http_allowed_hosts=("a", "b"))
  assert plain.options_from(over_the_wire(dataclasses.asdict(options))) == options
  config = EngineConfig(vocab_size=8, max_model_len=64, num_blocks=8, eos_token_ids=(1, 2))
  assert plain.config_from(over_the_wire(dataclasses.asdict(config))) == config
  seen = Observations()
  seen.first_token(0.25)
  seen.gap(0.5, 3)
  counts = Counts(seen, {("grpc", "m", "OK"): 2}, {("http", "r"): 1}, 5, 4, {"failed": 1}, pids=[7])
  again = Counts.from_plain(over_the_wire(counts.plain()))
  again.add(Counts.from_plain(over_the_wire(counts.plain())))
  assert again.calls == {("grpc", "m", "OK"): 4} and again.num_ended == {"failed": 2} and again.pids == [7, 7]
  assert again.observations.inter_token.num_values == 6 and list(again.observations.recent_gaps) == [(0.5, 3)] * 2


def test_a_report_comes_back_as_it_was():
  numbers = {field.name: index for index, field in enumerate(dataclasses.fields(EngineStats))}
  stats = EngineStats(
    **numbers
    | {
      "rungs": {8: RungTotals(1, 2, 3, 4, 5, 0.5, 0.25)},
      "finished": dict.fromkeys(FinishReason, 2),
      "steps": (StepRecord(*range(len(StepRecord._fields))),),  # pyright: ignore[reportArgumentType]
      "requests": (RequestRecord(*"abc", *range(len(RequestRecord._fields) - 3)),),  # pyright: ignore
    }  # pyright: ignore[reportArgumentType]
  )
  queue = Observations().queue
  queue.observe(0.5, 3)
  report = Report(stats, 1.5, 1.25, 2, 1 << 30, queue, b"\0\1")
  again = plain.report_from(over_the_wire(plain.plain_report(report)))
  assert again.stats == stats and again.queue.counts == queue.counts and again.queue.total == queue.total
  assert dataclasses.replace(again, queue=queue) == report


def test_nothing_but_plain_values_can_be_sent():
  with pytest.raises(TypeError):
    wire.pack((1, object()))
  with pytest.raises(wire.WireError, match="the limit is"):
    wire.pack((1, b"x" * wire.MAX_FRAME_BYTES))
  assert msgpack.unpackb(wire.pack((1, "a"))[4:]) == [1, "a"]
