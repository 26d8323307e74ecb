"""A link between two real sockets: what it changes, what it holds back, how its ends close, and what TLS finds."""

import contextlib
import random
import socket
import ssl
import threading
import time

import pytest

from tools.certificates import Authority
from tools.faulty_link import FaultyLink, pass_unchanged


def answer_all(listener: socket.socket, tls: ssl.SSLContext | None) -> None:
  """Sends back what each connection has sent, once the client has closed its half."""
  while True:
    try:
      sock, _ = listener.accept()
      sock.settimeout(30)
      with tls.wrap_socket(sock, server_side=True) if tls else sock as near:
        parts = iter(lambda: near.recv(4096), b"")
        near.sendall(near.recv(4096) if tls else b"".join(parts))
    except (OSError, ssl.SSLError):
      if listener.fileno() < 0:
        return


@contextlib.contextmanager
def echo(tls: ssl.SSLContext | None = None):
  with socket.create_server(("127.0.0.1", 0)) as listener:
    threading.Thread(target=answer_all, args=(listener, tls), daemon=True).start()
    with FaultyLink(listener.getsockname()[1]) as link:
      yield link


def ask(link: FaultyLink, data: bytes) -> bytes:
  with socket.create_connection(("127.0.0.1", link.port), timeout=30) as sock:
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
    return b"".join(iter(lambda: sock.recv(4096), b""))


def read_end(sock: socket.socket) -> bytes:
  try:
    return sock.recv(1)
  except ConnectionResetError:
    return b""


def count_bits(one: bytes, other: bytes) -> int:
  return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))


def test_bits_change_only_while_they_shall():
  data = bytes(range(256)) * 4
  with echo() as link:
    assert ask(link, data) == data
    counts = []
    worker = threading.Thread(target=lambda: counts.append(link.corrupt(random.Random(1), 0.0, 30.0)))
    worker.start()
    while link.change is pass_unchanged:
      time.sleep(0.01)
    assert count_bits(ask(link, data), data) == 1
    worker.join()
    assert counts == [1] and ask(link, data) == data and len(link.targets) == 3
    assert link.corrupt(random.Random(1), 0.0, 0.05) == 0, "nothing passed"


def test_bits_change_on_connections_to_the_given_ports_alone():
  data = bytes(range(256))
  with echo() as link:
    port = link.targets[0][1] if ask(link, data) == data else 0
    for ports, changed in (({port}, 1), ({port + 1}, 0)):
      counts = []
      worker = threading.Thread(target=lambda: counts.append(link.corrupt(random.Random(1), 0.0, 1.0, ports)))  # noqa: B023
      worker.start()
      while link.change is pass_unchanged:
        time.sleep(0.01)
      assert count_bits(ask(link, data), data) == changed
      worker.join()
      assert counts == [changed]


def test_a_delay_holds_pieces_back_and_loses_none():
  with echo() as link:
    counts = []
    worker = threading.Thread(target=lambda: counts.append(link.delay(0.3, 0.2)))
    worker.start()
    while link.change is pass_unchanged:
      time.sleep(0.01)
    began = time.monotonic()
    assert ask(link, b"x" * 1000) == b"x" * 1000
    assert time.monotonic() - began >= 0.3
    worker.join()
    assert counts[0] >= 1


def test_a_broken_end_breaks_the_other():
  with echo() as link:
    sock = socket.create_connection(("127.0.0.1", link.port), timeout=30)
    sock.sendall(b"x")
  assert read_end(sock) == b"", "the link has ended"
  sock.close()
  with FaultyLink(1) as link, socket.create_connection(("127.0.0.1", link.port), timeout=30) as sock:
    assert read_end(sock) == b"", "nobody listens on port 1"


def test_tls_finds_each_changed_bit(tmp_path):
  authority = Authority(tmp_path)
  server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
  server.load_cert_chain(*authority.issue("server"))
  client = ssl.create_default_context(cafile=str(authority.file))
  rng = random.Random(2)
  with echo(server) as link:
    for is_answer in (False, True):
      link.change = pass_unchanged
      with (
        socket.create_connection(("127.0.0.1", link.port), timeout=30) as sock,
        client.wrap_socket(sock, server_hostname="127.0.0.1") as near,
      ):

        def flip(number: int, from_target: bool, data: bytes) -> bytes:
          if from_target != is_answer:  # noqa: B023
            return data
          place = rng.randrange(5, len(data))  # after the record's header, whose length would be awaited
          return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

        link.change = flip
        near.sendall(b"a token")
        with pytest.raises((ssl.SSLError, ConnectionError)):
          assert near.recv(100) == b"", "the server has found the bit"
          raise ConnectionError
