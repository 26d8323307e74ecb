"""Tells of connections to the gRPC port that end without a call: what scanners and clients of other protocols leave.

gRPC's core closes them and tells Python nothing. But it numbers all connections (channelz), so that those which came
are known, those which are open are listed, and those that called are known by their calls: what is left came for
nothing.
Everything runs on the server's event loop. Knows no request.
"""

import asyncio
from collections.abc import Callable
import json
import logging

import grpc
from grpc._cython import cygrpc

_log = logging.getLogger(__name__)

INTERVAL_S = 60.0  # between two lines, at least
_NAME = "chttp2 "  # of a connection, in front of its peer's address
_OWN = "unix:/sluice-counts"  # never connected to


class ConnectionWatch:
  """Those to one server's port, and a line a minute, at most, of those that ended without a call.

  A connection that is open is none of them, however idle. Of connections whose peers have the same address one after
  the other within a minute, as a proxy's may, a few may be told of that did call. Other servers and clients of this
  process must take no numbers: `grpc.enable_channelz` is 0 for them.
  """

  def __init__(self, handshakes: Callable[[], int] | None = None):
    """Args:
    handshakes: how many connections have come to a port with TLS, where those that fail are never numbered; None for
      plain text.
    """
    self._handshakes = handshakes
    self._server_id: int | None = None
    self._called: set[str] = set()
    self._num_called = 0  # connections that called and have ended
    self._num_told = 0
    self._watch: asyncio.Task | None = None

  @property
  def is_on(self) -> bool:
    """Whether it has started, and this gRPC can tell."""
    return self._server_id is not None

  def start_counting(self) -> None:
    """Begins to write lines, until stop(). The server, whose channelz is on, is bound, and no other one since."""
    self._handshakes_before = self._handshakes() if self._handshakes is not None else 0
    try:
      servers = json.loads(cygrpc.channelz_get_servers(0))["server"]
      self._server_id = max(int(server["ref"]["serverId"]) for server in servers)
      self._first = self._last = self._number()
      self._num_own = 0  # numbers that were taken in counting since
    except (AttributeError, KeyError, ValueError) as error:
      self._off(error)
      return
    self._watch = asyncio.create_task(self._run())

  def stop_counting(self) -> None:
    """Writes no more. Does no harm twice."""
    if self._watch is not None:
      self._watch.cancel()

  def called(self, peer: str) -> None:
    """A call has come. Args: peer: `context.peer()` of it."""
    if self._server_id is not None:
      self._called.add(peer)

  async def tell_counts(self) -> None:
    """One line, if there is something to tell since the last one."""
    if num := await self.ended_without_call():
      _log.warning(
        "gRPC port: %d connections ended without a call since this was last looked at, %g s ago at least: scanners, "
        "probes of the port, HTTP/1.1, TLS where there is none or none where there is TLS; with GRPC_VERBOSITY=info in "
        "its environment gRPC names each",
        num,
        INTERVAL_S,
      )

  async def ended_without_call(self) -> int:
    """How many have ended without a call that was not told before."""
    if not self.is_on:
      return 0
    try:
      called, num_came = frozenset(self._called), self._came()
      is_open = await self.open_peers()
    except (AttributeError, KeyError, ValueError) as error:
      self._off(error)
      return 0
    gone = called.difference(is_open)
    self._called -= gone
    self._num_called += len(gone)
    num_open = sum(number < self._last or self._handshakes is not None for number in is_open.values())
    num = num_came - num_open - self._num_called - self._num_told
    self._num_told += max(num, 0)  # less than nothing: a connection came between two looks, and is in the next number
    return max(num, 0)

  def _came(self) -> int:
    """How many connections have come."""
    self._last = self._number()
    self._num_own += 1
    if self._handshakes is not None:
      return self._handshakes() - self._handshakes_before
    return self._last - self._first - self._num_own

  def _number(self) -> int:
    """The number of what is made now, which is what tells how many were given away."""
    with grpc.insecure_channel(_OWN, options=(("grpc.enable_channelz", 1),)):
      return max(int(each["ref"]["channelId"]) for each in json.loads(cygrpc.channelz_get_top_channels(0))["channel"])

  async def open_peers(self) -> dict[str, int]:
    """Peers of the connections that are open, and their numbers."""
    found: dict[str, int] = {}
    first = 0
    while True:
      page = json.loads(cygrpc.channelz_get_server_sockets(self._server_id, first, 0))
      for each in page.get("socketRef", ()):
        first = int(each["socketId"]) + 1
        found[each["name"].removeprefix(_NAME)] = first - 1
      if page.get("end", False):
        return found
      await asyncio.sleep(0)

  async def _run(self) -> None:
    while self.is_on:
      await asyncio.sleep(INTERVAL_S)
      await self.tell_counts()

  def _off(self, error: Exception) -> None:
    """Counting is nothing to fail for."""
    self._server_id = None
    _log.info("connections without a call are not counted: this gRPC tells %s", error or type(error).__name__)
