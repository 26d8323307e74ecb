"""Calls by the thousand that nobody waits for: no neighbour is cancelled for them, and nothing of them stays."""

import asyncio
import contextlib
import re
import struct
import threading

import pytest

from server.host_options import HostOptions
from server.rpc import call_interceptor
from tests.server import http2
from tests.server.rpc.test_wire_limits import FRAMED, assert_serves

OPENING = http2.headers("/sluice.v1.GenerationService/Generate")
BEGIN = http2.PREFACE, http2.frame(http2.SETTINGS)
PING = http2.frame(http2.PING, payload=b"arrived?")  # answered when all before it is read
REFUSED_STREAM, CANCEL = 7, 8


def opened_and_reset(count: int) -> bytes:
  """Streams that are over as soon as they are open."""
  return b"".join(
    http2.frame(http2.HEADERS, http2.END_HEADERS, stream, OPENING)
    + http2.frame(http2.RST_STREAM, 0, stream, struct.pack(">I", CANCEL))
    for stream in range(1, 2 * count, 2)
  )


@pytest.mark.catalogue("H3")
def test_calls_of_a_connection_count_until_the_loop_has_seen_them(served):
  """Else one connection that opens and resets streams without end would leave as many calls as it likes."""
  unseen = 2 * HostOptions().max_concurrent_streams
  go = threading.Event()
  served.loop.call_soon_threadsafe(go.wait, 60)
  try:
    with http2.Connection(served.address) as flood:
      flood.send(*BEGIN, http2.frame(http2.SETTINGS, http2.ACK), opened_and_reset(1000), PING)
      refused = 0
      for kind, _, _, payload in flood.frames():
        refused += kind == http2.RST_STREAM and payload == struct.pack(">I", REFUSED_STREAM)
        if refused >= 1000 - unseen - 2:
          break
  finally:
    go.set()
  assert_serves(served)


@pytest.mark.catalogue("B1")
def test_calls_that_are_over_take_no_place_of_those_that_follow(served):
  """A client that may have so many calls cancels them all, and begins others before the event loop has heard of it."""
  limit = HostOptions().max_concurrent_streams
  first = 2 * limit + 1
  follow = range(first, first + 2 * 8, 2)
  go = threading.Event()
  served.loop.call_soon_threadsafe(go.wait, 60)
  try:
    with http2.Connection(served.address) as client:
      client.send(*BEGIN, http2.frame(http2.SETTINGS, http2.ACK), opened_and_reset(limit))
      for stream in follow:
        client.send(
          http2.frame(http2.HEADERS, http2.END_HEADERS, stream, OPENING),
          http2.frame(http2.DATA, http2.END_STREAM, stream, FRAMED),
        )
      client.send(PING)
      client.send(PING)
      ended = set()
      for kind, flags, stream, _ in client.frames():
        if kind == http2.PING:
          go.set()
        assert kind != http2.RST_STREAM, "a call was refused"
        if kind == http2.HEADERS and flags & http2.END_STREAM:
          ended.add(stream)
        if ended == set(follow):
          break
  finally:
    go.set()
  assert ended == set(follow)


@pytest.mark.catalogue("H3")
def test_thousands_of_calls_that_wait_for_the_loop_cancel_nobody_elses(served):
  """Most of them reset already. gRPC's own limit, 3,000 calls of all connections, would cancel the neighbour's."""
  go = threading.Event()
  served.loop.call_soon_threadsafe(go.wait, 60)
  try:
    with contextlib.ExitStack() as stack:
      for _ in range(32):  # each with as many as it may have
        flood = stack.enter_context(http2.Connection(served.address))
        flood.send(*BEGIN, opened_and_reset(128), PING)
        assert flood.wait_for(http2.PING)
      neighbour = stack.enter_context(http2.Connection(served.address))
      neighbour.send(*BEGIN, http2.frame(http2.HEADERS, http2.END_HEADERS, 1, OPENING))
      neighbour.send(http2.frame(http2.DATA, http2.END_STREAM, 1, FRAMED), PING)
      assert neighbour.wait_for(http2.PING)
      go.set()
      answer = b""
      for kind, flags, _, payload in neighbour.frames():
        assert kind != http2.RST_STREAM or answer, "the call was cancelled"
        if kind == http2.HEADERS:
          answer += payload
          if flags & http2.END_STREAM:
            break
      assert re.findall(rb"grpc-status.(\d+)", answer) == [b"0"], answer
  finally:
    go.set()
  assert_serves(served)


@pytest.mark.catalogue("B1", "H3")
def test_the_read_of_a_cancelled_call_comes_to_its_own_end():
  """What gRPC holds for a read is freed when the read ends, and never if it is cancelled."""
  ended = []

  class Context:
    async def read(self) -> bytes:
      await go.wait()
      ended.append(True)
      raise RuntimeError("the call is over")  # which nobody is to hear of

  async def run() -> None:
    call = asyncio.create_task(call_interceptor._read(Context()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
      await call
    assert not ended
    go.set()
    while not ended:
      await asyncio.sleep(0)

  async def main() -> list:
    unheard = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    await run()
    await asyncio.sleep(0.01)
    return unheard

  go = asyncio.Event()
  assert asyncio.run(main()) == []
