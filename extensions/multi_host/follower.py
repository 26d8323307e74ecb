"""A follower: a Runner behind a socket. It executes the leader's steps in their order and does nothing else.

Its loop has a thread of its own, which blocks on the socket. It reads no values: the leader does. If anything fails,
the process ends at once, because no other host can take its part in a collective operation.
"""

from collections import deque
from collections.abc import Callable
import contextlib
import threading
import time
from typing import Protocol

import msgspec

from engine.batch import Batch
from engine.errors import ConfigError
from extensions.multi_host.cluster_place import ClusterPlace
from extensions.multi_host.frame_channel import FrameChannel, HostLost, Kind
from extensions.multi_host.handshake import join_leader
from extensions.multi_host.host_facts import Facts
from extensions.multi_host.pulse import Beat, PulseThread
from extensions.multi_host.step_codec import StepDecoder
from server.host_options import ClusterSettings

# Steps whose completion the loop does not wait for, if steps overlap. The leader has read the values of older ones
# before it sends more.
_STEPS_IN_FLIGHT = 2
_POLL_S = 0.002  # without overlap the next step comes within this time after the one before it, or later than any poll


class StartedStep(Protocol):
  """A step that runs."""

  def wait(self) -> None:
    """Waits for its completion; raises what it raised."""
    ...


class StepRunner(Protocol):
  """The part of engine.device.runner.ModelRunner that a follower needs."""

  @property
  def compiles_after_ready(self) -> int:
    """Compilations since the runner was sealed."""
    ...

  def launch(self, batch: Batch) -> StartedStep:
    """See engine.batch.Runner."""
    ...


class Follower:
  """One host that follows a leader. `join_cluster`, the agreements and `follow_leader` come in this order.

  Attributes:
    num_steps: steps begun so far.
  """

  def __init__(
    self,
    place: ClusterPlace,
    settings: ClusterSettings,
    secret: bytes,
    on_lost: Callable[[str], None],
    on_stop: Callable[[], None],
  ):
    """Args:
    place, settings, secret: this host's.
    on_lost: called once, on another thread, when the leader is lost; ends the process.
    on_stop: called on another thread, if the leader is stopped before the cluster serves; ends the process.
    """
    self._place, self._settings, self._secret = place, settings, secret
    self._on_lost, self._on_stop = on_lost, on_stop
    self.num_steps = 0
    self._begun_at = time.monotonic()
    self._runner: StepRunner | None = None
    self._channels: tuple[FrameChannel, FrameChannel] | None = None  # of steps and of pulses
    self._ended = threading.Event()

  def join_cluster(self, facts: Facts) -> None:
    """Connects to the leader and waits for its verdict.

    Raises:
      ConfigError: no leader answers, it refuses this host, or the cluster does not start.
    """
    place, limit_s = self._place, self._settings.host_start_timeout_s
    self._channels = join_leader(place.host, place.leader_port, self._secret, place.host_id, limit_s)
    # The leader reports hosts that are missing after the same time; its line should arrive.
    self._steps.set_timeout(limit_s + 10)
    with self._as_config_error():
      self._steps.send_frame(Kind.FACTS, msgspec.json.encode(facts))
      self._take_verdict(self._steps.expect_frame(Kind.VERDICT))
    self._pulse = PulseThread(
      {0: self._pulses}, limit_s, self._make_beat, lambda *beat: None, self._lose, self._take_bye
    )
    self._pulse.start_beating()

  def agree_on_blocks(self, num_blocks: int) -> int:
    """Returns the smallest number of KV blocks that any host's memory holds. Raises ConfigError."""
    with self._as_config_error():
      self._steps.send_frame(Kind.BLOCKS, msgspec.json.encode(num_blocks))
      return msgspec.json.decode(self._steps.expect_frame(Kind.BLOCKS), type=int)

  def agree_on_built(self, facts: Facts) -> None:
    """Waits until all hosts are ready. Raises ConfigError if they have built different things."""
    with self._as_config_error():
      self._steps.send_frame(Kind.READY, msgspec.json.encode(facts))
      kind, body = self._steps.receive_frame()
      if kind is Kind.VERDICT:
        self._take_verdict(body)
      if kind is not Kind.GO:
        raise HostLost(self._describe_fault(kind, body))
    self._pulse.limit_s = self._settings.host_timeout_s

  def follow_leader(self, runner: StepRunner, overlap: bool) -> None:
    """Executes steps until the leader has drained.

    Args:
      runner: this host's part of the model.
      overlap: whether the leader launches a step while the one before it computes.

    Raises:
      HostLost: the leader is gone, or sent what no leader sends.
      Exception: a step failed.
    """
    self._runner = runner
    channel, decoder = self._steps, StepDecoder()
    channel.set_timeout(None)  # the pulse notices a leader that is gone
    in_flight: deque[StartedStep] = deque()
    while True:
      kind, body = channel.receive_frame()
      if kind is Kind.BYE:
        for step in in_flight:
          step.wait()
        self._ended.set()
        self._pulse.stop_beating()
        return
      if kind is not Kind.STEP and kind is not Kind.REPEAT:
        raise HostLost(self._describe_fault(kind, body))
      batch = decoder.decode_step(kind, body)
      self._begun_at = time.monotonic()
      self.num_steps += 1
      in_flight.append(runner.launch(batch))
      decoder.prepare_repetition()
      if len(in_flight) > (_STEPS_IN_FLIGHT if overlap else 0):
        in_flight.popleft().wait()
      if not overlap:
        decoder.rehearse_step()
        channel.poll_socket(_POLL_S)

  def request_stop(self) -> None:
    """Requests that the leader drains the cluster. Any thread."""
    with contextlib.suppress(HostLost):
      self._pulses.send_frame(Kind.LEAVE)

  def report_fault(self, reason: str) -> None:
    """Notifies the leader that this host ends, and why. Any thread."""
    if not self._ended.is_set() and self._channels is not None:
      self._ended.set()
      with contextlib.suppress(HostLost):
        self._pulses.send_frame(Kind.FAULT, reason.encode()[:4096])

  @property
  def _steps(self) -> FrameChannel:
    assert self._channels is not None, "join_cluster comes first"
    return self._channels[0]

  @property
  def _pulses(self) -> FrameChannel:
    assert self._channels is not None, "join_cluster comes first"
    return self._channels[1]

  def _make_beat(self) -> Beat:
    runner = self._runner
    compiles = 0 if runner is None else runner.compiles_after_ready
    return Beat(self.num_steps, time.monotonic() - self._begun_at, compiles)

  def _take_bye(self, host: int) -> None:
    if self._runner is None:
      self._on_stop()
    self._ended.set()  # else the bye among the steps ends the loop, and the leader may close this connection

  def _lose(self, host: int, reason: str) -> None:
    if not self._ended.is_set():
      self.report_fault(f"it has lost the leader: {reason}")
      self._on_lost(reason)

  def _describe_fault(self, kind: Kind, body: bytes) -> str:
    if kind is Kind.FAULT:
      return f"host 0, the leader, ends: {' '.join(body.decode(errors='replace').split()):.1000}"
    return f"host 0, the leader, sent {kind.name} where a step belongs"

  def _take_verdict(self, body: bytes) -> None:
    if body:
      raise ConfigError(body.decode(errors="replace"))

  @contextlib.contextmanager
  def _as_config_error(self):
    try:
      yield
    except (HostLost, msgspec.MsgspecError) as error:
      raise ConfigError(str(error)) from None
