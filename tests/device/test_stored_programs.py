"""Programs that come from the compile cache without being traced: the same bits, and never those of another engine."""

from collections.abc import Iterator
import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from engine.device import stored_programs
from engine.device.build import Built, build_engine
from engine.device.compile_cache import INDEX_SUFFIX, SUFFIX, use_compile_cache
from engine.device.made_for import made_for
from engine.device.mesh import make_mesh, replicated
from engine.device.options import BuildOptions
from engine.device.programs import Program
from engine.device.stored_programs import StoredPrograms
from engine.errors import ConfigError
from tests.device.stored_engine import SMALL, answers, write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
  return write_tiny_model(tmp_path_factory)


def start(model: str, cache: pathlib.Path, **changes) -> tuple[Built, list]:
  events: list = []
  jax.clear_caches()  # a program that JAX has in this process has no entry
  options = BuildOptions(model, compile_cache_dir=str(cache), **(SMALL | changes))
  return build_engine(options, lambda *_: None, events.extend), events


def never(program: Program):
  raise AssertionError(f"{program.name} was traced")


def test_a_second_start_traces_nothing_and_gives_the_same_bits(model, tmp_path, monkeypatch):
  """And one that has lost the file finds the entries by tracing, and names them again."""
  expected = answers(*start(model, tmp_path / "cache"))
  (index,) = (tmp_path / "cache").glob(f"*{INDEX_SUFFIX}")
  first = index.read_bytes()
  with monkeypatch.context() as patch:
    patch.setattr(Program, "compile", never)
    assert answers(*start(model, tmp_path / "cache")) == expected
    with pytest.raises(AssertionError, match="was traced"):
      start(model, tmp_path / "cache", max_model_len=48)
  index.unlink()
  start(model, tmp_path / "cache")
  assert index.read_bytes() == first and index.stat().st_mode & 0o777 == 0o600
  with monkeypatch.context() as patch:
    patch.setattr(Program, "compile", never)
    assert answers(*start(model, tmp_path / "cache")) == expected


def test_the_form_of_the_weights_counts(model, tmp_path):
  """Another layout may have the same size."""
  kinds = ("int8", "w8a8", "int8")
  specs = [start(model, tmp_path / "cache", quantization=kind)[0].runner.spec for kind in kinds]
  first, second, again = (made_for(spec, ()) for spec in specs)
  assert first["weight_form"] != second["weight_form"] and first == again
  other = dataclasses.replace(specs[0], weight_form=specs[1].weight_form)
  assert [name for name, value in made_for(other, ()).items() if value != first[name]] == ["weight_form"]


# From here on, two programs that take no time to compile.

MESH = make_mesh(jax.devices()[:1])
DEVICES = tuple(MESH.devices.flat)
WANTED = {"jax": "1", "device": "toaster"}


@pytest.fixture
def cache(tmp_path) -> Iterator[pathlib.Path]:
  """A compile cache that holds both programs and their file; conftest's own cache is restored afterwards."""
  folder, before = tmp_path / "cache", dict(jax.config.values)
  assert use_compile_cache(str(folder)) == ""
  assert use(folder) == ["sum", "product"] and use(folder) == []
  yield folder
  names = ("compilation_cache_dir", "persistent_cache_min_entry_size_bytes", "persistent_cache_min_compile_time_secs")
  for name in ("persistent_cache_enable_xla_caches", *names):
    jax.config.update(f"jax_{name}", before[f"jax_{name}"])
  stored_programs.compilation_cache.reset_cache()


def program(name: str, function, size: int = 8) -> Program:
  array = jax.ShapeDtypeStruct((size,), np.float32, sharding=replicated(MESH))
  return Program(name, function, (array, array), (array,), (), None)


def use(folder: pathlib.Path, wanted=WANTED, size: int = 8) -> list[str]:
  """Takes both programs, looks at what they do, and keeps their names; returns those that were traced."""
  traced = []

  def of(name: str, function) -> Program:
    def note(a, b):
      traced.append(name)
      return (function(a, b),)

    return program(name, note, size)

  jax.clear_caches()
  stored = StoredPrograms(str(folder), wanted, DEVICES)
  for name, function in (("sum", lambda a, b: a + b), ("product", lambda a, b: a * b)):
    found = stored.executable(of(name, function))
    a, b = (jax.device_put(np.arange(size, dtype=np.float32) + start, replicated(MESH)) for start in (1, 2))
    assert np.asarray(found(a, b)[0]).tolist() == function(np.arange(size) + 1, np.arange(size) + 2).tolist()
  stored.keep()
  return traced


