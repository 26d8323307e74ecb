"""The router's Prometheus metrics. Decides nothing."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from engine.routing import PrefixAware
from server.router.replicas.prefill_servers import PrefillServers
from server.router.replicas.replica_pool import ReplicaPool

_ADDED_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


class _ReplicaGauges(Collector):
  """The state of the replicas at the time of a scrape."""

  def __init__(self, pool: ReplicaPool, prefill: PrefillServers):
    self._pool, self._prefill = pool, prefill

  def collect(self) -> Iterator[Metric]:
    """Yields a gauge for each part of the state; a value that a replica did not report has no series."""
    for name, text, value_of in (
      ("sluice_router_replica_ready", "Whether the replica takes requests.", lambda each: int(each.is_ready)),
      ("sluice_router_replica_in_flight", "Requests of this router there.", lambda each: each.num_in_flight),
      ("sluice_router_replica_running", "Requests in its batch, as it reports.", lambda each: each.num_running),
      ("sluice_router_replica_waiting", "Requests in its queue, as it reports.", lambda each: each.num_waiting),
      (
        "sluice_router_replica_kv_cache_usage_ratio",
        "Its share of KV blocks held, as it reports.",
        lambda each: each.kv_usage_ratio,
      ),
    ):
      gauge = GaugeMetricFamily(name, text, labels=["replica"])
      for replica in self._pool.replicas:
        if (value := value_of(replica)) is not None:
          gauge.add_metric([replica.name], value)
      yield gauge
    ready = GaugeMetricFamily("sluice_router_prefill_ready", "Whether the server gets prompts.", labels=["server"])
    waiting = GaugeMetricFamily(
      "sluice_router_prefill_waiting", "Requests that name it, without an answer yet.", labels=["server"]
    )
    for server in self._prefill.servers:
      ready.add_metric([server.name], int(server.is_ready))
      waiting.add_metric([server.name], server.num_waiting)
    yield from (ready, waiting)
    policy = self._pool.policy
    if isinstance(policy, PrefixAware):
      yield GaugeMetricFamily("sluice_router_known_pieces", "Pieces of prompts that the policy knows.", len(policy))
      yield CounterMetricFamily(
        "sluice_router_prefix_hits", "Requests that went to a replica for their known prefix.", policy.num_hits
      )


class RouterMetrics:
  """What the router counts.

  Attributes:
    requests: answers, by replica and outcome: a class of status such as 2xx, or a word.
    refused: requests that the router answered itself with an error, by its code.
    retries: requests that went to another replica, by the reason.
    probes: checks of replicas, by replica and whether it answered.
    added_latency: seconds that the router itself adds before the first byte.
  """

  def __init__(self, pool: ReplicaPool, prefill: PrefillServers):
    self._registry = CollectorRegistry(auto_describe=False)
    self.requests = Counter(
      "sluice_router_requests", "Tries at replicas, by outcome.", ["replica", "outcome"], registry=self._registry
    )
    self.refused = Counter(
      "sluice_router_refused", "Errors that the router returned itself.", ["code"], registry=self._registry
    )
    self.retries = Counter(
      "sluice_router_retries", "Requests that went to another replica.", ["reason"], registry=self._registry
    )
    self.probes = Counter(
      "sluice_router_probes", "Checks of replicas.", ["replica", "answered"], registry=self._registry
    )
    self.added_latency = Histogram(
      "sluice_router_added_latency_seconds",
      "What the router adds before the first byte: choice, connection, copies; without the replica's time.",
      buckets=_ADDED_S,
      registry=self._registry,
    )
    self._registry.register(_ReplicaGauges(pool, prefill))
    ProcessCollector(registry=self._registry)

  def count_probe(self, replica: str, answered: bool) -> None:
    """Counts a check of a replica."""
    self.probes.labels(replica, str(answered).lower()).inc()

  def collect(self) -> Iterator[Metric]:
    """Yields every metric."""
    yield from self._registry.collect()

  def exposition(self, accept: str) -> tuple[bytes, str]:
    """Returns all metrics and the content type, for the request's Accept header."""
    encode, content_type = choose_encoder(accept)
    return encode(self._registry), content_type
