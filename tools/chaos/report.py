"""The checks of a chaos run and their results: rows, a table, JSON. Runs nothing."""

from collections.abc import Sequence
import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Row:
  """One check.

  Attributes:
    check: the statement to check.
    target, measured: text and figures.
    passed: whether the check passed.
    `asked`, `ran`: the count that the check requires, and this run's count; the table shows a smaller one.
    scenario, seconds: set by the runner.
  """

  check: str
  target: str
  measured: str
  passed: bool
  asked: int = 0
  ran: int = 0
  scenario: str = ""
  seconds: float = 0.0

  @property
  def verdict(self) -> str:
    """The verdict in a few words."""
    if not self.passed:
      return "MISSED"
    return "holds" if self.ran >= self.asked else f"holds, {self.ran:,} of {self.asked:,}"


def none_of(check: str, target: str, faults: Sequence[str], ran: int, asked: int) -> Row:
  """Returns a row that passes if `faults` is empty; else it shows the first."""
  measured = f"{ran:,}: 0 faults" if not faults else f"{len(faults)} faults: {faults[0]}"
  return Row(check, target, measured, not faults and ran > 0, asked, ran)


def show(rows: Sequence[Row], seconds: float, console: Console, title: str = "chaos") -> None:
  """Prints the table."""
  table = Table(title=f"{title}: {sum(row.passed for row in rows)} of {len(rows)} checks passed, {seconds:.0f} s")
  for name in ("scenario", "check", "target", "measured", "verdict"):
    table.add_column(name, overflow="fold")
  before = ""
  for row in rows:
    if before and row.scenario != before:
      table.add_section()
    name = "" if row.scenario == before else f"{row.scenario} ({row.seconds:.0f} s)"
    table.add_row(name, row.check, row.target, row.measured, row.verdict, style=None if row.passed else "bold red")
    before = row.scenario
  console.print(table)


def as_json(rows: Sequence[Row], seconds: float, about: dict[str, Any]) -> dict[str, Any]:
  """Returns the rows as JSON."""
  return {
    **about,
    "seconds": round(seconds, 1),
    "passed": all(row.passed for row in rows),
    "rows": [dataclasses.asdict(row) | {"seconds": round(row.seconds, 1), "verdict": row.verdict} for row in rows],
  }
