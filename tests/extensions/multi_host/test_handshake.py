"""Handshakes over real sockets: who may join, who may not, and what each side says."""

import contextlib
import socket
import threading

import pytest

from engine.errors import ConfigError
from extensions.multi_host.frame_channel import Kind
from extensions.multi_host.handshake import Gathering, Purpose, Refused, greet_leader, join_leader, open_listener

SECRET, OTHER = b"s" * 32, b"t" * 32


class Leading:
  """A leader that waits in a thread."""

  def __init__(self, num_hosts: int, limit_s: float):
    self.lines: list[str] = []
    self._listener = open_listener("127.0.0.1", 0)
    self.port = self._listener.getsockname()[1]
    self.gathering = Gathering(self._listener, SECRET, num_hosts, self.lines.append)
    self.error: ConfigError | None = None
    self._thread = threading.Thread(target=self._wait, args=(limit_s,))
    self._thread.start()

  def _wait(self, limit_s: float) -> None:
    try:
      self.gathering.wait(limit_s)
    except ConfigError as error:
      self.error = error

  def join(self) -> None:
    self._thread.join(30)
    assert not self._thread.is_alive()
    self._listener.close()

  def close(self) -> None:
    for channel in self.gathering.found.values():
      channel.close()


@pytest.fixture
def lead():
  """Starts leaders; closes what they hold."""
  started: list[Leading] = []

  def start(num_hosts: int, limit_s: float) -> Leading:
    started.append(Leading(num_hosts, limit_s))
    return started[-1]

  yield start
  for leading in started:
    leading.close()


def test_followers_join_and_frames_pass_both_ways(lead):
  leading = lead(3, 30)
  joined = [join_leader("127.0.0.1", leading.port, SECRET, host, 10) for host in (2, 1)]
  leading.join()
  assert leading.error is None and len(leading.gathering.found) == 4
  for host, channels in zip((2, 1), joined, strict=True):
    for use, mine in zip(Purpose, channels, strict=True):
      theirs = leading.gathering.found[host, use]
      theirs.send_frame(Kind.STEP, b"down")
      mine.send_frame(Kind.PULSE, b"up")
      assert mine.receive_frame() == (Kind.STEP, b"down") and theirs.receive_frame() == (Kind.PULSE, b"up")
      mine.close()


def test_a_wrong_secret_is_named_on_both_sides(lead):
  leading = lead(2, 1)
  with pytest.raises(ConfigError, match="another secret; use one --cluster_secret_file"):
    join_leader("127.0.0.1", leading.port, OTHER, 1, 10)
  leading.join()
  assert "host 1 did not join within 1 s" in str(leading.error) and "another secret" in str(leading.error)
  assert len(leading.lines) == 1 and "127.0.0.1: it has another secret" in leading.lines[0]


def test_a_recorded_handshake_opens_no_connection(lead):
  leading = lead(2, 2)
  recorded = Recorder(leading.port)
  channel = greet_leader(recorded, SECRET, 1, Purpose.STEPS)
  channel.send_frame(Kind.FACTS, b"{}")
  channel.close()
  with socket.create_connection(("127.0.0.1", leading.port)) as sock:
    sock.settimeout(5)
    sock.sendall(b"".join(recorded.sent))
    answer = b""
    with contextlib.suppress(ConnectionError):
      while piece := sock.recv(4096):
        answer += piece
  leading.join()
  assert len(answer) == 46, "a greeting and a refusal, no proof"
  assert answer[-1] == 1 and "another secret" in leading.lines[0]


class Recorder:
  """A connection whose bytes are kept."""

  def __init__(self, port: int):
    self._socket = socket.create_connection(("127.0.0.1", port))
    self.sent: list[bytes] = []

  def sendall(self, data: bytes) -> None:
    self.sent.append(data)
    self._socket.sendall(data)

  def __getattr__(self, name: str):
    return getattr(self._socket, name)


def test_a_leader_without_the_secret_is_refused():
  """It answers as a leader does, but cannot prove that it has the secret."""
  with socket.create_server(("127.0.0.1", 0)) as listener:

    def answer() -> None:
      sock, _ = listener.accept()
      with sock:
        sock.sendall(b"sluice-hosts" + bytes([3]) + bytes(32))
        sock.recv(4096)
        sock.sendall(bytes(33))

    thread = threading.Thread(target=answer)
    thread.start()
    with socket.create_connection(listener.getsockname()) as sock, pytest.raises(Refused, match="cannot prove"):
      greet_leader(sock, SECRET, 1, Purpose.STEPS)
    thread.join()


def test_junk_and_silence_do_not_end_a_start(lead):
  leading = lead(2, 30)
  junk = [socket.create_connection(("127.0.0.1", leading.port)) for _ in range(3)]
  junk[0].sendall(b"GET / HTTP/1.1\r\nHost: sluice-hosts.example\r\nAccept: everything\r\n\r\n")
  junk[1].sendall(b"sluice-hosts" + bytes([9]) + bytes(32))
  channels = join_leader("127.0.0.1", leading.port, SECRET, 1, 10)
  leading.join()
  assert leading.error is None and len(channels) == 2
  for sock in (*junk, *channels):
    sock.close()


@pytest.mark.parametrize(("host", "problem"), [(2, "--host_id=2, and --num_hosts=2"), (0, "--host_id=0")])
def test_an_id_that_no_host_has_ends_the_start(lead, host: int, problem: str):
  leading = lead(2, 30)
  greet_leader(socket.create_connection(("127.0.0.1", leading.port)), SECRET, host, Purpose.STEPS).close()
  leading.join()
  assert problem in str(leading.error)


def test_two_hosts_of_one_id_end_the_start(lead):
  leading = lead(3, 30)
  for _ in range(2):
    greet_leader(socket.create_connection(("127.0.0.1", leading.port)), SECRET, 1, Purpose.STEPS).close()
  leading.join()
  assert "two hosts joined with --host_id=1" in str(leading.error)


def test_a_leader_that_does_not_come_is_named():
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
  with pytest.raises(ConfigError, match=rf"no leader \(host 0\) answers at 127.0.0.1:{port} within 1 s"):
    join_leader("127.0.0.1", port, SECRET, 1, 1)


def test_a_port_that_is_taken_is_named():
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    with pytest.raises(ConfigError, match=rf"cannot listen for other hosts on 127.0.0.1:{port}"):
      open_listener("127.0.0.1", port)
