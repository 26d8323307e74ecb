"""What every policy of POLICIES must hold, who goes first under each by literal lists, and policies of a user's own."""

from collections import Counter
import dataclasses
import random

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError, Overloaded
from engine.policy import Policy, find_policy_class
from engine.request import Request
from engine.scheduler import Scheduler
from engine.settings import POLICIES
from tests.engine import policies as policies
from tests.engine.test_scheduler import CONFIG, Driver, make
from tests.engine.world import World, random_config

MODULE = "tests.engine.policies"


def order_of_service(driver: Driver, seconds: float = 1.0) -> list[str]:
  """Runs to the end, a step in `seconds`; the ids in the order of their last tokens."""
  ended = []
  while driver.scheduler.num_running + driver.scheduler.num_waiting:
    batch = driver.plan()
    driver.now += seconds
    ended += [event.request_id for event in driver.commit(batch) if event.finish_reason]
  return ended


# Whatever the policy.


@pytest.mark.parametrize("policy", [*POLICIES, f"{MODULE}:Restless", f"{MODULE}:LeastLeft", f"{MODULE}:ByTwo"])
def test_every_request_ends_with_the_tokens_that_it_gets_alone(policy: str):
  """Random worlds: the world checks every step, and each ending against the oracle; its end is that nobody is left."""
  totals = Counter()
  for seed in range(16):
    config = dataclasses.replace(random_config(random.Random(seed)), policy=policy)
    world = World(seed, config=config)
    for _ in range(100):
      world.random_op()
    world.drain()
    totals.update(ended=world.num_ended, preemptions=world.scheduler.num_preemptions)
  assert totals["ended"] > 100 and totals["preemptions"] > 10, totals


@pytest.mark.catalogue("C10")
@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_starves_behind_small_urgent_requests_of_others(policy: str):
  driver = Driver(policy=policy, max_num_seqs=1, max_queued_requests=1000, prefix_cache_scope="off")
  driver.scheduler.add_request(make("patient", 8, max_tokens=30, priority=1, tenant="a"))
  for number in range(400):
    driver.scheduler.add_request(make(f"{number}", 2, max_tokens=1, tenant="b", arrival_time=driver.now))
    batch = driver.plan()
    driver.now += 1.0
    if any(event.request_id == "patient" and event.finish_reason for event in driver.commit(batch)):
      return
  pytest.fail("a new request came in every step, and the old one was never served")


# A user's own.


def test_a_dynamic_policy_preempts_by_what_is_left_now():
  """sjf ranks by the requested length, and would take the request that is nearly done."""

  def preempted(policy: str) -> list[str]:
    driver = Driver(make("old", 4, max_tokens=16), policy=policy, num_blocks=6, prefix_cache_scope="off")
    for _ in range(9):
      driver.step()
    driver.scheduler.add_request(make("new", 4, max_tokens=12))
    requests = dict(driver.scheduler._requests)
    order_of_service(driver)
    return [name for name, request in requests.items() if request.num_preemptions]

  assert preempted("sjf") == ["old"]
  assert preempted(f"{MODULE}:LeastLeft") == ["new"]


def test_a_dynamic_policy_changes_its_mind_while_requests_wait():
  """The long request came first, and is ahead until the short one has waited longer for its size."""
  first = {}
  for until in (1.2, 4.0):
    driver = Driver(make("busy", 2, max_tokens=3), policy=f"{MODULE}:ResponseRatio", max_num_seqs=1)
    driver.step()
    for name, tokens, arrival in (("long", 8, 0.0), ("short", 2, 1.0)):
      driver.scheduler.add_request(make(name, 2, max_tokens=tokens, arrival_time=arrival))
    driver.now = until
    first[until] = order_of_service(driver, seconds=0.0)[1]
  assert first == {1.2: "long", 4.0: "short"}, "1.2 / 8 is above 0.2 / 2, and 4 / 8 is below 3 / 2"


def test_a_dynamic_policy_keeps_the_fast_path():
  driver = Driver(make("a", 4, max_tokens=20), make("b", 4, max_tokens=20), policy=f"{MODULE}:LeastLeft")
  for _ in range(6):
    driver.step()
  assert driver.scheduler._steady.steps_left > 0


@pytest.mark.parametrize(
  ("name", "said"),
  [
    ("no_such_module:Mine", r"policy='no_such_module:Mine' cannot be imported \(ModuleNotFoundError: .*PYTHONPATH"),
    (
      f"{MODULE}:NoSuchClass",
      "cannot be imported .AttributeError: .* 'NoSuchClass'.*set --policy to one of fair, fcfs",
    ),
    (f"{MODULE}:NOT_A_POLICY", "is not a subclass of engine.policy.Policy; derive it"),
    (f"{MODULE}:Request", "is not a subclass of engine.policy.Policy; derive it"),
    ("a.b.c", "policy='a.b.c' must be one of fair, fcfs, priority, sjf, tiers or MODULE:CLASS; set --policy"),
    (":Mine", "policy=':Mine' must be one of"),
    ("my policy:Mine", "policy='my policy:Mine' must be one of"),
  ],
)
def test_a_name_that_stands_for_no_policy_is_refused_in_one_line(name: str, said: str):
  with pytest.raises(ConfigError, match=said) as caught:
    Driver(policy=name)
  assert "\n" not in str(caught.value)


