"""Compares compilers of JSON schemas: how many schemas each compiles, and how many outputs under its mask are invalid.

  python tools/study/compare_schema_compilers.py --compiler=sluice
  python tools/study/compare_schema_compilers.py --compiler=llguidance --suite=jsonschema-4.26.0/json/tests/draft2020-12
  python3.11 tools/study/compare_schema_compilers.py --compiler=xgrammar

Without --suite it reads `schema_families.json`: schemas written for Sluice in the kinds of JSONSchemaBench. For each
schema it walks at random: each token is one that the mask allows. The jsonschema package judges the outputs that end.
Every token is a byte, and a printable one where the mask allows any. Each compiler has its defaults: xgrammar and
Sluice close objects that list properties, llguidance leaves them open. xgrammar needs an environment with `torch` and
`xgrammar`, and imports nothing of Sluice. Calls no model.
"""

import argparse
import collections
from collections.abc import Callable, Iterator
import json
import pathlib
import random
import sys
from typing import Any, Protocol

import jsonschema
from jsonschema.validators import validator_for

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FAMILIES = ROOT / "tools" / "study" / "schema_families.json"
MOST_BYTES = 1500
_END = 256
# Bytes that a walk prefers, or few outputs would end.
_CLOSING = frozenset(b'"}]')


class Walker(Protocol):
  """The state of one output."""

  def allowed(self) -> list[int]:
    """Returns the allowed bytes; 256 is the end of the output. None are left at the end."""
    ...

  def accept(self, token: int) -> None:
    """Takes a byte."""
    ...


class Refused(Exception):
  """The compiler refuses a schema."""


