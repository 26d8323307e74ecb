"""Traces cut out of originals: the same bytes from the same seed, the original's rows, and bad input in one line."""

import hashlib

import pytest

from tests.tools.conftest import ROOT
from tools import make_trace, workload

TRACES = ROOT / "benchmarks" / "traces"
ROWS = [f"2023-11-16 18:15:{second:02}.6805900,{100 + second},{second + 1}" for second in range(40)]


@pytest.fixture
def originals(tmp_path):
  (tmp_path / "timed.csv").write_text("\r\n".join([make_trace.COLUMNS, *ROWS]) + "\r\n", "utf-8")
  lengths = [
    "num_prefill_tokens,num_decode_tokens,pd_ratio",
    *(f"{number + 1},{2 * number},0.5" for number in range(60)),
  ]
  (tmp_path / "lengths.csv").write_text("\n".join(lengths) + "\n", "utf-8")
  return tmp_path


def make(folder, *flags: str) -> bytes:
  assert make_trace.main([*flags, f"--output={folder}/out.csv"]) == 0
  return (folder / "out.csv").read_bytes()


def test_rows_with_times_are_copied_as_they_are(originals):
  source = originals / "timed.csv"
  text = make(originals, f"--source={source}", "--num_requests=10", "--first=5").decode()
  lines = text.splitlines()
  assert [line for line in lines if not line.startswith("#")] == [make_trace.COLUMNS, *ROWS[5:15]]
  assert "CC-BY-4.0" in text and hashlib.sha256(source.read_bytes()).hexdigest() in text
  rows = workload.read_trace(f"{originals}/out.csv")
  assert rows[0] == (0.0, 105, 6) and rows[-1] == (pytest.approx(9.0), 114, 15)


def test_lengths_get_arrivals_and_the_seed_decides_everything(originals):
  flags = [f"--source={originals}/lengths.csv", "--num_requests=30", "--rate=4"]
  first = make(originals, *flags, "--seed=3")
  assert first == make(originals, *flags, "--seed=3") != make(originals, *flags, "--seed=4")
  make(originals, *flags, "--seed=3")
  rows = workload.read_trace(f"{originals}/out.csv")
  assert len({prompt for _, prompt, _ in rows}) == 30 and all(output == 2 * (prompt - 1) for _, prompt, output in rows)
  assert [prompt for _, prompt, _ in rows] == sorted(prompt for _, prompt, _ in rows), "in the order of the file"
  assert 29 / rows[-1][0] == pytest.approx(4, rel=0.5)


@pytest.mark.parametrize(
  ("flags", "complaint"),
  [
    (["--source={}/timed.csv", "--num_requests=41"], "more than the 40 rows"),
    (["--source={}/timed.csv", "--num_requests=10", "--first=31"], "more than the 40 rows"),
    (["--source={}/timed.csv", "--num_requests=10", "--first=-1"], "first=-1 must be at least 0"),
    (["--source={}/timed.csv", "--num_requests=10", "--rate=2"], "leave out --rate"),
    (["--source={}/lengths.csv", "--num_requests=10"], "set --rate"),
    (["--source={}/lengths.csv", "--num_requests=10", "--rate=2", "--first=3"], "leave out --first"),
    (["--source=/nowhere.csv"], "cannot be read"),
  ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags, complaint, originals, capsys):
  code = make_trace.main([*(flag.format(originals) for flag in flags), f"--output={originals}/out.csv"])
  said = capsys.readouterr().err
  assert code == 2 and complaint in said and said.count("\n") == 1
  assert not (originals / "out.csv").exists()


def test_the_sample_is_a_cut_of_the_original():
  """The first 500 rows are in the tree twice, from the same original."""
  small, large = (workload.read_trace(str(TRACES / f"azure_conv_{rows}.csv")) for rows in (500, 5000))
  assert len(large) == 5000 and large[:500] == small
