"""Frames between hosts: nothing that is changed, dropped, repeated, reordered or too long passes as a frame."""

import contextlib
import socket
import struct

import pytest

from extensions.multi_host.frame_channel import MAX_FRAME_BYTES, FrameChannel, HostLost, Kind

KEYS = b"a" * 32, b"b" * 32


def record(*frames: tuple[Kind, bytes]) -> list[bytes]:
  """The bytes of each frame as one side writes it."""
  mine, theirs = socket.socketpair()
  with mine, theirs:
    sender = FrameChannel(FakeTcp(mine), *KEYS, "the other host")
    found = []
    for kind, body in frames:
      sender.send_frame(kind, body)
      found.append(theirs.recv(1 << 16))
    return found


class FakeTcp:
  """A socket of a pair, which has no TCP_NODELAY to set."""

  def __init__(self, sock: socket.socket):
    self._socket = sock

  def setsockopt(self, *options: int) -> None:
    assert options == (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

  def __getattr__(self, name: str):
    return getattr(self._socket, name)


@contextlib.contextmanager
def receiver(sent: bytes):
  mine, theirs = socket.socketpair()
  with mine, theirs:
    channel = FrameChannel(FakeTcp(theirs), KEYS[1], KEYS[0], "the other host")
    channel.set_timeout(5)
    mine.sendall(sent)
    mine.shutdown(socket.SHUT_WR)
    yield channel


def test_frames_arrive_in_order():
  sent = record((Kind.STEP, b"one"), (Kind.REPEAT, b""), (Kind.BYE, b"x" * 9000))
  with receiver(b"".join(sent)) as channel:
    assert [channel.receive_frame() for _ in range(3)] == [
      (Kind.STEP, b"one"),
      (Kind.REPEAT, b""),
      (Kind.BYE, b"x" * 9000),
    ]
    with pytest.raises(HostLost, match="has closed the connection"):
      channel.receive_frame()


def test_every_changed_byte_is_noticed():
  (frame,) = record((Kind.STEP, b"some body"))
  for position in range(len(frame)):
    changed = bytearray(frame)
    changed[position] ^= 1 << position % 8
    with receiver(bytes(changed)) as channel, pytest.raises(HostLost):
      channel.receive_frame()


@pytest.mark.parametrize("order", [(1,), (0, 0), (0, 2), (0, 2, 1)])
def test_dropped_repeated_and_reordered_frames_are_noticed(order: tuple[int, ...]):
  frames = record(*((Kind.STEP, bytes([number])) for number in range(3)))
  with receiver(b"".join(frames[number] for number in order)) as channel, pytest.raises(HostLost, match="instead of"):
    for _ in order:
      channel.receive_frame()


def test_frames_of_the_other_direction_are_noticed():
  (frame,) = record((Kind.PULSE, b"[]"))
  mine, theirs = socket.socketpair()
  with mine, theirs:
    mine.sendall(frame)
    with pytest.raises(HostLost, match="its MAC"):
      FrameChannel(FakeTcp(theirs), *KEYS, "the other host").receive_frame()


def test_a_length_beyond_the_limit_is_refused_before_it_is_read():
  head = struct.pack("<IBQ", MAX_FRAME_BYTES + 1, Kind.STEP, 0)
  with receiver(head) as channel, pytest.raises(HostLost, match=f"the limit of {MAX_FRAME_BYTES}"):
    channel.receive_frame()


def test_silence_ends_a_wait():
  mine, theirs = socket.socketpair()
  with mine, theirs:
    channel = FrameChannel(FakeTcp(theirs), *KEYS, "the other host")
    channel.set_timeout(0.05)
    with pytest.raises(HostLost, match="sent nothing for 0.05 s"):
      channel.receive_frame()


def test_a_frame_larger_than_the_buffer_arrives_between_others():
  mine, theirs = socket.socketpair()
  with mine, theirs:
    sender = FrameChannel(FakeTcp(mine), *KEYS, "the other host")
    channel = FrameChannel(FakeTcp(theirs), KEYS[1], KEYS[0], "the other host")
    channel.set_timeout(5)
    frames = [(Kind.STEP, b"one"), (Kind.STEP, bytes(range(256)) * 300), (Kind.REPEAT, b"two")]
    for kind, body in frames:
      sender.send_frame(kind, body)
    assert [channel.receive_frame() for _ in frames] == frames


def test_polls_read_what_has_come_and_wait_for_nothing_else():
  """Half of a frame, its rest with the next frame, then the end; a poll that finds nothing changes nothing."""
  sent = record((Kind.STEP, b"one"), (Kind.REPEAT, b"two"))
  mine, theirs = socket.socketpair()
  with mine, theirs:
    channel = FrameChannel(FakeTcp(theirs), KEYS[1], KEYS[0], "the other host")
    channel.set_timeout(None)
    channel.poll_socket(0.0)
    channel.poll_socket(0.001)
    assert not channel.has_frame
    mine.sendall(sent[0][:7])
    channel.poll_socket(5.0)
    mine.sendall(sent[0][7:] + sent[1])
    assert channel.has_frame and channel.receive_frame() == (Kind.STEP, b"one")
    channel.poll_socket(5.0)
    assert channel.receive_frame() == (Kind.REPEAT, b"two") and not channel.has_frame
    mine.shutdown(socket.SHUT_WR)
    with pytest.raises(HostLost, match="has closed the connection"):
      channel.poll_socket(5.0)
