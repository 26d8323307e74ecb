"""What the documents name is there, what the code makes of them is up to date, and people can read them.

Modules, files, links, targets of make, and every flag of a command in its own parser; generated pages and pictures; the
length of pages and sentences, and the words of docs/writing.md.
"""

import argparse
from collections.abc import Iterator
import functools
import importlib
import inspect
import json
from pathlib import Path
import re
import subprocess
import tomllib

import pytest

from engine.settings import declared_settings
from models.registry import FAMILIES
from server.flags import declared_flags, help_text
from server.router.router_settings import router_flags
import sluice
from tests.documents import DOCUMENTS, GUIDES, HOW_TO, LOG, NEEDS, ROOT, TESTS, Block, code_blocks
from tests.readability import flesch_reading_ease, prose_sentences, words_of
from tools.chaos.server.__main__ import ChaosSettings
from tools.repository import generate_documents

# Flags of other programs: uv, XLA, docker, lm-eval, and what make itself would take.
FOREIGN = {"universal", "python-version", "generate-hashes", "extra", "group", "no-annotate", "no-header", "time"}
FOREIGN |= {
  "xla_force_host_platform_device_count",
  "xla_gpu_command_buffer_update_mode",
  "help",
  "helpfull",
  "flagfile",
  "model_args",
  "tasks",
}
FOREIGN |= {"http2-prior-knowledge", "schema", "call", "rps", "connections", "proto", "metadata", "concurrency"}
FOREIGN |= {"duration", "total-queued-requests-metric", "total-running-requests-metric"}
FOREIGN |= {"kv-cache-usage-percentage-metric", "lora-info-metric", "cache-info-metric"}
FOREIGN_COMMANDS = ("buf ", "claude ", "docker ", "gcloud ", "ghz ", "hf ", "nvidia-smi ", "protoc ")
FLAG = r"(?<![\w-])--([a-zA-Z][\w-]*)"
PATH = r"(?<![\w/.=-])((?:engine|models|pallas_kernels|server|tools|tests|benchmarks|deploy)/[\w./-]*\w)"
MODULE = r"python3? -m ((?:tools|server|pallas_kernels)[\w.]*)"
SLUICE = r"(?<![\w./-])sluice (serve|chat|demo|bench [\w-]+)"


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
  if module == "server.router":
    return frozenset(flag.name for flag in router_flags())
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


def sluice_module(command: str) -> str:
  """The module that a command of `sluice` runs."""
  name, _, bench = command.partition(" ")
  return (
    sluice._BENCHES[bench][0] if bench else {"serve": "server.main", "chat": "tools.client", "demo": "tools.demo"}[name]
  )


def commands(document: Path) -> Iterator[tuple[str, str]]:
  """Each command's module, and the rest of what is written there."""
  for span in spans(document):
    if run := re.search(MODULE, span):
      yield run[1], span
    elif run := re.search(SLUICE, span):
      yield sluice_module(run[1]), span
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
  found = frozenset(flag for file in files for flag in defined(file))
  return found | server_flags() | chaos_flags() | accepted("server.router")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_flags_and_files_that_are_named_are_there(document: Path) -> None:
  for span in spans(document):
    unknown = set(re.findall(FLAG, span)) - all_flags() - FOREIGN
    unknown = set() if span.startswith(FOREIGN_COMMANDS) else unknown
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


@pytest.mark.parametrize("file", generate_documents.DOCUMENTS, ids=lambda file: file.name)
def test_what_the_code_makes_is_up_to_date(file: Path) -> None:
  assert file.read_text("utf-8") == generate_documents.DOCUMENTS[file](), f"{file.name}: run make docs"


def test_help_is_short_and_every_flag_has_one_place():
  names = [flag.name for flag in declared_flags()]
  assert len(names) == len(set(names))
  assert sum(flag.setting.common for flag in declared_flags()) <= 45
  short, full = help_text("server.main", every_flag=False), help_text("server.main", every_flag=True)
  for flag in declared_flags():
    shown = f"  --{'[no]' if flag.type is bool else ''}{flag.name}"
    assert any(line.split(" " * 3)[0].rstrip() == shown or line == shown for line in full.splitlines()), flag.name
    assert (f"{shown} " in f"{short} ".replace("\n", " \n")) == flag.setting.common, flag.name


def test_every_family_is_on_the_page_of_models() -> None:
  page = (ROOT / "docs" / "reference" / "models.md").read_text("utf-8")
  named = set(re.findall(r"`(\w+(?:ForCausalLM|Model|ForSequenceClassification))`", page))
  families = FAMILIES.values()
  assert named == {name for each in families for name in (each.architecture, each.backbone, each.classifier) if name}


# --- Links and blocks -------------------------------------------------------------------------------------------------

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
# Programs that a block may run without a marker; others are on machines that the page is about.
PROGRAMS = {"make", "python", ".venv/bin/python", "sluice", "curl"}


