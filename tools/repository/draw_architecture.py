"""Renders the pictures of docs/images that explain how Sluice works. May not state a figure that was measured.

`make docs` writes the files; a test compares them with this module's output.
"""

from tools.repository.svg_canvas import Canvas, Theme

# The rung in the pictures, and its rows: (letter, tokens), and one token of padding.
_ROWS = (("A", 1), ("B", 1), ("C", 5))
_RUNG = 8
_LADDER = (8, 32, 64, 256, 512)


def draw_architecture(theme: Theme) -> str:
  """Returns a picture of clients, host process and device with one request's path, as SVG text."""
  canvas = Canvas(
    960,
    412,
    theme,
    "How Sluice serves a request",
    "Clients call the front end over gRPC or HTTP. The scheduler plans each step on token counts, the shape ladder "
    "picks a compiled step, and the device runs it. Tokens come back one step later and stream to the client.",
  )
  blue, green, *_ = theme.accents
  # Clients.
  canvas.add_text(16, 34, "Clients", size=14, weight=600)
  for y, head, line in (
    (50, "gRPC", "sluice.v1"),
    (122, "HTTP", "OpenAI's API"),
    (194, "Browser", "live page"),
    (266, "Python", "LLM, in process"),
  ):
    canvas.add_card(16, y, 118, 58, head, (line,))
  # The host.
  canvas.add_box(178, 12, 458, 388, fill=theme.panel, stroke=theme.line, radius=10)
  canvas.add_text(194, 34, "Host process: pure Python scheduler", size=14, weight=600)
  canvas.add_card(194, 50, 124, 274, "Front end")
  for y, head, lines, color in (
    (96, "request", ("check fields", "apply limits", "make token ids"), blue),
    (204, "answer", ("make text", "stream it"), green),
  ):
    canvas.add_text(206, y, head, size=12, weight=600, color=color)
    canvas.add_lines(206, y + 18, lines, size=12, color=theme.muted)
  canvas.add_card(352, 50, 270, 124, "Scheduler", ("plans on counts: how many, not which",))
  canvas.add_card(352, 206, 270, 178, "Shape ladder", ("a step takes the lowest rung that holds it",))
  _draw_rows(canvas, 364, 106)
  _draw_ladder(canvas, 364, 262)
  # The device.
  canvas.add_box(726, 12, 222, 388, fill=theme.panel, stroke=theme.line, radius=10)
  canvas.add_text(740, 34, "Device: CPU, GPU or TPU", size=14, weight=600)
  for shift in (16, 8):
    canvas.add_box(740 + shift, 62 - shift / 2, 194 - shift, 60, fill=theme.card, stroke=theme.line)
  canvas.add_card(
    740, 66, 194, 104, "Compiled step", ("one a rung, compiled at start", "embed, layers, logits,", "sample")
  )
  canvas.add_card(740, 202, 194, 118, "KV cache", ("blocks, a table for each row",))
  _draw_blocks(canvas, 751, 258)
  canvas.add_card(740, 332, 194, 56, "Last token of each slot")
  _draw_slots(canvas, 751, 364)
  # The path of a request.
  for y in (79, 151, 223):
    canvas.add_arrow(((136, y), (192, y)))
  canvas.add_arrow(((136, 295), (157, 295), (157, 348), (335, 348), (335, 158), (350, 158)))
  canvas.add_arrow(((320, 104), (350, 104)), color=blue)
  canvas.add_arrow(((350, 130), (320, 130)), color=green)
  canvas.add_arrow(((487, 176), (487, 204)), color=blue)
  canvas.add_text(497, 195, "tokens and rows", size=12, color=theme.muted)
  canvas.add_arrow(((624, 296), (681, 296), (681, 138), (738, 138)), color=blue)
  canvas.add_arrow(((738, 100), (624, 100)), color=green)
  canvas.add_lines(681, 74, ("tokens, one", "step later"), step=15, size=12, color=green, anchor="middle")
  canvas.add_lines(681, 316, ("one array", "a step"), step=15, size=12, color=blue, anchor="middle")
  canvas.add_arrow(((837, 172), (837, 200)))
  return canvas.to_svg()


def _colors(theme: Theme) -> dict[str, str]:
  blue, green, orange, purple = theme.accents
  return {"A": blue, "B": green, "C": orange, "D": purple}


def _draw_rows(canvas: Canvas, x: float, y: float) -> None:
  """Adds the rows of a step, as the scheduler counts them."""
  colors = _colors(canvas.theme)
  for (name, tokens), what in zip(_ROWS, ("decode", "decode", "prefill chunk"), strict=True):
    for index in range(tokens):
      canvas.add_box(x + 15 * index, y, 12, 12, fill=colors[name], radius=3)
    canvas.add_text(x + 92, y + 11, f"{name}: {what}, {tokens} token{'s' * (tokens > 1)}", size=12)
    y += 21


