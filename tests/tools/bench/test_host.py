"""The host benchmark runs and prints what benchmarks/README.md has of it; how fast is not a test's business."""

import json

import pytest

from engine.scheduler import Scheduler
from tests.device.tiny_model import make_runner
from tools.bench import host as bench_host


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


def test_tells_the_parts_of_a_device_step():
  config = bench_host.config_for(8, steps=4, block_size=4)
  runner = make_runner(
    num_blocks=config.num_blocks,
    block_size=config.block_size,
    token_budgets=config.token_budgets,
    max_model_len=config.max_model_len,
  )
  measured = bench_host.measure(Scheduler(config), runner, num_seqs=8, steps=4)
  assert set(measured) == names("schedule", "pack", "dispatch", "schedule_and_launch", "read", "commit")
  clock = [measured[f"{part}_p50_us"] for part in ("schedule", "pack", "dispatch")]
  assert all(part > 0 for part in clock)
