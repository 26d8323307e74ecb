"""Publishes the prefix cache's changes over ZeroMQ, in a thread of its own. Changes no cache.

A message has three parts: the topic, a number of 8 bytes that grows by one, and a batch. A subscriber that finds a gap
sends the first number that it lacks to the replay socket, and gets the batches from there on, then the number -1.
"""

from collections import deque
from collections.abc import Iterator
import contextlib
import logging
import threading
import time

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily

from engine.errors import ConfigError
from engine.prefix_events import PrefixEventLog
from extensions.kv_events.event_encoding import encode_events

_PERIOD_S = 0.01
_MAX_EVENTS = 4096  # of a batch
_MAX_REPLAY_BYTES = 64 << 20
_MAX_UNSENT = 10_000  # batches for a subscriber that reads slowly; it finds the gap
_END = (-1).to_bytes(8, "big", signed=True)
_STOP_S = 2.0

_log = logging.getLogger(__name__)


class EventPublisher:
  """The sockets and the thread."""

  def __init__(self, endpoint: str, replay_endpoint: str):
    """Opens the sockets, before a model is loaded for nothing.

    Args:
      endpoint, replay_endpoint: as ZeroMQ writes them; an empty replay endpoint opens no such socket.

    Raises:
      ConfigError: pyzmq is not installed, or an address cannot be used.
    """
    try:
      import zmq
    except ImportError:
      raise ConfigError(
        "kv_events_endpoint needs pyzmq, which is not installed; install the extra with pip install "
        "'sluice-serve[kv-events]', or leave the flag out"
      ) from None
    self._context = zmq.Context()
    self._poll_in, self._again = zmq.POLLIN, zmq.Again
    self._replay = None
    address, flag = endpoint, "kv_events_endpoint"
    try:
      self._publishing = self._context.socket(zmq.PUB)
      self._publishing.set_hwm(_MAX_UNSENT)
      # As vLLM does: an address of all interfaces is bound, and a subscriber's own address is called.
      if "*" in endpoint or endpoint.startswith("ipc://"):
        self._publishing.bind(endpoint)
      else:
        self._publishing.connect(endpoint)
      if replay_endpoint:
        address, flag = replay_endpoint, "kv_events_replay_endpoint"
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.set_hwm(2 * _MAX_UNSENT)
        self._replay.bind(replay_endpoint)
    except zmq.ZMQError as error:
      self._context.destroy(linger=0)
      raise ConfigError(f"{flag}={address}: {error.strerror}; choose another --{flag}") from None
    self._sent: deque[tuple[int, bytes]] = deque()
    self._num_bytes = self._number = 0
    self._stops = threading.Event()
    self._log: PrefixEventLog | None = None
    self._thread: threading.Thread | None = None

  def start_publishing(self, log: PrefixEventLog, block_size: int, topic: str) -> None:
    """Starts the thread.

    Args:
      log: the events.
      block_size: tokens of a block.
      topic: the first part of each message.
    """
    self._log = log
    arguments = (log, block_size, topic.encode())
    self._thread = threading.Thread(target=self._publish, args=arguments, name="kv-events", daemon=True)
    self._thread.start()

  def stop_publishing(self) -> None:
    """Sends what is left, and closes the sockets."""
    self._stops.set()
    if self._thread is None:
      self._context.destroy(linger=0)
    else:
      self._thread.join(_STOP_S)

  def collect_metrics(self) -> Iterator[Metric]:
    """Yields the counters."""
    yield from make_event_metrics(self._number, 0 if self._log is None else self._log.num_lost)

  def _publish(self, log: PrefixEventLog, block_size: int, topic: bytes) -> None:
    try:
      while not self._stops.wait(_PERIOD_S):
        self._send_batches(log, block_size, topic)
        self._answer_replays()
      self._send_batches(log, block_size, topic)
    except Exception:
      _log.exception("KV events are published no more; requests go on")
    finally:
      self._context.destroy(linger=100)

  def _send_batches(self, log: PrefixEventLog, block_size: int, topic: bytes) -> None:
    while events := log.take_events(_MAX_EVENTS):
      batch = encode_events(events, block_size, time.time())
      self._publishing.send_multipart((topic, self._number.to_bytes(8, "big"), batch))
      self._sent.append((self._number, batch))
      self._num_bytes += len(batch)
      self._number += 1
      while self._num_bytes > _MAX_REPLAY_BYTES:
        self._num_bytes -= len(self._sent.popleft()[1])

  def _answer_replays(self) -> None:
    while self._replay is not None and self._replay.poll(0, self._poll_in):
      parts = self._replay.recv_multipart()
      if len(parts) != 3 or len(parts[2]) != 8:
        continue  # no request of this protocol
      first = int.from_bytes(parts[2], "big")
      with contextlib.suppress(self._again):
        for number, batch in self._sent:
          if number >= first:
            self._replay.send_multipart((*parts[:2], number.to_bytes(8, "big"), batch))
        self._replay.send_multipart((*parts[:2], _END, b""))


def make_event_metrics(num_batches: int, num_lost: int) -> Iterator[Metric]:
  """Yields the metrics of published batches and of lost events."""
  yield CounterMetricFamily("sluice_kv_event_batches", "Batches of KV events that were published.", num_batches)
  yield CounterMetricFamily("sluice_kv_events_lost", "KV events that were dropped, being too many.", num_lost)
