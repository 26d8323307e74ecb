"""The simulator: time by hand, decisions equal to the real engine's, routers, transfers, the search, bad input."""

import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.settings import BATCHING, POLICIES
from tests.tools.conftest import ENGINE_FLAGS, ROOT, json_line, run_here, run_module
from tools import workload
from tools.chaos.server.books import check_scheduler
from tools.report.latency import Objectives, summary
from tools.report.run_file import read_run
from tools.report.shown_runs import prepared
from tools.simulate import __main__ as simulate
from tools.simulate.events import Collector, Fleet, Simulation
from tools.simulate.replica import Arrival, made_up
from tools.simulate.step_costs import After, HostCosts, Launch, StepCosts

AZURE = str(ROOT / "benchmarks" / "traces" / "azure_conv_500.csv")
# A step of up to 8 tokens takes 1 s, of up to 32 takes 2 s; the host takes 0.1 s to launch and 0.01 s to commit.
SECONDS = StepCosts(((8, 1.0), (32, 2.0)), host=HostCosts(launch_s=0.1, commit_s=0.01), kv_bytes_per_token=100)
FAST = StepCosts(
  ((8, 1e-3), (128, 4e-3)),
  decode_key_s=1e-7,
  prefill_pair_s=1e-8,
  host=HostCosts(launch_s=2e-4, launch_row_s=2e-6, commit_s=1e-5),
  kv_bytes_per_token=4096,
  about={"max_num_seqs": 16, "max_model_len": 512, "num_blocks": 512, "block_size": 16, "source": "made up"},
)


def config(**changes) -> EngineConfig:
  values = {
    "vocab_size": 1000,
    "max_model_len": 512,
    "num_blocks": 512,
    "token_budgets": (8, 32, 128),
    "max_num_seqs": 16,
    "prefill_chunk": 128,
    "max_queued_requests": 1000,
    "queue_timeout_s": 0.0,
    "request_timeout_s": 0.0,
  }
  return EngineConfig(**values | changes)


ALONE, ANY = Fleet(), Objectives()


def run(arrivals, settings=None, costs=FAST, fleet=ALONE, objectives=ANY) -> Simulation:
  simulation = Simulation(settings or config(), costs, fleet, Collector(objectives, keep=True))
  assert simulation.run(arrivals)
  for replica in simulation.replicas:
    check_scheduler(replica.scheduler)
    assert not replica.engine.num_live
  return simulation


def times(simulation: Simulation) -> dict[int | str, list[float]]:
  return {outcome.id: [time for time, _ in outcome.chunks] for outcome in simulation.collector.outcomes}


LOAD = made_up(
  [
    (request.arrival_s, len(request.prompt), request.output_len)
    for request in workload.synthetic(200, "lognormal:60:4:300", "lognormal:20:1:80", 10, seed=4, rate=40.0)
  ]
)


# --- Time -------------------------------------------------------------------------------------------------------------


def test_one_request_by_hand():
  small = config(token_budgets=(8, 32), prefill_chunk=32)
  simulation = run([Arrival(0, 5.0, bytes(6), 3)], small, SECONDS)
  # Launched at 5.1, on the device until 6.1. The second step is launched at 5.2, and begins when the first is done.
  assert times(simulation)[0] == pytest.approx([6.11, 7.11, 8.11])
  figures = simulation.figures()
  assert figures["ttft_p50_ms"] == pytest.approx(1110.0)
  assert figures["itl_p50_ms"] == pytest.approx(1000.0)
  assert figures["device_busy_s"] == pytest.approx(3.0)
  assert figures["steps_by_rung"] == {8: 3}
  assert figures["padding_share"] == pytest.approx((24 - 8) / 24, abs=1e-5)


def test_the_host_stands_between_steps_when_it_is_slower_than_the_device():
  slow_host = StepCosts(((8, 0.05),), host=HostCosts(launch_s=0.1, commit_s=0.01))
  simulation = run(
    [Arrival(0, 0.0, bytes(4), 4)], config(token_budgets=(8,), max_num_seqs=8, prefill_chunk=8), slow_host
  )
  # Launches end at 0.1, 0.2, 0.31 and 0.42; values are taken in once the next launch is through.
  assert times(simulation)[0] == pytest.approx([0.21, 0.32, 0.43, 0.48])


