"""Weights with a scale a group: the nearest codes, one form for every format, and a parameter of several tensors."""

import dataclasses

import numpy as np
import pytest

from models.families.llama import read_config
from models.families.tensor_map import llama_tensors
from models.grouped_weight import GroupedWeight, assemble_grouped, quantize_by_group

CONFIG = {
  "model_type": "llama",
  "architectures": ["LlamaForCausalLM"],
  "vocab_size": 32,
  "hidden_size": 64,
  "intermediate_size": 96,
  "num_hidden_layers": 1,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 64,
  "rms_norm_eps": 1e-5,
  "rope_theta": 10000.0,
  "hidden_act": "silu",
  "tie_word_embeddings": False,
}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("shape", "num_inputs", "group"), [((64, 30), 1, 32), ((4, 2, 16, 20), 3, 64)], ids=str)
def test_each_weight_is_the_nearest_code_of_its_group(bits, shape, num_inputs, group):
  weight = np.random.default_rng(0).standard_normal(shape, np.float32) * 3
  held = quantize_by_group(weight, num_inputs, bits, group)
  assert (held.codes.shape, held.group, held.scales.shape[1:]) == (shape, group, shape[num_inputs:])
  assert held.codes.max() < 2**bits
  steps = np.abs(held.scales.astype(np.float64))[:, None]
  flat = (-1, group, *shape[num_inputs:])
  error = np.abs(held.dequantize().astype(np.float64) - weight).reshape(flat)
  # Half a step, or a whole one where a number passes the last code; a float16 scale moves the greatest by 2^-11.
  assert (error <= steps * (1.0 + 2**bits * 2.0**-12)).all()
  assert np.mean(error <= 0.505 * steps) > 0.9


def test_a_group_of_zeros_is_zero():
  held = quantize_by_group(np.zeros((32, 2), np.float32), 1, 4, 32)
  np.testing.assert_array_equal(held.dequantize(), 0)


def test_smaller_groups_and_more_bits_are_the_same_weight():
  rng = np.random.default_rng(1)
  codes, scales = rng.integers(0, 16, (64, 6), np.uint8), rng.random((2, 6), np.float32)
  held = GroupedWeight(codes, scales, 4, offsets=rng.random((2, 6), np.float32))
  np.testing.assert_array_equal(held.regroup(16).dequantize(), held.dequantize())
  for bits in (6, 8):
    np.testing.assert_array_equal(held.widen(bits).dequantize(), held.dequantize())
  np.testing.assert_array_equal(held.widen(6).widen(8).codes, held.widen(8).codes)


def test_a_parameter_of_several_tensors_has_their_weights_in_their_places():
  rng = np.random.default_rng(2)
  for name, pieces in llama_tensors(read_config(CONFIG)).items():
    if len(pieces[0].shape) != 2 or name == "embed":
      continue
    held, whole = [], {}
    for number, piece in enumerate(pieces):  # unlike in bits and groups, as in GGUF's Q4_K_M
      tensor = rng.standard_normal(piece.shape, np.float32)
      weight = quantize_by_group(tensor.T, 1, 6 if number == 2 else 4, 16 if number else 32)
      held.append((piece, weight))
      whole[piece.name] = weight.dequantize().T
    num_inputs = 3 if name.endswith("attention.out") else 1
    made = assemble_grouped(held, num_inputs).dequantize()
    for piece in pieces:
      wanted = whole[piece.name].reshape(piece.split).transpose(piece.order)
      np.testing.assert_array_equal(made[piece.box()], wanted, err_msg=f"{name} {piece.name}")


def make_words(codes: np.ndarray, axis: int) -> np.ndarray:
  """uint8 codes -> uint32, eight adjacent ones along `axis` in each, the first in the lowest bits."""
  split = np.moveaxis(codes, axis, -1).reshape(*np.delete(codes.shape, axis), -1, 8)
  words = np.bitwise_or.reduce(split.astype(np.uint32) << (np.uint32(4) * np.arange(8, dtype=np.uint32)), axis=-1)
  return np.moveaxis(words, -1, axis)


@pytest.mark.parametrize(("shape", "num_inputs"), [((64, 6), 1), ((4, 16, 6), 2), ((64, 2, 3), 1)], ids=str)
def test_words_are_the_weight_of_their_codes(shape, num_inputs):
  rng = np.random.default_rng(3)
  codes = rng.integers(0, 16, shape, np.uint8)
  scales = rng.random((2, *shape[num_inputs:]), np.float32)
  plain = GroupedWeight(codes, scales, 4, num_inputs, scales[::-1])
  words = make_words(codes, num_inputs - 1)
  for view in (words, np.ascontiguousarray(words)):
    held = GroupedWeight(view, scales, 4, num_inputs, scales[::-1])
    assert (held.shape, held.inputs, held.group, held.outputs) == (shape, 64, 32, shape[num_inputs:])
    for same in (held, held.unpack(), held.widen(8), held.regroup(8)):
      np.testing.assert_array_equal(same.dequantize(), plain.regroup(same.group).dequantize())
    np.testing.assert_array_equal(held.pair_codes(), plain.pair_codes())
    first = slice(32, 64) if num_inputs == 1 else slice(2, 4)  # the second group
    part = (first, *(slice(None) for _ in shape[1:-1]), slice(1, None))
    np.testing.assert_array_equal(held.cut(part).dequantize(), plain.dequantize()[part])
  one = GroupedWeight(words, scales[:1], 4, num_inputs)  # a part that cuts words
  part = (*(slice(None) for _ in range(num_inputs - 1)), slice(4, 12), *(slice(None) for _ in scales.shape[1:]))
  np.testing.assert_array_equal(one.cut(part).dequantize(), one.dequantize()[part])


def test_a_parameter_of_words_stays_in_words_unless_a_tensor_has_none():
  rng = np.random.default_rng(4)
  for name, pieces in llama_tensors(read_config(CONFIG)).items():
    if len(pieces[0].shape) != 2 or name == "embed":
      continue
    plain = [(piece, quantize_by_group(rng.standard_normal(piece.shape, np.float32).T, 1, 4, 16)) for piece in pieces]
    held = [(piece, dataclasses.replace(weight, codes=make_words(weight.codes, 0))) for piece, weight in plain]
    num_inputs = 3 if name.endswith("attention.out") else 1
    expected, made = assemble_grouped(plain, num_inputs), assemble_grouped(held, num_inputs)
    assert made.in_words
    np.testing.assert_array_equal(made.dequantize(), expected.dequantize())
    mixed = assemble_grouped([plain[0], *held[1:]], num_inputs)
    np.testing.assert_array_equal(mixed.codes, expected.codes)
