"""What low precision costs: the table's figures on the demo model, and command lines that cannot be measured."""

import json
import math
import pathlib

import pytest

from tools import measure_precision
from tools.make_random_model import read_shape, write_model
from tools.measure_precision import TextScores, compare_scores, parse_precision

BRIEF = ("--num_tokens=300", "--skills=2")


def measure(tmp_path: pathlib.Path, *flags: str) -> list[dict]:
  output = tmp_path / "precision.json"
  assert measure_precision.main([*flags, f"--output={output}"]) == 0
  return json.loads(output.read_text())["precisions"]


def test_int8_is_near_the_reference_and_not_equal(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
  reference, int8 = measure(tmp_path, "--precisions=none,int8", *BRIEF)
  assert reference["precision"] == "none" and int8["precision"] == "int8"
  assert reference["perplexity_change_percent"] == reference["logprob_error"] == 0.0
  assert reference["top1_agreement_percent"] == 100.0
  assert 1.2 < reference["perplexity"] < 1.6  # 1.34 on 20,000 tokens
  assert abs(int8["perplexity_change_percent"]) < 0.5 and 0 < int8["logprob_error"] < 0.01
  assert set(int8["skills"]) >= {"copy", "recall_1500"} and min(reference["skills"].values()) == 100.0
  assert "| int8 |" in capsys.readouterr().err


def test_a_text_is_scored_in_windows(tmp_path: pathlib.Path):
  text = tmp_path / "text.txt"
  text.write_text("Once upon a time, there was a girl named Mira. She had a red kite. " * 40)
  flags = ("--precisions=none", f"--text={text}", "--num_tokens=200", "--window=64", "--skills=0")
  (row,) = measure(tmp_path, *flags)
  assert "skills" not in row and 1.0 < row["perplexity"] < 100
  assert json.loads((tmp_path / "precision.json").read_text())["num_tokens"] == 200  # each window begins with BOS


def test_figures_of_known_scores():
  reference = TextScores([-1.0, -2.0], [3, 4])
  found = compare_scores(TextScores([-1.5, -2.0], [3, 5]), reference)
  assert found["perplexity"] == pytest.approx(math.exp(1.75), abs=1e-5)
  assert found["perplexity_change_percent"] == pytest.approx(100 * (math.exp(0.25) - 1), abs=1e-3)
  assert found["top1_agreement_percent"] == 50.0 and found["logprob_error"] == 0.25


def test_precisions(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
  """A folder beside the caller that has the name of a --quantization does not hide it."""
  monkeypatch.chdir(tmp_path)
  write_model(tmp_path / "int8", read_shape("llama-15m"), 0)
  folder, settings = parse_precision("int8+max_num_seqs=8", "demo")
  assert (folder, settings["quantization"], settings["max_num_seqs"]) == ("demo", "int8", 8)
  folder, settings = parse_precision("./int8", "demo")
  assert folder == "./int8" and "quantization" not in settings


@pytest.mark.parametrize(
  "flags, message",
  [
    (["--precisions=int3"], "quantization='int3' must be"),
    (["--precisions=int8+no_such=1"], "no_such=1 is not a setting"),
    (["--precisions=/no/such/folder"], "/no/such/folder: no such folder"),
    (["--model=/some/folder"], "give --text=FILE"),
    (["--text=/no/such/file"], "/no/such/file"),
  ],
)
def test_command_lines_that_cannot_be_measured(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]):
  assert measure_precision.main([*flags, *BRIEF]) == 1
  assert message in capsys.readouterr().err.splitlines()[-1]
