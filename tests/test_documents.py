"""What the documents name is there: modules, files, targets of make, and every flag of a command, in its own parser."""

import argparse
from collections.abc import Iterator
import functools
import importlib
import inspect
from pathlib import Path
import re

import pytest

from engine.settings import declared_settings
from server.flags import declared_flags, help_text
from tools.chaos.server.__main__ import ChaosSettings
from tools.repository.generate_flag_reference import PAGE, flag_reference

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "deploy", "docs", "models", "pallas_kernels")
# Not the changelog: it tells of what was.
DOCUMENTS = [ROOT / "README.md", ROOT / "BUILD.md", *(file for name in FOLDERS for file in (ROOT / name).rglob("*.md"))]
# Flags of other programs: uv, XLA, docker, and what make itself would take.
FOREIGN = {"universal", "python-version", "generate-hashes", "extra", "group", "no-annotate", "no-header", "time"}
FOREIGN |= {"xla_force_host_platform_device_count", "help", "helpfull", "flagfile"}
FLAG = r"(?<![\w-])--([a-zA-Z][\w-]*)"
PATH = r"(?<![\w/.=-])((?:engine|models|pallas_kernels|server|tools|tests|benchmarks|deploy)/[\w./-]*\w)"
MODULE = r"python3? -m ((?:tools|server|pallas_kernels)[\w.]*)"


def spans(document: Path) -> list[str]:
  """What is written as code: whole commands of blocks, and what stands between backticks; without comments."""
  text = document.read_text()
  found = []
  for block in re.findall(r"^```.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
    found += [re.sub(r"(^|\s)#.*", "", line) for line in block.replace("\\\n", " ").splitlines()]
  rest = re.sub(r"^```.*?\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
  return found + [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", rest)]


class Parser(Exception):
  """The parser of a command, thrown where it would parse."""


def source(module: str) -> Path:
  """A module's file; of a package what `python -m` runs."""
  path = ROOT / module.replace(".", "/")
  return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def defined(file: Path) -> set[str]:
  """The flags that a file defines, by absl or argparse, as they are written there."""
  text = file.read_text()
  absl = re.findall(r"DEFINE_(\w+)\(\s*\"(\w+)\"", text)
  names = {name for _, name in absl} | {f"no{name}" for kind, name in absl if kind == "bool"}
  return names | set(re.findall(r"add_argument\(\s*\"--([\w-]+)\"", text))


def server_flags() -> set[str]:
  """The flags of the server, with the negated ones."""
  found = list(declared_flags())
  return {flag.name for flag in found} | {f"no{flag.name}" for flag in found if flag.type is bool}


def chaos_flags() -> set[str]:
  """Those that tools.chaos.server adds."""
  return {flag.name for flag in declared_settings(ChaosSettings)}


@functools.cache
def accepted(module: str) -> frozenset[str]:
  """The flags of a command; of argparse's those of its parser, of absl's those that its file defines."""
  file = source(module)
  text = file.read_text()
  if module == "tools.chaos.server":
    return frozenset(server_flags() | chaos_flags() | {"flagfile", "helpfull"})
  if "absl" in text or module == "server.main":
    return frozenset(defined(file) | (server_flags() if "server" in text else set()) | {"flagfile", "helpfull"})
  if "CommandParser(" not in text and "ArgumentParser(" not in text:
    return frozenset()

  def refuse(self: argparse.ArgumentParser, *_: object) -> None:
    raise Parser(self)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(argparse.ArgumentParser, "parse_known_args", refuse)  # which parse_args calls too
    run = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts)).main
    with pytest.raises(Parser) as caught:
      run(*[[] for _ in inspect.signature(run).parameters])
  return frozenset(name.removeprefix("--") for name in caught.value.args[0]._option_string_actions)


@functools.cache
def of_make() -> dict[str, str]:
  """The module that a target of the Makefile runs with ARGS, or ""."""
  found: dict[str, str] = {}
  target = ""
  for line in (ROOT / "Makefile").read_text().splitlines():
    if rule := re.match(r"([a-z][a-z-]*):(?!=)", line):
      target = rule[1]
      found[target] = ""
    elif target and (run := re.search(r"-m (tools[\w.]*|server[\w.]*) .*\$\(ARGS\)", line)):
      found[target] = run[1]
  return found


def commands(document: Path) -> Iterator[tuple[str, str]]:
  """Each command's module, and the rest of what is written there."""
  for span in spans(document):
    if run := re.search(MODULE, span):
      yield run[1], span
    elif run := re.match(r"make ([a-z-]+)", span):
      assert run[1] in of_make(), f"{document.name}: make has no target {run[1]}"
      if "ARGS" in span:
        assert of_make()[run[1]], f"{document.name}: `{span}`: that target takes no ARGS"
        yield of_make()[run[1]], span


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_commands_and_their_flags_are_there(document: Path) -> None:
  for module, span in commands(document):
    assert source(module).exists(), f"`{span}`: there is no {module}"
    unknown = set(re.findall(FLAG, span)) - accepted(module) - {"help"}
    assert not unknown, f"`{span}`: {module} has no {', '.join(sorted(unknown))}"


@functools.cache
def all_flags() -> frozenset[str]:
  files = (file for folder in ("server", "tools") for file in (ROOT / folder).rglob("*.py"))
  return frozenset(flag for file in files for flag in defined(file)) | server_flags() | chaos_flags()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_flags_and_files_that_are_named_are_there(document: Path) -> None:
  for span in spans(document):
    unknown = set(re.findall(FLAG, span)) - all_flags() - FOREIGN
    assert not unknown, f"`{span}`: nothing has {', '.join(sorted(unknown))}"
    for path in re.findall(PATH, span):
      assert (ROOT / path).exists(), f"`{span}`: there is no {path}"
    if re.fullmatch(r"tools(\.[a-z_]\w*)+", span):
      assert source(span).exists() or source(span.rpartition(".")[0]).exists(), f"there is no {span}"


def test_the_reader_sees_commands() -> None:
  """Or the tests above could not fail."""
  found = [module for document in DOCUMENTS for module, _ in commands(document)]
  assert len(found) > 40 and {"server.main", "tools.peers", "tools.bench.engine", "tools.client"} <= set(found)
  assert {"shape", "parts"} <= accepted("tools.bench.engine") and "port" in accepted("server.main")
  assert "no_such" not in all_flags()


def test_the_flag_reference_is_the_declarations():
  assert PAGE.read_text() == flag_reference(), "run python -m tools.repository.generate_flag_reference"


def test_help_is_short_and_every_flag_has_one_place():
  names = [flag.name for flag in declared_flags()]
  assert len(names) == len(set(names))
  assert sum(flag.setting.common for flag in declared_flags()) <= 45
  short, full = help_text("server.main", every_flag=False), help_text("server.main", every_flag=True)
  for flag in declared_flags():
    shown = f"  --{'[no]' if flag.type is bool else ''}{flag.name}"
    assert any(line.split(" " * 3)[0].rstrip() == shown or line == shown for line in full.splitlines()), flag.name
    assert (f"{shown} " in f"{short} ".replace("\n", " \n")) == flag.setting.common, flag.name