class _LlguidanceWalker:
  def __init__(self, tokenizer: Any, source: str):
    import llguidance

    self._matcher = llguidance.LLMatcher(tokenizer, source, log_level=0)
    if self._matcher.is_error():
      raise Refused(self._matcher.get_error())

  def allowed(self) -> list[int]:
    if self._matcher.is_stopped():
      return [_END] if self._matcher.is_accepting() else []
    mask = self._matcher.compute_bitmask()
    found = [at for at in range(256) if mask[at // 8] >> at % 8 & 1]
    return found + [_END] * self._matcher.is_accepting()

  def accept(self, token: int) -> None:
    self._matcher.consume_token(token)


class _XgrammarWalker:
  def __init__(self, compiled: Any):
    import xgrammar  # pyright: ignore[reportMissingImports]

    self._matcher = xgrammar.GrammarMatcher(compiled)
    self._mask = xgrammar.allocate_token_bitmask(1, _END + 1)

  def allowed(self) -> list[int]:
    if self._matcher.is_terminated():
      return []
    self._matcher.fill_next_token_bitmask(self._mask)
    words = self._mask[0].tolist()
    return [at for at in range(_END + 1) if words[at // 32] >> at % 32 & 1]

  def accept(self, token: int) -> None:
    self._matcher.accept_token(token)


def use_llguidance() -> Callable[[Any], tuple[Walker, list[str]]]:
  """Returns what compiles a schema with llguidance alone; the names are those of keywords that it leaves out."""
  import llguidance

  tokenizer = llguidance.LLTokenizer("byte")

  def start(schema: Any) -> tuple[Walker, list[str]]:
    return _LlguidanceWalker(tokenizer, llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))), []

  return start


def use_sluice() -> Callable[[Any], tuple[Walker, list[str]]]:
  """Returns what compiles a schema as Sluice does by default."""
  sys.path.insert(0, str(ROOT))
  import llguidance

  from engine.errors import InvalidRequest
  from server.proto import sluice_pb2 as pb
  from server.text.constraint_compiler import ConstraintCompiler, prepare_schema_text
  from server.text.tokenizer import load_tokenizer

  model = load_tokenizer(ROOT / "models" / "demo", max_prompt_bytes=1 << 20)
  assert model is not None, "models/demo has a tokenizer"
  compiler, tokenizer = ConstraintCompiler(model, model.vocab_size, ()), llguidance.LLTokenizer("byte")

  def start(schema: Any) -> tuple[Walker, list[str]]:
    try:
      text, unenforced = prepare_schema_text(json.dumps(schema), closes=True)
      source = compiler.compile(pb.OutputConstraint(json_schema=text)).source
    except InvalidRequest as error:
      raise Refused(error.problem) from None
    return _LlguidanceWalker(tokenizer, source), [keyword.keyword for keyword in unenforced]

  return start


def use_xgrammar() -> Callable[[Any], tuple[Walker, list[str]]]:
  """Returns what compiles a schema with xgrammar."""
  import xgrammar  # pyright: ignore[reportMissingImports]

  vocabulary = [bytes([byte]) for byte in range(256)] + [b"</s>"]
  info = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[_END])
  compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

  def start(schema: Any) -> tuple[Walker, list[str]]:
    try:
      return _XgrammarWalker(compiler.compile_json_schema(json.dumps(schema))), []
    except Exception as error:  # every error of its parser, which concerns the schema alone
      raise Refused(str(error)) from None

  return start


COMPILERS = {"sluice": use_sluice, "llguidance": use_llguidance, "xgrammar": use_xgrammar}


def walk_output(walker: Walker, chance: random.Random) -> str | None:
  """Returns a random output, None if it does not end within MOST_BYTES."""
  output = bytearray()
  while len(output) < MOST_BYTES:
    allowed = walker.allowed()
    if not allowed:
      return output.decode("utf-8", "replace") if output else None
    if _END in allowed and (len(allowed) == 1 or chance.random() < 0.5):
      return output.decode("utf-8", "replace")
    plain = [byte for byte in allowed if 32 < byte < 127] or allowed
    closing = [byte for byte in plain if byte in _CLOSING]
    token = chance.choice(closing if closing and chance.random() < 0.4 else plain)
    walker.accept(token)
    output.append(token)
  return None


def is_valid(schema: Any, output: str) -> bool:
  """Returns whether an output is JSON, and valid under the schema. Raises what the validator does."""
  try:
    value = json.loads(output)
  except ValueError:
    return False
  return validator_for(schema, jsonschema.Draft202012Validator)(schema).is_valid(value)


def measure_schemas(
  start: Callable[[Any], tuple[Walker, list[str]]], schemas: list[Any], walks: int, show: Callable[[str], None]
) -> collections.Counter[str]:
  """Returns the number of schemas and outputs by what came of them."""
  counts = collections.Counter[str]()
  for at, schema in enumerate(schemas):
    counts["schemas"] += 1
    try:
      _, ignored = start(schema)
    except (Refused, ValueError) as error:
      counts["refused"] += 1
      show(f"refused {json.dumps(schema)[:100]}: {' '.join(str(error).split())[:150]}")
      continue
    counts["named" if ignored else "compiled"] += 1
    chance, invalid = random.Random(at), []
    for _ in range(walks):
      walker, _ = start(schema)
      output = walk_output(walker, chance)
      if output is None:
        counts["endless"] += 1
        continue
      try:
        valid = is_valid(schema, output)
      except Exception:  # such as a reference to a schema elsewhere
        counts["not judged"] += 1
        continue
      counts["outputs of named" if ignored else "outputs"] += 1
      invalid += [] if valid else [output]
    counts["invalid of named" if ignored else "invalid"] += len(invalid)
    counts["schemas with invalid outputs"] += bool(invalid) and not ignored
    if ignored or invalid:
      show(
        f"{'names ' + ', '.join(ignored) if ignored else 'INVALID'}: {json.dumps(schema)[:150]}: {invalid[:1]}"[:400]
      )
  return counts


def read_families() -> dict[str, list[Any]]:
  """Returns the schemas of each family."""
  return json.loads(FAMILIES.read_text("utf-8"))


def _read_suite(folder: pathlib.Path) -> Iterator[Any]:
  for file in sorted(folder.glob("*.json")):
    yield from (case["schema"] for case in json.loads(file.read_text("utf-8")))


def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--compiler", choices=list(COMPILERS), required=True, help="what compiles the schemas")
  parser.add_argument(
    "--suite", type=pathlib.Path, help="folder of JSON-Schema-Test-Suite's tests, such as draft2020-12"
  )
  parser.add_argument("--walks", type=int, default=10, help="random outputs a schema (default 10)")
  parser.add_argument("--lines", action="store_true", help="also print a line for each schema with something to say")
  arguments = parser.parse_args()
  families = read_families() if arguments.suite is None else {arguments.suite.name: list(_read_suite(arguments.suite))}
  start, total = COMPILERS[arguments.compiler](), collections.Counter[str]()
  for name, schemas in families.items():
    counts = measure_schemas(start, schemas, arguments.walks, print if arguments.lines else lambda line: None)
    print(f"{name}: {dict(sorted(counts.items()))}", flush=True)
    total += counts
  total["invalid"] += 0
  print(f"{arguments.compiler}: {json.dumps(dict(sorted(total.items())))}")


if __name__ == "__main__":
  main()
