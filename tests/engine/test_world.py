"""Any load at all: random worlds, hypothesis' own, and a soak of a million operations, all against the oracle."""

from collections import Counter
import dataclasses
import random

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
import pytest

from tests.engine.world import PoolWorld, World, random_config, run_world, with_host_pool

# The same examples every time: a failure is somebody's change, not luck. Bursts are long, so no deadline an example.
HYPOTHESIS = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.catalogue("C4", "C5", "C6", "I2")
@pytest.mark.parametrize("first", range(0, 320, 40))
def test_any_schedule_gives_the_tokens_of_one_request_at_a_time(first: int):
  totals = Counter()
  for seed in range(first, first + 40):
    world = run_world(seed)
    totals.update({reason.value: count for reason, count in world.endings.items()})
    totals["preemptions"] += world.scheduler.num_preemptions
    totals["cached tokens"] += world.engine.recorder.num_cached_tokens
    totals["siblings"] += world.num_siblings
    totals["chunks grown into padding"] += world.num_grown
    totals["prompts cut where padding is left out"] += world.num_cut
  rare = {name: count for name, count in totals.items() if count < 5}
  assert not rare and len(totals) == 10, f"paths hardly taken: {rare}"


@pytest.mark.catalogue("C4", "C6", "C11", "I2")
def test_prefixes_come_back_from_the_host_or_are_computed():
  """Half of the other worlds have a host pool, too; these live for longer, so that prefixes come back often."""
  totals = Counter()
  for seed in range(16):
    world = World(seed, config=with_host_pool(random_config(random.Random(seed)), None))
    for _ in range(400):
      world.random_op()
    world.drain()
    if world.scheduler.loads is not None:
      totals.update(dataclasses.asdict(world.scheduler.loads.host.counts))
  del totals["num_skipped"]  # the host pool is large enough
  rare = {name: count for name, count in totals.items() if count < 5}
  assert not rare and len(totals) == 6, f"paths hardly taken: {rare}"


class EngineMachine(RuleBasedStateMachine):
  """Hypothesis chooses the operations; the world checks each of them."""

  world: World

  @initialize(seed=st.integers(0, 2**32))
  def start(self, seed: int) -> None:
    self.world = World(seed)

  @rule()
  def submit(self) -> None:
    self.world.submit()

  @rule()
  def abort(self) -> None:
    self.world.abort()

  @rule()
  def advance(self) -> None:
    self.world.advance()

  @rule(steps=st.integers(1, 8))
  def step(self, steps: int) -> None:
    for _ in range(steps):
      self.world.step()

  def teardown(self) -> None:
    if hasattr(self, "world"):
      self.world.drain()


class PoolMachine(RuleBasedStateMachine):
  """The same for the pool alone."""

  world: PoolWorld

  @initialize(seed=st.integers(0, 2**32), num_blocks=st.integers(1, 12))
  def start(self, seed: int, num_blocks: int) -> None:
    self.world = PoolWorld(seed, num_blocks)

  @rule(length=st.integers(1, 6))
  def open(self, length: int) -> None:
    self.world.open(length)

  @rule()
  def publish(self) -> None:
    self.world.publish()

  @rule()
  def close(self) -> None:
    self.world.close()

  @invariant()
  def conserved(self) -> None:
    if hasattr(self, "world"):
      self.world.check()

  def teardown(self) -> None:
    if hasattr(self, "world"):
      self.world.close_all()


@pytest.mark.parametrize("machine", [EngineMachine, PoolMachine])
def test_whatever_hypothesis_does(machine: type[RuleBasedStateMachine]):
  run_state_machine_as_test(machine, settings=settings(HYPOTHESIS, max_examples=40, stateful_step_count=40))


class Soak(RuleBasedStateMachine):
  """Bursts of random operations, so that hypothesis' own cost does not count; `num_ops` is over all its runs."""

  num_ops = 0

  @initialize(seed=st.integers(0, 2**32), num_blocks=st.integers(1, 40))
  def start(self, seed: int, num_blocks: int) -> None:
    self.engine, self.pool = World(seed), PoolWorld(seed, num_blocks)

  @rule()
  def burst(self) -> None:
    for _ in range(100):
      self.engine.random_op()
    for _ in range(100):
      self.pool.random_op()
    Soak.num_ops += 200

  def teardown(self) -> None:
    if hasattr(self, "engine"):
      self.engine.drain()
      self.pool.close_all()


def soak(num_ops: int) -> None:
  """At least `num_ops` operations; each world is drained at its end, and drain() finds every leak."""
  Soak.num_ops = 0
  steps = 50
  examples = num_ops // (200 * (steps - 1)) + 2  # a run may end early
  while Soak.num_ops < num_ops:
    # No shrinking: a burst is opaque to it. The failing seed is a World to run by itself.
    run_state_machine_as_test(
      Soak, settings=settings(HYPOTHESIS, max_examples=examples, stateful_step_count=steps, phases=(Phase.generate,))
    )
  print(f"{Soak.num_ops} random operations on scheduler and pool, 0 pages leaked")


def test_thirty_thousand_operations_leak_nothing():
  soak(30_000)


@pytest.mark.catalogue("C6")
@pytest.mark.long
def test_a_million_operations_leak_nothing():
  soak(1_000_000)
