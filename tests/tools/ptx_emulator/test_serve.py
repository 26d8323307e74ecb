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
  assert compare_answers([one, one], [one, near]) == ([], pytest.approx(LOGPROB_LIMIT / 2), 0.0)
  assert compare_answers([one, one, one], [far, one, other]).lines == [
    "request 0: a log probability is off by 0.200; at most 0.1 is rounding",
    "request 2: tokens [5, 6] instead of [5, 7]",
  ]
  assert compare_answers([one], [GreedyAnswer((5, 6), (-0.5, float("nan")))]).lines, "NaN is a difference"


def test_the_most_likely_tokens_are_compared_where_both_sides_have_them():
  def answer(**top: float) -> GreedyAnswer:
    return GreedyAnswer((5,), (-0.5,), ({int(name[1:]): value for name, value in top.items()},))

  same, near = answer(t5=-0.5, t7=-4.0, t9=-8.0), answer(t5=-0.5, t7=-4.0, t8=-8.0)
  assert compare_answers([near], [same]) == ([], 0.0, 0.0)
  found = compare_answers([answer(t5=-0.5, t7=-4.1, t9=-8.0)], [same])
  assert found.error == pytest.approx(0.1 / 80.25**0.5) and "error 1.1e-02 of the norm" in found.lines[0]
  assert compare_answers([answer(t5=float("nan"))], [same]).lines


@pytest.mark.long
@pytest.mark.skipif(not DEVICE_PYTHON.exists(), reason="needs make setup-device")
@pytest.mark.parametrize(
  ("target", "drafts"),
  [
    ("h200", ""),
    ("h200", "--drafts"),
    ("h200", "--draft_model=demo"),
    ("h200", "--draft_model=demo_eagle"),
    ("sm_80", ""),
  ],
)
def test_the_demo_model_answers_by_emulated_steps(target: str, drafts: str):
  command = [DEVICE_PYTHON, "-m", "tools.check_device", "--emulate", "--model=demo", f"--target={target}"]
  command += [drafts] if drafts else []
  done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
  assert "10 requests" in done.stdout and "\n0 differences" in done.stdout
  assert ("\n0 drafts, 0 accepted" in done.stdout) != bool(drafts)