def test_cold_steps_take_longer_until_decodes_have_run():
  table = StepCosts(((8, 1.0),), cold_s=(0.5, 0.25))
  small = config(token_budgets=(8,), max_num_seqs=8, prefill_chunk=8)
  simulation = run([Arrival(0, 0.0, bytes(4), 4), Arrival(1, 50.0, bytes(4), 1)], small, table)
  first, second = (times(simulation)[name] for name in (0, 1))
  # The prompt finds the device idle; the decode behind it finds the caches full of the prompt's.
  assert first == pytest.approx([1.5, 3.0, 4.25, 5.25])
  assert second == pytest.approx([51.5])


def test_steps_and_launches_are_drawn_from_their_spread():
  table = StepCosts(
    ((8, 1.0),),
    host=HostCosts(launch_s=0.01),
    spread={After.ALIKE: ((8, (1.0, 2.0)),)},
    launch_spread={Launch.DECODES: (1.0, 3.0)},
  )
  small = config(token_budgets=(8,), max_num_seqs=8, prefill_chunk=8)
  arrivals = [Arrival(0, 0.0, bytes(4), 400)]
  taken, again = (times(run(arrivals, small, table))[0] for _ in range(2))
  assert taken == again, "a run can be repeated"
  assert times(run(arrivals, small, table, Fleet(step_seed=1)))[0] != taken, "and another seed is another run"
  gaps = [round(after - before, 6) for before, after in itertools.pairwise(taken)]
  assert set(gaps) == {1.0, 2.0}, "the host's part hides behind the device"
  assert 140 < gaps.count(1.0) < 260


def test_a_step_is_drawn_by_what_was_before_it():
  table = StepCosts(
    ((8, 1.0), (32, 4.0)),
    host=HostCosts(launch_s=0.01),
    spread={After.IDLE: ((8, (2.0,)), (32, (3.0,))), After.SMALLER: ((32, (1.5,)),)},
    launch_spread={Launch.COLD_PROMPTS: (10.0,), Launch.PROMPTS: (5.0,)},
  )
  simulation = run(
    [Arrival(0, 0.0, bytes(4), 3), Arrival(1, 0.5, bytes(20), 2), Arrival(2, 50.0, bytes(range(20)), 1)],
    config(token_budgets=(8, 32), prefill_chunk=32),
    table,
  )
  first, second, third = (times(simulation)[name] for name in range(3))
  # A prompt after nothing: a launch of 0.1 and twice 1 s; then a decode. The second prompt, seen at 2.1, is in a large
  # step behind a small one: 6 s. Its decode comes after a step that is not smaller.
  assert first == pytest.approx([2.1, 3.1, 9.1])
  assert second == pytest.approx([9.1, 10.1])
  assert third == pytest.approx([50.0 + 0.1 + 12.0])


def test_what_arrives_during_a_step_is_seen_by_the_next_one():
  small = config(token_budgets=(8, 32), prefill_chunk=32)
  simulation = run([Arrival(0, 0.0, bytes(6), 4), Arrival(1, 0.15, bytes(20), 1)], small, SECONDS)
  first, second = (times(simulation)[name] for name in (0, 1))
  # The turn at 0.1 launches the second step; the request joins the third, launched at 1.21, which takes 2 s from 2.1.
  assert second == pytest.approx([4.11])
  assert first == pytest.approx([1.11, 2.11, 4.11, 5.11])


def test_figures_are_those_of_the_shared_definitions():
  objectives = Objectives(ttft_s=0.02, tpot_s=0.004)
  simulation = run(LOAD, objectives=objectives)
  figures, outcomes = simulation.figures(), simulation.collector.outcomes
  expected = summary(outcomes, sum(len(arrival.prompt) for arrival in LOAD), objectives)
  assert 0 < expected["slo_attainment"] < 1, "the objectives tell nothing apart"
  for name, value in expected.items():
    if not name.startswith("send_delay"):
      assert figures[name] == pytest.approx(value, abs=2e-3), name
  assert figures["decode_tokens"] == sum(arrival.output_len - 1 for arrival in LOAD)
  assert figures["prefill_tokens"] == sum(len(arrival.prompt) for arrival in LOAD)