def index_of(folder: pathlib.Path) -> pathlib.Path:
  (found,) = folder.glob(f"*{INDEX_SUFFIX}")
  return found


def edit(change):
  def apply(folder: pathlib.Path) -> None:
    value = json.loads(index_of(folder).read_text())
    change(value)
    index_of(folder).write_text(json.dumps(value))

  return apply


def entry(folder: pathlib.Path, name: str) -> pathlib.Path:
  return folder / f"{json.loads(index_of(folder).read_text())['programs'][name]}{SUFFIX}"


def cut(folder: pathlib.Path, num_kept: int) -> None:
  entry(folder, "sum").write_bytes(entry(folder, "sum").read_bytes()[:num_kept])


@pytest.mark.parametrize(
  ("change", "traced"),
  [
    (lambda folder: index_of(folder).unlink(), ["sum", "product"]),
    (lambda folder: index_of(folder).write_bytes(index_of(folder).read_bytes()[:-9]), ["sum", "product"]),
    (lambda folder: index_of(folder).write_text("[" * 100_000), ["sum", "product"]),
    (lambda folder: index_of(folder).write_text("[]"), ["sum", "product"]),
    (edit(lambda value: value.update(format=2)), ["sum", "product"]),
    (edit(lambda value: value.update(programs=["sum"])), ["sum", "product"]),
    (edit(lambda value: value["programs"].update(sum=3)), ["sum", "product"]),
    (edit(lambda value: value["programs"].update(sum="../cache/sum")), ["sum", "product"]),
    (edit(lambda value: value["programs"].pop("sum")), ["sum"]),
    (edit(lambda value: value["programs"].update(sum="none-such")), ["sum"]),
    (lambda folder: entry(folder, "sum").unlink(), ["sum"]),
    (lambda folder: cut(folder, 0), ["sum"]),
    (lambda folder: cut(folder, 200), ["sum"]),
  ],
)
def test_what_is_lost_or_broken_is_traced_and_named_again(cache, change, traced):
  change(cache)
  use_compile_cache(str(cache))  # as each start does, which removes cut entries
  assert use(cache) == traced and use(cache) == []


@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")
def test_an_entry_that_breaks_later_is_traced(cache):
  cut(cache, 200)
  assert use(cache) == ["sum"]


def test_another_engine_has_a_file_of_its_own(cache):
  assert use(cache, wanted=WANTED | {"jax": "2"}) == ["sum", "product"]
  assert len([*cache.glob(f"*{INDEX_SUFFIX}")]) == 2


def test_an_entry_of_other_arrays_is_not_run(cache):
  """Were a file to name it."""
  assert use(cache, size=4) == ["sum", "product"]


def test_a_disk_that_refuses_the_file_is_ignored(cache, monkeypatch):
  index_of(cache).unlink()

  def full(source, target):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(stored_programs.os, "replace", full)
  assert use(cache) == ["sum", "product"] and use(cache) == ["sum", "product"]


def test_a_file_that_others_can_write_to_is_refused(cache):
  index_of(cache).chmod(0o666)
  with pytest.raises(ConfigError, match=rf"compile_cache_dir={cache}: {index_of(cache)} has mode 0666"):
    use_compile_cache(str(cache))


def test_a_program_that_jax_has_in_this_process_is_not_named(cache):
  """It is not read from the cache, and the thread's last read was that of another program."""

  def add(a, b):
    return (a + b,)

  def multiply(a, b):
    return (a * b,)

  jax.clear_caches()
  program("product", multiply).compile()
  stored = StoredPrograms(str(cache), WANTED | {"jax": "3"}, DEVICES)
  for each in (program("sum", add), program("product", multiply)):
    stored.executable(each)
  stored.keep()
  found = [json.loads(file.read_text())["programs"] for file in cache.glob(f"*{INDEX_SUFFIX}")]
  assert sorted(map(list, found)) == [["product", "sum"], ["sum"]]
