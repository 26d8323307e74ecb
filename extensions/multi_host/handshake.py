"""Connects followers to the leader and proves to each side that the other has the cluster's secret.

Each side sends a random number, and then an HMAC of both numbers, the follower's id and the connection's purpose. A
recorded connection therefore opens none, and the keys of its frames fit no other. Knows nothing of what follows.

A follower has two connections. STEPS carries the start and the steps. PULSE carries heartbeats, which a host that waits
for its device still sends and reads.
"""

from collections.abc import Callable
import enum
import hmac
import secrets
import socket
import struct
import threading
import time

from engine.errors import ConfigError
from extensions.multi_host.frame_channel import MAC_BYTES, FrameChannel

_VERSION = 3
_MAGIC = b"sluice-hosts"
_GREETING = struct.Struct(f"<{len(_MAGIC)}sB32s")  # magic, version, random number
_PURPOSE = struct.Struct("<IB")  # the follower's id, the channel's purpose
_OK, _WRONG_SECRET, _WRONG_VERSION = range(3)
_PEER_S = 5.0  # longest wait for the other side's next bytes in a handshake
_RETRY_S = 0.1
_MOST_HANDSHAKES = 64  # at once; connections beyond them are closed
_MOST_NAMED = 4


class Purpose(enum.IntEnum):
  """The use of a connection."""

  STEPS = 0
  PULSE = 1


class Refused(Exception):
  """The other side of a handshake does not belong to this cluster."""


def _read_exactly(sock: socket.socket, count: int) -> bytes:
  found = b""
  while len(found) < count:
    piece = sock.recv(count - len(found))
    if not piece:
      raise ConnectionAbortedError(0, "it closed the connection during the handshake")
    found += piece
  return found


def _check_greeting(greeting: bytes) -> bytes:
  """Returns the random number. Raises Refused for another protocol or version of it."""
  magic, version, number = _GREETING.unpack(greeting)
  if magic != _MAGIC:
    raise Refused("it does not speak Sluice's protocol between hosts")
  if version != _VERSION:
    raise Refused(f"it speaks version {version} of the protocol between hosts, this host {_VERSION}; run one Sluice")
  return number


def _prove(secret: bytes, role: bytes, transcript: bytes) -> bytes:
  return hmac.digest(secret, role + b"\0" + transcript, "sha256")


def greet_follower(sock: socket.socket, secret: bytes) -> tuple[int, Purpose, FrameChannel]:
  """Runs the leader's side of a handshake; returns the follower's id, the purpose and the channel.

  Raises:
    Refused, OSError: the peer is no host of this cluster.
  """
  sock.settimeout(_PEER_S)
  mine = secrets.token_bytes(32)
  sock.sendall(_GREETING.pack(_MAGIC, _VERSION, mine))
  answer = _read_exactly(sock, _GREETING.size)
  try:
    theirs = _check_greeting(answer)
  except Refused:
    sock.sendall(bytes([_WRONG_VERSION]))
    raise
  purpose = _read_exactly(sock, _PURPOSE.size)
  transcript = mine + theirs + purpose
  if not hmac.compare_digest(_prove(secret, b"follower", transcript), _read_exactly(sock, MAC_BYTES)):
    sock.sendall(bytes([_WRONG_SECRET]))
    raise Refused("it has another secret; use one --cluster_secret_file on all hosts")
  host_id, use = _PURPOSE.unpack(purpose)
  sock.sendall(bytes([_OK]) + _prove(secret, b"leader", transcript))
  keys = _prove(secret, b"leader sends", transcript), _prove(secret, b"follower sends", transcript)
  return host_id, Purpose(use), FrameChannel(sock, *keys, f"host {host_id}")


def greet_leader(sock: socket.socket, secret: bytes, host_id: int, use: Purpose) -> FrameChannel:
  """Runs a follower's side of a handshake.

  Raises:
    Refused, OSError: the peer is no leader of this cluster, or refuses this host.
  """
  sock.settimeout(_PEER_S)
  theirs = _check_greeting(_read_exactly(sock, _GREETING.size))
  mine = secrets.token_bytes(32)
  purpose = _PURPOSE.pack(host_id, use)
  transcript = theirs + mine + purpose
  sock.sendall(_GREETING.pack(_MAGIC, _VERSION, mine) + purpose + _prove(secret, b"follower", transcript))
  verdict = _read_exactly(sock, 1)[0]
  if verdict == _WRONG_SECRET:
    raise Refused("it has another secret; use one --cluster_secret_file on all hosts")
  if verdict == _WRONG_VERSION:
    raise Refused(f"it does not speak version {_VERSION} of the protocol between hosts; run one Sluice")
  if not hmac.compare_digest(_prove(secret, b"leader", transcript), _read_exactly(sock, MAC_BYTES)):
    raise Refused("it cannot prove that it has this cluster's secret; use one --cluster_secret_file on all hosts")
  keys = _prove(secret, b"follower sends", transcript), _prove(secret, b"leader sends", transcript)
  return FrameChannel(sock, *keys, "host 0, the leader,")


