"""The sweep of loads with drafts: what it prints, and what it compares."""

import json

import pytest

from tests.tools.simulate.test_simulate import FAST
from tools.simulate import draft_loads
from tools.simulate.replica import made_up

FLAGS = (
  "--acceptances=0,1",
  "--loads=0.2,1",
  "--rounds=2",
  "--num_requests=12",
  "--prompt_len=fixed:20",
  "--output_len=fixed:60",
  "--token_budgets=8,64",
  "--max_num_seqs=8",
  "--num_blocks=400",
  "--max_model_len=256",
)


def test_the_table_has_a_line_for_each_load_and_a_column_for_each_acceptance(tmp_path, capsys):
  FAST.save(str(tmp_path / "costs.json"))
  output = tmp_path / "loads.json"
  assert draft_loads.main([*FLAGS, f"--costs={tmp_path / 'costs.json'}", f"--output={output}"]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[2].count("acceptance") == 2 and "| none |" in lines[2]
  assert [line.split()[1] for line in lines[4:]] == ["0.2", "1"]
  found = json.loads(output.read_text("utf-8"))
  assert found["rounds"] == 2 and found["acceptances"] == [0, 1]
  for load in found["loads"]:
    failed, right = load["ratios"]
    assert 0.97 <= failed["output_tok_s"] <= 1.03 and 0.97 <= failed["tpot_mean_ms"] <= 1.03
    assert right["tpot_mean_ms"] < 0.8, "steps of up to eight tokens take as long as those of one"
    assert f"{right['output_tok_s']:.2f}, {right['itl_p99_ms']:.2f}, {right['tpot_mean_ms']:.2f}" in "".join(lines[4:])


def test_each_round_has_a_run_without_drafts_of_requests_that_come_later(tmp_path):
  FAST.save(str(tmp_path / "costs.json"))
  output = tmp_path / "loads.json"
  assert draft_loads.main([*FLAGS, f"--costs={tmp_path / 'costs.json'}", f"--output={output}"]) == 0
  for load in json.loads(output.read_text("utf-8"))["loads"]:
    assert [len(ratios) for ratios in load["rounds"]] == [3, 3], "none and two acceptances"
    found = [ratios[0]["output_tok_s"] for ratios in load["rounds"]]
    assert load["none"]["output_tok_s"] == pytest.approx(sum(found) / 2)
    assert any(ratio != 1 for ratio in found), "no request came later"


def test_the_column_none_has_the_least_and_the_largest_ratio_of_gaps(capsys):
  def ratios(gap):
    return {"output_tok_s": 1.0, "itl_p99_ms": gap, "tpot_mean_ms": 0.5}

  rounds = [[ratios(0.9), ratios(2.0)], [ratios(1.1), ratios(3.0)], [ratios(1.04), ratios(2.5)]]
  draft_loads.print_table([{"load": 0.9, "none": ratios(1.04), "ratios": [ratios(2.5)], "rounds": rounds}], [0.7])
  assert capsys.readouterr().out.splitlines() == [
    "| load | none | acceptance 0.7 |",
    "| --- | --- | --- |",
    "| 0.9 | 1.00, 1.04, 0.50 (0.90 to 1.10) | 1.00, 2.50, 0.50 |",
  ]


def test_delayed_arrivals_are_the_same_requests_in_order():
  arrivals = made_up([(0.001 * index, 8, 2) for index in range(50)])
  moved = draft_loads.delay_arrivals(arrivals, 0.01, seed=3)
  times = [arrival.arrival_s for arrival in moved]
  assert times == sorted(times) and {arrival.id for arrival in moved} == set(range(50))
  delays = [arrival.arrival_s - 0.001 * arrival.id for arrival in moved]
  assert 0 <= min(delays) < 0.002 and 0.008 < max(delays) <= 0.01
  assert moved == draft_loads.delay_arrivals(arrivals, 0.01, seed=3)
  assert moved != draft_loads.delay_arrivals(arrivals, 0.01, seed=4)


@pytest.mark.parametrize("flag", ["--report=x", "--load=0.5", "--draft_share=0.5", "--json"])
def test_flags_that_the_sweep_cannot_apply_are_refused(flag, capsys):
  assert draft_loads.main([flag]) == 2
  assert f"leave out {flag.partition('=')[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--acceptances=0,1.5", "--acceptances=much", "--loads=0", "--rounds=0"])
def test_bad_input_is_one_line(flag, capsys):
  with pytest.raises(SystemExit) as ended:
    draft_loads.main([flag])
  assert ended.value.code == 2
  assert flag.partition("=")[2].split(",")[-1] in capsys.readouterr().err.splitlines()[-1]
