"""The leader's side of a cluster: it gathers followers, sends them each step, and ends with them. May not compute.

Only the leader has clients, a clock and a scheduler. Its engine calls a LeadingRunner, which sends the Batch to every
follower before it launches the step here.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
import contextlib
import pathlib
import threading
import time
from typing import Any

import msgspec
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from engine.batch import Batch, Launched, Runner
from engine.errors import ConfigError
from extensions.multi_host.cluster_place import ClusterPlace, read_secret
from extensions.multi_host.frame_channel import FrameChannel, HostLost, Kind
from extensions.multi_host.handshake import Gathering, Purpose, open_listener
from extensions.multi_host.host_facts import Facts, collect_facts, compare_facts, read_facts
from extensions.multi_host.pulse import Beat, PulseThread
from extensions.multi_host.step_codec import StepEncoder
from server.host_options import ClusterSettings
from server.lifecycle.lifetime import Lifetime

_REMEMBERED_STEPS = 4096  # whose times of sending are kept; a power of two
_REASON_S = 1.0
_FAREWELL_S = 2.0  # the longest wait for followers to end after a drain


class LeadingRunner:
  """A Runner that sends each step to all followers and then launches it.

  Attributes:
    num_steps: steps sent so far.
    broadcast_s: seconds spent on encoding and sending them.
  """

  def __init__(self, inner: Runner, channels: tuple[FrameChannel, ...]):
    """Args: channels: of steps, one a follower."""
    self._inner, self._channels = inner, channels
    self._encoder = StepEncoder()
    self._sent = [0.0] * _REMEMBERED_STEPS
    self.num_steps = 0
    self.broadcast_s = 0.0

  def launch(self, batch: Batch) -> Launched:
    """See engine.batch.Runner. Raises HostLost if a follower is gone."""
    began = time.monotonic()
    kind, body = self._encoder.encode_step(batch)
    for channel in self._channels:
      channel.send_frame(kind, body)
    now = time.monotonic()
    self.num_steps += 1
    self._sent[self.num_steps % _REMEMBERED_STEPS] = now
    self.broadcast_s += now - began
    return self._inner.launch(batch)

  def sent_at(self, step: int) -> float | None:
    """Returns when the step of this number (from 1) was sent, on time.monotonic; None if that is forgotten."""
    return self._sent[step % _REMEMBERED_STEPS] if 0 < step > self.num_steps - _REMEMBERED_STEPS + 1 else None


class Leader:
  """The cluster as its leader sees it. All methods block; the pulse has its own thread.

  Attributes:
    place: this host's.
  """

  def __init__(
    self,
    place: ClusterPlace,
    settings: ClusterSettings,
    secret: bytes,
    model_dir: pathlib.Path,
    report: Callable[[str], None],
    on_lost: Callable[[HostLost], None],
    on_leave: Callable[[], None],
  ):
    """Binds the ports.

    Args:
      place, settings, secret, model_dir: this host's.
      report: writes a line.
      on_lost: called once, on another thread, when a follower is lost.
      on_leave: called, on another thread, when a follower has a SIGTERM.

    Raises:
      ConfigError: a port is taken.
    """
    self.place, self._settings, self._model_dir = place, settings, model_dir
    self._report, self._on_lost, self._on_leave = report, on_lost, on_leave
    open_listener(place.host, place.port).close()  # JAX's coordinator takes it later, and its own error names no flag
    self._listener = open_listener(place.host, place.leader_port)
    self._gathering = Gathering(self._listener, secret, place.num_hosts, report)
    self._steps: dict[int, FrameChannel] = {}
    self._pulse: PulseThread | None = None
    self._beats: dict[int, Beat] = {}
    self._lag_s: dict[int, float] = {}
    self._pending: dict[int, tuple[int, float]] = {}  # by host: a step it has not begun, and when it was sent
    self._runner: LeadingRunner | None = None
    self._lock = threading.Lock()
    self._is_over = False
    self._lost_reason = ""
    self._lost = threading.Event()

  @property
  def start_timeout_s(self) -> float:
    """The longest wait for each common part of the start."""
    return self._settings.host_start_timeout_s

  # The start, in this order.

  def gather_hosts(self, settings: Mapping[str, Any]) -> None:
    """Waits for all followers and compares versions, models and settings.

    Args:
      settings: the engine's settings, by flag.

    Raises:
      ConfigError: not all came, or they do not agree. Followers that came have the same line.
    """
    limit_s = self.start_timeout_s
    facts = collect_facts(self._model_dir, self.place.num_hosts, settings)
    self._report(f"hosts     waiting for {self.place.num_hosts - 1} more at port {self.place.leader_port}")
    try:
      found = self._gathering.wait(limit_s)
      self._steps = {host: channel for (host, use), channel in sorted(found.items()) if use is Purpose.STEPS}
      theirs = {}
      for host, channel in self._steps.items():
        channel.set_timeout(limit_s)
        try:
          theirs[host] = read_facts(channel.expect_frame(Kind.FACTS))
        except msgspec.MsgspecError as error:
          raise HostLost(f"{channel.peer} sent facts that hold none ({error})") from None
      self._refuse_difference(compare_facts(facts, theirs))
    except (ConfigError, HostLost) as error:
      self._send_verdict(str(error))
      raise ConfigError(str(error)) from None
    finally:
      self._listener.close()
    self._send_verdict("")
    pulses = {host: channel for (host, use), channel in sorted(found.items()) if use is Purpose.PULSE}
    self._pulse = PulseThread(pulses, limit_s, lambda: Beat(), self._take_beat, self._lose, self._take_leave)
    self._pulse.start_beating()

  def agree_on_blocks(self, num_blocks: int) -> int:
    """Returns the smallest number of KV blocks that any host's memory holds. Raises ConfigError if a host is gone."""
    with self._as_config_error():
      least = min([num_blocks, *(_read_number(channel.expect_frame(Kind.BLOCKS)) for channel in self._steps.values())])
      for channel in self._steps.values():
        channel.send_frame(Kind.BLOCKS, msgspec.json.encode(least))
    return least

  def agree_on_built(self, facts: Facts) -> None:
    """Waits until all followers are ready and compares what they have built.

    Raises:
      ConfigError: they differ, or a host is gone.
    """
    with self._as_config_error():
      theirs = {host: read_facts(channel.expect_frame(Kind.READY)) for host, channel in self._steps.items()}
      try:
        self._refuse_difference(compare_facts(facts, theirs))
      except ConfigError as error:
        self._send_verdict(str(error))
        raise
      for channel in self._steps.values():
        channel.set_timeout(self._settings.host_timeout_s)
        channel.send_frame(Kind.GO)
    assert self._pulse is not None, "gather_hosts comes first"
    self._pulse.limit_s = self._settings.host_timeout_s

  def lead(self, runner: Runner) -> LeadingRunner:
    """Returns the runner for the leader's engine."""
    self._runner = LeadingRunner(runner, tuple(self._steps.values()))
    return self._runner

  # The end.

  def dismiss_hosts(self) -> None:
    """Ends the followers after a drain and waits for them, a few seconds at most."""
    if not self._end():
      return
    for channel in self._gathering.found.values():  # on both: a follower that still starts reads no steps
      with contextlib.suppress(HostLost):
        channel.send_frame(Kind.BYE)
    for channel in self._steps.values():
      channel.wait_closed(_FAREWELL_S)

  def report_fault(self, reason: str) -> None:
    """Notifies the followers that this host ends, and why."""
    if self._end():
      body = reason.encode()[:4096]
      for channel in self._steps.values():
        with contextlib.suppress(HostLost):
          channel.send_frame(Kind.FAULT, body)

  def _end(self) -> bool:
    """Stops watching; returns whether the cluster was whole until now."""
    with self._lock:
      was_whole, self._is_over = not self._is_over, True
    if was_whole and self._pulse is not None:
      self._pulse.stop_beating()
    return was_whole

  def collect_metrics(self) -> Iterator[Metric]:
    """Yields the metrics of the cluster."""
    runner = self._runner
    yield from make_metrics(
      self.place.num_hosts,
      0.0 if runner is None else runner.broadcast_s,
      0 if runner is None else runner.num_steps,
      dict(self._lag_s),
      {host: beat.compiles for host, beat in dict(self._beats).items()},
    )

  # On the pulse's thread.

  def _take_beat(self, host: int, beat: Beat, now: float) -> None:
    self._beats[host] = beat
    runner = self._runner
    if runner is None:
      return
    sent = runner.sent_at(beat.step)
    if sent is not None:
      self._lag_s[host] = max(0.0, now - beat.age_s - sent)
    pending = self._pending.get(host)
    if pending is not None and beat.step < pending[0]:
      if now - pending[1] > self._settings.host_timeout_s:
        raise HostLost(f"host {host} has not begun step {pending[0]} in {now - pending[1]:.1f} s; it falls behind")
      return
    step = runner.num_steps
    if step > beat.step:
      self._pending[host] = step, runner.sent_at(step) or now
    else:
      self._pending.pop(host, None)

  def _take_leave(self, host: int) -> None:
    self._report(f"host {host} has been stopped: the whole cluster drains")
    self._on_leave()

  def _lose(self, host: int, reason: str) -> None:
    with self._lock:
      if self._is_over:
        return
      self._is_over = True
    self._lost_reason = f"host {host} is lost: {reason}"
    self._lost.set()
    self._report(f"error: host {host} of {self.place.num_hosts} is lost, so all hosts end: {reason}")
    self._on_lost(HostLost(reason))

  def _refuse_difference(self, line: str) -> None:
    if line:
      raise ConfigError(line)

  def _send_verdict(self, line: str) -> None:
    for (_, use), channel in self._gathering.found.items():
      if use is Purpose.STEPS:
        with contextlib.suppress(HostLost):
          channel.send_frame(Kind.VERDICT, line.encode())

  @contextlib.contextmanager
  def _as_config_error(self) -> Iterator[None]:
    try:
      yield
    except (HostLost, msgspec.MsgspecError) as error:
      self._lost.wait(_REASON_S)  # a host that ends says why on its other connection
      raise ConfigError(self._lost_reason or str(error)) from None


