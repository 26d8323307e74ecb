"""Checkpoints in the formats that people have: each parameter is that of the plain checkpoint with the same weights."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.device.formats.gguf_folder import open_gguf
from engine.device.formats.quantized_source import QuantizedSource, open_quantized
from engine.device.mesh import make_mesh
from engine.device.safetensors_file import read_header
from engine.device.weights import Checkpoint, open_checkpoint, parameter_name
from models.fp8_weight import Fp8Weight
from models.grouped_weight import GroupedWeight
from models.quantize import E4M3
from models.registry import config_from_hf, tensors
from models.weight_form import MatrixForm, WeightForm
from tests.device.quantized_checkpoints import FORMATS, QWEN2, RAW, write_gguf_pair, write_pair
from tests.device.tiny_model import dense_logits

# Offsets of zero points are rounded to float16.
TOLERANCE = dict.fromkeys(("awq", "int4 zeros", "bits by layer"), 2**-10)
FP8 = WeightForm(keeps_fp8=True)
QWEN3 = RAW | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MISTRAL = RAW | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}


def open_source(folder: pathlib.Path, keeps_fp8: bool = False) -> QuantizedSource:
  raw = json.loads((folder / "config.json").read_text())
  pieces = tensors(config_from_hf(raw))
  if (folder / "model.gguf").exists():
    return open_gguf(folder / "model.gguf", config_from_hf(raw), pieces)[1]
  source = open_quantized(folder / "config.json", raw, read_header(folder / "model.safetensors"), pieces, keeps_fp8)
  assert source is not None
  return source


def read_plain(folder: pathlib.Path, name: str) -> np.ndarray:
  """A parameter of a plain folder, by its definition: a box of each stored tensor."""
  pieces = tensors(config_from_hf(json.loads((folder / "config.json").read_text())))[name]
  stored = read_header(folder / "model.safetensors")
  sizes = [max(box.stop for box in boxes) for boxes in zip(*(piece.box() for piece in pieces), strict=True)]
  out = np.full(sizes, np.nan, np.float32)
  for piece in pieces:
    out[piece.box()] = stored[piece.name].map().reshape(piece.split).transpose(piece.order)
  return out


def compare(quantized: pathlib.Path, plain: pathlib.Path, tolerance: float, keeps_fp8: bool = False) -> QuantizedSource:
  source = open_source(quantized, keeps_fp8)
  for name in sorted(source.reads):
    value = source.read(name, np.dtype(np.float32))
    expected = read_plain(plain, name)
    if name in source.forms and keeps_fp8:
      assert isinstance(value, Fp8Weight)
      value = value.dequantize()
    elif name in source.forms:
      assert isinstance(value, GroupedWeight)
      assert type(source.forms[name]).of_weight(value) == source.forms[name]
      value = value.dequantize().T if name == "embed" else value.dequantize()
    assert np.abs(value - expected).max() <= tolerance * np.abs(expected).max(), name
  return source


@pytest.mark.parametrize("name", FORMATS)
def test_parameters_of_safetensors(tmp_path, name):
  config, write_layer = FORMATS[name]
  source = compare(*write_pair(tmp_path, RAW, config, write_layer), TOLERANCE.get(name, 1e-7))
  assert len(source.reads) == 4 * RAW["num_hidden_layers"]
  assert ["tensor model.layers.0.mlp.down_proj.input_scale and 13 others" in line for line in source.warnings] == (
    [True] if name == "fp8 tensor" else []
  )
  assert source.forms.keys() == (set() if "fp8" in name else source.reads)


@pytest.mark.parametrize("name", ["fp8 outputs", "fp8 tensor"])
def test_e4m3_stays_where_a_device_multiplies_it(tmp_path, name):
  """Every matrix on the device holds the codes of the file, bit for bit, and its scales."""
  quantized, plain = write_pair(tmp_path, RAW, *FORMATS[name])
  source = compare(quantized, plain, 0, keeps_fp8=True)
  assert source.label == ("fp8 compressed-tensors" if name == "fp8 outputs" else "fp8")
  assert source.forms == dict.fromkeys(source.reads, MatrixForm("fp8"))
  stored = read_header(quantized / "model.safetensors")
  params = {parameter_name(key): leaf for key, leaf in jax.tree.leaves_with_path(load(quantized, FP8)[1])}
  for name in source.reads:
    codes, scales = np.asarray(params[name]), np.asarray(params[f"{name}_scale"])
    assert codes.dtype == E4M3 and scales.dtype == np.float32
    for piece in source.pieces[name]:
      box, inputs = piece.box(), len(piece.split) - scales.ndim
      bits = stored[piece.name].map().view(np.uint8).reshape(piece.split).transpose(piece.order)
      held = codes.view(np.uint8).reshape(*scales.shape, *(part.stop for part in box[:inputs]))[box[inputs:]]
      np.testing.assert_array_equal(np.moveaxis(held, range(-inputs, 0), range(inputs)), bits)


def test_blocks_of_e4m3_become_plain_and_say_so(tmp_path):
  quantized, plain = write_pair(tmp_path, RAW, *FORMATS["fp8"])
  source = compare(quantized, plain, 1e-7, keeps_fp8=True)
  assert not source.forms and source.label == "dequantized fp8"
  (warning,) = source.warnings
  assert "13 others: e4m3 with a scale for each block of 96x128 becomes plain weights of --dtype" in warning


@pytest.mark.parametrize("kind", ["int8", "fp8", "w8a8 packed"])
def test_blocks_of_e4m3_are_quantized_like_plain_weights(tmp_path, kind):
  """As with the dequantized weights in a folder of their own, bit for bit."""
  packed = kind.endswith("packed")
  matrix = MatrixForm("grouped", 8, scale_dtype="float32") if packed else MatrixForm(kind)
  form = WeightForm(packed=packed, matrix=matrix, keeps_fp8=kind == "fp8")
  quantized, plain = (load(folder, form)[1] for folder in write_pair(tmp_path, RAW, *FORMATS["fp8"]))
  leaves = jax.tree.leaves(quantized)
  assert any(leaf.dtype in (jnp.int8, jnp.uint8, E4M3) for leaf in leaves)
  for found, expected in zip(leaves, jax.tree.leaves(plain), strict=True):
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize(
  "name, keeps_fp8, may", [("fp8", True, True), ("fp8 tensor", True, False), ("awq", False, False)]
)
def test_only_weights_that_become_plain_may_be_quantized(tmp_path, name, keeps_fp8, may):
  folder, _ = write_pair(tmp_path, RAW, *FORMATS[name])
  form = WeightForm(keeps_fp8=keeps_fp8, matrix=MatrixForm("int8"))
  assert open_folder(folder, form).is_requantizable == may


def open_folder(folder: pathlib.Path, form: WeightForm) -> Checkpoint:
  return open_checkpoint(str(folder), make_mesh(jax.devices()[:1]), "float32", form)


def load(folder: pathlib.Path, form: WeightForm) -> tuple[Any, Any]:
  model = open_folder(folder, form).load()
  return model.graphdef, model.params


def check_logits(quantized: pathlib.Path, plain: pathlib.Path, form: WeightForm, tolerance: float = 2e-3) -> None:
  tokens = list(range(3, 40))
  expected = dense_logits(load(plain, WeightForm()), tokens)
  found = dense_logits(load(quantized, form), tokens)
  assert np.abs(found - expected).max() <= (0.05 if form.packed else tolerance) * np.ptp(expected)
  assert np.abs(found - expected).max() > 0


@pytest.mark.parametrize("name, packed", [("awq", False), ("bits by layer", True), ("w8a8", True)])
def test_logits_of_safetensors(tmp_path, name, packed):
  check_logits(*write_pair(tmp_path, RAW, *FORMATS[name]), WeightForm(packed=packed))


def test_logits_of_e4m3(tmp_path):
  """Products round rows to e4m3, too, which keeps four bits of each number."""
  check_logits(*write_pair(tmp_path, RAW, *FORMATS["fp8 outputs"]), FP8, 0.1)


def mixed(name: str) -> str:
  """The types of a Q4_K_M file, nearly."""
  if "embed" in name or "down" in name or "lm_head" in name:
    return "Q6_K"
  return "Q5_K" if "v_proj" in name else "Q4_K"


@pytest.mark.parametrize(
  "raw, types, tolerance",
  [
    (RAW, lambda name: "Q8_0", 0),
    (MISTRAL, lambda name: "Q4_0", 0),
    (QWEN2, mixed, 2**-10),
    (QWEN3, lambda name: {"q": "Q5_0", "k": "Q5_1", "v": "Q4_1"}.get(name.split("_proj")[0][-1], "MXFP4"), 2**-10),
    (RAW, lambda name: "F16" if "k_proj" in name or "lm_head" in name else "Q8_0", 0),
  ],
  ids=["llama", "mistral", "qwen2", "qwen3", "some plain"],
)
def test_parameters_of_gguf(tmp_path, raw, types, tolerance):
  pytest.importorskip("gguf")
  source = compare(*write_gguf_pair(tmp_path, raw, types), tolerance)
  assert "embed" in source.forms
  assert ("layers.0.attention.qkv" in source.forms) == ("F16" not in map(types, ["k_proj"]))


@pytest.mark.parametrize("packed", [False, True])
def test_logits_of_gguf(tmp_path, packed):
  """The embedding is looked up in codes, and is the head too."""
  pytest.importorskip("gguf")
  check_logits(*write_gguf_pair(tmp_path, QWEN2, mixed), WeightForm(packed=packed))
