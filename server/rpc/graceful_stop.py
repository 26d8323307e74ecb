"""Stops a gRPC server such that every caller gets a reason. Knows no RPC.

gRPC's own stop() ends calls that no handler has seen yet with CANCELLED. Clients take that status for their own cancel
and never retry it. gRPC also cannot stop listening without it. So Sluice closes the port underneath gRPC, answers calls
while they arrive, and then ends every connection from the server's side. Bytes written before that arrive; a call that
was still on its way fails with UNAVAILABLE, as if the server had gone.
"""

import asyncio
from collections.abc import Iterator
import contextlib
import os
import socket
import stat

import grpc

from server.rpc.call_interceptor import CallInterceptor

# After that many seconds without a call, no call is on its way.
_QUIET_S = 0.05
_POLL_S = 0.01


class DescriptorReserve:
  """Holds the descriptors that the stop needs, since the process may have none left by then."""

  def __init__(self) -> None:
    # One for a socket on an address that no client knows, one for a copy of each inspected socket.
    self._held = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]

  def release(self) -> None:
    """Closes them, so that others can be opened."""
    while self._held:
      os.close(self._held.pop())


async def stop_grpc_server(
  server: grpc.aio.Server, port: int, calls: CallInterceptor, reserve: DescriptorReserve, limit_s: float
) -> None:
  """Stops a server that accepts no new work.

  Args:
    server: the only listener on `port` in this process.
    calls: the interceptor, which answers or refuses calls that still arrive.
    reserve: the server's descriptors; released here.
    limit_s: seconds for calls to end and for clients to close their connections, together.
  """
  reserve.release()
  _stop_listening(port)
  deadline = asyncio.get_running_loop().time() + limit_s
  with contextlib.suppress(TimeoutError):
    async with asyncio.timeout_at(deadline):
      await calls.wait_quiet(_QUIET_S)
  # Closing a socket with unread bytes resets it and loses written bytes, so clients must close first.
  while _hang_up(port) and asyncio.get_running_loop().time() < deadline:
    await asyncio.sleep(_POLL_S)
  await server.stop(None)


def _stop_listening(port: int) -> None:
  """Closes the port: new connections fail. gRPC keeps its descriptor, now of a socket that no client can reach."""
  for number, listening in _sockets(port):
    if listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
      with socket.create_server(("127.0.0.1", 0)) as nowhere:
        nowhere.setblocking(False)  # which the copy shares: gRPC may be about to accept
        os.dup2(nowhere.fileno(), number, inheritable=False)


def _hang_up(port: int) -> int:
  """Half-closes every connection after its written bytes; returns how many are still open."""
  count = 0
  for _, connection in _sockets(port):
    with contextlib.suppress(OSError):  # it has ended by itself
      connection.getpeername()
      count += 1
      connection.shutdown(socket.SHUT_WR)
  return count


def _sockets(port: int) -> Iterator[tuple[int, socket.socket]]:
  """Yields this process's TCP sockets on the port: descriptor, and a copy that is valid for one iteration."""
  for name in os.listdir("/dev/fd"):
    number = int(name)
    try:
      if not stat.S_ISSOCK(os.fstat(number).st_mode):
        continue
      copy = socket.socket(fileno=os.dup(number))
    except OSError:  # it has gone
      continue
    with copy:
      is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
      if is_tcp and copy.getsockname()[1] == port:
        yield number, copy
