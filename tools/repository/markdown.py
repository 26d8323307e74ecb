"""Tables of Markdown, for the pages that the code makes. Knows no page."""

from collections.abc import Iterable, Sequence


def make_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """A table; a bar in a cell is escaped, a line break becomes a blank."""
  lines = [head, ["---"] * len(head), *rows]
  return "\n".join(f"| {' | '.join(_escape(cell) for cell in line)} |" for line in lines)


def _escape(cell: str) -> str:
  return " ".join(cell.split()).replace("|", "\\|")


def end_sentence(text: str) -> str:
  """The text with a full stop, unless it has an ending or is empty."""
  return text if not text or text[-1] in ".!?:" else f"{text}."
