"""The set-up: which accelerator's packages it installs, that it keeps and changes its mind, and what the locks hold."""

import os
from pathlib import Path
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from engine.accelerator import ACCELERATORS
from tests.commands import ROOT
from tests.engine.test_accelerator import nvidia, tpu
from tools.find_accelerator import lock_file, main

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


# --- tools.find_accelerator -------------------------------------------------------------------------------------------


def test_the_name_and_a_line_for_people(tmp_path, capsys):
  assert main([f"--root={nvidia(tmp_path / 'gpu', '580.82.07')}"]) == 0
  said = capsys.readouterr()
  assert said.out == "cuda13\n" and said.err.count("\n") == 1
  assert "driver 580.82.07: installing for cuda13 from requirements-cuda13.lock; ACCELERATOR=cpu|cuda12|tpu" in said.err
  assert main([f"--root={tpu(tmp_path / 'tpu', 'dev/accel0')}"]) == 0
  assert capsys.readouterr().out == "tpu\n"
  assert main([f"--root={tmp_path}"]) == 0
  said = capsys.readouterr()
  assert said.out == "cpu\n" and "this machine has neither an NVIDIA GPU nor a TPU: installing for cpu from" in said.err


def test_the_users_choice_wins_over_what_the_machine_has(tmp_path, capsys):
  old = nvidia(tmp_path, "470.1")
  assert main([f"--root={old}"]) == 1
  said = capsys.readouterr()
  assert said.out == "" and said.err.startswith("sluice: NVIDIA driver 470.1 is too old") and said.err.count("\n") == 1
  assert main([f"--root={old}", "--accelerator=cpu"]) == 0
  said = capsys.readouterr()
  assert said.out == "cpu\n" and "ACCELERATOR=cpu: installing for cpu from requirements.lock" in said.err
  assert main(["--accelerator=cuda11"]) == 1
  assert "ACCELERATOR=cuda11 is none of cpu, cuda12, cuda13, tpu" in capsys.readouterr().err


def test_it_runs_before_anything_is_installed(tmp_path):
  """Isolated from site-packages, and compiled by the oldest Python that it may meet, where one is here."""
  words = ["-m", "tools.find_accelerator", f"--root={nvidia(tmp_path, '580.1')}"]
  pythons = [sys.executable, *filter(None, (shutil.which(f"python3.{minor}") for minor in (9, 10, 11)))]
  for python in pythons:
    if subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode:
      continue  # a shim of pyenv for a version that is not chosen
    done = subprocess.run([python, "-S", *words], cwd=ROOT, text=True, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "cuda13\n"), f"{python}: {done.stderr}"


# --- tools/setup_server_env.sh ----------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path) -> Path:
  """A copy of what the set-up reads, whose tools/setup_env.sh only writes down what it was asked to install."""
  folder = tmp_path / "checkout"
  for path in ("tools/__init__.py", "tools/find_accelerator.py", "tools/setup_server_env.sh", "Makefile"):
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / path, folder / path)
  for path in ("engine/__init__.py", "engine/accelerator.py", "engine/errors.py"):
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / path, folder / path)
  installer = folder / "tools" / "setup_env.sh"
  installer.write_text('#!/bin/sh\nmkdir -p "$1"; touch "$1/pyvenv.cfg"; echo "$2" >>installed\n')
  installer.chmod(0o755)
  for accelerator in ACCELERATORS:
    (folder / lock_file(accelerator)).write_text("")
  return folder


def make(checkout: Path, *words: str) -> list[str]:
  """What was installed by a call of make, by the names of the locks."""
  (checkout / "installed").unlink(missing_ok=True)
  command = ["make", "--no-print-directory", ".venv/.installed", *words]
  environment = {name: value for name, value in os.environ.items() if name not in ("ACCELERATOR", "MAKEFLAGS")}
  done = subprocess.run(command, cwd=checkout, env=environment, text=True, capture_output=True, timeout=60, check=False)
  assert done.returncode == 0, done.stderr
  return (checkout / "installed").read_text().split() if (checkout / "installed").exists() else []


