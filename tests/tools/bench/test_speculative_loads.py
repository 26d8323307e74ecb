"""The comparison of speculation at Poisson loads, short."""

import json

import pytest

from tools.bench import speculative_loads


@pytest.mark.long
def test_a_line_for_each_load(capsys):
  """Outputs that differ would raise."""
  assert speculative_loads.main(["--requests=10", "--turns=2", "--shares=0.5,2", "--max_num_seqs=16"]) == 0
  _, *lines = map(json.loads, capsys.readouterr().out.splitlines())
  assert [line["share"] for line in lines] == [0.5, 2.0]
  assert all(line["tokens_per_s"] > 0 < line["gap_p99"] for line in lines)
  assert lines[-1]["accepted_so_far"] > 0


@pytest.mark.parametrize("shares", ["", "0,1", "much"])
def test_bad_shares_are_refused(shares: str, capsys):
  with pytest.raises(SystemExit) as stop:
    speculative_loads.main([f"--shares={shares}"])
  assert stop.value.code == 2 and "must be numbers above 0" in capsys.readouterr().err
