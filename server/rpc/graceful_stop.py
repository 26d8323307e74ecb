"""The end of a gRPC server that leaves no caller without a reason. Knows no RPC of ours.

gRPC's own stop() ends with CANCELLED whatever it holds and has not yet handed to a handler, and whatever arrives behind
it: the very status that a client's own cancel gives, which none sends again. Nor can it stop listening without that.
So the port is closed below gRPC, all calls are answered for as long as some come, and then every connection is ended
from our side: what was written arrives, nothing that gRPC says later does, and a call that was still on its way fails
as one does whose server has gone, UNAVAILABLE.
"""

import asyncio
from collections.abc import Iterator
import contextlib
import os
import socket
import stat

import grpc

from server.rpc.call_interceptor import CallInterceptor

# Without a call for so long, all that were on their way have come.
_QUIET_S = 0.05
_POLL_S = 0.01


class DescriptorReserve:
  """Descriptors that `stop` needs, held from the start on: at the end there may be none left to have."""

  def __init__(self) -> None:
    # What nobody can know, and a copy of each socket that is looked at.
    self._held = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]

  def release(self) -> None:
    """Gives them back, for others to take."""
    while self._held:
      os.close(self._held.pop())


async def stop_grpc_server(
  server: grpc.aio.Server, port: int, calls: CallInterceptor, reserve: DescriptorReserve, limit_s: float
) -> None:
  """Stops a server that takes no new work any more.

  Args:
    server: listens on `port`, as nothing else in this process does.
    calls: refuses or answers what still arrives.
    reserve: of the server's; released.
    limit_s: for calls to end and for clients to close their side, both together.
  """
  reserve.release()
  _stop_listening(port)
  deadline = asyncio.get_running_loop().time() + limit_s
  with contextlib.suppress(TimeoutError):
    async with asyncio.timeout_at(deadline):
      await calls.wait_quiet(_QUIET_S)
  # A socket that is closed over unread bytes takes back what was written: so clients close first.
  while _hang_up(port) and asyncio.get_running_loop().time() < deadline:
    await asyncio.sleep(_POLL_S)
  await server.stop(None)


def _stop_listening(port: int) -> None:
  """Gives the port back; who connects is refused. gRPC keeps its descriptors, with a socket that nobody can know."""
  for number, listening in _sockets(port):
    if listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
      with socket.create_server(("127.0.0.1", 0)) as nowhere:
        nowhere.setblocking(False)  # which the copy shares: gRPC may be about to accept
        os.dup2(nowhere.fileno(), number, inheritable=False)


def _hang_up(port: int) -> int:
  """Sends the end of every connection behind what was written to it; returns how many are not yet closed."""
  count = 0
  for _, connection in _sockets(port):
    with contextlib.suppress(OSError):  # it has ended by itself
      connection.getpeername()
      count += 1
      connection.shutdown(socket.SHUT_WR)
  return count


def _sockets(port: int) -> Iterator[tuple[int, socket.socket]]:
  """This process's TCP sockets on a port of ours: each one's descriptor, and a copy that lasts for one iteration."""
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
