"""A TCP proxy that ends connections early, so that a client of a real server sees half a download."""

from collections.abc import Iterator
import contextlib
import socket
import threading


class CuttingProxy:
  """Passes bytes on to a port of this machine, and counts what goes to clients.

  Attributes:
    port: of the proxy.
    is_dead: every connection ends at once.
  """

  def __init__(self, target: int):
    self.is_dead = False
    self._left = 0  # until the cut; 0: none is wanted
    self._dies_at_cut = False
    self._lock = threading.Lock()
    self._target = target
    self._listener = socket.create_server(("127.0.0.1", 0))
    self.port: int = self._listener.getsockname()[1]
    threading.Thread(target=self._accept, daemon=True).start()

  def cut_after(self, count: int, *, dies: bool = False) -> None:
    """Ends the connection that passes on the last of so many bytes, and then all where it dies."""
    self._left, self._dies_at_cut = count, dies

  @property
  def has_cut(self) -> bool:
    """Whether what `cut_after` asked for has come."""
    return self._left == 0

  def close(self) -> None:
    """Takes no more connections."""
    self._listener.close()

  def _accept(self) -> None:
    with contextlib.suppress(OSError):
      while True:
        client, _ = self._listener.accept()
        if self.is_dead:
          client.close()
          continue
        server = socket.create_connection(("127.0.0.1", self._target))
        for source, sink in ((client, server), (server, client)):
          threading.Thread(target=self._pass_on, args=(source, sink, sink is client), daemon=True).start()

  def _pass_on(self, source: socket.socket, sink: socket.socket, may_cut: bool) -> None:
    with contextlib.suppress(OSError):
      while piece := source.recv(65_536):
        if self.is_dead or (may_cut and self._is_last(len(piece))):
          break
        sink.sendall(piece)
    for end in (source, sink):
      with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
      end.close()

  def _is_last(self, count: int) -> bool:
    with self._lock:
      if not self._left:
        return False
      self._left = max(0, self._left - count)
      self.is_dead = self._dies_at_cut and not self._left
      return not self._left


@contextlib.contextmanager
def running_proxy(target: int) -> Iterator[CuttingProxy]:
  """A proxy to a port of this machine."""
  proxy = CuttingProxy(target)
  yield proxy
  proxy.close()
