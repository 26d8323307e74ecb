"""Heartbeats between hosts, both ways, on connections and threads of their own. Plans and computes nothing.

A host that waits for its device still beats, so a long step is no failure. A host that is stopped or gone does not.
A follower's beat says which step it began last, and so shows a follower that falls behind.
"""

from collections.abc import Callable, Mapping
import select
import threading
import time

import msgspec

from extensions.multi_host.frame_channel import FrameChannel, HostLost, Kind

_BEATS_PER_LIMIT = 8
_LONGEST_PAUSE_S = 0.5


class Beat(msgspec.Struct, array_like=True, frozen=True):
  """The content of a heartbeat.

  Attributes:
    step: number of steps that this host has begun.
    age_s: seconds since it began the latest one.
    compiles: compilations since this host was ready.
  """

  step: int = 0
  age_s: float = 0.0
  compiles: int = 0


_read_beat = msgspec.json.Decoder(Beat).decode


class PulseThread:
  """Sends beats to other hosts and watches theirs.

  Attributes:
    limit_s: the longest silence of a host. During the start it is longer.
  """

  def __init__(
    self,
    channels: Mapping[int, FrameChannel],
    limit_s: float,
    make_beat: Callable[[], Beat],
    on_beat: Callable[[int, Beat, float], None],
    on_lost: Callable[[int, str], None],
    on_leave: Callable[[int], None] = lambda host: None,
  ):
    """Args, whose functions all run on this thread:

    channels: by the other host's id.
    limit_s: see the class.
    make_beat: makes what this host says.
    on_beat: called with a host's id, its beat, and the time of arrival (time.monotonic). May raise HostLost.
    on_lost: called once, with the host's id and the reason; the thread then ends.
    on_leave: called when a follower wants to stop, or the leader has drained.
    """
    self.limit_s = limit_s
    self._channels = channels
    self._make_beat, self._on_beat = make_beat, on_beat
    self._on_lost, self._on_leave = on_lost, on_leave
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

  def start_beating(self) -> None:
    """Starts the thread."""
    self._thread.start()

  def stop_beating(self) -> None:
    """Ends the thread; nothing is lost any more. Not from the thread itself."""
    self._ended.set()
    self._thread.join(2 * _LONGEST_PAUSE_S)

  def _run(self) -> None:
    for channel in self._channels.values():
      channel.set_timeout(self.limit_s)
    heard = dict.fromkeys(self._channels, time.monotonic())
    next_beat = 0.0
    host = next(iter(self._channels))
    try:
      while not self._ended.is_set():
        now = time.monotonic()
        if now >= next_beat:
          body = msgspec.json.encode(self._make_beat())
          for each, channel in self._channels.items():
            host = each
            channel.send_frame(Kind.PULSE, body)
          next_beat = now + min(_LONGEST_PAUSE_S, self.limit_s / _BEATS_PER_LIMIT)
        ready, _, _ = select.select(list(self._channels.values()), (), (), max(0.0, next_beat - time.monotonic()))
        for each, channel in self._channels.items():
          host = each
          if channel in ready:
            self._take(host, *channel.receive_frame())
            while channel.has_frame:
              self._take(host, *channel.receive_frame())
            heard[host] = time.monotonic()
          elif time.monotonic() - heard[host] > self.limit_s and not select.select((channel,), (), (), 0)[0]:
            # It looks again, because this process may have been stopped itself between its looks.
            raise HostLost(f"{channel.peer} has sent no heartbeat for {self.limit_s:g} s")
    except HostLost as error:
      if not self._ended.is_set():
        self._on_lost(host, str(error))

  def _take(self, host: int, kind: Kind, body: bytes) -> None:
    peer = self._channels[host].peer
    match kind:
      case Kind.PULSE:
        try:
          beat = _read_beat(body)
        except msgspec.MsgspecError as error:
          raise HostLost(f"{peer} sent a heartbeat that holds none ({error})") from None
        self._on_beat(host, beat, time.monotonic())
      case Kind.FAULT:
        raise HostLost(f"{peer} ends: {' '.join(body.decode(errors='replace').split()):.1000}")
      case Kind.LEAVE | Kind.BYE:
        self._on_leave(host)
      case _:
        raise HostLost(f"{peer} sent {kind.name} instead of a heartbeat")
