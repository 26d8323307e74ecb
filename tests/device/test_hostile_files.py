"""Model folders and caches that lie, are broken, or are somebody else's: refused by name, before anything is made."""

import ast
import contextlib
import gc
import hashlib
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
from jax._src.compiler import get_compile_options
import orbax.checkpoint as ocp
import pytest

from engine.device import compile_cache
from engine.device.build import build_engine
from engine.device.mesh import make_mesh
from engine.device.options import BuildOptions
from engine.device.safetensors_file import read_header
from engine.device.weights import open_checkpoint
from engine.errors import CheckpointError, ConfigError
from models.registry import config_from_hf
from tools.convert_checkpoint import convert
from tools.make_random_model import write_model
from tools.parity.cases import CASES

ROOT = pathlib.Path(__file__).resolve().parents[2]
RAW = CASES["qwen3"][0] | {"num_hidden_layers": 2}


def load(folder: pathlib.Path, **more):
  return open_checkpoint(str(folder), make_mesh(jax.devices()[:1]), "float32", **more).load()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> pathlib.Path:
  """Folders that no test changes: hf, shards, orbax."""
  root = tmp_path_factory.mktemp("models")
  write_model(root / "hf", RAW, seed=1)
  write_model(root / "shards", RAW, seed=1, num_shards=3)
  convert(root / "hf", root / "orbax", "float32", name="tiny")
  return root


@pytest.fixture
def hf(pristine, tmp_path) -> pathlib.Path:
  return shutil.copytree(pristine / "hf", tmp_path / "hf")


# Headers.

_NUMBERS = (-1, 0, 1, 2, 3, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**40, 1.5, 1e308, True, None, "7", [], {})


def mutate(header: dict, rng: random.Random) -> bytes:
  """A header that differs in one to three places: of structure, of values, or of bytes."""
  header = json.loads(json.dumps(header))
  for _ in range(rng.randrange(1, 4)):
    if not header:
      break
    name = rng.choice(list(header))
    entry = header[name]
    kind = rng.randrange(10)
    if kind == 0:
      del header[name]
    elif kind == 1:
      header[rng.choice(("", "x", name + "\u0000", "__metadata__", "a" * 2000, name.upper()))] = entry
    elif kind == 2:
      header[name] = rng.choice(_NUMBERS)
    elif isinstance(entry, dict) and entry:
      key = rng.choice(list(entry))
      if kind == 3:
        del entry[key]
      elif kind == 4:
        entry[key] = rng.choice(_NUMBERS)
      elif kind == 5 and isinstance(entry.get("shape"), list):
        entry["shape"] = entry["shape"] * rng.choice((0, 2, 40)) + [rng.choice(_NUMBERS)]
      elif kind == 6 and isinstance(entry.get("data_offsets"), list):
        entry["data_offsets"][rng.randrange(len(entry["data_offsets"]) or 1) :] = [rng.choice(_NUMBERS)]
      elif kind == 7:
        entry["dtype"] = rng.choice(("F64", "I8", "F4", "BF16", "f32", "", "F32\u0000", [], None))
      elif kind == 8 and isinstance(entry.get("data_offsets"), list):
        entry["data_offsets"] = [
          number + rng.randrange(-9, 9) for number in entry["data_offsets"] if type(number) is int
        ]
  text = bytearray(json.dumps(header).encode())
  if rng.random() < 0.3:
    for _ in range(rng.randrange(1, 4)):
      text[rng.randrange(len(text))] = rng.randrange(256)
  if rng.random() < 0.1:  # twice the same name
    text[1:1] = f"{json.dumps(rng.choice(list(header) or ['x']))}:{{}},".encode()
  length = len(text)
  if rng.random() < 0.1:
    length = rng.choice((0, 1, length - 1, length + 1, 2**31, 2**62, 2**63, 2**64 - 1))
  return length.to_bytes(8, "little") + bytes(text)