def test_two_runs_are_the_same():
  assert times(run(LOAD)) == times(run(LOAD))


@pytest.mark.parametrize("batching", BATCHING)
def test_every_way_of_batching_serves_everything(batching):
  fleet = Fleet(prefill_replicas=1, decode_replicas=1) if batching == "disaggregated" else ALONE
  figures = run(LOAD[:60], config(batching=batching), fleet=fleet).figures()
  assert figures["completed"] == 60
  assert figures["output_tokens"] == sum(arrival.output_len for arrival in LOAD[:60])


def test_decisions_are_those_of_the_real_engine(tiny_model, compile_cache, tmp_path):
  requests = workload.synthetic(25, "uniform:1:90", "uniform:1:40", 96, seed=6)
  with open(tmp_path / "requests.jsonl", "w", encoding="utf-8") as file:
    workload.write_requests(file, requests, {})
  done = run_here(
    "tools.bench_offline",
    f"--model={tiny_model}",
    f"--requests={tmp_path}/requests.jsonl",
    f"--compile_cache_dir={compile_cache}",
    *ENGINE_FLAGS,
  )
  real = json_line(done)
  # Whether padding is computed is the device's: on a CPU its kernels skip it, where they are built.
  dataclasses.replace(FAST, by_tokens=real["skipped_tokens"] > 0).save(str(tmp_path / "costs.json"))
  flags = [f"--costs={tmp_path}/costs.json", f"--requests={tmp_path}/requests.jsonl", "--max_model_len=256", "--json"]
  simulated = json_line(run_module("tools.simulate", *flags, *ENGINE_FLAGS))
  names = ("steps", "decode_tokens", "prefill_tokens", "preemptions", "padding_share", "skipped_tokens")
  names += ("steps_by_rung", "output_tokens")
  assert {name: simulated[name] for name in names} == {name: real[name] for name in names}


def test_no_jax_is_loaded(tmp_path):
  FAST.save(str(tmp_path / "costs.json"))
  code = f"""
import sys
from tools.simulate import __main__ as simulate
from tools.simulate import tune_ladder
simulate.main(["--costs={tmp_path}/costs.json", "--num_requests=3"])
print([name for name in ("jax", "numpy", "flax", "grpc") if name in sys.modules])
"""
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
  assert done.stdout.splitlines()[-1] == "[]"


# --- Several replicas -------------------------------------------------------------------------------------------------


def steps_of(simulation: Simulation) -> list[int]:
  return [replica.engine.stats().num_decode_tokens for replica in simulation.replicas]


def test_round_robin_takes_turns_and_least_loaded_looks():
  # The first of every two requests is long: taking turns, one replica gets all of them.
  arrivals = made_up([(0.5 * number, 8, 100 if number % 2 == 0 else 2) for number in range(20)])
  slow = StepCosts(((8, 0.05), (128, 0.06)))
  turns = run(arrivals, costs=slow, fleet=Fleet(2, "round_robin"))
  loads = run(arrivals, costs=slow, fleet=Fleet(2, "least_loaded"))
  assert steps_of(turns) == [10 * 99, 10]
  assert max(steps_of(loads)) < 0.8 * 1000


