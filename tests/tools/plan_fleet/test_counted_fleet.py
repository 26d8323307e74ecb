"""The counted fleet: time by hand, pools, host pools, scaling, lost replicas, disaggregated serving, bad input."""

from array import array
import dataclasses
import random

import pytest

from engine.errors import ConfigError
from tests.tools.plan_fleet.conftest import FAST, columns, config, load, served, sessions
from tools.plan_fleet.counted_fleet import CountedFleet, FleetPlan, ScalingRule
from tools.plan_fleet.counted_pool import CountedPool
from tools.plan_fleet.fleet_trace import FleetTrace
from tools.plan_fleet.gap_counts import GapCounts
from tools.report.latency import percentile
from tools.simulate.step_costs import HostCosts, StepCosts

# A step of up to 8 tokens takes 1 s, of up to 32 takes 2 s; the host takes 0.1 s to launch and 0.01 s to commit.
SECONDS = StepCosts(((8, 1.0), (32, 2.0)), host=HostCosts(launch_s=0.1, commit_s=0.01), kv_bytes_per_token=100)
SMALL = {"token_budgets": (8, 32), "prefill_chunk": 32}


# --- Time -------------------------------------------------------------------------------------------------------------


def test_one_request_by_hand():
  fleet = served(columns([(5.0, 6, 3)]), FleetPlan(), config(**SMALL), SECONDS)
  # Launched at 5.1, on the device until 6.1; the next steps begin when the one before is done.
  figures = fleet.figures()
  assert figures["ttft_p50_ms"] == pytest.approx(1110.0)
  assert figures["e2e_p50_ms"] == pytest.approx(3110.0)
  assert figures["tpot_p50_ms"] == pytest.approx(1000.0)
  assert figures["itl_p50_ms"] == pytest.approx(1000.0, rel=0.0025)
  assert figures["steps"] == 3
  assert figures["device_hours"] == pytest.approx(3.11 / 3600, abs=1e-4)


def test_transfers_take_latency_and_bandwidth_one_after_the_other():
  plan = FleetPlan(replicas=0, prefill_replicas=1, decode_replicas=1, transfer_bytes_s=100, transfer_latency_s=0.5)
  fleet = served(columns([(0.0, 3, 2), (0.0, 3, 2)]), plan, config(**SMALL), SECONDS)
  # Both prompts end at 1.11, their transfers half a second after 4.11 and 7.11. A decode takes 1.11 from then.
  assert sorted(fleet.e2es) == pytest.approx([1.11 + 3 + 0.5 + 1.11, 1.11 + 6 + 0.5 + 1.11], abs=0.02)
  assert fleet.figures()["transfer_tokens"] == 6


def test_gaps_are_counted_within_half_a_bin():
  rng, gaps, values = random.Random(1), GapCounts(), []
  for _ in range(300):
    first, slope, steps, rows = rng.uniform(1e-3, 0.2), rng.uniform(0, 1e-4), rng.randint(1, 200), rng.randint(1, 4)
    gaps.add_run(first, slope, steps, rows)
    values += [first + slope * step for step in range(steps) for _ in range(rows)]
  assert gaps.total == len(values)
  for percent in (50, 90, 99):
    assert gaps.percentile(percent) == pytest.approx(percentile(values, percent), rel=0.006)


# --- Caches -----------------------------------------------------------------------------------------------------------


def test_random_operations_leave_no_block_behind():
  rng, pool = random.Random(2), CountedPool(200, 2, host_keys=10)
  held: list[tuple[list[int], int]] = []
  for _ in range(5000):
    if held and rng.random() < 0.5:
      keys, private = held.pop(rng.randrange(len(held)))
      pool.release(keys, private, rng.randint(0, private))
    else:
      start = rng.randrange(20) * 10
      keys = list(range(start, start + rng.randint(1, 8)))
      hits, unheld = pool.match(keys, len(keys))
      assert unheld <= hits
      private = 2 * (len(keys) - hits)
      if private > pool.free - 2 * unheld:
        continue
      pool.share(keys[:hits])
      pool.take(private)
      taken = [key for key in keys[hits:] if pool.publish(key)]
      held.append((keys[:hits] + taken, private - 2 * len(taken)))
    assert 0 <= pool.free <= 200
  for keys, private in held:
    pool.release(keys, private)
  assert pool.free == 200


def test_affinity_saves_what_one_large_cache_saves():
  trace = sessions(600, 60.0)
  shares = {}
  for router in ("round_robin", "prefix_aware"):
    shares[router] = served(trace, FleetPlan(replicas=4, router=router)).figures()["cached_share"]
  one = served(trace, FleetPlan(), config(num_blocks=4096)).figures()["cached_share"]
  assert shares["prefix_aware"] >= 1.3 * shares["round_robin"]
  assert shares["prefix_aware"] >= 0.95 * one


def test_without_the_cache_nothing_is_shared():
  assert served(sessions(60, 20.0), FleetPlan(), config(prefix_cache_scope="off")).figures()["cached_share"] == 0


def test_a_host_pool_gives_back_what_the_device_evicted():
  trace, small = sessions(300, 15.0), config(num_blocks=300)
  without = served(trace, FleetPlan(), small).figures()
  with_pool = served(trace, FleetPlan(host_kv_bytes=64e6, host_bytes_s=20e9), small).figures()
  slow = served(trace, FleetPlan(host_kv_bytes=64e6, host_bytes_s=20e9, host_latency_s=0.5), small).figures()
  assert without["host_hit_share"] == 0 and with_pool["host_hit_share"] > 0.02
  assert with_pool["cached_share"] > without["cached_share"] + 0.02
  assert slow["ttft_p99_ms"] > with_pool["ttft_p99_ms"] + 300


