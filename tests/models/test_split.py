"""Shares of a model: equal on all devices, and together the model with zeros and repeated KV heads."""

import dataclasses

import pytest

from models.config import ModelConfig
from models.split import HeadSplit, ModelSplit, spread_shape

LLAMA_70B = ModelConfig("llama", 128_256, 80, 8192, 28_672, 64, 8, 128, 8192)


@pytest.mark.parametrize(
  ("kv_heads", "group", "devices", "expected"),
  [
    (8, 8, 1, (1, 8, 8)),
    (8, 8, 8, (1, 1, 8)),
    (8, 8, 2, (1, 4, 8)),
    (8, 8, 16, (2, 1, 4)),  # each KV head on two devices
    (2, 3, 4, (2, 1, 2)),  # three query heads over two devices: one is padded
    (2, 3, 8, (4, 1, 1)),
    (3, 2, 2, (1, 2, 2)),  # one KV head is padded
    (3, 2, 4, (1, 1, 2)),  # one device has padded heads alone
    (1, 1, 8, (8, 1, 1)),
  ],
)
def test_heads_of_a_device(kv_heads: int, group: int, devices: int, expected: tuple[int, int, int]) -> None:
  declared = dataclasses.replace(LLAMA_70B, num_heads=kv_heads * group, num_kv_heads=kv_heads).layers[0]
  assert dataclasses.astuple(HeadSplit.of_layer(declared, devices)) == expected


def test_sizes_that_divide_are_not_padded() -> None:
  split = ModelSplit(LLAMA_70B, 8)
  share = split.share
  assert split.is_exact and split.padded == LLAMA_70B
  assert (share.num_heads, share.num_kv_heads, share.hidden_dim, share.vocab_size) == (8, 1, 3584, 16_032)
  assert ModelSplit(LLAMA_70B).share is LLAMA_70B


def test_other_sizes_are_padded_to_equal_shares() -> None:
  model = dataclasses.replace(LLAMA_70B, vocab_size=151_936, hidden_dim=18_941)
  split = ModelSplit(model, 8)
  assert split.share.vocab_size == 19_008 and split.share.hidden_dim == 2368  # a mask has 32 tokens a word
  assert split.padded.vocab_size == 8 * 19_008 and not split.is_exact


def test_every_head_is_once_among_the_shares_and_every_kv_head_with_its_query_heads() -> None:
  model = dataclasses.replace(LLAMA_70B, num_heads=6, num_kv_heads=2)
  split = ModelSplit(model, 4)
  boxes = list(split.boxes("layers.3.attention.qkv", (8192, 2, 5, 128), ("embed", "kv_heads", None, None)))
  heads = [(place[1].start, source[1].start, source[2].start, source[2].stop) for place, source in boxes]
  # Device, KV head, and its query heads or (3, 5) its key and value.
  assert heads == [
    (0, 0, 0, 2),
    (0, 0, 3, 5),
    (1, 0, 2, 3),
    (1, 0, 3, 5),
    (2, 1, 0, 2),
    (2, 1, 3, 5),
    (3, 1, 2, 3),
    (3, 1, 3, 5),
  ]
  assert all(place[2] == slice(2, 4) for place, source in boxes if source[2].start == 3)
  out = list(split.boxes("layers.3.attention.out", (2, 3, 128, 8192), ("kv_heads", None, None, "embed")))
  assert [(place[0].start, source[1]) for place, source in out] == [
    (0, slice(0, 2)),
    (1, slice(2, 3)),
    (2, slice(0, 2)),
    (3, slice(2, 3)),
  ]


def test_only_split_dimensions_grow() -> None:
  assert spread_shape((8192, 2, 3584), ("embed", None, "mlp"), 8) == (8192, 2, 28_672)
  assert spread_shape((128,), (None,), 8) == (128,)
