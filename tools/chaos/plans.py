"""Fault plans of the scenarios, in the format of tools/chaos/server/faults.py. Starts nothing."""

from collections.abc import Sequence
from typing import Any


def hold_back(seconds: float) -> dict[str, Any]:
  """Requests called unsent-* or unsaid-*: each token of the first, and each ending of the second, waits on its way out.

  Args: seconds: for each of them in a step; the tokens of one step leave together.
  """
  return {
    "faults": [
      {"point": "emit", "action": "delay", "seconds": seconds, "request": "unsent-*"},
      {"point": "final_emit", "action": "delay", "seconds": seconds, "request": "unsaid-*"},
    ]
  }


def raise_after(num_steps: int) -> dict[str, Any]:
  """The values of a step cannot be had: all of the engine fails."""
  return {"faults": [{"point": "step_end", "action": "raise", "nth": num_steps}]}


def poison(names: Sequence[str]) -> dict[str, Any]:
  """Requests that go wrong alone, by the beginning of their names: NaN in a page, or an exception on the way.

  Args: names: of "nan", "admit", "detokenize", "constraint"; each is followed by a dash and a number.
  """
  at = {"nan": ("step_begin", "nan")}
  return {
    "faults": [
      {"point": point, "action": action, "request": f"{name}-*"}
      for name in names
      for point, action in (at.get(name, (name, "raise")),)
    ]
  }