def test_a_prefix_aware_router_finds_prefixes_again():
  prefixes = [bytes([number] * 128) for number in range(1, 5)]
  arrivals = [
    Arrival(number, 0.05 * number, prefixes[(number * 7 + number // 4) % 4] + bytes([number]), 4)
    for number in range(40)
  ]
  settings = config(num_blocks=64)
  aware = run(arrivals, settings, fleet=Fleet(4, "prefix_aware")).figures()
  turns = run(arrivals, settings, fleet=Fleet(4, "round_robin")).figures()
  assert aware["prefix_hit_tokens"] == 36 * 128
  assert turns["prefix_hit_tokens"] < aware["prefix_hit_tokens"]


def test_requests_made_up_of_zeros_share_nothing():
  assert run(LOAD).figures()["prefix_hit_tokens"] == 0


def test_more_replicas_do_not_serve_worse():
  one, four = (run(LOAD, fleet=Fleet(count)).figures() for count in (1, 4))
  assert four["replicas"] == 4
  assert four["ttft_p99_ms"] < one["ttft_p99_ms"]
  assert four["output_tokens"] == one["output_tokens"]


# --- Disaggregated ----------------------------------------------------------------------------------------------------

SPLIT = Fleet(prefill_replicas=1, decode_replicas=1, transfer_bytes_s=200.0, transfer_latency_s=0.5)


def test_kv_travels_between_the_first_token_and_the_second():
  small = config(token_budgets=(8, 32), prefill_chunk=32)
  simulation = run([Arrival(0, 0.0, bytes(20), 3)], small, SECONDS, SPLIT)
  # 20 tokens of 100 bytes at 200 bytes/s take 10 s, and 0.5 s of latency: it lands at 12.61, and only the token that
  # the first device sampled is computed there.
  assert times(simulation)[0] == pytest.approx([2.11, 2.11 + 10.5 + 1.11, 2.11 + 10.5 + 2.11])
  assert simulation.figures()["prefix_hit_tokens"] == 0
  assert [replica.engine.stats().num_prefill_tokens for replica in simulation.replicas] == [20, 1]


def test_a_request_that_comes_with_its_kv_waits_for_room():
  # Each needs 2 blocks and grows to 3 of 4; the second joins when the first has ended, 2 tokens later.
  small = config(token_budgets=(8, 32), prefill_chunk=32, num_blocks=4, max_model_len=64)
  fleet = Fleet(prefill_replicas=1, decode_replicas=1, transfer_bytes_s=1e9)
  simulation = run([Arrival(0, 0.0, bytes(31), 4), Arrival(1, 0.0, bytes(31), 4)], small, SECONDS, fleet)
  first, second = (times(simulation)[name] for name in (0, 1))
  assert first[0] < second[0] < first[-1] < second[1]
  assert simulation.figures()["preemptions"] == 0


def test_a_sum_of_tokens_that_no_decode_replica_holds_is_refused_at_once():
  fleet = Fleet(prefill_replicas=1, decode_replicas=1)
  figures = run([Arrival(0, 0.0, bytes(60), 10)], config(num_blocks=4), fleet=fleet).figures()
  assert (figures["steps"], figures["errors"]) == (0, {"REQUEST_TOO_LONG": 1})


def test_a_crowd_before_the_decode_replicas_is_refused():
  fleet = Fleet(prefill_replicas=1, decode_replicas=1)
  slow = [Arrival(number, 3.0 * number, bytes(4), 400) for number in range(8)]
  few = config(token_budgets=(8, 32), prefill_chunk=32, max_num_seqs=2, max_queued_requests=3)
  assert run(slow, few, SECONDS, fleet).figures()["errors"] == {"OVERLOADED": 3}


def test_a_link_carries_one_transfer_at_a_time():
  small = config(token_budgets=(8, 32), prefill_chunk=32)
  simulation = run([Arrival(0, 0.0, bytes(4), 2), Arrival(1, 0.0, bytes(4), 2)], small, SECONDS, SPLIT)
  first, second = (times(simulation)[name] for name in (0, 1))
  # Both prompts are done at 1.11, 400 bytes each: they leave at 3.11 and 5.11.
  assert first[1] == pytest.approx(3.11 + 0.5 + 1.11)
  assert second[1] == pytest.approx(5.11 + 0.5 + 1.11)


def test_split_replicas_serve_everything_even_in_a_small_pool():
  fleet = Fleet(prefill_replicas=2, decode_replicas=2, transfer_bytes_s=1e9)
  figures = run(LOAD, config(num_blocks=48), fleet=fleet).figures()
  assert figures["completed"] == len(LOAD)
  assert figures["output_tokens"] == sum(arrival.output_len for arrival in LOAD)


def test_prompts_elsewhere_do_not_hold_up_decodes():
  # Four requests answer at length while long prompts come, each for a single token.
  arrivals = made_up([(0.0, 8, 200)] * 4 + [(0.02 * number, 300, 1) for number in range(1, 20)])
  together = run(arrivals, fleet=Fleet(2, "round_robin")).figures()
  split = run(arrivals, fleet=Fleet(prefill_replicas=1, decode_replicas=1, transfer_bytes_s=1e12)).figures()
  assert together["itl_p99_ms"] > 4.0 > 2.0 > split["itl_p99_ms"]


# --- How many ---------------------------------------------------------------------------------------------------------

BURST = made_up([(0.001 * number, 60, 20) for number in range(100)])


def test_the_number_found_serves_well_and_one_less_does_not():
  objectives = Objectives(ttft_s=0.05)
  count, figures = simulate.find_replicas(config(), FAST, Fleet(), objectives, BURST, 0.9, 64)
  assert count > 1
  assert figures["replicas"] == count
  assert figures["slo_attainment"] >= 0.9
  fewer = run(BURST, fleet=Fleet(count - 1), objectives=objectives).figures()
  assert fewer["slo_attainment"] < 0.9


def test_what_cannot_be_met_is_told():
  with pytest.raises(ConfigError, match="any number of devices.*0.0% of the requests.*--slo_ttft_ms"):
    simulate.find_replicas(config(), FAST, Fleet(), Objectives(ttft_s=0.0005), BURST, 0.9, 64)
  with pytest.raises(ConfigError, match="not met with 1 replicas, the limit; raise --max_replicas"):
    simulate.find_replicas(config(), FAST, Fleet(), Objectives(ttft_s=0.05), BURST, 0.9, 1)


def test_refused_requests_miss():
  figures = run(BURST, config(max_queued_requests=5), objectives=Objectives(ttft_s=1e9)).figures()
  assert figures["errors"].keys() == {"OVERLOADED"}
  assert figures["slo_attainment"] == pytest.approx(1 - figures["errors"]["OVERLOADED"] / 100)
  assert figures["completed"] + figures["failed"] == 100


# --- The command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def costs_file(tmp_path_factory) -> str:
  path = tmp_path_factory.mktemp("costs") / "costs.json"
  FAST.save(str(path))
  return str(path)


ENGINE = ["--token_budgets=8,32,128", "--prefill_chunk=128"]


def call(capsys, *flags) -> tuple[int, str, str]:
  try:
    code = simulate.main([*flags])
  except SystemExit as stop:
    code = stop.code
  captured = capsys.readouterr()
  return code, captured.out, captured.err


def test_the_command_replays_a_trace(costs_file, capsys):
  flags = [f"--costs={costs_file}", f"--trace={AZURE}", "--scale=0.1", "--rate_scale=0.1", "--repeat=2", "--json"]
  code, out, _ = call(capsys, *flags, "--num_requests=600", *ENGINE)
  figures = json.loads(out)
  assert code == 0
  assert figures["requests"] == figures["completed"] == 600
  assert figures["workload"]["length_scale"] == 0.1
  assert figures["costs"]["source"] == "made up"
  assert figures["simulator"]["steps_per_minute"] > 0
  assert "capacity_request_s" not in figures["workload"], "the trace's own times were asked for"


def test_a_rate_replaces_the_times_of_a_trace(costs_file, capsys):
  flags = [f"--costs={costs_file}", f"--trace={AZURE}", "--scale=0.1", "--num_requests=50", "--rate=1000", "--json"]
  figures = json.loads(call(capsys, *flags, *ENGINE)[1])
  assert figures["wall_s"] < 5
  assert figures["workload"]["rate"] == 1000


def test_disaggregated_batching_has_one_engine_for_each_part(costs_file, capsys):
  flags = [f"--costs={costs_file}", "--batching=disaggregated", "--num_requests=20", "--json"]
  code, out, _ = call(capsys, *flags, *ENGINE)
  figures = json.loads(out)
  assert code == 0
  assert (figures["replicas"], figures["completed"]) == (2, 20)
  assert (figures["fleet"]["prefill_replicas"], figures["fleet"]["decode_replicas"]) == (1, 1)


def test_a_trace_end_to_end_keeps_its_order():
  rows = simulate.repeated([(0.0, 1, 2), (3.0, 4, 5)], 2)
  assert rows == [(0.0, 1, 2), (3.0, 4, 5), (6.0, 1, 2), (9.0, 4, 5)]


def test_a_flagfile_of_the_server_is_taken(costs_file, capsys, tmp_path):
  (tmp_path / "ladder.flags").write_text("# a ladder\n\n--token_budgets=16,128\n--prefill_chunk=128\n", "utf-8")
  flags = [f"--costs={costs_file}", f"--flagfile={tmp_path}/ladder.flags", "--num_requests=5", "--json"]
  code, out, _ = call(capsys, *flags)
  assert code == 0
  assert json.loads(out)["steps_by_rung"].keys() <= {"16", "128"}


# --- Policies side by side --------------------------------------------------------------------------------------------


def test_policies_are_told_apart_by_default(capsys, tmp_path):
  """A fresh clone, no flag but the policies: same requests, a queue, and figures that differ for each."""
  code, out, _ = call(
    capsys, f"--policies={','.join(POLICIES)}", "--num_requests=250", f"--output={tmp_path}/runs.json"
  )
  assert code == 0
  head, table = out.split("\n\n")
  lines = table.splitlines()
  assert [line.split()[0] for line in lines] == ["policy", *POLICIES]
  assert "4 tenants" in head and "load 1.1: " in head and "benchmarks/costs/demo_cpu.json (measured)" in head
  runs = json.loads((tmp_path / "runs.json").read_text("utf-8"))["runs"]
  by_policy = {run["policy"]: run for run in runs}
  assert by_policy.keys() == set(POLICIES)
  assert len({(run["completed"], run["output_tokens"], run["prompt_tokens"]) for run in runs}) == 1
  assert len({run["ttft_mean_ms"] for run in runs}) == len(runs), "two policies did the same"
  workload_of = runs[0]["workload"]
  assert workload_of["rate"] == pytest.approx(1.1 * workload_of["capacity_request_s"])
  assert by_policy["sjf"]["ttft_p50_ms"] < by_policy["fcfs"]["ttft_p50_ms"]
  assert by_policy["fair"]["fairness"] > by_policy["fcfs"]["fairness"]
  urgent = {name: run["priorities"]["0"]["ttft_p99_ms"] for name, run in by_policy.items()}
  assert max(urgent["priority"], urgent["tiers"]) < urgent["fcfs"]


def test_a_table_is_for_people_and_json_for_programs(costs_file, capsys, tmp_path):
  flags = [f"--costs={costs_file}", "--num_requests=10", "--load=0.5", *ENGINE]
  code, out, _ = call(capsys, *flags, f"--output={tmp_path}/one.json")
  kept = json.loads((tmp_path / "one.json").read_text("utf-8"))
  assert code == 0 and out.splitlines()[-1].split()[0] == "fcfs"
  line = json.loads(call(capsys, *flags, "--json")[1])
  assert line.pop("simulator").keys() == kept.pop("simulator").keys() and line == kept
  assert call(capsys, *flags, "--json", "--policies=fcfs,sjf")[1].count("\n") == 1


def test_runs_are_drawn(costs_file, capsys, tmp_path):
  folder = tmp_path / "out"
  own = "tests.engine.policies:LeastLeft"
  code, out, _ = call(
    capsys, f"--costs={costs_file}", "--num_requests=60", f"--policies=fcfs,{own}", f"--report={folder}", *ENGINE
  )
  assert code == 0 and out.splitlines()[-1] == f"report: {folder}/report.html"
  runs = {run.label: run for run in map(read_run, map(str, folder.glob("*.jsonl")))}
  assert {label: run.about["policy"] for label, run in runs.items()} == {"fcfs": "fcfs", "LeastLeft": own}
  one = runs["fcfs"]
  assert len(one.outcomes) == len(one.served) == 60 and len(one.steps) == one.figures["steps"]
  assert {outcome.tenant for outcome in one.outcomes} == {f"tenant{number}" for number in range(4)}
  shown = {one.label: one.figures for one in prepared(runs.values(), ANY)}
  for label, run in runs.items():  # the page's figures, from the file, are the simulator's
    for name in ("fairness", "output_tokens", "ttft_p99_ms", "itl_p99_ms"):
      assert shown[label][name] == pytest.approx(run.figures[name], abs=2e-3), name
    for name, figures in run.figures["tenants"].items():
      assert shown[label]["tenants"][name] == pytest.approx(figures, abs=2e-3)
  page = (folder / "report.html").read_text("utf-8")
  assert page.count("<td>LeastLeft</td>") == 2 and "simulated, with step times of" in page
  names = {path.stem for path in folder.glob("*.png")}
  assert names >= {"modes", "cdf", "senders", "phases", "kv", "steps_1", "throughput_latency"}


def test_a_request_file_keeps_its_times_tenants_and_priorities(costs_file, capsys, tmp_path):
  requests = [
    workload.WorkRequest(number, 0.5 * number, (1, 2, 3), 4, tenant="ab"[number % 2], priority=number % 3)
    for number in range(12)
  ]
  with open(tmp_path / "requests.jsonl", "w", encoding="utf-8") as file:
    workload.write_requests(file, requests, {})
  flags = [f"--costs={costs_file}", f"--requests={tmp_path}/requests.jsonl", "--json", *ENGINE]
  figures = json.loads(call(capsys, *flags)[1])
  assert figures["wall_s"] > 5.5
  assert {name: each["requests"] for name, each in figures["tenants"].items()} == {"a": 6, "b": 6}
  assert {name: each["requests"] for name, each in figures["priorities"].items()} == {"0": 4, "1": 4, "2": 4}


TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,2\n"


@pytest.mark.parametrize(
  ("flags", "complaint"),
  [
    (["--trace={}/columns.csv"], "columns"),
    (["--trace={}/negative.csv"], "-3 tokens is below 0"),
    (["--trace={}/unsorted.csv"], "sort rows"),
    (["--trace=/nowhere.csv"], "cannot be read"),
    (["--costs=/nowhere.json"], "cannot be read"),
    (["--token_budgets=8,256", "--prefill_chunk=256"], "256 tokens is above 128"),
    (["--token_budgets=8,32", "--prefill_chunk=64"], "prefill_chunk=64 exceeds the top token budget 32"),
    (["--flagfile={}/narrow.flags"], "max_num_seqs=16 exceeds the top token budget 8"),
    (["--flagfile={}/words.flags"], "lines are --name=value"),
    (["--flagfile=/nowhere.flags"], "cannot be read"),
    (["--batching=sideways"], "sideways"),
    (["--policy=sideways"], "sideways"),
    (["--policies=fcfs,sideways"], "sideways"),
    (["--policies=fcfs,no_module:Mine"], "no_module"),
    (["--policies=fcfs,fcfs"], "twice"),
    (["--policies=fcfs,sjf", "--find_replicas"], "one policy"),
    (["--load=1.5", "--rate=3"], "load=1.5"),
    (["--batch_share=2"], "batch_share=2"),
    (["--output={}/nowhere/x.json"], "folder"),
    (["--router=sideways"], "sideways"),
    (["--prefill_replicas=1"], "decode_replicas=0"),
    (["--batching=disaggregated", "--prefill_replicas=1"], "decode_replicas=0"),
    (["--attainment=1.5"], "attainment=1.5"),
    (["--find_replicas", "--slo_ttft_ms=0.1"], "cannot be met"),
    (["--num_blocks=4", "--kv_cache_mb=4"], "set only one"),
    (["--rate=0"], "--rate"),
  ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags, complaint, costs_file, capsys, tmp_path):
  files = {
    "columns.csv": "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,5\n",
    "negative.csv": TRACE + "2023-11-16 18:15:47,-3,2\n",
    "unsorted.csv": TRACE + "2023-11-16 18:15:45,3,2\n",
    "narrow.flags": "--token_budgets=4,8\n--prefill_chunk=8\n",
    "words.flags": "a ladder\n",
  }
  for name, text in files.items():
    (pathlib.Path(tmp_path) / name).write_text(text, "utf-8")
  code, out, err = call(capsys, f"--costs={costs_file}", *ENGINE, *[flag.format(tmp_path) for flag in flags])
  assert code == 2
  assert out == ""
  assert complaint in err
  assert err.count("\n") == 1