@pytest.mark.catalogue("G1")
@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.long)])
def test_mutated_headers(pristine, tmp_path, count):
  """Each is read, refused with its file named, or another model's; memory stays where it was."""
  whole = (pristine / "hf" / "model.safetensors").read_bytes()
  length = int.from_bytes(whole[:8], "little")
  header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
  file, rng = tmp_path / "model.safetensors", random.Random(7)
  refused, before = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  for number in range(count):
    changed = mutate(header, rng)
    file.write_bytes(changed + (data if number % 8 == 0 else b""))  # most need no data to be refused
    try:
      tensors = read_header(file)
    except CheckpointError as error:
      assert str(error).startswith(str(file)) and len(str(error)) < 1000
      refused += 1
    else:
      size = file.stat().st_size
      assert all(0 < tensor.offset <= size for tensor in tensors.values())
  assert refused > 0.9 * count
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def entry_of(shape: str) -> str:
  return f'{{"dtype":"F32","shape":[{shape}],"data_offsets":[0,4]}}'


@pytest.mark.catalogue("G1")
@pytest.mark.parametrize(
  "entry, said",
  [
    (entry_of(",".join(["9" * 4000] * 2000)), "number out of range"),
    (entry_of(",".join(["1"] * 200_000)), "tensor x has 200000 dimensions, at most 32 are supported"),
    (entry_of("9" * 5000), "number out of range"),
    ("[" * 100_000, "recursion limit exceeded"),
    (entry_of("").replace("[]", '""'), "expected a sequence"),
    (entry_of("2"), "invalid shape"),
    (f'{entry_of("1")},"x":{entry_of("1")}', "a name occurs twice"),
  ],
  ids=["product", "dimensions", "number", "depth", "text", "size", "twice"],
)
def test_headers_that_would_take_for_ever(tmp_path, entry, said):
  file = tmp_path / "model.safetensors"
  text = b'{"x":%s}' % entry.encode()
  file.write_bytes(len(text).to_bytes(8, "little") + text + b"abcd")
  with pytest.raises(CheckpointError, match=said) as caught:
    read_header(file)
  assert len(str(caught.value)) < 1000


@pytest.mark.catalogue("G1")
def test_a_header_that_is_too_long(tmp_path):
  file = tmp_path / "model.safetensors"
  with open(file, "wb") as stream:
    stream.write((30_000_000).to_bytes(8, "little"))
    stream.truncate(60_000_000)  # a hole, which takes no disk space
  with pytest.raises(CheckpointError, match="a header of 30000000 bytes; supported are at most 25000000"):
    read_header(file)


# Code.


@pytest.mark.catalogue("G2")
def test_nothing_imports_pickle_or_torch():
  for package in ("engine", "extensions", "models", "pallas_kernels", "server"):
    for path in (ROOT / package).rglob("*.py"):
      names = set()
      for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
          names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
          names.add((node.module or "").split(".")[0])
      assert not names & {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "torch", "joblib"}, path


@pytest.mark.catalogue("G2")
def test_no_pickle_is_read(pristine):
  """By the interpreter's own report of every class that an unpickler looks up; and torch is in nobody's memory."""
  script = """
import sys
found = []
sys.addaudithook(lambda event, arguments: found.append(arguments) if event == "pickle.find_class" else None)
import jax
from engine.device.mesh import make_mesh
from engine.device.weights import open_checkpoint
from server import main
for path in sys.argv[1:]:
  open_checkpoint(path, make_mesh(jax.devices()[:1]), "float32").load()
import pickle
assert not found, found
pickle.loads(pickle.dumps(ValueError))
assert found, "the hook hears nothing"
print([name for name in ("torch", "dill", "cloudpickle", "transformers") if name in sys.modules])
"""
  done = subprocess.run(
    [sys.executable, "-c", script, str(pristine / "hf"), str(pristine / "orbax")],
    cwd=ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    text=True,
    capture_output=True,
    timeout=300,
    check=False,
  )
  assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


