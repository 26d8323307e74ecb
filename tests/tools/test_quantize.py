"""Folders that tools.quantize writes: what other programs read in them, what calibration keeps and gains, bad input."""

from functools import partial
import hashlib
import json
import os
import pathlib

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.device.mesh import make_mesh
from engine.device.weights import open_checkpoint
from models.attention import dense_causal_attend
from models.grouped_weight import quantize_by_group
from tools.demo_model import write_text
from tools.make_random_model import write_model
from tools.parity.cases import CASES, QUANTIZED_CASES, quantized_prompt, write_case, write_quantized_case
from tools.quantize import __main__ as command
from tools.quantize import compressed_folder
from tools.quantize.calibration import calibrate, search_input_scales
from tools.quantize.compressed_folder import Scheme
from tools.quantize.rounding import dequantize_matrix, round_matrix
from tools.quantize.source_model import open_source

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
STRIDE = 8  # of tools/parity/run_transformers.py
INT4 = Scheme(4, 16)


def dense_logits(folder: pathlib.Path, tokens: list[int]) -> np.ndarray:
  """f32[T, V] of a folder, by Sluice's own reader and without a cache."""
  loaded = open_checkpoint(str(folder), make_mesh(jax.devices()[:1]), "float32").load()
  return np.asarray(_forward(loaded.graphdef, loaded.params, jnp.asarray([tokens], jnp.int32)))[0]


@partial(jax.jit, static_argnums=0)
def _forward(graphdef: nnx.GraphDef, params: nnx.State, ids: jax.Array) -> jax.Array:
  model = nnx.merge(graphdef, params)
  positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
  hidden, _ = model.hidden(ids, positions, (None,) * model.config.num_layers, None, dense_causal_attend)
  return model.logits(hidden)


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
  return float(np.max(np.abs(ours - theirs).max(-1) / np.abs(theirs).max(-1)))


@pytest.mark.parametrize("name", QUANTIZED_CASES)
def test_transformers_reads_the_same_weights(name: str, tmp_path: pathlib.Path):
  """By a golden file of transformers with compressed-tensors (make parity)."""
  with np.load(ROOT / "tests" / "golden" / "quantized.npz") as file:
    golden = dict(file)
  write_quantized_case(name, tmp_path / "m")
  digest = hashlib.sha256()
  for file in sorted((tmp_path / "m").glob("*.safetensors")):
    digest.update(file.read_bytes())
  assert digest.hexdigest() == str(golden[f"{name}_sha256"]), "the tool writes other bytes; run make parity"
  error = relative_error(dense_logits(tmp_path / "m", quantized_prompt(name))[:, ::STRIDE], golden[f"{name}_logits"])
  print(f"{name}: relative error {error:.2e}")
  assert error < 1e-4


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """llama3 of tools.parity, in three files."""
  folder = tmp_path_factory.mktemp("plain") / "m"
  write_case("llama3", folder)
  return folder


def read_folder(folder: pathlib.Path) -> dict[str, np.ndarray]:
  return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def test_codes_and_files(plain: pathlib.Path, tmp_path: pathlib.Path):
  """Codes and scales are those of quantize_by_group; files, index, config and other tensors follow the source."""
  output = tmp_path / "int4"
  assert command.main([f"--model={plain}", f"--output={output}", "--scheme=int4", "--group_size=48"]) == 1
  assert command.main([f"--model={plain}", f"--output={output}", "--scheme=int4", "--group_size=16"]) == 0
  before, after = read_folder(plain), read_folder(output)
  name = "model.layers.1.mlp.down_proj"
  weight = before[f"{name}.weight"]
  expected = quantize_by_group(weight.T, 1, 4, 16)
  packed = after[f"{name}.weight_packed"].view(np.uint32)
  codes = np.stack([packed >> (4 * place) & 15 for place in range(8)], -1).reshape(weight.shape)
  np.testing.assert_array_equal(codes.T, expected.codes)
  np.testing.assert_array_equal(after[f"{name}.weight_scale"].T, expected.scales)
  assert after[f"{name}.weight_shape"].tolist() == list(weight.shape) and f"{name}.weight" not in after
  for kept in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
    np.testing.assert_array_equal(after[kept], before[kept])
  index = json.loads((output / "model.safetensors.index.json").read_text())
  assert set(index["weight_map"]) == set(after) and len(set(index["weight_map"].values())) == 3
  config = json.loads((output / "config.json").read_text())
  assert config.pop("quantization_config")["config_groups"]["group_0"]["weights"]["group_size"] == 16
  assert config == json.loads((plain / "config.json").read_text())


