"""Chooses settings to try and the best of them, and merges them into tuning.py. Pure: measures nothing, imports no jax.

Varies one factor at a time and keeps the best so far of the others (coordinate descent). If time runs short, the sweep
leaves out the least promising factors.
"""

import ast
from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

from tools.gpu.protocol import Job, Record

_GAIN = 0.99  # less than a hundredth is noise


@dataclasses.dataclass(frozen=True)
class Factor:
  """Settings that are varied together.

  Attributes:
    name: for the table.
    values: each some fields of tuning.Tuning, or {"block_size": tokens}.
    cases: (op, spec) to time; their geometric mean decides.
  """

  name: str
  values: tuple[dict[str, Any], ...]
  cases: tuple[tuple[str, str], ...]


_DECODES = (("decode", "decode 32 x 4096"), ("decode", "decode 64 zipf"), ("decode", "decode 1 x 16384"))
_PREFILLS = (("prefill", "prefill 1 x 4096"), ("prefill", "prefill 512 of 4096"))
_WRITES = (("write", "decode 64 x 1024"), ("write", "prefill 1 x 4096"))

FACTORS = (
  Factor("split", tuple({"split_tokens": n} for n in (256, 512, 1024, 128, 2048)), _DECODES),
  Factor(
    "decode ring",
    tuple(
      {"decode_stages": stages, "decode_ctas_per_sm": blocks}
      for stages, blocks in ((2, 2), (4, 1), (5, 1), (3, 1), (2, 1))
    ),
    _DECODES,
  ),
  Factor(
    "prefill ring",
    tuple(
      {"prefill_stages": stages, "prefill_tile_keys": keys}
      for stages, keys in ((2, 128), (3, 64), (2, 64), (4, 64), (1, 128))
    ),
    _PREFILLS,
  ),
  Factor("write", tuple({"write_tokens": n} for n in (8, 4, 16, 32, 64)), _WRITES),
  Factor("lowering", ({"lowering": "Warpgroup"}, {"lowering": "Lane"}), _PREFILLS),
  Factor("block size", tuple({"block_size": n} for n in (64, 128, 32, 16)), (*_DECODES[:2], _PREFILLS[0])),
)


def jobs(factor: Factor, current: Mapping[str, Any]) -> list[Job]:
  """Returns the jobs: every value, and the present one, so that they are compared within minutes.

  Args:
    current: all fields of Tuning, and block_size.
  """
  tried = [dict(current)]
  for value in factor.values:
    settings = dict(current) | value
    if settings not in tried:
      tried.append(settings)
  return [
    {
      "kind": "time",
      "op": op,
      "spec": spec,
      "block_size": settings["block_size"],
      "tuning": {name: value for name, value in settings.items() if name != "block_size"},
    }
    for settings in tried
    for op, spec in factor.cases
  ]


def _settings(job: Job) -> dict[str, Any]:
  return job["tuning"] | {"block_size": job["block_size"]}


def choose(
  factor: Factor, current: Mapping[str, Any], records: Sequence[Record]
) -> tuple[dict[str, Any], float | None]:
  """Returns the settings to go on with, and their time over that of `current`; None if unknown.

  A setting counts only if every case of the factor was timed and right.
  """
  times: dict[str, dict[tuple[str, str], float]] = {}
  known: dict[str, dict[str, Any]] = {}
  for record in records:
    if record["ok"] and "us" in record["figures"]:
      settings = _settings(record["job"])
      key = repr(sorted(settings.items()))
      known[key] = settings
      times.setdefault(key, {})[record["job"]["op"], record["job"]["spec"]] = record["figures"]["us"]
  here = times.get(repr(sorted(current.items())), {})
  if set(here) != set(factor.cases):
    return dict(current), None
  best, least = dict(current), 1.0
  for key, found in times.items():
    if set(found) == set(factor.cases):
      ratio = math.exp(sum(math.log(found[case] / here[case]) for case in factor.cases) / len(factor.cases))
      if ratio < min(least, _GAIN):
        best, least = known[key], ratio
  return best, least


def merged(source: str, device_kind: str, head_dim: int, block_size: int, tuning: Mapping[str, Any]) -> str:
  """Returns tuning.py with an entry of `_TABLE` replaced or added, and the rest unchanged.

  Args:
    source: its text.
    tuning: all fields of Tuning; `lowering` by name.

  Raises:
    ValueError: the source has no such table.
  """
  for node in ast.parse(source).body:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "_TABLE":
      table = node.value
      break
  else:
    raise ValueError("tuning.py: no _TABLE is assigned")
  if not isinstance(table, ast.Dict):
    raise ValueError("tuning.py: _TABLE is not a dict literal")
  fields = "".join(
    f"    {name}={f'plgpu.LoweringSemantics.{value}' if name == 'lowering' else repr(value)},\n"
    for name, value in tuning.items()
  )
  key = device_kind, head_dim, block_size
  entry = f'  ("{device_kind}", {head_dim}, {block_size}): Tuning(\n{fields}  ),\n'
  lines = source.splitlines(keepends=True)
  for at, value in zip(table.keys, table.values, strict=True):
    if at is not None and ast.literal_eval(at) == key:
      return "".join([*lines[: at.lineno - 1], entry, *lines[value.end_lineno or value.lineno :]])
  end = (table.end_lineno or table.lineno) - 1
  return "".join([*lines[:end], entry, *lines[end:]])
