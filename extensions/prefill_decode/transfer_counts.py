"""Counts what a prefill or a decode server transfers, and makes the Prometheus metrics of it."""

from collections.abc import Iterator
import dataclasses
import enum

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily


class Recompute(enum.StrEnum):
  """Why a decode server computed a prompt that a prefill server should have computed."""

  UNREACHABLE = "unreachable"  # no connection, or none that answers
  REFUSED = "refused"  # the peer is overloaded, drains, or does not know the secret
  MISMATCH = "mismatch"  # another model, precision, layout or version
  LATE = "late"  # the time limit passed
  CORRUPT = "corrupt"  # a piece is missing, or its digest is wrong
  NO_CAPACITY = "no_capacity"  # too few free blocks here
  ERROR = "error"  # anything else; the log has it


class Transport(enum.StrEnum):
  """How a piece came."""

  SHARED_MEMORY = "shared_memory"
  GRPC = "grpc"
  JAX = "jax"


@dataclasses.dataclass
class TransferCounts:
  """Counters since the start. Belongs to the event loop.

  Attributes:
    num_fetched: prompts whose prefix came from another server.
    num_pieces: pieces that arrived, by transport.
    num_bytes, seconds: their bytes, and the time from the peer's offer to the last piece in the pool.
    num_hung: pulls over JAX's transfer server that did not end in time.
    recomputed: prompts computed here after all, by reason.
    num_leases, num_expired, num_refused: leases given; those that nobody released; prompts refused for want of memory.
    num_leased_pieces: pieces that leases hold now.
  """

  num_fetched: int = 0
  num_pieces: dict[Transport, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(Transport, 0))
  num_bytes: int = 0
  seconds: float = 0.0
  num_hung: int = 0
  recomputed: dict[Recompute, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(Recompute, 0))
  num_leases: int = 0
  num_expired: int = 0
  num_refused: int = 0
  num_leased_pieces: int = 0

  def collect_metrics(self) -> Iterator[Metric]:
    """Yields the metrics of both roles."""
    counter = CounterMetricFamily
    yield counter("sluice_transfer_prompts", "Prompts whose KV a prefill server computed.", self.num_fetched)
    pieces = counter("sluice_transfer_pieces", "Pieces of KV blocks that arrived intact.", labels=["transport"])
    for transport, count in self.num_pieces.items():
      pieces.add_metric([transport.value], count)
    yield pieces
    yield counter("sluice_transfer_bytes", "Bytes of these pieces.", self.num_bytes)
    yield counter(
      "sluice_transfer_seconds", "Time from a prefill server's offer to its last piece in the pool.", self.seconds
    )
    yield counter("sluice_transfer_hung_pulls", "Pulls of --kv_transport=jax that did not end in time.", self.num_hung)
    recomputed = counter(
      "sluice_transfer_recomputed", "Prompts that a decode server computed itself after all.", labels=["reason"]
    )
    for reason, count in self.recomputed.items():
      recomputed.add_metric([reason.value], count)
    yield recomputed
    yield counter("sluice_transfer_leases", "Leases of KV blocks that a prefill server gave.", self.num_leases)
    yield counter("sluice_transfer_leases_expired", "Leases that nobody released in time.", self.num_expired)
    yield counter(
      "sluice_transfer_leases_refused", "Prompts refused because leases fill --max_lease_mb.", self.num_refused
    )
    yield GaugeMetricFamily("sluice_transfer_leased_pieces", "Pieces that leases hold.", self.num_leased_pieces)