def test_preempted_requests_load_what_the_host_has():
  count, rng = 120, random.Random(3)
  families = [rng.randrange(10) for _ in range(count)]
  trace = FleetTrace(
    array("d", (0.05 * number for number in range(count))),
    array("q", [70] * count),
    array("q", (rng.randint(100, 250) for _ in range(count))),
    [tuple(range(10 * family, 10 * family + 4)) for family in families],
    16,
  )
  figures = served(trace, FleetPlan(host_kv_bytes=1e8), config(num_blocks=60)).figures()
  assert figures["preemptions"] > 0 and figures["host_hit_share"] > 0 and figures["completed"] == count


# --- Scaling and losses -----------------------------------------------------------------------------------------------


RULE = ScalingRule(1, 6, target_load=4, start_s=5.0, up_delay_s=0.0, down_delay_s=10.0, interval_s=1.0)


def test_replicas_start_under_load_and_stop_after_it():
  busy = [(0.005 * number, 100, 100) for number in range(2500)]
  trace = columns([*busy, *((60.0 + 10 * number, 20, 4) for number in range(10))])
  fixed = served(trace, FleetPlan(replicas=1)).figures()
  fleet = served(trace, FleetPlan(replicas=1, scaling=RULE))
  scaled = fleet.figures()
  assert scaled["most_replicas"] == 6 and scaled["completed"] == len(trace)
  assert scaled["ttft_p50_ms"] < 0.5 * fixed["ttft_p50_ms"]
  hours = scaled["wall_s"] / 3600
  assert hours < scaled["device_hours"] < 3 * hours, "all but one stop soon after the load"


def test_a_later_start_costs_first_tokens():
  trace = columns([(0.005 * number, 100, 100) for number in range(2000)])
  soon, late = (
    served(trace, FleetPlan(replicas=1, scaling=dataclasses.replace(RULE, start_s=start_s))).figures()
    for start_s in (0.0, 10.0)
  )
  assert late["ttft_p99_ms"] > 1.2 * soon["ttft_p99_ms"]


def test_a_lost_replica_loses_only_what_had_begun():
  trace = load(300, 60.0)
  fleet = CountedFleet(config(), FAST, FleetPlan(replicas=2, losses=((2.0, 0),)), trace)
  assert fleet.run()
  figures = fleet.figures()
  assert figures["errors"].keys() <= {"REPLICA_LOST"} and figures["errors"]["REPLICA_LOST"] > 0
  assert figures["completed"] + figures["errors"]["REPLICA_LOST"] == len(trace)
  assert len(fleet.replicas) == 3, "another one replaces it"


# --- Bad input --------------------------------------------------------------------------------------------------------


def test_requests_that_fit_no_engine_are_counted():
  figures = served(columns([(0.0, 5000, 10), (1.0, 20, 4)]), FleetPlan()).figures()
  assert figures["errors"] == {"TOO_LONG": 1} and figures["completed"] == 1


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"replicas": 0}, "replicas=0 must be at least 1; set --replicas"),
    ({"prefill_replicas": 2}, "prefill_replicas=2 and decode_replicas=0 must be both 0"),
    ({"transfer_bytes_s": 0.0}, "transfer_gb_s=0 must be above 0; set --transfer_gb_s"),
    ({"host_latency_s": -1.0}, "host_latency_ms=-1 must be a finite number of 0 or more"),
    ({"devices_per_replica": 0}, "devices_per_replica=0 must be at least 1; set --tp"),
    ({"losses": ((3.0, 4),)}, "lose=3:4 must be a time of 0 or more and a replica below 1"),
    ({"router": "nearest"}, "policy='nearest' is unknown"),
    ({"replicas": 0, "prefill_replicas": 1, "decode_replicas": 1, "scaling": RULE}, "leave out --autoscale"),
  ],
)
def test_bad_plans_are_refused(values, message: str):
  with pytest.raises(ConfigError) as found:
    FleetPlan(**values)
  assert message in str(found.value)


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"min_replicas": 3, "max_replicas": 2}, "autoscale=3:2 must be MIN:MAX"),
    ({"target_kv": 1.5}, "target_kv=1.5 must be above 0 and at most 1"),
    ({"target_load": 0.0}, "target_load=0 must be above 0"),
    ({"start_s": -1.0}, "start_s=-1 must be a finite time"),
  ],
)
def test_bad_rules_of_scaling_are_refused(values, message: str):
  with pytest.raises(ConfigError) as found:
    ScalingRule(**values)
  assert message in str(found.value)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"policy": "sjf"}, "policy=sjf: the fleet's planner does not model it"),
    ({"batching": "static"}, "batching=static: the fleet's planner does not model it"),
    ({"block_size": 32}, "block_size=32 does not divide the 16 tokens of the trace's keys"),
  ],
)
def test_settings_that_counts_do_not_model_are_refused(changes, message: str):
  with pytest.raises(ConfigError) as found:
    CountedFleet(config(**changes), FAST, FleetPlan(), sessions(5, 5.0))
  assert message in str(found.value)


def test_a_table_without_kv_bytes_has_no_transfers():
  plan = FleetPlan(replicas=0, prefill_replicas=1, decode_replicas=1)
  with pytest.raises(ConfigError, match="has no kv_bytes_per_token"):
    CountedFleet(config(), dataclasses.replace(FAST, kv_bytes_per_token=0), plan, load(5, 5.0))
