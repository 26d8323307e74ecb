"""Quantized checkpoints that lie or are broken: refused with file, tensor, value and what is supported."""

from collections.abc import Callable
import json
import pathlib
import random
import re
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.device.formats.gguf_file import read_gguf_header
from engine.device.mesh import make_mesh
from engine.device.safetensors_file import read_header
from engine.device.weights import open_checkpoint
from engine.errors import CheckpointError, ConfigError
from tests.device.quantized_checkpoints import FORMATS, RAW, write_gguf_pair, write_pair
from tools.convert_checkpoint import convert, lossless_dtype

LAYER = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> dict[str, pathlib.Path]:
  root = tmp_path_factory.mktemp("quantized")
  return {
    name: write_pair(root / name, RAW, *FORMATS[name])[0] for name in ("awq", "gptq", "int4 zeros", "w8a8", "fp8")
  }


def open_folder(folder: pathlib.Path):
  return open_checkpoint(str(folder), make_mesh(jax.devices()[:1]), "float32")


def refusal(folder: pathlib.Path) -> str:
  arrays = len(jax.live_arrays())
  with pytest.raises(CheckpointError) as caught:
    open_folder(folder)
  assert len(jax.live_arrays()) <= arrays and len(str(caught.value)) < 1000
  return str(caught.value)


SETTINGS = [
  ("awq", {"version": "gemv"}, "awq version='gemv' is not supported; supported is 'gemm'"),
  ("awq", {"bits": 8}, "awq bits=8 is not supported"),
  ("awq", {"bits": "four"}, "bits='four' must be an integer"),
  ("awq", {"zero_point": False}, "awq zero_point=False is not supported"),
  ("awq", {"group_size": 48}, "256 inputs, no multiple of 48"),
  ("awq", {"group_size": 0}, "group_size=0 must be -1 or at least 1"),
  ("awq", {"group_size": 32}, r"qzeros has shape \[4, \d+\], but awq of a layer .* requires \[8, \d+\]"),
  ("gptq", {"bits": 3}, "gptq bits=3 is not supported; supported is 4 or 8"),
  ("gptq", {"bits": 8}, r"qweight has shape \[32, \d+\], but gptq of a layer .* requires \[64, \d+\]"),
  ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin' is not supported; supported is 'gptq' or"),
  ("gptq", {"dynamic": {"x": {"bits": 8}}}, "gptq dynamic="),
  ("int4 zeros", {"format": "marlin-24"}, "compressed-tensors format='marlin-24' is not supported; supported is pack"),
  ("int4 zeros", {"quantization_status": "frozen"}, "quantization_status='frozen' is not supported"),
  ("int4 zeros", {"sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config="),
  ("int4 zeros", {"config_groups": {}}, r"config_groups=\{\} must hold an object for each group"),
  ("int4 zeros", {"config_groups": {"a": {"weights": {"num_bits": 3}}}}, "type='int' num_bits=3 is not supported"),
  (
    "int4 zeros",
    {"config_groups": {"a": {"weights": {"num_bits": 8}}}},
    "has no group with type=int num_bits=4 and 32",
  ),
  (
    "int4 zeros",
    {"config_groups": {"a": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}}},
    "holds zero points, but quantization_config says symmetric=true",
  ),
  ("w8a8", {"config_groups": {"a": {"weights": {"num_bits": 8, "actorder": "group"}}}}, "act-order"),
  ("fp8", {"weight_block_size": [0, 128]}, r"weight_block_size=\[0, 128\] must be null or two positive integers"),
  ("fp8", {"weight_block_size": [128, 128]}, r"weight_scale_inv has shape \[\d, 2\], but fp8 of a layer"),
  ("fp8", {"weight_block_size": None}, r"weight_scale_inv has shape \[\d, 2\], but fp8 of .* requires \[256, 1\] or"),
  ("fp8", {"activation_scheme": "block"}, "activation_scheme='block' is not supported"),
  *(
    ("awq", {"quant_method": method}, f"quant_method={method!r} is not supported; supported is awq, gptq, compressed")
    for method in ("bitsandbytes", "hqq", "aqlm", "quark", None)
  ),
]


@pytest.mark.catalogue("G4")
@pytest.mark.parametrize("name, changes, said", SETTINGS, ids=lambda value: str(value)[:40])
def test_settings_that_are_not_supported(pristine, tmp_path, name, changes, said):
  shutil.copy(pristine[name] / "model.safetensors", tmp_path)
  raw = json.loads((pristine[name] / "config.json").read_text())
  raw["quantization_config"] |= changes
  (tmp_path / "config.json").write_text(json.dumps(raw))
  text = refusal(tmp_path)
  assert text.startswith(str(tmp_path))
  assert re.search(said, text), text


