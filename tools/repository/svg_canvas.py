"""Writes pictures as SVG text, in a light and a dark theme. Knows shapes, not their meaning; needs no library."""

import dataclasses
from xml.sax.saxutils import escape

# System fonts: an image inside a page may load none.
_FONT = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
_MONO = "ui-monospace, 'SF Mono', 'DejaVu Sans Mono', Menlo, monospace"


@dataclasses.dataclass(frozen=True)
class Theme:
  """Colors of a picture, as CSS values.

  Attributes:
    name: part of the file's name.
    ink, muted, line: text, secondary text, borders.
    page, panel, card: backgrounds, from back to front.
    accents: colors of different items, in a fixed order: blue, green, orange, purple.
  """

  name: str
  ink: str
  muted: str
  line: str
  page: str
  panel: str
  card: str
  accents: tuple[str, str, str, str]


LIGHT = Theme(
  "light",
  "#1f2328",
  "#59636e",
  "#c8d1da",
  "#ffffff",
  "#f6f8fa",
  "#ffffff",
  ("#0969da", "#1a7f37", "#bc4c00", "#8250df"),
)
DARK = Theme(
  "dark", "#f0f6fc", "#9198a1", "#3d444d", "#0d1117", "#151b23", "#212830", ("#4493f8", "#3fb950", "#db6d28", "#ab7df8")
)
THEMES = (LIGHT, DARK)


class Canvas:
  """Collects shapes, those in the back first; coordinates are pixels from the upper left corner."""

  def __init__(self, width: int, height: int, theme: Theme, title: str, description: str):
    """Args: title, description: the texts for screen readers."""
    self.theme = theme
    self._width, self._height = width, height
    self._markers: dict[str, str] = {}
    self._head = f"<title>{escape(title)}</title>\n<desc>{escape(description)}</desc>"
    self._shapes: list[str] = []
    self.add_box(0.5, 0.5, width - 1, height - 1, fill=theme.page, stroke=theme.page, radius=8)

  def add_box(
    self,
    x: float,
    y: float,
    width: float,
    height: float,
    *,
    fill: str = "none",
    stroke: str = "none",
    radius: float = 6,
    opacity: float = 1,
    dashed: bool = False,
  ) -> None:
    """Adds a rectangle with round corners."""
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    shade = f' fill-opacity="{opacity:g}"' if opacity != 1 else ""
    self._shapes.append(
      f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}" '
      f'stroke="{stroke}"{shade}{dash}/>'
    )

  def add_text(
    self,
    x: float,
    y: float,
    text: str,
    *,
    size: float = 13,
    color: str | None = None,
    anchor: str = "start",
    weight: int = 400,
    mono: bool = False,
  ) -> None:
    """Adds a line of text; `y` is its baseline, `anchor` is start, middle or end."""
    font = f' font-family="{_MONO}"' if mono else ""
    bold = f' font-weight="{weight}"' if weight != 400 else ""
    place = f' text-anchor="{anchor}"' if anchor != "start" else ""
    self._shapes.append(
      f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{color or self.theme.ink}"{place}{bold}{font}>'
      f"{escape(text)}</text>"
    )

  def add_lines(self, x: float, y: float, lines: tuple[str, ...], *, step: float = 17, **style: object) -> None:
    """Adds lines of text, one below the other; see add_text for the other arguments."""
    for index, line in enumerate(lines):
      self.add_text(x, y + step * index, line, **style)  # pyright: ignore[reportArgumentType]

  def add_card(self, x: float, y: float, width: float, height: float, head: str, lines: tuple[str, ...] = ()) -> None:
    """Adds a box with a heading and lines below it."""
    self.add_box(x, y, width, height, fill=self.theme.card, stroke=self.theme.line)
    self.add_text(x + 12, y + 22, head, weight=600)
    self.add_lines(x + 12, y + 41, lines, size=12, color=self.theme.muted)

  def add_arrow(self, points: tuple[tuple[float, float], ...], *, color: str | None = None, width: float = 1.6) -> None:
    """Adds a line through these points with an arrowhead at the last one."""
    stroke = color or self.theme.muted
    marker = self._markers.setdefault(stroke, f"head{len(self._markers)}")
    path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
    self._shapes.append(
      f'<path d="{path}" fill="none" stroke="{stroke}" stroke-width="{width:g}" stroke-linejoin="round" '
      f'marker-end="url(#{marker})"/>'
    )

  def add_line(
    self, x1: float, y1: float, x2: float, y2: float, *, color: str | None = None, dashed: bool = False
  ) -> None:
    """Adds a thin line."""
    dash = ' stroke-dasharray="4 4"' if dashed else ""
    self._shapes.append(
      f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color or self.theme.line}"{dash}/>'
    )

  def to_svg(self) -> str:
    """Returns the file's text."""
    heads = "".join(
      f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
      f'<path d="M0 0.5 L7.5 4 L0 7.5 z" fill="{color}"/></marker>'
      for color, name in self._markers.items()
    )
    return (
      f'<svg xmlns="http://www.w3.org/2000/svg" width="{self._width}" height="{self._height}" '
      f'viewBox="0 0 {self._width} {self._height}" font-family="{_FONT}" role="img">\n{self._head}\n'
      + (f"<defs>{heads}</defs>\n" if heads else "")
      + "\n".join(self._shapes)
      + "\n</svg>\n"
    )
