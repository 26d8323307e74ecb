"""Counts against the scheduler itself: the same trace, costs and policy in tools.plan_fleet and tools.simulate."""

import dataclasses

import pytest

from engine.routing import POLICIES
from tests.tools.plan_fleet.conftest import FAST, columns, config, load, sessions
from tools.plan_fleet import check_agreement
from tools.plan_fleet.check_agreement import compare_simulators
from tools.plan_fleet.counted_fleet import FleetPlan
from tools.simulate.step_costs import After, Launch

# Of the exact figure; for the cached share, of 1. A bin of gaps is 0.5 % wide, and their tail is sparse.
SAME = {
  "ttft_p50_ms": 0.002,
  "ttft_p99_ms": 0.002,
  "itl_p50_ms": 0.006,
  "itl_p99_ms": 0.03,
  "tpot_p50_ms": 0.002,
  "output_tok_s": 0.001,
  "cached_share": 0.002,
}


def check(found, limits) -> None:
  for name, limit in limits.items():
    assert abs(found["figures"][name]["difference"]) <= limit, (name, found["figures"])
  assert found["completed"][0] == found["completed"][1]


@pytest.mark.parametrize("rate", [10.0, 60.0, 400.0])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("computes_padding", [True, False])
def test_one_replica_agrees_with_the_scheduler(rate: float, overlap: bool, computes_padding: bool):
  costs = dataclasses.replace(FAST, by_tokens=not computes_padding)
  settings = config(overlap=overlap, computes_padding=computes_padding)
  check(compare_simulators(settings, costs, FleetPlan(), load(200, rate)), SAME)


@pytest.mark.parametrize("rate", [10.0, 60.0])
def test_prompts_that_fill_the_largest_rung_where_nothing_runs_agree(rate: float):
  costs, settings = dataclasses.replace(FAST, by_tokens=True), config(computes_padding=False, prefill_chunk=96)
  check(compare_simulators(settings, costs, FleetPlan(), load(200, rate)), SAME)


def test_a_host_slower_than_its_device_agrees():
  host = dataclasses.replace(FAST.host, launch_s=3e-3)
  check(compare_simulators(config(), dataclasses.replace(FAST, host=host), FleetPlan(), load(150, 30.0)), SAME)


def test_cold_steps_agree():
  costs = dataclasses.replace(FAST, cold_s=(2e-3, 1e-3, 5e-4, 3e-4, 2e-4, 1e-4))
  check(compare_simulators(config(), costs, FleetPlan(), load(150, 20.0)), SAME)


@pytest.mark.parametrize("overlap", [True, False])
def test_steps_of_random_time_agree_in_percentiles(overlap: bool):
  """Most equal steps take less than their mean, and one in ten several times it, as on a machine that others share."""
  factors = (0.8,) * 7 + (0.9,) * 2 + (3.0,)
  costs = dataclasses.replace(
    FAST,
    spread=dict.fromkeys(After, ((8, factors), (128, factors))),
    launch_spread=dict.fromkeys(Launch, factors),
  )
  found = compare_simulators(config(overlap=overlap), costs, FleetPlan(), load(600, 20.0))
  check(found, {"ttft_p50_ms": 0.05, "ttft_p99_ms": 0.2, "itl_p50_ms": 0.05, "itl_p99_ms": 0.1, "output_tok_s": 0.01})


def test_a_full_pool_agrees():
  """Which request is preempted, and what its blocks leave behind, is modelled less exactly."""
  long = columns([(0.01 * number, 20 + number % 50, 60 + 37 * number % 100) for number in range(100)])
  found = compare_simulators(config(num_blocks=40), FAST, FleetPlan(), long)
  assert min(found["preemptions"]) > 10
  assert abs(found["preemptions"][0] - found["preemptions"][1]) <= 0.2 * found["preemptions"][0]
  check(found, {"ttft_p50_ms": 0.05, "tpot_p50_ms": 0.05, "output_tok_s": 0.02, "itl_p50_ms": 0.05})


@pytest.mark.parametrize("router", sorted(POLICIES))
def test_routers_and_shared_prefixes_agree(router: str):
  found = compare_simulators(config(), FAST, FleetPlan(replicas=3, router=router), sessions(250, 40.0))
  assert found["figures"]["cached_share"]["exact"] > 0.3
  check(found, SAME | {"ttft_p50_ms": 0.02, "ttft_p99_ms": 0.05})


def test_evicted_prefixes_agree():
  """A cache too small for all conversations."""
  wide = compare_simulators(config(), FAST, FleetPlan(), sessions(250, 20.0))
  found = compare_simulators(config(num_blocks=300), FAST, FleetPlan(), sessions(250, 20.0))
  shares = [each["figures"]["cached_share"]["exact"] for each in (wide, found)]
  assert shares[1] < shares[0] - 0.05
  check(found, {"ttft_p50_ms": 0.05, "output_tok_s": 0.01, "cached_share": 0.02})


def test_prefill_and_decode_apart_agree():
  plan = FleetPlan(replicas=0, prefill_replicas=1, decode_replicas=2, transfer_bytes_s=5e7, transfer_latency_s=1e-3)
  found = compare_simulators(config(), FAST, plan, load(200, 60.0))
  check(
    found, {"ttft_p50_ms": 0.02, "ttft_p99_ms": 0.02, "tpot_p50_ms": 0.02, "itl_p50_ms": 0.02, "output_tok_s": 0.02}
  )


def test_the_command_compares_a_public_trace(capsys):
  """The measured table of the demo model and the sample of Azure's chat trace."""
  code = check_agreement.main(["--num_requests=120", "--rate_scale=2"])
  out, err = capsys.readouterr()
  assert code == 0, err
  assert "ttft_p50_ms" in err and '"within": true' in out


def test_the_command_exits_with_1_beyond_a_limit(monkeypatch, capsys):
  monkeypatch.setitem(check_agreement.LIMITS, "itl_p50_ms", -1.0)
  assert check_agreement.main(["--num_requests=20"]) == 1
  assert '"within": false' in capsys.readouterr().out


def test_what_the_exact_simulator_lacks_is_refused(capsys):
  assert check_agreement.main(["--num_requests=20", "--autoscale=1:3"]) == 2
  assert "leave out --autoscale" in capsys.readouterr().err
