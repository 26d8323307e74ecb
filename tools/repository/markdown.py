"""Formats Markdown for the generated pages. Knows no page."""

from collections.abc import Iterable, Sequence


def make_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """Returns a table; escapes bars in cells and turns line breaks into spaces."""
  lines = [head, ["---"] * len(head), *rows]
  return "\n".join(f"| {' | '.join(_escape(cell) for cell in line)} |" for line in lines)


def _escape(cell: str) -> str:
  return " ".join(cell.split()).replace("|", "\\|")


def end_sentence(text: str) -> str:
  """Returns the text with a period, unless it has an ending or is empty."""
  return text if not text or text[-1] in ".!?:" else f"{text}."