def _draw_ladder(canvas: Canvas, x: float, y: float) -> None:
  """Adds the rungs, the lowest filled with the rows."""
  colors, theme = _colors(canvas.theme), canvas.theme
  for index, tokens in enumerate(_LADDER):
    width = 8 * 15 + 1 + 23 * index
    chosen = tokens == _RUNG
    canvas.add_box(x, y, width, 17, fill=theme.panel, stroke=theme.accents[0] if chosen else theme.line, radius=4)
    if chosen:
      cells = [name for name, count in _ROWS for _ in range(count)]
      for cell, name in enumerate(cells):
        canvas.add_box(x + 2.5 + 15 * cell, y + 2.5, 12, 12, fill=colors[name], radius=3)
      for cell in range(len(cells), _RUNG):
        canvas.add_box(x + 3 + 15 * cell, y + 3, 11, 11, stroke=theme.muted, radius=3, dashed=True)
    canvas.add_text(x + width + 8, y + 13, str(tokens), size=12, color=theme.ink if chosen else theme.muted)
    y += 23


def _draw_blocks(canvas: Canvas, x: float, y: float) -> None:
  """Adds the block pool, each block in the color of its row."""
  colors = _colors(canvas.theme)
  held = "AACCCB.CAA.BBCC...AAB.CC.....CC.BB...A."
  for index, name in enumerate(held):
    column, row = index % 13, index // 13
    _draw_cell(canvas, x + 13 * column, y + 17 * row, colors.get(name))


def _draw_slots(canvas: Canvas, x: float, y: float) -> None:
  """Adds the slots with a token each; some are free."""
  colors = _colors(canvas.theme)
  for index, name in enumerate("ABC.........."):
    _draw_cell(canvas, x + 13 * index, y, colors.get(name))


def _draw_cell(canvas: Canvas, x: float, y: float, color: str | None) -> None:
  """Adds a block or a slot in the color of its row."""
  canvas.add_box(x, y, 10, 13, fill=color or "none", stroke=color or canvas.theme.line, radius=2)


def draw_request_path(theme: Theme) -> str:
  """Returns a picture of one request over time, with lanes for front end, engine thread and device, as SVG text."""
  canvas = Canvas(
    960,
    336,
    theme,
    "One request against time",
    "Three lanes: front end, engine thread and device. While the device computes step n minus 1, the engine plans and "
    "launches step n. It commits the tokens of step n minus 1 after that.",
  )
  blue, green, orange, _ = theme.accents
  lanes = (("Front end", "event loop"), ("Engine", "one thread"), ("Device", "compiled steps"))
  for index, (name, what) in enumerate(lanes):
    y = 16 + 100 * index
    canvas.add_box(12, y, 936, 86, fill=theme.panel, stroke=theme.line, radius=8)
    canvas.add_text(26, y + 38, name, size=14, weight=600)
    canvas.add_text(26, y + 57, what, size=12, color=theme.muted)

  def add_task(lane: int, x: float, width: float, number: str, head: str, line: str, color: str) -> None:
    y = 16 + 100 * lane + 17
    canvas.add_box(x, y, width, 52, fill=theme.card, stroke=color, radius=6)
    canvas.add_text(x + 9, y + 22, f"{number} {head}".strip(), size=12.5, weight=600)
    canvas.add_text(x + 9, y + 40, line, size=11.5, color=theme.muted)

  add_task(0, 130, 128, "1", "admit, parse", "check every field", blue)
  add_task(0, 272, 104, "2", "tokenize", "text to ids", blue)
  add_task(0, 760, 172, "7", "detokenize, stream", "whole characters only", green)
  add_task(1, 320, 124, "3", "schedule n", "counts, blocks", blue)
  add_task(1, 458, 128, "4", "pack, launch n", "one int32 array", blue)
  add_task(1, 640, 164, "6", "commit n - 1", "values, ends, prefixes", green)
  add_task(2, 130, 440, "", "step n - 1", "launched before; its tokens are still unknown to the host", orange)
  add_task(2, 594, 338, "5", "step n", "embed, layers, logits, sample, last_tokens[slot]", orange)
  canvas.add_arrow(((260, 59), (270, 59)), color=blue)
  canvas.add_arrow(((350, 86), (350, 131)), color=blue)
  canvas.add_arrow(((446, 159), (456, 159)), color=blue)
  canvas.add_arrow(((576, 186), (576, 210), (604, 210), (604, 231)), color=blue)
  canvas.add_arrow(((560, 232), (560, 202), (652, 202), (652, 187)), color=green)
  canvas.add_arrow(((786, 132), (786, 87)), color=green)
  canvas.add_text(948, 328, "time", size=12, color=theme.muted, anchor="end")
  canvas.add_arrow(((130, 324), (910, 324)))
  return canvas.to_svg()
