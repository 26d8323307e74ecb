"""A TCP proxy on this machine that changes or delays what passes through it. Knows no protocol, and judges nothing.

Between two processes with TLS, a changed bit must end a connection, and must never change what either process reads.
"""

from collections.abc import Callable, Collection
import contextlib
import random
import socket
import threading
import time
from typing import Self

from tools.server_process import find_free_port

type LinkChange = Callable[[int, bool, bytes], bytes]
"""Returns what is passed on, of (connection's number from 0, whether the target has sent the bytes, the bytes)."""

# For checks, in seconds: the longest burst of changed bits, how long a piece is held back, and how long this goes on.
LONGEST_BURST_S = 0.2
HELD_S, DELAY_S = (0.02, 0.2), 1.0
_READ_BYTES = 1 << 16
_ENDS_WITHIN_S = 10.0


def pass_unchanged(number: int, is_answer: bool, data: bytes) -> bytes:
  """The change that changes nothing."""
  return data


class FaultyLink:
  """Passes each connection to its port on to a target, for the length of a block.

  Attributes:
    port: where it listens on 127.0.0.1.
    change: applied to all that passes, in threads of the connections.
    targets: the target of each connection since the start, or since `forget_connections`.
  """

  def __init__(
    self,
    target: int | Callable[[socket.socket], tuple[str, int]],
    port: int = 0,
    mark: int = 0,
  ):
    """Listens at once.

    Args:
      target: port on 127.0.0.1; or a function that returns the address for an accepted connection.
      port: where it listens; 0: a free port.
      mark: the firewall mark of its connections to the target (Linux, root); 0: none.
    """
    self.port = port or find_free_port()
    self.change: LinkChange = pass_unchanged
    self.targets: list[tuple[str, int]] = []
    self._find_target = target if callable(target) else lambda near: ("127.0.0.1", target)
    self._mark = mark
    self._listener = socket.create_server(("127.0.0.1", self.port), backlog=1024)
    self._open: set[socket.socket] = set()
    self._passing: set[threading.Thread] = set()
    self._accepting = threading.Thread(target=self._accept, name="faulty link", daemon=True)
    self._accepting.start()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    with contextlib.suppress(OSError):
      self._listener.shutdown(socket.SHUT_RDWR)
    self._accepting.join()
    self._listener.close()
    for sock in tuple(self._open):
      with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    for thread in tuple(self._passing):
      thread.join(_ENDS_WITHIN_S)

  def forget_connections(self) -> None:
    """Numbers connections from 0 again."""
    self.targets = []

  def corrupt(self, rng: random.Random, for_s: float, most_wait_s: float, ports: Collection[int] | None = None) -> int:
    """Changes one bit, at a random place, in each piece of what passes; returns the number of changed bits.

    Args:
      rng: chooses the bits.
      for_s: seconds from the first changed bit to the last one, at most; 0: changes one bit.
      most_wait_s: seconds to wait for something to pass.
      ports: of the targets to whose connections it happens; None: all.
    """
    changed, until, lock, first = 0, 0.0, threading.Lock(), threading.Event()

    def flip(number: int, is_answer: bool, data: bytes) -> bytes:
      nonlocal changed, until
      if not self._has_port(number, ports):
        return data
      with lock:
        now = time.monotonic()
        if changed and now >= until:
          return data
        until, changed = until or now + for_s, changed + 1
        place, bit = rng.randrange(len(data)), 1 << rng.randrange(8)
      first.set()
      return data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :]

    self.change = flip
    if first.wait(most_wait_s):
      time.sleep(for_s)
    self.change = pass_unchanged
    return changed

  def delay(self, each_s: float, for_s: float, ports: Collection[int] | None = None) -> int:
    """Holds back each piece of what passes; returns the number of pieces.

    Args:
      each_s: seconds for which a piece is held back.
      for_s: seconds for which it goes on.
      ports: as for `corrupt`.
    """
    held, lock = 0, threading.Lock()

    def hold(number: int, is_answer: bool, data: bytes) -> bytes:
      nonlocal held
      if not self._has_port(number, ports):
        return data
      with lock:
        held += 1
      time.sleep(each_s)
      return data

    self.change = hold
    time.sleep(for_s)
    self.change = pass_unchanged
    return held

  def _has_port(self, number: int, ports: Collection[int] | None) -> bool:
    return ports is None or (number < len(self.targets) and self.targets[number][1] in ports)

  def _accept(self) -> None:
    while True:
      try:
        near, _ = self._listener.accept()
      except OSError:
        return
      far = socket.socket()
      try:
        if self._mark:
          far.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, self._mark)
        target = self._find_target(near)
        far.connect(target)
      except OSError:
        near.close()
        far.close()
        continue
      number = len(self.targets)
      self.targets.append(target)
      self._open |= {near, far}
      passing = threading.Thread(target=self._pass_both, args=(near, far, number), daemon=True)
      self._passing.add(passing)
      passing.start()

  def _pass_both(self, near: socket.socket, far: socket.socket, number: int) -> None:
    answers = threading.Thread(target=self._pass_on, args=(far, near, number, True), daemon=True)
    answers.start()
    self._pass_on(near, far, number, False)
    answers.join()
    for sock in (near, far):
      self._open.discard(sock)
      sock.close()
    self._passing.discard(threading.current_thread())

  def _pass_on(self, source: socket.socket, sink: socket.socket, number: int, is_answer: bool) -> None:
    """Passes on what one side sends until it has sent all; a side that has broken off breaks the other one off."""
    try:
      sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
      while data := source.recv(_READ_BYTES):
        sink.sendall(self.change(number, is_answer, data))
      sink.shutdown(socket.SHUT_WR)
    except OSError:
      for sock in (source, sink):
        with contextlib.suppress(OSError):
          sock.shutdown(socket.SHUT_RDWR)