@pytest.mark.parametrize("name", ["qwen2", "gemma3", pytest.param("llama3", marks=pytest.mark.long)])
def test_calibration_keeps_the_exact_product(name: str, tmp_path: pathlib.Path):
  """Scales moved into norms, values, biases and gates cancel: with grouped heads, offsets and norms behind layers."""
  write_model(tmp_path / "m", CASES[name][0] | {"num_hidden_layers": 2}, 0)
  source = open_source(tmp_path / "m")
  windows = np.random.default_rng(0).integers(256, size=(2, 40)).tolist()
  found = calibrate(source, windows, INT4)
  assert set(found.inputs) == set(source.linear_names()) == set(found.moments)
  moved = [name for name, scales in found.inputs.items() if np.ptp(scales) > 0.01]
  assert len(moved) > len(found.inputs) / 2, "the search changed nothing, so nothing is compared"
  changed = {name: found.change(name, tensor.read()) for name, tensor in source.tensors.items()}
  (tmp_path / "changed").mkdir()
  (tmp_path / "changed" / "config.json").write_text((tmp_path / "m" / "config.json").read_text())
  save_file(changed, tmp_path / "changed" / "model.safetensors")
  exact = dense_logits(tmp_path / "m", windows[0])
  assert relative_error(dense_logits(tmp_path / "changed", windows[0]), exact) < 1e-4


def test_calibration_lowers_the_error_of_large_channels():
  """The case that AWQ is for: a few input channels are far larger than the others."""
  rng = np.random.default_rng(1)
  matrix = rng.normal(size=(48, 64)).astype(np.float32)
  inputs = rng.normal(size=(256, 64)).astype(np.float32)
  inputs[:, ::16] *= 30
  exact = inputs @ matrix.T

  def error(scales: np.ndarray, moments: np.ndarray | None) -> float:
    codes, steps = round_matrix(matrix * scales, 4, 16, np.dtype(np.float16), moments)
    return float(np.square(inputs / scales @ dequantize_matrix(codes, steps, 4).T - exact).sum())

  scales = search_input_scales(matrix, inputs, INT4, np.abs(inputs).mean(axis=0))
  grouped = (inputs / scales).reshape(len(inputs), -1, 16).transpose(1, 2, 0)
  moments = grouped @ grouped.transpose(0, 2, 1)
  rounded = error(np.ones(64, np.float32), None)
  assert error(scales, moments) < error(scales, None) < 0.5 * rounded


@pytest.mark.long
def test_calibrated_demo_model_is_nearer(tmp_path: pathlib.Path):
  """In the answers of stories that are not in the calibration text."""
  for seed in (1, 2):
    flags = [f"--output={tmp_path / str(seed)}.txt", f"--seed={seed}", f"--num_turns={30 * (2 - seed) + 2}"]
    assert write_text.main(flags) == 0
  for name, more in (("rounded", []), ("calibrated", [f"--calibration={tmp_path / '1.txt'}"])):
    flags = [f"--model={DEMO}", f"--output={tmp_path / name}", "--scheme=int4", "--calibration_tokens=2048"]
    assert command.main([*flags, *more]) == 0
  window = command.read_windows(DEMO, str(tmp_path / "2.txt"), 256)[0]
  exact = jax.nn.log_softmax(dense_logits(DEMO, window))

  def divergence(folder: pathlib.Path) -> float:
    return float(jnp.sum(jnp.exp(exact) * (exact - jax.nn.log_softmax(dense_logits(folder, window))), axis=-1).mean())

  rounded, calibrated = divergence(tmp_path / "rounded"), divergence(tmp_path / "calibrated")
  print(f"divergence from the plain model: rounded {rounded:.5f}, calibrated {calibrated:.5f}")
  assert 0 < calibrated < 0.8 * rounded


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
  assert command.main(flags) == 1
  return capsys.readouterr().err.splitlines()[-1]


