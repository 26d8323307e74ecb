"""The documents that are checked, and the code blocks in them. Checks nothing itself.

A block may have a marker on the line above it. `<!-- needs: gpu -->` says what keeps a test from running it.
`<!-- test: server -->` has a test run it, and `<!-- test: server prints: 42 -->` also says what must come out. A block
without a marker is parsed, and its flags and paths are looked up.
"""

import dataclasses
from pathlib import Path
import re

ROOT = Path(__file__).resolve().parent.parent
_FOLDERS = ("benchmarks", "deploy", "docs", "models", "pallas_kernels")
_TOP = ("README.md", "BUILD.md", "CONTRIBUTING.md", "SECURITY.md")
LOG = ROOT / "docs" / "decisions"
# Neither the changelog nor the log of decisions: both tell of what was.
DOCUMENTS = [
  *(ROOT / name for name in _TOP),
  *(file for name in _FOLDERS for file in sorted((ROOT / name).rglob("*.md")) if LOG not in file.parents),
]
# Those that README.md leads a user to.
GUIDES = [file for file in DOCUMENTS if file.parent == ROOT or (ROOT / "docs") in file.parents]
HOW_TO = sorted((ROOT / "docs" / "how-to").glob("*.md"))
NEEDS = {"network", "model", "gpu", "tpu", "cloud", "time", "terminal", "certificate", "ray", "cluster"}
# What tests/test_document_commands.py runs, and what other tests do.
RUN_HERE = {"server", "admin", "python", "offline"}
TESTS = RUN_HERE | {"policy", "ladder"}
_MARKER = r"(?:^<!-- (needs|test): ([a-z, ]+?)(?: prints: ([^\n]+))? -->\n)?"
_BLOCK = re.compile(rf"{_MARKER}^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
  """A fenced block.

  Attributes:
    document, line: where it begins.
    language: as the fence says; "" where it says none.
    needs, test: of its marker; "" where it has none.
    prints: what must be in its output, where the marker says it.
    text: without the fence.
  """

  document: Path
  line: int
  language: str
  needs: str
  test: str
  prints: str
  text: str

  def __str__(self) -> str:
    return f"{self.document.relative_to(ROOT)}:{self.line}"


def code_blocks(document: Path) -> list[Block]:
  """The blocks of a document, in their order."""
  text = document.read_text("utf-8")
  found = []
  for match in _BLOCK.finditer(text):
    kind, names, prints, language, code = match.groups()
    line = text.count("\n", 0, match.start()) + 1
    needs, test = (names if kind == each else "" for each in ("needs", "test"))
    found.append(Block(document, line, language, needs, test, prints or "", code))
  return found