# Links.


@pytest.mark.catalogue("G3")
def test_links_out_of_the_folder(pristine, tmp_path):
  outside = tmp_path / "outside"
  shutil.copytree(pristine / "shards", outside)
  for name in ("model-00002-of-00003.safetensors", "model.safetensors.index.json", "config.json"):
    folder = shutil.copytree(pristine / "shards", tmp_path / f"with {name}")
    (folder / name).unlink()
    (folder / name).symlink_to(outside / name)
    with pytest.raises(CheckpointError, match=rf"{name}: is a link to .*outside.*, outside of its folder; copy"):
      load(folder)
  whole = tmp_path / "whole"
  whole.symlink_to(outside)
  load(whole)  # the folder itself may be a link


@pytest.mark.catalogue("G3")
def test_links_of_a_download_are_its_own(pristine, tmp_path):
  """As huggingface_hub lays models out."""
  home = tmp_path / "models--me--tiny"
  snapshot, blobs = home / "snapshots" / "abc", home / "blobs"
  snapshot.mkdir(parents=True)
  blobs.mkdir()
  for file in (pristine / "hf").iterdir():
    shutil.copy(file, blobs / f"digest-{file.name}")
    (snapshot / file.name).symlink_to(f"../../blobs/digest-{file.name}")
  load(snapshot)
  (snapshot / "model.safetensors").unlink()
  (snapshot / "model.safetensors").symlink_to(pristine / "hf" / "model.safetensors")
  with pytest.raises(CheckpointError, match=r"model\.safetensors: is a link to"):
    load(snapshot)


@pytest.mark.catalogue("G3")
def test_what_is_no_file(hf):
  (hf / "model.safetensors").unlink()
  os.mkfifo(hf / "model.safetensors")  # opening one waits for a writer
  with pytest.raises(CheckpointError, match=r"model\.safetensors: is no regular file"):
    load(hf)
  (hf / "model.safetensors").unlink()
  (hf / "model.safetensors").mkdir()
  with pytest.raises(CheckpointError, match=r"model\.safetensors: is no regular file"):
    load(hf)


# Configs.

