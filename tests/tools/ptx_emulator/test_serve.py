"""Engines whose steps are emulated: what is compared, and a whole serve of the demo model."""

import pathlib
import subprocess

import pytest

from tools.ptx_emulator.serve import LOGPROB_LIMIT, GreedyAnswer, compare_answers

ROOT = pathlib.Path(__file__).resolve().parents[3]
DEVICE_PYTHON = ROOT / ".venv-device" / "bin" / "python"


def test_answers_are_compared_by_tokens_and_by_log_probabilities():
  one, near = GreedyAnswer((5, 6), (-0.5, -1.0)), GreedyAnswer((5, 6), (-0.5, -1.0 - LOGPROB_LIMIT / 2))
  far, other = GreedyAnswer((5, 6), (-0.5, -1.0 - 2 * LOGPROB_LIMIT)), GreedyAnswer((5, 7), (-0.5, -1.0))
  assert compare_answers([one, one], [one, near]) == ([], pytest.approx(LOGPROB_LIMIT / 2))
  lines, _ = compare_answers([one, one, one], [far, one, other])
  assert lines == [
    "request 0: a log probability is off by 0.200; at most 0.1 is rounding",
    "request 2: tokens [5, 6] instead of [5, 7]",
  ]
  assert compare_answers([one], [GreedyAnswer((5, 6), (-0.5, float("nan")))])[0], "NaN is a difference"


@pytest.mark.long
@pytest.mark.skipif(not DEVICE_PYTHON.exists(), reason="needs make setup-device")
def test_the_demo_model_answers_by_emulated_steps():
  command = [DEVICE_PYTHON, "-m", "tools.check_device", "--emulate", "--model=demo"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
  assert "10 requests" in done.stdout and "0 requests differ" in done.stdout
