"""Weights with a scale a group: the nearest codes, one form for every format, and a parameter of several tensors."""

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
  np.testing.assert_array_equal(held.widen().dequantize(), held.dequantize())


def test_a_parameter_of_several_tensors_has_their_weights_in_their_places():
  rng = np.random.default_rng(2)
  for name, pieces in llama_tensors(read_config(CONFIG)).items():
    if len(pieces[0].shape) != 2 or name == "embed":
      continue
    held, whole = [], {}
    for number, piece in enumerate(pieces):  # unlike in bits and groups, as in GGUF's Q4_K_M
      tensor = rng.standard_normal(piece.shape, np.float32)
      weight = quantize_by_group(tensor.T, 1, 8 if number == 2 else 4, 16 if number else 32)
      held.append((piece, weight))
      whole[piece.name] = weight.dequantize().T
    num_inputs = 3 if name.endswith("attention.out") else 1
    made = assemble_grouped(held, num_inputs).dequantize()
    for piece in pieces:
      wanted = whole[piece.name].reshape(piece.split).transpose(piece.order)
      np.testing.assert_array_equal(made[piece.box()], wanted, err_msg=f"{name} {piece.name}")
