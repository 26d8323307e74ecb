"""Layers of quantized checkpoints, recorded from the formats' own packages (tools/parity/write_quantized.py)."""

import json
import pathlib

import ml_dtypes
import numpy as np
import pytest
import safetensors

from engine.device.formats.quantized_source import open_quantized
from engine.device.formats.quantized_tensor import QuantizedTensor, are_finite, choose_scale_dtype
from engine.device.safetensors_file import read_header
from models.families.tensor_map import transposed
from models.grouped_weight import GroupedWeight

FILE = pathlib.Path(__file__).parent / "data" / "quantized_layers.safetensors"
with safetensors.safe_open(FILE, "numpy") as recorded:
  CONFIGS = {case: json.loads(text) for case, text in recorded.metadata().items()}
INPUTS = 96
FORMS = {  # bits, inputs a scale (0: all), offsets, dtype of scales
  "int4_group_bf16": (4, 32, False, "float16"),
  "int4_zeros_f16": (4, 32, True, "float16"),
  "int4_output_f32": (4, 0, False, "float32"),
  "int8_group_f16": (8, 32, False, "float16"),
  "int8_zeros_bf16": (8, 32, True, "float32"),
  "w8a8_output": (8, 0, False, "float32"),
  "w8a8_tensor": (8, 0, False, "float32"),
  "mxfp4": (6, 32, False, "float16"),
  "awq_32": (4, 32, True, "float16"),
  "gptq_4_sym_32": (4, 32, False, "float16"),
  "gptq_4_asym_32": (4, 32, True, "float16"),
  "gptq_8_sym_48": (8, 48, False, "float16"),
  "gptq_8_asym_1": (8, 0, True, "float32"),
}


def open_case(case: str, **changes):
  """The source of a model with one matrix, `head`."""
  stored = {name: tensor for name, tensor in read_header(FILE).items() if name.startswith(f"{case}.")}
  plain = stored.pop(f"{case}.dequantized")
  source = open_quantized(
    FILE, {"quantization_config": CONFIGS[case] | changes}, stored, {"head": transposed(f"{case}.weight", *plain.shape)}
  )
  assert source is not None and source.parts >= set(stored)
  return source, plain.map()


@pytest.mark.parametrize("case", FORMS)
def test_each_form_dequantizes_as_its_own_package(case):
  source, expected = open_case(case)
  tensor = source.quantized[f"{case}.weight"]
  assert isinstance(tensor, QuantizedTensor)
  exact = tensor.decode().dequantize().T
  # The packages multiply in the dtype of the scales.
  dtype = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "32": np.float16}.get(case.split("_")[-1], np.float32)
  dtype = np.float32 if case.startswith("gptq") else ml_dtypes.bfloat16 if case == "w8a8_output" else dtype
  np.testing.assert_array_equal(exact.astype(dtype).astype(np.float32), expected)
  bits, group, has_offsets, scale_dtype = FORMS[case]
  form = source.forms["head"]
  assert (form.bits, form.group, form.has_offsets, form.scale_dtype) == FORMS[case]
  read = source.read("head", np.dtype(np.float32))
  assert isinstance(read, GroupedWeight)
  assert type(form).of_weight(read) == form
  # Rounded offsets and scales: a step is the larger of a scale's rounding and 2**-11 of eight scales.
  bound = 0 if scale_dtype == "float32" else np.abs(read.scales.astype(np.float32)).max() * 8 * 2**-11
  assert np.abs(read.dequantize().T - exact).max() <= (bound if has_offsets else 0)
  assert read.shape == (INPUTS, expected.shape[0]) and bits == read.bits and group in (read.group, 0)


@pytest.mark.parametrize("case", sorted(CONFIGS.keys() - FORMS))
def test_fp8_becomes_plain(case):
  source, expected = open_case(case)
  assert not source.forms and source.reads == {"head"} and source.label == "dequantized fp8 compressed-tensors"
  # The scales of "output" are bfloat16, and so are its package's products.
  dtype = ml_dtypes.bfloat16 if "output" in case else np.float32
  found = source.read("head", np.dtype(dtype))
  assert isinstance(found, np.ndarray) and found.dtype == dtype
  np.testing.assert_array_equal(found.T.astype(np.float32), expected)


@pytest.mark.parametrize(
  ("scales", "has_offsets", "kept"),
  [
    (np.array([0, -65504, 2**-24], np.float16), False, "float16"),
    (np.array([0, -8188, 1], np.float16), True, "float16"),  # 8 * 8188 is the greatest float16
    (np.array([0, 8192, 1], np.float16), True, "float32"),
    (np.array([0, -65280, 2**-14], ml_dtypes.bfloat16), False, "float16"),
    (np.array([-65536, 1], ml_dtypes.bfloat16), False, "float32"),
    (np.array([1, -(2**-14.0) * 0.99], ml_dtypes.bfloat16), False, "float32"),
    (np.array([0, 0], ml_dtypes.bfloat16), False, "float16"),
    (np.array([0.0, 2**-14, -65504], np.float32), False, "float16"),
    (np.array([0.0, -(2**-15)], np.float32), False, "float32"),
    (np.array([3.0, 70000.0], np.float32), False, "float32"),
  ],
  ids=str,
)
def test_scales_are_kept_as_float16_where_it_has_their_range(scales, has_offsets, kept):
  assert choose_scale_dtype(np.broadcast_to(scales, (3, scales.size)), 2, 4, has_offsets) == kept


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32], ids=str)
def test_every_number_that_is_not_finite_is_found(dtype):
  largest = ml_dtypes.finfo(dtype).max
  assert are_finite(np.array([[0, -largest, largest, ml_dtypes.finfo(dtype).smallest_subnormal]], dtype))
  for bad in (np.nan, -np.nan, np.inf, -np.inf):
    assert not are_finite(np.array([1, bad, 2], dtype))
