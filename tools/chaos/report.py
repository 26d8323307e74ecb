"""What a chaos run claims and what came of it: rows, a table, JSON. Runs nothing."""

from collections.abc import Sequence
import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Row:
  """One claim.

  Attributes:
    claim: what must hold.
    target, measured: in words and figures.
    passed: whether it does.
    asked, ran: the count that the claim is about, and the count of this run; fewer is said in the table.
    scenario, seconds: filled in by the runner.
  """

  claim: str
  target: str
  measured: str
  passed: bool
  asked: int = 0
  ran: int = 0
  scenario: str = ""
  seconds: float = 0.0

  @property
  def verdict(self) -> str:
    """In a word or three."""
    if not self.passed:
      return "MISSED"
    return "holds" if self.ran >= self.asked else f"holds, {self.ran:,} of {self.asked:,}"


def none_of(claim: str, target: str, faults: Sequence[str], ran: int, asked: int) -> Row:
  """A row that holds if nothing is in `faults`; else it shows the first."""
  measured = f"{ran:,}: 0 faults" if not faults else f"{len(faults)} faults: {faults[0]}"
  return Row(claim, target, measured, not faults and ran > 0, asked, ran)


def show(rows: Sequence[Row], seconds: float, console: Console) -> None:
  """The table."""
  table = Table(title=f"chaos: {sum(row.passed for row in rows)} of {len(rows)} claims hold, {seconds:.0f} s")
  for name in ("scenario", "claim", "target", "measured", "verdict"):
    table.add_column(name, overflow="fold")
  before = ""
  for row in rows:
    if before and row.scenario != before:
      table.add_section()
    name = "" if row.scenario == before else f"{row.scenario} ({row.seconds:.0f} s)"
    table.add_row(name, row.claim, row.target, row.measured, row.verdict, style=None if row.passed else "bold red")
    before = row.scenario
  console.print(table)


def as_json(rows: Sequence[Row], seconds: float, about: dict[str, Any]) -> dict[str, Any]:
  """The same for machines."""
  return {
    **about,
    "seconds": round(seconds, 1),
    "passed": all(row.passed for row in rows),
    "rows": [dataclasses.asdict(row) | {"seconds": round(row.seconds, 1), "verdict": row.verdict} for row in rows],
  }
