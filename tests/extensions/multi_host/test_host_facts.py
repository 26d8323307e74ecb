"""Hosts that differ are named with what differs; a secret that others can read is refused."""

import os
import pathlib

import pytest

from engine.errors import ConfigError
from extensions.multi_host.cluster_place import ClusterPlace, find_place, read_secret
from extensions.multi_host.host_facts import collect_facts, compare_facts
from server.host_options import ClusterSettings


def make_folder(path: pathlib.Path, config: str = "{}", weights: bytes = b"w" * 200_000) -> pathlib.Path:
  path.mkdir()
  (path / "config.json").write_text(config)
  (path / "model.safetensors").write_bytes(weights)
  return path


def test_equal_hosts_agree(tmp_path: pathlib.Path):
  one, two = make_folder(tmp_path / "one"), make_folder(tmp_path / "two")
  mine = collect_facts(one, 2, {"dtype": "auto", "compile_cache_dir": "/a"})
  theirs = collect_facts(two, 2, {"dtype": "auto", "compile_cache_dir": "/b"})
  assert compare_facts(mine, {1: theirs}) == ""


@pytest.mark.parametrize(
  ("folder", "num_hosts", "settings", "named"),
  [
    ({"config": '{"a": 1}'}, 2, {}, "the model's config.json"),
    ({"weights": b"w" * 200_001}, 2, {}, "the model's model.safetensors of 200001 bytes"),
    ({"weights": b"v" + b"w" * 199_999}, 2, {}, "the model's model.safetensors"),
    ({"weights": b"w" * 100_000 + b"v" + b"w" * 99_999}, 2, {}, "the model's model.safetensors"),
    ({"weights": b"w" * 199_999 + b"v"}, 2, {}, "the model's model.safetensors"),
    ({}, 3, {}, "host 2 has --num_hosts 3, host 0 2"),
    ({}, 2, {"dtype": "bfloat16"}, "host 2 has --dtype bfloat16, host 0 auto"),
    ({}, 2, {"token_budgets": (8, 16)}, "host 2 has --token_budgets (8, 16), host 0 (8, 32)"),
  ],
)
def test_a_difference_is_named(tmp_path: pathlib.Path, folder: dict, num_hosts: int, settings: dict, named: str):
  base = {"dtype": "auto", "token_budgets": (8, 32)}
  mine = collect_facts(make_folder(tmp_path / "one"), 2, base)
  theirs = collect_facts(make_folder(tmp_path / "two", **folder), num_hosts, base | settings)
  line = compare_facts(mine, {1: mine, 2: theirs})
  assert named in line and "host 1" not in line and "\n" not in line


def test_a_secret_is_read_whole(tmp_path: pathlib.Path):
  file = tmp_path / "secret"
  file.write_text("s" * 32 + "\n")
  file.chmod(0o600)
  assert read_secret(str(file)) == b"s" * 32


@pytest.mark.parametrize(
  ("text", "mode", "problem"),
  [
    ("s" * 31 + "\n", 0o600, "has 32 bytes, and a secret has 32 to"),
    ("s" * 70_000, 0o600, "a secret has 32 to 65536"),
    ("s" * 40, 0o644, "has mode 0644"),
    ("s" * 40, 0o660, "has mode 0660"),
  ],
)
def test_a_bad_secret_is_refused(tmp_path: pathlib.Path, text: str, mode: int, problem: str):
  file = tmp_path / "secret"
  file.write_text(text)
  file.chmod(mode)
  with pytest.raises(ConfigError, match=problem):
    read_secret(str(file))


def test_a_missing_secret_is_named(tmp_path: pathlib.Path):
  with pytest.raises(ConfigError, match=r"No such file or directory; make one with"):
    read_secret(str(tmp_path / "none"))
  with pytest.raises(ConfigError, match="no regular file"):
    read_secret(os.fspath(tmp_path))


def test_a_place_is_taken_from_the_settings():
  settings = ClusterSettings(coordinator_address="[::1]:81", num_hosts=3, host_id=2, cluster_secret_file="x")
  assert find_place(settings) == ClusterPlace("::1", 81, 3, 2, False)


def test_jax_finds_a_place_in_slurm(monkeypatch: pytest.MonkeyPatch):
  for name, value in {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_NODELIST": "node[7-9]",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "3",
  }.items():
    monkeypatch.setenv(name, value)
  place = find_place(ClusterSettings(num_hosts=0, cluster_secret_file="x"))
  assert (place.host, place.num_hosts, place.host_id, place.is_found) == ("node7", 3, 1, True)


def test_a_place_that_is_not_found_names_the_flags():
  with pytest.raises(ConfigError, match="set --coordinator_address and --host_id"):
    find_place(ClusterSettings(num_hosts=2, cluster_secret_file="x"))
