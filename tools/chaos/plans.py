"""Fault plans of the scenarios, in the format of tools/chaos/server/faults.py. Starts nothing."""

from collections.abc import Sequence
from typing import Any


def hold_back(seconds: float) -> dict[str, Any]:
  """Delays output of requests named unsent-* or unsaid-*: each token of the first, and each ending of the second.

  Args: seconds: delay for each request in a step; the tokens of one step leave together.
  """
  return {
    "faults": [
      {"point": "emit", "action": "delay", "seconds": seconds, "request": "unsent-*"},
      {"point": "final_emit", "action": "delay", "seconds": seconds, "request": "unsaid-*"},
    ]
  }


def raise_after(num_steps: int) -> dict[str, Any]:
  """Makes a step's values fail, which fails the whole engine."""
  return {"faults": [{"point": "step_end", "action": "raise", "nth": num_steps}]}


def poison(names: Sequence[str]) -> dict[str, Any]:
  """Makes single requests fail, by the beginning of their names: NaN in a page, or an exception.

  Args: names: some of "nan", "admit", "detokenize", "constraint"; a dash and a number follow each.
  """
  at = {"nan": ("step_begin", "nan")}
  return {
    "faults": [
      {"point": point, "action": action, "request": f"{name}-*"}
      for name in names
      for point, action in (at.get(name, (name, "raise")),)
    ]
  }