_SIZES = (
  "vocab_size",
  "hidden_size",
  "num_hidden_layers",
  "num_attention_heads",
  "num_key_value_heads",
  "head_dim",
  "intermediate_size",
  "max_position_embeddings",
)
LIES = [
  *({name: value} for name in _SIZES for value in (0, -1, 10**9, 10**400, 1.5, "7", True, [])),
  *(
    {name: value} for name in ("rope_theta", "rms_norm_eps") for value in (0, -1.0, "x", float("inf"), float("nan"), [])
  ),
  {"rope_parameters": {"rope_theta": 1.0, "rope_type": "llama3", "factor": 8.0}},
  {"rope_parameters": {"rope_type": "yarn", "factor": 8.0}},
  {"rope_parameters": {"rope_type": "linear", "factor": -1.0}},
  {"rope_parameters": "linear"},
  {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
  {"head_dim": 15},
  {"num_attention_heads": 7},
  {"num_key_value_heads": 3},
  {"hidden_size": 97},
  {"hidden_act": "gelu"},
  {"architectures": ["LlamaForCausalLM", "Qwen3ForCausalLM"]},
  {"architectures": ["Nonsense"]},
  {"auto_map": {"AutoModel": "code.Model"}},
  {"quantization_config": {"quant_method": "gptq"}},
  {"num_experts": 8},
  {"tie_word_embeddings": "yes"},
  {"use_sliding_window": True, "sliding_window": -1, "max_window_layers": 0},
  {"eos_token_id": 10**6},
  {"eos_token_id": [1, -1]},
  {"vocab_size": 257},
  {"num_hidden_layers": 3},
  {"num_hidden_layers": 1},
  {"intermediate_size": 10},
]


@pytest.mark.catalogue("G4")
@pytest.mark.parametrize(
  "lie",
  [
    pytest.param(lie, id=str(lie)[:60], marks=pytest.mark.long if number % 3 else ()) for number, lie in enumerate(LIES)
  ],
)
def test_mutated_configs(pristine, tmp_path, lie):
  """Refused with the file or the tensor named, and no array made."""
  assert len(LIES) >= 50
  (tmp_path / "model.safetensors").symlink_to(tmp_path / "weights")
  shutil.copy(pristine / "hf" / "model.safetensors", tmp_path / "weights")
  (tmp_path / "config.json").write_text(json.dumps(RAW | lie))
  gc.collect()  # or what other tests have left goes meanwhile
  arrays = len(jax.live_arrays())
  with pytest.raises(CheckpointError, match=r"config\.json|tensor ") as caught:
    load(tmp_path)
  assert len(jax.live_arrays()) <= arrays
  assert len(str(caught.value)) < 1000


@pytest.mark.catalogue("G4")
def test_a_config_of_many_layers_costs_nothing():
  with pytest.raises(ValueError, match="num_layers=1000000000 is above the limit 1024; correct the file"):
    config_from_hf(RAW | {"num_hidden_layers": 10**9})


@pytest.mark.catalogue("G4")
def test_a_tokenizer_of_another_model(pristine):
  load(pristine / "hf", num_token_ids=256)
  with pytest.raises(
    CheckpointError, match=r"vocab_size=256, but tokenizer\.json has ids up to 256; use files of one model"
  ):
    load(pristine / "hf", num_token_ids=257)


# Digests.


def sign(folder: pathlib.Path, mark: str) -> None:
  (folder / "SHA256SUMS").unlink(missing_ok=True)
  lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()} {mark}{file.name}\n" for file in sorted(folder.iterdir())]
  (folder / "SHA256SUMS").write_text("".join(lines))


@pytest.mark.catalogue("G5")
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_flipped_bits_with_digests(hf, count):
  """Anywhere in the weights: most of these nobody would see."""
  sign(hf, " ")
  load(hf)
  file, rng = hf / "model.safetensors", random.Random(3)
  whole = file.read_bytes()
  for _ in range(count):
    place, bit = rng.randrange(len(whole)), 1 << rng.randrange(8)
    with open(file, "r+b") as stream:
      stream.seek(place)
      stream.write(bytes((whole[place] ^ bit,)))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is corrupt, its SHA-256 is not the one"):
      load(hf)
    with open(file, "r+b") as stream:
      stream.seek(place)
      stream.write(whole[place : place + 1])
  sign(hf, "*./")  # as `sha256sum --binary ./*` writes it
  load(hf)


@pytest.mark.catalogue("G5")
@pytest.mark.parametrize(
  "text, said",
  [
    ("nonsense", "line 'nonsense' is no digest of a file"),
    (f"{'0' * 64}  ../secret", "is no digest of a file"),
    (f"{'0' * 64}  /etc/passwd", "is no digest of a file"),
    (f"{'0' * 64}  gone", "gone: is missing, though SHA256SUMS lists it"),
    ("\xff", "SHA256SUMS: cannot be read"),
  ],
)
def test_lists_of_digests_that_are_none(hf, text, said):
  (hf / "SHA256SUMS").write_bytes(text.encode("latin1"))
  with pytest.raises(CheckpointError, match=said):
    load(hf)


# Saves.


@pytest.mark.catalogue("G6")
def test_every_file_counts(pristine, tmp_path):
  """Of a converted folder each file in turn is lost."""
  files = [path.relative_to(pristine / "orbax") for path in (pristine / "orbax").rglob("*") if path.is_file()]
  assert len(files) > 8
  for number, file in enumerate(files):
    folder = shutil.copytree(pristine / "orbax", tmp_path / str(number))
    (folder / file).unlink()
    with pytest.raises(CheckpointError, match="is missing|no such file|cannot be read|is not listed"):
      load(folder)


