"""tools.make_random_model writes a config.json that the family's own reader takes."""

import pytest

from models.registry import FAMILIES, config_from_hf
from tools.make_random_model import family_config

SIZES = {
  "vocab_size": 64,
  "hidden_size": 32,
  "intermediate_size": 64,
  "num_hidden_layers": 6,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 8,
  "max_position_embeddings": 128,
  "rope_theta": 10_000.0,
  "tie_word_embeddings": False,
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_reads_what_is_written_for_it(family: str) -> None:
  config = config_from_hf(family_config(family, None, **SIZES))
  assert (config.family, config.num_layers, config.head_dim) == (family, 6, 8)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text"])
def test_a_window_reaches_the_layers_that_have_one(family: str) -> None:
  config = config_from_hf(family_config(family, 32, **SIZES))
  assert {layer.window for layer in config.layers} - {None} == {32}
