"""The arithmetic of the comparisons, and one of them end to end on a tiny model."""

import pytest

from tests.tools.conftest import VOCAB_SIZE, json_line, run_module
from tools.study.compare_batching import slot_bound


def test_the_bound_of_idle_slots_on_paper():
  # Two slots. Static: waves (4, 1), (3, 1), (1): 4 + 3 + 1 steps.
  # Continuous: slot A takes 4 then the last 1; slot B takes 1, 3, 1: both end after 5.
  bound = slot_bound([4, 1, 3, 1, 1], 2)
  assert bound["static_steps"] == 8
  assert bound["continuous_steps"] == 5
  assert bound["bound"] == pytest.approx(8 / 5)
  assert bound["bound_endless"] == pytest.approx(8 / 5)  # 10 tokens over 2 slots are 5 steps
  assert bound["idle_slot_share"] == pytest.approx(1 - 5 / 8)


def test_equal_lengths_leave_nothing_to_gain():
  assert slot_bound([7] * 12, 4) == {
    "static_steps": 21,
    "continuous_steps": 21,
    "bound": 1.0,
    "bound_endless": 1.0,
    "idle_slot_share": 0.0,
  }


@pytest.mark.long
def test_static_batching_takes_the_steps_that_the_bound_says(tiny_model, compile_cache):
  done = run_module(
    "tools.study.compare_batching",
    f"--model={tiny_model}",
    "--num_requests=20",
    "--max_num_seqs=4",
    "--scale=0.05",
    "--rounds=1",
    f"--vocab_size={VOCAB_SIZE}",
    "--kv_cache_mb=16",
    "--token_budgets=4,64",
    "--prompt_len=uniform:2:9",
    f"--compile_cache_dir={compile_cache}",
  )
  result = json_line(done)
  assert result["bound"] > 1.5
  # Prompts fit a step beside the decodes: a wave of n tokens takes n steps, and some to fill the slots.
  assert result["static_steps"] <= result["static"]["steps"] <= result["static_steps"] + 15
  assert result["continuous_steps"] <= result["continuous"]["steps"] <= result["continuous_steps"] + 15
  assert result["static"]["compiles_after_ready"] == result["continuous"]["compiles_after_ready"] == 0
