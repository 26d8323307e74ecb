"""Chooses a replica for a request: the policies of `python -m server.router` and of the simulator.

A policy sees replicas as names with a load, and prompts as keys of their pieces. What a key is, the caller decides: a
block's key in the simulator, a hash of a piece of the body in the router. May not know HTTP, tokens, engines or clocks.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from engine.errors import ConfigError


class ReplicaView(Protocol):
  """What a policy knows of a replica."""

  @property
  def name(self) -> Hashable:
    """The name, which a replica keeps for its life and no other live replica has."""
    ...

  @property
  def load(self) -> float:
    """The requests of the replica that have not ended, in the router's view."""
    ...


class RoutingPolicy(Protocol):
  """Chooses replicas, by their loads and its own earlier choices."""

  uses_keys: bool  # False: the caller may pass no keys

  def choose[View: ReplicaView](self, replicas: Sequence[View], keys: Sequence[Hashable] = ()) -> View:
    """Returns the replica for a request.

    Args:
      replicas: the replicas that take requests, at least one.
      keys: keys of the prompt's pieces from its start; each stands for its piece and all pieces before it.
    """
    ...

  def forget(self, name: Hashable) -> None:
    """Forgets a replica that left, or that lost its cache."""
    ...


class RoundRobin:
  """Chooses one replica after the other."""

  uses_keys = False

  def __init__(self):
    self._turn = -1

  def choose[View: ReplicaView](self, replicas: Sequence[View], keys: Sequence[Hashable] = ()) -> View:
    self._turn += 1
    return replicas[self._turn % len(replicas)]

  def forget(self, name: Hashable) -> None:
    pass


class LeastLoaded:
  """Chooses the replica with the lowest load; of equals, the one that it chose longest ago."""

  uses_keys = False

  def __init__(self):
    self._turn = 0
    self._chosen_at: dict[Hashable, int] = {}

  def choose[View: ReplicaView](self, replicas: Sequence[View], keys: Sequence[Hashable] = ()) -> View:
    chosen = self.find_least(replicas)
    self.note_choice(chosen.name)
    return chosen

  def find_least[View: ReplicaView](self, replicas: Sequence[View]) -> View:
    """Returns what choose() would, and notes nothing."""
    return min(replicas, key=lambda replica: (replica.load, self._chosen_at.get(replica.name, 0)))

  def note_choice(self, name: Hashable) -> None:
    """Notes that a request went to this replica."""
    self._turn += 1
    self._chosen_at[name] = self._turn

  def forget(self, name: Hashable) -> None:
    self._chosen_at.pop(name, None)


class PrefixAware:
  """Chooses a replica that knows the longest prefix, unless it is much busier than the least loaded one.

  The policy keeps its own map of keys. Like SGLang's cache-aware router it does not query the replicas, so it does not
  know about evictions. The larger the known share of a prompt, the busier its replica may be. A new prefix goes to the
  least loaded replica, and of equals to the one that was chosen longest ago, so new prefixes spread over all caches.

  The map holds at most `capacity` keys; the least recently used leave first, later pieces of a prompt before earlier
  ones. A choice takes time in proportion to the prompt's keys, and forget() in proportion to the map.
  """

  BUSIER_BY, BUSIER_TIMES = (
    8,
    0.5,
  )  # of a known prompt: the difference, and its share of the least load, that it is worth
  CAPACITY = 1 << 18  # keys; about 40 MB

  uses_keys = True

  def __init__(self, capacity: int = CAPACITY):
    """Args:
    capacity: the most keys to remember, at least 1.
    """
    self.capacity = capacity
    self.num_hits = 0  # choices of a replica for its known prefix
    self._homes: OrderedDict[Hashable, int] = OrderedDict()  # key -> bit mask of the replicas that know it
    self._bits: dict[Hashable, int] = {}  # name -> its bit
    self._least = LeastLoaded()

  def __len__(self) -> int:
    return len(self._homes)

  def choose[View: ReplicaView](self, replicas: Sequence[View], keys: Sequence[Hashable] = ()) -> View:
    homes = self._homes
    mask = 0
    for replica in replicas:
      mask |= self._bit(replica.name)
    known = 0
    for key in keys:
      deeper = mask & homes.get(key, 0)
      if not deeper:
        break
      mask, known = deeper, known + 1
    chosen = self._least.find_least(replicas)
    if known:
      preferred = self._least.find_least([replica for replica in replicas if self._bits[replica.name] & mask])
      share = known / len(keys)
      if preferred.load <= chosen.load + share * max(self.BUSIER_BY, chosen.load * self.BUSIER_TIMES):
        chosen = preferred
        self.num_hits += 1
    self._least.note_choice(chosen.name)
    bit = self._bits[chosen.name]
    for key in reversed(keys):  # so that a prompt's first piece leaves last
      homes[key] = homes.pop(key, 0) | bit
    while len(homes) > self.capacity:
      homes.popitem(last=False)
    return chosen

  def _bit(self, name: Hashable) -> int:
    """Returns the bit of a replica, the lowest free one if it is new."""
    bit = self._bits.get(name)
    if bit is None:
      taken = sum(self._bits.values())
      bit = self._bits[name] = ~taken & (taken + 1)
    return bit

  def forget(self, name: Hashable) -> None:
    self._least.forget(name)
    bit = self._bits.pop(name, 0)
    if bit:
      homes = self._homes
      left = ((key, mask & ~bit) for key, mask in homes.items())
      self._homes = OrderedDict((key, mask) for key, mask in left if mask)


POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
  "round_robin": RoundRobin,
  "least_loaded": LeastLoaded,
  "prefix_aware": PrefixAware,
}


def make_routing_policy(name: str) -> RoutingPolicy:
  """Returns a new policy of this name; raises ConfigError."""
  if name not in POLICIES:
    raise ConfigError(f"policy={name!r} is unknown; choose one of {', '.join(POLICIES)}")
  return POLICIES[name]()