_VALUES = (-1, 0, 1, 4, 32, 2**63, 1.5, True, None, "x", "group", "channel", "block", [], {}, [1], [128, 128], {"a": 1})


def mutate(value, rng: random.Random) -> None:
  """Changes one setting, or removes it."""
  if isinstance(value, dict) and value:
    key = rng.choice(list(value))
    if isinstance(value[key], dict | list) and rng.random() < 0.7:
      mutate(value[key], rng)
    elif rng.random() < 0.7:
      value[key] = rng.choice(_VALUES)
    else:
      del value[key]
  elif isinstance(value, list) and value:
    value[rng.randrange(len(value))] = rng.choice(_VALUES)


@pytest.mark.catalogue("G4")
@pytest.mark.parametrize("count", [10, pytest.param(1000, marks=pytest.mark.long)])
def test_mutated_settings(pristine, tmp_path, count):
  """The folder opens, because its tensors decide, or it is refused by name."""
  rng, refused = random.Random(2), 0
  for name, source in pristine.items():
    folder = tmp_path / name.replace(" ", "_")
    folder.mkdir()
    shutil.copy(source / "model.safetensors", folder)
    for _ in range(count):
      raw = json.loads((source / "config.json").read_text())
      for _ in range(rng.randrange(1, 3)):
        mutate(raw["quantization_config"], rng)
      (folder / "config.json").write_text(json.dumps(raw))
      try:
        open_folder(folder)
      except CheckpointError as error:
        assert str(error).startswith(str(folder)) and len(str(error)) < 1000
        refused += 1
  assert 0.5 * count < refused / len(pristine) < count


Tensors = dict[str, np.ndarray]


def read_tensors(file: pathlib.Path) -> Tensors:
  return {name: np.array(tensor.map()) for name, tensor in read_header(file).items()}


def without(suffix: str) -> Callable[[Tensors], object]:
  return lambda tensors: tensors.pop(f"{LAYER}.{suffix}")


def changed(suffix: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], object]:
  return lambda tensors: tensors.update({f"{LAYER}.{suffix}": change(tensors[f"{LAYER}.{suffix}"])})


def with_value(value: float) -> Callable[[np.ndarray], np.ndarray]:
  def change(scales: np.ndarray) -> np.ndarray:
    scales[1, 1] = value
    return scales

  return change


FILES = [
  ("awq", without("scales"), r"tensor .*up_proj\.scales of shape \[4, 512\] is missing from the awq checkpoint"),
  ("awq", without("qweight"), r"up_proj\.qweight of shape"),
  ("awq", changed("scales", lambda values: values[:-1]), r"up_proj\.scales has shape \[3, 512\], but awq of a layer"),
  (
    "awq",
    changed("scales", lambda values: values.astype(np.float64)),
    r"dtype F64; supported in awq are F16, BF16, F32",
  ),
  ("awq", changed("scales", with_value(np.nan)), r"up_proj\.scales holds a scale of nan; the file is corrupt"),
  ("awq", changed("scales", with_value(np.inf)), r"up_proj\.scales holds a scale of inf"),
  ("awq", changed("qweight", lambda values: values.view(np.uint32)), "has dtype U32; supported in awq are I32"),
  ("gptq", changed("g_idx", lambda values: values[::-1].copy()), r"act-order \(desc_act=False\).* is not supported"),
  ("gptq", changed("g_idx", lambda values: values[:-8]), r"g_idx has shape \[248\]"),
  (
    "gptq",
    lambda tensors: tensors.update({f"{LAYER}.bias": np.ones(512, np.float16)}),
    "bias is not zero, but config.json describes a layer without bias",
  ),
  ("int4 zeros", changed("weight_shape", lambda values: values[::-1].copy()), r"is \[256, 512\], but .* \[512, 256\]"),
  (
    "int4 zeros",
    changed("weight_packed", lambda values: values[:, :-1]),
    r"\[512, 31\], but compressed-tensors of a la",
  ),
  ("int4 zeros", changed("weight_scale", lambda values: values[:, :-1]), "no multiple of 7"),
  ("int4 zeros", without("weight_zero_point"), r"weight_zero_point of shape \[64, 8\] is missing"),
  (
    "int4 zeros",
    lambda tensors: tensors.update({f"{LAYER}.weight_g_idx": np.zeros(256, np.int32)}),
    "weight_g_idx: act-order is not supported",
  ),
  ("w8a8", changed("weight", lambda values: values[:, :-1]), r"up_proj\.weight has shape \[512, 255\]"),
  ("w8a8", without("weight_scale"), r"weight_scale of shape \[512, 1\] is missing from the compressed-tensors check"),
  ("w8a8", without("weight"), r"up_proj\.weight of shape \[512, 256\] is missing from the compressed-tensors"),
  ("w8a8", changed("weight", lambda values: values.astype(ml_dtypes.float8_e5m2)), "has dtype F8_E5M2; supported in"),
  ("fp8", changed("weight_scale_inv", with_value(np.inf)), "weight_scale_inv holds a scale of inf"),
  ("fp8", without("weight_scale_inv"), r"weight_scale of shape \[6, 2\] is missing from the fp8 checkpoint"),
  ("w8a8", lambda tensors: tensors.update({"model.extra.weight": np.zeros(3, np.int8)}), "extra.weight is not part of"),
]