def open_listener(host: str, port: int) -> socket.socket:
  """Returns the leader's listening socket; binds loopback for a local name, else every address.

  Raises:
    ConfigError: the name has no address, or the port is taken.
  """
  try:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    local = address[0] in ("127.0.0.1", "::1")
    return socket.create_server((address[0] if local else "", port), family=family, backlog=_MOST_HANDSHAKES)
  except OSError as error:
    raise ConfigError(
      f"coordinator_address: cannot listen for other hosts on {host}:{port}: {error.strerror or error}; the leader "
      "needs the port of --coordinator_address for JAX and the next one for itself, so choose two free ones"
    ) from None


class Gathering:
  """The leader's wait for all followers."""

  def __init__(self, listener: socket.socket, secret: bytes, num_hosts: int, report: Callable[[str], None]):
    """Args: report: writes a line about each connection that is refused."""
    self._listener, self._secret, self._num_hosts, self._report = listener, secret, num_hosts, report
    self._changed = threading.Condition()
    self._found: dict[tuple[int, Purpose], FrameChannel] = {}
    self._refused: list[str] = []
    self._wrong = ""  # why this cluster cannot form
    self._num_handshakes = 0

  def wait(self, limit_s: float) -> dict[tuple[int, Purpose], FrameChannel]:
    """Returns a channel for each follower and purpose.

    Raises:
      ConfigError: not all came within `limit_s`, or one has an id that no host of this cluster has. Followers that
        came are still connected: see `found`.
    """
    deadline = time.monotonic() + limit_s
    self._listener.settimeout(_RETRY_S)
    wanted = {(host, use) for host in range(1, self._num_hosts) for use in Purpose}
    while not (self._wrong or wanted <= self._found.keys()):
      if time.monotonic() > deadline:
        missing = sorted({host for host, _ in wanted - self._found.keys()})
        refused = f"; refused: {'; '.join(self._refused[:_MOST_NAMED])}" if self._refused else ""
        self._wrong = (
          f"num_hosts={self._num_hosts}, but {_name_hosts(missing)} did not join within {limit_s:g} s{refused}; start "
          "the same command there, or set --host_start_timeout_s"
        )
        break
      try:
        sock, address = self._listener.accept()
      except TimeoutError:
        continue
      if self._num_handshakes >= _MOST_HANDSHAKES:
        sock.close()
        continue
      self._num_handshakes += 1
      threading.Thread(target=self._greet, args=(sock, address[0]), name="handshake", daemon=True).start()
    if self._wrong:
      raise ConfigError(self._wrong)
    return self._found

  @property
  def found(self) -> dict[tuple[int, Purpose], FrameChannel]:
    """The channels of the followers that came so far."""
    return dict(self._found)

  def _greet(self, sock: socket.socket, address: str) -> None:
    try:
      host_id, use, channel = greet_follower(sock, self._secret)
    except (Refused, OSError, ValueError) as error:
      sock.close()
      line = f"a peer at {address}: {error}"
      if line not in self._refused:
        self._refused.append(line)
        self._report(f"warning: refused {line}")
      return
    finally:
      self._num_handshakes -= 1
    with self._changed:
      is_new = (host_id, use) not in self._found
      if is_new:
        self._found[host_id, use] = channel
      if not 0 < host_id < self._num_hosts:
        self._wrong = (
          f"a host joined with --host_id={host_id}, and --num_hosts={self._num_hosts} of the leader allows 1 to "
          f"{self._num_hosts - 1}; start every host with one --num_hosts and its own --host_id"
        )
      elif not is_new:
        self._wrong = f"two hosts joined with --host_id={host_id}; give each its own"
        self._found[-1 - len(self._found), use] = channel


def join_leader(host: str, port: int, secret: bytes, host_id: int, limit_s: float) -> tuple[FrameChannel, FrameChannel]:
  """Connects to the leader; returns the channels of steps and of pulses.

  Raises:
    ConfigError: no leader answered within `limit_s`, or the one that did refuses this host.
  """
  deadline = time.monotonic() + limit_s
  channels: list[FrameChannel] = []
  while len(channels) < len(Purpose):
    sock: socket.socket | None = None
    try:
      sock = socket.create_connection((host, port), timeout=min(_PEER_S, limit_s))
      channels.append(greet_leader(sock, secret, host_id, Purpose(len(channels))))
    except (OSError, Refused) as error:
      for opened in channels if sock is None else (sock, *channels):
        opened.close()
      if isinstance(error, Refused):
        raise ConfigError(f"the peer at {host}:{port} is no leader for this host: {error}") from None
      if channels or time.monotonic() > deadline:
        raise ConfigError(
          f"no leader (host 0) answers at {host}:{port} within {limit_s:g} s ({error.strerror or error}); start it "
          "with the same --coordinator_address, or set --host_start_timeout_s"
        ) from None
      time.sleep(_RETRY_S)  # it has not started, or a proxy before it answers
  return channels[0], channels[1]


def _name_hosts(ids: list[int]) -> str:
  named = ", ".join(map(str, ids[:_MOST_NAMED])) + (f" and {len(ids) - _MOST_NAMED} more" if ids[_MOST_NAMED:] else "")
  return f"host{'s' if len(ids) > 1 else ''} {named}"
