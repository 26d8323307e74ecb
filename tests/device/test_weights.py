"""Model folders of both kinds: the same bits whichever way they come, and every kind of damage refused by name."""

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.device.mesh import make_mesh
from engine.device.safetensors_file import StoredTensor, read_header
from engine.device.weights import assemble_pieces, open_checkpoint, parameter_name
from engine.errors import CheckpointError, ConfigError
from models.families.tensor_map import Piece
from models.weight_form import INT8, PLAIN, WeightForm
from tests.device.tiny_model import dense_logits
from tools.convert_checkpoint import convert, lossless_dtype
from tools.make_random_model import write_model
from tools.parity.cases import CASES

# Everything at once: groups of 3, a head size of its own, biases nowhere but norms on query and key.
RAW = CASES["qwen3"][0] | {"num_hidden_layers": 2}
BIASED = CASES["qwen2"][0] | {"num_hidden_layers": 2}


def load(folder: pathlib.Path, dtype="float32"):
  return open_checkpoint(str(folder), make_mesh(jax.devices()[:1]), dtype).load()


def arrays(model) -> dict[str, np.ndarray]:
  return {parameter_name(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(model.params)}


def assert_same_bits(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
  assert ours.keys() == theirs.keys()
  for name, value in ours.items():
    assert value.dtype == theirs[name].dtype and value.shape == theirs[name].shape, name
    assert value.tobytes() == theirs[name].tobytes(), name


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> pathlib.Path:
  """Folders that no test changes: hf (one file), shards, biased, orbax."""
  root = tmp_path_factory.mktemp("models")
  write_model(root / "hf", RAW, seed=1)
  write_model(root / "shards", RAW, seed=1, num_shards=3)
  write_model(root / "biased", BIASED, seed=2, dtype="bfloat16")
  (root / "hf" / "tokenizer.json").write_text("{}")
  (root / "hf" / "chat_template.jinja").write_text("{{ messages }}")
  (root / "hf" / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
  convert(root / "hf", root / "orbax", "bfloat16", name="tiny")
  return root


@pytest.fixture
def hf(pristine, tmp_path) -> pathlib.Path:
  return shutil.copytree(pristine / "hf", tmp_path / "hf")


@pytest.fixture
def shards(pristine, tmp_path) -> pathlib.Path:
  return shutil.copytree(pristine / "shards", tmp_path / "shards")


@pytest.fixture
def orbax(pristine, tmp_path) -> pathlib.Path:
  return shutil.copytree(pristine / "orbax", tmp_path / "orbax")


def edit_json(file: pathlib.Path, **changes) -> None:
  file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(file: pathlib.Path, change) -> None:
  values = load_file(file)
  change(values)
  save_file(values, file)


def test_fused_parameters_against_the_formula(pristine):
  """Element by element from the stored tensors: query head k * G + g beside its KV head k."""
  stored, ours = load_file(pristine / "biased" / "model.safetensors"), arrays(load(pristine / "biased", "bfloat16"))
  heads, kv, size = BIASED["num_attention_heads"], BIASED["num_key_value_heads"], 16
  group, layer = heads // kv, "model.layers.1."
  qkv, bias, out = (ours[f"layers.1.attention.{name}"] for name in ("qkv", "qkv_bias", "out"))
  for head in range(heads):
    rows = slice(head * size, (head + 1) * size)
    k, g = divmod(head, group)
    np.testing.assert_array_equal(qkv[:, k, g], stored[layer + "self_attn.q_proj.weight"][rows].T)
    np.testing.assert_array_equal(bias[k, g], stored[layer + "self_attn.q_proj.bias"][rows])
    np.testing.assert_array_equal(out[k, g], stored[layer + "self_attn.o_proj.weight"][:, rows].T)
  for k in range(kv):
    rows = slice(k * size, (k + 1) * size)
    for place, name in ((group, "k"), (group + 1, "v")):
      np.testing.assert_array_equal(qkv[:, k, place], stored[layer + f"self_attn.{name}_proj.weight"][rows].T)
      np.testing.assert_array_equal(bias[k, place], stored[layer + f"self_attn.{name}_proj.bias"][rows])
  np.testing.assert_array_equal(ours["layers.1.mlp.gate_up"][:, 0], stored[layer + "mlp.gate_proj.weight"].T)
  np.testing.assert_array_equal(ours["layers.1.mlp.gate_up"][:, 1], stored[layer + "mlp.up_proj.weight"].T)
  np.testing.assert_array_equal(ours["layers.1.mlp.down"], stored[layer + "mlp.down_proj.weight"].T)
  np.testing.assert_array_equal(ours["embed"], stored["model.embed_tokens.weight"])
  assert "head" not in ours  # tied


@pytest.fixture
def experts(tmp_path) -> tuple[dict, dict]:
  """Four experts' gates and ups in two files, and the same in one tensor: where they lie, and what they hold."""
  num_experts, model_dim, hidden_dim = 4, 6, 10
  rng = np.random.default_rng(5)
  values = {
    f"experts.{expert}.{name}": rng.standard_normal((hidden_dim, model_dim), np.float32)
    for expert in range(num_experts)
    for name in ("gate", "up")
  }
  stacked = np.stack([np.concatenate([values[f"experts.{e}.gate"], values[f"experts.{e}.up"]]) for e in range(4)])
  names = sorted(values)
  for number, part in enumerate((names[::2], names[1::2])):
    save_file({name: values[name] for name in part}, tmp_path / f"{number}.safetensors")
  save_file({"experts.gate_up": stacked}, tmp_path / "stacked.safetensors")
  stored: dict[str, StoredTensor] = {}
  for file in tmp_path.glob("*.safetensors"):
    stored |= read_header(file)
  return stored, values


# A parameter [experts, D, gate or up, F]: pieces along two of its axes.
PIECES = tuple(
  Piece(f"experts.{expert}.{name}", (10, 6), (1, 1, 10, 6), (0, 3, 1, 2), ((0, expert), (2, second)))
  for expert in range(4)
  for second, name in enumerate(("gate", "up"))
)
STACKED = (Piece("experts.gate_up", (4, 20, 6), (4, 2, 10, 6), (0, 3, 1, 2)),)


@pytest.mark.parametrize("pieces", [PIECES, STACKED], ids=["an expert a piece", "one tensor"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_parameter_of_pieces_along_two_axes(experts, pieces, dtype):
  """Whole, and every part that a device may hold: split by expert, by hidden dimension, by input, within a pair."""
  stored, values = experts
  whole = np.stack(
    [np.stack([values[f"experts.{e}.{name}"].T for name in ("gate", "up")], axis=1) for e in range(4)]
  ).astype(jnp.dtype(dtype))
  every = slice(None)
  for index in (
    (every, every, every, every),
    *((slice(start, start + 2), every, every, every) for start in (0, 2)),
    (slice(1, 4), every, every, slice(5, 10)),
    (slice(3, 4), slice(0, 3), slice(1, 2), slice(2, 9)),
  ):
    part = assemble_pieces(pieces, stored, whole.shape, jnp.dtype(dtype), index)
    assert part.dtype == dtype and part.tobytes() == whole[index].tobytes()


def test_a_bad_expert_is_named_by_the_device_that_holds_it(experts, tmp_path):
  stored, values = experts
  broken = values["experts.2.up"].copy()
  broken[3, 4] = np.nan
  save_file({"experts.2.up": broken}, tmp_path / "broken.safetensors")
  stored |= read_header(tmp_path / "broken.safetensors")
  every, shape = slice(None), (4, 6, 2, 10)
  assemble_pieces(PIECES, stored, shape, np.dtype(np.float32), (slice(0, 2), every, every, every))
  with pytest.raises(CheckpointError, match=r"tensor experts\.2\.up holds NaN"):
    assemble_pieces(PIECES, stored, shape, np.dtype(np.float32), (slice(2, 4), every, every, every))


def test_unknown_keys_of_config_json_are_told(hf):
  """In one line, however many and however named; the model is served all the same."""
  assert load(hf).warnings == ()
  edit_json(hf / "config.json", foo=1, rope_scaling=None, **{"a b\n": True})
  (line,) = load(hf).warnings
  assert line.startswith("config.json keys that Sluice does not know: foo, 'a b\\n'; it does not read them")
  edit_json(hf / "config.json", **{f"key_{number}": number for number in range(1000)})
  (line,) = load(hf).warnings
  assert "key_17 and 982 more;" in line and len(line) < 500


def test_shards_hold_the_same_model(pristine):
  assert_same_bits(arrays(load(pristine / "shards")), arrays(load(pristine / "hf")))


def test_conversion_is_bit_exact(pristine, tmp_path):
  assert_same_bits(arrays(load(pristine / "orbax", "bfloat16")), arrays(load(pristine / "hf", "bfloat16")))
  convert(pristine / "hf", tmp_path / "f32", "float32")
  assert_same_bits(arrays(load(tmp_path / "f32")), arrays(load(pristine / "hf")))
  convert(pristine / "orbax", tmp_path / "again", "bfloat16")
  assert_same_bits(arrays(load(tmp_path / "again", "bfloat16")), arrays(load(pristine / "orbax", "bfloat16")))


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_dtypes_are_converted_by_rounding(tmp_path, stored, wanted):
  write_model(tmp_path / "m", RAW, seed=3, dtype=stored)
  file = load_file(tmp_path / "m" / "model.safetensors")["lm_head.weight"]
  assert file.dtype == jnp.dtype(stored)
  np.testing.assert_array_equal(arrays(load(tmp_path / "m", wanted))["head"], file.T.astype(jnp.dtype(wanted)))


def test_what_comes_with_the_weights(pristine):
  for kind, name in (("hf", "hf"), ("orbax", "tiny")):
    model = load(pristine / kind)
    assert (model.name, model.eos_token_ids) == (name, (7, 9))
  assert (pristine / "orbax" / "chat_template.jinja").read_text() == "{{ messages }}"
  assert load(pristine / "shards").eos_token_ids == ()


def test_eos_of_config_json_where_generation_config_has_none(shards):
  edit_json(shards / "config.json", eos_token_id=5)
  (shards / "generation_config.json").write_text("{}")
  assert load(shards).eos_token_ids == (5,)
  edit_json(shards / "config.json", eos_token_id="</s>")
  with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id='</s>'"):
    load(shards)


def test_the_converted_folder_is_small(pristine):
  files = [file for file in (pristine / "orbax").rglob("*") if file.is_file()]
  weights = sum(value.nbytes for value in arrays(load(pristine / "hf", "bfloat16")).values())
  assert len(files) < 25
  assert sum(file.stat().st_size for file in files) < weights + 64 * 1024


def test_redundant_tensors_of_other_writers(pristine, tmp_path):
  """A tied head that is stored all the same, and rope's frequencies."""
  folder = shutil.copytree(pristine / "biased", tmp_path / "biased")
  file = folder / "model.safetensors"

  def add(values):
    values["lm_head.weight"] = values["model.embed_tokens.weight"].copy()
    values["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

  edit_tensors(file, add)
  assert_same_bits(arrays(load(folder, "bfloat16")), arrays(load(pristine / "biased", "bfloat16")))
  edit_tensors(file, lambda values: values["lm_head.weight"].__setitem__((3, 4), ml_dtypes.bfloat16(50.0)))
  with pytest.raises(CheckpointError, match=r"lm_head\.weight differs.*tie_word_embeddings"):
    load(folder)


def test_loading_over_two_devices_gives_the_same(pristine):
  """In a process of its own, since the number of CPU devices is fixed at start."""
  script = """
import hashlib, sys
import jax, numpy as np
from engine.device.mesh import make_mesh
from engine.device.weights import open_checkpoint
assert len(jax.devices()) == 2
for path in sys.argv[1:]:
  leaves = jax.tree.leaves(open_checkpoint(path, make_mesh(jax.devices()), "bfloat16").load().params)
  split = sum(leaf.addressable_shards[0].data.size < leaf.size for leaf in leaves)
  print(split, hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest())
"""
  env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
  names = ("hf", "shards", "biased", "orbax")
  ran = subprocess.run(
    [sys.executable, "-c", script, *(str(pristine / name) for name in names)],
    env=env,
    text=True,
    capture_output=True,
    check=False,
    timeout=300,
  )
  assert ran.returncode == 0, ran.stderr
  for name, line in zip(names, ran.stdout.split("\n"), strict=False):
    leaves = jax.tree.leaves(load(pristine / name, "bfloat16").params)
    split = 2 * 4 + (1 if name == "biased" else 2) + (2 if name == "biased" else 0)  # four a layer, biases, embed, head
    assert line == f"{split} {hashlib.sha256(b''.join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()}"


def test_no_folder(tmp_path):
  with pytest.raises(CheckpointError, match="no such folder"):
    load(tmp_path / "nowhere")
  (tmp_path / "file").write_text("x")
  with pytest.raises(CheckpointError, match="is no folder"):
    load(tmp_path / "file")
  (tmp_path / "empty").mkdir()
  with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
    load(tmp_path / "empty")


def test_other_dtypes_are_refused(hf):
  with pytest.raises(ConfigError, match="dtype=int8 is not supported; choose bfloat16, float16 or float32"):
    load(hf, "int8")


@pytest.mark.parametrize(
  "text, said",
  [("{", "as JSON"), ("[]", "no JSON object"), ("\xff", "as JSON"), ('{"architectures": ["T5"]}', "T5.*supported are")],
)
def test_bad_config_json(hf, text, said):
  (hf / "config.json").write_bytes(text.encode("latin1"))
  with pytest.raises(CheckpointError, match=rf"config\.json: .*{said}"):
    load(hf)


@pytest.mark.catalogue("G2")
@pytest.mark.parametrize("pickled", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_not_opened(hf, pickled):
  """The file would make a folder if it were unpickled."""
  (hf / "model.safetensors").unlink()
  made = hf / "was_run"
  (hf / pickled).write_bytes(f"cos\nmkdir\n(V{made}\ntR.".encode())
  with pytest.raises(CheckpointError, match=rf"{pickled}: a pickled checkpoint"):
    load(hf)
  assert not made.exists()


def test_weights_left_out(hf):
  (hf / "model.safetensors").unlink()
  with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
    load(hf)


@pytest.mark.catalogue("G1")
def test_truncated_anywhere(hf):
  """From nothing to all but a byte, and one too many: the file is named always."""
  file = hf / "model.safetensors"
  whole = file.read_bytes()
  header = 8 + int.from_bytes(whole[:8], "little")
  for size in (0, 4, 8, header // 2, header, header + 1, len(whole) // 2, len(whole) - 1):
    file.write_bytes(whole[:size])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is truncated, corrupt or no safetensors file"):
      load(hf)
  file.write_bytes(whole + b"\0")
  with pytest.raises(CheckpointError, match=r"model\.safetensors: is truncated, corrupt or .*not fully covered"):
    load(hf)


@pytest.mark.catalogue("G1")
def test_any_changed_header_is_refused_or_harmless(hf):
  """Random bytes in the header: never another error, and never other values under a good name."""
  file, rng = hf / "model.safetensors", np.random.default_rng(0)
  whole, expected = file.read_bytes(), arrays(load(hf))
  header, refused = 8 + int.from_bytes(whole[:8], "little"), 0
  for _ in range(300):
    damaged = bytearray(whole)
    for position in rng.integers(header, size=rng.integers(1, 4)):
      damaged[position] = rng.integers(256)
    file.write_bytes(damaged)
    try:
      found = arrays(load(hf))
    except CheckpointError as error:
      assert "model.safetensors" in str(error) or "is missing from the checkpoint" in str(error)
      refused += 1
    else:
      assert_same_bits(found, expected)  # the change was of a space, or of "__metadata__"
  assert refused > 250


@pytest.mark.catalogue("G5")
@pytest.mark.parametrize(
  "change, said",
  [
    (lambda t: t.pop("model.norm.weight"), r"tensor model\.norm\.weight of shape \[96\] is missing"),
    (lambda t: t.update(surprise=np.ones(3, np.float32)), r"model\.safetensors: tensor surprise is not part"),
    (lambda t: t.update({"model.norm.weight": np.ones(95, np.float32)}), r"norm\.weight has shape \[95\].*\[96\]"),
    (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].T.copy()}), r"lm_head\.weight has shape \[96, 256\]"),
    (lambda t: t.update({"model.norm.weight": np.ones(96, np.int8)}), r"model\.norm\.weight has dtype I8; supported"),
    (lambda t: t.update({"model.norm.weight": np.ones(96, np.float64)}), r"model\.norm\.weight has dtype F64"),
    (lambda t: t["model.layers.1.mlp.up_proj.weight"].__setitem__((5, 6), np.nan), r"1\.mlp\.up_proj\.weight holds"),
    (lambda t: t["model.norm.weight"].__setitem__(0, -np.inf), r"model\.norm\.weight holds NaN or Inf"),
  ],
  ids=["missing", "extra", "shape", "transposed", "int8", "f64", "nan", "inf"],
)
def test_wrong_tensors(hf, change, said):
  edit_tensors(hf / "model.safetensors", change)
  with pytest.raises(CheckpointError, match=said):
    load(hf)


def test_weights_that_float16_cannot_hold(hf):
  edit_tensors(hf / "model.safetensors", lambda t: t["model.norm.weight"].__setitem__(3, 70000.0))
  load(hf, "bfloat16")
  with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds values beyond 65504.*set --dtype=bfloat16"):
    load(hf, "float16")


def test_config_of_another_model(hf):
  edit_json(hf / "config.json", intermediate_size=200)
  with pytest.raises(CheckpointError, match=r"mlp\.gate_proj\.weight has shape \[208, 96\].*\[200, 96\]"):
    load(hf)


@pytest.mark.catalogue("G3")
def test_broken_sharding(shards):
  index, second = shards / "model.safetensors.index.json", shards / "model-00002-of-00003.safetensors"
  good = index.read_text()
  weight_map = json.loads(good)["weight_map"]
  some = next(name for name, file in weight_map.items() if file == second.name)

  for changed, said in (
    ({**weight_map, some: "model-00001-of-00003.safetensors"}, rf"00002-of-00003.*: tensor {some} is here, but"),
    ({**weight_map, "more": second.name}, r"00002-of-00003\.safetensors: tensor more is missing"),
    ({**weight_map, some: "../../etc/passwd"}, "weight_map names '../../etc/passwd'"),
    ({**weight_map, some: "pytorch_model.bin"}, "weight_map names 'pytorch_model.bin'"),
    ([some], "weight_map must map"),
  ):
    index.write_text(json.dumps({"weight_map": changed}))
    with pytest.raises(CheckpointError, match=said):
      load(shards)
  index.write_text(good)
  second.unlink()
  with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: no such file, though"):
    load(shards)


@pytest.mark.catalogue("G5")
def test_orbax_any_flipped_bit_is_refused(orbax):
  """One bit in every file of the folder that matters, the file named."""
  files = [
    file
    for file in sorted(orbax.rglob("*"))
    if file.is_file()
    and file.suffix not in (".jinja",)
    and file.name not in ("tokenizer.json", "generation_config.json")
  ]
  assert len(files) > 8
  rng = np.random.default_rng(0)
  for file in files:
    whole = file.read_bytes()
    damaged = bytearray(whole)
    damaged[rng.integers(len(whole))] ^= 1 << int(rng.integers(7))
    file.write_bytes(damaged)
    with pytest.raises(CheckpointError) as caught:
      load(orbax)
    assert file.name == "SHA256SUMS" or str(file) in str(caught.value)
    file.write_bytes(whole)
  load(orbax)


def test_orbax_truncated_missing_or_foreign_files(orbax):
  data = max((file for file in (orbax / "weights").rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
  whole = data.read_bytes()
  data.write_bytes(whole[:-1])
  with pytest.raises(CheckpointError, match=rf"{data.name}: is corrupt, its SHA-256"):
    load(orbax)
  data.unlink()
  with pytest.raises(CheckpointError, match=rf"{data.name}: is missing"):
    load(orbax)
  data.write_bytes(whole)
  (orbax / "weights" / "d" / "more").write_bytes(b"x")
  with pytest.raises(CheckpointError, match=r"more: is not listed in SHA256SUMS"):
    load(orbax)
  (orbax / "weights" / "d" / "more").unlink()
  (orbax / "SHA256SUMS").unlink()  # as after an interrupted copy: it is written last
  with pytest.raises(CheckpointError, match=r"SHA256SUMS: cannot be read"):
    load(orbax)


def resign(folder: pathlib.Path) -> None:
  """Digests of what is there now, as one who edits a folder on purpose would make them."""
  lines = [line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()]
  (folder / "SHA256SUMS").write_text(
    "".join(f"{hashlib.sha256((folder / file).read_bytes()).hexdigest()}  {file}\n" for file in lines)
  )


def test_orbax_of_another_model(orbax):
  for change, said in (
    ({"num_hidden_layers": 3}, r"tensor layers\.2\.attention\.k_norm\.scale has shape none, but"),
    ({"num_hidden_layers": 1}, r"tensor layers\.1\.attention\.k_norm\.scale has shape .* requires none"),
    ({"intermediate_size": 200}, r"layers\.0\.mlp\.down has shape \[208, 96\].*\[200, 96\]"),
  ):
    good = (orbax / "config.json").read_text()
    edit_json(orbax / "config.json", **change)
    resign(orbax)
    with pytest.raises(CheckpointError, match=said):
      load(orbax)
    (orbax / "config.json").write_text(good)
  edit_json(orbax / "sluice.json", format=2)
  resign(orbax)
  with pytest.raises(CheckpointError, match=r"sluice\.json: format=2 is not supported"):
    load(orbax)


def test_conversion_never_overwrites_and_leaves_nothing_half_done(pristine, hf, tmp_path):
  with pytest.raises(ConfigError, match="exists already"):
    convert(pristine / "hf", pristine / "orbax", "bfloat16")
  edit_tensors(hf / "model.safetensors", lambda values: values.pop("model.norm.weight"))
  with pytest.raises(CheckpointError):
    convert(hf, tmp_path / "out", "bfloat16")
  assert sorted(file.name for file in tmp_path.iterdir()) == ["hf"]


@pytest.mark.long
def test_the_command_lines(tmp_path):
  """As a user types them: a model, its conversion, and one line with exit code 1 where something is wrong."""

  def run(module: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
      [sys.executable, "-m", f"tools.{module}", *arguments], text=True, capture_output=True, check=False, timeout=300
    )

  made = run(
    "make_random_model",
    f"--output={tmp_path / 'hf'}",
    "--family=qwen3",
    "--num_layers=1",
    "--model_dim=32",
    "--num_heads=4",
    "--num_kv_heads=2",
    "--hidden_dim=48",
    "--vocab_size=64",
    "--num_shards=2",
    "--seed=5",
  )
  assert made.returncode == 0, made.stderr
  convert_it = ("convert_checkpoint", f"--input={tmp_path / 'hf'}", f"--output={tmp_path / 'out'}", "--name=mine")
  converted = run(*convert_it)
  assert (converted.returncode, converted.stderr) == (0, "")
  assert converted.stdout.endswith(" files, float32\n")
  assert_same_bits(arrays(load(tmp_path / "out", "float32")), arrays(load(tmp_path / "hf", "float32")))
  assert load(tmp_path / "out").name == "mine"
  again = run(*convert_it)
  assert again.returncode == 1
  assert again.stderr == f"{tmp_path / 'out'}: exists already; choose a new folder or remove this one\n"


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_a_conversion_loses_no_bit_unless_asked_to(stored, tmp_path):
  write_model(tmp_path / "hf", RAW, seed=3, dtype=stored)
  dtype, reason = lossless_dtype(tmp_path / "hf")
  assert dtype == ("bfloat16" if stored == "bfloat16" else "float32")
  assert reason == ("which holds the checkpoint's float16 exactly" if stored == "float16" else "")
  convert(tmp_path / "hf", tmp_path / "ours", dtype)
  assert_same_bits(arrays(load(tmp_path / "ours", "float32")), arrays(load(tmp_path / "hf", "float32")))
  assert lossless_dtype(tmp_path / "ours") == (dtype, "")


def test_a_conversion_of_several_dtypes_takes_the_one_that_holds_all(tmp_path):
  """A buffer that the model does not use has no say."""
  write_model(tmp_path, RAW, seed=3, dtype="bfloat16")
  file = tmp_path / "model.safetensors"
  stored = load_file(file)
  unused = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
  save_file(stored | unused, file)
  assert lossless_dtype(tmp_path) == ("bfloat16", "")
  save_file(stored | {"model.norm.weight": stored["model.norm.weight"].astype(np.float32)}, file)
  assert lossless_dtype(tmp_path) == ("float32", "which holds the checkpoint's bfloat16 and float32 exactly")


@pytest.mark.parametrize("tied", [False, True])
def test_int8_is_a_quarter_of_f32_and_the_same_from_either_kind_of_folder(tied, tmp_path):
  write_model(tmp_path / "hf", RAW | {"tie_word_embeddings": tied}, seed=3)
  convert(tmp_path / "hf", tmp_path / "ours", "float32")
  mesh = make_mesh(jax.devices()[:1])

  def loaded(folder: str, form: WeightForm) -> dict[str, np.ndarray]:
    return arrays(open_checkpoint(str(tmp_path / folder), mesh, "float32", form).load())

  plain, made = loaded("hf", PLAIN), loaded("hf", WeightForm(matrix=INT8))
  assert_same_bits(made, loaded("ours", WeightForm(matrix=INT8)))
  np.testing.assert_array_equal(made["embed"], plain["embed"])
  matrices = {name.removesuffix("_scale") for name in made if name.endswith("_scale")}
  assert len(matrices) == 4 * RAW["num_hidden_layers"] + 1 and "head" in matrices
  for name in matrices:
    values, scales = made[name], made[f"{name}_scale"]
    assert (values.dtype, scales.dtype) == (np.int8, np.float32)
    was = plain["embed"].T if name == "head" and tied else plain[name]
    assert np.abs(values * scales - was).max() <= 0.5001 * scales.max()
  for name in plain.keys() - matrices:
    np.testing.assert_array_equal(made[name], plain[name])
  packed = loaded("hf", WeightForm(packed=True, matrix=INT8))
  assert packed.keys() == made.keys()
  assert {packed[name].dtype for name in matrices} == {np.dtype(np.int8)}


def test_a_tpus_codes_are_split_over_two_devices_by_whole_groups(tmp_path):
  """In a process of its own. Codes and scales are those of one device."""
  write_model(tmp_path, RAW | {"intermediate_size": 256}, seed=3)
  script = """
import hashlib, sys
import jax, numpy as np
from engine.device.mesh import make_mesh
from engine.device.weights import open_checkpoint, parameter_name
from models.weight_form import MatrixForm, WeightForm
form = WeightForm(flat=True, matrix=MatrixForm("grouped", 4, 16, scale_dtype="float16"))
for count in (1, 2):
  params = open_checkpoint(sys.argv[1], make_mesh(jax.devices()[:count]), "float32", form).load().params
  found = {parameter_name(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}
  down, qkv = found["layers.0.mlp.down"], found["layers.0.attention.qkv"]
  digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in found.values())).hexdigest()
  print(down.dtype, down.shape[:2], [leaf.sharding.shard_shape(leaf.shape)[axis] / leaf.shape[axis]
        for leaf, axis in ((down, 0), (qkv, 2))], digest)
"""
  env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
  ran = subprocess.run(
    [sys.executable, "-c", script, str(tmp_path)], env=env, text=True, capture_output=True, check=False, timeout=300
  )
  assert ran.returncode == 0, ran.stderr
  one, two = ran.stdout.splitlines()
  assert one.startswith("int4 (16, 16) [1.0, 1.0] ")
  assert two == one.replace("[1.0, 1.0]", "[0.5, 0.5]")


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_packed_weights_are_the_plain_ones_and_leave_the_file(stored, tmp_path):
  """Each column of a block is a column of the plain matrix; what happens to the file later changes nothing."""
  write_model(tmp_path, RAW, seed=3, dtype=stored)
  mesh = make_mesh(jax.devices()[:1])
  plain = arrays(open_checkpoint(str(tmp_path), mesh, "float32").load())
  packed = open_checkpoint(str(tmp_path), mesh, "float32", WeightForm(packed=True)).load()
  file = tmp_path / "model.safetensors"
  with file.open("r+b") as stream:
    stream.write(b"\1" * file.stat().st_size)
  found = arrays(packed)
  matrices = [name for name in plain if name.rpartition(".")[2] in ("qkv", "out", "gate_up", "down", "head")]
  assert len(matrices) == 4 * RAW["num_hidden_layers"] + 1
  for name in matrices:
    inputs = found[name].shape[1]
    columns = found[name].transpose(1, 0, 2).reshape(inputs, -1)
    matrix = plain[name].reshape(inputs, -1)
    np.testing.assert_array_equal(columns[:, : matrix.shape[1]], matrix)
  for name in plain.keys() - set(matrices):
    np.testing.assert_array_equal(found[name], plain[name])


@pytest.mark.parametrize("tied", [False, True])
def test_a_bfloat16_embedding_and_head_stay_so_and_give_the_same_bits(tied, tmp_path):
  write_model(tmp_path / "narrow", RAW | {"tie_word_embeddings": tied}, seed=3, dtype="bfloat16")
  shutil.copytree(tmp_path / "narrow", tmp_path / "wide")
  values = load_file(tmp_path / "narrow" / "model.safetensors")
  save_file({name: value.astype(np.float32) for name, value in values.items()}, tmp_path / "wide" / "model.safetensors")
  mesh, logits, held = make_mesh(jax.devices()[:1]), {}, {}
  for name in ("narrow", "wide"):
    # Ordered: otherwise AMX tiles multiply from 13 rows on by weights of bfloat16, and from 65 on by those of float32.
    model = open_checkpoint(str(tmp_path / name), mesh, "float32", WeightForm(packed=True, ordered=True)).load()
    logits[name] = np.asarray(dense_logits((model.graphdef, model.params), list(range(3, 40))))
    held[name] = arrays(model)
  np.testing.assert_array_equal(logits["narrow"], logits["wide"])
  kept = {name for name, value in held["narrow"].items() if value.dtype == ml_dtypes.bfloat16}
  assert kept == ({"embed"} if tied else {"embed", "head"})
  assert {value.dtype for value in held["wide"].values()} == {np.dtype(np.float32)}


def test_random_weights_need_no_file_but_the_config_and_are_always_the_same(tmp_path):
  (tmp_path / "config.json").write_text(json.dumps(RAW), "utf-8")

  def drawn(form: WeightForm = PLAIN) -> dict[str, np.ndarray]:
    return arrays(
      open_checkpoint(str(tmp_path), make_mesh(jax.devices()[:1]), "float32", form, random_weights=True).load()
    )

  first, second, packed = drawn(), drawn(), drawn(WeightForm(packed=True))
  assert_same_bits(first, second)
  assert first["embed"].std() == pytest.approx(RAW["hidden_size"] ** -0.5, rel=0.1)
  assert (first["final_norm.scale"] == 1).all()
  assert packed.keys() == first.keys()
  assert len({value.tobytes() for value in first.values() if value.ndim > 1}) == sum(v.ndim > 1 for v in first.values())
  (tmp_path / "config.json").unlink()
  with pytest.raises(CheckpointError, match="config.json: no such file"):
    drawn()
