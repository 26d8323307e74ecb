"""The ladder of a server: what is chosen where nobody chose, what a user's choice changes, and what is refused."""

from typing import Any

import pytest

from engine.errors import ConfigError
from engine.shapes import GPU, PADDED, TPU, UNPADDED_CPU, choose_ladder, reachable_budgets

SEVEN = (8, 16, 32, 64, 128, 256, 384, 512)
KERNELS = {"leaves_out_padding": True}


@pytest.mark.parametrize(
  ("platform", "settings", "budgets", "rows", "chunk"),
  [
    # Nobody chose.
    ("cpu", {}, SEVEN, 64, 512),
    ("cpu", KERNELS, (8, 32, 64, 256), 64, 192),
    ("gpu", {}, (8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048), 256, 2048),
    ("cuda", {}, GPU.token_budgets, 256, 2048),
    ("rocm", {}, GPU.token_budgets, 256, 2048),
    ("tpu", {}, (16, 32, 64, 128, 256, 512, 1024), 128, 1024),
    # What equals a default is chosen all the same.
    ("cpu", KERNELS | {"token_budgets": SEVEN}, SEVEN[:6], 64, 192),
    ("cpu", KERNELS | {"prefill_chunk": 512}, (8, 32, 64, 256, 512), 64, 512),
    ("gpu", {"token_budgets": SEVEN, "max_num_seqs": 64, "prefill_chunk": 512}, SEVEN, 64, 512),
    ("gpu", {"max_num_seqs": 64}, GPU.token_budgets, 64, 2048),
    # The rest goes with what was chosen.
    ("gpu", {"token_budgets": (8, 64)}, (8, 64), 64, 64),
    ("gpu", {"token_budgets": (256, 4096)}, (256, 4096), 256, 2048),
    ("gpu", {"prefill_chunk": 512}, (8, 16, 32, 64, 128, 256, 384, 512, 768), 256, 512),
    ("cpu", {"token_budgets": (8, 16)}, (8, 16), 16, 16),
    ("cpu", KERNELS | {"token_budgets": (8, 16, 64, 384)}, (8, 16, 64, 384), 64, 192),
    ("cpu", {"max_num_seqs": 256}, SEVEN, 256, 512),
    # Prompts in one piece may fill the top rung, whatever a chunk is.
    ("cpu", KERNELS | {"chunked": False}, (8, 32, 64, 256, 512), 64, 192),
    # To measure them.
    ("cpu", KERNELS | {"all_rungs": True}, SEVEN, 64, 192),
    ("cpu", KERNELS | {"all_rungs": True, "token_budgets": (8, 64, 2048)}, (8, 64, 2048), 64, 192),
    ("gpu", {"all_rungs": True, "prefill_chunk": 8}, GPU.token_budgets, 256, 8),
    # One size for every step: the smallest that holds all rows and is worth a prompt's chunk.
    ("cpu", {"one_size": True}, (64,), 64, 64),
    ("cpu", KERNELS | {"one_size": True}, (64,), 64, 64),
    ("gpu", {"one_size": True}, (128,), 64, 128),
    ("tpu", {"one_size": True}, (128,), 64, 128),
    ("gpu", {"one_size": True, "max_num_seqs": 256}, (256,), 256, 256),
    ("cpu", {"one_size": True, "token_budgets": (8, 16, 64, 512), "max_num_seqs": 40}, (64,), 40, 64),
    ("cpu", {"one_size": True, "max_num_seqs": 512}, (512,), 512, 512),
    ("gpu", {"one_size": True, "token_budgets": (8, 64), "max_num_seqs": 32}, (64,), 32, 64),
    ("gpu", {"one_size": True, "prefill_chunk": 8}, (128,), 64, 8),
  ],
  ids=str,
)
def test_the_ladder_of_a_server(platform: str, settings: dict[str, Any], budgets: tuple, rows: int, chunk: int):
  choice = choose_ladder(platform, **settings)
  assert (choice.token_budgets, choice.max_num_seqs, choice.prefill_chunk) == (budgets, rows, chunk)
  assert choice.ladder.rungs()[-1] == (choice.ladder.fit(budgets[-1]))
  assert len(choice.ladder.rungs()) <= 12, "a human can read it"


def test_a_choice_says_what_it_is_and_why():
  assert choose_ladder("cpu", leaves_out_padding=True).reason == (
    "ladder: token_budgets=8,32,64,256 max_num_seqs=64 prefill_chunk=192 (default of a CPU whose kernels skip padding"
    "; left out, as no step needs it: 512)"
  )
  assert choose_ladder("gpu", token_budgets=(8, 64), max_num_seqs=8, one_size=True).reason == (
    "ladder: token_budgets=64 max_num_seqs=8 prefill_chunk=64 (default of a device that computes padding; set: "
    "token_budgets, max_num_seqs; one size for every step)"
  )


@pytest.mark.parametrize(
  ("settings", "said"),
  [
    ({"token_budgets": (8, 4)}, "strictly increasing"),
    ({"token_budgets": ()}, "strictly increasing"),
    ({"token_budgets": (8,), "max_num_seqs": 9}, "max_num_seqs=9 exceeds the top token budget 8.*--token_budgets"),
    ({"max_num_seqs": 513}, "max_num_seqs=513 exceeds the top token budget 512"),
    ({"prefill_chunk": 513}, "prefill_chunk=513 exceeds the top token budget 512; lower --prefill_chunk"),
    ({"prefill_chunk": 0}, "prefill_chunk=0 must be at least 1"),
    ({"max_num_seqs": 0}, "max_num_seqs=0 must be at least 1"),
  ],
  ids=str,
)
def test_what_does_not_fit_together_is_refused(settings: dict[str, Any], said: str):
  with pytest.raises(ConfigError, match=said):
    choose_ladder("cpu", **settings)


@pytest.mark.parametrize(
  ("most_prompt_tokens", "budgets"), [(25, (8, 16, 32)), (26, (8, 16, 32, 64)), (1, (8,)), (64, (8, 16, 32, 64))]
)
def test_rungs_that_no_step_can_need(most_prompt_tokens: int, budgets: tuple):
  """Beside the prompt's tokens seven rows decode."""
  assert reachable_budgets((8, 16, 32, 64), 8, most_prompt_tokens) == budgets


@pytest.mark.parametrize("default", [PADDED, UNPADDED_CPU, GPU, TPU], ids=lambda default: default.of)
def test_a_default_fits_itself(default):
  choice = choose_ladder(
    "cpu",
    token_budgets=default.token_budgets,
    max_num_seqs=default.max_num_seqs,
    prefill_chunk=default.prefill_chunk,
    all_rungs=True,
  )
  assert choice.token_budgets == default.token_budgets
