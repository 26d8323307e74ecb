"""Writes docs/reference/flags.md, the page of the server's flags, from the declarations of settings.

python -m tools.repository.generate_flag_reference
"""

from server.flags import declared_flags
from server.setting_text import default_text
from tools.measure import ROOT

PAGE = ROOT / "docs" / "reference" / "flags.md"
_HEAD = """# Flags of the server

`python -m tools.repository.generate_flag_reference` writes this page from the settings that the code declares; a test
compares. `python -m server.main --help` shows the flags marked with a star. A boolean flag is
set by its name, and cleared by its name with `no` before it: `--deterministic`, `--nodeterministic`. `--flagfile=FILE`
reads flags from a file, one a line.
"""


def flag_reference() -> str:
  """Returns the page's text."""
  lines, group = [_HEAD], ""
  for declared in declared_flags():
    found = declared.setting
    if found.group != group:
      group = found.group
      lines.append(f"\n## {group}\n\n| flag | default | meaning |\n| --- | --- | --- |")
    default = f"`{text}`" if (text := default_text(declared)) else ""
    unit = f" {found.unit}" if found.unit and default else ""
    limits = f" Allowed: {found.limits()}." if found.limits() else ""
    lines.append(f"| `--{declared.name}`{' *' if found.common else ''} | {default}{unit} | {found.help}{limits} |")
  return "\n".join(lines) + "\n"


def main() -> None:
  """Runs the command line."""
  PAGE.parent.mkdir(parents=True, exist_ok=True)
  PAGE.write_text(flag_reference())


if __name__ == "__main__":
  main()
