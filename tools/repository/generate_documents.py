"""Writes every generated page and picture of docs/. `make docs` runs it; a test compares the files.

python -m tools.repository.generate_documents
"""

from collections.abc import Callable
import functools
import pathlib

from tools.measure import ROOT
from tools.repository import (
  generate_error_reference,
  generate_flag_reference,
  generate_grpc_reference,
  generate_http_reference,
  generate_metrics_reference,
  generate_router_reference,
  generate_schema_reference,
)
from tools.repository.draw_architecture import draw_architecture, draw_request_path
from tools.repository.draw_peer_chart import draw_peer_chart
from tools.repository.svg_canvas import THEMES, Theme

IMAGES = ROOT / "docs" / "images"
_PICTURES: dict[str, Callable[[Theme], str]] = {
  "architecture": draw_architecture,
  "request-path": draw_request_path,
  "peers": draw_peer_chart,
}
DOCUMENTS: dict[pathlib.Path, Callable[[], str]] = {
  generate_flag_reference.PAGE: generate_flag_reference.flag_reference,
  generate_http_reference.PAGE: generate_http_reference.http_reference,
  generate_grpc_reference.PAGE: generate_grpc_reference.grpc_reference,
  generate_metrics_reference.PAGE: generate_metrics_reference.metrics_reference,
  generate_error_reference.PAGE: generate_error_reference.error_reference,
  generate_router_reference.PAGE: generate_router_reference.router_reference,
  generate_schema_reference.PAGE: generate_schema_reference.schema_reference,
  **{
    IMAGES / f"{name}-{theme.name}.svg": functools.partial(draw, theme)
    for name, draw in _PICTURES.items()
    for theme in THEMES
  },
}
"""Each file that the code makes, and what makes its text."""


def main() -> None:
  """Runs the command line."""
  for file, make in DOCUMENTS.items():
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(make(), "utf-8")
    print(file.relative_to(ROOT))


if __name__ == "__main__":
  main()
