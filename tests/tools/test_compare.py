"""The arithmetic of the comparisons, and one of them end to end on a tiny model."""

import pytest

from engine.errors import ConfigError
from tests.tools.conftest import VOCAB_SIZE, json_line, run_module
from tools.compare_batching import slot_bound
from tools.compare_transformers import agreement, peer_flags


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


def test_agreement_counts_up_to_the_first_difference():
  same = agreement({1: [5, 6, 7], 2: [1, 2, 3, 4], 3: [9]}, {1: [5, 6, 7], 2: [1, 0, 3, 4], 3: [9]})
  assert same["identical_requests"] == pytest.approx(2 / 3, abs=1e-4)
  assert same["agreeing_prefix"] == pytest.approx((3 + 1 + 1) / 8)
  assert same["differing_requests"] == [2]


def test_outputs_of_different_length_are_not_comparable():
  with pytest.raises(ConfigError, match="request 1"):
    agreement({1: [5, 6]}, {1: [5]})


def test_static_batching_takes_the_steps_that_the_bound_says(tiny_model, compile_cache):
  done = run_module(
    "tools.compare_batching",
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


def test_a_peer_setting_becomes_flags_or_is_refused():
  assert peer_flags("sdpa:32:256:0") == [
    "--attention=sdpa",
    "--max_requests=32",
    "--max_batch_tokens=256",
    "--compile_level=0",
  ]
  for wrong in ("", "sdpa:32", "flash:32:0:0", "sdpa:-1:0:0", "sdpa:x:0:0"):
    with pytest.raises(ConfigError, match="peer_settings"):
      peer_flags(wrong)


def test_a_missing_peer_is_one_line(tmp_path):
  done = run_module("tools.compare_transformers", f"--peer_python={tmp_path / 'python'}", f"--work={tmp_path}")
  assert done.returncode == 1
  assert done.stdout == ""
  assert done.stderr.count("\n") == 1
  assert "make parity" in done.stderr
