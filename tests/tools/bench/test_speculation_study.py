"""The table of drafters, short."""

import pytest

from tools.bench import speculation_study


@pytest.mark.long
def test_a_line_for_each_drafter_and_acceptance(capsys):
  """Outputs that differ would raise."""
  flags = ("--shape=demo", "--acceptances=0,0.9", "--rows=2", "--tokens=24", "--requests=2", "--turns=1")
  assert speculation_study.main(flags) == 0
  lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[4:]]
  found = [(line[0].removeprefix("| "), line[1], line[2]) for line in lines]
  assert found[:4] == [(name, "2", share) for name in ("oracle", "draft") for share in ("0", "0.9")]
  assert [line[0] for line in found[4:]] == ["ngram", "grammar"] and found[-1][2] == "forced"
  assert all(int(line[3]) >= 2 and float(line[4]) > 0 for line in lines)


def test_an_unknown_drafter_is_refused(capsys):
  with pytest.raises(SystemExit) as stop:
    speculation_study.main(["--drafters=oracle,luck"])
  assert stop.value.code == 2 and "luck is not one of oracle" in capsys.readouterr().err