def make_leader(
  place: ClusterPlace, settings: ClusterSettings, model: str, report: Callable[[str], None], host: Lifetime
) -> Leader:
  """Returns a leader that ends `host` if a follower is lost, and drains it if a follower is stopped.

  Raises:
    ConfigError: the secret cannot be read, or a port is taken.
  """
  loop = asyncio.get_running_loop()

  def drain() -> None:
    if not host.stopping:
      host.request_stop()

  secret = read_secret(settings.cluster_secret_file)

  def on_leave() -> None:
    loop.call_soon_threadsafe(drain)

  return Leader(place, settings, secret, pathlib.Path(model), report, host.fail, on_leave)


def make_metrics(
  num_hosts: int, broadcast_s: float, num_steps: int, lag_s: dict[int, float], compiles: dict[int, int]
) -> Iterator[Metric]:
  """Yields the metrics of a cluster; the last two arguments are by follower."""
  yield GaugeMetricFamily("sluice_hosts", "Hosts that compute the model together.", num_hosts)
  yield CounterMetricFamily(
    "sluice_host_broadcast_seconds", "Writing and sending steps to the other hosts.", broadcast_s
  )
  yield CounterMetricFamily("sluice_host_broadcast_steps", "Steps sent to the other hosts.", num_steps)
  lags = GaugeMetricFamily(
    "sluice_host_lag_seconds",
    "From sending a step until the host began it, with its heartbeat's time on the way; of the latest heartbeat.",
    labels=["host"],
  )
  made = CounterMetricFamily("sluice_host_compiles", "Compilations of a host since it was ready.", labels=["host"])
  for host, value in lag_s.items():
    lags.add_metric([str(host)], value)
  for host, value in compiles.items():
    made.add_metric([str(host)], value)
  yield lags
  yield made


def _read_number(body: bytes) -> int:
  return msgspec.json.decode(body, type=int)
