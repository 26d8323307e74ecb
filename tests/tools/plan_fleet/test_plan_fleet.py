"""The command: runs, modelled costs, the search, its tables, bad input."""

import json
import math

import pytest

from engine.errors import ConfigError
from tests.tools.plan_fleet.conftest import FAST, config, load
from tools.plan_fleet.__main__ import main
from tools.plan_fleet.cheapest_fleet import FleetCandidate, FleetObjectives, find_cheapest
from tools.plan_fleet.counted_fleet import CountedFleet, FleetPlan
from tools.plan_fleet.modelled_costs import MODELS, model_costs, read_model_shape
from tools.simulate.step_costs import StepCosts

H200 = ["--device=h200", "--num_requests=300", "--rate_scale=20"]


def run(capsys, *flags: str) -> dict:
  assert main([*flags, "--json"]) == 0
  return json.loads(capsys.readouterr().out)


def test_a_run_names_its_costs(capsys):
  assert main(["--num_requests=30"]) == 0
  assert "step times: measured" in capsys.readouterr().out
  assert main([*H200, "--replicas=2"]) == 0
  out = capsys.readouterr().out
  assert "step times: MODELLED, Llama-3-8B's shape on h200" in out and "device-hours" in out


def test_a_run_writes_its_figures(capsys, tmp_path):
  path = tmp_path / "run.json"
  found = run(capsys, *H200, "--replicas=3", f"--output={path}")
  assert json.loads(path.read_text())["completed"] == found["completed"] == 300
  assert found["fleet"] == "3" and found["workload"]["requests"] == 300


def test_more_devices_are_faster_and_hold_more():
  shape = MODELS["llama-3-70b"]
  tables = {tp: model_costs(shape, "h200", tp, 8192, 16) for tp in (2, 4, 8)}
  assert tables[8].rung(1) < tables[4].rung(1) < tables[2].rung(1)
  # An all-reduce costs, so twice the devices are less than twice as fast.
  assert tables[8].rung(8192) > tables[4].rung(8192) / 2
  assert tables[8].about["num_blocks"] > 2 * tables[4].about["num_blocks"]
  assert "modelled" in tables[2].about["source"]


def test_one_device_matches_the_table_in_the_tree():
  """Llama-3.1-8B on an H200, benchmarks/costs: the same roofline, of other largest steps."""
  known = StepCosts.load("benchmarks/costs/llama_8b_h200_roofline.json")
  table = model_costs(MODELS["llama-3-8b"], "h200", 1, 8192, 16)
  for tokens in (1, 173, 1000, 8192):
    assert table.rung(tokens) == pytest.approx(known.rung(tokens), rel=1e-6)


def test_a_shape_comes_from_a_config_file(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(MODELS["llama-3-8b"]))
  assert read_model_shape(str(tmp_path))["hidden_size"] == 4096
  with pytest.raises(ConfigError, match="is none of llama-3-8b"):
    read_model_shape("llama-9")
  (tmp_path / "config.json").write_text("[]")
  with pytest.raises(ConfigError, match="holds no JSON object"):
    read_model_shape(str(tmp_path))


def test_the_search_finds_the_smallest_number():
  trace = load(400, 300.0)
  objectives = FleetObjectives(ttft_p99_ms=60.0)
  rows = find_cheapest([FleetCandidate(FleetPlan(), config(), FAST)], objectives, trace, 32, lambda line: None)
  count = int(rows[0]["fleet"])
  assert 1 < count < 32 and all(margin >= 0 for margin in rows[0]["margins"].values())
  fleet = CountedFleet(config(), FAST, FleetPlan(replicas=count - 1), trace)
  assert not fleet.run(0.06, 0.01 * len(trace) + 1) or fleet.figures()["ttft_p99_ms"] > 60.0


def test_the_search_tries_ratios_and_degrees(capsys):
  flags = ["--find_cheapest", "--tp=1,2", "--ratios=1:1", "--slo_ttft_p99_ms=500", "--slo_gap_p99_ms=25"]
  assert main([*H200, *flags]) == 0
  out = capsys.readouterr().out
  assert "MODELLED" in out and "cheapest: " in out and "below its limit" in out
  found = run(capsys, *H200, *flags)
  assert len(found["rows"]) == 4
  hours = [row["device_hours"] for row in found["rows"] if row["device_hours"]]
  assert hours == sorted(hours) and found["cheapest"]["device_hours"] == hours[0]


def test_objectives_that_no_fleet_meets_are_refused(capsys):
  assert main([*H200, "--find_cheapest", "--slo_ttft_p50_ms=0.1", "--max_replicas=4"]) == 2
  assert "no fleet of up to 4 replicas meets the objectives; raise --max_replicas" in capsys.readouterr().err


def test_margins_count_requests_that_did_not_end():
  objectives = FleetObjectives(ttft_p50_ms=10.0)
  figures = {"ttft_p50_ms": 5.0, "completed": 9, "requests": 10}
  assert objectives.margins(figures) == {"ttft_p50_ms": 0.5, "completed": pytest.approx(-0.1)}
  assert objectives.margins(figures | {"ttft_p50_ms": None})["ttft_p50_ms"] == -math.inf


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--device=h900"], "device=h900 is unknown; set --device to one of h100"),
    (["--device=h200", "--tp=3"], "tp=3 does not divide the 32 attention heads"),
    (["--device=v5e", "--model_shape=llama-3-70b"], "leaves 0 tokens of KV beside 141.1 GB of weights"),
    (["--device=h200", "--costs=x.json"], "costs=x.json and device=h200 both set the step costs"),
    (["--costs=none.json"], "cost table none.json cannot be read"),
    (["--tp=2"], "tp=2 needs modelled costs"),
    (["--draft_acceptance=0.7"], "draft_acceptance=0.7: a planned fleet serves by counts, and so without drafts"),
    (["--draft_share=0.5"], "leave out --draft_share, or simulate with python -m tools.simulate"),
    (["--draft_trace=x"], "draft_trace=x: a planned fleet"),
    (["--device=h200", "--tp=1,2"], "tp=1,2 has several values; add --find_cheapest"),
    (["--slo_ttft_p99_ms=5"], "objectives and --ratios are for the search; add --find_cheapest"),
    (["--find_cheapest"], "the search has no objective; set --slo_ttft_p50_ms"),
    (["--find_cheapest", "--slo_gap_p99_ms=5", "--replicas=2"], "leave out --replicas"),
    (["--trace=none.csv"], "trace none.csv cannot be read"),
    (["--num_blocks=4", "--max_num_seqs=2000"], "max_num_seqs=2000 exceeds the top token budget"),
    (["--lose=5"], "'5' must be SECONDS:REPLICA"),
    (["--autoscale=5"], "'5' must be two whole numbers"),
    (["--overlap=perhaps"], "'perhaps' must be true or false"),
    (["--output=/no/folder/x.json"], "the folder does not exist"),
  ],
)
def test_bad_input_is_one_line(flags, message: str, capsys):
  try:
    code = main([*flags])
  except SystemExit as ended:
    code = ended.code
  err = capsys.readouterr().err
  assert code == 2 and message in err and err.count("\n") == 1, err
