"""Executables that are loaded, not compiled: the same bits, in place, and never what was made for something else."""

import dataclasses
import hashlib
import json
import os
import pathlib

import jax
import numpy as np
import pytest

from engine.device import build as build_lib
from engine.device import kv_cache
from engine.device import made_for as made_for_lib
from engine.device.build import Built, build_engine
from engine.device.mesh import make_mesh, replicated
from engine.device.options import BuildOptions
from engine.device.programs import Program
from engine.device.restore import NotRestored, restore_program
from engine.errors import ConfigError
from extensions.executable_bundle import bundle as bundle_lib
from extensions.executable_bundle.bundle import Bundle
from tests.device.stored_engine import RAW, SMALL, answers, write_tiny_model
from tools.make_random_model import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
  return write_tiny_model(tmp_path_factory)


@pytest.fixture(scope="module")
def written(model, tmp_path_factory) -> tuple[pathlib.Path, list]:
  """A bundle, and what the engine that wrote it said: nothing may change it, so tests work on copies.

  Its programs were in JAX's compile cache, and JAX had loaded them from there for an engine of this process, and kept
  them in memory. Such programs cannot be stored, and must be compiled again.
  """
  folder, cache = tmp_path_factory.mktemp("bundle") / "programs", str(tmp_path_factory.mktemp("cache"))
  build_engine(BuildOptions(model, compile_cache_dir=cache, **SMALL), lambda *_: None, lambda _: None)
  jax.clear_caches()
  build_engine(BuildOptions(model, **SMALL), lambda *_: None, lambda _: None)
  built, events, _ = start(model, folder, write=True, compile_cache_dir=cache)
  return folder, answers(built, events)


def start(model: str, folder: pathlib.Path, write: bool = False, **changes) -> tuple[Built, list, Bundle]:
  events: list = []
  options = BuildOptions(model, **(SMALL | changes))
  bundle = Bundle(str(folder), options.batching, write)
  return build_engine(options, lambda *_: None, events.extend, source=bundle), events, bundle


def never(program: Program):
  raise AssertionError(f"{program.name} was compiled")


def test_loaded_executables_give_the_same_bits_in_place(model, written, monkeypatch):
  folder, expected = written
  monkeypatch.setattr(Program, "compile", never)
  built, events, _ = start(model, folder)
  assert built.fallbacks == ()
  before = [layer.unsafe_buffer_pointer() for layer in built.runner.kv]
  state = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(built.runner.slot_state)]
  assert answers(built, events) == expected
  assert [layer.unsafe_buffer_pointer() for layer in built.runner.kv] == before
  assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(built.runner.slot_state)] == state


def test_custom_calls_and_in_place_updates_are_inside(model, written):
  folder, _ = written
  built, _, _ = start(model, folder)
  assert built.attention == "cpu" and built.matmul == "packed"
  for executable in built.runner.steps.values():
    text = executable.as_text()
    assert text is not None and "SluicePagedAttend" in text and "SluicePackedMatmul" in text
    donated = sum(leaf.nbytes for leaf in (*built.runner.kv, *jax.tree.leaves(built.runner.slot_state)))
    analysis = executable.memory_analysis()
    assert analysis is not None and analysis.alias_size_in_bytes == donated + 2 * 4 * (SMALL["max_num_seqs"] + 1)


class Judged(Exception):
  """The bundle has been compared with what is wanted; nothing was compiled."""


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"token_budgets": (8, 32)}, "ladder [[8, 4, 4], [16, 4, 4]], and here is [[8, 4, 4], [32, 4, 4]]"),
    ({"num_blocks": 9, "kv_cache_mb": 0}, "KV 2 of float32[33, 2, 2, 256], and here is 2 of float32[10, 2, 2, 256]"),
    ({"matmul": "xla"}, "parameters "),
    ({"dtype": "bfloat16"}, "parameters "),
    ({"max_model_len": 32}, "KV 2 of float32[33, 2, 2, 256], and here is 2 of float32[17, 2, 2, 256]"),
    ({"max_num_seqs": 3, "num_blocks": 32, "kv_cache_mb": 0}, "ladder "),
    ({"model": RAW | {"rms_norm_eps": 1e-3}}, "model "),
    ({"model": RAW | {"eos_token_id": [1, 2, 3]}}, "num_eos "),
  ],
  ids=str,
)
def test_made_for_other_settings(model, written, changes, said, monkeypatch, tmp_path):
  def judge(wanted, make):
    raise Judged(make.__self__._reasons)

  monkeypatch.setattr(build_lib, "Making", judge)
  if "model" in changes:
    write_model(tmp_path / "other", changes["model"], seed=3)
    model, changes = str(tmp_path / "other"), {}
  with pytest.raises(Judged) as judged:
    start(model, written[0], **changes)
  ((reason,),) = judged.value.args
  assert reason.startswith(f"was made for {said}")