@pytest.mark.catalogue("G4")
@pytest.mark.parametrize("name, change, said", FILES, ids=[f"{name} {said[:40]}" for name, _, said in FILES])
def test_tensors_that_do_not_fit(pristine, tmp_path, name, change, said):
  tensors = read_tensors(pristine[name] / "model.safetensors")
  change(tensors)
  save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
  shutil.copy(pristine[name] / "config.json", tmp_path)
  text = refusal(tmp_path)
  assert text.startswith(str(tmp_path / "model.safetensors")) or "config.json" in text
  assert re.search(said, text), text


def test_a_bias_of_zeros_is_no_bias(pristine, tmp_path):
  """GPTQ checkpoints of Qwen2 have one for each layer."""
  tensors = read_tensors(pristine["gptq"] / "model.safetensors")
  tensors[f"{LAYER}.bias"] = np.zeros(512, np.float16)
  save_file(tensors, tmp_path / "model.safetensors")
  shutil.copy(pristine["gptq"] / "config.json", tmp_path)
  open_folder(tmp_path)


def test_conversion_is_refused(pristine, tmp_path):
  with pytest.raises(
    ConfigError, match=r"holds quantized weights \(4-bit awq \(groups of 64\)\).*serve the folder as it is"
  ):
    lossless_dtype(pristine["awq"])
  with pytest.raises(ConfigError, match="holds quantized weights"):
    convert(pristine["awq"], tmp_path / "out", "float32")
  assert not (tmp_path / "out").exists()


def test_scales_of_activations_are_named(pristine, tmp_path):
  tensors = read_tensors(pristine["w8a8"] / "model.safetensors")
  tensors[f"{LAYER}.input_scale"] = np.ones(1, np.float32)
  save_file(tensors, tmp_path / "model.safetensors")
  shutil.copy(pristine["w8a8"] / "config.json", tmp_path)
  (warning,) = open_folder(tmp_path).declared.warnings
  assert f"tensor {LAYER}.input_scale: scales of activations and KV are not read" in warning


def test_random_weights_of_a_quantized_config_are_plain_and_said_to_be(pristine):
  found = open_checkpoint(str(pristine["awq"]), make_mesh(jax.devices()[:1]), "float32", random_weights=True)
  assert found.label == "" and found.declared.warnings == (
    "config.json: quantization_config does not apply to random weights; --quantization sets their form",
  )


# --- GGUF -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_folder(tmp_path_factory) -> pathlib.Path:
  pytest.importorskip("gguf")
  root = tmp_path_factory.mktemp("gguf")
  return write_gguf_pair(root, RAW, lambda name: "Q4_K" if "_proj" in name else "Q8_0")[0]


