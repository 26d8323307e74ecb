"""Keeps what the router knows of each replica, and chooses one for a request. Sends nothing."""

from collections.abc import Hashable, Iterable, Sequence

from engine.routing import RoutingPolicy
from server.router.replicas.replica_exchange import ReplicaExchange, ReplicaPlace
from server.router.replicas.replica_tls import ReplicaTls
from server.router.router_settings import split_replica_address, split_scheme


class RoutedReplica:
  """One replica.

  Attributes:
    name: HOST:PORT or https://HOST:PORT, as the operator wrote it.
    host, port: its parts.
    authority: HOST:PORT, for the Host header.
    tls: None for plain HTTP.
    place: with the resolved address; None until a probe has resolved it.
    is_ready: whether the replica is in the rotation: its latest check succeeded.
    trouble: why it is not; "" if it is.
    has_answered: whether it has ever answered a check.
    num_running, num_waiting, kv_usage_ratio: as the replica last reported them; None: it did not.
  """

  def __init__(self, name: str, tls: ReplicaTls | None = None):
    """`tls` is for a name with https://, which needs it."""
    self.name = name
    scheme, self.authority = split_scheme(name)
    assert scheme == "http" or tls is not None, "a replica with https:// is never called in plain text"
    self.host, self.port = split_replica_address(self.authority)
    self.tls = tls if scheme == "https" else None
    self.place: ReplicaPlace | None = None
    self.is_ready = False
    self.trouble = "no check has ended yet"
    self.has_answered = False
    self.num_running: int | None = None
    self.num_waiting: int | None = None
    self.kv_usage_ratio: float | None = None
    self._num_of_others = 0
    self._exchanges: set[ReplicaExchange] = set()

  @property
  def num_in_flight(self) -> int:
    """Requests of this router at the replica."""
    return len(self._exchanges)

  @property
  def load(self) -> float:
    """Requests at the replica: those of this router now, and those of others at the latest report."""
    return len(self._exchanges) + self._num_of_others

  def begin_exchange(self) -> ReplicaExchange:
    """Returns a new exchange, which counts as load until `end_exchange`."""
    exchange = ReplicaExchange()
    self._exchanges.add(exchange)
    return exchange

  def end_exchange(self, exchange: ReplicaExchange) -> None:
    """Closes an exchange."""
    self._exchanges.discard(exchange)
    exchange.close()

  def break_exchanges(self) -> None:
    """Ends all exchanges of a replica that is silent; their requests then end with an error, or begin elsewhere."""
    for exchange in self._exchanges:
      exchange.break_off()

  def note_report(
    self, running: float | None, waiting: float | None, kv_usage: float | None, *, num_sent: int = 0
  ) -> None:
    """Notes a report of the replica's load; None where it had none. `num_sent` were in flight when it was requested."""
    self.num_running = None if running is None else int(running)
    self.num_waiting = None if waiting is None else int(waiting)
    self.kv_usage_ratio = kv_usage
    self._num_of_others = max(0, (self.num_running or 0) + (self.num_waiting or 0) - max(num_sent, self.num_in_flight))

  def note_trouble(self, trouble: str) -> bool:
    """Takes the replica out of the rotation. Returns whether that is news: it was in it, or out for another reason."""
    is_news = self.is_ready or self.trouble != trouble
    self.is_ready, self.trouble = False, trouble
    return is_news


class ReplicaPool:
  """The replicas and the policy.

  Attributes:
    replicas: all replicas, in the operator's order.
    policy: chooses.
  """

  def __init__(self, names: Sequence[str], policy: RoutingPolicy, tls: ReplicaTls | None = None):
    """`tls` is for names with https://, and must be there if one has it."""
    self.replicas = [RoutedReplica(name, tls) for name in names]
    self.policy = policy
    self._by_name = {replica.name: replica for replica in self.replicas}

  def find_replica(self, name: str) -> RoutedReplica | None:
    """Returns the replica of this name; None if there is none."""
    return self._by_name.get(name)

  @property
  def num_ready(self) -> int:
    """Replicas in the rotation."""
    return sum(replica.is_ready for replica in self.replicas)

  def choose_replica(self, keys: Sequence[Hashable], without: Iterable[RoutedReplica] = ()) -> RoutedReplica | None:
    """Returns the replica for a request; None if none takes requests.

    Args:
      keys: keys of the prompt's pieces.
      without: replicas that the request has tried.
    """
    ready = [replica for replica in self.replicas if replica.is_ready and replica not in without]
    return self.policy.choose(ready, keys) if ready else None

  def describe_trouble(self) -> str:
    """Returns how many replicas are out of the rotation, and why the first is."""
    out = [replica for replica in self.replicas if not replica.is_ready]
    return f"{len(out)} of {len(self.replicas)} replicas take no requests" + (f" ({out[0].trouble})" if out else "")
