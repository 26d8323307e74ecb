"""The sweep of loads with drafts: what it prints, and what it compares."""

import json

import pytest

from tests.tools.simulate.test_simulate import FAST
from tools.simulate import draft_loads

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
  assert lines[2].count("acceptance") == 2 and [line.split()[1] for line in lines[4:]] == ["0.2", "1"]
  found = json.loads(output.read_text("utf-8"))
  assert found["rounds"] == 2 and found["acceptances"] == [0, 1]
  for load in found["loads"]:
    failed, right = load["ratios"]
    assert 0.97 <= failed["output_tok_s"] <= 1.03 and 0.97 <= failed["tpot_mean_ms"] <= 1.03
    assert right["tpot_mean_ms"] < 0.8, "steps of up to eight tokens take as long as those of one"
    assert f"{right['output_tok_s']:.2f}, {right['itl_p99_ms']:.2f}" in "".join(lines[4:])


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