def test_made_with_other_compiler_options(model, written, monkeypatch):
  def judge(wanted, make):
    raise Judged(make.__self__._reasons)

  monkeypatch.setattr(build_lib, "Making", judge)
  monkeypatch.setattr(made_for_lib, "step_options", lambda spec: {"xla_backend_optimization_level": 3})
  with pytest.raises(Judged) as judged:
    start(model, written[0])
  assert "was made for compiler options {" in str(judged.value) and '_level": 3}' in str(judged.value)


def test_weights_are_arguments(written, tmp_path, monkeypatch):
  """Other weights of the same model take the same programs."""
  monkeypatch.setattr(Program, "compile", never)
  write_model(tmp_path / "tuned", RAW, seed=4)
  built, events, bundle = start(str(tmp_path / "tuned"), written[0])
  assert built.fallbacks == () and bundle.is_whole
  assert answers(built, events) != written[1]


# From here on, two programs that take no time to compile.

MESH = make_mesh(jax.devices()[:1])
MADE_FOR = {"jax": "1", "device": "toaster", "ladder": [[8, 4]]}


def program(name: str, function, donated: tuple[int, ...] = (), size: int = 8) -> Program:
  array = jax.ShapeDtypeStruct((size,), np.float32, sharding=replicated(MESH))
  return Program(name, function, (array, array), (array,), donated, None)


def programs() -> tuple[Program, Program]:
  return program("sum", lambda a, b: (a + b,), donated=(0,)), program("product", lambda a, b: (a * b,))


def use(folder: pathlib.Path, wanted=None, made_for=MADE_FOR, write: bool = False) -> tuple[Bundle, str]:
  """Asks for the programs, and looks at what they do; returns the bundle, and why programs were compiled."""
  bundle = Bundle(str(folder), "chunked", write)
  bundle.begin_for(made_for, tuple(MESH.devices.flat))
  for each in wanted or programs():
    a, b = (jax.device_put(np.arange(8, dtype=np.float32) + start, replicated(MESH)) for start in (1, 2))
    expected = each.function(np.arange(8) + 1, np.arange(8) + 2)[0]
    with bundle_lib.without_compile_cache():
      found = bundle.executable(each)
    assert np.asarray(found(a, b)[0]).tolist() == expected.tolist()
  return bundle, bundle.finish(7)


@pytest.fixture
def small(tmp_path) -> pathlib.Path:
  folder = tmp_path / "small"
  bundle, note = use(folder, write=True)
  assert bundle.is_whole and note.endswith("has no manifest.json; programs compiled and stored: 2")
  assert sorted(oct(file.stat().st_mode & 0o777) for file in (folder, *folder.iterdir())) == ["0o600"] * 3 + ["0o700"]
  return folder


def entry(folder: pathlib.Path, name: str) -> pathlib.Path:
  return folder / f"{json.loads((folder / 'manifest.json').read_text())['programs'][name]['sha256']}.executable"


def test_nothing_is_compiled_twice(small, monkeypatch):
  monkeypatch.setattr(Program, "compile", never)
  bundle, note = use(small)
  assert note == "" and bundle.is_whole and bundle._manifest["num_blocks"] == 7


def cut(folder):
  entry(folder, "sum").write_bytes(entry(folder, "sum").read_bytes()[:-1])


def grow(folder):
  entry(folder, "sum").write_bytes(entry(folder, "sum").read_bytes() + b"0")


def flip(folder):
  data = bytearray(entry(folder, "sum").read_bytes())
  data[len(data) // 2] ^= 1
  entry(folder, "sum").write_bytes(data)


def swap(folder):
  one, two = entry(folder, "sum"), entry(folder, "product")
  first, second = one.read_bytes(), two.read_bytes()
  one.write_bytes(second)
  two.write_bytes(first)


def remove(folder):
  entry(folder, "sum").unlink()


def be_a_folder(folder):
  entry(folder, "sum").rename(folder / "away")
  (folder / f"{json.loads((folder / 'manifest.json').read_text())['programs']['sum']['sha256']}.executable").mkdir()


def edit(change):
  def edited(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))

  return edited