def test_the_names_are_those_of_the_classes():
  assert {find_policy_class(name) for name in POLICIES} > {Policy}
  assert find_policy_class(f"{MODULE}:Restless") is policies.Restless


# Shortest job first.


@pytest.mark.catalogue("C10")
def test_shortest_first_and_none_is_overtaken_for_longer_than_its_size_in_seconds():
  requests = [make("long", 2, max_tokens=20, arrival_time=0.0), make("short", 2, max_tokens=3, arrival_time=1.0)]
  assert order_of_service(Driver(*requests, policy="sjf", max_num_seqs=1, sjf_aging_tokens_per_s=0.0))[0] == "short"
  # At 5 tokens a second, 20 tokens are overtaken by 3 that come within 3.4 seconds, and by none that come later.
  for arrival, first in ((3.3, "late"), (3.5, "long")):
    requests = [make("long", 2, max_tokens=20), make("late", 2, max_tokens=3, arrival_time=arrival)]
    driver = Driver(*requests, policy="sjf", sjf_aging_tokens_per_s=5.0, max_num_seqs=1)
    assert order_of_service(driver)[0] == first


# Fair sharing.


def tenant(name: str, number: int, arrival: float = 0.0) -> Request:
  return make(f"{name}{number}", 4, max_tokens=1, tenant=name, arrival_time=arrival)


def test_tenants_take_turns_whatever_they_queued():
  requests = [tenant("big", number) for number in range(6)] + [tenant("small", number) for number in range(2)]
  driver = Driver(*requests, policy="fair", max_num_seqs=1, prefix_cache_scope="off")
  assert order_of_service(driver)[:4] == ["small0", "big0", "small1", "big1"]


def test_what_a_tenant_did_not_use_is_not_saved_up():
  driver = Driver(*(tenant("a", number) for number in range(8)), policy="fair", max_num_seqs=1)
  driver.scheduler.add_request(tenant("b", 0))
  for _ in range(6):
    batch = driver.plan()
    driver.now += 1.0
    driver.commit(batch)
  for number in range(1, 4):
    driver.scheduler.add_request(tenant("b", number, driver.now))
  assert order_of_service(driver)[:4] == ["a5", "b1", "a6", "b2"], "b was away, and does not get all at once"


def test_a_tenant_is_charged_seconds_not_tokens():
  """Two tenants with equal tokens, one in steps that take ten times as long: it gets fewer of them."""
  scheduler = Driver(policy="fair", max_num_seqs=1, token_budgets=(4, 16), prefix_cache_scope="off").scheduler
  for number in range(12):
    scheduler.add_request(make(f"narrow{number}", 4, max_tokens=1, tenant="narrow"))
    scheduler.add_request(make(f"wide{number}", 16, max_tokens=1, tenant="wide"))
  now, started = 0.0, {"narrow": 0, "wide": 0}
  for _ in range(8):
    batch = scheduler.schedule(now)
    now += 10.0 if batch.shape.tokens == 16 else 1.0
    started[batch.request_ids[0].rstrip("0123456789")] += 1
    Driver.commit_values(scheduler, batch, now)
  assert started == {"narrow": 6, "wide": 2}, "the first step of a rung is charged by guess"


def test_names_of_tenants_do_not_pile_up():
  driver = Driver(policy="fair")
  for number in range(50):
    driver.scheduler.add_request(tenant(f"t{number}-", 0))
    order_of_service(driver)
  assert len(driver.scheduler._policy.state()["used"]) <= 1