def without_code(document: Path) -> str:
  text = re.sub(r"^```.*?^```", "", document.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
  return re.sub(r"`[^`]+`", "code", text)


@functools.cache
def anchors(document: Path) -> frozenset[str]:
  """What a link into the page may name, as GitHub makes them of headings."""
  headings = re.findall(r"^#+ (.+)$", document.read_text("utf-8"), re.MULTILINE)
  plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings)
  return frozenset(re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain)


@pytest.mark.parametrize(
  "document", [*DOCUMENTS, *sorted(LOG.glob("*.md"))], ids=lambda file: str(file.relative_to(ROOT))
)
def test_links_lead_somewhere(document: Path) -> None:
  for groups in LINK.findall(without_code(document)):
    target = "".join(groups)
    if re.match(r"https?:|mailto:", target):
      continue
    path, _, anchor = target.partition("#")
    file = (document.parent / path).resolve() if path else document
    assert file.exists(), f"{target}: there is no such file"
    if anchor:
      assert anchor in anchors(file), f"{target}: {file.name} has no such heading"


def block_commands(block: Block) -> list[str]:
  """The first word of each command."""
  text = re.sub(r"'[^']*'", "''", block.text.replace("\\\n", " "))
  lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines())
  return [line.split()[0] for line in lines if line]


BLOCKS = [block for document in GUIDES for block in code_blocks(document)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_can_be_pasted(block: Block) -> None:
  """It parses; and whatever no test runs or looks up says what it needs."""
  assert set(filter(None, re.split(r", *", block.needs))) <= NEEDS, f"{block}: needs {block.needs}"
  assert set(filter(None, [block.test])) <= TESTS, f"{block}: test {block.test}"
  if block.language in ("bash", "sh", "shell"):
    parsed = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
    assert parsed.returncode == 0, f"{block}: {parsed.stderr}"
    if not block.needs and not block.test:
      unknown = set(block_commands(block)) - PROGRAMS
      assert not unknown, f"{block}: say what {', '.join(sorted(unknown))} needs: <!-- needs: ... -->"
  elif block.language == "python":
    compile(block.text, str(block), "exec")
  elif block.language == "json":
    for line in block.text.splitlines():
      json.loads(line)


# --- Reading ----------------------------------------------------------------------------------------------------------

# What docs/writing.md has other words for. That page names them, and the log is kept as it was written.
AVOIDED = re.compile(
  r"\b(rooms?|wish(es)?|newcomers?|company|claims?|draws?|drawn|drawing|ways? of batching)\b", re.IGNORECASE
)
NAMES_THEM = {ROOT / "docs" / "writing.md"}


def changes_of_this_version() -> str:
  """The changelog's section of the version at hand; empty before there is one."""
  version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
  sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)
  return next((section for section in sections if re.match(rf"\[?{re.escape(version)}\b", section)), "")


@pytest.mark.parametrize(
  ("name", "least", "most"),
  [("README.md", 1, 120), ("BUILD.md", 1, 120), ("docs/architecture.md", 1, 250)]
  + [(str(file.relative_to(ROOT)), 40, 120) for file in HOW_TO],
)
def test_pages_are_short(name: str, least: int, most: int) -> None:
  assert least <= len((ROOT / name).read_text("utf-8").splitlines()) <= most


@pytest.mark.parametrize("document", GUIDES, ids=lambda file: str(file.relative_to(ROOT)))
def test_sentences_are_short(document: Path) -> None:
  for sentence in prose_sentences(document.read_text("utf-8")):
    assert len(words_of(sentence)) <= 35, sentence


@pytest.mark.parametrize("document", GUIDES, ids=lambda file: str(file.relative_to(ROOT)))
def test_pages_are_easy_to_read(document: Path) -> None:
  assert flesch_reading_ease(document.read_text("utf-8")) >= 45


@pytest.mark.parametrize("document", [file for file in GUIDES if file not in NAMES_THEM], ids=lambda file: file.name)
def test_the_terms_are_the_fields(document: Path) -> None:
  found = [line for line in document.read_text("utf-8").splitlines() if AVOIDED.search(line)]
  assert not found, f"docs/writing.md has other words: {found}"


def test_the_changelog_uses_the_fields_terms() -> None:
  assert not [line for line in changes_of_this_version().splitlines() if AVOIDED.search(line)]


def test_reading_ease_is_fleschs() -> None:
  """Values that are known: one syllable a word, ten words; and a sentence that is hard."""
  easy = "The cat sat on the mat and the dog ran. " * 3
  assert flesch_reading_ease(easy) == pytest.approx(206.835 - 1.015 * 10 - 84.6, abs=0.1)
  hard = "Heterogeneous parallelization necessitates sophisticated synchronization infrastructure considerations."
  assert flesch_reading_ease(hard) < 0
  assert prose_sentences("One. Two `a.b`.\n\n- three\n- four\n\n| five | six |\n") == [
    "One.",
    "Two Code.",
    "three",
    "four",
  ]