def forge(data: bytes):
  """An entry whose digest is right, and which is none of this backend's."""

  def forged(folder):
    digest = hashlib.sha256(data).hexdigest()
    (folder / f"{digest}.executable").write_bytes(data)
    edit(lambda manifest: manifest["programs"]["sum"].update(sha256=digest, bytes=len(data)))(folder)

  return forged


@pytest.mark.parametrize(
  ("harm", "said", "number"),
  [
    (cut, "sum has lost a part of", 1),
    (grow, "sum has more than", 1),
    (flip, "sum is not what was written (SHA-256)", 1),
    (swap, "sum ", 2),
    (remove, "sum has lost its file", 1),
    (be_a_folder, "sum cannot be read (Is a directory)", 1),
    (forge(b""), "sum ", 1),
    (forge(b"no executable"), "sum ", 1),
    (edit(lambda manifest: manifest["programs"].pop("sum")), "sum is not in it", 1),
    (
      edit(lambda manifest: manifest["programs"].update(sum=manifest["programs"]["product"])),
      "sum it has 0 bytes of donated arguments, not 32",
      1,
    ),
    (
      edit(lambda manifest: manifest["programs"]["sum"].update(sha256="../" * 20 + "etc/")),
      "manifest.json that is b",
      2,
    ),
    (edit(lambda manifest: manifest["programs"]["sum"].update(bytes=-1)), "manifest.json that is broken", 2),
    (edit(lambda manifest: manifest.update(programs=[])), "manifest.json that is broken", 2),
    (edit(lambda manifest: manifest.update(format=2)), "has format 2, this server reads 1", 2),
    (edit(lambda manifest: manifest["made_for"].update(jax="2")), "was made for jax 2, and here is 1", 2),
    (edit(lambda manifest: manifest["made_for"].pop("device")), "was made for device None, and here is toaster", 2),
    (edit(lambda manifest: manifest["made_for"].update(more=1)), "was made for more 1, and here is None", 2),
    (lambda folder: (folder / "manifest.json").write_bytes(b'{"format": 1, "made'), "manifest.json that is broken", 2),
    (lambda folder: (folder / "manifest.json").write_bytes(b"[" * 10**5), "manifest.json that is broken", 2),
    (lambda folder: (folder / "manifest.json").write_bytes(b" " * (2**20 + 1)), "manifest.json that is broken", 2),
    (lambda folder: (folder / "manifest.json").unlink(), "has no manifest.json", 2),
  ],
)
def test_what_is_not_whole_is_named_and_compiled(small, harm, said, number):
  harm(small)
  bundle, note = use(small)
  assert note.startswith(f"executable bundle {small}: {said}" if said.startswith("sum") else "executable bundle"), note
  assert said in note and note.endswith(f"; programs compiled: {number}") and not bundle.is_whole
  if harm is be_a_folder:
    return
  assert use(small, write=True)[0].is_whole
  assert use(small)[1] == ""


def test_programs_that_take_or_give_something_else_are_not_run(small):
  """Were a manifest to say that they are the same."""
  said = {
    "arguments": program("sum", lambda a, b: (a + b,), donated=(0,), size=4),
    "donated arguments": program("sum", lambda a, b: (a + b,)),
  }
  data = entry(small, "sum").read_bytes()
  for what, other in said.items():
    with pytest.raises(NotRestored, match=f"bytes of {what}"):
      restore_program(other, data, tuple(MESH.devices.flat))
  more = program("sum", lambda a, b: (a + b, a), donated=(0,))
  more = Program(more.name, more.function, more.arguments, more.results * 2, more.donated, None)
  with pytest.raises(NotRestored, match="gives 1 arrays, not 2"):
    restore_program(more, data, tuple(MESH.devices.flat))


@pytest.mark.parametrize("what", ["folder", "manifest.json", "entry"])
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o722])
def test_a_folder_that_others_can_write_to_is_refused(small, what, mode):
  path = {"folder": small, "manifest.json": small / "manifest.json", "entry": entry(small, "sum")}[what]
  path.chmod(mode)
  with pytest.raises(ConfigError, match=rf"executable_bundle={small}: {path} has mode {mode:04o}.*chmod -R go-w"):
    Bundle(str(small), "chunked")


