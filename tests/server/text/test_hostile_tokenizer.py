"""tokenizer.json as somebody else's: refused in a line, or at worst one prompt is; never a panic, never for ever."""

import copy
import json
import os
import pathlib
import random
import subprocess
import sys

import pytest

from engine.errors import ConfigError, InvalidRequest
from server.text import tokenizer as tokenizer_module
from server.text.tokenizer import Tokenizer

ROOT = pathlib.Path(__file__).resolve().parents[3]
DEMO = ROOT / "models" / "demo"
VALUES = (None, True, -1, 2**63, 1e400, "", "x", [], {}, [[]], {"type": "Nonsense"}, {"type": "BPE"}, "a" * 10_000)


def places(value, path=()) -> list[tuple]:
  """Paths to everything but single vocabulary entries."""
  found = [path] if path else []
  inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
  for key, each in list(inner)[:6]:
    found += places(each, (*path, key))
  return found


@pytest.mark.catalogue("G8")
def test_mutated_tokenizers(tmp_path):
  """Each is read or refused; what is read encodes, or says that it cannot."""
  good, rng = json.loads((DEMO / "tokenizer.json").read_text()), random.Random(1)
  # A small one is read quickly: the whole vocabulary would not be changed otherwise.
  vocab = {token: number for token, number in good["model"]["vocab"].items() if number < 300}
  good["model"] |= {"vocab": vocab, "merges": []}
  good["added_tokens"] = good["added_tokens"][:3]
  everywhere, refused = places(good), 0
  file = tmp_path / "tokenizer.json"
  for number in range(400):
    changed = copy.deepcopy(good)
    *path, last = rng.choice(everywhere)
    inner = changed
    for key in path:
      inner = inner[key]
    if number % 5:
      inner[last] = copy.deepcopy(rng.choice(VALUES))
    else:
      del inner[last]
    text = json.dumps(changed)
    if number % 7 == 0:
      place = rng.randrange(len(text))
      text = text[:place] + rng.choice('{}[]",\x00\ud800') + text[place + 1 :]
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
      tokenizer = Tokenizer(tmp_path)
    except ConfigError as error:
      assert str(file) in str(error) and len(str(error)) < 1000
      refused += 1
      continue
    try:
      ids = tokenizer.encode("the cat 😀 \x00")
      tokenizer.decode(ids)
      assert tokenizer.num_token_ids > max(ids, default=0)
    except InvalidRequest:
      pass
  assert refused > 100


@pytest.mark.catalogue("G8")
def test_a_regular_expression_that_gives_up(tmp_path):
  """Onigurama stops after so many steps and panics; the prompt is refused, and the next is not harmed."""
  good = json.loads((DEMO / "tokenizer.json").read_text())
  split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
  good["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, good["pre_tokenizer"]]}
  (tmp_path / "tokenizer.json").write_text(json.dumps(good))
  tokenizer = Tokenizer(tmp_path)
  with pytest.raises(
    InvalidRequest, match="prompt is a text that the model's tokenizer gave up on; change it, or send"
  ):
    tokenizer.encode("a" * 40 + "!")
  assert tokenizer.encode("the cat") == Tokenizer(DEMO).encode("the cat")


@pytest.mark.catalogue("G8")
def test_a_file_that_is_too_large(tmp_path, monkeypatch):
  monkeypatch.setattr(tokenizer_module, "_MAX_FILE_BYTES", 1000)
  (tmp_path / "tokenizer.json").write_text(" " * 1001)
  with pytest.raises(
    ConfigError, match=r"tokenizer\.json has 1001 bytes, the limit is 1000; restore it from its source"
  ):
    Tokenizer(tmp_path)


@pytest.mark.catalogue("G8")
def test_one_that_takes_too_long_ends_the_program(tmp_path):
  """Though it lets no other thread run meanwhile."""
  script = f"""
import ctypes
from server import main
main._TOKENIZER_LIMIT_S = 0.5
main.load_tokenizer = lambda *_, **__: ctypes.PyDLL(None).sleep(1000)
main._main(main._parse(["server", "--port=0", "--fake_device", "--verbose", "--model={DEMO}"]))
"""
  done = subprocess.run(
    [sys.executable, "-c", script], cwd=ROOT, text=True, capture_output=True, timeout=180, check=False, env=os.environ
  )
  assert done.returncode == 1
  assert f"reading {DEMO / 'tokenizer.json'}\nTimeout (0:00:00.5" in done.stderr and "_load_tokenizer" in done.stderr