def test_make_remembers_the_accelerator_and_changes_it_when_told(checkout):
  assert make(checkout, "ACCELERATOR=cuda12") == ["requirements-cuda12.lock"]
  assert (checkout / ".venv/.accelerator").read_text() == "cuda12\n"
  assert make(checkout) == [], "it is there"
  assert make(checkout, "ACCELERATOR=cuda12") == []
  os.utime(checkout / "requirements.lock")
  assert make(checkout) == [], "that lock is not its own"
  (checkout / ".venv" / "stale").touch()
  os.utime(checkout / "requirements-cuda12.lock", (2**31, 2**31))
  assert make(checkout) == ["requirements-cuda12.lock"], "a new lock is installed for what was chosen before"
  assert (checkout / ".venv/stale").exists()
  assert make(checkout, "ACCELERATOR=cpu") == ["requirements.lock"]
  assert not (checkout / ".venv/stale").exists(), "packages of another accelerator are gone"
  assert make(checkout) == []


def test_make_says_in_a_line_what_is_no_accelerator(checkout):
  done = subprocess.run(
    ["make", ".venv/.installed", "ACCELERATOR=gpu"],
    cwd=checkout,
    text=True,
    capture_output=True,
    timeout=60,
    check=False,
  )
  assert done.returncode and "ACCELERATOR=gpu is none of cpu, cuda12, cuda13, tpu" in done.stderr
  assert not (checkout / "installed").exists()


# --- Locks ------------------------------------------------------------------------------------------------------------


def pins(lock: str) -> dict[str, str]:
  """Version by name of every package of a lock; each has hashes."""
  found = {}
  for entry in (ROOT / lock).read_text().replace("\\\n", " ").splitlines():
    name, version = re.match(r"([a-z0-9.-]+)==(\S+)", entry).groups()
    assert "--hash=sha256:" in entry, entry
    assert found.setdefault(name, version) == version, f"{lock} has {name} twice"
  return found


def wanted(accelerator: str) -> list[str]:
  """What pyproject.toml asks for: requirements of the core, of `dev`, and of the accelerator's extra."""
  found = [*PROJECT["dependencies"], *EXTRAS["dev"], *EXTRAS.get(accelerator, [])]
  while own := [one for one in found if one.startswith("sluice-serve[")]:
    for one in own:
      found.remove(one)
      for extra in re.search(r"\[(.*)\]", one)[1].split(","):
        found += EXTRAS[extra.strip()]
  return found


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_a_lock_holds_what_pyproject_asks_for(accelerator):
  """Or somebody forgot to make it anew; BUILD.md has the commands."""
  held = pins(lock_file(accelerator))
  for requirement in wanted(accelerator):
    name, rest = re.match(r"([A-Za-z0-9._-]+)(.*)", requirement).groups()
    name = re.sub(r"[-_.]+", "-", name).lower()
    assert name in held, f"{lock_file(accelerator)} lacks {requirement}"
    if exact := re.search(r"==([\d.]+)$", rest):
      assert held[name] == exact[1], requirement
  plugin = {"cuda12": "jax-cuda12-plugin", "cuda13": "jax-cuda13-plugin", "tpu": "libtpu"}
  assert {name for name in plugin.values() if name in held} == {plugin[name] for name in plugin if name == accelerator}


def test_all_locks_have_the_same_versions():
  cpu = pins("requirements.lock")
  for accelerator in ACCELERATORS:
    held = pins(lock_file(accelerator))
    assert cpu.items() <= held.items(), {
      name: (cpu[name], held.get(name)) for name in cpu if held.get(name) != cpu[name]
    }


def test_extras_pin_the_same_jax():
  jax = next(one for one in PROJECT["dependencies"] if one.startswith("jax=="))
  assert {EXTRAS[name][0].replace(f"[{name}]", "") for name in ("cuda12", "cuda13", "tpu")} == {jax}
