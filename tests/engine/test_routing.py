"""Tests the policies that choose a replica, on replicas that are a name and a load."""

from collections import Counter
import dataclasses
import random

import pytest

from engine.errors import ConfigError
from engine.routing import POLICIES, LeastLoaded, PrefixAware, RoundRobin, make_routing_policy


@dataclasses.dataclass
class FakeReplica:
  name: str
  load: float = 0


def fleet(*loads: float) -> list[FakeReplica]:
  return [FakeReplica(f"replica {index}", load) for index, load in enumerate(loads)]


def chain(*pieces: str) -> list[str]:
  """Returns keys of which each stands for all pieces up to it."""
  return ["/".join(pieces[: index + 1]) for index in range(len(pieces))]


def test_round_robin_takes_turns_also_when_a_replica_leaves():
  policy, replicas = RoundRobin(), fleet(5, 0, 0)
  assert [policy.choose(replicas).name[-1] for _ in range(4)] == ["0", "1", "2", "0"]
  assert {policy.choose(replicas[:2]).name for _ in range(2)} == {"replica 0", "replica 1"}


def test_least_loaded_takes_turns_among_equals_only():
  policy, replicas = LeastLoaded(), fleet(1, 0, 0)
  assert [policy.choose(replicas).name[-1] for _ in range(4)] == ["1", "2", "1", "2"]


def test_a_known_prefix_goes_where_it_is_known_and_a_new_one_elsewhere():
  policy, replicas = PrefixAware(), fleet(0, 0, 0)
  homes = {name: policy.choose(replicas, chain(name, "a")).name for name in "xyz"}
  assert len(set(homes.values())) == 3
  for _ in range(3):
    for name, home in homes.items():
      assert policy.choose(replicas, chain(name, "a", "b")).name == home
  assert policy.num_hits == 9


def test_the_longest_prefix_wins():
  policy, (first, second) = PrefixAware(), fleet(0, 0)
  policy.choose([first], chain("system", "one"))
  policy.choose([second], chain("system", "two"))
  for question in ("one", "two", "one"):
    assert policy.choose([first, second], chain("system", question, "more")).name[-1] == str(int(question == "two"))


@pytest.mark.parametrize(("load", "known", "stays"), [(8, 4, True), (9, 4, False), (2, 1, True), (3, 1, False)])
def test_a_busier_replica_is_worth_the_known_share(load: float, known: int, stays: bool):
  policy, (home, other) = PrefixAware(), fleet(0, 0)
  prompt = chain("a", "b", "c", "d")
  policy.choose([home], prompt[:known])
  home.load = load
  assert (policy.choose([home, other], prompt) is home) == stays
  home.load = 0
  if not stays:  # from then on both know it, and the less busy one gets it
    other.load = 1
    assert policy.choose([home, other], prompt[:known]) is home


def test_a_replica_that_leaves_takes_its_prefixes_along():
  policy, (first, second, third) = PrefixAware(), fleet(0, 0, 0)
  for replica, name in ((first, "x"), (second, "y")):
    policy.choose([replica], chain(name))
  policy.forget(first.name)
  policy.forget("never seen")
  assert len(policy) == 1
  policy.choose([third, second], chain("z"))  # the new replica takes the free bit, and none of the old prefixes
  assert policy.choose([second, third], chain("y")) is second
  hits = policy.num_hits
  policy.choose([second, third], chain("x"))
  assert policy.num_hits == hits


def test_a_replica_that_is_not_offered_is_not_chosen():
  policy, (first, second) = PrefixAware(), fleet(0, 0)
  policy.choose([first], chain("x"))
  assert policy.choose([second], chain("x")) is second
  second.load = 1
  assert policy.choose([first, second], chain("x")) is first


def test_the_map_is_bounded_and_keeps_what_was_used_last():
  policy, replicas = PrefixAware(capacity=100), fleet(0, 0, 0, 0)
  home = policy.choose(replicas, chain("hot", "question"))
  for number in range(500):
    policy.choose(replicas, chain("hot", f"question {number}", "end"))
    assert len(policy) <= 100
  assert policy.choose(replicas, chain("hot")) is home
  # Of one prompt, later pieces leave first.
  small = PrefixAware(capacity=2)
  small.choose(replicas[:1], chain("a", "b", "c"))
  hits = small.num_hits
  small.choose(replicas, chain("a"))
  assert small.num_hits == hits + 1


def test_prefixes_spread_over_all_caches_and_cost_no_balance():
  """Requests that never end load the replicas evenly whatever they share."""
  policy, replicas, source = PrefixAware(), fleet(0, 0, 0, 0), random.Random(0)
  for _ in range(2000):
    policy.choose(replicas, chain("system", f"user {source.randrange(40)}", "turn")).load += 1
  loads = [replica.load for replica in replicas]
  assert max(loads) <= 1.5 * min(loads) + PrefixAware.BUSIER_BY
  homes = Counter(policy.choose(fleet(0, 0, 0, 0), chain(f"new {number}")).name for number in range(40))
  assert set(homes.values()) == {10}


def test_names():
  assert set(POLICIES) == {"round_robin", "least_loaded", "prefix_aware"}
  assert [make_routing_policy(name).uses_keys for name in POLICIES] == [False, False, True]
  with pytest.raises(ConfigError, match="policy='random' is unknown; choose one of round_robin, "):
    make_routing_policy("random")