def test_paths_that_are_no_folder(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(ConfigError, match="not a folder; set --executable_bundle"):
    Bundle(str(tmp_path / "file"), "chunked")
  with pytest.raises(ConfigError, match="Not a directory; set --executable_bundle"):
    Bundle(str(tmp_path / "file" / "below"), "chunked")
  with pytest.raises(ConfigError, match="holds the programs of one engine, and batching=disaggregated has two"):
    Bundle(str(tmp_path / "free"), "disaggregated")


def test_a_writer_that_fails_leaves_the_old_bundle(small, monkeypatch):
  """And serves; the next writer takes away what it has left."""
  before = {file.name: file.read_bytes() for file in small.iterdir()}
  kept = os.replace

  def full(source, target):
    if target.name == "manifest.json":
      raise OSError(28, "No space left on device")
    kept(source, target)

  monkeypatch.setattr(bundle_lib.os, "replace", full)
  other = MADE_FOR | {"jax": "2"}
  bundle, note = use(small, made_for=other, write=True)
  assert note.startswith(f"executable bundle {small}: cannot be written (No space left on device); was made for")
  assert not bundle.is_whole
  assert before.items() <= {file.name: file.read_bytes() for file in small.iterdir()}.items()
  assert use(small)[1] == ""
  monkeypatch.undo()
  (small / "notes.txt").write_text("a user's own")
  assert use(small, made_for=other, write=True)[0].is_whole
  assert len(list(small.glob("*.executable"))) == 2 and not list(small.glob("*.part"))
  assert (small / "notes.txt").read_text() == "a user's own"


def test_every_static_number_of_a_program_is_compared(model, written):
  """A field added to ProgramSpec is in the manifest, or shown here to follow from what is."""
  built, _, _ = start(model, written[0])
  spec = built.runner.spec
  found = made_for_lib.made_for(spec, tuple(built.runner.steps))
  follows = {"mesh", "model", "graphdef", "params_tree", "params", "kv"}
  assert {field.name for field in dataclasses.fields(spec)} - follows <= set(found)
  assert json.loads((written[0] / "manifest.json").read_text())["made_for"] == found
  environment = {"XLA_FLAGS": "--xla_dump_to=/tmp --xla_cpu_enable_fast_math=true"}
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XLA_FLAGS", environment["XLA_FLAGS"])
    assert made_for_lib.made_for(spec, tuple(built.runner.steps))["XLA flags"] == ["--xla_cpu_enable_fast_math=true"]


def test_where_memory_sizes_the_pool_the_bundle_decides(model, tmp_path, monkeypatch):
  """Free memory is never twice the same; nor is a step compiled only to learn what it needs."""
  free = {"bytes": 2 * 2**20}
  monkeypatch.setattr(kv_cache, "free_bytes", lambda mesh, step_bytes, reserve_share=0.05: free["bytes"] - step_bytes)
  settings = {"kv_cache_mb": 0, "prefix_cache_scope": "off", "token_budgets": (8,), "prefill_chunk": 8}
  first, _, bundle = start(model, tmp_path / "auto", write=True, **settings)
  assert bundle.is_whole
  free["bytes"] += 12345
  with monkeypatch.context() as patch:
    patch.setattr(Program, "compile", never)
    again, _, _ = start(model, tmp_path / "auto", **settings)
  assert again.config.num_blocks == first.config.num_blocks and again.fallbacks == ()


def test_where_a_cpus_memory_sizes_the_pool_the_bundle_decides(model, tmp_path, monkeypatch):
  """As long as the two sizes are near: a tenth, and not a pool that another memory allowed."""
  block_bytes = 8192
  left = {"bytes": 2 * 48 * block_bytes}
  monkeypatch.setattr(build_lib, "check_fits", lambda *args: left["bytes"])
  settings = {"kv_cache_mb": 0, "max_model_len": 0, "prefix_cache_scope": "off"}
  settings |= {"token_budgets": (8,), "prefill_chunk": 8}
  first, _, bundle = start(model, tmp_path / "auto", write=True, **settings)
  assert bundle.is_whole and first.config.num_blocks == 47
  left["bytes"] = 2 * 52 * block_bytes
  with monkeypatch.context() as patch:
    patch.setattr(Program, "compile", never)
    again, _, _ = start(model, tmp_path / "auto", **settings)
  assert again.config.num_blocks == 47 and again.fallbacks == ()
  left["bytes"] *= 2
  more, _, bundle = start(model, tmp_path / "auto", **settings)
  assert more.config.num_blocks > 90 and not bundle.is_whole