def test_bad_input(plain: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
  """One line with the value, the limit and the remedy; nothing appears under the output's name, nor beside it."""
  output = tmp_path / "out"
  model, out = f"--model={plain}", f"--output={output}"
  said = refused(capsys, model, out, "--scheme=int4", "--group_size=40")
  assert "group_size=40 does not divide the 96 inputs of tensor model.layers.0.self_attn.q_proj.weight" in said
  assert "such as 16, 32" in said
  assert "leave out --group_size" in refused(capsys, model, out, "--scheme=w8a8", "--group_size=32")
  assert "is for int4" in refused(capsys, model, out, "--scheme=int8", "--calibration=text")
  assert "calibration=/no/text" in refused(
    capsys, model, out, "--scheme=int4", "--group_size=16", "--calibration=/no/text"
  )
  text = tmp_path / "text.txt"
  text.write_text("Once upon a time")
  said = refused(capsys, model, out, "--scheme=int4", "--group_size=16", f"--calibration={text}")
  assert "holds no tokenizer.json" in said
  text.write_text("")
  said = refused(capsys, f"--model={DEMO}", out, "--scheme=int4", f"--calibration={text}")
  assert "the text has 0 tokens" in said
  assert "no such folder" in refused(capsys, f"--model={tmp_path / 'none'}", out, "--scheme=int8")
  assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


def test_outputs_that_cannot_be_written(
  plain: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
  output = tmp_path / "out"
  assert command.main([f"--model={plain}", f"--output={output}", "--scheme=w8a8"]) == 0
  assert "exists already" in refused(capsys, f"--model={plain}", f"--output={output}", "--scheme=int8")
  said = refused(capsys, f"--model={output}", f"--output={tmp_path / 'again'}", "--scheme=int8")
  assert "quantized already (quant_method='compressed-tensors')" in said
  (tmp_path / "file").write_text("")
  said = refused(capsys, f"--model={plain}", f"--output={tmp_path / 'file' / 'out'}", "--scheme=int8")
  assert f"cannot be written (File exists: {tmp_path / 'file'})" in said
  if os.geteuid():
    tmp_path.chmod(0o500)
    assert "Permission denied" in refused(capsys, f"--model={plain}", f"--output={tmp_path / 'o'}", "--scheme=int8")
    tmp_path.chmod(0o700)
  assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]


def test_a_full_disk_leaves_nothing(
  plain: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
  """The fault: the second file cannot be written."""
  write, files = compressed_folder._write_safetensors, []

  def fail(file: pathlib.Path, *rest: object) -> None:
    files.append(file)
    if len(files) == 2:
      raise OSError(28, "No space left on device")
    write(file, *rest)  # pyright: ignore[reportArgumentType]

  monkeypatch.setattr(compressed_folder, "_write_safetensors", fail)
  said = refused(capsys, f"--model={plain}", f"--output={tmp_path / 'out'}", "--scheme=int8")
  assert "cannot be written (No space left on device)" in said and len(files) == 2
  assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_every_family_is_quantized(tmp_path: pathlib.Path):
  """All matrices of all layers, and nothing else."""
  for name, (raw, _) in CASES.items():
    write_model(tmp_path / name, raw, 0)
    names = open_source(tmp_path / name).linear_names()
    assert len(names) == 7 * raw["num_hidden_layers"] and all(each.endswith("_proj.weight") for each in names)
