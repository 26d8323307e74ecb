"""Tests the English of comments, docstrings, help texts and errors: no banned word, and no docstring sentence too long.

A banned word has a better term of the field. CONTRIBUTING.md has the rules of style.
"""

import ast
from collections.abc import Iterator
import io
from pathlib import Path
import re
import tokenize

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("engine", "models", "pallas_kernels", "server", "extensions", "tools")
MOST_WORDS = 35  # of a sentence in a docstring
BANNED = {
  r"draws?|drawn|drew|drawing": "sample, sampled",
  r"rooms?": "package, capacity or space",
  r"claim(s|ed|ing)?": "check",
  r"company": "batch, or neighbors",
  r"wish(es|ed|ing)?": "request, or preference",
  r"asks?|asked|asking": "request, configure, call or need",
  r"tells?|told|telling": "log, return or raise",
  r"newcomers?": "a new request, or a new user",
  r"ways? of batching": "batching mode",
  r"ends? of requests?": "finish",
  r"limits? of a (draw|sample)": "top-k and top-p thresholds",
  r"as before|used to": "nothing: comments tell no history",
  r"we|our|ours": "the actor",
  r"(?<!\d )us(?!/)": "the actor",
  r"neighbour\w*|behaviour\w*|honour\w*|colour\w*|\w+our(ed|ing)": "American spelling",
  r"\w*(penal|quant|initial|normal|serial|optim|random|recogn|util|organ)is(e|ed|es|ing|ation)": "American spelling",
}
BANNED_WORDS = re.compile(r"\b(" + "|".join(BANNED) + r")\b", re.IGNORECASE)
# (file, word): uses with another meaning, such as a label of a metric or text that trains the demo model.
ALLOWED: set[tuple[str, str]] = {
  *(("tools/demo_model/corpus.py", word) for word in ("asked", "tell", "told")),
  *(("tools/demo_model/tokenizer.py", word) for word in ("ask", "draw", "our", "room", "wish")),
  ("tools/demo_model/measure_draft.py", "tell"),
  ("tools/demo_model/train.py", "tell"),
}


def is_sentence_text(text: str) -> bool:
  """Returns whether a string literal holds prose, and not an identifier, a key or a format."""
  return len(text.split()) >= 3


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
  """Yields the line and the text of every docstring."""
  kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  for node in ast.walk(tree):
    if isinstance(node, kinds) and (text := ast.get_docstring(node)):
      yield node.body[0].lineno, text


def texts(source: str) -> Iterator[tuple[int, str]]:
  """Yields the line and the text of every comment and of every string literal with prose."""
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    if token.type == tokenize.COMMENT:
      yield token.start[0], token.string.lstrip("# ")
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and is_sentence_text(node.value):
      for offset, line in enumerate(node.value.splitlines()):
        yield node.lineno + offset, line


def banned_words(source: str) -> list[tuple[int, str]]:
  """Returns (line, word) for every banned word; code between backquotes does not count."""
  return [
    (line, match[0])
    for line, text in texts(source)
    for match in BANNED_WORDS.finditer(re.sub(r"`[^`]*`", "", text))
    if not match[0].isupper()  # US is a country, WE no word
  ]


def sentences(text: str) -> Iterator[str]:
  """Yields the sentences of a docstring. Blank lines, headings, list items and table rows end a sentence too."""
  paragraphs = re.split(r"\n\s*\n|\n(?=\s*([-*\d]\S* |\w[\w, ]*( \[[^]]*\])?: |.*\S {2,}\S))", text)
  for paragraph in paragraphs:
    if paragraph and not re.search(r"\S {2,}\S", paragraph):
      yield from re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split()))


def long_sentences(source: str) -> list[tuple[int, str]]:
  """Returns (line, sentence) for every docstring sentence of more than MOST_WORDS words."""
  found = ((line, each) for line, text in docstrings(ast.parse(source)) for each in sentences(text))
  return [(line, each) for line, each in found if len(each.split()) > MOST_WORDS]


def sources() -> list[str]:
  files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
  return sorted(str(file.relative_to(ROOT)) for file in files if "/proto/" not in str(file))


@pytest.mark.parametrize("path", sources())
def test_text_has_no_banned_word(path: str) -> None:
  found = [
    (line, word) for line, word in banned_words((ROOT / path).read_text()) if (path, word.lower()) not in ALLOWED
  ]
  assert not found, "\n".join(f"{path}:{line}: {word!r}" for line, word in found) + f"; terms to use: {BANNED}"


@pytest.mark.parametrize("path", sources())
def test_docstring_sentences_are_short(path: str) -> None:
  found = long_sentences((ROOT / path).read_text())
  assert not found, "\n".join(f"{path}:{line}: {len(each.split())} words: {each}" for line, each in found)


def test_comments_of_kernels_have_no_banned_word() -> None:
  for file in sorted(ROOT.glob("pallas_kernels/**/*.cc")) + sorted(ROOT.glob("pallas_kernels/**/*.h")):
    comments = re.findall(r"//(.*)", file.read_text())
    found = [match[0] for comment in comments for match in BANNED_WORDS.finditer(comment)]
    assert not found, f"{file.relative_to(ROOT)}: {found}"


@pytest.mark.parametrize(
  "source",
  [
    "x = 1  # as it was asked for",
    '"""Draws a token."""',
    "def f():\n  '''Returns it.\n\n  The newcomer waits.\n  '''\n",
    'raise ValueError(f"there is no room for {x} here")',
    'help = "Whether the server tells its version."',
    "x = 1  # the neighbours' rows",
  ],
)
def test_a_banned_word_is_found(source: str) -> None:
  assert len(banned_words(source)) == 1


@pytest.mark.parametrize(
  "source", ['kind = "draw"', "draw = 3", "x = 3  # takes 12 us, see `draw`", "x = 0  # 0.1 us/row"]
)
def test_names_and_units_are_no_words(source: str) -> None:
  assert not banned_words(source)


def test_a_long_sentence_is_found() -> None:
  words = " ".join(["word"] * MOST_WORDS)
  assert not long_sentences(f'"""{words}."""') and not long_sentences(f'"""{words}. {words}."""')
  assert len(long_sentences(f'"""{words}. {words} more."""')) == 1
