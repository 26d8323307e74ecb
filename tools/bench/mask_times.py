"""Measures how long the mask of one token takes under JSON schemas as people write them. Runs no model.

  python -m tools.bench.mask_times --model=models/demo
  python -m tools.bench.mask_times --model=FOLDER --schemas=200 --json

Sluice generates the schemas from --seed: nested objects with texts, numbers, choices, lists, maps, formats, patterns
and unions. For each, the tool follows a random output token by token. The time of a token is that of
`OutputGrammar.accept`, which takes it and computes the next mask. --model gives the tokenizer, whose size matters most.
"""

import json
import pathlib
import random
import statistics
import sys
import time
from typing import Any

from engine.constraint import ConstraintFailed
from engine.errors import ConfigError
from server.proto import sluice_pb2 as pb
from server.text.constraint_compiler import ConstraintCompiler, OutputGrammar
from server.text.tokenizer import load_tokenizer
from tools.arguments import CommandParser, positive_int
from tools.measure import ROOT, machine

_MOST_TOKENS = 100
_WORDS = "id name title price count status tags owner email created address city items total unit notes kind".split()


def make_schema(chance: random.Random, level: int = 0) -> dict[str, Any]:
  """Returns a random schema of an object."""
  names = chance.sample(_WORDS, chance.randint(2, 8))
  properties = {name: _make_value(chance, level + 1) for name in names}
  return {"type": "object", "properties": properties, "required": chance.sample(names, chance.randint(1, len(names)))}


def _make_value(chance: random.Random, level: int) -> dict[str, Any]:
  kinds = ["text", "text", "number", "truth", "choice", "format", "pattern", "optional", "bounded"]
  kinds += ["object", "list", "map", "union"] if level < 4 else []
  match chance.choice(kinds):
    case "text":
      return {"type": "string", "description": "A text."}
    case "number":
      return {"type": chance.choice(["integer", "number"])}
    case "truth":
      return {"type": "boolean"}
    case "choice":
      return {"enum": [f"{word} {number}" for number, word in enumerate(chance.sample(_WORDS, 6))]}
    case "format":
      return {"type": "string", "format": chance.choice(["date", "date-time", "email", "uuid", "uri", "password"])}
    case "pattern":
      return {"type": "string", "pattern": chance.choice(["^[A-Z]{2}-\\d{4}$", "^\\+?[0-9 ]{6,15}$", "^[a-z_]+$"])}
    case "optional":
      return {"anyOf": [{"type": "string", "maxLength": 80}, {"type": "null"}], "default": None}
    case "bounded":
      return {"type": "integer", "minimum": 0, "maximum": chance.choice([10, 150, 65535])}
    case "list":
      return {"type": "array", "items": _make_value(chance, level + 1), "maxItems": 8}
    case "map":
      return {"type": "object", "additionalProperties": _make_value(chance, level + 1)}
    case "union":
      return {"anyOf": [_make_value(chance, level + 1), make_schema(chance, level + 1)]}
    case _:
      return make_schema(chance, level)


def time_output(grammar: OutputGrammar, chance: random.Random) -> list[float]:
  """Follows one random output; returns the seconds of each token."""
  times = []
  while not grammar.is_done and len(times) < _MOST_TOKENS:
    token = _choose_token(grammar.allowed(), chance)
    start = time.perf_counter()
    try:
      grammar.accept(token)
    except ConstraintFailed:
      break
    times.append(time.perf_counter() - start)
  return times


def _choose_token(mask: bytes, chance: random.Random) -> int:
  """Returns a random token that a mask allows."""
  for _ in range(32):
    token = chance.randrange(8 * len(mask))
    if mask[token // 8] >> token % 8 & 1:
      return token
  place = chance.choice([place for place, bits in enumerate(mask) if bits])
  return chance.choice([8 * place + bit for bit in range(8) if mask[place] >> bit & 1])


def measure_masks(folder: pathlib.Path, count: int, seed: int) -> dict[str, Any]:
  """Returns the percentiles of a token's and a compilation's time."""
  tokenizer = load_tokenizer(folder, max_prompt_bytes=1 << 20)
  if tokenizer is None:
    raise ConfigError(f"--model={folder} has no tokenizer; name a model's folder")
  compiler = ConstraintCompiler(tokenizer, tokenizer.num_token_ids, ())
  compiler.compile(pb.OutputConstraint(json_object=True))  # makes the vocabulary
  chance, compiled, times = random.Random(seed), [], []
  for _ in range(count):
    text = json.dumps(make_schema(chance))
    start = time.perf_counter()
    grammar = compiler.compile(pb.OutputConstraint(json_schema=text))
    compiled.append(time.perf_counter() - start)
    times += time_output(grammar, chance)
  tokens, compilations = statistics.quantiles(times, n=1000), statistics.quantiles(compiled, n=100)
  return {
    "schemas": count,
    "tokens": len(times),
    "vocabulary": tokenizer.num_token_ids,
    "token_us": {"p50": tokens[499] * 1e6, "p99": tokens[989] * 1e6, "most": max(times) * 1e6},
    "compile_ms": {"p50": compilations[49] * 1e3, "p99": compilations[98] * 1e3},
    "machine": machine(),
  }


def main() -> int:
  """Runs the command line."""
  parser = CommandParser("python -m tools.bench.mask_times", __doc__)
  parser.add_argument("--model", type=pathlib.Path, default=ROOT / "models" / "demo", help="folder with a tokenizer")
  parser.add_argument("--schemas", type=positive_int, default=200, help="number of schemas")
  parser.add_argument("--seed", type=int, default=1, help="seed of the schemas and outputs")
  parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
  arguments = parser.parse_args()
  try:
    result = measure_masks(arguments.model, arguments.schemas, arguments.seed)
  except ConfigError as error:
    return parser.failed(error)
  if arguments.json:
    print(json.dumps(result))
    return 0
  token, compiling = result["token_us"], result["compile_ms"]
  print(f"{result['schemas']} schemas, {result['tokens']} tokens, a vocabulary of {result['vocabulary']}")
  print(f"token: p50 {token['p50']:.0f} us, p99 {token['p99']:.0f} us, most {token['most']:.0f} us")
  print(f"compiling: p50 {compiling['p50']:.1f} ms, p99 {compiling['p99']:.1f} ms")
  return 0


if __name__ == "__main__":
  sys.exit(main())