@pytest.mark.catalogue("G1")
def test_truncated_gguf(gguf_folder, tmp_path):
  whole = (gguf_folder / "model.gguf").read_bytes()
  shutil.copy(gguf_folder / "config.json", tmp_path)
  for size in (0, 3, 4, 20, 100, 1000, len(whole) // 2, len(whole) - 1):
    (tmp_path / "model.gguf").write_bytes(whole[:size])
    assert "the file is truncated, corrupt or no GGUF file; copy it again" in refusal(tmp_path)


@pytest.mark.catalogue("G1")
@pytest.mark.parametrize("count", [500, pytest.param(50_000, marks=pytest.mark.long)])
def test_mutated_gguf_headers(gguf_folder, tmp_path, count):
  """Bytes of the header change: the file is read as another one, or refused with its name."""
  whole = (gguf_folder / "model.gguf").read_bytes()
  file, rng = tmp_path / "model.gguf", random.Random(1)
  refused = 0
  for _ in range(count):
    data = bytearray(whole[:6000])
    for _ in range(rng.randrange(1, 5)):
      place, size = rng.randrange(len(data)), rng.choice((1, 4, 8))
      data[place : place + size] = rng.choice((rng.randbytes(size), bytes(size), b"\xff" * size))
    with open(file, "wb") as stream:
      stream.write(data)
      stream.truncate(len(whole))
    try:
      _, tensors = read_gguf_header(file)
    except CheckpointError as error:
      assert str(error).startswith(str(file)) and len(str(error)) < 1000
      refused += 1
    else:
      assert all(0 < tensor.offset < len(whole) for tensor in tensors.values())
  assert count / 20 < refused < count


@pytest.mark.catalogue("G4")
@pytest.mark.parametrize(
  "old, new, said",
  [
    (b"GGUF\x03", b"GGUF\x01", "GGUF version 1 is not supported; supported are 2 and 3"),
    (b"GGUF", b"GGML", "begins with b'GGML', not b'GGUF'"),
    (
      b"llama.block_count\x04\x00\x00\x00\x02",
      b"llama.block_count\x04\x00\x00\x00\x03",
      "block_count=3, but config.js",
    ),
    (
      b"general.architecture\x08\x00\x00\x00\x05\x00\x00\x00\x00\x00\x00\x00llama",
      b"general.architecture\x08\x00\x00\x00\x05\x00\x00\x00\x00\x00\x00\x00qwen2",
      "general.architecture='qwen2', but config.json describes llama",
    ),
    (b"blk.1.ffn_up.weight", b"blk.7.ffn_up.weight", r"blk\.7\.ffn_up|layers\.7\.mlp\.up_proj"),
    (b"blk.1.ffn_up.weight", b"blk.1.ffn_ux.weight", r"blk\.1\.ffn_ux\.weight"),
    (b"output_norm.weight", b"output_nerm.weight", r"model\.norm\.weight of shape \[256\] is missing|output_nerm"),
  ],
)
def test_gguf_of_another_model(gguf_folder, tmp_path, old, new, said):
  whole = (gguf_folder / "model.gguf").read_bytes()
  assert whole.count(old) == 1
  shutil.copy(gguf_folder / "config.json", tmp_path)
  (tmp_path / "model.gguf").write_bytes(whole.replace(old, new))
  text = refusal(tmp_path)
  assert re.search(said, text), text


@pytest.mark.catalogue("G4")
def test_codebook_types_of_gguf(gguf_folder, tmp_path):
  whole = (gguf_folder / "model.gguf").read_bytes()
  name = b"blk.1.ffn_up.weight"
  place = whole.index(name) + len(name) + 4 + 16
  assert whole[place] == 12  # Q4_K
  shutil.copy(gguf_folder / "config.json", tmp_path)
  for number, kind in ((23, "IQ4_XS"), (19, "IQ1_S"), (10, "Q2_K"), (99, "number 99")):
    (tmp_path / "model.gguf").write_bytes(whole[:place] + bytes((number,)) + whole[place + 1 :])
    text = refusal(tmp_path)
    assert f"tensor 'blk.1.ffn_up.weight' has type {kind}, which is not supported; supported are F32, F16, Q4_0" in text


@pytest.mark.catalogue("G4")
def test_scales_of_gguf_that_are_not_finite(gguf_folder, tmp_path):
  folder = shutil.copytree(gguf_folder, tmp_path / "folder")
  file = folder / "model.gguf"
  tensor = read_gguf_header(file)[1]["blk.0.attn_v.weight"]
  with open(file, "r+b") as stream:
    stream.seek(tensor.offset + 3 * tensor.row_bytes)
    stream.write(np.array([np.nan], np.float16).tobytes())
  with pytest.raises(
    CheckpointError, match=r"v_proj\.weight has a scale of nan; supported are finite scales up to 65504"
  ):
    open_folder(folder).load()


@pytest.mark.catalogue("G3")
def test_a_gguf_link_out_of_the_folder(gguf_folder, tmp_path):
  shutil.copy(gguf_folder / "config.json", tmp_path)
  (tmp_path / "model.gguf").symlink_to(gguf_folder / "model.gguf")
  assert "is a link to" in refusal(tmp_path)


@pytest.mark.catalogue("G4")
def test_values_of_fp8_that_are_nan(pristine, tmp_path):
  tensors = read_tensors(pristine["fp8"] / "model.safetensors")
  tensors[f"{LAYER}.weight"].view(np.uint8)[5, 7] = 0x7F
  save_file(tensors, tmp_path / "model.safetensors")
  shutil.copy(pristine["fp8"] / "config.json", tmp_path)
  with pytest.raises(CheckpointError, match=r"up_proj\.weight holds NaN; the file is corrupt"):
    open_folder(tmp_path).load()