@pytest.mark.catalogue("C14")
@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_a_small_tenant_beside_one_that_offers_a_hundred_times_as_much(policy: str):
  """Virtual seconds: the small tenant's median wait for a first token, alone and beside the big one, at overload."""

  def median_wait(with_big: bool) -> float:
    config = dataclasses.replace(
      CONFIG,
      policy=policy,
      max_queued_requests=10**6,
      max_queued_tokens=10**9,
      token_budgets=(8, 16, 32, 64),
      max_num_seqs=32,
      num_blocks=1024,
      prefix_cache_scope="off",
    )
    scheduler = Scheduler(config)
    arrivals = [(number * 0.5, make(f"s{number}", 48, max_tokens=16, tenant="small")) for number in range(40)]
    if with_big:
      arrivals += [(number * 0.005, make(f"b{number}", 40, max_tokens=16, tenant="big")) for number in range(4000)]
    arrivals.sort(key=lambda arrival: arrival[0])
    small = [request for _, request in arrivals if request.tenant == "small"]
    now, upcoming = 0.0, 0
    while any(request.first_token_time is None for request in small):
      while upcoming < len(arrivals) and arrivals[upcoming][0] <= now:
        time, request = arrivals[upcoming]
        request.arrival_time = time
        scheduler.add_request(request)
        upcoming += 1
      batch = scheduler.schedule(now)
      if batch is None:
        now = arrivals[upcoming][0]
        continue
      now += 0.01 + 0.001 * batch.shape.tokens
      Driver.commit_values(scheduler, batch, now)
    waits = sorted(request.first_token_time - request.arrival_time for request in small)
    return waits[len(waits) // 2]

  ratio = median_wait(with_big=True) / median_wait(with_big=False)
  assert ratio <= 2.5 if policy == "fair" else ratio > 10.0  # the rest of a step, and a slot, are always waited for


# Latency tiers.


@pytest.mark.catalogue("C10")
def test_interactive_requests_go_first_but_not_for_ever():
  requests = [
    make("batch", 2, max_tokens=2, priority=1, arrival_time=0.0),
    make("soon", 2, max_tokens=2, arrival_time=2.0),
    make("later", 2, max_tokens=2, arrival_time=4.0),
  ]
  driver = Driver(*requests, policy="tiers", tier_delay_s=3.0, max_num_seqs=1)
  assert order_of_service(driver) == ["soon", "batch", "later"]


def test_slots_and_prompt_tokens_are_kept_for_interactive_requests():
  batch = [make(f"b{number}", 12, priority=1) for number in range(8)]
  driver = Driver(*batch, policy="tiers", tier_share=0.25, max_num_seqs=8, prefix_cache_scope="off")
  while driver.scheduler.num_running < 6:
    driver.step()
  driver.step()
  assert driver.scheduler.num_running == 6, "a quarter of the slots stays free"
  driver.scheduler.add_request(make("i", 16))
  assert driver.step()["i"] == 16, "and a whole chunk fits at once"


def test_batch_work_has_the_whole_step_while_nobody_else_is_there():
  driver = Driver(make("b", 16, priority=1), policy="tiers", tier_share=0.5)
  assert driver.step() == {"b": 16}
  driver = Driver(make("b", 16, priority=1), make("i", 6), policy="tiers", tier_share=0.5, token_budgets=(4, 14, 32))
  assert driver.step() == {"i": 6, "b": 8}


def test_long_batch_rows_make_way_for_interactive_ones_but_for_every_fourth_step():
  driver = Driver(
    make("b", 12, max_tokens=40, priority=1), policy="tiers", tier_long_context=10, prefix_cache_scope="off"
  )
  driver.step()
  driver.scheduler.add_request(make("i", 2, max_tokens=30))
  steps = [sorted(driver.step()) for _ in range(9)]
  assert steps[0] == ["b", "i"], "nobody had to make way yet"
  assert steps[1:].count(["b", "i"]) == 2 and steps[1:].count(["i"]) == 6


# Admission by what can still be on time.


def busy(**changes) -> Scheduler:
  """Steps of 0.5 s, one slot, a request admitted every 4 s."""
  driver = Driver(
    *(make(f"r{number}", 4, max_tokens=7) for number in range(6)), max_num_seqs=1, admission="goodput", **changes
  )
  for _ in range(24):
    batch = driver.plan()
    driver.now += 0.5
    driver.commit(batch)
  return driver.scheduler


def test_refuses_with_the_predicted_wait_what_would_start_or_finish_too_late():
  scheduler = busy()
  assert scheduler.num_running == 1 and scheduler.num_waiting == 2
  late = make("late", 4, max_tokens=9, arrival_time=12.0)
  late.queue_deadline = 13.0
  with pytest.raises(Overloaded, match=r"would start in about \d+\.\d s, its deadline is in 1\.0 s") as caught:
    scheduler.check_capacity(late)
  assert caught.value.retry_after_s > 0
  slow = make("slow", 4, max_tokens=40, arrival_time=12.0)
  slow.deadline = 25.0
  with pytest.raises(Overloaded, match=r"would finish in about \d+\.\d s, its deadline is in 13\.0 s"):
    scheduler.check_capacity(slow)
  patient = make("patient", 4, max_tokens=40, arrival_time=12.0)
  patient.queue_deadline, patient.deadline = 60.0, 90.0
  scheduler.check_capacity(patient)
  scheduler.check_capacity(make("whenever", 4, max_tokens=40, arrival_time=12.0))


def test_nothing_is_predicted_before_the_first_step():
  request = make("a", 4)
  request.deadline = 0.001
  Driver(admission="goodput").scheduler.check_capacity(request)


def test_the_choices_are_named():
  with pytest.raises(ConfigError, match="admission='hope' must be one of queue, goodput; set --admission"):
    Driver(admission="hope")


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"tier_share": 1.0}, "tier_share=1.0 must be at least 0 and at most 0.99; set --tier_share"),
    ({"tier_long_context": -1}, "tier_long_context=-1 must be at least 0; set --tier_long_context"),
    ({"sjf_aging_tokens_per_s": float("nan")}, "sjf_aging_tokens_per_s=nan must be a finite number"),
    ({"dynamic_window_s": -0.1}, "dynamic_window_s=-0.1 must be at least 0"),
    ({"dynamic_max_batch": 0}, "dynamic_max_batch=0 must be at least 1"),
  ],
  ids=str,
)
def test_bad_settings(changes: dict, said: str):
  with pytest.raises(ConfigError, match=said):
    EngineConfig(vocab_size=8, max_model_len=8, num_blocks=8, **changes)
