"""The measurement beside batches, small: it has figures of both, and says when the batch was too short."""

import json

import pytest

from tools.bench import beside_batches


@pytest.mark.long
@pytest.mark.parametrize("lines, code", [(2000, 0), (1, 2)])
def test_it_measures_both_or_says_why_not(capsys, lines, code):
  found = beside_batches.main(
    ["--requests=2", "--tokens=4", f"--lines={lines}", "--", "--token_budgets=64", "--max_num_seqs=8"]
  )
  said = capsys.readouterr()
  assert found == code
  if code:
    assert "send more lines" in said.err
  else:
    result = json.loads(said.out)
    assert result["alone"].keys() == result["beside the batch"].keys() and result["lines a second"] > 0