def converting(source: pathlib.Path, output: pathlib.Path, limit: str = "unlimited") -> subprocess.Popen:
  """In a process of its own; `limit` is of a file's size, in 512 bytes."""
  confined = ["sh", "-c", 'ulimit -f "$0" && exec "$@"', limit]
  command = [sys.executable, "-m", "tools.convert_checkpoint", f"--input={source}", f"--output={output}"]
  return subprocess.Popen(
    [*confined, *command, "--dtype=float32"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  )


@pytest.mark.catalogue("G6")
@pytest.mark.parametrize("count", [2, pytest.param(100, marks=pytest.mark.long)])
def test_a_killed_conversion(pristine, tmp_path, count):
  """The folder is there and whole, or it is not there; what a dead one left is in nobody's way."""
  rng, whole = random.Random(5), 0
  for number in range(count):
    output = tmp_path / str(number)
    with converting(pristine / "hf", output) as process:
      while not list(tmp_path.glob(f".{number}.*")) and process.poll() is None and not output.exists():
        time.sleep(0.002)
      time.sleep(rng.random() * 0.3)
      process.send_signal(signal.SIGKILL)
      process.communicate()
    if output.exists():
      load(output)
      whole += 1
    else:
      with converting(pristine / "hf", output) as again:
        said = again.communicate(timeout=300)[1]
      assert again.returncode == 0, said
      load(output)


@pytest.mark.catalogue("G7")
def test_a_full_disk_while_converting(pristine, tmp_path):
  with converting(pristine / "hf", tmp_path / "out", limit="40") as process:
    said = process.communicate(timeout=300)[1]
  assert process.returncode == 1
  # Beside, and in the middle of, what Orbax's threads have to say.
  assert re.search(rf"{tmp_path / 'out'}: cannot be written \(.*File too large", said), said
  assert list(tmp_path.iterdir()) == []


@pytest.mark.catalogue("G7")
def test_threads_that_still_write_hide_no_error(pristine, tmp_path, monkeypatch):
  """Orbax's threads may add files while the folder is removed, and make it again."""
  writing = []

  def fail(self, directory, *_, **__):
    def write_on():
      for number in range(60):
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
          (directory / str(number)).write_text("more")
        time.sleep(0.002)

    writing.append(threading.Thread(target=write_on))
    writing[0].start()
    raise OSError(27, "File too large")

  monkeypatch.setattr(ocp.Checkpointer, "save", fail)
  with pytest.raises(CheckpointError, match=r"out: cannot be written \(\[Errno 27\] File too large\)"):
    convert(pristine / "hf", tmp_path / "out", "float32")
  writing[0].join()
  assert list(tmp_path.iterdir()) == []


@pytest.mark.catalogue("G7")
def test_a_disk_without_room_is_left_alone(pristine, tmp_path, monkeypatch):
  usage = shutil.disk_usage(tmp_path)
  monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
  with pytest.raises(
    ConfigError, match=r"out: needs \d+ bytes, and 1000 are free; free disk space, or choose another folder"
  ):
    convert(pristine / "hf", tmp_path / "out", "float32")
  assert list(tmp_path.iterdir()) == []


# Compiled programs.

SMALL = {"token_budgets": (8,), "max_num_seqs": 2, "prefill_chunk": 8, "kv_cache_mb": 1, "max_model_len": 64}


def serve_once(folder: pathlib.Path, cache: pathlib.Path):
  return build_engine(BuildOptions(str(folder), compile_cache_dir=str(cache), **SMALL), lambda *_: None, lambda _: None)


@pytest.fixture
def keep_jax_settings():
  names = ("compilation_cache_dir", "persistent_cache_min_entry_size_bytes", "persistent_cache_min_compile_time_secs")
  before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compile_cache.compilation_cache.reset_cache()


@pytest.mark.catalogue("G9")
def test_the_compile_cache_of_others(keep_jax_settings, tmp_path):
  made = tmp_path / "made" / "programs"
  compile_cache.use_compile_cache(str(made))
  assert made.stat().st_mode & 0o777 == 0o700
  for mode in (0o770, 0o702, 0o777, 0o1777):
    made.chmod(mode)
    with pytest.raises(ConfigError, match=rf"compile_cache_dir={made}: {made} has mode {mode:04o}.*chmod -R go-w"):
      compile_cache.use_compile_cache(str(made))
  made.chmod(0o755)
  compile_cache.use_compile_cache(str(made))
  entry = made / "jit_step-abc-cache"
  entry.write_bytes(b"")
  entry.chmod(0o666)
  with pytest.raises(ConfigError, match=rf"{entry} has mode 0666"):
    compile_cache.use_compile_cache(str(made))
  entry.unlink()
  tuned = made / "xla_gpu_per_fusion_autotune_cache_dir"
  tuned.chmod(0o777)
  with pytest.raises(ConfigError, match=rf"{tuned} has mode 0777"):
    compile_cache.use_compile_cache(str(made))
  tuned.chmod(0o700)
  if os.geteuid() == 0:
    os.chown(made, 12345, 0)
    with pytest.raises(ConfigError, match="has mode 0755 and owner 12345, so that others could put code"):
      compile_cache.use_compile_cache(str(made))
  (tmp_path / "file").write_text("")
  with pytest.raises(ConfigError, match="File exists; set --compile_cache_dir to a writable folder"):
    compile_cache.use_compile_cache(str(tmp_path / "file"))


def test_what_autotuning_found_is_kept_beside_the_programs(keep_jax_settings, tmp_path):
  compile_cache.use_compile_cache(str(tmp_path / "programs"))
  options = get_compile_options(num_replicas=1, num_partitions=1)
  kept = options.executable_build_options.debug_options.xla_gpu_per_fusion_autotune_cache_dir
  assert pathlib.Path(kept).parent == tmp_path / "programs" and pathlib.Path(kept).stat().st_mode & 0o777 == 0o700


@pytest.mark.catalogue("A4")
def test_cut_programs_are_compiled_again(keep_jax_settings, pristine, tmp_path):
  """As a kill or a full disk leaves them: JAX reads none of them, and replaces none either."""
  cache = tmp_path / "programs"
  serve_once(pristine / "hf", cache)
  entries = {path.name: path.stat().st_size for path in cache.glob("*-cache")}
  assert len(entries) >= 4
  for name in entries:
    with open(cache / name, "r+b") as stream:
      stream.truncate(entries[name] // 2)
  assert serve_once(pristine / "hf", cache).fallbacks == ()
  healed = {path.name: path.stat().st_size for path in cache.glob("*-cache")}
  # What this process holds in memory it does not write again.
  assert {name for name in entries if name.startswith("jit_step")} <= healed.keys() <= entries.keys()
  assert all(compile_cache._is_whole(path.read_bytes()) for path in cache.glob("*-cache"))
  compile_cache.check_cached_programs(str(cache))
  assert {path.name for path in cache.glob("*-cache")} == healed.keys()


@pytest.mark.catalogue("D14")
def test_a_compile_cache_that_takes_nothing(keep_jax_settings, monkeypatch, tmp_path):
  """Read-only: what is there is used. (Root may write anywhere, so the system's word is changed.)"""
  (tmp_path / "programs").mkdir(mode=0o700)
  monkeypatch.setattr(os, "access", lambda path, mode: False)
  reason = compile_cache.use_compile_cache(str(tmp_path / "programs"))
  assert reason.endswith("is not writable, so every start compiles new programs")
  assert list((tmp_path / "programs").iterdir()) == []
