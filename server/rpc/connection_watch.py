"""Logs the number of connections to the gRPC port that end without a call, as scanners cause them. Knows no request.

gRPC's Core closes them without a sign to Python. But channelz numbers all connections and lists the open ones, and
calls show which connections were used. The rest ended without a call. Everything runs on the server's event loop.
"""

import asyncio
from collections.abc import Callable
import json
import logging
import math

import grpc
from grpc._cython import cygrpc

_log = logging.getLogger(__name__)

INTERVAL_S = 60.0  # between two lines, at least
_NAME = "chttp2 "  # of a connection, in front of its peer's address
_OWN = "unix:/sluice-counts"  # never connected to


class ConnectionWatch:
  """Counts the connections to one server's port and logs those that ended without a call, at most once a minute.

  An open connection never counts, however idle. Where peers reuse an address within a minute, as behind a proxy, the
  count may include a few connections that did call. Other servers and clients of this process must take no numbers:
  `grpc.enable_channelz` is 0 for them.
  """

  def __init__(self, handshakes: Callable[[], int] | None = None):
    """Args:
    handshakes: returns the number of TLS handshakes begun, since channelz never numbers the failed ones; None for
      plain text.
    """
    self._handshakes = handshakes
    self._server_id: int | None = None  # while this gRPC counts
    self._called: set[str] = set()
    self._last = math.inf  # number of a connection; of later ones nothing is known yet
    self._num_own = 0  # numbers that were taken in counting
    self._num_settled = 0  # ended connections that were logged or had called
    self._watch: asyncio.Task | None = None

  def start_counting(self) -> None:
    """Begins to log. The server is bound with channelz on, and is the last one that was bound."""
    try:
      servers = json.loads(cygrpc.channelz_get_servers(0))["server"]
      self._num_settled = self._num_came()
      self._server_id = max(int(server["ref"]["serverId"]) for server in servers)
    except (AttributeError, KeyError, ValueError) as error:  # counting is nothing to fail for
      _log.info("connections without a call are not counted: this gRPC reports %s", error or type(error).__name__)
      return
    self._watch = asyncio.create_task(self._run())

  def stop_counting(self) -> None:
    """Stops logging. May be called twice."""
    if self._watch is not None:
      self._watch.cancel()

  def called(self, peer: str) -> None:
    """Records a call. Args: peer: its `context.peer()`."""
    if self._server_id is not None:
      self._called.add(peer)

  async def tell_counts(self) -> None:
    """Logs one line if connections have ended without a call since the last line."""
    if num := await self.ended_without_call():
      _log.warning(
        "gRPC port: %d connections ended without a call since this was last looked at, %g s ago at least: scanners, "
        "probes of the port, HTTP/1.1, TLS where there is none or none where there is TLS; with GRPC_VERBOSITY=info "
        "and GRPC_TRACE=http_keepalive in its environment gRPC names the peer of each connection",
        num,
        INTERVAL_S,
      )

  async def ended_without_call(self) -> int:
    """Returns how many more connections have ended without a call."""
    if self._server_id is None:
      return 0
    called, num_came = frozenset(self._called), self._num_came()
    is_open = await self.open_peers()
    gone = called.difference(is_open)
    self._called -= gone
    self._num_settled += len(gone)
    # Less than nothing: a connection came between two looks, and is in the next number.
    num = max(0, num_came - sum(number < self._last for number in is_open.values()) - self._num_settled)
    self._num_settled += num
    return num

  def _num_came(self) -> int:
    """Returns the number of connections so far, from an arbitrary start."""
    if self._handshakes is not None:
      return self._handshakes()
    # A new object's number shows how many numbers were used.
    with grpc.insecure_channel(_OWN, options=(("grpc.enable_channelz", 1),)):
      channels = json.loads(cygrpc.channelz_get_top_channels(0))["channel"]
    self._last = max(int(each["ref"]["channelId"]) for each in channels)
    self._num_own += 1
    return self._last - self._num_own

  async def open_peers(self) -> dict[str, int]:
    """Returns the peers of the open connections, with their channelz numbers."""
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
    while True:
      await asyncio.sleep(INTERVAL_S)
      await self.tell_counts()
