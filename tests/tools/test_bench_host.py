"""The host benchmark runs and prints what BUILD.md says it prints; how fast is not a test's business."""

import json

import pytest

from tools import bench_host


def names(*parts: str) -> set[str]:
  return {
    f"{part}{kind}_{percentile}_us" for part in parts for kind in ("", "_processor") for percentile in ("p50", "p99")
  }


def test_prints_one_json_line(capsys: pytest.CaptureFixture):
  assert bench_host.main(["--num_seqs=8", "--steps=40", "--block_size=4"]) == 0
  (line,) = capsys.readouterr().out.splitlines()
  measured = json.loads(line)
  assert set(measured) == {"num_seqs", "steps", *names("schedule", "commit")}
  assert (measured["num_seqs"], measured["steps"]) == (8, 40)


def test_refuses_a_folder_that_is_no_model(tmp_path, capsys: pytest.CaptureFixture):
  assert bench_host.main([f"--model={tmp_path}"]) == 2
  assert str(tmp_path) in capsys.readouterr().err
